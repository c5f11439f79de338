//! `not-started` of untimed operations: all ranks issued one and then nothing at all, and their GPUs wait.
//!
//! From records alone this looks like a pause of all hosts. The GPUs tell the two apart: the kernel of an operation that
//! does not end keeps its GPU busy and uses no memory, and a paused GPU is idle.

use super::hang_context::{HangContext, StallSite};
use super::held_by_gpu::{busy_with, open_parts};
use super::victims::connected;
use super::{fact, names, number, seconds, who};
use crate::join::{Activity, Communicator, Instance, Origin, Stall, Waited, WaitingFor};
use crate::model::{CommId, Confidence, Finding, Kind, Rank, Track};
use std::collections::BTreeSet;

/// The next step where the place is not known.
const ADVICE: &str = "look at the links and GPUs of the job (nvidia-smi nvlink -e, dmesg for Xid) and at NCCL's own view (ncclras); the next run names the rank if RINGWATCH_OVERHEAD_BUDGET=100% times every operation";

/// Ranks that are described one by one.
const DESCRIBED: usize = 8;
/// A communicator whose newest operation was issued so long before its processes' last one, in ns, had no part in their
/// last step: hosts issue a step at once, and nodes report once a second what they issued.
const STEP_NS: u64 = 2_000_000_000;

pub(super) fn judge<'p, 'a: 'p>(scene: &HangContext<'a>, at: StallSite<'p>) -> Option<Finding> {
    let patience = scene.settings.patience_blind_ns.max(scene.patience(at.comm));
    let ranks: Vec<Rank> = at.comm.members().keys().copied().collect();
    let silent_for = |r: &Rank| silent_ns(scene, at.comm, *r);
    let quiet = patience.max(queue_ns(scene, at));
    let silent = ranks.iter().filter_map(silent_for).min().filter(|w| *w >= quiet);
    // Hosts that run ahead issue more while their GPUs stand still, and GPUs that have work left do not only wait.
    let since_ns = scene.now_ns.saturating_sub(patience);
    let stands = |r: &Rank| busy_with(scene, at.comm, *r, since_ns) == Some(Activity::Waiting);
    let is_old = at.instance.began_ns().is_some_and(|t| t <= since_ns);
    let waited = silent.or_else(|| (is_old && ranks.iter().all(stands)).then_some(patience))?;
    let issued_ns = |(_, _, i): (_, _, &Instance)| i.began_ns().filter(|t| *t <= scene.now_ns);
    let newest_ns = at.comm.incomplete().filter_map(issued_ns).max()?;
    let is_last = scene.now_ns - newest_ns <= waited.saturating_add(STEP_NS);
    if !is_last {
        return None;
    }
    let activities: Vec<(Rank, Activity)> =
        ranks.iter().map(|r| Some((*r, scene.activity(at.comm, *r)?))).collect::<Option<_>>()?;
    let others: Vec<Rank> =
        activities.iter().filter(|(_, a)| *a != Activity::Waiting).map(|(r, _)| *r).collect();
    if others.len() == ranks.len() {
        return None;
    }
    let rivals = if others.is_empty() { rivals(scene, at) } else { Vec::new() };
    if !rivals.is_empty() {
        return somewhere(scene, at, &rivals, waited);
    }
    let waiting: Vec<Rank> = ranks.iter().copied().filter(|r| !others.contains(r)).collect();
    let how = if silent.is_some() { "nothing at all" } else { "no GPU did anything else" };
    let mut evidence = vec![
        number(
            format!("{} issued it, and {how} for {:.1} s", names(&ranks), seconds(waited)),
            seconds(waited),
            "s",
        ),
        fact(
            "GPU times cover neither this operation nor those right before it: it or one of them stands still",
        ),
        fact(format!("the GPUs of {} are busy and use no memory: a kernel waits there", names(&waiting))),
    ];
    for (rank, activity) in activities.iter().filter(|(r, _)| others.contains(r)).take(DESCRIBED) {
        evidence.push(fact(match activity {
            Activity::Idle => format!("the GPU of rank {rank} is idle"),
            _ => format!("the GPU of rank {rank} computes"),
        }));
    }
    let (order, instance) = before_what_is_queued(scene, at, &ranks).unwrap_or((at.stall.order, at.instance));
    let operation = at.comm.describe(at.stall.track, order, &instance.first()?.op);
    let suspects = if others.is_empty() { ranks } else { others };
    evidence.extend(suspects.iter().take(DESCRIBED).filter_map(|r| who(scene.join, at.comm, *r)));
    Some(Finding {
        evidence,
        advice: advice(&suspects),
        confidence: Confidence::Likely,
        ..Finding::new(Kind::NotStarted, at.comm.id, suspects, operation)
    })
}

/// Since when others wait behind an untimed operation that explains it: nothing shows who waits in it. Absent where nobody is
/// known to wait.
pub(super) fn waited_behind(scene: &HangContext<'_>, origin: &Origin, stall: &Stall) -> Option<Waited> {
    let held_up = origin.held_up.iter().filter_map(|i| scene.standing.stall(*i));
    let waited = held_up.filter_map(|s| scene.join.waited(s, scene.now_ns));
    let first = waited.min_by_key(|w| (w.is_by_hosts(), w.since_ns))?;
    // A host that is ahead waits for what others have yet to issue.
    let own = scene.join.waited(stall, scene.now_ns).filter(|own| own.since_ns > first.since_ns);
    Some(own.filter(|_| first.is_by_hosts()).unwrap_or(first))
}

/// Returns the place to judge instead of an operation that explains a wait: where others wait for a rank of it whose GPU is
/// idle or computes, or where they waited before its ranks had issued it.
pub(super) fn instead_of_cause(
    scene: &HangContext<'_>,
    origin: &Origin,
    stall: &Stall,
    instance: &Instance,
) -> Option<Origin> {
    let comm = scene.join.communicator(stall.comm).filter(|_| is_untimed(stall, instance))?;
    let tells = |(r, _): &&(Rank, u32)| scene.activity(comm, *r).is_some_and(|a| a != Activity::Waiting);
    let telling: BTreeSet<u32> = stall.waiting.iter().filter(tells).map(|(_, p)| *p).collect();
    let all: BTreeSet<u32> = stall.waiting.iter().map(|(_, p)| *p).collect();
    let of = if telling.is_empty() { &all } else { &telling };
    let seen = |i: &usize| {
        let s = scene.standing.stall(*i)?;
        let waited = scene.join.waited(s, scene.now_ns).filter(|w| !w.is_by_hosts())?;
        s.lacking.iter().any(|(_, p)| of.contains(p)).then_some((waited.since_ns, *i))
    };
    let (since_ns, first) = origin.held_up.iter().filter_map(seen).min()?;
    let issued_ns = instance.parts.values().filter_map(|p| p.op.issued_ns).max();
    if telling.is_empty() && issued_ns.is_some_and(|t| t <= since_ns) {
        return None;
    }
    let lacking = &scene.standing.stall(first)?.lacking;
    let ranks = lacking.iter().filter(|(_, p)| of.contains(p)).map(|(r, _)| *r).collect();
    let held_up = origin.held_up.iter().copied().filter(|i| *i != first).collect();
    Some(Origin { first, ranks, circle: Vec::new(), held_up })
}

/// True for an operation that does not end, though no GPU is seen in it.
pub(super) fn is_untimed(stall: &Stall, instance: &Instance) -> bool {
    stall.lack == WaitingFor::End && instance.parts.values().all(|p| !p.finished && p.is_silent())
}

/// An untimed operation in which all its ranks may be, and which explains whatever else stands still.
pub(super) fn judge_cause(scene: &HangContext<'_>, at: StallSite<'_>) -> Option<Finding> {
    let mut patience = scene.settings.patience_blind_ns.max(scene.patience(at.comm));
    if at.waited.is_by_hosts() {
        patience = patience.max(queue_ns(scene, at));
    }
    let ranks: Vec<Rank> = at.instance.parts.keys().copied().collect();
    let are_silent = ranks.iter().all(|r| silent_ns(scene, at.comm, *r).is_some_and(|ns| ns >= patience));
    let patience = if are_silent { scene.patience(at.comm) } else { patience };
    let waited_ns = at.waited.for_ns.filter(|w| *w >= patience)?;
    let is = |r: &Rank, activity| scene.activity(at.comm, *r) == Some(activity);
    if ranks.iter().any(|r| is(r, Activity::Idle)) {
        return None;
    }
    let computing: Vec<Rank> = ranks.iter().copied().filter(|r| is(r, Activity::Computing)).collect();
    let suspects = if computing.is_empty() { ranks.clone() } else { computing };
    let mut evidence = vec![
        number(
            format!(
                "others have waited {:.1} s for the next operation of {}",
                seconds(waited_ns),
                names(&ranks)
            ),
            seconds(waited_ns),
            "s",
        ),
        fact(
            "all of them issued this operation, and GPU times do not cover it: nothing reports that it has ended",
        ),
        fact("it is the only operation in which all of them and those that wait for them can be held up"),
    ];
    evidence.extend(suspects.iter().take(DESCRIBED).filter_map(|r| who(scene.join, at.comm, *r)));
    let operation = at.comm.describe(at.stall.track, at.stall.order, &at.instance.first()?.op);
    Some(Finding {
        evidence,
        advice: advice(&suspects),
        confidence: Confidence::Likely,
        ..Finding::new(Kind::NotStarted, at.comm.id, suspects, operation)
    })
}

fn advice(suspects: &[Rank]) -> String {
    format!(
        "look at what runs on the GPUs of {}: a kernel before the operation that does not end, and links between them (nvidia-smi nvlink -e, dmesg for Xid); RINGWATCH_OVERHEAD_BUDGET=100% times every operation and names the rank",
        names(suspects)
    )
}

/// Time that the operations up to the newest one may take, in ns: hosts that run ahead issue minutes of work.
fn queue_ns(scene: &HangContext<'_>, at: StallSite<'_>) -> u64 {
    let open = || at.comm.incomplete_of(at.stall.track).map(|(order, _)| order);
    let many = open().next_back().zip(open().next()).map_or(0, |(last, first)| last - first);
    let rhythm = scene.join.rhythm(at.comm);
    rhythm.map_or(0, |r| {
        r.step_ns.max(r.pace_ns).saturating_mul(many).saturating_mul(3).max(r.longest_ns.saturating_mul(2))
    })
}

/// The last operation that was issued before one that is timed and that a GPU has not started. Absent where the stall's own
/// is no later than that.
fn before_what_is_queued<'a>(
    scene: &HangContext<'_>,
    at: StallSite<'a>,
    ranks: &[Rank],
) -> Option<(u64, &'a Instance)> {
    let parts = ranks.iter().flat_map(|r| open_parts(scene, at, *r)).map(|(_, part)| part);
    let queued = parts.filter(|p| p.started_ns.is_none() && !p.is_silent());
    let queued_ns = queued.filter_map(|p| p.op.issued_ns).min()?;
    let is_later = |i: &Instance| i.began_ns().is_none_or(|t| t >= queued_ns);
    if matches!(at.stall.track, Track::Pair(..)) || !is_later(at.instance) {
        return None;
    }
    at.comm.incomplete_of(at.stall.track).rev().find(|(_, i)| !is_later(i))
}

/// `standstill`: one of several operations does not end, and nothing tells which. It is reported at the one that was issued
/// first, if the GPUs of all their ranks wait and their hosts are silent.
fn somewhere(
    scene: &HangContext<'_>,
    at: StallSite<'_>,
    rivals: &[&Stall],
    waited_ns: u64,
) -> Option<Finding> {
    let own = issued(scene, at.stall)?;
    if rivals.iter().any(|s| issued(scene, s).is_none_or(|other| other < own)) {
        return None;
    }
    let patience = scene.settings.patience_blind_ns;
    let stands = |s: &Stall| {
        let Some(comm) = scene.join.communicator(s.comm) else { return false };
        s.lacking.iter().all(|(r, _)| {
            let is_silent = silent_ns(scene, comm, *r).is_some_and(|ns| ns >= patience);
            is_silent && scene.activity(comm, *r) == Some(Activity::Waiting)
        })
    };
    if !rivals.iter().all(|s| stands(s)) {
        return None;
    }
    let several: BTreeSet<u32> =
        rivals.iter().flat_map(|s| processes(s)).chain(processes(at.stall)).collect();
    let describe = |s: &Stall| {
        let comm = scene.join.communicator(s.comm)?;
        let func = comm.instance(s.track, s.order)?.first()?.op.func;
        let ranks: Vec<Rank> = s.lacking.iter().map(|(r, _)| *r).collect();
        // Of a step's transfers the first is known, of its collectives the last.
        let which = if matches!(s.track, Track::Pair(..)) { "from order" } else { "up to order" };
        let (order, track) = (s.order, s.track);
        Some(fact(format!(
            "it may be {func} of {} ({which} {order}, communicator {}, {track})",
            names(&ranks),
            s.comm
        )))
    };
    let mut evidence = vec![
        number(
            format!("{} processes issued nothing for {:.1} s", several.len(), seconds(waited_ns)),
            seconds(waited_ns),
            "s",
        ),
        fact("the GPUs of all of them are busy and use no memory: kernels wait there"),
        fact(format!(
            "GPU times cover none of the {} operations that may stand still: nothing tells which of them it is",
            rivals.len() + 1
        )),
    ];
    evidence
        .extend([at.stall].into_iter().chain(rivals.iter().copied()).take(DESCRIBED).filter_map(describe));
    let operation = at.comm.describe(at.stall.track, at.stall.order, &at.instance.first()?.op);
    Some(Finding {
        evidence,
        advice: ADVICE.to_owned(),
        confidence: Confidence::Likely,
        ..Finding::new(Kind::Standstill, at.comm.id, Vec::new(), operation)
    })
}

/// `standstill` where ranks seem to be missing, as this finding says, while kernels wait on their GPUs: what they wait in is not
/// timed, and nothing tells which operation it is.
pub(super) fn behind(missing: Finding) -> Finding {
    let mut evidence = missing.evidence;
    evidence.push(fact(format!(
        "the GPUs of {} are busy: they wait in an operation that GPU times do not cover, and nothing tells which it is",
        names(&missing.ranks)
    )));
    Finding {
        evidence,
        advice: ADVICE.to_owned(),
        confidence: Confidence::Likely,
        severity: Kind::Standstill.severity(),
        kind: Kind::Standstill,
        ranks: Vec::new(),
        cause: None,
        ..missing
    }
}

/// Other operations of the same job that may as well be what does not end: they were issued earlier, or none of their processes
/// is in this one, or all of this one's are in them and others too.
fn rivals<'a>(scene: &HangContext<'a>, at: StallSite<'_>) -> Vec<&'a Stall> {
    let own = issued(scene, at.stall);
    let processes = processes(at.stall);
    let others = scene.standing.untimed().iter().filter_map(|o| scene.standing.stall(o.first));
    let mut rivals: Vec<&Stall> = others
        .filter(|s| s.comm != at.comm.id && !is_over(scene, s))
        .filter(|s| {
            let theirs = self::processes(s);
            let is_wider = theirs.len() > processes.len() && theirs.is_superset(&processes);
            issued(scene, s) < own || is_wider || theirs.is_disjoint(&processes)
        })
        .collect();
    if !rivals.is_empty() {
        let job = connected(scene.join, at.comm.id);
        rivals.retain(|s| job.contains(&s.comm));
    }
    rivals
}

/// True where ranks of an operation's communicator have gone on in others, or the GPUs of all are idle: they are through with it.
fn is_over(scene: &HangContext<'_>, stall: &Stall) -> bool {
    let Some(comm) = scene.join.communicator(stall.comm) else { return false };
    if stall.lacking.iter().all(|(r, _)| scene.activity(comm, *r) == Some(Activity::Idle)) {
        return true;
    }
    let issued_ns = |(_, _, i): (_, _, &Instance)| i.began_ns();
    let Some(newest_ns) = comm.incomplete().filter_map(issued_ns).max() else { return false };
    let last_ns = |(r, _): &(Rank, u32)| scene.process(comm, *r)?.issuing.last_ns();
    stall.lacking.iter().filter_map(last_ns).any(|t| t > newest_ns.saturating_add(STEP_NS))
}

/// The place of an operation in the order of their issues: its moment, host monotonic ns, and its communicator.
fn issued(scene: &HangContext<'_>, stall: &Stall) -> Option<(u64, CommId)> {
    let began_ns = scene.join.communicator(stall.comm)?.instance(stall.track, stall.order)?.began_ns()?;
    Some((began_ns, stall.comm))
}

/// The time since a rank's process issued anything, in ns; absent where its host's clock is ahead and says nothing about now.
fn silent_ns(scene: &HangContext<'_>, comm: &Communicator, rank: Rank) -> Option<u64> {
    scene.now_ns.checked_sub(scene.process(comm, rank)?.issuing.last_ns()?)
}

fn processes(stall: &Stall) -> BTreeSet<u32> {
    stall.lacking.iter().map(|(_, p)| *p).collect()
}

#[cfg(test)]
mod tests {
    use crate::detect::{HangRule, Rule, Settings};
    use crate::join::Join;
    use crate::join::testing::{all_reduce, gpu_reading, member, process};
    use crate::model::{CommId, Finding, Kind, Rank, Timing, Untimed, Update};

    const S: u64 = 1_000_000_000;
    const WAITS: (f64, f64) = (1.0, 0.0);
    const COMPUTES: (f64, f64) = (0.97, 0.2);
    const IDLE: (f64, f64) = (0.0, 0.0);

    /// Two ranks issue an untimed operation at 10 s. `gpus` is how busy each is until 21 s, and how much of its memory's
    /// bandwidth it uses.
    fn job(gpus: [(f64, f64); 2]) -> Vec<Finding> {
        let mut j = Join::new();
        for (r, (busy, memory_active)) in (0..).zip(gpus) {
            let gpu = format!("0000:{r:02x}:00.0");
            j.feed(process(r));
            let Update::Comm(mut record) = member(r, 2, 2) else { unreachable!("a member") };
            record.gpu = Some(gpu.clone().into());
            j.feed(Update::Comm(record));
            j.feed(Update::Op(Box::new(all_reduce(r, 0, S, Some((S + 5_000, Some(S + 50_000)))))));
            let mut op = all_reduce(r, 1, 10 * S, None);
            op.timing = Timing::Not(Untimed::Budget);
            j.feed(Update::Op(Box::new(op)));
            for at_s in 12..=20 {
                j.feed(gpu_reading(&gpu, at_s * S, (busy, memory_active)));
            }
        }
        j.tick(21 * S);
        HangRule::new(Settings::default()).check(&j, 21 * S)
    }

    #[test]
    fn of_the_same_ranks_the_operation_that_they_issued_last_is_named() {
        let mut j = Join::new();
        for r in 0..2u32 {
            let gpu = format!("0000:{r:02x}:00.0");
            j.feed(process(r));
            // Two steps of both communicators: the first one ended, since the hosts waited for it.
            for (comm, issued) in [(1u64, [5 * S, 9 * S]), (2, [5 * S + 1, 9 * S + S / 2])] {
                let Update::Comm(mut record) = member(r, 2, 2) else { unreachable!("a member") };
                (record.comm, record.gpu) = (CommId::unowned(comm), Some(gpu.clone().into()));
                j.feed(Update::Comm(record));
                for (order, at) in (0..).zip(issued) {
                    let mut op = all_reduce(r, order, at, None);
                    (op.comm, op.timing) = (CommId::unowned(comm), Timing::Not(Untimed::Budget));
                    j.feed(Update::Op(Box::new(op)));
                }
            }
            for at_s in 11..=20 {
                j.feed(gpu_reading(&gpu, at_s * S, WAITS));
            }
        }
        j.tick(21 * S);
        let found = HangRule::new(Settings::default()).check(&j, 21 * S);
        let named: Vec<_> = found.iter().map(|f| (f.kind, f.communicator, f.operation.order)).collect();
        assert_eq!(named, [(Kind::NotStarted, CommId::unowned(2), 1)]);
    }

    #[test]
    fn where_nothing_tells_the_place_all_of_the_job_stands_still() {
        // Ranks 0 and 1, 1 and 2, and 2 and 3 share a communicator each, and all issued an untimed operation.
        let of = |gpus: [(f64, f64); 4]| {
            let mut j = Join::new();
            (0..4).for_each(|r| j.feed(process(r)));
            for first in 0..3u32 {
                for (here, r) in [(0, first), (1, first + 1)] {
                    let Update::Comm(mut record) = member(r, 2, 1) else { unreachable!("a member") };
                    (record.comm, record.rank) = (CommId::unowned(first.into()), Rank(here));
                    record.gpu = Some(format!("0000:{r:02x}:00.0").into());
                    j.feed(Update::Comm(record));
                    let mut op = all_reduce(r, 0, 10 * S + u64::from(first), None);
                    (op.comm, op.rank) = (CommId::unowned(first.into()), Rank(here));
                    op.timing = Timing::Not(Untimed::Budget);
                    j.feed(Update::Op(Box::new(op)));
                }
            }
            for at_s in 12..=20 {
                let readings = (0..).zip(gpus).map(|(r, gpu)| (format!("0000:{r:02x}:00.0"), gpu));
                readings.for_each(|(name, gpu)| j.feed(gpu_reading(&name, at_s * S, gpu)));
            }
            j.tick(21 * S);
            let found = HangRule::new(Settings::default()).check(&j, 21 * S);
            let told = |f: &Finding| f.evidence.iter().filter(|e| e.text.starts_with("it may be")).count();
            found.iter().map(|f| (f.kind, f.communicator, f.ranks.clone(), told(f))).collect::<Vec<_>>()
        };
        let anywhere = (Kind::Standstill, CommId::unowned(0), Vec::new(), 2);
        assert_eq!(of([WAITS; 4]), [anywhere], "ranks 1 and 2 are in an earlier one before theirs");
        let named = of([WAITS, WAITS, WAITS, COMPUTES]);
        assert_eq!(named, [(Kind::NotStarted, CommId::unowned(2), vec![Rank(1)], 0)]);
        assert_eq!(of([IDLE; 4]), []);
    }

    #[test]
    fn gpus_that_wait_tell_a_standstill_from_a_pause() {
        let of = |gpus| {
            let found = job(gpus);
            found.into_iter().map(|f| (f.kind, f.ranks, f.operation.order)).collect::<Vec<_>>()
        };
        assert_eq!(of([WAITS, WAITS]), [(Kind::NotStarted, vec![Rank(0), Rank(1)], 1)]);
        assert_eq!(of([WAITS, COMPUTES]), [(Kind::NotStarted, vec![Rank(1)], 1)]);
        assert_eq!(of([IDLE, WAITS]), [(Kind::NotStarted, vec![Rank(0)], 1)]);
        assert_eq!(of([IDLE, IDLE]), []);
        assert_eq!(of([COMPUTES, COMPUTES]), []);
    }

    #[test]
    fn the_only_operation_that_explains_all_is_named_though_nobody_reads_the_gpus() {
        // Ranks 2 and 3 issue an untimed operation of their own, and do not start what ranks 0 and 1 wait in.
        let found = |now_s: u64| {
            let mut j = Join::new();
            (0..4).for_each(|r| j.feed(process(r)));
            for (comm, ranks, started) in [(1, [2, 3], None), (2, [0, 2], Some(0)), (3, [1, 3], Some(1))] {
                for (here, r) in (0..).zip(ranks) {
                    let Update::Comm(mut record) = member(r, 2, 1) else { unreachable!("a member") };
                    (record.comm, record.rank) = (CommId::unowned(comm), Rank(here));
                    j.feed(Update::Comm(record));
                    let at_ns = 10 * S + comm;
                    let mut op = all_reduce(r, 0, at_ns, (started == Some(r)).then_some((at_ns, None)));
                    (op.comm, op.rank) = (CommId::unowned(comm), Rank(here));
                    op.timing = if started.is_some() { op.timing } else { Timing::Not(Untimed::Budget) };
                    j.feed(Update::Op(Box::new(op)));
                }
            }
            j.tick(now_s * S);
            let found = HangRule::new(Settings::default()).check(&j, now_s * S);
            found.into_iter().map(|f| (f.kind, f.communicator, f.ranks)).collect::<Vec<_>>()
        };
        assert_eq!(found(15), []);
        assert_eq!(found(21), [(Kind::NotStarted, CommId::unowned(1), vec![Rank(0), Rank(1)])]);
    }

    #[test]
    fn others_wait_behind_an_untimed_operation_since_they_came_there() {
        // Ranks 2 and 3 issue an untimed operation of their own and then no more. Ranks 0 and 1 wait for them in untimed ones.
        let found = |wait_from_s: u64| {
            let mut j = Join::new();
            (0..4).for_each(|r| j.feed(process(r)));
            let own = (1, [2, 3], 2, 10 * S);
            let (first, second) = ((2, [0, 2], 1, wait_from_s * S), (3, [1, 3], 1, wait_from_s * S));
            for (comm, ranks, come, at_ns) in [own, first, second] {
                for (here, r) in (0..).zip(ranks) {
                    let issued = u64::from(here < come);
                    let Update::Comm(mut record) = member(r, 2, issued) else { unreachable!("a member") };
                    (record.comm, record.rank) = (CommId::unowned(comm), Rank(here));
                    j.feed(Update::Comm(record));
                    let mut op = all_reduce(r, 0, at_ns, None);
                    (op.comm, op.rank) = (CommId::unowned(comm), Rank(here));
                    op.timing = Timing::Not(Untimed::Budget);
                    if here < come {
                        j.feed(Update::Op(Box::new(op)));
                    }
                }
            }
            j.tick(60 * S);
            let found = HangRule::new(Settings::default()).check(&j, 60 * S);
            found.into_iter().map(|f| (f.kind, f.communicator, f.since_ns / S)).collect::<Vec<_>>()
        };
        assert_eq!(found(20), [(Kind::NotStarted, CommId::unowned(1), 20)]);
        assert_eq!(found(5), [(Kind::NotStarted, CommId::unowned(1), 10)], "these hosts are ahead");
        assert_eq!(found(58), []);
    }

    /// Returns what is found where four ranks issued an untimed operation of all, and so many pairs of them one of their own before
    /// it.
    fn found_behind(pairs: u32) -> Vec<(Kind, CommId, usize)> {
        let mut j = Join::new();
        for r in 0..4u32 {
            let gpu = format!("0000:{r:02x}:00.0");
            j.feed(process(r));
            let of_pair = (CommId::unowned(8 + u64::from(r / 2)), r % 2, 2, 10 * S);
            let of_all = (CommId::unowned(7), r, 4, 10 * S + 1_000_000);
            for (comm, rank, ranks, at) in (r / 2 < pairs).then_some(of_pair).into_iter().chain([of_all]) {
                let Update::Comm(mut record) = member(r, ranks, 2) else { unreachable!("a member") };
                (record.comm, record.rank, record.gpu) = (comm, Rank(rank), Some(gpu.clone().into()));
                j.feed(Update::Comm(record));
                let first = all_reduce(r, 0, S, Some((S + 5_000, Some(S + 50_000))));
                for mut op in [first, all_reduce(r, 1, at, None)] {
                    (op.comm, op.rank) = (comm, Rank(rank));
                    op.timing = if op.stamps.is_empty() { Timing::Not(Untimed::Budget) } else { op.timing };
                    j.feed(Update::Op(Box::new(op)));
                }
            }
            for at_s in 12..=60 {
                j.feed(gpu_reading(&gpu, at_s * S, WAITS));
            }
        }
        j.tick(61 * S);
        let found = HangRule::new(Settings::default()).check(&j, 61 * S);
        found.iter().map(|f| (f.kind, f.communicator, f.ranks.len())).collect()
    }

    #[test]
    fn of_several_that_may_stand_still_none_is_named_though_one_is_of_all_ranks() {
        assert_eq!(found_behind(0), [(Kind::NotStarted, CommId::unowned(7), 4)], "there is one");
        for pairs in [1, 2] {
            assert_eq!(found_behind(pairs), [(Kind::Standstill, CommId::unowned(8), 0)]);
        }
    }
}
