//! The rank that a tuner's init belongs to. NCCL does not tell a tuner its rank, but it makes a communicator's
//! profiler and tuner on one thread, the profiler first.

use crate::live;
use crate::runtime::sys;
use ringwatch_wire::layout::comm;
use ringwatch_wire::sync::Word;

/// The profiler's init of a communicator.
struct Init {
    /// The thread that it ran on; 0 for none.
    thread: Word,
    /// The communicator's slot in the segment.
    ticket: Word,
}

/// More threads than make communicators at once.
const INITS: usize = 256;

static RECENT: [Init; INITS] = [const { Init { thread: Word::new(0), ticket: Word::new(0) } }; INITS];
static NEXT: Word = Word::new(0);

/// Notes which communicator this thread is making.
pub(crate) fn note(ticket: u64) {
    let thread = sys::thread();
    let place = RECENT.iter().find(|i| i.thread.get() == thread).or_else(|| {
        let oldest = (NEXT.add(1) % INITS as u64) as usize;
        RECENT.get(oldest)
    });
    if let Some(init) = place {
        init.thread.set(0);
        init.ticket.set(ticket);
        init.thread.set_last(thread);
    }
}

/// A communicator as the profiler's init has entered it in the segment.
#[derive(Debug, Clone, Copy)]
pub(super) struct Member {
    /// Its slot in the segment.
    pub(super) ticket: u64,
    /// NCCL's id of the communicator.
    pub(super) comm_id: u64,
    /// This rank.
    pub(super) rank: u32,
}

/// The communicator that this thread is making, where it has this id, if one is given, and this number of ranks.
pub(super) fn member(comm_id: Option<u64>, ranks: u32) -> Option<Member> {
    let thread = sys::thread();
    let ticket = RECENT.iter().find(|i| i.thread.get_first() == thread)?.ticket.get();
    let slot = live::live()?.segment.comm.held(ticket)?;
    let word = |i: usize| slot.get(i).map_or(0, Word::get);
    let (rank, of) = (word(comm::RANK) as u32, (word(comm::RANK) >> 32) as u32);
    let is_it = word(comm::NODES) & comm::KNOWN != 0
        && of == ranks
        && word(comm::FINALIZED_NS) == 0
        && comm_id.is_none_or(|id| id == word(comm::ID));
    if is_it { Some(Member { ticket, comm_id: word(comm::ID), rank }) } else { None }
}

/// Enters in the segment what became of a communicator's rules.
pub(super) fn record(ticket: u64, code: u8) {
    let Some(slot) = live::live().and_then(|l| l.segment.comm.held(ticket)) else { return };
    if let Some(word) = slot.get(comm::NODES) {
        let others = word.get() & !(0xff << comm::TUNED_SHIFT);
        word.set(others | u64::from(code) << comm::TUNED_SHIFT);
    }
}
