//! Processes that end: in order, or in the middle of what others wait for.
//!
//! A job ends when its processes do, one after the other, and the last records of each may be missing. So a process
//! that is gone proves something only where others are known to wait for it.

use super::hang_context::{HangContext, StallSite};
use super::{fact, names, number, seconds, who};
use crate::join::Communicator;
use crate::model::{Cause, CommId, Confidence, Exit, Finding, Kind, Making, Rank, Track};

/// Ranks of which it is looked through who waits elsewhere.
const RANKS_MAX: usize = 64;
/// Fewer ranks than this that stopped at one place are no majority against one that went on.
const MANY: usize = 3;

/// How the processes of some ranks ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ended {
    /// One of them runs.
    No,
    /// All of them by themselves, without an error.
    InOrder,
    /// One of them by a signal or with an error.
    Failed,
    /// Nobody says how.
    Unknown,
}

fn ended(scene: &HangContext<'_>, comm: &Communicator, ranks: &[Rank]) -> Ended {
    let exit = |r: &Rank| scene.process(comm, *r)?.host.as_ref()?.exit();
    if ranks.is_empty() || !ranks.iter().all(|r| scene.gone(comm, *r) && !scene.aborted(comm, *r)) {
        return Ended::No;
    }
    if ranks.iter().any(|r| exit(r).is_some_and(|e| e != Exit::Code(0))) {
        return Ended::Failed;
    }
    if ranks.iter().all(|r| exit(r).is_some()) { Ended::InOrder } else { Ended::Unknown }
}

/// How much an operation says in which only processes are lacking that issued it and are gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Proof {
    /// It does not end.
    Proven,
    /// It may not have ended, and those that are in it have not ended either.
    Likely,
    /// It may well have ended.
    Nothing,
}

/// Proves from the processes what an operation lacks.
pub(super) fn proof(scene: &HangContext<'_>, at: StallSite<'_>) -> Proof {
    let ranks = &at.origin.ranks;
    let unproven = scene.join.is_unproven(at.comm, at.instance, at.stall);
    let aborted = || ranks.iter().any(|r| scene.aborted(at.comm, *r));
    let patience = scene.settings.patience_silent_ns.max(scene.patience(at.comm));
    match ended(scene, at.comm, ranks) {
        Ended::InOrder if unproven => Proof::Nothing,
        // A job may abort its communicators when it is through with them.
        Ended::No if unproven && aborted() => {
            if scene.enough(at.waited, patience) {
                Proof::Likely
            } else {
                Proof::Nothing
            }
        }
        Ended::Unknown if unproven => {
            let gone_for = ranks.iter().filter_map(|r| scene.gone_for(at.comm, *r)).max();
            // Who ends in order soon has company.
            if gone_for.is_none_or(|g| g >= patience) { Proof::Likely } else { Proof::Nothing }
        }
        _ => Proof::Proven,
    }
}

/// A rank that has aborted another communicator is missing because of that.
pub(super) fn explain_by_abort(scene: &HangContext<'_>, at: StallSite<'_>, finding: &mut Finding) {
    let is_missing = matches!(
        finding.kind,
        Kind::MissingRank | Kind::MissingReplay | Kind::SendWithoutReceive | Kind::ReceiveWithoutSend
    );
    let aborted = |rank: &Rank| {
        let segment = at.comm.members().get(rank)?.record.segment;
        let of = |(comm, own): &(CommId, Rank)| {
            let member = scene.join.communicator(*comm)?.members().get(own)?;
            (member.record.making == Some(Making::Aborted)).then_some((*rank, *comm))
        };
        scene.join.memberships(segment).iter().find_map(of)
    };
    if let Some((rank, comm)) = at.origin.ranks.iter().find_map(aborted).filter(|_| is_missing) {
        finding.kind = Kind::AbortedRank;
        finding.evidence.push(fact(format!("rank {rank} aborted communicator {comm}")));
        finding.advice = format!(
            "find out why rank {rank} aborted communicator {comm}: an exception or a watchdog's timeout in its log; the others have to abort too"
        );
    }
}

/// The ranks that stopped short of an operation and wait for nothing, or for a rank that is in it: a call too many
/// shifts what that rank does elsewhere.
fn ranks_behind(scene: &HangContext<'_>, at: StallSite<'_>) -> Vec<Rank> {
    let one = at.stall.waiting.first().map(|(_, p)| *p);
    let waits_for_it = |p: u32| {
        let is_in = |side: &[(Rank, u32)], p: u32| side.iter().any(|(_, q)| *q == p);
        let mut stalls = (0..).map_while(|i| scene.standing.stall(i));
        stalls.any(|s| is_in(&s.waiting, p) && one.is_some_and(|one| is_in(&s.lacking, one)))
    };
    let is_root = |r: &Rank| at.origin.ranks.binary_search(r).is_ok();
    // Of large communicators only those are taken that wait for nothing.
    let may_wait = at.stall.lacking.len() <= RANKS_MAX;
    let behind = at.stall.lacking.iter().filter(|(r, p)| is_root(r) || may_wait && waits_for_it(*p));
    behind.map(|(r, _)| *r).collect()
}

/// The answer to whether a rank made one call more than the others.
#[derive(Debug)]
pub(super) enum OneMore {
    No,
    /// It looks so, and it is too early to say.
    Unclear,
    Yes(Box<Finding>),
}

/// One rank waits in an operation that all others stopped short of: it made one call more than they did. At the end of a
/// job they are gone; else they wait for it in something that is not seen, as the making of a communicator.
pub(super) fn one_call_more(scene: &HangContext<'_>, at: StallSite<'_>) -> OneMore {
    let order = at.stall.order;
    let [one] = at.waited.ranks.as_slice() else { return OneMore::No };
    let others = &ranks_behind(scene, at);
    let stopped_short =
        |r: &Rank| at.comm.members().get(r).and_then(|m| m.issued(at.stall.track)) == Some(order);
    let all = at.origin.ranks.len() >= MANY && others.len() + 1 == at.comm.expected();
    if matches!(at.stall.track, Track::Pair(..)) || !all || !others.iter().all(stopped_short) {
        return OneMore::No;
    }
    let ended = ended(scene, at.comm, others);
    let patience = match ended {
        Ended::InOrder => scene.settings.patience_gone_ns,
        Ended::Failed => return OneMore::No,
        Ended::Unknown | Ended::No => scene.patience(at.comm),
    };
    let lost = || others.iter().any(|r| scene.gone(at.comm, *r) || scene.aborted(at.comm, *r));
    // Where some live and some do not, those that are gone are what the others wait for.
    if ended == Ended::No && (order == 0 || lost()) {
        return OneMore::No;
    }
    let gone_for = others.iter().filter_map(|r| scene.gone_for(at.comm, *r)).min();
    if !scene.enough(at.waited, patience) || gone_for.is_some_and(|g| g < patience) {
        // All the others have ended: that they were missed would be said at once.
        return if ended == Ended::No { OneMore::No } else { OneMore::Unclear };
    }
    let Some(first) = at.instance.first() else { return OneMore::No };
    let mut evidence = scene.wait_evidence(at.waited);
    let rest = if ended == Ended::No { "all issued no more" } else { "ended after these" };
    evidence.push(number(
        format!("{} issued {order} operations and {rest}", names(others)),
        order as f64,
        "count",
    ));
    evidence.push(fact(format!("rank {one} alone issued one more")));
    if let Some(ago) = gone_for {
        let text = format!("their processes have been gone for {:.1} s", seconds(ago));
        evidence.push(number(text, seconds(ago), "s"));
    }
    evidence.extend(who(scene.join, at.comm, *one));
    let operation = at.comm.describe(at.stall.track, order, &first.op);
    OneMore::Yes(Box::new(Finding {
        evidence,
        cause: Some(Cause::Unknown),
        confidence: if ended == Ended::InOrder { Confidence::Proven } else { Confidence::Likely },
        advice: format!(
            "compare the code path of rank {one} with the others' after issue order {}: a loop that runs once more, more data, a branch on the rank",
            order.saturating_sub(1)
        ),
        ..Finding::new(Kind::ShiftedOrder, at.comm.id, vec![*one], operation)
    }))
}

#[cfg(test)]
mod tests {
    use crate::detect::{HangRule, Rule, Settings};
    use crate::join::Join;
    use crate::join::testing::{all_reduce, member, op, process};
    use crate::model::{
        CommId, Confidence, Exit, Finding, Func, HostFact, Kind, Lane, Liveness, Making, OpRecord,
        ProcessState, Rank, SegmentId, Timing, Untimed, Update,
    };

    const S: u64 = 1_000_000_000;

    /// Ends a rank's process at 10 s; `exit` says how, where somebody looked.
    fn end(j: &mut Join, rank: u32, exit: Option<Exit>) {
        let Update::Segment(mut record) = process(rank) else { unreachable!("a process") };
        record.liveness = Liveness::Gone(Some(10 * S));
        j.feed(Update::Segment(record));
        if exit.is_some() {
            let mut fact = HostFact::new(SegmentId(u64::from(rank) + 1), 10 * S);
            fact.state = Some(ProcessState::Gone(exit));
            j.feed(Update::Host(Box::new(fact)));
        }
    }

    /// Rank 0 sends to rank 1, untimed; both issued it, and rank 1 is gone.
    fn last_transfer(exit: Option<Exit>, now_ns: u64) -> Vec<Finding> {
        let mut j = Join::new();
        for r in 0..2 {
            j.feed(process(r));
            j.feed(member(r, 2, 0));
            let mut o = op(if r == 0 { Lane::Send(Rank(1)) } else { Lane::Recv(Rank(0)) }, 0);
            (o.segment, o.rank) = (SegmentId(u64::from(r) + 1), Rank(r));
            (o.issued_ns, o.timing) = (Some(9 * S), Timing::Not(Untimed::Budget));
            j.feed(Update::Op(Box::new(o)));
        }
        end(&mut j, 1, exit);
        j.tick(now_ns);
        HangRule::new(Settings::default()).check(&j, now_ns)
    }

    #[test]
    fn who_ends_after_its_last_untimed_operation_is_not_missing() {
        assert_eq!(last_transfer(Some(Exit::Code(0)), 60 * S), vec![]);
        assert_eq!(last_transfer(None, 11 * S), vec![], "the others may be on their way out");
        let of = |found: Vec<Finding>| found.iter().map(|f| (f.kind, f.confidence)).collect::<Vec<_>>();
        assert_eq!(of(last_transfer(None, 15 * S)), [(Kind::SendWithoutReceive, Confidence::Likely)]);
        let failed = last_transfer(Some(Exit::Signal(9)), 11 * S);
        assert_eq!(of(failed), [(Kind::SendWithoutReceive, Confidence::Proven)]);
    }

    #[test]
    fn hosts_that_run_ahead_do_not_hide_where_a_rank_that_is_gone_is_missed() {
        // All issued orders 1 to 5; only order 4 is timed. Ranks 0 and 1 go on, and rank 2 is killed.
        let at = |timed_started: bool| {
            let mut j = Join::new();
            for r in 0..3 {
                j.feed(process(r));
                j.feed(member(r, 3, if r == 2 { 6 } else { 7 }));
                j.feed(Update::Op(Box::new(all_reduce(r, 0, S, Some((S + 5_000, Some(S + 50_000)))))));
                for order in 1..if r == 2 { 6 } else { 7 } {
                    let started = timed_started && order == 4;
                    let kernel = started.then_some((2 * S + 5_000, Some(2 * S + 6_000)));
                    let mut op = all_reduce(r, order, 2 * S + order * 1_000, kernel);
                    if order != 4 {
                        op.timing = Timing::Not(Untimed::Budget);
                    }
                    j.feed(Update::Op(Box::new(op)));
                }
            }
            end(&mut j, 2, Some(Exit::Signal(9)));
            j.tick(11 * S);
            let found = HangRule::new(Settings::default()).check(&j, 11 * S);
            found.into_iter().map(|f| (f.kind, f.ranks, f.operation.order)).collect::<Vec<_>>()
        };
        assert_eq!(at(false), [(Kind::MissingRank, vec![Rank(2)], 4)], "no GPU came past order 4");
        assert_eq!(
            at(true),
            [(Kind::MissingRank, vec![Rank(2)], 6)],
            "nothing says that order 5 did not end"
        );
    }

    #[test]
    fn a_rank_that_aborted_is_missed_first_where_it_did() {
        // Rank 1 is missing in two communicators, first in the one that it did not abort.
        let mut j = Join::new();
        for r in 0..2 {
            j.feed(process(r));
            for (id, at) in [(7, 2 * S), (8, 3 * S)] {
                let issued = if r == 0 { 2 } else { 1 };
                let Update::Comm(mut record) = member(r, 2, issued) else { unreachable!("a member") };
                record.comm = CommId::unowned(id);
                record.making = (r == 1 && id == 8).then_some(Making::Aborted);
                j.feed(Update::Comm(record));
                let ops = [(0, S, Some(S + 50_000)), (1, at, None)];
                for (order, at, end) in ops.into_iter().take(issued as usize) {
                    let mut op = all_reduce(r, order, at, Some((at + 5_000, end)));
                    op.comm = CommId::unowned(id);
                    j.feed(Update::Op(Box::new(op)));
                }
            }
        }
        let [f] = HangRule::new(Settings::default()).check(&j, 3 * S + S / 4).try_into().expect("one");
        assert_eq!((f.kind, f.ranks, f.communicator), (Kind::AbortedRank, vec![Rank(1)], CommId::unowned(8)));
        assert_eq!(f.confidence, Confidence::Proven);
    }

    #[test]
    fn a_circle_through_a_rank_that_aborted_begins_there() {
        // Rank 0 waits for rank 1 in one communicator, and rank 1 for rank 0 in another, which rank 0 has aborted.
        let mut j = Join::new();
        for r in 0..2 {
            j.feed(process(r));
            j.feed(member(r, 2, if r == 0 { 2 } else { 1 }));
            j.feed(Update::Op(Box::new(all_reduce(r, 0, S, Some((S + 5_000, Some(S + 50_000)))))));
            let Update::Comm(mut record) = member(r, 2, if r == 1 { 2 } else { 1 }) else {
                unreachable!("a member")
            };
            record.comm = CommId::unowned(8);
            record.making = (r == 0).then_some(Making::Aborted);
            j.feed(Update::Comm(record));
            let mut op = all_reduce(r, 0, S, Some((S + 5_000, Some(S + 50_000))));
            op.comm = CommId::unowned(8);
            j.feed(Update::Op(Box::new(op)));
            let mut waits = all_reduce(r, 1, 2 * S, Some((2 * S + 5_000, None)));
            if r == 1 {
                waits.comm = CommId::unowned(8);
            }
            j.feed(Update::Op(Box::new(waits)));
        }
        let [f] = HangRule::new(Settings::default()).check(&j, 6 * S).try_into().expect("one");
        assert_eq!((f.kind, f.ranks, f.communicator), (Kind::AbortedRank, vec![Rank(0)], CommId::unowned(8)));
    }

    #[test]
    fn who_aborted_what_it_was_in_is_named_though_its_transfer_stands_still_too() {
        // Rank 1 issued two sends to rank 0, and then an operation with rank 2 whose communicator it aborts.
        let mut j = Join::new();
        (0..3).for_each(|r| j.feed(process(r)));
        let feed = |j: &mut Join, comm: u64, here: u32, mut op: OpRecord| {
            (op.comm, op.rank) = (CommId::unowned(comm), Rank(here));
            j.feed(Update::Op(Box::new(op)));
        };
        for (comm, here, r) in [(7, 0, 0), (7, 1, 1), (8, 0, 1), (8, 1, 2)] {
            let Update::Comm(mut record) = member(r, 2, if comm == 8 { 1 } else { 0 }) else {
                unreachable!("a member")
            };
            (record.comm, record.rank) = (CommId::unowned(comm), Rank(here));
            record.making = (comm == 8 && r == 1).then_some(Making::Aborted);
            j.feed(Update::Comm(record));
            if comm == 8 {
                let at = 2 * S + S / 2;
                feed(&mut j, comm, here, all_reduce(r, 0, at, Some((at + 5_000, None))));
                continue;
            }
            for order in 0..2 {
                let starts = (r == 0 && order == 0).then_some((2 * S + 5_000, None));
                let mut op = all_reduce(r, order, 2 * S + order, starts);
                (op.func, op.lane) = match here {
                    0 => (Func::Recv, Lane::Recv(Rank(1))),
                    _ => (Func::Send, Lane::Send(Rank(0))),
                };
                feed(&mut j, comm, here, op);
            }
        }
        let found = HangRule::new(Settings::default()).check(&j, 14 * S);
        let named: Vec<_> = found.iter().map(|f| (f.kind, f.communicator, f.ranks.clone())).collect();
        assert_eq!(named, [(Kind::AbortedRank, CommId::unowned(8), vec![Rank(0)])]);
    }

    #[test]
    fn who_aborted_elsewhere_is_missing_because_of_that() {
        let mut j = Join::new();
        for r in 0..3 {
            j.feed(process(r));
            j.feed(member(r, 3, if r == 2 { 1 } else { 2 }));
            j.feed(Update::Op(Box::new(all_reduce(r, 0, S, Some((S + 5_000, Some(S + 50_000)))))));
            if r < 2 {
                j.feed(Update::Op(Box::new(all_reduce(r, 1, 2 * S, Some((2 * S + 5_000, None))))));
            }
        }
        let kinds = |j: &Join| {
            let found = HangRule::new(Settings::default()).check(j, 6 * S);
            found.iter().map(|f| (f.kind, f.confidence)).collect::<Vec<_>>()
        };
        assert_eq!(kinds(&j), [(Kind::MissingRank, Confidence::Likely)]);
        let Update::Comm(mut record) = member(2, 3, 0) else { unreachable!("a member") };
        (record.comm, record.making) = (CommId::unowned(8), Some(Making::Aborted));
        j.feed(Update::Comm(record));
        assert_eq!(kinds(&j), [(Kind::AbortedRank, Confidence::Likely)]);
    }

    /// Four ranks finish three operations; rank 0 issues one more, and the others end.
    fn one_more(exit: Option<Exit>, now_ns: u64) -> Vec<Finding> {
        let mut j = Join::new();
        for r in 0..4 {
            j.feed(process(r));
            j.feed(member(r, 4, if r == 0 { 4 } else { 3 }));
            for o in 0..3 {
                let t = S + o * 1_000_000;
                j.feed(Update::Op(Box::new(all_reduce(r, o, t, Some((t + 5_000, Some(t + 50_000)))))));
            }
        }
        j.feed(Update::Op(Box::new(all_reduce(0, 3, 9 * S, Some((9 * S + 5_000, None))))));
        (1..4).for_each(|r| end(&mut j, r, exit));
        j.tick(now_ns);
        HangRule::new(Settings::default()).check(&j, now_ns)
    }

    #[test]
    fn one_that_waits_when_all_others_ended_in_order_made_one_call_more() {
        let of = |exit, now_ns| {
            let found = one_more(exit, now_ns);
            found.iter().map(|f| (f.kind, f.ranks.len(), f.confidence)).collect::<Vec<_>>()
        };
        let in_order = Some(Exit::Code(0));
        assert_eq!(of(in_order, 10 * S + S / 2), [(Kind::ShiftedOrder, 1, Confidence::Proven)]);
        assert_eq!(of(None, 10 * S + S / 2), [], "nobody says how they ended");
        assert_eq!(of(None, 14 * S), [(Kind::ShiftedOrder, 1, Confidence::Likely)]);
        let killed = Some(Exit::Signal(9));
        assert_eq!(of(killed, 10 * S + S / 2), [(Kind::MissingRank, 3, Confidence::Proven)]);
    }
}
