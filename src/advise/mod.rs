//! Advice about a job: what it should change in its use of NCCL, by its recorded operations.
//!
//! Gains are estimates from measured curves. They leave out what hides behind computation, so that each is at most what the
//! job can win.

mod curve;
#[cfg(test)]
mod tests;

pub use curve::Curve;

use crate::model::{ClassRow, CommId, CommRow, Func, Kind, Snapshot, size_text};
use std::collections::{BTreeMap, BTreeSet};

/// Operations of a kind that are worth advice.
const OPERATIONS_MIN: u64 = 100;
/// Operations that are this small on average cost latency only, and are fused rather than enlarged.
const SMALL_BYTES: f64 = 65_536.0;
/// The share of the best bandwidth that larger operations should reach.
const EFFICIENT: f64 = 0.8;
/// Largest factor by which advice enlarges operations: memory and overlap set limits that no curve knows.
const FACTOR_MAX: f64 = 64.0;
/// Smallest factor that is worth a change.
const FACTOR_MIN: f64 = 2.0;
/// A gain below this share of the job's time is not mentioned.
const GAIN_MIN: f64 = 0.005;
/// Communicators over the same ranks from which on fewer would do.
const COMMUNICATORS: usize = 4;
/// Share of wall time inside collectives from which on overlap is worth a look.
const SHARE: f64 = 0.3;

/// One thing that the job should change.
#[derive(Debug, Clone, PartialEq)]
pub struct Advice {
    /// The change, in words.
    pub what: String,
    /// The facts.
    pub why: String,
    /// How to change it.
    pub how: &'static str,
    /// The time that it saves.
    pub gain: Gain,
}

/// The time that a change saves.
#[derive(Debug, Clone, PartialEq)]
pub enum Gain {
    /// By the curves, in ns.
    Estimated {
        /// The saved time.
        saved_ns: f64,
        /// The job's time, where it is known.
        of_ns: Option<u64>,
    },
    /// Not estimated, and why.
    Unknown(String),
}

/// Advises on everything that was recorded. The greatest gains come first, then those that are not known.
pub fn advise(s: &Snapshot, curves: &[Curve]) -> Vec<Advice> {
    let mut all: Vec<Advice> = s.comms.iter().flat_map(|c| sizes(s, c, curves)).collect();
    all.extend(communicators(s));
    all.extend(overlap(s));
    all.extend(imbalance(s));
    let rank = |a: &Advice| match a.gain {
        Gain::Estimated { saved_ns, .. } => saved_ns,
        Gain::Unknown(_) => -1.0,
    };
    all.sort_by(|a, b| rank(b).total_cmp(&rank(a)));
    all
}

/// The time from the beginning of a communicator's job to its end.
fn seen_ns(s: &Snapshot, comm: CommId) -> Option<u64> {
    s.jobs.iter().find(|j| j.sums.comms.contains(&comm)).and_then(|j| j.sums.seen_ns)
}

fn name(c: &CommRow) -> String {
    let name = c.name.clone().unwrap_or_else(|| c.id.to_string());
    c.ranks.map_or_else(|| format!("communicator {name}"), |n| format!("communicator {name} ({n} ranks)"))
}

/// The operations of one kind in one communicator.
#[derive(Debug, Default)]
struct SizeLoad {
    count: u64,
    bytes: f64,
}

/// Fuses small operations and enlarges middling ones.
fn sizes(s: &Snapshot, c: &CommRow, curves: &[Curve]) -> Vec<Advice> {
    let mut loads: BTreeMap<(Func, bool), SizeLoad> = BTreeMap::new();
    for class in s.classes.iter().filter(|r| r.comm == c.id && can_be_fused(r.func)) {
        let Some(mean) = mean_bytes(class) else { continue };
        let load = loads.entry((class.func, mean < SMALL_BYTES)).or_default();
        load.count += class.count;
        load.bytes += mean * class.count as f64;
    }
    let mut all = Vec::new();
    for ((func, is_small), load) in loads.iter().filter(|(_, l)| l.count >= OPERATIONS_MIN) {
        let curve = curves.iter().find(|k| k.func == *func && Some(k.ranks) == c.ranks);
        let advice = match curve {
            Some(curve) => enlarge(s, c, *func, *is_small, load, curve),
            None if *is_small => Some(unmeasured(c, *func, load)),
            None => None,
        };
        all.extend(advice);
    }
    all
}

/// True for collectives that a job can put together: those of gradients and parameters.
fn can_be_fused(func: Func) -> bool {
    matches!(func, Func::AllReduce | Func::AllGather | Func::ReduceScatter | Func::Broadcast | Func::Reduce)
}

fn mean_bytes(class: &ClassRow) -> Option<f64> {
    let lowest = class.size_class.map(|n| 1.5 * 2f64.powi(i32::from(n)));
    class.bytes.filter(|_| class.count > 0).map(|b| b as f64 / class.count as f64).or(lowest)
}

const FUSE: &str = "reduce one flattened tensor in place of many (torch._foreach, DDP's buckets, a group of calls), or \
                    capture the step in a CUDA graph";
const ENLARGE: &str = "raise DDP's bucket_cap_mb, or wrap larger units in FSDP; larger buckets begin later, so measure a \
                       step before and after";

fn facts(func: Func, load: &SizeLoad, mean: f64) -> String {
    format!("{} operations {} of {} on average", load.count, func.as_str(), size_text(mean as u64))
}

fn enlarge(
    s: &Snapshot,
    c: &CommRow,
    func: Func,
    is_small: bool,
    load: &SizeLoad,
    curve: &Curve,
) -> Option<Advice> {
    let mean = load.bytes / load.count as f64;
    let factor = (curve.efficient_bytes(EFFICIENT) / mean).min(FACTOR_MAX).min(load.count as f64);
    if factor < FACTOR_MIN {
        return None;
    }
    let (large, fewer) = (mean * factor, (load.count as f64 / factor).ceil());
    let (now_ns, then_ns) = (curve.time_ns(mean), curve.time_ns(large));
    let saved_ns = load.count as f64 * now_ns - fewer * then_ns;
    let of_ns = seen_ns(s, c.id);
    if of_ns.is_some_and(|of| saved_ns < of as f64 * GAIN_MIN) || saved_ns <= 0.0 {
        return None;
    }
    let verb = if is_small { "fuse small" } else { "use larger buckets for" };
    Some(Advice {
        what: format!("{verb} {} operations of {}", func.as_str(), name(c)),
        why: format!(
            "{}, {:.1} us each by the curve; {fewer:.0} of {} would take {:.1} us each",
            facts(func, load, mean),
            now_ns / 1e3,
            size_text(large as u64),
            then_ns / 1e3
        ),
        how: if is_small { FUSE } else { ENLARGE },
        gain: Gain::Estimated { saved_ns, of_ns },
    })
}

fn unmeasured(c: &CommRow, func: Func, load: &SizeLoad) -> Advice {
    let mean = load.bytes / load.count as f64;
    let word = operation(func);
    let ranks = c.ranks.map_or_else(|| "its".to_owned(), |n| n.to_string());
    Advice {
        what: format!("fuse small {} operations of {}", func.as_str(), name(c)),
        why: format!("{}; such a size costs latency only", facts(func, load, mean)),
        how: FUSE,
        gain: Gain::Unknown(format!("no curve of {word} on {ranks} ranks; see --curves")),
    }
}

/// The operation as `ringwatch bench` names it.
fn operation(func: Func) -> &'static str {
    match func {
        Func::AllGather => "all_gather",
        Func::ReduceScatter => "reduce_scatter",
        Func::Broadcast => "broadcast",
        Func::Reduce => "reduce",
        _ => "all_reduce",
    }
}

/// Several communicators over the same ranks.
fn communicators(s: &Snapshot) -> Vec<Advice> {
    let mut members: BTreeMap<CommId, BTreeSet<(&str, u32)>> = BTreeMap::new();
    for r in &s.ranks {
        members.entry(r.comm).or_default().insert((&r.host, r.pid));
    }
    let mut same: BTreeMap<&BTreeSet<(&str, u32)>, Vec<CommId>> = BTreeMap::new();
    for (comm, own) in members.iter().filter(|(_, own)| own.len() > 1) {
        same.entry(own).or_default().push(*comm);
    }
    let advice = |(own, comms): (&&BTreeSet<(&str, u32)>, &Vec<CommId>)| {
        let row = |id: &CommId| s.comms.iter().find(|c| c.id == *id);
        let few = comms.iter().filter(|id| row(id).is_none_or(|c| c.issued < OPERATIONS_MIN)).count();
        let freed = comms.iter().filter(|id| row(id).is_some_and(|c| c.closed)).count();
        let lives = match freed {
            0 => String::new(),
            n => format!("; {n} of them were freed, so fewer may have lived at the same time"),
        };
        Advice {
            what: format!("use fewer communicators: {} have the same {} processes", comms.len(), own.len()),
            why: format!("{few} of them issued fewer than {OPERATIONS_MIN} operations{lives}"),
            how: "share one process group where operations need not run at the same time; each communicator takes GPU \
                  memory for its channels and time to be made",
            gain: Gain::Unknown("memory and the time of init are not recorded".to_owned()),
        }
    };
    same.iter().filter(|(_, comms)| comms.len() >= COMMUNICATORS).map(advice).collect()
}

/// Time inside collectives that computation could hide.
fn overlap(s: &Snapshot) -> Vec<Advice> {
    let of_job = |j: &crate::model::JobRow| {
        let share = j.sums.comm_share.or(j.comm_share).filter(|share| *share >= SHARE)?;
        let saved_ns = j.sums.seen_ns.map(|of| share * of as f64);
        let job = j.name.as_deref().unwrap_or("the job");
        Some(Advice {
            what: format!("overlap collectives with computation in {job}"),
            why: format!("its ranks spent {:.0} % of the time inside collectives", share * 100.0),
            how: "issue collectives while the backward pass still runs (DDP's buckets, FSDP's backward prefetch, \
                  async_op=True), on a stream of their own; computation already hides a part of this time",
            gain: match saved_ns {
                Some(saved_ns) => Gain::Estimated { saved_ns, of_ns: j.sums.seen_ns },
                None => Gain::Unknown("the job's time is not known".to_owned()),
            },
        })
    };
    s.jobs.iter().filter_map(of_job).collect()
}

/// Exchanges in which some ranks have more to send than others.
fn imbalance(s: &Snapshot) -> Vec<Advice> {
    let of_kind = s.findings.iter().filter(|f| f.kind == Kind::Imbalance);
    let advice = |f: &crate::model::Finding| Advice {
        what: format!("even out the exchanges of communicator {}", f.communicator),
        why: f.evidence.iter().map(|e| e.text.to_string()).collect::<Vec<_>>().join("; "),
        how: "give each rank as much to send as the others: balance experts or shards, pad or split the largest ones",
        gain: match f.cost {
            Some(cost) => Gain::Estimated {
                saved_ns: cost.last_minute.lost_s * 1e9,
                of_ns: Some((cost.last_minute.of_s * 1e9) as u64),
            },
            None => Gain::Unknown("the cost of waiting is not known".to_owned()),
        },
    };
    of_kind.map(advice).collect()
}
