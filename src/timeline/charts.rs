//! What the charts of a report show of one job. Absent is `null`, never 0.

use super::bins::{BINS_MAX, Scale};
use super::ended_ns;
use super::history::{History, Usage};
use super::latency::Latency;
use super::slowest::Slow;
use crate::join::{FinishedPart, Join, busbw};
use crate::model::{CommId, JobRow, RankRow, Snapshot, StepPoint};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// Rows of ranks that a chart has; of more, neighbors share a row.
const RANK_ROWS: usize = 256;
/// The slowest operations of a job that are shown.
const SLOWEST: usize = 24;
/// Classes of operations of which latencies are shown: those with the most operations.
const LATENCIES: usize = 24;
/// Processes of which step times are shown.
const STEP_SERIES: usize = 8;

/// The charts of one job.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct JobCharts {
    /// The beginning of the first bin, Unix time in ms.
    pub begin_ms: Option<f64>,
    /// The width of a bin in ms.
    pub bin_ms: f64,
    /// The number of bins.
    pub bins: usize,
    /// The ranks' times by bin.
    pub ranks: Vec<RankSeries>,
    /// Step times.
    pub steps: Vec<StepSeries>,
    /// Bandwidth by size.
    pub bandwidth: Vec<Bandwidth>,
    /// The bandwidth that a baseline expects, for the operations of the job.
    pub expected: Vec<Bandwidth>,
    /// Latencies by class.
    pub latency: Vec<LatencyChart>,
    /// The operations that took longest, the longest one first.
    pub slowest: Vec<SlowOperation>,
}

/// One rank, or several that are neighbors. Each bin has a share of its time, 0 to 1; of several ranks the greatest. Where some of a
/// bin's operations are timed, these stand for all of them.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RankSeries {
    /// The rank or ranks in the job, or host and process where no rank is known.
    pub label: String,
    /// In NCCL's kernels.
    pub in_nccl: Vec<Option<f32>>,
    /// In them, waiting for others.
    pub waited: Vec<Option<f32>>,
    /// While others waited for it, as far as that is known.
    pub held: Vec<Option<f32>>,
}

/// The steps of a process.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StepSeries {
    /// The rank in the job, or host and process.
    pub label: String,
    /// True where these are times between kernels, false where they are times between calls of the host.
    pub on_gpu: bool,
    /// When, Unix time in ms, and the mean time of the steps there, in ms.
    pub points: Vec<(f64, f64)>,
}

/// A class of operations of a communicator.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Bandwidth {
    /// The function.
    pub operation: &'static str,
    /// Ranks of the communicator.
    pub ranks: Option<u32>,
    /// Algorithm and protocol.
    pub algorithm: Option<String>,
    /// Mean message size in bytes.
    pub bytes: f64,
    /// Bus bandwidth at the median time, bytes a second.
    pub busbw: f64,
    /// Operations.
    pub count: u64,
}

/// The transfer times of a class of operations, in all communicators of the job.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LatencyChart {
    /// The function.
    pub operation: &'static str,
    /// The least size of the class in bytes.
    pub from_bytes: Option<u64>,
    /// The lower bound of each bucket in µs, and its count. A bucket is a quarter of an octave.
    pub buckets: Vec<(f64, u64)>,
}

/// An operation that took long. Times are in ms from its beginning.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SlowOperation {
    /// The communicator's name or id.
    pub communicator: String,
    /// The function; of a transfer with its two ranks.
    pub operation: String,
    /// Its issue order.
    pub order: u64,
    /// Message size.
    pub bytes: Option<u64>,
    /// Algorithm and protocol.
    pub algorithm: Option<String>,
    /// Its beginning, Unix time in ms.
    pub began_ms: Option<f64>,
    /// To the end of its last kernel.
    pub took_ms: f64,
    /// The time of the rank that came last.
    pub transfer_ms: Option<f64>,
    /// The rank that came last, and by how much.
    pub late: Option<(u32, f64)>,
    /// Its ranks; `parts` has 64 of them at most.
    pub ranks: usize,
    /// By rank.
    pub parts: Vec<SlowPart>,
}

/// One rank's part.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SlowPart {
    /// The rank in the communicator.
    pub rank: u32,
    /// NCCL issued it.
    pub issued_ms: Option<f64>,
    /// Its kernel started.
    pub started_ms: Option<f64>,
    /// The part of the kernel's time in which it waited for others.
    pub waited_ms: Option<f64>,
    /// Its kernel ended.
    pub ended_ms: Option<f64>,
}

impl History {
    /// Operations that no chart shows: they were finished faster than they could be counted, or their process is beyond the limit.
    pub fn left_out(&self) -> u64 {
        self.dropped.saturating_add(self.beyond)
    }

    /// The charts of each job of a snapshot, in its order.
    pub fn charts(&self, s: &Snapshot, join: &Join) -> Vec<JobCharts> {
        s.jobs.iter().map(|job| self.job(s, job, join)).collect()
    }

    fn job(&self, s: &Snapshot, job: &JobRow, join: &Join) -> JobCharts {
        let own: BTreeSet<CommId> = job.sums.comms.iter().copied().collect();
        let unix_ms = |ns: u64| join.unix_ns(ns).map(|ns| ns as f64 / 1e6);
        let mut charts = JobCharts {
            steps: steps(s, &own, unix_ms),
            bandwidth: bandwidth(s, &own),
            latency: self.latencies(&own),
            slowest: self.slow(&own, unix_ms),
            ..JobCharts::default()
        };
        if let Some(scale) = self.scale {
            let bins = self.until_ns.saturating_sub(scale.begin_ns).div_ceil(scale.width_ns);
            charts.bins = usize::try_from(bins).unwrap_or(BINS_MAX).min(BINS_MAX);
            charts.begin_ms = unix_ms(scale.begin_ns);
            charts.bin_ms = scale.width_ns as f64 / 1e6;
            charts.ranks = self.ranks(s, &own, join, scale, charts.bins);
        }
        charts
    }

    fn ranks(
        &self,
        s: &Snapshot,
        own: &BTreeSet<CommId>,
        join: &Join,
        scale: Scale,
        bins: usize,
    ) -> Vec<RankSeries> {
        let known: BTreeMap<(&str, u32), &RankRow> =
            s.ranks.iter().filter(|r| own.contains(&r.comm)).map(|r| ((&*r.host, r.pid), r)).collect();
        let mut rows: Vec<((Option<u32>, String), &Usage)> = Vec::new();
        for (segment, usage) in self.processes.iter().filter(|(_, u)| !u.comms.is_disjoint(own)) {
            let Some(process) = join.process(*segment) else { continue };
            let (host, pid) = (&*process.record.host, process.record.pid);
            let rank = known.get(&(host, pid)).and_then(|r| r.job_rank).or(process.record.job.rank);
            rows.push(((rank, format!("{host}:{pid}")), usage));
        }
        rows.sort_by(|a, b| a.0.cmp(&b.0));
        let share = rows.len().div_ceil(RANK_ROWS).max(1);
        let label = |(rank, process): &(Option<u32>, String)| {
            rank.map_or_else(|| process.clone(), |rank| rank.to_string())
        };
        let row = |of: &[((Option<u32>, String), &Usage)]| {
            let greatest = |shares: &dyn Fn(&Usage) -> Vec<Option<f32>>| {
                let mut out: Vec<Option<f32>> = vec![None; bins];
                for (_, usage) in of {
                    for (most, share) in out.iter_mut().zip(shares(usage)) {
                        let rounded = share.map(|share| (share * 1e3).round() / 1e3);
                        *most = [*most, rounded].into_iter().flatten().max_by(f32::total_cmp);
                    }
                }
                out
            };
            let name = match of {
                [(one, _)] => label(one),
                [(first, _), .., (last, _)] => format!("{}-{}", label(first), label(last)),
                [] => String::new(),
            };
            RankSeries {
                label: name,
                in_nccl: greatest(&|u| u.shares(&u.in_nccl, scale, bins)),
                waited: greatest(&|u| u.waited_shares(scale, bins)),
                held: greatest(&|u| u.held_shares(scale, bins)),
            }
        };
        rows.chunks(share).map(row).collect()
    }

    fn latencies(&self, own: &BTreeSet<CommId>) -> Vec<LatencyChart> {
        let mut classes: BTreeMap<(&'static str, Option<u8>), Latency> = BTreeMap::new();
        for ((_, func, size), latency) in self.latency.iter().filter(|((comm, ..), _)| own.contains(comm)) {
            classes.entry((func.as_str(), *size)).or_default().add_all(latency);
        }
        let chart = |((operation, size), latency): (&(&'static str, Option<u8>), &Latency)| LatencyChart {
            operation,
            from_bytes: size.and_then(|class| 1_u64.checked_shl(u32::from(class))),
            buckets: latency.buckets(),
        };
        let mut charts: Vec<LatencyChart> = classes.iter().map(chart).collect();
        charts.sort_by_key(|c| std::cmp::Reverse(c.buckets.iter().map(|(_, n)| n).sum::<u64>()));
        charts.truncate(LATENCIES);
        charts
    }

    fn slow(&self, own: &BTreeSet<CommId>, unix_ms: impl Fn(u64) -> Option<f64>) -> Vec<SlowOperation> {
        let own = self.slowest.iter().filter(|(comm, _)| own.contains(comm));
        let mut all: Vec<&Slow> = own.flat_map(|(_, slowest)| slowest.iter()).collect();
        all.sort_by_key(|op| std::cmp::Reverse(op.took_ns));
        all.truncate(SLOWEST);
        all.into_iter().map(|op| slow_operation(op, &unix_ms)).collect()
    }
}

fn slow_operation(op: &Slow, unix_ms: impl Fn(u64) -> Option<f64>) -> SlowOperation {
    let ms = |ns: u64| ns as f64 / 1e6;
    let since = |at_ns: u64| (at_ns as f64 - op.began_ns as f64) / 1e6;
    let part = |p: &FinishedPart| SlowPart {
        rank: p.rank.0,
        issued_ms: p.issued_ns.map(since),
        started_ms: p.started_ns.map(since),
        waited_ms: p.waiting_ns.map(ms),
        ended_ms: ended_ns(p).map(since),
    };
    SlowOperation {
        communicator: op.communicator.clone(),
        operation: op.operation.clone(),
        order: op.order,
        bytes: op.bytes,
        algorithm: algorithm(op.algorithm.map(|a| a.as_str()), op.protocol.map(|p| p.as_str())),
        began_ms: unix_ms(op.began_ns),
        took_ms: ms(op.took_ns),
        transfer_ms: op.transfer_ns.map(ms),
        late: op.late.map(|(rank, by_ns)| (rank.0, ms(by_ns))),
        ranks: op.ranks,
        parts: op.parts.iter().map(part).collect(),
    }
}

/// `RING/SIMPLE`, as far as it is known.
fn algorithm(algorithm: Option<&str>, protocol: Option<&str>) -> Option<String> {
    match (algorithm, protocol) {
        (Some(a), Some(p)) => Some(format!("{a}/{p}")),
        (a, p) => a.or(p).map(str::to_owned),
    }
}

/// The classes whose bandwidth is known. Several communicators have points of their own.
fn bandwidth(s: &Snapshot, own: &BTreeSet<CommId>) -> Vec<Bandwidth> {
    let ranks: BTreeMap<CommId, Option<u32>> = s.comms.iter().map(|c| (c.id, c.ranks)).collect();
    let point = |class: &crate::model::ClassRow| {
        let bytes = class.bytes? as f64 / class.count.max(1) as f64;
        let ranks = ranks.get(&class.comm).copied().flatten();
        // The size is the mean one, and so is the bandwidth.
        let time_ns = class.p50_ns?;
        let busbw = ranks.and_then(|n| busbw(class.func, bytes as u64, n, time_ns)).or(class.busbw)?;
        Some(Bandwidth {
            operation: class.func.as_str(),
            ranks,
            algorithm: algorithm(class.algo.map(|a| a.as_str()), class.proto.map(|p| p.as_str())),
            bytes,
            busbw,
            count: class.count,
        })
    };
    let own = s.classes.iter().filter(|class| own.contains(&class.comm));
    own.filter_map(point).collect()
}

/// The steps of the first processes.
fn steps(s: &Snapshot, own: &BTreeSet<CommId>, unix_ms: impl Fn(u64) -> Option<f64>) -> Vec<StepSeries> {
    let rows = s.steps.iter().flatten().filter(|row| own.contains(&row.comm));
    let series = |row: &crate::model::StepRow| {
        let on_gpu = row.series.iter().any(|p| p.gpu_ns.is_some());
        let time = |p: &StepPoint| if on_gpu { p.gpu_ns } else { Some(p.host_ns) };
        let point = |p: &StepPoint| Some((unix_ms(p.at_ns)?, time(p)? / 1e6));
        StepSeries {
            label: row.job_rank.map_or_else(|| format!("{}:{}", row.host, row.pid), |rank| rank.to_string()),
            on_gpu,
            points: row.series.iter().filter_map(point).collect(),
        }
    };
    rows.take(STEP_SERIES).map(series).collect()
}
