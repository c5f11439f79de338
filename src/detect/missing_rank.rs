//! `missing-rank`, `missing-replay`, `aborted-rank`: ranks wait in an operation that another rank never issued.
//!
//! The culprit looks healthy: it has finished all that it issued. What gives it away is that its issue count
//! stands still at the order in which the others wait, and that it waits for nothing itself.

use super::hang_context::{HangContext, StallSite};
use super::{endings, fact, names, number, seconds, who};
use crate::join::{Activity, Process};
use crate::model::{
    Cause, CommId, Confidence, Evidence, Finding, Kind, Liveness, OpState, ProcessState, Rank, Severity,
    Track,
};

/// Ranks that are described one by one.
const DESCRIBED: usize = 8;
/// A process that is gone so much earlier than another, in ns, went first: processes are looked at every 50 ms.
const OUTLIVED_NS: u64 = 50_000_000;
/// An operation issued within this time, in ns, says that its rank is at work in that communicator.
const RECENT_NS: u64 = 1_000_000_000;

pub(super) fn judge(scene: &HangContext<'_>, at: StallSite<'_>) -> Option<Finding> {
    match endings::one_call_more(scene, at) {
        endings::OneMore::No => {}
        endings::OneMore::Unclear => return None,
        endings::OneMore::Yes(finding) => return Some(*finding),
    }
    let missing = &at.origin.ranks;
    let gone = missing.iter().any(|r| scene.gone(at.comm, *r));
    let aborted = missing.iter().any(|r| scene.aborted(at.comm, *r));
    let proven = (gone || aborted) && others_outlived(scene, at);
    if !proven && !scene.enough(at.waited, patience(scene, at)) {
        return None;
    }
    if proven && !is_settled(scene, at) {
        return None;
    }
    if !proven && missing.iter().all(|r| scene.just_released(at, *r)) {
        return None;
    }
    if !proven && missing.iter().all(|r| scene.at_work(at, *r, patience(scene, at))) {
        return None;
    }
    if !proven && at.waited.is_by_hosts() && is_computed_before(scene, at) {
        return None;
    }
    // Whoever else is missing may be on its way: a rank that writes a checkpoint while another one is killed.
    let is_over = |r: &Rank| scene.gone(at.comm, *r) || scene.aborted(at.comm, *r);
    let over: Vec<Rank> = missing.iter().copied().filter(is_over).collect();
    let missing = if proven { &over } else { missing };
    let order = at.stall.order;
    let kind = match at.stall.track {
        _ if aborted => Kind::AbortedRank,
        Track::Replay => Kind::MissingReplay,
        _ => Kind::MissingRank,
    };
    let mut evidence = scene.wait_evidence(at.waited);
    let things = if kind == Kind::MissingReplay { "replayed operations" } else { "operations" };
    for rank in missing.iter().take(DESCRIBED) {
        let issued = at.comm.members().get(rank).and_then(|m| m.issued(at.stall.track)).unwrap_or(order);
        evidence.push(if issued > order {
            fact(format!("rank {rank} issued it and will not finish it"))
        } else {
            number(
                format!("rank {rank} issued {order} {things} and then no more; this one would be its next"),
                order as f64,
                "count",
            )
        });
        evidence.extend(call(scene, at, *rank));
        evidence.extend(condition(scene, at, *rank));
        evidence.extend(who(scene.join, at.comm, *rank));
    }
    let causes = missing.iter().take(DESCRIBED).map(|r| (*r, cause(scene, at, *r)));
    // The hardest fact about any of them comes first.
    let cause = causes.min_by_key(|(r, c)| (weight(c), *r)).map_or(Cause::Unknown, |(_, c)| c);
    let advice = advice(scene, at, &cause, kind);
    let operation = at.comm.describe(at.stall.track, order, &at.instance.first()?.op);
    let severity = severity(scene, at, kind, &cause);
    if severity == Severity::Warning {
        evidence.push(fact(format!(
            "{} may come back, as from a checkpoint: critical from {:.0} s on",
            names(missing),
            seconds(used_to_ns(scene, at))
        )));
    }
    Some(Finding {
        evidence,
        advice,
        severity,
        confidence: if proven { Confidence::Proven } else { Confidence::Likely },
        cause: Some(cause),
        ..Finding::new(kind, at.comm.id, missing.clone(), operation)
    })
}

/// True where a GPU of the ranks that issued an operation computes: their hosts run ahead of it, and nobody waits yet.
fn is_computed_before(scene: &HangContext<'_>, at: StallSite<'_>) -> bool {
    let mut ranks = at.waited.ranks.iter().take(DESCRIBED);
    ranks.any(|r| scene.activity(at.comm, *r) == Some(Activity::Computing))
}

/// How long the others have to have waited.
fn patience(scene: &HangContext<'_>, at: StallSite<'_>) -> u64 {
    let s = scene.settings;
    match at.waited {
        _ if scene.is_slow_start(at) => s.patience_unsure_ns,
        w if w.on_gpu => scene.patience(at.comm),
        // Where the GPU was not seen to start, the operation may be queued behind a long computation, and behind all that the
        // host has issued ahead of its GPU.
        _ => s.patience_silent_ns.max(scene.patience(at.comm)).saturating_add(lead_ns(scene, at)),
    }
}

/// How far ahead of their GPUs the hosts of those that wait have been, in ns.
fn lead_ns(scene: &HangContext<'_>, at: StallSite<'_>) -> u64 {
    let leads = at.waited.ranks.iter().filter_map(|r| Some(scene.process(at.comm, *r)?.issuing.lead_ns()));
    leads.max().unwrap_or(0)
}

fn severity(scene: &HangContext<'_>, at: StallSite<'_>, kind: Kind, cause: &Cause) -> Severity {
    let is_away = kind == Kind::MissingRank && *cause == Cause::InHostCode;
    if is_away { severity_of_away(scene, at, kind) } else { kind.severity() }
}

/// A rank that is away in its own code may be in a checkpoint: it is a warning until it outlasts what the job is used to.
pub(super) fn severity_of_away(scene: &HangContext<'_>, at: StallSite<'_>, kind: Kind) -> Severity {
    match at.waited.for_ns {
        Some(waited_ns) if waited_ns < used_to_ns(scene, at) => Severity::Warning,
        _ => kind.severity(),
    }
}

/// How long a rank may be away in its own code, in ns: for as long again as it takes to be missing, and for twice the
/// longest that a rank was away before.
fn used_to_ns(scene: &HangContext<'_>, at: StallSite<'_>) -> u64 {
    let rhythm_ns = at.comm.longest_ns().max(scene.patience(at.comm));
    scene.settings.patience_away_ns.max(rhythm_ns.saturating_mul(2))
}

/// True when somebody still waited when the missing ranks' processes were gone: a launcher ends the others soon after.
fn others_outlived(scene: &HangContext<'_>, at: StallSite<'_>) -> bool {
    let missing = at.origin.ranks.iter().filter_map(|r| scene.gone_for(at.comm, *r)).max();
    at.waited.ranks.iter().any(|r| {
        let gone = scene.gone_for(at.comm, *r);
        !scene.gone(at.comm, *r) || missing.zip(gone).is_some_and(|(m, g)| m >= g.saturating_add(OUTLIVED_NS))
    })
}

/// True when a process is gone for long enough that the others are not on their way out as well.
fn is_settled(scene: &HangContext<'_>, at: StallSite<'_>) -> bool {
    let settle = scene.settings.patience_gone_ns;
    if at.waited.ranks.iter().all(|r| scene.gone(at.comm, *r)) {
        return true;
    }
    let gone = at.origin.ranks.iter().filter_map(|r| scene.gone_for(at.comm, *r)).max();
    gone.is_none_or(|g| g >= settle) && scene.enough(at.waited, settle)
}

/// The facts about a call that has not been issued.
fn call(scene: &HangContext<'_>, at: StallSite<'_>, rank: Rank) -> Option<Evidence> {
    if at.comm.state(at.stall.track, at.stall.order, rank) != OpState::Called {
        return None;
    }
    let call = at.comm.members().get(&rank).and_then(|m| m.called);
    let ago = call.map_or(0.0, |c| seconds(scene.now_ns.saturating_sub(c.at_ns)));
    Some(match call.map(|c| (c.func, c.returned)) {
        Some((func, Some(false))) => number(
            format!("rank {rank} called {func} {ago:.1} s ago, and the call has not returned"),
            ago,
            "s",
        ),
        Some((func, Some(true))) => number(
            format!("rank {rank} called {func} in a group {ago:.1} s ago, and NCCL has not issued it"),
            ago,
            "s",
        ),
        _ => fact(format!("rank {rank} is inside an NCCL call that has not issued anything yet")),
    })
}

/// The state of a rank's process, by its segment.
fn condition(scene: &HangContext<'_>, at: StallSite<'_>, rank: Rank) -> Vec<Evidence> {
    let mut evidence = Vec::new();
    if scene.aborted(at.comm, rank) {
        evidence.push(fact(format!("rank {rank} aborted the communicator")));
    }
    if scene.gone(at.comm, rank) {
        evidence.push(fact(format!("the process of rank {rank} is gone")));
    }
    evidence
}

/// Why a rank is missing.
fn cause(scene: &HangContext<'_>, at: StallSite<'_>, rank: Rank) -> Cause {
    let host = scene.process(at.comm, rank).and_then(|p| p.host.as_ref());
    if scene.gone(at.comm, rank) {
        return Cause::ProcessGone(host.and_then(crate::model::HostFact::exit));
    }
    if host.is_some_and(|h| matches!(h.state, Some(ProcessState::Stopped { .. }))) {
        return Cause::Stopped;
    }
    let is_unknown = scene.process(at.comm, rank).is_some_and(|p| p.record.liveness == Liveness::Unknown);
    if is_unknown || at.comm.state(at.stall.track, at.stall.order, rank) == OpState::Called {
        return Cause::Unknown;
    }
    busy_in(scene, at, rank).map_or(Cause::InHostCode, Cause::BusyElsewhere)
}

/// The other communicator in which a rank's GPU or host is at work.
fn busy_in(scene: &HangContext<'_>, at: StallSite<'_>, rank: Rank) -> Option<CommId> {
    let me = &at.comm.members().get(&rank)?.record;
    let mut looked_at = None;
    scene.join.memberships(me.segment).iter().filter(|(id, _)| *id != at.comm.id).find_map(|(id, there)| {
        let c = scene.join.communicator(*id)?;
        // Of its ranks there the first is looked at.
        if looked_at == Some(*id) || c.members().get(there)?.record.gpu != me.gpu {
            return None;
        }
        looked_at = Some(*id);
        let parts = c.instances().filter_map(|(_, _, i)| i.parts.get(there));
        let at_work = |p: &crate::join::Part| {
            let fresh = p.op.issued_ns.is_some_and(|t| scene.now_ns.saturating_sub(t) < RECENT_NS);
            fresh || (!p.finished && p.started_ns.is_some())
        };
        parts.into_iter().any(at_work).then_some(c.id)
    })
}

fn weight(cause: &Cause) -> u8 {
    match cause {
        Cause::ProcessGone(_) => 0,
        Cause::Stopped => 1,
        Cause::NeverJoined => 2,
        Cause::BusyElsewhere(_) => 3,
        Cause::InHostCode => 4,
        Cause::Device(..) | Cause::Unknown => 5,
    }
}

/// A command for each process.
fn for_each(command: &str, processes: &[&Process]) -> String {
    let each: Vec<String> =
        processes.iter().map(|p| format!("{command} {} on {}", p.record.pid, p.record.host)).collect();
    each.join("; ")
}

/// The advice about ranks whose processes are stopped.
pub(super) fn let_go_on(ranks: &[Rank], processes: &[&Process]) -> String {
    format!(
        "let {} go on ({}), and find out who stopped it",
        names(ranks),
        for_each("kill -SIGCONT", processes)
    )
}

fn advice(scene: &HangContext<'_>, at: StallSite<'_>, cause: &Cause, kind: Kind) -> String {
    let missing = names(&at.origin.ranks);
    let processes: Vec<_> =
        at.origin.ranks.iter().take(DESCRIBED).filter_map(|r| scene.process(at.comm, *r)).collect();
    let pids = |command: &str| for_each(command, &processes);
    if processes.iter().any(|p| p.record.liveness == Liveness::Unknown) {
        return format!(
            "look at what {missing} did after the last call: a branch that skips this one, an exception, data loading, a checkpoint or the end of the process"
        );
    }
    match cause {
        _ if kind == Kind::AbortedRank => format!(
            "find out why {missing} aborted the communicator: an exception or a watchdog's timeout in its log; the others have to abort too"
        ),
        Cause::ProcessGone(_) => {
            format!("find out why the process of {missing} ended: its log, dmesg (OOM), the exit code")
        }
        Cause::Stopped => let_go_on(&at.origin.ranks, &processes),
        Cause::BusyElsewhere(comm) => format!(
            "{missing} is at work in communicator {comm}: look at why it does not come to this one ({})",
            pids("py-spy dump --pid")
        ),
        _ if kind == Kind::MissingReplay => format!(
            "look at why {missing} did not replay the CUDA graph that the others replayed ({}): a branch that skips it, or another number of steps",
            pids("py-spy dump --pid")
        ),
        _ => format!(
            "look at what {missing} does now ({}): a branch that skips the call, an exception, data loading or a checkpoint",
            pids("py-spy dump --pid")
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::detect::{HangRule, Rule, Settings};
    use crate::join::Join;
    use crate::join::testing::{all_reduce, member, process};
    use crate::model::{
        Confidence, Exit, HostFact, Liveness, ProcessState, SegmentId, Timing, Untimed, Update,
    };

    const S: u64 = 1_000_000_000;

    #[test]
    fn who_is_alive_is_not_named_beside_a_rank_that_is_gone() {
        let mut j = Join::new();
        for r in 0..4 {
            let Update::Segment(mut record) = process(r) else { unreachable!("a process") };
            record.liveness = if r == 3 { Liveness::Gone(Some(9 * S)) } else { Liveness::Alive };
            j.feed(Update::Segment(record));
            j.feed(member(r, 4, if r < 2 { 2 } else { 1 }));
            j.feed(Update::Op(Box::new(all_reduce(r, 0, S, Some((S + 5_000, Some(S + 50_000)))))));
            if r < 2 {
                j.feed(Update::Op(Box::new(all_reduce(r, 1, 10 * S, Some((10 * S + 5_000, None))))));
            }
        }
        j.tick(40 * S);
        let found = HangRule::new(Settings::default()).check(&j, 40 * S);
        let named: Vec<_> = found.into_iter().map(|f| (f.kind, f.ranks)).collect();
        assert_eq!(named, [(Kind::MissingRank, vec![Rank(3)])], "rank 2 may be on its way out because of it");
    }

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

    /// The same in order 9 at 60 s, after an operation to which rank 3 came so late.
    fn stuck_again(late_ns: u64) -> Join {
        let mut j = Join::new();
        for r in 0..4 {
            j.feed(process(r));
            j.feed(member(r, 4, if r == 3 { 9 } else { 10 }));
            for o in 0..9 {
                let late_ns = if o == 8 { late_ns } else { 0 };
                let all = S + o * 1_000_000;
                let t = if r == 3 { all + late_ns } else { all };
                let kernel = Some((t + 5_000, Some(all + late_ns + 50_000)));
                j.feed(Update::Op(Box::new(all_reduce(r, o, t, kernel))));
            }
            if r != 3 {
                j.feed(Update::Op(Box::new(all_reduce(r, 9, 60 * S, Some((60 * S + 5_000, None))))));
            }
        }
        j
    }

    #[test]
    fn names_the_rank_that_did_not_issue_it_after_the_patience() {
        let rule = HangRule::new(Settings::default());
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
    fn a_process_that_is_gone_is_proof_and_host_facts_say_how_it_went() {
        let rule = HangRule::new(Settings::default());
        let mut j = stuck();
        let Update::Segment(mut record) = process(3) else { unreachable!("a process") };
        record.liveness = Liveness::Gone(Some(10 * S));
        let segment = record.id;
        j.feed(Update::Segment(record));
        assert_eq!(rule.check(&j, 10 * S + 100_000_000), vec![], "others may be on their way out too");
        let f = &rule.check(&j, 10 * S + 200_000_000)[0];
        assert_eq!((&f.cause, f.confidence), (&Some(Cause::ProcessGone(None)), Confidence::Proven));
        let mut fact = HostFact::new(segment, 10 * S);
        fact.state = Some(ProcessState::Gone(Some(Exit::Signal(9))));
        j.feed(Update::Host(Box::new(fact)));
        let f = &rule.check(&j, 10 * S + 200_000_000)[0];
        assert_eq!(f.cause, Some(Cause::ProcessGone(Some(Exit::Signal(9)))));
        assert_eq!(f.victims[0].ranks, vec![Rank(0), Rank(1), Rank(2)]);
    }

    #[test]
    fn who_is_away_while_another_is_killed_may_be_on_its_way() {
        // Ranks 1 and 2 have not issued the second operation; rank 2 is gone, and rank 1 writes a checkpoint.
        let mut j = Join::new();
        for r in 0..3 {
            let Update::Segment(mut record) = process(r) else { unreachable!("a process") };
            if r == 2 {
                record.liveness = Liveness::Gone(Some(10 * S));
            }
            j.feed(Update::Segment(record));
            j.feed(member(r, 3, if r == 0 { 2 } else { 1 }));
            j.feed(Update::Op(Box::new(all_reduce(r, 0, S, Some((S + 5_000, Some(S + 50_000)))))));
        }
        j.feed(Update::Op(Box::new(all_reduce(0, 1, 10 * S, Some((10 * S + 5_000, None))))));
        let named = |now_ns| HangRule::new(Settings::default()).check(&j, now_ns)[0].ranks.clone();
        assert_eq!(named(11 * S), [Rank(2)]);
        assert_eq!(named(14 * S), [Rank(2)], "it may be held up by that");
    }

    #[test]
    fn who_went_first_is_told_when_a_launcher_has_ended_the_others() {
        let ended = |rank_3: u64, others: u64| {
            let mut j = stuck();
            for r in 0..4 {
                let Update::Segment(mut record) = process(r) else { unreachable!("a process") };
                record.liveness = Liveness::Gone(Some(10 * S + if r == 3 { rank_3 } else { others }));
                j.feed(Update::Segment(record));
            }
            HangRule::new(Settings::default()).check(&j, 11 * S)
        };
        let found = ended(20_000_000, 120_000_000);
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].ranks.as_slice(), found[0].confidence), (&[Rank(3)][..], Confidence::Proven));
        assert_eq!(ended(20_000_000, 20_000_000), vec![], "all at once is how a job is ended");
        assert_eq!(ended(120_000_000, 20_000_000), vec![]);
    }

    #[test]
    fn a_replay_whose_stamps_are_anothers_has_not_ended() {
        // As NCCL 2.28.9 tells of a graph's replay: the channels stop, with stamps from long before.
        let mut j = Join::new();
        for r in 0..4 {
            j.feed(process(r));
            let Update::Comm(mut record) = member(r, 4, 4) else { unreachable!("a member") };
            record.replayed = if r == 3 { 20 } else { 21 };
            j.feed(Update::Comm(record));
            for o in 0..record_orders(r) {
                let mut op = all_reduce(r, o, 10 * S + o * 1_000_000, Some((2 * S, Some(2 * S + 50_000))));
                op.lane = crate::model::Lane::Replay;
                j.feed(Update::Op(Box::new(op)));
            }
        }
        j.tick(12 * S);
        let rule = HangRule::new(Settings::default());
        assert_eq!(rule.check(&j, 12 * S), vec![]);
        let found = rule.check(&j, 15 * S);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!((found[0].kind, found[0].ranks.as_slice()), (Kind::MissingReplay, &[Rank(3)][..]));
        assert_eq!(found[0].operation.order, 20);
    }

    fn record_orders(rank: u32) -> u64 {
        if rank == 3 { 20 } else { 21 }
    }

    #[test]
    fn a_stopped_process_is_named_so() {
        let rule = HangRule::new(Settings::default());
        let mut j = stuck();
        assert_eq!(rule.check(&j, 14 * S)[0].cause, Some(Cause::InHostCode));
        let mut fact = HostFact::new(SegmentId(4), 10 * S);
        fact.state = Some(ProcessState::Stopped { traced: false });
        j.feed(Update::Host(Box::new(fact)));
        let f = &rule.check(&j, 14 * S)[0];
        assert_eq!((&f.cause, f.confidence), (&Some(Cause::Stopped), Confidence::Likely));
        assert!(f.advice.contains("SIGCONT"), "{}", f.advice);
    }

    #[test]
    fn the_last_operation_of_a_stopped_process_is_over_where_the_others_left_it() {
        // All were in operation 2. Rank 3's process was stopped before it could tell of its end, and never issues 3.
        let rule = HangRule::new(Settings::default());
        let mut j = stuck();
        let in_it = Some((10 * S - 400_000_000, None));
        j.feed(Update::Op(Box::new(all_reduce(3, 2, 10 * S - 500_000_000, in_it))));
        let mut fact = HostFact::new(SegmentId(4), 10 * S);
        fact.state = Some(ProcessState::Stopped { traced: false });
        j.feed(Update::Host(Box::new(fact)));
        let [f] = rule.check(&j, 14 * S).try_into().expect("one");
        assert_eq!((f.kind, f.ranks, f.operation.order), (Kind::MissingRank, vec![Rank(3)], 3));
    }

    #[test]
    fn an_end_told_by_stamps_from_before_the_call_is_no_end() {
        // NCCL 2.28 after a rank sent to itself: rank 0's all-reduces end in the records as soon as they are issued.
        let rule = HangRule::new(Settings::default());
        let mut j = Join::new();
        for r in 0..2u32 {
            j.feed(process(r));
            j.feed(member(r, 2, if r == 1 { 1 } else { 3 }));
            j.feed(Update::Op(Box::new(all_reduce(r, 0, S, Some((S + 5_000, Some(S + 50_000)))))));
        }
        for order in 1..3 {
            let earlier = Some((S + 60_000 * order, Some(S + 60_000 * order + 50_000)));
            j.feed(Update::Op(Box::new(all_reduce(0, order, 10 * S, earlier))));
        }
        j.tick(20 * S);
        let [f] = rule.check(&j, 20 * S).try_into().expect("one");
        assert_eq!((f.kind, f.ranks, f.operation.order), (Kind::MissingRank, vec![Rank(1)], 1));
    }

    #[test]
    fn a_rank_in_its_own_code_is_a_warning_until_it_outlasts_what_the_job_is_used_to() {
        let rule = HangRule::new(Settings::default());
        let mut j = stuck();
        let mut at = |now_ns: u64| {
            j.tick(now_ns);
            rule.check(&j, now_ns)[0].severity
        };
        assert_eq!(
            (at(14 * S), at(39 * S), at(41 * S)),
            (Severity::Warning, Severity::Warning, Severity::Critical)
        );
        // A stopped process does not come back by itself.
        let mut fact = HostFact::new(SegmentId(4), 10 * S);
        fact.state = Some(ProcessState::Stopped { traced: false });
        let mut j = stuck();
        j.feed(Update::Host(Box::new(fact)));
        assert_eq!(rule.check(&j, 14 * S)[0].severity, Severity::Critical);
        // The job has waited for 25 s before: a rank is missing after 50 s, and that is critical after 100 s.
        let mut j = stuck_again(25 * S);
        j.tick(60 * S);
        let used_to = |s: u64| rule.check(&j, s * S).first().map(|f| f.severity);
        assert_eq!([used_to(109), used_to(111)], [None, Some(Severity::Warning)]);
        assert_eq!([used_to(159), used_to(161)], [Some(Severity::Warning), Some(Severity::Critical)]);
    }

    #[test]
    fn nothing_rests_on_a_rank_that_lost_operations() {
        let rule = HangRule::new(Settings::default());
        let mut j = stuck();
        let Update::Segment(mut record) = process(3) else { unreachable!("a process") };
        record.losses = vec![("slot being written", 1)];
        j.feed(Update::Segment(record));
        assert_eq!(rule.check(&j, 60 * S), vec![]);
    }

    #[test]
    fn a_rank_that_arrives_ends_it() {
        let rule = HangRule::new(Settings::default());
        let mut j = stuck();
        j.feed(member(3, 4, 4));
        j.feed(Update::Op(Box::new(all_reduce(3, 3, 14 * S, Some((14 * S + 5_000, None))))));
        assert_eq!(rule.check(&j, 16 * S), vec![]);
        // And if it does not end then, no rank is missing.
        assert_eq!(rule.check(&j, 20 * S)[0].kind, Kind::StuckTransfer);
    }

    #[test]
    fn a_queued_operation_needs_more_patience() {
        let rule = HangRule::new(Settings::default());
        let mut j = Join::new();
        for r in 0..2u32 {
            j.feed(process(r));
            j.feed(member(r, 2, if r == 1 { 1 } else { 2 }));
            j.feed(Update::Op(Box::new(all_reduce(r, 0, S, Some((S + 5_000, Some(S + 50_000)))))));
        }
        // Rank 0's host runs ahead: issued, but its GPU has not begun.
        j.feed(Update::Op(Box::new(all_reduce(0, 1, 2 * S, None))));
        assert_eq!(rule.check(&j, 5 * S), vec![]);
        let late = rule.check(&j, 7 * S);
        assert!(late[0].evidence.iter().any(|e| e.text.contains("hosts' issue times")), "{late:?}");
    }

    #[test]
    fn an_operation_that_was_not_timed_needs_more_patience_and_says_so() {
        let rule = HangRule::new(Settings::default());
        let mut j = Join::new();
        for r in 0..2u32 {
            j.feed(process(r));
            j.feed(member(r, 2, if r == 1 { 1 } else { 2 }));
            j.feed(Update::Op(Box::new(all_reduce(r, 0, S, Some((S + 5_000, Some(S + 50_000)))))));
        }
        let mut o = all_reduce(0, 1, 2 * S, None);
        o.timing = Timing::Not(Untimed::Budget);
        j.feed(Update::Op(Box::new(o)));
        assert_eq!(rule.check(&j, 5 * S), vec![]);
        let found = rule.check(&j, 7 * S);
        assert!(found[0].evidence.iter().any(|e| e.text.contains("overhead budget")), "{found:?}");
    }

    #[test]
    fn a_healthy_job_is_silent() {
        let rule = HangRule::new(Settings::default());
        let mut j = stuck();
        j.feed(member(3, 4, 4));
        for r in 0..4 {
            let kernel = Some((10 * S + 5_000, Some(10 * S + 60_000)));
            j.feed(Update::Op(Box::new(all_reduce(r, 3, 10 * S, kernel))));
        }
        assert_eq!(rule.check(&j, 100 * S), vec![]);
    }
}
