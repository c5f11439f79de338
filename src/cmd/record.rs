//! `ringwatch record`: what the ranks of running jobs report, into a recording.

use super::{block_on, monitor};
use crate::bench::parse_bytes;
use crate::cli::Record;
use crate::cluster::Moment;
use crate::ingest::{now_ns, unix_ns};
use crate::recording::Limits;
use crate::runtime::Recorder;
use crate::runtime::signals::Signals;
use anyhow::Context;
use std::path::Path;
use std::time::Duration;

/// How often segments are read.
const STEP: Duration = Duration::from_millis(50);

pub(super) fn run(o: &Record) -> anyhow::Result<u8> {
    let mut monitor = monitor(o.dir.clone()).following_live();
    let bytes = parse_bytes(&o.max_size).map_err(|why| anyhow::anyhow!("--max-size: {why}"))?;
    let limits = Limits { bytes, age: o.max_age, ..Limits::default() };
    let mut recorder = begin(&mut monitor, &o.output, limits)?;
    eprintln!("ringwatch: recording to {}; Ctrl-C ends it", o.output.display());
    let recorded = block_on(async {
        let mut signals = Signals::new()?;
        let mut steps = tokio::time::interval(STEP);
        let end = o.seconds.map(|s| tokio::time::Instant::now() + Duration::from_secs(s.into()));
        loop {
            tokio::select! {
                asked = signals.next() => if asked.to_end() { return Ok(()) },
                _ = steps.tick() => {
                    let events = monitor.step(now_ns());
                    recorder.record(&mut monitor, events, moment()).with_context(|| cannot_write(&o.output))?;
                    if end.is_some_and(|t| tokio::time::Instant::now() >= t) {
                        return Ok(());
                    }
                }
            }
        }
    });
    recorded?;
    recorder.end().with_context(|| cannot_write(&o.output))?;
    eprintln!("ringwatch: recorded; `ringwatch diagnose --replay {}` judges it", o.output.display());
    Ok(0)
}

/// Begins a recording in a directory that the user named.
pub(super) fn begin<S: crate::model::Source>(
    monitor: &mut crate::runtime::Monitor<S>,
    output: &Path,
    limits: Limits,
) -> anyhow::Result<Recorder> {
    let node = rustix::system::uname().nodename().to_string_lossy().into_owned();
    Recorder::begin(monitor, output, &node, limits, moment())
        .with_context(|| format!("{}: no recording can be made here", output.display()))
}

pub(super) fn cannot_write(output: &Path) -> String {
    format!("{}: cannot write; what was recorded before can be read", output.display())
}

/// Now, by both clocks.
pub(super) fn moment() -> Moment {
    Moment { mono_ns: now_ns(), unix_ns: unix_ns() }
}
