//! NCCL's predicted times, noted in a file that `RINGWATCH_TUNE_COSTS` names, where no rules apply.
//!
//! The file is mapped once, while a communicator is made; a call of a new class is then noted by stores alone, and others
//! cost a look.

#![expect(unsafe_code, reason = "the file is a mapping that lives as long as the process")]

use crate::runtime::sys;
use core::ffi::CStr;
use ringwatch_wire::cost_log::{
    COSTS_WORD, ENTRIES, FILE_BYTES, HEADER_WORDS, KEY_WORD, MAGIC, RECORD_WORDS, RECORDS_MAX, SIZE_WORD,
    TRIES, key, place,
};
use ringwatch_wire::sync::Word;

const FILE: &CStr = c"RINGWATCH_TUNE_COSTS";
const WORDS: usize = FILE_BYTES / 8;

/// Address of the mapping; 0 without one.
static LOG: Word = Word::new(0);

/// Maps the file, where one is named. A file of another length is left alone, and so is one of another user, who could
/// shorten it under the job.
pub(super) fn open() {
    if LOG.get() != 0 {
        return;
    }
    let Some(path) = sys::variable(FILE) else { return };
    let Some(file) = sys::open(path, libc::O_RDWR | libc::O_NONBLOCK) else { return };
    let is_own = |f: &sys::Facts| f.uid == sys::ids().1 && f.is_regular && f.bytes == FILE_BYTES as u64;
    let is_log = sys::facts(&file).is_some_and(|f| is_own(&f));
    let Some(at) = is_log.then(|| sys::map(Some(&file), FILE_BYTES)).flatten() else { return };
    if !LOG.replace(0, at.expose_provenance() as u64) {
        // SAFETY: another thread was first, so that nobody knows this mapping.
        unsafe { sys::unmap(at, FILE_BYTES) };
    }
}

/// True where calls are noted.
#[inline]
pub(super) fn is_open() -> bool {
    LOG.get_first() != 0
}

/// Notes the cost table of a call, if it is the first of its class. `size` is that of its communicator.
#[cold]
pub(super) fn note(collective: usize, bytes: u64, size: u64, costs: &[f32]) {
    let at = core::ptr::with_exposed_provenance::<[Word; WORDS]>(LOG.get_first() as usize);
    // SAFETY: 0, or the address of a mapping of this length, which is never undone.
    let Some(words) = (unsafe { at.as_ref() }) else { return };
    let [magic, begun, lost, ..] = words;
    let class = key(collective, bytes, size);
    let (records, _) = words.get(HEADER_WORDS..).unwrap_or(&[]).as_chunks::<RECORD_WORDS>();
    for i in 0..TRIES {
        let Some(record) = records.get((place(class) + i) % RECORDS_MAX) else { return };
        let taken = &record[KEY_WORD];
        match taken.get() {
            k if k == class => return,
            0 if taken.replace(0, class) => {
                magic.set(MAGIC);
                begun.add(1);
                return write(record, collective, bytes, size, costs);
            }
            // Another one may have taken it for this class.
            0 if taken.get() == class => return,
            _ => {}
        }
    }
    lost.add(1);
}

fn write(record: &[Word; RECORD_WORDS], collective: usize, bytes: u64, size: u64, costs: &[f32]) {
    let [kind, size_in_bytes, rest @ ..] = record;
    size_in_bytes.set(bytes);
    let cost = |i: usize| u64::from(costs.get(i).copied().unwrap_or(-1.0).to_bits());
    for (i, word) in rest.iter().enumerate().take(ENTRIES.div_ceil(2)) {
        word.set(cost(2 * i) | cost(2 * i + 1) << 32);
    }
    record[SIZE_WORD].set(size);
    kind.set_last(collective as u64 + 1);
}

const _: () = assert!(COSTS_WORD == 2, "the costs follow the size");
