//! A file of rules against NCCL's default once more: which of its rules hold.

use super::confirm::{ProofPlan, SizeEvidence, confirm};
use super::stages::BatchTiming;
use super::{Arm, Machine, SearchGoal, SearchProgress, Space};
use crate::tune::Rule;

/// One rule after the proof.
#[derive(Debug, Clone, PartialEq)]
pub struct JudgedRule {
    /// The rule.
    pub rule: Rule,
    /// Whether it stays.
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

/// Measures the rules of one operation, and judges them. Also returns every size's evidence, and notes.
///
/// # Errors
/// The machine's.
#[expect(clippy::type_complexity, reason = "three results that belong together")]
pub fn verify<M: Machine>(
    machine: &mut M,
    space: &Space,
    rules: &[Rule],
    environment: Option<u32>,
    goal: &SearchGoal,
    on: &mut dyn FnMut(&SearchProgress),
) -> Result<(Vec<JudgedRule>, Vec<(u64, SizeEvidence)>, Vec<String>), M::Error> {
    let first = |bytes: u64| rules.iter().position(|r| is_for(r, space) && contains(r, bytes));
    let by_size: Vec<Option<usize>> = space.sizes.iter().map(|s| first(*s)).collect();
    let tuned = Arm { has_tuner: true, min_channels: environment, rules: rules.to_vec() };
    let plan = ProofPlan { tuned, is_asked: by_size.iter().map(Option::is_some).collect() };
    let (evidence, is_complete, mut notes) = confirm(machine, &plan, goal, &mut BatchTiming::default(), on)?;
    if !is_complete {
        notes.push("the time limit ended measuring early; a longer one may prove more".to_owned());
    }
    let all: Vec<(u64, SizeEvidence)> = space.sizes.iter().copied().zip(evidence).collect();
    let judged = rules.iter().enumerate().map(|(i, rule)| {
        let own = all.iter().zip(&by_size).filter(|(_, first)| **first == Some(i));
        let (good, bad): (Vec<_>, Vec<_>) =
            own.map(|(e, _)| e.clone()).partition(|(_, e)| e.is_proven || e.is_guarded);
        let status = match (good.is_empty(), bad.is_empty()) {
            (_, false) => RuleStatus::Dropped(bad),
            (false, true) => RuleStatus::Proven(good),
            (true, true) => RuleStatus::NotMeasured,
        };
        JudgedRule { rule: rule.clone(), status }
    });
    Ok((judged.collect(), all, notes))
}
