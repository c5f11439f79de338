//! The helper process that opens containers' /dev/shm, and the questions that it answers.
//!
//! A root that a user made may be a file system that never answers, and a process that waits for one can be killed by
//! nobody. So these roots are opened by a process of its own, which holds nothing of the agent's and can be abandoned.
//! One question is one packet, and so is its answer, which carries the open directory.

use super::directory::{DirectoryError, Shm};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use std::ffi::OsString;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// How long an answer may take. A healthy file system answers in microseconds.
const DEADLINE: Duration = Duration::from_secs(1);

/// How the helper process is started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Helper {
    program: OsString,
    arguments: Vec<OsString>,
}

impl Helper {
    /// This program again, with these arguments: it has to call [`open_roots`].
    pub fn of_this_program(arguments: &[&str]) -> Self {
        // The name may lead to a newer release by now; this is the one that runs.
        Self::new("/proc/self/exe", arguments)
    }

    /// Another program.
    pub fn new(program: impl Into<OsString>, arguments: &[&str]) -> Self {
        Helper { program: program.into(), arguments: arguments.iter().map(OsString::from).collect() }
    }
}

/// What is asked: a process, and the mount namespace that it was in when it was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Question {
    pub(super) pid: u32,
    pub(super) namespace: u64,
}

impl Question {
    const BYTES: usize = 12;

    fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..4].copy_from_slice(&self.pid.to_le_bytes());
        bytes[4..].copy_from_slice(&self.namespace.to_le_bytes());
        bytes
    }

    fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        let (pid, namespace) = bytes.split_at(4);
        Question {
            pid: u32::from_le_bytes(pid.try_into().unwrap_or_default()),
            namespace: u64::from_le_bytes(namespace.try_into().unwrap_or_default()),
        }
    }
}

/// Why there is no directory.
#[derive(Debug)]
pub(super) enum Refusal {
    /// The namespace has none that can hold segments, or the process has gone.
    Nothing,
    /// It is a link, or not on tmpfs.
    NotTmpfs,
    /// It cannot be opened.
    Failed(Errno),
    /// Its file system does not answer. The helper that asked is stuck.
    Stalled(Child),
    /// No helper can be had.
    NoHelper(std::io::Error),
}

/// The helper process at work.
#[derive(Debug)]
pub(super) struct Running {
    child: Child,
    socket: OwnedFd,
}

impl Running {
    pub(super) fn start(helper: &Helper) -> std::io::Result<Self> {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let child = Command::new(&helper.program)
            .args(&helper.arguments)
            .env_clear()
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        Ok(Running { child, socket: ours })
    }

    /// Asks for the /dev/shm of a process's mount namespace. A helper that does not answer in time is given back.
    pub(super) fn ask(mut self, question: Question) -> (Option<Self>, Result<OwnedFd, Refusal>) {
        match self.exchange(question) {
            Ok(Ok(fd)) => (Some(self), Ok(fd)),
            Ok(Err(why)) => (Some(self), Err(why)),
            Err(Errno::TIMEDOUT) => {
                // It may not be possible to kill it; then it goes when its file system answers.
                self.child.kill().ok();
                (None, Err(Refusal::Stalled(self.child)))
            }
            Err(e) => {
                self.child.kill().ok();
                self.child.wait().ok();
                (None, Err(Refusal::NoHelper(e.into())))
            }
        }
    }

    fn exchange(&self, question: Question) -> Result<Result<OwnedFd, Refusal>, Errno> {
        rustix::net::send(&self.socket, &question.to_bytes(), SendFlags::NOSIGNAL)?;
        let seconds = i64::try_from(DEADLINE.as_secs()).unwrap_or(i64::MAX);
        let deadline = Timespec { tv_sec: seconds, tv_nsec: DEADLINE.subsec_nanos().into() };
        if poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&deadline))? == 0 {
            return Err(Errno::TIMEDOUT);
        }
        let mut bytes = [0; 5];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let got = recvmsg(&self.socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags)?;
        if got.bytes == 0 {
            return Err(Errno::PIPE);
        }
        let fds = control.drain().filter_map(|m| match m {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        });
        let fd = fds.last();
        let [kind, errno @ ..] = bytes;
        Ok(fd.ok_or(match kind {
            NOT_TMPFS => Refusal::NotTmpfs,
            FAILED => Refusal::Failed(Errno::from_raw_os_error(i32::from_le_bytes(errno))),
            // It was sent, and there was no descriptor left to take it.
            _ if got.flags.contains(ReturnFlags::CTRUNC) => Refusal::Failed(Errno::MFILE),
            _ => Refusal::Nothing,
        }))
    }

    /// Lets it end, which it does when nobody can ask any more.
    pub(super) fn end(self) {
        let Running { mut child, socket } = self;
        drop(socket);
        child.wait().ok();
    }
}

/// Answers questions on standard input until nobody can ask any more: what the helper process does.
///
/// # Errors
/// What is wrong with standard input.
pub fn open_roots() -> std::io::Result<()> {
    let socket = std::io::stdin();
    loop {
        let mut bytes = [0; Question::BYTES];
        if rustix::net::recv(&socket, &mut bytes[..], RecvFlags::empty())?.0 != Question::BYTES {
            return Ok(());
        }
        answer(socket.as_fd(), &open(Question::from_bytes(bytes)))?;
    }
}

/// The byte of an answer without a directory: it is not there, or is a link or not on tmpfs.
const NOTHING: u8 = 0;
const NOT_TMPFS: u8 = 1;
/// The system call failed; its error stands behind this byte.
const FAILED: u8 = 2;

fn answer(socket: BorrowedFd<'_>, opened: &Result<OwnedFd, DirectoryError>) -> std::io::Result<()> {
    let (byte, errno) = match opened {
        Err(DirectoryError::NotTmpfs | DirectoryError::Io(Errno::LOOP | Errno::NOTDIR)) => (NOT_TMPFS, 0),
        Ok(_)
        | Err(
            DirectoryError::TooMany
            | DirectoryError::InTurns
            | DirectoryError::Io(Errno::NOENT | Errno::SRCH),
        ) => (NOTHING, 0),
        Err(DirectoryError::Io(e)) => (FAILED, e.raw_os_error()),
    };
    let mut bytes = [byte, 0, 0, 0, 0];
    bytes[1..].copy_from_slice(&errno.to_le_bytes());
    let fds: Vec<BorrowedFd<'_>> = opened.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&fds));
    }
    sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

fn open(question: Question) -> Result<OwnedFd, DirectoryError> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let process = rustix::fs::open(format!("/proc/{}", question.pid), flags, Mode::empty())?;
    // The one magic link that is followed.
    let root = rustix::fs::openat(&process, "root", flags, Mode::empty())?;
    // The process may have ended, or moved to another namespace, since it was found.
    if namespace_of(process.as_fd()) != Some(question.namespace) {
        return Err(Errno::SRCH.into());
    }
    Shm::open_below(root.as_fd())
}

/// The mount namespace of a process, by its directory in /proc; `None` where that may not be known.
pub(super) fn namespace_of(process: BorrowedFd<'_>) -> Option<u64> {
    // The link leads to the namespace itself, and asks nothing of any file system in it.
    rustix::fs::statat(process, "ns/mnt", AtFlags::empty()).ok().map(|s| s.st_ino)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_is_read_as_it_was_asked() {
        let q = Question { pid: 7, namespace: u64::MAX - 1 };
        assert_eq!(Question::from_bytes(q.to_bytes()), q);
    }

    #[test]
    fn a_helper_that_does_not_answer_is_given_up_in_time() {
        let began = std::time::Instant::now();
        let silent = Running::start(&Helper::new("sleep", &["100"])).expect("starts");
        let (left, said) = silent.ask(Question { pid: 1, namespace: 1 });
        let Err(Refusal::Stalled(mut child)) = said else { panic!("{said:?}") };
        assert!(left.is_none() && began.elapsed() >= DEADLINE);
        child.wait().expect("it was killed");
    }

    #[test]
    fn a_helper_that_ends_or_is_not_there_is_told_so() {
        let ends = Running::start(&Helper::new("true", &[])).expect("starts");
        assert!(matches!(ends.ask(Question { pid: 1, namespace: 1 }).1, Err(Refusal::NoHelper(_))));
        assert!(Running::start(&Helper::new("/nowhere/helper", &[])).is_err());
    }

    #[test]
    fn a_shm_is_opened_for_the_namespace_that_was_asked_for() {
        let own =
            rustix::fs::open("/proc/self", OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).expect("opens");
        let namespace = namespace_of(own.as_fd()).expect("known");
        let pid = std::process::id();
        let fd = open(Question { pid, namespace }).expect("the host's own");
        let own = rustix::fs::stat("/dev/shm").expect("there");
        assert_eq!(rustix::fs::fstat(&fd).expect("open").st_ino, own.st_ino);
        assert!(open(Question { pid, namespace: namespace ^ 1 }).is_err());
        assert!(open(Question { pid: u32::MAX, namespace }).is_err());
    }
}
