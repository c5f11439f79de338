//! What ranks say their collectives are, one number each: compared long before a GPU would hang in a wrong one.
//!
//! The numbers only give rise to suspicion: the records, which are asked for then, are the proof.

use crate::model::{OpRecord, Signatures};
use std::collections::VecDeque;

/// Orders that wait for the other ranks' numbers at most.
const WAITING: usize = 4096;
/// Suspicions of a communicator; with more the numbers are no good there.
const SUSPECTS: usize = 8;
/// Orders that are looked at with a suspicious one: they tell a wrong call from one too many.
const BEHIND: u64 = 3;

/// The number of an operation in a communicator of so many ranks: what every rank knows of it, whatever was loaded there.
pub fn signature(op: &OpRecord, ranks: Option<u32>) -> u32 {
    let root = op.root.filter(|_| op.func.is_rooted()).map_or(u64::MAX, |r| u64::from(r.0));
    let words = [op.func as u64, op.bytes(ranks).unwrap_or(op.count), root];
    let mixed = words.into_iter().fold(0x9e37_79b9_7f4a_7c15_u64, |h, n| {
        let h = (h ^ n).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        h ^ h >> 29
    });
    (mixed >> 32) as u32
}

/// One communicator's numbers.
#[derive(Debug, Clone, Default)]
pub(super) struct Signed {
    /// The order of the first that waits.
    from: u64,
    /// The number that came first, and how many ranks have said one.
    waiting: VecDeque<(u32, u32)>,
    suspects: Vec<u64>,
}

impl Signed {
    /// Takes a rank's numbers; so many ranks will say theirs.
    pub(super) fn take(&mut self, s: &Signatures, expected: usize) {
        if self.waiting.is_empty() {
            self.from = self.from.max(s.from);
        }
        for (order, number) in (s.from..).zip(&s.signatures) {
            let Some(at) = order.checked_sub(self.from).and_then(|n| usize::try_from(n).ok()) else {
                continue;
            };
            if at >= WAITING {
                break;
            }
            // What nobody has told of yet is nobody's.
            while self.waiting.len() <= at {
                self.waiting.push_back((0, 0));
            }
            let place = &mut self.waiting[at];
            if place.1 == 0 {
                place.0 = *number;
            } else if place.0 != *number && self.suspects.len() < SUSPECTS {
                self.suspects.push(order);
            }
            place.1 += 1;
        }
        while self
            .waiting
            .front()
            .is_some_and(|p| p.1 as usize >= expected || self.waiting.len() > WAITING / 2)
        {
            self.waiting.pop_front();
            self.from += 1;
        }
    }

    /// The orders whose records would show whether the ranks disagree.
    pub(super) fn suspects(&self) -> impl Iterator<Item = u64> {
        // The first is the cause, whatever comes behind it.
        let first = self.suspects.iter().min().copied();
        first.into_iter().flat_map(|o| o..=o.saturating_add(BEHIND))
    }
}
