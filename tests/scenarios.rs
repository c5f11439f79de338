//! The corpus: every case of tests/scenarios through a simulated job, and the verdict on each. All planted causes
//! have to be found with the right kind and ranks, and nothing else.

use crate::simulator::{AHEAD_NS, BEGIN, Case, Expected, Simulation};
use crate::support;
use crate::watch::{Watcher, Way};
use ringwatch::detect::{Detector, Settings};
use ringwatch::join::Join;
use ringwatch::model::{Change, CommId, Confidence, Finding, FindingEvent, Kind, Making, Rank, Update};
use ringwatch::recording::Limits;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError, RwLock};

const MS: u64 = 1_000_000;

/// Real processes that get no CPU at all for a while are late, and are correctly reported as late: they run beside each other, and
/// beside no simulation.
static PROCESSES: RwLock<()> = RwLock::new(());

/// A finding, when it was told, and when the facts that prove it were there.
struct Told {
    finding: Finding,
    at_ns: u64,
    facts_ns: u64,
}

struct Outcome {
    told: Vec<Told>,
    names: BTreeMap<CommId, String>,
    /// What became of the findings.
    last: BTreeMap<u64, Finding>,
    job_ranks: BTreeMap<(CommId, Rank), u32>,
    ranks_a_node: u32,
}

fn cases() -> Vec<(String, Case)> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scenarios");
    let mut cases: Vec<(String, Case)> = std::fs::read_dir(dir)
        .expect("the corpus")
        .map(|f| f.expect("a file").path())
        .filter(|p| p.extension().is_some_and(|e| e == "yaml"))
        .map(|p| {
            let text = std::fs::read_to_string(&p).expect("a case");
            let case = serde_yaml::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", p.display()));
            (p.file_stem().expect("a name").to_string_lossy().into_owned(), case)
        })
        .collect();
    cases.sort_by(|a, b| a.0.cmp(&b.0));
    cases
}

fn watch(name: &str, case: &Case, way: Way) -> Outcome {
    let mut watcher = Watcher::new(case, way);
    let room = tempfile::tempdir().expect("a folder");
    if way == Way::Recorded {
        let dir = room.path().join("recording");
        let mut recorder = Watcher::new(case, way);
        // Blocks are small, so that a recording has several.
        recorder.record(&dir, Limits { block_bytes: 256 << 10, ..Limits::default() });
        judged(name, case, &mut recorder);
        recorder.end();
        watcher.play(&dir);
    }
    judged(name, case, &mut watcher)
}

fn judged(name: &str, case: &Case, watcher: &mut Watcher) -> Outcome {
    let mut sims = vec![Simulation::new(case, name, 0, 0)];
    let mut told = Vec::new();
    let mut aborted_ns = None;
    let mut now = 0;
    while now <= case.until.0 {
        if sims.len() == 1
            && let Some(at) = case.restart.filter(|at| now >= at.0)
        {
            sims[0].kill_all(at.0);
            sims.push(Simulation::new(case, name, 1, at.0 + 3_000 * MS));
        }
        let mut updates = Vec::new();
        for sim in &mut sims {
            updates.extend(sim.look(now));
        }
        for update in &updates {
            if matches!(update, Update::Comm(c) if c.making == Some(Making::Aborted)) {
                aborted_ns.get_or_insert(BEGIN + now);
            }
        }
        let at_ns = BEGIN + now;
        for event in watcher.pass(&sims[0], updates, now, case.look.0) {
            let finding = event.finding;
            let known =
                told.iter().any(|t: &Told| (t.finding.id, t.finding.kind) == (finding.id, finding.kind));
            if known || event.change == Change::Closed {
                continue;
            }
            let facts_ns = facts(&watcher.join, &finding, aborted_ns);
            told.push(Told { finding, at_ns, facts_ns });
        }
        now += case.look.0;
    }
    assert_eq!(watcher.refused(), &BTreeMap::new(), "{name}");
    let mut names = BTreeMap::new();
    for (comm, members) in &case.comms {
        let groups = members.groups(case.ranks).len();
        for epoch in 0..2 {
            for group in 0..groups {
                let name = if groups == 1 { comm.clone() } else { format!("{comm}/{group}") };
                names.insert(Simulation::id(comm, group, epoch), name);
            }
        }
    }
    let last = watcher.detector.findings().into_iter().map(|f| (f.id.0, f)).collect();
    let job_ranks = watcher.job_ranks();
    Outcome { told, names, last, job_ranks, ranks_a_node: case.ranks.div_ceil(case.nodes) }
}

/// When the facts that a finding rests on were in the segments.
fn facts(join: &Join, f: &Finding, aborted_ns: Option<u64>) -> u64 {
    if f.kind.is_device() {
        return f.since_ns;
    }
    let comm = join.communicator(f.communicator).expect("it is known");
    match f.kind {
        Kind::Mismatch | Kind::ShiftedOrder => comm.mismatch_seen_ns().max(f.since_ns),
        Kind::AbortedRank => aborted_ns.unwrap_or(0).max(f.since_ns),
        Kind::InterleavedCommunicators => f
            .victims
            .iter()
            .filter_map(|v| {
                let i = join.communicator(v.communicator)?.instance(v.track, v.order)?;
                let started = i.parts.values().filter_map(|p| p.started_ns).min();
                started.or_else(|| i.parts.values().filter_map(|p| p.op.issued_ns).min())
            })
            .max()
            .unwrap_or(f.since_ns),
        Kind::StuckTransfer => {
            let i = comm.instance(f.operation.track, f.operation.order).expect("it is held");
            i.parts.values().filter_map(|p| p.started_ns).max().unwrap_or(f.since_ns)
        }
        _ if f.confidence == Confidence::Proven => {
            let gone = f.ranks.iter().filter_map(|r| {
                let segment = comm.members().get(r)?.record.segment;
                match join.process(segment)?.record.liveness {
                    // As a look found it, no later than so.
                    ringwatch::model::Liveness::Gone(at) => at.map(|t| t + 100 * MS),
                    ringwatch::model::Liveness::Alive | ringwatch::model::Liveness::Unknown => None,
                }
            });
            gone.max().unwrap_or(0).max(f.since_ns)
        }
        _ => f.since_ns,
    }
}

/// How long after the facts a finding may come.
fn allowed(f: &Finding, wanted: &Expected, look: u64) -> u64 {
    let own = match (f.kind, f.confidence) {
        (Kind::Straggler, _) => 3_000 * MS,
        // A few dozen operations, whose rhythm is the job's.
        (Kind::SlowTransfer | Kind::ChangePoint | Kind::SlowPair | Kind::SlowNode, _) => 10_000 * MS,
        (Kind::TinyCollectives | Kind::CommunicationShare | Kind::Imbalance, _) => 150_000 * MS,
        // A state of a device has to last before it is told.
        (Kind::PcieDowngrade | Kind::ThrottledGpu, _) => 8_000 * MS,
        (Kind::SlowGpu, _) => 25_000 * MS,
        (Kind::LinkErrors, _) => 15_000 * MS,
        (Kind::Xid | Kind::EccErrors | Kind::LinkDown, _) => 3_100 * MS,
        (Kind::ChoiceDiffers, Confidence::Likely) => 10_000 * MS,
        (_, Confidence::Proven) => 200 * MS,
        (_, Confidence::Likely) => 3_100 * MS,
    };
    wanted.within.map_or(own, |w| w.0) + look
}

fn line(o: &Outcome, f: &Finding) -> String {
    let name = o.names.get(&f.communicator).map_or("?", String::as_str);
    let cause = f.cause.as_ref().map_or("", |c| c.as_str());
    let ranks: Vec<u32> = f.ranks.iter().map(|r| r.0).collect();
    let short: Vec<u32> = ranks.iter().copied().take(12).collect();
    if let Some(place) = &f.place {
        return format!("{} of {place}, victims {:?}", f.kind.as_str(), f.victims);
    }
    format!(
        "{} {cause} in {name}, ranks {short:?} of {}, order {} {}, victims {}",
        f.kind.as_str(),
        ranks.len(),
        f.operation.order,
        f.operation.track,
        f.victims.iter().map(|v| v.ranks.len()).sum::<usize>()
    )
}

/// Whether a finding is the one that is wanted; what is wrong with it beyond that goes to `flaws`.
fn is_it(o: &Outcome, t: &Told, wanted: &Expected) -> bool {
    let f = &t.finding;
    // Who of several is wrong may be known better a moment later; the kind has to be right at once.
    let ranks: Vec<u32> = match wanted.as_job_ranks {
        true => {
            let mut all: Vec<u32> = o.last[&f.id.0]
                .ranks
                .iter()
                .filter_map(|r| o.job_ranks.get(&(f.communicator, *r)).copied())
                .collect();
            all.sort_unstable();
            all
        }
        false => f.ranks.iter().map(|r| r.0).collect(),
    };
    let on_host = |h: u32| {
        let hosts =
            f.ranks.iter().map(|r| o.job_ranks.get(&(f.communicator, *r)).map(|r| r / o.ranks_a_node));
        !f.ranks.is_empty() && hosts.into_iter().all(|n| n == Some(h))
    };
    let name = o.names.get(&f.communicator).map_or("?", String::as_str);
    wanted.kind.split('|').any(|k| k == f.kind.as_str())
        && wanted.device.as_ref() == f.place.as_ref().map(ToString::to_string).as_ref()
        && (f.place.is_some() || wanted.comm.iter().any(|c| c == name))
        && (ranks == wanted.ranks || wanted.on_host.is_some_and(on_host))
        && wanted.order.is_none_or(|n| n == f.operation.order)
        // That a device is the cause may show a moment later.
        && wanted.cause.as_deref().is_none_or(|c| {
            [&f.cause, &o.last[&f.id.0].cause].into_iter().flatten().any(|f| f.as_str() == c)
        })
}

fn flaws(o: &Outcome, t: &Told, wanted: &Expected, case: &Case, way: Way) -> Vec<String> {
    let f = &t.finding;
    let mut flaws = Vec::new();
    let delay = t.at_ns.saturating_sub(t.facts_ns);
    // Beats come once a second, and an operation stands for 0.1 s before it is told.
    let on_the_way = if way != Way::Records { 1_200 * MS } else { 0 };
    if delay > allowed(f, wanted, case.look.0) + on_the_way {
        flaws.push(format!("told {:.3} s after the facts", delay as f64 / 1e9));
    }
    if let Some(text) = &wanted.says
        && !o.last[&f.id.0].evidence.iter().any(|e| e.text.contains(text))
    {
        flaws.push(format!(
            "does not say {text:?}: {:?}",
            f.evidence.iter().map(|e| &e.text).collect::<Vec<_>>()
        ));
    }
    if let Some(since) = wanted.since
        // Devices are looked at once a second.
        && f.since_ns.abs_diff(BEGIN + since.0) > if f.place.is_some() { 1_100 * MS } else { 500 * MS }
    {
        flaws.push(format!("since {:.2} s", (f.since_ns as f64 - BEGIN as f64) / 1e9));
    }
    let victims: usize = f.victims.iter().map(|v| v.ranks.len()).sum();
    if wanted.victims.is_some_and(|n| victims < n) {
        flaws.push(format!("{victims} victims"));
    }
    if f.kind.is_hang() && o.last[&f.id.0].open == wanted.passes {
        flaws.push("whether it is over at the end is told wrongly".to_owned());
    }
    flaws
}

#[test]
fn every_planted_cause_is_found_and_nothing_else() {
    corpus(Way::Records, |_| true);
}

/// Agents tell little of what they know, once a second most of it; that has to be enough.
#[test]
fn every_planted_cause_is_found_over_the_bus_and_nothing_else() {
    corpus(Way::Bus, |_| true);
}

/// A recording is judged as the job was.
#[test]
fn every_planted_cause_is_found_in_recordings_and_nothing_else() {
    corpus(Way::Recorded, |case| case.ranks <= 8);
}

/// A busy job's agents tell one operation of 64 whole. What rests on all of them is found by their sketches, and healthy
/// jobs stay silent.
#[test]
fn what_rests_on_every_operation_is_found_where_few_are_told_and_nothing_else() {
    let usage = [Kind::TinyCollectives, Kind::CommunicationShare, Kind::Imbalance].map(|k| k.as_str());
    corpus(Way::Sampled, |case| case.expect.iter().all(|e| usage.contains(&e.kind.as_str())));
}

/// The outcome of a corpus: how many cases, what was planted, found and right.
#[derive(Default)]
struct Score {
    cases: usize,
    healthy: usize,
    planted: usize,
    found: usize,
    right: usize,
    /// What is wrong, by case.
    wrong: BTreeMap<String, Vec<String>>,
}

impl Score {
    fn add(&mut self, name: &str, case: &Case, o: &Outcome, way: Way) {
        self.cases += 1;
        self.healthy += usize::from(case.expect.is_empty());
        self.planted += case.expect.len();
        self.found += o.told.len();
        let mut left: Vec<&Told> = o.told.iter().collect();
        let mut wrong = Vec::new();
        for wanted in &case.expect {
            match left.iter().position(|t| is_it(o, t, wanted)) {
                Some(at) => {
                    self.right += 1;
                    let t = left.remove(at);
                    let flaws = flaws(o, t, wanted, case, way);
                    wrong.extend(flaws.into_iter().map(|w| format!("{}: {w}", wanted.kind)));
                }
                None => wrong.push(format!("not found: {wanted:?}")),
            }
        }
        for t in left {
            let at = (t.at_ns - BEGIN) as f64 / 1e9;
            wrong.push(format!("found instead, at {at:.2} s: {}", line(o, &t.finding)));
            wrong.extend(t.finding.evidence.iter().map(|e| format!("      {}", e.text)));
        }
        if !wrong.is_empty() {
            self.wrong.insert(name.to_owned(), wrong);
        }
    }

    fn report(&self) -> String {
        let of = |(name, wrong): (&String, &Vec<String>)| format!("{name}:\n    {}\n", wrong.join("\n    "));
        self.wrong.iter().map(of).collect()
    }
}

fn corpus(way: Way, takes: impl Fn(&Case) -> bool) {
    let _alone = PROCESSES.write().unwrap_or_else(PoisonError::into_inner);
    let only = std::env::var("SCENARIO").ok();
    // Other noise, to see whether a verdict hangs on it.
    let seed = std::env::var("SCENARIO_SEED").unwrap_or_default();
    let named = |n: &str| only.as_ref().is_none_or(|o| n.contains(o.as_str()));
    let cases: Vec<(String, Case)> =
        cases().into_iter().filter(|(name, case)| named(name) && takes(case)).collect();
    let (next, score) = (AtomicUsize::new(0), Mutex::new(Score::default()));
    let work = || {
        while let Some((name, case)) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
            let began = std::time::Instant::now();
            let o = watch(&format!("{name}{seed}"), case, way);
            score.lock().unwrap_or_else(PoisonError::into_inner).add(name, case, &o, way);
            if only.is_some() || began.elapsed().as_secs() >= 3 {
                println!("{name}: {:.1} s", began.elapsed().as_secs_f64());
                o.told.iter().for_each(|t| println!("    {}", line(&o, &t.finding)));
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work))));
    let s = score.into_inner().unwrap_or_else(PoisonError::into_inner);
    let share = |right: usize, of: usize| if of == 0 { 1.0 } else { right as f64 / of as f64 };
    let (precision, recall) = (share(s.right, s.found), share(s.right, s.planted));
    println!(
        "{} cases, {} of them healthy, {} causes planted: precision {precision:.4}, recall {recall:.4}",
        s.cases, s.healthy, s.planted
    );
    let sick = if way == Way::Sampled { 6 } else { 60 };
    assert!(only.is_some() || (s.healthy >= 20 && s.cases - s.healthy >= sick), "the corpus has shrunk");
    assert!(s.wrong.is_empty() && precision >= 1.0 && recall >= 1.0, "\n{}", s.report());
}

/// Plays a case's callbacks on the real plugin, a process a rank, and watches the segments. Hosts run ahead of their GPUs,
/// so that what delays the players makes no rank late; the case's own lateness is the GPUs'. The replayer's mask is not
/// NCCL's static one, so that the plugin calls every operation untimed: cases that rest on what did not start are left
/// to real GPUs.
fn faithfully(name: &str) {
    let _beside = PROCESSES.read().unwrap_or_else(PoisonError::into_inner);
    use ringwatch::ingest::{Place, Segments, now_ns};
    let (_, case) = cases().into_iter().find(|(n, _)| n == name).expect("a case");
    let mut sim = Simulation::new(&case, name, 0, 0);
    let until = case.until.0;
    sim.look(until);
    let room = support::Room::new();
    let trace = room.path("case.rwt");
    std::fs::write(&trace, sim.trace(until).encode()).expect("written");
    let plugin = room.plugin();
    // On a busy machine a process takes its time to start.
    let start_at = ringwatch::replay::monotonic_ns() + 2_000 * MS;
    let mut players = support::Players { children: Vec::new() };
    for rank in 0..case.ranks {
        let mut command = room.ringwatch(["replay", "--scenario", "mixed", "--hold", "60", "--trace"]);
        command.arg(&trace).args(["--rank", &rank.to_string(), "--start-at", &start_at.to_string()]);
        command.args(["--hosts-ahead-ms", &(AHEAD_NS / MS).to_string()]);
        command
            .arg("--plugin")
            .arg(&plugin)
            .env("RANK", rank.to_string())
            .stdout(std::process::Stdio::null());
        players.children.push(command.spawn().expect("a player starts"));
    }
    let mut source = Segments::new(vec![Place::Dir(room.segments())]);
    let (mut join, mut detector) = (Join::new(), Detector::new(Settings::default()));
    let mut told: Vec<Finding> = Vec::new();
    // The job's own time, and a little for processes that start slowly; no verdict depends on it.
    let end = start_at + until + AHEAD_NS + 3_000 * MS;
    while now_ns() < end {
        for update in ringwatch::model::Source::poll(&mut source, now_ns()) {
            join.feed(update);
        }
        join.tick(now_ns());
        let events = detector.check(&join, now_ns());
        told.extend(FindingEvent::opened(&events).cloned());
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    drop(players);
    let found: Vec<(&str, Vec<u32>, u64)> = told
        .iter()
        .map(|f| (f.kind.as_str(), f.ranks.iter().map(|r| r.0).collect(), f.operation.order))
        .collect();
    let wanted: Vec<(&str, Vec<u32>, u64)> = case
        .expect
        .iter()
        .map(|e| (e.kind.as_str(), e.ranks.clone(), e.order.expect("such a case names its order")))
        .collect();
    assert_eq!(found, wanted, "{name}: {told:#?}");
}

macro_rules! through_the_plugin {
    ($($test:ident = $case:literal),+ $(,)?) => {
        $(#[test] fn $test() { faithfully($case); })+
    };
}

through_the_plugin! {
    a_missing_rank_through_the_plugin = "missing-rank-2",
    a_mismatch_through_the_plugin = "mismatch-count",
    a_shifted_order_through_the_plugin = "shifted-2",
    another_root_through_the_plugin = "mismatch-root",
    a_send_without_receive_through_the_plugin = "send-without-receive",
    a_receive_without_send_through_the_plugin = "receive-without-send",
    a_straggler_through_the_plugin = "straggler-once",
    a_healthy_exchange_through_the_plugin = "healthy-exchange",
}
