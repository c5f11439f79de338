//! The calls and the new communicators of a group, until it ends.

use super::{Op, Taken, order};
use crate::preloaded::{COMMS as MOST_COMMS, Calls, GROUP_WORDS as WORDS, Mode, OPS, entry, get, set};
use crate::runtime::thread_word::Thread;
use ringwatch_wire::layout::head;
use ringwatch_wire::sync::Word;

/// 0: free.
pub(super) const TAG: usize = 0;
/// How many calls, and the last one: its ticket plus one. They are followed from there: the first ones are overwritten
/// first where a group outlives the ring.
pub(super) const COUNT: usize = 1;
const LAST: usize = 2;
/// First communicator that is being made, and first that was called, index plus one.
pub(super) const COMMS: usize = 3;
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

pub(super) fn known(calls: &Calls, thread: Thread) -> Option<&'static [Word; WORDS]> {
    let r = calls.page.groups.get(usize::from(thread.group.checked_sub(1)?))?;
    if get(r, TAG) == u64::from(thread.tag) { Some(r) } else { None }
}

/// Keeps a call for the end of the group; false where that is not possible.
pub(super) fn add(t: &Taken, call: &Op) -> bool {
    let (calls, e) = (&t.calls, t.entry);
    let Some(r) = record(calls) else { return false };
    let Some([before, place]) = calls.page.chain.get(t.op as usize % OPS) else { return false };
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

/// The calls of a group that are still there, the last one first, each with its order.
pub(super) fn ops<'a>(calls: &'a Calls, r: &'a [Word]) -> impl Iterator<Item = (u64, u64)> + 'a {
    let mut next = get(r, LAST);
    (0..get(r, COUNT)).map_while(move |_| {
        let ticket = next.checked_sub(1)?;
        let [before, order] = calls.page.chain.get(ticket as usize % OPS)?;
        let found = (before.get_first(), order.get_first());
        // Looked at afterwards: who has taken the slot may have written there as well.
        calls.live.segment.op.held(ticket)?;
        next = found.0;
        Some((ticket, found.1))
    })
}

/// The communicators that were called in a group.
pub(super) fn called<'a>(
    calls: &'a Calls,
    r: &[Word],
) -> impl Iterator<Item = &'static [Word; entry::WORDS]> + 'a {
    let mut next = get(r, CALLED);
    (0..MOST_COMMS).map_while(move |_| {
        let e = calls.page.comms.get(next.checked_sub(1)? as usize)?;
        next = get(e, entry::NEXT_CALLED);
        Some(e)
    })
}

/// The group is about to be launched: on each communicator's stream, if it is to be timed.
pub(super) fn launch(calls: &Calls, r: &'static [Word; WORDS]) {
    for e in called(calls, r) {
        set(e, entry::SHOT, super::begin_pair(calls, e, get(e, entry::STREAM)));
    }
}
