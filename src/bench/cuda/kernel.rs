//! A kernel that does nothing: what CUDA events around any kernel measure beside its work.

#![expect(unsafe_code, reason = "calls of a C library that is loaded at run time")]

use super::{Context, Stream};
use crate::bench::error::BenchError;
use std::ffi::CStr;
use std::sync::Arc;

/// Old enough for every driver and GPU that NCCL runs on; the driver makes the GPU's own code of it.
const PTX: &CStr = c".version 6.0\n.target sm_52\n.address_size 64\n.visible .entry empty()\n{\n\tret;\n}\n";
/// Its name there.
const NAME: &CStr = c"empty";

/// The loaded kernel.
#[derive(Debug)]
pub struct EmptyKernel {
    context: Arc<Context>,
    module: usize,
    function: usize,
}

impl EmptyKernel {
    /// Loads it.
    ///
    /// # Errors
    /// CUDA's own: a driver without its compiler of PTX (libnvidia-ptxjitcompiler) cannot.
    pub fn new(context: &Arc<Context>) -> Result<Self, BenchError> {
        context.enter()?;
        let f = &context.cuda.f;
        let mut module = 0;
        // SAFETY: a place for one module, and a text that ends with a zero.
        let code = unsafe { (f.module_load)(&mut module, PTX.as_ptr().cast()) };
        context.told("cuModuleLoadData", code)?;
        // From here on it is unloaded whatever comes.
        let mut kernel = EmptyKernel { context: context.clone(), module, function: 0 };
        // SAFETY: a place for one function, a module that is loaded, a C string.
        let code = unsafe { (f.module_function)(&mut kernel.function, module, NAME.as_ptr()) };
        context.told("cuModuleGetFunction", code)?;
        Ok(kernel)
    }

    /// Launches it, one thread of it.
    ///
    /// # Errors
    /// CUDA's own.
    pub fn launch(&self, stream: &Stream) -> Result<(), BenchError> {
        self.context.enter()?;
        let none = std::ptr::null_mut();
        let launch = self.context.cuda.f.launch_kernel;
        // SAFETY: function and stream are alive and of one context; the kernel has no parameters.
        let code = unsafe { launch(self.function, 1, 1, 1, 1, 1, 1, 0, stream.raw, none, none) };
        self.context.told("cuLaunchKernel", code)
    }
}

impl Drop for EmptyKernel {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: loaded by us, unloaded once. A failure at the end changes nothing.
            unsafe { (self.context.cuda.f.module_unload)(self.module) };
        }
    }
}
