//! The numbers that stand for NCCL's names, for kinds of event and for reasons of loss.
//!
//! A number, once given, keeps its meaning for the life of the format version.

/// An unknown or absent name.
pub const UNKNOWN: u8 = 0;

macro_rules! codes {
    ($(#[$doc:meta])* $vis:vis $name:ident: $($code:literal $text:literal),+ $(,)?) => {
        $(#[$doc])*
        $vis const $name: &[(u8, &str)] = &[$(($code, $text)),+];
    };
}

codes! {
    /// Operations: NCCL's own number plus one. The last one is a call that is no operation of NCCL's.
    pub FUNCS: 1 "Broadcast", 2 "Reduce", 3 "AllGather", 4 "ReduceScatter", 5 "AllReduce", 6 "SendRecv",
    7 "Send", 8 "Recv", 9 "AlltoAll", 10 "Scatter", 11 "Gather", 12 "AllGatherV", 13 "PutSignal",
    14 "Signal", 15 "WaitSignal", 16 "DevCommCreate"
}
codes! {
    /// Data types: NCCL's own number plus one.
    pub TYPES: 1 "ncclInt8", 2 "ncclUint8", 3 "ncclInt32", 4 "ncclUint32", 5 "ncclInt64", 6 "ncclUint64",
    7 "ncclFloat16", 8 "ncclFloat32", 9 "ncclFloat64", 10 "ncclBfloat16", 11 "ncclFloat8e4m3",
    12 "ncclFloat8e5m2"
}
codes! {
    /// Algorithms: NCCL's own number plus one.
    pub ALGOS: 1 "TREE", 2 "RING", 3 "COLLNET_DIRECT", 4 "COLLNET_CHAIN", 5 "NVLS", 6 "NVLS_TREE", 7 "PAT"
}
codes! {
    /// Protocols: NCCL's own number plus one.
    pub PROTOS: 1 "LL", 2 "LL128", 3 "SIMPLE"
}

codes! {
    /// Reduction operations: NCCL's own number plus one; every one that the user made is one.
    pub REDOPS: 1 "ncclSum", 2 "ncclProd", 3 "ncclMax", 4 "ncclMin", 5 "ncclAvg", 6 "user-made"
}

/// How far the making of a communicator is.
pub mod made {
    /// Nobody looked.
    pub const UNKNOWN: u8 = 0;
    /// The call that makes it was entered, and it is not ready.
    pub const INITIALISING: u8 = 1;
    /// It can be used.
    pub const READY: u8 = 2;
    /// It was not made.
    pub const FAILED: u8 = 3;
    /// It was aborted or revoked.
    pub const ABORTED: u8 = 4;
}

/// Outcomes of the agreement on a communicator's tuner rules. 1 is free.
pub mod tuned {
    /// No tuner was loaded.
    pub const UNKNOWN: u8 = 0;
    /// The rules are on: all ranks have the same.
    pub const AGREED: u8 = 2;
    /// Off: ranks have different rules, or some have none.
    pub const DIFFERENT: u8 = 3;
    /// Off: this rank cannot read its file.
    pub const MISSING: u8 = 4;
    /// Off: this rank refuses its file.
    pub const REFUSED: u8 = 5;
    /// Off: a rank did not take part in time.
    pub const ABSENT_RANK: u8 = 6;
    /// Off: its ranks are on several nodes, or are too many to agree.
    pub const NOT_AGREED: u8 = 7;
    /// Off: NCCL before 2.22 does not say what is possible.
    pub const OLD_NCCL: u8 = 8;
    /// Off: NCCL did not say which communicator it is.
    pub const NO_ID: u8 = 9;
    /// Off: there is no directory in which ranks can meet.
    pub const NO_DIRECTORY: u8 = 10;
    /// Off until the ranks have agreed by an all-gather, which non-blocking communicators never do.
    pub const UNDECIDED: u8 = 11;
    /// Off: ranks are to agree by an all-gather, and this process has not preloaded the library.
    pub const NO_PRELOAD: u8 = 12;
}

/// Kinds of operation.
pub mod kind {
    /// A collective issued by a call, or called and not yet issued.
    pub const COLLECTIVE: u8 = 1;
    /// A collective issued by the replay of a CUDA graph.
    pub const REPLAY: u8 = 2;
    /// A send.
    pub const SEND: u8 = 3;
    /// A receive.
    pub const RECV: u8 = 4;
    /// A call that has no issue order: one-sided operations, and a device communicator that is made. Only the preloaded
    /// library sees them.
    pub const CALL: u8 = 5;
}

/// Flags of an operation.
pub mod flag {
    /// Called while its stream was being captured.
    pub const CAPTURED: u8 = 1;
    /// Send and receive buffer are the same.
    pub const IN_PLACE: u8 = 2;
    /// A copy-engine collective.
    pub const COPY_ENGINE: u8 = 4;
    /// A symmetric-memory kernel.
    pub const SYMMETRIC: u8 = 8;
    /// It has an issue order but no room was left to know it (point-to-point pair table full).
    pub const ORDER_UNKNOWN: u8 = 16;
}

/// How an operation's GPU time is measured, or why it is not.
pub mod timed {
    /// Not said: segments of format version 1, operations not issued yet.
    pub const UNKNOWN: u8 = 0;
    /// By NCCL's kernel events: its channels' stamps follow.
    pub const KERNEL: u8 = 1;
    /// By CUDA events around its launch, which carries it alone.
    pub const EVENTS: u8 = 2;
    /// Not: the overhead budget leaves it out.
    pub const NOT_BUDGET: u8 = 3;
    /// Not: it was captured into a CUDA graph.
    pub const NOT_CAPTURED: u8 = 4;
    /// Not: this NCCL, or this machine, offers no way that would not harm the job.
    pub const NOT_OFFERED: u8 = 5;
    /// Not: the user's settings ask for none.
    pub const NOT_ASKED: u8 = 6;
    /// Not: no pair of events was free, or the launch could not be told apart.
    pub const NOT_FREE: u8 = 7;
    /// Not: CUDA events would have been used, and its launch carries other operations too.
    pub const NOT_ALONE: u8 = 8;
    /// By CUDA events around its launch, which carries other sends and receives too: the time is the whole launch's. One
    /// operation of a launch says so.
    pub const LAUNCH: u8 = 9;
}

/// The types of callbacks for the accounting. Start events use NCCL's own bit number (0 to 15).
pub mod call {
    /// startEvent of a Group, NCCL's name for a plan.
    pub const PLAN: usize = 0;
    /// startEvent of a Coll and of a P2p, an operation that is issued.
    pub const COLL: usize = 1;
    /// The same of a point-to-point operation.
    pub const P2P: usize = 2;
    /// startEvent of a CollApi, a collective that is called.
    pub const COLL_CALL: usize = 9;
    /// The same of a point-to-point operation.
    pub const P2P_CALL: usize = 10;
    /// startEvent of a KernelCh, a kernel on a channel.
    pub const KERNEL: usize = 6;
    /// startEvent of a type this plugin does not know.
    pub const START_UNKNOWN: usize = 16;
    /// stopEvent.
    pub const STOP: usize = 17;
    /// recordEventState.
    pub const STATE: usize = 18;
    /// init.
    pub const INIT: usize = 19;
    /// finalize.
    pub const FINALIZE: usize = 20;
    /// An API call that the preloaded library saw.
    pub const API: usize = 21;
    /// How many kinds there are.
    pub const COUNT: usize = 22;
}

/// Why a callback left no record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Loss {
    /// The handle or context was made by another process (PXN) or is not one of ours.
    Foreign = 0,
    /// The record that the handle names has been overwritten.
    Stale = 1,
    /// A NULL handle.
    Null = 2,
    /// An event type that no profiler ABI up to v7 has.
    UnknownType = 3,
    /// A type that NCCL sent and that is not recorded (proxy control, net plugin, copy-engine parts, phases).
    NotRecorded = 4,
    /// A state that the handle's kind does not have.
    UnknownState = 5,
    /// A repeated stop or state.
    Repeated = 6,
    /// More communicators than the table has room for.
    CommTable = 7,
    /// The segment could not be made, or has no room for this kind.
    NoRoom = 8,
    /// Another thread was writing the slot; the caller is never made to wait.
    Contended = 9,
    /// The context belongs to no communicator that is alive.
    NoComm = 10,
    /// A NULL descriptor or NULL place for the handle.
    BadCall = 11,
    /// A child whose parent is not of a kind that can have it.
    BadParent = 12,
}

impl Loss {
    /// Every reason, by number.
    pub const ALL: [Loss; 13] = [
        Loss::Foreign,
        Loss::Stale,
        Loss::Null,
        Loss::UnknownType,
        Loss::NotRecorded,
        Loss::UnknownState,
        Loss::Repeated,
        Loss::CommTable,
        Loss::NoRoom,
        Loss::Contended,
        Loss::NoComm,
        Loss::BadCall,
        Loss::BadParent,
    ];

    /// The reason in words.
    pub const fn as_str(self) -> &'static str {
        match self {
            Loss::Foreign => "foreign handle",
            Loss::Stale => "stale handle",
            Loss::Null => "null handle",
            Loss::UnknownType => "unknown event type",
            Loss::NotRecorded => "event type not recorded",
            Loss::UnknownState => "unknown state",
            Loss::Repeated => "repeated call",
            Loss::CommTable => "communicator table full",
            Loss::NoRoom => "no room in shared memory",
            Loss::Contended => "slot being written",
            Loss::NoComm => "unknown communicator",
            Loss::BadCall => "bad arguments",
            Loss::BadParent => "parent of the wrong kind",
        }
    }

    /// True when information about the job was lost. The others are calls that carry none:
    /// NCCL's known repeats and the types that are not asked for.
    pub const fn is_damage(self) -> bool {
        !matches!(self, Loss::NotRecorded | Loss::Null | Loss::Repeated)
    }
}

/// Flaws: the record was made but something in it could not be known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Flaw {
    /// The table that counts point-to-point pairs is full: this operation has no issue order.
    PairOrder = 0,
    /// A value was kept from one counter of a busy slot.
    Progress = 1,
    /// CUDA events gave a duration that cannot be true: it was dropped.
    EventTime = 2,
    /// The CUDA driver refused an event: the communicator's operations are not timed by events any more.
    EventError = 3,
    /// CUDA events gave a duration that is not one operation's alone, or a second one: it was dropped.
    EventMatch = 4,
    /// A call's record was overwritten before it was issued: its issue order is counted, and no record has it.
    Overwritten = 5,
}

impl Flaw {
    /// Every flaw, by number.
    pub const ALL: [Flaw; 6] = [
        Flaw::PairOrder,
        Flaw::Progress,
        Flaw::EventTime,
        Flaw::EventError,
        Flaw::EventMatch,
        Flaw::Overwritten,
    ];

    /// The flaw in words.
    pub const fn as_str(self) -> &'static str {
        match self {
            Flaw::PairOrder => "pair order unknown",
            Flaw::Progress => "progress not counted",
            Flaw::EventTime => "impossible duration dropped",
            Flaw::EventError => "CUDA events refused",
            Flaw::EventMatch => "duration of no single operation dropped",
            Flaw::Overwritten => "overwritten before it was issued",
        }
    }
}

/// The thing that a network step waits for, in the live-step words of a proxy slot.
pub mod phase {
    /// No step.
    pub const NONE: u8 = 0;
    /// Begun, in no named state yet.
    pub const POSTED: u8 = 1;
    /// Send: the GPU produces; receive: the GPU consumes.
    pub const GPU: u8 = 2;
    /// The peer has to grant a buffer.
    pub const PEER: u8 = 3;
    /// On the network.
    pub const WIRE: u8 = 4;
    /// Being flushed to the GPU.
    pub const FLUSH: u8 = 5;
}
