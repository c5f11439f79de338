//! The part of CUDA's driver that every use of it needs: the current context, and the thread's capture mode.

#![expect(unsafe_code, reason = "calls the CUDA driver")]

use crate::runtime::nccl::Linker;
use core::ffi::{CStr, c_int};

/// A context's handle.
pub(crate) type Context = usize;

/// The driver's answer that all is well.
pub(crate) const SUCCESS: c_int = 0;
/// The driver's answer for work that has not finished.
pub(crate) const NOT_READY: c_int = 600;
/// CU_STREAM_CAPTURE_MODE_RELAXED.
const RELAXED: c_int = 2;

/// Finds a function of the driver that the process has loaded.
pub(crate) fn function(linker: &Linker, name: &CStr) -> Option<usize> {
    Some(linker.find(c"libcuda.so.1", name)).filter(|a| *a != 0)
}

/// The driver's functions about contexts and capture modes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Contexts {
    current: unsafe extern "C" fn(*mut Context) -> c_int,
    exchange: unsafe extern "C" fn(*mut c_int) -> c_int,
    /// From CUDA 12 on: the number of a context, which no other one ever has.
    number: Option<unsafe extern "C" fn(Context, *mut u64) -> c_int>,
}

impl Contexts {
    /// Finds the functions of the driver that the process has loaded; `None` without a driver, or without a function.
    pub(crate) fn find(linker: &Linker) -> Option<Self> {
        let exchange = function(linker, c"cuThreadExchangeStreamCaptureMode")?;
        let current = function(linker, c"cuCtxGetCurrent")?;
        let number = function(linker, c"cuCtxGetId");
        // SAFETY: the CUDA driver's functions of these names and signatures.
        Some(unsafe {
            use core::mem::transmute;
            Contexts {
                current: transmute::<usize, unsafe extern "C" fn(*mut Context) -> c_int>(current),
                exchange: transmute::<usize, unsafe extern "C" fn(*mut c_int) -> c_int>(exchange),
                number: number
                    .map(|n| transmute::<usize, unsafe extern "C" fn(Context, *mut u64) -> c_int>(n)),
            }
        })
    }

    /// Functions of a test's own, which number no contexts.
    #[cfg(test)]
    pub(crate) const fn of(
        current: unsafe extern "C" fn(*mut Context) -> c_int,
        exchange: unsafe extern "C" fn(*mut c_int) -> c_int,
    ) -> Self {
        Contexts { current, exchange, number: None }
    }

    /// This thread's context; `None` where it has none.
    pub(crate) fn current(&self) -> Option<Context> {
        let mut context = 0;
        // SAFETY: stores one context.
        let asked = unsafe { (self.current)(&mut context) };
        if asked == SUCCESS && context != 0 { Some(context) } else { None }
    }

    /// The number of the current context; 0 where the driver gives none.
    pub(crate) fn number_of(&self, context: Context) -> u64 {
        let mut number = 0;
        // SAFETY: the current context; stores one number.
        match self.number.map(|ask| unsafe { ask(context, &mut number) }) {
            Some(SUCCESS) => number,
            _ => 0,
        }
    }

    /// Runs `f` with this thread's capture mode relaxed: a capture of the job's on another thread stays whole.
    pub(crate) fn relaxed<T>(&self, f: impl FnOnce() -> T) -> T {
        let mut mode = RELAXED;
        // SAFETY: swaps this thread's capture mode with ours; it needs no context.
        let swapped = unsafe { (self.exchange)(&mut mode) } == SUCCESS;
        let out = f();
        if swapped {
            // SAFETY: as above; `mode` is what it was before.
            unsafe { (self.exchange)(&mut mode) };
        }
        out
    }
}
