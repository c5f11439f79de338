//! Communicators, from the moment a call that makes one is entered to the one that frees it.
//!
//! Making one is init: it may take locks and time of its own. NCCL's profiler says who a communicator is, in the
//! middle of the making; its init takes over the slot that the call has opened, and its id stands.

#![expect(unsafe_code, reason = "reads where NCCL stores its pointers")]

use super::{IN_PROGRESS, SUCCESS, accepted, groups, inside, real};
use crate::communicator::Comm;
use crate::ffi::InitArgs;
use crate::opening::{enter_comm, place_on};
use crate::preloaded::{Calls, Mode, entry, get, mode, pending, set, table};
use crate::record;
use crate::runtime::clock::now_ns;
use crate::runtime::names;
use crate::runtime::nccl;
use crate::runtime::sys;
use crate::runtime::thread_word::Thread;
use core::ffi::{c_char, c_int, c_void};
use ringwatch_wire::codes::{call, made};
use ringwatch_wire::layout::{comm, head};
use ringwatch_wire::sync::Word;

/// Where NCCL stores the pointer of what it makes.
pub(super) type Place = *mut *mut c_void;

/// The communicator that a call makes.
#[derive(Debug, Clone, Copy)]
pub enum Made {
    /// One rank of a new communicator.
    Rank {
        /// The communicator's id, as [`unique_id_hash`] makes it; `None` when it is not known.
        id: Option<u64>,
        /// The rank.
        rank: c_int,
        /// Ranks.
        ranks: c_int,
    },
    /// A communicator of some or more ranks than another one has.
    Child {
        /// NCCL's pointer of the other one, as a number.
        parent: usize,
        /// The number that distinguishes it from its siblings.
        color: c_int,
    },
}

/// NCCL's id of a communicator that is made from a unique id: a hash over its bytes, as C's `char` reads them.
pub fn unique_id_hash(id: &[u8]) -> u64 {
    id.iter().fold(5381, |h: u64, b| h.wrapping_mul(33) ^ (*b as c_char as i64 as u64))
}

fn mixed(a: u64, b: u64, c: u64) -> u64 {
    // Any function that is the same on every rank.
    [a, b, c].iter().fold(0xcbf2_9ce4_8422_2325, |h, w| {
        let h = (h ^ w).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        h ^ h >> 29
    })
}

/// Makes a communicator by NCCL's function, and records it.
pub(super) fn init_recorded(place: Place, what: Made, thread: Thread, real: impl FnOnce() -> c_int) -> c_int {
    let begun = Calls::open().and_then(|calls| Some((calls, begin(&calls, place, what)?)));
    let result = inside(thread, real);
    if let Some((calls, ticket)) = begun {
        end(&calls, ticket, thread, result);
    }
    result
}

/// The same for all ranks of a communicator in this process.
pub(super) fn init_all_recorded(
    places: Place,
    ranks: c_int,
    thread: Thread,
    real: impl FnOnce() -> c_int,
) -> c_int {
    let calls = if places.is_null() { None } else { Calls::open() };
    // Their tickets, last first, linked as those of a group are.
    let mut first = 0;
    if let Some(calls) = calls {
        for rank in 0..ranks.clamp(0, crate::preloaded::COMMS as c_int) {
            let place = places.wrapping_add(rank as usize);
            if let Some(ticket) = begin(&calls, place, Made::Rank { id: None, rank, ranks })
                && let Some(e) = calls.entry(ticket)
            {
                set(e, entry::NEXT, first);
                first = ticket + 1;
            }
        }
    }
    let result = inside(thread, real);
    if let Some(calls) = calls {
        // NCCL has made up the unique id itself: one of our own for all of them, where nobody tells another.
        let made = calls.page.made.add(1);
        let id = mixed(calls.live.segment.get(head::NONCE), made, 0);
        for _ in 0..crate::preloaded::COMMS {
            let Some(e) = first.checked_sub(1).and_then(|t| calls.entry(t)) else { break };
            let ticket = first - 1;
            first = get(e, entry::NEXT);
            set(e, entry::ID, id);
            end(&calls, ticket, thread, result);
        }
    }
    result
}

fn begin(calls: &Calls, place: Place, what: Made) -> Option<u64> {
    let (known, id, rank, ranks) = match what {
        Made::Rank { id, rank, ranks } => (id.is_some(), id.unwrap_or(0), rank, ranks),
        Made::Child { parent, color } => (false, child_id(calls, parent, color), -1, 0),
    };
    let args = InitArgs { known, id, name: core::ptr::null(), nodes: 0, ranks, rank, log: None };
    let opened = enter_comm(calls.live, &args);
    calls.live.segment.book(call::API, opened.map(|_| ()));
    let ticket = opened.ok()?;
    let e = calls.page.comms.get(calls.index(ticket))?;
    for w in e {
        w.set(0);
    }
    pending::clear(calls, ticket);
    set(e, entry::PLACE, place.expose_provenance() as u64);
    set(e, entry::ID, if known { 0 } else { id });
    set(e, entry::RANK_UNKNOWN, u64::from(matches!(what, Made::Child { .. })));
    set(e, entry::THREAD, sys::thread());
    set(e, entry::TICKET, ticket + 1);
    put(calls, ticket, comm::STATE, u64::from(made::INITIALISING));
    Some(ticket)
}

/// The id of a child, where NCCL tells none: the same on all ranks, 0 where the parent is not known.
fn child_id(calls: &Calls, parent: usize, color: c_int) -> u64 {
    let Some((ticket, e)) = calls.comm(parent) else { return 0 };
    let Some(slot) = calls.live.segment.comm.held(ticket) else { return 0 };
    let count = e.get(entry::CHILDREN).map_or(0, |w| w.add(1));
    mixed(get(slot, comm::ID), count, color as u32 as u64)
}

/// Rank and ranks as the segment's word.
const fn placed((rank, ranks): (c_int, c_int)) -> u64 {
    rank as u32 as u64 | (ranks as u32 as u64) << 32
}

/// Writes a word of a communicator that changes after it was published.
fn put(calls: &Calls, ticket: u64, i: usize, value: u64) {
    if let Some(slot) = calls.live.segment.comm.held(ticket) {
        set(slot, i, value);
    }
}

fn state_word(calls: &Calls, ticket: u64) -> Option<&'static Word> {
    calls.live.segment.comm.held(ticket)?.get(comm::STATE)
}

fn is_initialising(calls: &Calls, ticket: u64) -> bool {
    state_word(calls, ticket).is_some_and(|w| w.get() == u64::from(made::INITIALISING))
}

/// The call that makes a communicator has returned.
fn end(calls: &Calls, ticket: u64, thread: Thread, result: c_int) {
    if accepted(result) && thread.depth > 0 && groups::add_comm(calls, ticket) {
        // It is made when the group ends.
        return;
    }
    ended(calls, ticket, result);
}

/// Ends the making of a communicator, or leaves it to go on by itself.
pub(super) fn ended(calls: &Calls, ticket: u64, result: c_int) {
    let Some(e) = calls.entry(ticket) else { return };
    // What NCCL refused, it has stored nothing for, and the place may be a bad one.
    let pointer = if accepted(result) { stored(e) } else { 0 };
    match result {
        SUCCESS if pointer != 0 => ready(calls, ticket, pointer),
        // This rank is not in it.
        SUCCESS => close(calls, ticket),
        IN_PROGRESS => {
            set(e, entry::ASYNC, 1);
            set(e, entry::POINTER, pointer);
            table::enter(&calls.page.table, pointer, ticket);
        }
        _ => {
            let result = result.clamp(0, 255) as u64;
            put(calls, ticket, comm::STATE, u64::from(made::FAILED) | result << 8);
            close(calls, ticket);
        }
    }
}

/// The pointer that NCCL has stored.
fn stored(e: &[Word]) -> u64 {
    let place = core::ptr::with_exposed_provenance::<*mut c_void>(get(e, entry::PLACE) as usize);
    if place.is_null() {
        return 0;
    }
    // SAFETY: the place that the job gave NCCL for the pointer; NCCL has written to it, and the job keeps it
    // until the call or the group that it was given in has ended.
    unsafe { place.read() }.addr() as u64
}

/// NCCL says that a communicator can be used.
fn ready(calls: &Calls, own: u64, pointer: u64) {
    let Some(e) = calls.entry(own) else { return };
    // Once, and not while NCCL is being asked about it: asking may come back here.
    if !e.get(entry::READY).is_some_and(|w| w.get() == 0 && w.replace(0, 1)) {
        return;
    }
    let place = if get(e, entry::RANK_UNKNOWN) == 1 { real::place(pointer) } else { None };
    // The profiler's init has taken over the first slot that could be it; now it can be told which one it is.
    let ticket = place.and_then(|(rank, ranks)| slot_of(calls, own, rank, ranks)).unwrap_or(own);
    let Some(e) = calls.entry(ticket) else { return };
    set(e, entry::POINTER, pointer);
    table::enter(&calls.page.table, pointer, ticket);
    match (decide(calls, e), place) {
        (Mode::Alone, _) => tell(calls, ticket, e, place, pointer),
        // Before ABI v4 the profiler never says how many ranks there are.
        (Mode::Events, Some(place)) => put(calls, ticket, comm::RANK, placed(place)),
        _ => {}
    }
    if let Some(w) = state_word(calls, ticket)
        && w.get() == u64::from(made::INITIALISING)
    {
        put(calls, ticket, comm::READY_NS, now_ns());
        w.replace(u64::from(made::INITIALISING), u64::from(made::READY));
    }
    if mode(e) == Mode::Apart {
        // It goes on under the slot that the profiler has opened.
        close(calls, ticket);
    }
}

/// Among the children that are being made, the slot of this rank; its own where nobody has told.
fn slot_of(calls: &Calls, own: u64, rank: c_int, ranks: c_int) -> Option<u64> {
    let want = placed((rank, ranks));
    let fits = |t: &u64| {
        let e = calls.entry(*t);
        e.is_some_and(|e| {
            get(e, entry::RANK_UNKNOWN) == 1 && get(e, entry::ADOPTED) == 1 && get(e, entry::POINTER) == 0
        }) && is_initialising(calls, *t)
            && calls.live.segment.comm.held(*t).is_some_and(|s| get(s, comm::RANK) == want)
    };
    Some(own).filter(fits).or_else(|| tickets(calls).find(fits))
}

fn tickets(calls: &Calls) -> impl Iterator<Item = u64> + '_ {
    calls.page.comms.iter().filter_map(|e| get(e, entry::TICKET).checked_sub(1))
}

/// Decides who else reports its operations, once that is known.
fn decide(calls: &Calls, e: &[Word]) -> Mode {
    let known = mode(e);
    if known != Mode::Unknown {
        return known;
    }
    // A profiler that has told of no init for this one has told of it under a slot of its own.
    let now = if calls.page.abi.get() == 0 { Mode::Alone } else { Mode::Apart };
    if now == Mode::Alone {
        // Kernel events will not come, whatever was to be expected of this NCCL.
        calls.live.governor.captured();
    }
    set(e, entry::MODE, now as u64);
    now
}

/// The mode of a communicator that is being used.
#[inline]
pub(super) fn settled(calls: &Calls, e: &[Word]) -> Mode {
    let known = mode(e);
    if known == Mode::Unknown { decide(calls, e) } else { known }
}

/// A call on it was accepted: if nobody has said so before, it is ready.
#[inline]
pub(super) fn used(calls: &Calls, ticket: u64) {
    if is_initialising(calls, ticket)
        && let Some(e) = calls.entry(ticket)
    {
        ready(calls, ticket, get(e, entry::POINTER));
    }
}

/// Writes down who a communicator is, where nobody else does.
fn tell(calls: &Calls, ticket: u64, e: &[Word], place: Option<(c_int, c_int)>, pointer: u64) {
    let id = get(e, entry::ID);
    let device = real::device(pointer);
    let gpu = nccl::gpu_address_of(device);
    let Some(claim) = calls.live.segment.comm.claim_again(ticket) else { return };
    if let Some(place) = place {
        claim.set(comm::RANK, placed(place));
    }
    // A child that cannot be asked stays unknown.
    if id != 0 && (place.is_some() || get(e, entry::RANK_UNKNOWN) == 0) {
        claim.set(comm::ID, id);
        claim.set(comm::NODES, comm::KNOWN);
    }
    if gpu.iter().any(|w| *w != 0) {
        place_on(&claim, &gpu);
    }
    claim.publish();
    if calls.live.governor.events() {
        nccl::on_device(device, || calls.live.events.open(ticket));
    }
}

/// Frees a communicator's slot.
fn close(calls: &Calls, ticket: u64) {
    if let Some(w) = state_word(calls, ticket) {
        // Nobody makes it any more, whatever became of it.
        w.replace(u64::from(made::INITIALISING), u64::from(made::UNKNOWN));
    }
    // The profiler may have said so before.
    if let Some(c) = Comm::of(&calls.live.segment, ticket) {
        record::end(calls.live, &c);
    }
}

/// Asks NCCL for a communicator's state, and believes the answer.
///
/// # Safety
/// `answer` is where the function stores one int, or NULL.
pub unsafe fn asked(pointer: usize, answer: *const c_int, real: impl FnOnce() -> c_int) -> c_int {
    let result = real();
    if result != SUCCESS || Thread::get().inside || answer.is_null() {
        return result;
    }
    let Some(calls) = Calls::get() else { return result };
    let Some((ticket, _)) = calls.comm(pointer) else { return result };
    if is_initialising(&calls, ticket) {
        // SAFETY: NCCL has stored its answer there.
        match unsafe { answer.read() } {
            SUCCESS => ready(&calls, ticket, pointer as u64),
            IN_PROGRESS => {}
            failed => {
                let failed = failed.clamp(0, 255) as u64;
                put(&calls, ticket, comm::STATE, u64::from(made::FAILED) | failed << 8);
            }
        }
    }
    result
}

/// Frees a communicator by NCCL's function, and records it.
pub(super) fn destroy_recorded(pointer: usize, aborted: bool, real: impl FnOnce() -> c_int) -> c_int {
    let thread = Thread::get();
    if thread.inside {
        return real();
    }
    let calls = Calls::get();
    let known = calls.and_then(|calls| calls.comm(pointer).map(|(ticket, _)| (calls, ticket)));
    if let Some((calls, ticket)) = known {
        // Another communicator may get the same pointer before this returns.
        table::remove(&calls.page.table, pointer as u64);
        if aborted {
            put(&calls, ticket, comm::STATE, u64::from(made::ABORTED));
        }
    }
    let result = inside(thread, real);
    if let Some((calls, ticket)) = known {
        close(&calls, ticket);
    }
    result
}

/// Ends all operations of a communicator, which stays, by NCCL's function.
pub fn revoke(pointer: usize, real: impl FnOnce() -> c_int) -> c_int {
    let thread = Thread::get();
    if thread.inside {
        return real();
    }
    let result = inside(thread, real);
    if accepted(result)
        && let Some(calls) = Calls::get()
        && let Some((ticket, _)) = calls.comm(pointer)
    {
        put(&calls, ticket, comm::STATE, u64::from(made::ABORTED));
    }
    result
}

fn only(mut tickets: impl Iterator<Item = u64>) -> Option<u64> {
    let first = tickets.next()?;
    if tickets.next().is_none() { Some(first) } else { None }
}

/// The communicator that a profiler's init is of: the same rank and ranks, being made, and the same id if there
/// is one. Before ABI v4 an init says nothing, and only the one that this thread makes, or the only one, can be meant.
pub(super) fn adopt(calls: &Calls, version: u32, args: &InitArgs) -> Option<u64> {
    let open = || {
        tickets(calls).filter(|t| {
            is_initialising(calls, *t) && calls.entry(*t).is_some_and(|e| get(e, entry::ADOPTED) == 0)
        })
    };
    let place = placed((args.rank, args.ranks));
    let word = |t: u64, i: usize| calls.live.segment.comm.held(t).map_or(0, |s| get(s, i));
    let same_place = |t: &u64| word(*t, comm::RANK) == place;
    let any_place = |t: &u64| calls.entry(*t).is_some_and(|e| get(e, entry::RANK_UNKNOWN) == 1);
    // A bare call that blocks makes its communicator on its own thread.
    let me = sys::thread();
    let mine = |t: &u64| calls.entry(*t).is_some_and(|e| get(e, entry::THREAD) == me);
    let ticket = if args.known {
        open()
            .find(|t| same_place(t) && word(*t, comm::ID) == args.id)
            .or_else(|| open().find(same_place))
            .or_else(|| open().find(|t| any_place(t) && mine(t)))
            .or_else(|| open().find(any_place))
    } else {
        only(open().filter(mine)).or_else(|| only(open()))
    }?;
    let e = calls.entry(ticket)?;
    // Inits of several communicators run at once; the other one looks on.
    if !e.get(entry::ADOPTED)?.replace(0, 1) {
        return None;
    }
    let claim = calls.live.segment.comm.claim_again(ticket)?;
    if args.known {
        claim.set(comm::ID, args.id);
        claim.set(comm::RANK, place);
        claim.set(comm::NODES, args.nodes as u32 as u64 | comm::KNOWN);
        for (i, w) in names::long_text(args.name).iter().enumerate() {
            claim.set(comm::NAME + i, *w);
        }
    }
    // NCCL's thread is on the communicator's own GPU.
    place_on(&claim, &nccl::gpu_address());
    claim.publish();
    let mode = if version >= 5 { Mode::Calls } else { Mode::Events };
    set(e, entry::MODE, mode as u64);
    Some(ticket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_nccls() {
        assert_eq!(unique_id_hash(&[]), 5381);
        assert_eq!(unique_id_hash(b"a"), (5381 * 33) ^ 97);
        // The bytes count as C's char, which is signed on x86-64.
        #[cfg(target_arch = "x86_64")]
        assert_eq!(unique_id_hash(&[0xff]), (5381 * 33) ^ u64::MAX);
    }
}
