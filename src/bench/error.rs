//! The errors of a benchmark, in words that say where and what to do.

use super::rendezvous::RendezvousError;
use thiserror::Error;

/// Why there is no result.
#[derive(Debug, Error)]
pub enum BenchError {
    /// A combination of settings that makes no sense; the text names the options.
    #[error("{0}")]
    Settings(String),
    /// The CUDA driver library cannot be loaded.
    #[error(
        "no CUDA driver: {looked_for} was looked for {place} and cannot be loaded. It comes with \
         NVIDIA's driver; a container needs it mounted in (docker run --gpus all)"
    )]
    NoCuda {
        /// The file's name or path.
        looked_for: String,
        /// Where it was looked for.
        place: &'static str,
        /// The dynamic linker's own words.
        source: libloading::Error,
    },
    /// The driver is there, but no GPU that this process may use.
    #[error("{needed} GPUs are needed and {visible} are visible{hint}")]
    Gpus {
        /// How many this process drives, and those of the ranks before it on this host.
        needed: usize,
        /// How many the driver shows.
        visible: usize,
        /// The place to look at.
        hint: &'static str,
    },
    /// No NCCL library was found.
    #[error(
        "no NCCL: {}. Name the file with --nccl PATH; PyTorch's wheels bring one as \
         site-packages/nvidia/nccl/lib/libnccl.so.2",
        .tried.join("; ")
    )]
    NoNccl {
        /// Each place that was tried, and what came of it.
        tried: Vec<String>,
    },
    /// A library lacks a function: it is too old, or another library.
    #[error("{library} has no {symbol}: it is too old for this, or not what its name says")]
    Symbol {
        /// The library's file.
        library: String,
        /// The function's name.
        symbol: &'static str,
    },
    /// A call of the CUDA driver API failed.
    #[error("{call} on device {device}: {name} ({code}): {text}")]
    Cuda {
        /// The function.
        call: &'static str,
        /// CUDA's number of the device, -1 where none is meant.
        device: i32,
        /// CUDA's error code.
        code: i32,
        /// CUDA's name for it.
        name: String,
        /// CUDA's description.
        text: String,
    },
    /// A GPU has no room for the buffers.
    #[error(
        "device {device} has no room for two buffers of {bytes} bytes ({free} bytes are free): take smaller sizes (--max-bytes, or in the file of targets) or a lower --batch"
    )]
    Memory {
        /// CUDA's number of the device.
        device: i32,
        /// Bytes of one buffer.
        bytes: u64,
        /// Bytes that were free.
        free: u64,
    },
    /// The process that gives the turns is gone.
    #[error("whoever compares this benchmark with others has gone; nothing more is measured")]
    TurnsOver,
    /// Events cannot be switched; the text says why.
    #[error("{0}")]
    Shim(String),
    /// A call of NCCL failed.
    #[error("rank {rank}: {call}: {text} ({code}){}{}", during(.operation), last_words(.last))]
    Nccl {
        /// The rank in the communicator.
        rank: u32,
        /// The function.
        call: &'static str,
        /// NCCL's result code.
        code: i32,
        /// NCCL's text for the code.
        text: String,
        /// The text of `ncclGetLastError`, where there is one.
        last: Option<String>,
        /// The operation with its size; empty where the call says it.
        operation: String,
    },
    /// Work that was handed to the GPUs did not end in time.
    #[error(
        "ranks {ranks:?}: {operation} did not end in {seconds} s (--timeout); all communicators were aborted"
    )]
    TimedOut {
        /// The ranks of this process whose streams were still busy.
        ranks: Vec<u32>,
        /// The operation with its size.
        operation: String,
        /// The limit in seconds.
        seconds: u64,
    },
    /// A call did not come back in time.
    #[error(
        "ranks {ranks:?}: {operation}: a call did not come back in {seconds} s (--timeout); all communicators were aborted"
    )]
    Blocked {
        /// The ranks of the thread that is in the call.
        ranks: Vec<u32>,
        /// The operation with its size.
        operation: String,
        /// The limit in seconds.
        seconds: u64,
    },
    /// Another thread of this process failed first; its error is the one to look at.
    #[error("given up, since another rank failed")]
    Cancelled,
    /// As the inner one, and threads of this process are still inside CUDA or NCCL: it should end without
    /// the usual clearing up, by [`super::leave`].
    #[error("{0}; not all threads came back from CUDA or NCCL")]
    Stuck(Box<BenchError>),
    /// The ranks cannot meet, or lost each other.
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    /// A message of another rank is not as it should be.
    #[error("another rank sent what this one cannot read")]
    Exchange(#[from] serde_json::Error),
    /// A thread could not be started.
    #[error("cannot start a thread")]
    Thread(#[source] std::io::Error),
    /// A thread ended by a bug of ours.
    #[error("a bug in ringwatch: the thread of ranks {0:?} ended by itself")]
    Bug(Vec<u32>),
}

fn last_words(last: &Option<String>) -> String {
    last.as_ref().map(|l| format!("; NCCL's last error: {l}")).unwrap_or_default()
}

fn during(operation: &str) -> String {
    if operation.is_empty() { String::new() } else { format!(" during {operation}") }
}
