//! Receivers that others wrote: one with Jaeger's query interface, and a collector as an independent decoder.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::disallowed_methods, reason = "these tests have servers and a clock of their own")]

mod exported;
mod support;

use exported::{COMM, Hand, S};
use otlp_embedded::{Config, State, TraceServiceImpl, TraceServiceServer, ui_app};
use ringwatch::export::otlp::{Exporter, Protocol, Settings, Tracer};
use ringwatch::export::prometheus::{self, Metrics, Own};
use ringwatch::export::trace_id;
use ringwatch::model::{Finding, FindingId, Kind, OperationRef, Rank, Track};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use support::agent::Agent;
use support::{Play, Players, Room, until};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tonic::transport::server::TcpIncoming;

fn settings(port: u16, protocol: Protocol) -> Settings {
    Settings {
        endpoint: Some(format!("http://127.0.0.1:{port}")),
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
    tracer.findings(&hand.join, &[finding]);
    (hand, order, id)
}

/// One GET, answered with JSON.
async fn get(port: u16, path: &str) -> serde_json::Value {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    let request = format!("GET {path} HTTP/1.0\r\nhost: localhost\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.contains(" 200 "), "{path}: {answer}");
    serde_json::from_str(body).unwrap()
}

/// A receiver with Jaeger's query interface: the port to ask, and the port to send to.
async fn jaeger() -> (u16, u16) {
    let state = State::new(Config { max_length: 100, max_memory_usage: 1 << 27 });
    let query = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let intake = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (query_port, port) = (query.local_addr().unwrap().port(), intake.local_addr().unwrap().port());
    let ui = ui_app(state.clone(), "/");
    tokio::spawn(async move { axum::serve(query, ui).await.unwrap() });
    let service = TraceServiceServer::new(TraceServiceImpl::new(state));
    let server = tonic::transport::Server::builder().add_service(service);
    tokio::spawn(server.serve_with_incoming(TcpIncoming::from(intake)));
    (query_port, port)
}

/// The spans of a trace as Jaeger tells it.
fn spans_of(trace: &serde_json::Value) -> &Vec<serde_json::Value> {
    trace["spans"].as_array().unwrap()
}

fn tag(span: &serde_json::Value, key: &str) -> Option<serde_json::Value> {
    let tags = span["tags"].as_array().unwrap();
    tags.iter().find(|t| t["key"] == key).map(|t| t["value"].clone())
}

#[tokio::test]
async fn the_planted_slow_collective_is_queried_back_with_four_ranks_in_one_trace() {
    let (query_port, port) = jaeger().await;
    let s = settings(port, Protocol::Grpc);
    let mut tracer = Tracer::new(&s);
    let (_hand, order, id) = planted(&mut tracer);
    // It takes traces alone.
    let mut batch = tracer.take();
    batch.logs.clear();
    Exporter::new(&s, resource()).unwrap().send(batch).await.unwrap();

    let listed = get(query_port, "/api/traces?service=ringwatch&limit=20").await;
    let trace = format!("{:032x}", trace_id::of_operation(COMM, Track::Collective, order));
    let ids: Vec<_> = listed["data"].as_array().unwrap().iter().map(|t| &t["traceID"]).collect();
    assert!(ids.iter().any(|id| **id == *trace), "{ids:?}");
    let got = get(query_port, &format!("/api/traces/{trace}")).await;
    let spans = spans_of(&got["data"][0]);
    let named = |name: &str| {
        let found = spans.iter().find(|s| s["operationName"] == name);
        found.unwrap_or_else(|| panic!("no {name} in {got:#}"))
    };
    for r in 0..4 {
        assert_eq!(tag(named(&format!("rank {r}")), "nccl.rank"), Some(r.into()));
    }
    let root = named("AllReduce");
    assert_eq!(tag(root, "ringwatch.late_rank"), Some(2.into()));
    let late: Vec<_> = spans.iter().filter(|s| tag(s, "ringwatch.late_by").is_some()).collect();
    let names: Vec<_> = late.iter().map(|s| s["operationName"].as_str().unwrap()).collect();
    assert_eq!(names.len(), 2, "the operation and the late rank: {names:?}");
    assert!(names.contains(&"rank 2"), "{names:?}");
    // The others wait for half a second, and rank 2 for nobody.
    let waiting: Vec<_> = spans.iter().filter(|s| s["operationName"] == "waiting").collect();
    assert!(waiting.len() == 3 && waiting.iter().all(|s| s["duration"].as_u64().unwrap() >= 499_000));
    // Its finding came later and links to it.
    let of_finding = format!("{:032x}", trace_id::of_finding(id));
    let got = get(query_port, &format!("/api/traces/{of_finding}")).await;
    let finding = &got["data"][0]["spans"][0];
    assert_eq!(finding["operationName"], "finding straggler");
    assert_eq!(finding["references"][0]["refType"], "FOLLOWS_FROM");
    assert_eq!(finding["references"][0]["traceID"], *trace);
    assert_eq!(finding["references"][0]["spanID"], root["spanID"]);
}

/// The recorded job whose rank 3 comes 0.3 s late to its last all-reduce, through the plugin and the agent. Nothing is
/// sampled: only what is unusual is sent.
#[tokio::test(flavor = "multi_thread")]
async fn the_late_rank_of_a_replayed_job_is_queried_back_from_the_receiver() {
    let (query_port, port) = jaeger().await;
    let room = Room::new();
    let agent = agent(&room, port, "grpc");
    let players = Players::start(&room, Play::of("mixed").hold(60));
    let late = until("the late operation's trace", || {
        let listed = tokio::task::block_in_place(|| {
            Handle::current().block_on(get(query_port, "/api/traces?service=ringwatch&limit=100"))
        });
        let mut traces = listed["data"].as_array().unwrap().clone().into_iter();
        traces.find(|t| spans_of(t).iter().any(|s| tag(s, "ringwatch.late_rank") == Some(3.into())))
    });
    let spans = spans_of(&late);
    let named = |name: &str| -> Vec<_> { spans.iter().filter(|s| s["operationName"] == name).collect() };
    let root = named("AllReduce");
    assert_eq!(root.len(), 1, "{late:#}");
    for r in 0..4 {
        let of = named(&format!("rank {r}"));
        assert_eq!(of.len(), 1, "{late:#}");
        assert_eq!(tag(of[0], "nccl.rank"), Some(r.into()));
        let by = tag(of[0], "ringwatch.late_by").map(|v| v.as_f64().unwrap());
        assert_eq!(by.is_some(), r == 3, "rank {r} is late by {by:?}");
        assert!(by.is_none_or(|by| (0.29..0.31).contains(&by)), "{by:?}");
    }
    // The three others wait for it, and it waits for nobody.
    let waiting = named("waiting");
    assert_eq!(waiting.len(), 3, "{late:#}");
    for w in waiting {
        assert!((290_000..310_000).contains(&w["duration"].as_u64().unwrap()), "{w}");
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
    /// `None`, said with the test's name, where it is not installed.
    fn start(test: &str, protocol: Protocol) -> Option<Self> {
        let Some(program) = rotel() else {
            eprintln!("SKIPPED {test}: no rotel; .ci/run installs it");
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
