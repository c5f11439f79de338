//! The profiler's init of a communicator.

use super::own_table;
use crate::chain::Chain;
use crate::event::bit;
use crate::ffi::InitArgs;
use crate::handle::{Handle, Kind, spare_context};
use crate::live::{self, Live};
use crate::opening::{enter_comm, open};
use crate::runtime::log::{Log, Message};
use crate::runtime::nccl::Linker;
use crate::runtime::{names, settings};
use crate::{bare, calls, tuner};
use core::ffi::c_int;
use ringwatch_wire::codes::{Loss, call};
use ringwatch_wire::layout::comm;
use ringwatch_wire::sync::Word;

/// A context of last resort: not 0 and of no process.
const NO_CONTEXT: u64 = 1;

/// NCCL's event mask, as an init may have it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mask {
    /// The events that this ABI version is to bring.
    pub(super) wanted: c_int,
    /// Where NCCL keeps it; 0 nowhere.
    pub(super) place: usize,
}

/// The result of an init.
#[derive(Debug, Clone, Copy)]
pub(super) struct Opened {
    /// The context, never 0.
    pub(super) context: u64,
    /// The mask to begin with.
    pub(super) mask: c_int,
}

/// Opens the process's state if need be, and a communicator in it. Never fails: without a segment the books
/// are kept in private memory, and NCCL is asked for no events.
pub(super) fn open_comm(version: u32, args: &InitArgs, mask: Mask) -> Opened {
    let log = Log::new(args.log);
    names::forget();
    let Some((page, live)) = open(Some(version), mask.place, &log) else {
        return Opened { context: NO_CONTEXT, mask: 0 };
    };
    bare::forget_names(&live.segment);
    let outcome = match calls::adopt(live, version, args) {
        Some(ticket) => Ok(ticket),
        None => enter_comm(live, args),
    };
    if let Ok(ticket) = outcome {
        tuner::note(ticket);
        if is_beside_another(live, ticket) {
            // Most likely a thread for each, and the mask is one for all.
            live.governor.stop_switching();
        }
        if live.governor.events() {
            live.events.open(ticket);
        }
    }
    live.segment.book(call::INIT, outcome.map(|_| ()));
    let value = outcome.unwrap_or_else(|why| {
        // Why there is no segment at all was said when it could not be made.
        if why != Loss::NoRoom {
            log.say(Message::CommTableFull);
        }
        // Contexts have to differ even without a slot: NCCL purges queued events by context.
        spare_context(page.spare_contexts.add(1))
    });
    page.load_chain(|| Chain::load(settings::chain()?, version, own_table, &log));
    // Nothing is recorded where there is no segment, and nothing asked for.
    let wanted = if outcome == Err(Loss::NoRoom) { 0 } else { mask.wanted };
    let mask = match live::chain() {
        Some(chain) => {
            let theirs = chain.open(version, args, value, &log);
            // The other plugin may change its mind, which is seen when something comes.
            live.governor.mask(wanted | HEARTBEAT, theirs, static_place(mask.place))
        }
        None if wanted == 0 => 0,
        None => live.governor.mask(wanted, 0, mask.place),
    };
    Opened { context: Handle { kind: Kind::Comm, value }.pack(live.nonce), mask }
}

/// True where the process has another rank of the communicator.
fn is_beside_another(live: &Live, ticket: u64) -> bool {
    let ring = &live.segment.comm;
    let word = |slot: &[Word; comm::WORDS], i: usize| slot.get(i).map_or(0, Word::get);
    let Some(own) = ring.held(ticket) else { return false };
    let id = word(own, comm::ID);
    word(own, comm::NODES) & comm::KNOWN != 0
        && (0..ring.slots()).filter_map(|i| ring.slot(i)).any(|other| {
            !core::ptr::eq(own, other)
                && word(other, 0) != 0
                && word(other, comm::NODES) & comm::KNOWN != 0
                && word(other, comm::ID) == id
                && word(other, comm::FINALIZED_NS) == 0
        })
}

/// Events that cost NCCL nothing and come with every operation.
const HEARTBEAT: c_int = 1 << bit::COLL | 1 << bit::P2P;

/// A place for NCCL's mask that may be written after init; 0 for one on a stack or a heap, which is a test's.
fn static_place(place: usize) -> usize {
    if Linker::get().is_some_and(|l| l.is_static(place)) { place } else { 0 }
}
