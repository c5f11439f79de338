//! The operating system's facts about a process, which distinguish a stopped culprit from a busy one.

use super::SegmentId;
use serde::{Deserialize, Serialize};

/// The activity of a process, as far as the operating system reports it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProcessState {
    /// It runs, or waits for a CPU.
    Running,
    /// It sleeps, and can be woken by a signal.
    Sleeping {
        /// Where in the kernel its main thread sleeps (`futex_wait_queue`), where that may be read.
        wchan: Option<String>,
    },
    /// It waits in the kernel for a device or a file system, and no signal wakes it.
    Blocked {
        /// Where in the kernel its main thread waits.
        wchan: Option<String>,
    },
    /// A signal stopped it (SIGSTOP, a terminal), or a debugger holds it.
    Stopped {
        /// True where a debugger holds it.
        traced: bool,
    },
    /// It ended and its parent has not asked how.
    Zombie(Option<Exit>),
    /// It is gone.
    Gone(Option<Exit>),
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Exit {
    /// It exited with this code.
    Code(i32),
    /// This signal ended it.
    Signal(i32),
}

/// The host's facts about one process at one moment. Absent is not known; each fact replaces the one before.
#[derive(Debug, Clone, PartialEq)]
pub struct HostFact {
    /// The process.
    pub segment: SegmentId,
    /// When it was looked at, host monotonic ns.
    pub at_ns: u64,
    /// The activity.
    pub state: Option<ProcessState>,
    /// Share of the time since the look before in which its threads wanted a CPU and had none, 0 to 1.
    pub cpu_starved: Option<f64>,
    /// The same for the worst-off of NCCL's own threads, which move what goes over the network.
    pub nccl_starved: Option<f64>,
    /// Share of that time in which the busiest of NCCL's own threads ran, 0 to 1.
    pub nccl_busy: Option<f64>,
    /// Share of the time since the look before in which its cgroup was kept from the CPU by its quota, 0 to 1.
    pub cpu_throttled: Option<f64>,
    /// Share of the last ten seconds in which tasks of its cgroup stood still for want of memory, 0 to 1.
    pub memory_pressure: Option<f64>,
    /// Processes of its cgroup that were killed for want of memory since it began.
    pub oom_kills: Option<u64>,
    /// The stack of its main thread, innermost frame first, native frames between Python's where they are known; empty
    /// where nobody looked.
    pub stack: Vec<String>,
    /// Where its threads are in the kernel, those with most threads first; empty where nobody looked.
    pub threads: Vec<String>,
    /// When it came, host monotonic ns.
    pub stack_ns: Option<u64>,
}

impl HostFact {
    /// Nothing known yet of a process.
    pub fn new(segment: SegmentId, at_ns: u64) -> Self {
        HostFact {
            segment,
            at_ns,
            state: None,
            cpu_starved: None,
            nccl_starved: None,
            nccl_busy: None,
            cpu_throttled: None,
            memory_pressure: None,
            oom_kills: None,
            stack: Vec::new(),
            threads: Vec::new(),
            stack_ns: None,
        }
    }

    /// How the process ended, where it did and somebody asked.
    pub fn exit(&self) -> Option<Exit> {
        match self.state {
            Some(ProcessState::Zombie(exit) | ProcessState::Gone(exit)) => exit,
            _ => None,
        }
    }

    /// True when the process ended.
    pub fn is_over(&self) -> bool {
        matches!(self.state, Some(ProcessState::Zombie(_) | ProcessState::Gone(_)))
    }
}
