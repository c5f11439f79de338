//! Targets: latencies and bandwidths that operations should reach, from a file that people write in YAML.
//!
//! A file is read whole and checked before anything is measured; every error names the file, the line and the remedy.

mod judge;
#[cfg(test)]
mod tests;
mod units;
mod yaml;

pub use judge::{Judgement, Link, TargetRow, Verdict, judge};

use super::op::{Collective, DType};
use super::result::Settings;
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Longest file of targets that is read, in bytes.
const TEXT_MAX: u64 = 1 << 20;
/// The most ranks for which a target that does not name their number serves detection.
const RANKS_MAX: u32 = 1024;

/// An error in a file of targets.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    /// The file cannot be read.
    #[error("cannot read targets from {}: {why}; config/targets.yaml is a sample", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        why: io::Error,
    },
    /// The targets are not what they should be.
    #[error("{origin}:{line}: {why}")]
    Target {
        /// The file.
        origin: String,
        /// The line, from 1.
        line: usize,
        /// The error, and the remedy.
        why: String,
    },
}

/// Numbers from the first to the last, both included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// The first.
    pub min: u32,
    /// The last.
    pub max: u32,
}

impl Span {
    /// True for a number in it.
    #[must_use]
    pub fn contains(self, number: u32) -> bool {
        (self.min..=self.max).contains(&number)
    }
}

impl std::fmt::Display for Span {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.min == self.max { write!(f, "{}", self.min) } else { write!(f, "{}-{}", self.min, self.max) }
    }
}

/// One thing that is asked of a measurement.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Goal {
    /// The operation takes at most so long.
    MaxLatency {
        /// Time of one operation in ns.
        ns: f64,
    },
    /// The operation is expected to take about so long: at most longer by the tolerance. Faster is no miss.
    AboutLatency {
        /// Time of one operation in ns.
        ns: f64,
        /// A share of the time.
        tolerance: f64,
    },
    /// The algorithm bandwidth is at least this.
    MinAlgbw {
        /// 10^9 bytes a second.
        gb_per_s: f64,
    },
    /// The bus bandwidth is at least this.
    MinBusbw {
        /// 10^9 bytes a second.
        gb_per_s: f64,
    },
    /// The bus bandwidth is at least this share of the link.
    MinLinkShare {
        /// 0.9 is 90 %.
        share: f64,
    },
}

impl Goal {
    /// The time that it lets expect, in ns; `None` where it is about bandwidth.
    fn expected_ns(self) -> Option<f64> {
        match self {
            Self::MaxLatency { ns } | Self::AboutLatency { ns, .. } => Some(ns),
            _ => None,
        }
    }
}

/// The target of one operation at one size.
#[derive(Debug, Clone, PartialEq)]
pub struct Target {
    /// The line that it begins in, from 1.
    pub line: usize,
    /// The operation.
    pub collective: Collective,
    /// The size in bytes, as nccl-tests counts it.
    pub size_bytes: u64,
    /// The element type.
    pub dtype: DType,
    /// Numbers of ranks; absent for any.
    pub ranks: Option<Span>,
    /// Numbers of nodes; absent for any.
    pub nodes: Option<Span>,
    /// At least one.
    pub goals: Vec<Goal>,
}

impl Target {
    /// Why it says nothing about a run of so many ranks and nodes; `None` where it does. Nodes are not looked at where
    /// their number is not known.
    #[must_use]
    pub fn why_skipped(&self, ranks: u32, nodes: Option<u32>) -> Option<String> {
        if let Some(span) = self.ranks.filter(|s| !s.contains(ranks)) {
            return Some(format!("for {span} ranks; this run has {ranks}"));
        }
        if let Some((span, nodes)) = self.nodes.zip(nodes).filter(|(s, n)| !s.contains(*n)) {
            return Some(format!("for {span} nodes; this run has {nodes}"));
        }
        if self.collective.shape(self.size_bytes, self.dtype, ranks).is_none() {
            return Some(format!("too small for {} on {ranks} ranks", self.dtype));
        }
        None
    }
}

/// A time that detection may expect.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Expectation {
    /// The operation.
    pub collective: Collective,
    /// Ranks that take part.
    pub ranks: u32,
    /// The size in bytes.
    pub size_bytes: u64,
    /// Time of one operation in ns.
    pub time_ns: f64,
}

/// The targets of one file, checked.
#[derive(Debug, Clone, PartialEq)]
pub struct Targets {
    origin: String,
    /// The bandwidth of a GPU's link in one direction, in 10^9 bytes a second, where the file states it.
    pub link_gb_per_s: Option<f64>,
    all: Vec<Target>,
}

impl Targets {
    /// Reads a file.
    ///
    /// # Errors
    /// The first error, with file and line.
    pub fn load(path: &Path) -> Result<Self, TargetError> {
        let read = |why| TargetError::Read { path: path.to_owned(), why };
        let mut text = String::new();
        // A device has no length of its own.
        let file = fs::File::open(path).map_err(read)?;
        let length = file.take(TEXT_MAX + 1).read_to_string(&mut text).map_err(read)?;
        if length as u64 > TEXT_MAX {
            return Err(read(io::Error::other(format!(
                "longer than {TEXT_MAX} bytes, too long for targets"
            ))));
        }
        Self::from_yaml(&text, &path.display().to_string())
    }

    /// Reads YAML. `origin` names it in errors.
    ///
    /// # Errors
    /// The first error, with the line.
    pub fn from_yaml(text: &str, origin: &str) -> Result<Self, TargetError> {
        let origin = origin.to_owned();
        match yaml::read(text) {
            Ok(file) => Ok(Targets { origin, link_gb_per_s: file.link_gb_per_s, all: file.targets }),
            Err(yaml::Fault { line, why }) => Err(TargetError::Target { origin, line, why }),
        }
    }

    /// The file's name.
    #[must_use]
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// The targets, in order.
    #[must_use]
    pub fn all(&self) -> &[Target] {
        &self.all
    }

    /// The runs that measure what the targets need: one for each operation and element type. Targets for other numbers
    /// of ranks or nodes need none. `base` has everything but the operation, the type and the sizes.
    #[must_use]
    pub fn plan(&self, base: &Settings, ranks: u32, nodes: Option<u32>) -> Vec<Settings> {
        let mut runs: Vec<Settings> = Vec::new();
        for t in self.all.iter().filter(|t| t.why_skipped(ranks, nodes).is_none()) {
            let same = |s: &&mut Settings| s.collective == t.collective && s.dtype == t.dtype;
            match runs.iter_mut().find(same) {
                Some(run) => run.sizes.push(t.size_bytes),
                None => runs.push(Settings {
                    collective: t.collective,
                    dtype: t.dtype,
                    sizes: vec![t.size_bytes],
                    ..base.clone()
                }),
            }
        }
        for run in &mut runs {
            run.sizes.sort_unstable();
            run.sizes.dedup();
            run.min_bytes = run.sizes.first().copied().unwrap_or_default();
            run.max_bytes = run.sizes.last().copied().unwrap_or_default();
        }
        runs
    }

    /// The expectations for detection by the targets of latency: the time that a target states, of several for the same
    /// operation the longest. A target without `ranks` stands for 2 to 1,024 ranks. One with `nodes` is left out, since
    /// detection does not compare by nodes.
    #[must_use]
    pub fn expectations(&self) -> Vec<Expectation> {
        let mut all = std::collections::BTreeMap::new();
        for t in self.all.iter().filter(|t| t.nodes.is_none()) {
            // An expected time is nearer to what is normal than a limit.
            let about = t.goals.iter().filter(|g| matches!(g, Goal::AboutLatency { .. }));
            let Some(time_ns) = about.chain(&t.goals).find_map(|g| g.expected_ns()) else { continue };
            let span = t.ranks.unwrap_or(Span { min: 2, max: RANKS_MAX });
            for ranks in span.min..=span.max.min(span.min.saturating_add(RANKS_MAX)) {
                let longest = all.entry((t.collective.as_str(), t.size_bytes, ranks)).or_insert((t, time_ns));
                longest.1 = longest.1.max(time_ns);
            }
        }
        all.into_iter()
            .map(|((_, size_bytes, ranks), (t, time_ns))| Expectation {
                collective: t.collective,
                ranks,
                size_bytes,
                time_ns,
            })
            .collect()
    }
}
