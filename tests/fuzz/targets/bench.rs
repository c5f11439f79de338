//! What people write and save for `ringwatch bench`: files of targets, and of measurements.

use crate::plain;
use ringwatch::bench::{Measurements, Targets, compare};
use std::path::PathBuf;

/// Longer inputs are not tried, in bytes: people write these files.
const INPUT_MAX: usize = 64 << 10;
/// The longest message, in bytes: it quotes a value.
const MESSAGE_MAX: usize = 4 * INPUT_MAX;

/// Targets in YAML: planned, and handed to detection.
pub(super) fn targets(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if text.len() > INPUT_MAX {
        return;
    }
    match Targets::from_yaml(text, "file") {
        Ok(targets) => {
            let expected = targets.expectations();
            assert!(expected.iter().all(|e| e.ranks > 0 && e.size_bytes > 0 && e.time_ns > 0.0));
            assert!(targets.all().iter().all(|t| !t.goals.is_empty()));
        }
        Err(e) => {
            plain::text("an error", &e.to_string(), MESSAGE_MAX);
        }
    }
}

/// Measurements in JSON: compared with themselves.
pub(super) fn measurements(bytes: &[u8]) {
    if bytes.len() > INPUT_MAX {
        return;
    }
    if let Ok(saved) = Measurements::read(bytes, PathBuf::from("file")) {
        let changes = compare(&saved, &saved.reports, "file", 0.05);
        assert_eq!((changes.not_measured, changes.differences.len()), (0, 0));
        assert!(changes.rows.iter().all(|r| r.change.is_none_or(|c| c == 0.0)), "{:?}", changes.rows);
    }
}
