//! `silent-node` and `clock-skew`: nodes whose agents are not heard, and nodes whose clocks are wrong. They are told where
//! agents speak over a bus; on a node alone there is nobody to be silent.

use super::{Rule, fact, names, number, rounded, seconds, wall};
use crate::join::{Dispute, HostClock, Join, Process};
use crate::model::{CommId, Confidence, Finding, Kind, OperationRef, Place, Rank, Severity, Track, Victims};
use std::collections::{BTreeMap, BTreeSet};

/// A wall clock that differs by this, in ns, makes timestamps of logs and traces useless.
const SKEW_NS: u64 = 100_000_000;
/// Communicators that are named as held up.
const NAMED: usize = 64;
/// Hosts that fall silent within so many ns of one another fall silent together.
const TOGETHER_NS: u64 = 1_000_000_000;
/// Nodes that a conflict names.
const NODES_NAMED: usize = 8;
/// More hosts than this that fall silent together are told as one.
const MANY: usize = 8;
/// Of these so many are named.
const NAMED_HOSTS: usize = 16;
/// The name in an operation's place.
const NO_OPERATION: &str = "Node";

/// The rule.
#[derive(Debug)]
pub(super) struct NodeRule;

/// Processes of one host of which nothing is heard.
#[derive(Debug)]
struct Silent<'a> {
    host: &'a str,
    since_ns: u64,
    processes: Vec<&'a Process>,
}

impl Rule for NodeRule {
    fn check(&self, join: &Join, now_ns: u64) -> Vec<Finding> {
        let mut by_host: BTreeMap<&str, Silent<'_>> = BTreeMap::new();
        for p in join.processes().filter(|p| !p.record.liveness.is_gone()) {
            if let Some(since_ns) = p.silent_ns {
                let host = &p.record.host;
                let s = by_host.entry(host).or_insert(Silent { host, since_ns, processes: Vec::new() });
                s.since_ns = s.since_ns.min(since_ns);
                s.processes.push(p);
            }
        }
        let mut silent: Vec<Silent<'_>> = by_host.into_values().collect();
        silent.sort_by_key(|s| (s.since_ns, s.host));
        let together = |a: &Silent<'_>, b: &Silent<'_>| b.since_ns - a.since_ns <= TOGETHER_NS;
        let mut found = Vec::new();
        for burst in silent.chunk_by(together) {
            // What silences so many at once is one thing, and on none of them.
            if burst.len() > MANY {
                found.push(many_not_heard(join, burst, now_ns));
            } else {
                found.extend(burst.iter().map(|s| not_heard(join, s, now_ns)));
            }
        }
        found.extend(skewed(join));
        found.extend(join.disputes().map(|(comm, dispute)| disputed(comm, dispute)));
        found
    }
}

/// The hosts whose wall clocks differ from the others'.
fn skewed(join: &Join) -> Vec<Finding> {
    let hosts = || join.hosts().iter().map(|(_, h)| h.wall_ahead_ns);
    // Where there are enough of them the most of them are right: what all differ by from the observer's clock is that
    // one's fault, or the time that messages take. Two cannot outvote it.
    let mut all: Vec<i64> = hosts().collect();
    all.sort_unstable();
    let usual = if all.len() < 3 { 0 } else { all[all.len() / 2] };
    let mut found = Vec::new();
    if usual.unsigned_abs() >= SKEW_NS {
        found.push(observer_skewed(all.len(), usual));
    }
    let ahead = |(host, h): (_, &'_ HostClock)| (host, h.wall_ahead_ns.saturating_sub(usual));
    let skewed: Vec<(&str, i64)> =
        join.hosts().iter().map(ahead).filter(|(_, ahead)| ahead.unsigned_abs() >= SKEW_NS).collect();
    if skewed.len() > MANY {
        found.push(many_skewed(&skewed, all.len()));
        return found;
    }
    for (host, ahead) in skewed {
        let by = rounded(seconds(ahead.unsigned_abs()));
        let than = if all.len() < 3 { "the analyser's" } else { "those of the other hosts" };
        let mut f = about(host, "the wall clock", Kind::ClockSkew);
        f.evidence =
            vec![number(format!("the wall clock of host {host} is {by} s {} {than}", way(ahead)), by, "s")];
        f.evidence.extend(join.hosts().get(host).and_then(|h| Some((h, h.error_ns?))).map(|(h, e)| {
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
        found.push(f);
    }
    found
}

/// Very many hosts' wall clocks differ from the others': what they share is to be looked at, not each of them.
fn many_skewed(skewed: &[(&str, i64)], of: usize) -> Finding {
    let mut f = about(&format!("{} hosts", skewed.len()), "the wall clocks", Kind::ClockSkew);
    // However many they become, it is the same trouble.
    f.subject = Some("the wall clocks of many hosts".to_owned());
    let by = |ahead: i64| rounded(seconds(ahead.unsigned_abs()));
    let least = skewed.iter().map(|(_, ahead)| *ahead).min().unwrap_or(0);
    let most = skewed.iter().map(|(_, ahead)| *ahead).max().unwrap_or(0);
    let ends: Vec<String> = [least, most].into_iter().map(|a| format!("{} s {}", by(a), way(a))).collect();
    let named: Vec<&str> = skewed.iter().map(|(host, _)| *host).take(NAMED_HOSTS).collect();
    f.evidence = vec![number(
        format!(
            "the wall clocks of {} of {of} hosts differ from those of the others, from {} to {} them, among them {}",
            skewed.len(),
            ends[0],
            ends[1],
            named.join(", ")
        ),
        by(if least.unsigned_abs() > most.unsigned_abs() { least } else { most }),
        "s",
    )];
    if least < 0 {
        // A message that takes long looks as a clock that is behind.
        f.confidence = Confidence::Likely;
        f.evidence.push(fact(
            "or their messages take so much longer than the others' until they are heard".to_owned(),
        ));
    }
    f.advice = "look at what they share, the time server and the network to the bus, and whether the bus and the analyser keep up (ringwatch cluster status), before any of them".to_owned();
    f
}

fn way(ahead_ns: i64) -> &'static str {
    if ahead_ns > 0 { "ahead of" } else { "behind" }
}

/// All hosts' wall clocks differ from the analyser's alike.
fn observer_skewed(hosts: usize, ahead_ns: i64) -> Finding {
    let by = rounded(seconds(ahead_ns.unsigned_abs()));
    let mut f = about("the analyser", "the wall clock", Kind::ClockSkew);
    let text =
        format!("the wall clocks of most of {hosts} hosts are {by} s {} the analyser's", way(ahead_ns));
    f.evidence = vec![number(text, by, "s")];
    if ahead_ns < 0 {
        // A message that takes long looks as a clock that is behind.
        f.confidence = Confidence::Likely;
        f.evidence.push(fact("or every message takes so long until it is heard".to_owned()));
    }
    f.advice = "look at the time service of the analyser's host (chronyc tracking, timedatectl), and whether the bus and the analyser keep up (ringwatch cluster status)".to_owned();
    f
}

/// Several nodes claim ranks of one communicator. Which of them is right is not known here.
fn disputed(comm: CommId, dispute: &Dispute) -> Finding {
    let ranks: Vec<Rank> = dispute.keys().copied().collect();
    let mut nodes: Vec<&str> = dispute.values().flatten().map(String::as_str).collect();
    nodes.sort_unstable();
    nodes.dedup();
    let more = nodes.len().saturating_sub(NODES_NAMED);
    nodes.truncate(NODES_NAMED);
    let place = format!("communicator {comm}");
    let mut f = about(&nodes.join(", "), &place, Kind::RankConflict);
    f.subject = Some(place);
    f.evidence = vec![fact(format!(
        "the agents of {}{} report processes of their own as {} of communicator {comm}; no verdict rests on what several claim until one alone does",
        nodes.join(" and "),
        if more > 0 { format!(" and {more} more") } else { String::new() },
        names(&ranks)
    ))];
    (f.communicator, f.ranks) = (comm, ranks);
    f.advice = "one of these nodes reports what is not so: look at which of them runs the job, and let the bus accept messages about a node from that node's own credentials alone (config/examples/nats)".to_owned();
    f
}

fn about(host: &str, device: &str, kind: Kind) -> Finding {
    Finding {
        severity: Severity::Warning,
        confidence: Confidence::Proven,
        subject: Some(format!("{host}/{device}")),
        place: Some(Place { host: host.to_owned(), device: device.to_owned() }),
        ..Finding::new(
            kind,
            CommId::unowned(0),
            Vec::new(),
            OperationRef::named(NO_OPERATION, Track::Collective, 0),
        )
    }
}

/// The jobs of some processes, in words: empty where none has a name.
fn jobs<'a>(all: impl Iterator<Item = &'a &'a Process>) -> String {
    let jobs: BTreeSet<&str> = all.filter_map(|p| p.record.job.name.as_deref()).collect();
    if jobs.is_empty() {
        return String::new();
    }
    format!(" of {}", jobs.into_iter().take(4).collect::<Vec<_>>().join(", "))
}

fn many_not_heard(join: &Join, burst: &[Silent<'_>], now_ns: u64) -> Finding {
    let since_ns = burst[0].since_ns;
    let mut f = about(&format!("{} hosts", burst.len()), "their agents", Kind::SilentNode);
    f.subject = Some(format!("hosts silent since {}", since_ns / 1_000_000_000));
    let waited = seconds(now_ns.saturating_sub(since_ns));
    let named: Vec<&str> = burst.iter().map(|s| s.host).take(NAMED_HOSTS).collect();
    let of = jobs(burst.iter().flat_map(|s| &s.processes));
    let processes: usize = burst.iter().map(|s| s.processes.len()).sum();
    f.evidence = vec![
        number(
            format!(
                "nothing has been heard of {} of {} hosts for {waited:.1} s, among them {}",
                burst.len(),
                join.hosts().iter().count(),
                named.join(", ")
            ),
            rounded(waited),
            "s",
        ),
        fact(format!(
            "{processes} processes{of} were at work there; what they do is not known, and no verdict rests on them"
        )),
    ];
    f.advice = "they fell silent together: look at what they share, the network to the bus and the bus itself (ringwatch cluster status, nats server report connections), before any of them".to_owned();
    (f.since_ns, f.since) = (since_ns, wall(join, since_ns));
    f
}

fn not_heard(join: &Join, silent: &Silent<'_>, now_ns: u64) -> Finding {
    let Silent { host, since_ns, processes: all } = silent;
    let mut f = about(host, "the agent", Kind::SilentNode);
    let waited = seconds(now_ns.saturating_sub(*since_ns));
    let of = jobs(all.iter());
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
    (f.since_ns, f.since) = (*since_ns, wall(join, *since_ns));
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
    fn a_rank_that_two_nodes_claim_is_told_as_a_conflict_until_one_gives_it_up() {
        let mut join = Join::new();
        (0..2).for_each(|r| join.feed(process(r)));
        join.feed(member(0, 2, 0));
        let mut detector = Detector::new(Settings::default());
        let claim = |nodes: &[&str]| Update::Disputed {
            comm: CommId::unowned(7),
            rank: Rank(1),
            nodes: nodes.iter().map(|n| (*n).to_owned()).collect(),
        };
        join.feed(claim(&["a", "b"]));
        let found = detector.opened(&join, 10 * S);
        let [f] = found.as_slice() else { panic!("{found:#?}") };
        assert_eq!(f.kind, Kind::RankConflict);
        assert!(f.evidence[0].text.contains("the agents of a and b"), "{f:#?}");
        join.feed(claim(&[]));
        detector.opened(&join, 14 * S);
        detector.opened(&join, 17 * S);
        assert!(!detector.findings()[0].open);
    }

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
        assert_eq!(detector.opened(&join, 10 * S), []);
        join.feed(Update::Silent { segment: SegmentId(2), since_ns: Some(8 * S) });
        let found = detector.opened(&join, 12 * S);
        assert_eq!(found.len(), 1, "{found:#?}");
        let f = &found[0];
        assert_eq!((f.kind, f.place.as_ref().map(|p| p.host.as_str())), (Kind::SilentNode, Some("node1")));
        assert_eq!(f.victims[0].ranks, [crate::model::Rank(1)]);
        assert!(f.evidence[0].text.contains("for 4.0 s"), "{f:#?}");
        join.feed(Update::Silent { segment: SegmentId(2), since_ns: None });
        detector.opened(&join, 14 * S);
        detector.opened(&join, 17 * S);
        assert!(!detector.findings()[0].open);
    }

    #[test]
    fn a_wall_clock_that_is_off_is_named() {
        let mut join = Join::new();
        let told = |ahead| Update::Clock { host: "b".into(), shift_ns: 5, wall_ahead_ns: ahead };
        join.feed(told(30_000_000));
        let mut detector = Detector::new(Settings::default());
        assert_eq!(detector.opened(&join, S), []);
        join.feed(told(-2_000_000_000));
        let found = detector.opened(&join, 3 * S);
        assert_eq!(found.iter().map(|f| f.kind).collect::<Vec<_>>(), [Kind::ClockSkew]);
        assert!(found[0].evidence[0].text.contains("2 s behind"), "{found:#?}");
    }

    #[test]
    fn many_nodes_that_fall_silent_together_are_one_finding() {
        let mut join = Join::new();
        for r in 0..40 {
            let Update::Segment(mut p) = process(r) else { unreachable!() };
            p.host = format!("node{r:02}");
            let segment = p.id;
            join.feed(Update::Segment(p));
            join.feed(Update::Clock { host: format!("node{r:02}"), shift_ns: 0, wall_ahead_ns: 0 });
            // Two an hour ago, and the rest within two seconds.
            let since = if r < 2 { S } else { 3600 * S + u64::from(r) * S / 20 };
            join.feed(Update::Silent { segment, since_ns: Some(since) });
        }
        let mut detector = Detector::new(Settings::default());
        let found = detector.opened(&join, 3605 * S);
        let mut places: Vec<String> =
            found.iter().filter_map(|f| Some(f.place.as_ref()?.host.clone())).collect();
        places.sort();
        assert_eq!(places, ["38 hosts", "node00", "node01"], "{found:#?}");
        let all =
            found.iter().find(|f| f.victims.is_empty() && f.evidence[0].text.contains("38 of 40")).unwrap();
        assert!(all.evidence[1].text.starts_with("38 processes"), "{all:#?}");
    }

    #[test]
    fn many_wall_clocks_that_differ_from_the_others_are_one_finding() {
        let mut join = Join::new();
        let mut detector = Detector::new(Settings::default());
        let mut told = |skewed: u32, behind: i64| {
            for n in 0..40 {
                let wall_ahead_ns = if n < skewed { -behind - i64::from(n) * 1_000_000 } else { 0 };
                join.feed(Update::Clock { host: format!("node{n:02}"), shift_ns: 0, wall_ahead_ns });
            }
            detector.opened(&join, 10 * S * u64::from(skewed))
        };
        let few = told(MANY as u32, 150_000_000);
        assert_eq!(few.len(), MANY, "{few:#?}");
        let many = told(12, 150_000_000);
        let [f] = many.as_slice() else { panic!("{many:#?}") };
        assert_eq!((f.kind, f.confidence), (Kind::ClockSkew, Confidence::Likely));
        let text = &f.evidence[0].text;
        assert!(
            text.starts_with("the wall clocks of 12 of 40 hosts differ from those of the others, from 0.161 s behind to 0.15 s behind them, among them node00, node01"),
            "{text}"
        );
        assert!(f.evidence[1].text.starts_with("or their messages"), "{f:#?}");
        assert_eq!(told(13, 160_000_000), [], "more of them are no other trouble");
        // A clock that is ahead is no late message.
        let ahead = told(14, -150_000_000);
        assert_eq!(ahead, [], "{ahead:#?}");
    }

    #[test]
    fn what_all_wall_clocks_differ_by_is_the_observers() {
        let mut join = Join::new();
        let mut told = |host: &str, ahead| {
            join.feed(Update::Clock { host: host.into(), shift_ns: 5, wall_ahead_ns: ahead });
        };
        for host in ["a", "b", "c"] {
            told(host, -3_000_000_000);
        }
        told("d", -1_000_000_000);
        let mut detector = Detector::new(Settings::default());
        let mut found = detector.opened(&join, S);
        found.sort_by_key(|f| f.confidence);
        let texts: Vec<&str> = found.iter().map(|f| f.evidence[0].text.as_str()).collect();
        assert_eq!(found.len(), 2, "{texts:?}");
        assert!(
            texts.iter().any(|t| t.contains("most of 4 hosts are 3 s behind the analyser's")),
            "{texts:?}"
        );
        assert!(
            texts.iter().any(|t| t.contains("host d is 2 s ahead of those of the other hosts")),
            "{texts:?}"
        );
    }
}
