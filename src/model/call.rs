//! The calls of a process, and where it left its usual order.

use super::{CommId, Func, SegmentId, Track};

/// A call of one kind: the same function on the same track of the same communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CallKind {
    /// The communicator.
    pub comm: CommId,
    /// The track.
    pub track: Track,
    /// The function.
    pub func: Func,
}

/// One call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call {
    /// The kind of call.
    pub kind: CallKind,
    /// Its issue order on the track.
    pub order: u64,
    /// When it was issued, host monotonic ns.
    pub issued_ns: u64,
}

/// A call that came in the place of another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Departure {
    /// The call.
    pub call: Call,
    /// The call that always came here before; its issue order is the one that it would have had.
    pub usual: Call,
    /// So often.
    pub times: u16,
    /// True where the call is what usually follows the one that did not come.
    pub left_out: bool,
    /// The time since this place in the loop was last passed, in ns.
    pub loop_ns: u64,
}

impl Departure {
    /// When the loop ends in which it was: one departure has others behind it.
    pub fn loop_ends_ns(&self) -> u64 {
        self.call.issued_ns.saturating_add(self.loop_ns)
    }

    /// The call that is wrong: the one that was left out, or the one that was issued instead of it.
    pub fn wrong(&self) -> &Call {
        if self.left_out { &self.usual } else { &self.call }
    }

    /// Until when what stands still may stand still because of it: operations that were called before are still to run, and
    /// calls of the same kind make up for each other until the loop ends.
    pub fn until_ns(&self) -> u64 {
        self.call.issued_ns.saturating_add(self.loop_ns.saturating_mul(2))
    }
}

/// How a process mixes transfers and collectives of one communicator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mix {
    /// The communicator.
    pub comm: CommId,
    /// The order of the first collective of `before`.
    pub first: u64,
    /// For the last collectives, one after the other: how many transfers it issued between the one before and this one.
    pub before: Vec<u32>,
    /// The number of transfers since the last collective.
    pub since: u32,
}

/// How a process keeps to the order of its calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallState {
    /// The process.
    pub segment: SegmentId,
    /// Where it left its usual order; absent where it did not.
    pub left: Option<Departure>,
    /// When it last issued the call that usually comes next, host monotonic ns.
    pub usual_ns: Option<u64>,
    /// Its communicators that have both transfers and collectives.
    pub mixes: Vec<Mix>,
}
