//! `silent-node` and `clock-skew`: nodes whose agents are not heard, and nodes whose clocks are wrong. They are told where
//! agents speak over a bus; on a node alone there is nobody to be silent.

use super::{Rule, fact, number, rounded, seconds, wall};
use crate::join::{Join, Process};
use crate::model::{
    CommId, Confidence, Finding, Kind, Liveness, OperationRef, Place, Rank, Severity, Track, Victims,
};
use std::collections::{BTreeMap, BTreeSet};

/// A wall clock that differs by this, in ns, makes timestamps of logs and traces useless.
const SKEW_NS: u64 = 100_000_000;
/// Communicators that are named as held up.
const NAMED: usize = 64;
/// What stands in an operation's place.
const NO_OPERATION: &str = "Node";

/// The rule.
#[derive(Debug)]
pub(super) struct NodeRule;

impl Rule for NodeRule {
    fn check(&self, join: &Join, now_ns: u64) -> Vec<Finding> {
        let mut silent: BTreeMap<&str, (u64, Vec<&Process>)> = BTreeMap::new();
        for p in join.processes().filter(|p| p.record.liveness == Liveness::Alive) {
            if let Some(since) = p.silent_ns {
                let host = silent.entry(&p.record.host).or_insert((since, Vec::new()));
                host.0 = host.0.min(since);
                host.1.push(p);
            }
        }
        let mut found: Vec<Finding> = silent
            .into_iter()
            .map(|(host, (since, all))| not_heard(join, host, since, &all, now_ns))
            .collect();
        found.extend(join.hosts().iter().filter(|(_, h)| h.wall_ahead_ns.unsigned_abs() >= SKEW_NS).map(
            |(host, h)| {
                let ahead = h.wall_ahead_ns;
                let way = if ahead > 0 { "ahead of" } else { "behind" };
                let by = rounded(seconds(ahead.unsigned_abs()));
                let mut f = about(host, "the wall clock", Kind::ClockSkew);
                let text = format!("the wall clock of host {host} is {by} s {way} the analyser's");
                f.evidence = vec![number(text, by, "s")];
                f.evidence.extend(h.error_ns.map(|e| {
                    let us = rounded(e as f64 / 1e3);
                    let text = format!(
                        "its times are mapped by the ends of {} collectives, which differ by up to {us} us",
                        h.ends
                    );
                    number(text, e as f64 / 1e9, "s")
                }));
                f.advice = format!(
                    "look at the time service of {host} (chronyc tracking, timedatectl): verdicts do not rest on wall clocks, but logs and traces do"
                );
                f
            },
        ));
        found
    }
}

fn about(host: &str, device: &str, kind: Kind) -> Finding {
    Finding {
        severity: Severity::Warning,
        confidence: Confidence::Proven,
        subject: Some(format!("{host}/{device}")),
        place: Some(Place { host: host.to_owned(), device: device.to_owned() }),
        ..Finding::new(kind, CommId(0), Vec::new(), OperationRef::named(NO_OPERATION, Track::Collective, 0))
    }
}

fn not_heard(join: &Join, host: &str, since_ns: u64, all: &[&Process], now_ns: u64) -> Finding {
    let mut f = about(host, "the agent", Kind::SilentNode);
    let waited = seconds(now_ns.saturating_sub(since_ns));
    let jobs: BTreeSet<&str> = all.iter().filter_map(|p| p.record.job.name.as_deref()).collect();
    let of = if jobs.is_empty() {
        String::new()
    } else {
        format!(" of {}", jobs.iter().copied().take(4).collect::<Vec<_>>().join(", "))
    };
    let n = all.len();
    let processes = if n == 1 { "1 process".to_owned() } else { format!("{n} processes") };
    f.evidence = vec![
        number(format!("nothing has been heard of host {host} for {waited:.1} s"), rounded(waited), "s"),
        fact(format!(
            "{processes}{of} were at work there; what they do is not known, and no verdict rests on them"
        )),
    ];
    f.advice = format!(
        "see whether {host} is up and its agent runs (systemctl status ringwatch-agent) and reaches the bus; if the node is lost, so are its ranks"
    );
    (f.since_ns, f.since) = (since_ns, wall(join, since_ns));
    let mut ranks: BTreeMap<CommId, Vec<Rank>> = BTreeMap::new();
    for (comm, rank) in all.iter().flat_map(|p| join.memberships(p.record.id)) {
        if ranks.contains_key(comm) || ranks.len() < NAMED {
            ranks.entry(*comm).or_default().push(*rank);
        }
    }
    for (communicator, ranks) in ranks {
        let Some(c) = join.communicator(communicator).filter(|c| !c.closed()) else { continue };
        let order = ranks.first().and_then(|r| c.members().get(r)).map_or(0, |m| m.record.issued);
        f.victims.push(Victims { communicator, ranks, order, track: Track::Collective });
    }
    f
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::detect::{Detector, Settings};
    use crate::join::testing::{member, process};
    use crate::model::{SegmentId, Update};

    const S: u64 = 1_000_000_000;

    #[test]
    fn a_node_that_is_not_heard_is_named_until_it_is_heard_again() {
        let mut join = Join::new();
        for r in 0..2 {
            let Update::Segment(mut p) = process(r) else { unreachable!() };
            p.host = format!("node{r}");
            join.feed(Update::Segment(p));
            join.feed(member(r, 2, 0));
        }
        let mut detector = Detector::new(Settings::default());
        assert_eq!(detector.check(&join, 10 * S), []);
        join.feed(Update::Silent { segment: SegmentId(2), since_ns: Some(8 * S) });
        let found = detector.check(&join, 12 * S);
        assert_eq!(found.len(), 1, "{found:#?}");
        let f = &found[0];
        assert_eq!((f.kind, f.place.as_ref().map(|p| p.host.as_str())), (Kind::SilentNode, Some("node1")));
        assert_eq!(f.victims[0].ranks, [crate::model::Rank(1)]);
        assert!(f.evidence[0].text.contains("for 4.0 s"), "{f:#?}");
        join.feed(Update::Silent { segment: SegmentId(2), since_ns: None });
        detector.check(&join, 14 * S);
        detector.check(&join, 17 * S);
        assert!(!detector.findings()[0].open);
    }

    #[test]
    fn a_wall_clock_that_is_off_is_named() {
        let mut join = Join::new();
        let told = |ahead| Update::Clock { host: "b".into(), shift_ns: 5, wall_ahead_ns: ahead };
        join.feed(told(30_000_000));
        let mut detector = Detector::new(Settings::default());
        assert_eq!(detector.check(&join, S), []);
        join.feed(told(-2_000_000_000));
        let found = detector.check(&join, 3 * S);
        assert_eq!(found.iter().map(|f| f.kind).collect::<Vec<_>>(), [Kind::ClockSkew]);
        assert!(found[0].evidence[0].text.contains("2 s behind"), "{found:#?}");
    }
}
