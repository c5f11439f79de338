//! The calls that begin and end groups: what was called in one is issued, and what was begun in one is made, when the outermost
//! has ended.

use super::groups::{COMMS, COUNT, TAG, called, known, launch, ops, plan};
use super::{SUCCESS, accepted, comms, end_pair, ended, exchange, inside, returned, take_back};
use crate::preloaded::{COMMS as MOST_COMMS, Calls, GROUP_WORDS, Mode, entry, get, set};
use crate::runtime::clock::now_ns;
use crate::runtime::thread_word::Thread;
use core::ffi::c_int;
use ringwatch_wire::codes::Flaw;
use ringwatch_wire::layout::{comm, head};
use ringwatch_wire::sync::Word;

/// Begins a group.
pub fn group_start(real: impl FnOnce() -> c_int) -> c_int {
    let thread = Thread::get();
    if thread.inside {
        return real();
    }
    let result = inside(thread, real);
    if result == SUCCESS {
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

/// Issues or takes back what was called in a group, and ends what makes its communicators.
fn finish(calls: &Calls, r: &'static [Word; GROUP_WORDS], launches: bool, result: c_int) {
    let now = now_ns();
    let issues = launches && accepted(result);
    for e in called(calls, r) {
        if launches {
            end_pair(calls, e, result);
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
        take_back(calls, ticket, order);
        if !accepted(result) {
            returned(calls.live, ticket, result, now);
        }
    }
    if issues {
        calls.live.segment.add(head::FLAWS + Flaw::Overwritten as usize, count.saturating_sub(there));
    }
    let mut comm = get(r, COMMS);
    for _ in 0..MOST_COMMS {
        let Some(e) = comm.checked_sub(1).and_then(|i| calls.page.comms.get(i as usize)) else { break };
        comm = get(e, entry::NEXT);
        comms::ended(calls, get(e, entry::TICKET).wrapping_sub(1), result);
    }
    set(r, TAG, 0);
}
