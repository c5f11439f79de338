//! Facts that only other libraries of the process know: NCCL's exact version, the GPU's address.
//!
//! The dynamic linker's functions are taken weakly and by their first version: they moved from libdl to libc
//! in glibc 2.34, under a new version, and neither a new version nor a missing symbol may keep the plugin from
//! loading.

#![expect(unsafe_code, reason = "asks the dynamic linker")]

use crate::runtime::log::Log;
use core::arch::asm;
use core::ffi::{CStr, c_char, c_int, c_void};
use ringwatch_wire::layout::comm;
use ringwatch_wire::ring::text_word;

const LAZY: c_int = 1;
/// RTLD_NOW and RTLD_LOCAL, as NCCL itself loads a plugin.
const NOW: c_int = 2;
/// RTLD_NOLOAD: only what is loaded already.
const NOLOAD: c_int = 4;

#[repr(C)]
struct DlInfo {
    file: *const c_char,
    base: *mut c_void,
    symbol: *const c_char,
    address: *mut c_void,
}

type DlAddr = unsafe extern "C" fn(*const c_void, *mut DlInfo) -> c_int;
type DlOpen = unsafe extern "C" fn(*const c_char, c_int) -> *mut c_void;
type DlSym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;

/// The version that every symbol of the first glibc for this architecture has.
#[cfg(target_arch = "x86_64")]
macro_rules! first_version {
    () => {
        "@GLIBC_2.2.5"
    };
}
#[cfg(target_arch = "aarch64")]
macro_rules! first_version {
    () => {
        "@GLIBC_2.17"
    };
}

/// Address of a weak symbol of glibc's first version, 0 when nobody defines it.
macro_rules! weak {
    ($symbol:literal) => {{
        let address: usize;
        #[cfg(target_arch = "x86_64")]
        // SAFETY: reads one entry of the global offset table, which the linker fills with 0 for a weak
        // symbol that nobody defines.
        unsafe {
            asm!(
                concat!(".weak ringwatch_", $symbol),
                concat!(".symver ringwatch_", $symbol, ", ", $symbol, first_version!()),
                concat!("mov {}, qword ptr [rip + ringwatch_", $symbol, "@GOTPCREL]"),
                out(reg) address,
                options(nostack, pure, readonly, preserves_flags),
            );
        }
        #[cfg(target_arch = "aarch64")]
        // SAFETY: as above.
        unsafe {
            asm!(
                concat!(".weak ringwatch_", $symbol),
                concat!(".symver ringwatch_", $symbol, ", ", $symbol, first_version!()),
                concat!("adrp {0}, :got:ringwatch_", $symbol),
                concat!("ldr {0}, [{0}, :got_lo12:ringwatch_", $symbol, "]"),
                out(reg) address,
                options(nostack, pure, readonly, preserves_flags),
            );
        }
        address
    }};
}

pub(crate) struct Linker {
    addr: DlAddr,
    open: DlOpen,
    sym: DlSym,
}

impl Linker {
    pub(crate) fn get() -> Option<Self> {
        let (addr, open, sym) = (weak!("dladdr"), weak!("dlopen"), weak!("dlsym"));
        if addr == 0 || open == 0 || sym == 0 {
            return None;
        }
        // SAFETY: non-zero addresses of libc's functions of these names and signatures.
        Some(unsafe {
            Linker {
                addr: core::mem::transmute::<usize, DlAddr>(addr),
                open: core::mem::transmute::<usize, DlOpen>(open),
                sym: core::mem::transmute::<usize, DlSym>(sym),
            }
        })
    }

    /// True for an address inside of a loaded program or library: it is static, and stays valid.
    pub(crate) fn is_static(&self, address: usize) -> bool {
        self.file_of(address).is_some()
    }

    /// The file that an address is loaded from.
    fn file_of(&self, address: usize) -> Option<*const c_char> {
        let mut info = DlInfo {
            file: core::ptr::null(),
            base: core::ptr::null_mut(),
            symbol: core::ptr::null(),
            address: core::ptr::null_mut(),
        };
        // SAFETY: dladdr accepts any address and fills the struct when it returns non-zero.
        let known = unsafe { (self.addr)(core::ptr::without_provenance(address), &mut info) };
        if known != 0 && !info.file.is_null() { Some(info.file) } else { None }
    }

    /// A symbol of a library that is loaded already.
    pub(crate) fn find(&self, library: &CStr, symbol: &CStr) -> usize {
        self.find_at(library.as_ptr(), symbol)
    }

    /// Loads a library, for good.
    pub(crate) fn load(&self, library: &CStr) -> Option<Loaded<'_>> {
        // SAFETY: a NUL-terminated name. The library's initialisers run, as the user wants who named it.
        let handle = unsafe { (self.open)(library.as_ptr(), NOW) };
        if handle.is_null() { None } else { Some(Loaded { linker: self, handle }) }
    }

    /// A symbol of the libraries that were loaded after the one that holds this code.
    pub(crate) fn next(&self, symbol: &CStr) -> usize {
        // RTLD_NEXT is -1.
        let next = core::ptr::without_provenance_mut(usize::MAX);
        // SAFETY: a handle that every dlsym knows and a NUL-terminated name.
        unsafe { (self.sym)(next, symbol.as_ptr()) }.expose_provenance()
    }

    fn find_at(&self, library: *const c_char, symbol: &CStr) -> usize {
        // SAFETY: NUL-terminated names; NOLOAD runs no initialiser. The handle is not closed: the library
        // stays as loaded as it was.
        let handle = unsafe { (self.open)(library, LAZY | NOLOAD) };
        if handle.is_null() {
            return 0;
        }
        // SAFETY: a handle that dlopen returned.
        unsafe { (self.sym)(handle, symbol.as_ptr()) }.expose_provenance()
    }
}

/// A library that was loaded, and is never closed.
pub(crate) struct Loaded<'a> {
    linker: &'a Linker,
    handle: *mut c_void,
}

impl Loaded<'_> {
    /// The address of a symbol; 0 where there is none.
    pub(crate) fn symbol(&self, symbol: &CStr) -> usize {
        // SAFETY: a handle that dlopen returned, and a NUL-terminated name.
        unsafe { (self.linker.sym)(self.handle, symbol.as_ptr()) }.expose_provenance()
    }
}

/// Addresses of libc's pthread_key_create, pthread_getspecific and pthread_setspecific, which lay in another
/// library before glibc 2.34; 0 where they are not loaded.
pub(crate) fn thread_keys() -> [usize; 3] {
    let direct = [weak!("pthread_key_create"), weak!("pthread_getspecific"), weak!("pthread_setspecific")];
    if !direct.contains(&0) {
        return direct;
    }
    let Some(linker) = Linker::get() else { return [0; 3] };
    [c"pthread_key_create", c"pthread_getspecific", c"pthread_setspecific"]
        .map(|name| linker.find(c"libpthread.so.0", name))
}

/// NCCL's version code, 22809 for 2.28.9.
pub(crate) fn version(log: &Log) -> Option<u32> {
    let linker = Linker::get()?;
    let mut found = 0;
    if log.address() != 0
        && let Some(file) = linker.file_of(log.address())
    {
        found = linker.find_at(file, c"ncclGetVersion");
    }
    if found == 0 {
        found = linker.find(c"libnccl.so.2", c"ncclGetVersion");
    }
    if found == 0 {
        return None;
    }
    // SAFETY: NCCL's public function of this name and signature.
    let get = unsafe { core::mem::transmute::<usize, unsafe extern "C" fn(*mut c_int) -> c_int>(found) };
    let mut version: c_int = 0;
    // SAFETY: it stores one int and does nothing else.
    let result = unsafe { get(&mut version) };
    if result == 0 { u32::try_from(version).ok().filter(|v| *v > 0) } else { None }
}

/// Runs `f` with a device's primary context, the one that CUDA's runtime uses; without CUDA, or a device, as it is.
pub(crate) fn on_device(device: Option<c_int>, f: impl FnOnce()) {
    type Retain = unsafe extern "C" fn(*mut usize, c_int) -> c_int;
    type Release = unsafe extern "C" fn(c_int) -> c_int;
    type Push = unsafe extern "C" fn(usize) -> c_int;
    type Pop = unsafe extern "C" fn(*mut usize) -> c_int;
    let (Some(linker), Some(device)) = (Linker::get(), device) else { return f() };
    let find = |name| linker.find(c"libcuda.so.1", name);
    let (retain, release) = (find(c"cuDevicePrimaryCtxRetain"), find(c"cuDevicePrimaryCtxRelease_v2"));
    let (push, pop) = (find(c"cuCtxPushCurrent_v2"), find(c"cuCtxPopCurrent_v2"));
    if retain == 0 || release == 0 || push == 0 || pop == 0 {
        return f();
    }
    // SAFETY: the CUDA driver's functions of these names and signatures.
    let (retain, release, push, pop) = unsafe {
        (
            core::mem::transmute::<usize, Retain>(retain),
            core::mem::transmute::<usize, Release>(release),
            core::mem::transmute::<usize, Push>(push),
            core::mem::transmute::<usize, Pop>(pop),
        )
    };
    let mut context = 0;
    // SAFETY: stores one context; the job's own use of the device keeps it for longer than this one.
    if unsafe { retain(&mut context, device) } != 0 {
        return f();
    }
    // SAFETY: a context that is retained; what is pushed is popped.
    unsafe {
        if push(context) == 0 {
            f();
            pop(&mut context);
        }
        release(device);
    }
}

/// PCI address of the GPU that this thread uses, as text words; empty when CUDA does not say.
pub(crate) fn gpu_address() -> [u64; comm::GPU_WORDS] {
    gpu_address_of(None)
}

/// The same of a device, by its number in CUDA.
pub(crate) fn gpu_address_of(device: Option<c_int>) -> [u64; comm::GPU_WORDS] {
    let mut text = [0u8; 24];
    if read_gpu_address(device, &mut text).is_none() {
        text = [0; 24];
    }
    let len = text.iter().position(|b| *b == 0).unwrap_or(text.len());
    let text = text.get(..len).unwrap_or(&[]);
    let mut words = [0; comm::GPU_WORDS];
    for (i, w) in words.iter_mut().enumerate() {
        *w = text_word(text, i, comm::GPU_WORDS);
    }
    words
}

fn read_gpu_address(given: Option<c_int>, text: &mut [u8; 24]) -> Option<()> {
    let linker = Linker::get()?;
    let current = linker.find(c"libcuda.so.1", c"cuCtxGetDevice");
    let address = linker.find(c"libcuda.so.1", c"cuDeviceGetPCIBusId");
    if current == 0 || address == 0 {
        return None;
    }
    // SAFETY: the CUDA driver's functions of these names and signatures.
    let current =
        unsafe { core::mem::transmute::<usize, unsafe extern "C" fn(*mut c_int) -> c_int>(current) };
    // SAFETY: as above.
    let address = unsafe {
        core::mem::transmute::<usize, unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int>(address)
    };
    let mut device: c_int = given.unwrap_or(0);
    // SAFETY: init runs on a thread that NCCL has given a context; without one this only fails.
    if given.is_none() && unsafe { current(&mut device) } != 0 {
        return None;
    }
    // SAFETY: writes at most the given length, NUL included.
    if unsafe { address(text.as_mut_ptr().cast(), 23, device) } != 0 {
        return None;
    }
    Some(())
}
