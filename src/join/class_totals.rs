//! Totals of a class from sketches: every operation counted, where only a sample of the records comes.
//!
//! A collective is told by every node that has ranks in it and counts once: by the sketches of the node whose rank is the
//! lowest. How long its ranks were inside is told by each for its own ranks. Nothing is kept of single nodes, and little
//! of single seconds: a cluster has as many classes as communicators.

use super::class_key::{ClassKey, Load, Rates, Transfer};
use super::trend::Trend;
use super::{Join, Member};
use crate::model::{Func, Sketch};
use std::collections::BTreeMap;

/// Classes of a communicator that sketches can make: whoever tells of more makes us no larger.
const CLASSES: usize = 256;
/// Ranks of a communicator that are looked at, from the lowest on, for one whose node is heard.
const TELLERS: usize = 256;
/// The lowest rank that is heard is taken for the lowest there is after this, in ns.
const TELLER_NS: u64 = 5_000_000_000;
const S: u64 = 1_000_000_000;
/// Sketches are of whole seconds of their hosts, which are not the observer's, and take a moment to come: what is younger
/// than so many seconds is not all there.
const LAG_SECONDS: u64 = 2;
/// Seconds that rates are taken over.
const RATE_SECONDS: u64 = 5;
/// Single seconds that are kept.
const SECONDS: usize = 8;
/// Seconds that are kept together, and how many times so many.
const SPAN_SECONDS: u64 = 10;
const SPANS: usize = 13;
/// A sketch over more seconds than are kept says of its last ones what it says of all.
const SPREAD: u64 = SPAN_SECONDS * SPANS as u64;

/// Figures of a second, or of some. What is shown of them needs no more digits than these have.
#[derive(Debug, Clone, Copy, Default)]
struct Slot {
    count: u32,
    /// Time inside, in ns, of all ranks together; and of how many operations of a rank that is.
    busy_ns: f32,
    busy: f32,
}

/// The latest slots, by number, each with something of its own.
#[derive(Debug, Clone)]
struct Ring<T, const N: usize> {
    newest: u64,
    slots: [Slot; N],
    own: [T; N],
}

impl<T: Copy + Default, const N: usize> Default for Ring<T, N> {
    fn default() -> Self {
        Ring { newest: 0, slots: [Slot::default(); N], own: [T::default(); N] }
    }
}

impl<T: Copy + Default, const N: usize> Ring<T, N> {
    /// The slot of a number; absent where it is too old to be kept.
    fn at(&mut self, number: u64) -> Option<(&mut Slot, &mut T)> {
        let first_new = self.newest.saturating_add(1).max(number.saturating_sub(N as u64 - 1));
        for fresh in first_new..=number {
            let at = (fresh % N as u64) as usize;
            (self.slots[at], self.own[at]) = (Slot::default(), T::default());
        }
        self.newest = self.newest.max(number);
        let (at, kept) = ((number % N as u64) as usize, number.saturating_add(N as u64) > self.newest);
        kept.then(|| (&mut self.slots[at], &mut self.own[at]))
    }

    /// The sum of the slots from a number up to and without another, and what is their own.
    fn sum(&self, from: u64, to: u64) -> (Slot, Vec<T>) {
        let kept = |n: &u64| *n <= self.newest && n.saturating_add(N as u64) > self.newest;
        let places: Vec<usize> = (from..to).filter(kept).map(|n| (n % N as u64) as usize).collect();
        let mut sum = Slot::default();
        places.iter().for_each(|at| sum.add(&self.slots[*at]));
        (sum, places.iter().map(|at| self.own[*at]).collect())
    }
}

impl Slot {
    fn add(&mut self, more: &Slot) {
        self.count = self.count.saturating_add(more.count);
        self.busy_ns += more.busy_ns;
        self.busy += more.busy;
    }

    /// The share of some seconds that a rank was inside: those that are timed speak for the others.
    fn share(&self, seconds: u64) -> Option<f64> {
        let mean_ns = f64::from(self.busy_ns) / f64::from(self.busy);
        (self.busy > 0.0).then(|| mean_ns * f64::from(self.count) / (seconds * S) as f64)
    }
}

/// The lower quartile of some times, in ns: in many operations others waited as well.
fn quarter(times: &[(u16, u64)]) -> Option<f64> {
    let all: u64 = times.iter().fold(0, |sum, t| sum.saturating_add(t.1));
    let mut below = 0u64;
    let bucket = times.iter().find(|(_, n)| {
        below = below.saturating_add(*n);
        below > all / 4
    });
    bucket.map(|(b, _)| Sketch::middle_ns(*b))
}

/// How long transfers take, learned from sketches where most records do not come.
#[derive(Debug, Clone, Default)]
struct Learned {
    transfer: Option<Transfer>,
    trend: Trend,
    /// The second of the latest sketches, the shortest of the usual times that nodes tell of it, in ns, and of how many
    /// operations.
    shortest: Option<(u64, f64, u64)>,
}

/// The totals of a class, from sketches.
#[derive(Debug, Clone)]
pub(super) struct ClassTotals {
    pub(super) count: u64,
    /// Operations of which some rank's time was told, whether it is a transfer time or not.
    pub(super) stamped: u64,
    /// Operations whose transfer time is known and that CUDA events timed on some rank.
    pub(super) by_events: u64,
    /// Sum of all message sizes; absent once one was not known.
    pub(super) bytes: Option<u64>,
    /// Transfer times where all ranks are one node's: rising buckets, and how many are in each.
    times: Vec<(u16, u64)>,
    /// True once ranks of several nodes were in one operation: what one node tells of its time is no transfer time.
    parted: bool,
    /// True where its operations are between two ranks, of which a rank may be in many at once.
    pairs: bool,
    /// With the bytes of each: not a number where a size is not known.
    seconds: Ring<f32, SECONDS>,
    /// With a bit for each second in which there were operations.
    spans: Ring<u16, SPANS>,
    learned: Option<Box<Learned>>,
}

impl ClassTotals {
    pub(super) fn new(func: Func) -> Self {
        ClassTotals {
            count: 0,
            stamped: 0,
            by_events: 0,
            bytes: Some(0),
            times: Vec::new(),
            parted: false,
            pairs: func == Func::SendRecv,
            seconds: Ring::default(),
            spans: Ring::default(),
            learned: None,
        }
    }

    /// The trend of its transfer times, from sketches.
    pub(super) fn trend(&self) -> Option<(&Transfer, &Trend)> {
        let learned = self.learned.as_deref()?;
        Some((learned.transfer.as_ref()?, &learned.trend))
    }

    /// Learns how long transfers take. Each node tells the shortest time of its own ranks, and these may have waited for
    /// those of another node: the node that waited least tells best.
    pub(super) fn learn(&mut self, s: &Sketch) {
        let by_events = self.by_events > 0;
        let second = s.from_ns / S;
        let is_over = |(at, ..): &mut (u64, f64, u64)| *at < second;
        if let Some(learned) = &mut self.learned
            && let Some((at, ns, n)) = learned.shortest.take_if(is_over)
        {
            learned.trend.add_alike(at.saturating_mul(S), n, ns);
        }
        let (Some(ns), Some(bytes)) = (quarter(&s.times), self.mean_bytes()) else { return };
        let learned = self.learned.get_or_insert_default();
        learned.transfer.get_or_insert(Transfer { bytes, pair: None, by_events });
        let (_, least, n) = learned.shortest.get_or_insert((second, ns, s.timed));
        *least = least.min(ns);
        *n = (*n).max(s.timed);
    }

    /// Takes a sketch; `counts` says whether it is the one of all nodes' that counts the operations.
    pub(super) fn take(&mut self, s: &Sketch, counts: bool) {
        self.parted |= !s.whole;
        if counts {
            self.count = self.count.saturating_add(s.count);
            self.stamped = self.stamped.saturating_add(s.timed);
            self.bytes = self.bytes.zip(s.bytes).map(|(sum, b)| sum.saturating_add(b));
        }
        if self.parted {
            (self.times, self.by_events) = (Vec::new(), 0);
        } else if counts {
            self.by_events = self.by_events.saturating_add(s.by_events);
            for (bucket, n) in &s.times {
                match self.times.binary_search_by_key(bucket, |t| t.0) {
                    Ok(at) => self.times[at].1 = self.times[at].1.saturating_add(*n),
                    Err(at) => {
                        self.times.reserve_exact(1);
                        self.times.insert(at, (*bucket, *n));
                    }
                }
            }
        }
        self.spread(s, counts);
    }

    /// Counts it in the seconds that it is of, by the middle of each: those of a host keep their distance from the
    /// observer's.
    fn spread(&mut self, s: &Sketch, counts: bool) {
        let over = u64::from(s.seconds.max(1));
        let part = |n: u64, i: u64| {
            let upto = |i: u64| (u128::from(n) * u128::from(i) / u128::from(over)) as u64;
            upto(i + 1) - upto(i)
        };
        let each = over as f32;
        let ranks = s.ranks as f32;
        for i in over.saturating_sub(SPREAD)..over {
            let second = s.from_ns.saturating_add(i.saturating_mul(S)).saturating_add(S / 2) / S;
            let count = if counts { part(s.count, i) } else { 0 };
            let more = Slot {
                count: u32::try_from(count).unwrap_or(u32::MAX),
                busy_ns: s.busy_ns as f32 / each * ranks,
                busy: s.timed as f32 / each * ranks,
            };
            if let Some((slot, bytes)) = self.seconds.at(second) {
                slot.add(&more);
                *bytes += if counts { s.bytes.map_or(f32::NAN, |b| b as f32 / each) } else { 0.0 };
            }
            if let Some((slot, seconds)) = self.spans.at(second / SPAN_SECONDS) {
                slot.add(&more);
                *seconds |= if counts { 1 << (second % SPAN_SECONDS) } else { 0 };
            }
        }
    }

    /// A quantile of the transfer time in ns; absent where one node does not know it.
    pub(super) fn quantile(&self, q: f64) -> Option<f64> {
        let all = self.times.iter().fold(0u64, |sum, t| sum.saturating_add(t.1));
        let rank = (q * all.saturating_sub(1) as f64) as u64;
        let mut below = 0u64;
        let bucket = self.times.iter().find(|(_, n)| {
            below = below.saturating_add(*n);
            below > rank
        });
        bucket.map(|(b, _)| Sketch::middle_ns(*b))
    }

    /// Operations whose transfer time is known.
    pub(super) fn timed(&self) -> u64 {
        if self.parted { 0 } else { self.stamped }
    }

    /// True while all its operations' transfer times are told.
    pub(super) fn is_timed(&self) -> bool {
        !self.times.is_empty()
    }

    /// Mean message size in bytes.
    pub(super) fn mean_bytes(&self) -> Option<u64> {
        self.bytes?.checked_div(self.count)
    }

    /// Share of a rank's time. Of transfers between two ranks many may run at the same time on one rank, so that the sum of
    /// their times says nothing.
    fn share(&self, of: &Slot, seconds: u64) -> Option<f64> {
        of.share(seconds).filter(|_| !self.pairs)
    }

    /// Rates over the last whole seconds of which all is there; absent where it was silent.
    pub(super) fn rates(&self, now_ns: u64) -> Option<Rates> {
        let to = (now_ns / S).saturating_sub(LAG_SECONDS);
        let (sum, bytes) = self.seconds.sum(to.saturating_sub(RATE_SECONDS), to);
        let bytes: f32 = bytes.into_iter().sum();
        let per_s = |n: f64| n / RATE_SECONDS as f64;
        (sum.count > 0).then(|| Rates {
            ops_per_s: per_s(f64::from(sum.count)),
            bytes_per_s: (!bytes.is_nan()).then(|| per_s(f64::from(bytes))),
            share: self.share(&sum, RATE_SECONDS),
        })
    }

    /// How busy it was over so many seconds, at most 120: the latest that are kept together and of which all is there.
    pub(super) fn load(&self, now_ns: u64, seconds: u64) -> Option<Load> {
        let to = (now_ns / S).saturating_sub(LAG_SECONDS) / SPAN_SECONDS;
        let spans = (seconds / SPAN_SECONDS).min(SPANS as u64 - 1);
        let (sum, seconds) = self.spans.sum(to.saturating_sub(spans), to);
        let busy: u32 = seconds.into_iter().map(u16::count_ones).sum();
        let share = self.share(&sum, spans * SPAN_SECONDS);
        (busy > 0).then(|| Load { share, seconds: u64::from(busy) })
    }
}

/// Jobs that are told apart at most: they name themselves.
const JOBS: usize = 256;

/// Operations of a job of one kind, each counted once: communicators come and go, and this only grows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// How many are over.
    pub count: u64,
    /// Their message bytes, as far as sizes are known; absent where none is.
    pub bytes: Option<u64>,
}

impl Tally {
    /// Adds others to them.
    pub fn add(&mut self, others: Tally) {
        self.count = self.count.saturating_add(others.count);
        if let Some(bytes) = others.bytes {
            self.bytes = Some(self.bytes.unwrap_or(0).saturating_add(bytes));
        }
    }
}

/// A job's name and its user.
type JobOfUser = (String, Option<u32>);

/// The totals of jobs, as far as sketches report them.
#[derive(Debug, Clone, Default)]
pub struct Tallies {
    /// By job, its user and operation, with the number in the order in which these came.
    jobs: BTreeMap<JobOfUser, BTreeMap<Func, (usize, Tally)>>,
    known: usize,
    /// Of jobs for which there was no room.
    rest: Tally,
}

impl Tallies {
    pub(super) fn add(&mut self, job: &str, owner: Option<u32>, func: Func, more: Tally) {
        let job = (job.to_owned(), owner);
        if !self.jobs.contains_key(&job) && self.jobs.len() < JOBS {
            self.jobs.insert(job.clone(), BTreeMap::new());
        }
        let Some(own) = self.jobs.get_mut(&job) else { return self.rest.add(more) };
        let (_, tally) = own.entry(func).or_insert_with(|| {
            self.known += 1;
            (self.known, Tally::default())
        });
        tally.add(more);
    }

    /// By job, its user and operation, in the order in which these came: what is shown of them stays shown.
    pub fn all(&self) -> Vec<(&str, Option<u32>, Func, Tally)> {
        let mut all: Vec<_> = self
            .jobs
            .iter()
            .flat_map(|((job, owner), own)| {
                own.iter().map(|(func, (at, tally))| (*at, (job.as_str(), *owner, *func, *tally)))
            })
            .collect();
        all.sort_by_key(|t| t.0);
        all.into_iter().map(|(_, tally)| tally).collect()
    }

    /// Of all jobs that are not told apart.
    pub fn rest(&self) -> Tally {
        self.rest
    }
}

impl Join {
    /// Takes what happened on a node, where not every record comes. Every node with ranks in a collective tells of it: that
    /// of the lowest rank counts, of those that are heard. Transfers are told by their senders' nodes alone.
    pub(super) fn sketch(&mut self, mut s: Sketch) {
        let Some(c) = self.comms.get_mut(&s.comm) else { return };
        if c.members().get(&s.rank).is_none_or(|m| m.record.segment != s.segment) {
            return;
        }
        if self.now_ns > 0 {
            c.sketched_ns.get_or_insert(self.now_ns);
        }
        // A lower rank may not have been heard of yet, and would count the same again.
        let settled_ns = c.sketched_ns.map(|t| t.saturating_add(TELLER_NS));
        let lowest = s.rank.0 == 0 || settled_ns.is_some_and(|t| self.now_ns >= t);
        let c = &*c;
        let key =
            ClassKey { comm: s.comm, func: s.func, size_class: s.size_class, algo: s.algo, proto: s.proto };
        let heard = |m: &Member| self.processes.get(&m.record.segment).is_some_and(|p| p.silent_ns.is_none());
        let teller = c.members().iter().take(TELLERS).find(|(_, m)| heard(m)).map(|(rank, _)| *rank);
        let counts = s.func == Func::SendRecv || lowest && teller == Some(s.rank);
        if counts {
            let process = c.members().get(&s.rank).and_then(|m| self.processes.get(&m.record.segment));
            let job = process.and_then(|p| p.record.job.name.as_deref()).unwrap_or_default();
            let owner = process.and_then(|p| p.record.owner);
            self.tallies.add(job, owner, s.func, Tally { count: s.count, bytes: s.bytes });
        }
        // What is over cannot have been in the future, whatever its node's clock says.
        let ends_ns = s.from_ns.saturating_add(u64::from(s.seconds).saturating_mul(S));
        if self.now_ns > 0 && ends_ns > self.now_ns.saturating_add(S) {
            s.from_ns = self.now_ns.saturating_sub(u64::from(s.seconds).saturating_mul(S));
        }
        if let Some(class) = self.classes.get_mut(&key) {
            class.take(&s, counts);
            return;
        }
        let least = ClassKey { comm: s.comm, func: Func::ALL[0], size_class: None, algo: None, proto: None };
        let own = self.classes.range(least..).take_while(|(k, _)| k.comm == s.comm);
        if own.take(CLASSES).count() < CLASSES {
            self.classes.entry(key).or_default().take(&s, counts);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::join::Join;
    use crate::join::stats::Sample;
    use crate::join::testing::{all_reduce, member, process};
    use crate::model::{Algo, Beat, CommId, Exchange, Proto, Rank, SegmentId, Timing, Told, Update};

    fn sketch(from_s: u64, seconds: u32, count: u64) -> Sketch {
        Sketch {
            segment: SegmentId(1),
            comm: CommId::unowned(7),
            rank: Rank(0),
            ranks: 4,
            func: Func::AllReduce,
            size_class: Some(20),
            algo: None,
            proto: None,
            count,
            timed: count,
            by_events: 0,
            bytes: Some(count << 20),
            busy_ns: count * 1_000_000,
            from_ns: from_s * S + S / 3,
            seconds,
            whole: true,
            times: vec![(Sketch::bucket(100_000), count)],
        }
    }

    #[test]
    fn rates_and_shares_are_of_every_operation() {
        let mut all = ClassTotals::new(Func::AllReduce);
        for second in 0..130 {
            all.take(&sketch(second, 1, 200), true);
        }
        let now = 131 * S;
        let r = all.rates(now).expect("busy");
        assert!((r.ops_per_s - 200.0).abs() < 1e-9, "{r:?}");
        assert!((r.bytes_per_s.expect("sizes") / (200.0 * 1_048_576.0) - 1.0).abs() < 1e-6);
        assert!((r.share.expect("timed") - 0.2).abs() < 1e-6, "200 times 1 ms");
        let load = all.load(now, 120).expect("busy");
        assert_eq!(load.seconds, 120);
        assert!((load.share.expect("timed") - 0.2).abs() < 1e-6, "{load:?}");
        assert_eq!((all.count, all.timed(), all.bytes), (26_000, 26_000, Some(26_000 << 20)));
        assert!((all.quantile(0.5).expect("timed") / 100_000.0 - 1.0).abs() < 0.05);
        assert_eq!(all.mean_bytes(), Some(1 << 20));
        assert!(all.rates(now + 8 * S).is_none(), "silent");
        assert!(all.load(now + 200 * S, 120).is_none());
    }

    #[test]
    fn sketches_teach_how_long_transfers_take() {
        let mut all = ClassTotals::new(Func::AllReduce);
        for second in 0..30 {
            let ns = if second < 15 { 1_000_000 } else { 3_000_000 };
            // One node's ranks wait for those of the other.
            for factor in [5, 1] {
                let times = vec![(Sketch::bucket(ns * factor), 10)];
                let s = Sketch { whole: false, times, ..sketch(second, 1, 10) };
                all.take(&s, factor == 1);
                all.learn(&s);
            }
        }
        let (transfer, trend) = all.trend().expect("learned");
        assert_eq!(transfer.bytes, 1 << 20);
        let change = trend.change().expect("three times as long");
        assert!(
            (change.ratio() - 3.0).abs() < 0.3 && change.since_ns.abs_diff(15 * S) <= 2 * S,
            "{change:?}"
        );
    }

    #[test]
    fn records_without_times_leave_it_to_sketches_what_a_transfer_takes() {
        let mut class = crate::join::stats::Class::default();
        for second in 0..12 {
            let ns = if second < 3 { 1_000_000 } else { 3_000_000 };
            let times = vec![(Sketch::bucket(ns), 30)];
            class.take(&Sketch { times, ..sketch(second, 1, 30) }, true);
            for n in 0..30 {
                let at_ns = second * S + n * S / 30;
                let (bytes, transfer_ns) = (Some(1 << 20), (n % 10 == 0).then_some(ns));
                let (busy_ns, pair, by_events, channels) = (None, None, false, None);
                class.add(&Sample { at_ns, bytes, transfer_ns, busy_ns, pair, by_events, channels });
            }
        }
        let change = class.trends().find_map(|(_, trend)| trend.change());
        let change = change
            .expect("three seconds of sketches are enough, and nine of the records with times were not");
        assert!((change.ratio() - 3.0).abs() < 0.3 && change.since_ns.abs_diff(3 * S) <= S, "{change:?}");
    }

    #[test]
    fn what_waited_for_room_is_spread_over_its_seconds() {
        let mut all = ClassTotals::new(Func::AllReduce);
        all.take(&sketch(0, 7, 1001), true);
        assert_eq!(all.count, 1001);
        let r = all.rates(8 * S).expect("busy");
        assert!((r.ops_per_s - 143.0).abs() < 1e-9, "{r:?}");
        assert_eq!(all.load(12 * S, 120).map(|l| l.seconds), Some(7));
        // Days are no reason to count for days.
        all.take(&Sketch { count: u64::MAX, ..sketch(100_000, 86_400, 0) }, true);
        assert_eq!(all.count, u64::MAX);
    }

    #[test]
    fn other_nodes_tell_of_their_ranks_time_and_count_nothing_again() {
        let mut all = ClassTotals::new(Func::AllReduce);
        for second in 0..10 {
            let first = Sketch { whole: false, ..sketch(second, 1, 10) };
            // Three times as many ranks, which wait half as long.
            let other = Sketch { ranks: 12, busy_ns: first.busy_ns / 2, ..first.clone() };
            all.take(&first, true);
            all.take(&other, false);
        }
        assert_eq!(
            (all.count, all.timed(), all.quantile(0.5)),
            (100, 0, None),
            "nobody knows the transfer times"
        );
        let r = all.rates(11 * S).expect("busy");
        assert!((r.ops_per_s - 10.0).abs() < 1e-9);
        assert!((r.share.expect("timed") - 0.01 * (0.25 + 0.75 / 2.0)).abs() < 1e-6, "{r:?}");
    }

    #[test]
    fn what_is_not_known_stays_absent() {
        let mut all = ClassTotals::new(Func::SendRecv);
        let untimed = Sketch { bytes: None, timed: 0, busy_ns: 0, times: Vec::new(), ..sketch(0, 5, 50) };
        all.take(&untimed, true);
        let r = all.rates(7 * S).expect("busy");
        assert_eq!((r.ops_per_s, r.bytes_per_s, r.share), (10.0, None, None));
        assert_eq!((all.bytes, all.mean_bytes(), all.is_timed()), (None, None, false));
        all.take(&sketch(5, 5, 50), true);
        assert_eq!(all.rates(12 * S).expect("busy").share, None, "a rank is in many at once");
    }

    #[test]
    fn a_class_takes_little() {
        assert!(size_of::<ClassTotals>() <= 416, "{} bytes", size_of::<ClassTotals>());
    }

    #[test]
    fn moments_far_apart_take_no_longer() {
        let mut all = ClassTotals::new(Func::AllReduce);
        for from_ns in [0, u64::MAX, 5, u64::MAX / 2] {
            all.take(&Sketch { from_ns, ..sketch(0, 3600, 1) }, true);
        }
        assert_eq!(all.count, 4);
    }

    /// Four ranks on two hosts, of which an analyser hears; so many collectives a second, one of 64 told whole.
    fn heard(seconds: u64, sketches: impl Fn(u64, u32) -> Option<Sketch>) -> Join {
        const RATE: u64 = 128;
        let mut join = Join::new();
        for n in 0..4 {
            let Update::Segment(mut s) = process(n) else { unreachable!("a process") };
            s.host = format!("host{}", n / 2);
            join.feed(Update::Segment(s));
            join.feed(member(n, 4, 0));
        }
        for second in 0..seconds {
            for rank in 0..4 {
                for order in (second * RATE..(second + 1) * RATE).step_by(64) {
                    let at = second * S + (order % RATE) * (S / RATE);
                    let mut op = all_reduce(rank, order, at, None);
                    op.timing = Timing::Kernel;
                    join.feed(Update::Told(Box::new(Told {
                        op,
                        started_ns: Some(at + 1_000),
                        duration_ns: Some(1_000_000),
                        ended_seen_ns: Some(at + 1_002_000),
                        finished: true,
                    })));
                }
                let done = (second + 1) * RATE;
                let (segment, rank) = (SegmentId(u64::from(rank) + 1), Rank(rank));
                let (issued, replayed, replays_done) = (done, 0, 0);
                let exchanged = Exchange::default();
                join.feed(Update::Beat(Beat {
                    segment,
                    comm: CommId::unowned(7),
                    rank,
                    issued,
                    replayed,
                    done,
                    replays_done,
                    exchanged,
                    begun: None,
                }));
            }
            join.tick((second + 1) * S);
            for rank in [2, 0] {
                let told = sketches(second, rank);
                told.into_iter().for_each(|s| join.feed(Update::Sketch(Box::new(s))));
            }
        }
        join
    }

    fn of_host(second: u64, rank: u32) -> Sketch {
        Sketch {
            segment: SegmentId(u64::from(rank) + 1),
            rank: Rank(rank),
            ranks: 2,
            size_class: Some(22),
            algo: Some(Algo::Ring),
            proto: Some(Proto::Simple),
            bytes: Some(128 << 22),
            from_ns: second * S,
            whole: false,
            ..sketch(second, 1, 128)
        }
    }

    fn rates(join: &Join, now_ns: u64) -> (u64, Option<u64>, f64, Option<f64>) {
        let all: Vec<_> = join.classes().collect();
        assert_eq!(all.len(), 1, "{:?}", all.iter().map(|(k, _)| k).collect::<Vec<_>>());
        let r = all[0].1.rates(now_ns).expect("busy");
        (all[0].1.count(), all[0].1.bytes(), r.ops_per_s, r.share)
    }

    #[test]
    fn every_operation_counts_once_where_one_of_64_is_told() {
        // Without sketches a sample is all there is.
        let sampled = heard(20, |_, _| None);
        let (count, _, ops_per_s, _) = rates(&sampled, 20 * S + S / 2);
        assert_eq!((count, ops_per_s), (40, 2.0));
        // With those of both hosts, each of which tells of every collective.
        let all = heard(20, |second, rank| Some(of_host(second, rank)));
        let (count, bytes, ops_per_s, share) = rates(&all, 21 * S);
        assert_eq!((count, bytes, ops_per_s), (20 * 128, Some((20 * 128) << 22), 128.0));
        assert!((share.expect("timed") - 0.128).abs() < 1e-6, "{share:?}");
        let (_, class) = all.classes().next().expect("a class");
        // How long a transfer takes is known where all four were compared: of the sample.
        assert_eq!(class.timed(), 40);
        assert!((class.quantile(0.5).expect("timed") / 1e6 - 1.0).abs() < 0.02);
        assert!(class.is_sketched() && !class.has_all_records());
    }

    #[test]
    fn who_is_not_heard_of_yet_counts_later_and_nothing_counts_twice() {
        let mut join = Join::new();
        let tell = |join: &mut Join, second: u64, rank: u32| {
            join.feed(Update::Sketch(Box::new(of_host(second, rank))));
            join.tick((second + 1) * S);
        };
        let come = |join: &mut Join, ranks: std::ops::Range<u32>| {
            for r in ranks {
                join.feed(process(r));
                join.feed(member(r, 4, 0));
            }
        };
        come(&mut join, 2..4);
        join.tick(S);
        tell(&mut join, 1, 2);
        come(&mut join, 0..2);
        tell(&mut join, 1, 0);
        assert_eq!(rates(&join, 4 * S).0, 128);
        // Where nobody follows the lower ranks, those that are there count after a while.
        let mut join = Join::new();
        come(&mut join, 2..4);
        join.tick(S);
        (1..11).for_each(|second| tell(&mut join, second, 2));
        assert_eq!(rates(&join, 12 * S).0, 5 * 128);
    }

    #[test]
    fn where_the_lowest_ranks_host_is_silent_the_next_one_counts() {
        let mut join = heard(10, |second, rank| Some(of_host(second, rank)));
        for segment in [1, 2].map(SegmentId) {
            join.feed(Update::Silent { segment, since_ns: Some(10 * S) });
        }
        for second in 10..20 {
            join.feed(Update::Sketch(Box::new(of_host(second, 2))));
            join.tick((second + 1) * S);
        }
        assert_eq!(rates(&join, 21 * S).0, 20 * 128);
        // It speaks for its own rank, and for no other one.
        let forged = Sketch { segment: SegmentId(3), rank: Rank(0), ..of_host(20, 2) };
        join.feed(Update::Sketch(Box::new(forged)));
        assert_eq!(rates(&join, 21 * S).0, 20 * 128);
    }

    #[test]
    fn a_clock_that_is_ahead_and_classes_without_end_do_no_harm() {
        let mut join = heard(10, |second, rank| Some(of_host(second, rank)));
        let ahead = Sketch { from_ns: u64::MAX / 2, ..of_host(10, 2) };
        join.feed(Update::Sketch(Box::new(ahead)));
        for second in 10..20 {
            join.feed(Update::Sketch(Box::new(of_host(second, 0))));
            join.tick((second + 1) * S);
        }
        assert_eq!(rates(&join, 21 * S).2, 128.0, "those of the others count as before");
        let told = Tally { count: 20 * 128, bytes: Some((20 * 128) << 22) };
        assert_eq!(join.tallies().all(), [("job", None, Func::AllReduce, told)]);
        for func in Func::ALL {
            for size in 0..64 {
                let s = Sketch { func: *func, size_class: Some(size), ..of_host(20, 2) };
                join.feed(Update::Sketch(Box::new(s)));
            }
        }
        assert_eq!(join.classes().count(), 256);
    }

    #[test]
    fn jobs_without_end_are_one() {
        let mut all = Tallies::default();
        let one = |bytes| Tally { count: 1, bytes };
        for n in 0..JOBS + 10 {
            all.add(&format!("job-{}", JOBS + 10 - n), None, Func::AllReduce, one(Some(4)));
        }
        all.add("job-266", None, Func::Broadcast, one(None));
        all.add("job-266", None, Func::AllReduce, one(None));
        let told = all.all();
        assert_eq!((told.len(), all.rest()), (JOBS + 1, Tally { count: 10, bytes: Some(40) }));
        assert_eq!(told[0], ("job-266", None, Func::AllReduce, Tally { count: 2, bytes: Some(4) }));
        assert_eq!(told[JOBS], ("job-266", None, Func::Broadcast, one(None)), "the last that came");
    }
}
