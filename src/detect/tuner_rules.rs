//! `tuner-rules-differ`: ranks of a communicator have different rules for NCCL's tuner, or some have none, so that NCCL's
//! defaults apply on all of them.

use super::{Rule, fact, names, wall, who};
use crate::join::{Communicator, Join};
use crate::model::{COMM_INIT, Evidence, Finding, Kind, OperationRef, Rank, RulesState, Track};
use std::collections::BTreeMap;

/// Members that are asked whether the ranks agreed. All that took part know it.
const ASKED: usize = 8;
/// Ranks, and sets of rules, that are described one by one.
const DESCRIBED: usize = 8;
/// Ranks that can be named though nothing is seen of them.
const UNSEEN_MAX: usize = 64;

/// How long after the last rank's init the ranks are compared: each enters the outcome a moment after the others, in ns.
const SETTLE_NS: u64 = 100_000_000;

/// The rule.
#[derive(Debug)]
pub(super) struct TunerRulesRule;

impl Rule for TunerRulesRule {
    fn check(&self, join: &Join, now_ns: u64) -> Vec<Finding> {
        join.communicators().filter_map(|c| judge(join, c, now_ns)).collect()
    }
}

fn judge(join: &Join, c: &Communicator, now_ns: u64) -> Option<Finding> {
    let is_refused = |state| matches!(state, RulesState::Different | RulesState::AbsentRank);
    let mut asked = c.members().values().take(ASKED).filter_map(|m| m.record.rules);
    let state = asked.find(|r| is_refused(r.state))?.state;
    let last_ns = c.members().values().map(|m| m.record.init_ns).max()?;
    if now_ns.saturating_sub(last_ns) < SETTLE_NS {
        return None;
    }
    let mut camps = camps(c);
    let usual = usual(&camps);
    let mut elsewhere = Vec::new();
    if state == RulesState::AbsentRank || camps.len() == 1 {
        let unseen = unseen(c);
        if state == RulesState::Different && spans_nodes(c) {
            // Their hashes are on other nodes: no rank that is seen here is known to be right.
            elsewhere = unseen;
        } else if !unseen.is_empty() {
            camps.entry(None).or_default().extend(unseen);
        }
    }
    let is_culprit = |hash: &Option<u64>| Some(*hash) != usual || !elsewhere.is_empty();
    let mut culprits: Vec<Rank> =
        camps.iter().filter(|(hash, _)| is_culprit(hash)).flat_map(|(_, ranks)| ranks.clone()).collect();
    culprits.extend(&elsewhere);
    culprits.sort();
    if culprits.is_empty() {
        return None;
    }
    let since_ns = c.members().values().map(|m| m.record.init_ns).min().unwrap_or(0);
    let mut evidence: Vec<Evidence> =
        camps.iter().take(DESCRIBED).map(|(hash, ranks)| fact(described(*hash, ranks))).collect();
    if !elsewhere.is_empty() {
        let ranks = names(&elsewhere);
        evidence.push(fact(format!(
            "{ranks} are on other nodes, and not all have these rules; NCCL's log names them"
        )));
    }
    evidence.extend(culprits.iter().take(DESCRIBED).filter_map(|r| who(join, c, *r)));
    Some(Finding {
        since: wall(join, since_ns),
        since_ns,
        evidence,
        advice: "no rank follows the rules, and NCCL's defaults apply. Give every rank the same rules (RINGWATCH_TUNE, or ringwatch run --tune), in a file that all of them can read; NCCL's log (NCCL_DEBUG=WARN) says what each rank found".to_owned(),
        ..Finding::new(Kind::TunerRulesDiffer, c.id, culprits, OperationRef::named(COMM_INIT, Track::Collective, 0))
    })
}

/// The ranks that are seen, by their rules; `None` for those that have none.
fn camps(c: &Communicator) -> BTreeMap<Option<u64>, Vec<Rank>> {
    let mut camps: BTreeMap<Option<u64>, Vec<Rank>> = BTreeMap::new();
    for (rank, member) in c.members() {
        camps.entry(member.record.rules.and_then(|r| r.hash)).or_default().push(*rank);
    }
    camps
}

/// The rules of most ranks. Where as many have others, nobody knows which are right.
fn usual(camps: &BTreeMap<Option<u64>, Vec<Rank>>) -> Option<Option<u64>> {
    let with_rules = || camps.iter().filter(|(hash, _)| hash.is_some());
    let most = with_rules().map(|(_, ranks)| ranks.len()).max()?;
    let mut all = with_rules().filter(|(_, ranks)| ranks.len() == most).map(|(hash, _)| *hash);
    all.next().filter(|_| all.next().is_none())
}

/// True where its ranks are known to be on several nodes.
fn spans_nodes(c: &Communicator) -> bool {
    c.members().values().any(|m| m.record.nodes.is_some_and(|n| n > 1))
}

/// Ranks of which nothing is seen, the first of them.
fn unseen(c: &Communicator) -> Vec<Rank> {
    let ranks = (0..c.ranks().unwrap_or(0)).map(Rank);
    ranks.filter(|r| !c.members().contains_key(r)).take(UNSEEN_MAX).collect()
}

fn described(hash: Option<u64>, ranks: &[Rank]) -> String {
    let have = if ranks.len() == 1 { "has" } else { "have" };
    match hash {
        Some(hash) => format!("{} {have} the rules {hash:016x}", names(ranks)),
        None => format!("{} {have} no rules that can be read", names(ranks)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::join::testing::{member, process};
    use crate::model::{Severity, TunerRules, Update};

    fn found(rules: &[Option<(RulesState, Option<u64>)>]) -> Vec<Finding> {
        found_on(1, rules)
    }

    fn found_on(nodes: u32, rules: &[Option<(RulesState, Option<u64>)>]) -> Vec<Finding> {
        let mut join = Join::new();
        for (rank, rules) in (0..).zip(rules) {
            join.feed(process(rank));
            let Update::Comm(mut record) = member(rank, 4, 0) else { unreachable!("a membership") };
            record.rules = rules.map(|(state, hash)| TunerRules { state, hash });
            record.nodes = Some(nodes);
            join.feed(Update::Comm(record));
        }
        TunerRulesRule.check(&join, 1_000_000_000)
    }

    fn ranks(found: &[Finding]) -> Vec<u32> {
        assert!(found.iter().all(|f| (f.kind, f.severity) == (Kind::TunerRulesDiffer, Severity::Warning)));
        found.iter().flat_map(|f| f.ranks.iter().map(|r| r.0)).collect()
    }

    const DIFFERENT: RulesState = RulesState::Different;

    #[test]
    fn the_rank_whose_rules_differ_is_named() {
        let of = |hash| Some((DIFFERENT, hash));
        let found = found(&[of(Some(5)), of(Some(5)), of(Some(9)), of(Some(5))]);
        assert_eq!(ranks(&found), [2]);
        let told = |text: &str| found[0].evidence.iter().any(|e| e.text.contains(text));
        assert!(told("ranks 0, 1, 3 have the rules 0000000000000005"), "{found:?}");
        assert!(told("rank 2 has the rules 0000000000000009"), "{found:?}");
    }

    #[test]
    fn a_rank_without_rules_is_named_and_of_two_halves_all_are() {
        let of = |hash| Some((DIFFERENT, hash));
        assert_eq!(ranks(&found(&[of(Some(5)), of(None), of(None), of(None)])), [1, 2, 3]);
        assert_eq!(ranks(&found(&[of(Some(5)), of(Some(9)), of(Some(9)), of(Some(5))])), [0, 1, 2, 3]);
        assert_eq!(ranks(&found(&[of(None), of(None), of(None), of(None)])), [0, 1, 2, 3]);
        let absent = Some((RulesState::AbsentRank, Some(5)));
        assert_eq!(ranks(&found(&[absent, None, absent, absent])), [1], "it was not asked to follow any");
        assert_eq!(ranks(&found(&[absent, absent, absent])), [3], "it is not seen at all");
    }

    #[test]
    fn of_ranks_on_other_nodes_none_is_accused_alone() {
        let same = Some((DIFFERENT, Some(5)));
        let found = found_on(2, &[same, same]);
        assert_eq!(ranks(&found), [0, 1, 2, 3], "each half may be wrong");
        let told = |text: &str| found[0].evidence.iter().any(|e| e.text.contains(text));
        assert!(told("ranks 2, 3 are on other nodes"), "{found:?}");
        let without = Some((DIFFERENT, None));
        assert_eq!(ranks(&found_on(2, &[same, without])), [1], "its node knows it");
    }

    #[test]
    fn rules_that_apply_or_are_off_alike_are_no_finding() {
        for state in [RulesState::Applied, RulesState::Off] {
            assert_eq!(found(&[Some((state, Some(5))); 4]), []);
        }
        assert_eq!(found(&[None; 4]), []);
    }
}
