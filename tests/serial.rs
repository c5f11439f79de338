//! Tests that hold a limit of time or need most of a machine. Cargo runs no other test binary beside them. Those that mostly wait
//! for processes run a few at a time, the others alone. In the gate the exam, fuzzing and loom may still run, at the lowest
//! priority.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod namespaces;
mod restarts;
mod soak;
mod tune_search;

#[allow(dead_code, reason = "each test binary uses a part of it")]
mod receiver;
#[allow(dead_code, reason = "each test binary uses a part of it")]
mod support;

use std::sync::{Condvar, Mutex, PoisonError};

/// Tests that mostly wait for processes and may run at one time.
const SIDE_BY_SIDE: usize = 3;

/// How many of them run now. One that runs alone counts as all of them.
static RUNNING: Mutex<usize> = Mutex::new(0);
static ENDED: Condvar = Condvar::new();

/// A test's turn, which ends with this value.
pub(crate) struct Turn(usize);

impl Turn {
    fn wait(size: usize) -> Self {
        // A test that failed has left nothing here that the next one could find broken.
        let running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        let is_full = |running: &mut usize| *running + size > SIDE_BY_SIDE;
        *ENDED.wait_while(running, is_full).unwrap_or_else(PoisonError::into_inner) += size;
        Turn(size)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        *RUNNING.lock().unwrap_or_else(PoisonError::into_inner) -= self.0;
        ENDED.notify_all();
    }
}

/// Waits until no other test of this binary runs, and keeps them waiting while the turn lives.
pub(crate) fn alone() -> Turn {
    Turn::wait(SIDE_BY_SIDE)
}

/// Waits until few tests of this binary run, none of them alone: for tests that mostly wait for processes.
pub(crate) fn beside_others() -> Turn {
    Turn::wait(1)
}
