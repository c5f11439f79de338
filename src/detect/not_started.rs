//! `not-started`: all ranks issued an operation, and on some of them it does not start.
//!
//! The others wait on their GPUs.

use super::hang::{Place, Scene};
use super::{fact, names, number, seconds, who};
use crate::model::{Confidence, Finding, Kind};

pub(super) fn judge(scene: &Scene<'_>, at: Place<'_>) -> Option<Finding> {
    let ranks = &at.origin.ranks;
    // How long black boxes waited has to be known: a job that is ended always ends in some operation.
    let long = at.waited.for_ns.is_some_and(|w| w >= scene.patience(at.comm));
    if at.stall.order == 0 || !long || at.waited.ranks.is_empty() {
        return None;
    }
    // It may have come to it a moment ago only.
    let waits_for = |rank: &crate::model::Rank| {
        let issued = at.instance.parts.get(rank).and_then(|p| p.op.issued_ns);
        let member = at.comm.members().get(rank);
        let free = member.and_then(|m| scene.join.released_ns(m.record.segment, 0));
        scene.now_ns.saturating_sub(issued.max(free).unwrap_or(0))
    };
    if ranks.iter().all(|r| waits_for(r) < scene.patience(at.comm)) {
        return None;
    }
    let mut evidence = scene.wait_evidence(at.waited);
    for rank in ranks.iter().take(8) {
        let issued = at.instance.parts.get(rank)?.op.issued_ns?;
        let ago = seconds(scene.now_ns.saturating_sub(issued));
        evidence.push(number(
            format!("rank {rank} issued it {ago:.1} s ago, and its GPU has not started it"),
            ago,
            "s",
        ));
        evidence.extend(who(scene.join, at.comm, *rank));
    }
    evidence.push(fact("no other operation of NCCL's is running on that GPU"));
    let operation = at.comm.describe(at.stall.track, at.stall.order, &at.instance.first()?.op);
    Some(Finding {
        evidence,
        advice: format!(
            "look at what occupies the GPU of {}: a kernel that does not end, work before it on the same stream, an event that is never recorded, another process on that GPU (nvidia-smi)",
            names(ranks)
        ),
        confidence: Confidence::Likely,
        ..Finding::new(Kind::NotStarted, at.comm.id, ranks.clone(), operation)
    })
}
