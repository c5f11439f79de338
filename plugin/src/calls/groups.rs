//! Groups: what was called in one is issued, and what was begun in one is made, when the outermost has ended.

use super::thread::Thread;
use super::{Calls, Mode, accepted, comms, ended, entry, get, inside, returned, set};
use crate::clock::now_ns;
use core::ffi::c_int;
use ringwatch_wire::layout::{head, op as layout};
use ringwatch_wire::sync::Word;

/// Threads that can be in a group at once; calls of others are taken one by one.
pub(super) const GROUPS: usize = 128;
pub(super) const WORDS: usize = 4;

/// 0: free.
const TAG: usize = 0;
/// First and last call, tickets plus one; first communicator that is being made, index plus one.
const FIRST: usize = 1;
const LAST: usize = 2;
const COMMS: usize = 3;

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
    for word in [FIRST, LAST, COMMS] {
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
pub(super) fn add(calls: &Calls, ticket: u64) -> bool {
    let Some(r) = record(calls) else { return false };
    let next = |t: u64| calls.page.chain.get(t as usize % super::OPS);
    if let Some(w) = next(ticket) {
        w.set(0);
    }
    match get(r, LAST).checked_sub(1).and_then(next) {
        Some(last) => last.set(ticket + 1),
        None => set(r, FIRST, ticket + 1),
    }
    set(r, LAST, ticket + 1);
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
    result
}

/// The calls of a group, as many as there are slots at most: a chain that was overwritten cannot be followed for
/// ever.
fn ops<'a>(calls: &'a Calls, r: &[Word]) -> impl Iterator<Item = u64> + 'a {
    let mut next = get(r, FIRST);
    (0..super::OPS).map_while(move |_| {
        let ticket = next.checked_sub(1)?;
        next = get(&calls.page.chain, ticket as usize % super::OPS);
        Some(ticket)
    })
}

/// The communicators of a group's calls, each with the first of its calls. `mark` is a number of this walk's own.
fn comms_of<'a>(
    calls: &'a Calls,
    r: &'a [Word],
    mark: u64,
) -> impl Iterator<Item = (&'static [Word], u64)> + 'a {
    ops(calls, r).filter_map(move |op| {
        let slot = calls.live.segment.op.held(op)?;
        let e = calls.page.comms.get(calls.index(get(slot, layout::WHAT) & 0xffff))?;
        if get(e, entry::MARK) == mark {
            return None;
        }
        set(e, entry::MARK, mark);
        Some((&e[..], op))
    })
}

/// A number for a walk over a group's communicators.
fn mark(r: &[Word], walk: u64) -> u64 {
    get(r, TAG) << 2 | walk
}

/// The group is about to be launched: on each communicator's stream, if it is to be timed.
fn launch(calls: &Calls, r: &'static [Word; WORDS]) {
    for (e, op) in comms_of(calls, r, mark(r, 1)) {
        let stream = calls.live.segment.op.held(op).map_or(0, |s| get(s, layout::STREAM));
        set(e, entry::SHOT, super::begin_shot(calls, e, stream));
    }
}

fn finish(calls: &Calls, r: &'static [Word; WORDS], launches: bool, result: c_int) {
    let now = now_ns();
    if launches {
        for (e, _) in comms_of(calls, r, mark(r, 2)) {
            super::end_shot(calls, e, result);
        }
    }
    let plan = if launches && get(r, FIRST) != 0 { plan(calls, Mode::Alone) } else { 0 };
    for ticket in ops(calls, r) {
        if !accepted(result) {
            returned(calls.live, ticket, result, now);
        } else if launches {
            ended(calls, ticket, plan, now);
        }
    }
    let mut comm = get(r, COMMS);
    for _ in 0..super::COMMS {
        let Some(e) = comm.checked_sub(1).and_then(|i| calls.page.comms.get(i as usize)) else { break };
        comm = get(e, entry::NEXT);
        comms::ended(calls, get(e, entry::TICKET).wrapping_sub(1), result);
    }
    set(r, TAG, 0);
}
