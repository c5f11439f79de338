//! The operating system's facts about a process: its state, whether it gets its CPU, and memory's pressure.
//!
//! Everything here is read from /proc and /sys, whose files may be absent or forbidden: then the fact is absent. A process
//! can keep whoever reads its `stat` or `wchan` waiting for ever: it holds `exec_update_lock` while its exec closes a file
//! of a FUSE server that does not answer. So a probe reads them.

use super::cgroup::{self, Groups};
use super::descriptors::held;
use super::files::{ROOM, read};
use super::process::{Stat, directory, stat_in};
use crate::model::{Exit, ProcessState};
use rustix::fs::{Mode, OFlags, RawDir};
use serde::{Deserialize, Serialize};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

/// Between looks at what takes more than one file, in ns.
const SLOW_NS: u64 = 1_000_000_000;
/// Threads of a process that are asked how long they waited for a CPU; NCCL's and Python's own come first.
const THREADS_MAX: usize = 128;

/// A reading of a process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Reading {
    /// `Gone` without an exit where it is not there.
    pub(super) state: ProcessState,
    /// Its load, once a second.
    pub(super) load: Option<Load>,
    /// Kills of its control group for want of memory, where they were read.
    pub(super) oom_kills: Option<u64>,
}

/// How a process is off. What is not known is absent.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Load {
    pub(super) cpu_starved: Option<f64>,
    pub(super) nccl_starved: Option<f64>,
    pub(super) nccl_busy: Option<f64>,
    pub(super) cpu_throttled: Option<f64>,
    pub(super) memory_pressure: Option<f64>,
}

/// One process, read again and again.
#[derive(Debug)]
pub(super) struct ProcessReader {
    pid: u32,
    start_ticks: u64,
    /// Its directory in /proc, which is of this process alone, whoever gets its pid later; where it may be held.
    dir: Option<OwnedFd>,
    was_over: bool,
    slow_ns: Option<u64>,
    /// Its threads at the last look, by number, and those at the one before.
    threads: Vec<Thread>,
    before: Vec<Thread>,
    cgroup: Option<PathBuf>,
}

impl ProcessReader {
    pub(super) fn new(pid: u32, start_ticks: u64) -> Self {
        ProcessReader {
            pid,
            start_ticks,
            dir: None,
            was_over: false,
            slow_ns: None,
            threads: Vec::new(),
            before: Vec::new(),
            cgroup: cgroup::of_process(pid),
        }
    }

    /// Reads what the process is doing; nothing without a free descriptor.
    pub(super) fn read(&mut self, now_ns: u64, groups: &mut Groups) -> Option<Reading> {
        // A directory that is opened later may be of another process: the start time tells. Without a free descriptor the
        // process's state is not known.
        let dir = self.dir.take().map_or_else(|| directory(self.pid), |dir| Ok(Some(dir))).ok()?;
        let fd = dir.as_ref().map(AsFd::as_fd);
        let stat = fd.map_or(Ok(None), stat_in).ok()?;
        let state = match fd.zip(stat.filter(|s| s.start_ticks == self.start_ticks)) {
            Some((fd, s)) => state(fd, &s),
            None => ProcessState::Gone(None),
        };
        let over = matches!(state, ProcessState::Zombie(_) | ProcessState::Gone(_));
        let mut reading = Reading { state, load: None, oom_kills: None };
        if !over && self.slow_ns.is_none_or(|t| now_ns.saturating_sub(t) >= SLOW_NS) {
            let since = self.slow_ns.replace(now_ns).map(|t| now_ns.saturating_sub(t));
            let mut load = self.watch_threads(fd, since);
            if let Some(path) = &self.cgroup {
                let group = groups.look(path, now_ns);
                load.cpu_throttled = group.cpu_throttled;
                load.memory_pressure = group.memory_pressure;
                reading.oom_kills = group.oom_kills;
            }
            reading.load = Some(load);
        } else if over && !self.was_over {
            // Whether its own end was counted shows once more when it is over, unless its group went with it.
            let path = self.cgroup.as_ref();
            reading.oom_kills = path.and_then(|path| groups.look_again(path, now_ns).oom_kills);
        }
        self.was_over = over;
        self.dir = dir.and_then(|dir| held(dir).ok());
        Some(reading)
    }

    /// Reads the shares of the time that its threads ran, and were ready to run and had no CPU.
    fn watch_threads(&mut self, dir: Option<BorrowedFd<'_>>, since_ns: Option<u64>) -> Load {
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
        Load {
            cpu_starved: share(|t| t.waited_ns, false),
            nccl_starved: share(|t| t.waited_ns, true),
            nccl_busy: share(|t| t.ran_ns, true),
            ..Load::default()
        }
    }
}

/// The state of a process, by its directory in /proc and what its line there says.
pub(super) fn state(dir: BorrowedFd<'_>, s: &Stat) -> ProcessState {
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

/// The result of `wait`, as a way of ending.
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

    fn until(reader: &mut ProcessReader, wanted: impl Fn(&ProcessState) -> bool) -> ProcessState {
        let begun = Instant::now();
        loop {
            let now = u64::try_from(begun.elapsed().as_nanos()).unwrap();
            let state = reader.read(now, &mut Groups::default()).unwrap().state;
            if wanted(&state) {
                return state;
            }
            assert!(begun.elapsed() < Duration::from_secs(20), "{state:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn reader(pid: u32) -> ProcessReader {
        ProcessReader::new(pid, super::super::process::stat(pid).unwrap().unwrap().start_ticks)
    }

    #[test]
    fn a_stopped_a_killed_and_an_exited_process_are_told_apart() {
        for (signal, wanted) in [("KILL", Exit::Signal(9)), ("", Exit::Code(3))] {
            let mut c = child(if signal.is_empty() { "sleep 0.3; exit 3" } else { "sleep 100 & wait" });
            let pid = c.id();
            let mut reader = reader(pid);
            if !signal.is_empty() {
                let kill = |s: &str| Command::new("kill").args([s, &pid.to_string()]).status().unwrap();
                kill("-STOP");
                until(&mut reader, |s| *s == ProcessState::Stopped { traced: false });
                kill("-CONT");
                until(&mut reader, |s| matches!(s, ProcessState::Sleeping { .. }));
                kill("-KILL");
            }
            let over = until(&mut reader, |s| matches!(s, ProcessState::Zombie(_)));
            assert_eq!(over, ProcessState::Zombie(Some(wanted)));
            c.wait().unwrap();
            until(&mut reader, |s| *s == ProcessState::Gone(None));
        }
    }

    #[test]
    fn two_threads_of_work_on_one_cpu_are_starved() {
        use std::sync::atomic::{AtomicBool, Ordering};
        let (mut reader, over) = (reader(std::process::id()), AtomicBool::new(false));
        let mut load = |at: Instant, first: bool| {
            let now_ns = if first { 0 } else { u64::try_from(at.elapsed().as_nanos()).unwrap() };
            reader.read(now_ns, &mut Groups::default()).unwrap().load.unwrap()
        };
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
            load(begun, true);
            std::thread::sleep(Duration::from_millis(1200));
            let cpu_starved = load(begun, false).cpu_starved;
            over.store(true, Ordering::Relaxed);
            cpu_starved
        });
        // One of the two had no more than half of the CPU.
        assert!(starved.is_some_and(|s| s > 0.3), "{starved:?}");
    }

    #[test]
    fn what_the_threads_of_nccl_do_is_told_apart() {
        use std::sync::atomic::{AtomicBool, Ordering};
        assert!(is_nccl("NCCL Progress 1\n") && is_nccl("NCCL UDS Service") && is_nccl("ncclProxyService"));
        assert!(!is_nccl("nccl-tests") && !is_nccl("pt_nccl_watchdg"));
        let (mut reader, over) = (reader(std::process::id()), AtomicBool::new(false));
        let mut load = |at: Instant, first: bool| {
            let now_ns = if first { 0 } else { u64::try_from(at.elapsed().as_nanos()).unwrap() };
            reader.read(now_ns, &mut Groups::default()).unwrap().load.unwrap()
        };
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
            assert_eq!(load(begun, true).nccl_busy, None, "there is no time to hold it against");
            std::thread::sleep(Duration::from_millis(1200));
            let fact = load(begun, false);
            over.store(true, Ordering::Relaxed);
            fact
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
