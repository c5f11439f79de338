//! Steps of training and requests of inference: what repeats in the calls of a process. No job has to be changed for it.
//!
//! Calls are taken in their order (`queue`), a pattern is learned from them (`pattern`), and each repetition is measured
//! (`track`). The README beside this file says what a step is, and what is none.

mod pattern;
mod queue;
mod track;

use crate::model::{CommId, Func, Lane, OPERATIONS, OpRecord, SegmentId, StepRow, Update};
use queue::Queue;
use std::collections::BTreeMap;
use track::Track;

/// A call, when all that is to be known of it is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Call {
    comm: CommId,
    lane: Lane,
    func: Func,
    order: u64,
    count: u64,
    bytes: Option<u64>,
    issued_ns: u64,
    kernel: Kernel,
}

/// Start and end of a call's kernel, in ns of a clock that is the same for all calls of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Kernel {
    start_ns: Option<u64>,
    end_ns: Option<u64>,
}

impl Kernel {
    /// Start and end, where both are known.
    fn both(self) -> Option<(u64, u64)> {
        self.start_ns.zip(self.end_ns).filter(|(start, end)| start <= end)
    }
}

/// The steps of all processes.
#[derive(Debug, Default)]
pub struct Steps {
    processes: BTreeMap<SegmentId, (Queue, Track)>,
}

impl Steps {
    /// Takes an update, as far as it is about operations.
    pub fn take(&mut self, update: &Update) {
        match update {
            Update::Op(op) => self.operation(op),
            Update::Told(told) => {
                let end_ns = told.started_ns.zip(told.duration_ns).map(|(at, took)| at.saturating_add(took));
                self.add(&told.op, Kernel { start_ns: told.started_ns, end_ns }, told.finished);
            }
            Update::Missed { segment, what, .. } if *what == OPERATIONS => {
                if let Some((queue, track)) = self.processes.get_mut(segment) {
                    queue.lose();
                    track.lose();
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
        self.add(op, Kernel { start_ns, end_ns }, is_over);
    }

    fn add(&mut self, op: &OpRecord, kernel: Kernel, is_over: bool) {
        let (Some(order), Some(issued_ns)) = (op.order, op.issued_ns) else { return };
        let call = Call {
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

    /// Takes the calls of which all earlier ones are known, at a moment of the hosts' monotonic clock in ns.
    pub fn settle(&mut self, now_ns: u64) {
        for (queue, track) in self.processes.values_mut() {
            let mut due = queue.due(now_ns);
            while let Some(call) = due() {
                track.take(&call);
            }
        }
    }

    /// The number of the step in which a process was at a moment, host monotonic ns. The first step that was seen whole is 1.
    pub fn number(&self, segment: SegmentId, at_ns: u64) -> Option<u64> {
        self.processes.get(&segment)?.1.number(at_ns)
    }

    /// What is known of each process that repeats a sequence. Whoever shows it knows the process.
    pub fn rows(&self) -> impl Iterator<Item = (SegmentId, StepRow)> {
        self.processes.iter().filter_map(|(id, (_, track))| Some((*id, track.row()?)))
    }
}
