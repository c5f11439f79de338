//! The governor: which operations get GPU times, so that they cost the job no more than its budget.
//!
//! NCCL charges for a collective's kernel events (KernelCh), whoever listens. Each channel is taken to cost a microsecond,
//! and more when NCCL's progress thread sleeps and has to be woken; a pair of CUDA events around a launch costs about
//! five. A token bucket holds the time that may be spent: it fills by the budget's share of wall time, every timed
//! operation takes its price. While tokens last everything is timed; when they do not, every 2nd, 4th, 8th … run of 32
//! operations by *issue order*, so that ranks which never speak with each other time the same collectives, and the
//! thread is woken once a run. Operations after a pause and large ones are timed by CUDA events whenever a token is left
//! and nothing else is launched with them.
//!
//! NCCL looks at the plugin's event mask when a call begins, before the plugin hears of it, so whether the *next*
//! call is timed by kernel events is decided when this one is issued, by writing the mask through the pointer that
//! init got. That is right on NCCL 2.28 to 2.30 as long as nothing was captured into a graph. From 2.31 on NCCL's
//! counters drift when kernel events are switched on again, so there they stay on until the bucket runs dry and then
//! off for good; what is timed after that is timed by CUDA events.

#![expect(unsafe_code, reason = "writes NCCL's event mask through the pointer that init got")]

use crate::clock::now_ns;
use crate::event::bit;
use crate::record::Comm;
use crate::settings::{Detail, Graphs, Settings};
use core::ffi::c_int;
use ringwatch_wire::codes::timed;
use ringwatch_wire::layout::{comm, head};
use ringwatch_wire::ring::Segment;
use ringwatch_wire::sync::Word;

/// What kernel events are taken to cost a collective on each channel, in ns.
const CHANNEL_COST_NS: u64 = 1_000;
/// Channels of an operation of which NCCL does not say how many it has.
const CHANNELS: u8 = 8;
/// What the first of a run is taken to cost beyond that, in ns: NCCL's progress thread is woken.
const WAKE_COST_NS: u64 = 30_000;
/// Operations are timed in runs of `1 << RUN_SHIFT` issue orders.
const RUN_SHIFT: u32 = 5;
const RUN_MASK: u64 = (1 << RUN_SHIFT) - 1;
/// After so long without a timed operation NCCL's progress thread sleeps, in ns.
const ASLEEP_NS: u64 = 50_000;
/// What a pair of CUDA events costs, in ns: measured about 5,000, and the reading of their times.
const EVENT_COST_NS: u64 = 8_000;
/// A bucket holds at most this long a time's budget, in ns.
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

/// Whether it is a communicator's turn to be timed.
#[derive(Debug, Clone, Copy)]
enum Turn {
    /// Its next run is due, as far as there are tokens; the word of the shift that says so.
    Due(usize),
    /// It is not.
    NotDue,
    /// A reader wants detail of another one alone.
    Another,
}

// Words of the governor's private memory.
const MASK_AT: usize = 0;
/// What NCCL is asked for at any rate, the other plugin's wishes with it.
const BASE: usize = 1;
const ON: usize = 2;
const WANTED: usize = 3;
const ENDED: usize = 4;
/// Tokens in ns, as a signed number.
const TOKENS: usize = 5;
const FILLED_NS: usize = 6;
/// Every `1 << SHIFT`-th run is timed by kernel events.
const SHIFT: usize = 7;
/// Every `1 << EVENT_SHIFT`-th operation is timed by CUDA events.
const EVENT_SHIFT: usize = 8;
/// What this plugin asks for by itself, kernel events apart.
const OWN: usize = 9;
/// The run, and the operation, that was decided on last, and whether it is timed: communicators that go in step, the
/// ranks of one process, are timed together or not at all.
const RUN_DECIDED: usize = 10;
const EVENT_DECIDED: usize = 11;
/// The two shifts while somebody wants detail: the others, for when nobody does, stay as they are.
const WANTED_SHIFT: usize = 12;
const WANTED_EVENTS: usize = 13;
/// Words it needs.
pub(crate) const WORDS: usize = 16;

/// Bits of the word [`comm::HINT`]: why the called operation is worth timing.
pub(crate) const AFTER_PAUSE: u64 = 1;
pub(crate) const LARGE: u64 = 2;
const WORTH: u64 = AFTER_PAUSE | LARGE;
/// It is not the only one that was called since the last launch.
pub(crate) const TOGETHER: u64 = 4;
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
    graphs: Graphs,
    /// Kernel events bring the GPU's times in this ABI version.
    stamped: bool,
    /// Until when a reader wants detail, and of which communicator.
    wish: Option<(&'static Word, &'static Word)>,
}

/// What decides how this process is timed.
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

/// What NCCL is asked for with another plugin's wishes. NCCL brings no phases of kernels without the kernels.
fn joined(own: c_int, theirs: c_int) -> c_int {
    own | theirs | if theirs & KERNEL_PHASE != 0 { KERNEL_CH } else { 0 }
}

impl Governor {
    pub(crate) fn new(
        words: &'static [Word],
        segment: &Segment<'static>,
        facts: &Facts,
        settings: &Settings,
    ) -> Self {
        let kernel = kernel_of(facts, settings);
        Governor {
            wish: segment.word(head::WANTED_UNTIL).zip(segment.word(head::WANTED_COMM)),
            words,
            kernel,
            events: facts.events && !matches!(kernel, Kernel::Unwanted | Kernel::Always),
            budget_ppm: settings.budget_ppm,
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

    /// What a communicator's init is to ask for, of the events in `wanted`, and with what another plugin wants;
    /// `place` is NCCL's mask, 0 when it may not be written later. Where the other one wants kernel events they are
    /// on all the time, and what they cost is not in the budget.
    pub(crate) fn mask(&self, wanted: c_int, theirs: c_int, place: usize) -> c_int {
        let mut own = wanted & !KERNEL_CH;
        if !self.events {
            own &= !(1 << bit::KERNEL_LAUNCH);
        }
        let may = wanted & KERNEL_CH != 0
            && match self.kernel {
                Kernel::Refused | Kernel::Unwanted => false,
                Kernel::Always => true,
                // A communicator's first operation is timed: NCCL makes the connections for it then, and not later.
                Kernel::Switched | Kernel::Once => self.get(ENDED) == 0,
            };
        let base = joined(own, theirs);
        self.set(OWN, own as u32 as u64);
        self.set(BASE, base as u32 as u64);
        self.set(MASK_AT, place as u64);
        self.set(ON, u64::from(may || base & KERNEL_CH != 0 && self.stamped));
        if may { base | KERNEL_CH } else { base }
    }

    /// The other plugin wants something else from now on: writes NCCL's mask.
    #[cold]
    pub(crate) fn follow(&self, theirs: c_int) {
        let was = self.forced();
        self.set(BASE, joined(self.get(OWN) as u32 as c_int, theirs) as u32 as u64);
        match (was, self.forced()) {
            // NCCL's stamps are wrong after kernel events were off for a while, but where they are switched.
            (false, true) if self.stamped && self.get(ENDED) == 0 => self.set(ON, 1),
            (true, false) => {
                let stays = match self.kernel {
                    Kernel::Always => true,
                    Kernel::Once => self.get(ENDED) == 0,
                    Kernel::Refused | Kernel::Unwanted | Kernel::Switched => false,
                };
                self.set(ON, u64::from(stays));
                if !stays && self.kernel != Kernel::Switched {
                    self.set(ENDED, 1);
                }
            }
            _ => {}
        }
        self.write();
    }

    /// True while another plugin wants kernel events of everything.
    fn forced(&self) -> bool {
        self.get(BASE) as u32 as c_int & KERNEL_CH != 0
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

    /// Switches kernel events, unless another plugin wants them all the time.
    #[cold]
    fn switch(&self, on: bool) {
        let place = self.get(MASK_AT);
        if place == 0 || self.kernel_on() == on || self.forced() {
            return;
        }
        self.set(ON, u64::from(on));
        self.sync();
    }

    /// Writes NCCL's mask where it is switched: an init writes it too, and two threads may switch at once.
    pub(crate) fn sync(&self) {
        if !self.forced() && matches!(self.kernel, Kernel::Switched | Kernel::Once) {
            self.write();
        }
    }

    /// Writes NCCL's mask as [`BASE`] and [`ON`] say, until all three agree.
    fn write(&self) {
        let (place, Some(on), Some(base)) = (self.get(MASK_AT), self.words.get(ON), self.words.get(BASE))
        else {
            return;
        };
        if place == 0 {
            return;
        }
        let mask_at = core::ptr::with_exposed_provenance_mut::<c_int>(place as usize);
        for _ in 0..8 {
            let (now, least) = (on.get(), base.get());
            let mask = least as u32 as c_int | if now != 0 { KERNEL_CH } else { 0 };
            // SAFETY: NCCL's own static int, which lives as long as NCCL is loaded; other threads read it with atomic
            // loads while this one whole word is written.
            unsafe { core::ptr::write_volatile(mask_at, mask) };
            // Adding nothing orders the looks behind the store.
            if on.add(0) == now && base.add(0) == least {
                return;
            }
        }
    }

    /// Kernel events end for the life of the process.
    #[cold]
    fn end(&self) {
        self.set(ENDED, 1);
        self.switch(false);
    }

    /// True while kernel events are on that a capture had better not find.
    pub(crate) fn spoils_captures(&self) -> bool {
        self.kernel == Kernel::Switched && self.kernel_on()
    }

    /// A call was captured into a graph. Up to NCCL 2.30 kernel events may not be switched from then on.
    #[cold]
    pub(crate) fn captured(&self) {
        if self.kernel == Kernel::Switched && self.get(ENDED) == 0 {
            self.end();
        }
    }

    /// The first tokens.
    pub(crate) fn begin(&self, now_ns: u64) {
        self.set(TOKENS, self.income(FIRST_NS));
        self.set(FILLED_NS, now_ns);
    }

    fn income(&self, elapsed_ns: u64) -> u64 {
        elapsed_ns.min(DEEP_NS).saturating_mul(self.budget_ppm) / 1_000_000
    }

    /// Fills up the bucket and returns its tokens.
    fn fill(&self, now_ns: u64) -> i64 {
        let (Some(tokens), Some(filled)) = (self.words.get(TOKENS), self.words.get(FILLED_NS)) else {
            return i64::MIN;
        };
        let last = filled.get();
        let have = tokens.get() as i64;
        let elapsed = now_ns.saturating_sub(last);
        // Tokens of a few ns would be cut off.
        if elapsed < 10_000 {
            return have;
        }
        // One thread books an interval; a payment made meanwhile is kept.
        if filled.replace(last, now_ns) {
            let more = self.income(elapsed) as i64;
            let room = (self.income(DEEP_NS) as i64).saturating_sub(have).max(0);
            tokens.add(more.min(room) as u64);
        }
        tokens.get() as i64
    }

    fn pay(&self, cost_ns: u64) {
        if let Some(tokens) = self.words.get(TOKENS) {
            tokens.add(cost_ns.wrapping_neg());
        }
    }

    /// True for one in `1 << shift` numbers; the shift is in word `which`.
    #[inline]
    fn due(&self, number: u64, which: usize) -> bool {
        number & ((1 << self.get(which).min(SHIFT_MAX)) - 1) == 0
    }

    /// Whether it is this communicator of which a reader wants detail; absent while none wants any.
    #[inline]
    fn wished(&self, c: &Comm) -> Option<bool> {
        let (until, comm) = self.wish?;
        match until.get() {
            0 => None,
            t => Self::wish(t, until, comm, c),
        }
    }

    #[cold]
    fn wish(until_ns: u64, until: &Word, comm: &Word, c: &Comm) -> Option<bool> {
        // Anything may have been written there.
        if until_ns.wrapping_sub(now_ns()) > WISH_NS {
            until.replace(until_ns, 0);
            return None;
        }
        Some(comm.get() == c.word(comm::ID))
    }

    /// [`Self::afford`], once for each number.
    fn decided(&self, number: u64, cost_ns: u64, which: usize, cache: usize, now_ns: u64) -> bool {
        let last = self.get(cache);
        // A refusal does not outlive an empty bucket: a communicator of sends and receives stays at one number.
        if last >> 1 == number + 1 && (last & 1 == 1 || self.fill(now_ns) < self.income(DEEP_NS) as i64) {
            return last & 1 == 1;
        }
        let yes = self.afford(cost_ns, which, now_ns);
        self.set(cache, (number + 1) << 1 | u64::from(yes));
        yes
    }

    /// True when there are tokens for what is due; fewer or more is due from now on.
    fn afford(&self, cost_ns: u64, which: usize, now_ns: u64) -> bool {
        let have = self.fill(now_ns);
        let shift = self.get(which);
        if have < cost_ns as i64 {
            self.set(which, (shift + 1).min(SHIFT_MAX));
            return false;
        }
        if shift > 0 && have >= self.income(DEEP_NS) as i64 {
            self.set(which, shift - 1);
        }
        true
    }

    /// Called when an operation was issued as number `order` of its communicator, on so many channels: pays for it if
    /// it was timed by kernel events, and decides on the communicator's next one.
    #[inline]
    pub(crate) fn issued(&self, c: &Comm, order: u64, channels: u8, by_kernel: bool, now_ns: u64) {
        if !matches!(self.kernel, Kernel::Switched | Kernel::Once) || self.get(ENDED) != 0 {
            return;
        }
        let run = order.wrapping_add(1) >> RUN_SHIFT;
        // While a reader wants detail of one communicator, it gets what the budget has, and the others nothing.
        let turn = match self.wished(c) {
            Some(false) => Turn::Another,
            Some(true) if self.due(run, WANTED_SHIFT) => Turn::Due(WANTED_SHIFT),
            None if self.due(run, SHIFT) => Turn::Due(SHIFT),
            _ => Turn::NotDue,
        };
        let gives_up = || matches!(turn, Turn::Another) && c.word(comm::WANTS) != 0;
        if by_kernel || matches!(turn, Turn::Due(_)) || self.kernel_on() || gives_up() {
            self.decide(c, order, channels, turn, by_kernel, now_ns);
        }
    }

    #[inline(never)]
    fn decide(&self, c: &Comm, order: u64, channels: u8, turn: Turn, by_kernel: bool, now_ns: u64) {
        // What another plugin wants is not of our budget.
        if self.forced() {
            return;
        }
        let channels = if channels == 0 { CHANNELS } else { channels };
        let each = u64::from(channels) * CHANNEL_COST_NS;
        let last = c.word(comm::TIMED_NS);
        if by_kernel {
            let asleep = now_ns.saturating_sub(last) > ASLEEP_NS;
            self.pay(if asleep { each + WAKE_COST_NS } else { each });
            c.set(comm::TIMED_NS, now_ns);
        }
        if self.kernel == Kernel::Once {
            if self.fill(now_ns) < 0 {
                self.end();
            }
            return;
        }
        let Some(wanted) = self.words.get(WANTED) else { return };
        if c.word(comm::FINALIZED_NS) != 0 {
            return;
        }
        let waiting = c.word(comm::WANTS) != 0;
        let run = order.wrapping_add(1) >> RUN_SHIFT;
        let wants = match turn {
            // A run is not broken off.
            Turn::Due(_) if waiting && by_kernel && order.wrapping_add(1) & RUN_MASK != 0 => true,
            Turn::Due(which) => {
                self.decided(run, WAKE_COST_NS + (each << RUN_SHIFT), which, RUN_DECIDED, now_ns)
            }
            Turn::NotDue | Turn::Another => false,
        };
        // The mask is the process's: it is on while any communicator waits for its next operation.
        if wants != waiting && c.replace(comm::WANTS, u64::from(waiting), u64::from(wants)) {
            wanted.add(if wants { 1 } else { 1u64.wrapping_neg() });
        }
        let broke = (self.get(TOKENS) as i64) < 0;
        // Not for the others, where a reader wants one alone: that one switches them on again.
        let waits = wanted.get() != 0 && !broke && !matches!(turn, Turn::Another);
        self.switch(wants || waits);
    }

    /// A communicator waits for nothing any more.
    pub(crate) fn finalized(&self, c: &Comm) {
        if let Some(wanted) = self.words.get(WANTED)
            && c.replace(comm::WANTS, 1, 0)
        {
            wanted.add(1u64.wrapping_neg());
            if self.kernel == Kernel::Switched && wanted.get() == 0 {
                self.switch(false);
            }
        }
    }

    /// Whether the next launch of a communicator is to be timed by CUDA events, as far as it is its turn. `order` is the
    /// issue order its first operation will get.
    #[inline]
    pub(crate) fn wants(&self, c: &Comm, order: u64) -> bool {
        self.events && (c.word(comm::HINT) & WORTH != 0 || self.turn(c, order).is_some())
    }

    /// The number that decides whose turn it is, if it is this one's.
    #[inline]
    fn turn(&self, c: &Comm, order: u64) -> Option<u64> {
        // Where kernel events are switched, they are for the regular ones.
        let regular = self.kernel != Kernel::Switched || self.get(ENDED) != 0;
        // Plans count what has no issue order: sends and receives.
        let number = order.wrapping_add(c.word(comm::PLANS));
        let due = |n: u64| match self.wished(c) {
            Some(ours) => ours && self.due(n, WANTED_EVENTS),
            None => self.due(n, EVENT_SHIFT),
        };
        Some(number).filter(|n| regular && due(*n))
    }

    /// Decides on a launch that is wanted, and pays for it.
    #[inline]
    pub(crate) fn launch(&self, c: &Comm, order: u64, now_ns: u64) -> bool {
        self.wants(c, order) && self.take(c, self.turn(c, order), now_ns)
    }

    #[inline(never)]
    fn take(&self, c: &Comm, turn: Option<u64>, now_ns: u64) -> bool {
        let which = if self.wished(c).is_some() { WANTED_EVENTS } else { EVENT_SHIFT };
        let decided = |n| self.decided(n, EVENT_COST_NS, which, EVENT_DECIDED, now_ns);
        // A verdict may be an old one: what it says is bought only with tokens that are there.
        let paid = turn.is_none_or(decided) && self.fill(now_ns) >= EVENT_COST_NS as i64;
        if paid {
            self.pay(EVENT_COST_NS);
        }
        paid
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::Events;
    use crate::record;
    use crate::state::{self, InitArgs, Live};
    use ringwatch_wire::layout::Geometry;

    const FACTS: Facts = Facts { abi: 5, nccl: 22_809, refused: false, switchable: true, events: true };
    const ASKED: c_int = 0xf5f;
    const MS: u64 = 1_000_000;
    const TURN: u64 = 256;

    fn settings() -> Settings {
        Settings { dir: None, bytes: None, budget_ppm: 10_000, detail: Detail::Auto, graphs: Graphs::Watch }
    }

    fn governor(facts: &Facts, settings: &Settings) -> Governor {
        let words = Vec::leak((0..WORDS).map(|_| Word::new(0)).collect());
        let geometry = Geometry::full();
        let all = Vec::leak((0..geometry.bytes() / 8).map(|_| Word::new(0)).collect());
        let g = Governor::new(words, &Segment::new(all, &geometry), facts, settings);
        g.begin(0);
        g
    }

    /// NCCL's mask, and a communicator.
    fn stage(g: &Governor) -> (&'static c_int, Comm) {
        let mask: &'static mut c_int = Box::leak(Box::new(0));
        let place = std::ptr::from_mut(mask);
        *mask = g.mask(ASKED, 0, place.expose_provenance());
        // SAFETY: leaked; what writes to it later goes through the same pointer.
        let mask = unsafe { &*place };
        let geometry = Geometry::full();
        let words: &'static [Word] = Vec::leak((0..geometry.bytes() / 8).map(|_| Word::new(0)).collect());
        let segment = Segment::new(words, &geometry);
        let (ticket, slot) = segment.comm.claim().expect("a fresh segment");
        slot.publish();
        let slot = segment.comm.held(ticket).expect("published");
        (mask, Comm::new(ticket, slot))
    }

    fn asks(mask: &c_int) -> bool {
        // SAFETY: a place of our own.
        unsafe { std::ptr::read_volatile(mask) & KERNEL_CH != 0 }
    }

    /// Issues operations, `every` ns apart, and says which were timed.
    fn issue(g: &Governor, c: &Comm, mask: &c_int, orders: std::ops::Range<u64>, every: u64) -> Vec<bool> {
        orders
            .map(|order| {
                let timed = asks(mask);
                g.issued(c, order, 2, timed, order * every);
                timed
            })
            .collect()
    }

    #[test]
    fn each_nccl_has_its_way() {
        let kernel = |facts: Facts, s: Settings| governor(&facts, &s).kernel;
        assert_eq!(kernel(FACTS, settings()), Kernel::Switched);
        assert_eq!(kernel(Facts { nccl: 23_007, abi: 6, ..FACTS }, settings()), Kernel::Switched);
        assert_eq!(kernel(Facts { nccl: 23_203, abi: 7, ..FACTS }, settings()), Kernel::Once);
        assert_eq!(kernel(Facts { nccl: 23_203, abi: 6, ..FACTS }, settings()), Kernel::Once);
        assert_eq!(kernel(Facts { nccl: 0, abi: 7, ..FACTS }, settings()), Kernel::Once);
        assert_eq!(kernel(Facts { abi: 3, nccl: 22_605, ..FACTS }, settings()), Kernel::Refused);
        assert_eq!(kernel(Facts { refused: true, ..FACTS }, settings()), Kernel::Refused);
        assert_eq!(kernel(Facts { switchable: false, ..FACTS }, settings()), Kernel::Always);
        let full = Settings { detail: Detail::Full, ..settings() };
        assert_eq!(kernel(FACTS, full), Kernel::Always);
        assert_eq!(
            kernel(Facts { refused: true, ..FACTS }, full),
            Kernel::Refused,
            "full does no harm either"
        );
        assert_eq!(kernel(FACTS, Settings { detail: Detail::Calls, ..settings() }), Kernel::Unwanted);
        assert_eq!(kernel(FACTS, Settings { budget_ppm: 0, ..settings() }), Kernel::Unwanted);
        assert_eq!(kernel(FACTS, Settings { graphs: Graphs::Full, ..settings() }), Kernel::Always);
        assert_eq!(kernel(FACTS, Settings { graphs: Graphs::Off, ..settings() }), Kernel::Refused);
    }

    #[test]
    fn a_slow_job_is_timed_completely() {
        let g = governor(&FACTS, &settings());
        let (mask, c) = stage(&g);
        let timed = issue(&g, &c, mask, 0..2_000, 10 * MS);
        assert!(timed.iter().all(|t| *t), "{:?}", timed.iter().position(|t| !t));
    }

    #[test]
    fn a_fast_job_is_timed_in_runs_within_the_budget() {
        let g = governor(&FACTS, &settings());
        let (mask, c) = stage(&g);
        let every = 8_000;
        let timed = issue(&g, &c, mask, 0..1_000_000, every);
        // After the first tokens are spent: each run costs its waking and its channels.
        let later = &timed[500_000..];
        let runs = later.windows(2).filter(|w| !w[0] && w[1]).count() as u64;
        let count = later.iter().filter(|t| **t).count() as u64;
        let cost = runs * WAKE_COST_NS + count * 2 * CHANNEL_COST_NS;
        let wall = later.len() as u64 * every;
        // What the bucket has saved may be spent as well.
        assert!(cost <= (wall + DEEP_NS) / 100, "{cost} ns of {wall}");
        assert!(cost * 400 >= wall, "{cost} ns of {wall}: the budget is there to be used");
        assert_eq!(count, runs * (RUN_MASK + 1), "runs are whole");
        let first = later.iter().position(|t| *t).expect("some are timed") + 500_000;
        let begun = (first..timed.len()).find(|i| timed[*i] && !timed[i - 1]).expect("a run begins");
        assert_eq!(begun as u64 & RUN_MASK, 0, "runs begin at multiples of 32, on every rank");
    }

    #[test]
    fn what_a_reader_wants_is_timed_first_and_within_the_budget() {
        let g = governor(&FACTS, &settings());
        let (mask, wanted) = stage(&g);
        let (_, other) = stage(&g);
        wanted.set(comm::ID, 7);
        other.set(comm::ID, 8);
        // stage() gave NCCL's mask a place for each: one is written.
        g.set(MASK_AT, std::ptr::from_ref(mask).expose_provenance() as u64);
        let every = 4_000;
        // Kernel events are the process's: what is called while they are on is timed, whoever they are on for. So the
        // two take turns, as a job's phases do.
        let both = |turns: std::ops::Range<u64>| {
            let mut timed = [0_u64; 2];
            for turn in turns {
                for (i, c) in [&wanted, &other].into_iter().enumerate() {
                    for order in turn * TURN..(turn + 1) * TURN {
                        let on = asks(mask);
                        timed[i] += u64::from(on);
                        g.issued(c, order, 2, on, (order + (turn + i as u64) * TURN) * every);
                    }
                }
            }
            timed
        };
        both(0..800);
        let fair = both(800..2_000);
        assert!(fair[0] > 0 && fair[1] > fair[0] / 4, "{fair:?}");
        let (until, comm) = g.wish.expect("a segment");
        comm.set(7);
        until.set(now_ns() + 60_000_000_000);
        let before = g.get(TOKENS) as i64;
        let burst = both(2_000..3_200);
        let wall = 1_200 * 2 * TURN * every;
        let spent = before - g.get(TOKENS) as i64 + g.income(1_000_000) as i64 * (wall / 1_000_000) as i64;
        assert!(spent <= (wall + DEEP_NS) as i64 / 100, "{spent} ns of {wall}");
        assert!(burst[0] * 2 > fair[0] + fair[1], "most of what the budget has: {burst:?}, before {fair:?}");
        assert!(burst[1] * 10 < burst[0], "{burst:?}");
        // A moment that has passed is no wish, and is looked at once.
        until.set(1);
        let after = both(3_200..4_400);
        assert_eq!(until.get(), 0);
        assert!(after[1] > after[0] / 4, "{after:?}");
        until.set(u64::MAX);
        both(4_400..4_401);
        assert_eq!(until.get(), 0, "nobody wants anything for centuries");
    }

    #[test]
    fn ranks_that_never_speak_time_the_same_runs() {
        // The second rank started with less, and is a little slower.
        let ranks = [8_000, 9_000].map(|every| {
            let g = governor(&FACTS, &settings());
            let (mask, c) = stage(&g);
            let timed = issue(&g, &c, mask, 0..1_000_000, every);
            timed.chunks(32).map(|run| run.iter().all(|t| *t)).collect::<Vec<_>>()
        });
        let count = |f: &dyn Fn(bool, bool) -> bool| {
            ranks[0].iter().zip(&ranks[1]).skip(10_000).filter(|(a, b)| f(**a, **b)).count()
        };
        let (both, either) = (count(&|a, b| a && b), count(&|a, b| a || b));
        assert!(both * 4 >= either && both > 10, "{both} of {either} runs are timed on both");
    }

    #[test]
    fn two_communicators_share_the_mask_and_the_bucket() {
        let g = governor(&FACTS, &settings());
        let (mask, a) = stage(&g);
        let (_, b) = stage(&g);
        g.mask(ASKED, 0, std::ptr::from_ref(mask).expose_provenance());
        for order in 0..200_000u64 {
            for c in [&a, &b] {
                let timed = asks(mask);
                g.issued(c, order, 24, timed, order * 8_000);
            }
        }
        // b waits for a run when it is freed: nobody is timed for its sake any more.
        if b.word(comm::WANTS) == 0 {
            b.set(comm::WANTS, 1);
            g.words[WANTED].add(1);
        }
        g.finalized(&b);
        assert_eq!(g.get(WANTED), a.word(comm::WANTS));
    }

    #[test]
    fn kernel_events_end_for_good_where_they_cannot_come_back() {
        let g = governor(&Facts { nccl: 23_203, abi: 7, ..FACTS }, &settings());
        let (mask, c) = stage(&g);
        let timed = issue(&g, &c, mask, 0..200_000, 8_000);
        let ended = timed.iter().position(|t| !t).expect("the budget is spent");
        assert!(ended > 100 && timed[ended..].iter().all(|t| !t));
        assert!(!asks(mask), "and not asked for by the next communicator's init");
        assert_eq!(g.mask(ASKED, 0, std::ptr::from_ref(mask).expose_provenance()) & KERNEL_CH, 0);
        // What is timed now is timed by CUDA events, one in a few hundred.
        let events = (0..200_000u64).filter(|o| g.launch(&c, *o, 1_600 * MS + o * 8_000)).count() as u64;
        let (cost, wall) = (events * EVENT_COST_NS, 200_000 * 8_000);
        assert!(events > 100 && cost * 100 <= wall + wall / 2, "{events}");
    }

    #[test]
    fn a_capture_ends_kernel_events_where_they_would_be_wrong() {
        let g = governor(&FACTS, &settings());
        let (mask, c) = stage(&g);
        assert!(g.spoils_captures());
        g.captured();
        assert!(!asks(mask) && !g.spoils_captures());
        assert!(issue(&g, &c, mask, 0..1_000, 10 * MS).iter().all(|t| !t));
        let g = governor(&Facts { nccl: 23_203, abi: 7, ..FACTS }, &settings());
        let (mask, _) = stage(&g);
        g.captured();
        assert!(asks(mask), "NCCL 2.31 counts right only if nothing changes");
    }

    #[test]
    fn another_plugin_that_changes_its_mind_is_followed() {
        let g = governor(&FACTS, &settings());
        let (mask, c) = stage(&g);
        // SAFETY: a place of our own.
        let now = || unsafe { std::ptr::read_volatile(mask) };
        let ours = ASKED & !KERNEL_CH;
        g.follow(0x20);
        assert_eq!(now() & !KERNEL_CH, ours | 0x20);
        g.follow(KERNEL_CH);
        assert!(issue(&g, &c, mask, 0..100_000, 8_000).iter().all(|t| *t), "kernel events for all of it");
        g.follow(0);
        assert_eq!(now(), ours, "what is switched begins with off");
        assert!(issue(&g, &c, mask, 100_000..1_000_000, 8_000).iter().any(|t| *t), "and goes on");
        g.follow(KERNEL_PHASE);
        assert_eq!(now(), ours | KERNEL_PHASE | KERNEL_CH, "no phases without kernels");
        // Once the budget was spent, or a graph was captured, later kernel events are the other plugin's alone.
        g.follow(0);
        g.captured();
        g.follow(KERNEL_CH);
        assert!(asks(mask) && !g.kernel_on());
        let g = governor(&Facts { nccl: 23_203, abi: 7, ..FACTS }, &settings());
        let (mask, _) = stage(&g);
        g.follow(KERNEL_CH);
        g.follow(0);
        assert!(asks(mask) && g.kernel_on(), "never off: the stamps are right");
        let off = Settings { detail: Detail::Calls, ..settings() };
        let g = governor(&Facts { nccl: 23_203, abi: 7, ..FACTS }, &off);
        let (mask, _) = stage(&g);
        for (theirs, on) in [(KERNEL_CH, true), (0, false), (KERNEL_CH, false)] {
            g.follow(theirs);
            assert_eq!((asks(mask), g.kernel_on()), (theirs != 0, on), "wrong after a pause");
        }
    }

    #[test]
    fn a_pause_and_a_large_operation_are_worth_a_pair_of_events() {
        let g = governor(&FACTS, &settings());
        let (_, c) = stage(&g);
        assert!(!g.launch(&c, 0, MS), "the regular ones are for kernel events");
        for hint in [AFTER_PAUSE, LARGE] {
            c.set(comm::HINT, hint);
            assert!(g.launch(&c, 1, 2 * MS));
        }
        assert!(!governor(&Facts { events: false, ..FACTS }, &settings()).launch(&c, 1, 3 * MS));
    }

    #[test]
    fn nothing_is_written_where_nccls_mask_cannot_be() {
        let g = governor(&Facts { switchable: false, ..FACTS }, &settings());
        let (mask, c) = stage(&g);
        assert!(issue(&g, &c, mask, 0..10_000, 1_000).iter().all(|t| *t));
        assert_eq!(g.why_not(false), timed::NOT_BUDGET);
    }

    #[test]
    fn a_slot_that_is_given_on_waits_for_nothing() {
        let live = Live::sample(governor(&FACTS, &settings()), Events::new(None, &[]));
        let g = &live.governor;
        let ticket = state::enter_comm(live, &InitArgs::unknown()).expect("there is room");
        let c = Comm::of(live, ticket).expect("it is there");
        let wait = || {
            c.set(comm::WANTS, 1);
            g.words[WANTED].add(1);
        };
        wait();
        g.finalized(&c);
        g.finalized(&c);
        assert_eq!(g.get(WANTED), 0);
        // A late event of an ended communicator.
        assert!(record::end(live, &c));
        wait();
        let again = (0..live.segment.comm.slots()).find(|_| {
            let next = state::enter_comm(live, &InitArgs::unknown()).expect("there is room");
            next % live.segment.comm.slots() == ticket
        });
        assert!(again.is_some(), "the slot was taken again");
        assert_eq!(g.get(WANTED), 0);
    }
}
