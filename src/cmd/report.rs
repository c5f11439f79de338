//! `ringwatch report`: each job on one page.

use super::{baselines, diagnose, monitor_of, playback};
use crate::cli::{Report, Reported};
use crate::ingest::now_ns;
use crate::model::Snapshot;
use crate::report;
use crate::runtime::ask;
use std::io::{self, Write};

pub(super) fn run(o: &Report) -> anyhow::Result<u8> {
    let pages = report::Pages::of(&snapshot(&o.on)?);
    let mut out = io::stdout().lock();
    if o.json {
        serde_json::to_writer(&mut out, &pages)?;
        writeln!(out)?;
    } else {
        pages.text(&mut out)?;
    }
    out.flush()?;
    Ok(0)
}

/// All that is known of these jobs now. What it lacks is said on standard error.
pub(super) fn snapshot(on: &Reported) -> anyhow::Result<Snapshot> {
    for dir in &on.dirs {
        diagnose::directory(dir)?;
    }
    if let Some(socket) = &on.agent {
        return Ok(ask(socket)?);
    }
    if let Some(dir) = &on.replay {
        let (monitor, at_ns) = playback::play(dir)?;
        monitor.source().notes().iter().for_each(|note| eprintln!("ringwatch: {note}"));
        return Ok(monitor.snapshot(at_ns));
    }
    if !on.import.is_empty() {
        let monitor = diagnose::imported(&on.import)?;
        diagnose::say_moment(&monitor);
        monitor.source().notes().iter().for_each(|note| eprintln!("ringwatch: {note}"));
        let mut snapshot = monitor.snapshot(monitor.source().at_ns());
        diagnose::add_evidence(monitor.source(), &mut snapshot.findings);
        return Ok(snapshot);
    }
    let mut monitor = monitor_of(&on.dirs).with_baselines(baselines(&on.baseline)?).with_steps();
    diagnose::read(&mut monitor)?;
    monitor.end();
    Ok(monitor.snapshot(now_ns()))
}
