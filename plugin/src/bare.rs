//! The hot path: eager operations, in lines of the calling thread's own. Here are bare collectives; groups, sends and
//! receives are in [`groups`].
//!
//! Such a collective is called and issued by one thread at once, outside of groups, captures and timed runs, on a
//! communicator of one node. NCCL gets NULL handles of it, so that it calls neither stops nor states, which would carry
//! nothing. The thread owns the ring that it writes to, hence nothing here is locked: plain stores, one clock stamp an
//! operation. Whatever does not fit goes the way of all other events, see [`crate::record`].
//!
//! A thread is known by its own address (its control block's), which no other living thread has.

#![expect(unsafe_code, reason = "reads the state that an open gate stands for")]

mod groups;

use crate::gate::{BEGUN, CALLED, Process, Ready, count, get, set};
use crate::governor::{LARGE_BYTES, PAUSE_NS};
use crate::handle::{VALUE_BITS, VALUE_MASK};
use crate::runtime::clock::now_ns;
use crate::runtime::names;
use crate::runtime::names::bytes_of;
use crate::runtime::prefetch;
use crate::runtime::sys::thread_address;
use crate::timing;
use core::ffi::c_char;
pub(crate) use groups::{PairIssue, Wanted, group_of_call, group_of_launch, order_flags};
use ringwatch_wire::codes::flag;
use ringwatch_wire::layout::{comm, line, lines};
use ringwatch_wire::lines::{Call, Head, Issue, IssueBits};
use ringwatch_wire::ring::Segment;
use ringwatch_wire::sync::{self, Word};

/// A call as NCCL tells it, with NCCL's own texts as names.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BareCall {
    pub(crate) func: *const c_char,
    pub(crate) dtype: *const c_char,
    pub(crate) count: u64,
    pub(crate) root: i32,
    pub(crate) stream: u64,
    pub(crate) captured: bool,
    pub(crate) user_tag: u64,
}

/// An issue as NCCL tells it, with NCCL's own texts as names.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BareIssue {
    pub(crate) seq: u64,
    pub(crate) func: *const c_char,
    pub(crate) dtype: *const c_char,
    pub(crate) count: u64,
    pub(crate) root: i32,
    pub(crate) algo: *const c_char,
    pub(crate) proto: *const c_char,
    pub(crate) channels: u8,
    pub(crate) warps: u8,
    pub(crate) in_place: bool,
    pub(crate) symmetric: bool,
}

impl BareIssue {
    #[inline(always)]
    fn flags(&self) -> u8 {
        (if self.in_place { flag::IN_PLACE } else { 0 }) | if self.symmetric { flag::SYMMETRIC } else { 0 }
    }
}

/// A communicator's first collectives have handles, which transfers of the network would name. Where they bring none,
/// later ones bring none either.
const FIRST_WITH_HANDLES: u64 = 64;
/// The low half of [`comm::NODES`].
const NODES: u64 = 0xffff_ffff;

/// A callback on a thread that has a ring.
#[derive(Debug, Clone, Copy)]
pub struct Here {
    pub(crate) process: &'static Process,
    pub(crate) context: u64,
    pub(crate) head: &'static Head,
    /// The ring's number.
    pub(crate) ring: u32,
}

/// Where a thread is.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Entry {
    /// In the first ring that is looked at.
    Here(Here),
    /// In another one, or in none yet: see [`elsewhere`].
    Elsewhere,
    /// The hot path is closed.
    Closed,
}

/// Enters the hot path.
#[inline(always)]
pub(crate) fn enter(process: &'static Process, context: u64) -> Entry {
    let Some(ready) = process.ready() else { return Entry::Closed };
    let thread = thread_address();
    let ring = ready.ring(first_ring(thread));
    let head = ready.head(ring);
    if get(head, lines::OWNER) == thread {
        Entry::Here(Here { process, context, head, ring })
    } else {
        Entry::Elsewhere
    }
}

/// Enters the hot path in a ring behind the first place, or in a free one; `None` where all belong to other threads.
pub(crate) fn elsewhere(process: &'static Process, context: u64) -> Option<Here> {
    let ready = process.ready()?;
    let thread = thread_address();
    let first = first_ring(thread);
    let all = || (0..=ready.ring_mask).map(|i| first.wrapping_add(i));
    let owned = all().find(|r| get(ready.head(*r), lines::OWNER) == thread);
    let ring = owned.or_else(|| all().find(|r| ringwatch_wire::lines::take(ready.head(*r), thread)))?;
    Some(Here { process, context, ring, head: ready.head(ring) })
}

/// Each function records an event and returns true, or returns false where the event has to go the other way. The handle of
/// what was recorded is NULL, and so are the parents.
impl Here {
    /// Read only where the gate was open.
    #[inline(always)]
    fn ready(&self) -> &'static Ready {
        // SAFETY: `enter`, `elsewhere` and `owned_ring` make a `Here` once the gate was seen open; others are of the parts of one.
        unsafe { self.process.seen_open() }
    }

    /// NCCL's version code; 0 unknown.
    #[inline(always)]
    pub(crate) fn nccl(&self) -> u32 {
        self.ready().nccl
    }

    #[inline(always)]
    fn comm(&self) -> &'static [Word; comm::WORDS] {
        self.ready().comm(self.context & VALUE_MASK)
    }

    #[inline(always)]
    fn is(&self, state: u64) -> bool {
        get(self.head, lines::CALL) == self.context ^ state
    }

    #[inline(always)]
    fn becomes(&self, state: u64) {
        set(self.head, lines::CALL, self.context ^ state);
    }

    /// A group begins. A bare call's, of a communicator on one node whose first operations brought no transfers, is
    /// recorded: it names the call.
    #[inline(always)]
    pub(crate) fn group(&self, depth: i32, captured: bool) -> bool {
        let (ticket, comm) = (self.context & VALUE_MASK, self.comm());
        let bare = depth <= 1
            && !captured
            && self.context >> VALUE_BITS == u64::from(self.ready().prefix)
            && sync::holds(comm, ticket)
            && get(comm, comm::NODES) & NODES == 1
            && get(comm, comm::ISSUED) >= FIRST_WITH_HANDLES;
        // A call that was never issued is none of what comes now.
        set(self.head, lines::CALL, if bare { self.context ^ BEGUN } else { 0 });
        bare
    }

    /// A collective is called.
    #[inline(always)]
    pub(crate) fn call(&self, call: &BareCall) -> bool {
        if !self.is(BEGUN) || call.captured || call.user_tag != 0 || call.count > line::COUNT_MASK {
            return false;
        }
        let comm = self.comm();
        // The governor looks at some, and at those after a pause and large ones, which are worth timing.
        let schedule = self.process.schedule();
        if schedule.takes(get(comm, comm::ISSUED)) {
            return false;
        }
        let (func, dtype) = self.call_codes(call.func, call.dtype);
        let now = now_ns();
        let pause = now.saturating_sub(get(comm, comm::CALLED_NS)) > PAUSE_NS;
        if schedule.any() && (pause || bytes_of(dtype, call.count) >= LARGE_BYTES) {
            return false;
        }
        let what = self.context & 0xffff
            | u64::from(func) << 16
            | u64::from(dtype) << 24
            | u64::from(call.root as u32) << 32;
        let recorded = Call { what, count: call.count, called_ns: now, stream: call.stream };
        let ticket = get(self.head, lines::NEXT);
        ringwatch_wire::lines::call(self.head, self.ready().line(self.ring, ticket), ticket, &recorded);
        set(comm, comm::CALLED_NS, now);
        self.becomes(CALLED);
        if self.ready().prefetches {
            prefetch::line_for_writing(self.ready().line(self.ring, ticket.wrapping_add(1)));
        }
        true
    }

    /// A kernel is launched.
    #[inline(always)]
    pub(crate) fn launch(&self) -> bool {
        self.is(CALLED)
    }

    /// A plan begins.
    #[inline(always)]
    pub(crate) fn plan(&self) -> bool {
        let called = self.is(CALLED);
        if called {
            count(self.head, lines::PLANS);
        }
        called
    }

    /// The facts of a collective's issue, without the launch.
    #[inline(always)]
    fn issue_bits(&self, issue: &BareIssue) -> IssueBits {
        let (algo, proto) = self.issue_codes(issue.algo, issue.proto);
        IssueBits {
            algo,
            proto,
            channels: issue.channels,
            warps: issue.warps,
            flags: issue.flags(),
            timed: self.process.schedule().why(),
            launch: 0,
        }
    }

    /// A collective is issued.
    #[inline(always)]
    pub(crate) fn issue(&self, issue: &BareIssue) -> bool {
        if !self.is(CALLED) {
            return false;
        }
        // Plain: NCCL issues a communicator's collectives one after the other, or ranks could have no common order.
        let comm = self.comm();
        let order = get(comm, comm::ISSUED);
        count(comm, comm::ISSUED);
        let bits = self.issue_bits(issue);
        let ticket = get(self.head, lines::NEXT).wrapping_sub(1);
        let recorded = Issue { seq: issue.seq, order, issue: bits.word() };
        let lap = sync::lap(ticket, u32::from(self.ready().shift));
        ringwatch_wire::lines::issue(self.ready().line(self.ring, ticket), lap, &recorded);
        count(self.head, lines::ISSUES);
        set(self.head, lines::CALL, 0);
        true
    }

    /// The codes of a call's names. They are the same few texts every time, hence remembered by their addresses.
    #[inline(always)]
    fn call_codes(&self, func: *const c_char, dtype: *const c_char) -> (u8, u8) {
        let key = names_key(func, dtype);
        let codes = get(self.head, lines::CODES);
        if get(self.head, lines::CALL_NAMES) == key {
            return (codes as u8, (codes >> 8) as u8);
        }
        self.learn_call(key, func, dtype)
    }

    #[cold]
    #[inline(never)]
    fn learn_call(&self, key: u64, func: *const c_char, dtype: *const c_char) -> (u8, u8) {
        let codes = (names::func(func), names::dtype(dtype));
        if codes.0 == names::BROADCAST {
            timing::broadcast_in_line();
        }
        self.learn(lines::CALL_NAMES, key, 0, codes);
        codes
    }

    /// The codes of an issue's names.
    #[inline(always)]
    fn issue_codes(&self, algo: *const c_char, proto: *const c_char) -> (u8, u8) {
        let key = names_key(algo, proto);
        let codes = get(self.head, lines::CODES);
        if get(self.head, lines::ISSUE_NAMES) == key {
            return ((codes >> 16) as u8, (codes >> 24) as u8);
        }
        self.learn_issue(key, algo, proto)
    }

    #[cold]
    #[inline(never)]
    fn learn_issue(&self, key: u64, algo: *const c_char, proto: *const c_char) -> (u8, u8) {
        let codes = (names::algo(algo), names::proto(proto));
        self.learn(lines::ISSUE_NAMES, key, 16, codes);
        codes
    }

    fn learn(&self, at: usize, key: u64, shift: u32, (a, b): (u8, u8)) {
        let known = get(self.head, lines::CODES) & !(0xffff << shift);
        set(self.head, lines::CODES, known | (u64::from(a) | u64::from(b) << 8) << shift);
        set(self.head, at, key);
    }
}

/// The addresses of two texts of one library, by their low halves: it is smaller than what these can tell apart.
#[inline(always)]
fn names_key(a: *const c_char, b: *const c_char) -> u64 {
    (a.addr() as u64) << 32 | b.addr() as u64 & 0xffff_ffff
}

/// Forgets the names that the rings remember: they may be of a library that is gone. Called at init.
pub(crate) fn forget_names(segment: &Segment<'static>) {
    for head in segment.lines.heads() {
        set(head, lines::CALL_NAMES, 0);
        set(head, lines::ISSUE_NAMES, 0);
    }
}

/// Where a thread's ring is looked for first.
#[inline(always)]
fn first_ring(thread: u64) -> u32 {
    (thread.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32 >> 16
}
