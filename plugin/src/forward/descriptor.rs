//! NCCL's descriptor as a copy whose parents can be changed.

#![expect(unsafe_code, reason = "copies a C struct")]

use super::{implied, our_parent, their_parent};
use crate::abi::{Abi, v4, v5, v6, v7};
use crate::chain::{Chain, last_bit};
use crate::event::bit;
use crate::live::Live;
use core::ffi::c_void;
use core::mem::offset_of;
use ringwatch_wire::codes::Loss;

const WORD: usize = size_of::<u64>();
/// Words of the longest descriptor.
const WORDS: usize = size_of::<v7::Descriptor>() / WORD;

// Words of a descriptor, the same in all versions that have them.
const KIND: usize = 0;
const PARENT: usize = offset_of!(v4::Descriptor, parent) / WORD;
const COLL_PLAN: usize = (offset_of!(v5::Descriptor, arms) + offset_of!(v5::Coll, parent_group)) / WORD;
const P2P_PLAN: usize = (offset_of!(v5::Descriptor, arms) + offset_of!(v5::P2p, parent_group)) / WORD;

// What later versions have begins as earlier ones: v4's collectives and transfers, v5's, v6's copies.
const _: () = {
    assert!(offset_of!(v6::Descriptor, arms) == offset_of!(v5::Descriptor, arms));
    assert!(offset_of!(v7::Descriptor, arms) == offset_of!(v5::Descriptor, arms));
    assert!(offset_of!(v4::Descriptor, arms) == offset_of!(v5::Descriptor, arms));
    assert!(
        offset_of!(v7::Coll, base) == 0
            && offset_of!(v7::P2p, base) == 0
            && offset_of!(v7::CeColl, base) == 0
    );
    assert!(offset_of!(v5::Coll, base) == 0 && offset_of!(v5::P2p, base) == 0);
};

/// Not a type's bit number.
const NO_TYPE: u32 = u64::BITS;

/// A descriptor of any version.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Said {
    words: [u64; WORDS],
    version: u32,
}

impl Said {
    pub(crate) fn of<A: Abi>(d: &A::Descriptor) -> Self {
        let mut said = Said { words: [0; WORDS], version: A::VERSION };
        let bytes = size_of::<A::Descriptor>().min(size_of_val(&said.words));
        let from = core::ptr::from_ref(d).cast::<u8>();
        // SAFETY: a descriptor's bytes, as many as it has and as there is room for; any bytes are numbers.
        unsafe { core::ptr::copy_nonoverlapping(from, said.words.as_mut_ptr().cast(), bytes) };
        said
    }

    pub(crate) fn at<A: Abi>(&self) -> *const A::Descriptor {
        self.words.as_ptr().cast()
    }

    pub(super) fn as_pointer(&self) -> *const c_void {
        self.words.as_ptr().cast()
    }

    pub(super) fn version(&self) -> u32 {
        self.version
    }

    /// The bit number of its type, which may be of an event that is new to us; [`NO_TYPE`] for none.
    pub(crate) fn bit(&self) -> u32 {
        let kind = self.word(KIND);
        let kind = if self.version < 5 { kind & 0xff } else { kind };
        if kind.is_power_of_two() { kind.trailing_zeros() } else { NO_TYPE }
    }

    /// Its parent, as NCCL named it.
    pub(super) fn parent(&self) -> u64 {
        self.word(PARENT)
    }

    fn word(&self, i: usize) -> u64 {
        self.words.get(i).copied().unwrap_or(0)
    }

    fn set(&mut self, i: usize, value: u64) {
        if let Some(w) = self.words.get_mut(i) {
            *w = value;
        }
    }

    /// Where it names its plan beside its parent.
    fn plan(&self) -> Option<usize> {
        match self.bit() {
            bit::COLL if self.version >= 5 => Some(COLL_PLAN),
            bit::P2P if self.version >= 5 => Some(P2P_PLAN),
            _ => None,
        }
    }

    fn translated(&self, each: impl Fn(u64) -> u64) -> Self {
        let mut said = *self;
        said.set(PARENT, each(self.word(PARENT)));
        if let Some(plan) = self.plan() {
            said.set(plan, each(self.word(plan)));
        }
        said
    }

    /// As it is recorded.
    ///
    /// # Errors
    /// That its parent is not known any more, where nothing can be recorded without it.
    pub(crate) fn for_us(&self, live: &Live, chain: &Chain) -> Result<Self, Loss> {
        let parent = our_parent(chain, live, self.word(PARENT));
        if matches!(self.bit(), bit::KERNEL_CH | bit::PROXY_STEP) {
            parent?;
        }
        Ok(self.translated(|raw| our_parent(chain, live, raw).unwrap_or(0)))
    }

    /// As the other plugin gets it, by its version; `None` for what that version does not have, what does not come by
    /// its mask, and what NCCL leaves out when a plugin gives NULL for the parent.
    pub(super) fn for_them(&self, live: &Live, chain: &Chain, version: u32, mask: u32) -> Option<Self> {
        let bit = self.bit();
        if bit > last_bit(version) || implied::implied_by(self.version, bit) & mask == 0 {
            return None;
        }
        let mut said = self.translated(|raw| their_parent(chain, live, raw));
        let needs_parent = match bit {
            // Up to NCCL 2.27.
            bit::COLL | bit::P2P | bit::PROXY_STEP => self.version < 5,
            bit::CE_SYNC | bit::CE_BATCH => true,
            _ => false,
        };
        if needs_parent && said.parent() == 0 {
            return None;
        }
        // Before v5 the plan is the parent; the one byte of the type is the first of eight.
        if version < 5
            && let Some(plan) = self.plan()
        {
            said.set(PARENT, said.word(plan));
        }
        Some(said)
    }
}
