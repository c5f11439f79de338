//! `slow-transfer`, `change-point`, `slow-pair`, `slow-node`: transfers take longer than they should, and no rank
//! is late.
//!
//! What they should take is what the same transfers take elsewhere in the job, what a benchmark said, or what they
//! took before; never a fixed number. Where several are slow and have one node, or one pair of ranks, in common
//! that no fast one has, that is the finding, and the others are its evidence.

use super::cost::{Cost, Lost, RECENT_NS, wall_ns};
use super::{Rule, Settings, fact, number, rounded, wall, who};
use crate::join::{Change, ClassKey, Communicator, Join, Member, Transfer, median, spread};
use crate::model::{
    Algo, CommId, Confidence, Evidence, Finding, Func, Kind, OperationRef, Proto, Rank, Track, size_text,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// A class that was silent for so long, in ns, is not judged any more.
const SILENT_NS: u64 = 60_000_000_000;
/// From so many others on, those that are like it say what is usual.
const PEERS: usize = 3;
/// Slow from this ratio to the others on, and from so many times what the others differ by.
const RATIO: f64 = 1.3;
const SPREADS: f64 = 6.0;
/// Others are taken to differ by this share at least.
const SPREAD_LEAST: f64 = 0.02;
/// Slow from this ratio to a benchmark on: it measures under the best of circumstances.
const BASELINE_RATIO: f64 = 1.5;
/// Slow from this ratio to NCCL's own prediction on, which is a model.
const PREDICTED_RATIO: f64 = 2.0;
/// Below this many bytes a benchmark's times, which are of one operation after the other, are mostly launches.
const BASELINE_BYTES: u64 = 1 << 20;
/// Lines of evidence about single transfers.
const TOLD: usize = 6;

/// The source of an expected transfer time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BaselineSource {
    /// A benchmark, or a target.
    Benchmark,
    /// NCCL's cost model.
    Predicted,
}

impl BaselineSource {
    fn ratio(self) -> f64 {
        match self {
            BaselineSource::Benchmark => BASELINE_RATIO,
            BaselineSource::Predicted => PREDICTED_RATIO,
        }
    }
}

/// The time that a transfer should take.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Baseline {
    /// The source of the expectation.
    pub source: BaselineSource,
    /// The operation.
    pub func: Func,
    /// Ranks that took part.
    pub ranks: u32,
    /// Message size in bytes, as nccl-tests counts it.
    pub bytes: u64,
    /// Time of one operation in ns.
    pub time_ns: f64,
}

/// The properties that have to be equal for times to be compared.
type Shape = (Func, Option<Algo>, Option<Proto>, Transfer, Option<u32>, Option<u32>);

/// Transfers that follow each other: those of a communicator, or of a pair of its ranks.
type Route = (CommId, Option<(Rank, Rank)>);

/// One kind of transfer of one communicator, and whether it is slow.
#[derive(Debug)]
struct Speed<'a> {
    comm: &'a Communicator,
    key: &'a ClassKey,
    transfer: &'a Transfer,
    now_ns: f64,
    least_ns: f64,
    at_ns: u64,
    change: Option<Change>,
    /// How many there are a second.
    per_s: f64,
    /// The expected time, and its source.
    against: Option<(f64, Against)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Against {
    Peers(usize),
    Baseline(BaselineSource),
    Before,
}

impl Speed<'_> {
    fn ratio(&self) -> f64 {
        self.against.map_or(1.0, |(should, _)| self.now_ns / should)
    }

    /// The cost to the job in the last `wall_ns`, in ns: the time that its transfers took longer than they should.
    fn lost_ns(&self, wall_ns: u64, now_ns: u64) -> f64 {
        let slow_ns = self.change.map_or(wall_ns, |c| now_ns.saturating_sub(c.since_ns).min(wall_ns));
        let excess_ns = self.against.map_or(0.0, |(should, _)| (self.now_ns - should).max(0.0));
        excess_ns * self.per_s * slow_ns as f64 / 1e9
    }

    fn since_ns(&self) -> u64 {
        self.change.map_or(self.at_ns, |c| c.since_ns)
    }

    fn shape(&self) -> Shape {
        let any_pair = Transfer { pair: None, ..*self.transfer };
        let nodes = self.comm.members().values().find_map(|m| m.record.nodes);
        (self.key.func, self.key.algo, self.key.proto, any_pair, self.comm.ranks(), nodes)
    }

    /// The ranks that take part.
    fn ranks(&self) -> Vec<Rank> {
        match self.transfer.pair {
            Some((a, b)) if a != b => vec![a.min(b), a.max(b)],
            Some((a, _)) => vec![a],
            None => self.comm.members().keys().copied().collect(),
        }
    }

    fn operation(&self) -> OperationRef {
        let track = self.transfer.pair.map_or(Track::Collective, |(a, b)| Track::Pair(a, b));
        OperationRef {
            bytes: Some(self.transfer.bytes),
            algo: self.key.algo.map(|a| a.to_string()),
            proto: self.key.proto.map(|p| p.to_string()),
            ..OperationRef::named(self.key.func.as_str(), track, 0)
        }
    }

    fn evidence(&self) -> Option<Evidence> {
        let (should, against) = self.against?;
        let what = match against {
            Against::Peers(n) => format!("{n} other transfers of its kind in this job"),
            Against::Baseline(BaselineSource::Benchmark) => "the benchmark".to_owned(),
            Against::Baseline(BaselineSource::Predicted) => "NCCL predicts".to_owned(),
            Against::Before => "itself before".to_owned(),
        };
        Some(number(
            format!(
                "{} of {} in communicator {}{} takes {:.1} us, {:.2} times as long as {what} ({:.1} us)",
                self.key.func,
                size_text(self.transfer.bytes),
                self.comm.id,
                self.transfer.pair.map_or_else(String::new, |(a, b)| format!(", rank {a} to {b},")),
                self.now_ns / 1e3,
                self.ratio(),
                should / 1e3,
            ),
            rounded(self.ratio()),
            "1",
        ))
    }
}

/// The rule.
#[derive(Debug, Default)]
pub struct SlowTransferRule {
    baselines: Vec<Baseline>,
    settings: Settings,
}

impl SlowTransferRule {
    /// With what a benchmark measured, if there was one, and these limits.
    pub fn new(baselines: Vec<Baseline>, settings: Settings) -> Self {
        SlowTransferRule { baselines, settings }
    }

    fn speeds<'a>(&self, join: &'a Join, now_ns: u64) -> Vec<Speed<'a>> {
        let mut all = Vec::new();
        for (key, class) in join.classes() {
            let Some(comm) = join.communicator(key.comm) else { continue };
            // The kinds of transfers that are timed speak for those that are not.
            let told: u64 = class.trends().map(|(_, t)| t.count()).sum();
            let rate = class.rates(now_ns).map_or(0.0, |r| r.ops_per_s) / told.max(1) as f64;
            for (transfer, trend) in class.trends() {
                let (Some(now), Some(least_ns)) = (trend.now(), trend.least_now_ns()) else { continue };
                if now_ns.saturating_sub(trend.last_ns()) > SILENT_NS {
                    continue;
                }
                let change = trend.change();
                let against = change.map(|c| (c.before_ns, Against::Before));
                let (at_ns, now_ns) = (now.at_ns, now.median_ns);
                let per_s = rate * trend.count() as f64;
                all.push(Speed { comm, key, transfer, now_ns, least_ns, at_ns, change, per_s, against });
            }
        }
        self.compare(&mut all);
        all
    }

    /// Says of each what it should take, where that is known.
    fn compare(&self, all: &mut [Speed<'_>]) {
        let mut like: BTreeMap<Shape, Vec<usize>> = BTreeMap::new();
        for (i, s) in all.iter().enumerate() {
            like.entry(s.shape()).or_default().push(i);
        }
        for group in like.values().filter(|g| g.len() > PEERS) {
            let times: Vec<f64> = group.iter().filter_map(|i| all.get(*i)).map(|s| s.now_ns).collect();
            let Some(usual) = median(&times) else { continue };
            let differ = spread(&times, usual).max(usual * SPREAD_LEAST);
            for i in group {
                let Some(s) = all.get_mut(*i) else { continue };
                if s.least_ns > usual * RATIO && s.least_ns > usual + SPREADS * differ {
                    s.against = Some((usual, Against::Peers(group.len() - 1)));
                }
            }
        }
        for s in all.iter_mut().filter(|s| s.against.is_none()) {
            let Some(ranks) = s.comm.ranks() else { continue };
            let is_slow = |source: BaselineSource| {
                let should = self.expected(source, s.key.func, ranks, s.transfer.bytes)?;
                (s.least_ns > should * source.ratio()).then_some((should, Against::Baseline(source)))
            };
            s.against = is_slow(BaselineSource::Benchmark).or_else(|| is_slow(BaselineSource::Predicted));
        }
        for s in all.iter_mut().filter(|s| s.against.is_some()) {
            s.against = s.against.filter(|_| !take_turns(s.comm));
        }
    }

    /// The expected time of a size, between the sizes that the source knows.
    fn expected(&self, source: BaselineSource, func: Func, ranks: u32, bytes: u64) -> Option<f64> {
        if bytes < BASELINE_BYTES {
            return None;
        }
        let is_ours = |b: &&Baseline| b.source == source && b.func == func && b.ranks == ranks;
        let ours = || self.baselines.iter().filter(is_ours);
        let below = ours().filter(|b| b.bytes <= bytes).max_by_key(|b| b.bytes)?;
        let above = ours().filter(|b| b.bytes >= bytes).min_by_key(|b| b.bytes)?;
        let span = above.bytes - below.bytes;
        let part = if span == 0 { 0.0 } else { (bytes - below.bytes) as f64 / span as f64 };
        Some(below.time_ns + (above.time_ns - below.time_ns) * part)
    }
}

/// True where two ranks have one GPU: it runs them by turns, and a transfer lasts until the turns of both its ends meet.
fn take_turns(c: &Communicator) -> bool {
    let mut gpus = BTreeSet::new();
    let gpu = |m: &Member| Some((m.record.host_clock, Arc::clone(m.record.gpu.as_ref()?)));
    !c.members().values().filter_map(|m| gpu(m)).all(|g| gpus.insert(g))
}

/// The hosts of some ranks.
fn hosts<'a>(join: &'a Join, c: &Communicator, ranks: &[Rank]) -> BTreeSet<&'a str> {
    let host = |r: &Rank| Some(join.process(c.members().get(r)?.record.segment)?.record.host.as_str());
    ranks.iter().filter_map(host).collect()
}

/// The members that all slow ones have and no fast one has.
fn common<T: Ord + Copy>(slow: &[BTreeSet<T>], fast: &[BTreeSet<T>]) -> Option<T> {
    let mut rest: BTreeSet<T> = slow.first()?.clone();
    for s in slow {
        rest = rest.intersection(s).copied().collect();
    }
    let mut only = rest.into_iter().filter(|t| !fast.iter().any(|f| f.contains(t)));
    let one = only.next()?;
    // Two suspects are no culprit.
    only.next().is_none().then_some(one)
}

/// The cost of slow transfers to the job, in its last minute and in all its time.
fn cost(join: &Join, slow: &[&Speed<'_>], now_ns: u64) -> Cost {
    Cost { recent: lost(join, slow, RECENT_NS, now_ns), in_all: lost(join, slow, u64::MAX, now_ns) }
}

/// The cost in the last `of_ns` of it, as often as they come now. Those of one communicator follow each other; those
/// of others, and those between other ranks, run beside them.
fn lost(join: &Join, slow: &[&Speed<'_>], of_ns: u64, now_ns: u64) -> Lost {
    let mut lost: BTreeMap<Route, (f64, u64)> = BTreeMap::new();
    for s in slow {
        let wall_ns = wall_ns(join, s.comm, now_ns).min(of_ns);
        let sum = lost.entry((s.comm.id, s.transfer.pair)).or_insert((0.0, wall_ns));
        sum.0 += s.lost_ns(wall_ns, now_ns);
    }
    let of_route = |(lost, of): (f64, u64)| Lost { lost_ns: lost.min(of as f64) as u64, of_ns: of };
    let most = lost.into_values().map(of_route).max_by(|a, b| a.share().total_cmp(&b.share()));
    most.unwrap_or_default()
}

fn finding(join: &Join, kind: Kind, ranks: Vec<Rank>, worst: &Speed<'_>, slow: &[&Speed<'_>]) -> Finding {
    let since_ns = slow.iter().map(|s| s.since_ns()).min().unwrap_or(worst.at_ns);
    let mut evidence: Vec<Evidence> = slow.iter().take(TOLD).filter_map(|s| s.evidence()).collect();
    if slow.len() > TOLD {
        evidence.push(fact(format!("and {} more", slow.len() - TOLD)));
    }
    evidence.push(fact("transfer times are those of the rank that came last: no waiting is in them"));
    if ranks.len() <= 2 {
        evidence.extend(ranks.iter().filter_map(|r| who(join, worst.comm, *r)));
    }
    Finding {
        since: wall(join, since_ns),
        since_ns,
        evidence,
        confidence: Confidence::Likely,
        ..Finding::new(kind, worst.comm.id, ranks, worst.operation())
    }
}

impl Rule for SlowTransferRule {
    fn check(&self, join: &Join, now_ns: u64) -> Vec<Finding> {
        let mut found = Vec::new();
        for (mut f, slow) in self.judge(&self.speeds(join, now_ns), join) {
            cost(join, &slow, now_ns).put_on(&mut f, &self.settings);
            found.push(f);
        }
        found
    }
}

impl SlowTransferRule {
    /// The slow classes, with the transfers that each rests on.
    fn judge<'a>(&self, all: &'a [Speed<'a>], join: &Join) -> Vec<(Finding, Vec<&'a Speed<'a>>)> {
        let (mut slow, fast): (Vec<&Speed<'_>>, Vec<&Speed<'_>>) =
            all.iter().partition(|s| s.against.is_some());
        slow.sort_by(|a, b| b.ratio().total_cmp(&a.ratio()));
        let Some(worst) = slow.first().copied() else { return Vec::new() };

        // Slow transfers from one rank to another, and fast ones to third ranks: the way between the two.
        let pairs = |of: &[&Speed<'_>]| -> Vec<BTreeSet<(CommId, Rank, Rank)>> {
            let pair = |s: &&Speed<'_>| match s.ranks().as_slice() {
                [a, b] => Some(BTreeSet::from([(s.comm.id, *a, *b)])),
                _ => None,
            };
            of.iter().filter_map(pair).collect()
        };
        let (slow_pairs, fast_pairs) = (pairs(&slow), pairs(&fast));
        if slow_pairs.len() == slow.len()
            && !fast_pairs.is_empty()
            && common(&slow_pairs, &fast_pairs).is_some()
        {
            let mut f = finding(join, Kind::SlowPair, worst.ranks(), worst, &slow);
            f.advice = "look at the way between the two: NVLink lanes and their errors, the PCIe path, the NICs and the switch port between their nodes".to_owned();
            return vec![(f, slow)];
        }

        // Several communicators are slow, and one node is in all of them and in no fast one.
        let on = |of: &[&Speed<'_>]| -> Vec<BTreeSet<&str>> {
            of.iter().map(|s| hosts(join, s.comm, &s.ranks())).collect()
        };
        let comms: BTreeSet<_> = slow.iter().map(|s| s.comm.id).collect();
        if comms.len() > 1
            && !fast.is_empty()
            && let Some(host) = common(&on(&slow), &on(&fast))
        {
            let here = |r: &Rank| hosts(join, worst.comm, &[*r]).contains(host);
            let ranks: Vec<Rank> = worst.ranks().into_iter().filter(here).collect();
            let mut f = finding(join, Kind::SlowNode, ranks, worst, &slow);
            // Its worst communicator may be another one at the next look.
            f.subject = Some(host.to_owned());
            f.evidence.insert(
                0,
                number(
                    format!(
                        "host {host} takes part in all {} slow communicators and in no fast one",
                        comms.len()
                    ),
                    comms.len() as f64,
                    "count",
                ),
            );
            f.advice = format!(
                "look at host {host}: its NICs and links, its GPUs' clocks and throttling, what else runs there; drain it to see whether the others recover"
            );
            return vec![(f, slow)];
        }

        // One finding a communicator, of its worst transfer.
        let mut told = BTreeSet::new();
        let mut out = Vec::new();
        for s in &slow {
            if !told.insert(s.comm.id) {
                continue;
            }
            let own: Vec<&Speed<'_>> = slow.iter().filter(|o| o.comm.id == s.comm.id).copied().collect();
            let changed = own.iter().any(|o| o.change.is_some());
            let kind = if changed { Kind::ChangePoint } else { Kind::SlowTransfer };
            let mut f = finding(join, kind, s.ranks(), s, &own);
            if let Some(c) =
                own.iter().filter_map(|o| o.change).max_by(|a, b| a.ratio().total_cmp(&b.ratio()))
            {
                let at = wall(join, c.since_ns).unwrap_or_else(|| "some moment".to_owned());
                f.evidence.insert(
                    0,
                    number(
                        format!("since {at}, {:.2} times as long as before", c.ratio()),
                        rounded(c.ratio()),
                        "1",
                    ),
                );
            }
            f.advice = "no rank is late: look at the fabric (NVLink and NIC errors, other traffic, a lane or port that went down) and at GPU clocks and throttling since then".to_owned();
            out.push((f, own));
        }
        out
    }
}

#[cfg(test)]
mod tests;
