//! Names of traces and spans: the same on every node that sees a part of an operation, without asking anybody.

use crate::model::{CommId, FindingId, Rank, Track};

/// The trace of one operation: a hash of its communicator, its track and its issue order.
pub fn of_operation(comm: CommId, track: Track, order: u64) -> u128 {
    let (kind, a, b) = match track {
        Track::Collective => (1, Rank(0), Rank(0)),
        Track::Replay => (2, Rank(0), Rank(0)),
        Track::Pair(a, b) => (3, a, b),
    };
    let (hash, pair) = (comm.nccl_hash(), u64::from(a.0) << 32 | u64::from(b.0));
    match comm.owner() {
        // Another user's spans have no place in this trace.
        Some(owner) => wide(&[kind, hash, pair, order, u64::from(owner)]),
        None => wide(&[kind, hash, pair, order]),
    }
}

/// The trace in which a finding has its own span.
pub fn of_finding(id: FindingId) -> u128 {
    wide(&[4, id.0])
}

/// The parts of a trace, each of which is a span.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Piece {
    /// The operation itself.
    Root,
    /// The operation again, when it ended after it was told as hung.
    Complete,
    /// One rank's part.
    Rank(Rank),
    /// One rank's part while it is not over.
    Pending(Rank),
    /// Its kernel, where waiting and transfer cannot be told apart.
    Kernel(Rank),
    /// Its waiting for others.
    Waiting(Rank),
    /// Its transfer.
    Transfer(Rank),
    /// One of its network transfers, by place in its list.
    Net(Rank, u32),
}

/// The name of a span within its trace.
pub fn of_span(trace: u128, piece: Piece) -> u64 {
    let (kind, rank, n) = match piece {
        Piece::Root => (1, 0, 0),
        Piece::Complete => (2, 0, 0),
        Piece::Rank(r) => (3, r.0, 0),
        Piece::Pending(r) => (4, r.0, 0),
        Piece::Kernel(r) => (5, r.0, 0),
        Piece::Waiting(r) => (6, r.0, 0),
        Piece::Transfer(r) => (7, r.0, 0),
        Piece::Net(r, n) => (8, r.0, n),
    };
    let high = (trace >> 64) as u64;
    let low = trace as u64;
    // Zero is no span.
    narrow(0x7370_616e, &[high, low, kind, u64::from(rank), u64::from(n)]).max(1)
}

/// True for the share of traces that is kept from the beginning: every node decides alike, by the last 56 bits of
/// the id, as consistent probability sampling wants it.
pub fn is_sampled(trace: u128, ratio: f64) -> bool {
    const BITS: u64 = (1 << 56) - 1;
    (trace as u64 & BITS) as f64 >= (1.0 - ratio) * (BITS + 1) as f64
}

fn wide(words: &[u64]) -> u128 {
    let id = u128::from(narrow(0x7472_6163, words)) << 64 | u128::from(narrow(0x6964, words));
    // Zero is no trace.
    id.max(1)
}

/// A hash that is the same in every build: words are multiplied in and the result is mixed (the finalizer of
/// SplitMix64), so that every bit depends on all of them.
fn narrow(seed: u64, words: &[u64]) -> u64 {
    words.iter().fold(mix(seed), |state, word| mix(state ^ mix(*word)))
}

fn mix(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn ids_stay_what_they_are() {
        // Nodes with different builds write into the same trace: these numbers may never change.
        let trace = of_operation(CommId::unowned(0x1122_3344_5566_7788), Track::Collective, 42);
        assert_eq!(format!("{trace:032x}"), "283758902297763514e8e98f8c3a7dbe");
        assert_eq!(format!("{:016x}", of_span(trace, Piece::Root)), "e3a60ffec98fca05");
        assert_eq!(format!("{:016x}", of_span(trace, Piece::Rank(Rank(3)))), "827f1583a3744be0");
    }

    #[test]
    fn ids_differ() {
        let mut traces = HashSet::new();
        let mut spans = HashSet::new();
        for comm in 0..10 {
            for order in 0..200 {
                for track in [
                    Track::Collective,
                    Track::Replay,
                    Track::Pair(Rank(0), Rank(1)),
                    Track::Pair(Rank(1), Rank(0)),
                ] {
                    let trace = of_operation(CommId::unowned(comm), track, order);
                    assert!(traces.insert(trace));
                    for r in 0..4 {
                        for piece in [
                            Piece::Rank(Rank(r)),
                            Piece::Pending(Rank(r)),
                            Piece::Kernel(Rank(r)),
                            Piece::Waiting(Rank(r)),
                            Piece::Transfer(Rank(r)),
                            Piece::Net(Rank(r), 0),
                            Piece::Net(Rank(r), 1),
                        ] {
                            assert!(spans.insert((trace, of_span(trace, piece))));
                        }
                    }
                    assert!(spans.insert((trace, of_span(trace, Piece::Root))));
                    assert!(spans.insert((trace, of_span(trace, Piece::Complete))));
                }
            }
        }
    }

    #[test]
    fn the_share_of_sampled_traces_is_what_was_asked_for_and_a_larger_one_contains_a_smaller_one() {
        let traces: Vec<u128> =
            (0..20_000).map(|o| of_operation(CommId::unowned(7), Track::Collective, o)).collect();
        let share = |ratio: f64| traces.iter().filter(|t| is_sampled(**t, ratio)).count();
        assert_eq!((share(0.0), share(1.0)), (0, 20_000));
        assert!((1_800..2_200).contains(&share(0.1)), "{}", share(0.1));
        assert!(traces.iter().all(|t| !is_sampled(*t, 0.1) || is_sampled(*t, 0.5)));
    }
}
