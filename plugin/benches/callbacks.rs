//! What callbacks cost, in time, of the library as it is shipped: `cargo bench -p ringwatch-plugin`. With
//! `RINGWATCH_CHAIN` set, what they cost with that plugin behind it.

#![allow(unsafe_code, reason = "plays NCCL's part of a C interface")]
#![allow(clippy::unwrap_used, reason = "a benchmark stops at the first surprise")]
#![allow(missing_docs, reason = "criterion's macros")]

#[path = "../tests/support/mod.rs"]
mod support;

use criterion::{Criterion, criterion_group, criterion_main};
use ringwatch_wire::layout::Region;
use ringwatch_wire::reader::Reader;
use ringwatch_wire::sync::Word;
use std::hint::black_box;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::{Duration, Instant};
use support::abi;
use support::bare::Bare;
use support::library::Plugin;

const VERSION: usize = 5;
const STEPS: i32 = 8;

/// A network transfer of eight steps: what NCCL's proxy says of a send.
fn transfer(plugin: &Plugin, context: u64, op: &abi::Descriptor) -> u64 {
    let transfer = plugin.start(VERSION, context, op);
    plugin.record(VERSION, transfer, 19, Some((0, 0)));
    for n in 0..STEPS {
        let step = plugin.start(VERSION, context, &abi::proxy_step(VERSION, transfer, n));
        for state in [8, 20, 9] {
            plugin.record(VERSION, step, state, Some((4096, 0)));
        }
        plugin.stop(VERSION, step);
    }
    plugin.stop(VERSION, transfer);
    transfer
}

/// What else goes on while a thread makes calls.
#[derive(Clone, Copy)]
struct Company {
    /// Somebody reads the newest operations all the time, so that their lines are in another core's cache.
    reader: bool,
    /// A thread makes calls on a communicator of its own.
    caller: bool,
    /// Between two calls the job walks over so many bytes.
    walk: usize,
}

/// The segment, as a reader maps it.
fn mapped(dir: &Path) -> &'static [Word] {
    let path = std::fs::read_dir(dir).unwrap().next().unwrap().unwrap().path();
    let file = std::fs::File::open(path).unwrap();
    let len = file.metadata().unwrap().len() as usize;
    // SAFETY: maps a whole file, which stays as long as it is.
    let at = unsafe {
        libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0)
    };
    assert_ne!(at, libc::MAP_FAILED);
    // SAFETY: words of the mapping, which is never undone; they are only read.
    unsafe { std::slice::from_raw_parts(at.cast(), len / 8) }
}

/// Reads the operations of the last 64 tickets until told to stop.
fn read_along(words: &[Word], stop: &Word) {
    stay_on(1);
    let reader = Reader::open(words).unwrap();
    while stop.get() == 0 {
        let next = reader.ring(Region::Op).next();
        for ticket in next.saturating_sub(64)..next {
            black_box(reader.op(ticket));
        }
    }
}

/// Keeps the calling thread on one core, so that the other ones' cache is another.
fn stay_on(core: usize) {
    // SAFETY: a set of all zeros is the empty one; the call reads it.
    unsafe {
        let mut cores: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(core, &mut cores);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &cores);
    }
}

/// Time of so many calls: the median of batches, since a machine that others use makes any mean its own.
fn calls(bare: &mut Bare, walk: usize, times: u64) -> Duration {
    let mut bytes = vec![1u8; walk];
    let batch = if walk == 0 { 20 } else { 1 };
    let mut each: Vec<f64> = (0..times.div_ceil(batch))
        .map(|_| {
            bytes.iter_mut().step_by(64).for_each(|b| *b = b.wrapping_add(1));
            black_box(&mut bytes);
            let begun = Instant::now();
            for _ in 0..batch {
                black_box(bare.call(false));
            }
            begun.elapsed().as_secs_f64() / batch as f64
        })
        .collect();
    each.sort_by(f64::total_cmp);
    Duration::from_secs_f64(each[each.len() / 2] * times as f64)
}

fn in_company(c: &mut Criterion, plugin: &Plugin, words: &'static [Word]) {
    stay_on(0);
    for (name, reader, caller, walk) in [
        ("call, read all the time", true, false, 0),
        ("call, two threads", false, true, 0),
        ("call, two threads, read all the time", true, true, 0),
        ("call after 64 KiB", false, false, 64 << 10),
        ("call after 4 MiB", false, false, 4 << 20),
        ("call after 64 KiB, read all the time", true, false, 64 << 10),
    ] {
        let company = Company { reader, caller, walk };
        let mut own = Bare::new(plugin, plugin.init(VERSION, 8).context);
        let other = plugin.init(VERSION, 9).context;
        let stop = Word::new(0);
        std::thread::scope(|s| {
            if company.reader {
                s.spawn(|| read_along(words, &stop));
            }
            if company.caller {
                s.spawn(|| {
                    stay_on(1);
                    let mut other = Bare::new(plugin, other);
                    while stop.get() == 0 {
                        black_box(other.call(false));
                    }
                });
            }
            c.bench_function(name, |b| b.iter_custom(|times| calls(&mut own, company.walk, times)));
            stop.set(1);
        });
    }
}

fn callbacks(c: &mut Criterion) {
    let dir = tempfile::Builder::new().tempdir_in("/dev/shm").unwrap();
    // SAFETY: no thread of this process reads the environment yet.
    unsafe { std::env::set_var("RINGWATCH_DIR", dir.path()) };
    let plugin = Plugin::built();
    let context = plugin.init(VERSION, 7).context;
    let mut bare = Bare::new(&plugin, context);
    let coll = bare.coll();

    c.bench_function("coll: start, stop", |b| b.iter(|| black_box(bare.coll())));
    c.bench_function("kernel: start, state, stop", |b| b.iter(|| bare.kernel(coll)));
    c.bench_function("call", |b| b.iter(|| black_box(bare.call(false))));
    c.bench_function("call and launch", |b| b.iter(|| black_box(bare.call(true))));

    in_company(c, &plugin, mapped(dir.path()));

    let op = abi::proxy_op(VERSION, coll as u64, plugin.pid, 1, STEPS, 4096, true);
    c.bench_function("transfer of 8 steps", |b| b.iter(|| black_box(transfer(&plugin, context, &op))));

    let stale = plugin.start(VERSION, context, &op);
    for _ in 0..100_000 {
        plugin.start(VERSION, context, &op);
    }
    c.bench_function("stale stop", |b| b.iter(|| plugin.stop(VERSION, black_box(stale))));

    // The library's own clock cannot be called from outside: this is what it has to be cheaper than.
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    c.bench_function("the clock through the vDSO", |b| {
        b.iter(|| {
            // SAFETY: fills one timespec.
            unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, black_box(&mut t)) }
        });
    });
}

criterion_group!(benches, callbacks);
criterion_main!(benches);
