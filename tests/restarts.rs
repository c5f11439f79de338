//! Agent, receiver and Prometheus, each killed in the middle of a job and started again: nothing is lost that segments
//! still hold, and what is lost is said. An agent that nobody killed says what there was.

use crate::receiver::{Got, Receiver, Wants};
use crate::support::agent::Agent;
use crate::support::prometheus::{Prometheus, program};
use crate::support::{ENDED_IN_MIXED, PATIENCE, Play, Players, Room, opened, ranks, until};
use ringwatch::export::otlp::Protocol;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// What is counted of operations that are over.
const COUNTS: [&str; 6] = [
    "ringwatch_operations_total",
    "ringwatch_operation_bytes_total",
    "ringwatch_timed_bytes_total",
    "ringwatch_untimed_operations_total",
    "ringwatch_network_bytes_total",
    "ringwatch_collective_transfer_seconds_count",
];

fn counts(agent: &Agent) -> Vec<Vec<(String, f64)>> {
    COUNTS.iter().map(|m| agent.series(m)).collect()
}

/// An agent beside the room's own, with this setting.
fn beside(room: &Room, settings: &[&str]) -> Agent {
    let socket = format!("socket.path={}", room.path("run/beside.sock").display());
    let more: Vec<&str> = ["--set", &socket].into_iter().chain(settings.iter().copied()).collect();
    Agent::start(room, &more)
}

#[test]
fn an_agent_that_is_killed_in_mid_run_counts_what_one_that_lived_counts() {
    let _alone = crate::alone();
    let room = Room::new();
    let lived = beside(&room, &[]);
    let killed = Agent::start(&room, &[]);
    let mut players = Players::start(&room, Play::of("mixed").two_node().hold(60));
    // In the middle: some operations are over, and many will be.
    until("operations", || (killed.sum("ringwatch_operations_total") >= 5.0).then_some(()));
    let before = killed.sum("ringwatch_operations_total");
    killed.kill();
    std::thread::sleep(Duration::from_millis(500));
    let again = Agent::start(&room, &[]);
    players.played();
    let mut last = Vec::new();
    for _ in 0..200 {
        last = vec![counts(&again), counts(&lived)];
        let over: f64 = last[1][0].iter().map(|(_, n)| n).sum();
        if over >= ENDED_IN_MIXED && last[0] == last[1] {
            break;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(last[0], last[1], "who was killed, and who lived");
    assert_eq!(last[0][0].iter().map(|(_, n)| n).sum::<f64>(), ENDED_IN_MIXED, "{:#?}", last[0]);
    assert!(before < ENDED_IN_MIXED, "it was killed in the middle: {before}");
    assert!(again.series("ringwatch_lost_records_total").iter().all(|(_, n)| *n == 0.0));
    // The restarted agent finds the planted straggler again, as the same finding. Under load other players come late as well.
    let planted = |agent: Agent| -> Vec<String> {
        let all = opened(&agent.end().0);
        let of_rank_3 = all.iter().filter(|f| ranks(f) == [3]);
        of_rank_3.map(|f| f.get("id").text().to_owned()).collect()
    };
    let (lived, again) = (planted(lived), planted(again));
    assert_eq!(lived, again);
    assert_eq!(lived.len(), 1, "the planted straggler");
}

/// Names of spans, by trace and span.
fn spans(got: &Got) -> BTreeSet<(Vec<u8>, Vec<u8>)> {
    got.spans.iter().map(|s| (s.trace_id.clone(), s.span_id.clone())).collect()
}

fn to(receiver: &Receiver) -> [String; 4] {
    [
        format!("otlp.endpoint={}", receiver.endpoint),
        "otlp.sample_ratio=1.0".to_owned(),
        "otlp.timeout_ms=1000".to_owned(),
        "otlp.metrics_interval_ms=0".to_owned(),
    ]
}

fn set(settings: &[String]) -> Vec<&str> {
    settings.iter().flat_map(|s| ["--set", s]).collect()
}

#[test]
fn a_receiver_that_is_killed_in_mid_run_gets_all_spans_or_it_is_said_how_many_are_lost() {
    let _alone = crate::alone();
    for protocol in [Protocol::Grpc, Protocol::Http] {
        let room = Room::new();
        let protocol_set =
            format!("otlp.protocol={}", if protocol == Protocol::Grpc { "grpc" } else { "http" });
        let start = |receiver: &Receiver, more: &[&str]| {
            let settings = to(receiver);
            let mut all = set(&settings);
            all.extend(["--set", &protocol_set]);
            all.extend(more);
            beside(&room, &all)
        };
        let whole = Receiver::start(protocol, Wants::default(), None);
        let first = Receiver::start(protocol, Wants::default(), None);
        let narrow = Receiver::start(protocol, Wants::default(), None);
        let sends_all = start(&whole, &["--set", "socket.path=null"]);
        let waits = start(&first, &["--set", "socket.path=null"]);
        // It has hardly any room for what waits.
        const ROOM: usize = 50;
        let queue = format!("otlp.queue={ROOM}");
        let loses = start(&narrow, &["--set", "socket.path=null", "--set", &queue]);
        let mut players = Players::start(&room, Play::of("mixed").hold(60));
        until("spans", || (!first.got().spans.is_empty() && !narrow.got().spans.is_empty()).then_some(()));
        let (ports, had, had_narrow) = ((first.port, narrow.port), first.stop(), narrow.stop());
        players.played();
        waits.says("took no");
        let second = Receiver::start(protocol, Wants::default(), Some(ports.0));
        let narrow = Receiver::start(protocol, Wants::default(), Some(ports.1));
        waits.says("takes what is sent again");
        loses.says("takes what is sent again");
        let lost = |agent: &Agent| -> f64 {
            let all = agent.series("ringwatch_lost_exports_total");
            all.iter().filter(|(labels, _)| labels.contains("signal=\"spans\"")).map(|(_, n)| n).sum()
        };
        // An empty queue alone does not tell the end: each agent learns in its own time which operations are over.
        // The receiver that was killed may have kept one request that it did not answer; an agent counts those spans as
        // lost when it has no room for them.
        let ended = Instant::now() + PATIENCE;
        loop {
            let all = spans(&whole.got());
            let resumed: BTreeSet<_> = &spans(&had) | &spans(&second.got());
            let short: BTreeSet<_> = &spans(&had_narrow) | &spans(&narrow.got());
            let missing = all.difference(&short).count();
            let queues = [&sends_all, &waits, &loses].map(|a| a.sum("ringwatch_export_queue"));
            let said = lost(&loses) as usize;
            if queues == [0.0; 3]
                && resumed == all
                && missing > 0
                && (missing..=missing + ROOM).contains(&said)
            {
                break;
            }
            assert!(
                Instant::now() < ended,
                "{protocol:?}, after {PATIENCE:?}: of {} spans {} are at one of the two receivers; the narrow one misses \
                 {missing}, and {said} are said to be lost; queues {queues:?}",
                all.len(),
                resumed.len()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        assert!(had.spans.len() < whole.got().spans.len(), "it was killed in the middle");
        assert_eq!((lost(&sends_all), lost(&waits)), (0.0, 0.0));
        loses.says("spans are lost");
        for agent in [sends_all, waits, loses] {
            assert_eq!(agent.end().1, Some(0));
        }
    }
}

#[test]
fn a_prometheus_that_is_killed_goes_on_with_what_it_had_and_counters_continue() {
    let _alone = crate::alone();
    let test = "a_prometheus_that_is_killed_goes_on_with_what_it_had_and_counters_continue";
    let Some(program) = program("prometheus", test) else { return };
    let room = Room::new();
    let agent = Agent::start(&room, &[]);
    let counted = "sum(ringwatch_operations_total)";
    let first = Prometheus::start(&program, &room.path("prometheus"), &[&agent.address], None);
    let mut players = Players::start(&room, Play::of("mixed").loops(4).hold(60));
    until("a count", || first.query(counted).first().filter(|n| **n > 0.0).copied());
    // Two more scrapes.
    std::thread::sleep(Duration::from_secs(2));
    let at = ringwatch::ingest::unix_ns() as f64 / 1e9;
    let had = first.query_at(counted, Some(at));
    drop(first);
    std::thread::sleep(Duration::from_secs(2));
    let second = Prometheus::start(&program, &room.path("prometheus"), &[&agent.address], None);
    players.played();
    let all = until("all of them", || {
        let all = agent.sum("ringwatch_operations_total");
        (second.query(counted) == [all]).then_some(all)
    });
    assert!(had[0] < all, "it was killed in the middle");
    assert_eq!(second.query_at(counted, Some(at)), had, "what it had is still there");
    assert_eq!(second.query("sum(resets(ringwatch_operations_total[5m]))"), [0.0]);
    assert_eq!(agent.end().1, Some(0));
}
