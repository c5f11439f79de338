//! `ringwatch diff`: two recordings compared.

use super::{FINDINGS, playback};
use crate::cli::Diff as Options;
use crate::diff::{Diff, Trend};
use crate::join::{Finished, FinishedSink, Join};
use crate::timeline::{Profile, Profiler};
use std::io::{self, Write};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

pub(super) fn run(o: &Options) -> anyhow::Result<u8> {
    let (old, new) = (profile(&o.old)?, profile(&o.new)?);
    let name = |path: &Path| path.display().to_string();
    let (old_name, new_name) = (name(&o.old), name(&o.new));
    let diff = Diff::of((&old_name, &old), (&new_name, &new), o.threshold / 100.0);
    let mut out = io::stdout().lock();
    if o.json {
        serde_json::to_writer(&mut out, &diff)?;
        writeln!(out)?;
    } else {
        diff.text(&mut out)?;
    }
    out.flush()?;
    Ok(if diff.count(Trend::Worse) > 0 { FINDINGS } else { 0 })
}

/// Plays a recording and samples it.
fn profile(dir: &Path) -> anyhow::Result<Profile> {
    let profiler = Shared::default();
    let (monitor, at_ns) = playback::play(dir, Some(Box::new(profiler.clone())))?;
    for note in monitor.source().notes() {
        eprintln!("ringwatch: {}: {note}", dir.display());
    }
    let profiler = profiler.0.lock().unwrap_or_else(PoisonError::into_inner);
    Ok(profiler.profile(&monitor.snapshot(at_ns), monitor.join()))
}

/// A profiler that is read when all was received.
#[derive(Debug, Clone, Default)]
struct Shared(Arc<Mutex<Profiler>>);

impl FinishedSink for Shared {
    fn take(&mut self, operations: &[Finished], join: &Join, now_ns: u64) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take(operations, join, now_ns);
    }

    fn end(&mut self, open: &[Finished], join: &Join, now_ns: u64) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).end(open, join, now_ns);
    }
}
