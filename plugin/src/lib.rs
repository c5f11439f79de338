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

// Layers, from the bottom, each after an empty line: a module uses those of the layers before its own. `tests/architecture.rs`
// holds the modules against this list.
pub mod ffi;

mod runtime;

pub mod event;
pub mod handle;
mod pair_orders;
mod slot_ref;

mod communicator;
mod gate;

mod event_pairs;
mod governor;

mod chain;

mod live;

mod opening;

mod network;
mod preloaded;
mod timing;

mod bare;

pub mod record;

pub mod tuner;

pub mod abi;
pub mod calls;

mod forward;

pub mod callbacks;

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
