//! The tuner of every ABI version: its tables, what it does with rules and without, and that all ranks decide alike.

#![allow(unsafe_code, reason = "plays NCCL's part of a C interface")]
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod support;

use ringwatch_plugin::tuner::{Constants, NvlDomainInfo};
use ringwatch_wire::codes::tuned;
use ringwatch_wire::tuning::{ANY_PIPE_OPS, Registered, Row, entries_of, entry};
use std::ffi::{CStr, c_char, c_int};
use std::mem::{offset_of, size_of};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use support::library::{LogFn, Plugin};
use support::tuner::{Asked, CTable, Tuner, write_rules};

const COMM: u64 = 0xfeed_beef;

fn row(min_bytes: u64, max_bytes: u64) -> Row {
    Row {
        min_bytes,
        max_bytes,
        min_ranks: 0,
        max_ranks: u32::MAX,
        min_nodes: 0,
        max_nodes: u32::MAX,
        prefer: 0,
        forbid: 0,
        pipe_ops: ANY_PIPE_OPS,
        collective: 4,
        channels: 0,
        registered: Registered::Any,
    }
}

/// All-reduces: the tree and 4 channels up to 64 KiB, no ring above that, NVLS (which is impossible) at 1 GiB.
fn rules() -> Vec<Row> {
    vec![
        Row { prefer: entry(0, 0), channels: 4, ..row(0, 65_536) },
        Row { forbid: entries_of(1), ..row(65_537, (1 << 30) - 1) },
        Row { prefer: entries_of(4), channels: 9, ..row(1 << 30, 1 << 30) },
    ]
}

/// Writes NCCL's log to standard error, a line each.
unsafe extern "C" fn log(
    level: c_int,
    _flags: u64,
    _file: *const c_char,
    _line: c_int,
    _format: *const c_char,
    text: *const c_char,
) {
    // SAFETY: the plugin passes a C string.
    eprintln!("log {level} {}", unsafe { CStr::from_ptr(text) }.to_str().unwrap());
}

fn logger() -> LogFn {
    type Fixed = unsafe extern "C" fn(c_int, u64, *const c_char, c_int, *const c_char, *const c_char);
    // SAFETY: called through a variadic type, a function of fixed arguments finds its integer arguments in the same
    // registers on x86-64 and arm64 Linux.
    unsafe { std::mem::transmute::<Fixed, LogFn>(log) }
}

#[test]
fn every_version_has_nccls_layout() {
    assert_eq!(
        [0, 8, 16, 24],
        [
            offset_of!(CTable, name),
            offset_of!(CTable, init),
            offset_of!(CTable, get_coll_info),
            offset_of!(CTable, finalize)
        ]
    );
    assert_eq!(size_of::<NvlDomainInfo>(), 12);
    assert_eq!(offset_of!(NvlDomainInfo, max_ranks_per_nvl_domain), 8);
    assert_eq!(size_of::<Constants>(), 1152);
    let at = [
        offset_of!(Constants, base_latencies),
        offset_of!(Constants, hw_latencies),
        offset_of!(Constants, ll_max_bws),
        offset_of!(Constants, per_ch_max_ring_ll128_bws),
        offset_of!(Constants, per_ch_max_tree_ll128_bws),
        offset_of!(Constants, per_ch_max_tree_bws),
        offset_of!(Constants, per_ch_max_nvls_tree_bws),
    ];
    assert_eq!(at, [0, 168, 672, 768, 864, 960, 1056]);
    let tuner = Tuner::built();
    for version in 1..=6 {
        let table = tuner.table(version);
        assert_eq!(tuner.name(version), c"Ringwatch", "v{version}");
        assert!(!table.init.is_null() && !table.get_coll_info.is_null() && !table.finalize.is_null());
        assert_eq!(
            table.spare, [0; 8],
            "v{version}: getChunkSize is absent, and so is what later versions add"
        );
    }
}

/// In a child: every version with contexts good and bad, without rules that apply.
fn nothing_is_changed() {
    let tuner = Tuner::built();
    for version in 1..=6 {
        let (result, context) = tuner.init(version, COMM, 8, 1, Some(logger()));
        assert_eq!(result, 0, "v{version}");
        for context in [context, 0, 1, context + 8, usize::MAX, std::ptr::from_ref(&tuner) as usize] {
            for bytes in [0, 1024, 1 << 20, usize::MAX] {
                let mut asked = Asked::all_reduce(bytes);
                tuner.ask(version, context, &mut asked);
                assert_eq!(asked, Asked::all_reduce(bytes), "v{version}");
            }
            tuner.finalize(version, context);
        }
    }
}

#[test]
fn without_rules_nothing_is_changed() {
    let Some(ran) = support::child::run("without_rules_nothing_is_changed") else {
        return nothing_is_changed();
    };
    let ran = ran.succeeded();
    assert!(!ran.output.contains("log "), "nobody asked for rules: {}", ran.output);
    assert!(!ran.dir.exists(), "a tuner alone makes no file");
}

/// In a child: this process's rank opens a communicator, and says what its calls get.
fn be_rank() {
    let number = |name: &str| std::env::var(name).unwrap().parse::<usize>().unwrap();
    let (rank, ranks, version) = (number("TEST_RANK"), number("TEST_RANKS"), number("TEST_VERSION"));
    let nodes = number("TEST_NODES");
    // Only ABI v4 says who a communicator is before the tuner's v5 does.
    let profiler = if version < 5 { 4 } else { version };
    if std::env::var_os("TEST_NO_PROFILER").is_none() {
        Plugin::built().init_with(profiler, COMM, c"pg", ranks as i32, rank as i32, None);
    }
    if std::env::var_os("TEST_DIES").is_some() {
        support::child::exit_at_once(9);
    }
    let tuner = Tuner::built();
    let begun = Instant::now();
    let (result, context) = tuner.init(version, COMM, ranks, nodes, Some(logger()));
    let seconds = begun.elapsed().as_secs();
    let mut texts = Vec::new();
    for bytes in [1024, 1 << 20, 1 << 30] {
        let mut asked = Asked::all_reduce(bytes);
        tuner.ask(version, context, &mut asked);
        assert_eq!(asked.costs[12..15], [-1.0; 3], "what is impossible stays impossible");
        assert!(asked.costs.iter().all(|c| *c >= -1.0), "nothing else becomes negative");
        texts.push(format!("{}/{}/{}", asked.winner(), asked.channels, asked.costs[3]));
    }
    eprintln!("result {result} after {seconds} s: {}", texts.join(" "));
    tuner.finalize(version, context);
}

/// With rules, without: the entry that wins, the channels, and the cost of RING with LL, at 1 KiB, 1 MiB and 1 GiB.
const TUNED: &str = "0/4/13 0/0/1000000000 0/0/13";
const DEFAULTS: &str = "0/0/13 0/0/13 0/0/13";

/// A job of processes, each of them a rank.
struct Job {
    folder: tempfile::TempDir,
    version: usize,
    nodes: usize,
}

impl Job {
    fn new(version: usize) -> Self {
        let folder = tempfile::Builder::new().tempdir_in("/dev/shm").unwrap();
        Job { folder, version, nodes: 1 }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Runs so many ranks, with the same rules; `change` makes one differ. What each wrote.
    fn run(&self, test: &str, ranks: usize, change: impl Fn(usize, &mut Command)) -> Vec<String> {
        self.start(test, ranks, change).into_iter().map(|(child, _folder)| written(child)).collect()
    }

    /// Starts them. Each has a folder, which goes with it.
    fn start(
        &self,
        test: &str,
        ranks: usize,
        change: impl Fn(usize, &mut Command),
    ) -> Vec<(Child, tempfile::TempDir)> {
        let rules = write_rules(&self.path("rules"), &rules());
        (0..ranks)
            .map(|rank| {
                let (mut command, folder) = support::child::command(test, &[]);
                command
                    .env("RINGWATCH_DIR", self.path("segments"))
                    .env("RINGWATCH_TUNE", &rules)
                    .env("TEST_RANK", rank.to_string())
                    .env("TEST_RANKS", ranks.to_string())
                    .env("TEST_VERSION", self.version.to_string())
                    .env("TEST_NODES", self.nodes.to_string())
                    .stdout(Stdio::piped())
                    .stderr(Stdio::piped());
                change(rank, &mut command);
                (command.spawn().unwrap(), folder)
            })
            .collect()
    }

    /// The outcome of the rules in each rank's segment.
    fn recorded(&self) -> Vec<u8> {
        let files = support::segment::in_dir(&self.path("segments"));
        let segments = files.iter().filter(|p| p.extension().is_some_and(|e| e == "seg"));
        segments.flat_map(|p| comms(p)).collect()
    }

    #[track_caller]
    fn left_no_roll(&self) {
        let left = std::fs::read_dir(self.path("segments")).unwrap().map(|e| e.unwrap().file_name());
        let rolls: Vec<_> = left.filter(|n| n.to_string_lossy().ends_with(".roll")).collect();
        assert!(rolls.is_empty(), "{rolls:?}");
    }
}

/// The text that a rank wrote until its end.
fn written(child: Child) -> String {
    String::from_utf8(child.wait_with_output().unwrap().stderr).unwrap()
}

fn comms(path: &Path) -> Vec<u8> {
    let recording = support::segment::Recording::read(path);
    recording.reader().comms().map(|c| c.tuned).collect()
}

#[track_caller]
fn all_say(outputs: &[String], what: &[&str]) {
    for (rank, output) in outputs.iter().enumerate() {
        for what in what {
            assert!(output.contains(what), "rank {rank} does not say {what:?}: {output}");
        }
    }
}

#[test]
fn ranks_with_the_same_rules_apply_them() {
    let test = "ranks_with_the_same_rules_apply_them";
    if support::child::is_child(test) {
        return be_rank();
    }
    for (version, ranks) in [(3, 2), (4, 2), (5, 2), (5, 8), (6, 3)] {
        let job = Job::new(version);
        let outputs = job.run(test, ranks, |_, _| {});
        all_say(&outputs, &[TUNED, "result 0 after 0 s", "all ranks agree", "communicator 00000000feedbeef"]);
        assert_eq!(job.recorded(), vec![tuned::AGREED; ranks], "v{version}");
        job.left_no_roll();
    }
}

#[test]
fn a_rank_that_differs_is_named_and_no_rank_applies_rules() {
    let test = "a_rank_that_differs_is_named_and_no_rank_applies_rules";
    if support::child::is_child(test) {
        return be_rank();
    }
    let job = Job::new(5);
    let other = write_rules(&job.path("other"), &rules()[1..]);
    let broken = job.path("broken");
    std::fs::write(&broken, "no rules").unwrap();
    for (file, said) in [
        (other.as_path(), "rank 3 has other rules"),
        (&broken, "rank 3 refuses its rule file"),
        (&job.path("nowhere"), "rank 3 cannot read its rule file"),
        (Path::new("/dev/zero"), "rank 3 refuses its rule file"),
    ] {
        let job = Job::new(5);
        let outputs = job.run(test, 4, |rank, command| {
            if rank == 3 {
                command.env("RINGWATCH_TUNE", file);
            }
        });
        all_say(&outputs, &[DEFAULTS, "result 0 after 0 s", said, "log 2 "]);
        assert_eq!(job.recorded(), [tuned::DIFFERENT; 4], "{said}");
        job.left_no_roll();
    }
}

#[test]
fn a_rank_without_rules_or_dead_is_waited_for_in_vain_and_not_long() {
    let test = "a_rank_without_rules_or_dead_is_waited_for_in_vain_and_not_long";
    if support::child::is_child(test) {
        return be_rank();
    }
    for dies in [false, true] {
        let job = Job::new(5);
        let begun = Instant::now();
        let outputs = job.run(test, 3, |rank, command| {
            command.env("RINGWATCH_TUNE_WAIT_MS", "2000");
            match (rank, dies) {
                (1, true) => command.env("TEST_DIES", "1"),
                (1, false) => command.env_remove("RINGWATCH_TUNE"),
                _ => command,
            };
        });
        assert!(begun.elapsed() < Duration::from_secs(30), "{outputs:?}");
        all_say(&[outputs[0].clone(), outputs[2].clone()], &[DEFAULTS, "result 0", "rank 1 takes no part"]);
        if !dies {
            all_say(&outputs[1..2], &[DEFAULTS, "result 0 after 0 s"]);
        }
        job.left_no_roll();
    }
}

/// Whenever a rank is killed, before it has come, while it waits or after the verdict, the others decide alike.
#[test]
fn whenever_a_rank_is_killed_the_others_decide_alike() {
    let test = "whenever_a_rank_is_killed_the_others_decide_alike";
    if support::child::is_child(test) {
        return be_rank();
    }
    for after_ms in (0..40).step_by(5) {
        let job = Job::new(5);
        let mut ranks = job.start(test, 4, |_, command| {
            command.env("RINGWATCH_TUNE_WAIT_MS", "300");
        });
        std::thread::sleep(Duration::from_millis(after_ms));
        let mut killed = ranks.remove(2);
        killed.0.kill().unwrap();
        killed.0.wait().unwrap();
        let outputs: Vec<_> = ranks.into_iter().map(|(child, _folder)| written(child)).collect();
        let follow = outputs.iter().filter(|o| o.contains(TUNED)).count();
        let refuse = outputs.iter().filter(|o| o.contains(DEFAULTS)).count();
        assert!((follow, refuse) == (3, 0) || (follow, refuse) == (0, 3), "after {after_ms} ms: {outputs:?}");
        job.left_no_roll();
    }
}

#[test]
fn a_required_agreement_fails_init_with_a_clear_error() {
    let test = "a_required_agreement_fails_init_with_a_clear_error";
    if support::child::is_child(test) {
        return be_rank();
    }
    let job = Job::new(6);
    let missing = job.path("missing");
    let outputs = job.run(test, 2, |rank, command| {
        command.env("RINGWATCH_TUNE_REQUIRE", "1");
        if rank == 0 {
            command.env("RINGWATCH_TUNE", &missing);
        }
    });
    all_say(
        &outputs,
        &["result 5", "rank 0 cannot read its rule file", "the communicator is not made", DEFAULTS],
    );
    let agreeing = Job::new(6).run(test, 2, |_, c| {
        c.env("RINGWATCH_TUNE_REQUIRE", "1");
    });
    all_say(&agreeing, &["result 0", TUNED]);
}

#[test]
fn where_ranks_cannot_agree_rules_stay_off_at_once() {
    let test = "where_ranks_cannot_agree_rules_stay_off_at_once";
    if support::child::is_child(test) {
        return be_rank();
    }
    for (version, nodes, profiler, said, code) in [
        (2, 1, true, "NCCL before 2.22", tuned::OLD_NCCL),
        (5, 2, true, "several nodes", tuned::NOT_AGREED),
        (4, 1, false, "NCCL before 2.28", tuned::NO_ID),
    ] {
        let job = Job { nodes, ..Job::new(version) };
        let outputs = job.run(test, 2, |_, command| {
            if !profiler {
                command.env("TEST_NO_PROFILER", "1");
            }
        });
        all_say(&outputs, &[DEFAULTS, "result 0 after 0 s", said]);
        assert_eq!(job.recorded(), if profiler { vec![code; 2] } else { Vec::new() });
    }
}

#[test]
fn a_directory_without_room_keeps_rules_off() {
    let test = "a_directory_without_room_keeps_rules_off";
    if support::child::is_child(test) {
        return be_rank();
    }
    let outputs = Job::new(5).run(test, 2, |_, c| {
        c.env("RINGWATCH_DIR", "/proc/nowhere");
    });
    all_say(&outputs, &[DEFAULTS, "result 0 after 0 s", "RINGWATCH_DIR"]);
}

/// Ranks that are threads of one process, as in a job of one process for all GPUs, communicator after communicator.
#[test]
fn threads_of_one_process_agree_as_well() {
    let test = "threads_of_one_process_agree_as_well";
    let rules_file = |dir: &Path| dir.join("rules");
    let Some(ran) = support::child::run_with(test, |command, folder| {
        let path = write_rules(&rules_file(folder), &rules());
        command.env("RINGWATCH_TUNE", path);
    }) else {
        let (tuner, plugin) = (Tuner::built(), Plugin::built());
        for comm in 0..20 {
            std::thread::scope(|s| {
                for rank in 0..4 {
                    s.spawn(move || {
                        plugin.init_with(5, comm, c"pg", 4, rank, None);
                        let (result, context) = tuner.init(5, comm, 4, 1, Some(logger()));
                        let mut asked = Asked::all_reduce(4096);
                        tuner.ask(5, context, &mut asked);
                        assert_eq!((result, asked.channels, asked.costs[0]), (0, 4, 0.0));
                        tuner.finalize(5, context);
                        let mut later = Asked::all_reduce(4096);
                        tuner.ask(5, context, &mut later);
                    });
                }
            });
        }
        return;
    };
    let ran = ran.succeeded();
    let segment = ran.segments().into_iter().find(|p| p.extension().is_some_and(|e| e == "seg")).unwrap();
    assert!(comms(&segment).iter().all(|t| *t == tuned::AGREED));
}

#[test]
fn answers_make_no_system_call() {
    let test = "answers_make_no_system_call";
    let Some(ran) = support::child::run_with(test, |command, folder| {
        command.env("RINGWATCH_TUNE", write_rules(&folder.join("rules"), &rules()));
    }) else {
        let (tuner, plugin) = (Tuner::built(), Plugin::built());
        let rank = move |rank| {
            plugin.init_with(5, COMM, c"pg", 2, rank, None);
            tuner.init(5, COMM, 2, 1, None).1
        };
        let context = std::thread::scope(|s| {
            s.spawn(move || rank(1));
            rank(0)
        });
        let (mut tuned, mut default) = (Asked::all_reduce(4096), Asked::all_reduce(1 << 40));
        for call in [
            libc::SYS_openat,
            libc::SYS_read,
            libc::SYS_pread64,
            libc::SYS_write,
            libc::SYS_mmap,
            libc::SYS_munmap,
            libc::SYS_nanosleep,
            libc::SYS_clock_nanosleep,
            libc::SYS_clock_gettime,
            libc::SYS_futex,
            libc::SYS_gettid,
            libc::SYS_sched_yield,
        ] {
            support::seccomp::on(call, None, support::seccomp::Then::Kill);
        }
        tuner.ask(5, context, &mut tuned);
        tuner.ask(5, context, &mut default);
        tuner.finalize(5, context);
        support::child::exit_at_once(if (tuned.channels, default.channels) == (4, 0) { 0 } else { 3 });
    };
    ran.succeeded();
}

#[test]
fn predicted_times_are_noted_where_no_rules_apply() {
    use ringwatch_wire::cost_log::{FILE_BYTES, RECORDS_MAX, records};
    use std::collections::BTreeSet;
    let test = "predicted_times_are_noted_where_no_rules_apply";
    let Some(ran) = support::child::run_with(test, |command, folder| {
        let file = folder.join("costs");
        std::fs::write(&file, vec![0; FILE_BYTES]).unwrap();
        command.env("RINGWATCH_TUNE_COSTS", &file);
    }) else {
        let tuner = Tuner::built();
        let (_, context) = tuner.init(5, COMM, 2, 1, None);
        let (_, larger) = tuner.init(5, COMM + 1, 8, 1, None);
        for context in [context, context, larger, context] {
            tuner.ask(5, context, &mut Asked::all_reduce(64));
        }
        let mut old = Asked::all_reduce(4096);
        old.costs.truncate(18);
        tuner.ask(3, context, &mut old);
        let mut odd = Asked::all_reduce(77);
        odd.costs.truncate(15);
        tuner.ask(5, context, &mut odd);
        for nth in 0..RECORDS_MAX {
            let mut asked = Asked::all_reduce(8192 + nth);
            tuner.ask(5, context, &mut asked);
            assert_eq!(asked, Asked::all_reduce(8192 + nth), "nothing is changed");
        }
        return;
    };
    let ran = ran.succeeded();
    let file = ran.bytes("costs");
    let noted: Vec<_> = records(&file).collect();
    let classes: BTreeSet<_> = noted.iter().map(|r| (r.collective, r.bytes, r.ranks, r.nodes)).collect();
    assert_eq!(classes.len(), noted.len(), "a class has one record");
    assert!(classes.contains(&(4, 64, 2, 1)) && classes.contains(&(4, 64, 8, 1)), "{classes:?}");
    let lost = u64::from_le_bytes(file[16..24].try_into().unwrap()) as usize;
    assert_eq!((noted.len() + lost, lost > 0), (RECORDS_MAX + 3, true), "what finds no room is counted");
    assert!(noted.len() > RECORDS_MAX / 2, "{} records", noted.len());
    let usual = Asked::all_reduce(0).costs;
    let of = |bytes: u64| noted.iter().find(|r| r.bytes == bytes).expect("a record");
    assert_eq!((of(4096).collective, &of(4096).costs_us[..18]), (4, &usual[..18]));
    assert_eq!(of(4096).costs_us[18..], [-1.0; 3], "NCCL before 2.23 has no PAT");
    assert_eq!(&of(8192).costs_us[..], &usual[..]);
    assert_eq!(records(&file[1..]).count(), 0, "no cost log");
}
