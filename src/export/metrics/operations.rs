//! Operations that are over, added up.

use super::family::{Families, Value};
use super::histogram::{Exemplar, Histogram};
use super::scope::{ScopeId, Scopes};
use super::store::Store;
use crate::export::catalogue as c;
use crate::export::trace_id::{self, Piece};
use crate::join::{Finished, Join};
use crate::model::{Algo, CommId, Func, Proto, Rank, SegmentId, Timing, Untimed, bus_factor};

/// A rank that comes later than the first by less than this, in ns, is not called late.
const LATE_NS: u64 = 1_000_000;

/// The labels that distinguish the series of operations.
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

/// The things that the network's steps wait for, in the order in which their times are kept.
const PHASES: [&str; 4] = ["gpu", "peer", "wire", "flush"];

/// All of it.
#[derive(Debug)]
pub(super) struct Operations {
    classes: Store<Class, Sums>,
    ranks: Store<(ScopeId, Rank), OfRank>,
    network: Store<ScopeId, OfNetwork>,
    untimed: Store<(ScopeId, &'static str), u64>,
    /// The ranks of the communicator whose operations are being added.
    row: Vec<RankInRow>,
    /// Untimed parts of the operations that are being added.
    untimed_parts: Vec<((SegmentId, &'static str), u64)>,
}

/// The operations of a rank in a communicator.
#[derive(Debug)]
struct RankInRow {
    comm: CommId,
    segment: SegmentId,
    rank: Rank,
    /// In how many of them.
    times: u64,
    sums: OfRank,
}

/// The properties that the operations of a communicator in one series have in common.
fn kind(f: &Finished) -> (Option<SegmentId>, Func, Option<Algo>, Option<Proto>, Option<u8>) {
    let process = f.parts.first().map(|p| p.segment);
    (process, f.func, f.operation.algo, f.operation.proto, f.size_class)
}

impl Operations {
    pub(super) fn new(budget: usize) -> Self {
        Operations {
            classes: Store::new(budget),
            ranks: Store::new(budget),
            network: Store::new(budget),
            untimed: Store::new(budget),
            row: Vec::new(),
            untimed_parts: Vec::new(),
        }
    }

    /// Takes operations that are over. Those of a communicator come in a row, and are of few classes and ranks: what they
    /// belong to is looked up once for a row of them.
    pub(super) fn add(&mut self, scopes: &mut Scopes, join: &Join, finished: &[Finished], traced: f64) {
        for of_comm in finished.chunk_by(|a, b| a.comm == b.comm) {
            for alike in of_comm.chunk_by(|a, b| kind(a) == kind(b)) {
                self.add_alike(scopes, join, alike, traced);
            }
            for f in of_comm {
                self.add_parts(scopes, join, f);
            }
            for r in self.row.drain(..) {
                let of = scopes.of_rank(join, r.comm, r.segment);
                self.ranks.at_times((of, r.rank), r.times).add(&r.sums);
            }
        }
        for ((segment, reason), n) in self.untimed_parts.drain(..) {
            let of = scopes.of_process(join, segment);
            *self.untimed.at_times((of, reason), n) += n;
        }
    }

    /// Takes operations of one class.
    fn add_alike(&mut self, scopes: &mut Scopes, join: &Join, alike: &[Finished], traced: f64) {
        let Some(first) = alike.first() else { return };
        let scope = scopes.of(join, first.comm, first.parts.first().map(|p| p.segment));
        let (func, algo, proto) = (first.func, first.operation.algo, first.operation.proto);
        let class = Class { scope, func, algo, proto, size_class: first.size_class };
        let sums = self.classes.at_times(class, alike.len() as u64);
        for f in alike {
            sums.add(f, |transfer_ns| exemplar(join, f, transfer_ns, traced));
        }
    }

    /// Takes what single ranks did in an operation.
    fn add_parts(&mut self, scopes: &mut Scopes, join: &Join, f: &Finished) {
        for part in &f.parts {
            let late = f.late.filter(|l| l.rank == part.rank && l.by_ns >= LATE_NS);
            if part.waiting_ns.is_some() || late.is_some() {
                let sums = OfRank {
                    waiting_ns: part.waiting_ns,
                    late: u64::from(late.is_some()),
                    late_ns: late.map_or(0, |l| l.by_ns),
                };
                let place = |r: &RankInRow| (r.rank, r.segment).cmp(&(part.rank, part.segment));
                match self.row.binary_search_by(place) {
                    Ok(at) => {
                        self.row[at].times += 1;
                        self.row[at].sums.add(&sums);
                    }
                    Err(at) => {
                        let (comm, segment, rank) = (f.comm, part.segment, part.rank);
                        self.row.insert(at, RankInRow { comm, segment, rank, times: 1, sums });
                    }
                }
            }
            if part.duration_ns.is_none() {
                let reason = match part.timing {
                    Timing::Not(why) => why.as_str(),
                    Timing::Kernel | Timing::Events => "no stamp that can be true",
                    Timing::Launch => Untimed::Alone.as_str(),
                    Timing::Unknown => "not known",
                };
                let key = (part.segment, reason);
                match self.untimed_parts.iter_mut().find(|(k, _)| k.0 == key.0 && std::ptr::eq(k.1, key.1)) {
                    Some((_, n)) => *n += 1,
                    None => self.untimed_parts.push((key, 1)),
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
            let labels = [&*s.node, &*s.job, &*s.uid, &*s.communicator, k.func.as_str(), algo, proto, &*size];
            sums.gather(|metric, value| out.put(metric, &labels, value));
        }
        if let Some(sums) = self.classes.overflow() {
            sums.gather(|metric, value| out.overflow(metric, value));
        }
        for ((scope, rank), of) in self.ranks.iter() {
            let s = scopes.get(*scope);
            let rank = rank.to_string();
            out.inside(s.container.clone());
            of.gather(|metric, value| {
                out.put(metric, &[&s.node, &s.job, &s.uid, &s.communicator, &rank], value)
            });
        }
        out.inside(None);
        if let Some(of) = self.ranks.overflow() {
            of.gather(|metric, value| out.overflow(metric, value));
        }
        for (scope, of) in self.network.iter() {
            let s = scopes.get(*scope);
            let labels = |what| [&*s.node, &*s.job, &*s.uid, &*s.communicator, what];
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
            out.number(c::UNTIMED, &[&s.node, &s.job, &s.uid, reason], *n as f64);
        }
        if let Some(n) = self.untimed.overflow() {
            out.overflow(c::UNTIMED, Value::Number(*n as f64));
        }
    }
}

impl Sums {
    fn add(&mut self, f: &Finished, exemplar: impl FnOnce(u64) -> Option<Exemplar>) {
        self.count += 1;
        if let Some(bytes) = f.operation.bytes {
            let sum = self.bytes.get_or_insert(0);
            *sum = sum.saturating_add(bytes);
        }
        let Some(transfer_ns) = f.transfer_ns else { return };
        self.transfer.observe(seconds(transfer_ns), exemplar(transfer_ns));
        if let Some(bytes) = f.operation.bytes {
            let sum = self.timed_bytes.get_or_insert(0);
            *sum = sum.saturating_add(bytes);
            self.timed_ns = self.timed_ns.saturating_add(transfer_ns);
            let ranks = if f.func == Func::SendRecv { Some(2) } else { f.ranks };
            if let Some(ranks) = ranks {
                *self.bus_bytes.get_or_insert(0.0) += bytes as f64 * bus_factor(f.func, ranks);
            }
        }
    }

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
    fn add(&mut self, other: &OfRank) {
        if let Some(waiting) = other.waiting_ns {
            *self.waiting_ns.get_or_insert(0) += waiting;
        }
        self.late += other.late;
        self.late_ns += other.late_ns;
    }

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
    if traced <= 0.0 {
        return None;
    }
    let trace = trace_id::of_operation(f.comm, f.track, f.operation.order);
    trace_id::is_sampled(trace, traced).then(|| Exemplar {
        value: seconds(transfer_ns),
        trace,
        span: trace_id::of_span(trace, Piece::Root),
        unix_ns: f.began_ns.and_then(|t| join.unix_ns(t)),
    })
}
