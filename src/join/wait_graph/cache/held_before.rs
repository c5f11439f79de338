//! The reason why a GPU does not start an operation that it issued: an earlier one of which nothing reports that it is
//! finished.
//!
//! GPUs mostly run what a host issues in its order, whatever the communicator. So a rank that does not start an operation,
//! and is not known to wait, may be in one that it issued before. That one cannot end where another rank waits in something
//! that it issued earlier still.

use super::super::graph::{Stall, WaitingFor};
use super::waiting::Waiting;
use super::{aborted_in, common_cause, transfers};
use crate::join::Join;
use crate::join::communicator::Communicator;
use crate::join::instance::{Instance, IssuedAt, Part};
use crate::model::{CommId, Rank, Track};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Operations that are looked at in one solving of the graph: a job with more is explained in part.
const LOOKED_AT: usize = 65_536;

/// An operation that more ranks lack is looked at as a whole.
pub(super) const FEW: usize = 64;

/// A rank whose GPU does not start an operation, by its process's number in the graph, and that operation.
struct Idle {
    comm: CommId,
    rank: Rank,
    actor: u32,
    at: IssuedAt,
}

fn part<'a>(join: &'a Join, s: &Stall, rank: Rank) -> Option<&'a Part> {
    join.communicator(s.comm)?.instance(s.track, s.order)?.parts.get(&rank)
}

/// The processes that operations lack and that wait in nothing that they issued before, each with one of its ranks.
fn roots(join: &Join, known: &[Arc<Stall>], waiting: &Waiting) -> BTreeMap<u32, (CommId, Rank)> {
    let mut roots = BTreeMap::new();
    for s in known.iter().filter(|s| !s.is_unseen() && s.lacking.len() <= FEW) {
        for (rank, actor) in &s.lacking {
            let is_free = match (s.lack, part(join, s, *rank).and_then(Part::issued_at)) {
                (WaitingFor::Start, Some(at)) => waiting.is_nowhere_before(*actor, at),
                _ => !waiting.first.contains_key(actor),
            };
            if is_free && !join.roster.condition(*actor).is_out() {
                roots.entry(*actor).or_insert((s.comm, *rank));
            }
        }
    }
    roots
}

/// The first operations in which processes wait.
fn waiting(join: &Join, known: &[Arc<Stall>]) -> Waiting {
    let mut waiting = Waiting::default();
    for s in known.iter().filter(|s| !s.queued) {
        for (rank, actor) in &s.waiting {
            let at = part(join, s, *rank).and_then(Part::issued_at);
            at.into_iter().for_each(|at| waiting.add(*actor, at));
            // A graph's operations are recorded when a GPU comes to them, not when the host launches the graph.
            if at.is_none() || s.track == Track::Replay {
                waiting.unknown.insert(*actor);
            }
        }
    }
    waiting
}

/// True where a rank has not started this operation nor a later one of its track: the stamps of one may be lost.
fn is_queued(join: &Join, s: &Stall, rank: Rank) -> bool {
    let Some(c) = join.communicator(s.comm).filter(|_| s.track != Track::Replay) else { return false };
    let waits = |i: &Instance| {
        i.parts.get(&rank).is_some_and(|p| !p.is_silent() && !p.finished && p.started_ns.is_none())
    };
    c.instance(s.track, s.order).is_some_and(waits)
        && c.incomplete_of(s.track).rev().take_while(|(o, _)| *o > s.order).any(|(_, i)| waits(i))
}

/// The same stalls, for the graph: a process that does not start an operation, though all that it waits in was issued later,
/// is held there by nothing that is known. It counts as another process, which waits for nothing. `None` without such.
pub(super) fn set_apart(join: &Join, known: &[Arc<Stall>], processes: usize) -> Option<Vec<Arc<Stall>>> {
    let is_start = |s: &Arc<Stall>| s.lack == WaitingFor::Start && s.lacking.len() <= FEW;
    if !known.iter().any(is_start) {
        return None;
    }
    let waiting = waiting(join, known);
    let aborted: BTreeSet<u32> = known.iter().flat_map(|s| aborted_in(join, s)).collect();
    let is_apart = |s: &Stall, (rank, actor): (Rank, u32)| {
        if aborted.contains(&actor) {
            return false;
        }
        let at = part(join, s, rank).and_then(Part::issued_at);
        at.is_some_and(|at| waiting.is_after(actor, at)) && is_queued(join, s, rank)
    };
    let mut any = false;
    let mut set_apart = |s: &Arc<Stall>| {
        if !is_start(s) || !s.lacking.iter().any(|l| is_apart(s, *l)) {
            return Arc::clone(s);
        }
        any = true;
        let mut stall = Stall::clone(s);
        for (rank, actor) in &mut stall.lacking {
            if is_apart(s, (*rank, *actor)) {
                *actor += processes as u32;
            }
        }
        Arc::new(stall)
    };
    let all = known.iter().map(&mut set_apart).collect();
    any.then_some(all)
}

fn may_be_idle(s: &Stall) -> bool {
    s.lack == WaitingFor::Start && !s.waiting.is_empty()
}

/// Adds the operations in which ranks are that others wait for, as far as that follows from what stands still. Returns the
/// processes of which several operations would explain it.
pub(super) fn explain(join: &Join, known: &mut Vec<Arc<Stall>>) -> Vec<u32> {
    let of_few = known.iter().filter(|s| s.lacking.len() <= FEW);
    let lacked: BTreeSet<u32> = of_few.flat_map(|s| &s.lacking).map(|(_, p)| *p).collect();
    let waits: usize = known.iter().map(|s| s.waiting.len()).sum();
    let has_several = lacked.len() > 1 && waits <= LOOKED_AT;
    if !has_several && !known.iter().any(|s| may_be_idle(s)) {
        return Vec::new();
    }
    let mut waiting = waiting(join, known);
    let held = stalls(join, known, &mut waiting);
    known.extend(held.into_iter().map(Arc::new));
    if !has_several {
        return Vec::new();
    }
    let found = common_cause::find(join, &waiting, &roots(join, known, &waiting));
    known.extend(found.stalls.into_iter().map(Arc::new));
    found.unclear
}

/// More operations that cannot complete: each is where a rank is that does not start an operation of `known`. `waiting` learns
/// of them.
fn stalls(join: &Join, known: &[Arc<Stall>], waiting: &mut Waiting) -> Vec<Stall> {
    let mut first_idle: BTreeMap<u32, Idle> = BTreeMap::new();
    for s in known.iter().filter(|s| may_be_idle(s)) {
        for (rank, actor) in &s.lacking {
            let Some(at) = part(join, s, *rank).and_then(Part::issued_at) else { continue };
            if !waiting.is_nowhere_before(*actor, at) {
                continue;
            }
            if s.lacking.len() <= FEW && is_queued(join, s, *rank) {
                waiting.add_not_started(*actor, at);
            }
            if first_idle.get(actor).is_none_or(|known| at.is_before(known.at)) {
                first_idle.insert(*actor, Idle { comm: s.comm, rank: *rank, actor: *actor, at });
            }
        }
    }
    let mut idle: Vec<Idle> = first_idle.into_values().collect();
    let mut found = Vec::new();
    let mut room = LOOKED_AT;
    loop {
        let before = found.len();
        idle.retain(|i| {
            let Some((stall, at)) = held(join, i, waiting, &mut room) else { return true };
            waiting.add(i.actor, at);
            found.push(stall);
            false
        });
        if found.len() == before || room == 0 {
            return found;
        }
    }
}

/// The first operation that a rank issued before the one that it does not start, and that cannot end.
fn held(join: &Join, idle: &Idle, waiting: &Waiting, room: &mut usize) -> Option<(Stall, IssuedAt)> {
    let segment = join.communicator(idle.comm)?.members().get(&idle.rank)?.record.segment;
    let mut first: Option<(Stall, IssuedAt)> = None;
    for (comm, rank) in join.roster.seats(segment) {
        let Some(c) = join.communicator(*comm) else { continue };
        if c.seat(*rank).is_none_or(|s| s.actor != idle.actor) {
            continue;
        }
        for (track, order, instance) in c.open() {
            *room = room.checked_sub(1)?;
            let Some(part) = instance.parts.get(rank).filter(|p| !p.finished) else { continue };
            let Some(at) = part.issued_at().filter(|at| at.is_before(idle.at)) else { continue };
            if first.as_ref().is_some_and(|(_, known)| !at.is_before(*known)) {
                continue;
            }
            let lacking = lacking(join, c, (track, instance), *rank, waiting);
            if !lacking.is_empty() {
                let waiting = vec![(*rank, idle.actor)];
                let lack = WaitingFor::Start;
                first =
                    Some((Stall { comm: *comm, track, order, lack, waiting, lacking, queued: false }, at));
            }
        }
        for (stall, at) in transfers::unreceived(join, c, *rank) {
            if at.is_before(idle.at) && first.as_ref().is_none_or(|(_, known)| at.is_before(*known)) {
                first = Some((stall, at));
            }
        }
    }
    first
}

/// The ranks that issued an operation too, and wait in what they issued before it.
fn lacking(
    join: &Join,
    c: &Communicator,
    (track, instance): (Track, &Instance),
    rank: Rank,
    waiting: &Waiting,
) -> Vec<(Rank, u32)> {
    // Who has finished it proves that the others had come to it.
    if instance.parts.values().any(|p| p.finished && !p.op.func.is_rooted())
        && !matches!(track, Track::Pair(..))
    {
        return Vec::new();
    }
    let others = instance.parts.iter().filter(|(r, p)| **r != rank && !p.finished);
    let held = |(r, p): (&Rank, &Part)| {
        let actor = c.seat(*r)?.actor;
        let condition = join.roster.condition(actor);
        let counts = condition.known && !condition.unsure && !condition.is_out();
        (counts && !p.is_in_it() && waiting.is_before(actor, p)).then_some((*r, actor))
    };
    others.filter_map(held).collect()
}
