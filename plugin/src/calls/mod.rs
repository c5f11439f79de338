//! NCCL's own functions as the job calls them, seen by the preloaded library.
//!
//! It says what a profiler cannot: calls before anything is issued (and so a call that never comes back),
//! communicators from the moment they are being made, reduction operations, results; and where NCCL has no
//! profiler, or another one's plugin, all that there is. What it sees goes into the slots that the profiler's
//! events use, so that one call is one operation however many tell of it:
//!
//! * ABI v5 and later: NCCL tells of the call inside the call, whose slot is the communicator's open one.
//! * v1 to v4: NCCL tells when it issues, and the oldest call that fits is taken.
//! * Nobody tells: the call itself issues the operation, when the outermost group has ended.
//!
//! The promises are the plugin's, from a communicator's init on: no lock, no heap, no system call, no waiting.

#![expect(unsafe_code, reason = "the C boundary")]

mod comms;
mod exchange;
mod group_calls;
mod groups;
mod making;
mod real;

pub use crate::runtime::thread_word::take_key;
pub use comms::{Made, asked, revoke, unique_id_hash};
pub use group_calls::{group_end, group_start};
pub use making::{destroy, init, init_all};
pub use real::Real;

use crate::communicator::Comm;
use crate::event_pairs::EventPair;
use crate::ffi::InitArgs;
use crate::live::Live;
use crate::preloaded::{Calls, Mode, entry, get, mode, pending, set};
use crate::runtime::clock::now_ns;
use crate::runtime::names::{bytes_of, code_of};
use crate::runtime::thread_word::Thread;
use crate::slot_ref::SlotRef;
use crate::timing;
use core::ffi::c_int;
use ringwatch_wire::codes::{Flaw, Loss, REDOPS, TYPES, UNKNOWN, call as call_kind, flag, kind};
use ringwatch_wire::layout::{comm, head, op};
use ringwatch_wire::sync::Word;

const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 7;

macro_rules! funcs {
    ($($name:ident = $text:literal),+ $(,)?) => {
        /// Codes of the functions that are seen.
        pub mod func {
            #![allow(missing_docs, reason = "NCCL's own names")]
            $(pub const $name: u8 = super::code_of($text);)+
        }
    };
}
funcs! {
    ALL_REDUCE = "AllReduce", BROADCAST = "Broadcast", REDUCE = "Reduce", ALL_GATHER = "AllGather",
    REDUCE_SCATTER = "ReduceScatter", SEND = "Send", RECV = "Recv", ALL_TO_ALL = "AlltoAll",
    SCATTER = "Scatter", GATHER = "Gather", PUT_SIGNAL = "PutSignal", SIGNAL = "Signal",
    WAIT_SIGNAL = "WaitSignal", DEV_COMM_CREATE = "DevCommCreate",
}

/// One call of an operation.
#[derive(Debug, Clone, Copy)]
pub struct Op {
    /// Code of the function.
    pub func: u8,
    /// NCCL's number of the data type.
    pub dtype: c_int,
    /// Elements, as the call counts them.
    pub count: usize,
    /// Root or peer; -1 for none.
    pub root: c_int,
    /// NCCL's number of the reduction operation; -1 for none.
    pub redop: c_int,
    /// NCCL's pointer of the communicator, as a number.
    pub comm: usize,
    /// CUDA stream, as a number.
    pub stream: usize,
    /// Send and receive buffer are the same.
    pub in_place: bool,
}

/// Runs a function of NCCL's inside of which nothing else is looked at.
#[inline]
fn inside(thread: Thread, real: impl FnOnce() -> c_int) -> c_int {
    Thread { inside: true, ..thread }.set();
    let result = real();
    thread.set();
    result
}

/// A call that is recorded.
#[derive(Clone, Copy)]
struct Taken {
    calls: Calls,
    comm: u64,
    entry: &'static [Word; entry::WORDS],
    captured: bool,
    mode: Mode,
    op: u64,
}

/// Calls an operation and records it. NCCL's result is handed back as it is.
#[inline]
pub fn around(op: &Op, real: impl FnOnce() -> c_int) -> c_int {
    let thread = Thread::get();
    if thread.inside {
        return real();
    }
    let taken = take(op, thread.depth > 0);
    if let Some(t) = taken
        && thread.depth == 0
    {
        // A bare call is its own launch.
        set(t.entry, entry::SHOT, begin_pair(&t.calls, t.entry, op.stream as u64));
    }
    let result = inside(thread, real);
    if let Some(taken) = taken {
        leave(taken, op, thread, result);
    }
    result
}

/// Makes a call that has no issue order, and records it. NCCL reports nothing of it, launches it in a way of its own, and
/// gives no order that ranks share. NCCL's result is handed back as it is.
#[inline]
pub fn around_unordered(op: &Op, real: impl FnOnce() -> c_int) -> c_int {
    let thread = Thread::get();
    if thread.inside {
        return real();
    }
    let taken = take_unordered(op, thread.depth > 0);
    let result = inside(thread, real);
    if let Some((calls, comm, ticket)) = taken {
        returned(calls.live, ticket, result, now_ns());
        if accepted(result) {
            comms::used(&calls, comm);
        }
    }
    result
}

fn take_unordered(call: &Op, grouped: bool) -> Option<(Calls, u64, u64)> {
    let calls = Calls::get()?;
    let (comm, e) = calls.comm(call.comm)?;
    if comms::settled(&calls, e) == Mode::Apart {
        return None;
    }
    let captured = is_one_sided(call.func) && calls.live.events.captures(call.stream as u64);
    if captured {
        calls.live.governor.captured();
    }
    let from = if grouped { op::GROUPED } else { 0 } | op::PRELOADED;
    let made = called(&calls, comm, call, captured, from, now_ns());
    calls.live.segment.book(call_kind::API, made.map(|_| ()));
    Some((calls, comm, made.ok()?))
}

/// Begins a pair of CUDA events before a launch that NCCL does not tell of, if that is to be timed.
fn begin_pair(calls: &Calls, e: &[Word], stream: u64) -> u64 {
    let untold = matches!(mode(e), Mode::Alone | Mode::Events);
    if !untold || get(e, entry::ASYNC) != 0 || !calls.live.governor.events() {
        return 0;
    }
    let comm = Comm::of(&calls.live.segment, get(e, entry::TICKET).wrapping_sub(1));
    comm.and_then(|c| timing::launch_of_call(calls.live, c, stream)).map_or(0, EventPair::number)
}

/// Ends it behind the launch. A communicator that does not block launches later, on a thread of NCCL's: nothing of
/// it is timed from the first call on that says so.
fn end_pair(calls: &Calls, e: &[Word], result: c_int) {
    if result == IN_PROGRESS {
        set(e, entry::ASYNC, 1);
    }
    let Some(pair) = EventPair::from_number(get(e, entry::SHOT)) else { return };
    set(e, entry::SHOT, 0);
    if result == SUCCESS {
        calls.live.events.end(&calls.live.segment, pair);
    } else if let Some(c) = Comm::of(&calls.live.segment, get(e, entry::TICKET).wrapping_sub(1)) {
        c.set(comm::SHOT, 0);
    }
}

fn take(call: &Op, grouped: bool) -> Option<Taken> {
    let calls = Calls::get()?;
    let (comm, e) = calls.comm(call.comm)?;
    let mode = comms::settled(&calls, e);
    if mode == Mode::Apart {
        return None;
    }
    // With ABI v5 and later NCCL says so itself.
    // Once a capture has begun with kernel events they stay in the graph: they are switched off before.
    let asked = mode != Mode::Calls || calls.live.governor.spoils_captures();
    let captures = asked && calls.live.events.captures(call.stream as u64);
    if captures {
        calls.live.governor.captured();
    }
    let captured = mode != Mode::Calls && captures;
    let now = now_ns();
    let from = if grouped { op::GROUPED } else { 0 } | op::PRELOADED;
    let made = called(&calls, comm, call, captured, from, now);
    calls.live.segment.book(call_kind::API, made.map(|_| ()));
    let ticket = made.ok()?;
    // What does nothing is not launched; what is captured, not now.
    let runs = !captured && call.count > 0 && ranks(&calls, comm) != 1;
    match mode {
        Mode::Calls => set(e, entry::OPEN_CALL, ticket + 1),
        Mode::Alone | Mode::Events if runs => {
            if mode == Mode::Events {
                pending::push(
                    &calls,
                    comm,
                    ticket,
                    pending::key_of(call.func, numbered(call.dtype, TYPES), call.count as u64, call.root),
                );
            }
            if let Some(c) = Comm::of(&calls.live.segment, comm) {
                timing::note_call(
                    calls.live,
                    &c,
                    ticket,
                    now,
                    bytes_of(numbered(call.dtype, TYPES), call.count as u64),
                    0,
                    !is_pair(call.func),
                );
            }
        }
        _ => {}
    }
    Some(Taken { calls, comm, entry: e, captured, mode, op: ticket })
}

fn ranks(calls: &Calls, comm: u64) -> u64 {
    calls.live.segment.comm.held(comm).map_or(0, |s| get(s, comm::RANK) >> 32)
}

/// NCCL's number as a code of the wire's: plus one, unknown when out of the table.
const fn numbered(n: c_int, table: &[(u8, &str)]) -> u8 {
    if n >= 0 && (n as usize) < table.len() { n as u8 + 1 } else { UNKNOWN }
}

fn redop(n: c_int) -> u8 {
    // What the user makes is numbered on from NCCL's own.
    if n >= REDOPS.len() as c_int { REDOPS.len() as u8 } else { numbered(n, REDOPS) }
}

const fn is_send(func: u8) -> bool {
    func == func::SEND
}

const fn is_pair(func: u8) -> bool {
    func == func::SEND || func == func::RECV
}

const fn is_one_sided(func: u8) -> bool {
    matches!(func, func::PUT_SIGNAL | func::SIGNAL | func::WAIT_SIGNAL)
}

fn called(calls: &Calls, comm: u64, call: &Op, captured: bool, from: u64, now: u64) -> Result<u64, Loss> {
    let (ticket, slot) = calls.live.segment.op.claim()?;
    let mut words = [0; op::WORDS - 1];
    let mut set = |i: usize, value: u64| {
        if let Some(w) = words.get_mut(i - 1) {
            *w = value;
        }
    };
    let kind = match call.func {
        func::SEND => kind::SEND,
        func::RECV => kind::RECV,
        func::DEV_COMM_CREATE => kind::CALL,
        f if is_one_sided(f) => kind::CALL,
        _ => kind::COLLECTIVE,
    };
    let flags = if call.in_place { flag::IN_PLACE } else { 0 } | if captured { flag::CAPTURED } else { 0 };
    set(
        op::WHAT,
        comm & 0xffff
            | u64::from(kind) << 16
            | u64::from(call.func) << 24
            | u64::from(numbered(call.dtype, TYPES)) << 32
            | u64::from(flags) << 56,
    );
    set(op::ORDER, op::NO_ORDER);
    set(op::SEQ, op::NO_ORDER);
    set(op::COUNT, call.count as u64);
    set(op::ROOT, u64::from(call.root as u32));
    set(op::CALLED_NS, now);
    set(op::STREAM, call.stream as u64);
    set(op::REDOP, u64::from(redop(call.redop)) | from);
    slot.set_all(1, words);
    slot.publish();
    Ok(ticket)
}

/// Longest time that the mark of a return can hold: 4.9 hours.
const RETURNED_NS_MAX: u64 = (1 << 44) - 1;

/// Notes that a call came back, and how.
fn returned(live: &Live, ticket: u64, result: c_int, now: u64) {
    if let Ok(held) = SlotRef::of(&live.segment.op, ticket) {
        let ns = now.saturating_sub(held.word(op::CALLED_NS)).min(RETURNED_NS_MAX);
        let result = result.clamp(0, 15) as u64;
        held.put(op::RETURNED, ns << 4 | result);
    }
}

const fn accepted(result: c_int) -> bool {
    result == SUCCESS || result == IN_PROGRESS
}

fn leave(t: Taken, call: &Op, thread: Thread, result: c_int) {
    let Taken { calls, comm, entry: e, captured, mode, op } = t;
    if thread.depth == 0 {
        end_pair(&calls, e, result);
    }
    if mode == Mode::Calls
        && let Some(w) = e.get(entry::OPEN_CALL)
    {
        w.replace(op + 1, 0);
    }
    let now = now_ns();
    returned(calls.live, op, result, now);
    if !accepted(result) {
        if mode == Mode::Events {
            pending::forget(&calls, comm, op);
        }
        return;
    }
    comms::used(&calls, comm);
    if mode == Mode::Calls || captured {
        return;
    }
    if thread.depth > 0 && groups::add(&t, call) {
        return;
    }
    let order = order(&t, call, None);
    let plan = groups::plan(&calls, mode);
    ended(&calls, op, order, plan, now);
}

/// An order that is not counted: what does nothing has none, or somebody else gives it.
const UNCOUNTED: u64 = op::NO_ORDER - 1;

/// Gives a call its issue order where nobody else does. It is not read from the call's record, which may be overwritten by
/// now: the orders that follow stay right. In a group it is the next one behind those that are `waiting`.
fn order(t: &Taken, call: &Op, waiting: Option<&Word>) -> u64 {
    let live = t.calls.live;
    // As with a profiler: what does nothing is not counted.
    if t.mode != Mode::Alone || call.count == 0 || ranks(&t.calls, t.comm) == 1 {
        return UNCOUNTED;
    }
    if is_pair(call.func) {
        let order = live.pairs.next(t.comm, call.root, is_send(call.func));
        if order.is_none() {
            live.segment.flaw(Flaw::PairOrder);
        }
        return order.unwrap_or(op::NO_ORDER);
    }
    let issued = live.segment.comm.held(t.comm).and_then(|c| c.get(comm::ISSUED));
    issued.map_or(op::NO_ORDER, |issued| match waiting {
        Some(waiting) => issued.get() + waiting.add(1),
        None => issued.add(1),
    })
}

/// The outermost group that holds a call has ended: what is still to be issued of it is issued now, or soon by
/// another thread.
fn ended(calls: &Calls, ticket: u64, order: u64, plan: u64, now: u64) {
    let Some(slot) = calls.live.segment.op.held(ticket) else {
        return calls.live.segment.flaw(Flaw::Overwritten);
    };
    let comm = get(slot, op::WHAT) & 0xffff;
    let Some(e) = calls.page.comms.get(calls.index(comm)) else { return };
    match mode(e) {
        Mode::Alone => issue(calls, e, ticket, order, plan, now),
        Mode::Events => pending::late(calls, get(e, entry::TICKET).wrapping_sub(1), ticket),
        _ => {}
    }
}

/// The order of a send or receive that is not issued is given again. Those of collectives have not been counted yet.
fn take_back(calls: &Calls, ticket: u64, order: u64) {
    let Some(slot) = calls.live.segment.op.held(ticket) else { return };
    let (what, peer) = (get(slot, op::WHAT), get(slot, op::ROOT) as u32 as i32);
    let func = (what >> 24 & 0xff) as u8;
    let Some(e) = calls.page.comms.get(calls.index(what & 0xffff)) else { return };
    if is_pair(func) && order < UNCOUNTED {
        calls.live.pairs.take_back(get(e, entry::TICKET).wrapping_sub(1), peer, is_send(func));
    }
}

/// Issues an operation in its order: nobody else does.
fn issue(calls: &Calls, e: &[Word], ticket: u64, order: u64, plan: u64, now: u64) {
    let live = calls.live;
    let Some(slot) = live.segment.op.held(ticket).filter(|_| order != UNCOUNTED) else { return };
    let comm = get(e, entry::TICKET).wrapping_sub(1);
    let timed = Comm::of(&live.segment, comm).map_or(0, |c| timing::of_call(live, c, ticket));
    let unknown = if order == op::NO_ORDER { u64::from(flag::ORDER_UNKNOWN) << 56 } else { 0 };
    let what = get(slot, op::WHAT) | unknown;
    if let Some(claim) = live.segment.op.claim_again(ticket) {
        claim.set(op::WHAT, what);
        claim.set(op::ORDER, order);
        claim.set(op::ISSUED_NS, now);
        claim.set(op::PLAN, plan);
        claim.set(op::TIMED, timed);
        claim.publish();
    }
}

/// The communicator that a profiler's init is of, when a call that makes it was seen.
pub(crate) fn adopt(live: &'static Live, version: u32, args: &InitArgs) -> Option<u64> {
    let calls = Calls::get()?;
    calls.page.abi.set(u64::from(version));
    let told = live.segment.get(head::NCCL);
    if told >> 32 == 0 {
        live.segment.set(head::NCCL, told | u64::from(version) << 32);
    }
    comms::adopt(&calls, version, args)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_codes() {
        assert_eq!([-1, 0, 4, 5, 1000].map(redop), [0, 1, 5, 6, 6]);
        assert_eq!([-1, 0, 11, 12].map(|n| numbered(n, TYPES)), [0, 1, 12, 0]);
        assert_eq!((func::ALL_REDUCE, func::SEND, func::GATHER), (5, 7, 11));
    }
}
