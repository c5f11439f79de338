//! A soak: two jobs of four players come and go without a pause, and what the daemons talk to comes and goes as well.
//! Memory and descriptors of agent and analyser stay flat, and what the players issued is what the agent counted.
//!
//! `RINGWATCH_SOAK_SECONDS=1800 cargo test --release --test soak -- --nocapture` is the long form.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod receiver;
mod support;

use receiver::{Receiver, Wants};
use ringwatch::export::otlp::Protocol;
use ringwatch::replay::{Call, Descriptor, Event, PlayReport, RankTrace, Trace, monotonic_ns};
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};
use support::agent::Agent;
use support::nats::{self, Nats};
use support::prometheus::{Prometheus, program};
use support::{Room, until};

/// How long it takes, in seconds, where `RINGWATCH_SOAK_SECONDS` says nothing else.
const USUAL_SECONDS: u64 = 60;
/// Operations a second of each player, where `RINGWATCH_SOAK_RATE` says nothing else. Two cores play and read a fifth of
/// it without optimization.
const USUAL_RATE: u64 = if cfg!(debug_assertions) { 1_000 } else { 5_000 };
const RANKS: usize = 4;
/// Operations that a host issues in a row, as in a training step.
const BURST: u64 = 10;
/// The recording's length, in ns. A player plays it several times, with a new communicator each time.
const LENGTH_NS: u64 = 2_000_000_000;
/// What a daemon may have at all, in KiB: the unit's limit is above it.
const MEMORY_KIB: u64 = 96 << 10;
/// What is known of jobs that ended is forgotten after minutes: only a soak longer than this, in seconds, shows that memory
/// stays.
const SETTLED: usize = 900;
/// What memory may grow by, in KiB, from one third of the time to the next, beside a twentieth.
const ROOM_KIB: u64 = 4 << 10;
/// The same of descriptors: connections that are being made.
const ROOM_DESCRIPTORS: usize = 8;

fn setting(name: &str, usual: u64) -> u64 {
    std::env::var(name).map_or(usual, |n| n.parse().unwrap_or_else(|e| panic!("{name}={n}: {e}")))
}

/// One rank's callbacks: all-reduces of 1 MiB on one channel, as NCCL 2.28 tells of them.
fn recording(rank: i32, rate: u64) -> RankTrace {
    const BEGIN_NS: u64 = 1_000_000_000;
    const GPU_AHEAD_NS: u64 = 1_700_000_000_000_000_000;
    let mut trace = RankTrace { label: format!("rank{rank}"), pid: 1, threads: vec![1], events: Vec::new() };
    let init =
        Call::Init { ctx: 1, comm_id: 0xA0, name: Some("dp".into()), nodes: 1, ranks: RANKS as i32, rank };
    trace.events.push(Event { at_ns: BEGIN_NS, thread: 0, call: init });
    let text = |t: &str| t.into();
    let burst_ns = BURST * 1_000_000_000 / rate;
    let mut handle = 10;
    for burst in 0..LENGTH_NS / burst_ns {
        let began_ns = BEGIN_NS + 100_000_000 + burst * burst_ns;
        let mut say = |at_ns, call| trace.events.push(Event { at_ns: began_ns + at_ns, thread: 0, call });
        for n in 0..BURST {
            let (group, coll) = (handle, handle + 1);
            handle += 3;
            let descriptor = Descriptor::Coll {
                rank,
                seq: burst * BURST + n,
                func: text("AllReduce"),
                count: 262_144,
                root: 0,
                datatype: text("ncclFloat32"),
                channels: 1,
                warps: 16,
                algo: text("RING"),
                proto: text("LL128"),
            };
            let at_ns = n * 2_000;
            say(at_ns, Call::Start { handle: group, ctx: 1, parent: 0, descriptor: Descriptor::Group });
            say(at_ns + 200, Call::Start { handle: coll, ctx: 1, parent: group, descriptor });
            say(at_ns + 400, Call::Stop { handle: coll });
            say(at_ns + 600, Call::Stop { handle: group });
        }
        // NCCL's thread tells of all of them once the GPU is done.
        for n in 0..BURST {
            let coll = handle - 3 * (BURST - n) + 1;
            let at_ns = BURST * 20_000 + n * 2_000;
            let stamp_ns = GPU_AHEAD_NS + began_ns + n * 20_000;
            let descriptor = Descriptor::KernelCh { channel: 0, stamp_ns };
            say(at_ns, Call::Start { handle: coll + 1, ctx: 1, parent: coll, descriptor });
            say(at_ns + 500, Call::State { handle: coll + 1, state: 22, arg: Some(stamp_ns + 18_000) });
            say(at_ns + 600, Call::Stop { handle: coll + 1 });
        }
    }
    let end_ns = BEGIN_NS + LENGTH_NS + 200_000_000;
    trace.events.push(Event { at_ns: end_ns, thread: 0, call: Call::Finalize { ctx: 1 } });
    trace
}

/// A job: four processes, which end by themselves or are killed.
struct Job {
    players: Vec<Child>,
    killed_at: Option<Instant>,
}

impl Job {
    /// The n-th job. Every third is killed in the middle.
    fn start(room: &Room, plugin: &Path, recordings: &[PathBuf], n: u64) -> Self {
        let is_killed = n % 3 == 2;
        let loops = 2 + n % 4;
        let start_at = monotonic_ns() + 700_000_000;
        let player = |rank: usize| {
            let mut command = room.ringwatch(["replay", "--scenario", "mixed", "--honour-mask", "--trace"]);
            command.arg(&recordings[rank]).args(["--rank", "0", "--loops", &loops.to_string()]);
            command.args(["--start-at", &start_at.to_string(), "--plugin"]).arg(plugin);
            command.env("RANK", rank.to_string()).env("WORLD_SIZE", RANKS.to_string());
            command.env("RINGWATCH_JOB", if is_killed { "killed" } else { "steady" });
            command.stdout(Stdio::piped()).spawn().unwrap()
        };
        let killed_at = is_killed.then(|| Instant::now() + Duration::from_millis(2_500 + 137 * n % 1_000));
        Job { players: (0..RANKS).map(player).collect(), killed_at }
    }

    /// What it issued, once it is over: collectives of all ranks. `None` while it runs.
    fn over(&mut self) -> Option<u64> {
        if self.killed_at.is_some_and(|at| at <= Instant::now()) {
            self.players.iter_mut().for_each(|p| p.kill().unwrap());
        }
        if !self.players.iter_mut().all(|p| p.try_wait().unwrap().is_some()) {
            return None;
        }
        let starts = |p: &mut Child| -> u64 {
            let mut line = String::new();
            BufReader::new(p.stdout.take().unwrap()).read_line(&mut line).unwrap();
            let report: Result<PlayReport, _> = serde_json::from_str(&line);
            report.map_or(0, |r| r.starts.get("Coll").copied().unwrap_or(0))
        };
        let issued: Vec<u64> = self.players.iter_mut().map(starts).collect();
        if self.killed_at.is_none() {
            assert!(issued.iter().all(|n| *n > 0 && *n == issued[0]), "{issued:?}");
        }
        Some(issued[0])
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for p in &mut self.players {
            drop(p.kill());
            drop(p.wait());
        }
    }
}

/// A daemon's memory in KiB, and its descriptors, once a second.
struct Watched {
    name: &'static str,
    pid: u32,
    memory: Vec<u64>,
    descriptors: Vec<usize>,
}

impl Watched {
    fn new(name: &'static str, agent: &Agent) -> Self {
        Watched { name, pid: agent.child.id(), memory: Vec::new(), descriptors: Vec::new() }
    }

    fn look(&mut self) {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid)).unwrap();
        let anonymous = status.lines().find_map(|l| l.strip_prefix("RssAnon:")).unwrap();
        self.memory.push(anonymous.trim().trim_end_matches(" kB").parse().unwrap());
        self.descriptors.push(fs::read_dir(format!("/proc/{}/fd", self.pid)).unwrap().count());
    }

    /// The middle value of each third of the time: what is flat has the same in the second and in the last.
    fn thirds<T: Copy + Ord>(all: &[T]) -> [T; 3] {
        [0, 1, 2].map(|third| {
            let mut part = all[all.len() * third / 3..all.len() * (third + 1) / 3].to_vec();
            part.sort_unstable();
            part[part.len() / 2]
        })
    }

    fn assert_flat(&self) {
        let (memory, descriptors) = (Self::thirds(&self.memory), Self::thirds(&self.descriptors));
        let most = (self.memory.iter().max().unwrap(), self.descriptors.iter().max().unwrap());
        println!(
            "{}: memory by thirds {memory:?} KiB, at most {}; descriptors {descriptors:?}, at most {}",
            self.name, most.0, most.1
        );
        assert!(*most.0 <= MEMORY_KIB, "{} takes too much: {:?}", self.name, self.memory);
        let settled = self.memory.len() >= SETTLED;
        assert!(
            !settled || memory[2] <= memory[1] + memory[1] / 20 + ROOM_KIB,
            "{} grows: {:?}",
            self.name,
            self.memory
        );
        assert!(
            descriptors[2] <= descriptors[1] + ROOM_DESCRIPTORS,
            "{} keeps descriptors: {:?}",
            self.name,
            self.descriptors
        );
    }
}

/// What the daemons talk to: each is away for a part of its own period.
struct Peers {
    nats: Nats,
    nats_there: bool,
    receiver: Option<Receiver>,
    port: u16,
    prometheus: Option<Prometheus>,
    program: PathBuf,
    data: PathBuf,
}

impl Peers {
    fn flap(&mut self, second: u64, scraped: &[&str]) {
        match (second % 11 < 8, self.nats_there) {
            (true, false) => self.nats.run(),
            (false, true) => self.nats.kill(),
            _ => {}
        }
        self.nats_there = second % 11 < 8;
        match (second % 7 < 4, &self.receiver) {
            (true, None) => {
                self.receiver = Some(Receiver::start(Protocol::Grpc, Wants::default(), Some(self.port)));
            }
            (false, Some(_)) => drop(self.receiver.take().map(Receiver::stop)),
            _ => {}
        }
        match (second % 13 < 9, &self.prometheus) {
            (true, None) => {
                self.prometheus = Some(Prometheus::start(&self.program, &self.data, scraped, None));
            }
            (false, Some(_)) => self.prometheus = None,
            _ => {}
        }
    }
}

#[test]
fn memory_and_descriptors_stay_flat_while_everything_comes_and_goes() {
    let test = "memory_and_descriptors_stay_flat_while_everything_comes_and_goes";
    let Some(program) = program("prometheus", test).filter(|_| nats::there(test)) else { return };
    let seconds = setting("RINGWATCH_SOAK_SECONDS", USUAL_SECONDS);
    let rate = setting("RINGWATCH_SOAK_RATE", USUAL_RATE);
    let room = Room::new();
    let plugin = room.plugin();
    let recorded: Vec<PathBuf> = (0..RANKS).map(|rank| room.path(&format!("{rank}.trace"))).collect();
    for (rank, path) in recorded.iter().enumerate() {
        fs::write(path, Trace { ranks: vec![recording(rank as i32, rate)] }.encode()).unwrap();
    }
    let nats = Nats::start(&room);
    let receiver = Receiver::start(Protocol::Grpc, Wants::default(), None);
    let servers = nats.servers();
    let endpoint = format!("otlp.endpoint={}", receiver.endpoint);
    let set = ["--set", &servers, "--set", &endpoint, "--set", "otlp.timeout_ms=1000"];
    let analyser = Agent::analyser(&room, &set);
    // What dead processes leave reaches its limit within the first third.
    let kept = [&set[..], &["--set", "segments.keep_mib=64"]].concat();
    let agent = Agent::start(&room, &kept);
    let mut peers = Peers {
        nats,
        nats_there: true,
        port: receiver.port,
        receiver: Some(receiver),
        prometheus: None,
        program,
        data: room.path("prometheus"),
    };
    let mut watched = [Watched::new("agent", &agent), Watched::new("analyser", &analyser)];
    let (mut started, mut issued) = (0, 0);
    let mut jobs: Vec<Job> = Vec::new();
    let began = Instant::now();
    for second in 0..seconds {
        peers.flap(second, &[&agent.address, &analyser.address]);
        jobs.retain_mut(|j| match j.over() {
            Some(n) => {
                issued += if j.killed_at.is_none() { n } else { 0 };
                false
            }
            None => true,
        });
        while jobs.len() < 2 {
            jobs.push(Job::start(&room, &plugin, &recorded, started));
            started += 1;
        }
        watched.iter_mut().for_each(Watched::look);
        until("it is alive", || (agent.get("/livez").0 == 200).then_some(()));
        std::thread::sleep(
            (began + Duration::from_secs(second + 1)).saturating_duration_since(Instant::now()),
        );
    }
    for mut job in jobs {
        let n = until("the last jobs are over", || job.over());
        issued += if job.killed_at.is_none() { n } else { 0 };
    }
    let steady = || -> f64 {
        let all = agent.series("ringwatch_operations_total");
        all.iter().filter(|(labels, _)| labels.contains("job_name=\"steady\"")).map(|(_, n)| n).sum()
    };
    let lost = || agent.sum("ringwatch_lost_records_total");
    until("the books balance", || (steady() + lost() >= issued as f64).then_some(()));
    println!(
        "{seconds} s, {started} jobs: {issued} collectives issued by the jobs that ended by themselves, {} counted, {} records lost",
        steady(),
        lost()
    );
    assert!(steady() <= issued as f64);
    watched.iter().for_each(Watched::assert_flat);
    until("no job is shown", || agent.series("ringwatch_operations_in_flight").is_empty().then_some(()));
    assert_eq!(agent.end().1, Some(0));
    assert_eq!(analyser.end().1, Some(0));
}
