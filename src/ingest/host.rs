//! What the operating system says about a watched process: its state, whether it gets its CPU, and memory's pressure.
//!
//! Everything here is read from /proc and /sys, whose files may be absent or forbidden: then the fact is absent.

use super::process::{Stat, stat};
use super::stacks::Answer;
use crate::model::{Exit, HostFact, ProcessState, SegmentId};
use std::fs;
use std::path::{Path, PathBuf};

/// Between looks at what takes more than one file, in ns.
const SLOW_NS: u64 = 1_000_000_000;
/// Threads of a process that are asked how long they waited for a CPU; NCCL's and Python's own come first.
const THREADS_MAX: usize = 128;

/// One process, watched from outside.
#[derive(Debug)]
pub(super) struct Host {
    pid: u32,
    fact: HostFact,
    slow_ns: Option<u64>,
    /// Its threads at the last look, by number.
    threads: Vec<Thread>,
    throttled_us: Option<u64>,
    cgroup: Option<PathBuf>,
}

impl Host {
    pub(super) fn new(segment: SegmentId, pid: u32) -> Self {
        Host {
            pid,
            fact: HostFact::new(segment, 0),
            slow_ns: None,
            threads: Vec::new(),
            throttled_us: None,
            cgroup: cgroup(pid),
        }
    }

    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    /// What is there to be told of the process, which started at `start_ticks`: something new, or a second has passed.
    pub(super) fn look(&mut self, start_ticks: u64, now_ns: u64) -> Option<HostFact> {
        let before = self.fact.clone();
        self.fact.state = Some(match stat(self.pid).filter(|s| s.start_ticks == start_ticks) {
            Some(s) => self.state(&s),
            None => ProcessState::Gone(before.exit()),
        });
        let over = self.fact.is_over();
        let slow = self.slow_ns.is_none_or(|t| now_ns.saturating_sub(t) >= SLOW_NS) && !over;
        if slow {
            let since = self.slow_ns.replace(now_ns).map(|t| now_ns.saturating_sub(t));
            self.watch_threads(since);
            let group = self.cgroup.as_ref();
            let throttled = group.and_then(|g| number(&g.join("cpu.stat"), "throttled_usec"));
            let gained = throttled.zip(self.throttled_us).map(|(new, old)| new.saturating_sub(old));
            self.fact.cpu_throttled =
                gained.zip(since).map(|(us, ns)| (us as f64 * 1e3 / ns as f64).min(1.0));
            self.throttled_us = throttled;
            self.fact.memory_pressure = group
                .and_then(|g| fs::read_to_string(g.join("memory.pressure")).ok())
                .and_then(|t| pressure(&t));
        }
        // Whether its own end was counted shows once more when it is over, unless its cgroup went with it.
        if slow || over && !before.is_over() {
            let events = self.cgroup.as_ref().map(|g| g.join("memory.events"));
            self.fact.oom_kills = events.and_then(|e| number(&e, "oom_kill")).or(self.fact.oom_kills);
        }
        if !slow && self.fact.state == before.state && self.fact.stack == before.stack {
            return None;
        }
        self.fact.at_ns = now_ns;
        Some(self.fact.clone())
    }

    /// Takes where it is, which somebody was asked for; it is told with the next fact.
    pub(super) fn stack(&mut self, answer: Answer, now_ns: u64) -> HostFact {
        self.fact.stack = answer.frames;
        self.fact.threads = answer.threads;
        self.fact.stack_ns = Some(now_ns);
        self.fact.clone()
    }

    fn state(&self, s: &Stat) -> ProcessState {
        // A kernel that hides it says 0.
        let wchan = || {
            let text = fs::read_to_string(format!("/proc/{}/wchan", self.pid)).ok()?;
            Some(text.trim().to_owned()).filter(|t| !t.is_empty() && t != "0")
        };
        match s.state {
            b'S' | b'I' => ProcessState::Sleeping { wchan: wchan() },
            b'D' => ProcessState::Blocked { wchan: wchan() },
            b'T' => ProcessState::Stopped { traced: false },
            b't' => ProcessState::Stopped { traced: true },
            b'Z' | b'X' => ProcessState::Zombie(s.exit_status.and_then(exit)),
            _ => ProcessState::Running,
        }
    }

    /// What shares of the time its threads ran, and were ready to run and had no CPU.
    fn watch_threads(&mut self, since_ns: Option<u64>) {
        let before = std::mem::take(&mut self.threads);
        let known =
            |tid: u32| before.binary_search_by_key(&tid, |t| t.tid).ok().and_then(|at| before.get(at));
        if let Ok(tasks) = fs::read_dir(format!("/proc/{}/task", self.pid)) {
            for task in tasks.flatten().take(THREADS_MAX) {
                let Some(tid) = task.file_name().to_str().and_then(|t| t.parse().ok()) else { continue };
                self.threads.extend(Thread::look(tid, self.pid, &task.path(), known(tid)));
            }
        }
        self.threads.sort_unstable_by_key(|t| t.tid);
        let share = |of: fn(&Thread) -> u64, nccl: bool| {
            let since = since_ns.filter(|ns| *ns > 0)?;
            let all = self.threads.iter().filter(|t| t.is_nccl || !nccl);
            let worst = all.filter_map(|t| Some(of(t).saturating_sub(of(known(t.tid)?)))).max()?;
            Some((worst as f64 / since as f64).min(1.0))
        };
        self.fact.cpu_starved = share(|t| t.waited_ns, false);
        self.fact.nccl_starved = share(|t| t.waited_ns, true);
        self.fact.nccl_busy = share(|t| t.ran_ns, true);
    }
}

/// A thread as its scheduler counts it.
#[derive(Debug, Clone, Copy)]
struct Thread {
    tid: u32,
    /// NCCL's own: it is named so. Threads get their names a moment after they begin.
    is_nccl: bool,
    /// It was seen twice, and has the name that it will have.
    named: bool,
    ran_ns: u64,
    waited_ns: u64,
}

impl Thread {
    fn look(tid: u32, pid: u32, task: &Path, before: Option<&Thread>) -> Option<Self> {
        let text = fs::read_to_string(task.join("schedstat")).ok()?;
        let mut numbers = text.split_whitespace().map(str::parse);
        let (ran_ns, waited_ns) = (numbers.next()?.ok()?, numbers.next()?.ok()?);
        // The main thread has the program's name, which may be anything.
        let is_nccl = match before.filter(|t| t.named) {
            Some(t) => t.is_nccl,
            None => tid != pid && fs::read_to_string(task.join("comm")).is_ok_and(|name| is_nccl(&name)),
        };
        Some(Thread { tid, is_nccl, named: before.is_some(), ran_ns, waited_ns })
    }
}

/// True for the names that NCCL gives its threads: `NCCL Service 0`, `NCCL Progress 0`, `NCCL UDS Service`, `ncclProxy...`.
fn is_nccl(name: &str) -> bool {
    name.starts_with("NCCL ") || name.starts_with("ncclProxy")
}

/// What `wait` would say, as a way of ending.
fn exit(status: i32) -> Option<Exit> {
    match (status & 0x7f, status >> 8 & 0xff) {
        (0, code) => Some(Exit::Code(code)),
        (signal, _) if signal < 0x7f => Some(Exit::Signal(signal)),
        _ => None,
    }
}

/// The directory of a process's cgroup, version 2.
fn cgroup(pid: u32) -> Option<PathBuf> {
    let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    let path = text.lines().find_map(|l| l.strip_prefix("0::"))?;
    // Outside this process's own cgroup namespace nothing is to be seen.
    if path.contains("..") {
        return None;
    }
    [PathBuf::from("/sys/fs/cgroup"), PathBuf::from("/sys/fs/cgroup/unified")]
        .into_iter()
        .map(|root| root.join(path.trim_start_matches('/')))
        .find(|d| d.join("cgroup.procs").exists())
}

/// The number behind a word in a file of `word number` lines.
fn number(path: &std::path::Path, word: &str) -> Option<u64> {
    let text = fs::read_to_string(path).ok()?;
    text.lines().find_map(|l| l.strip_prefix(word)?.strip_prefix(' ')?.trim().parse().ok())
}

/// Of a pressure file, the share of the last ten seconds in which some task stood still.
pub(super) fn pressure(text: &str) -> Option<f64> {
    let some = text.lines().find(|l| l.starts_with("some "))?;
    let percent: f64 = some.split_whitespace().find_map(|w| w.strip_prefix("avg10="))?.parse().ok()?;
    Some(percent / 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    fn child(script: &str) -> std::process::Child {
        Command::new("sh").args(["-c", script]).stdout(Stdio::null()).spawn().unwrap()
    }

    fn until(host: &mut Host, start: u64, wanted: impl Fn(&ProcessState) -> bool) -> HostFact {
        let begun = Instant::now();
        loop {
            let now = u64::try_from(begun.elapsed().as_nanos()).unwrap();
            host.look(start, now);
            if host.fact.state.as_ref().is_some_and(&wanted) {
                return host.fact.clone();
            }
            assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", host.fact);
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn a_stopped_a_killed_and_an_exited_process_are_told_apart() {
        for (signal, wanted) in [("KILL", Exit::Signal(9)), ("", Exit::Code(3))] {
            let mut c = child(if signal.is_empty() { "sleep 0.3; exit 3" } else { "sleep 100 & wait" });
            let pid = c.id();
            let start = stat(pid).unwrap().start_ticks;
            let mut host = Host::new(SegmentId(1), pid);
            if !signal.is_empty() {
                let kill = |s: &str| Command::new("kill").args([s, &pid.to_string()]).status().unwrap();
                kill("-STOP");
                until(&mut host, start, |s| *s == ProcessState::Stopped { traced: false });
                kill("-CONT");
                until(&mut host, start, |s| matches!(s, ProcessState::Sleeping { .. }));
                kill("-KILL");
            }
            let fact = until(&mut host, start, |s| matches!(s, ProcessState::Zombie(_)));
            assert_eq!((fact.exit(), fact.is_over()), (Some(wanted), true));
            c.wait().unwrap();
            let fact = until(&mut host, start, |s| matches!(s, ProcessState::Gone(_)));
            assert_eq!(fact.exit(), Some(wanted), "it is remembered");
        }
    }

    #[test]
    fn two_threads_of_work_on_one_cpu_are_starved() {
        use std::sync::atomic::{AtomicBool, Ordering};
        let pid = std::process::id();
        let start = stat(pid).unwrap().start_ticks;
        let (mut host, over) = (Host::new(SegmentId(1), pid), AtomicBool::new(false));
        let starved = std::thread::scope(|s| {
            for _ in 0..2 {
                s.spawn(|| {
                    let mut one = rustix::thread::CpuSet::new();
                    one.set(0);
                    rustix::thread::sched_setaffinity(None, &one).unwrap();
                    while !over.load(Ordering::Relaxed) {
                        std::hint::spin_loop();
                    }
                });
            }
            std::thread::sleep(Duration::from_millis(100));
            let begun = Instant::now();
            host.look(start, 0);
            std::thread::sleep(Duration::from_millis(1200));
            let fact = host.look(start, u64::try_from(begun.elapsed().as_nanos()).unwrap());
            over.store(true, Ordering::Relaxed);
            fact.unwrap().cpu_starved
        });
        // One of the two had no more than half of the CPU.
        assert!(starved.is_some_and(|s| s > 0.3), "{starved:?}");
    }

    #[test]
    fn what_the_threads_of_nccl_do_is_told_apart() {
        use std::sync::atomic::{AtomicBool, Ordering};
        assert!(is_nccl("NCCL Progress 1\n") && is_nccl("NCCL UDS Service") && is_nccl("ncclProxyService"));
        assert!(!is_nccl("nccl-tests") && !is_nccl("pt_nccl_watchdg"));
        let pid = std::process::id();
        let start = stat(pid).unwrap().start_ticks;
        let (mut host, over) = (Host::new(SegmentId(1), pid), AtomicBool::new(false));
        let fact = std::thread::scope(|s| {
            std::thread::Builder::new()
                .name("NCCL Progress 0".to_owned())
                .spawn_scoped(s, || {
                    while !over.load(Ordering::Relaxed) {
                        std::hint::spin_loop();
                    }
                })
                .unwrap();
            std::thread::sleep(Duration::from_millis(100));
            let begun = Instant::now();
            assert_eq!(host.look(start, 0).unwrap().nccl_busy, None, "there is no time to hold it against");
            std::thread::sleep(Duration::from_millis(1200));
            let fact = host.look(start, u64::try_from(begun.elapsed().as_nanos()).unwrap());
            over.store(true, Ordering::Relaxed);
            fact.unwrap()
        });
        // It spins; what it had not, it waited for.
        let all = fact.nccl_busy.zip(fact.nccl_starved).map(|(ran, waited)| ran + waited);
        assert!(all.is_some_and(|s| s > 0.8), "{fact:?}");
    }

    #[test]
    fn files_of_the_kernel_are_read_as_they_are() {
        assert_eq!(exit(0x100), Some(Exit::Code(1)));
        assert_eq!(exit(0x8b), Some(Exit::Signal(11)), "a core dump is still the signal");
        assert_eq!(exit(9), Some(Exit::Signal(9)));
        let text =
            "some avg10=12.50 avg60=1.00 avg300=0.20 total=1\nfull avg10=3.00 avg60=0 avg300=0 total=1\n";
        assert_eq!(pressure(text), Some(0.125));
        assert_eq!(pressure("full avg10=1"), None);
    }
}
