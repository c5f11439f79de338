//! The names of NVIDIA's NCCL Inspector, so that its dashboard works: gauges of what was over since the last scrape.
//! Two who scrape would share that between them.

use super::scope::uid_text;
use crate::join::{Finished, Join, algbw};
use crate::model::{Func, SegmentId, Track, bus_factor};
use std::collections::BTreeMap;

/// A family under a name that is not ours.
#[derive(Debug, Clone, PartialEq)]
pub struct Foreign {
    /// Its name.
    pub name: &'static str,
    /// The help text.
    pub help: &'static str,
    /// Its labels and values.
    pub samples: Vec<(Vec<(&'static str, String)>, f64)>,
}

/// The version its labels name: of NCCL's profiler interface and of its text.
const VERSION: &str = "v5.1";
/// It leaves out smaller messages.
const SMALLEST: u64 = 8192;

type Labels = Vec<(&'static str, String)>;

#[derive(Debug, Default)]
struct Mean {
    count: u64,
    micros: f64,
    bus_count: u64,
    /// Sum of the bandwidths' logarithms: it gives their geometric mean.
    bus_log: f64,
}

/// The operations that were finished since the last scrape.
#[derive(Debug)]
pub(super) struct Inspector {
    budget: usize,
    collectives: BTreeMap<Labels, Mean>,
    transfers: BTreeMap<Labels, Mean>,
}

impl Inspector {
    pub(super) fn new(budget: usize) -> Self {
        Inspector { budget, collectives: BTreeMap::new(), transfers: BTreeMap::new() }
    }

    /// Counts an operation for each of its ranks that was timed, as each rank's own Inspector would.
    pub(super) fn add(&mut self, join: &Join, f: &Finished) {
        let Some(bytes) = f.operation.bytes.filter(|b| *b >= SMALLEST) else { return };
        let Some(comm) = join.communicator(f.comm) else { return };
        let member = comm.members().values().next();
        let name = comm.members().values().find_map(|m| m.record.name.clone());
        let ranks = f.ranks.unwrap_or(0);
        let nodes = member.and_then(|m| m.record.nodes).unwrap_or(0);
        for part in &f.parts {
            let Some(duration) = part.duration_ns.filter(|d| *d > 0) else { continue };
            let (node, job, gpu) = place(join, f, part.segment, part.rank);
            let mut labels: Labels = vec![
                ("version", VERSION.to_owned()),
                ("slurm_job_id", job),
                ("node", node),
                ("gpu", gpu),
                ("comm_name", name.clone().unwrap_or_else(unknown)),
                ("n_nodes", nodes.to_string()),
                ("nranks", ranks.to_string()),
            ];
            // It knows no users; without this label their means would be mixed where names are the same.
            let owner = join.process(part.segment).and_then(|p| p.record.owner);
            labels.extend(owner.map(|uid| ("uid", uid_text(Some(uid)))));
            let size = size_range(bytes);
            let means = if let Track::Pair(from, _) = f.track {
                let func = if part.rank == from { Func::Send } else { Func::Recv };
                labels.push(("p2p_operation", func.to_string()));
                labels.push(("message_size", size));
                &mut self.transfers
            } else {
                labels.push(("collective", f.func.to_string()));
                labels.push(("message_size", size));
                labels.push(("algo_proto", algo_proto(f)));
                &mut self.collectives
            };
            if means.len() >= self.budget && !means.contains_key(&labels) {
                for (_, value) in &mut labels {
                    *value = "overflow".to_owned();
                }
            }
            let mean = means.entry(labels).or_default();
            mean.count += 1;
            mean.micros += (duration / 1000) as f64;
            if let Some(bw) = algbw(bytes, duration as f64).map(|b| b * bus_factor(f.func, ranks) / 1e9)
                && bw > 0.0
            {
                mean.bus_count += 1;
                mean.bus_log += bw.ln();
            }
        }
    }

    /// Gives them out and begins anew.
    pub(super) fn gather(&mut self) -> Vec<Foreign> {
        let collectives = std::mem::take(&mut self.collectives);
        let transfers = std::mem::take(&mut self.transfers);
        let family = |name, help, means: &BTreeMap<Labels, Mean>, value: fn(&Mean) -> f64| Foreign {
            name,
            help,
            samples: means.iter().map(|(l, m)| (l.clone(), value(m))).collect(),
        };
        let bandwidth: fn(&Mean) -> f64 =
            |m| if m.bus_count == 0 { 0.0 } else { (m.bus_log / m.bus_count as f64).exp() };
        let time: fn(&Mean) -> f64 = |m| m.micros / m.count.max(1) as f64;
        let mut out = vec![
            family(
                "nccl_bus_bandwidth_gbs",
                "Bus bandwidth of collectives in GB/s.",
                &collectives,
                bandwidth,
            ),
            family(
                "nccl_collective_exec_time_microseconds",
                "Mean time of collectives in microseconds.",
                &collectives,
                time,
            ),
            family(
                "nccl_p2p_bus_bandwidth_gbs",
                "Bus bandwidth of transfers in GB/s.",
                &transfers,
                bandwidth,
            ),
            family(
                "nccl_p2p_exec_time_microseconds",
                "Mean time of transfers in microseconds.",
                &transfers,
                time,
            ),
        ];
        out.retain(|f| !f.samples.is_empty());
        out
    }
}

fn unknown() -> String {
    "unknown".to_owned()
}

/// Node, Slurm job and GPU of a rank, in its words.
fn place(
    join: &Join,
    f: &Finished,
    segment: SegmentId,
    rank: crate::model::Rank,
) -> (String, String, String) {
    let process = join.process(segment).map(|p| &p.record);
    let node = process.map_or_else(unknown, |p| p.host.clone());
    let slurm = process.and_then(|p| {
        let labelled = p.job.labels.get("slurm.job.id").cloned();
        labelled.or_else(|| p.job.name.as_deref()?.strip_prefix("slurm-").map(str::to_owned))
    });
    let member = join.communicator(f.comm).and_then(|c| c.members().get(&rank));
    let address = member.and_then(|m| m.record.gpu.as_deref());
    let index = address.and_then(|a| {
        join.hardware().gpus().find(|(host, _, g)| *host == node && g.gpu == a).and_then(|(.., g)| g.index)
    });
    let gpu = index.map_or_else(unknown, |n| format!("GPU{n}"));
    (node, slurm.unwrap_or_else(unknown), gpu)
}

/// `Ring_ll`, as it writes algorithm and protocol.
fn algo_proto(f: &Finished) -> String {
    let word = |w: &str| -> String {
        let lower = w.to_ascii_lowercase();
        let mut chars = lower.chars();
        chars.next().map_or_else(String::new, |c| c.to_ascii_uppercase().to_string() + chars.as_str())
    };
    match (f.operation.algo, f.operation.proto) {
        (Some(algo), Some(proto)) => {
            format!("{}_{}", word(algo.as_str()), proto.as_str().to_ascii_lowercase())
        }
        _ => unknown(),
    }
}

/// `1-2MB`: whole units, one wide.
fn size_range(bytes: u64) -> String {
    let mut unit = 0;
    let mut value = bytes;
    while value >= 1024 && unit < 4 {
        value /= 1024;
        unit += 1;
    }
    format!("{value}-{}{}", value + 1, ["B", "KB", "MB", "GB", "TB"][unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_named_in_whole_units() {
        assert_eq!(size_range(8192), "8-9KB");
        assert_eq!(size_range((3 << 20) + 5), "3-4MB");
        assert_eq!(size_range(5 << 50), "5120-5121TB");
    }
}
