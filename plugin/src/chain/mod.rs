//! Another profiler plugin behind this one: NCCL has one slot, and `RINGWATCH_CHAIN` names who else is to hear.
//!
//! This module loads it, and keeps its contexts, its handles and its mask. Callbacks reach it by [`crate::forward`].
//!
//! NCCL has one mask, both plugins' together. When the other plugin changes its own, NCCL's follows at the next callback, so
//! the first operation after that still comes by the old one.

#![expect(unsafe_code, reason = "calls another library through its table")]

mod library;
pub(crate) mod pairs;

use crate::ffi::{InitArgs, SUCCESS};
use crate::governor::Governor;
use crate::handle::{Kind, VALUE_MASK, spare_number, to_number, to_pointer};
use crate::runtime::log::{Log, Message};
use core::ffi::{CStr, c_int};
pub(crate) use library::Plugin;
use library::VERSIONS;
use pairs::Pairs;
use ringwatch_wire::sync::{self, Seen, Word};

/// Communicators whose contexts are kept: those with a slot in the segment, and as many without.
const COMMS: usize = 512;
const COMM_WORDS: usize = 4;
// Words of a communicator. 0: stamp.
const CONTEXT: usize = 1;
/// NCCL's ABI version.
const ABI: usize = 2;
/// The context's value + 1 while it is alive, then 0.
const ALIVE: usize = 3;

/// The other plugin.
#[derive(Debug)]
pub(crate) struct Chain {
    comms: &'static [[Word; COMM_WORDS]],
    pub(crate) pairs: Pairs,
    /// The mask of its that NCCL's was made with.
    merged: &'static Word,
    /// Where it believes NCCL's mask to be, and writes whenever it likes.
    mask_at: usize,
    /// The version of NCCL's ABI that its last init came by.
    version: &'static Word,
    /// The events that it gets from each version of NCCL's ABI.
    by_version: [Option<Plugin>; VERSIONS],
}

/// Words for the mask and what it was, each on a cache line of its own.
const LINE: usize = 8;

impl Chain {
    /// Loads the other plugin, for callbacks of this version of NCCL's ABI. Says why where it cannot.
    pub(crate) fn load(library: &CStr, version: u32, own_table: fn(u32) -> usize, log: &Log) -> Option<Self> {
        let by_version = match library::load(library, version, own_table) {
            Ok(found) => found,
            Err(message) => {
                log.say(message);
                return None;
            }
        };
        let comm_words = COMMS * COMM_WORDS;
        let Some(memory) = pairs::memory(2 * LINE + comm_words + pairs::WORDS) else {
            log.say(Message::ChainNoMemory);
            return None;
        };
        let (lines, rest) = memory.split_at_checked(2 * LINE)?;
        let (comms, rest) = rest.split_at_checked(comm_words)?;
        log.say(Message::Chained);
        Some(Chain {
            comms: comms.as_chunks::<COMM_WORDS>().0,
            pairs: Pairs::new(rest),
            merged: lines.get(LINE)?,
            version: lines.get(LINE + 1)?,
            // A pointer to the word's lower half, as both architectures keep it.
            mask_at: core::ptr::from_ref(lines.first()?).expose_provenance(),
            by_version,
        })
    }

    /// The functions for a version of NCCL's ABI.
    pub(crate) fn plugin(&self, version: u32) -> Option<&Plugin> {
        self.by_version.get(version.checked_sub(1)? as usize)?.as_ref()
    }

    /// The place of a context's value, and its number there, which later ones exceed.
    fn comm(&self, value: u64) -> Option<(&'static [Word; COMM_WORDS], u64)> {
        let half = COMMS as u64 / 2;
        let (i, number) = match spare_number(value) {
            Some(n) => (half + n % half, n),
            // The segment's table has at most so many slots, a power of two: those that live have places apart.
            None => (value % half, value),
        };
        self.comms.get(i as usize).map(|slot| (slot, number))
    }

    /// The events that it wants now.
    pub(crate) fn mask(&self) -> u32 {
        let mask = core::ptr::with_exposed_provenance::<c_int>(self.mask_at);
        // SAFETY: our own word, which lives for good; NCCL looks at its mask the same way.
        let mask = unsafe { core::ptr::read_volatile(mask) } as u32;
        // A job has one NCCL, to which bits of later versions mean nothing.
        match self.version.get() as u32 {
            0 => 0,
            version => mask & u32::MAX >> (u32::BITS - 1 - last_bit(version)),
        }
    }

    /// One communicator's init. Gives back the events that the other plugin wants.
    pub(crate) fn open(&self, version: u32, args: &InitArgs, value: u64, log: &Log) -> c_int {
        if let Some(plugin) = self.plugin(version) {
            let mut context = core::ptr::null_mut();
            let mask = core::ptr::with_exposed_provenance_mut::<c_int>(self.mask_at);
            // SAFETY: our own word.
            let before = unsafe { core::ptr::read_volatile(mask) };
            // SAFETY: places for a context and for a mask, the latter for good.
            let done = unsafe { plugin.init(&mut context, mask, args) };
            if done == SUCCESS {
                self.version.set(u64::from(version));
                self.keep(value, to_number(context), version);
            } else {
                // SAFETY: our own word. Who failed asks for nothing.
                unsafe { core::ptr::write_volatile(mask, before) };
                log.say(Message::ChainInitFailed);
            }
        }
        // NCCL has one mask for all communicators.
        self.mask() as c_int
    }

    /// Joins the masks again if the other plugin's is not the one that NCCL's was made with.
    pub(crate) fn follow(&self, governor: &Governor) {
        let mask = self.mask();
        if self.merged.get() != u64::from(mask) {
            self.merge(governor);
        }
    }

    /// Joins the masks, until nobody has changed them meanwhile.
    #[cold]
    #[inline(never)]
    pub(crate) fn merge(&self, governor: &Governor) {
        for _ in 0..8 {
            let mask = self.mask();
            self.merged.set(u64::from(mask));
            governor.follow(mask as c_int);
            if self.mask() == mask && self.merged.get() == u64::from(mask) {
                return;
            }
        }
    }

    fn keep(&self, value: u64, context: u64, version: u32) {
        let Some((slot, number)) = self.comm(value) else { return };
        if let Some(claim) = sync::claim_new(slot, number) {
            claim.set(CONTEXT, context);
            claim.set(ABI, u64::from(version));
            claim.set(ALIVE, value + 1);
            claim.publish();
        }
    }

    /// The other plugin's context for one of ours, and the ABI version it came by.
    pub(crate) fn context(&self, nonce: u16, context: u64) -> Option<(u64, u32)> {
        if !Kind::Comm.is(context, nonce) {
            return None;
        }
        let value = context & VALUE_MASK;
        let (slot, number) = self.comm(value)?;
        let mut words = [0; COMM_WORDS];
        match sync::read(slot, &mut words) {
            Seen::Whole(n) if n == number => {}
            _ => return None,
        }
        let [_, theirs, abi, alive] = words;
        if alive == value + 1 { Some((theirs, abi as u32)) } else { None }
    }

    /// Passes on the end of a communicator, once.
    pub(crate) fn finalize(&self, nonce: u16, context: u64) {
        let Some((theirs, abi)) = self.context(nonce, context) else { return };
        let value = context & VALUE_MASK;
        let Some((slot, _)) = self.comm(value) else { return };
        let Some(plugin) = self.plugin(abi) else { return };
        // From 2.28 on NCCL ends only what has a context.
        let ends = theirs != 0 || abi <= 4;
        if slot.get(ALIVE).is_some_and(|w| w.replace(value + 1, 0)) && ends {
            // SAFETY: a context that its init gave, once.
            unsafe { (plugin.finalize)(to_pointer(theirs)) };
        }
    }
}

/// The highest type that a version has; of the newest one we do not know it.
pub(crate) const fn last_bit(version: u32) -> u32 {
    match version {
        1 | 2 => 5,
        3 | 4 => 7,
        5 => 11,
        6 => 14,
        _ => c_int::BITS - 1,
    }
}
