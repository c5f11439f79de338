//! A memory cgroup for the agent: version 1 or 2, whichever is mounted with the controller.

use crate::support::until;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// What the agent may take, in bytes.
pub(crate) const LIMIT_BYTES: u64 = 96 << 20;

/// A cgroup that ends with this value, after the processes in it.
#[derive(Debug)]
pub(crate) struct Cgroup {
    directory: PathBuf,
    /// The file with the line that counts processes killed for want of memory, and the one with the peak in bytes.
    events: &'static str,
    peak: &'static str,
}

impl Cgroup {
    /// `None` where no memory cgroup can be made.
    pub(crate) fn new() -> Option<Self> {
        let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
        let own = fs::read_to_string("/proc/self/cgroup").ok()?;
        version_1(&mounts, &own).or_else(|| version_2(&mounts, &own))
    }

    /// The shell command by which the shell enters it.
    pub(crate) fn enter(&self) -> String {
        format!("echo $$ > {}/cgroup.procs && ", self.directory.display())
    }

    /// Processes in it that were killed for want of memory.
    pub(crate) fn killed(&self) -> u64 {
        let text = fs::read_to_string(self.directory.join(self.events)).expect("the cgroup's events");
        let line = text.lines().find_map(|l| l.strip_prefix("oom_kill ")).expect("a counter of kills");
        line.trim().parse().expect("a number")
    }

    /// The most that it took at any time, in bytes; nothing where the kernel does not count it.
    pub(crate) fn peak_bytes(&self) -> Option<u64> {
        fs::read_to_string(self.directory.join(self.peak)).ok()?.trim().parse().ok()
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A helper of the agent may need a moment to end.
        until("the cgroup is empty", || fs::remove_dir(&self.directory).ok());
    }
}

/// A directory below this one, with these limits.
fn make(parent: &Path, limits: &[(&str, u64)]) -> Option<PathBuf> {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let directory = parent.join(format!("ringwatch-hostile-{}-{number}", std::process::id()));
    fs::create_dir(&directory).ok()?;
    let set = |(file, value): &(&str, u64)| fs::write(directory.join(file), value.to_string()).is_ok();
    // Where there is no swap, its limit may be absent; the first limit has to be there.
    let kept: Vec<bool> = limits.iter().map(set).collect();
    if kept.first() != Some(&true) {
        fs::remove_dir(&directory).ok();
        return None;
    }
    Some(directory)
}

fn version_1(mounts: &str, own: &str) -> Option<Cgroup> {
    let has = |options: &str| options.split(',').any(|o| o == "memory");
    let (root, point) = mount(mounts, |kind, options| kind == "cgroup" && has(options))?;
    let path = own.lines().find_map(|l| l.splitn(3, ':').nth(2).filter(|_| l.contains(":memory:")))?;
    let parent = below(&point, &root, path);
    let limits = [("memory.limit_in_bytes", LIMIT_BYTES), ("memory.swappiness", 0)];
    let directory = make(&parent, &limits)?;
    Some(Cgroup { directory, events: "memory.oom_control", peak: "memory.max_usage_in_bytes" })
}

fn version_2(mounts: &str, own: &str) -> Option<Cgroup> {
    let (root, point) = mount(mounts, |kind, _| kind == "cgroup2")?;
    let path = own.lines().find_map(|l| l.strip_prefix("0::"))?;
    let start = below(&point, &root, path);
    // A cgroup with processes of its own gives its children no controller, so one of its ancestors has to do it.
    let gives = |dir: &&Path| {
        let control = dir.join("cgroup.subtree_control");
        fs::write(&control, "+memory").ok();
        fs::read_to_string(control).is_ok_and(|c| c.split_whitespace().any(|c| c == "memory"))
    };
    let parent = start.ancestors().take_while(|dir| dir.starts_with(&point)).find(gives)?;
    let directory = make(parent, &[("memory.max", LIMIT_BYTES), ("memory.swap.max", 0)])?;
    Some(Cgroup { directory, events: "memory.events", peak: "memory.peak" })
}

/// The root and the mount point of the first mount of this kind and with these options.
fn mount(mounts: &str, wanted: impl Fn(&str, &str) -> bool) -> Option<(String, PathBuf)> {
    mounts.lines().find_map(|line| {
        let (place, file_system) = line.split_once(" - ")?;
        let mut place = place.split(' ').skip(3);
        let (root, point) = (place.next()?, place.next()?);
        let mut file_system = file_system.split(' ');
        let kind = file_system.next()?;
        wanted(kind, file_system.nth(1)?).then(|| (root.to_owned(), PathBuf::from(point)))
    })
}

/// Where the cgroup of this path is, below a mount of that root.
fn below(point: &Path, root: &str, path: &str) -> PathBuf {
    let relative = path.strip_prefix(root).unwrap_or(path).trim_start_matches('/');
    let there = point.join(relative);
    if there.is_dir() { there } else { point.to_owned() }
}
