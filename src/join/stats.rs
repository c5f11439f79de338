//! Statistics by class of operation: communicator, operation, size class, algorithm, protocol.

use super::class_key::{Load, Rates, Transfer};
use super::class_totals::ClassTotals;
use super::trend::Trend;
use crate::model::{Rank, Sketch};
use sketches_ddsketch::{Config, DDSketch};
use std::collections::VecDeque;

/// Seconds of history kept for rates and sparklines.
const SECONDS: u64 = 120;
/// Seconds of a sparkline.
const SPARK_SECONDS: u64 = 60;
/// Transfers of one kind that a class learns about; a job whose sizes vary more teaches nothing about one size.
const KINDS: usize = 64;
/// Memory that a transfer's trend takes beside itself, in bytes.
const TREND: usize = 1024;
/// Seconds that rates are taken over.
const RATE_SECONDS: u64 = 5;

/// When a size was seen in a class, by the times of issue (host monotonic ns), and on how many channels it ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seen {
    /// First.
    pub first_ns: u64,
    /// Last.
    pub last_ns: u64,
    /// How often.
    pub count: u64,
    /// On how many channels it runs.
    pub channels: Option<u8>,
    /// How often in a row it has run so.
    pub steady: u64,
    /// On how many it ran before, how often in a row, and since when it does no more.
    pub before: Option<(u8, u64, u64)>,
}

/// One second of a class.
#[derive(Debug, Clone, Copy, Default)]
struct Second {
    at: u64,
    count: u64,
    bytes: Option<u64>,
    busy_ns: Option<f64>,
    /// Operations that `busy_ns` is of.
    busy: u64,
    transfer_ns: f64,
    timed: u64,
}

/// A few values by key, in its order. Nearly all classes have one, and there are as many classes as communicators: they
/// take no more room than they need.
#[derive(Debug, Clone)]
struct Few<K, V>(Vec<(K, V)>);

impl<K, V> Default for Few<K, V> {
    fn default() -> Self {
        Few(Vec::new())
    }
}

impl<K: Ord, V> Few<K, V> {
    /// The value of a key, a new one where there is none yet and fewer than `most` are there.
    fn entry(&mut self, key: K, most: usize, fresh: impl FnOnce() -> V) -> Option<&mut V> {
        let at = match self.0.binary_search_by(|(k, _)| k.cmp(&key)) {
            Ok(at) => at,
            Err(_) if self.0.len() >= most => return None,
            Err(at) => {
                if self.0.is_empty() {
                    self.0.reserve_exact(1);
                }
                self.0.insert(at, (key, fresh()));
                at
            }
        };
        self.0.get_mut(at).map(|(_, v)| v)
    }

    fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.0.iter().map(|(k, v)| (k, v))
    }
}

/// The statistics of a class.
#[derive(Clone)]
pub struct Class {
    /// Of operations whose records came: how many, those whose transfer time is known, and those of them that CUDA events
    /// timed on some rank.
    count: u64,
    timed: u64,
    by_events: u64,
    /// Sum of the message sizes of the timed operations, to give bandwidths their mean size.
    timed_bytes: u128,
    /// Sum of all message sizes; absent once one was not known.
    bytes: Option<u64>,
    /// Sum of the times that operations took on the mean of their timed ranks, in ns, and how many it is of.
    busy_ns: f64,
    busy: u64,
    /// The latest moment of issue, host monotonic ns.
    last_ns: u64,
    transfer: DDSketch,
    seconds: VecDeque<Second>,
    trends: Few<Transfer, Trend>,
    sizes: Few<u64, Seen>,
    /// All operations, where sketches tell of them: their records are a sample then, and count for nothing but trends.
    sketched: Option<Box<ClassTotals>>,
}

impl Class {
    /// Memory that it takes, in bytes, as an estimate.
    pub(super) fn weight(&self) -> usize {
        // The sketch's bins follow the range of the times.
        const SKETCH: usize = 2048;
        size_of::<Self>()
            + SKETCH
            + self.seconds.capacity() * size_of::<Second>()
            + self.trends.0.capacity() * (size_of::<(Transfer, Trend)>() + TREND)
            + self.sizes.0.capacity() * size_of::<(u64, Seen)>()
    }
}

impl std::fmt::Debug for Class {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Class")
            .field("count", &self.count())
            .field("timed", &self.timed())
            .finish_non_exhaustive()
    }
}

impl Default for Class {
    fn default() -> Self {
        Class {
            count: 0,
            timed: 0,
            by_events: 0,
            timed_bytes: 0,
            bytes: Some(0),
            busy_ns: 0.0,
            busy: 0,
            last_ns: 0,
            // 1 % relative error over ns to hours.
            transfer: DDSketch::new(Config::defaults()),
            seconds: VecDeque::new(),
            trends: Few::default(),
            sizes: Few::default(),
            sketched: None,
        }
    }
}

/// The share of some seconds that operations took: those that are timed speak for the others.
fn share<'a>(of: impl Iterator<Item = &'a Second>, seconds: u64) -> Option<f64> {
    let (mut count, mut timed, mut busy_ns) = (0u64, 0u64, 0.0);
    for s in of {
        count += s.count;
        timed += s.busy;
        busy_ns += s.busy_ns.unwrap_or(0.0);
    }
    (timed > 0).then(|| busy_ns / timed as f64 * count as f64 / (seconds as f64 * 1e9))
}

/// True where the times of most operations are told by sketches alone; those of which records tell them may be any.
fn are_few(timed: u64, sketched: &ClassTotals) -> bool {
    timed < sketched.stamped / 2
}

/// A sum in which absent is not zero.
fn sum<T: Copy>(a: Option<T>, b: Option<T>, add: impl Fn(T, T) -> T) -> Option<T> {
    match (a, b) {
        (Some(a), Some(b)) => Some(add(a, b)),
        (a, b) => a.or(b),
    }
}

/// One finished operation, as the statistics take it.
#[derive(Debug, Clone, Copy)]
pub struct Sample {
    /// When it was issued, host monotonic ns.
    pub at_ns: u64,
    /// Message size in bytes.
    pub bytes: Option<u64>,
    /// Transfer time in ns.
    pub transfer_ns: Option<u64>,
    /// Mean over the timed ranks of the time spent in it, in ns.
    pub busy_ns: Option<f64>,
    /// The ranks of a transfer from one to another.
    pub pair: Option<(Rank, Rank)>,
    /// True where CUDA events timed a rank's part.
    pub by_events: bool,
    /// On how many channels it ran.
    pub channels: Option<u8>,
}

impl Class {
    /// Takes what a node's sketch tells; `counts` says whether it is the one of all nodes' that counts operations.
    pub(super) fn take(&mut self, s: &Sketch, counts: bool) {
        let timed = self.timed;
        let sketched = self.sketched.get_or_insert_with(|| Box::new(ClassTotals::new(s.func)));
        sketched.take(s, counts);
        if are_few(timed, sketched) {
            sketched.learn(s);
        }
    }

    /// True where every operation is counted, by sketches, while only a sample of the records may come.
    pub fn is_sketched(&self) -> bool {
        self.sketched.is_some()
    }

    /// True where the records of nearly all its operations came, whatever sketches say besides.
    pub fn has_all_records(&self) -> bool {
        self.sketched.as_ref().is_none_or(|s| u128::from(self.count) * 10 >= u128::from(s.count) * 9)
    }

    /// The transfer times from sketches, where they know these.
    fn told_times(&self) -> Option<&ClassTotals> {
        self.sketched.as_deref().filter(|s| s.is_timed())
    }

    /// Operations seen.
    pub fn count(&self) -> u64 {
        self.sketched.as_ref().map_or(self.count, |s| s.count)
    }

    /// Operations whose transfer time is known.
    pub fn timed(&self) -> u64 {
        self.told_times().map_or(self.timed, ClassTotals::timed)
    }

    /// The number of these that CUDA events timed on some rank.
    pub fn by_events(&self) -> u64 {
        self.told_times().map_or(self.by_events, |s| s.by_events)
    }

    /// Counts an operation.
    pub fn add(&mut self, s: &Sample) {
        self.count += 1;
        self.bytes = self.bytes.zip(s.bytes).map(|(sum, b)| sum.saturating_add(b));
        if let Some(busy_ns) = s.busy_ns {
            self.busy_ns += busy_ns;
            self.busy += 1;
        }
        self.last_ns = self.last_ns.max(s.at_ns);
        let at = s.at_ns / 1_000_000_000;
        // Operations complete out of order by a little; a sample older than all that is kept counts in the
        // totals alone.
        let place = match self.seconds.iter().rposition(|x| x.at <= at) {
            Some(i) if self.seconds.get(i).is_some_and(|x| x.at == at) => Some(i),
            Some(i) => {
                self.seconds.insert(i + 1, Second { at, ..Second::default() });
                Some(i + 1)
            }
            None if self.seconds.len() < SECONDS as usize => {
                self.seconds.push_front(Second { at, ..Second::default() });
                Some(0)
            }
            None => None,
        };
        if let Some(t) = s.transfer_ns {
            self.timed += 1;
            self.by_events += u64::from(s.by_events);
            self.timed_bytes += u128::from(s.bytes.unwrap_or(0));
            self.transfer.add(t as f64);
        }
        self.learn(s);
        if let Some(second) = place.and_then(|i| self.seconds.get_mut(i)) {
            second.count += 1;
            second.bytes = sum(second.bytes, s.bytes, u64::saturating_add);
            second.busy_ns = sum(second.busy_ns, s.busy_ns, |a, b| a + b);
            second.busy += u64::from(s.busy_ns.is_some());
            if let Some(t) = s.transfer_ns {
                second.transfer_ns += t as f64;
                second.timed += 1;
            }
        }
        while self.seconds.len() > SECONDS as usize {
            self.seconds.pop_front();
        }
    }

    fn learn(&mut self, s: &Sample) {
        let Some(bytes) = s.bytes else { return };
        let channels = s.channels;
        let fresh = || Seen { first_ns: s.at_ns, last_ns: 0, count: 0, channels, steady: 0, before: None };
        if let Some(seen) = self.sizes.entry(bytes, KINDS, fresh) {
            if let (Some(old), Some(new)) = (seen.channels, s.channels)
                && old != new
            {
                seen.before = Some((old, seen.steady, s.at_ns));
                seen.steady = 0;
            }
            seen.channels = s.channels.or(seen.channels);
            seen.last_ns = seen.last_ns.max(s.at_ns);
            seen.count += 1;
            seen.steady += 1;
        }
        let Some(transfer_ns) = s.transfer_ns else { return };
        let kind = Transfer { bytes, pair: s.pair, by_events: s.by_events };
        if let Some(trend) = self.trends.entry(kind, KINDS, Trend::default) {
            trend.add(s.at_ns, transfer_ns as f64);
        }
    }

    /// The trend of each kind of its transfers.
    pub fn trends(&self) -> impl Iterator<Item = (&Transfer, &Trend)> {
        let sketched = self.sketched.as_deref().filter(|s| are_few(self.timed, s));
        let sketched = sketched.and_then(ClassTotals::trend);
        // A sketch adds up the pairs of ranks; the records of each pair are judged beside it.
        let is_judged = move |(t, _): &(&Transfer, &Trend)| sketched.is_none() || t.pair.is_some();
        sketched.into_iter().chain(self.trends.iter().filter(is_judged))
    }

    /// When each of its sizes was seen.
    pub fn sizes(&self) -> impl Iterator<Item = (u64, &Seen)> {
        self.sizes.iter().map(|(b, s)| (*b, s))
    }

    /// A quantile of the transfer time in ns.
    pub fn quantile(&self, q: f64) -> Option<f64> {
        self.told_times().map_or_else(|| self.sampled_quantile(q), |s| s.quantile(q))
    }

    /// The same of the operations whose records came, closer than sketches tell single times.
    pub(super) fn sampled_quantile(&self, q: f64) -> Option<f64> {
        self.transfer.quantile(q).ok().flatten()
    }

    /// Mean message size of the timed operations in bytes; of all where sketches tell of them.
    pub fn mean_bytes(&self) -> Option<u64> {
        if let Some(s) = &self.sketched {
            return s.mean_bytes();
        }
        u64::try_from(self.timed_bytes.checked_div(u128::from(self.timed))?).ok()
    }

    /// Message bytes of all its operations; absent where the size of any is not known.
    pub fn bytes(&self) -> Option<u64> {
        self.sketched.as_ref().map_or(self.bytes, |s| s.bytes)
    }

    /// The time that a rank spent in all its operations, in ns: those that are timed speak for the others. Absent where
    /// none is.
    pub fn busy_in_all_ns(&self) -> Option<f64> {
        (self.busy > 0).then(|| self.busy_ns / self.busy as f64 * self.count() as f64)
    }

    /// When the last of them was issued, host monotonic ns.
    pub fn last_ns(&self) -> u64 {
        self.last_ns
    }

    fn recent(&self, now_s: u64) -> impl Iterator<Item = &Second> {
        // Whole seconds only: the current one is not over.
        self.seconds.iter().filter(move |s| s.at < now_s && s.at + RATE_SECONDS >= now_s)
    }

    /// Rates over the last whole seconds; `None` for a class that has been silent for longer.
    pub fn rates(&self, now_ns: u64) -> Option<Rates> {
        if let Some(s) = &self.sketched {
            return s.rates(now_ns);
        }
        let now_s = now_ns / 1_000_000_000;
        let (mut count, mut bytes, mut any) = (0u64, None, false);
        for s in self.recent(now_s) {
            any = true;
            count += s.count;
            bytes = sum(bytes, s.bytes, u64::saturating_add);
        }
        let span = RATE_SECONDS as f64;
        any.then(|| Rates {
            ops_per_s: count as f64 / span,
            bytes_per_s: bytes.map(|b| b as f64 / span),
            share: share(self.recent(now_s), RATE_SECONDS),
        })
    }

    /// How busy it was over the last whole seconds, at most 120; `None` for a class that was silent.
    pub fn load(&self, now_ns: u64, seconds: u64) -> Option<Load> {
        if let Some(s) = self.sketched.as_ref().filter(|_| !self.has_all_records()) {
            return s.load(now_ns, seconds);
        }
        let now_s = now_ns / 1_000_000_000;
        let last = || self.seconds.iter().filter(|s| s.at < now_s && s.at + seconds >= now_s);
        let count = last().count() as u64;
        (count > 0).then(|| Load { share: share(last(), seconds), seconds: count })
    }

    /// Mean transfer time of each of the last 60 seconds in ns, oldest first.
    pub fn spark(&self, now_ns: u64) -> Vec<Option<f64>> {
        let now_s = now_ns / 1_000_000_000;
        (now_s.saturating_sub(SPARK_SECONDS - 1)..=now_s)
            .map(|at| {
                let s = self.seconds.iter().find(|s| s.at == at)?;
                (s.timed > 0).then(|| s.transfer_ns / s.timed as f64)
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(at_s: u64, transfer_us: u64) -> Sample {
        Sample {
            at_ns: at_s * 1_000_000_000,
            bytes: Some(1 << 20),
            transfer_ns: Some(transfer_us * 1000),
            busy_ns: Some(transfer_us as f64 * 2000.0),
            pair: None,
            by_events: false,
            channels: Some(2),
        }
    }

    #[test]
    fn quantiles_are_within_a_percent() {
        let mut c = Class::default();
        for n in 1..=1000 {
            c.add(&sample(10, n));
        }
        let near = |q: f64, want: f64| {
            let got = c.quantile(q).expect("samples");
            assert!((got / want - 1.0).abs() < 0.011, "{q}: {got}");
        };
        near(0.5, 500_000.0);
        near(0.99, 990_000.0);
        assert_eq!(c.mean_bytes(), Some(1 << 20));
    }

    #[test]
    fn rates_are_of_the_last_whole_seconds() {
        let mut c = Class::default();
        assert_eq!(c.rates(20_000_000_000), None);
        for s in 10..20 {
            for _ in 0..3 {
                c.add(&sample(s, 100));
            }
        }
        let r = c.rates(20_500_000_000).expect("recent");
        assert!((r.ops_per_s - 3.0).abs() < 1e-9);
        assert!((r.bytes_per_s.expect("sizes") - 3.0 * 1048576.0).abs() < 1e-3);
        assert!((r.share.expect("timed") - 3.0 * 200e-6).abs() < 1e-9);
        let mut untimed = Class::default();
        untimed.add(&Sample { bytes: None, transfer_ns: None, busy_ns: None, ..sample(10, 1) });
        let r = untimed.rates(11_000_000_000).expect("recent");
        assert_eq!((r.bytes_per_s, r.share), (None, None), "absent is not zero");
        assert_eq!(c.rates(60_000_000_000), None, "silent for long");
    }

    #[test]
    fn absent_seconds_are_absent() {
        let mut c = Class::default();
        c.add(&sample(100, 10));
        c.add(&sample(98, 30));
        let spark = c.spark(100_000_000_000);
        assert_eq!(spark.len(), 60);
        assert_eq!(&spark[57..], &[Some(30_000.0), None, Some(10_000.0)]);
    }
}
