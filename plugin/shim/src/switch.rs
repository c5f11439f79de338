//! The state of the shim, and the function by which the benchmark switches it.

use core::ffi::{c_int, c_uint, c_void};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering};

/// Events are dropped: phases without events.
pub(crate) const DROP: u32 = 0;
/// Events end in empty callbacks.
pub(crate) const EMPTY_CALLBACKS: u32 = 1;
/// Events go to the plugin under test.
pub(crate) const FORWARD: u32 = 2;

/// Request: NCCL's mask becomes 0. Late callbacks of the phase before still go where its events went.
const SWITCH_OFF: c_uint = 0;
/// Request: the plugin's mask, with empty callbacks.
const SWITCH_EMPTY: c_uint = 1;
/// Request: the plugin's mask, and the events go to the plugin.
const SWITCH_FORWARD: c_uint = 2;
/// Request, some time after [`SWITCH_OFF`]: late callbacks are dropped from here on. NCCL 2.28 and later stop the handle of
/// the last call again and again when the mask has become 0, which must cost nothing in a phase without events.
const DROP_LATE: c_uint = 3;

/// No communicator has been made, or the request is unknown.
const NOT_READY: c_int = 1;
/// The plugin's file cannot be loaded.
pub(crate) const CANNOT_LOAD: i32 = 2;
/// The plugin has no table of the version that NCCL asks for.
pub(crate) const NO_TABLE: i32 = 3;
/// The plugin's init returned an error.
pub(crate) const INIT_FAILED: i32 = 4;
/// NCCL has more event masks than the shim can keep.
const TOO_MANY_MASKS: i32 = 5;

/// The state that callbacks read. It is one cache line, and nothing writes it while a phase is timed, except a plugin that
/// changes its mask.
#[repr(C, align(64))]
#[derive(Debug)]
pub(crate) struct Hot {
    /// [`DROP`], [`EMPTY_CALLBACKS`] or [`FORWARD`].
    pub(crate) callbacks: AtomicU32,
    /// The plugin's mask. The plugin has its address and may write it at any time.
    word: AtomicI32,
    /// The value of `word` that NCCL's mask has in a phase of the plugin.
    applied: AtomicI32,
    /// Addresses of the plugin's functions; 0 until it is loaded.
    pub(crate) start: AtomicUsize,
    pub(crate) stop: AtomicUsize,
    pub(crate) record: AtomicUsize,
}

pub(crate) static HOT: Hot = Hot {
    callbacks: AtomicU32::new(DROP),
    word: AtomicI32::new(0),
    applied: AtomicI32::new(0),
    start: AtomicUsize::new(0),
    stop: AtomicUsize::new(0),
    record: AtomicUsize::new(0),
};

/// Communicators of one process share one mask in all releases; more are room for forks.
const MASKS: usize = 64;

/// Guards what follows. Nothing in a timed loop takes it, unless the plugin changes its mask.
static LOCK: AtomicBool = AtomicBool::new(false);
/// The last request.
static REQUESTED: AtomicU32 = AtomicU32::new(SWITCH_OFF);
/// Addresses of NCCL's masks.
static MASK_AT: [AtomicUsize; MASKS] = [const { AtomicUsize::new(0) }; MASKS];
static MASK_COUNT: AtomicUsize = AtomicUsize::new(0);
/// Bits that the plugin has taken back at run time.
static TAKEN_BACK: AtomicI32 = AtomicI32::new(0);
static CHANGES: AtomicU64 = AtomicU64::new(0);
static STRAYS: AtomicU64 = AtomicU64::new(0);
static STATUS: AtomicI32 = AtomicI32::new(0);
pub(crate) static VERSION: AtomicU32 = AtomicU32::new(0);

/// The handle of empty callbacks: an address of the shim's own, which no plugin can give out.
static EMPTY: u64 = 0;

pub(crate) fn empty_handle() -> *mut c_void {
    (&raw const EMPTY).cast_mut().cast()
}

/// The facts that the benchmark reads.
#[repr(C)]
#[derive(Debug)]
pub struct Facts {
    /// ABI version of the table that NCCL uses; 0 before the first communicator.
    version: u32,
    /// 0, or why the plugin cannot be measured.
    status: i32,
    /// The plugin's mask now.
    mask: i32,
    /// The mask of phases with empty callbacks: the plugin's without the bits that it has taken back at run time. A plugin
    /// that times some operations only has that for all others.
    empty_mask: i32,
    /// How often the plugin has changed its mask in its own phases.
    changes: u64,
    /// Events that came in spite of a mask of 0.
    strays: u64,
}

struct Locked;

impl Locked {
    fn take() -> Self {
        while LOCK.swap(true, Ordering::Acquire) {
            core::hint::spin_loop();
        }
        Locked
    }

    fn write_masks(&self, mask: c_int) {
        for at in MASK_AT.iter().take(MASK_COUNT.load(Ordering::Relaxed)) {
            let at = core::ptr::with_exposed_provenance_mut::<c_int>(at.load(Ordering::Relaxed));
            // SAFETY: the address is of NCCL's static mask, an aligned int that lives as long as NCCL is loaded. Other threads
            // read it with atomic loads, and this is one store of the whole word.
            unsafe { core::ptr::write_volatile(at, mask) };
        }
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        LOCK.store(false, Ordering::Release);
    }
}

/// The word that the plugin takes for NCCL's mask.
pub(crate) fn plugin_mask() -> *mut c_int {
    HOT.word.as_ptr()
}

/// Keeps the address of a communicator's mask and switches its events off, as they are before the first request.
pub(crate) fn keep_mask(mask: *mut c_int) {
    if mask.is_null() {
        return;
    }
    let locked = Locked::take();
    let (at, count) = (mask.expose_provenance(), MASK_COUNT.load(Ordering::Relaxed));
    if !MASK_AT.iter().take(count).any(|m| m.load(Ordering::Relaxed) == at) {
        match MASK_AT.get(count) {
            Some(slot) => {
                slot.store(at, Ordering::Relaxed);
                MASK_COUNT.store(count + 1, Ordering::Relaxed);
            }
            None => fail(TOO_MANY_MASKS),
        }
    }
    locked.write_masks(0);
}

/// The first failure is the one that counts.
pub(crate) fn fail(status: i32) {
    // The old value does not matter: one failure is kept.
    STATUS.compare_exchange(0, status, Ordering::Relaxed, Ordering::Relaxed).ok();
}

/// Lets NCCL's mask follow the plugin's where that has changed, as it would if the plugin had NCCL's own address.
#[inline]
pub(crate) fn follow_plugin() {
    if HOT.word.load(Ordering::Relaxed) != HOT.applied.load(Ordering::Relaxed) {
        apply_change();
    }
}

#[cold]
#[inline(never)]
fn apply_change() {
    let locked = Locked::take();
    let (word, before) = (HOT.word.load(Ordering::Relaxed), HOT.applied.load(Ordering::Relaxed));
    // A late callback may come here when the phase has ended: events stay off then.
    if word == before || REQUESTED.load(Ordering::Relaxed) != SWITCH_FORWARD {
        return;
    }
    HOT.applied.store(word, Ordering::Relaxed);
    TAKEN_BACK.fetch_or(before & !word, Ordering::Relaxed);
    CHANGES.fetch_add(1, Ordering::Relaxed);
    locked.write_masks(word);
}

#[cold]
#[inline(never)]
pub(crate) fn count_stray() {
    STRAYS.fetch_add(1, Ordering::Relaxed);
}

/// Switches events as one of the requests says, and writes the facts, unless that address is NULL. Returns 0 on success.
///
/// # Safety
/// `facts` is NULL or the address of a [`Facts`]. No operation of this process is under way.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringwatch_shim(request: c_uint, facts: *mut Facts) -> c_int {
    let locked = Locked::take();
    let word = HOT.word.load(Ordering::Relaxed);
    let empty_mask = word & !TAKEN_BACK.load(Ordering::Relaxed);
    REQUESTED.store(request, Ordering::Relaxed);
    // Callbacks come before their events are on, and stay when these are off.
    let known = match request {
        SWITCH_OFF => {
            locked.write_masks(0);
            true
        }
        SWITCH_EMPTY => {
            HOT.callbacks.store(EMPTY_CALLBACKS, Ordering::Release);
            locked.write_masks(empty_mask);
            true
        }
        SWITCH_FORWARD => {
            HOT.callbacks.store(FORWARD, Ordering::Release);
            // A late callback may have changed the mask when the phase had ended.
            let before = HOT.applied.swap(word, Ordering::Relaxed);
            TAKEN_BACK.fetch_or(before & !word, Ordering::Relaxed);
            locked.write_masks(word);
            true
        }
        DROP_LATE => {
            HOT.callbacks.store(DROP, Ordering::Release);
            true
        }
        _ => false,
    };
    let version = VERSION.load(Ordering::Relaxed);
    if !facts.is_null() {
        let now = Facts {
            version,
            status: STATUS.load(Ordering::Relaxed),
            mask: word,
            empty_mask,
            changes: CHANGES.load(Ordering::Relaxed),
            strays: STRAYS.load(Ordering::Relaxed),
        };
        // SAFETY: the caller passes the address of a `Facts`.
        unsafe { facts.write(now) };
    }
    if known && version != 0 { 0 } else { NOT_READY }
}
