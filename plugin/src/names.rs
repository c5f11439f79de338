//! NCCL's static strings as codes. Compared by content: their addresses mean nothing across libraries.

#![expect(unsafe_code, reason = "NCCL hands over C strings")]

use core::ffi::c_char;
use ringwatch_wire::codes::{ALGOS, FUNCS, PROTOS, TYPES, UNKNOWN};
use ringwatch_wire::layout::comm;

/// Longest name that is told apart; no name of NCCL's is longer than 14.
const ROOM: usize = 16;

/// The text as two words, NUL-padded; longer texts are cut.
#[inline]
fn key(text: *const c_char) -> (u64, u64) {
    let mut words = (0u64, 0u64);
    if text.is_null() {
        return words;
    }
    for i in 0..ROOM {
        // SAFETY: NCCL passes NUL-terminated strings in static storage; we stop at the NUL.
        let byte = unsafe { text.add(i).cast::<u8>().read() };
        if byte == 0 {
            break;
        }
        if i < 8 {
            words.0 |= u64::from(byte) << (i * 8);
        } else {
            words.1 |= u64::from(byte) << ((i - 8) * 8);
        }
    }
    words
}

const fn const_key(text: &str) -> (u64, u64) {
    let bytes = text.as_bytes();
    let mut words = (0u64, 0u64);
    let mut i = 0;
    while i < bytes.len() {
        if i < 8 {
            words.0 |= (bytes[i] as u64) << (i * 8);
        } else {
            words.1 |= (bytes[i] as u64) << ((i - 8) * 8);
        }
        i += 1;
    }
    words
}

const fn keys<const N: usize>(table: &[(u8, &str)]) -> [(u64, u64, u8); N] {
    let mut out = [(0, 0, 0); N];
    let mut i = 0;
    while i < N {
        let (a, b) = const_key(table[i].1);
        out[i] = (a, b, table[i].0);
        i += 1;
    }
    out
}

static FUNC_KEYS: [(u64, u64, u8); FUNCS.len()] = keys(FUNCS);
static TYPE_KEYS: [(u64, u64, u8); TYPES.len()] = keys(TYPES);
static ALGO_KEYS: [(u64, u64, u8); ALGOS.len()] = keys(ALGOS);
static PROTO_KEYS: [(u64, u64, u8); PROTOS.len()] = keys(PROTOS);

#[inline]
fn code(keys: &[(u64, u64, u8)], text: *const c_char) -> u8 {
    let (a, b) = key(text);
    for k in keys {
        if k.0 == a && k.1 == b {
            return k.2;
        }
    }
    UNKNOWN
}

/// Code of a function's name.
#[inline]
pub(crate) fn func(text: *const c_char) -> u8 {
    code(&FUNC_KEYS, text)
}

/// Code of a data type's name.
#[inline]
pub(crate) fn dtype(text: *const c_char) -> u8 {
    code(&TYPE_KEYS, text)
}

/// Code of an algorithm's name.
#[inline]
pub(crate) fn algo(text: *const c_char) -> u8 {
    code(&ALGO_KEYS, text)
}

/// Code of a protocol's name.
#[inline]
pub(crate) fn proto(text: *const c_char) -> u8 {
    code(&PROTO_KEYS, text)
}

/// NCCL's numeric id as a code (ABI v1): the id plus one, unknown when out of range.
#[inline]
pub(crate) fn numbered(id: u8, table: &[(u8, &str)]) -> u8 {
    if (id as usize) < table.len() { id + 1 } else { UNKNOWN }
}

/// Up to `8 * N - 1` bytes of a C string as text words.
#[inline]
fn words_of<const N: usize>(text: *const c_char) -> [u64; N] {
    let mut words = [0u64; N];
    if text.is_null() {
        return words;
    }
    let mut at = 0usize;
    for (i, word) in words.iter_mut().enumerate() {
        for k in 0..8 {
            if i + 1 == N && k == 7 {
                return words;
            }
            // SAFETY: NUL-terminated string of NCCL's; we stop at the NUL.
            let byte = unsafe { text.add(at).cast::<u8>().read() };
            if byte == 0 {
                return words;
            }
            *word |= u64::from(byte) << (k * 8);
            at += 1;
        }
    }
    words
}

/// A kernel variant's name.
#[inline]
pub(crate) fn text(text: *const c_char) -> [u64; 4] {
    words_of(text)
}

/// A communicator's name.
pub(crate) fn long_text(text: *const c_char) -> [u64; comm::NAME_WORDS] {
    words_of(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_has_its_code() {
        for (table, find) in
            [(FUNCS, func as fn(*const c_char) -> u8), (TYPES, dtype), (ALGOS, algo), (PROTOS, proto)]
        {
            for (want, name) in table {
                let c = std::ffi::CString::new(*name).expect("no NUL in a name");
                assert_eq!(find(c.as_ptr()), *want, "{name}");
                assert!(name.len() < ROOM, "{name} would be cut");
            }
        }
        assert_eq!(func(c"AllReduceAndMore".as_ptr()), UNKNOWN);
        assert_eq!(func(c"AllReduc".as_ptr()), UNKNOWN);
        assert_eq!(func(c"".as_ptr()), UNKNOWN);
        assert_eq!(func(core::ptr::null()), UNKNOWN);
        assert_eq!(numbered(4, FUNCS), 5);
        assert_eq!(numbered(200, FUNCS), UNKNOWN);
    }
}
