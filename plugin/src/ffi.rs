//! The C types that the interfaces of NCCL's plugins have in common, and the arguments of an init.

use core::ffi::{CStr, c_char, c_int, c_void};

/// NCCL's logger: level, flags, file, line, format, arguments.
pub type LogFn = unsafe extern "C" fn(c_int, u64, *const c_char, c_int, *const c_char, ...);

/// The result that NCCL gets, always.
pub(crate) const SUCCESS: c_int = 0;

/// The name in every table.
pub(crate) const NAME: &CStr = c"Ringwatch";

pub(crate) type InitBare = unsafe extern "C" fn(*mut *mut c_void, *mut c_int) -> c_int;
pub(crate) type InitV4 = unsafe extern "C" fn(
    *mut *mut c_void,
    *mut c_int,
    *const c_char,
    u64,
    c_int,
    c_int,
    c_int,
    Option<LogFn>,
) -> c_int;
pub(crate) type InitV5 = unsafe extern "C" fn(
    *mut *mut c_void,
    u64,
    *mut c_int,
    *const c_char,
    c_int,
    c_int,
    c_int,
    Option<LogFn>,
) -> c_int;

/// The arguments of an init.
#[derive(Debug, Clone, Copy)]
pub struct InitArgs {
    /// False for ABI v1 to v3, whose init says nothing.
    pub known: bool,
    /// The communicator.
    pub id: u64,
    /// The user's name for it, or NULL.
    pub name: *const c_char,
    /// Nodes.
    pub nodes: c_int,
    /// Ranks.
    pub ranks: c_int,
    /// This rank.
    pub rank: c_int,
    /// NCCL's logger.
    pub log: Option<LogFn>,
}

impl InitArgs {
    /// Nothing is known.
    pub const fn unknown() -> Self {
        InitArgs { known: false, id: 0, name: core::ptr::null(), nodes: 0, ranks: 0, rank: -1, log: None }
    }
}
