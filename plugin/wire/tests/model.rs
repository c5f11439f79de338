//! Rings and readers against plain models: one thread, any sequence of calls.

#![cfg(not(loom))]
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use proptest::prelude::*;
use ringwatch_wire::codes::{Flaw, Loss, call};
use ringwatch_wire::layout::{Geometry, HEADER_WORDS, LineRings, Region, channel};
use ringwatch_wire::lines;
use ringwatch_wire::reader::{Found, Reader};
use ringwatch_wire::ring::{Ring, Segment};
use ringwatch_wire::sync::{self, Claim, Seen, Word};
use std::collections::{HashMap, VecDeque};

/// Stamp, two words of data, a mark, a counting mark.
const STRIDE: usize = 5;

#[derive(Debug, Clone)]
enum Step {
    /// Take the next ticket and write it; publish at once or later.
    Claim {
        value: u64,
        publish: bool,
    },
    /// Publish one of the claims that are still open.
    Publish {
        which: usize,
    },
    /// Write a ticket's slot again, counted back from the newest.
    Again {
        back: u64,
        value: u64,
        publish: bool,
    },
    /// Mark a ticket that may be gone, as a thread that slept would.
    Mark {
        back: u64,
        value: u64,
        once: bool,
    },
    Add {
        back: u64,
        value: u64,
    },
    Read {
        back: u64,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let value = prop_oneof![0..5u64, any::<u64>()];
    prop_oneof![
        4 => (value.clone(), prop::bool::weighted(0.8))
            .prop_map(|(value, publish)| Step::Claim { value, publish }),
        2 => any::<usize>().prop_map(|which| Step::Publish { which }),
        2 => (0..6u64, value.clone(), prop::bool::weighted(0.8))
            .prop_map(|(back, value, publish)| Step::Again { back, value, publish }),
        2 => (0..9u64, value, any::<bool>()).prop_map(|(back, value, once)| Step::Mark { back, value, once }),
        2 => (0..9u64, 0..1000u64).prop_map(|(back, value)| Step::Add { back, value }),
        4 => (0..9u64).prop_map(|back| Step::Read { back }),
    ]
}

/// The model's knowledge of a slot.
#[derive(Debug, Clone, Default)]
struct Slot {
    ticket: Option<u64>,
    published: bool,
    busy: bool,
    data: u64,
    mark: Option<(u64, u64)>,
    count: Option<(u64, u64)>,
}

impl Slot {
    fn holds(&self, ticket: u64) -> bool {
        self.ticket == Some(ticket) && self.published
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn a_ring_is_a_map_from_slot_to_newest_ticket(shift in 0..3u32, steps in prop::collection::vec(step(), 1..120)) {
        let words: Vec<Word> = (0..STRIDE << shift).map(|_| Word::new(0)).collect();
        let next = Word::new(0);
        let ring = Ring::<STRIDE>::new(&words, Some(&next), shift);
        let slots = ring.slots();
        let lap = |t: u64| t / slots + 1;
        let capped = |v: u64| v.min((1 << 48) - 1);
        let mut model: HashMap<u64, Slot> = (0..slots).map(|i| (i, Slot::default())).collect();
        let mut given = 0u64;
        let mut open: Vec<(u64, Claim<'_, STRIDE>)> = Vec::new();
        for s in steps {
            match s {
                Step::Claim { value, publish } => {
                    let ticket = given;
                    given += 1;
                    let slot = model.get_mut(&(ticket % slots)).unwrap();
                    match ring.claim() {
                        Ok((got, claim)) => {
                            prop_assert_eq!(got, ticket);
                            prop_assert!(!slot.busy, "a busy slot was given away");
                            for (i, v) in [(1, value), (2, !value), (3, 0), (4, 0), (99, 1)] {
                                claim.set(i, v);
                            }
                            *slot = Slot { ticket: Some(ticket), published: publish, busy: !publish, data: value,
                                ..Slot::default() };
                            if publish { claim.publish() } else { open.push((ticket, claim)) }
                        }
                        Err(loss) => {
                            prop_assert_eq!(loss, Loss::Contended);
                            prop_assert!(slot.busy, "a free slot was refused");
                        }
                    }
                }
                Step::Publish { which } => {
                    if !open.is_empty() {
                        let (ticket, claim) = open.swap_remove(which % open.len());
                        claim.publish();
                        let slot = model.get_mut(&(ticket % slots)).unwrap();
                        slot.published = true;
                        slot.busy = false;
                    }
                }
                Step::Again { back, value, publish } => {
                    let Some(ticket) = given.checked_sub(back + 1) else { continue };
                    let slot = model.get_mut(&(ticket % slots)).unwrap();
                    let claim = ring.claim_again(ticket);
                    prop_assert_eq!(claim.is_some(), slot.holds(ticket) && !slot.busy);
                    if let Some(claim) = claim {
                        claim.set(1, value);
                        claim.set(2, !value);
                        slot.data = value;
                        if publish { claim.publish() } else {
                            slot.busy = true;
                            open.push((ticket, claim));
                        }
                    }
                }
                Step::Mark { back, value, once } => {
                    let Some(ticket) = given.checked_sub(back + 1) else { continue };
                    let slot = model.get_mut(&(ticket % slots)).unwrap();
                    let word = &ring.slot(ticket).unwrap()[3];
                    if once {
                        let fresh = slot.mark.is_none_or(|(l, _)| l != lap(ticket)) && slot.holds(ticket);
                        let holds = || ring.held(ticket).is_some();
                        prop_assert_eq!(sync::mark_once(word, ring.lap(ticket), value, holds), fresh);
                        if fresh { slot.mark = Some((lap(ticket), capped(value))) }
                    } else {
                        let may = slot.mark.is_some_and(|(l, _)| l == lap(ticket)) || slot.holds(ticket);
                        let holds = || ring.held(ticket).is_some();
                        prop_assert_eq!(sync::mark_set(word, ring.lap(ticket), value, holds), may);
                        if may { slot.mark = Some((lap(ticket), capped(value))) }
                    }
                }
                Step::Add { back, value } => {
                    let Some(ticket) = given.checked_sub(back + 1) else { continue };
                    let slot = model.get_mut(&(ticket % slots)).unwrap();
                    let word = &ring.slot(ticket).unwrap()[4];
                    let held = slot.holds(ticket);
                    let done = sync::mark_add(word, ring.lap(ticket), value, || ring.held(ticket).is_some());
                    match slot.count {
                        Some((l, v)) if l == lap(ticket) => {
                            prop_assert!(done);
                            slot.count = Some((l, v + value));
                        }
                        _ => {
                            prop_assert_eq!(done, held, "only a holder starts a count");
                            if held { slot.count = Some((lap(ticket), value)) }
                        }
                    }
                }
                Step::Read { back } => {
                    let Some(ticket) = given.checked_sub(back + 1) else { continue };
                    let slot = &model[&(ticket % slots)];
                    let mut out = [0; STRIDE];
                    let seen = sync::read(ring.slot(ticket).unwrap(), &mut out);
                    prop_assert_eq!(ring.held(ticket).is_some(), slot.holds(ticket));
                    match slot.ticket {
                        None => prop_assert_eq!(seen, Seen::Empty),
                        Some(_) if slot.busy => prop_assert_eq!(seen, Seen::Busy),
                        Some(t) => {
                            prop_assert_eq!(seen, Seen::Whole(t));
                            prop_assert_eq!(&out[1..3], &[slot.data, !slot.data]);
                            let mark = |m: Option<(u64, u64)>| m.filter(|(l, _)| *l == lap(t)).map(|(_, v)| v);
                            prop_assert_eq!(sync::marked(out[3], ring.lap(t)), mark(slot.mark));
                            prop_assert_eq!(sync::marked(out[4], ring.lap(t)), mark(slot.count));
                        }
                    }
                }
            }
            prop_assert_eq!(ring.next(), given);
        }
    }

    /// A reader sees the newest records of a region, knows which are gone and which are to come.
    #[test]
    fn a_reader_sees_a_queue_of_the_newest(shift in 0..4u32, rounds in prop::collection::vec((0..6u64, 0..4u8), 1..40)) {
        let geometry = Geometry::new([0, 0, 0, shift, 0]);
        let words: Vec<Word> = (0..geometry.bytes() / 8).map(|_| Word::new(0)).collect();
        let segment = Segment::new(&words, &geometry);
        segment.format(&geometry);
        segment.open_for_readers();
        let reader = Reader::open(&words).unwrap();
        let mut newest: VecDeque<(u64, u64, Option<i64>)> = VecDeque::new();
        let mut given = 0;
        for (many, stops) in rounds {
            for k in 0..many {
                let (ticket, claim) = segment.channel.claim().unwrap();
                prop_assert_eq!(ticket, given);
                given += 1;
                claim.set(channel::OP, (ticket * 3) | (7 << 56));
                claim.set(channel::START_GPU_NS, 1000 + k);
                claim.set(channel::DURATION, 0);
                claim.set(channel::STOP_SEEN, 0);
                claim.publish();
                if newest.len() as u64 == segment.channel.slots() {
                    newest.pop_front();
                }
                newest.push_back((ticket, 1000 + k, None));
            }
            // A duration for some that are still there, a negative one among them.
            for i in 0..usize::from(stops).min(newest.len()) {
                let (ticket, _, duration) = &mut newest[i];
                let ns = *ticket as i64 * 7 - 20;
                let word = &segment.channel.slot(*ticket).unwrap()[channel::DURATION];
                word.set(sync::mark(segment.channel.lap(*ticket), channel::BIAS.wrapping_add_signed(ns)));
                *duration = Some(ns);
            }
            let oldest = newest.front().map_or(0, |n| n.0);
            for ticket in 0..given + 3 {
                match reader.channel(ticket) {
                    Found::Is(c) => {
                        let (_, gpu, duration) = newest[usize::try_from(ticket - oldest).unwrap()];
                        prop_assert_eq!((c.ticket, c.op, c.channel), (ticket, ticket * 3, 7));
                        prop_assert_eq!((c.start_gpu_ns, c.duration_ns), (Some(gpu), duration));
                        prop_assert_eq!(c.stop_seen_ns, None);
                    }
                    Found::Overwritten => prop_assert!(ticket < oldest),
                    Found::NotYet => prop_assert!(ticket >= given),
                }
            }
            prop_assert_eq!(reader.ring(Region::Channel).next(), given);
        }
    }

    /// The same of a ring of lines, where issues come after calls or never.
    #[test]
    fn a_reader_sees_the_newest_lines(shift in 0..4u32, issues in prop::collection::vec(any::<bool>(), 1..40)) {
        let geometry = Geometry::new([0; 5]).with_lines(LineRings::new(2, shift));
        let words: Vec<Word> = (0..geometry.bytes() / 8).map(|_| Word::new(0)).collect();
        let segment = Segment::new(&words, &geometry);
        segment.format(&geometry);
        segment.open_for_readers();
        let reader = Reader::open(&words).unwrap();
        let (head, ring) = (&segment.lines.heads()[1], segment.lines.ring(1).unwrap());
        for (n, issued) in (0u64..).zip(&issues) {
            let recorded = lines::Call { what: 7 << 16, count: n * 3, called_ns: n + 1, stream: n };
            lines::call(head, ring.line(n).unwrap(), n, &recorded);
            if *issued {
                let recorded = lines::Issue { seq: n, order: n * 2, issue: n & 0xff };
                lines::issue(ring.line(n).unwrap(), ring.lap(n), &recorded);
            }
            let oldest = (n + 1).saturating_sub(ring.slots());
            for ticket in 0..n + 3 {
                match reader.line(1, ticket) {
                    Found::Is(o) => {
                        let o = o.expect("no launch");
                        prop_assert!((oldest..=n).contains(&ticket));
                        let was = issues[usize::try_from(ticket).unwrap()];
                        prop_assert_eq!((o.func, o.count, o.called_ns), (7, ticket * 3, Some(ticket + 1)));
                        prop_assert_eq!((o.order, o.seq), (was.then_some(ticket * 2), was.then_some(ticket)));
                        prop_assert_eq!(o.issued_ns, o.called_ns.filter(|_| was));
                    }
                    Found::Overwritten => prop_assert!(ticket < oldest),
                    Found::NotYet => prop_assert!(ticket > n),
                }
            }
            prop_assert_eq!((reader.line_ring(1).next(), reader.line_ring(0).next()), (n + 1, 0));
        }
    }

    #[test]
    fn the_books_balance(calls in prop::collection::vec((0..30usize, prop::option::of(0..Loss::ALL.len())), 0..200)) {
        let words: Vec<Word> = (0..HEADER_WORDS).map(|_| Word::new(0)).collect();
        // A bare header keeps books and has no room for anything else.
        let segment = Segment::new(&words, &Geometry::full());
        prop_assert_eq!(segment.op.claim().err(), Some(Loss::NoRoom));
        for (kind, loss) in &calls {
            segment.book(*kind, loss.map_or(Ok(()), |l| Err(Loss::ALL[l])));
        }
        let sum = |at: usize, n: usize| (0..n).map(|i| segment.get(at + i)).sum::<u64>();
        use ringwatch_wire::layout::head;
        let refused = sum(head::REFUSED, call::COUNT);
        prop_assert_eq!(sum(head::RECORDED, call::COUNT) + refused, calls.len() as u64);
        prop_assert_eq!(refused, sum(head::LOST, Loss::ALL.len()));
        prop_assert_eq!(sum(head::FLAWS, Flaw::ALL.len()), 0);
    }
}

#[test]
fn a_full_table_says_so_and_freed_slots_are_taken_again() {
    let words: Vec<Word> = (0..STRIDE * 4).map(|_| Word::new(0)).collect();
    let next = Word::new(0);
    let ring = Ring::<STRIDE>::new(&words, Some(&next), 2);
    let free = |slot: &[Word; STRIDE]| slot[0].get() == 0 || slot[1].get() != 0;
    for i in 0..4 {
        let (ticket, claim) = ring.claim_free(Loss::CommTable, free).unwrap();
        assert_eq!(ticket, i);
        claim.publish();
    }
    assert_eq!(ring.claim_free(Loss::CommTable, free).err(), Some(Loss::CommTable));
    ring.slot(2).unwrap()[1].set(1);
    let (ticket, claim) = ring.claim_free(Loss::CommTable, free).unwrap();
    assert_eq!(ticket % 4, 2);
    claim.set(1, 0);
    claim.publish();
    assert!(ring.held(2).is_none(), "the old ticket is stale");
    assert!(ring.held(ticket).is_some());
    assert_eq!(ring.claim_free(Loss::CommTable, free).err(), Some(Loss::CommTable));
}
