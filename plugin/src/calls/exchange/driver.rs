//! Memory and streams of CUDA's driver, for the all-gather of rules.
//!
//! A buffer and its stream are kept for later communicators of the same device: to free memory would wait for all that the job
//! has under way on it.

use crate::runtime::cuda::{self, Contexts, NOT_READY, SUCCESS};
use crate::runtime::nccl::Linker;
use core::ffi::{c_int, c_uint, c_void};
use ringwatch_wire::sync::Word;

/// CU_STREAM_NON_BLOCKING: it never waits for the job's default stream, nor that one for it.
const NON_BLOCKING: c_uint = 1;
/// Least length of a buffer that is kept, so that it serves most communicators.
const KEPT_BYTES: usize = 64 << 10;

/// The driver's functions.
#[derive(Clone, Copy)]
pub(super) struct Driver {
    allocate: unsafe extern "C" fn(*mut u64, usize) -> c_int,
    to_device: unsafe extern "C" fn(u64, *const c_void, usize, usize) -> c_int,
    to_host: unsafe extern "C" fn(*mut c_void, u64, usize, usize) -> c_int,
    create: unsafe extern "C" fn(*mut usize, c_uint) -> c_int,
    query: unsafe extern "C" fn(usize) -> c_int,
    pub(super) contexts: Contexts,
}

impl Driver {
    /// The driver that the process has loaded; `None` without one, or without a function.
    pub(super) fn find() -> Option<Self> {
        let linker = Linker::get()?;
        let find = |name| cuda::function(&linker, name);
        let allocate = find(c"cuMemAlloc_v2")?;
        let to_device = find(c"cuMemcpyHtoDAsync_v2")?;
        let to_host = find(c"cuMemcpyDtoHAsync_v2")?;
        let create = find(c"cuStreamCreate")?;
        let query = find(c"cuStreamQuery")?;
        let contexts = Contexts::find(&linker)?;
        // SAFETY: the CUDA driver's functions of these names and signatures.
        Some(unsafe {
            use core::mem::transmute;
            Driver {
                allocate: transmute::<usize, unsafe extern "C" fn(*mut u64, usize) -> c_int>(allocate),
                to_device: transmute::<usize, unsafe extern "C" fn(u64, *const c_void, usize, usize) -> c_int>(
                    to_device,
                ),
                to_host: transmute::<usize, unsafe extern "C" fn(*mut c_void, u64, usize, usize) -> c_int>(
                    to_host,
                ),
                create: transmute::<usize, unsafe extern "C" fn(*mut usize, c_uint) -> c_int>(create),
                query: transmute::<usize, unsafe extern "C" fn(usize) -> c_int>(query),
                contexts,
            }
        })
    }

    /// A buffer of this length and a stream, in the current context.
    pub(super) fn take(&self, bytes: usize) -> Option<Buffer> {
        let context = self.contexts.current().map_or(0, |c| self.contexts.number_of(c));
        let fits =
            |k: &&Kept| context != 0 && k.context.get_first() == context && k.bytes.get() >= bytes as u64;
        if let Some(i) = KEPT.iter().position(|k| fits(&k) && k.state.replace(IDLE, TAKEN))
            && let Some(k) = KEPT.get(i)
        {
            return Some(Buffer { device: k.device.get(), stream: k.stream.get() as usize, kept: Some(i) });
        }
        let bytes = bytes.max(KEPT_BYTES);
        let (mut stream, mut device) = (0, 0);
        // SAFETY: each stores one handle.
        let made = unsafe {
            (self.create)(&mut stream, NON_BLOCKING) == SUCCESS
                && (self.allocate)(&mut device, bytes) == SUCCESS
        };
        if !made {
            return None;
        }
        let kept = if context == 0 { None } else { KEPT.iter().position(|k| k.state.replace(EMPTY, TAKEN)) };
        if let Some(k) = kept.and_then(|i| KEPT.get(i)) {
            k.device.set(device);
            k.stream.set(stream as u64);
            k.bytes.set(bytes as u64);
            k.context.set_last(context);
        }
        Some(Buffer { device, stream, kept })
    }

    /// Copies to a buffer behind what its stream does.
    pub(super) fn write(&self, buffer: Buffer, offset: usize, from: &[u64]) -> bool {
        let (to, bytes) = (buffer.device + offset as u64, size_of_val(from));
        // SAFETY: the buffer has room behind the offset; CUDA has read pageable memory when this returns.
        unsafe { (self.to_device)(to, from.as_ptr().cast(), bytes, buffer.stream) == SUCCESS }
    }

    /// Copies from a buffer behind what its stream does.
    ///
    /// # Safety
    /// `to` has so many bytes, which stay until the stream has passed.
    pub(super) unsafe fn read(&self, buffer: Buffer, to: *mut c_void, bytes: usize) -> bool {
        // SAFETY: as the caller promises; the buffer is that long.
        unsafe { (self.to_host)(to, buffer.device, bytes, buffer.stream) == SUCCESS }
    }

    /// Returns whether a stream has done everything; `None` where that failed.
    pub(super) fn is_done(&self, buffer: Buffer) -> Option<bool> {
        // SAFETY: a stream of ours in the current context.
        match unsafe { (self.query)(buffer.stream) } {
            SUCCESS => Some(true),
            NOT_READY => Some(false),
            _ => None,
        }
    }
}

/// Memory of a device, and a stream.
#[derive(Debug, Clone, Copy)]
pub(super) struct Buffer {
    /// Address of the memory.
    pub(super) device: u64,
    pub(super) stream: usize,
    /// Its place among those that are kept.
    kept: Option<usize>,
}

impl Buffer {
    /// Gives it back. The stream has done everything.
    pub(super) fn keep(self) {
        if let Some(k) = self.kept.and_then(|i| KEPT.get(i)) {
            k.state.set_last(IDLE);
        }
    }
}

const EMPTY: u64 = 0;
const TAKEN: u64 = 1;
const IDLE: u64 = 2;
/// Most buffers that are kept. More are used once.
const KEPT_MAX: usize = 64;

struct Kept {
    /// EMPTY, TAKEN or IDLE.
    state: Word,
    /// The number of the context that it belongs to: after a reset of the device it fits no more.
    context: Word,
    device: Word,
    stream: Word,
    bytes: Word,
}

static KEPT: [Kept; KEPT_MAX] = [const {
    Kept {
        state: Word::new(EMPTY),
        context: Word::new(0),
        device: Word::new(0),
        stream: Word::new(0),
        bytes: Word::new(0),
    }
}; KEPT_MAX];
