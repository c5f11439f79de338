//! Where segments may be.

use std::fmt;
use std::path::PathBuf;

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

/// The directory that the plugin uses by default for this user.
pub fn default_dir() -> PathBuf {
    PathBuf::from(format!("/dev/shm/ringwatch-{}", rustix::process::geteuid().as_raw()))
}

/// Where to look: `RINGWATCH_DIR` when it is set, else the whole host.
pub fn places() -> Vec<Place> {
    match std::env::var_os("RINGWATCH_DIR") {
        Some(dir) if !dir.is_empty() => vec![Place::Dir(dir.into())],
        _ => vec![Place::Host],
    }
}
