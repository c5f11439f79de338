//! The life of the process behind a segment: how a probe finds out, and how it is seen to end.

use super::descriptors::{held, is_shortage};
use super::directory::Failure;
use super::lock::Lock;
use super::pid_namespaces::{Inner, PidNamespaces};
use super::probe::FoundLife;
use super::process::{boot_id, runs};
use ringwatch_wire::layout::{FORMAT_VERSION, HEADER_BYTES, MAGIC, OLDEST_VERSION, head};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::fs::{self, File};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};

/// The identity of a process, by its segment.
#[derive(Debug)]
pub(super) struct Identity {
    pub(super) pid: u32,
    pub(super) start_ticks: u64,
    pub(super) nonce: u64,
    /// The boot in which it ran, where that is said.
    boot: String,
}

impl Identity {
    /// Reads it from a file; `None` where this does not begin as a segment.
    pub(super) fn read(file: &File) -> Option<Self> {
        let mut header = [0; HEADER_BYTES];
        file.read_exact_at(&mut header, 0).ok()?;
        let bytes = |word: usize, count: usize| header.get(word * 8..(word + count) * 8);
        let word = |at: usize| Some(u64::from_le_bytes(bytes(at, 1)?.try_into().ok()?));
        let known = OLDEST_VERSION..=FORMAT_VERSION;
        if word(head::MAGIC)? != MAGIC || !known.contains(&(word(head::VERSION)? as u32)) {
            return None;
        }
        let boot = String::from_utf8_lossy(bytes(head::BOOT_ID, head::BOOT_ID_WORDS)?);
        Some(Identity {
            pid: word(head::PID)? as u32,
            start_ticks: word(head::START_TICKS)?,
            nonce: word(head::NONCE)?,
            boot: boot.trim_matches('\0').to_owned(),
        })
    }

    /// Looks for the process, whose segment belongs to `owner`; `None` when it is gone. A pidfd comes with it, where the
    /// kernel has such.
    ///
    /// A lock is proof, and no lock is none: a job that closes another descriptor of its segment loses a record lock. So
    /// the process is looked for by its pid, and by the pid that it has in its own namespace.
    ///
    /// # Errors
    /// A descriptor or memory is missing, or the answer comes later.
    pub(super) fn find_process(
        &self,
        owner: u32,
        lock: Lock,
        namespaces: &mut PidNamespaces,
    ) -> Result<Option<(FoundLife, Option<OwnedFd>)>, Failure> {
        if !self.boot.is_empty() && boot_id().is_some_and(|boot| boot != self.boot) {
            return Ok(None);
        }
        // In another pid namespace it has another pid there; the kernel tells ours by the lock.
        if let Lock::Process(holder) = lock
            && let Some(found) = self.at(holder)?
        {
            return Ok(Some(found));
        }
        // The pid is the segment's own word: it counts for a process of the file's owner alone, or anybody could
        // have another's process looked into.
        let of_pid = fs::metadata(format!("/proc/{}", self.pid));
        if of_pid.is_ok_and(|m| m.uid() == owner)
            && let Some(found) = self.at(self.pid)?
        {
            return Ok(Some(found));
        }
        match namespaces.find(self.pid, self.start_ticks, owner)? {
            Inner::Runs(pid) => {
                if let Some(found) = self.at(pid)? {
                    return Ok(Some(found));
                }
            }
            Inner::TooYoung if lock == Lock::Free => return Err(Failure::TooYoung),
            Inner::TooYoung | Inner::Nobody => {}
        }
        Ok((lock != Lock::Free).then_some((FoundLife::Lock, None)))
    }

    /// The process of this pid, where it is the one that began at the segment's time.
    fn at(&self, pid: u32) -> Result<Option<(FoundLife, Option<OwnedFd>)>, Errno> {
        // Opened before it is seen to run: so it is of this very process.
        let pid_of_system = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let end = match pid_of_system.map(|pid| pidfd_open(pid, PidfdFlags::empty())) {
            Some(Ok(fd)) => Some(fd),
            Some(Err(e)) if is_shortage(e) => return Err(e),
            // A kernel that has no such descriptors, or there is no such process.
            _ => None,
        };
        let found = FoundLife::Process(pid, self.start_ticks);
        Ok(runs(pid, self.start_ticks)?.then_some((found, end)))
    }
}

/// How it is known that a followed segment's process lives.
#[derive(Debug)]
pub(super) enum Life {
    /// It is this process, by pid and start time, and by what the kernel tells its end by, where it does.
    Process(u32, u64, Option<OwnedFd>),
    /// It cannot be seen from here, but holds its segment's lock.
    Lock,
}

impl Life {
    /// The same as a probe has found it.
    ///
    /// # Errors
    /// The descriptor may not be held.
    pub(super) fn new(found: FoundLife, end: Option<OwnedFd>) -> Result<Self, Errno> {
        Ok(match found {
            FoundLife::Process(pid, start_ticks) => {
                Life::Process(pid, start_ticks, end.map(held).transpose()?)
            }
            FoundLife::Lock => Life::Lock,
        })
    }

    /// Pid and start time, where the process is seen from here.
    pub(super) fn process(&self) -> Option<(u32, u64)> {
        match self {
            Life::Process(pid, start_ticks, _) => Some((*pid, *start_ticks)),
            Life::Lock => None,
        }
    }

    /// The descriptor by which the kernel reports its end, where it does: [`super::process::ended`] asks.
    pub(super) fn end(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Life::Process(.., end) => end.as_ref().map(AsFd::as_fd),
            Life::Lock => None,
        }
    }

    /// True while it lives; `ended` is what the kernel said of its end, `was_read_over` what was read of it last, and `lock`
    /// asks who holds its lock.
    pub(super) fn goes_on(&self, ended: bool, was_read_over: bool, lock: impl FnOnce() -> Lock) -> bool {
        match self {
            Life::Process(.., None) => !was_read_over,
            Life::Process(.., Some(_)) => !ended,
            Life::Lock => lock() != Lock::Free,
        }
    }
}
