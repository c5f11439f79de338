//! The bytes that an operation should put on the wire of one rank, from its algorithm, protocol, size and ranks.
//!
//! Where the way of the data is not certain, nothing is expected, which is not zero: NVLS and its like send once what
//! others receive many times, and between nodes only some ranks of a ring meet a NIC. There the node as a whole is asked
//! for ([`crossing`]).

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
    /// The function.
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

/// The bytes that a rank of a collective sends and receives over NVLink. Known for communicators inside one node.
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

/// The bytes that one node sends and receives over the network for a collective. `here` are the communicator's ranks
/// on this node; `root_here` says whether the root of a rooted operation is among them.
///
/// With n ranks on N nodes and S bytes:
/// - NCCL's rings go through all ranks of a node before they leave it: each ring enters each node once and leaves it once,
///   whatever GPU and NIC it does so by, and however many ranks the node has. What crosses such a boundary is what any
///   rank of the ring hands to its next one. In an all-gather that is every block but the next rank's own: (n - 1) / n S;
///   in a reduce-scatter likewise; an all-reduce is both: 2 (n - 1) / n S. Several rings share S among them, so that the
///   sum over rings is the same.
/// - Two nodes are one edge of each of NCCL's two trees. Over it the lower node sends its sums up and gets the result
///   down, each of that tree's part of S. However S is divided between the trees, each node sends S and receives S.
///   With more nodes it depends on where in each tree a node stands, and on how many of the channels each tree gets:
///   that is not known.
/// - A ring broadcast or reduce enters the root's own node again where the root is not the first of its node's ranks in
///   the ring, and ends before the last hop to it, differently on each ring. It is known for one rank on each of two
///   nodes alone.
/// - Everybody to everybody moves S / n from each rank to each other one, so here (n - here) / n S; a gather or scatter S / n
///   between the root and each rank of another node.
///
/// NVLS, CollNet and PAT are not known. Flags of LL and LL128 go over the network as they do over NVLink; headers of
/// packets do not count.
pub fn crossing(shape: &Shape, here: u32, root_here: Option<bool>) -> Option<Wire> {
    let nodes = shape.nodes.or((shape.ranks <= 1).then_some(1))?;
    if nodes <= 1 {
        return Some(Wire::default());
    }
    // A node without a rank, or ranks without a node: somebody counts differently.
    if here == 0 || u64::from(here) + u64::from(nodes) - 1 > u64::from(shape.ranks) {
        return None;
    }
    let (n, size) = (f64::from(shape.ranks), shape.bytes as f64);
    let (inside, outside) = (f64::from(here), n - f64::from(here));
    let sent = |bytes| Wire { tx_bytes: bytes, rx_bytes: 0.0 };
    let received = |bytes| Wire { tx_bytes: 0.0, rx_bytes: bytes };
    match (shape.func, root_here) {
        (Func::AlltoAll, _) => return Some(Wire::both(inside * outside / n * size)),
        (Func::Scatter, Some(true)) => return Some(sent(outside / n * size)),
        (Func::Scatter, Some(false)) => return Some(received(inside / n * size)),
        (Func::Gather, Some(true)) => return Some(received(outside / n * size)),
        (Func::Gather, Some(false)) => return Some(sent(inside / n * size)),
        _ => {}
    }
    let part = (n - 1.0) / n * size;
    let data = match (shape.algo?, shape.func, root_here) {
        (Algo::Ring, Func::AllReduce, _) => Wire::both(2.0 * part),
        (Algo::Ring, Func::AllGather | Func::ReduceScatter, _) => Wire::both(part),
        (Algo::Tree, Func::AllReduce, _) if nodes == 2 => Wire::both(size),
        (Algo::Ring, Func::Broadcast, Some(is_root)) if shape.ranks == 2 => {
            if is_root {
                sent(size)
            } else {
                received(size)
            }
        }
        (Algo::Ring, Func::Reduce, Some(is_root)) if shape.ranks == 2 => {
            if is_root {
                received(size)
            } else {
                sent(size)
            }
        }
        _ => return None,
    };
    Some(data.times(overhead(shape.proto)?))
}

/// The bytes that a transfer from one rank to another puts on the wire: its size, once. NCCL reports no protocol of
/// transfers; only the smallest go by LL, and those hardly count.
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

    fn across(func: Func, algo: Algo, ranks: u32, nodes: u32) -> Shape {
        Shape { ranks, nodes: Some(nodes), algo: Some(algo), ..ring(func, false) }
    }

    fn near(w: Option<Wire>, tx: f64, rx: f64) -> bool {
        w.is_some_and(|w| (w.tx_bytes - tx).abs() < 1e-3 && (w.rx_bytes - rx).abs() < 1e-3)
    }

    #[test]
    fn two_nodes_with_two_ranks_each_by_hand() {
        let s = S as f64;
        let of = |func, algo, root| crossing(&across(func, algo, 4, 2), 2, root);
        // Over each of the two boundaries of the ring 2 (n - 1) / n of the size, once each way for a node.
        assert!(near(of(Func::AllReduce, Algo::Ring, None), 1.5 * s, 1.5 * s));
        assert!(near(of(Func::AllGather, Algo::Ring, None), 0.75 * s, 0.75 * s));
        assert!(near(of(Func::AllReduce, Algo::Tree, None), s, s));
        assert!(near(of(Func::AlltoAll, Algo::Ring, None), s, s));
        assert!(near(of(Func::Scatter, Algo::Ring, Some(true)), 0.5 * s, 0.0));
        assert!(near(of(Func::Gather, Algo::Ring, Some(false)), 0.5 * s, 0.0));
        assert_eq!(of(Func::Broadcast, Algo::Ring, Some(true)), None);
        assert_eq!(of(Func::Gather, Algo::Ring, None), None, "where the root is is not known");
        let alone = |root| crossing(&across(Func::Broadcast, Algo::Ring, 2, 2), 1, root);
        assert!(near(alone(Some(true)), s, 0.0) && near(alone(Some(false)), 0.0, s));
        let ll = Shape { proto: Some(Proto::Ll), ..across(Func::AllReduce, Algo::Ring, 4, 2) };
        assert!(near(crossing(&ll, 2, None), 3.0 * s, 3.0 * s));
    }

    #[test]
    fn what_crosses_a_boundary_and_is_not_certain_is_absent() {
        let all = across(Func::AllReduce, Algo::Ring, 8, 2);
        for shape in [
            Shape { nodes: None, ..all },
            Shape { algo: Some(Algo::Nvls), ..all },
            Shape { algo: Some(Algo::NvlsTree), ..all },
            Shape { algo: Some(Algo::Tree), nodes: Some(4), ..all },
            Shape { proto: None, ..all },
            Shape { algo: None, ..all },
        ] {
            assert_eq!(crossing(&shape, 2, None), None, "{shape:?}");
        }
        assert_eq!(crossing(&all, 8, None), None, "a node is without ranks");
        assert_eq!(crossing(&all, 0, None), None);
        assert_eq!(crossing(&Shape { nodes: Some(1), ..all }, 8, None), Some(Wire::default()));
    }

    /// Ranks one after the other in a ring over nodes of any size, block by block: what each step of NCCL's ring
    /// algorithms hands on is added up where it leaves a node.
    fn walked(func: Func, sizes: &[u32]) -> Vec<(f64, f64)> {
        let node_of: Vec<usize> =
            sizes.iter().enumerate().flat_map(|(node, n)| std::iter::repeat_n(node, *n as usize)).collect();
        let n = node_of.len();
        let block = S as f64 / n as f64;
        let mut moved = vec![(0.0, 0.0); sizes.len()];
        let mut hand_on = |from: usize, to: usize| {
            if node_of[from] != node_of[to] {
                moved[node_of[from]].0 += block;
                moved[node_of[to]].1 += block;
            }
        };
        let rounds = if func == Func::AllReduce { 2 } else { 1 };
        match func {
            Func::AlltoAll => {
                for from in 0..n {
                    (0..n).filter(|to| *to != from).for_each(|to| hand_on(from, to));
                }
            }
            _ => {
                for _ in 0..rounds * (n - 1) {
                    (0..n).for_each(|rank| hand_on(rank, (rank + 1) % n));
                }
            }
        }
        moved
    }

    proptest::proptest! {
        #[test]
        fn rings_over_nodes_are_what_a_walk_along_them_adds_up(
            sizes in proptest::collection::vec(1u32..9, 2..6),
        ) {
            let (ranks, nodes) = (sizes.iter().sum(), sizes.len() as u32);
            for func in [Func::AllReduce, Func::AllGather, Func::ReduceScatter, Func::AlltoAll] {
                for (here, (tx, rx)) in sizes.iter().zip(walked(func, &sizes)) {
                    let w = crossing(&across(func, Algo::Ring, ranks, nodes), *here, None);
                    proptest::prop_assert!(near(w, tx, rx), "{func} {sizes:?}: {w:?}, walked {tx} {rx}");
                }
            }
        }

        #[test]
        fn what_all_nodes_send_is_what_all_nodes_receive(nodes in 2u32..9, each in 1u32..9, root in 0u32..9) {
            let root = root % nodes;
            for func in [Func::Scatter, Func::Gather, Func::AlltoAll, Func::AllReduce] {
                let sum = (0..nodes).fold((0.0, 0.0), |(tx, rx), node| {
                    let shape = across(func, Algo::Ring, nodes * each, nodes);
                    let w = crossing(&shape, each, Some(node == root)).expect("it is known");
                    (tx + w.tx_bytes, rx + w.rx_bytes)
                });
                proptest::prop_assert!((sum.0 - sum.1).abs() < 1.0, "{func}: {sum:?}");
            }
        }
    }

    #[test]
    fn a_transfer_goes_one_way() {
        assert_eq!(transfer(7, true, false), Wire { tx_bytes: 7.0, rx_bytes: 0.0 });
        assert_eq!(transfer(7, false, false), Wire { tx_bytes: 0.0, rx_bytes: 7.0 });
        assert_eq!(transfer(7, true, true), Wire::default());
    }
}
