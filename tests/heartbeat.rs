//! What `/livez` and the service manager hear of the thread that owns the state: nothing while it hangs, and all is well
//! however many ask.

#![expect(unsafe_code, reason = "one thread of another process is stopped by ptrace")]

use crate::support::agent::Agent;
use crate::support::watchdog::Watchdog;
use crate::support::{Meanwhile, Play, Players, Room, until};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A thread of a child that does not run until this value is dropped.
struct Stopped(i32);

impl Stopped {
    fn thread(process: u32, name: &str) -> Self {
        let named = |entry: std::fs::DirEntry| {
            let comm = std::fs::read_to_string(entry.path().join("comm")).ok()?;
            (comm.trim_end() == name).then(|| entry.file_name().to_str().unwrap().parse().unwrap())
        };
        let tasks = || std::fs::read_dir(format!("/proc/{process}/task")).unwrap();
        // A thread has its name a moment after it starts.
        let id: i32 = until("there is such a thread", || tasks().flatten().find_map(named));
        let none = std::ptr::null_mut::<libc::c_void>();
        // SAFETY: these requests touch no memory of this process; the thread is our own child's.
        unsafe {
            assert_eq!(
                libc::ptrace(libc::PTRACE_SEIZE, id, none, none),
                0,
                "{}",
                std::io::Error::last_os_error()
            );
            assert_eq!(libc::ptrace(libc::PTRACE_INTERRUPT, id, none, none), 0);
            assert_eq!(libc::waitpid(id, std::ptr::null_mut(), libc::__WALL), id);
        }
        Stopped(id)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let none = std::ptr::null_mut::<libc::c_void>();
        // SAFETY: the same.
        unsafe { libc::ptrace(libc::PTRACE_DETACH, self.0, none, none) };
    }
}

#[test]
fn a_state_that_hangs_is_not_alive_and_one_that_goes_on_is() {
    let room = Room::new();
    let watchdog = Watchdog::new(&room);
    let agent = Agent::with(&room, &[], &watchdog.variables());
    assert_eq!(agent.get("/livez"), (200, "ok\n".to_owned()));
    watchdog.next();
    let stopped = Stopped::thread(agent.child.id(), "state");
    let began = Instant::now();
    until("it is not ready", || (agent.get("/readyz").0 == 503).then_some(()));
    assert_eq!(agent.get("/livez").0, 200, "a slow step is no hang");
    until("it is not alive", || (agent.get("/livez").0 == 503).then_some(()));
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
    watchdog.is_silent_for(Duration::from_secs(7));
    drop(stopped);
    until("it is alive again", || (agent.get("/livez").0 == 200).then_some(()));
    watchdog.next();
    assert_eq!(agent.end().1, Some(0));
}

#[test]
fn a_flood_of_whole_requests_leaves_liveness_the_watchdog_and_scrapes_alone() {
    const THREADS: usize = 120;
    let room = Room::new();
    let watchdog = Watchdog::new(&room);
    let agent = Agent::with(&room, &[], &watchdog.variables());
    let players = Players::start(&room, Play::of("missing-rank").hold(120));
    until("the segments are read", || (agent.sum("ringwatch_agent_segments") == 4.0).then_some(()));
    watchdog.next();
    let (is_over, answers) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|s| {
        let _meanwhile = Meanwhile(&is_over);
        for _ in 0..THREADS {
            s.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    answers.fetch_add(u64::from(ask(&agent.address)), Ordering::Relaxed);
                }
            });
        }
        let began = Instant::now();
        let (mut asked, mut slowest) = (0, Duration::ZERO);
        while began.elapsed() < Duration::from_secs(12) {
            let at = Instant::now();
            assert_eq!(agent.get("/livez").0, 200, "after {:?}", began.elapsed());
            assert_eq!(agent.get("/metrics").0, 200, "after {:?}", began.elapsed());
            (asked, slowest) = (asked + 1, slowest.max(at.elapsed()));
            std::thread::sleep(Duration::from_millis(200));
        }
        assert!(asked >= 10 && slowest < Duration::from_secs(5), "{asked} times, the slowest {slowest:?}");
    });
    watchdog.served_within(Duration::from_secs(8));
    let answers = answers.load(Ordering::Relaxed);
    assert!(answers > 1000, "only {answers} answers are no flood");
    drop(players);
    assert_eq!(agent.end().1, Some(0));
}

/// One scrape; true when it was answered.
fn ask(address: &str) -> bool {
    let Ok(mut s) = TcpStream::connect(address) else { return false };
    s.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let is_sent = s.write_all(b"GET /metrics HTTP/1.1\r\nHost: agent\r\n\r\n").is_ok();
    let mut text = String::new();
    is_sent && s.read_to_string(&mut text).is_ok() && text.starts_with("HTTP/1.1 200 ")
}
