//! Where segments lie.

use std::fmt;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// A place to look for segments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// One directory.
    Dir(PathBuf),
    /// `/dev/shm/ringwatch-*`, and the same inside every container whose processes can be looked into.
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

impl Place {
    /// The segment files in this place now, in order of their names.
    pub fn files(&self) -> Vec<PathBuf> {
        self.files_below(&self.roots())
    }

    /// The same, where these are the roots to look below.
    pub(super) fn files_below(&self, roots: &[PathBuf]) -> Vec<PathBuf> {
        let mut files = Vec::new();
        for dir in self.directories_below(roots) {
            segments_in(&dir, &mut files);
        }
        files.sort();
        files
    }

    /// The directories of this place that may hold segments now.
    pub fn directories(&self) -> Vec<PathBuf> {
        self.directories_below(&self.roots())
    }

    /// The roots of the host and of its containers, as far as they matter here. To find them every process is looked at.
    pub(super) fn roots(&self) -> Vec<PathBuf> {
        match self {
            Place::Dir(_) => Vec::new(),
            Place::Host => roots(),
        }
    }

    fn directories_below(&self, roots: &[PathBuf]) -> Vec<PathBuf> {
        // A link could lead anywhere; only real directories are entered.
        let ours = |dir: &PathBuf| {
            dir.file_name().is_some_and(|n| n.to_string_lossy().starts_with("ringwatch-"))
                && fs::symlink_metadata(dir).is_ok_and(|m| m.is_dir())
        };
        match self {
            Place::Dir(d) => vec![d.clone()],
            Place::Host => {
                roots.iter().flat_map(|root| entries(&root.join("dev/shm"))).filter(ours).collect()
            }
        }
    }
}

fn entries(dir: &Path) -> Vec<PathBuf> {
    // A directory that is absent or closed to us holds nothing for us.
    fs::read_dir(dir).map(|d| d.flatten().map(|e| e.path()).collect()).unwrap_or_default()
}

fn segments_in(dir: &Path, files: &mut Vec<PathBuf>) {
    files.extend(entries(dir).into_iter().filter(|p| p.extension().is_some_and(|e| e == "seg")));
}

/// `/` and the root of one process of every other mount namespace that may be looked into.
fn roots() -> Vec<PathBuf> {
    let mut roots = vec![PathBuf::from("/")];
    let Ok(own) = fs::read_link("/proc/self/ns/mnt") else { return roots };
    let mut seen = vec![own];
    for process in entries(Path::new("/proc")) {
        if !process.file_name().is_some_and(|n| n.to_string_lossy().bytes().all(|b| b.is_ascii_digit())) {
            continue;
        }
        let Ok(namespace) = fs::read_link(process.join("ns/mnt")) else { continue };
        if seen.contains(&namespace) {
            continue;
        }
        seen.push(namespace);
        let root = process.join("root");
        let same_as_ours = match (fs::metadata(root.join("dev/shm")), fs::metadata("/dev/shm")) {
            (Ok(a), Ok(b)) => a.dev() == b.dev() && a.ino() == b.ino(),
            _ => true,
        };
        if !same_as_ours {
            roots.push(root);
        }
    }
    roots
}
