//! Phases with and without events, for `--cost`: the same operations again and again, while the shim lets the events go to
//! nothing, to empty callbacks or to the plugin under test.

use super::super::cost::{CostPlan, Phase, PhaseTimes};
use super::super::cuda::Graph;
use super::super::error::BenchError;
use super::super::op::{Placement, Shape};
use super::super::result::{SizeResult, Timing};
use super::super::shim::{EventMode, Shim, ShimFacts};
use super::{Job, Worker};
use std::time::Instant;

/// One size, and what is captured for it.
#[derive(Debug)]
struct PhaseJob<'j> {
    job: Job<'j>,
    plan: CostPlan,
    /// One for each [`EventMode`], in their order: NCCL captures its event mask with the operations.
    graphs: Option<[Vec<Graph>; 3]>,
    what: String,
}

impl PhaseJob<'_> {
    fn graphs(&self, mode: EventMode) -> Option<&[Graph]> {
        self.graphs.as_ref().and_then(|g| g.get(mode as usize)).map(Vec::as_slice)
    }
}

impl Worker<'_> {
    /// Measures all sizes.
    pub(super) fn sweep_phases(
        &mut self,
        plan: CostPlan,
        on: &mut dyn FnMut(SizeResult),
    ) -> Result<(), BenchError> {
        let shared = self.shared;
        if self.thread == 0 {
            self.shim = Some(Shim::find(shared.nccl.version())?);
        }
        for shape in &shared.shapes {
            let out_of_place = self.measure_phases(shape, plan)?;
            if self.thread == 0 {
                let (size_bytes, count) = (shape.size_bytes, shape.count);
                on(SizeResult { size_bytes, count, out_of_place, in_place: None });
            }
        }
        // NCCL closes its communicators without events.
        self.switch(EventMode::Off)?;
        Ok(())
    }

    /// Measures one size: a round that does not count, and those that do.
    fn measure_phases(&self, shape: &Shape, plan: CostPlan) -> Result<Timing, BenchError> {
        let s = &self.shared.settings;
        let what = format!("{} of {} bytes, with and without events", s.collective, shape.size_bytes);
        self.beat().doing(what.clone());
        let job = self.job(shape, Placement::OutOfPlace);
        let mut job = PhaseJob { job, plan, graphs: None, what };
        if let Some(operations) = s.graph {
            job.graphs = Some([
                self.capture_with(&job, EventMode::Off, operations)?,
                self.capture_with(&job, EventMode::Nccl, operations)?,
                self.capture_with(&job, EventMode::Plugin, operations)?,
            ]);
        }
        let (mut nccl, mut plugin) = (Vec::new(), Vec::new());
        for round in 0..=plan.rounds {
            // Each mode goes first in every other round.
            let order = if round % 2 == 0 {
                [EventMode::Nccl, EventMode::Plugin]
            } else {
                [EventMode::Plugin, EventMode::Nccl]
            };
            for mode in order {
                let measured = Phase {
                    before_ns: self.phase(&job, EventMode::Off)?,
                    events_ns: self.phase(&job, mode)?,
                    after_ns: self.phase(&job, EventMode::Off)?,
                };
                // In the first round NCCL connects the ranks, and the plugin meets its first operations.
                if round > 0 {
                    if mode == EventMode::Nccl { &mut nccl } else { &mut plugin }.push(measured);
                }
            }
        }
        let facts = self.switch(EventMode::Off)?;
        let phases = PhaseTimes { nccl, plugin, facts };
        let each = u64::from(s.graph.unwrap_or(1));
        let operations = u64::from(plan.calls).div_ceil(each) * each * u64::from(s.batch);
        let timing = self.timing(shape, operations, phases.without_ns());
        Ok(Timing { phases: Some(phases), ..timing })
    }

    /// Switches the events of all processes. All threads have waited for their streams before.
    fn switch(&self, mode: EventMode) -> Result<ShimFacts, BenchError> {
        // Another thread's operations have events of their own until it comes here.
        self.shared.meet(self.thread)?;
        let facts = self.shim.as_ref().map(|shim| shim.set(mode)).transpose()?;
        self.shared.start_together(self.thread)?;
        Ok(facts.unwrap_or_default())
    }

    fn capture_with(
        &self,
        job: &PhaseJob<'_>,
        mode: EventMode,
        operations: u32,
    ) -> Result<Vec<Graph>, BenchError> {
        self.switch(mode)?;
        // NCCL connects the ranks in the first operation of a kind, which must not be captured.
        self.repeat(&job.job, None, 1, &job.what)?;
        let graphs = self.capture(&job.job, operations, &job.what)?;
        self.wait(&job.what)?;
        Ok(graphs)
    }

    /// Runs one phase, and returns the time of an operation on the slowest rank, in ns.
    fn phase(&self, job: &PhaseJob<'_>, mode: EventMode) -> Result<f64, BenchError> {
        self.switch(mode)?;
        let graphs = job.graphs(mode);
        let each = self.shared.settings.graph.unwrap_or(1);
        self.repeat(&job.job, graphs, job.plan.warmup().div_ceil(each), &job.what)?;
        if mode == EventMode::Off
            && let Some(shim) = &self.shim
        {
            // The phase before had events, and NCCL has reported the last of them by now.
            self.shared.check_failed()?;
            shim.drop_late()?;
        }
        let launches = job.plan.calls.div_ceil(each);
        self.shared.start_together(self.thread)?;
        let start = Instant::now();
        self.repeat(&job.job, graphs, launches, &job.what)?;
        let elapsed_ns = start.elapsed().as_nanos() as f64;
        let operations = f64::from(launches) * f64::from(each) * f64::from(self.shared.settings.batch);
        self.shared.combine(self.thread, elapsed_ns / operations, f64::max)
    }
}
