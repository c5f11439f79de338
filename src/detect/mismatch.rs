//! `mismatch`: ranks issued different operations at one issue order.
//!
//! Named by issue order: NCCL's own sequence numbers count per function, so that an all-gather and an
//! all-reduce in each other's place do not even collide.

use super::{Rule, fact, names, wall, who};
use crate::join::{Communicator, Instance, Join, Signature, Track};
use crate::model::{Evidence, Finding, Kind, Rank};
use std::collections::BTreeMap;

/// As long as ranks are still to come, a tie between those that came says nothing about who is wrong. After
/// this, in ns, it is told as it is.
const TIE_NS: u64 = 1_000_000_000;

/// The rule. What is provable does not wait.
#[derive(Debug)]
pub struct MismatchRule;

impl Rule for MismatchRule {
    fn check(&self, join: &Join, now_ns: u64) -> Vec<Finding> {
        join.communicators().filter_map(|c| c.mismatch().and_then(|m| judge(join, c, m, now_ns))).collect()
    }
}

fn describe(s: &Signature) -> String {
    let dtype = s.dtype.map_or_else(String::new, |d| format!(" {d}"));
    let bytes = s.bytes.map_or_else(String::new, |b| format!(", {b} bytes"));
    let root = s.root.map_or_else(String::new, |r| format!(", root {r}"));
    let redop = s.redop.map_or_else(String::new, |r| format!(", {r}"));
    format!("{} of {}{dtype} elements{bytes}{root}{redop}", s.func, s.count)
}

fn judge(
    join: &Join,
    c: &Communicator,
    (track, order, instance): (Track, u64, &Instance),
    now_ns: u64,
) -> Option<Finding> {
    let mut camps: BTreeMap<Signature, Vec<Rank>> = BTreeMap::new();
    for (rank, part) in &instance.parts {
        let signature = Signature::of(&part.op, c.ranks());
        // A rank of which less is known is no camp of its own.
        let camp = camps.keys().find(|s| s.agrees(&signature)).copied().unwrap_or(signature);
        camps.entry(camp).or_default().push(*rank);
    }
    // The majority is taken to be right; where there is none, all camps are named.
    let most = camps.values().map(Vec::len).max()?;
    let majority: Vec<&Signature> = camps.iter().filter(|(_, r)| r.len() == most).map(|(s, _)| s).collect();
    let to_come = instance.parts.len() < c.expected();
    let began = instance.began_ns().unwrap_or(0);
    if majority.len() > 1 && to_come && now_ns < began.saturating_add(TIE_NS) {
        return None;
    }
    let right = if majority.len() == 1 { majority.first().copied().copied() } else { None };
    let mut culprits: Vec<Rank> =
        camps.iter().filter(|(s, _)| Some(**s) != right).flat_map(|(_, r)| r.clone()).collect();
    culprits.sort();
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
    for rank in &culprits {
        evidence.extend(who(join, c, *rank));
    }
    // It began when the first of the culprits issued something else.
    let since_ns = culprits.iter().filter_map(|r| instance.parts.get(r)?.op.issued_ns).min().unwrap_or(0);
    let missing: Vec<Rank> =
        c.members().keys().filter(|r| !instance.parts.contains_key(r)).copied().collect();
    if !missing.is_empty() {
        evidence.push(fact(format!("{} did not issue this order yet", names(&missing))));
    }
    Some(Finding {
        since: wall(join, since_ns),
        evidence,
        advice: format!(
            "compare the code path of {} with the others' just before issue order {order}: a branch on the rank, a shape that differs, a call too many or too few",
            names(&culprits)
        ),
        since_ns,
        ..Finding::new(Kind::Mismatch, c.id, culprits.clone(), operation)
    })
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
        MismatchRule.check(&j, 2_000_000)
    }

    #[test]
    fn equal_operations_are_no_mismatch() {
        assert_eq!(join(|_, _| {}), vec![]);
        // All-reduce has no root, whatever the field holds.
        assert_eq!(join(|r, o| o.root = Some(Rank(r))), vec![]);
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
            let mut o = all_reduce(r, 0, 1_000_000, None);
            o.count += u64::from(r);
            j.feed(Update::Op(Box::new(o)));
        }
        assert_eq!(MismatchRule.check(&j, 2_000_000), vec![]);
        assert_eq!(MismatchRule.check(&j, 1_001_000_000).len(), 1);
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
}
