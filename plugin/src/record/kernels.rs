//! Kernels of operations, a channel each.

use super::parent_ticket;
use crate::handle::Kind;
use crate::live::Live;
use crate::runtime::clock::now_ns;
use crate::slot_ref::SlotRef;
use ringwatch_wire::codes::Loss;
use ringwatch_wire::layout::channel;

const OP_MASK: u64 = (1 << 56) - 1;

#[inline(always)]
pub(super) fn kernel(live: &'static Live, parent: u64, ch: u8, gpu_ns: u64) -> Result<u64, Loss> {
    let parent = parent_ticket(live, parent, Kind::Issued)?;
    let (ticket, slot) = live.segment.channel.claim()?;
    slot.set_all(channel::OP, [parent & OP_MASK | u64::from(ch) << 56, gpu_ns, now_ns(), 0, 0]);
    slot.publish();
    Ok(ticket)
}

#[inline]
pub(super) fn kernel_stop(live: &'static Live, ticket: u64, stamp: Option<u64>) -> Result<(), Loss> {
    let kernel = SlotRef::of(&live.segment.channel, ticket)?;
    // NCCL 2.27 to 2.30 may send the stop of a later operation to a kernel that stopped long ago.
    if kernel.mark(channel::STOP_SEEN).is_some() {
        return Err(Loss::Repeated);
    }
    if let Some(stop) = stamp {
        let start = kernel.word(channel::START_GPU_NS);
        // Stamps further apart than a mark can hold are wrong, and stay so: the reader sees how long it can have taken.
        kernel.put(channel::DURATION, stop.wrapping_sub(start).wrapping_add(channel::BIAS));
    }
    kernel.put(channel::STOP_SEEN, kernel.since(channel::START_SEEN_NS));
    Ok(())
}
