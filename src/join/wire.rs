//! What an operation should put on the wire of one rank, from its algorithm, protocol, size and ranks.
//!
//! Where the way of the data is not certain, nothing is expected, which is not zero: NVLS and its like send once what
//! others receive many times, and between nodes only some ranks of a ring meet a NIC.

use crate::model::{Algo, Func, Proto};

/// Bytes that one rank should send and receive.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Wire {
    /// Sent.
    pub tx_bytes: f64,
    /// Received.
    pub rx_bytes: f64,
}

impl Wire {
    fn both(bytes: f64) -> Self {
        Wire { tx_bytes: bytes, rx_bytes: bytes }
    }

    /// Both directions, so many times.
    #[must_use]
    pub fn times(self, factor: f64) -> Self {
        Wire { tx_bytes: self.tx_bytes * factor, rx_bytes: self.rx_bytes * factor }
    }
}

/// A collective as one of its ranks runs it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shape {
    /// What it is.
    pub func: Func,
    /// How it runs.
    pub algo: Option<Algo>,
    /// With which protocol.
    pub proto: Option<Proto>,
    /// Message size as nccl-tests counts it.
    pub bytes: u64,
    /// Ranks of the communicator.
    pub ranks: u32,
    /// Nodes they are on, as NCCL counts them.
    pub nodes: Option<u32>,
    /// True for the root of a rooted operation.
    pub is_root: bool,
}

/// How many bytes go over the wire for one of data. LL sends four bytes of flag with every four of data; LL128 eight
/// with every 120.
fn overhead(proto: Option<Proto>) -> Option<f64> {
    Some(match proto? {
        Proto::Simple => 1.0,
        Proto::Ll => 2.0,
        Proto::Ll128 => 128.0 / 120.0,
    })
}

/// What a rank of a collective sends and receives over NVLink. Known for communicators inside one node.
///
/// With n ranks and S bytes:
/// - A ring all-reduce is a reduce-scatter and an all-gather of n - 1 steps each, and every step moves S / n: 2 (n - 1) / n S
///   on every rank. Each half alone is an all-gather or a reduce-scatter.
/// - Inside a node NCCL's tree is a chain: all but one rank send S up, and all but one send S down. Together
///   2 (n - 1) S; who stands at the chain's ends is not known, so each rank is given the mean.
/// - A ring broadcast goes round from the root: the last rank sends nothing, and is any of the others. A reduce goes
///   the other way.
/// - Everybody to everybody moves S / n from each rank to each other one; a gather or scatter S / n between the root and
///   each other one.
pub fn expected(shape: &Shape) -> Option<Wire> {
    if shape.ranks <= 1 {
        return Some(Wire::default());
    }
    if shape.nodes != Some(1) {
        return None;
    }
    let (n, size) = (f64::from(shape.ranks), shape.bytes as f64);
    let part = (n - 1.0) / n * size;
    // Seen from one that is not the root: the last of the ring is one of n - 1.
    let inner = (n - 2.0) / (n - 1.0) * size;
    let asymmetric = |tx_bytes, rx_bytes| Wire { tx_bytes, rx_bytes };
    let by_transfers = match (shape.func, shape.is_root) {
        (Func::AlltoAll, _) => Some(Wire::both(part)),
        (Func::Scatter, true) | (Func::Gather, false) => {
            Some(asymmetric(if shape.is_root { part } else { size / n }, 0.0))
        }
        (Func::Scatter, false) | (Func::Gather, true) => {
            Some(asymmetric(0.0, if shape.is_root { part } else { size / n }))
        }
        _ => None,
    };
    if by_transfers.is_some() {
        return by_transfers;
    }
    let data = match (shape.algo?, shape.func, shape.is_root) {
        (Algo::Ring | Algo::Tree, Func::AllReduce, _) => Wire::both(2.0 * part),
        (Algo::Ring, Func::AllGather | Func::ReduceScatter, _) => Wire::both(part),
        (Algo::Ring, Func::Broadcast, true) => asymmetric(size, 0.0),
        (Algo::Ring, Func::Broadcast, false) => asymmetric(inner, size),
        (Algo::Ring, Func::Reduce, true) => asymmetric(0.0, size),
        (Algo::Ring, Func::Reduce, false) => asymmetric(size, inner),
        _ => return None,
    };
    Some(data.times(overhead(shape.proto)?))
}

/// What a transfer from one rank to another puts on the wire: its size, once. NCCL tells no protocol of transfers; only
/// the smallest go by LL, and those hardly count.
pub fn transfer(bytes: u64, sends: bool, to_itself: bool) -> Wire {
    let bytes = bytes as f64;
    match (to_itself, sends) {
        (true, _) => Wire::default(),
        (false, true) => Wire { tx_bytes: bytes, rx_bytes: 0.0 },
        (false, false) => Wire { tx_bytes: 0.0, rx_bytes: bytes },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_200_000;

    fn ring(func: Func, is_root: bool) -> Shape {
        Shape {
            func,
            algo: Some(Algo::Ring),
            proto: Some(Proto::Simple),
            bytes: S,
            ranks: 4,
            nodes: Some(1),
            is_root,
        }
    }

    fn pair(shape: &Shape) -> Option<(f64, f64)> {
        expected(shape).map(|w| (w.tx_bytes, w.rx_bytes))
    }

    #[test]
    fn rings_by_hand() {
        assert_eq!(pair(&ring(Func::AllReduce, false)), Some((1_800_000.0, 1_800_000.0)));
        assert_eq!(pair(&ring(Func::AllGather, false)), Some((900_000.0, 900_000.0)));
        assert_eq!(pair(&ring(Func::ReduceScatter, false)), Some((900_000.0, 900_000.0)));
        assert_eq!(pair(&ring(Func::AlltoAll, false)), Some((900_000.0, 900_000.0)));
        assert_eq!(pair(&ring(Func::Broadcast, true)), Some((1_200_000.0, 0.0)));
        assert_eq!(pair(&ring(Func::Reduce, true)), Some((0.0, 1_200_000.0)));
    }

    #[test]
    fn what_all_ranks_send_is_what_all_receive() {
        for func in [
            Func::AllReduce,
            Func::AllGather,
            Func::ReduceScatter,
            Func::Broadcast,
            Func::Reduce,
            Func::AlltoAll,
            Func::Scatter,
            Func::Gather,
        ] {
            for ranks in 2..9 {
                let sum = (0..ranks).fold((0.0, 0.0), |(tx, rx), r| {
                    let shape = Shape { ranks, ..ring(func, r == 0) };
                    let w = expected(&shape).expect("a ring in one node");
                    (tx + w.tx_bytes, rx + w.rx_bytes)
                });
                assert!((sum.0 - sum.1).abs() < 1.0, "{func} {ranks}: {sum:?}");
            }
        }
    }

    #[test]
    fn protocols_add_their_flags() {
        let with = |proto| pair(&Shape { proto: Some(proto), ..ring(Func::AllReduce, false) });
        assert_eq!(with(Proto::Ll), Some((3_600_000.0, 3_600_000.0)));
        assert_eq!(with(Proto::Ll128), Some((1_920_000.0, 1_920_000.0)));
    }

    #[test]
    fn what_is_not_certain_is_absent() {
        let all = ring(Func::AllReduce, false);
        for shape in [
            Shape { nodes: Some(2), ..all },
            Shape { nodes: None, ..all },
            Shape { algo: Some(Algo::Nvls), ..all },
            Shape { algo: None, ..all },
            Shape { proto: None, ..all },
            Shape { algo: Some(Algo::Tree), func: Func::AllGather, ..all },
        ] {
            assert_eq!(expected(&shape), None, "{shape:?}");
        }
        assert_eq!(expected(&Shape { ranks: 1, nodes: None, ..all }), Some(Wire::default()));
    }

    #[test]
    fn a_transfer_goes_one_way() {
        assert_eq!(transfer(7, true, false), Wire { tx_bytes: 7.0, rx_bytes: 0.0 });
        assert_eq!(transfer(7, false, false), Wire { tx_bytes: 0.0, rx_bytes: 7.0 });
        assert_eq!(transfer(7, true, true), Wire::default());
    }
}
