//! Tells at once when a followed process has ended, so that nobody has to look every few milliseconds.

use super::descriptors::held;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

/// Ends that are taken at once.
const TAKEN: usize = 64;

/// Becomes readable when a process has ended, once for each.
#[derive(Debug)]
pub struct Ends(OwnedFd);

impl Ends {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Ends(held(epoll::create(CreateFlags::CLOEXEC)?)?))
    }

    /// Watches one more process, by what the kernel tells its end by. It is forgotten when that is closed.
    pub(super) fn watch(&self, end: BorrowedFd<'_>) -> io::Result<()> {
        let once = EventFlags::IN | EventFlags::ONESHOT;
        Ok(epoll::add(&self.0, end, EventData::new_u64(0), once)?)
    }

    /// Takes what has ended; true where something has.
    pub fn take(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut any = false;
        loop {
            let mut room = [const { MaybeUninit::uninit() }; TAKEN];
            match epoll::wait(&self.0, &mut room, Some(&now)) {
                Ok((taken, _)) if !taken.is_empty() => any = true,
                _ => return any,
            }
        }
    }
}

impl AsFd for Ends {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Ends {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, poll};
    use rustix::process::{Pid, PidfdFlags, pidfd_open};

    #[test]
    fn it_is_readable_once_for_each_end() {
        let ends = Ends::new().expect("an epoll");
        let readable = |ms: i64| {
            let time = Timespec { tv_sec: ms / 1000, tv_nsec: ms % 1000 * 1_000_000 };
            poll(&mut [PollFd::new(&ends, PollFlags::IN)], Some(&time)).expect("polls") > 0
        };
        let mut child = std::process::Command::new("sleep").arg("100").spawn().expect("starts");
        let end = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).expect("it runs");
        ends.watch(end.as_fd()).expect("watched");
        assert!(!readable(0) && !ends.take());
        child.kill().expect("our own");
        assert!(readable(10_000), "before it is waited for");
        assert!(ends.take());
        assert!(!readable(0) && !ends.take(), "once");
        child.wait().expect("our own");
    }
}
