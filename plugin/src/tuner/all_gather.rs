//! Agreement of ranks on several nodes: what a rank contributes to an all-gather, and what follows from all contributions.
//!
//! NCCL calls a tuner's init before its communicator can be used, so that the rules wait in their context. The preloaded
//! library makes the all-gather at the end of the communicator's init ([`crate::calls`]). Every rank reads the same bytes, so
//! that all decide alike.

use super::agreement::{Outcome, causes};
use super::context;
use super::report::{Report, report};
use super::roll::Arrival;
use super::rule_file::{RuleFile, rule_file};
use super::{INVALID_USAGE, inits};
use crate::runtime::log::Log;
use crate::runtime::settings;
use core::ffi::c_int;
use ringwatch_wire::codes::tuned;

/// Words of a contribution.
pub(crate) const WORDS: usize = 4;
/// A contribution.
pub(crate) type Words = [u64; WORDS];

const MAGIC: u64 = u64::from_le_bytes(*b"RWTUNE1G");
/// In a contribution, above the rank and the lack: this rank requires rules.
const REQUIRED: u64 = 1 << 40;

/// A rank that takes part in an all-gather.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part {
    /// NCCL's id of the communicator, where it is known.
    comm_id: Option<u64>,
    /// Its slot in the segment, where it has one.
    ticket: Option<u64>,
    rank: u32,
    hash: u64,
    lack: u8,
}

impl Part {
    /// Takes the context in which this rank's rules wait, if there is one.
    pub(crate) fn take(comm_id: Option<u64>, ticket: Option<u64>, rank: u32) -> Self {
        let file = rule_file();
        let has_context = comm_id.is_some_and(context::claim);
        let (hash, lack) = match (file, has_context) {
            (RuleFile::Loaded(rules), true) => (rules.hash(), 0),
            (RuleFile::Loaded(_), false) => (0, tuned::NO_ID),
            (RuleFile::Refused, _) => (0, tuned::REFUSED),
            (RuleFile::Unset | RuleFile::Missing, _) => (0, tuned::MISSING),
        };
        Part { comm_id, ticket, rank, hash, lack }
    }

    /// The contribution.
    pub(crate) fn words(&self) -> Words {
        let required = if settings::tune_is_required() { REQUIRED } else { 0 };
        let who = u64::from(self.rank) | u64::from(self.lack) << 32 | required;
        [MAGIC, self.hash, who, check(self.hash, who)]
    }

    /// Follows from all contributions, in the order of ranks. The result is for the call that makes the communicator: 0 where
    /// it is made, an error where it must not be used.
    pub(crate) fn conclude(&self, all: &[Words]) -> Result<(), Failure> {
        let mut is_required = false;
        let mut is_unanimous = true;
        for (rank, words) in all.iter().enumerate() {
            let Some((a, requires)) = read(words).filter(|(a, _)| a.rank as usize == rank) else {
                return Err(Failure::OtherOperation);
            };
            is_required |= requires;
            is_unanimous &= a.lack == 0 && a.hash == self.hash && a.hash != 0;
        }
        let code = if is_unanimous { tuned::AGREED } else { tuned::DIFFERENT };
        let arrivals = |each: &mut dyn FnMut(Arrival)| {
            all.iter().filter_map(read).for_each(|(a, _)| each(a));
        };
        let causes = causes(u32::try_from(all.len()).unwrap_or(u32::MAX), code, &arrivals);
        let outcome = Outcome { code, causes };
        let fails = is_required && !is_unanimous;
        self.record(code);
        report(&Log::kept(), &Report { comm_id: self.comm_id, outcome: &outcome, hash: self.hash, fails });
        if let Some(comm_id) = self.comm_id.filter(|_| is_unanimous) {
            context::activate_claimed(comm_id);
        }
        if fails { Err(Failure::Required) } else { Ok(()) }
    }

    /// Enters in the segment what became of the rules.
    pub(crate) fn record(&self, code: u8) {
        if let Some(ticket) = self.ticket {
            inits::record(ticket, code);
        }
    }
}

fn check(hash: u64, who: u64) -> u64 {
    (hash ^ who.rotate_left(17) ^ MAGIC).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// A contribution, and whether it requires rules; `None` for other bytes.
fn read(words: &Words) -> Option<(Arrival, bool)> {
    let [magic, hash, who, sum] = *words;
    let arrival = Arrival { rank: who as u32, hash, lack: (who >> 32) as u8 };
    if magic == MAGIC && sum == check(hash, who) { Some((arrival, who & REQUIRED != 0)) } else { None }
}

/// Why a communicator is not made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Failure {
    /// Rules are required, and the ranks do not agree.
    Required,
    /// Rules are required, and a communicator that does not block cannot agree.
    RequiredButNotBlocking,
    /// A rank has made another operation in the place of the all-gather.
    OtherOperation,
    /// Not all ranks took part in time.
    AbsentRank,
    /// A group makes more communicators than can agree at once.
    TooMany,
    /// CUDA or the kernel refused memory, a stream or a thread, so that this rank cannot take part.
    NoResources,
    /// NCCL refused the all-gather.
    Refused,
}

/// NCCL's answer for a failure of the system, and for one inside NCCL.
const SYSTEM_ERROR: c_int = 2;

impl Failure {
    /// NCCL's answer to the call that makes the communicator.
    pub(crate) const fn answer(self) -> c_int {
        match self {
            Failure::Required | Failure::RequiredButNotBlocking | Failure::OtherOperation => INVALID_USAGE,
            _ => SYSTEM_ERROR,
        }
    }

    /// The outcome of the agreement, for the segment.
    pub(crate) const fn code(self) -> u8 {
        match self {
            Failure::Required => tuned::DIFFERENT,
            Failure::OtherOperation | Failure::AbsentRank => tuned::ABSENT_RANK,
            _ => tuned::UNDECIDED,
        }
    }

    /// The error, for people.
    pub(crate) const fn text(self) -> &'static [u8] {
        match self {
            Failure::Required => b"the ranks do not have the same tuner rules, and RINGWATCH_TUNE_REQUIRE is set. Give every rank the same RINGWATCH_TUNE; NCCL_DEBUG=WARN names the ranks.",
            Failure::RequiredButNotBlocking => b"RINGWATCH_TUNE_REQUIRE is set, and ranks cannot agree on the tuner's rules in a communicator that does not block. Make it block (blocking=1), or unset the variable.",
            Failure::OtherOperation => b"a rank made another operation in the place of the agreement on the tuner's rules. With RINGWATCH_TUNE_NODES every rank has to preload the library (ringwatch run --preload --tune-nodes).",
            Failure::AbsentRank => b"a rank took no part in the agreement on the tuner's rules within RINGWATCH_TUNE_WAIT_MS. With RINGWATCH_TUNE_NODES every rank has to preload the library (ringwatch run --preload --tune-nodes), and has to make the communicator in the same way.",
            Failure::TooMany => b"a group makes more communicators than ranks can agree on at once (64). Make fewer in a group, or unset RINGWATCH_TUNE_NODES.",
            Failure::NoResources => b"this rank got no GPU memory, stream or thread for the agreement on the tuner's rules, for which the other ranks wait.",
            Failure::Refused => b"NCCL refused the all-gather for the agreement on the tuner's rules, for which the other ranks wait.",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(rank: u32, hash: u64, lack: u8) -> Part {
        Part { comm_id: Some(7), ticket: None, rank, hash, lack }
    }

    #[test]
    fn every_rank_draws_the_same_conclusion() {
        let all = |parts: &[Part]| parts.iter().map(Part::words).collect::<Vec<_>>();
        let same = [part(0, 5, 0), part(1, 5, 0)];
        assert!(same.iter().all(|p| p.conclude(&all(&same)) == Ok(())));
        for other in [part(1, 6, 0), part(1, 0, tuned::MISSING), part(1, 5, tuned::REFUSED)] {
            let parts = [part(0, 5, 0), other];
            assert!(parts.iter().all(|p| p.conclude(&all(&parts)) == Ok(())), "the job goes on");
        }
    }

    #[test]
    fn bytes_of_another_operation_are_no_contribution() {
        let parts = [part(0, 5, 0), part(1, 5, 0)];
        let good = [parts[0].words(), parts[1].words()];
        for bad in [
            [[0; WORDS], good[1]],
            [good[1], good[0]],
            [good[0], [good[1][0], good[1][1] ^ 1, good[1][2], good[1][3]]],
            [good[0], [good[1][0], good[1][1], good[1][2] ^ REQUIRED, good[1][3]]],
        ] {
            assert_eq!(parts[0].conclude(&bad), Err(Failure::OtherOperation));
        }
    }
}
