//! One event, whatever ABI version it came by.

/// Bits of NCCL's event types, which are also the bits of the activation mask.
pub mod bit {
    #![allow(missing_docs, reason = "NCCL's own names")]
    pub const GROUP: u32 = 0;
    pub const COLL: u32 = 1;
    pub const P2P: u32 = 2;
    pub const PROXY_OP: u32 = 3;
    pub const PROXY_STEP: u32 = 4;
    pub const KERNEL_CH: u32 = 6;
    pub const NET_PLUGIN: u32 = 7;
    pub const GROUP_API: u32 = 8;
    pub const COLL_API: u32 = 9;
    pub const P2P_API: u32 = 10;
    pub const KERNEL_LAUNCH: u32 = 11;
    pub const CE_COLL: u32 = 12;
    pub const CE_SYNC: u32 = 13;
    pub const CE_BATCH: u32 = 14;
    pub const KERNEL_PHASE: u32 = LAST;
    /// The highest bit that any ABI version up to v7 has.
    pub const LAST: u32 = 15;
}

/// NCCL's state numbers.
pub mod state {
    #![allow(missing_docs, reason = "NCCL's own names")]
    pub const SEND_POSTED: i32 = 0;
    pub const SEND_DONE: i32 = 3;
    pub const RECV_POSTED: i32 = 4;
    pub const RECV_DONE: i32 = 7;
    pub const SEND_GPU_WAIT: i32 = 8;
    pub const SEND_WAIT: i32 = 9;
    pub const RECV_WAIT: i32 = 10;
    pub const RECV_FLUSH_WAIT: i32 = 11;
    pub const RECV_GPU_WAIT: i32 = 12;
    pub const IN_PROGRESS: i32 = 19;
    pub const SEND_PEER_WAIT: i32 = 20;
    pub const KERNEL_STOP: i32 = 22;
    pub const GROUP_START_DONE: i32 = 23;
    pub const GROUP_END_CALLED: i32 = 24;
}

/// A started event.
#[derive(Debug, Clone, Copy)]
pub struct Event {
    /// Bit number of its type; above [`bit::LAST`] for none that is known.
    pub bit: u32,
    /// The parent's handle as a number.
    pub parent: u64,
    /// The rank NCCL names, where it does.
    pub rank: i32,
    /// The content, by type.
    pub body: Body,
}

/// The content of an event.
#[derive(Debug, Clone, Copy)]
pub enum Body {
    /// A plan begins.
    Group,
    /// A collective is issued, or (copy engine) enqueued.
    Coll(Coll),
    /// A point-to-point operation is issued.
    P2p(P2p),
    /// A network transfer begins.
    ProxyOp(ProxyOp),
    /// A step of a network transfer begins.
    ProxyStep {
        /// Its number.
        step: i32,
    },
    /// A kernel starts on a channel.
    KernelCh {
        /// The channel.
        channel: u8,
        /// The GPU's clock in ns; 0 where the ABI has none.
        gpu_ns: u64,
    },
    /// An outermost group begins.
    GroupApi {
        /// Depth of nesting.
        depth: i32,
        /// Captured into a graph.
        captured: bool,
    },
    /// An operation is called.
    Api(Api),
    /// A kernel is launched.
    KernelLaunch {
        /// On this stream.
        stream: u64,
    },
    /// A type that carries nothing we record.
    Other,
}

/// Identity of the communicator, where the descriptor carries it (v1 to v3).
pub type CommHash = Option<u64>;

/// A collective.
#[derive(Debug, Clone, Copy)]
pub struct Coll {
    /// Communicator.
    pub comm: CommHash,
    /// NCCL's sequence number.
    pub seq: u64,
    /// Code of the function.
    pub func: u8,
    /// Code of the data type.
    pub dtype: u8,
    /// Code of the algorithm.
    pub algo: u8,
    /// Code of the protocol.
    pub proto: u8,
    /// Elements.
    pub count: u64,
    /// Root.
    pub root: i32,
    /// Channels; 0 unknown.
    pub channels: u8,
    /// Warps.
    pub warps: u8,
    /// Send and receive buffer are the same.
    pub in_place: bool,
    /// Symmetric kernel.
    pub symmetric: bool,
    /// Copy-engine collective.
    pub copy_engine: bool,
    /// Plan handle as a number.
    pub plan: u64,
    /// The user's tag.
    pub user_tag: u64,
    /// Kernel variant of a symmetric kernel, as words of text.
    pub variant: [u64; 4],
    /// Stream, where the event names it.
    pub stream: u64,
}

/// A point-to-point operation.
#[derive(Debug, Clone, Copy)]
pub struct P2p {
    /// Communicator.
    pub comm: CommHash,
    /// Code of the function.
    pub func: u8,
    /// Code of the data type.
    pub dtype: u8,
    /// Elements.
    pub count: u64,
    /// Peer.
    pub peer: i32,
    /// Channels; 0 unknown.
    pub channels: u8,
    /// Plan handle as a number.
    pub plan: u64,
    /// The user's tag.
    pub user_tag: u64,
}

/// An API call.
#[derive(Debug, Clone, Copy)]
pub struct Api {
    /// A collective, not a point-to-point call.
    pub collective: bool,
    /// Code of the function.
    pub func: u8,
    /// Code of the data type.
    pub dtype: u8,
    /// Elements.
    pub count: u64,
    /// Root.
    pub root: i32,
    /// Stream.
    pub stream: u64,
    /// Captured into a graph.
    pub captured: bool,
    /// The user's tag.
    pub user_tag: u64,
}

/// A network transfer.
#[derive(Debug, Clone, Copy)]
pub struct ProxyOp {
    /// Process that issued the operation.
    pub pid: i32,
    /// Channel.
    pub channel: u8,
    /// Peer.
    pub peer: i32,
    /// Steps planned.
    pub steps: i32,
    /// Bytes of a whole step.
    pub chunk: i32,
    /// Sends.
    pub is_send: bool,
}

/// The argument of recordEventState, where one came.
#[derive(Debug, Clone, Copy)]
pub struct StateArg {
    /// First eight bytes: transfer size, GPU stamp.
    pub value: u64,
    /// Steps (v1 to v3).
    pub steps: i32,
}
