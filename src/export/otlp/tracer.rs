//! Decides which operations are written as traces, and writes them.

use super::queue::{Batch, LogEntry, Queue};
use super::settings::Settings;
use super::spans::{self, Mode};
use super::{attributes, queue};
use crate::export::metrics::Exported;
use crate::export::trace_id::{self, Piece};
use crate::join::{ClassKey, Finished, FinishedPart, Instance, Join, Operation};
use crate::model::{
    COMM_INIT, Change, CommId, Finding, FindingEvent, FindingId, Func, Rank, Severity as Weight, Track,
};
use opentelemetry::InstrumentationScope;
use opentelemetry::logs::Severity;
use opentelemetry_sdk::trace::SpanData;
use std::collections::{BTreeMap, VecDeque};

/// Operations of a class that must have been timed before one of them is called slow.
const KNOWN: u64 = 32;

/// An operation's name.
type Key = (CommId, Track, u64);

/// Why it is kept.
const HEAD: &str = "sampled";
const SLOW: &str = "slow";
const LATE: &str = "late";
const FINDING: &str = "finding";
const ASKED: &str = "asked for";

/// Why it is not.
/// A choice, and no loss like the others.
pub const TOO_MANY: &str = "more were slow or late than slow_per_second";
const NO_CLOCK: &str = "no time of it is known";
const NO_ROOM: &str = "the trace had no room";

#[derive(Debug)]
struct Kept {
    finished: Finished,
    sent: bool,
}

/// The reason why an operation is interesting.
#[derive(Debug, Default)]
struct Interest {
    findings: Vec<(FindingId, Vec<Rank>)>,
    /// Its root and ranks were written while it was in flight.
    in_flight: bool,
}

/// Picks operations and findings, and keeps them until they are taken to be sent.
#[derive(Debug)]
pub struct Tracer {
    settings: Settings,
    scope: InstrumentationScope,
    /// The last operations, sent or not, so that they can be sent later.
    kept: BTreeMap<Key, Kept>,
    order: VecDeque<Key>,
    interests: BTreeMap<Key, Interest>,
    interest_order: VecDeque<Key>,
    /// The operations that were asked for from elsewhere since the last pass over the join.
    asked: Vec<Key>,
    /// The operations that are interesting here, for others to be told.
    announced: Vec<Key>,
    spans: Queue<SpanData>,
    logs: Queue<LogEntry>,
    /// Seconds of the host's clock, and how many were kept in it because they were slow or late.
    second: (u64, u32),
}

impl Tracer {
    /// Nothing has happened yet.
    pub fn new(settings: &Settings) -> Self {
        let scope =
            InstrumentationScope::builder("ringwatch").with_version(env!("CARGO_PKG_VERSION")).build();
        Tracer {
            scope,
            kept: BTreeMap::new(),
            order: VecDeque::new(),
            interests: BTreeMap::new(),
            interest_order: VecDeque::new(),
            asked: Vec::new(),
            announced: Vec::new(),
            spans: Queue::new(settings.queue),
            logs: Queue::new(settings.queue),
            second: (0, 0),
            settings: settings.clone(),
        }
    }

    /// Takes operations that are over. Those that are sampled, slow, late or asked for are written; all are kept for a
    /// while, in case somebody asks later.
    pub fn finished(&mut self, join: &Join, finished: &[Finished]) {
        self.answer(join);
        for f in finished {
            let key = (f.comm, f.track, f.operation.order);
            let trace = trace_id::of_operation(key.0, key.1, key.2);
            let interest = self.interests.remove(&key);
            let why = if let Some(interest) = &interest {
                Some(if interest.findings.is_empty() { ASKED } else { FINDING })
            } else if trace_id::is_sampled(trace, self.settings.sample_ratio) {
                Some(HEAD)
            } else {
                self.tail(join, f).filter(|_| self.may(f.began_ns)).inspect(|_| self.announced.push(key))
            };
            if let Some(why) = why {
                let interest = interest.unwrap_or_default();
                let mode = if interest.in_flight { Mode::OverAfterAll } else { Mode::Over };
                self.write(join, f, &interest.findings, why, mode);
            }
            self.keep(key, Kept { finished: f.clone(), sent: why.is_some() });
        }
    }

    /// Takes changes of findings: each becomes a log record, and the operations in which an opened one shows are written,
    /// finished or not.
    pub fn events(&mut self, join: &Join, events: &[FindingEvent]) {
        self.answer(join);
        for event in events {
            self.tell(event, |at_ns| join.unix_ns(at_ns));
            if event.change == Change::Opened {
                self.opened(join, &event.finding);
            }
        }
    }

    fn opened(&mut self, join: &Join, f: &Finding) {
        let mut keys: Vec<(Key, Vec<Rank>)> = Vec::new();
        if has_operation(f) {
            keys.push(((f.communicator, f.operation.track, f.operation.order), f.ranks.clone()));
        }
        for v in f.victims.iter().filter(|_| !f.kind.is_device()) {
            let key = (v.communicator, v.track, v.order);
            if keys.iter().all(|(k, _)| *k != key) {
                keys.push((key, Vec::new()));
            }
        }
        let shows_in: Vec<Key> = keys.iter().map(|(k, _)| *k).collect();
        match spans::finding(join, f, &shows_in, &self.scope) {
            Some(span) => self.spans.put([span]),
            None => self.spans.lose(NO_CLOCK, 1),
        }
        let until_ns = f.last_seen_ns.max(f.first_seen_ns);
        for (key, culprits) in keys {
            self.announced.push(key);
            self.look_back(join, key, Some((f.id, culprits)), Some(until_ns));
        }
    }

    /// Somebody else found this operation interesting: what is known of it here is written too, when the join is
    /// looked at next.
    pub fn interesting(&mut self, communicator: CommId, track: Track, order: u64) {
        if self.asked.len() < self.settings.keep {
            self.asked.push((communicator, track, order));
        }
    }

    /// The operations that were found interesting here since the last call, for the other nodes to be told.
    pub fn take_announced(&mut self) -> Vec<(CommId, Track, u64)> {
        std::mem::take(&mut self.announced)
    }

    fn answer(&mut self, join: &Join) {
        for key in std::mem::take(&mut self.asked) {
            self.look_back(join, key, None, None);
        }
    }

    /// Writes an operation now if it is kept or in flight, and remembers to write it when it is over.
    fn look_back(
        &mut self,
        join: &Join,
        key: Key,
        finding: Option<(FindingId, Vec<Rank>)>,
        until_ns: Option<u64>,
    ) {
        let why = if finding.is_some() { FINDING } else { ASKED };
        let findings: Vec<_> = finding.into_iter().collect();
        if let Some(kept) = self.kept.get_mut(&key) {
            if !std::mem::replace(&mut kept.sent, true) {
                let finished = kept.finished.clone();
                self.write(join, &finished, &findings, why, Mode::Over);
            }
            return;
        }
        let instance = join.communicator(key.0).and_then(|c| c.instance(key.1, key.2));
        if let Some(instance) = instance.filter(|i| i.counted) {
            // It is over, and no longer kept here.
            if let Some(f) = describe(join, key, instance) {
                self.write(join, &f, &findings, why, Mode::Over);
            }
            return;
        }
        if !self.interests.contains_key(&key) {
            self.interest_order.push_back(key);
        }
        let interest = self.interests.entry(key).or_default();
        interest.findings.extend(findings.iter().cloned());
        // It is written once while it is in flight; findings that come later are in their own spans' links.
        let first = !std::mem::replace(&mut interest.in_flight, instance.is_some());
        if let (true, Some(f)) = (first, instance.and_then(|i| describe(join, key, i))) {
            let known = f.parts.iter().filter_map(|p| p.issued_ns.max(p.started_ns)).max();
            let until = until_ns.or(known).unwrap_or(0);
            self.write(join, &f, &findings, why, Mode::InFlight(until));
        }
        if self.interest_order.len() > self.settings.keep
            && let Some(oldest) = self.interest_order.pop_front()
        {
            self.interests.remove(&oldest);
        }
    }

    fn keep(&mut self, key: Key, kept: Kept) {
        if self.settings.keep == 0 {
            return;
        }
        if self.kept.insert(key, kept).is_none() {
            self.order.push_back(key);
        }
        while self.order.len() > self.settings.keep {
            if let Some(oldest) = self.order.pop_front() {
                self.kept.remove(&oldest);
            }
        }
    }

    /// The unusual property of an operation.
    fn tail(&self, join: &Join, f: &Finished) -> Option<&'static str> {
        if f.late.is_some_and(|l| l.by_ns >= self.settings.late_ms.saturating_mul(1_000_000)) {
            return Some(LATE);
        }
        let transfer = f.transfer_ns? as f64;
        let collective = f.func != Func::SendRecv;
        let class = ClassKey {
            comm: f.comm,
            func: f.func,
            size_class: f.size_class,
            algo: f.operation.algo.filter(|_| collective),
            proto: f.operation.proto.filter(|_| collective),
        };
        let usual = join.class(&class).filter(|c| c.timed() >= KNOWN)?.quantile(0.5)?;
        (transfer > usual * self.settings.slow_factor).then_some(SLOW)
    }

    /// True while this second has room for one more.
    fn may(&mut self, at_ns: Option<u64>) -> bool {
        let second = at_ns.unwrap_or(0) / 1_000_000_000;
        if second > self.second.0 {
            self.second = (second, 0);
        }
        self.second.1 = self.second.1.saturating_add(1);
        let may = self.second.1 <= self.settings.slow_per_second;
        if !may {
            self.spans.lose(TOO_MANY, 1);
        }
        may
    }

    fn write(
        &mut self,
        join: &Join,
        f: &Finished,
        findings: &[(FindingId, Vec<Rank>)],
        why: &'static str,
        mode: Mode,
    ) {
        match spans::write(join, f, findings, why, mode, &self.scope) {
            Some((spans, dropped)) => {
                self.spans.put(spans);
                self.spans.lose(NO_ROOM, dropped);
            }
            None => self.spans.lose(NO_CLOCK, 1),
        }
    }

    /// Writes a change of a finding as a log record, and nothing else. The clock makes wall clock ns of the finding's times.
    pub fn tell(&mut self, event: &FindingEvent, clock: impl Fn(u64) -> Option<u64>) {
        let f = &event.finding;
        let (name, at_ns) = match event.change {
            Change::Opened => ("ringwatch.finding.opened", f.first_seen_ns),
            Change::Updated => ("ringwatch.finding.updated", f.last_seen_ns),
            Change::Closed => ("ringwatch.finding.closed", f.closed_ns),
        };
        let Some(unix_ns) = clock(at_ns) else {
            self.logs.lose(NO_CLOCK, 1);
            return;
        };
        let severity = match f.severity {
            _ if event.change == Change::Closed => Severity::Info,
            Weight::Info => Severity::Info,
            Weight::Warning => Severity::Warn,
            Weight::Critical => Severity::Error,
        };
        let trace = trace_id::of_operation(f.communicator, f.operation.track, f.operation.order);
        let context = (f.operation.func != COMM_INIT).then(|| (trace, trace_id::of_span(trace, Piece::Root)));
        let body = match (event.change, f.close_reason) {
            (Change::Opened, _) => f.headline(),
            (Change::Updated, _) => format!("updated: {}", f.headline()),
            (Change::Closed, Some(reason)) => format!("closed ({}): {}", reason.as_str(), f.headline()),
            (Change::Closed, None) => format!("closed: {}", f.headline()),
        };
        let attributes = attributes::of_finding(f);
        self.logs.put([LogEntry { unix_ns, severity, event: name, body, attributes, context }]);
    }

    /// The batch to send now; empty when nothing waits.
    pub fn take(&mut self) -> Batch {
        Batch { spans: self.spans.take(self.settings.batch), logs: self.logs.take(self.settings.batch) }
    }

    /// Takes back what could not be sent, to be sent first.
    pub fn give_back(&mut self, batch: Batch) {
        self.spans.give_back(batch.spans);
        self.logs.give_back(batch.logs);
    }

    /// The accounting of what waits and what was lost here, for the metrics.
    pub fn exported(&self) -> Vec<Exported> {
        vec![self.spans.exported("spans"), self.logs.exported(queue::LOGS)]
    }
}

/// True when a finding shows in an operation, and not in a device or in the making of a communicator.
fn has_operation(f: &Finding) -> bool {
    !f.kind.is_device() && f.operation.func != COMM_INIT
}

/// An operation as the join holds it.
fn describe(join: &Join, (comm, track, order): Key, instance: &Instance) -> Option<Finished> {
    let c = join.communicator(comm)?;
    let first = &instance.first()?.op;
    let operation = Operation::of(first, order, c.ranks());
    let parts = instance.parts.values().map(|p| FinishedPart {
        rank: p.op.rank,
        segment: p.op.segment,
        called_ns: p.op.called_ns,
        issued_ns: p.op.issued_ns,
        started_ns: p.started_ns,
        duration_ns: p.duration_ns(),
        waiting_ns: None,
        timing: p.op.timing,
        ended: p.finished,
        net: p.op.net.clone(),
    });
    Some(Finished {
        comm,
        track,
        func: if let Track::Pair(..) = track { Func::SendRecv } else { first.func },
        ranks: c.ranks(),
        size_class: operation.bytes.and_then(crate::join::size_class),
        channels: first.channels,
        began_ns: instance.began_ns(),
        transfer_ns: None,
        busbw: None,
        late: None,
        parts: parts.collect(),
        told: Vec::new(),
        operation,
    })
}
