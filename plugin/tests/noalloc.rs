//! After init, no callback of any version allocates: counted by the allocator of this process.

#![allow(unsafe_code, reason = "a counting allocator")]

mod support;

use ringwatch_plugin::callbacks;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use support::bare::Bare;
use support::library::{CTable, Plugin};

struct Counting;

thread_local! {
    // Counted by thread: the test harness has threads of its own.
    static CALLS: Cell<u64> = const { Cell::new(0) };
}

fn count() {
    CALLS.with(|c| c.set(c.get() + 1));
}

// SAFETY: the system's allocator, with a counter that does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count();
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: as the caller promises.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn linked() -> Plugin {
    fn table<I>(t: &'static callbacks::Table<I>) -> &'static CTable {
        // SAFETY: the table has this shape: `tests/layout.rs`.
        unsafe { &*std::ptr::from_ref(t).cast() }
    }
    Plugin::from_tables([
        table(&callbacks::ncclProfiler_v1),
        table(&callbacks::ncclProfiler_v2),
        table(&callbacks::ncclProfiler_v3),
        table(&callbacks::ncclProfiler_v4),
        table(&callbacks::ncclProfiler_v5),
        table(&callbacks::ncclProfiler_v6),
        table(&callbacks::ncclProfiler_v7),
    ])
}

fn in_child() {
    let plugin = linked();
    let contexts = [1, 2, 3, 4, 5, 6, 7].map(|v| plugin.init(v, v as u64).context);
    let mut calls = Bare::new(&plugin, contexts[4]);
    let before = CALLS.with(Cell::get);
    // Most of these have no handles: no transfer was seen yet.
    for _ in 0..200 {
        calls.group();
        calls.pair();
        calls.call(true);
    }
    for (i, context) in contexts.iter().enumerate() {
        support::every_callback(&plugin, i + 1, *context);
    }
    assert_eq!(CALLS.with(Cell::get) - before, 0);
    // The counter counts.
    drop(std::hint::black_box(Box::new(1)));
    assert_eq!(CALLS.with(Cell::get) - before, 2);
}

#[test]
fn nothing_is_allocated_after_init() {
    let Some(ran) = support::child::run_with("nothing_is_allocated_after_init", |c, _| {
        c.env("RINGWATCH_DETAIL", "calls");
    }) else {
        return in_child();
    };
    let recording = support::segment::only(&ran.succeeded().dir);
    assert!(recording.balanced() > 7 * 60);
    assert!(recording.lines().len() > 600, "{} lines", recording.lines().len());
}

#[test]
fn nothing_is_allocated_with_another_plugin_either() {
    let Some(ran) = support::child::run_with("nothing_is_allocated_with_another_plugin_either", |c, _| {
        c.env("RINGWATCH_CHAIN", support::library::null_library()).env("RINGWATCH_NULL_MASK", "0xffff");
    }) else {
        return in_child();
    };
    let recording = support::segment::only(&ran.succeeded().dir);
    assert!(recording.balanced() > 7 * 60);
}
