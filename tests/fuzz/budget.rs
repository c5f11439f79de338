//! What one input may cost: memory, which the allocator of these binaries counts, and CPU time.

#![expect(unsafe_code, reason = "an allocator that counts")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::Duration;

/// Memory that a target may hold at once for one input of up to 1 MiB, in bytes.
const MEMORY_MAX: usize = 64 << 20;
/// CPU time for one input, in a build without optimization on a busy machine.
const CPU_MAX: Duration = Duration::from_secs(10);
/// A thread that asks for more than this is refused, in bytes: a bomb ends the test and not the machine.
const REFUSED: usize = 2 << 30;

thread_local! {
    /// Bytes that this thread holds. What another thread frees still counts.
    static HELD: Cell<usize> = const { Cell::new(0) };
    static MOST: Cell<usize> = const { Cell::new(0) };
}

/// The system's allocator, which counts what each thread holds.
#[derive(Debug)]
pub(crate) struct Counted;

/// Counts more bytes; false where they are too many.
fn take(bytes: usize) -> bool {
    let held = HELD.get().saturating_add(bytes);
    if held > REFUSED {
        return false;
    }
    HELD.set(held);
    MOST.set(MOST.get().max(held));
    true
}

fn give_back(bytes: usize) {
    HELD.set(HELD.get().saturating_sub(bytes));
}

// SAFETY: every block is the system allocator's, by the layout that the caller gave; the counters are plain cells of a
// thread, need no memory and are never dropped.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if !take(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's layout is the system's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if !take(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's layout is the system's.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        give_back(layout.size());
        // SAFETY: the block came from the system's allocator with this layout.
        unsafe { System.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if !take(size) {
            return std::ptr::null_mut();
        }
        // The old block is there until the new one is.
        give_back(layout.size());
        // SAFETY: the block came from the system's allocator with this layout.
        unsafe { System.realloc(block, layout, size) }
    }
}

fn cpu() -> Duration {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(u64::try_from(t.tv_sec).unwrap_or(0), u32::try_from(t.tv_nsec).unwrap_or(0))
}

/// Runs something that this thread does alone, and fails where it costs too much.
pub(crate) fn bounded(work: impl FnOnce()) {
    let (held, begun) = (HELD.get(), cpu());
    MOST.set(held);
    work();
    let (memory, time) = (MOST.get().saturating_sub(held), cpu().saturating_sub(begun));
    assert!(memory <= MEMORY_MAX, "{memory} bytes of memory for one input");
    assert!(time <= CPU_MAX, "{time:?} of CPU time for one input");
}
