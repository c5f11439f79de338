//! An NCCL profiler plugin that does nothing, for `ringwatch bench`: what a job pays with it is what NCCL itself
//! charges for the events that the mask asks for, whoever listens.
//!
//! `RINGWATCH_NULL_MASK` (decimal, or hexadecimal behind `0x`) is the mask, of which each ABI version takes what it
//! knows; without it, or where it is no number, the mask is 0x42: collectives and kernels on channels. It
//! keeps the promises of the real plugin: no wait, no heap, no system call, no panic.

#![cfg_attr(all(panic = "abort", not(test)), no_std)]
#![expect(unsafe_code, reason = "the C boundary")]
#![expect(clippy::disallowed_types, reason = "one counter that orders nothing: loom has nothing to check")]

use core::ffi::{CStr, c_char, c_int, c_void};
use core::sync::atomic::{AtomicUsize, Ordering};

/// NCCL's logger: level, flags, file, line, format, arguments.
type LogFn = unsafe extern "C" fn(c_int, u64, *const c_char, c_int, *const c_char, ...);

/// The result that NCCL gets, always.
const SUCCESS: c_int = 0;
/// Collectives (bit 1) and kernels on channels (bit 6).
const DEFAULT_MASK: c_int = 0x42;
/// Slots behind the last one that NCCL knows: forks look for extra functions there and must find NULL.
const SPARE: usize = 8;

/// The exported table. `I` is the version's init function.
#[repr(C)]
#[derive(Debug)]
pub struct Table<I> {
    name: *const c_char,
    init: I,
    start: unsafe extern "C" fn(*mut c_void, *mut *mut c_void, *const c_void) -> c_int,
    stop: unsafe extern "C" fn(*mut c_void) -> c_int,
    record: unsafe extern "C" fn(*mut c_void, c_int, *const c_void) -> c_int,
    finalize: unsafe extern "C" fn(*mut c_void) -> c_int,
    spare: [*const c_void; SPARE],
}

// SAFETY: the table is immutable, and its pointers are to static text, functions or nothing.
unsafe impl<I> Sync for Table<I> {}

impl<I> Table<I> {
    const fn of(init: I) -> Self {
        let spare = [core::ptr::null(); SPARE];
        Table { name: c"RingwatchNull".as_ptr(), init, start, stop, record, finalize, spare }
    }
}

type InitBare = unsafe extern "C" fn(*mut *mut c_void, *mut c_int) -> c_int;
type InitV4 = unsafe extern "C" fn(
    *mut *mut c_void,
    *mut c_int,
    *const c_char,
    u64,
    c_int,
    c_int,
    c_int,
    Option<LogFn>,
) -> c_int;
type InitV5 = unsafe extern "C" fn(
    *mut *mut c_void,
    u64,
    *mut c_int,
    *const c_char,
    c_int,
    c_int,
    c_int,
    Option<LogFn>,
) -> c_int;

/// The last number given out: contexts and handles are numbers, never NULL, never twice.
static LAST: AtomicUsize = AtomicUsize::new(0);

fn unique() -> *mut c_void {
    core::ptr::without_provenance_mut(LAST.fetch_add(1, Ordering::Relaxed).wrapping_add(1).max(1))
}

/// The mask that a text asks for.
fn mask_of(text: &[u8]) -> Option<c_int> {
    let (digits, base) = match text {
        [b'0', b'x' | b'X', rest @ ..] => (rest, 16),
        all => (all, 10),
    };
    if digits.is_empty() {
        return None;
    }
    let mut value: c_int = 0;
    for d in digits {
        let digit = c_int::try_from(char::from(*d).to_digit(base)?).ok()?;
        value = value.checked_mul(base.cast_signed())?.checked_add(digit)?;
    }
    Some(value)
}

fn asked() -> c_int {
    // SAFETY: a NUL-terminated name; what comes back is NULL or a C string. init runs once for each communicator,
    // and nobody changes the environment under NCCL's own reading of it either.
    let text = unsafe {
        let text = libc::getenv(c"RINGWATCH_NULL_MASK".as_ptr());
        if text.is_null() {
            return DEFAULT_MASK;
        }
        CStr::from_ptr(text)
    };
    mask_of(text.to_bytes()).unwrap_or(DEFAULT_MASK)
}

fn open(context: *mut *mut c_void, mask: *mut c_int, known: c_int) -> c_int {
    if !context.is_null() {
        // SAFETY: NCCL passes a place for one pointer.
        unsafe { context.write(unique()) };
    }
    if !mask.is_null() {
        // SAFETY: NCCL passes a pointer to its mask, an aligned int that other threads read meanwhile: one store.
        unsafe { core::ptr::write_volatile(mask, asked() & known) };
    }
    SUCCESS
}

unsafe extern "C" fn init_bare<const KNOWN: c_int>(context: *mut *mut c_void, mask: *mut c_int) -> c_int {
    open(context, mask, KNOWN)
}

unsafe extern "C" fn init_v4<const KNOWN: c_int>(
    context: *mut *mut c_void,
    mask: *mut c_int,
    _name: *const c_char,
    _id: u64,
    _nodes: c_int,
    _ranks: c_int,
    _rank: c_int,
    _log: Option<LogFn>,
) -> c_int {
    open(context, mask, KNOWN)
}

unsafe extern "C" fn init_v5<const KNOWN: c_int>(
    context: *mut *mut c_void,
    _id: u64,
    mask: *mut c_int,
    _name: *const c_char,
    _nodes: c_int,
    _ranks: c_int,
    _rank: c_int,
    _log: Option<LogFn>,
) -> c_int {
    open(context, mask, KNOWN)
}

unsafe extern "C" fn start(
    _context: *mut c_void,
    out: *mut *mut c_void,
    _descriptor: *const c_void,
) -> c_int {
    if !out.is_null() {
        // SAFETY: NCCL passes a place for one handle.
        unsafe { out.write(unique()) };
    }
    SUCCESS
}

unsafe extern "C" fn stop(_event: *mut c_void) -> c_int {
    SUCCESS
}

unsafe extern "C" fn record(_event: *mut c_void, _state: c_int, _args: *const c_void) -> c_int {
    SUCCESS
}

unsafe extern "C" fn finalize(_context: *mut c_void) -> c_int {
    SUCCESS
}

/// Exports the table of one version, which knows some bits of the mask.
macro_rules! table {
    ($symbol:ident, $init:ident: $signature:ty, $known:literal) => {
        /// The table that NCCL looks up by this name.
        #[unsafe(no_mangle)]
        #[allow(non_upper_case_globals, reason = "NCCL's name")]
        pub static $symbol: Table<$signature> = Table::of($init::<$known>);
    };
}

table!(ncclProfiler_v1, init_bare: InitBare, 0x1f);
table!(ncclProfiler_v2, init_bare: InitBare, 0x1f);
table!(ncclProfiler_v3, init_bare: InitBare, 0x5f);
table!(ncclProfiler_v4, init_v4: InitV4, 0x5f);
table!(ncclProfiler_v5, init_v5: InitV5, 0xf5f);
table!(ncclProfiler_v6, init_v5: InitV5, 0xf5f);
table!(ncclProfiler_v7, init_v5: InitV5, 0xf5f);

// What a library without std and without unwinding owes the linker.
#[cfg(all(panic = "abort", not(test)))]
mod freestanding {
    /// Never linked in, since nothing here can panic.
    #[panic_handler]
    fn ringwatch_null_panicked(_: &core::panic::PanicInfo<'_>) -> ! {
        loop {
            core::hint::spin_loop();
        }
    }

    // The precompiled core names this in unwind tables whose functions are all gone; nothing calls it.
    core::arch::global_asm!(
        ".hidden rust_eh_personality",
        ".globl rust_eh_personality",
        "rust_eh_personality:"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_are_decimal_or_hexadecimal() {
        for (text, mask) in [
            ("66", Some(66)),
            ("0x42", Some(0x42)),
            ("0Xf5F", Some(0xf5f)),
            ("0", Some(0)),
            ("", None),
            ("0x", None),
            ("-1", None),
            ("12z", None),
            ("99999999999", None),
        ] {
            assert_eq!(mask_of(text.as_bytes()), mask, "{text}");
        }
    }
}
