//! `ringwatch doctor`: what is wrong for NCCL on this machine, and how to fix it.

use super::{BROKEN, FINDINGS};
use crate::cli::Doctor;
use crate::doctor::{self, Area, Host, Outcome, Report, Status};
use anyhow::{Context, bail};
use std::io::{self, Write};
use std::sync::Arc;
use std::time::Duration;

pub(super) fn run(o: &Doctor) -> anyhow::Result<u8> {
    let host = Arc::new(Host {
        nvml: o.nvml.clone(),
        cuda: o.cuda.clone(),
        config: o.config.clone(),
        ..Host::here()
    });
    let mut checks = doctor::checks();
    if o.list {
        let mut out = io::stdout().lock();
        for c in &checks {
            writeln!(out, "{:<18} {}", c.id, c.area)?;
        }
        return Ok(0);
    }
    for id in &o.checks {
        if !checks.iter().any(|c| c.id == id) {
            bail!("there is no check {id:?}; ringwatch doctor --list names them");
        }
    }
    checks.retain(|c| o.checks.is_empty() || o.checks.iter().any(|id| id == c.id));
    let report = doctor::run(&host, &checks, Duration::from_secs(o.limit));
    finish(o, &host, &report)
}

/// Prints a report, writes the bundle, and makes an exit code of it.
fn finish(o: &Doctor, host: &Host, report: &Report) -> anyhow::Result<u8> {
    let text = text(report, o.verbose);
    if let Some(path) = &o.bundle {
        let what = || format!("cannot write {}", path.display());
        let file = std::fs::File::create(path).with_context(what)?;
        doctor::write_bundle(file, host, report, &text).with_context(what)?;
    }
    let mut out = io::stdout().lock();
    if o.json {
        writeln!(out, "{}", serde_json::to_string(report)?)?;
    } else {
        out.write_all(text.as_bytes())?;
    }
    out.flush()?;
    let code = if report.has_failed() { FINDINGS } else { 0 };
    debug_assert_ne!(code, BROKEN);
    // A check that hangs still runs on a thread of this process, and must not keep it.
    Ok(code)
}

/// A report as people read it: an area after the other, what is wrong with its remedy.
fn text(report: &Report, verbose: bool) -> String {
    let mut t = format!(
        "ringwatch {} doctor on {}, Linux {}\n",
        report.ringwatch_version, report.host, report.kernel
    );
    let mut area: Option<Area> = None;
    for o in &report.outcomes {
        if area != Some(o.area) {
            area = Some(o.area);
            t.push_str(&format!("\n{}\n", o.area));
        }
        t.push_str(&lines(o, verbose));
    }
    let n = |s| report.count(s);
    t.push_str(&format!(
        "\n{} passed, {} warnings, {} failures, {} skipped\n",
        n(Status::Pass),
        n(Status::Warn),
        n(Status::Fail),
        n(Status::Skip)
    ));
    t
}

/// A check: its worst result, and everything that is wrong; with `verbose` all it saw.
fn lines(o: &Outcome, verbose: bool) -> String {
    let mut t = String::new();
    for (i, r) in o.results.iter().enumerate() {
        if i > 0 && r.status < Status::Warn && !verbose && o.status >= Status::Warn {
            continue;
        }
        let name = if i == 0 { o.id.as_str() } else { "" };
        let seen = r.seen.replace('\n', &format!("\n  {:25}", ""));
        t.push_str(&format!("  {} {name:<18} {seen}\n", r.status));
        if let Some(fix) = &r.fix {
            t.push_str(&format!("  {:23} fix: {fix}\n", ""));
        }
    }
    t
}
