//! What an analyser costs by the size of the fleet, on the real bus: `cargo bench --bench fleet`.
//!
//! A NATS server, a `ringwatch analyser`, and a generator that speaks for all nodes: 8 ranks a node, 64 communicators a
//! rank as Megatron makes them (tensor groups within a node, pipeline and data groups across), 200 operations a second a
//! rank. It publishes what agents publish: beats, signatures, sketches, a sample of records. Every second of the fleet takes as
//! long as the analyser needs to hear it, and at least a second; faults are planted as it goes, and the time until the verdict
//! comes is measured.
//!
//! `RANKS=256,1024,4096,16384 SECONDS=20 NATS_SERVER=nats-server cargo bench --bench fleet`

#![allow(clippy::unwrap_used, reason = "a benchmark stops at the first surprise")]
#![allow(clippy::disallowed_methods, reason = "a benchmark spawns what it needs")]

use async_nats::Client;
use futures_util::StreamExt;
use prost::Message as _;
use ringwatch::cluster::message::{self as m, Envelope};
use ringwatch::cluster::subject::{Topic, bucket};
use ringwatch::ingest::{now_ns, unix_ns};
use ringwatch::model::CommId;
use std::collections::{BTreeMap, HashMap};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const S: u64 = 1_000_000_000;
const A_NODE: u32 = 8;
/// Communicators of a rank: tensor groups of 8, pipeline groups of 16, data groups of the rest, and all.
const TENSOR: u32 = 32;
const PIPELINE: u32 = 15;
const DATA: u32 = 15;
const WORLD: u32 = 2;
/// Operations a second of a rank: most of them in tensor groups.
const OPERATIONS: u64 = 200;
/// Nodes that speak at once.
const AT_ONCE: u32 = 1024;
/// One of so many operations is told whole.
const SAMPLED: u64 = 64;

/// One communicator of the fleet.
#[derive(Debug, Clone, Copy)]
struct Group {
    comm: CommId,
    rank: u32,
    ranks: u32,
    nodes: u32,
    /// Operations a second.
    rate: u64,
}

fn mixed(n: u64) -> u64 {
    let mut n = n.wrapping_add(0x9e37_79b9_7f4a_7c15);
    n = (n ^ n >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    n = (n ^ n >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    n ^ n >> 31
}

/// The communicators of a rank of the fleet.
fn groups(rank: u32, ranks: u32) -> Vec<Group> {
    let stages = (ranks / A_NODE).clamp(1, 16);
    let nodes = ranks / A_NODE;
    let replicas = (nodes / stages).max(1);
    let (node, local) = (rank / A_NODE, rank % A_NODE);
    let (stage, replica) = (node / replicas, node % replicas);
    let id = |kind: u64, copy: u32, of: u32| {
        CommId::unowned(mixed(kind << 56 | u64::from(copy) << 40 | u64::from(of)))
    };
    let mut all = Vec::new();
    for copy in 0..TENSOR {
        let rate = 4;
        all.push(Group { comm: id(1, copy, node), rank: local, ranks: A_NODE, nodes: 1, rate });
    }
    for copy in 0..PIPELINE {
        let of = replica * A_NODE + local;
        all.push(Group { comm: id(2, copy, of), rank: stage, ranks: stages, nodes: stages, rate: 3 });
    }
    for copy in 0..DATA {
        let of = stage * A_NODE + local;
        all.push(Group { comm: id(3, copy, of), rank: replica, ranks: replicas, nodes: replicas, rate: 1 });
    }
    for copy in 0..WORLD {
        all.push(Group { comm: id(4, copy, 0), rank, ranks, nodes, rate: 1 });
    }
    let so_far: u64 = all.iter().map(|g| g.rate).sum();
    // What is left goes to the first tensor group.
    all[0].rate += OPERATIONS.saturating_sub(so_far);
    all
}

fn segment(rank: u32) -> u64 {
    u64::from(rank) + 1
}

fn process(rank: u32, ranks: u32, alive: bool) -> m::Process {
    m::Process {
        segment: segment(rank),
        pid: 1000 + rank % A_NODE,
        program: "python3".to_owned(),
        nccl: Some("2.28.9".to_owned()),
        abi: Some(5),
        job: Some("pretrain".to_owned()),
        job_rank: Some(rank),
        job_size: Some(ranks),
        alive,
        gone_ns: (!alive).then(now_ns),
        created_ns: now_ns() - S,
        created_unix_ns: unix_ns() - S,
        ..m::Process::default()
    }
}

fn member(rank: u32, g: &Group) -> m::Member {
    m::Member {
        segment: segment(rank),
        comm: g.comm.nccl_hash(),
        rank: g.rank,
        ranks: Some(g.ranks),
        nodes: Some(g.nodes),
        name: None,
        gpu: Some(format!("0000:{:02x}:00.0", 0x10 + rank % A_NODE)),
        host_clock: u64::from(rank / A_NODE) + 1,
        init_ns: now_ns(),
        ..m::Member::default()
    }
}

fn record(rank: u32, g: &Group, order: u64, count: u64, duration_ns: Option<u64>) -> m::Record {
    let issued = now_ns() - 200_000_000;
    m::Record {
        segment: segment(rank),
        ticket: order,
        comm: g.comm.nccl_hash(),
        rank: g.rank,
        lane: 1,
        order: Some(order),
        func: 5,
        dtype: 8,
        count,
        algo: 2,
        proto: 3,
        channels: Some(16),
        called_ns: Some(issued),
        issued_ns: Some(issued + 5_000),
        timing: 1,
        started: 16,
        stopped: duration_ns.map_or(0, |_| 16),
        started_ns: Some(issued + 20_000),
        duration_ns,
        ended_seen_ns: duration_ns.map(|d| issued + 30_000 + d),
        finished: duration_ns.is_some(),
        ..m::Record::default()
    }
}

/// What a node's agent tells of a group's operations of a second.
fn sketch(g: &Group, ranks: u32, count: u64, whole: bool) -> m::Sketch {
    m::Sketch {
        comm: g.comm.nccl_hash(),
        func: 5,
        size_class: 23,
        algo: 2,
        proto: 3,
        count,
        timed: count,
        bytes: Some(count << 22),
        busy_ns: count * 90_000,
        // 80 to 100 us.
        buckets: if count < 3 { vec![131] } else { vec![130, 131, 132] },
        counts: if count < 3 { vec![count] } else { vec![count / 3, count - count / 3 * 2, count / 3] },
        rank: g.rank,
        ranks,
        from_s: now_ns() / S - 1,
        seconds: 1,
        whole,
        by_events: 0,
        segment: None,
    }
}

/// The fleet: how far every rank is.
struct Fleet {
    ranks: u32,
    run: u64,
    sequences: HashMap<(u32, Topic), u64>,
    /// Seconds that it has lived.
    age: u64,
    bytes: u64,
    messages: u64,
}

impl Fleet {
    fn node(n: u32) -> String {
        format!("node{n:05}")
    }

    async fn send(&mut self, client: &Client, node: u32, topic: Topic, mut e: Envelope) {
        let sequence = self.sequences.entry((node, topic)).or_default();
        *sequence += 1;
        (e.version, e.node, e.run, e.sequence) = (m::VERSION, Self::node(node), self.run, *sequence);
        (e.sent_ns, e.sent_unix_ns) = (now_ns(), unix_ns());
        let bytes = e.encode_to_vec();
        self.bytes += bytes.len() as u64;
        self.messages += 1;
        client.publish(topic.of(&Self::node(node)), bytes.into()).await.unwrap();
    }

    /// Everybody is there.
    async fn arrive(&mut self, client: &Client) {
        for node in 0..self.ranks / A_NODE {
            let of = node * A_NODE..(node + 1) * A_NODE;
            let processes = of.clone().map(|r| process(r, self.ranks, true)).collect();
            self.send(client, node, Topic::Node, Envelope { processes, ..Envelope::default() }).await;
            let mut by: BTreeMap<u8, Vec<m::Member>> = BTreeMap::new();
            for rank in of {
                for g in groups(rank, self.ranks) {
                    by.entry(bucket(g.comm)).or_default().push(member(rank, &g));
                }
            }
            for (b, members) in by {
                self.send(client, node, Topic::Bucket(b), Envelope { members, ..Envelope::default() }).await;
            }
            if node % AT_ONCE == AT_ONCE - 1 {
                client.flush().await.unwrap();
                self.heard(client).await;
            }
        }
        client.flush().await.unwrap();
    }

    /// One second of everybody's work.
    async fn second(&mut self, client: &Client) {
        self.age += 1;
        for node in 0..self.ranks / A_NODE {
            let mut by: BTreeMap<u8, Envelope> = BTreeMap::new();
            for rank in node * A_NODE..(node + 1) * A_NODE {
                for g in groups(rank, self.ranks) {
                    let e = by.entry(bucket(g.comm)).or_default();
                    let (from, to) = ((self.age - 1) * g.rate, self.age * g.rate);
                    let (segment, comm, rank_in) = (segment(rank), g.comm.nccl_hash(), g.rank);
                    e.beats.push(m::Beat { segment, comm, rank: rank_in, issued: to, ..m::Beat::default() });
                    let signatures = (from..to).map(|o| mixed(o ^ comm) as u32).collect();
                    e.signatures.push(m::Signatures { segment, comm, rank: rank_in, from, signatures });
                    let sampled =
                        (from..to).filter(|o| mixed(*o ^ comm.rotate_left(9)).is_multiple_of(SAMPLED));
                    // A node tells of its ranks together: the first of those in a group speaks.
                    let of_node = if g.nodes == 1 || g.ranks == self.ranks { A_NODE } else { 1 };
                    if of_node == 1 || rank % A_NODE == 0 {
                        let whole = g.nodes == 1;
                        e.sketches.push(sketch(&g, of_node, to - from, whole));
                    }
                    e.records.extend(sampled.map(|o| {
                        let noise = mixed(o ^ comm ^ u64::from(rank)) % 20_000;
                        record(rank, &g, o, 1 << 20, Some(80_000 + noise))
                    }));
                }
            }
            for (b, e) in by {
                self.send(client, node, Topic::Bucket(b), e).await;
            }
            // A real fleet's second is no burst: a server gives up a reader that is 64 MiB behind.
            if node % AT_ONCE == AT_ONCE - 1 {
                client.flush().await.unwrap();
                self.heard(client).await;
            }
        }
        client.flush().await.unwrap();
    }

    /// Waits until the analyser has heard all that was said: a second of the fleet takes as long as it takes.
    async fn heard(&self, client: &Client) {
        loop {
            let asked = client.request("ringwatch.v1.read.state", bytes::Bytes::new());
            if let Ok(Ok(m)) = tokio::time::timeout(Duration::from_secs(30), asked).await {
                let v: serde_json::Value = serde_json::from_slice(&m.payload).unwrap();
                assert_eq!(v["dropped"], 0, "the analyser had no room");
                if v["messages"].as_u64().unwrap() >= self.messages {
                    return;
                }
            }
            // An answer names two thousand nodes, which is work for the analyser too.
            tokio::time::sleep(Duration::from_millis(if self.ranks > 1 << 14 { 500 } else { 50 })).await;
        }
    }

    /// Another size on one rank of a tensor group: proven as soon as the records are there.
    async fn mismatch(&mut self, client: &Client, node: u32, copy: u32) -> CommId {
        let mut comm = CommId::unowned(0);
        for rank in node * A_NODE..(node + 1) * A_NODE {
            let g = groups(rank, self.ranks)[copy as usize];
            comm = g.comm;
            let order = self.age * g.rate;
            let count = if g.rank == 3 { 1 << 19 } else { 1 << 20 };
            let records = vec![record(rank, &g, order, count, None)];
            let beat = m::Beat {
                segment: segment(rank),
                comm: g.comm.nccl_hash(),
                rank: g.rank,
                issued: order + 1,
                open: 1,
                ..m::Beat::default()
            };
            let e = Envelope { records, beats: vec![beat], ..Envelope::default() };
            self.send(client, node, Topic::Bucket(bucket(g.comm)), e).await;
        }
        client.flush().await.unwrap();
        comm
    }
}

struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// CPU time of a process in ms, and its memory in KiB.
fn cost(pid: u32) -> (u64, u64) {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit(") ").next().unwrap().split(' ').collect();
    let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let rss = status.lines().find_map(|l| l.strip_prefix("VmRSS:")).unwrap();
    (ticks * 10, rss.trim().trim_end_matches(" kB").trim().parse().unwrap())
}

async fn fleet(ranks: u32, seconds: u64) {
    let room = tempfile::tempdir().unwrap();
    let server = std::env::var("NATS_SERVER").unwrap_or_else(|_| "nats-server".to_owned());
    let mappings = include_str!("../../config/examples/nats/mappings.conf");
    let port = 15_000 + (std::process::id() % 1_000) as u16;
    let conf = room.path().join("nats.conf");
    let store = room.path().join("js");
    std::fs::write(
        &conf,
        format!("listen: \"127.0.0.1:{port}\"\njetstream {{ store_dir: {store:?} }}\n{mappings}"),
    )
    .unwrap();
    let started = Command::new(&server).arg("-c").arg(&conf).stderr(Stdio::null()).spawn();
    let Ok(server) = started else {
        println!("skipped: {server:?} cannot be run; name it by NATS_SERVER");
        return;
    };
    let server = Running(server);
    let url = format!("nats://127.0.0.1:{port}");
    let client = loop {
        match async_nats::connect(&url).await {
            Ok(c) => break c,
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    };
    let analyser = Command::new(env!("CARGO_BIN_EXE_ringwatch"))
        .args([
            "analyser",
            "--json",
            "--set",
            &format!("cluster.servers=[{url:?}]"),
            "--set",
            "http.listen=null",
            // A second of the fleet may take longer than one of the clock, and silence with it.
            "--set",
            "cluster.silent_ms=600000",
        ])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let analyser = Running(analyser);
    let mut verdicts = client.subscribe("ringwatch.v1.verdict.>").await.unwrap();
    client.flush().await.unwrap();
    let came: Arc<Mutex<HashMap<String, Instant>>> = Arc::default();
    let heard = Arc::clone(&came);
    tokio::spawn(async move {
        while let Some(v) = verdicts.next().await {
            let v: serde_json::Value = serde_json::from_slice(&v.payload).unwrap();
            let comm = v["finding"]["communicator"].as_str().unwrap().to_owned();
            if v["finding"]["kind"] == "mismatch" {
                heard.lock().unwrap().entry(comm).or_insert_with(Instant::now);
            } else if std::env::var_os("SHOW").is_some() {
                println!("also: {} {}", v["finding"]["kind"], v["finding"]["evidence"][0]["text"]);
            }
        }
    });
    tokio::time::sleep(Duration::from_secs(2)).await;
    let mut f = Fleet { ranks, run: unix_ns(), sequences: HashMap::new(), age: 0, bytes: 0, messages: 0 };
    let began = Instant::now();
    f.arrive(&client).await;
    f.heard(&client).await;
    let arrival = began.elapsed();
    for _ in 0..2 {
        f.second(&client).await;
        f.heard(&client).await;
    }
    let pid = analyser.0.id();
    let ((cpu, _), (server_cpu, _)) = (cost(pid), cost(server.0.id()));
    let (bytes, messages) = (f.bytes, f.messages);
    let began = Instant::now();
    let mut planted: Vec<(String, Instant)> = Vec::new();
    for n in 0..seconds {
        let second = Instant::now();
        f.second(&client).await;
        for copy in 0..4u32 {
            let node = (mixed(n * 7 + u64::from(copy)) % u64::from(ranks / A_NODE)) as u32;
            let copy = 1 + (n as u32 * 4 + copy) % (TENSOR - 1);
            let comm = f.mismatch(&client, node, copy).await;
            planted.push((comm.to_string(), Instant::now()));
        }
        f.heard(&client).await;
        tokio::time::sleep(Duration::from_secs(1).saturating_sub(second.elapsed())).await;
    }
    let took = began.elapsed();
    tokio::time::sleep(Duration::from_secs(4)).await;
    let ((cpu_now, rss), (server_now, server_rss)) = (cost(pid), cost(server.0.id()));
    let came = came.lock().unwrap();
    let mut delays: Vec<f64> = planted
        .iter()
        .filter_map(|(c, at)| Some(came.get(c)?.saturating_duration_since(*at).as_secs_f64()))
        .collect();
    delays.sort_by(f64::total_cmp);
    let at = |q: f64| delays.get(((delays.len() as f64 * q) as usize).min(delays.len().saturating_sub(1)));
    let fleet_seconds = f64::from(ranks) * seconds as f64;
    println!(
        "{ranks} ranks: arrived in {:.1} s; {seconds} s of the fleet in {:.1} s; a second of the fleet: {} messages, {:.2} MB; \
         analyser {:.2} us of CPU a rank and second, {} MiB; server {:.2} us, {} MiB; {} of {} verdicts, p50 {:.2} s, p99 {:.2} s",
        arrival.as_secs_f64(),
        took.as_secs_f64(),
        (f.messages - messages) / seconds,
        (f.bytes - bytes) as f64 / seconds as f64 / 1e6,
        (cpu_now - cpu) as f64 * 1e3 / fleet_seconds,
        rss / 1024,
        (server_now - server_cpu) as f64 * 1e3 / fleet_seconds,
        server_rss / 1024,
        delays.len(),
        planted.len(),
        at(0.5).copied().unwrap_or(f64::NAN),
        at(0.99).copied().unwrap_or(f64::NAN),
    );
}

fn main() {
    let ranks = std::env::var("RANKS").unwrap_or_else(|_| "256,1024,4096".to_owned());
    let seconds = std::env::var("SECONDS").ok().and_then(|s| s.parse().ok()).unwrap_or(10);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    for n in ranks.split(',').filter_map(|n| n.trim().parse().ok()) {
        runtime.block_on(fleet(n, seconds));
    }
}
