//! `missing-rank`: ranks wait in an operation that another rank never issued.
//!
//! The culprit looks healthy: it has finished all that it issued. What gives it away is that its issue count
//! stands still at the order in which the others wait. One finding per communicator and track, at the lowest
//! such order: what the others issued behind it waits for the same ranks.

use super::{Rule, Settings, fact, names, number, seconds, wall, who};
use crate::join::{Communicator, Join, Track};
use crate::model::{Finding, Kind, Liveness, OpState, Rank};

/// The rule.
#[derive(Debug)]
pub struct MissingRankRule {
    settings: Settings,
}

impl MissingRankRule {
    /// With these times.
    pub fn new(settings: Settings) -> Self {
        MissingRankRule { settings }
    }
}

impl Rule for MissingRankRule {
    fn check(&self, join: &Join, now_ns: u64) -> Vec<Finding> {
        join.communicators()
            .flat_map(|c| {
                [Track::Collective, Track::Replay]
                    .into_iter()
                    .filter_map(|t| self.judge(join, c, t, now_ns))
                    .collect::<Vec<_>>()
            })
            .collect()
    }
}

/// How long a process had to wait: until now, or until its end. `None` when its end is not known.
fn waited(join: &Join, c: &Communicator, rank: Rank, since: u64, now_ns: u64) -> Option<u64> {
    let segment = c.members().get(&rank)?.record.segment;
    let end = match join.process(segment)?.record.liveness {
        Liveness::Alive => now_ns,
        Liveness::Gone(at) => at?,
    };
    Some(end.saturating_sub(since))
}

impl MissingRankRule {
    fn judge(&self, join: &Join, c: &Communicator, track: Track, now_ns: u64) -> Option<Finding> {
        let issued: Vec<(Rank, u64)> =
            c.members().iter().filter_map(|(r, m)| Some((*r, m.issued(track)?))).collect();
        let order = issued.iter().map(|(_, n)| *n).min()?;
        // Behind a mismatch every rank is lost; the mismatch itself is the finding.
        if c.mismatch().is_some_and(|(t, o, _)| (t, o) <= (track, order)) {
            return None;
        }
        let missing: Vec<Rank> = issued.iter().filter(|(_, n)| *n == order).map(|(r, _)| *r).collect();
        let instance = c.instance(track, order)?;
        // Who issued it and is not known to be through with it waits.
        let waiting: Vec<(Rank, Option<u64>, u64)> = instance
            .parts
            .iter()
            .filter(|(_, p)| !p.finished)
            .filter_map(|(r, p)| Some((*r, p.started_ns, p.op.issued_ns?)))
            .collect();
        let started = waiting.iter().filter_map(|(_, started, _)| *started).min();
        // Where the GPU was not seen to start, the operation may be queued behind a long computation; the hosts'
        // issue times have to do, with more patience, unless NCCL tells nothing about kernels anyway.
        let since = match started {
            Some(started) => started,
            None => waiting.iter().map(|(_, _, issued)| *issued).min()?,
        };
        let by_host = started.is_none() && !untimed(join, c);
        let silent = by_host && instance.parts.values().all(|p| p.finished || p.op.timing.is_silent());
        let gone = |r: &Rank| {
            c.members()
                .get(r)
                .and_then(|m| join.process(m.record.segment))
                .is_some_and(|p| p.record.liveness != Liveness::Alive)
        };
        let culprit_gone = missing.iter().any(gone) && !waiting.iter().all(|(r, ..)| gone(r));
        let patience = match (culprit_gone, by_host || order == 0) {
            (true, false) => self.settings.patience_gone_ns,
            (false, false) => self.settings.patience_ns,
            (_, true) if silent && order != 0 => self.settings.patience_silent_ns,
            // The first operation waits for slow starts: compilation, data, connections.
            (_, true) => self.settings.patience_unsure_ns,
        };
        let longest = waiting.iter().filter_map(|(r, ..)| waited(join, c, *r, since, now_ns)).max();
        // A black box that nobody watched does not say for how long: then the state itself has to do.
        let unknown = longest.is_none() && join.all_gone();
        if !unknown && longest.is_none_or(|w| w < patience) {
            return None;
        }
        let first = instance.first()?;
        let operation = c.describe(track, order, &first.op);
        let waiters: Vec<Rank> = waiting.iter().map(|(r, ..)| *r).collect();
        let mut evidence = vec![match longest {
            Some(w) => number(
                format!("{} issued it and have waited {:.1} s", names(&waiters), seconds(w)),
                seconds(w),
                "s",
            ),
            None => fact(format!(
                "{} issued it and did not finish; for how long is not known, as all processes were gone before ringwatch looked",
                names(&waiters)
            )),
        }];
        if silent {
            evidence.push(fact(
                "measured from the hosts' issue times: the overhead budget left this operation out of GPU times (RINGWATCH_OVERHEAD_BUDGET)",
            ));
        } else if by_host {
            evidence.push(fact(
                "measured from the hosts' issue times: no believable stamp says that a GPU started it",
            ));
        }
        for rank in &missing {
            evidence.push(number(
                format!("rank {rank} issued {order} operations and then no more; this one would be its next"),
                order as f64,
                "count",
            ));
            if c.state(track, order, *rank) == OpState::Called {
                let call = c.members().get(rank).and_then(|m| m.called);
                let at = call.map_or(0.0, |c| seconds(now_ns.saturating_sub(c.at_ns)));
                evidence.push(match call.map(|c| (c.func, c.returned)) {
                    Some((func, Some(false))) => number(
                        format!("rank {rank} called {func} {at:.1} s ago, and the call has not returned"),
                        at,
                        "s",
                    ),
                    Some((func, Some(true))) => number(
                        format!(
                            "rank {rank} called {func} in a group {at:.1} s ago, and NCCL has not issued it"
                        ),
                        at,
                        "s",
                    ),
                    _ => fact(format!("rank {rank} is inside an NCCL call that has not issued anything yet")),
                });
            }
            if gone(rank) {
                evidence.push(fact(format!("the process of rank {rank} is gone")));
            }
            evidence.extend(who(join, c, *rank));
        }
        let advice = if missing.iter().any(gone) {
            format!(
                "find out why the process of {} ended: its log, dmesg (OOM), the exit code",
                names(&missing)
            )
        } else {
            let pids: Vec<String> = missing
                .iter()
                .filter_map(|r| join.process(c.members().get(r)?.record.segment))
                .map(|p| format!("py-spy dump --pid {} on {}", p.record.pid, p.record.host))
                .collect();
            format!(
                "look at what {} does now ({}): a branch that skips the call, an exception, data loading or a checkpoint",
                names(&missing),
                pids.join("; ")
            )
        };
        Some(Finding {
            since: wall(join, since),
            evidence,
            advice,
            since_ns: since,
            ..Finding::new(Kind::MissingRank, c.id, missing, operation)
        })
    }
}

/// True when the ABI in use brings no kernel events (NCCL before 2.26).
fn untimed(join: &Join, c: &Communicator) -> bool {
    c.members()
        .values()
        .filter_map(|m| join.process(m.record.segment))
        .all(|p| p.record.abi.is_some_and(|v| v < 3))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::join::testing::{all_reduce, member, process};
    use crate::model::{Timing, Untimed, Update};

    const S: u64 = 1_000_000_000;

    /// Four ranks; all finish orders 0 to 2; ranks 0 to 2 then start order 3 at 10 s, rank 3 does not.
    fn stuck() -> Join {
        let mut j = Join::new();
        for r in 0..4 {
            j.feed(process(r));
            j.feed(member(r, 4, if r == 3 { 3 } else { 4 }));
            for o in 0..3 {
                let t = S + o * 1_000_000;
                j.feed(Update::Op(Box::new(all_reduce(r, o, t, Some((t + 5_000, Some(t + 50_000)))))));
            }
            if r != 3 {
                j.feed(Update::Op(Box::new(all_reduce(r, 3, 10 * S, Some((10 * S + 5_000, None))))));
            }
        }
        j
    }

    #[test]
    fn names_the_rank_that_did_not_issue_it_after_the_patience() {
        let rule = MissingRankRule::new(Settings::default());
        let mut j = stuck();
        j.tick(12 * S);
        assert_eq!(rule.check(&j, 12 * S), vec![], "2 s are not enough");
        let found = rule.check(&j, 14 * S);
        assert_eq!(found.len(), 1);
        let f = &found[0];
        assert_eq!((f.kind, f.ranks.as_slice()), (Kind::MissingRank, [Rank(3)].as_slice()));
        assert_eq!((f.operation.order, f.operation.bytes), (3, Some(4 << 20)));
        assert!((f.evidence[0].value.expect("seconds") - 4.0).abs() < 0.001);
        assert_eq!(f.since.as_deref(), Some("2026-11-21T07:06:14Z"));
    }

    #[test]
    fn a_rank_that_arrives_ends_it() {
        let rule = MissingRankRule::new(Settings::default());
        let mut j = stuck();
        j.feed(member(3, 4, 4));
        j.feed(Update::Op(Box::new(all_reduce(3, 3, 14 * S, Some((14 * S + 5_000, None))))));
        assert_eq!(rule.check(&j, 20 * S), vec![]);
    }

    #[test]
    fn a_queued_operation_is_no_proof() {
        let rule = MissingRankRule::new(Settings::default());
        let mut j = Join::new();
        for r in 0..2u32 {
            j.feed(process(r));
            j.feed(member(r, 2, if r == 1 { 1 } else { 2 }));
            j.feed(Update::Op(Box::new(all_reduce(r, 0, S, Some((S + 5_000, Some(S + 50_000)))))));
        }
        // Rank 0's host runs ahead: issued, but its GPU has not begun.
        j.feed(Update::Op(Box::new(all_reduce(0, 1, 2 * S, None))));
        assert_eq!(rule.check(&j, 30 * S), vec![]);
        let late = rule.check(&j, 60 * S);
        assert!(late[0].evidence.iter().any(|e| e.text.contains("hosts' issue times")), "{late:?}");
    }

    #[test]
    fn an_operation_that_was_not_timed_needs_more_patience_and_says_so() {
        let rule = MissingRankRule::new(Settings::default());
        let mut j = Join::new();
        for r in 0..2u32 {
            j.feed(process(r));
            j.feed(member(r, 2, if r == 1 { 1 } else { 2 }));
            j.feed(Update::Op(Box::new(all_reduce(r, 0, S, Some((S + 5_000, Some(S + 50_000)))))));
        }
        let mut o = all_reduce(0, 1, 2 * S, None);
        o.timing = Timing::Not(Untimed::Budget);
        j.feed(Update::Op(Box::new(o)));
        assert_eq!(rule.check(&j, 11 * S), vec![]);
        let found = rule.check(&j, 13 * S);
        assert!(found[0].evidence.iter().any(|e| e.text.contains("overhead budget")), "{found:?}");
    }

    #[test]
    fn a_healthy_job_is_silent() {
        let rule = MissingRankRule::new(Settings::default());
        let mut j = stuck();
        j.feed(member(3, 4, 4));
        for r in 0..4 {
            let kernel = Some((10 * S + 5_000, Some(10 * S + 60_000)));
            j.feed(Update::Op(Box::new(all_reduce(r, 3, 10 * S, kernel))));
        }
        assert_eq!(rule.check(&j, 100 * S), vec![]);
    }
}
