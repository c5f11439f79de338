//! `send-without-receive`, `receive-without-send`: one end of a transfer is issued and the other is not.
//!
//! Orders are counted a pair and a direction. A send that its GPU could finish alone, into NCCL's buffers, waits for
//! nobody and is no finding.

use super::hang::{Place, Scene};
use super::{fact, names, who};
use crate::model::{Confidence, Finding, Kind, Rank, Track};

pub(super) fn judge(scene: &Scene<'_>, at: Place<'_>) -> Option<Finding> {
    let Track::Pair(from, to) = at.stall.track else { return None };
    let s = scene.settings;
    let patience = match at.waited {
        w if w.on_gpu => scene.patience(at.comm),
        _ => s.patience_silent_ns.max(scene.patience(at.comm)),
    };
    let sent = at.waited.ranks.contains(&from);
    let peer = if sent { to } else { from };
    let gone = scene.gone(at.comm, peer) && !scene.join.all_gone();
    let settle = scene.settings.patience_gone_ns;
    let enough = match gone {
        true => scene.gone_for(at.comm, peer).is_none_or(|g| g >= settle) && scene.enough(at.waited, settle),
        false => scene.enough(at.waited, patience),
    };
    if !enough || !gone && scene.just_released(at.comm, peer) {
        return None;
    }
    let (kind, here, there, lacks) = if sent {
        (Kind::SendWithoutReceive, from, to, "receive")
    } else {
        (Kind::ReceiveWithoutSend, to, from, "send")
    };
    let mut evidence = scene.wait_evidence(at.waited);
    let order = at.stall.order;
    let issued = at.instance.parts.contains_key(&there);
    evidence.push(fact(if issued {
        format!("transfer {order} from rank {from} to rank {to}: rank {there} issued it and will not finish it")
    } else { format!(
        "transfer {order} from rank {from} to rank {to}: rank {there} issued {order} {lacks}s with rank {here} as its peer, and not this one"
    )}));
    let mut ranks: Vec<Rank> = vec![there];
    // Ends that wait for each other in a circle are equally wrong.
    for other in at.origin.circle.iter().filter(|i| **i != at.origin.first) {
        let stall = scene.standing.stall(*other)?;
        evidence.push(fact(format!(
            "at the same time transfer {} of {} waits for rank {}",
            stall.order,
            stall.track,
            stall.lacking.first()?.0
        )));
        if stall.comm == at.comm.id {
            ranks.extend(stall.lacking.iter().map(|(r, _)| *r));
        }
    }
    ranks.sort_unstable();
    ranks.dedup();
    if scene.gone(at.comm, there) {
        evidence.push(fact(format!("the process of rank {there} is gone")));
    }
    evidence.extend(who(scene.join, at.comm, there));
    let operation = at.comm.describe(at.stall.track, order, &at.instance.first()?.op);
    Some(Finding {
        evidence,
        advice: if at.origin.circle.is_empty() {
            format!(
                "look at why {} did not {lacks}: another peer, another count of messages, or a call that is never reached",
                names(&ranks)
            )
        } else {
            format!(
                "put the sends and receives of {} into one group, or let one side receive first",
                names(&ranks)
            )
        },
        confidence: if gone { Confidence::Proven } else { Confidence::Likely },
        ..Finding::new(kind, at.comm.id, ranks, operation)
    })
}
