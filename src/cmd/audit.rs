//! What a benchmark's child left in its segments: whether the plugin saw what was issued.

use super::monitor;
use crate::ingest::now_ns;
use serde::Serialize;
use std::fmt;
use std::path::Path;

/// What the segments of one child hold after its end. A segment is a ring: of a long run the last part is left.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Audit {
    /// Operations that are still in the segments.
    pub(super) operations: u64,
    /// Those among them whose transfer time is known.
    pub(super) timed: u64,
    /// Records lost, all reasons, those that the ring has overwritten too.
    pub(super) lost: u64,
}

impl fmt::Display for Audit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} operations in the segments, {} timed, {} records lost",
            self.operations, self.timed, self.lost
        )
    }
}

/// Looks at a directory of segments whose processes have ended. `None` where there is no segment: the plugin was
/// not loaded.
pub(super) fn audit(segments: &Path) -> Option<Audit> {
    let mut monitor = monitor(Some(segments.to_owned()));
    monitor.step(now_ns());
    let snapshot = monitor.snapshot(now_ns());
    if snapshot.segments.is_empty() {
        return None;
    }
    let sum = |field: fn(&crate::model::ClassRow) -> u64| snapshot.classes.iter().map(field).sum();
    Some(Audit { operations: sum(|c| c.count), timed: sum(|c| c.timed), lost: snapshot.lost() })
}
