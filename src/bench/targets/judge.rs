//! Measurements against targets: one row for each thing that a target asks for.

use super::super::op::{Collective, DType};
use super::super::result::{Report, Timing, median};
use super::{Goal, Target, Targets};
use serde::Serialize;

/// How a row came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// The target is reached.
    Pass,
    /// The target is missed, or the data were wrong.
    Fail,
    /// Something that is needed to judge is not known.
    Unknown,
    /// The target is for another number of ranks or nodes.
    Skipped,
}

/// The bandwidth that shares of the link are taken of.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Link {
    /// In one direction, in 10^9 bytes a second; `None` where it is not known.
    pub gb_per_s: Option<f64>,
    /// Where the number is from, or why there is none.
    pub source: String,
}

/// One thing that a target asks for, and what was measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TargetRow {
    /// The line of the target in its file.
    pub line: usize,
    /// The operation.
    pub operation: Collective,
    /// The element type.
    pub dtype: DType,
    /// The size in bytes.
    pub size_bytes: u64,
    /// The compared figure: `latency_ns`, `algbw_gb_per_s` or `busbw_gb_per_s`.
    pub metric: &'static str,
    /// The target in words.
    pub target: String,
    /// The most of a latency, the least of a bandwidth; `None` where it is not known.
    pub limit: Option<f64>,
    /// The median of what was measured, out of place; `None` where nothing was.
    pub measured: Option<f64>,
    /// How it came out.
    pub verdict: Verdict,
    /// Why it failed, is not known or was skipped.
    pub reason: Option<String>,
}

/// All targets of a file against what was measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Judgement {
    /// The file.
    pub file: String,
    /// Ranks of the run.
    pub ranks: u32,
    /// Nodes of the run; `None` where nothing was measured.
    pub nodes: Option<u32>,
    /// The link.
    pub link: Link,
    /// In the file's order.
    pub rows: Vec<TargetRow>,
}

impl Judgement {
    /// How many rows came out like this.
    #[must_use]
    pub fn count(&self, verdict: Verdict) -> usize {
        self.rows.iter().filter(|r| r.verdict == verdict).count()
    }
}

/// The measurement of one target.
#[derive(Debug, Clone, Copy)]
struct Measured {
    time_ns: f64,
    algbw_gb_per_s: f64,
    busbw_gb_per_s: f64,
    wrong: u64,
}

/// Judges every target. `not_measured` says why measurements are missing, where something ended them early.
#[must_use]
pub fn judge(
    targets: &Targets,
    reports: &[Report],
    ranks: u32,
    link: Link,
    not_measured: Option<&str>,
) -> Judgement {
    let nodes = reports.first().map(|r| r.environment.nodes());
    let mut rows = Vec::new();
    for t in targets.all() {
        let skipped = t.why_skipped(ranks, nodes);
        let measured = if skipped.is_none() { measured(t, reports, ranks) } else { None };
        for goal in &t.goals {
            let mut row = blank(t, *goal, &link);
            (row.verdict, row.reason) = match (&skipped, &measured) {
                (Some(why), _) => (Verdict::Skipped, Some(why.clone())),
                (None, None) => (Verdict::Unknown, Some(not_measured.unwrap_or("not measured").to_owned())),
                (None, Some(m)) => {
                    row.measured = Some(m.of(*goal)).filter(|v| v.is_finite() && *v > 0.0);
                    decide(&row, *goal, m)
                }
            };
            rows.push(row);
        }
    }
    Judgement { file: targets.origin().to_owned(), ranks, nodes, link, rows }
}

/// The row before anything is known of its measurement.
fn blank(t: &Target, goal: Goal, link: &Link) -> TargetRow {
    let (metric, limit, target) = match goal {
        Goal::MaxLatency { ns } => ("latency_ns", Some(ns), format!("latency <= {}", time_text(ns))),
        Goal::AboutLatency { ns, tolerance } => (
            "latency_ns",
            Some(ns * (1.0 + tolerance)),
            format!("latency about {} + {}", time_text(ns), percent(tolerance)),
        ),
        Goal::MinAlgbw { gb_per_s } => {
            ("algbw_gb_per_s", Some(gb_per_s), format!("algbw >= {}", gb_text(gb_per_s)))
        }
        Goal::MinBusbw { gb_per_s } => {
            ("busbw_gb_per_s", Some(gb_per_s), format!("busbw >= {}", gb_text(gb_per_s)))
        }
        Goal::MinLinkShare { share } => (
            "busbw_gb_per_s",
            link.gb_per_s.map(|l| l * share),
            format!("busbw >= {} of link", percent(share)),
        ),
    };
    TargetRow {
        line: t.line,
        operation: t.collective,
        dtype: t.dtype,
        size_bytes: t.size_bytes,
        metric,
        target,
        limit,
        measured: None,
        verdict: Verdict::Unknown,
        reason: None,
    }
}

/// The verdict on a row that was measured.
fn decide(row: &TargetRow, goal: Goal, m: &Measured) -> (Verdict, Option<String>) {
    if m.wrong > 0 {
        return (Verdict::Fail, Some(format!("{} wrong elements", m.wrong)));
    }
    let Some(measured) = row.measured else {
        return (Verdict::Unknown, Some("no time was measured".to_owned()));
    };
    let Some(limit) = row.limit else {
        return (Verdict::Unknown, Some("the link is not known".to_owned()));
    };
    let is_latency = goal.expected_ns().is_some();
    let missed_by = if is_latency { measured / limit - 1.0 } else { 1.0 - measured / limit };
    if missed_by <= 0.0 {
        return (Verdict::Pass, None);
    }
    let how = if is_latency { "too slow" } else { "too little" };
    // A miss that rounds to nothing is a miss.
    let by = if missed_by < 1e-3 { "less than 0.1 %".to_owned() } else { percent(missed_by) };
    (Verdict::Fail, Some(format!("{by} {how}")))
}

impl Measured {
    fn of(&self, goal: Goal) -> f64 {
        match goal {
            Goal::MaxLatency { .. } | Goal::AboutLatency { .. } => self.time_ns,
            Goal::MinAlgbw { .. } => self.algbw_gb_per_s,
            Goal::MinBusbw { .. } | Goal::MinLinkShare { .. } => self.busbw_gb_per_s,
        }
    }
}

/// The medians over all reports that have the target's operation, type and size.
fn measured(t: &Target, reports: &[Report], ranks: u32) -> Option<Measured> {
    let shape = t.collective.shape(t.size_bytes, t.dtype, ranks)?;
    let of = |r: &&Report| r.settings.collective == t.collective && r.settings.dtype == t.dtype;
    let sizes = reports.iter().filter(of).flat_map(|r| &r.sizes);
    let sizes: Vec<_> = sizes.filter(|s| s.size_bytes == shape.size_bytes).collect();
    let middle =
        |each: fn(&Timing) -> f64| median(&sizes.iter().map(|s| each(&s.out_of_place)).collect::<Vec<_>>());
    let timings = || sizes.iter().flat_map(|s| std::iter::once(&s.out_of_place).chain(&s.in_place));
    (!sizes.is_empty()).then(|| Measured {
        time_ns: middle(|t| t.time_ns),
        algbw_gb_per_s: middle(|t| t.algbw_gb_per_s),
        busbw_gb_per_s: middle(|t| t.busbw_gb_per_s),
        wrong: timings().filter_map(|t| t.wrong).sum(),
    })
}

/// A number without zeros that say nothing.
fn short(n: f64) -> String {
    let text = format!("{n:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// A time in the unit that people would take.
fn time_text(ns: f64) -> String {
    match ns {
        n if n >= 1e9 => format!("{} s", short(n / 1e9)),
        n if n >= 1e6 => format!("{} ms", short(n / 1e6)),
        n if n >= 1e3 => format!("{} us", short(n / 1e3)),
        n => format!("{} ns", short(n)),
    }
}

fn gb_text(gb_per_s: f64) -> String {
    format!("{} GB/s", short(gb_per_s))
}

fn percent(share: f64) -> String {
    format!("{} %", short((share * 1000.0).round() / 10.0))
}
