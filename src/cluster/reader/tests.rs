use super::*;
use crate::join::Join;

const S: u64 = 1_000_000_000;

fn at(seconds: u64) -> Moment {
    Moment { mono_ns: seconds * S, unix_ns: seconds * S }
}

fn process(segment: u64) -> m::Process {
    m::Process { segment, alive: true, created_ns: S, created_unix_ns: S, ..m::Process::default() }
}

fn member(segment: u64, rank: u32) -> m::Member {
    m::Member { segment, comm: 7, rank, ranks: Some(2), ..m::Member::default() }
}

fn envelope(node: &str, sequence: u64) -> m::Envelope {
    m::Envelope {
        version: m::VERSION,
        node: node.to_owned(),
        run: 5,
        sequence,
        sent_ns: S,
        sent_unix_ns: S,
        ..m::Envelope::default()
    }
}

fn hello(node: &str, segment: u64, rank: u32) -> m::Envelope {
    let processes = vec![process(segment)];
    m::Envelope { processes, members: vec![member(segment, rank)], ..envelope(node, 1) }
}

fn refused(r: &Reader) -> Vec<(Refusal, u64)> {
    r.refused().iter().map(|(k, v)| (*k, *v)).collect()
}

fn read(r: &mut Reader, on: &str, e: &m::Envelope) -> Vec<Update> {
    let mut out = Vec::new();
    r.read(on, &e.encode_to_vec(), at(2), false, &mut out);
    out
}

const A: &str = "ringwatch.v1.comm.a.3";
const NODE_A: &str = "ringwatch.v1.node.a";

#[test]
fn garbage_and_what_came_before_are_refused_and_counted() {
    let mut r = Reader::new(Duration::from_secs(3));
    let mut out = Vec::new();
    r.read(A, b"\xff\xffgarbage", at(1), false, &mut out);
    r.read("ringwatch.v1.comm", &envelope("a", 1).encode_to_vec(), at(1), false, &mut out);
    r.read(A, &m::Envelope { version: 2, ..envelope("a", 1) }.encode_to_vec(), at(1), false, &mut out);
    assert_eq!(out, []);
    let counted = [(Refusal::Subject, 1), (Refusal::Garbage, 1), (Refusal::Version, 1)];
    assert_eq!(refused(&r), counted);
    let told = read(&mut r, A, &hello("a", 1, 0));
    assert!(matches!(told[..], [Update::Clock { .. }, Update::Segment(_), Update::Comm(_)]), "{told:?}");
    assert_eq!(read(&mut r, A, &hello("a", 1, 0)), [], "the same message again");
    let earlier = m::Envelope { run: 4, sequence: 9, ..hello("a", 1, 0) };
    assert_eq!(read(&mut r, A, &earlier), [], "an earlier run's");
    assert_eq!(r.refused()[&Refusal::Replayed], 2);
    read(&mut r, A, &envelope("a", 4));
    assert_eq!(r.nodes()["a"].missed, 2, "numbers 2 and 3 never came");
    // An agent that was started anew counts from 1.
    read(&mut r, A, &m::Envelope { run: 6, ..envelope("a", 1) });
    assert_eq!((r.nodes()["a"].missed, r.refused()[&Refusal::Replayed]), (2, 2));
}

#[test]
fn nobody_speaks_for_another_node_its_processes_or_its_ranks() {
    let mut r = Reader::new(Duration::from_secs(3));
    assert_eq!(read(&mut r, A, &hello("b", 1, 0)), [], "b's words on a's subject");
    assert_eq!(refused(&r), [(Refusal::Node, 1)]);
    let a = read(&mut r, A, &hello("a", 1, 0));
    // Another node may have a process of the same number; it is another process.
    let b = read(&mut r, "ringwatch.v1.comm.b.3", &hello("b", 1, 1));
    let id = |u: &[Update]| {
        u.iter().find_map(|u| match u {
            Update::Segment(s) => Some(s.id),
            _ => None,
        })
    };
    assert_ne!(id(&a), id(&b));
    // But a process that nobody has told of has no rank, and a rank that is a's is in dispute from then on.
    let mut e = m::Envelope { members: vec![member(1, 0), member(99, 1)], ..envelope("b", 2) };
    e.beats = vec![
        m::Beat { segment: 1, comm: 7, rank: 0, issued: 1000, ..m::Beat::default() },
        m::Beat { segment: 1, comm: 7, rank: 1, issued: 10, ..m::Beat::default() },
    ];
    let told = read(&mut r, "ringwatch.v1.comm.b.3", &e);
    assert!(matches!(told[..], [Update::Disputed { .. }, Update::Beat(b)] if b.rank == Rank(1)), "{told:?}");
    assert_eq!((r.refused()[&Refusal::Rank], r.refused()[&Refusal::Process]), (2, 1));
}

#[test]
fn texts_of_others_cannot_steer_a_terminal_or_fill_the_memory() {
    let mut r = Reader::new(Duration::from_secs(3));
    let mut e = hello("a", 1, 0);
    e.processes[0].program = format!("evil\u{1b}[2J{}", "x".repeat(100_000));
    let told = read(&mut r, A, &e);
    let program = told.iter().find_map(|u| match u {
        Update::Segment(s) => Some(s.program.clone()),
        _ => None,
    });
    let program = program.expect("a process");
    assert!(program.starts_with("evil[2Jxxx") && program.len() <= 256, "{}", program.len());
}

#[test]
fn who_says_nothing_is_silent_until_heard_again() {
    let mut r = Reader::new(Duration::from_secs(3));
    read(&mut r, A, &hello("a", 1, 0));
    let mut out = Vec::new();
    r.look(2 * S, &mut out);
    r.look(4 * S, &mut out);
    assert_eq!(out, []);
    r.look(5 * S + S / 2, &mut out);
    assert!(matches!(out[..], [Update::Silent { since_ns: Some(since), .. }] if since == 2 * S), "{out:?}");
    let told = read(&mut r, A, &envelope("a", 2));
    assert!(matches!(told[..], [Update::Silent { since_ns: None, .. }]), "{told:?}");
}

#[test]
fn the_quickest_message_says_what_clocks_differ_by() {
    let mut q = Quickest::default();
    let sent =
        |mono: u64| m::Envelope { sent_ns: mono, sent_unix_ns: mono + 2 * S, ..m::Envelope::default() };
    let now = |mono: u64| Moment { mono_ns: mono, unix_ns: mono };
    // Ten seconds apart, the wall clock two seconds and more ahead; the way takes from 1 to 5 ms.
    assert_eq!(q.take(&sent(S), now(11 * S + 5_000_000)), Some((10_005_000_000, -8_005_000_000)));
    assert_eq!(q.take(&sent(2 * S), now(12 * S + 1_000_000)), Some((10_001_000_000, -8_001_000_000)));
    assert_eq!(q.take(&sent(3 * S), now(13 * S + 3_000_000)), None, "a slower one says nothing new");
}

fn say(r: &mut Reader, e: &m::Envelope, on: &str, now: Moment, recorded: bool) -> Vec<Update> {
    let mut out = Vec::new();
    r.read(on, &e.encode_to_vec(), now, recorded, &mut out);
    out
}

fn silences(out: &[Update]) -> Vec<Option<u64>> {
    let since = |u: &Update| match u {
        Update::Silent { since_ns, .. } => Some(*since_ns),
        _ => None,
    };
    out.iter().filter_map(since).collect()
}

fn gone(out: &[Update]) -> usize {
    let is_gone =
        |u: &&Update| matches!(u, Update::Segment(s) if !matches!(s.liveness, crate::model::Liveness::Alive));
    out.iter().filter(is_gone).count()
}

#[test]
fn who_is_heard_from_the_recorder_is_not_silent() {
    let mut r = Reader::new(Duration::from_secs(3));
    // A host that has been up for long.
    let now = at(100_000);
    let e = m::Envelope { processes: vec![process(1)], ..envelope("a", 1) };
    assert_eq!(silences(&say(&mut r, &e, NODE_A, now, true)), []);
    let mut out = Vec::new();
    r.look(now.mono_ns + S, &mut out);
    assert_eq!((silences(&out), r.nodes().len()), (vec![], 1), "{out:?}");
    r.look(now.mono_ns + 2 * S, &mut out);
    r.look(now.mono_ns + 4 * S, &mut out);
    assert_eq!(silences(&out), [Some(now.mono_ns)], "it has said nothing since");
}

#[test]
fn a_node_is_followed_however_many_jobs_it_has_had() {
    let mut r = Reader::new(Duration::from_secs(3));
    let mut sequence = 0;
    for job in 0..3 * PROCESSES as u64 {
        for alive in [true, false] {
            sequence += 1;
            let p = m::Process { alive, ..process(job) };
            let e = m::Envelope { processes: vec![p], ..envelope("a", sequence) };
            say(&mut r, &e, NODE_A, at(1), false);
            let finalized_ns = (!alive).then_some(S);
            let c = m::Member { comm: job, finalized_ns, ..member(job, 0) };
            let e = m::Envelope { members: vec![c], ..envelope("a", sequence) };
            let out = say(&mut r, &e, A, at(1), false);
            assert!(matches!(out[..], [Update::Comm(_)]), "{job}: {out:?} {:?}", r.refused());
        }
    }
    assert_eq!(r.refused().len(), 0);
    assert!(
        r.ranks.len() <= ENDED + PROCESSES && r.of.len() <= PROCESSES,
        "{} {}",
        r.ranks.len(),
        r.of.len()
    );
}

#[test]
fn what_one_node_says_moves_nobody_elses_partition() {
    let mut r = Reader::new(Duration::from_secs(3));
    let on = |node: &str, part: u32| format!("ringwatch.v1.part.{part}.comm.{node}.3");
    let comm = (0..).map(CommId::unowned).find(|c| subject::bucket(*c) == 3).unwrap();
    for node in ["a", "b", "c"] {
        say(&mut r, &envelope(node, 1), &on(node, 5), at(1), false);
    }
    for n in 2..50 {
        say(&mut r, &envelope("c", n), &on("c", 77 + n as u32), at(1), false);
    }
    assert_eq!(r.partition(comm), Some(5));
    // The servers' mapping was changed: it holds when most have come by it.
    for node in ["a", "b"] {
        say(&mut r, &envelope(node, 2), &on(node, 6), at(1), false);
    }
    assert_eq!(r.partition(comm), Some(6));
    assert!(r.votes[3].len() <= 3, "{:?}", r.votes[3]);
}

#[test]
fn what_a_new_run_does_not_tell_of_is_gone() {
    let mut r = Reader::new(Duration::from_secs(3));
    let e = m::Envelope { processes: vec![process(1), process(2)], ..envelope("a", 1) };
    say(&mut r, &e, NODE_A, at(1), false);
    let e = m::Envelope { run: 6, processes: vec![process(2)], ..envelope("a", 1) };
    say(&mut r, &e, NODE_A, at(2), false);
    let mut out = Vec::new();
    for second in 3..20 {
        let e = m::Envelope { run: 6, ..envelope("a", second) };
        say(&mut r, &e, NODE_A, at(second), false);
        r.look(second * S, &mut out);
    }
    assert_eq!(gone(&out), 1, "{out:?}");
}

#[test]
fn an_agent_whose_wall_clock_was_set_back_is_heard_again() {
    let mut r = Reader::new(Duration::from_secs(3));
    say(&mut r, &m::Envelope { processes: vec![process(1)], ..envelope("a", 9) }, NODE_A, at(1), false);
    let back = m::Envelope { run: 4, ..envelope("a", 1) };
    say(&mut r, &back, NODE_A, at(2), false);
    assert_eq!(r.refused()[&Refusal::Replayed], 1, "two runs do not speak at once");
    let mut out = Vec::new();
    r.look(2 * S, &mut out);
    r.look(4 * S, &mut out);
    r.look(6 * S, &mut out);
    assert_eq!(silences(&out), [Some(S)]);
    assert_eq!(silences(&say(&mut r, &back, NODE_A, at(6), false)), [None]);
}

#[test]
fn one_node_is_read_so_much_a_second() {
    let mut r = Reader::new(Duration::from_secs(3));
    let text = format!("{{\"x\":{:?}}}", "y".repeat(900_000));
    for n in 1..=20 {
        let e = m::Envelope { readings: vec![text.clone().into_bytes()], ..envelope("a", n) };
        say(&mut r, &e, NODE_A, at(1), false);
    }
    // The first is of a node that is not known yet.
    assert_eq!(r.refused()[&Refusal::TooMuch], 1, "{:?}", r.refused());
}

#[test]
fn a_name_that_no_subject_holds_is_refused() {
    let mut r = Reader::new(Duration::from_secs(3));
    for name in ["a".repeat(NAME + 1), "a\u{1b}[2J".to_owned()] {
        let on = Topic::Node.of(&name);
        let out = say(&mut r, &envelope(&name, 1), &on, at(1), false);
        assert_eq!((out.len(), r.nodes().len()), (0, 0));
    }
    assert_eq!(r.refused()[&Refusal::Node], 2);
}

#[test]
fn a_node_too_many_is_refused_and_the_known_ones_are_read_on() {
    let mut r = Reader::new(Duration::from_secs(3));
    for n in 0..=NODES {
        let name = format!("n{n}");
        say(&mut r, &envelope(&name, 1), &Topic::Node.of(&name), at(1), false);
    }
    assert_eq!((r.nodes().len(), refused(&r)), (NODES, vec![(Refusal::TooMuch, 1)]));
    say(&mut r, &envelope("n0", 2), &Topic::Node.of("n0"), at(1), false);
    assert_eq!((r.nodes()["n0"].messages, refused(&r)), (2, vec![(Refusal::TooMuch, 1)]));
}

#[test]
fn a_message_of_too_many_items_is_not_read() {
    let mut r = Reader::new(Duration::from_secs(3));
    let mut bytes = envelope("a", 1).encode_to_vec();
    let whole = bytes.len();
    // An empty record each.
    bytes.extend([14 << 3 | 2, 0].repeat(ITEMS));
    for (bytes, refused) in [(&bytes[..], 1), (&bytes[..whole], 1)] {
        r.read(NODE_A, bytes, at(1), false, &mut Vec::new());
        assert_eq!(r.refused()[&Refusal::TooMuch], refused);
    }
    assert_eq!(r.nodes().len(), 1);
}

fn sketch(rank: u32) -> m::Sketch {
    m::Sketch {
        comm: 7,
        func: 5,
        size_class: 23,
        algo: 2,
        proto: 3,
        count: 10,
        timed: 9,
        bytes: Some(10 << 22),
        busy_ns: 900_000,
        buckets: vec![130, 131],
        counts: vec![4, 5],
        rank,
        ranks: 1,
        from_s: 1,
        seconds: 1,
        whole: false,
        by_events: 2,
        segment: None,
    }
}

#[test]
fn sketches_are_of_a_nodes_own_ranks() {
    let mut r = Reader::new(Duration::from_secs(3));
    read(&mut r, A, &hello("a", 1, 0));
    read(&mut r, "ringwatch.v1.comm.b.3", &hello("b", 1, 1));
    let sketches = vec![sketch(0), sketch(1), sketch(9), m::Sketch { comm: 8, ..sketch(0) }];
    let told = read(&mut r, A, &m::Envelope { sketches, ..envelope("a", 2) });
    let [Update::Sketch(s)] = &told[..] else { panic!("{told:?}") };
    assert_eq!((s.rank, s.count, s.size_class, s.from_ns, s.seconds), (Rank(0), 10, Some(22), S, 1));
    assert_eq!(s.times, [(130, 4), (131, 5)]);
    assert_eq!(refused(&r), [(Refusal::Rank, 3)], "b's rank, nobody's, and another communicator");
    // An agent of before says neither whose nor when.
    let before = m::Sketch { seconds: 0, rank: 0, ..sketch(0) };
    assert_eq!(read(&mut r, A, &m::Envelope { sketches: vec![before], ..envelope("a", 3) }), []);
    assert_eq!(refused(&r), [(Refusal::Rank, 3)]);
}

#[test]
fn sketches_that_cannot_be_are_refused_and_counted() {
    let mut r = Reader::new(Duration::from_secs(3));
    read(&mut r, A, &hello("a", 1, 0));
    let with = |change: fn(&mut m::Sketch)| {
        let mut s = sketch(0);
        change(&mut s);
        s
    };
    let sketches = vec![
        with(|s| s.buckets = vec![131, 130]),
        with(|s| s.buckets = vec![130, 130]),
        with(|s| s.buckets = vec![130, 512]),
        with(|s| s.buckets = vec![130, u32::MAX]),
        with(|s| s.counts = vec![4, 5, 6]),
        with(|s| (s.buckets, s.counts) = ((0..100_000).collect(), vec![1; 100_000])),
        with(|s| s.counts = vec![u64::MAX, 10]),
        with(|s| s.counts = vec![9, 0]),
        with(|s| s.counts = vec![4, 4]),
        with(|s| s.count = 8),
        with(|s| s.count = 0),
        with(|s| s.count = u64::MAX),
        with(|s| s.by_events = 10),
        with(|s| s.ranks = 0),
        with(|s| s.seconds = u32::MAX),
        with(|s| s.size_class = 65),
    ];
    let bad = sketches.len() as u64;
    let told = read(&mut r, A, &m::Envelope { sketches, ..envelope("a", 2) });
    assert_eq!(told, []);
    assert_eq!(refused(&r), [(Refusal::Garbage, bad)]);
    // What is odd and can be is taken: the join adds without overflow.
    let odd =
        with(|s| (s.busy_ns, s.bytes, s.from_s, s.ranks) = (u64::MAX, Some(u64::MAX), u64::MAX, u32::MAX));
    let mut join = Join::new();
    for sequence in [3, 4] {
        let e = m::Envelope { sketches: vec![odd.clone()], ..envelope("a", sequence) };
        read(&mut r, A, &e).into_iter().for_each(|u| join.feed(u));
    }
    assert_eq!(refused(&r), [(Refusal::Garbage, bad)]);
}

#[test]
fn a_rank_that_two_nodes_claim_is_nobodys_until_one_gives_it_up() {
    let mut r = Reader::new(Duration::from_secs(3));
    read(&mut r, A, &hello("a", 1, 0));
    let beat = |segment| m::Beat { segment, comm: 7, rank: 0, issued: 9, ..m::Beat::default() };
    let disputed = |out: &[Update]| {
        out.iter().find_map(|u| match u {
            Update::Disputed { comm, rank: Rank(0), nodes } if comm.nccl_hash() == 7 => Some(nodes.clone()),
            _ => None,
        })
    };
    // Whoever came first is not believed because of that.
    let out = read(&mut r, "ringwatch.v1.comm.b.3", &hello("b", 2, 0));
    assert_eq!(disputed(&out), Some(vec!["a".to_owned(), "b".to_owned()]), "{out:?}");
    for (node, on, segment) in [("a", A, 1), ("b", "ringwatch.v1.comm.b.3", 2)] {
        let e = m::Envelope { beats: vec![beat(segment)], ..envelope(node, 2) };
        assert!(!read(&mut r, on, &e).iter().any(|u| matches!(u, Update::Beat(_))), "{node}");
    }
    let again = m::Envelope { members: vec![member(2, 0)], ..envelope("b", 3) };
    assert_eq!(disputed(&read(&mut r, "ringwatch.v1.comm.b.3", &again)), None, "it is reported once");
    // The process of one of them ends, and the other one is asked to tell all.
    let ended = m::Process { alive: false, gone_ns: Some(S), ..process(1) };
    let out = read(&mut r, A, &m::Envelope { processes: vec![ended], ..envelope("a", 3) });
    assert_eq!(disputed(&out), Some(Vec::new()), "{out:?}");
    assert!(r.take_gaps().contains("b"));
    let e = m::Envelope { members: vec![member(2, 0)], beats: vec![beat(2)], ..envelope("b", 4) };
    assert!(read(&mut r, "ringwatch.v1.comm.b.3", &e).iter().any(|u| matches!(u, Update::Beat(_))));
}

#[test]
fn a_node_that_is_renamed_claims_its_ranks_under_one_name_in_the_end() {
    let mut r = Reader::new(Duration::from_secs(3));
    let (mut join, b) = (Join::new(), "ringwatch.v1.comm.b.3");
    let feed = |join: &mut Join, out: Vec<Update>| out.into_iter().for_each(|u| join.feed(u));
    feed(&mut join, read(&mut r, A, &hello("a", 1, 0)));
    feed(&mut join, read(&mut r, b, &hello("b", 2, 0)));
    join.tick(S);
    let disputed = |join: &Join| join.disputes().map(|(_, d)| d.len()).sum::<usize>();
    let held = |join: &Join| join.communicators().map(|c| c.members().len()).sum::<usize>();
    assert_eq!((disputed(&join), held(&join)), (1, 0), "no verdict rests on it");
    let mut given_up_s = None;
    for second in 1..100 {
        let mut out = Vec::new();
        let alive = m::Envelope { processes: vec![process(2)], ..envelope("b", second + 1) };
        r.read(b, &alive.encode_to_vec(), at(second), false, &mut out);
        r.look(second * S, &mut out);
        feed(&mut join, out);
        if disputed(&join) == 0 && given_up_s.is_none() {
            given_up_s = Some(second);
        }
    }
    assert!(given_up_s.is_some_and(|s| (60..70).contains(&s)), "{given_up_s:?}");
    feed(&mut join, read(&mut r, b, &m::Envelope { members: vec![member(2, 0)], ..envelope("b", 200) }));
    join.tick(100 * S);
    assert_eq!((disputed(&join), held(&join)), (0, 1));
}

#[test]
fn ranks_without_number_may_be_in_dispute() {
    const RANKS: u32 = 3000;
    let (mut r, mut join) = (Reader::new(Duration::from_secs(3)), Join::new());
    for (node, on, segment) in [("a", A, 1), ("b", "ringwatch.v1.comm.b.3", 2)] {
        let of = |rank| m::Member { ranks: Some(RANKS), ..member(segment, rank) };
        let members = (0..RANKS).map(of).collect();
        let e = m::Envelope { members, ..hello(node, segment, 0) };
        read(&mut r, on, &e).into_iter().for_each(|u| join.feed(u));
    }
    join.tick(S);
    let disputed: usize = join.disputes().map(|(_, d)| d.len()).sum();
    assert_eq!(disputed, RANKS as usize, "the first claimer keeps none");
    assert_eq!(join.communicators().map(|c| c.members().len()).sum::<usize>(), 0);
}

#[test]
fn what_is_kept_of_a_nodes_processes_is_bounded_in_bytes() {
    let mut r = Reader::new(Duration::from_secs(3));
    let long = |n: u64| m::Process {
        program: "p".repeat(500_000),
        labels: (0..1000).map(|l| (format!("{l:x<300}"), "v".repeat(100))).collect(),
        ..process(n)
    };
    for n in 1..=400 {
        let e = m::Envelope { processes: vec![long(n)], ..envelope("a", n) };
        // One a second: more of a node is not read.
        say(&mut r, &e, NODE_A, at(n), false);
    }
    let node = &r.nodes()["a"];
    assert!(node.process_bytes <= PROCESS_BYTES && node.processes.len() > 50, "{}", node.processes.len());
    let texts = node.processes.values().map(|t| t.record.program.len()).max();
    assert!(texts.is_some_and(|longest| longest <= 256));
    assert!(r.refused()[&Refusal::TooMuch] > 0);
    let e = envelope(&"n".repeat(300), 1);
    say(&mut r, &e, &format!("ringwatch.v1.node.{}", "n".repeat(300)), at(1), false);
    assert_eq!(r.nodes().len(), 1, "nor is a node whose name no host has");
}
