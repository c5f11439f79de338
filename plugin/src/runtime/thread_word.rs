//! One word a thread: how deep in groups it is, whether it is inside one of NCCL's functions, and which record
//! its outermost group has.
//!
//! It is the value of one of libc's thread keys, itself and not a pointer: nothing is allocated and nothing has
//! to be freed. Only the first 32 keys are kept in the thread's own descriptor; a later one would be allocated
//! at its first use, and is not taken.

#![expect(unsafe_code, reason = "libc's thread keys")]

use crate::runtime::nccl;
use core::ffi::{c_int, c_uint, c_void};
use ringwatch_wire::sync::Word;

type Create = unsafe extern "C" fn(*mut c_uint, Option<unsafe extern "C" fn(*mut c_void)>) -> c_int;
type Get = unsafe extern "C" fn(c_uint) -> *mut c_void;
type Set = unsafe extern "C" fn(c_uint, *const c_void) -> c_int;

/// Keys below this never allocate.
const IN_PLACE: c_uint = 32;

/// The key plus one; 0 for none.
static KEY: Word = Word::new(0);
static TRIED: Word = Word::new(0);
static GET: Word = Word::new(0);
static SET: Word = Word::new(0);

/// The state of a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Thread {
    /// Groups begun and not ended.
    pub(crate) depth: u8,
    /// Inside a function of NCCL's: what it calls is its own business.
    pub(crate) inside: bool,
    /// Its group makes communicators whose ranks have to agree on the tuner's rules.
    pub(crate) agrees: bool,
    /// Record of its outermost group plus one; 0 for none.
    pub(crate) group: u16,
    /// The record's tag, by which one that was given away is recognised.
    pub(crate) tag: u32,
}

impl Thread {
    const fn pack(self) -> usize {
        self.depth as usize
            | (self.inside as usize) << 8
            | (self.agrees as usize) << 9
            | (self.group as usize) << 16
            | (self.tag as usize) << 32
    }

    const fn unpack(word: usize) -> Self {
        Thread {
            depth: (word & 0xff) as u8,
            inside: word >> 8 & 1 == 1,
            agrees: word >> 9 & 1 == 1,
            group: (word >> 16 & 0xffff) as u16,
            tag: (word >> 32) as u32,
        }
    }

    /// This thread's word. Without a key nothing is known, and every call counts as one outside of groups.
    #[inline]
    pub(crate) fn get() -> Thread {
        let (key, get) = (KEY.get_first(), GET.get());
        if key == 0 {
            return Thread::default();
        }
        // SAFETY: libc's function of this signature, stored before the key.
        let get = unsafe { core::mem::transmute::<usize, Get>(get as usize) };
        // SAFETY: a key that was created and is never deleted.
        Thread::unpack(unsafe { get((key - 1) as c_uint) }.addr())
    }

    /// Makes this the thread's word.
    #[inline]
    pub(crate) fn set(self) {
        let (key, set) = (KEY.get_first(), SET.get());
        if key == 0 {
            return;
        }
        // SAFETY: as in `get`.
        let set = unsafe { core::mem::transmute::<usize, Set>(set as usize) };
        // SAFETY: as in `get`; a key in place takes any value, and nothing is done with it when a thread ends.
        unsafe { set((key - 1) as c_uint, core::ptr::without_provenance(self.pack())) };
    }
}

/// True where the library was preloaded, and groups can be followed.
pub(crate) fn is_preloaded() -> bool {
    KEY.get_first() != 0
}

/// Takes the key, once. The earlier in the process's life, the lower it is.
pub fn take_key() {
    // Once: a key that is not used is never given back.
    if KEY.get_first() != 0 || !TRIED.replace(0, 1) {
        return;
    }
    let [create, get, set] = nccl::thread_keys();
    if create == 0 || get == 0 || set == 0 {
        return;
    }
    // SAFETY: libc's function of this name and signature.
    let create = unsafe { core::mem::transmute::<usize, Create>(create) };
    let mut key: c_uint = 0;
    // SAFETY: stores one key; a destructor is not wanted.
    if unsafe { create(&mut key, None) } != 0 || key >= IN_PLACE {
        return;
    }
    GET.set(get as u64);
    SET.set(set as u64);
    // Two threads that come here at once leave one key unused.
    KEY.replace(0, u64::from(key) + 1);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_threads_word_is_its_own() {
        take_key();
        let mine = Thread { depth: 200, inside: true, agrees: true, group: 128, tag: u32::MAX };
        assert_eq!(Thread::unpack(mine.pack()), mine);
        mine.set();
        std::thread::scope(|s| {
            s.spawn(|| assert_eq!(Thread::get(), Thread::default()));
        });
        assert_eq!(Thread::get(), mine);
    }
}
