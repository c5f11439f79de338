//! Rules for NCCL's tuner on the command line: checked, converted, and handed to a job.

#![allow(unsafe_code, reason = "plays NCCL's part of a C interface")]

use crate::support;
use crate::support::{Room, Said, run};
use ringwatch_wire::tuning;
use std::ffi::{c_char, c_int, c_void};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

const RULES: &str = "rules:\n- {operation: AllReduce, max_bytes: 64K, algorithm: TREE, protocol: LL}\n";

fn written(room: &Room, name: &str, text: &str) -> PathBuf {
    let path = room.path(name);
    fs::write(&path, text).expect("a file");
    path
}

fn hash(path: &Path) -> u64 {
    let bytes = fs::read(path).expect("a compiled table");
    tuning::Rules::read(&bytes).expect("valid").hash()
}

fn tune(room: &Room, file: &Path, options: &[&str]) -> Said {
    run(room.ringwatch(["tune"]).arg(file).args(options))
}

#[test]
fn rules_are_checked_and_compiled() {
    let room = Room::new();
    let file = written(&room, "tune.yaml", RULES);
    let compiled = room.path("compiled");
    let said = tune(&room, &file, &["--output", compiled.to_str().expect("text")]);
    let wanted = format!("{}: 1 rule, 1 row, hash {:016x}\n", file.display(), hash(&compiled));
    assert_eq!((said.code, said.out, said.err.as_str()), (Some(0), wanted, ""));
    let sample = Path::new(env!("CARGO_MANIFEST_DIR")).join("config/tune.yaml");
    assert_eq!(tune(&room, &sample, &[]).code, Some(0));
}

#[test]
fn rules_go_to_nvidias_csv_and_back() {
    let room = Room::new();
    let said = tune(&room, &written(&room, "tune.yaml", RULES), &["--csv"]);
    assert_eq!((said.code, said.err.as_str()), (Some(0), ""));
    assert!(said.out.contains("\nallreduce,0,65536,tree,ll,32,-1,-1,-1,-1\n"), "{}", said.out);
    let again = tune(&room, &written(&room, "tune.csv", &said.out), &["--csv"]);
    let rows =
        |text: &str| text.lines().filter(|l| !l.starts_with('#')).map(str::to_owned).collect::<Vec<_>>();
    assert_eq!((again.code, rows(&again.out)), (Some(0), rows(&said.out)));
}

#[test]
fn wrong_rules_are_exit_code_2_with_file_and_line() {
    let room = Room::new();
    let file = written(&room, "tune.yaml", "rules:\n- operation: AllReduce\n  channels: 500\n");
    for said in [
        tune(&room, &file, &[]),
        run(room.ringwatch(["run", "--tune"]).arg(&file).args(["--", "echo", "started"])),
        run(room.ringwatch(["plugin", "--tune"]).arg(&file)),
    ] {
        assert_eq!((said.code, said.out.as_str()), (Some(2), ""), "{}", said.err);
        assert!(said.err.contains(&format!("{}:3: ", file.display())), "{}", said.err);
    }
    let missing = tune(&room, Path::new("/nowhere/tune.yaml"), &[]);
    assert_eq!(missing.code, Some(2));
    assert!(missing.err.contains("/nowhere/tune.yaml: "), "{}", missing.err);
}

/// What a shell in the job sees of the tuner.
const SHOW: &str = "echo \"$NCCL_TUNER_PLUGIN\"; echo \"$RINGWATCH_TUNE\"; echo \"$RINGWATCH_TUNE_REQUIRE$RINGWATCH_TUNE_NODES\"";

#[test]
fn a_job_follows_rules_only_when_asked_to() {
    let room = Room::new();
    let file = written(&room, "tune.yaml", RULES);
    let plain = run(&mut room.ringwatch(["run", "--", "sh", "-c", SHOW]));
    assert_eq!((plain.code, plain.out.as_str()), (Some(0), "\n\n\n"));
    for (options, library, require) in [
        (&[][..], "libnccl-profiler-ringwatch.so", ""),
        (&["--tune-require"], "libnccl-profiler-ringwatch.so", "1"),
        (&["--preload"], "libringwatch-preload.so", ""),
        (&["--preload", "--tune-nodes"], "libringwatch-preload.so", "1"),
    ] {
        let mut command = room.ringwatch(["run", "--tune"]);
        let said = run(command.arg(&file).args(options).args(["--", "sh", "-c", SHOW]));
        let lines: Vec<&str> = said.out.lines().collect();
        assert_eq!((said.code, lines[0], lines[2]), (Some(0), library, require), "{}", said.err);
        assert_eq!(Path::new(lines[1]).parent(), Some(room.path("cache/ringwatch").as_path()));
        assert_ne!(hash(Path::new(lines[1])), 0);
    }
}

#[test]
fn plugin_prints_what_a_job_needs_to_follow_rules() {
    let room = Room::new();
    let file = written(&room, "tune.yaml", RULES);
    let dir = room.path("it's a place");
    let said = run(room.ringwatch(["plugin", "--tune"]).arg(&file).arg("--tune-require").arg(&dir));
    assert_eq!((said.code, said.err.as_str()), (Some(0), ""));
    let shell = format!("{}\n{SHOW}", said.out);
    let there = run(room.command("sh").arg("-c").arg(shell));
    let lines: Vec<&str> = there.out.lines().collect();
    assert_eq!((lines[0], lines[2]), ("libnccl-profiler-ringwatch.so", "1"), "{}", said.out);
    assert_eq!(Path::new(lines[1]).parent(), Some(dir.as_path()));
}

#[test]
fn a_job_gets_the_variable_of_its_rules_and_no_tuner_without_rules() {
    let room = Room::new();
    let alone = written(&room, "alone.yaml", "environment: {NCCL_MIN_NCHANNELS: 32}\nrules: []\n");
    let both = written(&room, "both.yaml", &format!("environment: {{NCCL_MIN_NCHANNELS: 32}}\n{RULES}"));
    const BOTH: &str = "echo \"$NCCL_MIN_NCHANNELS\"; echo \"$NCCL_TUNER_PLUGIN\"";
    for (file, library) in [(&alone, ""), (&both, "libnccl-profiler-ringwatch.so")] {
        let job = run(room.ringwatch(["run", "--tune"]).arg(file).args(["--", "sh", "-c", BOTH]));
        assert_eq!((job.code, job.out), (Some(0), format!("32\n{library}\n")), "{}", job.err);
        let lines = run(room.ringwatch(["plugin", "--tune"]).arg(file).arg(room.path("plugin")));
        let shell = run(room.command("sh").arg("-c").arg(format!("{}\n{BOTH}", lines.out)));
        assert_eq!(shell.out, format!("32\n{library}\n"), "{}", lines.out);
        let mut other = room.ringwatch(["run", "--tune"]);
        let refused = run(other.arg(file).args(["--", "echo", "started"]).env("NCCL_MIN_NCHANNELS", "4"));
        assert_eq!((refused.code, refused.out.as_str()), (Some(2), ""));
        assert!(refused.err.contains("NCCL_MIN_NCHANNELS is set to 4"), "{}", refused.err);
    }
    assert!(tune(&room, &alone, &[]).out.contains(", NCCL_MIN_NCHANNELS=32\n"));
    assert!(tune(&room, &alone, &["--csv"]).out.contains("# needs NCCL_MIN_NCHANNELS=32"));
}

#[test]
fn a_job_that_is_observed_has_a_tuner_a_file_and_no_rules() {
    let room = Room::new();
    const SEEN: &str = "echo \"$NCCL_TUNER_PLUGIN\"; echo \"$RINGWATCH_TUNE\"; stat -c '%s %a' \"$RINGWATCH_TUNE_COSTS\"; \
                        echo \"$RINGWATCH_TUNE_COSTS\"";
    let length = ringwatch::tune::cost_log::FILE_BYTES;
    let job = run(&mut room.ringwatch(["run", "--tune", "observe", "--", "sh", "-c", SEEN]));
    let lines: Vec<&str> = job.out.lines().collect();
    let wanted = ["libnccl-profiler-ringwatch.so", "", &format!("{length} 600")];
    assert_eq!((job.code, &lines[..3]), (Some(0), &wanted[..]), "{}", job.err);
    assert!(!Path::new(lines[3]).exists(), "the file goes with the job");

    let printed = run(room.ringwatch(["plugin", "--tune", "observe"]).arg(room.path("plugin")));
    let shell = run(room.command("sh").arg("-c").arg(format!("{}\n{SEEN}", printed.out)));
    let lines: Vec<&str> = shell.out.lines().collect();
    assert_eq!(&lines[..3], &wanted[..], "{}{}", printed.err, shell.err);
    std::fs::remove_file(lines[3]).expect("the file stays for the job");

    let both =
        run(&mut room.ringwatch(["run", "--tune", "observe", "--tune-require", "--", "echo", "started"]));
    assert_eq!((both.code, both.out.as_str()), (Some(2), ""));
    assert!(both.err.contains("--tune-require is for rules"), "{}", both.err);
}

#[test]
fn rules_over_several_nodes_need_the_preloaded_library() {
    let room = Room::new();
    let file = written(&room, "tune.yaml", RULES);
    let refused = |command: &mut Command, reason: &str| {
        let said = run(command);
        assert_eq!((said.code, said.out.as_str()), (Some(2), ""), "{}", said.err);
        assert!(said.err.contains(reason), "{}", said.err);
    };
    let mut without = room.ringwatch(["run", "--tune-nodes", "--tune"]);
    refused(without.arg(&file).args(["--", "echo", "started"]), "--preload");
    refused(room.ringwatch(["plugin", "--tune-nodes", "--tune"]).arg(&file), "--preload");
    let observe = ["run", "--preload", "--tune", "observe", "--tune-nodes", "--", "echo", "started"];
    refused(&mut room.ringwatch(observe), "--tune-nodes is for rules");
    let lines = run(room.ringwatch(["plugin", "--preload", "--tune-nodes", "--tune"]).arg(&file));
    assert!(lines.out.contains("export RINGWATCH_TUNE_NODES=1\n"), "{} {}", lines.out, lines.err);
}

#[test]
fn another_tuner_is_not_replaced() {
    let room = Room::new();
    let file = written(&room, "tune.yaml", RULES);
    let mut command = room.ringwatch(["run", "--tune"]);
    command.arg(&file).args(["--", "echo", "started"]).env("NCCL_TUNER_PLUGIN", "libnccl-tuner-other.so");
    let said = run(&mut command);
    assert_eq!((said.code, said.out.as_str()), (Some(2), ""));
    assert!(said.err.contains("libnccl-tuner-other.so") && said.err.contains("unset it"), "{}", said.err);
}

/// In a child: one rank, as NCCL 2.28 makes its communicator. It lives until its standard input ends.
fn be_rank(plugin: &Path) {
    type ProfilerInit = unsafe extern "C" fn(
        *mut *mut c_void,
        u64,
        *mut c_int,
        *const c_char,
        c_int,
        c_int,
        c_int,
        *const c_void,
    ) -> c_int;
    type TunerInit = unsafe extern "C" fn(
        *mut *mut c_void,
        u64,
        usize,
        usize,
        *const c_void,
        *mut c_void,
        *mut c_void,
    ) -> c_int;
    const COMM: u64 = 0xc0ffee;
    let rank: c_int = std::env::var("TEST_RANK").expect("a rank").parse().expect("a number");
    // SAFETY: the plugin's initialisers are its own.
    let library = unsafe { libloading::Library::new(plugin) }.expect("the plugin loads");
    let init = |symbol: &str| {
        // SAFETY: tables of pointers, of which the second is init.
        let table = unsafe { library.get::<*const [*const c_void; 2]>(symbol) }.expect("a table");
        // SAFETY: as above; the library stays loaded.
        unsafe { (**table)[1] }
    };
    let (mut context, mut mask) = (std::ptr::null_mut(), 0);
    // SAFETY: the signatures of version 5 of both, and places that live through the calls.
    let results = unsafe {
        let profiler = std::mem::transmute::<*const c_void, ProfilerInit>(init("ncclProfiler_v5"));
        let tuner = std::mem::transmute::<*const c_void, TunerInit>(init("ncclTunerPlugin_v5"));
        let none = std::ptr::null_mut::<c_void>();
        let profiled =
            profiler(&mut context, COMM, &mut mask, std::ptr::null(), 1, 3, rank, std::ptr::null());
        (profiled, tuner(&mut context, COMM, 3, 1, std::ptr::null(), none, none))
    };
    assert_eq!(results, (0, 0));
    println!("ready");
    std::io::stdout().flush().expect("a pipe");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).expect("a pipe");
}

#[test]
fn a_rank_whose_rules_differ_is_found() {
    const TEST: &str = "tune::a_rank_whose_rules_differ_is_found";
    if let Some(plugin) = std::env::var_os("TEST_PLUGIN") {
        return be_rank(Path::new(&plugin));
    }
    let room = Room::new();
    let compiled = |name: &str, rules: &str| {
        let path = room.path(name);
        let said = tune(&room, &written(&room, "tune.yaml", rules), &["-o", path.to_str().expect("text")]);
        assert_eq!(said.code, Some(0), "{}", said.err);
        path
    };
    let usual = compiled("usual", RULES);
    let other = compiled("other", &RULES.replace("TREE", "RING"));
    let plugin = room.plugin();
    let me = std::env::current_exe().expect("this test");
    let mut ranks: Vec<_> = (0..3)
        .map(|rank| {
            let mut command: Command = room.command(me.to_str().expect("text"));
            command
                .args([TEST, "--exact", "--nocapture", "--test-threads=1"])
                .env("TEST_PLUGIN", &plugin)
                .env("TEST_RANK", rank.to_string())
                .env("RINGWATCH_TUNE", if rank == 1 { &other } else { &usual })
                .stdin(Stdio::piped())
                .stdout(Stdio::piped());
            command.spawn().expect("it starts")
        })
        .collect();
    // Held open until the ranks end, which write a line more.
    let mut outs: Vec<_> =
        ranks.iter_mut().map(|r| BufReader::new(r.stdout.take().expect("a pipe"))).collect();
    for out in &mut outs {
        assert!(out.lines().map_while(Result::ok).any(|l| l.ends_with("ready")), "a rank failed");
    }
    // The ranks are compared a moment after the last one's init.
    std::thread::sleep(Duration::from_millis(200));
    let said = run(room.ringwatch(["diagnose", "--json"]).arg(room.segments()));
    for mut rank in ranks {
        drop(rank.stdin.take());
        support::finish(rank);
    }
    assert_eq!(said.code, Some(1), "{} {}", said.out, said.err);
    let found: Vec<serde_json::Value> =
        said.out.lines().map(|l| serde_json::from_str(l).expect("JSON")).collect();
    let about = found.iter().find(|f| f["kind"] == "tuner-rules-differ");
    let about = about.unwrap_or_else(|| panic!("not found: {}", said.out));
    assert_eq!(about["ranks"], serde_json::json!([1]), "{about}");
}
