//! Operations that are issued: called ones, and those that nobody was seen to call.

use super::operation::{Record, What, root_word};
use super::{Started, parent_ticket, word};
use crate::bare::{self, Wanted};
use crate::communicator::{Comm, learn};
use crate::event::{Coll, P2p};
use crate::governor;
use crate::handle::{Handle, Kind, group};
use crate::live::Live;
use crate::preloaded;
use crate::runtime::clock::now_ns;
use crate::runtime::names::RECV;
use crate::timing::{self, Origin};
use ringwatch_wire::codes::{Flaw, Loss, UNKNOWN, flag, kind, timed};
use ringwatch_wire::layout::{comm, op};
use ringwatch_wire::lines::IssueBits;
use ringwatch_wire::sync::Claim;

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

/// The facts of an operation's issue.
struct SlotIssue {
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

impl SlotIssue {
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
pub(super) enum Issued {
    /// And has this ticket.
    Recorded(u64),
    /// In the line of its call: NCCL needs no handle of it.
    InLine,
    /// Into a graph: nothing runs. This is the ticket of its call.
    Captured(u64),
    /// And is not wanted.
    Unwanted,
}

impl Issued {
    /// Its handle; `one` is what it counts in its communicator's books, 0 for nothing.
    #[inline(always)]
    pub(super) fn started(
        self,
        live: &'static Live,
        c: &Comm,
        one: u64,
        pack: impl Fn(u64) -> u64,
    ) -> Started {
        let handle = match self {
            Issued::Recorded(t) => pack(t),
            Issued::InLine => 0,
            Issued::Captured(t) => return Started::quiet(pack(t)),
            Issued::Unwanted => return Started::quiet(0),
        };
        if one == 0 {
            return Started::booked(handle);
        }
        c.book(&live.segment, comm::ISSUES, one);
        Started::quiet(handle)
    }
}

/// Decides about an operation that a graph's capture brought; `None` where it is recorded like others.
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

fn flags_of(coll: &Coll) -> u8 {
    [
        (coll.in_place, flag::IN_PLACE),
        (coll.copy_engine, flag::COPY_ENGINE),
        (coll.symmetric, flag::SYMMETRIC),
    ]
    .iter()
    .fold(0, |flags, (set, bit)| if *set { flags | bit } else { flags })
}

/// Records the issue of a call that is in a line, see [`crate::bare`].
#[inline(never)]
fn issued_in_line(live: &'static Live, c: Comm, coll: &Coll) -> Option<Issued> {
    let context = Handle { kind: Kind::Comm, value: c.ticket }.pack(live.nonce);
    let wanted = Wanted::collective(c.ticket, coll.func, coll.dtype, coll.count, coll.root);
    let called = live.bare.take_call(context).or_else(|| live.bare.take_call_of_group(&wanted))?;
    let order = c.slot.get(comm::ISSUED).map_or(op::NO_ORDER, |w| w.add(1));
    let bits = IssueBits {
        algo: coll.algo,
        proto: coll.proto,
        channels: coll.channels,
        warps: coll.warps,
        flags: flags_of(coll),
        timed: live.governor.why_not(false),
        launch: 0,
    };
    called.issue(coll.seq, order, bits);
    Some(Issued::InLine)
}

/// The same for a send or receive.
#[inline(never)]
fn paired_in_line(live: &'static Live, c: Comm, p2p: &P2p) -> Option<Issued> {
    let wanted = Wanted::pair(c.ticket, p2p.func, p2p.dtype, p2p.count);
    let called = live.bare.take_call_of_group(&wanted)?;
    let order = live.pairs.next(c.ticket, p2p.peer, p2p.func != RECV);
    let (flags, timed) = (bare::order_flags(live, order), live.governor.why_not(false));
    let bits = IssueBits { channels: p2p.channels, flags, timed, ..IssueBits::default() };
    called.issue(u64::from(p2p.peer as u32), order.unwrap_or(op::NO_ORDER), bits);
    Some(Issued::InLine)
}

#[inline(always)]
pub(super) fn issued(
    live: &'static Live,
    c: Comm,
    parent: u64,
    rank: i32,
    coll: &Coll,
) -> Result<Issued, Loss> {
    learn(&live.segment, c, coll.comm, rank);
    if parent == 0
        && let Some(issued) = issued_in_line(live, c, coll)
    {
        return Ok(issued);
    }
    let mut origin = origin(live, parent);
    if matches!(origin, Origin::Unknown)
        && preloaded::seen()
        && let Some(ticket) = preloaded::pending(c.ticket, coll.func, coll.dtype, coll.count, -1)
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
    let flags = flags_of(coll);
    let what = What { kind, func: coll.func, dtype, algo: coll.algo, proto: coll.proto, flags };
    let now = now_ns();
    let timing = timing::of_issue(live, c, &origin, ticket);
    let issue = SlotIssue {
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
        let number = (governor::COLLECTIVES, order);
        live.governor.issued(&c, number, coll.channels, timing == u64::from(timed::KERNEL), now);
    }
    Ok(Issued::Recorded(ticket))
}

#[inline(never)]
pub(super) fn paired(
    live: &'static Live,
    c: Comm,
    parent: u64,
    rank: i32,
    p2p: &P2p,
) -> Result<Issued, Loss> {
    learn(&live.segment, c, p2p.comm, rank);
    if p2p.peer == rank {
        // NCCL counts it on the GPU alone.
        live.governor.stop_switching();
    }
    if parent == 0
        && let Some(issued) = paired_in_line(live, c, p2p)
    {
        return Ok(issued);
    }
    let mut origin = origin(live, parent);
    if matches!(origin, Origin::Unknown)
        && preloaded::seen()
        && let Some(ticket) = preloaded::pending(c.ticket, p2p.func, p2p.dtype, p2p.count, p2p.peer)
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
    let issue = SlotIssue {
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
        let number = (governor::TRANSFERS, order.unwrap_or(0));
        live.governor.issued(&c, number, p2p.channels, timing == u64::from(timed::KERNEL), now);
    }
    Ok(Issued::Recorded(ticket))
}
