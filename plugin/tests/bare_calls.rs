//! Bare collectives, of which NCCL gets no handles: they are recorded in full, and in operation slots where they need
//! handles after all.

#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod support;

use ringwatch_wire::codes::{ALGOS, FUNCS, PROTOS, TYPES, flag, timed};
use ringwatch_wire::reader::OpSlot;
use support::abi::{self, COLL_DEFAULT, Coll, func};
use support::child::run_with;
use support::library::Plugin;
use support::segment::Recording;

fn name(table: &[(u8, &'static str)], code: u8) -> &'static str {
    table.iter().find(|t| t.0 == code).map_or("-", |t| t.1)
}

fn names(o: &OpSlot) -> [&'static str; 4] {
    [name(FUNCS, o.func), name(TYPES, o.dtype), name(ALGOS, o.algo), name(PROTOS, o.proto)]
}

/// A kernel launch; NCCL stops only what it got a handle for.
fn launch(p: &Plugin, v: usize, ctx: u64, group: u64) {
    let launch = p.start(v, ctx, &abi::kernel_launch(v, group));
    if launch != 0 {
        p.stop(v, launch);
    }
}

/// One bare all-reduce of NCCL 2.28 and later, which stops only what has a handle. Returns the handles of its group, call,
/// plan and operation.
fn bare(p: &Plugin, v: usize, ctx: u64, seq: u64) -> [u64; 4] {
    let group = p.start(v, ctx, &abi::group_api(v, false, 1));
    let call = p.start(v, ctx, &abi::coll_api(v, group, func::ALL_REDUCE, 4096, false));
    launch(p, v, ctx, group);
    let plan = p.start(v, ctx, &abi::group(v));
    let coll = Coll { parent: call, plan, seq, count: 4096, channels: 2, rank: 3, ..COLL_DEFAULT };
    let op = p.start(v, ctx, &coll.at(v));
    for handle in [call, op, plan, group].into_iter().filter(|h| *h != 0) {
        p.stop(v, handle);
    }
    [group, call, plan, op]
}

/// Several of them, and the last one's handles.
fn bares(p: &Plugin, v: usize, ctx: u64, seqs: std::ops::Range<u64>) -> [u64; 4] {
    seqs.fold([0; 4], |_, seq| bare(p, v, ctx, seq))
}

/// A child without GPU times, and what it recorded.
fn untimed(test: &str, play: impl Fn(&Plugin)) -> Option<Recording> {
    let ran = run_with(test, |c, _| {
        c.env("RINGWATCH_DETAIL", "calls");
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

#[test]
fn bare_calls_get_no_handles_and_are_recorded_in_full() {
    let played = untimed("bare_calls_get_no_handles_and_are_recorded_in_full", |p| {
        let [a, b] = [0xfeed, 0xbeef].map(|id| p.init(5, id).context);
        for seq in 0..100 {
            let none = bare(p, 5, a, seq).iter().all(|h| *h == 0);
            assert_eq!(none, seq >= 64, "the first may bring transfers: number {seq}");
            bare(p, 5, b, seq);
        }
        // A broadcast that NCCL does not issue.
        let broadcast = abi::coll_api(5, 0, func::BROADCAST, 8, false);
        assert_eq!(p.start(5, a, &abi::group_api(5, false, 1)), 0);
        assert_eq!(p.start(5, a, &broadcast), 0);
        bare(p, 5, a, 100);
    });
    let Some(r) = played else { return };
    for comm in 0..2 {
        let ops: Vec<_> = r.ops().into_iter().filter(|o| o.comm == comm && o.issued_ns.is_some()).collect();
        assert_eq!(ops.len(), 101 - usize::from(comm));
        for (o, n) in ops.iter().zip(0u64..) {
            assert_eq!(names(o), ["AllReduce", "ncclFloat32", "RING", "SIMPLE"]);
            assert_eq!((o.order, o.seq, o.count, o.channels), (Some(n), Some(n), 4096, 2));
            assert_eq!((o.timed, o.stream, o.group), (timed::NOT_ASKED, 0xbeef, None));
            assert!(o.called_ns.is_some_and(|c| c <= o.issued_ns.unwrap()));
        }
        let plans: std::collections::BTreeSet<_> = ops.iter().map(|o| o.plan).collect();
        assert_eq!(plans.len(), ops.len(), "each has a launch of its own");
    }
    let broadcast = r.ops().into_iter().find(|o| o.issued_ns.is_none()).unwrap();
    assert_eq!((names(&broadcast)[0], broadcast.order), ("Broadcast", None));
}

/// Communicators that do not block issue on another thread, and copy engines by events of their own.
#[test]
fn a_bare_call_that_is_issued_elsewhere_is_one_operation() {
    let played = untimed("a_bare_call_that_is_issued_elsewhere_is_one_operation", |p| {
        let ctx = p.init(6, 1).context;
        bares(p, 6, ctx, 0..64);
        for seq in 64..66 {
            assert_eq!(p.start(6, ctx, &abi::group_api(6, false, 1)), 0);
            assert_eq!(p.start(6, ctx, &abi::coll_api(6, 0, func::ALL_REDUCE, 4096, false)), 0);
            let issue = || {
                let plan = p.start(6, ctx, &abi::group(6));
                let coll = Coll { plan, seq, count: 4096, channels: 2, rank: 3, ..COLL_DEFAULT };
                assert_eq!(p.start(6, ctx, &coll.at(6)), 0);
            };
            std::thread::scope(|s| s.spawn(issue).join().unwrap());
        }
        assert_eq!(p.start(6, ctx, &abi::group_api(6, false, 1)), 0);
        assert_eq!(p.start(6, ctx, &abi::coll_api(6, 0, func::ALL_GATHER, 64, false)), 0);
        assert_eq!(p.start(6, ctx, &abi::ce_coll(6, 0, func::ALL_GATHER, 64)), 0);
        bare(p, 6, ctx, 67);
    });
    let Some(r) = played else { return };
    assert_eq!((r.ops().len(), r.lines().len()), (68, 4));
    let lines = r.lines();
    assert_eq!(lines.iter().map(|o| o.order).collect::<Vec<_>>(), [64, 65, 66, 67].map(Some));
    assert!(lines.iter().all(|o| o.issued_ns.is_some() && o.timed == timed::NOT_ASKED));
    assert_eq!(lines.iter().map(|o| o.channels).collect::<Vec<_>>(), [2, 2, 0, 2]);
    assert_eq!((names(&lines[2])[0], lines[2].flags), ("AllGather", flag::COPY_ENGINE));
}

/// An issue that a host callback may bring late keeps its handles.
#[test]
fn captures_bring_the_handles_back() {
    let played = untimed("captures_bring_the_handles_back", |p| {
        let ctx = p.init(6, 1).context;
        assert_eq!(bares(p, 6, ctx, 0..65), [0; 4]);
        let group = p.start(6, ctx, &abi::group_api(6, true, 1));
        let call = p.start(6, ctx, &abi::coll_api(6, group, func::ALL_REDUCE, 9, true));
        assert!(group != 0 && call != 0, "a replay names its call");
        p.stop(6, group);
        assert!(bare(p, 6, ctx, 65).iter().all(|h| *h != 0), "a host callback may issue");
    });
    let Some(r) = played else { return };
    assert_eq!((r.ops().len(), r.lines().len()), (67, 1));
}

#[test]
fn transfers_bring_the_handles_back() {
    let played = untimed("transfers_bring_the_handles_back", |p| {
        let ctx = p.init(7, 1).context;
        let first = bare(p, 7, ctx, 0);
        assert_eq!(bares(p, 7, ctx, 1..65), [0; 4]);
        p.start(7, ctx, &abi::proxy_op(7, first[3], p.pid, 9, 10, 4096, true));
        assert!(bare(p, 7, ctx, 65).iter().all(|h| *h != 0));
    });
    let Some(r) = played else { return };
    assert_eq!((r.ops().len(), r.lines().len(), r.transfers().len()), (66, 1, 1));
}
