//! Checks of a machine before a job runs: what is wrong for NCCL here, and how to fix it.
//!
//! A [`Check`] has a stable id and returns results, each with a status, what was seen and, unless it passes, how to fix it.
//! Checks run beside each other, each within a time limit: a driver that hangs must not hide the other results.
//! [`Host`] holds what checks read, so that tests plant a fault in a directory of their own.

mod bundle;
mod collectives;
mod elf;
mod gpus;
mod host;
mod job;
mod libraries;
mod limits;
mod network;
mod process;
mod ranks;
mod ras;
mod software;
mod variables;

pub use bundle::write as write_bundle;
pub use collectives::{Exchange, Measured, judge};
pub use host::{Host, Interface, Limits};
pub use job::{JobError, devices, run_ranks};
pub use ranks::{Difference, RankFacts, differences, together};

use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// The version of [`Report`] as JSON.
pub const SCHEMA: u32 = 1;
/// How long a check may take, unless its user says otherwise.
pub const LIMIT: Duration = Duration::from_secs(10);

/// The meaning of a result, from good to bad.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Status {
    /// There is nothing to check here; the result says why.
    Skip,
    /// All is well.
    Pass,
    /// Jobs run, but slower, or only by luck.
    Warn,
    /// Jobs fail, hang, or lose what they should do.
    Fail,
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Status::Skip => "SKIP",
            Status::Pass => "PASS",
            Status::Warn => "WARN",
            Status::Fail => "FAIL",
        })
    }
}

/// The area of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Area {
    /// Drivers, libraries, plugins and Ringwatch's own parts.
    Software,
    /// GPUs and the links between them.
    Gpus,
    /// The network between hosts.
    Network,
    /// Limits of the process, of its container and of the host; clocks.
    Limits,
    /// Variables of the environment that NCCL reads.
    Variables,
    /// Differences between the ranks of a job, and real collectives.
    Ranks,
}

impl fmt::Display for Area {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Area::Software => "Software",
            Area::Gpus => "GPUs and links",
            Area::Network => "Network",
            Area::Limits => "Limits and clocks",
            Area::Variables => "Variables",
            Area::Ranks => "Ranks",
        })
    }
}

/// One thing that a check saw.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Observation {
    /// The meaning.
    pub status: Status,
    /// The observation, with its subject.
    pub seen: String,
    /// How to fix it; absent where nothing has to be fixed.
    pub fix: Option<String>,
}

impl Observation {
    fn pass(seen: impl Into<String>) -> Self {
        Observation { status: Status::Pass, seen: seen.into(), fix: None }
    }

    fn skip(seen: impl Into<String>) -> Self {
        Observation { status: Status::Skip, seen: seen.into(), fix: None }
    }

    fn warn(seen: impl Into<String>, fix: impl Into<String>) -> Self {
        Observation { status: Status::Warn, seen: seen.into(), fix: Some(fix.into()) }
    }

    fn fail(seen: impl Into<String>, fix: impl Into<String>) -> Self {
        Observation { status: Status::Fail, seen: seen.into(), fix: Some(fix.into()) }
    }
}

/// One check.
#[derive(Debug, Clone, Copy)]
pub struct Check {
    /// Names it for good: scripts and the documentation refer to it.
    pub id: &'static str,
    /// The area.
    pub area: Area,
    run: fn(&Host) -> Vec<Observation>,
}

/// The outcome of a check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// [`Check::id`].
    pub id: String,
    /// [`Check::area`].
    pub area: Area,
    /// The worst of its results.
    pub status: Status,
    /// How long it took, in ms.
    pub took_ms: u64,
    /// Its results, worst first.
    pub results: Vec<Observation>,
}

impl Outcome {
    /// Puts results in order and sums them up.
    #[must_use]
    pub fn new(id: &str, area: Area, took: Duration, mut results: Vec<Observation>) -> Self {
        if results.is_empty() {
            results.push(Observation::skip("there is nothing to check"));
        }
        results.sort_by_key(|r| std::cmp::Reverse(r.status));
        let status = results.first().map_or(Status::Skip, |r| r.status);
        let took_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
        Outcome { id: id.to_owned(), area, status, took_ms, results }
    }
}

/// All outcomes of one host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Ringwatch's version.
    pub ringwatch_version: String,
    /// The host's name.
    pub host: String,
    /// The kernel's release.
    pub kernel: String,
    /// When the checks began, Unix time in ms.
    pub at_unix_ms: u64,
    /// One for each check, by area.
    pub outcomes: Vec<Outcome>,
}

impl Report {
    /// How many outcomes have a status.
    #[must_use]
    pub fn count(&self, status: Status) -> usize {
        self.outcomes.iter().filter(|o| o.status == status).count()
    }

    /// True if jobs fail here.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.count(Status::Fail) > 0
    }
}

/// All checks of one host, by area.
#[must_use]
pub fn checks() -> Vec<Check> {
    [software::CHECKS, gpus::CHECKS, network::CHECKS, limits::CHECKS, variables::CHECKS].concat()
}

/// Runs checks beside each other. One that takes longer than `limit` fails and is left alone.
#[must_use]
pub fn run(host: &Arc<Host>, checks: &[Check], limit: Duration) -> Report {
    let at_unix_ms = host.unix_ms();
    let begun = Instant::now();
    let (send, receive) = channel();
    for check in checks.iter().copied() {
        let (host, send) = (host.clone(), send.clone());
        let work = move || {
            let ran = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| (check.run)(&host)));
            let results = ran.unwrap_or_else(|_| {
                let fix = "it is a defect of ringwatch: report it with what stands above, and a bundle";
                vec![Observation::fail("the check itself broke off", fix)]
            });
            // Nobody receives what comes after the limit.
            send.send((check.id, begun.elapsed(), results)).ok();
        };
        let spawned = std::thread::Builder::new().name(check.id.to_owned()).spawn(work);
        if let Err(e) = spawned {
            tracing::warn!("{}: cannot start a thread: {e}", check.id);
        }
    }
    drop(send);
    let mut returned = Vec::new();
    while let Ok(one) = receive.recv_timeout(limit.saturating_sub(begun.elapsed())) {
        returned.push(one);
    }
    let outcome = |check: &Check| match returned.iter().find(|(id, ..)| *id == check.id) {
        Some((_, took, results)) => Outcome::new(check.id, check.area, *took, results.clone()),
        None => {
            let seen = format!("the check did not end within {} s", limit.as_secs());
            let fix = "something that it asks hangs (a driver, a file system, the dynamic linker): see dmesg, and \
                       processes in state D";
            Outcome::new(check.id, check.area, begun.elapsed(), vec![Observation::fail(seen, fix)])
        }
    };
    let name = rustix::system::uname();
    Report {
        schema: SCHEMA,
        ringwatch_version: env!("CARGO_PKG_VERSION").to_owned(),
        host: name.nodename().to_string_lossy().into_owned(),
        kernel: name.release().to_string_lossy().into_owned(),
        at_unix_ms,
        outcomes: checks.iter().map(outcome).collect(),
    }
}

#[cfg(test)]
mod tests;
