//! New measurements against saved ones: the change of each operation and size in per cent, and how sure it is.
//!
//! A change counts where it is larger than a threshold and the Mann-Whitney test of the rounds is confident of it.

use super::measurements::Measurements;
use super::op::{Collective, DType, Placement, RedOp};
use super::rank_test;
use super::result::{Report, Timing, median};
use super::version_text;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// From this confidence on a change counts.
pub const CONFIDENCE: f64 = 0.95;

/// How a row came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Trend {
    /// Slower by more than the threshold, with confidence.
    Regression,
    /// Faster by more than the threshold, with confidence.
    Improvement,
    /// Changed by no more than the threshold.
    WithinThreshold,
    /// Changed by more than the threshold, and chance explains it as well.
    NotConfident,
    /// There are too few rounds to say anything.
    Unknown,
    /// The saved file has nothing to compare with.
    NotComparable,
}

/// One operation at one size.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Change {
    /// The operation.
    pub operation: Collective,
    /// The element type.
    pub dtype: DType,
    /// Ranks that took part.
    pub ranks: u32,
    /// The size in bytes.
    pub size_bytes: u64,
    /// True where the result is over the input.
    pub in_place: bool,
    /// The median of the saved samples, in ns.
    pub old_ns: Option<f64>,
    /// The median of the new ones.
    pub new_ns: Option<f64>,
    /// The number of samples that were saved.
    pub old_samples: usize,
    /// The number of new samples.
    pub new_samples: usize,
    /// Ratio of the medians less one: 0.05 is 5 % slower.
    pub change: Option<f64>,
    /// Bounds of the change with a confidence of 95 %.
    pub interval: Option<(f64, f64)>,
    /// How sure it is that something changed, 0 to 1: one less the two-sided p-value of the Mann-Whitney test.
    pub confidence: Option<f64>,
    /// How it came out.
    pub trend: Trend,
    /// Why it is not known or not comparable.
    pub reason: Option<String>,
}

/// A difference of two measurements that are compared all the same.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// The property.
    pub what: String,
    /// The saved value.
    pub old: String,
    /// The value now.
    pub new: String,
}

/// All changes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Changes {
    /// Where the saved measurements are from.
    pub file: String,
    /// The share from which on a change counts.
    pub threshold: f64,
    /// Other differences, which may be the cause.
    pub differences: Vec<Difference>,
    /// In the order of the new measurements.
    pub rows: Vec<Change>,
    /// Rows that were saved and not measured now.
    pub not_measured: usize,
}

impl Changes {
    /// How many rows came out like this.
    #[must_use]
    pub fn count(&self, trend: Trend) -> usize {
        self.rows.iter().filter(|r| r.trend == trend).count()
    }
}

/// The properties that have to be equal for times to be compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    collective: Collective,
    dtype: DType,
    redop: Option<RedOp>,
    ranks: usize,
    nodes: u32,
    graph: Option<u32>,
    batch: u32,
    blocking: bool,
    size_bytes: u64,
    placement: Placement,
}

/// A property of a key, with words for what a saved file has of it.
type Property = (fn(&Key, &Key) -> bool, fn(&Key) -> String);

/// From the coarse to the fine: the first that nothing saved has is the reason why a row is not comparable.
const PROPERTIES: &[Property] = &[
    (|a, b| a.collective == b.collective, |k| k.collective.to_string()),
    (|a, b| a.ranks == b.ranks, |k| format!("ranks: {}", k.ranks)),
    (|a, b| a.nodes == b.nodes, |k| format!("nodes: {}", k.nodes)),
    (|a, b| a.dtype == b.dtype, |k| k.dtype.to_string()),
    (|a, b| a.redop == b.redop, |k| k.redop.map_or("no reduction".to_owned(), |r| r.to_string())),
    (
        |a, b| (a.graph, a.batch, a.blocking) == (b.graph, b.batch, b.blocking),
        |k| match k {
            Key { graph: Some(n), batch, .. } => format!("graphs of {n} operations, groups of {batch}"),
            Key { blocking: true, batch, .. } => format!("blocking groups of {batch}"),
            Key { batch, .. } => format!("groups of {batch}"),
        },
    ),
    (|a, b| a.size_bytes == b.size_bytes, |k| format!("{} bytes", k.size_bytes)),
    (|a, b| a.placement == b.placement, |k| k.placement.to_string()),
];

/// The timings of each key, one of each report, in the order measured.
#[derive(Debug, Default)]
struct Groups<'a> {
    all: Vec<(Key, Vec<&'a Timing>)>,
    at: HashMap<Key, usize>,
}

impl<'a> Groups<'a> {
    fn add(&mut self, key: Key, timing: &'a Timing) {
        let at = *self.at.entry(key).or_insert(self.all.len());
        match self.all.get_mut(at) {
            Some((_, timings)) => timings.push(timing),
            None => self.all.push((key, vec![timing])),
        }
    }

    fn get(&self, key: &Key) -> Option<&[&'a Timing]> {
        self.at.get(key).and_then(|at| self.all.get(*at)).map(|(_, timings)| timings.as_slice())
    }
}

/// Compares. `file` says where `old` is from, `threshold` is a share.
#[must_use]
pub fn compare(old: &Measurements, new: &[Report], file: &str, threshold: f64) -> Changes {
    let (saved, fresh) = (groups(&old.reports), groups(new));
    let rows = fresh.all.iter().map(|(key, timings)| match saved.get(key) {
        Some(before) => change(key, &samples(before), &samples(timings), threshold),
        None => blank(key, &[], &samples(timings), Trend::NotComparable, Some(why_missing(key, &saved))),
    });
    Changes {
        file: file.to_owned(),
        threshold,
        differences: differences(&old.reports, new),
        rows: rows.collect(),
        not_measured: saved.all.iter().filter(|(key, _)| fresh.get(key).is_none()).count(),
    }
}

fn groups(reports: &[Report]) -> Groups<'_> {
    let mut all = Groups::default();
    for r in reports {
        let s = &r.settings;
        for size in &r.sizes {
            let key = |placement| Key {
                collective: s.collective,
                dtype: s.dtype,
                redop: s.collective.reduces().then_some(s.redop),
                ranks: r.environment.ranks.len(),
                nodes: r.environment.nodes(),
                graph: s.graph,
                batch: s.batch,
                blocking: s.blocking,
                size_bytes: size.size_bytes,
                placement,
            };
            all.add(key(Placement::OutOfPlace), &size.out_of_place);
            if let Some(timing) = &size.in_place {
                all.add(key(Placement::InPlace), timing);
            }
        }
    }
    all
}

/// One sample a round, its median. Repeats of one round share its communicators and clocks: on 2 x H100 the test of repeats was
/// confident of 5.7 % between two runs in which nothing differed, and of 50 % for the first sizes of a cold GPU.
fn samples(timings: &[&Timing]) -> Vec<f64> {
    timings.iter().map(|t| t.time_ns).filter(|t| t.is_finite() && *t > 0.0).collect()
}

fn blank(key: &Key, old: &[f64], new: &[f64], trend: Trend, reason: Option<String>) -> Change {
    let middle = |samples: &[f64]| (!samples.is_empty()).then(|| median(samples));
    Change {
        operation: key.collective,
        dtype: key.dtype,
        ranks: u32::try_from(key.ranks).unwrap_or(u32::MAX),
        size_bytes: key.size_bytes,
        in_place: key.placement == Placement::InPlace,
        old_ns: middle(old),
        new_ns: middle(new),
        old_samples: old.len(),
        new_samples: new.len(),
        change: None,
        interval: None,
        confidence: None,
        trend,
        reason,
    }
}

fn change(key: &Key, old: &[f64], new: &[f64], threshold: f64) -> Change {
    let mut row = blank(key, old, new, Trend::Unknown, None);
    row.change = row.old_ns.zip(row.new_ns).map(|(old, new)| new / old - 1.0);
    let (Some(change), Some(test)) = (row.change, rank_test::compare(old, new)) else {
        let count = format!("samples: {} saved, {} new", old.len(), new.len());
        row.reason = Some(format!("{count}; a comparison needs several rounds of each (--rounds)"));
        return row;
    };
    row.confidence = Some(test.confidence);
    row.interval = test.interval.map(|(low, high)| (low - 1.0, high - 1.0));
    row.trend = if test.confidence_max < CONFIDENCE {
        let most = test.confidence_max * 100.0;
        row.reason = Some(format!(
            "{} and {} samples give {most:.0} % at most; take more (--rounds)",
            old.len(),
            new.len()
        ));
        Trend::Unknown
    } else if change.abs() <= threshold {
        Trend::WithinThreshold
    } else if test.confidence < CONFIDENCE {
        Trend::NotConfident
    } else if change > 0.0 {
        Trend::Regression
    } else {
        Trend::Improvement
    };
    row
}

/// The first property by which nothing saved is like this key, and what was saved in its place.
fn why_missing(key: &Key, saved: &Groups<'_>) -> String {
    let mut like: Vec<&Key> = saved.all.iter().map(|(k, _)| k).collect();
    for (is_equal, words) in PROPERTIES {
        let rest: Vec<&Key> = like.iter().copied().filter(|k| is_equal(k, key)).collect();
        if rest.is_empty() {
            let mut there: Vec<String> = Vec::new();
            for text in like.iter().map(|k| words(k)) {
                if !there.contains(&text) {
                    there.push(text);
                }
            }
            let more = if there.len() > 3 { ", ..." } else { "" };
            there.truncate(3);
            return format!("{}, and the saved file has {}{more}", words(key), there.join(", "));
        }
        like = rest;
    }
    "not in the saved file".to_owned()
}

/// A fact about a measurement that may differ, with its values.
type Fact = (&'static str, fn(&Report) -> Vec<String>);

const FACTS: &[Fact] = &[
    ("NCCL", |r| vec![version_text(r.environment.nccl_version)]),
    ("GPU", |r| r.environment.ranks.iter().map(|r| r.name.clone()).collect()),
    ("host", |r| r.environment.ranks.iter().map(|r| r.host.clone()).collect()),
    ("CUDA driver API", |r| {
        let v = r.environment.cuda_driver_version;
        vec![format!("{}.{}", v / 1000, v % 1000 / 10)]
    }),
    ("ringwatch", |r| vec![r.environment.ringwatch_version.clone()]),
    ("--iters", |r| vec![r.settings.iters.to_string()]),
    ("--warmup-iters", |r| vec![r.settings.warmup_iters.to_string()]),
    ("--millis", |r| vec![r.settings.millis.map_or("-".to_owned(), |m| m.to_string())]),
    ("--pin", |r| vec![r.settings.pin.to_string()]),
];

/// The differences of measurements that are compared: versions, GPUs, hosts, variables, and how each was measured.
fn differences(old: &[Report], new: &[Report]) -> Vec<Difference> {
    let mut all = Vec::new();
    let mut differ = |what: &str, old: String, new: String| {
        if old != new {
            all.push(Difference { what: what.to_owned(), old, new });
        }
    };
    for (what, of) in FACTS {
        let values = |reports: &[Report]| {
            let values: BTreeSet<String> = reports.iter().flat_map(of).collect();
            values.into_iter().collect::<Vec<_>>().join(", ")
        };
        differ(what, values(old), values(new));
    }
    let variables = |reports: &[Report]| -> BTreeMap<String, String> {
        reports.iter().flat_map(|r| r.environment.variables.clone()).collect()
    };
    let (before, now) = (variables(old), variables(new));
    for name in before.keys().chain(now.keys()).collect::<BTreeSet<_>>() {
        let value = |of: &BTreeMap<String, String>| of.get(name).cloned().unwrap_or("-".to_owned());
        differ(name, value(&before), value(&now));
    }
    all
}

#[cfg(test)]
#[path = "regression_tests.rs"]
mod tests;
