//! Aggregates of finished operations, of bounded size.

use super::bins::{Scale, Spent};
use super::ended_ns;
use super::latency::Latency;
use super::slowest::Slowest;
use crate::join::{Finished, FinishedPart, FinishedSink, Join};
use crate::model::{CommId, Func, SegmentId};
use std::collections::{BTreeMap, BTreeSet};

/// Processes and classes of operations of which times are kept; more are left out and counted.
const PROCESSES_MAX: usize = 4_096;
const CLASSES_MAX: usize = 4_096;
/// Communicators of which the slowest operations are kept.
const COMMUNICATORS_MAX: usize = 1_024;

/// The time of a process, as far as its operations are timed.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Usage {
    pub(super) comms: BTreeSet<CommId>,
    /// In NCCL's kernels.
    pub(super) in_nccl: Spent,
    /// In them, waiting for others.
    pub(super) waited: Spent,
    /// While others waited for it.
    pub(super) held: Spent,
    /// Its parts of operations, and of these the timed ones, by when they were issued.
    operations: Spent,
    timed: Spent,
    /// Until then the spans above are counted: two communicators may be busy at once.
    in_nccl_until_ns: u64,
    waited_until_ns: u64,
    held_until_ns: u64,
}

/// A class of operations: function, ranks and size class.
pub(super) type Class = (CommId, Func, Option<u8>);

/// See the module.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct History {
    pub(super) scale: Option<Scale>,
    pub(super) until_ns: u64,
    pub(super) processes: BTreeMap<SegmentId, Usage>,
    pub(super) latency: BTreeMap<Class, Latency>,
    pub(super) slowest: BTreeMap<CommId, Slowest>,
    /// Operations that came too late, or beyond a limit.
    pub(super) left_out: u64,
}

impl FinishedSink for History {
    fn take(&mut self, operations: &[Finished], join: &Join) {
        // The first operations are not found in the order in which they began.
        if self.scale.is_none() {
            self.scale = operations.iter().filter_map(|op| op.began_ns).min().map(Scale::new);
        }
        for op in operations {
            self.operation(op, join);
        }
        self.left_out = self.left_out.max(join.finished_dropped());
    }
}

impl History {
    fn operation(&mut self, op: &Finished, join: &Join) {
        if let Some(transfer_ns) = op.transfer_ns {
            let key = (op.comm, op.func, op.size_class);
            if self.latency.len() < CLASSES_MAX || self.latency.contains_key(&key) {
                self.latency.entry(key).or_default().add(transfer_ns);
            }
        }
        if self.slowest.len() < COMMUNICATORS_MAX || self.slowest.contains_key(&op.comm) {
            self.slowest.entry(op.comm).or_default().take(op, join);
        }
        let Some(end_ns) = op.parts.iter().filter_map(|p| ended_ns(p).or(p.issued_ns)).max() else { return };
        self.until_ns = self.until_ns.max(end_ns);
        let scale = self.scale.get_or_insert_with(|| Scale::new(op.began_ns.unwrap_or(end_ns)));
        let doubled = scale.widen_to(end_ns);
        let scale = *scale;
        if doubled > 0 {
            for usage in self.processes.values_mut() {
                usage.all().into_iter().for_each(|spent| spent.double(doubled));
            }
        }
        for part in &op.parts {
            if self.processes.len() >= PROCESSES_MAX && !self.processes.contains_key(&part.segment) {
                continue;
            }
            let usage = self.processes.entry(part.segment).or_default();
            usage.comms.insert(op.comm);
            usage.part(part, scale);
        }
        let late =
            op.late.and_then(|late| Some((op.parts.iter().find(|p| p.rank == late.rank)?, late.by_ns)));
        if let Some((part, by_ns)) = late
            && let Some(came_ns) = part.started_ns.or(part.issued_ns)
            && let Some(usage) = self.processes.get_mut(&part.segment)
        {
            add(&mut usage.held, &mut usage.held_until_ns, scale, came_ns.saturating_sub(by_ns), came_ns);
        }
    }
}

impl Usage {
    fn all(&mut self) -> [&mut Spent; 5] {
        [&mut self.in_nccl, &mut self.waited, &mut self.held, &mut self.operations, &mut self.timed]
    }

    /// The share of a bin that was spent so, as the timed ones of its operations say it for all; absent where none is timed.
    pub(super) fn share(&self, spent: &Spent, scale: Scale, bin: usize) -> Option<f32> {
        let (operations, timed) = (self.operations.get(bin), self.timed.get(bin));
        let share = spent.share(scale, bin);
        match (operations > 0.0, timed > 0.0) {
            // A long operation that began before, or nothing.
            (false, _) => Some(share),
            (true, false) => (share > 0.0).then_some(share),
            (true, true) => Some((share * operations / timed).min(1.0)),
        }
    }

    fn part(&mut self, part: &FinishedPart, scale: Scale) {
        let times = part.started_ns.zip(ended_ns(part));
        if let Some(at_ns) = part.issued_ns.or(part.started_ns) {
            self.operations.count(scale, at_ns);
            if times.is_some() {
                self.timed.count(scale, at_ns);
            }
        }
        let Some((start_ns, end_ns)) = times else { return };
        add(&mut self.in_nccl, &mut self.in_nccl_until_ns, scale, start_ns, end_ns);
        if let Some(waiting_ns) = part.waiting_ns {
            let to_ns = start_ns.saturating_add(waiting_ns).min(end_ns);
            add(&mut self.waited, &mut self.waited_until_ns, scale, start_ns, to_ns);
        }
    }
}

/// Adds a time span, but for what is counted already.
fn add(spent: &mut Spent, until_ns: &mut u64, scale: Scale, from_ns: u64, to_ns: u64) {
    spent.add(scale, from_ns.max(*until_ns), to_ns);
    *until_ns = to_ns.max(*until_ns);
}
