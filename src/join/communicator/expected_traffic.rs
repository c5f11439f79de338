//! The traffic that each rank of a finished operation should have caused, and when.

use super::super::attribution::Carried;
use super::super::instance::Part;
use super::super::wire::{Shape, Wire, crossing, expected, transfer};
use super::Communicator;
use crate::model::{Func, Lane, Rank, SegmentId, Track, message_bytes};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Tells the parts of an operation, each with its process and the address of its GPU.
pub(in crate::join) fn carried(
    comm: &Communicator,
    (track, order): (Track, u64),
    transfer_ns: Option<u64>,
    mut tell: impl FnMut(SegmentId, &Arc<str>, Carried),
) {
    let Some(instance) = comm.instance(track, order) else { return };
    let untimed = instance.parts.values().any(|p| p.kernel.is_none());
    let slot = if untimed { slot(comm, track, order) } else { None };
    for (rank, part) in &instance.parts {
        let Some(member) = comm.members().get(rank) else { continue };
        let when = when(part, transfer_ns, slot);
        let (Some(gpu), Some((from_ns, to_ns, estimated))) = (&member.record.gpu, when) else { continue };
        let wire = wire(comm, *rank, part, member.record.nodes);
        let func = if matches!(track, Track::Pair(..)) { Func::SendRecv } else { part.op.func };
        tell(part.op.segment, gpu, Carried { comm: comm.id, func, wire, from_ns, to_ns, estimated });
    }
}

/// The traffic that the nodes whose ranks are seen should have caused between them: a collective once for a node, a
/// transfer once for each end of it. Each with a process of the node.
pub(in crate::join) fn crossed(
    comm: &Communicator,
    (track, order): (Track, u64),
    transfer_ns: Option<u64>,
) -> Vec<(SegmentId, Carried)> {
    let Some(instance) = comm.instance(track, order) else { return Vec::new() };
    let untimed = instance.parts.values().any(|p| p.kernel.is_none());
    let slot = if untimed { slot(comm, track, order) } else { None };
    let mut by: BTreeMap<u64, Vec<(Rank, &Part)>> = BTreeMap::new();
    for (rank, part) in &instance.parts {
        if let Some(m) = comm.members().get(rank) {
            by.entry(m.record.host_clock).or_default().push((*rank, part));
        }
    }
    let mut out = Vec::new();
    for (host, parts) in by {
        let node = OnNode::of(comm, host);
        let mut tell = |part: &Part, func, wire: Option<Wire>| {
            let when = when(part, transfer_ns, slot).filter(|_| wire != Some(Wire::default()));
            out.extend(when.map(|(from_ns, to_ns, estimated)| {
                (part.op.segment, Carried { comm: comm.id, func, wire, from_ns, to_ns, estimated })
            }));
        };
        if let Track::Pair(..) = track {
            for (rank, part) in parts {
                tell(part, Func::SendRecv, node.transfer(comm, rank, part));
            }
        } else if let Some((_, part)) = parts.iter().max_by_key(|(_, p)| p.kernel.map(|k| k.end_ns())) {
            tell(part, part.op.func, node.collective(comm, part));
        }
    }
    out
}

/// A node of a communicator, as far as it is seen.
struct OnNode {
    host: u64,
    /// The communicator's ranks on it that are seen.
    here: u32,
    /// The ranks that a node has where all have as many.
    each: Option<u32>,
    nodes: Option<u32>,
}

impl OnNode {
    fn of(comm: &Communicator, host: u64) -> Self {
        let here = comm.members().values().filter(|m| m.record.host_clock == host).count();
        let here = u32::try_from(here).unwrap_or(u32::MAX);
        let said = comm.members().values().find_map(|m| m.record.nodes);
        // All are here, whatever NCCL did not say.
        let nodes = said.or((comm.ranks() == Some(here)).then_some(1));
        let each =
            nodes.zip(comm.ranks()).filter(|(n, ranks)| *n > 0 && ranks % n == 0).map(|(n, ranks)| ranks / n);
        OnNode { host, here, each, nodes }
    }

    /// The traffic of a collective on this rank. Where nodes have unequal numbers of ranks it is not known whether
    /// all of this one are seen. Where more ranks are here than a node has, NCCL takes this host for
    /// several nodes, and what goes between these may never meet a counter; where fewer are, those of transfers between
    /// all are not all known.
    fn collective(&self, comm: &Communicator, part: &Part) -> Option<Wire> {
        let op = &part.op;
        let by_ranks = matches!(op.func, Func::AlltoAll | Func::Scatter | Func::Gather);
        if self.nodes != Some(1) && (self.here > self.each? || by_ranks && self.here != self.each?) {
            return None;
        }
        let shape = Shape {
            func: op.func,
            algo: op.algo,
            proto: op.proto,
            bytes: message_bytes(op.func, op.dtype?, op.count, comm.ranks())?,
            ranks: comm.ranks()?,
            nodes: self.nodes,
            is_root: false,
        };
        let root_here =
            op.root.map(|r| comm.members().get(&r).is_some_and(|m| m.record.host_clock == self.host));
        // A root that is not seen may be here unseen.
        let root_here = root_here.filter(|is| *is || Some(self.here) == self.each);
        crossing(&shape, self.here, root_here)
    }

    /// The traffic of a transfer on a rank: nothing over the network where the other one is here.
    fn transfer(&self, comm: &Communicator, rank: Rank, part: &Part) -> Option<Wire> {
        let op = &part.op;
        let (Lane::Send(peer) | Lane::Recv(peer)) = op.lane else { return None };
        if peer == rank || self.nodes == Some(1) {
            return Some(Wire::default());
        }
        let bytes = message_bytes(op.func, op.dtype?, op.count, comm.ranks())?;
        let sends = matches!(op.lane, Lane::Send(_));
        match comm.members().get(&peer) {
            _ if self.here > self.each? => None,
            Some(m) if m.record.host_clock == self.host => Some(Wire::default()),
            Some(_) => Some(transfer(bytes, sends, false)),
            // One that is not seen is elsewhere only if all that can be here are seen.
            None => (self.here == self.each?).then(|| transfer(bytes, sends, false)),
        }
    }
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
        Lane::Call => None,
    }
}
