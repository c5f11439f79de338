//! Operations that are over, added up.

use super::family::{Families, Value};
use super::histogram::{Exemplar, Histogram};
use super::scope::{ScopeId, Scopes};
use super::store::Store;
use crate::export::catalogue as c;
use crate::export::trace_id::{self, Piece};
use crate::join::{Finished, Join};
use crate::model::{Algo, Func, Proto, Rank, SegmentId, Timing, bus_factor};

/// A rank that comes later than the first by less than this, in ns, is not called late.
const LATE_NS: u64 = 1_000_000;

/// What distinguishes the series of operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Class {
    scope: ScopeId,
    func: Func,
    algo: Option<Algo>,
    proto: Option<Proto>,
    size_class: Option<u8>,
}

#[derive(Debug, Clone, Default)]
struct Sums {
    count: u64,
    bytes: Option<u64>,
    timed_bytes: Option<u64>,
    timed_ns: u64,
    bus_bytes: Option<f64>,
    transfer: Histogram,
}

#[derive(Debug, Clone, Default)]
struct OfRank {
    waiting_ns: Option<u64>,
    late: u64,
    late_ns: u64,
}

#[derive(Debug, Clone, Default)]
struct OfNetwork {
    sent: u64,
    received: u64,
    waited_ns: [u64; 4],
}

/// What the network's steps wait for, in the order in which their times are kept.
const PHASES: [&str; 4] = ["gpu", "peer", "wire", "flush"];

/// All of it.
#[derive(Debug)]
pub(super) struct Operations {
    classes: Store<Class, Sums>,
    ranks: Store<(ScopeId, Rank), OfRank>,
    network: Store<ScopeId, OfNetwork>,
    untimed: Store<(ScopeId, &'static str), u64>,
    /// Untimed parts of the operations that are being added.
    batch: Vec<((SegmentId, &'static str), u64)>,
}

impl Operations {
    pub(super) fn new(budget: usize) -> Self {
        Operations {
            classes: Store::new(budget),
            ranks: Store::new(budget),
            network: Store::new(budget),
            untimed: Store::new(budget),
            batch: Vec::new(),
        }
    }

    pub(super) fn add(&mut self, scopes: &mut Scopes, join: &Join, f: &Finished, traced: f64) {
        let scope = scopes.of(join, f.comm, f.parts.first().map(|p| p.segment));
        let sums = self.classes.at(Class {
            scope,
            func: f.func,
            algo: f.operation.algo,
            proto: f.operation.proto,
            size_class: f.size_class,
        });
        sums.count += 1;
        if let Some(bytes) = f.operation.bytes {
            let sum = sums.bytes.get_or_insert(0);
            *sum = sum.saturating_add(bytes);
        }
        if let Some(transfer_ns) = f.transfer_ns {
            sums.transfer.observe(seconds(transfer_ns), exemplar(join, f, transfer_ns, traced));
            if let Some(bytes) = f.operation.bytes {
                let sum = sums.timed_bytes.get_or_insert(0);
                *sum = sum.saturating_add(bytes);
                sums.timed_ns = sums.timed_ns.saturating_add(transfer_ns);
                let ranks = if f.func == Func::SendRecv { Some(2) } else { f.ranks };
                if let Some(ranks) = ranks {
                    *sums.bus_bytes.get_or_insert(0.0) += bytes as f64 * bus_factor(f.func, ranks);
                }
            }
        }
        for part in &f.parts {
            let late = f.late.filter(|l| l.rank == part.rank && l.by_ns >= LATE_NS);
            if part.waiting_ns.is_some() || late.is_some() {
                let of = scopes.of(join, f.comm, Some(part.segment));
                let rank = self.ranks.at((of, part.rank));
                if let Some(waiting) = part.waiting_ns {
                    *rank.waiting_ns.get_or_insert(0) += waiting;
                }
                if let Some(late) = late {
                    rank.late += 1;
                    rank.late_ns += late.by_ns;
                }
            }
            if part.duration_ns.is_none() {
                let reason = match part.timing {
                    Timing::Not(why) => why.as_str(),
                    Timing::Kernel | Timing::Events => "no stamp that can be true",
                    Timing::Unknown => "not known",
                };
                // Most have the same few: they are counted first, and looked up when the whole batch is.
                let key = (part.segment, reason);
                match self.batch.iter_mut().find(|(k, _)| k.0 == key.0 && std::ptr::eq(k.1, key.1)) {
                    Some((_, n)) => *n += 1,
                    None => self.batch.push((key, 1)),
                }
            }
            if !part.net.is_empty() {
                let of = scopes.of(join, f.comm, Some(part.segment));
                let sums = self.network.at(of);
                for n in &part.net {
                    let bytes = if n.is_send { &mut sums.sent } else { &mut sums.received };
                    *bytes = bytes.saturating_add(n.bytes);
                    for (sum, waited) in sums.waited_ns.iter_mut().zip(n.waited_ns) {
                        *sum = sum.saturating_add(waited);
                    }
                }
            }
        }
    }

    /// Ends a batch of operations.
    pub(super) fn added(&mut self, scopes: &mut Scopes, join: &Join) {
        for ((segment, reason), n) in std::mem::take(&mut self.batch) {
            let of = scopes.of_process(join, segment);
            *self.untimed.at((of, reason)) += n;
        }
    }

    pub(super) fn expire(&mut self, now_ns: u64, idle_ns: u64) {
        self.classes.expire(now_ns, idle_ns);
        self.ranks.expire(now_ns, idle_ns);
        self.network.expire(now_ns, idle_ns);
        self.untimed.expire(now_ns, idle_ns);
    }

    pub(super) fn folded(&self) -> u64 {
        self.classes.folded() + self.ranks.folded() + self.network.folded() + self.untimed.folded()
    }

    pub(super) fn len(&self) -> usize {
        self.classes.len() + self.ranks.len() + self.network.len() + self.untimed.len()
    }

    pub(super) fn scopes(&self) -> impl Iterator<Item = ScopeId> {
        let classes = self.classes.iter().map(|(k, _)| k.scope);
        let ranks = self.ranks.iter().map(|(k, _)| k.0);
        let network = self.network.iter().map(|(k, _)| *k);
        classes.chain(ranks).chain(network).chain(self.untimed.iter().map(|(k, _)| k.0))
    }

    pub(super) fn gather(&self, scopes: &Scopes, out: &mut Families) {
        for (k, sums) in self.classes.iter() {
            let s = scopes.get(k.scope);
            let size = k.size_class.map_or_else(String::new, |n| format!("2^{n}"));
            let (algo, proto) = (k.algo.map_or("", Algo::as_str), k.proto.map_or("", Proto::as_str));
            let labels = [&*s.node, &*s.job, &*s.communicator, k.func.as_str(), algo, proto, &*size];
            sums.gather(|metric, value| out.put(metric, &labels, value));
        }
        if let Some(sums) = self.classes.overflow() {
            sums.gather(|metric, value| out.overflow(metric, value));
        }
        for ((scope, rank), of) in self.ranks.iter() {
            let s = scopes.get(*scope);
            let rank = rank.to_string();
            of.gather(|metric, value| out.put(metric, &[&s.node, &s.job, &s.communicator, &rank], value));
        }
        if let Some(of) = self.ranks.overflow() {
            of.gather(|metric, value| out.overflow(metric, value));
        }
        for (scope, of) in self.network.iter() {
            let s = scopes.get(*scope);
            let labels = |what| [&*s.node, &*s.job, &*s.communicator, what];
            out.number(c::NETWORK_BYTES, &labels("transmit"), of.sent as f64);
            out.number(c::NETWORK_BYTES, &labels("receive"), of.received as f64);
            for (phase, waited) in PHASES.into_iter().zip(of.waited_ns) {
                out.number(c::NETWORK_WAIT, &labels(phase), seconds(waited));
            }
        }
        if let Some(of) = self.network.overflow() {
            let bytes = of.sent.saturating_add(of.received);
            out.overflow(c::NETWORK_BYTES, Value::Number(bytes as f64));
            let waited = of.waited_ns.iter().map(|n| seconds(*n)).sum();
            out.overflow(c::NETWORK_WAIT, Value::Number(waited));
        }
        for ((scope, reason), n) in self.untimed.iter() {
            let s = scopes.get(*scope);
            out.number(c::UNTIMED, &[&s.node, &s.job, reason], *n as f64);
        }
        if let Some(n) = self.untimed.overflow() {
            out.overflow(c::UNTIMED, Value::Number(*n as f64));
        }
    }
}

impl Sums {
    fn gather(&self, mut put: impl FnMut(&'static c::Metric, Value)) {
        put(c::OPERATIONS, Value::Number(self.count as f64));
        let known = [
            (c::OPERATION_BYTES, self.bytes.map(|b| b as f64)),
            (c::TIMED_BYTES, self.timed_bytes.map(|b| b as f64)),
            (c::TIMED_SECONDS, self.timed_bytes.map(|_| seconds(self.timed_ns))),
            (c::BUS_BYTES, self.bus_bytes),
        ];
        for (metric, value) in known {
            if let Some(v) = value {
                put(metric, Value::Number(v));
            }
        }
        if self.transfer.count > 0 {
            put(c::TRANSFER, Value::Histogram(Box::new(self.transfer.clone())));
        }
    }
}

impl OfRank {
    fn gather(&self, mut put: impl FnMut(&'static c::Metric, Value)) {
        if let Some(waiting) = self.waiting_ns {
            put(c::WAITING, Value::Number(seconds(waiting)));
        }
        put(c::LATE, Value::Number(self.late as f64));
        put(c::LATE_SECONDS, Value::Number(seconds(self.late_ns)));
    }
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

/// The trace that a transfer can be found in.
fn exemplar(join: &Join, f: &Finished, transfer_ns: u64, traced: f64) -> Option<Exemplar> {
    let trace = trace_id::of_operation(f.comm, f.track, f.operation.order);
    trace_id::is_sampled(trace, traced).then(|| Exemplar {
        value: seconds(transfer_ns),
        trace,
        span: trace_id::of_span(trace, Piece::Root),
        unix_ns: f.began_ns.and_then(|t| join.unix_ns(t)),
    })
}
