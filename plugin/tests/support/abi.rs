//! The profiler ABI as tables of sizes and offsets, and descriptors made from them.

use std::ffi::{CStr, c_char};

/// Offsets by version, v1 to v7; `-` is a field that a version does not have.
pub type Field = (&'static str, [Option<usize>; 7]);

macro_rules! offset {
    (-) => {
        None
    };
    ($n:literal) => {
        Some($n)
    };
}

macro_rules! fields {
    ($($name:ident: $a:tt $b:tt $c:tt $d:tt $e:tt $f:tt $g:tt;)+) => {
        &[$((stringify!($name), [offset!($a), offset!($b), offset!($c), offset!($d), offset!($e), offset!($f), offset!($g)])),+]
    };
}

pub const DESCRIPTOR_SIZE: [usize; 7] = [120, 128, 120, 104, 112, 112, 136];
pub const TYPE_SIZE: [usize; 7] = [1, 1, 1, 1, 8, 8, 8];
pub const PARENT: usize = 8;
pub const RANK: usize = 16;
pub const ARMS: usize = 24;
pub const STATE_SIZE: [usize; 7] = [16, 16, 16, 8, 8, 8, 8];
pub const VTABLE_SIZE: usize = 48;

pub const COLL_SIZE: [usize; 7] = [96, 104, 96, 80, 88, 88, 112];
pub const COLL: &[Field] = fields! {
    name: 24 24 24 - - - -;
    comm_hash: 32 32 32 - - - -;
    seq_number: 40 40 40 24 24 24 24;
    func: 48 48 48 32 32 32 32;
    send_buff: 56 56 56 40 40 40 40;
    recv_buff: 64 64 64 48 48 48 48;
    count: 72 72 72 56 56 56 56;
    root: 80 80 80 64 64 64 64;
    datatype: 84 88 88 72 72 72 72;
    op: 88 - - - - - -;
    traffic_bytes: 96 96 - - - - -;
    n_max_channels: 104 104 96 - - - -;
    n_channels: - - - 80 80 80 80;
    n_warps: 105 105 97 81 81 81 81;
    algo: 106 112 104 88 88 88 88;
    proto: 107 120 112 96 96 96 96;
    is_collnet: 108 - - - - - -;
    is_nvls: 112 - - - - - -;
    parent_group: - - - - 104 104 104;
    kernel_variant: - - - - - - 112;
    is_sym_coll: - - - - - - 120;
    user_tag: - - - - - - 128;
};

pub const P2P_SIZE: [usize; 7] = [56, 56, 56, 40, 48, 48, 56];
pub const P2P: &[Field] = fields! {
    name: 24 24 24 - - - -;
    comm_hash: 32 32 32 - - - -;
    func: 40 40 40 24 24 24 24;
    buff: 48 48 48 32 32 32 32;
    datatype: 56 56 56 40 40 40 40;
    count: 64 64 64 48 48 48 48;
    peer: 72 72 72 56 56 56 56;
    n_channels: - - - 60 60 60 60;
    parent_group: - - - - 64 64 64;
    user_tag: - - - - - - 72;
};

pub const PROXY_OP_SIZE: usize = 24;
pub const PROXY_OP: &[Field] = fields! {
    pid: 24 24 24 24 24 24 24;
    channel_id: 28 28 28 28 28 28 28;
    peer: 32 32 32 32 32 32 32;
    n_steps: 36 36 36 36 36 36 36;
    chunk_size: 40 40 40 40 40 40 40;
    is_send: 44 44 44 44 44 44 44;
};

pub const PROXY_STEP: &[Field] = fields! { step: 24 24 24 24 24 24 24; };

pub const KERNEL_CH_SIZE: [usize; 7] = [0, 0, 1, 16, 16, 16, 16];
pub const KERNEL_CH: &[Field] = fields! {
    channel_id: - - 24 24 24 24 24;
    p_timer: - - - 32 32 32 32;
};

pub const GROUP_API_SIZE: usize = 8;
pub const GROUP_API: &[Field] = fields! {
    graph_captured: - - - - 24 24 24;
    group_depth: - - - - 28 28 28;
};

pub const COLL_API_SIZE: [usize; 7] = [0, 0, 0, 0, 48, 48, 56];
pub const COLL_API: &[Field] = fields! {
    func: - - - - 24 24 24;
    count: - - - - 32 32 32;
    datatype: - - - - 40 40 40;
    root: - - - - 48 48 48;
    stream: - - - - 56 56 56;
    graph_captured: - - - - 64 64 64;
    user_tag: - - - - - - 72;
};

pub const P2P_API_SIZE: [usize; 7] = [0, 0, 0, 0, 40, 40, 48];
pub const P2P_API: &[Field] = fields! {
    func: - - - - 24 24 24;
    count: - - - - 32 32 32;
    datatype: - - - - 40 40 40;
    stream: - - - - 48 48 48;
    graph_captured: - - - - 56 56 56;
    user_tag: - - - - - - 64;
};

pub const KERNEL_LAUNCH: &[Field] = fields! { stream: - - - - 24 24 24; };

pub const CE_COLL_SIZE: [usize; 7] = [0, 0, 0, 0, 0, 88, 96];
pub const CE_COLL: &[Field] = fields! {
    seq_number: - - - - - 24 24;
    func: - - - - - 32 32;
    send_buff: - - - - - 40 40;
    recv_buff: - - - - - 48 48;
    count: - - - - - 56 56;
    root: - - - - - 64 64;
    datatype: - - - - - 72 72;
    sync_strategy: - - - - - 80 80;
    intra_batch_sync: - - - - - 88 88;
    batch_size: - - - - - 92 92;
    num_batches: - - - - - 96 96;
    ce_seq_num: - - - - - 100 100;
    stream: - - - - - 104 104;
    user_tag: - - - - - - 112;
};

pub const KERNEL_PHASE_SIZE: usize = 24;
pub const KERNEL_PHASE: &[Field] = fields! {
    channel_id: - - - - - - 24;
    phase_id: - - - - - - 25;
    phase_name: - - - - - - 32;
    p_timer: - - - - - - 40;
};

/// Event types.
pub mod ty {
    pub const GROUP: u64 = 0x1;
    pub const COLL: u64 = 0x2;
    pub const P2P: u64 = 0x4;
    pub const PROXY_OP: u64 = 0x8;
    pub const PROXY_STEP: u64 = 0x10;
    pub const PROXY_CTRL: u64 = 0x20;
    pub const KERNEL_CH: u64 = 0x40;
    pub const NET_PLUGIN: u64 = 0x80;
    pub const GROUP_API: u64 = 0x100;
    pub const COLL_API: u64 = 0x200;
    pub const P2P_API: u64 = 0x400;
    pub const KERNEL_LAUNCH: u64 = 0x800;
    pub const CE_COLL: u64 = 0x1000;
    pub const CE_SYNC: u64 = 0x2000;
    pub const CE_BATCH: u64 = 0x4000;
    pub const KERNEL_PHASE: u64 = 0x8000;
}

const FUNCS: [&CStr; 15] = [
    c"Broadcast",
    c"Reduce",
    c"AllGather",
    c"ReduceScatter",
    c"AllReduce",
    c"SendRecv",
    c"Send",
    c"Recv",
    c"AlltoAll",
    c"Scatter",
    c"Gather",
    c"AllGatherV",
    c"PutSignal",
    c"Signal",
    c"WaitSignal",
];
const TYPES: [&CStr; 12] = [
    c"ncclInt8",
    c"ncclUint8",
    c"ncclInt32",
    c"ncclUint32",
    c"ncclInt64",
    c"ncclUint64",
    c"ncclFloat16",
    c"ncclFloat32",
    c"ncclFloat64",
    c"ncclBfloat16",
    c"ncclFloat8e4m3",
    c"ncclFloat8e5m2",
];
const ALGOS: [&CStr; 7] =
    [c"TREE", c"RING", c"COLLNET_DIRECT", c"COLLNET_CHAIN", c"NVLS", c"NVLS_TREE", c"PAT"];
const PROTOS: [&CStr; 3] = [c"LL", c"LL128", c"SIMPLE"];

/// A name as v2 and later pass it: a static C string; the empty text for a number that names nothing.
fn name(table: &[&'static CStr], i: usize) -> *const c_char {
    table.get(i).copied().unwrap_or(c"").as_ptr()
}

/// A descriptor of one version, as bytes at the published offsets; longer than any version's, and what lies
/// behind a version's fields is garbage, as it may be on NCCL's stack.
#[derive(Debug, Clone)]
#[repr(C, align(16))]
pub struct Descriptor {
    bytes: [u8; 160],
    version: usize,
}

impl Descriptor {
    pub fn new(version: usize, kind: u64, parent: u64, rank: i32) -> Self {
        let mut d = Descriptor { bytes: [0; 160], version };
        d.bytes[DESCRIPTOR_SIZE[version - 1]..].fill(0xa5);
        let size = TYPE_SIZE[version - 1];
        d.bytes[..size].copy_from_slice(&kind.to_le_bytes()[..size]);
        // Padding behind a one-byte type is not promised to be zero.
        if size == 1 {
            d.bytes[1..8].fill(0x5a);
        }
        d.put(PARENT, &parent.to_le_bytes());
        d.put(RANK, &rank.to_le_bytes());
        d
    }

    /// Its type as this version reads it.
    pub fn kind(&self) -> u64 {
        let mut bytes = [0; 8];
        let size = TYPE_SIZE[self.version - 1];
        bytes[..size].copy_from_slice(&self.bytes[..size]);
        u64::from_le_bytes(bytes)
    }

    /// Names another parent.
    pub fn parent(&mut self, parent: u64) {
        self.put(PARENT, &parent.to_le_bytes());
    }

    /// Names another plan; Coll events from v5 on.
    pub fn plan(&mut self, plan: u64) {
        self.put(104, &plan.to_le_bytes());
    }

    /// The same of P2p events.
    pub fn pair_plan(&mut self, plan: u64) {
        self.put(64, &plan.to_le_bytes());
    }

    /// The call of a send or receive, captured into a graph.
    pub fn captured(self) -> Self {
        self.set8(P2P_API, "graph_captured", 1)
    }

    pub fn as_ptr(&self) -> *const u8 {
        self.bytes.as_ptr()
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Sets a field where this version has it.
    pub fn set(mut self, table: &[Field], field: &str, bytes: &[u8]) -> Self {
        let f = table.iter().find(|f| f.0 == field).unwrap_or_else(|| panic!("no field {field}"));
        if let Some(at) = f.1[self.version - 1] {
            self.put(at, bytes);
        }
        self
    }

    fn set64(self, table: &[Field], field: &str, value: u64) -> Self {
        self.set(table, field, &value.to_le_bytes())
    }

    fn set32(self, table: &[Field], field: &str, value: i32) -> Self {
        self.set(table, field, &value.to_le_bytes())
    }

    fn set8(self, table: &[Field], field: &str, value: u8) -> Self {
        self.set(table, field, &[value])
    }

    /// A name field: a byte in v1, a C string later.
    fn named(self, table: &[Field], field: &str, names: &[&'static CStr], i: usize) -> Self {
        if self.version == 1 {
            self.set8(table, field, i as u8)
        } else {
            self.set64(table, field, name(names, i) as u64)
        }
    }
}

/// NCCL's own numbers.
pub mod func {
    pub const ALL_GATHER: usize = 2;
    pub const BROADCAST: usize = 0;
    pub const ALL_REDUCE: usize = 4;
    pub const SEND: usize = 6;
    pub const RECV: usize = 7;
}
pub const FLOAT16: usize = 6;
pub const FLOAT32: usize = 7;
pub const RING: usize = 1;
pub const SIMPLE: usize = 2;

#[derive(Debug, Clone, Copy)]
pub struct Coll {
    pub parent: u64,
    pub plan: u64,
    pub rank: i32,
    pub hash: u64,
    pub seq: u64,
    pub func: usize,
    pub count: u64,
    pub root: i32,
    pub dtype: usize,
    pub channels: u8,
    pub warps: u8,
    pub algo: usize,
    pub proto: usize,
    pub buffers: (u64, u64),
    pub tag: u64,
}

pub const COLL_DEFAULT: Coll = Coll {
    parent: 0,
    plan: 0,
    rank: 0,
    hash: 0xfeed,
    seq: 0,
    func: func::ALL_REDUCE,
    count: 1024,
    root: 0,
    dtype: FLOAT32,
    channels: 2,
    warps: 16,
    algo: RING,
    proto: SIMPLE,
    buffers: (0x1000, 0x2000),
    tag: 0,
};

impl Coll {
    pub fn at(&self, version: usize) -> Descriptor {
        // Before v5 the plan is the parent.
        let parent = if version < 5 { self.plan } else { self.parent };
        Descriptor::new(version, ty::COLL, parent, self.rank)
            .set64(COLL, "comm_hash", self.hash)
            .set64(COLL, "seq_number", self.seq)
            .named(COLL, "func", &FUNCS, self.func)
            .set64(COLL, "send_buff", self.buffers.0)
            .set64(COLL, "recv_buff", self.buffers.1)
            .set64(COLL, "count", self.count)
            .set32(COLL, "root", self.root)
            .named(COLL, "datatype", &TYPES, self.dtype)
            .set8(COLL, "n_max_channels", self.channels)
            .set8(COLL, "n_channels", self.channels)
            .set8(COLL, "n_warps", self.warps)
            .named(COLL, "algo", &ALGOS, self.algo)
            .named(COLL, "proto", &PROTOS, self.proto)
            .set64(COLL, "parent_group", self.plan)
            .set64(COLL, "user_tag", self.tag)
    }
}

#[derive(Debug, Clone, Copy)]
pub struct P2p {
    pub parent: u64,
    pub plan: u64,
    pub rank: i32,
    pub hash: u64,
    pub func: usize,
    pub dtype: usize,
    pub count: u64,
    pub peer: i32,
    pub channels: u8,
    pub tag: u64,
}

pub const P2P_DEFAULT: P2p = P2p {
    parent: 0,
    plan: 0,
    rank: 0,
    hash: 0xfeed,
    func: func::SEND,
    dtype: FLOAT16,
    count: 512,
    peer: 1,
    channels: 2,
    tag: 0,
};

impl P2p {
    pub fn at(&self, version: usize) -> Descriptor {
        let parent = if version < 5 { self.plan } else { self.parent };
        Descriptor::new(version, ty::P2P, parent, self.rank)
            .set64(P2P, "comm_hash", self.hash)
            .named(P2P, "func", &FUNCS, self.func)
            .set64(P2P, "buff", 0x3000)
            .named(P2P, "datatype", &TYPES, self.dtype)
            .set64(P2P, "count", self.count)
            .set32(P2P, "peer", self.peer)
            .set8(P2P, "n_channels", self.channels)
            .set64(P2P, "parent_group", self.plan)
            .set64(P2P, "user_tag", self.tag)
    }
}

pub fn group(version: usize) -> Descriptor {
    Descriptor::new(version, ty::GROUP, 0, 0)
}

pub fn group_api(version: usize, captured: bool, depth: i32) -> Descriptor {
    Descriptor::new(version, ty::GROUP_API, 0, 0).set8(GROUP_API, "graph_captured", u8::from(captured)).set32(
        GROUP_API,
        "group_depth",
        depth,
    )
}

pub fn coll_api(version: usize, parent: u64, func: usize, count: u64, captured: bool) -> Descriptor {
    Descriptor::new(version, ty::COLL_API, parent, 0)
        .set64(COLL_API, "func", name(&FUNCS, func) as u64)
        .set64(COLL_API, "count", count)
        .set64(COLL_API, "datatype", name(&TYPES, FLOAT32) as u64)
        .set64(COLL_API, "stream", 0xbeef)
        .set8(COLL_API, "graph_captured", u8::from(captured))
        .set64(COLL_API, "user_tag", 31)
}

pub fn p2p_api(version: usize, parent: u64, func: usize, count: u64) -> Descriptor {
    Descriptor::new(version, ty::P2P_API, parent, 0)
        .set64(P2P_API, "func", name(&FUNCS, func) as u64)
        .set64(P2P_API, "count", count)
        .set64(P2P_API, "datatype", name(&TYPES, FLOAT16) as u64)
        .set64(P2P_API, "stream", 0xbeef)
        .set64(P2P_API, "user_tag", 32)
}

pub fn kernel_launch(version: usize, parent: u64) -> Descriptor {
    Descriptor::new(version, ty::KERNEL_LAUNCH, parent, 0).set64(KERNEL_LAUNCH, "stream", 0xbeef)
}

pub fn kernel_ch(version: usize, parent: u64, channel: u8, timer: u64) -> Descriptor {
    Descriptor::new(version, ty::KERNEL_CH, parent, 0)
        .set8(KERNEL_CH, "channel_id", channel)
        .set64(KERNEL_CH, "p_timer", timer)
}

pub fn proxy_op(
    version: usize,
    parent: u64,
    pid: i32,
    peer: i32,
    steps: i32,
    chunk: i32,
    send: bool,
) -> Descriptor {
    Descriptor::new(version, ty::PROXY_OP, parent, 0)
        .set32(PROXY_OP, "pid", pid)
        .set8(PROXY_OP, "channel_id", 3)
        .set32(PROXY_OP, "peer", peer)
        .set32(PROXY_OP, "n_steps", steps)
        .set32(PROXY_OP, "chunk_size", chunk)
        .set32(PROXY_OP, "is_send", i32::from(send))
}

pub fn proxy_step(version: usize, parent: u64, step: i32) -> Descriptor {
    Descriptor::new(version, ty::PROXY_STEP, parent, 0).set32(PROXY_STEP, "step", step)
}

pub fn ce_coll(version: usize, parent: u64, func: usize, count: u64) -> Descriptor {
    Descriptor::new(version, ty::CE_COLL, parent, 0)
        .set64(CE_COLL, "func", name(&FUNCS, func) as u64)
        .set64(CE_COLL, "send_buff", 0x1000)
        .set64(CE_COLL, "recv_buff", 0x2000)
        .set64(CE_COLL, "count", count)
        .set64(CE_COLL, "datatype", name(&TYPES, FLOAT32) as u64)
        .set64(CE_COLL, "sync_strategy", c"MC".as_ptr() as u64)
        .set64(CE_COLL, "stream", 0xbeef)
}

/// State arguments of either size.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Args {
    pub value: u64,
    pub steps: i32,
}
