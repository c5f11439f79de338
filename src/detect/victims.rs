//! Victims of what is proven: a job that stands still in one place soon stands still everywhere.
//!
//! A mismatch, ranks that run one operation in different ways, a process that is gone and a node that is lost are
//! known for sure. What only looks like a hang, began since then and shares processes with them is held up by them.

use super::{Settings, choice};
use crate::join::{Communicator, Join};
use crate::model::{CommId, Confidence, Finding, SegmentId, Track};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::ops::RangeInclusive;

/// Hangs that begin within this time, in ns, begin together.
const TOGETHER_NS: u64 = 1_000_000;

/// Something that is known to hold up a communicator.
struct Standstill {
    comm: CommId,
    /// A standstill that begins within this time is held up by it, host monotonic ns.
    victims_ns: RangeInclusive<u64>,
    /// In which of the communicator's operations. What was issued before it is not held up by it.
    at: Option<(Track, u64)>,
}

impl Standstill {
    /// True where its operation comes after that of a finding, so that it does not hold that one up.
    fn lies_behind(&self, f: &Finding) -> bool {
        let at = Some((f.operation.track, f.operation.order));
        let same_track = self.comm == f.communicator && self.at.is_some_and(|(t, _)| t == f.operation.track);
        same_track && at < self.at
    }
}

/// The findings that are proven, and of the others those that are not held up by something proven.
pub(super) fn leave_out(join: &Join, settings: Settings, found: Vec<Finding>) -> Vec<Finding> {
    if found.iter().all(|f| f.confidence == Confidence::Proven) {
        return found;
    }
    let standstills = standstills(join, settings, &found);
    let mut areas: Vec<BTreeSet<CommId>> = Vec::new();
    for s in &standstills {
        if !areas.iter().any(|a| a.contains(&s.comm)) {
            areas.push(connected(join, s.comm));
        }
    }
    let is_victim = |f: &Finding| {
        let together =
            |s: &Standstill| areas.iter().any(|a| a.contains(&s.comm) && a.contains(&f.communicator));
        standstills.iter().any(|s| s.victims_ns.contains(&f.since_ns) && !s.lies_behind(f) && together(s))
    };
    let kept: Vec<Finding> =
        found.into_iter().filter(|f| f.confidence == Confidence::Proven || !is_victim(f)).collect();
    first_of_each(join, kept)
}

/// Of what only looks like a hang, in each part of a job whose processes wait for each other, what began first: the rest is
/// held up by it soon after.
fn first_of_each(join: &Join, found: Vec<Finding>) -> Vec<Finding> {
    if found.len() < 2 {
        return found;
    }
    let mut areas: Vec<(BTreeSet<CommId>, u64)> = Vec::new();
    for f in &found {
        match areas.iter_mut().find(|(a, _)| a.contains(&f.communicator)) {
            Some((_, first_ns)) => *first_ns = f.since_ns.min(*first_ns),
            None => areas.push((connected(join, f.communicator), f.since_ns)),
        }
    }
    let is_first = |f: &Finding| {
        let area = areas.iter().find(|(a, _)| a.contains(&f.communicator));
        area.is_none_or(|(_, first_ns)| f.since_ns <= first_ns.saturating_add(TOGETHER_NS))
    };
    found.into_iter().filter(|f| f.confidence == Confidence::Proven || is_first(f)).collect()
}

/// Everything that is known to hold up a communicator. Hosts run ahead of their GPUs, so that victims may have issued
/// what they wait in before the cause came about; what began before that by more than the patience was found before.
fn standstills(join: &Join, settings: Settings, found: &[Finding]) -> Vec<Standstill> {
    let patience_ns = settings.patience_silent_ns;
    let ever_since = |comm: CommId, at: (Track, u64), since_ns: u64| Standstill {
        comm,
        victims_ns: since_ns.saturating_sub(patience_ns)..=u64::MAX,
        at: Some(at),
    };
    let proven = found.iter().filter(|f| f.confidence == Confidence::Proven);
    let mut all: Vec<Standstill> = proven
        .map(|f| ever_since(f.communicator, (f.operation.track, f.operation.order), f.since_ns))
        .collect();
    for c in join.notable() {
        all.extend(disagreed(c).map(|(at, since_ns)| ever_since(c.id, at, since_ns)));
    }
    let mut silent: BTreeMap<CommId, u64> = BTreeMap::new();
    for p in join.processes().filter(|p| !p.record.liveness.is_gone()) {
        for (comm, _) in p.silent_ns.iter().flat_map(|_| join.memberships(p.record.id)) {
            let since_ns = p.silent_ns.unwrap_or(u64::MAX);
            silent.entry(*comm).and_modify(|t| *t = since_ns.min(*t)).or_insert(since_ns);
        }
    }
    // A node that is not heard may still be at work: it explains only what began when it fell silent.
    all.extend(silent.into_iter().map(|(comm, since_ns)| Standstill {
        comm,
        victims_ns: since_ns.saturating_sub(patience_ns)..=since_ns.saturating_add(patience_ns),
        at: None,
    }));
    all
}

/// The operation of a communicator on which ranks that are in it do not agree, and since when, host monotonic ns.
fn disagreed(c: &Communicator) -> Option<((Track, u64), u64)> {
    let mismatch = c.mismatch().filter(|(.., i)| i.parts.values().any(|p| !p.finished));
    let split = || c.split().find(|(.., i)| !choice::alike(i));
    let (track, order, instance) = mismatch.or_else(split)?;
    Some(((track, order), instance.began_ns()?))
}

/// The communicators that share processes with one, or with others that do.
pub(super) fn connected(join: &Join, comm: CommId) -> BTreeSet<CommId> {
    let mut comms = BTreeSet::from([comm]);
    let mut to_do = vec![comm];
    let mut seen: HashSet<SegmentId> = HashSet::new();
    while let Some(c) = to_do.pop().and_then(|id| join.communicator(id)) {
        for m in c.members().values().filter(|m| seen.insert(m.record.segment)) {
            let others = join.memberships(m.record.segment).iter().map(|(id, _)| *id);
            to_do.extend(others.filter(|id| join.communicator(*id).is_some() && comms.insert(*id)));
        }
    }
    comms
}

#[cfg(test)]
mod tests {
    use crate::detect::{HangRule, Rule, Settings};
    use crate::join::Join;
    use crate::join::testing::{all_reduce, member, process};
    use crate::model::{CommId, Finding, Kind, Rank, Timing, Untimed, Update};

    const S: u64 = 1_000_000_000;

    /// Two pairs of ranks, and a communicator of all four. Ranks 0 and 1 issued their pair's untimed operation at 10 s, of so
    /// many elements on rank 1; ranks 2 and 3 wait for both in that of all since `waiting_ns`.
    fn job(count: u64, waiting_ns: u64) -> Vec<Finding> {
        let mut j = Join::new();
        let pair = |r: u32| CommId::unowned(8 + u64::from(r / 2));
        for r in 0..4 {
            j.feed(process(r));
            j.feed(member(r, 4, if r < 2 { 1 } else { 2 }));
            let Update::Comm(mut own) = member(r, 2, 1) else { unreachable!("a member") };
            own.comm = pair(r);
            own.rank.0 = r % 2;
            j.feed(Update::Comm(own));
            j.feed(Update::Op(Box::new(all_reduce(r, 0, S, Some((S + 5_000, Some(S + 50_000)))))));
            if r < 2 {
                let mut op = all_reduce(r, 0, 10 * S, None);
                (op.comm, op.rank.0) = (pair(r), r);
                op.timing = Timing::Not(Untimed::Budget);
                op.count = if r == 1 { count } else { 1_000 };
                j.feed(Update::Op(Box::new(op)));
            } else {
                let kernel = Some((waiting_ns + 5_000, None));
                j.feed(Update::Op(Box::new(all_reduce(r, 1, waiting_ns, kernel))));
            }
        }
        j.tick(20 * S);
        HangRule::new(Settings::default()).check(&j, 20 * S)
    }

    #[test]
    fn who_waits_behind_a_mismatch_accuses_nobody() {
        let kinds = |found: &[Finding]| found.iter().map(|f| f.kind).collect::<Vec<_>>();
        assert_eq!(kinds(&job(1_000, 11 * S)), [Kind::NotStarted], "nothing else holds it up");
        assert_eq!(kinds(&job(1_001, 11 * S)), []);
        assert_eq!(kinds(&job(1_001, 2 * S)), [Kind::MissingRank], "it stood still long before");
    }

    #[test]
    fn what_was_issued_before_a_mismatch_is_not_held_up_by_it() {
        let mut j = Join::new();
        for r in 0..4 {
            j.feed(process(r));
            j.feed(member(r, 4, 3));
            j.feed(Update::Op(Box::new(all_reduce(r, 0, S, Some((S + 5_000, Some(S + 50_000)))))));
            // Rank 3's GPU does not start the second one, and all have another behind it, on which they do not agree.
            let kernel = (r < 3).then_some((10 * S + 5_000, None));
            j.feed(Update::Op(Box::new(all_reduce(r, 1, 10 * S, kernel))));
            let mut op = all_reduce(r, 2, 10 * S + 1_000, None);
            op.count += u64::from(r == 1);
            j.feed(Update::Op(Box::new(op)));
        }
        j.tick(20 * S);
        assert!(j.communicators().any(|c| c.mismatch().is_some_and(|(_, order, _)| order == 2)));
        let found = HangRule::new(Settings::default()).check(&j, 20 * S);
        let found: Vec<_> = found.into_iter().map(|f| (f.kind, f.ranks, f.operation.order)).collect();
        assert_eq!(found, [(Kind::NotStarted, vec![Rank(3)], 1)]);
    }

    /// The pairs of ranks in which the first waits for the second, which does not come: since 10 s in one pair and later by so
    /// much in the other. All four have a communicator in common.
    fn two_pairs(later_ns: u64) -> Vec<CommId> {
        let mut j = Join::new();
        for r in 0..4 {
            j.feed(process(r));
            j.feed(member(r, 4, 1));
            j.feed(Update::Op(Box::new(all_reduce(r, 0, S, Some((S + 5_000, Some(S + 50_000)))))));
            let Update::Comm(mut own) = member(r, 2, u64::from(r % 2 == 0)) else { unreachable!("a member") };
            (own.comm, own.rank) = (CommId::unowned(8 + u64::from(r / 2)), Rank(r % 2));
            let (comm, rank) = (own.comm, own.rank);
            j.feed(Update::Comm(own));
            if rank == Rank(0) {
                let at_ns = 10 * S + if r == 2 { later_ns } else { 0 };
                let mut op = all_reduce(r, 0, at_ns, Some((at_ns + 5_000, None)));
                (op.comm, op.rank) = (comm, rank);
                j.feed(Update::Op(Box::new(op)));
            }
        }
        j.tick(60 * S);
        let found = HangRule::new(Settings::default()).check(&j, 60 * S);
        found.into_iter().map(|f| f.communicator).collect()
    }

    #[test]
    fn of_what_only_looks_like_a_hang_the_first_in_a_job_is_told() {
        assert_eq!(two_pairs(50_000_000), [CommId::unowned(8)]);
        assert_eq!(two_pairs(0), [CommId::unowned(8), CommId::unowned(9)]);
    }
}
