//! The result of a benchmark; `ringwatch bench --json` prints it.

use super::cost::{CostPlan, PhaseTimes};
use super::op::{Collective, DType, RedOp};
use super::sizes::Step;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// Version of the JSON of [`Report`] and of [`super::Comparison`]. A field that goes or changes its meaning
/// raises it; a new field does not.
pub const SCHEMA: u32 = 1;

/// The settings of a measurement.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// The operation that is measured.
    pub collective: Collective,
    /// The element type.
    pub dtype: DType,
    /// The reduction, where values are reduced.
    pub redop: RedOp,
    /// The root, where there is one.
    pub root: u32,
    /// The smallest size.
    pub min_bytes: u64,
    /// The largest size.
    pub max_bytes: u64,
    /// From one size to the next.
    pub step: Step,
    /// The sizes themselves, ascending, in place of a step from the smallest to the largest.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sizes: Vec<u64>,
    /// Operations that are timed together (groups of them with `batch`), at least 1.
    pub iters: u32,
    /// Operations before that.
    pub warmup_iters: u32,
    /// Where the operations are to take so many milliseconds in all; `iters` is the most then.
    #[serde(default)]
    pub millis: Option<u32>,
    /// Results are compared with what they must be.
    pub check: bool,
    /// Threads a process; 0 is one for each visible GPU.
    pub threads: u32,
    /// GPUs a thread, at least 1.
    pub gpus: u32,
    /// Operations captured into one CUDA graph; none without graphs.
    pub graph: Option<u32>,
    /// Operations in one group, at least 1.
    pub batch: u32,
    /// The host waits after each operation.
    pub blocking: bool,
    /// Each thread gets a CPU of its own once its communicators are made.
    pub pin: bool,
    /// Single operations are timed by CUDA events as well.
    pub events: bool,
    /// How often each size is measured, at least 1; the median counts.
    pub repeat: u32,
    /// Phases with and without events, in place of repeats.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<CostPlan>,
    /// How long work may stand still before everything is aborted.
    pub timeout_s: u64,
    /// NCCL's library, where it is not to be searched for.
    pub nccl: Option<PathBuf>,
    /// The CUDA driver's library, where it is not to be searched for.
    pub cuda: Option<PathBuf>,
}

/// One rank, and the GPU it drives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankInfo {
    /// The rank in the communicator.
    pub rank: u32,
    /// The host's name.
    pub host: String,
    /// The process.
    pub pid: u32,
    /// The thread within the process, from 0.
    pub thread: u32,
    /// CUDA's number of the device in the process.
    pub device: i32,
    /// The device's name.
    pub name: String,
    /// Its PCI address, `0000:1b:00.0` for example.
    pub pci: String,
}

/// The machine of a measurement.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Environment {
    /// Version of this program.
    pub ringwatch_version: String,
    /// NCCL's version code: 22809 is 2.28.9.
    pub nccl_version: i32,
    /// The library's file, on rank 0.
    pub nccl_path: PathBuf,
    /// The driver's CUDA version: 1000 times the major and 10 times the minor number.
    pub cuda_driver_version: i32,
    /// How many processes.
    pub processes: u32,
    /// Every rank, in order.
    pub ranks: Vec<RankInfo>,
    /// Variables of rank 0's process that NCCL or the plugin looks at.
    pub variables: BTreeMap<String, String>,
}

impl Environment {
    /// How many hosts the ranks are on.
    #[must_use]
    pub fn nodes(&self) -> u32 {
        let hosts: BTreeSet<&str> = self.ranks.iter().map(|r| r.host.as_str()).collect();
        u32::try_from(hosts.len()).unwrap_or(u32::MAX)
    }
}

/// Durations of single operations by CUDA events, of one rank. The GPU is kept busy before each for as long as the host
/// takes to issue it; one that is full of something else is not, and there the host's time lies between both events too.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RankEvents {
    /// The rank.
    pub rank: u32,
    /// Between two events with nothing between them, the median of some: what the events themselves take. It is in
    /// every sample.
    pub floor_ns: f64,
    /// The same with a kernel between them that does nothing, launched as the operation's own is: that is in every sample
    /// too, and in no time that the kernel itself takes. To be compared are samples less this. Absent where the
    /// operation is not one kernel.
    #[serde(default)]
    pub kernel_floor_ns: Option<f64>,
    /// How that is.
    #[serde(default)]
    pub kernel: Option<KernelLaunch>,
    /// One duration an operation, in the order issued.
    pub samples_ns: Vec<f64>,
}

/// How an operation's kernel is launched, and what else NCCL puts into the stream for it: read from a CUDA graph that the
/// operation was recorded into.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelLaunch {
    /// Blocks, in three dimensions.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Blocks of a cluster; ones where there are no clusters.
    pub cluster: [u32; 3],
    /// Bytes of shared memory a block.
    pub shared_bytes: u32,
    /// Waits for other streams' events.
    pub waits: u32,
    /// Events that are recorded for other streams.
    pub records: u32,
}

/// The times of one size, in place or out of place.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Timing {
    /// Operations that each repeat timed.
    pub operations: u64,
    /// Time an operation, the slowest rank's, one for each repeat.
    pub repeats_ns: Vec<f64>,
    /// Their median.
    pub time_ns: f64,
    /// Size by time, in 10^9 bytes a second.
    pub algbw_gb_per_s: f64,
    /// Algorithm bandwidth times nccl-tests' factor of the operation.
    pub busbw_gb_per_s: f64,
    /// Elements that were wrong, on all ranks; `None` where nothing was checked.
    pub wrong: Option<u64>,
    /// With [`Settings::events`]: every rank's samples.
    pub events: Option<Vec<RankEvents>>,
    /// With [`Settings::cost`]: all phases. The repeats are those without events then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phases: Option<PhaseTimes>,
}

/// One row of the table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SizeResult {
    /// Bytes of the larger buffer.
    pub size_bytes: u64,
    /// Elements of NCCL's call.
    pub count: u64,
    /// Result in another buffer.
    pub out_of_place: Timing,
    /// Result over the input, where the operation can.
    pub in_place: Option<Timing>,
}

/// Everything of one benchmark.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The options of the run, with the number of threads that they gave.
    pub settings: Settings,
    /// The machine of the measurement.
    pub environment: Environment,
    /// One for each size, ascending.
    pub sizes: Vec<SizeResult>,
    /// Mean bus bandwidth over all rows, in and out of place.
    pub average_busbw_gb_per_s: f64,
    /// Elements that were wrong, of all rows; `None` where nothing was checked.
    pub wrong: Option<u64>,
}

impl Report {
    /// Sums the rows up.
    #[must_use]
    pub fn new(settings: Settings, environment: Environment, sizes: Vec<SizeResult>) -> Self {
        let timings = || sizes.iter().flat_map(|s| std::iter::once(&s.out_of_place).chain(&s.in_place));
        let count = timings().count().max(1);
        let average = timings().map(|t| t.busbw_gb_per_s).sum::<f64>() / count as f64;
        let wrong = timings().filter_map(|t| t.wrong).reduce(|a, b| a + b);
        Report { schema: SCHEMA, settings, environment, average_busbw_gb_per_s: average, wrong, sizes }
    }
}

/// The middle of some numbers, of the two middle ones their mean; 0 of none.
#[must_use]
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (n, half) = (sorted.len(), sorted.len() / 2);
    match n {
        0 => 0.0,
        n if n % 2 == 1 => sorted[half],
        _ => (sorted[half - 1] + sorted[half]) / 2.0,
    }
}
