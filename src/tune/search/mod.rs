//! The search for rules: candidates are measured on the real machine against NCCL's default, coarse to fine.
//!
//! A [`Machine`] measures; everything here decides. The last stage measures the chosen rules once more with fresh samples,
//! since the best of many candidates looks better than it is. All rules are tested together: the probability that a search
//! writes any rule whose gain is not real is at most one less the confidence.

mod candidates;
mod confirm;
#[cfg(test)]
pub(crate) mod simulated;
mod stages;
#[cfg(test)]
mod tests;
mod verify;
mod write;

pub use candidates::candidates;
pub use confirm::{Applied, RatioSample, SizeEvidence};
pub use stages::{Expected, expected, search};
pub use verify::{JudgedRule, RuleStatus, Verified, sizes_of, verify};
pub use write::{MeasuredOn, rule_file, verified_file};

use super::{ALGORITHMS, PROTOCOLS, Range, Rule, Selection};
use std::fmt;
use std::time::Duration;

/// A rule is written only where the tuned time is below this share of the default's.
pub const GAIN_RATIO: f64 = 0.98;
/// No size may take longer than this share of the default's time.
pub const HARM_RATIO: f64 = 1.0 / 0.99;

/// One way to run an operation of one size.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct TunerChoice {
    /// Algorithm and protocol; an empty selection leaves them to NCCL.
    pub entry: Selection,
    /// Number of channels; absent for NCCL's own.
    pub channels: Option<u8>,
}

impl TunerChoice {
    /// A loaded tuner that decides nothing.
    pub const NONE: Self =
        TunerChoice { entry: Selection { algorithm: None, protocol: None }, channels: None };
}

impl fmt::Display for TunerChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::NONE {
            return f.write_str("no rule");
        }
        let name = |names: &[&'static str], i: Option<usize>| i.and_then(|i| names.get(i).copied());
        let algorithm = name(&ALGORITHMS, self.entry.algorithm).unwrap_or("any");
        let protocol = name(&PROTOCOLS, self.entry.protocol).unwrap_or("any");
        write!(f, "{algorithm}/{protocol}")?;
        match self.channels {
            Some(n) => write!(f, ", {n} channels"),
            None => Ok(()),
        }
    }
}

/// The configuration that one set of processes runs under.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Arm {
    /// True where the plugin is loaded as NCCL's tuner.
    pub has_tuner: bool,
    /// `NCCL_MIN_NCHANNELS`, where it is set.
    pub min_channels: Option<u32>,
    /// The rules; none leave everything to NCCL.
    pub rules: Vec<Rule>,
}

impl Arm {
    /// NCCL's default: no tuner, and nothing set.
    pub fn default_of_nccl() -> Self {
        Self::default()
    }
}

/// Repeats of each size in ns. Those of all arms of a round that have the same index lie side by side in time.
pub type Times = Vec<Vec<f64>>;

/// Something that measures.
pub trait Machine {
    /// An error that ends the search.
    type Error;

    /// Measures each arm with communicators of its own, in turns, `repeats` times. An arm that fails has its reason.
    ///
    /// # Errors
    /// What makes measuring impossible.
    fn round(
        &mut self,
        arms: &[Arm],
        repeats: u32,
        is_checked: bool,
    ) -> Result<Vec<Result<Times, String>>, Self::Error>;

    /// The time since the search began.
    fn elapsed(&self) -> Duration;
}

/// The space that is searched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Space {
    /// The operation, NCCL's number.
    pub collective: usize,
    /// The sizes as NCCL counts them, ascending.
    pub sizes: Vec<u64>,
    /// Candidates of each size, the most promising first.
    pub candidates: Vec<Vec<TunerChoice>>,
    /// Values of `NCCL_MIN_NCHANNELS`; absent is not set.
    pub environments: Vec<Option<u32>>,
    /// Ranks of the communicator.
    pub ranks: u32,
    /// Its nodes.
    pub nodes: u32,
}

impl Space {
    /// `1 node`, `2 nodes`.
    pub fn nodes_text(&self) -> String {
        format!("{} node{}", self.nodes, if self.nodes == 1 { "" } else { "s" })
    }

    /// A rule that holds for one size, or for a range of them.
    fn rule(&self, choice: TunerChoice, bytes: Range<u64>) -> Rule {
        let only = |n| Range { min: n, max: n };
        Rule {
            line: 0,
            collective: self.collective,
            bytes,
            ranks: only(self.ranks),
            nodes: only(self.nodes),
            is_registered: None,
            pipe_ops: None,
            choose: choice.entry,
            forbid: Vec::new(),
            channels: choice.channels,
        }
    }

    /// An arm in which each size has a choice of its own.
    fn arm(&self, environment: Option<u32>, choices: &[TunerChoice]) -> Arm {
        let of_size = |(bytes, choice): (&u64, &TunerChoice)| {
            (*choice != TunerChoice::NONE).then(|| self.rule(*choice, Range { min: *bytes, max: *bytes }))
        };
        let rules = self.sizes.iter().zip(choices).filter_map(of_size).collect();
        Arm { has_tuner: true, min_channels: environment, rules }
    }
}

/// When the search is content.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SearchGoal {
    /// The probability that no rule is written whose gain is not real, 0 to 1.
    pub confidence: f64,
    /// Operations that are searched for one file.
    pub operations: usize,
    /// The point in time, counted as [`Machine::elapsed`] does, at which measuring ends.
    pub deadline: Duration,
}

impl SearchGoal {
    /// The probability of error that the test of one size may have, of so many sizes.
    fn alpha(&self, sizes: usize) -> f64 {
        (1.0 - self.confidence) / self.operations.max(1) as f64 / sizes.max(1) as f64
    }
}

/// The parts of a search.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SearchStage {
    /// Every candidate, a few rounds.
    Coarse,
    /// The best ones of each size, and numbers of channels between theirs.
    Fine,
    /// The chosen rules against the default, with fresh samples.
    Confirm,
}

impl fmt::Display for SearchStage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SearchStage::Coarse => "coarse",
            SearchStage::Fine => "fine",
            SearchStage::Confirm => "confirm",
        })
    }
}

/// How far a search is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SearchProgress {
    /// The stage.
    pub stage: SearchStage,
    /// Batches of the stage that are measured.
    pub done: usize,
    /// Batches of the stage, at most.
    pub all: usize,
    /// The time since the search began.
    pub elapsed: Duration,
    /// The time that is expected to be left for the operation, by the batches so far.
    pub remaining: Duration,
}

/// The result of one size.
#[derive(Debug, Clone, PartialEq)]
pub struct TunedSize {
    /// The size in bytes.
    pub bytes: u64,
    /// The choice that was tested; [`TunerChoice::NONE`] where none was promising.
    pub choice: TunerChoice,
    /// How it came out.
    pub verdict: RuleVerdict,
    /// The measurements behind it.
    pub evidence: SizeEvidence,
}

/// How a choice came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RuleVerdict {
    /// The gain is proven.
    Gain,
    /// The gain of the environment alone is proven, and no rule gains more.
    Environment,
    /// Any loaded tuner makes this size slower, and the choice undoes it.
    Guard,
    /// There may be a gain, and it is not proven.
    NotProven,
    /// No candidate was promising.
    NoCandidate,
}

impl RuleVerdict {
    /// True where a rule is written.
    pub fn has_rule(self) -> bool {
        matches!(self, RuleVerdict::Gain | RuleVerdict::Guard)
    }
}

/// The result of a search for one operation.
#[derive(Debug, Clone, PartialEq)]
pub struct SearchResult {
    /// `NCCL_MIN_NCHANNELS`, where it was tested.
    pub min_channels: Option<u32>,
    /// Every size, ascending.
    pub sizes: Vec<TunedSize>,
    /// Notes for the reader: limits that were reached, candidates that failed.
    pub notes: Vec<String>,
}

impl SearchResult {
    /// The measured arm that a size runs under with the file that is written.
    pub fn applied(&self, size: &TunedSize) -> Applied {
        match size.verdict.has_rule() {
            true => Applied::Rule,
            false if self.has_rules() => Applied::OtherRules,
            false => Applied::Environment,
        }
    }

    /// Sizes that take longer with the file that is written than they may.
    pub fn harmed(&self) -> impl Iterator<Item = &TunedSize> {
        let is_harmed = |s: &&TunedSize| s.evidence.is_harmed(self.applied(s));
        self.sizes.iter().filter(|_| self.changes_anything()).filter(is_harmed)
    }

    /// True where the file that is written changes anything.
    pub fn changes_anything(&self) -> bool {
        self.has_rules() || self.written_min_channels().is_some()
    }

    /// `NCCL_MIN_NCHANNELS`, where the file asks for it.
    pub fn written_min_channels(&self) -> Option<u32> {
        let is_proven = self.sizes.iter().any(|s| s.verdict == RuleVerdict::Environment);
        self.min_channels.filter(|_| is_proven || self.has_rules())
    }

    /// True where there is a rule to write.
    pub fn has_rules(&self) -> bool {
        self.sizes.iter().any(|s| s.verdict.has_rule())
    }
}
