//! What each rank of an operation that is over should have moved, and when.

use super::attribution::Carried;
use super::communicator::Communicator;
use super::instance::Part;
use super::wire::{Shape, Wire, expected, transfer};
use crate::model::{Lane, Rank, SegmentId, Track, message_bytes};

/// The parts of an operation, each with its process and the address of its GPU.
pub(super) fn carried(
    comm: &Communicator,
    (track, order): (Track, u64),
    transfer_ns: Option<u64>,
) -> Vec<(SegmentId, String, Carried)> {
    let Some(instance) = comm.instance(track, order) else { return Vec::new() };
    let untimed = instance.parts.values().any(|p| p.kernel.is_none());
    let slot = if untimed { slot(comm, track, order) } else { None };
    let of = |(rank, part): (&Rank, &Part)| {
        let member = comm.members().get(rank)?;
        let gpu = member.record.gpu.clone()?;
        let (from_ns, to_ns, estimated) = when(part, transfer_ns, slot)?;
        let wire = wire(comm, *rank, part, member.record.nodes);
        let func = if matches!(track, Track::Pair(..)) { crate::model::Func::SendRecv } else { part.op.func };
        let carried = Carried { comm: comm.id, func, wire, from_ns, to_ns, estimated };
        Some((part.op.segment, gpu, carried))
    };
    instance.parts.iter().filter_map(of).collect()
}

/// When its data moved: at the end of its kernel, for as long as the transfer took. Before that it waited for others.
/// Where it was not timed it has its place among those between two timed ones; a host may have issued it seconds ahead.
fn when(part: &Part, transfer_ns: Option<u64>, slot: Option<(u64, u64)>) -> Option<(u64, u64, bool)> {
    if let Some(kernel) = part.kernel {
        let took = transfer_ns.unwrap_or(kernel.duration_ns).min(kernel.duration_ns);
        return Some((kernel.end_ns().saturating_sub(took), kernel.end_ns(), false));
    }
    if let Some((from_ns, to_ns)) = slot {
        return Some((from_ns, to_ns, true));
    }
    let issued = part.op.issued_ns.or(part.op.called_ns)?;
    Some((issued, issued.saturating_add(part.op.event_ns.unwrap_or(0)), true))
}

/// The time between the timed operations around it, in equal parts for all that lie between them.
fn slot(comm: &Communicator, track: Track, order: u64) -> Option<(u64, u64)> {
    let ((before, ended), (after, began)) = match comm.timed_beside(track, order) {
        (Some(b), Some(a)) => (b, a),
        _ => return None,
    };
    let between = after.checked_sub(before)?.checked_sub(1).filter(|n| *n > 0)?;
    let each = began.checked_sub(ended)? / between;
    let from_ns = ended.saturating_add((order - before - 1).saturating_mul(each));
    Some((from_ns, from_ns.saturating_add(each)))
}

fn wire(comm: &Communicator, rank: Rank, part: &Part, nodes: Option<u32>) -> Option<Wire> {
    let op = &part.op;
    let bytes = message_bytes(op.func, op.dtype?, op.count, comm.ranks())?;
    match op.lane {
        // Between nodes the NICs carry it, over what other GPUs there may be.
        Lane::Send(peer) | Lane::Recv(peer) => (nodes == Some(1) || peer == rank)
            .then(|| transfer(bytes, matches!(op.lane, Lane::Send(_)), peer == rank)),
        Lane::Collective | Lane::Replay => expected(&Shape {
            func: op.func,
            algo: op.algo,
            proto: op.proto,
            bytes,
            ranks: comm.ranks()?,
            nodes,
            is_root: op.func.is_rooted() && op.root == Some(rank),
        }),
    }
}
