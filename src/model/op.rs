//! One operation on one rank, and the words NCCL uses for it.

use super::{CommId, Rank, SegmentId, Track};
use serde::{Deserialize, Serialize};
use std::fmt;

macro_rules! named {
    ($(#[$doc:meta])* $name:ident { $($variant:ident = $text:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[allow(missing_docs, reason = "the variants are NCCL's own names")]
        pub enum $name { $($variant),+ }
        impl $name {
            /// Every value, in order.
            pub const ALL: &'static [$name] = &[$($name::$variant),+];
            /// The name as NCCL prints it.
            pub const fn as_str(self) -> &'static str {
                match self { $($name::$variant => $text),+ }
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result { f.pad(self.as_str()) }
        }
        impl Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
                s.serialize_str(self.as_str())
            }
        }
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
                let text = std::borrow::Cow::<'de, str>::deserialize(d)?;
                let known = Self::ALL.iter().copied().find(|v| v.as_str() == text);
                known.ok_or_else(|| {
                    serde::de::Error::custom(format_args!(concat!("{:?} is no ", stringify!($name)), text))
                })
            }
        }
    };
}

named! {
    /// NCCL's operations.
    Func {
        Broadcast = "Broadcast", Reduce = "Reduce", AllGather = "AllGather", ReduceScatter = "ReduceScatter",
        AllReduce = "AllReduce", SendRecv = "SendRecv", Send = "Send", Recv = "Recv", AlltoAll = "AlltoAll",
        Scatter = "Scatter", Gather = "Gather", AllGatherV = "AllGatherV", PutSignal = "PutSignal",
        Signal = "Signal", WaitSignal = "WaitSignal", Unknown = "Unknown", DevCommCreate = "DevCommCreate",
    }
}
named! {
    /// NCCL's data types.
    DataType {
        Int8 = "ncclInt8", Uint8 = "ncclUint8", Int32 = "ncclInt32", Uint32 = "ncclUint32",
        Int64 = "ncclInt64", Uint64 = "ncclUint64", Float16 = "ncclFloat16", Float32 = "ncclFloat32",
        Float64 = "ncclFloat64", Bfloat16 = "ncclBfloat16", Float8e4m3 = "ncclFloat8e4m3",
        Float8e5m2 = "ncclFloat8e5m2",
    }
}
named! {
    /// NCCL's algorithms.
    Algo {
        Tree = "TREE", Ring = "RING", CollnetDirect = "COLLNET_DIRECT", CollnetChain = "COLLNET_CHAIN",
        Nvls = "NVLS", NvlsTree = "NVLS_TREE", Pat = "PAT", Symmetric = "SYMMETRIC", CopyEngine = "CE",
    }
}
named! {
    /// NCCL's protocols.
    Proto { Ll = "LL", Ll128 = "LL128", Simple = "SIMPLE" }
}

named! {
    /// NCCL's reduction operations; all that the user made are one.
    RedOp {
        Sum = "ncclSum", Prod = "ncclProd", Max = "ncclMax", Min = "ncclMin", Avg = "ncclAvg",
        User = "user-made",
    }
}

impl Func {
    /// True for the operations that have a root.
    pub const fn is_rooted(self) -> bool {
        matches!(self, Func::Broadcast | Func::Reduce | Func::Scatter | Func::Gather)
    }

    /// True for the operations whose data come from the root alone.
    pub const fn is_from_root(self) -> bool {
        matches!(self, Func::Broadcast | Func::Scatter)
    }
}

impl DataType {
    /// Size of one element in bytes.
    pub const fn size(self) -> u64 {
        match self {
            DataType::Int8 | DataType::Uint8 | DataType::Float8e4m3 | DataType::Float8e5m2 => 1,
            DataType::Float16 | DataType::Bfloat16 => 2,
            DataType::Int32 | DataType::Uint32 | DataType::Float32 => 4,
            DataType::Int64 | DataType::Uint64 | DataType::Float64 => 8,
        }
    }
}

/// The lane of an issue order. Ranks share the order of a lane, not of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Lane {
    /// Collectives issued by a call.
    Collective,
    /// Collectives issued by the replay of a CUDA graph, which run in an order of their own.
    Replay,
    /// Sends to a peer.
    Send(Rank),
    /// Receives from a peer.
    Recv(Rank),
    /// Calls that have no order: one-sided operations, and device communicators that are made. Nothing is matched with them.
    Call,
}

impl Lane {
    /// True for the lanes whose order all ranks of the communicator share.
    pub const fn is_collective(self) -> bool {
        matches!(self, Lane::Collective | Lane::Replay)
    }
}

named! {
    /// Why an operation's GPU time is not measured.
    Untimed {
        Budget = "left out by the overhead budget", Captured = "captured into a CUDA graph",
        Offered = "NCCL offers no GPU times here", Asked = "GPU times not asked for",
        Free = "no pair of CUDA events was free", Alone = "launched together with other operations",
    }
}

/// How an operation's GPU time is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub enum Timing {
    /// Not said: older segments, and operations that are not issued yet.
    #[default]
    Unknown,
    /// By the stamps of NCCL's kernel events.
    Kernel,
    /// By CUDA events around its launch.
    Events,
    /// By CUDA events around its launch, which carries other sends and receives too: the time is the whole launch's.
    Launch,
    /// Not at all.
    Not(Untimed),
}

impl Timing {
    /// True when nothing will tell that the operation started or ended, until a later one does.
    pub const fn is_silent(self) -> bool {
        matches!(self, Timing::Not(_) | Timing::Events | Timing::Launch)
    }
}

/// The flags of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Flags {
    /// The API call was made while its stream was being captured: nothing ran.
    pub captured: bool,
    /// Send and receive buffer are the same.
    pub in_place: bool,
    /// A copy-engine collective.
    pub copy_engine: bool,
    /// A symmetric-memory kernel.
    pub symmetric: bool,
    /// Its call was seen from outside: when that returned is known.
    pub preloaded: bool,
    /// And that it was called inside a group.
    pub grouped: bool,
}

/// The return of an API call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Returned {
    /// When, host monotonic ns.
    pub at_ns: u64,
    /// NCCL's result.
    pub result: u8,
}

impl Returned {
    /// True when NCCL took the call: success, or in progress.
    pub const fn accepted(self) -> bool {
        matches!(self.result, 0 | 7)
    }
}

/// One channel's stamps on the GPU's clock and the host's times of the callbacks that brought them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChannelStamp {
    /// NCCL's channel.
    pub channel: u8,
    /// Kernel start on this channel, GPU clock in ns; absent before NCCL 2.27.
    pub start_gpu_ns: Option<u64>,
    /// Kernel stop on this channel, GPU clock in ns.
    pub stop_gpu_ns: Option<u64>,
    /// When the start was reported, host monotonic ns.
    pub start_seen_ns: u64,
    /// When the stop was reported, host monotonic ns.
    pub stop_seen_ns: Option<u64>,
}

/// The thing that a network step waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum NetPhase {
    /// Posted and not yet in a named state.
    Posted,
    /// The GPU has to produce (send) or consume (receive) the data.
    Gpu,
    /// The peer has to grant a buffer.
    Peer,
    /// Data is on the network.
    Wire,
    /// Received data is being flushed to the GPU.
    Flush,
}

/// One network transfer of an operation: one direction of one channel to one peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetProgress {
    /// NCCL's channel.
    pub channel: u8,
    /// The peer's rank.
    pub peer: Rank,
    /// True when this rank sends.
    pub is_send: bool,
    /// Steps planned, started and done.
    pub steps: u32,
    /// Steps begun so far.
    pub started: u32,
    /// Steps finished so far.
    pub done: u32,
    /// Bytes moved so far.
    pub bytes: u64,
    /// Start, host monotonic ns.
    pub start_ns: u64,
    /// End, host monotonic ns.
    pub stop_ns: Option<u64>,
    /// Time spent waiting for the GPU, the peer, the wire and the flush, in ns, over all steps.
    pub waited_ns: [u64; 4],
    /// The thing that the oldest unfinished step waits for, and since when (host monotonic ns).
    pub waiting: Option<(NetPhase, u64)>,
}

impl NetProgress {
    /// True where it is open and its GPU is in the operation: a send got data from it, or a receive gave data to it. Before the GPU
    /// of a receive is there, NCCL keeps what comes in its buffers.
    pub fn shows_gpu_in_it(&self) -> bool {
        self.stop_ns.is_none() && if self.is_send { self.bytes > 0 } else { self.done > 0 }
    }
}

/// Everything one rank's segment says about one operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpRecord {
    /// The segment it was read from.
    pub segment: SegmentId,
    /// The writer's number of this record; (segment, ticket) is unique.
    pub ticket: u64,
    /// The communicator.
    pub comm: CommId,
    /// This process's rank in it.
    pub rank: Rank,
    /// The lane of the issue order.
    pub lane: Lane,
    /// Issue order in the lane, from 0. Absent while only the API call is known, or never given.
    pub order: Option<u64>,
    /// The operation.
    pub func: Func,
    /// Data type; absent where NCCL does not say.
    pub dtype: Option<DataType>,
    /// NCCL's count in elements of `dtype`.
    pub count: u64,
    /// Root of a rooted collective, as NCCL gives it, or the peer of a one-sided operation.
    pub root: Option<Rank>,
    /// Algorithm.
    pub algo: Option<Algo>,
    /// Protocol.
    pub proto: Option<Proto>,
    /// Channels the kernel uses; absent where NCCL does not say.
    pub channels: Option<u8>,
    /// Warps per channel.
    pub warps: Option<u8>,
    /// NCCL's own sequence number, which counts per function.
    pub seq: Option<u64>,
    /// The kernel launch that carried it; operations of one launch start together. Absent when not known.
    pub plan: Option<u64>,
    /// The flags.
    pub flags: Flags,
    /// When the API was called, host monotonic ns.
    pub called_ns: Option<u64>,
    /// When the API call returned, and how; absent while it has not, and where nobody looked.
    pub returned: Option<Returned>,
    /// The reduction operation, where somebody looked.
    pub redop: Option<RedOp>,
    /// When NCCL issued it to the GPU, host monotonic ns.
    pub issued_ns: Option<u64>,
    /// How its GPU time is measured, or why it is not.
    pub timing: Timing,
    /// The time between the CUDA events around its launch, in ns. The launch carries it alone, or with others where `timing`
    /// says so.
    pub event_ns: Option<u64>,
    /// When those were read, host monotonic ns: it had ended by then.
    pub event_seen_ns: Option<u64>,
    /// Channels reported as started and stopped.
    pub started: u16,
    /// Channels reported as stopped.
    pub stopped: u16,
    /// The stamps of its channels.
    pub stamps: Vec<ChannelStamp>,
    /// Its network transfers.
    pub net: Vec<NetProgress>,
}

/// The kernel launch of an operation, as far as it is known.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Launch {
    plan: Option<u64>,
}

impl Launch {
    /// The launch of this number; none where nothing tells what was launched together.
    pub fn numbered(plan: Option<u64>) -> Self {
        Launch { plan }
    }

    /// Its number.
    pub fn number(self) -> Option<u64> {
        self.plan
    }

    /// False where nothing tells what was launched together.
    pub fn is_known(self) -> bool {
        self.plan.is_some()
    }

    /// True when two operations of one rank were launched together.
    pub fn shared_with(self, other: Launch) -> bool {
        self.plan.is_some() && self.plan == other.plan
    }
}

impl OpRecord {
    /// How long it took by CUDA events around its launch, which carried it alone, in ns.
    pub fn own_event_ns(&self) -> Option<u64> {
        self.event_ns.filter(|_| self.timing != Timing::Launch)
    }

    /// How long the launch took that carried it together with others, in ns.
    pub fn launch_ns(&self) -> Option<u64> {
        self.event_ns.filter(|_| self.timing == Timing::Launch)
    }

    /// Message size as nccl-tests defines it; absent without a data type or rank count.
    pub fn bytes(&self, ranks: Option<u32>) -> Option<u64> {
        message_bytes(self.func, self.dtype?, self.count, ranks)
    }

    /// Its track, where it is an operation that ranks wait for. A rank's transfer to itself is one operation, reported by its
    /// send.
    pub fn track(&self) -> Option<Track> {
        match self.lane {
            Lane::Collective => Some(Track::Collective),
            Lane::Replay => Some(Track::Replay),
            Lane::Send(peer) => Some(Track::Pair(self.rank, peer)),
            Lane::Recv(peer) if peer != self.rank => Some(Track::Pair(peer, self.rank)),
            Lane::Recv(_) | Lane::Call => None,
        }
    }

    /// The launch that it was part of.
    pub fn launch(&self) -> Launch {
        Launch { plan: self.plan }
    }

    /// True when every channel that NCCL named has stopped.
    pub fn all_channels_stopped(&self) -> bool {
        match self.channels {
            Some(n) if n > 0 => self.stopped >= u16::from(n),
            _ => false,
        }
    }
}

/// Message size in bytes as nccl-tests counts it, from what NCCL's profiler reports:
/// all-gather and broadcast counts are bytes sent per rank, reduce-scatter counts are received elements; all-to-all,
/// gather and scatter count what goes to or from one rank.
pub fn message_bytes(func: Func, dtype: DataType, count: u64, ranks: Option<u32>) -> Option<u64> {
    let one = count.checked_mul(dtype.size())?;
    match func {
        Func::AllGather | Func::ReduceScatter | Func::AlltoAll | Func::Gather | Func::Scatter => {
            one.checked_mul(u64::from(ranks?))
        }
        _ => Some(one),
    }
}

/// nccl-tests' factor from algorithm bandwidth to bus bandwidth.
pub fn bus_factor(func: Func, ranks: u32) -> f64 {
    let n = f64::from(ranks.max(1));
    match func {
        Func::AllReduce => 2.0 * (n - 1.0) / n,
        Func::AllGather | Func::ReduceScatter | Func::AlltoAll => (n - 1.0) / n,
        _ => 1.0,
    }
}

/// A size in bytes: `8 B`, `1 KiB`, `1.5 MiB`.
pub fn size_text(n: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if n < 1024 {
        return format!("{n} B");
    }
    let step = ((63 - n.leading_zeros()) / 10).min(6);
    let one = 1_u64 << (10 * step);
    let unit = UNITS[step as usize - 1];
    if n.is_multiple_of(one) {
        format!("{} {unit}", n / one)
    } else {
        format!("{:.1} {unit}", n as f64 / one as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_that_no_gpu_took_shows_no_gpu() {
        let open = |is_send, bytes, done| NetProgress {
            channel: 0,
            peer: Rank(1),
            is_send,
            steps: 16,
            started: 4,
            done,
            bytes,
            start_ns: 1,
            stop_ns: None,
            waited_ns: [0; 4],
            waiting: Some((NetPhase::Gpu, 1)),
        };
        assert!(!open(false, 1 << 20, 0).shows_gpu_in_it());
        assert!(open(false, 1 << 20, 1).shows_gpu_in_it());
        assert!(open(true, 1 << 20, 0).shows_gpu_in_it());
        assert!(!open(true, 0, 0).shows_gpu_in_it());
        assert!(!NetProgress { stop_ns: Some(9), ..open(true, 1 << 20, 1) }.shows_gpu_in_it());
    }
}
