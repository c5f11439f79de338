//! One probe as the process that started it sees it.

use super::ProbeCommand;
use super::message::{Answer, Outcome, Request, Task};
use super::traffic::{self, Received};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::MemfdFlags;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, Signal, kill_process_group};
use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A probe that makes no progress for so long is stuck. A healthy task takes microseconds.
pub(super) const DEADLINE: Duration = Duration::from_millis(400);
/// A probe that is kept from the CPU has so many deadlines.
const RUNNABLE_MAX: u32 = 10;

/// Where a probe is in its request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::ingest) struct Progress {
    pub(super) task: u32,
    pub(super) step: u32,
    /// The owner of the file it is at, where the task is about files of several users.
    pub(super) user: Option<u32>,
}

impl Progress {
    pub(super) fn write(self, file: BorrowedFd<'_>) -> std::io::Result<()> {
        let at = u64::from(self.task) << 32 | u64::from(self.step);
        let user = self.user.map_or(0, |uid| u64::from(uid) + 1);
        rustix::io::pwrite(file, [at.to_le_bytes(), user.to_le_bytes()].as_flattened(), 0)?;
        Ok(())
    }

    fn read(file: BorrowedFd<'_>) -> Self {
        let mut bytes = [[0; 8]; 2];
        // Nothing is written yet where it is too short.
        rustix::io::pread(file, bytes.as_flattened_mut(), 0).unwrap_or_default();
        let [at, user] = bytes.map(u64::from_le_bytes);
        let user = user.checked_sub(1).and_then(|uid| u32::try_from(uid).ok());
        Progress { task: (at >> 32) as u32, step: at as u32, user }
    }
}

/// Why a probe did not answer.
#[derive(Debug)]
pub(in crate::ingest) enum NoAnswer {
    /// It is stuck there, and may not die for as long as that lasts.
    Stuck(Progress, Child),
    /// It has ended, or what it sends makes no sense.
    Broken(Child, std::io::Error),
}

impl NoAnswer {
    /// The process, which was killed.
    pub(in crate::ingest) fn into_child(self) -> Child {
        match self {
            NoAnswer::Stuck(_, child) | NoAnswer::Broken(child, _) => child,
        }
    }
}

/// Outcomes of the first tasks of a request, with the time that each took and its descriptors.
pub(in crate::ingest) type Answers = Vec<(Outcome, Duration, Vec<OwnedFd>)>;

/// A probe at work.
#[derive(Debug)]
pub(in crate::ingest) struct ProbeProcess {
    child: Child,
    socket: OwnedFd,
    progress: OwnedFd,
}

impl ProbeProcess {
    /// Starts one, with these variables as its environment.
    pub(in crate::ingest) fn start(
        command: &ProbeCommand,
        environment: &[(&str, std::ffi::OsString)],
    ) -> std::io::Result<Self> {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let progress = rustix::fs::memfd_create("ringwatch-progress", MemfdFlags::CLOEXEC)?;
        let child = Command::new(&command.program)
            .args(&command.arguments)
            .env_clear()
            .envs(environment.iter().map(|(name, value)| (*name, value)))
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::from(progress.try_clone()?))
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()?;
        Ok(ProbeProcess { child, socket: ours, progress })
    }

    /// Sends tasks, each with the descriptor that it needs.
    pub(in crate::ingest) fn send(
        &self,
        now_ns: u64,
        tasks: &[(&Task, Option<BorrowedFd<'_>>)],
    ) -> std::io::Result<()> {
        Progress { task: 0, step: 0, user: None }.write(self.progress.as_fd())?;
        let request = Request {
            at_ns: now_ns,
            tasks: tasks.iter().map(|(task, fd)| ((*task).clone(), fd.is_some())).collect(),
        };
        let fds: Vec<_> = tasks.iter().filter_map(|(_, fd)| *fd).collect();
        traffic::send(self.socket.as_fd(), &request, &fds)
    }

    /// True when there is something to receive.
    pub(in crate::ingest) fn has_answered(&self) -> bool {
        is_readable(&self.socket, Duration::ZERO).unwrap_or(true)
    }

    /// Waits for the answer to what was sent, as long as the probe makes progress.
    pub(in crate::ingest) fn receive(self) -> Result<(Self, Answers), NoAnswer> {
        let mut stuck_at = None;
        let wait = || self.wait().inspect_err(|_| stuck_at = Some(Progress::read(self.progress.as_fd())));
        let received = traffic::receive::<Answer>(self.socket.as_fd(), wait);
        match (received, stuck_at) {
            (Ok(Some(received)), _) => Ok((self, answers(received))),
            (_, Some(at)) => Err(NoAnswer::Stuck(at, self.abandon())),
            (received, None) => {
                let why = received.err().unwrap_or_else(|| Errno::PIPE.into());
                Err(NoAnswer::Broken(self.abandon(), why))
            }
        }
    }

    /// Waits for a packet; an error where none comes while the probe makes no progress.
    fn wait(&self) -> Result<(), Errno> {
        let mut at = Progress::read(self.progress.as_fd());
        let mut runnable = 0;
        while !is_readable(&self.socket, DEADLINE)? {
            let now = Progress::read(self.progress.as_fd());
            if now != at {
                (at, runnable) = (now, 0);
                continue;
            }
            // On a busy host it may not have had the CPU.
            runnable += 1;
            if !self.is_runnable() || runnable > RUNNABLE_MAX {
                return Err(Errno::TIMEDOUT);
            }
        }
        Ok(())
    }

    fn is_runnable(&self) -> bool {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap_or_default();
        status.lines().find_map(|l| l.strip_prefix("State:")).is_some_and(|s| s.trim().starts_with('R'))
    }

    /// Kills it and what it has started. It may stay for as long as what it waits for does not answer.
    pub(in crate::ingest) fn abandon(mut self) -> Child {
        // It leads a group of its own.
        kill_process_group(Pid::from_child(&self.child), Signal::KILL).ok();
        self.child.kill().ok();
        self.child
    }

    /// Lets it end, which it does when nobody can send any more.
    pub(in crate::ingest) fn end(self) -> Child {
        self.child
    }
}

fn is_readable(socket: &OwnedFd, within: Duration) -> Result<bool, Errno> {
    let until = Instant::now() + within;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let time = Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        };
        match poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&time)) {
            Err(Errno::INTR) => {}
            polled => return Ok(polled? > 0),
        }
    }
}

fn answers(received: Received<Answer>) -> Answers {
    let mut fds = received.fds.into_iter();
    let of = |timed: super::message::Timed| {
        let own: Vec<OwnedFd> = fds.by_ref().take(timed.descriptors).collect();
        // It was sent, and there was no descriptor left to take it.
        let outcome = match own.len() < timed.descriptors {
            true => Outcome::Failed(Errno::MFILE.into(), None),
            false => timed.outcome,
        };
        (outcome, Duration::from_micros(timed.took_us), own)
    };
    received.message.outcomes.into_iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_is_read_as_it_was_noted() {
        let file = rustix::fs::memfd_create("progress", MemfdFlags::CLOEXEC).expect("a file");
        for user in [None, Some(0), Some(u32::MAX)] {
            let at = Progress { task: 7, step: u32::MAX, user };
            at.write(file.as_fd()).expect("written");
            assert_eq!(Progress::read(file.as_fd()), at);
        }
    }

    const TASK: Task = Task::ListProcesses;

    #[test]
    fn a_probe_that_does_not_answer_is_given_up_in_time() {
        let began = Instant::now();
        let silent = ProbeProcess::start(&ProbeCommand::new("sleep", &["100"]), &[]).expect("starts");
        silent.send(0, &[(&TASK, None)]).expect("sent");
        let Err(NoAnswer::Stuck(at, mut child)) = silent.receive() else { panic!("it sleeps") };
        let took = began.elapsed();
        assert_eq!(at, Progress { task: 0, step: 0, user: None });
        assert!((DEADLINE..10 * DEADLINE).contains(&took), "{took:?}");
        child.wait().expect("it was killed");
    }

    #[test]
    fn a_probe_that_ends_or_is_not_there_is_no_answer() {
        let ends = ProbeProcess::start(&ProbeCommand::new("true", &[]), &[]).expect("starts");
        // It may be gone before anything is sent.
        ends.send(0, &[(&TASK, None)]).unwrap_or_default();
        assert!(matches!(ends.receive(), Err(NoAnswer::Broken(..))));
        assert!(ProbeProcess::start(&ProbeCommand::new("/nowhere/probe", &[]), &[]).is_err());
    }
}
