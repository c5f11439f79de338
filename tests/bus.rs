//! Old messages stay readable: tests/data/bus holds one of each version, as it was first written.

use prost::Message as _;
use ringwatch::cluster::message::{self as m, Envelope, Wish};
use ringwatch::cluster::{Moment, Reader};
use ringwatch::model::{Begun, DataType, Launch, Rank, RedOp, Track, Update};
use std::path::Path;

/// Every field of every item, none with its default.
fn whole() -> Envelope {
    let loss = |what: &str, count| m::Loss { what: what.to_owned(), count };
    Envelope {
        version: 1,
        node: "node-a".to_owned(),
        run: 1_795_244_764_000_000_000,
        sequence: 1,
        sent_ns: 70_000_000_000,
        sent_unix_ns: 1_795_244_834_000_000_000,
        processes: vec![m::Process {
            segment: 11,
            pid: 4711,
            program: "python3".to_owned(),
            nccl: Some("2.28.9".to_owned()),
            abi: Some(5),
            job: Some("pretrain".to_owned()),
            job_rank: Some(9),
            job_size: Some(16),
            job_local: Some(8),
            labels: [("user.name".to_owned(), "u".to_owned())].into(),
            owner: Some(1000),
            alive: false,
            gone_ns: Some(69_000_000_000),
            created_ns: 1_000_000_000,
            created_unix_ns: 1_795_244_765_000_000_000,
            losses: vec![loss("slot being written", 2)],
            missed: vec![loss("operations", 3)],
            shares_communicators: false,
        }],
        members: vec![m::Member {
            segment: 11,
            comm: 0xc0ffee,
            rank: 1,
            ranks: Some(2),
            nodes: Some(2),
            name: Some("tp".to_owned()),
            gpu: Some("0000:1a:00.0".to_owned()),
            host_clock: 77,
            issued: 4,
            replayed: 5,
            init_ns: 2_000_000_000,
            making: 2,
            ready_ns: Some(3_000_000_000),
            result: 0,
            finalized_ns: Some(68_000_000_000),
            left: false,
            rules: 0,
            rules_hash: None,
        }],
        beats: vec![m::Beat {
            segment: 11,
            comm: 0xc0ffee,
            rank: 1,
            issued: 41,
            open: 1,
            replayed: 6,
            replays_open: 2,
            sent_bytes: 100,
            received_bytes: 200,
            sends: 3,
            peers: 1,
            ..Default::default()
        }],
        pairs: vec![m::Pair {
            segment: 11,
            comm: 0xc0ffee,
            rank: 1,
            peer: 0,
            sent: 7,
            received: 8,
            from: 2,
            ..Default::default()
        }],
        signatures: vec![m::Signatures {
            segment: 11,
            comm: 0xc0ffee,
            rank: 1,
            from: 39,
            signatures: vec![0xdead_beef, 1],
        }],
        records: vec![m::Record {
            segment: 11,
            ticket: 123,
            comm: 0xc0ffee,
            rank: 1,
            lane: 1,
            peer: 0,
            order: Some(40),
            func: 5,
            dtype: 8,
            count: 1 << 20,
            root: Some(1),
            algo: 2,
            proto: 3,
            channels: Some(16),
            warps: Some(17),
            seq: Some(40),
            plan: Some(9),
            flags: 0b110_011,
            called_ns: Some(60_000_000_000),
            returned_ns: Some(60_000_010_000),
            result: 7,
            redop: 1,
            issued_ns: Some(60_000_005_000),
            timing: 1,
            event_ns: Some(90_000),
            event_seen_ns: Some(60_000_200_000),
            started: 16,
            stopped: 16,
            started_ns: Some(60_000_020_000),
            duration_ns: Some(80_000),
            ended_seen_ns: Some(60_000_150_000),
            finished: true,
            net: vec![m::Net {
                channel: 3,
                peer: 0,
                is_send: true,
                steps: 8,
                started: 7,
                done: 6,
                bytes: 4096,
                start_ns: 60_000_030_000,
                stop_ns: Some(60_000_090_000),
                waited_ns: vec![1, 2, 3, 4],
                waiting: 4,
                waiting_since_ns: 60_000_080_000,
            }],
        }],
        sketches: vec![m::Sketch {
            comm: 0xc0ffee,
            func: 5,
            size_class: 23,
            algo: 2,
            proto: 3,
            count: 10,
            timed: 9,
            bytes: Some(41_943_040),
            busy_ns: 800_000,
            buckets: vec![130, 131],
            counts: vec![4, 5],
            // Whose it is and when it was is told since.
            ..m::Sketch::default()
        }],
        hosts: vec![m::Host {
            segment: 11,
            at_ns: 69_500_000_000,
            state: 7,
            wchan: Some("futex_wait_queue".to_owned()),
            exit_code: None,
            signal: Some(9),
            cpu_starved: Some(0.25),
            cpu_throttled: Some(0.5),
            memory_pressure: Some(0.125),
            oom_kills: Some(1),
            stack: vec!["load (data.py:12)".to_owned()],
            stack_ns: Some(69_400_000_000),
            threads: vec!["2 threads: futex_wait".to_owned()],
            nccl_starved: Some(0.5),
            nccl_busy: Some(0.75),
        }],
        readings: Vec::new(),
        findings: Vec::new(),
        books: Some(m::Books {
            observed: 100,
            published: 60,
            left_out: vec![loss("not sampled", 40)],
            bytes: 5000,
            level: 3,
            last: true,
            unread: 0,
            unsearched: false,
        }),
        announced: vec![m::OperationKey { comm: 0xc0ffee, track: 3, from: 1, to: 0, order: 6, owner: None }],
        // Told of since; the golden message of what was told with it is another one.
        types: Vec::new(),
        calls: Vec::new(),
        work: Vec::new(),
    }
}

fn golden(name: &str, made: &[u8]) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/bus").join(name);
    if std::env::var_os("RINGWATCH_WRITE_GOLDEN").is_some() {
        let file = std::fs::File::options().write(true).create_new(true).open(&path);
        std::io::Write::write_all(&mut file.expect("a golden file never changes"), made).expect("written");
    }
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

#[test]
fn a_message_of_version_1_means_what_it_meant() {
    let bytes = golden("envelope-1.bin", &whole().encode_to_vec());
    assert_eq!(Envelope::decode(bytes.as_slice()).expect("a message"), whole());
    let mut reader = Reader::new(std::time::Duration::from_secs(3));
    let mut told = Vec::new();
    let now = Moment { mono_ns: 80_000_000_000, unix_ns: 1_795_244_834_000_000_000 };
    reader.read("ringwatch.v1.comm.node-a.3", &bytes, now, false, &mut told);
    assert_eq!(reader.refused().len(), 0, "{:?}", reader.refused());
    // In words, so that a change of meaning shows.
    let text: Vec<String> = told.iter().map(|u: &Update| format!("{u:#?}")).collect();
    insta::assert_snapshot!("envelope_1", text.join("\n"));
    assert_eq!(reader.take_announced().len(), 1);
    assert!(reader.nodes()["node-a"].ended());
}

#[test]
fn the_first_message_of_version_1_is_read_still() {
    // It lacks what members and processes have told of since.
    let bytes =
        std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/bus/envelope-1-first.bin"))
            .expect("it stays");
    let mut reader = Reader::new(std::time::Duration::from_secs(3));
    let (mut first, mut now) = (Vec::new(), Vec::new());
    reader.read("ringwatch.v1.comm.node-a.3", &bytes, Moment::default(), true, &mut first);
    assert_eq!(reader.refused().len(), 0, "{:?}", reader.refused());
    let mut reader = Reader::new(std::time::Duration::from_secs(3));
    let today = whole().encode_to_vec();
    reader.read("ringwatch.v1.comm.node-a.3", &today, Moment::default(), true, &mut now);
    let kinds = |all: &[Update]| all.iter().map(std::mem::discriminant).collect::<Vec<_>>();
    assert_eq!(kinds(&first), kinds(&now), "everything in it is understood");
}

#[test]
fn types_and_reductions_of_version_1_mean_what_they_meant() {
    let types = m::Types { segment: 11, comm: 0xc0ffee, rank: 1, from: 39, types: vec![0x18, 0] };
    let mut with = whole();
    (with.sequence, with.types) = (with.sequence + 1, vec![types]);
    let bytes = golden("envelope-1-types.bin", &with.encode_to_vec());
    assert_eq!(Envelope::decode(bytes.as_slice()).expect("a message"), with);
    let mut reader = Reader::new(std::time::Duration::from_secs(3));
    let mut told = Vec::new();
    reader.read("ringwatch.v1.comm.node-a.3", &bytes, Moment::default(), true, &mut told);
    let types = told.iter().find_map(|u| match u {
        Update::Signatures(s) if !s.types.is_empty() => Some((s.from, s.types.clone(), s.signatures.len())),
        _ => None,
    });
    // ncclFloat32 and ncclSum, and one of which nothing is known.
    assert_eq!(types, Some((39, vec![0x18, 0], 0)));
    assert_eq!((DataType::Float32 as u8 + 1) | ((RedOp::Sum as u8 + 1) << 4), 0x18);
}

#[test]
fn departures_of_version_1_mean_what_they_meant() {
    let call = |track, order| {
        let operation = m::OperationKey { comm: 0xc0ffee, track, from: 1, to: 0, order, owner: None };
        Some(m::Call { operation: Some(operation), func: 1, issued_ns: 70_000_000_000 })
    };
    let left =
        m::Departure { call: call(1, 40), usual: call(3, 6), times: 12, left_out: true, loop_ns: 1_000_000 };
    let mut with = whole();
    with.sequence += 1;
    with.calls =
        vec![m::Calls { segment: 11, left: Some(left), usual_ns: Some(69_000_000_000), mixes: vec![] }];
    let bytes = golden("envelope-1-calls.bin", &with.encode_to_vec());
    assert_eq!(Envelope::decode(bytes.as_slice()).expect("a message"), with);
    let mut reader = Reader::new(std::time::Duration::from_secs(3));
    let mut told = Vec::new();
    reader.read("ringwatch.v1.comm.node-a.3", &bytes, Moment::default(), true, &mut told);
    let state = told.iter().find_map(|u| match u {
        Update::Calls(state) => Some(state.as_ref().clone()),
        _ => None,
    });
    let state = state.expect("a departure");
    let left = state.left.expect("where it left its order");
    assert_eq!((left.call.kind.track, left.call.order), (Track::Collective, 40));
    assert_eq!((left.usual.kind.track, left.usual.order), (Track::Pair(Rank(1), Rank(0)), 6));
    assert_eq!((left.times, left.left_out, left.loop_ns), (12, true, 1_000_000));
    assert_eq!(left.call.kind.comm.nccl_hash(), 0xc0ffee);
}

#[test]
fn what_a_gpu_has_started_of_version_1_means_what_it_meant() {
    let mut with = whole();
    with.sequence += 1;
    with.beats[0].begun_issued_ns = Some(69_000_000_000);
    with.beats[0].begun_plan = Some(12);
    let bytes = golden("envelope-1-begun.bin", &with.encode_to_vec());
    assert_eq!(Envelope::decode(bytes.as_slice()).expect("a message"), with);
    let begun = |bytes: &[u8]| {
        let mut reader = Reader::new(std::time::Duration::from_secs(3));
        let mut told = Vec::new();
        reader.read("ringwatch.v1.comm.node-a.3", bytes, Moment::default(), true, &mut told);
        let beat = told.iter().find_map(|u| if let Update::Beat(b) = u { Some(*b) } else { None });
        beat.expect("a beat").begun
    };
    let launch = Launch::numbered(Some(12));
    assert_eq!(begun(&bytes), Some(Begun { issued_ns: 69_000_000_000, host_ns: 69_000_000_000, launch }));
    assert_eq!(begun(&golden("envelope-1.bin", &whole().encode_to_vec())), None);
}

#[test]
fn mixes_of_transfers_and_collectives_of_version_1_mean_what_they_meant() {
    let first = m::OperationKey { comm: 0xc0ffee, track: 1, order: 40, ..m::OperationKey::default() };
    let mix = m::CallMix { first: Some(first), before: vec![4, 0, 4], since: 2 };
    let mut with = whole();
    with.sequence += 1;
    with.calls = vec![m::Calls { segment: 11, left: None, usual_ns: None, mixes: vec![mix] }];
    let bytes = golden("envelope-1-mixes.bin", &with.encode_to_vec());
    assert_eq!(Envelope::decode(bytes.as_slice()).expect("a message"), with);
    let mut reader = Reader::new(std::time::Duration::from_secs(3));
    let mut told = Vec::new();
    reader.read("ringwatch.v1.comm.node-a.3", &bytes, Moment::default(), true, &mut told);
    let state = told.iter().find_map(|u| match u {
        Update::Calls(state) => Some(state.as_ref()),
        _ => None,
    });
    let mix = &state.expect("the state of its calls").mixes[0];
    assert_eq!(
        (mix.comm.nccl_hash(), mix.first, mix.before.as_slice(), mix.since),
        (0xc0ffee, 40, [4, 0, 4].as_slice(), 2)
    );
}

/// Writes or reads a golden message with these marks of transfers' ends, and checks that it still means the same.
fn check_ends(name: &str, (sent_may_run, received_may_run, sent_is_newest): (bool, bool, bool)) {
    let mut with = whole();
    with.sequence += 1;
    for p in &mut with.pairs {
        (p.sent_may_run, p.received_may_run, p.sent_is_newest) =
            (sent_may_run, received_may_run, sent_is_newest);
    }
    let bytes = golden(name, &with.encode_to_vec());
    assert_eq!(Envelope::decode(bytes.as_slice()).expect("a message"), with);
    let mut reader = Reader::new(std::time::Duration::from_secs(3));
    let mut told = Vec::new();
    reader.read("ringwatch.v1.comm.node-a.3", &bytes, Moment::default(), true, &mut told);
    let pairs = told.iter().filter_map(|u| match u {
        Update::Pair(p) => Some((p.sent_may_run, p.received_may_run, p.sent_is_newest)),
        _ => None,
    });
    let pairs: Vec<_> = pairs.collect();
    let expected = (sent_may_run, received_may_run, sent_is_newest);
    assert!(!pairs.is_empty() && pairs.iter().all(|p| *p == expected), "{pairs:?}");
}

#[test]
fn ends_of_version_1_that_may_still_run_mean_what_they_meant() {
    check_ends("envelope-1-ends.bin", (true, false, false));
}

#[test]
fn newest_sends_of_version_1_mean_what_they_meant() {
    check_ends("envelope-1-newest.bin", (false, false, true));
}

#[test]
fn sketches_of_version_1_mean_what_they_meant_and_those_of_before_count_for_nothing() {
    let mut with = whole();
    with.sequence += 1;
    with.sketches[0] = m::Sketch {
        rank: 1,
        ranks: 1,
        from_s: 68,
        seconds: 2,
        whole: true,
        by_events: 3,
        ..with.sketches[0].clone()
    };
    let bytes = golden("envelope-1-sketch.bin", &with.encode_to_vec());
    assert_eq!(Envelope::decode(bytes.as_slice()).expect("a message"), with);
    let sketches = |bytes: &[u8]| {
        let mut reader = Reader::new(std::time::Duration::from_secs(3));
        let mut told = Vec::new();
        reader.read("ringwatch.v1.comm.node-a.3", bytes, Moment::default(), true, &mut told);
        assert_eq!(reader.refused().len(), 0, "{:?}", reader.refused());
        told.retain(|u| matches!(u, Update::Sketch(_)));
        told
    };
    insta::assert_snapshot!("envelope_1_sketch", format!("{:#?}", sketches(&bytes)));
    let before = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/bus/envelope-1.bin");
    assert_eq!(sketches(&std::fs::read(before).expect("it stays")), []);
}

#[test]
fn a_wish_of_version_1_means_what_it_meant() {
    let wish = Wish {
        version: 1,
        operations: vec![m::OperationKey { comm: 7, track: 1, from: 0, to: 0, order: 9, owner: None }],
        stacks: vec![11],
        burst: Some(m::Burst { comm: 7, seconds: 10, owner: None }),
        all: true,
    };
    let bytes = golden("wish-1.bin", &wish.encode_to_vec());
    assert_eq!(Wish::decode(bytes.as_slice()).expect("a message"), wish);
}

#[test]
fn what_is_not_known_yet_is_skipped() {
    // A field of a later version: tag 99, with text.
    let mut bytes = whole().encode_to_vec();
    bytes.extend([0x9a, 0x06, 3, b'n', b'e', b'w']);
    assert_eq!(Envelope::decode(bytes.as_slice()).expect("a message"), whole());
}

#[test]
fn work_of_version_1_means_what_it_meant() {
    let second = |second, took_ns| m::WorkSecond {
        second,
        took_ns,
        usual_ns: 2.0e8,
        error_ns: 1.0e6,
        step_ns: took_ns + 1.0e8,
        usual_step_ns: 3.0e8,
    };
    let operation =
        Some(m::OperationKey { comm: 0xc0ffee, track: 1, from: 0, to: 0, order: 41, owner: None });
    let long = m::Call { operation, func: 1, issued_ns: 69_000_000_000 };
    let seconds = vec![second(68, 2.5e8), second(69, f32::NAN), second(70, -1.0), second(71, 3.0e8)];
    let mut with = whole();
    with.sequence += 3;
    with.work = vec![m::Work { segment: 11, seconds, long: Some(long) }];
    let bytes = golden("envelope-1-work.bin", &with.encode_to_vec());
    let mut reader = Reader::new(std::time::Duration::from_secs(3));
    let mut told = Vec::new();
    reader.read("ringwatch.v1.comm.node-a.3", &bytes, Moment::default(), true, &mut told);
    assert_eq!(reader.refused().len(), 0, "{:?}", reader.refused());
    let work =
        told.iter().find_map(|u| if let Update::Work(w) = u { Some(w) } else { None }).expect("it is told");
    let seconds: Vec<_> = work.seconds.iter().map(|s| (s.second, s.took_ns, s.usual_ns)).collect();
    assert_eq!(seconds, [(68, 2.5e8, 2.0e8), (71, 3.0e8, 2.0e8)], "times that cannot be are left out");
    let long = work.long.expect("it is told");
    assert_eq!((long.order, long.issued_ns, long.kind.track), (41, 69_000_000_000, Track::Collective));
}
