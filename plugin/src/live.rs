//! The process's one state: opened by the first `init`, alive until the process ends.
//!
//! It lives on pages that the kernel empties in a forked child (`MADV_WIPEONFORK`), so that a child finds
//! itself unopened and never writes into its parent's segment; a child that uses NCCL itself opens its own.

#![expect(unsafe_code, reason = "one mapping is shared by all threads of the process")]

use crate::chain::Chain;
use crate::event_pairs::{self, EventPairs};
use crate::gate;
use crate::governor::{self, Governor};
use crate::pair_orders::{self, Pairs};
use crate::runtime::clock::now_ns;
use crate::runtime::statics::STATICS;
use crate::runtime::sys::{self, InChild};
use ringwatch_wire::layout::HEADER_WORDS;
use ringwatch_wire::ring::Segment;
use ringwatch_wire::sync::Word;

/// The state that callbacks work with.
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
    pub(crate) events: EventPairs,
    pub(crate) bare: &'static gate::Process,
}

/// The wiped pages.
#[repr(C)]
pub(crate) struct Page {
    pub(crate) bare: gate::Process,
    /// UNOPENED, OPENING, OPEN or CHAINED.
    phase: Word,
    /// The search for another plugin: UNOPENED, OPENING or, when it has ended, OPEN.
    chaining: Word,
    /// Contexts given out that no communicator slot stands behind.
    pub(crate) spare_contexts: Word,
    live: core::cell::UnsafeCell<core::mem::MaybeUninit<Live>>,
    chain: core::cell::UnsafeCell<core::mem::MaybeUninit<Chain>>,
    /// A header to count in where there is no segment.
    pub(crate) header: [Word; HEADER_WORDS],
    pub(crate) pairs: [Word; pair_orders::WORDS],
    pub(crate) governor: [Word; governor::WORDS],
    pub(crate) events: [Word; event_pairs::WORDS],
}

const UNOPENED: u64 = 0;
const OPENING: u64 = 1;
const OPEN: u64 = 2;
/// Open, with another plugin that gets the same callbacks.
const CHAINED: u64 = 3;

/// Longest wait for another thread's opening, which takes a few system calls and lines of NCCL's log.
const OPENING_NS_MAX: u64 = 10_000_000_000;

#[inline(always)]
fn page() -> Option<&'static Page> {
    let at = STATICS.page.get_first();
    // SAFETY: a non-zero address is of a mapping of a whole `Page` that is never unmapped. All bytes of a
    // page, zero at first, are valid for its type, and what changes is behind `Word` or `UnsafeCell`.
    unsafe { core::ptr::with_exposed_provenance::<Page>(at as usize).as_ref() }
}

/// The process's state; `None` before the first init, in a forked child, and where nothing could be mapped.
#[inline]
pub(crate) fn live() -> Option<&'static Live> {
    let page = page()?;
    if page.phase.get_first() != OPEN {
        return chained_live(page);
    }
    // SAFETY: OPEN is stored after `live` was written, and it is written only once.
    Some(unsafe { (*page.live.get()).assume_init_ref() })
}

/// The state of the process that the hot path reads; `None` before the first init, and where nothing could be mapped.
#[inline(always)]
pub(crate) fn bare() -> Option<&'static gate::Process> {
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

impl Page {
    /// Opens it once, by the state that `open` makes; others wait for that. False where it took too long.
    pub(crate) fn open(&'static self, open: impl FnOnce() -> Live) -> bool {
        if self.phase.replace(UNOPENED, OPENING) {
            let live = open();
            // SAFETY: the phase is OPENING, set by this thread, and nobody reads `live` before OPEN.
            unsafe { (*self.live.get()).write(live) };
            self.phase.set_last(OPEN);
            self.bare.open();
        }
        wait(|| self.phase.get_first() >= OPEN)
    }

    /// Loads the other plugin at the profiler's first init. A call of the API may have opened the process before, but only
    /// here the ABI version is known.
    pub(crate) fn load_chain(&'static self, load: impl FnOnce() -> Option<Chain>) {
        if self.chaining.replace(UNOPENED, OPENING) {
            if let Some(chain) = load() {
                // SAFETY: `chaining` is OPENING, set by this thread, and nobody reads `chain` before CHAINED.
                unsafe { (*self.chain.get()).write(chain) };
                self.bare.block(gate::CHAINED);
                self.phase.set_last(CHAINED);
            }
            self.chaining.set_last(OPEN);
        }
        wait(|| self.chaining.get_first() == OPEN);
    }
}

/// Waits for what another communicator's init is doing. This is init, where waiting is allowed, and bounded by time:
/// giving up would write 0 to the mask that all of NCCL's communicators share.
fn wait(done: impl Fn() -> bool) -> bool {
    let begun = now_ns();
    while !done() && now_ns().saturating_sub(begun) < OPENING_NS_MAX {
        sys::nap();
    }
    done()
}

/// The pages, mapped if need be.
pub(crate) fn map_page() -> Option<&'static Page> {
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

#[cfg(test)]
impl Live {
    /// One in ordinary memory.
    pub(crate) fn sample(governor: Governor, events: EventPairs) -> &'static Self {
        let words = |n: usize| -> &'static [Word] { Vec::leak((0..n).map(|_| Word::new(0)).collect()) };
        let geometry = ringwatch_wire::layout::Geometry::full();
        let segment = Segment::new(words(geometry.bytes() as usize / 8), &geometry);
        let pairs = Pairs::new(words(pair_orders::WORDS));
        let bare = gate::Process::sample();
        Box::leak(Box::new(Live { segment, nonce: 1, nccl: 0, pairs, governor, events, bare }))
    }
}
