//! Files of other tools: what the rules make of them. The dumps in `tests/data/flight_recorder` are real; PyTorch wrote them in
//! jobs of four ranks over Gloo and over NCCL (two H200s). Other dumps are built here from the fields that PyTorch documents.

use crate::support::{Room, run};
use ringwatch::detect::Settings;
use ringwatch::import::Import;
use ringwatch::model::{Finding, Kind, Rank, Severity};
use ringwatch::runtime::Monitor;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

const MS: u64 = 1_000_000;
const BEGAN_NS: u64 = 1_790_000_000_000_000_000;

/// When the real dumps were written, or later, in s since the epoch.
const WRITTEN_S: u64 = 1_795_995_000;
const WRITTEN_OVER_NCCL_S: u64 = 1_796_007_500;

/// A copy of a job's real dumps, since files of a checkout have other times.
fn data(room: &Room, job: &str) -> PathBuf {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/flight_recorder").join(job);
    let to = room.path(job);
    std::fs::create_dir(&to).unwrap();
    for rank in 0..4 {
        let name = format!("trace_rank_{rank}");
        std::fs::copy(from.join(&name), to.join(&name)).unwrap();
        let written_s = if job.starts_with("nccl-") { WRITTEN_OVER_NCCL_S } else { WRITTEN_S };
        date(&to.join(&name), written_s * 1_000 * MS);
    }
    to
}

fn date(path: &Path, unix_ns: u64) {
    let at = SystemTime::UNIX_EPOCH + Duration::from_nanos(unix_ns);
    std::fs::File::options().write(true).open(path).unwrap().set_modified(at).unwrap();
}

/// The open findings from warning on, and what the files do not say.
fn judged(dir: &Path) -> (Vec<Finding>, Vec<String>) {
    let import = Import::open(&[dir.to_owned()], u64::MAX).unwrap_or_else(|e| panic!("{e}"));
    let now_ns = import.at_ns();
    let mut monitor = Monitor::new(import, Settings::default());
    monitor.step(now_ns);
    let mut findings = monitor.findings();
    findings.retain(|f| f.open && f.severity >= Severity::Warning);
    for finding in &mut findings {
        finding.evidence.extend(monitor.source().evidence(finding));
    }
    (findings, monitor.source().notes())
}

fn kinds(findings: &[Finding]) -> Vec<(Kind, Vec<u32>, u64)> {
    findings.iter().map(|f| (f.kind, f.ranks.iter().map(|r| r.0).collect(), f.operation.order)).collect()
}

fn has(finding: &Finding, text: &str) -> bool {
    finding.evidence.iter().any(|e| e.text.contains(text))
}

#[test]
fn real_dumps_name_the_rank_and_its_line_of_code() {
    let room = Room::new();
    let (missing, notes) = judged(&data(&room, "missing"));
    assert_eq!((kinds(&missing), notes), (vec![(Kind::MissingRank, vec![2], 13)], vec![]));
    let last = "the last call in the dump of rank 2 is all_gather (collective_seq_id 13 of default_pg), in forward (/opt/job/train.py:21)";
    assert!(has(&missing[0], last), "{:#?}", missing[0]);
    assert!(!missing[0].evidence.iter().any(|e| e.text.contains("gone") || e.text.contains("pid")));

    let (mismatch, _) = judged(&data(&room, "mismatch"));
    assert_eq!(kinds(&mismatch), [(Kind::Mismatch, vec![1], 13)]);
    assert!(has(&mismatch[0], "rank 1 called all_gather (collective_seq_id 14 of default_pg), in evaluate"));
    assert!(has(
        &mismatch[0],
        "rank 0 called all_reduce (collective_seq_id 14 of default_pg), in reduce_grad"
    ));

    // Rank 3 stays away from the group of ranks 2 and 3; ranks 0 and 1 wait for rank 2. Gloo does not list a group's ranks, so that they
    // have the numbers of the job.
    let (stall, _) = judged(&data(&room, "stall"));
    assert_eq!(kinds(&stall), [(Kind::MissingRank, vec![3], 4)]);
    assert!(has(&stall[0], "rank 3 is job rank 3"), "{:#?}", stall[0]);

    let (circle, _) = judged(&data(&room, "circle"));
    assert_eq!(kinds(&circle), [(Kind::InterleavedCommunicators, vec![0, 1], 13)]);
    assert_eq!(judged(&data(&room, "healthy")), (vec![], vec![]));
}

/// PyTorch's watchdog wrote these on two H200s, after a timeout.
#[test]
fn real_dumps_over_nccl_name_the_rank_and_its_line_of_code() {
    let room = Room::new();
    let (missing, notes) = judged(&data(&room, "nccl-missing"));
    assert_eq!((kinds(&missing), notes), (vec![(Kind::MissingRank, vec![2], 13)], vec![]));
    assert!(has(&missing[0], "the last call in the dump of rank 2 is recv 2<-1"), "{:#?}", missing[0]);

    let (mismatch, _) = judged(&data(&room, "nccl-mismatch"));
    assert_eq!(kinds(&mismatch), [(Kind::Mismatch, vec![1], 13)]);
    assert!(has(&mismatch[0], "in evaluate"), "{:#?}", mismatch[0]);

    // Ranks 0 and 1 wait for rank 3 in the all-gather, and rank 2 in the group of ranks 2 and 3, which it called somewhat later.
    let (stall, _) = judged(&data(&room, "nccl-stall"));
    assert_eq!(kinds(&stall), [(Kind::MissingRank, vec![3], 12)]);
    assert_eq!(stall[0].operation.bytes, Some(128), "the launch of transfers after it is no part of it");
    assert_eq!(judged(&data(&room, "nccl-healthy")), (vec![], vec![]));
}

#[test]
fn the_program_judges_dumps_and_says_what_is_wrong_with_them() {
    let room = Room::new();
    let diagnose = |path: &Path| run(room.ringwatch(["diagnose", "--import"]).arg(path));
    let (missing, healthy) = (data(&room, "missing"), data(&room, "healthy"));
    let said = diagnose(&missing);
    assert_eq!(said.code, Some(1));
    assert!(said.err.contains("counted until 2026-11-29T23:30:00Z"), "{}", said.err);
    let title = "missing-rank: rank 2 in AllReduce of 4000 bytes (order 13, communicator af5f2c60dae0c88f \"default_pg\")";
    assert!(said.out.starts_with(title), "{}", said.out);
    assert!(!said.out.contains("closed") && !said.out.contains("gone"), "{}", said.out);
    assert!(said.out.contains("ranks 0, 1, 3 issued it and have waited at most"), "{}", said.out);
    assert_eq!((diagnose(&healthy).code, diagnose(&healthy).out.trim()), (Some(0), "no findings"));

    // Without the dump of a rank nothing can be said of it.
    let three = room.path("three");
    std::fs::create_dir(&three).unwrap();
    for rank in [0, 1, 3] {
        let name = format!("trace_rank_{rank}");
        std::fs::copy(missing.join(&name), three.join(&name)).unwrap();
    }
    let said = diagnose(&three);
    assert_eq!(said.code, Some(2), "{}", said.out);
    assert!(said.err.contains("there is no dump of rank 2: its calls"), "{}", said.err);

    let report = run(room.ringwatch(["report", "--import"]).arg(&healthy));
    assert_eq!(report.code, Some(0));
    assert!(report.out.contains("4 in files") && report.out.contains("AllGather"), "{}", report.out);

    let wrong = |name: &str, bytes: &[u8]| {
        let path = room.path(name);
        std::fs::write(&path, bytes).unwrap();
        let said = diagnose(&path);
        assert_eq!((said.code, said.out.as_str()), (Some(2), ""));
        said.err
    };
    let code = wrong("trace_rank_0", b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00id\x85R.");
    assert!(code.contains("trace_rank_0: byte 2: instruction GLOBAL imports or runs code"), "{code}");
    assert!(wrong("trace_rank_1", b"hello").contains("neither a pickle nor a JSON object"));
    assert!(
        wrong("trace_rank_2", b"{\"version\": \"3.0\", \"entries\": []}").contains("2.0 to 2.10 can be read")
    );
    assert!(wrong("trace_rank_3", b"{\"version\": \"2.4\", ]").contains("line 1 column 20"));
    let unnamed = wrong("trace", &std::fs::read(healthy.join("trace_rank_0")).unwrap());
    assert!(unnamed.contains("does not end with a rank"), "{unnamed}");
    let twice = run(room.ringwatch(["diagnose", "--import"]).arg(&healthy).arg(&missing));
    assert!(twice.err.contains("is a dump of rank 0 too"), "{}", twice.err);
}

/// Dumps in NCCL's form, one of each rank.
struct Job {
    dumps: BTreeMap<u32, Vec<Value>>,
    groups: Vec<(&'static str, Vec<u32>)>,
    now_ns: u64,
    /// When each rank's dump was written, in ms after the last call.
    written_ms: BTreeMap<u32, i64>,
}

/// How far a call is.
#[derive(Clone, Copy)]
enum State {
    Scheduled,
    Started,
    Completed,
}

use State::{Completed, Scheduled, Started};

impl Job {
    /// `groups`: names and ranks.
    fn new(ranks: u32, groups: Vec<(&'static str, Vec<u32>)>) -> Self {
        Job {
            dumps: (0..ranks).map(|r| (r, Vec::new())).collect(),
            groups,
            now_ns: BEGAN_NS,
            written_ms: BTreeMap::new(),
        }
    }

    fn record(&mut self, rank: u32, group: &str, name: &str, numbers: [u64; 2], state: State) {
        self.now_ns += MS;
        let t = self.now_ns;
        let (name_of_state, started, completed) = match state {
            Scheduled => ("scheduled", Value::Null, Value::Null),
            Started => ("started", json!(t + MS), Value::Null),
            Completed => ("completed", json!(t + MS), json!(t + 2 * MS)),
        };
        let is_transfer = name.starts_with("send") || name.starts_with("recv");
        let entries = self.dumps.get_mut(&rank).unwrap();
        let sizes = if name == "coalesced" { json!([]) } else { json!([[64, 16]]) };
        entries.push(json!({
            "record_id": entries.len(), "pg_id": 0, "process_group": [group, group], "thread_id": "1",
            "thread_name": "python3", "collective_seq_id": numbers[0], "p2p_seq_id": numbers[1], "op_id": 1,
            "profiling_name": format!("nccl:{name}"), "time_created_ns": t, "input_sizes": sizes,
            "input_dtypes": ["BFloat16"], "output_sizes": sizes, "output_dtypes": ["BFloat16"],
            "state": name_of_state, "time_discovered_started_ns": started,
            "time_discovered_completed_ns": completed, "retired": matches!(state, Completed),
            "timeout_ms": 600_000, "is_p2p": is_transfer
        }));
    }

    /// All ranks of a group make a collective call.
    fn collective(&mut self, group: &str, name: &str, number: u64, states: &[State]) {
        let ranks = self.groups.iter().find(|(n, _)| *n == group).unwrap().1.clone();
        for (rank, state) in ranks.into_iter().zip(states) {
            self.record(rank, group, name, [number, 0], *state);
        }
    }

    fn write(&self, dir: &Path, without: &[u32]) {
        for (rank, entries) in self.dumps.iter().filter(|(r, _)| !without.contains(r)) {
            let of = |(name, ranks): &(&str, Vec<u32>)| {
                let about = json!({"name": name, "desc": name, "ranks": format!("{ranks:?}")});
                ranks.contains(rank).then(|| ((*name).to_owned(), about))
            };
            let groups: serde_json::Map<String, Value> = self.groups.iter().filter_map(of).collect();
            let dump = json!({
                "version": "2.10", "comm_lib_version": "2.28.9", "pg_config": groups, "entries": entries
            });
            let path = dir.join(format!("nccl_trace_rank_{rank}"));
            std::fs::write(&path, dump.to_string()).unwrap();
            let after_ms = self.written_ms.get(rank).copied().unwrap_or(60_000);
            date(&path, self.now_ns.saturating_add_signed(after_ms * MS as i64));
        }
    }

    fn judged(&self, without: &[u32]) -> (Vec<Finding>, Vec<String>) {
        let room = Room::new();
        let dir = room.path("dumps");
        std::fs::create_dir(&dir).unwrap();
        self.write(&dir, without);
        judged(&dir)
    }
}

#[test]
fn a_gpu_that_does_not_start_is_told_from_a_rank_that_does_not_call() {
    let mut job = Job::new(4, vec![("0", vec![0, 1, 2, 3])]);
    for number in 1..20 {
        job.collective("0", "all_reduce", number, &[Completed; 4]);
    }
    job.collective("0", "all_reduce", 20, &[Started, Started, Scheduled, Started]);
    assert_eq!(kinds(&job.judged(&[]).0), [(Kind::NotStarted, vec![2], 19)]);

    let mut job = Job::new(4, vec![("0", vec![0, 1, 2, 3])]);
    for number in 1..20 {
        job.collective("0", "all_reduce", number, &[Completed; 4]);
    }
    job.collective("0", "all_reduce", 20, &[Started, Started, Started]);
    assert_eq!(kinds(&job.judged(&[]).0), [(Kind::MissingRank, vec![3], 19)]);
    // Nothing is known of the rank without a dump, and nothing is said of it.
    let (findings, notes) = job.judged(&[3]);
    assert_eq!((kinds(&findings), notes.len()), (vec![], 1), "{findings:#?}");
    assert_eq!(notes[0], "there is no dump of rank 3: its calls are not known");
}

#[test]
fn uneven_calls_of_one_operation_are_no_mismatch() {
    let mut job = Job::new(2, vec![("0", vec![0, 1])]);
    job.collective("0", "all_to_all", 1, &[Completed; 2]);
    job.dumps.get_mut(&1).unwrap()[0]["input_sizes"] = json!([[3, 16]]);
    job.collective("0", "_all_gather_base", 2, &[Completed; 2]);
    assert_eq!(kinds(&job.judged(&[]).0), []);
    job.dumps.get_mut(&1).unwrap()[1]["input_sizes"] = json!([[3, 16]]);
    assert_eq!(kinds(&job.judged(&[]).0), [(Kind::Mismatch, vec![0, 1], 1)]);
}

#[test]
fn transfers_of_a_launch_are_as_far_as_the_launch() {
    let pipeline = |last: State| {
        let mut job = Job::new(3, vec![("0", vec![0, 1, 2]), ("pipeline", vec![0, 1, 2])]);
        for number in 1..6 {
            let state = if number < 5 { Completed } else { last };
            for (rank, name) in [(0, "send 0->1"), (1, "recv 1<-0"), (1, "send 1->2")] {
                job.record(rank, "pipeline", name, [0, number], Scheduled);
            }
            // In the last step rank 2 does not receive.
            if number < 5 || matches!(last, Completed) {
                job.record(2, "pipeline", "recv 2<-1", [0, number], Scheduled);
                job.record(2, "pipeline", "coalesced", [0, number], state);
            }
            job.record(0, "pipeline", "coalesced", [0, number], Completed);
            job.record(1, "pipeline", "coalesced", [0, number], state);
        }
        job
    };
    assert_eq!(kinds(&pipeline(Completed).judged(&[]).0), []);
    let job = pipeline(Started);
    let (findings, notes) = job.judged(&[]);
    assert_eq!((kinds(&findings), notes), (vec![(Kind::SendWithoutReceive, vec![2], 4)], vec![]));
    assert_eq!(findings[0].ranks, [Rank(2)]);

    // Where older calls are gone, the number of a transfer is not known.
    let mut short = pipeline(Started);
    short.dumps.values_mut().for_each(|entries| drop(entries.remove(0)));
    let (findings, notes) = short.judged(&[]);
    assert_eq!(kinds(&findings), []);
    assert!(notes.iter().any(|n| n.contains("sends and receives are left out")), "{notes:?}");
}

/// A transfer outside of a launch has the number of transfers that later launches of collectives have.
#[test]
fn a_launch_belongs_to_the_calls_right_before_it() {
    let mut job = Job::new(2, vec![("0", vec![0, 1])]);
    for rank in 0..2 {
        let transfer = if rank == 0 { "send 0->1" } else { "recv 1<-0" };
        job.record(rank, "0", transfer, [0, 1], if rank == 0 { Scheduled } else { Completed });
        for number in 1..5 {
            job.record(rank, "0", "all_reduce", [number, 1], Scheduled);
            job.record(rank, "0", "coalesced", [number, 1], Completed);
        }
    }
    // The all-reduces have ended, and so has all that was called before.
    assert_eq!(kinds(&job.judged(&[]).0), []);
    job.record(0, "0", "all_reduce", [5, 1], Scheduled);
    job.record(0, "0", "coalesced", [5, 1], Started);
    assert_eq!(kinds(&job.judged(&[]).0), [(Kind::MissingRank, vec![1], 4)]);
}

#[test]
fn groups_of_one_name_with_other_ranks_are_other_groups() {
    let mut job = Job::new(4, vec![("tp", vec![0, 1])]);
    for number in 1..4 {
        job.collective("tp", "all_reduce", number, &[Completed; 2]);
    }
    job.groups[0].1 = vec![2, 3];
    job.collective("tp", "broadcast", 1, &[Completed; 2]);
    let room = Room::new();
    let dir = room.path("dumps");
    std::fs::create_dir(&dir).unwrap();
    job.write(&dir, &[0, 1]);
    job.groups[0].1 = vec![0, 1];
    job.write(&dir, &[2, 3]);
    let (findings, notes) = judged(&dir);
    assert_eq!((kinds(&findings), notes), (vec![], vec![]));
}

fn all_ranks(ranks: u32, calls: u64) -> Job {
    let mut job = Job::new(ranks, vec![("0", (0..ranks).collect())]);
    (1..=calls).for_each(|n| job.collective("0", "all_reduce", n, &vec![Completed; ranks as usize]));
    job
}

/// The last entry of a rank, to be changed.
fn last(job: &mut Job, rank: u32) -> &mut Value {
    job.dumps.get_mut(&rank).unwrap().last_mut().unwrap()
}

#[test]
fn a_launch_of_several_collectives_is_one_operation() {
    let mut job = all_ranks(3, 5);
    for rank in 0..3 {
        // PyTorch records the calls, and then their launch, with one number.
        for name in ["broadcast", "all_reduce", "ALLGATHER_coalesced"] {
            let state = if name == "ALLGATHER_coalesced" { Completed } else { Scheduled };
            job.record(rank, "0", name, [6, 0], state);
        }
    }
    job.collective("0", "all_reduce", 7, &[Started, Started]);
    assert_eq!(kinds(&job.judged(&[]).0), [(Kind::MissingRank, vec![2], 6)]);
}

#[test]
fn a_barrier_over_gloo_is_no_all_reduce() {
    let mut job = all_ranks(3, 4);
    job.collective("0", "all_reduce", 5, &[Scheduled; 3]);
    for entries in job.dumps.values_mut() {
        entries.iter_mut().for_each(|e| e["profiling_name"] = json!("gloo:all_reduce"));
    }
    let barrier = last(&mut job, 2);
    barrier["profiling_name"] = json!("gloo:barrier");
    (barrier["input_sizes"], barrier["output_sizes"]) = (json!([]), json!([]));
    assert_eq!(kinds(&job.judged(&[]).0), [(Kind::Mismatch, vec![2], 4)]);
}

#[test]
fn numbers_that_are_left_out_hide_no_rank() {
    // monitored_barrier takes a number, and leaves no call.
    let mut job = all_ranks(3, 5);
    job.collective("0", "all_reduce", 8, &[Completed; 3]);
    job.collective("0", "all_reduce", 11, &[Started, Started]);
    assert_eq!(kinds(&job.judged(&[]).0), [(Kind::MissingRank, vec![2], 6)]);
}

#[test]
fn a_buffer_that_has_lost_a_groups_calls_hides_no_rank() {
    let mut job = Job::new(4, vec![("dp", vec![0, 1, 2, 3]), ("tp", vec![2, 3])]);
    (1..=3).for_each(|n| job.collective("dp", "all_reduce", n, &[Completed; 4]));
    for number in 1..=20 {
        let states = if number < 20 { [Completed; 2] } else { [Started, Scheduled] };
        job.collective("tp", "all_reduce", number, if number < 20 { &states } else { &states[..1] });
        if number == 10 {
            job.collective("dp", "all_reduce", 4, &[Started, Started]);
        }
    }
    // Rank 3 does not come to the tensor group, and rank 2 waits there; the buffers of both have their newest calls.
    for rank in [2, 3] {
        let entries = job.dumps.get_mut(&rank).unwrap();
        drop(entries.drain(..entries.len() - 12));
    }
    assert_eq!(kinds(&job.judged(&[]).0), [(Kind::MissingRank, vec![3], 3)]);
}

#[test]
fn the_root_of_a_broadcast_says_nothing_of_the_others() {
    let mut job = all_ranks(4, 5);
    // The root is through alone, and so is who has received.
    job.collective("0", "broadcast", 6, &[Completed, Completed]);
    job.record(3, "0", "broadcast", [6, 0], Completed);
    job.collective("0", "all_reduce", 7, &[Started, Started]);
    job.record(3, "0", "all_reduce", [7, 0], Started);
    let (findings, _) = job.judged(&[]);
    let kinds = kinds(&findings);
    assert_eq!(kinds.len(), 1, "{kinds:?}");
    assert!(kinds[0].0 == Kind::MissingRank && kinds[0].1 == [2], "{kinds:?}");
}

#[test]
fn a_group_that_is_made_again_is_another_one() {
    let mut job = all_ranks(3, 9);
    job.collective("0", "all_reduce", 1, &[Completed; 3]);
    job.collective("0", "all_reduce", 2, &[Started, Started]);
    for entries in job.dumps.values_mut() {
        entries.iter_mut().skip(9).for_each(|e| e["pg_id"] = json!(1));
    }
    assert_eq!(kinds(&job.judged(&[]).0), [(Kind::MissingRank, vec![2], 1)]);
}

#[test]
fn a_call_over_gloo_that_failed_is_not_finished() {
    let mut job = all_ranks(3, 4);
    job.collective("0", "all_reduce", 5, &[Scheduled, Scheduled]);
    for entries in job.dumps.values_mut() {
        for e in entries {
            e["profiling_name"] = json!("gloo:all_reduce");
            (e["state"], e["retired"]) = (json!("scheduled"), json!(true));
        }
    }
    assert_eq!(kinds(&job.judged(&[]).0), [(Kind::MissingRank, vec![2], 4)]);
}

#[test]
fn healthy_dumps_of_different_moments_accuse_nobody() {
    let mut job = all_ranks(3, 40);
    // Rank 0 wrote its dump after a few calls, and the others went on.
    job.dumps.get_mut(&0).unwrap().truncate(20);
    last(&mut job, 0)["state"] = json!("started");
    job.written_ms = [(0, -58), (1, 2), (2, 40_000)].into();
    assert_eq!(kinds(&job.judged(&[]).0), []);
    // A rank that has called nothing has no entries in JSON.
    let mut job = all_ranks(3, 0);
    job.collective("0", "all_reduce", 1, &[Scheduled, Scheduled]);
    let room = Room::new();
    let dir = room.path("dumps");
    std::fs::create_dir(&dir).unwrap();
    job.write(&dir, &[]);
    let path = dir.join("nccl_trace_rank_2");
    let mut dump: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    dump.as_object_mut().unwrap().remove("entries");
    std::fs::write(&path, dump.to_string()).unwrap();
    date(&path, job.now_ns + 60_000 * MS);
    assert_eq!(kinds(&judged(&dir).0), [(Kind::MissingRank, vec![2], 0)]);
}

#[test]
fn lists_of_different_sizes_and_receives_from_anybody_are_read() {
    let mut job = all_ranks(2, 3);
    job.collective("0", "all_gather", 4, &[Completed; 2]);
    for rank in 0..2 {
        last(&mut job, rank)["input_sizes"] = json!([[4], [5 - rank]]);
    }
    job.record(0, "0", "recv 0<-?", [4, 1], Completed);
    let (findings, notes) = job.judged(&[]);
    assert_eq!(kinds(&findings), []);
    assert!(notes.iter().any(|n| n.starts_with("1 sends and receives are left out")), "{notes:?}");
}

#[test]
fn the_rank_is_at_the_end_of_a_files_name() {
    let room = Room::new();
    let dir = room.path("dumps");
    let mut job = all_ranks(2, 3);
    job.collective("0", "all_reduce", 4, &[Started]);
    std::fs::create_dir(&dir).unwrap();
    job.write(&dir, &[]);
    // Prefixes that end with a dot, links, and files that are no dumps.
    std::fs::rename(dir.join("nccl_trace_rank_0"), room.path("other")).unwrap();
    std::os::unix::fs::symlink(room.path("other"), dir.join("fr_v2.0")).unwrap();
    std::fs::rename(dir.join("nccl_trace_rank_1"), dir.join("fr_v2.1")).unwrap();
    std::fs::write(dir.join("meta.json"), "{\"job\": 7}").unwrap();
    std::fs::write(dir.join("notes.txt"), "hello").unwrap();
    std::fs::create_dir(dir.join("host0")).unwrap();
    let (findings, notes) = judged(&dir);
    assert_eq!((kinds(&findings), notes.len()), (vec![(Kind::MissingRank, vec![1], 3)], 3), "{notes:?}");
    std::fs::write(dir.join("fr_v2.2"), "").unwrap();
    assert!(
        Import::open(&[dir], u64::MAX)
            .unwrap_err()
            .to_string()
            .contains("fr_v2.2: it is empty: the dump was cut off")
    );
}
