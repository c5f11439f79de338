//! The calls that make and free communicators: each is recorded, and its ranks agree on the tuner's rules.

use super::comms::{Made, Place, destroy_recorded, init_all_recorded, init_recorded};
use super::exchange;
use crate::runtime::thread_word::{Thread, take_key};
use core::ffi::{c_int, c_void};

/// Makes a communicator by NCCL's function.
///
/// # Safety
/// `config` is NULL or NCCL's configuration.
pub unsafe fn init(place: Place, what: Made, config: *const c_void, real: impl FnOnce() -> c_int) -> c_int {
    let thread = Thread::get();
    if thread.inside {
        return real();
    }
    take_key();
    if !exchange::is_on() {
        return init_recorded(place, what, thread, real);
    }
    let (id, parent) = match what {
        Made::Rank { id, .. } => (id, 0),
        Made::Child { parent, .. } => (None, parent),
    };
    // SAFETY: as the caller promises.
    let blocks = unsafe { exchange::blocks(config, parent) };
    let new = exchange::New { place: place.expose_provenance(), id, blocks };
    // The group's mark on the thread may be new.
    exchange::around(new, || init_recorded(place, what, Thread::get(), real))
}

/// Makes all ranks of a communicator in this process by NCCL's function.
pub fn init_all(places: Place, ranks: c_int, real: impl FnOnce() -> c_int) -> c_int {
    let thread = Thread::get();
    if thread.inside {
        return real();
    }
    take_key();
    // NCCL refuses this call in a group.
    if !exchange::is_on() || thread.depth > 0 {
        return init_all_recorded(places, ranks, thread, real);
    }
    exchange::around_all(places.expose_provenance(), ranks, || init_all_recorded(places, ranks, thread, real))
}

/// Frees a communicator by NCCL's function.
pub fn destroy(pointer: usize, aborted: bool, real: impl FnOnce() -> c_int) -> c_int {
    if Thread::get().inside {
        return real();
    }
    exchange::forget(pointer);
    destroy_recorded(pointer, aborted, real)
}
