//! What many connections do to an agent: half-sent requests, slow readers, and users who take every place.

use crate::support::agent::{Agent, diagnosed, socket};
use crate::support::{
    Json, PATIENCE, Play, Players, Room, as_user, assert_missing_rank, findings, skipped, until,
};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// So many that none is left over for segments if connections may take what they want.
const DESCRIPTORS: u64 = 256;
/// What HTTP may take of them.
const HTTP: usize = 32;

/// An agent that cannot have more descriptors than these.
fn agent(room: &Room) -> Agent {
    Agent::limited(room, &[("-Sn", DESCRIPTORS), ("-Hn", DESCRIPTORS)])
}

fn closed(agent: &Agent, server: &str, reason: &str) -> f64 {
    let label = |name: &str, value: &str| format!("{name}=\"{value}\"");
    let all = agent.series("ringwatch_agent_connections_closed_total");
    let of = |l: &str| l.contains(&label("server", server)) && l.contains(&label("reason", reason));
    all.iter().find(|(l, _)| of(l)).unwrap_or_else(|| panic!("no {server}, {reason} in {all:?}")).1
}

/// A request that will never be whole.
fn half(agent: &Agent) -> TcpStream {
    let mut s = TcpStream::connect(&agent.address).unwrap();
    s.set_read_timeout(Some(PATIENCE)).unwrap();
    s.write_all(b"GET /metrics HTTP/1.1\r\nHost: agent\r\nX-Slow: ").unwrap();
    s
}

/// Waits until the other side closes. It may reset, where bytes were never read.
fn wait_for_end(mut s: impl Read) -> Vec<u8> {
    let mut bytes = Vec::new();
    if let Err(e) = s.read_to_end(&mut bytes) {
        assert_eq!(e.kind(), std::io::ErrorKind::ConnectionReset, "{e}");
    }
    bytes
}

#[test]
fn half_sent_requests_keep_nobody_out_and_take_no_segment_its_descriptor() {
    let room = Room::new();
    let agent = agent(&room);
    let by = Instant::now() + PATIENCE;
    while agent.get("/readyz").0 != 200 {
        assert!(Instant::now() < by, "it never knew every source");
        std::thread::sleep(Duration::from_millis(10));
    }
    let flood: Vec<TcpStream> = (0..2 * DESCRIPTORS).map(|_| half(&agent)).collect();
    let began = Instant::now();
    assert_eq!(agent.get("/readyz"), (200, "ok\n".to_owned()));
    assert!(began.elapsed() < Duration::from_secs(4), "before any of them was too slow");
    let displaced = closed(&agent, "http", "displaced by a newer one");
    assert!(displaced >= (2 * DESCRIPTORS) as f64 - HTTP as f64, "{displaced}");
    let players = Players::start(&room, Play::of("missing-rank").hold(60));
    assert_missing_rank(&findings(&diagnosed(&room)));
    let line = agent.says("displaced by a newer one");
    assert!(line.contains("http: closed"), "{line}");
    drop((players, flood));
    assert_eq!(agent.end().1, Some(0));
}

#[test]
fn a_request_that_takes_too_long_is_closed_and_counted() {
    let room = Room::new();
    let agent = agent(&room);
    let silent = TcpStream::connect(&agent.address).unwrap();
    silent.set_read_timeout(Some(PATIENCE)).unwrap();
    wait_for_end(half(&agent));
    wait_for_end(silent);
    until("both are counted", || (closed(&agent, "http", "request too slow") >= 2.0).then_some(()));
    assert_eq!(agent.get("/livez").0, 200);
    assert_eq!(agent.end().1, Some(0));
}

#[test]
fn a_connection_carries_one_request() {
    let room = Room::new();
    let agent = agent(&room);
    let mut s = TcpStream::connect(&agent.address).unwrap();
    s.set_read_timeout(Some(PATIENCE)).unwrap();
    s.write_all(b"GET /livez HTTP/1.1\r\nHost: agent\r\n\r\n").unwrap();
    let answer = String::from_utf8(wait_for_end(s)).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("ok\n"), "{answer}");
    assert!(answer.contains("connection: close\r\n"), "{answer}");
}

#[test]
fn a_port_that_somebody_else_has_keeps_the_agent_from_nothing_but_http() {
    let room = Room::new();
    let thief = TcpListener::bind("127.0.0.1:0").unwrap();
    let agent = Agent::without_port(&room, &[], &thief.local_addr().unwrap().to_string());
    agent.says("without metrics and probes until it is free");
    let players = Players::start(&room, Play::of("missing-rank").hold(60));
    assert_missing_rank(&findings(&diagnosed(&room)));
    agent.says("it is tried again in 2 s");
    drop(thief);
    agent.says("listening on http://");
    assert_eq!(agent.get("/readyz"), (200, "ok\n".to_owned()));
    assert!(agent.sum("ringwatch_agent_listen_failures_total") >= 2.0);
    drop(players);
    assert_eq!(agent.end().1, Some(0));
}

#[test]
fn a_socket_of_the_service_manager_is_served_and_no_other_program_gets_it() {
    let room = Room::new();
    let port = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = port.local_addr().unwrap().to_string();
    let agent = Agent::handed(&room, OwnedFd::from(port.try_clone().unwrap()));
    assert_eq!(agent.address, address);
    until("it is ready", || (agent.get("/readyz").0 == 200).then_some(()));
    let info = fs::read_to_string(format!("/proc/{}/fdinfo/3", agent.child.id())).unwrap();
    let flags = info.lines().find_map(|l| l.strip_prefix("flags:")).unwrap();
    let flags = u32::from_str_radix(flags.trim(), 8).unwrap();
    assert_ne!(flags & libc::O_CLOEXEC as u32, 0, "{info}");
    assert_eq!(agent.end().1, Some(0));
    // Connections wait while there is no agent.
    drop(TcpStream::connect(&address).unwrap());
}

#[test]
fn the_limit_of_descriptors_is_raised_as_far_as_it_goes() {
    let room = Room::new();
    let agent = Agent::limited(&room, &[("-Sn", DESCRIPTORS), ("-Hn", 1000)]);
    let limits = fs::read_to_string(format!("/proc/{}/limits", agent.child.id())).unwrap();
    let line = limits.lines().find(|l| l.starts_with("Max open files")).unwrap();
    assert_eq!(line.split_whitespace().skip(3).take(2).collect::<Vec<_>>(), ["1000", "1000"]);
}

#[test]
fn exhausted_descriptors_are_logged_and_waited_out() {
    use rustix::process::{Pid, Resource, Rlimit, prlimit};
    let room = Room::new();
    let agent = Agent::start(&room, &[]);
    let limit = |n| Rlimit { current: Some(n), maximum: Some(4096) };
    let set = |n| prlimit(Some(Pid::from_child(&agent.child)), Resource::Nofile, limit(n)).unwrap();
    set(3);
    let mut waiting = TcpStream::connect(&agent.address).unwrap();
    waiting.set_read_timeout(Some(PATIENCE)).unwrap();
    waiting.write_all(b"GET /livez HTTP/1.1\r\nHost: agent\r\n\r\n").unwrap();
    let line = agent.says("descriptors or memory exhausted");
    assert!(line.contains("http: closed"), "{line}");
    set(4096);
    let answer = String::from_utf8(wait_for_end(waiting)).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 "), "it has waited: {answer}");
    assert!(closed(&agent, "http", "descriptors or memory exhausted") >= 1.0);
    assert_eq!(agent.end().1, Some(0));
}

/// A connection to the socket on which a question was asked.
fn asked(path: &Path, question: &str) -> BufReader<UnixStream> {
    let mut s = UnixStream::connect(path).unwrap();
    s.set_read_timeout(Some(PATIENCE)).unwrap();
    // One that has no place is refused before it has asked.
    match s.write_all(format!("{question}\n").as_bytes()) {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => panic!("{e}"),
        _ => BufReader::new(s),
    }
}

/// The next answer; what it says where it is a refusal.
fn answer(s: &mut BufReader<UnixStream>) -> Result<(), String> {
    let mut line = String::new();
    s.read_line(&mut line).unwrap();
    let answer: Json = serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e}: {line:?}"));
    match answer.keys().as_slice() {
        ["refused"] => Err(answer.get("refused").text().to_owned()),
        keys => {
            assert_eq!(keys, ["snapshot"]);
            Ok(())
        }
    }
}

fn every(ms: u64) -> String {
    format!(r#"{{"ringwatch":1,"want":"snapshot","every_ms":{ms}}}"#)
}

#[test]
fn times_between_answers_are_bounded() {
    let room = Room::new();
    let agent = agent(&room);
    for ms in [0, 99, 60_001, u64::MAX] {
        let why = answer(&mut asked(&socket(&room), &every(ms))).unwrap_err();
        assert_eq!(why, format!("every_ms is {ms}, and may be 100 to 60000"));
    }
    let mut s = asked(&socket(&room), &every(100));
    assert_eq!([answer(&mut s), answer(&mut s)], [Ok(()), Ok(())]);
    assert_eq!(agent.end().1, Some(0));
}

#[test]
fn askers_that_hang_up_while_the_agent_sleeps_give_their_places_back() {
    let room = Room::new();
    let agent = agent(&room);
    // Every place there is, and a long sleep before each next answer.
    let mut held = Vec::new();
    let refused = loop {
        let mut s = asked(&socket(&room), &every(60_000));
        match answer(&mut s) {
            Ok(()) => held.push(s),
            Err(why) => break why,
        }
    };
    assert_eq!(refused, "the agent has 16 connections already; try again later");
    assert_eq!(closed(&agent, "socket", "too many connections"), 1.0);
    drop(held);
    until("the places are free again", || answer(&mut asked(&socket(&room), &every(100))).ok());
    assert_eq!(agent.end().1, Some(0));
}

#[test]
fn a_user_who_takes_every_place_locks_out_neither_root_nor_others() {
    if !rustix::process::geteuid().is_root() {
        return skipped("a_user_who_takes_every_place_locks_out_neither_root_nor_others", "root");
    }
    let room = Room::new();
    let agent = Agent::start(&room, &[]);
    for dir in [room.path(""), room.path("run")] {
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let path = &socket(&room);
    let take = |uid: u32, n: usize| -> Vec<_> {
        as_user(uid, || (0..n).map(|_| asked(path, &every(60_000))).collect())
    };
    let mut held = take(60_001, 8);
    held.iter_mut().for_each(|s| answer(s).unwrap());
    let why = answer(&mut take(60_001, 1)[0]).unwrap_err();
    assert_eq!(why, "user 60001 has 8 connections already, and may have no more");
    // Another user, and then as many users as it takes to fill what is not kept for root.
    for uid in 60_002..=60_007 {
        let mut more = take(uid, 8);
        more.iter_mut().for_each(|s| answer(s).unwrap());
        held.extend(more);
    }
    let why = answer(&mut take(60_008, 1)[0]).unwrap_err();
    assert_eq!(why, "the agent has 56 connections already; try again later");
    assert_eq!(answer(&mut asked(path, &every(100))), Ok(()), "root gets in");
    assert_eq!(closed(&agent, "socket", "too many connections of one user"), 1.0);
    assert_eq!(closed(&agent, "socket", "too many connections"), 1.0);
    let line = agent.says("too many connections of one user");
    assert!(line.contains("socket: closed 1 connections"), "{line}");
    drop(held);
    assert_eq!(agent.end().1, Some(0));
}
