//! One rank of a communicator.

use super::instance::IssuedAt;
use super::time_shares::Exchanged;
use crate::model::{Begun, CommRecord, Func, Lane, Making, OpRecord, Rank, Track};

/// A call that NCCL has not issued.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Called {
    /// The operation's ticket.
    pub ticket: u64,
    /// Its function.
    pub func: Func,
    /// When it was called, host monotonic ns.
    pub at_ns: u64,
    /// True where the call has returned; absent where nobody looked.
    pub returned: Option<bool>,
}

/// Parts of the last minute in [`RecentCost`], and how long one lasts, in ns.
pub(super) const RECENT_PARTS: u64 = 60;
const RECENT_PART_NS: u64 = 1_000_000_000;

/// A part so many later than another is the time of a forged record: nothing is heard that late.
const RECENT_FAR: u64 = 12 * RECENT_PARTS;

/// A cost by parts of the last minute, in ns. The oldest part makes room for the youngest.
#[derive(Debug, Clone)]
pub(super) struct RecentCost {
    /// Numbers of parts since the host's boot, and their costs.
    parts: [(u64, u64); RECENT_PARTS as usize],
}

impl Default for RecentCost {
    fn default() -> Self {
        RecentCost { parts: [(0, 0); RECENT_PARTS as usize] }
    }
}

impl RecentCost {
    /// The parts in which something was lost, by their numbers.
    pub(super) fn parts(&self) -> impl Iterator<Item = (u64, u64)> {
        self.parts.iter().copied().filter(|(_, cost_ns)| *cost_ns > 0)
    }

    /// Adds a cost. What is older than all parts is left out.
    pub(super) fn add(&mut self, at_ns: u64, cost_ns: u64) {
        let number = at_ns / RECENT_PART_NS;
        let Some(part) = self.parts.get_mut((number % RECENT_PARTS) as usize) else { return };
        if part.0 < number || part.0 > number.saturating_add(RECENT_FAR) {
            *part = (number, 0);
        }
        if part.0 == number {
            part.1 = part.1.saturating_add(cost_ns);
        }
    }

    /// The sum of the parts that began in the minute after a moment.
    pub(super) fn since(&self, from_ns: u64) -> u64 {
        let from = from_ns / RECENT_PART_NS;
        let recent = self.parts.iter().filter(|(n, _)| *n > from && *n <= from.saturating_add(RECENT_PARTS));
        recent.fold(0, |sum, (_, cost_ns)| sum.saturating_add(*cost_ns))
    }
}

/// A rank that issues nothing for so long, in ns, pauses.
const PAUSE_NS: u64 = 200_000_000;

/// The clock of a host may be ahead of the observer's by this, in ns, where it is mapped.
const AHEAD_NS: u64 = 1_000_000_000;

/// One rank of a communicator.
#[derive(Debug, Clone)]
pub struct Member {
    /// The record of its segment.
    pub record: CommRecord,
    /// Collectives known to be done.
    pub finished: u64,
    /// True where beats say how many are done, and not its records one by one.
    pub(super) counted_by_beats: bool,
    /// Total waiting in ns, over the collectives whose waiting is known.
    pub waiting_ns: Option<u64>,
    /// How often it was late, and the worst, in ns.
    pub late: u64,
    /// Its greatest lateness in ns.
    pub worst_late_ns: Option<u64>,
    /// Wall time that others waited for it where nothing else held it, in ns.
    pub late_cost_ns: u64,
    /// The part of `late_cost_ns` of about the last minute; absent until the rank was late.
    pub(super) late_cost_lately: Option<Box<RecentCost>>,
    /// The latest call that NCCL has not issued yet.
    pub called: Option<Called>,
    /// The bytes that it exchanged with single others.
    pub(super) exchanged: Option<Box<Exchanged>>,
    /// Where its [`Seat`] is.
    pub(super) seat: u32,
    /// When the youngest operation that NCCL has issued was called, plus one, host monotonic ns. Tickets of lines and of
    /// operation slots do not compare.
    pub(super) issued_after_ns: u64,
    /// Of collectives and replays, the youngest order that was seen, plus one.
    pub(super) seen_below: [u64; 2],
    /// The youngest collective that it issued by a call, and when, host monotonic ns.
    pub(super) newest_call: Option<(u64, u64)>,
    /// The operation that it issued last of those that its GPU has started; replays aside.
    pub(super) newest_begun: Option<IssuedAt>,
    /// When its GPU last started one, host monotonic ns.
    pub(super) newest_start_ns: Option<u64>,
    /// When its host issued the newest operation of which its agent reported that its GPU has started it, by that host's clock.
    pub(super) begun_host_ns: u64,
    /// When its agent last reported that it had finished more operations, by the observer's clock.
    pub(super) progress_ns: Option<u64>,
    /// Ticket of the first operation that a CUDA graph captured or replayed.
    pub(super) graphs_from: u64,
    /// Start of the latest believed kernel by channel, GPU clock.
    pub(super) channels: Vec<Option<u64>>,
    /// Orders below this are known to be done: of collectives issued by calls, and by replays.
    pub(super) done_below: [u64; 2],
}

/// The state of a member for the wait-for graph. Those of a communicator lie side by side: there may be a million in
/// all, and members lie far apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Seat {
    /// The rank.
    pub rank: Rank,
    /// The number of its process's GPU.
    pub actor: u32,
    /// Collectives issued, by calls and by replays.
    pub issued: [u64; 2],
    /// Orders below these are done there, as far as was told without records of them.
    pub done: [u64; 2],
    /// It has aborted the communicator.
    pub aborted: bool,
    /// It has freed the communicator.
    pub through: bool,
}

impl Seat {
    pub(super) fn of(record: &CommRecord, actor: u32) -> Self {
        Seat {
            rank: record.rank,
            actor,
            issued: [record.issued, record.replayed],
            done: [0; 2],
            aborted: record.making == Some(Making::Aborted),
            through: record.finalized_ns.is_some(),
        }
    }

    /// Orders of a track below this are done there, as far as was told.
    pub(super) fn done(&self, track: Track) -> u64 {
        match track {
            Track::Collective => self.done[0],
            Track::Replay => self.done[1],
            Track::Pair(..) => 0,
        }
    }

    /// Operations issued in a track.
    pub(super) fn issued(&self, track: Track) -> Option<u64> {
        match track {
            Track::Collective => Some(self.issued[0]),
            Track::Replay => Some(self.issued[1]),
            Track::Pair(..) => None,
        }
    }
}

impl Member {
    /// The parts of about the last minute in which its late arrivals cost something: a part's number and its cost in ns.
    pub(super) fn late_lately(&self) -> impl Iterator<Item = (u64, u64)> {
        self.late_cost_lately.iter().flat_map(|l| l.parts())
    }

    /// The bytes that it exchanged with single others; absent where nothing.
    pub fn exchanged(&self) -> Option<&Exchanged> {
        self.exchanged.as_deref()
    }

    /// True where a node's beats report how far it is, once a second.
    pub fn is_counted_by_beats(&self) -> bool {
        self.counted_by_beats
    }

    /// One more of its collectives is done.
    pub(super) fn has_finished(&mut self) {
        self.finished += u64::from(!self.counted_by_beats);
    }

    /// The start of its last kernel on a channel, as far as one is believed.
    pub(super) fn last_start(&self, channel: u8) -> Option<u64> {
        self.channels.get(usize::from(channel)).copied().flatten()
    }

    pub(super) fn started(&mut self, channel: u8, at: u64) {
        let channel = usize::from(channel);
        if self.channels.len() <= channel {
            self.channels.resize(channel + 1, None);
        }
        self.channels[channel] = Some(at);
    }

    /// When its agent last reported that it had finished more operations, by the observer's clock; absent where every record comes.
    pub fn progress_ns(&self) -> Option<u64> {
        self.progress_ns
    }

    /// Takes the newest operation that its GPU has started, as its agent reports it at `now_ns`. One that is reported again is
    /// mapped by the clocks of before, and no host has issued one that is yet to come.
    pub(super) fn take_reported(&mut self, begun: Begun, now_ns: u64) {
        if begun.host_ns > self.begun_host_ns && begun.issued_ns <= now_ns.saturating_add(AHEAD_NS) {
            self.begun_host_ns = begun.host_ns;
            self.take_begun(IssuedAt::of_begun(begun));
        }
    }

    /// Forgets what another process was in.
    pub(super) fn begin_anew(&mut self) {
        (self.newest_begun, self.begun_host_ns, self.progress_ns) = (None, 0, None);
    }

    /// The newest operation that its GPU has started.
    pub fn begun(&self) -> Option<Begun> {
        self.newest_begun.map(IssuedAt::begun)
    }

    /// Notes an operation that its GPU has started.
    pub(super) fn note_begun(&mut self, op: &OpRecord) {
        if let Some(at) = IssuedAt::of(op).filter(|_| op.lane != Lane::Replay) {
            self.take_begun(at);
        }
    }

    /// Takes when an operation that its GPU has started was issued.
    pub(super) fn take_begun(&mut self, at: IssuedAt) {
        if self.newest_begun.is_none_or(|newest| newest.issued_ns() < at.issued_ns()) {
            self.newest_begun = Some(at);
        }
    }

    pub(super) fn has_seen(&mut self, track: Track, order: u64) {
        let at = match track {
            Track::Collective => 0,
            Track::Replay => 1,
            Track::Pair(..) => return,
        };
        self.seen_below[at] = self.seen_below[at].max(order.saturating_add(1));
    }

    /// Takes when a collective was issued. Returns true where the one before it was issued long before.
    pub(super) fn resumes(&mut self, order: u64, issued_ns: u64) -> bool {
        let before = self.newest_call;
        if before.is_some_and(|(newest, _)| newest >= order) {
            return false;
        }
        self.newest_call = Some((order, issued_ns));
        before.is_some_and(|(newest, t)| {
            newest.checked_add(1) == Some(order) && issued_ns.saturating_sub(t) >= PAUSE_NS
        })
    }

    pub(super) fn seen_below(&self, track: Track) -> u64 {
        match track {
            Track::Collective => self.seen_below[0],
            Track::Replay => self.seen_below[1],
            Track::Pair(..) => 0,
        }
    }

    /// Orders of a track below this are known to be done. Of pairs there may be as many as a hostile segment likes to
    /// name: nothing is kept of them.
    pub(super) fn done_below(&self, track: Track) -> u64 {
        match track {
            Track::Collective => self.done_below[0],
            Track::Replay => self.done_below[1],
            Track::Pair(..) => 0,
        }
    }

    pub(super) fn set_done_below(&mut self, track: Track, order: u64) {
        match track {
            Track::Collective => self.done_below[0] = order,
            Track::Replay => self.done_below[1] = order,
            Track::Pair(..) => {}
        }
    }

    /// Operations issued in a track, which is the next issue order.
    pub fn issued(&self, track: Track) -> Option<u64> {
        match track {
            Track::Collective => Some(self.record.issued),
            Track::Replay => Some(self.record.replayed),
            Track::Pair(..) => None,
        }
    }

    /// Operations issued, by calls and by replays.
    pub fn issued_in_all(&self) -> u64 {
        self.record.issued.saturating_add(self.record.replayed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::join::{Join, testing};
    use crate::model::{Flags, Returned, Update};

    /// Nobody issues a one-sided operation, so that it is waited for only until its call has returned.
    #[test]
    fn a_call_without_an_order_is_waited_for_until_it_returns_and_matched_with_nothing() {
        let mut join = Join::default();
        join.feed(testing::process(0));
        join.feed(testing::member(0, 2, 0));
        let mut op = testing::op(Lane::Call, 5);
        (op.order, op.func, op.count, op.called_ns) = (None, Func::WaitSignal, 0, Some(1_000));
        op.flags = Flags { preloaded: true, grouped: true, ..Flags::default() };
        let called = |join: &Join| {
            let c = join.communicator(op.comm).expect("its member is known");
            assert_eq!(c.incomplete().count(), 0);
            c.members()[&Rank(0)].called
        };
        join.feed(Update::Op(Box::new(op.clone())));
        let open = Called { ticket: 5, func: Func::WaitSignal, at_ns: 1_000, returned: Some(false) };
        assert_eq!(called(&join), Some(open));
        let returned = Some(Returned { at_ns: 2_000, result: 0 });
        join.feed(Update::Op(Box::new(OpRecord { returned, ..op.clone() })));
        assert_eq!(called(&join), None);
        // A forged order makes nothing of it either.
        join.feed(Update::Op(Box::new(OpRecord { order: Some(0), returned, ..op.clone() })));
        assert_eq!(called(&join), None);
    }

    /// Tickets of lines are larger than those of all operation slots.
    #[test]
    fn a_call_in_an_operation_slot_is_younger_than_an_issue_in_a_line() {
        let mut join = Join::default();
        join.feed(testing::process(0));
        join.feed(testing::member(0, 2, 1));
        let called = |join: &Join| {
            let c = join.communicators().next().expect("its member is known");
            c.members()[&Rank(0)].called.map(|c| c.at_ns)
        };
        let mut line = testing::all_reduce(0, 0, 10_000, None);
        line.ticket = 1 << 43;
        let mut slot = testing::all_reduce(0, 1, 0, None);
        (slot.ticket, slot.order, slot.issued_ns, slot.called_ns) = (7, None, None, Some(20_000));
        join.feed(Update::Op(Box::new(line)));
        join.feed(Update::Op(Box::new(slot.clone())));
        assert_eq!(called(&join), Some(20_000));
        // One that was called before is issued as another operation, or never.
        slot.called_ns = Some(4_000);
        join.feed(Update::Op(Box::new(slot)));
        assert_eq!(called(&join), None);
    }

    #[test]
    fn what_it_cost_lately_is_summed_by_parts() {
        let mut lately = RecentCost::default();
        for part in 1..140 {
            lately.add(part * RECENT_PART_NS, 2);
            lately.add(part * RECENT_PART_NS + RECENT_PART_NS / 2, 3);
        }
        assert_eq!(lately.since(79 * RECENT_PART_NS), 60 * 5, "as many parts as there are");
        assert_eq!(lately.since(136 * RECENT_PART_NS), 3 * 5);
        lately.add(100 * RECENT_PART_NS, 7);
        assert_eq!(lately.since(79 * RECENT_PART_NS), 60 * 5 + 7);
        lately.add(79 * RECENT_PART_NS, 7);
        assert_eq!(lately.since(79 * RECENT_PART_NS), 60 * 5 + 7, "too old");
        lately.add(u64::MAX, 1_000);
        assert!(lately.since(80 * RECENT_PART_NS) < 1_000, "a time that nobody has");
        lately.add(145 * RECENT_PART_NS, 1);
        assert_eq!(lately.since(144 * RECENT_PART_NS), 1);
    }
}
