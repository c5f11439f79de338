//! Processes, as /proc and pidfds report them.

use super::descriptors::is_shortage;
use super::files::{ROOM, read};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{SystemTime, UNIX_EPOCH};

/// The host's monotonic clock in ns.
pub fn now_ns() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    u64::try_from(t.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(t.tv_nsec).unwrap_or(0)
}

/// The host's wall clock in ns since the epoch.
#[expect(clippy::disallowed_methods, reason = "here is where the time is known")]
pub fn unix_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// The line of /proc about a process.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Stat {
    /// Its state's letter.
    pub(super) state: u8,
    /// When it started, in clock ticks.
    pub(super) start_ticks: u64,
    /// How it ended, as `wait` says it; only where this process may know.
    pub(super) exit_status: Option<i32>,
}

/// A process's directory in /proc; `None` where there is none. It stays that of this process when another one gets its
/// pid.
///
/// # Errors
/// Nothing can be said of it: there is no descriptor or memory to open it.
pub(super) fn directory(pid: u32) -> Result<Option<OwnedFd>, Errno> {
    let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
    match rustix::fs::open(format!("/proc/{pid}"), flags, Mode::empty()) {
        Err(e) if is_shortage(e) => Err(e),
        opened => Ok(opened.ok()),
    }
}

/// Reads the line of a process in /proc; `None` where the process is gone.
///
/// # Errors
/// As [`directory`].
pub(super) fn stat(pid: u32) -> Result<Option<Stat>, Errno> {
    directory(pid)?.map_or(Ok(None), |dir| stat_in(dir.as_fd()))
}

/// The same by its directory in /proc.
///
/// # Errors
/// As [`directory`].
pub(super) fn stat_in(dir: BorrowedFd<'_>) -> Result<Option<Stat>, Errno> {
    let mut room = ROOM;
    let Some(mut stat) = read(dir, "stat", &mut room)?.and_then(Stat::parse) else { return Ok(None) };
    // To others the kernel says 0.
    let own = rustix::process::geteuid().as_raw();
    let may = own == 0 || rustix::fs::fstat(dir).is_ok_and(|m| m.st_uid == own);
    stat.exit_status = stat.exit_status.filter(|_| may);
    Ok(Some(stat))
}

impl Stat {
    pub(super) fn parse(text: &str) -> Option<Self> {
        // A program's name may hold anything, parentheses and spaces too.
        let mut fields = text.get(text.rfind(')')? + 1..)?.split_whitespace();
        let state = fields.next()?.bytes().next()?;
        let start_ticks = fields.nth(18)?.parse().ok()?;
        let exit_status = fields.nth(29).and_then(|f| f.parse().ok());
        Some(Stat { state, start_ticks, exit_status })
    }
}

pub(super) fn runs(pid: u32, start_ticks: u64) -> Result<bool, Errno> {
    Ok(stat(pid)?.is_some_and(|s| s.start_ticks == start_ticks && !matches!(s.state, b'Z' | b'X')))
}

/// Returns which of these processes have ended, waited for or not. One question to the kernel for all of them, where
/// the line in /proc of a single one takes twenty times as long.
pub(super) fn ended(processes: &[Option<BorrowedFd<'_>>]) -> Vec<bool> {
    let mut asked: Vec<PollFd<'_>> =
        processes.iter().flatten().map(|p| PollFd::from_borrowed_fd(*p, PollFlags::IN)).collect();
    let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    let any = !asked.is_empty() && poll(&mut asked, Some(&now)).is_ok_and(|n| n > 0);
    let mut answers = asked.iter().map(|a| any && !a.revents().is_empty());
    processes.iter().map(|p| p.is_some() && answers.next() == Some(true)).collect()
}

/// This boot's id: segments and findings of another boot have another monotonic clock.
pub fn boot_id() -> Option<String> {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").ok().map(|s| s.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Pid, PidfdFlags, pidfd_open};

    #[test]
    fn this_process_runs_and_another_start_time_is_another_process() {
        let pid = std::process::id();
        let start = stat(pid).expect("a descriptor").expect("procfs").start_ticks;
        assert_eq!(runs(pid, start), Ok(true));
        assert_eq!(runs(pid, start + 1), Ok(false));
    }

    #[test]
    fn a_process_has_ended_when_it_is_dead_waited_for_or_not() {
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
        let end = pidfd_open(pid, PidfdFlags::empty()).unwrap();
        let own = pidfd_open(rustix::process::getpid(), PidfdFlags::empty()).unwrap();
        let asked = [Some(own.as_fd()), None, Some(end.as_fd())];
        assert_eq!(ended(&asked), [false; 3]);
        child.kill().unwrap();
        let begun = std::time::Instant::now();
        while ended(&asked) != [false, false, true] {
            assert!(begun.elapsed() < std::time::Duration::from_secs(10));
        }
        child.wait().unwrap();
        assert_eq!(ended(&asked), [false, false, true]);
    }
}
