//! The bytes of every format version, for good.
//!
//! `data/segment-vN.bin` never change: a writer of that version somewhere may have to be read. When the format
//! changes, raise `FORMAT_VERSION`, keep the old files (and say in this test what becomes of them: read still, or
//! refused by version), and add the new one by running this test with RINGWATCH_GOLDEN_NEW=1, which writes a file
//! that is missing and never one that is there. Version 1 is read still.

#![cfg(not(loom))]
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod support;

use ringwatch_wire::codes::{Flaw, Loss, call, flag, kind, made, phase, timed};
use ringwatch_wire::layout::{
    FORMAT_VERSION, Geometry, LineRings, Region, channel, comm, group, head, line, lines as layout_lines, op,
    proxy,
};
use ringwatch_wire::lines::{self, IssueBits};
use ringwatch_wire::reader::{ChannelSlot, Found, GroupSlot, OpSlot, ProxySlot, Reader, Text};
use ringwatch_wire::ring::{Segment, text_word};
use ringwatch_wire::sync::{Claim, Word, mark, mark_add, mark_once};
use std::path::{Path, PathBuf};

fn texts<const W: usize>(claim: &Claim<'_, W>, at: usize, count: usize, text: &str) {
    for i in 0..count {
        claim.set(at + i, text_word(text.as_bytes(), i, count));
    }
}

fn what(comm: u64, kind: u8, func: u8, dtype: u8, algo: u8, proto: u8, flags: u8) -> u64 {
    [kind, func, dtype, algo, proto, flags].iter().rev().fold(0, |w, b| w << 8 | u64::from(*b)) << 16 | comm
}

/// Five calls in the four lines of ring 1, of which the last was not issued.
fn write_bare(s: &Segment<'_>) {
    let (head, ring) = (&s.lines.heads()[1], s.lines.ring(1).unwrap());
    assert!(lines::take(head, 0x7f00_0000_1000));
    for n in 0..5u64 {
        let what = 5 << 16 | 8 << 24 | u64::from(-1i32 as u32) << 32;
        let recorded = lines::Call { what, count: 100 + n, called_ns: 6_000_004_000 + n, stream: 0xabc0 };
        lines::call(head, ring.line(n).unwrap(), n, &recorded);
        head[layout_lines::PLANS].set(n + 1);
        if n < 4 {
            let issue = IssueBits {
                algo: 2,
                proto: 3,
                channels: 4,
                warps: 16,
                flags: flag::IN_PLACE,
                timed: timed::NOT_BUDGET,
                launch: 0,
            };
            let recorded = lines::Issue { seq: 200 + n, order: 30 + n, issue: issue.word() };
            lines::issue(ring.line(n).unwrap(), ring.lap(n), &recorded);
            head[layout_lines::ISSUES].set(n + 1);
        }
    }
}

/// A group in ring 0: a send, a receive and a collective, and the launch of the first two.
fn write_group(s: &Segment<'_>) {
    let (head, ring) = (&s.lines.heads()[0], s.lines.ring(0).unwrap());
    assert!(lines::take(head, 0x7f00_0000_2000));
    let kinds = [(7, line::SEND), (8, line::RECV), (5, line::COLLECTIVE)];
    for ((func, kind), n) in kinds.into_iter().zip(0u64..) {
        let (what, count) = (func << 16 | 7 << 24 | 2 << 32, 512 | kind << line::KIND_SHIFT);
        let recorded = lines::Call { what, count, called_ns: 6_000_005_000 + n, stream: 0xabc0 };
        lines::call(head, ring.line(n).unwrap(), n, &recorded);
    }
    let (count, called_ns) = (line::LAUNCH << line::KIND_SHIFT, 6_000_005_900);
    lines::launch(head, ring.line(3).unwrap(), 3, &lines::Call { what: 0, count, called_ns, stream: 0 });
    let issue = |n: u64, order: u64, flags: u8| {
        let bits =
            IssueBits { channels: 2, flags, timed: timed::NOT_ASKED, launch: 3 - n, ..IssueBits::default() };
        let recorded = lines::Issue { seq: 6, order, issue: bits.word() };
        lines::issue(ring.line(n).unwrap(), ring.lap(n), &recorded);
    };
    issue(1, op::NO_ORDER, flag::ORDER_UNKNOWN);
    issue(0, 40, 0);
    for (word, n) in [
        (layout_lines::PLANS, 1),
        (layout_lines::LAUNCHES, 1),
        (layout_lines::PAIR_CALLS, 2),
        (layout_lines::PAIR_ISSUES, 2),
        (layout_lines::PENDING, 2),
        (layout_lines::LAUNCHED, 4),
    ] {
        head[word].set(n);
    }
}

fn write() -> Vec<u8> {
    let geometry = Geometry::within(0x3c00).unwrap().with_lines(LineRings::new(2, 2));
    let words: Vec<Word> = (0..geometry.bytes() / 8).map(|_| Word::new(0)).collect();
    let s = Segment::new(&words, &geometry);
    s.format(&geometry);
    s.set(head::PID, 4242 | 1000 << 32);
    s.set(head::START_TICKS, 987_654);
    s.set(head::NONCE, 0x1234_5678_9abc_def1);
    s.set(head::CREATED_MONO_NS, 5_000_000_000);
    s.set(head::CREATED_UNIX_NS, 1_800_000_000_000_000_000);
    s.set(head::NCCL, 22_809 | 5 << 32);
    s.set_text(head::PLUGIN_VERSION, head::PLUGIN_VERSION_WORDS, b"0.1.0");
    s.set_text(head::BOOT_ID, head::BOOT_ID_WORDS, b"01234567-89ab-cdef-0123-456789abcdef");
    s.set_text(head::HOST, head::HOST_WORDS, b"node-17");
    s.set_text(head::PROGRAM, head::PROGRAM_WORDS, b"a-name-that-is-too-long");
    s.set_text(head::ENV, head::ENV_WORDS, b"RANK=3\nWORLD_SIZE=8\n");

    let (_, c) = s.comm.claim_free(Loss::CommTable, |_| true).unwrap();
    c.set(comm::ID, 0xfeed_beef);
    c.set(comm::RANK, 3 | 8 << 32);
    c.set(comm::NODES, 1 | comm::KNOWN);
    c.set(comm::INIT_NS, 5_000_000_100);
    c.set(comm::ISSUED, 19);
    c.set(comm::REPLAYED, 2);
    c.set(comm::STATE, u64::from(made::FAILED) | 5 << 8);
    c.set(comm::READY_NS, 5_000_000_200);
    texts(&c, comm::NAME, comm::NAME_WORDS, "default_pg");
    texts(&c, comm::GPU, comm::GPU_WORDS, "0000:4b:00.0");
    c.publish();

    let (g, c) = s.group.claim().unwrap();
    c.set(group::WHAT, 2 << 16 | 1 << 32);
    c.set(group::START_NS, 6_000_000_000);
    c.publish();
    let slot = s.group.held(g).unwrap();
    for (i, ns) in
        [(group::END_CALLED, 10), (group::LAUNCH_START, 20), (group::LAUNCH_STOP, 30), (group::STOP, 40)]
    {
        assert!(mark_once(&slot[i], s.group.lap(g), ns, || true));
    }

    // More operations than slots: the ring has gone round once, and marks are of lap 2.
    for n in 0..19u64 {
        let (t, c) = s.op.claim().unwrap();
        for i in 1..op::WORDS {
            c.set(i, 0);
        }
        c.set(op::WHAT, what(0, kind::COLLECTIVE, 5, 8, 2, 3, flag::IN_PLACE));
        c.set(op::ORDER, n);
        c.set(op::COUNT, 1 << n);
        c.set(op::ROOT, 2 << 32 | 16 << 40);
        c.set(op::CALLED_NS, 6_000_000_000 + n);
        c.set(op::SEQ, n + 100);
        c.set(op::GROUP, g + 1);
        c.set(op::STREAM, 0xabc0);
        c.set(op::PLAN, n + 1);
        c.set(op::TIMED, u64::from(timed::EVENTS) | 77 << 8);
        c.set(op::REDOP, 3 | op::PRELOADED | op::GROUPED);
        c.publish();
        let c = s.op.claim_again(t).unwrap();
        c.set(op::ISSUED_NS, 6_000_001_000 + n);
        c.publish();
        let slot = s.op.held(t).unwrap();
        assert!(mark_once(&slot[op::ENQUEUED], s.op.lap(t), 50 + n, || true));
        assert!(mark_once(&slot[op::EVENT_NS], s.op.lap(t), 9_000 + n, || true));
        assert!(mark_once(&slot[op::EVENT_SEEN], s.op.lap(t), 70_000, || true));
        assert!(mark_once(&slot[op::RETURNED], s.op.lap(t), 5_000 << 4 | 7, || true));
        assert!(mark_add(&slot[op::PROGRESS], s.op.lap(t), 2, || true));
        assert!(mark_add(&slot[op::PROGRESS], s.op.lap(t), 1 << 16, || true));
    }
    let (_, c) = s.op.claim().unwrap();
    for i in 1..op::WORDS {
        c.set(i, 0);
    }
    c.set(op::WHAT, what(0, kind::SEND, 7, 10, 0, 0, flag::ORDER_UNKNOWN));
    c.set(op::ORDER, op::NO_ORDER);
    c.set(op::SEQ, op::NO_ORDER);
    c.set(op::ROOT, u64::from((-1i32) as u32));
    c.set(op::CAPTURE, 8);
    c.set(op::USER_TAG, 99);
    texts(&c, op::VARIANT, op::VARIANT_WORDS, "AllReduce_AGxLL_R");
    c.publish();

    let (t, c) = s.op.claim().unwrap();
    for i in 1..op::WORDS {
        c.set(i, 0);
    }
    c.set(op::WHAT, what(0, kind::CALL, 13, 8, 0, 0, 0));
    c.set(op::ORDER, op::NO_ORDER);
    c.set(op::SEQ, op::NO_ORDER);
    c.set(op::COUNT, 256);
    c.set(op::ROOT, 6);
    c.set(op::CALLED_NS, 6_000_000_500);
    c.set(op::REDOP, op::PRELOADED);
    c.publish();
    let slot = s.op.held(t).unwrap();
    assert!(mark_once(&slot[op::RETURNED], s.op.lap(t), 1_000 << 4, || true));

    for (ch, ns) in [(0u64, 12_345i64), (31, -7)] {
        let (t, c) = s.channel.claim().unwrap();
        c.set(channel::OP, 18 | ch << 56);
        c.set(channel::START_GPU_NS, 1_800_000_000_000_000_000 + ch);
        c.set(channel::START_SEEN_NS, 6_000_002_000);
        c.publish();
        let slot = s.channel.held(t).unwrap();
        slot[channel::DURATION].set(mark(s.channel.lap(t), channel::BIAS.wrapping_add_signed(ns)));
        slot[channel::STOP_SEEN].set(mark(s.channel.lap(t), 13_000));
    }

    let (t, c) = s.proxy.claim().unwrap();
    c.set(proxy::PARENT, 0x1234_4000_0000_0012);
    c.set(proxy::WHAT, proxy::NO_COMM | 3 << 16 | 1 << 24 | 1 << 25 | 5 << 32);
    c.set(proxy::STEPS, 16 | 524_288 << 32);
    c.set(proxy::START_NS, 6_000_003_000);
    c.set(proxy::PID, 777);
    c.publish();
    let slot = s.proxy.held(t).unwrap();
    let lap = s.proxy.lap(t);
    for (i, v) in [(proxy::BYTES, 1 << 20), (proxy::STARTED, 4), (proxy::DONE, 3)] {
        slot[i].set(mark(lap, v));
    }
    for (i, v) in [100, 200, 300, 400].into_iter().enumerate() {
        slot[proxy::WAITED + i].set(mark(lap, v));
    }
    slot[proxy::LIVE + 3].set(mark(lap, 500 << 4 | u64::from(phase::WIRE)));

    write_bare(&s);
    write_group(&s);

    s.book(call::INIT, Ok(()));
    s.book(1, Ok(()));
    s.book(call::STOP, Err(Loss::Stale));
    s.book(call::STATE, Err(Loss::BadParent));
    s.flaw(Flaw::PairOrder);
    s.open_for_readers();
    words.iter().flat_map(|w| w.get().to_le_bytes()).collect()
}

fn file(version: u32) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/data/segment-v{version}.bin"))
}

#[test]
fn the_writer_writes_these_bytes() {
    let path = file(FORMAT_VERSION);
    let made = write();
    if std::env::var_os("RINGWATCH_GOLDEN_NEW").is_some() {
        use std::io::Write;
        let file = std::fs::OpenOptions::new().write(true).create_new(true).open(&path);
        file.expect("the golden file is there already: it never changes").write_all(&made).unwrap();
    }
    let golden = std::fs::read(&path).unwrap();
    let differ: Vec<_> = (0..made.len().max(golden.len()) / 8)
        .filter(|i| made.get(i * 8..i * 8 + 8) != golden.get(i * 8..i * 8 + 8))
        .collect();
    assert!(
        differ.is_empty(),
        "words {differ:?} differ from this format version as published: see the top of this file"
    );
}

fn text<const N: usize>(t: Text<N>) -> String {
    String::from_utf8(t.bytes().collect()).unwrap()
}

fn check_lines(version: u32, r: &Reader<'_>) {
    if version < 3 {
        assert_eq!((r.line_rings(), r.line(0, 0)), (0, Found::NotYet));
        return;
    }
    let sizes = [0, 1, 2].map(|ring| (r.line_ring(ring).slots(), r.line_ring(ring).next()));
    let group = if version < 4 { 0 } else { 1 };
    assert_eq!((r.line_rings(), sizes), (2, [(4, 4 * group), (4, 5), (0, 0)]));
    assert_eq!((r.recorded(call::COLL_CALL), r.recorded(call::PLAN)), (5 + group, 5 + group));
    assert_eq!((r.recorded(call::P2P_CALL), r.recorded(call::P2P)), (2 * group, 2 * group));
    assert_eq!((r.line(1, 0), r.line(1, 5)), (Found::Overwritten, Found::NotYet));
    check_group(version, r);
    for n in 1..5 {
        let number = layout_lines::NUMBER | 1 << layout_lines::RING_SHIFT | n;
        let called = OpSlot {
            ticket: number,
            kind: kind::COLLECTIVE,
            func: 5,
            dtype: 8,
            count: 100 + n,
            root: -1,
            called_ns: Some(6_000_004_000 + n),
            stream: 0xabc0,
            ..OpSlot::default()
        };
        let issued = OpSlot {
            algo: 2,
            proto: 3,
            channels: 4,
            warps: 16,
            flags: flag::IN_PLACE,
            timed: timed::NOT_BUDGET,
            seq: Some(200 + n),
            order: Some(30 + n),
            issued_ns: called.called_ns,
            plan: number + 1,
            ..called
        };
        assert_eq!(r.line(1, n), Found::Is(Some(if n < 4 { issued } else { called })));
    }
}

fn check_group(version: u32, r: &Reader<'_>) {
    if version < 4 {
        assert_eq!(r.line(0, 0), Found::NotYet);
        return;
    }
    let op = |n: u64, kind, func| OpSlot {
        ticket: layout_lines::NUMBER | n,
        kind,
        func,
        dtype: 7,
        count: 512,
        root: 2,
        called_ns: Some(6_000_005_000 + n),
        stream: 0xabc0,
        ..OpSlot::default()
    };
    let issued = |op| OpSlot {
        channels: 2,
        timed: timed::NOT_ASKED,
        root: 6,
        issued_ns: Some(6_000_005_900),
        plan: (layout_lines::NUMBER | 3) + 1,
        ..op
    };
    let send = OpSlot { order: Some(40), ..issued(op(0, kind::SEND, 7)) };
    let receive = OpSlot { flags: flag::ORDER_UNKNOWN, ..issued(op(1, kind::RECV, 8)) };
    let called = op(2, kind::COLLECTIVE, 5);
    for (n, want) in (0..).zip([Some(send), Some(receive), Some(called), None]) {
        assert_eq!(r.line(0, n), Found::Is(want), "line {n}");
    }
}

#[test]
fn every_version_says_what_was_written() {
    for version in 1..=FORMAT_VERSION {
        check(version);
    }
}

fn check(version: u32) {
    let golden = std::fs::read(file(version)).unwrap();
    assert_eq!(golden.len(), [15_360, 15_360, 16_000, 16_128][version as usize - 1]);
    assert_eq!(&golden[..8], b"RINGWSEG");
    let words = support::words(&golden);
    let r = Reader::open(&words).unwrap();
    assert_eq!(r.format(), version);
    assert_eq!((r.pid(), r.uid(), r.nccl(), r.abi()), (4242, 1000, Some(22_809), Some(5)));
    assert_eq!(r.header(head::START_TICKS), 987_654);
    assert_eq!(r.header(head::NONCE), 0x1234_5678_9abc_def1);
    assert_eq!(text(r.text::<2>(head::PLUGIN_VERSION)), "0.1.0");
    assert_eq!(text(r.text::<5>(head::BOOT_ID)), "01234567-89ab-cdef-0123-456789abcdef");
    assert_eq!(text(r.text::<8>(head::HOST)), "node-17");
    assert_eq!(text(r.text::<2>(head::PROGRAM)), "a-name-that-is-");
    assert_eq!(text(r.text::<256>(head::ENV)), "RANK=3\nWORLD_SIZE=8\n");

    let comms: Vec<_> = r.comms().collect();
    assert_eq!(comms.len(), 1);
    let c = &comms[0];
    assert_eq!((c.ticket, c.id, c.ranks, c.nodes), (0, Some((0xfeed_beef, 3)), Some(8), Some(1)));
    assert_eq!((c.init_ns, c.finalized_ns, c.issued, c.replayed), (5_000_000_100, None, 19, 2));
    let (made, failed) = if version < 2 { (None, None) } else { (Some(made::FAILED), Some(5)) };
    assert_eq!((c.made, c.failed), (made, failed));
    assert_eq!((text(c.name), text(c.gpu)), ("default_pg".into(), "0000:4b:00.0".into()));

    let sizes = Region::ALL.map(|region| (r.ring(region).slots(), r.ring(region).next()));
    let ops = if version < 4 { 20 } else { 21 };
    assert_eq!(sizes, [(4, 1), (16, ops), (16, 1), (64, 2), (16, 1)]);
    for t in 0..ops - 16 {
        assert_eq!(r.op(t), Found::Overwritten, "operation {t}");
    }
    assert_eq!(r.op(ops), Found::NotYet);
    if version >= 4 {
        let Found::Is(o) = r.op(20) else { panic!("the call without an order") };
        assert_eq!((o.kind, o.func, o.count, o.root, o.order), (kind::CALL, 13, 256, 6, None));
        assert_eq!((o.issued_ns, o.returned), (None, Some((0, 6_000_001_500))));
    }
    for n in ops - 16..19 {
        let Found::Is(o) = r.op(n) else { panic!("operation {n}") };
        assert_eq!(text(o.variant), "");
        let want = OpSlot {
            ticket: n,
            comm: 0,
            kind: kind::COLLECTIVE,
            func: 5,
            dtype: 8,
            algo: 2,
            proto: 3,
            flags: flag::IN_PLACE,
            order: Some(n),
            count: 1 << n,
            root: 0,
            channels: 2,
            warps: 16,
            called_ns: Some(6_000_000_000 + n),
            issued_ns: Some(6_000_001_000 + n),
            group: Some(0),
            seq: Some(n + 100),
            stream: 0xabc0,
            user_tag: 0,
            capture: None,
            plan: n + 1,
            variant: o.variant,
            enqueued_ns: Some(6_000_001_050 + 2 * n),
            started: 2,
            stopped: 1,
            timed: if version < 2 { timed::UNKNOWN } else { timed::EVENTS },
            event_ns: (version >= 2).then_some(9_000 + n),
            event_seen_ns: (version >= 2).then_some(6_000_071_000 + n),
            redop: (version >= 2).then_some(3),
            preloaded: version >= 2,
            grouped: version >= 2,
            returned: (version >= 2).then_some((7, 6_000_005_000 + n)),
        };
        assert_eq!(o, want);
    }
    let Found::Is(o) = r.op(19) else { panic!("the send") };
    assert_eq!((o.kind, o.func, o.dtype, o.algo, o.flags), (kind::SEND, 7, 10, 0, flag::ORDER_UNKNOWN));
    assert_eq!((o.order, o.seq, o.root, o.capture, o.user_tag), (None, None, -1, Some(7), 99));
    assert_eq!((o.called_ns, o.issued_ns, o.enqueued_ns, o.started), (None, None, None, 0));
    assert_eq!(text(o.variant), "AllReduce_AGxLL_R");

    let group = GroupSlot {
        ticket: 0,
        comm: 0,
        depth: 2,
        captured: true,
        start_ns: 6_000_000_000,
        end_called_ns: Some(6_000_000_010),
        launch_start_ns: Some(6_000_000_020),
        launch_stop_ns: Some(6_000_000_030),
        stop_ns: Some(6_000_000_040),
    };
    assert_eq!(r.group(0), Found::Is(group));
    for (t, ch, ns) in [(0, 0, 12_345), (1, 31, -7)] {
        let want = ChannelSlot {
            ticket: t,
            op: 18,
            channel: ch,
            start_gpu_ns: Some(1_800_000_000_000_000_000 + u64::from(ch)),
            duration_ns: Some(ns),
            start_seen_ns: 6_000_002_000,
            stop_seen_ns: Some(6_000_015_000),
        };
        assert_eq!(r.channel(t), Found::Is(want));
    }
    let mut live = [None; 8];
    live[3] = Some((phase::WIRE, 6_000_003_500));
    let want = ProxySlot {
        ticket: 0,
        parent: 0x1234_4000_0000_0012,
        comm: None,
        channel: 3,
        is_send: true,
        foreign: true,
        peer: 5,
        steps: 16,
        chunk: 524_288,
        start_ns: 6_000_003_000,
        pid: 777,
        bytes: 1 << 20,
        started: 4,
        done: 3,
        stop_ns: None,
        waited_ns: [100, 200, 300, 400],
        live,
    };
    assert_eq!(r.proxy(0), Found::Is(want));
    check_lines(version, &r);
    // The lines are counted by their rings.
    let issued = if version < 3 { 1 } else { 5 };
    assert_eq!((r.seen(call::INIT), r.recorded(call::INIT)), (1, 1));
    assert_eq!((r.seen(call::COLL), r.recorded(call::COLL)), (issued, issued));
    assert_eq!((r.seen(call::STOP), r.recorded(call::STOP), r.lost(Loss::Stale)), (1, 0, 1));
    assert_eq!((r.lost(Loss::BadParent), r.lost(Loss::Foreign), r.flaws(Flaw::PairOrder)), (1, 0, 1));
}
