//! Post-mortem segments are kept until they take too much room.

use super::directory::{Directory, FileId, OpenDirectories, Shm};
use super::discover::Place;
use super::segment_file::SegmentFile;
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// Removes the oldest segments of dead processes in each directory of a place until the rest take at most `keep_bytes`,
/// and at most a sixteenth of the file system, which NCCL needs too; and those that were last written longer than
/// `keep_for` ago. Returns what was removed.
///
/// Where there are too many directories, each turn looks at others.
///
/// Only segments that the plugin named and whose header says the same are removed, and none of a running process. Of the
/// host only its own /dev/shm is cleaned: what is in a container is the container's.
pub fn reap(place: &Place, keep_bytes: u64, keep_for: Option<Duration>, turn: u64) -> Vec<PathBuf> {
    let directories: Vec<Arc<Directory>> = match place {
        Place::Dir(path) => Directory::named(path).into_iter().map(Arc::new).collect(),
        Place::Host => {
            let all = |shm: Shm| shm.directories(&OpenDirectories::new(), turn);
            Shm::own().map(|shm| all(shm).into_iter().flatten().collect()).unwrap_or_default()
        }
    };
    directories.iter().flat_map(|d| reap_in(d, keep_bytes, keep_for)).collect()
}

/// A segment that may be removed.
struct Dead {
    name: OsString,
    id: FileId,
    written: SystemTime,
    bytes: u64,
}

fn reap_in(directory: &Arc<Directory>, keep_bytes: u64, keep_for: Option<Duration>) -> Vec<PathBuf> {
    let dead = |name: OsString| {
        let (file, lock) = SegmentFile::open(directory, &name).ok()?;
        let (written, bytes) = file.written();
        let removable = file.is_named_by_plugin() && matches!(file.life(lock), Ok(None));
        removable.then(|| Dead { name, id: file.mapping.file(), written, bytes })
    };
    let mut dead: Vec<Dead> =
        directory.segments().unwrap_or_default().0.into_iter().filter_map(dead).collect();
    let keep_bytes = keep_bytes.min(directory.total_bytes() / 16);
    // Newest first: those are kept.
    dead.sort_by(|a, b| (b.written, &b.name).cmp(&(a.written, &a.name)));
    let mut kept = 0u64;
    let mut removed = Vec::new();
    for d in dead {
        kept = kept.saturating_add(d.bytes);
        // A clock that was set back makes nothing old.
        let old = keep_for.is_some_and(|k| d.written.elapsed().is_ok_and(|age| age > k));
        if (kept > keep_bytes || old) && directory.remove(&d.name, d.id).is_ok() {
            removed.push(directory.path().join(&d.name));
        }
    }
    removed
}
