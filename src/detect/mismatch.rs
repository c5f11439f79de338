//! `mismatch`, `shifted-order`: ranks issued different operations at one issue order.
//!
//! Named by issue order: NCCL's own sequence numbers count per function, so that an all-gather and an
//! all-reduce in each other's place do not even collide. Where what a rank issued from there on is what the others
//! issued one order later or earlier, it left out a call or made one too many.

use super::{Rule, Settings, add_host_facts, fact, names, wall, who};
use crate::join::{Communicator, Instance, Join, Signature, Track};
use crate::model::{COMM_INIT, Evidence, Finding, Kind, OperationRef, Rank, Victims};
use std::collections::BTreeMap;

/// As long as ranks are still to come, a tie between those that came says nothing about who is wrong. So long after the last of
/// them came, in ns, it is told as it is.
const TIE_NS: u64 = 1_000_000_000;
/// Operations behind a mismatch that are compared with the others' shifted by one.
const LOOKED_AT: u64 = 16;
/// So many have to agree with the others' neighbours.
const SHIFTED: usize = 2;
/// Ranks that are described one by one.
const DESCRIBED: usize = 8;

/// The rule. What is provable does not wait.
#[derive(Debug)]
pub struct MismatchRule {
    settings: Settings,
}

impl MismatchRule {
    /// With these times.
    pub fn new(settings: Settings) -> Self {
        MismatchRule { settings }
    }
}

impl Rule for MismatchRule {
    fn check(&self, join: &Join, now_ns: u64) -> Vec<Finding> {
        let calls = |c| self.judge(join, c, now_ns);
        join.notable().filter_map(|c| membership(join, c).or_else(|| calls(c))).collect()
    }
}

/// A rank that is one call ahead of the others or behind them.
enum Shift {
    /// It left out what the others issued here.
    Ahead(Signature),
    /// It issued one call more.
    Behind(Signature),
}

fn describe(s: &Signature) -> String {
    let dtype = s.dtype.map_or_else(String::new, |d| format!(" {d}"));
    let bytes = s.bytes.map_or_else(String::new, |b| format!(", {b} bytes"));
    let root = s.root.map_or_else(String::new, |r| format!(", root {r}"));
    let redop = s.redop.map_or_else(String::new, |r| format!(", {r}"));
    // A file may not say how many.
    if s.count == 0 && s.dtype.is_none() && s.bytes.is_none() {
        return format!("{}{root}{redop}", s.func);
    }
    format!("{} of {}{dtype} elements{bytes}{root}{redop}", s.func, s.count)
}

/// Ranks that do not agree on how many they are.
fn membership(join: &Join, c: &Communicator) -> Option<Finding> {
    if !c.sizes_differ() {
        return None;
    }
    let mut camps: BTreeMap<u32, Vec<Rank>> = BTreeMap::new();
    for (rank, m) in c.members() {
        camps.entry(m.record.ranks?).or_default().push(*rank);
    }
    if camps.len() < 2 {
        return None;
    }
    let most = camps.values().map(Vec::len).max()?;
    let tie = camps.values().filter(|r| r.len() == most).count() > 1;
    let mut culprits: Vec<Rank> =
        camps.values().filter(|r| tie || r.len() < most).flatten().copied().collect();
    culprits.sort_unstable();
    let since_ns = c.members().values().map(|m| m.record.init_ns).max()?;
    let mut evidence: Vec<Evidence> =
        camps.iter().map(|(n, r)| fact(format!("{} made it with {n} ranks", names(r)))).collect();
    culprits.iter().take(DESCRIBED).for_each(|r| evidence.extend(who(join, c, *r)));
    let operation = OperationRef::named(COMM_INIT, Track::Collective, 0);
    Some(Finding {
        since: wall(join, since_ns),
        since_ns,
        evidence,
        advice: format!(
            "compare the world size and the unique id that {} passed with the others': a rank of another job, or of an earlier attempt",
            names(&culprits)
        ),
        ..Finding::new(Kind::Mismatch, c.id, culprits, operation)
    })
}

impl MismatchRule {
    fn judge(&self, join: &Join, c: &Communicator, now_ns: u64) -> Option<Finding> {
        let (track, order, instance) = c.mismatch()?;
        let camps = camps(join, c, instance);
        if camps.len() < 2 {
            return None;
        }
        // The majority is taken to be right; where there is none, all camps are named.
        let most = camps.values().map(Vec::len).max()?;
        let majority: Vec<&Signature> =
            camps.iter().filter(|(_, r)| r.len() == most).map(|(s, _)| s).collect();
        let to_come = instance.parts.len() < c.expected() && !matches!(track, Track::Pair(..));
        let last_ns = instance.parts.values().filter_map(|p| p.op.issued_ns).max().unwrap_or(0);
        if majority.len() > 1 && to_come && now_ns < last_ns.saturating_add(TIE_NS) {
            return None;
        }
        let right = if majority.len() == 1 { majority.first().copied().copied() } else { None };
        let mut culprits: Vec<Rank> =
            camps.iter().filter(|(s, _)| Some(**s) != right).flat_map(|(_, r)| r.clone()).collect();
        culprits.sort();
        let shift = if camps.len() == 2 { shift(c, track, order, &camps, right) } else { Some(None) };
        // What comes behind tells a wrong call from one too many, and who is to come who is wrong.
        let fresh = now_ns < c.mismatch_seen_ns().saturating_add(self.settings.settle_shift_ns);
        if (shift.is_none() || to_come) && fresh && !join.all_gone() {
            return None;
        }
        let shown = instance.parts.values().find(|p| Some(Signature::of(&p.op, c.ranks())) == right);
        let operation = c.describe(track, order, &shown.or_else(|| instance.first())?.op);
        let mut evidence: Vec<Evidence> =
            camps.iter().map(|(s, ranks)| fact(format!("{} issued {}", names(ranks), describe(s)))).collect();
        let first_part = instance.parts.get(culprits.first()?)?;
        if let (Some(seq), Some(other)) = (first_part.op.seq, shown.and_then(|p| p.op.seq)) {
            evidence.push(fact(format!(
                "issue order {order} on all of them; NCCL's own sequence numbers, which count per function, say {seq} on {} and {other} on the others",
                names(&culprits)
            )));
        }
        let kind = match shift.flatten() {
            Some(shift) => {
                evidence.insert(0, fact(shifted(&shift, &culprits, right.is_some())));
                Kind::ShiftedOrder
            }
            None => Kind::Mismatch,
        };
        culprits.iter().take(DESCRIBED).for_each(|r| evidence.extend(who(join, c, *r)));
        // It began when the first of the culprits issued something else.
        let since_ns = culprits.iter().filter_map(|r| instance.parts.get(r)?.op.issued_ns).min().unwrap_or(0);
        let missing: Vec<Rank> =
            c.members().keys().filter(|r| !instance.parts.contains_key(r)).copied().collect();
        if !missing.is_empty() && !matches!(track, Track::Pair(..)) {
            evidence.push(fact(format!("{} did not issue this order yet", names(&missing))));
        }
        let mut f = Finding {
            since: wall(join, since_ns),
            evidence,
            advice: format!(
                "compare the code path of {} with the others' just before issue order {order}: a branch on the rank, a shape that differs, a call too many or too few",
                names(&culprits)
            ),
            since_ns,
            victims: victims(join, c, now_ns),
            ..Finding::new(kind, c.id, culprits.clone(), operation)
        };
        add_host_facts(&mut f, join, c, since_ns, now_ns);
        Some(f)
    }
}

/// The groups of ranks by what they take an operation for, without ranks whose orders are not sure.
fn camps(join: &Join, c: &Communicator, instance: &Instance) -> BTreeMap<Signature, Vec<Rank>> {
    let mut camps: BTreeMap<Signature, Vec<Rank>> = BTreeMap::new();
    for (rank, part) in &instance.parts {
        if join.process(part.op.segment).is_none_or(crate::join::Process::unsure) {
            continue;
        }
        let signature = Signature::of(&part.op, c.ranks());
        // A rank of which less is known is no camp of its own.
        let camp = camps.keys().find(|s| s.agrees(&signature)).copied().unwrap_or(signature);
        camps.entry(camp).or_default().push(*rank);
    }
    camps
}

fn shifted(shift: &Shift, culprits: &[Rank], sure: bool) -> String {
    let who = names(culprits);
    match (shift, sure) {
        (Shift::Ahead(s), true) => format!(
            "{who} left out {}: what it issued from here on is what the others issued one order later; it is one call ahead",
            describe(s)
        ),
        (Shift::Behind(s), true) => format!(
            "{who} made one more call: {}; what it issued then is what the others issued one order earlier; it is one call behind",
            describe(s)
        ),
        (Shift::Ahead(s) | Shift::Behind(s), false) => format!(
            "of {who} one side made a call that the other did not make: {}; from there on they are one call apart",
            describe(s)
        ),
    }
}

/// Returns whether one camp is a call ahead of the other or behind it; `None` while too little is known.
fn shift(
    c: &Communicator,
    track: Track,
    order: u64,
    camps: &BTreeMap<Signature, Vec<Rank>>,
    right: Option<Signature>,
) -> Option<Option<Shift>> {
    if matches!(track, Track::Pair(..)) {
        return Some(None);
    }
    let mut sides = camps.iter();
    let (first, second) = (sides.next()?, sides.next()?);
    let (wrong, others) = if Some(*first.0) == right { (second, first) } else { (first, second) };
    // One rank stands for its camp: the one that came furthest.
    let furthest = |ranks: &[Rank]| {
        ranks.iter().copied().max_by_key(|r| c.members().get(r).and_then(|m| m.issued(track)).unwrap_or(0))
    };
    let (own, their) = (furthest(wrong.1)?, furthest(others.1)?);
    let at = |rank: Rank, n: u64| {
        let part = c.instance(track, order.checked_add(n)?)?.parts.get(&rank)?;
        Some(Signature::of(&part.op, c.ranks()))
    };
    // How many agree when the one's are moved by so much against the other's, and whether all do.
    let agree = |own_by: u64, their_by: u64| {
        let pairs: Vec<bool> = (0..LOOKED_AT)
            .map_while(|n| Some(at(own, n + own_by)?.agrees(&at(their, n + their_by)?)))
            .collect();
        (pairs.iter().filter(|a| **a).count(), pairs.iter().all(|a| *a))
    };
    let (unmoved, all_unmoved) = agree(1, 1);
    let parted = unmoved == 0 || !all_unmoved;
    let (ahead, behind) = (agree(0, 1), agree(1, 0));
    match (ahead, behind) {
        ((n, true), (m, _)) if n >= SHIFTED && n >= m && parted => Some(Some(Shift::Ahead(*others.0))),
        (_, (n, true)) if n >= SHIFTED && parted => Some(Some(Shift::Behind(*wrong.0))),
        // One more could still tell.
        ((n, true), _) | (_, (n, true)) if n < SHIFTED => None,
        _ => Some(None),
    }
}

/// The ranks that wait in other communicators because this one stands still.
fn victims(join: &Join, c: &Communicator, now_ns: u64) -> Vec<Victims> {
    let standing = join.standing(now_ns);
    let of = |i: &usize| {
        let s = standing.stall(*i)?;
        let ranks: Vec<Rank> = s.waiting.iter().map(|(r, _)| *r).collect();
        Some(Victims { communicator: s.comm, ranks, order: s.order, track: s.track })
    };
    let here = |o: &&crate::join::Origin| standing.stall(o.first).is_some_and(|s| s.comm == c.id);
    let indices =
        standing.origins().iter().filter(here).flat_map(|o| std::iter::once(&o.first).chain(&o.held_up));
    indices.filter_map(of).filter(|v| !v.ranks.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::join::testing::{all_reduce, member, process};
    use crate::model::{DataType, Func, RedOp, Update};

    fn join(change: impl Fn(u32, &mut crate::model::OpRecord)) -> Vec<Finding> {
        let mut j = Join::new();
        for r in 0..4 {
            j.feed(process(r));
            j.feed(member(r, 4, 1));
            let mut o = all_reduce(r, 0, 1_000_000, None);
            change(r, &mut o);
            j.feed(Update::Op(Box::new(o)));
        }
        MismatchRule::new(Settings::default()).check(&j, 200_000_000)
    }

    #[test]
    fn equal_operations_are_no_mismatch() {
        assert_eq!(join(|_, _| {}), vec![]);
        // All-reduce has no root, whatever the field holds.
        assert_eq!(join(|r, o| o.root = Some(Rank(r))), vec![]);
    }

    #[test]
    fn what_was_done_before_the_other_ranks_were_heard_of_is_compared_all_the_same() {
        let mut j = Join::new();
        let feed = |j: &mut Join, r: u32| {
            j.feed(process(r));
            j.feed(member(r, 4, 1));
            let mut o = all_reduce(r, 0, 1_000_000, Some((1_010_000, Some(1_100_000))));
            o.func = if r == 1 { Func::AllGather } else { Func::AllReduce };
            j.feed(Update::Op(Box::new(o)));
        };
        // Its segment is found first, and its operation is over by then: it is counted with the ranks that are known.
        feed(&mut j, 1);
        j.tick(2_000_000);
        assert!(j.communicators().all(|c| c.finished() == 1));
        for r in [0, 2, 3] {
            feed(&mut j, r);
            j.tick(3_000_000 + u64::from(r));
        }
        let found = MismatchRule::new(Settings::default()).check(&j, 200_000_000);
        assert_eq!(found.iter().map(|f| f.ranks.clone()).collect::<Vec<_>>(), [[Rank(1)]], "{found:#?}");
        assert_eq!(j.communicators().map(|c| c.finished()).sum::<u64>(), 1, "it is not counted again");
    }

    #[test]
    fn function_count_type_and_root_are_told_apart() {
        let one = |change: fn(&mut crate::model::OpRecord)| {
            let found = join(|r, o| {
                if r == 1 {
                    change(o);
                }
            });
            assert_eq!(found.len(), 1);
            assert_eq!(found[0].ranks, vec![Rank(1)]);
            found[0].clone()
        };
        let f = one(|o| o.func = Func::AllGather);
        assert_eq!(f.operation.func, "AllReduce", "the operation is the majority's");
        assert!(f.evidence.iter().any(|e| e.text.contains("rank 1 issued AllGather")));
        assert!(f.evidence.iter().any(|e| e.text.contains("ranks 0, 2, 3 issued AllReduce")));
        one(|o| o.count += 1);
        one(|o| o.dtype = Some(DataType::Bfloat16));
        // Reductions are compared where both are known.
        let reductions = |of: fn(u32) -> Option<RedOp>| join(|r, o| o.redop = of(r));
        assert_eq!(reductions(|r| (r == 1).then_some(RedOp::Max)), vec![]);
        let f = reductions(|r| Some(if r == 1 { RedOp::Max } else { RedOp::Sum }));
        assert_eq!(f[0].ranks, vec![Rank(1)]);
        assert_eq!(f[0].operation.redop.as_deref(), Some("ncclSum"));
        assert!(f[0].evidence.iter().any(|e| e.text.contains("rank 1 issued") && e.text.contains("ncclMax")));
        let roots = join(|r, o| {
            o.func = Func::Broadcast;
            o.root = Some(Rank(u32::from(r == 1)));
        });
        assert_eq!(roots[0].ranks, vec![Rank(1)]);
    }

    #[test]
    fn without_a_majority_both_camps_are_named() {
        let found = join(|r, o| o.count += u64::from(r % 2));
        assert_eq!(found[0].ranks, vec![Rank(0), Rank(1), Rank(2), Rank(3)]);
    }

    #[test]
    fn a_rank_whose_call_was_lost_is_compared_by_bytes() {
        let gather = |r: u32, o: &mut crate::model::OpRecord| {
            o.func = Func::AllGather;
            if r == 2 {
                o.dtype = Some(DataType::Int8);
                o.count *= 4;
            }
        };
        assert_eq!(join(gather), vec![]);
        let wrong = join(|r, o| {
            gather(r, o);
            o.count += u64::from(r == 2);
        });
        assert_eq!(wrong[0].ranks, vec![Rank(2)]);
    }

    #[test]
    fn a_tie_waits_for_the_ranks_that_are_to_come() {
        let mut j = Join::new();
        for r in 0..2 {
            j.feed(process(r));
            j.feed(member(r, 4, 1));
            let mut o = all_reduce(r, 0, 1_000_000 + u64::from(r) * 5_000_000_000, None);
            o.count += u64::from(r);
            j.feed(Update::Op(Box::new(o)));
        }
        let found = |now_ns| MismatchRule::new(Settings::default()).check(&j, now_ns).len();
        assert_eq!((found(5_200_000_000), found(6_001_000_000)), (0, 1), "the others follow the second one");
    }

    #[test]
    fn a_type_that_nccl_does_not_name_is_not_held_against_a_rank() {
        assert_eq!(
            join(|r, o| {
                if r == 2 {
                    o.dtype = None;
                }
            }),
            vec![]
        );
    }

    /// Rank 2 of 4 issues what `of` says, from order 0 on; the others count up.
    fn shifted(of: &[u64]) -> Vec<Finding> {
        let mut j = Join::new();
        for r in 0..4 {
            j.feed(process(r));
            j.feed(member(r, 4, 6));
            for (order, count) in (0..6u64).zip(if r == 2 { of } else { &[1, 2, 3, 4, 5, 6] }) {
                let mut o = all_reduce(r, order, 1_000_000 * (order + 1), None);
                o.count = *count;
                j.feed(Update::Op(Box::new(o)));
            }
        }
        MismatchRule::new(Settings::default()).check(&j, 200_000_000)
    }

    #[test]
    fn a_call_too_few_and_a_call_too_many_are_told_from_another_call() {
        let of = |calls: &[u64]| {
            let found = shifted(calls);
            assert_eq!((found.len(), found[0].ranks.as_slice()), (1, [Rank(2)].as_slice()), "{found:?}");
            let text: Vec<String> = found[0].evidence.iter().map(|e| e.text.clone()).collect();
            (found[0].kind, found[0].operation.order, text.join("; "))
        };
        let (kind, order, text) = of(&[1, 3, 4, 5, 6]);
        assert_eq!((kind, order), (Kind::ShiftedOrder, 1));
        assert!(text.contains("left out AllReduce of 2 ") && text.contains("one call ahead"), "{text}");
        let (kind, order, text) = of(&[1, 2, 9, 3, 4, 5]);
        assert_eq!((kind, order), (Kind::ShiftedOrder, 2));
        assert!(
            text.contains("one more call: AllReduce of 9 ") && text.contains("one call behind"),
            "{text}"
        );
        assert_eq!(of(&[1, 9, 3, 4, 5, 6]).0, Kind::Mismatch);
        // What follows is all alike: nothing tells a wrong call from one too few.
        assert_eq!(of(&[1, 3, 3, 4, 5, 6]).0, Kind::Mismatch);
    }

    #[test]
    fn ranks_that_differ_on_who_is_in_it() {
        let mut j = Join::new();
        for r in 0..4 {
            j.feed(process(r));
            j.feed(member(r, if r == 3 { 5 } else { 4 }, 0));
        }
        let found = MismatchRule::new(Settings::default()).check(&j, 2_000_000);
        assert_eq!((found.len(), found[0].ranks.as_slice()), (1, [Rank(3)].as_slice()));
        assert_eq!(found[0].operation.func, "CommInit");
    }
}
