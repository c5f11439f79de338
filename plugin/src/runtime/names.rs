//! NCCL's static strings as codes. Compared by content, and remembered by address, since they are the same few
//! every time; a new init forgets what it remembered, as it may be another library's.

#![expect(unsafe_code, reason = "NCCL hands over C strings")]

use core::ffi::c_char;
use ringwatch_wire::codes::{ALGOS, FUNCS, PROTOS, TYPES, UNKNOWN};
use ringwatch_wire::layout::comm;
use ringwatch_wire::sync::Word;

/// Longest name that is told apart; no name of NCCL's is longer than 14.
const ROOM: usize = 16;
/// Least page of any machine: what begins `ROOM` bytes before its end can be read in one go.
const PAGE: usize = 4096;

/// The text as two words, NUL-padded; longer texts are cut.
#[inline]
fn key(text: *const c_char) -> (u64, u64) {
    if text.is_null() {
        return (0, 0);
    }
    if text.addr() & (PAGE - 1) > PAGE - ROOM {
        return key_by_bytes(text);
    }
    let (a, b): (u64, u64);
    // SAFETY: the text is static and its first byte readable, hence all of its page, and with it the sixteen
    // bytes. What lies behind the NUL is nobody's business, and is cut off; the compiler is told nothing of it.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        core::arch::asm!(
            "mov {a}, qword ptr [{p}]",
            "mov {b}, qword ptr [{p} + 8]",
            p = in(reg) text, a = out(reg) a, b = lateout(reg) b,
            options(nostack, readonly, pure, preserves_flags),
        );
    }
    // SAFETY: as above.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        core::arch::asm!(
            "ldp {a}, {b}, [{p}]",
            p = in(reg) text, a = out(reg) a, b = lateout(reg) b,
            options(nostack, readonly, pure, preserves_flags),
        );
    }
    let (first, ended) = up_to_nul(a);
    (first, if ended { 0 } else { up_to_nul(b).0 })
}

/// The bytes before the first NUL of a little-endian word, and whether there is one.
#[inline]
const fn up_to_nul(w: u64) -> (u64, bool) {
    const ONES: u64 = 0x0101_0101_0101_0101;
    let nul = w.wrapping_sub(ONES) & !w & (ONES << 7);
    // The lowest marked byte is the first NUL; marks above it may be wrong and are cut off as well.
    (w & (nul & nul.wrapping_neg()).wrapping_sub(1) >> 7 | if nul == 0 { w } else { 0 }, nul != 0)
}

#[cold]
fn key_by_bytes(text: *const c_char) -> (u64, u64) {
    let mut words = (0u64, 0u64);
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

/// Names by the hash of their key.
struct Names {
    seed: u64,
    slots: [(u64, u64, u8); SLOTS],
}

const SLOTS: usize = 64;

#[inline]
const fn place(a: u64, b: u64, seed: u64) -> usize {
    ((a ^ b.rotate_left(29)).wrapping_mul(seed) >> 58) as usize
}

impl Names {
    /// The table, with the first seed that gives every name a slot of its own.
    const fn of(table: &[(u8, &str)]) -> Self {
        let mut seed = 0x9e37_79b9_7f4a_7c15;
        loop {
            let mut slots = [(0, 0, UNKNOWN); SLOTS];
            let mut i = 0;
            while i < table.len() {
                let (a, b) = const_key(table[i].1);
                let at = place(a, b, seed);
                if slots[at].2 != UNKNOWN {
                    break;
                }
                slots[at] = (a, b, table[i].0);
                i += 1;
            }
            if i == table.len() {
                return Names { seed, slots };
            }
            seed = seed.wrapping_mul(0xbf58_476d_1ce4_e5b9) | 1;
        }
    }

    #[inline]
    fn code(&self, text: *const c_char, seen: &Seen) -> u8 {
        let (address, known) = (text.addr() as u64, seen.at(text).get());
        // No address has its upper byte set, so that a code fits below it.
        if known >> 8 == address && address != 0 { known as u8 } else { self.look_up(text, seen) }
    }

    #[inline(never)]
    fn look_up(&self, text: *const c_char, seen: &Seen) -> u8 {
        let code = self.find(text);
        if text.addr() >> 56 == 0 {
            seen.at(text).set((text.addr() as u64) << 8 | u64::from(code));
        }
        code
    }

    #[inline]
    fn find(&self, text: *const c_char) -> u8 {
        let (a, b) = key(text);
        match self.slots.get(place(a, b, self.seed)) {
            Some(s) if s.0 == a && s.1 == b => s.2,
            _ => UNKNOWN,
        }
    }
}

/// Addresses seen, with the codes of their texts. One word holds both, so that no mix of two can be read.
struct Seen([Word; SEEN]);

const SEEN: usize = 32;

impl Seen {
    const fn new() -> Self {
        Seen([const { Word::new(0) }; SEEN])
    }

    #[inline]
    fn at(&self, text: *const c_char) -> &Word {
        let i = (text.addr() >> 2 ^ text.addr() >> 7) % SEEN;
        let [first, ..] = &self.0;
        self.0.get(i).unwrap_or(first)
    }
}

static SEEN_FUNCS: Seen = Seen::new();
static SEEN_TYPES: Seen = Seen::new();
static SEEN_ALGOS: Seen = Seen::new();
static SEEN_PROTOS: Seen = Seen::new();

/// Forgets all addresses.
pub(crate) fn forget() {
    for seen in [&SEEN_FUNCS, &SEEN_TYPES, &SEEN_ALGOS, &SEEN_PROTOS] {
        for word in &seen.0 {
            word.set(0);
        }
    }
}

static FUNC_NAMES: Names = Names::of(FUNCS);
static TYPE_NAMES: Names = Names::of(TYPES);
static ALGO_NAMES: Names = Names::of(ALGOS);
static PROTO_NAMES: Names = Names::of(PROTOS);

/// Code of a function's name.
#[inline]
pub(crate) fn func(text: *const c_char) -> u8 {
    FUNC_NAMES.code(text, &SEEN_FUNCS)
}

/// Code of a data type's name.
#[inline]
pub(crate) fn dtype(text: *const c_char) -> u8 {
    TYPE_NAMES.code(text, &SEEN_TYPES)
}

/// Code of an algorithm's name.
#[inline]
pub(crate) fn algo(text: *const c_char) -> u8 {
    ALGO_NAMES.code(text, &SEEN_ALGOS)
}

/// Code of a protocol's name.
#[inline]
pub(crate) fn proto(text: *const c_char) -> u8 {
    PROTO_NAMES.code(text, &SEEN_PROTOS)
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

/// Codes of functions that are treated by themselves.
pub(crate) const SEND: u8 = code_of("Send");
pub(crate) const RECV: u8 = code_of("Recv");
pub(crate) const BROADCAST: u8 = code_of("Broadcast");

/// The code of a function, 0 for none.
pub(crate) const fn code_of(name: &str) -> u8 {
    let mut i = 0;
    while i < FUNCS.len() {
        let (code, text) = FUNCS[i];
        if text.len() == name.len() && text.as_bytes()[0] == name.as_bytes()[0] {
            let mut same = true;
            let mut k = 0;
            while k < text.len() {
                same &= text.as_bytes()[k] == name.as_bytes()[k];
                k += 1;
            }
            if same {
                return code;
            }
        }
        i += 1;
    }
    0
}

/// Bytes of an element, by code of its type.
const TYPE_BYTES: [u64; 16] = [1, 1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1, 1, 1, 1];

/// Bytes of so many elements of a type.
#[inline]
pub(crate) fn bytes_of(dtype: u8, count: u64) -> u64 {
    count.saturating_mul(TYPE_BYTES.get(usize::from(dtype)).map_or(1, |b| *b))
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
                // A dropped text's address comes again.
                forget();
                let c = std::ffi::CString::new(*name).expect("no NUL in a name");
                assert_eq!(find(c.as_ptr()), *want, "{name}");
                assert!(name.len() < ROOM, "{name} would be cut");
            }
        }
        assert_eq!(func(c"AllReduceAndMore".as_ptr()), UNKNOWN);
        assert_eq!(func(c"AllReduc".as_ptr()), UNKNOWN);
        assert_eq!(func(c"".as_ptr()), UNKNOWN);
        assert_eq!(func(core::ptr::null()), UNKNOWN);
        assert_eq!(func(c"AllReduce\x01".as_ptr()), UNKNOWN);
        assert_eq!(numbered(4, FUNCS), 5);
        assert_eq!(numbered(200, FUNCS), UNKNOWN);
    }

    #[test]
    fn names_at_any_place_of_a_page_are_read() {
        let mut pages = vec![b'x'; 3 * PAGE];
        let first = pages.as_ptr().align_offset(PAGE);
        for name in ["AllReduce", "Send", "ReduceScatter"] {
            for before_end in 1..40 {
                let at = first + PAGE - before_end;
                pages[at..at + name.len()].copy_from_slice(name.as_bytes());
                pages[at + name.len()] = 0;
                let want = FUNCS.iter().find(|f| f.1 == name).map_or(UNKNOWN, |f| f.0);
                assert_eq!(
                    func(pages[at..].as_ptr().cast()),
                    want,
                    "{name} {before_end} before a page's end"
                );
            }
        }
    }
}
