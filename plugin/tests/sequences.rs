//! NCCL's own sequences of callbacks, as each version makes them, and what is in the segment afterwards.

#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "the plugin's bans are not its tests'"
)]
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod support;

use ringwatch_wire::codes::{ALGOS, FUNCS, PROTOS, TYPES, flag, kind, phase, timed};
use ringwatch_wire::reader::{OpSlot, ProxySlot};
use support::abi::{self, COLL_DEFAULT, Coll, P2P_DEFAULT, P2p, func};
use support::child::{Ran, run, run_with};
use support::library::Plugin;
use support::segment::{Recording, in_dir};

fn name(table: &[(u8, &'static str)], code: u8) -> &'static str {
    table.iter().find(|t| t.0 == code).map_or("-", |t| t.1)
}

fn names(o: &OpSlot) -> [&'static str; 4] {
    [name(FUNCS, o.func), name(TYPES, o.dtype), name(ALGOS, o.algo), name(PROTOS, o.proto)]
}

/// A test of all versions, each with a segment of its own: the child plays them one after the other, told
/// which by its environment.
fn each_version(test: &str, play: impl Fn(&Plugin, usize), check: impl Fn(usize, Recording)) {
    let version = "RINGWATCH_TEST_ABI";
    for v in 1..=7 {
        let ran: Option<Ran> = run_with(test, |c, _| {
            c.env(version, v.to_string());
        });
        let Some(ran) = ran else {
            let v = std::env::var(version).unwrap().parse().unwrap();
            return play(&Plugin::built(), v);
        };
        let ran = ran.succeeded();
        let recording = support::segment::only(&ran.dir);
        assert_eq!(recording.reader().abi(), Some(v as u32));
        recording.balanced();
        check(v, recording);
    }
}

/// A kernel launch; NCCL stops only what it got a handle for.
fn launch(p: &Plugin, v: usize, ctx: u64, group: u64) {
    let launch = p.start(v, ctx, &abi::kernel_launch(v, group));
    if launch != 0 {
        p.stop(v, launch);
    }
}

/// 7.2: one eager all-reduce, from the call to the last kernel's stop.
fn all_reduce(p: &Plugin, v: usize, ctx: u64, seq: u64, channels: u8, gpu_ns: u64) {
    let group = if v >= 5 { p.start(v, ctx, &abi::group_api(v, false, 1)) } else { 0 };
    let call = if v >= 5 {
        p.record(v, group, 23, None);
        let call = p.start(v, ctx, &abi::coll_api(v, group, func::ALL_REDUCE, 4096, false));
        p.stop(v, call);
        p.record(v, group, 24, None);
        launch(p, v, ctx, group);
        call
    } else {
        0
    };
    let plan = p.start(v, ctx, &abi::group(v));
    assert_ne!(plan, 0, "a NULL plan suppresses its operations up to 2.27");
    let coll = Coll { parent: call, plan, seq, count: 4096, channels, rank: 3, ..COLL_DEFAULT };
    let op = p.start(v, ctx, &coll.at(v));
    p.stop(v, op);
    p.stop(v, plan);
    if v >= 5 {
        p.stop(v, group);
    }
    if v >= 3 {
        let kernels: Vec<_> = (0..channels)
            .map(|ch| p.start(v, ctx, &abi::kernel_ch(v, op, ch + 8, gpu_ns + u64::from(ch))))
            .collect();
        for kernel in kernels {
            if v >= 4 {
                p.record(v, kernel, 22, Some((gpu_ns + 10_000, 0)));
            }
            p.stop(v, kernel);
        }
    }
}

/// A plan's number among its likes: the bits above say whether they are a communicator's sends and receives.
fn number_of(plan: u64) -> u64 {
    plan & ((1 << 26) - 1)
}

#[test]
fn eager_all_reduces() {
    each_version(
        "eager_all_reduces",
        |p, v| {
            let ctx = p.init(v, 0xfeed).context;
            for seq in 0..3 {
                all_reduce(p, v, ctx, seq, 2, 1_000_000 * (seq + 1));
            }
            p.finalize(v, ctx);
        },
        |v, r| {
            assert_eq!(r.losses(), [], "v{v}");
            let comm = r.reader().comms().next().unwrap();
            // v1 to v3 tell it with the first operation.
            assert_eq!(comm.id, Some((0xfeed, 3)), "v{v}");
            assert_eq!((comm.issued, comm.replayed), (3, 0));
            assert!(comm.finalized_ns.is_some());
            let ops = r.ops();
            assert_eq!(ops.len(), 3, "v{v}: called and issued are one operation");
            for (o, n) in ops.iter().zip(0u64..) {
                assert_eq!(names(o), ["AllReduce", "ncclFloat32", "RING", "SIMPLE"], "v{v}");
                assert_eq!((o.kind, o.order, o.seq, o.count), (kind::COLLECTIVE, Some(n), Some(n), 4096));
                assert_eq!((o.channels, o.warps), (if v >= 4 { 2 } else { 0 }, 16), "v{v}");
                assert_eq!((o.capture, number_of(o.plan), o.flags), (None, n + 1, 0));
                let issued = o.issued_ns.unwrap();
                assert_eq!(o.called_ns.is_some(), v >= 5);
                assert!(o.called_ns.is_none_or(|c| c <= issued));
                assert_eq!(o.group, None, "a bare call is no group");
                // Without CUDA or a mask that may be written later, kernel events are always on, where they are.
                let how = if v >= 5 { timed::KERNEL } else { timed::NOT_OFFERED };
                assert_eq!((o.timed, o.event_ns), (how, None), "v{v}");
                assert_eq!(o.stream, if v >= 5 { 0xbeef } else { 0 });
                assert_eq!(o.user_tag, 0, "v7's own fields count only where NCCL's version is known");
                assert_eq!(r.progress(o.ticket), if v >= 3 { (2, 2) } else { (0, 0) }, "v{v}");
            }
            let channels = r.channels();
            assert_eq!(channels.len(), if v >= 3 { 6 } else { 0 });
            for (c, n) in channels.iter().zip(0u64..) {
                assert_eq!((c.op, u64::from(c.channel)), (n / 2, n % 2 + 8));
                assert!(c.stop_seen_ns.unwrap() >= c.start_seen_ns);
                let start = (v >= 4).then_some(1_000_000 * (n / 2 + 1) + n % 2);
                assert_eq!(c.start_gpu_ns, start);
                assert_eq!(c.duration_ns, (v >= 4).then_some(10_000 - (n % 2) as i64));
            }
            assert_eq!(r.groups(), [], "bare calls have none");
        },
    );
}

/// 7.3: k all-reduces in one group; NCCL issues them in its own order, each naming its call.
#[test]
fn a_group_of_all_reduces() {
    each_version(
        "a_group_of_all_reduces",
        |p, v| {
            let ctx = p.init(v, 0xfeed).context;
            let counts = [300u64, 100, 200];
            let group = p.start(v, ctx, &abi::group_api(v, false, 2));
            let calls = counts.map(|n| {
                let call = p.start(v, ctx, &abi::coll_api(v, group, func::ALL_REDUCE, n, false));
                p.stop(v, call);
                call
            });
            p.record(v, group, 24, None);
            for _ in 0..2 {
                let launch = p.start(v, ctx, &abi::kernel_launch(v, group));
                p.stop(v, launch);
            }
            let plan = p.start(v, ctx, &abi::group(v));
            // Ascending size.
            for (seq, i) in [1usize, 2, 0].into_iter().enumerate() {
                let coll = Coll { parent: calls[i], plan, seq: seq as u64, count: counts[i], ..COLL_DEFAULT };
                let op = p.start(v, ctx, &coll.at(v));
                p.stop(v, op);
            }
            p.stop(v, plan);
            p.stop(v, group);
        },
        |v, r| {
            let mut ops = r.ops();
            ops.sort_by_key(|o| o.order);
            let got: Vec<_> =
                ops.iter().map(|o| (o.order, o.seq, o.count, o.kind, number_of(o.plan))).collect();
            let want =
                [100, 200, 300].iter().zip(0..).map(|(c, n)| (Some(n), Some(n), *c, kind::COLLECTIVE, 1));
            assert_eq!(got, want.collect::<Vec<_>>(), "v{v}");
            assert!(ops.iter().all(|o| o.group == (v >= 5).then_some(0)));
            assert_eq!(r.groups().len(), usize::from(v >= 5));
        },
    );
}

/// A group with more operations than the smallest ring has slots: its calls are overwritten before they are
/// issued, and are still no replays, or this rank's issue orders would part from the others'.
#[test]
fn a_group_larger_than_the_ring_keeps_its_issue_orders() {
    let Some(ran) = run_with("a_group_larger_than_the_ring_keeps_its_issue_orders", |c, _| {
        c.env("RINGWATCH_SEGMENT_BYTES", "16384");
    }) else {
        let p = Plugin::built();
        let ctx = p.init(5, 1).context;
        let group = p.start(5, ctx, &abi::group_api(5, false, 2));
        let calls: Vec<_> =
            (0..40).map(|n| p.start(5, ctx, &abi::coll_api(5, group, func::ALL_REDUCE, n, false))).collect();
        for (seq, parent) in calls.into_iter().enumerate() {
            p.start(5, ctx, &Coll { parent, seq: seq as u64, ..COLL_DEFAULT }.at(5));
        }
        return;
    };
    let r = support::segment::only(&ran.succeeded().dir);
    let comm = r.reader().comms().next().unwrap();
    assert_eq!((comm.issued, comm.replayed), (40, 0));
    assert!(r.ops().iter().all(|o| o.kind == kind::COLLECTIVE && o.order == o.seq));
}

/// 7.4: a send and a receive in one group, thrice; the orders count by peer and direction.
#[test]
fn sends_and_receives() {
    each_version(
        "sends_and_receives",
        |p, v| {
            let ctx = p.init(v, 0xfeed).context;
            for _ in 0..3 {
                for peer in [1, 6] {
                    let group = p.start(v, ctx, &abi::group_api(v, false, 2));
                    p.record(v, group, 23, None);
                    let send = p.start(v, ctx, &abi::p2p_api(v, group, func::SEND, 512));
                    p.stop(v, send);
                    let recv = p.start(v, ctx, &abi::p2p_api(v, group, func::RECV, 512));
                    p.stop(v, recv);
                    p.record(v, group, 24, None);
                    let plan = p.start(v, ctx, &abi::group(v));
                    // Schedule order, not call order.
                    let r = P2p { parent: recv, plan, func: func::RECV, peer, ..P2P_DEFAULT };
                    let r = p.start(v, ctx, &r.at(v));
                    let s = p.start(v, ctx, &P2p { parent: send, plan, peer, ..P2P_DEFAULT }.at(v));
                    p.stop(v, r);
                    p.stop(v, s);
                    p.stop(v, plan);
                    p.stop(v, group);
                    for op in [r, s] {
                        let kernel = p.start(v, ctx, &abi::kernel_ch(v, op, 0, 50));
                        p.record(v, kernel, 22, Some((90, 0)));
                        p.stop(v, kernel);
                    }
                }
            }
        },
        |v, r| {
            let ops = r.ops();
            assert_eq!(ops.len(), 12, "v{v}");
            for (which, func) in [(kind::SEND, "Send"), (kind::RECV, "Recv")] {
                for peer in [1, 6] {
                    let pair: Vec<_> = ops.iter().filter(|o| o.kind == which && o.root == peer).collect();
                    let orders: Vec<_> = pair.iter().filter_map(|o| o.order).collect();
                    assert_eq!(orders, [0, 1, 2], "v{v} {func} {peer}");
                    for o in pair {
                        assert_eq!(names(o), [func, "ncclFloat16", "-", "-"]);
                        assert_eq!((o.count, o.seq, o.flags), (512, None, 0));
                        assert_eq!(o.channels, if v >= 4 { 2 } else { 0 });
                        assert_eq!(o.user_tag, 0);
                        assert_eq!(r.progress(o.ticket), if v >= 3 { (1, 1) } else { (0, 0) });
                    }
                }
            }
            let comm = r.reader().comms().next().unwrap();
            assert_eq!(comm.issued, 0, "ranks do not share one order of sends and receives");
        },
    );
}

/// 7.5: captured with KernelCh on, replayed three times by another thread, with the dead call as parent; eager
/// operations between them go on counting.
#[test]
fn graph_capture_and_replays() {
    let Some(ran) = run("graph_capture_and_replays") else {
        let p = Plugin::built();
        let ctx = p.init(5, 1).context;
        all_reduce(&p, 5, ctx, 0, 1, 100);
        let group = p.start(5, ctx, &abi::group_api(5, true, 2));
        let call = p.start(5, ctx, &abi::coll_api(5, group, func::ALL_REDUCE, 99, true));
        p.stop(5, call);
        p.record(5, group, 24, None);
        launch(&p, 5, ctx, group);
        p.stop(5, group);
        for replay in 0..3 {
            let replayed = std::thread::spawn(move || {
                let plan = p.start(5, ctx, &abi::group(5));
                let coll = Coll { parent: call, plan, count: 99, seq: 7, buffers: (8, 8), ..COLL_DEFAULT };
                let op = p.start(5, ctx, &coll.at(5));
                p.stop(5, op);
                p.stop(5, plan);
                op
            });
            let op = replayed.join().unwrap();
            let kernel = p.start(5, ctx, &abi::kernel_ch(5, op, 0, 500));
            p.record(5, kernel, 22, Some((700, 0)));
            p.stop(5, kernel);
            all_reduce(&p, 5, ctx, replay + 1, 1, 900);
        }
        // The call's slot is given away, the graph still replays.
        for seq in 0..9000 {
            p.start(5, ctx, &Coll { seq, ..COLL_DEFAULT }.at(5));
        }
        p.start(5, ctx, &Coll { parent: call, count: 99, ..COLL_DEFAULT }.at(5));
        return;
    };
    let r = support::segment::only(&ran.succeeded().dir);
    assert_eq!(r.losses(), []);
    let comm = r.reader().comms().next().unwrap();
    assert_eq!((comm.issued, comm.replayed), (9004, 4));
    let last = r.ops().pop().unwrap();
    assert_eq!((last.kind, last.order, last.capture, last.count), (kind::REPLAY, Some(3), Some(1), 99));
    assert_eq!(last.called_ns, None);
    assert!(r.groups()[0].captured);
}

#[test]
fn replays_name_their_capture() {
    let Some(ran) = run("replays_name_their_capture") else {
        let p = Plugin::built();
        let ctx = p.init(7, 1).context;
        let group = p.start(7, ctx, &abi::group_api(7, true, 1));
        let call = p.start(7, ctx, &abi::coll_api(7, group, func::ALL_REDUCE, 99, true));
        p.stop(7, call);
        p.stop(7, group);
        for _ in 0..2 {
            let coll = Coll { parent: call, count: 99, seq: 7, buffers: (8, 8), tag: 5, ..COLL_DEFAULT };
            let op = p.start(7, ctx, &coll.at(7));
            p.stop(7, op);
            let kernel = p.start(7, ctx, &abi::kernel_ch(7, op, 0, 500));
            p.record(7, kernel, 22, Some((700, 0)));
            p.stop(7, kernel);
        }
        return;
    };
    let r = support::segment::only(&ran.succeeded().dir);
    let ops = r.ops();
    assert_eq!(ops.len(), 3);
    assert_eq!((ops[0].kind, ops[0].flags, ops[0].issued_ns), (kind::COLLECTIVE, flag::CAPTURED, None));
    assert_eq!(ops[0].order, None, "a capture is not an issue");
    for (o, n) in ops[1..].iter().zip(0..) {
        assert_eq!((o.kind, o.order, o.capture, o.seq), (kind::REPLAY, Some(n), Some(0), Some(7)));
        assert_eq!(o.flags, flag::IN_PLACE);
        assert_eq!(r.progress(o.ticket), (1, 1));
    }
    assert_eq!(r.channels()[1].duration_ns, Some(200));
}

/// NCCL 2.28.3 to 2.32.3, events switched off and on again: an old call is stopped and named again.
#[test]
fn a_stale_call_is_neither_a_replay_nor_issued_twice() {
    let Some(ran) = run("a_stale_call_is_neither_a_replay_nor_issued_twice") else {
        let p = Plugin::built();
        let ctx = p.init(5, 1).context;
        let call = p.start(5, ctx, &abi::coll_api(5, 0, func::ALL_REDUCE, 1, false));
        p.stop(5, call);
        for seq in 0..9000 {
            p.stop(5, call);
            let op = p.start(5, ctx, &Coll { parent: call, seq, ..COLL_DEFAULT }.at(5));
            p.stop(5, op);
        }
        return;
    };
    let r = support::segment::only(&ran.succeeded().dir);
    let comm = r.reader().comms().next().unwrap();
    assert_eq!((comm.issued, comm.replayed), (9000, 0));
    assert!(r.ops().iter().all(|o| o.kind == kind::COLLECTIVE && o.order == o.seq && o.capture.is_none()));
}

/// 7.6: network transfers. From v4 on steps carry the bytes; before, states of the transfer carry totals.
#[test]
fn network_transfers() {
    each_version(
        "network_transfers",
        |p, v| {
            let ctx = p.init(v, 0xfeed).context;
            let plan = p.start(v, ctx, &abi::group(v));
            let op = p.start(v, ctx, &Coll { plan, ..COLL_DEFAULT }.at(v));
            let me = p.pid;
            let wait = || std::thread::sleep(std::time::Duration::from_millis(2));
            let send = p.start(v, ctx, &abi::proxy_op(v, op, me, 9, 10, 4096, true));
            let recv = p.start(v, ctx, &abi::proxy_op(v, op, me, 9, 3, 4096, false));
            assert!(send != 0 && recv != 0);
            if v < 4 {
                for n in 1..=10 {
                    p.record(v, send, 0, Some((0, n)));
                    p.record(v, send, 2, Some((u64::from(n.unsigned_abs()) * 4000, n)));
                    p.record(v, send, 3, Some((u64::from(n.unsigned_abs()) * 4000, n)));
                }
                for n in 1..=3 {
                    p.record(v, recv, 4, Some((0, n)));
                    p.record(v, recv, 5, Some((u64::from(n.unsigned_abs()) * 1000, n)));
                    p.record(v, recv, 7, Some((u64::from(n.unsigned_abs()) * 1000, n)));
                }
            } else {
                p.record(v, send, 19, None);
                p.record(v, recv, 19, None);
                // More steps than may live at once.
                for n in 0..10 {
                    let step = p.start(v, ctx, &abi::proxy_step(v, send, n));
                    p.record(v, step, 8, Some((0, 0)));
                    wait();
                    p.record(v, step, 20, Some((77, 0)));
                    p.record(v, step, 20, Some((77, 0)));
                    p.record(v, step, 9, Some((4000, 0)));
                    p.stop(v, step);
                }
                for n in 0..3 {
                    // Every poll starts the step again until the network takes it.
                    let mut step = 0;
                    for _ in 0..50 {
                        let again = p.start(v, ctx, &abi::proxy_step(v, recv, n));
                        assert!(step == 0 || step == again, "a live step keeps its handle");
                        step = again;
                    }
                    p.record(v, step, 10, Some((55, 0)));
                    wait();
                    p.record(v, step, 11, Some((1000, 0)));
                    p.record(v, step, 12, Some((1000, 0)));
                    if n < 2 {
                        p.stop(v, step);
                    }
                }
            }
            p.stop(v, send);
        },
        |v, r| {
            assert_eq!(r.losses(), [], "v{v}");
            let [send, recv]: [ProxySlot; 2] = r.transfers().try_into().unwrap();
            assert_eq!(
                (send.is_send, send.peer, send.steps, send.chunk, send.channel),
                (true, 9, 10, 4096, 3)
            );
            assert_eq!((send.foreign, send.comm, send.pid > 0), (false, Some(0), true));
            assert_eq!((send.started, send.done, send.bytes), (10, 10, 40_000), "v{v}");
            assert!(send.stop_ns.is_some() && recv.stop_ns.is_none());
            assert_eq!((recv.started, recv.bytes), (3, 3000), "v{v}");
            assert_eq!(send.live, [None; 8]);
            if v < 4 {
                assert_eq!(recv.done, 3);
            } else {
                assert_eq!(recv.done, 2);
                assert!(send.waited_ns[0] >= 20_000_000, "the GPU: {:?}", send.waited_ns);
                assert!(recv.waited_ns[2] >= 6_000_000, "the wire: {:?}", recv.waited_ns);
                let live: Vec<_> = recv.live.iter().flatten().map(|l| l.0).collect();
                assert_eq!(live, [phase::GPU], "one step waits for the GPU still");
                let since = recv.live[2].unwrap().1;
                assert!(since > recv.start_ns && since - recv.start_ns < 60_000_000_000);
            }
        },
    );
}

/// 7.7: aborted. What was started stays as it was; the communicator says when it ended.
#[test]
fn an_abort_leaves_starts_that_never_stop() {
    each_version(
        "an_abort_leaves_starts_that_never_stop",
        |p, v| {
            let ctx = p.init(v, 0xfeed).context;
            let plan = p.start(v, ctx, &abi::group(v));
            let op = p.start(v, ctx, &Coll { plan, ..COLL_DEFAULT }.at(v));
            p.stop(v, op);
            p.start(v, ctx, &abi::kernel_ch(v, op, 0, 5));
            let t = p.start(v, ctx, &abi::proxy_op(v, op, p.pid, 1, 4, 64, false));
            p.start(v, ctx, &abi::proxy_step(v, t, 0));
            p.finalize(v, ctx);
            // A late callback with the dead context.
            let late = p.start(v, ctx, &abi::proxy_op(v, op, p.pid, 1, 4, 64, false));
            assert_ne!(late, 0);
        },
        |v, r| {
            let o = &r.ops()[0];
            assert_eq!(r.progress(o.ticket), (u16::from(v >= 3), 0));
            assert!(r.channels().iter().all(|c| c.stop_seen_ns.is_none()));
            let t = &r.transfers()[0];
            assert_eq!((t.stop_ns, t.started, t.done), (None, 1, 0));
            assert_eq!(t.live[0].map(|l| l.0), Some(phase::POSTED));
            assert!(r.reader().comms().next().unwrap().finalized_ns.is_some());
        },
    );
}

/// 7.7: copy-engine collectives take their place in the issue order.
#[test]
fn copy_engine_collectives() {
    let Some(ran) = run("copy_engine_collectives") else {
        let p = Plugin::built();
        let ctx = p.init(6, 1).context;
        all_reduce(&p, 6, ctx, 0, 1, 5);
        let group = p.start(6, ctx, &abi::group_api(6, false, 1));
        let call = p.start(6, ctx, &abi::coll_api(6, group, func::ALL_GATHER, 64, false));
        p.stop(6, call);
        let copy = p.start(6, ctx, &abi::ce_coll(6, call, func::ALL_GATHER, 64));
        p.stop(6, copy);
        p.stop(6, group);
        return;
    };
    let ran = ran.succeeded();
    assert_eq!(in_dir(&ran.dir).len(), 1);
    let r = support::segment::only(&ran.dir);
    let o = r.ops().pop().unwrap();
    assert_eq!((o.order, o.flags, o.count), (Some(1), flag::COPY_ENGINE, 64));
    assert_eq!(names(&o)[..2], ["AllGather", "ncclFloat32"]);
    assert!(o.called_ns.is_some() && o.issued_ns.is_some());
}
