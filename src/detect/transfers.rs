//! `send-without-receive`, `receive-without-send`: one end of a transfer is issued and the other is not.
//!
//! Orders are counted a pair and a direction. A send that its GPU could finish alone, into NCCL's buffers, waits for
//! nobody and is no finding.

use super::hang_context::{HangContext, StallSite};
use super::{fact, missing_rank, names, who};
use crate::model::{Cause, Confidence, Finding, Kind, Rank, Track};

pub(super) fn judge(scene: &HangContext<'_>, at: StallSite<'_>) -> Option<Finding> {
    let Track::Pair(from, to) = at.stall.track else { return None };
    let s = scene.settings;
    let patience = match at.waited {
        w if w.on_gpu => scene.patience(at.comm),
        _ => s.patience_silent_ns.max(scene.patience(at.comm)),
    };
    let sent = at.waited.ranks.contains(&from);
    let peer = if sent { to } else { from };
    let is_gone = scene.gone(at.comm, peer) && !scene.join.all_gone();
    let gone = is_gone || scene.aborted(at.comm, peer);
    let settle = scene.settings.patience_gone_ns;
    let patience = match scene.is_first_of(at, peer) {
        true => s.patience_unsure_ns,
        false => patience,
    };
    let enough = match gone {
        true => scene.gone_for(at.comm, peer).is_none_or(|g| g >= settle) && scene.enough(at.waited, settle),
        false => scene.enough(at.waited, patience),
    };
    if !enough || !gone && scene.just_released(at, peer) {
        return None;
    }
    if !gone && scene.at_work(at, peer, patience) {
        return None;
    }
    let (kind, here, there, lacks) = if sent {
        (Kind::SendWithoutReceive, from, to, "receive")
    } else {
        (Kind::ReceiveWithoutSend, to, from, "send")
    };
    let mut evidence = scene.wait_evidence(at.waited);
    let order = at.stall.order;
    let issued = at.instance.parts.contains_key(&there);
    evidence.push(fact(if issued {
        format!("transfer {order} from rank {from} to rank {to}: rank {there} issued it and will not finish it")
    } else { format!(
        "transfer {order} from rank {from} to rank {to}: rank {there} issued {order} {lacks}s with rank {here} as its peer, and not this one"
    )}));
    let mut ranks: Vec<Rank> = vec![there];
    // Ends that wait for each other in a circle are equally wrong.
    let circle = at.origin.circle.iter().filter_map(|i| scene.standing.stall(*i));
    for stall in circle.filter(|s| *s != at.stall) {
        evidence.push(fact(format!(
            "at the same time transfer {} of {} waits for rank {}",
            stall.order,
            stall.track,
            stall.lacking.first()?.0
        )));
        // Two ranks may have several communicators, as stages of a pipeline have.
        let is_lacking = |process: u32| stall.lacking.iter().any(|(_, p)| *p == process);
        let ends = at.stall.waiting.iter().chain(&at.stall.lacking);
        ranks.extend(ends.filter(|(_, process)| is_lacking(*process)).map(|(r, _)| *r));
        if stall.comm == at.comm.id {
            ranks.extend(stall.lacking.iter().map(|(r, _)| *r));
        }
    }
    ranks.sort_unstable();
    ranks.dedup();
    if scene.gone(at.comm, there) {
        evidence.push(fact(format!("the process of rank {there} is gone")));
    }
    evidence.extend(who(scene.join, at.comm, there));
    let operation = at.comm.describe(at.stall.track, order, &at.instance.first()?.op);
    let stopped = scene.process(at.comm, there).filter(|p| p.is_stopped());
    Some(Finding {
        evidence,
        cause: stopped.map(|_| Cause::Stopped),
        advice: if let Some(p) = stopped {
            missing_rank::let_go_on(&[there], &[p])
        } else if at.origin.circle.is_empty() {
            format!(
                "look at why {} did not {lacks}: another peer, another count of messages, or a call that is never reached",
                names(&ranks)
            )
        } else {
            format!(
                "put the sends and receives of {} into one group, or let one side receive first",
                names(&ranks)
            )
        },
        confidence: if gone { Confidence::Proven } else { Confidence::Likely },
        ..Finding::new(kind, at.comm.id, ranks, operation)
    })
}

#[cfg(test)]
mod tests {
    use crate::detect::{HangRule, Rule, Settings};
    use crate::join::Join;
    use crate::join::testing::{all_reduce, member, process};
    use crate::model::{
        Beat, Begun, Cause, CommId, Exchange, Finding, Func, HostFact, Kind, Lane, Launch, OpRecord,
        PairBeat, ProcessState, Rank, SegmentId, Timing, Untimed, Update,
    };

    const S: u64 = 1_000_000_000;

    /// One end of transfer 0 from a rank to another, issued at 10 s; `kernel` as in [`all_reduce`].
    fn end(rank: u32, (from, to): (u32, u32), kernel: Option<(u64, Option<u64>)>) -> OpRecord {
        let mut op = all_reduce(rank, 0, 10 * S, kernel);
        (op.func, op.lane) = match rank == from {
            true => (Func::Send, Lane::Send(Rank(to))),
            false => (Func::Recv, Lane::Recv(Rank(from))),
        };
        op
    }

    fn found(ends: Vec<OpRecord>, now_ns: u64) -> Vec<Finding> {
        let mut j = Join::new();
        for r in 0..3 {
            let calls = ends.iter().filter(|op| op.rank == Rank(r) && op.lane == Lane::Collective).count();
            j.feed(process(r));
            j.feed(member(r, 3, 1 + calls as u64));
            j.feed(Update::Op(Box::new(all_reduce(r, 0, S, Some((S + 5_000, Some(S + 50_000)))))));
        }
        ends.into_iter().for_each(|op| j.feed(Update::Op(Box::new(op))));
        j.tick(now_ns);
        HangRule::new(Settings::default()).check(&j, now_ns)
    }

    #[test]
    fn a_transfer_that_both_ends_are_in_and_that_does_not_end_is_stuck() {
        let in_it = Some((10 * S + 5_000, None));
        let ends = || vec![end(0, (0, 1), in_it), end(1, (0, 1), in_it)];
        assert_eq!(found(ends(), 12 * S), vec![]);
        let [f] = found(ends(), 14 * S).try_into().expect("one");
        assert_eq!((f.kind, f.ranks), (Kind::StuckTransfer, vec![Rank(0), Rank(1)]));
    }

    #[test]
    fn nobody_waits_in_a_transfer_behind_one_that_has_not_started() {
        // Rank 1's GPU has not started its receive from rank 0; what it issued then waits for rank 2, untimed.
        let ends = |started: bool| {
            let kernel = started.then_some((10 * S + 5_000, Some(10 * S + 50_000)));
            let mut behind = end(1, (2, 1), None);
            (behind.issued_ns, behind.timing) = (Some(10 * S + 1), Timing::Not(Untimed::Budget));
            vec![end(0, (0, 1), kernel.or(Some((10 * S + 5_000, None)))), end(1, (0, 1), kernel), behind]
        };
        let told =
            |started| found(ends(started), 25 * S).into_iter().map(|f| (f.kind, f.ranks)).collect::<Vec<_>>();
        assert_eq!(told(false), [(Kind::NotStarted, vec![Rank(1)])]);
        assert_eq!(told(true), [(Kind::ReceiveWithoutSend, vec![Rank(2)])]);
    }

    #[test]
    fn a_receive_that_ended_by_its_stamps_without_its_send_waits() {
        // One launch of rank 1 holds a send and a receive, and NCCL tells when the send was through.
        let ended = Some((10 * S + 5_000, Some(10 * S + 50_000)));
        let told = |later: Option<(u64, Option<u64>)>, now_ns: u64| {
            let mut next = end(1, (0, 1), later);
            (next.ticket, next.order, next.issued_ns) = (next.ticket + 1, Some(1), Some(10 * S + 1_000_000));
            let found = found(vec![end(1, (0, 1), ended), next], now_ns);
            found.into_iter().map(|f| (f.kind, f.ranks, f.operation.order)).collect::<Vec<_>>()
        };
        assert_eq!(told(None, 14 * S), [(Kind::ReceiveWithoutSend, vec![Rank(0)], 0)]);
        assert_eq!(told(None, 12 * S), []);
        // A later receive cannot start before the first has ended: the send's record is lost.
        assert_eq!(told(Some((11 * S, None)), 14 * S), []);
    }

    #[test]
    fn a_send_that_ended_by_its_stamps_waits_where_its_gpu_starts_nothing_more() {
        let told = |next: Option<Option<(u64, Option<u64>)>>| {
            let ended = end(0, (0, 1), Some((10 * S + 5_000, Some(10 * S + 50_000))));
            let next = next.map(|kernel| {
                let op = end(0, (0, 1), kernel);
                OpRecord { ticket: op.ticket + 1, order: Some(1), issued_ns: Some(10 * S + 1_000), ..op }
            });
            let found = found([Some(ended), next].into_iter().flatten().collect(), 14 * S);
            found.into_iter().map(|f| (f.kind, f.ranks, f.operation.order)).collect::<Vec<_>>()
        };
        assert_eq!(told(None), [], "sends are often through before their receives");
        assert_eq!(told(Some(None)), [(Kind::SendWithoutReceive, vec![Rank(1)], 0)]);
        let in_it = Some((10 * S + 60_000, None));
        assert_eq!(told(Some(in_it)), [(Kind::SendWithoutReceive, vec![Rank(1)], 1)]);
    }

    #[test]
    fn a_rank_that_has_issued_nothing_yet_may_still_be_starting() {
        let told = |issued: u64, now_ns| {
            let mut j = Join::new();
            for r in 0..2 {
                j.feed(process(r));
                j.feed(member(r, 2, issued));
                (0..issued).for_each(|o| {
                    j.feed(Update::Op(Box::new(all_reduce(r, o, S, Some((S + 5_000, Some(S + 50_000)))))));
                });
            }
            j.feed(Update::Op(Box::new(end(0, (0, 1), Some((10 * S + 5_000, None))))));
            j.tick(now_ns);
            HangRule::new(Settings::default()).check(&j, now_ns).len()
        };
        assert_eq!((told(1, 14 * S), told(0, 14 * S), told(0, 41 * S)), (1, 0, 1));
    }

    #[test]
    fn of_two_that_wait_for_each_other_the_one_that_went_on_left_a_call_out() {
        // Each sends before it receives; rank 0 has issued its receive as well.
        let in_it = Some((10 * S + 5_000, None));
        let told = |more: &[OpRecord]| {
            let ends = [end(0, (0, 1), in_it), end(1, (1, 0), in_it), end(0, (1, 0), None)];
            let found = found(ends.into_iter().chain(more.iter().cloned()).collect(), 14 * S);
            found.into_iter().map(|f| (f.kind, f.ranks)).collect::<Vec<_>>()
        };
        let both = vec![Rank(0), Rank(1)];
        assert_eq!(told(&[]), [(Kind::SendWithoutReceive, both)], "of two nobody knows who is wrong");
        let later = |rank| {
            let op = end(rank, (1, 2), Some((11 * S + 5_000, Some(11 * S + 50_000))));
            OpRecord { issued_ns: Some(11 * S), ..op }
        };
        assert_eq!(told(&[1, 2].map(later)), [(Kind::SendWithoutReceive, vec![Rank(1)])]);
    }

    #[test]
    fn an_end_by_its_stamps_waits_where_the_other_end_has_not_started() {
        let ended = Some((10 * S + 5_000, Some(10 * S + 50_000)));
        let told = |now_ns| {
            let found = found(vec![end(0, (0, 1), None), end(1, (0, 1), ended)], now_ns);
            found.into_iter().map(|f| (f.kind, f.ranks)).collect::<Vec<_>>()
        };
        assert_eq!(told(11 * S), []);
        assert_eq!(told(14 * S), [(Kind::NotStarted, vec![Rank(0)])]);
    }

    #[test]
    fn an_end_whose_stamps_were_lost_is_over_where_its_gpu_goes_on_elsewhere() {
        let ended = Some((10 * S + 5_000, Some(10 * S + 50_000)));
        let told = |later_s: u64| {
            let mut j = Join::new();
            const OTHER: CommId = CommId::unowned(8);
            let started_ns = (10 + later_s) * S;
            for r in 0..2 {
                j.feed(process(r));
                j.feed(member(r, 2, 1));
                let Update::Comm(mut other) = member(r, 2, 1) else { unreachable!("a member") };
                other.comm = OTHER;
                j.feed(Update::Comm(other));
                j.feed(Update::Op(Box::new(all_reduce(r, 0, S, Some((S + 5_000, Some(S + 50_000)))))));
                j.feed(Update::Op(Box::new(end(r, (0, 1), ended.filter(|_| r == 1)))));
                let kernel = Some((started_ns, Some(started_ns + 50_000)));
                let op = all_reduce(r, 0, 10 * S + 10_000, kernel);
                j.feed(Update::Op(Box::new(OpRecord { comm: OTHER, ..op })));
            }
            j.tick(17 * S);
            let found = HangRule::new(Settings::default()).check(&j, 17 * S);
            found.into_iter().map(|f| (f.kind, f.ranks)).collect::<Vec<_>>()
        };
        assert_eq!(told(1), [(Kind::NotStarted, vec![Rank(0)])], "its GPU stands still since");
        assert_eq!(told(3), []);
    }

    #[test]
    fn what_waits_in_one_transfer_of_a_launch_waits_in_all_of_it() {
        // Rank 1's launch receives from rank 0, whose GPU has not started it, and sends to rank 2, which has it.
        let in_it = Some((10 * S + 5_000, None));
        let of_launch = |op: OpRecord| OpRecord { plan: Some(7), ..op };
        let told = |started: bool| {
            let ends = vec![
                end(0, (0, 1), in_it.filter(|_| started)),
                of_launch(end(1, (0, 1), in_it)),
                of_launch(end(1, (1, 2), in_it)),
                end(2, (1, 2), Some((10 * S + 5_000, Some(10 * S + 50_000)))),
            ];
            found(ends, 25 * S).into_iter().map(|f| (f.kind, f.ranks)).collect::<Vec<_>>()
        };
        assert_eq!(told(false), [(Kind::NotStarted, vec![Rank(0)])]);
        assert_eq!(told(true), [(Kind::StuckTransfer, vec![Rank(0), Rank(1)])]);
    }

    #[test]
    fn a_send_that_seems_over_holds_its_rank_before_what_its_gpu_does_not_start() {
        // Ranks 0 and 1 sent to each other in launches. Then rank 1's launch also sends to rank 2, which goes on to the
        // collective without receiving. NCCL reported the end of the whole launch of rank 1 when its receive had ended.
        let ended = Some((10 * S + 5_000, Some(10 * S + 50_000)));
        let of_launch = |op: OpRecord| OpRecord { plan: Some(7), ..op };
        let call = |rank: u32, kernel| all_reduce(rank, 1, 10 * S + 9_000, kernel);
        let in_it = Some((10 * S + 60_000, None));
        let told = |receives: bool| {
            let mut ends = vec![
                end(0, (0, 1), ended),
                of_launch(end(1, (0, 1), ended)),
                of_launch(end(1, (1, 2), ended)),
                call(0, in_it),
                call(1, None),
                call(2, in_it),
            ];
            ends.extend(receives.then(|| end(2, (1, 2), ended)));
            found(ends, 14 * S).into_iter().map(|f| (f.kind, f.ranks)).collect::<Vec<_>>()
        };
        assert_eq!(told(false), [(Kind::InterleavedCommunicators, vec![Rank(1), Rank(2)])]);
        assert_eq!(told(true), [(Kind::NotStarted, vec![Rank(1)])]);
    }

    #[test]
    fn a_transfer_that_was_issued_before_a_wrong_call_is_not_behind_it() {
        // Rank 1 receives from rank 0, which sends nothing. Ranks 1 and 2 disagree about the next collective.
        let told = |called_ns: u64| {
            let wrong = OpRecord { func: Func::AllGather, ..all_reduce(2, 1, called_ns, None) };
            let ends =
                vec![end(1, (0, 1), Some((10 * S + 5_000, None))), all_reduce(1, 1, called_ns, None), wrong];
            found(ends, 20 * S).into_iter().map(|f| (f.kind, f.ranks)).collect::<Vec<_>>()
        };
        assert_eq!(told(16 * S), [(Kind::ReceiveWithoutSend, vec![Rank(0)])]);
        assert_eq!(told(9 * S), [], "the wrong call explains all that comes after it");
    }

    #[test]
    fn a_receive_that_is_open_because_of_its_launch_hides_no_later_one() {
        // Rank 1's launch has received from rank 0 and waits for rank 2. Rank 0 is in the next send to rank 1.
        let of_launch = |op: OpRecord, plan, order| OpRecord {
            plan: Some(plan),
            order: Some(order),
            ticket: order,
            issued_ns: Some(10 * S + order),
            ..op
        };
        let in_it = Some((10 * S + 5_000, None));
        let ends = vec![
            of_launch(end(0, (0, 1), Some((10 * S + 5_000, Some(10 * S + 50_000)))), 7, 0),
            of_launch(end(0, (0, 1), Some((10 * S + 60_000, None))), 8, 1),
            of_launch(end(1, (0, 1), in_it), 7, 0),
            of_launch(end(1, (2, 1), in_it), 7, 0),
            of_launch(end(1, (0, 1), None), 8, 1),
        ];
        let [f] = found(ends, 25 * S).try_into().expect("one");
        assert_eq!((f.kind, f.ranks), (Kind::ReceiveWithoutSend, vec![Rank(2)]));
        let victims: Vec<_> = f.victims.iter().map(|v| (v.order, v.ranks.clone())).collect();
        assert!(victims.contains(&(1, vec![Rank(0)])), "{victims:?}");
    }

    #[test]
    fn who_is_behind_a_rank_that_waits_waits_as_well_though_nothing_is_timed() {
        // Rank 1 is in a call that it makes alone. Rank 0 sends to it, and then to rank 2, which calls the same afterwards.
        let untimed = |op: OpRecord, issued_ns: u64| OpRecord {
            issued_ns: Some(issued_ns),
            timing: Timing::Not(Untimed::Budget),
            ..op
        };
        let call = |rank: u32, kernel| all_reduce(rank, 1, 10 * S + 9_000, kernel);
        let told = |sends_to_1: bool| {
            let first = sends_to_1.then(|| untimed(end(0, (0, 1), None), 10 * S + 1_000));
            let mut ends = vec![
                untimed(end(0, (0, 2), None), 10 * S + 2_000),
                untimed(end(2, (0, 2), None), 10 * S + 2_000),
                call(0, None),
                call(1, Some((10 * S + 20_000, None))),
                call(2, None),
            ];
            ends.extend(first);
            let found = found(ends, 25 * S);
            found.into_iter().map(|f| (f.kind, f.ranks)).collect::<Vec<_>>()
        };
        assert_eq!(told(true), [(Kind::InterleavedCommunicators, vec![Rank(1)])]);
        assert_eq!(told(false), [(Kind::NotStarted, vec![Rank(0), Rank(2)])]);
    }

    #[test]
    fn a_stopped_peer_is_named_so() {
        let mut j = Join::new();
        for r in 0..2 {
            j.feed(process(r));
            j.feed(member(r, 2, 1));
        }
        // Its host issued the receive, which its network threads will not finish.
        for op in [end(0, (0, 1), Some((10 * S + 5_000, None))), end(1, (0, 1), Some((10 * S + 5_000, None)))]
        {
            j.feed(Update::Op(Box::new(op)));
        }
        let mut fact = HostFact::new(SegmentId(2), 10 * S);
        fact.state = Some(ProcessState::Stopped { traced: false });
        j.feed(Update::Host(Box::new(fact)));
        j.tick(14 * S);
        let [f] = HangRule::new(Settings::default()).check(&j, 14 * S).try_into().expect("one");
        assert_eq!((f.kind, f.ranks), (Kind::SendWithoutReceive, vec![Rank(1)]));
        assert_eq!(f.cause, Some(Cause::Stopped));
        assert!(f.advice.contains("SIGCONT"), "{}", f.advice);
    }

    #[test]
    fn an_agent_says_that_what_was_in_flight_is_not_finished() {
        // Transfer 0 from rank 0 to rank 1, both of which are in it; `done` is what the agents say of it since then.
        let by_beats_at =
            |done: Option<u64>, may_run: bool, begun: Option<Begun>, started: bool, at_ns: u64| {
                let mut j = Join::new();
                for r in 0..2 {
                    let Update::Segment(segment) = process(r) else { unreachable!("a process") };
                    let (segment, comm) = (segment.id, end(r, (0, 1), None).comm);
                    j.feed(process(r));
                    j.feed(member(r, 2, 1));
                    j.feed(Update::Beat(Beat {
                        segment,
                        comm,
                        rank: Rank(r),
                        issued: 1,
                        replayed: 0,
                        done: 1,
                        replays_done: 0,
                        exchanged: Exchange::default(),
                        begun: begun.filter(|_| r == 1),
                    }));
                    let kernel = (started && (!may_run || r == 0)).then_some((10 * S + 5_000, None));
                    j.tick(at_ns);
                    j.feed(Update::Op(Box::new(end(r, (0, 1), kernel))));
                    let (sent, received) = if r == 0 { (1, 0) } else { (0, 1) };
                    j.feed(Update::Pair(PairBeat {
                        segment,
                        comm,
                        rank: Rank(r),
                        peer: Rank(1 - r),
                        sent,
                        received,
                        from: 0,
                        sent_done: done.filter(|_| r == 0),
                        received_done: done.filter(|_| r == 1).map(|n| if may_run { 0 } else { n }),
                        sent_may_run: may_run && r == 0,
                        received_may_run: false,
                        sent_is_newest: false,
                    }));
                }
                j.tick(15 * S);
                let found = HangRule::new(Settings::default()).check(&j, 15 * S);
                found.into_iter().map(|f| f.kind).collect::<Vec<_>>()
            };
        let by_beats_of = |done, may_run, begun| by_beats_at(done, may_run, begun, true, 12 * S);
        let by_beats = |done, may_run| by_beats_at(done, may_run, None, true, 0);
        assert_eq!(by_beats(Some(0), false), [Kind::StuckTransfer]);
        assert_eq!(by_beats(Some(1), false), []);
        assert_eq!(by_beats(None, false), [], "older agents do not say");
        // It ended by its stamps, and nothing started since; the other end's GPU has not started it.
        assert_eq!(by_beats(Some(1), true), [Kind::NotStarted]);
        // No stamp says when it started.
        assert_eq!(by_beats_at(Some(1), true, None, false, 0), [Kind::NotStarted]);
        assert_eq!(
            by_beats_at(Some(1), true, None, false, 14 * S),
            [],
            "its agent reported progress a second ago"
        );
        let begun = |issued_ns| Some(Begun { issued_ns, host_ns: issued_ns, launch: Launch::numbered(None) });
        assert_eq!(by_beats_of(Some(1), true, begun(9 * S)), [Kind::NotStarted], "an earlier one");
        assert_eq!(by_beats_of(Some(1), true, begun(11 * S)), [], "its stamps were lost");
    }

    #[test]
    fn who_waits_for_a_rank_in_a_stuck_transfer_is_held_up_by_that() {
        // Rank 2 is in a transfer to rank 1, whose GPU is still in the one from rank 0.
        let in_it = Some((10 * S + 5_000, None));
        let ends =
            vec![end(0, (0, 1), in_it), end(1, (0, 1), in_it), end(2, (2, 1), in_it), end(1, (2, 1), None)];
        let [f] = found(ends, 14 * S).try_into().expect("one");
        assert_eq!((f.kind, f.ranks), (Kind::StuckTransfer, vec![Rank(0), Rank(1)]));
        assert_eq!(f.victims.iter().map(|v| v.ranks.clone()).collect::<Vec<_>>()[1], [Rank(2)]);
    }

    #[test]
    fn a_gpu_that_does_not_start_its_end_is_named() {
        let ends = vec![end(0, (0, 1), Some((10 * S + 5_000, None))), end(1, (0, 1), None)];
        let [f] = found(ends, 14 * S).try_into().expect("one");
        assert_eq!((f.kind, f.ranks), (Kind::NotStarted, vec![Rank(1)]));
    }

    #[test]
    fn a_peer_that_is_at_work_is_behind_a_host_that_runs_ahead() {
        let ahead = |peer_issues_ns: Option<u64>| {
            let mut send = end(0, (0, 1), None);
            send.timing = Timing::Not(Untimed::Budget);
            let other = peer_issues_ns.map(|t| {
                let mut op = end(1, (1, 2), None);
                (op.issued_ns, op.timing) = (Some(t), Timing::Not(Untimed::Budget));
                op
            });
            found(std::iter::once(send).chain(other).collect(), 15 * S)
        };
        let kinds = |found: Vec<Finding>| found.iter().map(|f| f.kind).collect::<Vec<_>>();
        assert_eq!(kinds(ahead(None)), [Kind::SendWithoutReceive]);
        assert_eq!(kinds(ahead(Some(14 * S))), []);
    }
}
