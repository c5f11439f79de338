//! The NCCL profiler plugin: NCCL's callbacks in, a [segment](ringwatch_wire) out.
//!
//! It lives in other people's jobs, so these hold for every callback after `init`: no waiting, no lock, no
//! allocation, no system call (the clock is read through the vDSO), no panic, and `ncclSuccess` whatever
//! happens. What cannot be recorded is counted, by reason, in the segment's books.
//!
//! The way of a callback: [`abi`] turns the descriptor of any ABI version into one [`event::Event`],
//! [`record`] writes it into the segment, [`handle`] makes the number that NCCL gets back.
//!
//! Built with `panic = "abort"` (the `plugin` profile) the library is `no_std`, has no allocator and links
//! no panicking code; in test builds it is an ordinary library with the same sources.

#![cfg_attr(all(panic = "abort", not(test)), no_std)]

pub mod abi;
pub mod event;
pub mod handle;
mod log;
mod names;
mod nccl;
mod pairs;
mod process;
pub mod record;
mod settings;
mod shm;
pub mod state;
mod sys;

#[cfg(all(panic = "abort", not(test)))]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // Never linked in: a test looks for this function's symbol in the built library.
    ringwatch_panicked()
}

#[cfg(all(panic = "abort", not(test)))]
#[inline(never)]
fn ringwatch_panicked() -> ! {
    loop {
        core::hint::spin_loop();
    }
}
