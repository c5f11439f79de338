//! Operations whose end nothing reports: they are not timed.
//!
//! Where they stand still, so does everything behind them. Two signs of that remain: a timed operation behind them that
//! starts nowhere, and hosts that issue nothing more.

use super::super::graph::{Stall, WaitingFor};
use super::parts;
use crate::join::Join;
use crate::join::communicator::{Communicator, state_of};
use crate::join::instance::Instance;
use crate::model::{OpState, Rank, Track};
use std::collections::BTreeMap;

/// Operations of a communicator that are looked through for one that is timed.
const QUEUE_MAX: usize = 2048;
/// Operations of a track that are looked through for a pause of the hosts.
const STEP_MAX: usize = 64;
/// A track of which the newest operation was issued so long before the newest of all, in ns, had no part in the last step.
const STEP_NS: u64 = 1_000_000_000;
/// Ranks that issued nothing for so long, in ns, may wait for what they issued.
const SILENT_NS: u64 = 2_000_000_000;

/// The untimed operations of a communicator that may stand still.
pub(super) struct Untimed {
    pub(super) stall: Option<Standstill>,
    /// When it has to be looked at again though nothing changes, host monotonic ns.
    pub(super) due_ns: Option<u64>,
}

/// An operation that may stand still though nothing was seen to wait in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Standstill {
    pub(super) stall: Stall,
    /// When the hosts issued the last operation of its step, host monotonic ns. Absent where a timed operation that started
    /// nowhere proves the standstill.
    newest_ns: Option<u64>,
}

/// The stalls of all communicators, less those that others make doubtful: of operations of the same processes the hosts
/// wait for those that they issued last.
pub(super) fn newest<'a>(all: impl Iterator<Item = &'a Standstill>) -> Vec<&'a Stall> {
    let mut proven: Vec<&Stall> = Vec::new();
    let mut last: BTreeMap<Vec<u32>, (u64, &Stall)> = BTreeMap::new();
    for Standstill { stall, newest_ns } in all {
        let Some(newest_ns) = *newest_ns else {
            proven.push(stall);
            continue;
        };
        let mut processes: Vec<u32> = stall.lacking.iter().map(|(_, p)| *p).collect();
        processes.sort_unstable();
        let known = last.entry(processes).or_insert((newest_ns, stall));
        if known.0 < newest_ns {
            *known = (newest_ns, stall);
        }
    }
    proven.extend(last.into_values().map(|(_, stall)| stall));
    proven
}

pub(super) fn stall(join: &Join, c: &Communicator, now_ns: u64) -> Untimed {
    if let Some(stall) = queued(join, c) {
        return Untimed { stall: Some(Standstill { stall, newest_ns: None }), due_ns: None };
    }
    let collectives = [Track::Collective, Track::Replay].into_iter().filter_map(|t| step_of(c, t, now_ns));
    let steps: Vec<Step> = collectives.chain(step_of_transfers(c, now_ns)).collect();
    // Whatever was issued last waits for nothing that comes after it.
    let Some(newest_ns) = steps.iter().map(|s| s.newest_ns).max() else {
        return Untimed { stall: None, due_ns: None };
    };
    let due_ns = newest_ns.saturating_add(SILENT_NS);
    if now_ns < due_ns {
        return Untimed { stall: None, due_ns: Some(due_ns) };
    }
    let of_it = steps.into_iter().filter(|s| s.newest_ns.saturating_add(STEP_NS) > newest_ns);
    let first = of_it.min_by_key(|s| (s.began_ns, s.track));
    let stall = first.and_then(|s| unproven(join, c, s));
    Untimed { stall: stall.map(|stall| Standstill { stall, newest_ns: Some(newest_ns) }), due_ns: None }
}

/// The untimed operations of a track that the hosts issued last, without a pause.
#[derive(Debug)]
struct Step {
    track: Track,
    /// The last of them; of transfers the first.
    order: u64,
    began_ns: u64,
    newest_ns: u64,
}

impl Step {
    /// From operations and when they were issued, newest first.
    fn of(issued: &[(Track, u64, u64)]) -> Option<Step> {
        let (newest_track, newest_order, newest_ns) = *issued.first()?;
        // Over the bus not every operation is known: those between two share the time.
        let pause_ns = |w: &[(Track, u64, u64)]| {
            let many = if w[0].0 == w[1].0 { w[0].1.saturating_sub(w[1].1).max(1) } else { 1 };
            w[0].2.saturating_sub(w[1].2) / many
        };
        let longest_ns = issued.windows(2).map(pause_ns).max().unwrap_or(0);
        let begin = issued.windows(2).find(|w| pause_ns(w) * 2 >= longest_ns).map(|w| w[0]);
        let (track, order, began_ns) = match newest_track {
            // Each replay is issued when the GPU comes to it.
            Track::Replay => (newest_track, newest_order, newest_ns),
            _ => begin.unwrap_or((newest_track, newest_order, newest_ns)),
        };
        let order = if track == Track::Collective { newest_order } else { order };
        Some(Step { track, order, began_ns, newest_ns })
    }
}

fn is_silent(instance: &Instance) -> bool {
    instance.parts.values().all(|p| !p.finished && p.is_silent())
}

/// When the last rank issued an operation, host monotonic ns. Times of hosts whose clocks are ahead are left out.
fn issued_ns(instance: &Instance, now_ns: u64) -> Option<u64> {
    instance.parts.values().filter_map(|p| p.op.issued_ns).filter(|t| *t <= now_ns).max()
}

/// The last step of collectives or replays; absent where not all ranks issued as many.
fn step_of(c: &Communicator, track: Track, now_ns: u64) -> Option<Step> {
    let issued = c.seats().first()?.issued(track).filter(|n| *n > 0)?;
    if c.seats().len() < c.expected() || c.seats().iter().any(|s| s.issued(track) != Some(issued)) {
        return None;
    }
    let open = || c.incomplete_of(track).rev();
    let (order, newest) = open().next()?;
    if order.checked_add(1) != Some(issued) || newest.parts.len() < c.expected() || !is_silent(newest) {
        return None;
    }
    let open = open().take(STEP_MAX).filter_map(|(order, i)| Some((track, order, issued_ns(i, now_ns)?)));
    Step::of(&open.collect::<Vec<_>>())
}

/// The last step of transfers that both ends issued.
fn step_of_transfers(c: &Communicator, now_ns: u64) -> Option<Step> {
    let open = c.incomplete_transfers().filter(|(_, _, i)| i.parts.len() >= 2 && is_silent(i));
    let mut issued: Vec<(Track, u64, u64)> =
        open.filter_map(|(track, order, i)| Some((track, order, issued_ns(i, now_ns)?))).collect();
    issued.sort_by_key(|(_, _, t)| std::cmp::Reverse(*t));
    issued.truncate(STEP_MAX);
    Step::of(&issued)
}

/// The operation that stands for a step. All ranks issued it, and nobody knows whether it is finished.
fn unproven(join: &Join, c: &Communicator, step: Step) -> Option<Stall> {
    let mut lacking: Vec<(Rank, u32)> = Vec::with_capacity(c.seats().len());
    for seat in c.seats() {
        let condition = join.roster.condition(seat.actor);
        if !condition.known || condition.unsure || condition.is_out() || seat.aborted || seat.through {
            return None;
        }
        lacking.push((seat.rank, seat.actor));
    }
    lacking.sort_unstable();
    let Step { track, order, .. } = step;
    Some(Stall {
        comm: c.id,
        track,
        order,
        lack: WaitingFor::Start,
        waiting: Vec::new(),
        lacking,
        queued: false,
    })
}

/// The first operation that all ranks issued, that is timed, and that started nowhere, behind operations that are
/// not timed and of which nobody knows whether they are done.
fn queued(join: &Join, c: &Communicator) -> Option<Stall> {
    let track = Track::Collective;
    let all = c.expected();
    let silent = |i: &Instance| i.parts.values().all(|p| p.op.timing.is_silent());
    let mut behind = false;
    let (order, instance) = c.incomplete_of(track).take(QUEUE_MAX).find(|(_, i)| {
        let silent = silent(i);
        behind |= silent;
        i.parts.len() >= all && !silent
    })?;
    if !behind || c.members().len() < all {
        return None;
    }
    let mut parts = parts(instance, all);
    let mut lacking = Vec::new();
    for (rank, m) in c.members() {
        let seat = c.seat(*rank)?;
        let condition = join.roster.condition(seat.actor);
        let part = parts.of_rank(*rank);
        let state = state_of(part, order, m.issued(track), seat.done(track), || m.finished == 0);
        if state != OpState::Issued || !condition.known || condition.unsure {
            return None;
        }
        lacking.push((*rank, seat.actor));
    }
    Some(Stall {
        comm: c.id,
        track,
        order,
        lack: WaitingFor::Start,
        waiting: Vec::new(),
        lacking,
        queued: false,
    })
}
