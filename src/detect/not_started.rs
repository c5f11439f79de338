//! `not-started`: all ranks issued an operation, and on some of them it does not start.
//!
//! The others wait on their GPUs.

use super::hang_context::{HangContext, StallSite};
use super::held_by_gpu::{self, open_parts};
use super::stuck_transfer::REPORTED_LATE_NS;
use super::{fact, names, number, seconds, standstill, victims, who};
use crate::join::{Activity, Part, Stall, WaitingFor};
use crate::model::{CommId, Confidence, Evidence, Finding, Kind, Rank, Track};

/// Ranks of which the GPUs are looked at.
const FEW: usize = 64;

/// All ranks issued it and it started nowhere; what lies before it was left out of GPU times. Something of that is not
/// done, and nobody saw what.
fn behind_untimed(scene: &HangContext<'_>, at: StallSite<'_>) -> Option<Finding> {
    let first = at.comm.incomplete_of(at.stall.track).next().map_or(at.stall.order, |(o, _)| o);
    // Hosts that run ahead issue minutes of work; what is not timed takes its time as well.
    let rhythm = scene.join.rhythm(at.comm)?;
    let queue_ns = rhythm.step_ns.max(rhythm.pace_ns).saturating_mul(at.stall.order - first);
    let patience = scene.settings.patience_blind_ns.max(scene.patience(at.comm));
    let patience = patience.max(rhythm.longest_ns.saturating_mul(2)).max(queue_ns.saturating_mul(3));
    let waited = at.waited.for_ns.filter(|w| *w >= patience && at.stall.order > 0)?;
    let ranks = at.waited.ranks.clone();
    // All GPUs still compute earlier work, so that nobody waits yet.
    let computes = |r: &Rank| scene.activity(at.comm, *r) == Some(Activity::Computing);
    if waited < scene.settings.patience_most_ns && ranks.iter().all(computes) {
        return None;
    }
    let order = at.stall.order;
    let evidence = vec![
        number(
            format!("{} issued it, and for {:.1} s no GPU has started it", names(&ranks), seconds(waited)),
            seconds(waited),
            "s",
        ),
        number(
            format!(
                "operations {first} to {} before it were issued by all and left out of GPU times by the overhead budget: one of them has not started on some rank, or does not end",
                order - 1
            ),
            (order - first) as f64,
            "count",
        ),
        fact("no later operation was seen to start, in this communicator or behind it"),
    ];
    let operation = at.comm.describe(at.stall.track, order, &at.instance.first()?.op);
    Some(Finding {
        evidence,
        advice: "look at what occupies the GPUs (nvidia-smi: utilisation at 100 % with little power is NCCL waiting), at kernels before it on the same streams, and at links; with RINGWATCH_OVERHEAD_BUDGET raised the rank would be known".to_owned(),
        confidence: Confidence::Likely,
        ..Finding::new(Kind::NotStarted, at.comm.id, ranks, operation)
    })
}

/// True where roots or leaves are through with a rooted operation that all issued, and what the others' GPUs do is told.
fn rooted_and_known(scene: &HangContext<'_>, at: StallSite<'_>) -> bool {
    let timed = |r: &Rank| {
        let part = at.instance.parts.get(r);
        part.is_some_and(|p| !p.is_silent() && !scene.gone(at.comm, *r) && !scene.aborted(at.comm, *r))
    };
    at.instance.first().is_some_and(|p| p.op.func.is_rooted())
        && !at.origin.ranks.is_empty()
        && at.origin.ranks.iter().all(timed)
}

/// The ranks that wait behind a rooted operation that all but the culprits are through with.
fn through_with_it(at: StallSite<'_>) -> Vec<Evidence> {
    let waited = seconds(at.waited.at_least_ns);
    vec![
        fact("all other ranks are through with it, as roots and leaves of such an operation may be"),
        number(
            format!("{} waited {waited:.1} s in what comes after it", names(&at.waited.ranks)),
            waited,
            "s",
        ),
    ]
}

/// True when a rank's process issued an operation before this one, in another track, of which nobody knows whether it is
/// finished. Those before it in its own track are: other ranks came past them.
fn may_be_elsewhere(scene: &HangContext<'_>, at: StallSite<'_>, rank: Rank) -> bool {
    let issued_ns = at.instance.parts.get(&rank).and_then(|p| p.op.issued_ns);
    let own = (at.comm.id, at.stall.track);
    let in_doubt =
        |(place, p): ((CommId, Track), &Part)| place != own && p.is_silent() && p.op.issued_ns < issued_ns;
    issued_ns.is_some() && open_parts(scene, at, rank).any(in_doubt)
}

/// True when another operation of the same processes stands still since before this one, and lacks ranks.
fn is_held_up(scene: &HangContext<'_>, at: StallSite<'_>) -> bool {
    let others = scene.standing.origins().iter().filter_map(|o| scene.standing.stall(o.first));
    let earlier = |s: &&Stall| {
        let waited = scene.join.waited(s, scene.now_ns);
        s.lack == WaitingFor::Issue
            && waited.is_some_and(|w| w.since_ns < at.waited.since_ns)
            && !s.waiting.iter().all(|w| is_queued_behind(scene, at, s, *w))
    };
    let mut earlier = others.filter(earlier).peekable();
    earlier.peek().is_some() && {
        let comms = victims::connected(scene.join, at.comm.id);
        earlier.any(|s| comms.contains(&s.comm))
    }
}

/// True where a rank of another operation has issued it after this one, which its GPU does not start: it does not wait there.
fn is_queued_behind(
    scene: &HangContext<'_>,
    at: StallSite<'_>,
    other: &Stall,
    (rank, process): (Rank, u32),
) -> bool {
    let own = at.stall.lacking.iter().find(|(_, p)| *p == process);
    let own_ns = own.and_then(|(r, _)| at.instance.parts.get(r)?.op.issued_ns);
    let comm = scene.join.communicator(other.comm);
    let part = comm.and_then(|c| c.instance(other.track, other.order)?.parts.get(&rank));
    own_ns.zip(part.and_then(|p| p.op.issued_ns)).is_some_and(|(own, later)| own < later)
}

/// True where the GPUs of the ranks wait in a kernel, most likely in an operation that is not timed, and something else of
/// the job is the likelier place where it stands still: one whose ranks compute or are idle, or the first one.
fn waits_elsewhere(scene: &HangContext<'_>, at: StallSite<'_>) -> bool {
    let waits = |s: &Stall| {
        let comm = scene.join.communicator(s.comm)?;
        let since_ns = scene.join.waited(s, scene.now_ns)?.since_ns;
        let activity = |(r, _): &(Rank, u32)| held_by_gpu::busy_with(scene, comm, *r, since_ns);
        let mut few = s.lacking.iter().take(FEW);
        Some((few.all(|l| activity(l) == Some(Activity::Waiting)), since_ns, s.comm))
    };
    let Some((true, since_ns, comm)) = waits(at.stall) else { return false };
    if !scene.enough(at.waited, scene.settings.patience_blind_ns) {
        return true;
    }
    let others = scene.standing.origins().iter().filter_map(|o| scene.standing.stall(o.first));
    let likelier = |s: &&Stall| {
        s.lack == WaitingFor::Start
            && waits(s).is_some_and(|(waits, since, id)| !waits || (since, id) < (since_ns, comm))
    };
    let mut likelier = others.filter(likelier).peekable();
    likelier.peek().is_some() && {
        let comms = victims::connected(scene.join, comm);
        likelier.any(|s| comms.contains(&s.comm))
    }
}

/// The ranks that do not start it, without those whose GPUs wait in a kernel while others' compute: a stamp of theirs is lost, or
/// they are in another operation. Absent while the next reading of a GPU is awaited.
fn that_may_not_start(scene: &HangContext<'_>, at: StallSite<'_>) -> Option<Vec<Rank>> {
    let ranks = &at.origin.ranks;
    if !(2..=FEW).contains(&ranks.len()) {
        return Some(ranks.clone());
    }
    if ranks.iter().any(|r| held_by_gpu::awaits_reading(scene, at, *r)) {
        return None;
    }
    let of = |r: &Rank| (*r, held_by_gpu::busy_with(scene, at.comm, *r, at.waited.since_ns));
    let activities: Vec<(Rank, Option<Activity>)> = ranks.iter().map(of).collect();
    let any_computes = activities.iter().any(|(_, a)| *a == Some(Activity::Computing));
    let is_held = |a: Option<Activity>| !any_computes || a != Some(Activity::Waiting);
    Some(activities.into_iter().filter(|(_, a)| is_held(*a)).map(|(r, _)| r).collect())
}

pub(super) fn judge<'p, 'a: 'p>(scene: &HangContext<'a>, at: StallSite<'p>) -> Option<Finding> {
    let nowhere = at.comm.started_nowhere(at.stall.track, at.stall.order, at.instance);
    if at.stall.waiting.is_empty() && nowhere {
        let untimed = at.instance.parts.values().all(crate::join::Part::is_silent);
        return if untimed { standstill::judge(scene, at) } else { behind_untimed(scene, at) };
    }
    // Ranks that are through with a rooted operation wait for nobody in it; what they began since then may wait.
    if at.stall.waiting.is_empty() && !rooted_and_known(scene, at) {
        return None;
    }
    // How long black boxes waited has to be known, as far as they wrote something down later: a job that is ended
    // always ends in some operation.
    let patience = match at.stall.order {
        _ if scene.is_slow_start(at) => scene.settings.patience_unsure_ns,
        // Connections may be made while kernels run.
        0 if !matches!(at.stall.track, Track::Pair(..)) => scene.settings.patience_blind_ns,
        _ => scene.patience(at.comm),
    };
    if at.waited.at_least_ns < patience || at.waited.ranks.is_empty() {
        return None;
    }
    let ranks = &that_may_not_start(scene, at)?;
    // It may have come to it a moment ago only.
    let waits_for = |rank: &Rank| {
        let issued = at.instance.parts.get(rank).and_then(|p| p.op.issued_ns);
        let free = scene.process(at.comm, *rank).and_then(|p| p.busy.released_ns());
        scene.now_ns.saturating_sub(issued.max(free).unwrap_or(0))
    };
    if ranks.iter().all(|r| waits_for(r) < scene.patience(at.comm)) {
        return None;
    }
    // Ranks that a stopped process has held are on their way once it goes on: NCCL may have reported their ends before.
    let runs = at.waited.for_ns.is_some();
    if runs && at.comm.members().keys().take(FEW).any(|r| scene.just_released(at, *r)) {
        return None;
    }
    let doubtful = ranks.iter().any(|r| may_be_elsewhere(scene, at, *r));
    let by_beats = at.comm.members().values().any(|m| m.is_counted_by_beats());
    let patience_by_beats = scene.patience(at.comm).saturating_add(REPORTED_LATE_NS);
    if by_beats && at.waited.at_least_ns < patience_by_beats {
        return None;
    }
    // Hosts issue ahead. Where no start is known, a rank waits since its agent last reported progress.
    let progressed = |rank: &Rank| {
        let at_ns = at.comm.members().get(rank).and_then(|m| m.progress_ns());
        at_ns.is_some_and(|t| scene.now_ns < t.saturating_add(patience_by_beats))
    };
    if by_beats && at.waited.is_by_hosts() && at.waited.ranks.iter().all(progressed) {
        return None;
    }
    let soon = at.waited.at_least_ns < scene.settings.patience_silent_ns.max(scene.patience(at.comm));
    if doubtful && (soon || is_held_up(scene, at) || waits_elsewhere(scene, at)) {
        return None;
    }
    let mut evidence =
        if at.stall.waiting.is_empty() { through_with_it(at) } else { scene.wait_evidence(at.waited) };
    for rank in ranks.iter().take(8) {
        let issued = at.instance.parts.get(rank)?.op.issued_ns?;
        let ago = seconds(scene.now_ns.saturating_sub(issued));
        evidence.push(number(
            format!("rank {rank} issued it {ago:.1} s ago, and its GPU has not started it"),
            ago,
            "s",
        ));
        evidence.extend(who(scene.join, at.comm, *rank));
    }
    evidence.push(fact(if doubtful {
        "no other operation of NCCL's is known to run on that GPU; GPU times do not cover all of them"
    } else {
        "no other operation of NCCL's is running on that GPU"
    }));
    let operation = at.comm.describe(at.stall.track, at.stall.order, &at.instance.first()?.op);
    Some(Finding {
        evidence,
        advice: format!(
            "look at what occupies the GPU of {}: a kernel that does not end, work before it on the same stream, an event that is never recorded, another process on that GPU (nvidia-smi)",
            names(ranks)
        ),
        confidence: Confidence::Likely,
        ..Finding::new(Kind::NotStarted, at.comm.id, ranks.clone(), operation)
    })
}

#[cfg(test)]
mod tests {
    use crate::detect::{HangRule, Rule, Settings};
    use crate::join::Join;
    use crate::join::testing::{all_reduce, gpu_reading, member, process};
    use crate::model::{CommId, Finding, Func, Kind, Lane, Liveness, Rank, Timing, Untimed, Update};

    const S: u64 = 1_000_000_000;

    /// Two ranks in their second operation, which rank 1's GPU does not start; `also` is fed last.
    fn job(gone: bool, also: Vec<Update>) -> Vec<Finding> {
        let mut j = Join::new();
        for r in 0..2 {
            let Update::Segment(mut record) = process(r) else { unreachable!("a process") };
            if gone {
                record.liveness = Liveness::Gone(None);
            }
            j.feed(Update::Segment(record));
            j.feed(member(r, 2, 2));
            j.feed(Update::Op(Box::new(all_reduce(r, 0, S, Some((S + 5_000, Some(S + 50_000)))))));
            let kernel = (r == 0).then_some((10 * S + 5_000, None));
            j.feed(Update::Op(Box::new(all_reduce(r, 1, 10 * S, kernel))));
        }
        also.into_iter().for_each(|u| j.feed(u));
        HangRule::new(Settings::default()).check(&j, 14 * S)
    }

    /// Operations of rank 0 in another communicator at some moment.
    fn elsewhere(at: u64) -> Vec<Update> {
        let Update::Comm(mut record) = member(0, 1, 1) else { unreachable!("a member") };
        record.comm = CommId::unowned(8);
        let mut op = all_reduce(0, 0, at, None);
        op.comm = CommId::unowned(8);
        op.timing = Timing::Not(Untimed::Budget);
        vec![Update::Comm(record), Update::Op(Box::new(op))]
    }

    #[test]
    fn a_gpu_that_does_not_start_what_all_issued_is_named() {
        let found = job(false, Vec::new());
        assert_eq!((found.len(), found[0].kind, &found[0].ranks), (1, Kind::NotStarted, &vec![Rank(1)]));
    }

    #[test]
    fn black_boxes_say_how_long_at_least() {
        assert_eq!(job(true, Vec::new()), vec![], "it may have been ended in the middle of it");
        assert_eq!(job(true, elsewhere(11 * S)), vec![], "a second is not enough");
        let found = job(true, elsewhere(13 * S + 500_000_000));
        assert_eq!((found.len(), found[0].kind), (1, Kind::NotStarted));
    }

    #[test]
    fn what_is_queued_behind_operations_in_bursts_takes_its_time() {
        // Bursts of three operations, a second apart, of which the first ten are timed; the last of 40 is to be timed as well.
        let found = |now_ns| {
            let mut j = Join::new();
            for r in 0..2 {
                j.feed(process(r));
                j.feed(member(r, 2, 40));
                for o in 0..40 {
                    let t = (1 + o / 3) * S + o % 3 * 1_000_000;
                    let mut op = all_reduce(r, o, S + o, (o < 10).then_some((t + 5_000, Some(t + 50_000))));
                    if (10..39).contains(&o) {
                        op.timing = Timing::Not(Untimed::Budget);
                    }
                    j.feed(Update::Op(Box::new(op)));
                }
            }
            j.tick(now_ns);
            HangRule::new(Settings::default())
                .check(&j, now_ns)
                .into_iter()
                .map(|f| f.kind)
                .collect::<Vec<_>>()
        };
        assert_eq!(found(16 * S), [], "its turn comes at 14 s");
        assert_eq!(found(60 * S), [Kind::NotStarted]);
    }

    #[test]
    fn what_was_issued_later_holds_nobody() {
        // Rank 1's GPU starts neither operation of one communicator, and waits in one of another that its host issued later.
        const OTHER: CommId = CommId::unowned(8);
        let mut j = Join::new();
        for r in 0..2 {
            j.feed(process(r));
            j.feed(member(r, 2, 3));
            let Update::Comm(mut other) = member(r, 2, 1) else { unreachable!("a member") };
            other.comm = OTHER;
            j.feed(Update::Comm(other));
            j.feed(Update::Op(Box::new(all_reduce(r, 0, S, Some((S + 5_000, Some(S + 50_000)))))));
            let kernel = (r == 0).then_some((10 * S + 5_000, None));
            j.feed(Update::Op(Box::new(all_reduce(r, 1, 10 * S, kernel))));
            j.feed(Update::Op(Box::new(all_reduce(r, 2, 10 * S + 1_000, None))));
            let kernel = (r == 1).then_some((10 * S + 9_000, None));
            let mut op = all_reduce(r, 0, 10 * S + 2_000, kernel);
            op.comm = OTHER;
            j.feed(Update::Op(Box::new(op)));
        }
        j.tick(20 * S);
        let found = HangRule::new(Settings::default()).check(&j, 20 * S);
        let found: Vec<_> = found.into_iter().map(|f| (f.kind, f.ranks, f.operation.order)).collect();
        assert_eq!(found, [(Kind::NotStarted, vec![Rank(1)], 1)]);
    }

    #[test]
    fn of_several_that_do_not_start_it_those_whose_gpus_wait_have_lost_a_stamp() {
        // Ranks 1 and 2 were not seen to start what rank 0 waits in; rank 1's GPU computes.
        let found = |third: (f64, f64), read_s: u64| {
            let mut j = Join::new();
            for r in 0..3u32 {
                let gpu = format!("0000:{r:02x}:00.0");
                j.feed(process(r));
                let Update::Comm(mut record) = member(r, 3, 2) else { unreachable!("a member") };
                record.gpu = Some(gpu.clone().into());
                j.feed(Update::Comm(record));
                j.feed(Update::Op(Box::new(all_reduce(r, 0, S, Some((S + 5_000, Some(S + 50_000)))))));
                let kernel = (r == 0).then_some((10 * S + 5_000, None));
                j.feed(Update::Op(Box::new(all_reduce(r, 1, 10 * S, kernel))));
                let reading = [(1.0, 0.0), (1.0, 0.2), third][r as usize];
                (8..=read_s).for_each(|at_s| j.feed(gpu_reading(&gpu, at_s * S, reading)));
            }
            j.tick(14 * S);
            let found = HangRule::new(Settings::default()).check(&j, 14 * S);
            found.into_iter().map(|f| (f.kind, f.ranks)).collect::<Vec<_>>()
        };
        let both = vec![Rank(1), Rank(2)];
        assert_eq!(found((1.0, 0.0), 14), [(Kind::NotStarted, vec![Rank(1)])]);
        assert_eq!(found((1.0, 0.3), 14), [(Kind::NotStarted, both.clone())]);
        assert_eq!(found((0.0, 0.0), 14), [(Kind::NotStarted, both)], "it may wait for an event");
        assert_eq!(found((1.0, 0.0), 11), [], "the next reading will tell");
    }

    #[test]
    fn a_gpu_that_a_late_peer_has_held_is_on_its_way() {
        // Rank 1 waits in a transfer of another communicator that its peer issues so late, and whose end NCCL told with that of
        // another one of its launch.
        let found = |came_ns: u64| {
            let mut j = Join::new();
            (0..3).for_each(|r| j.feed(process(r)));
            for r in 0..2 {
                j.feed(member(r, 2, 2));
                j.feed(Update::Op(Box::new(all_reduce(r, 0, S, Some((S + 5_000, Some(S + 50_000)))))));
                let kernel = (r == 0).then_some((10 * S + 5_000, None));
                j.feed(Update::Op(Box::new(all_reduce(r, 1, 10 * S, kernel))));
            }
            for (r, own, issued_ns) in [(1, 0, 9 * S), (2, 1, came_ns)] {
                let Update::Comm(mut other) = member(r, 2, 0) else { unreachable!("a member") };
                (other.comm, other.rank) = (CommId::unowned(8), Rank(own));
                j.feed(Update::Comm(other));
                let mut op = all_reduce(r, 0, issued_ns, Some((9 * S + 5_000, Some(9 * S + 50_000))));
                (op.comm, op.rank) = (CommId::unowned(8), Rank(own));
                (op.func, op.lane) = match r {
                    1 => (Func::Recv, Lane::Recv(Rank(1))),
                    _ => (Func::Send, Lane::Send(Rank(0))),
                };
                j.feed(Update::Op(Box::new(op)));
            }
            j.tick(20 * S);
            let found = HangRule::new(Settings::default()).check(&j, 20 * S);
            found.into_iter().map(|f| (f.kind, f.ranks)).collect::<Vec<_>>()
        };
        assert_eq!(found(19 * S), []);
        assert_eq!(found(9 * S), [(Kind::NotStarted, vec![Rank(1)])]);
    }

    #[test]
    fn a_rank_may_be_in_what_it_issued_before_and_has_lost_the_stamps_of() {
        // Rank 0 waits for rank 1. That rank issued an operation with rank 2 before, and no stamp of it is known; rank 2 waits for
        // rank 3, which is missing.
        let pairs = [(7, 0, 1), (8, 1, 2), (9, 2, 3)];
        let mut j = Join::new();
        (0..4).for_each(|r| j.feed(process(r)));
        for (comm, a, b) in pairs {
            for (own, r) in [(0, a), (1, b)] {
                let is_missing = r == 3;
                let Update::Comm(mut m) = member(r, 2, if is_missing { 1 } else { 2 }) else {
                    unreachable!("a member")
                };
                (m.comm, m.rank) = (CommId::unowned(comm), Rank(own));
                j.feed(Update::Comm(m));
                let waits = (comm, r) == (7, 0) || (comm, r) == (9, 2);
                let kernel = waits.then_some((10 * S + 5_000, None));
                let first = all_reduce(r, 0, S, Some((S + 5_000, Some(S + 50_000))));
                // Operations nearer to rank 3 are issued earlier.
                let second = (!is_missing).then(|| all_reduce(r, 1, 10 * S - comm, kernel));
                for mut op in [Some(first), second].into_iter().flatten() {
                    (op.comm, op.rank) = (CommId::unowned(comm), Rank(own));
                    j.feed(Update::Op(Box::new(op)));
                }
            }
        }
        j.tick(14 * S);
        let found = HangRule::new(Settings::default()).check(&j, 14 * S);
        let found: Vec<_> = found.into_iter().map(|f| (f.kind, f.communicator, f.ranks)).collect();
        assert_eq!(found, [(Kind::MissingRank, CommId::unowned(9), vec![Rank(1)])]);
    }

    /// Ranks 0 and 1 issue an operation at 10 s that rank 1's GPU does not start; rank 0 is in it from 10.5 s on. Rank 2
    /// waits from `other_ns` on for rank 1 in another communicator.
    fn host_that_waits_for_its_gpu(other_ns: u64) -> Vec<(Kind, CommId, Vec<Rank>)> {
        const OTHER: CommId = CommId::unowned(8);
        let mut j = Join::new();
        (0..3).for_each(|r| j.feed(process(r)));
        for r in 0..2 {
            j.feed(member(r, 2, 2));
            j.feed(Update::Op(Box::new(all_reduce(r, 0, S, Some((S + 5_000, Some(S + 50_000)))))));
            let kernel = (r == 0).then_some((10 * S + 500_000_000, None));
            j.feed(Update::Op(Box::new(all_reduce(r, 1, 10 * S, kernel))));
        }
        for (r, own) in [(1, 0), (2, 1)] {
            let Update::Comm(mut other) = member(r, 2, u64::from(r)) else { unreachable!("a member") };
            (other.comm, other.rank) = (OTHER, Rank(own));
            j.feed(Update::Comm(other));
            let first = all_reduce(r, 0, 2 * S, Some((2 * S + 5_000, Some(2 * S + 50_000))));
            let second = (r == 2).then(|| all_reduce(r, 1, other_ns, Some((other_ns + 5_000, None))));
            for mut op in [Some(first), second].into_iter().flatten() {
                (op.comm, op.rank) = (OTHER, Rank(own));
                j.feed(Update::Op(Box::new(op)));
            }
        }
        j.tick(20 * S);
        let found = HangRule::new(Settings::default()).check(&j, 20 * S);
        found.into_iter().map(|f| (f.kind, f.communicator, f.ranks)).collect()
    }

    #[test]
    fn a_host_that_waits_for_its_gpu_is_missing_elsewhere_because_of_that() {
        let own = all_reduce(0, 0, S, None).comm;
        let held = host_that_waits_for_its_gpu(10 * S + 200_000_000);
        assert_eq!(held, [(Kind::NotStarted, own, vec![Rank(1)])]);
        let was_missing_before = host_that_waits_for_its_gpu(9 * S);
        assert_eq!(was_missing_before, [(Kind::MissingRank, CommId::unowned(8), vec![Rank(0)])]);
    }
}
