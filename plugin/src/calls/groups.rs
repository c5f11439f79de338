//! Groups: what was called in one is issued, and what was begun in one is made, when the outermost has ended.

use super::thread::Thread;
use super::{
    Calls, Mode, Op, Taken, accepted, comms, ended, entry, exchange, get, inside, order, returned, set,
};
use crate::clock::now_ns;
use core::ffi::c_int;
use ringwatch_wire::codes::Flaw;
use ringwatch_wire::layout::{comm, head};
use ringwatch_wire::sync::Word;

/// Threads that can be in a group at once; calls of others are taken one by one.
pub(super) const GROUPS: usize = 128;
pub(super) const WORDS: usize = 5;

/// 0: free.
const TAG: usize = 0;
/// How many calls, and the last one: its ticket plus one. They are followed from there: the first ones are overwritten
/// first where a group outlives the ring.
const COUNT: usize = 1;
const LAST: usize = 2;
/// First communicator that is being made, and first that was called, index plus one.
const COMMS: usize = 3;
const CALLED: usize = 4;

/// The thread's group, made if it has none.
fn record(calls: &Calls) -> Option<&'static [Word; WORDS]> {
    let thread = Thread::get();
    if let Some(r) = known(calls, thread) {
        return Some(r);
    }
    let tag = ((calls.page.tags.add(1) as u32) | 1 << 31) as u64;
    let (i, r) = calls
        .page
        .groups
        .iter()
        .enumerate()
        .find(|(_, r)| r.get(TAG).is_some_and(|w| w.get() == 0 && w.replace(0, tag)))?;
    for word in [COUNT, LAST, COMMS, CALLED] {
        set(r, word, 0);
    }
    Thread { group: i as u16 + 1, tag: tag as u32, ..thread }.set();
    Some(r)
}

fn known(calls: &Calls, thread: Thread) -> Option<&'static [Word; WORDS]> {
    let r = calls.page.groups.get(usize::from(thread.group.checked_sub(1)?))?;
    if get(r, TAG) == u64::from(thread.tag) { Some(r) } else { None }
}

/// Keeps a call for the end of the group; false where that is not possible.
pub(super) fn add(t: &Taken, call: &Op) -> bool {
    let (calls, e) = (&t.calls, t.entry);
    let Some(r) = record(calls) else { return false };
    let Some([before, place]) = calls.page.chain.get(t.op as usize % super::OPS) else { return false };
    let tag = get(r, TAG);
    if get(e, entry::GROUP) != tag {
        set(e, entry::GROUP, tag);
        set(e, entry::STREAM, call.stream as u64);
        set(e, entry::WAITING, 0);
        set(e, entry::NEXT_CALLED, get(r, CALLED));
        set(r, CALLED, calls.index(t.comm) as u64 + 1);
    }
    // Behind the slot's own change of hands, see `ops`.
    before.set_last(get(r, LAST));
    place.set_last(order(t, call, e.get(entry::WAITING)));
    set(r, LAST, t.op + 1);
    set(r, COUNT, get(r, COUNT) + 1);
    true
}

/// Keeps a communicator that is being made for the end of the group.
pub(super) fn add_comm(calls: &Calls, ticket: u64) -> bool {
    let (Some(r), Some(e)) = (record(calls), calls.entry(ticket)) else { return false };
    set(e, entry::NEXT, get(r, COMMS));
    set(r, COMMS, calls.index(ticket) as u64 + 1);
    true
}

/// A number for what is launched together; 0 where NCCL gives them.
pub(super) fn plan(calls: &Calls, mode: Mode) -> u64 {
    if mode == Mode::Alone { calls.live.segment.add(head::NEXT_PLAN, 1) + 1 } else { 0 }
}

/// Begins a group.
pub fn group_start(real: impl FnOnce() -> c_int) -> c_int {
    let thread = Thread::get();
    if thread.inside {
        return real();
    }
    let result = inside(thread, real);
    if result == super::SUCCESS {
        Thread { depth: thread.depth.saturating_add(1), ..thread }.set();
    }
    result
}

/// Ends a group; `launches` is false where it is only simulated.
pub fn group_end(launches: bool, real: impl FnOnce() -> c_int) -> c_int {
    let thread = Thread::get();
    if thread.inside {
        return real();
    }
    if thread.depth != 1 {
        let result = inside(thread, real);
        Thread { depth: thread.depth.saturating_sub(1), ..thread }.set();
        return result;
    }
    let group = Calls::get().and_then(|calls| Some((calls, known(&calls, thread)?)));
    if let Some((calls, r)) = group
        && launches
    {
        launch(&calls, r);
    }
    let result = inside(thread, real);
    Thread::default().set();
    if let Some((calls, r)) = group {
        finish(&calls, r, launches, result);
    }
    if thread.agrees { exchange::end_of_group(launches, result) } else { result }
}

/// The calls of a group that are still there, the last one first, each with its order.
fn ops<'a>(calls: &'a Calls, r: &'a [Word]) -> impl Iterator<Item = (u64, u64)> + 'a {
    let mut next = get(r, LAST);
    (0..get(r, COUNT)).map_while(move |_| {
        let ticket = next.checked_sub(1)?;
        let [before, order] = calls.page.chain.get(ticket as usize % super::OPS)?;
        let found = (before.get_first(), order.get_first());
        // Looked at afterwards: who has taken the slot may have written there as well.
        calls.live.segment.op.held(ticket)?;
        next = found.0;
        Some((ticket, found.1))
    })
}

/// The communicators that were called in a group.
fn called<'a>(calls: &'a Calls, r: &[Word]) -> impl Iterator<Item = &'static [Word; entry::WORDS]> + 'a {
    let mut next = get(r, CALLED);
    (0..super::COMMS).map_while(move |_| {
        let e = calls.page.comms.get(next.checked_sub(1)? as usize)?;
        next = get(e, entry::NEXT_CALLED);
        Some(e)
    })
}

/// The group is about to be launched: on each communicator's stream, if it is to be timed.
fn launch(calls: &Calls, r: &'static [Word; WORDS]) {
    for e in called(calls, r) {
        set(e, entry::SHOT, super::begin_shot(calls, e, get(e, entry::STREAM)));
    }
}

fn finish(calls: &Calls, r: &'static [Word; WORDS], launches: bool, result: c_int) {
    let now = now_ns();
    let issues = launches && accepted(result);
    for e in called(calls, r) {
        if launches {
            super::end_shot(calls, e, result);
        }
        // Of what is not issued the orders are given again.
        let waiting = get(e, entry::WAITING);
        set(e, entry::WAITING, 0);
        set(e, entry::GROUP, 0);
        if issues && let Some(slot) = calls.live.segment.comm.held(get(e, entry::TICKET).wrapping_sub(1)) {
            slot.get(comm::ISSUED).map(|w| w.add(waiting));
        }
    }
    let count = get(r, COUNT);
    let plan = if issues && count > 0 { plan(calls, Mode::Alone) } else { 0 };
    let mut there = 0;
    for (ticket, order) in ops(calls, r) {
        there += 1;
        if issues {
            ended(calls, ticket, order, plan, now);
            continue;
        }
        super::take_back(calls, ticket, order);
        if !accepted(result) {
            returned(calls.live, ticket, result, now);
        }
    }
    if issues {
        calls.live.segment.add(head::FLAWS + Flaw::Overwritten as usize, count.saturating_sub(there));
    }
    let mut comm = get(r, COMMS);
    for _ in 0..super::COMMS {
        let Some(e) = comm.checked_sub(1).and_then(|i| calls.page.comms.get(i as usize)) else { break };
        comm = get(e, entry::NEXT);
        comms::ended(calls, get(e, entry::TICKET).wrapping_sub(1), result);
    }
    set(r, TAG, 0);
}
