//! The heartbeat of the thread that owns a daemon's state, which needs no question to it.
//!
//! The thread notes each step of its work in an atomic. `/livez`, `/readyz` and the service manager's watchdog read it, so
//! no flood of questions makes a working thread look dead.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The thread hangs when one step of its work takes longer than this.
const HUNG: Duration = Duration::from_secs(10);
/// The data is stale when a pass is late by more than this.
const STALE: Duration = Duration::from_secs(5);

/// The last sign of life of the thread that owns the state.
#[derive(Debug)]
pub(in crate::runtime) struct Heartbeat {
    started: Instant,
    /// The last sign of life, or the end of the pause that the thread makes, in ms since the start.
    last_ms: AtomicU64,
    /// A pass is finished, and every source was known then.
    is_complete: AtomicBool,
}

impl Heartbeat {
    /// A thread that starts now, and has not finished a pass.
    pub(in crate::runtime) fn new() -> Self {
        Heartbeat { started: Instant::now(), last_ms: AtomicU64::new(0), is_complete: AtomicBool::new(false) }
    }

    /// Notes that a pass over the sources is finished, and whether every source is known by now.
    pub(in crate::runtime) fn passed(&self, is_complete: bool) {
        self.is_complete.store(is_complete, Ordering::Relaxed);
        self.works();
    }

    /// Notes that the thread begins the next step of its work.
    pub(in crate::runtime) fn works(&self) {
        self.beat(Instant::now());
    }

    /// Notes that the thread waits, until this moment at most.
    pub(in crate::runtime) fn rests_until(&self, until: Instant) {
        self.beat(until.max(Instant::now()));
    }

    /// True unless the thread hangs.
    pub(in crate::runtime) fn is_alive(&self) -> bool {
        self.is_alive_at(Instant::now())
    }

    /// True when there is data, and the data is not stale.
    pub(in crate::runtime) fn is_ready(&self) -> bool {
        self.is_ready_at(Instant::now())
    }

    fn beat(&self, at: Instant) {
        let ms = at.saturating_duration_since(self.started).as_millis();
        self.last_ms.store(u64::try_from(ms).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    fn is_alive_at(&self, now: Instant) -> bool {
        self.silence(now) < HUNG
    }

    fn is_ready_at(&self, now: Instant) -> bool {
        self.is_complete.load(Ordering::Relaxed) && self.silence(now) < STALE
    }

    fn silence(&self, now: Instant) -> Duration {
        let last = Duration::from_millis(self.last_ms.load(Ordering::Relaxed));
        now.saturating_duration_since(self.started).saturating_sub(last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_hangs_when_a_step_takes_too_long_and_not_while_it_pauses() {
        let heartbeat = Heartbeat::new();
        let now = Instant::now();
        assert!(heartbeat.is_alive_at(now) && !heartbeat.is_ready_at(now), "no pass yet");
        assert!(!heartbeat.is_alive_at(now + HUNG + STALE), "the first pass hangs");
        heartbeat.passed(false);
        assert!(heartbeat.is_alive_at(now) && !heartbeat.is_ready_at(now), "not all is searched");
        heartbeat.passed(true);
        assert!(heartbeat.is_ready_at(now + STALE / 2) && !heartbeat.is_ready_at(now + 2 * STALE));
        // A small `limits.cpu` makes long pauses.
        let until = now + Duration::from_secs(60);
        heartbeat.rests_until(until);
        assert!(heartbeat.is_ready_at(until) && heartbeat.is_alive_at(until));
        assert!(!heartbeat.is_alive_at(until + HUNG + STALE), "it never came back");
        heartbeat.works();
        assert!(!heartbeat.is_alive_at(until), "it answers, and hangs in the answer");
    }
}
