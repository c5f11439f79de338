//! Hashes of the collectives that ranks call: compared long before a GPU would hang in a wrong one.
//!
//! The numbers only give rise to suspicion: the records, which are asked for then, are the proof.

use crate::model::{DataType, Func, OpRecord, RedOp, Signatures};
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

/// Both fit into a byte that a varint would not make longer.
const _: () = assert!(DataType::ALL.len() < 16 && RedOp::ALL.len() < 8);
const DTYPE: u8 = 0x0f;
const REDOP: u8 = 0x70;

/// The code of an operation's data type and reduction, each 0 where it is not known: without the preloaded
/// library there is no reduction, and not every NCCL tells the type. They are no part of the [`signature`], or ranks
/// that know more would seem to have issued something else.
pub fn types(op: &OpRecord) -> u8 {
    // In NCCL's own form, which is left where the record of the call is missing, these are bytes.
    let raw = op.dtype == Some(DataType::Int8) && matches!(op.func, Func::AllGather | Func::Broadcast);
    let dtype = op.dtype.filter(|_| !raw).map_or(0, |d| d as u8 + 1);
    let redop = op.redop.map_or(0, |r| r as u8 + 1);
    dtype | redop << 4
}

/// The types that two ranks know together; nothing where they contradict each other.
fn together(a: u8, b: u8) -> Option<u8> {
    let part = |of: u8| match (a & of, b & of) {
        (0, x) | (x, 0) => Some(x),
        (x, y) => (x == y).then_some(x),
    };
    Some(part(DTYPE)? | part(REDOP)?)
}

/// Values of ranks for one order after the other.
#[derive(Debug, Clone)]
struct Said<T> {
    /// The order of the first that waits.
    from: u64,
    /// The values so far, each with the number of its ranks.
    waiting: VecDeque<(T, u32)>,
}

impl<T> Default for Said<T> {
    fn default() -> Self {
        Said { from: 0, waiting: VecDeque::new() }
    }
}

impl<T: Copy + Default> Said<T> {
    /// Takes what a rank says from an order on; so many will say it. Calls for each order in which it contradicts.
    fn take(
        &mut self,
        from: u64,
        what: &[T],
        expected: usize,
        merge: impl Fn(T, T) -> Option<T>,
        mut differs: impl FnMut(u64),
    ) {
        if what.is_empty() {
            return;
        }
        if self.waiting.is_empty() {
            self.from = self.from.max(from);
        }
        for (order, said) in (from..).zip(what) {
            let Some(at) = order.checked_sub(self.from).and_then(|n| usize::try_from(n).ok()) else {
                continue;
            };
            if at >= WAITING {
                break;
            }
            // What nobody has told of yet is nobody's.
            while self.waiting.len() <= at {
                self.waiting.push_back((T::default(), 0));
            }
            let place = &mut self.waiting[at];
            if place.1 == 0 {
                place.0 = *said;
            } else if let Some(both) = merge(place.0, *said) {
                place.0 = both;
            } else {
                differs(order);
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
}

/// One communicator's numbers.
#[derive(Debug, Clone, Default)]
pub(super) struct CallHashes {
    numbers: Said<u32>,
    types: Said<u8>,
    suspects: Vec<u64>,
}

impl CallHashes {
    /// Takes a rank's numbers; so many ranks will say theirs.
    pub(super) fn take(&mut self, s: &Signatures, expected: usize) {
        let suspects = &mut self.suspects;
        let mut suspect = |order| {
            if suspects.len() < SUSPECTS && !suspects.contains(&order) {
                suspects.push(order);
            }
        };
        let same = |a, b| (a == b).then_some(a);
        self.numbers.take(s.from, &s.signatures, expected, same, &mut suspect);
        self.types.take(s.from, &s.types, expected, together, &mut suspect);
    }

    /// The orders whose records would show whether the ranks disagree.
    pub(super) fn suspects(&self) -> impl Iterator<Item = u64> {
        // The first is the cause, whatever comes behind it.
        let first = self.suspects.iter().min().copied();
        first.into_iter().flat_map(|o| o..=o.saturating_add(BEHIND))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{CommId, Rank, SegmentId};

    fn said(signed: &mut CallHashes, rank: u32, signatures: &[u32], types: &[u8]) {
        let (segment, comm, rank) = (SegmentId(u64::from(rank)), CommId::unowned(7), Rank(rank));
        let (signatures, types) = (signatures.to_vec(), types.to_vec());
        signed.take(&Signatures { segment, comm, rank, from: 10, signatures, types }, 4);
    }

    const SUM: u8 = (RedOp::Sum as u8 + 1) << 4;
    const MAX: u8 = (RedOp::Max as u8 + 1) << 4;
    const FLOAT: u8 = DataType::Float32 as u8 + 1;
    const INT: u8 = DataType::Int32 as u8 + 1;

    #[test]
    fn who_does_not_know_contradicts_nobody() {
        let mut s = CallHashes::default();
        // With the preloaded library, without it, of an older version, and of an NCCL that names no type.
        said(&mut s, 0, &[5, 5], &[FLOAT | SUM, FLOAT | SUM]);
        said(&mut s, 1, &[5, 5], &[FLOAT, FLOAT]);
        said(&mut s, 2, &[5, 5], &[]);
        said(&mut s, 3, &[5, 5], &[SUM, 0]);
        assert_eq!(s.suspects().count(), 0);
    }

    #[test]
    fn another_type_or_reduction_is_suspicious_even_past_one_who_does_not_know() {
        for wrong in [INT, FLOAT | MAX, MAX] {
            let mut s = CallHashes::default();
            said(&mut s, 0, &[5, 5], &[FLOAT | SUM, FLOAT | SUM]);
            said(&mut s, 1, &[5, 5], &[FLOAT, 0]);
            said(&mut s, 2, &[5, 5], &[FLOAT, wrong]);
            assert_eq!(s.suspects().next(), Some(11), "{wrong:#x}");
        }
    }

    #[test]
    fn bytes_that_nccl_made_of_a_call_are_no_type() {
        let op = crate::join::testing::op(crate::model::Lane::Collective, 0);
        let of = |func, dtype| types(&OpRecord { func, dtype: Some(dtype), redop: None, ..op.clone() });
        assert_eq!((of(Func::AllGather, DataType::Int8), of(Func::AllGather, DataType::Float32)), (0, FLOAT));
        assert_eq!(of(Func::AllReduce, DataType::Int8), DataType::Int8 as u8 + 1);
    }
}
