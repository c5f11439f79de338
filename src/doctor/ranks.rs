//! The differences between the ranks of a job that should be alike.

use super::bundle::shown;
use super::host::Host;
use super::libraries::Libraries;
use super::{Area, Observation, Outcome, Report, Status};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// Variables that differ from rank to rank by right.
const OWN: &[&str] =
    &["CUDA_VISIBLE_DEVICES", "NCCL_HOSTID", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"];
/// Beginnings of variables that all ranks should have alike.
const ALIKE: &[&str] = &["NCCL_", "TORCH_NCCL_", "CUDA_", "RINGWATCH_", "LD_"];
/// Beginnings of names of what NCCL needs alike on all ranks. With NCCL 2.28.3 an all-reduce of two H100s hung when
/// NCCL_BUFFSIZE was set on one of them.
const MATTERS: &[&str] = &["NCCL_", "the NCCL"];
/// Of NCCL's settings those that name what a host has of its own.
const OF_HOST: &[&str] = &[
    "NCCL_DEBUG",
    "NCCL_IB_HCA",
    "NCCL_IB_GID_INDEX",
    "NCCL_SOCKET_IFNAME",
    "NCCL_OOB_NET_IFNAME",
    "NCCL_TOPO_",
    "NCCL_GRAPH_DUMP",
    "NCCL_CONF_FILE",
    "NCCL_IGNORE_CPU_AFFINITY",
    "NCCL_PROFILER_PLUGIN",
];
/// Clocks that are further from the median are wrong, in ms: greetings of ranks take less.
const CLOCK_OFF_MAX_MS: u64 = 100;

/// The facts of one rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankFacts {
    /// Its number.
    pub rank: u32,
    /// Its own checks.
    pub report: Report,
    /// The facts that all ranks should have alike, by name.
    pub alike: BTreeMap<String, String>,
    /// Its wall clock at the common moment, Unix time in ms.
    pub clock_ms: u64,
}

impl RankFacts {
    /// Gathers the facts of this process.
    #[must_use]
    pub fn gather(rank: u32, host: &Arc<Host>, report: Report, limit: Duration) -> Self {
        let is_alike = |name: &str| ALIKE.iter().any(|b| name.starts_with(b)) && !OWN.contains(&name);
        let mut alike: BTreeMap<String, String> = host
            .variables
            .iter()
            .filter(|(n, _)| is_alike(n))
            .map(|(n, v)| (n.clone(), shown(n, v).to_owned()))
            .collect();
        let mut put = |name: &str, value: Option<String>| {
            alike.insert(name.to_owned(), value.unwrap_or_else(|| "-".to_owned()));
        };
        let gpus = host.gpus_within(limit);
        let libraries = Libraries::find(host);
        put("the NCCL that a job loads", libraries.of_job().map(|l| l.version().to_owned()));
        put("the GPU driver", gpus.as_ref().and_then(|g| g.driver.clone()));
        put("the GPU", gpus.as_ref().and_then(|g| g.gpus.first()?.fact.name.clone()));
        put("ringwatch", Some(env!("CARGO_PKG_VERSION").to_owned()));
        put(
            "RLIMIT_MEMLOCK",
            Some(host.limits.memlock_bytes.map_or("unlimited".to_owned(), super::host::bytes)),
        );
        RankFacts { rank, report, alike, clock_ms: host.unix_ms() }
    }
}

/// One thing in which ranks differ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// What.
    pub name: String,
    /// The value that most ranks have; absent where it is not set.
    pub usual: Option<String>,
    /// Other values, and the ranks that have them.
    pub others: Vec<(Option<String>, Vec<u32>)>,
}

/// The differences between ranks that should be alike.
#[must_use]
pub fn differences(all: &[RankFacts]) -> Vec<Difference> {
    let names: BTreeSet<&String> = all.iter().flat_map(|r| r.alike.keys()).collect();
    let mut found = Vec::new();
    for name in names {
        let mut by_value: BTreeMap<Option<&String>, Vec<u32>> = BTreeMap::new();
        for r in all {
            by_value.entry(r.alike.get(name)).or_default().push(r.rank);
        }
        // Of two values that as many ranks have, rank 0's is the usual one.
        let usual =
            by_value.iter().max_by_key(|(_, ranks)| (ranks.len(), ranks.contains(&0))).map(|(v, _)| *v);
        if let Some(usual) = usual
            && by_value.len() > 1
        {
            let others = by_value.iter().filter(|(v, _)| **v != usual);
            found.push(Difference {
                name: name.clone(),
                usual: usual.cloned(),
                others: others.map(|(v, ranks)| (v.cloned(), ranks.clone())).collect(),
            });
        }
    }
    found
}

/// Ranks as people write them: `1, 4-7`.
fn ranks(list: &[u32]) -> String {
    let mut parts: Vec<(u32, u32)> = Vec::new();
    for r in list {
        match parts.last_mut() {
            Some((_, last)) if *last + 1 == *r => *last = *r,
            _ => parts.push((*r, *r)),
        }
    }
    let text = |(a, b): &(u32, u32)| if a == b { a.to_string() } else { format!("{a}-{b}") };
    let noun = if list.len() == 1 { "rank" } else { "ranks" };
    format!("{noun} {}", parts.iter().map(text).collect::<Vec<_>>().join(", "))
}

impl Difference {
    fn seen(&self) -> Observation {
        let value = |v: &Option<String>| v.clone().unwrap_or_else(|| "not set".to_owned());
        let others: Vec<String> =
            self.others.iter().map(|(v, list)| format!("{} on {}", value(v), ranks(list))).collect();
        let seen = format!("{} is {}, but {}", self.name, value(&self.usual), others.join("; "));
        let is = |beginnings: &[&str]| beginnings.iter().any(|b| self.name.starts_with(b));
        if is(MATTERS) && !is(OF_HOST) {
            Observation::fail(
                seen,
                "give all ranks the same: ranks whose settings differ hang or fail in an operation",
            )
        } else {
            Observation::warn(seen, "give all ranks the same, if nothing speaks against it")
        }
    }
}

fn clock(all: &[RankFacts]) -> Vec<Observation> {
    let mut times: Vec<u64> = all.iter().map(|r| r.clock_ms).collect();
    times.sort_unstable();
    let median = times.get(times.len() / 2).copied().unwrap_or(0);
    let off = |r: &RankFacts| r.clock_ms.abs_diff(median);
    let mut wrong: Vec<Observation> = Vec::new();
    for r in all.iter().filter(|r| off(r) > CLOCK_OFF_MAX_MS) {
        let seconds = off(r) as f64 / 1e3;
        let seen =
            format!("the clock of {} (rank {}) is {seconds:.1} s off the others'", r.report.host, r.rank);
        wrong.push(Observation::fail(seen, "set it: chronyc makestep, or timedatectl set-ntp true"));
    }
    if wrong.is_empty() {
        let most = all.iter().map(off).max().unwrap_or(0);
        wrong.push(Observation::pass(format!("the ranks' clocks differ by at most {most} ms")));
    }
    wrong
}

/// Merges what all ranks saw in one check. What all say is there once; other things name their ranks and hosts.
fn merged(all: &[RankFacts], id: &str, area: Area) -> Outcome {
    let mut results: Vec<(Observation, Vec<&RankFacts>)> = Vec::new();
    let mut took_ms = 0;
    for r in all {
        for o in r.report.outcomes.iter().filter(|o| o.id == id) {
            took_ms = took_ms.max(o.took_ms);
            for seen in &o.results {
                match results.iter_mut().find(|(known, _)| known == seen) {
                    Some((_, who)) => who.push(r),
                    None => results.push((seen.clone(), vec![r])),
                }
            }
        }
    }
    // What passes may differ in a number; the first rank's speaks for all.
    let is_told = |(seen, who): &(Observation, Vec<&RankFacts>)| {
        seen.status >= Status::Warn || who.iter().any(|r| all.first().is_some_and(|f| f.rank == r.rank))
    };
    let told = results.into_iter().filter(is_told).map(|(mut seen, who)| {
        if who.len() < all.len() && seen.status >= Status::Warn {
            let hosts: BTreeSet<&str> = who.iter().map(|r| r.report.host.as_str()).collect();
            let hosts: Vec<&str> = hosts.into_iter().collect();
            let list: Vec<u32> = who.iter().map(|r| r.rank).collect();
            seen.seen = format!("{} ({}): {}", hosts.join(", "), ranks(&list), seen.seen);
        }
        seen
    });
    Outcome::new(id, area, Duration::from_millis(took_ms), told.collect())
}

/// Puts the checks of all ranks together: what each saw, what differs, and the clocks.
#[must_use]
pub fn together(all: &[RankFacts]) -> Vec<Outcome> {
    let Some(first) = all.first() else { return Vec::new() };
    let mut outcomes: Vec<Outcome> =
        first.report.outcomes.iter().map(|o| merged(all, &o.id, o.area)).collect();
    let hosts: BTreeSet<&str> = all.iter().map(|r| r.report.host.as_str()).collect();
    let mut differ: Vec<Observation> = differences(all).iter().map(Difference::seen).collect();
    if differ.is_empty() {
        let n = all.len();
        differ.push(Observation::pass(format!(
            "{n} ranks on {} hosts have the same variables, libraries and GPUs",
            hosts.len()
        )));
    }
    outcomes.push(Outcome::new("ranks-alike", Area::Ranks, Duration::ZERO, differ));
    outcomes.push(Outcome::new("ranks-clock", Area::Ranks, Duration::ZERO, clock(all)));
    outcomes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(rank: u32, variables: &[(&str, &str)]) -> RankFacts {
        let report = Report {
            schema: 1,
            ringwatch_version: String::new(),
            host: format!("node{}", rank / 2),
            kernel: String::new(),
            at_unix_ms: 0,
            outcomes: Vec::new(),
        };
        let alike = variables.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        RankFacts { rank, report, alike, clock_ms: 1_000_000 }
    }

    #[test]
    fn the_rank_that_differs_is_named_and_not_the_others() {
        let all: Vec<_> =
            (0..4).map(|r| if r == 2 { rank(r, &[("NCCL_PROTO", "LL")]) } else { rank(r, &[]) }).collect();
        let found = differences(&all);
        assert_eq!(found.len(), 1);
        let seen = found[0].seen().seen;
        assert_eq!(seen, "NCCL_PROTO is not set, but LL on rank 2");
        assert_eq!(ranks(&[0, 1, 2, 5]), "ranks 0-2, 5");
    }

    #[test]
    fn of_two_ranks_the_first_one_is_right() {
        let all = [rank(0, &[("LD_PRELOAD", "a")]), rank(1, &[("LD_PRELOAD", "b")])];
        assert_eq!(differences(&all)[0].others, [(Some("b".to_owned()), vec![1])]);
    }

    #[test]
    fn a_clock_that_is_off_is_named_with_its_host() {
        let mut all: Vec<_> = (0..4).map(|r| rank(r, &[])).collect();
        all[3].clock_ms += 5_000;
        let seen = clock(&all);
        assert_eq!(seen.len(), 1);
        assert_eq!(seen[0].seen, "the clock of node1 (rank 3) is 5.0 s off the others'");
    }
}
