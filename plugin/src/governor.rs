//! The governor: which operations get GPU times, so that they cost the job no more than its budget.
//!
//! NCCL charges for a collective's kernel events (KernelCh), whoever listens. Each channel is taken to cost a microsecond,
//! and more when NCCL's progress thread sleeps and has to be woken; a pair of CUDA events around a launch costs about
//! five. A token bucket holds the time that may be spent: it fills by the budget's share of wall time, every timed
//! operation takes its price. While tokens last everything is timed; when they do not, one in 2, 4, 8 … runs of 32
//! operations by *issue order*, so that ranks which never speak with each other time the same collectives, and the
//! thread is woken once a run. Which ones they are does not repeat ([`gate::is_chosen`]): a training loop's calls do.
//! A bucket that is full makes twice as many runs due. Operations after a pause and large ones
//! are timed by CUDA events whenever a token is left and nothing else is launched with them. Sends and receives that are
//! launched together are timed as one where kernel events cannot time them.
//!
//! NCCL looks at the plugin's event mask when a call begins, before the plugin hears of it, so whether the *next*
//! call is timed by kernel events is decided when this one is issued, by writing the mask through the pointer that
//! init got. That is right on NCCL 2.28 to 2.30 as long as nothing was captured into a graph, no rank has sent to
//! itself, and no group is being called that sends and receives ([`groups`]). From 2.31 on NCCL's
//! counters drift when kernel events are switched on again, so there they stay on until the bucket runs dry and then
//! off for good; what is timed after that is timed by CUDA events.

mod bucket;
mod groups;
mod mask;
mod schedule;
#[cfg(test)]
mod tests;

pub(crate) use schedule::number_of_launch;

use crate::event::bit;
use crate::gate::{self, KERNEL, RUN_SHIFT, Schedule};
use crate::runtime::settings::{Detail, Graphs, Settings};
use ringwatch_wire::codes::timed;
use ringwatch_wire::layout::head;
use ringwatch_wire::ring::Segment;
use ringwatch_wire::sync::Word;

/// The assumed price of kernel events for a collective on each channel, in ns.
const CHANNEL_COST_NS: u64 = 1_000;
/// Channels of an operation of which NCCL does not say how many it has.
const CHANNELS: u8 = 8;
/// The assumed price of the first of a run beyond that, in ns: NCCL's progress thread is woken.
const WAKE_COST_NS: u64 = 30_000;
/// After so long without a timed operation NCCL's progress thread sleeps, in ns.
const ASLEEP_NS: u64 = 50_000;
/// The price of a pair of CUDA events, in ns: measured about 5,000, and the reading of their times.
const EVENT_COST_NS: u64 = 8_000;
/// The assumed price of a run of an operation on 24 channels, in ns.
const RUN_COST_NS: u64 = WAKE_COST_NS + ((24 * CHANNEL_COST_NS) << RUN_SHIFT);
/// A bucket holds at most this long a time's budget, in ns, or that of a run.
const DEEP_NS: u64 = 200_000_000;
/// A new bucket holds this long a time's budget, in ns.
const FIRST_NS: u64 = 100_000_000;
/// One in `1 << SHIFT_MAX` runs is timed however small the budget.
const SHIFT_MAX: u64 = 16;
/// The longest that a reader may want detail for, in ns.
const WISH_NS: u64 = 600_000_000_000;
/// After so long without a call an operation is worth timing, in ns.
pub(crate) const PAUSE_NS: u64 = 1_000_000;
/// From this size on an operation is worth timing, in bytes.
pub(crate) const LARGE_BYTES: u64 = 32 << 20;

const KERNEL_CH: i32 = 1 << bit::KERNEL_CH;
/// NCCL brings kernels with their phases, whether they are asked for or not.
const KERNEL_PHASE: i32 = 1 << bit::KERNEL_PHASE;

/// Where GPU times come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kernel {
    /// Kernel events cannot be had.
    Refused,
    /// Nobody wants them.
    Unwanted,
    /// They are on, and stay so.
    Always,
    /// Switched by operation.
    Switched,
    /// On until the bucket is dry, then never again.
    Once,
}

// Words of the governor's private memory.
const MASK_AT: usize = 0;
/// The events that NCCL is asked for at any rate, with those of the other plugin.
const BASE: usize = 1;
const ON: usize = 2;
const WANTED: usize = 3;
const ENDED: usize = 4;
/// Tokens in ns, as a signed number.
const TOKENS: usize = 5;
const FILLED_NS: usize = 6;
/// One in `1 << SHIFT` runs is timed by kernel events.
const SHIFT: usize = 7;
/// One in `1 << EVENT_SHIFT` operations is timed by CUDA events.
const EVENT_SHIFT: usize = 8;
/// The events that this plugin asks for by itself, kernel events apart.
const OWN: usize = 9;
/// The run, and the operation, that was decided on last, and whether it is timed: communicators that go in step, the
/// ranks of one process, are timed together or not at all.
const RUN_DECIDED: usize = 10;
const EVENT_DECIDED: usize = 11;
/// The two shifts while somebody wants detail: the others, for when nobody does, stay as they are.
const WANTED_SHIFT: usize = 12;
const WANTED_EVENTS: usize = 13;
/// When less was due for the last time because a run could not be paid, in ns.
const RAISED_NS: usize = 14;
/// When it was last looked whether more can be due, in ns.
const LOOKED_NS: usize = 15;
/// Not 0 while a reader wants detail.
const WISHED: usize = 16;
/// Not 0 once a send or receive was seen.
const TRANSFERRED: usize = 17;
/// The kinds of call with which groups that send and receive begin.
const FIRST_CALLS: usize = 18;
/// When kernel events were last switched, in ns.
const SWITCHED_NS: usize = 19;
/// From here on: which thread calls a group.
const NOTES: usize = 20;
/// Words it needs.
pub(crate) const WORDS: usize = NOTES + 2 * groups::THREADS;

/// Bits of the word [`ringwatch_wire::layout::comm::WANTS`]: for which of its next operations the communicator waits.
/// Collectives and transfers have runs of their own, so that neither breaks off a run of the other.
pub(crate) const COLLECTIVES: u64 = 1;
/// See [`COLLECTIVES`].
pub(crate) const TRANSFERS: u64 = 2;
const KINDS: u64 = COLLECTIVES | TRANSFERS;
/// So many bits higher: which kind already waited when a run of the other began.
const KIND_BITS: u32 = 2;

/// Bits of the word [`ringwatch_wire::layout::comm::HINT`]: why the called operation is worth timing.
pub(crate) const AFTER_PAUSE: u64 = 1;
pub(crate) const LARGE: u64 = 2;
const WORTH: u64 = AFTER_PAUSE | LARGE;
/// It is not the only one that was called since the last launch.
pub(crate) const TOGETHER: u64 = 4;
/// It is a collective, or is launched with one.
pub(crate) const COLLECTIVE: u64 = 8;
/// It is a send or receive that is launched with others, and the launch may be timed as a whole.
pub(crate) const WHOLE: u64 = 16;
/// Above these bits: the number of the group it was called in.
pub(crate) const HINT_BITS: u32 = 8;

/// The process's governor.
#[derive(Debug)]
pub(crate) struct Governor {
    words: &'static [Word],
    kernel: Kernel,
    /// CUDA events may be used as well.
    events: bool,
    /// Budget in millionths of wall time.
    budget_ppm: u64,
    /// After so long an empty bucket is full, in ns.
    filled_after_ns: u64,
    graphs: Graphs,
    /// Kernel events bring the GPU's times in this ABI version.
    stamped: bool,
    /// Until when a reader wants detail, and of which communicator.
    wish: Option<(&'static Word, &'static Word)>,
    bare: &'static gate::Process,
}

/// The facts that decide how this process is timed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Facts {
    /// Profiler ABI version; 0 for none.
    pub(crate) abi: u32,
    /// NCCL's version code; 0 unknown.
    pub(crate) nccl: u32,
    /// Kernel events would harm this job.
    pub(crate) refused: bool,
    /// The mask may be written later on.
    pub(crate) switchable: bool,
    /// The CUDA driver's events can be had.
    pub(crate) events: bool,
}

fn kernel_of(facts: &Facts, settings: &Settings) -> Kernel {
    if settings.detail == Detail::Calls || settings.budget_ppm == 0 {
        return Kernel::Unwanted;
    }
    if facts.refused || facts.abi < 3 {
        return Kernel::Refused;
    }
    if settings.detail == Detail::Full || settings.graphs == Graphs::Full {
        return Kernel::Always;
    }
    // v3 brings no stamps, and its kernel events keep a core busy.
    if facts.abi == 3 {
        return Kernel::Refused;
    }
    if !facts.switchable {
        return Kernel::Always;
    }
    let once = if facts.nccl == 0 { facts.abi >= 7 } else { facts.nccl >= 23_100 };
    match once {
        true => Kernel::Once,
        // What is captured while kernel events are on pays for them at every replay.
        false if settings.graphs == Graphs::Off => Kernel::Refused,
        false => Kernel::Switched,
    }
}

impl Governor {
    pub(crate) fn new(
        words: &'static [Word],
        segment: &Segment<'static>,
        bare: &'static gate::Process,
        facts: &Facts,
        settings: &Settings,
    ) -> Self {
        let kernel = kernel_of(facts, settings);
        Governor {
            wish: segment.word(head::WANTED_UNTIL).zip(segment.word(head::WANTED_COMM)),
            words,
            bare,
            kernel,
            events: facts.events && !matches!(kernel, Kernel::Unwanted | Kernel::Always),
            budget_ppm: settings.budget_ppm,
            filled_after_ns: Self::filled_after_ns(settings.budget_ppm),
            graphs: settings.graphs,
            stamped: facts.abi >= 4,
        }
    }

    fn get(&self, i: usize) -> u64 {
        self.words.get(i).map_or(0, Word::get)
    }

    fn set(&self, i: usize, value: u64) {
        if let Some(w) = self.words.get(i) {
            w.set(value);
        }
    }

    /// Switches kernel events, as far as this process is concerned.
    fn set_on(&self, on: bool) {
        self.set(ON, u64::from(on));
        // Another thread may switch them at the same time.
        loop {
            let on = self.kernel_on();
            self.bare.set_blocked(KERNEL, on);
            if self.kernel_on() == on {
                return;
            }
        }
    }

    /// Says how often the hot path is to leave an operation to the governor.
    fn set_schedule(&self) {
        let why = self.why_not(false);
        self.bare.set_schedule(match self.kernel {
            Kernel::Unwanted => Schedule::none(why),
            Kernel::Refused if !self.events => Schedule::none(why),
            _ if self.times_regularly_by_events() => Schedule::chosen(self.get(EVENT_SHIFT), why),
            _ => Schedule::runs(why),
        });
    }

    /// True when a call that begins now is timed by kernel events.
    #[inline]
    pub(crate) fn kernel_on(&self) -> bool {
        self.get(ON) != 0
    }

    /// True when CUDA events may be used.
    #[inline]
    pub(crate) fn events(&self) -> bool {
        self.events
    }

    /// True when regular operations are timed by CUDA events: kernel events are not switched, or not any more.
    #[inline]
    pub(crate) fn times_regularly_by_events(&self) -> bool {
        self.events && (self.kernel != Kernel::Switched || self.get(ENDED) != 0)
    }

    /// True when what graphs replay is not to be recorded.
    #[inline]
    pub(crate) fn graphs_off(&self) -> bool {
        self.graphs == Graphs::Off
    }

    /// Why an operation is not timed that could have been.
    #[inline]
    pub(crate) fn why_not(&self, captured: bool) -> u8 {
        match self.kernel {
            Kernel::Unwanted => timed::NOT_ASKED,
            _ if captured => timed::NOT_CAPTURED,
            Kernel::Refused if !self.events => timed::NOT_OFFERED,
            _ => timed::NOT_BUDGET,
        }
    }
}
