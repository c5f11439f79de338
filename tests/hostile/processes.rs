//! Whether a writer lives: not what a child inherits, and not what a segment says of others' processes.

use super::forged::{ALL_GATHER, ALL_REDUCE, Forged, Writer};
use super::ground::{ATTACKER, Ground, USER, alone, program_for_all};
use super::unread::followed;
use crate::support::agent::{Agent, diagnosed, socket};
use crate::support::{Json, Players, as_user, findings, machine, run, until};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{ChildStdin, Command, Stdio};
use std::time::Duration;

/// The delay that `src/detect/README.md` gives for a rank whose process is gone.
const SOON: Duration = Duration::from_millis(200);

/// Tries until one is not delayed by whatever else the machine does.
const TRIES: usize = 5;

/// A shell that is process 1 of its namespace: it starts the player, has it fork, and kills it, a line each.
const CONTAINER: &str = "library=$1; shift; LD_PRELOAD=$library \"$@\" & player=$!; read line; kill -USR1 $player; \
                         read line; kill -KILL $player; wait $player; echo killed; exec sleep 600";

/// A rank of the recorded job that misses one, of the attacker.
fn player(ground: &Ground, rank: usize, directory: &Path, start_at: u64) -> Vec<String> {
    let (rank, start_at, plugin) = (rank.to_string(), start_at.to_string(), ground.room.plugin());
    let job =
        ["replay", "--scenario", "missing-rank", "--hold", "120", "--rank", &rank, "--start-at", &start_at];
    let all = [program_for_all()].into_iter().chain(job.map(str::to_owned));
    let set =
        [format!("RINGWATCH_DIR={}", directory.display()), format!("RANK={rank}"), "WORLD_SIZE=4".to_owned()];
    let plugin = ["--plugin".to_owned(), plugin.display().to_string()];
    std::iter::once("env".to_owned()).chain(set).chain(all).chain(plugin).collect()
}

fn spawn(command: &mut Command) -> std::process::Child {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts")
}

#[test]
fn a_child_does_not_keep_a_killed_process_of_a_container_alive() {
    let mut delays = Vec::new();
    while delays.len() < TRIES && delays.last().is_none_or(|delay| *delay >= SOON) {
        let Some(delay) = time_to_find_a_killed_process_of_a_container() else { return };
        assert!(delay < Duration::from_secs(60), "the finding is older than the end: {delay:?} modulo a day");
        delays.push(delay);
    }
    let is_soon = delays.last().is_some_and(|delay| *delay < SOON);
    assert!(is_soon, "a process of a container that was killed was found only after {delays:?}");
}

/// The time from the kill to the finding; absent where the machine lacks something.
fn time_to_find_a_killed_process_of_a_container() -> Option<Duration> {
    let test = "a_child_does_not_keep_a_killed_process_of_a_container_alive";
    let ground = Ground::with_namespaces(test)?;
    let library = machine::library(&ground.room, test, "fork_on_signal.c", "fork_on_signal.so")?;
    let directory = ground.directory("of-attacker", ATTACKER);
    let agent = ground.agent(&[&directory], "");
    let start_at = ringwatch::replay::monotonic_ns() + 1_500_000_000;
    let mut players = Players { children: Vec::new() };
    for rank in 0..3 {
        let words = player(&ground, rank, &directory, start_at);
        players.children.push(spawn(ground.as_user(ATTACKER, &words[0]).args(&words[1..])));
    }
    let words = player(&ground, 3, &directory, start_at);
    let arguments: Vec<&str> =
        ["sh", library.to_str().expect("text")].into_iter().chain(words.iter().map(String::as_str)).collect();
    let mut container = spawn(&mut ground.contained("-Urpf", CONTAINER, &arguments));
    let (mut orders, out) =
        (container.stdin.take().expect("a pipe"), container.stdout.take().expect("a pipe"));
    players.children.push(container);
    let mut said = BufReader::new(out).lines().map(|l| l.expect("text"));
    // The report of the player comes when it has made its last call.
    assert!(said.next().expect("a report").starts_with('{'));
    order(&mut orders);
    assert_eq!(said.next().as_deref(), Some("forked"));
    let killed_ns = ringwatch::ingest::unix_ns();
    order(&mut orders);
    assert_eq!(said.next().as_deref(), Some("killed"));
    let found = findings(&diagnosed(&ground.room));
    assert_eq!(found.len(), 1, "{found:#?}");
    let cause = found[0].get("cause");
    assert_eq!(
        (found[0].get("kind").text(), cause.get("kind").text()),
        ("missing-rank", "process-gone"),
        "{found:#?}"
    );
    let delay = seen(&found[0], killed_ns);
    assert_eq!(agent.end().1, Some(0));
    Some(delay)
}

fn order(orders: &mut ChildStdin) {
    orders.write_all(b"\n").expect("the shell reads");
}

/// How long after a moment a finding was seen first; a day may end in between.
fn seen(finding: &Json, moment_ns: u64) -> Duration {
    let text = finding.get("first_seen").text();
    let time = text.split_once('T').expect("a time").1.trim_end_matches('Z');
    let seconds = time.split(':').fold(0.0, |all, part| all * 60.0 + part.parse::<f64>().expect("a number"));
    let since = Duration::from_nanos(moment_ns).as_secs_f64();
    let late = (seconds - since).rem_euclid(86_400.0);
    // What was seen before the moment is almost a day late.
    Duration::from_secs_f64(late)
}

/// Findings about the attacker's communicators that are open.
fn open_of_attacker(ground: &Ground) -> Vec<u64> {
    let said = run(ground.room.ringwatch(["diagnose", "--json", "--agent"]).arg(socket(&ground.room)));
    let open =
        |f: &Json| *f.get("open") == Json::Bool(true) && *f.get("owner") == Json::Number(f64::from(ATTACKER));
    let id = |f: &Json| u64::from_str_radix(f.get("communicator").text(), 16).expect("a number");
    findings(&said.out).iter().filter(|f| open(f)).map(id).collect()
}

/// Two ranks of a communicator that contradict each other.
fn contradiction(directory: &Path, id: u64, writer: Writer) {
    for (rank, func) in [(0, ALL_REDUCE), (1, ALL_GATHER)] {
        let forged = Forged::small(writer);
        let slot = forged.communicator(id, rank, 2);
        (0..6).for_each(|order| forged.collective(slot, order, func));
        forged.put(directory);
    }
}

#[test]
fn a_segment_does_not_live_by_anothers_process() {
    let Some(ground) = Ground::of("a_segment_does_not_live_by_anothers_process") else { return };
    let directory = ground.directory("of-attacker", ATTACKER);
    let agent: Agent = ground.agent(&[&directory], "");
    let idle = ground.idle(ATTACKER);
    let (own, roots) = (Writer::running(idle.0.id()), Writer::running(std::process::id()));
    const OWN: u64 = 0xc0de_0001;
    const ROOTS: u64 = 0xc0de_0002;
    as_user(ATTACKER, || {
        contradiction(&directory, ROOTS, roots);
        contradiction(&directory, OWN, own);
    });
    until("all are read", || (followed(&agent) == 4.0).then_some(()));
    // Both lie, and only the one whose own process runs is believed, for as long as it runs.
    until("a finding about its own", || open_of_attacker(&ground).contains(&OWN).then_some(()));
    assert_eq!(open_of_attacker(&ground), [OWN]);
    drop(idle);
    until("it ends with the process", || open_of_attacker(&ground).is_empty().then_some(()));
    assert_eq!(agent.end().1, Some(0));
}

#[test]
fn a_job_of_a_container_that_lost_its_lock_lives_and_keeps_its_segment() {
    let test = "a_job_of_a_container_that_lost_its_lock_lives_and_keeps_its_segment";
    let Some(ground) = Ground::with_namespaces(test) else { return };
    let _alone = alone();
    let shm = ground.directory("shm", 0);
    ground.open_to_all(&shm);
    let own = shm.join(format!("ringwatch-{USER}"));
    std::fs::create_dir(&own).expect("made");
    std::os::unix::fs::chown(&own, Some(USER), Some(USER)).expect("root may");
    let container = ground.occupied_as(USER, "-Urpf", "true", &[]);
    let unshare = container.0.id();
    let children = std::fs::read_to_string(format!("/proc/{unshare}/task/{unshare}/children"));
    let outside = children.expect("it runs").trim().parse().expect("one child");
    // Nobody holds a lock on this file, and its pid is that of another process here.
    let writer = Writer { pid: 1, ..Writer::running(outside) };
    let (kept, removed) =
        as_user(USER, || (Forged::small(writer).put(&own), Forged::small(Writer::dead()).put(&own)));
    let agent = ground.agent_of_host(&shm);
    until("what is dead is removed", || (!removed.exists()).then_some(()));
    assert!(kept.exists());
    until("it is followed", || (followed(&agent) >= 1.0).then_some(()));
    drop(container);
    until("it is removed once its process is gone", || (!kept.exists()).then_some(()));
}
