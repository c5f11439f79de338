//! The tuner as NCCL meets it: tables by their published offsets, and cost tables as NCCL hands them over.

use super::library::{LogFn, plugin_library};
use ringwatch_wire::tuning::{HEADER_BYTES, Row, seal};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};

/// A table: name, init, getCollInfo, finalize, and what is behind them.
#[repr(C)]
#[derive(Debug)]
pub struct CTable {
    pub name: *const c_char,
    pub init: *const c_void,
    pub get_coll_info: *const c_void,
    pub finalize: *const c_void,
    pub spare: [usize; 8],
}

type Init1 = unsafe extern "C" fn(usize, usize, Option<LogFn>) -> c_int;
type Init2 = unsafe extern "C" fn(usize, usize, Option<LogFn>, *mut *mut c_void) -> c_int;
type Init5 = unsafe extern "C" fn(
    *mut *mut c_void,
    u64,
    usize,
    usize,
    Option<LogFn>,
    *mut [c_int; 3],
    *mut [f64; 144],
) -> c_int;
type Get1 =
    unsafe extern "C" fn(c_int, usize, c_int, c_int, c_int, *mut c_int, *mut c_int, *mut c_int) -> c_int;
type Get2 = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    usize,
    c_int,
    c_int,
    c_int,
    *mut c_int,
    *mut c_int,
    *mut c_int,
) -> c_int;
type Get3 =
    unsafe extern "C" fn(*mut c_void, c_int, usize, c_int, *mut f32, c_int, c_int, *mut c_int) -> c_int;
type Get4 = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    usize,
    c_int,
    *mut f32,
    c_int,
    c_int,
    c_int,
    *mut c_int,
) -> c_int;

/// The value that NCCL puts into a communicator's place before it calls init.
const UNTOUCHED: usize = 0xdead_beef;

/// The tuner's six tables.
#[derive(Debug, Clone, Copy)]
pub struct Tuner {
    tables: [&'static CTable; 6],
}

// SAFETY: the tables are immutable and their functions may be called from any thread.
unsafe impl Send for Tuner {}
// SAFETY: as above.
unsafe impl Sync for Tuner {}

/// One call, and its result.
#[derive(Debug, Clone, PartialEq)]
pub struct Asked {
    pub collective: c_int,
    pub bytes: usize,
    pub pipe_ops: c_int,
    pub is_registered: bool,
    pub costs: Vec<f32>,
    /// 0 is NCCL's default.
    pub channels: c_int,
    /// Of v1 and v2, which choose these directly; -1 is NCCL's choice.
    pub algorithm: c_int,
    pub protocol: c_int,
}

impl Asked {
    /// An all-reduce under costs of which those of NVLS are impossible.
    pub fn all_reduce(bytes: usize) -> Self {
        let mut costs: Vec<f32> = (0..21).map(|i| 10.0 + i as f32).collect();
        costs[12..15].fill(-1.0);
        Asked {
            collective: 4,
            bytes,
            pipe_ops: 1,
            is_registered: false,
            costs,
            channels: 0,
            algorithm: -1,
            protocol: -1,
        }
    }

    /// The entry that NCCL up to 2.30 would take now.
    pub fn winner(&self) -> usize {
        let possible = self.costs.iter().enumerate().filter(|(_, c)| **c >= 0.0);
        possible.min_by(|a, b| a.1.total_cmp(b.1)).unwrap().0
    }
}

impl Tuner {
    /// Opens the built library as NCCL does.
    pub fn built() -> Self {
        Self::open(plugin_library())
    }

    pub fn open(path: &Path) -> Self {
        let path = CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: opens a library whose initialisers are those of this crate alone.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!handle.is_null());
        let tables = [1, 2, 3, 4, 5, 6].map(|v| {
            let symbol = CString::new(format!("ncclTunerPlugin_v{v}")).unwrap();
            // SAFETY: a handle of dlopen's and a C string.
            let at = unsafe { libc::dlsym(handle, symbol.as_ptr()) };
            // SAFETY: the symbol is a table of this shape; the library stays mapped (NODELETE).
            unsafe { at.cast::<CTable>().as_ref() }.unwrap_or_else(|| panic!("no symbol {symbol:?}"))
        });
        Tuner { tables }
    }

    pub fn table(&self, version: usize) -> &'static CTable {
        self.tables[version - 1]
    }

    pub fn name(&self, version: usize) -> &'static CStr {
        // SAFETY: every table has a static name.
        unsafe { CStr::from_ptr(self.table(version).name) }
    }

    /// One init: NCCL's result and the context; v1 has none.
    pub fn init(
        &self,
        version: usize,
        id: u64,
        ranks: usize,
        nodes: usize,
        log: Option<LogFn>,
    ) -> (c_int, usize) {
        let init = self.table(version).init;
        let mut context = UNTOUCHED as *mut c_void;
        let (mut domains, mut constants) = ([1, 8, 8], [0.5; 144]);
        // SAFETY: the signatures of these versions, with places that live through the call.
        let result = unsafe {
            match version {
                1 => std::mem::transmute::<*const c_void, Init1>(init)(ranks, nodes, log),
                2..=4 => std::mem::transmute::<*const c_void, Init2>(init)(ranks, nodes, log, &mut context),
                _ => std::mem::transmute::<*const c_void, Init5>(init)(
                    &mut context,
                    id,
                    ranks,
                    nodes,
                    log,
                    &mut domains,
                    &mut constants,
                ),
            }
        };
        assert_eq!((domains, constants), ([1, 8, 8], [0.5; 144]), "NCCL's cost model stays as it is");
        assert!(!context.is_null(), "a context is never NULL");
        assert!(version == 1 || context as usize != UNTOUCHED, "the context's place is always written");
        (result, context as usize)
    }

    /// One getCollInfo. It always succeeds.
    pub fn ask(&self, version: usize, context: usize, asked: &mut Asked) {
        let get = self.table(version).get_coll_info;
        let context = context as *mut c_void;
        let a = asked;
        let (algorithms, protocols) = ((a.costs.len() / 3) as c_int, 3);
        let costs = a.costs.as_mut_ptr();
        // SAFETY: the signatures of these versions, and a table of the size that is said.
        let result = unsafe {
            match version {
                1 => std::mem::transmute::<*const c_void, Get1>(get)(
                    a.collective,
                    a.bytes,
                    1,
                    1,
                    a.pipe_ops,
                    &mut a.algorithm,
                    &mut a.protocol,
                    &mut a.channels,
                ),
                2 => std::mem::transmute::<*const c_void, Get2>(get)(
                    context,
                    a.collective,
                    a.bytes,
                    1,
                    1,
                    a.pipe_ops,
                    &mut a.algorithm,
                    &mut a.protocol,
                    &mut a.channels,
                ),
                3 => std::mem::transmute::<*const c_void, Get3>(get)(
                    context,
                    a.collective,
                    a.bytes,
                    a.pipe_ops,
                    costs,
                    algorithms,
                    protocols,
                    &mut a.channels,
                ),
                _ => std::mem::transmute::<*const c_void, Get4>(get)(
                    context,
                    a.collective,
                    a.bytes,
                    a.pipe_ops,
                    costs,
                    algorithms,
                    protocols,
                    c_int::from(a.is_registered),
                    &mut a.channels,
                ),
            }
        };
        assert_eq!(result, 0, "getCollInfo always succeeds");
    }

    pub fn finalize(&self, version: usize, context: usize) {
        let finalize = self.table(version).finalize;
        // SAFETY: the signatures of these versions; any number may be finalized.
        let result = unsafe {
            match version {
                1 => std::mem::transmute::<*const c_void, unsafe extern "C" fn() -> c_int>(finalize)(),
                _ => std::mem::transmute::<*const c_void, unsafe extern "C" fn(*mut c_void) -> c_int>(
                    finalize,
                )(context as *mut c_void),
            }
        };
        assert_eq!(result, 0);
    }
}

/// Writes a compiled table of rules.
pub fn write_rules(path: &Path, rows: &[Row]) -> PathBuf {
    let mut table = vec![0; HEADER_BYTES];
    rows.iter().for_each(|r| table.extend(r.to_bytes()));
    seal(&mut table);
    std::fs::write(path, table).unwrap();
    path.to_owned()
}
