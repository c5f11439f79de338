//! `ringwatch demo`: a recorded job through the real plugin, in real processes.

use super::{block_on, top};
use crate::bundle;
use crate::cli::{Demo, Scenario};
use crate::detect::Settings;
use crate::ingest::{Segments, now_ns};
use crate::replay;
use crate::report;
use crate::runtime::Monitor;
use anyhow::{Context, bail};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Long enough for every recording, and for a rank to count as missing after it.
const HEADLESS_SECONDS: u32 = 7;
/// On a machine that is busy otherwise players come late: so long nothing new is seen of them before it is over, and so
/// long it takes at most.
const QUIET: Duration = Duration::from_secs(4);
const HEADLESS_MOST: Duration = Duration::from_secs(60);
/// The processes are started this long before the recording begins.
const LEAD: Duration = Duration::from_millis(400);
/// How often segments are read.
const STEP: Duration = Duration::from_millis(20);

/// The processes of a replayed job. They end with this value.
struct Players {
    children: Vec<Child>,
}

impl Drop for Players {
    fn drop(&mut self) {
        for c in &mut self.children {
            // Gone already is fine: it is the end that is wanted.
            if c.kill().is_ok() || c.try_wait().is_ok() {
                c.wait().ok();
            }
        }
    }
}

impl Players {
    fn start(o: &Demo, plugin: &Path, segments: &Path, seconds: u32) -> anyhow::Result<Self> {
        let exe = std::env::current_exe().context("cannot find ringwatch's own program to start players")?;
        let ranks = replay::fixture(o.scenario.into(), o.two_node).ranks.len();
        let start_at = now_ns() + u64::try_from(LEAD.as_nanos()).unwrap_or(0);
        let mut players = Players { children: Vec::new() };
        for rank in 0..ranks {
            let mut command = Command::new(&exe);
            let scenario: replay::Scenario = o.scenario.into();
            command
                .args(["replay", "--scenario", scenario.as_str(), "--rank", &rank.to_string()])
                .args(["--start-at", &start_at.to_string(), "--hold", &seconds.to_string()])
                .arg("--plugin")
                .arg(plugin)
                .env("RINGWATCH_DIR", segments)
                .env("RINGWATCH_JOB", format!("demo-{}", scenario.as_str()))
                .env("RANK", rank.to_string())
                .env("WORLD_SIZE", ranks.to_string())
                .stdin(Stdio::null())
                .stdout(Stdio::null());
            if o.two_node {
                command.arg("--two-node");
            }
            // On a wall the healthy job goes round and round.
            if !o.headless && o.scenario == Scenario::Mixed {
                command.args(["--loops", "100000"]);
            }
            players.children.push(command.spawn().context("cannot start a player process")?);
        }
        Ok(players)
    }

    /// Fails when a player ended before its time.
    fn check(&mut self) -> anyhow::Result<()> {
        for (rank, c) in self.children.iter_mut().enumerate() {
            if let Some(status) = c.try_wait()?
                && !status.success()
            {
                bail!("the player of rank {rank} ended with {status}; its error stands above");
            }
        }
        Ok(())
    }
}

fn scratch() -> anyhow::Result<tempfile::TempDir> {
    let shm = PathBuf::from("/dev/shm");
    let base = if shm.is_dir() { shm } else { std::env::temp_dir() };
    tempfile::Builder::new()
        .prefix("ringwatch-demo-")
        .tempdir_in(&base)
        .or_else(|_| tempfile::tempdir())
        .with_context(|| format!("cannot make a directory in {} or the temporary directory", base.display()))
}

/// Collectives that the players have issued so far, together.
fn issued(monitor: &Monitor<Segments>) -> u64 {
    let members = monitor.join().communicators().flat_map(|c| c.members().values());
    members.map(|m| m.record.issued + m.record.replayed).sum()
}

pub(super) fn run(o: &Demo) -> anyhow::Result<u8> {
    let segments = scratch()?;
    // /dev/shm is often mounted noexec, so the plugin lies elsewhere.
    let library = tempfile::tempdir().context("cannot make a temporary directory for the plugin")?;
    let plugin = bundle::install(library.path())?;
    let seconds = o.seconds.unwrap_or(if o.headless { HEADLESS_SECONDS } else { 86_400 });
    let mut players = Players::start(o, &plugin, segments.path(), seconds)?;
    let mut monitor = Monitor::new(super::own_segments(segments.path().to_owned()), Settings::default());
    let until = Instant::now() + LEAD + Duration::from_secs(u64::from(seconds));
    if !o.headless {
        return block_on(top::watch(
            top::Shown::Here(Box::new(monitor)),
            Some(until),
            "a recorded job on 4 x H200, replayed",
        ));
    }
    let (mut seen, mut moved, most) = (0, Instant::now(), Instant::now() + HEADLESS_MOST);
    loop {
        monitor.step(now_ns());
        players.check()?;
        let now = Instant::now();
        let issued = issued(&monitor);
        if issued != seen {
            (seen, moved) = (issued, now);
        }
        let quiet = o.seconds.is_some() || now >= most || seen > 0 && now >= moved + QUIET;
        if now >= until && quiet {
            break;
        }
        std::thread::sleep(STEP);
    }
    monitor.step(now_ns());
    drop(players);
    let mut out = io::stdout().lock();
    let findings = monitor.findings();
    if o.json {
        report::json(&mut out, &findings)?;
    } else {
        report::text(&mut out, &findings)?;
    }
    out.flush()?;
    Ok(0)
}
