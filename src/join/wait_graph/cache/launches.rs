//! Transfers that were launched together. NCCL tells one end for all of them, when any of them has ended: so one that seems
//! not to end may have, and one that seems to have ended may not.

use super::super::graph::{Stall, WaitingFor};
use crate::join::communicator::{Communicator, state_of};
use crate::join::instance::{Instance, Part};
use crate::model::{Launch, OpState, Rank, Track};
use std::cell::LazyCell;
use std::collections::{HashMap, HashSet};

/// A fact that nothing contradicts for so long, in ns, holds: records of other nodes take a while.
pub(super) const NEWS_NS: u64 = 2_000_000_000;

/// A transfer that both ends issued and that seems to stand still.
pub(super) struct Held {
    pub(super) stall: Stall,
    /// The end that is over by its stamps, and its process, where its launch may still run.
    over: Option<(Rank, u32)>,
    /// It stands still only where one of its launches does for another reason.
    unproven: bool,
    /// One end is over, and the rank's GPU has started something later: the other end is over unless its launch runs on for
    /// another reason.
    pub(super) is_past: bool,
}

/// A fact about all of a communicator's operations, found when it is first needed.
type Lazy<'a, T> = LazyCell<T, Box<dyn FnOnce() -> T + 'a>>;

/// The launches of a communicator's transfers.
pub struct Launches<'a> {
    c: &'a Communicator,
    /// How many transfers of each launch are not finished.
    open: Lazy<'a, HashMap<(Rank, Launch), usize>>,
    /// When each rank's newest kernel started, host monotonic ns, and its launch.
    newest: Lazy<'a, HashMap<Rank, (u64, Launch)>>,
    /// When each rank issued its first transfer that its GPU has not started, host monotonic ns.
    queued: Lazy<'a, HashMap<Rank, u64>>,
}

impl std::fmt::Debug for Launches<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Launches").field(&self.c.id).finish()
    }
}

impl<'a> Launches<'a> {
    /// The launches of a communicator.
    pub fn of(c: &'a Communicator) -> Self {
        Launches {
            c,
            open: LazyCell::new(Box::new(|| open(c))),
            newest: LazyCell::new(Box::new(|| newest(c))),
            queued: LazyCell::new(Box::new(|| queued(c))),
        }
    }

    /// Since when stamps say that an end of a transfer is over, host monotonic ns, where it may still run: of a launch of several
    /// transfers NCCL tells when one has ended, and nothing of the communicator has started on the rank's GPU since. A send is
    /// often through before its receive, so that it may run only where something that was issued does not start.
    pub fn may_run_since(&self, track: Track, order: u64, rank: Rank) -> Option<u64> {
        let Track::Pair(from, _) = track else { return None };
        let since_ns = self.last_ended_ns(track, order, rank)?;
        (rank != from || self.queued.contains_key(&rank)).then_some(since_ns)
    }

    /// When stamps say that an end of a transfer is over, host monotonic ns, if nothing of the communicator has started on the
    /// rank's GPU since.
    pub(super) fn last_ended_ns(&self, track: Track, order: u64, rank: Rank) -> Option<u64> {
        let part = self.c.instance(track, order)?.parts.get(&rank)?;
        part.ended_seen_ns.filter(|_| part.finished && self.is_newest(rank, part))
    }

    /// The same as [`Self::may_run_since`], where nothing was heard for long enough since.
    pub fn may_run(&self, track: Track, order: u64, rank: Rank, now_ns: u64) -> bool {
        self.may_run_since(track, order, rank).is_some_and(|t| now_ns >= t.saturating_add(NEWS_NS))
    }

    /// True where stamps say that an end of a transfer is over, and nothing of the communicator has started on the rank's GPU
    /// for long enough since.
    pub fn is_newest_for_long(&self, track: Track, order: u64, rank: Rank, now_ns: u64) -> bool {
        self.last_ended_ns(track, order, rank).is_some_and(|t| now_ns >= t.saturating_add(NEWS_NS))
    }

    /// True where a rank issued a transfer after one that its GPU has not started: those of a communicator start in the order of
    /// their issue.
    pub(super) fn is_behind(&self, rank: Rank, part: &Part) -> bool {
        self.queued.get(&rank).is_some_and(|q| part.op.issued_ns.is_some_and(|t| t > *q))
    }

    /// True where a rank's GPU has come to an operation, though no stamp of it says so: to others of its launch, or to what was
    /// issued later.
    pub(super) fn has_begun(&self, rank: Rank, part: &Part) -> bool {
        let begun = self.c.members().get(&rank).and_then(|m| m.newest_begun);
        begun.is_some_and(|newest| part.issued_at().is_some_and(|own| own.starts_with(newest)))
    }

    /// True where a rank's GPU started nothing of the communicator after this operation's launch.
    pub(super) fn is_newest(&self, rank: Rank, part: &Part) -> bool {
        self.newest.get(&rank).is_none_or(|(t, launch)| {
            part.op.launch().shared_with(*launch) || part.started_ns.is_some_and(|s| s >= *t)
        })
    }

    /// A transfer that stands still, as far as its own ends tell; absent where it is over. `over` is the end that seems to be.
    pub(super) fn held(&self, stall: Stall, over: Option<(Rank, u32)>, instance: &Instance) -> Option<Held> {
        let launch = |(rank, _): &(Rank, u32)| instance.parts.get(rank).map(|p| (*rank, p.op.launch()));
        let is_shared = |(rank, launch): (Rank, Launch)| {
            launch.is_known() && self.open.get(&(rank, launch)).is_some_and(|n| *n > 1)
        };
        let unproven = over.is_some() && stall.waiting.iter().filter_map(launch).any(is_shared);
        let may_run = |(rank, _): &(Rank, u32)| {
            let part = instance.parts.get(rank).filter(|p| p.op.launch().is_known());
            part.is_some_and(|p| self.is_newest(*rank, p))
        };
        let is_past = stall.lack == WaitingFor::End
            && over.is_some_and(|(rank, _)| {
                let part = instance.parts.get(&rank).filter(|p| p.op.launch().is_known());
                part.is_some_and(|p| !self.is_newest(rank, p))
            });
        Some(Held { stall, over: over.filter(may_run), unproven, is_past })
    }

    /// The stalls by themselves, and the waits for a launch in which another transfer waits for somebody: `stalls`
    /// are those of which an end was not issued.
    pub(super) fn settle(&self, stalls: &[Stall], all: Vec<Held>) -> Vec<Stall> {
        let launch = |s: &Stall, (rank, _): &(Rank, u32)| {
            let part = self.c.instance(s.track, s.order)?.parts.get(rank)?;
            Some((*rank, part.op.launch())).filter(|(_, l)| l.is_known())
        };
        let launches = |s: &'_ Stall| s.waiting.iter().filter_map(|w| launch(s, w)).collect::<Vec<_>>();
        let (mut ends, mut settled): (Vec<Held>, Vec<Held>) =
            all.into_iter().partition(|h| h.stall.lack == WaitingFor::End);
        let mut held: HashSet<(Rank, Launch)> = stalls.iter().flat_map(launches).collect();
        held.extend(settled.iter().flat_map(|h| launches(&h.stall)));
        let mut out: Vec<Stall> = Vec::new();
        loop {
            let before = ends.len();
            ends.retain(|h| {
                let both = h.stall.waiting.iter().chain(&h.over);
                let is_held = |end: &(Rank, u32)| launch(&h.stall, end).is_some_and(|l| held.contains(&l));
                let (lacking, waiting): (Vec<_>, Vec<_>) = both.copied().partition(is_held);
                if lacking.is_empty() {
                    return true;
                }
                if !waiting.is_empty() {
                    let stall = Stall { lack: WaitingFor::Start, waiting, lacking, ..h.stall.clone() };
                    held.extend(launches(&stall));
                    out.push(stall);
                }
                false
            });
            if ends.len() == before {
                break;
            }
        }
        settled.extend(ends.into_iter().filter(|h| !h.unproven));
        out.extend(settled.into_iter().map(|h| h.stall));
        out
    }
}

fn open(c: &Communicator) -> HashMap<(Rank, Launch), usize> {
    let mut open: HashMap<(Rank, Launch), usize> = HashMap::new();
    for (_, _, instance) in c.incomplete_transfers() {
        for (rank, part) in instance.parts.iter().filter(|(_, p)| !p.finished) {
            *open.entry((*rank, part.op.launch())).or_default() += 1;
        }
    }
    open
}

fn newest(c: &Communicator) -> HashMap<Rank, (u64, Launch)> {
    let mut newest: HashMap<Rank, (u64, Launch)> = HashMap::new();
    for (_, _, instance) in c.instances() {
        for (rank, part) in &instance.parts {
            let Some(t) = part.started_ns else { continue };
            let known = newest.entry(*rank).or_insert((t, part.op.launch()));
            if t > known.0 {
                *known = (t, part.op.launch());
            }
        }
    }
    newest
}

fn queued(c: &Communicator) -> HashMap<Rank, u64> {
    let mut first: HashMap<Rank, u64> = HashMap::new();
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
