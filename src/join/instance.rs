//! One operation over all the ranks that share it.

use super::signature::Signature;
use super::timing::Kernel;
use crate::model::{
    Algo, Begun, Func, Launch, OpRecord, Proto, Rank, Told, Track, bus_factor, message_bytes,
};

/// One rank's part.
#[derive(Debug, Clone, PartialEq)]
pub struct Part {
    /// The record of its segment.
    pub op: Box<OpRecord>,
    /// Its kernel's time, once all its channels stopped and where the stamps can be believed.
    pub kernel: Option<Kernel>,
    /// When its kernel started, host clock ns.
    pub started_ns: Option<u64>,
    /// True when it is known to be done.
    pub finished: bool,
    /// When its last channel was reported as stopped, host monotonic ns.
    pub ended_seen_ns: Option<u64>,
    /// When its network transfers were last seen to move on, host monotonic ns.
    pub moved_ns: Option<u64>,
}

impl Part {
    /// True when nothing tells that it started or ended, until a later one does: it is not timed, or what should tell
    /// cannot be true.
    pub fn is_silent(&self) -> bool {
        self.op.timing.is_silent() || (self.op.started > 0 && self.started_ns.is_none())
    }

    /// True when its GPU is known to be in it.
    pub fn is_in_it(&self) -> bool {
        !self.finished && self.started_ns.is_some() && self.ended_seen_ns.is_none()
    }

    /// The message about it for another join.
    pub fn told(&self) -> Told {
        // Whatever is not sent was made into the times beside it.
        let mut op = OpRecord { stamps: Vec::new(), ..(*self.op).clone() };
        if self.kernel.is_none() && self.started_ns.is_none() {
            op.started = 0;
        }
        Told {
            op,
            started_ns: self.started_ns,
            duration_ns: self.kernel.map(|k| k.duration_ns),
            ended_seen_ns: self.ended_seen_ns,
            finished: self.finished,
        }
    }

    /// When it was issued, and with what it was launched; absent where that is not known.
    pub(super) fn issued_at(&self) -> Option<IssuedAt> {
        IssuedAt::of(&self.op)
    }

    /// How long it took on the GPU, in ns, however that was measured; the waiting for other ranks is in it.
    pub fn duration_ns(&self) -> Option<u64> {
        self.kernel.map(|k| k.duration_ns).or_else(|| self.op.own_event_ns())
    }
}

/// Two moments of one host that are mapped to another clock at different times may be this closer than they were, in ns.
const MAPPED_BY_NS: u64 = 1_000_000;

/// When a rank issued an operation, and with what it was launched.
#[derive(Debug, Clone, Copy)]
pub(super) struct IssuedAt {
    issued_ns: u64,
    launch: Launch,
}

impl IssuedAt {
    pub(super) fn of(op: &OpRecord) -> Option<Self> {
        Some(IssuedAt { issued_ns: op.issued_ns?, launch: op.launch() })
    }

    /// Converts what an agent said of an operation that a GPU has started. Clocks of hosts are mapped a little differently from
    /// time to time, so that it counts as issued earlier: nothing that was issued with it seems to have begun.
    pub(super) fn of_begun(begun: Begun) -> Self {
        IssuedAt { issued_ns: begun.issued_ns.saturating_sub(MAPPED_BY_NS), launch: begun.launch }
    }

    /// Converts it for an analyser.
    pub(super) fn begun(self) -> Begun {
        Begun { issued_ns: self.issued_ns, host_ns: self.issued_ns, launch: self.launch }
    }

    /// Host monotonic ns.
    pub(super) fn issued_ns(self) -> u64 {
        self.issued_ns
    }

    /// True where the operation was issued earlier than another one, and in another launch.
    pub(super) fn is_before(self, other: IssuedAt) -> bool {
        self.issued_ns < other.issued_ns && !self.launch.shared_with(other.launch)
    }

    /// True where the other operation's start proves that this one has started as well.
    pub(super) fn starts_with(self, other: IssuedAt) -> bool {
        self.issued_ns < other.issued_ns || self.launch.shared_with(other.launch)
    }
}

/// The parts of an operation by rank. A node sees a few of them, an analyser thousands in any order: they lie as they came,
/// and what is kept in order is small.
#[derive(Debug, Clone, Default)]
pub struct Parts {
    order: Vec<(Rank, u32)>,
    parts: Vec<Part>,
}

impl Parts {
    fn find(&self, rank: Rank) -> Result<usize, usize> {
        match self.order.last() {
            Some((last, _)) if *last < rank => Err(self.order.len()),
            _ => self.order.binary_search_by_key(&rank, |(r, _)| *r),
        }
    }

    /// A rank's part.
    pub fn get(&self, rank: &Rank) -> Option<&Part> {
        self.parts.get(self.order.get(self.find(*rank).ok()?)?.1 as usize)
    }

    /// A rank's part.
    pub fn get_mut(&mut self, rank: &Rank) -> Option<&mut Part> {
        let at = self.order.get(self.find(*rank).ok()?)?.1;
        self.parts.get_mut(at as usize)
    }

    /// True when a rank's part is there.
    pub fn contains_key(&self, rank: &Rank) -> bool {
        self.find(*rank).is_ok()
    }

    /// Puts a rank's part in the place of what was there.
    pub fn insert(&mut self, rank: Rank, part: Part) {
        match self.find(rank) {
            Ok(at) => {
                let at = self.order[at].1 as usize;
                self.parts[at] = part;
            }
            Err(at) => {
                self.order.insert(at, (rank, self.parts.len() as u32));
                self.parts.push(part);
            }
        }
    }

    /// The ranks and their parts, by rank.
    pub fn iter(&self) -> impl Iterator<Item = (&Rank, &Part)> {
        self.order.iter().map(|(r, at)| (r, &self.parts[*at as usize]))
    }

    /// The ranks.
    pub fn keys(&self) -> impl Iterator<Item = &Rank> {
        self.order.iter().map(|(r, _)| r)
    }

    /// The parts, by rank.
    pub fn values(&self) -> impl Iterator<Item = &Part> {
        self.iter().map(|(_, p)| p)
    }

    /// The parts, in no order.
    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut Part> {
        self.parts.iter_mut()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.parts.len()
    }

    /// True when there is none.
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// Takes all out, in no order, and keeps the room for others.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = Part> {
        self.order.clear();
        self.parts.drain(..)
    }
}

impl PartialEq for Parts {
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

impl<'a> IntoIterator for &'a Parts {
    type Item = (&'a Rank, &'a Part);
    type IntoIter = Box<dyn Iterator<Item = Self::Item> + 'a>;

    fn into_iter(self) -> Self::IntoIter {
        Box::new(self.iter())
    }
}

/// A rank that comes later than the others by less than this, in ns, is not called late.
pub(super) const LATE_NS: u64 = 1_000_000;

/// How lateness was measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Measure {
    /// By the kernels' times on the GPUs.
    Gpu,
    /// By the times at which the hosts issued the operation: no stamp could be believed on some rank.
    Host,
    /// By the wait-for graph: others stood still until the rank went on.
    Standstill,
}

/// The rank that came last and how long the first one waited for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Late {
    /// The rank.
    pub rank: Rank,
    /// How long after the median of the other ranks, in ns; after the first one where that is below a millisecond, and by
    /// a standstill.
    pub by_ns: u64,
    /// How that was measured.
    pub measure: Measure,
}

/// A standstill in which others waited for one rank, as ticks saw it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Awaited {
    /// The rank that they waited for.
    rank: Rank,
    /// Since when they waited, host monotonic ns.
    since_ns: u64,
    /// When a tick first saw that, and last, host monotonic ns.
    seen_ns: (u64, u64),
}

/// Standstills shorter than this, in ns, say nothing: ticks see them too coarsely.
const AWAITED_NS: u64 = 1_000_000_000;
/// A standstill that no tick saw for so long, in ns, is another one.
const UNSEEN_NS: u64 = 500_000_000;

/// An operation joined over its ranks.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Instance {
    /// The parts seen, by rank.
    pub parts: Parts,
    /// True once it was counted in the statistics.
    pub counted: bool,
    /// True once the hosts' times were looked at, where the GPUs' may never come.
    pub weighed: bool,
    /// Its late rank, once that was told.
    pub late_told: Option<Late>,
    /// True while it waits to be looked at, because something new was heard of it.
    pub(super) touched: bool,
    /// How the first rank that says so runs it.
    pub(super) way: Option<(Algo, Proto)>,
    /// The first rank that was seen, and its signature: all others are compared with it.
    pub(super) said: Option<(Rank, Signature)>,
    /// The rank that others waited for while it stood still.
    awaited: Option<Box<Awaited>>,
}

impl Instance {
    /// Makes it a new one, and keeps the room for its parts.
    pub(super) fn clear(&mut self) {
        let mut parts = std::mem::take(&mut self.parts);
        drop(parts.drain());
        *self = Instance { parts, ..Instance::default() };
    }

    /// Something new was heard of it; true where it did not wait to be looked at already.
    pub(super) fn touch(&mut self) -> bool {
        !std::mem::replace(&mut self.touched, true)
    }

    /// Others wait for a rank, since a moment and still now, host monotonic ns.
    pub(super) fn wait_for(&mut self, rank: Rank, since_ns: u64, now_ns: u64) {
        let is_same = |a: &&mut Awaited| a.rank == rank && now_ns.saturating_sub(a.seen_ns.1) < UNSEEN_NS;
        match self.awaited.as_deref_mut().filter(is_same) {
            // A moment that becomes known later is the better one.
            Some(a) => (a.since_ns, a.seen_ns.1) = (a.since_ns.max(since_ns), now_ns),
            None => self.awaited = Some(Box::new(Awaited { rank, since_ns, seen_ns: (now_ns, now_ns) })),
        }
    }

    /// The rank for which others stood still, by how long, if ticks saw it for most of that time; and when it went on, host
    /// monotonic ns.
    pub(super) fn late_by_standstill(&self) -> Option<(Late, u64)> {
        let Awaited { rank, since_ns, seen_ns: (first_ns, last_ns) } = *self.awaited.as_deref()?;
        let came = self.parts.get(&rank)?;
        // A stopped process has issued it before, and goes on later.
        let came_ns = came.op.issued_ns.filter(|t| *t > since_ns).map_or(last_ns, |t| t.min(last_ns));
        let by_ns = came_ns.saturating_sub(since_ns);
        let is_known = by_ns >= AWAITED_NS && last_ns.saturating_sub(first_ns) >= by_ns / 2;
        is_known.then_some((Late { rank, by_ns, measure: Measure::Standstill }, came_ns))
    }

    /// Compares what a rank says it is with what the first one said.
    pub(super) fn agrees(&mut self, track: Track, rank: Rank, signature: Signature) -> bool {
        match &mut self.said {
            Some((first, said)) if *first != rank => match track {
                Track::Pair(..) => said.transfers_as(&signature),
                _ => said.agrees(&signature),
            },
            said => {
                *said = Some((rank, signature));
                true
            }
        }
    }

    /// The part that was issued first: it names the operation.
    pub fn first(&self) -> Option<&Part> {
        self.parts.values().min_by_key(|p| p.op.issued_ns.or(p.op.called_ns).unwrap_or(u64::MAX))
    }

    /// The messages about it for another join.
    pub fn told(&self) -> Vec<Told> {
        self.parts.values().map(Part::told).collect()
    }

    /// When the first rank issued it, host monotonic ns.
    pub fn began_ns(&self) -> Option<u64> {
        self.parts.values().filter_map(|p| p.op.issued_ns).min()
    }

    /// Message size in bytes.
    pub fn bytes(&self, ranks: Option<u32>) -> Option<u64> {
        let op = &self.first()?.op;
        message_bytes(op.func, op.dtype?, op.count, ranks)
    }

    /// The transfer time in ns: the shortest kernel, whose rank came last and waited for nobody. Known only
    /// when all `ranks` ranks were timed.
    pub fn transfer_ns(&self, ranks: usize) -> Option<u64> {
        if self.parts.len() < ranks || ranks == 0 {
            return None;
        }
        // Absent is less than any.
        self.parts.values().map(Part::duration_ns).min()?
    }

    /// Each rank's waiting in ns, as far as it was timed: its kernel's time beyond the transfer time.
    pub fn waiting_ns(&self, transfer_ns: u64) -> impl Iterator<Item = (Rank, u64)> {
        self.parts.iter().filter_map(move |(r, p)| Some((*r, p.duration_ns()?.saturating_sub(transfer_ns))))
    }

    /// The late rank, by the GPUs' times: the one with the least waiting, late by the median waiting of the
    /// others: where all come at different times, the last one is not to blame for the whole spread. It must also be the last to start on the hosts' clocks (the same ones for all, says `one_clock`);
    /// stamps that contradict each other name nobody. In a rooted operation a rank may be through without having
    /// waited for anybody, and there the starts alone count.
    pub fn late_on_gpu(&self, ranks: usize, one_clock: bool) -> Option<Late> {
        let transfer = self.transfer_ns(ranks)?;
        // CUDA events say how long, not when: then the hosts' times of issue have to do for all ranks.
        let by_events = self.parts.values().any(|p| p.kernel.is_none());
        let start = |p: &Part| if by_events { p.op.issued_ns } else { p.kernel.map(|k| k.start_ns) };
        let starts = || self.parts.iter().filter_map(|(r, p)| Some((*r, start(p)?)));
        let (last, last_start) = starts().max_by_key(|(_, t)| *t)?;
        let first_start = starts().map(|(_, t)| t).min()?;
        if self.first()?.op.func.is_rooted() {
            if by_events {
                return None;
            }
            let by_ns = self.after_the_median(last, last_start, last_start - first_start, start);
            return one_clock.then_some(Late { rank: last, by_ns, measure: Measure::Gpu });
        }
        let (rank, least) = self.waiting_ns(transfer).min_by_key(|(_, w)| *w)?;
        let by_ns = self.waiting_ns(transfer).map(|(_, w)| w).max()? - least;
        let start = start(self.parts.get(&rank)?)?;
        let slack = CLOCK_SLACK_NS.max(by_ns / 10);
        if one_clock && last_start - start > slack {
            return None;
        }
        // Kernels of one operation end together: the less a rank waited, the later it came.
        let came = |p: &Part| p.duration_ns().map(|d| u64::MAX - d);
        let by_ns = self.after_the_median(rank, u64::MAX - transfer - least, by_ns, came);
        Some(Late { rank, by_ns, measure: Measure::Gpu })
    }

    /// How long a rank came after the median of the others, given how long it came after the first. What is too
    /// little to matter stays as it is: this is asked of every operation.
    fn after_the_median(
        &self,
        rank: Rank,
        at: u64,
        after_first: u64,
        came: impl Fn(&Part) -> Option<u64>,
    ) -> u64 {
        if after_first < LATE_NS {
            return after_first;
        }
        let others = self.parts.iter().filter(|(r, _)| **r != rank);
        let mut others: Vec<u64> = others.filter_map(|(_, p)| came(p)).collect();
        let half = others.len() / 2;
        if half >= others.len() {
            return after_first;
        }
        at.saturating_sub(*others.select_nth_unstable(half).1)
    }

    /// The late rank, by the hosts' clocks: the one that issued last, late by the distance to the median. Only
    /// for ranks of one host clock.
    pub fn late_on_host(&self, ranks: usize) -> Option<Late> {
        if self.parts.len() < ranks || ranks < 2 {
            return None;
        }
        // Absent is less than any.
        let first = self.parts.values().map(|p| p.op.issued_ns).min()??;
        let (rank, last) = self.parts.iter().map(|(r, p)| (*r, p.op.issued_ns)).max_by_key(|(_, i)| *i)?;
        let last = last?;
        let by_ns = self.after_the_median(rank, last, last - first, |p| p.op.issued_ns);
        Some(Late { rank, by_ns, measure: Measure::Host })
    }

    /// When all its ranks had reported its end, host monotonic ns.
    pub fn ended_seen_ns(&self) -> Option<u64> {
        let ended = || self.parts.values().map(|p| p.ended_seen_ns);
        // Absent is less than any.
        ended().min()??;
        ended().max()?
    }
}

/// Starts closer together than this, in ns, are not told apart by clocks that were mapped one by one.
const CLOCK_SLACK_NS: u64 = 200_000;

/// Algorithm bandwidth in bytes a second: message size over time.
pub fn algbw(bytes: u64, time_ns: f64) -> Option<f64> {
    (time_ns > 0.0).then(|| bytes as f64 / time_ns * 1e9)
}

/// Bus bandwidth in bytes a second: algorithm bandwidth times nccl-tests' factor.
pub fn busbw(func: Func, bytes: u64, ranks: u32, time_ns: f64) -> Option<f64> {
    Some(algbw(bytes, time_ns)? * bus_factor(func, ranks))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::join::testing::op;
    use crate::model::{DataType, Lane};

    /// Rank, issue time, kernel's start and duration.
    type Given = (u32, u64, Option<(u64, u64)>);

    fn instance(kernels: &[Given]) -> Instance {
        let mut i = Instance::default();
        for (rank, issued, kernel) in kernels {
            let mut o = op(Lane::Collective, 0);
            o.rank = Rank(*rank);
            o.issued_ns = Some(*issued);
            let kernel = kernel.map(|(start_ns, duration_ns)| Kernel {
                start_ns,
                duration_ns,
                believed: 1,
                stamped: 1,
            });
            i.parts.insert(
                Rank(*rank),
                Part {
                    op: Box::new(o),
                    kernel,
                    started_ns: None,
                    finished: true,
                    ended_seen_ns: None,
                    moved_ns: None,
                },
            );
        }
        i
    }

    #[test]
    fn the_last_to_arrive_waits_for_nobody() {
        // Transfer 100: rank 2 arrives 900 after rank 0 and 600 after rank 1.
        let i = instance(&[(0, 0, Some((10, 1000))), (1, 0, Some((310, 700))), (2, 0, Some((910, 100)))]);
        assert_eq!(i.transfer_ns(3), Some(100));
        let waiting: Vec<_> = i.waiting_ns(100).collect();
        assert_eq!(waiting, [(Rank(0), 900), (Rank(1), 600), (Rank(2), 0)]);
        assert_eq!(i.late_on_gpu(3, true), Some(Late { rank: Rank(2), by_ns: 900, measure: Measure::Gpu }));
    }

    #[test]
    fn lateness_is_counted_from_the_median_of_the_others() {
        // All vary by a second: the last one is late by what it came after most of them.
        let ms = 1_000_000;
        let spread = [(0, 0, 1_000), (1, 300, 700), (2, 800, 200), (3, 900, 100)];
        let given = spread.map(|(r, at, took)| (r, at * ms, Some((at * ms, took * ms))));
        let i = instance(&given);
        assert_eq!(
            i.late_on_gpu(4, true),
            Some(Late { rank: Rank(3), by_ns: 600 * ms, measure: Measure::Gpu })
        );
        assert_eq!(i.late_on_host(4), Some(Late { rank: Rank(3), by_ns: 600 * ms, measure: Measure::Host }));
    }

    #[test]
    fn in_a_rooted_operation_the_last_to_start_is_late() {
        // A ring broadcast of a little message: rank 2 comes 0.3 s late, and only rank 3 behind it waits.
        let s = 300_000_000;
        let mut i = instance(&[
            (0, 0, Some((0, 10_000))),
            (1, 0, Some((0, 11_000))),
            (2, 0, Some((s, 12_000))),
            (3, 0, Some((0, s))),
        ]);
        for p in i.parts.values_mut() {
            p.op.func = Func::Broadcast;
        }
        assert_eq!(i.late_on_gpu(4, true), Some(Late { rank: Rank(2), by_ns: s, measure: Measure::Gpu }));
        assert_eq!(i.late_on_gpu(4, false), None, "clocks of two hosts are not compared");
    }

    #[test]
    fn stamps_that_contradict_each_other_name_nobody() {
        // Rank 0 has the shortest kernel, but rank 1 started 0.2 s later.
        let i = instance(&[(0, 0, Some((0, 100))), (1, 0, Some((200_000_000, 300_000_000)))]);
        assert_eq!(i.late_on_gpu(2, true), None);
    }

    #[test]
    fn without_a_rank_nothing_is_claimed() {
        let i = instance(&[(0, 0, Some((10, 1000))), (1, 0, Some((310, 700)))]);
        assert_eq!(i.transfer_ns(3), None);
        assert_eq!(i.late_on_gpu(3, true), None);
        assert_eq!(i.late_on_host(3), None);
    }

    #[test]
    fn without_a_stamp_the_hosts_issue_times_speak() {
        let i = instance(&[(0, 1_000, Some((10, 1000))), (1, 301_000, None)]);
        assert_eq!(i.transfer_ns(2), None);
        assert_eq!(i.late_on_gpu(2, true), None);
        assert_eq!(i.late_on_host(2), Some(Late { rank: Rank(1), by_ns: 300_000, measure: Measure::Host }));
    }

    #[test]
    fn bandwidths_are_those_of_nccl_tests() {
        // 4 ranks, 1 GiB in 10 ms: 107.374 GB/s; all-reduce moves 2 x 3/4 of it.
        let t = 10e6;
        let b = 1u64 << 30;
        let near = |x: Option<f64>, want: f64| assert!((x.expect("known") / want - 1.0).abs() < 1e-9);
        near(algbw(b, t), 107.374_182_4e9);
        near(busbw(Func::AllReduce, b, 4, t), 161.061_273_6e9);
        near(busbw(Func::AllGather, b, 4, t), 80.530_636_8e9);
        near(busbw(Func::ReduceScatter, b, 4, t), 80.530_636_8e9);
        near(busbw(Func::AlltoAll, b, 4, t), 80.530_636_8e9);
        near(busbw(Func::Broadcast, b, 4, t), 107.374_182_4e9);
        near(busbw(Func::SendRecv, b, 2, t), 107.374_182_4e9);
        assert_eq!(algbw(b, 0.0), None);
    }

    #[test]
    fn sizes_are_those_of_nccl_tests() {
        // NCCL's profiler reports an all-gather of 1 Mi floats as 4 Mi bytes sent by each rank.
        assert_eq!(message_bytes(Func::AllGather, DataType::Int8, 4 << 20, Some(4)), Some(16 << 20));
        assert_eq!(message_bytes(Func::AllGather, DataType::Float32, 1 << 20, Some(4)), Some(16 << 20));
        assert_eq!(message_bytes(Func::ReduceScatter, DataType::Float32, 1 << 20, Some(4)), Some(16 << 20));
        assert_eq!(message_bytes(Func::AllReduce, DataType::Float32, 4 << 20, None), Some(16 << 20));
        assert_eq!(message_bytes(Func::Broadcast, DataType::Int8, 4 << 20, Some(4)), Some(4 << 20));
        assert_eq!(message_bytes(Func::AllGather, DataType::Int8, 1, None), None);
        assert_eq!(message_bytes(Func::AllReduce, DataType::Float64, u64::MAX, None), None);
    }
}
