//! What callbacks cost, in time, of the library as it is shipped: `cargo bench -p ringwatch-plugin`. With
//! `RINGWATCH_CHAIN` set, what they cost with that plugin behind it.

#![allow(unsafe_code, reason = "plays NCCL's part of a C interface")]
#![allow(clippy::unwrap_used, reason = "a benchmark stops at the first surprise")]
#![allow(missing_docs, reason = "criterion's macros")]

#[path = "../tests/support/mod.rs"]
mod support;

use criterion::{Criterion, criterion_group, criterion_main};
use std::hint::black_box;
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
