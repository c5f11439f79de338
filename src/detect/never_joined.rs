//! `missing-rank`, before there is an operation: ranks make a communicator that another rank never joins.
//!
//! Seen only where the job's calls are seen from outside (the preloaded library): a profiler is told of a
//! communicator when all its ranks have met. Ranks that a hang elsewhere keeps from it are no finding of their own.

use super::{HangRule, Rule, Settings, fact, names, number, seconds, verb, victims, wall, who};
use crate::join::{Communicator, Join, Member, Stall, Standstills};
use crate::model::{
    COMM_INIT, Cause, CommId, Confidence, Finding, Kind, Liveness, Making, OperationRef, Rank, SegmentId,
    Track,
};
use std::collections::BTreeSet;

/// Ranks that can be named; of a larger communicator this says nothing.
const RANKS_MAX: u32 = 65_536;
/// Memberships that are asked for the job's rhythm.
const WITNESSES: usize = 64;
/// How long a communicator may be in the making that a job at work makes, in ns: nothing has to start first.
const AT_WORK_NS: u64 = 10_000_000_000;

/// The rule.
#[derive(Debug)]
pub struct NeverJoinedRule {
    settings: Settings,
}

impl NeverJoinedRule {
    /// With these times.
    pub fn new(settings: Settings) -> Self {
        NeverJoinedRule { settings }
    }

    /// How long ranks may be in the making of a communicator. Those of a job at work come to it as to an operation, and no
    /// later than its own rhythm lets them.
    fn patience(&self, join: &Join, c: &Communicator) -> u64 {
        if !join.was_made_at_work(c) {
            return self.settings.patience_init_ns;
        }
        let own = c.members().values().flat_map(|m| join.memberships(m.record.segment)).take(WITNESSES);
        let longest_ns = own.filter_map(|(id, _)| Some(join.communicator(*id)?.longest_ns())).max();
        let rhythm_ns = longest_ns.unwrap_or(0).saturating_mul(2);
        AT_WORK_NS.max(rhythm_ns).min(self.settings.patience_init_ns)
    }

    /// The communicators in which something stands still, and since when, host monotonic ns. Hosts that make a communicator
    /// issue nothing else, so that untimed operations count only where the GPUs show that they stand still.
    fn hangs(&self, join: &Join, now_ns: u64) -> Vec<(CommId, u64)> {
        let standing = join.standing(now_ns);
        let stalls = standing.origins().iter().filter_map(|o| standing.stall(o.first));
        let seen = stalls.filter_map(|s| Some((s.comm, join.waited(s, now_ns)?.since_ns)));
        let shown = HangRule::new(self.settings).check(join, now_ns);
        seen.chain(shown.into_iter().map(|f| (f.communicator, f.since_ns))).collect()
    }

    /// True where one of the ranks that never joined waits in an operation: that tells why, as where a rank made the communicator
    /// instead of what the others wait for. Who these ranks are is known where they are all the others of the job.
    fn waits_elsewhere(&self, join: &Join, standing: &Standstills, f: &Finding, now_ns: u64) -> bool {
        let Some(c) = join.communicator(f.communicator) else { return false };
        let segments = |c: &Communicator| c.members().values().map(|m| m.record.segment).collect::<Vec<_>>();
        let here: BTreeSet<SegmentId> = segments(c).into_iter().collect();
        let near = victims::connected(join, f.communicator);
        let all = near.iter().filter_map(|id| join.communicator(*id)).flat_map(segments);
        let others: BTreeSet<SegmentId> = all.filter(|s| !here.contains(s)).collect();
        let waits = |s: &Stall| {
            let Some(of) = join.communicator(s.comm).filter(|of| near.contains(&of.id)) else { return false };
            let segment = |(r, _): &(Rank, u32)| Some(of.members().get(r)?.record.segment);
            let is_other = s.waiting.iter().filter_map(segment).any(|s| others.contains(&s));
            is_other && join.waited(s, now_ns).is_some_and(|w| w.at_least_ns >= self.settings.patience_ns)
        };
        others.len() == f.ranks.len() && (0..).map_while(|i| standing.stall(i)).any(waits)
    }

    fn judge(&self, join: &Join, c: &Communicator, now_ns: u64) -> Option<Finding> {
        // Until when a rank is known to have been in the making of it.
        let until = |m: &Member| {
            if m.record.making != Some(Making::Begun) || m.record.finalized_ns.is_some() {
                return None;
            }
            match join.process(m.record.segment)?.record.liveness {
                Liveness::Alive | Liveness::Unknown => Some(now_ns),
                Liveness::Gone(at) => at,
            }
        };
        let waiting: Vec<(Rank, u64)> =
            c.members().iter().filter_map(|(r, m)| Some((*r, until(m)?))).collect();
        let since = waiting.iter().filter_map(|(r, _)| Some(c.members().get(r)?.record.init_ns)).min()?;
        let waited = waiting.iter().map(|(_, t)| t.saturating_sub(since)).max()?;
        let ranks = c.ranks().filter(|n| *n <= RANKS_MAX)?;
        let missing: Vec<Rank> = (0..ranks).map(Rank).filter(|r| !c.members().contains_key(r)).collect();
        if waited < self.patience(join, c) || missing.is_empty() {
            return None;
        }
        let here = c.members().values().filter_map(|m| join.process(m.record.segment)).all(|p| {
            let job = &p.record.job;
            job.local.is_some() && job.local == job.size
        });
        let waiters: Vec<Rank> = waiting.iter().map(|(r, _)| *r).collect();
        let mut evidence = vec![
            number(
                format!(
                    "{} began to make it and {} waited {:.1} s",
                    names(&waiters),
                    verb(&waiters, "has", "have"),
                    seconds(waited)
                ),
                seconds(waited),
                "s",
            ),
            number(
                format!("{} of its {ranks} ranks were seen to join it", c.members().len()),
                c.members().len() as f64,
                "count",
            ),
            fact(if here {
                format!("{} never joined the communicator", names(&missing))
            } else {
                format!(
                    "{} never joined the communicator, as far as is seen on this host; they may be on another one",
                    names(&missing)
                )
            }),
        ];
        for rank in &waiters {
            evidence.extend(who(join, c, *rank));
        }
        let operation = OperationRef::named(COMM_INIT, Track::Collective, 0);
        Some(Finding {
            cause: Some(Cause::NeverJoined),
            confidence: Confidence::Likely,
            since: wall(join, since),
            evidence,
            advice: format!(
                "find out whether the processes of {} started and what they do: an exception before init, another unique id, another world size, a network that does not reach the root",
                names(&missing)
            ),
            since_ns: since,
            ..Finding::new(Kind::MissingRank, c.id, missing, operation)
        })
    }
}

impl Rule for NeverJoinedRule {
    fn check(&self, join: &Join, now_ns: u64) -> Vec<Finding> {
        let found = join.notable().filter(|c| c.in_the_making()).filter_map(|c| self.judge(join, c, now_ns));
        let found: Vec<Finding> = found.collect();
        if found.is_empty() {
            return found;
        }
        let hangs = self.hangs(join, now_ns);
        let standing = join.standing(now_ns);
        let is_elsewhere =
            |f: &Finding| is_held_up(join, f, &hangs) || self.waits_elsewhere(join, &standing, f, now_ns);
        found.into_iter().filter(|f| !is_elsewhere(f)).collect()
    }
}

/// True where something that shares processes with the waiting ranks stood still before they began to wait.
fn is_held_up(join: &Join, f: &Finding, hangs: &[(CommId, u64)]) -> bool {
    let mut earlier = hangs.iter().filter(|(_, since_ns)| *since_ns < f.since_ns).peekable();
    if earlier.peek().is_none() {
        return false;
    }
    let near = victims::connected(join, f.communicator);
    earlier.any(|(comm, _)| near.contains(comm))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::join::testing::{all_reduce, member, process};
    use crate::model::{Timing, Untimed, Update};

    const S: u64 = 1_000_000_000;

    fn begun(rank: u32, making: Option<Making>) -> Update {
        let Update::Comm(mut record) = member(rank, 4, 0) else { unreachable!("a member") };
        record.init_ns = S * u64::from(rank + 1);
        record.making = making;
        Update::Comm(record)
    }

    fn join(ranks: &[u32], making: Option<Making>) -> Join {
        let mut j = Join::new();
        for r in ranks {
            j.feed(process(*r));
            j.feed(begun(*r, making));
        }
        j
    }

    #[test]
    fn names_the_ranks_that_never_joined() {
        let rule = NeverJoinedRule::new(Settings::default());
        let j = join(&[0, 2], Some(Making::Begun));
        assert_eq!(rule.check(&j, 30 * S), vec![]);
        let found = rule.check(&j, 31 * S);
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].kind, found[0].ranks.as_slice()), (Kind::MissingRank, &[Rank(1), Rank(3)][..]));
        let said = |text: &str| found[0].evidence.iter().any(|e| e.text.contains(text));
        assert!(said("ranks 0, 2 began to make it and have waited 30.0 s"), "{found:?}");
        assert!(said("ranks 1, 3 never joined the communicator") && !said("another one"));
    }

    #[test]
    fn a_job_at_work_waits_for_less_long() {
        let rule = NeverJoinedRule::new(Settings::default());
        let mut j = join(&[0, 1, 2], Some(Making::Begun));
        for order in 0..3 {
            let Update::Comm(mut record) = member(0, 4, order + 1) else { unreachable!("a member") };
            record.comm = CommId::unowned(8);
            j.feed(Update::Comm(record));
            let mut op = all_reduce(0, order, S / 4 * (order + 1), None);
            op.comm = CommId::unowned(8);
            j.feed(Update::Op(Box::new(op)));
        }
        assert_eq!(rule.check(&j, 10 * S), vec![]);
        assert_eq!(rule.check(&j, 11 * S)[0].ranks, [Rank(3)]);
    }

    #[test]
    fn ranks_that_a_hang_keeps_from_it_are_no_finding() {
        let rule = NeverJoinedRule::new(Settings::default());
        // Rank 0 waits in an operation of its other communicator that rank 3 has not issued.
        let found = |waits_since_ns: u64| {
            let mut j = join(&[0, 1, 2], Some(Making::Begun));
            j.feed(process(3));
            for rank in [0, 3] {
                let issued = u64::from(rank == 0);
                let Update::Comm(mut record) = member(rank, 4, issued) else { unreachable!("a member") };
                (record.comm, record.ranks, record.rank) = (CommId::unowned(8), Some(2), Rank(rank / 3));
                j.feed(Update::Comm(record));
            }
            let mut op = all_reduce(0, 0, waits_since_ns, Some((waits_since_ns, None)));
            op.comm = CommId::unowned(8);
            j.feed(Update::Op(Box::new(op)));
            j.tick(40 * S);
            rule.check(&j, 40 * S).len()
        };
        assert_eq!((found(S / 2), found(5 * S)), (0, 1));
    }

    #[test]
    fn ranks_that_wait_for_the_one_that_makes_it_are_no_finding() {
        let rule = NeverJoinedRule::new(Settings::default());
        // Rank 0 makes the communicator, and the others are in an operation that it has not issued, or in none.
        let found = |waits: bool| {
            let mut j = join(&[0], Some(Making::Begun));
            for rank in 0..4 {
                j.feed(process(rank));
                let issued = 1 + u64::from(waits && rank > 0);
                let Update::Comm(mut record) = member(rank, 4, issued) else { unreachable!("a member") };
                record.comm = CommId::unowned(8);
                j.feed(Update::Comm(record));
                for order in 0..issued {
                    let at_ns = S / 2 + order * 2 * S;
                    let mut op =
                        all_reduce(rank, order, at_ns, Some((at_ns, (order == 0).then_some(at_ns + 1_000))));
                    op.comm = CommId::unowned(8);
                    j.feed(Update::Op(Box::new(op)));
                }
            }
            j.tick(40 * S);
            rule.check(&j, 40 * S).len()
        };
        assert_eq!((found(true), found(false)), (0, 1));
    }

    #[test]
    fn untimed_operations_before_it_that_nobody_sees_stand_still_are_no_excuse() {
        let rule = NeverJoinedRule::new(Settings::default());
        let mut j = join(&[0, 1, 2], Some(Making::Begun));
        j.feed(process(3));
        for rank in [0, 3] {
            let Update::Comm(mut record) = member(rank, 4, 1) else { unreachable!("a member") };
            (record.comm, record.ranks, record.rank) = (CommId::unowned(8), Some(2), Rank(rank / 3));
            j.feed(Update::Comm(record));
            let mut op = all_reduce(rank, 0, S / 2, None);
            (op.comm, op.rank, op.timing) =
                (CommId::unowned(8), Rank(rank / 3), Timing::Not(Untimed::Budget));
            j.feed(Update::Op(Box::new(op)));
        }
        j.tick(40 * S);
        assert_eq!(j.standing(40 * S).untimed().len(), 1, "nothing says that it ended");
        assert_eq!(rule.check(&j, 40 * S)[0].ranks, [Rank(3)]);
    }

    #[test]
    fn on_several_hosts_it_says_what_it_does_not_see() {
        let rule = NeverJoinedRule::new(Settings::default());
        let mut j = join(&[0, 1, 2], Some(Making::Begun));
        let Update::Segment(mut record) = process(0) else { unreachable!("a process") };
        record.job.local = Some(2);
        j.feed(Update::Segment(record));
        let found = rule.check(&j, 60 * S);
        assert!(found[0].evidence.iter().any(|e| e.text.contains("may be on another one")));
    }

    #[test]
    fn what_is_ready_or_complete_or_not_looked_at_is_no_finding() {
        let rule = NeverJoinedRule::new(Settings::default());
        for making in [None, Some(Making::Ready(None)), Some(Making::Failed(3)), Some(Making::Aborted)] {
            assert_eq!(rule.check(&join(&[0, 2], making), 99 * S), vec![]);
        }
        assert_eq!(rule.check(&join(&[0, 1, 2, 3], Some(Making::Begun)), 99 * S), vec![]);
    }

    #[test]
    fn an_id_that_was_a_guess_is_forgotten() {
        let mut j = join(&[0], Some(Making::Begun));
        let Update::Comm(record) = begun(0, None) else { unreachable!("a member") };
        j.feed(Update::Left { segment: record.segment, comm: record.comm, rank: record.rank });
        assert_eq!(j.communicators().count(), 0);
    }
}
