//! Lines: bare collectives in a cache line each, in rings of which every one belongs to one thread.
//!
//! A ring's thread is its only writer, so it takes and publishes lines with plain stores. A reader sees the same protocol
//! as in any slot. The marks of an issue are the thread's as well.

use crate::layout::{Geometry, line, lines};
use crate::sync::{self, Word};

/// The head of a ring.
pub type Head = [Word; lines::WORDS];
/// A line.
pub type Line = [Word; line::WORDS];

/// The rings of a segment.
#[derive(Debug, Clone, Copy)]
pub struct Lines<'a> {
    heads: &'a [Head],
    lines: &'a [Line],
    shift: u32,
}

impl<'a> Lines<'a> {
    /// The rings of this geometry in the words of a whole segment; none where the words do not reach so far.
    pub fn new(words: &'a [Word], geometry: &Geometry) -> Self {
        let start = geometry.lines_start();
        let shape = geometry.lines();
        let words = words.get(start..start.saturating_add(shape.words())).unwrap_or(&[]);
        let (heads, lines) =
            words.split_at_checked(shape.rings() as usize * lines::WORDS).unwrap_or((&[], &[]));
        Lines { heads: heads.as_chunks().0, lines: lines.as_chunks().0, shift: shape.shift() }
    }

    /// How many rings there are.
    pub fn rings(&self) -> usize {
        self.heads.len()
    }

    /// Their heads.
    pub fn heads(&self) -> &'a [Head] {
        self.heads
    }

    /// The lines of all rings, one ring's after the other's.
    pub fn all(&self) -> &'a [Line] {
        self.lines
    }

    /// The power of two of a ring's lines.
    pub fn shift(&self) -> u32 {
        self.shift
    }

    /// One ring.
    pub fn ring(&self, number: usize) -> Option<LineRing<'a>> {
        let slots = 1usize << (self.shift & 63);
        let start = number.checked_mul(slots)?;
        let lines = self.lines.get(start..start.checked_add(slots)?)?;
        Some(LineRing { head: self.heads.get(number)?, lines, shift: self.shift })
    }

    /// A word of every head, added up.
    pub fn sum(&self, i: usize) -> u64 {
        self.heads.iter().filter_map(|h| h.get(i)).fold(0, |sum, w| sum.wrapping_add(w.get()))
    }
}

/// One ring.
#[derive(Debug, Clone, Copy)]
pub struct LineRing<'a> {
    head: &'a Head,
    lines: &'a [Line],
    shift: u32,
}

/// What a call is recorded as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call {
    /// See [`line::WHAT`].
    pub what: u64,
    /// Elements.
    pub count: u64,
    /// Host monotonic ns.
    pub called_ns: u64,
    /// CUDA stream.
    pub stream: u64,
}

/// What an issue is recorded as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Issue {
    /// NCCL's sequence number.
    pub seq: u64,
    /// Issue order.
    pub order: u64,
    /// See [`line::ISSUE`].
    pub issue: u64,
}

impl<'a> LineRing<'a> {
    /// A ring with this head and `1 << shift` lines.
    pub fn new(head: &'a Head, lines: &'a [Line], shift: u32) -> Self {
        LineRing { head, lines, shift }
    }

    /// Its head.
    pub fn head(&self) -> &'a Head {
        self.head
    }

    /// The next ticket to be given.
    pub fn next(&self) -> u64 {
        let [next, ..] = self.head;
        next.get_first() // SYNC publish
    }

    /// How many lines it has.
    pub fn slots(&self) -> u64 {
        1 << (self.shift & 63)
    }

    /// The line of a ticket, whichever ticket has it now.
    pub fn line(&self, ticket: u64) -> Option<&'a Line> {
        self.lines.get((ticket & self.slots().wrapping_sub(1)) as usize)
    }

    /// The lap of a ticket, for marks.
    pub fn lap(&self, ticket: u64) -> u64 {
        sync::lap(ticket, self.shift)
    }
}

/// Gives a ring to a thread, if no other has it. True when the thread has it now.
pub fn take(head: &Head, thread: u64) -> bool {
    let [_, _, _, owner, ..] = head;
    owner.get() == thread || owner.replace(0, thread)
}

/// Records a call in the line of the next ticket, which is given with it; for the ring's thread alone.
#[inline(always)]
pub fn call(head: &Head, line: &Line, ticket: u64, call: &Call) {
    let stamp = sync::begin_alone(line, ticket);
    let [_, what, count, called, stream, .., issue] = line;
    // Laps repeat: an old mark must not be taken for this call's.
    issue.set(0);
    what.set(call.what);
    count.set(call.count);
    called.set(call.called_ns);
    stream.set(call.stream);
    sync::publish_alone(line, stamp);
    let [next, ..] = head;
    next.set_last(ticket.wrapping_add(1)); // SYNC publish
}

/// Records the issue of a call in its line, which is of this lap; for the ring's thread alone.
#[inline(always)]
pub fn issue(line: &Line, lap: u64, issue: &Issue) {
    let [_, _, _, _, _, seq, order, last] = line;
    sync::mark_put(seq, lap, issue.seq);
    sync::mark_put(order, lap, issue.order);
    sync::mark_put(last, lap, issue.issue);
}
