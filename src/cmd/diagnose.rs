//! `ringwatch diagnose`: what is wrong now.

use super::{FINDINGS, baselines, explain, monitor};
use crate::cli::Diagnose;
use crate::explain::Texts;
use crate::ingest::{Segments, now_ns};
use crate::model::Finding;
use crate::report;
use crate::runtime::{Monitor, ask};
use anyhow::bail;
use std::collections::BTreeSet;
use std::io::{self, Write};
use std::path::Path;
use std::time::Duration;

pub(super) fn run(o: &Diagnose) -> anyhow::Result<u8> {
    o.dir.as_deref().map_or(Ok(()), directory)?;
    let texts = Texts::built_in()?;
    let mut logs = Vec::new();
    for path in &o.log {
        logs.push((path, explain::of_file(&texts, path)?));
    }
    let findings = match &o.agent {
        _ if o.at.cluster.is_some() => super::cluster::findings(&o.at)?,
        Some(socket) => ask(socket)?.findings.into_iter().filter(|f| f.open).collect(),
        None => look(o)?,
    };
    let mut out = io::stdout().lock();
    if o.json {
        report::json(&mut out, &findings)?;
    } else {
        report::text(&mut out, &findings)?;
    }
    for (path, explained) in &logs {
        explain::write(&mut out, Some(&shown(path)), explained, o.json)?;
    }
    out.flush()?;
    Ok(if findings.is_empty() { 0 } else { FINDINGS })
}

/// Reads what segments hold: their own history. The second look is for records that were being written during the first.
pub(super) fn read(monitor: &mut Monitor<Segments>) -> anyhow::Result<()> {
    monitor.step(now_ns());
    std::thread::sleep(Duration::from_millis(250));
    monitor.step(now_ns());
    explain_nothing(monitor)
}

/// A directory that was named has to be one.
pub(super) fn directory(dir: &Path) -> anyhow::Result<()> {
    if !dir.is_dir() {
        bail!("{}: not a directory; name one that holds segments (*.seg)", dir.display());
    }
    Ok(())
}

/// Looks for oneself.
fn look(o: &Diagnose) -> anyhow::Result<Vec<Finding>> {
    let mut monitor = monitor(o.dir.clone()).with_baselines(baselines(&o.baseline)?);
    read(&mut monitor)?;
    let mut findings = monitor.findings();
    if o.dir.is_none() {
        // Asked about now: what dead jobs left is told when their directory is named.
        if monitor.join().all_gone() {
            let dirs = black_boxes(&monitor);
            bail!(
                "no job runs here; for the black boxes of ended ones: ringwatch diagnose {}",
                dirs.join(" or ")
            );
        }
        findings.retain(|f| f.open);
    }
    Ok(findings)
}

/// A path whose name may be anybody's: what could steer a terminal is shown as an escape.
fn shown(path: &Path) -> String {
    path.display().to_string().escape_debug().to_string()
}

/// The directories that hold segments of dead processes.
fn black_boxes(monitor: &Monitor<Segments>) -> Vec<String> {
    let dirs: BTreeSet<String> =
        monitor.source().gone().filter_map(|(_, path)| path.parent()).map(shown).collect();
    dirs.into_iter().collect()
}

/// An answer about no processes would be no answer.
fn explain_nothing(monitor: &Monitor<Segments>) -> anyhow::Result<()> {
    let source = monitor.source();
    for (path, why) in source.refused() {
        eprintln!("ringwatch: {}: {why}", shown(path));
    }
    if source.is_empty() {
        bail!(
            "no segments in {}; start the job with `ringwatch run -- CMD`, or load the plugin into it (`ringwatch plugin`)",
            crate::model::Source::describe(source)
        );
    }
    Ok(())
}
