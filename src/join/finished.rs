//! Operations that are over, for whoever exports them: each is given out once.

use super::attribution::Carried;
use super::class_key::size_class;
use super::hosts::Ends;
use super::instance::{Instance, Late, Part};
use super::work::Passed;
use crate::model::{
    Algo, CommId, DataType, Func, NetProgress, OpRecord, Proto, Rank, RedOp, SegmentId, Spare, Timing, Told,
    Track,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Operations that wait to be taken at most; more are counted.
const WAITING: usize = 65_536;

/// An operation that is over on all its ranks that are seen, or of which no more will be heard.
#[derive(Debug, Clone, PartialEq)]
pub struct Finished {
    /// Its communicator.
    pub comm: CommId,
    /// Its track.
    pub track: Track,
    /// The operation, as its first rank describes it.
    pub operation: Operation,
    /// The function; a transfer from rank to rank is a `SendRecv`.
    pub func: Func,
    /// The ranks its communicator has, where NCCL says so.
    pub ranks: Option<u32>,
    /// `floor(log2(bytes))`.
    pub size_class: Option<u8>,
    /// Channels its kernels used.
    pub channels: Option<u8>,
    /// When the first rank issued it, host monotonic ns.
    pub began_ns: Option<u64>,
    /// The time of the rank that came last, in ns; known when all ranks were timed.
    pub transfer_ns: Option<u64>,
    /// Bus bandwidth in bytes a second, by nccl-tests' definition.
    pub busbw: Option<f64>,
    /// The last rank, and how late it came.
    pub late: Option<Late>,
    /// Its ranks, as far as they are seen.
    pub parts: Vec<FinishedPart>,
    /// The same for another join, where the operation is one of those that are sampled.
    pub told: Vec<Told>,
}

/// The operation, as one of its ranks describes it. Absent is not known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Operation {
    /// Issue order in its track.
    pub order: u64,
    /// The function.
    pub func: Func,
    /// Message size in bytes as nccl-tests defines it.
    pub bytes: Option<u64>,
    /// Data type.
    pub dtype: Option<DataType>,
    /// Algorithm.
    pub algo: Option<Algo>,
    /// Protocol.
    pub proto: Option<Proto>,
    /// Reduction operation.
    pub redop: Option<RedOp>,
}

impl Finished {
    /// An operation that has not finished, as far as it has come.
    pub(super) fn open(
        comm: CommId,
        ranks: Option<u32>,
        track: Track,
        order: u64,
        instance: &Instance,
    ) -> Option<Self> {
        let first = &instance.first()?.op;
        let is_transfer = matches!(track, Track::Pair(..));
        Some(Finished {
            comm,
            track,
            operation: Operation::of(first, order, ranks),
            func: if is_transfer { Func::SendRecv } else { first.func },
            ranks,
            size_class: first.bytes(ranks).and_then(size_class),
            channels: first.channels,
            began_ns: instance.began_ns(),
            transfer_ns: None,
            busbw: None,
            late: None,
            parts: instance.parts.values().map(|p| FinishedPart::of(p, Vec::new())).collect(),
            told: Vec::new(),
        })
    }
}

impl Operation {
    /// Of a record, in a communicator of so many ranks.
    pub fn of(op: &OpRecord, order: u64, ranks: Option<u32>) -> Self {
        let OpRecord { func, dtype, algo, proto, redop, .. } = *op;
        Operation { order, func, bytes: op.bytes(ranks), dtype, algo, proto, redop }
    }
}

/// One rank's part of an operation that is over.
#[derive(Debug, Clone, PartialEq)]
pub struct FinishedPart {
    /// The rank.
    pub rank: Rank,
    /// Its process.
    pub segment: SegmentId,
    /// When the API was called, host monotonic ns.
    pub called_ns: Option<u64>,
    /// When NCCL issued it, host monotonic ns.
    pub issued_ns: Option<u64>,
    /// When its kernel began on the GPU, on the host's monotonic clock.
    pub started_ns: Option<u64>,
    /// How long it took on the GPU, in ns; waiting for other ranks is in it.
    pub duration_ns: Option<u64>,
    /// The waiting part of that, in ns.
    pub waiting_ns: Option<u64>,
    /// How that was measured, or why it was not.
    pub timing: Timing,
    /// False where nothing says that this rank's part ended.
    pub ended: bool,
    /// Its network transfers.
    pub net: Vec<NetProgress>,
}

impl FinishedPart {
    pub(super) fn of(part: &Part, net: Vec<NetProgress>) -> Self {
        FinishedPart {
            rank: part.op.rank,
            segment: part.op.segment,
            called_ns: part.op.called_ns,
            issued_ns: part.op.issued_ns,
            started_ns: part.started_ns,
            duration_ns: part.duration_ns(),
            waiting_ns: None,
            timing: part.op.timing,
            ended: part.finished,
            net,
        }
    }
}

/// The operations that are sent whole: the same ones by every process that samples as much or more.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sampling {
    /// Of a communicator one of `1 << level` operations, or `4096 >> level` a second where that is more.
    pub level: u32,
    /// Communicators of which all are.
    pub whole: BTreeSet<CommId>,
    /// All operations are: for a recording.
    pub is_everything: bool,
}

impl Sampling {
    /// An operation that is not timed says little: one of so many more (a power of two).
    const UNTIMED: u32 = 5;
    /// Operations a second that every communicator may have at the first level; half as many at each further one. So what is
    /// seldom is not lost beside what is frequent.
    const WHOLE: f64 = 4096.0;

    /// The last level at which a communicator of this rate is told whole.
    pub fn last_whole(rate: f64) -> u32 {
        (Self::WHOLE / rate.max(1.0)).max(1.0).log2().floor() as u32
    }

    /// True for the operations that are told. `rate` is how many a second the communicator has issued since it was made: all
    /// nodes know the same.
    pub fn takes(&self, (comm, track, order): (CommId, Track, u64), timed: bool, rate: f64) -> bool {
        let level = self.level.saturating_sub(Self::last_whole(rate));
        let level = level.saturating_add(if timed { 0 } else { Self::UNTIMED }).min(63);
        // The finalizer of SplitMix64, so that every bit depends on all of them.
        let kind = u64::from(track == Track::Replay);
        let mut n =
            comm.nccl_hash().rotate_left(17) ^ kind.wrapping_add(order.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        n = (n ^ n >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        n = (n ^ n >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (n ^ n >> 31) & ((1 << level) - 1) == 0 || self.is_everything || self.whole.contains(&comm)
    }
}

/// The finished operations that wait to be taken.
#[derive(Debug, Clone, Default)]
pub(super) struct Outbox {
    wanted: bool,
    sampling: Option<Sampling>,
    busiest: f64,
    waiting: Vec<Finished>,
    dropped: u64,
    /// True where what operations move is held against counters.
    metered: bool,
    /// The same between nodes.
    networked: bool,
    /// By process and GPU: whose books these are is looked up once for all of a tick.
    carried: BTreeMap<(SegmentId, Arc<str>), Vec<Carried>>,
    crossed: Vec<(SegmentId, Carried)>,
    ends: Vec<Ends>,
    /// Operations that are over, by process.
    passed: Vec<Passed>,
    /// Records of what was forgotten.
    spare: Spare,
}

impl Outbox {
    /// Where records go that are not needed any more.
    pub(super) fn spare(&mut self) -> &mut Spare {
        &mut self.spare
    }

    /// Says whether somebody reads the wires, and the network.
    pub(super) fn meter(&mut self, metered: bool, networked: bool) {
        (self.metered, self.networked) = (metered, networked);
    }

    pub(super) fn networked(&self) -> bool {
        self.networked
    }

    /// Takes what an operation should have moved between nodes, for the books of their networks.
    pub(super) fn cross(&mut self, parts: Vec<(SegmentId, Carried)>) {
        self.crossed.extend(parts);
    }

    pub(super) fn take_crossed(&mut self) -> Vec<(SegmentId, Carried)> {
        std::mem::take(&mut self.crossed)
    }

    pub(super) fn metered(&self) -> bool {
        self.metered
    }

    /// Takes what a rank of an operation should have moved, for the books of its GPU.
    pub(super) fn carry(&mut self, segment: SegmentId, gpu: &Arc<str>, carried: Carried) {
        self.carried.entry((segment, gpu.clone())).or_default().push(carried);
    }

    pub(super) fn take_carried(&mut self) -> BTreeMap<(SegmentId, Arc<str>), Vec<Carried>> {
        std::mem::take(&mut self.carried)
    }

    /// Takes when a collective of several hosts ended on each of its processes.
    pub(super) fn ended(&mut self, ends: Ends) {
        self.ends.push(ends);
    }

    pub(super) fn take_ends(&mut self) -> Vec<Ends> {
        std::mem::take(&mut self.ends)
    }

    /// Takes that a process is through with an operation.
    pub(super) fn pass(&mut self, passed: Passed) {
        self.passed.push(passed);
    }

    pub(super) fn passed(&mut self) -> impl Iterator<Item = Passed> {
        self.passed.drain(..)
    }

    pub(super) fn want(&mut self) {
        self.wanted = true;
    }

    /// True where not all are told whole.
    pub(super) fn is_sampled(&self) -> bool {
        self.sampling.as_ref().is_none_or(|s| s.level > 0)
    }

    pub(super) fn sample(&mut self, sampling: Option<Sampling>) {
        (self.sampling, self.busiest) = (sampling, 0.0);
    }

    /// True for operations that are told whole.
    pub(super) fn takes(&mut self, operation: (CommId, Track, u64), timed: bool, rate: f64) -> bool {
        self.busiest = self.busiest.max(rate);
        self.sampling.as_ref().is_some_and(|s| s.takes(operation, timed, rate))
    }

    /// The most operations a second of one communicator, of those that were over since it was last said how to sample.
    pub(super) fn busiest(&self) -> f64 {
        self.busiest
    }

    /// True when somebody will take what is put in.
    pub(super) fn wanted(&self) -> bool {
        self.wanted
    }

    pub(super) fn put(&mut self, finished: Finished) {
        if self.waiting.len() < WAITING {
            self.waiting.push(finished);
        } else {
            self.dropped += 1;
        }
    }

    pub(super) fn take(&mut self) -> Vec<Finished> {
        // About as many come until the next time.
        let room = Vec::with_capacity(self.waiting.len());
        std::mem::replace(&mut self.waiting, room)
    }

    pub(super) fn dropped(&self) -> u64 {
        self.dropped
    }
}

#[cfg(test)]
mod tests {
    use crate::join::testing::{all_reduce, member, process};
    use crate::join::{Join, Late, Measure};
    use crate::model::{Lane, Rank, Timing, Track, Untimed, Update};

    const S: u64 = 1_000_000_000;

    fn fed() -> Join {
        let mut j = Join::new();
        j.keep_finished();
        for r in 0..2 {
            j.feed(process(r));
            j.feed(member(r, 2, 1));
        }
        // Rank 1 comes 300 us late; the transfer takes 100 us.
        j.feed(Update::Op(Box::new(all_reduce(0, 0, S, Some((S + 5_000, Some(S + 405_000)))))));
        j
    }

    #[test]
    fn an_operation_is_given_out_once_and_when_all_its_ranks_are_through() {
        let mut j = fed();
        j.tick(2 * S);
        assert_eq!(j.take_finished(), [], "rank 1 is in it");
        let last = all_reduce(1, 0, S + 300_000, Some((S + 305_000, Some(S + 405_000))));
        j.feed(Update::Op(Box::new(last)));
        j.tick(2 * S);
        let taken = j.take_finished();
        assert_eq!(taken.len(), 1, "{taken:#?}");
        let f = &taken[0];
        assert_eq!((f.track, f.operation.order, f.ranks), (Track::Collective, 0, Some(2)));
        assert_eq!((f.began_ns, f.transfer_ns), (Some(S), Some(100_000)));
        let waited: Vec<_> = f.parts.iter().map(|p| (p.rank, p.duration_ns, p.waiting_ns)).collect();
        assert_eq!(waited, [(Rank(0), Some(400_000), Some(300_000)), (Rank(1), Some(100_000), Some(0))]);
        j.tick(3 * S);
        assert_eq!(j.take_finished(), [], "once");
    }

    #[test]
    fn who_was_late_is_said_though_it_was_told_before_the_end() {
        let mut j = Join::new();
        j.keep_finished();
        // Both are through with the first one; rank 1 issues the second one, which is not timed, 300 ms late.
        for r in 0..2 {
            j.feed(process(r));
            j.feed(member(r, 2, 2));
            let done = all_reduce(r, 0, S, Some((S + 5_000, Some(S + 50_000))));
            j.feed(Update::Op(Box::new(done)));
            let mut second = all_reduce(r, 1, 2 * S + u64::from(r) * 300_000_000, None);
            second.timing = Timing::Not(Untimed::Budget);
            j.feed(Update::Op(Box::new(second)));
        }
        j.tick(3 * S);
        let told = || j.communicators().flat_map(|c| c.late()).map(|l| (l.rank, l.by_ns)).collect::<Vec<_>>();
        assert_eq!(told(), [(Rank(1), 300_000_000)], "before anything says that it ended");
        j.take_finished();
        for r in 0..2 {
            let third = all_reduce(r, 2, 4 * S, Some((4 * S + 5_000, Some(4 * S + 50_000))));
            j.feed(Update::Op(Box::new(third)));
        }
        j.tick(5 * S);
        let over = j.take_finished();
        let late = |order| over.iter().find(|f| f.operation.order == order).and_then(|f| f.late);
        assert_eq!(late(1), Some(Late { rank: Rank(1), by_ns: 300_000_000, measure: Measure::Host }));
        let again = j.communicators().flat_map(|c| c.late()).filter(|l| l.operation.order == 1).count();
        assert_eq!(again, 1, "it is told once");
    }

    #[test]
    fn nothing_is_kept_for_nobody() {
        let mut j = Join::new();
        for r in 0..2 {
            j.feed(process(r));
            j.feed(member(r, 2, 1));
            let done = all_reduce(r, 0, S, Some((S + 5_000, Some(S + 50_000))));
            j.feed(Update::Op(Box::new(done)));
        }
        j.tick(2 * S);
        assert_eq!(j.take_finished(), []);
        assert_eq!(j.finished_dropped(), 0);
    }

    #[test]
    fn the_room_of_what_is_forgotten_is_there_to_be_used_again() {
        let mut j = Join::new();
        j.feed(process(0));
        j.feed(member(0, 1, 0));
        let mut first = None;
        for order in 0..400 {
            let at = S + order * 1_000_000;
            let op = Box::new(all_reduce(0, order, at, Some((at + 5_000, Some(at + 50_000)))));
            first = first.or(Some(std::ptr::from_ref(&*op)));
            j.feed(Update::Op(op));
        }
        j.tick(2 * S);
        let new = all_reduce(0, 400, 2 * S, None);
        let rooms: Vec<_> = (0..400).map(|_| j.spare().put(new.clone())).collect();
        assert!(rooms.iter().any(|r| Some(std::ptr::from_ref(&**r)) == first), "the oldest was forgotten");
        assert!(rooms.iter().all(|r| **r == new), "nothing is left of what it said");
    }

    /// A transfer whose stamps cannot be true, from rank 0 to rank 1; then a replay of a graph.
    fn transfer_and_graph(rank: u32) -> [Update; 2] {
        let mut transfer = all_reduce(rank, 0, S, Some((S + 5_000, Some(S + 4_000))));
        transfer.lane = if rank == 0 { Lane::Send(Rank(1)) } else { Lane::Recv(Rank(0)) };
        let mut replay = all_reduce(rank, 0, S + 1_000_000, Some((S + 1_005_000, Some(S + 1_105_000))));
        (replay.lane, replay.ticket) = (Lane::Replay, 1);
        [transfer, replay].map(|o| Update::Op(Box::new(o)))
    }

    #[test]
    fn who_reads_all_at_once_finds_what_was_found_as_it_went() {
        let over = |orders: &[(u32, usize)]| {
            let mut j = Join::new();
            j.keep_finished();
            for r in 0..2 {
                j.feed(process(r));
                j.feed(member(r, 2, 0));
            }
            for (rank, n) in orders {
                j.feed(transfer_and_graph(*rank)[*n].clone());
            }
            j.tick(20 * S);
            let mut tracks: Vec<Track> = j.take_finished().iter().map(|f| f.track).collect();
            tracks.sort_unstable();
            tracks
        };
        let as_it_went = over(&[(0, 0), (1, 0), (0, 1), (1, 1)]);
        assert_eq!(as_it_went.len(), 2, "{as_it_went:?}");
        // One rank's segment after the other's: the first one's graph says nothing of the second's transfer.
        assert_eq!(over(&[(0, 0), (0, 1), (1, 0), (1, 1)]), as_it_went);
    }
}
