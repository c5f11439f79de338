//! Floods of HTTP requests and of requests to the socket.

use crate::forged::{Forged, Writer};
use crate::ground::{ATTACKER, Ground, USER, program_for_all};
use crate::support::agent::{diagnosed, socket};
use crate::support::{PATIENCE, Play, Players, as_user, assert_missing_rank, findings, run, until};
use crate::unread::followed;
use std::io::Write;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
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
    for every_ms in [u64::MAX / 2, 60_000] {
        for _ in 0..10 {
            as_user(ATTACKER, || {
                let ask = |_| {
                    let mut s = UnixStream::connect(socket(&ground.room)).expect("it listens");
                    s.set_write_timeout(Some(PATIENCE)).expect("a socket");
                    // One that has no place may be closed before it has asked.
                    let question =
                        format!("{{\"ringwatch\":1,\"want\":\"snapshot\",\"every_ms\":{every_ms}}}\n");
                    drop(s.write_all(question.as_bytes()));
                    s
                };
                let held: Vec<UnixStream> = (0..64).map(ask).collect();
                drop(held);
            });
        }
    }
    let began = Instant::now();
    let mut command = ground.as_user(USER, &program_for_all());
    let said = run(command.args(["top", "--once", "--agent"]).arg(socket(&ground.room)));
    assert_eq!(said.code, Some(0), "{said:?}");
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    assert_eq!(agent.end().1, Some(0));
    ground.assert_memory_held();
}
