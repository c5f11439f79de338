//! How long a rank was in a communicator's operations, while others waited for it in another one.

use super::super::class_key::ClassKey;
use super::super::instance::{Instance, IssuedAt, LATE_NS, Part};
use super::super::stats::Class;
use super::{Communicator, Key};
use crate::model::{CommId, Rank, SegmentId, Track};
use std::collections::BTreeMap;

/// Operations of a track that are looked at for a timed one, before and behind an untimed one.
const NEAR: u64 = 64;

/// Untimed operations of a track that may hold a rank, the newest ones, and ends of operations that are looked at for them.
const DOUBTS: usize = 16;
const LOOKS: usize = 4096;

/// How long a rank was in operations within some time, in ns, and the untimed ones in which it may have been.
#[derive(Debug, Clone, Default)]
pub(in crate::join) struct Inside {
    pub(in crate::join) timed_ns: u64,
    /// Each holds a rank once at most. Of a track the newest one is the first.
    pub(in crate::join) doubts: Vec<(CommId, Key)>,
    /// It may have been in a launch of several transfers, of which the first that is over tells one end for all.
    pub(in crate::join) in_launch: bool,
}

/// When processes started an operation, host monotonic ns, and when they had issued it: by then they were through with whatever
/// they had issued before.
pub(in crate::join) type Passed = BTreeMap<SegmentId, (IssuedAt, u64)>;

impl Communicator {
    /// The process that receives a transfer, and from when to when it waited for the sender to issue it, host monotonic ns. A send
    /// may be through without its receiver.
    pub(in crate::join) fn wait_for_sender(
        &self,
        (track, order): (Track, u64),
    ) -> Option<(SegmentId, u64, u64)> {
        let Track::Pair(from, to) = track else { return None };
        let parts = &self.instance(track, order)?.parts;
        let (sender, receiver) = (parts.get(&from)?, parts.get(&to)?);
        let began_ns = receiver.started_ns.max(receiver.op.issued_ns)?;
        Some((self.members().get(&to)?.record.segment, began_ns, sender.op.issued_ns?))
    }

    /// For how long, in ns, a rank was in operations beyond what their transfers usually take, of those that ended
    /// between two moments on its GPU.
    pub(in crate::join) fn excess_ns(
        &self,
        rank: Rank,
        from_ns: u64,
        to_ns: u64,
        classes: &BTreeMap<ClassKey, Box<Class>>,
    ) -> u64 {
        let excess = |(track, order, i): (Track, u64, &Instance)| {
            let kernel = i.parts.get(&rank)?.kernel?;
            if !(from_ns..=to_ns).contains(&kernel.end_ns()) {
                return None;
            }
            // The first one makes connections.
            let usual = if order == 0 {
                0.0
            } else {
                let class = classes.get(&self.class(track, i)?)?;
                class.sampled_quantile(0.5).or_else(|| class.quantile(0.5))?
            };
            Some(kernel.duration_ns.saturating_sub(usual as u64))
        };
        self.instances().filter_map(excess).sum()
    }

    /// How long a rank was in operations between two moments, but for one of them. `lead_ns` says how far a process's host was
    /// ahead of its GPU at most, and `passed` when others were through with earlier operations.
    pub(in crate::join) fn inside(
        &self,
        rank: Rank,
        but: Option<Key>,
        issued: Option<IssuedAt>,
        (from_ns, to_ns): (u64, u64),
        (lead_ns, passed): (&dyn Fn(SegmentId) -> Option<u64>, &Passed),
    ) -> Inside {
        let mut inside = Inside::default();
        // The newest untimed operation of a track. Those of one track come in their order: a timed one that started before ends
        // the doubt.
        let mut doubt: Option<(Key, &Instance)> = None;
        let half_ns = from_ns + to_ns.saturating_sub(from_ns) / 2;
        let left_ns = |i: &Instance| i.parts.iter().filter_map(|end| self.left_ns(rank, end, passed)).min();
        let settle = |inside: &mut Inside, (key, instance): (Key, &Instance)| {
            let all_came_ns = self.all_came_ns(key, instance, lead_ns);
            let until_ns = all_came_ns.into_iter().chain(left_ns(instance)).min();
            if let Some(until_ns) = until_ns.filter(|t| *t <= half_ns) {
                inside.timed_ns += until_ns.saturating_sub(from_ns);
                return;
            }
            inside.doubts.push((self.id, key));
            // The operations of a track come in their order: those before one that is over are over as well.
            let mut looks = LOOKS;
            for order in (0..key.1).rev().take(DOUBTS - 1) {
                let Some(before) = self.instance(key.0, order) else { return };
                let Some(left) = looks.checked_sub(before.parts.len()) else { return };
                looks = left;
                let may_be_in = |p: &Part| {
                    let ended = p.ended_seen_ns.is_some_and(|t| t <= from_ns);
                    p.kernel.is_none() && p.op.event_ns.is_none() && !ended
                };
                if !before.parts.get(&rank).is_some_and(may_be_in)
                    || left_ns(before).is_some_and(|t| t <= half_ns)
                {
                    return;
                }
                inside.doubts.push((self.id, (key.0, order)));
            }
        };
        let launch = but.and_then(|(t, o)| Some(self.instance(t, o)?.parts.get(&rank)?.op.launch()));
        for (track, order, instance) in self.instances().filter(|(t, o, _)| Some((*t, *o)) != but) {
            let Some(part) = instance.parts.get(&rank) else { continue };
            if launch.is_some_and(|l| l.shared_with(part.op.launch())) {
                continue;
            }
            if let Some(other) = doubt.take_if(|((t, _), _)| *t != track) {
                settle(&mut inside, other);
            }
            let Some(kernel) = part.kernel else {
                let ended = part.ended_seen_ns.is_some_and(|t| t <= from_ns);
                // Streams wait for nothing that was issued later.
                let may_hold = |own: IssuedAt| part.issued_at().is_some_and(|at| at.is_before(own));
                // An operation issued later held it for the lesser part of the time.
                let is_early = part.op.issued_ns.is_some_and(|t| t < half_ns);
                if !ended && is_early && issued.is_none_or(may_hold) {
                    doubt = Some(((track, order), instance));
                }
                continue;
            };
            if kernel.start_ns <= from_ns {
                doubt = None;
            }
            // The rank came while this operation still ran, so it was in another stream and held nobody. A kernel may start beside
            // the last blocks of the one before it.
            if kernel.end_ns() > to_ns.saturating_add(LATE_NS) {
                continue;
            }
            let within = kernel.end_ns().min(to_ns).saturating_sub(kernel.start_ns.max(from_ns));
            inside.timed_ns = inside.timed_ns.saturating_add(within);
        }
        if let Some(last) = doubt {
            settle(&mut inside, last);
        }
        inside.in_launch = self.may_be_in_launch(rank, (from_ns, to_ns), passed);
        inside
    }

    /// When another rank was through with an operation at the latest, host monotonic ns: it has started what it issued later. From
    /// then on it kept nobody in there.
    fn left_ns(&self, rank: Rank, (other, part): (&Rank, &Part), passed: &Passed) -> Option<u64> {
        let (later, came_ns) = passed.get(&self.members.get(other)?.record.segment)?;
        let is_past = *other != rank && !part.op.func.is_rooted() && part.issued_at()?.is_before(*later);
        is_past.then_some(*came_ns)
    }

    /// When all its ranks had come to an untimed operation at the latest, host monotonic ns: from then on nobody waited for anybody
    /// in it. A graph's operation is issued when the GPU comes to it; others may be issued as early as a host is ahead of its
    /// GPU.
    fn all_came_ns(
        &self,
        (track, order): Key,
        instance: &Instance,
        lead_ns: &dyn Fn(SegmentId) -> Option<u64>,
    ) -> Option<u64> {
        if instance.parts.len() != track.ranks(self.expected()) || !self.one_clock() {
            return None;
        }
        let came = |(rank, part): (&Rank, &Part)| {
            let lead_ns = match track {
                Track::Replay => 0,
                _ => self
                    .lead_near(track, order, *rank)
                    .or_else(|| lead_ns(self.members.get(rank)?.record.segment))?,
            };
            part.kernel.map(|k| k.start_ns).or(part.op.issued_ns?.checked_add(lead_ns))
        };
        instance.parts.iter().map(came).try_fold(0, |last, t| Some(t?.max(last)))
    }

    /// How far a rank's host was ahead of its GPU in the nearest timed operation of a track, in ns.
    fn lead_near(&self, track: Track, order: u64, rank: Rank) -> Option<u64> {
        let lead_ns = |order: u64| {
            let part = self.instance(track, order)?.parts.get(&rank)?;
            Some(part.kernel?.start_ns.saturating_sub(part.op.issued_ns?))
        };
        (1..=NEAR).find_map(|d| {
            let before = order.checked_sub(d).and_then(lead_ns);
            before.max(lead_ns(order.saturating_add(d)))
        })
    }

    /// True where a rank may have been in a launch of several transfers for more than half of some time. NCCL 2.28 tells one
    /// end for all of them, by the first that is over: the launch lasts up to what the GPU started next, at most.
    fn may_be_in_launch(&self, rank: Rank, (from_ns, to_ns): (u64, u64), passed: &Passed) -> bool {
        let parts = || self.instances().filter_map(|(track, _, i)| Some((track, i.parts.get(&rank)?)));
        let transfers = || parts().filter(|(t, p)| matches!(t, Track::Pair(..)) && p.op.launch().is_known());
        let half_ns = to_ns.saturating_sub(from_ns) / 2;
        let last = transfers().filter(|(_, p)| p.kernel.is_some_and(|k| k.start_ns < to_ns));
        let Some((track, last)) = last.max_by_key(|(_, p)| p.kernel.map(|k| k.start_ns)) else {
            return false;
        };
        let Some(kernel) = last.kernel else { return false };
        let shared = |(t, p): &(Track, &Part)| *t != track && p.op.launch().shared_with(last.op.launch());
        let mut others = transfers().filter(shared).peekable();
        let is_one_end = others.peek().is_some()
            && others.all(|(_, p)| p.kernel.is_some_and(|k| k.end_ns() == kernel.end_ns()));
        let started =
            parts().filter_map(|(_, p)| p.kernel.map(|k| k.start_ns)).filter(|t| *t > kernel.end_ns());
        let next_ns = started.min().unwrap_or(to_ns).min(to_ns);
        let may_be = is_one_end && next_ns.saturating_sub(kernel.end_ns().max(from_ns)) > half_ns;
        may_be && self.left_launch_ns(rank, last, passed).is_none_or(|t| t > from_ns + half_ns)
    }

    /// When all peers of a rank's launch were through with their ends of it, host monotonic ns; absent where that is not known.
    fn left_launch_ns(&self, rank: Rank, of_launch: &Part, passed: &Passed) -> Option<u64> {
        let is_of_launch = |i: &&Instance| {
            i.parts.get(&rank).is_some_and(|p| p.op.launch().shared_with(of_launch.op.launch()))
        };
        // A copy to itself has no peer.
        let has_peer = |track: &Track| !matches!(track, Track::Pair(a, b) if a == b);
        let of_it =
            self.instances().filter(|(track, ..)| has_peer(track)).map(|(.., i)| i).filter(is_of_launch);
        let left_ns = |i: &Instance| {
            let peer = i.parts.iter().find(|(r, _)| **r != rank)?;
            self.left_ns(rank, peer, passed)
        };
        of_it.map(left_ns).try_fold(0, |last, t| Some(t?.max(last)))
    }
}
