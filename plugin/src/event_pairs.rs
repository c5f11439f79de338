//! CUDA events around a kernel launch, by the driver's own functions: the second source of GPU times.
//!
//! An [`EventPair`] begins before a launch on the launch's stream and ends behind it. It is bound to the one operation that
//! the launch carries, and is read at a later call of the same communicator, when both events have happened. A launch of
//! several operations gets no pair, since its time is none of theirs, unless they are sends and receives: then the first of
//! them that is issued is bound to it, and says that the time is the launch's. Pools are made when a communicator is opened.
//! Nothing here waits: a pool that another thread uses, or that has no free pair, gives none.
//!
//! All of this runs on threads that call NCCL, never on CUDA's callback threads, where the driver may not be called.
//! The stream's capture is asked for before each pair. A query of an event while another thread captures in CUDA's
//! global mode would break that capture, so this thread's capture mode is relaxed around each use and put back.

#![expect(unsafe_code, reason = "calls the CUDA driver")]

use crate::runtime::clock::now_ns;
use crate::runtime::cuda::{self, Contexts, NOT_READY, SUCCESS};
use crate::runtime::nccl::Linker;
use crate::slot_ref::SlotRef;
use core::ffi::{c_int, c_uint};
use ringwatch_wire::codes::{Flaw, Loss, timed};
use ringwatch_wire::layout::op;
use ringwatch_wire::ring::Segment;
use ringwatch_wire::sync::Word;

type Event = usize;
type Stream = usize;

/// CU_STREAM_CAPTURE_STATUS_NONE.
const NOT_CAPTURING: c_int = 0;

/// The driver's functions.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Driver {
    create: unsafe extern "C" fn(*mut Event, c_uint) -> c_int,
    record: unsafe extern "C" fn(Event, Stream) -> c_int,
    query: unsafe extern "C" fn(Event) -> c_int,
    elapsed: unsafe extern "C" fn(*mut f32, Event, Event) -> c_int,
    capturing: unsafe extern "C" fn(Stream, *mut c_int) -> c_int,
    contexts: Contexts,
}

impl Driver {
    /// The driver that the process has loaded; `None` without one, or without a function.
    pub(crate) fn find() -> Option<Self> {
        let linker = Linker::get()?;
        let find = |name| cuda::function(&linker, name);
        let create = find(c"cuEventCreate")?;
        let record = find(c"cuEventRecord")?;
        let query = find(c"cuEventQuery")?;
        // The second version of this function is for events of graphs; the first is in every driver.
        let elapsed = find(c"cuEventElapsedTime")?;
        let capturing = find(c"cuStreamIsCapturing")?;
        let contexts = Contexts::find(&linker)?;
        // SAFETY: the CUDA driver's functions of these names and signatures.
        Some(unsafe {
            use core::mem::transmute;
            Driver {
                create: transmute::<usize, unsafe extern "C" fn(*mut Event, c_uint) -> c_int>(create),
                record: transmute::<usize, unsafe extern "C" fn(Event, Stream) -> c_int>(record),
                query: transmute::<usize, unsafe extern "C" fn(Event) -> c_int>(query),
                elapsed: transmute::<usize, unsafe extern "C" fn(*mut f32, Event, Event) -> c_int>(elapsed),
                capturing: transmute::<usize, unsafe extern "C" fn(Stream, *mut c_int) -> c_int>(capturing),
                contexts,
            }
        })
    }
}

/// Pairs of a communicator: so many launches may be timed and not finished yet. A host may be a hundred launches ahead of its GPU;
/// with few pairs the same few calls of a training step would be timed each time, and others on each rank.
const PAIRS: usize = 64;

// Words of a pair.
const STATE: usize = 0;
const START: usize = 1;
const STOP: usize = 2;
const BEGUN_NS: usize = 3;
// 4: the stream.
/// How often the pair was taken (above), and the ticket + 1 of the operation that is bound to it (low 48 bits).
const BOUND: usize = 5;
const PAIR_WORDS: usize = 8;

/// A bound operation's ticket + 1: 0 none yet, [`CLOSED`] none any more.
const TICKET: u64 = (1 << 48) - 1;
const CLOSED: u64 = TICKET;

const FREE: u64 = 0;
const BEGUN: u64 = 1;
const ENDED: u64 = 2;

// Words of a pool, before its pairs.
const LOCK: usize = 0;
/// NONE, READY or BROKEN.
const HEALTH: usize = 1;
const CONTEXT: usize = 2;
const PENDING: usize = 3;
const LOOKED_NS: usize = 4;
/// The context's number; 0 unknown.
const CONTEXT_NUMBER: usize = 5;
/// The pair that is taken next, if it is free.
const NEXT: usize = 6;
/// The pair that was taken first of those that are not free.
const OLDEST: usize = 7;
const PAIRS_AT: usize = 8;
const POOL_WORDS: usize = PAIRS_AT + PAIRS * PAIR_WORDS;

const READY: u64 = 1;
const BROKEN: u64 = 2;

/// Communicators that can have a pool; the table of communicators has 256 slots at most.
const POOLS: usize = 256;
/// Words of all pools.
pub(crate) const WORDS: usize = POOLS * POOL_WORDS;

/// So many pairs are read at one look at most: a callback of the job has no time for all of them.
const READ_AT_ONCE: usize = 8;
/// Results are looked for this long after the last look at the earliest, in ns.
const LOOK_NS: u64 = 200_000;

/// All pools of the process.
#[derive(Debug)]
pub(crate) struct EventPairs {
    driver: Option<Driver>,
    words: &'static [Word],
}

/// A begun pair of events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct EventPair {
    pool: usize,
    index: usize,
    /// How often the pair had been taken before: operations may be issued late, on another thread.
    generation: u64,
}

/// Bits of a pair's number: those that say which pair it is, and those of its generation.
const PLACE_BITS: u32 = 15;
const GENERATION_BITS: u32 = 12;
const PLACE: u64 = (1 << PLACE_BITS) - 1;
const GENERATION: u64 = (1 << GENERATION_BITS) - 1;

impl EventPair {
    /// Bits of a pair's number.
    pub(crate) const NUMBER_BITS: u32 = PLACE_BITS + GENERATION_BITS;

    /// The number of no pair, not 0.
    pub(crate) const NO_NUMBER: u64 = PLACE;

    /// As a number that is not 0, for a word of the communicator's.
    pub(crate) fn number(self) -> u64 {
        ((self.pool * PAIRS + self.index) as u64 + 1) | self.generation << PLACE_BITS
    }

    /// From that number.
    pub(crate) fn from_number(n: u64) -> Option<Self> {
        let place = usize::try_from((n & PLACE).checked_sub(1)?).ok()?;
        let generation = n >> PLACE_BITS & GENERATION;
        Some(EventPair { pool: place / PAIRS, index: place % PAIRS, generation }).filter(|s| s.pool < POOLS)
    }

    /// The word [`BOUND`] while nothing is bound to it.
    const fn unbound(self) -> u64 {
        self.generation << 48
    }
}

/// The result of binding an operation to an event pair after its launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Binding {
    /// The duration will be the operation's.
    Bound,
    /// There is another operation.
    Shared,
    /// It was read, or taken again.
    Late,
}

/// A pool that this thread has to itself.
struct Pool<'a> {
    index: usize,
    words: &'a [Word],
    driver: &'a Driver,
}

impl Drop for Pool<'_> {
    fn drop(&mut self) {
        if let Some(lock) = self.words.get(LOCK) {
            lock.set_last(0);
        }
    }
}

impl Pool<'_> {
    fn get(&self, i: usize) -> u64 {
        self.words.get(i).map_or(0, Word::get)
    }

    fn set(&self, i: usize, value: u64) {
        if let Some(w) = self.words.get(i) {
            w.set(value);
        }
    }

    fn pair(&self, i: usize) -> &[Word] {
        let at = PAIRS_AT + i * PAIR_WORDS;
        self.words.get(at..at + PAIR_WORDS).unwrap_or(&[])
    }

    fn break_off(&self, segment: &Segment<'static>) {
        self.set(HEALTH, BROKEN);
        segment.flaw(Flaw::EventError);
    }

    /// Gives the durations of finished pairs to their operations, `most` of them.
    fn harvest(&self, segment: &Segment<'static>, most: usize) {
        // Not the time of the call that led here: what is said to have ended must have ended by then.
        let now_ns = now_ns();
        self.set(LOOKED_NS, now_ns);
        let (mut oldest, mut read) = (None, 0);
        for i in self.from(OLDEST) {
            if self.get(PENDING) == 0 {
                break;
            }
            if read == most {
                return;
            }
            let pair = self.pair(i);
            let word = |k: usize| pair.get(k).map_or(0, Word::get);
            if word(STATE) != FREE {
                oldest = oldest.or(Some(i));
                self.set(OLDEST, oldest.unwrap_or(i) as u64);
            }
            if word(STATE) != ENDED {
                continue;
            }
            let stop = word(STOP) as Event;
            // SAFETY: an event that this pool made.
            match unsafe { (self.driver.query)(stop) } {
                SUCCESS => {}
                // Events of a stream happen in order, and a communicator's pairs are mostly on one.
                // One question too many costs more than a result that comes later.
                NOT_READY => return,
                _ => return self.break_off(segment),
            }
            let mut ms = 0f32;
            // SAFETY: both events were recorded and have happened.
            if unsafe { (self.driver.elapsed)(&mut ms, word(START) as Event, stop) } != SUCCESS {
                return self.break_off(segment);
            }
            if let Some(bound) = pair.get(BOUND) {
                let seen = close(bound);
                let number = EventPair { pool: self.index, index: i, generation: seen >> 48 }.number();
                let passed_ns = now_ns.saturating_sub(word(BEGUN_NS));
                give(segment, number, seen & TICKET, ms, passed_ns, now_ns);
            }
            if let Some(state) = pair.get(STATE) {
                state.set(FREE);
            }
            if oldest == Some(i) {
                oldest = None;
            }
            self.set(PENDING, self.get(PENDING).saturating_sub(1));
            read += 1;
        }
        if oldest.is_none() {
            self.set(OLDEST, self.get(NEXT));
        }
    }

    /// All pairs in turn, from the one that a word names.
    fn from(&self, word: usize) -> impl Iterator<Item = usize> {
        let first = self.get(word) as usize;
        (first..first + PAIRS).map(|i| i % PAIRS)
    }

    /// A pair for a launch: a free one, or one whose launch never came back from NCCL.
    fn take(&self) -> Option<usize> {
        let state = |i: usize| self.pair(i).first().map_or(ENDED, Word::get);
        if self.get(PENDING) >= PAIRS as u64 {
            return None;
        }
        let i = self
            .from(NEXT)
            .find(|i| state(*i) == FREE)
            .or_else(|| self.from(NEXT).find(|i| state(*i) == BEGUN))?;
        self.set(NEXT, (i as u64 + 1) % PAIRS as u64);
        Some(i)
    }
}

/// Closes a pair to further operations, and returns what was bound to it.
fn close(bound: &Word) -> u64 {
    for _ in 0..4 {
        let seen = bound.get();
        if bound.replace(seen, seen | CLOSED) {
            return seen;
        }
    }
    CLOSED
}

/// Gives a duration to the operation of a pair, if it can be true: not negative, and not longer than what has passed on
/// the host since before the first event was recorded. `bound` is 0 or [`CLOSED`] where there is no one operation.
fn give(segment: &Segment<'static>, pair: u64, bound: u64, ms: f32, passed_ns: u64, now_ns: u64) {
    /// The resolution of event times is half a microsecond.
    const SLACK_NS: u64 = 1_000;
    if bound == CLOSED {
        return segment.flaw(Flaw::EventMatch);
    }
    let Some(ticket) = bound.checked_sub(1) else { return };
    // Casts of floats saturate; NaN is 0.
    let ns = (f64::from(ms) * 1e6) as u64;
    let possible = ms >= 0.0 && ns <= passed_ns.saturating_add(SLACK_NS);
    // One that was overwritten needs no time.
    let Ok(record) = SlotRef::of(&segment.op, ticket) else { return };
    if record.word(op::TIMED) >> PAIR_SHIFT != pair {
        return;
    }
    if !possible {
        return segment.flaw(Flaw::EventTime);
    }
    let after_ns = now_ns.saturating_sub(record.word(op::ISSUED_NS));
    if let Err(Loss::Repeated) = record.once(op::EVENT_NS, ns).and(record.once(op::EVENT_SEEN, after_ns)) {
        segment.flaw(Flaw::EventMatch);
    }
}

/// The bits of the word [`op::TIMED`] below the number of a pair.
const PAIR_SHIFT: u32 = 8;

/// The word [`op::TIMED`] of an operation that a pair times, or of the one that stands for a launch that is timed as a whole.
pub(crate) fn told(pair: u64, as_a_whole: bool) -> u64 {
    let how = if as_a_whole { timed::LAUNCH } else { timed::EVENTS };
    u64::from(how) | pair << PAIR_SHIFT
}

impl EventPairs {
    pub(crate) const fn new(driver: Option<Driver>, words: &'static [Word]) -> Self {
        EventPairs { driver, words }
    }

    /// True when there is a driver.
    pub(crate) const fn available(&self) -> bool {
        self.driver.is_some()
    }

    /// The pool of a communicator, if no other thread has it.
    fn pool(&self, index: usize) -> Option<Pool<'_>> {
        let driver = self.driver.as_ref()?;
        let start = index * POOL_WORDS;
        let words = self.words.get(start..start + POOL_WORDS)?;
        let lock = words.get(LOCK)?;
        if lock.get() == 0 && lock.replace(0, 1) { Some(Pool { index, words, driver }) } else { None }
    }

    fn index(comm_ticket: u64) -> usize {
        (comm_ticket as usize) % POOLS
    }

    /// Makes the events of a communicator, in the CUDA context that is current. Called at its init.
    pub(crate) fn open(&self, comm_ticket: u64) {
        let Some(pool) = self.pool(Self::index(comm_ticket)) else { return };
        let Some(context) = pool.driver.contexts.current() else {
            pool.set(HEALTH, BROKEN);
            return;
        };
        // An earlier communicator's events serve again where they are of the same context. Its address does not say
        // so: after cudaDeviceReset a new one may have it. Where nothing else does, the old events are left.
        let number = pool.driver.contexts.number_of(context);
        let same = pool.get(CONTEXT) == context as u64 && pool.get(CONTEXT_NUMBER) == number;
        let ready = pool.get(HEALTH) == READY && number != 0 && same;
        for i in 0..PAIRS {
            let [state, start, stop, ..] = pool.pair(i) else { return };
            state.set(FREE);
            for place in [start, stop] {
                let mut event: Event = 0;
                // SAFETY: stores one event, of the current context, with timing.
                if !ready && unsafe { (pool.driver.create)(&mut event, 0) } != SUCCESS {
                    pool.set(HEALTH, BROKEN);
                    return;
                }
                if !ready {
                    place.set(event as u64);
                }
            }
        }
        for word in [PENDING, NEXT, OLDEST] {
            pool.set(word, 0);
        }
        pool.set(CONTEXT, context as u64);
        pool.set(CONTEXT_NUMBER, number);
        pool.set(HEALTH, READY);
    }

    /// True while a stream is being captured: what is called on it now does not run.
    pub(crate) fn captures(&self, stream: u64) -> bool {
        let Some(driver) = self.driver.as_ref() else { return false };
        let mut status: c_int = NOT_CAPTURING;
        // SAFETY: the stream of a call that NCCL is about to get; asking breaks no capture.
        let asked = unsafe { (driver.capturing)(stream as Stream, &mut status) };
        asked == SUCCESS && status != NOT_CAPTURING
    }

    /// Records the first event of a pair on a stream, before a launch. `None` when the stream is being captured, no
    /// pair is free, or the driver refuses.
    pub(crate) fn begin(
        &self,
        segment: &Segment<'static>,
        comm_ticket: u64,
        stream: u64,
        now_ns: u64,
    ) -> Option<EventPair> {
        let index = Self::index(comm_ticket);
        let pool = self.pool(index)?;
        if pool.get(HEALTH) != READY {
            return None;
        }
        let stream = stream as Stream;
        pool.driver.contexts.relaxed(|| {
            let mut status: c_int = -1;
            // SAFETY: the stream that NCCL is about to launch on.
            let asked = unsafe { (pool.driver.capturing)(stream, &mut status) };
            if asked != SUCCESS || status != NOT_CAPTURING {
                return None;
            }
            pool.harvest(segment, READ_AT_ONCE);
            if pool.get(HEALTH) != READY {
                return None;
            }
            let i = pool.take()?;
            let [state, start, _, begun, on, bound, ..] = pool.pair(i) else { return None };
            // SAFETY: an event of this pool, on the launch's stream of the same context.
            if unsafe { (pool.driver.record)(start.get() as Event, stream) } != SUCCESS {
                pool.break_off(segment);
                return None;
            }
            let generation = ((bound.get() >> 48) + 1) & GENERATION;
            let pair = EventPair { pool: index, index: i, generation };
            bound.set(pair.unbound());
            on.set(stream as u64);
            begun.set(now_ns);
            state.set(BEGUN);
            Some(pair)
        })
    }

    /// Records the second event, behind the launch.
    pub(crate) fn end(&self, segment: &Segment<'static>, pair: EventPair) {
        let Some(pool) = self.pool(pair.pool) else { return };
        let [state, _, stop, _, stream, bound, ..] = pool.pair(pair.index) else { return };
        if state.get() != BEGUN || bound.get() & !TICKET != pair.unbound() || pool.get(HEALTH) != READY {
            return;
        }
        // SAFETY: an event of this pool, on the launch's stream of the same context.
        if unsafe { (pool.driver.record)(stop.get() as Event, stream.get() as Stream) } != SUCCESS {
            return pool.break_off(segment);
        }
        state.set(ENDED);
        pool.set(PENDING, pool.get(PENDING) + 1);
    }

    /// Binds an operation to a pair: its duration will be the operation's, whose word [`op::TIMED`] is to be [`told`].
    /// Of a launch that is timed as a whole the first operation is bound. Any thread may do so, however late.
    pub(crate) fn bind(&self, pair: EventPair, op_ticket: u64, as_a_whole: bool) -> Binding {
        let at = pair.pool * POOL_WORDS + PAIRS_AT + pair.index * PAIR_WORDS;
        let Some(bound) = self.words.get(at + BOUND) else { return Binding::Late };
        if bound.replace(pair.unbound(), pair.unbound() | ((op_ticket + 1) & TICKET)) {
            return Binding::Bound;
        }
        let seen = bound.get();
        if seen & !TICKET != pair.unbound() || seen & TICKET == CLOSED {
            return Binding::Late;
        }
        match as_a_whole || bound.replace(seen, seen | CLOSED) {
            true => Binding::Shared,
            false => Binding::Late,
        }
    }

    /// Reads what has finished, now and then. `now_ns` may be a little old.
    #[inline]
    pub(crate) fn look(&self, segment: &Segment<'static>, comm_ticket: u64, now_ns: u64) {
        let at = Self::index(comm_ticket) * POOL_WORDS;
        let word = |i: usize| self.words.get(at + i).map_or(0, Word::get);
        if word(PENDING) != 0 && now_ns.saturating_sub(word(LOOKED_NS)) > LOOK_NS {
            self.read_some(segment, comm_ticket, READ_AT_ONCE);
        }
    }

    /// Reads all that has finished.
    pub(crate) fn read(&self, segment: &Segment<'static>, comm_ticket: u64) {
        self.read_some(segment, comm_ticket, PAIRS);
    }

    #[inline(never)]
    fn read_some(&self, segment: &Segment<'static>, comm_ticket: u64, most: usize) {
        if let Some(pool) = self.pool(Self::index(comm_ticket))
            && pool.get(HEALTH) == READY
        {
            pool.driver.contexts.relaxed(|| pool.harvest(segment, most));
        }
    }
}

#[cfg(test)]
mod tests;
