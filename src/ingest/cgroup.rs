//! Control groups, version 2: what the kernel says of all processes in one together.

use super::descriptors::held;
use super::files::{ROOM, named, read};
use rustix::fs::{Mode, OFlags};
use std::collections::BTreeMap;
use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

/// Between two looks at a group, in ns.
const LOOK_NS: u64 = 1_000_000_000;
/// A group that nobody asked for so long has no process here any more, in ns.
const FORGOTTEN_NS: u64 = 60_000_000_000;

/// The groups of the watched processes. Those of a job are mostly in one, which is read once for all of them: the kernel
/// adds up its counters over all CPUs for each reader.
#[derive(Debug, Default)]
pub(super) struct Groups {
    by_path: BTreeMap<PathBuf, Group>,
}

/// The state of a group. What is not known is absent.
#[derive(Debug, Default)]
pub(super) struct Group {
    dir: Option<OwnedFd>,
    looked_ns: Option<u64>,
    throttled_us: Option<u64>,
    /// Share of the time between two looks in which it was not allowed to run.
    pub(super) cpu_throttled: Option<f64>,
    /// Share of the last ten seconds in which some process of it waited for memory.
    pub(super) memory_pressure: Option<f64>,
    /// Processes of it that the kernel killed for want of memory.
    pub(super) oom_kills: Option<u64>,
}

impl Groups {
    /// The state of a group, at most a second old.
    pub(super) fn look(&mut self, path: &Path, now_ns: u64) -> &Group {
        let group = self.at(path, now_ns);
        if group.looked_ns.is_none_or(|t| now_ns.saturating_sub(t) >= LOOK_NS) {
            // One of the same name may have been made in place of one that is gone.
            if !group.is_there() {
                *group = Group::open(path);
            }
            group.look(now_ns);
        }
        group
    }

    /// The same as it is now: who has just ended may have been counted since.
    pub(super) fn look_again(&mut self, path: &Path, now_ns: u64) -> &Group {
        let group = self.at(path, now_ns);
        group.oom_kills = group.number("memory.events", "oom_kill");
        group
    }

    fn at(&mut self, path: &Path, now_ns: u64) -> &mut Group {
        if !self.by_path.contains_key(path) {
            let is_used = |g: &Group| g.looked_ns.is_some_and(|t| now_ns.saturating_sub(t) < FORGOTTEN_NS);
            self.by_path.retain(|_, g| is_used(g));
        }
        self.by_path.entry(path.to_owned()).or_insert_with(|| Group::open(path))
    }
}

impl Group {
    fn open(path: &Path) -> Self {
        let dir = rustix::fs::open(path, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
        Group { dir: dir.and_then(held).ok(), ..Group::default() }
    }

    /// True while its directory is; the descriptor of one that was removed has no links.
    fn is_there(&self) -> bool {
        let stat = self.dir.as_ref().and_then(|d| rustix::fs::fstat(d).ok());
        stat.is_some_and(|s| s.st_nlink > 0)
    }

    fn look(&mut self, now_ns: u64) {
        let since = self.looked_ns.replace(now_ns).map(|t| now_ns.saturating_sub(t)).filter(|ns| *ns > 0);
        let throttled = self.number("cpu.stat", "throttled_usec");
        let gained = throttled.zip(self.throttled_us).map(|(new, old)| new.saturating_sub(old));
        self.cpu_throttled = gained.zip(since).map(|(us, ns)| (us as f64 * 1e3 / ns as f64).min(1.0));
        self.throttled_us = throttled;
        self.memory_pressure = self.text("memory.pressure", &mut ROOM.clone()).and_then(pressure);
        self.oom_kills = self.number("memory.events", "oom_kill");
    }

    fn text<'r>(&self, name: &str, room: &'r mut [u8]) -> Option<&'r str> {
        read(self.dir.as_ref()?.as_fd(), name, room).ok()?
    }

    fn number(&self, name: &str, word: &str) -> Option<u64> {
        named(self.text(name, &mut ROOM.clone())?, word)
    }
}

/// The directory of a process's group.
pub(super) fn of_process(pid: u32) -> Option<PathBuf> {
    let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    let path = text.lines().find_map(|l| l.strip_prefix("0::"))?;
    // Outside this process's own cgroup namespace nothing is to be seen.
    if path.contains("..") {
        return None;
    }
    [PathBuf::from("/sys/fs/cgroup"), PathBuf::from("/sys/fs/cgroup/unified")]
        .into_iter()
        .map(|root| root.join(path.trim_start_matches('/')))
        .find(|d| d.join("cgroup.procs").exists())
}

/// Of a pressure file, the share of the last ten seconds in which some task stood still.
pub(super) fn pressure(text: &str) -> Option<f64> {
    let some = text.lines().find(|l| l.starts_with("some "))?;
    let percent: f64 = some.split_whitespace().find_map(|w| w.strip_prefix("avg10="))?.parse().ok()?;
    Some(percent / 100.0).filter(|share| (0.0..=1.0).contains(share))
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    #[test]
    fn a_group_is_read_once_a_second_for_all_its_processes() {
        let dir = tempfile::tempdir().unwrap();
        let write = |throttled: u64, oom: u64| {
            let stat = format!("usage_usec 5\nthrottled_usec {throttled}\n");
            fs::write(dir.path().join("cpu.stat"), stat).unwrap();
            fs::write(dir.path().join("memory.events"), format!("oom 9\noom_kill {oom}\n")).unwrap();
        };
        let mut groups = Groups::default();
        write(0, 0);
        let first = groups.look(dir.path(), S);
        assert_eq!((first.cpu_throttled, first.oom_kills, first.memory_pressure), (None, Some(0), None));
        write(500_000, 1);
        assert_eq!(groups.look(dir.path(), S + S / 2).oom_kills, Some(0), "it was read half a second ago");
        assert_eq!(groups.look_again(dir.path(), S + S / 2).oom_kills, Some(1));
        assert_eq!(groups.look(dir.path(), 2 * S).cpu_throttled, Some(0.5));
    }

    #[test]
    fn a_group_that_is_made_again_is_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("job.scope");
        let mut groups = Groups::default();
        assert_eq!(groups.look(&path, S).oom_kills, None, "there is none yet");
        for (n, at) in [(1, 2 * S), (2, 3 * S)] {
            fs::create_dir(&path).unwrap();
            fs::write(path.join("memory.events"), format!("oom_kill {n}\n")).unwrap();
            assert_eq!(groups.look(&path, at).oom_kills, Some(n));
            fs::remove_dir_all(&path).unwrap();
        }
    }

    #[test]
    fn groups_of_which_nobody_asks_are_forgotten() {
        let (old, new) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut groups = Groups::default();
        groups.look(old.path(), S);
        groups.look(new.path(), S + FORGOTTEN_NS);
        assert_eq!(groups.by_path.keys().collect::<Vec<_>>(), [new.path()]);
    }

    #[test]
    fn pressure_is_read_as_the_kernel_writes_it() {
        let text =
            "some avg10=12.50 avg60=1.00 avg300=0.20 total=1\nfull avg10=3.00 avg60=0 avg300=0 total=1\n";
        assert_eq!(pressure(text), Some(0.125));
        assert_eq!(pressure("full avg10=1"), None);
    }
}
