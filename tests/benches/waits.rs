//! What a look costs at the largest size that is promised: `cargo bench --bench waits`. First the wait-for graph alone,
//! then all that the join and the rules do between two looks, from records as they are fed.

#![allow(missing_docs, reason = "criterion's macros")]

use criterion::{Criterion, criterion_group, criterion_main};
use ringwatch::detect::{Detector, Settings};
use ringwatch::join::{Join, OpPhase, RankProgress, WaitGraph, origins};
use ringwatch::model::{
    Algo, ChannelStamp, CommId, CommRecord, DataType, Fact, Finding, Flags, Func, GpuFact, Job, Kind, Lane,
    LinkFact, Liveness, OpRecord, PcieFact, Proto, Rank, Reading, SegmentId, SegmentRecord, Throttle, Timing,
    Track, Update,
};
use std::collections::BTreeSet;
use std::hint::black_box;
use std::time::{Duration, Instant};

const RANKS: u32 = 16_384;
const COMMS: u64 = 64;

/// Rank 77 is missing in all of them; everybody else has issued one more and waits.
fn front(rank: u32, order: u64) -> RankProgress {
    let missing = rank == 77;
    let stage = if missing { OpPhase::InDoubt } else { OpPhase::Started };
    RankProgress { process: rank, issued: order + u64::from(!missing), done: order, stage }
}

fn fill(w: &mut WaitGraph, order: u64) {
    for comm in 0..COMMS {
        for rank in 0..RANKS {
            w.set(CommId::unowned(comm), Track::Collective, Rank(rank), Some(front(rank, order)));
        }
    }
}

fn waits(c: &mut Criterion) {
    let mut w = WaitGraph::new();
    let mut order = 0;
    c.bench_function("16,384 ranks x 64 communicators: every row changes, solve", |b| {
        b.iter(|| {
            order += 1;
            fill(&mut w, order);
            let found = origins(&w.stalls(), |_| 0, &[]);
            assert_eq!((found.len(), found[0].held_up.len()), (1, 63));
            black_box(found)
        });
    });
    c.bench_function("16,384 ranks x 64 communicators: one row changes, solve", |b| {
        b.iter(|| {
            order += 1;
            w.set(CommId::unowned(3), Track::Collective, Rank(5), Some(front(5, order)));
            black_box(origins(&w.stalls(), |_| 0, &[]))
        });
    });
    // A rank is in 64 communicators of 256: as many rows, many more operations.
    let mut w = WaitGraph::new();
    c.bench_function("16,384 ranks in 64 communicators of 256 each: every row changes, solve", |b| {
        b.iter(|| {
            order += 1;
            for comm in 0..COMMS * u64::from(RANKS) / 256 {
                for rank in 0..256u32 {
                    // Communicators overlap: the same ranks never meet twice.
                    let process = (rank * 64 + (comm % 64) as u32 + rank * (comm / 64) as u32) % RANKS;
                    let row = RankProgress { process, ..front(process, order) };
                    w.set(CommId::unowned(comm), Track::Collective, Rank(rank), Some(row));
                }
            }
            black_box(origins(&w.stalls(), |_| 0, &[]))
        });
    });
}

const S: u64 = 1_000_000_000;
const MS: u64 = 1_000_000;

fn segment(rank: u32, liveness: Liveness) -> Update {
    Update::Segment(SegmentRecord {
        id: SegmentId(u64::from(rank) + 1),
        path: format!("/dev/shm/ringwatch-1000/{rank:016x}.seg").into(),
        pid: 4_000 + rank % 8,
        host: format!("node-{:04}", rank / 8),
        program: "python3".into(),
        nccl: Some("2.28.9".into()),
        abi: Some(5),
        job: Job {
            name: Some("pretraining-7".into()),
            rank: Some(rank),
            size: Some(RANKS),
            local: Some(8),
            ..Job::default()
        },
        owner: Some(1000),
        liveness,
        created_ns: 0,
        created_unix_ns: 1_795_244_764 * S,
        losses: Vec::new(),
    })
}

fn beat(comm: u64, rank: u32, issued: u64) -> Update {
    Update::Comm(CommRecord {
        segment: SegmentId(u64::from(rank) + 1),
        comm: CommId::unowned(comm),
        rank: Rank(rank),
        ranks: Some(RANKS),
        nodes: Some(RANKS / 8),
        name: Some(NAMES[comm as usize % NAMES.len()].into()),
        gpu: Some(GPUS[rank as usize % 8].into()),
        host_clock: u64::from(rank / 8),
        issued,
        replayed: 0,
        init_ns: 0,
        making: None,
        rules: None,
        finalized_ns: None,
    })
}

const NAMES: [&str; 4] = ["default_pg", "tensor_parallel", "pipeline_parallel", "data_parallel"];
const GPUS: [&str; 8] = [
    "0000:1b:00.0",
    "0000:43:00.0",
    "0000:52:00.0",
    "0000:61:00.0",
    "0000:9d:00.0",
    "0000:c3:00.0",
    "0000:d1:00.0",
    "0000:df:00.0",
];

/// An all-reduce that started on the GPU, and may have ended.
fn op(comm: u64, rank: u32, order: u64, at: u64, ended: bool) -> Update {
    let stamp = ChannelStamp {
        channel: 0,
        start_gpu_ns: Some(at + 10_000),
        stop_gpu_ns: ended.then_some(at + 50 * MS),
        start_seen_ns: at + 11_000,
        stop_seen_ns: ended.then_some(at + 50 * MS + 1_000),
    };
    Update::Op(Box::new(OpRecord {
        segment: SegmentId(u64::from(rank) + 1),
        ticket: order * COMMS + comm,
        comm: CommId::unowned(comm),
        rank: Rank(rank),
        lane: Lane::Collective,
        order: Some(order),
        func: Func::AllReduce,
        dtype: Some(DataType::Float32),
        count: 1 << 20,
        root: Some(Rank(0)),
        algo: Some(Algo::Ring),
        proto: Some(Proto::Simple),
        channels: Some(1),
        warps: Some(16),
        seq: Some(order),
        plan: None,
        flags: Flags::default(),
        called_ns: Some(at),
        returned: None,
        redop: None,
        issued_ns: Some(at),
        timing: Timing::Kernel,
        event_ns: None,
        event_seen_ns: None,
        started: 1,
        stopped: u16::from(ended),
        stamps: vec![stamp],
        net: Vec::new(),
    }))
}

/// Resident memory of this process.
fn resident_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/statm").ok()?;
    Some(text.split_whitespace().nth(1)?.parse::<u64>().ok()? * 4096)
}

/// A job of all ranks in all communicators, each in its `order`th operation.
fn job(order: u64) -> Join {
    let before = resident_bytes();
    let mut join = Join::new();
    for rank in 0..RANKS {
        join.feed(segment(rank, Liveness::Alive));
    }
    for comm in 0..COMMS {
        (0..RANKS).for_each(|rank| join.feed(beat(comm, rank, order)));
    }
    join.tick(S);
    if let (Some(before), Some(after)) = (before, resident_bytes()) {
        let each = after.saturating_sub(before) / (u64::from(RANKS) * COMMS);
        println!("{RANKS} ranks x {COMMS} communicators: {each} bytes of resident memory a membership");
    }
    join
}

/// All ranks but the missing ones wait in `order` of every communicator since `at`.
fn hang(join: &mut Join, missing: impl Fn(u32) -> bool, order: u64, at: u64) {
    for comm in 0..COMMS {
        for rank in (0..RANKS).filter(|r| !missing(*r)) {
            join.feed(beat(comm, rank, order + 1));
            join.feed(op(comm, rank, order, at, false));
        }
    }
}

/// The time of one look, and what it found.
fn look(join: &mut Join, detector: &mut Detector, now_ns: u64) -> (Duration, Vec<Finding>) {
    let begun = Instant::now();
    join.tick(now_ns);
    let found = detector.check(join, now_ns);
    let found = found.into_iter().map(|e| e.finding).collect();
    (begun.elapsed(), black_box(found))
}

/// What is read of a GPU in one second. One of all runs slower than its siblings, and one throttles.
fn reading(rank: u32, at_ns: u64) -> Update {
    let (slow, hot) = (rank == 4_003, rank == 9_006);
    let link = |link| LinkFact { link, up: Some(true), ..LinkFact::default() };
    let gpu = GpuFact {
        gpu: GPUS[rank as usize % 8].into(),
        index: Some(rank % 8),
        name: Some("NVIDIA H200".into()),
        links: (0..18).map(link).collect(),
        pcie: Some(PcieFact {
            generation: Some(5),
            generation_max: Some(5),
            width: Some(16),
            width_max: Some(16),
            replays: None,
        }),
        sm_mhz: Some(if slow || hot { 1_200 } else { 1_900 + rank % 7 * 5 }),
        sm_max_mhz: Some(1_980),
        busy: Some(0.95),
        throttled: Some(if hot { BTreeSet::from([Throttle::ThermalHardware]) } else { BTreeSet::new() }),
        ..GpuFact::default()
    };
    let host = format!("node-{:04}", rank / 8);
    Update::Hardware(Box::new(Reading { host, at_ns, fact: Fact::Gpu(Box::new(gpu)) }))
}

/// Looks at a job of which nothing changes; with readings, of every GPU once a second, of the last two minutes.
fn devices(c: &mut Criterion) {
    let job = job(20);
    let mut group = c.benchmark_group("look");
    group.sample_size(10).warm_up_time(Duration::from_millis(1)).measurement_time(Duration::from_millis(1));
    for (name, read) in [("nothing changes", false), ("nothing changes, 2,048 nodes are read", true)] {
        let (mut join, mut detector) = (job.clone(), Detector::new(Settings::default()));
        let mut second = 0;
        let mut next = |join: &mut Join| {
            second += 1;
            if read {
                (0..RANKS).for_each(|rank| join.feed(reading(rank, second * S)));
            }
            second * S + 500 * MS
        };
        (0..120).for_each(|_| {
            next(&mut join);
        });
        let mut told: BTreeSet<Kind> = BTreeSet::new();
        group.bench_function(name, |b| {
            b.iter_custom(|n| {
                let mut all = Duration::ZERO;
                for _ in 0..n {
                    let now = next(&mut join);
                    let (took, found) = look(&mut join, &mut detector, now);
                    assert!(found.iter().all(|f| f.victims.len() == COMMS as usize), "{found:?}");
                    told.extend(found.iter().map(|f| f.kind));
                    all += took;
                }
                all
            });
        });
        let wanted = if read { vec![Kind::SlowGpu, Kind::ThrottledGpu] } else { Vec::new() };
        assert_eq!(told, wanted.into_iter().collect());
    }
    group.finish();
}

fn looks(c: &mut Criterion) {
    const ORDER: u64 = 20;
    let job = job(ORDER);
    let mut group = c.benchmark_group("look");
    group.sample_size(10).warm_up_time(Duration::from_millis(1)).measurement_time(Duration::from_millis(1));

    // Every rank goes on in every communicator; eight of each are seen to be in an operation that takes 50 ms.
    let (mut join, mut detector) = (job.clone(), Detector::new(Settings::default()));
    let (mut order, mut now) = (ORDER, 10 * S);
    group.bench_function("healthy, every rank goes on", |b| {
        b.iter_custom(|n| {
            let mut all = Duration::ZERO;
            for _ in 0..n {
                for comm in 0..COMMS {
                    for rank in (0..8).map(|i| i * RANKS / 8) {
                        if order > ORDER {
                            join.feed(op(comm, rank, order - 1, now - 40 * MS, true));
                        }
                        join.feed(op(comm, rank, order, now + 460 * MS, false));
                    }
                    (0..RANKS).for_each(|rank| join.feed(beat(comm, rank, order + 1)));
                }
                order += 1;
                now += 500 * MS;
                let (took, found) = look(&mut join, &mut detector, now);
                assert!(found.is_empty(), "{found:?}");
                all += took;
            }
            all
        });
    });

    let mut run = |name: &str, missing: &dyn Fn(u32) -> bool, end: &dyn Fn(&mut Join), changes: bool| {
        group.bench_function(name, |b| {
            b.iter_custom(|n| {
                let mut all = Duration::ZERO;
                for _ in 0..n {
                    let (mut join, mut detector) = (job.clone(), Detector::new(Settings::default()));
                    hang(&mut join, missing, ORDER, 10 * S);
                    end(&mut join);
                    let (first, found) = look(&mut join, &mut detector, 14 * S);
                    let count = (0..RANKS).filter(|r| missing(*r)).count();
                    assert_eq!(
                        (found.len(), found.first().map(|f| f.ranks.len())),
                        (1, Some(count)),
                        "{found:?}"
                    );
                    if !changes {
                        all += first;
                        continue;
                    }
                    // A rank that waits changes in every fourth communicator.
                    for comm in (0..COMMS).step_by(4) {
                        join.feed(op(comm, 5, ORDER, 10 * S + 1, false));
                    }
                    let (again, found) = look(&mut join, &mut detector, 14 * S + 500 * MS);
                    assert!(found.is_empty(), "{found:?}");
                    all += again;
                }
                all
            });
        });
    };
    let nothing = |_: &mut Join| {};
    run("a hang becomes visible, 1 rank missing", &|r| r == 77, &nothing, false);
    run("a hang lasts, 16 communicators change", &|r| r == 77, &nothing, true);
    run("a hang becomes visible, 1,000 ranks missing", &|r| r % 16 == 7 && r < 16_000, &nothing, false);
    let die = |join: &mut Join| {
        (0..16_000).filter(|r| r % 16 == 7).for_each(|r| join.feed(segment(r, Liveness::Gone(Some(10 * S)))));
    };
    run("a hang becomes visible, 1,000 processes gone", &|r| r % 16 == 7 && r < 16_000, &die, false);
    run("a hang lasts, 1,000 processes gone", &|r| r % 16 == 7 && r < 16_000, &die, true);
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20);
    targets = waits, devices, looks
}
criterion_main!(benches);
