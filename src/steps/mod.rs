//! Steps of training and requests of inference: what repeats in the calls of a process. No job has to be changed for it.
//!
//! Calls are taken in their order (`queue`), a pattern is learned from them (`pattern`), and each repetition is measured
//! (`phases`). The README beside this file says what a step is, and what is none.

mod pattern;
mod phases;
mod queue;
mod series;

use crate::model::{CommId, Func, Lane, OPERATIONS, OpRecord, SegmentId, StepRow, Update};
use phases::Phases;
use queue::Queue;
use std::collections::BTreeMap;

/// Processes that are measured; more are left out.
const PROCESSES_MAX: usize = 4096;

/// A call, and the times that are known of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct TimedCall {
    comm: CommId,
    lane: Lane,
    func: Func,
    order: u64,
    count: u64,
    bytes: Option<u64>,
    issued_ns: u64,
    kernel: KernelTimes,
}

/// Start and end of a call's kernel, in ns: by the GPU's clock, or in a recording by the host's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct KernelTimes {
    start_ns: Option<u64>,
    end_ns: Option<u64>,
}

impl KernelTimes {
    /// Start and end, where both are known.
    fn both(self) -> Option<(u64, u64)> {
        self.start_ns.zip(self.end_ns).filter(|(start, end)| start <= end)
    }
}

/// The steps of all processes.
#[derive(Debug, Default)]
pub struct Steps {
    processes: BTreeMap<SegmentId, (Queue, Phases)>,
}

impl Steps {
    /// Takes an update, as far as it is about operations.
    pub fn take(&mut self, update: &Update) {
        match update {
            Update::Op(op) => self.operation(op),
            Update::Told(told) => {
                let end_ns = told.started_ns.zip(told.duration_ns).map(|(at, took)| at.saturating_add(took));
                self.add(&told.op, KernelTimes { start_ns: told.started_ns, end_ns }, told.finished);
            }
            Update::Missed { segment, what, .. } if *what == OPERATIONS => {
                if let Some((queue, phases)) = self.processes.get_mut(segment) {
                    while let Some(call) = queue.next(true) {
                        phases.take(call);
                    }
                    phases.lose();
                }
            }
            _ => {}
        }
    }

    /// Takes an operation that appeared or moved on.
    pub fn operation(&mut self, op: &OpRecord) {
        let is_over = op.all_channels_stopped();
        let start_ns = op.stamps.iter().filter_map(|s| s.start_gpu_ns).min();
        let end_ns = op.stamps.iter().filter_map(|s| s.stop_gpu_ns).max().filter(|_| is_over);
        self.add(op, KernelTimes { start_ns, end_ns }, is_over);
    }

    fn add(&mut self, op: &OpRecord, kernel: KernelTimes, is_over: bool) {
        let (Some(order), Some(issued_ns)) = (op.order, op.issued_ns) else { return };
        if self.processes.len() >= PROCESSES_MAX && !self.processes.contains_key(&op.segment) {
            return;
        }
        let call = TimedCall {
            comm: op.comm,
            lane: op.lane,
            func: op.func,
            order,
            count: op.count,
            bytes: op.dtype.and_then(|d| op.count.checked_mul(d.size())),
            issued_ns,
            kernel,
        };
        self.processes.entry(op.segment).or_default().0.add(op.ticket, call, is_over);
    }

    /// Measures the calls of which all earlier ones are known.
    pub fn settle(&mut self) {
        for (queue, phases) in self.processes.values_mut() {
            while let Some(call) = queue.next(false) {
                phases.take(call);
            }
        }
    }

    /// Measures what is left: no more calls come.
    pub fn end(&mut self) {
        for (queue, phases) in self.processes.values_mut() {
            while let Some(call) = queue.next(true) {
                phases.take(call);
            }
            phases.end();
        }
    }

    /// The number of the step in which a process was at a moment of its host's monotonic clock, in ns. The first step that was seen whole
    /// is 1.
    pub fn number(&self, segment: SegmentId, at_ns: u64) -> Option<u64> {
        self.processes.get(&segment)?.1.number(at_ns)
    }

    /// The steps of each process that repeats a sequence. The fields about the process are left open.
    pub fn rows(&self) -> impl Iterator<Item = (SegmentId, StepRow)> {
        self.processes.iter().filter_map(|(id, (_, phases))| Some((*id, phases.row()?)))
    }
}
