//! Groups, sends and receives in lines.
//!
//! NCCL gets no handle of such a group, its calls, launches and operations. What it issues names no call then: it is the
//! issue of the first call of the group that looks the same and was not issued. A launch has a line of its own, with its
//! time, so that operations which were launched together are known.
//!
//! The first call decides for the whole group. A group in which something may be timed by CUDA events has a record instead
//! and its calls have handles, as has the rest of a group in which a call cannot be in a line.

use super::{BareCall, BareIssue, FIRST_WITH_HANDLES, Here, NODES, first_ring};
use crate::communicator::Comm;
use crate::gate::{BEGUN, CalledLine, Process, RUN_MASK, Ready, count, get, set};
use crate::governor::{self, COLLECTIVE, LARGE_BYTES, PAUSE_NS, TOGETHER, WHOLE};
use crate::handle::{self, VALUE_BITS, VALUE_MASK};
use crate::live::{self, Live};
use crate::runtime::clock::now_ns;
use crate::runtime::names;
use crate::runtime::names::{BROADCAST, RECV, bytes_of, code_of};
use crate::runtime::prefetch;
use crate::runtime::statics::STATICS;
use crate::runtime::sys::thread_address;
use crate::timing;
use core::ffi::c_char;
use ringwatch_wire::codes::{Flaw, flag};
use ringwatch_wire::layout::{comm, group, line, lines, op};
use ringwatch_wire::lines::{Call, Head, Issue, IssueBits, Line, is_pending, take_call};
use ringwatch_wire::sync::{self, Word};

/// The word [`lines::CALL`] of a thread in a group: how far it is, and the depth of the group above. No context is so small.
/// Nothing was called.
const GROUP_BEGUN: u64 = 1;
/// Calls are in lines.
const IN_LINES: u64 = 2;
/// Calls have records.
const IN_RECORDS: u64 = 3;
const STATE: u64 = 0xff;
const DEPTH_SHIFT: u32 = 8;
const DEPTH_MAX: i32 = 0xffff;
/// The calls of a group take no longer than that, and what they write is seen earlier, in ns.
const LATELY_NS: u64 = 100_000;
/// Of launches that carry several operations, one in so many and one is looked at.
const OFTEN_TOGETHER: u64 = 63;
/// Larger groups have records, since each issue looks for its call.
const CALLS_MAX: u64 = 256;

/// A send or receive as NCCL tells it is issued, with NCCL's own texts as names.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PairIssue {
    pub(crate) func: *const c_char,
    pub(crate) dtype: *const c_char,
    pub(crate) count: u64,
    pub(crate) peer: i32,
    pub(crate) channels: u8,
}

/// The call of an issue, as far as the issue tells it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted {
    /// The words [`line::WHAT`] and [`line::COUNT`].
    what: u64,
    count: u64,
}

/// Functions that reduce keep their types. NCCL issues others as bytes.
const REDUCING: u64 = 1 << code_of("AllReduce") | 1 << code_of("Reduce") | 1 << code_of("ReduceScatter");
/// The root of a call that does not name its peer.
const NO_ROOT: i32 = -1;

const fn kind_of(func: u8) -> u64 {
    if func == RECV { line::RECV } else { line::SEND }
}

#[inline(always)]
fn what_word(comm: u64, func: u8, dtype: u8, root: i32) -> u64 {
    comm & 0xffff | u64::from(func) << 16 | u64::from(dtype) << 24 | u64::from(root as u32) << 32
}

impl Wanted {
    /// The call of a collective.
    #[inline(always)]
    pub(crate) fn collective(comm: u64, func: u8, dtype: u8, count: u64, root: i32) -> Self {
        Wanted { what: what_word(comm, func, dtype, root), count }
    }

    /// The call of a send or receive.
    #[inline(always)]
    pub(crate) fn pair(comm: u64, func: u8, dtype: u8, count: u64) -> Self {
        let count = count & line::COUNT_MASK | kind_of(func) << line::KIND_SHIFT;
        Wanted { what: what_word(comm, func, dtype, NO_ROOT), count }
    }

    /// True for a line of the very same call.
    #[inline(always)]
    fn is(&self, of: &Line) -> bool {
        get(of, line::WHAT) == self.what && get(of, line::COUNT) == self.count
    }

    /// True for a line of a call of as many bytes, where these count.
    fn is_as_bytes(&self, of: &Line) -> bool {
        const DTYPE: u64 = 0xff << 24;
        let (what, count) = (get(of, line::WHAT), get(of, line::COUNT));
        let bytes = |what: u64, count: u64| bytes_of((what >> 24) as u8, count & line::COUNT_MASK);
        REDUCING >> (self.what >> 16 & 63) & 1 == 0
            && (what ^ self.what) & !DTYPE == 0
            && (count ^ self.count) & !line::COUNT_MASK == 0
            && bytes(what, count) == bytes(self.what, self.count)
    }
}

/// The lines of a group that may not have been issued.
#[inline(always)]
fn pending(ready: &Ready, head: &[Word], next: u64) -> core::ops::Range<u64> {
    let oldest = next.saturating_sub(1 << (ready.shift & 31));
    get(head, lines::PENDING).max(oldest)..next
}

/// The first pending line of a call of as many bytes.
#[inline(never)]
fn find_as_bytes(ready: &Ready, head: &[Word], ring: u32, wanted: &Wanted) -> Option<u64> {
    let mut range = pending(ready, head, get(head, lines::NEXT));
    range.find(|at| {
        let line = ready.line(ring, *at);
        is_pending(line) && wanted.is_as_bytes(line)
    })
}

/// How far a launch is behind a line.
#[inline(always)]
fn distance(head: &[Word], ticket: u64) -> u64 {
    match get(head, lines::LAUNCHED) {
        0 => IssueBits::NO_LAUNCH,
        launched => launched.wrapping_sub(1).wrapping_sub(ticket),
    }
}

impl Here {
    /// True where the communicator's operations may be in lines: it is on one node, and its first operations, which had
    /// handles, brought no transfers. Sends and receives are counted by their launches.
    #[inline(always)]
    fn has_lines(&self) -> bool {
        let (ticket, comm) = (self.context & VALUE_MASK, self.comm());
        self.context >> VALUE_BITS == u64::from(self.ready().prefix)
            && sync::holds(comm, ticket)
            && get(comm, comm::NODES) & NODES == 1
            && (get(comm, comm::ISSUED) >= FIRST_WITH_HANDLES || get(comm, comm::PLANS) >= FIRST_WITH_HANDLES)
    }

    /// A group begins that is not known to be a bare collective's.
    #[inline(always)]
    pub(crate) fn begin_group(&self, depth: i32, captured: bool) -> bool {
        if captured || !self.has_lines() {
            return false;
        }
        if depth <= 1 {
            self.becomes(BEGUN);
            return true;
        }
        if STATICS.groups_elsewhere.get() != 0 {
            return false;
        }
        self.enter_group(depth);
        true
    }

    /// Notes that the thread is in a group, and returns the state.
    fn enter_group(&self, depth: i32) -> u64 {
        let state = GROUP_BEGUN | (depth.clamp(0, DEPTH_MAX) as u64) << DEPTH_SHIFT;
        set(self.head, lines::CALL, state);
        set(self.head, lines::PENDING, get(self.head, lines::NEXT));
        set(self.head, lines::LAUNCHED, 0);
        set(self.head, lines::RECORDED, 0);
        state
    }

    /// The state of a group; 0 where the thread is in none.
    #[inline(always)]
    fn group_state(&self) -> u64 {
        let state = get(self.head, lines::CALL);
        if state >> VALUE_BITS == 0 { state } else { 0 }
    }

    #[inline(always)]
    fn is_in_lines(&self) -> bool {
        self.group_state() & STATE == IN_LINES && self.has_lines()
    }

    /// True where an issue may be of a line: the communicator was looked at when the call was recorded.
    #[inline(always)]
    fn may_be_of_line(&self) -> bool {
        self.group_state() & STATE == IN_LINES && self.context >> VALUE_BITS == u64::from(self.ready().prefix)
    }

    /// A collective is called in a group.
    #[inline(always)]
    pub(crate) fn call_in_group(&self, call: &BareCall) -> bool {
        match self.group_state() {
            0 => false,
            state => {
                let func = names::func(call.func);
                if func == BROADCAST {
                    timing::broadcast_in_line();
                }
                self.call_of(state, call, func, line::COLLECTIVE)
            }
        }
    }

    /// A send or receive is called. One outside of groups is a group of its own, and so is an all-to-all.
    #[inline(always)]
    pub(crate) fn pair_call(&self, call: &BareCall) -> bool {
        let state = if self.is(BEGUN) { self.enter_group(1) } else { self.group_state() };
        let func = names::func(call.func);
        state != 0 && self.call_of(state, call, func, kind_of(func))
    }

    #[inline(always)]
    fn call_of(&self, state: u64, call: &BareCall, func: u8, kind: u64) -> bool {
        let dtype = names::dtype(call.dtype);
        let now = now_ns();
        let ticket = get(self.head, lines::NEXT);
        let fits = !call.captured
            && call.user_tag == 0
            && call.count <= line::COUNT_MASK
            && ticket.wrapping_sub(get(self.head, lines::PENDING)) < CALLS_MAX
            && self.has_lines();
        let begins = state & STATE == GROUP_BEGUN;
        if state & STATE == IN_RECORDS
            || !fits
            || begins && self.is_worth_timing(kind, dtype, call.count, now)
        {
            if begins {
                set(self.head, lines::CALL, state & !STATE | IN_RECORDS);
            }
            return false;
        }
        if begins {
            set(self.head, lines::CALL, state & !STATE | IN_LINES);
        }
        let what = what_word(self.context, func, dtype, call.root);
        let count_word = call.count | kind << line::KIND_SHIFT;
        let recorded = Call { what, count: count_word, called_ns: now, stream: call.stream };
        ringwatch_wire::lines::call(self.head, self.ready().line(self.ring, ticket), ticket, &recorded);
        if kind != line::COLLECTIVE {
            count(self.head, lines::PAIR_CALLS);
        }
        set(self.comm(), comm::CALLED_NS, now);
        self.prefetch(ticket);
        true
    }

    #[inline(always)]
    fn prefetch(&self, ticket: u64) {
        if self.ready().prefetches {
            prefetch::line_for_writing(self.ready().line(self.ring, ticket.wrapping_add(1)));
        }
    }

    /// True where a launch of the group may be timed by CUDA events: it carries one operation alone, or sends and receives
    /// that are timed as a whole.
    #[inline(always)]
    fn is_worth_timing(&self, kind: u64, dtype: u8, elements: u64, now: u64) -> bool {
        let (comm, schedule) = (self.comm(), self.process.schedule());
        if !schedule.any() {
            return false;
        }
        // The number by which the governor's schedule goes, see there.
        let number = match kind {
            line::COLLECTIVE => get(comm, comm::ISSUED).wrapping_add(1),
            _ => governor::number_of_launch(comm),
        };
        // Where the last recorded launch of its kind carried several and was not timed, the next one will not be either: it is
        // looked at now and then.
        let untimed = TOGETHER | if kind == line::COLLECTIVE { COLLECTIVE } else { 0 };
        let is_likely_timed = get(comm, comm::HINT) & (TOGETHER | WHOLE | COLLECTIVE) != untimed;
        is_likely_timed && schedule.takes(number.wrapping_sub(1))
            || number & OFTEN_TOGETHER == 0
            || now.saturating_sub(get(comm, comm::CALLED_NS)) > PAUSE_NS
            || bytes_of(dtype, elements) >= LARGE_BYTES
    }

    /// A kernel is launched for calls in lines.
    #[inline(always)]
    pub(crate) fn launch_in_group(&self) -> bool {
        self.is_in_lines()
    }

    /// A plan of calls in lines begins.
    #[inline(always)]
    pub(crate) fn plan_in_group(&self) -> bool {
        if !self.is_in_lines() {
            return false;
        }
        let ticket = get(self.head, lines::NEXT);
        let launch = Call {
            what: self.context & 0xffff,
            count: line::LAUNCH << line::KIND_SHIFT,
            called_ns: now_ns(),
            stream: 0,
        };
        let first = self.ready().line(self.ring, get(self.head, lines::PENDING));
        ringwatch_wire::lines::launch(self.head, self.ready().line(self.ring, ticket), ticket, &launch);
        count(self.head, lines::LAUNCHES);
        set(self.head, lines::LAUNCHED, ticket.wrapping_add(1));
        // The governor's schedule goes by launches where there is no issue order.
        match get(first, line::COUNT) >> line::KIND_SHIFT {
            line::COLLECTIVE => count(self.head, lines::PLANS),
            _ => self.count_plan(),
        }
        self.prefetch(ticket);
        true
    }

    fn count_plan(&self) {
        if let Some(plans) = self.comm().get(comm::PLANS) {
            plans.add(1);
        }
    }

    /// The first pending line of a call.
    #[inline(always)]
    fn find(&self, wanted: &Wanted) -> Option<u64> {
        let ready = self.ready();
        let range = pending(ready, self.head, get(self.head, lines::NEXT));
        let mut first = range.start;
        for at in range {
            let line = ready.line(self.ring, at);
            if is_pending(line) {
                if wanted.is(line) {
                    let next = if first == at { at.wrapping_add(1) } else { first };
                    set(self.head, lines::PENDING, next);
                    return Some(at);
                }
            } else if first == at {
                first = at.wrapping_add(1);
            }
        }
        set(self.head, lines::PENDING, first);
        find_as_bytes(ready, self.head, self.ring, wanted)
    }

    #[inline(always)]
    fn issue_at(&self, ticket: u64, seq: u64, order: u64, bits: IssueBits) {
        let ready = self.ready();
        let issue = IssueBits { launch: distance(self.head, ticket), ..bits }.word();
        let lap = sync::lap(ticket, u32::from(ready.shift));
        ringwatch_wire::lines::issue(ready.line(self.ring, ticket), lap, &Issue { seq, order, issue });
    }

    /// A collective of a group is issued.
    #[inline(always)]
    pub(crate) fn issue_in_group(&self, issue: impl Fn() -> BareIssue) -> bool {
        if !self.may_be_of_line() {
            return false;
        }
        let wanted = {
            let i = issue();
            Wanted::collective(self.context, names::func(i.func), names::dtype(i.dtype), i.count, i.root)
        };
        let Some(ticket) = self.find(&wanted) else { return false };
        // Read again: what is read early has to be kept meanwhile.
        let issue = issue();
        // Plain: see `Here::issue`.
        let comm = self.comm();
        let order = get(comm, comm::ISSUED);
        count(comm, comm::ISSUED);
        let schedule = self.process.schedule();
        self.issue_at(ticket, issue.seq, order, self.issue_bits(&issue));
        count(self.head, lines::ISSUES);
        if schedule.any() && order.wrapping_add(1) & RUN_MASK == 0 {
            self.govern(governor::COLLECTIVES, order, issue.channels);
        }
        true
    }

    /// A send or receive is issued.
    #[inline(always)]
    pub(crate) fn pair_issue(&self, issue: impl Fn() -> PairIssue) -> bool {
        if !self.may_be_of_line() {
            return false;
        }
        let (wanted, func) = {
            let i = issue();
            let func = names::func(i.func);
            (Wanted::pair(self.context, func, names::dtype(i.dtype), i.count), func)
        };
        let Some(ticket) = self.find(&wanted) else { return false };
        // As above.
        let issue = issue();
        let Some(live) = live::live_alone() else { return false };
        if issue.peer as u32 == get(self.comm(), comm::RANK) as u32 {
            live.governor.stop_switching();
        }
        let order = live.pairs.next_of_one(self.context & VALUE_MASK, issue.peer, func != RECV);
        let schedule = self.process.schedule();
        let bits = IssueBits { channels: issue.channels, timed: schedule.why(), ..IssueBits::default() };
        let bits = IssueBits { flags: order_flags(live, order), ..bits };
        self.issue_at(ticket, u64::from(issue.peer as u32), order.unwrap_or(op::NO_ORDER), bits);
        count(self.head, lines::PAIR_ISSUES);
        let order = order.unwrap_or(0);
        if schedule.any() && order.wrapping_add(1) & RUN_MASK == 0 {
            self.govern(governor::TRANSFERS, order, issue.channels);
        }
        true
    }

    /// Lets the governor decide whether the next run of a communicator's operations is timed.
    #[cold]
    #[inline(never)]
    fn govern(&self, kind: u64, order: u64, channels: u8) {
        if let Some(live) = live::live_alone() {
            let comm = Comm::new(self.context & VALUE_MASK, self.comm());
            live.governor.issued(&comm, (kind, order), channels, false, now_ns());
        }
    }

    /// The value of the handle of the thread's group among those with records.
    fn recorded_group(&self, make: Option<impl FnOnce(i32) -> Option<u64>>) -> Option<u64> {
        let state = self.group_state();
        if state == 0 {
            return None;
        }
        let known = get(self.head, lines::RECORDED);
        let Some(make) = make.filter(|_| known == 0) else { return known.checked_sub(1) };
        let value = make((state >> DEPTH_SHIFT) as i32)?;
        set(self.head, lines::RECORDED, value.wrapping_add(1));
        Some(value)
    }
}

/// The value of the handle that a call has as its parent, where NCCL got none of its group: a call that is not in a line
/// makes a record of the group, of which `make` gets the depth. The hot path may be closed by now.
#[inline(never)]
pub(crate) fn group_of_call(
    live: &'static Live,
    context: u64,
    make: impl FnOnce(i32) -> Option<u64>,
) -> Option<u64> {
    owned_ring(live.bare, context)?.recorded_group(Some(make))
}

/// The same for a launch, which makes none.
#[inline(never)]
pub(crate) fn group_of_launch(live: &'static Live, context: u64) -> Option<u64> {
    owned_ring(live.bare, context)?.recorded_group(None::<fn(i32) -> Option<u64>>)
}

/// The calling thread's ring, if it has one.
fn owned_ring(process: &'static Process, context: u64) -> Option<Here> {
    let ready = process.ready_for_calls()?;
    let thread = thread_address();
    let first = first_ring(thread);
    let mut rings = (0..=ready.ring_mask).map(|i| first.wrapping_add(i));
    let ring = rings.find(|ring| get(ready.head(*ring), lines::OWNER) == thread)?;
    Some(Here { process, context, ring, head: ready.head(ring) })
}

/// When the group in records of a ring's thread began.
fn recorded_at(head: &Head) -> u64 {
    let slot = get(head, lines::RECORDED)
        .checked_sub(1)
        .zip(live::live_alone())
        .and_then(|(value, live)| live.segment.group.held(value & handle::group::TICKET));
    slot.map_or(0, |s| get(s, group::START_NS))
}

/// The flags of a send or receive of this order.
pub(crate) fn order_flags(live: &Live, order: Option<u64>) -> u8 {
    if order.is_some() {
        return 0;
    }
    live.segment.flaw(Flaw::PairOrder);
    flag::ORDER_UNKNOWN
}

impl Process {
    fn is_any_group(&self, is: impl Fn(u32, &Head, u64) -> bool) -> bool {
        let Some(ready) = self.ready_for_calls() else { return false };
        (0..=ready.ring_mask).any(|ring| {
            let head = ready.head(ring);
            let state = get(head, lines::CALL);
            state != 0 && state >> VALUE_BITS == 0 && is(ring, head, state & STATE)
        })
    }

    /// True where a send or receive is in lines.
    pub(crate) fn has_transferred(&self) -> bool {
        self.ready_for_calls()
            .is_some_and(|ready| (0..=ready.ring_mask).any(|r| get(ready.head(r), lines::PAIR_CALLS) != 0))
    }

    /// True where a thread is between the calls of a group that is in lines. What another thread launched was left so.
    pub(crate) fn is_group_in_lines(&self) -> bool {
        STATICS.groups_elsewhere.get() == 0
            && self.is_any_group(|_, head, state| {
                matches!(state, GROUP_BEGUN | IN_LINES) && get(head, lines::LAUNCHED) == 0
            })
    }

    /// True where a thread has lately been in a group of which nothing tells whether all was called: its end is not told,
    /// or what it wrote last may not be seen yet.
    pub(crate) fn is_recently_in_group(&self, now: u64) -> bool {
        let Some(ready) = self.ready_for_calls() else { return false };
        let me = thread_address();
        self.is_any_group(|ring, head, state| {
            let last = ready.line(ring, get(head, lines::NEXT).wrapping_sub(1));
            let called = match state {
                IN_RECORDS => recorded_at(head),
                _ => get(last, line::CALLED_NS),
            };
            get(head, lines::OWNER) != me && now.saturating_sub(called) < LATELY_NS
        })
    }

    /// Takes a call of a group that its thread has recorded in a line and that is issued elsewhere: on another thread, as for
    /// communicators that do not block, or by a copy engine, or after the hot path was closed.
    pub(crate) fn take_call_of_group(&self, wanted: &Wanted) -> Option<CalledLine> {
        let ready = self.ready_for_calls()?;
        let taken = (0..=ready.ring_mask).find_map(|ring| {
            let head = ready.head(ring);
            let state = get(head, lines::CALL);
            if state >> VALUE_BITS != 0 || state & STATE != IN_LINES {
                return None;
            }
            let next = head.first().map_or(0, Word::get_first);
            let is_wanted = |ticket: &u64| {
                let line = ready.line(ring, *ticket);
                sync::holds(line, *ticket)
                    && is_pending(line)
                    && (wanted.is(line) || wanted.is_as_bytes(line))
                    && take_call(line)
            };
            let ticket = pending(ready, head, next).find(is_wanted)?;
            let is_own = get(head, lines::OWNER) == thread_address();
            let launch = if is_own { distance(head, ticket) } else { IssueBits::NO_LAUNCH };
            Some((is_own, CalledLine::new(ready, ring, ticket, launch)))
        });
        if taken.is_none_or(|(is_own, _)| !is_own) {
            // Of such groups the launches, or the calls, are not known without handles.
            STATICS.groups_elsewhere.set(1);
        }
        taken.map(|(_, line)| line)
    }
}
