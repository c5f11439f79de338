//! Groups, sends and receives, of which NCCL gets no handles: they are recorded in full, and have records and handles where
//! they need them after all.

#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod support;

use ringwatch_wire::codes::{FUNCS, call, kind, timed};
use ringwatch_wire::reader::OpSlot;
use std::collections::BTreeSet;
use support::abi::{self, COLL_DEFAULT, Coll, P2P_DEFAULT, P2p, func};
use support::child::{run, run_with};
use support::library::Plugin;
use support::segment::Recording;

const V: usize = 5;
/// The state of a group at its end.
const GROUP_END_CALLED: i32 = 24;

/// A member of a group.
#[derive(Debug, Clone, Copy)]
enum Member {
    /// An all-reduce of so many elements.
    AllReduce(u64),
    /// To a peer.
    Send(i32),
    /// From a peer.
    Recv(i32),
}
use Member::{AllReduce, Recv, Send};

fn call(p: &Plugin, ctx: u64, group: u64, m: Member) -> u64 {
    let call = match m {
        AllReduce(n) => abi::coll_api(V, group, func::ALL_REDUCE, n, false),
        Send(_) => abi::p2p_api(V, group, func::SEND, 512),
        Recv(_) => abi::p2p_api(V, group, func::RECV, 512),
    };
    p.start(V, ctx, &call)
}

fn issue(p: &Plugin, ctx: u64, parent: u64, plan: u64, m: Member, seq: u64) -> u64 {
    let pair = |func, peer| P2p { parent, plan, func, peer, ..P2P_DEFAULT }.at(V);
    let op = match m {
        AllReduce(count) => Coll { parent, plan, seq, count, ..COLL_DEFAULT }.at(V),
        Send(peer) => pair(func::SEND, peer),
        Recv(peer) => pair(func::RECV, peer),
    };
    p.start(V, ctx, &op)
}

/// Stops what has a handle, as NCCL 2.28 and later do.
fn stop(p: &Plugin, handles: &[u64]) {
    handles.iter().filter(|h| **h != 0).for_each(|h| p.stop(V, *h));
}

/// A group in one launch, whose members are issued in the order that `order` gives; all handles.
fn play(p: &Plugin, ctx: u64, depth: i32, members: &[Member], order: &[usize], seq: u64) -> Vec<u64> {
    let group = p.start(V, ctx, &abi::group_api(V, false, depth));
    let calls: Vec<u64> = members.iter().map(|m| call(p, ctx, group, *m)).collect();
    if group != 0 {
        p.record(V, group, GROUP_END_CALLED, None);
    }
    let mut all = vec![group, p.start(V, ctx, &abi::kernel_launch(V, group))];
    let plan = p.start(V, ctx, &abi::group(V));
    let issued = order.iter().zip(seq..).map(|(i, seq)| issue(p, ctx, calls[*i], plan, members[*i], seq));
    all.extend(issued);
    all.extend(&calls);
    all.push(plan);
    stop(p, &all);
    all
}

fn has_none(handles: &[u64]) -> bool {
    handles.iter().all(|h| *h == 0)
}

/// The calls before those of a test: so many that a communicator's operations are in lines.
fn warm_up(p: &Plugin, ctx: u64, members: &[Member]) {
    let order: Vec<usize> = (0..members.len()).collect();
    (0..64).for_each(|_| drop(play(p, ctx, 2, members, &order, 0)));
}

/// A child with this detail, and what it recorded.
fn played(test: &str, detail: &str, play: impl Fn(&Plugin)) -> Option<Recording> {
    let ran = run_with(test, |c, _| {
        c.env("RINGWATCH_DETAIL", detail);
    });
    let Some(ran) = ran else {
        play(&Plugin::built());
        return None;
    };
    let recording = support::segment::only(&ran.succeeded().dir);
    recording.balanced();
    assert_eq!(recording.losses(), []);
    Some(recording)
}

fn plans(ops: &[OpSlot]) -> BTreeSet<u64> {
    ops.iter().map(|o| o.plan).collect()
}

#[test]
fn collectives_of_a_group_are_launched_together() {
    let test = "collectives_of_a_group_are_launched_together";
    let played = played(test, "calls", |p| {
        let ctx = p.init(V, 1).context;
        warm_up(p, ctx, &[AllReduce(9)]);
        // NCCL issues them by size.
        let members = [AllReduce(300), AllReduce(100), AllReduce(200), AllReduce(100)];
        assert!(has_none(&play(p, ctx, 2, &members, &[1, 3, 2, 0], 64)));
        assert!(has_none(&play(p, ctx, 2, &members, &[0, 1, 2, 3], 68)));
        assert!(has_none(&play(p, ctx, 1, &[AllReduce(7)], &[0], 72)));
    });
    let Some(r) = played else { return };
    let lines = r.lines();
    assert_eq!((r.ops().len(), r.groups().len(), lines.len()), (64 + 9, 64, 9));
    let counts: Vec<_> = lines.iter().map(|o| o.count).collect();
    assert_eq!(counts, [300, 100, 200, 100, 300, 100, 200, 100, 7], "in the order of the calls");
    let orders: Vec<_> = lines.iter().map(|o| o.order.unwrap()).collect();
    assert_eq!(orders, [67, 64, 66, 65, 68, 69, 70, 71, 72]);
    for o in &lines {
        assert_eq!((o.kind, o.seq, o.group), (kind::COLLECTIVE, o.order, None));
        assert_eq!((o.timed, o.stream, o.channels), (timed::NOT_ASKED, 0xbeef, COLL_DEFAULT.channels));
        assert!(o.issued_ns >= o.called_ns);
    }
    for group in [&lines[..4], &lines[4..8], &lines[8..]] {
        assert_eq!(plans(group).len(), 1);
        assert!(group.iter().all(|o| o.issued_ns == group[0].issued_ns), "by the time of the launch");
    }
    assert_eq!(plans(&lines).len(), 3);
    assert_eq!(r.reader().comms().next().unwrap().issued, 73);
    assert_eq!(r.reader().recorded(call::PLAN), 67);
}

#[test]
fn sends_and_receives_have_their_peers_and_orders() {
    let test = "sends_and_receives_have_their_peers_and_orders";
    let played = played(test, "calls", |p| {
        let ctx = p.init(V, 1).context;
        warm_up(p, ctx, &[Send(1), Recv(1)]);
        // An all-to-all is called at once, and a pair by its schedule.
        let all = [Send(0), Recv(0), Send(1), Recv(1), Send(2), Recv(2)];
        assert!(has_none(&play(p, ctx, 1, &all, &[1, 0, 5, 2, 3, 4], 0)));
        assert!(has_none(&play(p, ctx, 2, &[Send(1), Recv(2)], &[1, 0], 0)));
        assert!(has_none(&play(p, ctx, 1, &[Send(2)], &[0], 0)));
    });
    let Some(r) = played else { return };
    let lines = r.lines();
    assert_eq!((r.ops().len(), lines.len()), (128 + 9, 9));
    let all_to_all: BTreeSet<_> = lines[..6].iter().map(|o| (o.kind, o.root, o.order)).collect();
    let wanted = [
        (kind::SEND, 0, Some(0)),
        (kind::SEND, 1, Some(64)),
        (kind::SEND, 2, Some(0)),
        (kind::RECV, 0, Some(0)),
        (kind::RECV, 1, Some(64)),
        (kind::RECV, 2, Some(0)),
    ];
    assert_eq!(all_to_all, BTreeSet::from(wanted));
    let last: Vec<_> = lines[6..].iter().map(|o| (o.kind, o.root, o.order)).collect();
    assert_eq!(last, [(kind::SEND, 1, Some(65)), (kind::RECV, 2, Some(1)), (kind::SEND, 2, Some(1))]);
    for o in &lines {
        let name = if o.kind == kind::SEND { "Send" } else { "Recv" };
        assert_eq!(FUNCS.iter().find(|f| f.0 == o.func).unwrap().1, name);
        assert_eq!((o.seq, o.count, o.flags, o.channels), (None, 512, 0, P2P_DEFAULT.channels));
    }
    assert_eq!([&lines[..6], &lines[6..8], &lines[8..]].map(|l| plans(l).len()), [1; 3]);
    assert_eq!(plans(&lines).len(), 3);
    let recorded = [call::P2P_CALL, call::P2P, call::COLL_CALL, call::COLL, call::PLAN];
    assert_eq!(recorded.map(|k| r.reader().recorded(k)), [137, 137, 0, 0, 67]);
    assert_eq!(r.reader().comms().next().unwrap().issued, 0);
}

/// One thread that drives two GPUs: each communicator has a launch of its own.
#[test]
fn a_group_of_two_communicators_has_two_launches() {
    let test = "a_group_of_two_communicators_has_two_launches";
    let played = played(test, "calls", |p| {
        let both = [1, 2].map(|id| p.init(V, id).context);
        both.iter().for_each(|ctx| warm_up(p, *ctx, &[AllReduce(9)]));
        let group = p.start(V, both[0], &abi::group_api(V, false, 2));
        let calls = both.map(|ctx| call(p, ctx, group, AllReduce(50)));
        let issued = both.map(|ctx| {
            let plan = p.start(V, ctx, &abi::group(V));
            [plan, issue(p, ctx, 0, plan, AllReduce(50), 64)]
        });
        assert!(group == 0 && has_none(&calls) && has_none(issued.as_flattened()));
    });
    let Some(r) = played else { return };
    let lines = r.lines();
    let told: Vec<_> = lines.iter().map(|o| (o.comm, o.count, o.order)).collect();
    assert_eq!(told, [(0, 50, Some(64)), (1, 50, Some(64))]);
    assert_eq!(plans(&lines).len(), 2);
}

/// NCCL issues all-gathers as bytes; the call names the user's own type.
#[test]
fn an_all_gather_keeps_the_type_of_its_call() {
    let test = "an_all_gather_keeps_the_type_of_its_call";
    let played = played(test, "calls", |p| {
        let ctx = p.init(V, 1).context;
        warm_up(p, ctx, &[AllReduce(9)]);
        let group = p.start(V, ctx, &abi::group_api(V, false, 2));
        for count in [100, 50] {
            p.start(V, ctx, &abi::coll_api(V, group, func::ALL_GATHER, count, false));
        }
        let plan = p.start(V, ctx, &abi::group(V));
        for count in [200, 400] {
            let coll = Coll { plan, func: func::ALL_GATHER, dtype: 0, count, seq: count, ..COLL_DEFAULT };
            assert_eq!(p.start(V, ctx, &coll.at(V)), 0);
        }
        // An all-reduce of as many bytes is another one.
        call(p, ctx, group, AllReduce(100));
        p.start(V, ctx, &Coll { plan, dtype: 0, count: 400, ..COLL_DEFAULT }.at(V));
    });
    let Some(r) = played else { return };
    let told: Vec<_> = r.lines().iter().map(|o| (o.dtype, o.count, o.seq)).collect();
    assert_eq!(told, [(8, 100, Some(400)), (8, 50, Some(200)), (8, 100, None)]);
    assert_eq!(r.ops().iter().filter(|o| o.called_ns.is_none()).count(), 1);
}

/// Communicators that do not block issue on another thread. What was called is found there; of later groups the launches
/// are wanted as well, so that they have handles.
#[test]
fn a_group_that_is_issued_elsewhere_brings_the_handles_back() {
    let test = "a_group_that_is_issued_elsewhere_brings_the_handles_back";
    let played = played(test, "calls", |p| {
        let ctx = p.init(V, 1).context;
        warm_up(p, ctx, &[AllReduce(9)]);
        let group = p.start(V, ctx, &abi::group_api(V, false, 2));
        let members = [AllReduce(50), Send(3)];
        members.iter().for_each(|m| assert_eq!(call(p, ctx, group, *m), 0));
        let elsewhere = || {
            let plan = p.start(V, ctx, &abi::group(V));
            members.iter().for_each(|m| assert_eq!(issue(p, ctx, 0, plan, *m, 64), 0));
        };
        std::thread::scope(|s| s.spawn(elsewhere).join().unwrap());
        assert_ne!(play(p, ctx, 2, &members, &[0, 1], 65)[0], 0);
        assert!(has_none(&play(p, ctx, 1, &[AllReduce(5)], &[0], 66)), "bare ones have none still");
    });
    let Some(r) = played else { return };
    let told: Vec<_> = r.lines().iter().map(|o| (o.count, o.order, o.plan != 0)).collect();
    assert_eq!(told, [(50, Some(64), false), (512, Some(0), false), (5, Some(66), true)]);
    assert_eq!(r.ops().len(), 64 + 5);
}

/// NCCL issues something that looks like no call: the calls of later groups have handles, by which they are known.
#[test]
fn an_issue_that_looks_like_no_call_brings_the_handles_back() {
    let test = "an_issue_that_looks_like_no_call_brings_the_handles_back";
    let played = played(test, "calls", |p| {
        let ctx = p.init(V, 1).context;
        warm_up(p, ctx, &[AllReduce(9)]);
        let group = p.start(V, ctx, &abi::group_api(V, false, 2));
        assert_eq!(call(p, ctx, group, AllReduce(50)), 0);
        let plan = p.start(V, ctx, &abi::group(V));
        assert_ne!(issue(p, ctx, 0, plan, AllReduce(51), 64), 0);
        assert_ne!(play(p, ctx, 2, &[AllReduce(5)], &[0], 65)[0], 0);
    });
    let Some(r) = played else { return };
    let told: Vec<_> = r.lines().iter().map(|o| (o.count, o.order)).collect();
    assert_eq!(told, [(50, None)]);
    let last: Vec<_> = r.ops().iter().rev().take(2).map(|o| (o.count, o.order)).collect();
    assert_eq!(last, [(5, Some(65)), (51, Some(64))]);
}

/// Each issue of a group looks for its call, so that a large group has a record after all.
#[test]
fn a_large_group_has_a_record_for_the_rest_of_it() {
    let test = "a_large_group_has_a_record_for_the_rest_of_it";
    let played = played(test, "calls", |p| {
        let ctx = p.init(V, 1).context;
        warm_up(p, ctx, &[AllReduce(9)]);
        let members: Vec<_> = (1_000..1_300).map(AllReduce).collect();
        let order: Vec<usize> = (0..300).rev().collect();
        play(p, ctx, 2, &members, &order, 64);
        assert!(has_none(&play(p, ctx, 2, &[AllReduce(1)], &[0], 364)), "the next one is in lines");
    });
    let Some(r) = played else { return };
    let ops: Vec<_> = r.ops().into_iter().filter(|o| o.count != 9).collect();
    assert_eq!((r.lines().len(), ops.len(), r.groups().len()), (257, 301, 65));
    for o in &ops[..300] {
        let n = o.count - 1_000;
        assert_eq!(o.order, Some(64 + 299 - n));
        let group = (n >= 256).then_some(64);
        assert_eq!((o.group, o.kind, o.timed), (group, kind::COLLECTIVE, timed::NOT_ASKED));
    }
}

/// A captured send or receive may be issued by a graph's thread at any time.
#[test]
fn a_captured_pair_brings_the_handles_back() {
    let test = "a_captured_pair_brings_the_handles_back";
    let played = played(test, "calls", |p| {
        let ctx = p.init(V, 1).context;
        warm_up(p, ctx, &[Send(1), Recv(1)]);
        let pair = [Send(1), Recv(1)];
        assert!(has_none(&play(p, ctx, 2, &pair, &[1, 0], 0)));
        let group = p.start(V, ctx, &abi::group_api(V, true, 2));
        let captured = abi::p2p_api(V, group, func::SEND, 512).captured();
        assert_ne!(p.start(V, ctx, &captured), 0);
        p.stop(V, group);
        assert!(!has_none(&play(p, ctx, 2, &pair, &[1, 0], 0)));
    });
    let Some(r) = played else { return };
    assert_eq!((r.lines().len(), r.ops().len()), (2, 128 + 2 + 3));
}

/// Groups are timed by kernel events when it is their turn, though they are in lines before.
#[test]
fn groups_have_their_turn_to_be_timed() {
    let test = "groups_have_their_turn_to_be_timed";
    let played = played(test, "auto", |p| {
        let ctx = p.init_switched(1);
        for seq in 0..4_000 {
            let members = [AllReduce(64), AllReduce(32)];
            play(p, ctx, 2, &members, &[1, 0], seq * 2);
            // The budget is a share of time.
            if seq % 200 == 0 {
                std::thread::sleep(std::time::Duration::from_millis(30));
            }
        }
    });
    let Some(r) = played else { return };
    let ops: Vec<_> = r.ops().into_iter().filter(|o| o.order.is_some()).collect();
    let by_kernel: Vec<_> = ops.iter().filter(|o| o.timed == timed::KERNEL).collect();
    eprintln!("{} lines, {} timed", r.lines().len(), by_kernel.len());
    assert!(r.lines().len() > 2_500, "two lines of three are operations: {}", r.lines().len());
    assert!(by_kernel.iter().any(|o| o.order.unwrap() > 2_000), "{} timed", by_kernel.len());
    let orders: BTreeSet<_> = ops.iter().filter_map(|o| o.order).collect();
    assert_eq!(orders.len(), ops.len(), "each order once");
}

/// More threads than there are rings of lines.
#[test]
fn every_group_of_many_threads_is_counted() {
    const CALLERS: u64 = 12;
    const EACH: u64 = 300;
    let test = "every_group_of_many_threads_is_counted";
    let played = played(test, "calls", |p| {
        let all = std::sync::Barrier::new(CALLERS as usize);
        let contexts: Vec<u64> = (0..CALLERS).map(|n| p.init(V, n).context).collect();
        std::thread::scope(|s| {
            for ctx in contexts {
                let all = &all;
                s.spawn(move || {
                    all.wait();
                    let members = [Send(1), AllReduce(7), Recv(1)];
                    (0..EACH).for_each(|n| drop(play(p, ctx, 2, &members, &[1, 2, 0], n)));
                    all.wait();
                });
            }
        });
    });
    let Some(r) = played else { return };
    let (reader, all) = (r.reader(), CALLERS * EACH);
    let recorded = [call::COLL_CALL, call::COLL, call::P2P_CALL, call::P2P, call::PLAN];
    assert_eq!(recorded.map(|k| reader.recorded(k)), [all, all, 2 * all, 2 * all, all]);
    assert!(reader.comms().all(|c| c.issued == EACH));
    for o in r.lines() {
        let wanted = if o.kind == kind::COLLECTIVE { (7, 0) } else { (512, 1) };
        assert_eq!((o.count, if o.kind == kind::COLLECTIVE { 0 } else { o.root }), wanted);
        assert!(o.plan != 0 && o.order.is_some_and(|n| n < EACH));
    }
}

/// Groups that one thread calls, each of a send and a receive: how often the mask was switched between the two so that NCCL
/// waits for a mark that never comes, and how often it was switched at all.
fn call_groups(p: &Plugin, ctx: u64, (depth, members): (i32, [Member; 2]), groups: u64) -> (u64, u64) {
    let (mut harmed, mut switched, mut last) = (0, 0, p.asks_for_kernels());
    for seq in 0..groups {
        let first = p.asks_for_kernels();
        let group = p.start(V, ctx, &abi::group_api(V, false, depth));
        let one = call(p, ctx, group, members[0]);
        let second = p.asks_for_kernels();
        let other = call(p, ctx, group, members[1]);
        let of = |wanted: fn(&Member) -> bool| if wanted(&members[0]) { first } else { second };
        let (send, receive) = (of(|m| matches!(m, Send(_))), of(|m| matches!(m, Recv(_))));
        harmed += u64::from(send && !receive);
        switched += u64::from(first != last);
        last = first;
        if group != 0 {
            p.record(V, group, GROUP_END_CALLED, None);
        }
        let launch = p.start(V, ctx, &abi::kernel_launch(V, group));
        let plan = p.start(V, ctx, &abi::group(V));
        let issued = [(one, members[0]), (other, members[1])].map(|(c, m)| issue(p, ctx, c, plan, m, seq));
        stop(p, &[issued[0], issued[1], launch, plan, one, other, group]);
    }
    (harmed, switched)
}

#[test]
fn threads_in_groups_at_once_do_not_switch_kernel_events_between_a_send_and_a_receive() {
    let test = "threads_in_groups_at_once_do_not_switch_kernel_events_between_a_send_and_a_receive";
    // The last is ncclAlltoAll, a bare call that makes several.
    for (order, members) in [
        ("send", (2, [Send(1), Recv(1)])),
        ("receive", (2, [Recv(1), Send(1)])),
        ("all-to-all", (1, [Send(1), Recv(1)])),
    ] {
        let ran = run_with(test, |c, _| {
            c.env("ORDER", order).env("RINGWATCH_OVERHEAD_BUDGET", "20%");
        });
        if ran.is_none() && std::env::var("ORDER").unwrap() != order {
            continue;
        }
        let Some(ran) = ran else {
            let p = Plugin::built();
            let contexts = [1, 2].map(|id| p.init_switched(id));
            let all: Vec<_> = std::thread::scope(|s| {
                let threads = contexts.map(|ctx| s.spawn(move || call_groups(&p, ctx, members, 100_000)));
                threads.into_iter().map(|t| t.join().unwrap()).collect()
            });
            // A thread that loses its processor between its look at the mask and the callback may meet a switch.
            assert!(all.iter().map(|(harmed, _)| harmed).sum::<u64>() <= 2, "{order}: {all:?}");
            assert!(all.iter().any(|(_, switched)| *switched > 0), "nothing was switched: {all:?}");
            return;
        };
        ran.succeeded();
    }
}

/// Plays in a process of its own, which has to succeed.
fn in_a_child(test: &str, play: impl Fn()) {
    match run(test) {
        Some(ran) => drop(ran.succeeded()),
        None => play(),
    }
}

#[test]
fn kernel_events_stay_off_where_a_process_has_several_ranks_of_a_communicator() {
    let test = "kernel_events_stay_off_where_a_process_has_several_ranks_of_a_communicator";
    in_a_child(test, || {
        let p = Plugin::built();
        let contexts = [1, 2].map(|id| p.init_switched(id));
        assert!(p.asks_for_kernels(), "one rank of each");
        p.finalize(V, contexts[1]);
        p.init_switched(2);
        assert!(p.asks_for_kernels(), "one is gone");
        p.init_switched(1);
        assert!(!p.asks_for_kernels());
        p.init_switched(3);
        assert!(!p.asks_for_kernels());
    });
}

#[test]
fn kernel_events_end_once_a_rank_sends_to_itself() {
    let test = "kernel_events_end_once_a_rank_sends_to_itself";
    in_a_child(test, || {
        let p = Plugin::built();
        let ctx = p.init_switched(1);
        play(&p, ctx, 2, &[Send(1), Recv(1)], &[0, 1], 0);
        assert!(p.asks_for_kernels());
        // The rank that issues.
        play(&p, ctx, 2, &[Send(0), Recv(0)], &[0, 1], 1);
        assert!(!p.asks_for_kernels());
    });
}

#[test]
fn a_group_of_a_communicator_without_a_slot_is_in_nobodys_way() {
    let test = "a_group_of_a_communicator_without_a_slot_is_in_nobodys_way";
    in_a_child(test, || {
        let p = Plugin::built();
        let ctx = p.init_switched(1);
        play(&p, ctx, 2, &[Send(1), Recv(1)], &[0, 1], 0);
        assert_eq!(p.start(V, 0x1234, &abi::group_api(V, false, 2)), 0, "no communicator of ours");
        p.init_switched(1);
        assert!(!p.asks_for_kernels(), "they are switched off");
    });
}
