//! Probes: processes that touch what other users can block, in place of the agent.
//!
//! A user can keep whoever looks at their files and processes waiting for ever: by a file system that never answers, by
//! the lock of a tmpfs inode (a `write` from a buffer that is mapped from such a file system holds it), or by the lock
//! that an `exec` holds. Not even SIGKILL ends some of these waits, and a thread that waits so keeps its whole process
//! from ending. A process can be abandoned.
//!
//! ```text
//! state thread -- orders --> survey thread -- request: tasks, descriptors --> probe (a process)
//!              <- reports --               <- answer: outcomes, descriptors --
//! ```
//! A probe has one thread, and notes which task it is at. So a request that is not answered in time names its task, and
//! with that its user.

mod answer;
mod message;
mod parties;
mod pool;
mod process;
mod traffic;

#[cfg(test)]
pub(super) use answer::facts;
pub(super) use message::{Bytes, FileFacts, FoundLife, OpenedSegment, Outcome, RefusedFolder, Task, Users};
pub(super) use parties::{Object, Subject, Unanswered};
pub(super) use pool::{Asked, Pool};
pub(super) use process::ProbeProcess;

use super::descriptors::at_once;
use answer::Answerer;
use message::{Answer, Request, Timed};
use process::Progress;
use std::ffi::OsString;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// A probe that has worked for so long at one request answers what it has done, so that others have their turn.
const SPENT: Duration = Duration::from_millis(200);

/// How a probe is started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProbeCommand {
    program: OsString,
    arguments: Vec<OsString>,
}

impl ProbeCommand {
    /// This program again, with these arguments: it has to call [`probe`].
    pub fn of_this_program(arguments: &[&str]) -> Self {
        // The name may lead to a newer release by now; this is the one that runs.
        Self::new("/proc/self/exe", arguments)
    }

    /// Another program.
    pub fn new(program: impl Into<OsString>, arguments: &[&str]) -> Self {
        ProbeCommand { program: program.into(), arguments: arguments.iter().map(OsString::from).collect() }
    }
}

/// Answers requests on standard input until nobody can send any more. Standard output is the file of its progress.
///
/// # Errors
/// What is wrong with standard input or output.
pub fn probe() -> std::io::Result<()> {
    let (socket, progress) = (std::io::stdin(), std::io::stdout());
    let mut answerer = Answerer::default();
    while let Some(received) = traffic::receive::<Request>(socket.as_fd(), || Ok(()))? {
        let mut fds = received.fds.into_iter();
        let (mut outcomes, mut out) = (Vec::new(), Vec::new());
        let began = Instant::now();
        for (n, (task, has_fd)) in (0..).zip(received.message.tasks) {
            let fd = has_fd.then(|| fds.next()).flatten();
            let mut at = Progress { task: n, step: 0, user: None };
            at.write(progress.as_fd())?;
            let mut step = |user| {
                (at.step, at.user) = (at.step + 1, Some(user));
                // What cannot be noted makes a long task look like one that hangs.
                at.write(progress.as_fd()).unwrap_or_default();
            };
            let task_began = Instant::now();
            let (outcome, descriptors) = answerer.answer(&task, fd, received.message.at_ns, &mut step);
            let took_us = u64::try_from(task_began.elapsed().as_micros()).unwrap_or(u64::MAX);
            outcomes.push(Timed { outcome, took_us, descriptors: descriptors.len() });
            out.extend(descriptors);
            // The one who asked may have no room for more.
            if began.elapsed() >= SPENT || out.len() >= at_once() {
                break;
            }
        }
        let out: Vec<_> = out.iter().map(AsFd::as_fd).collect();
        traffic::send(socket.as_fd(), &Answer { outcomes }, &out)?;
    }
    super::tool::wait_for_left();
    Ok(())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use rustix::net::SocketType;
    use rustix::net::sockopt::socket_type;

    /// This program as a probe.
    pub(in crate::ingest) fn command() -> ProbeCommand {
        let own = std::env::current_exe().expect("this program");
        ProbeCommand::new(
            own,
            &["--exact", "ingest::probe::tests::who_is_started_as_a_probe_is_one", "--nocapture"],
        )
    }

    #[test]
    fn who_is_started_as_a_probe_is_one() {
        if socket_type(std::io::stdin()) == Ok(SocketType::SEQPACKET) {
            probe().expect("requests");
        }
    }
}
