//! How an operation's GPU time is measured: what a call leaves for its launch, a launch for what is issued behind it,
//! and what the governor is asked on the way.

use crate::bare::{self, HANDLES};
use crate::event::Api;
use crate::events::{Binding, Shot, told};
use crate::governor::{AFTER_PAUSE, BARE, HINT_BITS, LARGE, LARGE_BYTES, PAUSE_NS, TOGETHER};
use crate::handle::{Handle, Kind, group};
use crate::record::Comm;
use crate::state::Live;
use ringwatch_wire::codes::{Loss, timed};
use ringwatch_wire::layout::{comm, op};

/// What the parent of an issued operation says about it.
pub(crate) enum Origin {
    /// It was called and not yet issued: the same operation moves on.
    Called(u64),
    /// A graph replay of a captured call; with kernel events or without.
    Replay { ticket: u64, kernel: bool },
    /// No call is known.
    Unknown,
}

/// Bytes of an element, by code of its type.
const TYPE_BYTES: [u64; 16] = [1, 1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1, 1, 1, 1];

/// Bytes of so many elements of a type.
#[inline]
pub(crate) fn bytes_of(dtype: u8, count: u64) -> u64 {
    count.saturating_mul(TYPE_BYTES.get(usize::from(dtype)).map_or(1, |b| *b))
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
    let why = why | hint(collective && in_group == 0, BARE);
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

/// What was called and not launched never will be, or was launched untold: NCCL tells of no launch of symmetric kernels,
/// copy engines and some broadcasts.
#[cold]
fn forget_calls(c: &Comm) {
    c.set(comm::LAUNCHED, c.word(comm::CALLED));
    c.set(comm::SHOT, 0);
}

/// A kernel is about to be launched for what was called: times it by CUDA events if it is to be.
pub(crate) fn launch(live: &'static Live, c: Comm, parent: u64, stream: u64) -> Option<Shot> {
    let group = match Handle::unpack(parent, live.nonce) {
        Ok(Handle { kind: Kind::Group, value }) => value,
        // NCCL got no handle of its group, which is a bare call's if it has no record.
        Err(Loss::Null) => {
            let context = Handle { kind: Kind::Comm, value: c.ticket }.pack(live.nonce);
            bare::group_of_launch(live, context).unwrap_or(group::BARE)
        }
        _ => return None,
    };
    launching(live, c, group & (group::CAPTURED | group::KERNEL) == 0, stream)
}

/// The same, for a launch that NCCL does not tell of.
#[inline(never)]
pub(crate) fn launch_of_call(live: &'static Live, c: Comm, stream: u64) -> Option<Shot> {
    launching(live, c, true, stream)
}

/// `free` is false where events must not be used.
#[inline(always)]
fn launching(live: &'static Live, c: Comm, free: bool, stream: u64) -> Option<Shot> {
    let (called, launched) = (c.word(comm::CALLED), c.word(comm::LAUNCHED));
    c.set(comm::LAUNCHED, called);
    c.set(comm::SHOT, 0);
    if !free {
        return None;
    }
    // The time of the last call is time enough.
    let now = c.word(comm::CALLED_NS);
    live.events.look(live, c.ticket, now);
    // A second launch of one group carries calls that cannot be told from the first one's.
    if called == launched || !live.governor.wants(&c, c.word(comm::ISSUED)) {
        return None;
    }
    // The time of a launch that carries several operations is none of theirs.
    if c.word(comm::HINT) & TOGETHER != 0 {
        c.set(comm::SHOT, launched << Shot::NUMBER_BITS | Shot::NO_NUMBER);
        return None;
    }
    if !live.governor.launch(&c, c.word(comm::ISSUED), now) {
        return None;
    }
    let shot = live.events.begin(live, c.ticket, stream, now)?;
    c.set(comm::SHOT, launched << Shot::NUMBER_BITS | shot.number());
    Some(shot)
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
            if shot != 0 && t + 1 > shot >> Shot::NUMBER_BITS && t < c.word(comm::LAUNCHED) {
                return shot_for(live, shot & SHOT_NUMBER, ticket);
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

const SHOT_NUMBER: u64 = (1 << Shot::NUMBER_BITS) - 1;

#[inline(never)]
fn shot_for(live: &'static Live, number: u64, ticket: u64) -> u64 {
    if number == Shot::NO_NUMBER {
        return u64::from(timed::NOT_ALONE);
    }
    match Shot::from_number(number).map(|shot| live.events.bind(shot, ticket)) {
        Some(Binding::Bound) => told(number),
        Some(Binding::Shared) => u64::from(timed::NOT_ALONE),
        Some(Binding::Late) | None => u64::from(timed::NOT_FREE),
    }
}
