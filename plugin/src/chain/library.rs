//! The other plugin's library and its tables.

#![expect(unsafe_code, reason = "reads another library's tables")]

use crate::ffi::{InitArgs, InitBare, InitV4, InitV5, NAME};
use crate::runtime::log::Message;
use crate::runtime::nccl::{Linker, Loaded};
use core::ffi::{CStr, c_char, c_int, c_void};

/// Versions of the ABI.
pub(super) const VERSIONS: usize = 7;

const SYMBOLS: [&CStr; VERSIONS] = [
    c"ncclProfiler_v1",
    c"ncclProfiler_v2",
    c"ncclProfiler_v3",
    c"ncclProfiler_v4",
    c"ncclProfiler_v5",
    c"ncclProfiler_v6",
    c"ncclProfiler_v7",
];

type Start = unsafe extern "C" fn(*mut c_void, *mut *mut c_void, *const c_void) -> c_int;
type Stop = unsafe extern "C" fn(*mut c_void) -> c_int;
type Record = unsafe extern "C" fn(*mut c_void, c_int, *const c_void) -> c_int;

/// Its table as it lies in its library.
#[repr(C)]
struct Table {
    name: *const c_char,
    init: *const c_void,
    start: Option<Start>,
    stop: Option<Stop>,
    record: Option<Record>,
    finalize: Option<Stop>,
}

#[derive(Debug, Clone, Copy)]
enum Init {
    Bare(InitBare),
    V4(InitV4),
    V5(InitV5),
}

/// One version of the other plugin.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plugin {
    /// The version that its functions understand.
    pub(crate) version: u32,
    init: Init,
    pub(crate) start: Start,
    pub(crate) stop: Stop,
    pub(crate) record: Record,
    pub(crate) finalize: Stop,
}

impl Plugin {
    /// Its init.
    ///
    /// # Safety
    /// Both must be places that may be written, the mask's for good.
    pub(super) unsafe fn init(&self, context: *mut *mut c_void, mask: *mut c_int, a: &InitArgs) -> c_int {
        // SAFETY: the places as promised; all else is as NCCL gave it.
        unsafe {
            match self.init {
                Init::Bare(f) => f(context, mask),
                Init::V4(f) => f(context, mask, a.name, a.id, a.nodes, a.ranks, a.rank, a.log),
                Init::V5(f) => f(context, a.id, mask, a.name, a.nodes, a.ranks, a.rank, a.log),
            }
        }
    }
}

fn symbol(library: &Loaded<'_>, version: u32) -> usize {
    let name = version.checked_sub(1).and_then(|i| SYMBOLS.get(i as usize));
    name.map_or(0, |name| library.symbol(name))
}

/// The table of one version, if it is whole.
fn plugin(library: &Loaded<'_>, version: u32) -> Option<Plugin> {
    let at = core::ptr::with_exposed_provenance::<Table>(symbol(library, version));
    // SAFETY: a symbol of this name is a table of these six words, or the library is no plugin, as whoever named it
    // would find out under NCCL itself; the library is never closed.
    let t = unsafe { at.as_ref() }?;
    if t.name.is_null() || t.init.is_null() {
        return None;
    }
    // SAFETY: this version's init has this signature.
    let init = unsafe {
        match version {
            1..=3 => Init::Bare(core::mem::transmute::<*const c_void, InitBare>(t.init)),
            4 => Init::V4(core::mem::transmute::<*const c_void, InitV4>(t.init)),
            _ => Init::V5(core::mem::transmute::<*const c_void, InitV5>(t.init)),
        }
    };
    Some(Plugin { version, init, start: t.start?, stop: t.stop?, record: t.record?, finalize: t.finalize? })
}

/// True for a library that is this one, or a copy of it, which would record everything once more.
fn is_own(library: &Loaded<'_>, version: u32, own_table: fn(u32) -> usize) -> bool {
    let at = symbol(library, version);
    if at == 0 {
        return false;
    }
    // SAFETY: as in `plugin`.
    let name = unsafe { core::ptr::with_exposed_provenance::<Table>(at).as_ref() }
        .map_or(core::ptr::null(), |t| t.name);
    // SAFETY: a table's name is NULL or a C string.
    at == own_table(version) || !name.is_null() && unsafe { CStr::from_ptr(name) } == NAME
}

/// The versions into which callbacks of a version can be turned, itself first: since v4 what one adds lies behind
/// what was there before.
fn fitting(version: u32) -> impl Iterator<Item = u32> {
    let least = if version >= 4 { 4 } else { version };
    (least..=version).rev()
}

/// Longest name that is tried as NCCL's short form.
const SHORT_MAX: usize = 128;
const BEFORE: &[u8] = b"libnccl-profiler-";
const BEHIND: &[u8] = b".so";

/// `name` as `libnccl-profiler-name.so`, which NCCL tries as well.
fn long_form(name: &CStr, into: &mut [u8; SHORT_MAX]) -> bool {
    let name = name.to_bytes();
    let whole = BEFORE.len() + name.len() + BEHIND.len();
    if name.contains(&b'/') || whole >= SHORT_MAX {
        return false;
    }
    let text = BEFORE.iter().chain(name).chain(BEHIND);
    for (to, from) in into.iter_mut().zip(text) {
        *to = *from;
    }
    true
}

fn open<'a>(linker: &'a Linker, name: &CStr) -> Option<Loaded<'a>> {
    let mut text = [0; SHORT_MAX];
    linker.load(name).or_else(|| {
        let long = if long_form(name, &mut text) { CStr::from_bytes_until_nul(&text).ok() } else { None };
        long.and_then(|l| linker.load(l))
    })
}

/// Loads the other plugin, and finds what it gets from each version of NCCL's ABI.
///
/// # Errors
/// What is to be said, when callbacks of `version` cannot be passed on to it.
pub(super) fn load(
    name: &CStr,
    version: u32,
    own_table: fn(u32) -> usize,
) -> Result<[Option<Plugin>; VERSIONS], Message> {
    let linker = Linker::get().ok_or(Message::ChainNotLoaded)?;
    let library = open(&linker, name).ok_or(Message::ChainNotLoaded)?;
    let all = 1..=VERSIONS as u32;
    if all.clone().any(|v| is_own(&library, v, own_table)) {
        return Err(Message::ChainOwn);
    }
    let mut found = [None; VERSIONS];
    for (place, v) in found.iter_mut().zip(all.clone()) {
        *place = fitting(v).find_map(|w| plugin(&library, w));
    }
    if version.checked_sub(1).and_then(|i| found.get(i as usize)).is_some_and(Option::is_some) {
        return Ok(found);
    }
    // The nearest older one, else the oldest of the newer ones.
    let there = |v: &u32| plugin(&library, *v).is_some();
    let nearest = (1..=version).rev().find(there).or_else(|| all.clone().find(there));
    Err(nearest.map_or(Message::ChainNoPlugin, Message::ChainSpeaks))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn callbacks_are_turned_into_older_ones_down_to_v4() {
        let of = |v| fitting(v).collect::<Vec<_>>();
        assert_eq!(of(7), [7, 6, 5, 4]);
        assert_eq!(of(4), [4]);
        assert_eq!(of(3), [3]);
        assert_eq!(of(1), [1]);
    }

    #[test]
    fn names_have_a_long_form_and_paths_have_none() {
        let long = |name: &CStr| {
            let mut text = [0; SHORT_MAX];
            long_form(name, &mut text).then(|| CStr::from_bytes_until_nul(&text).expect("ended").to_owned())
        };
        assert_eq!(long(c"example").as_deref(), Some(c"libnccl-profiler-example.so"));
        assert_eq!(long(c"./example"), None);
        assert_eq!(long(&std::ffi::CString::new("x".repeat(108)).expect("text")), None);
        assert!(long(&std::ffi::CString::new("x".repeat(107)).expect("text")).is_some());
    }
}
