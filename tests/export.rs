//! What other programs get, as they get it.

use crate::exported;
use crate::exported::{COMM, Hand, S, event};
use ringwatch::export::catalogue;
use ringwatch::export::metrics::{Analysis, Bus, Counts, FindingRanks};
use ringwatch::export::prometheus::{Metrics, Own, Settings, negotiated};
use ringwatch::export::trace_id;
use ringwatch::join::Tally;
use ringwatch::model::{
    Change, CloseReason, Finding, Func, HostFact, Kind, OperationRef, Rank, SegmentId, Severity, Track,
    Update,
};

fn own(now_ns: u64) -> Own {
    Own {
        now_ns,
        node: "node1".into(),
        cpu_seconds: 1.25,
        resident_bytes: 30 << 20,
        open_fds: Some(12),
        segments: 4,
        unread: std::collections::BTreeMap::new(),
        started_unix_ns: exported::EPOCH_NS,
        polls: 100,
        poll_seconds: 0.5,
        ..Own::default()
    }
}

fn straggler(order: u64) -> Finding {
    let mut f = Finding::new(
        Kind::Straggler,
        COMM,
        vec![Rank(2)],
        OperationRef::named("AllReduce", Track::Collective, order),
    );
    f.since_ns = 20 * S;
    f.first_seen_ns = 21 * S;
    f.last_seen_ns = 22 * S;
    f
}

/// Some rounds, one with rank 2 half a second late, one hanging.
fn fed(settings: Settings) -> (Hand, Metrics, Vec<Finding>) {
    let mut hand = Hand::new(4);
    let mut metrics = Metrics::new(settings);
    for n in 0..20 {
        // Wires are compared with what operations should move second by second, so they are read all the time.
        hand.hardware((10 + n) * S);
        hand.round((10 + n) * S, (n == 10).then_some((2, S / 2)));
    }
    hand.hardware(30 * S);
    hand.xid(30 * S, 3, 79);
    for (segment, share) in [(1, 0.25), (2, 0.5)] {
        let mut fact = HostFact::new(SegmentId(segment), 30 * S);
        (fact.nccl_busy, fact.nccl_starved) = (Some(share), Some(share / 10.0));
        hand.join.feed(Update::Host(Box::new(fact)));
    }
    hand.stuck(31 * S, 3);
    hand.join.tick(40 * S);
    let taken = hand.join.take_finished();
    assert_eq!(taken.len(), 20);
    metrics.finished(&hand.join, &taken);
    let open = vec![straggler(10)];
    metrics.events(&hand.join, &[event(Change::Opened, &open[0])]);
    (hand, metrics, open)
}

/// What Prometheus asks for.
const OPEN_METRICS: &str = "application/openmetrics-text";

fn text(hand: &Hand, metrics: &mut Metrics, open: &[Finding], now_ns: u64, accept: Option<&str>) -> String {
    let (_, body) = metrics.render(&hand.join, open, &own(now_ns), negotiated(accept, true)).unwrap();
    String::from_utf8(body).unwrap()
}

#[test]
fn the_metrics_of_a_known_job_are_these() {
    let (hand, mut metrics, open) = fed(Settings { cluster: Some("lab".into()), ..Settings::default() });
    insta::assert_snapshot!(text(&hand, &mut metrics, &open, 41 * S, Some(OPEN_METRICS)));
}

#[test]
fn jobs_of_two_users_with_the_same_names_have_series_of_their_own() {
    let (mut hand, mut metrics) = (Hand::new(4), Metrics::new(Settings::default()));
    hand.switch_to_user(1000);
    for second in 10..13 {
        hand.round(second * S, None);
    }
    hand.switch_to_user(2000);
    for second in 20..25 {
        hand.round(second * S, None);
    }
    let order = hand.stuck(26 * S, 3);
    hand.join.tick(40 * S);
    let taken = hand.join.take_finished();
    metrics.finished(&hand.join, &taken);
    let hang = Finding::new(
        Kind::MissingRank,
        hand.comm(),
        vec![Rank(3)],
        OperationRef::named("AllReduce", Track::Collective, order),
    );
    metrics.events(&hand.join, &[event(Change::Opened, &hang)]);
    let text = text(&hand, &mut metrics, &[hang], 41 * S, Some(OPEN_METRICS));
    let of_user = |metric: &str, uid: &str| -> Option<f64> {
        let (begin, label) = (format!("{metric}{{"), format!("uid=\"{uid}\""));
        let lines = text.lines().filter(|l| l.starts_with(&begin) && l.contains(&label));
        lines.map(|l| l.rsplit_once("} ").unwrap().1.parse::<f64>().unwrap()).reduce(|a, b| a + b)
    };
    for (metric, of_one, of_other) in [
        ("ringwatch_operations_total", Some(3.0), Some(5.0)),
        ("ringwatch_operation_bytes_total", Some(12_582_912.0), Some(20_971_520.0)),
        ("ringwatch_operations_in_flight", Some(0.0), Some(1.0)),
        ("ringwatch_oldest_operation_age_seconds", None, Some(15.0)),
        ("ringwatch_communicator_ranks", Some(8.0), Some(8.0)),
        ("ringwatch_job_processes", Some(4.0), Some(4.0)),
        ("ringwatch_findings", None, Some(1.0)),
        ("ringwatch_findings_opened_total", None, Some(1.0)),
        ("ringwatch_lost_records_total", Some(2.0), Some(2.0)),
    ] {
        assert_eq!(
            (of_user(metric, "1000"), of_user(metric, "2000")),
            (of_one, of_other),
            "{metric}:\n{text}"
        );
    }
}

#[test]
fn a_finding_that_becomes_critical_is_counted_where_it_is_now() {
    let (hand, mut metrics, _) = fed(Settings::default());
    let f = |severity, open| Finding {
        severity,
        open,
        ..Finding::new(
            Kind::MissingRank,
            COMM,
            vec![Rank(3)],
            OperationRef::named("AllReduce", Track::Collective, 21),
        )
    };
    let mut series = |change, severity| {
        let now = f(severity, change != Change::Closed);
        metrics.events(&hand.join, &[event(change, &now)]);
        let text = text(&hand, &mut metrics, &[now], 41 * S, Some(OPEN_METRICS));
        let of = |severity: &str| {
            let label = format!("severity=\"{severity}\"");
            let line = |l: &&str| {
                l.starts_with("ringwatch_findings{") && l.contains("missing-rank") && l.contains(&label)
            };
            text.lines().find(line).and_then(|l| l.rsplit(' ').next()).map(str::to_owned)
        };
        (of("warning"), of("critical"))
    };
    let pair = |a: Option<&str>, b: Option<&str>| (a.map(str::to_owned), b.map(str::to_owned));
    assert_eq!(series(Change::Opened, Severity::Warning), pair(Some("1.0"), None));
    assert_eq!(series(Change::Updated, Severity::Critical), pair(Some("0.0"), Some("1.0")));
    assert_eq!(series(Change::Closed, Severity::Critical), pair(Some("0.0"), Some("0.0")));
}

#[test]
fn every_metric_of_the_catalogue_is_given_out_under_its_name_and_labels_and_no_other() {
    let (mut hand, mut metrics, open) = fed(Settings::default());
    hand.across(41 * S);
    let mut own = own(41 * S);
    own.exported.push(ringwatch::export::metrics::Exported {
        signal: "spans",
        sent: 1,
        queued: 2,
        lost: [("the queue was full", 3)].into(),
    });
    own.connections_closed = [(("http", "deadline"), 1)].into();
    own.bus = Some(Bus { left_out: [("a sample is enough", 5)].into(), ..Bus::default() });
    let mut families = metrics.gather(&hand.join, &open, &own);
    let mut named = FindingRanks::default();
    open.iter().for_each(|f| named.add(&hand.join, "n1", ("job", Some(1000)), f));
    let analysis = Analysis {
        named,
        findings: [((String::new(), Some(1000), Kind::Straggler, Severity::Warning), 1)].into(),
        operations: vec![("job".to_owned(), Some(1000), Func::AllReduce, Tally { count: 1, bytes: Some(4) })],
        counts: Counts { left_out: [("a sample is enough".to_owned(), 5)].into(), ..Counts::default() },
        refused: [("came before", 1)].into(),
        leases: [(0, true)].into(),
        keeps: Some(true),
        clock_off_ns: Some(1),
        ..Analysis::default()
    };
    // Both say what they cost themselves; the rest is said by one of them.
    let said: Vec<_> = families.iter().map(|f| f.metric.name).collect();
    let heard = metrics.gather_analysis(&analysis, &own).into_iter();
    families.extend(heard.filter(|f| !said.contains(&f.metric.name)));
    let given: Vec<_> = families.iter().map(|f| f.metric.name).collect();
    // The hand-made job times everything.
    let missing: Vec<_> = catalogue::ALL.iter().map(|m| m.name).filter(|n| !given.contains(n)).collect();
    assert_eq!(missing, ["ringwatch_untimed_operations"]);
    for f in &families {
        for (i, s) in f.samples.iter().enumerate() {
            assert!(s.labels.iter().all(|(k, _)| f.metric.labels.contains(k)), "{}: {s:?}", f.metric.name);
            let same = f.samples[..i].iter().any(|o| o.labels == s.labels);
            assert!(!same, "{} twice with {:?}", f.metric.name, s.labels);
        }
    }
}

#[test]
fn gpus_and_ranks_have_the_labels_of_their_container_as_dcgm_exporter_has_them() {
    let mut hand = Hand::new(4);
    let mut metrics = Metrics::new(Settings::default());
    hand.hardware(10 * S);
    hand.pod(10 * S, 2, "train-2");
    hand.round(10 * S, None);
    hand.join.tick(20 * S);
    let taken = hand.join.take_finished();
    metrics.finished(&hand.join, &taken);
    let body = text(&hand, &mut metrics, &[], 21 * S, None);
    let lines = |name: &str, of: &str| {
        body.lines().filter(|l| l.starts_with(name) && l.contains(of)).collect::<Vec<_>>()
    };
    let has = |line: &str| line.contains(r#"pod="train-2",namespace="ml",container="trainer""#);
    let named = |line: &str| line.contains("pod=") || line.contains("container=");
    for (name, of_two, of_another) in [
        ("ringwatch_gpu_info{", "GPU-0002", "GPU-0001"),
        ("ringwatch_gpu_power_watts{", &*exported::gpu(2), &*exported::gpu(1)),
        ("ringwatch_rank_waiting_seconds_total{", "rank=\"2\"", "rank=\"1\""),
    ] {
        let (two, another) = (lines(name, of_two), lines(name, of_another));
        assert!(two.len() == 1 && has(two[0]), "{name} {two:?}");
        assert!(another.len() == 1 && !named(another[0]), "{name} {another:?}");
    }
    // What belongs to the whole node is nobody's.
    assert!(lines("ringwatch_operations_total{", "").into_iter().all(|l| !named(l)));
    assert!(lines("ringwatch_node_", "").into_iter().all(|l| !named(l)));
}

#[test]
fn the_list_for_people_is_the_catalogue() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/dashboards/METRICS.md");
    let want = catalogue::markdown();
    if std::env::var_os("RINGWATCH_WRITE_METRICS").is_some() {
        std::fs::write(file, &want).unwrap();
    }
    let is = std::fs::read_to_string(file).unwrap();
    assert!(is == want, "dashboards/METRICS.md is old: run this test with RINGWATCH_WRITE_METRICS=1");
}

#[test]
fn exemplars_lead_to_the_trace_of_their_operation_and_only_where_one_is_kept() {
    let (hand, mut metrics, _) = fed(Settings::default());
    let body = text(&hand, &mut metrics, &[], 41 * S, Some(OPEN_METRICS));
    let trace = trace_id::of_operation(COMM, Track::Collective, 19);
    let line = body.lines().find(|l| l.contains("transfer_seconds_bucket") && l.contains('#')).unwrap();
    assert!(line.contains(&format!("# {{trace_id=\"{trace:032x}\",span_id=")), "{line}");
    assert!(line.ends_with(&format!("0.0001 {}.000", exported::EPOCH_NS / S + 29)), "{line}");
    let plain = text(&hand, &mut metrics, &[], 41 * S, Some("text/plain"));
    assert!(!plain.contains("trace_id"), "the older text knows no exemplars");

    let mut none = Metrics::new(Settings::default());
    none.set_trace_ratio(0.0);
    let mut again = Hand::new(4);
    again.round(10 * S, None);
    let taken = again.join.take_finished();
    none.finished(&again.join, &taken);
    assert!(!text(&again, &mut none, &[], 11 * S, Some(OPEN_METRICS)).contains("trace_id"));
}

#[test]
fn what_the_budget_has_no_room_for_is_folded_and_told() {
    let (hand, mut metrics, _) = fed(Settings { series_budget: 1, ..Settings::default() });
    let body = text(&hand, &mut metrics, &[], 41 * S, Some(OPEN_METRICS));
    let waiting: Vec<_> =
        body.lines().filter(|l| l.starts_with("ringwatch_rank_waiting_seconds_total")).collect();
    assert_eq!(waiting.len(), 2, "{waiting:?}");
    assert!(waiting.iter().any(|l| l.contains("{overflow=\"true\"} 1.0")), "{waiting:?}");
    let folded = body.lines().find(|l| l.starts_with("ringwatch_agent_folded_observations_total")).unwrap();
    // Ranks 1 to 3 in 20 rounds, and the second reason for losses: when it was seen, and when it grew.
    assert!(folded.ends_with(" 62.0"), "{folded}");
}

#[test]
fn series_of_what_is_gone_go_after_a_while_and_come_back() {
    let (mut hand, mut metrics, open) = fed(Settings { idle_seconds: 60, ..Settings::default() });
    let has = |body: &str| body.contains("ringwatch_operations_total{");
    assert!(has(&text(&hand, &mut metrics, &open, 41 * S, Some(OPEN_METRICS))));
    assert!(has(&text(&hand, &mut metrics, &open, 101 * S, None)));
    let late = text(&hand, &mut metrics, &open, 102 * S, None);
    assert!(!has(&late));
    assert!(late.contains("ringwatch_findings{"), "a finding that is open stays");
    hand.unstick(103 * S, 20, 3, 31 * S);
    let taken = hand.join.take_finished();
    assert_eq!(taken.len(), 1);
    metrics.finished(&hand.join, &taken);
    assert!(text(&hand, &mut metrics, &open, 104 * S, None).contains("size_class=\"2^22\"} 1.0"));
}

#[test]
fn a_finding_counts_once_while_it_is_open_and_again_when_it_comes_back() {
    let (hand, mut metrics, open) = fed(Settings::default());
    let value = |body: &str, name: &str| {
        let line = body.lines().find(|l| l.starts_with(&format!("{name}{{"))).unwrap();
        line.rsplit(' ').next().unwrap().to_owned()
    };
    let body = text(&hand, &mut metrics, &open, 41 * S, Some(OPEN_METRICS));
    assert_eq!(value(&body, "ringwatch_findings_opened_total"), "1.0");
    assert_eq!(value(&body, "ringwatch_findings"), "1.0");
    metrics.events(&hand.join, &[event(Change::Updated, &open[0])]);
    let body = text(&hand, &mut metrics, &open, 41 * S, Some(OPEN_METRICS));
    assert_eq!(value(&body, "ringwatch_findings_updated_total"), "1.0");
    assert_eq!(value(&body, "ringwatch_findings_opened_total"), "1.0");
    let mut closed = open.clone();
    closed[0].open = false;
    closed[0].close_reason = Some(CloseReason::JobEnded);
    metrics.events(&hand.join, &[event(Change::Closed, &closed[0])]);
    let body = text(&hand, &mut metrics, &closed, 42 * S, None);
    assert_eq!(value(&body, "ringwatch_findings"), "0.0");
    assert_eq!(value(&body, "ringwatch_findings_closed_total"), "1.0");
    assert!(body.contains("severity=\"warning\",reason=\"job-ended\"} 1.0"), "{body}");
    metrics.events(&hand.join, &[event(Change::Opened, &open[0])]);
    let body = text(&hand, &mut metrics, &open, 43 * S, None);
    assert_eq!(value(&body, "ringwatch_findings_opened_total"), "2.0");
}

#[test]
fn inspectors_names_are_given_only_where_they_are_asked_for_and_for_one_period() {
    let (hand, mut metrics, _) = fed(Settings { inspector_names: true, ..Settings::default() });
    let body = text(&hand, &mut metrics, &[], 41 * S, Some(OPEN_METRICS));
    let line = body
        .lines()
        .find(|l| l.starts_with("nccl_collective_exec_time_microseconds{") && l.contains("GPU2"))
        .unwrap();
    assert_eq!(
        line,
        "nccl_collective_exec_time_microseconds{version=\"v5.1\",slurm_job_id=\"17\",node=\"node1\",gpu=\"GPU2\",\
         comm_name=\"dp\",n_nodes=\"1\",nranks=\"4\",collective=\"AllReduce\",message_size=\"4-5MB\",\
         algo_proto=\"Ring_simple\"} 100.0"
    );
    assert!(!text(&hand, &mut metrics, &[], 42 * S, None).contains("\nnccl_"), "nothing new, nothing told");
    let (hand, mut metrics, _) = fed(Settings::default());
    assert!(!text(&hand, &mut metrics, &[], 41 * S, Some(OPEN_METRICS)).contains("\nnccl_"));
}

#[test]
fn settings_are_read_from_yaml_and_nothing_unknown_is_taken() {
    let s: Settings = serde_yaml::from_str("series_budget: 5\ncluster: lab\n").unwrap();
    assert_eq!((s.series_budget, s.cluster.as_deref(), s.idle_seconds), (5, Some("lab"), 3600));
    assert!(serde_yaml::from_str::<Settings>("serie_budget: 5\n").is_err());
}
