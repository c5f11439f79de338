//! The compiled rules that `RINGWATCH_TUNE` names, read once a process into memory of its own.
//!
//! The file is copied and not mapped: a file that becomes shorter later must not end the job by SIGBUS.

#![expect(unsafe_code, reason = "the copy is a mapping that lives as long as the process")]

use crate::runtime::clock::now_ns;
use crate::runtime::sys::{self, Fd};
use core::ffi::{CStr, c_int};
use ringwatch_wire::sync::Word;
use ringwatch_wire::tuning::{BYTES_MAX, Rules};

const FILE: &CStr = c"RINGWATCH_TUNE";
/// A name may be a pipe, whose open must not wait for a writer.
const FLAGS: c_int = libc::O_RDONLY | libc::O_NONBLOCK;

/// The state of this process's rule file.
#[derive(Debug, Clone, Copy)]
pub(super) enum RuleFile {
    /// The user has named no file.
    Unset,
    /// There is no readable file of that name.
    Missing,
    /// The file is no table of rules of a known version.
    Refused,
    /// The rules.
    Loaded(Rules<'static>),
}

const UNREAD: u64 = 0;
const READING: u64 = 1;
const UNSET: u64 = 2;
const MISSING: u64 = 3;
const REFUSED: u64 = 4;
const LOADED: u64 = 5;

/// One of the numbers above.
static STATE: Word = Word::new(UNREAD);
static ADDRESS: Word = Word::new(0);
static LENGTH: Word = Word::new(0);

/// Longest wait for another thread that reads the file.
const READING_NS_MAX: u64 = 10_000_000_000;

/// The rules, which the first caller reads.
pub(super) fn rule_file() -> RuleFile {
    if STATE.replace(UNREAD, READING) {
        STATE.set_last(load());
    }
    let begun = now_ns();
    while STATE.get_first() == READING && now_ns().saturating_sub(begun) < READING_NS_MAX {
        sys::nap();
    }
    match STATE.get_first() {
        UNSET => RuleFile::Unset,
        MISSING => RuleFile::Missing,
        LOADED => Rules::read(copy()).map_or(RuleFile::Refused, RuleFile::Loaded),
        _ => RuleFile::Refused,
    }
}

fn load() -> u64 {
    let Some(path) = sys::variable(FILE) else { return UNSET };
    let Some(file) = sys::open(path, FLAGS) else { return MISSING };
    let Some(facts) = sys::facts(&file).filter(|f| f.is_regular) else { return REFUSED };
    let length = usize::try_from(facts.bytes).ok().filter(|n| *n <= BYTES_MAX && *n > 0);
    let Some(length) = length else { return REFUSED };
    let Some(at) = sys::map(None, length) else { return REFUSED };
    // SAFETY: a fresh mapping of this length, which only this thread knows, and which is never undone.
    let bytes = unsafe { core::slice::from_raw_parts_mut(at.cast::<u8>(), length) };
    if !fill(&file, bytes) || Rules::read(bytes).is_err() {
        return REFUSED;
    }
    ADDRESS.set(at.expose_provenance() as u64);
    LENGTH.set(length as u64);
    LOADED
}

/// Reads a whole buffer; false where the file has become shorter.
fn fill(file: &Fd, bytes: &mut [u8]) -> bool {
    let mut at = 0usize;
    while let Some(rest) = bytes.get_mut(at..).filter(|r| !r.is_empty()) {
        let read = sys::read(file, rest);
        if read == 0 {
            return false;
        }
        at += read;
    }
    true
}

/// The copy of a file that was loaded.
fn copy() -> &'static [u8] {
    let at = core::ptr::with_exposed_provenance::<u8>(ADDRESS.get() as usize);
    // SAFETY: LOADED follows the writing of both words; nobody writes to the mapping any more, and it stays.
    unsafe { core::slice::from_raw_parts(at, LENGTH.get() as usize) }
}
