//! Floods of HTTP requests and of requests to the socket.

use super::forged::{Forged, Writer};
use super::ground::{ATTACKER, Ground, USER, program_for_all};
use super::unread::followed;
use crate::support::agent::{diagnosed, get, socket};
use crate::support::watchdog::Watchdog;
use crate::support::{
    Meanwhile, PATIENCE, Play, Players, as_user, assert_missing_rank, findings, run, until,
};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// More than an agent may have open.
const HALF_SENT: usize = 1100;

#[test]
fn half_sent_requests_keep_no_segment_and_no_scraper_out() {
    let Some(ground) = Ground::of("half_sent_requests_keep_no_segment_and_no_scraper_out") else { return };
    raise_descriptors();
    let agent = ground.agent(&[&ground.room.segments()], "ulimit -Sn 1024 && ulimit -Hn 1024 &&");
    let flood: Vec<TcpStream> = as_user(ATTACKER, || {
        let half = |_| {
            let mut s = TcpStream::connect(&agent.address).expect("it listens");
            s.write_all(b"GET /metrics HTTP/1.1\r\nHost: agent\r\nX-Slow: ").expect("it reads");
            s
        };
        (0..HALF_SENT).map(half).collect()
    });
    let began = Instant::now();
    assert_eq!(agent.get("/metrics").0, 200);
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    let players = Players::start(&ground.room, Play::of("missing-rank").hold(120));
    until("the new segments are read", || (followed(&agent) == 4.0).then_some(()));
    assert_missing_rank(&findings(&diagnosed(&ground.room)));
    let all_closed = || agent.sum("ringwatch_agent_connections_closed_total") >= HALF_SENT as f64;
    until("all of them are closed and counted", || all_closed().then_some(()));
    drop((players, flood));
    let (_, log) = agent.end_with_log();
    assert!(log.iter().any(|l| l.contains("http: closed")), "{log:#?}");
    ground.assert_memory_held();
}

/// Whole requests at once: several times what the server has places for.
const FLOOD: usize = 400;

#[test]
fn a_flood_of_whole_requests_keeps_no_probe_no_watchdog_and_no_scraper_out() {
    let test = "a_flood_of_whole_requests_keeps_no_probe_no_watchdog_and_no_scraper_out";
    let Some(ground) = Ground::of(test) else { return };
    raise_descriptors();
    let watchdog = Watchdog::new(&ground.room);
    let [(variable, path)] = watchdog.variables();
    let commands = format!("export {variable}={} &&", path.display());
    let agent = ground.agent(&[&ground.room.segments()], &commands);
    let players = Players::start(&ground.room, Play::of("missing-rank").hold(120));
    until("the segments are read", || (followed(&agent) == 4.0).then_some(()));
    watchdog.next();
    let (is_over, answered) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|s| {
        let _meanwhile = Meanwhile(&is_over);
        let (is_over, answered, address) = (&is_over, &answered, &agent.address);
        s.spawn(move || {
            as_user(ATTACKER, || {
                std::thread::scope(|s| {
                    (0..FLOOD).for_each(|n| drop(s.spawn(move || flood(address, n, is_over, answered))));
                });
            });
        });
        let (began, mut asked) = (Instant::now(), 0);
        let mut slowest = [Duration::ZERO; 2];
        while asked < 5 || began.elapsed() < Duration::from_secs(12) {
            for (path, slowest) in ["/livez", "/metrics"].into_iter().zip(&mut slowest) {
                let at = Instant::now();
                let status = as_user(USER, || get(address, path).0);
                assert_eq!(status, 200, "{path} after {:?}", began.elapsed());
                *slowest = (*slowest).max(at.elapsed());
            }
            asked += 1;
            std::thread::sleep(Duration::from_millis(200));
        }
        // What Kubernetes waits for a probe, and Prometheus for a scrape.
        println!("{asked} times; the slowest probe and scrape: {slowest:?}");
        assert!(slowest[0] < Duration::from_secs(5) && slowest[1] < Duration::from_secs(10), "{slowest:?}");
    });
    watchdog.served_within(Duration::from_secs(10));
    assert!(answered.load(Ordering::Relaxed) > 500, "{answered:?} answers are no flood");
    drop(players);
    assert_eq!(agent.end().1, Some(0));
    ground.assert_memory_held();
}

/// Asks for metrics again and again; every other asker does not read them.
fn flood(address: &str, number: usize, is_over: &AtomicBool, answered: &AtomicU64) {
    while !is_over.load(Ordering::Relaxed) {
        let Ok(mut s) = TcpStream::connect(address) else { continue };
        s.set_read_timeout(Some(Duration::from_secs(1))).expect("a socket");
        let mut text = String::new();
        let is_sent = s.write_all(b"GET /metrics HTTP/1.1\r\nHost: agent\r\n\r\n").is_ok();
        if is_sent && number.is_multiple_of(2) {
            let is_read = s.read_to_string(&mut text).is_ok() && text.starts_with("HTTP/1.1 200 ");
            answered.fetch_add(u64::from(is_read), Ordering::Relaxed);
        } else {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// This process holds the other end of every connection.
fn raise_descriptors() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    setrlimit(Resource::Nofile, raised).expect("within the hard limit");
}

#[test]
fn requests_that_want_an_answer_in_a_million_years_lock_nobody_out() {
    let Some(ground) = Ground::of("requests_that_want_an_answer_in_a_million_years_lock_nobody_out") else {
        return;
    };
    let directory = ground.directory("of-user", USER);
    let agent = ground.agent(&[&directory], "");
    let idle = ground.idle(USER);
    let writer = Writer::running(idle.0.id());
    as_user(USER, || Forged::small(writer).put(&directory));
    until("it is read", || (followed(&agent) == 1.0).then_some(()));
    // The longest time that there is, and the longest that may be asked for.
    let mut answered = 0;
    for every_ms in [u64::MAX / 2, 60_000] {
        for _ in 0..10 {
            answered += as_user(ATTACKER, || {
                let ask = |_| {
                    let mut s = UnixStream::connect(socket(&ground.room)).expect("it listens");
                    s.set_write_timeout(Some(PATIENCE)).expect("a socket");
                    s.set_read_timeout(Some(PATIENCE)).expect("a socket");
                    // One that has no place may be closed before it has asked.
                    let question =
                        format!("{{\"ringwatch\":1,\"want\":\"snapshot\",\"every_ms\":{every_ms}}}\n");
                    drop(s.write_all(question.as_bytes()));
                    s
                };
                let mut held: Vec<UnixStream> = (0..64).map(ask).collect();
                // The agent misses a user who hangs up before the first answer when it sends that answer.
                held.iter_mut().filter_map(|s| s.read(&mut [0; 1]).ok()).sum::<usize>()
            });
        }
    }
    assert!(answered > 0, "a request was answered");
    let began = Instant::now();
    let mut command = ground.as_user(USER, &program_for_all());
    let said = run(command.args(["top", "--once", "--agent"]).arg(socket(&ground.room)));
    assert_eq!(said.code, Some(0), "{said:?}");
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    assert_eq!(agent.end().1, Some(0));
    ground.assert_memory_held();
}

#[test]
fn who_hangs_up_gives_the_place_back() {
    let Some(ground) = Ground::of("who_hangs_up_gives_the_place_back") else { return };
    let agent = ground.agent(&[&ground.directory("of-user", USER)], "");
    let answered = || {
        as_user(ATTACKER, || {
            let mut s = UnixStream::connect(socket(&ground.room)).expect("it listens");
            s.set_read_timeout(Some(PATIENCE)).expect("a socket");
            // One that has no place may be closed before it has asked.
            drop(s.write_all(b"{\"ringwatch\":1,\"want\":\"snapshot\",\"every_ms\":60000}\n"));
            let mut answer = String::new();
            drop(BufReader::new(&s).read_line(&mut answer));
            answer.starts_with("{\"snapshot\"").then_some(s)
        })
    };
    let held: Vec<UnixStream> = (0..64).map_while(|_| answered()).collect();
    assert!((1..64).contains(&held.len()), "{} answered of one user", held.len());
    drop(held);
    // The agent writes to none of them for a minute.
    let began = Instant::now();
    until("a place is free", answered);
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    assert_eq!(agent.end().1, Some(0));
}
