//! The spans of an operation.

use super::attributes::{self, whole};
use crate::export::trace_id::{self, Piece};
use crate::join::{Finished, FinishedPart, Join};
use crate::model::{CommId, Finding, FindingId, NetProgress, Rank, Track};
use opentelemetry::logs::AnyValue;
use opentelemetry::trace::{Link, SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState};
use opentelemetry::{Array, InstrumentationScope, KeyValue, StringValue, Value};
use opentelemetry_sdk::trace::{SpanData, SpanEvents, SpanLinks};
use std::collections::BTreeSet;
use std::time::{Duration, UNIX_EPOCH};

/// Spans of a trace, over all nodes, at most.
pub(super) const MOST: u32 = 2_000;
/// Network transfers shown of one rank at most.
const NET: u32 = 64;
/// Ranks shown whatever the number: those that findings name, and who came late.
const NAMED: u32 = 64;

/// How an operation is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// It is over.
    Over,
    /// It is over, and its root was written while it was not.
    OverAfterAll,
    /// It is not, and this moment (host monotonic ns) is the last that is known of it.
    InFlight(u64),
}

/// The parts of an operation that have room: every node must come to the same, knowing only the number of ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Room {
    /// Every how manieth rank is shown.
    stride: u32,
    /// Waiting and transfer too.
    details: bool,
    /// Network transfers of each rank.
    net: u32,
}

impl Room {
    fn of(ranks: u32) -> Self {
        // Two for the operation itself; those that are named may need all their pieces at any stride.
        let room = MOST - 2 - NAMED * 4 - 1;
        let each = room / ranks.max(1);
        match each {
            // A rank's own span, once in flight and once over, and two below it.
            4.. => Room { stride: 1, details: true, net: (each - 4).min(NET) },
            2..=3 => Room { stride: 1, details: false, net: 0 },
            _ => Room { stride: (ranks * 2).div_ceil(room), details: false, net: 0 },
        }
    }
}

/// The spans of what this node sees of an operation, and how many of them had no room. None without a wall clock.
pub(super) fn write(
    join: &Join,
    f: &Finished,
    findings: &[(FindingId, Vec<Rank>)],
    why: &'static str,
    mode: Mode,
    scope: &InstrumentationScope,
) -> Option<(Vec<SpanData>, u64)> {
    let trace = trace_id::of_operation(f.comm, f.track, f.operation.order);
    let make = Make { join, trace, scope };
    let named: BTreeSet<Rank> = findings
        .iter()
        .flat_map(|(_, ranks)| ranks.iter().copied())
        .chain(f.late.map(|l| l.rank))
        .take(NAMED as usize)
        .collect();
    let room = Room::of(f.ranks.unwrap_or(0).max(f.parts.len() as u32));
    let (mut spans, mut dropped) = (Vec::new(), 0);
    for part in &f.parts {
        let shown = part.rank.0 % room.stride == 0 || named.contains(&part.rank);
        if shown {
            dropped += rank(&make, f, part, room, mode, &mut spans);
        } else {
            dropped += 1;
        }
    }
    // Whoever has that rank among its processes, in the operation or not.
    let writer = attributes::writer(f.track);
    let here = join.communicator(f.comm).is_some_and(|c| c.members().contains_key(&writer))
        || f.parts.iter().any(|p| p.rank == writer);
    if here {
        spans.insert(0, root(&make, f, findings, why, mode, dropped)?);
    }
    (!spans.is_empty()).then_some((spans, dropped))
}

fn root(
    make: &Make<'_>,
    f: &Finished,
    findings: &[(FindingId, Vec<Rank>)],
    why: &'static str,
    mode: Mode,
    dropped: u64,
) -> Option<SpanData> {
    let issued = f.parts.iter().filter_map(|p| p.issued_ns.or(p.called_ns).or(p.started_ns)).min();
    let start = f.began_ns.or(issued)?;
    let ends = f.parts.iter().filter_map(|p| Some(p.started_ns? + p.duration_ns?)).max();
    // Without a known end it covers what is known: the issues.
    let last = f.parts.iter().filter_map(|p| p.issued_ns.max(p.started_ns)).max();
    let end = match mode {
        Mode::InFlight(until) => until,
        _ => ends.or(last).unwrap_or(start),
    };
    let (piece, parent) = match mode {
        Mode::OverAfterAll => (Piece::Complete, Some(Piece::Root)),
        _ => (Piece::Root, None),
    };
    let name = if piece == Piece::Complete { "complete".to_owned() } else { f.operation.func.to_string() };
    let mut span = make.span(piece, parent, name, start, end)?;
    span.attributes = attributes::of_operation(make.join, f);
    span.attributes.push(KeyValue::new("ringwatch.kept_because", why));
    if dropped > 0 {
        span.attributes.push(KeyValue::new("ringwatch.dropped_spans", whole(dropped)));
    }
    if ends.is_none() {
        span.attributes.push(KeyValue::new("ringwatch.end_known", false));
    }
    let ids: Vec<FindingId> = findings.iter().map(|(id, _)| *id).collect();
    span.attributes.extend(attributes::findings(&ids));
    span.links = links(ids.iter().map(|id| {
        let trace = trace_id::of_finding(*id);
        let context = context(trace, trace_id::of_span(trace, Piece::Root));
        let id = KeyValue::new("ringwatch.finding.id", id.to_string());
        Link::new(context, vec![id], 0)
    }));
    if let Mode::InFlight(_) = mode {
        let what = ids.first().map_or_else(|| "not over".to_owned(), |id| format!("not over: finding {id}"));
        span.status = Status::error(what);
        let named: BTreeSet<i64> = findings.iter().flat_map(|f| &f.1).map(|r| i64::from(r.0)).collect();
        let named = Value::Array(Array::I64(named.into_iter().collect()));
        span.attributes.push(KeyValue::new("ringwatch.culprit_ranks", named));
    }
    Some(span)
}

/// Adds the spans of one rank; gives back how many had no room.
fn rank(
    make: &Make<'_>,
    f: &Finished,
    part: &FinishedPart,
    room: Room,
    mode: Mode,
    out: &mut Vec<SpanData>,
) -> u64 {
    let Some(start) = part.issued_ns.or(part.called_ns).or(part.started_ns) else { return 0 };
    let kernel = part.started_ns.zip(part.duration_ns);
    let known_end = kernel.map(|(s, d)| s + d);
    let r = part.rank;
    let (piece, name, end) = match mode {
        Mode::InFlight(until) if known_end.is_none() => {
            (Piece::Pending(r), format!("rank {r}, in flight"), until)
        }
        _ => (Piece::Rank(r), format!("rank {r}"), known_end.or(part.started_ns).unwrap_or(start)),
    };
    let Some(mut span) = make.span(piece, Some(Piece::Root), name, start, end) else { return 0 };
    span.attributes = attributes::of_part(make.join, f, part);
    if known_end.is_none() {
        span.attributes.push(KeyValue::new("ringwatch.end_known", false));
    }
    if let (Mode::InFlight(_), Piece::Pending(_)) = (mode, piece) {
        span.attributes.push(KeyValue::new("ringwatch.started", part.started_ns.is_some()));
        span.status = Status::error("not over");
    }
    let at = out.len();
    out.push(span);
    let mut dropped = 0;
    let mut below = piece;
    let mut add =
        |piece, name: &str, from, to| match make.span(piece, Some(Piece::Rank(r)), name.to_owned(), from, to)
        {
            Some(span) if room.details => out.push(span),
            _ => dropped += 1,
        };
    if let Some((start, duration)) = kernel {
        match part.waiting_ns {
            Some(waiting) => {
                if waiting > 0 {
                    add(Piece::Waiting(r), "waiting", start, start + waiting);
                }
                add(Piece::Transfer(r), "transfer", start + waiting, start + duration);
                below = Piece::Transfer(r);
            }
            None => {
                add(Piece::Kernel(r), "kernel", start, start + duration);
                below = Piece::Kernel(r);
            }
        }
        if !room.details {
            below = piece;
        }
    }
    let fit = part.net.len().min(room.net as usize);
    for (n, net) in part.net.iter().take(fit).enumerate() {
        out.extend(network(make, r, n as u32, net, below, mode));
    }
    dropped += (part.net.len() - fit) as u64;
    if dropped > 0
        && let Some(span) = out.get_mut(at)
    {
        span.attributes.push(KeyValue::new("ringwatch.dropped_spans", whole(dropped)));
    }
    dropped
}

fn network(
    make: &Make<'_>,
    rank: Rank,
    n: u32,
    net: &NetProgress,
    below: Piece,
    mode: Mode,
) -> Option<SpanData> {
    // Of what has no end there is a span only where there is a moment up to which it is known to go on.
    let end = net.stop_ns.or(if let Mode::InFlight(until) = mode { Some(until) } else { None })?;
    let peer = net.peer;
    let name = if net.is_send { format!("send to rank {peer}") } else { format!("receive from rank {peer}") };
    let mut span = make.span(Piece::Net(rank, n), Some(below), name, net.start_ns, end)?;
    let waited = |at: usize| attributes::seconds(net.waited_ns[at]);
    span.attributes = vec![
        KeyValue::new("nccl.channel", i64::from(net.channel)),
        KeyValue::new("nccl.peer", i64::from(peer.0)),
        KeyValue::new("network.io.direction", if net.is_send { "transmit" } else { "receive" }),
        KeyValue::new("nccl.net.size", whole(net.bytes)),
        KeyValue::new("nccl.net.steps", i64::from(net.steps)),
        KeyValue::new("nccl.net.steps_done", i64::from(net.done)),
        // Sums over the steps, which overlap: they have a length and no place in time, and are no spans.
        KeyValue::new("ringwatch.net.gpu_wait", waited(0)),
        KeyValue::new("ringwatch.net.peer_wait", waited(1)),
        KeyValue::new("ringwatch.net.wire_wait", waited(2)),
        KeyValue::new("ringwatch.net.flush_wait", waited(3)),
    ];
    if net.stop_ns.is_none() {
        span.attributes.push(KeyValue::new("ringwatch.end_known", false));
    }
    Some(span)
}

/// The span of a finding: from when it began until it was told, with links to the operations it shows in.
pub(super) fn finding(
    join: &Join,
    f: &Finding,
    shows_in: &[(CommId, Track, u64)],
    scope: &InstrumentationScope,
) -> Option<SpanData> {
    let trace = trace_id::of_finding(f.id);
    let make = Make { join, trace, scope };
    let name = format!("finding {}", f.kind.as_str());
    let mut span = make.span(Piece::Root, None, name, f.since_ns.min(f.first_seen_ns), f.first_seen_ns)?;
    span.attributes =
        attributes::of_finding(f).into_iter().map(|(k, v)| KeyValue::new(k, plain(v))).collect();
    span.links = links(shows_in.iter().map(|(comm, track, order)| {
        let trace = trace_id::of_operation(*comm, *track, *order);
        Link::new(context(trace, trace_id::of_span(trace, Piece::Root)), Vec::new(), 0)
    }));
    Some(span)
}

/// A log record's value as a span's.
fn plain(value: AnyValue) -> Value {
    match value {
        AnyValue::Int(n) => Value::I64(n),
        AnyValue::Double(n) => Value::F64(n),
        AnyValue::Boolean(b) => Value::Bool(b),
        AnyValue::String(s) => Value::String(s),
        AnyValue::ListAny(items) => {
            if items.iter().all(|i| matches!(i, AnyValue::Int(_))) {
                let number = |i: &AnyValue| if let AnyValue::Int(n) = i { Some(*n) } else { None };
                return Value::Array(Array::I64(items.iter().filter_map(number).collect()));
            }
            let text = |i: &AnyValue| if let AnyValue::String(s) = i { Some(s.clone()) } else { None };
            Value::Array(Array::String(items.iter().filter_map(text).collect()))
        }
        other => Value::String(StringValue::from(format!("{other:?}"))),
    }
}

struct Make<'a> {
    join: &'a Join,
    trace: u128,
    scope: &'a InstrumentationScope,
}

impl Make<'_> {
    /// None when the wall clock is not known.
    fn span(
        &self,
        piece: Piece,
        parent: Option<Piece>,
        name: String,
        start_ns: u64,
        end_ns: u64,
    ) -> Option<SpanData> {
        let wall = |ns| Some(UNIX_EPOCH + Duration::from_nanos(self.join.unix_ns(ns)?));
        let id = |p| SpanId::from(trace_id::of_span(self.trace, p));
        Some(SpanData {
            span_context: context(self.trace, trace_id::of_span(self.trace, piece)),
            parent_span_id: parent.map_or(SpanId::INVALID, id),
            parent_span_is_remote: false,
            span_kind: SpanKind::Internal,
            name: name.into(),
            start_time: wall(start_ns)?,
            end_time: wall(end_ns.max(start_ns))?,
            attributes: Vec::new(),
            dropped_attributes_count: 0,
            events: SpanEvents::default(),
            links: SpanLinks::default(),
            status: Status::Unset,
            instrumentation_scope: self.scope.clone(),
        })
    }
}

pub(super) fn context(trace: u128, span: u64) -> SpanContext {
    SpanContext::new(TraceId::from(trace), SpanId::from(span), TraceFlags::SAMPLED, false, TraceState::NONE)
}

fn links(of: impl Iterator<Item = Link>) -> SpanLinks {
    let mut links = SpanLinks::default();
    links.links = of.collect();
    links
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn however_many_ranks_there_are_a_trace_stays_below_its_limit() {
        for ranks in (1..2_100).chain([4_096, 16_384, 100_000, 1_000_000]) {
            let room = Room::of(ranks);
            let shown = ranks.div_ceil(room.stride);
            let each = if room.details { 4 + room.net } else { 2 };
            // The named ranks show at any stride.
            let named = if room.stride > 1 { NAMED * 2 } else { 0 };
            let spans = 2 + shown * each + named;
            assert!(spans < MOST, "{ranks} ranks: {spans} spans with {room:?}");
        }
        assert_eq!(Room::of(4), Room { stride: 1, details: true, net: NET });
    }
}
