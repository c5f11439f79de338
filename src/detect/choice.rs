//! `choice-differs`: NCCL chose another algorithm, protocol or number of channels than before, or than on other
//! ranks.

use super::{Rule, Settings, fact, names, number, verb, wall};
use crate::join::{ClassKey, Communicator, Instance, Join, Seen, Track};
use crate::model::{Confidence, Evidence, Finding, Kind, OperationRef, Rank, Severity, Victims, size_text};
use std::collections::BTreeMap;

/// So often has a size to be seen with one choice, and then with another.
const OFTEN: u64 = 20;

/// Ranks that chose differently for one operation.
#[derive(Debug)]
pub struct SplitChoiceRule {
    settings: Settings,
}

impl SplitChoiceRule {
    /// With these times.
    pub fn new(settings: Settings) -> Self {
        SplitChoiceRule { settings }
    }
}

impl Rule for SplitChoiceRule {
    fn check(&self, join: &Join, now_ns: u64) -> Vec<Finding> {
        let due_ns = now_ns.saturating_sub(self.settings.patience_ns);
        join.notable().filter_map(|c| between_ranks(join, c, due_ns)).collect()
    }
}

/// Sizes that run in another way than before.
#[derive(Debug)]
pub struct ChoiceRule;

impl Rule for ChoiceRule {
    fn check(&self, join: &Join, _now_ns: u64) -> Vec<Finding> {
        over_time(join)
    }
}

/// Ranks that run one operation in different ways never finish it, or finish it wrongly. Operations that began after
/// `due_ns` wait for the ranks of which it is not known yet, where these can still be the majority.
fn between_ranks(join: &Join, c: &Communicator, due_ns: u64) -> Option<Finding> {
    let agreed = |key: (Track, u64)| c.mismatch().is_none_or(|(t, o, _)| key.0 != t || key.1 < o);
    let (track, order, instance, camps) = c
        .split()
        .filter(|(t, o, _)| !matches!(t, Track::Pair(..)) && agreed((*t, *o)))
        .find(|(.., i)| !alike(i))
        .map(|(t, o, i)| (t, o, i, camps(i)))?;
    let began_ns = instance.began_ns().unwrap_or(0);
    let mut sizes: Vec<usize> = camps.values().map(Vec::len).collect();
    sizes.sort_unstable_by_key(|n| std::cmp::Reverse(*n));
    let most = *sizes.first()?;
    let unknown = c.members().len().saturating_sub(sizes.iter().sum());
    let is_open = unknown > 0 && most <= sizes.get(1).map_or(0, |second| second + unknown);
    if is_open && began_ns > due_ns {
        return None;
    }
    // Where as many chose one way as the other, all are named.
    let right: Vec<&String> = camps.iter().filter(|(_, r)| r.len() == most).map(|(t, _)| t).collect();
    let right = if right.len() == 1 { right.first().copied() } else { None };
    let mut ranks: Vec<Rank> =
        camps.iter().filter(|(t, _)| Some(*t) != right).flat_map(|(_, r)| r.clone()).collect();
    ranks.sort();
    // Those that chose as most did wait in it for the others; where nobody knows who is right, both wait for each other.
    let waits = |r: &Rank| instance.parts.get(r).is_some_and(|p| !p.finished);
    let mut waiting: Vec<Rank> = camps
        .iter()
        .filter(|(t, _)| right.is_none_or(|right| *t == right))
        .flat_map(|(_, r)| r.iter().copied().filter(&waits))
        .collect();
    waiting.sort();
    let victims = Victims { communicator: c.id, ranks: waiting, order, track };
    let op = &instance.first()?.op;
    let chose = |(text, ranks): (&String, &Vec<Rank>)| {
        fact(format!("{} {} it by {text}", names(ranks), verb(ranks, "runs", "run")))
    };
    Some(Finding {
        since: wall(join, began_ns),
        since_ns: began_ns,
        severity: Severity::Critical,
        evidence: camps.iter().map(chose).collect(),
        victims: Some(victims).into_iter().filter(|v| !v.ranks.is_empty()).collect(),
        advice: "compare NCCL's version, NCCL_ALGO, NCCL_PROTO, tuner plugins and topology files of these ranks with the others'".to_owned(),
        ..Finding::new(Kind::ChoiceDiffers, c.id, ranks, c.describe(track, order, op))
    })
}

/// True when all ranks of which it is known run it in one way.
pub(super) fn alike(instance: &Instance) -> bool {
    let mut ways = instance.parts.values().filter_map(|p| p.op.algo.zip(p.op.proto));
    let first = ways.next();
    ways.all(|w| Some(w) == first)
}

/// The ranks by how they run it; those of which it is not known are in none.
fn camps(instance: &Instance) -> BTreeMap<String, Vec<Rank>> {
    let mut camps: BTreeMap<String, Vec<Rank>> = BTreeMap::new();
    for (rank, part) in &instance.parts {
        if let (Some(algo), Some(proto)) = (part.op.algo, part.op.proto) {
            camps.entry(format!("{algo} and {proto}")).or_default().push(*rank);
        }
    }
    camps
}

/// A size that ran in one way, and since some moment in another only.
fn over_time(join: &Join) -> Vec<Finding> {
    let mut sizes: BTreeMap<_, Vec<(&ClassKey, &Seen)>> = BTreeMap::new();
    for (key, class) in join.classes() {
        for (bytes, seen) in class.sizes().filter(|(_, s)| s.count >= OFTEN) {
            sizes.entry((key.comm, key.func, bytes)).or_default().push((key, seen));
        }
    }
    let mut out = Vec::new();
    for ((_, _, bytes), mut ways) in sizes {
        ways.sort_by_key(|(_, s)| s.first_ns);
        if let [(key, seen)] = ways.as_slice() {
            out.extend(other_channels(join, key, seen, bytes));
            continue;
        }
        let (Some((old_key, old)), Some((new_key, new))) = (ways.iter().rev().nth(1), ways.last()) else {
            continue;
        };
        if new.first_ns <= old.last_ns {
            // Sizes that are put into groups run now this way, now that.
            continue;
        }
        let way = |k: &ClassKey, s: &Seen| {
            let word = |t: Option<String>| t.unwrap_or_else(|| "-".to_owned());
            let (a, p) = (word(k.algo.map(|a| a.to_string())), word(k.proto.map(|p| p.to_string())));
            let channels = s.channels.map_or_else(String::new, |c| format!(" on {c} channels"));
            format!("{a} and {p}{channels}")
        };
        let (then, now) = ((way(old_key, old), old.count), (way(new_key, new), new.count));
        out.push(changed(join, new_key, bytes, then, now, new.first_ns));
    }
    out
}

/// A size that ran on so many channels for a while, and since some moment on another number only.
fn other_channels(join: &Join, key: &ClassKey, seen: &Seen, bytes: u64) -> Option<Finding> {
    let (old, steady, since_ns) = seen.before?;
    let often = steady >= OFTEN && seen.steady >= OFTEN;
    let way = |n: u8| format!("{n} channel{}", if n == 1 { "" } else { "s" });
    let new = seen.channels.filter(|_| often)?;
    Some(changed(join, key, bytes, (way(old), steady), (way(new), seen.steady), since_ns))
}

/// The finding: the way it ran and how often, then and now.
fn changed(
    join: &Join,
    key: &ClassKey,
    bytes: u64,
    then: (String, u64),
    now: (String, u64),
    since_ns: u64,
) -> Finding {
    let ranks: Vec<Rank> =
        join.communicator(key.comm).map(|c| c.members().keys().copied().collect()).unwrap_or_default();
    let size = size_text(bytes);
    let evidence: Vec<Evidence> = vec![
        number(format!("{} of {size} ran {} times by {}", key.func, then.1, then.0), then.1 as f64, "count"),
        number(format!("and since then {} times by {}", now.1, now.0), now.1 as f64, "count"),
    ];
    let operation = OperationRef {
        bytes: Some(bytes),
        algo: key.algo.map(|a| a.to_string()),
        proto: key.proto.map(|p| p.to_string()),
        ..OperationRef::named(key.func.as_str(), Track::Collective, 0)
    };
    Finding {
        since: wall(join, since_ns),
        since_ns,
        evidence,
        confidence: Confidence::Likely,
        advice: "find out what changed then: a tuner plugin, a network that was lost and came back, another way of grouping calls; compare both ways with ringwatch bench".to_owned(),
        ..Finding::new(Kind::ChoiceDiffers, key.comm, ranks, operation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::join::testing::{all_reduce, member, process};
    use crate::model::{Algo, Proto, Update};

    const MS: u64 = 1_000_000;

    fn run(way: impl Fn(u32, u64) -> (Algo, Proto), n: u64, ended: bool) -> Vec<Finding> {
        let mut join = Join::new();
        for r in 0..4 {
            join.feed(process(r));
            join.feed(member(r, 4, n));
        }
        for o in 0..n {
            for r in 0..4 {
                let at = (o + 1) * MS;
                let kernel = Some((at + 1_000, ended.then_some(at + 50_000)));
                let mut op = all_reduce(r, o, at, kernel);
                let (algo, proto) = way(r, o);
                (op.algo, op.proto) = (Some(algo), Some(proto));
                join.feed(Update::Op(Box::new(op)));
            }
            join.tick((o + 1) * MS + 100_000);
        }
        let mut found = SplitChoiceRule::new(Settings::default()).check(&join, n * MS + 200_000);
        found.extend(ChoiceRule.check(&join, n * MS + 200_000));
        found
    }

    #[test]
    fn ranks_that_run_one_operation_in_different_ways_are_told_at_once() {
        let found = run(|r, _| (Algo::Ring, if r == 2 { Proto::Ll } else { Proto::Simple }), 1, false);
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].kind, found[0].severity), (Kind::ChoiceDiffers, Severity::Critical));
        assert_eq!(found[0].ranks, vec![Rank(2)]);
        assert!(found[0].evidence.iter().any(|e| e.text.contains("rank 2 runs it by RING and LL")));
        let of = |found: &[Finding]| {
            let v: Vec<_> = found[0].victims.iter().map(|v| (v.order, v.ranks.clone())).collect();
            (found[0].ranks.len(), v)
        };
        assert_eq!(of(&found), (1, vec![(0, vec![Rank(0), Rank(1), Rank(3)])]));
        // As many chose one way as the other.
        let found = run(|r, _| (Algo::Ring, if r < 2 { Proto::Ll } else { Proto::Simple }), 1, false);
        assert_eq!(of(&found), (4, vec![(0, (0..4).map(Rank).collect())]));
    }

    #[test]
    fn a_size_that_changes_its_way_for_good_is_told() {
        let way = |_: u32, o: u64| (if o < 50 { Algo::Ring } else { Algo::Tree }, Proto::Simple);
        let found = run(way, 100, true);
        assert_eq!((found.len(), found[0].severity), (1, Severity::Info), "{found:?}");
        assert!(found[0].evidence[0].text.contains("50 times by RING"), "{found:?}");
        assert_eq!(found[0].since_ns, 51 * MS);
        // Now this way, now that; or once: grouping does so.
        assert_eq!(
            run(|_, o| (if o % 2 == 0 { Algo::Ring } else { Algo::Tree }, Proto::Simple), 100, true),
            vec![]
        );
        assert_eq!(
            run(|_, o| (if o < 95 { Algo::Ring } else { Algo::Tree }, Proto::Simple), 100, true),
            vec![]
        );
    }
}
