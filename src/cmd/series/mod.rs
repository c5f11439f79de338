//! `ringwatch bench` with `--targets`, `--save`, `--against` or `--rounds`: several runs in turn, whose reports are
//! judged, saved and compared together.

mod link;
mod tables;

use super::bench::{show, tail};
use super::{BROKEN, FINDINGS};
use crate::bench::targets::{Judgement, Verdict, judge};
use crate::bench::{
    self, BenchError, Changes, Launch, Measurements, Progress, Report, SCHEMA, Settings, Targets, Trend,
};
use crate::cli::Bench;
use serde::Serialize;
use std::io::{self, Write};

/// Rounds where measurements are saved or compared and nobody says how many: a comparison takes four at least.
const ROUNDS: u32 = 5;
/// Repeats of each size where nobody says how many, in one round and in each of several.
const REPEATS: (u32, u32) = (10, 3);
/// Changes from this many per cent on count, where nobody says how many.
const THRESHOLD_PERCENT: f64 = 5.0;

/// The JSON output. `--against` and `--baseline` read it as well.
#[derive(Debug, Serialize)]
struct Output<'a> {
    schema: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    targets: Option<&'a Judgement>,
    #[serde(skip_serializing_if = "Option::is_none")]
    against: Option<&'a Changes>,
    /// The error that ended the measuring before its time.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    reports: &'a [Report],
}

/// The result of the runs: an error leaves the reports that were there before it.
#[derive(Debug)]
struct Measured {
    reports: Vec<Report>,
    failure: Option<BenchError>,
}

/// True where the options ask for more than one table.
pub(super) fn is_requested(o: &Bench) -> bool {
    !o.compare
        && !o.cost
        && (o.targets.is_some() || o.save.is_some() || o.against.is_some() || o.rounds.is_some())
}

/// How often everything is measured with new communicators.
fn rounds(o: &Bench) -> u32 {
    o.rounds.unwrap_or(if o.save.is_some() || o.against.is_some() { ROUNDS } else { 1 })
}

/// How often each size is measured in a round.
pub(super) fn repeats(o: &Bench) -> u32 {
    o.repeat.unwrap_or(if rounds(o) > 1 { REPEATS.1 } else { REPEATS.0 })
}

pub(super) fn run(o: &Bench, settings: &Settings, launch: Option<&Launch>) -> anyhow::Result<u8> {
    let targets = o.targets.as_deref().map(Targets::load).transpose()?;
    // Rank 0 alone has files to read, to write and to print.
    let is_first = launch.is_none_or(|l| l.rank == 0);
    let old = match o.against.as_deref().filter(|_| is_first) {
        Some(path) => Some(Measurements::load(path)?),
        None => None,
    };
    if let Some(path) = o.save.as_deref().filter(|_| is_first) {
        Measurements::check_destination(path)?;
    }
    let ranks = bench::count_ranks(settings, launch)?;
    let measured = measure(o, settings, launch, targets.as_ref(), ranks)?;
    if !is_first {
        return finish(measured.failure, if wrong(&measured.reports) { FINDINGS } else { 0 });
    }
    let Measured { reports, failure } = measured;
    if reports.is_empty() && failure.is_some() {
        return finish(failure, BROKEN);
    }
    let saved = match &o.save {
        Some(path) if !reports.is_empty() => Measurements::new(reports.clone()).save(path),
        _ => Ok(()),
    };
    let stopped = failure.as_ref().map(|e| format!("not measured: {e}"));
    let judgement = targets.as_ref().map(|t| {
        let link = link::of(t, &reports, o.nvml.as_ref());
        judge(t, &reports, ranks, link, stopped.as_deref())
    });
    let threshold = o.threshold.unwrap_or(THRESHOLD_PERCENT) / 100.0;
    let changes = old
        .as_ref()
        .zip(o.against.as_ref())
        .map(|(old, path)| bench::compare(old, &reports, &path.display().to_string(), threshold));
    print(o, &reports, judgement.as_ref(), changes.as_ref(), failure.as_ref())?;
    // After the table, which is then not lost.
    saved?;
    let code = code(&reports, judgement.as_ref(), changes.as_ref());
    if let (BROKEN, None) = (code, &failure) {
        for what in undecided(judgement.as_ref(), changes.as_ref()) {
            // A closed standard error changes nothing about the exit code.
            writeln!(io::stderr(), "ringwatch: {what}").ok();
        }
    }
    finish(failure, code)
}

/// Runs everything, round by round, and stops at the first error.
fn measure(
    o: &Bench,
    settings: &Settings,
    launch: Option<&Launch>,
    targets: Option<&Targets>,
    ranks: u32,
) -> anyhow::Result<Measured> {
    let mut measured = Measured { reports: Vec::new(), failure: None };
    // A single process is on one node. Of several the first report says it.
    let mut nodes = launch.is_none().then_some(1);
    let mut epoch = o.epoch;
    for _ in 0..rounds(o) {
        let mut done: Vec<Settings> = Vec::new();
        loop {
            let plan = targets.map_or_else(|| vec![settings.clone()], |t| t.plan(settings, ranks, nodes));
            let is_new =
                |s: &&Settings| done.iter().all(|d| (d.collective, d.dtype) != (s.collective, s.dtype));
            let Some(next) = plan.iter().find(is_new) else { break };
            // Those of one job that come after each other must not meet.
            let launch = launch.map(|l| Launch { epoch, ..l.clone() });
            epoch += 1;
            let mut broken = None;
            let is_quiet = o.json || launch.as_ref().is_some_and(|l| l.rank != 0);
            let mut on = |p: &Progress<'_>| {
                if !is_quiet && broken.is_none() {
                    broken = if targets.is_some() { announce(p) } else { show(p) }.err();
                }
            };
            match bench::run(next, launch.as_ref(), None, &mut on) {
                Ok(report) => {
                    if !is_quiet && broken.is_none() && targets.is_none() {
                        broken = io::stdout().lock().write_all(tail(&report).as_bytes()).err();
                    }
                    nodes = Some(report.environment.nodes());
                    measured.reports.push(report);
                }
                Err(e) => {
                    measured.failure = Some(e);
                    return Ok(measured);
                }
            }
            if let Some(e) = broken {
                return Err(e.into());
            }
            done.push(next.clone());
        }
    }
    Ok(measured)
}

/// Progress for whoever watches a terminal: the table of targets comes at the end.
fn announce(p: &Progress<'_>) -> io::Result<()> {
    if let Progress::Begin(s, _) = p {
        let sizes = if s.sizes.len() == 1 { "size" } else { "sizes" };
        let text = format!("ringwatch: {} of {}, {} {sizes}", s.collective, s.dtype, s.sizes.len());
        // It may be closed.
        writeln!(io::stderr(), "{text}").ok();
    }
    Ok(())
}

fn print(
    o: &Bench,
    reports: &[Report],
    judgement: Option<&Judgement>,
    changes: Option<&Changes>,
    failure: Option<&BenchError>,
) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    match (reports, judgement, changes) {
        // As without --save.
        ([report], None, None) if o.json && failure.is_none() => {
            writeln!(out, "{}", serde_json::to_string(report)?)?;
        }
        _ if o.json => {
            let error = failure.map(ToString::to_string);
            let output = Output { schema: SCHEMA, targets: judgement, against: changes, error, reports };
            writeln!(out, "{}", serde_json::to_string(&output)?)?;
        }
        _ => {
            if let Some(j) = judgement {
                out.write_all(tables::targets(j, reports).as_bytes())?;
            }
            if let Some(c) = changes {
                out.write_all(tables::changes(c).as_bytes())?;
            }
        }
    }
    out.flush()?;
    Ok(())
}

fn wrong(reports: &[Report]) -> bool {
    reports.iter().any(|r| r.wrong.is_some_and(|w| w > 0))
}

/// 0: everything is right; 1: a target is missed, data are wrong, or something is slower; 2: something could not be
/// judged.
fn code(reports: &[Report], judgement: Option<&Judgement>, changes: Option<&Changes>) -> u8 {
    let is_missed = judgement.is_some_and(|j| j.count(Verdict::Fail) > 0);
    let is_slower = changes.is_some_and(|c| c.count(Trend::Regression) > 0);
    if wrong(reports) || is_missed || is_slower {
        FINDINGS
    } else if undecided(judgement, changes).is_empty() {
        0
    } else {
        BROKEN
    }
}

/// The targets that could not be judged, in words.
fn undecided(judgement: Option<&Judgement>, changes: Option<&Changes>) -> Vec<String> {
    let mut all = Vec::new();
    if let Some(j) = judgement {
        let unknown = j.count(Verdict::Unknown);
        if unknown > 0 {
            all.push(format!("--targets {}: {unknown} of {} targets are unknown", j.file, j.rows.len()));
        } else if j.count(Verdict::Skipped) == j.rows.len() {
            all.push(format!("--targets {}: no target is for {} ranks; nothing was judged", j.file, j.ranks));
        }
    }
    if let Some(c) = changes {
        let is_open = |t: Trend| matches!(t, Trend::Unknown | Trend::NotComparable);
        if c.rows.iter().all(|r| is_open(r.trend)) {
            let why = c.rows.iter().find_map(|r| r.reason.as_deref()).unwrap_or("nothing was measured");
            all.push(format!("--against {}: nothing can be compared: {why}", c.file));
        }
    }
    all
}

/// Ends with the error, where there is one.
pub(super) fn finish(failure: Option<BenchError>, code: u8) -> anyhow::Result<u8> {
    match failure {
        Some(e @ BenchError::Stuck(_)) => {
            // Ending in the usual way would wait for the threads that do not come back.
            writeln!(io::stderr(), "ringwatch: {:#}", anyhow::Error::from(e)).ok();
            bench::leave(BROKEN);
        }
        Some(e) => Err(e.into()),
        None => Ok(code),
    }
}
