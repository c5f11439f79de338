//! Agreement of the ranks on one node, while NCCL makes their communicator.
//!
//! Rules apply on all ranks or on none: ranks that decide differently hang. The wait is bounded, and takes place only where
//! the user asked for rules.

use super::roll::{Arrival, NO_RANK, RANKS_MAX, RECORD_BYTES, RECORDS_MAX, Record, Tally, records};
use crate::runtime::clock::now_ns;
use crate::runtime::log::Log;
use crate::runtime::process::Identity;
use crate::runtime::segment_name::Text;
use crate::runtime::settings::{self, Settings};
use crate::runtime::sys::{self, Fd};
use crate::runtime::{directory, shm};
use ringwatch_wire::codes::tuned;
use ringwatch_wire::sync::Word;

/// A roll's name: `tune-`, the communicator, `.roll`.
type Name = Text<48>;

const PREFIX: &[u8] = b"tune-";
const SUFFIX: &[u8] = b".roll";
/// A roll that is this old belongs to ranks that died while they made their communicator. The longest wait is shorter.
const STALE_NS: u64 = 3_600_000_000_000;
/// Names of the directory that are searched for such rolls.
const NAMES_MAX: u32 = 4096;
/// The wait where rules are known to be off, and after a rank of this process has waited in vain. A job of many
/// communicators would otherwise wait long at each.
const SHORT_WAIT_NS: u64 = 1_000_000_000;

/// 1 once a wait was in vain.
static WAITED_IN_VAIN: Word = Word::new(0);

/// A communicator whose ranks have to agree.
#[derive(Debug, Clone, Copy)]
pub(super) struct Party {
    /// NCCL's id of it.
    pub(super) comm_id: u64,
    /// Its ranks, all on this node.
    pub(super) ranks: u32,
    /// This rank's entry.
    pub(super) own: Arrival,
}

/// How a communicator's ranks have decided, and the text that says who is the cause.
pub(super) struct Outcome {
    /// One of [`tuned`].
    pub(super) code: u8,
    pub(super) causes: Text<256>,
}

impl Outcome {
    pub(super) fn new(code: u8) -> Self {
        Outcome { code, causes: Text::new() }
    }
}

/// Enters this rank in the roll, and waits until the ranks have decided.
pub(super) fn agree(party: &Party) -> Outcome {
    if party.ranks > RANKS_MAX {
        return Outcome::new(tuned::NOT_AGREED);
    }
    let mut name = Name::new();
    name.push(PREFIX).push_digits(party.comm_id).push(SUFFIX);
    let Some((dir, roll)) = open(&name, party.ranks) else { return Outcome::new(tuned::NO_DIRECTORY) };
    if !sys::append(&roll, &Record::Arrival(party.own).to_bytes()) {
        return Outcome::new(tuned::NO_DIRECTORY);
    }
    let code = decide(party, &roll);
    // Ranks that are here have it open. One that comes later waits in a roll of its own, in vain.
    sys::unlink(&dir, name.as_c());
    let arrivals = |each: &mut dyn FnMut(Arrival)| {
        records(&roll, |record| {
            if let Record::Arrival(a) = record {
                each(a);
            }
            true
        });
    };
    Outcome { code, causes: causes(party.ranks, code, &arrivals) }
}

/// Opens the roll, which the first rank makes.
fn open(name: &Name, ranks: u32) -> Option<(Fd, Fd)> {
    let (quiet, identity) = (Log::new(None), Identity::read());
    let dir = directory::open(&Settings::from_environment(&quiet), &identity, &quiet).ok()?;
    shm::suitable(&sys::file_system(&dir)?, &quiet).ok()?;
    remove_stale(&dir, identity.uid);
    let roll = sys::open_to_append(&dir, name.as_c())?;
    let facts = sys::facts(&roll)?;
    // Records must not meet a full file system half-way.
    let bytes = (2 * ranks as usize * RECORD_BYTES).min(RECORDS_MAX * RECORD_BYTES);
    let is_ours = facts.is_regular && facts.uid == identity.uid;
    if is_ours && sys::reserve_behind(&roll, bytes as u64) { Some((dir, roll)) } else { None }
}

/// The verdict of the roll, to which this rank adds its own where there is none yet.
fn decide(party: &Party, roll: &Fd) -> u8 {
    let usual_wait_ns = settings::tune_wait_ns();
    let wait_ns = if WAITED_IN_VAIN.get() == 0 { usual_wait_ns } else { usual_wait_ns.min(SHORT_WAIT_NS) };
    let begun = now_ns();
    loop {
        let tally = Tally::of(roll);
        if let Some(code) = tally.verdict {
            return code;
        }
        let waited_ns = now_ns().saturating_sub(begun);
        let Some(code) = conclusion(party.ranks, &tally, waited_ns, wait_ns) else {
            sys::nap();
            continue;
        };
        if code == tuned::ABSENT_RANK {
            WAITED_IN_VAIN.set(1);
        }
        if sys::append(roll, &Record::Verdict(code).to_bytes()) {
            // Another rank's verdict may stand before this one. There is none where somebody has shortened the file.
            return Tally::of(roll).verdict.unwrap_or(tuned::NO_DIRECTORY);
        }
        if waited_ns > wait_ns.saturating_mul(2) {
            return tuned::NO_DIRECTORY;
        }
        sys::nap();
    }
}

/// Derives the verdict from the arrivals; `None` while it is open.
fn conclusion(ranks: u32, tally: &Tally, waited_ns: u64, wait_ns: u64) -> Option<u8> {
    let is_complete = tally.arrivals >= ranks;
    if tally.arrivals == 0 {
        Some(tuned::NO_DIRECTORY)
    } else if !tally.is_unanimous || tally.arrivals > ranks {
        // Only the names of the ranks are still open, which need all of them.
        if is_complete || waited_ns >= wait_ns.min(SHORT_WAIT_NS) { Some(tuned::DIFFERENT) } else { None }
    } else if is_complete {
        Some(tuned::AGREED)
    } else if waited_ns >= wait_ns {
        Some(tuned::ABSENT_RANK)
    } else {
        None
    }
}

/// Calls a function with each rank's entry, in any order.
type Arrivals<'a> = &'a dyn Fn(&mut dyn FnMut(Arrival));

/// Names the ranks that are the cause, as far as they are known: `rank 3 has no rule file, rank 5 has other rules`.
pub(super) fn causes(ranks: u32, code: u8, arrivals: Arrivals<'_>) -> Text<256> {
    let mut text = Text::new();
    let mut tally = Tally::new();
    arrivals(&mut |a| tally.add(Record::Arrival(a)));
    let usual = tally.usual_hash;
    let mut has_come = [0u64; RANKS_MAX as usize / 64];
    let mut all_known = true;
    let mut named = 0;
    arrivals(&mut |a| {
        match has_come.get_mut((a.rank / 64) as usize) {
            Some(word) => *word |= 1 << (a.rank % 64),
            None => all_known = false,
        }
        let what: &[u8] = match a.lack {
            tuned::MISSING => b" cannot read its rule file",
            tuned::REFUSED => b" refuses its rule file",
            tuned::NO_ID => b" has no tuner that knows the communicator",
            _ if a.hash != usual => b" has other rules",
            _ => return,
        };
        name_rank(&mut text, a.rank, &mut named).push(what);
    });
    if code == tuned::ABSENT_RANK && all_known {
        for rank in 0..ranks.min(RANKS_MAX) {
            let word = has_come.get((rank / 64) as usize).copied().unwrap_or(0);
            if word >> (rank % 64) & 1 == 0 {
                name_rank(&mut text, rank, &mut named).push(b" takes no part");
            }
        }
    } else if code == tuned::ABSENT_RANK {
        text.push(b"not all ranks take part");
    }
    text
}

fn name_rank<'a>(text: &'a mut Text<256>, rank: u32, named: &mut u32) -> &'a mut Text<256> {
    if *named > 0 {
        text.push(b", ");
    }
    *named += 1;
    if rank == NO_RANK { text.push(b"a rank") } else { text.push(b"rank ").push_number(u64::from(rank), 10) }
}

/// Removes rolls of ranks that died.
fn remove_stale(dir: &Fd, uid: u32) {
    let now = sys::clock_ns(sys::REALTIME);
    let mut searched = 0;
    // The list has a place of its own, which a second search of the same descriptor would continue.
    sys::names(dir, |name| {
        searched += 1;
        let is_roll = name.to_bytes().starts_with(PREFIX) && name.to_bytes().ends_with(SUFFIX);
        if is_roll
            && let Some(facts) = sys::facts_at(dir, name)
            && facts.is_regular
            && facts.uid == uid
            && now.saturating_sub(facts.modified_ns) > STALE_NS
        {
            sys::unlink(dir, name);
        }
        searched < NAMES_MAX
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tally(hashes: &[u64]) -> Tally {
        let mut tally = Tally::new();
        for (rank, hash) in hashes.iter().enumerate() {
            tally.add(Record::Arrival(Arrival { rank: rank as u32, hash: *hash, lack: 0 }));
        }
        tally
    }

    #[test]
    fn all_ranks_agree_or_the_rules_are_off() {
        const S: u64 = 1_000_000_000;
        for (hashes, waited_s, wanted) in [
            (&[5][..], 9, None),
            (&[5, 5, 5][..], 9, None),
            (&[5, 5, 5, 5][..], 0, Some(tuned::AGREED)),
            (&[5, 5, 5, 5][..], 10, Some(tuned::AGREED)),
            (&[5, 6][..], 0, None),
            (&[5, 6][..], 1, Some(tuned::DIFFERENT)),
            (&[5, 6, 5, 5][..], 0, Some(tuned::DIFFERENT)),
            (&[0][..], 1, Some(tuned::DIFFERENT)),
            (&[0, 0, 0, 0][..], 0, Some(tuned::DIFFERENT)),
            (&[5, 5, 5, 5, 5][..], 0, Some(tuned::DIFFERENT)),
            (&[5, 5, 5][..], 10, Some(tuned::ABSENT_RANK)),
            (&[][..], 0, Some(tuned::NO_DIRECTORY)),
        ] {
            let got = conclusion(4, &tally(hashes), waited_s * S, 10 * S);
            assert_eq!(got, wanted, "{hashes:?} after {waited_s} s");
        }
    }
}
