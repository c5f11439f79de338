//! Traces, logs and metrics by OTLP, as real receivers get them.

use crate::exported;
use crate::exported::{COMM, Hand, S, TRANSFER_NS, event};
use crate::receiver::{Receiver, Wants};
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::{Metric, number_data_point};
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use ringwatch::export::otlp::{Batch, Compression, Error, Exporter, Protocol, Settings, Tracer};
use ringwatch::export::prometheus::{self, Metrics, Own};
use ringwatch::export::trace_id::{self, Piece};
use ringwatch::model::{Change, CloseReason, Finding, Kind, OperationRef, Rank, Track, Victims};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

fn settings(endpoint: &str, protocol: Protocol) -> Settings {
    Settings {
        endpoint: Some(endpoint.into()),
        protocol,
        sample_ratio: 1.0,
        timeout_ms: 5_000,
        ..Settings::default()
    }
}

fn resource() -> Vec<(String, String)> {
    vec![("service.name".into(), "ringwatch".into()), ("host.name".into(), "node1".into())]
}

fn hang(order: u64, seen_ns: u64) -> Finding {
    let mut f = Finding::new(
        Kind::MissingRank,
        COMM,
        vec![Rank(3)],
        OperationRef::named("AllReduce", Track::Collective, order),
    );
    f.victims = vec![Victims { communicator: COMM, ranks: vec![Rank(0)], order, track: Track::Collective }];
    f.since_ns = seen_ns - 3 * S;
    f.first_seen_ns = seen_ns;
    f.last_seen_ns = seen_ns;
    f
}

/// Ten rounds on time, then one to which rank 2 comes half a second late.
fn with_a_late_rank(tracer: &mut Tracer) -> (Hand, u64) {
    let mut hand = Hand::new(4);
    for n in 0..10 {
        hand.round((10 + n) * S, None);
    }
    let late = hand.round(20 * S, Some((2, S / 2)));
    let taken = hand.join.take_finished();
    tracer.finished(&hand.join, &taken);
    (hand, late)
}

fn all(tracer: &mut Tracer) -> Batch {
    let mut whole = Batch::default();
    loop {
        let batch = tracer.take();
        if batch.is_empty() {
            return whole;
        }
        whole.spans.extend(batch.spans);
        whole.logs.extend(batch.logs);
    }
}

fn names(batch: &Batch) -> Vec<&str> {
    batch.spans.iter().map(|s| s.name.as_ref()).collect()
}

#[test]
fn a_trace_has_the_operation_its_ranks_their_waiting_and_their_transfer() {
    let mut tracer = Tracer::new(&Settings { sample_ratio: 0.0, late_ms: 100, ..Settings::default() });
    let (hand, order) = with_a_late_rank(&mut tracer);
    let batch = all(&mut tracer);
    // Only the late one is kept.
    let trace = trace_id::of_operation(COMM, Track::Collective, order);
    assert!(batch.spans.iter().all(|s| s.span_context.trace_id() == trace.into()));
    let mut found = names(&batch);
    found.sort_unstable();
    assert_eq!(
        found,
        [
            "AllReduce",
            "rank 0",
            "rank 1",
            "rank 2",
            "rank 3",
            "receive from rank 1",
            "send to rank 1",
            "transfer",
            "transfer",
            "transfer",
            "transfer",
            "waiting",
            "waiting",
            "waiting",
        ]
    );
    let by_id: HashMap<_, _> = batch.spans.iter().map(|s| (s.span_context.span_id(), s)).collect();
    let root = by_id[&trace_id::of_span(trace, Piece::Root).into()];
    let wall = |ns: u64| std::time::UNIX_EPOCH + std::time::Duration::from_nanos(exported::EPOCH_NS + ns);
    assert_eq!(root.start_time, wall(20 * S));
    let ended = root.end_time.duration_since(wall(20 * S + S / 2 + 5_000 + TRANSFER_NS)).unwrap();
    assert!(ended.as_micros() < 10, "the GPU's clock is mapped to within the callback: {ended:?}");
    let waiting = by_id[&trace_id::of_span(trace, Piece::Waiting(Rank(0))).into()];
    assert_eq!(waiting.end_time.duration_since(waiting.start_time).unwrap().as_millis(), 500);
    let transfer = by_id[&trace_id::of_span(trace, Piece::Transfer(Rank(2))).into()];
    assert_eq!(transfer.end_time.duration_since(transfer.start_time).unwrap().as_nanos(), 100_000);
    assert_eq!(transfer.parent_span_id, trace_id::of_span(trace, Piece::Rank(Rank(2))).into());
    let net = batch.spans.iter().find(|s| s.name == "send to rank 1").unwrap();
    assert_eq!(net.parent_span_id, trace_id::of_span(trace, Piece::Transfer(Rank(0))).into());
    let attribute = |s: &opentelemetry_sdk::trace::SpanData, key: &str| {
        s.attributes.iter().find(|a| a.key.as_str() == key).map(|a| a.value.to_string())
    };
    for (key, want) in [
        ("nccl.collective", "AllReduce"),
        ("nccl.algorithm", "RING"),
        ("nccl.protocol", "SIMPLE"),
        ("nccl.message.size", "4194304"),
        ("nccl.communicator.id", "c0ffee0000000007"),
        ("nccl.issue_order", "10"),
        // 4 MiB in 100 us, times 3/2.
        ("nccl.busbw", "62914560000"),
        ("ringwatch.late_rank", "2"),
        ("ringwatch.late_by", "0.5"),
        ("ringwatch.kept_because", "late"),
        ("ringwatch.job.name", "slurm-17"),
    ] {
        assert_eq!(attribute(root, key).as_deref(), Some(want), "{key}");
    }
    let rank2 = batch.spans.iter().find(|s| s.name == "rank 2").unwrap();
    for (key, want) in [
        ("host.name", "node1"),
        ("process.pid", "102"),
        ("user.name", "ada"),
        ("hw.id", "0000:00:0b.0"),
        ("hw.type", "gpu"),
        ("ringwatch.late_by", "0.5"),
    ] {
        assert_eq!(attribute(rank2, key).as_deref(), Some(want), "{key}");
    }
    assert_eq!(tracer.take_announced(), [(COMM, Track::Collective, order)], "others are told");
    drop(hand);
}

#[test]
fn spans_and_log_records_carry_the_user_of_the_job() {
    let mut tracer = Tracer::new(&Settings { sample_ratio: 0.0, ..Settings::default() });
    let mut hand = Hand::new(4);
    hand.switch_to_user(1000);
    for second in 10..20 {
        hand.round(second * S, None);
    }
    let order = hand.round(20 * S, Some((2, S / 2)));
    let taken = hand.join.take_finished();
    tracer.finished(&hand.join, &taken);
    let finding = Finding { communicator: hand.comm(), ..hang(order, 25 * S) };
    tracer.events(&hand.join, &[event(Change::Opened, &finding)]);
    let batch = all(&mut tracer);
    for name in ["AllReduce", "rank 2"] {
        let span = batch.spans.iter().find(|s| s.name == name).unwrap();
        let uid = span.attributes.iter().find(|a| a.key.as_str() == "process.user.id").unwrap();
        assert_eq!(uid.value, 1000_i64.into(), "{name}");
    }
    let (_, uid) = batch.logs[0].attributes.iter().find(|(key, _)| *key == "process.user.id").unwrap();
    assert_eq!(*uid, 1000_i64.into());
}

#[test]
fn what_turns_out_to_be_interesting_later_is_sent_after_all_and_once() {
    let mut tracer = Tracer::new(&Settings { sample_ratio: 0.0, late_ms: 10_000, ..Settings::default() });
    let (hand, order) = with_a_late_rank(&mut tracer);
    assert!(all(&mut tracer).is_empty());
    tracer.interesting(COMM, Track::Collective, 3);
    tracer.interesting(COMM, Track::Collective, 3);
    let mut f = hang(order, 21 * S);
    (f.kind, f.ranks) = (Kind::Straggler, vec![Rank(2)]);
    f.id = f.named();
    tracer.events(&hand.join, &[event(Change::Opened, &f)]);
    let batch = all(&mut tracer);
    let traces: HashSet<_> = batch.spans.iter().map(|s| s.span_context.trace_id()).collect();
    let want = [
        trace_id::of_operation(COMM, Track::Collective, 3),
        trace_id::of_operation(COMM, Track::Collective, order),
        trace_id::of_finding(f.id),
    ];
    assert_eq!(traces, want.map(Into::into).into());
    assert_eq!(names(&batch).iter().filter(|n| **n == "AllReduce").count(), 2, "each once");
    // The finding and the operation link to each other.
    let root = batch.spans.iter().find(|s| s.span_context.trace_id() == want[1].into()).unwrap();
    assert_eq!(root.links.links[0].span_context.trace_id(), want[2].into());
    let finding = batch.spans.iter().find(|s| s.name == "finding straggler").unwrap();
    assert_eq!(finding.links.links[0].span_context.trace_id(), want[1].into());
    assert_eq!(finding.links.links[0].span_context.span_id(), root.span_context.span_id());
    // One record when it opens, one when it has closed, none in between.
    let events = |b: &Batch| b.logs.iter().map(|l| l.event).collect::<Vec<_>>();
    assert_eq!(events(&batch), ["ringwatch.finding.opened"]);
    assert_eq!(batch.logs[0].context, Some((want[1], trace_id::of_span(want[1], Piece::Root))));
    f.ranks.push(Rank(3));
    tracer.events(&hand.join, &[event(Change::Updated, &f)]);
    (f.open, f.close_reason, f.closed_ns) = (false, Some(CloseReason::JobEnded), 23 * S);
    tracer.events(&hand.join, &[event(Change::Closed, &f)]);
    let batch = all(&mut tracer);
    assert_eq!(events(&batch), ["ringwatch.finding.updated", "ringwatch.finding.closed"]);
    assert!(
        batch.logs[1].body.starts_with("closed (job-ended): straggler: ranks 2, 3"),
        "{}",
        batch.logs[1].body
    );
}

#[test]
fn a_hang_is_told_while_it_lasts_and_its_true_times_when_it_is_over() {
    let mut tracer = Tracer::new(&Settings { sample_ratio: 0.0, ..Settings::default() });
    let (mut hand, _) = with_a_late_rank(&mut tracer);
    all(&mut tracer);
    let order = hand.stuck(30 * S, 3);
    hand.join.tick(34 * S);
    tracer.events(&hand.join, &[event(Change::Opened, &hang(order, 34 * S))]);
    let batch = all(&mut tracer);
    let trace = trace_id::of_operation(COMM, Track::Collective, order);
    let of_trace: Vec<_> = batch.spans.iter().filter(|s| s.span_context.trace_id() == trace.into()).collect();
    let mut found: Vec<_> = of_trace.iter().map(|s| s.name.as_ref()).collect();
    found.sort_unstable();
    // Nothing is invented of rank 3, which never came.
    assert_eq!(found, ["AllReduce", "rank 0, in flight", "rank 1, in flight", "rank 2, in flight"]);
    for s in &of_trace {
        assert!(matches!(s.status, opentelemetry::trace::Status::Error { .. }), "{s:?}");
        assert_eq!(s.end_time.duration_since(s.start_time).unwrap().as_secs(), 4);
    }
    hand.unstick(40 * S, order, 3, 30 * S);
    let taken = hand.join.take_finished();
    tracer.finished(&hand.join, &taken);
    let batch = all(&mut tracer);
    let found = names(&batch);
    assert!(!found.contains(&"AllReduce"), "the root is written already: {found:?}");
    let complete = batch.spans.iter().find(|s| s.name == "complete").unwrap();
    assert_eq!(complete.parent_span_id, trace_id::of_span(trace, Piece::Root).into());
    assert_eq!(found.iter().filter(|n| n.starts_with("rank ")).count(), 4);
    let ids: HashSet<_> = batch.spans.iter().map(|s| s.span_context.span_id()).collect();
    assert_eq!(ids.len(), batch.spans.len());
}

#[test]
fn a_trace_of_many_ranks_has_fewer_spans_and_says_so() {
    let mut tracer = Tracer::new(&Settings { sample_ratio: 0.0, ..Settings::default() });
    let mut hand = Hand::new(1_500);
    hand.round(10 * S, None);
    hand.round(20 * S, Some((777, S)));
    let taken = hand.join.take_finished();
    tracer.finished(&hand.join, &taken);
    let batch = all(&mut tracer);
    let found = names(&batch);
    assert!((500..2_000).contains(&found.len()), "{}", found.len());
    assert!(found.contains(&"rank 0") && found.contains(&"rank 777"), "the late one is shown");
    assert!(!found.contains(&"rank 779"));
    let root = batch.spans.iter().find(|s| s.name == "AllReduce").unwrap();
    let dropped = root.attributes.iter().find(|a| a.key.as_str() == "ringwatch.dropped_spans").unwrap();
    let lost = tracer.exported()[0].lost["the trace had no room"];
    assert_eq!(dropped.value.to_string(), lost.to_string());
    assert!(lost >= 749, "{lost}");
}

#[test]
fn slow_and_late_ones_are_bounded_and_counted() {
    let mut tracer =
        Tracer::new(&Settings { sample_ratio: 0.0, late_ms: 1, slow_per_second: 2, ..Settings::default() });
    let mut hand = Hand::new(4);
    // Of a communicator's first operation nobody is called late.
    for n in 0..6 {
        hand.round(10 * S + n * 10_000_000, Some((1, 5_000_000)));
    }
    let taken = hand.join.take_finished();
    tracer.finished(&hand.join, &taken);
    let roots = names(&all(&mut tracer)).iter().filter(|n| **n == "AllReduce").count();
    let lost = tracer.exported()[0].lost.clone();
    assert_eq!((roots, lost["more were slow or late than slow_per_second"]), (2, 3));
}

/// Sends until the receiver takes it, as the agent does.
async fn deliver(exporter: &Exporter, tracer: &mut Tracer) {
    for _ in 0..50 {
        let batch = tracer.take();
        if batch.is_empty() {
            return;
        }
        if let Err((e, back)) = exporter.send(batch).await {
            assert!(matches!(e, Error::Unreachable { .. }), "{e}");
            tracer.give_back(back);
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
    }
    panic!("the receiver takes nothing");
}

fn check(spans: &[Span], order: u64) {
    let trace = trace_id::of_operation(COMM, Track::Collective, order).to_be_bytes();
    let of_trace: Vec<_> = spans.iter().filter(|s| s.trace_id == trace).collect();
    let ranks = of_trace.iter().filter(|s| s.name.starts_with("rank ")).count();
    assert_eq!((of_trace.len(), ranks), (14, 4));
    let ids: BTreeSet<_> = of_trace.iter().map(|s| s.span_id.clone()).collect();
    assert_eq!(ids.len(), 14, "nothing comes twice");
}

async fn sends_everything(protocol: Protocol, wants: Wants) {
    let tls = wants.tls;
    let receiver = Receiver::start(protocol, wants, None);
    let mut s = settings(&receiver.endpoint, protocol);
    s.compression = Compression::Gzip;
    s.headers = BTreeMap::from([("x-tenant".to_owned(), "lab".into())]);
    if tls {
        s.ca = Some(receiver.ca.path().to_owned());
    }
    let exporter = Exporter::new(&s, resource()).unwrap();
    let mut tracer = Tracer::new(&s);
    let (mut hand, late) = with_a_late_rank(&mut tracer);
    let order = hand.stuck(30 * S, 3);
    tracer.events(&hand.join, &[event(Change::Opened, &hang(order, 34 * S))]);
    deliver(&exporter, &mut tracer).await;
    let got = receiver.got();
    check(&got.spans, late);
    let trace = trace_id::of_operation(COMM, Track::Collective, order).to_be_bytes();
    let root = got.spans.iter().find(|s| s.name == "AllReduce" && s.trace_id == trace).unwrap();
    assert_eq!(root.status.as_ref().unwrap().code(), StatusCode::Error);
    assert_eq!(got.logs.len(), 1);
    assert_eq!((got.logs[0].trace_id.as_slice(), got.logs[0].severity_text.as_str()), (&trace[..], "ERROR"));
    assert_eq!(got.logs[0].event_name, "ringwatch.finding.opened");

    let mut metrics = Metrics::new(prometheus::Settings::default());
    let mut again = Hand::new(4);
    again.switch_to_user(1000);
    again.round(10 * S, None);
    again.hardware(10 * S);
    let taken = again.join.take_finished();
    metrics.finished(&again.join, &taken);
    let families = metrics.gather(&again.join, &[], &Own { now_ns: 11 * S, ..Own::default() });
    exporter.metrics(&families, exported::EPOCH_NS, exported::EPOCH_NS + 11 * S).await.unwrap();
    let got = receiver.got();
    let transfer = got.metrics.iter().find(|m| m.name == "ringwatch.collective_transfer").unwrap();
    assert_eq!(transfer.unit, "s");
    let Some(Data::ExponentialHistogram(h)) = &transfer.data else { panic!("{transfer:?}") };
    let point = &h.data_points[0];
    assert_eq!((point.count, point.exemplars.len()), (1, 1));
    assert_eq!(
        point.exemplars[0].trace_id,
        trace_id::of_operation(again.comm(), Track::Collective, 0).to_be_bytes()
    );
    let host = point.attributes.iter().find(|a| a.key == "host.name").unwrap();
    assert_eq!(host.value.as_ref().unwrap().value, Some(Value::StringValue("node1".into())));
    let user = point.attributes.iter().find(|a| a.key == "process.user.id").unwrap();
    assert_eq!(user.value.as_ref().unwrap().value, Some(Value::StringValue("1000".into())));
    hardware_by_convention(&got.metrics);
    assert!(got.refused > 0 || receiver.wants.unavailable == 0, "the retry was not needed");
    assert!(got.compressed && got.tenant, "{got:?}");
    let own = exporter.exported(tracer.exported());
    assert!(own.iter().all(|e| e.sent > 0 && e.queued == 0 && e.lost.values().all(|n| *n == 0)), "{own:?}");
}

/// What was read of the machine, as tools that know OpenTelemetry's conventions for hardware look for it.
fn hardware_by_convention(metrics: &[Metric]) {
    let points = |name: &str| {
        let mut all = metrics.iter().filter(|m| m.name == name);
        let m = all.next().unwrap_or_else(|| panic!("no {name}"));
        assert!(all.next().is_none(), "{name} twice");
        let (points, monotonic) = match m.data.as_ref().unwrap() {
            Data::Gauge(g) => (&g.data_points, None),
            Data::Sum(s) => (&s.data_points, Some(s.is_monotonic)),
            other => panic!("{other:?}"),
        };
        let flat = points.iter().map(|p| {
            let text = |a: &KeyValue| match a.value.as_ref().and_then(|v| v.value.as_ref()) {
                Some(Value::StringValue(s)) => (a.key.clone(), s.clone()),
                other => panic!("{other:?}"),
            };
            let Some(number_data_point::Value::AsDouble(v)) = p.value else { panic!("{p:?}") };
            (p.attributes.iter().map(text).collect::<BTreeMap<_, _>>(), v)
        });
        (flat.collect::<Vec<_>>(), m.unit.clone(), monotonic)
    };
    let with = |points: &[(BTreeMap<String, String>, f64)], wanted: &[(&str, &str)]| {
        let fits =
            |a: &BTreeMap<String, String>| wanted.iter().all(|(k, v)| a.get(*k).is_some_and(|w| w == v));
        points.iter().filter(|(a, _)| fits(a)).map(|(a, v)| (a.clone(), *v)).collect::<Vec<_>>()
    };
    let gpu = exported::gpu(1);
    let (busy, unit, _) = points("hw.gpu.utilization");
    let one = with(
        &busy,
        &[("hw.id", &gpu), ("hw.type", "gpu"), ("hw.name", "GPU 1"), ("hw.model", "NVIDIA H200")],
    );
    assert_eq!((busy.len(), one.len(), one[0].1, unit.as_str()), (4, 1, 0.97, "1"));
    assert_eq!((&*one[0].0["hw.gpu.task"], &*one[0].0["hw.vendor"]), ("general", "NVIDIA"));
    assert_eq!(one[0].0["host.name"], "node1");
    let (used, unit, monotonic) = points("hw.gpu.memory.usage");
    assert_eq!((used.len(), unit.as_str(), monotonic), (4, "By", Some(false)));
    let (heat, ..) = points("hw.temperature");
    assert_eq!(with(&heat, &[("hw.parent", &gpu)])[0].1, 51.0);
    let (errors, _, monotonic) = points("hw.errors");
    assert_eq!(monotonic, Some(true));
    assert_eq!(with(&errors, &[("hw.type", "gpu"), ("hw.id", &gpu), ("error.type", "uncorrected")]).len(), 1);
    let port = [("hw.type", "network"), ("hw.id", "mlx5_0/1")];
    assert_eq!(with(&errors, &[port[0], port[1], ("error.type", "retransmit")])[0].1, 10.0);
    assert!(with(&errors, &[("error.type", "congestion")]).is_empty(), "a mark is no error");
    let (moved, ..) = points("hw.network.io");
    for (id, n) in [("mlx5_0/1", (10 << 20) as f64), ("eth0", (10 << 10) as f64)] {
        assert_eq!(with(&moved, &[("hw.id", id), ("network.io.direction", "transmit")])[0].1, n);
    }
    // Nothing has two points with the same attributes.
    for name in ["hw.errors", "hw.network.io", "hw.network.up", "hw.network.bandwidth.limit", "hw.power"] {
        let (all, ..) = points(name);
        let distinct: BTreeSet<_> = all.iter().map(|(a, _)| a).collect();
        assert_eq!(distinct.len(), all.len(), "{name}");
    }
    assert!(metrics.iter().any(|m| m.name == "ringwatch.gpu_utilization"), "our own names stay");
}

#[tokio::test]
async fn grpc_with_tls_headers_compression_and_a_receiver_that_is_busy_at_first() {
    let wants = Wants { tls: true, tenant: true, unavailable: 2, ..Wants::default() };
    sends_everything(Protocol::Grpc, wants).await;
}

#[tokio::test]
async fn http_with_tls_headers_compression_and_a_receiver_that_is_busy_at_first() {
    let wants = Wants { tls: true, tenant: true, unavailable: 2, ..Wants::default() };
    sends_everything(Protocol::Http, wants).await;
}

#[tokio::test]
async fn without_its_certificate_or_header_nothing_is_sent_and_that_is_told() {
    for protocol in [Protocol::Grpc, Protocol::Http] {
        let receiver = Receiver::start(protocol, Wants { tls: true, tenant: true, ..Wants::default() }, None);
        let mut s = settings(&receiver.endpoint, protocol);
        s.timeout_ms = 1_500;
        // The system's certificates do not cover it.
        let exporter = Exporter::new(&s, resource()).unwrap();
        let mut tracer = Tracer::new(&s);
        with_a_late_rank(&mut tracer);
        let batch = tracer.take();
        let (e, back) = exporter.send(batch.clone()).await.unwrap_err();
        assert!(matches!(e, Error::Unreachable { .. }), "{e}");
        assert_eq!(back.spans.len(), batch.spans.len(), "nothing is lost");
        // With the certificate and no header it is refused for good.
        s.ca = Some(receiver.ca.path().to_owned());
        let exporter = Exporter::new(&s, resource()).unwrap();
        let n = batch.spans.len() as u64;
        let (e, back) = exporter.send(batch).await.unwrap_err();
        assert!(matches!(e, Error::Refused { count, .. } if count == n), "{e}");
        assert!(back.is_empty());
        let own = exporter.exported(tracer.exported());
        let lost = &own.iter().find(|e| e.signal == "spans").unwrap().lost;
        assert_eq!(lost["the receiver refused them"], n);
        assert!(receiver.got().spans.is_empty());
    }
}

#[tokio::test]
async fn a_receiver_that_is_killed_and_comes_back_gets_everything() {
    for protocol in [Protocol::Grpc, Protocol::Http] {
        let first = Receiver::start(protocol, Wants::default(), None);
        let s = Settings { timeout_ms: 500, queue: 400, ..settings(&first.endpoint, protocol) };
        let exporter = Exporter::new(&s, resource()).unwrap();
        let mut tracer = Tracer::new(&s);
        let mut hand = Hand::new(4);
        hand.round(10 * S, None);
        let taken = hand.join.take_finished();
        tracer.finished(&hand.join, &taken);
        deliver(&exporter, &mut tracer).await;
        assert_eq!(first.got().spans.len(), 11);
        let port = first.port;
        first.stop();
        // 20 rounds wait, then 40, for which there is no room.
        for n in 0..60 {
            hand.round((20 + n) * S, None);
            let taken = hand.join.take_finished();
            tracer.finished(&hand.join, &taken);
            if n == 20 {
                let (e, back) = exporter.send(tracer.take()).await.unwrap_err();
                assert!(matches!(e, Error::Unreachable { .. }), "{e}");
                assert_eq!(back.spans.len(), 21 * 11);
                tracer.give_back(back);
            }
        }
        let second = Receiver::start(protocol, Wants::default(), Some(port));
        deliver(&exporter, &mut tracer).await;
        let own = exporter.exported(tracer.exported());
        let spans = own.iter().find(|e| e.signal == "spans").unwrap();
        assert_eq!(second.got().spans.len(), 400, "all that there was room for");
        assert_eq!(spans.lost["the queue was full"], 60 * 11 - 400, "and it says what was lost");
        assert_eq!(spans.sent, 411);
    }
}

#[tokio::test]
async fn what_a_receiver_refuses_of_a_request_it_takes_is_counted() {
    for protocol in [Protocol::Grpc, Protocol::Http] {
        let receiver = Receiver::start(protocol, Wants { rejects: 3, ..Wants::default() }, None);
        let s = settings(&receiver.endpoint, protocol);
        let exporter = Exporter::new(&s, resource()).unwrap();
        let mut tracer = Tracer::new(&s);
        with_a_late_rank(&mut tracer);
        let batch = tracer.take();
        let n = batch.spans.len() as u64;
        exporter.send(batch).await.unwrap();
        let own = exporter.exported(tracer.exported());
        let spans = own.iter().find(|e| e.signal == "spans").unwrap();
        assert_eq!((spans.sent, spans.lost["the receiver refused them"]), (n - 3, 3), "{protocol:?}");
    }
}

#[tokio::test]
async fn settings_that_cannot_work_are_told_at_once() {
    let refused = |s: Settings| Exporter::new(&s, resource()).unwrap_err().to_string();
    for protocol in [Protocol::Grpc, Protocol::Http] {
        assert!(refused(Settings { protocol, ..Settings::default() }).contains("no OTLP endpoint"));
        assert!(refused(settings("collector:4317", protocol)).contains("http:// or https://"));
        let mut s = settings("https://collector:4317", protocol);
        s.ca = Some("/nowhere/ca.pem".into());
        assert!(refused(s.clone()).contains("/nowhere/ca.pem"));
        (s.ca, s.key) = (None, Some("/nowhere/key.pem".into()));
        assert!(refused(s).contains("give both or none"));
        let mut s = settings("http://collector:4317", protocol);
        s.ca = Some("/nowhere/ca.pem".into());
        assert!(refused(s.clone()).contains("http://collector:4317 goes without TLS"));
        s.ca = None;
        s.headers = BTreeMap::from([("bad name".to_owned(), "x".into())]);
        assert!(refused(s).contains("bad name"));
    }
    let s: Settings =
        serde_yaml::from_str("endpoint: http://c:4318\nprotocol: http\ncompression: gzip\n").unwrap();
    assert_eq!((s.protocol, s.compression, s.is_enabled()), (Protocol::Http, Compression::Gzip, true));
    assert!(!Settings::default().is_enabled());
}
