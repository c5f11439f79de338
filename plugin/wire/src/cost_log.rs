//! The cost log: NCCL's predicted times, which the plugin notes while no rules apply, once for each class of calls.
//!
//! `ringwatch tune --search` and `run --tune observe` make the file and name it in `RINGWATCH_TUNE_COSTS`, for any number
//! of processes. The search learns from it which entries NCCL offers; detection learns what transfers should take. The
//! file is [`FILE_BYTES`] of little-endian 64-bit words.
//!
//! | word | content |
//! |---|---|
//! | 0 | `RINGCOST` |
//! | 1 | records that were begun |
//! | 2 | calls whose class found no room |
//! | 8 and up | records of [`RECORD_WORDS`] words |
//!
//! | word of a record | content |
//! |---|---|
//! | 0 | 1 + collective (NCCL's number), written last; 0 while the record is not whole |
//! | 1 | size in bytes, as NCCL counts it |
//! | 2 to 12 | predicted times in us as 32-bit floats, two a word, the lower half first; negative is impossible |
//! | 13 | the communicator's ranks (low 32 bits) and nodes |
//! | 15 | the [`key`] of the class, written first, by whoever takes the record; 0 while it is free |
//!
//! A class has the first free one of [`TRIES`] records from `key mod` [`RECORDS_MAX`] on.

use crate::tuning::{ALGORITHMS, COLLECTIVES, PROTOCOLS};

/// `RINGCOST` as little-endian bytes.
pub const MAGIC: u64 = u64::from_le_bytes(*b"RINGCOST");
/// Length of the file in bytes.
pub const FILE_BYTES: usize = 8 * (HEADER_WORDS + RECORDS_MAX * RECORD_WORDS);
/// Words before the first record.
pub const HEADER_WORDS: usize = 8;
/// Words of a record.
pub const RECORD_WORDS: usize = 16;
/// Most records of a file.
pub const RECORDS_MAX: usize = 4096;
/// Entries of a record.
pub const ENTRIES: usize = ALGORITHMS * PROTOCOLS;
/// The word of a record in which the predicted times begin.
pub const COSTS_WORD: usize = 2;
/// The word of a record that has ranks and nodes.
pub const SIZE_WORD: usize = 13;
/// The word of a record that has its key.
pub const KEY_WORD: usize = 15;
/// Records that a class may have.
pub const TRIES: usize = 16;

/// Ranks and nodes of a communicator in one word.
pub const fn size_word(ranks: u32, nodes: u32) -> u64 {
    ranks as u64 | (nodes as u64) << 32
}

/// The key of a class of calls; never 0.
pub const fn key(collective: usize, bytes: u64, size: u64) -> u64 {
    let mixed =
        (bytes ^ size.rotate_left(17) ^ (collective as u64) << 59).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) | 1
}

/// The first record that a class may have. The low bits of its key are no guide: one of them is always set.
pub const fn place(key: u64) -> usize {
    (key >> 40) as usize % RECORDS_MAX
}

/// One call and NCCL's predicted times.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CostRecord {
    /// The collective, NCCL's number.
    pub collective: usize,
    /// Size in bytes.
    pub bytes: u64,
    /// Ranks of the communicator; 0 unknown.
    pub ranks: u32,
    /// Its nodes; 0 unknown.
    pub nodes: u32,
    /// Predicted times in us, by `3 * algorithm + protocol`; negative where the entry is impossible.
    pub costs_us: [f32; ENTRIES],
}

impl CostRecord {
    /// The least predicted time in us; `None` where everything is impossible.
    pub fn best_us(&self) -> Option<f32> {
        self.costs_us.iter().copied().filter(|c| *c >= 0.0).reduce(f32::min)
    }
}

/// Reads the whole records of a file; none where it is no cost log.
pub fn records(file: &[u8]) -> impl Iterator<Item = CostRecord> + '_ {
    let (words, _) = file.as_chunks::<8>();
    let is_log = words.first().is_some_and(|w| u64::from_le_bytes(*w) == MAGIC);
    let (records, _) = words.get(HEADER_WORDS..).unwrap_or(&[]).as_chunks::<RECORD_WORDS>();
    let count = if is_log { RECORDS_MAX } else { 0 };
    records.iter().take(count).filter_map(record)
}

fn record(words: &[[u8; 8]; RECORD_WORDS]) -> Option<CostRecord> {
    let word = |i: usize| words.get(i).map_or(0, |w| u64::from_le_bytes(*w));
    let collective = usize::try_from(word(0).checked_sub(1)?).ok().filter(|c| *c < COLLECTIVES)?;
    let mut costs_us = [-1.0; ENTRIES];
    for (i, cost) in costs_us.iter_mut().enumerate() {
        let half = word(COSTS_WORD + i / 2) >> (32 * (i % 2));
        *cost = f32::from_bits(half as u32);
    }
    let (ranks, nodes) = (word(SIZE_WORD) as u32, (word(SIZE_WORD) >> 32) as u32);
    Some(CostRecord { collective, bytes: word(1), ranks, nodes, costs_us })
}
