//! What the operating system says about a watched process: its state, whether it gets its CPU, and memory's pressure.
//!
//! Everything here is read from /proc and /sys, whose files may be absent or forbidden: then the fact is absent.

use super::cgroup::{self, Groups};
use super::descriptors::held;
use super::files::{ROOM, read};
use super::process::{Stat, directory, stat_in};
use super::stacks::Answer;
use crate::model::{Exit, HostFact, ProcessState, SegmentId};
use rustix::fs::{Mode, OFlags, RawDir};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

/// Between looks at what takes more than one file, in ns.
const SLOW_NS: u64 = 1_000_000_000;
/// Threads of a process that are asked how long they waited for a CPU; NCCL's and Python's own come first.
const THREADS_MAX: usize = 128;

/// One process, watched from outside.
#[derive(Debug)]
pub(super) struct Host {
    pid: u32,
    /// Its directory in /proc, which is of this process alone, whoever gets its pid later; where it may be held.
    dir: Option<OwnedFd>,
    fact: HostFact,
    slow_ns: Option<u64>,
    /// Its threads at the last look, by number, and those at the one before.
    threads: Vec<Thread>,
    before: Vec<Thread>,
    cgroup: Option<PathBuf>,
}

impl Host {
    pub(super) fn new(segment: SegmentId, pid: u32) -> Self {
        Host {
            pid,
            dir: None,
            fact: HostFact::new(segment, 0),
            slow_ns: None,
            threads: Vec::new(),
            before: Vec::new(),
            cgroup: cgroup::of_process(pid),
        }
    }

    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    /// What is there to be told of the process, which started at `start_ticks`: something new, or a second has passed.
    pub(super) fn look(&mut self, start_ticks: u64, now_ns: u64, groups: &mut Groups) -> Option<HostFact> {
        let was_over = self.fact.is_over();
        // A directory that is opened later may be of another process: the start time tells. Without a free descriptor the
        // process's state is not known.
        let dir = self.dir.take().map_or_else(|| directory(self.pid), |dir| Ok(Some(dir))).ok()?;
        let fd = dir.as_ref().map(AsFd::as_fd);
        let stat = fd.map_or(Ok(None), stat_in).ok()?;
        let state = match fd.zip(stat.filter(|s| s.start_ticks == start_ticks)) {
            Some((fd, s)) => state(fd, &s),
            None => ProcessState::Gone(self.fact.exit()),
        };
        let changed = self.fact.state.as_ref() != Some(&state);
        self.fact.state = Some(state);
        let over = self.fact.is_over();
        let slow = self.slow_ns.is_none_or(|t| now_ns.saturating_sub(t) >= SLOW_NS) && !over;
        if slow {
            let since = self.slow_ns.replace(now_ns).map(|t| now_ns.saturating_sub(t));
            self.watch_threads(fd, since);
        }
        self.dir = dir.and_then(|dir| held(dir).ok());
        if let Some(path) = &self.cgroup {
            if slow {
                let group = groups.look(path, now_ns);
                self.fact.cpu_throttled = group.cpu_throttled;
                self.fact.memory_pressure = group.memory_pressure;
                self.fact.oom_kills = group.oom_kills.or(self.fact.oom_kills);
            } else if over && !was_over {
                // Whether its own end was counted shows once more when it is over, unless its group went with it.
                self.fact.oom_kills = groups.look_again(path, now_ns).oom_kills.or(self.fact.oom_kills);
            }
        }
        if !slow && !changed {
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

    /// What shares of the time its threads ran, and were ready to run and had no CPU.
    fn watch_threads(&mut self, dir: Option<BorrowedFd<'_>>, since_ns: Option<u64>) {
        std::mem::swap(&mut self.threads, &mut self.before);
        self.threads.clear();
        let before = &self.before;
        let known =
            |tid: u32| before.binary_search_by_key(&tid, |t| t.tid).ok().and_then(|at| before.get(at));
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
        let tasks = dir.and_then(|d| rustix::fs::openat(d, "task", flags, Mode::empty()).ok());
        if let Some(tasks) = &tasks {
            let mut room = [MaybeUninit::uninit(); 4096];
            let mut entries = RawDir::new(tasks, &mut room);
            while let (Some(Ok(entry)), true) = (entries.next(), self.threads.len() < THREADS_MAX) {
                let Some(tid) = entry.file_name().to_str().ok().and_then(|name| name.parse().ok()) else {
                    continue;
                };
                self.threads.extend(Thread::look(tid, self.pid, tasks.as_fd(), known(tid)));
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

/// The state of a process, by its directory in /proc and what its line there says.
fn state(dir: BorrowedFd<'_>, s: &Stat) -> ProcessState {
    // A kernel that hides it says 0.
    let wchan = || {
        let mut room = ROOM;
        let text = read(dir, "wchan", &mut room).ok()??.trim();
        (!text.is_empty() && text != "0").then(|| text.to_owned())
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
    fn look(tid: u32, pid: u32, tasks: BorrowedFd<'_>, before: Option<&Thread>) -> Option<Self> {
        let mut room = ROOM;
        let (ran_ns, waited_ns) = schedstat(read(tasks, &format!("{tid}/schedstat"), &mut room).ok()??)?;
        // The main thread has the program's name, which may be anything.
        let is_nccl = match before.filter(|t| t.named) {
            Some(t) => t.is_nccl,
            None if tid == pid => false,
            None => {
                let mut room = ROOM;
                read(tasks, &format!("{tid}/comm"), &mut room).ok().flatten().is_some_and(is_nccl)
            }
        };
        Some(Thread { tid, is_nccl, named: before.is_some(), ran_ns, waited_ns })
    }
}

/// How long a thread ran, and how long it was ready to run and had no CPU, in ns.
pub(super) fn schedstat(text: &str) -> Option<(u64, u64)> {
    let mut numbers = text.split_whitespace().map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
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
            host.look(start, now, &mut Groups::default());
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
            let start = super::super::process::stat(pid).unwrap().unwrap().start_ticks;
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
        let start = super::super::process::stat(pid).unwrap().unwrap().start_ticks;
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
            host.look(start, 0, &mut Groups::default());
            std::thread::sleep(Duration::from_millis(1200));
            let fact =
                host.look(start, u64::try_from(begun.elapsed().as_nanos()).unwrap(), &mut Groups::default());
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
        let start = super::super::process::stat(pid).unwrap().unwrap().start_ticks;
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
            assert_eq!(
                host.look(start, 0, &mut Groups::default()).unwrap().nccl_busy,
                None,
                "there is no time to hold it against"
            );
            std::thread::sleep(Duration::from_millis(1200));
            let fact =
                host.look(start, u64::try_from(begun.elapsed().as_nanos()).unwrap(), &mut Groups::default());
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
    }
}
