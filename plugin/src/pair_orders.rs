//! Issue orders of point-to-point operations: one count per communicator, peer and direction.
//!
//! Ranks do not share one order of sends and receives, but the k-th send of a pair meets the k-th receive.
//! The table is private memory of fixed size, taken once; pairs beyond it have no order and are counted.

use ringwatch_wire::sync::Word;

/// Pairs the table can hold. 256 KiB; a rank that talks to all of a 1,024-rank communicator uses 2,048.
pub(crate) const PAIRS: usize = 16_384;
/// Words the table needs.
pub(crate) const WORDS: usize = PAIRS * 2;
const TRIES: usize = 32;
const EMPTY: u64 = 0;
/// Left behind by a freed pair: searches go on past it, insertions may take it.
const FREED: u64 = u64::MAX;

/// A view of the table.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pairs {
    words: &'static [Word],
}

const fn key(comm: u64, peer: i32, is_send: bool) -> u64 {
    // Never EMPTY (the low bit of the upper half is set) and never FREED (so is bit 16, cleared).
    (comm & 0xffff) << 48 | 1 << 40 | (is_send as u64) << 36 | (peer as u32 as u64)
}

fn place(key: u64) -> usize {
    (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 50) as usize
}

impl Pairs {
    pub(crate) const fn new(words: &'static [Word]) -> Self {
        Pairs { words }
    }

    /// The next issue order of a pair; `None` when the table has no place left for it.
    pub(crate) fn next(&self, comm: u64, peer: i32, is_send: bool) -> Option<u64> {
        self.place_of(key(comm, peer, is_send)).map(|count| count.add(1))
    }

    /// The same without a lock, where nobody else issues the pair's operations at the same time.
    #[inline(always)]
    pub(crate) fn next_of_one(&self, comm: u64, peer: i32, is_send: bool) -> Option<u64> {
        let key = key(comm, peer, is_send);
        let at = place(key) * 2;
        let first = self.words.get(at).zip(self.words.get(at + 1));
        let known = first.filter(|(owner, _)| owner.get() == key).map(|(_, count)| count);
        let count = known.or_else(|| self.place_of(key))?;
        let order = count.get();
        count.set(order.wrapping_add(1));
        Some(order)
    }

    /// Where a pair is counted, which gets a place if it has none.
    #[inline(never)]
    fn place_of(&self, key: u64) -> Option<&'static Word> {
        let mut free = None;
        for i in 0..TRIES {
            let at = ((place(key) + i) & (PAIRS - 1)) * 2;
            let owner = self.words.get(at)?;
            let count = self.words.get(at + 1)?;
            match owner.get() {
                k if k == key => return Some(count),
                FREED => free = free.or(Some((owner, count, FREED))),
                EMPTY => {
                    free = free.or(Some((owner, count, EMPTY)));
                    break;
                }
                _ => {}
            }
        }
        let (owner, count, was) = free?;
        // A graph's replay and the user's thread may both bring a pair's first operation; the one that comes
        // second finds the key. Free places have a count of 0.
        if owner.replace(was, key) || owner.get() == key { Some(count) } else { None }
    }

    /// Takes back the order that a pair was given last.
    pub(crate) fn take_back(&self, comm: u64, peer: i32, is_send: bool) {
        let key = key(comm, peer, is_send);
        let mut pairs = (0..TRIES).filter_map(|i| {
            let at = ((place(key) + i) & (PAIRS - 1)) * 2;
            Some((self.words.get(at)?, self.words.get(at + 1)?))
        });
        if let Some((_, count)) = pairs.find(|(owner, _)| owner.get() == key) {
            count.add(1u64.wrapping_neg());
        }
    }

    /// Frees the pairs of a communicator.
    pub(crate) fn free(&self, comm: u64) {
        for pair in self.words.chunks_exact(2) {
            if let [owner, count] = pair {
                let k = owner.get();
                if k != EMPTY && k != FREED && k >> 48 == comm & 0xffff {
                    count.set(0);
                    owner.replace(k, FREED);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Pairs {
        let words: Vec<Word> = (0..WORDS).map(|_| Word::new(0)).collect();
        Pairs::new(Vec::leak(words))
    }

    #[test]
    fn pairs_count_apart() {
        let t = table();
        assert_eq!(t.next(1, 0, true), Some(0));
        assert_eq!(t.next(1, 0, true), Some(1));
        assert_eq!(t.next(1, 0, false), Some(0));
        assert_eq!(t.next(2, 0, true), Some(0));
        assert_eq!(t.next(1, 70_000, true), Some(0));
        assert_eq!(t.next(1, 0, true), Some(2));
        t.take_back(1, 0, true);
        t.take_back(1, 5, true);
        assert_eq!(t.next(1, 0, true), Some(2));
        assert_eq!(t.next(1, 0, false), Some(1));
    }

    #[test]
    fn freed_pairs_are_used_again_and_others_stay() {
        let t = table();
        for peer in 0..1000 {
            assert_eq!(t.next(1, peer, true), Some(0));
            assert_eq!(t.next(2, peer, true), Some(0));
        }
        t.free(1);
        for peer in 0..1000 {
            assert_eq!(t.next(2, peer, true), Some(1), "peer {peer}");
            assert_eq!(t.next(3, peer, true), Some(0));
        }
    }

    #[test]
    fn two_threads_never_get_one_order() {
        let t = table();
        let round = Word::new(0);
        // Both begin a pair at the same moment, or they would hardly ever meet.
        let taken = || {
            let take = |peer: i32| {
                round.add(1);
                while round.get() < 2 * (peer as u64 + 1) {
                    core::hint::spin_loop();
                }
                t.next(1, peer, true)
            };
            (0..4000).map(take).collect::<Vec<_>>()
        };
        let [a, b] = std::thread::scope(|s| {
            let both = [(); 2].map(|()| s.spawn(taken));
            both.map(|h| h.join().expect("no panic"))
        });
        for (a, b) in a.into_iter().zip(b) {
            let mut both = [a, b];
            both.sort_unstable();
            assert_eq!(both, [Some(0), Some(1)]);
        }
    }

    #[test]
    fn a_full_table_says_so() {
        let t = table();
        let given = (0..40_000).filter(|p| t.next(1, *p, true).is_some()).count();
        assert!(given <= PAIRS && given > PAIRS / 2, "{given}");
    }
}
