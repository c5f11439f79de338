//! The roll of a communicator: an append-only file in which each of its ranks on a node enters its rules, and whose first
//! verdict binds all of them.
//!
//! Every record is written by one `write` to a file opened with `O_APPEND`. The kernel gives such writes one order, which
//! all readers see. So ranks agree without a lock that a stopped process could hold, and without a shared mapping that a
//! shorter file would turn into SIGBUS.

use crate::runtime::sys::{self, Fd};

/// Length of a record in bytes.
pub(super) const RECORD_BYTES: usize = 64;
/// Most ranks of a communicator that can agree.
pub(super) const RANKS_MAX: u32 = 1024;
/// Records that are read: each rank writes an arrival and at most one verdict.
pub(super) const RECORDS_MAX: usize = 2 * RANKS_MAX as usize;
/// A rank that is not known. NCCL does not tell it to a tuner.
pub(super) const NO_RANK: u32 = u32::MAX;

const ARRIVAL: u64 = u64::from_le_bytes(*b"RWTUNE1A");
const VERDICT: u64 = u64::from_le_bytes(*b"RWTUNE1V");

/// A record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Record {
    /// A rank has come.
    Arrival(Arrival),
    /// A rank has concluded, for all of them, why the rules are on or off.
    Verdict(u8),
}

/// The record by which a rank enters the roll.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Arrival {
    /// The rank, or [`NO_RANK`].
    pub(super) rank: u32,
    /// Content hash of its rules; 0 without rules.
    pub(super) hash: u64,
    /// Without rules: why, one of [`ringwatch_wire::codes::tuned`].
    pub(super) lack: u8,
}

impl Record {
    pub(super) fn to_bytes(self) -> [u8; RECORD_BYTES] {
        let words = match self {
            Record::Arrival(a) => [ARRIVAL, a.hash, u64::from(a.rank) | u64::from(a.lack) << 32],
            Record::Verdict(code) => [VERDICT, u64::from(code), 0],
        };
        let mut bytes = [0; RECORD_BYTES];
        for (place, byte) in bytes.iter_mut().zip(words.map(u64::to_le_bytes).as_flattened()) {
            *place = *byte;
        }
        bytes
    }

    /// `None` for what no rank has written.
    pub(super) fn read(bytes: &[u8; RECORD_BYTES]) -> Option<Self> {
        let word = |at: usize| {
            bytes.get(at..).and_then(|b| b.first_chunk()).map_or(0, |b: &[u8; 8]| u64::from_le_bytes(*b))
        };
        match word(0) {
            ARRIVAL => {
                let who = word(16);
                Some(Record::Arrival(Arrival { rank: who as u32, hash: word(8), lack: (who >> 32) as u8 }))
            }
            VERDICT => Some(Record::Verdict(word(8) as u8)),
            _ => None,
        }
    }
}

/// Calls `each` with the records of a roll, in their order, until it returns false.
pub(super) fn records(file: &Fd, mut each: impl FnMut(Record) -> bool) {
    const AT_ONCE: usize = 32;
    let mut buffer = [0u8; AT_ONCE * RECORD_BYTES];
    for block in 0..RECORDS_MAX / AT_ONCE {
        let length = sys::read_at(file, &mut buffer, (block * AT_ONCE * RECORD_BYTES) as u64);
        let (whole, _) = buffer.get(..length).unwrap_or(&[]).as_chunks::<RECORD_BYTES>();
        for bytes in whole {
            let Some(record) = Record::read(bytes) else { return };
            if !each(record) {
                return;
            }
        }
        if whole.len() < AT_ONCE {
            return;
        }
    }
}

/// The sum of a roll's records so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tally {
    /// Ranks that have come.
    pub(super) arrivals: u32,
    /// The rules of most ranks, as far as one set has most; without rules 0.
    pub(super) usual_hash: u64,
    /// True while all ranks that have come have the same rules.
    pub(super) is_unanimous: bool,
    /// The first verdict, which counts.
    pub(super) verdict: Option<u8>,
    /// Arrivals for [`Tally::usual_hash`] less those against it, in the majority vote.
    lead: u32,
    first_hash: Option<u64>,
}

impl Tally {
    pub(super) const fn new() -> Self {
        Tally { arrivals: 0, usual_hash: 0, is_unanimous: true, verdict: None, lead: 0, first_hash: None }
    }

    pub(super) fn of(file: &Fd) -> Self {
        let mut tally = Tally::new();
        records(file, |record| {
            tally.add(record);
            true
        });
        tally
    }

    pub(super) fn add(&mut self, record: Record) {
        match record {
            Record::Verdict(code) => {
                self.verdict = self.verdict.or(Some(code));
            }
            Record::Arrival(a) => {
                self.arrivals = self.arrivals.saturating_add(1);
                let first = *self.first_hash.get_or_insert(a.hash);
                self.is_unanimous &= a.hash == first && a.hash != 0;
                // Boyer and Moore's majority vote: one pass, one candidate.
                if self.lead == 0 {
                    self.usual_hash = a.hash;
                    self.lead = 1;
                } else if a.hash == self.usual_hash {
                    self.lead += 1;
                } else {
                    self.lead -= 1;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arrival(rank: u32, hash: u64) -> Record {
        Record::Arrival(Arrival { rank, hash, lack: 0 })
    }

    fn tally(records: &[Record]) -> Tally {
        let mut tally = Tally::new();
        records.iter().for_each(|r| tally.add(*r));
        tally
    }

    #[test]
    fn records_are_read_as_they_are_written() {
        let all = [
            Record::Arrival(Arrival { rank: 7, hash: u64::MAX, lack: 4 }),
            arrival(NO_RANK, 0),
            Record::Verdict(2),
            Record::Verdict(255),
        ];
        for record in all {
            assert_eq!(Record::read(&record.to_bytes()), Some(record));
        }
        assert_eq!(Record::read(&[0; RECORD_BYTES]), None);
        assert_eq!(Record::read(&[255; RECORD_BYTES]), None);
    }

    #[test]
    fn the_first_verdict_counts() {
        let t = tally(&[arrival(0, 5), Record::Verdict(6), arrival(1, 5), Record::Verdict(2)]);
        assert_eq!((t.arrivals, t.verdict, t.is_unanimous), (2, Some(6), true));
    }

    #[test]
    fn the_rules_of_most_ranks_are_the_usual_ones() {
        for odd in 0..5 {
            let records: Vec<Record> = (0..5).map(|r| arrival(r, if r == odd { 9 } else { 5 })).collect();
            let t = tally(&records);
            assert_eq!((t.usual_hash, t.is_unanimous), (5, false), "rank {odd}");
        }
        assert!(!tally(&[arrival(0, 0), arrival(1, 0)]).is_unanimous, "no rules are none to agree on");
        assert!(tally(&[]).is_unanimous);
    }
}
