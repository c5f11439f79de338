//! The issue orders of operations that were counted and then evicted from memory.
//!
//! A record that comes later must not count such an operation again, and one of an operation that was never counted must
//! not be lost in silence. Orders are counted nearly in sequence, so a track needs one range and seldom a second one.

use crate::model::{CommId, Track};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Range;

/// Ranges kept of a track. Beyond, the oldest ones become one, in which nothing is known for certain.
const RANGES_KEPT: usize = 16;
/// Tracks kept of a communicator. What is counted in others is forgotten.
const TRACKS_KEPT: usize = 16_384;
/// Tracks kept of a communicator that has to make room, or was evicted itself.
const TRACKS_LEFT: usize = 1024;
/// Communicators that were evicted whole and are remembered.
const COMMUNICATORS_KEPT: usize = 1024;
/// Tracks of all of these together. Beyond, those that were evicted first are not remembered any more.
const TRACKS_KEPT_IN_ALL: usize = 65_536;

/// The fate of an operation that is not in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    /// It was not seen before.
    New,
    /// It was counted once and evicted.
    Counted,
    /// It is so old that only a bound is known: it may have been counted, or not.
    Unknown,
}

/// The orders of one track.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Orders {
    /// Below this, it is not known which orders were counted.
    unknown_below: u64,
    /// The newest range; the others are in `older`, sorted.
    newest: Range<u64>,
    older: Vec<Range<u64>>,
}

impl Orders {
    fn fate(&self, order: u64) -> Fate {
        if order >= self.newest.end {
            return Fate::New;
        }
        let is_in_older = || {
            let at = self.older.partition_point(|r| r.end <= order);
            self.older.get(at).is_some_and(|r| r.contains(&order))
        };
        match () {
            () if self.newest.contains(&order) || is_in_older() => Fate::Counted,
            () if order < self.unknown_below => Fate::Unknown,
            () => Fate::New,
        }
    }

    fn add(&mut self, order: u64) {
        // Nobody issues so many; a forged order of this size has no end.
        let Some(end) = order.checked_add(1) else { return };
        if order == self.newest.end && !self.newest.is_empty() {
            self.newest.end = end;
            return;
        }
        if self.fate(order) == Fate::Counted {
            return;
        }
        if self.newest.is_empty() {
            self.newest = order..end;
            return;
        }
        // Seldom: the range is put among the others, and joined with its neighbors.
        let newest = std::mem::take(&mut self.newest);
        self.older.push(newest);
        let at = self.older.partition_point(|r| r.end <= order);
        self.older.insert(at, order..end);
        self.older.dedup_by(|next, before| {
            let joined = before.end >= next.start;
            if joined {
                before.end = before.end.max(next.end);
            }
            joined
        });
        self.newest = self.older.pop().unwrap_or_default();
        if self.older.len() >= RANGES_KEPT {
            self.unknown_below = self.older.remove(0).end.max(self.unknown_below);
        }
    }

    fn bytes(&self) -> usize {
        self.older.capacity() * size_of::<Range<u64>>()
    }
}

/// The orders of a communicator's tracks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Evicted {
    tracks: BTreeMap<Track, Orders>,
    bytes: usize,
}

impl Evicted {
    /// The fate of an operation that is not in memory.
    pub(super) fn fate(&self, (track, order): (Track, u64)) -> Fate {
        self.tracks.get(&track).map_or(Fate::New, |o| o.fate(order))
    }

    /// Takes that an operation was counted and is evicted.
    pub(super) fn add(&mut self, (track, order): (Track, u64)) {
        if self.tracks.len() >= TRACKS_KEPT && !self.tracks.contains_key(&track) {
            return;
        }
        let orders = self.tracks.entry(track).or_default();
        let before = orders.bytes();
        orders.add(order);
        self.bytes = self.bytes + orders.bytes() - before;
    }

    /// Forgets all but the first tracks: collectives, and some pairs.
    pub(super) fn shorten(&mut self) {
        let Some(first) = self.tracks.keys().nth(TRACKS_LEFT).copied() else { return };
        self.tracks.split_off(&first);
        self.bytes = self.tracks.values().map(Orders::bytes).sum();
    }

    /// Memory that it takes, in bytes, as an estimate.
    pub(super) fn bytes(&self) -> usize {
        self.tracks.len() * size_of::<(Track, Orders)>() * 2 + self.bytes
    }
}

/// A communicator that was evicted.
#[derive(Debug, Clone)]
struct Gone {
    evicted: Evicted,
    /// When the last of its operations was issued, host monotonic ns.
    issued_ns: u64,
}

/// Communicators that were evicted whole, with the orders that were counted of them.
#[derive(Debug, Clone, Default)]
pub(super) struct Retired {
    comms: HashMap<CommId, Gone>,
    oldest_first: VecDeque<CommId>,
    tracks: usize,
}

impl Retired {
    /// Remembers a communicator whose last operation was issued at this moment.
    pub(super) fn put(&mut self, comm: CommId, mut evicted: Evicted, issued_ns: u64) {
        self.take(comm);
        evicted.shorten();
        self.tracks += evicted.tracks.len();
        self.comms.insert(comm, Gone { evicted, issued_ns });
        self.oldest_first.push_back(comm);
        while self.comms.len() > COMMUNICATORS_KEPT || self.tracks > TRACKS_KEPT_IN_ALL {
            let Some(oldest) = self.oldest_first.front().copied() else { return };
            self.take(oldest);
        }
    }

    /// Gives back what is known of a communicator that a rank is found in which was made at this moment. One that was made
    /// after the last operation is another communicator of the same id.
    pub(super) fn take_for(&mut self, comm: CommId, made_ns: u64) -> Option<(Evicted, u64)> {
        self.take(comm).filter(|gone| made_ns <= gone.issued_ns).map(|gone| (gone.evicted, gone.issued_ns))
    }

    fn take(&mut self, comm: CommId) -> Option<Gone> {
        let gone = self.comms.remove(&comm)?;
        self.tracks -= gone.evicted.tracks.len();
        self.oldest_first.retain(|c| *c != comm);
        Some(gone)
    }

    /// Takes a record of an operation whose communicator is not in memory. True where the operation was never counted: it is
    /// lost. Its other records are the same loss, in a track that is known.
    pub(super) fn loses(&mut self, comm: CommId, key: (Track, u64)) -> bool {
        let Some(Gone { evicted, .. }) = self.comms.get_mut(&comm) else { return false };
        let is_lost = evicted.fate(key) != Fate::Counted;
        if is_lost && evicted.tracks.contains_key(&key.0) {
            evicted.add(key);
        }
        is_lost
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Rank;
    use proptest::prelude::*;

    const TRACK: Track = Track::Collective;

    fn of(orders: impl IntoIterator<Item = u64>) -> Evicted {
        let mut e = Evicted::default();
        orders.into_iter().for_each(|o| e.add((TRACK, o)));
        e
    }

    proptest! {
        #[test]
        fn it_knows_what_a_set_knows(orders in prop::collection::vec(0u64..30, 0..60)) {
            let e = of(orders.iter().copied());
            for order in 0..40 {
                let expected = if orders.contains(&order) { Fate::Counted } else { Fate::New };
                prop_assert_eq!(e.fate((TRACK, order)), expected, "{}", order);
            }
        }
    }

    #[test]
    fn many_gaps_are_bounded_and_the_oldest_are_unknown() {
        let e = of((0..10_000).map(|o| o * 2));
        assert_eq!(e.fate((TRACK, 0)), Fate::Unknown);
        assert_eq!((e.fate((TRACK, 19_998)), e.fate((TRACK, 19_997))), (Fate::Counted, Fate::New));
        assert!(e.bytes() < 1_024, "{}", e.bytes());
    }

    #[test]
    fn orders_in_sequence_take_one_range_up_to_the_last_order() {
        let e = of((0..1_000).chain([u64::MAX, u64::MAX - 1, 50]));
        assert_eq!(e.tracks.get(&TRACK).map(|o| o.older.len()), Some(1));
        assert_eq!(
            [999, 1_000, u64::MAX - 1].map(|o| e.fate((TRACK, o))),
            [Fate::Counted, Fate::New, Fate::Counted]
        );
    }

    #[test]
    fn what_comes_for_a_retired_communicator_is_lost_once_unless_it_was_counted() {
        let comm = CommId::unowned(7);
        let mut r = Retired::default();
        assert!(!r.loses(comm, (TRACK, 3)), "nothing is known of it");
        r.put(comm, of(0..3), 100);
        assert!(!r.loses(comm, (TRACK, 2)));
        assert!(r.loses(comm, (TRACK, 3)) && !r.loses(comm, (TRACK, 3)), "once");
        assert!(r.loses(comm, (Track::Replay, 0)) && r.loses(comm, (Track::Replay, 0)), "no track is added");
        assert_eq!(r.take_for(comm, 100), Some((of(0..4), 100)));
        r.put(comm, of(0..3), 100);
        assert_eq!(r.take_for(comm, 101), None, "it was made later: another one of the same id");
    }

    #[test]
    fn retired_communicators_are_bounded() {
        let mut r = Retired::default();
        for n in 0..2_000 {
            let mut evicted = Evicted::default();
            (0..100).for_each(|peer| evicted.add((Track::Pair(Rank(0), Rank(peer)), 0)));
            r.put(CommId::unowned(n), evicted, 0);
        }
        assert_eq!((r.comms.len(), r.oldest_first.len(), r.tracks), (655, 655, 65_500));
        assert!(r.take(CommId::unowned(1_999)).is_some() && r.take(CommId::unowned(0)).is_none());
        let mut wide = Evicted::default();
        (0..20_000).for_each(|peer| wide.add((Track::Pair(Rank(0), Rank(peer)), 0)));
        assert_eq!(wide.tracks.len(), TRACKS_KEPT);
        r.put(CommId::unowned(1), wide, 0);
        assert_eq!(r.comms.get(&CommId::unowned(1)).map(|g| g.evicted.tracks.len()), Some(TRACKS_LEFT));
    }
}
