//! The communicator that a context names.

use crate::handle::{Kind, ticket_of};
use ringwatch_wire::codes::{Loss, call};
use ringwatch_wire::layout::{comm, head};
use ringwatch_wire::ring::Segment;
use ringwatch_wire::sync::Word;

/// A communicator that a context names.
#[derive(Clone, Copy)]
pub(crate) struct Comm {
    pub(crate) ticket: u64,
    pub(crate) slot: &'static [Word; comm::WORDS],
}

impl Comm {
    /// The communicator of a ticket.
    pub(crate) fn of(segment: &Segment<'static>, ticket: u64) -> Option<Self> {
        segment.comm.held(ticket).map(|slot| Comm { ticket, slot })
    }

    /// The communicator of a slot.
    pub(crate) fn new(ticket: u64, slot: &'static [Word; comm::WORDS]) -> Self {
        Comm { ticket, slot }
    }

    /// A word of its slot.
    #[inline]
    pub(crate) fn word(&self, i: usize) -> u64 {
        word(self.slot, i)
    }

    /// Adds to a word of its slot, and says what it was.
    #[inline]
    pub(crate) fn add(&self, i: usize, n: u64) -> u64 {
        self.slot.get(i).map_or(0, |w| w.add(n))
    }

    /// Books a recorded event in the communicator's own books. The segment's are shared by all threads, and a line that
    /// every GPU's thread writes to costs each of them a few hundred ns an operation.
    #[inline]
    pub(crate) fn book(&self, segment: &Segment<'static>, i: usize, one: u64) {
        const FULL: u64 = 1 << 31 | 1 << 63;
        if self.add(i, one) & FULL != 0 {
            settle(segment, self.slot);
        }
    }

    /// Changes a note of the writer's own, if it is `old`; true when this call did it.
    pub(crate) fn replace(&self, i: usize, old: u64, new: u64) -> bool {
        self.slot.get(i).is_some_and(|w| w.replace(old, new))
    }

    /// Changes a note of the writer's own.
    #[inline]
    pub(crate) fn set(&self, i: usize, value: u64) {
        if let Some(w) = self.slot.get(i) {
            w.set(value);
        }
    }
}

#[inline(always)]
pub(crate) fn comm_of(segment: &Segment<'static>, nonce: u16, context: u64) -> Result<Comm, Loss> {
    let ticket = ticket_of(context, Kind::Comm, nonce)?;
    let slot = segment.comm.held(ticket).ok_or(Loss::NoComm)?;
    Ok(Comm { ticket, slot })
}

/// Fills in who a communicator is, from the first operation that says so (ABI v1 to v3).
#[inline(always)]
pub(crate) fn learn(segment: &Segment<'static>, c: Comm, hash: Option<u64>, rank: i32) {
    let Some(hash) = hash else { return };
    if word(c.slot, comm::NODES) & comm::KNOWN != 0 {
        return;
    }
    let rank = u64::from(u32::try_from(rank).unwrap_or(0));
    if let Some(claim) = segment.comm.claim_again(c.ticket) {
        claim.set(comm::ID, hash);
        claim.set(comm::RANK, word(c.slot, comm::RANK) >> 32 << 32 | rank);
        claim.set(comm::NODES, comm::KNOWN);
        claim.publish();
    }
}

/// Adds a communicator's books to the segment's.
#[cold]
pub(crate) fn settle(segment: &Segment<'static>, slot: &[Word; comm::WORDS]) {
    let take = |i: usize| {
        let Some(w) = slot.get(i) else { return 0 };
        loop {
            let n = w.get();
            if w.replace(n, 0) {
                return n;
            }
        }
    };
    let s = segment;
    for (i, low, high) in
        [(comm::CALLS, call::COLL_CALL, call::P2P_CALL), (comm::ISSUES, call::COLL, call::P2P)]
    {
        let n = take(i);
        s.add(head::RECORDED + low, n & 0xffff_ffff);
        s.add(head::RECORDED + high, n >> 32);
    }
    // The numbers of plans go on: they only have to differ.
    s.add(head::NEXT_PLAN, take(comm::PLANS));
}

#[inline]
fn word(slot: &[Word], i: usize) -> u64 {
    slot.get(i).map_or(0, Word::get)
}
