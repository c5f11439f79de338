//! The samples by which two jobs are compared.
//!
//! Values are kept in their order; `diff` cuts them into parts.

use super::History;
use crate::join::{Finished, FinishedSink, Join};
use crate::model::{Algo, Func, Proto, Snapshot};
use serde::Serialize;
use std::collections::BTreeMap;

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

/// Values of a job, in their order. Shares are from 0 to 1.
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

/// A class: function, ranks, size class, algorithm and protocol.
type Class = (Func, Option<u32>, Option<u8>, Option<Algo>, Option<Proto>);

/// Collects the samples of a job.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Profiler {
    history: History,
    classes: BTreeMap<Class, Values>,
}

impl FinishedSink for Profiler {
    fn end(&mut self, open: &[Finished], join: &Join, now_ns: u64) {
        self.history.end(open, join, now_ns);
    }

    fn take(&mut self, operations: &[Finished], join: &Join, now_ns: u64) {
        self.history.take(operations, join, now_ns);
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
            profile.classes.insert(key, values.kept.clone());
        }
        // Ranks of several jobs have the same numbers.
        let name = |job: usize, label: &str| match s.jobs.get(job).and_then(|j| j.name.as_deref()) {
            Some(name) if s.jobs.len() > 1 => format!("{label} of {name}"),
            _ => label.to_owned(),
        };
        for (job, charts) in self.history.charts(s, join).into_iter().enumerate() {
            for rank in charts.ranks {
                let known = |shares: &[Option<f32>]| shares.iter().flatten().map(|s| f64::from(*s)).collect();
                profile.waited.insert(name(job, &rank.label), known(&rank.waited));
                profile.held.insert(name(job, &rank.label), known(&rank.held));
            }
        }
        for row in s.steps.iter().flatten() {
            let job = s.jobs.iter().position(|j| j.sums.comms.contains(&row.comm)).unwrap_or(0);
            let on_gpu = row.series.iter().any(|p| p.gpu_ns.is_some());
            let times = row.series.iter().filter_map(|p| if on_gpu { p.gpu_ns } else { Some(p.host_ns) });
            let label =
                row.job_rank.map_or_else(|| format!("{}:{}", row.host, row.pid), |rank| rank.to_string());
            profile.steps.insert(name(job, &label), times.map(|ns| ns / 1e6).collect());
        }
        profile
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_kept_evenly_over_the_job() {
        let mut values = Values::default();
        (0..1_000_000).for_each(|n| values.add(f64::from(n)));
        assert!(values.kept.len() < VALUES_MAX && values.kept.len() >= VALUES_MAX / 4);
        let step = values.kept[1] - values.kept[0];
        assert!(values.kept.windows(2).all(|w| (w[1] - w[0] - step).abs() < 1e-9), "every one in so many");
        assert!(values.kept[values.kept.len() - 1] > 1e6 - 2.0 * step);
    }
}
