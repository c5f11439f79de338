//! Passes callbacks on to the other plugin, after they are recorded.
//!
//! Each plugin sees its own handles and contexts alone: where the other one gave a handle, NCCL gets a number of the kind
//! [`Kind::Chained`], under which [`crate::chain::pairs`] keeps ours and theirs. What is not known any more is not passed on.
//! A parent that is not known is NULL to the other plugin, and a parent that another process made (PXN) reaches it as it
//! came.
//!
//! NCCL has one mask for both plugins, so events come that the other plugin did not ask for. It gets what it would get in the
//! slot alone: [`implied`] knows what NCCL brings for a mask.
//!
//! The other plugin's code keeps its own promises. Ours hold for what is done here: no lock, no heap, no system call after
//! init.

#![expect(unsafe_code, reason = "calls another library through its table")]

mod descriptor;
mod implied;

use crate::chain::pairs::{Pair, Shelf, shelf_of};
use crate::chain::{Chain, Plugin};
use crate::event::{StateArg, bit};
use crate::handle::{Handle, Kind, VALUE_MASK, has_no_end, to_number, to_pointer};
use crate::live::{self, Live};
use crate::record::{self, Carried};
use core::ffi::c_void;
pub(crate) use descriptor::Said;
use ringwatch_wire::codes::Loss;

/// Passes on an event that was started, which `ours` names to us; gives back what names it to NCCL.
pub(crate) fn start(chain: &Chain, live: &Live, context: u64, said: &Said, ours: u64) -> u64 {
    let Some((context, abi)) = chain.context(live.nonce, context) else { return ours };
    // Callbacks of another version than the communicator's own init are of nobody who may be believed.
    let Some(plugin) = chain.plugin(abi).filter(|_| abi == said.version()) else { return ours };
    chain.follow(&live.governor);
    let mask = mask_of(chain, live, said);
    let Some(theirs) = said.for_them(live, chain, plugin.version, mask) else { return ours };
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
    match chain.pairs.keep(shelf(said.bit(), ours, live), pair) {
        Some(value) => Handle { kind: Kind::Chained, value }.pack(live.nonce),
        None => ours,
    }
}

/// The mask that decides about an event. NCCL looks at its mask when an operation is called, and goes by that for
/// all that hangs on it, in every replay of a graph too.
fn mask_of(chain: &Chain, live: &Live, said: &Said) -> u32 {
    let of_call = matches!(said.bit(), bit::COLL | bit::P2P | bit::KERNEL_LAUNCH);
    let of_operation = matches!(
        said.bit(),
        bit::KERNEL_CH | bit::KERNEL_PHASE | bit::PROXY_OP | bit::PROXY_STEP | bit::NET_PLUGIN
    );
    match pair(chain, live, said.parent()).filter(|_| of_call || of_operation) {
        Some(Ok(pair)) => pair.mask,
        _ => chain.mask(),
    }
}

/// The pair that a handle of ours names.
fn pair(chain: &Chain, live: &Live, raw: u64) -> Option<Result<Pair, Loss>> {
    Kind::Chained.is(raw, live.nonce).then(|| chain.pairs.find(raw & VALUE_MASK))
}

/// Our handle of a parent.
fn our_parent(chain: &Chain, live: &Live, raw: u64) -> Result<u64, Loss> {
    match pair(chain, live, raw) {
        None => Ok(raw),
        Some(Ok(pair)) => Ok(pair.ours),
        // That a graph replays it is all that has to be known for its issue order.
        Some(Err(_)) if shelf_of(raw & VALUE_MASK) == Some(Shelf::Captured) => {
            Ok(Handle { kind: Kind::Captured, value: 0 }.pack(live.nonce))
        }
        Some(Err(loss)) => Err(loss),
    }
}

/// The other plugin's handle of a parent.
fn their_parent(chain: &Chain, live: &Live, raw: u64) -> u64 {
    match pair(chain, live, raw) {
        Some(Ok(pair)) => pair.theirs,
        Some(Err(_)) => 0,
        // Another process's number is nothing to us, and is passed on as it came; our own means nothing to it.
        None if raw >> 48 != u64::from(live.nonce) => raw,
        None => 0,
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

/// The pair that a handle names, and its plugin; absent for a handle of another kind.
fn known(live: &'static Live, raw: u64) -> Option<Result<(Pair, &'static Plugin), Loss>> {
    let chain = live::chain().filter(|_| Kind::Chained.is(raw, live.nonce))?;
    let pair = match chain.pairs.find(raw & VALUE_MASK) {
        Ok(pair) => pair,
        Err(loss) => return Some(Err(loss)),
    };
    Some(chain.plugin(pair.abi).map(|plugin| (pair, plugin)).ok_or(Loss::Foreign))
}

/// Our own part of a pair, if we have one that may be followed.
fn own(live: &Live, pair: &Pair) -> Option<u64> {
    if pair.ours == 0 || Kind::Chained.is(pair.ours, live.nonce) { None } else { Some(pair.ours) }
}

/// The end of an event where there is another plugin.
///
/// # Errors
/// As [`record::stop`].
#[cold]
#[inline(never)]
pub(crate) fn stop(live: &'static Live, raw: u64) -> Result<Carried, Loss> {
    let (pair, plugin) = match known(live, raw) {
        Some(known) => known?,
        None => return record::stop(live, raw),
    };
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
) -> Result<Carried, Loss> {
    let (pair, plugin) = match known(live, raw) {
        Some(known) => known?,
        None => return record::state(live, raw, state, arg),
    };
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
