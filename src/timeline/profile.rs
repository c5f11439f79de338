//! The samples by which two jobs are compared.
//!
//! Operations that follow each other resemble each other, so that thousands of them prove little. A job is cut into 32 parts of equal
//! length, and the median of each part is one sample.

use super::History;
use crate::join::{Finished, FinishedSink, Join};
use crate::model::{Algo, Func, Proto, Snapshot};
use serde::Serialize;
use std::collections::BTreeMap;

/// Parts of a job.
const PARTS: usize = 32;
/// Values that are kept in their order; of more only every second one, of these again every second one, and so on.
const VALUES_MAX: usize = 4_096;
/// Classes of operations that are kept; more are left out.
const CLASSES_MAX: usize = 4_096;

/// Operations that are compared with each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct ClassProfileKey {
    /// The function.
    pub operation: &'static str,
    /// Ranks of the communicator.
    pub ranks: Option<u32>,
    /// The least size of the class in bytes; the next class begins at twice that.
    pub from_bytes: Option<u64>,
    /// Algorithm.
    pub algorithm: Option<&'static str>,
    /// Protocol.
    pub protocol: Option<&'static str>,
}

/// Samples of a job. Shares are from 0 to 1.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Profile {
    /// Step times in ms, by rank in the job, or host and process.
    pub steps: BTreeMap<String, Vec<f64>>,
    /// Transfer times in µs.
    pub classes: BTreeMap<ClassProfileKey, Vec<f64>>,
    /// The share of time that a rank waited for others.
    pub waited: BTreeMap<String, Vec<f64>>,
    /// The share of time in which others waited for it.
    pub held: BTreeMap<String, Vec<f64>>,
}

/// Values in their order, of a bounded number.
#[derive(Debug, Clone, Default, PartialEq)]
struct Values {
    kept: Vec<f64>,
    /// One of `1 << halved` values is kept.
    halved: u32,
    seen: u64,
}

impl Values {
    fn add(&mut self, value: f64) {
        if self.seen.is_multiple_of(1 << self.halved) {
            self.kept.push(value);
        }
        self.seen += 1;
        if self.kept.len() >= VALUES_MAX {
            self.kept = self.kept.iter().step_by(2).copied().collect();
            self.halved += 1;
        }
    }
}

/// The median of each part of some values.
fn medians(values: &[f64]) -> Vec<f64> {
    let length = values.len().div_ceil(PARTS).max(1);
    let median = |part: &[f64]| {
        let mut sorted = part.to_vec();
        sorted.sort_by(f64::total_cmp);
        sorted[sorted.len() / 2]
    };
    values.chunks(length).map(median).collect()
}

/// A class: function, ranks, size class, algorithm and protocol.
type Class = (Func, Option<u32>, Option<u8>, Option<Algo>, Option<Proto>);

/// Collects the samples of a job.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Profiler {
    history: History,
    classes: BTreeMap<Class, Values>,
}

impl FinishedSink for Profiler {
    fn take(&mut self, operations: &[Finished], join: &Join) {
        self.history.take(operations, join);
        for op in operations {
            let Some(transfer_ns) = op.transfer_ns else { continue };
            let key = (op.func, op.ranks, op.size_class, op.operation.algo, op.operation.proto);
            if self.classes.len() < CLASSES_MAX || self.classes.contains_key(&key) {
                self.classes.entry(key).or_default().add(transfer_ns as f64 / 1e3);
            }
        }
    }
}

impl Profiler {
    /// The samples, once all was received.
    pub fn profile(&self, s: &Snapshot, join: &Join) -> Profile {
        let mut profile = Profile::default();
        for ((func, ranks, size, algo, proto), values) in &self.classes {
            let key = ClassProfileKey {
                operation: func.as_str(),
                ranks: *ranks,
                from_bytes: size.and_then(|class| 1_u64.checked_shl(u32::from(class))),
                algorithm: algo.map(|a| a.as_str()),
                protocol: proto.map(|p| p.as_str()),
            };
            profile.classes.insert(key, medians(&values.kept));
        }
        for charts in self.history.charts(s, join) {
            for rank in charts.ranks {
                let known = |shares: &[Option<f32>]| -> Vec<f64> {
                    shares.iter().flatten().map(|share| f64::from(*share)).collect()
                };
                profile.waited.insert(rank.label.clone(), means(&known(&rank.waited)));
                profile.held.insert(rank.label, means(&known(&rank.held)));
            }
        }
        for row in s.steps.iter().flatten() {
            let on_gpu = row.series.iter().any(|p| p.gpu_ns.is_some());
            let times = row.series.iter().filter_map(|p| if on_gpu { p.gpu_ns } else { Some(p.host_ns) });
            let times: Vec<f64> = times.map(|ns| ns / 1e6).collect();
            let name =
                row.job_rank.map_or_else(|| format!("{}:{}", row.host, row.pid), |rank| rank.to_string());
            profile.steps.insert(name, medians(&times));
        }
        profile
    }
}

/// The mean of each part of some values.
fn means(values: &[f64]) -> Vec<f64> {
    let length = values.len().div_ceil(PARTS).max(1);
    values.chunks(length).map(|part| part.iter().sum::<f64>() / part.len() as f64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_kept_evenly_over_the_job_and_cut_into_parts() {
        let mut values = Values::default();
        (0..1_000_000).for_each(|n| values.add(f64::from(n)));
        assert!(values.kept.len() < VALUES_MAX && values.kept.len() >= VALUES_MAX / 4);
        let parts = medians(&values.kept);
        assert!((parts.len() as i64 - 32).abs() <= 1, "{}", parts.len());
        for (n, median) in parts.iter().enumerate() {
            let is = (n as f64 + 0.5) / parts.len() as f64 * 1e6;
            assert!((median - is).abs() < 2e4, "{n}: {median}");
        }
        assert_eq!(medians(&[]), [] as [f64; 0]);
        assert_eq!(medians(&[3.0]), [3.0]);
    }
}
