//! One file a verb: from what was typed to what is done, and to an exit code.

mod advise;
mod agent;
mod analyser;
mod attach;
mod baselines;
mod bench;
mod cluster;
mod compare;
mod config;
mod cost;
mod demo;
mod demo_workers;
mod diagnose;
mod diff;
mod doctor;
mod explain;
mod generate;
mod log;
mod mcp;
mod observe;
mod playback;
mod plugin;
mod record;
mod replay;
mod report;
mod run;
mod self_check;
mod series;
mod shared_sink;
mod top;
mod tune;
mod tune_search;

use crate::cli::{Cli, LogLevel, Scenario, Verb};
use crate::detect::Settings;
use crate::ingest::{Place, ProbeCommand, Segments, places, probe};
use crate::runtime::Monitor;
use anyhow::Context;
use baselines::baselines;
use std::path::PathBuf;

/// Exit code for findings.
const FINDINGS: u8 = 1;
/// Exit code for bad usage and broken surroundings.
pub const BROKEN: u8 = 2;

/// The exit code for an error.
pub fn exit_code(e: &anyhow::Error) -> u8 {
    e.downcast_ref::<run::CannotStart>().map_or(BROKEN, run::CannotStart::exit_code)
}

/// Does what was asked. The number is the exit code.
///
/// # Errors
/// What went wrong, where, and what to do about it.
pub fn dispatch(cli: Cli) -> anyhow::Result<u8> {
    if !matches!(cli.verb, Verb::Agent(_) | Verb::Analyser(_)) {
        log::plain();
    }
    match cli.verb {
        Verb::Top(o) => top::run(&o),
        Verb::Run(o) => run::run(&o),
        Verb::Record(o) => record::run(&o),
        Verb::Diagnose(o) => diagnose::run(&o),
        Verb::Attach(o) => attach::run(&o),
        Verb::Diff(o) => diff::run(&o),
        Verb::Report(o) => report::run(&o),
        Verb::Mcp(o) => mcp::run(&o),
        Verb::Doctor(o) => doctor::run(&o),
        Verb::Explain(o) => explain::run(&o),
        Verb::Agent(o) => agent::run(&o),
        Verb::Analyser(o) => analyser::run(&o),
        Verb::Cluster(o) => cluster::run(&o.verb),
        Verb::Config(o) => config::run(&o),
        Verb::Demo(o) => demo::run(&o),
        Verb::Bench(o) => bench::run(&o),
        Verb::Plugin(o) => plugin::run(&o),
        Verb::Tune(o) => tune::run(&o),
        Verb::Completion(o) => generate::completion(&o),
        Verb::Man(o) => generate::man(&o),
        Verb::Replay(o) => replay::run(&o),
        Verb::Probe => probe().map(|()| 0).context("this verb is started by ringwatch itself"),
    }
}

fn monitor(dir: Option<PathBuf>) -> Monitor<Segments> {
    monitor_of(dir.as_slice())
}

/// The same over several directories; none: where jobs of this host leave their segments.
fn monitor_of(dirs: &[PathBuf]) -> Monitor<Segments> {
    let places = if dirs.is_empty() { places() } else { dirs.iter().cloned().map(Place::Dir).collect() };
    // Of another user's directory root must not wait for that user.
    let is_own = !places.contains(&Place::Host) && !rustix::process::geteuid().is_root();
    let mut segments = Segments::new(places);
    if is_own {
        segments.use_probe_for_stacks(probe_command());
    } else {
        segments.use_probes(probe_command());
    }
    Monitor::new(segments, Settings::default())
}

/// The segments in a directory of one's own.
fn own_segments(directory: PathBuf) -> Segments {
    let mut segments = Segments::new(vec![Place::Dir(directory)]);
    segments.use_probe_for_stacks(probe_command());
    segments
}

/// This program as the process that touches what other users can block.
fn probe_command() -> ProbeCommand {
    ProbeCommand::of_this_program(&["probe"])
}

/// A runtime for the verbs that wait for several things at once.
fn block_on<T>(future: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(future)
}

impl From<LogLevel> for tracing::Level {
    fn from(level: LogLevel) -> Self {
        match level {
            LogLevel::Error => Self::ERROR,
            LogLevel::Warn => Self::WARN,
            LogLevel::Info => Self::INFO,
            LogLevel::Debug => Self::DEBUG,
            LogLevel::Trace => Self::TRACE,
        }
    }
}

impl From<Scenario> for crate::replay::Scenario {
    fn from(s: Scenario) -> Self {
        match s {
            Scenario::Mixed => Self::Mixed,
            Scenario::MissingRank => Self::MissingRank,
            Scenario::Mismatch => Self::Mismatch,
        }
    }
}
