//! Aggregates of finished operations, of bounded size.

use super::bins::{Scale, Spent, Union};
use super::ended_ns;
use super::latency::Latency;
use super::slowest::Slowest;
use crate::join::{Finished, FinishedPart, FinishedSink, Join};
use crate::model::{CommId, CommRecord, Func, Rank, SegmentId, Track};
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
    pub(super) in_nccl: Union,
    /// In them, waiting for others.
    pub(super) waited: Union,
    /// In operations that had not finished at the end, by its host's time.
    stalled: Union,
    /// While others waited for it.
    pub(super) held: Union,
    /// Its parts of operations, and of these the timed ones, by when they started. An untimed one is taken to start as long after its call
    /// as the timed one before it.
    operations: Spent,
    timed: Spent,
    lag_ns: u64,
}

/// The least share of a bin's operations that stand for all.
const STAND_FOR_ALL: f32 = 0.5;
/// An operation that ends so long after the newest message has a wrong stamp, in ns.
const AHEAD_MAX_NS: u64 = 60_000_000_000;

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
    /// Operations that were finished faster than they could be counted, and operations of processes beyond the limit.
    pub(super) dropped: u64,
    pub(super) beyond: u64,
}

impl FinishedSink for History {
    fn take(&mut self, operations: &[Finished], join: &Join, now_ns: u64) {
        // The first operations are not found in the order in which they began.
        if self.scale.is_none() {
            self.scale = operations.iter().filter_map(|op| op.began_ns).min().map(Scale::new);
        }
        for op in operations {
            self.operation(op, join, now_ns);
        }
        self.dropped = join.finished_dropped();
    }

    fn end(&mut self, open: &[Finished], join: &Join, now_ns: u64) {
        for op in open {
            self.open_operation(op, join, now_ns);
        }
    }
}

impl History {
    fn operation(&mut self, op: &Finished, join: &Join, now_ns: u64) {
        if let Some(transfer_ns) = op.transfer_ns {
            let key = (op.comm, op.func, op.size_class);
            if self.latency.len() < CLASSES_MAX || self.latency.contains_key(&key) {
                self.latency.entry(key).or_default().add(transfer_ns);
            }
        }
        if self.slowest.len() < COMMUNICATORS_MAX || self.slowest.contains_key(&op.comm) {
            self.slowest.entry(op.comm).or_default().take(op, join);
        }
        let ends = op.parts.iter().filter_map(|p| ended_ns(p).or(p.issued_ns));
        let latest_ns = now_ns.saturating_add(AHEAD_MAX_NS);
        let Some(end_ns) = ends.filter(|end| *end <= latest_ns).max() else { return };
        let scale = self.scale_to(op.began_ns.unwrap_or(end_ns), end_ns);
        for part in &op.parts {
            if ended_ns(part).is_some_and(|end| end > latest_ns) {
                continue;
            }
            match self.usage(part.segment) {
                Some(usage) => {
                    usage.comms.insert(op.comm);
                    usage.part(part, scale);
                }
                None => self.beyond += 1,
            }
        }
        let late =
            op.late.and_then(|late| Some((op.parts.iter().find(|p| p.rank == late.rank)?, late.by_ns)));
        if let Some((part, by_ns)) = late
            && let Some(came_ns) = part.started_ns.or(part.issued_ns)
            && let Some(usage) = self.processes.get_mut(&part.segment)
        {
            usage.held.add(scale, came_ns.saturating_sub(by_ns), came_ns);
        }
    }

    /// An operation that has not finished: those that are in it wait until now, for those that are not.
    fn open_operation(&mut self, op: &Finished, join: &Join, now_ns: u64) {
        let Some(comm) = join.communicator(op.comm) else { return };
        let order = op.operation.order;
        // A rank whose record of it is lost has issued later ones.
        let is_before = |issued: u64| issued <= order;
        let missing: BTreeSet<Rank> = match op.track {
            Track::Collective | Track::Replay => {
                let issued = |m: &CommRecord| if op.track == Track::Replay { m.replayed } else { m.issued };
                let all = comm.members().iter().filter(|(_, m)| is_before(issued(&m.record)));
                all.map(|(rank, _)| *rank).collect()
            }
            Track::Pair(from, to) => {
                let unmatched = comm.unmatched().find(|(pair, ..)| *pair == (from, to));
                let lacks = unmatched.filter(|(_, first, _)| is_before(*first));
                lacks.map(|(.., receive_lacks)| if receive_lacks { to } else { from }).into_iter().collect()
            }
        };
        let there: BTreeSet<Rank> = op.parts.iter().map(|p| p.rank).collect();
        let missing: BTreeSet<Rank> = missing.difference(&there).copied().collect();
        let since = op.parts.iter().filter_map(|p| p.started_ns.or(p.issued_ns)).min();
        let Some(since_ns) = since.filter(|since| *since < now_ns && !missing.is_empty()) else {
            return;
        };
        let scale = self.scale_to(since_ns, now_ns);
        for part in &op.parts {
            if let Some((usage, from_ns)) = self.usage(part.segment).zip(part.started_ns.or(part.issued_ns)) {
                usage.comms.insert(op.comm);
                usage.stalled.add(scale, from_ns, now_ns);
            }
        }
        for rank in &missing {
            let Some(member) = comm.members().get(rank) else { continue };
            if let Some(usage) = self.usage(member.record.segment) {
                usage.comms.insert(op.comm);
                usage.held.add(scale, since_ns, now_ns);
            }
        }
    }

    /// The times of a process; absent beyond the limit.
    fn usage(&mut self, segment: SegmentId) -> Option<&mut Usage> {
        let is_known = self.processes.contains_key(&segment);
        (is_known || self.processes.len() < PROCESSES_MAX).then(|| self.processes.entry(segment).or_default())
    }

    /// The bins, which reach to a moment from now on.
    fn scale_to(&mut self, begin_ns: u64, end_ns: u64) -> Scale {
        self.until_ns = self.until_ns.max(end_ns);
        let scale = self.scale.get_or_insert_with(|| Scale::new(begin_ns));
        let doubled = scale.widen_to(end_ns);
        let scale = *scale;
        if doubled > 0 {
            self.processes.values_mut().for_each(|usage| usage.double(doubled));
        }
        scale
    }
}

impl Usage {
    fn double(&mut self, times: u32) {
        let all = [&mut self.in_nccl, &mut self.waited, &mut self.stalled, &mut self.held];
        all.into_iter().for_each(|u| u.double(times));
        self.operations.double(times);
        self.timed.double(times);
    }

    /// The share of each bin that was spent so, as the timed ones of its operations say it for all; absent where too few are timed.
    pub(super) fn shares(&self, spent: &Union, scale: Scale, bins: usize) -> Vec<Option<f32>> {
        let spent = spent.total(scale);
        let mut is_known = true;
        let share = |bin: usize| {
            let (operations, timed) = (self.operations.get(bin), self.timed.get(bin));
            if operations > 0.0 {
                is_known = timed >= operations * STAND_FOR_ALL;
            }
            let factor = if timed > 0.0 { operations / timed } else { 1.0 };
            // Without an operation of its own, the bin has the rest of the one before.
            is_known.then(|| (spent.share(scale, bin) * factor).min(1.0))
        };
        (0..bins).map(share).collect()
    }

    /// The share of each bin in which it waited: measured, and at the end of a job that stands still from its hosts' times.
    pub(super) fn waited_shares(&self, scale: Scale, bins: usize) -> Vec<Option<f32>> {
        let stalled = self.stalled.total(scale);
        let share = |(bin, measured): (usize, Option<f32>)| {
            let stalled = Some(stalled.share(scale, bin)).filter(|share| *share > 0.0);
            [measured, stalled].into_iter().flatten().max_by(f32::total_cmp)
        };
        self.shares(&self.waited, scale, bins).into_iter().enumerate().map(share).collect()
    }

    /// The share of each bin in which others waited for it, as far as that is known.
    pub(super) fn held_shares(&self, scale: Scale, bins: usize) -> Vec<Option<f32>> {
        let held = self.held.total(scale);
        (0..bins).map(|bin| Some(held.share(scale, bin))).collect()
    }

    fn part(&mut self, part: &FinishedPart, scale: Scale) {
        let times = part.started_ns.zip(ended_ns(part));
        if let Some((start_ns, issued_ns)) = part.started_ns.zip(part.issued_ns) {
            self.lag_ns = start_ns.saturating_sub(issued_ns);
        }
        let started = part.started_ns.or(part.issued_ns.map(|at| at.saturating_add(self.lag_ns)));
        if let Some(at_ns) = started {
            self.operations.count(scale, at_ns);
            if times.is_some() {
                self.timed.count(scale, at_ns);
            }
        }
        let Some((start_ns, end_ns)) = times else { return };
        self.in_nccl.add(scale, start_ns, end_ns);
        if let Some(waiting_ns) = part.waiting_ns {
            self.waited.add(scale, start_ns, start_ns.saturating_add(waiting_ns).min(end_ns));
        }
    }
}
