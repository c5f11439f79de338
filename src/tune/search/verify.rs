//! A file of rules against NCCL's default once more: which of its rules hold.

use super::confirm::{Applied, ProofPlan, Question, SizeEvidence, confirm};
use super::stages::BatchTiming;
use super::{Arm, Machine, SearchGoal, SearchProgress, Space};
use crate::tune::Rule;

/// One rule after the proof.
#[derive(Debug, Clone, PartialEq)]
pub struct JudgedRule {
    /// The rule.
    pub rule: Rule,
    /// The decision about it.
    pub status: RuleStatus,
}

/// Why a rule stays or goes.
#[derive(Debug, Clone, PartialEq)]
pub enum RuleStatus {
    /// Its gain is proven at every size that was measured.
    Proven(Vec<(u64, SizeEvidence)>),
    /// It is not proven at the first of these sizes.
    Dropped(Vec<(u64, SizeEvidence)>),
    /// Nothing that was measured is for it.
    NotMeasured,
}

impl RuleStatus {
    /// True where the rule stays in the file.
    pub fn has_rule(&self) -> bool {
        !matches!(self, RuleStatus::Dropped(_))
    }
}

/// The verification of one operation.
#[derive(Debug, Clone, PartialEq)]
pub struct Verified {
    /// `NCCL_MIN_NCHANNELS`, where the file asks for it.
    pub min_channels: Option<u32>,
    /// All rules of the file.
    pub judged: Vec<JudgedRule>,
    /// Every size, ascending, with the place of the rule that is for it.
    pub sizes: Vec<(u64, SizeEvidence, Option<usize>)>,
    /// Notes for the reader.
    pub notes: Vec<String>,
}

impl Verified {
    /// Sizes without a rule of which the gain of the environment alone is proven.
    pub fn gains_alone(&self) -> impl Iterator<Item = (u64, &SizeEvidence)> {
        self.sizes.iter().filter(|(_, e, rule)| rule.is_none() && e.is_proven).map(|(b, e, _)| (*b, e))
    }

    /// The rule of a size, if it stays.
    fn kept(&self, rule: Option<usize>) -> bool {
        rule.and_then(|i| self.judged.get(i)).is_some_and(|j| j.status.has_rule())
    }

    /// The measured arm that a size runs under with what stays of the file.
    pub fn applied(&self, rule: Option<usize>) -> Applied {
        match self.kept(rule) {
            true => Applied::Rule,
            false if self.sizes.iter().any(|(.., rule)| self.kept(*rule)) => Applied::OtherRules,
            false => Applied::Environment,
        }
    }

    /// Sizes that take longer than they may.
    pub fn harmed(&self) -> impl Iterator<Item = (u64, &SizeEvidence, Applied)> {
        let with = self.sizes.iter().map(|(b, e, rule)| (*b, e, self.applied(*rule)));
        with.filter(|(_, e, applied)| e.is_harmed(*applied))
    }
}

/// The sizes at which to measure: those asked for, and for each rule without one of them the middle of its range.
pub fn sizes_of(rules: &[Rule], space: &Space) -> Vec<u64> {
    let mut sizes = space.sizes.clone();
    for rule in rules.iter().filter(|r| is_for(r, space)) {
        if !sizes.iter().any(|s| contains(rule, *s)) {
            let (min, max) = (rule.bytes.min.max(1024), rule.bytes.max.min(1 << 30));
            let middle = ((min as f64) * (max as f64)).sqrt() as u64 / 1024 * 1024;
            if contains(rule, middle) {
                sizes.push(middle);
            }
        }
    }
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

fn is_for(rule: &Rule, space: &Space) -> bool {
    let holds = |r: crate::tune::Range<u32>, n: u32| (r.min..=r.max).contains(&n);
    rule.collective == space.collective
        && holds(rule.ranks, space.ranks)
        && holds(rule.nodes, space.nodes)
        && rule.is_registered != Some(true)
        && rule.pipe_ops.is_none_or(|n| n == 1)
}

fn contains(rule: &Rule, bytes: u64) -> bool {
    (rule.bytes.min..=rule.bytes.max).contains(&bytes)
}

/// Measures the rules of one operation, and judges them.
///
/// # Errors
/// The machine's.
pub fn verify<M: Machine>(
    machine: &mut M,
    space: &Space,
    rules: &[Rule],
    environment: Option<u32>,
    goal: &SearchGoal,
    on: &mut dyn FnMut(&SearchProgress),
) -> Result<Verified, M::Error> {
    let first = |bytes: u64| rules.iter().position(|r| is_for(r, space) && contains(r, bytes));
    let by_size: Vec<Option<usize>> = space.sizes.iter().map(|s| first(*s)).collect();
    let tuned = Arm { has_tuner: true, min_channels: environment, rules: rules.to_vec() };
    let question = |rule: &Option<usize>| match rule {
        Some(_) => Question::Rule,
        None if environment.is_some() => Question::Environment,
        None => Question::None,
    };
    let plan = ProofPlan { tuned, questions: by_size.iter().map(question).collect() };
    let (evidence, is_complete, mut notes) = confirm(machine, &plan, goal, &mut BatchTiming::default(), on)?;
    if !is_complete {
        notes.push("the time limit ended measuring early; a longer one may prove more".to_owned());
    }
    let sizes = space.sizes.iter().copied().zip(evidence).zip(by_size).map(|((b, e), rule)| (b, e, rule));
    let sizes: Vec<(u64, SizeEvidence, Option<usize>)> = sizes.collect();
    let judged = rules.iter().enumerate().map(|(i, rule)| {
        let own = sizes.iter().filter(|(.., own)| *own == Some(i)).map(|(b, e, _)| (*b, e.clone()));
        let (good, bad): (Vec<_>, Vec<_>) = own.partition(|(_, e)| e.is_proven || e.is_guarded);
        let status = match (good.is_empty(), bad.is_empty()) {
            (_, false) => RuleStatus::Dropped(bad),
            (false, true) => RuleStatus::Proven(good),
            (true, true) => RuleStatus::NotMeasured,
        };
        JudgedRule { rule: rule.clone(), status }
    });
    Ok(Verified { min_channels: environment, judged: judged.collect(), sizes, notes })
}
