//! How many operations a second one core reads, joins and judges: `cargo bench --bench ingest`. Real segments, written
//! by the plugin from a recording; `untimed` is what a fast job leaves (the governor's budget left out GPU times),
//! `timed` has every kernel on every channel, as far back as the ring of channels goes: a quarter of the operations.

#![allow(clippy::unwrap_used, reason = "a benchmark stops at the first surprise")]
#![allow(missing_docs, reason = "criterion's macros")]

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use ringwatch::detect::{Detector, Settings};
use ringwatch::ingest::{Place, Segments, now_ns};
use ringwatch::join::Join;
use ringwatch::model::{Source, Update};
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Plays a recording until the rings are full; all ranks, one after the other.
fn segments(room: &Path, detail: &str) -> PathBuf {
    let dir = room.join(detail);
    let program = env!("CARGO_BIN_EXE_ringwatch");
    let out = Command::new(program).args(["plugin"]).arg(room).output().unwrap();
    assert!(out.status.success());
    for rank in 0..4 {
        let played = Command::new(program)
            .args([
                "replay",
                "--scenario",
                "mixed",
                "--unpaced",
                "--loops",
                "300",
                "--honour-mask",
                "--rank",
                &rank.to_string(),
                "--plugin",
            ])
            .arg(room.join("libnccl-profiler-ringwatch.so"))
            .env("RINGWATCH_DIR", &dir)
            .env("RINGWATCH_DETAIL", detail)
            .output()
            .unwrap();
        assert!(played.status.success(), "{}", String::from_utf8_lossy(&played.stderr));
    }
    dir
}

fn read(dir: &Path) -> Vec<Update> {
    Segments::new(vec![Place::Dir(dir.to_owned())]).poll(now_ns())
}

fn operations(updates: &[Update]) -> u64 {
    updates.iter().filter(|u| matches!(u, Update::Op(_))).count() as u64
}

fn ingest(c: &mut Criterion) {
    let room = tempfile::tempdir().unwrap();
    for (name, detail) in [("untimed", "calls"), ("timed", "full")] {
        let dir = segments(room.path(), detail);
        let updates = read(&dir);
        let n = operations(&updates);
        assert!(n > 10_000, "{n} operations");
        let stamped = |u: &&Update| matches!(u, Update::Op(o) if !o.stamps.is_empty());
        let timed = updates.iter().filter(stamped).count() as u64;
        // Channels have several slots an operation, so that only the newest operations' are there to be read.
        assert!(if name == "timed" { timed > n / 8 } else { timed == 0 }, "{name}: {timed} of {n} are timed");
        let mut group = c.benchmark_group(name);
        group.throughput(Throughput::Elements(n)).sample_size(20);
        group.bench_function("ingest", |b| b.iter(|| black_box(read(&dir))));
        group.bench_function("join and detect", |b| {
            let batch = || updates.clone();
            b.iter_batched(
                batch,
                |updates| {
                    let mut join = Join::new();
                    let mut detector = Detector::new(Settings::default());
                    let now = now_ns();
                    // As they come: a look takes in what came in 20 ms.
                    for (i, update) in updates.into_iter().enumerate() {
                        join.feed(update);
                        if i % 16_384 == 16_383 {
                            join.tick(now);
                            black_box(detector.check(&join, now));
                        }
                    }
                    join.tick(now);
                    // Given back: what it knows is not freed while time is taken.
                    (detector.check(&join, now), join)
                },
                BatchSize::LargeInput,
            );
        });
        group.finish();
    }
}

criterion_group!(benches, ingest);
criterion_main!(benches);
