use super::*;
use crate::join::testing::{all_reduce, member, process};
use crate::model::{Algo, DataType, Lane, OpRecord, Proto, Sketch, Timing, Untimed, Update};

fn feed(join: &mut Join, rank: u32, order: u64, at: u64, change: impl Fn(&mut OpRecord)) {
    let mut op = all_reduce(rank, order, at, Some((at + 5_000, Some(at + 105_000))));
    change(&mut op);
    join.feed(Update::Op(Box::new(op)));
}

/// Looks, and gives the sketches that are told.
fn sketches(p: &mut Publisher, join: &mut Join, mono_ns: u64) -> Vec<m::Sketch> {
    join.tick(mono_ns);
    let finished = join.take_finished();
    let out = p.look(join, &finished, &[], Moment { mono_ns, unix_ns: mono_ns });
    let mut told: Vec<m::Sketch> = out
        .iter()
        .flat_map(|o| m::Envelope::decode(o.bytes.as_slice()).expect("a message").sketches)
        .collect();
    told.sort_by_key(|s| (s.func, s.whole));
    told
}

fn node(ranks: std::ops::Range<u32>, of: u32) -> Join {
    let mut join = Join::new();
    join.keep_finished();
    for r in ranks {
        join.feed(process(r));
        join.feed(member(r, of, 0));
    }
    join
}

#[test]
fn a_sketch_says_whose_it_is_and_when_it_was() {
    let (mut join, mut p) = (node(2..4, 4), Publisher::new("b", 1, 65_536));
    assert_eq!(sketches(&mut p, &mut join, 10 * S), []);
    for order in 0..5 {
        for rank in 2..4 {
            feed(&mut join, rank, order, 10 * S + order * 1_000_000, |_| ());
        }
    }
    let told = sketches(&mut p, &mut join, 11 * S + 20_000_000);
    let [s] = &told[..] else { panic!("{told:?}") };
    assert_eq!((s.rank, s.ranks, s.from_s, s.seconds, s.whole), (2, 2, 10, 1, false));
    assert_eq!((s.count, s.timed, s.bytes, s.by_events), (5, 5, Some(5 << 22), 0));
    assert_eq!((s.busy_ns, s.counts.clone()), (500_000, vec![5]));
    assert_eq!(s.buckets, [u32::from(Sketch::bucket(100_000))]);
    assert_eq!(sketches(&mut p, &mut join, 12 * S), [], "nothing happened");
}

#[test]
fn how_far_ranks_are_is_told_where_the_budget_is_spent() {
    let (mut join, mut p) = (node(0..2, 2), Publisher::new("a", 1, 1_000));
    sketches(&mut p, &mut join, 10 * S);
    for rank in 0..2 {
        join.feed(member(rank, 2, 1));
        feed(&mut join, rank, 0, 10 * S, |_| ());
    }
    p.refill(11 * S);
    while p.pay(50, Priority::Urgent) {}
    join.tick(11 * S);
    let out = p.look(&join, &[], &[], Moment { mono_ns: 11 * S, unix_ns: 11 * S });
    let told = out.iter().flat_map(|o| m::Envelope::decode(o.bytes.as_slice()).expect("a message").beats);
    assert_eq!(told.map(|b| (b.rank, b.issued, b.open)).collect::<Vec<_>>(), [(0, 1, 0), (1, 1, 0)]);
    while p.pay(50, Priority::First) {}
    assert!(p.tokens < -900, "{}", p.tokens);
}

#[test]
fn a_transfer_is_told_by_its_sender_and_whole_where_both_are_here() {
    let pair = |from: u32, to: u32, own: u32| {
        move |o: &mut OpRecord| {
            let sends = own == from;
            o.lane = if sends { Lane::Send(Rank(to)) } else { Lane::Recv(Rank(from)) };
            (o.func, o.dtype) = (if sends { Func::Send } else { Func::Recv }, Some(DataType::Int8));
        }
    };
    let (mut join, mut p) = (node(0..2, 4), Publisher::new("a", 1, 65_536));
    sketches(&mut p, &mut join, 10 * S);
    // Within the node, to another one, and from another one.
    feed(&mut join, 0, 0, 10 * S, pair(0, 1, 0));
    feed(&mut join, 1, 0, 10 * S, pair(0, 1, 1));
    feed(&mut join, 0, 0, 10 * S, pair(0, 2, 0));
    feed(&mut join, 0, 0, 10 * S, pair(2, 0, 0));
    let told = sketches(&mut p, &mut join, 11 * S);
    let said: Vec<_> = told.iter().map(|s| (s.count, s.whole, s.algo, s.proto)).collect();
    assert_eq!(said, [(1, false, 0, 0), (1, true, 0, 0)]);
    assert_eq!(p.books().observed, 4, "the books are of parts");
}

#[test]
fn what_was_there_before_an_agent_is_no_news() {
    let (mut join, mut p) = (node(0..2, 2), Publisher::new("a", 1, 65_536));
    for order in 0..100 {
        for rank in 0..2 {
            feed(&mut join, rank, order, 5 * S + order * 1_000_000, |_| ());
        }
    }
    assert_eq!(sketches(&mut p, &mut join, 10 * S), []);
    for rank in 0..2 {
        feed(&mut join, rank, 100, 10 * S + 1_000_000, |_| ());
    }
    let told = sketches(&mut p, &mut join, 11 * S);
    assert_eq!(told.iter().map(|s| (s.count, s.whole)).collect::<Vec<_>>(), [(1, true)]);
}

#[test]
fn what_there_is_no_room_for_adds_up_and_says_over_how_long() {
    let (mut join, mut p) = (node(0..2, 2), Publisher::new("a", 1, 65_536));
    sketches(&mut p, &mut join, 10 * S);
    let mut told = Vec::new();
    for second in 10..14 {
        for rank in 0..2 {
            feed(&mut join, rank, second - 10, second * S + 1_000_000, |_| ());
        }
        // Nothing is left but for what is urgent.
        p.tokens = if second < 13 { i64::from(i32::MIN) } else { 65_536 };
        told.extend(sketches(&mut p, &mut join, (second + 1) * S));
    }
    let said: Vec<_> = told.iter().map(|s| (s.count, s.from_s, s.seconds)).collect();
    assert_eq!(said, [(4, 10, 4)]);
}

/// Runs a pass and returns all that it publishes.
fn published(p: &mut Publisher, join: &mut Join, mono_ns: u64) -> m::Envelope {
    join.tick(mono_ns);
    let finished = join.take_finished();
    let out = p.look(join, &finished, &[], Moment { mono_ns, unix_ns: mono_ns });
    let mut all = m::Envelope::default();
    for one in out.iter().map(|o| m::Envelope::decode(o.bytes.as_slice()).expect("a message")) {
        all.announced.extend(one.announced);
        all.records.extend(one.records);
        all.beats.extend(one.beats);
        all.processes.extend(one.processes);
        all.pairs.extend(one.pairs);
    }
    all
}

#[test]
fn a_late_arrival_is_announced_with_its_neighbors_once() {
    let (mut join, mut p) = (node(0..3, 3), Publisher::new("a", 1, 65_536));
    join.sample(Some(Sampling { level: LEVEL_MAX, ..Sampling::default() }));
    published(&mut p, &mut join, S);
    // Nothing is timed; rank 2 comes to operation 20 a second late.
    let at = |order: u64, rank: u32| {
        let late = if order > 20 || order == 20 && rank == 2 { S } else { 0 };
        2 * S + order * 10_000_000 + late
    };
    for order in 0..30 {
        for rank in 0..3 {
            let mut op = all_reduce(rank, order, at(order, rank), None);
            op.timing = crate::model::Timing::Not(crate::model::Untimed::Budget);
            join.feed(Update::Op(Box::new(op)));
        }
    }
    let orders = |e: &m::Envelope| e.announced.iter().map(|k| k.order).collect::<Vec<_>>();
    let first = published(&mut p, &mut join, 4 * S);
    assert_eq!(orders(&first), [19, 20, 21]);
    assert!([19, 20, 21].iter().all(|o| first.records.iter().filter(|r| r.order == Some(*o)).count() == 3));
    assert_eq!(orders(&published(&mut p, &mut join, 5 * S)), [0; 0]);
}

/// Three ranks issue ten operations that nothing times, and then stop; what is published until four seconds later.
fn untimed(mut change: impl FnMut(&mut crate::model::OpRecord)) -> m::Envelope {
    let (mut join, mut p) = (node(0..3, 3), Publisher::new("a", 1, 65_536));
    published(&mut p, &mut join, S);
    for order in 0..10 {
        for rank in 0..3 {
            let mut op = all_reduce(rank, order, 2 * S + order * 1_000_000, None);
            op.timing = crate::model::Timing::Not(crate::model::Untimed::Budget);
            change(&mut op);
            join.feed(Update::Op(Box::new(op)));
        }
    }
    let mut all = published(&mut p, &mut join, 2 * S + 20_000_000);
    for second in 3..7 {
        all.records.extend(published(&mut p, &mut join, second * S).records);
    }
    all
}

#[test]
fn all_that_a_process_has_not_ended_is_told_once_it_is_idle() {
    let all = untimed(|_| ());
    for order in 0..10 {
        assert_eq!(all.records.iter().filter(|r| r.order == Some(order)).count(), 3, "operation {order}");
    }
}

#[test]
fn an_operation_that_ranks_run_in_different_ways_is_told_at_once_and_announced() {
    let all = untimed(|op| {
        let wrong = (op.rank, op.order) == (Rank(1), Some(5));
        op.algo = Some(if wrong { Algo::Tree } else { Algo::Ring });
        op.proto = Some(Proto::Simple);
    });
    assert_eq!(all.announced.iter().map(|k| k.order).collect::<Vec<_>>(), [5]);
    assert!(all.records.iter().filter(|r| r.order == Some(5)).count() >= 3);
}

#[test]
fn both_sides_of_a_pause_are_announced_once() {
    // The other two ranks are on other nodes: whether this one was late or waited, nobody here knows.
    let (mut join, mut p) = (node(0..1, 3), Publisher::new("a", 1, 65_536));
    join.sample(Some(Sampling { level: LEVEL_MAX, ..Sampling::default() }));
    published(&mut p, &mut join, S);
    for order in 0..30 {
        let pause_ns = if order >= 20 { S / 4 } else { 0 };
        let mut op = all_reduce(0, order, 2 * S + order * 10_000_000 + pause_ns, None);
        op.timing = crate::model::Timing::Not(crate::model::Untimed::Budget);
        join.feed(Update::Op(Box::new(op)));
    }
    let orders = |e: &m::Envelope| e.announced.iter().map(|k| k.order).collect::<Vec<_>>();
    let first = published(&mut p, &mut join, 4 * S);
    assert_eq!(orders(&first), [19, 20]);
    assert!([19, 20].iter().all(|o| first.records.iter().any(|r| r.order == Some(*o))));
    assert_eq!(orders(&published(&mut p, &mut join, 5 * S)), [0; 0]);
}

#[test]
fn that_a_process_is_gone_comes_with_the_last_that_it_did() {
    let (mut join, mut p) = (node(0..1, 2), Publisher::new("a", 1, 65_536));
    published(&mut p, &mut join, 10 * S + S / 10);
    feed(&mut join, 0, 0, 10 * S + S / 10, |_| ());
    join.feed(member(0, 2, 1));
    let Update::Segment(mut record) = process(0) else { unreachable!("a process") };
    record.liveness = crate::model::Liveness::Gone(Some(10 * S + S / 5));
    join.feed(Update::Segment(record));
    let last = published(&mut p, &mut join, 10 * S + S / 4);
    assert_eq!((last.processes.len(), last.processes[0].alive), (1, false));
    assert_eq!(last.beats.iter().map(|b| b.issued).collect::<Vec<_>>(), [1]);
}

#[test]
fn agents_say_which_transfers_are_finished() {
    let (mut join, mut p) = (node(0..1, 2), Publisher::new("a", 1, 65_536));
    published(&mut p, &mut join, S);
    // Rank 0 sent twice to rank 1, the first of which is finished, and received once.
    let ends = [(true, 0, true), (true, 1, false), (false, 0, true)];
    for (sends, order, ended) in ends {
        feed(&mut join, 0, order, 2 * S + order * 1_000_000, |o| {
            o.lane = if sends { Lane::Send(Rank(1)) } else { Lane::Recv(Rank(1)) };
            o.func = if sends { Func::Send } else { Func::Recv };
            if !ended {
                let open = all_reduce(0, order, 3 * S, Some((3 * S, None)));
                (o.started, o.stopped, o.stamps) = (open.started, open.stopped, open.stamps);
            }
        });
    }
    let all = published(&mut p, &mut join, 4 * S).pairs;
    let pair = all.last().expect("a message for each direction");
    assert_eq!((pair.sent, pair.sent_done, pair.received, pair.received_done), (2, Some(1), 1, Some(1)));
    let beat = pair.beat(crate::model::SegmentId(pair.segment), CommId::unowned(pair.comm));
    assert_eq!((beat.sent_done, beat.received_done), (Some(1), Some(1)));
    assert_eq!(m::Pair::of(&crate::model::PairBeat { sent_done: Some(3), ..beat }).sent_done, Some(3));
}

#[test]
fn agents_say_which_ends_may_still_run() {
    let (mut join, mut p) = (node(0..1, 2), Publisher::new("a", 1, 65_536));
    published(&mut p, &mut join, S);
    let receive = |join: &mut Join, order: u64, at: u64| {
        feed(join, 0, order, at, |o| (o.lane, o.func) = (Lane::Recv(Rank(1)), Func::Recv));
    };
    receive(&mut join, 0, 2 * S);
    let told = |p: &mut Publisher, join: &mut Join, at: u64| {
        let pairs = published(p, join, at).pairs;
        pairs.iter().map(|b| (b.received_done, b.sent_may_run, b.received_may_run)).collect::<Vec<_>>()
    };
    assert_eq!(told(&mut p, &mut join, 3 * S), [(Some(1), false, false)]);
    assert_eq!(
        told(&mut p, &mut join, 5 * S),
        [(Some(1), false, true)],
        "its stamps alone say that it ended"
    );
    receive(&mut join, 1, 6 * S);
    assert_eq!(told(&mut p, &mut join, 7 * S), [(Some(2), false, false)], "it did, and the next one is new");
}

#[test]
fn agents_report_a_send_that_stays_the_newest() {
    let (mut join, mut p) = (node(0..1, 2), Publisher::new("a", 1, 65_536));
    published(&mut p, &mut join, S);
    feed(&mut join, 0, 0, 2 * S, |o| (o.lane, o.func) = (Lane::Send(Rank(1)), Func::Send));
    let mut newest = |at: u64| {
        let all = published(&mut p, &mut join, at);
        let pairs = all.pairs.iter().map(|b| (b.sent_done, b.sent_may_run, b.sent_is_newest));
        (pairs.collect::<Vec<_>>(), all.records.len())
    };
    assert_eq!(newest(3 * S).0, [(Some(1), false, false)]);
    assert_eq!(newest(5 * S), (vec![(Some(1), false, true)], 1), "its record tells in which launch it is");
    assert_eq!(newest(6 * S).1 + newest(8 * S).1, 0, "once");
}

#[test]
fn an_open_record_is_told_again_when_it_turns_out_to_be_untimed() {
    let (mut join, mut p) = (node(0..1, 2), Publisher::new("a", 1, 65_536));
    published(&mut p, &mut join, S);
    let mut told = |timing: Timing, at: u64| {
        feed(&mut join, 0, 0, 2 * S, |o| {
            (o.lane, o.func, o.timing) = (Lane::Send(Rank(1)), Func::Send, timing);
            (o.started, o.stopped) = (0, 0);
            o.stamps.clear();
        });
        published(&mut p, &mut join, at).records.len()
    };
    assert_eq!(told(Timing::Kernel, 3 * S), 1);
    assert_eq!(told(Timing::Kernel, 6 * S), 0, "nothing is new");
    assert_eq!(told(Timing::Not(Untimed::Alone), 9 * S), 1);
    assert_eq!(told(Timing::Not(Untimed::Alone), 12 * S), 0);
}

#[test]
fn the_end_of_a_transfer_that_stood_comes_with_its_beat() {
    // Its sender is on another node, so that the transfer is never whole here.
    let (mut join, mut p) = (node(0..1, 2), Publisher::new("a", 1, 65_536));
    published(&mut p, &mut join, S);
    let mut receive = |is_over: bool, at: u64| {
        feed(&mut join, 0, 0, 2 * S, |o| {
            (o.lane, o.func) = (Lane::Recv(Rank(1)), Func::Recv);
            let end_ns = is_over.then_some(5 * S);
            let kernel = all_reduce(0, 0, 2 * S, Some((2 * S + 5_000, end_ns)));
            (o.started, o.stopped, o.stamps) = (kernel.started, kernel.stopped, kernel.stamps);
        });
        let all = published(&mut p, &mut join, at);
        (all.records.len(), all.pairs.iter().filter_map(|b| b.received_done).collect::<Vec<_>>())
    };
    assert_eq!(receive(false, 5 * S), (1, vec![0]), "it stands");
    assert_eq!(receive(true, 5 * S + S / 10).1, [1], "within the same second");
    assert_eq!(receive(true, 5 * S + S / 5).1, [0; 0], "once");
}
