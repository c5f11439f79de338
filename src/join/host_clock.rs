//! Times of other hosts, put on the observer's clock.
//!
//! Every host's monotonic clock begins at its own boot. A process writes down a pair of both its clocks when it
//! starts; with the observer's own pair that gives the distance between the hosts, as exactly as their wall clocks
//! agree. So everything behind the feed knows one clock; what needs more exactness compares ranks of one host only.

use crate::model::{CommRecord, Fact, Liveness, Making, OpRecord, SegmentRecord, Update};

const SECOND_NS: u64 = 1_000_000_000;

/// Pairs that differ by less than this, in ns, are of one clock: a wall clock is set now and then.
const SAME_NS: i64 = 2_000_000_000;

/// A moment by both clocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClockPair {
    /// Host monotonic ns.
    pub mono_ns: u64,
    /// Wall clock ns since the epoch.
    pub unix_ns: u64,
}

impl ClockPair {
    fn distance(self) -> Option<i64> {
        self.unix_ns.checked_signed_diff(self.mono_ns)
    }

    /// The number to add to a process's times to have them on this clock.
    pub(super) fn shift_of(self, process: &SegmentRecord) -> i64 {
        if process.created_unix_ns == 0 {
            return 0;
        }
        let theirs = ClockPair { mono_ns: process.created_ns, unix_ns: process.created_unix_ns }.distance();
        let shift = theirs.zip(self.distance()).and_then(|(t, o)| t.checked_sub(o)).unwrap_or(0);
        if shift.unsigned_abs() < SAME_NS.unsigned_abs() { 0 } else { shift }
    }
}

fn at(ns: &mut u64, by: i64) {
    *ns = ns.saturating_add_signed(by);
}

fn may_be(ns: &mut Option<u64>, by: i64) {
    if let Some(ns) = ns {
        at(ns, by);
    }
}

/// Puts all host times of an update on the observer's clock.
pub(super) fn shift(update: &mut Update, by: i64) {
    match update {
        Update::Segment(s) => segment(s, by),
        Update::Comm(c) => comm(c, by),
        Update::Op(o) => op(o, by),
        Update::Host(h) => {
            at(&mut h.at_ns, by);
            may_be(&mut h.stack_ns, by);
        }
        Update::Hardware(r) => {
            at(&mut r.at_ns, by);
            if let Fact::Traffic(t) = &mut r.fact {
                at(&mut t.from_ns, by);
            }
        }
        Update::Told(t) => {
            op(&mut t.op, by);
            for ns in [&mut t.started_ns, &mut t.ended_seen_ns] {
                may_be(ns, by);
            }
        }
        Update::Sketch(s) => at(&mut s.from_ns, by),
        Update::Calls(c) => {
            may_be(&mut c.usual_ns, by);
            for call in c.left.iter_mut().flat_map(|d| [&mut d.call, &mut d.usual]) {
                at(&mut call.issued_ns, by);
            }
        }
        Update::Work(w) => {
            w.long.iter_mut().for_each(|call| at(&mut call.issued_ns, by));
            for s in &mut w.seconds {
                let mut middle_ns = s.second.saturating_mul(SECOND_NS).saturating_add(SECOND_NS / 2);
                at(&mut middle_ns, by);
                s.second = middle_ns / SECOND_NS;
            }
        }
        Update::Beat(b) => b.begun.iter_mut().for_each(|begun| at(&mut begun.issued_ns, by)),
        // Silence is by the observer's own clock.
        Update::Left { .. }
        | Update::Missed { .. }
        | Update::Pair(_)
        | Update::Signatures(_)
        | Update::Clock { .. }
        | Update::Disputed { .. }
        | Update::Silent { .. } => {}
    }
}

fn segment(s: &mut SegmentRecord, by: i64) {
    at(&mut s.created_ns, by);
    if let Liveness::Gone(ns) = &mut s.liveness {
        may_be(ns, by);
    }
}

fn comm(c: &mut CommRecord, by: i64) {
    at(&mut c.init_ns, by);
    may_be(&mut c.finalized_ns, by);
    if let Some(Making::Ready(ns)) = &mut c.making {
        may_be(ns, by);
    }
}

fn op(o: &mut OpRecord, by: i64) {
    for ns in [&mut o.called_ns, &mut o.issued_ns, &mut o.event_seen_ns] {
        may_be(ns, by);
    }
    if let Some(r) = &mut o.returned {
        at(&mut r.at_ns, by);
    }
    for s in &mut o.stamps {
        at(&mut s.start_seen_ns, by);
        may_be(&mut s.stop_seen_ns, by);
    }
    for n in &mut o.net {
        at(&mut n.start_ns, by);
        may_be(&mut n.stop_ns, by);
        if let Some((_, since)) = &mut n.waiting {
            at(since, by);
        }
    }
}
