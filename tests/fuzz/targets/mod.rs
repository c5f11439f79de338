//! The targets: what each parser is given, and what has to be true of what comes out.

mod accept;
mod bench;
mod bus;
mod environment;
mod explain;
mod findings;
mod flight_recorder;
mod ingest;
mod kernel;
mod ras;
mod readings;
mod replies;
mod segment;
mod settings;
mod stacks;
mod subject;
mod trace;
mod trace_log;
mod tune;

use crate::{budget, plain};

/// A parser, and what has to be true of it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Target {
    /// The name, and that of its corpus.
    pub(crate) name: &'static str,
    check: fn(&[u8]),
}

impl Target {
    /// Runs it on one input, within the budget of one.
    pub(crate) fn run(&self, bytes: &[u8]) {
        budget::bounded(|| (self.check)(bytes));
    }
}

const fn target(name: &'static str, check: fn(&[u8])) -> Target {
    Target { name, check }
}

/// All targets.
pub(crate) const ALL: &[Target] = &[
    target("accept", accept::check),
    target("agent_answer", replies::agent),
    target("bench_measurements", bench::measurements),
    target("bench_targets", bench::targets),
    target("bus", bus::check),
    target("environment", environment::check),
    target("eu_stack", stacks::eu_stack),
    target("explain", explain::check),
    target("findings", findings::check),
    target("flight_recorder", flight_recorder::check),
    target("ras", ras::check),
    target("ingest", ingest::check),
    target("pod_resources", kernel::pod_resources),
    target("processes", kernel::processes),
    target("py_spy", stacks::py_spy),
    target("questions", replies::questions),
    target("readings", readings::check),
    target("samplers", kernel::samplers),
    target("screens", replies::screens),
    target("segment", segment::check),
    target("settings", settings::file),
    target("settings_overrides", settings::overrides),
    target("subject", subject::check),
    target("trace", trace::check),
    target("trace_log", trace_log::check),
    target("tune", tune::text),
    target("tune_table", tune::table),
    target("verdicts", replies::verdicts),
];
