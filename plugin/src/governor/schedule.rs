//! The schedule of timed operations, and their price.

use super::{
    ASLEEP_NS, CHANNEL_COST_NS, CHANNELS, COLLECTIVE, COLLECTIVES, DEEP_NS, ENDED, EVENT_COST_NS,
    EVENT_DECIDED, EVENT_SHIFT, Governor, KIND_BITS, KINDS, Kernel, RUN_DECIDED, SHIFT, SHIFT_MAX, TOKENS,
    WAKE_COST_NS, WANTED, WANTED_EVENTS, WANTED_SHIFT, WISH_NS, WISHED, WORTH,
};
use crate::communicator::Comm;
use crate::gate::{RUN_MASK, RUN_SHIFT, Schedule, get, is_chosen};
use crate::runtime::clock::now_ns;
use ringwatch_wire::layout::comm;
use ringwatch_wire::sync::Word;

/// The schedule's answer for a communicator.
#[derive(Debug, Clone, Copy)]
enum Turn {
    /// Its next run is due, as far as there are tokens; the word of the shift that says so.
    Due(usize),
    /// It is not.
    NotDue,
    /// A reader wants detail of another one alone.
    Another,
}

/// The bits of the other kind's waiting that stay when an operation of this kind was issued: its run is not broken off.
/// Transfers may have come to their end; they are given up at the second beginning of a run of collectives.
fn kept_waiting(waiting: u64, kind: u64, begins: bool) -> u64 {
    let other = waiting & KINDS & !kind;
    let seen = waiting & !KINDS & !(kind << KIND_BITS);
    match (begins && kind == COLLECTIVES, seen) {
        (false, _) => other | seen,
        (true, 0) => other | other << KIND_BITS,
        (true, _) => 0,
    }
}

/// The number of a communicator's next launch of sends and receives. All ranks that take part in all of them count the same,
/// whichever of them are recorded in lines.
#[inline(always)]
pub(crate) fn number_of_launch(comm: &[Word]) -> u64 {
    get(comm, comm::ISSUED).wrapping_add(get(comm, comm::PLANS))
}

impl Governor {
    /// True for one in `1 << shift` numbers; the shift is in word `which`.
    #[inline]
    fn due(&self, number: u64, which: usize) -> bool {
        is_chosen(number, self.get(which).min(SHIFT_MAX))
    }

    /// Returns whether it is this communicator of which a reader wants detail; absent while none wants any.
    #[inline]
    fn wished(&self, c: &Comm) -> Option<bool> {
        let (until, comm) = self.wish?;
        match until.get() {
            0 if self.get(WISHED) == 0 => None,
            0 => {
                self.end_wish();
                None
            }
            t => self.wish(t, until, comm, c),
        }
    }

    #[cold]
    fn end_wish(&self) {
        self.set(WISHED, 0);
        self.set_schedule();
    }

    #[cold]
    fn wish(&self, until_ns: u64, until: &Word, comm: &Word, c: &Comm) -> Option<bool> {
        // Anything may have been written there.
        if until_ns.wrapping_sub(now_ns()) > WISH_NS {
            until.replace(until_ns, 0);
            self.end_wish();
            return None;
        }
        // Every operation is looked at meanwhile.
        self.set(WISHED, 1);
        self.bare.set_schedule(Schedule::chosen(0, self.why_not(false)));
        Some(comm.get() == c.word(comm::ID))
    }

    /// Called when an operation of a kind ([`super::COLLECTIVES`] or [`super::TRANSFERS`]) was issued as number `order`,
    /// on so many channels: pays for it if it was timed by kernel events, and decides whether the next one of its kind is to be.
    /// The mask is the process's, so whatever is issued before that is timed as well.
    #[inline]
    pub(crate) fn issued(
        &self,
        c: &Comm,
        (kind, order): (u64, u64),
        channels: u8,
        by_kernel: bool,
        now_ns: u64,
    ) {
        if !matches!(self.kernel, Kernel::Switched | Kernel::Once) {
            return;
        }
        if self.get(ENDED) != 0 {
            // A group was in the way.
            self.switch(false);
            return;
        }
        let run = order.wrapping_add(1) >> RUN_SHIFT;
        // While a reader wants detail of one communicator, it gets what the budget has, and the others nothing.
        let turn = match self.wished(c) {
            Some(false) => Turn::Another,
            Some(true) if self.due(run, WANTED_SHIFT) => Turn::Due(WANTED_SHIFT),
            None if self.due(run, SHIFT) => Turn::Due(SHIFT),
            _ => Turn::NotDue,
        };
        if matches!(turn, Turn::NotDue) && self.may_rest(now_ns) {
            self.rest(if self.wished(c).is_some() { WANTED_SHIFT } else { SHIFT }, now_ns);
        }
        let gives_up = || matches!(turn, Turn::Another) && c.word(comm::WANTS) != 0;
        if by_kernel || matches!(turn, Turn::Due(_)) || self.kernel_on() || gives_up() {
            self.decide(c, (kind, order), channels, turn, by_kernel, now_ns);
        }
    }

    #[inline(never)]
    fn decide(
        &self,
        c: &Comm,
        (kind, order): (u64, u64),
        channels: u8,
        turn: Turn,
        by_kernel: bool,
        now_ns: u64,
    ) {
        // What another plugin wants is not of our budget.
        if self.forced() {
            return;
        }
        let channels = if channels == 0 { CHANNELS } else { channels };
        let each = u64::from(channels) * CHANNEL_COST_NS;
        let last = c.word(comm::TIMED_NS);
        if by_kernel {
            let asleep = now_ns.saturating_sub(last) > ASLEEP_NS;
            self.pay(if asleep { each + WAKE_COST_NS } else { each });
            c.set(comm::TIMED_NS, now_ns);
        }
        if self.kernel == Kernel::Once {
            if self.fill(now_ns) < 0 {
                self.end();
            }
            return;
        }
        let Some(wanted) = self.words.get(WANTED) else { return };
        if c.word(comm::FINALIZED_NS) != 0 {
            return;
        }
        let waiting = c.word(comm::WANTS);
        let run = order.wrapping_add(1) >> RUN_SHIFT;
        let begins = order.wrapping_add(1) & RUN_MASK == 0;
        let wants = match turn {
            // A run is not broken off.
            Turn::Due(_) | Turn::NotDue if waiting & kind != 0 && by_kernel && !begins => true,
            Turn::Due(which) => {
                self.decided(run, WAKE_COST_NS + (each << RUN_SHIFT), which, RUN_DECIDED, now_ns)
            }
            Turn::NotDue | Turn::Another => false,
        };
        // Runs end with a debt where more than they were priced for came between: up to here, and no further.
        let ends = self.fill(now_ns) < -(self.income(DEEP_NS) as i64);
        let wants = wants && !ends;
        let others = match turn {
            Turn::Due(_) | Turn::NotDue if !ends => kept_waiting(waiting, kind, begins),
            _ => 0,
        };
        let waits_for = others | if wants { kind } else { 0 };
        // The mask is the process's: it is on while any communicator waits for its next operation.
        if waits_for != waiting && c.replace(comm::WANTS, waiting, waits_for) {
            wanted.add(u64::from(waits_for != 0).wrapping_sub(u64::from(waiting != 0)));
        }
        let broke = (self.get(TOKENS) as i64) < 0;
        // Not for the others, where a reader wants one alone: that one switches them on again.
        let waits = wanted.get() != 0 && !broke && !matches!(turn, Turn::Another);
        self.switch(wants || others != 0 || waits);
    }

    /// A communicator waits for nothing any more.
    pub(crate) fn finalized(&self, c: &Comm) {
        let Some(wanted) = self.words.get(WANTED) else { return };
        loop {
            let waiting = c.word(comm::WANTS);
            if waiting == 0 {
                return;
            }
            // Another thread may have changed for what it waits.
            if c.replace(comm::WANTS, waiting, 0) {
                break;
            }
        }
        wanted.add(1u64.wrapping_neg());
        if self.kernel == Kernel::Switched && wanted.get() == 0 {
            self.switch(false);
        }
    }

    /// Returns whether the next launch of a communicator is to be timed by CUDA events, as far as it is its turn.
    /// `order` is the issue order its first operation will get.
    #[inline]
    pub(crate) fn wants(&self, c: &Comm, order: u64) -> bool {
        self.events && (c.word(comm::HINT) & WORTH != 0 || self.turn(c, order).is_some())
    }

    /// The number that decides whose turn it is, if it is this one's.
    #[inline]
    fn turn(&self, c: &Comm, order: u64) -> Option<u64> {
        // Where kernel events are switched, they are for the regular ones.
        let regular = self.times_regularly_by_events();
        let is_collective = c.word(comm::HINT) & COLLECTIVE != 0;
        let number = if is_collective { order.wrapping_add(1) } else { number_of_launch(c.slot) };
        let due = |n: u64| match self.wished(c) {
            Some(ours) => ours && self.due(n, WANTED_EVENTS),
            None => self.due(n, EVENT_SHIFT),
        };
        Some(number).filter(|n| regular && due(*n))
    }

    /// Decides on a launch that is wanted, and pays for it.
    #[inline]
    pub(crate) fn launch(&self, c: &Comm, order: u64, now_ns: u64) -> bool {
        self.wants(c, order) && self.take(c, self.turn(c, order), now_ns)
    }

    #[inline(never)]
    fn take(&self, c: &Comm, turn: Option<u64>, now_ns: u64) -> bool {
        let which = if self.wished(c).is_some() { WANTED_EVENTS } else { EVENT_SHIFT };
        let decided = |n| self.decided(n, EVENT_COST_NS, which, EVENT_DECIDED, now_ns);
        // A verdict may be an old one: what it says is bought only with tokens that are there.
        let paid = turn.is_none_or(decided) && self.fill(now_ns) >= EVENT_COST_NS as i64;
        if paid {
            self.pay(EVENT_COST_NS);
        }
        paid
    }
}
