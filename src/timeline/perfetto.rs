//! A timeline for Perfetto: finished operations as slices, in TrackEvent packets.
//!
//! A track for each host has one for each of its ranks, and this one for each of the rank's communicators. A flow joins the ranks'
//! slices of an operation. Field numbers are those of Perfetto's protobuf files; only what is written here is declared.

mod messages;

use super::{comm_name, ended_ns};
use crate::join::{Finished, FinishedPart, FinishedSink, Join};
use crate::model::{CommId, Finding, SegmentId, Track, size_text};
use messages::{Annotation, Counter, EventKind, Packet, TrackDescriptor, TrackEvent};
use std::collections::HashMap;
use std::fmt;
use std::io::{self, Write};

/// Slices that are written at most: a browser takes about 2 GB for a trace. More are counted.
const SLICES_MAX: u64 = 4_000_000;
/// The sequence of all packets; its state is cleared by the first one.
const SEQUENCE: u32 = 1;
const STATE_CLEARED: u32 = 1;
/// Perfetto's numbers for the clock of a trace, and for the clock on the wall.
const BOOTTIME: u32 = 6;
const REALTIME: u32 = 1;
/// Slices of a rank and communicator that may run at once, each on a line of its own.
const LINES_MAX: usize = 64;

/// A track of the trace.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum TrackKey {
    Findings,
    Host(String),
    Process(SegmentId),
    Line(SegmentId, CommId, LineKind, usize),
    /// The counter of a communicator.
    Bandwidth(CommId),
}

/// Operations that share a line of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum LineKind {
    Collectives,
    Transfers,
}

/// See the module.
pub struct Perfetto<W: Write + Send> {
    out: W,
    packet: Vec<u8>,
    tracks: HashMap<TrackKey, u64>,
    /// Until when each line is taken.
    lines: HashMap<(SegmentId, CommId, LineKind), Vec<u64>>,
    flows: u64,
    slices: u64,
    left_out: u64,
    fault: Option<io::Error>,
}

impl<W: Write + Send> fmt::Debug for Perfetto<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Perfetto").field("slices", &self.slices).finish_non_exhaustive()
    }
}

impl<W: Write + Send> Perfetto<W> {
    /// Begins a trace.
    pub fn new(out: W) -> Self {
        let mut trace = Perfetto {
            out,
            packet: Vec::new(),
            tracks: HashMap::new(),
            lines: HashMap::new(),
            flows: 0,
            slices: 0,
            left_out: 0,
            fault: None,
        };
        // Times in the trace are times of the wall.
        let clocks = [BOOTTIME, REALTIME].map(|clock_id| messages::Clock { clock_id, timestamp: 1 });
        let snapshot = messages::ClockSnapshot { clocks: clocks.to_vec() };
        trace.write(&Packet {
            sequence_flags: Some(STATE_CLEARED),
            clock_snapshot: Some(snapshot),
            ..Packet::default()
        });
        trace
    }

    /// Writes findings as events, and what is left. Returns the number of slices, and of those that were left out.
    ///
    /// # Errors
    /// Those of the writer, now or before.
    pub fn finish(&mut self, findings: &[Finding], join: &Join) -> io::Result<(u64, u64)> {
        for finding in findings {
            let track = self.track(TrackKey::Findings, None, || "findings".to_owned());
            let mut event = TrackEvent::of(EventKind::Instant, track);
            event.name = Some(finding.headline());
            event.categories = vec![finding.severity.as_str().to_owned()];
            event.annotations =
                finding.evidence.iter().map(|e| Annotation::text("evidence", &e.text)).collect();
            event.annotations.push(Annotation::text("next", &finding.advice));
            self.event(wall(join, finding.since_ns), event);
        }
        match self.fault.take() {
            Some(fault) => Err(fault),
            None => self.out.flush().map(|()| (self.slices, self.left_out)),
        }
    }

    fn write(&mut self, packet: &Packet) {
        self.packet.clear();
        let packet = Packet { sequence: Some(SEQUENCE), ..packet.clone() };
        // A trace is a message whose only field, number 1, is repeated.
        prost::encoding::message::encode(1, &packet, &mut self.packet);
        if self.fault.is_none()
            && let Err(fault) = self.out.write_all(&self.packet)
        {
            self.fault = Some(fault);
        }
    }

    fn event(&mut self, at_ns: u64, event: TrackEvent) {
        self.write(&Packet { timestamp: Some(at_ns), event: Some(event), ..Packet::default() });
    }

    /// The number of a track, which is described when it is first used.
    fn track(&mut self, key: TrackKey, parent: Option<u64>, name: impl FnOnce() -> String) -> u64 {
        if let Some(track) = self.tracks.get(&key) {
            return *track;
        }
        let uuid = self.tracks.len() as u64 + 1;
        let counter = matches!(key, TrackKey::Bandwidth(_)).then(|| Counter { unit_name: "GB/s".to_owned() });
        self.tracks.insert(key, uuid);
        let track = TrackDescriptor { uuid, name: name(), parent, counter };
        self.write(&Packet { track: Some(track), ..Packet::default() });
        uuid
    }

    fn process(&mut self, segment: SegmentId, join: &Join) -> u64 {
        let record = join.process(segment).map(|p| &p.record);
        let host = record.map_or_else(|| "-".to_owned(), |r| r.host.clone());
        let parent = self.track(TrackKey::Host(host.clone()), None, || host);
        self.track(TrackKey::Process(segment), Some(parent), || match record {
            Some(r) => match r.job.rank {
                Some(rank) => format!("rank {rank} (pid {})", r.pid),
                None => format!("pid {}", r.pid),
            },
            None => "process".to_owned(),
        })
    }

    /// The first line of a rank and communicator that is free from a moment on.
    fn line(
        &mut self,
        op: &Finished,
        part: &FinishedPart,
        join: &Join,
        (from_ns, to_ns): (u64, u64),
    ) -> Option<u64> {
        let kind = if let Track::Pair(..) = op.track { LineKind::Transfers } else { LineKind::Collectives };
        let lines = self.lines.entry((part.segment, op.comm, kind)).or_default();
        let free = lines.iter().position(|until_ns| *until_ns <= from_ns);
        let line = free.unwrap_or(lines.len());
        if line >= LINES_MAX {
            return None;
        }
        match lines.get_mut(line) {
            Some(until_ns) => *until_ns = to_ns,
            None => lines.push(to_ns),
        }
        let parent = self.process(part.segment, join);
        let what = if kind == LineKind::Transfers { " transfers" } else { "" };
        let name = || format!("{}{what}, rank {}", comm_name(join, op.comm), part.rank);
        Some(self.track(TrackKey::Line(part.segment, op.comm, kind, line), Some(parent), name))
    }

    fn part(&mut self, op: &Finished, part: &FinishedPart, flow: u64, join: &Join) {
        let times = part.started_ns.zip(ended_ns(part));
        let Some((from_ns, to_ns)) = times.or_else(|| part.issued_ns.zip(part.issued_ns)) else { return };
        if self.slices >= SLICES_MAX {
            self.left_out += 1;
            return;
        }
        let Some(track) = self.line(op, part, join, (from_ns, to_ns)) else {
            self.left_out += 1;
            return;
        };
        self.slices += 1;
        let kind = if times.is_some() { EventKind::Begin } else { EventKind::Instant };
        let mut event = TrackEvent::of(kind, track);
        let size = op.operation.bytes.map_or_else(String::new, |bytes| format!(" {}", size_text(bytes)));
        event.name = Some(format!("{}{size}", op.func.as_str()));
        event.categories = vec!["nccl".to_owned()];
        event.flows = vec![flow];
        event.annotations = annotations(op, part, times.is_some());
        self.event(wall(join, from_ns), event);
        if times.is_none() {
            return;
        }
        if let Some(waited_ns) = part.waiting_ns.filter(|ns| *ns > 0) {
            let mut event = TrackEvent::of(EventKind::Begin, track);
            event.name = Some("waiting for others".to_owned());
            event.categories = vec!["wait".to_owned()];
            self.event(wall(join, from_ns), event);
            let waited_until_ns = from_ns.saturating_add(waited_ns).min(to_ns);
            self.event(wall(join, waited_until_ns), TrackEvent::of(EventKind::End, track));
        }
        self.event(wall(join, to_ns), TrackEvent::of(EventKind::End, track));
    }
}

/// The rest that is known of a rank's part.
fn annotations(op: &Finished, part: &FinishedPart, is_timed: bool) -> Vec<Annotation> {
    let mut all = vec![Annotation::number("issue order", op.operation.order)];
    if let Some(algorithm) = op.operation.algo {
        all.push(Annotation::text("algorithm", algorithm.as_str()));
    }
    if let Some(protocol) = op.operation.proto {
        all.push(Annotation::text("protocol", protocol.as_str()));
    }
    if let Some(late) = op.late.filter(|late| late.rank == part.rank) {
        all.push(Annotation::real("late by ms", late.by_ns as f64 / 1e6));
    }
    match (is_timed, part.duration_ns) {
        (true, _) => {}
        (false, Some(ns)) => {
            all.push(Annotation::real("GPU time in ms", ns as f64 / 1e6));
            all.push(Annotation::text("start", "not known; this is when NCCL issued it"));
        }
        (false, None) => all.push(Annotation::text("GPU time", "not known; this is when NCCL issued it")),
    }
    if !part.ended {
        all.push(Annotation::text("end", "nothing says that it ended"));
    }
    all
}

/// A moment as Unix time, as far as clocks are known.
fn wall(join: &Join, at_ns: u64) -> u64 {
    join.unix_ns(at_ns).unwrap_or(at_ns)
}

impl<W: Write + Send> FinishedSink for Perfetto<W> {
    fn end(&mut self, open: &[Finished], join: &Join, now_ns: u64) {
        self.take(open, join, now_ns);
    }

    fn take(&mut self, operations: &[Finished], join: &Join, _: u64) {
        for op in operations {
            self.flows += 1;
            let flow = self.flows;
            for part in &op.parts {
                self.part(op, part, flow, join);
            }
            let end_ns = op.parts.iter().filter_map(ended_ns).max();
            if let Some((busbw, end_ns)) = op.busbw.zip(end_ns) {
                let name = || format!("{} bus bandwidth", comm_name(join, op.comm));
                let track = self.track(TrackKey::Bandwidth(op.comm), None, name);
                let mut event = TrackEvent::of(EventKind::Counter, track);
                event.counter = Some(busbw / 1e9);
                self.event(wall(join, end_ns), event);
            }
        }
    }
}
