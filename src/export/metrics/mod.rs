//! The numbers behind the metrics: what is over adds up here, what goes on is looked up when somebody asks.

mod analysis;
mod family;
mod finding_ranks;
mod hardware;
mod histogram;
mod inspector;
mod operations;
mod own;
mod scope;
mod settings;
mod state;
mod store;

pub use analysis::{Analysis, Bus, Counts, Sums};
pub use family::{Family, Sample, Value};
pub use finding_ranks::{FindingRanks, NamedRank, named_ranks};
pub use histogram::{BOUNDS, Exemplar, Histogram, ZERO};
pub use inspector::Foreign;
pub use own::{Exported, Own};
pub use settings::Settings;

use crate::join::{Finished, Join};
use crate::model::{Finding, FindingEvent};
use family::Families;
use hardware::Wires;
use inspector::Inspector;
use operations::Operations;
use scope::Scopes;
use state::{Findings, Losses};

/// All metrics of one agent.
#[derive(Debug)]
pub struct Metrics {
    settings: Settings,
    /// The share of operations that have a trace from the beginning; only those become exemplars.
    traced: f64,
    scopes: Scopes,
    operations: Operations,
    findings: Findings,
    losses: Losses,
    wires: Wires,
    inspector: Option<Inspector>,
}

impl Metrics {
    /// Nothing has happened yet.
    pub fn new(settings: Settings) -> Self {
        let budget = settings.series_budget;
        Metrics {
            traced: 1.0,
            scopes: Scopes::default(),
            operations: Operations::new(budget),
            findings: Findings::new(budget),
            losses: Losses::new(budget),
            wires: Wires::default(),
            inspector: settings.inspector_names.then(|| Inspector::new(budget)),
            settings,
        }
    }

    /// Names only those traces in exemplars that head sampling keeps, of which this is the share.
    pub fn set_trace_ratio(&mut self, ratio: f64) {
        self.traced = ratio;
    }

    /// How it was set up.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Takes operations that are over.
    pub fn finished(&mut self, join: &Join, finished: &[Finished]) {
        self.operations.add(&mut self.scopes, join, finished, self.traced);
        if let Some(inspector) = &mut self.inspector {
            finished.iter().for_each(|f| inspector.add(join, f));
        }
    }

    /// Takes changes of findings.
    pub fn events(&mut self, join: &Join, events: &[FindingEvent]) {
        for e in events {
            self.findings.add(&mut self.scopes, join, e);
        }
    }

    /// All there is to say now. `open` are the findings that are open; others among them are left out.
    pub fn gather(&mut self, join: &Join, open: &[Finding], own: &Own) -> Vec<Family> {
        let idle_ns = self.settings.idle_seconds.saturating_mul(1_000_000_000);
        self.losses.take(&mut self.scopes, join);
        self.wires.take(join.hardware());
        let mut out = Families::new(self.settings.cluster.clone());
        self.operations.expire(own.now_ns, idle_ns);
        self.findings.expire(own.now_ns, idle_ns);
        self.losses.expire(own.now_ns, idle_ns);
        self.operations.gather(&self.scopes, &mut out);
        state::in_flight(&mut out, &mut self.scopes, join, own.now_ns, self.settings.series_budget);
        state::processes(&mut out, join);
        self.findings.gather(&mut out, &mut self.scopes, join, open);
        self.losses.gather(&mut out, &self.scopes);
        hardware::gather(&mut out, join.hardware(), own.now_ns);
        self.wires.gather(&mut out, join.hardware(), own.now_ns);
        let folded = self.operations.folded() + self.findings.folded() + self.losses.folded();
        let series = self.operations.len() + self.findings.len() + self.losses.len();
        own.gather(&mut out, series, folded, join.finished_dropped());
        let used: Vec<scope::ScopeId> =
            self.operations.scopes().chain(self.findings.scopes()).chain(self.losses.scopes()).collect();
        self.scopes.keep_only(used);
        out.finish()
    }

    /// All that an analyser says. What jobs did their agents count already.
    pub fn gather_analysis(&self, analysis: &Analysis, own: &Own) -> Vec<Family> {
        let mut out = Families::new(self.settings.cluster.clone());
        analysis.gather(&mut out, &own.node, self.settings.series_budget);
        own.gather(&mut out, 0, 0, 0);
        out.finish()
    }

    /// The metrics under Inspector's names since the last call, where they are wanted.
    pub(super) fn gather_inspector(&mut self) -> Option<Vec<Foreign>> {
        self.inspector.as_mut().map(Inspector::gather)
    }
}
