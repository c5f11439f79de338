//! Traces at the other end: what our own receiver gets of a late rank, and what a collector that others wrote decodes.

#![allow(clippy::disallowed_methods, reason = "these tests have servers and a clock of their own")]

use crate::exported;
use crate::exported::{COMM, Hand, S, event};
use crate::receiver::{Receiver, Wants};
use crate::support::agent::Agent;
use crate::support::{Play, Players, Room, skipped, until};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use ringwatch::export::otlp::{Exporter, Protocol, Settings, Tracer};
use ringwatch::export::prometheus::{self, Metrics, Own};
use ringwatch::export::trace_id;
use ringwatch::model::{Change, Finding, FindingId, Kind, OperationRef, Rank, Track};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

fn settings(port: u16, protocol: Protocol) -> Settings {
    Settings {
        endpoint: Some(format!("http://127.0.0.1:{port}").into()),
        protocol,
        sample_ratio: 0.0,
        // Far more than it takes on a quiet machine.
        timeout_ms: 20_000,
        ..Settings::default()
    }
}

fn resource() -> Vec<(String, String)> {
    vec![("service.name".into(), "ringwatch".into()), ("host.name".into(), "node1".into())]
}

/// Nothing is sampled: only the planted late rank makes its operation worth a trace.
fn planted(tracer: &mut Tracer) -> (Hand, u64, FindingId) {
    let mut hand = Hand::new(4);
    for n in 0..10 {
        hand.round((10 + n) * S, None);
    }
    let order = hand.round(20 * S, Some((2, S / 2)));
    let taken = hand.join.take_finished();
    tracer.finished(&hand.join, &taken);
    let mut finding = Finding::new(
        Kind::Straggler,
        COMM,
        vec![Rank(2)],
        OperationRef::named("AllReduce", Track::Collective, order),
    );
    (finding.since_ns, finding.first_seen_ns, finding.last_seen_ns) = (20 * S, 21 * S, 21 * S);
    let id = finding.id;
    tracer.events(&hand.join, &[event(Change::Opened, &finding)]);
    (hand, order, id)
}

/// The spans that a receiver got, by the trace that they belong to.
fn traces(receiver: &Receiver) -> BTreeMap<Vec<u8>, Vec<Span>> {
    let mut all: BTreeMap<_, Vec<Span>> = BTreeMap::new();
    for span in receiver.got().spans {
        all.entry(span.trace_id.clone()).or_default().push(span);
    }
    all
}

fn tag(span: &Span, key: &str) -> Option<Value> {
    span.attributes.iter().find(|a| a.key == key)?.value.clone()?.value
}

fn int(span: &Span, key: &str) -> Option<i64> {
    match tag(span, key) {
        Some(Value::IntValue(n)) => Some(n),
        _ => None,
    }
}

/// The spans of one name.
fn named<'a>(trace: &'a [Span], name: &str) -> Vec<&'a Span> {
    trace.iter().filter(|s| s.name == name).collect()
}

fn duration_ns(span: &Span) -> u64 {
    span.end_time_unix_nano - span.start_time_unix_nano
}

#[tokio::test]
async fn the_planted_slow_collective_arrives_with_four_ranks_in_one_trace() {
    let receiver = Receiver::start(Protocol::Grpc, Wants::default(), None);
    let s = settings(receiver.port, Protocol::Grpc);
    let mut tracer = Tracer::new(&s);
    let (_hand, order, id) = planted(&mut tracer);
    Exporter::new(&s, resource()).unwrap().send(tracer.take()).await.unwrap();

    let traces = traces(&receiver);
    let of_operation = trace_id::of_operation(COMM, Track::Collective, order).to_be_bytes().to_vec();
    let spans = &traces[&of_operation];
    for r in 0..4 {
        let rank = named(spans, &format!("rank {r}"));
        assert_eq!(rank.iter().map(|s| int(s, "nccl.rank")).collect::<Vec<_>>(), [Some(r)], "{spans:#?}");
    }
    let root = named(spans, "AllReduce")[0];
    assert_eq!(int(root, "ringwatch.late_rank"), Some(2));
    let late: Vec<_> = spans.iter().filter(|s| tag(s, "ringwatch.late_by").is_some()).collect();
    let names: Vec<_> = late.iter().map(|s| s.name.as_str()).collect();
    assert_eq!(names.len(), 2, "the operation and the late rank: {names:?}");
    assert!(names.contains(&"rank 2"), "{names:?}");
    // The others wait for half a second, and rank 2 for nobody.
    let waiting = named(spans, "waiting");
    assert!(waiting.len() == 3 && waiting.iter().all(|s| duration_ns(s) >= 499_000_000), "{waiting:#?}");
    // Its finding came later and links to it.
    let finding = &traces[&trace_id::of_finding(id).to_be_bytes().to_vec()][0];
    assert_eq!(finding.name, "finding straggler");
    let link = &finding.links[0];
    assert_eq!((&link.trace_id, &link.span_id), (&of_operation, &root.span_id));
}

/// The recorded job whose rank 3 comes 0.3 s late to its last all-reduce, through the plugin and the agent. Nothing is
/// sampled: only what is unusual is sent.
#[test]
fn the_late_rank_of_a_replayed_job_arrives_at_the_receiver() {
    let receiver = Receiver::start(Protocol::Grpc, Wants::default(), None);
    let room = Room::new();
    let agent = agent(&room, receiver.port, "grpc");
    let players = Players::start(&room, Play::of("mixed").hold(60));
    let late = until("the late operation's trace", || {
        let late = |t: &Vec<Span>| t.iter().any(|s| int(s, "ringwatch.late_rank") == Some(3));
        // Spans of one trace may come in several requests.
        traces(&receiver).into_values().find(|t| late(t) && named(t, "waiting").len() == 3)
    });
    assert_eq!(named(&late, "AllReduce").len(), 1, "{late:#?}");
    for r in 0..4 {
        let of = named(&late, &format!("rank {r}"));
        assert_eq!(of.len(), 1, "{late:#?}");
        assert_eq!(int(of[0], "nccl.rank"), Some(r));
        let by = tag(of[0], "ringwatch.late_by");
        let is_late = matches!(by, Some(Value::DoubleValue(by)) if (0.29..0.31).contains(&by));
        assert_eq!((by.is_some(), is_late), (r == 3, r == 3), "rank {r} is late by {by:?}");
    }
    // The three others wait for it, and it waits for nobody.
    for w in named(&late, "waiting") {
        assert!((290_000_000..310_000_000).contains(&duration_ns(w)), "{w:?}");
    }
    assert_eq!(agent.end().1, Some(0));
    drop(players);
}

/// An agent that sends what is unusual to this port.
fn agent(room: &Room, port: u16, protocol: &str) -> Agent {
    let settings = [
        format!("otlp.endpoint=http://127.0.0.1:{port}"),
        format!("otlp.protocol={protocol}"),
        "otlp.sample_ratio=0.0".to_owned(),
        "otlp.metrics_interval_ms=500".to_owned(),
    ];
    Agent::start(room, &settings.iter().flat_map(|s| ["--set", s]).collect::<Vec<_>>())
}

#[test]
fn a_collector_that_others_wrote_reads_what_the_agent_says_of_a_replayed_job() {
    let test = "a_collector_that_others_wrote_reads_what_the_agent_says_of_a_replayed_job";
    for (protocol, name) in [(Protocol::Grpc, "grpc"), (Protocol::Http, "http")] {
        let Some(collector) = Collector::start(test, protocol) else { return };
        let room = Room::new();
        let agent = agent(&room, collector.port, name);
        let players = Players::start(&room, Play::of("mixed").hold(60));
        collector.reads(&[
            "rank 0",
            "rank 1",
            "rank 2",
            "rank 3",
            "ringwatch.late_rank: Int(3)",
            "finding straggler",
            "ringwatch.finding.opened",
            "ringwatch.collective_transfer",
            "ringwatch.operations",
        ]);
        let late = until("the late operation's trace", || collector.late_trace(3));
        for r in 0..4 {
            let rank = format!("rank {r}");
            let by: Vec<_> = late.iter().filter(|s| s.name == rank).map(|s| s.late_by).collect();
            let right = matches!(by[..], [None]) && r != 3
                || matches!(by[..], [Some(by)] if r == 3 && (0.29..0.31).contains(&by));
            assert!(right, "rank {r} is late by {by:?}: {late:#?}");
        }
        assert_eq!(agent.end().1, Some(0));
        drop(players);
    }
}

/// The collector's program, where `.ci/run` put it.
fn rotel() -> Option<PathBuf> {
    let lib = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/target/rotel/lib"));
    let versions = std::fs::read_dir(lib).ok()?;
    let mut agents = versions.filter_map(|v| Some(v.ok()?.path().join("site-packages/rotel/rotel-agent")));
    agents.find(|p| p.exists())
}

/// The collector, which writes down what it reads; it ends with this value.
struct Collector {
    child: Child,
    port: u16,
    dir: tempfile::TempDir,
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

impl Collector {
    /// `None` where it is not installed, and the test counts as skipped.
    fn start(test: &str, protocol: Protocol) -> Option<Self> {
        let Some(program) = rotel() else {
            skipped(test, "rotel, an OTLP collector (pip install rotel)");
            return None;
        };
        let (grpc, http) = (free_port(), free_port());
        let dir = tempfile::tempdir().unwrap();
        let log = std::fs::File::create(dir.path().join("log")).unwrap();
        let child = Command::new(&program)
            .args(["start", "--exporter", "blackhole", "--debug-log-verbosity", "detailed"])
            .args(["--debug-log", "traces", "--debug-log", "metrics", "--debug-log", "logs"])
            .args(["--otlp-grpc-endpoint", &format!("127.0.0.1:{grpc}")])
            .args(["--otlp-http-endpoint", &format!("127.0.0.1:{http}")])
            .current_dir(dir.path())
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let port = if protocol == Protocol::Grpc { grpc } else { http };
        Some(Collector { child, port, dir })
    }

    /// All spans of the trace in which this rank is the late one, once its three others wait there.
    fn late_trace(&self, rank: i64) -> Option<Vec<Decoded>> {
        let read = std::fs::read_to_string(self.dir.path().join("log")).unwrap();
        let spans: Vec<Decoded> = read.split("\nSpan #").skip(1).filter_map(Decoded::read).collect();
        let trace = spans.iter().find(|s| s.late_rank == Some(rank))?.trace.clone();
        let spans: Vec<Decoded> = spans.into_iter().filter(|s| s.trace == trace).collect();
        (spans.iter().filter(|s| s.name == "waiting").count() == 3).then_some(spans)
    }

    /// Waits until it has read all of these.
    fn reads(&self, wants: &[&str]) {
        let began = Instant::now();
        let mut read = String::new();
        let mut missing = wants.to_vec();
        while !missing.is_empty() && began.elapsed() < Duration::from_secs(90) {
            std::thread::sleep(Duration::from_millis(100));
            read = std::fs::read_to_string(self.dir.path().join("log")).unwrap();
            missing.retain(|w| !read.contains(w));
        }
        assert!(missing.is_empty(), "{missing:?} not in what it read:\n{read}");
    }
}

/// One span as the collector writes it down.
#[derive(Debug)]
struct Decoded {
    trace: String,
    name: String,
    late_rank: Option<i64>,
    late_by: Option<f64>,
}

impl Decoded {
    /// `None` where the collector is still writing it.
    fn read(text: &str) -> Option<Self> {
        let of = |key: &str| text.lines().find_map(|l| l.trim().strip_prefix(key));
        let field = |key: &str| Some(of(key)?.trim().strip_prefix(':')?.trim().to_owned());
        let number = |key: &str, kind: &str| of(key)?.strip_prefix(kind)?.strip_suffix(')')?.parse().ok();
        Some(Decoded {
            trace: field("Trace ID")?,
            name: field("Name")?,
            late_rank: number("-> ringwatch.late_rank: ", "Int(").map(|r: f64| r as i64),
            late_by: number("-> ringwatch.late_by: ", "Double("),
        })
    }
}

fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

#[tokio::test]
async fn a_collector_that_others_wrote_reads_what_we_mean() {
    let test = "a_collector_that_others_wrote_reads_what_we_mean";
    for protocol in [Protocol::Grpc, Protocol::Http] {
        let Some(collector) = Collector::start(test, protocol) else { return };
        let s = settings(collector.port, protocol);
        let exporter = Exporter::new(&s, resource()).unwrap();
        let mut tracer = Tracer::new(&s);
        let (mut hand, order, _) = planted(&mut tracer);
        let began = Instant::now();
        loop {
            let batch = tracer.take();
            if batch.is_empty() {
                break;
            }
            if let Err((e, back)) = exporter.send(batch).await {
                assert!(began.elapsed() < Duration::from_secs(60), "{e}");
                tracer.give_back(back);
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
        let mut metrics = Metrics::new(prometheus::Settings::default());
        hand.round(25 * S, None);
        let taken = hand.join.take_finished();
        metrics.finished(&hand.join, &taken);
        let families = metrics.gather(&hand.join, &[], &Own { now_ns: 26 * S, ..Own::default() });
        exporter.metrics(&families, exported::EPOCH_NS, exported::EPOCH_NS + 26 * S).await.unwrap();

        let trace = format!("{:032x}", trace_id::of_operation(COMM, Track::Collective, order));
        collector.reads(&[
            &*trace,
            "rank 3",
            "ringwatch.late_by",
            "finding straggler",
            "ringwatch.finding.opened",
            "ringwatch.collective_transfer",
            "ExponentialHistogram",
            "ringwatch.operations",
        ]);
    }
}
