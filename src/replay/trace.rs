//! The content of a recording.

use std::sync::Arc;

/// A name out of a descriptor; the same few recur in every event, hence shared.
pub type Text = Arc<str>;

/// A recorded job: every rank's callbacks.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Trace {
    /// One per process of the job, in rank order.
    pub ranks: Vec<RankTrace>,
}

/// Every callback of one rank's process, in the order in which the recorder saw them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RankTrace {
    /// The recording's name of this rank (`rank0`).
    pub label: String,
    /// Process id in the recorded job: the thread of the first callback, which is the main thread.
    pub pid: u32,
    /// Thread ids in the recorded job, in order of appearance; [`Event::thread`] is an index here.
    pub threads: Vec<u32>,
    /// In recorded order, which across threads is not quite the order of `at_ns`.
    pub events: Vec<Event>,
}

/// One callback.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// `CLOCK_MONOTONIC` of the recording machine, in ns.
    pub at_ns: u64,
    /// Index into [`RankTrace::threads`].
    pub thread: u16,
    /// The call.
    pub call: Call,
}

/// A callback's kind and arguments. Handles and contexts are the recorder's own numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Call {
    /// A communicator begins.
    Init {
        /// Number of the context given out.
        ctx: u64,
        /// NCCL's hash of the communicator, equal on all its ranks.
        comm_id: u64,
        /// The communicator's name, where the application gave one.
        name: Option<Text>,
        /// Nodes of the communicator.
        nodes: i32,
        /// Ranks of the communicator.
        ranks: i32,
        /// This process's rank in it.
        rank: i32,
    },
    /// An event begins.
    Start {
        /// Number of the handle given out.
        handle: u64,
        /// Context it belongs to.
        ctx: u64,
        /// Parent's handle, 0 for none; may have been stopped long ago.
        parent: u64,
        /// The descriptor.
        descriptor: Descriptor,
    },
    /// An event ends.
    Stop {
        /// Whose.
        handle: u64,
    },
    /// An event changes state.
    State {
        /// Whose.
        handle: u64,
        /// NCCL's state number.
        state: u32,
        /// First 8 bytes of the argument (for KernelCh the GPU's stop stamp), where one was given.
        arg: Option<u64>,
    },
    /// A communicator ends.
    Finalize {
        /// Its context.
        ctx: u64,
    },
}

/// The content of an event, with every field that the recorder wrote down.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields carry NCCL's names and meanings")]
pub enum Descriptor {
    GroupApi {
        depth: i32,
        graph_captured: bool,
    },
    CollApi {
        func: Text,
        count: u64,
        datatype: Text,
        root: i32,
        stream: u64,
        graph_captured: bool,
    },
    P2pApi {
        func: Text,
        count: u64,
        datatype: Text,
        stream: u64,
        graph_captured: bool,
    },
    KernelLaunch {
        stream: u64,
    },
    Group,
    Coll {
        rank: i32,
        seq: u64,
        func: Text,
        count: u64,
        root: i32,
        datatype: Text,
        channels: u8,
        warps: u8,
        algo: Text,
        proto: Text,
    },
    P2p {
        rank: i32,
        func: Text,
        count: u64,
        datatype: Text,
        peer: i32,
        channels: u8,
    },
    /// `stamp_ns` is the GPU's global timer at the start, in ns.
    KernelCh {
        channel: u8,
        stamp_ns: u64,
    },
    ProxyOp {
        pid: i32,
        channel: u8,
        peer: i32,
        steps: i32,
        chunk_bytes: i32,
        send: bool,
    },
    ProxyStep {
        step: i32,
    },
    /// A type without fields of interest, by its bit (32 is ProxyCtrl).
    Other(u64),
}

impl Descriptor {
    /// NCCL's bit for this type of event.
    #[must_use]
    pub fn type_bit(&self) -> u64 {
        match self {
            Self::Group => 0x1,
            Self::Coll { .. } => 0x2,
            Self::P2p { .. } => 0x4,
            Self::ProxyOp { .. } => 0x8,
            Self::ProxyStep { .. } => 0x10,
            Self::KernelCh { .. } => 0x40,
            Self::GroupApi { .. } => 0x100,
            Self::CollApi { .. } => 0x200,
            Self::P2pApi { .. } => 0x400,
            Self::KernelLaunch { .. } => 0x800,
            Self::Other(bit) => *bit,
        }
    }

    /// NCCL's name for this type of event.
    #[must_use]
    pub fn type_name(&self) -> &'static str {
        match self.type_bit() {
            0x1 => "Group",
            0x2 => "Coll",
            0x4 => "P2p",
            0x8 => "ProxyOp",
            0x10 => "ProxyStep",
            0x20 => "ProxyCtrl",
            0x40 => "KernelCh",
            0x80 => "NetPlugin",
            0x100 => "GroupApi",
            0x200 => "CollApi",
            0x400 => "P2pApi",
            0x800 => "KernelLaunch",
            0x1000 => "CeColl",
            0x2000 => "CeSync",
            0x4000 => "CeBatch",
            0x8000 => "KernelPhase",
            _ => "unknown",
        }
    }
}

/// The instants that all ranks of one replay must share, lest they drift apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Timeline {
    /// Recorded host time that maps to the start of the replay: the first event of any rank, in ns.
    pub epoch_ns: u64,
    /// Earliest GPU stamp of any rank, in ns: the fixed point when stamps are scaled.
    pub gpu_epoch_ns: u64,
    /// Recorded time from the start of one loop to the start of the next, in ns.
    pub period_ns: u64,
}

/// Pause between two loops of a replay: long enough to read as idle, short enough not to bore.
const LOOP_PAUSE_NS: u64 = 200_000_000;

impl Trace {
    /// The shared instants of this recording.
    #[must_use]
    pub fn timeline(&self) -> Timeline {
        let events = || self.ranks.iter().flat_map(|rank| &rank.events);
        let epoch_ns = events().map(|e| e.at_ns).min().unwrap_or(0);
        let last_ns = events().map(|e| e.at_ns).max().unwrap_or(0);
        let gpu_epoch_ns = events()
            .filter_map(|e| match e.call {
                Call::Start { descriptor: Descriptor::KernelCh { stamp_ns, .. }, .. } => Some(stamp_ns),
                _ => None,
            })
            .filter(|&stamp_ns| stamp_ns != 0)
            .min()
            .unwrap_or(0);
        Timeline { epoch_ns, gpu_epoch_ns, period_ns: (last_ns - epoch_ns).saturating_add(LOOP_PAUSE_NS) }
    }

    /// Adds a number to the ids of all communicators: NCCL makes other ones for every job.
    pub fn shift_ids(&mut self, by: u64) {
        for event in self.ranks.iter_mut().flat_map(|rank| &mut rank.events) {
            if let Call::Init { comm_id, .. } = &mut event.call {
                *comm_id = comm_id.wrapping_add(by);
            }
        }
    }

    /// Number of callbacks over all ranks.
    #[must_use]
    pub fn event_count(&self) -> usize {
        self.ranks.iter().map(|rank| rank.events.len()).sum()
    }
}

/// Why bytes or lines are no recording.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TraceError {
    /// The file is something else.
    #[error("not a Ringwatch trace: it does not begin with RWTRACE; give the path of a .rwt file")]
    NotATrace,
    /// The file is of another format version.
    #[error(
        "trace format version {found} is unknown to this build, which reads version {known}; \
         convert the recording again or use the build that wrote it"
    )]
    Version {
        /// In the file.
        found: u32,
        /// Of this build.
        known: u32,
    },
    /// The bytes make no sense.
    #[error("corrupt trace: {what} at byte {at} of the inflated body; fetch or convert the file again")]
    Corrupt {
        /// The part that was being read.
        what: &'static str,
        /// Offset behind the compression, in bytes.
        at: usize,
    },
    /// The body cannot be inflated within the bound.
    #[error("corrupt trace: the compressed body does not inflate ({0}); fetch or convert the file again")]
    Inflate(String),
    /// A log line makes no sense.
    #[error("{label}, line {line}: {what}: `{text}`; is this a log of the callback recorder?")]
    Line {
        /// The rank's log.
        label: String,
        /// Line number, from 1.
        line: usize,
        /// The fault.
        what: &'static str,
        /// The line, or the beginning of a long one.
        text: String,
    },
}
