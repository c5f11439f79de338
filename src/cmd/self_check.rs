//! The content of a benchmark's child's segments, read while it runs: what the plugin saw, and how much of it was
//! timed.

use crate::detect::Settings;
use crate::ingest::{Segments, now_ns};
use crate::model::Coverage;
use crate::runtime::Monitor;
use serde::Serialize;
use std::fmt;
use std::path::Path;
use std::time::{Duration, Instant};

/// How often the segments are read: seldom, since reading costs the writer too. What a fast benchmark overwrites
/// meanwhile is not read.
const STEP: Duration = Duration::from_millis(20);

/// The content of one child's segments.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Audit {
    /// Operations that were read, each rank's part counted.
    pub(super) operations: u64,
    /// The number of them whose GPU time is known.
    pub(super) timed: u64,
    /// The number of them whose stamps cannot be true; they are not timed.
    pub(super) impossible: u64,
    /// Records lost, all reasons, those that were overwritten before they were read too.
    pub(super) lost: u64,
}

impl fmt::Display for Audit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let share = Coverage { operations: self.operations, timed: self.timed, impossible: 0 }.share();
        let share = share.map_or_else(|| "-".to_owned(), |s| format!("{:.1} %", s * 100.0));
        write!(
            f,
            "{} operations read, GPU times of {} ({share}), {} impossible ones dropped, {} records lost",
            self.operations, self.timed, self.impossible, self.lost
        )
    }
}

/// Reads a directory of segments from time to time.
#[derive(Debug)]
pub(super) struct Auditor {
    monitor: Monitor<Segments>,
    last: Instant,
}

impl Auditor {
    pub(super) fn new(segments: &Path) -> Self {
        let mut monitor = Monitor::new(super::own_segments(segments.to_owned()), Settings::default());
        // Nobody asks what is wrong with a benchmark.
        monitor.stop_judging();
        Auditor { monitor, last: Instant::now() }
    }

    /// Reads what is new, if it is time to.
    pub(super) fn look(&mut self) {
        if self.last.elapsed() >= STEP {
            self.monitor.step(now_ns());
            self.last = Instant::now();
        }
    }

    /// The result, once the child has ended. `None` where there is no segment: the plugin was not loaded.
    pub(super) fn finish(mut self) -> Option<Audit> {
        self.monitor.source_mut().look_anew();
        self.monitor.step(now_ns());
        let snapshot = self.monitor.snapshot(now_ns());
        if snapshot.segments.is_empty() {
            return None;
        }
        let Coverage { operations, timed, impossible } = snapshot.coverage();
        Some(Audit { operations, timed, impossible, lost: snapshot.lost() })
    }
}
