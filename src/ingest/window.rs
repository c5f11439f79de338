//! The operations of a segment that are being put together, by ticket. Tickets are dense, so a queue holds them.

use crate::model::{ChannelStamp, NetProgress};
use ringwatch_wire::reader::OpSlot;
use std::collections::VecDeque;

/// An operation as it is being put together.
#[derive(Debug)]
pub(super) struct Open {
    pub(super) slot: OpSlot,
    /// Its channels' stamps.
    pub(super) stamps: Parts<ChannelStamp>,
    /// Its network transfers.
    pub(super) net: Parts<NetProgress>,
    /// It is on the list of those to tell.
    changed: bool,
}

impl Open {
    fn parts(&self) -> usize {
        self.stamps.values.len() + self.net.values.len()
    }
}

/// Records of an operation, by the tickets of their slots.
#[derive(Debug)]
pub(super) struct Parts<T> {
    tickets: Vec<u64>,
    values: Vec<T>,
}

impl<T> Default for Parts<T> {
    fn default() -> Self {
        Parts { tickets: Vec::new(), values: Vec::new() }
    }
}

impl<T: PartialEq> Parts<T> {
    /// Puts a value under a ticket; true when that changes something.
    fn put(&mut self, ticket: u64, value: T) -> bool {
        let place = match self.tickets.last() {
            Some(last) if *last >= ticket => self.tickets.binary_search(&ticket),
            _ => Err(self.tickets.len()),
        };
        match place {
            Ok(at) if self.values[at] == value => false,
            Ok(at) => {
                self.values[at] = value;
                true
            }
            Err(at) => {
                self.tickets.insert(at, ticket);
                self.values.insert(at, value);
                true
            }
        }
    }

    fn clear(&mut self) {
        self.tickets.clear();
        self.values.clear();
    }

    /// The values, by their tickets.
    pub(super) fn values(&self) -> &[T] {
        &self.values
    }

    /// True where there is room for one more of an operation's.
    fn takes(&self, ticket: u64, most: usize) -> bool {
        self.values.len() < most || self.tickets.binary_search(&ticket).is_ok()
    }

    /// Takes the values out and puts an empty list in their place: for an operation that is let go.
    pub(super) fn hand_over(&mut self, empty: Vec<T>) -> Vec<T> {
        self.tickets.clear();
        std::mem::replace(&mut self.values, empty)
    }
}

/// Operations by ticket.
#[derive(Debug, Default)]
pub(super) struct Window {
    /// The ticket of the first place.
    base: u64,
    held: VecDeque<Option<Box<Open>>>,
    /// How many operations are held, and how many parts of them.
    len: usize,
    parts: usize,
    /// Tickets of what is to be told.
    changed: Vec<u64>,
    /// Tickets of what is not asked about again before the next look.
    parked: Vec<u64>,
    /// Room that was used before.
    #[expect(clippy::vec_box, reason = "the boxes are what is used again")]
    spare: Vec<Box<Open>>,
}

/// The fate of an operation that is to be reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Told {
    /// It is told next time.
    Later,
    /// It cannot be told in this look.
    Parked,
    /// It is told, and may change.
    SoFar,
    /// It is told, and nothing more is expected of it: it need not be held.
    Whole,
}

/// Room that is kept for other operations; of an operation with more parts than usual it is given back.
const SPARE: usize = 1024;
const SPARE_PARTS: usize = 64;
/// The parts of one operation at most: stamps of channels, of which NCCL has 64, and transfers of the network.
const STAMPS_MAX: usize = 256;
const TRANSFERS_MAX: usize = 4096;
/// So many parts weigh as much as an operation.
const PARTS_A_WEIGHT: usize = 4;
/// Tickets farther apart than any ring is long are no tickets of one time.
const FAR: u64 = 1 << 24;

impl Window {
    /// Begins a look: what could not be told in the last one is asked about again.
    pub(super) fn begin(&mut self) {
        self.changed.append(&mut self.parked);
    }

    /// Takes the room that all use together, and gives it back at the second call.
    #[expect(clippy::vec_box, reason = "the boxes are what is used again")]
    pub(super) fn lend(&mut self, room: &mut Vec<Box<Open>>) {
        std::mem::swap(&mut self.spare, room);
    }

    fn place(&self, ticket: u64) -> Option<usize> {
        usize::try_from(ticket.checked_sub(self.base)?).ok()
    }

    fn get_mut(&mut self, ticket: u64) -> Option<&mut Open> {
        let place = self.place(ticket)?;
        self.held.get_mut(place)?.as_deref_mut()
    }

    pub(super) fn contains(&self, ticket: u64) -> bool {
        self.place(ticket).and_then(|p| self.held.get(p)).is_some_and(Option::is_some)
    }

    /// Takes what an operation's own slot says.
    pub(super) fn slot(&mut self, slot: OpSlot) {
        let ticket = slot.ticket;
        if ticket.abs_diff(self.base) > FAR {
            // Nothing that is held is of this time; room for all that lies between might not be had.
            self.held.clear();
            (self.len, self.parts) = (0, 0);
        }
        if self.held.is_empty() {
            self.base = ticket;
        }
        // One that was being written when newer ones were read.
        while self.base > ticket {
            self.held.push_front(None);
            self.base -= 1;
        }
        let Some(place) = self.place(ticket) else { return };
        if place >= self.held.len() {
            self.held.resize_with(place + 1, || None);
        }
        let held = &mut self.held[place];
        let changed = match held {
            Some(open) => {
                let new = open.slot != slot && !open.changed;
                open.changed |= new;
                open.slot = slot;
                new
            }
            None => {
                let open = match self.spare.pop() {
                    Some(mut open) => {
                        open.slot = slot;
                        open.changed = true;
                        open
                    }
                    None => Box::new(Open {
                        slot,
                        stamps: Parts::default(),
                        net: Parts::default(),
                        changed: true,
                    }),
                };
                *held = Some(open);
                self.len += 1;
                true
            }
        };
        if changed {
            self.changed.push(ticket);
        }
    }

    /// Takes a channel's stamp; false when its operation is not held.
    pub(super) fn stamp(&mut self, op: u64, ticket: u64, stamp: ChannelStamp) -> bool {
        self.part(op, |open| open.stamps.takes(ticket, STAMPS_MAX) && open.stamps.put(ticket, stamp))
    }

    /// Takes a network transfer; false when its operation is not held.
    pub(super) fn transfer(&mut self, op: u64, ticket: u64, net: NetProgress) -> bool {
        self.part(op, |open| open.net.takes(ticket, TRANSFERS_MAX) && open.net.put(ticket, net))
    }

    fn part(&mut self, op: u64, put: impl FnOnce(&mut Open) -> bool) -> bool {
        let Some(open) = self.get_mut(op) else { return false };
        let before = open.parts();
        let changes = put(open);
        let (more, first) = (open.parts() - before, changes && !open.changed);
        open.changed |= changes;
        self.parts += more;
        if first {
            self.changed.push(op);
        }
        true
    }

    /// Lets go of the oldest operations until the rest weigh no more than this; returns how many that were. Nothing more is
    /// read of them.
    pub(super) fn shed(&mut self, most: usize) -> u64 {
        let mut gone = 0;
        for place in 0..self.held.len() {
            if self.len + self.parts / PARTS_A_WEIGHT <= most {
                break;
            }
            if self.held[place].is_some() {
                self.let_go(place);
                gone += 1;
            }
        }
        if gone > 0 {
            self.trim();
        }
        gone
    }

    /// Tells what changed, by ticket; what `tell` does not take is told next time.
    pub(super) fn tell(&mut self, mut tell: impl FnMut(&mut Open) -> Told) {
        let (mut changed, mut parked) = (std::mem::take(&mut self.changed), std::mem::take(&mut self.parked));
        changed.sort_unstable();
        changed.retain(|ticket| {
            let Some(place) = self.place(*ticket) else { return false };
            let Some(Some(open)) = self.held.get_mut(place) else { return false };
            // Who takes an operation may take its parts.
            let parts = open.parts();
            match tell(open) {
                Told::Later => return true,
                Told::Parked => parked.push(*ticket),
                Told::SoFar => open.changed = false,
                Told::Whole => {
                    self.parts -= parts - open.parts();
                    self.let_go(place);
                }
            }
            false
        });
        (self.changed, self.parked) = (changed, parked);
        self.trim();
    }

    fn let_go(&mut self, place: usize) {
        let Some(mut open) = self.held.get_mut(place).and_then(Option::take) else { return };
        self.len -= 1;
        self.parts -= open.parts();
        let usual = open.stamps.values.capacity() <= SPARE_PARTS && open.net.values.capacity() <= SPARE_PARTS;
        if self.spare.len() < SPARE && usual {
            open.stamps.clear();
            open.net.clear();
            self.spare.push(open);
        }
    }

    /// Forgets what is older than a ticket and told, but for what `keep` names.
    pub(super) fn forget_below(&mut self, ticket: u64, keep: impl Fn(u64) -> bool) {
        for place in 0..self.held.len() {
            let at = self.base + place as u64;
            if at >= ticket {
                break;
            }
            if self.held[place].as_ref().is_some_and(|o| !o.changed && !keep(at)) {
                self.let_go(place);
            }
        }
        self.trim();
    }

    fn trim(&mut self) {
        while self.held.front().is_some_and(Option::is_none) {
            self.held.pop_front();
            self.base += 1;
        }
    }

    /// Tickets from the oldest to the newest that is held.
    pub(super) fn span(&self) -> usize {
        self.held.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(ticket: u64) -> OpSlot {
        OpSlot { ticket, ..OpSlot::default() }
    }

    #[test]
    fn one_that_comes_after_newer_ones_is_taken() {
        let mut w = Window::default();
        w.slot(slot(6));
        w.slot(slot(4));
        assert_eq!((told(&mut w), w.span()), (vec![4, 6], 3));
    }

    fn told(w: &mut Window) -> Vec<u64> {
        let mut all = Vec::new();
        w.tell(|o| {
            all.push(o.slot.ticket);
            Told::SoFar
        });
        all
    }

    #[test]
    fn what_changed_is_told_once_and_by_ticket() {
        let mut w = Window::default();
        for t in [100, 102, 103] {
            w.slot(slot(t));
        }
        assert_eq!(told(&mut w), [100, 102, 103]);
        assert_eq!(told(&mut w), [0; 0]);
        w.slot(slot(103));
        assert_eq!(told(&mut w), [0; 0], "it says the same");
        w.slot(OpSlot { count: 7, ..slot(103) });
        w.slot(OpSlot { count: 7, ..slot(100) });
        w.slot(slot(101));
        assert_eq!(told(&mut w), [100, 101, 103]);
        assert!(w.contains(101) && !w.contains(99) && !w.contains(104));
    }

    #[test]
    fn what_is_not_taken_is_told_again_and_not_forgotten() {
        let mut w = Window::default();
        w.slot(slot(1));
        w.slot(slot(2));
        w.tell(|o| if o.slot.ticket == 2 { Told::SoFar } else { Told::Later });
        w.forget_below(10, |_| false);
        assert!(w.contains(1) && !w.contains(2));
        assert_eq!(told(&mut w), [1]);
        w.forget_below(10, |_| false);
        assert_eq!(w.span(), 0);
    }

    #[test]
    fn what_is_whole_is_let_go_and_can_come_back() {
        let mut w = Window::default();
        w.slot(slot(1));
        w.slot(slot(2));
        w.tell(|o| if o.slot.ticket == 1 { Told::Whole } else { Told::SoFar });
        assert!(!w.contains(1) && w.contains(2));
        w.slot(slot(1));
        assert_eq!(told(&mut w), [1]);
    }

    #[test]
    fn what_cannot_be_told_in_a_look_waits_for_the_next_one() {
        let mut w = Window::default();
        w.slot(slot(1));
        w.tell(|_| Told::Parked);
        assert_eq!(told(&mut w), [0; 0]);
        w.begin();
        assert_eq!(told(&mut w), [1]);
    }

    #[test]
    fn tickets_that_are_far_apart_need_no_room_between_them() {
        let mut w = Window::default();
        for t in [0, 1 << 40, 5] {
            w.slot(slot(t));
            assert_eq!((told(&mut w), w.span()), (vec![t], 1));
        }
    }

    #[test]
    fn parts_lie_by_ticket_and_each_once() {
        let mut parts = Parts::default();
        assert!([5, 3, 5, 4].into_iter().filter(|t| parts.put(*t, 10 * t)).eq([5, 3, 4]));
        assert_eq!(parts.values(), [30, 40, 50]);
    }

    #[test]
    fn the_oldest_are_let_go_when_there_are_too_many() {
        let mut w = Window::default();
        (0..10).for_each(|t| w.slot(slot(t)));
        assert_eq!(w.shed(10), 0);
        for channel in 0..40 {
            let stamp = ChannelStamp {
                channel,
                start_gpu_ns: None,
                stop_gpu_ns: None,
                start_seen_ns: 1,
                stop_seen_ns: None,
            };
            assert!(w.stamp(9, u64::from(channel), stamp));
        }
        assert_eq!(w.shed(14), 6, "ten operations and forty parts weigh as much as twenty");
        assert!(!w.contains(5) && w.contains(6));
        assert_eq!(told(&mut w), [6, 7, 8, 9]);
        w.tell(|_| Told::Whole);
        assert_eq!((w.shed(0), w.len, w.parts), (4, 0, 0));
    }

    #[test]
    fn an_operation_has_no_more_stamps_than_it_can_have() {
        let mut w = Window::default();
        w.slot(slot(0));
        for ticket in 0..10_000 {
            let stamp = ChannelStamp {
                channel: 0,
                start_gpu_ns: Some(ticket),
                stop_gpu_ns: None,
                start_seen_ns: 1,
                stop_seen_ns: None,
            };
            assert!(w.stamp(0, ticket, stamp));
        }
        assert_eq!(w.parts, STAMPS_MAX);
    }

    #[test]
    fn old_ones_go_and_kept_ones_hold_their_place() {
        let mut w = Window::default();
        (0..10).for_each(|t| w.slot(slot(t)));
        told(&mut w);
        w.forget_below(8, |t| t == 3);
        assert_eq!((w.span(), w.contains(3), w.contains(4), w.contains(9)), (7, true, false, true));
        w.slot(slot(12));
        assert_eq!(w.span(), 10);
    }
}
