//! Network transfers into the segment: what NCCL's proxy does for an operation, step by step.
//!
//! A transfer's callbacks come from one thread, its process's proxy; marks are changed all the same so that a
//! proxy which slept while its slot was given away cannot touch the next transfer's.

use crate::communicator::comm_of;
use crate::event::{ProxyOp, StateArg, state};
use crate::gate::HANDLES;
use crate::handle::Handle;
use crate::live::Live;
use crate::runtime::clock::now_ns;
use crate::slot_ref::SlotRef;
use ringwatch_wire::codes::{Loss, phase};
use ringwatch_wire::layout::{head, proxy};

pub(crate) fn transfer(live: &'static Live, context: u64, parent: u64, p: &ProxyOp) -> Result<u64, Loss> {
    live.bare.block(HANDLES);
    // PXN: another rank's operation, done by this process. Its context and parent are that process's own
    // numbers; its pid may by chance be ours in another namespace, its nonce is not.
    let own = live.segment.get(head::PID) & 0xffff_ffff;
    let foreign =
        u64::from(p.pid as u32) != own || matches!(Handle::unpack(parent, live.nonce), Err(Loss::Foreign));
    let comm = match comm_of(&live.segment, live.nonce, context) {
        Ok(c) if !foreign => c.ticket & 0xffff,
        _ => proxy::NO_COMM,
    };
    let (ticket, slot) = live.segment.proxy.claim()?;
    for i in 1..proxy::WORDS {
        slot.set(i, 0);
    }
    slot.set(proxy::PARENT, parent);
    slot.set(
        proxy::WHAT,
        comm | u64::from(p.channel) << 16
            | u64::from(p.is_send) << 24
            | u64::from(foreign) << 25
            | u64::from(p.peer as u32) << 32,
    );
    slot.set(proxy::STEPS, u64::from(p.steps as u32) | u64::from(p.chunk as u32) << 32);
    slot.set(proxy::START_NS, now_ns());
    slot.set(proxy::PID, u64::from(p.pid as u32));
    slot.publish();
    Ok(ticket)
}

/// Records states of a whole transfer, as NCCL up to 2.26 tells them: sizes and steps are totals so far.
pub(crate) fn transfer_state(
    live: &'static Live,
    ticket: u64,
    value: i32,
    arg: StateArg,
) -> Result<(), Loss> {
    let transfer = SlotRef::of(&live.segment.proxy, ticket)?;
    let steps = u64::from(u32::try_from(arg.steps).unwrap_or(0));
    match value {
        state::SEND_POSTED | state::RECV_POSTED => transfer.set(proxy::STARTED, steps),
        state::SEND_DONE | state::RECV_DONE => {
            transfer.set(proxy::DONE, steps)?;
            transfer.set(proxy::BYTES, arg.value)
        }
        _ => transfer.set(proxy::BYTES, arg.value),
    }
}

/// Longest time that a live step's word can hold beside its phase: 4.9 hours.
const LIVE_NS_MAX: u64 = (1 << 44) - 1;

pub(crate) fn step_start(live: &'static Live, ticket: u64, step: u64) -> Result<(), Loss> {
    let transfer = SlotRef::of(&live.segment.proxy, ticket)?;
    let at = proxy::LIVE + step as usize;
    let was = transfer.mark(at).unwrap_or(0);
    if was & 0xf != u64::from(phase::NONE) {
        // NCCL starts a receive's step again at every poll until the network takes it: still one step.
        return Ok(());
    }
    let since = transfer.since(proxy::START_NS).min(LIVE_NS_MAX);
    transfer.set(at, since << 4 | u64::from(phase::POSTED))?;
    transfer.add(proxy::STARTED, 1)
}

pub(crate) fn step_change(
    live: &'static Live,
    ticket: u64,
    step: u64,
    to: u8,
    bytes: u64,
) -> Result<(), Loss> {
    let transfer = SlotRef::of(&live.segment.proxy, ticket)?;
    let at = proxy::LIVE + step as usize;
    let was = transfer.mark(at).unwrap_or(0);
    let from = (was & 0xf) as u8;
    if from == phase::NONE {
        return Err(Loss::Repeated);
    }
    let since = transfer.since(proxy::START_NS).min(LIVE_NS_MAX);
    let waited = since.saturating_sub(was >> 4);
    let cause = match from {
        phase::GPU => Some(0),
        phase::PEER => Some(1),
        phase::WIRE => Some(2),
        phase::FLUSH => Some(3),
        _ => None,
    };
    if let Some(i) = cause {
        transfer.add(proxy::WAITED + i, waited)?;
    }
    if bytes > 0 && from != to {
        transfer.add(proxy::BYTES, bytes)?;
    }
    if to == phase::NONE {
        transfer.add(proxy::DONE, 1)?;
        transfer.set(at, 0)
    } else {
        transfer.set(at, since << 4 | u64::from(to))
    }
}
