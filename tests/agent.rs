//! The agent, as a daemon: a recorded job through the real plugin, and everybody who may ask about it.

use crate::support;
use crate::support::agent::{Agent, diagnosed, socket};
use crate::support::{Play, Players, Room, assert_missing_rank, findings, opened, run, until};
use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::time::Duration;

#[test]
fn a_hang_is_told_and_shown_to_who_asks() {
    let room = Room::new();
    let players = Players::start(&room, Play::of("missing-rank").hold(60));
    let agent = Agent::start(&room, &[]);
    let found = findings(&diagnosed(&room));
    assert_missing_rank(&found);
    assert_eq!(agent.get("/readyz"), (200, "ok\n".to_owned()));
    assert_eq!(agent.get("/livez"), (200, "ok\n".to_owned()));
    assert_eq!(agent.get("/nothing").0, 404);
    let socket = socket(&room);
    let top = run(&mut room.ringwatch(["top", "--once", "--agent", socket.to_str().unwrap()]));
    assert_eq!(top.code, Some(0), "{}", top.err);
    for part in ["agent ", "missing-rank: rank 3 in AllReduce", "4 alive", "3 started, 1 not issued (rank 3)"]
    {
        assert!(top.out.contains(part), "{part} in {}", top.out);
    }
    let report = run(&mut room.ringwatch(["report", "--agent", socket.to_str().unwrap()]));
    assert_eq!(report.code, Some(0), "{}", report.err);
    for part in
        ["agent ", "4 running, 0 gone", "missing-rank: rank 3 in AllReduce", "AllReduce         2 MiB"]
    {
        assert!(report.out.contains(part), "{part} in {}", report.out);
    }
    // Its age is that of the hang, not of the machine.
    let age = top.out.split_once("open for ").unwrap().1.lines().next().unwrap();
    assert!(age.trim_end().ends_with(" s"), "{age}");
    let (told, code) = agent.end();
    assert_eq!(code, Some(0));
    assert_missing_rank(&opened(&told));
    assert!(!socket.exists(), "its socket goes with it");
    drop(players);
}

#[test]
fn an_agent_that_is_killed_and_started_again_says_the_same() {
    let room = Room::new();
    let players = Players::start(&room, Play::of("missing-rank").hold(60));
    let first = Agent::start(&room, &[]);
    let before = findings(&diagnosed(&room));
    first.kill();
    assert!(socket(&room).exists(), "left behind");
    let second = Agent::start(&room, &[]);
    let after = findings(&diagnosed(&room));
    assert_missing_rank(&after);
    assert_eq!(before[0].get("id").text(), after[0].get("id").text());
    assert_eq!(second.end().1, Some(0));
    drop(players);
}

#[test]
fn two_agents_do_not_share_a_socket() {
    let room = Room::new();
    let agent = Agent::start(&room, &[]);
    let path = format!("socket.path={}", socket(&room).display());
    let said = run(&mut room.ringwatch(["agent", "--set", &path, "--set", "http.listen=null"]));
    assert_eq!(said.code, Some(2), "{}", said.out);
    assert!(said.err.contains("agent.sock: another agent serves it"), "{}", said.err);
    assert_eq!(agent.end().1, Some(0));
}

#[test]
fn settings_are_read_anew_and_wrong_ones_change_nothing() {
    let room = Room::new();
    let file = room.path("agent.yaml");
    // So patient that it would say nothing for an hour.
    fs::write(&file, "detect:\n  patience_ms: 3600000\n").unwrap();
    let agent = Agent::start(&room, &["--config", file.to_str().unwrap()]);
    let players = Players::start(&room, Play::of("missing-rank").hold(60));
    fs::write(&file, "detect:\n  patience: 1\n").unwrap();
    agent.signal(rustix::process::Signal::HUP);
    let line = agent.says("the settings stay as they were");
    assert!(line.contains("agent.yaml:2:3"), "{line}");
    fs::write(&file, "").unwrap();
    agent.signal(rustix::process::Signal::HUP);
    assert_missing_rank(&findings(&diagnosed(&room)));
    assert_eq!(agent.end().1, Some(0));
    drop(players);
}

#[test]
fn the_service_manager_hears_when_it_is_ready_and_when_it_ends() {
    let room = Room::new();
    let path = room.path("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let agent = Agent::with(&room, &[], &[("NOTIFY_SOCKET", path)]);
    let mut heard = String::new();
    let mut listen = |until: &str| {
        while !heard.contains(until) {
            let mut buffer = [0; 256];
            let n = manager.recv(&mut buffer).unwrap();
            heard.push_str(std::str::from_utf8(&buffer[..n]).unwrap());
        }
    };
    listen("READY=1");
    assert_eq!(agent.end().1, Some(0));
    listen("STOPPING=1");
}

#[test]
fn strange_questions_are_refused_and_harm_nobody() {
    let room = Room::new();
    let agent = Agent::start(&room, &[]);
    let asked = |question: &[u8]| {
        let mut s = UnixStream::connect(socket(&room)).unwrap();
        s.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        // It may hang up before it has heard all of it.
        drop(s.write_all(question));
        drop(s.shutdown(std::net::Shutdown::Write));
        let mut said = String::new();
        drop(s.read_to_string(&mut said));
        said
    };
    assert!(asked(b"GET / HTTP/1.1\r\n\r\n").starts_with("{\"refused\":\"not a question"));
    let said = asked(b"{\"ringwatch\":99,\"want\":\"snapshot\"}\n");
    assert_eq!(said, "{\"refused\":\"this agent speaks version 1, and you version 99\"}\n");
    asked(&vec![b'x'; 1 << 20]);
    asked(b"");
    assert!(asked(b"{\"ringwatch\":1,\"want\":\"snapshot\"}\n").starts_with("{\"snapshot\":{"));
    support::until("it is ready", || (agent.get("/readyz").0 == 200).then_some(()));
    let said = run(&mut room.ringwatch(["top", "--once", "--agent", "/nonexistent/agent.sock"]));
    assert_eq!(said.code, Some(2));
    assert!(said.err.contains("is the agent running (`ringwatch agent`)?"), "{}", said.err);
}

#[test]
fn what_dead_processes_leave_is_removed_when_it_is_too_much() {
    let room = Room::new();
    Players::start(&room, Play::of("missing-rank").unpaced()).end();
    assert_eq!(room.segment_files().len(), 4);
    let agent = Agent::start(&room, &["--set", "segments.keep_mib=0"]);
    until("no segments", || room.segment_files().is_empty().then_some(()));
    assert_eq!(agent.end().1, Some(0));
}

#[test]
fn the_kubelet_is_asked_where_it_has_a_socket() {
    let room = Room::new();
    let socket = room.path("kubelet.sock");
    let set = format!("segments.pod_resources={}", socket.display());
    let up = |agent: &Agent, sampler: &str| {
        let label = format!("sampler=\"{sampler}\"");
        agent.series("ringwatch_sampler_up").into_iter().find(|(l, _)| l.contains(&label)).map(|(_, v)| v)
    };
    let agent = Agent::start(&room, &["--set", &set]);
    until("samplers", || up(&agent, "node"));
    assert_eq!(up(&agent, "pods"), None, "most machines have none, and nothing is said");
    assert_eq!(agent.end().1, Some(0));
    // One that listens and never answers: others go on, and it is told.
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let agent = Agent::start(&room, &["--set", &set]);
    listener.accept().unwrap();
    assert_eq!(until("its absence", || up(&agent, "pods")), 0.0);
    assert_eq!(up(&agent, "node"), Some(1.0));
    assert_eq!(agent.end().1, Some(0));
}
