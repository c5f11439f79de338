//! A million random callbacks, good and bad, on four threads at once: nothing crashes, nothing hangs, and the
//! books balance to the last call.

#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "the plugin's bans are not its tests'"
)]
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod support;

use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use ringwatch_wire::codes::{Loss, call};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use support::abi::{self, COLL_DEFAULT, Coll, Descriptor, P2P_DEFAULT, P2p};
use support::child::run_with;
use support::library::{Plugin, null_library, recorder};

const THREADS: usize = 4;
const STEPS: usize = 2_000;
const CALLS: usize = 1_000_000;
/// A run takes seconds; a hang is not waited for.
const HUNG: Duration = Duration::from_secs(300);

/// Handles and contexts that all threads draw from, so that one thread uses what another made, late or early.
struct Pool {
    handles: [AtomicU64; 128],
    contexts: [AtomicU64; 8],
}

static POOL: Pool =
    Pool { handles: [const { AtomicU64::new(0) }; 128], contexts: [const { AtomicU64::new(0) }; 8] };
/// Callbacks made so far, by kind.
static COUNTED: [AtomicU64; call::COUNT] = [const { AtomicU64::new(0) }; call::COUNT];

/// Kinds of which some calls carry nothing and are not booked: operations that are only captured (a copy engine's too),
/// groups, launches that are not timed, stops and states of what has no end of its own.
const QUIET: [usize; 7] = [1, 2, 8, 11, 12, call::STOP, call::STATE];

/// One callback, drawn from one number: proptest makes and shrinks the numbers.
struct Step(u64);

impl Step {
    /// The next few choices.
    fn take(&mut self, n: u64) -> u64 {
        let got = self.0 % n;
        // What is used up is mixed anew, so that one number lasts.
        self.0 = (self.0 / n) ^ self.0.rotate_left(29).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        got
    }

    fn handle(&mut self) -> u64 {
        let any = self.take(128) as usize;
        let handle = POOL.handles[any].load(Ordering::Relaxed);
        match self.take(16) {
            0 => 0,
            1 => self.0,
            // Of a kind, of a ticket or of a process that it is not.
            2 => handle ^ 1 << (44 + self.take(4)),
            3 => handle.wrapping_add(self.take(100_000)),
            4 => handle ^ 1 << (48 + self.take(16)),
            5 => POOL.contexts[self.take(8) as usize].load(Ordering::Relaxed),
            _ => handle,
        }
    }

    fn context(&mut self) -> u64 {
        match self.take(20) {
            0 => 0,
            1 => self.handle(),
            2 => self.0,
            _ => POOL.contexts[self.take(8) as usize].load(Ordering::Relaxed),
        }
    }

    fn descriptor(&mut self, v: usize, pid: i32) -> Descriptor {
        let (parent, plan) = (self.handle(), self.handle());
        let func = self.take(18) as usize;
        let count = self.0 >> self.take(64);
        match self.take(14) {
            0 => abi::group(v),
            1 | 2 => Coll {
                parent,
                plan,
                func,
                count,
                seq: count,
                dtype: self.take(14) as usize,
                algo: self.take(9) as usize,
                proto: self.take(5) as usize,
                channels: self.take(256) as u8,
                ..COLL_DEFAULT
            }
            .at(v),
            3 => P2p { parent, plan, func, count, peer: self.take(40_000) as i32 - 2, ..P2P_DEFAULT }.at(v),
            4 => abi::group_api(v, self.take(2) == 0, self.0 as i32),
            5 => abi::coll_api(v, parent, func, count, self.take(4) == 0),
            6 => abi::p2p_api(v, parent, func, count),
            7 => abi::kernel_launch(v, parent),
            8 | 9 => abi::kernel_ch(v, parent, self.take(256) as u8, self.0),
            10 => {
                let pid = if self.take(3) == 0 { self.0 as i32 } else { pid };
                abi::proxy_op(
                    v,
                    parent,
                    pid,
                    self.0 as i32,
                    self.take(99) as i32 - 9,
                    self.0 as i32,
                    func.is_multiple_of(2),
                )
            }
            11 => abi::proxy_step(v, parent, self.0 as i32),
            // Any single bit, known or not, with nothing filled in.
            12 => Descriptor::new(v, 1 << self.take(64), parent, 0),
            // Any number, which hardly ever has one bit.
            _ => Descriptor::new(v, self.0, parent, 0),
        }
    }

    fn state(&mut self) -> i32 {
        match self.take(12) {
            0 => self.0 as i32,
            1 => 22,
            2 => 19,
            3 => 24,
            _ => self.take(34) as i32 - 1,
        }
    }

    fn run(mut self, plugin: &Plugin) {
        let v = 1 + self.take(7) as usize;
        let kept = self.take(128) as usize;
        let kind = match self.take(64) {
            0..=27 => {
                let d = self.descriptor(v, plugin.pid);
                let context = self.context();
                let kind = d.kind();
                let handle = plugin.start(v, context, &d);
                if handle != 0 {
                    POOL.handles[kept].store(handle, Ordering::Relaxed);
                }
                if kind.is_power_of_two() && kind < 1 << 16 {
                    kind.trailing_zeros() as usize
                } else {
                    call::START_UNKNOWN
                }
            }
            28..=43 => {
                plugin.stop(v, self.handle());
                call::STOP
            }
            44..=59 => {
                let (handle, state) = (self.handle(), self.state());
                let args = (self.take(5) != 0).then_some((self.0 >> self.take(64), self.0 as i32));
                plugin.record(v, handle, state, args);
                call::STATE
            }
            60 | 61 => {
                plugin.start_badly(v, self.context(), self.take(3) as usize);
                call::START_UNKNOWN
            }
            62 => {
                let o = plugin.init(v, self.0);
                // What nobody can name any more is freed, or a small table is full of it for good.
                let old = POOL.contexts[kept % 8].swap(o.context, Ordering::Relaxed);
                plugin.finalize(v, old);
                COUNTED[call::FINALIZE].fetch_add(1, Ordering::Relaxed);
                call::INIT
            }
            _ => {
                plugin.finalize(v, self.context());
                call::FINALIZE
            }
        };
        COUNTED[kind].fetch_add(1, Ordering::Relaxed);
    }
}

fn million() {
    std::thread::spawn(|| {
        std::thread::sleep(HUNG);
        eprintln!("hung after {HUNG:?}");
        std::process::abort();
    });
    let plugin = Plugin::built();
    for v in 1..=7 {
        POOL.contexts[v].store(plugin.init(v, v as u64).context, Ordering::Relaxed);
        COUNTED[call::INIT].fetch_add(1, Ordering::Relaxed);
    }
    let cases = (CALLS / STEPS / THREADS) as u32;
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    // The same calls each time; threads meet in another order each time.
    let mut runner = TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let steps = prop::collection::vec(any::<u64>(), STEPS);
    let begun = Instant::now();
    runner
        .run(&prop::collection::vec(steps, THREADS), |threads| {
            std::thread::scope(|s| {
                for steps in &threads {
                    s.spawn(|| steps.iter().for_each(|n| Step(*n).run(&plugin)));
                }
            });
            Ok(())
        })
        .unwrap();
    eprintln!("{CALLS} callbacks in {:?}", begun.elapsed());
    let recording = support::segment::only(&support::child::dir());
    let reader = recording.reader();
    for (kind, counted) in COUNTED.iter().enumerate() {
        let counted = counted.load(Ordering::Relaxed);
        if QUIET.contains(&kind) {
            assert!(reader.seen(kind) <= counted, "calls of kind {kind}");
        } else {
            assert_eq!(reader.seen(kind), counted, "calls of kind {kind}");
        }
    }
    let counted: u64 = COUNTED.iter().map(|c| c.load(Ordering::Relaxed)).sum();
    assert!(recording.balanced() <= counted && counted >= CALLS as u64);
    let recorded: u64 = (0..call::COUNT).map(|k| reader.recorded(k)).sum();
    eprintln!("recorded {recorded}, lost {:?}", recording.losses());
    // Every road was taken, or the test has not tested it. Two reasons need a table or a disk to be full.
    for loss in Loss::ALL {
        let rare = matches!(loss, Loss::CommTable | Loss::NoRoom | Loss::Contended);
        assert!(rare || reader.lost(loss) > 0, "nothing was lost as {loss:?}");
    }
    let none = [5, 7, 8, 11, 13, 14, 15, call::START_UNKNOWN, call::API];
    for kind in (0..call::COUNT).filter(|k| !none.contains(k)) {
        assert!(reader.recorded(kind) > 0, "nothing was recorded of kind {kind}");
    }
    // And all of it can be read.
    assert!(recording.ops().len() + recording.channels().len() + recording.transfers().len() > 50);
}

fn parent(test: &str, bytes: &str, chain: Option<&Path>) {
    let Some(ran) = run_with(test, |c, _| {
        c.env("RINGWATCH_SEGMENT_BYTES", bytes);
        if let Some(other) = chain {
            c.env("RINGWATCH_CHAIN", other).env("RINGWATCH_NULL_MASK", "0xffff");
        }
    }) else {
        return million();
    };
    eprintln!("{}", ran.succeeded().output);
}

/// The path of what a child does not need.
fn unless_child(path: fn() -> &'static Path) -> Option<&'static Path> {
    std::env::var_os("RINGWATCH_TEST_CHILD").is_none().then(path)
}

#[test]
fn a_million_callbacks() {
    parent("a_million_callbacks", "4194304", None);
}

/// The smallest rings: slots are taken again while other threads still use them.
#[test]
fn a_million_callbacks_in_the_smallest_segment() {
    parent("a_million_callbacks_in_the_smallest_segment", "16384", None);
}

#[test]
fn a_million_callbacks_with_another_plugin() {
    parent("a_million_callbacks_with_another_plugin", "4194304", unless_child(null_library));
}

/// The other plugin aborts where it gets what it did not give.
#[test]
fn a_million_callbacks_with_a_strict_plugin() {
    let test = "a_million_callbacks_with_a_strict_plugin";
    let folder = tempfile::tempdir().unwrap();
    let other = folder.path().join("other.so");
    if std::env::var_os("RINGWATCH_TEST_CHILD").is_some() {
        return million();
    }
    if recorder(test, 0xfe, &other).is_none() {
        return;
    }
    let ran = run_with(test, |c, folder| {
        c.env("RINGWATCH_CHAIN", &other).env("RECORDER_STRICT", "1").env("RECORDER_LOG", folder.join("log"));
    })
    .unwrap()
    .succeeded();
    let log = ran.file("log");
    for (what, least) in [("start", 10_000), ("stop", 1_000), ("state", 1_000), ("finalize", 100)] {
        let heard = log.lines().filter(|l| l.split(' ').nth(1) == Some(what)).count();
        assert!(heard >= least, "{what}: heard {heard}");
    }
}

/// More threads than there are rings of lines call two communicators at once, and some operations are never issued.
#[test]
fn every_bare_call_of_many_threads_is_counted() {
    // Four more than there are rings: their 8,000 calls do not fill the 8,192 operation slots, where they would contend.
    const CALLERS: u64 = 12;
    const EACH: u64 = 2_000;
    let Some(ran) = run_with("every_bare_call_of_many_threads_is_counted", |c, _| {
        c.env("RINGWATCH_DETAIL", "calls");
    }) else {
        let plugin = Plugin::built();
        let contexts = [1, 2].map(|id| plugin.init(5, id).context);
        // All of them live at once: the next thread may have the address, and so the ring, of one that is gone.
        let all = std::sync::Barrier::new(CALLERS as usize);
        std::thread::scope(|s| {
            for n in 0..CALLERS {
                let all = &all;
                s.spawn(move || {
                    all.wait();
                    (0..EACH).for_each(|i| call_bare(&plugin, contexts, n + i));
                    all.wait();
                });
            }
        });
        return;
    };
    let recording = support::segment::only(&ran.succeeded().dir);
    recording.balanced();
    let (reader, all) = (recording.reader(), CALLERS * EACH);
    assert_eq!(recording.losses(), []);
    let unissued = (0..CALLERS).flat_map(|n| (0..EACH).map(move |i| n + i)).filter(|n| n % 50 == 0).count();
    assert_eq!(reader.recorded(call::COLL_CALL), all);
    assert_eq!(reader.recorded(call::PLAN), all);
    assert_eq!(reader.recorded(call::COLL), all - unissued as u64);
    let rings: Vec<u64> = (0..reader.line_rings()).map(|n| reader.line_ring(n).next()).collect();
    assert!(rings.iter().all(|next| *next > 0), "each ring has a thread: {rings:?}");
    assert!(rings.iter().sum::<u64>() < all, "some threads have none");
    for line in recording.lines() {
        assert!(line.comm < 2 && line.count == 64 && line.func == 5, "{line:?}");
    }
}

/// One bare all-reduce as NCCL 2.28 brings it; every fiftieth is not issued.
fn call_bare(plugin: &Plugin, contexts: [u64; 2], n: u64) {
    let context = contexts[(n % 2) as usize];
    let group = plugin.start(5, context, &abi::group_api(5, false, 1));
    let call = plugin.start(5, context, &abi::coll_api(5, group, abi::func::ALL_REDUCE, 64, false));
    let plan = plugin.start(5, context, &abi::group(5));
    if !n.is_multiple_of(50) {
        plugin.start(5, context, &Coll { parent: call, plan, ..COLL_DEFAULT }.at(5));
    }
}
