//! The process's one state: opened by the first `init`, alive until the process ends.
//!
//! It lives on pages that the kernel empties in a forked child (`MADV_WIPEONFORK`), so that a child finds
//! itself unopened and never writes into its parent's segment; a child that uses NCCL itself opens its own.

#![expect(unsafe_code, reason = "one mapping is shared by all threads of the process")]

use crate::abi::LogFn;
use crate::bare;
use crate::chain::Chain;
use crate::clock::{self, now_ns};
use crate::event::bit;
use crate::events::{self, Driver, Events};
use crate::governor::{self, Facts, Governor};
use crate::handle::{Handle, Kind, VALUE_MASK};
use crate::log::{Log, Message};
use crate::names;
use crate::nccl::Linker;
use crate::pairs::{self, Pairs};
use crate::record::Comm;
use crate::settings::{self, Settings};
use crate::statics::STATICS;
use crate::sys::{self, InChild};
use crate::{calls, nccl, prefetch, process, shm, tuner};
use core::ffi::{c_char, c_int};
use ringwatch_wire::codes::{Loss, call};
use ringwatch_wire::layout::{Geometry, HEADER_WORDS, comm, head};
use ringwatch_wire::ring::Segment;
use ringwatch_wire::sync::{Claim, Word};

/// What the callbacks work with.
#[derive(Debug)]
pub struct Live {
    /// The segment, or a bare header in private memory that only counts.
    pub segment: Segment<'static>,
    /// Upper 16 bits of every handle of this process.
    pub nonce: u16,
    /// NCCL's version code, 22809 for 2.28.9; 0 unknown.
    pub nccl: u32,
    pub(crate) pairs: Pairs,
    pub(crate) governor: Governor,
    pub(crate) events: Events,
    pub(crate) bare: &'static bare::Process,
}

/// What NCCL said at init.
#[derive(Debug, Clone, Copy)]
pub struct InitArgs {
    /// False for ABI v1 to v3, whose init says nothing.
    pub known: bool,
    /// The communicator.
    pub id: u64,
    /// The user's name for it, or NULL.
    pub name: *const c_char,
    /// Nodes.
    pub nodes: c_int,
    /// Ranks.
    pub ranks: c_int,
    /// This rank.
    pub rank: c_int,
    /// NCCL's logger.
    pub log: Option<LogFn>,
}

impl InitArgs {
    /// Nothing is known.
    pub const fn unknown() -> Self {
        InitArgs { known: false, id: 0, name: core::ptr::null(), nodes: 0, ranks: 0, rank: -1, log: None }
    }
}

/// NCCL's event mask, as an init may have it.
#[derive(Debug, Clone, Copy)]
pub struct Mask {
    /// The events that this ABI version is to bring.
    pub wanted: c_int,
    /// Where NCCL keeps it; 0 nowhere.
    pub place: usize,
}

/// What init gives back.
#[derive(Debug, Clone, Copy)]
pub struct Opened {
    /// The context, never 0.
    pub context: u64,
    /// The mask to begin with.
    pub mask: c_int,
}

/// The wiped pages.
#[repr(C)]
struct Page {
    bare: bare::Process,
    /// UNOPENED, OPENING, OPEN or CHAINED.
    phase: Word,
    /// Whether there is another plugin: UNOPENED, OPENING or, when that is decided, OPEN.
    chaining: Word,
    /// Contexts given out that no communicator slot stands behind.
    spare_contexts: Word,
    live: core::cell::UnsafeCell<core::mem::MaybeUninit<Live>>,
    chain: core::cell::UnsafeCell<core::mem::MaybeUninit<Chain>>,
    /// A header to count in where there is no segment.
    header: [Word; HEADER_WORDS],
    pairs: [Word; pairs::WORDS],
    governor: [Word; governor::WORDS],
    events: [Word; events::WORDS],
}

const UNOPENED: u64 = 0;
const OPENING: u64 = 1;
const OPEN: u64 = 2;
/// Open, with another plugin that gets the same callbacks.
const CHAINED: u64 = 3;

/// Longest wait for another thread's opening, which takes a few system calls and lines of NCCL's log.
const OPENING_NS_MAX: u64 = 10_000_000_000;

/// A context of last resort: not 0 and of no process.
const NO_CONTEXT: u64 = 1;

#[inline(always)]
fn page() -> Option<&'static Page> {
    let at = STATICS.page.get_first();
    // SAFETY: a non-zero address is of a mapping of a whole `Page` that is never unmapped. All bytes of a
    // page, zero at first, are valid for its type, and what changes is behind `Word` or `UnsafeCell`.
    unsafe { core::ptr::with_exposed_provenance::<Page>(at as usize).as_ref() }
}

/// The process's state; `None` before the first init, in a forked child, and where nothing could be mapped.
#[inline]
pub fn live() -> Option<&'static Live> {
    let page = page()?;
    if page.phase.get_first() != OPEN {
        return chained_live(page);
    }
    // SAFETY: OPEN is stored after `live` was written, and it is written only once.
    Some(unsafe { (*page.live.get()).assume_init_ref() })
}

/// The state of the process that the hot path reads; `None` before the first init, and where nothing could be mapped.
#[inline(always)]
pub(crate) fn bare() -> Option<&'static bare::Process> {
    page().map(|p| &p.bare)
}

/// The process's state; `None` as well where another plugin gets the same callbacks.
#[inline]
pub(crate) fn live_alone() -> Option<&'static Live> {
    let page = page()?;
    if page.phase.get_first() != OPEN {
        return None;
    }
    // SAFETY: as above.
    Some(unsafe { (*page.live.get()).assume_init_ref() })
}

#[cold]
#[inline(never)]
fn chained_live(page: &'static Page) -> Option<&'static Live> {
    // SAFETY: CHAINED follows OPEN.
    (page.phase.get_first() == CHAINED).then(|| unsafe { (*page.live.get()).assume_init_ref() })
}

/// The other plugin that gets the same callbacks, if there is one.
pub(crate) fn chain() -> Option<&'static Chain> {
    let page = page()?;
    if page.phase.get_first() != CHAINED {
        return None;
    }
    // SAFETY: CHAINED is stored after `chain` was written, and it is written only once.
    Some(unsafe { (*page.chain.get()).assume_init_ref() })
}

/// Loads the other plugin at the profiler's first init. A call of the API may have opened the process before, but only
/// here the ABI version is known.
fn load_chain(page: &'static Page, version: u32, log: &Log) {
    if page.chaining.replace(UNOPENED, OPENING) {
        if let Some(chain) = settings::chain().and_then(|library| Chain::load(library, version, log)) {
            // SAFETY: `chaining` is OPENING, set by this thread, and nobody reads `chain` before CHAINED.
            unsafe { (*page.chain.get()).write(chain) };
            page.bare.block(bare::CHAINED);
            page.phase.set_last(CHAINED);
        }
        page.chaining.set_last(OPEN);
    }
    wait(|| page.chaining.get_first() == OPEN);
}

/// Waits for what another communicator's init is doing. This is init, where waiting is allowed, and bounded by time:
/// giving up would write 0 to the mask that all of NCCL's communicators share.
fn wait(done: impl Fn() -> bool) {
    let begun = now_ns();
    while !done() && now_ns().saturating_sub(begun) < OPENING_NS_MAX {
        sys::nap();
    }
}

fn map_page() -> Option<&'static Page> {
    if let Some(p) = page() {
        return Some(p);
    }
    let bytes = size_of::<Page>();
    let at = sys::map(None, bytes)?;
    // A kernel older than 4.14 cannot wipe, and a child of a fork would then write into its parent's
    // segment: rather do nothing at all.
    // SAFETY: our own fresh mapping, whole.
    let wiped = unsafe { sys::on_fork(at, bytes, InChild::Wiped) };
    if !wiped || !STATICS.page.replace(0, at.expose_provenance() as u64) {
        // SAFETY: nobody else knows this mapping.
        unsafe { sys::unmap(at, bytes) };
    }
    page()
}

/// Opens the process's state if need be, and a communicator in it. Never fails: without a segment the books
/// are kept in private memory, and NCCL is asked for no events.
pub fn open_comm(version: u32, args: &InitArgs, mask: Mask) -> Opened {
    let log = Log::new(args.log);
    names::forget();
    let Some((page, live)) = open(Some(version), mask.place, &log) else {
        return Opened { context: NO_CONTEXT, mask: 0 };
    };
    bare::forget_names(&live.segment);
    let outcome = match calls::adopt(live, version, args) {
        Some(ticket) => Ok(ticket),
        None => enter_comm(live, args),
    };
    if let Ok(ticket) = outcome {
        tuner::note(ticket);
        if is_beside_another(live, ticket) {
            // Most likely a thread for each, and the mask is one for all.
            live.governor.stop_switching();
        }
        if live.governor.events() {
            live.events.open(ticket);
        }
    }
    live.segment.book(call::INIT, outcome.map(|_| ()));
    let value = outcome.unwrap_or_else(|why| {
        // Why there is no segment at all was said when it could not be made.
        if why != Loss::NoRoom {
            log.say(Message::CommTableFull);
        }
        // Contexts have to differ even without a slot: NCCL purges queued events by context.
        spare_context(page.spare_contexts.add(1))
    });
    load_chain(page, version, &log);
    // Nothing is recorded where there is no segment, and nothing asked for.
    let wanted = if outcome == Err(Loss::NoRoom) { 0 } else { mask.wanted };
    let mask = match chain() {
        Some(chain) => {
            let theirs = chain.open(version, args, value, &log);
            // The other plugin may change its mind, which is seen when something comes.
            live.governor.mask(wanted | HEARTBEAT, theirs, static_place(mask.place))
        }
        None if wanted == 0 => 0,
        None => live.governor.mask(wanted, 0, mask.place),
    };
    Opened { context: Handle { kind: Kind::Comm, value }.pack(live.nonce), mask }
}

/// True where the process has another rank of the communicator.
fn is_beside_another(live: &Live, ticket: u64) -> bool {
    let ring = &live.segment.comm;
    let word = |slot: &[Word; comm::WORDS], i: usize| slot.get(i).map_or(0, Word::get);
    let Some(own) = ring.held(ticket) else { return false };
    let id = word(own, comm::ID);
    word(own, comm::NODES) & comm::KNOWN != 0
        && (0..ring.slots()).filter_map(|i| ring.slot(i)).any(|other| {
            !core::ptr::eq(own, other)
                && word(other, 0) != 0
                && word(other, comm::NODES) & comm::KNOWN != 0
                && word(other, comm::ID) == id
                && word(other, comm::FINALIZED_NS) == 0
        })
}

/// What costs NCCL nothing and comes with every operation.
const HEARTBEAT: c_int = 1 << bit::COLL | 1 << bit::P2P;

/// A place for NCCL's mask that may be written after init; 0 for one on a stack or a heap, which is a test's.
fn static_place(place: usize) -> usize {
    if Linker::get().is_some_and(|l| l.is_static(place)) { place } else { 0 }
}

/// Contexts without a slot count down from the largest value.
const SPARE_CONTEXTS: u64 = 1 << 20;

fn spare_context(n: u64) -> u64 {
    VALUE_MASK - n % SPARE_CONTEXTS
}

/// The number of a context without a slot; `None` for a communicator's ticket.
pub(crate) fn spare_number(value: u64) -> Option<u64> {
    let n = VALUE_MASK.wrapping_sub(value);
    if n < SPARE_CONTEXTS { Some(n) } else { None }
}

/// Opens the process's state if need be; `version` is the profiler's ABI, `None` for a call of the API.
fn open(version: Option<u32>, mask_at: usize, log: &Log) -> Option<(&'static Page, &'static Live)> {
    let Some(page) = map_page() else {
        log.say(Message::NoForkGuard);
        return None;
    };
    if page.phase.replace(UNOPENED, OPENING) {
        open_process(page, version, mask_at, log);
    }
    wait(|| page.phase.get_first() >= OPEN);
    Some((page, live()?))
}

/// Opens the process's state, if need be, for a call of the API: NCCL has no logger to give there.
pub(crate) fn open_for_calls() -> Option<&'static Live> {
    open(None, 0, &Log::new(None)).map(|(_, live)| live)
}

fn open_process(page: &'static Page, version: Option<u32>, mask_at: usize, log: &Log) {
    clock::measure();
    prefetch::look();
    let settings = Settings::from_environment(log);
    let identity = process::Identity::read();
    let nccl = nccl::version(log);
    let format = |words: &[Word], geometry: &Geometry| {
        let segment = Segment::new(words, geometry);
        segment.format(geometry);
        identity.write(&segment);
        segment.set(head::NCCL, u64::from(nccl.unwrap_or(0)) | u64::from(version.unwrap_or(0)) << 32);
        process::write_environment(&segment);
        segment.open_for_readers();
    };
    let made = shm::create(&settings, &identity, log, format);
    let (words, geometry): (&'static [Word], Geometry) = made.unwrap_or_else(|| {
        for w in &page.header {
            w.set(0);
        }
        format(&page.header, &Geometry::full());
        (&page.header, Geometry::full())
    });
    let segment = Segment::new(words, &geometry);
    let nonce = (identity.nonce & 0xffff) as u16;
    let nccl = nccl.unwrap_or(0);
    let events = Events::new(Driver::find(), &page.events);
    // A call of the API comes before the profiler's first init; which one that will be NCCL's version says.
    let abi = version.unwrap_or_else(|| calls::abi_to_come(nccl));
    let facts = Facts {
        abi,
        nccl,
        refused: refused(abi, nccl, log),
        // A mask on a stack or a heap is a test's, and gone after init.
        switchable: version.is_none() || Linker::get().is_some_and(|l| l.is_static(mask_at)),
        events: events.available(),
    };
    let governor = Governor::new(&page.governor, &segment, &page.bare, &facts, &settings);
    governor.begin(now_ns());
    let pairs = Pairs::new(&page.pairs);
    let nonce = nonce.max(1);
    page.bare.prepare(&segment, nonce, nccl);
    let live = Live { segment, nonce, nccl, pairs, governor, events, bare: &page.bare };
    // SAFETY: the phase is OPENING, set by this thread, and nobody reads `live` before OPEN.
    unsafe { (*page.live.get()).write(live) };
    page.phase.set_last(OPEN);
    page.bare.open();
}

/// NCCL's set-up of kernel events makes files of 34 MB in /dev/shm, and crashes when it cannot. 64 MiB, in bytes, is
/// the size of a container's /dev/shm by default; where that or a file may not be larger they are not asked for.
const LITTLE_SHM: u64 = 64 << 20;

/// True where kernel events would harm the job: in NCCL 2.27 (the only one to use ABI v4), whose all-to-alls then
/// fail, and where there is little shared memory or files have to be small.
fn refused(version: u32, nccl: u32, log: &Log) -> bool {
    let little = sys::open(c"/dev/shm", sys::DIRECTORY)
        .and_then(|d| sys::file_system(&d))
        .is_none_or(|fs| fs.total <= LITTLE_SHM)
        || sys::file_size_limit().is_none_or(|limit| limit <= LITTLE_SHM);
    let refused = little || version == 4 || (22700..22800).contains(&nccl);
    if refused {
        log.say(Message::NoKernelTimes);
    }
    refused
}

pub(crate) fn enter_comm(live: &Live, args: &InitArgs) -> Result<u64, Loss> {
    let (ticket, slot) = live.segment.comm.claim_free(Loss::CommTable, |slot| {
        // Free when never used, or when NCCL has freed the communicator.
        slot.first().is_some_and(|s| s.get() == 0)
            || slot.get(comm::FINALIZED_NS).is_some_and(|w| w.get() != 0)
    })?;
    let number = |n: c_int| u64::from(u32::try_from(n).unwrap_or(0));
    slot.set(comm::ID, args.id);
    slot.set(comm::RANK, number(args.rank) | number(args.ranks) << 32);
    slot.set(comm::NODES, number(args.nodes) | if args.known { comm::KNOWN } else { 0 });
    slot.set(comm::INIT_NS, now_ns());
    slot.set(comm::FINALIZED_NS, 0);
    slot.set(comm::ISSUED, 0);
    slot.set(comm::REPLAYED, 0);
    for (i, w) in names::long_text(args.name).iter().enumerate() {
        slot.set(comm::NAME + i, *w);
    }
    // A late event of the slot's last communicator may have left it waiting.
    if let Some(old) = live.segment.comm.slot(ticket) {
        live.governor.finalized(&Comm::new(ticket, old));
    }
    // Its books are left alone: late events of the slot's last communicator count in them as well.
    for i in (comm::STATE..comm::CALLS).chain(comm::WANTS..comm::WORDS) {
        slot.set(i, 0);
    }
    place_on(&slot, &nccl::gpu_address());
    slot.publish();
    Ok(ticket)
}

#[cfg(test)]
impl Live {
    /// One in ordinary memory.
    pub(crate) fn sample(governor: Governor, events: Events) -> &'static Self {
        let words = |n: usize| -> &'static [Word] { Vec::leak((0..n).map(|_| Word::new(0)).collect()) };
        let geometry = Geometry::full();
        let segment = Segment::new(words(geometry.bytes() as usize / 8), &geometry);
        let pairs = Pairs::new(words(pairs::WORDS));
        let bare = bare::Process::sample();
        Box::leak(Box::new(Live { segment, nonce: 1, nccl: 0, pairs, governor, events, bare }))
    }
}

/// Writes down a communicator's GPU.
pub(crate) fn place_on(slot: &Claim<'_, { comm::WORDS }>, gpu: &[u64; comm::GPU_WORDS]) {
    for (i, w) in gpu.iter().enumerate() {
        slot.set(comm::GPU + i, *w);
    }
}
