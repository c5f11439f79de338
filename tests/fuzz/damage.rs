//! Damaged copies of good inputs: what a fuzzer without coverage is worth something by.

use proptest::prelude::*;
use proptest::sample::Index;

/// Inputs are no longer than this.
const LONGEST: usize = 1 << 20;
/// Damages of one input.
const EDITS: usize = 8;

/// One damage. An [`Index`] is a place, whatever the input's length is by then.
#[derive(Debug, Clone)]
enum Edit {
    Flip(Index, u8),
    Put(Index, Vec<u8>),
    Insert(Index, Vec<u8>),
    Remove(Index, Index),
    Cut(Index),
    /// Puts a range down again, so many times: what is small grows, up to [`LONGEST`].
    Repeat(Index, Index, u32),
    /// Puts a piece of another seed in.
    Splice(Index, Index, Index, Index),
    /// Replaces the next number that is written in digits.
    Number(Index, &'static str),
}

/// Words that parsers of bytes read: limits, small numbers, lengths that lie.
fn word() -> impl Strategy<Value = Vec<u8>> {
    let edge = prop_oneof![
        any::<u64>(),
        Just(0),
        Just(u64::MAX),
        Just(1 << 63),
        Just(u64::from(u32::MAX)),
        (0..64u32).prop_map(|b| 1 << b),
        0..300u64,
    ];
    (edge, prop_oneof![Just(1usize), Just(2), Just(4), Just(8)])
        .prop_map(|(n, width)| n.to_le_bytes()[..width].to_vec())
}

/// Texts that matter to parsers of text, and to terminals.
fn token() -> impl Strategy<Value = Vec<u8>> {
    const TOKENS: &[&[u8]] = &[
        b"\x1b[31m",
        b"\\u001b[2J",
        "\u{202e}".as_bytes(),
        "\u{9b}31m".as_bytes(),
        b"\xff\xfe",
        b"\0",
        b"\n",
        b"\r\n",
        b"\t",
        b"\"",
        b"\\",
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b"=",
        b";",
        b"null",
        b"true",
        b"- ",
        b"&a ",
        b"*a",
        b"!!binary ",
        b"%41",
        b"://u:p@",
    ];
    proptest::sample::select(TOKENS).prop_map(<[u8]>::to_vec)
}

const NUMBERS: &[&str] = &[
    "0",
    "1",
    "-1",
    "65536",
    "4294967295",
    "4294967296",
    "9223372036854775807",
    "-9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "1e308",
    "1e999",
    "-1e-400",
    "0.1",
    "NaN",
    "",
    "٣",
];

fn edit() -> impl Strategy<Value = Edit> {
    let at = any::<Index>;
    let bytes = || prop_oneof![word(), token(), prop::collection::vec(any::<u8>(), 1..16)];
    prop_oneof![
        3 => (at(), 0..8u8).prop_map(|(i, bit)| Edit::Flip(i, bit)),
        4 => (at(), bytes()).prop_map(|(i, b)| Edit::Put(i, b)),
        2 => (at(), bytes()).prop_map(|(i, b)| Edit::Insert(i, b)),
        2 => (at(), at()).prop_map(|(i, n)| Edit::Remove(i, n)),
        1 => at().prop_map(Edit::Cut),
        1 => (at(), at(), prop_oneof![1..4u32, 1..100_000u32]).prop_map(|(i, n, times)| Edit::Repeat(i, n, times)),
        2 => (at(), at(), at(), at()).prop_map(|(s, from, n, to)| Edit::Splice(s, from, n, to)),
        3 => (at(), proptest::sample::select(NUMBERS)).prop_map(|(i, n)| Edit::Number(i, n)),
    ]
}

/// A place in so many bytes; their end is one.
fn place(index: &Index, bytes: usize) -> usize {
    index.index(bytes + 1)
}

/// A range of a few bytes mostly, of any length now and then.
fn range(bytes: &[u8], from: &Index, length: &Index) -> std::ops::Range<usize> {
    let from = place(from, bytes.len());
    let n = length.index(bytes.len() - from + 1);
    from..from + if n.is_multiple_of(4) { n } else { n % 64 }.min(bytes.len() - from)
}

impl Edit {
    fn apply(&self, bytes: &mut Vec<u8>, seeds: &[Vec<u8>]) {
        match self {
            Edit::Flip(at, bit) => {
                let at = at.index(bytes.len().max(1));
                bytes.get_mut(at).into_iter().for_each(|b| *b ^= 1 << bit);
            }
            Edit::Put(at, new) => {
                let at = place(at, bytes.len());
                let end = (at + new.len()).min(bytes.len());
                bytes.splice(at..end, new.iter().copied());
            }
            Edit::Insert(at, new) => {
                let at = place(at, bytes.len());
                bytes.splice(at..at, new.iter().copied());
            }
            Edit::Remove(from, length) => drop(bytes.drain(range(bytes, from, length))),
            Edit::Cut(at) => bytes.truncate(place(at, bytes.len())),
            Edit::Repeat(from, length, times) => {
                let range = range(bytes, from, length);
                let room = LONGEST.saturating_sub(bytes.len()) / range.len().max(1);
                let again = bytes[range.clone()].repeat(room.min(*times as usize));
                bytes.splice(range.end..range.end, again);
            }
            Edit::Splice(seed, from, length, to) => {
                let Some(other) = seeds.get(seed.index(seeds.len().max(1))) else { return };
                let to = place(to, bytes.len());
                bytes.splice(to..to, other[range(other, from, length)].iter().copied());
            }
            Edit::Number(at, number) => {
                let from = place(at, bytes.len());
                let digit = |b: &u8| b.is_ascii_digit();
                let Some(first) = bytes[from..].iter().position(digit).map(|n| from + n) else { return };
                let n = bytes[first..].iter().take_while(|b| digit(b)).count();
                bytes.splice(first..first + n, number.bytes());
            }
        }
        bytes.truncate(LONGEST);
    }
}

/// Seeds with some damages, and now and then bytes that resemble none.
pub(crate) fn damaged(seeds: Vec<Vec<u8>>) -> impl Strategy<Value = Vec<u8>> {
    let noise = prop::collection::vec(any::<u8>(), 0..256);
    let start = prop_oneof![15 => any::<Index>().prop_map(Ok), 1 => noise.prop_map(Err)];
    (start, prop::collection::vec(edit(), 1..EDITS)).prop_map(move |(start, edits)| {
        let seed = |i: Index| seeds.get(i.index(seeds.len().max(1))).cloned().unwrap_or_default();
        let mut bytes = start.map_or_else(|noise| noise, seed);
        for e in &edits {
            e.apply(&mut bytes, &seeds);
        }
        bytes
    })
}
