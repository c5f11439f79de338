//! How far a segment's rings of lines were read. Lines have neither stamps nor transfers: each is told as it is read.

use super::rings::Cursor;
use ringwatch_wire::reader::{Found, OpSlot, Reader};

/// The rings of a segment.
#[derive(Debug, Default)]
pub(super) struct LineRings {
    rings: Vec<LineRing>,
    is_new: bool,
}

/// One ring, and the line of it that is next to be told.
#[derive(Debug)]
struct LineRing {
    cursor: Cursor,
    first: Option<(u64, OpSlot)>,
}

impl LineRings {
    /// Of a process whose beginning was seen or not.
    pub(super) fn of(is_new: bool) -> Self {
        LineRings { rings: Vec::new(), is_new }
    }

    /// Begins a look at all that is there by now.
    pub(super) fn begin(&mut self, reader: &Reader<'_>) {
        let is_new = self.is_new;
        self.rings.resize_with(reader.line_rings(), || LineRing { cursor: Cursor::of(is_new), first: None });
        for (number, ring) in self.rings.iter_mut().enumerate() {
            ring.cursor.begin(reader.line_ring(number));
        }
    }

    /// Tells what was called until `until_ns`, the oldest first. `tell` returns false for a line that it cannot take in
    /// this look.
    pub(super) fn tell(&mut self, reader: &Reader<'_>, until_ns: u64, mut tell: impl FnMut(&OpSlot) -> bool) {
        for (number, ring) in self.rings.iter_mut().enumerate() {
            ring.look_again(reader, number, &mut tell);
        }
        loop {
            let calls = self.rings.iter_mut().enumerate().filter_map(|(number, ring)| {
                let called_ns = ring.called_ns(reader, number)?;
                (called_ns <= until_ns).then_some((called_ns, number))
            });
            let Some((_, oldest)) = calls.min() else { return };
            self.rings[oldest].tell_first(&mut tell);
        }
    }

    /// How much of the fullest one was new at the last look.
    pub(super) fn fill(&self) -> f64 {
        self.rings.iter().fold(0.0, |most, r| most.max(r.cursor.fill))
    }

    /// Lines that were read so far, or overwritten before that.
    pub(super) fn passed(&self) -> u64 {
        self.rings.iter().fold(0, |sum, r| sum.saturating_add(r.cursor.next))
    }

    /// The same at the end of this look.
    pub(super) fn until(&self) -> u64 {
        self.rings.iter().fold(0, |sum, r| sum.saturating_add(r.cursor.until))
    }

    /// Lines that were overwritten before they were read.
    pub(super) fn missed(&self) -> u64 {
        self.rings.iter().fold(0, |sum, r| sum.saturating_add(r.cursor.missed))
    }

    /// Gives up the oldest lines that are to be looked at again, where they are more than this.
    pub(super) fn shed(&mut self, most: usize) {
        self.rings.iter_mut().for_each(|r| r.cursor.shed(most));
    }
}

impl LineRing {
    /// Looks again at what was not issued before. What was overwritten since was told as far as it was known.
    fn look_again(&mut self, reader: &Reader<'_>, number: usize, tell: &mut impl FnMut(&OpSlot) -> bool) {
        for ticket in std::mem::take(&mut self.cursor.again) {
            if let Found::Is(Some(slot)) = reader.line(number, ticket) {
                self.tell(ticket, &slot, tell);
            }
        }
    }

    /// When the next line that was not told yet was called.
    fn called_ns(&mut self, reader: &Reader<'_>, number: usize) -> Option<u64> {
        while self.first.is_none() && self.cursor.next < self.cursor.until {
            let ticket = self.cursor.next;
            self.cursor.next += 1;
            match reader.line(number, ticket) {
                Found::Is(Some(slot)) => self.first = Some((ticket, slot)),
                // A launch is told by its operations.
                Found::Is(None) => {}
                Found::NotYet => self.cursor.keep(ticket, true),
                Found::Overwritten => self.cursor.missed += 1,
            }
        }
        self.first.as_ref().map(|(_, slot)| slot.called_ns.unwrap_or(0))
    }

    fn tell_first(&mut self, tell: &mut impl FnMut(&OpSlot) -> bool) {
        if let Some((ticket, slot)) = self.first.take() {
            self.tell(ticket, &slot, tell);
        }
    }

    fn tell(&mut self, ticket: u64, slot: &OpSlot, tell: &mut impl FnMut(&OpSlot) -> bool) {
        let taken = tell(slot);
        self.cursor.keep(ticket, !taken || slot.issued_ns.is_none());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringwatch_wire::layout::{Geometry, LineRings as Shape, line};
    use ringwatch_wire::lines::{self, Call, Head, Issue, IssueBits, Line};
    use ringwatch_wire::ring::Segment;
    use ringwatch_wire::sync::Word;

    /// Two rings of four lines.
    struct Written {
        words: Vec<Word>,
        geometry: Geometry,
    }

    impl Written {
        fn new() -> Self {
            let geometry = Geometry::new([2, 4, 4, 6, 4]).with_lines(Shape::new(2, 2));
            let words: Vec<Word> = (0..geometry.bytes() / 8).map(|_| Word::new(0)).collect();
            let segment = Segment::new(&words, &geometry);
            segment.format(&geometry);
            segment.open_for_readers();
            Written { words, geometry }
        }

        fn reader(&self) -> Reader<'_> {
            Reader::open(&self.words).expect("an honest segment")
        }

        fn call(&self, ring: usize, called_ns: u64) {
            let recorded = Call { what: 0, count: 1, called_ns, stream: 0 };
            self.write(ring, |head, line, ticket| lines::call(head, line, ticket, &recorded));
        }

        fn launch(&self, ring: usize, called_ns: u64) {
            let count = line::LAUNCH << line::KIND_SHIFT;
            let recorded = Call { what: 0, count, called_ns, stream: 0 };
            self.write(ring, |head, line, ticket| lines::launch(head, line, ticket, &recorded));
        }

        fn write(&self, ring: usize, record: impl FnOnce(&Head, &Line, u64)) {
            let lines = Segment::new(&self.words, &self.geometry).lines;
            let (head, ring) = (&lines.heads()[ring], lines.ring(ring).expect("there are two"));
            let ticket = ring.next();
            record(head, ring.line(ticket).expect("it goes round"), ticket);
        }

        fn issue(&self, ring: usize, ticket: u64) {
            self.issue_as(ring, ticket, Issue { seq: 0, order: ticket, issue: 0 });
        }

        fn issue_as(&self, ring: usize, ticket: u64, recorded: Issue) {
            let ring = Segment::new(&self.words, &self.geometry).lines.ring(ring).expect("there are two");
            lines::issue(ring.line(ticket).expect("it goes round"), ring.lap(ticket), &recorded);
        }
    }

    /// A look; when each line was called that it tells, and whether it was issued.
    fn look(rings: &mut LineRings, written: &Written, until_ns: &[u64]) -> Vec<Vec<(u64, bool)>> {
        let reader = written.reader();
        rings.begin(&reader);
        let mut until = |ns| {
            let mut told = Vec::new();
            rings.tell(&reader, ns, |slot| {
                told.push((slot.called_ns.unwrap_or(0), slot.issued_ns.is_some()));
                true
            });
            told
        };
        until_ns.iter().map(|ns| until(*ns)).collect()
    }

    #[test]
    fn lines_of_all_rings_are_told_in_the_order_of_their_calls() {
        let (w, mut rings) = (Written::new(), LineRings::of(true));
        for (ring, called_ns) in [(0, 10), (1, 15), (0, 20), (1, 18), (0, 30)] {
            w.call(ring, called_ns);
        }
        for ticket in 0..3 {
            w.issue(0, ticket);
        }
        w.issue(1, 0);
        let told = look(&mut rings, &w, &[16, 20, u64::MAX]);
        assert_eq!(told, [vec![(10, true), (15, true)], vec![(18, false), (20, true)], vec![(30, true)]]);
        assert_eq!((rings.passed(), rings.until(), rings.missed()), (5, 5, 0));
        w.issue(1, 1);
        assert_eq!(look(&mut rings, &w, &[0]), [[(18, true)]], "what was not issued is looked at again");
        assert_eq!(look(&mut rings, &w, &[u64::MAX]), [[]]);
    }

    #[test]
    fn a_launch_is_told_by_its_operations() {
        let (w, mut rings) = (Written::new(), LineRings::of(true));
        w.call(0, 10);
        w.call(0, 11);
        assert_eq!(look(&mut rings, &w, &[u64::MAX]), [[(10, false), (11, false)]]);
        w.launch(0, 99);
        for ticket in [1, 0] {
            let issue = IssueBits { launch: 2 - ticket, ..IssueBits::default() }.word();
            w.issue_as(0, ticket, Issue { seq: 0, order: ticket, issue });
        }
        let reader = w.reader();
        rings.begin(&reader);
        let mut told = Vec::new();
        rings.tell(&reader, u64::MAX, |slot| {
            told.push((slot.called_ns, slot.issued_ns, slot.plan));
            true
        });
        let plan = (ringwatch_wire::layout::lines::NUMBER | 2) + 1;
        assert_eq!(told, [(Some(10), Some(99), plan), (Some(11), Some(99), plan)]);
        assert_eq!((rings.passed(), rings.missed()), (3, 0));
    }

    #[test]
    fn what_is_overwritten_unread_is_counted_and_what_cannot_be_taken_comes_again() {
        let (w, mut rings) = (Written::new(), LineRings::of(true));
        for n in 0..7 {
            w.call(0, n + 1);
            w.issue(0, n);
        }
        let reader = w.reader();
        rings.begin(&reader);
        let mut refused = 0;
        rings.tell(&reader, u64::MAX, |_| {
            refused += 1;
            false
        });
        assert_eq!((refused, rings.missed()), (4, 3));
        assert_eq!(look(&mut rings, &w, &[0]), [[(4, true), (5, true), (6, true), (7, true)]]);
        rings.shed(0);
        assert_eq!(look(&mut rings, &w, &[u64::MAX]), [[]]);
    }
}
