//! What a machine does to an agent: clocks that step, kills and stops in mid-run, a thousand segments, full disks. What
//! was seen and what was lost add up to what the jobs did.

use crate::support;
use crate::support::agent::{Agent, diagnosed};
use crate::support::{
    ENDED_IN_MIXED, Json, Play, Players, Room, assert_missing_rank, files, findings, opened, run, skipped,
    until,
};
use ringwatch::ingest::now_ns;
use ringwatch_wire::layout::head;
use rustix::process::Signal;
use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

fn counted(agent: &Agent) -> f64 {
    agent.sum("ringwatch_operations_total")
}

fn lost(agent: &Agent) -> f64 {
    agent.sum("ringwatch_lost_records_total")
}

/// Waits until all that the players did was counted, and nothing was lost.
fn assert_all_counted(agent: &Agent, loops: u32) {
    let all = ENDED_IN_MIXED * f64::from(loops);
    until("all operations", || (counted(agent) >= all).then_some(()));
    assert_eq!((counted(agent), lost(agent)), (all, 0.0));
}

#[test]
fn an_agent_that_is_killed_again_and_again_counts_everything() {
    let room = Room::new();
    let mut players = Players::start(&room, Play::of("mixed").two_node().loops(3).hold(60));
    let mut kills = 0;
    while players.children.iter_mut().all(|c| c.try_wait().unwrap().is_none()) && kills < 8 {
        let agent = Agent::start(&room, &[]);
        std::thread::sleep(Duration::from_millis(150 + 70 * kills));
        agent.kill();
        kills += 1;
    }
    let agent = Agent::start(&room, &[]);
    players.played();
    assert_all_counted(&agent, 3);
    assert_eq!(agent.end().1, Some(0));
}

#[test]
fn an_agent_that_was_stopped_counts_what_happened_meanwhile() {
    let room = Room::new();
    let agent = Agent::start(&room, &[]);
    let mut players = Players::start(&room, Play::of("mixed").two_node().loops(2).hold(60));
    until("operations", || (counted(&agent) > 0.0).then_some(()));
    agent.signal(Signal::STOP);
    std::thread::sleep(Duration::from_secs(3));
    agent.signal(Signal::CONT);
    players.played();
    assert_all_counted(&agent, 2);
    let (told, code) = agent.end();
    assert_eq!(code, Some(0));
    assert!(
        opened(&told).iter().all(|f| f.get("kind").text() == "straggler"),
        "its own absence is no hang: {told}"
    );
}

/// The library that fakes clocks; without it the test counts as skipped.
fn libfaketime(test: &str) -> Option<PathBuf> {
    let places =
        ["x86_64-linux-gnu", "aarch64-linux-gnu"].map(|a| format!("/usr/lib/{a}/faketime/libfaketime.so.1"));
    let found = places.iter().map(PathBuf::from).find(|p| p.is_file());
    if found.is_none() {
        skipped(test, "libfaketime (apt install faketime)");
    }
    found
}

#[test]
fn a_wall_clock_that_steps_changes_no_verdict_and_no_count() {
    let Some(library) = libfaketime("a_wall_clock_that_steps_changes_no_verdict_and_no_count") else {
        return;
    };
    let room = Room::new();
    let clock = room.path("clock");
    let set = |offset: &str| fs::write(&clock, offset).unwrap();
    set("+0");
    let variables = [
        ("LD_PRELOAD", library),
        ("FAKETIME_TIMESTAMP_FILE", clock.clone()),
        ("FAKETIME_NO_CACHE", PathBuf::from("1")),
        ("DONT_FAKE_MONOTONIC", PathBuf::from("1")),
    ];
    let agent = Agent::with(&room, &[], &variables);
    let mut players = Players::start(&room, Play::of("missing-rank").hold(60));
    // The same beside a clock that nobody sets.
    let calm = Room::new();
    let calm_agent = Agent::start(&calm, &[]);
    let calm_players = Players::start(&calm, Play::of("missing-rank").hold(60));
    for offset in ["-3600s", "+86400s", "-60s"] {
        std::thread::sleep(Duration::from_millis(1_200));
        set(offset);
    }
    let found = findings(&diagnosed(&room));
    assert_missing_rank(&found);
    assert_missing_rank(&findings(&diagnosed(&calm)));
    assert!(counted(&calm_agent) > 0.0);
    let counts = |agent: &Agent| {
        let all =
            ["ringwatch_operations_total", "ringwatch_operation_bytes_total", "ringwatch_lost_records_total"];
        all.map(|metric| agent.sum(metric))
    };
    assert_eq!(counts(&agent), counts(&calm_agent));
    drop((calm_agent, calm_players));
    let before = counts(&agent);
    set("+7200s");
    players.kill();
    let socket = support::agent::socket(&room);
    let over = || {
        let all = findings(&run(room.ringwatch(["diagnose", "--json", "--agent"]).arg(&socket)).out);
        all.iter().all(|f| *f.get("open") == Json::Bool(false))
    };
    until("it is over with its job", || over().then_some(()));
    assert_eq!(counts(&agent), before);
    let (told, code) = agent.end();
    assert_eq!(code, Some(0));
    assert_missing_rank(&opened(&told));
}

/// Puts segments of processes that never were beside one that was: the same bytes, with a process of their own.
fn others(of: &Path, dir: &Path, n: u64) {
    let mut bytes = fs::read(of).unwrap();
    for i in 1..=n {
        for (word, value) in [(head::PID, 4_000_000 + i), (head::START_TICKS, i), (head::NONCE, i)] {
            bytes[8 * word..8 * word + 8].copy_from_slice(&value.to_le_bytes());
        }
        fs::write(dir.join(format!("{}-{i}-{i:x}.seg", 4_000_000 + i)), &bytes).unwrap();
    }
}

#[test]
fn of_a_thousand_files_each_is_read_or_counted() {
    let room = Room::new();
    let small = [("RINGWATCH_SEGMENT_BYTES", std::ffi::OsStr::new("65536"))];
    let mut players = Players::start_with(&room, Play::of("mixed").unpaced().ranks(&[0]), &small);
    players.played();
    drop(players);
    let black_box = room.segment_files().remove(0);
    others(&black_box, &room.segments(), 899);
    for i in 1..=100 {
        fs::copy(&black_box, room.segments().join(format!("1-{i}-{i:x}.seg"))).unwrap();
    }
    let began = now_ns();
    let agent = Agent::start(&room, &[]);
    let read = || agent.sum("ringwatch_agent_segments");
    let unread = || agent.sum("ringwatch_agent_unread_segments");
    until("all of them", || (read() + unread() == 1000.0).then_some(()));
    println!("{} read and {} not read after {:.1} s", read(), unread(), (now_ns() - began) as f64 / 1e9);
    let of = |reason: &str| {
        let all = agent.series("ringwatch_agent_unread_segments");
        all.iter().filter(|(l, _)| l.contains(reason)).map(|(_, n)| n).sum::<f64>()
    };
    assert_eq!((read(), of("duplicate")), (900.0, 100.0));
    let (_, log) = agent.end_with_log();
    let named = log.iter().filter_map(|l| l.split_once("not read (").map(|(_, what)| what));
    let (all, each): (Vec<&str>, BTreeSet<&str>) = (named.clone().collect(), named.collect());
    assert!(!all.is_empty() && all.len() == each.len(), "each is named once: {all:#?}");
}

#[test]
fn a_disk_that_is_full_costs_findings_their_file_and_nobody_else_anything() {
    let test = "a_disk_that_is_full_costs_findings_their_file_and_nobody_else_anything";
    let room = Room::new();
    let state = room.path("full");
    fs::create_dir(&state).unwrap();
    let mounted = run(room
        .command("mount")
        .args(["-t", "tmpfs", "-o", "size=16k,mode=0700", "ringwatch-test"])
        .arg(&state));
    if mounted.code != Some(0) {
        return skipped(test, "the right to mount a tmpfs");
    }
    let kept = format!("findings.directory={}", state.display());
    let agent = Agent::start(&room, &["--set", &kept]);
    fs::write(state.join("rest"), [0; 16 << 10]).unwrap_err();
    // Nothing is left in its last page either.
    let mut file = fs::File::options().append(true).open(state.join("findings.jsonl")).unwrap();
    let used = file.metadata().unwrap().len() as usize;
    file.write_all(&vec![b'\n'; used.next_multiple_of(4096) - used]).unwrap();
    drop(file);
    let mut players = Players::start(&room, Play::of("missing-rank").hold(60));
    assert_missing_rank(&findings(&diagnosed(&room)));
    players.kill();
    agent.says("No space left on device");
    assert_eq!(agent.get("/livez").0, 200);
    let (told, code) = agent.end();
    assert_eq!(code, Some(0));
    assert_missing_rank(&opened(&told));
    assert_eq!(run(room.command("umount").arg(&state)).code, Some(0));
}

/// A tmpfs of these bytes at a new directory of the room; `None` where it may not be mounted.
fn tmpfs(room: &Room, name: &str, bytes: u64) -> Option<Mounted> {
    let at = room.path(name);
    fs::create_dir(&at).unwrap();
    let options = format!("size={bytes},mode=0700");
    let mounted = run(room.command("mount").args(["-t", "tmpfs", "-o", &options, "ringwatch-test"]).arg(&at));
    (mounted.code == Some(0)).then_some(Mounted(at))
}

/// A file system that goes with this value.
struct Mounted(PathBuf);

impl Mounted {
    /// Writes until nothing is left.
    fn fill(&self) -> PathBuf {
        let path = self.0.join("rest");
        let mut file = fs::File::create(&path).unwrap();
        while file.write_all(&[1; 4096]).is_ok() {}
        path
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // Players may still have it mapped.
        drop(std::process::Command::new("umount").arg("-l").arg(&self.0).status());
    }
}

#[test]
fn where_the_segments_disk_is_full_jobs_go_on_and_what_is_lost_is_counted() {
    const BYTES: u64 = 64 << 20;
    /// As much as four of the smallest segments take, and some more.
    const LEFT: u64 = 192 << 10;
    const LOOPS: u32 = 3;
    let test = "where_the_segments_disk_is_full_jobs_go_on_and_what_is_lost_is_counted";
    let room = Room::new();
    let Some(disk) = tmpfs(&room, "full", BYTES) else {
        return skipped(test, "the right to mount a tmpfs");
    };
    let directories = format!("segments.directories=[{:?}]", disk.0);
    let agent = Agent::start(&room, &["--set", &directories]);
    let play = |job: &str, play: Play| {
        let variables = [("RINGWATCH_DIR", disk.0.as_os_str()), ("RINGWATCH_JOB", std::ffi::OsStr::new(job))];
        Players::start_with(&room, play.two_node().loops(LOOPS).hold(60), &variables)
    };
    let of_job = |metric: &str, job: &str| -> f64 {
        let label = format!("job_name=\"{job}\"");
        let all = agent.series(metric).into_iter().filter(|(labels, _)| labels.contains(&label));
        all.fold(0.0, |sum, (_, n)| sum + n)
    };
    let over = |job: &str| of_job("ringwatch_operations_total", job);
    let lost = |job: &str| of_job("ringwatch_lost_records_total", job);
    let segments = || -> Vec<u64> {
        let all = files(&disk.0).into_iter().filter(|f| f.extension().is_some_and(|e| e == "seg"));
        all.map(|f| fs::metadata(f).unwrap().len()).collect()
    };
    let all = ENDED_IN_MIXED * f64::from(LOOPS);
    // What a segment needs it has from its beginning on: here the disk becomes full while it is written.
    let mut before = play("before", Play::of("mixed"));
    until("operations", || (over("before") > 0.0).then_some(()));
    let rest = disk.fill();
    let calls: Vec<_> = before.played().into_iter().map(|r| r.starts).collect();
    until("all operations", || (over("before") >= all).then_some(()));
    assert_eq!((over("before"), lost("before")), (all, 0.0));
    let large = segments();
    assert_eq!(large.len(), 4);
    // Nothing is left for a segment.
    for (report, calls) in play("without", Play::of("mixed").unpaced()).played().iter().zip(&calls) {
        assert_eq!((report.nonzero_returns, &report.starts), (0, calls), "{report:#?}");
        assert!(report.warnings.iter().any(|w| w.contains("ringwatch")), "{report:#?}");
    }
    assert_eq!(segments().len(), 4);
    // A little is left.
    let used = fs::metadata(&rest).unwrap().len();
    fs::File::options().write(true).open(&rest).unwrap().set_len(used - LEFT).unwrap();
    let mut small = play("small", Play::of("mixed"));
    for report in small.played() {
        assert_eq!(report.nonzero_returns, 0, "{report:#?}");
    }
    let sizes = segments();
    assert!(sizes.len() == 8 && *sizes.iter().min().unwrap() <= 32 << 10, "{sizes:?}, before {large:?}");
    until("what it did is counted", || (over("small") + lost("small") >= all).then_some(()));
    println!("of {all} operations {} are counted, {} records are lost", over("small"), lost("small"));
    assert!(over("small") <= all);
    assert_eq!(agent.end().1, Some(0));
}
