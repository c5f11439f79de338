//! The operations of a class in a second, sent without their records.

use super::{FAR_LONGER_NS, Priority, Publisher, SLOW, SLOW_BY_NS, USUAL, USUAL_FEW};
use crate::cluster::message as m;
use crate::cluster::subject::{Topic, bucket};
use crate::join::{Communicator, Finished, Join};
use crate::model::{Algo, CommId, Func, Proto, Rank, Sketch, Timing, Track};
use prost::Message as _;
use std::collections::{BTreeMap, HashMap};

/// How long an operation of a kind usually takes, as a running mean.
#[derive(Debug, Default)]
pub(super) struct Usual {
    seen: u32,
    mean_ns: u64,
}

/// A class of operations that sketches tell of; the last says whether all ranks are this node's.
pub(super) type ClassOf = (CommId, Func, Option<u8>, Option<Algo>, Option<Proto>, bool);

impl Publisher {
    /// Learns how long an operation of its kind takes, and says whether this one took far longer.
    pub(super) fn is_slow(&mut self, f: &Finished) -> bool {
        let Some(longest) = f.parts.iter().filter_map(|p| p.duration_ns).max() else { return false };
        let usual = self.usual.entry((f.comm, f.func, f.size_class)).or_default();
        let limit = usual.mean_ns.saturating_mul(SLOW).saturating_add(SLOW_BY_NS);
        let far = usual.seen >= USUAL_FEW && longest > limit.saturating_add(FAR_LONGER_NS);
        let slow = far || usual.seen >= USUAL && longest > limit;
        let counts = if slow { limit } else { longest };
        usual.seen = usual.seen.saturating_add(1);
        let weight = u64::from(usual.seen.min(32));
        usual.mean_ns = (usual.mean_ns * (weight - 1) + counts) / weight;
        slow
    }

    pub(super) fn sketch(&mut self, join: &Join, f: &Finished) {
        let pair = match f.track {
            Track::Pair(from, to) => Some((from, to)),
            _ => None,
        };
        let has = |rank: Rank| f.parts.iter().any(|p| p.rank == rank);
        // A transfer counts where it is sent: both nodes see it.
        let elsewhere = pair.is_some_and(|(from, _)| !has(from));
        if elsewhere || f.began_ns.is_some_and(|t| t < self.began_ns) {
            return;
        }
        // All pairs are one class, however each of them runs.
        let (algo, proto) = if pair.is_some() { (None, None) } else { (f.operation.algo, f.operation.proto) };
        let whole = match pair {
            Some((_, to)) => has(to),
            None => f.ranks.is_some_and(|n| n as usize == f.parts.len()),
        };
        let key = (f.comm, f.func, f.size_class, algo, proto, whole);
        let own = join.communicator(f.comm).map(Communicator::members);
        let first = own.and_then(|m| m.keys().next().copied()).or_else(|| f.parts.first().map(|p| p.rank));
        let Some(rank) = first else { return };
        let segment = own.and_then(|m| m.get(&rank)).map(|m| m.record.segment);
        let segment = segment.or_else(|| f.parts.iter().find(|p| p.rank == rank).map(|p| p.segment));
        let ranks = own.map_or(f.parts.len(), BTreeMap::len) as u32;
        let from_s = self.sketched_s;
        let new = || {
            let place = |at: Option<usize>| at.map_or(0, |n| n as u32 + 1);
            m::Sketch {
                comm: f.comm.nccl_hash(),
                func: place(Func::ALL.iter().position(|k| *k == f.func)),
                size_class: f.size_class.map_or(0, |c| u32::from(c) + 1),
                algo: place(algo.and_then(|a| Algo::ALL.iter().position(|k| *k == a))),
                proto: place(proto.and_then(|a| Proto::ALL.iter().position(|k| *k == a))),
                bytes: Some(0),
                from_s,
                whole,
                ..m::Sketch::default()
            }
        };
        let sketch = self.sketches.entry(key).or_insert_with(new);
        (sketch.rank, sketch.ranks, sketch.segment) = (rank.0, ranks, segment.map(|s| s.0));
        sketch.count += 1;
        sketch.bytes = sketch.bytes.zip(f.operation.bytes).map(|(a, b)| a.saturating_add(b));
        let durations: Option<Vec<u64>> = f.parts.iter().map(|p| p.duration_ns).collect();
        if let Some(all) = durations.filter(|d| !d.is_empty()) {
            sketch.timed += 1;
            sketch.by_events += u64::from(f.parts.iter().any(|p| p.timing == Timing::Events));
            sketch.busy_ns += all.iter().sum::<u64>() / all.len() as u64;
            let at = u32::from(Sketch::bucket(all.into_iter().min().unwrap_or(0)));
            match sketch.buckets.binary_search(&at) {
                Ok(i) => sketch.counts[i] += 1,
                Err(i) => {
                    sketch.buckets.insert(i, at);
                    sketch.counts.insert(i, 1);
                }
            }
        }
    }

    pub(super) fn tell_sketches(&mut self, second: u64) {
        let mut left = HashMap::new();
        self.sketched_s = second;
        for (key, mut sketch) in std::mem::take(&mut self.sketches) {
            let over = second.saturating_sub(sketch.from_s).clamp(1, u64::from(m::Sketch::SECONDS));
            (sketch.from_s, sketch.seconds) = (second.saturating_sub(over), over as u32);
            let bytes = sketch.encoded_len();
            if self.pay(bytes, Priority::Usual) {
                self.draft(Topic::Bucket(bucket(key.0)), bytes).sketches.push(sketch);
            } else {
                // It adds up, and goes with a later second's.
                left.insert(key, sketch);
            }
        }
        self.sketches = left;
    }
}
