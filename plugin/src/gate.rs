//! The gate of the hot path, and the state of the process that the hot path reads.

#![expect(unsafe_code, reason = "a state that is written once, and slots by number")]

use crate::handle::{Kind, VALUE_BITS};
use crate::runtime::prefetch;
use core::cell::UnsafeCell;
use core::mem::MaybeUninit;
#[cfg(doc)]
use ringwatch_wire::codes::timed;
use ringwatch_wire::layout::{comm, lines};
use ringwatch_wire::lines::{Head, Issue, IssueBits, Line};
use ringwatch_wire::ring::Segment;
use ringwatch_wire::sync::{self, Word};

/// Why the hot path is closed, by bits of [`Process::gate`]. It is open where none is set but [`OPEN`].
pub(crate) const OPEN: u64 = 1;
/// Kernel events are on.
pub(crate) const KERNEL: u64 = 2;
/// Every event needs a handle: a graph was captured, or a transfer of the network was seen.
pub(crate) const HANDLES: u64 = 4;
/// The preloaded library sees calls as well.
pub(crate) const PRELOAD: u64 = 8;
/// Another plugin gets the same events.
pub(crate) const CHAINED: u64 = 16;

/// Operations are timed in runs of `1 << RUN_SHIFT` issue orders.
pub(crate) const RUN_SHIFT: u32 = 5;
/// See [`RUN_SHIFT`].
pub(crate) const RUN_MASK: u64 = (1 << RUN_SHIFT) - 1;

/// Marks beside the context in a ring's word [`lines::CALL`]: a bare call of it has begun, or was called. Contexts have
/// none of these bits.
pub(crate) const BEGUN: u64 = 4 << VALUE_BITS;
pub(crate) const CALLED: u64 = 8 << VALUE_BITS;

/// The segment is too small for lines, or there is none.
const NO_LINES: u64 = 32;

/// A word, 0 for none.
#[inline(always)]
pub(crate) fn get(words: &[Word], i: usize) -> u64 {
    words.get(i).map_or(0, Word::get)
}

/// Sets a word that is there.
#[inline(always)]
pub(crate) fn set(words: &[Word], i: usize, value: u64) {
    if let Some(w) = words.get(i) {
        w.set(value);
    }
}

/// Adds one to a word of the thread's own.
#[inline(always)]
pub(crate) fn count(words: &[Word], i: usize) {
    set(words, i, get(words, i).wrapping_add(1));
}

/// The state of the process that the hot path reads: one cache line, on the page that is wiped in forked children.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Process {
    gate: Word,
    /// See [`Schedule`].
    schedule: Word,
    ready: UnsafeCell<MaybeUninit<Ready>>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Ready {
    comms: *const [Word; comm::WORDS],
    heads: *const Head,
    lines: *const Line,
    /// Communicators and rings, powers of two, less one each.
    comm_mask: u32,
    pub(crate) ring_mask: u32,
    /// The power of two of a ring's lines, and that less one.
    pub(crate) shift: u8,
    pub(crate) prefetches: bool,
    line_mask: u32,
    /// The bits above the value of a context.
    pub(crate) prefix: u32,
    /// NCCL's version code; 0 unknown.
    pub(crate) nccl: u32,
}

/// The process's state and the gate are in one cache line.
const _: () = assert!(size_of::<Process>() == 64);

impl Ready {
    fn new(segment: &Segment<'static>, nonce: u16, nccl: u32) -> Option<Self> {
        let (comms, lines) = (segment.comm.all(), segment.lines);
        let mask = |n: usize| u32::try_from(n).ok().filter(|n| n.is_power_of_two()).map(|n| n - 1);
        let (comm_mask, ring_mask) = (mask(comms.len())?, mask(lines.rings())?);
        if lines.all().len() != lines.rings() << lines.shift() || lines.shift() > 16 {
            return None;
        }
        let line_mask = (1 << lines.shift()) - 1;
        let (heads, shift) = (lines.heads().as_ptr(), lines.shift() as u8);
        let (comms, lines) = (comms.as_ptr(), lines.all().as_ptr());
        let (prefix, prefetches) = (Kind::Comm.prefix(nonce), prefetch::is_known());
        Some(Ready { comms, heads, lines, comm_mask, ring_mask, shift, prefetches, line_mask, prefix, nccl })
    }

    /// A communicator's slot, whoever has it now.
    #[inline(always)]
    pub(crate) fn comm(&self, ticket: u64) -> &'static [Word; comm::WORDS] {
        // SAFETY: the slots are as many as the mask says, and are never unmapped.
        unsafe { &*self.comms.add((ticket as u32 & self.comm_mask) as usize) }
    }

    /// The number of a ring; numbers go round.
    #[inline(always)]
    pub(crate) fn ring(&self, number: u32) -> u32 {
        number & self.ring_mask
    }

    /// The head of a ring.
    #[inline(always)]
    pub(crate) fn head(&self, ring: u32) -> &'static Head {
        // SAFETY: the heads are as many as the mask says, and are never unmapped.
        unsafe { &*self.heads.add(self.ring(ring) as usize) }
    }

    /// The line of a ticket in a ring.
    #[inline(always)]
    pub(crate) fn line(&self, ring: u32, ticket: u64) -> &'static Line {
        let at = ticket as u32 & self.line_mask | self.ring(ring) << (self.shift & 31);
        // SAFETY: the lines are as many as both masks say together, and are never unmapped.
        unsafe { &*self.lines.add(at as usize) }
    }
}

// SAFETY: `ready` is written once, before the gate opens, and read after that.
unsafe impl Sync for Process {}

/// True for one in `1 << shift` numbers, for 0 among them, and for those of any larger shift. They follow no period, so that a
/// loop of any length has all its places chosen: multiples of a power of two would be the same few calls of a loop of 16, for
/// ever.
#[inline(always)]
pub(crate) fn is_chosen(number: u64, shift: u64) -> bool {
    mixed(number) & chosen_mask(shift) == 0
}

/// A number without a pattern for each number; 0 for 0.
#[inline(always)]
const fn mixed(number: u64) -> u64 {
    const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
    let spread = number.wrapping_mul(GOLDEN);
    (spread ^ spread >> 32).wrapping_mul(GOLDEN)
}

#[inline(always)]
const fn chosen_mask(shift: u64) -> u64 {
    !(u64::MAX >> (shift & 63))
}

/// The operations that the governor looks at, and the reason why the others have no GPU time (bits 32 to 39).
#[derive(Debug, Clone, Copy)]
pub(crate) struct Schedule(u64);

impl Schedule {
    const NONE: u64 = 1;
    /// The governor looks at the numbers that [`is_chosen`] returns; without this bit, at the last of each run.
    const CHOSEN: u64 = 2;
    /// The bits that are 0 in what is made of a number that is looked at: as many as the logarithm of a run's length.
    const MASK: u64 = chosen_mask(RUN_SHIFT as u64);

    /// The governor looks at the last operation of each run. `why` is a code of [`timed`].
    pub(crate) fn runs(why: u8) -> Self {
        Schedule(Self::MASK | u64::from(why) << 32)
    }

    /// The governor looks at the numbers that [`is_chosen`] returns for `shift`, or for a run's if that is smaller.
    pub(crate) fn chosen(shift: u64, why: u8) -> Self {
        Schedule(chosen_mask(shift.min(u64::from(RUN_SHIFT))) | Self::CHOSEN | u64::from(why) << 32)
    }

    /// None.
    pub(crate) fn none(why: u8) -> Self {
        Schedule(Self::NONE | u64::from(why) << 32)
    }

    /// True where the governor looks at some.
    #[inline(always)]
    pub(crate) fn any(self) -> bool {
        self.0 & Self::NONE == 0
    }

    /// True where it looks at the operation of this issue order.
    #[inline(always)]
    pub(crate) fn takes(self, order: u64) -> bool {
        let number = order.wrapping_add(1);
        let made = if self.0 & Self::CHOSEN != 0 { mixed(number) } else { number << (64 - RUN_SHIFT) };
        self.any() && made & self.0 & Self::MASK == 0
    }

    #[inline(always)]
    pub(crate) fn why(self) -> u8 {
        (self.0 >> 32) as u8
    }
}

impl Process {
    /// One that is not open.
    #[cfg(test)]
    pub(crate) fn sample() -> &'static Self {
        let ready = UnsafeCell::new(MaybeUninit::uninit());
        Box::leak(Box::new(Process { gate: Word::new(0), schedule: Word::new(0), ready }))
    }

    /// Takes what the hot path needs. Called once, before it is opened.
    pub(crate) fn prepare(&self, segment: &Segment<'static>, nonce: u16, nccl: u32) {
        match Ready::new(segment, nonce, nccl) {
            // SAFETY: nobody reads it before OPEN, and it is written only once.
            Some(ready) => unsafe {
                (*self.ready.get()).write(ready);
            },
            None => self.block(NO_LINES),
        }
    }

    /// Opens the hot path, as far as nothing else stands in its way.
    pub(crate) fn open(&self) {
        self.change(OPEN, true);
    }

    /// Closes the hot path for good.
    #[inline]
    pub(crate) fn block(&self, why: u64) {
        if self.gate.get() & why == 0 {
            self.change(why, true);
        }
    }

    /// Closes the hot path for a reason, or opens it as far as this reason is concerned.
    pub(crate) fn set_blocked(&self, why: u64, is: bool) {
        self.change(why, is);
    }

    fn change(&self, bit: u64, set: bool) {
        loop {
            let seen = self.gate.get();
            let new = if set { seen | bit } else { seen & !bit };
            if seen == new || self.gate.replace(seen, new) {
                return;
            }
        }
    }

    /// Says which operations the governor looks at.
    pub(crate) fn set_schedule(&self, schedule: Schedule) {
        self.schedule.set(schedule.0);
    }

    /// Takes the call of a context that its thread has recorded in a line and NCCL issues elsewhere: on another thread, as
    /// for communicators that do not block, or by a copy engine.
    pub(crate) fn take_call(&self, context: u64) -> Option<CalledLine> {
        let ready = self.ready_for_calls()?;
        let called = context ^ CALLED;
        let ring = (0..=ready.ring_mask).find(|r| get(ready.head(*r), lines::CALL) == called)?;
        let head = ready.head(ring);
        let ticket = get(head, lines::NEXT).wrapping_sub(1);
        let taken = head.get(lines::CALL).is_some_and(|c| c.replace(called, 0));
        if taken { Some(CalledLine::new(ready, ring, ticket, 0)) } else { None }
    }

    /// For whoever issues a call that is in a line: whether the hot path was opened, though it may be closed by now.
    pub(crate) fn ready_for_calls(&self) -> Option<&Ready> {
        if self.gate.get_first() & (OPEN | NO_LINES) != OPEN {
            return None;
        }
        // SAFETY: it was seen above.
        Some(unsafe { self.seen_open() })
    }

    #[inline(always)]
    pub(crate) fn schedule(&self) -> Schedule {
        Schedule(self.schedule.get())
    }

    /// The state that the hot path reads.
    ///
    /// # Safety
    /// The gate was seen with [`OPEN`], which is set after the state was written.
    #[inline(always)]
    pub(crate) unsafe fn seen_open(&self) -> &Ready {
        // SAFETY: as the caller promises.
        unsafe { (*self.ready.get()).assume_init_ref() }
    }

    #[inline(always)]
    pub(crate) fn ready(&self) -> Option<&Ready> {
        if self.gate.get_first() != OPEN {
            return None;
        }
        // SAFETY: it was seen above.
        Some(unsafe { self.seen_open() })
    }
}

/// A call in a line that is not issued yet.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CalledLine {
    line: &'static Line,
    lap: u64,
    /// See [`IssueBits::launch`].
    launch: u64,
}

impl CalledLine {
    pub(crate) fn new(ready: &Ready, ring: u32, ticket: u64, launch: u64) -> Self {
        let lap = sync::lap(ticket, u32::from(ready.shift));
        CalledLine { line: ready.line(ring, ticket), lap, launch }
    }

    /// Records its issue. A line that was overwritten meanwhile is of another lap.
    pub(crate) fn issue(&self, seq: u64, order: u64, bits: IssueBits) {
        let issue = IssueBits { launch: self.launch, ..bits }.word();
        ringwatch_wire::lines::issue(self.line, self.lap, &Issue { seq, order, issue });
    }
}

#[cfg(test)]
mod tests {
    use super::{RUN_MASK, RUN_SHIFT, Schedule, is_chosen};

    #[test]
    fn one_in_so_many_numbers_is_chosen_and_those_of_a_larger_shift_among_them() {
        for shift in 0..=16 {
            let chosen = (0..1u64 << 20).filter(|n| is_chosen(*n, shift));
            let expected = 1usize << (20 - shift);
            let count = chosen.inspect(|n| assert!(shift == 0 || is_chosen(*n, shift - 1), "{n}")).count();
            let chance = 4 * expected.isqrt();
            assert!(count.abs_diff(expected) <= chance, "{count} of {expected} by {shift}");
        }
    }

    #[test]
    fn every_place_of_a_loop_is_chosen_sooner_or_later() {
        const LOOPS: u64 = 4_000;
        for length in [2, 6, 16, 24, 32, 34, 64, 100, 128, 256] {
            for shift in 1..=7 {
                let mut places = vec![0u32; length];
                for n in (0..LOOPS * length as u64).filter(|n| is_chosen(*n, shift)) {
                    places[n as usize % length] += 1;
                }
                let (least, most) = (places.iter().min().unwrap_or(&0), places.iter().max().unwrap_or(&0));
                assert!(
                    *least > 0 && u64::from(*most) <= LOOPS >> (shift - 1).min(5),
                    "{length} by {shift}: {least} to {most}"
                );
            }
        }
    }

    #[test]
    fn the_hot_path_leaves_to_the_governor_what_it_may_time() {
        for shift in 0..12 {
            let schedule = Schedule::chosen(shift, 3);
            assert!((0..100_000).all(|n| schedule.takes(n) || !is_chosen(n + 1, shift)), "{shift}");
            let taken = (0..100_000).filter(|n| schedule.takes(*n)).count();
            let expected = 100_000usize >> shift.min(u64::from(RUN_SHIFT));
            assert!(taken.abs_diff(expected) <= 4 * expected.isqrt(), "{taken} by {shift}");
        }
        let runs = Schedule::runs(3);
        assert!((0..1_000).all(|n| runs.takes(n) == ((n + 1) & RUN_MASK == 0)));
        assert_eq!((runs.why(), runs.any()), (3, true));
        let none = Schedule::none(4);
        assert_eq!((none.why(), none.any(), none.takes(31)), (4, false, false));
    }
}
