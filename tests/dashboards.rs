//! Dashboards and alert rules: held against the catalogue, and asked of a real Prometheus.

#![allow(clippy::disallowed_methods, reason = "these tests have servers and a clock of their own")]

use crate::exported;
use crate::exported::{Hand, S};
use crate::receiver::{Receiver, Wants};
use crate::support::agent::Agent;
use crate::support::nats::{self, Nats};
use crate::support::prometheus::{Prometheus, program};
use crate::support::{Play, Players, Room, machine, until};
use axum::extract::State;
use axum::http::{HeaderMap, header};
use promql_parser::parser::{self, Expr, LabelModifier, VectorSelector};
use promql_parser::util::{ExprVisitor, walk_expr};
use ringwatch::cluster::Refusal;
use ringwatch::detect::{self, Detector};
use ringwatch::export::catalogue::{self, CLUSTER, CONTAINER, Kind, Metric, OVERFLOW};
use ringwatch::export::metrics::Exported;
use ringwatch::export::otlp::Protocol;
use ringwatch::export::prometheus::{Metrics, Own, Settings, negotiated};
use ringwatch::ingest::hardware::Recorder;
use ringwatch::model::{Fact, Reading, Xid};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::net::TcpListener;

const BOARDS: [&str; 4] = ["cluster", "job", "node", "agent"];

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("dashboards")
}

fn board(name: &str) -> Value {
    let text = std::fs::read_to_string(folder().join(name).with_extension("json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// Every query of the boards: where it stands, and with its variables filled in.
fn queries() -> Vec<(String, String)> {
    let mut all = Vec::new();
    for name in BOARDS {
        for panel in board(name)["panels"].as_array().unwrap() {
            for target in panel["targets"].as_array().unwrap() {
                let mut query = target["expr"].as_str().unwrap().to_owned();
                for (variable, value) in
                    [("$__rate_interval", "5s"), ("$cluster", ".*"), ("$job", ".*"), ("$node", ".*")]
                {
                    query = query.replace(variable, value);
                }
                assert!(!query.contains('$'), "{name}: {query}");
                all.push((format!("{name}: {}", panel["title"].as_str().unwrap()), query));
            }
        }
    }
    all
}

/// Each alert: its name and the rule.
fn rules() -> Vec<(String, serde_yaml::Value)> {
    let text = std::fs::read_to_string(folder().join("rules.yaml")).unwrap();
    let all: serde_yaml::Value = serde_yaml::from_str(&text).unwrap();
    let groups = all["groups"].as_sequence().unwrap();
    let rules = groups.iter().flat_map(|g| g["rules"].as_sequence().unwrap());
    rules.map(|r| (r["alert"].as_str().unwrap().to_owned(), r.clone())).collect()
}

/// What a query names that the catalogue does not know.
#[derive(Default)]
struct Checker {
    metrics: Vec<&'static Metric>,
    grouped: BTreeSet<String>,
    wrong: Vec<String>,
}

/// Metrics and labels below an expression, as far as they say whose it is.
#[derive(Default)]
struct Owners {
    /// A metric with the label `uid`.
    of_users: Option<&'static str>,
    /// A selector names a job.
    selects_job: bool,
}

impl Owners {
    fn below(e: &Expr) -> Self {
        let mut owners = Self::default();
        walk_expr(&mut owners, e).unwrap();
        owners
    }

    fn selector(&mut self, v: &VectorSelector) {
        let name = v.name.clone().unwrap_or_default();
        let of_users = metric_of(&name).filter(|m| m.labels.contains(&"uid"));
        self.of_users = self.of_users.or(of_users.map(|m| m.name));
        let mut all = v.matchers.matchers.iter().chain(v.matchers.or_matchers.iter().flatten());
        self.selects_job |= all.any(|m| ["job_name", "communicator"].contains(&&*m.name));
    }
}

impl ExprVisitor for Owners {
    type Error = String;

    fn pre_visit(&mut self, e: &Expr) -> Result<bool, String> {
        match e {
            Expr::VectorSelector(v) => self.selector(v),
            Expr::MatrixSelector(m) => self.selector(&m.vs),
            _ => {}
        }
        Ok(true)
    }
}

/// The metric whose series have this name; a native histogram has the family's own name.
fn metric_of(name: &str) -> Option<&'static Metric> {
    let is =
        |m: &&Metric| m.exposed().iter().any(|e| e == name) || (m.kind == Kind::Histogram && m.name == name);
    catalogue::ALL.iter().copied().find(is)
}

impl Checker {
    /// Any user may name a job and a communicator like another one's. So whatever is grouped or joined by these names, or
    /// is selected by them, has to be grouped or joined by `uid` as well. Sums over a whole node or cluster may leave it out.
    fn keeps_users_apart(&mut self, modifier: &LabelModifier, owners: &Owners) {
        let Some(metric) = owners.of_users else { return };
        let has = |label: &str| modifier.labels().labels.iter().any(|l| l == label);
        let drops_uid = match modifier {
            LabelModifier::Include(_) => {
                !has("uid") && (owners.selects_job || has("job_name") || has("communicator"))
            }
            LabelModifier::Exclude(_) => has("uid"),
        };
        if drops_uid {
            self.wrong.push(format!("{metric} of several users is added up: uid is missing in {modifier:?}"));
        }
    }

    fn selector(&mut self, v: &VectorSelector) {
        let name = v.name.clone().unwrap_or_default();
        let Some(metric) = metric_of(&name) else {
            self.wrong.push(format!("no metric {name}"));
            return;
        };
        self.metrics.push(metric);
        for m in v.matchers.matchers.iter().chain(v.matchers.or_matchers.iter().flatten()) {
            if m.name == "kind" {
                let kinds = m
                    .value
                    .split('|')
                    .filter(|k| !ringwatch::model::Kind::ALL.iter().any(|a| a.as_str() == *k));
                self.wrong.extend(kinds.map(|k| format!("no finding is of kind {k}")));
            }
            let of_container =
                CONTAINER.contains(&&*m.name) && ["gpu", "rank"].iter().any(|l| metric.labels.contains(l));
            if m.name != CLUSTER && !of_container && !metric.labels.contains(&m.name.as_str()) {
                self.wrong.push(format!("{name} has no label {}", m.name));
            }
        }
    }
}

impl ExprVisitor for Checker {
    type Error = String;

    fn pre_visit(&mut self, e: &Expr) -> Result<bool, String> {
        match e {
            Expr::VectorSelector(v) => self.selector(v),
            Expr::MatrixSelector(m) => self.selector(&m.vs),
            Expr::Aggregate(a) => {
                let owners = Owners::below(&a.expr);
                a.modifier.iter().for_each(|m| self.keeps_users_apart(m, &owners));
                self.grouped.extend(a.modifier.iter().flat_map(|m| m.labels().labels.clone()));
            }
            Expr::Binary(b) => {
                let on = b.modifier.iter().filter_map(|m| m.matching.as_ref());
                for (side, m) in [&b.lhs, &b.rhs].into_iter().flat_map(|s| on.clone().map(move |m| (s, m))) {
                    self.keeps_users_apart(m, &Owners::below(side));
                }
                self.grouped.extend(on.flat_map(|m| m.labels().labels.clone()));
            }
            _ => {}
        }
        Ok(true)
    }
}

fn wrong_with(query: &str) -> Vec<String> {
    let expr = match parser::parse(query) {
        Ok(e) => e,
        Err(e) => return vec![e],
    };
    let mut checker = Checker::default();
    walk_expr(&mut checker, &expr).unwrap();
    if checker.metrics.is_empty() && checker.wrong.is_empty() {
        checker.wrong.push("no metric in it".to_owned());
    }
    let known = |l: &String| {
        [CLUSTER, OVERFLOW, "le"].contains(&l.as_str())
            || checker.metrics.iter().any(|m| m.labels.contains(&l.as_str()))
    };
    let unknown: Vec<_> = checker.grouped.iter().filter(|l| !known(l)).cloned().collect();
    checker.wrong.extend(unknown.into_iter().map(|l| format!("no metric of it has a label {l}")));
    checker.wrong
}

#[test]
fn queries_name_only_metrics_and_labels_of_the_catalogue() {
    for (query, wrong) in [
        ("sum by (job_name, uid) (rate(ringwatch_operations_total[5m]))", vec![]),
        ("sum by (node) (rate(ringwatch_lost_records_total[5m]))", vec![]),
        ("rate(ringwatch_operation_total[5m])", vec!["no metric ringwatch_operation_total"]),
        ("ringwatch_findings{job=\"x\"}", vec!["ringwatch_findings has no label job"]),
        ("ringwatch_findings{kind=~\"xid|hang\"}", vec!["no finding is of kind hang"]),
        ("sum by (gpu) (ringwatch_findings)", vec!["no metric of it has a label gpu"]),
        (
            "histogram_quantile(0.5, sum by (le) (rate(ringwatch_transfer_bucket[5m])))",
            vec!["no metric ringwatch_transfer_bucket"],
        ),
    ] {
        assert_eq!(wrong_with(query), wrong, "the check itself: {query}");
    }
    for query in [
        "sum by (job_name) (rate(ringwatch_operations_total[5m]))",
        "max by (node, communicator) (ringwatch_oldest_operation_age_seconds)",
        "sum by (kind) (ringwatch_findings{job_name=~\"a.*\"})",
        "sum without (uid) (ringwatch_findings)",
        "histogram_quantile(0.5, sum by (le, communicator) (rate(ringwatch_collective_transfer_seconds_bucket[5m])))",
        "ringwatch_job_processes and on (job_name) ringwatch_findings",
        "ringwatch_job_processes and ignoring (uid) ringwatch_findings",
    ] {
        let wrong = wrong_with(query);
        assert!(
            !wrong.is_empty() && wrong.iter().all(|w| w.contains("uid is missing")),
            "{query}: {wrong:?}"
        );
    }
    let of_rules = rules().into_iter().map(|(n, r)| (n, r["expr"].as_str().unwrap().to_owned()));
    let all: Vec<_> = queries().into_iter().chain(of_rules).collect();
    let wrong: Vec<_> =
        all.iter().flat_map(|(at, q)| wrong_with(q).into_iter().map(move |w| (at, w))).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
    // A metric that nobody looks at need not be there.
    let text = all.iter().map(|(_, q)| q.as_str()).collect::<Vec<_>>().join("\n");
    let unseen: Vec<_> = catalogue::ALL.iter().map(|m| m.name).filter(|n| !text.contains(n)).collect();
    assert_eq!(unseen, Vec::<&str>::new());
}

#[test]
fn the_alerts_about_hangs_and_devices_know_all_their_kinds() {
    for (alert, of) in [
        ("RingwatchHang", ringwatch::model::Kind::is_hang as fn(ringwatch::model::Kind) -> bool),
        ("RingwatchDevice", ringwatch::model::Kind::is_device),
    ] {
        let all = ringwatch::model::Kind::ALL.iter().filter(|k| of(**k)).map(|k| k.as_str());
        let kinds = format!("kind=~\"{}\"", all.collect::<Vec<_>>().join("|"));
        let (_, rule) = rules().into_iter().find(|(n, _)| n == alert).unwrap();
        assert!(rule["expr"].as_str().unwrap().contains(&kinds), "{alert}: {kinds}");
    }
}

#[test]
fn boards_have_stable_names_and_four_variables() {
    let mut titles = BTreeSet::new();
    for name in BOARDS {
        let b = board(name);
        assert_eq!(b["uid"], format!("ringwatch-{name}"));
        let variables: Vec<_> =
            b["templating"]["list"].as_array().unwrap().iter().map(|v| v["name"].clone()).collect();
        assert_eq!(variables, ["datasource", "cluster", "job", "node"]);
        for panel in b["panels"].as_array().unwrap() {
            assert!(titles.insert((name, panel["title"].as_str().unwrap().to_owned())), "{panel}");
            assert_eq!(panel["datasource"]["uid"], "${datasource}");
        }
    }
}

#[test]
fn every_alert_says_what_to_do_and_is_tested_both_ways() {
    let text = std::fs::read_to_string(folder().join("rules_test.yaml")).unwrap();
    let tests: serde_yaml::Value = serde_yaml::from_str(&text).unwrap();
    let mut tested: BTreeMap<String, [bool; 2]> = BTreeMap::new();
    for t in tests["tests"].as_sequence().unwrap() {
        for case in t["alert_rule_test"].as_sequence().unwrap() {
            let fires = !case["exp_alerts"].as_sequence().unwrap().is_empty();
            let name = case["alertname"].as_str().unwrap().to_owned();
            tested.entry(name).or_default()[usize::from(fires)] = true;
        }
    }
    for (name, rule) in rules() {
        assert_eq!(tested.get(&name), Some(&[true, true]), "{name} has to fire and to be silent in a test");
        let text = |key: &str| rule["annotations"][key].as_str().unwrap_or("").len();
        assert!(text("summary") > 20 && text("runbook") > 60, "{name}");
        assert!(["critical", "warning", "info"].contains(&rule["labels"]["severity"].as_str().unwrap()));
    }
}

#[test]
fn promtool_accepts_the_rules_their_tests_and_the_metrics() {
    let test = "promtool_accepts_the_rules_their_tests_and_the_metrics";
    let Some(promtool) = program("promtool", test) else { return };
    for args in [["check", "rules", "rules.yaml"], ["test", "rules", "rules_test.yaml"]] {
        let out = Command::new(&promtool).args(args).current_dir(folder()).output().unwrap();
        let text = String::from_utf8_lossy(&out.stdout) + String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success(), "{text}");
    }
    let mut feed = Feed::new();
    feed.step(20 * S);
    feed.step(21 * S);
    // As curl asks.
    let body = feed.answer(21 * S, Some("*/*")).1;
    let mut child = Command::new(&promtool)
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), &body).unwrap();
    let out = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout) + String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{text}");
}

/// A job made by hand that goes on, and what is served of it.
struct Feed {
    hand: Hand,
    metrics: Metrics,
    detector: Detector,
    steps: u64,
}

impl Feed {
    fn new() -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        Feed {
            hand: Hand::since(4, now.as_nanos() as u64 - 20 * S),
            metrics: Metrics::new(Settings { cluster: Some("lab".into()), ..Settings::default() }),
            detector: Detector::new(detect::Settings::default()),
            steps: 0,
        }
    }

    /// Goes on by one step: an operation, every fifth with a late rank.
    fn step(&mut self, now_ns: u64) {
        self.steps += 1;
        self.hand.untimed(now_ns - 60_000_000);
        self.hand.round(now_ns - 50_000_000, self.steps.is_multiple_of(5).then_some((2, 20_000_000)));
        self.hand.hardware(now_ns);
        if self.steps == 3 {
            self.hand.xid(now_ns, 3, 79);
        }
        self.hand.join.tick(now_ns);
        let new = self.detector.check(&self.hand.join, now_ns);
        self.metrics.events(&self.hand.join, &new);
        let finished = self.hand.join.take_finished();
        self.metrics.finished(&self.hand.join, &finished);
    }

    fn answer(&mut self, now_ns: u64, accept: Option<&str>) -> (String, Vec<u8>) {
        let own = Own {
            now_ns,
            node: "node1".into(),
            cpu_seconds: now_ns as f64 / 1e11,
            resident_bytes: 30 << 20,
            open_fds: Some(12),
            segments: 4,
            unread: std::collections::BTreeMap::new(),
            started_unix_ns: exported::EPOCH_NS,
            polls: self.steps,
            poll_seconds: self.steps as f64 * 1e-4,
            exported: vec![Exported {
                signal: "spans",
                sent: self.steps,
                queued: 0,
                lost: [("the queue was full", 0)].into(),
            }],
            ..Own::default()
        };
        let open = self.detector.findings();
        self.metrics.render(&self.hand.join, &open, &own, negotiated(accept, true)).unwrap()
    }
}

type Served = Arc<(Mutex<Feed>, Instant)>;

fn now_ns(began: Instant) -> u64 {
    20 * S + began.elapsed().as_nanos() as u64
}

async fn scraped(
    State(of): State<Served>,
    headers: HeaderMap,
) -> ([(header::HeaderName, String); 1], Vec<u8>) {
    let accept = headers.get(header::ACCEPT).and_then(|v| v.to_str().ok());
    let (kind, body) = of.0.lock().unwrap().answer(now_ns(of.1), accept);
    ([(header::CONTENT_TYPE, kind)], body)
}

/// What is read of this machine for some minutes, as a file: four GPUs, one of which reports an error.
fn recording(room: &Room) -> PathBuf {
    let path = room.path("machine.jsonl");
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let mut file = Recorder::new(std::fs::File::create(&path).unwrap());
    for n in 1..=2 * MINUTES * 60 {
        let at_ns = 100 * S + n * S / 2;
        let mut facts = exported::machine::facts(4, at_ns - S / 2, at_ns);
        if n == 6 {
            facts.push(Fact::Xid(Xid { gpu: exported::gpu(3), code: 79 }));
        }
        let reading = |fact| Reading { host: host.clone(), at_ns, fact };
        file.write(&facts.into_iter().map(reading).collect::<Vec<_>>()).unwrap();
    }
    path
}

/// Longer than the test takes.
const MINUTES: u64 = 4;

/// Queries about hangs, which have data when there is one.
fn is_about_hangs(at: &str, query: &str) -> bool {
    at.contains("inding") || at.contains("oldest") || query.contains("_findings")
}

/// Metrics of the cluster's bus and its analysers, which are there where a server is.
fn is_of_the_bus(metric: &Metric) -> bool {
    let own = ["ringwatch_bus_", "ringwatch_analyser_", "ringwatch_cluster_"];
    // The bus bandwidth is of another bus.
    metric.name != catalogue::BUS_BYTES.name && own.iter().any(|m| metric.name.starts_with(m))
}

fn is_about_the_bus(query: &str) -> bool {
    let mut checker = Checker::default();
    walk_expr(&mut checker, &parser::parse(query).unwrap()).unwrap();
    checker.metrics.iter().any(|m| is_of_the_bus(m))
}

/// What each alert asks for, by itself: a rule whose series nobody has never fires.
fn selected_by_rules() -> Vec<(String, String)> {
    #[derive(Default)]
    struct Selectors(Vec<String>);
    impl Selectors {
        fn add(&mut self, v: &VectorSelector) {
            // What an offset asks for is older than the test.
            let mut plain = VectorSelector { offset: None, ..v.clone() };
            // Not every kind of finding is planted here.
            plain.matchers.matchers.retain(|m| m.name != "kind");
            self.0.push(plain.to_string());
        }
    }
    impl ExprVisitor for Selectors {
        type Error = String;
        fn pre_visit(&mut self, e: &Expr) -> Result<bool, String> {
            match e {
                Expr::VectorSelector(v) => self.add(v),
                Expr::MatrixSelector(m) => self.add(&m.vs),
                _ => {}
            }
            Ok(true)
        }
    }
    let of = |(name, rule): (String, serde_yaml::Value)| {
        let mut all = Selectors::default();
        walk_expr(&mut all, &parser::parse(rule["expr"].as_str().unwrap()).unwrap()).unwrap();
        all.0.into_iter().map(move |s| (format!("alert {name}"), s)).collect::<Vec<_>>()
    };
    rules().into_iter().flat_map(of).collect()
}

/// Replayed jobs, the real plugin, the real agent, a bus with an analyser, and a real Prometheus.
#[test]
fn every_panel_has_data_and_the_planted_hang_fires_its_alert() {
    let test = "every_panel_has_data_and_the_planted_hang_fires_its_alert";
    let room = Room::new();
    let (Some(program), Some(driver)) = (program("prometheus", test), machine::driver(&room, test)) else {
        return;
    };
    let play_in = |play: Play, job: &str, bytes: &str| {
        let variables: [(&str, &OsStr); 4] = [
            // A communicator ends with its repetition, and a series that grew between no two scrapes has no rate. By
            // default Ringwatch times one operation of so short a communicator.
            ("RINGWATCH_OVERHEAD_BUDGET", OsStr::new("100%")),
            ("LD_PRELOAD", driver.as_os_str()),
            ("RINGWATCH_JOB", OsStr::new(job)),
            ("RINGWATCH_SEGMENT_BYTES", OsStr::new(bytes)),
        ];
        Players::start_with(&room, play, &variables)
    };
    let play = |play: Play, job: &str| play_in(play, job, "4194304");
    let receiver = Receiver::start(Protocol::Grpc, Wants::default(), None);
    let settings = [
        format!("hardware.recording={}", recording(&room).display()),
        format!("otlp.endpoint={}", receiver.endpoint),
        "otlp.sample_ratio=1.0".to_owned(),
        "otlp.metrics_interval_ms=1000".to_owned(),
        "prometheus.cluster=lab".to_owned(),
    ];
    let bus = nats::there("the panels and alerts of every_panel_has_data about the bus and its analysers");
    let server = bus.then(|| Nats::start(&room));
    let settings: Vec<String> = settings.into_iter().chain(server.as_ref().map(Nats::servers)).collect();
    let settings: Vec<&str> = settings.iter().flat_map(|s| ["--set", s]).collect();
    let agent = Agent::start(&room, &settings);
    let analyser = server.as_ref().map(|_| Agent::analyser(&room, &settings));
    let targets: Vec<&str> = [&agent].into_iter().chain(&analyser).map(|d| d.address.as_str()).collect();
    // As Debian's runs by default, and with what it can do besides.
    let classic = Prometheus::start(&program, &room.path("classic"), &targets, None);
    let features = Some("native-histograms,exemplar-storage");
    let native = Prometheus::start(&program, &room.path("native"), &targets, features);
    let _healthy = [
        // Slow enough for several scrapes a communicator.
        play(Play::of("mixed").speed(0.1).loops(60).hold(60), "one-node"),
        // One of two hosts, as NCCL sees it: what its ranks say goes between them.
        play(Play::of("mixed").two_node().ranks(&[0, 1]).loops(60).hold(60), "two-node"),
        // Here records are overwritten before anybody reads them.
        play_in(Play::of("mixed").two_node().ranks(&[0, 1]).loops(60).hold(60), "cramped", "16384"),
    ];

    let mut open: Vec<(&Prometheus, String, String)> = [&classic, &native]
        .into_iter()
        .flat_map(|p| queries().into_iter().chain(selected_by_rules()).map(move |(at, q)| (p, at, q)))
        .filter(|(.., q)| bus || !is_about_the_bus(q))
        .collect();
    let mut hanging: Vec<Players> = Vec::new();
    let mut firing = BTreeSet::new();
    let fires = |all: &BTreeSet<(String, String, String)>, alert: &str, job: &str, kind: &str| {
        all.contains(&(alert.to_owned(), job.to_owned(), kind.to_owned()))
    };
    let limit = Instant::now() + Duration::from_secs(120);
    while !open.is_empty()
        // A rank that is away in its own code is a warning first.
        || !["RingwatchHang", "RingwatchRankAway"].iter().any(|a| fires(&firing, a, "hangs", "missing-rank"))
        || !fires(&firing, "RingwatchHang", "differs", "mismatch")
    {
        assert!(Instant::now() < limit, "no data for {open:#?}; alerts {firing:?}");
        std::thread::sleep(Duration::from_millis(500));
        open.retain(|(p, _, q)| p.query(q).is_empty());
        firing = classic.firing();
        // What is about a hang waits for it; it comes when all else has data.
        if hanging.is_empty() && open.iter().all(|(_, at, q)| is_about_hangs(at, q)) {
            assert!(
                !firing.iter().any(|(alert, ..)| alert == "RingwatchHang"),
                "nothing hangs yet: {firing:?}"
            );
            hanging.push(play(Play::of("missing-rank").hold(120), "hangs"));
            hanging.push(play(Play::of("mismatch").hold(120), "differs"));
        }
    }
    for prometheus in [&classic, &native] {
        until("every rule is evaluated", || prometheus.broken_rules().is_empty().then_some(()));
    }
    let named = |alert: &str| firing.iter().any(|(a, ..)| a == alert);
    assert!(named("RingwatchXid") && !named("RingwatchExportsLost"), "{firing:?}");
    let healthy = |job: &str| firing.iter().any(|(a, j, _)| a == "RingwatchHang" && j == job);
    assert!(!healthy("one-node") && !healthy("two-node"), "{firing:?}");
    for alert in
        ["RingwatchSilentNode", "RingwatchClockSkew", "RingwatchNobodySpeaks", "RingwatchMessagesRefused"]
    {
        assert!(!named(alert), "{firing:?}");
    }
    // Nothing that an honest agent says is refused, but that two jobs here play one recording, with its ids.
    let twice = Refusal::Rank.as_str();
    let refused = native.query(&format!("ringwatch_analyser_refused_total{{reason!=\"{twice}\"}}"));
    assert_eq!(refused, if bus { vec![0.0; Refusal::ALL.len() - 1] } else { Vec::new() });
    assert_eq!(agent.end().1, Some(0));
    assert_eq!(analyser.map(|a| a.end().1), bus.then_some(Some(0)));
}

/// What no recording can say: how true a histogram is whose values are known.
#[tokio::test(flavor = "multi_thread")]
async fn native_histograms_are_native_and_as_true_as_their_buckets_are_narrow() {
    let test = "native_histograms_are_native_and_as_true_as_their_buckets_are_narrow";
    let Some(program) = program("prometheus", test) else { return };
    let served: Served = Arc::new((Mutex::new(Feed::new()), Instant::now()));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let target = listener.local_addr().unwrap().to_string();
    let app = axum::Router::new().route("/metrics", axum::routing::get(scraped)).with_state(served.clone());
    tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
    tokio::spawn(async move {
        loop {
            served.0.lock().unwrap().step(now_ns(served.1));
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    });
    let dir = tempfile::tempdir().unwrap();
    let classic = Prometheus::start(&program, &dir.path().join("classic"), &[&target], None);
    let features = Some("native-histograms,exemplar-storage");
    let native = Prometheus::start(&program, &dir.path().join("native"), &[&target], features);
    let quantile = |h: &str| format!("histogram_quantile(0.5, sum(rate({h}[5m])))");
    let of = quantile("ringwatch_collective_transfer_seconds");
    let median = until("a median", || Some(native.query(&of)).filter(|m| !m.is_empty()));
    assert!(median.len() == 1 && (9e-5..1.1e-4).contains(&median[0]), "{median:?}");
    let counted = "sum(ringwatch_collective_transfer_seconds_count)";
    until("a scrape", || (!classic.query(counted).is_empty()).then_some(()));
    assert_eq!(classic.query(&of), Vec::<f64>::new());
    let path = format!(
        "/api/v1/query_exemplars?query=ringwatch_collective_transfer_seconds&start={}&end={}",
        unix() - 600,
        unix() + 600
    );
    let exemplars = native.ask(&path).unwrap()["data"].to_string();
    assert!(exemplars.contains("trace_id"), "{exemplars}");
}

fn unix() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}
