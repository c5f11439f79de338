//! The wait-for graph, kept up to date: rows are made anew for what changed, and for nothing else.
//!
//! What the join is fed marks the communicators that it says something about; a tick looks at these, and at
//! those whose oldest operation has just become old enough to be looked at.

use super::graph::{OpPhase, Origin, RankProgress, Stall, WaitGraph, WaitingFor, origins};
use super::stalls::Standstills;
use crate::join::Join;
use crate::join::communicator::{Communicator, state_of};
use crate::join::instance::{Instance, Part};
use crate::join::member::Seat;
use crate::model::{CommId, OpState, Rank, Track};
use held_before::FEW;
use std::cell::LazyCell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::iter::Peekable;
use std::sync::Arc;
use untimed::Standstill;

pub use launches::Launches;

mod behind;
mod common_cause;
mod held_before;
mod launches;
mod transfers;
mod untimed;
mod waiting;

#[cfg(test)]
mod tests;

/// Operations younger than this, in ns, are not looked at: all ranks of a healthy job are on their way to them.
const YOUNG_NS: u64 = 20_000_000;

/// Origins of standstills that are remembered in their operations.
const ORIGINS: usize = 64;

/// From so many times as many parts as ranks on, the parts are looked up one by one.
const SPARSE: usize = 16;

/// The records by which transfers are counted, as [`Update::Missed`](crate::model::Update::Missed) calls them.
pub(in crate::join) use crate::model::OPERATIONS as COUNTED;

/// The graph, and what its solving needs beside it.
#[derive(Debug, Clone, Default)]
pub(in crate::join) struct GraphCache {
    waits: WaitGraph,
    /// Since when the tables' operations stand still, where only their own records say so.
    since: BTreeMap<(CommId, Track, u64), u64>,
    /// Untimed operations, and timed ones behind them, which may stand still where nothing else does.
    queued: BTreeMap<CommId, Standstill>,
    /// All processes were gone when it was last looked at.
    over: bool,
    changed: bool,
    standing: Arc<Standstills>,
}

/// How old the oldest operation of a track is that is not complete.
enum Age {
    /// There is none, or nothing says when it was issued.
    None,
    /// It is to be looked at from this moment on.
    Young(u64),
    Old,
}

fn age(c: &Communicator, track: Track, over: bool, now_ns: u64) -> Age {
    let Some((_, oldest)) = c.incomplete_of(track).next() else { return Age::None };
    let is_old = |p: &Part| p.op.issued_ns.is_some_and(|t| over || now_ns.saturating_sub(t) >= YOUNG_NS);
    if oldest.parts.values().any(is_old) {
        return Age::Old;
    }
    oldest.began_ns().map_or(Age::None, |t| Age::Young(t.saturating_add(YOUNG_NS)))
}

impl GraphCache {
    /// True when a communicator has to be looked at.
    fn is_due(&self, c: &Communicator, over: bool, now_ns: u64) -> bool {
        over != self.over || c.stale || c.due_ns.is_some_and(|t| now_ns >= t)
    }

    /// Looks at a communicator again; returns when it has to be looked at next, though nothing changes.
    fn look(
        &mut self,
        join: &Join,
        c: &Communicator,
        (over, now_ns): (bool, u64),
        room: &mut Room,
    ) -> Option<u64> {
        self.changed = true;
        if c.closed() {
            self.forget(c.id);
            return None;
        }
        let mut due_ns = None;
        let mut is_due = |t: u64| due_ns = Some(due_ns.map_or(t, |d: u64| d.min(t)));
        for track in [Track::Collective, Track::Replay] {
            let rows = match age(c, track, over, now_ns) {
                Age::None => Vec::new(),
                Age::Young(t) => {
                    is_due(t);
                    Vec::new()
                }
                Age::Old => rows(join, c, track, over, room),
            };
            forget(&mut self.since, c.id, track);
            for stall in self.waits.replace(c.id, track, rows) {
                // What started nowhere goes by what else the communicator did.
                if !stall.is_unseen()
                    && let Some(t) = join.since_ns(stall)
                {
                    self.since.insert((c.id, track, stall.order), t);
                }
            }
        }
        // Operations say which stamps of transfers are believed, and transfers what is queued before an operation.
        let transfers = transfers::stalls(join, c, over, now_ns);
        transfers.due_ns.into_iter().for_each(&mut is_due);
        self.waits.replace_single(c.id, transfers.stalls);
        let untimed = untimed::stall(join, c, now_ns);
        untimed.due_ns.into_iter().for_each(is_due);
        match untimed.stall {
            Some(stall) => self.queued.insert(c.id, stall),
            None => self.queued.remove(&c.id),
        };
        due_ns
    }

    /// True when all processes were gone when it was last looked at.
    pub(in crate::join) fn is_over(&self) -> bool {
        self.over
    }

    /// Takes a communicator out.
    pub(in crate::join) fn forget(&mut self, comm: CommId) {
        // One that was freed was taken out before it is forgotten.
        self.changed |= self.waits.forget(comm);
        self.changed |= self.queued.remove(&comm).is_some();
        for track in [Track::Collective, Track::Replay] {
            forget(&mut self.since, comm, track);
        }
    }

    /// Solves it, if there is something new.
    fn solve(&mut self, join: &Join) {
        if !std::mem::take(&mut self.changed) {
            return;
        }
        // A rank that aborted a communicator is missed there first, and elsewhere because of that.
        let is_aborted = |s: &Stall| aborted_in(join, s).next().is_some();
        let since_ns = |s: &Stall| {
            let kept = self.since.get(&(s.comm, s.track, s.order)).copied();
            kept.or_else(|| join.since_ns(s)).unwrap_or(u64::MAX)
        };
        // Where all are gone, what they waited for is the question.
        let mut gone = if self.over { Vec::new() } else { join.roster.out(self.waits.processes()) };
        let mut stalls = self.waits.stalls();
        // A rank that has aborted a communicator in which others wait for it waits for nobody elsewhere.
        gone.extend(stalls.iter().flat_map(|s| aborted_in(join, s)));
        leave_out_unheard(join, &mut stalls);
        let unclear = held_before::explain(join, &mut stalls);
        let apart = held_before::set_apart(join, &stalls, self.waits.processes());
        let held = held_on_gpu(join, &stalls);
        let follows = |s: &Stall, since_ns: u64| {
            let is_held = |p: &u32| held.get(p).is_some_and(|issued_ns| *issued_ns <= since_ns);
            s.lack == WaitingFor::Issue && s.lacking.iter().all(|(_, p)| is_held(p))
        };
        let since = |s: &Stall| {
            let since_ns = since_ns(s);
            (!is_aborted(s), follows(s, since_ns), since_ns)
        };
        let origins_known = origins(apart.as_deref().unwrap_or(&stalls), since, &gone);
        // Ranks that are known to wait elsewhere are not in what is not timed.
        let mut waiting: Vec<bool> = Vec::new();
        if !self.queued.is_empty() {
            let processes = stalls.iter().map(|s| s.processes()).max().unwrap_or(0);
            waiting.resize(processes, false);
            let in_it = stalls.iter().filter(|s| !s.queued).flat_map(|s| &s.waiting);
            in_it.for_each(|(_, p)| waiting[*p as usize] = true);
        }
        let is_waiting = |p: u32| waiting.get(p as usize).is_some_and(|w| *w);
        let is_free = |s: &&Standstill| !s.stall.lacking.iter().any(|(_, p)| is_waiting(*p));
        let queued = untimed::newest(self.queued.values().filter(is_free));
        let queued: Vec<Arc<Stall>> = queued.into_iter().cloned().map(Arc::new).collect();
        let known = stalls.len();
        let mut untimed = origins(&queued, |s| (!is_aborted(s), since_ns(s)), &[]);
        untimed.iter_mut().for_each(|o| o.shift(known));
        stalls.extend(queued);
        self.standing = Arc::new(Standstills { stalls, origins: origins_known, untimed, unclear });
    }
}

/// The processes of ranks that an operation lacks and that have aborted its communicator.
fn aborted_in<'a>(join: &'a Join, s: &'a Stall) -> impl Iterator<Item = u32> {
    let comm = join.communicator(s.comm).filter(|c| c.was_aborted);
    comm.into_iter().flat_map(|c| {
        let has = |(r, _): &&(Rank, u32)| c.seat(*r).is_some_and(|seat| seat.aborted);
        s.lacking.iter().filter(has).map(|(_, p)| *p)
    })
}

/// Running processes whose GPUs do not start an operation in which others are seen to wait, each with the moment at which it
/// issued the first one. A host that waits for its GPU issues nothing more, and others wait for that as well.
fn held_on_gpu(join: &Join, stalls: &[Arc<Stall>]) -> HashMap<u32, u64> {
    let mut held = HashMap::new();
    let is_of_few =
        |s: &&Arc<Stall>| s.lack == WaitingFor::Start && !s.waiting.is_empty() && s.lacking.len() <= FEW;
    for s in stalls.iter().filter(is_of_few) {
        let Some(instance) = join.communicator(s.comm).and_then(|c| c.instance(s.track, s.order)) else {
            continue;
        };
        for (rank, p) in s.lacking.iter().filter(|(_, p)| !join.roster.condition(*p).is_out()) {
            let Some(issued_ns) = instance.parts.get(rank).and_then(|part| part.op.issued_ns) else {
                continue;
            };
            let first = held.entry(*p).or_insert(issued_ns);
            *first = issued_ns.min(*first);
        }
    }
    held
}

/// Leaves out operations of which nobody told that ranks started or ended them, as where a process is stopped, and which these
/// ranks have left behind: they are lacking elsewhere.
fn leave_out_unheard(join: &Join, stalls: &mut Vec<Arc<Stall>>) {
    if !stalls.iter().any(|s| s.lack != WaitingFor::Issue) {
        return;
    }
    let not_issued = stalls.iter().filter(|s| s.lack == WaitingFor::Issue).flat_map(|s| &s.lacking);
    let lacks: HashSet<u32> = not_issued.map(|(_, p)| *p).collect();
    let are_all_through = |s: &Stall, instance: &Instance| {
        let is_in = |r: &Rank| s.waiting.iter().any(|(w, _)| w == r);
        // A stopped process reports no end at all, so that the others' ends count for a rooted operation as well.
        let are_out = s.waiting.iter().all(|(_, p)| join.roster.condition(*p).is_out());
        let is_through =
            |(r, p): (&Rank, &Part)| is_in(r) || p.finished && (are_out || !p.op.func.is_rooted());
        instance.parts.len() > s.waiting.len() && instance.parts.iter().all(is_through)
    };
    stalls.retain(|s| {
        let held_up_by = match s.lack {
            WaitingFor::Issue => return true,
            WaitingFor::Start => &s.lacking,
            WaitingFor::End => &s.waiting,
        };
        let Some(c) = join.communicator(s.comm) else { return true };
        let Some(instance) = c.instance(s.track, s.order) else { return true };
        let lack_elsewhere = held_up_by.iter().all(|(_, p)| lacks.contains(p));
        let is_past = |(r, _): &(Rank, u32)| instance.parts.get(r).is_some_and(|p| c.is_proven_past(*r, p));
        let are_past = || held_up_by.len() <= FEW && held_up_by.iter().all(is_past);
        !(lack_elsewhere && (s.lack == WaitingFor::End && are_all_through(s, instance) || are_past()))
    });
}

/// Forgets since when a track's operations stand still.
fn forget(since: &mut BTreeMap<(CommId, Track, u64), u64>, comm: CommId, track: Track) {
    let of = |since: &BTreeMap<_, _>| {
        since.range((comm, track, 0)..=(comm, track, u64::MAX)).next().map(|(k, _)| *k)
    };
    while let Some(key) = of(since) {
        since.remove(&key);
    }
}

impl Join {
    /// Brings the graph up to date, by the communicators that are to be looked at, and solves it.
    pub(in crate::join) fn keep(&mut self, now_ns: u64, due: &[CommId]) {
        let over = self.all_gone();
        let mut graph = std::mem::take(&mut self.wait_graph);
        let mut room = Room::default();
        for id in due {
            if let Some(c) = self.comms.get_mut(id).filter(|c| graph.is_due(c, over, now_ns)) {
                c.sort_seats();
            } else {
                continue;
            }
            let Some(c) = self.comms.get(id) else { continue };
            let due_ns = graph.look(self, c, (over, now_ns), &mut room);
            if let Some(c) = self.comms.get_mut(id) {
                (c.stale, c.due_ns) = (false, due_ns);
            }
        }
        graph.over = over;
        graph.solve(self);
        self.wait_graph = graph;
        self.note_awaited(now_ns);
    }

    /// Notes in operations that stand still for one rank since when they do, and that they still do: nothing may tell later how
    /// late it came.
    fn note_awaited(&mut self, now_ns: u64) {
        let standing = Arc::clone(&self.wait_graph.standing);
        let of_one = |o: &Origin| match o.ranks[..] {
            [rank] if o.circle.is_empty() => {
                Some((rank, standing.stall(o.first).filter(|s| s.lack == WaitingFor::Issue)?))
            }
            _ => None,
        };
        for (rank, stall) in standing.origins().iter().filter_map(of_one).take(ORIGINS) {
            let Some(waited) = self.waited(stall, now_ns) else { continue };
            // A host that is ahead of its GPU waits for nobody yet. How far it is ahead is not known where no kernel is timed.
            let ahead_ns = match waited.is_by_hosts() {
                true => self.lead_ns(stall),
                false => Some(0),
            };
            let Some(since_ns) = ahead_ns.map(|ns| waited.since_ns.saturating_add(ns)) else { continue };
            let Some(c) = self.comms.get_mut(&stall.comm).filter(|_| since_ns <= now_ns) else { continue };
            c.wait_for((stall.track, stall.order), rank, since_ns, now_ns);
        }
    }

    /// How far the hosts that wait in an operation were ahead of their GPUs at most, in ns; absent where it is not known.
    fn lead_ns(&self, stall: &Stall) -> Option<u64> {
        let c = self.communicator(stall.comm)?;
        let lead_ns = |(rank, _): &(Rank, u32)| {
            Some(self.process(c.members().get(rank)?.record.segment)?.issuing.lead_ns())
        };
        stall.waiting.iter().take(FEW).filter_map(lead_ns).max().filter(|ns| *ns > 0)
    }

    /// The standstills now. Where something was fed or became old since the last tick, that is looked at on a copy.
    pub fn standing(&self, now_ns: u64) -> Arc<Standstills> {
        let over = self.all_gone();
        let due = if over == self.wait_graph.over {
            self.dirty.due(now_ns)
        } else {
            self.comms.keys().copied().collect()
        };
        let due = due.iter().filter_map(|id| self.comms.get(id));
        let mut due = due.filter(|c| self.wait_graph.is_due(c, over, now_ns)).peekable();
        if due.peek().is_none() && !self.wait_graph.changed {
            return Arc::clone(&self.wait_graph.standing);
        }
        let mut copy = self.wait_graph.clone();
        let mut room = Room::default();
        for c in due {
            copy.look(self, c, (over, now_ns), &mut room);
        }
        copy.solve(self);
        copy.standing
    }
}

/// A row that is being made.
struct Row {
    rank: Rank,
    front: RankProgress,
    /// Its rank will not finish what it began, or nobody will tell.
    out: bool,
    /// The same, since its process is gone or has aborted the communicator.
    left: bool,
    /// Its issue orders can be relied on.
    sure: bool,
    /// It has freed the communicator.
    through: bool,
    /// Orders below this are done there, as far as was told without records of them.
    told: u64,
}

/// Room to make rows in, kept from one communicator to the next.
#[derive(Default)]
struct Room {
    rows: Vec<Row>,
    /// The ranks whose first unfinished operation is not found yet, by index.
    left: Vec<u32>,
}

/// The rows of a communicator's track.
fn rows(
    join: &Join,
    c: &Communicator,
    track: Track,
    over: bool,
    room: &mut Room,
) -> Vec<(Rank, RankProgress)> {
    let row = |seat: &Seat| {
        let condition = join.roster.condition(seat.actor);
        let issued = seat.issued(track)?;
        Some(Row {
            rank: seat.rank,
            front: RankProgress { process: seat.actor, issued, done: issued, stage: OpPhase::InDoubt },
            out: !over && condition.is_out() || seat.aborted,
            left: !over && condition.gone || seat.aborted,
            sure: condition.known && !condition.unsure,
            through: seat.through,
            told: seat.done(track),
        })
    };
    room.rows.clear();
    room.rows.extend(c.seats().iter().filter_map(row));
    if !room.rows.is_sorted_by_key(|r| r.rank) {
        room.rows.sort_unstable_by_key(|r| r.rank);
    }
    advance(c, track, room);
    let rows = &mut room.rows;
    // What a rank has finished, all were in: who is out then was through with it as well, told or not.
    let mut open: Vec<u64> = Vec::new();
    for r in rows.iter().filter(|r| r.front.stage != OpPhase::InDoubt && !r.out) {
        if open.last() != Some(&r.front.done) {
            open.push(r.front.done);
        }
    }
    open.sort_unstable();
    let mut alive: Vec<Rank> = Vec::new();
    if rows.iter().any(|r| r.out) {
        alive.extend(rows.iter().filter(|r| !r.out).map(|r| r.rank));
    }
    let is_alive = |r: &Rank| alive.binary_search(r).is_ok();
    let queued = LazyCell::new(|| c.queued(track, is_alive));
    let most = rows.iter().filter(|r| !r.out).map(|r| r.front.issued).max().unwrap_or(0);
    let is_in_doubt = |order: u64| {
        let open = c.incomplete_of(track).rev().find(|(o, _)| *o <= order).filter(|(o, _)| *o == order);
        let mut parts =
            open.into_iter().flat_map(|(_, i)| i.parts.iter().filter(|(r, _)| is_alive(r))).peekable();
        parts.peek().is_some() && parts.all(|(_, p)| !p.finished && p.is_silent())
    };
    // A rank that has freed the communicator has finished everything in it, unless another rank waits in an operation that it has
    // not started.
    let is_in = |r: &Row| r.front.stage == OpPhase::Started && !r.out && !r.through && r.sure;
    let mut waited_in: Vec<u64> = Vec::new();
    if rows.iter().any(|r| r.through) {
        waited_in.extend(rows.iter().filter(|r| is_in(r)).map(|r| r.front.done));
        waited_in.sort_unstable();
        let needs_all = |o: &u64| {
            let first = c.instance(track, *o).and_then(Instance::first);
            first.is_some_and(|p| !p.op.func.is_rooted())
        };
        waited_in.retain(needs_all);
    }
    for row in rows.iter_mut() {
        let f = &mut row.front;
        let is_waited_for = f.stage == OpPhase::Issued && waited_in.binary_search(&f.done).is_ok();
        if row.through && !is_waited_for {
            f.done = f.issued;
        }
        // Who is gone or stopped, or has aborted, will not finish what it began: it is waited for as if it had not issued it.
        if f.done < f.issued && row.out {
            let next = open.get(open.partition_point(|o| *o < f.done)).filter(|o| **o < f.issued);
            // Nobody who is alive came past a timed operation that has not started. Which of those before it that are not timed
            // stands still nobody knows.
            let first_queued =
                || queued.get(queued.partition_point(|o| *o < f.done)).filter(|o| **o < f.issued);
            // The others may wait in the last one that all issued.
            let last = || {
                let order = f.issued.checked_sub(1).filter(|_| row.left && most <= f.issued)?;
                is_in_doubt(order).then_some(order)
            };
            f.issued = next.or_else(first_queued).copied().or_else(last).unwrap_or(f.issued);
            f.done = f.issued;
        }
    }
    let mut all = Vec::with_capacity(rows.len());
    all.extend(rows.iter().filter(|r| r.sure).map(|r| (r.rank, r.front)));
    all
}

/// Finds the first operation that each rank has not finished.
fn advance(c: &Communicator, track: Track, Room { rows, left }: &mut Room) {
    let least = rows.iter().map(|r| r.front.issued).min().unwrap_or(0);
    left.clear();
    left.extend((0u32..).take(rows.len()));
    for (order, instance) in c.incomplete_of(track) {
        if left.is_empty() {
            break;
        }
        // Who finished a collective proves that all were in it; only roots and leaves may be through alone. A root that gathers
        // needs all of them, and a leaf needs a root that gives.
        let is_root = |r: &Rank, p: &Part| p.op.root == Some(*r);
        let all_were_in = LazyCell::new(|| {
            let told = c.told_done(track, order);
            let gathers = |r: &Rank, p: &Part| !p.op.func.is_from_root() && p.finished && is_root(r, p);
            let needs_all = |(r, p): (&Rank, &Part)| match p.op.func.is_rooted() {
                true => gathers(r, p),
                false => told || p.finished,
            };
            instance.parts.iter().any(needs_all)
        });
        let leaf_is_through = LazyCell::new(|| {
            let of_leaf = |(r, p): (&Rank, &Part)| p.op.func.is_from_root() && p.finished && !is_root(r, p);
            instance.parts.iter().any(of_leaf)
        });
        let was_in =
            |r: &Rank, p: Option<&Part>| *all_were_in || p.is_some_and(|p| is_root(r, p)) && *leaf_is_through;
        // Where no GPU was seen to start it, "not started" says nothing.
        let started = LazyCell::new(|| {
            let rooted = || instance.first().is_some_and(|p| p.op.func.is_rooted());
            // Roots and leaves that are through may have told so without a record of it.
            instance.parts.values().any(|p| p.started_ns.is_some()) || c.told_done(track, order) && rooted()
        });
        if order < least && instance.parts.values().all(|p| p.finished) && *all_were_in {
            continue;
        }
        // A record that was lost says nothing, but its rank's GPU may be seen in later ones.
        let told = |row: &Row, part: Option<&Part>| match part {
            None if order >= row.told => c.members().get(&row.rank).map_or(0, |m| m.done_below(track)),
            _ => row.told,
        };
        let mut parts = parts(instance, left.len());
        left.retain(|at| {
            let Some(row) = rows.get_mut(*at as usize) else { return false };
            let part = parts.of_rank(row.rank);
            // Most are in it, which is known without the whole record.
            let in_it = |p: &Part| !p.finished && p.started_ns.is_some() && p.ended_seen_ns.is_none();
            let state = match part {
                Some(p) if in_it(p) => OpState::Started,
                _ => state_of(part, order, Some(row.front.issued), told(row, part), || {
                    c.members().get(&row.rank).is_some_and(|m| m.finished == 0)
                }),
            };
            let stage = match state {
                OpState::Finished => return true,
                OpState::NotIssued | OpState::Called => return false,
                OpState::Started | OpState::Progressing => OpPhase::Started,
                // A rank that was in it and was not seen to start it has lost its times.
                OpState::Issued | OpState::InDoubt if was_in(&row.rank, part) => return true,
                OpState::Issued if *started => OpPhase::Issued,
                OpState::Issued | OpState::InDoubt => OpPhase::InDoubt,
            };
            (row.front.done, row.front.stage) = (order, stage);
            false
        });
    }
}

/// An operation's parts, asked for by ranks in rising order.
enum Parts<'a, I: Iterator<Item = (&'a Rank, &'a Part)>> {
    /// Gone through beside the ranks.
    Beside(Peekable<I>),
    /// Looked up: few are asked for.
    Few(&'a Instance),
}

/// The parts of an operation, of which so many ranks' are asked for.
fn parts(instance: &Instance, ranks: usize) -> Parts<'_, impl Iterator<Item = (&Rank, &Part)>> {
    if instance.parts.len() > ranks.saturating_mul(SPARSE) {
        Parts::Few(instance)
    } else {
        Parts::Beside(instance.parts.iter().peekable())
    }
}

impl<'a, I: Iterator<Item = (&'a Rank, &'a Part)>> Parts<'a, I> {
    fn of_rank(&mut self, rank: Rank) -> Option<&'a Part> {
        match self {
            Parts::Few(instance) => instance.parts.get(&rank),
            Parts::Beside(parts) => {
                while parts.next_if(|(r, _)| **r < rank).is_some() {}
                parts.next_if(|(r, _)| **r == rank).map(|(_, p)| p)
            }
        }
    }
}
