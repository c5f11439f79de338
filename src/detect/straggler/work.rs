//! Ranks and hosts that work longer between operations than they used to, while the others do not.
//!
//! Nobody knows whether others wait for them, so the finding is an info.

use super::DESCRIBED;
use super::apart::{self, Apart};
use crate::detect::{names, number, rounded, verb, wall, who};
use crate::join::{Communicator, Join, LateCosts, Member, Process};
use crate::model::{Confidence, Finding, Kind, OperationRef, Rank, SegmentId, Severity, WorkSecond};
use std::collections::{BTreeMap, BTreeSet};

/// Seconds of work that are judged.
const SECONDS: u64 = 10;
/// Work is longer where it exceeds what is usual by this share of it, by so many times the error of that, and by this share
/// of the time.
const LONGER: f64 = 0.08;
const ERRORS: f64 = 3.0;
const OF_TIME: f64 = 0.03;
/// Processes that are judged at most, those that work longest beside what is usual.
const SUSPECTS: usize = 64;
/// Processes that are compared with one another at most.
const PEERS: usize = 256;
const SECOND_NS: f64 = 1e9;

/// The recent work of a process.
struct Recent<'a> {
    process: &'a Process,
    seconds: Vec<&'a WorkSecond>,
    took_ns: f64,
    usual_ns: f64,
    error_ns: f64,
    longer_step_ns: f64,
}

impl<'a> Recent<'a> {
    fn of(process: &'a Process, now_ns: u64) -> Option<Self> {
        let newest = now_ns / SECOND_NS as u64;
        let seconds: Vec<&WorkSecond> =
            process.work.seconds().filter(|s| s.second.saturating_add(SECONDS) > newest).collect();
        let sum = |of: fn(&WorkSecond) -> f32| seconds.iter().map(|s| f64::from(of(s))).sum::<f64>();
        let (took_ns, usual_ns, error_ns) = (sum(|s| s.took_ns), sum(|s| s.usual_ns), sum(|s| s.error_ns));
        let longer_step_ns = sum(|s| s.step_ns) - sum(|s| s.usual_step_ns);
        (usual_ns > 0.0).then_some(Recent { process, seconds, took_ns, usual_ns, error_ns, longer_step_ns })
    }

    /// How many times as long as usual it works.
    fn factor(&self) -> f64 {
        self.took_ns / self.usual_ns
    }

    /// True where it works longer than it usually does, so many times as long as that its peers take.
    fn is_longer(&self, of_peers: f64) -> bool {
        let usual_ns = self.usual_ns * of_peers;
        // Work beside a transfer lasts beyond that for longer where the process does not wait in it. Its steps are no longer then.
        let excess_ns = (self.took_ns - usual_ns).min(self.longer_step_ns);
        excess_ns > LONGER * usual_ns
            && excess_ns > ERRORS * self.error_ns
            && excess_ns > OF_TIME * SECOND_NS * self.seconds.len() as f64
    }

    /// By how much it worked longer, in ns by second.
    fn excess(&self, of_peers: f64) -> BTreeMap<u64, u64> {
        let of = |s: &&WorkSecond| {
            let longer_step_ns = f64::from(s.step_ns) - f64::from(s.usual_step_ns);
            let excess_ns = (f64::from(s.took_ns) - f64::from(s.usual_ns) * of_peers).min(longer_step_ns);
            (excess_ns > 0.0).then_some((s.second, excess_ns as u64))
        };
        self.seconds.iter().filter_map(of).collect()
    }

    fn host(&self) -> &'a str {
        self.process.record.host.as_str()
    }
}

/// Processes that share communicators with one, and how many times as long as usual the median of them works.
struct Peers<'a> {
    all: Vec<Recent<'a>>,
    factor: f64,
    costs: LateCosts,
}

impl<'a> Peers<'a> {
    fn of(join: &'a Join, process: &Process, now_ns: u64) -> Self {
        let mut ids: BTreeSet<SegmentId> = BTreeSet::new();
        for (comm, _) in join.memberships(process.record.id) {
            let members = join.communicator(*comm).into_iter().flat_map(|c| c.members().values());
            ids.extend(members.map(|m| m.record.segment).take(PEERS.saturating_sub(ids.len())));
        }
        let all: Vec<Recent<'_>> =
            ids.iter().filter_map(|id| Recent::of(join.process(*id)?, now_ns)).collect();
        let mut factors: Vec<f64> = all.iter().map(Recent::factor).collect();
        factors.sort_by(f64::total_cmp);
        let factor = factors.get(factors.len().saturating_sub(1) / 2).map_or(1.0, |f| f.max(1.0));
        let excess = |(i, r): (u32, &Recent<'_>)| (Rank(i), r.excess(factor));
        let costs = LateCosts::new((0..).zip(&all).map(excess).collect(), all.len());
        Peers { all, factor, costs }
    }

    /// The places of the processes of each host.
    fn hosts(&self) -> BTreeMap<&'a str, Vec<Rank>> {
        let mut hosts: BTreeMap<&str, Vec<Rank>> = BTreeMap::new();
        for (i, r) in (0..).zip(&self.all) {
            hosts.entry(r.host()).or_default().push(Rank(i));
        }
        hosts
    }

    fn at(&self, place: Rank) -> Option<&Recent<'a>> {
        self.all.get(place.0 as usize)
    }

    /// True where all processes of a host work longer, which others do not.
    fn is_host_apart(&self, host: &str) -> bool {
        let hosts = self.hosts();
        let Some((at, own)) = (0..).zip(&hosts).find(|(_, (h, _))| **h == host).map(|(at, (_, o))| (at, o))
        else {
            return false;
        };
        let is_longer = |p: &Rank| self.at(*p).is_some_and(|r| r.is_longer(self.factor));
        if hosts.len() < 2 || own.len() < 2 || !own.iter().all(is_longer) {
            return false;
        }
        let groups = self.costs.of_groups(hosts.values().map(Vec::as_slice));
        apart::judge(&groups.of(Rank(at)), hosts.len().max(2), false) != Apart::No
    }

    fn is_apart(&self, id: SegmentId) -> bool {
        let Some(at) = self.all.iter().position(|r| r.process.record.id == id) else { return false };
        let is_longer = self.all.get(at).is_some_and(|r| r.is_longer(self.factor));
        let lately = self.costs.of(Rank(u32::try_from(at).unwrap_or(u32::MAX)));
        is_longer && self.all.len() > 1 && apart::judge(&lately, self.all.len(), false) == Apart::Surely
    }
}

/// Finds ranks and hosts that work longer than they used to. Those of which something else is reported are left out.
pub(in crate::detect) fn longer_work(join: &Join, now_ns: u64, known: &[&Finding]) -> Vec<Finding> {
    let late = known.iter().filter(|f| f.open && f.kind == Kind::Straggler);
    let late: BTreeSet<SegmentId> = late.flat_map(|f| processes(join, f)).collect();
    let is_new = |f: &Finding| {
        let id = f.named();
        known.iter().all(|k| k.named() != id) && !processes(join, f).all(|p| late.contains(&p))
    };
    let longer = join.processes().filter_map(|p| Recent::of(p, now_ns)).filter(|r| r.is_longer(1.0));
    let mut longer: Vec<Recent<'_>> = longer.collect();
    longer.sort_by(|a, b| b.factor().total_cmp(&a.factor()));
    longer.truncate(SUSPECTS);
    let mut found = Vec::new();
    let mut hosts: BTreeSet<&str> = BTreeSet::new();
    for r in longer {
        if hosts.contains(r.host()) {
            continue;
        }
        let peers = Peers::of(join, r.process, now_ns);
        if peers.is_host_apart(r.host()) {
            hosts.insert(r.host());
            found.extend(of_host(join, &r, &peers));
        } else if peers.is_apart(r.process.record.id) {
            found.extend(finding(join, &r, &peers, Kind::Straggler, &|p| p.record.id == r.process.record.id));
        }
    }
    found.retain(is_new);
    found
}

/// The processes of the ranks that a finding names.
fn processes(join: &Join, f: &Finding) -> impl Iterator<Item = SegmentId> {
    let members = join.communicator(f.communicator).map(Communicator::members);
    f.ranks.iter().filter_map(move |r| Some(members?.get(r)?.record.segment))
}

/// The finding about a host, in a communicator that has most of its ranks.
fn of_host(join: &Join, r: &Recent<'_>, peers: &Peers<'_>) -> Option<Finding> {
    let is_of_host = |p: &Process| p.record.host == r.host();
    let of_host = peers.all.iter().filter(|p| is_of_host(p.process));
    let found = of_host.filter_map(|p| finding(join, p, peers, Kind::SlowNode, &is_of_host));
    let mut f = found.max_by_key(|f| f.ranks.len())?;
    f.subject = Some(r.host().to_owned());
    Some(f)
}

fn finding(
    join: &Join,
    r: &Recent<'_>,
    peers: &Peers<'_>,
    kind: Kind,
    is_culprit: &dyn Fn(&Process) -> bool,
) -> Option<Finding> {
    let long = r.process.work.long()?;
    let (comm, track, order, func) = (long.kind.comm, long.kind.track, long.order, long.kind.func);
    let c = join.communicator(comm)?;
    let process = |m: &Member| join.process(m.record.segment);
    let culprits = c.members().iter().filter(|(_, m)| process(m).is_some_and(is_culprit));
    let ranks: Vec<Rank> = culprits.map(|(rank, _)| *rank).collect();
    // An agent may have named a communicator of another job.
    if ranks.is_empty() {
        return None;
    }
    let since_ns = r.seconds.first()?.second.saturating_mul(SECOND_NS as u64);
    let mut evidence = vec![number(
        format!(
            "{} {} {:.2} times as long between operations as {} used to; the median of {} processes of the job does {:.2} times",
            names(&ranks),
            verb(&ranks, "works", "work"),
            r.factor(),
            verb(&ranks, "it", "they"),
            peers.all.len(),
            peers.factor,
        ),
        rounded(r.factor()),
        "1",
    )];
    evidence.extend(ranks.iter().take(DESCRIBED).filter_map(|rank| who(join, c, *rank)));
    let what = if kind == Kind::SlowNode { format!("host {}", r.host()) } else { names(&ranks) };
    Some(Finding {
        since: wall(join, since_ns),
        since_ns,
        evidence,
        severity: Severity::Info,
        confidence: Confidence::Likely,
        advice: format!(
            "look at {what}: its GPUs' clocks and throttling, what else runs there, and whether it has more work than before"
        ),
        ..Finding::new(kind, comm, ranks, OperationRef::named(func.as_str(), track, order))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::join::testing::{all_reduce, member, process};
    use crate::model::Update;

    const MS: u64 = 1_000_000;
    const STEPS: u64 = 200;

    /// What is found after 200 steps of four ranks, two a host. `work_ms` says how long a rank works before a step; each step
    /// begins when the last rank has come.
    fn found(work_ms: impl Fn(u32, u64) -> u64, known: &[&Finding]) -> Vec<Finding> {
        let mut join = Join::new();
        for r in 0..4 {
            let Update::Segment(mut s) = process(r) else { unreachable!("a process") };
            s.host = format!("node{}", r / 2);
            join.feed(Update::Segment(s));
            join.feed(member(r, 4, STEPS));
        }
        let mut at_ns = 1_000 * MS;
        for order in 0..STEPS {
            let work_ns = |r: u32| work_ms(r, order) * MS;
            let end_ns = at_ns + (0..4).map(work_ns).max().unwrap_or(0) + MS;
            for r in 0..4 {
                let start_ns = at_ns + work_ns(r);
                let op = all_reduce(r, order, at_ns, Some((start_ns, Some(end_ns))));
                join.feed(Update::Op(Box::new(op)));
            }
            at_ns = end_ns;
            join.tick(at_ns);
        }
        longer_work(&join, at_ns, known)
    }

    fn named(found: &[Finding]) -> Vec<(Kind, &[Rank])> {
        found.iter().map(|f| (f.kind, f.ranks.as_slice())).collect()
    }

    #[test]
    fn a_host_whose_ranks_all_work_longer_is_slow() {
        let of = |known: &[&Finding]| found(|r, order| if r >= 2 && order >= 40 { 75 } else { 50 }, known);
        let slow = of(&[]);
        assert_eq!(named(&slow), [(Kind::SlowNode, [Rank(2), Rank(3)].as_slice())]);
        let f = &slow[0];
        assert_eq!((f.severity, f.subject.as_deref()), (Severity::Info, Some("node1")));
        assert!(f.evidence[0].text.contains("1.50 times as long"), "{f:?}");
        let known = Finding { kind: Kind::Straggler, ..f.clone() };
        assert_eq!(of(&[&known]), [], "they are reported as late already");
    }

    #[test]
    fn a_rank_that_works_longer_is_slow() {
        let slow = found(|r, order| if r == 2 && order >= 40 { 75 } else { 50 }, &[]);
        assert_eq!(named(&slow), [(Kind::Straggler, [Rank(2)].as_slice())]);
    }

    #[test]
    fn nobody_is_slow_where_all_work_longer_or_nobody_waits_for_a_rank() {
        assert_eq!(found(|_, order| if order >= 40 { 75 } else { 50 }, &[]), []);
        assert_eq!(
            found(|r, order| if r == 2 && order >= 40 { 45 } else { 50 - 15 * u64::from(r == 2) }, &[]),
            []
        );
        assert_eq!(found(|r, order| 50 + u64::from(r) + order * 7 % 5, &[]), []);
    }

    #[test]
    fn a_rank_that_works_longer_for_a_short_time_may_be_disturbed() {
        assert_eq!(found(|r, order| if r == 2 && order >= 185 { 75 } else { 50 }, &[]), []);
    }
}
