//! Transfers between two ranks in the wait-for graph: those that one end did not issue, and those that both issued.

use super::super::Join;
use super::super::communicator::{Communicator, state_of};
use super::super::instance::{Instance, Part};
use super::super::waits::{Lack, Stall};
use super::{COUNTED, YOUNG_NS};
use crate::model::{BEYOND_MEMORY, OpState, Rank, Track};
use std::cell::LazyCell;
use std::collections::{BTreeMap, BTreeSet};

/// A send of which nothing is heard for so long after its receive ended, in ns, was not issued.
const NEWS_NS: u64 = 2_000_000_000;

/// The transfers of a communicator that cannot complete yet.
pub(super) struct Transfers {
    pub(super) stalls: Vec<Stall>,
    /// When a transfer is old enough to be looked at, though nothing changes.
    pub(super) due_ns: Option<u64>,
}

/// The transfers of a communicator that cannot complete yet. Younger ones are left out while a process runs.
pub(super) fn stalls(join: &Join, c: &Communicator, over: bool, now_ns: u64) -> Transfers {
    let mut all = unmatched(join, c, now_ns);
    all.stalls.extend(broken_off(join, c));
    // Of each pair the oldest in each direction: the later ones wait for it.
    let mut oldest: BTreeMap<Track, (u64, Vec<(Rank, u32)>)> = BTreeMap::new();
    for s in &all.stalls {
        let known = oldest.entry(s.track).or_insert_with(|| (s.order, s.lacking.clone()));
        known.0 = s.order.min(known.0);
    }
    let mut looked_at: BTreeSet<Track> = BTreeSet::new();
    let mut in_front: BTreeMap<Track, Stall> = BTreeMap::new();
    for (track, order, instance) in c.incomplete_transfers() {
        let Track::Pair(from, to) = track else { continue };
        let is_later = oldest.get(&track).is_some_and(|(o, _)| *o <= order);
        if from == to || instance.parts.len() < 2 || is_later || !looked_at.insert(track) {
            continue;
        }
        let issued = instance.parts.values().filter_map(|p| p.op.issued_ns).max();
        match issued.map(|t| t.saturating_add(YOUNG_NS)).filter(|t| !over && now_ns < *t) {
            Some(t) => all.due_ns = Some(all.due_ns.map_or(t, |d| d.min(t))),
            None => {
                let stall = issued_by_both(join, c, (from, to), (order, instance));
                // A rank that has not issued the later one either is told of by that.
                let known = oldest.get(&track).map(|(_, lacking)| lacking);
                in_front.extend(stall.filter(|s| known != Some(&s.lacking)).map(|s| (track, s)));
            }
        }
    }
    all.stalls.retain(|s| !in_front.contains_key(&s.track));
    all.stalls.extend(in_front.into_values());
    all
}

/// A transfer that both ends issued, where it is known that an end is in it. The other end is in it as well, or has not
/// started it: then its GPU is in something else.
fn issued_by_both(
    join: &Join,
    c: &Communicator,
    (from, to): (Rank, Rank),
    (order, instance): (u64, &Instance),
) -> Option<Stall> {
    let track = Track::Pair(from, to);
    let (mut waiting, mut lacking) = (Vec::new(), Vec::new());
    for rank in [from.min(to), from.max(to)] {
        let seat = c.seat(rank)?;
        let condition = join.roster.condition(seat.actor);
        if !condition.known || condition.unsure || condition.is_out() || seat.aborted {
            return None;
        }
        // Where not every record comes, the agent has to say that what was in flight has not ended since.
        if c.members().get(&rank)?.counted_by_beats && c.reported_done(track, rank).is_none() {
            return None;
        }
        let part: &Part = instance.parts.get(&rank)?;
        match state_of(Some(part), order, None, 0, || false) {
            OpState::Finished => {}
            OpState::Started | OpState::Progressing => waiting.push((rank, seat.actor)),
            OpState::Issued => lacking.push((rank, seat.actor)),
            OpState::NotIssued | OpState::Called | OpState::InDoubt => return None,
        }
    }
    let lack = if lacking.is_empty() { Lack::End } else { Lack::Start };
    (!waiting.is_empty()).then_some(Stall { comm: c.id, track, order, lack, waiting, lacking, queued: false })
}

/// Sends without their receives, and the reverse.
fn unmatched(join: &Join, c: &Communicator, now_ns: u64) -> Transfers {
    let mut out = Transfers { stalls: Vec::new(), due_ns: None };
    let queued_ns = LazyCell::new(|| queued_ns(c));
    for ((from, to), order, sent) in c.unmatched() {
        let (here, there) = if sent { (from, to) } else { (to, from) };
        let track = Track::Pair(from, to);
        // A rank that aborted the communicator waits for nobody in it.
        if c.seat(here).is_some_and(|s| s.aborted) {
            continue;
        }
        // Where not every record comes, counts alone tell that a receive waits; a send may be through without its receive.
        let by_beats = !sent && c.members().get(&here).is_some_and(|m| m.counted_by_beats);
        let part = c.instance(track, order).and_then(|i| i.parts.get(&here));
        // Operations of one communicator start in the order of their issue.
        let is_behind =
            |p: &Part| queued_ns.get(&here).is_some_and(|q| p.op.issued_ns.is_some_and(|t| t > *q));
        let waits_there = part.map_or(by_beats, |p| !p.finished && !is_behind(p));
        // Of a launch of several transfers NCCL tells when one has ended: without its send a receive has not, unless a later
        // one started. For a while the send's record may be on its way.
        let went_on = || {
            let later = c.instance(track, order.saturating_add(1)).and_then(|i| i.parts.get(&here));
            later.is_some_and(|p| p.finished || p.started_ns.is_some())
        };
        let ended_ns = part.filter(|p| !sent && p.finished && !went_on()).and_then(|p| p.ended_seen_ns);
        let believed_until_ns = ended_ns.map(|t| t.saturating_add(NEWS_NS));
        if let Some(t) = believed_until_ns.filter(|t| now_ns < *t) {
            out.due_ns = Some(out.due_ns.map_or(t, |d| d.min(t)));
        }
        let waits_there = waits_there || believed_until_ns.is_some_and(|t| now_ns >= t);
        let side = |rank: Rank| {
            let process = join.process(c.members().get(&rank)?.record.segment)?;
            // Transfers are counted by their records alone.
            let actor = c.seat(rank)?.actor;
            let missed = process.missed.contains_key(COUNTED) || process.missed.contains_key(BEYOND_MEMORY);
            let known = !process.unsure() && !missed;
            known.then_some((rank, actor))
        };
        if let (true, Some(w), Some(l)) = (waits_there, side(here), side(there)) {
            let (waiting, lacking) = (vec![w], vec![l]);
            let queued = part.is_some_and(|p| p.started_ns.is_none() && !p.is_silent());
            out.stalls.push(Stall { comm: c.id, track, order, lack: Lack::Issue, waiting, lacking, queued });
        }
    }
    out
}

/// When each rank issued its first transfer that its GPU has not started, host monotonic ns.
fn queued_ns(c: &Communicator) -> BTreeMap<Rank, u64> {
    let mut first: BTreeMap<Rank, u64> = BTreeMap::new();
    for (_, order, instance) in c.incomplete_transfers() {
        for (rank, part) in &instance.parts {
            if let (OpState::Issued, Some(t)) =
                (state_of(Some(part), order, None, 0, || false), part.op.issued_ns)
            {
                first.entry(*rank).and_modify(|f| *f = t.min(*f)).or_insert(t);
            }
        }
    }
    first
}

/// Transfers that both ends issued and that one of them, which is gone, stopped or aborted, will not finish. Of each pair the first in which
/// the other end is known to be; where nothing tells, the last that it may be in.
fn broken_off(join: &Join, c: &Communicator) -> Vec<Stall> {
    let mut known: BTreeMap<(Rank, Rank), Stall> = BTreeMap::new();
    let mut in_flight: BTreeMap<(Rank, Rank), Stall> = BTreeMap::new();
    let mut possible: BTreeMap<(Rank, Rank), Stall> = BTreeMap::new();
    let end = |rank: &Rank| {
        let seat = c.seat(*rank)?;
        let condition = join.roster.condition(seat.actor);
        // A rank that freed or aborted it waits for nobody in it.
        condition.known.then_some((seat.actor, condition.is_out() || seat.aborted || seat.through))
    };
    let by_beats = |r: &Rank| c.members().get(r).is_none_or(|m| m.counted_by_beats);
    for (track, order, instance) in c.incomplete_transfers() {
        let Track::Pair(from, to) = track else { continue };
        let open = |r: &Rank| instance.parts.get(r).is_some_and(|p| !p.finished);
        let broken = [(from, to), (to, from)].into_iter().find_map(|(here, there)| {
            let ((w, false), (l, true)) = (end(&here)?, end(&there)?) else { return None };
            (open(&here) && open(&there)).then_some(((here, w), (there, l)))
        });
        let Some((w, l)) = broken else { continue };
        let Some(part) = instance.parts.get(&w.0) else { continue };
        let (waiting, lacking) = (vec![w], vec![l]);
        let queued = !part.is_in_it() && !part.is_silent();
        let stall = Stall { comm: c.id, track, order, lack: Lack::Issue, waiting, lacking, queued };
        if part.is_in_it() && !by_beats(&w.0) {
            known.entry((from, to)).or_insert(stall);
        } else if part.is_in_it() {
            // The record may be older than its end: the last of them is the likeliest.
            in_flight.insert((from, to), stall);
        } else if (part.is_silent() || by_beats(&w.0)) && !c.seat(l.0).is_some_and(|s| s.aborted) {
            // A job may abort its communicators when it is through with its transfers.
            possible.insert((from, to), stall);
        }
    }
    possible.extend(in_flight);
    possible.extend(known);
    possible.into_values().collect()
}
