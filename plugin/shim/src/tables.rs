//! The tables that NCCL looks up, their callbacks, and the plugin under test behind them.

use crate::switch::{
    CANNOT_LOAD, EMPTY_CALLBACKS, FORWARD, HOT, INIT_FAILED, NO_TABLE, VERSION, count_stray, empty_handle,
    fail, follow_plugin, keep_mask, plugin_mask,
};
use core::ffi::{CStr, c_char, c_int, c_void};
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

/// NCCL's logger: level, flags, file, line, format, arguments.
type LogFn = unsafe extern "C" fn(c_int, u64, *const c_char, c_int, *const c_char, ...);
type StartFn = unsafe extern "C" fn(*mut c_void, *mut *mut c_void, *mut c_void) -> c_int;
type StopFn = unsafe extern "C" fn(*mut c_void) -> c_int;
type RecordFn = unsafe extern "C" fn(*mut c_void, c_int, *const c_void) -> c_int;
type FinalizeFn = unsafe extern "C" fn(*mut c_void) -> c_int;
type InitBare = unsafe extern "C" fn(*mut *mut c_void, *mut c_int) -> c_int;
type InitV4 = unsafe extern "C" fn(
    *mut *mut c_void,
    *mut c_int,
    *const c_char,
    u64,
    c_int,
    c_int,
    c_int,
    Option<LogFn>,
) -> c_int;
type InitV5 = unsafe extern "C" fn(
    *mut *mut c_void,
    u64,
    *mut c_int,
    *const c_char,
    c_int,
    c_int,
    c_int,
    Option<LogFn>,
) -> c_int;

const SUCCESS: c_int = 0;
/// Slots behind the last one that NCCL knows: forks look for extra functions there and must find NULL.
const SPARE: usize = 8;

/// The exported table. `I` is the version's init function.
#[repr(C)]
#[derive(Debug)]
pub struct Table<I> {
    name: *const c_char,
    init: I,
    start: StartFn,
    stop: StopFn,
    record: RecordFn,
    finalize: FinalizeFn,
    spare: [*const c_void; SPARE],
}

// SAFETY: the table is immutable, and its pointers are to static text, functions or nothing.
unsafe impl<I> Sync for Table<I> {}

impl<I> Table<I> {
    const fn of(init: I) -> Self {
        let spare = [core::ptr::null(); SPARE];
        Table { name: c"RingwatchShim".as_ptr(), init, start, stop, record, finalize, spare }
    }
}

/// The plugin under test is not loaded yet.
const UNLOADED: u32 = 0;
const LOADING: u32 = 1;
/// It is loaded, or cannot be.
const RESOLVED: u32 = 2;
static LOAD: AtomicU32 = AtomicU32::new(UNLOADED);
/// Addresses of the plugin's other two functions; 0 where it is not loaded.
static INIT: AtomicUsize = AtomicUsize::new(0);
static FINALIZE: AtomicUsize = AtomicUsize::new(0);

const SYMBOLS: [&CStr; 7] = [
    c"ncclProfiler_v1",
    c"ncclProfiler_v2",
    c"ncclProfiler_v3",
    c"ncclProfiler_v4",
    c"ncclProfiler_v5",
    c"ncclProfiler_v6",
    c"ncclProfiler_v7",
];

/// Loads the plugin once. Communicators may be made by several threads at once, so the others wait.
fn load(version: u32) {
    if LOAD.compare_exchange(UNLOADED, LOADING, Ordering::Acquire, Ordering::Relaxed).is_ok() {
        if let Err(status) = find_table(version) {
            fail(status);
        }
        VERSION.store(version, Ordering::Relaxed);
        LOAD.store(RESOLVED, Ordering::Release);
    }
    while LOAD.load(Ordering::Acquire) != RESOLVED {
        // SAFETY: takes nothing and gives the core to the thread that loads.
        unsafe { libc::sched_yield() };
    }
}

/// Finds the plugin's table of a version. The library is never closed: late callbacks may come at any time.
fn find_table(version: u32) -> Result<(), i32> {
    // SAFETY: a NUL-terminated name; the benchmark has set the variable before this process began.
    let file = unsafe { libc::getenv(c"RINGWATCH_SHIM_PLUGIN".as_ptr()) };
    if file.is_null() {
        return Err(CANNOT_LOAD);
    }
    // SAFETY: a NUL-terminated path, which the user named as a plugin; its constructors run.
    let library = unsafe { libc::dlopen(file, libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if library.is_null() {
        return Err(CANNOT_LOAD);
    }
    let symbol = (version as usize).checked_sub(1).and_then(|i| SYMBOLS.get(i)).ok_or(NO_TABLE)?;
    // SAFETY: an open library and a NUL-terminated name.
    let table = unsafe { libc::dlsym(library, symbol.as_ptr()) };
    // SAFETY: a symbol of this name is a table whose first six words are the name and five functions, of any version.
    let table = unsafe { table.cast::<[usize; 6]>().as_ref() }.ok_or(NO_TABLE)?;
    let [_, init, start, stop, record, finalize] = *table;
    for (function, place) in
        [(start, &HOT.start), (stop, &HOT.stop), (record, &HOT.record), (finalize, &FINALIZE), (init, &INIT)]
    {
        place.store(function, Ordering::Relaxed);
    }
    Ok(())
}

/// The function at an address that [`find_table`] has stored.
macro_rules! function {
    ($address:expr, $kind:ty) => {
        match core::ptr::with_exposed_provenance::<c_void>($address.load(Ordering::Relaxed)) {
            address if address.is_null() => None,
            // SAFETY: the address is of a function of this kind in the table of the version that NCCL uses.
            address => Some(unsafe { core::mem::transmute::<*const c_void, $kind>(address) }),
        }
    };
}

/// Opens a communicator: `init` calls the plugin's init with the shim's word in place of NCCL's mask.
fn open(
    version: u32,
    context: *mut *mut c_void,
    mask: *mut c_int,
    init: impl FnOnce(*mut c_int) -> Option<c_int>,
) -> c_int {
    load(version);
    if !context.is_null() {
        // SAFETY: NCCL passes a place for one pointer, which may be uninitialized; a failed plugin may leave it alone.
        unsafe { context.write(empty_handle()) };
    }
    if init(plugin_mask()).is_some_and(|result| result != SUCCESS) {
        fail(INIT_FAILED);
    }
    keep_mask(mask);
    // An error would make some releases unload the shim while other communicators use it.
    SUCCESS
}

unsafe extern "C" fn init_bare<const VERSION: u32>(context: *mut *mut c_void, mask: *mut c_int) -> c_int {
    open(VERSION, context, mask, |word| {
        // SAFETY: the plugin's function of this version, with NCCL's own arguments and a mask that lives for ever.
        function!(INIT, InitBare).map(|init| unsafe { init(context, word) })
    })
}

unsafe extern "C" fn init_v4<const VERSION: u32>(
    context: *mut *mut c_void,
    mask: *mut c_int,
    name: *const c_char,
    id: u64,
    nodes: c_int,
    ranks: c_int,
    rank: c_int,
    log: Option<LogFn>,
) -> c_int {
    open(VERSION, context, mask, |word| {
        // SAFETY: as in `init_bare`.
        function!(INIT, InitV4).map(|init| unsafe { init(context, word, name, id, nodes, ranks, rank, log) })
    })
}

unsafe extern "C" fn init_v5<const VERSION: u32>(
    context: *mut *mut c_void,
    id: u64,
    mask: *mut c_int,
    name: *const c_char,
    nodes: c_int,
    ranks: c_int,
    rank: c_int,
    log: Option<LogFn>,
) -> c_int {
    open(VERSION, context, mask, |word| {
        // SAFETY: as in `init_bare`.
        function!(INIT, InitV5).map(|init| unsafe { init(context, id, word, name, nodes, ranks, rank, log) })
    })
}

/// The part of every version's descriptor that comes before the union.
#[repr(C)]
struct DescriptorHead {
    kind: u64,
    parent: *mut c_void,
}

unsafe extern "C" fn start(context: *mut c_void, out: *mut *mut c_void, descriptor: *mut c_void) -> c_int {
    let given = match HOT.callbacks.load(Ordering::Relaxed) {
        EMPTY_CALLBACKS => empty_handle(),
        FORWARD => {
            // SAFETY: NCCL passes a descriptor on its stack, valid and its own to change during this call.
            let head = unsafe { descriptor.cast::<DescriptorHead>().as_mut() };
            // NCCL keeps the handle of a call beyond its stop: the parent may be from a phase with empty callbacks.
            if let Some(head) = head.filter(|h| core::ptr::eq(h.parent, empty_handle())) {
                head.parent = core::ptr::null_mut();
            }
            if let Some(start) = function!(HOT.start, StartFn) {
                // SAFETY: the plugin's function with NCCL's own arguments.
                let result = unsafe { start(context, out, descriptor) };
                follow_plugin();
                return result;
            }
            core::ptr::null_mut()
        }
        _ => {
            count_stray();
            core::ptr::null_mut()
        }
    };
    if !out.is_null() {
        // SAFETY: NCCL passes a place for one handle.
        unsafe { out.write(given) };
    }
    SUCCESS
}

/// True where a stop or a state is of the plugin's own event, in a phase of the plugin.
#[inline]
fn is_forwarded(event: *mut c_void) -> bool {
    HOT.callbacks.load(Ordering::Relaxed) == FORWARD && !core::ptr::eq(event, empty_handle())
}

unsafe extern "C" fn stop(event: *mut c_void) -> c_int {
    if is_forwarded(event)
        && let Some(stop) = function!(HOT.stop, StopFn)
    {
        // SAFETY: the plugin's function, with a handle that it gave out or the NULL that NCCL passes.
        let result = unsafe { stop(event) };
        follow_plugin();
        return result;
    }
    SUCCESS
}

unsafe extern "C" fn record(event: *mut c_void, state: c_int, args: *const c_void) -> c_int {
    if is_forwarded(event)
        && let Some(record) = function!(HOT.record, RecordFn)
    {
        // SAFETY: as in `stop`, with NCCL's own arguments.
        return unsafe { record(event, state, args) };
    }
    SUCCESS
}

unsafe extern "C" fn finalize(context: *mut c_void) -> c_int {
    // The shim's own context is of a plugin whose init did not write one.
    if !core::ptr::eq(context, empty_handle())
        && let Some(finalize) = function!(FINALIZE, FinalizeFn)
    {
        // SAFETY: the plugin's function, with the context that it gave out.
        return unsafe { finalize(context) };
    }
    SUCCESS
}

/// Exports the table of one version.
macro_rules! table {
    ($symbol:ident, $version:literal, $init:ident: $signature:ty) => {
        /// The table that NCCL looks up by this name.
        #[unsafe(no_mangle)]
        #[allow(non_upper_case_globals, reason = "NCCL's name")]
        pub static $symbol: Table<$signature> = Table::of($init::<$version>);
    };
}

table!(ncclProfiler_v1, 1, init_bare: InitBare);
table!(ncclProfiler_v2, 2, init_bare: InitBare);
table!(ncclProfiler_v3, 3, init_bare: InitBare);
table!(ncclProfiler_v4, 4, init_v4: InitV4);
table!(ncclProfiler_v5, 5, init_v5: InitV5);
table!(ncclProfiler_v6, 6, init_v5: InitV5);
table!(ncclProfiler_v7, 7, init_v5: InitV5);
