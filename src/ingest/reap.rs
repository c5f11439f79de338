//! Black boxes are kept until they take too much room.

use super::discover::Place;
use super::mapping::Mapping;
use super::tail::Tail;
use crate::model::Liveness;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Removes the oldest segments of dead processes in a directory until the rest take at most `keep_bytes`, and at
/// most a sixteenth of the file system, which NCCL needs too; and those that were last written longer than `keep_for`
/// ago. Segments of running processes, and files that are no segments, are never touched. Returns what was removed.
pub fn reap(dir: &Path, keep_bytes: u64, keep_for: Option<Duration>) -> Vec<PathBuf> {
    let mut dead: Vec<(SystemTime, u64, PathBuf)> = Place::Dir(dir.to_owned())
        .files()
        .into_iter()
        .filter_map(|path| {
            let tail = Tail::of(path.clone(), Mapping::open(&path).ok()?, None, 0).ok()??;
            if tail.liveness() == Liveness::Alive {
                return None;
            }
            let meta = std::fs::symlink_metadata(&path).ok()?;
            Some((meta.modified().ok()?, meta.len(), path))
        })
        .collect();
    let total = rustix::fs::statvfs(dir).map_or(u64::MAX, |f| f.f_blocks.saturating_mul(f.f_frsize));
    let keep_bytes = keep_bytes.min(total / 16);
    // Newest first: those are kept.
    dead.sort_by(|a, b| b.cmp(a));
    let mut kept = 0u64;
    let mut removed = Vec::new();
    for (written, bytes, path) in dead {
        kept = kept.saturating_add(bytes);
        // A clock that was set back makes nothing old.
        let old = keep_for.is_some_and(|k| written.elapsed().is_ok_and(|age| age > k));
        if (kept > keep_bytes || old) && std::fs::remove_file(&path).is_ok() {
            removed.push(path);
        }
    }
    removed
}
