use super::*;
use crate::join::testing::{all_reduce, member, process};
use crate::model::{Func, Lane, Severity, Timing, Untimed, Update};

const S: u64 = 1_000_000_000;

/// `late[i]` is (rank, ns late) in the operation of order i, in a communicator that has been at work for a while.
fn run(late: &[(u32, u64)]) -> Vec<Finding> {
    run_from(30, late)
}

fn run_from(first: u64, late: &[(u32, u64)]) -> Vec<Finding> {
    run_on(4, first, late)
}

/// The same, with so many ranks a host.
fn run_on(a_host: u32, first: u64, late: &[(u32, u64)]) -> Vec<Finding> {
    run_every(S, a_host, first, late)
}

/// The same, with an operation every so many ns.
fn run_every(every_ns: u64, a_host: u32, first: u64, late: &[(u32, u64)]) -> Vec<Finding> {
    let mut j = Join::new();
    let n = first + late.len() as u64;
    for r in 0..4 {
        let Update::Segment(mut s) = process(r) else { unreachable!("a process") };
        s.host = format!("node{}", r / a_host);
        j.feed(Update::Segment(s));
        j.feed(member(r, 4, n));
        for (o, (late_rank, by)) in late.iter().enumerate() {
            let at = S + o as u64 * every_ns;
            let (arrive, end) = (at + if r == *late_rank { *by } else { 0 }, at + by + 100_000);
            j.feed(Update::Op(Box::new(all_reduce(
                r,
                first + o as u64,
                arrive,
                Some((arrive + 10_000, Some(end))),
            ))));
        }
    }
    j.tick(100 * S);
    StragglerRule::new(Settings::default()).check(&j, 100 * S)
}

#[test]
fn a_rank_that_loses_little_very_often_is_told_where_that_is_dear() {
    let late = vec![(2, 4_000_000); 600];
    let found = run_every(30_000_000, 4, 30, &late);
    assert_eq!((found.len(), found[0].ranks.as_slice()), (1, [Rank(2)].as_slice()));
    assert_eq!(found[0].severity, Severity::Warning, "a seventh of 18 seconds");
    assert!(run_every(300_000_000, 4, 30, &late).is_empty(), "one in 75 of the time");
    let in_turn: Vec<(u32, u64)> = (0..600).map(|o| (o / 40 % 4, 3_000_000)).collect();
    assert!(run_every(30_000_000, 4, 30, &in_turn).is_empty(), "all of them in turn");
}

#[test]
fn a_very_late_rank_is_told_at_once() {
    let found = run(&[(0, 1_000), (3, 3_000_000_000), (1, 1_000)]);
    assert_eq!(found.len(), 1);
    let f = &found[0];
    assert_eq!((f.ranks.as_slice(), f.operation.order), ([Rank(3)].as_slice(), 31));
    assert!((f.evidence[0].value.expect("seconds") - 3.0).abs() < 1e-6);
    assert!(f.evidence.iter().any(|e| e.text.contains("on the GPUs")));
}

/// Returns what is found where a rank of another host comes so late to a broadcast, in ms. The job is looked at every 100 ms.
fn late_to_a_broadcast(late_ms: u64) -> Vec<Finding> {
    const MS: u64 = 1_000_000;
    let mut j = Join::new();
    let op = |rank: u32, order: u64, at_ns: u64, end_ns: Option<u64>| {
        let mut op = all_reduce(rank, order, at_ns, Some((at_ns + 10_000, end_ns)));
        (op.func, op.root) = (Func::Broadcast, Some(Rank(0)));
        Update::Op(Box::new(op))
    };
    for r in 0..3 {
        j.feed(process(r));
        let Update::Comm(mut c) = member(r, 3, 31 - u64::from(r == 2)) else { unreachable!("a member") };
        c.host_clock = u64::from(r / 2);
        j.feed(Update::Comm(c));
        for order in 0..30 {
            let at_ns = S + order * 100 * MS;
            j.feed(op(r, order, at_ns, Some(at_ns + MS)));
        }
    }
    let at_ns = 4 * S;
    (0..2).for_each(|r| j.feed(op(r, 30, at_ns, None)));
    (0..=late_ms / 100).for_each(|n| j.tick(at_ns + n * 100 * MS));
    let came_ns = at_ns + late_ms * MS;
    j.feed(member(2, 3, 31));
    (0..3).for_each(|r| j.feed(op(r, 30, if r == 2 { came_ns } else { at_ns }, Some(came_ns + MS))));
    j.tick(came_ns + 10 * S);
    StragglerRule::new(Settings::default()).check(&j, came_ns + 10 * S)
}

#[test]
fn where_no_time_tells_how_late_a_rank_was_the_standstill_does() {
    let found = late_to_a_broadcast(2_500);
    let [f] = found.as_slice() else { panic!("{found:?}") };
    assert_eq!(
        (f.ranks.as_slice(), f.operation.order, f.severity),
        ([Rank(2)].as_slice(), 30, Severity::Warning)
    );
    let by_s = f.evidence[0].value.expect("seconds");
    assert!((2.2..=2.5).contains(&by_s), "{by_s}");
    assert!(f.evidence.iter().any(|e| e.text.contains("stood still")), "{f:?}");
    assert_eq!(late_to_a_broadcast(800).len(), 0, "looks see it too coarsely");
}

#[test]
fn a_late_rank_without_a_cpu_is_told_so() {
    let mut j = Join::new();
    for r in 0..2 {
        j.feed(process(r));
        j.feed(member(r, 2, 12));
        for o in 10..12 {
            let late = if r == 1 && o == 11 { 300_000_000 } else { 0 };
            let at = S + (o - 10) * S;
            let kernel = Some((at + late + 10_000, Some(at + late + 100_000)));
            j.feed(Update::Op(Box::new(all_reduce(r, o, at + late, kernel))));
        }
    }
    let mut fact = crate::model::HostFact::new(SegmentId(2), 2 * S + 500_000_000);
    fact.cpu_starved = Some(0.4);
    j.feed(Update::Host(Box::new(fact)));
    j.tick(10 * S);
    let found = StragglerRule::new(Settings::default()).check(&j, 10 * S);
    assert!(found[0].evidence.iter().any(|e| e.text.contains("had none for up to 40 %")), "{found:?}");
    assert!(found[0].advice.contains("pinning"), "{found:?}");
}

/// Rank 1 of 3 sends to rank 2, twenty times. From the eleventh on `comes` says how late the sender is, and how long
/// it was inside a transfer with rank 0 just before.
fn transfers(comes: impl Fn(u64) -> (u64, u64)) -> Vec<Finding> {
    let mut j = Join::new();
    for r in 0..3 {
        j.feed(process(r));
        j.feed(member(r, 3, 0));
    }
    let mut feed = |from: u32, to: u32, order: u64, starts: [u64; 2], end: u64| {
        for (rank, lane, at) in
            [(from, Lane::Send(Rank(to)), starts[0]), (to, Lane::Recv(Rank(from)), starts[1])]
        {
            let mut o = all_reduce(rank, order, at, Some((at, Some(end))));
            o.lane = lane;
            o.func = if rank == from { Func::Send } else { Func::Recv };
            o.stamps[0].channel = (from + to) as u8;
            j.feed(Update::Op(Box::new(o)));
        }
    };
    for order in 0..20 {
        let at = (order + 1) * S;
        let (late, inside) = if order < 10 { (20_000_000, 0) } else { comes(order) };
        feed(0, 1, order, [at + late - inside.max(1_000), at + late - inside], at + late);
        feed(1, 2, order, [at + late, at], at + late + 100_000);
    }
    j.tick(30 * S);
    j.tick(31 * S);
    StragglerRule::new(Settings::default()).check(&j, 31 * S)
}

#[test]
fn who_keeps_its_peer_waiting_much_longer_than_ever_is_late() {
    assert_eq!(transfers(|_| (25_000_000, 0)), vec![], "a pipeline waits in every step");
    let found = transfers(|order| (if order == 15 { 400_000_000 } else { 20_000_000 }, 0));
    assert_eq!(found.len(), 1, "{found:?}");
    let f = &found[0];
    let track = Track::Pair(Rank(1), Rank(2));
    assert_eq!((f.ranks.as_slice(), f.operation.order, f.operation.track), (&[Rank(1)][..], 15, track));
    let held = transfers(|order| if order == 15 { (400_000_000, 390_000_000) } else { (20_000_000, 0) });
    assert!(held.iter().all(|f| f.ranks != [Rank(1)]), "it was held by rank 0: {held:?}");
}

#[test]
fn the_first_operation_never_counts() {
    assert_eq!(run_from(0, &[(3, 2_900_000_000), (1, 1_000)]), vec![]);
}

#[test]
fn a_job_that_gets_going_is_late_now_and_then() {
    let late = [(2, 30_000_000); 10];
    assert_eq!(run_from(1, &late), vec![]);
    assert_eq!(run(&late).len(), 1);
    assert_eq!(
        run_from(1, &[(3, 2_900_000_000), (1, 1_000)]),
        vec![],
        "plans are made, libraries are loaded"
    );
    assert_eq!(run_from(8, &[(3, 2_900_000_000), (1, 1_000)]).len(), 1);
}

#[test]
fn a_little_late_counts_when_it_repeats_on_one_rank() {
    let mut late = vec![(0, 1_000)];
    late.extend([(2, 8_000_000); 4]);
    assert_eq!(run(&late), vec![], "four times are not enough");
    late.push((2, 9_000_000));
    let found = run(&late);
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].ranks, vec![Rank(2)]);
    assert_eq!(found[0].evidence[1].value, Some(5.0));
}

#[test]
fn a_straggler_that_catches_up_is_over() {
    // The last operation is at 4 s; the rules are asked at 100 s.
    let found = run(&[(0, 1_000), (3, 3_000_000_000), (1, 1_000)]);
    assert!(!found[0].open);
}

#[test]
fn the_same_rank_by_chance_is_noise() {
    let of = |times, all, ranks: usize| by_chance(times, all, 1.0 / ranks as f64, ranks);
    assert!((of(2, 2, 2) - 0.5).abs() < 1e-9);
    assert!(of(5, 5, 4) < CHANCE && of(5, 9, 4) > CHANCE);
    assert!(of(8, 8, 2) < CHANCE && of(5, 5, 2) > CHANCE);
    assert!(of(300, 512, 16_384) < CHANCE);
}

#[test]
fn two_slow_ranks_that_alternate_are_both_told() {
    let late: Vec<(u32, u64)> = (0..80).map(|i| (1 + i % 2, 8_000_000)).collect();
    let ranks: Vec<_> = run(&late).into_iter().map(|f| f.ranks).collect();
    assert_eq!(ranks, [[Rank(1)], [Rank(2)]]);
}

/// Two ranks with ten operations a second: `late(n)` is who is late in the n-th of them, and by how many ns.
fn ten_a_second(seconds: u64, late: impl Fn(u64) -> (u32, u64)) -> Vec<Finding> {
    const FIRST: u64 = 30;
    let mut j = Join::new();
    for r in 0..2 {
        j.feed(process(r));
        j.feed(member(r, 2, FIRST + 10 * seconds));
        for n in 0..10 * seconds {
            let (rank, by) = late(n);
            let arrive = S + n * S / 10 + if rank == r { by } else { 0 };
            let stamps = Some((arrive + 10_000, Some(S + n * S / 10 + by + 100_000)));
            j.feed(Update::Op(Box::new(all_reduce(r, FIRST + n, arrive, stamps))));
        }
    }
    j.tick(100 * S);
    StragglerRule::new(Settings::default()).check(&j, 100 * S)
}

#[test]
fn ranks_that_are_behind_for_seconds_in_turn_are_noise() {
    const BY: u64 = 9_000_000;
    assert_eq!(ten_a_second(20, |n| (u32::from(n / 40 % 2 == 1), BY)), vec![]);
    let found = ten_a_second(4, |n| (u32::from(n > 2), BY));
    let severities: Vec<Severity> = found.iter().map(|f| f.severity).collect();
    assert_eq!(severities, [Severity::Info], "of two ranks one is behind for some seconds");
    let found = ten_a_second(20, |_| (1, BY));
    assert_eq!(found.iter().map(|f| f.ranks.as_slice()).collect::<Vec<_>>(), [[Rank(1)]]);
}

#[test]
fn cheap_seconds_do_not_hide_a_rank_that_becomes_slow() {
    // Each of two ranks is a little late for a second by turns, then one of them is late by much more.
    let little = |n: u64| (u32::from(n / 10 % 2 == 1), 2_000_000);
    let found = ten_a_second(28, |n| if n < 140 { little(n) } else { (1, 30_000_000) });
    assert_eq!(found.iter().map(|f| f.ranks.as_slice()).collect::<Vec<_>>(), [[Rank(1)]]);
}

#[test]
fn a_rank_that_costs_little_more_than_the_other_is_not_accused() {
    // Both are late by turns within every second, and only rank 1 by enough to count.
    let with = |other: u64| ten_a_second(60, |n| if n % 2 == 1 { (1, 8_000_000) } else { (0, other) });
    assert_eq!(with(4_000_000), vec![]);
    assert_eq!(with(2_000_000).len(), 1);
}

#[test]
fn of_two_ranks_the_one_that_costs_many_times_as_much_is_late() {
    // Rank 0 is a little late once a second, and rank 1 by much more in all other operations.
    let with = |seconds: u64, other: u64| {
        ten_a_second(seconds, |n| if n % 10 == 0 { (0, other) } else { (1, 80_000_000) })
    };
    let severities = |seconds| with(seconds, 20_000_000).iter().map(|f| f.severity).collect::<Vec<_>>();
    assert_eq!(severities(7), [Severity::Warning]);
    assert_eq!(severities(5), [Severity::Info], "it may be behind for some seconds");
}

#[test]
fn a_slow_rank_that_holds_up_its_neighbor_is_not_a_slow_host() {
    let late: Vec<(u32, u64)> = (0..40).map(|i| (2 + u32::from(i % 8 == 0), 8_000_000)).collect();
    let found = run_on(2, 30, &late);
    assert_eq!(found.iter().map(|f| f.ranks.as_slice()).collect::<Vec<_>>(), [[Rank(2)]]);
}

#[test]
fn the_ranks_of_a_slow_host_are_one_finding() {
    let late: Vec<(u32, u64)> = (0..40).map(|i| (2 + i % 2, 8_000_000)).collect();
    let found = run_on(2, 30, &late);
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(found[0].ranks, [Rank(2), Rank(3)]);
    assert!(found[0].evidence.iter().any(|e| e.text.contains("those of host node1")), "{found:?}");
}

#[test]
fn a_host_may_be_slow_since_some_moment() {
    // Others are late before, in turn; then ranks 2 and 3 alone are.
    let before = (0..12).map(|i| (i % 2, 8_000_000));
    let late: Vec<(u32, u64)> = before.chain((0..20).map(|i| (2 + i % 2, 150_000_000))).collect();
    let found = run_on(2, 30, &late);
    assert!(found.iter().any(|f| f.ranks == [Rank(2), Rank(3)]), "{found:?}");
}

#[test]
fn what_it_costs_decides_whether_it_is_a_warning() {
    let of = |late: &[(u32, u64)]| run(late).remove(0);
    assert_eq!(of(&[(3, 300_000_000); 2]).severity, Severity::Info);
    let f = of(&[(3, 300_000_000); 8]);
    assert_eq!(f.severity, Severity::Warning);
    let cost = f.cost.expect("a price");
    assert!((cost.last_minute.lost_s - 2.4).abs() < 1e-6 && (cost.last_minute.percent - 4.0).abs() < 1e-6);
    // The job is older than a minute.
    assert_eq!(cost.in_all.lost_s, cost.last_minute.lost_s);
    assert!(cost.in_all.of_s > 60.0 && cost.in_all.percent < 4.0, "{cost:?}");
}

#[test]
fn a_single_late_arrival_wakes_nobody_unless_it_costs_much() {
    assert_eq!(run(&[(0, 1_000), (3, 300_000_000), (1, 1_000)])[0].severity, Severity::Info);
    let found = run(&[(0, 1_000), (3, 3_000_000_000), (1, 1_000)]);
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!((found[0].ranks.as_slice(), found[0].severity), ([Rank(3)].as_slice(), Severity::Warning));
}

#[test]
fn what_late_arrivals_cost_in_all_outlives_their_records() {
    let mut j = Join::new();
    for r in 0..2 {
        j.feed(process(r));
        j.feed(member(r, 2, 630));
    }
    for o in 0..600 {
        let (at, late) = ((o + 1) * S, 300_000_000);
        for r in 0..2 {
            let arrive = at + if r == 1 { late } else { 0 };
            let kernel = Some((arrive + 10_000, Some(at + late + 100_000)));
            j.feed(Update::Op(Box::new(all_reduce(r, 30 + o, arrive, kernel))));
        }
        j.tick(at + S - 1);
    }
    j.tick(601 * S);
    let found = StragglerRule::new(Settings::default()).check(&j, 601 * S);
    let cost = found[0].cost.expect("a price");
    assert!((cost.last_minute.lost_s - 18.0).abs() < 1e-3, "{cost:?}");
    assert!(
        (cost.in_all.lost_s - 180.0).abs() < 1e-3 && (cost.in_all.percent - 30.0).abs() < 0.2,
        "{cost:?}"
    );
}

#[test]
fn ranks_late_in_turn_are_noise() {
    let late: Vec<(u32, u64)> = (0..24).map(|i| (i % 4, 8_000_000)).collect();
    assert_eq!(run(&late), vec![]);
}

#[test]
fn an_operation_without_gpu_times_is_judged_when_its_last_rank_has_issued_it() {
    let mut j = Join::new();
    for r in 0..2u32 {
        j.feed(process(r));
        j.feed(member(r, 2, 12));
        for o in 9..11 {
            let t = S + o * 1_000_000;
            j.feed(Update::Op(Box::new(all_reduce(r, o, t, Some((t + 5_000, Some(t + 50_000)))))));
        }
        let mut last = all_reduce(r, 11, 3 * S + u64::from(r) * 300_000_000, None);
        // Its events are read at the next call, and there is none.
        last.timing = Timing::Events;
        j.feed(Update::Op(Box::new(last)));
    }
    j.tick(3 * S + 400_000_000);
    j.tick(3 * S + 500_000_000);
    let rule = StragglerRule::new(Settings::default());
    let found = rule.check(&j, 3 * S + 500_000_000);
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!((found[0].ranks.as_slice(), found[0].operation.order), ([Rank(1)].as_slice(), 11));
    assert!(found[0].evidence.iter().any(|e| e.text.contains("hosts' issue times")), "{found:?}");
    j.tick(9 * S);
    assert_eq!(rule.check(&j, 9 * S).len(), 1, "and once");
}

/// Untimed operations every 100 ms; rank 2 comes 800 ms late to that of order 40, and rank 0 issues the next one so long
/// after its own call of that.
fn untimed_with_one_late(next_after_ns: u64) -> Vec<Finding> {
    let mut j = Join::new();
    for r in 0..4 {
        j.feed(process(r));
        j.feed(member(r, 4, 50));
        for order in 30..50 {
            let behind = if order > 40 { 800_000_000 } else { 0 };
            let late = if r == 2 && order == 40 { 800_000_000 } else { 0 };
            let mut at_ns = S + (order - 30) * 100_000_000 + behind + late;
            if r == 0 && order == 41 {
                at_ns = S + 1_000_000_000 + next_after_ns;
            }
            let mut op = all_reduce(r, order, at_ns, None);
            op.timing = Timing::Not(Untimed::Budget);
            j.feed(Update::Op(Box::new(op)));
        }
    }
    j.tick(10 * S);
    j.tick(11 * S);
    StragglerRule::new(Settings::default()).check(&j, 11 * S)
}

#[test]
fn a_rank_for_which_all_hosts_wait_is_late_without_gpu_times() {
    let found = untimed_with_one_late(850_000_000);
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!((found[0].ranks.as_slice(), found[0].operation.order), (&[Rank(2)][..], 40));
    assert_eq!(untimed_with_one_late(100_000_000), vec![], "rank 0 did not wait for it");
}

/// Untimed operations every 100 ms; rank 2 comes 800 ms late to that of order 40, and the others issue two more before
/// they wait, which have GPU times or not.
fn late_while_the_others_run_ahead(ahead_is_timed: bool) -> Vec<Finding> {
    let mut j = Join::new();
    let at_40_ns = 2 * S;
    for r in 0..4 {
        j.feed(process(r));
        j.feed(member(r, 4, 50));
    }
    for order in 30..50_u64 {
        for r in 0..4 {
            let at_ns = match (order, r) {
                (30..40, _) => at_40_ns - (40 - order) * 100_000_000,
                (40..=42, 2) => at_40_ns + 800_000_000 + (order - 40) * 1_000_000,
                (40..=42, _) => at_40_ns + (order - 40) * 10_000_000,
                _ => at_40_ns + 900_000_000 + (order - 43) * 100_000_000,
            };
            let is_timed = ahead_is_timed && (41..=42).contains(&order);
            let start_ns = at_40_ns + 850_000_000 + (order - 30) * 1_000_000;
            let kernel = is_timed.then_some((start_ns, Some(start_ns + 100_000)));
            let mut op = all_reduce(r, order, at_ns, kernel);
            if !is_timed {
                op.timing = Timing::Not(Untimed::Budget);
            }
            j.feed(Update::Op(Box::new(op)));
        }
        j.tick(at_40_ns + 900_000_000 + order * 100_000_000);
    }
    j.tick(10 * S);
    j.tick(11 * S);
    StragglerRule::new(Settings::default()).check(&j, 11 * S)
}

#[test]
fn a_rank_is_late_in_the_first_operation_that_the_others_issued_ahead() {
    let found = late_while_the_others_run_ahead(false);
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!((found[0].ranks.as_slice(), found[0].operation.order), (&[Rank(2)][..], 40));
}

#[test]
fn an_operation_behind_timed_ones_does_not_say_that_the_others_waited() {
    assert_eq!(late_while_the_others_run_ahead(true), vec![]);
}

#[test]
fn few_late_arrivals_of_which_one_rank_has_most_are_chance_while_they_cost_little() {
    // Of twelve late arrivals of four ranks one has nine: so it is by chance in two of a thousand jobs.
    let mut late: Vec<(u32, u64)> = [1, 0, 2, 3].map(|rank| (rank, 8_000_000)).to_vec();
    late.extend([(2, 8_000_000); 8]);
    assert_eq!(run(&late), vec![]);
    late.extend([(2, 8_000_000); 8]);
    assert_eq!(run(&late).len(), 1);
}

#[test]
fn the_nearer_to_warm_the_less_lateness_counts() {
    let rule = StragglerRule::new(Settings::default());
    let often = Settings::default().late_often_ns;
    assert_eq!(rule.least_ns(8, often), 200_000_000);
    assert_eq!(rule.least_ns(16, often) / 1_000_000, 31);
    assert_eq!((rule.least_ns(24, often), rule.least_ns(1_000, often)), (5_000_000, 5_000_000));
}
