//! `stuck-transfer`: an operation started on all ranks and does not end.
//!
//! With a network it is stuck where data is on the wire and does not move; without one a GPU or a link between GPUs
//! is suspected. A transfer that moves on, however slowly, is not stuck.

use super::hang_context::{HangContext, StallSite};
use super::{fact, number, seconds, who};
use crate::model::{Confidence, Evidence, Finding, Kind, NetPhase, NetProgress, Rank, Track};

/// A node that is gone is known to be silent by then, in ns. Nodes report once a second.
pub(super) const REPORTED_LATE_NS: u64 = 1_000_000_000;

pub(super) fn judge(scene: &HangContext<'_>, at: StallSite<'_>) -> Option<Finding> {
    let by_beats = at.comm.members().values().any(|m| m.is_counted_by_beats());
    let is_pair = matches!(at.stall.track, Track::Pair(..));
    let mut patience = scene.patience(at.comm).saturating_add(if by_beats { REPORTED_LATE_NS } else { 0 });
    if at.stall.order == 0 && !is_pair {
        // It may make connections, while its kernels run.
        patience = patience.max(scene.settings.patience_blind_ns);
    }
    let complete = is_pair && at.instance.parts.len() >= 2
        || at.comm.members().len() >= at.comm.expected() && at.instance.parts.len() >= at.comm.expected();
    let moved = at.instance.parts.values().filter_map(|p| p.moved_ns).max();
    let still = moved.is_none_or(|t| scene.now_ns.saturating_sub(t) >= patience);
    let long = at.waited.at_least_ns >= patience;
    // It waits since the last of its ranks started.
    let last = at.instance.parts.values().filter_map(|p| p.started_ns).max();
    let since_last = last.is_some_and(|t| scene.now_ns.saturating_sub(t) >= patience);
    if !complete || !still || !long || !since_last {
        return None;
    }
    let mut evidence = scene.wait_evidence(at.waited);
    evidence.push(fact(if is_pair {
        "it started on the GPUs of both ranks"
    } else {
        "it started on the GPUs of all ranks"
    }));
    let (ranks, advice) = match stuck(at) {
        Some((rank, t)) => {
            evidence.push(tell(scene, rank, t));
            let mut ranks = vec![rank, t.peer];
            ranks.sort_unstable();
            ranks.dedup();
            let advice = format!(
                "look at the network between rank {rank} and rank {}: link state and error counters of their NICs (ethtool, perfquery), the switch, firewalls, the peer's process",
                t.peer
            );
            (ranks, advice)
        }
        None if at.waited.ranks.iter().any(|r| scene.is_of_file(at.comm, *r)) => {
            let advice = "look at the processes of these ranks, at GPU and link errors (dmesg, nvidia-smi -q), and at the network between their hosts";
            (at.waited.ranks.clone(), advice.to_owned())
        }
        None => {
            evidence.push(fact("no network transfer of it is open"));
            (at.waited.ranks.clone(), "look for GPU and link errors: dmesg (Xid), nvidia-smi -q, NVLink counters (nvidia-smi nvlink -e); then at kernels that run beside it".to_owned())
        }
    };
    ranks.iter().take(8).for_each(|r| evidence.extend(who(scene.join, at.comm, *r)));
    let operation = at.comm.describe(at.stall.track, at.stall.order, &at.instance.first()?.op);
    Some(Finding {
        evidence,
        advice,
        confidence: Confidence::Likely,
        ..Finding::new(Kind::StuckTransfer, at.comm.id, ranks, operation)
    })
}

/// The transfer that holds the others up: a send whose data is on the wire, or else what waits for longest.
fn stuck<'a>(at: StallSite<'a>) -> Option<(Rank, &'a NetProgress)> {
    let open = at.instance.parts.iter().flat_map(|(r, p)| p.op.net.iter().map(move |t| (*r, t)));
    open.filter(|(_, t)| t.stop_ns.is_none() && t.waiting.is_some()).min_by_key(|(r, t)| {
        let (phase, since) = t.waiting.unwrap_or((NetPhase::Posted, u64::MAX));
        let rank = match (t.is_send, phase) {
            (true, NetPhase::Wire) => 0,
            (_, NetPhase::Flush) => 1,
            (true, NetPhase::Peer) => 2,
            (false, NetPhase::Wire | NetPhase::Posted) => 3,
            _ => 4,
        };
        (rank, since, *r)
    })
}

fn tell(scene: &HangContext<'_>, rank: Rank, t: &NetProgress) -> Evidence {
    let (phase, since) = t.waiting.unwrap_or((NetPhase::Posted, t.start_ns));
    let ago = seconds(scene.now_ns.saturating_sub(since));
    let what = match phase {
        NetPhase::Posted => "is posted and does not begin",
        NetPhase::Gpu => "waits for its own GPU",
        NetPhase::Peer => "waits for the peer to grant a buffer",
        NetPhase::Wire => "has data on the network",
        NetPhase::Flush => "flushes received data to the GPU",
    };
    let way = if t.is_send { "send of rank" } else { "receive of rank" };
    number(
        format!(
            "the {way} {rank} with rank {} on channel {} {what} since {ago:.1} s, after {} bytes in {} of {} steps",
            t.peer, t.channel, t.bytes, t.done, t.steps
        ),
        ago,
        "s",
    )
}
