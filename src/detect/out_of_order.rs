//! A process of a standstill that left the usual order of its calls: it left one out, made one too many or swapped two.
//!
//! The wait-for graph tells this where all other ranks agree. Where a rank shares each communicator with few others, each of
//! both could be wrong; then it counts that one keeps to the order in which it always called, and the other does not.

use super::hang_context::{HangContext, StallSite};
use super::{fact, who};
use crate::join::{Communicator, Process, Stall};
use crate::model::{Call, Confidence, Departure, Finding, Kind, OperationRef, Rank};

/// Ranks of an operation that are looked at.
const FEW: usize = 64;

pub(super) fn judge(scene: &HangContext<'_>, at: StallSite<'_>) -> Option<Finding> {
    let is_away = |(r, _): &(Rank, u32)| {
        let p = scene.process(at.comm, *r);
        scene.gone(at.comm, *r) || scene.aborted(at.comm, *r) || p.is_some_and(Process::is_stopped)
    };
    if at.stall.lacking.iter().any(is_away) {
        return None;
    }
    let places = at.origin.circle.iter().chain(&at.origin.held_up).filter_map(|i| scene.standing.stall(*i));
    let here: Vec<&Process> = std::iter::once(at.stall).chain(places).flat_map(|s| of(scene, s)).collect();
    let left = |p: &Process| p.call_order.left().filter(|d| d.until_ns() >= at.waited.since_ns).copied();
    let candidates = here.iter().filter_map(|p| Some((left(p)?, *p)));
    let alone = candidates.filter(|(d, p)| !here.iter().any(|o| left_too(d, p, o)) && is_alone(scene, d, p));
    let (departure, process) = alone.min_by_key(|(d, _)| d.call.issued_ns)?;
    let comm = scene.join.communicator(departure.wrong().kind.comm)?;
    let rank = rank_of(scene, comm, process)?;
    let name = |call: &Call| {
        format!(
            "{} (order {}, communicator {}, {})",
            call.kind.func, call.order, call.kind.comm, call.kind.track
        )
    };
    let times = if departure.times == 1 { "once".to_owned() } else { format!("{} times", departure.times) };
    let mut evidence = scene.wait_evidence(at.waited);
    evidence.push(fact(format!(
        "rank {rank} called {} where it had always called {}, {times}; the others kept to their order",
        name(&departure.call),
        name(&departure.usual),
    )));
    evidence.extend(who(scene.join, comm, rank));
    let wrong = departure.wrong();
    let part = comm.instance(wrong.kind.track, wrong.order).and_then(|i| i.first());
    let operation = match part {
        Some(part) => comm.describe(wrong.kind.track, wrong.order, &part.op),
        None => OperationRef::named(wrong.kind.func.as_str(), wrong.kind.track, wrong.order),
    };
    Some(Finding {
        evidence,
        advice: format!(
            "look at why rank {rank} calls in another order here: a branch on its own data, an exception, a race between its threads"
        ),
        confidence: Confidence::Likely,
        ..Finding::new(Kind::InterleavedCommunicators, comm.id, vec![rank], operation)
    })
}

/// The processes in an operation or lacking in it.
fn of<'a>(scene: &HangContext<'a>, stall: &Stall) -> Vec<&'a Process> {
    let Some(comm) = scene.join.communicator(stall.comm) else { return Vec::new() };
    let all = stall.lacking.iter().take(FEW).chain(stall.waiting.iter().take(FEW));
    all.filter_map(|(r, _)| scene.process(comm, *r)).collect()
}

fn rank_of(scene: &HangContext<'_>, comm: &Communicator, process: &Process) -> Option<Rank> {
    let all = scene.join.memberships(process.record.id);
    all.iter().find(|(id, _)| *id == comm.id).map(|(_, rank)| *rank)
}

/// True where another process left its order as well, in the same loop or later.
fn left_too(departure: &Departure, process: &Process, other: &Process) -> bool {
    let since_ns = departure.call.issued_ns.saturating_sub(departure.loop_ns);
    let left = other.call_order.left().filter(|_| other.record.id != process.record.id);
    left.is_some_and(|d| d.call.issued_ns >= since_ns)
}

/// True where the others of the communicator are seen to have kept to their order when this process left its own: loops pause for
/// an evaluation, and all ranks leave their order together.
fn is_alone(scene: &HangContext<'_>, departure: &Departure, process: &Process) -> bool {
    let call = &departure.call;
    let Some(comm) = scene.join.communicator(call.kind.comm) else { return false };
    let issued_ns =
        |rank: Rank, order: u64| comm.instance(call.kind.track, order)?.parts.get(&rank)?.op.issued_ns;
    let (mut kept, mut others) = (0, 0);
    for rank in comm.members().keys().take(FEW) {
        let Some(other) = scene.process(comm, *rank).filter(|o| o.record.id != process.record.id) else {
            continue;
        };
        others += 1;
        if left_too(departure, process, other) {
            return false;
        }
        // Where nobody tells when it came by here, it counts that it went on for longer.
        let here_ns = issued_ns(*rank, call.order).or_else(|| issued_ns(*rank, call.order.checked_sub(1)?));
        kept += usize::from(other.call_order.usual_ns() >= here_ns.or(Some(call.issued_ns)));
    }
    kept > 0 && kept * 2 >= others
}

#[cfg(test)]
mod tests {
    use crate::detect::{HangRule, Rule, Settings};
    use crate::join::Join;
    use crate::join::testing::{all_reduce, member, process};
    use crate::model::{CommId, Kind, Rank, Update};

    const S: u64 = 1_000_000_000;
    const MS: u64 = 1_000_000;
    const OTHER: CommId = CommId::unowned(8);

    /// Two ranks call twice in one communicator and once in another, again and again, and then each rank in its own order, a letter
    /// a call. What is found four seconds later.
    fn found(last: [&str; 2]) -> Vec<(Kind, Vec<Rank>, u64)> {
        let mut j = Join::new();
        let ends = 40 * 4;
        for r in 0..2u32 {
            j.feed(process(r));
            j.feed(member(r, 2, 200));
            let Update::Comm(mut record) = member(r, 2, 200) else { unreachable!("a member") };
            record.comm = OTHER;
            j.feed(Update::Comm(record));
            let calls: String = "aaba".repeat(40) + last[r as usize];
            let mut orders = [0, 0];
            for (n, c) in calls.chars().enumerate() {
                let (n, other) = (n as u64, usize::from(c == 'b'));
                let at_ns = S + n * 5 * MS;
                let kernel = (n < ends).then_some((at_ns + MS, Some(at_ns + 2 * MS)));
                // The first call of the last loop is one that its GPU has started.
                let kernel = kernel.or((n == ends).then_some((at_ns + MS, None)));
                let mut op = all_reduce(r, orders[other], at_ns, kernel);
                op.ticket = n;
                orders[other] += 1;
                if other == 1 {
                    op.comm = OTHER;
                }
                j.feed(Update::Op(Box::new(op)));
            }
        }
        let now_ns = S + (ends + 4) * 5 * MS + 4 * S;
        j.tick(now_ns);
        let found = HangRule::new(Settings::default()).check(&j, now_ns);
        found.into_iter().map(|f| (f.kind, f.ranks, f.operation.order)).collect()
    }

    #[test]
    fn of_two_ranks_the_one_that_left_its_usual_order_is_wrong() {
        let order = Kind::InterleavedCommunicators;
        assert_eq!(found(["aaba", "baaa"]), [(order, vec![Rank(1)], 40)]);
        assert_eq!(found(["baaa", "aaba"]), [(order, vec![Rank(0)], 40)]);
    }
}
