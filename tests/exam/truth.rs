//! What is true of a job: who held whom, since when and at which cost. It is the difference between two runs of the
//! simulation with the same noise, one of them without the fault. No rule of the product is asked.

use crate::generate::{Exam, Planted, run};
use crate::simulator::{Case, Fault, Stay};
use crate::spec::{FaultKind, Spec};
use crate::visible::{WARM_UP, is_visible};
use ringwatch::model::{CommId, Func, Kind, Track};
use std::collections::{BTreeMap, BTreeSet};

/// An operation, by its communicator's place among all.
pub(crate) type Key = (usize, Track, u64);

const MS: u64 = 1_000_000;
const S: u64 = 1_000 * MS;
/// A fault that costs more than this share of the time has to be found; one that costs less than `TOLERATED` must not be
/// a warning. In between either is right.
const REQUIRED: f64 = 0.05;
const TOLERATED: f64 = 0.01;

/// The first operation of a communicator may wait so long for ranks that start slowly.
const SLOW_START_NS: u64 = 31 * S;
/// The same of one that a job at work made, which may make connections.
const STARTED_AT_WORK_NS: u64 = 11 * S;

/// Operations that were issued so long before another one, in ns, belong to an earlier step.
const STEP_NS: u64 = S;

/// One operation of the job.
pub(crate) type OpKey = (CommId, Track, u64);

/// Whether a finding has to come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Need {
    Required,
    Allowed,
    Nothing,
}

/// What is true of one planted fault.
#[derive(Debug, Clone)]
pub(crate) struct Truth {
    pub(crate) kind: FaultKind,
    pub(crate) need: Need,
    /// Ranks of the job.
    pub(crate) culprits: BTreeSet<u32>,
    pub(crate) involved: BTreeSet<u32>,
    /// Names of findings that say this.
    pub(crate) named: &'static [Kind],
    /// Where others are held first; empty where any operation will do in which a culprit came last.
    pub(crate) operations: BTreeSet<OpKey>,
    /// Nobody can have found it before.
    pub(crate) planted_ns: u64,
    pub(crate) since_ns: u64,
    pub(crate) deadline_ns: u64,
    /// Share of the job's time since then that it lost.
    pub(crate) cost: f64,
    /// No GPU time tells which of several operations stands still, and no host has left one out.
    pub(crate) is_anywhere: bool,
}

/// The case without one of its faults.
fn without(case: &Case, planted: &Planted) -> Case {
    let mut case = case.clone();
    if let Some(at) = planted.fault {
        case.faults[at] = Fault::default();
    }
    if let Some(at) = planted.slow {
        case.slow[at].factor = 1.0;
    }
    match planted.kind {
        FaultKind::NodeLost => case.node_loss = None,
        FaultKind::OtherChoice => {
            case.choices.retain(|c| !c.ranks.iter().flatten().any(|r| planted.culprits.contains(r)));
        }
        FaultKind::NeverJoined => case.comms.values_mut().for_each(|m| m.without.clear()),
        _ => {}
    }
    case
}

/// The truths of a job. `run` is what happened in it, by rank and in the order of calls.
pub(crate) fn of(spec: &Spec, exam: &Exam, happened: &[Stay], entered: &[Option<u64>]) -> Vec<Truth> {
    exam.planted
        .iter()
        .map(|p| {
            let alone = exam.planted.len() == 1;
            let other = if alone { exam.healthy.clone() } else { run(&without(&exam.case, p), spec) };
            one(spec, exam, p, happened, &other, entered)
        })
        .collect()
}

/// The place of the communicator that a rank never joins.
fn not_joined(p: &Planted, exam: &Exam) -> Option<usize> {
    (0..exam.members.len()).find(|at| !left_out(*at, exam).is_disjoint(&p.culprits))
}

/// The ranks that never join a communicator.
fn left_out(at: usize, exam: &Exam) -> BTreeSet<u32> {
    let name = exam.comm_name(at);
    let members = name.split('/').next().and_then(|name| exam.case.comms.get(name));
    let is_left_out = |r: &&u32| members.is_some_and(|m| m.without.contains(r));
    exam.members[at].1.iter().filter(is_left_out).copied().collect()
}

fn one(
    spec: &Spec,
    exam: &Exam,
    p: &Planted,
    happened: &[Stay],
    other: &[Stay],
    entered: &[Option<u64>],
) -> Truth {
    let until = exam.case.until.0;
    let mut start_ns = 0;
    let once = matches!(p.kind, FaultKind::LateOnce | FaultKind::Paused);
    let mut truth = Truth {
        kind: p.kind,
        need: Need::Allowed,
        culprits: p.culprits.clone(),
        involved: p.involved.clone(),
        named: names(p.kind, spec.reads_load),
        operations: BTreeSet::new(),
        // A communicator may be made before the moment that was drawn.
        planted_ns: if p.kind == FaultKind::NeverJoined { 0 } else { p.at_ns },
        since_ns: p.at_ns,
        deadline_ns: 0,
        cost: 0.0,
        is_anywhere: is_anywhere(p, happened, until),
    };
    // A host that has no room in its queue ends before it waits for some, and so before the healthy job made the call.
    let last_ns = happened.iter().filter(|s| p.culprits.contains(&s.rank)).map(|s| s.issued_ns).max();
    if matches!(p.kind, FaultKind::Killed | FaultKind::Exits | FaultKind::Aborted) {
        truth.planted_ns = truth.planted_ns.min(last_ns.unwrap_or(p.at_ns));
    }
    if p.kind == FaultKind::NeverJoined {
        let at = not_joined(p, exam);
        let entered_ns = at.and_then(|at| *entered.get(at)?);
        // All that never join it are missed alike.
        truth.culprits = at.map_or_else(|| p.culprits.clone(), |at| left_out(at, exam));
        truth.involved.clone_from(&truth.culprits);
        truth.since_ns = entered_ns.unwrap_or(p.at_ns);
        truth.cost = 1.0;
        // Another fault may keep its ranks from it, so that nobody waits in it, or nobody waits because of this fault.
        let is_used = other.iter().any(|s| Some(s.comm) == at && p.culprits.contains(&s.rank));
        let is_held_up = entered_ns.is_some() && (is_used || exam.planted.len() == 1);
        // Without the library that sees its making begin, nothing is known of it.
        truth.need = if spec.preloaded && is_held_up { Need::Required } else { Need::Allowed };
    } else if p.kind.is_slow() {
        truth.cost = lost(happened, other, until, p.at_ns);
        truth.need = match truth.cost {
            c if c >= REQUIRED => Need::Required,
            c if c >= TOLERATED => Need::Allowed,
            _ => Need::Nothing,
        };
        let span = (p.at_ns, p.at_ns + patience(spec, p.kind));
        let lost_ns = truth.cost * until.saturating_sub(p.at_ns).max(S) as f64;
        // Hosts that wait for each step show by their calls when one of them was away.
        let is_late = |s: &&Stay| p.culprits.contains(&s.rank) && s.issued_ns >= p.at_ns;
        let late = happened.iter().filter(is_late).min_by_key(|s| s.issued_ns);
        let by_hosts = once && spec.sync && late.is_some_and(|s| s.order >= WARM_UP);
        let shown = by_hosts || {
            let once_ns = once.then_some(lost_ns as u64 / 2);
            is_visible((p.kind, &p.culprits), happened, other, span, spec.a_node, once_ns)
        };
        if truth.need == Need::Required && !shown {
            truth.need = Need::Allowed;
        }
    } else if let Some(held) = held(spec, p, exam, happened, other, until) {
        truth.operations = held.operations;
        truth.since_ns = held.since_ns;
        truth.cost = 1.0;
        start_ns = held.start_ns;
        let hidden = !spec.reads_load && is_hidden(p, exam, happened, until);
        truth.need = if hidden { Need::Allowed } else { Need::Required };
    }
    let patience_ns = match patience(spec, p.kind) {
        ns if ns == S => ns,
        ns => ns.max(start_ns),
    };
    truth.deadline_ns = truth.since_ns + patience_ns;
    // A job that is slow from some moment on has to last until then.
    let last_ns = happened.iter().filter_map(|s| s.ended_ns).max().unwrap_or(0);
    let until = if p.kind.is_slow() && !once { until.min(last_ns + S) } else { until };
    if truth.need == Need::Required && truth.deadline_ns + S / 2 > until {
        truth.need = Need::Allowed;
    }
    truth
}

/// How much later the job is at the end than without the fault, as a share of the time since the fault.
fn lost(happened: &[Stay], other: &[Stay], until: u64, at_ns: u64) -> f64 {
    let ends: BTreeMap<_, u64> =
        other.iter().filter_map(|s| Some(((s.key(), s.rank), s.ended_ns?))).collect();
    let mut later: BTreeMap<u32, (u64, i64)> = BTreeMap::new();
    for s in happened {
        if let (Some(end), Some(before)) = (s.ended_ns, ends.get(&(s.key(), s.rank)))
            && later.get(&s.rank).is_none_or(|(at, _)| *at < end)
        {
            later.insert(s.rank, (end, end as i64 - *before as i64));
        }
    }
    let mut delays: Vec<i64> = later.values().map(|(_, d)| *d).collect();
    delays.sort_unstable();
    let middle = delays.get(delays.len() / 2).copied().unwrap_or(0).max(0);
    middle as f64 / until.saturating_sub(at_ns).max(S) as f64
}

struct Held {
    operations: BTreeSet<OpKey>,
    since_ns: u64,
    /// How long it may be a slow start, in ns.
    start_ns: u64,
}

/// An operation that does not end.
struct Open<'a> {
    key: Key,
    parts: Vec<&'a Stay>,
    /// When a culprit would have come by, or when the first call of it was made.
    comes_ns: u64,
    /// When others began to wait in it.
    began_ns: u64,
}

/// Operations that are open at the end, by place.
fn open_at_end(happened: &[Stay], until: u64) -> BTreeMap<Key, Vec<&Stay>> {
    let mut open: BTreeMap<Key, Vec<&Stay>> = BTreeMap::new();
    for s in happened {
        open.entry(s.key()).or_default().push(s);
    }
    open.retain(|_, parts| parts.iter().any(|s| s.ended_ns.is_none() && s.issued_ns + S < until));
    open
}

/// Describes the operations that are open at the end, a line each: which ranks are in it, and since when.
pub(crate) fn describe_open(exam: &Exam, happened: &[Stay]) -> Vec<String> {
    let seconds = |ns: Option<u64>| ns.map_or("-".to_owned(), |t| format!("{:.3}", t as f64 / 1e9));
    let part = |s: &&Stay| {
        let timed = if s.timed { "timed" } else { "untimed" };
        let (issued, started) = (seconds(Some(s.issued_ns)), seconds(s.started_ns));
        format!("rank {}: {issued} {started} {} {timed}", s.rank, seconds(s.ended_ns))
    };
    let mut all: Vec<(Key, Vec<&Stay>)> = open_at_end(happened, exam.case.until.0).into_iter().collect();
    all.sort_by_key(|(key, parts)| (parts.iter().map(|s| s.issued_ns).min(), *key));
    let line = |(key, parts): (Key, Vec<&Stay>)| {
        let parts: Vec<String> = parts.iter().map(part).collect();
        format!(
            "{} ({}) {} {}: {}",
            exam.comm_name(key.0),
            exam.members[key.0].0,
            key.1,
            key.2,
            parts.join("; ")
        )
    };
    all.into_iter().map(line).collect()
}

/// True for a GPU or a link at fault where several communicators have operations that stand still, or of which no record says
/// that they ended, in the same step, and none of these is timed: no record tells with which it began.
fn is_anywhere(p: &Planted, happened: &[Stay], until: u64) -> bool {
    if !matches!(p.kind, FaultKind::GpuOccupied | FaultKind::LinkBroken | FaultKind::DataStuck) {
        return false;
    }
    let open = open_at_end(happened, until);
    let open = || open.values().flatten();
    let is_told = |s: &Stay| s.timed || s.by_launch;
    if open().any(|s| is_told(s)) {
        return false;
    }
    let mut first_ns: BTreeMap<u32, u64> = BTreeMap::new();
    for s in open() {
        let known = first_ns.entry(s.rank).or_insert(s.issued_ns);
        *known = s.issued_ns.min(*known);
    }
    // The last operation of each rank in each communicator before the first that is open.
    let mut last: BTreeMap<(u32, usize), &Stay> = BTreeMap::new();
    for s in happened.iter().filter(|s| first_ns.get(&s.rank).is_some_and(|t| s.issued_ns < *t)) {
        last.entry((s.rank, s.comm))
            .and_modify(|l| *l = if l.issued_ns < s.issued_ns { s } else { l })
            .or_insert(s);
    }
    // A later operation of its stream starts when it has ended.
    let is_later = |l: &Stay, s: &Stay| (l.rank, l.stream) == (s.rank, s.stream) && l.ticket >= s.ticket;
    let is_proven =
        |s: &Stay| happened.iter().any(|l| is_later(l, s) && is_told(l) && l.started_ns.is_some());
    let is_recent = |s: &Stay| first_ns.get(&s.rank).is_some_and(|t| s.issued_ns + STEP_NS >= *t);
    let is_unproven = |s: &&&Stay| is_recent(s) && !is_proven(s);
    let unproven = last.values().filter(is_unproven).map(|s| s.comm);
    open().map(|s| s.comm).chain(unproven).collect::<BTreeSet<_>>().len() > 1
}

/// True for a standstill that leaves the same records as a pause of all hosts: all ranks issued what is open, and no GPU
/// time is taken of it. Of a replay that waits behind a kernel, the records are those of one that is never launched.
fn is_hidden(p: &Planted, exam: &Exam, happened: &[Stay], until: u64) -> bool {
    let occupied = p.kind == FaultKind::GpuOccupied;
    let may_be_hidden = occupied || matches!(p.kind, FaultKind::LinkBroken | FaultKind::DataStuck);
    let untold = |(key, parts): (&Key, &Vec<&Stay>)| {
        let all = match key.1 {
            Track::Pair(a, b) if a != b => 2,
            Track::Pair(..) => 1,
            _ => exam.members[key.0].1.len(),
        };
        let complete = parts.len() == all || occupied && key.1 == Track::Replay;
        complete && !parts.iter().any(|s| s.timed)
    };
    let open = open_at_end(happened, until);
    may_be_hidden && open.iter().all(untold)
}

/// Whether a culprit is a member of an operation: of a transfer, one of its two ends.
fn takes_part(p: &Planted, exam: &Exam, (comm, track, _): Key) -> bool {
    let members = &exam.members[comm].1;
    match track {
        Track::Pair(from, to) => {
            [from, to].iter().any(|r| members.get(r.0 as usize).is_some_and(|m| p.culprits.contains(m)))
        }
        _ => p.culprits.iter().any(|c| members.contains(c)),
    }
}

/// The open operations of which a culprit is a member, in the order in which it would have come by.
fn open_for<'a>(p: &Planted, exam: &Exam, happened: &'a [Stay], other: &[Stay], until: u64) -> Vec<Open<'a>> {
    let mut comes: BTreeMap<Key, u64> = BTreeMap::new();
    for s in happened.iter().chain(other).filter(|s| p.culprits.contains(&s.rank)) {
        comes.entry(s.key()).or_insert(s.issued_ns);
    }
    let mut mine: Vec<Open<'_>> = open_at_end(happened, until)
        .into_iter()
        .filter(|(key, _)| takes_part(p, exam, *key))
        // Replays and calls are different tracks; a fault of one is not looked for in the other.
        .filter(|(key, _)| p.kind != FaultKind::ReplaySkipped || key.1 == Track::Replay)
        .map(|(key, parts)| {
            let issued = parts.iter().map(|s| s.issued_ns).min().unwrap_or(0);
            let waits = parts.iter().filter(|s| !p.culprits.contains(&s.rank) || p.culprits.len() > 2);
            let began_ns = waits.filter_map(|s| s.started_ns).min().unwrap_or(issued + 1_000 * S);
            Open { key, comes_ns: comes.get(&key).copied().unwrap_or(issued), began_ns, parts }
        })
        .collect();
    mine.sort_by_key(|o| (o.comes_ns, o.key));
    mine
}

/// Where a fault holds the job first.
fn held(
    spec: &Spec,
    p: &Planted,
    exam: &Exam,
    happened: &[Stay],
    other: &[Stay],
    until: u64,
) -> Option<Held> {
    let sizes = &exam.members;
    let mine = open_for(p, exam, happened, other, until);
    let first = mine.first()?;
    // What stands still without this fault as well is not its work.
    if open_at_end(other, until).contains_key(&first.key) {
        return None;
    }
    let name = |o: &Open<'_>| (sizes[o.key.0].0, o.key.1, o.key.2);
    let many = if p.kind == FaultKind::CallsSwapped { 2 } else { 1 };
    let mut operations: BTreeSet<OpKey> = mine.iter().take(many).map(name).collect();
    // Others may wait for it in several at once: those of one launch, and those on other streams.
    let launches = |o: &Open<'_>| -> BTreeSet<_> {
        o.parts.iter().filter_map(|s| s.plan.map(|plan| (s.rank, plan))).collect()
    };
    let of_first = launches(first);
    operations.extend(mine.iter().filter(|o| !launches(o).is_disjoint(&of_first)).map(name));
    let earliest = mine.iter().map(|o| o.began_ns).min().unwrap_or(0);
    operations.extend(mine.iter().filter(|o| o.began_ns <= earliest + 20 * MS).map(name));
    if matches!(p.kind, FaultKind::Killed | FaultKind::Exits | FaultKind::NodeLost) {
        // What it was in does not end, and what it never called is what others wait for as well.
        operations.extend(never_called(p, &mine, first).into_iter().map(name));
    }
    if matches!(p.kind, FaultKind::CallSkipped | FaultKind::CallExtra) {
        operations.extend(shifted(p, happened));
    }
    // A wrong call is wrong before a GPU comes to it.
    let comm = p.fault.map(|at| exam.case.faults[at].comm.as_str());
    let named = |o: &&Open<'_>| exam.comm_name(o.key.0).split('/').next() == comm;
    operations.extend(mine.iter().find(named).map(name));
    // Of a wrong call the records of issued operations are enough.
    if let Some(call) = wrong_call(p, exam, happened) {
        operations = BTreeSet::from([call]);
    } else {
        let unproven: Vec<&Open<'_>> = unproven(p, &mine).collect();
        operations.extend(unproven.iter().map(|o| name(o)));
        // So are the others of the launch up to which nothing is timed.
        let last = unproven.last().map(|o| launches(o)).unwrap_or_default();
        operations.extend(mine.iter().filter(|o| !launches(o).is_disjoint(&last)).map(name));
        operations.extend(unproven_before(p, happened, first));
    }
    let all = first.parts.len() == sizes[first.key.0].1.len();
    let facts = if all { first.parts.iter().map(|s| s.issued_ns).max().unwrap_or(0) } else { 0 };
    // Hosts run ahead of their GPUs by seconds: nothing stands still until a GPU comes to it.
    let started = |of_culprits: bool| {
        let parts = mine.iter().filter(|o| operations.contains(&name(o))).flat_map(|o| &o.parts);
        parts.filter(move |s| p.culprits.contains(&s.rank) == of_culprits).filter_map(|s| s.started_ns).min()
    };
    // Where no GPU has come to it yet, nothing stands still.
    let by_facts = patience(spec, p.kind) == S;
    if !by_facts && started(false).or_else(|| started(true)).is_none() {
        return None;
    }
    let began = started(false).or_else(|| started(true)).unwrap_or(first.comes_ns);
    let is_first = |(_, track, order): &OpKey| *order == 0 && *track == Track::Collective;
    let at_work = |(comm, ..): &OpKey| exam.is_made_at_work(*comm);
    let start_ns = match () {
        () if !operations.iter().all(is_first) => 0,
        () if operations.iter().any(at_work) => STARTED_AT_WORK_NS,
        () => SLOW_START_NS,
    };
    let since_ns = began.max(first.comes_ns).max(facts).max(p.at_ns);
    Some(Held { operations, since_ns, start_ns })
}

/// The open operations that a culprit never called: the first one, and where GPU times cover neither that nor the first open
/// one, the first of each communicator and pair in the same step. Nothing shows in which of these others came to wait first.
fn never_called<'a>(p: &Planted, mine: &'a [Open<'a>], first: &Open<'_>) -> Vec<&'a Open<'a>> {
    let issued = |o: &Open<'_>| o.parts.iter().map(|s| s.issued_ns).min().unwrap_or(0);
    let is_timed = |o: &Open<'_>| o.parts.iter().any(|s| s.timed);
    let mut tracks = BTreeSet::new();
    let mut absent = mine.iter().filter(|o| !o.parts.iter().any(|s| p.culprits.contains(&s.rank)));
    let Some(next) = absent.next() else { return Vec::new() };
    tracks.insert((next.key.0, next.key.1));
    let is_alike = |o: &&Open<'_>| !(is_timed(first) || is_timed(o)) && issued(o) <= issued(first) + STEP_NS;
    let alike = absent.filter(is_alike).filter(|o| tracks.insert((o.key.0, o.key.1)));
    [next].into_iter().chain(alike).collect()
}

/// Where a rank has left out a call or made one more: of calls that are alike nobody can say which one it was, and the first
/// that differs from what the others called is the first that shows it.
fn shifted(p: &Planted, happened: &[Stay]) -> Vec<OpKey> {
    let collectives = || happened.iter().filter(|s| s.track == Track::Collective);
    let call = |s: &Stay| (s.func, s.count, s.root);
    let others: BTreeMap<Key, _> =
        collectives().filter(|s| !p.culprits.contains(&s.rank)).map(|s| (s.key(), call(s))).collect();
    let mut first: BTreeMap<usize, OpKey> = BTreeMap::new();
    for s in collectives().filter(|s| p.culprits.contains(&s.rank)) {
        if others.get(&s.key()).is_some_and(|o| *o != call(s)) {
            let known = first.entry(s.comm).or_insert((s.id, s.track, s.order));
            known.2 = known.2.min(s.order);
        }
    }
    first.into_values().collect()
}

/// The operation of a call that is wrong in itself.
fn wrong_call(p: &Planted, exam: &Exam, happened: &[Stay]) -> Option<OpKey> {
    let fault = exam.case.faults.get(p.fault?).filter(|f| f.change.is_some())?;
    let name_of = |comm: usize| exam.comm_name(comm);
    let own = |s: &&Stay| {
        p.culprits.contains(&s.rank) && name_of(s.comm).split('/').next() == Some(fault.comm.as_str())
    };
    happened.iter().filter(own).nth(fault.call).map(|s| (s.id, s.track, s.order))
}

/// The open operations up to the first one that is timed or that a culprit never called: where none before it is timed,
/// records cannot show at which of them the job stands still.
fn unproven<'a>(p: &Planted, mine: &'a [Open<'a>]) -> impl Iterator<Item = &'a Open<'a>> {
    let shows = |o: &Open<'_>| {
        o.parts.iter().any(|s| s.timed) || !o.parts.iter().any(|s| p.culprits.contains(&s.rank))
    };
    mine.iter().take(mine.iter().position(shows).map_or(mine.len(), |at| at + 1))
}

/// The operations of its communicator in the same step right before one that all ranks issued and that is not timed: nothing
/// proves that they ended.
fn unproven_before(p: &Planted, happened: &[Stay], first: &Open<'_>) -> BTreeSet<OpKey> {
    let is_absent = !first.parts.iter().any(|s| p.culprits.contains(&s.rank));
    // That a rank did not call it shows in its counts.
    if is_absent {
        return BTreeSet::new();
    }
    let mut unproven = BTreeSet::new();
    for last in &first.parts {
        let is_before =
            |s: &&Stay| (s.comm, s.rank) == (last.comm, last.rank) && s.issued_ns <= last.issued_ns;
        let before = || happened.iter().filter(is_before).filter(|s| s.key() != first.key);
        let proven_ns = before().filter(|s| s.timed).map(|s| s.issued_ns).max().unwrap_or(0);
        let from_ns = proven_ns.max(last.issued_ns.saturating_sub(STEP_NS));
        let of_step = before().filter(|s| s.track != Track::Replay && s.issued_ns > from_ns);
        unproven.extend(of_step.map(|s| (s.id, s.track, s.order)));
    }
    unproven
}

/// How soon a fault has to be found, in ns after it holds somebody.
fn patience(spec: &Spec, kind: FaultKind) -> u64 {
    let blind = spec.is_blind();
    match kind {
        FaultKind::Killed
        | FaultKind::Exits
        | FaultKind::OtherCount
        | FaultKind::OtherFunc
        | FaultKind::OtherType
        | FaultKind::OtherRoot
        | FaultKind::Aborted => S,
        FaultKind::NeverJoined => 10 * S,
        k if k.is_slow() => 10 * S,
        _ if blind => 11 * S,
        _ => 5 * S,
    }
}

/// Names under which a finding is right.
fn names(kind: FaultKind, reads_load: bool) -> &'static [Kind] {
    use Kind::{
        AbortedRank, ChangePoint, ChoiceDiffers, InterleavedCommunicators, Mismatch, MissingRank,
        MissingReplay, NotStarted, ReceiveWithoutSend, SendWithoutReceive, ShiftedOrder, SilentNode, SlowGpu,
        SlowNode, SlowPair, SlowTransfer, Straggler, StuckTransfer,
    };
    match kind {
        FaultKind::HostHangs | FaultKind::Stopped | FaultKind::Killed | FaultKind::Exits => {
            &[MissingRank, MissingReplay, SendWithoutReceive, ReceiveWithoutSend]
        }
        FaultKind::NodeLost => &[SilentNode, MissingRank, SendWithoutReceive, ReceiveWithoutSend],
        FaultKind::CallSkipped | FaultKind::CallExtra => {
            &[ShiftedOrder, Mismatch, MissingRank, InterleavedCommunicators]
        }
        FaultKind::CallsSwapped => &[InterleavedCommunicators, ShiftedOrder, Mismatch],
        FaultKind::OtherCount | FaultKind::OtherFunc | FaultKind::OtherType | FaultKind::OtherRoot => {
            &[Mismatch]
        }
        FaultKind::TransferSkipped => {
            &[SendWithoutReceive, ReceiveWithoutSend, MissingRank, Mismatch, InterleavedCommunicators]
        }
        FaultKind::DataStuck | FaultKind::LinkBroken => &[StuckTransfer, NotStarted],
        FaultKind::Aborted => &[AbortedRank],
        // Records alone do not tell a graph that is never launched from one that waits behind a kernel.
        FaultKind::GpuOccupied if !reads_load => &[NotStarted, StuckTransfer, MissingReplay],
        FaultKind::GpuOccupied => &[NotStarted, StuckTransfer],
        FaultKind::NeverJoined => &[MissingRank],
        FaultKind::ReplaySkipped => &[MissingReplay, MissingRank, InterleavedCommunicators],
        FaultKind::OtherChoice => &[ChoiceDiffers],
        FaultKind::LateOften | FaultKind::GpuSlow => &[Straggler, SlowGpu],
        // For a while the job stands still.
        FaultKind::LateOnce | FaultKind::Paused => {
            &[Straggler, MissingRank, MissingReplay, SendWithoutReceive, ReceiveWithoutSend]
        }
        FaultKind::NodeSlow => &[Straggler, SlowNode],
        FaultKind::PairSlow | FaultKind::NetworkSlow | FaultKind::NicSlow => {
            &[SlowPair, SlowNode, SlowTransfer, ChangePoint]
        }
    }
}

/// Whether a rank of `culprits` came last to an operation, as in a finding about late ranks: its GPU did, or its host called it
/// last.
pub(crate) fn came_last(happened: &[Stay], key: OpKey, culprits: &BTreeSet<u32>) -> bool {
    let parts = || happened.iter().filter(|s| (s.id, s.track, s.order) == key);
    let transfer = parts().any(|s| matches!(s.func, Func::Send | Func::Recv));
    let latest = parts().filter_map(|s| s.started_ns).max();
    let theirs = || parts().filter(|s| culprits.contains(&s.rank));
    let came = theirs().filter_map(|s| s.started_ns).max();
    let called_last = theirs().map(|s| s.issued_ns).max() == parts().map(|s| s.issued_ns).max();
    transfer || called_last || came.is_some_and(|t| latest.is_some_and(|l| t + MS >= l))
}
