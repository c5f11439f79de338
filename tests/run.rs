//! `ringwatch run -- CMD`: the job's own output, signals and exit code, and what is told beside them.

use crate::support;
use crate::support::{PROGRAM, Room, Said, finish, output, run};
use std::ffi::OsString;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

const PLUGIN: &str = "libnccl-profiler-ringwatch.so";

/// `ringwatch run -- sh -c SCRIPT`
fn sh(room: &Room, script: &str) -> Command {
    room.ringwatch(["run", "--", "sh", "-c", script])
}

#[test]
fn the_exit_code_is_the_jobs() {
    let room = Room::new();
    for (script, code) in
        [("exit 0", 0), ("exit 3", 3), ("exit 255", 255), ("kill -TERM $$", 143), ("kill -KILL $$", 137)]
    {
        let said = run(&mut sh(&room, script));
        assert_eq!((said.code, said.out.as_str()), (Some(code), ""), "{script}: {}", said.err);
        // It says why it has nothing to say, and only on stderr.
        assert!(said.err.contains("ringwatch: no process loaded the plugin"), "{}", said.err);
    }
}

#[test]
fn what_goes_in_and_comes_out_is_the_jobs_to_the_byte() {
    let room = Room::new();
    // Every byte there is, in no text's order, more than a pipe holds.
    let bytes: Vec<u8> = (0..300_000u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let mut command = room.ringwatch(["run", "--", "cat"]);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut stdin = child.stdin.take().expect("a pipe");
    let sent = bytes.clone();
    let writer = std::thread::spawn(move || stdin.write_all(&sent).expect("cat reads it all"));
    let said = finish(child);
    writer.join().expect("all is written");
    assert_eq!(said.status.code(), Some(0));
    assert!(said.stdout == bytes, "{} bytes went in, {} came out", bytes.len(), said.stdout.len());

    let both = output(&mut sh(&room, "printf 'out\\n'; printf 'err\\n' >&2"));
    assert_eq!(both.stdout, b"out\n");
    assert!(both.stderr.starts_with(b"err\n"));
}

/// Starts a job that says when it is ready and what signal it got, recorded in a directory where one is named.
fn trapping(room: &Room, recording: Option<&Path>) -> (Child, BufReader<std::process::ChildStdout>) {
    let script = "for s in TERM INT HUP QUIT USR1 USR2; do trap \"echo got $s; exit 7\" $s; done\n\
                  echo ready; while :; do sleep 0.02; done";
    let mut command = room.ringwatch(["run"]);
    command.args(recording.map(|dir| ["--record".as_ref(), dir.as_os_str()]).into_iter().flatten());
    command.args(["--", "sh", "-c", script]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    let mut out = BufReader::new(child.stdout.take().expect("a pipe"));
    let mut line = String::new();
    out.read_line(&mut line).expect("read");
    assert_eq!(line, "ready\n");
    (child, out)
}

#[test]
fn signals_reach_the_job() {
    use rustix::process::{Pid, Signal, kill_process};
    let room = Room::new();
    let all = [
        (Signal::TERM, "TERM"),
        // No terminal has sent it to the job as well: stdin is none.
        (Signal::INT, "INT"),
        (Signal::QUIT, "QUIT"),
        (Signal::HUP, "HUP"),
        (Signal::USR1, "USR1"),
        (Signal::USR2, "USR2"),
    ];
    for (signal, name) in all {
        let recording = (signal == Signal::TERM).then(|| room.path("recording"));
        let (child, mut out) = trapping(&room, recording.as_deref());
        kill_process(Pid::from_child(&child), signal).expect("it runs");
        let mut rest = String::new();
        out.read_to_string(&mut rest).expect("read");
        let said = finish(child);
        assert_eq!((rest.as_str(), said.status.code()), (format!("got {name}\n").as_str(), Some(7)));
    }
}

#[test]
fn a_command_that_cannot_be_started_has_the_exit_code_of_a_shell() {
    let room = Room::new();
    let said = run(&mut room.ringwatch(["run", "--", "no-such-program-at-all", "--flag"]));
    assert_eq!((said.code, said.out.as_str()), (Some(127), ""));
    let err = said.err;
    assert!(err.starts_with("ringwatch: cannot start no-such-program-at-all: No such file"), "{err}");
    let said = run(&mut room.ringwatch(["run", "--", "/dev/null"]));
    assert_eq!(
        (said.code, said.err.as_str()),
        (Some(126), "ringwatch: cannot start /dev/null: Permission denied (os error 13)\n")
    );
    let none = run(&mut room.ringwatch(["run"]));
    assert_eq!(none.code, Some(2));
}

#[test]
fn another_profiler_plugin_is_not_thrown_out_unasked() {
    let room = Room::new();
    let witness = room.path("witness");
    let script = format!("echo \"$NCCL_PROFILER_PLUGIN\" > '{}'", witness.display());
    let said = run(sh(&room, &script).env("NCCL_PROFILER_PLUGIN", "libnccl-profiler-other.so"));
    assert_eq!(said.code, Some(2), "{}", said.err);
    assert!(said.err.contains("libnccl-profiler-other.so") && said.err.contains("--replace"), "{}", said.err);
    assert!(!witness.exists(), "the job was started all the same");

    let mut replaced = room.ringwatch(["run", "--replace", "--", "sh", "-c", &script]);
    let said = run(replaced.env("NCCL_PROFILER_PLUGIN", "libnccl-profiler-other.so"));
    assert_eq!(said.code, Some(0), "{}", said.err);
    assert_eq!(fs::read_to_string(&witness).expect("written"), format!("{PLUGIN}\n"));

    // Ours already, or nothing at all, is nobody else's.
    for ours in [PLUGIN, ""] {
        assert_eq!(run(sh(&room, &script).env("NCCL_PROFILER_PLUGIN", ours)).code, Some(0));
    }
}

#[test]
fn another_profiler_plugin_is_kept_behind_ours_when_asked() {
    let room = Room::new();
    let other = "/opt/other/libnccl-profiler-other.so";
    let refused = run(room.ringwatch(["run", "--", "true"]).env("NCCL_PROFILER_PLUGIN", other));
    assert_eq!(refused.code, Some(2));
    assert!(refused.err.contains(other) && refused.err.contains("--chain"), "{}", refused.err);

    let chained = |plugin: &str| {
        let mut command = room.ringwatch(["run", "--chain", "--", "env", "-0"]);
        environment(command.env("NCCL_PROFILER_PLUGIN", plugin))
    };
    let job = chained(other);
    assert_eq!((get(&job, "NCCL_PROFILER_PLUGIN"), get(&job, "RINGWATCH_CHAIN")), (PLUGIN, other));
    for nobody in ["", "none", "None", PLUGIN] {
        let job = chained(nobody);
        assert_eq!(get(&job, "NCCL_PROFILER_PLUGIN"), PLUGIN);
        assert!(!job.iter().any(|(n, _)| n == "RINGWATCH_CHAIN"), "{nobody}");
    }
    let both = run(&mut room.ringwatch(["run", "--chain", "--replace", "--", "true"]));
    assert_eq!(both.code, Some(2));
}

#[test]
fn the_preload_library_comes_first_and_is_the_plugin() {
    let room = Room::new();
    let mut command = room.ringwatch(["run", "--preload", "--", "env", "-0"]);
    // Of libraries that are not there the dynamic linker says so on stderr, and goes on.
    let job = environment(command.env("LD_PRELOAD", "libm.so.6"));
    let preload = get(&job, "LD_PRELOAD");
    let first = preload.strip_suffix(":libm.so.6").expect("the old one is kept");
    assert!(Path::new(first).is_file() && Path::new(first).starts_with(room.path("cache")), "{first}");
    assert_eq!(get(&job, "NCCL_PROFILER_PLUGIN"), "libringwatch-preload.so");
    assert!(first.ends_with("/libringwatch-preload.so"), "{first}");

    let mut other = room.ringwatch(["run", "--preload", "--", "true"]);
    let said = run(other.env("NCCL_PROFILER_PLUGIN", "libnccl-profiler-other.so"));
    assert_eq!(said.code, Some(2), "{}", said.err);
    let mut none = room.ringwatch(["run", "--preload", "--", "true"]);
    let said = run(none.env("NCCL_PROFILER_PLUGIN", PLUGIN));
    assert_eq!(said.code, Some(0), "{}", said.err);
    assert!(said.err.contains("no process made an NCCL communicator"), "{}", said.err);
}

/// The environment that a job gets.
fn environment(command: &mut Command) -> Vec<(String, OsString)> {
    let out = output(command);
    assert_eq!(out.status.code(), Some(0));
    let pairs = out.stdout.split(|b| *b == 0).filter(|l| !l.is_empty()).map(|line| {
        let at = line.iter().position(|b| *b == b'=').expect("a variable");
        (String::from_utf8_lossy(&line[..at]).into_owned(), OsString::from_vec(line[at + 1..].to_vec()))
    });
    pairs.collect()
}

fn get<'a>(all: &'a [(String, OsString)], name: &str) -> &'a str {
    let value = all.iter().find(|(n, _)| n == name).map(|(_, v)| v);
    value.and_then(|v| v.to_str()).unwrap_or_else(|| panic!("{name} is not set"))
}

#[test]
fn the_job_finds_the_plugin_on_the_library_path() {
    let room = Room::new();
    let mut command = room.ringwatch(["run", "--", "env", "-0"]);
    let job = environment(command.env("LD_LIBRARY_PATH", "/opt/a:/opt/b").env("KEPT", "as it is"));
    assert_eq!(get(&job, "NCCL_PROFILER_PLUGIN"), PLUGIN, "a bare name: NCCL 2.27.3 finds no path");
    let path: Vec<&str> = get(&job, "LD_LIBRARY_PATH").split(':').collect();
    assert_eq!(path[1..], ["/opt/a", "/opt/b"]);
    let library = Path::new(path[0]).join(PLUGIN);
    assert!(fs::read(&library).expect("the plugin") == ringwatch::bundle::PLUGIN);
    assert!(library.starts_with(room.path("cache")), "{}", library.display());
    assert_eq!(Path::new(get(&job, "RINGWATCH_DIR")), room.segments());
    let (name, pid) = get(&job, "RINGWATCH_JOB").split_once('-').expect("a name and a number");
    assert_eq!(name, "env");
    pid.parse::<u32>().expect("the number of a process");
    assert_eq!(get(&job, "KEPT"), "as it is");

    let mut command = room.ringwatch(["run", "--", "env", "-0"]);
    let job = environment(command.env("RINGWATCH_JOB", "training-7"));
    assert_eq!(get(&job, "RINGWATCH_JOB"), "training-7");
    assert!(!get(&job, "LD_LIBRARY_PATH").ends_with(':'), "an empty entry would be the current directory");
}

/// A job of four processes, each of which loads the plugin by the name and path that it finds, as NCCL does.
/// It ends when the file `end` is there.
fn job(room: &Room, scenario: &str, end: &Path) -> Command {
    let start_at = ringwatch::replay::monotonic_ns() + 700_000_000;
    let script = format!(
        "for r in 0 1 2 3; do '{PROGRAM}' replay --scenario {scenario} --rank $r --start-at {start_at} \
         --plugin \"$NCCL_PROFILER_PLUGIN\" --hold 120 & pids=\"$pids $!\"; done\n\
         while [ ! -e '{}' ]; do sleep 0.05; done\n\
         kill $pids; wait; exit 0",
        end.display()
    );
    sh(room, &script)
}

/// Runs a job until it was told of something on stderr, ends it then, and gives back all that it said.
fn run_until(mut command: Command, told: &str, end: &Path) -> Said {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    let out = support::drain(child.stdout.take());
    let err = BufReader::new(child.stderr.take().expect("a pipe"));
    let (told, end) = (told.to_owned(), end.to_owned());
    let reader = std::thread::spawn(move || {
        let mut all = String::new();
        for line in err.lines() {
            let line = line.expect("text");
            if line.contains(&told) {
                // Only now does the job end: whatever was told was told while it ran.
                fs::write(&end, "").expect("written");
            }
            all.push_str(&line);
            all.push('\n');
        }
        all
    });
    let status = support::wait(&mut child);
    let out = String::from_utf8(out.join().expect("read")).expect("text");
    Said { code: status.code(), out, err: reader.join().expect("read") }
}

fn reports(out: &str) -> usize {
    out.lines().filter(|l| l.starts_with('{')).count()
}

#[test]
fn a_finding_is_told_while_the_job_runs_and_again_at_its_end() {
    let room = Room::new();
    let end = room.path("end");
    let told = "ringwatch: missing-rank: rank 3 in AllReduce of 16777216 bytes (order 3";
    let said = run_until(job(&room, "missing-rank", &end), told, &end);
    assert_eq!(said.code, Some(0), "a finding is not the job's failure: {}", said.err);
    assert_eq!(reports(&said.out), 4, "{}", said.out);
    let (live, summary) = said.err.split_once("ringwatch: 4 processes").expect("a summary");
    // Its changes are told too, such as that the job ended.
    assert_eq!(live.matches("ringwatch: missing-rank: rank 3").count(), 1, "told once: {live}");
    assert!(live.contains("next: look at what rank 3 does now"), "{live}");
    let findings = summary.split_once("ringwatch: findings\n").expect("the findings").1;
    assert!(findings.starts_with("missing-rank: rank 3 in AllReduce of 16777216 bytes"), "{findings}");
    assert!(summary.contains("slowest operations"), "{summary}");
    assert!(summary.contains(" 0 records lost"), "{summary}");
    // With a finding the black boxes stay, and it is said where.
    assert_eq!(room.segment_files().len(), 4);
    let dir = room.segments();
    assert!(said.err.contains(&format!("4 black boxes kept in {0} (ringwatch diagnose {0})", dir.display())));
    let again = run(room.ringwatch(["diagnose", "--json"]).arg(dir));
    assert_eq!(again.code, Some(1), "{}", again.err);
    support::assert_missing_rank(&support::findings(&again.out));
}

/// Runs three healthy ranks of a job; the fourth, which is not on this node, would be the late one.
fn healthy(options: &[&str], code: u8) -> (Said, Vec<PathBuf>) {
    let room = Room::new();
    let script = format!(
        "for r in 0 1 2; do '{PROGRAM}' replay --scenario mixed --rank $r --unpaced \
         --plugin \"$NCCL_PROFILER_PLUGIN\" & done; wait; exit {code}"
    );
    let mut command = room.ringwatch(["run"]);
    command.args(options).args(["--", "sh", "-c", &script]);
    let said = run(&mut command);
    assert_eq!(said.code, Some(i32::from(code)), "{}", said.err);
    assert_eq!(reports(&said.out), 3, "{}", said.out);
    assert!(
        said.err.contains("ringwatch: 3 processes, ") && said.err.contains(" 0 records lost"),
        "{}",
        said.err
    );
    assert!(
        said.err.ends_with("ringwatch: no findings\n")
            || said.err.contains("no findings\nringwatch: 3 black")
    );
    (said, room.segment_files())
}

#[test]
fn a_clean_run_leaves_nothing_behind() {
    let (said, left) = healthy(&[], 0);
    assert_eq!(left, Vec::<PathBuf>::new(), "{}", said.err);
    assert!(!said.err.contains("black boxes"), "{}", said.err);
}

#[test]
fn a_failed_run_and_one_that_asks_for_it_keep_the_black_boxes() {
    for (options, code) in [([].as_slice(), 3), (&["--keep"], 0)] {
        let (said, left) = healthy(options, code);
        assert_eq!(left.len(), 3, "{}", said.err);
        assert!(said.err.contains("3 black boxes kept in "), "{}", said.err);
    }
}

#[test]
fn another_jobs_segments_are_left_alone() {
    let room = Room::new();
    support::Players::start(&room, support::Play::of("mismatch").unpaced()).end();
    let before = room.segment_files();
    assert_eq!(before.len(), 4);
    let said = run(&mut sh(&room, "exit 0"));
    assert_eq!(said.code, Some(0));
    assert!(said.err.contains("no process loaded the plugin"), "{}", said.err);
    assert_eq!(room.segment_files(), before);
}

#[test]
fn nobody_reading_stderr_does_not_disturb_the_job() {
    let room = Room::new();
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let mut command = sh(&room, "echo fine; exit 5");
    let child = command.stdout(Stdio::piped()).stderr(writer).spawn().expect("it starts");
    drop(command);
    let said = finish(child);
    assert_eq!((said.status.code(), said.stdout.as_slice()), (Some(5), b"fine\n".as_slice()));
}
