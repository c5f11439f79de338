//! `ringwatch plugin`: the plugin for jobs that ringwatch does not start.

use super::{observe, tune};
use crate::bundle;
use crate::cli::Plugin;
use anyhow::Context;
use std::ffi::OsString;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Where the plugin goes by default: a place that is not mounted noexec, as /dev/shm often is.
pub(super) fn default_dir() -> PathBuf {
    let set = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let cache = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|h| h.join(".cache")));
    let uid = rustix::process::geteuid().as_raw();
    cache
        .filter(|c| c.is_absolute())
        .map(|c| c.join("ringwatch"))
        .unwrap_or_else(|| std::env::temp_dir().join(format!("ringwatch-{uid}")))
}

pub(super) fn run(o: &Plugin) -> anyhow::Result<u8> {
    let dir = o.dir.clone().unwrap_or_else(default_dir);
    let path = bundle::install(&dir).context("cannot write the plugin; name another directory")?;
    let dir = std::path::absolute(path.parent().unwrap_or(&dir))?;
    let library = if o.preload { bundle::PRELOAD_FILE_NAME } else { bundle::FILE_NAME };
    let tuning = tune::variables(&o.tuning, library, &dir, observe::shared)?;
    let mut out = io::stdout().lock();
    let preload = quoted(&preload(&dir).to_string_lossy());
    let dir = quoted(&dir.to_string_lossy());
    writeln!(out, "export LD_LIBRARY_PATH={dir}\"${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}\"")?;
    if o.preload {
        // It sets NCCL_PROFILER_PLUGIN to itself where that is unset or names the plugin.
        writeln!(out, "export LD_PRELOAD={preload}\"${{LD_PRELOAD:+:$LD_PRELOAD}}\"")?;
    } else {
        writeln!(out, "export NCCL_PROFILER_PLUGIN={}", bundle::FILE_NAME)?;
    }
    for (name, value) in tuning {
        writeln!(out, "export {name}={}", quoted(&value.to_string_lossy()))?;
    }
    out.flush()?;
    Ok(0)
}

/// The value for LD_PRELOAD: the library's path, which is found whatever becomes of LD_LIBRARY_PATH, unless it
/// has what separates one entry from the next.
pub(super) fn preload(dir: &Path) -> OsString {
    let path = dir.join(bundle::PRELOAD_FILE_NAME).into_os_string();
    let parted = path.as_encoded_bytes().iter().any(|b| b" :\t\n".contains(b));
    if parted { bundle::PRELOAD_FILE_NAME.into() } else { path }
}

/// A word for a shell, quoted where it has to be: these lines are made to be evaluated.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+@%,:=".contains(c);
    if word.chars().all(plain) { word.to_owned() } else { format!("'{}'", word.replace('\'', "'\\''")) }
}
