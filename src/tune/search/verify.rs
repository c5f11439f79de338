//! A file of rules against NCCL's default once more: which of its rules hold.

use super::confirm::{Contest, Evidence, confirm};
use super::stages::Pace;
use super::{Arm, Goal, Machine, Progress, Space};
use crate::tune::Rule;

/// One rule after the proof.
#[derive(Debug, Clone, PartialEq)]
pub struct Judged {
    /// The rule.
    pub rule: Rule,
    /// Whether it stays.
    pub kept: Kept,
}

/// Why a rule stays or goes.
#[derive(Debug, Clone, PartialEq)]
pub enum Kept {
    /// Its gain is proven at every size that was measured.
    Proven(Vec<(u64, Evidence)>),
    /// It is not proven at the first of these sizes.
    Dropped(Vec<(u64, Evidence)>),
    /// Nothing that was measured is for it.
    NotMeasured,
}

impl Kept {
    /// True where the rule stays in the file.
    pub fn is_kept(&self) -> bool {
        !matches!(self, Kept::Dropped(_))
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
    goal: &Goal,
    on: &mut dyn FnMut(&Progress),
) -> Result<(Vec<Judged>, Vec<(u64, Evidence)>, Vec<String>), M::Error> {
    let first = |bytes: u64| rules.iter().position(|r| is_for(r, space) && contains(r, bytes));
    let by_size: Vec<Option<usize>> = space.sizes.iter().map(|s| first(*s)).collect();
    let tuned = Arm { has_tuner: true, min_channels: environment, rules: rules.to_vec() };
    let contest = Contest { tuned, is_asked: by_size.iter().map(Option::is_some).collect() };
    let (evidence, is_complete, mut notes) = confirm(machine, &contest, goal, &mut Pace::default(), on)?;
    if !is_complete {
        notes.push("the time limit ended measuring early; a longer one may prove more".to_owned());
    }
    let all: Vec<(u64, Evidence)> = space.sizes.iter().copied().zip(evidence).collect();
    let judged = rules.iter().enumerate().map(|(i, rule)| {
        let own = all.iter().zip(&by_size).filter(|(_, first)| **first == Some(i));
        let (good, bad): (Vec<_>, Vec<_>) =
            own.map(|(e, _)| e.clone()).partition(|(_, e)| e.is_proven || e.is_guarded);
        let kept = match (good.is_empty(), bad.is_empty()) {
            (_, false) => Kept::Dropped(bad),
            (false, true) => Kept::Proven(good),
            (true, true) => Kept::NotMeasured,
        };
        Judged { rule: rule.clone(), kept }
    });
    Ok((judged.collect(), all, notes))
}
