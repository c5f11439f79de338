//! `ringwatch bench --cost` measures the cost of a plugin's events for an operation.
//!
//! NCCL loads one plugin a process and the dynamic linker reads its path when a process begins, so this process starts
//! itself again with the environment that loads the shim. That one measures, alone or as a rank of a job.

use super::bench::{number, surroundings};
use super::demo_workers::{PATH_VARIABLE, PLUGIN_VARIABLE, library_path, scratch};
use super::{BROKEN, series};
use crate::bench::{
    self, CostPlan, CostReport, CostRow, Environment, Interval, Launch, ModeCost, Progress, Report,
    SHIM_FILE_NAME, Settings, ShimFacts,
};
use crate::bundle;
use crate::cli::Bench;
use anyhow::{Context, bail};
use object::{Object as _, ObjectSymbol as _};
use std::fmt::Write as _;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The variable by which the shim finds the plugin under test. A process that has it measures.
const SHIM_VARIABLE: &str = "RINGWATCH_SHIM_PLUGIN";
const DIR_VARIABLE: &str = "RINGWATCH_DIR";
const ROUNDS: u32 = 60;
const CALLS: u32 = 1500;
/// The name of this program's own plugin in the JSON.
const OWN: &str = "ringwatch";

/// The number of phases and their length, as the options ask for them.
pub(super) fn plan(o: &Bench) -> CostPlan {
    CostPlan { rounds: o.rounds.unwrap_or(ROUNDS), calls: o.calls.unwrap_or(CALLS) }
}

pub(super) fn run(o: &Bench, settings: &Settings, launch: Option<&Launch>) -> anyhow::Result<u8> {
    if std::env::var_os(SHIM_VARIABLE).is_some() { measure(o, settings, launch) } else { start(o) }
}

/// Starts this program again, with the shim, and waits for it.
fn start(o: &Bench) -> anyhow::Result<u8> {
    // /dev/shm is often mounted noexec, so the libraries are elsewhere.
    let libraries = tempfile::tempdir().context("cannot make a temporary directory for the plugins")?;
    let plugin = match &o.plugin {
        Some(file) => std::path::absolute(file).context("--plugin")?,
        None => bundle::install(libraries.path()).context("cannot write the plugin")?,
    };
    let versions = profiler_versions(&plugin).with_context(|| format!("--plugin {}", plugin.display()))?;
    bundle::install_shim(libraries.path(), SHIM_FILE_NAME, &versions)
        .context("cannot write the plugin that switches events")?;
    // Where the user names no directory no agent reads these segments, and they go with the measurement.
    let segments = scratch()?;
    let exe = std::env::current_exe().context("cannot find ringwatch's own program")?;
    let mut command = Command::new(exe);
    command
        .args(std::env::args_os().skip(1))
        .env(PLUGIN_VARIABLE, SHIM_FILE_NAME)
        .env(PATH_VARIABLE, library_path(libraries.path()))
        .env(SHIM_VARIABLE, &plugin);
    if std::env::var_os(DIR_VARIABLE).is_none_or(|d| d.is_empty()) {
        command.env(DIR_VARIABLE, segments.path());
    }
    let status = command.status().context("cannot start ringwatch again")?;
    if status.code().is_none() {
        bail!("the process that measures ended by itself: {status}");
    }
    // It has reported its own error.
    Ok(status.code().and_then(|c| u8::try_from(c).ok()).unwrap_or(BROKEN))
}

/// The versions of NCCL's profiler ABI that a library exports.
fn profiler_versions(plugin: &Path) -> anyhow::Result<Vec<u32>> {
    let bytes = std::fs::read(plugin).context("cannot read it")?;
    let file = object::File::parse(&*bytes).context("it is no library")?;
    let exported: Vec<&str> = file
        .dynamic_symbols()
        .filter(|s| !s.is_undefined())
        .filter_map(|s| s.name().ok()?.strip_prefix("ncclProfiler_v"))
        .collect();
    let versions: Vec<u32> =
        bundle::PROFILER_VERSIONS.filter(|v| exported.contains(&v.to_string().as_str())).collect();
    if versions.is_empty() {
        bail!("it is no NCCL profiler plugin: it exports no ncclProfiler_v1 to ncclProfiler_v7");
    }
    Ok(versions)
}

fn measure(o: &Bench, settings: &Settings, launch: Option<&Launch>) -> anyhow::Result<u8> {
    // The process that started this one must not leave it behind.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    let name = o.plugin.as_ref().map_or(OWN.to_owned(), |p| absolute(p).display().to_string());
    let prints = launch.is_none_or(|l| l.rank == 0);
    let mut broken = None;
    let mut on = |p: &Progress<'_>| {
        if prints && !o.json && broken.is_none() {
            broken = show(p, &name).err();
        }
    };
    let report = match bench::run(settings, launch, None, &mut on) {
        Ok(report) => report,
        Err(e) => return series::finish(Some(e), BROKEN),
    };
    if let Some(e) = broken {
        return Err(e.into());
    }
    if prints {
        let mut out = io::stdout().lock();
        if o.json {
            writeln!(out, "{}", serde_json::to_string(&CostReport::new(name, &report))?)?;
        } else {
            out.write_all(tail(&report).as_bytes())?;
        }
        out.flush()?;
    }
    Ok(0)
}

fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

fn show(p: &Progress<'_>, plugin: &str) -> io::Result<()> {
    let text = match p {
        Progress::Begin(settings, environment) => head(settings, environment, plugin),
        Progress::Size(_, size) => {
            let phases = size.out_of_place.phases.as_ref();
            let row = phases.and_then(|p| CostRow::new(size.size_bytes, size.count, p));
            row.as_ref().map(line).unwrap_or_default()
        }
    };
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    // Each row as soon as it is there: sweeps take long.
    out.flush()
}

/// The text above the table.
fn head(s: &Settings, e: &Environment, plugin: &str) -> String {
    let plan = s.cost.unwrap_or(CostPlan { rounds: 0, calls: 0 });
    let mut first = format!(
        "# ringwatch {}: what profiler events cost {} of {}, {} rounds of phases of {} operations ({} before them), {} threads x {} GPUs",
        e.ringwatch_version,
        s.collective,
        s.dtype,
        plan.rounds,
        plan.calls,
        plan.warmup(),
        s.threads,
        s.gpus
    );
    if let Some(n) = s.graph {
        first.push_str(&format!(", {n} operations a CUDA graph"));
    }
    if s.batch > 1 {
        first.push_str(&format!(", {} operations a group", s.batch));
    }
    if s.blocking {
        first.push_str(", blocking");
    }
    // A file's name is absolute.
    let plugin = if plugin == OWN { "Ringwatch's own" } else { plugin };
    let mut t = format!("{first}\n{}# plugin: {plugin}\n", surroundings(e));
    // The other two are of every measurement.
    let is_told =
        |name: &str| name.starts_with("RINGWATCH_") && ![SHIM_VARIABLE, DIR_VARIABLE].contains(&name);
    for (name, value) in e.variables.iter().filter(|(name, _)| is_told(name)) {
        // Writing into a text cannot fail.
        writeln!(t, "# {name}={value}").unwrap_or_default();
    }
    t.push_str(
        "#\n# without: an operation without events. nccl: with empty callbacks. plugin: with the plugin. share: plugin less nccl.\n\
         # Each ratio and difference is to the phases without events on both sides; intervals of 95 % (signed ranks)\n#\n",
    );
    let mode = |name: &str| format!("  {:<25}  {:<25}", format!("{name}: ratio"), "ns");
    let text = format!(
        "#{:>12}  {:>12}{}{}  {}\n",
        "size (B)",
        "without (us)",
        mode("nccl"),
        mode("plugin"),
        "share: ns"
    );
    t.push_str(&text);
    t
}

fn line(row: &CostRow) -> String {
    let mode =
        |m: &ModeCost| format!("  {:<25}  {:<25}", ratio_text(&m.ratio), difference_text(&m.difference_ns));
    let text = format!(
        " {:>12}  {:>12}{}{}  {}",
        row.size_bytes,
        number(row.without_ns / 1000.0),
        mode(&row.nccl),
        mode(&row.plugin),
        difference_text(&row.share.difference_ns)
    );
    format!("{}\n", text.trim_end())
}

fn ratio_text(i: &Interval) -> String {
    let bound = |b: Option<f64>| b.map_or("?".to_owned(), |b| format!("{b:.4}"));
    format!("{:.4} ({}..{})", i.value, bound(i.lower), bound(i.upper))
}

fn difference_text(i: &Interval) -> String {
    let bound = |b: Option<f64>| b.map_or("?".to_owned(), |b| format!("{b:+.0}"));
    format!("{:+.0} ({}..{})", i.value, bound(i.lower), bound(i.upper))
}

/// The text below the table: which events there were.
fn tail(report: &Report) -> String {
    let facts = report.sizes.iter().rev().find_map(|s| s.out_of_place.phases.as_ref()).map(|p| p.facts);
    facts.as_ref().map(events).unwrap_or_default()
}

fn events(f: &ShimFacts) -> String {
    let mut t = format!(
        "# events: mask {:#x} with empty callbacks, {:#x} with the plugin, which changed it {} times (profiler ABI v{})\n",
        f.nccl_mask, f.plugin_mask, f.mask_changes, f.abi
    );
    if f.plugin_mask == 0 && f.mask_changes == 0 {
        t.push_str("# the plugin asks for no events: nothing of it was measured\n");
    }
    if f.stray_events > 0 {
        t.push_str(&format!("# {} events came in phases without events\n", f.stray_events));
    }
    t
}
