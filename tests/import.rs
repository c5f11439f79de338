//! Files of other tools: what the rules make of them. The dumps in `tests/data/flight_recorder` are real; PyTorch wrote them in
//! jobs of four ranks over Gloo. NCCL's form is built here from the fields that PyTorch documents, since no GPU is needed then.

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
const BEGAN_NS: u64 = 1_795_993_413_000_000_000;

/// When the real dumps were written, or later, in s since the epoch.
const WRITTEN_S: u64 = 1_796_000_000;

/// A copy of a job's real dumps, since files of a checkout have other times.
fn data(room: &Room, job: &str) -> PathBuf {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/flight_recorder").join(job);
    let to = room.path(job);
    std::fs::create_dir(&to).unwrap();
    for rank in 0..4 {
        let name = format!("trace_rank_{rank}");
        std::fs::copy(from.join(&name), to.join(&name)).unwrap();
        date(&to.join(&name), WRITTEN_S * 1_000 * MS);
    }
    to
}

fn date(path: &Path, unix_ns: u64) {
    let at = SystemTime::UNIX_EPOCH + Duration::from_nanos(unix_ns);
    std::fs::File::options().write(true).open(path).unwrap().set_modified(at).unwrap();
}

/// The open findings from warning on, and what the files do not say.
fn judged(dir: &Path) -> (Vec<Finding>, Vec<String>) {
    let import = Import::open(&[dir.to_owned()]).unwrap_or_else(|e| panic!("{e}"));
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
    let last = "the last call in the dump of rank 2 is AllGather with collective_seq_id 13 of default_pg, in forward (/opt/job/train.py:21)";
    assert!(has(&missing[0], last), "{:#?}", missing[0]);
    assert!(!missing[0].evidence.iter().any(|e| e.text.contains("gone") || e.text.contains("pid")));

    let (mismatch, _) = judged(&data(&room, "mismatch"));
    assert_eq!(kinds(&mismatch), [(Kind::Mismatch, vec![1], 13)]);
    assert!(has(
        &mismatch[0],
        "rank 1 called AllGather with collective_seq_id 14 of default_pg, in evaluate"
    ));
    assert!(has(
        &mismatch[0],
        "rank 0 called AllReduce with collective_seq_id 14 of default_pg, in reduce_grad"
    ));

    // Rank 3 stays away from the group of ranks 2 and 3, of which it is rank 1; ranks 0 and 1 wait for rank 2.
    let (stall, _) = judged(&data(&room, "stall"));
    assert_eq!(kinds(&stall), [(Kind::MissingRank, vec![1], 4)]);
    assert!(has(&stall[0], "rank 1 is job rank 3"), "{:#?}", stall[0]);

    let (circle, _) = judged(&data(&room, "circle"));
    assert_eq!(kinds(&circle), [(Kind::InterleavedCommunicators, vec![0, 1], 13)]);
    assert_eq!(judged(&data(&room, "healthy")), (vec![], vec![]));
}

#[test]
fn the_program_judges_dumps_and_says_what_is_wrong_with_them() {
    let room = Room::new();
    let diagnose = |path: &Path| run(room.ringwatch(["diagnose", "--import"]).arg(path));
    let (missing, healthy) = (data(&room, "missing"), data(&room, "healthy"));
    let said = diagnose(&missing);
    assert_eq!(said.code, Some(1));
    assert!(said.err.contains("until the newest file was written, 2026-11-30T00:53:20Z"), "{}", said.err);
    let title = "missing-rank: rank 2 in AllReduce of 4000 bytes (order 13, communicator 229defe491dab54f \"default_pg\")";
    assert!(said.out.starts_with(title), "{}", said.out);
    assert!(!said.out.contains("closed") && !said.out.contains("gone"), "{}", said.out);
    assert!(said.out.contains("ranks 0, 1, 3 issued it and have waited"), "{}", said.out);
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
    assert!(said.err.contains("there is no dump of rank 2"), "{}", said.err);

    let report = run(room.ringwatch(["report", "--import"]).arg(&healthy));
    assert_eq!((report.code, report.err.as_str()), (Some(0), ""));
    assert!(
        report.out.contains("ranks         4 in files") && report.out.contains("AllGather"),
        "{}",
        report.out
    );

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
        Job { dumps: (0..ranks).map(|r| (r, Vec::new())).collect(), groups, now_ns: BEGAN_NS }
    }

    fn record(&mut self, rank: u32, group: &str, name: &str, numbers: [u64; 2], state: State) {
        self.now_ns += MS;
        let t = self.now_ns;
        let (name_of_state, started, completed) = match state {
            Scheduled => ("scheduled", Value::Null, Value::Null),
            Started => ("started", json!(t + MS), Value::Null),
            Completed => ("completed", json!(t + MS), json!(t + 2 * MS)),
        };
        let is_transfer = name.starts_with("send") || name.starts_with("recv") || name == "coalesced";
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
            date(&path, self.now_ns + 60_000 * MS);
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
    assert_eq!(notes[0], "there is no dump of rank 3: their calls are not known");
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
