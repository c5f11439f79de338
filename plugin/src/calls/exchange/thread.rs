//! A call of NCCL's that may never return, on a thread of its own.

use crate::runtime::clock::now_ns;
use crate::runtime::nccl::Linker;
use crate::runtime::sys;
use core::ffi::{CStr, c_int, c_void};
use ringwatch_wire::sync::Word;

type Start = unsafe extern "C" fn(*mut c_void) -> *mut c_void;
type Create = unsafe extern "C" fn(*mut usize, *const c_void, Start, *mut c_void) -> c_int;
type Detach = unsafe extern "C" fn(usize) -> c_int;

/// The outcome of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Returned {
    /// It returned this result.
    Result(c_int),
    /// It has not returned in time. Its thread goes on.
    Late,
    /// There is no thread for it.
    NoThread,
}

/// Where a call leaves its result.
#[derive(Debug)]
pub(super) struct Slot {
    /// NONE, RUNNING or DONE.
    state: Word,
    result: Word,
}

const NONE: u64 = 0;
const RUNNING: u64 = 1;
const DONE: u64 = 2;

impl Slot {
    pub(super) const fn new() -> Self {
        Slot { state: Word::new(NONE), result: Word::new(0) }
    }

    /// True while a thread is inside the call.
    pub(super) fn is_pending(&self) -> bool {
        self.state.get_first() == RUNNING
    }

    /// The call has returned.
    pub(super) fn fill(&self, result: c_int) {
        self.result.set(u64::from(result.cast_unsigned()));
        self.state.set_last(DONE);
    }
}

/// Runs a function on a thread of its own, and waits for what it leaves in `slot`.
///
/// # Safety
/// `argument` is good for `start`, and with `slot` stays for as long as that runs, which may be forever.
pub(super) unsafe fn call(start: Start, argument: *mut c_void, slot: &Slot, until_ns: u64) -> Returned {
    slot.state.set(RUNNING);
    // SAFETY: as the caller promises.
    if !unsafe { spawn(start, argument) } {
        slot.state.set(NONE);
        return Returned::NoThread;
    }
    while slot.is_pending() {
        if now_ns() >= until_ns {
            return Returned::Late;
        }
        sys::nap();
    }
    Returned::Result((slot.result.get() as u32).cast_signed())
}

unsafe fn spawn(start: Start, argument: *mut c_void) -> bool {
    let Some(linker) = Linker::get() else { return false };
    // Before glibc 2.34 they are in a library of their own.
    let find = |name: &CStr| {
        let at = linker.find(c"libc.so.6", name);
        if at == 0 { linker.find(c"libpthread.so.0", name) } else { at }
    };
    let (create, detach) = (find(c"pthread_create"), find(c"pthread_detach"));
    if create == 0 || detach == 0 {
        return false;
    }
    // SAFETY: libc's functions of these names and signatures.
    let (create, detach) = unsafe {
        (core::mem::transmute::<usize, Create>(create), core::mem::transmute::<usize, Detach>(detach))
    };
    let mut thread = 0;
    // The job's signals are for the job's threads.
    // SAFETY: stores one number; a thread with the usual attributes.
    sys::without_signals(|| unsafe {
        create(&mut thread, core::ptr::null(), start, argument) == 0 && detach(thread) == 0
    })
}
