//! Every atomic access of a segment, and nothing else.
//!
//! A segment is an array of 64-bit words shared by the threads of one writing process and by any
//! number of readers in other processes. Three protocols run on it:
//!
//! * **Slot.** Word 0 of a slot is its *stamp*: `(ticket + 1) << 16 | version << 1 | busy`. A writer
//!   takes a slot by setting `busy` with one compare-and-swap and gives up when somebody else holds it
//!   (it never waits), writes the other words, and publishes by storing the stamp with the next version.
//!   A reader copies the words between two looks at the stamp and keeps the copy only when both agree.
//! * **Mark.** Words that change after publication carry the slot's lap in their low 16 bits and 48 bits
//!   of value above, in one store. A writer that was asleep while its slot was given to a later ticket
//!   can therefore spoil a value (it is then absent) but never pass an old one off as new.
//! * **Counter.** A word that is only ever added to.
//!
//! Orderings are named in pairs: `SYNC publish` (the publishing store and the reader's first look) and
//! `SYNC reuse` (the fence after taking a slot and the fence before the reader's second look) and `SYNC lap`
//! (a counting mark's replacement and the next one's look).

#![allow(clippy::disallowed_types, reason = "the one file that may name atomics; loom has types of its own")]

#[cfg(not(loom))]
use core::sync::atomic::{AtomicU64, Ordering, fence};
#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering, fence};

/// One word of a segment.
#[repr(transparent)]
#[derive(Debug)]
pub struct Word(AtomicU64);

const BUSY: u64 = 1;
const VERSION_BITS: u32 = 16;
const VERSION_MASK: u64 = 0xfffe;
/// Laps repeat after this many; a writer would have to sleep through all of them to be mistaken.
const LAPS: u64 = 0xffff;
const VALUE_MAX: u64 = (1 << 48) - 1;

impl Word {
    /// A word with a value, for segments that live in ordinary memory.
    #[cfg(not(loom))]
    pub const fn new(value: u64) -> Self {
        Word(AtomicU64::new(value))
    }

    /// A word with a value.
    #[cfg(loom)]
    pub fn new(value: u64) -> Self {
        Word(AtomicU64::new(value))
    }

    /// Reads with no ordering.
    #[inline]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Reads; what was written before the matching [`Word::set_last`] is visible afterwards.
    #[inline]
    pub fn get_first(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    /// Writes with no ordering.
    #[inline]
    pub fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// Writes after everything that this thread wrote before.
    #[inline]
    pub fn set_last(&self, value: u64) {
        self.0.store(value, Ordering::Release);
    }

    /// Adds and returns the value before.
    #[inline]
    pub fn add(&self, n: u64) -> u64 {
        self.0.fetch_add(n, Ordering::Relaxed)
    }

    /// Replaces `old` by `new`; true when this call did it.
    #[inline]
    pub fn replace(&self, old: u64, new: u64) -> bool {
        self.0.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}

/// A slot that this thread holds and is writing.
#[derive(Debug)]
pub struct Claim<'a, const W: usize> {
    slot: &'a [Word; W],
    next: u64,
}

impl<const W: usize> Claim<'_, W> {
    /// Writes word `i` (1 and up; word 0 is the stamp). Outside the slot it does nothing.
    #[inline]
    pub fn set(&self, i: usize, value: u64) {
        if i > 0
            && let Some(w) = self.slot.get(i)
        {
            w.set(value);
        }
    }

    /// Writes the words from `i` on (1 and up). Outside the slot it does nothing at all.
    #[inline(always)]
    pub fn set_all<const N: usize>(&self, i: usize, values: [u64; N]) {
        if i > 0
            && let Some(words) = self.slot.get(i..i.wrapping_add(N))
            && let Ok(words) = <&[Word; N]>::try_from(words)
        {
            for (w, value) in words.iter().zip(values) {
                w.set(value);
            }
        }
    }

    /// Makes the slot readable.
    #[inline]
    pub fn publish(self) {
        if let Some(stamp) = self.slot.first() {
            stamp.set_last(self.next); // SYNC publish
        }
    }
}

#[inline]
const fn stamp_of(ticket: u64, version: u64) -> u64 {
    (ticket.wrapping_add(1) << VERSION_BITS) | (version & VERSION_MASK)
}

#[inline]
const fn next_version(stamp: u64) -> u64 {
    let v = stamp.wrapping_add(2) & VERSION_MASK;
    if v == 0 { 2 } else { v }
}

#[inline]
const fn owner_of(stamp: u64) -> u64 {
    stamp >> VERSION_BITS
}

/// Takes a slot for a new ticket. `None` when another thread holds it or a later ticket has it already.
#[inline(always)]
pub fn claim_new<const W: usize>(slot: &[Word; W], ticket: u64) -> Option<Claim<'_, W>> {
    let stamp = slot.first()?;
    let seen = stamp.get();
    if seen & BUSY != 0 || owner_of(seen) > ticket || !stamp.replace(seen, stamp_of(ticket, 0) | BUSY) {
        return None;
    }
    fence(Ordering::Release); // SYNC reuse
    // Version 0 is never published: a busy slot with version 0 is being written for the first time.
    Some(Claim { slot, next: stamp_of(ticket, 2) })
}

/// Takes a slot that `ticket` still has, to write it again.
#[inline]
pub fn claim_again<const W: usize>(slot: &[Word; W], ticket: u64) -> Option<Claim<'_, W>> {
    let stamp = slot.first()?;
    let seen = stamp.get();
    if seen & BUSY != 0 || owner_of(seen) != ticket.wrapping_add(1) || !stamp.replace(seen, seen | BUSY) {
        return None;
    }
    fence(Ordering::Release); // SYNC reuse
    Some(Claim { slot, next: stamp_of(ticket, next_version(seen)) })
}

/// Takes a slot for a new ticket, by the one thread that ever writes to the slot: plain stores are enough. Returns the
/// stamp for [`publish_alone`].
#[inline(always)]
pub fn begin_alone<const W: usize>(slot: &[Word; W], ticket: u64) -> u64 {
    if let Some(stamp) = slot.first() {
        stamp.set(stamp_of(ticket, 0) | BUSY);
    }
    fence(Ordering::Release); // SYNC reuse
    stamp_of(ticket, 2)
}

/// Makes a slot readable that [`begin_alone`] took.
#[inline(always)]
pub fn publish_alone<const W: usize>(slot: &[Word; W], stamp: u64) {
    if let Some(word) = slot.first() {
        word.set_last(stamp); // SYNC publish
    }
}

/// True while `ticket` has the slot, published or being written again.
#[inline]
pub fn holds(slot: &[Word], ticket: u64) -> bool {
    slot.first().is_some_and(|s| {
        let seen = s.get_first();
        owner_of(seen) == ticket.wrapping_add(1) && (seen & BUSY == 0 || seen & VERSION_MASK != 0)
    })
}

/// The state of a slot, as a reader sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seen {
    /// Nobody has written it yet, or this ticket's writer has not published it.
    Empty,
    /// The copy is whole and belongs to this ticket.
    Whole(u64),
    /// It is being written: look again later.
    Busy,
}

/// Copies a slot's words (the stamp included) into `out`.
#[inline]
pub fn read(slot: &[Word], out: &mut [u64]) -> Seen {
    let Some(stamp) = slot.first() else { return Seen::Empty };
    let before = stamp.get_first(); // SYNC publish
    if before == 0 {
        return Seen::Empty;
    }
    if before & BUSY != 0 {
        return Seen::Busy;
    }
    for (o, w) in out.iter_mut().zip(slot) {
        *o = w.get();
    }
    fence(Ordering::Acquire); // SYNC reuse
    if stamp.get() == before { Seen::Whole(owner_of(before).wrapping_sub(1)) } else { Seen::Busy }
}

/// The lap of a ticket in a ring of `1 << shift` slots, never 0.
#[inline]
pub const fn lap(ticket: u64, shift: u32) -> u64 {
    let rounds = ticket >> (shift & 63);
    // The division takes longer than all the rest of a mark.
    if rounds < LAPS { rounds + 1 } else { rounds % LAPS + 1 }
}

/// A mark: a value (saturated at 48 bits) with its lap.
#[inline]
pub const fn mark(lap: u64, value: u64) -> u64 {
    let v = if value > VALUE_MAX { VALUE_MAX } else { value };
    (v << 16) | (lap & 0xffff)
}

/// The value of a mark, if it is of this lap.
#[inline]
pub const fn marked(word: u64, lap: u64) -> Option<u64> {
    if word & 0xffff == lap { Some(word >> 16) } else { None }
}

/// Changes a mark of this lap: `change` gets the value it has, if any, and gives the new one or refuses. Gives
/// up after a few collisions, or when the slot is `holds` no more, and then returns false: a thread that slept
/// while its slot was given away changes nothing of the next lap's.
#[inline]
fn mark_change(
    word: &Word,
    lap: u64,
    holds: impl Fn() -> bool,
    change: impl Fn(Option<u64>) -> Option<u64>,
) -> bool {
    for _ in 0..8 {
        // Whoever sees a later lap's value must also see that `holds` is over, or it would wipe that value.
        let seen = word.get_first(); // SYNC lap
        let value = marked(seen, lap);
        // Empty, or left by an earlier lap: start over, but only while the slot is still ours.
        if value.is_none() && !holds() {
            return false;
        }
        let Some(new) = change(value) else { return false };
        if word.replace(seen, mark(lap, new)) {
            // SYNC lap
            return true;
        }
    }
    false
}

/// Sets a mark, by the one thread that ever does; to be called while the lap is known to have the slot. A thread
/// that sleeps between that look and this store makes a later lap's value absent, as any late mark may. Of the value
/// the low 48 bits are kept.
#[inline]
pub fn mark_put(word: &Word, lap: u64, value: u64) {
    word.set(value << 16 | lap & 0xffff);
}

/// Sets a mark that must not be set twice. False when this lap has set it already, or has lost the slot.
#[inline]
pub fn mark_once(word: &Word, lap: u64, value: u64, holds: impl Fn() -> bool) -> bool {
    mark_change(word, lap, holds, |v| if v.is_none() { Some(value) } else { None })
}

/// Sets a mark, whatever it was. False when this lap has lost the slot.
#[inline]
pub fn mark_set(word: &Word, lap: u64, value: u64, holds: impl Fn() -> bool) -> bool {
    mark_change(word, lap, holds, |_| Some(value))
}

/// Adds to a mark, starting from 0. False when this lap has lost the slot.
#[inline]
pub fn mark_add(word: &Word, lap: u64, n: u64, holds: impl Fn() -> bool) -> bool {
    mark_change(word, lap, holds, |v| Some(v.unwrap_or(0).wrapping_add(n)))
}
