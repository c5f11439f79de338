//! A real Prometheus, installed or where `.ci/run` unpacked it.

use serde_json::Value;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// A program of Prometheus; `None` where it is not there, and the test counts as
/// skipped.
pub(crate) fn program(name: &str, test: &str) -> Option<PathBuf> {
    let unpacked = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/prometheus/usr/bin").join(name);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut all = std::iter::once(unpacked).chain(std::env::split_paths(&path).map(|p| p.join(name)));
    let found = all.find(|p| p.is_file());
    if found.is_none() {
        super::skipped(test, &format!("{name} (apt install prometheus)"));
    }
    found
}

/// A Prometheus that ends with the test.
#[derive(Debug)]
pub(crate) struct Prometheus {
    child: Child,
    port: u16,
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

impl Prometheus {
    /// One that keeps its data in a directory, goes by the rules that come with the program, and scrapes addresses
    /// every second.
    pub(crate) fn start(program: &Path, dir: &Path, targets: &[&str], features: Option<&str>) -> Self {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("an address").port();
        drop(listener);
        fs::create_dir_all(dir).expect("a directory");
        let rules = Path::new(env!("CARGO_MANIFEST_DIR")).join("dashboards/rules.yaml");
        let targets = targets.iter().map(|t| format!("'{t}'")).collect::<Vec<_>>().join(", ");
        let config = format!(
            "global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: ['{}']\nscrape_configs:\n\
             - {{job_name: ringwatch, static_configs: [{{targets: [{targets}]}}]}}\n",
            rules.display()
        );
        fs::write(dir.join("prometheus.yml"), config).expect("a file");
        let log = File::create(dir.join("log")).expect("a file");
        let child = Command::new(program)
            .arg(format!("--config.file={}", dir.join("prometheus.yml").display()))
            .arg(format!("--storage.tsdb.path={}", dir.join("data").display()))
            .arg(format!("--web.listen-address=127.0.0.1:{port}"))
            .args(features.map(|f| format!("--enable-feature={f}")))
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a file"))
            .stderr(log)
            .spawn()
            .expect("Prometheus starts");
        Prometheus { child, port }
    }

    /// Asks its API; nothing while it is not there yet.
    pub(crate) fn ask(&self, path: &str) -> Option<Value> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).ok()?;
        write!(stream, "GET {path} HTTP/1.0\r\nhost: localhost\r\n\r\n").ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        let (head, body) = answer.split_once("\r\n\r\n")?;
        assert!(!head.contains(" 400 "), "{path}: {body}");
        serde_json::from_str(body).ok()
    }

    /// The values of an instant query that are numbers.
    pub(crate) fn query(&self, query: &str) -> Vec<f64> {
        self.query_at(query, None)
    }

    /// The same as of a moment, in seconds since the epoch, or of now.
    pub(crate) fn query_at(&self, query: &str, unix: Option<f64>) -> Vec<f64> {
        let more = unix.map_or_else(String::new, |t| format!("&time={t:.3}"));
        let encoded: String = query.bytes().map(|b| format!("%{b:02x}")).collect();
        let answer = self.ask(&format!("/api/v1/query?query={encoded}{more}"));
        let result = answer.and_then(|a| a["data"]["result"].as_array().cloned()).unwrap_or_default();
        let number = |s: &Value| s["value"][1].as_str()?.parse::<f64>().ok().filter(|v| !v.is_nan());
        result.iter().filter_map(number).collect()
    }

    /// The rules that could not be evaluated, and why; those that were not yet are among them.
    pub(crate) fn broken_rules(&self) -> Vec<String> {
        let answer = self.ask("/api/v1/rules").unwrap_or_default();
        let groups = answer["data"]["groups"].as_array().cloned().unwrap_or_default();
        let rules: Vec<Value> =
            groups.iter().flat_map(|g| g["rules"].as_array().cloned().unwrap_or_default()).collect();
        if rules.is_empty() {
            return vec!["no rule is there yet".to_owned()];
        }
        let broken = rules.iter().filter(|r| r["health"] != "ok");
        broken.map(|r| format!("{}: {} {}", r["name"], r["health"], r["lastError"])).collect()
    }

    /// The alerts that fire: their names, and what of their labels is a job or a kind.
    pub(crate) fn firing(&self) -> BTreeSet<(String, String, String)> {
        let answer = self.ask("/api/v1/alerts");
        let alerts = answer.and_then(|a| a["data"]["alerts"].as_array().cloned()).unwrap_or_default();
        let of = |a: &Value| {
            let label = |name: &str| a["labels"][name].as_str().unwrap_or_default().to_owned();
            (label("alertname"), label("job_name"), label("kind"))
        };
        alerts.iter().filter(|a| a["state"] == "firing").map(of).collect()
    }
}
