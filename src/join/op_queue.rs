//! The operations of a communicator by track and issue order. Orders are nearly dense, so each track is a queue in which
//! an operation is found by counting from the first one; where a job lies about its orders, by halving.
//!
//! What is forgotten is used again: a steady job costs no allocation here.

use super::evicted::{Evicted, Fate};
use super::instance::Instance;
use crate::model::Track;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

/// Forgotten operations that are kept to be used again.
const SPARE: usize = 256;

/// A track and an issue order.
pub(super) type Key = (Track, u64);

#[derive(Debug, Clone)]
struct Place {
    key: Key,
    /// It was not counted yet.
    open: bool,
    instance: Box<Instance>,
}

/// The place of an operation's record.
#[derive(Debug)]
pub(super) enum Entry<'a> {
    There(&'a mut Instance),
    /// The operation was counted and evicted.
    Evicted,
    /// There is no place left for it.
    Refused,
}

/// Operations by track and order.
#[derive(Debug, Clone, Default)]
pub(super) struct OpQueue {
    tracks: BTreeMap<Track, VecDeque<Place>>,
    /// The collectives that were counted, in the order in which they were.
    counted_collectives: VecDeque<Key>,
    /// The same of transfers.
    counted_transfers: VecDeque<Key>,
    len: usize,
    open: usize,
    #[expect(clippy::vec_box, reason = "the boxes are what is used again")]
    spare: Vec<Box<Instance>>,
    evicted: Evicted,
    /// Records are a sample, of which nothing is counted here: what was evicted may come again.
    is_sample: bool,
}

/// Where an order is, or where it belongs.
fn find(queue: &VecDeque<Place>, order: u64) -> Result<usize, usize> {
    let (Some(first), Some(last)) = (queue.front(), queue.back()) else { return Err(0) };
    if order > last.key.1 {
        return Err(queue.len());
    }
    let Some(guess) = order.checked_sub(first.key.1) else { return Err(0) };
    let guess = usize::try_from(guess).unwrap_or(usize::MAX);
    if queue.get(guess).is_some_and(|p| p.key.1 == order) {
        return Ok(guess);
    }
    // Where an old one is stuck, those behind it are forgotten: then from the last one.
    let guess = usize::try_from(last.key.1 - order).ok().and_then(|back| queue.len().checked_sub(back + 1));
    match guess {
        Some(at) if queue.get(at).is_some_and(|p| p.key.1 == order) => Ok(at),
        _ => queue.binary_search_by_key(&order, |p| p.key.1),
    }
}

impl OpQueue {
    pub(super) fn get(&self, key: &Key) -> Option<&Instance> {
        let queue = self.tracks.get(&key.0)?;
        Some(&queue.get(find(queue, key.1).ok()?)?.instance)
    }

    pub(super) fn get_mut(&mut self, key: &Key) -> Option<&mut Instance> {
        let queue = self.tracks.get_mut(&key.0)?;
        let at = find(queue, key.1).ok()?;
        Some(&mut queue.get_mut(at)?.instance)
    }

    /// The operation, a new one where there is none. One that was counted and evicted is not made again. `refuse` may refuse a
    /// new one; it gets whether that would be older than all of its track, and how many operations there are.
    pub(super) fn entry(&mut self, key: Key, refuse: impl FnOnce(bool, usize) -> bool) -> Entry<'_> {
        let queue = self.tracks.get(&key.0);
        let at = match queue.map_or(Err(0), |q| find(q, key.1)) {
            Ok(at) => at,
            Err(at) => {
                let is_oldest = at == 0 && queue.is_some();
                match self.evicted.fate(key) {
                    Fate::Counted => return Entry::Evicted,
                    Fate::Unknown => return Entry::Refused,
                    Fate::New if refuse(is_oldest, self.len) => return Entry::Refused,
                    Fate::New => {}
                }
                let instance = self.spare.pop().unwrap_or_default();
                self.tracks.entry(key.0).or_default().insert(at, Place { key, open: true, instance });
                self.len += 1;
                self.open += 1;
                at
            }
        };
        let place = self.tracks.get_mut(&key.0).and_then(|q| q.get_mut(at));
        place.map_or(Entry::Refused, |p| Entry::There(&mut p.instance))
    }

    /// From now on does not remember what is evicted.
    pub(super) fn take_a_sample(&mut self) {
        if !self.is_sample {
            self.is_sample = true;
            self.evicted = Evicted::default();
        }
    }

    /// Forgets what was evicted of an earlier communicator of the same id.
    pub(super) fn begin_again(&mut self) {
        self.evicted = Evicted::default();
    }

    /// Makes room among the evicted orders.
    pub(super) fn shorten_evicted(&mut self) {
        self.evicted.shorten();
    }

    /// The orders that were counted, in memory or not, once nothing is kept here any more.
    pub(super) fn into_evicted(self) -> Evicted {
        let mut evicted = self.evicted;
        self.tracks.values().flatten().filter(|p| !p.open).for_each(|p| evicted.add(p.key));
        evicted
    }

    /// Takes what was counted before, where the communicator itself was evicted.
    pub(super) fn resume(&mut self, evicted: Evicted) {
        self.evicted = evicted;
    }

    /// All, by track and order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&Key, &Instance)> {
        self.tracks.values().flatten().map(|p| (&p.key, &*p.instance))
    }

    /// The operations of a track from one order up to another.
    pub(super) fn range_mut(&mut self, keys: Range<Key>) -> impl Iterator<Item = (&Key, &mut Instance)> {
        let queue = self.tracks.get_mut(&keys.start.0);
        let from = queue.as_ref().map_or(0, |q| find(q, keys.start.1).unwrap_or_else(|at| at));
        let in_range = queue.map(|q| q.range_mut(from..)).into_iter().flatten();
        in_range.take_while(move |p| p.key < keys.end).map(|p| (&p.key, &mut *p.instance))
    }

    /// The operations that were not counted yet.
    pub(super) fn open(&self) -> impl Iterator<Item = (&Key, &Instance)> {
        self.tracks.values().flatten().filter(|p| p.open).map(|p| (&p.key, &*p.instance))
    }

    /// The operations of a track that were not counted yet.
    pub(super) fn open_of(&self, track: Track) -> impl DoubleEndedIterator<Item = (&Key, &Instance)> {
        let queue = self.tracks.get(&track).into_iter().flatten();
        queue.filter(|p| p.open).map(|p| (&p.key, &*p.instance))
    }

    /// The last that was not counted yet.
    pub(super) fn last_open(&self) -> Option<Key> {
        self.tracks.values().rev().find_map(|q| q.iter().rev().find(|p| p.open)).map(|p| p.key)
    }

    /// Begins to look at one of which something was heard; false where it was counted already.
    pub(super) fn look_at(&mut self, key: &Key) -> bool {
        let queue = self.tracks.get_mut(&key.0);
        let place = queue.and_then(|q| find(q, key.1).ok().and_then(|at| q.get_mut(at)));
        place.is_some_and(|p| {
            p.instance.touched = false;
            p.open
        })
    }

    pub(super) fn is_open(&self, key: &Key) -> bool {
        let queue = self.tracks.get(&key.0);
        queue.and_then(|q| q.get(find(q, key.1).ok()?)).is_some_and(|p| p.open)
    }

    /// It is counted now.
    pub(super) fn close(&mut self, key: &Key) -> Option<&mut Instance> {
        let queue = self.tracks.get_mut(&key.0)?;
        let at = find(queue, key.1).ok()?;
        let place = queue.get_mut(at)?;
        if std::mem::take(&mut place.open) {
            self.open -= 1;
            let counted =
                if is_transfer(key) { &mut self.counted_transfers } else { &mut self.counted_collectives };
            counted.push_back(*key);
        }
        place.instance.counted = true;
        Some(&mut place.instance)
    }

    /// Memory that it takes without ranks' parts, in bytes, as an estimate.
    pub(super) fn weight(&self) -> usize {
        const TRACK: usize = 256;
        (self.len + self.spare.len()) * (size_of::<Place>() + size_of::<Instance>())
            + (self.counted_collectives.len() + self.counted_transfers.len()) * size_of::<Key>()
            + self.tracks.len() * TRACK
            + self.evicted.bytes()
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// How many of them were not counted yet.
    pub(super) fn open_len(&self) -> usize {
        self.open
    }

    /// The numbers of collectives and of transfers that were counted and are kept.
    pub(super) fn counted_len(&self) -> (usize, usize) {
        (self.counted_collectives.len(), self.counted_transfers.len())
    }

    /// Forgets so many collectives and transfers that were counted first, but for one operation; hands each to `gone`. Their room
    /// is used again, or is given back.
    pub(super) fn forget(
        &mut self,
        (collectives, transfers): (usize, usize),
        but: Option<Key>,
        again: bool,
        mut gone: impl FnMut(&Key, &mut Instance),
    ) {
        if !again {
            self.spare = Vec::new();
        }
        for (is_transfers, n) in [(false, collectives), (true, transfers)] {
            let counted =
                if is_transfers { &mut self.counted_transfers } else { &mut self.counted_collectives };
            let n = n.min(counted.len());
            let mut stays = None;
            for key in counted.drain(..n) {
                if Some(key) == but {
                    stays = Some(key);
                    continue;
                }
                let Some(mut place) = take(&mut self.tracks, &key) else { continue };
                gone(&key, &mut place.instance);
                if !self.is_sample {
                    self.evicted.add(key);
                }
                self.len -= 1;
                if again && self.spare.len() < SPARE {
                    place.instance.clear();
                    self.spare.push(place.instance);
                }
            }
            stays.into_iter().for_each(|key| counted.push_front(key));
        }
    }
}

fn is_transfer(key: &Key) -> bool {
    matches!(key.0, Track::Pair(..))
}

/// Takes an operation out of its track, and the track with its last one.
fn take(tracks: &mut BTreeMap<Track, VecDeque<Place>>, key: &Key) -> Option<Place> {
    let queue = tracks.get_mut(&key.0)?;
    let place = queue.remove(find(queue, key.1).ok()?);
    if queue.is_empty() {
        tracks.remove(&key.0);
    }
    place
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Rank;

    const PAIR: Track = Track::Pair(Rank(0), Rank(1));

    fn held(orders: &[(Track, u64)]) -> OpQueue {
        let mut h = OpQueue::default();
        for key in orders {
            assert!(matches!(h.entry(*key, |_, _| false), Entry::There(_)));
        }
        h
    }

    fn keys(h: &OpQueue) -> Vec<Key> {
        h.iter().map(|(k, _)| *k).collect()
    }

    #[test]
    fn they_are_found_and_told_in_order_however_they_came() {
        let c = Track::Collective;
        let far = u64::MAX - 1;
        let mut h = held(&[(PAIR, 3), (c, 7), (c, 5), (c, far), (c, 6), (c, 5)]);
        assert_eq!(keys(&h), [(c, 5), (c, 6), (c, 7), (c, far), (PAIR, 3)]);
        assert_eq!((h.len(), h.open_len()), (5, 5));
        assert!([5, 6, 7, far].iter().all(|o| h.get(&(c, *o)).is_some()));
        assert!([0, 4, 8, far - 1, u64::MAX].iter().all(|o| h.get(&(c, *o)).is_none()));
        let within: Vec<u64> = h.range_mut((c, 6)..(c, far)).map(|((_, o), _)| *o).collect();
        assert_eq!(within, [6, 7]);
        assert_eq!(h.range_mut((Track::Replay, 0)..(Track::Replay, 9)).count(), 0);
    }

    #[test]
    fn an_older_one_than_all_can_be_refused() {
        let c = Track::Collective;
        let mut h = held(&[(c, 5), (c, 7)]);
        assert!(matches!(h.entry((c, 4), |is_oldest, n| is_oldest && n >= 2), Entry::Refused));
        assert!(
            matches!(h.entry((c, 6), |is_oldest, n| is_oldest && n >= 2), Entry::There(_)),
            "it is not older than all"
        );
        assert!(
            matches!(h.entry((PAIR, 0), |is_oldest, n| is_oldest && n >= 2), Entry::There(_)),
            "it is the first of its track"
        );
    }

    #[test]
    fn transfers_are_forgotten_by_age_whatever_their_track() {
        let back = Track::Pair(Rank(1), Rank(0));
        let all = [(PAIR, 0), (back, 0), (Track::Collective, 0), (PAIR, 1), (back, 1)];
        let mut h = held(&all);
        all.iter().for_each(|key| assert!(h.close(key).is_some()));
        assert_eq!(h.counted_len(), (1, 4));
        h.forget((0, 2), None, true, |_, _| {});
        assert_eq!(keys(&h), [(Track::Collective, 0), (PAIR, 1), (back, 1)]);
    }

    #[test]
    fn the_first_that_were_counted_go_and_what_is_stuck_stays() {
        let c = Track::Collective;
        let mut h = held(&[(c, 0), (c, 1), (c, 2), (c, 3), (c, 4), (PAIR, 0)]);
        for key in [(c, 0), (c, 2), (c, 3), (c, 4), (PAIR, 0)] {
            assert!(h.close(&key).is_some_and(|i| i.counted));
        }
        assert!(!h.is_open(&(c, 0)) && h.is_open(&(c, 1)));
        assert_eq!((h.open_len(), h.open().count(), h.open_of(c).count()), (1, 1, 1));
        let mut gone = Vec::new();
        h.forget((4, 0), Some((c, 3)), true, |k, _| gone.push(*k));
        assert_eq!(gone, [(c, 0), (c, 2), (c, 4)]);
        assert_eq!((keys(&h), h.len()), (vec![(c, 1), (c, 3), (PAIR, 0)], 3));
        assert_eq!(h.counted_len(), (1, 1));
        h.forget((9, 9), None, true, |_, _| {});
        assert_eq!(keys(&h), [(c, 1)]);
        assert!(
            matches!(h.entry((c, 9), |_, _| false), Entry::There(i) if !i.counted),
            "what is used again is new"
        );
        assert!(matches!(h.entry((c, 4), |_, _| false), Entry::Evicted), "it was counted");
        assert!(matches!(h.entry((PAIR, 0), |_, _| false), Entry::Evicted), "its whole track is gone");
        assert_eq!(keys(&h), [(c, 1), (c, 9)], "and makes no empty track");
    }
}
