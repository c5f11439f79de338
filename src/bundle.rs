//! The libraries that this program carries inside.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The file name under which every NCCL release finds it: begins with `lib`, ends with `.so`.
pub const FILE_NAME: &str = "libnccl-profiler-ringwatch.so";

/// The plugin's bytes.
pub const PLUGIN: &[u8] = include_bytes!(env!("RINGWATCH_PLUGIN_LIBRARY"));

/// The file name of the plugin that does nothing.
pub const NULL_FILE_NAME: &str = "libnccl-profiler-ringwatch-null.so";

/// The bytes of the plugin that does nothing, which only benchmarks load.
pub const NULL_PLUGIN: &[u8] = include_bytes!(env!("RINGWATCH_NULL_LIBRARY"));

/// The bytes of the plugin that stands before another one and switches it, for `bench --cost`.
pub const SHIM: &[u8] = include_bytes!(env!("RINGWATCH_SHIM_LIBRARY"));

/// Versions of the profiler ABI, from 1.
pub const PROFILER_VERSIONS: std::ops::RangeInclusive<u32> = 1..=7;

/// The file name of the library for LD_PRELOAD, which is the plugin too; NCCL finds it by this name.
pub const PRELOAD_FILE_NAME: &str = "libringwatch-preload.so";

const PRELOAD: &[u8] = include_bytes!(env!("RINGWATCH_PRELOAD_LIBRARY"));

/// Puts the plugin and the library for LD_PRELOAD into a directory, which is made if need be, and returns the
/// plugin's path. A file that is there already with the same content is kept, since jobs may have it mapped;
/// another one is replaced, not changed.
///
/// # Errors
/// The path and the system's error, when the directory or file cannot be written, or when others may write into
/// the directory: what lies there runs in every job.
pub fn install(dir: &Path) -> io::Result<PathBuf> {
    put(dir, PRELOAD_FILE_NAME, PRELOAD)?;
    put(dir, FILE_NAME, PLUGIN)
}

/// Puts the plugin that does nothing into a directory, as [`install`] does with the real one.
///
/// # Errors
/// As [`install`].
pub fn install_null(dir: &Path) -> io::Result<PathBuf> {
    put(dir, NULL_FILE_NAME, NULL_PLUGIN)
}

/// Puts the plugin that switches another one into a directory, as [`install`] does with the real one. NCCL finds only the
/// tables of these ABI versions in it: it has to choose the version that it would choose of the other plugin.
///
/// # Errors
/// As [`install`].
pub fn install_shim(dir: &Path, name: &str, versions: &[u32]) -> io::Result<PathBuf> {
    let mut bytes = SHIM.to_vec();
    for version in PROFILER_VERSIONS.filter(|v| !versions.contains(v)) {
        // The hash table finds a symbol by its old name, and then compares it with the new one, which differs.
        rename(&mut bytes, &format!("ncclProfiler_v{version}\0"), &format!("ncclProfiler_-{version}\0"));
    }
    put(dir, name, &bytes)
}

/// Replaces a text wherever it is by another one of the same length.
fn rename(bytes: &mut [u8], old: &str, new: &str) {
    let (old, new) = (old.as_bytes(), new.as_bytes());
    let places: Vec<usize> =
        bytes.windows(old.len()).enumerate().filter(|(_, w)| *w == old).map(|(i, _)| i).collect();
    for at in places {
        if let Some(there) = bytes.get_mut(at..at + new.len()) {
            there.copy_from_slice(new);
        }
    }
}

fn put(dir: &Path, name: &str, bytes: &[u8]) -> io::Result<PathBuf> {
    let told = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", dir.display()));
    fs::DirBuilder::new().recursive(true).mode(0o755).create(dir).map_err(told)?;
    let meta = fs::metadata(dir).map_err(told)?;
    let trusted = [0, rustix::process::geteuid().as_raw()].contains(&meta.uid());
    if !trusted || meta.mode() & 0o022 != 0 {
        return Err(told(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "others may write here, and so into every job that loads the plugin; name a directory of your own",
        )));
    }
    let path = dir.join(name);
    if fs::read(&path).is_ok_and(|there| there == bytes) {
        return Ok(path);
    }
    let fresh = dir.join(format!(".{name}.{}", std::process::id()));
    let written = fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o755)
        .open(&fresh)
        .and_then(|mut f| f.write_all(bytes))
        .and_then(|()| fs::rename(&fresh, &path));
    if let Err(e) = written {
        // The rename is what failed, or the disk is full: leave nothing half-made behind.
        if fs::remove_file(&fresh).is_err() {
            return Err(told(e));
        }
        return Err(told(e));
    }
    Ok(path)
}
