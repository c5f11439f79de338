//! The screens as text, from hand-made snapshots, at the size of a small terminal and of a wall.

use crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::style::{Color, Modifier};
use ringwatch::model::{
    Algo, At, ClassRow, CommId, CommRow, Coverage, Evidence, Finding, Fleet, FlightRow, Func, JobRow,
    JobSums, Kind, Lane, LossRow, NodeCell, NodeState, OpState, OperationRef, Proto, Rank, RankCell, RankRow,
    Rest, SegmentRow, Snapshot, Totals, Track, Unread, UnreadReason,
};
use ringwatch::report::Pages;
use ringwatch::view::{self, App, Msg, Screen, Theme};

const WORLD: CommId = CommId::unowned(0x8f3a_17c2_0d5e_91b4);
const PAIR: CommId = CommId::unowned(0x00c4_55aa_0912_77fe);
const NOW: u64 = 5_000_000_000_000;
const SIZES: [(u16, u16); 2] = [(80, 24), (200, 50)];

fn class(comm: CommId, func: Func, how: (Algo, Proto), class: u8, p50_us: f64, share: f64) -> ClassRow {
    let wave = |i: u32| (i % 11 != 4).then(|| p50_us * 1e3 * (1.0 + f64::from(i % 7) / 10.0));
    ClassRow {
        comm,
        func,
        algo: Some(how.0),
        proto: Some(how.1),
        size_class: Some(class),
        count: (share * 40_000.0) as u64,
        sampled: false,
        timed: (share * 39_000.0) as u64,
        by_events: if func == Func::Broadcast { (share * 39_000.0) as u64 } else { 0 },
        bytes: Some(((share * 40_000.0) as u64) << class),
        ops_per_s: Some(share * 400.0),
        bytes_per_s: Some(share * 400.0 * (1_u64 << class) as f64),
        p50_ns: Some(p50_us * 1e3),
        p99_ns: Some(p50_us * 1.4e3),
        busbw: Some((1_u64 << class) as f64 * 1.5 / (p50_us * 1e-6)),
        share: Some(share),
        spark: (0..60).map(wave).collect(),
    }
}

fn rank(comm: CommId, n: u32, state: Option<OpState>, waits_for: &[u32]) -> RankRow {
    RankRow {
        comm,
        rank: Rank(n),
        pid: 41_200 + n,
        host: "gpu-node-17".into(),
        job_rank: Some(n),
        alive: true,
        gpu: Some(format!("0000:{:02x}:00.0", 0x1b + 0x20 * (n % 7))),
        issued: 4712,
        finished: 4711,
        state,
        waits_for: waits_for.iter().map(|&r| Rank(r)).collect(),
        waiting_ns: Some(1_830_000_000 + u64::from(n) * 7_100_000),
        late: u64::from(n) * 3,
        worst_late_ns: (n > 0).then_some(17_400_000),
        late_cost_ns: if n > 0 { 52_000_000 } else { 0 },
    }
}

fn comm(id: CommId, name: &str, ranks: u32) -> CommRow {
    CommRow {
        id,
        name: Some(name.into()),
        ranks: Some(ranks),
        seen: ranks as usize,
        nodes: Some(1),
        issued: 4712,
        finished: 4711,
        in_flight: 1,
        ops_per_s: Some(412.6),
        coverage: Coverage { operations: 18_848, timed: 589, impossible: 0 },
        closed: false,
    }
}

fn flight(states: &[OpState], age_ns: u64) -> FlightRow {
    let cell = |(i, &state): (usize, &OpState)| RankCell { rank: Rank(i as u32), state };
    FlightRow {
        comm: WORLD,
        lane: Lane::Collective,
        order: 4711,
        func: Func::AllReduce,
        bytes: Some(16_777_216),
        algo: Some(Algo::Ring),
        proto: Some(Proto::Simple),
        age_ns,
        ranks: states.iter().enumerate().map(cell).collect(),
    }
}

/// Four ranks that do well.
fn healthy() -> Snapshot {
    use {Algo::*, Proto::*};
    let segment = |n: u32| SegmentRow {
        pid: 41_200 + n,
        host: "gpu-node-17".into(),
        program: "python3".into(),
        job_rank: Some(n),
        alive: true,
        nccl: Some("2.28.9".into()),
        abi: Some(5),
        clock_error_ns: Some(1_900),
        lost: 0,
    };
    let pair = CommRow {
        name: None,
        in_flight: 0,
        ops_per_s: None,
        nodes: None,
        coverage: Coverage::default(),
        closed: true,
        ..comm(PAIR, "", 2)
    };
    let untimed = ClassRow {
        busbw: None,
        p50_ns: None,
        p99_ns: None,
        share: None,
        ops_per_s: None,
        bytes_per_s: None,
        spark: vec![None; 60],
        ..class(PAIR, Func::AlltoAll, (Ring, Simple), 16, 31.0, 0.004)
    };
    let states = [OpState::Started, OpState::Issued, OpState::Started, OpState::Finished];
    Snapshot {
        at_ns: NOW,
        wall: Some("14:03:27".into()),
        source: "segments in /dev/shm/ringwatch-1000".into(),
        jobs: vec![JobRow {
            unknown: 0,
            name: Some("llama-pretrain".into()),
            alive: 4,
            gone: 0,
            size: Some(4),
            comms: 2,
            nccl: Some("2.28.9".into()),
            ops_per_s: Some(1650.4),
            comm_share: Some(0.342),
            sums: JobSums {
                comms: vec![WORLD, PAIR],
                hosts: vec!["gpu-node-17".into()],
                seen_ns: Some(754_000_000_000),
                comm_share: Some(0.327),
                lost: vec![("segment: ring overwritten".into(), 12)],
            },
        }],
        comms: vec![comm(WORLD, "default_pg", 4), pair],
        in_flight: vec![flight(&states, 61_300)],
        classes: vec![
            class(WORLD, Func::AllReduce, (Ring, Simple), 24, 141.7, 0.214),
            class(WORLD, Func::ReduceScatter, (Nvls, Simple), 26, 402.3, 0.081),
            class(WORLD, Func::AllGather, (Ring, Ll128), 20, 23.4, 0.031),
            class(WORLD, Func::Broadcast, (Tree, Ll), 13, 8.3, 0.012),
            untimed,
        ],
        ranks: (0..4)
            .map(|n| rank(WORLD, n, Some(OpState::Started), &[]))
            .chain((0..2).map(|n| rank(PAIR, n, None, &[])))
            .collect(),
        findings: Vec::new(),
        more_findings: 0,
        segments: (0..4).map(segment).collect(),
        losses: Vec::new(),
        steps: None,
        unsearched: false,
        unread: Vec::new(),
        fleet: None,
    }
}

fn evidence(text: &str, number: Option<(f64, &'static str)>) -> Evidence {
    Evidence { text: text.into(), value: number.map(|n| n.0), unit: number.map(|n| n.1.into()) }
}

/// Rank 3 of 4 has not issued an all-reduce the others wait in; records were lost.
fn missing_rank() -> Snapshot {
    use OpState::{NotIssued, Started};
    let mut s = healthy();
    s.in_flight = vec![flight(&[Started, Started, Started, NotIssued], 12_400_000_000)];
    for r in s.ranks.iter_mut().filter(|r| r.comm == WORLD) {
        let culprit = r.rank == Rank(3);
        r.state = Some(if culprit { NotIssued } else { Started });
        r.waits_for = if culprit { vec![] } else { vec![Rank(3)] };
        r.issued -= u64::from(culprit);
    }
    let missing = Finding {
        ranks: vec![Rank(3)],
        operation: OperationRef {
            order: 4711,
            func: "AllReduce".into(),
            bytes: Some(16_777_216),
            dtype: Some("ncclFloat32".into()),
            algo: Some("RING".into()),
            proto: Some("SIMPLE".into()),
            redop: None,
            track: Track::Collective,
        },
        since: Some("2026-03-02T14:03:14.612Z".into()),
        evidence: vec![
            evidence(
                "ranks 0-2 have been inside AllReduce #4711 for 12.4 s; rank 3 has not issued it",
                Some((12.4, "s")),
            ),
            evidence("rank 3 has issued 4711 collectives, the others 4712", Some((4711.0, "count"))),
            evidence("AllReduces of this size take 141.7 us at the median", Some((0.000_141_7, "s"))),
            evidence("rank 3 is alive: pid 41203 on gpu-node-17", None),
        ],
        advice: "look at what pid 41203 on gpu-node-17 does, with `py-spy dump --pid 41203` for example: \
                 it has left the common path before this AllReduce"
            .into(),
        since_ns: NOW - 12_400_000_000,
        ..Finding::new(Kind::MissingRank, WORLD, Vec::new(), OperationRef::named("", Track::Collective, 0))
    };
    let op = OperationRef::named("AllGather", Track::Collective, 208);
    let straggler = Finding {
        kind: Kind::Straggler,
        ranks: vec![Rank(1), Rank(2)],
        operation: op,
        since: None,
        evidence: vec![evidence("ranks 1 and 2 arrived 0.300 s after the others", Some((0.3, "s")))],
        advice: "compare the input pipelines of the ranks".into(),
        since_ns: NOW - 723_000_000_000,
        open: false,
        ..missing.clone()
    };
    s.findings = vec![missing, straggler];
    s.losses = vec![
        LossRow { pid: 41_201, reason: "segment: ring overwritten".into(), count: 1204 },
        LossRow { pid: 41_203, reason: "segment: ring overwritten".into(), count: 31 },
        LossRow { pid: 41_203, reason: "stamp: implausible".into(), count: 7 },
    ];
    s.unread = vec![Unread {
        path: "/dev/shm/ringwatch-1000/41207-881-9f3c.seg".into(),
        reason: UnreadReason::FormatVersion,
        detail: "format version 3; this release reads 1 and 2".into(),
        owner: Some(1000),
    }];
    s.segments[1].lost = 1204;
    s.segments[3].lost = 38;
    s.segments[3].clock_error_ns = None;
    s
}

/// A cluster of so many nodes, on one of which a rank holds up all others.
fn cluster(nodes: usize) -> Snapshot {
    let cell = |n: usize| {
        let state = match n {
            17 => NodeState::Blamed,
            30 => NodeState::Silent,
            31 => NodeState::Named,
            n if n % 64 == 40 => NodeState::Idle,
            n if n % 64 == 41 => NodeState::Ended,
            n if n < 40 => NodeState::Held,
            _ => NodeState::Well,
        };
        let findings = usize::from(matches!(state, NodeState::Blamed | NodeState::Named));
        let silent = state == NodeState::Silent;
        let processes = if matches!(state, NodeState::Idle | NodeState::Ended) { 0 } else { 8 };
        NodeCell { name: format!("gpu-node-{n:04}"), processes, state, findings, silent }
    };
    let mut s = missing_rank();
    let job =
        |name: &str, alive| JobRow { name: Some(name.into()), alive, comm_share: None, ..s.jobs[0].clone() };
    s.jobs = vec![job("llama-pretrain", 320), job("mixtral-tune", nodes * 8 - 320)];
    s.source = "cluster nats://bus:4222: 2 analysers".into();
    (s.segments, s.losses) = (Vec::new(), Vec::new());
    let totals = Totals {
        nodes: nodes + 100,
        silent: 1,
        processes: nodes * 8 - 16,
        communicators: 142,
        findings: 2,
        ops_per_s: Some(1893.4),
        lost: 12,
        missed: 3,
        left_out: 12_345,
    };
    let rest = Rest { comms: 140, nodes: 100, ..Rest::default() };
    let nodes = (0..nodes).map(cell).collect();
    s.fleet = Some(Fleet { totals, nodes, rest, analysers: 2, ..Fleet::default() });
    s
}

/// Before any job: only the source is known.
fn nothing() -> Snapshot {
    Snapshot { source: "segments in /dev/shm/ringwatch-1000".into(), at_ns: NOW, ..Snapshot::default() }
}

fn app(snapshot: Snapshot) -> App {
    let mut app = App::new();
    app.set_snapshot(snapshot);
    app
}

fn on(mut app: App, screen: Screen) -> App {
    app.update(Msg::Show(screen));
    app
}

fn terminal(app: &App, (width, height): (u16, u16)) -> Terminal<TestBackend> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| view::draw(frame, app)).unwrap();
    terminal
}

fn shown(app: &App, size: (u16, u16)) -> String {
    terminal(app, size).backend().to_string()
}

fn press(app: &mut App, code: KeyCode) {
    chord(app, code, KeyModifiers::NONE);
}

fn chord(app: &mut App, code: KeyCode, modifiers: KeyModifiers) {
    shown(app, (80, 24)); // A frame lies between keys, and tells how far they can move.
    if let Some(msg) = view::input::message(KeyEvent::new(code, modifiers), app) {
        app.update(msg);
    }
}

fn type_in(app: &mut App, text: &str) {
    text.chars().for_each(|c| press(app, KeyCode::Char(c)));
}

#[test]
fn every_screen_at_both_sizes() {
    for (name, snapshot) in [("healthy", healthy()), ("missing_rank", missing_rank()), ("nothing", nothing())]
    {
        for screen in Screen::ALL {
            let app = on(app(snapshot.clone()), screen);
            for size in SIZES {
                let title = screen.title().to_lowercase();
                insta::assert_snapshot!(format!("{name}_{title}_{}x{}", size.0, size.1), shown(&app, size));
            }
        }
    }
}

#[test]
fn a_cluster_is_a_map_and_ways_down() {
    for nodes in [128, 4096] {
        let app = app(cluster(nodes));
        assert_eq!(app.screen(), Screen::Cluster, "whoever looks at a cluster begins with all of it");
        for size in SIZES {
            insta::assert_snapshot!(format!("cluster_{nodes}_{}x{}", size.0, size.1), shown(&app, size));
        }
    }
    for screen in Screen::ALL {
        let text = shown(&on(app(cluster(128)), screen), (80, 24));
        assert!(text.contains("0 Cluster") && text.contains("Backspace out"), "{text}");
    }
    insta::assert_snapshot!("cluster_once", view::render_text(&app(cluster(128)), 100, u16::MAX));
}

#[test]
fn enter_goes_into_what_is_selected_and_backspace_out_of_it() {
    let mut app = app(cluster(128));
    let answered = |app: &mut App| {
        let mut s = cluster(128);
        s.fleet.as_mut().unwrap().at = app.question().0.clone();
        app.set_snapshot(s);
    };
    press(&mut app, KeyCode::Down);
    press(&mut app, KeyCode::Enter);
    let job = At { job: Some("mixtral-tune".into()), ..At::default() };
    assert_eq!(app.question(), (&job, ""));
    assert!(shown(&app, (80, 24)).contains("asking"), "the answer to the new question is yet to come");
    answered(&mut app);
    insta::assert_snapshot!("cluster_job", shown(&app, (80, 24)));
    type_in(&mut app, "/0017");
    assert_eq!(app.question(), (&job, "0017"), "the words go to the analysers");
    press(&mut app, KeyCode::Enter);
    press(&mut app, KeyCode::Enter);
    let node = At { node: Some("gpu-node-0017".into()), ..job.clone() };
    assert_eq!(app.question(), (&node, ""), "they are forgotten where they led to something");
    answered(&mut app);
    assert!(!shown(&app, (80, 24)).contains("Worst nodes"));
    press(&mut app, KeyCode::Enter);
    assert_eq!((app.screen(), app.question().0.communicator), (Screen::Ranks, Some(WORLD)));
    answered(&mut app);
    press(&mut app, KeyCode::Backspace);
    assert_eq!((app.screen(), app.question().0), (Screen::Cluster, &node));
    press(&mut app, KeyCode::Backspace);
    assert_eq!(app.question().0, &job);
    for _ in 0..3 {
        press(&mut app, KeyCode::Backspace);
    }
    assert_eq!(app.question().0, &At::default());
    // One host has no cluster around it.
    let mut one = self::app(healthy());
    for code in [KeyCode::Char('0'), KeyCode::Enter, KeyCode::Backspace] {
        press(&mut one, code);
        assert_eq!((one.screen(), one.question().0), (Screen::Overview, &At::default()));
    }
}

#[test]
fn help_lies_over_the_screen() {
    let mut app = app(missing_rank());
    press(&mut app, KeyCode::Char('?'));
    assert!(shown(&app, (80, 24)).contains("Enter keeps, Esc clears"), "no line of the help is cut");
    for size in SIZES {
        insta::assert_snapshot!(format!("help_{}x{}", size.0, size.1), shown(&app, size));
    }
    press(&mut app, KeyCode::Esc);
    assert!(!app.help());
}

#[test]
fn a_filter_keeps_what_holds_all_its_words() {
    let mut app = on(app(missing_rank()), Screen::Collectives);
    type_in(&mut app, "/ALLq");
    assert!(app.editing() && !app.quit(), "letters are text while a filter is typed");
    press(&mut app, KeyCode::Backspace);
    type_in(&mut app, " ring");
    insta::assert_snapshot!("filter_typed", shown(&app, (80, 24)));
    press(&mut app, KeyCode::Enter);
    assert!(!app.editing());
    insta::assert_snapshot!("filter_kept", shown(&app, (80, 24)));
    press(&mut app, KeyCode::Char('1'));
    insta::assert_snapshot!("filter_overview", shown(&app, (80, 24)));
    press(&mut app, KeyCode::Esc);
    assert!(shown(&app, (80, 24)).contains("Collectives (5)"));
    type_in(&mut app, "/nowhere");
    for screen in Screen::ALL {
        app.update(Msg::Show(screen));
        let text = shown(&app, (80, 24));
        assert!(text.contains("match"), "{text}");
    }
    for (word, screen, kept) in [
        ("default_pg", Screen::Collectives, "Collectives (4 of 5)"),
        ("00c455aa", Screen::Collectives, "Collectives (1 of 5)"),
        ("ll128", Screen::Collectives, "Collectives (1 of 5)"),
        ("straggler", Screen::Findings, "1 of 2"),
        ("gpu-node-17 41203", Screen::Losses, "Processes (1 of 4)"),
        ("not issued", Screen::Ranks, "(1 of 4)"),
    ] {
        let mut app = on(self::app(missing_rank()), screen);
        type_in(&mut app, &format!("/{word}"));
        let text = shown(&app, (200, 50));
        assert!(text.contains(kept), "{word}: {text}");
    }
}

fn operations(app: &App) -> Vec<String> {
    let text = shown(app, (200, 50));
    let rows = text.lines().skip_while(|l| !l.contains("algo/proto")).skip(1).take(5);
    rows.map(|l| l[2..].split_whitespace().next().unwrap().to_owned()).collect()
}

#[test]
fn every_column_sorts_both_ways_and_absent_values_stay_last() {
    let mut app = on(app(healthy()), Screen::Collectives);
    let given = operations(&app);
    type_in(&mut app, "s");
    assert_eq!(operations(&app), ["AllGather", "AllReduce", "AlltoAll", "Broadcast", "ReduceScatter"]);
    insta::assert_snapshot!("sorted_by_operation", shown(&app, (80, 24)));
    type_in(&mut app, "S");
    assert_eq!(operations(&app), ["ReduceScatter", "Broadcast", "AlltoAll", "AllReduce", "AllGather"]);
    type_in(&mut app, "ssssss");
    assert!(shown(&app, (200, 50)).contains("by p50, descending"));
    assert_eq!(operations(&app), ["ReduceScatter", "AllReduce", "AllGather", "Broadcast", "AlltoAll"]);
    type_in(&mut app, "S");
    assert_eq!(operations(&app), ["Broadcast", "AllGather", "AllReduce", "ReduceScatter", "AlltoAll"]);
    type_in(&mut app, "sssss");
    assert_eq!(operations(&app), given, "after the last column comes the given order");
}

#[test]
fn a_pause_holds_snapshots_back_and_says_how_old_it_is() {
    let mut app = app(healthy());
    press(&mut app, KeyCode::Char('p'));
    assert!(app.paused());
    app.set_snapshot(Snapshot {
        at_ns: NOW + 7_000_000_000,
        wall: Some("14:03:34".into()),
        ..missing_rank()
    });
    insta::assert_snapshot!("paused", shown(&app, (80, 24)));
    press(&mut app, KeyCode::Char(' '));
    let text = shown(&app, (80, 24));
    assert!(!text.contains("PAUSED") && text.contains("14:03:34") && text.contains("missing-rank"), "{text}");
}

#[test]
fn small_frames_say_so_and_no_frame_panics() {
    for (size, says) in [((20, 5), "too small: 20x5 need"), ((1, 1), "t"), ((39, 24), "too small")] {
        let text = shown(&app(missing_rank()), size);
        assert!(text.contains(says), "{text}");
    }
    let mut app = app(cluster(4096));
    for help in [false, true] {
        for screen in Screen::OF_CLUSTER {
            app.update(Msg::Show(screen));
            if help {
                app.update(Msg::Help);
            }
            for (w, h) in (1..120).map(|n| (n, 60 - n / 2)).chain((1..60).map(|n| (40 + n % 9, n))) {
                shown(&app, (w, h));
                view::render_text(&app, w, h);
            }
        }
    }
    assert_eq!(view::render_text(&app, 0, 0), "\n");
}

#[test]
fn a_thousand_ranks_show_as_runs_and_counts() {
    let mut s = missing_rank();
    let state = |n: u32| match n {
        512 => OpState::NotIssued,
        700..=703 => OpState::InDoubt,
        _ => OpState::Started,
    };
    s.comms[0].ranks = Some(1000);
    s.in_flight = vec![flight(&(0..1000).map(state).collect::<Vec<_>>(), 33_000_000_000)];
    s.ranks =
        (0..1000).map(|n| rank(WORLD, n, Some(state(n)), if n == 512 { &[] } else { &[512] })).collect();
    let mut app = app(s.clone());
    insta::assert_snapshot!("thousand_overview", shown(&app, (80, 24)));
    app.update(Msg::Show(Screen::Ranks));
    press(&mut app, KeyCode::End);
    insta::assert_snapshot!("thousand_ranks", shown(&app, (80, 24)));
    let zigzag = |n: u32| if n.is_multiple_of(2) { OpState::Started } else { OpState::Issued };
    s.in_flight = vec![flight(&(0..1000).map(zigzag).collect::<Vec<_>>(), 1_000)];
    let text = shown(&self::app(s.clone()), (80, 24));
    assert!(text.contains("500 started, 500 issued") && text.contains('…'), "{text}");
    s.in_flight = vec![flight(&(0..64).map(zigzag).collect::<Vec<_>>(), 1_000)];
    let text = shown(&self::app(s), (200, 50));
    assert!(text.contains(&[">i>i>i>i"; 8].join(" ")), "{text}");
}

#[test]
fn sixteen_ranks_have_a_matrix_with_two_lines_of_heading() {
    let mut s = healthy();
    s.ranks = (0..16).map(|n| rank(WORLD, n, Some(OpState::Started), &[(n + 1) % 16])).collect();
    insta::assert_snapshot!("matrix_16", shown(&on(app(s), Screen::Ranks), (120, 30)));
}

#[test]
fn hostile_strings_cannot_drive_the_terminal() {
    let evil = "\u{1b}]0;owned\u{7}\u{1b}[2Jna\u{202e}me\u{0}\n\u{9b}31m\u{200b}日本".to_owned();
    let mut s = missing_rank();
    s.source.clone_from(&evil);
    s.wall = Some(evil.clone());
    s.jobs[0].name = Some(evil.clone());
    s.comms[0].name = Some(evil.repeat(50));
    s.ranks.iter_mut().for_each(|r| (r.host, r.gpu) = (evil.clone(), Some(evil.clone())));
    s.segments.iter_mut().for_each(|r| (r.host, r.program) = (evil.clone(), evil.clone()));
    for f in &mut s.findings {
        f.operation.func.clone_from(&evil);
        f.advice.clone_from(&evil);
        f.since = Some(evil.clone());
        f.evidence[0].text = evil.repeat(20);
    }
    for theme in [Theme::default(), Theme { colour: false, ascii: true }] {
        let mut app = App::with_theme(theme);
        app.set_snapshot(s.clone());
        for screen in Screen::ALL {
            app.update(Msg::Show(screen));
            let text = view::render_text(&app, 200, 100);
            assert!(!text.chars().any(|c| c != '\n' && c.is_control()), "{text:?}");
            assert!(!text.contains(['\u{202e}', '\u{200b}']) && !text.contains("owned"), "{text}");
            assert!(!theme.ascii || text.is_ascii(), "{text}");
        }
        let name = if theme.ascii { "hostile_ascii" } else { "hostile" };
        insta::assert_snapshot!(name, shown(&on(app, Screen::Overview), (80, 24)));
    }
}

#[test]
fn every_key_has_its_message() {
    use KeyCode::{
        BackTab, Backspace, Char, Down, End, Enter, Esc, Home, Left, PageDown, PageUp, Right, Tab, Up,
    };
    let mut app = App::new();
    let say = |app: &App, code, modifiers| view::input::message(KeyEvent::new(code, modifiers), app);
    let (none, control) = (KeyModifiers::NONE, KeyModifiers::CONTROL);
    for (code, msg) in [
        (Char('1'), Msg::Show(Screen::Overview)),
        (Char('2'), Msg::Show(Screen::Collectives)),
        (Char('3'), Msg::Show(Screen::Ranks)),
        (Char('4'), Msg::Show(Screen::Findings)),
        (Char('5'), Msg::Show(Screen::Losses)),
        (Tab, Msg::NextScreen),
        (BackTab, Msg::PreviousScreen),
        (Down, Msg::Move(1)),
        (Char('j'), Msg::Move(1)),
        (Up, Msg::Move(-1)),
        (Char('k'), Msg::Move(-1)),
        (PageDown, Msg::Page(1)),
        (PageUp, Msg::Page(-1)),
        (Home, Msg::Top),
        (End, Msg::Bottom),
        (Left, Msg::PreviousComm),
        (Right, Msg::NextComm),
        (Char('s'), Msg::SortNext),
        (Char('/'), Msg::FilterStart),
        (Char('p'), Msg::Pause),
        (Char(' '), Msg::Pause),
        (Char('?'), Msg::Help),
        (Char('q'), Msg::Quit),
        (Esc, Msg::Escape),
        (Char('0'), Msg::Show(Screen::Cluster)),
        (Enter, Msg::Into),
        (Backspace, Msg::Out),
    ] {
        assert_eq!(say(&app, code, none), Some(msg), "{code:?}");
    }
    assert_eq!(say(&app, Char('S'), KeyModifiers::SHIFT), Some(Msg::SortReverse));
    assert_eq!(say(&app, Char('z'), control), Some(Msg::Suspend));
    assert_eq!(say(&app, Char('x'), none), None);
    let release = KeyEvent::new_with_kind(Char('q'), none, KeyEventKind::Release);
    assert_eq!(view::input::message(release, &app), None);
    app.update(Msg::FilterStart);
    for (code, msg) in [
        (Char('q'), Msg::FilterPush('q')),
        (Enter, Msg::FilterKeep),
        (Esc, Msg::FilterClear),
        (Backspace, Msg::FilterPop),
    ] {
        assert_eq!(say(&app, code, none), Some(msg), "{code:?}");
    }
    chord(&mut app, Char('c'), control);
    assert!(app.quit(), "Ctrl-C quits while a filter is typed too");
}

#[test]
fn moving_stays_within_what_there_is() {
    let mut app = on(app(healthy()), Screen::Collectives);
    let selected = |app: &App| shown(app, (80, 24)).lines().position(|l| l.starts_with("\"*")).unwrap();
    let first = selected(&app);
    (0..100).for_each(|_| press(&mut app, KeyCode::Down));
    assert_eq!(selected(&app), first + 4);
    press(&mut app, KeyCode::Up);
    assert_eq!(selected(&app), first + 3, "the hundred keys are not remembered");
    press(&mut app, KeyCode::Home);
    press(&mut app, KeyCode::PageDown);
    assert_eq!(selected(&app), first + 4);
    let mut app = on(self::app(healthy()), Screen::Ranks);
    assert!(shown(&app, (80, 24)).contains("communicator 1 of 2"));
    press(&mut app, KeyCode::Right);
    assert!(shown(&app, (80, 24)).contains("Ranks of 00c455aa091277fe"));
    press(&mut app, KeyCode::Right);
    assert!(shown(&app, (80, 24)).contains("communicator 1 of 2"));
    // The overview is fitted at its top and whole once scrolled.
    let mut app = self::app(missing_rank());
    (0..100).for_each(|_| press(&mut app, KeyCode::Down));
    insta::assert_snapshot!("overview_scrolled", shown(&app, (80, 24)));
}

#[test]
fn text_of_one_frame_tells_everything() {
    insta::assert_snapshot!("once", view::render_text(&app(missing_rank()), 100, u16::MAX));
    assert_eq!(view::render_text(&app(missing_rank()), 100, 20).lines().count(), 20);
    insta::assert_snapshot!("once_nothing", view::render_text(&app(nothing()), 80, 24));
}

#[test]
fn colour_only_adds_to_marks_and_words() {
    let app = app(missing_rank());
    let terminal = terminal(&app, (80, 24));
    let buffer = terminal.backend().buffer();
    let at = |text: &str| {
        let rows = shown(&app, (80, 24));
        let (y, line) = rows.lines().enumerate().find(|(_, l)| l.contains(text)).unwrap();
        let x = line[..line.find(text).unwrap()].chars().count() - 1; // The backend quotes its lines.
        buffer[(x as u16, y as u16)].style()
    };
    assert_eq!(at("! missing-rank").fg, Some(Color::Red));
    assert!(at("[1 Overview]").add_modifier.contains(Modifier::REVERSED));
    let mut plain = App::with_theme(Theme { colour: false, ascii: false });
    plain.set_snapshot(missing_rank());
    let drawn = self::terminal(&plain, (80, 24));
    assert!(drawn.backend().buffer().content().iter().all(|c| c.fg == Color::Reset && c.bg == Color::Reset));
    assert_eq!(drawn.backend().to_string(), shown(&app, (80, 24)));
}

#[test]
fn a_report_has_each_job_on_one_page() {
    let text = |s: &Snapshot| {
        let mut out = Vec::new();
        Pages::of(s).text(&mut out).unwrap();
        String::from_utf8(out).unwrap()
    };
    let mut hangs = missing_rank();
    // Of a device that nobody uses, and of another time.
    let mut over = Finding { open: false, communicator: CommId::unowned(0), ..hangs.findings[0].clone() };
    over.victims.clear();
    hangs.findings.push(over);
    for (name, s) in [("healthy", healthy()), ("missing_rank", hangs.clone()), ("nothing", nothing())] {
        let text = text(&s);
        insta::assert_snapshot!(format!("report_{name}"), text);
        let table = text.lines().filter(|l| !l.trim_start().starts_with("- "));
        assert!(name == "missing_rank" || table.clone().all(|l| l.chars().count() <= 110), "{text}");
    }
    // JSON has what the text has, and what it leaves out.
    let json = serde_json::to_value(Pages::of(&hangs)).unwrap();
    let job = &json["jobs"][0];
    assert_eq!((job["job"].as_str(), job["running"].as_u64()), (Some("llama-pretrain"), Some(4)));
    assert_eq!(job["findings"][0]["kind"], "missing-rank");
    assert_eq!(
        (json["findings"].as_array().unwrap().len(), json["findings"][0]["open"].as_bool()),
        (1, Some(false))
    );
    assert_eq!(job["communicators"][0]["operations"][0]["operation"], "ReduceScatter", "what took longest");
    let untimed = &job["communicators"][1]["operations"][0];
    assert!(untimed["p50_ns"].is_null() && untimed["count"].as_u64() == Some(160), "{untimed}");
    let mut many = healthy();
    many.classes =
        (0..30).map(|n| class(WORLD, Func::AllReduce, (Algo::Ring, Proto::Simple), n, 9.0, 0.1)).collect();
    assert!(text(&many).contains("    and 14 more\n"));
    many.jobs[0].name = Some("a\u{1b}[2J\u{202e}b".into());
    assert!(text(&many).contains("job a[2Jb\n"), "{}", text(&many));
}
