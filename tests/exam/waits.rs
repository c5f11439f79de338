//! How long ranks held up the others of a communicator, as the simulation knows it.

use crate::simulator::Stay;
use crate::truth::Key;
use ringwatch::model::{CommId, Track};
use std::collections::{BTreeMap, BTreeSet};

/// A stretch of time, from and to, in ns.
type Span = (u64, u64);

/// Ranks that were held up by a late one in the operation before come to the next one so soon behind it, in ns, and within this
/// share of its lateness.
const RIGHT_BEHIND_NS: u64 = 1_000_000;
const RIGHT_BEHIND: u64 = 10;

/// Others wait for the ranks that come last to one operation, or to all transfers of one launch.
struct Wait {
    late: Vec<u32>,
    from_ns: u64,
    to_ns: u64,
    operations: BTreeSet<Key>,
}

/// How long ranks held the others of a communicator until `now`, in ns: they came last or with those whom they had held, or not yet, counted from the median of
/// the others, and were in no other operation meanwhile. Transfers count by launches in which all members take part.
pub(crate) fn held_by(happened: &[Stay], comm: CommId, size: usize, ranks: &BTreeSet<u32>, now: u64) -> u64 {
    let waits = in_collectives(happened, comm, size, ranks, now).into_iter();
    let waits = waits.chain(in_exchanges(happened, comm, size, ranks, now));
    let own: Vec<&Stay> = happened.iter().filter(|s| ranks.contains(&s.rank)).collect();
    let held = waits.flat_map(|w| {
        let by = |rank: &u32| gaps((w.from_ns, w.to_ns), elsewhere(&own, *rank, &w));
        w.late.iter().map(by).min_by_key(|spans| length(spans)).unwrap_or_default()
    });
    length(&joined(held.collect()))
}

/// The collectives and replays in which all members but these ranks were, and one of these came last, or last but for those whom
/// it had held up before, or not yet.
fn in_collectives(
    happened: &[Stay],
    comm: CommId,
    size: usize,
    ranks: &BTreeSet<u32>,
    now: u64,
) -> Vec<Wait> {
    let mut operations: BTreeMap<Key, Vec<&Stay>> = BTreeMap::new();
    for s in happened.iter().filter(|s| s.id == comm && !matches!(s.track, Track::Pair(..))) {
        if s.started_ns.is_some_and(|t| t <= now) {
            operations.entry(s.key()).or_default().push(s);
        }
    }
    let wait = |(key, parts): (Key, Vec<&Stay>)| {
        let is_absent = |r: &u32| !parts.iter().any(|s| s.rank == *r);
        let absent: Vec<u32> = ranks.iter().copied().filter(is_absent).collect();
        (parts.len() + absent.len() == size).then_some(())?;
        let last = |all: &mut dyn Iterator<Item = &&Stay>| all.map(|s| (s.started_ns, s.rank)).max();
        let last_ns = last(&mut parts.iter())?.0?;
        let others = parts.iter().filter(|s| !ranks.contains(&s.rank)).filter_map(|s| s.started_ns);
        let from_ns = middle(others)?;
        let is_last = |t: u64| last_ns - t <= RIGHT_BEHIND_NS.min(t.saturating_sub(from_ns) / RIGHT_BEHIND);
        let (to_ns, late) = match last(&mut parts.iter().filter(|s| ranks.contains(&s.rank))) {
            _ if !absent.is_empty() => (now, absent),
            Some((Some(t), rank)) if is_last(t) => (t, vec![rank]),
            _ => return None,
        };
        Some(Wait { from_ns, late, to_ns, operations: BTreeSet::from([key]) })
    };
    operations.into_iter().filter_map(wait).collect()
}

/// The launches of transfers with all other members in which one of these ranks came last to its transfer.
fn in_exchanges(happened: &[Stay], comm: CommId, size: usize, ranks: &BTreeSet<u32>, now: u64) -> Vec<Wait> {
    let mut ends: BTreeMap<Key, Vec<&Stay>> = BTreeMap::new();
    let mut launches: BTreeMap<(u32, u64), Vec<Key>> = BTreeMap::new();
    for s in happened.iter().filter(|s| s.id == comm && matches!(s.track, Track::Pair(..))) {
        ends.entry(s.key()).or_default().push(s);
        if let Some(plan) = s.plan {
            launches.entry((s.rank, plan)).or_default().push(s.key());
        }
    }
    let wait = |keys: Vec<Key>| {
        let mut came: BTreeMap<u32, u64> = BTreeMap::new();
        for s in keys.iter().filter_map(|k| ends.get(k)).flatten() {
            let known = came.entry(s.rank).or_default();
            *known = s.started_ns.filter(|t| *t <= now)?.max(*known);
        }
        let (late, to_ns) = came.iter().map(|(rank, t)| (*rank, *t)).max_by_key(|(_, t)| *t)?;
        (came.len() == size && ranks.contains(&late)).then_some(())?;
        let others = came.iter().filter(|(rank, _)| !ranks.contains(rank)).map(|(_, t)| *t);
        Some(Wait {
            from_ns: middle(others)?,
            late: vec![late],
            to_ns,
            operations: keys.into_iter().collect(),
        })
    };
    launches.into_values().filter_map(wait).collect()
}

/// The operations in which a rank was while the others waited for it.
fn elsewhere(own: &[&Stay], rank: u32, wait: &Wait) -> Vec<Span> {
    let is_other = |s: &&&Stay| s.rank == rank && !wait.operations.contains(&s.key());
    let span = |s: &&Stay| Some((s.started_ns?, s.ended_ns.unwrap_or(wait.to_ns)));
    own.iter().filter(is_other).filter_map(span).collect()
}

fn middle(times: impl Iterator<Item = u64>) -> Option<u64> {
    let mut times: Vec<u64> = times.collect();
    times.sort_unstable();
    times.get(times.len() / 2).copied()
}

/// Spans come out in order, and those that overlap as one.
fn joined(mut spans: Vec<Span>) -> Vec<Span> {
    spans.sort_unstable();
    let mut all: Vec<Span> = Vec::new();
    for (from, to) in spans {
        match all.last_mut() {
            Some(last) if from <= last.1 => last.1 = to.max(last.1),
            _ => all.push((from, to)),
        }
    }
    all
}

fn length(spans: &[Span]) -> u64 {
    spans.iter().map(|(from, to)| to.saturating_sub(*from)).sum()
}

/// The parts of a span that no other one covers.
fn gaps((from, to): Span, others: Vec<Span>) -> Vec<Span> {
    let mut at = from;
    let mut left = Vec::new();
    for (begin, end) in joined(others) {
        if at < begin.min(to) {
            left.push((at, begin.min(to)));
        }
        at = at.max(end);
    }
    if at < to {
        left.push((at, to));
    }
    left
}
