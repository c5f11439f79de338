//! An operation's words.

use ringwatch_wire::layout::op;
use ringwatch_wire::sync::Claim;

pub(super) struct What {
    pub(super) kind: u8,
    pub(super) func: u8,
    pub(super) dtype: u8,
    pub(super) algo: u8,
    pub(super) proto: u8,
    pub(super) flags: u8,
}

impl What {
    pub(super) fn word(&self, comm: u64) -> u64 {
        comm & 0xffff
            | u64::from(self.kind) << 16
            | u64::from(self.func) << 24
            | u64::from(self.dtype) << 32
            | u64::from(self.algo) << 40
            | u64::from(self.proto) << 48
            | u64::from(self.flags) << 56
    }
}

pub(super) fn root_word(root: i32, channels: u8, warps: u8) -> u64 {
    u64::from(root as u32) | u64::from(channels) << 32 | u64::from(warps) << 40
}

/// A new operation, before it is written: the words behind the stamp.
pub(super) struct Record {
    words: [u64; op::WORDS - 1],
}

impl Record {
    #[inline(always)]
    pub(super) fn blank() -> Self {
        let mut r = Record { words: [0; op::WORDS - 1] };
        r.set(op::ORDER, op::NO_ORDER);
        r.set(op::SEQ, op::NO_ORDER);
        r
    }

    #[inline(always)]
    pub(super) fn set(&mut self, i: usize, value: u64) {
        if let Some(w) = self.words.get_mut(i.wrapping_sub(1)) {
            *w = value;
        }
    }

    #[inline(always)]
    pub(super) fn publish(self, slot: Claim<'_, { op::WORDS }>) {
        slot.set_all(1, self.words);
        slot.publish();
    }
}
