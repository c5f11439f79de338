//! `ringwatch diff`: two recordings compared.

use super::shared_sink::SharedSink;
use super::{FINDINGS, playback};
use crate::cli::Diff as Options;
use crate::diff::{Diff, Trend};
use crate::timeline::{Profile, Profiler};
use std::io::{self, Write};
use std::path::Path;

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
    let profiler = SharedSink::<Profiler>::default();
    let (monitor, at_ns) = playback::play(dir, Some(profiler.boxed()))?;
    for note in monitor.source().notes() {
        eprintln!("ringwatch: {}: {note}", dir.display());
    }
    Ok(profiler.lock().profile(&monitor.snapshot(at_ns), monitor.join()))
}
