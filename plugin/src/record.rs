//! Events into the segment.
//!
//! A call's life: `CollApi` makes an operation in the state "called"; `Coll` issues that same operation
//! (or, for a graph replay or an ABI without calls, a new one); `KernelCh` and `ProxyOp` name it as parent
//! and keep their own slots, since a kernel's stamps may be wrong channel by channel and are judged later.

mod called;
mod groups;
mod issues;
mod kernels;
mod operation;

use crate::communicator::{self, Comm};
use crate::event::{Body, Event, StateArg, bit, state};
use crate::event_pairs::EventPair;
use crate::governor::COLLECTIVE;
use crate::handle::{Handle, Kind, VALUE_MASK, group, ticket_of};
use crate::live::Live;
use crate::network;
use crate::runtime::clock::now_ns;
use crate::slot_ref::SlotRef;
use called::called;
use groups::{begin_group, begin_told_group, end_group, group_end_called, launched};
use issues::{issued, paired};
use kernels::{kernel, kernel_stop};
use ringwatch_wire::codes::{Loss, phase};
use ringwatch_wire::layout::{comm, head, proxy};
use ringwatch_wire::sync::Word;

/// A started event.
#[derive(Debug, Clone, Copy)]
pub struct Started {
    /// The handle for NCCL.
    pub handle: u64,
    /// It is to be booked. Events that another counter of the segment tells, or that carry nothing, are not.
    pub booked: bool,
}

impl Started {
    const fn booked(handle: u64) -> Self {
        Started { handle, booked: true }
    }

    const fn quiet(handle: u64) -> Self {
        Started { handle, booked: false }
    }
}

/// The content of a stop or a state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Carried {
    /// Something that was recorded.
    Something,
    /// Nothing: NCCL says it for the sake of order.
    Nothing,
}

/// Records a started event and returns its handle.
///
/// # Errors
/// The reason why nothing was recorded; the handle is then NULL.
#[inline(always)]
pub fn start(live: &'static Live, context: u64, event: &Event) -> Result<Started, Loss> {
    let pack = |kind, value| Handle { kind, value }.pack(live.nonce);
    match &event.body {
        Body::Group => {
            // Its number counts it. That of sends and receives names its communicator, whose launches of them it counts.
            let plan = match comm_of(live, context) {
                Ok(c) if c.word(comm::HINT) & COLLECTIVE == 0 => {
                    (c.ticket & 0xffff) << PLAN_BITS | c.add(comm::PLANS, 1) & PLAN_MASK
                }
                _ => NO_COMM_PLAN | live.segment.add(head::NEXT_PLAN, 1) & PLAN_MASK,
            };
            Ok(Started::quiet(pack(Kind::Plan, plan)))
        }
        Body::GroupApi { depth, captured } => {
            let value = begin_told_group(live, context, *depth, *captured)?;
            Ok(Started::quiet(pack(Kind::Group, value)))
        }
        Body::Api(api) => {
            let c = comm_of(live, context)?;
            let (group, ticket) = called(live, c, event.parent, api)?;
            c.book(&live.segment, comm::CALLS, if api.collective { 1 } else { 1 << 32 });
            Ok(Started::quiet(if api.captured {
                pack(Kind::Captured, ticket & group::TICKET | group & group::KERNEL)
            } else {
                pack(Kind::Called, ticket)
            }))
        }
        Body::Coll(coll) => {
            let c = comm_of(live, context)?;
            let issued = issued(live, c, event.parent, event.rank, coll)?;
            // A copy engine's collective is an event of another type.
            let one = if event.bit == bit::COLL { 1 } else { 0 };
            Ok(issued.started(live, &c, one, |t| pack(Kind::Issued, t)))
        }
        Body::P2p(p2p) => {
            let c = comm_of(live, context)?;
            let issued = paired(live, c, event.parent, event.rank, p2p)?;
            Ok(issued.started(live, &c, 1 << 32, |t| pack(Kind::Issued, t)))
        }
        Body::KernelLaunch { stream } => {
            // Without a pair of events NCCL need not tell the end of the launch.
            let pair = launched(live, comm_of(live, context)?, event.parent, *stream);
            Ok(pair.map_or(Started::quiet(0), |s| Started::booked(pack(Kind::Launch, s.number()))))
        }
        Body::KernelCh { channel, gpu_ns } => {
            // Its number counts it.
            kernel(live, event.parent, *channel, *gpu_ns).map(|t| Started::quiet(pack(Kind::Channel, t)))
        }
        Body::ProxyOp(p) => network::transfer(live, context, event.parent, p)
            .map(|t| Started::booked(pack(Kind::Transfer, t))),
        Body::ProxyStep { step } => {
            let ticket = parent_ticket(live, event.parent, Kind::Transfer)?;
            let step = u64::from(*step as u32) & 7;
            network::step_start(live, ticket, step)?;
            Ok(Started::booked(pack(Kind::Step, ticket << 3 | step)))
        }
        Body::Other => Err(if event.bit <= bit::LAST { Loss::NotRecorded } else { Loss::UnknownType }),
    }
}

/// Records the end of an event.
///
/// # Errors
/// The reason why nothing was recorded.
#[inline]
pub fn stop(live: &'static Live, raw: u64) -> Result<Carried, Loss> {
    let handle = Handle::unpack(raw, live.nonce)?;
    let s = &live.segment;
    match handle.kind {
        // See `handle::has_no_end`.
        Kind::Issued | Kind::Plan | Kind::Called | Kind::Captured => return Ok(Carried::Nothing),
        Kind::Group => return end_group(live, handle.value),
        Kind::Launch => {
            let pair = EventPair::from_number(handle.value).ok_or(Loss::Foreign)?;
            live.events.end(&live.segment, pair);
            Ok(())
        }
        Kind::Channel => kernel_stop(live, handle.value, None),
        Kind::Transfer => SlotRef::of(&s.proxy, handle.value)?.once_since(proxy::STOP, proxy::START_NS),
        Kind::Step => network::step_change(live, handle.value >> 3, handle.value & 7, phase::NONE, 0),
        Kind::Comm | Kind::Chained => Err(Loss::BadParent),
    }
    .map(|()| Carried::Something)
}

/// Records a state of an event.
///
/// # Errors
/// The reason why nothing was recorded.
#[inline]
pub fn state(live: &'static Live, raw: u64, value: i32, arg: Option<StateArg>) -> Result<Carried, Loss> {
    if value == state::KERNEL_STOP && Kind::Channel.is(raw, live.nonce) {
        let stamp = arg.ok_or(Loss::BadCall)?.value;
        // The channel's record shows it.
        return kernel_stop(live, raw & VALUE_MASK, Some(stamp)).map(|()| Carried::Nothing);
    }
    if matches!(value, state::GROUP_START_DONE | state::GROUP_END_CALLED) && Kind::Group.is(raw, live.nonce) {
        if value == state::GROUP_START_DONE {
            return Ok(Carried::Nothing);
        }
        live.governor.group_was_called();
        // A bare call is a group without a record.
        return if raw & group::BARE != 0 { Ok(Carried::Nothing) } else { group_end_called(live, raw) };
    }
    state_of_transfer(live, raw, value, arg)
}

/// States of transfers and their steps, and whatever else may come: apart, so that a kernel's stop saves no registers
/// for them.
#[inline(never)]
fn state_of_transfer(
    live: &'static Live,
    raw: u64,
    value: i32,
    arg: Option<StateArg>,
) -> Result<Carried, Loss> {
    let handle = Handle::unpack(raw, live.nonce)?;
    let s = &live.segment;
    match (handle.kind, value) {
        (Kind::Transfer, state::IN_PROGRESS) => SlotRef::of(&s.proxy, handle.value).map(|_| ()),
        (Kind::Transfer, state::SEND_POSTED..=state::RECV_DONE) => {
            network::transfer_state(live, handle.value, value, arg.ok_or(Loss::BadCall)?)
        }
        (Kind::Step, _) => {
            let bytes = arg.map_or(0, |a| a.value);
            let (to, bytes) = match value {
                state::SEND_GPU_WAIT | state::RECV_GPU_WAIT => (phase::GPU, 0),
                state::SEND_PEER_WAIT => (phase::PEER, 0),
                state::SEND_WAIT => (phase::WIRE, bytes),
                state::RECV_WAIT => (phase::WIRE, 0),
                state::RECV_FLUSH_WAIT => (phase::FLUSH, bytes),
                _ => return Err(Loss::UnknownState),
            };
            network::step_change(live, handle.value >> 3, handle.value & 7, to, bytes)
        }
        _ => Err(Loss::UnknownState),
    }
    .map(|()| Carried::Something)
}

/// Records the end of a communicator.
///
/// # Errors
/// The reason why nothing was recorded.
pub fn finalize(live: &'static Live, context: u64) -> Result<(), Loss> {
    let c = comm_of(live, context)?;
    if end(live, &c) { Ok(()) } else { Err(Loss::Repeated) }
}

/// Numbers of plans: the communicator's ticket, and its own count; or those of collectives, and of no known communicator.
const PLAN_BITS: u32 = 26;
const PLAN_MASK: u64 = (1 << PLAN_BITS) - 1;
const NO_COMM_PLAN: u64 = 1 << 42;

#[inline]
fn word(slot: &[Word], i: usize) -> u64 {
    slot.get(i).map_or(0, Word::get)
}

#[inline]
fn parent_ticket(live: &Live, raw: u64, kind: Kind) -> Result<u64, Loss> {
    ticket_of(raw, kind, live.nonce)
}

#[inline(always)]
fn comm_of(live: &'static Live, context: u64) -> Result<Comm, Loss> {
    communicator::comm_of(&live.segment, live.nonce, context)
}

/// Ends a communicator; false where that was done before. What it holds is given back first: once its slot is free, an
/// init of another one may take it.
pub(crate) fn end(live: &'static Live, c: &Comm) -> bool {
    if c.word(comm::FINALIZED_NS) != 0 {
        return false;
    }
    communicator::settle(&live.segment, c.slot);
    live.pairs.free(c.ticket);
    live.governor.finalized(c);
    if live.governor.events() {
        live.events.read(&live.segment, c.ticket);
    }
    c.slot.get(comm::FINALIZED_NS).is_some_and(|w| w.replace(0, now_ns()))
}
