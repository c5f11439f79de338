//! A kernel that does nothing, launched as another one is: what CUDA events around that one measure beside its work.

#![expect(unsafe_code, reason = "calls of a C library that is loaded at run time")]

use super::{Context, Event, Stream};
use crate::bench::error::BenchError;
use crate::bench::result::KernelLaunch;
use std::ffi::{CStr, c_int, c_uint, c_void};
use std::sync::Arc;

/// Bytes of arguments that NCCL's kernels take (seen of 2.28).
const ARGUMENTS: usize = 4096;
/// Old enough for every driver and GPU that NCCL runs on; the driver makes the GPU's own code of it.
const PTX: &CStr = c".version 6.0\n.target sm_52\n.address_size 64\n.visible .entry empty(.param .align 8 .b8 arguments[4096])\n{\n\tret;\n}\n";
/// Its name there.
const NAME: &CStr = c"empty";
/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`.
const MOST_SHARED_BYTES: c_int = 8;
/// `CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION`.
pub(super) const CLUSTER: c_int = 4;

/// `CUlaunchAttributeValue`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct AttributeValue([u64; 8]);

impl AttributeValue {
    /// The value as three numbers, as [`CLUSTER`] has them.
    pub(super) fn dimensions(self) -> [u32; 3] {
        [self.0[0] as u32, (self.0[0] >> 32) as u32, self.0[1] as u32]
    }

    fn of_dimensions([x, y, z]: [u32; 3]) -> Self {
        AttributeValue([u64::from(x) | u64::from(y) << 32, u64::from(z), 0, 0, 0, 0, 0, 0])
    }
}

/// `CUlaunchAttribute`.
#[repr(C)]
struct Attribute {
    id: c_int,
    pad: c_int,
    value: AttributeValue,
}

/// `CUlaunchConfig`.
#[repr(C)]
pub(super) struct LaunchConfig {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared_bytes: c_uint,
    stream: usize,
    attributes: *mut Attribute,
    attribute_count: c_uint,
}

/// The loaded kernel, with all that is put into a stream around it.
#[derive(Debug)]
pub struct EmptyKernel {
    like: KernelLaunch,
    /// Another stream, and a moment of it for each wait.
    aside: (Stream, Vec<Event>),
    /// Moments that are recorded after it.
    records: Vec<Event>,
    module: usize,
    function: usize,
    context: Arc<Context>,
}

impl EmptyKernel {
    /// Loads it.
    ///
    /// # Errors
    /// CUDA's own: a driver without its compiler of PTX (libnvidia-ptxjitcompiler) cannot.
    pub fn new(context: &Arc<Context>, like: KernelLaunch) -> Result<Self, BenchError> {
        let events = |n: u32| (0..n).map(|_| Event::new(context)).collect::<Result<Vec<_>, _>>();
        let (aside, records) = ((Stream::new(context)?, events(like.waits)?), events(like.records)?);
        context.enter()?;
        let f = &context.cuda.f;
        let mut module = 0;
        // SAFETY: a place for one module, and a text that ends with a zero.
        let code = unsafe { (f.module_load)(&mut module, PTX.as_ptr().cast()) };
        context.told("cuModuleLoadData", code)?;
        // From here on it is unloaded whatever comes.
        let mut kernel = EmptyKernel { like, aside, records, module, function: 0, context: context.clone() };
        // SAFETY: a place for one function, a module that is loaded, a C string.
        let code = unsafe { (f.module_function)(&mut kernel.function, module, NAME.as_ptr()) };
        context.told("cuModuleGetFunction", code)?;
        let shared = c_int::try_from(like.shared_bytes).unwrap_or(c_int::MAX);
        // SAFETY: a function of a module that is loaded.
        let code = unsafe { (f.set_function_attribute)(kernel.function, MOST_SHARED_BYTES, shared) };
        context.told("cuFuncSetAttribute", code)?;
        Ok(kernel)
    }

    /// Waits for what it has to wait for. To be called before [`EmptyKernel::launch`], outside of what is measured:
    /// NCCL's waits too are for what is done long before.
    ///
    /// # Errors
    /// CUDA's own.
    pub fn prepare(&self) -> Result<(), BenchError> {
        let (stream, events) = &self.aside;
        events.iter().try_for_each(|e| e.record(stream))
    }

    /// Launches it, with the waits before it and the records after it.
    ///
    /// # Errors
    /// CUDA's own.
    pub fn launch(&self, stream: &Stream) -> Result<(), BenchError> {
        self.context.enter()?;
        self.aside.1.iter().try_for_each(|e| stream.wait(e))?;
        let mut cluster =
            Attribute { id: CLUSTER, pad: 0, value: AttributeValue::of_dimensions(self.like.cluster) };
        let clustered = self.like.cluster != [1; 3];
        let config = LaunchConfig {
            grid: self.like.grid,
            block: self.like.block,
            shared_bytes: self.like.shared_bytes,
            stream: stream.raw,
            attributes: if clustered { &raw mut cluster } else { std::ptr::null_mut() },
            attribute_count: u32::from(clustered),
        };
        let mut bytes = [0u64; ARGUMENTS / 8];
        let mut arguments = [bytes.as_mut_ptr().cast::<c_void>()];
        let launch = self.context.cuda.f.launch_kernel;
        // SAFETY: function and stream are alive and of one context; one argument of the size that the kernel declares,
        // copied before the call returns, as the attribute is.
        let code = unsafe { launch(&config, self.function, arguments.as_mut_ptr(), std::ptr::null_mut()) };
        self.context.told("cuLaunchKernelEx", code)?;
        self.records.iter().try_for_each(|e| e.record(stream))
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
