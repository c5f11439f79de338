//! `ringwatch attach`, with answers in the layout of NCCL 2.28.9's RAS, served by a thread. `tests/gpu/attach.py` asks real jobs.

use crate::support::{Room, Said, run};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::sync::{Arc, Mutex};
use std::thread;

/// RAS, as NCCL speaks: a greeting, the format, and one answer a connection.
struct Ras {
    address: String,
    /// The requests of each connection.
    asked: Arc<Mutex<Vec<String>>>,
}

impl Ras {
    /// Answers with these texts, the last one again and again.
    fn start(answers: Vec<String>) -> Self {
        Self::at("127.0.0.1:0", answers)
    }

    fn at(address: &str, answers: Vec<String>) -> Self {
        let listener = TcpListener::bind(address).unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&asked);
        thread::spawn(move || {
            for (n, stream) in listener.incoming().enumerate() {
                let mut to = stream.unwrap();
                let mut lines = BufReader::new(to.try_clone().unwrap()).lines();
                let mut requests = Vec::new();
                while let Some(Ok(line)) = lines.next() {
                    requests.push(line.clone());
                    let said = match line.as_str() {
                        "CLIENT PROTOCOL 2" => "SERVER PROTOCOL 2\n",
                        "SET FORMAT json" => "OK\n",
                        _ => &answers[n.min(answers.len() - 1)],
                    };
                    to.write_all(said.as_bytes()).unwrap();
                    if line.ends_with("STATUS") {
                        break;
                    }
                }
                seen.lock().unwrap().push(requests.join(" | "));
            }
        });
        Ras { address, asked }
    }
}

/// A rank: its process, and the all-gathers and all-reduces that it has launched; absent where it does not answer.
type Rank = (u32, Option<(u64, u64)>);

/// RAS's answer about some communicators.
fn answer(communicators: &[&[Rank]]) -> String {
    let answering = |(rank, (pid, counts)): (usize, &Rank)| {
        let (gathers, reduces) = (*counts)?;
        Some(format!(
            "        {{\n          \"rank\": {rank},\n          \"host\": \"127.0.0.1\",\n          \"pid\": {pid},\n          \"cuda_dev\": {rank},\n          \"nvml_dev\": {rank},\n          \"status\": {{\n            \"init_state\": 0,\n            \"async_error\": 0,\n            \"finalize_called\": false,\n            \"destroy_flag\": false,\n            \"abort_flag\": false\n          }},\n          \"collective_counts\": {{\n            \"Broadcast\": 0,\n            \"AllGather\": {gathers},\n            \"AllReduce\": {reduces}\n          }}\n        }}"
        ))
    };
    // The comma behind "nvml_dev" is missing there.
    let silent = |(rank, (pid, counts)): (usize, &Rank)| {
        counts.is_none().then(|| format!(
            "        {{\n          \"rank\": {rank},\n          \"host\": \"127.0.0.1\",\n          \"pid\": {pid},\n          \"cuda_dev\": {rank},\n          \"nvml_dev\": {rank}\n          \"status\": {{\n            \"unresponsive\": true,\n            \"considered_dead\": false\n          }}\n        }}"
        ))
    };
    let communicator = |(n, ranks): (usize, &&[Rank])| {
        let there: Vec<String> = ranks.iter().enumerate().filter_map(answering).collect();
        let missing: Vec<String> = ranks.iter().enumerate().filter_map(silent).collect();
        format!(
            "    {{\n      \"hash\": \"0x{:016x}\",\n      \"secondary_hash\": \"0x1:0x{n:x}\",\n      \"size\": {},\n      \"ranks_count\": {},\n      \"missing_ranks_count\": {},\n      \"ranks\": [\n{}\n      ],\n      \"missing_ranks\": [\n{}\n      ]\n    }}",
            0xa134_9768_e951_7ed7 + n as u64,
            ranks.len(),
            there.len(),
            missing.len(),
            there.join(",\n"),
            missing.join(",\n")
        )
    };
    let all: Vec<String> = communicators.iter().enumerate().map(communicator).collect();
    format!(
        "{{\n  \"nccl_version\": \"2.28.9\",\n  \"cuda_runtime_version\": 13000,\n  \"communicators_count\": {},\n  \"communicators\": [\n{}\n  ],\n  \"ras\": {{\n    \"collection_time_sec\": 0.000,\n    \"timeouts_count\": 0\n  }}\n}}\n",
        all.len(),
        all.join(",\n")
    )
}

/// Processes that do not exist.
const PIDS: [u32; 4] = [4_194_301, 4_194_302, 4_194_303, 4_194_304];

/// A communicator of four ranks, with these counts.
fn world(counts: [Option<(u64, u64)>; 4]) -> Vec<Rank> {
    PIDS.into_iter().zip(counts).collect()
}

fn attach(room: &Room, address: &str, more: &[&str]) -> Said {
    run(room.ringwatch(["attach", "--seconds", "1", "--ras", address]).args(more))
}

/// The first finding about a job in which nothing moves.
fn found(answer: String) -> (Value, Said) {
    let room = Room::new();
    let ras = Ras::start(vec![answer]);
    let said = attach(&room, &ras.address, &["--json"]);
    assert_eq!(said.code, Some(1), "{} {}", said.out, said.err);
    let finding: Value = serde_json::from_str(said.out.lines().next().expect("a finding")).unwrap();
    assert_eq!(*ras.asked.lock().unwrap(), ["CLIENT PROTOCOL 2 | SET FORMAT json | VERBOSE STATUS"; 2]);
    (finding, said)
}

/// A process that sleeps, with NCCL among its files, as far as anybody sees.
fn sleeper(room: &Room) -> std::process::Command {
    let program = room.path("libnccl-sleep");
    std::fs::copy("/bin/sleep", &program).unwrap();
    let mut command = std::process::Command::new(program);
    command.arg("60");
    command
}

fn evidence(finding: &Value) -> String {
    let all = finding["evidence"].as_array().unwrap().iter();
    all.map(|e| e["text"].as_str().unwrap()).collect::<Vec<_>>().join("\n")
}

#[test]
fn the_rank_that_lags_is_named_with_its_process() {
    let same = Some((5, 20));
    let pair: &[Rank] = &[(PIDS[0], same), (PIDS[1], same)];
    for (counts, kind, rank) in [
        ([same, same, Some((5, 19)), same], "missing-rank", 2),
        ([same, Some((6, 19)), same, same], "mismatch", 1),
    ] {
        let (finding, said) = found(answer(&[pair, &world(counts)]));
        assert_eq!((&finding["kind"], &finding["ranks"]), (&Value::from(kind), &serde_json::json!([rank])));
        let text = evidence(&finding);
        assert!(text.contains("no rank of the communicator launched anything for 1."), "{text}");
        assert!(text.contains(&format!("rank {rank} is pid {} on host 127.0.0.1", PIDS[rank])), "{text}");
        assert!(text.contains(&format!("the number {} can be seen", PIDS[rank])), "{text}");
        assert!(said.err.contains("NCCL 2.28.9, 2 communicators, the largest has 4 ranks"), "{}", said.err);
    }
}

#[test]
fn a_process_that_does_not_answer_is_named_and_looked_at() {
    let room = Room::new();
    let mut stopped = sleeper(&room).spawn().unwrap();
    let pid = rustix::process::Pid::from_child(&stopped);
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    let same = Some((5, 20));
    let ranks = [(PIDS[0], same), (PIDS[1], same), (stopped.id(), None), (PIDS[3], same)];
    let (finding, _) = found(answer(&[&ranks]));
    stopped.kill().unwrap();
    stopped.wait().unwrap();
    assert_eq!((&finding["kind"], &finding["ranks"][0]), (&Value::from("missing-rank"), &Value::from(2)));
    assert_eq!(finding["cause"]["kind"], "stopped", "{finding:#}");
    let text = evidence(&finding);
    assert!(text.contains("it does not answer RAS") && text.contains("is stopped by a signal"), "{text}");
}

#[test]
fn a_job_that_goes_on_has_no_finding_and_one_that_stands_still_alike_cannot_be_told() {
    let room = Room::new();
    let (before, after) = (world([Some((5, 20)); 4]), world([Some((5, 70)); 4]));
    let ras = Ras::start(vec![answer(&[&before]), answer(&[&after])]);
    let said = attach(&room, &ras.address, &[]);
    assert_eq!((said.code, &*said.out), (Some(0), "no findings\n"), "{}", said.err);
    let mut child = sleeper(&room).spawn().unwrap();
    let mut idle = before;
    idle[0].0 = child.id();
    let ras = Ras::start(vec![answer(&[&idle])]);
    let said = attach(&room, &ras.address, &[]);
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(said.code, Some(2), "{} {}", said.out, said.err);
    assert!(said.out.starts_with("no rank lags, and nothing is launched"), "{}", said.out);
    assert!(said.err.contains("RAS cannot tell these ranks apart"), "{}", said.err);
    let other = format!("process {}, {}, {}: cannot be seen from here", PIDS[1], PIDS[2], PIDS[3]);
    assert!(said.err.contains(&other), "{}", said.err);
    assert!(
        said.err.contains(&format!("process {}: in the kernel: libnccl-sleep in clock_nanosleep", idle[0].0)),
        "{}",
        said.err
    );
}

#[test]
fn what_is_no_ras_is_said_with_what_to_do() {
    let room = Room::new();
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let said = attach(&room, &closed, &[]);
    assert!(said.code == Some(2) && said.err.contains("Connection refused"), "{}", said.err);
    assert!(said.err.contains("ringwatch attach PID") && said.err.contains(&closed), "{}", said.err);
    let stranger = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = stranger.local_addr().unwrap().to_string();
    thread::spawn(move || {
        for stream in stranger.incoming() {
            let mut stream = stream.unwrap();
            stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
            drop(stream.read(&mut [0; 64]));
        }
    });
    let said = attach(&room, &address, &[]);
    assert!(said.code == Some(2) && said.err.contains("no RAS of NCCL answers there"), "{}", said.err);
    let ras = Ras::start(vec!["{\"communicators\": 7}".to_owned()]);
    let said = attach(&room, &ras.address, &[]);
    assert!(said.code == Some(2) && said.err.contains("its status cannot be read"), "{}", said.err);
    let said = run(&mut room.ringwatch(["attach", "no-such-job"]));
    assert!(said.code == Some(2) && said.err.contains("SLURM_JOB_ID"), "{}", said.err);
}

#[test]
fn a_job_is_found_by_its_name_and_its_address_in_its_environment() {
    let room = Room::new();
    let lagging = |pid| {
        let mut ranks = world([Some((5, 20)), Some((5, 20)), Some((5, 19)), Some((5, 20))]);
        ranks[2].0 = pid;
        answer(&[&ranks])
    };
    // The address has to be known before the process, and the process before the answer.
    let place = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let mut child = sleeper(&room);
    child.env("SLURM_JOB_ID", "ringwatch-test-job").env("NCCL_RAS_ADDR", &place);
    let mut child = child.spawn().unwrap();
    let ras = Ras::at(&place, vec![lagging(child.id())]);
    let said = run(&mut room.ringwatch(["attach", "ringwatch-test-job", "--seconds", "1"]));
    let by_pid = run(&mut room.ringwatch(["attach", &child.id().to_string(), "--seconds", "1"]));
    let other = Ras::start(vec![lagging(PIDS[2])]);
    let of_another = attach(&room, &other.address, &[&child.id().to_string()]);
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(said.code, Some(1), "{}", said.err);
    assert!(said.out.starts_with("missing-rank: rank 2 in AllReduce"), "{}", said.out);
    assert!(said.out.contains("sleeps in the kernel"), "{}", said.out);
    assert_eq!((by_pid.code, &by_pid.out), (said.code, &said.out), "{}", by_pid.err);
    assert!(
        of_another.code == Some(2) && of_another.err.contains("speaks for another job"),
        "{}",
        of_another.err
    );
    drop(ras);
}

#[test]
fn answers_that_were_saved_are_judged_by_their_times() {
    let room = Room::new();
    let lagging = answer(&[&world([Some((5, 20)), Some((5, 20)), Some((5, 19)), Some((5, 20))])]);
    let at = |time: &str| {
        lagging.replace(
            "  \"cuda_runtime",
            &format!("  \"timestamp\": \"2026-11-30 {time}\",\n  \"cuda_runtime"),
        )
    };
    let (old, new) = (room.path("old.json"), room.path("new.json"));
    std::fs::write(&old, at("21:35:44")).unwrap();
    std::fs::write(&new, at("21:36:14")).unwrap();
    let said = run(room.ringwatch(["attach", "--saved"]).args([&old, &new]));
    assert_eq!(said.code, Some(1), "{}", said.err);
    assert!(said.out.starts_with("missing-rank: rank 2 in AllReduce"), "{}", said.out);
    assert!(said.out.contains("launched anything for 30.0 s"), "{}", said.out);
    let said = run(room.ringwatch(["attach", "--saved"]).args([&new, &old]));
    assert!(said.code == Some(2) && said.err.contains("name the older file first"), "{}", said.err);
    std::fs::write(&new, "{\"communicators\": [").unwrap();
    let said = run(room.ringwatch(["attach", "--saved"]).args([&old, &new]));
    assert!(
        said.code == Some(2) && said.err.contains("new.json: it is no answer of NCCL's RAS in JSON: EOF"),
        "{}",
        said.err
    );
}
