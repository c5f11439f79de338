//! How long a rank was in a communicator's operations, while others waited for it in another one.

use super::super::class_key::ClassKey;
use super::super::instance::{Instance, IssuedAt, LATE_NS, Part};
use super::super::stats::Class;
use super::{Communicator, Key};
use crate::model::{CommId, Rank, SegmentId, Track};
use std::collections::BTreeMap;

/// Operations of a track that are looked at for a timed one, before and behind an untimed one.
const NEAR: u64 = 64;

/// Untimed operations that are counted at most. More are not told apart.
const DOUBTS: usize = 16;

/// How long a rank was in operations within some time, in ns, and the untimed ones in which it may have been.
#[derive(Debug, Clone, Default)]
pub(in crate::join) struct Inside {
    pub(in crate::join) timed_ns: u64,
    /// Each holds a rank once at most.
    pub(in crate::join) doubts: Vec<(CommId, Key)>,
    /// There are more of them, or not all are known.
    pub(in crate::join) has_more_doubts: bool,
    /// It may have been in a launch of several transfers, of which the first that is over tells one end for all.
    pub(in crate::join) in_launch: bool,
    /// It may have been in an operation or a launch in which only ranks of its own host can have held it.
    pub(in crate::join) on_host: bool,
}

/// When processes started an operation, host monotonic ns, and when they had issued it: by then they were through with whatever
/// they had issued before.
pub(in crate::join) type Passed = BTreeMap<SegmentId, (IssuedAt, u64)>;

impl Communicator {
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
        let over_ns = |(key, instance): (Key, &Instance)| {
            let left_ns = instance.parts.iter().filter_map(|end| self.left_ns(rank, end, passed)).min();
            let until_ns = self.all_came_ns(key, instance, lead_ns).into_iter().chain(left_ns).min();
            until_ns.filter(|t| *t <= half_ns)
        };
        let settle = |inside: &mut Inside, (key, instance): (Key, &Instance)| {
            if let Some(until_ns) = over_ns((key, instance)) {
                inside.timed_ns += until_ns.saturating_sub(from_ns);
                return;
            }
            if self.is_of_host(rank, key.0) {
                inside.on_host = true;
                return;
            }
            // The operations of a track come in their order: those before one that is over are over.
            for order in (0..=key.1).rev() {
                let known = self.instance(key.0, order);
                let Some((before, part)) = known.and_then(|i| Some((i, i.parts.get(&rank)?))) else {
                    inside.has_more_doubts = true;
                    return;
                };
                let is_over = part.kernel.is_some() || part.ended_seen_ns.is_some_and(|t| t <= from_ns);
                if is_over || order < key.1 && over_ns(((key.0, order), before)).is_some() {
                    return;
                }
                if inside.doubts.len() == DOUBTS {
                    inside.has_more_doubts = true;
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
                // What was issued later keeps no stream from what was issued before.
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
        match self.may_be_in_launch(rank, (from_ns, to_ns), passed) {
            Some(true) => inside.on_host = true,
            Some(false) => inside.in_launch = true,
            None => {}
        }
        inside
    }

    /// True where all other ranks of a track's operations are on a rank's host.
    fn is_of_host(&self, rank: Rank, track: Track) -> bool {
        let clock = |r: &Rank| self.members.get(r).map(|m| m.record.host_clock);
        let is_near = |r: &Rank| clock(r).is_some() && clock(r) == clock(&rank);
        match track {
            Track::Pair(a, b) => is_near(&a) && is_near(&b),
            _ => self.members.len() == self.expected() && self.one_clock(),
        }
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
        let all = match track {
            Track::Pair(a, b) if a == b => 1,
            Track::Pair(..) => 2,
            _ => self.expected(),
        };
        if instance.parts.len() != all || !self.one_clock() {
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

    /// Says whether a rank may have been in a launch of several transfers for more than half of some time. NCCL 2.28 tells one
    /// end for all of them, by the first that is over: the launch lasts up to what the GPU started next, at most.
    fn may_be_in_launch(&self, rank: Rank, (from_ns, to_ns): (u64, u64), passed: &Passed) -> Option<bool> {
        let parts = || self.instances().filter_map(|(track, _, i)| Some((track, i.parts.get(&rank)?)));
        let transfers = || parts().filter(|(t, p)| matches!(t, Track::Pair(..)) && p.op.launch().is_known());
        let half_ns = to_ns.saturating_sub(from_ns) / 2;
        let last = transfers().filter(|(_, p)| p.kernel.is_some_and(|k| k.start_ns < to_ns));
        let (track, last) = last.max_by_key(|(_, p)| p.kernel.map(|k| k.start_ns))?;
        let kernel = last.kernel?;
        let shared = |(t, p): &(Track, &Part)| *t != track && p.op.launch().shared_with(last.op.launch());
        let mut others = transfers().filter(shared).peekable();
        let is_one_end = others.peek().is_some()
            && others.all(|(_, p)| p.kernel.is_some_and(|k| k.end_ns() == kernel.end_ns()));
        let started =
            parts().filter_map(|(_, p)| p.kernel.map(|k| k.start_ns)).filter(|t| *t > kernel.end_ns());
        let next_ns = started.min().unwrap_or(to_ns).min(to_ns);
        let may_be = is_one_end && next_ns.saturating_sub(kernel.end_ns().max(from_ns)) > half_ns;
        if !may_be
            || self.left_launch_ns(rank, last, passed, |_| true).is_some_and(|t| t <= from_ns + half_ns)
        {
            return None;
        }
        let beyond_ns = self.left_launch_ns(rank, last, passed, |track| !self.is_of_host(rank, track));
        Some(beyond_ns.is_some_and(|t| t <= from_ns + half_ns))
    }

    /// When the peers of a rank's launch were through with their ends of it, in tracks that count, host monotonic ns; absent where
    /// that is not known.
    fn left_launch_ns(
        &self,
        rank: Rank,
        of_launch: &Part,
        passed: &Passed,
        counts: impl Fn(Track) -> bool,
    ) -> Option<u64> {
        let is_of_launch = |i: &Instance| {
            i.parts.get(&rank).is_some_and(|p| p.op.launch().shared_with(of_launch.op.launch()))
        };
        let of_it = self.instances().filter(|(t, _, i)| is_of_launch(i) && counts(*t)).map(|(.., i)| i);
        let left_ns = |i: &Instance| {
            let peer = i.parts.iter().find(|(r, _)| **r != rank)?;
            self.left_ns(rank, peer, passed)
        };
        of_it.map(left_ns).try_fold(0, |last, t| Some(t?.max(last)))
    }
}
