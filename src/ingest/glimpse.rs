//! One look at a process that has no segment.

use super::process::{directory, stat_in};
use super::process_reading::state;
use super::rights::Watched;
use super::stacks::{StackKind, read};
use super::threads::places;
use crate::model::ProcessState;
use rustix::fs::{Mode, OFlags};
use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd};

/// Bytes of a process's status that are read.
const STATUS_MAX: u64 = 16 << 10;

/// What is seen of a process from outside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Glimpse {
    /// The activity.
    pub state: ProcessState,
    /// Its main thread's frames, innermost first; empty where no tool could read them.
    pub frames: Vec<String>,
    /// Where its threads are in the kernel, those with most threads first.
    pub threads: Vec<String>,
}

/// Looks at a process, and asks tools for its stack with the rights of its user. Absent where there is no such process.
pub fn glimpse(pid: u32, kind: StackKind) -> Option<Glimpse> {
    let directory = directory(pid).ok()??;
    let stat = stat_in(directory.as_fd()).ok()??;
    let state = state(directory.as_fd(), &stat);
    // A tool would wait for a process that is stopped.
    let is_readable = !matches!(state, ProcessState::Stopped { .. } | ProcessState::Zombie(_));
    let owner = owner(directory.as_fd()).filter(|_| is_readable);
    let frames = owner.map_or_else(Vec::new, |owner| read(kind, Watched { pid, owner }));
    Some(Glimpse { state, frames, threads: places(pid) })
}

/// The user of a process, by number. Absent while it changes users: a tool must not get the rights of one that it only passes.
fn owner(directory: BorrowedFd<'_>) -> Option<u32> {
    let file =
        rustix::fs::openat(directory, "status", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let mut status = String::new();
    File::from(file).take(STATUS_MAX).read_to_string(&mut status).ok()?;
    let users = status.lines().find_map(|l| l.strip_prefix("Uid:"))?;
    let users: BTreeSet<u32> = users.split_whitespace().map_while(|n| n.parse().ok()).collect();
    users.first().copied().filter(|_| users.len() == 1)
}
