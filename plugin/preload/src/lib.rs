//! The library that is loaded before a job (`LD_PRELOAD`) and stands in the place of NCCL's functions.
//!
//! It holds the plugin too: NCCL 2.23 and later is told to load its profiler from this very file, which is loaded
//! already, so that calls and events meet in one state and one segment. Until the job makes a communicator it
//! does nothing but set that variable and take one of libc's thread keys: a process that never uses NCCL gets no
//! file, no mapping and no thread.
//!
//! Arguments and results pass through as they are. What is recorded of them is in [`ringwatch_plugin::calls`].

#![cfg_attr(panic = "abort", no_std)]
#![expect(unsafe_code, reason = "the C boundary")]
#![allow(non_snake_case, reason = "NCCL's names")]

use core::ffi::{CStr, c_int, c_uint, c_void};
use ringwatch_plugin::calls::{self, Made, Op, Real, func};

/// NCCL's 128 bytes that a communicator is made from; passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId {
    bytes: [u8; 128],
}

impl core::fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("UniqueId")
    }
}

const PLUGIN_VARIABLE: &CStr = c"NCCL_PROFILER_PLUGIN";
const STOCK: &[u8] = b"libnccl-profiler-ringwatch.so";
const OWN: &CStr = c"libringwatch-preload.so";

/// Runs when the library is loaded, before main.
#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = construct;

extern "C" fn construct() {
    calls::take_key();
    // SAFETY: a NUL-terminated name. Nothing else runs yet: it is the dynamic linker that calls this.
    let set = unsafe { libc::getenv(PLUGIN_VARIABLE.as_ptr()) };
    // SAFETY: getenv returns NULL or a NUL-terminated string.
    let set = if set.is_null() { b"" } else { unsafe { CStr::from_ptr(set) }.to_bytes() };
    let ours = set.strip_suffix(STOCK).is_some_and(|dir| dir.is_empty() || dir.ends_with(b"/"));
    if set.is_empty() || ours {
        // SAFETY: NUL-terminated texts, copied by setenv.
        unsafe { libc::setenv(PLUGIN_VARIABLE.as_ptr(), OWN.as_ptr(), 1) };
    }
}

type Comm = *mut c_void;
type Stream = *mut c_void;
type Config = *mut c_void;
type CallConfig = *const c_void;

/// One of NCCL's functions: its own arguments, and what is done around the real one, which `$real` calls. The real
/// one's address is kept in a module of the function's name.
macro_rules! function {
    ($name:ident($($arg:ident: $type:ty),* $(,)?), |$real:ident| $around:expr) => {
        mod $name {
            pub(super) static REAL: super::Real = super::Real::new(
                // SAFETY: the text ends with its only NUL.
                unsafe { core::ffi::CStr::from_bytes_with_nul_unchecked(concat!(stringify!($name), "\0").as_bytes()) }
            );
        }

        #[doc = concat!("NCCL's ", stringify!($name), ".")]
        ///
        /// # Safety
        /// As NCCL says.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> c_int {
            type Function = unsafe extern "C" fn($($type),*) -> c_int;
            let own: Function = $name;
            let Some(at) = $name::REAL.get(own as usize) else { return $name::REAL.missing() };
            // SAFETY: NCCL's function of this name, which has this signature.
            let real = unsafe { core::mem::transmute::<usize, Function>(at) };
            // SAFETY: the caller's own arguments, as they came.
            let $real = || unsafe { real($($arg),*) };
            $around
        }
    };
}

/// A call with what every one has.
fn op(func: u8, count: usize, dtype: c_int, comm: Comm, stream: Stream) -> Op {
    let (comm, stream) = (comm.addr(), stream.addr());
    Op { func, dtype, count, root: -1, redop: -1, comm, stream, in_place: false }
}

type Send = *const c_void;
type Recv = *mut c_void;

function!(ncclAllReduce(send: Send, recv: Recv, count: usize, dtype: c_int, redop: c_int, comm: Comm, stream: Stream), |real| {
    calls::around(&Op { redop, in_place: send.addr() == recv.addr(), ..op(func::ALL_REDUCE, count, dtype, comm, stream) }, real)
});
function!(ncclBroadcast(send: Send, recv: Recv, count: usize, dtype: c_int, root: c_int, comm: Comm, stream: Stream), |real| {
    calls::around(&Op { root, in_place: send.addr() == recv.addr(), ..op(func::BROADCAST, count, dtype, comm, stream) }, real)
});
function!(ncclBcast(buffer: Recv, count: usize, dtype: c_int, root: c_int, comm: Comm, stream: Stream), |real| {
    calls::around(&Op { root, in_place: true, ..op(func::BROADCAST, count, dtype, comm, stream) }, real)
});
function!(ncclReduce(send: Send, recv: Recv, count: usize, dtype: c_int, redop: c_int, root: c_int, comm: Comm, stream: Stream), |real| {
    calls::around(&Op { redop, root, in_place: send.addr() == recv.addr(), ..op(func::REDUCE, count, dtype, comm, stream) }, real)
});
function!(ncclAllGather(send: Send, recv: Recv, count: usize, dtype: c_int, comm: Comm, stream: Stream), |real| {
    calls::around(&op(func::ALL_GATHER, count, dtype, comm, stream), real)
});
function!(ncclReduceScatter(send: Send, recv: Recv, count: usize, dtype: c_int, redop: c_int, comm: Comm, stream: Stream), |real| {
    calls::around(&Op { redop, ..op(func::REDUCE_SCATTER, count, dtype, comm, stream) }, real)
});
function!(ncclSend(send: Send, count: usize, dtype: c_int, peer: c_int, comm: Comm, stream: Stream), |real| {
    calls::around(&Op { root: peer, ..op(func::SEND, count, dtype, comm, stream) }, real)
});
function!(ncclRecv(recv: Recv, count: usize, dtype: c_int, peer: c_int, comm: Comm, stream: Stream), |real| {
    calls::around(&Op { root: peer, ..op(func::RECV, count, dtype, comm, stream) }, real)
});
function!(ncclAlltoAll(send: Send, recv: Recv, count: usize, dtype: c_int, comm: Comm, stream: Stream), |real| {
    calls::around(&op(func::ALL_TO_ALL, count, dtype, comm, stream), real)
});
function!(ncclGather(send: Send, recv: Recv, count: usize, dtype: c_int, root: c_int, comm: Comm, stream: Stream), |real| {
    calls::around(&Op { root, ..op(func::GATHER, count, dtype, comm, stream) }, real)
});
function!(ncclScatter(send: Send, recv: Recv, count: usize, dtype: c_int, root: c_int, comm: Comm, stream: Stream), |real| {
    calls::around(&Op { root, ..op(func::SCATTER, count, dtype, comm, stream) }, real)
});

// NCCL 2.31 and later: the same with a configuration, which is NCCL's affair.
function!(ncclAllReduceConfig(send: Send, recv: Recv, count: usize, dtype: c_int, redop: c_int, comm: Comm, stream: Stream, config: CallConfig), |real| {
    calls::around(&Op { redop, in_place: send.addr() == recv.addr(), ..op(func::ALL_REDUCE, count, dtype, comm, stream) }, real)
});
function!(ncclBroadcastConfig(send: Send, recv: Recv, count: usize, dtype: c_int, root: c_int, comm: Comm, stream: Stream, config: CallConfig), |real| {
    calls::around(&Op { root, in_place: send.addr() == recv.addr(), ..op(func::BROADCAST, count, dtype, comm, stream) }, real)
});
function!(ncclReduceConfig(send: Send, recv: Recv, count: usize, dtype: c_int, redop: c_int, root: c_int, comm: Comm, stream: Stream, config: CallConfig), |real| {
    calls::around(&Op { redop, root, in_place: send.addr() == recv.addr(), ..op(func::REDUCE, count, dtype, comm, stream) }, real)
});
function!(ncclAllGatherConfig(send: Send, recv: Recv, count: usize, dtype: c_int, comm: Comm, stream: Stream, config: CallConfig), |real| {
    calls::around(&op(func::ALL_GATHER, count, dtype, comm, stream), real)
});
function!(ncclReduceScatterConfig(send: Send, recv: Recv, count: usize, dtype: c_int, redop: c_int, comm: Comm, stream: Stream, config: CallConfig), |real| {
    calls::around(&Op { redop, ..op(func::REDUCE_SCATTER, count, dtype, comm, stream) }, real)
});
function!(ncclAlltoAllConfig(send: Send, recv: Recv, count: usize, dtype: c_int, comm: Comm, stream: Stream, config: CallConfig), |real| {
    calls::around(&op(func::ALL_TO_ALL, count, dtype, comm, stream), real)
});
function!(ncclGatherConfig(send: Send, recv: Recv, count: usize, dtype: c_int, root: c_int, comm: Comm, stream: Stream, config: CallConfig), |real| {
    calls::around(&Op { root, ..op(func::GATHER, count, dtype, comm, stream) }, real)
});
function!(ncclScatterConfig(send: Send, recv: Recv, count: usize, dtype: c_int, root: c_int, comm: Comm, stream: Stream, config: CallConfig), |real| {
    calls::around(&Op { root, ..op(func::SCATTER, count, dtype, comm, stream) }, real)
});

/// One of the ranks whose signals are waited for.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct WaitSignalDesc {
    signals: c_int,
    peer: c_int,
    index: c_int,
    context: c_int,
}

type Window = *mut c_void;

/// In place of a data type where a call has none.
const NO_TYPE: c_int = -1;

// NCCL 2.29 and later: one-sided operations. NCCL counts a signal as no element.
function!(ncclPutSignal(local: Send, count: usize, dtype: c_int, peer: c_int, window: Window, offset: usize, index: c_int, context: c_int, flags: c_uint, comm: Comm, stream: Stream), |real| {
    calls::around_unordered(&Op { root: peer, ..op(func::PUT_SIGNAL, count, dtype, comm, stream) }, real)
});
function!(ncclSignal(peer: c_int, index: c_int, context: c_int, flags: c_uint, comm: Comm, stream: Stream), |real| {
    calls::around_unordered(&Op { root: peer, ..op(func::SIGNAL, 0, NO_TYPE, comm, stream) }, real)
});
function!(ncclWaitSignal(count: c_int, descs: *const WaitSignalDesc, comm: Comm, stream: Stream), |real| {
    // SAFETY: the caller passes NCCL as many as it says.
    let only = if count == 1 { unsafe { descs.as_ref() } } else { None };
    let root = only.map_or(-1, |desc| desc.peer);
    calls::around_unordered(&Op { root, ..op(func::WAIT_SIGNAL, 0, NO_TYPE, comm, stream) }, real)
});
// NCCL 2.28 and later: what kernels of the job's own communicate by.
function!(ncclDevCommCreate(comm: Comm, requirements: *const c_void, new: *mut c_void), |real| {
    calls::around_unordered(&op(func::DEV_COMM_CREATE, 0, NO_TYPE, comm, core::ptr::null_mut()), real)
});

function!(ncclGroupStart(), |real| calls::group_start(real));
function!(ncclGroupEnd(), |real| calls::group_end(true, real));
function!(ncclGroupSimulateEnd(info: *mut c_void), |real| calls::group_end(false, real));

function!(ncclCommInitRank(new: *mut Comm, ranks: c_int, id: UniqueId, rank: c_int), |real| {
    let id = Some(calls::unique_id_hash(&id.bytes));
    find_all();
    // SAFETY: the caller's own configuration.
    unsafe { calls::init(new, Made::Rank { id, rank, ranks }, core::ptr::null(), real) }
});
function!(ncclCommInitRankConfig(new: *mut Comm, ranks: c_int, id: UniqueId, rank: c_int, config: Config), |real| {
    let id = Some(calls::unique_id_hash(&id.bytes));
    find_all();
    // SAFETY: the caller's own configuration.
    unsafe { calls::init(new, Made::Rank { id, rank, ranks }, config, real) }
});
function!(ncclCommInitRankScalable(new: *mut Comm, ranks: c_int, rank: c_int, count: c_int, ids: *const UniqueId, config: Config), |real| {
    // SAFETY: the caller passes NCCL as many ids as it says.
    let first = if count > 0 { unsafe { ids.as_ref() } } else { None };
    let id = first.map(|id| calls::unique_id_hash(&id.bytes));
    find_all();
    // SAFETY: the caller's own configuration.
    unsafe { calls::init(new, Made::Rank { id, rank, ranks }, config, real) }
});
function!(ncclCommInitAll(new: *mut Comm, ranks: c_int, devices: *const c_int), |real| {
    find_all();
    calls::init_all(new, ranks, real)
});
function!(ncclCommSplit(comm: Comm, color: c_int, key: c_int, new: *mut Comm, config: Config), |real| {
    find_all();
    // SAFETY: the caller's own configuration.
    unsafe { calls::init(new, Made::Child { parent: comm.addr(), color }, config, real) }
});
function!(ncclCommShrink(comm: Comm, excluded: *mut c_int, count: c_int, new: *mut Comm, config: Config, flags: c_int), |real| {
    find_all();
    // SAFETY: the caller's own configuration.
    unsafe { calls::init(new, Made::Child { parent: comm.addr(), color: SHRUNK }, config, real) }
});
function!(ncclCommGrow(comm: Comm, ranks: c_int, id: *const UniqueId, rank: c_int, new: *mut Comm, config: Config), |real| {
    // The ranks that are added have no parent, so that no id of ours would be the same on all.
    find_all();
    // SAFETY: the caller's own configuration.
    unsafe { calls::init(new, Made::Child { parent: 0, color: GROWN }, config, real) }
});
function!(ncclCommGetAsyncError(comm: Comm, answer: *mut c_int), |real| {
    // SAFETY: the caller's own place for NCCL's answer.
    unsafe { calls::asked(comm.addr(), answer, real) }
});
function!(ncclCommDestroy(comm: Comm), |real| calls::destroy(comm.addr(), false, real));
function!(ncclCommAbort(comm: Comm), |real| calls::destroy(comm.addr(), true, real));
function!(ncclCommRevoke(comm: Comm, flags: c_int), |real| calls::revoke(comm.addr(), real));

/// In place of a color, which is not negative.
const SHRUNK: c_int = -2;
const GROWN: c_int = -3;

/// Functions that are called after a communicator was made, when nothing may be looked up any more: the dynamic
/// linker takes locks and memory.
static HOT: &[&Real] = &[
    &ncclAllReduce::REAL,
    &ncclBroadcast::REAL,
    &ncclBcast::REAL,
    &ncclReduce::REAL,
    &ncclAllGather::REAL,
    &ncclReduceScatter::REAL,
    &ncclSend::REAL,
    &ncclRecv::REAL,
    &ncclAlltoAll::REAL,
    &ncclGather::REAL,
    &ncclScatter::REAL,
    &ncclAllReduceConfig::REAL,
    &ncclBroadcastConfig::REAL,
    &ncclReduceConfig::REAL,
    &ncclAllGatherConfig::REAL,
    &ncclReduceScatterConfig::REAL,
    &ncclAlltoAllConfig::REAL,
    &ncclGatherConfig::REAL,
    &ncclScatterConfig::REAL,
    &ncclPutSignal::REAL,
    &ncclSignal::REAL,
    &ncclWaitSignal::REAL,
    &ncclDevCommCreate::REAL,
    &ncclGroupStart::REAL,
    &ncclGroupEnd::REAL,
    &ncclGroupSimulateEnd::REAL,
    &ncclCommGetAsyncError::REAL,
    &ncclCommDestroy::REAL,
    &ncclCommAbort::REAL,
    &ncclCommRevoke::REAL,
];

fn find_all() {
    for real in HOT {
        // An older NCCL does not have them all.
        let _known: Option<usize> = real.get(0);
    }
}
