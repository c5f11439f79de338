//! The join and the rules under anything that segments may say: they belong to jobs, and this process may be
//! root. Debug builds check arithmetic, so an overflow fails here too.

use proptest::prelude::*;
use ringwatch::detect::{Detector, Settings};
use ringwatch::join::{Join, MemoryLimit, View};
use ringwatch::model::{
    Algo, ChannelStamp, CommId, CommRecord, DataType, Flags, Func, Job, Lane, Liveness, Making, NetPhase,
    NetProgress, OpRecord, Proto, Rank, RedOp, Returned, SegmentId, SegmentRecord, Timing, Untimed, Update,
};

const S: u64 = 1_000_000_000;

/// Numbers near each other, numbers of a real clock, and the ends of what a word holds.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![
        8 => 0..8u64,
        4 => 0..20 * S,
        1 => Just(0),
        1 => Just(u64::MAX),
        1 => (0..4u64).prop_map(|n| u64::MAX - n),
        1 => Just(i64::MAX as u64),
        1 => any::<u64>(),
    ]
}

fn rank() -> impl Strategy<Value = Rank> {
    prop_oneof![9 => 0..4u32, 1 => Just(u32::MAX)].prop_map(Rank)
}

fn comm() -> impl Strategy<Value = CommId> {
    (0..2u64).prop_map(CommId::unowned)
}

fn segment() -> impl Strategy<Value = SegmentId> {
    (0..5u64).prop_map(SegmentId)
}

fn lane() -> impl Strategy<Value = Lane> {
    prop_oneof![
        6 => Just(Lane::Collective),
        2 => Just(Lane::Replay),
        1 => rank().prop_map(Lane::Send),
        1 => rank().prop_map(Lane::Recv),
    ]
}

fn stamp() -> impl Strategy<Value = ChannelStamp> {
    let times = (
        0..3u8,
        prop::option::of(number()),
        prop::option::of(number()),
        number(),
        prop::option::of(number()),
    );
    times.prop_map(|(channel, start_gpu_ns, stop_gpu_ns, start_seen_ns, stop_seen_ns)| ChannelStamp {
        channel,
        start_gpu_ns,
        stop_gpu_ns,
        start_seen_ns,
        stop_seen_ns,
    })
}

fn transfer() -> impl Strategy<Value = NetProgress> {
    (rank(), any::<bool>(), any::<u32>(), number(), number(), prop::option::of(number())).prop_map(
        |(peer, is_send, steps, bytes, start_ns, stop_ns)| NetProgress {
            channel: 0,
            peer,
            is_send,
            steps,
            started: steps,
            done: steps / 2,
            bytes,
            start_ns,
            stop_ns,
            waited_ns: [bytes; 4],
            waiting: Some((NetPhase::Wire, start_ns)),
        },
    )
}

fn op() -> impl Strategy<Value = OpRecord> {
    let who = (segment(), comm(), rank(), lane(), number(), prop::option::weighted(0.95, number()));
    let what = (
        prop::sample::select(vec![Func::AllReduce, Func::AllGather, Func::Broadcast, Func::Unknown]),
        prop::option::of(prop::sample::select(DataType::ALL)),
        number(),
        prop::option::of(rank()),
        prop::option::of(0..4u8),
        any::<bool>(),
    );
    let when = (
        prop::option::of(number()),
        prop::option::of(number()),
        prop::sample::select(vec![
            Timing::Unknown,
            Timing::Kernel,
            Timing::Events,
            Timing::Not(Untimed::Budget),
        ]),
        prop::option::of(number()),
    );
    let progress = (
        prop_oneof![0..4u16, Just(u16::MAX)],
        prop_oneof![0..4u16, Just(u16::MAX)],
        prop::collection::vec(stamp(), 0..3),
        prop::collection::vec(transfer(), 0..2),
    );
    (who, what, when, progress).prop_map(|(who, what, when, progress)| OpRecord {
        segment: who.0,
        comm: who.1,
        rank: who.2,
        lane: who.3,
        ticket: who.4,
        order: who.5,
        func: what.0,
        dtype: what.1,
        count: what.2,
        root: what.3,
        algo: Some(Algo::Ring),
        proto: Some(Proto::Ll),
        channels: what.4,
        warps: None,
        seq: Some(what.2),
        plan: None,
        flags: Flags { captured: what.5, ..Flags::default() },
        called_ns: when.0,
        returned: when.1.map(|at_ns| Returned { at_ns, result: (at_ns % 9) as u8 }),
        redop: Some(RedOp::Sum).filter(|_| what.5),
        issued_ns: when.1,
        timing: when.2,
        event_ns: when.3,
        event_seen_ns: when.3,
        started: progress.0,
        stopped: progress.1,
        stamps: progress.2,
        net: progress.3,
    })
}

fn process() -> impl Strategy<Value = SegmentRecord> {
    let live = prop_oneof![
        2 => Just(Liveness::Alive),
        1 => Just(Liveness::Gone(None)),
        1 => number().prop_map(|n| Liveness::Gone(Some(n))),
    ];
    (segment(), live, number(), number(), number(), prop::option::of(0..9u32)).prop_map(
        |(id, liveness, created_ns, created_unix_ns, lost, abi)| SegmentRecord {
            id,
            path: "x.seg".into(),
            pid: 1,
            host: "node".into(),
            program: "job".into(),
            nccl: None,
            abi,
            job: Job { name: None, rank: Some(u32::MAX), size: Some(0), local: None, ..Job::default() },
            owner: None,
            liveness,
            created_ns,
            created_unix_ns,
            losses: vec![("stale handle", lost), ("foreign handle", lost)],
        },
    )
}

fn member() -> impl Strategy<Value = CommRecord> {
    let ranks = prop::option::of(prop_oneof![3 => Just(4u32), 1 => 0..3u32, 1 => Just(u32::MAX)]);
    (segment(), comm(), rank(), ranks, number(), number(), prop::option::of(number())).prop_map(
        |(segment, comm, rank, ranks, issued, replayed, finalized_ns)| CommRecord {
            segment,
            comm,
            rank,
            ranks,
            nodes: ranks,
            name: None,
            gpu: None,
            host_clock: 1,
            issued,
            replayed,
            init_ns: issued,
            making: ranks.map(|n| if n == 4 { Making::Begun } else { Making::Ready(None) }),
            rules: None,
            finalized_ns,
        },
    )
}

#[derive(Debug, Clone)]
enum Step {
    Feed(Box<Update>),
    /// Time passes, by as much as a clock that is told may jump.
    Tick(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => process().prop_map(|s| Step::Feed(Box::new(Update::Segment(s)))),
        3 => member().prop_map(|c| Step::Feed(Box::new(Update::Comm(c)))),
        16 => op().prop_map(|o| Step::Feed(Box::new(Update::Op(Box::new(o))))),
        1 => (segment(), number()).prop_map(|(segment, count)| {
            Step::Feed(Box::new(Update::Missed { segment, what: "operations", count }))
        }),
        3 => number().prop_map(Step::Tick),
    ]
}

/// The job that most steps are about, so that few of them are about nobody.
fn known() -> Vec<Update> {
    let mut out = Vec::new();
    for rank in 0..4 {
        out.push(Update::Segment(segment_of(rank)));
        out.push(Update::Comm(member_of(rank, 8)));
    }
    out
}

fn segment_of(rank: u32) -> SegmentRecord {
    SegmentRecord {
        id: SegmentId(u64::from(rank)),
        path: "x.seg".into(),
        pid: rank,
        host: "node".into(),
        program: "job".into(),
        nccl: None,
        abi: Some(5),
        job: Job::default(),
        owner: None,
        liveness: Liveness::Alive,
        created_ns: S,
        created_unix_ns: 1_795_244_764 * S,
        losses: Vec::new(),
    }
}

fn member_of(rank: u32, issued: u64) -> CommRecord {
    CommRecord {
        segment: SegmentId(u64::from(rank)),
        comm: CommId::unowned(0),
        rank: Rank(rank),
        ranks: Some(4),
        nodes: Some(1),
        name: None,
        gpu: None,
        host_clock: 1,
        issued,
        replayed: 0,
        init_ns: 0,
        making: None,
        rules: None,
        finalized_ns: None,
    }
}

/// What a screen does at any moment.
fn look(join: &Join, detector: &mut Detector, now_ns: u64) {
    detector.check(join, now_ns);
    let snapshot = View::new(join, now_ns).snapshot();
    let seen: usize = join.communicators().map(|c| c.members().len()).sum();
    assert_eq!(snapshot.ranks.len(), seen);
    snapshot.lost();
    for f in detector.findings() {
        f.headline();
    }
}

fn instances(join: &Join) -> usize {
    join.communicators().map(|c| c.instances().count()).max().unwrap_or(0)
}

proptest! {
    // PROPTEST_CASES asks for more.
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn nothing_that_a_segment_says_makes_it_panic(
        knows in any::<bool>(),
        steps in prop::collection::vec(step(), 1..80),
    ) {
        let (mut join, mut detector) = (Join::new(), Detector::new(Settings::default()));
        if knows {
            known().into_iter().for_each(|u| join.feed(u));
        }
        let mut now = 0;
        for s in steps {
            match s {
                Step::Feed(u) => join.feed(*u),
                Step::Tick(n) => {
                    now = n;
                    join.tick(n);
                    look(&join, &mut detector, n);
                }
            }
        }
        join.tick(now);
        look(&join, &mut detector, now);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_order_of_arrival_changes_nothing_of_a_healthy_job(
        operations in 1..60u64,
        ticks in prop::collection::vec(any::<prop::sample::Index>(), 0..4),
        dice in Just(()).prop_perturb(|(), rng| rng),
    ) {
        let healthy: Vec<OpRecord> =
            (0..operations).flat_map(|o| (0..4).map(move |r| all_reduce(r, o))).collect();
        let mut shuffled = healthy.clone();
        let mut rng = dice;
        for i in (1..shuffled.len()).rev() {
            shuffled.swap(i, rng.random_range(0..=i));
        }
        let ticks: Vec<usize> = ticks.iter().map(|t| t.index(shuffled.len())).collect();
        let count = |ops: Vec<OpRecord>, ticks: &[usize]| {
            let (mut join, mut detector) = (Join::new(), Detector::new(Settings::default()));
            for r in 0..4 {
                join.feed(Update::Segment(segment_of(r)));
                join.feed(Update::Comm(member_of(r, operations)));
            }
            for (i, o) in ops.into_iter().enumerate() {
                join.feed(Update::Op(Box::new(o)));
                if ticks.contains(&i) {
                    join.tick(10 * S);
                }
            }
            join.tick(100 * S);
            detector.check(&join, 100 * S);
            look(&join, &mut detector, 100 * S);
            assert_eq!(detector.findings(), vec![]);
            let finished: Vec<u64> =
                join.communicators().flat_map(|c| c.members().values().map(|m| m.finished)).collect();
            let classes: Vec<_> = join.classes().map(|(k, c)| (*k, c.count())).collect();
            (classes, finished, join.communicators().map(|c| c.finished()).sum::<u64>())
        };
        let (classes, finished, all) = count(healthy, &[]);
        prop_assert_eq!((classes[0].1, all), (operations, operations));
        prop_assert_eq!(count(shuffled, &ticks), (classes, finished, all));
    }
}

/// An all-reduce as every rank of a healthy job does it, 1 ms apart; the GPU's clock is 1 s ahead.
fn all_reduce(rank: u32, order: u64) -> OpRecord {
    let issued = 2 * S + order * 1_000_000 + u64::from(rank) * 2_000;
    let start = issued + 5_000 + S;
    let stop = 2 * S + order * 1_000_000 + 60_000 + S;
    OpRecord {
        segment: SegmentId(u64::from(rank)),
        ticket: order,
        comm: CommId::unowned(0),
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
        called_ns: Some(issued - 3_000),
        returned: None,
        redop: None,
        issued_ns: Some(issued),
        timing: Timing::Kernel,
        event_ns: None,
        event_seen_ns: None,
        started: 1,
        stopped: 1,
        stamps: vec![ChannelStamp {
            channel: 0,
            start_gpu_ns: Some(start),
            stop_gpu_ns: Some(stop),
            start_seen_ns: start - S + 2_000,
            stop_seen_ns: Some(stop - S + 2_000),
        }],
        net: Vec::new(),
    }
}

/// A job of a hundred thousand operations, looked at as often as the monitor does at a high rate.
fn long_run(change: impl Fn(&mut OpRecord)) -> (Join, usize) {
    const OPERATIONS: u64 = 25_000;
    let mut join = Join::new();
    let mut most = 0;
    for r in 0..4 {
        join.feed(Update::Segment(segment_of(r)));
        join.feed(Update::Comm(member_of(r, OPERATIONS)));
    }
    for order in 0..OPERATIONS {
        for rank in 0..4 {
            let mut o = all_reduce(rank, order);
            change(&mut o);
            join.feed(Update::Op(Box::new(o)));
        }
        if order % 500 == 499 {
            join.tick(2 * S + order * 1_000_000);
            most = most.max(instances(&join));
        }
    }
    (join, most)
}

/// Operations in memory, whatever became of them: those that are held, and what one look brings.
const BOUND: usize = 6_000;

#[test]
fn a_long_healthy_job_takes_no_more_memory_than_a_short_one() {
    let (join, most) = long_run(|_| {});
    assert!(most <= 1_000, "{most} operations held");
    assert_eq!(join.classes().map(|(_, c)| c.count()).sum::<u64>(), 25_000);
}

/// What a job counts and loses that makes one communicator after the other, beside a limit of memory that holds the history
/// of a few.
fn counted_and_lost(closes: bool) -> (usize, u64) {
    const COMMUNICATORS: u64 = 60;
    const OPERATIONS: u64 = 600;
    let mut join = Join::new();
    join.limit_memory(MemoryLimit::OfUsers(8 << 20));
    join.keep_finished();
    (0..4).for_each(|rank| join.feed(Update::Segment(segment_of(rank))));
    let mut counted = 0;
    for n in 0..COMMUNICATORS {
        let comm = CommId::unowned(n);
        let members = |join: &mut Join, finalized_ns| {
            for rank in 0..4 {
                let record = CommRecord { comm, finalized_ns, ..member_of(rank, OPERATIONS) };
                join.feed(Update::Comm(record));
            }
        };
        members(&mut join, None);
        for order in 0..OPERATIONS {
            let at = n * OPERATIONS + order;
            for rank in 0..4 {
                let op = OpRecord { comm, order: Some(order), seq: Some(order), ..all_reduce(rank, at) };
                join.feed(Update::Op(Box::new(op)));
            }
            if order % 100 == 99 {
                join.tick(2 * S + at * 1_000_000 + 1_000_000);
                counted += join.take_finished().len();
            }
        }
        members(&mut join, closes.then_some(2 * S + n * OPERATIONS * 1_000_000));
    }
    let lost = join.processes().flat_map(|p| p.missed.values()).sum();
    (counted, lost)
}

#[test]
fn history_makes_room_before_records_are_lost() {
    assert_eq!(counted_and_lost(true), (36_000, 0), "of communicators that are closed");
    assert_eq!(counted_and_lost(false), (36_000, 0), "of communicators that go on");
}

#[test]
fn operations_that_never_end_are_given_up_in_the_end() {
    let (_, most) = long_run(|o| {
        (o.started, o.stopped) = (0, 0);
        o.stamps.clear();
    });
    assert!(most <= BOUND, "{most} operations held");
}

#[test]
fn parts_that_never_come_are_given_up_in_the_end() {
    // Rank 3's records are lost: as if they were another operation's, far behind.
    let (_, most) = long_run(|o| {
        if o.rank == Rank(3) {
            o.order = o.order.map(|n| n + 1_000_000);
        }
    });
    assert!(most <= BOUND, "{most} operations held");
}

#[test]
fn a_record_below_what_is_known_to_be_done_is_no_trouble() {
    let mut join = Join::new();
    known().into_iter().for_each(|u| join.feed(u));
    for order in [5, 6, 7, 2, 6, 0, 7, 1] {
        join.feed(Update::Op(Box::new(all_reduce(0, order))));
        join.tick(3 * S);
    }
    let c = join.communicators().next().expect("one");
    assert_eq!(c.members()[&Rank(0)].finished, 6, "each once");
}
