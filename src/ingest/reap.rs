//! Post-mortem segments are kept until they take too much room.

use super::directory::{Directory, FileId};
use super::life::Identity;
use super::lock;
use super::pid_namespaces::PidNamespaces;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::time::{Duration, Instant, SystemTime};

/// A directory has so much time in one pass. The next pass goes on.
const TIME_MAX: Duration = Duration::from_secs(1);

/// A segment that may be removed.
struct Dead {
    name: OsString,
    owner: u32,
    id: FileId,
    written: SystemTime,
    bytes: u64,
}

/// The limits of what is kept.
#[derive(Debug)]
pub(super) struct Kept<'a> {
    /// The bytes of the newest ones.
    pub(super) bytes: u64,
    /// The newest write of a segment that is kept may be so long ago.
    pub(super) time: Option<Duration>,
    /// The files of these users.
    pub(super) spared: &'a [u32],
}

/// Removes the oldest segments of dead processes in a directory until the rest take at most so many bytes, and at most a
/// sixteenth of the file system, which NCCL needs too; and those that were last written too long ago. Returns their names.
///
/// Only segments that the plugin named and whose header says the same are removed, and none of a running process.
/// `step` is called before each file, with its owner.
pub(super) fn reap(
    directory: &Directory,
    kept: &Kept<'_>,
    namespaces: &mut PidNamespaces,
    step: &mut dyn FnMut(u32),
) -> Vec<OsString> {
    let began = Instant::now();
    let mut dead: Vec<Dead> = Vec::new();
    for name in directory.segments().unwrap_or_default().0 {
        if began.elapsed() >= TIME_MAX {
            break;
        }
        let Some(owner) = directory.owner_of(&name).filter(|owner| !kept.spared.contains(owner)) else {
            continue;
        };
        step(owner);
        dead.extend(dead_segment(directory, name, namespaces));
    }
    let keep_bytes = kept.bytes.min(directory.total_bytes() / 16);
    // Newest first: those are kept.
    dead.sort_by(|a, b| (b.written, &b.name).cmp(&(a.written, &a.name)));
    let mut bytes = 0u64;
    let mut removed = Vec::new();
    for d in dead {
        bytes = bytes.saturating_add(d.bytes);
        // A clock that was set back makes nothing old.
        let old = kept.time.is_some_and(|k| d.written.elapsed().is_ok_and(|age| age > k));
        if bytes <= keep_bytes && !old || began.elapsed() >= TIME_MAX {
            continue;
        }
        step(d.owner);
        if directory.remove(&d.name, d.id).is_ok() {
            removed.push(d.name);
        }
    }
    removed
}

fn dead_segment(directory: &Directory, name: OsString, namespaces: &mut PidNamespaces) -> Option<Dead> {
    let named = name_of_plugin(&name)?;
    let (file, stat) = directory.open(&name).ok()?;
    let identity = Identity::read(&file)?;
    if named != (identity.pid, identity.start_ticks, identity.nonce) {
        return None;
    }
    let life = identity.find_process(stat.st_uid, lock::holder(&file), namespaces);
    // A job that cannot be seen and has lost its lock still has its segment mapped.
    if !matches!(life, Ok(None)) || lock::is_written(&file) {
        return None;
    }
    let written = file.metadata().and_then(|m| m.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
    let bytes = u64::try_from(stat.st_size).unwrap_or(0);
    Some(Dead { name, owner: stat.st_uid, id: FileId::of(&stat), written, bytes })
}

/// The pid, start time and nonce in a name as the plugin makes it, `4711-123456-9f3c.seg`.
pub(super) fn name_of_plugin(name: &OsStr) -> Option<(u32, u64, u64)> {
    let name = std::str::from_utf8(name.as_bytes()).ok()?;
    let mut parts = name.strip_suffix(".seg")?.split('-');
    let (pid, ticks, nonce) = (parts.next()?, parts.next()?, parts.next()?);
    let read: (u32, u64, u64) =
        (pid.parse().ok()?, ticks.parse().ok()?, u64::from_str_radix(nonce, 16).ok()?);
    // The plugin writes a number in one way: no sign, no leading zero, no capitals, and nothing behind it.
    (format!("{}-{}-{:x}.seg", read.0, read.1, read.2) == name).then_some(read)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_the_plugin_are_taken_for_such() {
        assert_eq!(name_of_plugin(OsStr::new("12-345-9f.seg")), Some((12, 345, 0x9f)));
        for other in [
            "12-345-9f",
            "a.seg",
            "12-345.seg",
            "12-345-9f-1.seg",
            "+1-2-3.seg",
            "1-2-XYZ.seg",
            "1-2-AB.seg",
            "--.seg",
        ] {
            assert_eq!(name_of_plugin(OsStr::new(other)), None, "{other}");
        }
    }
}
