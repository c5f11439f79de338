//! Transfers between two ranks in the wait-for graph: those that one end did not issue, and those that both issued.

use super::super::graph::{Stall, WaitingFor};
use super::YOUNG_NS;
use super::behind;
use super::launches::{Held, Launches, NEWS_NS};
use crate::join::Join;
use crate::join::communicator::{Communicator, state_of};
use crate::join::instance::{Instance, IssuedAt, Part};
use crate::model::{OpState, Rank, Track};
use std::collections::{BTreeMap, BTreeSet};

/// The transfers of a communicator that cannot complete yet.
pub(super) struct Transfers {
    pub(super) stalls: Vec<Stall>,
    /// When a transfer is old enough to be looked at, though nothing changes.
    pub(super) due_ns: Option<u64>,
}

/// The transfers of a communicator that cannot complete yet. Younger ones are left out while a process runs.
pub(super) fn stalls(join: &Join, c: &Communicator, over: bool, now_ns: u64) -> Transfers {
    let launches = Launches::of(c);
    let mut all = unmatched(join, c, &launches, now_ns);
    all.stalls.extend(broken_off(join, c, &launches));
    // Of each pair the oldest in each direction: the later ones wait for it.
    let mut oldest: BTreeMap<Track, (u64, Vec<(Rank, u32)>)> = BTreeMap::new();
    for s in &all.stalls {
        let known = oldest.entry(s.track).or_insert_with(|| (s.order, s.lacking.clone()));
        known.0 = s.order.min(known.0);
    }
    let mut looked_at: BTreeSet<Track> = BTreeSet::new();
    let mut in_front: Vec<Held> = Vec::new();
    for (track, order, instance) in c.incomplete_transfers() {
        let Track::Pair(from, to) = track else { continue };
        let is_later = oldest.get(&track).is_some_and(|(o, _)| *o <= order);
        if from == to || instance.parts.len() < 2 || is_later || looked_at.contains(&track) {
            continue;
        }
        let issued = instance.parts.values().filter_map(|p| p.op.issued_ns).max();
        match issued.map(|t| t.saturating_add(YOUNG_NS)).filter(|t| !over && now_ns < *t) {
            Some(t) => {
                looked_at.insert(track);
                earliest(&mut all.due_ns, t);
            }
            None => {
                let may_run = |over: Rank, lacks: Rank| {
                    let due_ns = &mut all.due_ns;
                    if !is_said_to_be_over(c, &launches, (track, order, over), now_ns, due_ns) {
                        return false;
                    }
                    // Other communicators may tell soon that it goes on.
                    earliest(due_ns, now_ns.saturating_add(NEWS_NS));
                    !goes_on(join, c, (track, order), over, lacks)
                };
                let held = issued_by_both(join, c, (from, to), (order, instance), &launches, may_run);
                // Its rank waits in a later transfer of the pair.
                if !held.as_ref().is_some_and(|h| h.is_past) {
                    looked_at.insert(track);
                }
                // A rank that has not issued the later one either is told of by that.
                let known = oldest.get(&track).map(|(_, lacking)| lacking);
                in_front.extend(held.filter(|h| known != Some(&h.stall.lacking)));
            }
        }
    }
    let in_front = launches.settle(&all.stalls, in_front);
    let tracks: BTreeSet<Track> = in_front.iter().map(|s| s.track).collect();
    all.stalls.retain(|s| !tracks.contains(&s.track));
    all.stalls.extend(in_front);
    let actor = |rank: Rank| {
        let seat = c.seat(rank)?;
        let condition = join.roster.condition(seat.actor);
        (condition.known && !condition.unsure && !condition.is_out() && !seat.aborted).then_some(seat.actor)
    };
    let behind = behind::stalls(c, &launches, &all.stalls, actor);
    all.stalls.extend(behind);
    all
}

/// A transfer that both ends issued, where it is known that an end is in it. The other end is in it as well, or has not
/// started it: then its GPU is in something else.
fn issued_by_both(
    join: &Join,
    c: &Communicator,
    (from, to): (Rank, Rank),
    (order, instance): (u64, &Instance),
    launches: &Launches<'_>,
    may_run: impl FnOnce(Rank, Rank) -> bool,
) -> Option<Held> {
    let track = Track::Pair(from, to);
    let (mut waiting, mut lacking, mut over) = (Vec::new(), Vec::new(), None);
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
            OpState::Finished => over = Some((rank, seat.actor)),
            OpState::Started | OpState::Progressing => waiting.push((rank, seat.actor)),
            // Its stamps were lost.
            OpState::Issued if launches.has_begun(rank, part) => return None,
            OpState::Issued => lacking.push((rank, seat.actor)),
            OpState::NotIssued | OpState::Called | OpState::InDoubt => return None,
        }
    }
    let lack = if lacking.is_empty() { WaitingFor::End } else { WaitingFor::Start };
    // Without its other end it is not over.
    if let (Some((here, _)), [(there, _)]) = (over, lacking.as_slice())
        && may_run(here, *there)
    {
        waiting.extend(over.take());
    }
    if waiting.is_empty() {
        return None;
    }
    let stall = Stall { comm: c.id, track, order, lack, waiting, lacking, queued: false };
    launches.held(stall, over, instance)
}

/// Takes a moment, if it is the first one.
fn earliest(due_ns: &mut Option<u64>, t: u64) {
    *due_ns = Some(due_ns.map_or(t, |d| d.min(t)));
}

/// True where only its stamps say that an end of a transfer is over, which lacks the other end. For a while after them that
/// one's record may be on its way.
fn is_said_to_be_over(
    c: &Communicator,
    launches: &Launches<'_>,
    (track, order, rank): (Track, u64, Rank),
    now_ns: u64,
    due_ns: &mut Option<u64>,
) -> bool {
    let believed_until_ns = launches.may_run_since(track, order, rank).map(|t| t.saturating_add(NEWS_NS));
    believed_until_ns.filter(|t| now_ns < *t).into_iter().for_each(|t| earliest(due_ns, t));
    believed_until_ns.is_some_and(|t| now_ns >= t) || c.reported_to_run(track, order, rank)
}

/// True where the GPU of an end without stamps goes on, in any communicator, long after the other end of its transfer was over:
/// its stamps were lost. Streams of one GPU are taken to wait for each other.
fn goes_on(join: &Join, c: &Communicator, (track, order): (Track, u64), over: Rank, lacks: Rank) -> bool {
    let ended_ns = c.instance(track, order).and_then(|i| i.parts.get(&over)?.ended_seen_ns);
    let newest_ns = c
        .members()
        .get(&lacks)
        .zip(c.seat(lacks))
        .and_then(|(m, seat)| join.newest_start_ns(m.record.segment, seat.actor));
    ended_ns.zip(newest_ns).is_some_and(|(ended, newest)| newest > ended.saturating_add(NEWS_NS))
}

/// Sends without their receives, and the reverse.
fn unmatched(join: &Join, c: &Communicator, launches: &Launches<'_>, now_ns: u64) -> Transfers {
    let mut out = Transfers { stalls: Vec::new(), due_ns: None };
    for ((from, to), order, sent) in c.unmatched() {
        let (here, there) = if sent { (from, to) } else { (to, from) };
        let track = Track::Pair(from, to);
        // A rank that aborted the communicator waits for nobody in it.
        if c.seat(here).is_some_and(|s| s.aborted) {
            continue;
        }
        // Where not every record comes, counts alone tell that a receive waits; a send may be through without its receive.
        let by_beats = !sent && c.members().get(&here).is_some_and(|m| m.counted_by_beats);
        let part_of = |order| c.instance(track, order).and_then(|i| i.parts.get(&here));
        let is_in = |p: &Part| !p.finished && !launches.is_behind(here, p);
        let mut waits_in = part_of(order).map_or(by_beats, is_in).then_some(order);
        if waits_in.is_none()
            && is_said_to_be_over(c, launches, (track, order, here), now_ns, &mut out.due_ns)
        {
            waits_in = Some(order);
        }
        // A send that is through leaves its sender in a later one.
        let later =
            || c.incomplete_of(track).find(|(o, i)| *o > order && i.parts.get(&here).is_some_and(is_in));
        let Some(order) = waits_in.or_else(|| Some(later()?.0)) else { continue };
        let part = part_of(order);
        let issued_ns = part.and_then(|p| p.op.issued_ns).unwrap_or(0);
        let queued = part.is_some_and(|p| !p.finished && p.started_ns.is_none() && !p.is_silent());
        let place = (c, track, order);
        out.stalls.extend(not_issued(join, place, (here, there), issued_ns).map(|s| Stall { queued, ..s }));
    }
    out
}

/// A transfer that one end issued at a moment, and the other end did not, where the counts of both can be relied on.
fn not_issued(
    join: &Join,
    (c, track, order): (&Communicator, Track, u64),
    (here, there): (Rank, Rank),
    issued_ns: u64,
) -> Option<Stall> {
    let side = |rank: Rank| {
        let process = join.process(c.members().get(&rank)?.record.segment)?;
        // Transfers are counted by their records alone.
        let actor = c.seat(rank)?.actor;
        let known = !process.unsure() && !process.may_lack_since(issued_ns);
        known.then_some((rank, actor))
    };
    let (waiting, lacking) = (vec![side(here)?], vec![side(there)?]);
    Some(Stall { comm: c.id, track, order, lack: WaitingFor::Issue, waiting, lacking, queued: false })
}

/// The last sends of a rank, where stamps say that they are over and the other end did not issue the receive. Such a send may
/// still run: of a launch of several transfers NCCL reports one end when any of them has ended. Each comes with its issue.
pub(super) fn unreceived(join: &Join, c: &Communicator, rank: Rank) -> Vec<(Stall, IssuedAt)> {
    let mut all = c.unmatched().filter(|((from, _), _, sent)| *sent && *from == rank).peekable();
    if all.peek().is_none() {
        return Vec::new();
    }
    let launches = Launches::of(c);
    let stall = |((from, to), order, _)| {
        let track = Track::Pair(from, to);
        let part = c.instance(track, order)?.parts.get(&from)?;
        if launches.last_ended_ns(track, order, from).is_none() && !c.reported_newest(from, to, order) {
            return None;
        }
        let stall = not_issued(join, (c, track, order), (from, to), part.op.issued_ns?)?;
        part.op.launch().is_known().then_some((stall, part.issued_at()?))
    };
    all.filter_map(stall).collect()
}

/// Transfers that both ends issued and that one of them, which is gone, stopped or aborted, will not finish. Of each pair the
/// first in which the other end is known to be, else the first that its GPU has not started; where nothing tells, the last that
/// it may be in.
fn broken_off(join: &Join, c: &Communicator, launches: &Launches<'_>) -> Vec<Stall> {
    let mut known: BTreeMap<(Rank, Rank), Stall> = BTreeMap::new();
    let mut in_flight: BTreeMap<(Rank, Rank), Stall> = BTreeMap::new();
    let mut not_started: BTreeMap<(Rank, Rank), Stall> = BTreeMap::new();
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
        // NCCL may have told the end of another transfer of its launch.
        let may_run = |here: &Rank, there: &Rank| {
            let is_queued = |p: &Part| !p.is_silent() && p.started_ns.is_none();
            instance.parts.get(there).is_some_and(is_queued)
                && launches.may_run_since(track, order, *here).is_some()
        };
        let broken = [(from, to), (to, from)].into_iter().find_map(|(here, there)| {
            let ((w, false), (l, true)) = (end(&here)?, end(&there)?) else { return None };
            ((open(&here) || may_run(&here, &there)) && open(&there)).then_some(((here, w), (there, l)))
        });
        let Some((w, l)) = broken else { continue };
        let Some(part) = instance.parts.get(&w.0) else { continue };
        // What started since then waited for it.
        if part.started_ns.is_some() && !launches.is_newest(w.0, part) {
            continue;
        }
        let (waiting, lacking) = (vec![w], vec![l]);
        let is_in_it = part.is_in_it() || part.finished;
        let queued = !is_in_it && !part.is_silent();
        let stall = Stall { comm: c.id, track, order, lack: WaitingFor::Issue, waiting, lacking, queued };
        if is_in_it && !by_beats(&w.0) {
            known.entry((from, to)).or_insert(stall);
        } else if is_in_it {
            // The record may be older than its end: the last of them is the likeliest.
            in_flight.insert((from, to), stall);
        } else if queued && !by_beats(&w.0) {
            not_started.entry((from, to)).or_insert(stall);
        } else if (part.is_silent() || by_beats(&w.0)) && !c.seat(l.0).is_some_and(|s| s.aborted) {
            // A job may abort its communicators when it is through with its transfers.
            possible.insert((from, to), stall);
        }
    }
    possible.extend(not_started);
    possible.extend(in_flight);
    possible.extend(known);
    possible.into_values().collect()
}
