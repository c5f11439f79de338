//! NCCL's own logger: the only place where the plugin says anything.

#![expect(unsafe_code, reason = "NCCL's logger is a C function")]

use crate::ffi::LogFn;
use core::ffi::{CStr, c_int};
use ringwatch_wire::sync::Word;

const WARN: c_int = 2;
const INFO: c_int = 3;
/// NCCL's INIT and PROFILE subsystems.
const FLAGS: u64 = 0x1 | 0x4000;

/// Everything the plugin may say.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Message {
    Opened,
    NoForkGuard,
    NoDirectory,
    DirectoryOwner,
    NoFile,
    NoSpace,
    FileSizeLimit,
    OnDisk,
    BadFileSystem,
    NoKernelTimes,
    BadSegmentBytes,
    BadBudget,
    BadDetail,
    BadGraphs,
    DirectoryTooLong,
    CommTableFull,
    Chained,
    ChainNotLoaded,
    ChainNoPlugin,
    ChainOwn,
    ChainNoMemory,
    /// The other plugin's ABI version nearest to NCCL's.
    ChainSpeaks(u32),
    ChainInitFailed,
}

/// The message about a plugin, by the ABI version that it has.
macro_rules! speaks {
    ($($version:literal),+) => {
        [$(match CStr::from_bytes_with_nul(
            concat!(
                "ringwatch: the plugin that RINGWATCH_CHAIN names speaks only profiler ABI v",
                $version,
                ", into which the callbacks of this NCCL cannot be turned; it is not used.\0"
            )
            .as_bytes(),
        ) {
            Ok(text) => text,
            Err(_) => c"",
        }),+]
    };
}

const SPEAKS: [&CStr; 7] = speaks!("1", "2", "3", "4", "5", "6", "7");

impl Message {
    const fn level(self) -> c_int {
        match self {
            Message::Opened | Message::Chained => INFO,
            _ => WARN,
        }
    }

    const fn text(self) -> &'static CStr {
        match self {
            Message::Opened => c"ringwatch: segment opened",
            Message::NoForkGuard => {
                c"ringwatch: this kernel cannot keep a forked child out of its parent's segment (MADV_WIPEONFORK, Linux 4.14), or no memory is left; nothing is recorded."
            }
            Message::NoDirectory => {
                c"ringwatch: cannot make or open the segment directory; nothing is recorded. Set RINGWATCH_DIR to a writable directory on tmpfs."
            }
            Message::DirectoryOwner => {
                c"ringwatch: /dev/shm/ringwatch-<uid> is somebody else's, or no directory; one beside it is used. Set RINGWATCH_DIR to name another."
            }
            Message::NoFile => {
                c"ringwatch: cannot create a file in the segment directory; nothing is recorded. Check its permissions, or set RINGWATCH_DIR."
            }
            Message::NoSpace => {
                c"ringwatch: not enough shared memory for the smallest segment; nothing is recorded. Enlarge /dev/shm (docker: --shm-size) or set RINGWATCH_DIR."
            }
            Message::FileSizeLimit => {
                c"ringwatch: the process's file size limit (ulimit -f) is below the smallest segment; nothing is recorded."
            }
            Message::OnDisk => {
                c"ringwatch: RINGWATCH_DIR is on a disk, where a store may have to wait; name a directory on tmpfs."
            }
            Message::BadFileSystem => {
                c"ringwatch: RINGWATCH_DIR is not on tmpfs nor on a local disk; nothing is recorded. Name a directory on tmpfs."
            }
            Message::NoKernelTimes => {
                c"ringwatch: GPU times are not asked for: this NCCL (2.27), so little /dev/shm, or such a limit of files' sizes (ulimit -f), does not bear them."
            }
            Message::BadSegmentBytes => {
                c"ringwatch: RINGWATCH_SEGMENT_BYTES is not a number of bytes; the default is used."
            }
            Message::BadBudget => {
                c"ringwatch: RINGWATCH_OVERHEAD_BUDGET is not a share of time from 0% to 100%; 1% is used."
            }
            Message::BadDetail => {
                c"ringwatch: RINGWATCH_DETAIL is not auto, full or calls; auto is used."
            }
            Message::BadGraphs => {
                c"ringwatch: RINGWATCH_GRAPHS is not watch, full or off; watch is used."
            }
            Message::DirectoryTooLong => {
                c"ringwatch: RINGWATCH_DIR is longer than 3900 bytes; the default is used."
            }
            Message::CommTableFull => {
                c"ringwatch: more communicators than the segment has room for; this one is not recorded."
            }
            Message::Chained => c"ringwatch: the plugin that RINGWATCH_CHAIN names gets what it asks for as well",
            Message::ChainNotLoaded => {
                c"ringwatch: RINGWATCH_CHAIN names a library that cannot be loaded; it is left out."
            }
            Message::ChainNoPlugin => {
                c"ringwatch: RINGWATCH_CHAIN names a library that is no NCCL profiler plugin; it is left out."
            }
            Message::ChainOwn => c"ringwatch: RINGWATCH_CHAIN names Ringwatch itself; it is ignored.",
            Message::ChainNoMemory => {
                c"ringwatch: no memory for RINGWATCH_CHAIN; the other plugin is left out."
            }
            Message::ChainSpeaks(version) => {
                let i = version.saturating_sub(1) as usize;
                if i < SPEAKS.len() { SPEAKS[i] } else { c"" }
            }
            Message::ChainInitFailed => {
                c"ringwatch: the init of the plugin that RINGWATCH_CHAIN names failed; it gets nothing of this communicator."
            }
        }
    }
}

/// Address of the logger that was kept last; 0 for none.
static KEPT: Word = Word::new(0);

/// The logger of one init; absent for ABI v1 to v3.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Log {
    function: Option<LogFn>,
}

impl Log {
    pub(crate) const fn new(function: Option<LogFn>) -> Self {
        Log { function }
    }

    /// The logger's address, which lies in libnccl.
    pub(crate) fn address(&self) -> usize {
        self.function.map_or(0, |f| f as usize)
    }

    /// Keeps the logger for calls of the job's, which bring none.
    pub(crate) fn keep(&self) {
        if self.address() != 0 {
            KEPT.set(self.address() as u64);
        }
    }

    /// The logger that was kept last.
    pub(crate) fn kept() -> Self {
        let at = KEPT.get() as usize;
        if at == 0 {
            return Log::new(None);
        }
        // SAFETY: the address of NCCL's own logger. A process that unloads NCCL makes no communicators with it.
        Log::new(Some(unsafe { core::mem::transmute::<usize, LogFn>(at) }))
    }

    pub(crate) fn say(&self, message: Message) {
        self.write(message.level(), message.text());
    }

    /// Writes a warning that was put together.
    pub(crate) fn warn(&self, text: &CStr) {
        self.write(WARN, text);
    }

    /// Writes a remark that was put together.
    pub(crate) fn inform(&self, text: &CStr) {
        self.write(INFO, text);
    }

    fn write(&self, level: c_int, text: &CStr) {
        if let Some(f) = self.function {
            // SAFETY: NCCL's logger, called as NCCL documents it, from init: a constant format and a C string.
            unsafe { f(level, FLAGS, c"ringwatch".as_ptr(), 0, c"%s".as_ptr(), text.as_ptr()) };
        }
    }
}
