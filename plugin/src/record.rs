//! Events into the segment.
//!
//! A call's life: `CollApi` makes an operation in the state "called"; `Coll` issues that same operation
//! (or, for a graph replay or an ABI without calls, a new one); `KernelCh` and `ProxyOp` name it as parent
//! and keep their own slots, since a kernel's stamps may be wrong channel by channel and are judged later.

use crate::calls;
use crate::chain;
use crate::clock::now_ns;
use crate::event::{Api, Body, Coll, Event, P2p, StateArg, bit, state};
use crate::events::Shot;
use crate::handle::{Handle, Kind, VALUE_MASK, group};
use crate::held::Held;
use crate::network;
use crate::prefetch;
use crate::state::Live;
use crate::timing::{self, Origin};
use ringwatch_wire::codes::{FUNCS, Flaw, Loss, UNKNOWN, call, flag, kind, phase, timed};
use ringwatch_wire::layout::{channel, comm, group as layout, head, op, proxy};
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
    slot: &'static [Word; comm::WORDS],
}

impl Comm {
    /// The communicator of a ticket.
    pub(crate) fn of(live: &'static Live, ticket: u64) -> Option<Self> {
        live.segment.comm.held(ticket).map(|slot| Comm { ticket, slot })
    }

    /// The communicator of a slot.
    pub(crate) fn new(ticket: u64, slot: &'static [Word; comm::WORDS]) -> Self {
        Comm { ticket, slot }
    }

    /// A word of its slot.
    #[inline]
    pub(crate) fn word(&self, i: usize) -> u64 {
        word(self.slot, i)
    }

    /// Adds to a word of its slot, and says what it was.
    #[inline]
    fn add(&self, i: usize, n: u64) -> u64 {
        self.slot.get(i).map_or(0, |w| w.add(n))
    }

    /// Books a recorded event in the communicator's own books. The segment's are shared by all threads, and a line that
    /// every GPU's thread writes to costs each of them a few hundred ns an operation.
    #[inline]
    fn book(&self, live: &Live, i: usize, one: u64) {
        const FULL: u64 = 1 << 31 | 1 << 63;
        if self.add(i, one) & FULL != 0 {
            settle(live, self.slot);
        }
    }

    /// Changes a note of the writer's own, if it is `old`; true when this call did it.
    pub(crate) fn replace(&self, i: usize, old: u64, new: u64) -> bool {
        self.slot.get(i).is_some_and(|w| w.replace(old, new))
    }

    /// Changes a note of the writer's own.
    #[inline]
    pub(crate) fn set(&self, i: usize, value: u64) {
        if let Some(w) = self.slot.get(i) {
            w.set(value);
        }
    }
}

/// A started event.
#[derive(Debug, Clone, Copy)]
pub struct Started {
    /// What NCCL gets.
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

/// What a stop or a state brought.
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
            // Its number counts it, and names its communicator.
            let plan = match comm_of(live, context) {
                Ok(c) => (c.ticket & 0xffff) << PLAN_BITS | c.add(comm::PLANS, 1) & PLAN_MASK,
                Err(_) => NO_COMM_PLAN | live.segment.add(head::NEXT_PLAN, 1) & PLAN_MASK,
            };
            Ok(Started::quiet(pack(Kind::Plan, plan)))
        }
        Body::GroupApi { depth, captured } => {
            let value = begin_group(live, context, *depth, *captured)?;
            Ok(Started::quiet(pack(Kind::Group, value)))
        }
        Body::Api(api) => {
            let c = comm_of(live, context)?;
            let (group, ticket) = called(live, c, event.parent, api)?;
            c.book(live, comm::CALLS, if api.collective { 1 } else { 1 << 32 });
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
            // Without a shot NCCL need not tell the end of the launch.
            let shot = timing::launch(live, comm_of(live, context)?, event.parent, *stream);
            Ok(shot.map_or(Started::quiet(0), |s| Started::booked(pack(Kind::Launch, s.number()))))
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
    let handle = match Handle::unpack(raw, live.nonce) {
        Ok(h) => h,
        Err(loss) => return chain::stop(live, raw, loss),
    };
    let s = &live.segment;
    match handle.kind {
        // See `handle::has_no_end`.
        Kind::Issued | Kind::Plan | Kind::Called | Kind::Captured => return Ok(Carried::Nothing),
        Kind::Group => return end_group(live, handle.value),
        Kind::Launch => {
            let shot = Shot::from_number(handle.value).ok_or(Loss::Foreign)?;
            live.events.end(live, shot);
            Ok(())
        }
        Kind::Channel => kernel_stop(live, handle.value, None),
        Kind::Transfer => Held::of(&s.proxy, handle.value)?.once_since(proxy::STOP, proxy::START_NS),
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
        // A bare call is a group without a record.
        if value == state::GROUP_START_DONE || raw & group::BARE != 0 {
            return Ok(Carried::Nothing);
        }
        return group_end_called(live, raw);
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
    let handle = match Handle::unpack(raw, live.nonce) {
        Ok(h) => h,
        Err(loss) => return chain::state(live, raw, value, arg, loss),
    };
    let s = &live.segment;
    match (handle.kind, value) {
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
    .map(|()| Carried::Something)
}

#[inline(never)]
fn group_end_called(live: &'static Live, raw: u64) -> Result<Carried, Loss> {
    let group = Held::of(&live.segment.group, raw & group::TICKET)?;
    group.once_since(layout::END_CALLED, layout::START_NS).map(|()| Carried::Something)
}

/// Records the end of a communicator.
///
/// # Errors
/// The reason why nothing was recorded.
pub fn finalize(live: &'static Live, context: u64) -> Result<(), Loss> {
    let c = comm_of(live, context)?;
    if end(live, &c) { Ok(()) } else { Err(Loss::Repeated) }
}

/// Adds a communicator's books to the segment's.
#[cold]
pub(crate) fn settle(live: &Live, slot: &[Word; comm::WORDS]) {
    let take = |i: usize| {
        let Some(w) = slot.get(i) else { return 0 };
        loop {
            let n = w.get();
            if w.replace(n, 0) {
                return n;
            }
        }
    };
    let s = &live.segment;
    for (i, low, high) in
        [(comm::CALLS, call::COLL_CALL, call::P2P_CALL), (comm::ISSUES, call::COLL, call::P2P)]
    {
        let n = take(i);
        s.add(head::RECORDED + low, n & 0xffff_ffff);
        s.add(head::RECORDED + high, n >> 32);
    }
    // The numbers of plans go on: they only have to differ.
    s.add(head::NEXT_PLAN, take(comm::PLANS));
}

/// Numbers of plans: the communicator's ticket, and its own count; or none of a communicator's.
const PLAN_BITS: u32 = 26;
const PLAN_MASK: u64 = (1 << PLAN_BITS) - 1;
const NO_COMM_PLAN: u64 = 1 << 42;

/// Ends a communicator; false where that was done before. What it holds is given back first: once its slot is free, an
/// init of another one may take it.
pub(crate) fn end(live: &'static Live, c: &Comm) -> bool {
    if c.word(comm::FINALIZED_NS) != 0 {
        return false;
    }
    settle(live, c.slot);
    live.pairs.free(c.ticket);
    live.governor.finalized(c);
    if live.governor.events() {
        live.events.read(live, c.ticket);
    }
    c.slot.get(comm::FINALIZED_NS).is_some_and(|w| w.replace(0, now_ns()))
}

/// An outermost group begins. A bare call is a group of its own and gets no record: its value says all there is.
#[inline]
fn begin_group(live: &'static Live, context: u64, depth: i32, captured: bool) -> Result<u64, Loss> {
    let ring = &live.segment.op;
    prefetch::for_writing(ring.slot(ring.next()));
    let comm = comm_of(live, context)?;
    // NCCL has looked at its mask a moment ago.
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

#[inline]
fn end_group(live: &'static Live, value: u64) -> Result<Carried, Loss> {
    if value & group::BARE != 0 {
        if value & group::CAPTURED != 0
            && let Some(slot) = live.segment.comm.held(value & group::TICKET)
        {
            Comm { ticket: value & group::TICKET, slot }.set(comm::CAPTURING, 0);
        }
        return Ok(Carried::Nothing);
    }
    if value & group::CAPTURED != 0 {
        end_capture(live);
    }
    Held::of(&live.segment.group, value & group::TICKET)?.once_since(layout::STOP, layout::START_NS)?;
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

#[inline]
fn word(slot: &[Word], i: usize) -> u64 {
    slot.get(i).map_or(0, Word::get)
}

#[inline(always)]
pub(crate) fn comm_of(live: &'static Live, context: u64) -> Result<Comm, Loss> {
    let ticket = parent_ticket(live, context, Kind::Comm)?;
    let slot = live.segment.comm.held(ticket).ok_or(Loss::NoComm)?;
    Ok(Comm { ticket, slot })
}

#[inline]
fn parent_ticket(live: &Live, raw: u64, kind: Kind) -> Result<u64, Loss> {
    if kind.is(raw, live.nonce) {
        return Ok(raw & VALUE_MASK);
    }
    Handle::unpack(raw, live.nonce)?;
    Err(Loss::BadParent)
}

/// Fills in who a communicator is, from the first operation that says so (ABI v1 to v3).
#[inline(always)]
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

/// A new operation, before it is written: the words behind the stamp.
struct Record {
    words: [u64; op::WORDS - 1],
}

impl Record {
    #[inline(always)]
    fn blank() -> Self {
        let mut r = Record { words: [0; op::WORDS - 1] };
        r.set(op::ORDER, op::NO_ORDER);
        r.set(op::SEQ, op::NO_ORDER);
        r
    }

    #[inline(always)]
    fn set(&mut self, i: usize, value: u64) {
        if let Some(w) = self.words.get_mut(i.wrapping_sub(1)) {
            *w = value;
        }
    }

    #[inline(always)]
    fn publish(self, slot: Claim<'_, { op::WORDS }>) {
        slot.set_all(1, self.words);
        slot.publish();
    }
}

/// An API call: the group's value, and the ticket of its operation.
#[inline(always)]
fn called(live: &'static Live, c: Comm, parent: u64, api: &Api) -> Result<(u64, u64), Loss> {
    let group = if Kind::Group.is(parent, live.nonce) { parent & VALUE_MASK } else { group::BARE };
    if calls::seen()
        && let Some(again) = called_again(live, c, group, api)
    {
        return Ok(again);
    }
    let (ticket, slot) = live.segment.op.claim()?;
    let kind = match (api.collective, api.func) {
        (true, _) => kind::COLLECTIVE,
        (false, SEND) => kind::SEND,
        (false, _) => kind::RECV,
    };
    let flags = if api.captured { flag::CAPTURED } else { 0 };
    let what = What { kind, func: api.func, dtype: api.dtype, algo: 0, proto: 0, flags };
    let now = now_ns();
    let mut r = Record::blank();
    r.set(op::WHAT, what.word(c.ticket));
    r.set(op::COUNT, api.count);
    r.set(op::ROOT, root_word(api.root, 0, 0));
    r.set(op::CALLED_NS, now);
    // The group may be another communicator's: groups span communicators.
    let in_group = if group & group::BARE != 0 { 0 } else { (group & group::TICKET) + 1 };
    r.set(op::GROUP, in_group);
    r.set(op::STREAM, api.stream);
    r.set(op::USER_TAG, api.user_tag);
    if group & group::KERNEL != 0 {
        r.set(op::TIMED, u64::from(timed::KERNEL));
    }
    r.publish(slot);
    timing::note_call(&c, ticket, now, timing::bytes_of(api.dtype, api.count), in_group);
    timing::note_capture(live, &c, ticket, api.captured);
    Ok((group, ticket))
}

/// A call that the preloaded library saw before: what NCCL says beside it.
#[cold]
#[inline(never)]
fn called_again(live: &'static Live, c: Comm, group: u64, api: &Api) -> Option<(u64, u64)> {
    let seen = calls::told(live, c.ticket, api.func)?;
    let slot = live.segment.op.claim_again(seen.op)?;
    let now = now_ns();
    let captured = if api.captured { flag::CAPTURED } else { 0 };
    slot.set(op::WHAT, seen.what | u64::from(captured) << 56);
    slot.set(op::CALLED_NS, now);
    let in_group = if group & group::BARE != 0 { 0 } else { (group & group::TICKET) + 1 };
    slot.set(op::GROUP, in_group);
    slot.set(op::USER_TAG, api.user_tag);
    if group & group::KERNEL != 0 {
        slot.set(op::TIMED, u64::from(timed::KERNEL));
    }
    slot.publish();
    timing::note_call(
        &c,
        seen.op,
        now,
        timing::bytes_of((seen.what >> 32 & 0xff) as u8, api.count),
        in_group,
    );
    timing::note_capture(live, &c, seen.op, api.captured);
    Some((group, seen.op))
}

#[inline(always)]
fn origin(live: &Live, parent: u64) -> Origin {
    match Handle::unpack(parent, live.nonce) {
        Ok(Handle { kind: Kind::Captured, value }) => {
            Origin::Replay { ticket: value & group::TICKET, kernel: value & group::KERNEL != 0 }
        }
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
#[inline(always)]
fn issue_slot(
    live: &'static Live,
    origin: &Origin,
) -> Result<(u64, Claim<'static, { op::WORDS }>, bool), Loss> {
    if let Origin::Called(ticket) = origin
        && let Some(slot) = live.segment.op.claim_again(*ticket)
    {
        return Ok((*ticket, slot, true));
    }
    let (ticket, slot) = live.segment.op.claim()?;
    Ok((ticket, slot, false))
}

/// What an issue says of an operation.
struct Issue {
    what: u64,
    order: u64,
    count: u64,
    root: u64,
    issued_ns: u64,
    seq: u64,
    plan: u64,
    variant: [u64; 4],
    timing: u64,
    stream: u64,
    user_tag: u64,
}

impl Issue {
    /// Writes it; `again` when the operation's call was recorded in this slot.
    #[inline(always)]
    fn publish(&self, slot: Claim<'_, { op::WORDS }>, again: bool, origin: &Origin) {
        if again {
            slot.set_all(op::WHAT, [self.what, self.order, self.count, self.root]);
            slot.set(op::ISSUED_NS, self.issued_ns);
            slot.set(op::SEQ, self.seq);
            let [a, b, c, d] = self.variant;
            slot.set_all(op::PLAN, [self.plan, a, b, c, d]);
            slot.set(op::TIMED, self.timing);
            slot.publish();
            return;
        }
        let mut r = Record::blank();
        for (i, w) in [
            (op::WHAT, self.what),
            (op::ORDER, self.order),
            (op::COUNT, self.count),
            (op::ROOT, self.root),
            (op::ISSUED_NS, self.issued_ns),
            (op::SEQ, self.seq),
            (op::PLAN, self.plan),
            (op::TIMED, self.timing),
            (op::STREAM, self.stream),
            (op::USER_TAG, self.user_tag),
        ] {
            r.set(i, w);
        }
        for (i, w) in self.variant.iter().enumerate() {
            r.set(op::VARIANT + i, *w);
        }
        if let Origin::Replay { ticket, .. } = origin {
            r.set(op::CAPTURE, ticket + 1);
        }
        r.publish(slot);
    }
}

#[inline(always)]
fn plan_of(live: &Live, plan: u64, parent: u64) -> u64 {
    // From v5 on the plan is a field of its own; before, it is the parent.
    parent_ticket(live, plan, Kind::Plan)
        .or_else(|_| parent_ticket(live, parent, Kind::Plan))
        .map_or(0, |t| t + 1)
}

/// An operation that was issued.
enum Issued {
    /// And has this ticket.
    Recorded(u64),
    /// Into a graph: nothing runs. This is the ticket of its call.
    Captured(u64),
    /// And is not wanted.
    Unwanted,
}

impl Issued {
    /// Its handle; `one` is what it counts in its communicator's books, 0 for nothing.
    #[inline(always)]
    fn started(self, live: &'static Live, c: &Comm, one: u64, pack: impl Fn(u64) -> u64) -> Started {
        match self {
            Issued::Recorded(t) if one == 0 => Started::booked(pack(t)),
            Issued::Recorded(t) => {
                c.book(live, comm::ISSUES, one);
                Started::quiet(pack(t))
            }
            Issued::Captured(t) => Started::quiet(pack(t)),
            Issued::Unwanted => Started::quiet(0),
        }
    }
}

/// What is to be done with an operation that a graph's capture brought: nothing, if so.
#[inline(always)]
fn of_graph(live: &'static Live, c: Comm, origin: &Origin) -> Option<Issued> {
    let Origin::Replay { ticket, .. } = *origin else { return None };
    // While its group is still open NCCL only puts it into the graph: so does a single node without kernel events,
    // which then says nothing when the graph is replayed.
    let capturing = c.word(comm::CAPTURING);
    if capturing != 0 && ticket + 1 >= capturing {
        return Some(Issued::Captured(ticket));
    }
    live.governor.graphs_off().then_some(Issued::Unwanted)
}

#[inline(always)]
fn issued(live: &'static Live, c: Comm, parent: u64, rank: i32, coll: &Coll) -> Result<Issued, Loss> {
    learn(live, c, coll.comm, rank);
    let mut origin = origin(live, parent);
    if matches!(origin, Origin::Unknown)
        && calls::seen()
        && let Some(ticket) = calls::pending(c.ticket, coll.func, coll.dtype, coll.count, -1)
    {
        origin = Origin::Called(ticket);
    }
    if let Some(i) = of_graph(live, c, &origin) {
        return Ok(i);
    }
    let (kind, counter) = match origin {
        Origin::Replay { .. } => (kind::REPLAY, comm::REPLAYED),
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
    let now = now_ns();
    let timing = timing::of_issue(live, c, &origin, ticket);
    let issue = Issue {
        what: what.word(c.ticket),
        order,
        count,
        root: root_word(coll.root, coll.channels, coll.warps),
        issued_ns: now,
        seq: coll.seq,
        plan: plan_of(live, coll.plan, parent),
        variant: coll.variant,
        timing,
        stream: coll.stream,
        user_tag: coll.user_tag,
    };
    issue.publish(slot, again, &origin);
    if matches!(kind, kind::COLLECTIVE) {
        live.governor.issued(&c, order, coll.channels, timing == u64::from(timed::KERNEL), now);
    }
    Ok(Issued::Recorded(ticket))
}

#[inline(never)]
fn paired(live: &'static Live, c: Comm, parent: u64, rank: i32, p2p: &P2p) -> Result<Issued, Loss> {
    learn(live, c, p2p.comm, rank);
    let mut origin = origin(live, parent);
    if matches!(origin, Origin::Unknown)
        && calls::seen()
        && let Some(ticket) = calls::pending(c.ticket, p2p.func, p2p.dtype, p2p.count, p2p.peer)
    {
        origin = Origin::Called(ticket);
    }
    if let Some(i) = of_graph(live, c, &origin) {
        return Ok(i);
    }
    let is_send = p2p.func != RECV;
    let order = live.pairs.next(c.ticket, p2p.peer, is_send);
    let (ticket, slot, again) = issue_slot(live, &origin)?;
    if order.is_none() {
        live.segment.flaw(Flaw::PairOrder);
    }
    let kind = if is_send { kind::SEND } else { kind::RECV };
    let flags = if order.is_none() { flag::ORDER_UNKNOWN } else { 0 };
    let what = What { kind, func: p2p.func, dtype: p2p.dtype, algo: 0, proto: 0, flags };
    let now = now_ns();
    let timing = timing::of_issue(live, c, &origin, ticket);
    let issue = Issue {
        what: what.word(c.ticket),
        order: order.unwrap_or(op::NO_ORDER),
        count: p2p.count,
        root: root_word(p2p.peer, p2p.channels, 0),
        issued_ns: now,
        seq: op::NO_ORDER,
        plan: plan_of(live, p2p.plan, parent),
        variant: [0; 4],
        timing,
        stream: 0,
        user_tag: p2p.user_tag,
    };
    issue.publish(slot, again, &origin);
    // Ranks share no order of their sends and receives; a pair does.
    if !matches!(origin, Origin::Replay { .. }) {
        live.governor.issued(&c, order.unwrap_or(0), p2p.channels, timing == u64::from(timed::KERNEL), now);
    }
    Ok(Issued::Recorded(ticket))
}

const OP_MASK: u64 = (1 << 56) - 1;

#[inline(always)]
fn kernel(live: &'static Live, parent: u64, ch: u8, gpu_ns: u64) -> Result<u64, Loss> {
    let parent = parent_ticket(live, parent, Kind::Issued)?;
    let (ticket, slot) = live.segment.channel.claim()?;
    slot.set_all(channel::OP, [parent & OP_MASK | u64::from(ch) << 56, gpu_ns, now_ns(), 0, 0]);
    slot.publish();
    Ok(ticket)
}

#[inline]
fn kernel_stop(live: &'static Live, ticket: u64, stamp: Option<u64>) -> Result<(), Loss> {
    let kernel = Held::of(&live.segment.channel, ticket)?;
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
