//! How far a segment's rings were read, and what of them has to be looked at again.
//!
//! A look reads in turns of a few operations with their channels and transfers, so that what is read is told while it is
//! at hand: all that is new at once would have left the processor's caches by then.

use super::decode;
use super::line_rings::LineRings;
use super::window::{Open, Window};
use crate::model::{BEYOND_MEMORY, ChannelStamp, OPERATIONS, Timing};
use ringwatch_wire::codes::{flag, kind, timed};
use ringwatch_wire::layout::{Region, head};
use ringwatch_wire::reader::{Found, OpSlot, Reader};
use ringwatch_wire::ring::Extent;
use std::ops::Range;

/// Handle kind of an issued operation, in bits 44 to 47 of a parent's number; see the plugin's handles.
const ISSUED_KIND: u64 = 4;
const VALUE_MASK: u64 = (1 << 44) - 1;

/// Tickets of channels or transfers that may be looked at again for each operation that may be held.
const TICKETS_AN_OPERATION: usize = 8;
/// New operations that are read in one turn.
const TURN: u64 = 64;
/// Operations kept after they are settled.
pub(super) const RECENT: u64 = 1024;
/// An operation this many tickets back is not looked at again: a host runs ahead of its GPU by no more than
/// CUDA's queue of about a thousand launches, so nothing new is to be expected of it.
const SETTLED_TICKETS: u64 = 4096;

/// Tickets of one ring: how far it was read and what has to be looked at again.
#[derive(Debug, Default)]
pub(super) struct Cursor {
    /// Overwritten tickets count as lost: from the first look on, or from the process's beginning where that was seen.
    counts: bool,
    pub(super) next: u64,
    /// The ticket that this poll reads up to.
    pub(super) until: u64,
    /// The tickets that the next poll looks at again.
    open: Vec<u64>,
    /// The tickets that this poll has yet to look at again.
    pub(super) again: Vec<u64>,
    pub(super) missed: u64,
    /// How much of the ring was new at the last look; 1 is all of it.
    pub(super) fill: f64,
}

impl Cursor {
    /// A ring of which nothing was read yet, of a process whose beginning was seen or not.
    pub(super) fn of(is_new: bool) -> Self {
        Cursor { counts: is_new, ..Cursor::default() }
    }

    /// Begins a look: at the open tickets and the new ones. Those that were overwritten unread are counted.
    pub(super) fn begin(&mut self, ring: Extent) {
        let (head, slots) = (ring.next(), ring.slots());
        let first = head.saturating_sub(slots);
        if !self.counts {
            self.counts = true;
            // The oldest slots of a busy ring are overwritten while they are read.
            self.next = if first > 0 { first + slots / 8 } else { 0 };
        }
        if first > self.next {
            self.missed += first - self.next;
            self.next = first;
        }
        self.fill = head.saturating_sub(self.next) as f64 / slots.max(1) as f64;
        self.until = self.next.max(head);
        // What the look before did not come to is looked at with the rest.
        self.again.append(&mut self.open);
        self.again.sort_unstable();
    }

    /// Gives the oldest tickets up that are to be looked at again, where they are more than this.
    pub(super) fn shed(&mut self, most: usize) {
        let surplus = self.open.len().saturating_sub(most);
        if surplus > 0 {
            self.missed += surplus as u64;
            self.open.drain(..surplus);
        }
    }

    /// Looks at a ticket again at the next look where that is asked for.
    pub(super) fn keep(&mut self, ticket: u64, open: bool) {
        if open {
            self.open.push(ticket);
        }
    }

    /// Looks at what is open, and at what is new, up to what `read` says is for a later turn.
    fn turn(&mut self, mut read: impl FnMut(&mut Self, u64) -> Read) {
        let mut again = std::mem::take(&mut self.again);
        again.retain(|ticket| match read(self, *ticket) {
            Read::LaterTurn => true,
            done => {
                self.keep(*ticket, done == Read::Open);
                false
            }
        });
        self.again = again;
        while self.next < self.until {
            let ticket = self.next;
            match read(self, ticket) {
                Read::LaterTurn => break,
                done => self.keep(ticket, done == Read::Open),
            }
            self.next += 1;
        }
    }
}

/// The outcome of reading a ticket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Read {
    /// It needs no other look.
    Done,
    /// The next look has to look at it again.
    Open,
    /// It belongs to an operation that this look has not come to.
    LaterTurn,
}

/// The rings of a segment.
#[derive(Debug, Default)]
pub(super) struct Rings {
    op: Cursor,
    channel: Cursor,
    proxy: Cursor,
    lines: LineRings,
    /// Operations that were let go for want of memory.
    shed: u64,
}

impl Rings {
    /// The rings of a process that began while it could be seen, or of one that ran before.
    pub(super) fn of(is_new: bool) -> Self {
        let ring = || Cursor::of(is_new);
        Rings { op: ring(), channel: ring(), proxy: ring(), lines: LineRings::of(is_new), shed: 0 }
    }

    /// Begins a look at all that is there by now.
    pub(super) fn begin(&mut self, reader: &Reader<'_>) {
        // In this order: what is found of an operation was written after it.
        self.op.begin(reader.ring(Region::Op));
        self.channel.begin(reader.ring(Region::Channel));
        self.proxy.begin(reader.ring(Region::Proxy));
        self.lines.begin(reader);
    }

    /// The rings of lines.
    pub(super) fn lines(&mut self) -> &mut LineRings {
        &mut self.lines
    }

    /// Reads some of it; true when there is more. Where transfers of the network came, all at once: nothing orders those of
    /// several communicators, and an operation is not whole without its own.
    ///
    /// No more than `share` operations are held for what is still to come of them.
    pub(super) fn turn(&mut self, reader: &Reader<'_>, ops: &mut Window, share: usize) -> bool {
        let networked = self.proxy.next < self.proxy.until || !self.proxy.again.is_empty();
        let most = if networked { u64::MAX } else { self.op.next.saturating_add(TURN) };
        self.op.turn(
            |op, ticket| {
                if ticket >= most { Read::LaterTurn } else { read_op(op, reader, ops, ticket) }
            },
        );
        let read = Seen {
            recent: self.op.next.saturating_sub(RECENT)..self.op.next,
            last: self.op.next == self.op.until,
        };
        self.channel.turn(|channel, ticket| read_channel(channel, reader, ops, &read, ticket));
        let nonce = reader.header(head::NONCE) & 0xffff;
        self.proxy.turn(|proxy, ticket| read_transfer(proxy, reader, ops, &read, nonce, ticket));
        let before = self.op.missed;
        self.op.shed(share);
        self.shed += ops.shed(share) + self.op.missed - before;
        self.op.missed = before;
        self.channel.shed(share.saturating_mul(TICKETS_AN_OPERATION));
        self.proxy.shed(share.saturating_mul(TICKETS_AN_OPERATION));
        self.lines.shed(share);
        !read.last
    }

    /// The first ticket of an operation that was not read yet.
    pub(super) fn next_op(&self) -> u64 {
        self.op.next
    }

    /// True where an operation is looked at again.
    pub(super) fn is_open(&self, op: u64) -> bool {
        self.op.open.binary_search(&op).is_ok()
    }

    /// How much of the fullest one was new at the last look.
    pub(super) fn fill(&self) -> f64 {
        [&self.op, &self.channel, &self.proxy].iter().fold(self.lines.fill(), |most, c| most.max(c.fill))
    }

    /// Records that were read so far, or overwritten before that.
    pub(super) fn passed(&self) -> u64 {
        // A file may name any ticket.
        let rings = self.op.next.saturating_add(self.channel.next).saturating_add(self.proxy.next);
        rings.saturating_add(self.lines.passed())
    }

    /// The same at the end of this look.
    pub(super) fn until(&self) -> u64 {
        let rings = self.op.until.saturating_add(self.channel.until).saturating_add(self.proxy.until);
        rings.saturating_add(self.lines.until())
    }

    /// Records that were overwritten before they were read, or let go, by kind.
    pub(super) fn missed(&self) -> [(&'static str, u64); 4] {
        [
            (BEYOND_MEMORY, self.shed),
            (OPERATIONS, self.op.missed.saturating_add(self.lines.missed())),
            ("channel stamps", self.channel.missed),
            ("network transfers", self.proxy.missed),
        ]
    }
}

/// The operations that were read by now.
struct Seen {
    /// The newest ones: they are read again for what comes late.
    recent: Range<u64>,
    /// True where this look reads no more.
    last: bool,
}

impl Seen {
    /// Decides about a record whose operation is not held.
    fn without(&self, op: u64) -> Read {
        match op >= self.recent.end {
            false => Read::Done,
            true if self.last => Read::Open,
            true => Read::LaterTurn,
        }
    }
}

fn read_op(ring: &mut Cursor, reader: &Reader<'_>, ops: &mut Window, ticket: u64) -> Read {
    match reader.op(ticket) {
        Found::Is(slot) => {
            let old = slot.issued_ns.is_some() && ticket + SETTLED_TICKETS < ring.until;
            let open = !old && !settled(&slot);
            ops.slot(slot);
            if open { Read::Open } else { Read::Done }
        }
        Found::NotYet => Read::Open,
        Found::Overwritten => {
            ring.missed += u64::from(!ops.contains(ticket));
            Read::Done
        }
    }
}

fn read_channel(ring: &mut Cursor, reader: &Reader<'_>, ops: &mut Window, read: &Seen, ticket: u64) -> Read {
    match reader.channel(ticket) {
        Found::Is(slot) => {
            let stamp = decode::stamp(&slot);
            let held = ops.stamp(slot.op, ticket, stamp)
                || hold_again(reader, ops, &read.recent, slot.op, true) && ops.stamp(slot.op, ticket, stamp);
            // The duration is written a moment before the stop; this look may fall between.
            let finished =
                stamp.stop_seen_ns.is_some() && (stamp.stop_gpu_ns.is_some() || stamp.start_gpu_ns.is_none());
            match held {
                true if finished => Read::Done,
                true => Read::Open,
                false => read.without(slot.op),
            }
        }
        Found::NotYet => Read::Open,
        Found::Overwritten => {
            ring.missed += 1;
            Read::Done
        }
    }
}

fn read_transfer(
    ring: &mut Cursor,
    reader: &Reader<'_>,
    ops: &mut Window,
    read: &Seen,
    nonce: u64,
    ticket: u64,
) -> Read {
    match reader.proxy(ticket) {
        Found::Is(slot) => {
            let ours = slot.parent >> 48 == nonce && slot.parent >> 44 & 0xf == ISSUED_KIND;
            if slot.foreign || !ours {
                return Read::Done;
            }
            let net = decode::transfer(&slot);
            let (moves, op) = (net.stop_ns.is_none(), slot.parent & VALUE_MASK);
            if !ops.contains(op) {
                hold_again(reader, ops, &read.recent, op, false);
            }
            match ops.transfer(op, ticket, net) {
                true if moves => Read::Open,
                true => Read::Done,
                false => read.without(op),
            }
        }
        Found::NotYet => Read::Open,
        Found::Overwritten => {
            ring.missed += 1;
            Read::Done
        }
    }
}

/// Holds an operation again that was let go, for what came after all: a stamp where it was not to have any, not where it
/// has all. True when it is held.
fn hold_again(reader: &Reader<'_>, ops: &mut Window, recent: &Range<u64>, ticket: u64, stamp: bool) -> bool {
    if recent.contains(&ticket)
        && let Found::Is(slot) = reader.op(ticket)
        && !(stamp && decode::timing(slot.timed) == Timing::Kernel)
    {
        ops.slot(slot);
        return true;
    }
    false
}

/// True when nothing in the operation's own slot can change any more.
fn settled(slot: &OpSlot) -> bool {
    if slot.flags & flag::CAPTURED != 0 {
        return true;
    }
    // Where the call was seen, its return will be.
    if slot.preloaded && slot.returned.is_none() {
        return false;
    }
    if slot.kind == kind::CALL {
        return true;
    }
    let channels = u16::from(slot.channels);
    slot.issued_ns.is_some()
        && match slot.timed {
            // Version 1: the operation counts its channels.
            timed::UNKNOWN => channels > 0 && slot.stopped >= channels,
            timed::EVENTS | timed::LAUNCH => slot.event_ns.is_some(),
            _ => true,
        }
}

/// True when nothing more is expected of an operation.
pub(super) fn whole(open: &Open) -> bool {
    if !settled(&open.slot) || open.net.values().iter().any(|n| n.stop_ns.is_none()) {
        return false;
    }
    if open.slot.kind == kind::CALL {
        return true;
    }
    match decode::timing(open.slot.timed) {
        Timing::Kernel => {
            // After graphs a channel may bring another operation's stamps before its own.
            let stamps = open.stamps.values();
            let stopped = |s: &ChannelStamp| s.stop_gpu_ns.is_some() && s.stop_seen_ns.is_some();
            let all = usize::from(open.slot.channels);
            let mut channels = [0u64; 4];
            let differs = |s: &ChannelStamp| {
                let (word, bit) = (&mut channels[usize::from(s.channel >> 6)], 1 << (s.channel & 63));
                let new = *word & bit == 0;
                *word |= bit;
                new
            };
            open.slot.kind != kind::REPLAY
                && all > 0
                && stamps.len() == all
                && stamps.iter().all(stopped)
                && stamps.iter().all(differs)
        }
        Timing::Not(_) | Timing::Events | Timing::Launch => open.stamps.values().is_empty(),
        Timing::Unknown => false,
    }
}
