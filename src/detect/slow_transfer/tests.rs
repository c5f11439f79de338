use super::*;
use crate::join::testing::{all_reduce, process};
use crate::model::{CommRecord, Lane, OpRecord, SegmentId, Update};

const MS: u64 = 1_000_000;
const US: u64 = 1_000;

/// A job of processes, two a host, and its communicators; every operation takes what `takes` says.
struct Job {
    join: Join,
    comms: Vec<(u64, Vec<u32>)>,
    at: u64,
    order: u64,
}

impl Job {
    fn new(processes: u32, comms: &[&[u32]]) -> Self {
        let mut join = Join::new();
        for n in 0..processes {
            let Update::Segment(mut s) = process(n) else { unreachable!("a process") };
            s.host = format!("node{}", n / 2);
            join.feed(Update::Segment(s));
        }
        let comms: Vec<(u64, Vec<u32>)> = (1..).zip(comms.iter().map(|c| c.to_vec())).collect();
        for (id, members) in &comms {
            for (rank, n) in (0..).zip(members) {
                join.feed(Update::Comm(CommRecord {
                    segment: SegmentId(u64::from(*n) + 1),
                    comm: CommId::unowned(*id),
                    rank: Rank(rank),
                    ranks: u32::try_from(members.len()).ok(),
                    nodes: None,
                    name: None,
                    gpu: None,
                    host_clock: 1,
                    issued: 0,
                    replayed: 0,
                    init_ns: 0,
                    making: None,
                    rules: None,
                    finalized_ns: None,
                }));
            }
        }
        Job { join, comms, at: 1_000 * MS, order: 0 }
    }

    fn run(&mut self, n: u32, takes: impl Fn(u64) -> u64) {
        for _ in 0..n {
            self.at += 10 * MS;
            for (id, members) in &self.comms {
                for (rank, segment) in (0..).zip(members) {
                    let took = takes(*id);
                    let kernel = Some((self.at + 10 * US, Some(self.at + 10 * US + took)));
                    let mut o: OpRecord = all_reduce(rank, self.order, self.at, kernel);
                    o.segment = SegmentId(u64::from(*segment) + 1);
                    o.comm = CommId::unowned(*id);
                    self.join.feed(Update::Op(Box::new(o)));
                }
            }
            self.order += 1;
            self.join.tick(self.at + 5 * MS);
        }
    }

    fn check(&self) -> Vec<Finding> {
        SlowTransferRule::default().check(&self.join, self.at)
    }
}

#[test]
fn a_transfer_that_gets_slower_is_a_change_point() {
    let mut job = Job::new(2, &[&[0, 1]]);
    job.run(300, |_| 100 * US);
    assert_eq!(job.check(), vec![]);
    let since = job.at;
    job.run(100, |_| 170 * US);
    let found = job.check();
    assert_eq!(found.len(), 1, "{found:#?}");
    assert_eq!((found[0].kind, found[0].ranks.len()), (Kind::ChangePoint, 2));
    assert!(found[0].since_ns.abs_diff(since) < 200 * MS);
    assert!((found[0].evidence[0].value.unwrap() - 1.7).abs() < 0.02, "{:?}", found[0].evidence);
    job.run(200, |_| 100 * US);
    assert_eq!(job.check(), vec![]);
}

#[test]
fn slower_than_its_like_from_the_start_is_a_slow_transfer() {
    // Five communicators on hosts of their own; the second was never fast.
    let mut job = Job::new(10, &[&[0, 1], &[2, 3], &[4, 5], &[6, 7], &[8, 9]]);
    job.run(200, |c| if c == 2 { 150 * US } else { 100 * US + c * US });
    let found = job.check();
    assert_eq!(found.len(), 1, "{found:#?}");
    // With two ranks it is a pair, and the others' pairs are fast.
    assert_eq!((found[0].kind, found[0].communicator), (Kind::SlowPair, CommId::unowned(2)));
    let mut job = Job::new(12, &[&[0, 1, 2], &[3, 4, 5], &[6, 7, 8], &[9, 10, 11]]);
    job.run(200, |c| if c == 2 { 150 * US } else { 100 * US + c * US });
    let found = job.check();
    assert_eq!(
        (found.len(), found[0].kind, found[0].communicator),
        (1, Kind::SlowTransfer, CommId::unowned(2))
    );
}

#[test]
fn a_node_that_all_slow_communicators_have_in_common_is_named() {
    // Rows and columns of a grid over six hosts of two; host node1 holds processes 2 and 3.
    let mut job = Job::new(
        12,
        &[&[0, 4, 8], &[1, 5, 9], &[2, 6, 10], &[3, 7, 11], &[0, 6, 9], &[2, 4, 11], &[1, 7, 10]],
    );
    job.run(200, |c| if [3, 4, 6].contains(&c) { 180 * US } else { 100 * US + c * US });
    let found = job.check();
    assert_eq!(found.len(), 1, "{found:#?}");
    assert_eq!((found[0].kind, found[0].ranks.as_slice()), (Kind::SlowNode, &[Rank(0)][..]));
    assert!(found[0].evidence[0].text.contains("node1"), "{:?}", found[0].evidence);
}

#[test]
fn a_pair_is_named_where_other_pairs_are_fast() {
    let mut job = Job::new(8, &[&[0, 1, 2, 3, 4, 5, 6, 7]]);
    for i in 0..200u64 {
        job.at += 10 * MS;
        for (from, to) in [(0u32, 1u32), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6)] {
            let took = if (from, to) == (2, 3) { 400 * US } else { 100 * US + u64::from(from) * US };
            for (rank, lane) in [(from, Lane::Send(Rank(to))), (to, Lane::Recv(Rank(from)))] {
                let kernel = Some((job.at + 10 * US, Some(job.at + 10 * US + took)));
                let mut o = all_reduce(rank, i, job.at, kernel);
                o.comm = CommId::unowned(1);
                o.lane = lane;
                o.func = if matches!(lane, Lane::Send(_)) { Func::Send } else { Func::Recv };
                job.join.feed(Update::Op(Box::new(o)));
            }
        }
        job.join.tick(job.at + 5 * MS);
    }
    let found = job.check();
    assert_eq!(found.len(), 1, "{found:#?}");
    assert_eq!((found[0].kind, found[0].ranks.as_slice()), (Kind::SlowPair, &[Rank(2), Rank(3)][..]));
}

#[test]
fn a_benchmark_says_what_a_transfer_should_take() {
    let mut job = Job::new(2, &[&[0, 1]]);
    job.run(200, |_| 200 * US);
    let at = |bytes, us: f64| Baseline {
        source: BaselineSource::Benchmark,
        func: Func::AllReduce,
        ranks: 2,
        bytes,
        time_ns: us * 1e3,
    };
    // 4 MiB lie between what was measured.
    let rule = SlowTransferRule::new(vec![at(2 << 20, 50.0), at(6 << 20, 150.0)], Settings::default());
    let found = rule.check(&job.join, job.at);
    assert_eq!((found.len(), found[0].kind), (1, Kind::SlowTransfer));
    assert!(found[0].evidence.iter().any(|e| e.text.contains("2.00 times as long as the benchmark")));
    let close = SlowTransferRule::new(vec![at(2 << 20, 100.0), at(6 << 20, 200.0)], Settings::default());
    assert_eq!(close.check(&job.join, job.at), vec![]);
    let other = SlowTransferRule::new(vec![Baseline { ranks: 4, ..at(4 << 20, 10.0) }], Settings::default());
    assert_eq!(other.check(&job.join, job.at), vec![], "of other numbers of ranks it says nothing");
    // NCCL's own prediction is a model: it has to be missed by more.
    let predicted = |bytes, us| Baseline { source: BaselineSource::Predicted, ..at(bytes, us) };
    let near = SlowTransferRule::new(vec![predicted(4 << 20, 110.0)], Settings::default());
    assert_eq!(near.check(&job.join, job.at), vec![]);
    let far = SlowTransferRule::new(vec![predicted(4 << 20, 80.0)], Settings::default());
    let found = far.check(&job.join, job.at);
    assert!(
        found[0].evidence.iter().any(|e| e.text.contains("2.50 times as long as NCCL predicts")),
        "{found:?}"
    );
}

#[test]
fn uneven_sizes_and_pauses_are_healthy() {
    let mut job = Job::new(2, &[&[0, 1]]);
    job.run(300, |_| 100 * US);
    // A checkpoint; then the first operations are slow.
    job.at += 50_000 * MS;
    job.run(10, |_| 900 * US);
    job.run(100, |_| 100 * US);
    assert_eq!(job.check(), vec![]);
}
