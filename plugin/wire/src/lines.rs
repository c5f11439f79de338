//! Lines: operations in a cache line each, in rings of which every one belongs to one thread.
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
    rings: usize,
    heads: &'a [Word],
    head_words: usize,
    lines: &'a [Line],
    shift: u32,
}

impl<'a> Lines<'a> {
    /// The rings of this geometry in the words of a whole segment; none where the words do not reach so far.
    pub fn new(words: &'a [Word], geometry: &Geometry) -> Self {
        let start = geometry.lines_start();
        let shape = geometry.lines();
        let words = words.get(start..start.saturating_add(shape.words())).unwrap_or(&[]);
        let (rings, head_words) = (shape.rings() as usize, shape.head_words());
        let (heads, lines) = words.split_at_checked(rings * head_words).unwrap_or((&[], &[]));
        let rings = if heads.is_empty() { 0 } else { rings };
        Lines { rings, heads, head_words, lines: lines.as_chunks().0, shift: shape.shift() }
    }

    /// How many rings there are.
    pub fn rings(&self) -> usize {
        self.rings
    }

    fn head(&self, number: usize) -> Option<&'a [Word]> {
        let start = number.checked_mul(self.head_words)?;
        self.heads.get(start..start.checked_add(self.head_words)?)
    }

    /// Their heads, for a writer: as this version has them.
    pub fn heads(&self) -> &'a [Head] {
        if self.head_words == lines::WORDS { self.heads.as_chunks().0 } else { &[] }
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
        Some(LineRing { head: self.head(number)?, lines, shift: self.shift })
    }

    /// A word of every head, added up; 0 for one that heads of this version do not have.
    pub fn sum(&self, i: usize) -> u64 {
        let words = (0..self.rings).filter_map(|n| self.head(n)?.get(i));
        words.fold(0, |sum, w| sum.wrapping_add(w.get()))
    }
}

/// One ring.
#[derive(Debug, Clone, Copy)]
pub struct LineRing<'a> {
    head: &'a [Word],
    lines: &'a [Line],
    shift: u32,
}

/// The record of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call {
    /// See [`line::WHAT`].
    pub what: u64,
    /// See [`line::COUNT`].
    pub count: u64,
    /// Host monotonic ns.
    pub called_ns: u64,
    /// CUDA stream.
    pub stream: u64,
}

/// The record of an issue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Issue {
    /// NCCL's sequence number, or the peer.
    pub seq: u64,
    /// Issue order.
    pub order: u64,
    /// See [`IssueBits::word`].
    pub issue: u64,
}

/// The facts in the last mark of an issue.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct IssueBits {
    /// Algorithm and protocol; codes below 16.
    pub algo: u8,
    /// See `algo`.
    pub proto: u8,
    /// Channels.
    pub channels: u8,
    /// Warps.
    pub warps: u8,
    /// See [`crate::codes::flag`].
    pub flags: u8,
    /// See [`crate::codes::timed`]; below 16.
    pub timed: u8,
    /// The distance from the line to its launch, in tickets; 0 for one that was launched alone within its call.
    pub launch: u64,
}

impl IssueBits {
    /// In place of the distance of a launch that is not known, or too far.
    pub const NO_LAUNCH: u64 = 0xfff;

    /// The 48 bits of the mark: algo, proto (4 bits both), channels, warps, flags (8), timed (4), launch (12).
    #[inline(always)]
    pub const fn word(self) -> u64 {
        let launch = if self.launch < Self::NO_LAUNCH { self.launch } else { Self::NO_LAUNCH };
        (self.algo & 15) as u64
            | ((self.proto & 15) as u64) << 4
            | (self.channels as u64) << 8
            | (self.warps as u64) << 16
            | (self.flags as u64) << 24
            | ((self.timed & 15) as u64) << 32
            | launch << 36
    }

    /// The bits of a mark.
    pub const fn of(word: u64) -> Self {
        IssueBits {
            algo: (word & 15) as u8,
            proto: (word >> 4 & 15) as u8,
            channels: (word >> 8 & 0xff) as u8,
            warps: (word >> 16 & 0xff) as u8,
            flags: (word >> 24 & 0xff) as u8,
            timed: (word >> 32 & 15) as u8,
            launch: word >> 36 & Self::NO_LAUNCH,
        }
    }

    /// The same of version 3, whose lines have no launches.
    pub const fn of_version_3(word: u64) -> Self {
        let [algo, proto, channels, warps, flags, timed, ..] = word.to_le_bytes();
        IssueBits { algo, proto, channels, warps, flags, timed, launch: 0 }
    }
}

impl<'a> LineRing<'a> {
    /// A ring with this head and `1 << shift` lines.
    pub fn new(head: &'a Head, lines: &'a [Line], shift: u32) -> Self {
        LineRing { head, lines, shift }
    }

    /// The next ticket to be given.
    pub fn next(&self) -> u64 {
        self.head.first().map_or(0, Word::get_first) // SYNC publish
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

/// Records a call or a launch in the line of the next ticket, which is given with it; for the ring's thread alone.
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

/// Records a launch in the same way. Nothing is issued in its line.
#[inline(always)]
pub fn launch(head: &Head, line: &Line, ticket: u64, launch: &Call) {
    call(head, line, ticket, launch);
    let [.., issue] = line;
    issue.set(TAKEN);
}

/// Records the issue of a call in its line, which is of this lap; for the ring's thread alone.
#[inline(always)]
pub fn issue(line: &Line, lap: u64, issue: &Issue) {
    let [_, _, _, _, _, seq, order, last] = line;
    sync::mark_put(seq, lap, issue.seq);
    sync::mark_put(order, lap, issue.order);
    sync::mark_put(last, lap, issue.issue);
}

/// True for a line whose call was not issued.
#[inline(always)]
pub fn is_pending(line: &Line) -> bool {
    let [.., issue] = line;
    issue.get() == 0
}

/// A call that was taken to be issued: no lap is 0, so that it is no mark.
const TAKEN: u64 = 1 << 16;

/// Takes a call that is to be issued on another thread than its ring's. True for one thread alone.
pub fn take_call(line: &Line) -> bool {
    let [.., issue] = line;
    issue.replace(0, TAKEN)
}
