//! A loaded plugin: the one place that calls foreign code.
#![expect(unsafe_code, reason = "dlopen, and calls through the plugin's C table")]

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fmt;
use std::mem::transmute;
use std::path::Path;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use super::abi::{DescriptorBytes, StateBytes};
use super::player::ReplayError;

/// A version of NCCL's profiler interface, 1 to 7.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Abi(u8);

impl Abi {
    /// All versions, oldest first.
    pub const ALL: [Self; 7] = [Self(1), Self(2), Self(3), Self(4), Self(5), Self(6), Self(7)];
    /// The version of NCCL 2.28, with which the recordings were made.
    pub const RECORDED: Self = Self(5);

    /// The version of this number, if there is one.
    #[must_use]
    pub fn new(number: u8) -> Option<Self> {
        (1..=7).contains(&number).then_some(Self(number))
    }

    /// 1 to 7.
    #[must_use]
    pub fn number(self) -> u8 {
        self.0
    }
}

impl fmt::Display for Abi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "v{}", self.0)
    }
}

/// The NUL-terminated form of a name, alive for ever: NCCL's names are statics, and plugins may keep
/// pointers to them. The leak is bounded by the number of different names.
pub(super) fn c_string(name: &str) -> &'static CStr {
    static KNOWN: LazyLock<Mutex<HashMap<String, &'static CStr>>> = LazyLock::new(Mutex::default);
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(text) = known.get(name) {
        return text;
    }
    let until_nul = name.split('\0').next().unwrap_or_default();
    let text: &'static CStr = Box::leak(CString::new(until_nul).unwrap_or_default().into_boxed_c_str());
    known.insert(name.to_owned(), text);
    text
}

/// The lines that the plugin wrote through the logger at level WARN.
pub(super) type Warnings = Arc<Mutex<Vec<String>>>;

thread_local! {
    static WARNINGS: RefCell<Option<Warnings>> = const { RefCell::new(None) };
}

/// Where warnings land that come from a thread of the plugin's own.
static STRAY_WARNINGS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Sends this thread's warnings to `sink`.
pub(super) fn collect_warnings(sink: Warnings) {
    WARNINGS.set(Some(sink));
}

pub(super) fn take_stray_warnings() -> Vec<String> {
    std::mem::take(&mut *STRAY_WARNINGS.lock().unwrap_or_else(PoisonError::into_inner))
}

const LEVEL_WARN: c_int = 2;

/// NCCL's logger. The real one is variadic; on the two 64-bit Linux conventions a variadic call with
/// one pointer argument arrives in the same registers.
extern "C" fn log_line(
    level: c_int,
    _flags: u64,
    _file: *const c_char,
    _line: c_int,
    format: *const c_char,
    argument: *const c_char,
) {
    if level != LEVEL_WARN || format.is_null() {
        return;
    }
    // SAFETY: a logger's format is a C string, alive during the call.
    let format = unsafe { CStr::from_ptr(format) };
    let text = if format == c"%s" && !argument.is_null() {
        // SAFETY: "%s" says that its argument is a C string, alive during the call.
        unsafe { CStr::from_ptr(argument) }
    } else {
        format
    };
    let text = text.to_string_lossy().into_owned();
    let own = WARNINGS.try_with(|sink| {
        // A plugin that logs from within this closure does not exist; borrow errors only mean stray.
        sink.try_borrow().ok().and_then(|sink| sink.clone())
    });
    match own {
        Ok(Some(sink)) => sink.lock().unwrap_or_else(PoisonError::into_inner).push(text),
        _ => STRAY_WARNINGS.lock().unwrap_or_else(PoisonError::into_inner).push(text),
    }
}

type Logger = extern "C" fn(c_int, u64, *const c_char, c_int, *const c_char, *const c_char);
type InitV1 = unsafe extern "C" fn(*mut *mut c_void, *mut c_int) -> c_int;
type InitV4 = unsafe extern "C" fn(
    *mut *mut c_void,
    *mut c_int,
    *const c_char,
    u64,
    c_int,
    c_int,
    c_int,
    Logger,
) -> c_int;
type InitV5 = unsafe extern "C" fn(
    *mut *mut c_void,
    u64,
    *mut c_int,
    *const c_char,
    c_int,
    c_int,
    c_int,
    Logger,
) -> c_int;
type StartEvent = unsafe extern "C" fn(*mut c_void, *mut *mut c_void, *mut c_void) -> c_int;
type OneHandle = unsafe extern "C" fn(*mut c_void) -> c_int;
type RecordState = unsafe extern "C" fn(*mut c_void, c_int, *mut c_void) -> c_int;

#[repr(C)]
struct Table {
    name: *const c_char,
    init: Option<InitV1>,
    start_event: Option<StartEvent>,
    stop_event: Option<OneHandle>,
    record_event_state: Option<RecordState>,
    finalize: Option<OneHandle>,
}

/// The arguments of an init.
#[derive(Debug, Clone, Copy)]
pub(super) struct Comm {
    pub(super) id: u64,
    pub(super) name: Option<&'static CStr>,
    pub(super) nodes: i32,
    pub(super) ranks: i32,
    pub(super) rank: i32,
}

/// An opened plugin and the functions of one version of its table.
///
/// Handles and contexts are plain numbers here: NCCL never looks into them either.
#[derive(Debug)]
pub(super) struct Plugin {
    abi: Abi,
    init: InitV1,
    start_event: StartEvent,
    stop_event: OneHandle,
    record_event_state: RecordState,
    finalize: OneHandle,
    /// NCCL has one mask for the process, in its own data; so a plugin may keep the address for ever.
    mask: &'static AtomicI32,
    /// Last, so that it is closed last.
    _library: Library,
}

impl Plugin {
    pub(super) fn open(path: &Path, abi: Abi) -> Result<Self, ReplayError> {
        // SAFETY: loading runs the library's constructors; the caller chose the file to be run.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }
            .map_err(|source| ReplayError::Open { path: path.to_owned(), source })?;
        let missing = |source| ReplayError::Symbol { path: path.to_owned(), abi, source };
        // SAFETY: the symbol is a data object, whose address is all that is taken here.
        let table = unsafe { library.get::<*const Table>(format!("ncclProfiler_v{}", abi.number())) }
            .map_err(missing)?;
        let table: *const Table = *table;
        let bad = || ReplayError::Table { path: path.to_owned(), abi };
        if table.is_null() || !table.is_aligned() {
            return Err(bad());
        }
        // SAFETY: every version's table has these six words, each a pointer or NULL, and lives as
        // long as the library, which is still open.
        let table = unsafe { table.read() };
        if table.name.is_null() {
            return Err(bad());
        }
        Ok(Self {
            abi,
            init: table.init.ok_or_else(bad)?,
            start_event: table.start_event.ok_or_else(bad)?,
            stop_event: table.stop_event.ok_or_else(bad)?,
            record_event_state: table.record_event_state.ok_or_else(bad)?,
            finalize: table.finalize.ok_or_else(bad)?,
            mask: Box::leak(Box::new(AtomicI32::new(0))),
            _library: library,
        })
    }

    /// The activation mask as the plugin has it now.
    pub(super) fn mask(&self) -> u64 {
        u64::from(self.mask.load(Ordering::Relaxed) as u32)
    }

    /// Gives back the result code and the context.
    pub(super) fn init(&self, comm: &Comm) -> (i32, usize) {
        let mut context: *mut c_void = std::ptr::null_mut();
        let mask = self.mask.as_ptr();
        let name = comm.name.map_or(std::ptr::null(), CStr::as_ptr);
        let Comm { id, nodes, ranks, rank, .. } = *comm;
        let code = match self.abi.number() {
            // SAFETY: the signature of v1 to v3; both pointers are valid, the mask's for ever.
            1..=3 => unsafe { (self.init)(&raw mut context, mask) },
            4 => {
                // SAFETY: v4's table holds a function of this signature in this slot.
                let init = unsafe { transmute::<InitV1, InitV4>(self.init) };
                // SAFETY: as above; the name is NULL or a static C string.
                unsafe { init(&raw mut context, mask, name, id, nodes, ranks, rank, log_line) }
            }
            _ => {
                // SAFETY: since v5 the slot holds a function of this signature.
                let init = unsafe { transmute::<InitV1, InitV5>(self.init) };
                // SAFETY: as above.
                unsafe { init(&raw mut context, id, mask, name, nodes, ranks, rank, log_line) }
            }
        };
        (code, context as usize)
    }

    /// Gives back the result code and what stands in the handle's place, which held `handle` before.
    pub(super) fn start(&self, context: usize, handle: usize, bytes: &mut DescriptorBytes) -> (i32, usize) {
        let mut handle = handle as *mut c_void;
        // SAFETY: the descriptor is laid out for this version; both pointers live during the call.
        let code =
            unsafe { (self.start_event)(context as *mut c_void, &raw mut handle, bytes.as_mut_ptr().cast()) };
        bytes.scribble();
        (code, handle as usize)
    }

    pub(super) fn stop(&self, handle: usize) -> i32 {
        // SAFETY: a handle that the plugin gave out, or NULL where NCCL passes that.
        unsafe { (self.stop_event)(handle as *mut c_void) }
    }

    pub(super) fn record(&self, handle: usize, state: u32, argument: Option<StateBytes>) -> i32 {
        let handle = handle as *mut c_void;
        match argument {
            // SAFETY: a handle that the plugin gave out; NCCL passes NULL for states without argument.
            None => unsafe { (self.record_event_state)(handle, state as c_int, std::ptr::null_mut()) },
            Some(mut bytes) => {
                // SAFETY: as above; the argument has room for every version's union.
                let code =
                    unsafe { (self.record_event_state)(handle, state as c_int, bytes.as_mut_ptr().cast()) };
                bytes.scribble();
                code
            }
        }
    }

    pub(super) fn finalize(&self, context: usize) -> i32 {
        // SAFETY: a context that the plugin gave out, or NULL where NCCL passes that.
        unsafe { (self.finalize)(context as *mut c_void) }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn names_become_one_static_string_each() {
        assert_eq!(c_string("AllReduce"), c"AllReduce");
        assert_eq!(c_string("AllReduce").as_ptr(), c_string("AllReduce").as_ptr());
        assert_eq!(c_string("cut\0short"), c"cut");
    }

    #[test]
    fn only_warnings_are_kept_and_each_player_gets_its_own() {
        std::thread::spawn(|| {
            let sink = Warnings::default();
            collect_warnings(sink.clone());
            let null = std::ptr::null();
            log_line(3, 0, null, 0, c"%s".as_ptr(), c"info".as_ptr());
            log_line(2, 0, null, 0, c"%s".as_ptr(), c"full".as_ptr());
            log_line(2, 0, null, 0, c"plain".as_ptr(), null);
            assert_eq!(*sink.lock().unwrap(), ["full", "plain"]);
        })
        .join()
        .unwrap();
    }
}
