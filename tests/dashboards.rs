//! Dashboards and alert rules: held against the catalogue, and asked of a real Prometheus.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::disallowed_methods, reason = "these tests have servers and a clock of their own")]

mod exported;

use axum::extract::State;
use axum::http::{HeaderMap, header};
use exported::{Hand, S};
use promql_parser::parser::{self, Expr, VectorSelector};
use promql_parser::util::{ExprVisitor, walk_expr};
use ringwatch::detect::{self, Detector};
use ringwatch::export::catalogue::{self, CLUSTER, Kind, Metric, OVERFLOW};
use ringwatch::export::metrics::Exported;
use ringwatch::export::prometheus::{Metrics, Own, Settings};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

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

impl Checker {
    fn selector(&mut self, v: &VectorSelector) {
        let name = v.name.clone().unwrap_or_default();
        // A native histogram has the family's own name.
        let is = |m: &&&Metric| m.exposed().contains(&name) || (m.kind == Kind::Histogram && m.name == name);
        let Some(metric) = catalogue::ALL.iter().find(is) else {
            self.wrong.push(format!("no metric {name}"));
            return;
        };
        self.metrics.push(metric);
        for m in v.matchers.matchers.iter().chain(v.matchers.or_matchers.iter().flatten()) {
            if m.name != CLUSTER && !metric.labels.contains(&m.name.as_str()) {
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
                self.grouped.extend(a.modifier.iter().flat_map(|m| m.labels().labels.clone()));
            }
            Expr::Binary(b) => {
                let on = b.modifier.iter().filter_map(|m| m.matching.as_ref());
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
        ("sum by (job_name) (rate(ringwatch_operations_total[5m]))", vec![]),
        ("rate(ringwatch_operation_total[5m])", vec!["no metric ringwatch_operation_total"]),
        ("ringwatch_findings{job=\"x\"}", vec!["ringwatch_findings has no label job"]),
        ("sum by (gpu) (ringwatch_findings)", vec!["no metric of it has a label gpu"]),
        (
            "histogram_quantile(0.5, sum by (le) (rate(ringwatch_transfer_bucket[5m])))",
            vec!["no metric ringwatch_transfer_bucket"],
        ),
    ] {
        assert_eq!(wrong_with(query), wrong, "the check itself: {query}");
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

/// A program of Prometheus: installed, or where `.ci/run` unpacked it.
fn program(name: &str) -> Option<PathBuf> {
    let unpacked = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/prometheus/usr/bin").join(name);
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::iter::once(unpacked).chain(std::env::split_paths(&path).map(|p| p.join(name))).find(|p| p.is_file())
}

#[test]
fn promtool_accepts_the_rules_their_tests_and_the_metrics() {
    let Some(promtool) = program("promtool") else {
        eprintln!("SKIPPED promtool_accepts_the_rules_their_tests_and_the_metrics: no promtool; see .ci/run");
        return;
    };
    for args in [["check", "rules", "rules.yaml"], ["test", "rules", "rules_test.yaml"]] {
        let out = Command::new(&promtool).args(args).current_dir(folder()).output().unwrap();
        let text = String::from_utf8_lossy(&out.stdout) + String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success(), "{text}");
    }
    let mut feed = Feed::new();
    feed.step(20 * S);
    feed.step(21 * S);
    let body = feed.answer(21 * S, Some("text/plain")).1;
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

/// A job that goes on, and what is served of it. An agent takes its place when there is one.
struct Feed {
    hand: Hand,
    metrics: Metrics,
    detector: Detector,
    hang: bool,
    hung: bool,
    steps: u64,
}

impl Feed {
    fn new() -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        Feed {
            hand: Hand::since(4, now.as_nanos() as u64 - 20 * S),
            metrics: Metrics::new(Settings { cluster: Some("lab".into()), ..Settings::default() }),
            detector: Detector::new(detect::Settings::default()),
            hang: false,
            hung: false,
            steps: 0,
        }
    }

    /// Goes on by one step: an operation, every fifth with a late rank, until there is to be a hang.
    fn step(&mut self, now_ns: u64) {
        self.steps += 1;
        if self.hang && !self.hung {
            self.hand.stuck(now_ns, 3);
            self.hung = true;
        }
        if !self.hung {
            self.hand.untimed(now_ns - 60_000_000);
            self.hand.round(now_ns - 50_000_000, self.steps.is_multiple_of(5).then_some((2, 20_000_000)));
        }
        self.hand.hardware(now_ns);
        if self.steps == 3 {
            self.hand.xid(now_ns, 3, 79);
        }
        self.hand.join.tick(now_ns);
        let new = self.detector.check(&self.hand.join, now_ns);
        self.metrics.findings(&self.hand.join, &new);
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
            started_unix_ns: exported::EPOCH_NS,
            polls: self.steps,
            poll_seconds: self.steps as f64 * 1e-4,
            exported: vec![Exported {
                signal: "spans",
                sent: self.steps,
                queued: 0,
                lost: [("the queue was full", 0)].into(),
            }],
        };
        let open = self.detector.findings();
        self.metrics.render(&self.hand.join, &open, &own, accept).unwrap()
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

/// A Prometheus that ends with the test.
struct Prometheus {
    child: Child,
    port: u16,
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

impl Prometheus {
    fn start(program: &Path, dir: &Path, target: u16, features: Option<&str>) -> Self {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        std::fs::create_dir_all(dir).unwrap();
        let rules = folder().join("rules.yaml");
        let config = format!(
            "global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: ['{}']\nscrape_configs:\n\
             - {{job_name: ringwatch, static_configs: [{{targets: ['127.0.0.1:{target}']}}]}}\n",
            rules.display()
        );
        std::fs::write(dir.join("prometheus.yml"), config).unwrap();
        let log = std::fs::File::create(dir.join("log")).unwrap();
        let child = Command::new(program)
            .arg(format!("--config.file={}", dir.join("prometheus.yml").display()))
            .arg(format!("--storage.tsdb.path={}", dir.join("data").display()))
            .arg(format!("--web.listen-address=127.0.0.1:{port}"))
            .args(features.map(|f| format!("--enable-feature={f}")))
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        Prometheus { child, port }
    }

    /// Asks its API; nothing while it is not there yet.
    async fn ask(&self, path: &str) -> Option<Value> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).await.ok()?;
        let request = format!("GET {path} HTTP/1.0\r\nhost: localhost\r\n\r\n");
        stream.write_all(request.as_bytes()).await.ok()?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.ok()?;
        let answer = String::from_utf8(answer).ok()?;
        let (head, body) = answer.split_once("\r\n\r\n")?;
        assert!(!head.contains(" 400 "), "{path}: {body}");
        serde_json::from_str(body).ok()
    }

    /// The values of an instant query that are numbers.
    async fn query(&self, query: &str) -> Vec<f64> {
        let encoded: String = query.bytes().map(|b| format!("%{b:02x}")).collect();
        let answer = self.ask(&format!("/api/v1/query?query={encoded}")).await;
        let result = answer.and_then(|a| a["data"]["result"].as_array().cloned()).unwrap_or_default();
        let number = |s: &Value| s["value"][1].as_str()?.parse::<f64>().ok().filter(|v| !v.is_nan());
        result.iter().filter_map(number).collect()
    }

    /// The alerts that fire.
    async fn firing(&self) -> BTreeSet<String> {
        let answer = self.ask("/api/v1/alerts").await;
        let alerts = answer.and_then(|a| a["data"]["alerts"].as_array().cloned()).unwrap_or_default();
        let firing = alerts.iter().filter(|a| a["state"] == "firing");
        firing.map(|a| a["labels"]["alertname"].as_str().unwrap().to_owned()).collect()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_panel_has_data_and_the_planted_hang_fires_its_alert() {
    let Some(program) = program("prometheus") else {
        eprintln!(
            "SKIPPED every_panel_has_data_and_the_planted_hang_fires_its_alert: no prometheus; see .ci/run"
        );
        return;
    };
    let served: Served = Arc::new((Mutex::new(Feed::new()), Instant::now()));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let target = listener.local_addr().unwrap().port();
    let app = axum::Router::new().route("/metrics", axum::routing::get(scraped)).with_state(served.clone());
    tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
    let of = served.clone();
    tokio::spawn(async move {
        loop {
            of.0.lock().unwrap().step(now_ns(of.1));
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    });
    let dir = tempfile::tempdir().unwrap();
    // As Debian's runs by default, and with what it can do besides.
    let classic = Prometheus::start(&program, &dir.path().join("classic"), target, None);
    let features = Some("native-histograms,exemplar-storage");
    let native = Prometheus::start(&program, &dir.path().join("native"), target, features);

    let limit = Instant::now() + Duration::from_secs(120);
    let late = || Instant::now() > limit;
    let mut open: Vec<(bool, String, String)> = [false, true]
        .into_iter()
        .flat_map(|n| queries().into_iter().map(move |(at, q)| (n, at, q)))
        .collect();
    let mut alerts = BTreeSet::new();
    while !open.is_empty() || !alerts.contains("RingwatchHang") {
        assert!(!late(), "no data for {open:#?}; alerts {alerts:?}");
        tokio::time::sleep(Duration::from_millis(500)).await;
        let mut rest = Vec::new();
        for (n, at, q) in open {
            let prometheus = if n { &native } else { &classic };
            if prometheus.query(&q).await.is_empty() {
                rest.push((n, at, q));
            }
        }
        open = rest;
        alerts = classic.firing().await;
        // What is about a hang waits for it; it comes when all else has data.
        let hung = served.0.lock().unwrap().hung;
        if !hung && open.iter().all(|(_, at, _)| at.contains("inding") || at.contains("oldest")) {
            assert!(!alerts.contains("RingwatchHang"), "nothing hangs yet");
            served.0.lock().unwrap().hang = true;
        }
    }
    assert!(alerts.contains("RingwatchXid"), "{alerts:?}");
    assert!(!alerts.contains("RingwatchExportsLost"), "{alerts:?}");

    // Native histograms are native, and as true as their buckets are narrow.
    let quantile = |h: &str| format!("histogram_quantile(0.5, sum(rate({h}[5m])))");
    let median = native.query(&quantile("ringwatch_collective_transfer_seconds")).await;
    assert!(median.len() == 1 && (9e-5..1.1e-4).contains(&median[0]), "{median:?}");
    assert_eq!(classic.query(&quantile("ringwatch_collective_transfer_seconds")).await, Vec::<f64>::new());
    let path = format!(
        "/api/v1/query_exemplars?query=ringwatch_collective_transfer_seconds&start={}&end={}",
        unix() - 600,
        unix() + 600
    );
    let exemplars = native.ask(&path).await.unwrap()["data"].to_string();
    assert!(exemplars.contains("trace_id"), "{exemplars}");

    // Prometheus is killed and comes back with nothing: the counters still say all.
    drop(classic);
    let again = Prometheus::start(&program, &dir.path().join("again"), target, None);
    let mut counted = again.query("sum(ringwatch_operations_total)").await;
    while counted.is_empty() {
        assert!(!late(), "Prometheus does not come back");
        tokio::time::sleep(Duration::from_millis(200)).await;
        counted = again.query("sum(ringwatch_operations_total)").await;
    }
    let was = native.query("sum(ringwatch_operations_total)").await;
    assert_eq!(counted, was);
}

fn unix() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}
