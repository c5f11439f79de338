//! The NCCL profiler plugin: NCCL's callbacks in, a [segment](ringwatch_wire) out.
//!
//! It lives in other people's jobs, so these hold for every callback after `init`: no waiting, no lock, no
//! allocation, no system call (the clock is read through the vDSO), no panic, and `ncclSuccess` whatever
//! happens. What cannot be recorded is counted, by reason, in the segment's books.
//!
//! The way of a callback: `callbacks` takes it, [`abi`] turns the descriptor of any ABI version into one [`event::Event`],
//! [`record`] writes it into the segment, [`handle`] makes the number that NCCL gets back. Bare collectives have a shorter
//! way, through `bare`.
//!
//! The same library is NCCL's [`tuner`], where the user asks for one: rules choose algorithm, protocol and channels.
//!
//! Built with `panic = "abort"` (the `plugin` profile) the library is `no_std`, has no allocator and links
//! no panicking code; in test builds it is an ordinary library with the same sources.

#![cfg_attr(all(panic = "abort", not(test)), no_std)]

// From the bottom: a module uses those above it in this list, and none below. `tests/architecture.rs` holds this.
pub mod abi;
mod bare;
pub mod callbacks;
pub mod calls;
mod chain;
mod communicator;
pub mod event;
mod event_pairs;
pub mod ffi;
mod forward;
mod gate;
mod governor;
pub mod handle;
mod live;
mod network;
mod opening;
mod pair_orders;
mod preloaded;
pub mod record;
mod runtime;
mod slot_ref;
mod timing;
pub mod tuner;

pub use runtime::parsers;

// What a library without std and without unwinding owes the linker.
#[cfg(all(panic = "abort", not(test)))]
mod freestanding {
    #![expect(unsafe_code, reason = "names a symbol for the linker")]

    /// Never linked in: a test looks for the symbol of this function in the built library.
    #[panic_handler]
    fn ringwatch_panicked(_: &core::panic::PanicInfo<'_>) -> ! {
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
