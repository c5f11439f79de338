//! The attributes of spans and log records. Names are OpenTelemetry's where it has one; `nccl.*` is what NCCL says,
//! `ringwatch.*` what was made of it.

use crate::join::{Communicator, Finished, FinishedPart, Join};
use crate::model::{Finding, FindingId, Timing, Track};
use opentelemetry::logs::AnyValue;
use opentelemetry::{Array, KeyValue, StringValue, Value};

/// Of an operation, for its root.
pub(super) fn of_operation(join: &Join, f: &Finished) -> Vec<KeyValue> {
    let o = &f.operation;
    let mut a = vec![
        KeyValue::new("nccl.collective", f.func.as_str()),
        KeyValue::new("nccl.communicator.id", f.comm.to_string()),
        KeyValue::new("nccl.issue_order", whole(o.order)),
        KeyValue::new("nccl.track", f.track.to_string()),
        KeyValue::new("ringwatch.ranks_seen", whole(f.parts.len() as u64)),
    ];
    let mut known = |name: &'static str, value: Option<Value>| {
        if let Some(v) = value {
            a.push(KeyValue::new(name, v));
        }
    };
    known("nccl.algorithm", o.algo.map(|a| a.as_str().into()));
    known("nccl.protocol", o.proto.map(|p| p.as_str().into()));
    known("nccl.datatype", o.dtype.map(|d| d.as_str().into()));
    known("nccl.reduction", o.redop.map(|r| r.as_str().into()));
    known("nccl.message.size", o.bytes.map(|b| whole(b).into()));
    known("nccl.communicator.size", f.ranks.map(|n| i64::from(n).into()));
    known("nccl.channels", f.channels.map(|n| i64::from(n).into()));
    // Bytes a second, by the definition of nccl-tests.
    known("nccl.busbw", f.busbw.map(Value::from));
    known("ringwatch.transfer_time", f.transfer_ns.map(seconds));
    known("ringwatch.late_rank", f.late.map(|l| i64::from(l.rank.0).into()));
    known("ringwatch.late_by", f.late.map(|l| seconds(l.by_ns)));
    let comm = join.communicator(f.comm);
    let name = comm.and_then(Communicator::name);
    known("nccl.communicator.name", name.map(Value::from));
    let process = f.parts.first().and_then(|p| join.process(p.segment));
    known("process.user.id", process.and_then(|p| p.record.owner).map(|uid| i64::from(uid).into()));
    known("ringwatch.job.name", process.and_then(|p| p.record.job.name.clone()).map(Value::from));
    a
}

/// Of one rank's part.
pub(super) fn of_part(join: &Join, f: &Finished, part: &FinishedPart) -> Vec<KeyValue> {
    let mut a = vec![
        KeyValue::new("nccl.rank", i64::from(part.rank.0)),
        KeyValue::new("nccl.communicator.id", f.comm.to_string()),
        KeyValue::new("ringwatch.timing", timing(part.timing)),
    ];
    if let Some(p) = join.process(part.segment) {
        let r = &p.record;
        a.push(KeyValue::new("host.name", r.host.clone()));
        a.push(KeyValue::new("process.pid", i64::from(r.pid)));
        a.extend(r.owner.map(|uid| KeyValue::new("process.user.id", i64::from(uid))));
        a.push(KeyValue::new("process.executable.name", r.program.clone()));
        a.extend(r.nccl.clone().map(|v| KeyValue::new("nccl.version", v)));
        a.extend(r.job.name.clone().map(|v| KeyValue::new("ringwatch.job.name", v)));
        a.extend(r.job.rank.map(|v| KeyValue::new("ringwatch.job.rank", i64::from(v))));
        a.extend(join.labels(part.segment).into_iter().map(|(k, v)| KeyValue::new(k, v)));
        let member = join.communicator(f.comm).and_then(|c| c.members().get(&part.rank));
        if let Some(address) = member.and_then(|m| m.record.gpu.as_deref()) {
            a.push(KeyValue::new("hw.id", address.to_owned()));
            a.push(KeyValue::new("hw.type", "gpu"));
            let gpu = join.hardware().gpus().find(|(host, _, g)| *host == r.host && g.gpu == address);
            a.extend(gpu.and_then(|(.., g)| g.name.clone()).map(|v| KeyValue::new("hw.model", v)));
            a.extend(nvlink(join, &r.host, address, part));
        }
    }
    a.extend(part.duration_ns.map(|d| KeyValue::new("ringwatch.gpu_time", seconds(d))));
    a.extend(part.waiting_ns.map(|w| KeyValue::new("ringwatch.waiting_time", seconds(w))));
    let late = f.late.filter(|l| l.rank == part.rank);
    a.extend(late.map(|l| KeyValue::new("ringwatch.late_by", seconds(l.by_ns))));
    a
}

/// The bytes over the GPU's NVLinks in the readings that overlap the kernel. These are longer than most operations, so
/// their length is told too: what else ran in that time is in it.
fn nvlink(join: &Join, host: &str, gpu: &str, part: &FinishedPart) -> Vec<KeyValue> {
    let Some((start, duration)) = part.started_ns.zip(part.duration_ns) else { return Vec::new() };
    let (mut sent, mut received, mut window_ns) = (0.0, 0.0, 0);
    for (at_ns, t) in join.hardware().traffic(host, gpu) {
        if let Some(moved) = t.nvlink.filter(|_| t.from_ns < start + duration && at_ns > start) {
            sent += moved.tx_bytes;
            received += moved.rx_bytes;
            window_ns += at_ns.saturating_sub(t.from_ns);
        }
    }
    if window_ns == 0 {
        return Vec::new();
    }
    vec![
        KeyValue::new("ringwatch.nvlink.transmit_bytes", sent),
        KeyValue::new("ringwatch.nvlink.receive_bytes", received),
        KeyValue::new("ringwatch.nvlink.window", seconds(window_ns)),
    ]
}

/// The findings that an operation shows.
pub(super) fn findings(ids: &[FindingId]) -> Option<KeyValue> {
    let ids: Vec<StringValue> = ids.iter().map(|id| id.to_string().into()).collect();
    (!ids.is_empty()).then(|| KeyValue::new("ringwatch.finding.ids", Value::Array(Array::String(ids))))
}

/// Of a finding: for its span and its log records.
pub(super) fn of_finding(f: &Finding) -> Vec<(&'static str, AnyValue)> {
    let text = |t: &str| AnyValue::from(t.to_owned());
    let list = |items: Vec<AnyValue>| AnyValue::ListAny(Box::new(items));
    let mut a = vec![
        ("ringwatch.finding.id", text(&f.id.to_string())),
        ("ringwatch.finding.kind", text(f.kind.as_str())),
        ("ringwatch.finding.severity", text(f.severity.as_str())),
        ("ringwatch.finding.confidence", text(f.confidence.as_str())),
        ("ringwatch.finding.ranks", list(f.ranks.iter().map(|r| i64::from(r.0).into()).collect())),
        ("ringwatch.finding.advice", text(&f.advice)),
        ("ringwatch.finding.evidence", list(f.evidence.iter().map(|e| text(&e.text)).collect())),
        ("nccl.collective", text(&f.operation.func)),
        ("nccl.communicator.id", text(&f.communicator.to_string())),
        ("nccl.issue_order", AnyValue::from(whole(f.operation.order))),
        ("nccl.track", text(&f.operation.track.to_string())),
    ];
    if let Some(uid) = f.communicator.owner() {
        a.push(("process.user.id", AnyValue::from(i64::from(uid))));
    }
    if let Some(cause) = &f.cause {
        a.push(("ringwatch.finding.cause", text(cause.as_str())));
    }
    if let Some(cost) = &f.cost {
        a.push(("ringwatch.finding.cost.last_minute", AnyValue::from(cost.last_minute.lost_s)));
        a.push(("ringwatch.finding.cost.last_minute_percent", AnyValue::from(cost.last_minute.percent)));
        a.push(("ringwatch.finding.cost.in_all", AnyValue::from(cost.in_all.lost_s)));
    }
    if f.count > 1 {
        a.push(("ringwatch.finding.count", AnyValue::from(whole(f.count))));
    }
    if let Some(reason) = f.close_reason {
        a.push(("ringwatch.finding.close_reason", text(reason.as_str())));
    }
    if let Some(place) = &f.place {
        a.push(("host.name", text(&place.host)));
        a.push(("ringwatch.finding.device", text(&place.device)));
    } else if let Some(host) = &f.subject {
        a.push(("host.name", text(host)));
    }
    if let Some(bytes) = f.operation.bytes {
        a.push(("nccl.message.size", AnyValue::from(whole(bytes))));
    }
    a
}

/// Seconds, as OpenTelemetry gives durations.
pub(super) fn seconds(ns: u64) -> Value {
    Value::F64(ns as f64 / 1e9)
}

/// OTLP has signed numbers only.
pub(super) fn whole(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

fn timing(t: Timing) -> &'static str {
    match t {
        Timing::Unknown => "not known",
        Timing::Kernel => "kernel stamps",
        Timing::Events => "CUDA events",
        Timing::Launch => "CUDA events around a launch of several",
        Timing::Not(why) => why.as_str(),
    }
}

/// The rank whose node writes the root.
pub(super) fn writer(track: Track) -> crate::model::Rank {
    match track {
        Track::Pair(from, _) => from,
        Track::Collective | Track::Replay => crate::model::Rank(0),
    }
}
