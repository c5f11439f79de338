//! One look at a process that has no segment.

use super::process::{directory, stat_in};
use super::process_reading::state;
use super::rights::Watched;
use super::stacks::{StackKind, read};
use super::threads::places;
use crate::model::ProcessState;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;

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
    let owner = std::fs::metadata(format!("/proc/{pid}")).ok()?.uid();
    let stat = stat_in(directory.as_fd()).ok()??;
    let state = state(directory.as_fd(), &stat);
    // A tool would wait for a process that is stopped.
    let is_readable = !matches!(state, ProcessState::Stopped { .. } | ProcessState::Zombie(_));
    let frames = if is_readable { read(kind, Watched { pid, owner }) } else { Vec::new() };
    Some(Glimpse { state, frames, threads: places(pid) })
}
