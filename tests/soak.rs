//! A soak: two jobs of four players come and go without a pause, and what the daemons talk to comes and goes as well.
//! Memory and descriptors of agent and analyser stay flat, and what the players issued is what the agent counted.
//!
//! `RINGWATCH_SOAK_SECONDS=1800 cargo test --release --test serial soak:: -- --nocapture` is the long form.

use crate::receiver::{Receiver, Wants};
use crate::support::agent::Agent;
use crate::support::nats::{self, Nats};
use crate::support::prometheus::{Prometheus, program};
use crate::support::{Room, until};
use ringwatch::export::otlp::Protocol;
use ringwatch::model::hides_operations;
use ringwatch::replay::{Call, Descriptor, Event, PlayReport, RankTrace, Trace, monotonic_ns};
use ringwatch_wire::layout::head;
use std::fs;
use std::io::{BufRead, BufReader};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// How long it takes, in seconds, where `RINGWATCH_SOAK_SECONDS` says nothing else.
const USUAL_SECONDS: u64 = 60;
/// Operations a second of each player, where `RINGWATCH_SOAK_RATE` says nothing else.
const USUAL_RATE: u64 = 5_000;
/// A machine on which the agent loses records gets jobs that are slower by this factor, so often at most.
const SLOWER: u64 = 2;
const SLOWER_TIMES: usize = 3;
const RANKS: usize = 4;
/// Operations that a host issues in a row, as in a training step.
const BURST: u64 = 10;
/// The recording's length, in ns. A player plays it several times, with a new communicator each time.
const LENGTH_NS: u64 = 2_000_000_000;
/// What a daemon may have at all, in KiB: the unit's limit is above it.
const MEMORY_KIB: u64 = 96 << 10;
/// What operations may take of the agent's memory, in MiB: so little that it is full before the second third begins.
const HISTORY: &str = "limits.memory_mib=8";
/// What memory may grow by, in KiB, from one third of the time to the next, beside a twentieth. In the short form some 30,000
/// records of ranks come a second, and between the middles of the two thirds lie 20 s: to keep 8 bytes of each is too much.
/// In the long form, between whose middles lie 600 s, a byte of every third one is too much.
const ROOM_KIB: u64 = 4 << 10;
/// What a job did is counted so long after its end, though the machine is busy.
const COUNTED_AFTER: Duration = Duration::from_secs(30);
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
    name: String,
    players: Vec<Child>,
    killed_at: Option<Instant>,
}

impl Job {
    /// The n-th job. Every third is killed in the middle.
    fn start(room: &Room, plugin: &Path, recordings: &[PathBuf], n: u64) -> Self {
        let is_killed = n % 3 == 2;
        let name = format!("{}-{n}", if is_killed { "killed" } else { "steady" });
        let loops = 2 + n % 4;
        let start_at = monotonic_ns() + 700_000_000;
        let player = |rank: usize| {
            let mut command = room.ringwatch(["replay", "--scenario", "mixed", "--honour-mask", "--trace"]);
            command.arg(&recordings[rank]).args(["--rank", "0", "--loops", &loops.to_string()]);
            command.args(["--start-at", &start_at.to_string(), "--plugin"]).arg(plugin);
            command.env("RANK", rank.to_string()).env("WORLD_SIZE", RANKS.to_string());
            command.env("RINGWATCH_JOB", &name);
            command.stdout(Stdio::piped()).spawn().unwrap()
        };
        let killed_at = is_killed.then(|| Instant::now() + Duration::from_millis(2_500 + 137 * n % 1_000));
        let players = (0..RANKS).map(player).collect();
        Job { name, players, killed_at }
    }

    /// Its accounting, once it is over. `None` while it runs.
    fn over(&mut self, room: &Room) -> Option<Account> {
        let issued = if self.killed_at.is_some_and(|at| at <= Instant::now()) {
            self.kill(room)
        } else if self.players.iter_mut().all(|p| p.try_wait().unwrap().is_some()) {
            self.ended()
        } else {
            return None;
        };
        Some(Account { name: std::mem::take(&mut self.name), issued, over_at: Instant::now() })
    }

    /// The collectives of a job that ended by itself: each rank reports the same.
    fn ended(&mut self) -> RangeInclusive<u64> {
        let starts = |p: &mut Child| -> u64 {
            let mut line = String::new();
            BufReader::new(p.stdout.take().unwrap()).read_line(&mut line).unwrap();
            let report: PlayReport = serde_json::from_str(&line).unwrap();
            report.starts["Coll"]
        };
        let issued: Vec<u64> = self.players.iter_mut().map(starts).collect();
        assert!(issued.iter().all(|n| *n > 0 && *n == issued[0]), "{issued:?}");
        issued[0]..=issued[0]
    }

    /// Kills it. What it had issued until then is read from the segments that it leaves.
    fn kill(&mut self, room: &Room) -> RangeInclusive<u64> {
        for p in &mut self.players {
            p.kill().unwrap();
            p.wait().unwrap();
        }
        let files = room.segment_files();
        let issued = |p: &Child| -> u64 {
            let begin = format!("{}-", p.id());
            let is_its_own = |f: &&PathBuf| f.file_name().unwrap().to_string_lossy().starts_with(&begin);
            // Who is killed before the first callback has none.
            let Some(file) = files.iter().find(is_its_own) else { return 0 };
            let bytes = fs::read(file).unwrap();
            let at = 8 * head::NEXT_OP;
            u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
        };
        let issued: Vec<u64> = self.players.iter().map(issued).collect();
        let (least, most) = (*issued.iter().min().unwrap(), *issued.iter().max().unwrap());
        // The end of a burst comes before the next one, so all but the last burst were over on every rank.
        least.saturating_sub(1) / BURST * BURST..=most
    }
}

/// What a job issued, and what the agent has to say of it.
struct Account {
    name: String,
    /// Collectives that were over; of a job that was killed it is not known exactly.
    issued: RangeInclusive<u64>,
    over_at: Instant,
}

/// What the agent counted of a job.
struct Counted {
    /// Collectives that are over.
    over: f64,
    /// Records of operations that were lost, each of one rank.
    lost: f64,
}

impl Account {
    fn counted(&self, agent: &Agent) -> Counted {
        let job = format!("job_name=\"{}\"", self.name);
        let sum = |metric: &str, of: &dyn Fn(&str) -> bool| -> f64 {
            let all = agent.series(metric).into_iter().filter(|(labels, _)| labels.contains(&job));
            all.filter(|(labels, _)| of(labels)).fold(0.0, |sum, (_, n)| sum + n)
        };
        let hides = |labels: &str| {
            let reason = labels.split("reason=\"").nth(1).and_then(|rest| rest.split('"').next());
            hides_operations(reason.unwrap())
        };
        Counted {
            over: sum("ringwatch_operations_total", &|_| true),
            lost: sum("ringwatch_lost_records_total", &hides),
        }
    }

    /// True where each collective was counted or a record of it was lost. Four ranks have a record of each, so a lost one
    /// need not cost its collective: where records were lost there are bounds, and where none was the two are equal.
    fn is_settled(&self, c: &Counted) -> bool {
        c.over + c.lost >= *self.issued.start() as f64
    }

    fn assert_balanced(&self, c: &Counted) {
        let Account { name, issued, .. } = self;
        assert!(
            self.is_settled(c) && c.over <= *issued.end() as f64,
            "{name}: {issued:?} issued, {} counted, {} records lost",
            c.over,
            c.lost
        );
    }
}

/// The accounting of all jobs: what is over is checked while its series are there.
#[derive(Default)]
struct Accounts {
    open: Vec<Account>,
    /// Jobs that ended by themselves, collectives that these issued, and how many of these jobs lost no record.
    ended: u64,
    issued: u64,
    exact: u64,
    /// Jobs that were killed, and collectives of them that were counted.
    killed: u64,
    counted_of_killed: f64,
    lost: f64,
}

impl Accounts {
    /// Checks the jobs that were over so long ago that the agent has counted all of them.
    fn check(&mut self, agent: &Agent) {
        let (due, open) =
            std::mem::take(&mut self.open).into_iter().partition(|a| a.over_at.elapsed() >= COUNTED_AFTER);
        self.open = open;
        for account in due {
            self.close(&account, agent);
        }
    }

    /// Waits until the rest is counted.
    fn check_all(&mut self, agent: &Agent) {
        for account in std::mem::take(&mut self.open) {
            until("all is counted", || account.is_settled(&account.counted(agent)).then_some(()));
            self.close(&account, agent);
        }
    }

    fn close(&mut self, account: &Account, agent: &Agent) {
        let counted = account.counted(agent);
        account.assert_balanced(&counted);
        self.lost += counted.lost;
        if account.name.starts_with("killed") {
            self.killed += 1;
            self.counted_of_killed += counted.over;
        } else {
            self.ended += 1;
            self.issued += account.issued.end();
            self.exact += u64::from(counted.lost == 0.0);
        }
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
        assert!(memory[2] <= memory[1] + memory[1] / 20 + ROOM_KIB, "{} grows: {:?}", self.name, self.memory);
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
    let _alone = crate::alone();
    let test = "memory_and_descriptors_stay_flat_while_everything_comes_and_goes";
    let Some(program) = program("prometheus", test).filter(|_| nats::there(test)) else { return };
    let seconds = setting("RINGWATCH_SOAK_SECONDS", USUAL_SECONDS);
    let rate = setting("RINGWATCH_SOAK_RATE", USUAL_RATE);
    let room = Room::new();
    let plugin = room.plugin();
    let rates = std::iter::successors(Some(rate), |r| Some(r / SLOWER)).take(1 + SLOWER_TIMES);
    let mut recorded = rates.map(|rate| {
        let record = |rank: usize| {
            let path = room.path(&format!("{rank}-{rate}.trace"));
            fs::write(&path, Trace { ranks: vec![recording(rank as i32, rate)] }.encode()).unwrap();
            path
        };
        (rate, (0..RANKS).map(record).collect::<Vec<_>>())
    });
    let (mut rate, mut recordings) = recorded.next().unwrap();
    let (mut lost, mut settled_at) = (0.0, 0);
    let nats = Nats::start(&room);
    let receiver = Receiver::start(Protocol::Grpc, Wants::default(), None);
    let servers = nats.servers();
    let endpoint = format!("otlp.endpoint={}", receiver.endpoint);
    let set = ["--set", &servers, "--set", &endpoint, "--set", "otlp.timeout_ms=1000"];
    let analyser = Agent::analyser(&room, &set);
    // What is kept of jobs that ended reaches its limits within the first third.
    let kept = [
        &set[..],
        &["--set", HISTORY, "--set", "segments.keep_mib=64", "--set", "prometheus.idle_seconds=120"],
    ]
    .concat();
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
    let (mut started, mut accounts) = (0, Accounts::default());
    let mut jobs: Vec<Job> = Vec::new();
    let began = Instant::now();
    for second in 0..seconds {
        peers.flap(second, &[&agent.address, &analyser.address]);
        jobs.retain_mut(|j| {
            let over = j.over(&room);
            let runs = over.is_none();
            accounts.open.extend(over);
            runs
        });
        accounts.check(&agent);
        // The jobs that run when the rate falls lose records for a while.
        let lost_now = agent.series("ringwatch_lost_records_total").iter().fold(0.0, |sum, (_, n)| sum + n);
        if lost_now > lost && second >= settled_at {
            (rate, recordings) = recorded.next().unwrap_or((rate, recordings));
            settled_at = second + 10;
        }
        lost = lost_now;
        while jobs.len() < 2 {
            jobs.push(Job::start(&room, &plugin, &recordings, started));
            started += 1;
        }
        watched.iter_mut().for_each(Watched::look);
        until("it is alive", || (agent.get("/livez").0 == 200).then_some(()));
        std::thread::sleep(
            (began + Duration::from_secs(second + 1)).saturating_duration_since(Instant::now()),
        );
    }
    for mut job in jobs {
        accounts.open.push(until("the last jobs are over", || job.over(&room)));
    }
    accounts.check_all(&agent);
    println!(
        "{seconds} s, {started} jobs, at last with {rate} operations a second: {} ended by themselves and issued {} collectives, all counted in {} of them; {} were killed, \
         {} collectives of them counted; {} records lost",
        accounts.ended,
        accounts.issued,
        accounts.exact,
        accounts.killed,
        accounts.counted_of_killed,
        accounts.lost
    );
    assert!(4 * accounts.exact >= accounts.ended, "where records are lost the accounting proves little");
    watched.iter().for_each(Watched::assert_flat);
    until("no job is shown", || agent.series("ringwatch_operations_in_flight").is_empty().then_some(()));
    assert_eq!(agent.end().1, Some(0));
    assert_eq!(analyser.end().1, Some(0));
}
