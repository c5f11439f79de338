//! `ringwatch bench`: what was typed becomes settings, what was measured a table or JSON.

use super::{BROKEN, FINDINGS, compare, cost, series};
use crate::bench::{
    self, BenchError, Collective, Environment, Launch, Progress, RankEvents, Report, Settings, SizeResult,
    Step, Timing, Turns, median, parse_bytes, version_text,
};
use crate::cli::Bench;
use anyhow::Context;
use std::fmt::Write as _;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::str::FromStr;

/// nccl-tests' only size by default, in bytes.
const DEFAULT_BYTES: u64 = 32 << 20;

pub(super) fn run(o: &Bench) -> anyhow::Result<u8> {
    let settings = settings(o)?;
    let variable = |name: &str| std::env::var(name).ok();
    let launch = Launch::read(variable, o.epoch).map_err(BenchError::from)?;
    if o.compare {
        return compare::run(o, &settings, launch.as_ref());
    }
    if o.cost {
        return cost::run(o, &settings, launch.as_ref());
    }
    if series::is_requested(o) {
        return series::run(o, &settings, launch.as_ref());
    }
    if o.result.is_some() {
        // Whoever compares must not leave its children behind.
        rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    }
    let turns = if o.turns {
        let socket = io::stdin().as_fd().try_clone_to_owned()?;
        Some(Turns::listen(UnixStream::from(socket)).context("cannot listen for turns")?)
    } else {
        None
    };
    let quiet = o.json || o.result.is_some() || launch.as_ref().is_some_and(|l| l.rank != 0);
    let mut broken = None;
    let mut on = |p: &Progress<'_>| {
        if !quiet && broken.is_none() {
            broken = show(p).err();
        }
    };
    let report = match bench::run(&settings, launch.as_ref(), turns, &mut on) {
        Ok(report) => report,
        Err(e @ BenchError::Stuck(_)) => {
            // Ending in the usual way would wait for the threads that do not come back.
            writeln!(io::stderr(), "ringwatch: {:#}", anyhow::Error::from(e)).ok();
            bench::leave(BROKEN);
        }
        Err(e) => return Err(e.into()),
    };
    if let Some(e) = broken {
        return Err(e.into());
    }
    if launch.as_ref().is_none_or(|l| l.rank == 0) {
        if let Some(path) = &o.result {
            let json = serde_json::to_vec(&report)?;
            std::fs::write(path, json).with_context(|| format!("cannot write {}", path.display()))?;
        } else {
            let mut out = io::stdout().lock();
            if o.json {
                writeln!(out, "{}", serde_json::to_string(&report)?)?;
            } else {
                out.write_all(tail(&report).as_bytes())?;
            }
            out.flush()?;
        }
    }
    Ok(if report.wrong.is_some_and(|w| w > 0) { FINDINGS } else { 0 })
}

fn settings(o: &Bench) -> anyhow::Result<Settings> {
    let bytes = |name: &str, text: &Option<String>| -> anyhow::Result<Option<u64>> {
        let Some(text) = text else { return Ok(None) };
        parse_bytes(text).map(Some).map_err(|e| anyhow::anyhow!("{name}: {e}"))
    };
    let (min, max) = (bytes("--min-bytes", &o.min_bytes)?, bytes("--max-bytes", &o.max_bytes)?);
    let step = match (o.step_factor, bytes("--step-bytes", &o.step_bytes)?) {
        (_, Some(b)) => Step::Bytes(b),
        (f, None) => Step::Factor(f.unwrap_or(2)),
    };
    let cost = o.cost.then(|| cost::plan(o));
    Ok(Settings {
        collective: word(&o.collective)?,
        dtype: word(&o.dtype)?,
        redop: word(&o.op)?,
        root: o.root,
        min_bytes: min.unwrap_or_else(|| max.unwrap_or(DEFAULT_BYTES).min(DEFAULT_BYTES)),
        max_bytes: max.unwrap_or_else(|| min.unwrap_or(DEFAULT_BYTES).max(DEFAULT_BYTES)),
        step,
        sizes: o.sizes.clone(),
        iters: cost.map_or(o.iters, |c| c.calls),
        warmup_iters: cost.map_or(o.warmup_iters, |c| c.warmup()),
        millis: o.millis,
        check: o.check == 1 && !o.cost,
        threads: o.threads.unwrap_or(u32::from(o.gpus.is_some())),
        gpus: o.gpus.unwrap_or(1),
        graph: o.cuda_graph,
        batch: o.batch,
        blocking: o.blocking,
        pin: o.pin || o.compare || o.cost,
        events: o.events,
        repeat: if series::is_requested(o) { series::repeats(o) } else { o.repeat.unwrap_or(1) },
        cost,
        timeout_s: o.timeout,
        nccl: o.nccl.clone(),
        cuda: o.cuda.clone(),
    })
}

fn word<T: FromStr<Err = String>>(text: &str) -> anyhow::Result<T> {
    text.parse().map_err(anyhow::Error::msg)
}

pub(super) fn show(p: &Progress<'_>) -> io::Result<()> {
    let text = match p {
        Progress::Begin(settings, environment) => head(settings, environment),
        Progress::Size(settings, size) => row(settings, size),
    };
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    // A row when it is there: sweeps take long.
    out.flush()
}

/// The lines above the table.
pub(super) fn head(s: &Settings, e: &Environment) -> String {
    let mut t = facts(s, e);
    t.push_str("#\n");
    let group = ["out-of-place", "in-place"].map(|g| format!("  {g:^37}")).concat();
    t.push_str(format!("#{:57}{group}", "").trim_end());
    let names = ["time", "algbw", "busbw", "#wrong"].map(|n| format!("  {n:>7}")).concat();
    let units = ["(us)", "(GB/s)", "(GB/s)", ""].map(|n| format!("  {n:>7}")).concat();
    let first = format!("\n#{:>13}  {:>13}  {:>9}  {:>6}  {:>6}", "size", "count", "type", "redop", "root");
    t.push_str(&format!("{first}  {names}  {names}\n"));
    let second = format!("#{:>13}  {:>13}{:27}{units}  {units}", "(B)", "(elements)", "");
    t.push_str(second.trim_end());
    t.push('\n');
    t
}

/// Settings and surroundings.
pub(super) fn facts(s: &Settings, e: &Environment) -> String {
    let first = format!("# ringwatch {}: {} with {}\n", e.ringwatch_version, s.collective, summary(s));
    first + &surroundings(e)
}

/// NCCL, the driver and the ranks.
pub(super) fn surroundings(e: &Environment) -> String {
    let mut t = String::new();
    let driver = e.cuda_driver_version;
    // Writing into a text cannot fail.
    let mut line = |text: std::fmt::Arguments<'_>| writeln!(t, "# {text}").unwrap_or_default();
    line(format_args!("NCCL {} ({})", version_text(e.nccl_version), e.nccl_path.display()));
    line(format_args!("CUDA driver API {}.{}", driver / 1000, driver % 1000 / 10));
    for r in &e.ranks {
        line(format_args!(
            "rank {:>3}: {} pid {} thread {} device {} {} [{}]",
            r.rank, r.host, r.pid, r.thread, r.device, r.pci, r.name
        ));
    }
    t
}

fn row(s: &Settings, size: &SizeResult) -> String {
    let redop = if s.collective.reduces() { s.redop.as_str() } else { "none" };
    let root = if s.collective.has_root() { i64::from(s.root) } else { -1 };
    let first =
        format!(" {:>13}  {:>13}  {:>9}  {redop:>6}  {root:>6}", size.size_bytes, size.count, s.dtype);
    let none = ["N/A"; 4].map(|n| format!("  {n:>7}")).concat();
    let in_place = size.in_place.as_ref().map_or(none, timing);
    format!("{first}  {}  {in_place}\n", timing(&size.out_of_place))
}

fn timing(t: &Timing) -> String {
    let wrong = t.wrong.map_or("N/A".to_owned(), |w| w.to_string());
    let (time, algbw, busbw) =
        (number(t.time_ns / 1000.0), number(t.algbw_gb_per_s), number(t.busbw_gb_per_s));
    format!("  {time:>7}  {algbw:>7}  {busbw:>7}  {wrong:>7}")
}

/// Four digits that matter.
pub(super) fn number(n: f64) -> String {
    match n {
        n if n >= 10_000.0 => format!("{n:.0}"),
        n if n >= 100.0 => format!("{n:.1}"),
        n => format!("{n:.2}"),
    }
}

/// The lines below the table.
pub(super) fn tail(r: &Report) -> String {
    let wrong = wrong_elements(r.wrong);
    format!("{}{wrong}# average bus bandwidth: {:.3} GB/s\n", by_events(r), r.average_busbw_gb_per_s)
}

/// The result of the check of the data.
pub(super) fn wrong_elements(wrong: Option<u64>) -> String {
    match wrong {
        Some(0) => "# wrong elements: 0\n".to_owned(),
        Some(w) => format!("# wrong elements: {w}, FAILED\n"),
        None => "# wrong elements: not checked\n".to_owned(),
    }
}

/// Single operations by CUDA events, out of place: the medians of all ranks, and what of them is no operation's.
fn by_events(r: &Report) -> String {
    let mut lines = String::new();
    for size in &r.sizes {
        let Some(events) = &size.out_of_place.events else { continue };
        let of_ranks = |each: fn(&RankEvents) -> Option<f64>| {
            number(median(&events.iter().filter_map(each).collect::<Vec<_>>()) / 1000.0)
        };
        lines.push_str(&format!(
            "# by CUDA events, {} B: {} us, of which {} us are an empty kernel's, and of these {} us the events'\n",
            size.size_bytes,
            of_ranks(|e| Some(median(&e.samples_ns))),
            of_ranks(|e| e.kernel_floor_ns),
            of_ranks(|e| Some(e.floor_ns)),
        ));
    }
    lines
}

/// How it is measured, in one line.
fn summary(s: &Settings) -> String {
    let mut parts = vec![
        format!("{} warm-up and {} timed operations", s.warmup_iters, s.iters),
        format!("{} threads x {} GPUs", s.threads, s.gpus),
    ];
    if s.repeat > 1 {
        parts.push(format!("median of {}", s.repeat));
    }
    if let Some(n) = s.graph {
        parts.push(format!("{n} operations a CUDA graph"));
    }
    if s.batch > 1 {
        parts.push(format!("{} operations a group", s.batch));
    }
    if s.blocking {
        parts.push("blocking".to_owned());
    }
    if s.collective == Collective::AllToAll {
        parts.push("grouped sends and receives".to_owned());
    }
    parts.join(", ")
}
