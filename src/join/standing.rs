//! What stands still, from the joined records: the rows of the wait-for graph.

use super::communicator::Communicator;
use super::waits::{Front, Lack, Origin, Stage, Stall, Waits};
use super::{Join, Process};
use crate::model::{CommId, Liveness, Making, OpState, Rank, SegmentId, Track};
use std::collections::{BTreeSet, HashMap};

/// Operations younger than this, in ns, are not looked at: all ranks of a healthy job are on their way to them.
const YOUNG_NS: u64 = 20_000_000;

/// Operations of a communicator that are looked through for one that is timed.
const QUEUE_MAX: usize = 2048;

/// Operations without a record that are named at once.
const UNKNOWN: usize = 64;

/// Ranks that are asked for the last that they wrote down.
const WITNESSES: usize = 64;

/// Everything that stands still, and where it begins.
#[derive(Debug, Clone, Default)]
pub struct Standing {
    waits: Waits,
    origins: Vec<Origin>,
}

impl Standing {
    /// Where it begins.
    pub fn origins(&self) -> &[Origin] {
        &self.origins
    }

    /// An operation that cannot complete.
    pub fn stall(&self, i: usize) -> Option<&Stall> {
        self.waits.stalls().get(i)
    }
}

/// Since when ranks wait in an operation, and how that is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Waited {
    /// The ranks.
    pub ranks: Vec<Rank>,
    /// Since when, host monotonic ns.
    pub since_ns: u64,
    /// For how long: until now, or until the last of their processes ended. Absent where all were gone before
    /// anybody looked.
    pub for_ns: Option<u64>,
    /// For how long at least: until the last that is known of any of their processes.
    pub at_least_ns: u64,
    /// True when a GPU was seen to start it; else the hosts' times of issue have to do.
    pub on_gpu: bool,
    /// True when nothing can tell whether a GPU started it.
    pub silent: bool,
}

/// How a communicator's operations followed each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rhythm {
    /// When one last started or ended, host monotonic ns.
    pub last_ns: u64,
    /// The longest time without, in ns.
    pub longest_ns: u64,
    /// The usual time from one start to the next operation's, in ns.
    pub step_ns: u64,
}

/// One process's GPU: what can wait and be waited for.
type Actor<'a> = (SegmentId, Option<&'a str>);

impl Join {
    /// What stands still now.
    pub fn standing(&self, now_ns: u64) -> Standing {
        let mut waits = Waits::new();
        let mut actors: HashMap<Actor<'_>, u32> = HashMap::new();
        let over = self.all_gone();
        for c in self.communicators().filter(|c| !c.closed()) {
            for track in [Track::Collective, Track::Replay] {
                let old = c.incomplete_of(track).next().and_then(|(_, i)| i.began_ns());
                if old.is_some_and(|t| over || now_ns.saturating_sub(t) >= YOUNG_NS) {
                    self.rows(c, track, over, &mut waits, &mut actors);
                }
            }
            self.transfers(c, &mut waits, &mut actors);
            self.broken_off(c, &mut waits, &mut actors);
        }
        let since = |s: &Stall| self.waited(s, now_ns).map_or(u64::MAX, |w| w.since_ns);
        let mut origins = waits.solve(since);
        // Where nothing else tells what stands still, what waits behind untimed operations may.
        if waits.stalls().is_empty() {
            for c in self.communicators().filter(|c| !c.closed()) {
                if let Some(stall) = self.queued(c, &mut actors) {
                    waits.add(stall);
                }
            }
            origins = waits.solve(since);
        }
        Standing { waits, origins }
    }

    /// Operations that stand still, or in which ranks seem to disagree, and of which records lack, where not every record
    /// comes: the agents have them.
    pub fn unknown(&self, standing: &Standing) -> Vec<(CommId, Track, u64)> {
        let lacks = |s: &&Stall| {
            let c = self.communicator(s.comm);
            c.is_some_and(|c| c.instance(s.track, s.order).is_none_or(|i| i.parts.len() < s.waiting.len()))
        };
        let named = |s: &Stall| (s.comm, s.track, s.order);
        let still = standing.waits.stalls().iter().filter(lacks).map(named);
        let suspect = |c: &Communicator| {
            let id = c.id;
            let settled = c.mismatch().is_some();
            c.suspects()
                .filter(move |_| !settled)
                .map(move |o| (id, Track::Collective, o))
                .collect::<Vec<_>>()
        };
        still.chain(self.communicators().flat_map(suspect)).take(UNKNOWN).collect()
    }

    /// The first operation that all ranks issued, that is timed, and that started nowhere, behind operations that are
    /// not timed and of which nobody knows whether they are done.
    fn queued<'a>(&'a self, c: &'a Communicator, actors: &mut HashMap<Actor<'a>, u32>) -> Option<Stall> {
        let track = Track::Collective;
        let all = c.expected();
        let silent = |i: &super::Instance| i.parts.values().all(|p| p.op.timing.is_silent());
        let mut behind = false;
        let (order, _) = c.incomplete_of(track).take(QUEUE_MAX).find(|(_, i)| {
            behind |= silent(i);
            i.parts.len() >= all && !silent(i)
        })?;
        let unseen = |rank: &Rank| c.state(track, order, *rank) == OpState::Issued;
        let sure = |m: &super::Member| self.process(m.record.segment).is_some_and(|p| !p.unsure());
        let whole = c.members().len() >= all && c.members().iter().all(|(r, m)| unseen(r) && sure(m));
        if !behind || !whole {
            return None;
        }
        let mut lacking = Vec::new();
        for (rank, m) in c.members() {
            let next = actors.len() as u32;
            lacking.push((*rank, *actors.entry((m.record.segment, m.record.gpu.as_deref())).or_insert(next)));
        }
        Some(Stall { comm: c.id, track, order, lack: Lack::Start, waiting: Vec::new(), lacking })
    }

    /// How a communicator's operations followed each other, as far as stamps say; `None` without any.
    pub fn rhythm(&self, c: &Communicator) -> Option<Rhythm> {
        let mut moments: Vec<u64> = Vec::new();
        let mut steps: Vec<u64> = Vec::new();
        let mut before: Option<(Track, u64, u64)> = None;
        for (track, order, i) in c.instances() {
            let started = i.parts.values().filter_map(|p| p.started_ns).min();
            moments.extend(i.parts.values().filter_map(|p| p.kernel.map(|k| k.end_ns()).or(p.started_ns)));
            if let Some(at) = started {
                steps.extend(
                    before
                        .filter(|(t, o, _)| (*t, o.checked_add(1)) == (track, Some(order)))
                        .map(|(.., then)| at.saturating_sub(then)),
                );
                before = Some((track, order, at));
            }
        }
        moments.sort_unstable();
        steps.sort_unstable();
        let longest_ns = moments.windows(2).map(|w| w[1] - w[0]).max().unwrap_or(0);
        let step_ns = steps.get(steps.len() / 2).copied().unwrap_or(0);
        Some(Rhythm { last_ns: *moments.last()?, longest_ns, step_ns })
    }

    fn rows<'a>(
        &'a self,
        c: &'a Communicator,
        track: Track,
        over: bool,
        waits: &mut Waits,
        actors: &mut HashMap<Actor<'a>, u32>,
    ) {
        // The operations that some rank has not finished, oldest first; only the first of each rank counts.
        let mut fronts: HashMap<Rank, (u64, Stage)> = HashMap::new();
        let mut left: Vec<Rank> = c.members().keys().copied().collect();
        for (order, instance) in c.incomplete_of(track) {
            if left.is_empty() {
                break;
            }
            // Where no GPU was seen to start it, "not started" says nothing.
            let started = instance.parts.values().any(|p| p.started_ns.is_some());
            // Who finished a collective proves that all were in it; only roots and leaves may be through alone.
            let rooted = instance.first().is_none_or(|p| p.op.func.is_rooted());
            let all_were_in =
                !rooted && (c.told_done(track, order) || instance.parts.values().any(|p| p.finished));
            left.retain(|rank| {
                let stage = match c.state(track, order, *rank) {
                    OpState::Finished => return true,
                    OpState::NotIssued | OpState::Called => return false,
                    OpState::Started | OpState::Progressing => Stage::Started,
                    OpState::InDoubt if all_were_in => return true,
                    OpState::Issued if started => Stage::Issued,
                    OpState::Issued | OpState::InDoubt => Stage::InDoubt,
                };
                fronts.insert(*rank, (order, stage));
                false
            });
        }
        // What a rank has finished, all were in: who is gone then was through with it as well, told or not.
        let is_gone = |rank: &Rank| {
            let m = c.members().get(rank);
            let process = m.and_then(|m| self.process(m.record.segment));
            !over && process.is_some_and(|p| p.record.liveness != Liveness::Alive)
                || m.is_some_and(|m| m.record.making == Some(Making::Aborted))
        };
        let open: BTreeSet<u64> = fronts
            .iter()
            .filter(|(r, (_, stage))| *stage != Stage::InDoubt && !is_gone(r))
            .map(|(_, (order, _))| *order)
            .collect();
        for (rank, m) in c.members() {
            let process = self.process(m.record.segment);
            if process.is_none_or(Process::unsure) {
                continue;
            }
            let Some(issued) = m.issued(track) else { continue };
            let (mut done, stage) = fronts.get(rank).copied().unwrap_or((issued, Stage::InDoubt));
            if m.record.finalized_ns.is_some() {
                done = issued;
            }
            // Who is gone, or has aborted, will not finish what it began: it is waited for as if it had not issued it.
            let mut issued = issued;
            if done < issued && is_gone(rank) {
                issued = open.range(done..issued).next().copied().unwrap_or(issued);
                done = issued;
            }
            let next = actors.len() as u32;
            let process = *actors.entry((m.record.segment, m.record.gpu.as_deref())).or_insert(next);
            waits.set(c.id, track, *rank, Some(Front { process, issued, done, stage }));
        }
    }

    /// Sends without their receives, and the reverse.
    fn transfers<'a>(&'a self, c: &'a Communicator, waits: &mut Waits, actors: &mut HashMap<Actor<'a>, u32>) {
        for ((from, to), order, sent) in c.unmatched() {
            let (here, there) = if sent { (from, to) } else { (to, from) };
            let track = Track::Pair(from, to);
            let waits_there =
                c.instance(track, order).and_then(|i| i.parts.get(&here)).is_some_and(|p| !p.finished);
            let mut side = |rank: Rank| {
                let m = c.members().get(&rank)?;
                let process = self.process(m.record.segment)?;
                // Transfers are counted by their records alone.
                if process.unsure() || process.missed.contains_key("operations") {
                    return None;
                }
                let next = actors.len() as u32;
                Some((rank, *actors.entry((m.record.segment, m.record.gpu.as_deref())).or_insert(next)))
            };
            if let (true, Some(w), Some(l)) = (waits_there, side(here), side(there)) {
                let (waiting, lacking) = (vec![w], vec![l]);
                waits.add(Stall { comm: c.id, track, order, lack: Lack::Issue, waiting, lacking });
            }
        }
    }

    /// Transfers that both ends issued and that one of them, which is gone, will not finish.
    fn broken_off<'a>(
        &'a self,
        c: &'a Communicator,
        waits: &mut Waits,
        actors: &mut HashMap<Actor<'a>, u32>,
    ) {
        let alive = |r: &Rank| {
            let process = c.members().get(r).and_then(|m| self.process(m.record.segment));
            process.map(|p| p.record.liveness == Liveness::Alive)
        };
        if c.members().keys().all(|r| alive(r) != Some(false)) {
            return;
        }
        let mut told = BTreeSet::new();
        for (track, order, instance) in c.incomplete() {
            let Track::Pair(from, to) = track else { continue };
            let open = |r: &Rank| instance.parts.get(r).is_some_and(|p| !p.finished);
            let ends = [(from, to), (to, from)];
            let broken = ends.into_iter().find(|(here, there)| {
                open(here) && open(there) && alive(here) == Some(true) && alive(there) == Some(false)
            });
            let Some((here, there)) = broken.filter(|_| told.insert((from, to))) else { continue };
            let mut side = |rank: Rank| {
                let m = c.members().get(&rank)?;
                let next = actors.len() as u32;
                Some((rank, *actors.entry((m.record.segment, m.record.gpu.as_deref())).or_insert(next)))
            };
            if let (Some(w), Some(l)) = (side(here), side(there)) {
                let (waiting, lacking) = (vec![w], vec![l]);
                waits.add(Stall { comm: c.id, track, order, lack: Lack::Issue, waiting, lacking });
            }
        }
    }

    /// The last moment of which a process wrote something down, host monotonic ns: a black box lived until then.
    fn last_sign_ns(&self, segment: SegmentId) -> Option<u64> {
        let of_part = |p: &super::Part| {
            let o = &p.op;
            let seen = o.stamps.iter().flat_map(|s| [Some(s.start_seen_ns), s.stop_seen_ns]);
            let all = seen.chain([o.called_ns, o.issued_ns, o.event_seen_ns, p.ended_seen_ns, p.moved_ns]);
            all.flatten().max()
        };
        let of_comm = |c: &Communicator| {
            let (rank, m) = c.members().iter().find(|(_, m)| m.record.segment == segment)?;
            let parts = c.instances().filter_map(|(.., i)| of_part(i.parts.get(rank)?)).max();
            parts.max(m.called.map(|c| c.at_ns)).max(Some(m.record.init_ns))
        };
        self.communicators().filter_map(of_comm).max()
    }

    /// When a process last came out of an operation, of those that were at least so long, host monotonic ns.
    pub fn released_ns(&self, segment: SegmentId, long_ns: u64) -> Option<u64> {
        let ends = self.communicators().filter_map(|c| {
            let rank = c.members().iter().find(|(_, m)| m.record.segment == segment)?.0;
            let kernels = c.instances().filter_map(|(.., i)| i.parts.get(rank)?.kernel);
            kernels.filter(|k| k.duration_ns >= long_ns).map(|k| k.end_ns()).max()
        });
        ends.max()
    }

    /// Since when ranks wait in an operation; `None` when none does.
    pub fn waited(&self, stall: &Stall, now_ns: u64) -> Option<Waited> {
        let c = self.communicator(stall.comm)?;
        let instance = c.instance(stall.track, stall.order)?;
        // Of what started nowhere all wait, since the last of them issued it and nothing else moved.
        let nowhere = || instance.parts.values().all(|p| !p.finished && p.started_ns.is_none());
        if stall.lack == Lack::Start && stall.waiting.is_empty() && nowhere() {
            let issued = instance.parts.values().filter_map(|p| p.op.issued_ns).max()?;
            let since_ns = self.rhythm(c).map_or(issued, |r| r.last_ns.max(issued));
            let ranks = instance.parts.keys().copied().collect();
            let for_ns = (!self.all_gone()).then(|| now_ns.saturating_sub(since_ns));
            let at_least_ns = for_ns.unwrap_or(0);
            return Some(Waited { ranks, since_ns, for_ns, at_least_ns, on_gpu: false, silent: true });
        }
        let parts: Vec<(Rank, Option<u64>, u64)> = instance
            .parts
            .iter()
            .filter(|(r, p)| !p.finished && stall.lacking.binary_search_by_key(*r, |(l, _)| *l).is_err())
            .filter_map(|(r, p)| Some((*r, p.started_ns, p.op.issued_ns?)))
            .collect();
        let started = parts.iter().filter_map(|(_, started, _)| *started).min();
        let since_ns = started.or_else(|| parts.iter().map(|(_, _, issued)| *issued).min())?;
        let until = |rank: &Rank| {
            let m = c.members().get(rank)?;
            match self.process(m.record.segment)?.record.liveness {
                Liveness::Alive => Some(now_ns),
                Liveness::Gone(at) => at,
            }
        };
        let for_ns = parts.iter().filter_map(|(r, ..)| Some(until(r)?.saturating_sub(since_ns))).max();
        let sign = |rank: &Rank| self.last_sign_ns(c.members().get(rank)?.record.segment);
        let at_least_ns = for_ns.unwrap_or_else(|| {
            let last = parts.iter().take(WITNESSES).filter_map(|(r, ..)| sign(r)).max();
            last.map_or(0, |t| t.saturating_sub(since_ns))
        });
        // NCCL before 2.26 tells nothing about kernels.
        let mute = c
            .members()
            .values()
            .filter_map(|m| self.process(m.record.segment))
            .all(|p| p.record.abi.is_some_and(|v| v < 3));
        let silent = instance.parts.values().all(|p| p.finished || p.op.timing.is_silent());
        Some(Waited {
            ranks: parts.iter().map(|(r, ..)| *r).collect(),
            since_ns,
            for_ns,
            at_least_ns,
            on_gpu: started.is_some() || mute,
            silent: started.is_none() && !mute && silent,
        })
    }
}
