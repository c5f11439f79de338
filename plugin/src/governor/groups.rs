//! Decides whether kernel events may be switched: never between the calls of a group that sends and receives.
//!
//! Up to NCCL 2.30 a send and a receive of one group may be one piece of work for the GPU. It is marked for kernel events as
//! the receive was called; but the progress thread waits for a mark if either was called with kernel events on. Called
//! with the send alone, it waits for ever, and so does ncclCommDestroy. The mask is the process's, and each call reads it.
//!
//! Before a switch the governor looks for such groups. Threads that use groups at the same time would meet again and
//! again: after the first time kernel events stay off. A thread shows its group a moment after the first call has read
//! the mask, so the governor looks again after a switch. A group that shows up then may have read the mask before. If
//! it sends first, what follows has to read "on", and if it receives first "off".

use super::{ENDED, FIRST_CALLS, Governor, Kernel, NOTES, SWITCHED_NS, TRANSFERRED};
use crate::runtime::clock::now_ns;
use crate::runtime::sys::thread_address;
use ringwatch_wire::sync::Word;

/// Threads whose groups are noted, with two words each: the thread, and when its group began, 0 where it calls none.
pub(super) const THREADS: usize = 32;
/// An older group was left by its thread without an end, in ns.
const LEFT_NS: u64 = 10_000_000_000;
/// A thread that has read the mask shows its group within that time, in ns.
const SHOWN_NS: u64 = 1_000;
/// Looks that take longer than that, whatever the clock says.
const LOOKS: u32 = 200;

/// Bits of [`FIRST_CALLS`]: what the groups of this process begin with.
const SEND: u64 = 1;
const RECEIVE: u64 = 2;

/// The state of group calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Amid {
    /// None is, as far as can be seen.
    Nothing,
    /// One may be.
    Unknown,
    /// One is.
    Group,
}

impl Governor {
    /// A send or receive was seen; `is_first` where it was called in a group as the first.
    #[inline]
    pub(crate) fn saw_transfer(&self, is_send: bool, is_first: bool) {
        self.set(TRANSFERRED, 1);
        if is_first {
            self.set(FIRST_CALLS, self.get(FIRST_CALLS) | if is_send { SEND } else { RECEIVE });
        }
    }

    /// True where the process has sent or received.
    pub(super) fn has_transferred(&self) -> bool {
        self.get(TRANSFERRED) != 0 || self.bare.has_transferred()
    }

    /// The calling thread's note of the group that it calls; `None` where there are too many threads.
    fn note(&self) -> Option<&Word> {
        let (notes, _) = self.words.get(NOTES..)?.as_chunks::<2>();
        let me = thread_address();
        let first = (me >> 12) as usize;
        (0..THREADS).find_map(|i| {
            let [thread, group] = notes.get((first + i) % THREADS)?;
            let is_mine = thread.get() == me || thread.get() == 0 && thread.replace(0, me);
            is_mine.then_some(group)
        })
    }

    /// A group begins to be called, the end of which will be told.
    #[inline(always)]
    pub(crate) fn group_begins(&self) {
        if self.kernel == Kernel::Switched {
            self.note_group();
        }
    }

    #[inline(never)]
    fn note_group(&self) {
        if self.get(ENDED) != 0 && !self.kernel_on() {
            return;
        }
        match self.note() {
            Some(note) => note.set(now_ns()),
            // More threads than can be looked after.
            None => self.stop_switching(),
        }
    }

    /// All calls of the thread's group were made.
    #[inline(always)]
    pub(crate) fn group_was_called(&self) {
        if self.kernel == Kernel::Switched {
            self.clear_group();
        }
    }

    #[inline(never)]
    fn clear_group(&self) {
        if let Some(note) = self.note() {
            note.set(0);
        }
    }

    /// True where a thread is between the calls of a group with a record.
    fn is_group_in_records(&self, now_ns: u64) -> bool {
        let (notes, _) = self.words.get(NOTES..).unwrap_or(&[]).as_chunks::<2>();
        notes.iter().any(|[_, since]| now_ns.saturating_sub(since.get()) < LEFT_NS)
    }

    /// True where a group that is being called can be seen; in lines only before kernel events were on.
    pub(super) fn is_amid_group(&self, now_ns: u64, on: bool) -> bool {
        self.has_transferred() && (self.is_group_in_records(now_ns) || on && self.bare.is_group_in_lines())
    }

    fn amid(&self) -> Amid {
        if !self.has_transferred() {
            return Amid::Nothing;
        }
        let now = now_ns();
        // The hot path is closed while kernel events are on. What it was left with then tells nothing.
        let has_lines = !self.kernel_on() || now.saturating_sub(self.get(SWITCHED_NS)) < LEFT_NS;
        if self.is_amid_group(now, has_lines) {
            Amid::Group
        } else if self.bare.is_recently_in_group(now) {
            Amid::Unknown
        } else {
            Amid::Nothing
        }
    }

    /// True where kernel events may be switched now. Where a group stands in the way they end with the first chance.
    pub(super) fn may_switch(&self) -> bool {
        let amid = self.amid();
        if amid == Amid::Group && self.kernel == Kernel::Switched && self.get(ENDED) == 0 {
            self.set(ENDED, 1);
            self.set_schedule();
        }
        amid == Amid::Nothing
    }

    /// True where a switch has to be taken back: a group shows up that may have read the mask before.
    pub(super) fn came_too_late(&self, on: bool) -> bool {
        if self.get(FIRST_CALLS) != if on { RECEIVE } else { SEND } {
            return false;
        }
        let from = now_ns();
        for _ in 0..LOOKS {
            let now = now_ns();
            if self.is_amid_group(now, on) {
                return true;
            }
            if now.saturating_sub(from) >= SHOWN_NS {
                break;
            }
            core::hint::spin_loop();
        }
        false
    }
}
