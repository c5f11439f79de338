//! The operations of a communicator that took the longest, with their ranks.

use super::{comm_name, ended_ns};
use crate::join::{Finished, FinishedPart, Join};
use crate::model::{Algo, Proto, Rank, Track};

/// Operations that are kept of a communicator.
const KEPT: usize = 8;
/// Ranks of an operation that are kept: those that came last, and those that waited longest.
const RANKS: usize = 64;

/// An operation that took long. Times are host monotonic ns.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Slow {
    pub(super) communicator: String,
    pub(super) operation: String,
    pub(super) order: u64,
    pub(super) bytes: Option<u64>,
    pub(super) algorithm: Option<Algo>,
    pub(super) protocol: Option<Proto>,
    pub(super) began_ns: u64,
    /// From the start of the first rank's kernel to the end of the last one's.
    pub(super) took_ns: u64,
    pub(super) transfer_ns: Option<u64>,
    pub(super) late: Option<(Rank, u64)>,
    pub(super) ranks: usize,
    pub(super) parts: Vec<FinishedPart>,
}

/// The slowest operations, the slowest one first.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Slowest(Vec<Slow>);

impl Slowest {
    pub(super) fn take(&mut self, op: &Finished, join: &Join) {
        // Hosts run ahead of their GPUs: from the call on an operation may wait for all those before it.
        let starts = op.parts.iter().filter_map(|p| p.started_ns);
        let (Some(began_ns), Some(end_ns)) = (starts.min(), op.parts.iter().filter_map(ended_ns).max())
        else {
            return;
        };
        let took_ns = end_ns.saturating_sub(began_ns);
        let is_full = self.0.len() >= KEPT;
        if is_full && self.0.last().is_some_and(|least| least.took_ns >= took_ns) {
            return;
        }
        self.0.truncate(KEPT - 1);
        let at = self.0.partition_point(|s| s.took_ns >= took_ns);
        let slow = Slow {
            communicator: comm_name(join, op.comm),
            operation: match op.track {
                Track::Pair(from, to) => format!("{} {from}->{to}", op.func),
                Track::Collective | Track::Replay => op.func.to_string(),
            },
            order: op.operation.order,
            bytes: op.operation.bytes,
            algorithm: op.operation.algo,
            protocol: op.operation.proto,
            began_ns,
            took_ns,
            transfer_ns: op.transfer_ns,
            late: op.late.map(|l| (l.rank, l.by_ns)),
            ranks: op.parts.len(),
            parts: notable(&op.parts),
        };
        self.0.insert(at, slow);
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Slow> {
        self.0.iter()
    }
}

/// The parts by rank; of many those that came last and those that waited longest.
fn notable(parts: &[FinishedPart]) -> Vec<FinishedPart> {
    let mut all: Vec<&FinishedPart> = parts.iter().collect();
    all.sort_by_key(|p| std::cmp::Reverse(p.started_ns.or(p.issued_ns)));
    if all.len() > RANKS {
        let first = all.split_off(all.len() - RANKS / 2);
        all.truncate(RANKS / 2);
        all.extend(first);
    }
    all.sort_by_key(|p| p.rank);
    // Network transfers are not shown.
    all.into_iter().map(|p| FinishedPart { net: Vec::new(), ..p.clone() }).collect()
}
