//! Recordings: what they take on the disk, and what is left of them after a crash.

use crate::simulator::{Case, Simulation};
use crate::support::{Play, Players, Room, assert_missing_rank, findings, run, skipped};
use crate::watch::{Watcher, Way};
use ringwatch::model::{Source as _, Update};
use ringwatch::recording::{Limits, Playback};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// A case of the corpus, recorded in a new directory.
fn recorded(room: &Room, case: &str, limits: Limits) -> PathBuf {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scenarios").join(case).with_extension("yaml");
    let case: Case = serde_yaml::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let dir = room.path("recording");
    let mut recorder = Watcher::new(&case, Way::Recorded);
    recorder.record(&dir, limits);
    let mut simulation = Simulation::new(&case, "recorded", 0, 0);
    let mut now = 0;
    while now <= case.until.0 {
        let updates = simulation.look(now);
        recorder.pass(&simulation, updates, now, case.look.0);
        now += case.look.0;
    }
    recorder.end();
    dir
}

fn files(dir: &Path, prefix: &str) -> Vec<PathBuf> {
    let all = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path());
    let mut files: Vec<PathBuf> =
        all.filter(|p| p.file_name().unwrap().to_string_lossy().starts_with(prefix)).collect();
    files.sort();
    files
}

fn bytes(files: &[PathBuf]) -> u64 {
    files.iter().map(|p| std::fs::metadata(p).unwrap().len()).sum()
}

/// The most that an operation takes in a recording of these jobs, in bytes.
const OPERATION_MAX: f64 = 16.0;

#[test]
fn an_operation_takes_few_bytes() {
    for case in ["healthy-two-minutes", "healthy-three-ways", "healthy-untimed-hosts-ahead"] {
        let room = Room::new();
        let dir = recorded(&room, case, Limits::default());
        let operations = operations(Playback::open(&dir).unwrap()) as f64;
        let of = |prefix| bytes(&files(&dir, prefix)) as f64 / operations;
        let (ops, messages) = (of("operations-"), of("messages-"));
        println!("{case}: {operations} operations: {ops:.1} bytes each, and {messages:.1} of messages");
        assert!(of("") <= OPERATION_MAX, "{case}: {:.1} bytes an operation", of(""));
    }
}

fn operations(mut playback: Playback) -> usize {
    let updates = playback.poll(u64::MAX);
    updates.iter().filter(|u| matches!(u, Update::Told(_))).count()
}

#[test]
fn a_recording_that_is_opened_near_a_moment_reads_what_is_around_it() {
    let room = Room::new();
    let dir = recorded(&room, "healthy-three-ways", Limits { block_bytes: 128 << 10, ..Limits::default() });
    assert!(files(&dir, "messages-").len() >= 8);
    let told = |updates: Vec<Update>| updates.iter().filter(|u| matches!(u, Update::Told(_))).count();
    let mut whole = Playback::open(&dir).unwrap();
    let first_ns = whole.next_at().unwrap().unwrap().mono_ns;
    drop(whole.poll(u64::MAX));
    let last_ns = whole.at().unwrap().mono_ns;
    for part in [0.0, 0.3, 0.6, 0.95] {
        let at_ns = first_ns + ((last_ns - first_ns) as f64 * part) as u64;
        let (mut whole, mut near) = (Playback::open(&dir).unwrap(), Playback::open_at(&dir, at_ns).unwrap());
        let (before, before_near) = (told(whole.poll(at_ns)), told(near.poll(at_ns)));
        assert!(before_near <= before && before_near <= 24_000, "{before_near} of {before} at {part}");
        assert!(part < 0.5 || 0 < before_near && before_near < before, "{before_near} of {before} at {part}");
        assert_eq!(
            told(whole.poll(u64::MAX)),
            told(near.poll(u64::MAX)),
            "what comes later is all there, at {part}"
        );
        assert_eq!(near.notes(), [""; 0], "nothing is taken for lost at {part}");
    }
}

#[test]
fn what_was_written_before_a_crash_can_be_read() {
    let room = Room::new();
    let dir = recorded(&room, "healthy-three-ways", Limits { block_bytes: 512 << 10, ..Limits::default() });
    let whole = operations(Playback::open(&dir).unwrap());
    let blocks = files(&dir, "messages-").len();
    assert!(blocks >= 3, "{blocks} blocks");

    // The writer dies before the last block is there: the log has what the block would have had, and the half-made files of the
    // block do not count.
    let crashed = room.path("crashed");
    std::fs::create_dir(&crashed).unwrap();
    for file in files(&dir, "") {
        std::fs::copy(&file, crashed.join(file.file_name().unwrap())).unwrap();
    }
    std::fs::remove_file(files(&crashed, "messages-").pop().unwrap()).unwrap();
    std::fs::write(crashed.join("messages-00099.draft"), "half").unwrap();
    let without = operations(Playback::open(&crashed).unwrap());
    assert!(0 < without && without < whole, "{without} of {whole}");

    // A log that is cut anywhere opens, and lacks its end alone.
    let log = recorded_log(&room);
    let mut before = 0;
    for cut in (0..=log.len()).step_by(log.len() / 50) {
        let cut_dir = room.path(&format!("cut-{cut}"));
        std::fs::create_dir(&cut_dir).unwrap();
        std::fs::write(cut_dir.join("open-00001.wal"), &log[..cut]).unwrap();
        let n = operations(Playback::open(&cut_dir).unwrap());
        assert!(n >= before, "{n} operations in {cut} bytes, and {before} in fewer");
        before = n;
    }
    assert!(before > 0);
}

/// The log of a recording that nobody closed.
fn recorded_log(room: &Room) -> Vec<u8> {
    let dir = room.path("log");
    let case = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scenarios/healthy-three-ways.yaml");
    let case: Case = serde_yaml::from_str(&std::fs::read_to_string(case).unwrap()).unwrap();
    let mut recorder = Watcher::new(&case, Way::Recorded);
    recorder.record(&dir, Limits::default());
    let mut simulation = Simulation::new(&case, "recorded", 0, 0);
    for look in 0..10 {
        let now = look * case.look.0;
        let updates = simulation.look(now);
        recorder.pass(&simulation, updates, now, case.look.0);
    }
    drop(recorder);
    std::fs::read(dir.join("open-00001.wal")).unwrap()
}

#[test]
fn the_oldest_blocks_make_room() {
    let room = Room::new();
    let limits = Limits { block_bytes: 256 << 10, bytes: 150 << 10, ..Limits::default() };
    let dir = recorded(&room, "healthy-three-ways", limits);
    let all = bytes(&files(&dir, ""));
    assert!(all <= 300 << 10, "{all} bytes");
    let first = &files(&dir, "messages-")[0];
    assert!(!first.ends_with("messages-00001.parquet"), "{first:?}");
    // What is left says who is there, so that its operations are somebody's.
    assert!(operations(Playback::open(&dir).unwrap()) > 100);
}

/// Jobs of `tests/gpu/faults.py` on two H200s, recorded by `run --record`. While they ran the same was found.
#[test]
fn recordings_of_real_faults_are_judged_as_the_jobs_were() {
    let room = Room::new();
    for (fault, kind, ranks, step) in [
        ("missing", "missing-rank", vec![1], "in step 333 of rank 1"),
        ("stop", "missing-rank", vec![1], "in step 339 of rank 1"),
        ("size", "mismatch", vec![0, 1], "in step 335 of rank 0"),
    ] {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/recordings").join(fault);
        let said = run(room.ringwatch(["diagnose", "--json", "--replay"]).arg(&dir));
        // The shape of each line is checked.
        findings(&said.out);
        let found: Vec<Value> = said.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let what: Vec<_> = found.iter().map(|f| (f["kind"].as_str().unwrap(), f["ranks"].clone())).collect();
        assert_eq!((said.code, what), (Some(1), vec![(kind, serde_json::json!(ranks))]), "{fault}");
        let evidence = found[0]["evidence"].as_array().unwrap();
        assert!(
            evidence.iter().any(|e| e["text"].as_str().unwrap().starts_with(step)),
            "{fault}: {evidence:#?}"
        );
    }
}

#[test]
fn a_job_is_recorded_and_judged_again() {
    let room = Room::new();
    let dir = room.path("recording");
    let players = Players::start(&room, Play::of("missing-rank").hold(60));
    let record = |dir: &Path| {
        run(room.ringwatch(["record", "--seconds", "8", "-o"]).arg(dir).arg("--dir").arg(room.segments()))
    };
    let said = record(&dir);
    assert_eq!(said.code, Some(0), "{}", said.err);
    drop(players);
    let said = run(room.ringwatch(["diagnose", "--json", "--replay"]).arg(&dir));
    assert_eq!((said.code, said.err.as_str()), (Some(1), ""));
    assert_missing_rank(&findings(&said.out));
    let report = run(room.ringwatch(["report", "--replay"]).arg(&dir));
    assert!(report.out.contains("AllReduce") && report.out.contains("missing-rank"), "{}", report.out);

    // Whoever ends it by a signal has all of it.
    let ended = room.path("ended");
    let mut command = room.ringwatch(["record", "-o"]);
    let child = command.arg(&ended).arg("--dir").arg(room.segments()).spawn().unwrap();
    while !ended.join("open-00001.wal").exists() {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    rustix::process::kill_process(rustix::process::Pid::from_child(&child), rustix::process::Signal::TERM)
        .unwrap();
    assert_eq!(crate::support::finish(child).status.code(), Some(0));
    assert_eq!((files(&ended, "open-").len(), files(&ended, "operations-").len()), (0, 1));

    let again = record(&dir);
    assert!(again.code == Some(2) && again.err.contains("the directory is not empty"), "{}", again.err);
    let empty = room.path("empty");
    std::fs::create_dir(&empty).unwrap();
    let said = run(room.ringwatch(["diagnose", "--replay"]).arg(&empty));
    assert!(said.code == Some(2) && said.err.contains("no recording is in it"), "{}", said.err);
    let damaged = files(&dir, "operations-").remove(0);
    std::fs::write(&damaged, "PAR1 no table PAR1").unwrap();
    let said = run(room.ringwatch(["diagnose", "--replay"]).arg(&dir));
    assert!(said.code == Some(2) && said.err.contains("operations-00001.parquet: "), "{}", said.err);
}

/// Runs the queries of the README on a recording. Each has its rows, as JSON.
fn queries(python: &Path, recording: &str) -> Vec<Value> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let readme = std::fs::read_to_string(root.join("src/recording/README.md")).unwrap();
    let sql = readme.split_once("## Queries").unwrap().1.split_once("```sql\n").unwrap().1;
    let sql = sql.split_once("```").unwrap().0;
    let dir = root.join("tests/data/recordings").join(recording);
    let all = sql.replace("DIR", dir.to_str().unwrap());
    // Each begins with a line of its number.
    let script = "import duckdb, json, re, sys\n\
                  for query in re.split(r'(?m)^-- [0-9]+[.].*$', sys.argv[1])[1:]:\n\
                  \x20   print(json.dumps(duckdb.sql(query).fetchall(), default=str))\n";
    let said = run(std::process::Command::new(python).args(["-c", script, &all]));
    assert_eq!(said.code, Some(0), "{}", said.err);
    said.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn the_queries_of_the_readme_answer() {
    let python = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/duckdb/bin/python3");
    if !python.exists() {
        return skipped("recording::the_queries_of_the_readme_answer", "DuckDB in target/duckdb");
    }
    // Rank 1 stays away from collective 1332 of a communicator.
    let answers = queries(&python, "missing");
    assert_eq!(answers.len(), 10);
    let empty: Vec<usize> =
        (1..).zip(&answers).filter(|(_, a)| a.as_array().unwrap().is_empty()).map(|(n, _)| n).collect();
    assert_eq!(empty, [6], "no ranks differ in what they called");
    let world = &answers[2][0];
    assert_eq!((&world[1], &world[3], &world[4]), (&json!("opened"), &json!("missing-rank"), &json!("1")));
    let in_flight =
        answers[3].as_array().unwrap().iter().find(|row| row[2] == 1332).expect("the operation that hangs");
    assert_eq!(in_flight[5], json!([0]));
    assert_eq!(answers[4][0][1], 1, "{}", answers[4]);
    // Rank 1 calls with another count.
    let answers = queries(&python, "size");
    let differs = answers[5].as_array().unwrap();
    assert_eq!((differs.len(), differs[0][3].as_array().unwrap().len()), (1, 2), "{}", answers[5]);
}
