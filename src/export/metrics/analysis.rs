//! The cluster's bus: what an agent puts on it, and what an analyser hears and makes of it.

use super::family::{Families, Value};
use super::finding_ranks::FindingRanks;
use super::scope::uid_text;
use crate::export::catalogue as c;
use crate::join::Tally;
use crate::model::{Func, Kind, Severity};
use std::collections::{BTreeMap, HashMap};

/// Reasons that are told apart at most: agents name them.
const REASONS: usize = 16;

/// The state of an agent's bus.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Bus {
    /// True where a server can be reached.
    pub connected: bool,
    /// Bytes published so far.
    pub bytes: u64,
    /// Operations published so far.
    pub published: u64,
    /// Operations left out so far, by reason.
    pub left_out: BTreeMap<&'static str, u64>,
    /// Of a communicator one of `1 << level` operations is published, or `4096 >> level` a second where that is more.
    pub level: u32,
    /// Bytes that wait to be sent.
    pub waiting_bytes: u64,
}

impl Bus {
    pub(super) fn gather(&self, out: &mut Families, node: &str) {
        out.number(c::BUS_CONNECTED, &[node], f64::from(u8::from(self.connected)));
        out.number(c::BUS_PUBLISHED_BYTES, &[node], self.bytes as f64);
        out.number(c::BUS_OPERATIONS, &[node], self.published as f64);
        for (reason, n) in &self.left_out {
            out.number(c::BUS_LEFT_OUT, &[node, reason], *n as f64);
        }
        out.number(c::BUS_LEVEL, &[node], f64::from(self.level));
        out.number(c::BUS_WAITING, &[node], self.waiting_bytes as f64);
    }
}

/// The counts of a node, by an analyser or by the node itself.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counts {
    /// Messages that came.
    pub messages: u64,
    /// Bytes that came.
    pub bytes: u64,
    /// Messages that never came.
    pub missed: u64,
    /// Operations that its agent saw.
    pub observed: u64,
    /// Of these, published.
    pub published: u64,
    /// Of these, left out, by reason.
    pub left_out: BTreeMap<String, u64>,
}

/// The counts of all nodes together. Nodes come, go and begin anew; what they counted stays.
#[derive(Debug, Clone, Default)]
pub struct Sums {
    last: HashMap<String, Counts>,
    all: Counts,
}

impl Sums {
    /// Takes what is counted now of every node that is known.
    pub fn take(&mut self, nodes: impl Iterator<Item = (String, Counts)>) {
        let mut before = std::mem::take(&mut self.last);
        for (name, now) in nodes {
            let was = before.remove(&name).unwrap_or_default();
            // Who has begun anew counts from nothing.
            let more = |now: u64, was: u64| if now < was { now } else { now - was };
            self.all.messages += more(now.messages, was.messages);
            self.all.bytes += more(now.bytes, was.bytes);
            self.all.missed += more(now.missed, was.missed);
            self.all.observed += more(now.observed, was.observed);
            self.all.published += more(now.published, was.published);
            for (reason, n) in &now.left_out {
                let n = more(*n, was.left_out.get(reason).copied().unwrap_or(0));
                let room = self.all.left_out.len() < REASONS || self.all.left_out.contains_key(reason);
                let reason = if room { reason.as_str() } else { "another" };
                *self.all.left_out.entry(reason.to_owned()).or_default() += n;
            }
            self.last.insert(name, now);
        }
    }

    /// All together.
    pub fn all(&self) -> &Counts {
        &self.all
    }
}

/// The figures of an analyser: nothing grows with the cluster but the jobs.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Analysis {
    /// Open findings of the partitions that it speaks for, by job, its user, kind and severity.
    pub findings: BTreeMap<(String, Option<u32>, Kind, Severity), u64>,
    /// The ranks and hosts that these findings name.
    pub named: FindingRanks,
    /// The totals of jobs, by job, its user and operation, in the order in which these came.
    pub operations: Vec<(String, Option<u32>, Func, Tally)>,
    /// The same of jobs that are not told apart.
    pub other_operations: Tally,
    /// Nodes that are heard, silent and ended.
    pub nodes: [u64; 3],
    /// The counts of all nodes.
    pub counts: Counts,
    /// Messages refused, by reason.
    pub refused: BTreeMap<&'static str, u64>,
    /// Messages for which there was no room.
    pub dropped: u64,
    /// Every partition, and whether it speaks for it.
    pub leases: BTreeMap<u32, bool>,
    /// True where JetStream keeps verdicts; absent where that is not known yet.
    pub keeps: Option<bool>,
    /// Processes known.
    pub processes: u64,
    /// Communicators that are open.
    pub communicators: u64,
    /// The most that the wall clock of a node is off by, in ns; absent where none is known.
    pub clock_off_ns: Option<u64>,
}

impl Analysis {
    pub(super) fn gather(&self, out: &mut Families, node: &str, budget: usize) {
        let mut folded = 0;
        for (i, ((job, owner, kind, severity), n)) in self.findings.iter().enumerate() {
            if i >= budget {
                folded += n;
                continue;
            }
            let labels = [node, job, &*uid_text(*owner), kind.as_str(), severity.as_str()];
            out.number(c::CLUSTER_FINDINGS, &labels, *n as f64);
        }
        if folded > 0 {
            out.overflow(c::CLUSTER_FINDINGS, Value::Number(folded as f64));
        }
        self.named.gather(out, c::CLUSTER_FINDING_RANKS);
        let mut rest = self.other_operations;
        for (i, (job, owner, func, tally)) in self.operations.iter().enumerate() {
            if i >= budget {
                rest.add(*tally);
                continue;
            }
            let labels = [node, job, &*uid_text(*owner), func.as_str()];
            out.number(c::CLUSTER_OPERATIONS, &labels, tally.count as f64);
            out.known(c::CLUSTER_BYTES, &labels, tally.bytes.map(|b| b as f64));
        }
        if rest.count > 0 {
            out.overflow(c::CLUSTER_OPERATIONS, Value::Number(rest.count as f64));
            if let Some(bytes) = rest.bytes {
                out.overflow(c::CLUSTER_BYTES, Value::Number(bytes as f64));
            }
        }
        for (state, n) in ["heard", "silent", "ended"].into_iter().zip(self.nodes) {
            out.number(c::ANALYSER_NODES, &[node, state], n as f64);
        }
        out.number(c::ANALYSER_MESSAGES, &[node], self.counts.messages as f64);
        out.number(c::ANALYSER_BYTES, &[node], self.counts.bytes as f64);
        out.number(c::ANALYSER_MISSED, &[node], self.counts.missed as f64);
        for (reason, n) in &self.refused {
            out.number(c::ANALYSER_REFUSED, &[node, reason], *n as f64);
        }
        out.number(c::ANALYSER_DROPPED, &[node], self.dropped as f64);
        for (partition, held) in &self.leases {
            let labels = [node, &*partition.to_string()];
            out.number(c::ANALYSER_SPEAKS, &labels, f64::from(u8::from(*held)));
        }
        out.known(c::ANALYSER_KEEPS, &[node], self.keeps.map(|k| f64::from(u8::from(k))));
        out.number(c::ANALYSER_OBSERVED, &[node], self.counts.observed as f64);
        out.number(c::ANALYSER_PUBLISHED, &[node], self.counts.published as f64);
        for (reason, n) in &self.counts.left_out {
            out.number(c::ANALYSER_LEFT_OUT, &[node, reason], *n as f64);
        }
        out.number(c::ANALYSER_PROCESSES, &[node], self.processes as f64);
        out.number(c::ANALYSER_COMMUNICATORS, &[node], self.communicators as f64);
        out.known(c::ANALYSER_CLOCK, &[node], self.clock_off_ns.map(|n| n as f64 / 1e9));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(observed: u64, reason: &str, n: u64) -> Counts {
        Counts { observed, left_out: [(reason.to_owned(), n)].into(), ..Counts::default() }
    }

    #[test]
    fn sums_only_grow_and_reasons_are_few() {
        let mut sums = Sums::default();
        let node = |name: &str, c: Counts| (name.to_owned(), c);
        sums.take([node("a", counts(10, "sampled", 4)), node("b", counts(5, "sampled", 1))].into_iter());
        sums.take([node("a", counts(12, "sampled", 5))].into_iter());
        assert_eq!((sums.all().observed, sums.all().left_out["sampled"]), (17, 6), "b's stays");
        sums.take([node("a", counts(3, "sampled", 2))].into_iter());
        assert_eq!((sums.all().observed, sums.all().left_out["sampled"]), (20, 8), "a has begun anew");
        let many = (0..100).map(|n| (format!("n{n}"), counts(1, &format!("reason {n}"), 1)));
        sums.take(many);
        assert!(sums.all().left_out.len() <= REASONS + 1 && sums.all().left_out["another"] > 50);
    }
}
