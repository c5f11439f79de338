//! Transfers of which nothing tells whether they run, behind what stands still. A rank's operations in a communicator run in
//! the order in which it issued them: where it waits in one, its later transfers have not started, and their other ends wait.

use super::super::graph::{Stall, WaitingFor};
use super::launches::Launches;
use crate::join::communicator::Communicator;
use crate::join::instance::{IssuedAt, Part};
use crate::model::{Rank, Track};
use std::collections::{BTreeMap, HashMap};

/// A transfer that both ends issued and neither has finished, as one of them sees it.
struct Open {
    track: Track,
    order: u64,
    own: IssuedAt,
    peer: Rank,
    /// Where its peer is, if nothing tells that it has not started it.
    peer_in: Option<IssuedAt>,
}

/// The open transfers of each rank.
fn open(c: &Communicator, launches: &Launches<'_>) -> HashMap<Rank, Vec<Open>> {
    let mut open: HashMap<Rank, Vec<Open>> = HashMap::new();
    for (track, order, instance) in c.incomplete_transfers() {
        let Track::Pair(from, to) = track else { continue };
        let (Some(a), Some(b)) = (instance.parts.get(&from), instance.parts.get(&to)) else { continue };
        if from == to || a.finished || b.finished {
            continue;
        }
        for (rank, part, peer, other) in [(from, a, to, b), (to, b, from, a)] {
            let Some(own) = part.issued_at() else { continue };
            let may_be_in = (other.is_silent() || other.is_in_it()) && !launches.is_behind(peer, other);
            let peer_in = other.issued_at().filter(|_| may_be_in);
            open.entry(rank).or_default().push(Open { track, order, own, peer, peer_in });
        }
    }
    open
}

/// The first transfer of each rank that cannot end, because its peer waits in one of these or before such a transfer.
pub(super) fn stalls(
    c: &Communicator,
    launches: &Launches<'_>,
    known: &[Stall],
    actor: impl Fn(Rank) -> Option<u32>,
) -> Vec<Stall> {
    let mut held: BTreeMap<Rank, IssuedAt> = BTreeMap::new();
    let earliest = |held: &mut BTreeMap<Rank, IssuedAt>, rank: Rank, at: IssuedAt| {
        let is_new = held.get(&rank).is_none_or(|known| at.is_before(*known));
        if is_new {
            held.insert(rank, at);
        }
        is_new
    };
    for stall in known.iter().filter(|s| !s.queued) {
        let Some(instance) = c.instance(stall.track, stall.order) else { continue };
        for (rank, _) in &stall.waiting {
            let at = instance.parts.get(rank).and_then(Part::issued_at);
            if let Some(at) = at {
                earliest(&mut held, *rank, at);
            }
        }
    }
    if held.is_empty() {
        return Vec::new();
    }
    let open = open(c, launches);
    let mut found: BTreeMap<Rank, Stall> = BTreeMap::new();
    let mut next: Vec<Rank> = held.keys().copied().collect();
    while let Some(rank) = next.pop() {
        let Some(at) = held.get(&rank).copied() else { continue };
        for o in open.get(&rank).into_iter().flatten().filter(|o| at.is_before(o.own)) {
            let (Some(peer_in), Some(own), Some(peer)) = (o.peer_in, actor(rank), actor(o.peer)) else {
                continue;
            };
            if earliest(&mut held, o.peer, peer_in) {
                let (waiting, lacking) = (vec![(o.peer, peer)], vec![(rank, own)]);
                let (comm, track, order, lack) = (c.id, o.track, o.order, WaitingFor::Start);
                found.insert(o.peer, Stall { comm, track, order, lack, waiting, lacking, queued: false });
                next.push(o.peer);
            }
        }
    }
    found.into_values().collect()
}
