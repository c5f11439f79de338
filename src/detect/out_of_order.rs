//! A process of a standstill that left the usual order of its calls: it left one out, made one too many or swapped two.
//!
//! The wait-for graph tells this where all other ranks agree. Where a rank shares each communicator with few others, each of
//! both could be wrong; then it counts that one keeps to the order in which it always called, and the other does not.
//! Where all ranks of a communicator mix transfers and collectives alike, one that does not is out of order, whatever it did before.

use super::hang_context::{HangContext, StallSite};
use super::{fact, who};
use crate::join::{Communicator, Part, Process, Stall, WaitingFor};
use crate::model::{
    Call, CommId, Confidence, Departure, Finding, Kind, Mix, OperationRef, Rank, SegmentId, Track,
};
use std::collections::BTreeSet;

/// Ranks of an operation that are looked at.
const FEW: usize = 64;
/// Collectives before which all ranks issued as many transfers, before one in which they did not.
const ALIKE: u64 = 4;

pub(super) fn judge(scene: &HangContext<'_>, at: StallSite<'_>) -> Option<Finding> {
    let is_away = |(r, _): &(Rank, u32)| {
        let p = scene.process(at.comm, *r);
        scene.gone(at.comm, *r) || scene.aborted(at.comm, *r) || p.is_some_and(Process::is_stopped)
    };
    if at.stall.lacking.iter().any(is_away) {
        return None;
    }
    // A GPU is in it, and all ranks issued it: the order of earlier calls does not keep it from ending.
    if at.stall.lack == WaitingFor::End && at.instance.parts.values().any(Part::is_in_it) {
        return None;
    }
    let here = around(scene, at);
    let candidates = here.iter().filter_map(|p| Some((left(scene, at, p)?, *p)));
    let lacks_call = at.stall.lack == WaitingFor::Issue;
    let is_reason = |d: &Departure, p: &Process| !(lacks_call && are_idle(scene, at, d, p));
    let alone = candidates.filter(|(d, p)| !here.iter().any(|o| left_too(d, p, o)) && is_alone(scene, d, p));
    let alone = alone.filter(|(d, p)| is_reason(d, p));
    let Some((departure, process)) = alone.min_by_key(|(d, _)| d.call.issued_ns) else {
        return mixed_otherwise(scene, at);
    };
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

/// True where the ranks that a standstill lacks are known to be in no operation that another process holds up by leaving the order
/// of its calls. They wait for nobody, and so not because of that.
fn are_idle(scene: &HangContext<'_>, at: StallSite<'_>, departure: &Departure, process: &Process) -> bool {
    let is_idle = |(rank, _): &(Rank, u32)| {
        scene.process(at.comm, *rank).is_some_and(|p| {
            let is_known = !p.unsure() && !p.may_lack_since(at.waited.since_ns);
            let may_wait = |(id, r): &(CommId, Rank)| may_be_held_up(scene, (*id, *r), departure, process);
            let memberships = scene.join.memberships(p.record.id);
            p.record.id != process.record.id && is_known && !memberships.iter().any(may_wait)
        })
    };
    at.stall.lacking.len() <= FEW && at.stall.lacking.iter().all(is_idle)
}

/// True where a rank is in an operation that another process may keep from ending by leaving the order of its calls. One that all
/// have issued, that process before it left its order, ends by itself.
fn may_be_held_up(
    scene: &HangContext<'_>,
    (id, rank): (CommId, Rank),
    departure: &Departure,
    process: &Process,
) -> bool {
    let Some(comm) = scene.join.communicator(id) else { return false };
    let culprit = rank_of(scene, comm, process);
    comm.incomplete().any(|(track, _, instance)| {
        let own = culprit.and_then(|r| instance.parts.get(&r));
        let is_earlier = own.is_none_or(|p| p.op.issued_ns.is_some_and(|t| t < departure.call.issued_ns));
        let ends = instance.parts.len() >= track.ranks(comm.expected()) && is_earlier;
        instance.parts.get(&rank).is_some_and(|p| !p.finished) && !ends
    })
}

/// The rank that alone mixes the transfers and collectives of a communicator in another order than all others.
fn mixed_otherwise(scene: &HangContext<'_>, at: StallSite<'_>) -> Option<Finding> {
    if !(3..=FEW).contains(&at.comm.expected()) || at.comm.members().len() < at.comm.expected() {
        return None;
    }
    let mix = |r: &Rank| {
        let process = scene.process(at.comm, *r).filter(|p| !p.unsure() && !p.may_lack_since(0))?;
        Some((*r, process.call_order.mix(at.comm.id)?))
    };
    let mixes: Vec<(Rank, Mix)> = at.comm.members().keys().map(mix).collect::<Option<_>>()?;
    let Odd { rank, order, own, usual } = odd_one_out(&mixes)?;
    // Where a rank is through with it, or nothing of it is left, it holds up nobody.
    let instance = at.comm.instance(Track::Collective, order)?;
    if instance.parts.values().any(|p| p.finished) {
        return None;
    }
    let operation = at.comm.describe(Track::Collective, order, &instance.first()?.op);
    let mut evidence = scene.wait_evidence(at.waited);
    let at_least = |c: Count| if c.is_open { "at least " } else { "" };
    evidence.push(fact(format!(
        "rank {rank} issued {}{} transfers right before collective {order}, all others {}{}; before that all did alike",
        at_least(own),
        own.transfers,
        at_least(usual),
        usual.transfers,
    )));
    evidence.extend(who(scene.join, at.comm, rank));
    Some(Finding {
        evidence,
        advice: format!(
            "look at why rank {rank} calls in another order here: a branch on its own data, an exception, a race between its threads"
        ),
        confidence: Confidence::Likely,
        ..Finding::new(Kind::InterleavedCommunicators, at.comm.id, vec![rank], operation)
    })
}

/// The only rank that issued another number of transfers before a collective than all others, with that collective, its number and
/// that of the others. Before that all did alike.
fn odd_one_out(mixes: &[(Rank, Mix)]) -> Option<Odd> {
    let first = mixes.iter().map(|(_, m)| m.first).max().filter(|_| mixes.len() > 2)?;
    let last = mixes.iter().map(|(_, m)| end(m)).max()?;
    for order in first..last {
        let counts: Vec<Count> = mixes.iter().map(|(_, m)| Count::of(m, order)).collect::<Option<_>>()?;
        let differs = |a: &Count| counts.iter().filter(|b| !a.may_be(b)).count();
        let odd: Vec<usize> =
            (0..counts.len()).filter(|i| differs(&counts[*i]) + 1 == counts.len()).collect();
        let ([at], true) = (odd.as_slice(), order - first >= ALIKE) else {
            // A rank that has not issued it may still do alike.
            if counts.iter().any(|c| c.is_open || *c != counts[0]) {
                return None;
            }
            continue;
        };
        let mut others = (0..counts.len()).filter(|i| i != at).map(|i| counts[i]);
        let usual = others.next()?;
        return others.all(|o| o.may_be(&usual)).then_some(Odd {
            rank: mixes[*at].0,
            order,
            own: counts[*at],
            usual,
        });
    }
    None
}

/// A rank that issued another number of transfers before a collective than all others.
#[derive(Debug, PartialEq, Eq)]
struct Odd {
    rank: Rank,
    order: u64,
    own: Count,
    usual: Count,
}

/// Transfers before a collective; it may become more where that is not issued yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Count {
    transfers: u32,
    is_open: bool,
}

impl Count {
    fn of(m: &Mix, order: u64) -> Option<Self> {
        let at = usize::try_from(order.checked_sub(m.first)?).ok()?;
        let issued = m.before.get(at).map(|n| Count { transfers: *n, is_open: false });
        let open = || Count { transfers: m.since, is_open: true };
        // Of a collective behind the next one nothing is known.
        issued.or_else(|| Some(if order == end(m) { open() } else { Count { transfers: 0, is_open: true } }))
    }

    /// True where both may come to the same number.
    fn may_be(&self, other: &Self) -> bool {
        match (self.is_open, other.is_open) {
            (false, false) => self.transfers == other.transfers,
            (true, false) => self.transfers <= other.transfers,
            (false, true) => other.transfers <= self.transfers,
            (true, true) => true,
        }
    }
}

/// The order of the collective that comes next.
fn end(m: &Mix) -> u64 {
    m.first.saturating_add(m.before.len() as u64)
}

/// True where a process of a standstill, or around it, may have caused it by leaving the order of its calls.
pub(super) fn is_likely(scene: &HangContext<'_>, at: StallSite<'_>) -> bool {
    around(scene, at).into_iter().any(|p| left(scene, at, p).is_some())
}

/// The processes of a standstill, and those with whom they have operations that are not known to have ended.
fn around<'a>(scene: &HangContext<'a>, at: StallSite<'_>) -> Vec<&'a Process> {
    let places = at.origin.circle.iter().chain(&at.origin.held_up).filter_map(|i| scene.standing.stall(*i));
    let mut here: Vec<&Process> =
        std::iter::once(at.stall).chain(places).flat_map(|s| of(scene, s)).collect();
    let mut known: BTreeSet<SegmentId> = here.iter().map(|p| p.record.id).collect();
    let mut next = 0;
    while let Some(process) = here.get(next).filter(|_| here.len() < FEW) {
        next += 1;
        for (id, rank) in scene.join.memberships(process.record.id) {
            let Some(comm) = scene.join.communicator(*id) else { continue };
            let open = comm.incomplete().filter(|(.., i)| i.parts.get(rank).is_some_and(|p| !p.finished));
            let members = open.flat_map(|(track, ..)| match track {
                Track::Pair(a, b) => vec![a, b],
                _ => comm.members().keys().take(FEW).copied().collect(),
            });
            let others = members.filter_map(|r| scene.process(comm, r));
            let fresh: Vec<&Process> = others.filter(|p| known.insert(p.record.id)).collect();
            here.extend(fresh);
        }
    }
    here
}

/// Where a process left the order of its calls, if this may stand still because of it.
fn left(scene: &HangContext<'_>, at: StallSite<'_>, process: &Process) -> Option<Departure> {
    let departure = process.call_order.left().copied()?;
    let (called_ns, since_ns) = (departure.call.issued_ns, at.waited.since_ns);
    // Its GPU comes to what its host issued later.
    let lead_ns = if at.waited.is_by_hosts() { 0 } else { process.issuing.lead_ns() };
    let until_ns = departure.until_ns().saturating_add(lead_ns);
    let is_then = until_ns >= since_ns && called_ns <= since_ns + scene.now_ns.saturating_sub(since_ns) / 2;
    // Its own operations come in their order.
    let own = rank_of(scene, at.comm, process).and_then(|r| at.instance.parts.get(&r)?.op.issued_ns);
    let is_earlier = own.is_some_and(|issued| issued < called_ns);
    // The record of a call that it seems to have left out may be lost.
    let is_lost = process.may_lack_since(called_ns);
    (is_then && !is_earlier && !is_lost).then_some(departure)
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

/// True where another process left its order as well: by the same call, later, or in a loop that had not ended. Hosts that are ahead issue
/// loops in less time than these take, and one that writes a checkpoint comes to the same call much later.
fn left_too(departure: &Departure, process: &Process, other: &Process) -> bool {
    let left = other.call_order.left().filter(|_| other.record.id != process.record.id);
    left.is_some_and(|d| {
        let loop_ns = d.loop_ns.max(other.issuing.lead_ns());
        let is_same = (d.call.kind, d.call.order) == (departure.call.kind, departure.call.order);
        is_same || d.call.issued_ns.saturating_add(loop_ns) >= departure.call.issued_ns
    })
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
    use crate::model::{CommId, Kind, OPERATIONS, Rank, SegmentId, Update};

    use super::{Count, Mix, Odd, odd_one_out};

    const S: u64 = 1_000_000_000;
    const MS: u64 = 1_000_000;
    const OTHER: CommId = CommId::unowned(8);

    fn found(last: [&str; 2]) -> Vec<(Kind, Vec<Rank>, u64)> {
        found_with(last, &[], 0)
    }

    /// Two ranks call twice in one communicator and once in another, again and again, and then each rank in its own order, a letter
    /// a call. What is found four seconds later. Some processes have lost a record meanwhile, and so many of the calls before are not
    /// timed.
    fn found_with(last: [&str; 2], lost: &[u32], untimed: u64) -> Vec<(Kind, Vec<Rank>, u64)> {
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
                let kernel = (n < ends - untimed).then_some((at_ns + MS, Some(at_ns + 2 * MS)));
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
        for p in lost {
            j.feed(Update::Missed { segment: SegmentId(u64::from(*p)), what: OPERATIONS, count: 1 });
        }
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

    #[test]
    fn a_rank_that_is_in_nothing_is_away_whoever_calls_in_another_order() {
        let named = |last| found(last).into_iter().map(|(_, ranks, _)| ranks).collect::<Vec<_>>();
        assert_eq!(named(["baaa", ""]), Vec::<Vec<Rank>>::new(), "rank 1 may be on its way");
        assert_eq!(named(["baaa", "a"]), [vec![Rank(0)]], "rank 1 waits in what it always called");
        let untimed = found_with(["baaa", ""], &[], 2);
        assert_eq!(untimed, [], "what both called before that ends, timed or not");
    }

    #[test]
    fn a_call_of_which_the_record_may_be_lost_was_not_left_out() {
        let accused = |lost: &[u32]| -> Vec<Vec<Rank>> {
            found_with(["aaba", "baaa"], lost, 0).into_iter().map(|(_, ranks, _)| ranks).collect()
        };
        assert_eq!(accused(&[0]), [vec![Rank(1)]], "rank 1 has lost nothing");
        assert_ne!(accused(&[1]), [vec![Rank(1)]]);
    }

    #[test]
    fn the_rank_that_mixes_transfers_and_collectives_otherwise_is_odd() {
        let odd = |all: &[(&[u32], u32)]| {
            let mix = |(before, since): &(&[u32], u32)| Mix {
                comm: OTHER,
                first: 7,
                before: [&[2, 4, 2, 4], *before].concat(),
                since: *since,
            };
            let mixes: Vec<(Rank, Mix)> = (0..).map(Rank).zip(all.iter().map(mix)).collect();
            odd_one_out(&mixes).map(|Odd { rank, order, own, usual }| (rank.0, order, own, usual))
        };
        let (exact, open) =
            (|transfers| Count { transfers, is_open: false }, |transfers| Count { transfers, is_open: true });
        assert_eq!(odd(&[(&[2, 4], 0), (&[2, 4], 0), (&[2, 4], 2)]), None);
        let swapped = odd(&[(&[2, 4], 0), (&[0, 6], 0), (&[2, 4], 0)]);
        assert_eq!(swapped, Some((1, 11, exact(0), exact(2))));
        // The others wait for their transfers, and it waits in the collective.
        let swapped = odd(&[(&[], 2), (&[0], 0), (&[], 2)]);
        assert_eq!(swapped, Some((1, 11, exact(0), open(2))));
        // It waits for the transfers that the others issue after the collective.
        let swapped = odd(&[(&[2], 0), (&[2], 0), (&[], 4)]);
        assert_eq!(swapped, Some((2, 11, open(4), exact(2))));
        assert_eq!(odd(&[(&[2], 0), (&[], 0), (&[2], 0)]), None, "it is late");
        assert_eq!(odd(&[(&[2, 4], 0), (&[0, 6], 0)]), None, "of two nobody knows who is wrong");
        assert_eq!(odd(&[(&[2], 0), (&[0], 0), (&[4], 0)]), None, "none of them does as others do");
    }
}
