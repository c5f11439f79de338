use super::*;
use crate::model::{CommId, Coverage, JobRow, JobSums, Rank, RankRow};

const COMM: CommId = CommId::unowned(7);
const SECOND: u64 = 1_000_000_000;

fn comm(id: CommId, issued: u64) -> CommRow {
    CommRow {
        id,
        name: Some("dp".to_owned()),
        ranks: Some(4),
        seen: 4,
        nodes: Some(1),
        issued,
        finished: issued,
        in_flight: 0,
        ops_per_s: None,
        coverage: Coverage::default(),
        closed: false,
    }
}

fn class(func: Func, bytes: u64, count: u64) -> ClassRow {
    ClassRow {
        comm: COMM,
        func,
        algo: None,
        proto: None,
        size_class: u8::try_from(bytes.ilog2()).ok(),
        count,
        sampled: false,
        timed: 0,
        by_events: 0,
        bytes: Some(bytes * count),
        ops_per_s: None,
        bytes_per_s: None,
        p50_ns: None,
        p99_ns: None,
        busbw: None,
        share: None,
        spark: Vec::new(),
    }
}

fn job(seen_ns: u64, share: f64) -> JobRow {
    let sums =
        JobSums { comms: vec![COMM], seen_ns: Some(seen_ns), comm_share: Some(share), ..JobSums::default() };
    JobRow {
        unknown: 0,
        name: Some("train".to_owned()),
        alive: 4,
        gone: 0,
        size: Some(4),
        comms: 1,
        nccl: None,
        ops_per_s: None,
        comm_share: None,
        sums,
    }
}

fn curve(func: Func) -> Curve {
    curve_of(func, 4)
}

/// 10 us of latency and 100 bytes a ns.
fn curve_of(func: Func, ranks: u32) -> Curve {
    let sizes = (10..30).map(|n| 1u64 << n);
    Curve::new(func, ranks, sizes.map(|b| (b, 10_000.0 + b as f64 / 100.0))).expect("sizes")
}

fn snapshot(classes: Vec<ClassRow>, seen_ns: u64) -> Snapshot {
    Snapshot { comms: vec![comm(COMM, 1000)], classes, jobs: vec![job(seen_ns, 0.1)], ..Snapshot::default() }
}

#[test]
fn small_operations_are_fused_and_the_gain_comes_from_the_curve() {
    let s = snapshot(vec![class(Func::AllReduce, 4096, 100_000)], 20 * SECOND);
    let all = advise(&s, &[curve(Func::AllReduce)]);
    let [advice] = all.as_slice() else { panic!("one: {all:?}") };
    assert_eq!(advice.what, "fuse small AllReduce operations of communicator dp (4 ranks)");
    assert!(
        advice.why.starts_with("100000 operations AllReduce of 4 KiB on average, 10.0 us each"),
        "{advice:?}"
    );
    // 64 at a time: 100,000 of 10 us become 1,563 of 12.6 us.
    let Gain::Estimated { saved_ns, of_ns } = &advice.gain else { panic!("estimated: {advice:?}") };
    assert!((saved_ns / 1e9 - 0.984).abs() < 0.01 && *of_ns == Some(20 * SECOND), "{advice:?}");
}

#[test]
fn what_gains_little_is_not_mentioned() {
    let small = snapshot(vec![class(Func::AllReduce, 4096, 1000)], 20 * SECOND);
    assert_eq!(advise(&small, &[curve(Func::AllReduce)]), [], "10 ms of 20 s");
    let few = snapshot(vec![class(Func::AllReduce, 4096, 99)], SECOND / 1000);
    assert_eq!(advise(&few, &[curve(Func::AllReduce)]), []);
    let large = snapshot(vec![class(Func::AllReduce, 1 << 28, 10_000)], 20 * SECOND);
    assert_eq!(advise(&large, &[curve(Func::AllReduce)]), [], "large enough");
    let pipeline = snapshot(vec![class(Func::SendRecv, 4096, 1_000_000)], 20 * SECOND);
    assert_eq!(advise(&pipeline, &[curve(Func::SendRecv)]), [], "sends are what they are");
}

#[test]
fn buckets_of_a_middling_size_should_be_larger() {
    let s = snapshot(vec![class(Func::ReduceScatter, 1 << 20, 50_000)], 20 * SECOND);
    let all = advise(&s, &[curve(Func::AllReduce), curve(Func::ReduceScatter)]);
    assert_eq!(all.len(), 1, "{all:?}");
    assert!(all[0].what.starts_with("use larger buckets for ReduceScatter"), "{all:?}");
    assert!(all[0].how.contains("bucket_cap_mb"));
}

#[test]
fn without_a_curve_the_gain_is_not_invented() {
    let s = snapshot(vec![class(Func::AllGather, 1024, 5000)], 20 * SECOND);
    let other_ranks = curve_of(Func::AllGather, 8);
    for curves in [&[][..], &[other_ranks]] {
        let all = advise(&s, curves);
        let [Advice { gain: Gain::Unknown(why), .. }] = all.as_slice() else { panic!("{all:?}") };
        assert_eq!(why, "no curve of all_gather on 4 ranks; see --curves");
    }
}

#[test]
fn many_communicators_of_the_same_processes_and_little_overlap_are_named() {
    let rank = |comm: u64, pid: u32| RankRow {
        comm: CommId::unowned(comm),
        rank: Rank(pid),
        pid,
        host: "a".to_owned(),
        job_rank: None,
        alive: true,
        gpu: None,
        issued: 0,
        finished: 0,
        state: None,
        waits_for: Vec::new(),
        waiting_ns: None,
        late: 0,
        worst_late_ns: None,
        late_cost_ns: 0,
    };
    let ranks: Vec<RankRow> = (0..5).flat_map(|c| [rank(c, 1), rank(c, 2)]).chain([rank(9, 1)]).collect();
    let comms = (0..5).map(|n| comm(CommId::unowned(n), n * 60)).collect();
    let s = Snapshot { ranks, comms, jobs: vec![job(10 * SECOND, 0.45)], ..Snapshot::default() };
    let all = advise(&s, &[]);
    let what: Vec<&str> = all.iter().map(|a| a.what.as_str()).collect();
    assert_eq!(
        what,
        [
            "overlap collectives with computation in train",
            "use fewer communicators: 5 have the same 2 processes"
        ],
        "known gains first"
    );
    assert_eq!(all[1].why, "2 of them issued fewer than 100 operations");
    assert_eq!(all[0].gain, Gain::Estimated { saved_ns: 4.5e9, of_ns: Some(10 * SECOND) });
}

#[test]
fn uneven_exchanges_are_named_with_their_evidence() {
    use crate::model::{Evidence, Finding, OperationRef, Track};
    let operation = OperationRef::named("AlltoAll", Track::Collective, 0);
    let mut f = Finding::new(Kind::Imbalance, COMM, vec![Rank(1)], operation);
    f.evidence.push(Evidence { text: "rank 1 sends 4 times as much".into(), value: None, unit: None });
    let s = Snapshot { findings: vec![f], ..Snapshot::default() };
    let all = advise(&s, &[]);
    assert_eq!((all.len(), all[0].why.as_str()), (1, "rank 1 sends 4 times as much"));
    assert!(all[0].what.starts_with("even out the exchanges"), "{all:?}");
}
