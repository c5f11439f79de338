//! `ringwatch report`: each job on one page.

use super::{baselines, diagnose, monitor_of, playback};
use crate::cli::Report;
use crate::ingest::now_ns;
use crate::report;
use crate::runtime::ask;
use std::io::{self, Write};

pub(super) fn run(o: &Report) -> anyhow::Result<u8> {
    for dir in &o.dirs {
        diagnose::directory(dir)?;
    }
    let snapshot = if let Some(socket) = &o.agent {
        ask(socket)?
    } else if let Some(dir) = &o.replay {
        let (monitor, at_ns) = playback::play(dir)?;
        monitor.source().notes().iter().for_each(|note| eprintln!("ringwatch: {note}"));
        monitor.snapshot(at_ns)
    } else if !o.import.is_empty() {
        let monitor = diagnose::imported(&o.import)?;
        diagnose::say_moment(&monitor);
        monitor.source().notes().iter().for_each(|note| eprintln!("ringwatch: {note}"));
        let mut snapshot = monitor.snapshot(monitor.source().at_ns());
        diagnose::add_evidence(monitor.source(), &mut snapshot.findings);
        snapshot
    } else {
        let mut monitor = monitor_of(&o.dirs).with_baselines(baselines(&o.baseline)?).with_steps();
        diagnose::read(&mut monitor)?;
        monitor.snapshot(now_ns())
    };
    let pages = report::Pages::of(&snapshot);
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
