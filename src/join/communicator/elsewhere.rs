//! How long a rank was in a communicator's operations, while others waited for it in another one.

use super::super::instance::{Instance, Part};
use super::super::stats::{Class, ClassKey};
use super::{Communicator, Key};
use crate::model::{Rank, Track};
use std::collections::BTreeMap;

/// How long a rank was in operations within some time, in ns, and whether it may have been in untimed ones.
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::join) struct Inside {
    pub(in crate::join) timed_ns: u64,
    pub(in crate::join) untimed: bool,
    /// It may have been in a launch of several transfers, of which the first that is over tells one end for all.
    pub(in crate::join) in_launch: bool,
}

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

    /// How long a rank was in operations between two moments, but for one of them.
    pub(in crate::join) fn inside(&self, rank: Rank, but: Option<Key>, from_ns: u64, to_ns: u64) -> Inside {
        let mut inside = Inside::default();
        // The track of an untimed operation, and those of one track come in their order: a timed one that started before
        // ends the doubt.
        let mut doubt: Option<Track> = None;
        let half_ns = from_ns + to_ns.saturating_sub(from_ns) / 2;
        for (track, _, instance) in self.instances().filter(|(t, o, _)| Some((*t, *o)) != but) {
            let Some(part) = instance.parts.get(&rank) else { continue };
            if doubt.is_some_and(|t| t != track) {
                inside.untimed = true;
            }
            let Some(kernel) = part.kernel else {
                let ended = part.ended_seen_ns.is_some_and(|t| t <= from_ns);
                // An operation issued later held it for the lesser part of the time.
                if !ended && part.op.issued_ns.is_some_and(|t| t < half_ns) {
                    doubt = Some(track);
                }
                continue;
            };
            if kernel.start_ns <= from_ns {
                doubt = None;
            }
            let within = kernel.end_ns().min(to_ns).saturating_sub(kernel.start_ns.max(from_ns));
            inside.timed_ns = inside.timed_ns.saturating_add(within);
        }
        inside.untimed |= doubt.is_some();
        inside.in_launch = self.may_be_in_launch(rank, from_ns, to_ns);
        inside
    }

    /// True where a rank may have been in a launch of several transfers for more than half of some time. NCCL 2.28 tells one
    /// end for all of them, by the first that is over: the launch lasts up to what the GPU started next, at most.
    fn may_be_in_launch(&self, rank: Rank, from_ns: u64, to_ns: u64) -> bool {
        let parts = || self.instances().filter_map(|(track, _, i)| Some((track, i.parts.get(&rank)?)));
        let transfers = || parts().filter(|(t, p)| matches!(t, Track::Pair(..)) && p.op.launch().is_known());
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
        is_one_end && next_ns.saturating_sub(kernel.end_ns().max(from_ns)) > to_ns.saturating_sub(from_ns) / 2
    }
}
