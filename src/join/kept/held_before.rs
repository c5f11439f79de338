//! What keeps a GPU from an operation that it issued and does not start: an earlier one of which nothing reports that it is
//! finished.
//!
//! GPUs mostly run what a host issues in its order, whatever the communicator. So a rank that does not start an operation,
//! and is not known to wait, may be in one that it issued before. That one cannot end where another rank waits in something
//! that it issued earlier still.

use super::super::Join;
use super::super::communicator::Communicator;
use super::super::instance::{Instance, Part};
use super::super::waits::{Lack, Stall};
use super::behind::At;
use crate::model::{CommId, Rank, Track};
use std::collections::HashMap;
use std::sync::Arc;

/// Operations that are looked at in one solving of the graph: a job with more is explained in part.
const LOOKED_AT: usize = 65_536;

/// A rank whose GPU does not start an operation, by its process's number in the graph, and that operation.
struct Idle {
    comm: CommId,
    rank: Rank,
    actor: u32,
    at: At,
}

/// What each process waits in: of several, what it issued first.
#[derive(Default)]
struct Waiting(HashMap<u32, At>);

impl Waiting {
    fn add(&mut self, actor: u32, at: At) {
        let known = self.0.entry(actor).or_insert(at);
        if at.is_before(*known) {
            *known = at;
        }
    }

    /// True where a process waits in something that it issued before this part.
    fn is_before(&self, actor: u32, part: &Part) -> bool {
        self.0.get(&actor).zip(At::of(part)).is_some_and(|(known, at)| known.is_before(at))
    }
}

/// More operations that cannot complete: each is where a rank is that does not start an operation of `known`.
pub(super) fn stalls(join: &Join, known: &[Arc<Stall>]) -> Vec<Stall> {
    let part =
        |s: &Stall, rank: Rank| join.communicator(s.comm)?.instance(s.track, s.order)?.parts.get(&rank);
    let may_be_idle = |s: &&Arc<Stall>| s.lack == Lack::Start && !s.waiting.is_empty();
    if !known.iter().any(|s| may_be_idle(&s)) {
        return Vec::new();
    }
    let mut waiting = Waiting::default();
    for s in known.iter().filter(|s| !s.queued) {
        let at = |rank: Rank| part(s, rank).and_then(At::of);
        s.waiting
            .iter()
            .filter_map(|(r, actor)| Some((*actor, at(*r)?)))
            .for_each(|(a, at)| waiting.add(a, at));
    }
    let mut idle: Vec<Idle> = Vec::new();
    for s in known.iter().filter(may_be_idle) {
        for (rank, actor) in s.lacking.iter().filter(|(_, a)| !waiting.0.contains_key(a)) {
            if let Some(at) = part(s, *rank).and_then(At::of) {
                idle.push(Idle { comm: s.comm, rank: *rank, actor: *actor, at });
            }
        }
    }
    let mut found = Vec::new();
    let mut room = LOOKED_AT;
    loop {
        let before = found.len();
        idle.retain(|i| {
            let Some((stall, at)) = held(join, i, &waiting, &mut room) else { return true };
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
fn held(join: &Join, idle: &Idle, waiting: &Waiting, room: &mut usize) -> Option<(Stall, At)> {
    let segment = join.communicator(idle.comm)?.members().get(&idle.rank)?.record.segment;
    let mut first: Option<(Stall, At)> = None;
    for (comm, rank) in join.roster.seats(segment) {
        let Some(c) = join.communicator(*comm) else { continue };
        if c.seat(*rank).is_none_or(|s| s.actor != idle.actor) {
            continue;
        }
        for (track, order, instance) in c.open() {
            *room = room.checked_sub(1)?;
            let Some(part) =
                instance.parts.get(rank).filter(|p| !p.finished && (p.is_silent() || p.is_in_it()))
            else {
                continue;
            };
            let Some(at) = At::of(part).filter(|at| at.is_before(idle.at)) else { continue };
            if first.as_ref().is_some_and(|(_, known)| !at.is_before(*known)) {
                continue;
            }
            let lacking = lacking(join, c, (track, instance), *rank, waiting);
            if !lacking.is_empty() {
                let waiting = vec![(*rank, idle.actor)];
                let lack = Lack::Start;
                first =
                    Some((Stall { comm: *comm, track, order, lack, waiting, lacking, queued: false }, at));
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
