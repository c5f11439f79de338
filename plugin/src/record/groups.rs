//! Outermost groups of calls.

use super::{Carried, comm_of};
use crate::bare;
use crate::communicator::Comm;
use crate::event_pairs::EventPair;
use crate::handle::{Handle, Kind, group};
use crate::live::Live;
use crate::runtime::clock::now_ns;
use crate::runtime::prefetch;
use crate::slot_ref::SlotRef;
use crate::timing;
use ringwatch_wire::codes::Loss;
use ringwatch_wire::layout::{comm, group as layout};

/// An outermost group begins, and NCCL will tell its end.
#[inline(always)]
pub(super) fn begin_told_group(
    live: &'static Live,
    context: u64,
    depth: i32,
    captured: bool,
) -> Result<u64, Loss> {
    // First of all: NCCL has looked at its mask a moment ago.
    live.governor.group_begins();
    let begun = begin_group(live, context, depth, captured);
    if begun.is_err() {
        // Without a handle no end is told.
        live.governor.group_was_called();
    }
    begun
}

/// An outermost group begins. A bare call is a group of its own and gets no record: its value says all there is.
#[inline]
pub(crate) fn begin_group(
    live: &'static Live,
    context: u64,
    depth: i32,
    captured: bool,
) -> Result<u64, Loss> {
    let ring = &live.segment.op;
    prefetch::for_writing(ring.slot(ring.next()));
    let comm = comm_of(live, context)?;
    let mut value = if live.governor.kernel_on() { group::KERNEL } else { 0 };
    if captured {
        value |= group::CAPTURED;
    }
    if depth <= 1 {
        timing::begin_bare(&comm);
        return Ok(value | group::BARE | comm.ticket & group::TICKET);
    }
    let (ticket, slot) = live.segment.group.claim()?;
    let depth = depth.clamp(0, 0xffff) as u64;
    slot.set(layout::WHAT, comm.ticket & 0xffff | depth << 16 | u64::from(captured) << 32);
    slot.set(layout::START_NS, now_ns());
    for i in [layout::END_CALLED, layout::LAUNCH_START, layout::LAUNCH_STOP, layout::STOP] {
        slot.set(i, 0);
    }
    slot.publish();
    Ok(value | ticket & group::TICKET)
}

/// A kernel is about to be launched.
pub(super) fn launched(live: &'static Live, c: Comm, parent: u64, stream: u64) -> Option<EventPair> {
    let group = match Handle::unpack(parent, live.nonce) {
        Ok(Handle { kind: Kind::Group, value }) => value,
        // NCCL got no handle of its group, which is a bare call's if it has no record.
        Err(Loss::Null) => {
            let context = Handle { kind: Kind::Comm, value: c.ticket }.pack(live.nonce);
            bare::group_of_launch(live, context).unwrap_or(group::BARE)
        }
        _ => return None,
    };
    timing::launch(live, c, group, stream)
}

#[inline(never)]
pub(super) fn group_end_called(live: &'static Live, raw: u64) -> Result<Carried, Loss> {
    let group = SlotRef::of(&live.segment.group, raw & group::TICKET)?;
    group.once_since(layout::END_CALLED, layout::START_NS).map(|()| Carried::Something)
}

#[inline]
pub(super) fn end_group(live: &'static Live, value: u64) -> Result<Carried, Loss> {
    if value & group::BARE != 0 {
        if value & group::CAPTURED != 0
            && let Some(slot) = live.segment.comm.held(value & group::TICKET)
        {
            Comm::new(value & group::TICKET, slot).set(comm::CAPTURING, 0);
        }
        return Ok(Carried::Nothing);
    }
    if value & group::CAPTURED != 0 {
        end_capture(live);
    }
    // Where the end of its calls was not told.
    live.governor.group_was_called();
    SlotRef::of(&live.segment.group, value & group::TICKET)?.once_since(layout::STOP, layout::START_NS)?;
    Ok(Carried::Something)
}

/// A captured group of several calls has ended, which may be of several communicators: what comes of them from now on is
/// replayed.
#[cold]
fn end_capture(live: &'static Live) {
    let ring = &live.segment.comm;
    for i in 0..ring.slots() {
        if let Some(note) = ring.slot(i).and_then(|s| s.get(comm::CAPTURING)) {
            note.set(0);
        }
    }
}
