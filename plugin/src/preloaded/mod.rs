//! Tables of NCCL's own functions as the preloaded library sees them called: communicators, groups, and calls that
//! NCCL has yet to report. [`crate::calls`] fills these tables, and [`crate::record`] asks them.

#![expect(unsafe_code, reason = "one mapping is shared by all threads of the process")]

pub(crate) mod pending;
pub(crate) mod table;

use crate::gate::PRELOAD;
use crate::live::{self, Live};
use crate::opening::open_for_calls;
use crate::runtime::sys::{self, InChild};
use ringwatch_wire::layout::op;
use ringwatch_wire::sync::Word;

/// Threads that can be in a group at once; calls of others are taken one by one.
pub(crate) const GROUPS: usize = 128;
/// Words of a group.
pub(crate) const GROUP_WORDS: usize = 5;

/// The other source that reports a communicator's operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Mode {
    /// Not known yet: it is being made.
    Unknown = 0,
    /// The profiler, inside the calls.
    Calls = 1,
    /// The profiler, when NCCL issues.
    Events = 2,
    /// Nobody.
    Alone = 3,
    /// The profiler, under a communicator that could not be told to be this one: all is left to it.
    Apart = 4,
}

/// Communicators at most, as the segment has.
pub(crate) const COMMS: usize = 256;
/// Operations of a full segment.
pub(crate) const OPS: usize = 8192;

/// Words of a communicator.
pub(crate) mod entry {
    /// Its ticket plus one; 0 for none.
    pub(crate) const TICKET: usize = 0;
    pub(crate) const MODE: usize = 1;
    /// The profiler's init has come.
    pub(crate) const ADOPTED: usize = 2;
    /// Ticket plus one of the call that its thread is inside of.
    pub(crate) const OPEN_CALL: usize = 3;
    pub(crate) const POINTER: usize = 4;
    /// Where the job wants its pointer.
    pub(crate) const PLACE: usize = 5;
    /// Children made of it.
    pub(crate) const CHILDREN: usize = 6;
    /// Id to be told once it is ready; 0 none.
    pub(crate) const ID: usize = 7;
    /// 1: its rank is not known from the call.
    pub(crate) const RANK_UNKNOWN: usize = 8;
    /// Next of the group that makes it, plus one.
    pub(crate) const NEXT: usize = 9;
    /// The pair of CUDA events of the launch that is under way, as a number; 0 none.
    pub(crate) const SHOT: usize = 10;
    /// Tag of the group that its calls are in.
    pub(crate) const GROUP: usize = 11;
    /// Thread that makes it.
    pub(crate) const THREAD: usize = 12;
    /// 1: its calls return before NCCL has launched anything.
    pub(crate) const ASYNC: usize = 13;
    /// 1: it was found to be ready.
    pub(crate) const READY: usize = 14;
    /// Next communicator whose calls are in the same group, index plus one.
    pub(crate) const NEXT_CALLED: usize = 15;
    /// Stream of its first call in the group.
    pub(crate) const STREAM: usize = 16;
    /// Collectives of the group that have an order and are not issued.
    pub(crate) const WAITING: usize = 17;
    pub(crate) const WORDS: usize = 18;
}

/// Private memory, empty in a forked child.
#[repr(C)]
pub(crate) struct Page {
    /// 0 or OPEN.
    pub(crate) phase: Word,
    /// The profiler's ABI; 0 while there was no init.
    pub(crate) abi: Word,
    /// Groups begun, for their tags.
    pub(crate) tags: Word,
    /// Communicators made whose id nobody gives.
    pub(crate) made: Word,
    pub(crate) comms: [[Word; entry::WORDS]; COMMS],
    pub(crate) pending: [[Word; pending::WORDS]; COMMS],
    pub(crate) groups: [[Word; GROUP_WORDS]; GROUPS],
    /// By the operation's slot: the one before it in its group, ticket plus one, and its order.
    pub(crate) chain: [[Word; 2]; OPS],
    pub(crate) table: [Word; table::WORDS],
}

const OPEN: u64 = 1;

/// Address of the page; 0 until the first communicator is made by a call that was seen.
static PAGE: Word = Word::new(0);

/// The tables and the state that a call works with.
#[derive(Clone, Copy)]
pub(crate) struct Calls {
    pub(crate) page: &'static Page,
    pub(crate) live: &'static Live,
}

pub(crate) fn page() -> Option<&'static Page> {
    let at = PAGE.get_first();
    // SAFETY: a non-zero address is of a mapping of a whole `Page` that is never unmapped; all bytes, zero at
    // first, are valid for its words.
    unsafe { core::ptr::with_exposed_provenance::<Page>(at as usize).as_ref() }
}

/// True where a call was ever seen: without the preloaded library the rest costs nothing.
#[inline(always)]
pub(crate) fn seen() -> bool {
    PAGE.get() != 0
}

impl Calls {
    /// `None` before the first communicator, in a forked child, and where nothing could be mapped.
    #[inline]
    pub(crate) fn get() -> Option<Self> {
        let page = page()?;
        if page.phase.get_first() != OPEN {
            return None;
        }
        Some(Calls { page, live: live::live()? })
    }

    /// The same, opened if need be. This is init: it may take its time.
    pub(crate) fn open() -> Option<Self> {
        let live = open_for_calls()?;
        if page().is_none() {
            let bytes = size_of::<Page>();
            let at = sys::map(None, bytes)?;
            // SAFETY: our own fresh mapping, whole.
            let wiped = unsafe { sys::on_fork(at, bytes, InChild::Wiped) };
            if !wiped || !PAGE.replace(0, at.expose_provenance() as u64) {
                // SAFETY: nobody else knows this mapping.
                unsafe { sys::unmap(at, bytes) };
            }
        }
        let page = page()?;
        page.phase.set_last(OPEN);
        live.bare.block(PRELOAD);
        Some(Calls { page, live })
    }

    pub(crate) fn entry(&self, ticket: u64) -> Option<&'static [Word; entry::WORDS]> {
        let e = self.page.comms.get(self.index(ticket))?;
        if get(e, entry::TICKET) == ticket + 1 { Some(e) } else { None }
    }

    pub(crate) fn index(&self, ticket: u64) -> usize {
        (ticket & self.live.segment.comm.slots().wrapping_sub(1)) as usize
    }

    /// The communicator of a pointer: its ticket and its words.
    #[inline]
    pub(crate) fn comm(&self, pointer: usize) -> Option<(u64, &'static [Word; entry::WORDS])> {
        let ticket = table::find(&self.page.table, pointer as u64)?;
        Some((ticket, self.entry(ticket)?))
    }
}

pub(crate) fn get(words: &[Word], i: usize) -> u64 {
    words.get(i).map_or(0, Word::get)
}

pub(crate) fn set(words: &[Word], i: usize, value: u64) {
    if let Some(w) = words.get(i) {
        w.set(value);
    }
}

pub(crate) fn mode(e: &[Word]) -> Mode {
    match get(e, entry::MODE) {
        1 => Mode::Calls,
        2 => Mode::Events,
        3 => Mode::Alone,
        4 => Mode::Apart,
        _ => Mode::Unknown,
    }
}

/// A call that the preloaded library saw.
#[derive(Clone, Copy)]
pub(crate) struct Seen {
    /// Its operation's ticket.
    pub(crate) op: u64,
    /// Its operation's word [`op::WHAT`].
    pub(crate) what: u64,
}

/// The call that the profiler's event of a call is of, when the preloaded library saw it.
pub(crate) fn told(live: &Live, comm: u64, func: u8) -> Option<Seen> {
    let calls = Calls::get()?;
    let open = calls.entry(comm)?.get(entry::OPEN_CALL)?;
    let ticket = open.get().checked_sub(1)?;
    let slot = live.segment.op.held(ticket)?;
    let what = get(slot, op::WHAT);
    // NCCL makes operations of their own of an all-to-all.
    if (what >> 24 & 0xff) as u8 != func || !open.replace(ticket + 1, 0) {
        return None;
    }
    Some(Seen { op: ticket, what })
}

/// The oldest call that a profiler's event of an issue can be of, where NCCL does not tell of calls.
#[cold]
#[inline(never)]
pub(crate) fn pending(comm: u64, func: u8, dtype: u8, count: u64, peer: i32) -> Option<u64> {
    let calls = Calls::get()?;
    if mode(calls.entry(comm)?) != Mode::Events {
        return None;
    }
    pending::take(&calls, comm, pending::key_of(func, dtype, count, peer))
}
