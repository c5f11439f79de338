//! Events into the segment.
//!
//! A call's life: `CollApi` makes an operation in the state "called"; `Coll` issues that same operation
//! (or, for a graph replay or an ABI without calls, a new one); `KernelCh` and `ProxyOp` name it as parent
//! and keep their own slots, since a kernel's stamps may be wrong channel by channel and are judged later.

use crate::calls;
use crate::event::{Api, Body, Coll, Event, P2p, StateArg, bit, state};
use crate::handle::{Handle, Kind};
use crate::held::Held;
use crate::network;
use crate::process::now_ns;
use crate::state::Live;
use ringwatch_wire::codes::{FUNCS, Flaw, Loss, UNKNOWN, flag, kind, phase};
use ringwatch_wire::layout::{channel, comm, group, op, proxy};
use ringwatch_wire::sync::{Claim, Word};

const SEND: u8 = code_of("Send");
const RECV: u8 = code_of("Recv");

pub(crate) const fn code_of(name: &str) -> u8 {
    let mut i = 0;
    while i < FUNCS.len() {
        let (code, text) = FUNCS[i];
        if text.len() == name.len() && text.as_bytes()[0] == name.as_bytes()[0] {
            let mut same = true;
            let mut k = 0;
            while k < text.len() {
                same &= text.as_bytes()[k] == name.as_bytes()[k];
                k += 1;
            }
            if same {
                return code;
            }
        }
        i += 1;
    }
    0
}

/// A communicator that a context names.
#[derive(Clone, Copy)]
pub(crate) struct Comm {
    pub(crate) ticket: u64,
    slot: &'static [Word],
}

/// Records a started event and returns its handle.
///
/// # Errors
/// The reason why nothing was recorded; the handle is then NULL.
pub fn start(live: &'static Live, context: u64, event: &Event) -> Result<u64, Loss> {
    let pack = |kind, value| Handle { kind, value }.pack(live.nonce);
    match &event.body {
        Body::Group => {
            let plan = live.segment.add(ringwatch_wire::layout::head::NEXT_PLAN, 1);
            Ok(pack(Kind::Plan, plan))
        }
        Body::GroupApi { depth, captured } => {
            let comm = comm_of(live, context)?;
            let (ticket, slot) = live.segment.group.claim()?;
            let depth = (*depth).clamp(0, 0xffff) as u64;
            slot.set(group::WHAT, comm.ticket & 0xffff | depth << 16 | u64::from(*captured) << 32);
            slot.set(group::START_NS, now_ns());
            for i in [group::END_CALLED, group::LAUNCH_START, group::LAUNCH_STOP, group::STOP] {
                slot.set(i, 0);
            }
            slot.publish();
            Ok(pack(Kind::Group, ticket))
        }
        Body::Api(api) => {
            let kind = if api.captured { Kind::Captured } else { Kind::Called };
            called(live, comm_of(live, context)?, event, api).map(|t| pack(kind, t))
        }
        Body::Coll(coll) => issued(live, comm_of(live, context)?, event, coll).map(|t| pack(Kind::Issued, t)),
        Body::P2p(p2p) => paired(live, comm_of(live, context)?, event, p2p).map(|t| pack(Kind::Issued, t)),
        Body::KernelLaunch => {
            let ticket = parent_ticket(live, event.parent, Kind::Group)?;
            let group = Held::of(&live.segment.group, ticket)?;
            // A group may launch several kernels; the first start and the last stop are kept.
            match group.once_since(group::LAUNCH_START, group::START_NS) {
                Ok(()) | Err(Loss::Repeated) => Ok(pack(Kind::Launch, ticket)),
                Err(e) => Err(e),
            }
        }
        Body::KernelCh { channel, gpu_ns } => {
            kernel(live, event.parent, *channel, *gpu_ns).map(|t| pack(Kind::Channel, t))
        }
        Body::ProxyOp(p) => {
            network::transfer(live, context, event.parent, p).map(|t| pack(Kind::Transfer, t))
        }
        Body::ProxyStep { step } => {
            let ticket = parent_ticket(live, event.parent, Kind::Transfer)?;
            let step = u64::from(*step as u32) & 7;
            network::step_start(live, ticket, step)?;
            Ok(pack(Kind::Step, ticket << 3 | step))
        }
        Body::Other => Err(if event.bit <= bit::LAST { Loss::NotRecorded } else { Loss::UnknownType }),
    }
}

/// Records the end of an event.
///
/// # Errors
/// The reason why nothing was recorded.
pub fn stop(live: &'static Live, raw: u64) -> Result<(), Loss> {
    let handle = Handle::unpack(raw, live.nonce)?;
    let s = &live.segment;
    match handle.kind {
        // NCCL has nothing more to say about a plan, and its operations carry its number.
        Kind::Plan => Ok(()),
        Kind::Called | Kind::Captured => Held::of(&s.op, handle.value).map(|_| ()),
        Kind::Issued => Held::of(&s.op, handle.value)?.once_since(op::ENQUEUED, op::ISSUED_NS),
        Kind::Group => Held::of(&s.group, handle.value)?.once_since(group::STOP, group::START_NS),
        Kind::Launch => {
            let group = Held::of(&s.group, handle.value)?;
            group.set(group::LAUNCH_STOP, group.since(group::START_NS))
        }
        Kind::Channel => {
            // From v4 on the stop is known already; v3 has no state before it.
            match kernel_stop(live, handle.value, None) {
                Ok(()) | Err(Loss::Repeated) => Ok(()),
                Err(e) => Err(e),
            }
        }
        Kind::Transfer => Held::of(&s.proxy, handle.value)?.once_since(proxy::STOP, proxy::START_NS),
        Kind::Step => network::step_change(live, handle.value >> 3, handle.value & 7, phase::NONE, 0),
        Kind::Comm => Err(Loss::BadParent),
    }
}

/// Records a state of an event.
///
/// # Errors
/// The reason why nothing was recorded.
pub fn state(live: &'static Live, raw: u64, value: i32, arg: Option<StateArg>) -> Result<(), Loss> {
    let handle = Handle::unpack(raw, live.nonce)?;
    let s = &live.segment;
    match (handle.kind, value) {
        (Kind::Channel, state::KERNEL_STOP) => {
            let stamp = arg.ok_or(Loss::BadCall)?.value;
            kernel_stop(live, handle.value, Some(stamp))
        }
        (Kind::Group, state::GROUP_START_DONE) => Held::of(&s.group, handle.value).map(|_| ()),
        (Kind::Group, state::GROUP_END_CALLED) => {
            Held::of(&s.group, handle.value)?.once_since(group::END_CALLED, group::START_NS)
        }
        (Kind::Transfer, state::IN_PROGRESS) => Held::of(&s.proxy, handle.value).map(|_| ()),
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
}

/// Records the end of a communicator.
///
/// # Errors
/// The reason why nothing was recorded.
pub fn finalize(live: &'static Live, context: u64) -> Result<(), Loss> {
    let c = comm_of(live, context)?;
    let w = c.slot.get(comm::FINALIZED_NS).ok_or(Loss::NoComm)?;
    if !w.replace(0, now_ns()) {
        return Err(Loss::Repeated);
    }
    live.pairs.free(c.ticket);
    Ok(())
}

fn word(slot: &[Word], i: usize) -> u64 {
    slot.get(i).map_or(0, Word::get)
}

pub(crate) fn comm_of(live: &'static Live, context: u64) -> Result<Comm, Loss> {
    let handle = Handle::unpack(context, live.nonce)?;
    if handle.kind != Kind::Comm {
        return Err(Loss::BadParent);
    }
    let slot = live.segment.comm.held(handle.value).ok_or(Loss::NoComm)?;
    Ok(Comm { ticket: handle.value, slot })
}

fn parent_ticket(live: &Live, raw: u64, kind: Kind) -> Result<u64, Loss> {
    let parent = Handle::unpack(raw, live.nonce)?;
    if parent.kind == kind { Ok(parent.value) } else { Err(Loss::BadParent) }
}

/// Fills in who a communicator is, from the first operation that says so (ABI v1 to v3).
fn learn(live: &Live, c: Comm, hash: Option<u64>, rank: i32) {
    let Some(hash) = hash else { return };
    if word(c.slot, comm::NODES) & comm::KNOWN != 0 {
        return;
    }
    let rank = u64::from(u32::try_from(rank).unwrap_or(0));
    if let Some(claim) = live.segment.comm.claim_again(c.ticket) {
        claim.set(comm::ID, hash);
        claim.set(comm::RANK, word(c.slot, comm::RANK) >> 32 << 32 | rank);
        claim.set(comm::NODES, comm::KNOWN);
        claim.publish();
    }
}

struct What {
    kind: u8,
    func: u8,
    dtype: u8,
    algo: u8,
    proto: u8,
    flags: u8,
}

impl What {
    fn word(&self, comm: u64) -> u64 {
        comm & 0xffff
            | u64::from(self.kind) << 16
            | u64::from(self.func) << 24
            | u64::from(self.dtype) << 32
            | u64::from(self.algo) << 40
            | u64::from(self.proto) << 48
            | u64::from(self.flags) << 56
    }
}

fn root_word(root: i32, channels: u8, warps: u8) -> u64 {
    u64::from(root as u32) | u64::from(channels) << 32 | u64::from(warps) << 40
}

/// Empties a new operation slot.
fn blank(slot: &Claim<'_>) {
    for i in 1..op::WORDS {
        slot.set(i, 0);
    }
    slot.set(op::ORDER, op::NO_ORDER);
    slot.set(op::SEQ, op::NO_ORDER);
}

fn called(live: &'static Live, c: Comm, event: &Event, api: &Api) -> Result<u64, Loss> {
    // The group may be another communicator's: groups span communicators.
    let group = parent_ticket(live, event.parent, Kind::Group).map_or(0, |t| t + 1);
    if let Some(ticket) = calls::told(live, c.ticket, api, group) {
        return Ok(ticket);
    }
    let (ticket, slot) = live.segment.op.claim()?;
    blank(&slot);
    let kind = match (api.collective, api.func) {
        (true, _) => kind::COLLECTIVE,
        (false, SEND) => kind::SEND,
        (false, _) => kind::RECV,
    };
    let flags = if api.captured { flag::CAPTURED } else { 0 };
    let what = What { kind, func: api.func, dtype: api.dtype, algo: 0, proto: 0, flags };
    slot.set(op::WHAT, what.word(c.ticket));
    slot.set(op::COUNT, api.count);
    slot.set(op::ROOT, root_word(api.root, 0, 0));
    slot.set(op::CALLED_NS, now_ns());
    slot.set(op::GROUP, group);
    slot.set(op::STREAM, api.stream);
    slot.set(op::USER_TAG, api.user_tag);
    slot.publish();
    Ok(ticket)
}

/// What the parent of an issued operation says about it.
enum Origin {
    /// It was called and not yet issued: the same operation moves on.
    Called(u64),
    /// A graph replay of a captured call.
    Replay(u64),
    /// No call is known.
    Unknown,
}

fn origin(live: &Live, parent: u64) -> Origin {
    match Handle::unpack(parent, live.nonce) {
        Ok(Handle { kind: Kind::Captured, value }) => Origin::Replay(value),
        Ok(Handle { kind: Kind::Called, value }) => match live.segment.op.held(value) {
            Some(slot) if word(slot, op::ISSUED_NS) == 0 => Origin::Called(value),
            // NCCL 2.28.3 to 2.32.3 name an old call again once events were switched off; and a group with
            // more calls than the ring has slots loses the first of them before they are issued.
            _ => Origin::Unknown,
        },
        _ => Origin::Unknown,
    }
}

/// The slot of an operation that is being issued: the called one's, or a new one.
fn issue_slot(live: &'static Live, origin: &Origin) -> Result<(u64, Claim<'static>, bool), Loss> {
    if let Origin::Called(ticket) = origin
        && let Some(slot) = live.segment.op.claim_again(*ticket)
    {
        return Ok((*ticket, slot, true));
    }
    let (ticket, slot) = live.segment.op.claim()?;
    blank(&slot);
    Ok((ticket, slot, false))
}

fn plan_of(live: &Live, plan: u64, parent: u64) -> u64 {
    // From v5 on the plan is a field of its own; before, it is the parent.
    parent_ticket(live, plan, Kind::Plan)
        .or_else(|_| parent_ticket(live, parent, Kind::Plan))
        .map_or(0, |t| t + 1)
}

fn issued(live: &'static Live, c: Comm, event: &Event, coll: &Coll) -> Result<u64, Loss> {
    learn(live, c, coll.comm, event.rank);
    let seen = calls::pending(c.ticket, coll.func, coll.dtype, coll.count, -1);
    let origin = seen.map_or_else(|| origin(live, event.parent), Origin::Called);
    let (kind, counter) = match origin {
        Origin::Replay(_) => (kind::REPLAY, comm::REPLAYED),
        _ => (kind::COLLECTIVE, comm::ISSUED),
    };
    // Counted before the slot is taken: a record that is lost must not shift the orders that follow.
    let order = c.slot.get(counter).map_or(op::NO_ORDER, |w| w.add(1));
    // The call names the user's own type and count; NCCL turns some of them into bytes when it issues.
    let called = match origin {
        Origin::Called(t) => live.segment.op.held(t),
        _ => None,
    };
    let called = called.map(|s| ((word(s, op::WHAT) >> 32 & 0xff) as u8, word(s, op::COUNT)));
    let (ticket, slot, again) = issue_slot(live, &origin)?;
    let (dtype, count) = called.filter(|c| again && c.0 != UNKNOWN).unwrap_or((coll.dtype, coll.count));
    let mut flags = 0;
    for (set, bit) in [
        (coll.in_place, flag::IN_PLACE),
        (coll.copy_engine, flag::COPY_ENGINE),
        (coll.symmetric, flag::SYMMETRIC),
    ] {
        if set {
            flags |= bit;
        }
    }
    let what = What { kind, func: coll.func, dtype, algo: coll.algo, proto: coll.proto, flags };
    slot.set(op::WHAT, what.word(c.ticket));
    slot.set(op::ORDER, order);
    slot.set(op::COUNT, count);
    slot.set(op::ROOT, root_word(coll.root, coll.channels, coll.warps));
    slot.set(op::ISSUED_NS, now_ns());
    slot.set(op::SEQ, coll.seq);
    slot.set(op::PLAN, plan_of(live, coll.plan, event.parent));
    for (i, w) in coll.variant.iter().enumerate() {
        slot.set(op::VARIANT + i, *w);
    }
    if !again {
        slot.set(op::STREAM, coll.stream);
        slot.set(op::USER_TAG, coll.user_tag);
        if let Origin::Replay(t) = origin {
            slot.set(op::CAPTURE, t + 1);
        }
    }
    slot.publish();
    Ok(ticket)
}

fn paired(live: &'static Live, c: Comm, event: &Event, p2p: &P2p) -> Result<u64, Loss> {
    learn(live, c, p2p.comm, event.rank);
    let seen = calls::pending(c.ticket, p2p.func, p2p.dtype, p2p.count, p2p.peer);
    let origin = seen.map_or_else(|| origin(live, event.parent), Origin::Called);
    let is_send = p2p.func != RECV;
    let order = live.pairs.next(c.ticket, p2p.peer, is_send);
    let (ticket, slot, again) = issue_slot(live, &origin)?;
    if order.is_none() {
        live.segment.flaw(Flaw::PairOrder);
    }
    let kind = if is_send { kind::SEND } else { kind::RECV };
    let flags = if order.is_none() { flag::ORDER_UNKNOWN } else { 0 };
    let what = What { kind, func: p2p.func, dtype: p2p.dtype, algo: 0, proto: 0, flags };
    slot.set(op::WHAT, what.word(c.ticket));
    slot.set(op::ORDER, order.unwrap_or(op::NO_ORDER));
    slot.set(op::COUNT, p2p.count);
    slot.set(op::ROOT, root_word(p2p.peer, p2p.channels, 0));
    slot.set(op::ISSUED_NS, now_ns());
    slot.set(op::PLAN, plan_of(live, p2p.plan, event.parent));
    if !again {
        slot.set(op::USER_TAG, p2p.user_tag);
        if let Origin::Replay(t) = origin {
            slot.set(op::CAPTURE, t + 1);
        }
    }
    slot.publish();
    Ok(ticket)
}

/// Counts a channel in its operation's progress: started in the low 16 bits, stopped above.
fn progress(live: &Live, ticket: u64, add: u64) {
    // An operation that was overwritten has no progress to count.
    if let Ok(op) = Held::of(&live.segment.op, ticket)
        && op.add(op::PROGRESS, add) == Err(Loss::Contended)
    {
        live.segment.flaw(Flaw::Progress);
    }
}

fn kernel(live: &'static Live, parent: u64, ch: u8, gpu_ns: u64) -> Result<u64, Loss> {
    let parent = parent_ticket(live, parent, Kind::Issued)?;
    let (ticket, slot) = live.segment.channel.claim()?;
    slot.set(channel::OP, parent & ((1 << 56) - 1) | u64::from(ch) << 56);
    slot.set(channel::START_GPU_NS, gpu_ns);
    slot.set(channel::START_SEEN_NS, now_ns());
    slot.set(channel::DURATION, 0);
    slot.set(channel::STOP_SEEN, 0);
    slot.publish();
    progress(live, parent, 1);
    Ok(ticket)
}

fn kernel_stop(live: &'static Live, ticket: u64, stamp: Option<u64>) -> Result<(), Loss> {
    let kernel = Held::of(&live.segment.channel, ticket)?;
    // NCCL 2.27 to 2.30 may send the stop of a later operation to a kernel that stopped long ago.
    if kernel.mark(channel::STOP_SEEN).is_some() {
        return Err(Loss::Repeated);
    }
    if let Some(stop) = stamp {
        let start = kernel.word(channel::START_GPU_NS);
        let duration = (stop.wrapping_sub(start) as i64).clamp(-(1 << 46), 1 << 46);
        kernel.once(channel::DURATION, channel::BIAS.wrapping_add_signed(duration))?;
    }
    kernel.once_since(channel::STOP_SEEN, channel::START_SEEN_NS)?;
    progress(live, kernel.word(channel::OP) & ((1 << 56) - 1), 1 << 16);
    Ok(())
}
