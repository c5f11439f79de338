//! Whether kernel events may be switched: never between the calls of a group that sends and receives.
//!
//! Up to NCCL 2.30 a send and a receive of one group may be one piece of work for the GPU. It is marked for kernel events as
//! the receive was called; but the progress thread waits for a mark if either was called with kernel events on. Called
//! with the send alone, it waits for ever, and so does ncclCommDestroy. The mask is the process's, and each call reads it.
//!
//! Before a switch the governor looks for such groups. Threads that use groups at the same time would meet again and
//! again: after the first time kernel events stay off. A thread shows its group a moment after the first call has read
//! the mask, so the governor looks again after a switch. A group that shows up then may have read the mask before. If
//! it sends first, what follows has to read "on", and if it receives first "off".

use super::{ENDED, FIRST_CALLS, Governor, Kernel, SWITCHED_NS, TRANSFERRED};
use crate::clock::now_ns;
use ringwatch_wire::layout::group;
use ringwatch_wire::sync::Word;

/// Records of groups that are looked at, from the newest on: there are not more threads in groups at once.
const LOOKED_AT: u64 = 16;
/// An older group was left by its thread without an end, in ns.
const LEFT_NS: u64 = 1_000_000_000;
/// A thread that has read the mask shows its group within that time, in ns.
const SHOWN_NS: u64 = 1_000;
/// Looks that take longer than that, whatever the clock says.
const LOOKS: u32 = 200;

/// Bits of [`FIRST_CALLS`]: what the groups of this process begin with.
const SEND: u64 = 1;
const RECEIVE: u64 = 2;

/// Whether a group is being called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Amid {
    /// None is, as far as can be seen.
    Nothing,
    /// One may be.
    Unknown,
    /// One is.
    Group,
}

fn word(slot: &[Word], i: usize) -> u64 {
    slot.get(i).map_or(0, Word::get)
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

    /// Whether the group of a record is being called. One that has no record yet may be.
    fn amid_record(&self, ticket: u64, now_ns: u64) -> Amid {
        let Some(slot) = self.groups.held(ticket) else { return Amid::Unknown };
        let is_called = word(slot, group::WHAT) & group::UNTOLD == 0
            && word(slot, group::END_CALLED) == 0
            && word(slot, group::STOP) == 0
            && now_ns.saturating_sub(word(slot, group::START_NS)) < LEFT_NS;
        if is_called { Amid::Group } else { Amid::Nothing }
    }

    fn amid(&self) -> Amid {
        if self.get(TRANSFERRED) == 0 {
            return Amid::Nothing;
        }
        let now = now_ns();
        let next = self.groups.next();
        let in_records = |wanted| {
            (next.saturating_sub(LOOKED_AT)..next).any(|ticket| self.amid_record(ticket, now) == wanted)
        };
        // The hot path is closed while kernel events are on. What it was left with then tells nothing.
        let in_lines = !self.kernel_on() || now.saturating_sub(self.get(SWITCHED_NS)) < LEFT_NS;
        if in_records(Amid::Group) || in_lines && self.bare.is_group_in_lines() {
            Amid::Group
        } else if in_records(Amid::Unknown) || self.bare.is_group_of_late(now) {
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
            self.set_turns();
        }
        amid == Amid::Nothing
    }

    /// How many groups had records before a switch.
    pub(super) fn groups_so_far(&self) -> u64 {
        self.groups.next()
    }

    /// True where a switch has to be taken back: a group shows up that may have read the mask before.
    pub(super) fn came_too_late(&self, on: bool, groups_so_far: u64) -> bool {
        if self.get(FIRST_CALLS) != if on { RECEIVE } else { SEND } {
            return false;
        }
        let from = now_ns();
        for _ in 0..LOOKS {
            if self.groups.next() != groups_so_far || on && self.bare.is_group_in_lines() {
                return true;
            }
            if now_ns().saturating_sub(from) >= SHOWN_NS {
                break;
            }
            core::hint::spin_loop();
        }
        false
    }
}
