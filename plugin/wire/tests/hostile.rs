//! A reader of bytes that nobody vouches for: whatever they are, it ends soon and never panics. Run in a
//! debug build, so that an overflow is a panic too.

#![cfg(not(loom))]
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod support;

use proptest::prelude::*;
use ringwatch_wire::layout::{FORMAT_VERSION, Geometry, HEADER_WORDS, LineRings, MAGIC, Region, head};
use ringwatch_wire::reader::{OpenError, Reader};
use ringwatch_wire::ring::Segment;
use ringwatch_wire::sync::Word;
use std::time::{Duration, Instant};
use support::walk;

const GOLDEN: &[u8] = include_bytes!("data/segment-v1.bin");
/// With lines, those of the third version too.
const OTHERS: [&[u8]; 2] = [include_bytes!("data/segment-v3.bin"), include_bytes!("data/segment-v4.bin")];

/// Words that matter at a boundary more often than chance has it.
fn word() -> impl Strategy<Value = u64> {
    prop_oneof![
        any::<u64>(),
        Just(0),
        Just(u64::MAX),
        (0..64u32).prop_map(|b| 1 << b),
        // A published stamp of a small ticket.
        (0..200u64, 1..9u64).prop_map(|(t, v)| (t + 1) << 16 | v << 1),
    ]
}

fn quick(words: &[Word]) -> Result<usize, OpenError> {
    let begun = Instant::now();
    let found = walk(words);
    assert!(begun.elapsed() < Duration::from_secs(5), "took {:?}", begun.elapsed());
    found
}

#[test]
fn the_undamaged_file_reads_well() {
    assert!(quick(&support::words(GOLDEN)).unwrap() > 10);
}

#[test]
fn every_truncation_is_refused() {
    let words = support::words(GOLDEN);
    for n in 0..words.len() {
        let want = if n < HEADER_WORDS { OpenError::Short } else { OpenError::Geometry };
        assert_eq!(quick(&words[..n]), Err(want), "{n} words");
    }
}

#[test]
fn a_geometry_that_lies_is_refused() {
    let lie = |i: usize, value: u64| {
        let words = support::words(GOLDEN);
        words[i].set(value);
        Reader::open(&words).err()
    };
    assert_eq!(lie(head::MAGIC, 0), Some(OpenError::NotReady));
    let next = FORMAT_VERSION + 1;
    assert_eq!(lie(head::VERSION, u64::from(next) | 512 << 32), Some(OpenError::Version(next)));
    assert_eq!(lie(head::VERSION, 512 << 32), Some(OpenError::Version(0)));
    assert_eq!(lie(head::VERSION, 1 | 513 << 32), Some(OpenError::Geometry));
    for value in [0, 1, u64::MAX, 1 << 63, GOLDEN.len() as u64 - 1, GOLDEN.len() as u64 + 8] {
        assert_eq!(lie(head::BYTES, value), Some(OpenError::Geometry), "{value} bytes");
    }
    for i in 0..5 {
        let at = head::REGIONS + i * 2;
        let stride = Region::ALL[i].words() as u64;
        for value in [0, 1, u64::MAX, GOLDEN.len() as u64] {
            assert_eq!(lie(at, value), Some(OpenError::Geometry), "region {i} at {value}");
        }
        for slots in [0, 3, 1 << 24, 1 << 25, 1 << 31, u64::from(u32::MAX)] {
            assert_eq!(lie(at + 1, stride | slots << 32), Some(OpenError::Geometry), "{slots} slots");
        }
        assert_eq!(lie(at + 1, (stride + 1) | 16 << 32), Some(OpenError::Geometry));
    }
}

#[test]
fn rings_of_lines_that_lie_are_refused() {
    let geometry = Geometry::new([2, 4, 4, 6, 4]).with_lines(LineRings::new(2, 3));
    let words: Vec<Word> = (0..geometry.bytes() / 8).map(|_| Word::new(0)).collect();
    let segment = Segment::new(&words, &geometry);
    segment.format(&geometry);
    segment.open_for_readers();
    assert!(quick(&words).is_ok());
    for (i, lies) in [
        (head::LINES, [0, 1, u64::MAX, geometry.bytes()]),
        (head::LINES_SHAPE, [8 | 1 << 32, 7 | 2 << 32, 8 | 33 << 32, u64::MAX]),
        (head::LINES_SHAPE, [0, 8, 2 << 32, 1 << 31 | 2 << 32]),
    ] {
        let honest = words[i].get();
        for lie in lies {
            words[i].set(lie);
            assert_eq!(Reader::open(&words).err(), Some(OpenError::Geometry), "word {i} is {lie:x}");
        }
        words[i].set(honest);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(debug_assertions) { 300 } else { 3000 }))]

    #[test]
    fn arbitrary_words(words in prop::collection::vec(word(), 0..1200), honest in any::<bool>()) {
        let words: Vec<Word> = words.into_iter().map(Word::new).collect();
        if honest && words.len() > HEADER_WORDS {
            words[head::MAGIC].set(MAGIC);
            words[head::VERSION].set(u64::from(FORMAT_VERSION) | (HEADER_WORDS as u64) << 32);
        }
        // Found or refused: both are fine.
        quick(&words).ok();
    }

    /// A true geometry over arbitrary words: the slots, counters and texts are what lies.
    #[test]
    fn arbitrary_slots(
        shifts in prop::array::uniform5(0..5u32),
        words in prop::collection::vec(word(), 700..1500),
        next in prop::collection::vec(word(), 5),
        rings in 0..4u32,
    ) {
        let lines = if rings == 0 { LineRings::NONE } else { LineRings::new(rings, shifts[0]) };
        let geometry = Geometry::new(shifts).with_lines(lines);
        let len = (geometry.bytes() / 8) as usize;
        let words: Vec<Word> = words.into_iter().cycle().take(len).map(Word::new).collect();
        let segment = Segment::new(&words, &geometry);
        segment.format(&geometry);
        segment.open_for_readers();
        for (region, n) in Region::ALL.iter().zip(next) {
            segment.set(region.next(), n);
        }
        prop_assert!(quick(&words).is_ok());
    }

    #[test]
    fn flipped_bits_of_lines(flips in prop::collection::vec((11_000..OTHERS[0].len(), 0..8u32), 1..40)) {
        for other in OTHERS {
            let mut bytes = other.to_vec();
            for (at, bit) in &flips {
                bytes[*at] ^= 1 << bit;
            }
            prop_assert!(quick(&support::words(&bytes)).is_ok(), "the header is as it was");
        }
    }

    #[test]
    fn flipped_bits(flips in prop::collection::vec((0..GOLDEN.len(), 0..8u32), 1..40), end in 0..GOLDEN.len()) {
        let mut bytes = GOLDEN.to_vec();
        for (at, bit) in &flips {
            bytes[*at] ^= 1 << bit;
        }
        quick(&support::words(&bytes)).ok();
        quick(&support::words(&bytes[..end])).ok();
    }
}
