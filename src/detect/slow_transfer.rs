//! `slow-transfer`, `change-point`, `slow-pair`, `slow-node`: transfers take longer than they should, and no rank
//! is late.
//!
//! What they should take is what the same transfers take elsewhere in the job, what a benchmark said, or what they
//! took before; never a fixed number. Where several are slow and have one node, or one pair of ranks, in common
//! that no fast one has, that is the finding, and the others are its evidence.

use super::{Rule, fact, number, rounded, wall, who};
use crate::join::{Change, ClassKey, Communicator, Join, Transfer, median, spread};
use crate::model::{
    Algo, Confidence, Evidence, Finding, Func, Kind, OperationRef, Proto, Rank, Track, size_text,
};
use std::collections::{BTreeMap, BTreeSet};

/// What was silent for so long, in ns, is not judged any more.
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
/// Below this many bytes a benchmark's times, which are of one operation after the other, are mostly launches.
const BASELINE_BYTES: u64 = 1 << 20;
/// Lines of evidence about single transfers.
const TOLD: usize = 6;

/// What a benchmark measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Baseline {
    /// The operation.
    pub func: Func,
    /// Ranks that took part.
    pub ranks: u32,
    /// Message size in bytes, as nccl-tests counts it.
    pub bytes: u64,
    /// Time of one operation in ns.
    pub time_ns: f64,
}

/// What has to be equal for times to be compared.
type Shape = (Func, Option<Algo>, Option<Proto>, Transfer, Option<u32>, Option<u32>);

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
    /// What it should take, and who says so.
    against: Option<(f64, Against)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Against {
    Peers(usize),
    Benchmark,
    Before,
}

impl Speed<'_> {
    fn ratio(&self) -> f64 {
        self.against.map_or(1.0, |(should, _)| self.now_ns / should)
    }

    fn since_ns(&self) -> u64 {
        self.change.map_or(self.at_ns, |c| c.since_ns)
    }

    fn shape(&self) -> Shape {
        let any_pair = Transfer { pair: None, ..*self.transfer };
        let nodes = self.comm.members().values().find_map(|m| m.record.nodes);
        (self.key.func, self.key.algo, self.key.proto, any_pair, self.comm.ranks(), nodes)
    }

    /// Who takes part.
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
            Against::Benchmark => "the benchmark".to_owned(),
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
}

impl SlowTransferRule {
    /// With what a benchmark measured, if there was one.
    pub fn new(baselines: Vec<Baseline>) -> Self {
        SlowTransferRule { baselines }
    }

    fn speeds<'a>(&self, join: &'a Join, now_ns: u64) -> Vec<Speed<'a>> {
        let mut all = Vec::new();
        for (key, class) in join.classes() {
            let Some(comm) = join.communicator(key.comm) else { continue };
            for (transfer, trend) in class.trends() {
                let (Some(now), Some(least_ns)) = (trend.now(), trend.least_now_ns()) else { continue };
                if now_ns.saturating_sub(trend.last_ns()) > SILENT_NS {
                    continue;
                }
                let change = trend.change();
                let against = change.map(|c| (c.before_ns, Against::Before));
                let (at_ns, now_ns) = (now.at_ns, now.median_ns);
                all.push(Speed { comm, key, transfer, now_ns, least_ns, at_ns, change, against });
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
            let should = s.comm.ranks().and_then(|n| self.expected(s.key.func, n, s.transfer.bytes));
            if let Some(should) = should.filter(|t| s.least_ns > t * BASELINE_RATIO) {
                s.against = Some((should, Against::Benchmark));
            }
        }
    }

    /// What a benchmark says of a size, between the sizes that it measured.
    fn expected(&self, func: Func, ranks: u32, bytes: u64) -> Option<f64> {
        if bytes < BASELINE_BYTES {
            return None;
        }
        let ours = || self.baselines.iter().filter(|b| b.func == func && b.ranks == ranks);
        let below = ours().filter(|b| b.bytes <= bytes).max_by_key(|b| b.bytes)?;
        let above = ours().filter(|b| b.bytes >= bytes).min_by_key(|b| b.bytes)?;
        let span = above.bytes - below.bytes;
        let part = if span == 0 { 0.0 } else { (bytes - below.bytes) as f64 / span as f64 };
        Some(below.time_ns + (above.time_ns - below.time_ns) * part)
    }
}

/// The hosts of some ranks.
fn hosts<'a>(join: &'a Join, c: &Communicator, ranks: &[Rank]) -> BTreeSet<&'a str> {
    let host = |r: &Rank| Some(join.process(c.members().get(r)?.record.segment)?.record.host.as_str());
    ranks.iter().filter_map(host).collect()
}

/// What all slow ones have and no fast one has.
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
        let all = self.speeds(join, now_ns);
        let (mut slow, fast): (Vec<&Speed<'_>>, Vec<&Speed<'_>>) =
            all.iter().partition(|s| s.against.is_some());
        slow.sort_by(|a, b| b.ratio().total_cmp(&a.ratio()));
        let Some(worst) = slow.first().copied() else { return Vec::new() };

        // Slow transfers from one rank to another, and fast ones to third ranks: the way between the two.
        let pairs = |of: &[&Speed<'_>]| -> Vec<BTreeSet<(u64, Rank, Rank)>> {
            let pair = |s: &&Speed<'_>| match s.ranks().as_slice() {
                [a, b] => Some(BTreeSet::from([(s.comm.id.0, *a, *b)])),
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
            return vec![f];
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
            return vec![f];
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
            out.push(f);
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::join::testing::{all_reduce, process};
    use crate::model::{CommId, CommRecord, Lane, OpRecord, SegmentId, Update};

    const MS: u64 = 1_000_000;
    const US: u64 = 1_000;

    /// A job of processes, two a host, and its communicators; every operation takes what `takes` says.
    struct Job {
        join: Join,
        comms: Vec<(u64, Vec<u32>)>,
        at: u64,
        order: u64,
    }

    impl Job {
        fn new(processes: u32, comms: &[&[u32]]) -> Self {
            let mut join = Join::new();
            for n in 0..processes {
                let Update::Segment(mut s) = process(n) else { unreachable!("a process") };
                s.host = format!("node{}", n / 2);
                join.feed(Update::Segment(s));
            }
            let comms: Vec<(u64, Vec<u32>)> = (1..).zip(comms.iter().map(|c| c.to_vec())).collect();
            for (id, members) in &comms {
                for (rank, n) in (0..).zip(members) {
                    join.feed(Update::Comm(CommRecord {
                        segment: SegmentId(u64::from(*n) + 1),
                        comm: CommId(*id),
                        rank: Rank(rank),
                        ranks: u32::try_from(members.len()).ok(),
                        nodes: None,
                        name: None,
                        gpu: None,
                        host_clock: 1,
                        issued: 0,
                        replayed: 0,
                        init_ns: 0,
                        making: None,
                        finalized_ns: None,
                    }));
                }
            }
            Job { join, comms, at: 1_000 * MS, order: 0 }
        }

        fn run(&mut self, n: u32, takes: impl Fn(u64) -> u64) {
            for _ in 0..n {
                self.at += 10 * MS;
                for (id, members) in &self.comms {
                    for (rank, segment) in (0..).zip(members) {
                        let took = takes(*id);
                        let kernel = Some((self.at + 10 * US, Some(self.at + 10 * US + took)));
                        let mut o: OpRecord = all_reduce(rank, self.order, self.at, kernel);
                        o.segment = SegmentId(u64::from(*segment) + 1);
                        o.comm = CommId(*id);
                        self.join.feed(Update::Op(Box::new(o)));
                    }
                }
                self.order += 1;
                self.join.tick(self.at + 5 * MS);
            }
        }

        fn check(&self) -> Vec<Finding> {
            SlowTransferRule::default().check(&self.join, self.at)
        }
    }

    #[test]
    fn a_transfer_that_gets_slower_is_a_change_point() {
        let mut job = Job::new(2, &[&[0, 1]]);
        job.run(300, |_| 100 * US);
        assert_eq!(job.check(), vec![]);
        let since = job.at;
        job.run(100, |_| 170 * US);
        let found = job.check();
        assert_eq!(found.len(), 1, "{found:#?}");
        assert_eq!((found[0].kind, found[0].ranks.len()), (Kind::ChangePoint, 2));
        assert!(found[0].since_ns.abs_diff(since) < 200 * MS);
        assert!((found[0].evidence[0].value.unwrap() - 1.7).abs() < 0.02, "{:?}", found[0].evidence);
        job.run(200, |_| 100 * US);
        assert_eq!(job.check(), vec![]);
    }

    #[test]
    fn slower_than_its_like_from_the_start_is_a_slow_transfer() {
        // Five communicators on hosts of their own; the second was never fast.
        let mut job = Job::new(10, &[&[0, 1], &[2, 3], &[4, 5], &[6, 7], &[8, 9]]);
        job.run(200, |c| if c == 2 { 150 * US } else { 100 * US + c * US });
        let found = job.check();
        assert_eq!(found.len(), 1, "{found:#?}");
        // With two ranks it is a pair, and the others' pairs are fast.
        assert_eq!((found[0].kind, found[0].communicator), (Kind::SlowPair, CommId(2)));
        let mut job = Job::new(12, &[&[0, 1, 2], &[3, 4, 5], &[6, 7, 8], &[9, 10, 11]]);
        job.run(200, |c| if c == 2 { 150 * US } else { 100 * US + c * US });
        let found = job.check();
        assert_eq!((found.len(), found[0].kind, found[0].communicator), (1, Kind::SlowTransfer, CommId(2)));
    }

    #[test]
    fn a_node_that_all_slow_communicators_have_in_common_is_named() {
        // Rows and columns of a grid over six hosts of two; host node1 holds processes 2 and 3.
        let mut job = Job::new(
            12,
            &[&[0, 4, 8], &[1, 5, 9], &[2, 6, 10], &[3, 7, 11], &[0, 6, 9], &[2, 4, 11], &[1, 7, 10]],
        );
        job.run(200, |c| if [3, 4, 6].contains(&c) { 180 * US } else { 100 * US + c * US });
        let found = job.check();
        assert_eq!(found.len(), 1, "{found:#?}");
        assert_eq!((found[0].kind, found[0].ranks.as_slice()), (Kind::SlowNode, &[Rank(0)][..]));
        assert!(found[0].evidence[0].text.contains("node1"), "{:?}", found[0].evidence);
    }

    #[test]
    fn a_pair_is_named_where_other_pairs_are_fast() {
        let mut job = Job::new(8, &[&[0, 1, 2, 3, 4, 5, 6, 7]]);
        for i in 0..200u64 {
            job.at += 10 * MS;
            for (from, to) in [(0u32, 1u32), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6)] {
                let took = if (from, to) == (2, 3) { 400 * US } else { 100 * US + u64::from(from) * US };
                for (rank, lane) in [(from, Lane::Send(Rank(to))), (to, Lane::Recv(Rank(from)))] {
                    let kernel = Some((job.at + 10 * US, Some(job.at + 10 * US + took)));
                    let mut o = all_reduce(rank, i, job.at, kernel);
                    o.comm = CommId(1);
                    o.lane = lane;
                    o.func = if matches!(lane, Lane::Send(_)) { Func::Send } else { Func::Recv };
                    job.join.feed(Update::Op(Box::new(o)));
                }
            }
            job.join.tick(job.at + 5 * MS);
        }
        let found = job.check();
        assert_eq!(found.len(), 1, "{found:#?}");
        assert_eq!((found[0].kind, found[0].ranks.as_slice()), (Kind::SlowPair, &[Rank(2), Rank(3)][..]));
    }

    #[test]
    fn a_benchmark_says_what_a_transfer_should_take() {
        let mut job = Job::new(2, &[&[0, 1]]);
        job.run(200, |_| 200 * US);
        let at = |bytes, us: f64| Baseline { func: Func::AllReduce, ranks: 2, bytes, time_ns: us * 1e3 };
        // 4 MiB lie between what was measured.
        let rule = SlowTransferRule::new(vec![at(2 << 20, 50.0), at(6 << 20, 150.0)]);
        let found = rule.check(&job.join, job.at);
        assert_eq!((found.len(), found[0].kind), (1, Kind::SlowTransfer));
        assert!(found[0].evidence.iter().any(|e| e.text.contains("2.00 times as long as the benchmark")));
        let close = SlowTransferRule::new(vec![at(2 << 20, 100.0), at(6 << 20, 200.0)]);
        assert_eq!(close.check(&job.join, job.at), vec![]);
        let other = SlowTransferRule::new(vec![Baseline { ranks: 4, ..at(4 << 20, 10.0) }]);
        assert_eq!(other.check(&job.join, job.at), vec![], "of other numbers of ranks it says nothing");
    }

    #[test]
    fn uneven_sizes_and_pauses_are_healthy() {
        let mut job = Job::new(2, &[&[0, 1]]);
        job.run(300, |_| 100 * US);
        // A checkpoint; then the first operations are slow.
        job.at += 50_000 * MS;
        job.run(10, |_| 900 * US);
        job.run(100, |_| 100 * US);
        assert_eq!(job.check(), vec![]);
    }
}
