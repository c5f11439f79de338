//! Another profiler plugin behind this one: NCCL has one slot, and `RINGWATCH_CHAIN` names who else is to hear.
//!
//! Every callback is recorded first and then passed on. Each plugin sees its own handles and contexts alone: where
//! the other one gave a handle, NCCL gets a number of the kind [`Kind::Chained`], under which [`pairs`] keeps ours
//! and theirs. What is not known any more is not passed on; a parent that is not known is NULL to the other plugin,
//! and a parent that another process made (PXN) reaches it as it came.
//!
//! NCCL has one mask, both plugins' together, so events come that the other plugin did not ask for. It gets what it would
//! get in the slot alone: [`asked`] says what NCCL brings for a mask, which is read where the other plugin writes it.
//! When it changes, NCCL's mask follows at the next callback; so the first operation after that still comes by the
//! old one.
//!
//! The other plugin's code keeps its own promises. Ours hold for what is done here: no lock, no heap, no system
//! call after init.

#![expect(unsafe_code, reason = "calls another library through its table")]

mod asked;
mod library;
mod pairs;
mod said;

use crate::abi::SUCCESS;
use crate::event::{StateArg, bit};
use crate::handle::{Handle, Kind, VALUE_MASK, has_no_end, to_number, to_pointer};
use crate::log::{Log, Message};
use crate::record::{self, Carried};
use crate::state::{self, InitArgs, Live, spare_number};
use core::ffi::{CStr, c_int, c_void};
use library::{Plugin, VERSIONS};
use pairs::{Pair, Pairs, Shelf};
use ringwatch_wire::codes::Loss;
use ringwatch_wire::sync::{self, Seen, Word};
pub(crate) use said::Said;

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
    pairs: Pairs,
    /// The mask of its that NCCL's was made with.
    merged: &'static Word,
    /// Where it believes NCCL's mask to be, and writes whenever it likes.
    mask_at: usize,
    /// The version of NCCL's ABI that its last init came by.
    version: &'static Word,
    /// What it gets from each version of NCCL's ABI.
    by_version: [Option<Plugin>; VERSIONS],
}

/// Words for the mask and what it was, each on a cache line of its own.
const LINE: usize = 8;

impl Chain {
    /// Loads the other plugin, for callbacks of this version of NCCL's ABI. Says why where it cannot.
    pub(crate) fn load(library: &CStr, version: u32, log: &Log) -> Option<Self> {
        let by_version = match library::load(library, version) {
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

    fn plugin(&self, version: u32) -> Option<&Plugin> {
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
    fn mask(&self) -> u32 {
        let mask = core::ptr::with_exposed_provenance::<c_int>(self.mask_at);
        // SAFETY: our own word, which lives for good; NCCL looks at its mask the same way.
        let mask = unsafe { core::ptr::read_volatile(mask) } as u32;
        // A job has one NCCL, to which bits of later versions mean nothing.
        match self.version.get() as u32 {
            0 => 0,
            version => mask & u32::MAX >> (u32::BITS - 1 - said::last_bit(version)),
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
    pub(crate) fn follow(&self, live: &Live) {
        let mask = self.mask();
        if self.merged.get() != u64::from(mask) {
            self.merge(live);
        }
    }

    /// Joins the masks, until nobody has changed them meanwhile.
    #[cold]
    #[inline(never)]
    pub(crate) fn merge(&self, live: &Live) {
        for _ in 0..8 {
            let mask = self.mask();
            self.merged.set(u64::from(mask));
            live.governor.follow(mask as c_int);
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
    fn context(&self, live: &Live, context: u64) -> Option<(u64, u32)> {
        if !Kind::Comm.is(context, live.nonce) {
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

    /// Passes on an event that was started, which `ours` names to us; gives back what names it to NCCL.
    pub(crate) fn start(&self, live: &Live, context: u64, said: &Said, ours: u64) -> u64 {
        let Some((context, abi)) = self.context(live, context) else { return ours };
        // Callbacks of another version than the communicator's own init are of nobody who may be believed.
        let Some(plugin) = self.plugin(abi).filter(|_| abi == said.version()) else { return ours };
        self.follow(live);
        let mask = self.mask_of(live, said);
        let Some(theirs) = said.for_them(live, self, plugin.version, mask) else { return ours };
        let mut out = core::ptr::null_mut();
        // SAFETY: its own context, a place for one handle, and a descriptor of its version that lives long enough.
        unsafe { (plugin.start)(to_pointer(context), &mut out, theirs.as_pointer()) };
        // Up to 2.25 NCCL ends an operation whatever its handle is.
        let ends = abi <= 2 && matches!(said.bit(), bit::COLL | bit::P2P);
        if out.is_null() && !ends {
            return ours;
        }
        // NCCL tells a step's states where it has a handle of the operation.
        let mute = said.bit() == bit::PROXY_STEP && theirs.parent() == 0;
        let pair = Pair { ours, theirs: to_number(out), abi, mask, mute };
        match self.pairs.keep(shelf(said.bit(), ours, live), pair) {
            Some(value) => Handle { kind: Kind::Chained, value }.pack(live.nonce),
            None => ours,
        }
    }

    /// The mask that decides about an event. NCCL looks at its mask when an operation is called, and goes by that for
    /// all that hangs on it, in every replay of a graph too.
    fn mask_of(&self, live: &Live, said: &Said) -> u32 {
        let of_call = matches!(said.bit(), bit::COLL | bit::P2P | bit::KERNEL_LAUNCH);
        let of_operation = matches!(
            said.bit(),
            bit::KERNEL_CH | bit::KERNEL_PHASE | bit::PROXY_OP | bit::PROXY_STEP | bit::NET_PLUGIN
        );
        match self.pair(live, said.parent()).filter(|_| of_call || of_operation) {
            Some(Ok(pair)) => pair.mask,
            _ => self.mask(),
        }
    }

    /// The pair that a handle of ours names.
    fn pair(&self, live: &Live, raw: u64) -> Option<Result<Pair, Loss>> {
        Kind::Chained.is(raw, live.nonce).then(|| self.pairs.find(raw & VALUE_MASK))
    }

    /// What a parent is to us.
    fn our_parent(&self, live: &Live, raw: u64) -> Result<u64, Loss> {
        match self.pair(live, raw) {
            None => Ok(raw),
            Some(Ok(pair)) => Ok(pair.ours),
            // That a graph replays it is all that has to be known for its issue order.
            Some(Err(_)) if pairs::shelf_of(raw & VALUE_MASK) == Some(Shelf::Captured) => {
                Ok(Handle { kind: Kind::Captured, value: 0 }.pack(live.nonce))
            }
            Some(Err(loss)) => Err(loss),
        }
    }

    /// What a parent is to the other plugin.
    fn their_parent(&self, live: &Live, raw: u64) -> u64 {
        match self.pair(live, raw) {
            Some(Ok(pair)) => pair.theirs,
            Some(Err(_)) => 0,
            // Another process's number is nothing to us, and is passed on as it came; our own means nothing to it.
            None if raw >> 48 != u64::from(live.nonce) => raw,
            None => 0,
        }
    }

    /// Passes on the end of a communicator, once.
    pub(crate) fn finalize(&self, live: &Live, context: u64) {
        let Some((theirs, abi)) = self.context(live, context) else { return };
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

/// Where a pair is kept: what lives long is not to be pushed out by what is short and many.
fn shelf(bit: u32, ours: u64, live: &Live) -> Shelf {
    if Kind::Captured.is(ours, live.nonce) {
        return Shelf::Captured;
    }
    match bit {
        bit::PROXY_STEP => Shelf::Step,
        bit::PROXY_OP => Shelf::Transfer,
        bit::KERNEL_CH => Shelf::Channel,
        bit::GROUP | bit::COLL | bit::P2P => Shelf::Op,
        bit::GROUP_API | bit::COLL_API | bit::P2P_API | bit::KERNEL_LAUNCH | bit::CE_COLL => Shelf::Op,
        _ => Shelf::Other,
    }
}

/// The pair that a handle names, and its plugin; `otherwise` for a handle of another kind.
fn known(live: &'static Live, raw: u64, otherwise: Loss) -> Result<(Pair, &'static Plugin), Loss> {
    let chain = state::chain().filter(|_| Kind::Chained.is(raw, live.nonce)).ok_or(otherwise)?;
    let pair = chain.pairs.find(raw & VALUE_MASK)?;
    let plugin = chain.plugin(pair.abi).ok_or(otherwise)?;
    Ok((pair, plugin))
}

/// Our own part of a pair, if we have one that may be followed.
fn own(live: &Live, pair: &Pair) -> Option<u64> {
    if pair.ours == 0 || Kind::Chained.is(pair.ours, live.nonce) { None } else { Some(pair.ours) }
}

/// The end of an event that only both plugins together may know: [`record::stop`] does not, for this reason.
///
/// # Errors
/// As [`record::stop`].
#[cold]
#[inline(never)]
pub(crate) fn stop(live: &'static Live, raw: u64, otherwise: Loss) -> Result<Carried, Loss> {
    let (pair, plugin) = known(live, raw, otherwise)?;
    let ours = match own(live, &pair) {
        Some(raw) if !has_no_end(raw, pair.abi) => record::stop(live, raw),
        _ => Ok(Carried::Nothing),
    };
    // SAFETY: a handle that it gave.
    unsafe { (plugin.stop)(to_pointer(pair.theirs)) };
    ours
}

/// The same for a state.
///
/// # Errors
/// As [`record::state`].
#[cold]
#[inline(never)]
pub(crate) fn state(
    live: &'static Live,
    raw: u64,
    state: i32,
    arg: Option<StateArg>,
    otherwise: Loss,
) -> Result<Carried, Loss> {
    let (pair, plugin) = known(live, raw, otherwise)?;
    let ours = match own(live, &pair) {
        Some(raw) => record::state(live, raw, state, arg),
        None => Ok(Carried::Nothing),
    };
    if pair.mute {
        return ours;
    }
    // Up to v3 a size and a number of steps, then one word: the longer one holds either.
    let words = arg.map(|a| [a.value, u64::from(a.steps as u32)]);
    let at: *const c_void = words.as_ref().map_or(core::ptr::null(), |w| w.as_ptr().cast());
    // SAFETY: a handle that it gave, and NULL or arguments of its version.
    unsafe { (plugin.record)(to_pointer(pair.theirs), state, at) };
    ours
}
