//! What the wait-for graph costs at the largest size that is promised: `cargo bench --bench waits`.

#![allow(missing_docs, reason = "criterion's macros")]

use criterion::{Criterion, criterion_group, criterion_main};
use ringwatch::join::{Front, Stage, Waits};
use ringwatch::model::{CommId, Rank, Track};
use std::hint::black_box;

const RANKS: u32 = 16_384;
const COMMS: u64 = 64;

/// Rank 77 is missing in all of them; everybody else has issued one more and waits.
fn front(rank: u32, order: u64) -> Front {
    let missing = rank == 77;
    let stage = if missing { Stage::InDoubt } else { Stage::Started };
    Front { process: rank, issued: order + u64::from(!missing), done: order, stage }
}

fn fill(w: &mut Waits, order: u64) {
    for comm in 0..COMMS {
        for rank in 0..RANKS {
            w.set(CommId(comm), Track::Collective, Rank(rank), Some(front(rank, order)));
        }
    }
}

fn waits(c: &mut Criterion) {
    let mut w = Waits::new();
    let mut order = 0;
    c.bench_function("16,384 ranks x 64 communicators: every row changes, solve", |b| {
        b.iter(|| {
            order += 1;
            fill(&mut w, order);
            let found = w.solve(|_| 0);
            assert_eq!((found.len(), found[0].held_up.len()), (1, 63));
            black_box(found)
        });
    });
    c.bench_function("16,384 ranks x 64 communicators: one row changes, solve", |b| {
        b.iter(|| {
            order += 1;
            w.set(CommId(3), Track::Collective, Rank(5), Some(front(5, order)));
            black_box(w.solve(|_| 0))
        });
    });
    // A rank is in 64 communicators of 256: as many rows, many more operations.
    let mut w = Waits::new();
    c.bench_function("16,384 ranks in 64 communicators of 256 each: every row changes, solve", |b| {
        b.iter(|| {
            order += 1;
            for comm in 0..COMMS * u64::from(RANKS) / 256 {
                for rank in 0..256u32 {
                    // Communicators overlap: the same ranks never meet twice.
                    let process = (rank * 64 + (comm % 64) as u32 + rank * (comm / 64) as u32) % RANKS;
                    let row = Front { process, ..front(process, order) };
                    w.set(CommId(comm), Track::Collective, Rank(rank), Some(row));
                }
            }
            black_box(w.solve(|_| 0))
        });
    });
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20);
    targets = waits
}
criterion_main!(benches);
