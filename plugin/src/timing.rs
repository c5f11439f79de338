//! How an operation's GPU time is measured: what a call leaves for its launch, a launch for what is issued behind it,
//! and what the governor is asked on the way.

use crate::communicator::Comm;
use crate::event::Api;
use crate::event_pairs::{Binding, EventPair, told};
use crate::gate::HANDLES;
use crate::governor::{AFTER_PAUSE, COLLECTIVE, HINT_BITS, LARGE, LARGE_BYTES, PAUSE_NS, TOGETHER, WHOLE};
use crate::handle::group;
use crate::live::{self, Live};
use crate::runtime::names::BROADCAST;
use ringwatch_wire::codes::timed;
use ringwatch_wire::layout::{comm, op};

/// The origin of an issued operation, as its parent shows it.
pub(crate) enum Origin {
    /// It was called and not yet issued: the same operation moves on.
    Called(u64),
    /// A graph replay of a captured call; with kernel events or without.
    Replay { ticket: u64, kernel: bool },
    /// No call is known.
    Unknown,
}

/// The first NCCL that brings kernel events on a thread of its own, as a version code.
const PROFILER_THREAD: u32 = 23_100;

/// Notes that a call is captured into a graph.
#[inline(always)]
pub(crate) fn note_capture(live: &Live, c: &Comm, ticket: u64, api: &Api) {
    if api.captured {
        live.governor.captured();
        // Up to NCCL 2.30 a host callback issues only what has work for the proxy, which is seen by itself. Orders of pairs
        // are counted without a lock while no other thread may issue the same pair's.
        if !api.collective || !(1..PROFILER_THREAD).contains(&live.nccl) {
            live.bare.block(HANDLES);
        }
        if c.word(comm::CAPTURING) == 0 {
            c.set(comm::CAPTURING, ticket + 1);
        }
    }
}

/// Notes what the timing of a call's launch rests on. `in_group` is the number of the call's group, 0 where it is bare or
/// there is none. False where another one of the group was called before.
#[inline(always)]
pub(crate) fn note_call(
    live: &Live,
    c: &Comm,
    ticket: u64,
    now: u64,
    bytes: u64,
    in_group: u64,
    collective: bool,
) -> bool {
    let pause = now.saturating_sub(c.word(comm::CALLED_NS)) > PAUSE_NS;
    let large = bytes >= LARGE_BYTES;
    // Another one of the same group was called since the last launch: it will be launched with this one.
    let together =
        c.word(comm::CALLED) != c.word(comm::LAUNCHED) && c.word(comm::HINT) >> HINT_BITS == in_group;
    let hint = |set, bit| if set { bit } else { 0 };
    let why = hint(pause, AFTER_PAUSE) | hint(large, LARGE) | hint(together, TOGETHER);
    // The group has a collective.
    let collective = collective || together && c.word(comm::HINT) & COLLECTIVE != 0;
    let whole = together && !collective && live.governor.times_regularly_by_events();
    let why = why | hint(collective, COLLECTIVE) | hint(whole, WHOLE);
    c.set(comm::HINT, why | in_group << HINT_BITS);
    c.set(comm::CALLED_NS, now);
    c.set(comm::CALLED, ticket + 1);
    !together
}

/// A bare call begins.
#[inline(always)]
pub(crate) fn begin_bare(c: &Comm) {
    if c.word(comm::CALLED) != c.word(comm::LAUNCHED) {
        forget_calls(c);
    }
}

/// Forgets calls that were not launched: they never will be, or were launched untold. NCCL reports no launch of
/// symmetric kernels, copy engines and some broadcasts.
#[cold]
fn forget_calls(c: &Comm) {
    c.set(comm::LAUNCHED, c.word(comm::CALLED));
    c.set(comm::SHOT, 0);
}

/// A kernel is about to be launched for what was called: times it by CUDA events if it is to be. `group` is the value of its
/// group's handle.
pub(crate) fn launch(live: &'static Live, c: Comm, group: u64, stream: u64) -> Option<EventPair> {
    launching(live, c, group & (group::CAPTURED | group::KERNEL) == 0, stream)
}

/// The same, for a launch that NCCL does not tell of.
#[inline(never)]
pub(crate) fn launch_of_call(live: &'static Live, c: Comm, stream: u64) -> Option<EventPair> {
    launching(live, c, true, stream)
}

/// `free` is false where events must not be used.
#[inline(always)]
fn launching(live: &'static Live, c: Comm, free: bool, stream: u64) -> Option<EventPair> {
    let (called, launched) = (c.word(comm::CALLED), c.word(comm::LAUNCHED));
    c.set(comm::LAUNCHED, called);
    c.set(comm::SHOT, 0);
    if !free {
        return None;
    }
    // The time of the last call is time enough.
    let now = c.word(comm::CALLED_NS);
    live.events.look(&live.segment, c.ticket, now);
    // A second launch of one group carries calls that cannot be told from the first one's.
    if called == launched || !live.governor.wants(&c, c.word(comm::ISSUED)) {
        return None;
    }
    let carries = c.word(comm::HINT) & (TOGETHER | WHOLE);
    // The time of a launch that carries several operations is none of theirs.
    if carries == TOGETHER {
        c.set(comm::SHOT, launched << LAUNCHED_SHIFT | SEVERAL);
        return None;
    }
    if !live.governor.launch(&c, c.word(comm::ISSUED), now) {
        return None;
    }
    let Some(pair) = live.events.begin(&live.segment, c.ticket, stream, now) else {
        c.set(comm::SHOT, launched << LAUNCHED_SHIFT | NO_PAIR);
        return None;
    };
    let as_a_whole = if carries == 0 { 0 } else { AS_A_WHOLE };
    c.set(comm::SHOT, launched << LAUNCHED_SHIFT | as_a_whole | pair.number());
    Some(pair)
}

/// How an operation is timed that is issued now, as the word [`op::TIMED`].
#[inline(always)]
pub(crate) fn of_issue(live: &'static Live, c: Comm, origin: &Origin, ticket: u64) -> u64 {
    match *origin {
        Origin::Called(t) => {
            if live
                .segment
                .op
                .held(t)
                .is_some_and(|s| s.get(op::TIMED).is_some_and(|w| w.get() == u64::from(timed::KERNEL)))
            {
                return u64::from(timed::KERNEL);
            }
            let shot = c.word(comm::SHOT);
            // Called after the launch before, and not after this one.
            if shot != 0 && t + 1 > shot >> LAUNCHED_SHIFT && t < c.word(comm::LAUNCHED) {
                return pair_for(live, shot, ticket);
            }
            u64::from(live.governor.why_not(false))
        }
        Origin::Replay { kernel: true, .. } => u64::from(timed::KERNEL),
        Origin::Replay { .. } => u64::from(live.governor.why_not(true)),
        // Before ABI v5 there are no calls.
        Origin::Unknown if live.governor.kernel_on() => u64::from(timed::KERNEL),
        Origin::Unknown => u64::from(live.governor.why_not(false)),
    }
}

/// How a call is timed that nobody but itself issues.
pub(crate) fn of_call(live: &'static Live, c: Comm, ticket: u64) -> u64 {
    of_issue(live, c, &Origin::Called(ticket), ticket)
}

/// Bits of the word [`comm::SHOT`]: the number of the pair, whether it times the launch as a whole, and above that what the
/// word [`comm::LAUNCHED`] was.
const PAIR_NUMBER: u64 = (1 << EventPair::NUMBER_BITS) - 1;
const AS_A_WHOLE: u64 = 1 << EventPair::NUMBER_BITS;
const LAUNCHED_SHIFT: u32 = EventPair::NUMBER_BITS + 1;
/// In their place: the launch carries several operations and has no pair; or none was free.
const SEVERAL: u64 = EventPair::NO_NUMBER;
const NO_PAIR: u64 = EventPair::NO_NUMBER | AS_A_WHOLE;

#[inline(never)]
fn pair_for(live: &'static Live, shot: u64, ticket: u64) -> u64 {
    let (number, as_a_whole) = (shot & PAIR_NUMBER, shot & AS_A_WHOLE != 0);
    if number == EventPair::NO_NUMBER {
        return u64::from(if as_a_whole { timed::NOT_FREE } else { timed::NOT_ALONE });
    }
    match EventPair::from_number(number).map(|pair| live.events.bind(pair, ticket, as_a_whole)) {
        Some(Binding::Bound) => told(number, as_a_whole),
        Some(Binding::Shared) => u64::from(timed::NOT_ALONE),
        Some(Binding::Late) | None => u64::from(timed::NOT_FREE),
    }
}

/// NCCL 2.29 and 2.30 count broadcasts on the GPU alone.
const UNCOUNTED_BROADCASTS: core::ops::Range<u32> = 22_900..23_100;

/// A broadcast is called that is in a line.
#[cold]
pub(crate) fn broadcast_in_line() {
    if let Some(live) = live::live_alone() {
        note_broadcast(live, BROADCAST, false);
    }
}

/// Notes that a broadcast is called.
#[inline(always)]
pub(crate) fn note_broadcast(live: &Live, func: u8, is_bare: bool) {
    if func == BROADCAST {
        stop_at_broadcast(live, is_bare);
    }
}

#[cold]
fn stop_at_broadcast(live: &Live, is_bare: bool) {
    if !UNCOUNTED_BROADCASTS.contains(&live.nccl) {
        return;
    }
    // Nothing else is called with it.
    if is_bare {
        live.governor.group_was_called();
    }
    live.governor.stop_switching();
}
