//! The CUDA driver API, as much of it as a benchmark needs, loaded when it is asked for.
//!
//! Every object gives itself back when dropped. Handles are CUDA's opaque pointers, kept as numbers.

#![expect(unsafe_code, reason = "calls of a C library that is loaded at run time")]

mod graph;
mod kernel;

use super::error::BenchError;
pub use graph::Graph;
pub use kernel::EmptyKernel;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::ManuallyDrop;
use std::path::Path;
use std::sync::Arc;

/// CUDA's success.
const SUCCESS: c_int = 0;
/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: c_int = 2;
/// `CUDA_ERROR_NOT_READY`: a stream still has work.
const NOT_READY: c_int = 600;
/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: c_uint = 1;
/// `CU_STREAM_CAPTURE_MODE_THREAD_LOCAL`.
const CAPTURE_THREAD_LOCAL: c_int = 1;
/// The name under which the driver's library is found.
const FILE_NAME: &str = "libcuda.so.1";

/// Declares the functions of a library: a field, a symbol and a signature each.
macro_rules! functions {
    ($($field:ident = $symbol:literal ($($argument:ty),*);)*) => {
        #[derive(Debug, Clone, Copy)]
        struct Functions {
            $($field: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl Functions {
            fn load(library: &Library, name: &str) -> Result<Self, BenchError> {
                Ok(Functions {
                    $($field: {
                        // SAFETY: the symbol is a function of this signature in every release that has it.
                        let found = unsafe { library.get::<unsafe extern "C" fn($($argument),*) -> c_int>($symbol) };
                        *found.map_err(|_| BenchError::Symbol { library: name.to_owned(), symbol: $symbol })?
                    },)*
                })
            }
        }
    };
}

functions! {
    init = "cuInit"(c_uint);
    driver_version = "cuDriverGetVersion"(*mut c_int);
    device_count = "cuDeviceGetCount"(*mut c_int);
    device = "cuDeviceGet"(*mut c_int, c_int);
    device_name = "cuDeviceGetName"(*mut c_char, c_int, c_int);
    pci = "cuDeviceGetPCIBusId"(*mut c_char, c_int, c_int);
    retain = "cuDevicePrimaryCtxRetain"(*mut usize, c_int);
    release = "cuDevicePrimaryCtxRelease_v2"(c_int);
    set_current = "cuCtxSetCurrent"(usize);
    memory_info = "cuMemGetInfo_v2"(*mut usize, *mut usize);
    alloc = "cuMemAlloc_v2"(*mut u64, usize);
    free = "cuMemFree_v2"(u64);
    alloc_host = "cuMemAllocHost_v2"(*mut *mut c_void, usize);
    free_host = "cuMemFreeHost"(*mut c_void);
    to_device = "cuMemcpyHtoDAsync_v2"(u64, *const c_void, usize, usize);
    to_host = "cuMemcpyDtoHAsync_v2"(*mut c_void, u64, usize, usize);
    on_device = "cuMemcpyDtoDAsync_v2"(u64, u64, usize, usize);
    fill = "cuMemsetD8Async"(u64, u8, usize, usize);
    stream_create = "cuStreamCreate"(*mut usize, c_uint);
    stream_destroy = "cuStreamDestroy_v2"(usize);
    stream_query = "cuStreamQuery"(usize);
    event_create = "cuEventCreate"(*mut usize, c_uint);
    event_record = "cuEventRecord"(usize, usize);
    event_elapsed = "cuEventElapsedTime"(*mut f32, usize, usize);
    event_destroy = "cuEventDestroy_v2"(usize);
    wait_event = "cuStreamWaitEvent"(usize, usize, c_uint);
    capture_begin = "cuStreamBeginCapture_v2"(usize, c_int);
    capture_end = "cuStreamEndCapture"(usize, *mut usize);
    graph_instantiate = "cuGraphInstantiateWithFlags"(*mut usize, usize, u64);
    graph_launch = "cuGraphLaunch"(usize, usize);
    graph_exec_destroy = "cuGraphExecDestroy"(usize);
    graph_destroy = "cuGraphDestroy"(usize);
    graph_nodes = "cuGraphGetNodes"(usize, *mut usize, *mut usize);
    node_type = "cuGraphNodeGetType"(usize, *mut c_int);
    node_params = "cuGraphKernelNodeGetParams"(usize, *mut graph::NodeParams);
    node_attribute = "cuGraphKernelNodeGetAttribute"(usize, c_int, *mut kernel::AttributeValue);
    module_load = "cuModuleLoadData"(*mut usize, *const c_void);
    module_unload = "cuModuleUnload"(usize);
    module_function = "cuModuleGetFunction"(*mut usize, usize, *const c_char);
    function_attribute = "cuFuncGetAttribute"(*mut c_int, c_int, usize);
    set_function_attribute = "cuFuncSetAttribute"(usize, c_int, c_int);
    launch_kernel = "cuLaunchKernelEx"(*const kernel::LaunchConfig, usize, *mut *mut c_void, *mut *mut c_void);
    error_name = "cuGetErrorName"(c_int, *mut *const c_char);
    error_string = "cuGetErrorString"(c_int, *mut *const c_char);
}

/// The loaded and initialised driver.
#[derive(Debug)]
pub struct Cuda {
    f: Functions,
    devices: usize,
    /// Never closed: its threads and what it does at the process's end may come later than we go.
    _library: ManuallyDrop<Library>,
}

impl Cuda {
    /// Loads the driver's library, by the dynamic linker's search or from a file, and initialises it.
    ///
    /// # Errors
    /// [`BenchError::NoCuda`] where it cannot be loaded, [`BenchError::Cuda`] where it has no GPU to give.
    pub fn open(path: Option<&Path>) -> Result<Arc<Self>, BenchError> {
        let file = path.unwrap_or(Path::new(FILE_NAME));
        // SAFETY: the driver's library, or the file that the user named for it; its constructors run.
        let library = unsafe { Library::open(Some(file), RTLD_NOW | RTLD_LOCAL) }.map_err(|source| {
            let place = if path.is_some() { "where --cuda says" } else { "by the dynamic linker" };
            BenchError::NoCuda { looked_for: file.display().to_string(), place, source }
        })?;
        let f = Functions::load(&library, &file.display().to_string())?;
        let mut cuda = Cuda { f, devices: 0, _library: ManuallyDrop::new(library) };
        // SAFETY: the flags must be 0.
        cuda.told("cuInit", -1, unsafe { (f.init)(0) })?;
        let mut count = 0;
        // SAFETY: a place for one int.
        cuda.told("cuDeviceGetCount", -1, unsafe { (f.device_count)(&mut count) })?;
        cuda.devices = usize::try_from(count).unwrap_or(0);
        Ok(Arc::new(cuda))
    }

    /// How many GPUs are visible.
    #[must_use]
    pub fn device_count(&self) -> usize {
        self.devices
    }

    /// The driver's CUDA version: 1000 times the major and 10 times the minor number.
    ///
    /// # Errors
    /// CUDA's own.
    pub fn driver_version(&self) -> Result<i32, BenchError> {
        let mut version = 0;
        // SAFETY: a place for one int.
        self.told("cuDriverGetVersion", -1, unsafe { (self.f.driver_version)(&mut version) })?;
        Ok(version)
    }

    /// A device's name and its PCI address, `0000:1b:00.0` for example.
    ///
    /// # Errors
    /// CUDA's own.
    pub fn describe(&self, device: i32) -> Result<(String, String), BenchError> {
        let raw = self.device(device)?;
        let text = |call, function: unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int| {
            let mut buffer = [0 as c_char; 128];
            let room = c_int::try_from(buffer.len() - 1).unwrap_or(0);
            // SAFETY: a buffer of the length that is told; the last byte stays 0.
            self.told(call, device, unsafe { function(buffer.as_mut_ptr(), room, raw) })?;
            // SAFETY: a zero ends the buffer whatever was written.
            Ok::<_, BenchError>(unsafe { CStr::from_ptr(buffer.as_ptr()) }.to_string_lossy().into_owned())
        };
        let name = text("cuDeviceGetName", self.f.device_name)?;
        let pci = text("cuDeviceGetPCIBusId", self.f.pci)?;
        Ok((name, pci.to_lowercase()))
    }

    fn device(&self, ordinal: i32) -> Result<c_int, BenchError> {
        let mut raw = 0;
        // SAFETY: a place for one device.
        self.told("cuDeviceGet", ordinal, unsafe { (self.f.device)(&mut raw, ordinal) })?;
        Ok(raw)
    }

    fn told(&self, call: &'static str, device: i32, code: c_int) -> Result<(), BenchError> {
        if code == SUCCESS {
            return Ok(());
        }
        let text = |function: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int| {
            let mut at: *const c_char = std::ptr::null();
            // SAFETY: a place for one pointer, which is set to a static text or to NULL.
            let known = unsafe { function(code, &mut at) } == SUCCESS && !at.is_null();
            if !known {
                return "unknown".to_owned();
            }
            // SAFETY: a static C string of the driver's.
            unsafe { CStr::from_ptr(at) }.to_string_lossy().into_owned()
        };
        let (name, text) = (text(self.f.error_name), text(self.f.error_string));
        Err(BenchError::Cuda { call, device, code, name, text })
    }
}

/// A device's primary context, retained.
#[derive(Debug)]
pub struct Context {
    cuda: Arc<Cuda>,
    ordinal: i32,
    device: c_int,
    raw: usize,
}

impl Context {
    /// Retains a device's primary context and makes it this thread's current one.
    ///
    /// # Errors
    /// CUDA's own.
    pub fn new(cuda: &Arc<Cuda>, ordinal: i32) -> Result<Arc<Self>, BenchError> {
        let device = cuda.device(ordinal)?;
        let mut raw = 0;
        // SAFETY: a place for one context.
        cuda.told("cuDevicePrimaryCtxRetain", ordinal, unsafe { (cuda.f.retain)(&mut raw, device) })?;
        let context = Arc::new(Context { cuda: cuda.clone(), ordinal, device, raw });
        context.enter()?;
        Ok(context)
    }

    /// CUDA's number of the device.
    #[must_use]
    pub fn ordinal(&self) -> i32 {
        self.ordinal
    }

    /// Makes it this thread's current context.
    ///
    /// # Errors
    /// CUDA's own.
    pub fn enter(&self) -> Result<(), BenchError> {
        // SAFETY: a context that is retained.
        self.told("cuCtxSetCurrent", unsafe { (self.cuda.f.set_current)(self.raw) })
    }

    fn told(&self, call: &'static str, code: c_int) -> Result<(), BenchError> {
        self.cuda.told(call, self.ordinal, code)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once by us. A failure at the end changes nothing.
        unsafe { (self.cuda.f.release)(self.device) };
    }
}

/// Memory of a GPU.
#[derive(Debug)]
pub struct Buffer {
    context: Arc<Context>,
    address: u64,
    bytes: u64,
}

impl Buffer {
    /// Allocates.
    ///
    /// # Errors
    /// [`BenchError::Memory`] where there is no room, or CUDA's own.
    pub fn new(context: &Arc<Context>, bytes: u64) -> Result<Self, BenchError> {
        context.enter()?;
        let mut address = 0;
        let length = usize::try_from(bytes).unwrap_or(usize::MAX);
        // SAFETY: a place for one address; the context is current.
        let code = unsafe { (context.cuda.f.alloc)(&mut address, length) };
        if code == OUT_OF_MEMORY {
            let (mut free, mut total) = (0, 0);
            // SAFETY: places for two sizes.
            context.told("cuMemGetInfo", unsafe { (context.cuda.f.memory_info)(&mut free, &mut total) })?;
            return Err(BenchError::Memory { device: context.ordinal, bytes, free: free as u64 });
        }
        context.told("cuMemAlloc", code)?;
        Ok(Buffer { context: context.clone(), address, bytes })
    }

    /// Its address on the device.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its length in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The address of a part, which must lie within.
    fn part(&self, offset: u64, bytes: usize) -> u64 {
        assert!(
            offset.checked_add(bytes as u64).is_some_and(|end| end <= self.bytes),
            "a part of the buffer"
        );
        self.address + offset
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: allocated by us, freed once. A failure at the end changes nothing.
            unsafe { (self.context.cuda.f.free)(self.address) };
        }
    }
}

/// Pinned memory of the host.
#[derive(Debug)]
pub struct HostBuffer {
    context: Arc<Context>,
    address: usize,
    bytes: usize,
}

impl HostBuffer {
    /// Allocates.
    ///
    /// # Errors
    /// CUDA's own.
    pub fn new(context: &Arc<Context>, bytes: usize) -> Result<Self, BenchError> {
        context.enter()?;
        let mut address = std::ptr::null_mut();
        // SAFETY: a place for one pointer; the context is current.
        context.told("cuMemAllocHost", unsafe { (context.cuda.f.alloc_host)(&mut address, bytes) })?;
        let buffer = HostBuffer { context: context.clone(), address: address as usize, bytes };
        // SAFETY: ours and as long; from here on every byte has a value.
        unsafe { std::ptr::write_bytes(address.cast::<u8>(), 0, bytes) };
        Ok(buffer)
    }

    /// The content. Nobody may be copying into it.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: ours, initialised when made, as long as said; copies into it need `&mut`, and whoever
        // starts one waits for its stream before looking.
        unsafe { std::slice::from_raw_parts(self.address as *const u8, self.bytes) }
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: allocated by us, freed once. A failure at the end changes nothing.
            unsafe { (self.context.cuda.f.free_host)(self.address as *mut c_void) };
        }
    }
}

/// A stream that does not wait for the default one.
#[derive(Debug)]
pub struct Stream {
    context: Arc<Context>,
    raw: usize,
}

impl Stream {
    /// Makes one.
    ///
    /// # Errors
    /// CUDA's own.
    pub fn new(context: &Arc<Context>) -> Result<Self, BenchError> {
        context.enter()?;
        let mut raw = 0;
        // SAFETY: a place for one stream; the context is current.
        context.told("cuStreamCreate", unsafe { (context.cuda.f.stream_create)(&mut raw, NON_BLOCKING) })?;
        Ok(Stream { context: context.clone(), raw })
    }

    /// CUDA's pointer, as a number.
    #[must_use]
    pub fn raw(&self) -> usize {
        self.raw
    }

    /// Returns whether all its work is done.
    ///
    /// # Errors
    /// What went wrong on the GPU.
    pub fn is_idle(&self) -> Result<bool, BenchError> {
        // SAFETY: a stream that is alive.
        match unsafe { (self.context.cuda.f.stream_query)(self.raw) } {
            NOT_READY => Ok(false),
            code => self.context.told("cuStreamQuery", code).map(|()| true),
        }
    }

    /// Copies bytes of the host into a buffer, in the stream's order. They may be forgotten on return.
    ///
    /// # Errors
    /// CUDA's own.
    pub fn copy_in(&self, to: &Buffer, offset: u64, bytes: &[u8]) -> Result<(), BenchError> {
        let at = to.part(offset, bytes.len());
        let f = &self.context.cuda.f;
        self.context.enter()?;
        // SAFETY: both ranges are valid. Pageable memory is read before the call returns.
        let code = unsafe { (f.to_device)(at, bytes.as_ptr().cast(), bytes.len(), self.raw) };
        self.context.told("cuMemcpyHtoDAsync", code)
    }

    /// Copies a part of a buffer to the host, in the stream's order: there when the stream is idle.
    ///
    /// # Errors
    /// CUDA's own.
    pub fn copy_out(
        &self,
        to: &mut HostBuffer,
        from: &Buffer,
        offset: u64,
        bytes: usize,
    ) -> Result<(), BenchError> {
        assert!(bytes <= to.bytes, "no more than there is room for");
        let at = from.part(offset, bytes);
        let f = &self.context.cuda.f;
        self.context.enter()?;
        // SAFETY: both ranges are valid, and the host's is borrowed by nobody else.
        let code = unsafe { (f.to_host)(to.address as *mut c_void, at, bytes, self.raw) };
        self.context.told("cuMemcpyDtoHAsync", code)
    }

    /// Copies within a buffer, in the stream's order. The parts must not overlap.
    ///
    /// # Errors
    /// CUDA's own.
    pub fn copy_within(&self, buffer: &Buffer, to: u64, from: u64, bytes: usize) -> Result<(), BenchError> {
        let (to, from) = (buffer.part(to, bytes), buffer.part(from, bytes));
        self.context.enter()?;
        // SAFETY: both ranges are valid.
        let code = unsafe { (self.context.cuda.f.on_device)(to, from, bytes, self.raw) };
        self.context.told("cuMemcpyDtoDAsync", code)
    }

    /// Sets every byte of a part of a buffer, in the stream's order.
    ///
    /// # Errors
    /// CUDA's own.
    pub fn fill(&self, buffer: &Buffer, offset: u64, bytes: u64, value: u8) -> Result<(), BenchError> {
        let length = usize::try_from(bytes).unwrap_or(usize::MAX);
        let at = buffer.part(offset, length);
        self.context.enter()?;
        // SAFETY: the range is valid.
        let code = unsafe { (self.context.cuda.f.fill)(at, value, length, self.raw) };
        self.context.told("cuMemsetD8Async", code)
    }

    /// Makes what comes next in the stream wait until another stream has come to an event.
    ///
    /// # Errors
    /// CUDA's own.
    pub fn wait(&self, event: &Event) -> Result<(), BenchError> {
        // SAFETY: both are alive; the flags must be 0.
        let code = unsafe { (self.context.cuda.f.wait_event)(self.raw, event.raw, 0) };
        self.context.told("cuStreamWaitEvent", code)
    }

    /// Begins to record what this thread puts into the stream, in place of running it.
    ///
    /// # Errors
    /// CUDA's own.
    pub fn begin_capture(&self) -> Result<(), BenchError> {
        self.context.enter()?;
        // SAFETY: a stream that is alive.
        let code = unsafe { (self.context.cuda.f.capture_begin)(self.raw, CAPTURE_THREAD_LOCAL) };
        self.context.told("cuStreamBeginCapture", code)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: made by us, destroyed once. A failure at the end changes nothing.
            unsafe { (self.context.cuda.f.stream_destroy)(self.raw) };
        }
    }
}

/// A moment in a stream.
#[derive(Debug)]
pub struct Event {
    context: Arc<Context>,
    raw: usize,
}

impl Event {
    /// Makes one.
    ///
    /// # Errors
    /// CUDA's own.
    pub fn new(context: &Arc<Context>) -> Result<Self, BenchError> {
        context.enter()?;
        let mut raw = 0;
        // SAFETY: a place for one event; the context is current.
        context.told("cuEventCreate", unsafe { (context.cuda.f.event_create)(&mut raw, 0) })?;
        Ok(Event { context: context.clone(), raw })
    }

    /// Takes the moment when the stream has come here.
    ///
    /// # Errors
    /// CUDA's own.
    pub fn record(&self, stream: &Stream) -> Result<(), BenchError> {
        self.context.enter()?;
        // SAFETY: both are alive and of one context.
        let code = unsafe { (self.context.cuda.f.event_record)(self.raw, stream.raw) };
        self.context.told("cuEventRecord", code)
    }

    /// Nanoseconds from this moment to a later one, at CUDA's resolution of about half a microsecond.
    ///
    /// # Errors
    /// CUDA's own, also where one of the moments is still to come.
    pub fn elapsed_ns(&self, end: &Event) -> Result<f64, BenchError> {
        let mut milliseconds = 0.0;
        // SAFETY: both are alive; a place for one float.
        let code = unsafe { (self.context.cuda.f.event_elapsed)(&mut milliseconds, self.raw, end.raw) };
        self.context.told("cuEventElapsedTime", code)?;
        Ok(f64::from(milliseconds) * 1e6)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: made by us, destroyed once. A failure at the end changes nothing.
            unsafe { (self.context.cuda.f.event_destroy)(self.raw) };
        }
    }
}
