//! Pairs of handles, ours and the other plugin's, by a number for NCCL.
//!
//! `shelf (3 bits) | ticket (41)`. Each shelf is a ring of slots like the segment's, in private memory: a pair is kept
//! until its slot is taken again, and who comes later finds by the ticket that it is gone. Nothing is freed.

use crate::runtime::sys::{self, InChild};
use ringwatch_wire::codes::Loss;
use ringwatch_wire::ring::Ring;
use ringwatch_wire::sync::{self, Seen, Word};

/// A pair of handles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pair {
    /// 0 where we have none.
    pub(crate) ours: u64,
    pub(crate) theirs: u64,
    /// NCCL's ABI version.
    pub(crate) abi: u32,
    /// The other plugin's mask when NCCL decided about the event: it holds for what hangs on it as well.
    pub(crate) mask: u32,
    /// NCCL tells no states of it.
    pub(crate) mute: bool,
}

impl Pair {
    /// All but the handles, in a word.
    fn about(&self) -> u64 {
        u64::from(self.mask) << 32 | u64::from(self.mute) << 31 | u64::from(self.abi)
    }

    fn from_words(ours: u64, theirs: u64, about: u64) -> Self {
        let abi = about as u32 & !(1 << 31);
        Pair { ours, theirs, abi, mask: (about >> 32) as u32, mute: about >> 31 & 1 == 1 }
    }
}

/// Kinds of events that are kept apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shelf {
    Op,
    /// Calls that a graph captures: named by every replay, for as long as the job lives.
    Captured,
    Channel,
    Transfer,
    Step,
    Other,
}

const SHELVES: [Shelf; 6] =
    [Shelf::Op, Shelf::Captured, Shelf::Channel, Shelf::Transfer, Shelf::Step, Shelf::Other];

/// Powers of two of their slots. An operation takes up to six pairs; the segment's rings hold 8,192 operations.
const SHIFTS: [u32; SHELVES.len()] = [16, 16, 15, 13, 14, 12];

const PAIR_WORDS: usize = 4;
const TICKET_BITS: u32 = 41;
const TICKET_MASK: u64 = (1 << TICKET_BITS) - 1;
/// A cache line for the next ticket of each shelf.
const LINE: usize = 8;

/// Words that the pairs need: 6 MiB.
pub(crate) const WORDS: usize = {
    let mut words = SHELVES.len() * LINE;
    let mut i = 0;
    while i < SHELVES.len() {
        words += PAIR_WORDS << SHIFTS[i];
        i += 1;
    }
    words
};

/// Memory of this process alone, of which a forked child has nothing.
#[expect(unsafe_code, reason = "maps memory for good")]
pub(crate) fn memory(words: usize) -> Option<&'static [Word]> {
    let bytes = words.checked_mul(size_of::<Word>())?;
    let at = sys::map(None, bytes)?;
    // SAFETY: our own fresh mapping, whole. Where the kernel refuses, a child just has the memory as well.
    unsafe { sys::on_fork(at, bytes, InChild::Absent) };
    // SAFETY: so many bytes are mapped, page-aligned and for good; zeros are valid words.
    Some(unsafe { core::slice::from_raw_parts(at.cast::<Word>(), words) })
}

/// All pairs.
#[derive(Debug)]
pub(crate) struct Pairs {
    shelves: [Ring<'static, PAIR_WORDS>; SHELVES.len()],
}

/// The shelf that a handle's value names.
pub(crate) fn shelf_of(value: u64) -> Option<Shelf> {
    SHELVES.get((value >> TICKET_BITS) as usize).copied()
}

impl Pairs {
    pub(crate) fn new(words: &'static [Word]) -> Self {
        let mut at = SHELVES.len() * LINE;
        let mut i = 0;
        let shelves = SHIFTS.map(|shift| {
            let end = at + (PAIR_WORDS << shift);
            let ring = Ring::new(words.get(at..end).unwrap_or(&[]), words.get(i * LINE), shift);
            (at, i) = (end, i + 1);
            ring
        });
        Pairs { shelves }
    }

    /// Keeps a pair; gives back its number.
    pub(crate) fn keep(&self, shelf: Shelf, pair: Pair) -> Option<u64> {
        let (ticket, slot) = self.shelves.get(shelf as usize)?.claim().ok()?;
        slot.set_all(1, [pair.ours, pair.theirs, pair.about()]);
        slot.publish();
        Some((shelf as u64) << TICKET_BITS | ticket & TICKET_MASK)
    }

    /// The pair of a number.
    pub(crate) fn find(&self, value: u64) -> Result<Pair, Loss> {
        let shelf = shelf_of(value).ok_or(Loss::Foreign)?;
        let ticket = value & TICKET_MASK;
        let slot = self.shelves.get(shelf as usize).and_then(|s| s.slot(ticket)).ok_or(Loss::Foreign)?;
        let mut words = [0; PAIR_WORDS];
        match sync::read(slot, &mut words) {
            Seen::Whole(t) if t & TICKET_MASK == ticket => {
                let [_, ours, theirs, about] = words;
                Ok(Pair::from_words(ours, theirs, about))
            }
            _ => Err(Loss::Stale),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pair_is_known_until_its_slot_is_taken_again() {
        let pairs = Pairs::new(memory(WORDS).expect("memory"));
        let pair = |n: u64| Pair {
            ours: n,
            theirs: n << 8 | 1,
            abi: 5,
            mask: (n as u32).rotate_right(4),
            mute: n % 2 == 1,
        };
        let numbers: Vec<_> = SHELVES.map(|s| pairs.keep(s, pair(s as u64)).expect("room")).into();
        for (n, s) in numbers.iter().zip(SHELVES) {
            assert_eq!(shelf_of(*n), Some(s));
            assert_eq!(pairs.find(*n), Ok(pair(s as u64)));
        }
        for (shift, s) in SHIFTS.into_iter().zip(SHELVES) {
            for n in 1..1u64 << shift {
                pairs.keep(s, pair(n)).expect("room");
            }
            let first = numbers.get(s as usize).copied().expect("kept");
            assert_eq!(pairs.find(first), Ok(pair(s as u64)), "{s:?}: the ring is full, and nothing is lost");
            pairs.keep(s, pair(0)).expect("room");
            assert_eq!(pairs.find(first), Err(Loss::Stale), "{s:?}");
        }
    }

    #[test]
    fn numbers_that_nobody_gave_name_nothing() {
        let pairs = Pairs::new(memory(WORDS).expect("memory"));
        for value in [0, 1, 77, TICKET_MASK, 6 << TICKET_BITS, 7 << TICKET_BITS | 3, (1 << 44) - 1] {
            assert!(pairs.find(value).is_err(), "{value:#x}");
        }
    }

    #[test]
    fn whoever_reads_gets_a_whole_pair_or_none() {
        let pairs = Pairs::new(memory(WORDS).expect("memory"));
        std::thread::scope(|s| {
            for t in 0..4u64 {
                let pairs = &pairs;
                s.spawn(move || {
                    let mut old = [0; 64];
                    for n in 0..200_000u64 {
                        let ours = n << 2 | t;
                        let pair = Pair { ours, theirs: !ours, abi: 5, mask: 0, mute: false };
                        let number = pairs.keep(Shelf::Other, pair);
                        let at = (n % 64) as usize;
                        if let Ok(p) = pairs.find(old[at]) {
                            assert_eq!(p.theirs, !p.ours);
                        }
                        old[at] = number.unwrap_or(0).wrapping_sub(n % 5000);
                    }
                });
            }
        });
    }
}
