//! How a process mixes transfers and collectives of one communicator.
//!
//! In rings and exchanges all ranks issue as many transfers between two collectives. One that issues more or fewer than all others
//! called them in another order.

use crate::model::{Call, CommId, Mix, Track};
use std::collections::{BTreeMap, VecDeque};

/// Communicators of a process, and collectives of each that are remembered.
const COMMS: usize = 64;
const KEPT: usize = 32;

/// The mix of one communicator.
#[derive(Debug, Clone, Default)]
struct CommMix {
    /// The order of the last collective; absent where the transfers since then are not all known.
    last: Option<u64>,
    /// Transfers before each of the last collectives.
    before: VecDeque<u32>,
    since: u32,
}

/// A process's communicators that have transfers.
#[derive(Debug, Clone, Default)]
pub(super) struct CallMixes(BTreeMap<CommId, CommMix>);

impl CallMixes {
    /// Takes the next call of the process.
    pub(super) fn take(&mut self, call: &Call) {
        match call.kind.track {
            Track::Pair(from, to) if from != to => {
                if self.0.len() < COMMS || self.0.contains_key(&call.kind.comm) {
                    let mix = self.0.entry(call.kind.comm).or_default();
                    mix.since = mix.since.saturating_add(1);
                }
            }
            Track::Collective => {
                if let Some(mix) = self.0.get_mut(&call.kind.comm) {
                    mix.collective(call.order);
                }
            }
            Track::Pair(..) | Track::Replay => {}
        }
    }

    /// Forgets everything, as calls are lost.
    pub(super) fn lose(&mut self) {
        self.0.clear();
    }

    /// The mix of a communicator, where anything is known of it.
    pub(super) fn of(&self, comm: CommId) -> Option<Mix> {
        let mix = self.0.get(&comm)?;
        let first = mix.last?.checked_sub((mix.before.len() as u64).checked_sub(1)?)?;
        Some(Mix { comm, first, before: mix.before.iter().copied().collect(), since: mix.since })
    }

    /// The mixes of all communicators that have collectives as well.
    pub(super) fn all(&self) -> Vec<Mix> {
        self.0.keys().filter_map(|comm| self.of(*comm)).collect()
    }

    /// Makes them of what another join knows.
    pub(super) fn told(mixes: &[Mix]) -> Self {
        let of = |m: &Mix| {
            let before: VecDeque<u32> = m.before.iter().take(KEPT).copied().collect();
            let last = m.first.checked_add(before.len() as u64)?.checked_sub(1)?;
            Some((m.comm, CommMix { last: Some(last), before, since: m.since }))
        };
        CallMixes(mixes.iter().take(COMMS).filter_map(of).collect())
    }

    /// An estimate of its memory, in bytes.
    pub(super) fn weight(&self) -> usize {
        self.0.len() * (size_of::<(CommId, CommMix)>() + KEPT * size_of::<u32>())
    }
}

impl CommMix {
    fn collective(&mut self, order: u64) {
        let since = std::mem::take(&mut self.since);
        // Of the first one that is seen nobody knows what was before it.
        let follows = self.last.and_then(|last| last.checked_add(1)) == Some(order);
        self.last = Some(order);
        if !follows {
            self.before.clear();
            return;
        }
        if self.before.len() >= KEPT {
            self.before.pop_front();
        }
        self.before.push_back(since);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{CallKind, Func, Rank};

    /// Calls by letter: `s` is a transfer, `a` a collective, `x` one of which the record is lost.
    fn mix(letters: &str) -> Option<Mix> {
        let comm = CommId::unowned(7);
        let (mut mixes, mut orders) = (CallMixes::default(), [0, 0]);
        for c in letters.chars() {
            let (track, func, at) = match c {
                's' => (Track::Pair(Rank(0), Rank(1)), Func::Send, 0),
                _ => (Track::Collective, Func::AllReduce, 1),
            };
            if c != 'x' {
                let kind = CallKind { comm, track, func };
                mixes.take(&Call { kind, order: orders[at], issued_ns: 0 });
            }
            orders[at] += 1;
        }
        assert_eq!(CallMixes::told(&mixes.all()).of(comm), mixes.of(comm));
        mixes.of(comm)
    }

    #[test]
    fn transfers_between_collectives_are_counted() {
        let known = |letters| mix(letters).map(|m| (m.first, m.before, m.since));
        assert_eq!(known("sasssasasas"), Some((1, vec![3, 1, 1], 1)));
        assert_eq!(known("asassa"), Some((2, vec![2], 0)), "the first comes before any transfer");
        assert_eq!(known("sasasxsasa"), Some((4, vec![1], 0)), "one is lost");
        assert_eq!(known("sss"), None);
        assert_eq!(known("aaa"), None);
        let many = known(&"sa".repeat(100)).expect("known");
        assert_eq!((many.0, many.1.len()), (68, KEPT));
    }
}
