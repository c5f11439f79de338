//! `interleaved-communicators`: ranks entered communicators in different orders and wait for each other in a circle.
//!
//! A circle in which every process issued the operation that it is in before the one that it lacks, all of them
//! issued, is a proof: the GPUs' order is the hosts'. Where operations are lacking it takes patience. A circle of
//! transfers alone is a send or a receive that comes before its counterpart on both sides.

use super::hang::{Place, Scene};
use super::{circle, fact, names, transfers, who};
use crate::join::{Lack, Stall};
use crate::model::{Confidence, Evidence, Finding, Kind, Rank, Track};
use std::collections::BTreeSet;

pub(super) fn judge(scene: &Scene<'_>, at: Place<'_>) -> Option<Finding> {
    let circle: Vec<&Stall> = at.origin.circle.iter().filter_map(|i| scene.standing.stall(*i)).collect();
    if circle.iter().all(|s| matches!(s.track, Track::Pair(..))) {
        return transfers::judge(scene, at);
    }
    if circle.iter().any(|s| {
        s.order == 0 && s.lack == Lack::Issue && !scene.enough(at.waited, scene.settings.patience_unsure_ns)
    }) {
        return None;
    }
    let proven = circle.iter().all(|s| s.lack == Lack::Start) && is_inverted(scene, &circle);
    let patience = if proven { scene.settings.settle_circle_ns } else { scene.patience(at.comm) };
    // All of them: a circle is as old as its youngest part.
    let old =
        circle.iter().all(|s| scene.join.waited(s, scene.now_ns).is_some_and(|w| scene.enough(&w, patience)));
    if !old {
        return None;
    }
    let mut evidence: Vec<Evidence> = scene.wait_evidence(at.waited);
    for s in &circle {
        let c = scene.join.communicator(s.comm)?;
        let func = c.instance(s.track, s.order)?.first()?.op.func;
        let of = |side: &[(Rank, u32)]| names(&side.iter().map(|(r, _)| *r).collect::<Vec<_>>());
        let lack = if s.lack == Lack::Issue { "have not issued it" } else { "have it queued behind" };
        evidence.push(fact(format!(
            "communicator {}: {} in {func} (order {}), {} {lack}",
            s.comm,
            of(&s.waiting),
            s.order,
            of(&s.lacking),
        )));
    }
    let mut ranks = culprits(&circle, at.stall);
    ranks.sort_unstable();
    ranks.iter().take(8).for_each(|r| evidence.extend(who(scene.join, at.comm, *r)));
    let operation = at.comm.describe(at.stall.track, at.stall.order, &at.instance.first()?.op);
    let ids: Vec<String> = circle.iter().map(|s| s.comm.to_string()).collect();
    Some(Finding {
        evidence,
        advice: format!(
            "let all ranks issue the operations of communicators {} in one order: some call the one first, others the other",
            ids.join(", ")
        ),
        confidence: if proven { Confidence::Proven } else { Confidence::Likely },
        ..Finding::new(Kind::InterleavedCommunicators, at.comm.id, ranks, operation)
    })
}

/// The ranks that are in one operation of the circle and hold up another one. Where everything that waits in a circle does so
/// through a few of them, these are out of order; where most are in the same operation, the others are; where neither, all
/// are named. As the communicator of a stall numbers them.
fn culprits(circle: &[&Stall], at: &Stall) -> Vec<Rank> {
    let through = circle::through_all(circle);
    let holds_up = |p: u32| circle.iter().any(|s| s.lacking.iter().any(|(_, l)| *l == p));
    let camps: Vec<Vec<u32>> =
        circle.iter().map(|s| s.waiting.iter().map(|(_, p)| *p).filter(|p| holds_up(*p)).collect()).collect();
    let all: BTreeSet<u32> = camps.iter().flatten().copied().collect();
    let most = camps.iter().max_by_key(|c| c.len()).filter(|c| c.len() * 2 > all.len());
    let on_all: Vec<u32> = all.iter().copied().filter(|p| through.contains(p)).collect();
    let here = |p: u32| at.waiting.iter().chain(&at.lacking).find(|(_, q)| *q == p).map(|(r, _)| *r);
    let minority: Option<Vec<Rank>> = match () {
        () if !on_all.is_empty() && on_all.len() < all.len() => {
            Some(on_all.into_iter().filter_map(here).collect())
        }
        () => most.map(|m| all.iter().copied().filter(|p| !m.contains(p)).filter_map(here).collect()),
    };
    minority.filter(|m| !m.is_empty()).unwrap_or_else(|| all.iter().copied().filter_map(here).collect())
}

/// True when every process of the circle issued what it is in before what it lacks.
fn is_inverted(scene: &Scene<'_>, circle: &[&Stall]) -> bool {
    let issued = |s: &Stall, rank: Rank| {
        scene.join.communicator(s.comm)?.instance(s.track, s.order)?.parts.get(&rank)?.op.issued_ns
    };
    circle.iter().all(|lacks| {
        lacks.lacking.iter().all(|(there, p)| {
            let is_in =
                circle.iter().find_map(|s| s.waiting.iter().find(|(_, w)| w == p).map(|(r, _)| (s, *r)));
            is_in.is_none_or(|(s, here)| {
                issued(s, here).zip(issued(lacks, *there)).is_some_and(|(first, then)| first < then)
            })
        })
    })
}
