//! `ringwatch record`: what the ranks of running jobs report, into a recording.

use super::{block_on, monitor};
use crate::bench::parse_bytes;
use crate::cli::Record;
use crate::cluster::Moment;
use crate::ingest::{now_ns, unix_ns};
use crate::recording::{Limits, Writer};
use crate::runtime::Recorder;
use crate::runtime::signals::Signals;
use anyhow::Context;
use std::io;
use std::path::Path;
use std::time::Duration;

/// How often segments are read.
const STEP: Duration = Duration::from_millis(50);

pub(super) fn run(o: &Record) -> anyhow::Result<u8> {
    block_on(async { record(o, Signals::new()?).await })
}

/// Records until a signal comes. Signals are taken before there is a thread, which would take them in their usual way.
async fn record(o: &Record, mut signals: Signals) -> anyhow::Result<u8> {
    let mut monitor = monitor(o.dir.clone()).following_live();
    let bytes = parse_bytes(&o.max_size).map_err(|why| anyhow::anyhow!("--max-size: {why}"))?;
    let limits = Limits { bytes, age: o.max_age, ..Limits::default() };
    let writer = Writer::create(&o.output, limits)
        .with_context(|| format!("{}: no recording can be made here", o.output.display()))?;
    let mut recorder = Recorder::begin(&mut monitor, &node(), moment(), move || Ok(writer))?;
    eprintln!("ringwatch: recording to {}; Ctrl-C ends it", o.output.display());
    let mut steps = tokio::time::interval(STEP);
    let end = o.seconds.map(|s| tokio::time::Instant::now() + Duration::from_secs(s.into()));
    let mut is_last = false;
    while !is_last {
        tokio::select! {
            asked = signals.next() => is_last = asked.to_end(),
            _ = steps.tick() => is_last = end.is_some_and(|t| tokio::time::Instant::now() >= t),
        }
        let events = monitor.step(now_ns());
        recorder.record(&mut monitor, events, moment()).with_context(|| cannot_write(&o.output))?;
    }
    if recorder.lost() > 0 {
        eprintln!("ringwatch: {} operations and findings are missing: the disk is too slow", recorder.lost());
    }
    recorder.end(monitor.join(), moment()).with_context(|| cannot_write(&o.output))?;
    eprintln!("ringwatch: recorded; `ringwatch diagnose --replay {}` judges it", o.output.display());
    Ok(0)
}

/// The name of this host.
pub(super) fn node() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Begins a recording in a directory, or in a new one below it where it holds something: a job may be started again.
pub(super) fn open(dir: &Path, limits: Limits) -> io::Result<Writer> {
    match Writer::create(dir, limits) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
            let below = dir.join(format!("{}-{}", node(), std::process::id()));
            eprintln!("ringwatch: {} is not empty: recording to {}", dir.display(), below.display());
            Writer::create(&below, limits)
        }
        result => result,
    }
}

fn cannot_write(output: &Path) -> String {
    format!("{}: cannot write; what was recorded before can be read", output.display())
}

/// Now, by both clocks.
pub(super) fn moment() -> Moment {
    Moment { mono_ns: now_ns(), unix_ns: unix_ns() }
}
