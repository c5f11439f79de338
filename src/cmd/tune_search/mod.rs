//! `ringwatch tune --search` and `--verify`: rules measured against NCCL's default on these GPUs.

mod machine;
mod output;
mod processes;

use super::FINDINGS;
use crate::bench::nccl::Nccl;
use crate::bench::sizes::sweep;
use crate::bench::{
    Collective, DType, Environment, Launch, RedOp, Settings, Step, count_ranks, parse_bytes, version_text,
};
use crate::cli::Tune;
use crate::tune::search::{
    Expected, JudgedRule, MeasuredOn, RuleStatus, SearchGoal, SearchResult, Space, Verified, candidates,
    expected, rule_file, search, sizes_of, verified_file, verify,
};
use crate::tune::{Rule, Rules};
use anyhow::{Context, bail};
pub(super) use machine::collective_of;
use machine::{GpuMachine, Offers, number_of, offers};
use output::{Destination, ProgressLine, print_line};
use processes::RankProcesses;
use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

/// The tuner's tables of NCCL before this tell nothing of the communicator, so that ranks cannot agree.
const OLDEST_NCCL: i32 = 22_700;
/// From here on the tuner learns of the communicator without a profiler.
const NCCL_WITH_ID: i32 = 22_800;
const TIME_LIMIT: Duration = Duration::from_secs(15 * 60);
const CONFIDENCE_PERCENT: f64 = 99.0;
const MILLIS: u32 = 10;
const RAISED_CHANNELS: u32 = 32;
/// Time until the processes of a batch are ready, for the time that is expected.
const START: Duration = Duration::from_secs(8);
/// Variables under which NCCL's own choice is not free.
const BINDING: [&str; 4] = ["NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"];

pub(super) fn run(o: &Tune) -> anyhow::Result<u8> {
    let base = settings(o)?;
    if let Some(other) = std::env::var_os("NCCL_TUNER_PLUGIN").filter(|v| !v.is_empty()) {
        bail!("NCCL_TUNER_PLUGIN is set to {}: unset it; the default has no tuner", other.display());
    }
    let launch = Launch::read(|name| std::env::var(name).ok(), 0)?;
    let nccl = Nccl::open(base.nccl.as_deref())?.version();
    if nccl < OLDEST_NCCL {
        bail!("NCCL {}: a search needs 2.27 or later, where ranks can agree on rules", version_text(nccl));
    }
    let ranks = count_ranks(&base, launch.as_ref())?;
    if ranks < 2 {
        bail!("there is one rank, about which NCCL asks no tuner; a search needs two GPUs");
    }
    let mut processes = RankProcesses::gather(base, launch, nccl < NCCL_WITH_ID)?;
    if !processes.is_leader() {
        return processes.follow().map(|()| 0);
    }
    let mut session = MeasuringRun { o, processes, ranks, begun: Instant::now() };
    // The others wait: what fails from here on has to reach them.
    match session.lead() {
        Ok(code) => session.processes.dismiss().map(|()| code),
        Err(e) => {
            session.processes.give_up(&format!("{e:#}"));
            Err(e)
        }
    }
}

/// The settings of all measurements.
fn settings(o: &Tune) -> anyhow::Result<Settings> {
    let m = &o.measuring;
    let dtype: DType = m.dtype.as_deref().unwrap_or("float").parse().map_err(anyhow::Error::msg)?;
    let sizes = sizes(o)?;
    Ok(Settings {
        collective: Collective::AllReduce,
        dtype,
        redop: RedOp::Sum,
        root: 0,
        min_bytes: sizes.first().copied().unwrap_or(1),
        max_bytes: sizes.last().copied().unwrap_or(1),
        step: Step::Factor(2),
        sizes,
        iters: m.iters.unwrap_or(1000),
        warmup_iters: 5,
        millis: Some(m.millis.unwrap_or(MILLIS)),
        check: false,
        threads: m.threads.unwrap_or(u32::from(m.gpus.is_some())),
        gpus: m.gpus.unwrap_or(1),
        graph: None,
        batch: 1,
        blocking: false,
        // A ratio must not be one of CPUs.
        pin: true,
        events: false,
        repeat: 1,
        cost: None,
        timeout_s: m.timeout.unwrap_or(60),
        nccl: m.nccl.clone(),
        cuda: m.cuda.clone(),
    })
}

/// The sweep that was asked for.
fn sizes(o: &Tune) -> anyhow::Result<Vec<u64>> {
    let m = &o.measuring;
    let bytes = |name: &str, text: &Option<String>, usual: u64| match text {
        Some(text) => parse_bytes(text).map_err(|e| anyhow::anyhow!("{name}: {e}")),
        None => Ok(usual),
    };
    let min = bytes("--min-bytes", &m.min_bytes, 4 << 10)?;
    let max = bytes("--max-bytes", &m.max_bytes, (256 << 20).max(min))?;
    Ok(sweep(
        min.min(if m.min_bytes.is_none() { max } else { min }),
        max,
        Step::Factor(m.step_factor.unwrap_or(4)),
    )?)
}

/// NCCL's variables that may change its choices.
fn variables(e: &Environment) -> Vec<String> {
    let is_other =
        |name: &str| ["NCCL_TUNER", "NCCL_PROFILER", "NCCL_DEBUG"].iter().any(|p| name.starts_with(p));
    let own = e.variables.iter().filter(|(name, _)| name.starts_with("NCCL_") && !is_other(name));
    own.map(|(name, value)| format!("{name}={}", value.escape_debug())).collect()
}

/// A search or a verification on rank 0.
struct MeasuringRun<'a> {
    o: &'a Tune,
    processes: RankProcesses,
    ranks: u32,
    begun: Instant,
}

impl<'a> MeasuringRun<'a> {
    fn lead(&mut self) -> anyhow::Result<u8> {
        let destination = Destination::check(self.o.output.as_deref())?;
        match &self.o.verify {
            Some(path) => self.verify(&Rules::load(path)?, path, &destination),
            None => self.search(&destination),
        }
    }

    fn confidence(&self) -> f64 {
        self.o.measuring.confidence.unwrap_or(CONFIDENCE_PERCENT) / 100.0
    }

    fn limit(&self) -> Duration {
        self.o.measuring.time_limit.unwrap_or(TIME_LIMIT)
    }

    fn goal(&self, operations: usize, operations_left: u32) -> SearchGoal {
        let elapsed = self.begun.elapsed();
        let share = self.limit().saturating_sub(elapsed) / operations_left.max(1);
        SearchGoal { confidence: self.confidence(), operations, deadline: elapsed + share }
    }

    fn surroundings(&self, e: &Environment) -> MeasuredOn {
        let name = e.ranks.first().map_or("GPU", |r| r.name.as_str());
        MeasuredOn {
            nccl: version_text(e.nccl_version),
            gpus: format!("{} x {name}", e.ranks.len()),
            confidence: output::percent(self.confidence()),
            variables: variables(e),
        }
    }

    /// Values of `NCCL_MIN_NCHANNELS` to search under.
    fn environments(&self) -> Vec<Option<u32>> {
        let asked = &self.o.measuring.raise_channels;
        let raised: BTreeSet<u32> = if asked.is_empty() {
            BTreeSet::from([RAISED_CHANNELS])
        } else {
            asked.iter().copied().collect()
        };
        let is_set = std::env::var_os("NCCL_MIN_NCHANNELS").is_some();
        let raised = raised.into_iter().filter(|n| *n > 0 && !is_set);
        std::iter::once(None).chain(raised.map(Some)).collect()
    }

    /// Learns what NCCL offers at some sizes.
    fn offers(&mut self, collective: Collective, sizes: Vec<u64>) -> anyhow::Result<Offers> {
        let offers = offers(&mut self.processes, collective, sizes)?;
        for bytes in &offers.unasked {
            print_line(&format!("NCCL asks no tuner about {collective} of {bytes} bytes; it is left out"));
        }
        let nodes = offers.environment.nodes();
        if nodes > 1 {
            bail!(
                "the ranks are on {nodes} nodes, where ranks cannot agree on rules yet, so that no rule applies"
            );
        }
        Ok(offers)
    }

    fn machine(&mut self, space: &Space, collective: Collective) -> GpuMachine<'_> {
        GpuMachine {
            sizes: space.sizes.clone(),
            collective,
            begun: self.begun,
            processes: &mut self.processes,
        }
    }

    fn search(&mut self, destination: &Destination<'a>) -> anyhow::Result<u8> {
        let m = &self.o.measuring;
        for name in BINDING.iter().filter(|n| std::env::var_os(n).is_some()) {
            print_line(&format!("{name} is set, for the default and for all candidates"));
        }
        let words = if m.operation.is_empty() { vec!["all_reduce".to_owned()] } else { m.operation.clone() };
        let operations: Vec<Collective> =
            words.iter().map(|w| w.parse()).collect::<Result<_, String>>().map_err(anyhow::Error::msg)?;
        let channels = if m.channels.is_empty() { vec![4, 16, 32] } else { m.channels.clone() };
        let sizes = sizes(self.o)?;
        let mut found: Vec<(Space, SearchResult)> = Vec::new();
        let mut around = None;
        let mut environments = self.environments();
        for (i, collective) in operations.iter().enumerate() {
            let offers = self.offers(*collective, sizes.clone())?;
            let space = Space {
                collective: number_of(*collective).context("NCCL asks no tuner about this operation")?,
                sizes: offers.records.iter().map(|r| r.bytes).collect(),
                candidates: offers.records.iter().map(|r| candidates(r, &channels)).collect(),
                environments: environments.clone(),
                ranks: self.ranks,
                nodes: 1,
            };
            around.get_or_insert_with(|| self.surroundings(&offers.environment));
            let left = u32::try_from(operations.len() - i).unwrap_or(1);
            let goal = self.goal(operations.len(), left);
            let time = expected(&space, &goal, &self.expected_times(&offers));
            if m.dry_run {
                output::plan(*collective, &space, time, self.limit())?;
                continue;
            }
            print_line(&format!("{collective}: about {} without a limit", output::time(time)));
            let mut line = ProgressLine::new(*collective);
            let outcome =
                search(&mut self.machine(&space, *collective), &space, &goal, &mut |p| line.show(p))?;
            line.finish();
            if outcome.changes_anything() {
                // All operations of a job have one environment.
                environments = vec![outcome.written_min_channels()];
            }
            found.push((space, outcome));
        }
        match around {
            Some(around) if !m.dry_run => self.finish_search(&found, &around, destination),
            _ => Ok(0),
        }
    }

    fn finish_search(
        &self,
        found: &[(Space, SearchResult)],
        around: &MeasuredOn,
        destination: &Destination<'a>,
    ) -> anyhow::Result<u8> {
        let table = output::outcomes(found, around);
        let harmed: Vec<String> = found.iter().flat_map(|(_, o)| output::harm(o)).collect();
        let is_refused = !harmed.is_empty() && !self.o.measuring.accept_slower;
        if is_refused {
            destination.table(&table)?;
            harmed.iter().for_each(|line| print_line(line));
            print_line(
                "nothing is written, as a size would become slower; --accept-slower writes it all the same",
            );
            return Ok(FINDINGS);
        }
        destination.write(&table, &rule_file(found, around))?;
        harmed.iter().for_each(|line| print_line(line));
        Ok(0)
    }

    fn expected_times(&self, offers: &Offers) -> Expected {
        let millis = f64::from(self.o.measuring.millis.unwrap_or(MILLIS));
        let best = |r: &crate::tune::cost_log::CostRecord| r.best_us().unwrap_or(0.0);
        // In and out of place, with 5 operations before.
        let of_size = |us: f32| 2.0 * (millis + 2.0 + 5.0 * f64::from(us) / 1000.0);
        let repeat_ms: f64 = offers.records.iter().map(|r| of_size(best(r))).sum();
        Expected { start: START, repeat: Duration::from_secs_f64(repeat_ms / 1000.0) }
    }

    fn verify(&mut self, rules: &Rules, path: &Path, destination: &Destination<'a>) -> anyhow::Result<u8> {
        let environment = match self.o.measuring.raise_channels.first() {
            Some(n) => Some(*n).filter(|n| *n > 0),
            None => rules.min_channels(),
        };
        if let Some(set) = environment.and_then(|_| std::env::var_os("NCCL_MIN_NCHANNELS")) {
            bail!(
                "NCCL_MIN_NCHANNELS is set to {}: unset it; it is measured against the default",
                set.display()
            );
        }
        let asked: BTreeSet<usize> =
            self.o.measuring.operation.iter().filter_map(|w| w.parse().ok().and_then(number_of)).collect();
        let numbers: BTreeSet<usize> = rules.all().iter().map(|r| r.collective).collect();
        // The environment is for all operations.
        let measured = if numbers.is_empty() && environment.is_some() {
            if asked.is_empty() { number_of(Collective::AllReduce).into_iter().collect() } else { asked }
        } else {
            numbers.into_iter().filter(|n| asked.is_empty() || asked.contains(n)).collect::<BTreeSet<usize>>()
        };
        let operations: Vec<Collective> = measured.into_iter().filter_map(collective_of).collect();
        let mut judged: Vec<JudgedRule> = rules
            .all()
            .iter()
            .map(|r| JudgedRule { rule: r.clone(), status: RuleStatus::NotMeasured })
            .collect();
        let mut around = None;
        let mut all: Vec<(Space, Verified)> = Vec::new();
        let (mut table, mut harmed) = (String::new(), Vec::new());
        for (i, collective) in operations.iter().enumerate() {
            let left = u32::try_from(operations.len() - i).unwrap_or(1);
            let (space, measured_on, own) =
                self.verify_one(*collective, rules.all(), environment, operations.len(), left)?;
            table.push_str(&output::verified(*collective, &own, &measured_on));
            harmed.extend(output::harm_of_verified(&own));
            let of_operation = |own: &&JudgedRule| own.rule.collective == space.collective;
            for (place, own) in judged.iter_mut().zip(&own.judged).filter(|(_, own)| of_operation(own)) {
                *place = own.clone();
            }
            around = Some(measured_on);
            all.push((space, own));
        }
        let Some(around) = around else { bail!("{}: nothing to measure", path.display()) };
        let text = verified_file(&all, &judged, &around);
        destination.write(&table, &text)?;
        harmed.iter().for_each(|line| print_line(line));
        let kept = Rules::from_yaml(&text, "what is written")?.min_channels();
        let is_dropped = judged.iter().any(|j| !j.status.has_rule()) || kept != environment;
        Ok(if is_dropped || !harmed.is_empty() { FINDINGS } else { 0 })
    }

    fn verify_one(
        &mut self,
        collective: Collective,
        rules: &[Rule],
        environment: Option<u32>,
        operations: usize,
        left: u32,
    ) -> anyhow::Result<(Space, MeasuredOn, Verified)> {
        let mut space = Space {
            collective: number_of(collective).context("NCCL asks no tuner about this operation")?,
            sizes: sizes(self.o)?,
            candidates: Vec::new(),
            environments: vec![environment],
            ranks: self.ranks,
            nodes: 1,
        };
        let wanted = sizes_of(rules, &space);
        let offers = self.offers(collective, wanted)?;
        space.sizes = offers.records.iter().map(|r| r.bytes).collect();
        let around = self.surroundings(&offers.environment);
        let goal = self.goal(operations, left);
        let mut line = ProgressLine::new(collective);
        let mut machine = self.machine(&space, collective);
        let verified = verify(&mut machine, &space, rules, environment, &goal, &mut |p| line.show(p))?;
        line.finish();
        verified.notes.iter().for_each(|n| print_line(n));
        Ok((space, around, verified))
    }
}
