//! Ranks that look missing while a kernel is on their GPUs all the time: the GPU holds them, not their host.
//!
//! The GPU of a rank whose host does something else runs out of work and is idle. A busy one waits in an operation that is
//! not timed, or runs a kernel that does not end, and the host waits for it or for room in a full launch queue.

use super::hang_context::{HangContext, StallSite};
use super::{fact, missing_rank, names, who};
use crate::join::{Activity, Communicator, Instance, Part, Stall};
use crate::model::{Cause, CommId, Confidence, Finding, Kind, Rank, Track};
use std::cmp::Ordering;
use std::collections::HashSet;

/// A GPU that is busy so much later, in ns, than others began to wait is not on its way to them.
const SETTLES_NS: u64 = 1_000_000_000;
/// Ranks of which the GPUs are looked at.
const RANKS_MAX: usize = 64;
/// Ranks that are described one by one.
const DESCRIBED: usize = 8;

/// The cause that keeps ranks from calling an operation, as far as their GPUs show it.
#[derive(Debug)]
pub(super) enum Hold {
    /// Nothing says that their GPUs hold them.
    None,
    /// An operation that is not timed, which stands still itself.
    Untimed,
    /// Their GPUs are busy, and it is too early to say with what.
    Unclear,
    /// A kernel or an operation of another communicator, as this finding says.
    Explained(Box<Finding>),
}

pub(super) fn judge(scene: &HangContext<'_>, at: StallSite<'_>, missing: &Finding) -> Hold {
    let may_be = matches!(
        missing.kind,
        Kind::MissingRank | Kind::MissingReplay | Kind::SendWithoutReceive | Kind::ReceiveWithoutSend
    );
    let is_known = missing.confidence == Confidence::Proven || missing.cause == Some(Cause::Stopped);
    if may_be && missing.cause == Some(Cause::Stopped) && is_nobody_waiting(scene, at) {
        return Hold::Unclear;
    }
    if !may_be || is_known {
        return Hold::None;
    }
    if are_seen_in_circle(scene, at, missing) {
        return Hold::None;
    }
    let Some(at) = place_of(scene, at, missing) else { return Hold::None };
    if missing.ranks.iter().take(RANKS_MAX).any(|r| awaits_reading(scene, at, *r)) {
        return Hold::Unclear;
    }
    let Some(activities) = activities(scene, at, &missing.ranks) else { return Hold::None };
    if is_nobody_waiting(scene, at) {
        return Hold::Unclear;
    }
    let computing: Vec<Rank> =
        activities.iter().filter(|(_, a)| *a == Activity::Computing).map(|(r, _)| *r).collect();
    // A graph issues its operations when the GPU comes to them: a rank that is nowhere else is held by a kernel.
    let is_replay = at.stall.track == Track::Replay;
    let is_free = |(r, a): &(Rank, Activity)| *a == Activity::Computing || !is_in_any(scene, at, *r);
    let is_sure = is_replay && activities.iter().all(is_free);
    if computing.is_empty() && !is_sure {
        if let Some(out_of_order) = out_of_order(scene, at, missing) {
            return Hold::Explained(Box::new(out_of_order));
        }
        if waits_for_others(scene, at, &missing.ranks) {
            return Hold::None;
        }
        if is_in_untimed(scene, at, &missing.ranks) {
            return Hold::Untimed;
        }
        match missing.kind {
            Kind::MissingReplay => {}
            // A rank that left out a call waits in what it issued after it.
            Kind::SendWithoutReceive | Kind::ReceiveWithoutSend
                if went_on(scene, at, &missing.ranks) || came_past(at, &missing.ranks) =>
            {
                return Hold::None;
            }
            _ => return Hold::Untimed,
        }
    }
    if !is_sure && !scene.enough(at.waited, scene.settings.patience_blind_ns) {
        return Hold::Unclear;
    }
    let all = || activities.iter().map(|(r, _)| *r).collect();
    let ranks = if computing.is_empty() { all() } else { computing };
    Hold::Explained(Box::new(finding(scene, at, missing, ranks)))
}

/// True where the GPUs of all missing ranks are seen in other operations of the circle: that is what keeps them busy.
fn are_seen_in_circle(scene: &HangContext<'_>, at: StallSite<'_>, missing: &Finding) -> bool {
    let Some(comm) = scene.join.communicator(missing.communicator) else { return false };
    let segment = |comm: &Communicator, r: &Rank| Some(comm.members().get(r)?.record.segment);
    let is_seen_in = |s: &Stall, rank: &Rank| {
        let Some(c) = scene.join.communicator(s.comm) else { return false };
        let part = |r: &Rank| c.instance(s.track, s.order)?.parts.get(r);
        let is_in_it = |r: &Rank| segment(c, r) == segment(comm, rank) && part(r).is_some_and(Part::is_in_it);
        s.waiting.iter().any(|(r, _)| is_in_it(r))
    };
    let circle: Vec<&Stall> = at.origin.circle.iter().filter_map(|i| scene.standing.stall(*i)).collect();
    let is_seen = |rank: &Rank| circle.iter().any(|s| is_seen_in(s, rank));
    !circle.is_empty() && !missing.ranks.is_empty() && missing.ranks.iter().all(is_seen)
}

/// The place of a finding about missing ranks: in a circle it is one of several.
fn place_of<'a>(scene: &'a HangContext<'_>, at: StallSite<'a>, missing: &Finding) -> Option<StallSite<'a>> {
    if at.origin.circle.is_empty() {
        return (!missing.ranks.is_empty()).then_some(at);
    }
    let lacks = |s: &&Stall| {
        let is_lacking = |r: &Rank| s.lacking.iter().any(|(l, _)| l == r);
        s.comm == missing.communicator && missing.ranks.iter().any(is_lacking)
    };
    let stall = at.origin.circle.iter().filter_map(|i| scene.standing.stall(*i)).find(lacks)?;
    let comm = scene.join.communicator(stall.comm)?;
    Some(StallSite { stall, comm, instance: comm.instance(stall.track, stall.order)?, ..at })
}

fn finding(scene: &HangContext<'_>, at: StallSite<'_>, missing: &Finding, ranks: Vec<Rank>) -> Finding {
    let mut evidence = scene.wait_evidence(at.waited);
    for rank in ranks.iter().take(DESCRIBED) {
        evidence.push(fact(format!(
            "rank {rank} has not called it, and a kernel is on its GPU all the time since the others wait"
        )));
        evidence.extend(who(scene.join, at.comm, *rank));
    }
    let kind = Kind::NotStarted;
    Finding {
        evidence,
        advice: format!(
            "look at the kernel on the GPU of {}: one that does not end holds up what is launched behind it (cuda-gdb, nvidia-smi)",
            names(&ranks)
        ),
        // Its GPU may as well compute something of its own, as it does in a checkpoint.
        severity: missing_rank::severity_of_away(scene, at, kind),
        confidence: Confidence::Likely,
        ..Finding::new(kind, at.comm.id, ranks, missing.operation.clone())
    }
}

/// True where only hosts were seen to issue what is waited for, and all GPUs still compute earlier work.
fn is_nobody_waiting(scene: &HangContext<'_>, at: StallSite<'_>) -> bool {
    at.waited.is_by_hosts()
        && !scene.enough(at.waited, scene.settings.patience_most_ns)
        && activities(scene, at, &at.waited.ranks)
            .is_some_and(|all| all.iter().all(|(_, a)| *a == Activity::Computing))
}

/// The activity of each rank's GPU since the others began to wait. Absent where one is idle, or where nobody knows.
fn activities(scene: &HangContext<'_>, at: StallSite<'_>, ranks: &[Rank]) -> Option<Vec<(Rank, Activity)>> {
    let one = |r: &Rank| Some((*r, busy_with(scene, at.comm, *r, at.waited.since_ns)?));
    ranks.iter().take(RANKS_MAX).map(one).collect()
}

/// True where the next reading of a rank's GPU tells what it has done since others began to wait.
pub(super) fn awaits_reading(scene: &HangContext<'_>, at: StallSite<'_>, rank: Rank) -> bool {
    let gpu = at.comm.members().get(&rank).and_then(|m| m.record.gpu.as_ref());
    let Some((gpu, process)) = gpu.zip(scene.process(at.comm, rank)) else { return false };
    let since_ns = at.waited.since_ns.saturating_add(SETTLES_NS);
    scene.join.hardware().awaits_reading(&process.record.host, gpu, since_ns, scene.now_ns)
}

/// The activity of a rank's busy GPU since others began to wait. Absent where it is idle or was not read since then, and
/// where other processes use it as well.
pub(super) fn busy_with(
    scene: &HangContext<'_>,
    comm: &Communicator,
    rank: Rank,
    since_ns: u64,
) -> Option<Activity> {
    let member = &comm.members().get(&rank)?.record;
    let gpu = member.gpu.as_ref()?;
    let host = &scene.process(comm, rank)?.record.host;
    let since_ns = since_ns.saturating_add(SETTLES_NS);
    let busy = scene.join.hardware().busy_since(host, gpu, since_ns, scene.now_ns)?;
    (!scene.is_shared(host, gpu)).then_some(busy)
}

/// True where nothing else stands still and the untimed operations of all missing ranks wait for ranks whose GPUs are seen in
/// timed ones: what holds these is this place.
fn waits_for_others(scene: &HangContext<'_>, at: StallSite<'_>, missing: &[Rank]) -> bool {
    let is_seen = |comm: &Communicator, rank: Rank| {
        open_parts(scene, StallSite { comm, ..at }, rank).any(|(_, p)| p.is_in_it())
    };
    let is_explained = |rank: &Rank| {
        let actor = scene.process(at.comm, *rank).map(|p| p.record.id);
        let mut comms: Vec<CommId> =
            open_parts(scene, at, *rank).filter(|(_, p)| p.is_silent()).map(|((comm, _), _)| comm).collect();
        comms.dedup();
        let is_of_others = |id: &CommId| {
            let Some(comm) = scene.join.communicator(*id) else { return false };
            let mut others = comm
                .members()
                .iter()
                .filter(|(_, m)| Some(m.record.segment) != actor)
                .take(RANKS_MAX)
                .peekable();
            others.peek().is_some() && others.all(|(r, _)| is_seen(comm, *r))
        };
        !comms.is_empty() && comms.iter().all(is_of_others)
    };
    scene.standing.origins().len() == 1 && missing.iter().take(RANKS_MAX).all(is_explained)
}

/// True when a missing rank is in an operation that stands still and is not timed.
fn is_in_untimed(scene: &HangContext<'_>, at: StallSite<'_>, missing: &[Rank]) -> bool {
    let actors: HashSet<u32> =
        at.stall.lacking.iter().filter(|(r, _)| missing.contains(r)).map(|(_, p)| *p).collect();
    let mut untimed = scene.standing.untimed().iter().filter_map(|o| scene.standing.stall(o.first));
    untimed.any(|s| s.lacking.iter().any(|(_, p)| actors.contains(p)))
}

/// True when ranks issued something after others began to wait for them.
fn went_on(scene: &HangContext<'_>, at: StallSite<'_>, ranks: &[Rank]) -> bool {
    let last_ns = |r: &Rank| scene.process(at.comm, *r)?.issuing.last_ns();
    ranks.iter().any(|r| last_ns(r).is_some_and(|t| t > at.waited.since_ns))
}

/// True where all missing ranks issued something that a waiting rank issued after what they lack: their hosts came past it.
fn came_past(at: StallSite<'_>, missing: &[Rank]) -> bool {
    let Some(first) = at.waited.ranks.first() else { return false };
    let issued_ns = |i: &Instance| i.parts.get(first)?.op.issued_ns;
    let Some(since_ns) = issued_ns(at.instance) else { return false };
    let is_later = |i: &Instance| issued_ns(i).is_some_and(|t| t > since_ns);
    let came = |r: &Rank| at.comm.incomplete().any(|(.., i)| i.parts.contains_key(r) && is_later(i));
    missing.iter().all(came)
}

/// Ranks that are in what others issued after the operation in which these wait for them: a call was left out, or made once
/// too often.
fn out_of_order(scene: &HangContext<'_>, at: StallSite<'_>, missing: &Finding) -> Option<Finding> {
    let waiting = at.waited.ranks.as_slice();
    let first = *waiting.first()?;
    let since_ns = at.instance.parts.get(&first)?.op.issued_ns?;
    let they_are_in: Vec<(Rank, CommId, u64)> = missing
        .ranks
        .iter()
        .map(|r| issued_after(scene, at, *r, (first, since_ns)).map(|(comm, order)| (*r, comm, order)))
        .collect::<Option<_>>()?;
    // Most of them are right; of as many nobody knows who is.
    let mut ranks = match waiting.len().cmp(&missing.ranks.len()) {
        _ if waiting.iter().all(|r| missing.ranks.contains(r)) => missing.ranks.clone(),
        Ordering::Greater => missing.ranks.clone(),
        Ordering::Equal => [missing.ranks.as_slice(), waiting].concat(),
        Ordering::Less => waiting.to_vec(),
    };
    ranks.sort_unstable();
    let mut evidence = scene.wait_evidence(at.waited);
    for (rank, comm, order) in they_are_in.iter().take(DESCRIBED) {
        evidence.push(fact(format!(
            "rank {rank} has not called it, and has called operation {order} of communicator {comm}, which rank {first} called after it"
        )));
    }
    evidence.extend(ranks.iter().take(DESCRIBED).filter_map(|r| who(scene.join, at.comm, *r)));
    Some(Finding {
        evidence,
        advice: format!(
            "compare the calls of {} with those of the others: one was left out, made twice, or made in another order",
            names(&ranks)
        ),
        confidence: Confidence::Likely,
        ..Finding::new(Kind::InterleavedCommunicators, at.comm.id, ranks, missing.operation.clone())
    })
}

/// An unfinished operation of another communicator that two ranks of this one issued, and the second of them after a moment.
fn issued_after(
    scene: &HangContext<'_>,
    at: StallSite<'_>,
    rank: Rank,
    (other, since_ns): (Rank, u64),
) -> Option<(CommId, u64)> {
    let memberships = |r: Rank| Some(scene.join.memberships(scene.process(at.comm, r)?.record.id));
    let (own, theirs) = (memberships(rank)?, memberships(other)?);
    let shared = own.iter().filter(|(comm, _)| *comm != at.comm.id);
    let mut shared = shared.filter_map(|(comm, here)| {
        let (_, there) = theirs.iter().find(|(c, _)| c == comm)?;
        Some((scene.join.communicator(*comm)?, *here, *there))
    });
    shared.find_map(|(c, here, there)| {
        let mut later = c.incomplete().filter(|(.., i)| {
            let issued_ns = i.parts.get(&there).and_then(|p| p.op.issued_ns);
            i.parts.contains_key(&here) && issued_ns.is_some_and(|t| t > since_ns)
        });
        later.next().map(|(_, order, _)| (c.id, order))
    })
}

/// True when a rank's process issued an operation of which nobody knows whether it is finished.
fn is_in_any(scene: &HangContext<'_>, at: StallSite<'_>, rank: Rank) -> bool {
    open_parts(scene, at, rank).next().is_some()
}

/// The operations that a rank's process issued and that are not known to be finished there, with communicator and
/// track.
pub(super) fn open_parts<'a>(
    scene: &HangContext<'a>,
    at: StallSite<'_>,
    rank: Rank,
) -> impl Iterator<Item = ((CommId, Track), &'a Part)> {
    let join = scene.join;
    let memberships = scene.process(at.comm, rank).map_or(&[][..], |p| join.memberships(p.record.id));
    memberships.iter().flat_map(move |(comm, r)| {
        let all = join.communicator(*comm).into_iter().flat_map(Communicator::incomplete);
        let own = all.filter_map(|(track, _, i)| Some((track, i.parts.get(r)?)));
        own.filter(|(_, p)| !p.finished).map(|(track, p)| ((*comm, track), p))
    })
}

#[cfg(test)]
mod tests {
    use crate::detect::{HangRule, Rule, Settings};
    use crate::join::Join;
    use crate::join::testing::{all_reduce, gpu_reading, member, process};
    use crate::model::{CommId, Finding, Func, Kind, Lane, Rank, Severity, Timing, Untimed, Update};

    const S: u64 = 1_000_000_000;
    const WAITS: (f64, f64) = (1.0, 0.0);
    const COMPUTES: (f64, f64) = (0.97, 0.2);
    const IDLE: (f64, f64) = (0.0, 0.0);

    /// Ranks 0 and 1 issued an untimed operation of their own at 9 s and then no more; rank 2 waits for them in one of all
    /// since 10 s. `gpu` is how busy the GPUs of ranks 0 and 1 are and how much of their memories' bandwidth they use.
    fn job(gpu: (f64, f64), shared: bool, now_s: u64) -> Vec<Finding> {
        let mut j = Join::new();
        for r in 0..3u32 {
            let gpu_of = format!("0000:{:02x}:00.0", if shared { r.min(1) } else { r });
            j.feed(process(r));
            let Update::Comm(mut record) = member(r, 3, if r < 2 { 1 } else { 2 }) else {
                unreachable!("a member")
            };
            record.gpu = Some(gpu_of.clone().into());
            j.feed(Update::Comm(record.clone()));
            j.feed(Update::Op(Box::new(all_reduce(r, 0, S, Some((S + 5_000, Some(S + 50_000)))))));
            if r < 2 {
                (record.comm, record.ranks, record.issued) = (CommId::unowned(8), Some(2), 1);
                j.feed(Update::Comm(record));
                let mut op = all_reduce(r, 0, 9 * S, None);
                (op.comm, op.timing) = (CommId::unowned(8), Timing::Not(Untimed::Budget));
                j.feed(Update::Op(Box::new(op)));
            } else {
                j.feed(Update::Op(Box::new(all_reduce(r, 1, 10 * S, Some((10 * S + 5_000, None))))));
            }
            let (busy, memory_active) = if r < 2 { gpu } else { WAITS };
            for at_s in 8..=now_s {
                j.feed(gpu_reading(&gpu_of, at_s * S, (busy, memory_active)));
            }
        }
        j.tick(now_s * S);
        HangRule::new(Settings::default()).check(&j, now_s * S)
    }

    fn of(gpu: (f64, f64), shared: bool, now_s: u64) -> Vec<(Kind, Vec<Rank>, CommId)> {
        job(gpu, shared, now_s).into_iter().map(|f| (f.kind, f.ranks, f.communicator)).collect()
    }

    #[test]
    fn ranks_whose_gpus_wait_in_an_untimed_operation_are_not_missing() {
        let both = vec![Rank(0), Rank(1)];
        assert_eq!(of(WAITS, false, 13), [], "it is too early to say what stands still");
        assert_eq!(of(WAITS, false, 20), [(Kind::NotStarted, both.clone(), CommId::unowned(8))]);
        assert_eq!(of(IDLE, false, 14)[0].0, Kind::MissingRank, "their hosts do something else");
        assert_eq!(of(WAITS, true, 14), [], "whose kernel is on a shared GPU is not known");
        assert_eq!(of(WAITS, true, 21), [(Kind::NotStarted, both, CommId::unowned(8))]);
    }

    /// Rank 0 issues an untimed operation at 10 s and one of another communicator 0.1 s later; rank 1 issues the second one
    /// alone. Their GPUs wait, and were read until `read_s`.
    fn left_out(read_s: u64, now_s: u64) -> Vec<(Kind, Vec<Rank>, CommId)> {
        let mut j = Join::new();
        for r in 0..2u32 {
            let gpu = format!("0000:{r:02x}:00.0");
            j.feed(process(r));
            let Update::Comm(mut record) = member(r, 2, 2 - u64::from(r)) else { unreachable!("a member") };
            record.gpu = Some(gpu.clone().into());
            j.feed(Update::Comm(record.clone()));
            (record.comm, record.issued) = (CommId::unowned(8), 1);
            j.feed(Update::Comm(record));
            j.feed(Update::Op(Box::new(all_reduce(r, 0, S, Some((S + 5_000, Some(S + 50_000)))))));
            let mut issue = |comm: u64, order, at_ns| {
                let mut op = all_reduce(r, order, at_ns, None);
                (op.comm, op.timing) = (CommId::unowned(comm), Timing::Not(Untimed::Budget));
                j.feed(Update::Op(Box::new(op)));
            };
            if r == 0 {
                issue(7, 1, 10 * S);
            }
            issue(8, 0, 10 * S + S / 10);
            for at_s in 8..=read_s {
                j.feed(gpu_reading(&gpu, at_s * S, WAITS));
            }
        }
        j.tick(now_s * S);
        let found = HangRule::new(Settings::default()).check(&j, now_s * S);
        found.into_iter().map(|f| (f.kind, f.ranks, f.communicator)).collect()
    }

    #[test]
    fn a_rank_that_is_in_what_another_called_later_is_out_of_order() {
        let both = (Kind::InterleavedCommunicators, vec![Rank(0), Rank(1)], CommId::unowned(7));
        assert_eq!(left_out(14, 15), [both], "of two nobody knows who is wrong");
        assert_eq!(left_out(11, 14), [], "the next reading tells");
        assert_eq!(left_out(9, 15)[0].0, Kind::MissingRank, "nobody reads the GPUs any more");
    }

    /// A send or a collective: the rank, both ends of a send, when it was issued, host monotonic ns, and whether its GPU is in it.
    type Issued = (u32, Option<(u32, u32)>, u64, bool);

    /// Rank 0 sends to rank 1, which does not receive, and both GPUs wait. `elsewhere` are more sends and collectives.
    fn transfers(timed: bool, elsewhere: &[Issued]) -> Vec<(Kind, Vec<Rank>)> {
        let mut j = Join::new();
        for r in 0..2u32 {
            let gpu = format!("0000:{r:02x}:00.0");
            j.feed(process(r));
            let calls = elsewhere.iter().filter(|(rank, lane, ..)| *rank == r && lane.is_none()).count();
            let Update::Comm(mut record) = member(r, 2, 1 + calls as u64) else { unreachable!("a member") };
            record.gpu = Some(gpu.clone().into());
            j.feed(Update::Comm(record));
            j.feed(Update::Op(Box::new(all_reduce(r, 0, S, Some((S + 5_000, Some(S + 50_000)))))));
            (8..=14).for_each(|at_s| j.feed(gpu_reading(&gpu, at_s * S, WAITS)));
        }
        for (rank, lane, at_ns, is_in_it) in
            [(0, Some((0, 1)), 10 * S, timed)].iter().chain(elsewhere).copied()
        {
            let kernel = is_in_it.then_some((at_ns + 5_000, None));
            let mut op = all_reduce(rank, u64::from(lane.is_none()), at_ns, kernel);
            if let Some((_, to)) = lane {
                (op.func, op.lane) = (Func::Send, Lane::Send(Rank(to)));
            }
            if !timed {
                op.timing = Timing::Not(Untimed::Budget);
            }
            j.feed(Update::Op(Box::new(op)));
        }
        j.tick(15 * S);
        HangRule::new(Settings::default()).check(&j, 15 * S).into_iter().map(|f| (f.kind, f.ranks)).collect()
    }

    #[test]
    fn gpus_that_are_seen_in_a_circle_of_transfers_wait_for_that() {
        let told = transfers(true, &[(1, Some((1, 0)), 10 * S, true)]);
        assert_eq!(told, [(Kind::SendWithoutReceive, vec![Rank(0), Rank(1)])]);
    }

    #[test]
    fn who_called_what_comes_after_a_transfer_has_left_it_out() {
        let call = |rank, at_ns| (rank, None, at_ns, false);
        let after = transfers(false, &[call(0, 10 * S + 1_000), call(1, 10 * S)]);
        assert_eq!(after, [(Kind::SendWithoutReceive, vec![Rank(1)])]);
        let before = transfers(false, &[call(0, 9 * S), call(1, 9 * S)]);
        assert_eq!(before, [], "what it called before may hold it up");
    }

    #[test]
    fn who_waits_for_ranks_that_are_seen_elsewhere_is_not_held_by_its_gpu() {
        // Rank 0 waits for rank 1, which is in an untimed operation with rank 2; that one is seen to wait for rank 0, or not.
        let told = |seen: bool| {
            let mut j = Join::new();
            (0..3).for_each(|r| j.feed(process(r)));
            let mut issue =
                |comm: u64, all: [u32; 2], order, at_ns: u64, timing, ended: [Option<Option<u64>>; 2]| {
                    for ((here, r), ended) in (0..).zip(all).zip(ended) {
                        let called = order + u64::from(ended.is_some());
                        let Update::Comm(mut record) = member(r, 2, called) else { unreachable!("a member") };
                        record.gpu = Some(format!("0000:{r:02x}:00.0").into());
                        (record.comm, record.rank) = (CommId::unowned(comm), Rank(here));
                        j.feed(Update::Comm(record));
                        let Some(ended) = ended else { continue };
                        let kernel = (timing == Timing::Kernel).then_some((at_ns + 5_000, ended));
                        let mut op = all_reduce(r, order, at_ns, kernel.filter(|_| (comm, r) != (9, 0)));
                        (op.comm, op.rank, op.timing) = (CommId::unowned(comm), Rank(here), timing);
                        j.feed(Update::Op(Box::new(op)));
                    }
                };
            let untimed = Timing::Not(Untimed::Budget);
            issue(7, [0, 1], 0, S, Timing::Kernel, [Some(Some(S + 50_000)); 2]);
            issue(7, [0, 1], 1, 10 * S, Timing::Kernel, [Some(None), None]);
            let of_2 = if seen { Timing::Kernel } else { untimed };
            issue(9, [2, 0], 0, 10 * S + 1_000, of_2, [Some(None); 2]);
            issue(8, [1, 2], 0, 10 * S + 10_000, untimed, [Some(None); 2]);
            for (r, at_s) in (0..3u32).flat_map(|r| (8..=14).map(move |at_s| (r, at_s))) {
                j.feed(gpu_reading(&format!("0000:{r:02x}:00.0"), at_s * S, WAITS));
            }
            j.tick(14 * S);
            let found = HangRule::new(Settings::default()).check(&j, 14 * S);
            found.into_iter().map(|f| (f.kind, f.communicator, f.ranks)).collect::<Vec<_>>()
        };
        assert_eq!(told(true), [(Kind::MissingRank, CommId::unowned(7), vec![Rank(1)])]);
        assert_eq!(told(false), []);
    }

    #[test]
    fn a_gpu_that_computes_holds_its_rank_and_may_do_so_for_a_while() {
        assert_eq!(of(COMPUTES, false, 14), []);
        let [f] = job(COMPUTES, false, 21).try_into().expect("one");
        assert_eq!(
            (f.kind, f.ranks, f.severity),
            (Kind::NotStarted, vec![Rank(0), Rank(1)], Severity::Warning)
        );
        assert_eq!(job(COMPUTES, false, 41)[0].severity, Severity::Critical);
    }
}
