//! A region as a ring of slots, and the whole segment as five of them.

use crate::codes::{Flaw, Loss, call};
use crate::layout::{self, FORMAT_VERSION, Geometry, HEADER_WORDS, MAGIC, Region, head};
use crate::lines::Lines;
use crate::sync::{self, Claim, Word};

/// One region: slots of `W` words, a power of two of them, that tickets walk round.
#[derive(Debug, Clone, Copy)]
pub struct Ring<'a, const W: usize> {
    slots: &'a [[Word; W]],
    next: Option<&'a Word>,
    shift: u32,
    mask: u64,
}

/// How far a region is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Extent {
    slots: u64,
    next: u64,
}

impl Extent {
    pub(crate) fn of(slots: u64, next: u64) -> Self {
        Extent { slots, next }
    }

    /// How many slots it has.
    pub fn slots(&self) -> u64 {
        self.slots
    }

    /// The next ticket to be given.
    pub fn next(&self) -> u64 {
        self.next
    }
}

impl<'a, const W: usize> Ring<'a, W> {
    /// A ring of `1 << shift` slots over these words; it holds nothing when they are too few.
    pub fn new(words: &'a [Word], next: Option<&'a Word>, shift: u32) -> Self {
        let (slots, _) = words.as_chunks::<W>();
        let mask = (1u64 << (shift & 63)) - 1;
        Ring { slots, next, shift, mask }
    }

    /// How far it is.
    pub fn extent(&self) -> Extent {
        Extent { slots: self.slots(), next: self.next() }
    }

    /// All of its slots.
    pub fn all(&self) -> &'a [[Word; W]] {
        self.slots
    }

    /// How many slots it has.
    #[inline]
    pub fn slots(&self) -> u64 {
        self.mask.wrapping_add(1)
    }

    /// The next ticket to be given.
    #[inline]
    pub fn next(&self) -> u64 {
        self.next.map_or(0, Word::get_first)
    }

    /// The lap of a ticket, for marks.
    #[inline]
    pub fn lap(&self, ticket: u64) -> u64 {
        sync::lap(ticket, self.shift)
    }

    /// The slot of a ticket, whoever has it now.
    #[inline(always)]
    pub fn slot(&self, ticket: u64) -> Option<&'a [Word; W]> {
        self.slots.get((ticket & self.mask) as usize)
    }

    /// The slot of a ticket, if the ticket still has it.
    #[inline(always)]
    pub fn held(&self, ticket: u64) -> Option<&'a [Word; W]> {
        self.slot(ticket).filter(|s| sync::holds(*s, ticket))
    }

    /// Takes the next slot.
    ///
    /// # Errors
    /// [`Loss::NoRoom`] when the ring has no slots, [`Loss::Contended`] when another thread holds the slot.
    #[inline(always)]
    pub fn claim(&self) -> Result<(u64, Claim<'a, W>), Loss> {
        let next = self.next.filter(|_| !self.slots.is_empty()).ok_or(Loss::NoRoom)?;
        let ticket = next.add(1);
        let slot = self.slot(ticket).ok_or(Loss::NoRoom)?;
        sync::claim_new(slot, ticket).map(|c| (ticket, c)).ok_or(Loss::Contended)
    }

    /// Takes the next slot that `free` allows, looking at each slot once at most.
    ///
    /// # Errors
    /// `full` when none is free.
    pub fn claim_free(
        &self,
        full: Loss,
        free: impl Fn(&'a [Word; W]) -> bool,
    ) -> Result<(u64, Claim<'a, W>), Loss> {
        let next = self.next.filter(|_| !self.slots.is_empty()).ok_or(Loss::NoRoom)?;
        for _ in 0..self.slots() {
            let ticket = next.add(1);
            let Some(slot) = self.slot(ticket) else { return Err(Loss::NoRoom) };
            if free(slot)
                && let Some(c) = sync::claim_new(slot, ticket)
            {
                return Ok((ticket, c));
            }
        }
        Err(full)
    }

    /// Takes the slot again that `ticket` still has.
    #[inline(always)]
    pub fn claim_again(&self, ticket: u64) -> Option<Claim<'a, W>> {
        sync::claim_again(self.slot(ticket)?, ticket)
    }
}

/// A segment in memory: the header's words and the five rings.
#[derive(Debug, Clone, Copy)]
pub struct Segment<'a> {
    head: &'a [Word],
    /// Communicators.
    pub comm: Ring<'a, { layout::comm::WORDS }>,
    /// Operations.
    pub op: Ring<'a, { layout::op::WORDS }>,
    /// Groups.
    pub group: Ring<'a, { layout::group::WORDS }>,
    /// Kernels by channel.
    pub channel: Ring<'a, { layout::channel::WORDS }>,
    /// Network transfers.
    pub proxy: Ring<'a, { layout::proxy::WORDS }>,
    /// Bare collectives, by thread.
    pub lines: Lines<'a>,
}

impl<'a> Segment<'a> {
    /// A segment of this geometry over these words. Regions that the words do not reach hold nothing, so a
    /// bare header counts everything as lost for want of room.
    pub fn new(words: &'a [Word], geometry: &Geometry) -> Self {
        fn ring<'a, const W: usize>(words: &'a [Word], geometry: &Geometry, region: Region) -> Ring<'a, W> {
            let start = geometry.start(region);
            let shift = geometry.shift(region);
            let end = start.saturating_add(W << (shift & 63));
            Ring::new(words.get(start..end).unwrap_or(&[]), words.get(region.next()), shift)
        }
        Segment {
            head: words.get(..HEADER_WORDS).unwrap_or(&[]),
            comm: ring(words, geometry, Region::Comm),
            op: ring(words, geometry, Region::Op),
            group: ring(words, geometry, Region::Group),
            channel: ring(words, geometry, Region::Channel),
            proxy: ring(words, geometry, Region::Proxy),
            lines: Lines::new(words, geometry),
        }
    }

    /// Writes geometry and format version. The magic comes last, by [`Segment::open_for_readers`].
    pub fn format(&self, geometry: &Geometry) {
        self.set(head::VERSION, u64::from(FORMAT_VERSION) | ((HEADER_WORDS as u64) << 32));
        self.set(head::BYTES, geometry.bytes());
        for (i, r) in Region::ALL.iter().enumerate() {
            self.set(head::REGIONS + i * 2, geometry.start(*r) as u64 * 8);
            self.set(head::REGIONS + i * 2 + 1, r.words() as u64 | (1u64 << (32 + geometry.shift(*r))));
        }
        let lines = geometry.lines();
        let (at, shape) = match lines.rings() {
            0 => (0, 0),
            rings => (geometry.lines_start() as u64 * 8, 1 << lines.shift() | u64::from(rings) << 32),
        };
        self.set(head::LINES, at);
        self.set(head::LINES_SHAPE, shape);
    }

    /// Stores the magic: from here on readers accept the segment.
    pub fn open_for_readers(&self) {
        if let Some(w) = self.head.get(head::MAGIC) {
            w.set_last(MAGIC); // SYNC publish
        }
    }

    /// Writes a header word.
    #[inline]
    pub fn set(&self, i: usize, value: u64) {
        if let Some(w) = self.head.get(i) {
            w.set(value);
        }
    }

    /// A header word.
    pub fn word(&self, i: usize) -> Option<&'a Word> {
        self.head.get(i)
    }

    /// Reads a header word.
    #[inline]
    pub fn get(&self, i: usize) -> u64 {
        self.head.get(i).map_or(0, Word::get)
    }

    /// Adds to a header word and returns what it was before.
    #[inline]
    pub fn add(&self, i: usize, n: u64) -> u64 {
        self.head.get(i).map_or(0, |w| w.add(n))
    }

    /// Writes text into `count` header words, cut at a character boundary where it is too long.
    pub fn set_text(&self, at: usize, count: usize, text: &[u8]) {
        for i in 0..count {
            self.set(at.wrapping_add(i), text_word(text, i, count));
        }
    }

    /// Books one callback: it left a record, or was lost for a reason.
    #[inline]
    pub fn book(&self, call: usize, outcome: Result<(), Loss>) {
        let call = if call < call::COUNT { call } else { call::START_UNKNOWN };
        match outcome {
            Ok(()) => self.add(head::RECORDED + call, 1),
            Err(loss) => {
                self.add(head::REFUSED + call, 1);
                self.add(head::LOST + loss as usize, 1)
            }
        };
    }

    /// Counts a flaw in a record.
    #[inline]
    pub fn flaw(&self, flaw: Flaw) {
        self.add(head::FLAWS + flaw as usize, 1);
    }
}

/// Word `i` of `count` words that hold `text`, NUL-padded, with at least one NUL at the end.
pub fn text_word(text: &[u8], i: usize, count: usize) -> u64 {
    let room = count.saturating_mul(8).saturating_sub(1);
    let mut bytes = [0u8; 8];
    for (k, b) in bytes.iter_mut().enumerate() {
        let at = i.wrapping_mul(8).wrapping_add(k);
        if at < room
            && let Some(t) = text.get(at)
        {
            *b = *t;
        }
    }
    u64::from_le_bytes(bytes)
}
