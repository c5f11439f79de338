//! Processes in pid namespaces, by the pids that they have there.
//!
//! A segment names its process by the pid that this has in its own namespace. Where its lock does not lead to the
//! process, the list of pids that the kernel gives of each process does. `status` is read of each: unlike `stat` and
//! `ns/pid` it takes no lock that an exec may hold.

use super::files::{ROOM, read};
use super::process;
use rustix::fs::{Mode, OFlags, RawDir};
use rustix::io::Errno;
use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

/// Processes are listed again after this at the earliest: a segment may name any start.
const AGAIN: Duration = Duration::from_secs(1);
/// Processes that are listed at most.
const PROCESSES_MAX: usize = 65_536;

/// The processes of this host by their numbers in their own pid namespaces.
#[derive(Debug, Default)]
pub(super) struct PidNamespaces {
    /// Pids as this process sees them, by the innermost one.
    by_inner: HashMap<u32, Vec<u32>>,
    listed: Option<Listed>,
}

#[derive(Debug, Clone, Copy)]
struct Listed {
    at: Instant,
    /// Processes that began before this were listed, where they still ran.
    ticks: u64,
}

/// The answer about a process by its inner pid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Inner {
    /// It runs, and this process sees it by this pid.
    Runs(u32),
    /// No process that is seen from here is called so.
    Nobody,
    /// It would have begun after processes were listed; they will be listed again.
    TooYoung,
}

impl PidNamespaces {
    /// Finds the process of a user that began at `start_ticks` and is called `inner` in its pid namespace.
    ///
    /// # Errors
    /// Nothing can be said of it: a descriptor or memory is missing.
    pub(super) fn find(&mut self, inner: u32, start_ticks: u64, owner: u32) -> Result<Inner, Errno> {
        // Nothing has begun in the future.
        if start_ticks > ticks_now() {
            return Ok(Inner::Nobody);
        }
        let is_covered = |l: Listed| start_ticks < l.ticks;
        if !self.listed.is_some_and(|l| is_covered(l) || l.at.elapsed() < AGAIN) {
            self.list()?;
        }
        for pid in self.by_inner.get(&inner).into_iter().flatten() {
            let Some(dir) = process::directory(*pid)? else { continue };
            let is_owners = rustix::fs::fstat(&dir).is_ok_and(|s| s.st_uid == owner);
            if is_owners && process::stat_in(dir.as_fd())?.is_some_and(|s| s.start_ticks == start_ticks) {
                return Ok(Inner::Runs(*pid));
            }
        }
        Ok(if self.listed.is_some_and(is_covered) { Inner::Nobody } else { Inner::TooYoung })
    }

    fn list(&mut self) -> Result<(), Errno> {
        self.by_inner.clear();
        self.listed = Some(Listed { at: Instant::now(), ticks: ticks_now() });
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
        let proc = rustix::fs::open("/proc", flags, Mode::empty())?;
        let mut room = [MaybeUninit::uninit(); 8192];
        let mut entries = RawDir::new(&proc, &mut room);
        let mut many = 0;
        while let (Some(Ok(entry)), true) = (entries.next(), many < PROCESSES_MAX) {
            let Some(pid) = entry.file_name().to_str().ok().and_then(|name| name.parse().ok()) else {
                continue;
            };
            many += 1;
            if let Some(inner) = inner_pid(proc.as_fd(), pid)? {
                self.by_inner.entry(inner).or_default().push(pid);
            }
        }
        Ok(())
    }
}

/// The number of a process in its own pid namespace, where that is another one than this process's.
fn inner_pid(proc: BorrowedFd<'_>, pid: u32) -> Result<Option<u32>, Errno> {
    let mut room = ROOM;
    Ok(read(proc, &format!("{pid}/status"), &mut room)?.and_then(innermost))
}

/// The last of several pids in the text of a `status`.
fn innermost(status: &str) -> Option<u32> {
    let mut pids = status.lines().find_map(|l| l.strip_prefix("NSpid:"))?.split_whitespace();
    pids.next()?;
    pids.next_back()?.parse().ok()
}

/// The time since boot in clock ticks, as /proc counts the starts of processes.
fn ticks_now() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let a_second = rustix::param::clock_ticks_per_second();
    let (seconds, ns) = (u64::try_from(t.tv_sec).unwrap_or(0), u64::try_from(t.tv_nsec).unwrap_or(0));
    seconds * a_second + ns * a_second / 1_000_000_000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_processes_of_other_namespaces_have_an_inner_pid() {
        assert_eq!(innermost("Name:\tx\nNSpid:\t4711\nNSpgid:\t4711\n"), None);
        assert_eq!(innermost("Name:\tx\nNSpid:\t4711\t12\t1\n"), Some(1));
        assert_eq!(innermost("Name:\tx\n"), None);
    }

    #[test]
    fn ticks_are_those_of_starts() {
        let child = std::process::Command::new("sleep").arg("100").spawn();
        let mut child = child.expect("starts");
        let started = process::stat(child.id()).expect("readable").expect("runs").start_ticks;
        child.kill().expect("our own");
        child.wait().expect("gone");
        assert!(started.abs_diff(ticks_now()) < 500, "{started} and {}", ticks_now());
    }
}
