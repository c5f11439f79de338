//! The operations that stand still, and since when, for the rules.

use super::graph::{Origin, Stall, WaitingFor};
use crate::join::Join;
use crate::join::communicator::Communicator;
use crate::join::instance::{Instance, Part};
use crate::model::{CommId, Liveness, Rank, SegmentId, Track};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Operations without a record that are named at once.
const UNKNOWN: usize = 64;

/// Operations behind one that are looked through for ranks that wait.
const BEHIND: usize = 64;

/// Added to the issue time of operations that are known not to run yet, in ns: they wait behind others.
const QUEUED_NS: u64 = 1 << 61;

/// Added to that of operations that may have ended, in ns.
const LAST_NS: u64 = 1 << 62;

/// Ranks that are asked for the last that they wrote down.
const WITNESSES: usize = 64;

/// A communicator's first operations, which belong to the start of a job.
const STARTED_ORDERS: u64 = 2;

/// Ranks that are asked for what they did before.
const FEW: usize = 4;

/// Of so many seconds, in how many a process that is at work issues operations: one that compiles or loads its data does not.
const WORKED_SECONDS: usize = 5;
const WORKED_IN: usize = 4;
const SECOND_NS: u64 = 1_000_000_000;

/// Everything that stands still, and where it begins.
#[derive(Debug, Clone, Default)]
pub struct Standstills {
    pub(in crate::join) stalls: Vec<Arc<Stall>>,
    pub(in crate::join) origins: Vec<Origin>,
    pub(in crate::join) untimed: Vec<Origin>,
    /// Processes by their numbers in stalls, in rising order.
    pub(in crate::join) unclear: Vec<u32>,
}

impl Standstills {
    /// Where it begins.
    pub fn origins(&self) -> &[Origin] {
        &self.origins
    }

    /// Untimed operations, and timed ones behind them, which may stand still: nothing says that they are finished, and none
    /// of their ranks is known to wait elsewhere.
    pub fn untimed(&self) -> &[Origin] {
        &self.untimed
    }

    /// True for a process that others wait for and that may wait in one of several untimed operations, each of which explains
    /// everything that is known.
    pub fn is_unclear(&self, process: u32) -> bool {
        self.unclear.binary_search(&process).is_ok()
    }

    /// An operation that cannot complete.
    pub fn stall(&self, i: usize) -> Option<&Stall> {
        self.stalls.get(i).map(|s| &**s)
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
    /// True when a GPU was seen to start it, or none can be seen; else the hosts' times of issue have to do.
    pub on_gpu: bool,
    /// True where NCCL tells nothing about kernels, so that these are the hosts' times of issue.
    pub mute: bool,
    /// True when nothing can tell whether a GPU started it.
    pub silent: bool,
}

impl Waited {
    /// True when only the hosts' times of issue say that anybody waits.
    pub fn is_by_hosts(&self) -> bool {
        !self.on_gpu || self.mute
    }
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
    /// The mean of these times, in ns: operations may come in bursts, as all-gathers that are called ahead do.
    pub pace_ns: u64,
}

impl Join {
    /// Operations that stand still, or in which ranks seem to disagree, and of which records lack, where not every record
    /// comes: the agents have them.
    pub fn unknown(&self, standing: &Standstills) -> Vec<(CommId, Track, u64)> {
        let lacks = |s: &&Arc<Stall>| {
            let c = self.communicator(s.comm);
            c.is_some_and(|c| c.instance(s.track, s.order).is_none_or(|i| i.parts.len() < s.waiting.len()))
        };
        let still = standing.stalls.iter().filter(lacks).map(|s| (s.comm, s.track, s.order));
        let suspect = |c: &Communicator| {
            let id = c.id;
            let settled = c.mismatch().is_some();
            c.suspects()
                .filter(move |_| !settled)
                .map(move |o| (id, Track::Collective, o))
                .collect::<Vec<_>>()
        };
        still.chain(self.notable().flat_map(suspect)).take(UNKNOWN).collect()
    }

    /// How a communicator's operations followed each other, as far as stamps say; `None` without any.
    pub fn rhythm(&self, c: &Communicator) -> Option<Rhythm> {
        let mut moments: Vec<(u64, Track, u64)> = Vec::new();
        let mut steps: Vec<u64> = Vec::new();
        let mut before: Option<(Track, u64, u64)> = None;
        let mut ends: BTreeMap<Track, [(u64, u64); 2]> = BTreeMap::new();
        for (track, order, i) in c.instances() {
            let started = i.parts.values().filter_map(|p| p.started_ns).min();
            let moment = |p: &Part| p.kernel.map(|k| k.end_ns()).or(p.started_ns);
            moments.extend(i.parts.values().filter_map(|p| Some((moment(p)?, track, order))));
            if let Some(at) = started {
                steps.extend(
                    before
                        .filter(|(t, o, _)| (*t, o.checked_add(1)) == (track, Some(order)))
                        .map(|(.., then)| at.saturating_sub(then)),
                );
                before = Some((track, order, at));
                ends.entry(track).or_insert([(order, at); 2])[1] = (order, at);
            }
        }
        moments.sort_unstable();
        steps.sort_unstable();
        // Operations between two that are not timed share the time.
        let pause_ns = |w: &[(u64, Track, u64)]| {
            let many = if w[0].1 == w[1].1 { w[1].2.abs_diff(w[0].2).max(1) } else { 1 };
            (w[1].0 - w[0].0) / many
        };
        let longest_ns = moments.windows(2).map(pause_ns).max().unwrap_or(0);
        let step_ns = steps.get(steps.len() / 2).copied().unwrap_or(0);
        let pace = |[(first, from_ns), (last, to_ns)]: &[(u64, u64); 2]| {
            to_ns.saturating_sub(*from_ns).checked_div(last.saturating_sub(*first))
        };
        let pace_ns = ends.values().filter_map(pace).max().unwrap_or(0);
        Some(Rhythm { last_ns: moments.last()?.0, longest_ns, step_ns, pace_ns })
    }

    /// The last moment of which a process wrote something down, host monotonic ns: a black box lived until then.
    fn last_sign_ns(&self, segment: SegmentId) -> Option<u64> {
        let of_part = |p: &Part| {
            let o = &p.op;
            let seen = o.stamps.iter().flat_map(|s| [Some(s.start_seen_ns), s.stop_seen_ns]);
            let all = seen.chain([o.called_ns, o.issued_ns, o.event_seen_ns, p.ended_seen_ns, p.moved_ns]);
            all.flatten().max()
        };
        // Of the ranks that a process has in a communicator the first speaks.
        let of_comm = |(comm, rank): &(CommId, Rank)| {
            let c = self.communicator(*comm)?;
            let m = c.members().get(rank)?;
            let parts = c.instances().filter_map(|(.., i)| of_part(i.parts.get(rank)?)).max();
            parts.max(m.called.map(|c| c.at_ns)).max(Some(m.record.init_ns))
        };
        let mut seats = self.roster.seats(segment).to_vec();
        seats.dedup_by_key(|(comm, _)| *comm);
        seats.iter().filter_map(of_comm).max()
    }

    /// When the newest kernel of a process's GPU started, of all its communicators, host monotonic ns, as far as one is believed.
    pub(in crate::join) fn newest_start_ns(&self, segment: SegmentId, actor: u32) -> Option<u64> {
        let of = |(comm, rank): &(CommId, Rank)| {
            let c = self.communicator(*comm)?;
            c.seat(*rank).filter(|s| s.actor == actor)?;
            c.members().get(rank)?.newest_start_ns
        };
        self.memberships(segment).iter().filter_map(of).max()
    }

    /// The memberships of a process, by communicator.
    pub fn memberships(&self, segment: SegmentId) -> &[(CommId, Rank)] {
        self.roster.seats(segment)
    }

    /// True for a communicator that a job at work made: ranks of it had been in operations elsewhere before.
    pub fn was_made_at_work(&self, c: &Communicator) -> bool {
        let worked = |m: &crate::join::Member, other: &Communicator, rank: Rank| {
            let mut before = other.instances().filter(|(_, order, _)| *order >= STARTED_ORDERS);
            before.any(|(.., i)| {
                i.parts.get(&rank).is_some_and(|p| p.op.issued_ns.is_some_and(|t| t < m.record.init_ns))
            })
        };
        c.members().values().take(FEW).any(|m| {
            let others = self.memberships(m.record.segment).iter().filter(|(id, _)| *id != c.id);
            others.filter_map(|(id, r)| Some((self.communicator(*id)?, *r))).any(|(o, r)| worked(m, o, r))
        })
    }

    /// True where a process issued operations in most of the seconds before a moment, host monotonic ns: its job had begun.
    pub fn was_at_work(&self, segment: SegmentId, moment_ns: u64) -> bool {
        let parts = |(id, rank): &(CommId, Rank)| {
            let instances = self.communicator(*id).into_iter().flat_map(Communicator::instances);
            let rank = *rank;
            instances.filter_map(move |(.., i)| i.parts.get(&rank)?.op.issued_ns)
        };
        let mut seconds = [false; WORKED_SECONDS];
        for issued_ns in self.memberships(segment).iter().flat_map(parts) {
            let ago = moment_ns.checked_sub(issued_ns).and_then(|ns| usize::try_from(ns / SECOND_NS).ok());
            if let Some(second) = ago.and_then(|ago| seconds.get_mut(ago)) {
                *second = true;
            }
        }
        seconds.iter().filter(|s| **s).count() >= WORKED_IN
    }

    /// Since when an operation stands still, host monotonic ns, for the order among all of them; absent where nobody waits
    /// in it. What waits behind something else comes after what is known to run, and what may have ended comes last.
    pub(in crate::join) fn since_ns(&self, stall: &Stall) -> Option<u64> {
        let c = self.communicator(stall.comm)?;
        let instance = c.instance(stall.track, stall.order)?;
        if let Some(since_ns) = self.since_unseen(c, instance, stall) {
            return since_ns;
        }
        if stall.is_unseen() {
            // Hosts that run ahead issued what lies behind it before the others were through.
            return instance.began_ns();
        }
        let waiting = || waiting_in(instance, stall).map(|(_, p)| p);
        let issued = waiting().filter_map(|p| p.op.issued_ns).min();
        let started = waiting().filter_map(|p| p.started_ns).min();
        if started.is_none() && is_behind_others(c, stall) {
            return issued.map(|t| t.saturating_add(QUEUED_NS));
        }
        if self.is_unproven(c, instance, stall) {
            // One that was in flight when its record was sent is the better guess.
            let later = if started.is_some() { QUEUED_NS / 2 } else { LAST_NS };
            return started.or(issued).map(|t| t.saturating_add(later));
        }
        // That somebody waits in what no GPU is seen to start is inferred from what others wait in.
        // Agents tell again at once where a GPU comes to an operation that stands still.
        let is_queued = stall.lack == WaitingFor::Start
            || waiting().any(|p| !p.is_silent())
            || waiting_in(instance, stall).take(FEW).any(|(rank, p)| c.is_behind_queued(rank, p));
        started.or_else(|| issued.map(|t| if is_queued { t.saturating_add(QUEUED_NS) } else { t }))
    }

    /// True for an operation that lacks only ranks that issued it and are gone, and in which nobody is known to be: it may
    /// have ended before they did.
    pub fn is_unproven(&self, c: &Communicator, instance: &Instance, stall: &Stall) -> bool {
        let issued = |r: &Rank| instance.parts.contains_key(r);
        if stall.lack != WaitingFor::Issue || !stall.lacking.iter().all(|(r, _)| issued(r)) {
            return false;
        }
        // Of transfers nobody tells later that they have ended, where not every record comes.
        let told = |r: &Rank| {
            let by_beats = c.members().get(r).is_none_or(|m| m.counted_by_beats);
            !(by_beats && matches!(stall.track, Track::Pair(..)))
        };
        let is_here = |r: &Rank| stall.lacking.binary_search_by_key(r, |(l, _)| *l).is_err();
        !waiting_in(instance, stall).any(|(r, p)| p.is_in_it() && told(&r))
            && c.queued(stall.track, is_here).last().is_none_or(|last| *last < stall.order)
    }

    /// The same of what started nowhere: all wait since the last of them issued it and nothing else moved. `None` where
    /// it is no such operation.
    fn since_unseen(&self, c: &Communicator, instance: &Instance, stall: &Stall) -> Option<Option<u64>> {
        (stall.is_unseen() && c.started_nowhere(stall.track, stall.order, instance)).then(|| {
            let issued = instance.parts.values().filter_map(|p| p.op.issued_ns).max()?;
            Some(self.rhythm(c).map_or(issued, |r| r.last_ns.max(issued)))
        })
    }

    /// The ranks that wait in a later operation of the same track, of those that an operation does not wait for, and
    /// in which: ranks may be through with a rooted one before others have started it.
    pub fn waited_behind(&self, stall: &Stall, now_ns: u64) -> Option<(u64, Waited)> {
        let c = self.communicator(stall.comm)?;
        let lacks = |r: &Rank| stall.lacking.binary_search_by_key(r, |(l, _)| *l).is_ok();
        let of = |i: &Instance| -> Vec<(Rank, u64)> {
            let open = i.parts.iter().filter(|(r, p)| !p.finished && !lacks(r));
            open.filter_map(|(r, p)| Some((*r, p.started_ns?))).collect()
        };
        let later = c.incomplete_of(stall.track).filter(|(o, _)| *o > stall.order).take(BEHIND);
        let (order, waiting) = later.map(|(o, i)| (o, of(i))).find(|(_, all)| !all.is_empty())?;
        let since_ns = waiting.iter().map(|(_, t)| *t).min()?;
        let for_ns = (!self.all_gone()).then(|| now_ns.saturating_sub(since_ns));
        let ranks = waiting.into_iter().map(|(r, _)| r).collect();
        let at_least_ns = for_ns.unwrap_or(0);
        Some((
            order,
            Waited { ranks, since_ns, for_ns, at_least_ns, on_gpu: true, mute: false, silent: false },
        ))
    }

    /// Since when ranks wait in an operation; `None` when none does.
    pub fn waited(&self, stall: &Stall, now_ns: u64) -> Option<Waited> {
        let c = self.communicator(stall.comm)?;
        let instance = c.instance(stall.track, stall.order)?;
        if let Some(since_ns) = self.since_unseen(c, instance, stall) {
            let since_ns = since_ns?;
            let ranks = instance.parts.keys().copied().collect();
            let for_ns = (!self.all_gone()).then(|| now_ns.saturating_sub(since_ns));
            let at_least_ns = for_ns.unwrap_or(0);
            return Some(Waited {
                ranks,
                since_ns,
                for_ns,
                at_least_ns,
                on_gpu: false,
                mute: false,
                silent: true,
            });
        }
        let parts: Vec<(Rank, Option<u64>, u64)> = waiting_in(instance, stall)
            .filter_map(|(r, p)| Some((r, p.started_ns, p.op.issued_ns?)))
            .collect();
        let started = parts.iter().filter_map(|(_, started, _)| *started).min();
        let since_ns = started.or_else(|| parts.iter().map(|(_, _, issued)| *issued).min())?;
        let until = |rank: &Rank| {
            let m = c.members().get(rank)?;
            match self.process(m.record.segment)?.record.liveness {
                Liveness::Alive | Liveness::Unknown => Some(now_ns),
                Liveness::Gone(at) => at,
            }
        };
        let is_alive = |rank: &Rank| {
            let condition = c.seat(*rank).map(|s| self.roster.condition(s.actor));
            condition.is_some_and(|c| c.known && !c.gone)
        };
        let for_ns = if parts.iter().any(|(r, ..)| is_alive(r)) {
            Some(now_ns.saturating_sub(since_ns))
        } else {
            parts.iter().filter_map(|(r, ..)| Some(until(r)?.saturating_sub(since_ns))).max()
        };
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
            mute: started.is_none() && mute,
            silent: started.is_none() && !mute && silent,
        })
    }
}

/// True for a transfer that one end did not issue, behind earlier ones of the pair that both issued and did not finish.
fn is_behind_others(c: &Communicator, stall: &Stall) -> bool {
    let is_open =
        |i: &Instance| i.parts.len() >= 2 && i.parts.values().all(|p| !p.finished && !p.is_silent());
    let mut earlier = c.incomplete_of(stall.track).take_while(|(order, _)| *order < stall.order);
    matches!(stall.track, Track::Pair(..))
        && stall.lack == WaitingFor::Issue
        && earlier.any(|(_, i)| is_open(i))
}

/// The ranks that are in an operation and that it does not wait for.
fn waiting_in<'a>(instance: &'a Instance, stall: &'a Stall) -> impl Iterator<Item = (Rank, &'a Part)> {
    let mut lacking = stall.lacking.iter().map(|(r, _)| *r).peekable();
    let mut lacks = move |rank: Rank| {
        while lacking.next_if(|r| *r < rank).is_some() {}
        lacking.peek() == Some(&rank)
    };
    // What ended by its stamps waits all the same where they prove nothing.
    let waits =
        |r: Rank| matches!(stall.track, Track::Pair(..)) && stall.waiting.iter().any(|(w, _)| *w == r);
    instance
        .parts
        .iter()
        .filter(move |(r, p)| !lacks(**r) && (!p.finished || waits(**r)))
        .map(|(r, p)| (*r, p))
}

#[cfg(test)]
mod tests {
    use super::SECOND_NS;
    use crate::join::Join;
    use crate::join::testing::{all_reduce, member, process};
    use crate::model::{Rank, Update};

    #[test]
    fn a_process_is_at_work_that_issued_something_in_most_of_the_last_seconds() {
        let was_at_work = |issued_s: &[u64]| {
            let mut j = Join::new();
            j.feed(process(0));
            j.feed(member(0, 2, 1));
            for (order, s) in (0..).zip(issued_s) {
                j.feed(Update::Op(Box::new(all_reduce(0, order, s * SECOND_NS, None))));
            }
            j.tick(20 * SECOND_NS);
            let c = j.communicators().next().expect("one");
            j.was_at_work(c.members()[&Rank(0)].record.segment, 20 * SECOND_NS - 1)
        };
        assert!(was_at_work(&[15, 16, 17, 19]));
        assert!(!was_at_work(&[1, 2, 3, 4, 5, 18, 19]), "it compiled");
        assert!(!was_at_work(&[19, 19, 19, 19, 19, 20, 21]));
    }
}
