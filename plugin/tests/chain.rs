//! Another plugin behind this one: it hears what it would hear alone, and the segment is what it would be without it.

#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "the plugin's bans are not its tests'"
)]
#![allow(unsafe_code, reason = "plays NCCL's part of a C interface")]
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod support;

use ringwatch_wire::codes::{Loss, call, kind, timed};
use ringwatch_wire::layout::Region;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, Ordering};
use support::abi::{self, COLL_DEFAULT, Coll, Descriptor, P2P_DEFAULT, P2p, func, ty};
use support::child::{Ran, run_with};
use support::library::{LogFn, Plugin, null_library, plugin_library, recorder};
use support::segment::{Recording, only};

const VERSION: &str = "RINGWATCH_TEST_ABI";
const ALONE: &str = "RINGWATCH_TEST_ALONE";
/// Everything but kernel events: with those the GPU times of v3 and v4 are others than without the other plugin.
const ALL_BUT_KERNELS: &str = "7fbf";
const EVERYTHING: &str = "ffff";

/// The version that a child is to play.
fn version() -> usize {
    std::env::var(VERSION).unwrap().parse().unwrap()
}

// --- what a job says

/// A player of NCCL: it stops and names what it has a handle for.
struct Nccl {
    plugin: Plugin,
    v: usize,
    context: u64,
}

impl Nccl {
    fn start(&self, d: &Descriptor) -> u64 {
        self.plugin.start(self.v, self.context, d)
    }

    fn stop(&self, handle: u64) {
        if handle != 0 {
            self.plugin.stop(self.v, handle);
        }
    }

    fn state(&self, handle: u64, state: i32, args: Option<(u64, i32)>) {
        if handle != 0 {
            self.plugin.record(self.v, handle, state, args);
        }
    }

    fn api(&self) -> bool {
        self.v >= 5
    }

    /// An outermost group's calls; gives back its handle and theirs.
    fn calls(&self, captured: bool, of: &[(bool, u64)]) -> (u64, Vec<u64>) {
        if !self.api() {
            return (0, vec![0; of.len()]);
        }
        let group = self.start(&abi::group_api(self.v, captured, of.len() as i32));
        self.state(group, 23, None);
        let calls = of.iter().map(|(collective, count)| {
            let call = self.start(&if *collective {
                abi::coll_api(self.v, group, func::ALL_REDUCE, *count, captured)
            } else {
                abi::p2p_api(self.v, group, func::SEND, *count)
            });
            self.stop(call);
            call
        });
        let calls = calls.collect();
        self.state(group, 24, None);
        let launch = self.start(&abi::kernel_launch(self.v, group));
        self.stop(launch);
        (group, calls)
    }

    /// A plan that issues them.
    fn issue(&self, calls: &[u64], of: &[(bool, u64)], seq: u64) -> Vec<u64> {
        let plan = self.start(&abi::group(self.v));
        let ops: Vec<u64> = calls
            .iter()
            .zip(of)
            .map(|(parent, (collective, count))| {
                self.start(&if *collective {
                    Coll { parent: *parent, plan, seq, count: *count, rank: 3, tag: 9, ..COLL_DEFAULT }
                        .at(self.v)
                } else {
                    P2p { parent: *parent, plan, count: *count, rank: 3, tag: 8, ..P2P_DEFAULT }.at(self.v)
                })
            })
            .collect();
        ops.iter().for_each(|op| self.stop(*op));
        self.stop(plan);
        ops
    }

    fn kernels(&self, op: u64) {
        if self.v < 3 {
            return;
        }
        let kernels = [0, 1].map(|ch| self.start(&abi::kernel_ch(self.v, op, ch, 1000 + u64::from(ch))));
        for kernel in kernels {
            self.state(kernel, 22, Some((5000, 0)));
            self.stop(kernel);
        }
    }

    fn network(&self, parent: u64, send: bool) {
        let op = self.start(&abi::proxy_op(self.v, parent, self.plugin.pid, 1, 4, 4096, send));
        let states: &[i32] = if self.v >= 4 { &[19] } else { &[0, 1, 2, 3] };
        states.iter().for_each(|s| self.state(op, *s, Some((4096, 2))));
        for n in 0..4 {
            let step = self.start(&abi::proxy_step(self.v, op, n));
            let states = if send { [8, 9] } else { [10, 12] };
            states.iter().for_each(|s| self.state(step, *s, Some((1024, 1))));
            self.stop(step);
        }
        self.stop(op);
    }
}

/// A job of two communicators: calls, a group, sends, a graph and its replays, the network, what only others record,
/// and callbacks that come late.
fn job(plugin: Plugin, v: usize) {
    let nccl = [0xfeed, 0xbeef].map(|id| Nccl {
        plugin,
        v,
        context: plugin.init_with(v, id, c"pg", 8, 3, None).context,
    });
    let mut late = Vec::new();
    for n in &nccl {
        for seq in 0..3 {
            let of: &[(bool, u64)] =
                if seq == 1 { &[(true, 64), (false, 8), (true, 32)] } else { &[(true, 100)] };
            let (group, calls) = n.calls(false, of);
            let ops = n.issue(&calls, of, seq);
            n.stop(group);
            ops.iter().for_each(|op| n.kernels(*op));
            ops.iter().for_each(|op| n.network(*op, seq != 1));
            late.extend(ops);
        }
        let of = [(true, 7), (true, 9)];
        let (group, calls) = n.calls(true, &of);
        n.stop(group);
        for replay in 0..3 {
            let ops = n.issue(&calls, &of, replay);
            ops.iter().for_each(|op| n.kernels(*op));
        }
        // Another process's operation by our own context: its number goes through as it is.
        n.network(0x7777_1234_5678_9abc, true);
    }
    let n = &nccl[0];
    let control = n.start(&Descriptor::new(v, ty::PROXY_CTRL, 0, 0));
    n.state(control, 17, Some((3, 0)));
    n.stop(control);
    let parent = late[0];
    if v >= 3 {
        let net = n.start(&Descriptor::new(v, ty::NET_PLUGIN, parent, 3));
        n.state(net, 21, Some((0x77, 0)));
        n.stop(net);
    }
    if v >= 6 {
        let copy = n.start(&abi::ce_coll(v, parent, func::ALL_GATHER, 64));
        for kind in [ty::CE_SYNC, ty::CE_BATCH] {
            let part = n.start(&Descriptor::new(v, kind, copy, 0));
            n.stop(part);
        }
        n.stop(copy);
    }
    if v >= 3 {
        let kernel = n.start(&abi::kernel_ch(v, parent, 5, 77));
        if v >= 7 {
            let phase = n.start(&Descriptor::new(v, ty::KERNEL_PHASE, kernel, 0));
            n.state(phase, 31, Some((99, 0)));
            n.stop(phase);
        }
        n.state(kernel, 22, Some((100, 0)));
        n.stop(kernel);
    }
    // Once more, and after the end.
    late.iter().for_each(|op| n.stop(*op));
    nccl.iter().for_each(|n| plugin.finalize(v, n.context));
    n.network(late[0], true);
    late.iter().for_each(|op| n.stop(*op));
    plugin.finalize(v, n.context);
}

/// The other plugin loaded as NCCL loads one, or ours.
fn loaded() -> Plugin {
    std::env::var_os(ALONE).map_or_else(Plugin::built, |path| Plugin::open(Path::new(&path)))
}

/// The content of a segment, apart from the moments.
fn told(r: &Recording) -> String {
    let reader = r.reader();
    let comms: Vec<_> = reader
        .comms()
        .map(|c| (c.ticket, c.id, c.ranks, c.nodes, c.issued, c.replayed, c.finalized_ns.is_some()))
        .collect();
    let zero = |t: Option<u64>| t.map(|_| 0);
    let ops: Vec<_> = r
        .ops()
        .into_iter()
        .map(|mut o| {
            (o.called_ns, o.issued_ns) = (zero(o.called_ns), zero(o.issued_ns));
            o.enqueued_ns = zero(o.enqueued_ns);
            o
        })
        .collect();
    let groups: Vec<_> = r
        .groups()
        .into_iter()
        .map(|g| (g.ticket, g.comm, g.depth, g.captured, g.stop_ns.is_some()))
        .collect();
    let channels: Vec<_> = r
        .channels()
        .into_iter()
        .map(|c| (c.op, c.channel, c.start_gpu_ns, c.duration_ns, c.stop_seen_ns.is_some()))
        .collect();
    let transfers: Vec<_> = r
        .transfers()
        .into_iter()
        .map(|t| {
            // The upper bits of our own handles are the process's.
            let parent = if t.foreign { t.parent } else { t.parent << 16 };
            let stopped = t.stop_ns.is_some();
            (
                t.comm, t.channel, t.is_send, t.foreign, t.peer, parent, t.steps, t.chunk, t.bytes,
                t.started, t.done, stopped,
            )
        })
        .collect();
    let booked: Vec<_> = (0..call::COUNT).map(|k| (reader.seen(k), reader.recorded(k))).collect();
    format!("{comms:#?}\n{ops:#?}\n{groups:#?}\n{channels:#?}\n{transfers:#?}\n{booked:?}\n{:?}", r.losses())
}

/// The same lines; says the first that are not.
#[track_caller]
fn same(a: &str, b: &str, what: &str) {
    for (i, (a, b)) in a.lines().zip(b.lines()).enumerate() {
        assert_eq!(a, b, "{what}: line {i}");
    }
    assert_eq!(a.lines().count(), b.lines().count(), "{what}");
}

/// Plays a test's child once for each way of loading.
fn play(test: &str, v: usize, more: impl FnOnce(&mut Command, &Path)) -> Option<Ran> {
    let ran = run_with(test, |c, folder| {
        c.env(VERSION, v.to_string())
            .env("RECORDER_LOG", folder.join("log"))
            .env("RECORDER_MASK", ALL_BUT_KERNELS)
            .env_remove(ALONE);
        more(c, folder);
    });
    ran.map(Ran::succeeded)
}

/// True in a test's child.
fn child() -> bool {
    std::env::var_os("RINGWATCH_TEST_CHILD").is_some()
}

#[test]
fn another_plugin_hears_what_it_hears_alone_and_nothing_else_changes() {
    let test = "another_plugin_hears_what_it_hears_alone_and_nothing_else_changes";
    if child() {
        return job(loaded(), version());
    }
    let folder = tempfile::tempdir().unwrap();
    let other = folder.path().join("other.so");
    if recorder(test, 0xfe, &other).is_none() {
        return;
    }
    for v in 1..=7 {
        // Here NCCL leaves nothing out, so the other one has to ask for all of it.
        let alone = play(test, v, |c, _| {
            c.env(ALONE, &other).env("RECORDER_MASK", EVERYTHING);
        });
        let chained = |mask: &str| {
            let ran = play(test, v, |c, _| {
                c.env("RINGWATCH_CHAIN", &other).env("RECORDER_STRICT", "1").env("RECORDER_MASK", mask);
            });
            ran.unwrap()
        };
        let without = play(test, v, |_, _| {});
        let (alone, without) = (alone.unwrap(), without.unwrap());
        let log = chained(EVERYTHING).file("log");
        assert!(log.lines().count() > 60, "v{v}: {log}");
        // What comes by a context that was finalized goes nowhere, and a context is finalized once.
        let heard = alone.file("log");
        let end = heard.lines().position(|l| l.contains("finalize")).unwrap();
        let late = |l: &&str| l.contains("stop") || l.contains("finalize");
        let first = heard.lines().take(end);
        let last: Vec<&str> = heard.lines().skip(end).filter(late).collect();
        let (ends, stops) = (&last[..2], &last[last.len() - 1 - 10..last.len() - 1]);
        let want: Vec<&str> = first.chain(ends.iter().copied()).chain(stops.iter().copied()).collect();
        same(&log, &want.join("\n"), &format!("v{v}"));
        let chained = chained(ALL_BUT_KERNELS);
        same(&told(&only(&chained.dir)), &told(&only(&without.dir)), &format!("v{v}"));
    }
}

#[test]
fn an_older_plugin_hears_newer_callbacks_as_its_own() {
    let test = "an_older_plugin_hears_newer_callbacks_as_its_own";
    if child() {
        return job(loaded(), version());
    }
    let folder = tempfile::tempdir().unwrap();
    let all = folder.path().join("all.so");
    if recorder(test, 0xfe, &all).is_none() {
        return;
    }
    for old in [4, 5, 6] {
        let other = folder.path().join(format!("v{old}.so"));
        recorder(test, 1 << old | 0xe, &other).unwrap();
        let strict = |v: usize, of: &Path, mask: &str| {
            let ran = play(test, v, |c, _| {
                c.env("RINGWATCH_CHAIN", of).env("RECORDER_STRICT", "1").env("RECORDER_MASK", mask);
            });
            ran.unwrap()
        };
        let own = strict(old, &all, EVERYTHING).file("log");
        for v in old + 1..=7 {
            let what = format!("v{v} turned into v{old}");
            same(&strict(v, &other, EVERYTHING).file("log"), &own, &what);
            let turned = strict(v, &other, ALL_BUT_KERNELS);
            let without = play(test, v, |_, _| {}).unwrap();
            same(&told(&only(&turned.dir)), &told(&only(&without.dir)), &what);
        }
    }
}

#[test]
fn every_callback_with_another_plugin() {
    let test = "every_callback_with_another_plugin";
    if child() {
        let p = Plugin::built();
        let contexts = [1, 2, 3, 4, 5, 6, 7].map(|v| p.init(v, v as u64).context);
        for (i, context) in contexts.iter().enumerate() {
            support::every_callback(&p, i + 1, *context);
        }
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let other = folder.path().join("other.so");
    if recorder(test, 0xfe, &other).is_none() {
        return;
    }
    let ran = play(test, 5, |c, _| {
        // It aborts where it gets a handle or a context that is not its own.
        c.env("RINGWATCH_CHAIN", &other).env("RECORDER_STRICT", "1");
    })
    .unwrap();
    only(&ran.dir).balanced();
    for v in 1..=7 {
        let finalized = ran.file("log").lines().filter(|l| l.starts_with(&format!("v{v} finalize"))).count();
        assert_eq!(finalized, 1, "v{v}");
    }
}

#[test]
fn the_plugin_that_does_nothing_changes_nothing() {
    let test = "the_plugin_that_does_nothing_changes_nothing";
    if child() {
        return job(Plugin::built(), version());
    }
    for v in 1..=7 {
        let chained = play(test, v, |c, _| {
            c.env("RINGWATCH_CHAIN", null_library()).env("RINGWATCH_NULL_MASK", "2");
        });
        let without = play(test, v, |_, _| {}).unwrap();
        same(&told(&only(&chained.unwrap().dir)), &told(&only(&without.dir)), &format!("v{v}"));
    }
}

// --- what is forgotten

#[test]
fn pairs_that_are_gone_are_stale_and_captured_calls_outlive_the_rest() {
    let test = "pairs_that_are_gone_are_stale_and_captured_calls_outlive_the_rest";
    if child() {
        let p = Plugin::built();
        let n = Nccl { plugin: p, v: 5, context: p.init(5, 1).context };
        let (group, calls) = n.calls(true, &[(true, 99)]);
        n.stop(group);
        let old = n.start(&COLL_DEFAULT.at(5));
        n.stop(old);
        for _ in 0..70_000 {
            let op = n.start(&COLL_DEFAULT.at(5));
            n.stop(op);
        }
        // Nothing to anybody: the end, a state, a kernel, and the number as a parent is none.
        n.stop(old);
        n.state(old, 22, Some((1, 0)));
        assert_eq!(n.start(&abi::kernel_ch(5, old, 0, 10)) >> 44 & 0xf, 11, "the other one hears of it");
        n.issue(&calls, &[(true, 99)], 0);
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let other = folder.path().join("other.so");
    if recorder(test, 0xfe, &other).is_none() {
        return;
    }
    let ran = play(test, 5, |c, _| {
        c.env("RINGWATCH_CHAIN", &other).env("RECORDER_STRICT", "1").env("RECORDER_MASK", EVERYTHING);
    })
    .unwrap();
    let r = only(&ran.dir);
    r.balanced();
    assert_eq!(r.losses(), [(Loss::Stale, 3)]);
    let last = r.ops().pop().unwrap();
    assert_eq!((last.kind, last.order, last.capture), (kind::REPLAY, Some(0), Some(0)));
    let log = ran.file("log");
    let lines: Vec<&str> = log.lines().collect();
    let call = lines.iter().find(|l| l.starts_with("v5 start 200")).unwrap();
    let call = call.split_once("-> ").unwrap().1.split_once(' ').unwrap().0;
    let replay = lines.iter().rfind(|l| l.starts_with("v5 start 2 ")).unwrap();
    assert!(replay.contains(&format!("parent={call} ")), "{call}: {replay}");
    let kernel = lines.iter().find(|l| l.starts_with("v5 start 40 ")).unwrap();
    assert!(kernel.contains("parent=0 "), "{kernel}");
}

#[test]
fn a_forked_child_passes_nothing_on() {
    let test = "a_forked_child_passes_nothing_on";
    if child() {
        let p = Plugin::built();
        let context = p.init(5, 1).context;
        let op = p.start(5, context, &COLL_DEFAULT.at(5));
        // SAFETY: the child calls the plugin and exits.
        match unsafe { libc::fork() } {
            0 => {
                p.stop(5, op);
                let got = p.start(5, context, &COLL_DEFAULT.at(5));
                p.finalize(5, context);
                // SAFETY: ends the child at once.
                unsafe { libc::_exit(i32::from(got != 0)) }
            }
            child => {
                let mut status = 0;
                // SAFETY: waits for a child of ours.
                assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
                assert_eq!(status, 0);
            }
        }
        p.stop(5, op);
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let other = folder.path().join("other.so");
    if recorder(test, 0xfe, &other).is_none() {
        return;
    }
    let ran = play(test, 5, |c, _| {
        c.env("RINGWATCH_CHAIN", &other);
    })
    .unwrap();
    let log = ran.file("log");
    assert_eq!(log.lines().count(), 3, "{log}");
}

// --- masks

static MASK: AtomicI32 = AtomicI32::new(0);

/// An init of v5 whose mask lies where NCCL's does: in a library's own data.
fn init_with_static_mask(p: &Plugin, id: u64) -> u64 {
    type Init = unsafe extern "C" fn(
        *mut *mut c_void,
        u64,
        *mut c_int,
        *const c_char,
        c_int,
        c_int,
        c_int,
        Option<LogFn>,
    ) -> c_int;
    let mut context = std::ptr::null_mut();
    // SAFETY: v5's signature, and places that live through the call, the mask's for ever.
    let done = unsafe {
        std::mem::transmute::<*const c_void, Init>(p.table(5).init)(
            &mut context,
            id,
            MASK.as_ptr(),
            c"pg".as_ptr(),
            1,
            8,
            3,
            None,
        )
    };
    assert_eq!(done, 0);
    context as u64
}

/// Calls until the budget is long gone.
fn spend(p: &Plugin, context: u64) {
    let n = Nccl { plugin: *p, v: 5, context };
    for seq in 0..3000 {
        let (group, calls) = n.calls(false, &[(true, 64)]);
        n.issue(&calls, &[(true, 64)], seq);
        n.stop(group);
    }
}

#[test]
fn masks_are_joined_and_stay_so() {
    let test = "masks_are_joined_and_stay_so";
    let wanted = "RINGWATCH_NULL_MASK";
    if child() {
        let p = Plugin::built();
        let theirs = i32::from_str_radix(&std::env::var(wanted).unwrap()[2..], 16).unwrap();
        for v in 1..=7 {
            let known = [0x1f, 0x1f, 0x5f, 0x5f, 0xf5f, 0xf5f, 0xf5f][v - 1];
            let mask = p.init(v, 1).mask;
            assert_eq!(mask & theirs & known, theirs & known, "v{v}: {mask:#x}");
            assert_eq!(mask & 0x1f, 0x1f, "v{v}: {mask:#x}");
        }
        return;
    }
    for mask in ["0x2", "0x42", "0x840", "0xffff"] {
        play(test, 5, |c, _| {
            c.env("RINGWATCH_CHAIN", null_library()).env(wanted, mask);
        });
    }
}

#[test]
fn kernel_events_that_another_plugin_wants_are_never_switched_off() {
    let test = "kernel_events_that_another_plugin_wants_are_never_switched_off";
    let wants = "RINGWATCH_NULL_MASK";
    if child() {
        let p = Plugin::built();
        let context = init_with_static_mask(&p, 1);
        let theirs = i32::from_str_radix(&std::env::var(wants).unwrap()[2..], 16).unwrap();
        let mut off = 0;
        for _ in 0..40 {
            spend(&p, context);
            let mask = MASK.load(Ordering::Relaxed);
            off += i32::from(mask & 0x40 == 0);
            assert_eq!(mask & theirs, theirs, "{mask:#x}");
        }
        assert_eq!(off == 0, theirs & 0x40 != 0, "switched off {off} of 40 times");
        return;
    }
    for mask in ["0x842", "0x802"] {
        let ran = play(test, 5, |c, _| {
            c.env("RINGWATCH_CHAIN", null_library())
                .env(wants, mask)
                .env("RINGWATCH_OVERHEAD_BUDGET", "0.01%");
        })
        .unwrap();
        let ops = only(&ran.dir).ops();
        let timed = ops.iter().filter(|o| o.timed == timed::KERNEL).count();
        assert_eq!(timed == ops.len(), mask == "0x842", "{timed} of {}", ops.len());
    }
}

/// Lets the recorder behind ours ask for other events, as a user of NVIDIA's example does by a function of its own.
fn ask(mask: i32) {
    let path = std::ffi::CString::new(std::env::var("RINGWATCH_CHAIN").unwrap()).unwrap();
    // SAFETY: a library that is loaded already, and its function of this name and signature.
    unsafe {
        let library = libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD);
        let ask = libc::dlsym(library, c"recorder_ask".as_ptr());
        assert!(!ask.is_null());
        std::mem::transmute::<*mut c_void, unsafe extern "C" fn(c_int)>(ask)(mask);
    }
}

#[test]
fn another_plugin_may_change_its_mind() {
    let test = "another_plugin_may_change_its_mind";
    const OURS: i32 = 0x71f;
    if child() {
        let p = Plugin::built();
        let n = Nccl { plugin: p, v: 5, context: init_with_static_mask(&p, 1) };
        let asked = |what: i32| assert_eq!(MASK.load(Ordering::Relaxed) & !0x40, OURS | what & !0x40);
        let kernels = || MASK.load(Ordering::Relaxed) & 0x40 != 0;
        let of = [(true, 64)];
        let call = |seq| {
            let (group, calls) = n.calls(false, &of);
            let ops = n.issue(&calls, &of, seq);
            n.stop(group);
            ops[0]
        };
        let control = || n.stop(n.start(&Descriptor::new(5, ty::PROXY_CTRL, 0, 0)));
        asked(0);
        // What is called before NCCL's mask has what it has asked for comes as far as ours brings it.
        let first = call(0);
        control();
        ask(0x62);
        asked(0);
        let second = call(1);
        asked(0x62);
        control();
        spend(&p, n.context);
        assert!(kernels(), "kernel events are not switched while another one wants them");
        ask(0x2);
        call(2);
        asked(0x2);
        control();
        // What hangs on an operation goes by what was asked for when it was called.
        n.kernels(first);
        n.kernels(second);
        ask(0);
        let last = call(3);
        asked(0);
        n.kernels(last);
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let other = folder.path().join("other.so");
    if recorder(test, 0xfe, &other).is_none() {
        return;
    }
    let ran = play(test, 5, |c, _| {
        c.env("RINGWATCH_CHAIN", &other)
            .env("RECORDER_STRICT", "1")
            .env("RECORDER_MASK", "0")
            .env("RINGWATCH_OVERHEAD_BUDGET", "0.01%");
    });
    let log = ran.unwrap().file("log");
    let heard = |what: &str| log.lines().filter(|l| l.starts_with(what)).count();
    let spent = 3000;
    assert_eq!(heard("v5 start 20 "), 1, "while it asked for them");
    assert_eq!(heard("v5 start 2 "), 2 + spent);
    assert_eq!(heard("v5 start 40 "), 2, "those of the second call alone");
    assert_eq!(heard("v5 state 22 "), 2);
    assert_eq!(heard("v5 stop"), heard("v5 start"));
}

#[test]
fn events_that_are_new_to_us_go_by_their_own_bit() {
    let test = "events_that_are_new_to_us_go_by_their_own_bit";
    if child() {
        let p = Plugin::built();
        let opened = p.init(7, 1);
        assert_eq!(opened.mask & 0x30_0000, 0x10_0000);
        let n = Nccl { plugin: p, v: 7, context: opened.context };
        for kind in [0x10_0000, 0x20_0000, 0x30_0000, 1 << 40] {
            let event = n.start(&Descriptor::new(7, kind, 0, 0));
            n.state(event, 77, None);
            n.stop(event);
        }
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let other = folder.path().join("other.so");
    if recorder(test, 0xfe, &other).is_none() {
        return;
    }
    let ran = play(test, 7, |c, _| {
        c.env("RINGWATCH_CHAIN", &other).env("RECORDER_STRICT", "1").env("RECORDER_MASK", "100002");
    });
    let log = ran.unwrap().file("log");
    let heard: Vec<&str> = log.lines().skip(1).map(|l| l.split(" context").next().unwrap()).collect();
    assert_eq!(heard, ["v7 start 100000 -> e0", "v7 state 77 event=e0 bare", "v7 stop event=e0"]);
}

#[test]
fn without_a_segment_nccl_is_asked_for_what_the_other_plugin_wants() {
    let test = "without_a_segment_nccl_is_asked_for_what_the_other_plugin_wants";
    if child() {
        let p = Plugin::built();
        let context = init_with_static_mask(&p, 1);
        let n = Nccl { plugin: p, v: 5, context };
        let op = n.start(&COLL_DEFAULT.at(5));
        n.stop(op);
        assert_eq!(MASK.load(Ordering::Relaxed), 0x6, "by which a change would be seen");
        ask(0x60);
        let op = n.start(&COLL_DEFAULT.at(5));
        n.stop(op);
        assert_eq!(MASK.load(Ordering::Relaxed), 0x66);
        ask(0);
        let op = n.start(&COLL_DEFAULT.at(5));
        n.stop(op);
        assert_eq!(MASK.load(Ordering::Relaxed), 0x6);
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let other = folder.path().join("other.so");
    if recorder(test, 0xfe, &other).is_none() {
        return;
    }
    play(test, 5, |c, _| {
        c.env("RINGWATCH_CHAIN", &other).env("RECORDER_MASK", "0").env("RINGWATCH_DIR", "/proc/self");
    });
}

// --- what cannot be chained

static SAID: Mutex<Vec<(c_int, String)>> = Mutex::new(Vec::new());

/// Stands for NCCL's variadic logger, whose only argument is always one C string; called through a variadic
/// type, a function of fixed arguments finds its integer arguments in the same registers on x86-64 and arm64 Linux.
unsafe extern "C" fn log(
    level: c_int,
    _flags: u64,
    _file: *const c_char,
    _line: c_int,
    _format: *const c_char,
    text: *const c_char,
) {
    // SAFETY: the plugin passes a C string.
    SAID.lock().unwrap().push((level, unsafe { CStr::from_ptr(text) }.to_str().unwrap().to_owned()));
}

fn logger() -> LogFn {
    type Fixed = unsafe extern "C" fn(c_int, u64, *const c_char, c_int, *const c_char, *const c_char);
    // SAFETY: see `log`.
    unsafe { std::mem::transmute::<Fixed, LogFn>(log) }
}

/// The variable with the text that is looked for in the log of a child.
const SAYS: &str = "RINGWATCH_TEST_SAYS";

/// In the child: whatever `RINGWATCH_CHAIN` is, the plugin works, and says once why it works alone.
fn works_alone() {
    let p = Plugin::built();
    let says = std::env::var(SAYS).unwrap();
    let o = p.init_with(5, 1, c"pg", 8, 3, Some(logger()));
    assert_eq!(o.mask, 0x75f, "what ours asks for by itself");
    let op = p.start(5, o.context, &COLL_DEFAULT.at(5));
    assert_eq!(op >> 44 & 0xf, 4, "an issued operation of our own");
    p.stop(5, op);
    p.init_with(5, 2, c"pg", 8, 3, Some(logger()));
    p.finalize(5, o.context);
    let said = SAID.lock().unwrap();
    let of: Vec<_> = said.iter().filter(|(_, t)| t.contains("RINGWATCH_CHAIN")).collect();
    assert_eq!(of.len(), 1, "{said:?}");
    assert!(of[0].0 == 2 && of[0].1.contains(&says), "{says}: {said:?}");
}

#[test]
fn what_cannot_be_chained_is_told_and_left_out() {
    let test = "what_cannot_be_chained_is_told_and_left_out";
    if child() {
        return works_alone();
    }
    let alone = |chain: &Path, says: &str| {
        let ran = play(test, 5, |c, _| {
            c.env("RINGWATCH_CHAIN", chain).env(SAYS, says);
        });
        let r = only(&ran.unwrap().dir);
        assert_eq!((r.ops().len(), r.losses()), (1, vec![]), "{}", chain.display());
    };
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text.so");
    std::fs::write(&text, "no library").unwrap();
    for path in [Path::new("/no/such/file.so"), Path::new("no-such-name"), folder.path(), &text] {
        alone(path, "cannot be loaded");
    }
    alone(&Path::new("/").join("x".repeat(5000)), "cannot be loaded");
    alone(plugin_library(), "Ringwatch itself");
    let copy = folder.path().join("copy.so");
    std::fs::copy(plugin_library(), &copy).unwrap();
    alone(&copy, "Ringwatch itself");
    let link = folder.path().join("link.so");
    std::os::unix::fs::symlink(plugin_library(), &link).unwrap();
    alone(&link, "Ringwatch itself");
    let empty = folder.path().join("empty.so");
    if support::library::compile(test, "int nothing;", &[], &empty).is_none() {
        return;
    }
    alone(&empty, "no NCCL profiler plugin");
    let holes = folder.path().join("holes.so");
    let source = "void *ncclProfiler_v5[14] = {\"holes\", 0};";
    support::library::compile(test, source, &[], &holes).unwrap();
    alone(&holes, "no NCCL profiler plugin");
    for (versions, nearest) in [(0xe, "v3"), (0x2, "v1"), (0xc0, "v6"), (0x86, "v2")] {
        let other = folder.path().join(format!("{versions}.so"));
        recorder(test, versions, &other).unwrap();
        alone(&other, &format!("speaks only profiler ABI {nearest},"));
    }
}

#[test]
fn none_is_none() {
    let test = "none_is_none";
    if child() {
        let p = Plugin::built();
        let o = p.init_with(5, 1, c"pg", 8, 3, Some(logger()));
        assert_eq!(p.start(5, o.context, &COLL_DEFAULT.at(5)) >> 44 & 0xf, 4);
        let said = SAID.lock().unwrap();
        assert!(!said.iter().any(|(_, t)| t.contains("RINGWATCH_CHAIN")), "{said:?}");
        return;
    }
    for name in ["none", "None", ""] {
        play(test, 5, |c, _| {
            c.env("RINGWATCH_CHAIN", name);
        });
    }
}

/// NCCL's own way to a name without a path.
#[test]
fn a_short_name_is_found_on_the_library_path() {
    let test = "a_short_name_is_found_on_the_library_path";
    if child() {
        let p = Plugin::built();
        let o = p.init_with(5, 1, c"pg", 8, 3, Some(logger()));
        assert_eq!(p.start(5, o.context, &COLL_DEFAULT.at(5)) >> 44 & 0xf, 11);
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(null_library(), folder.path().join("libnccl-profiler-short.so")).unwrap();
    for name in ["short", "libnccl-profiler-short.so"] {
        play(test, 5, |c, _| {
            c.env("RINGWATCH_CHAIN", name).env("LD_LIBRARY_PATH", folder.path());
        });
    }
}

#[test]
fn an_init_that_fails_leaves_one_communicator_out() {
    let test = "an_init_that_fails_leaves_one_communicator_out";
    if child() {
        let p = Plugin::built();
        let all = [1, 2, 3].map(|id| p.init_with(5, id, c"pg", 8, 3, Some(logger())));
        assert_eq!(
            all.map(|o| o.mask & 0x80),
            [0, 0x80, 0x80],
            "the mask of the last init that did not fail"
        );
        for (n, o) in all.iter().enumerate() {
            let op = p.start(5, o.context, &COLL_DEFAULT.at(5));
            assert_eq!(op >> 44 & 0xf, if n == 1 { 11 } else { 4 }, "communicator {n}");
            p.stop(5, op);
            p.finalize(5, o.context);
        }
        let said = SAID.lock().unwrap();
        assert_eq!(said.iter().filter(|(_, t)| t.contains("init of the plugin")).count(), 2, "{said:?}");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let other = folder.path().join("other.so");
    if recorder(test, 0xfe, &other).is_none() {
        return;
    }
    let ran = play(test, 5, |c, _| {
        c.env("RINGWATCH_CHAIN", &other).env("RECORDER_STRICT", "1").env("RECORDER_FAIL", "02");
    })
    .unwrap();
    let r = only(&ran.dir);
    assert_eq!((r.ops().len(), r.losses()), (3, vec![]));
    assert_eq!(r.reader().ring(Region::Op).next(), 3);
    let log = ran.file("log");
    assert_eq!(log.lines().filter(|l| !l.contains("init")).count(), 3, "{log}");
}

/// Where nothing can be recorded the other plugin is served all the same.
#[test]
fn without_a_segment_the_other_plugin_is_still_heard() {
    let test = "without_a_segment_the_other_plugin_is_still_heard";
    if child() {
        let p = Plugin::built();
        let n = Nccl { plugin: p, v: 5, context: p.init(5, 1).context };
        let (group, calls) = n.calls(false, &[(true, 64)]);
        let ops = n.issue(&calls, &[(true, 64)], 0);
        n.stop(group);
        n.kernels(ops[0]);
        p.finalize(5, n.context);
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let other = folder.path().join("other.so");
    if recorder(test, 0xfe, &other).is_none() {
        return;
    }
    let chained = |dir: Option<&str>| {
        let ran = play(test, 5, |c, _| {
            c.env("RINGWATCH_CHAIN", &other).env("RECORDER_STRICT", "1");
            if let Some(dir) = dir {
                c.env("RINGWATCH_DIR", dir);
            }
        });
        ran.unwrap().file("log")
    };
    same(&chained(Some("/proc/self")), &chained(None), "with and without a segment");
}
