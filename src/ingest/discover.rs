//! Where segments may be.

use std::fmt;
use std::fs::{self, DirBuilder};
use std::hash::{BuildHasher, RandomState};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// A place to look for segments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// One directory.
    Dir(PathBuf),
    /// `/dev/shm/ringwatch-*`, and the same inside every container whose processes may be looked into.
    Host,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Dir(d) => write!(f, "{}", d.display()),
            Place::Host => f.write_str("/dev/shm/ringwatch-*"),
        }
    }
}

/// The directory that the plugin uses by default for this user: `/dev/shm/ringwatch-UID`, or, where that is not the user's
/// own, `/dev/shm/ringwatch-UID-RANDOM`. The latter is made here where there is none: the plugin then finds it.
pub fn default_dir() -> PathBuf {
    dir_of_user(Path::new("/dev/shm"), rustix::process::geteuid().as_raw())
}

fn dir_of_user(shm: &Path, uid: u32) -> PathBuf {
    let usual = shm.join(format!("ringwatch-{uid}"));
    let is_taken = fs::symlink_metadata(&usual).is_ok_and(|m| !m.is_dir() || m.uid() != uid);
    if !is_taken {
        return usual;
    }
    oldest_beside(shm, uid).unwrap_or_else(|| {
        let random = RandomState::new().hash_one(std::process::id());
        let path = shm.join(format!("ringwatch-{uid}-{random:016x}"));
        let is_made = DirBuilder::new().mode(0o700).create(&path).is_ok();
        // Another process may have made one at the same moment; both processes then take the older one.
        let oldest = oldest_beside(shm, uid);
        if is_made && oldest.as_ref().is_some_and(|o| *o != path) {
            fs::remove_dir(&path).ok();
        }
        oldest.unwrap_or(usual)
    })
}

/// The user's directory beside the usual one that was made first: tmpfs numbers its files in their order.
fn oldest_beside(shm: &Path, uid: u32) -> Option<PathBuf> {
    let prefix = format!("ringwatch-{uid}-");
    let is_random = |text: &str| {
        text.len() == 16 && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
    };
    let own = fs::read_dir(shm).ok()?.flatten().filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        name.strip_prefix(&prefix).filter(|text| is_random(text))?;
        let meta = fs::symlink_metadata(entry.path()).ok().filter(|m| m.is_dir() && m.uid() == uid)?;
        Some((meta.ino(), entry.path()))
    });
    own.min().map(|(_, path)| path)
}

/// Where to look: `RINGWATCH_DIR` when it is set, else the whole host.
pub fn places() -> Vec<Place> {
    match std::env::var_os("RINGWATCH_DIR") {
        Some(dir) if !dir.is_empty() => vec![Place::Dir(dir.into())],
        _ => vec![Place::Host],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_directory_beside_is_made_once_where_ones_own_name_is_taken() {
        let shm = tempfile::tempdir().expect("a directory");
        let uid = rustix::process::geteuid().as_raw();
        let usual = shm.path().join(format!("ringwatch-{uid}"));
        assert_eq!(dir_of_user(shm.path(), uid), usual, "the plugin makes it");
        fs::create_dir(&usual).expect("made");
        assert_eq!(dir_of_user(shm.path(), uid), usual, "it is there");
        assert_ne!(dir_of_user(shm.path(), uid + 1), usual);
        fs::remove_dir(&usual).expect("removed");

        symlink("/", &usual).expect("linked");
        fs::create_dir(shm.path().join(format!("ringwatch-{uid}-short"))).expect("made");
        let beside = dir_of_user(shm.path(), uid);
        assert!(beside != usual && beside.is_dir(), "{}", beside.display());
        assert_eq!(fs::metadata(&beside).expect("made").mode() & 0o7777, 0o700);
        assert_eq!(dir_of_user(shm.path(), uid), beside, "and used again");
    }
}
