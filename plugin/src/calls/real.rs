//! NCCL's own functions behind those that the preloaded library has in their place.

#![expect(unsafe_code, reason = "calls NCCL's functions")]

use super::inside;
use crate::runtime::nccl::Linker;
use crate::runtime::thread_word::Thread;
use core::ffi::{CStr, c_int, c_void};
use ringwatch_wire::sync::Word;

/// One of NCCL's functions, found once.
#[derive(Debug)]
pub struct Real {
    name: &'static CStr,
    address: Word,
}

impl Real {
    /// The function of this name.
    pub const fn new(name: &'static CStr) -> Self {
        Real { name, address: Word::new(0) }
    }

    /// Its address, never `own`; `None` where no NCCL has it.
    ///
    /// Where the program links NCCL it is the next one of the name. Python loads it for PyTorch's libraries
    /// alone, and there it has to be asked for by the library's name.
    #[inline]
    pub fn get(&self, own: usize) -> Option<usize> {
        let at = self.address.get();
        if at != 0 { Some(at as usize) } else { self.find(own) }
    }

    /// What the caller gets in its place where it is missing: a system error where there is no NCCL at all, an
    /// invalid usage where this NCCL does not have it.
    #[cold]
    pub fn missing(&self) -> c_int {
        if VERSION.get(0).is_some() { INVALID_USAGE } else { SYSTEM_ERROR }
    }

    #[cold]
    fn find(&self, own: usize) -> Option<usize> {
        let linker = Linker::get()?;
        let other = |at: usize| if at == 0 || at == own { None } else { Some(at) };
        let at = other(linker.next(self.name))
            .or_else(|| other(linker.find(c"libnccl.so.2", self.name)))
            .or_else(|| other(linker.find(c"libnccl.so", self.name)))?;
        self.address.set(at as u64);
        Some(at)
    }
}

const SYSTEM_ERROR: c_int = 2;
const INVALID_USAGE: c_int = 5;

static VERSION: Real = Real::new(c"ncclGetVersion");
static USER_RANK: Real = Real::new(c"ncclCommUserRank");
static COUNT: Real = Real::new(c"ncclCommCount");
static DEVICE: Real = Real::new(c"ncclCommCuDevice");

fn ask(question: &Real, comm: u64) -> Option<c_int> {
    let at = question.get(0)?;
    // SAFETY: these functions of NCCL's have this signature.
    let function =
        unsafe { core::mem::transmute::<usize, unsafe extern "C" fn(*mut c_void, *mut c_int) -> c_int>(at) };
    let mut answer: c_int = -1;
    let comm = core::ptr::with_exposed_provenance_mut(comm as usize);
    // NCCL up to 2.22 asks itself for the communicator's state there, by the public function.
    // SAFETY: a communicator that NCCL has just said is ready; it stores one int.
    let result = inside(Thread::get(), || unsafe { function(comm, &mut answer) });
    if result == 0 && answer >= 0 { Some(answer) } else { None }
}

/// Rank and ranks of a communicator that is ready.
pub(super) fn place(comm: u64) -> Option<(c_int, c_int)> {
    Some((ask(&USER_RANK, comm)?, ask(&COUNT, comm)?))
}

/// Its device's number in CUDA.
pub(super) fn device(comm: u64) -> Option<c_int> {
    ask(&DEVICE, comm)
}
