//! The cost log: NCCL's predicted times for the calls of one process, which the plugin notes while no rules apply.
//!
//! `ringwatch tune --search` makes the file, names it in `RINGWATCH_TUNE_COSTS`, and learns from it which entries NCCL
//! offers. The file is [`FILE_BYTES`] of little-endian 64-bit words.
//!
//! | word | content |
//! |---|---|
//! | 0 | `RINGCOST` |
//! | 1 | records that were begun; those beyond [`RECORDS_MAX`] are lost |
//! | 8 and up | records of [`RECORD_WORDS`] words |
//!
//! | word of a record | content |
//! |---|---|
//! | 0 | 1 + collective (NCCL's number), written last; 0 while the record is not whole |
//! | 1 | size in bytes, as NCCL counts it |
//! | 2 to 12 | predicted times in us as 32-bit floats, two a word, the lower half first; negative is impossible |

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

/// One call and NCCL's predicted times.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CostRecord {
    /// The collective, NCCL's number.
    pub collective: usize,
    /// Size in bytes.
    pub bytes: u64,
    /// Predicted times in us, by `3 * algorithm + protocol`; negative where the entry is impossible.
    pub costs_us: [f32; ENTRIES],
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
    Some(CostRecord { collective, bytes: word(1), costs_us })
}
