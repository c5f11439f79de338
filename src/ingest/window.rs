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
    /// Tickets of what is to be told.
    changed: Vec<u64>,
    /// Tickets of what is not asked about again before the next look.
    parked: Vec<u64>,
    /// Room that was used before.
    #[expect(clippy::vec_box, reason = "the boxes are what is used again")]
    spare: Vec<Box<Open>>,
}

/// What was done with an operation that is to be told.
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

/// Room that is kept for other operations.
const SPARE: usize = 1024;
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
                true
            }
        };
        if changed {
            self.changed.push(ticket);
        }
    }

    /// Takes a channel's stamp; false when its operation is not held.
    pub(super) fn stamp(&mut self, op: u64, ticket: u64, stamp: ChannelStamp) -> bool {
        self.part(op, |open| open.stamps.put(ticket, stamp))
    }

    /// Takes a network transfer; false when its operation is not held.
    pub(super) fn transfer(&mut self, op: u64, ticket: u64, net: NetProgress) -> bool {
        self.part(op, |open| open.net.put(ticket, net))
    }

    fn part(&mut self, op: u64, put: impl FnOnce(&mut Open) -> bool) -> bool {
        let Some(open) = self.get_mut(op) else { return false };
        if put(open) && !open.changed {
            open.changed = true;
            self.changed.push(op);
        }
        true
    }

    /// Tells what changed, by ticket; what `tell` does not take is told next time.
    pub(super) fn tell(&mut self, mut tell: impl FnMut(&mut Open) -> Told) {
        let (mut changed, mut parked) = (std::mem::take(&mut self.changed), std::mem::take(&mut self.parked));
        changed.sort_unstable();
        changed.retain(|ticket| {
            let Some(place) = self.place(*ticket).and_then(|p| self.held.get_mut(p)) else { return false };
            let Some(open) = place else { return false };
            match tell(open) {
                Told::Later => return true,
                Told::Parked => parked.push(*ticket),
                Told::SoFar => open.changed = false,
                Told::Whole => Self::let_go(place, &mut self.spare),
            }
            false
        });
        (self.changed, self.parked) = (changed, parked);
        self.trim();
    }

    #[expect(clippy::vec_box, reason = "the boxes are what is used again")]
    fn let_go(place: &mut Option<Box<Open>>, spare: &mut Vec<Box<Open>>) {
        if let Some(mut open) = place.take().filter(|_| spare.len() < SPARE) {
            open.stamps.clear();
            open.net.clear();
            spare.push(open);
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
                Self::let_go(&mut self.held[place], &mut self.spare);
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
