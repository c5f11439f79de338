//! `interleaved-communicators`: ranks entered communicators in different orders and wait for each other in a circle.
//!
//! A circle in which every process issued the operation that it is in before the one that it lacks, all of them
//! issued, is a proof: the GPUs' order is the hosts'. Where operations are lacking it takes patience. A circle of
//! transfers alone is a send or a receive that comes before its counterpart on both sides.

use super::hang_context::{HangContext, StallSite};
use super::{circle, fact, names, out_of_order, transfers, verb, who};
use crate::join::{Activity, Communicator, Instance, Origin, Part, Stall, WaitingFor};
use crate::model::{Confidence, Evidence, Finding, Kind, Rank, Track};
use std::collections::BTreeSet;

/// Ranks of an operation of which the GPUs are looked at.
const FEW: usize = 64;
/// Processes in each of two operations of which the earlier calls are compared.
const ASKED: usize = 4;

pub(super) fn judge(scene: &HangContext<'_>, at: StallSite<'_>) -> Option<Finding> {
    let circle: Vec<&Stall> = at.origin.circle.iter().filter_map(|i| scene.standing.stall(*i)).collect();
    let inferred = circle.iter().any(|s| is_inferred(scene, s));
    if inferred && (circle.iter().any(|s| computes(scene, s)) || !is_seen(scene, at)) {
        return None;
    }
    let culprits = culprits(&circle);
    // It is told where most of them are, and where others wait for them.
    let many = |side: &[(Rank, u32)]| side.iter().filter(|(_, p)| culprits.contains(p)).count();
    let key =
        |s: &&Stall| (many(&s.waiting) + many(&s.lacking), many(&s.lacking), s.lack == WaitingFor::Issue);
    let stall = circle.iter().copied().rev().max_by_key(key)?;
    let comm = scene.join.communicator(stall.comm)?;
    let waited = &scene.join.waited(stall, scene.now_ns)?;
    let at = StallSite { stall, comm, instance: comm.instance(stall.track, stall.order)?, waited, ..at };
    if circle.iter().all(|s| matches!(s.track, Track::Pair(..))) {
        let alone = Origin { circle: Vec::new(), ..at.origin.clone() };
        let origin = if left_out(&circle).is_some_and(|s| went_on(scene, s)) { &alone } else { at.origin };
        return transfers::judge(scene, StallSite { origin, ..at });
    }
    // Ranks come slowly to the first operation of a communicator, unless they are at work in others.
    let is_first = circle.iter().all(|s| s.order == 0 && s.lack == WaitingFor::Issue);
    if is_first && !scene.enough(at.waited, scene.settings.patience_unsure_ns) {
        return None;
    }
    let proven =
        !inferred && circle.iter().all(|s| s.lack == WaitingFor::Start) && is_inverted(scene, &circle);
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
        let of = |side: &[(Rank, u32)]| side.iter().map(|(r, _)| *r).collect::<Vec<_>>();
        let lacking = of(&s.lacking);
        let have = verb(&lacking, "has", "have");
        let lack = if s.lack == WaitingFor::Issue { "not issued it" } else { "it queued behind" };
        evidence.push(fact(format!(
            "communicator {}: {} in {func} (order {}), {} {have} {lack}",
            s.comm,
            names(&of(&s.waiting)),
            s.order,
            names(&lacking),
        )));
    }
    let of_comm = stall.waiting.iter().chain(&stall.lacking).filter(|(_, p)| culprits.contains(p));
    let mut ranks: Vec<Rank> = of_comm.map(|(r, _)| *r).collect();
    ranks.sort_unstable();
    ranks.dedup();
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

/// Returns the place to judge instead of a circle of which a part is inferred, where all its processes called as they always do:
/// they wait for a GPU.
pub(super) fn instead_of_circle(scene: &HangContext<'_>, origin: &Origin) -> Option<Origin> {
    let of = |i: &usize| Some((*i, scene.standing.stall(*i)?));
    let circle: Vec<(usize, &Stall)> = origin.circle.iter().filter_map(of).collect();
    let (inferred, seen): (Vec<_>, Vec<_>) = circle.iter().partition(|(_, s)| is_inferred(scene, s));
    let (first, stall) = *seen.first().filter(|(_, s)| s.lack == WaitingFor::Start)?;
    if inferred.is_empty() || !circle.iter().all(|(_, s)| is_usual(scene, s)) {
        return None;
    }
    let stalls = || circle.iter().map(|(_, s)| *s).take(FEW);
    if stalls().any(|a| stalls().any(|b| is_newly_inverted(scene, a, b))) {
        return None;
    }
    let comm = scene.join.communicator(stall.comm)?;
    let instance = comm.instance(stall.track, stall.order)?;
    let waited = &scene.join.waited(stall, scene.now_ns)?;
    if out_of_order::is_likely(scene, StallSite { origin, stall, comm, instance, waited }) {
        return None;
    }
    let others = circle.iter().map(|(i, _)| *i).chain(origin.held_up.iter().copied());
    let held_up = others.filter(|i| *i != first).collect();
    let ranks = stall.lacking.iter().map(|(r, _)| *r).collect();
    Some(Origin { first, ranks, circle: Vec::new(), held_up })
}

/// True where all processes of an operation are known to have called it, and all since then, in the order in which they always do.
fn is_usual(scene: &HangContext<'_>, stall: &Stall) -> bool {
    let Some(comm) = scene.join.communicator(stall.comm) else { return false };
    let instance = comm.instance(stall.track, stall.order);
    stall.waiting.iter().chain(&stall.lacking).take(FEW).all(|(rank, _)| {
        let issued_ns = instance.and_then(|i| i.parts.get(rank)?.op.issued_ns);
        let order = scene.process(comm, *rank).map(|p| &p.call_order);
        order.zip(issued_ns).is_some_and(|(order, issued_ns)| {
            let left_before = order.left().is_none_or(|d| d.until_ns() < issued_ns);
            left_before && order.usual_ns() >= Some(issued_ns)
        })
    })
}

/// True where a process that waits in the one operation and another that waits in the other one issued the two in opposite
/// orders, and did not the last time. Streams may let processes always differ; that holds up nobody.
fn is_newly_inverted(scene: &HangContext<'_>, a: &Stall, b: &Stall) -> bool {
    let comms = scene.join.communicator(a.comm).zip(scene.join.communicator(b.comm));
    let Some((of_a, of_b)) = comms else { return false };
    let issued_ns = |c: &Communicator, s: &Stall, rank: Rank| {
        c.instance(s.track, s.order).and_then(|i| i.parts.get(&rank)?.op.issued_ns)
    };
    // The last operation of the other track that a rank had issued by some moment.
    let last_before = |rank: Rank, moment_ns: u64| {
        let of_track = of_b.instances().filter(|(track, ..)| *track == b.track);
        let orders = of_track.filter(|(.., i)| {
            i.parts.get(&rank).is_some_and(|p| p.op.issued_ns.is_some_and(|t| t < moment_ns))
        });
        orders.map(|(_, order, _)| order).max()
    };
    let in_a = in_both(&a.waiting, &b.lacking);
    let in_b = in_both(&a.lacking, &b.waiting);
    in_a.iter().any(|(here_a, here_b)| {
        in_b.iter().any(|(there_a, there_b)| {
            let is_before =
                |first: Option<u64>, then: Option<u64>| first.zip(then).is_some_and(|(a, b)| a < b);
            let is_inverted = is_before(issued_ns(of_a, a, *here_a), issued_ns(of_b, b, *here_b))
                && is_before(issued_ns(of_b, b, *there_b), issued_ns(of_a, a, *there_a));
            let earlier = of_a.instances().filter(|(track, order, _)| *track == a.track && *order < a.order);
            let moments =
                |i: &Instance| i.parts.get(here_a)?.op.issued_ns.zip(i.parts.get(there_a)?.op.issued_ns);
            let before = earlier.filter_map(|(.., i)| moments(i)).max();
            is_inverted
                && before.is_some_and(|(here_ns, there_ns)| {
                    let here = last_before(*here_b, here_ns);
                    here.is_some() && here == last_before(*there_b, there_ns)
                })
        })
    })
}

/// The ranks of a few processes that are in both lists, in each of them.
fn in_both(of_one: &[(Rank, u32)], of_other: &[(Rank, u32)]) -> Vec<(Rank, Rank)> {
    let rank = |process: u32| of_other.iter().find(|(_, p)| *p == process).map(|(rank, _)| *rank);
    let few = of_one.iter().take(FEW);
    few.filter_map(|(here, process)| Some((*here, rank(*process)?))).take(ASKED).collect()
}

/// True for an operation that ranks have not started and in which no GPU is seen: who waits there is inferred.
fn is_inferred(scene: &HangContext<'_>, stall: &Stall) -> bool {
    let instance = scene.join.communicator(stall.comm).and_then(|c| c.instance(stall.track, stall.order));
    let is_in_it = |(r, _): &(Rank, u32)| instance.and_then(|i| i.parts.get(r)).is_some_and(Part::is_in_it);
    stall.lack == WaitingFor::Start && !stall.waiting.iter().any(is_in_it)
}

/// True where the GPU of a rank that is said to wait in an operation computes: it waits in nothing.
fn computes(scene: &HangContext<'_>, stall: &Stall) -> bool {
    let Some(comm) = scene.join.communicator(stall.comm) else { return false };
    let mut few = stall.waiting.iter().take(FEW);
    few.any(|(r, _)| scene.activity(comm, *r) == Some(Activity::Computing))
}

/// True where somebody is seen to wait for long enough in a circle, or behind it.
fn is_seen(scene: &HangContext<'_>, at: StallSite<'_>) -> bool {
    let patience = scene.patience(at.comm);
    let stalls = at.origin.circle.iter().chain(&at.origin.held_up).filter_map(|i| scene.standing.stall(*i));
    let mut waited = stalls.filter_map(|s| scene.join.waited(s, scene.now_ns));
    waited.any(|w| w.on_gpu && scene.enough(&w, patience))
}

/// The only operation of the circle that ranks have not issued. What all others of it lack is queued behind something.
fn left_out<'a>(circle: &[&'a Stall]) -> Option<&'a Stall> {
    let mut all = circle.iter().filter(|s| s.lack == WaitingFor::Issue);
    all.next().copied().filter(|_| all.next().is_none())
}

/// True where the ranks that an operation lacks issued more after the others began to wait. A rank that did not may stand in
/// what it issued before, as hosts do that wait for each step, and have left out nothing.
fn went_on(scene: &HangContext<'_>, stall: &Stall) -> bool {
    let Some(waited) = scene.join.waited(stall, scene.now_ns) else { return false };
    let Some(comm) = scene.join.communicator(stall.comm) else { return false };
    let last_ns = |r: &Rank| scene.process(comm, *r)?.issuing.last_ns();
    stall.lacking.iter().all(|(r, _)| last_ns(r).is_some_and(|t| t > waited.since_ns))
}

/// The processes that are out of order. Everything that waits in a circle goes through them, and of those that this is true of,
/// they left out the only operation of the circle that was left out. Where only one of these holds, it decides. Where neither
/// does, they are the few that are not in the operation in which most are, or all that are in one operation of the circle and
/// hold up another one.
fn culprits(circle: &[&Stall]) -> BTreeSet<u32> {
    let holds_up = |p: u32| circle.iter().any(|s| s.lacking.iter().any(|(_, l)| *l == p));
    let camps: Vec<BTreeSet<u32>> =
        circle.iter().map(|s| s.waiting.iter().map(|(_, p)| *p).filter(|p| holds_up(*p)).collect()).collect();
    let all: BTreeSet<u32> = camps.iter().flatten().copied().collect();
    let is_few = |few: &BTreeSet<u32>| !few.is_empty() && few.len() < all.len();
    // Of two nobody knows who is wrong.
    let left_out = left_out(circle).filter(|_| all.len() > 2);
    // Nor does anybody of as many that called a collective as did not.
    let is_even = |s: &&Stall| !matches!(s.track, Track::Pair(..)) && s.waiting.len() == s.lacking.len();
    let callers = left_out.filter(is_even).map(|s| &s.waiting);
    let left_out = left_out.map(|s| &s.lacking).into_iter().chain(callers);
    let left_out: BTreeSet<u32> = left_out.flatten().map(|(_, p)| *p).filter(|p| all.contains(p)).collect();
    let through: BTreeSet<u32> =
        circle::through_all(circle).into_iter().filter(|p| all.contains(p)).collect();
    let minority = || {
        let most = camps.iter().max_by_key(|c| c.len()).filter(|c| c.len() * 2 > all.len())?;
        Some(&all - most)
    };
    let known = [&through & &left_out, through, left_out];
    let known = known.into_iter().find(|few| is_few(few));
    known.or_else(|| minority().filter(|few| is_few(few))).unwrap_or_else(|| all.clone())
}

/// True when every process of the circle issued what it is in before what it lacks.
fn is_inverted(scene: &HangContext<'_>, circle: &[&Stall]) -> bool {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::detect::{HangRule, Rule, Settings};
    use crate::join::Join;
    use crate::join::testing::{all_reduce, member, process};
    use crate::model::{CommId, Timing, Untimed, Update};

    /// An operation that lacks the second process's issue or start, and in which the first one waits.
    fn stall(lack: WaitingFor, waiting: u32, lacking: u32) -> Stall {
        let of = |p: u32| vec![(Rank(p), p)];
        Stall {
            comm: CommId::unowned(u64::from(waiting)),
            track: Track::Collective,
            order: 0,
            lack,
            waiting: of(waiting),
            lacking: of(lacking),
            queued: false,
        }
    }

    fn named(stalls: &[Stall]) -> Vec<u32> {
        culprits(&stalls.iter().collect::<Vec<_>>()).into_iter().collect()
    }

    const OTHER: CommId = CommId::unowned(8);
    const S: u64 = 1_000_000_000;

    /// Two ranks in two communicators, in which each has issued so many operations.
    fn two_in_both(issued: impl Fn(u32) -> (u64, u64)) -> Join {
        let mut j = Join::new();
        for r in 0..2u32 {
            let (here, there) = issued(r);
            j.feed(process(r));
            j.feed(member(r, 2, here));
            let Update::Comm(mut record) = member(r, 2, there) else { unreachable!("a member") };
            record.comm = OTHER;
            j.feed(Update::Comm(record));
        }
        j
    }

    #[test]
    fn a_rank_that_is_ahead_elsewhere_may_be_in_an_untimed_operation_before() {
        // Of an untimed operation and a timed one, rank 0 issues the untimed one first and rank 1 the timed one. Rank 0 has issued
        // one more of the untimed ones.
        let found = |now_ns: u64| {
            let mut j = two_in_both(|r| (2, 2 - u64::from(r)));
            for r in 0..2u32 {
                j.feed(Update::Op(Box::new(all_reduce(r, 0, S, Some((S + 5_000, Some(S + 50_000)))))));
                let kernel = (r == 1).then_some((10 * S + 5_000, None));
                j.feed(Update::Op(Box::new(all_reduce(r, 1, 10 * S, kernel))));
                for order in 0..2 - u64::from(r) {
                    let mut op = all_reduce(r, order, 10 * S - 1 + u64::from(r) * 2 + order * S, None);
                    (op.comm, op.timing) = (OTHER, Timing::Not(Untimed::Budget));
                    j.feed(Update::Op(Box::new(op)));
                }
            }
            j.tick(now_ns);
            let found = HangRule::new(Settings::default()).check(&j, now_ns);
            found.into_iter().map(|f| (f.kind, f.confidence, f.ranks)).collect::<Vec<_>>()
        };
        let both = vec![Rank(0), Rank(1)];
        assert_eq!(found(11 * S), [], "that rank 0 waits in it is inferred");
        assert_eq!(found(14 * S), [(Kind::InterleavedCommunicators, Confidence::Likely, both)]);
    }

    #[test]
    fn where_all_call_in_their_usual_order_it_is_the_gpu_that_does_not_start() {
        // Rank 0 calls a timed operation and then an untimed one of another communicator, in every loop; rank 1 calls them the other
        // way round, as its streams allow. In the last loop its GPU starts nothing; before that, it may have swapped them.
        const MS: u64 = 1_000_000;
        let found = |swaps: bool| {
            let loops = 40;
            let mut j = two_in_both(|_| (loops, loops));
            for r in 0..2u32 {
                for order in 0..loops {
                    let at_ns = (1_000 + order * 10) * MS;
                    let is_last = order + 1 == loops;
                    // A rank that swaps did until now what the other one does.
                    let is_second = r == 1 && (is_last || !swaps);
                    let (timed_ns, other_ns) =
                        if is_second { (at_ns + MS, at_ns) } else { (at_ns, at_ns + MS) };
                    let kernel = match (is_last, r) {
                        (false, _) => Some((at_ns + 2 * MS, Some(at_ns + 3 * MS))),
                        (true, 0) => Some((at_ns + 2 * MS, None)),
                        _ => None,
                    };
                    let mut timed = all_reduce(r, order, timed_ns, kernel);
                    timed.ticket = order * 2 + u64::from(is_second);
                    let mut other = all_reduce(r, order, other_ns, None);
                    (other.comm, other.timing) = (OTHER, Timing::Not(Untimed::Budget));
                    other.ticket = order * 2 + u64::from(!is_second);
                    j.feed(Update::Op(Box::new(timed)));
                    j.feed(Update::Op(Box::new(other)));
                }
            }
            let now_ns = 8_000 * MS;
            j.tick(now_ns);
            let found = HangRule::new(Settings::default()).check(&j, now_ns);
            found.into_iter().map(|f| (f.kind, f.ranks)).collect::<Vec<_>>()
        };
        assert_eq!(found(false), [(Kind::NotStarted, vec![Rank(1)])]);
        assert_eq!(found(true), [(Kind::InterleavedCommunicators, vec![Rank(1)])]);
    }

    #[test]
    fn an_order_that_was_never_the_same_is_not_inverted_anew() {
        // In each of 20 loops rank 0 calls two operations of another communicator and then one of this. So does rank 1, but for
        // one that it leaves out in the last loop but one, or it calls them after this one, always.
        let is_new = |always: bool| {
            let mut j = two_in_both(|_| (20, 40));
            for r in 0..2u32 {
                for order in 0..20 {
                    let at_ns = (1 + order) * 1_000;
                    j.feed(Update::Op(Box::new(all_reduce(r, order, at_ns + 500, None))));
                }
                for order in 0..40u64 {
                    let was_left_out = r == 1 && !always && order >= 37;
                    let in_loop = (order + u64::from(was_left_out)) / 2;
                    let after = if r == 1 && always { 600 } else { 0 };
                    let mut op = all_reduce(r, order, (1 + in_loop) * 1_000 + after + order % 2, None);
                    op.comm = OTHER;
                    j.feed(Update::Op(Box::new(op)));
                }
            }
            j.tick(S);
            let (standing, gpu_users) = (j.standing(S), std::cell::OnceCell::new());
            let settings = Settings::default();
            let scene =
                HangContext { join: &j, standing: &standing, settings, now_ns: S, gpu_users: &gpu_users };
            let place = |comm, order, waiting, lacking| {
                let s = stall(WaitingFor::Start, waiting, lacking);
                Stall { comm, order, ..s }
            };
            let (here, there) = (place(CommId::unowned(7), 18, 1, 0), place(OTHER, 37, 0, 1));
            is_newly_inverted(&scene, &here, &there)
        };
        assert!(is_new(false));
        assert!(!is_new(true), "its streams let it");
    }

    #[test]
    fn who_disagrees_about_the_only_operation_that_was_left_out_is_out_of_order() {
        let circle = [
            stall(WaitingFor::Start, 0, 1),
            stall(WaitingFor::Issue, 1, 2),
            stall(WaitingFor::Start, 2, 3),
            stall(WaitingFor::Start, 3, 0),
        ];
        assert_eq!(named(&circle), [1, 2], "or rank 1 called it too often");
        let mut many = circle.clone();
        many[1].waiting.push((Rank(9), 9));
        assert_eq!(named(&many), [2]);
        let two = [stall(WaitingFor::Issue, 0, 1), stall(WaitingFor::Start, 1, 0)];
        assert_eq!(named(&two), [0, 1], "of two nobody knows who is wrong");
    }
}
