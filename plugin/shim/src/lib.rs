//! An NCCL profiler plugin for `ringwatch bench --cost`: it stands between NCCL and a plugin under test, and switches
//! NCCL's events off, to empty callbacks, or to the plugin.
//!
//! NCCL keeps its event mask at an address that init receives. The plugin under test receives the address of a word of the
//! shim in its place. So the plugin can change its mask while its events are on, and can never switch events on in a phase
//! without events.
//!
//! The benchmark ends each phase with a synchronization of its streams and a barrier, and switches only then. Handles of
//! one kind of callback therefore end before the other kind begins, except those that NCCL keeps or reports late. The
//! callbacks sort these out: the handle of the empty callbacks never reaches the plugin, and the plugin's handles are
//! dropped in other phases.
//!
//! As in the real plugin, a callback makes no system call and no allocation, and cannot panic.

#![cfg_attr(all(panic = "abort", not(test)), no_std)]
#![expect(unsafe_code, reason = "the C boundary")]
#![expect(clippy::disallowed_types, reason = "loom cannot load the C library that calls this")]

mod switch;
mod tables;

pub use switch::{Facts, ringwatch_shim};
pub use tables::{
    Table, ncclProfiler_v1, ncclProfiler_v2, ncclProfiler_v3, ncclProfiler_v4, ncclProfiler_v5,
    ncclProfiler_v6, ncclProfiler_v7,
};

// A library without std and without unwinding must define these two.
#[cfg(all(panic = "abort", not(test)))]
mod freestanding {
    /// Never linked in, since nothing here can panic.
    #[panic_handler]
    fn ringwatch_shim_panicked(_: &core::panic::PanicInfo<'_>) -> ! {
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
