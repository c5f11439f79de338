//! Whether the process behind a segment runs.

use std::fs;
use std::path::Path;

/// The host's monotonic clock in ns.
pub fn now_ns() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    u64::try_from(t.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(t.tv_nsec).unwrap_or(0)
}

/// State letter and start time in clock ticks of a process.
fn stat(pid: u32) -> Option<(u8, u64)> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // A program's name may hold anything, parentheses and spaces too.
    let mut fields = text.get(text.rfind(')')? + 1..)?.split_whitespace();
    let state = fields.next()?.bytes().next()?;
    Some((state, fields.nth(18)?.parse().ok()?))
}

fn runs(pid: u32, start_ticks: u64) -> bool {
    stat(pid).is_some_and(|(state, start)| start == start_ticks && !matches!(state, b'Z' | b'X'))
}

/// Follows one process by pid and start time, through pid namespaces.
#[derive(Debug)]
pub(super) struct Watched {
    pid: u32,
    start_ticks: u64,
}

impl Watched {
    /// Finds the process that calls itself `pid` and started at `start_ticks`; `None` when it is gone.
    pub(super) fn find(pid: u32, start_ticks: u64) -> Option<Self> {
        if runs(pid, start_ticks) {
            return Some(Watched { pid, start_ticks });
        }
        // In a container it has another number there than here.
        let proc = fs::read_dir("/proc").ok()?;
        proc.flatten()
            .filter_map(|e| e.file_name().to_str()?.parse().ok())
            .find(|host: &u32| runs(*host, start_ticks) && inner_pid(*host) == Some(pid))
            .map(|host| Watched { pid: host, start_ticks })
    }

    /// True while it runs.
    pub(super) fn runs(&self) -> bool {
        runs(self.pid, self.start_ticks)
    }
}

/// The pid that a process has in its own, innermost namespace.
fn inner_pid(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("status")).ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("NSpid:"))?;
    line.split_whitespace().last()?.parse().ok()
}

/// This boot's id, to tell black boxes of an earlier one, whose clocks are not ours.
pub(super) fn boot_id() -> Option<String> {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").ok().map(|s| s.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_runs_and_another_start_time_is_another_process() {
        let pid = std::process::id();
        let (_, start) = stat(pid).expect("procfs");
        assert!(Watched::find(pid, start).expect("found").runs());
        assert!(Watched::find(pid, start + 1).is_none());
        assert_eq!(inner_pid(pid), Some(pid));
    }
}
