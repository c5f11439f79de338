//! Tests that hold a limit of time or need most of a machine. They run one after the other, and cargo runs no other test
//! beside them. In the gate the exam, fuzzing and loom may still run, at the lowest priority.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod namespaces;
mod restarts;
mod soak;
mod tune_search;

#[allow(dead_code, reason = "each test binary uses a part of it")]
mod receiver;
#[allow(dead_code, reason = "each test binary uses a part of it")]
mod support;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Waits until no other test of this binary runs, and keeps them waiting while the guard lives.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    // A test that failed has left nothing here that the next one could find broken.
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}
