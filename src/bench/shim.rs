//! The plugin between NCCL and a plugin under test, as the benchmark drives it: `plugin/shim`.

#![expect(unsafe_code, reason = "calls a library that NCCL has loaded")]

use super::error::BenchError;
use super::nccl::version_text;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use serde::{Deserialize, Serialize};
use std::ffi::{c_int, c_uint};
use std::mem::ManuallyDrop;

/// The library's file name, and the name that it has in itself. It is what `NCCL_PROFILER_PLUGIN` has to be.
pub const SHIM_FILE_NAME: &str = "libnccl-profiler-ringwatch-shim.so";
/// The first NCCL that loads profiler plugins, as its version code.
pub const MINIMUM_NCCL: i32 = 22_304;

/// Where events go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EventMode {
    /// There are none.
    Off = 0,
    /// To empty callbacks.
    Nccl = 1,
    /// To the plugin.
    Plugin = 2,
}

/// The request that drops late callbacks of a phase that has ended.
const DROP_LATE: c_uint = 3;

/// The shim's account, with the same fields in the same order as in `plugin/shim/src/switch.rs`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShimFacts {
    /// ABI version of the profiler that NCCL uses.
    pub abi: u32,
    status: i32,
    /// The events that the plugin asks for, when it was measured last.
    pub plugin_mask: i32,
    /// The events of the phases with empty callbacks: those of the plugin, without what it has taken back at run time.
    pub nccl_mask: i32,
    /// How often the plugin has changed its mask in its own phases.
    pub mask_changes: u64,
    /// Events that came in phases without events.
    pub stray_events: u64,
}

type SwitchFn = unsafe extern "C" fn(c_uint, *mut ShimFacts) -> c_int;

/// The loaded shim.
#[derive(Debug)]
pub(super) struct Shim {
    switch: SwitchFn,
    /// Never closed: its functions are NCCL's as well.
    _library: ManuallyDrop<Library>,
}

impl Shim {
    /// Finds the shim that NCCL has loaded with its first communicator.
    ///
    /// # Errors
    /// NCCL has not loaded it, or it cannot measure the plugin.
    pub(super) fn find(nccl_version: i32) -> Result<Self, BenchError> {
        let nccl = version_text(nccl_version);
        if nccl_version < MINIMUM_NCCL {
            return Err(BenchError::Shim(format!(
                "NCCL {nccl} loads no profiler plugin: --cost needs 2.23.4 or later"
            )));
        }
        // SAFETY: nothing is loaded, and no constructor runs.
        let found = unsafe { Library::open(Some(SHIM_FILE_NAME), RTLD_NOW | RTLD_LOCAL | libc::RTLD_NOLOAD) };
        let library = found.map_err(|_| {
            BenchError::Shim(format!(
                "NCCL {nccl} has not loaded the profiler plugin that --cost puts before the one under test ({SHIM_FILE_NAME}); \
                 NCCL_DEBUG=INFO reports why"
            ))
        })?;
        // SAFETY: the shim's own function has this signature.
        let switch = unsafe { library.get::<SwitchFn>("ringwatch_shim") }.map(|f| *f);
        let switch =
            switch.map_err(|_| BenchError::Shim(format!("{SHIM_FILE_NAME} is not this program's own")))?;
        let shim = Shim { switch, _library: ManuallyDrop::new(library) };
        shim.set(EventMode::Off)?;
        Ok(shim)
    }

    fn request(&self, request: c_uint) -> Result<ShimFacts, BenchError> {
        let mut facts = ShimFacts::default();
        // SAFETY: the shim fills the facts. The caller has waited for all operations of the process.
        let result = unsafe { (self.switch)(request, &raw mut facts) };
        let problem = match (result, facts.status) {
            (0, 0) => return Ok(facts),
            (_, 2) => "it cannot be loaded: `ldd` shows what it lacks".to_owned(),
            (_, 3) => format!("it exports no ncclProfiler_v{}, which this NCCL uses", facts.abi),
            (_, 4) => "its init returned an error".to_owned(),
            (_, 5) => "this NCCL has too many event masks".to_owned(),
            _ => "NCCL has not initialized it, and may know none of its ABI versions".to_owned(),
        };
        Err(BenchError::Shim(format!("the plugin under test cannot be measured: {problem}")))
    }

    /// Lets the events of the next operations go somewhere else. No operation of this process may be under way.
    pub(super) fn set(&self, mode: EventMode) -> Result<ShimFacts, BenchError> {
        self.request(mode as c_uint)
    }

    /// Drops callbacks that come in spite of [`EventMode::Off`]. Before that they go where the last phase's events went.
    pub(super) fn drop_late(&self) -> Result<ShimFacts, BenchError> {
        self.request(DROP_LATE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_nccl_without_profilers_is_named_with_what_is_needed() {
        let said = Shim::find(22_203).unwrap_err().to_string();
        assert!(said.contains("NCCL 2.22.3 loads no profiler plugin") && said.contains("2.23.4"), "{said}");
        let said = Shim::find(22_809).unwrap_err().to_string();
        assert!(said.contains("NCCL 2.28.9 has not loaded") && said.contains(SHIM_FILE_NAME), "{said}");
    }
}
