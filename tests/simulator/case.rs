//! A case as its file tells it.

use super::machines::Machines;
use ringwatch::model::{Algo, DataType, Func, Proto, RedOp};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::BTreeMap;

/// Nanoseconds, written as `1.5s`, `20ms`, `40us` or `forever`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(crate) struct Ns(pub(crate) u64);

pub(crate) const FOREVER: Ns = Ns(u64::MAX / 4);

impl<'de> Deserialize<'de> for Ns {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = String::deserialize(d)?;
        if text == "forever" {
            return Ok(FOREVER);
        }
        let split = text.find(|c: char| c.is_alphabetic()).unwrap_or(text.len());
        let (number, unit) = text.split_at(split);
        let factor = match unit {
            "s" => 1e9,
            "ms" => 1e6,
            "us" => 1e3,
            _ => return Err(serde::de::Error::custom(format!("{text}: a time ends with s, ms or us"))),
        };
        let n: f64 = number.trim().parse().map_err(serde::de::Error::custom)?;
        Ok(Ns((n * factor) as u64))
    }
}

impl Serialize for Ns {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            n if n >= FOREVER.0 => s.serialize_str("forever"),
            n => s.collect_str(&format_args!("{}us", n as f64 / 1e3)),
        }
    }
}

#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Case {
    /// What it is, in a line.
    #[allow(dead_code, reason = "for the reader of the file")]
    pub(crate) about: String,
    pub(crate) ranks: u32,
    /// Hosts, each with clocks of its own.
    #[serde(default = "one")]
    pub(crate) nodes: u32,
    pub(crate) comms: BTreeMap<String, Members>,
    pub(crate) program: Vec<Step>,
    #[serde(default)]
    pub(crate) faults: Vec<Fault>,
    /// What makes data slow, from some moment on.
    #[serde(default)]
    pub(crate) slow: Vec<Slow>,
    /// Where NCCL chooses another way than a ring with the simple protocol.
    #[serde(default)]
    pub(crate) choices: Vec<Choice>,
    #[serde(default)]
    pub(crate) expect: Vec<Expected>,
    /// When the watching ends.
    pub(crate) until: Ns,
    /// Time between looks.
    #[serde(default = "look")]
    pub(crate) look: Ns,
    /// How much of each time of work is random, 0 to 1.
    #[serde(default = "noise")]
    pub(crate) noise: f64,
    /// GPUs differ for good: each takes longer for what it computes, by a share between none and this one.
    #[serde(default)]
    pub(crate) gpus_differ: f64,
    /// Hosts differ in the same way, in what they do themselves.
    #[serde(default)]
    pub(crate) hosts_differ: f64,
    /// Time of an operation without data.
    #[serde(default = "latency")]
    pub(crate) latency: Ns,
    /// Share of operations that others on the same wires hold up, to several times their time.
    #[serde(default)]
    pub(crate) disturbed: f64,
    /// How many launches a host runs ahead of its GPU.
    #[serde(default = "depth")]
    pub(crate) depth: usize,
    /// How late NCCL tells of a kernel's start and end, at most.
    #[serde(default)]
    pub(crate) late_records: Option<Ns>,
    /// NCCL tells one end for all transfers of a launch: when one of them, any, has ended.
    #[serde(default)]
    pub(crate) one_end_a_launch: bool,
    /// Exchanges are timed by CUDA events, each launch as a whole, as the plugin does where ranks send to themselves.
    #[serde(default)]
    pub(crate) launches_by_events: bool,
    /// Of this many operations one is timed, in runs of 32; absent means all.
    #[serde(default)]
    pub(crate) timed_of: Option<u64>,
    /// Share of GPU stamps that are lost.
    #[serde(default)]
    pub(crate) lost_stamps: f64,
    /// Drift of the GPUs' clocks against the hosts', in millionths.
    #[serde(default)]
    pub(crate) drift_ppm: f64,
    /// Whether the hosts' facts are sampled.
    #[serde(default)]
    pub(crate) host_facts: bool,
    /// Whether the machines are sampled, and what is wrong with them.
    #[serde(default)]
    pub(crate) hardware: Option<Machines>,
    /// How often the load of the GPUs is read; absent means never.
    #[serde(default)]
    pub(crate) load_every: Option<Ns>,
    /// Whether ranks of broadcasts and reductions end without those that come after them in the chain, as where all data fit
    /// into NCCL's buffers.
    #[serde(default)]
    pub(crate) buffered: bool,
    /// When the whole job is killed and starts anew.
    #[serde(default)]
    pub(crate) restart: Option<Ns>,
    /// The profiler ABI.
    #[serde(default = "abi")]
    pub(crate) abi: u32,
    /// NCCL's version.
    #[serde(default = "nccl")]
    pub(crate) nccl: String,
    /// NCCL does not report the number of ranks, as before 2.27.
    #[serde(default)]
    pub(crate) sizes_unknown: bool,
    /// Every random time depends on what it is for, and not on what was drawn before. Two runs of a job then have the
    /// same noise, although one of them has a fault.
    #[serde(default)]
    pub(crate) keyed: bool,
    /// Share of all times of work that take up to `tail_factor` times as long.
    #[serde(default)]
    pub(crate) tail_share: f64,
    #[serde(default)]
    pub(crate) tail_factor: f64,
    /// Drift of the hosts' clocks against each other, in millionths.
    #[serde(default)]
    pub(crate) host_drift_ppm: f64,
    /// A node that dies, and its agent with it.
    #[serde(default)]
    pub(crate) node_loss: Option<(u32, Ns)>,
}

fn one() -> u32 {
    1
}
fn look() -> Ns {
    Ns(20_000_000)
}
fn noise() -> f64 {
    0.1
}
fn latency() -> Ns {
    Ns(15_000)
}
fn depth() -> usize {
    1_000
}
fn abi() -> u32 {
    5
}
fn nccl() -> String {
    "2.28.9".to_owned()
}

/// Who is in a communicator; without any field all ranks are.
#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Members {
    pub(crate) ranks: Option<Vec<u32>>,
    /// One communicator for each so many neighbours.
    pub(crate) groups: Option<u32>,
    /// One communicator for the ranks that are so far apart.
    pub(crate) strided: Option<u32>,
    /// The same in each block of so many neighbors, and not among all.
    pub(crate) block: Option<u32>,
    /// Those that never join it.
    pub(crate) without: Vec<u32>,
    /// A rank that believes it to have another size.
    pub(crate) misjudged_by: Option<u32>,
    /// Named by the library that is loaded before the job.
    pub(crate) preloaded: bool,
    /// Made by a step of the program, and not before it.
    pub(crate) later: bool,
}

impl Members {
    /// The groups, as ranks of the job.
    pub(crate) fn groups(&self, ranks: u32) -> Vec<Vec<u32>> {
        let all: Vec<u32> = self.ranks.clone().unwrap_or_else(|| (0..ranks).collect());
        match (self.groups, self.strided) {
            (Some(n), _) => all.chunks(n as usize).map(<[u32]>::to_vec).collect(),
            (_, Some(n)) => all
                .chunks(self.block.map_or(all.len(), |b| b as usize))
                .flat_map(|b| (0..n).map(move |k| b.iter().copied().filter(|r| r % n == k).collect()))
                .collect(),
            _ => vec![all],
        }
    }
}

/// One thing that ranks do. One of the fields up to `abort` is given.
#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Step {
    /// The steps in `steps`, so many times.
    pub(crate) repeat: Option<u32>,
    pub(crate) steps: Vec<Step>,
    /// A kernel on the stream.
    pub(crate) compute: Option<Ns>,
    /// Work of the host.
    pub(crate) host: Option<Ns>,
    /// The hosts wait for a request that comes to all of them at once.
    pub(crate) idle: Option<Ns>,
    /// A call of NCCL's.
    pub(crate) call: Option<Call>,
    /// Calls between ncclGroupStart and ncclGroupEnd.
    pub(crate) group: Option<Vec<Call>>,
    /// The replay of a CUDA graph with these calls.
    pub(crate) replay: Option<Vec<Call>>,
    /// A call to everybody else and one from everybody else, in a group; its `func` does not matter.
    pub(crate) exchange: Option<Call>,
    /// The host waits for all its streams.
    pub(crate) sync: Option<bool>,
    /// The stream waits for all that was issued to this one before (cudaStreamWaitEvent).
    pub(crate) wait: Option<u8>,
    /// Makes this communicator together with its other members.
    pub(crate) make: Option<String>,
    /// Frees this communicator.
    pub(crate) free: Option<String>,
    /// The process ends: by a signal if positive, with a code if not.
    pub(crate) exit: Option<i32>,
    /// Who does it; absent means all.
    pub(crate) ranks: Option<Vec<u32>>,
    pub(crate) stream: u8,
}

#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Call {
    pub(crate) comm: String,
    #[serde(deserialize_with = "func")]
    pub(crate) func: Func,
    #[serde(default = "count")]
    pub(crate) count: u64,
    #[serde(default = "dtype", deserialize_with = "named_type")]
    pub(crate) dtype: DataType,
    #[serde(default)]
    pub(crate) root: Option<u32>,
    #[serde(default, deserialize_with = "named_redop")]
    pub(crate) redop: Option<RedOp>,
    /// The other end, by its distance in the communicator.
    #[serde(default)]
    pub(crate) by: i64,
    /// Of sends and receives: so many times as much goes to these ranks of the communicator.
    #[serde(default)]
    pub(crate) to: BTreeMap<u32, f64>,
    /// And comes from these.
    #[serde(default)]
    pub(crate) from: BTreeMap<u32, f64>,
    /// Its size is between once and so many times the count, another one each time.
    #[serde(default)]
    pub(crate) varies: Option<u32>,
}

/// Data that takes longer.
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Slow {
    /// Of one communicator, `name` or `name/group`.
    #[serde(default)]
    pub(crate) comm: Option<String>,
    /// Whatever goes into a host or out of it.
    #[serde(default)]
    pub(crate) host: Option<u32>,
    /// Whatever goes between two ranks of the job; a ring goes from each to the next.
    #[serde(default)]
    pub(crate) pair: Option<(u32, u32)>,
    #[serde(default)]
    pub(crate) from: Ns,
    #[serde(default = "forever")]
    pub(crate) until: Ns,
    /// Only the operations of these orders, from the first to before the second.
    #[serde(default)]
    pub(crate) orders: Option<(u64, u64)>,
    /// Only this share of the operations, now and then.
    #[serde(default)]
    pub(crate) share: Option<f64>,
    /// So many times as long.
    pub(crate) factor: f64,
}

/// Another way to run an operation.
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Choice {
    pub(crate) comm: String,
    /// Ranks of the job; absent means all.
    #[serde(default)]
    pub(crate) ranks: Option<Vec<u32>>,
    #[serde(default, deserialize_with = "maybe_func")]
    pub(crate) func: Option<Func>,
    /// From this issue order on,
    #[serde(default)]
    pub(crate) from: u64,
    /// and at every so-manieth.
    #[serde(default)]
    pub(crate) every: Option<u64>,
    #[serde(default = "ring", deserialize_with = "algo")]
    pub(crate) algo: Algo,
    #[serde(default = "simple", deserialize_with = "proto")]
    pub(crate) proto: Proto,
    #[serde(default = "channels")]
    pub(crate) channels: u8,
}

fn forever() -> Ns {
    FOREVER
}
fn ring() -> Algo {
    Algo::Ring
}
fn simple() -> Proto {
    Proto::Simple
}
fn channels() -> u8 {
    1
}
fn algo<'de, D: Deserializer<'de>>(d: D) -> Result<Algo, D::Error> {
    by_name(Algo::ALL, Algo::as_str, &String::deserialize(d)?)
}
fn proto<'de, D: Deserializer<'de>>(d: D) -> Result<Proto, D::Error> {
    by_name(Proto::ALL, Proto::as_str, &String::deserialize(d)?)
}
fn maybe_func<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Func>, D::Error> {
    func(d).map(Some)
}

fn count() -> u64 {
    1 << 20
}
fn dtype() -> DataType {
    DataType::Float32
}
fn by_name<T: Copy, E: serde::de::Error>(
    all: &[T],
    name: impl Fn(T) -> &'static str,
    text: &str,
) -> Result<T, E> {
    all.iter().copied().find(|t| name(*t) == text).ok_or_else(|| E::custom(format!("{text} is not known")))
}
fn func<'de, D: Deserializer<'de>>(d: D) -> Result<Func, D::Error> {
    by_name(Func::ALL, Func::as_str, &String::deserialize(d)?)
}
fn named_type<'de, D: Deserializer<'de>>(d: D) -> Result<DataType, D::Error> {
    by_name(DataType::ALL, DataType::as_str, &String::deserialize(d)?)
}
fn named_redop<'de, D: Deserializer<'de>>(d: D) -> Result<Option<RedOp>, D::Error> {
    by_name(RedOp::ALL, RedOp::as_str, &String::deserialize(d)?).map(Some)
}

/// What goes wrong, and where: at a rank's n-th call in a communicator.
#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Fault {
    pub(crate) ranks: Vec<u32>,
    pub(crate) comm: String,
    pub(crate) call: usize,
    /// From that call on, at every so-manieth.
    #[serde(default)]
    pub(crate) every: Option<usize>,
    /// The call is left out.
    #[serde(default)]
    pub(crate) skip: bool,
    /// The host never comes to it.
    #[serde(default)]
    pub(crate) hang: bool,
    /// The process ends there: by a signal if positive, with a code if not.
    #[serde(default)]
    pub(crate) die: Option<i32>,
    /// The process is stopped there.
    #[serde(default)]
    pub(crate) stop: bool,
    /// The process is stopped there, and goes on after so long.
    #[serde(default)]
    pub(crate) pause: Option<Ns>,
    /// The rank aborts the communicator there and goes no further.
    #[serde(default)]
    pub(crate) abort: bool,
    /// The host takes so much longer before it.
    #[serde(default)]
    pub(crate) delay: Option<Ns>,
    /// A kernel runs before it on its stream.
    #[serde(default)]
    pub(crate) occupy: Option<Ns>,
    /// From there on all that the rank computes takes so many times as long.
    #[serde(default)]
    pub(crate) slower: Option<f64>,
    /// Another call in its place.
    #[serde(default)]
    pub(crate) change: Option<Call>,
    /// One call more before it.
    #[serde(default)]
    pub(crate) extra: Option<Call>,
    /// It and the next call of the program change places.
    #[serde(default)]
    pub(crate) swap: bool,
    /// Its data does not get from this rank to that one, of the communicator.
    #[serde(default)]
    pub(crate) stuck: Option<(u32, u32)>,
    /// Its data takes so long, and moves all the time.
    #[serde(default)]
    pub(crate) takes: Option<Ns>,
    /// No transfer of it ever ends, and there is no network.
    #[serde(default)]
    pub(crate) broken: bool,
    /// The plugin could not record it.
    #[serde(default)]
    pub(crate) unrecorded: bool,
    /// The reader came too late for its record.
    #[serde(default)]
    pub(crate) overwritten: bool,
}

/// A finding that has to come.
#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Expected {
    /// One of these, separated by `|`.
    pub(crate) kind: String,
    /// One of these communicators, `name` or `name/group`; any where it is about a device.
    #[serde(default)]
    pub(crate) comm: Vec<String>,
    /// The device that it is about, `GPU 0000:05:00.0 of host node0`.
    #[serde(default)]
    pub(crate) device: Option<String>,
    #[serde(default)]
    pub(crate) ranks: Vec<u32>,
    /// Where `ranks` are the job's and not the communicator's.
    #[serde(default)]
    pub(crate) as_job_ranks: bool,
    #[serde(default)]
    pub(crate) order: Option<u64>,
    #[serde(default)]
    pub(crate) cause: Option<String>,
    /// How long after the facts, where it is not the kind's own time.
    #[serde(default)]
    pub(crate) within: Option<Ns>,
    /// A text that its evidence contains.
    #[serde(default)]
    pub(crate) says: Option<String>,
    /// It ends before the watching does.
    #[serde(default)]
    pub(crate) passes: bool,
    /// Where any ranks will do that are on this host.
    #[serde(default)]
    pub(crate) on_host: Option<u32>,
    /// When it began.
    #[serde(default)]
    pub(crate) since: Option<Ns>,
    /// Ranks of the job that wait because of it, at least.
    #[serde(default)]
    pub(crate) victims: Option<usize>,
}
