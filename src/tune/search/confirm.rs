//! Arms against NCCL's default in many rounds, until it is decided which sizes they make faster.

use super::{Arm, GAIN_RATIO, HARM_RATIO, Machine, SearchGoal, SearchProgress, SearchStage, Times};
use crate::bench::median;
use crate::bench::signed_rank::{bounds, rounds_min};
use crate::tune::search::stages::BatchTiming;

/// Repeats of each size in a round.
const REPEATS: u32 = 5;
/// How often the ratios are tested. Each test has an equal part of the probability of error.
const INTERIM_TESTS: usize = 2;
/// A choice whose median ratio is above this is given up after the first test.
const HOPELESS: f64 = 0.99;
/// The probability of error for harm, at each size. It is reported rather than missed.
const HARM_ALPHA: f64 = 0.05;

/// The rounds of one arm at one size.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RatioSample {
    /// The arm's median time of each round, in ns.
    pub times_ns: Vec<f64>,
    /// The median of the ratios to the default in each round.
    pub ratios: Vec<f64>,
}

impl RatioSample {
    /// Adds a round in which both were measured.
    pub(super) fn add(&mut self, own: &[f64], default: &[f64]) {
        let pairs = own.iter().zip(default).filter(|(a, b)| **a > 0.0 && **b > 0.0);
        let ratios: Vec<f64> = pairs.map(|(a, b)| a / b).collect();
        if !ratios.is_empty() {
            self.times_ns.push(median(own));
            self.ratios.push(median(&ratios));
        }
    }

    /// The median ratio; 1 of no rounds.
    pub fn ratio(&self) -> f64 {
        if self.ratios.is_empty() { 1.0 } else { median(&self.ratios) }
    }
}

/// The measurements of one size.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SizeEvidence {
    /// NCCL's default: median times of the rounds, in ns.
    pub default_ns: Vec<f64>,
    /// The arm with rules; empty where no size has one.
    pub tuned: RatioSample,
    /// The same without rules, the tuner loaded.
    pub idle: RatioSample,
    /// The environment alone, without a tuner, where it differs from the default's.
    pub environment: RatioSample,
    /// True once the gain of the rule, or of the environment where the size has no rule, is proven.
    pub is_proven: bool,
    /// True once it is proven that a tuner without rules makes this size too slow, and that the rules do not.
    pub is_guarded: bool,
    /// The arm that was tested, and what its ratio is below with the confidence of the search.
    pub tested: Option<(Applied, f64)>,
}

/// The measured arm that a size runs under.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Applied {
    /// A rule.
    Rule,
    /// Rules of other sizes: the tuner is loaded.
    OtherRules,
    /// The environment alone, without a tuner.
    Environment,
}

impl SizeEvidence {
    /// The rounds of an arm.
    pub fn sample(&self, applied: Applied) -> &RatioSample {
        match applied {
            Applied::Rule => &self.tuned,
            Applied::OtherRules => &self.idle,
            Applied::Environment => &self.environment,
        }
    }

    /// True where this size takes longer than it may.
    pub fn is_harmed(&self, applied: Applied) -> bool {
        bounds(&self.sample(applied).ratios, HARM_ALPHA).lower.is_some_and(|lower| lower > HARM_RATIO)
    }

    /// True where more rounds may prove something.
    fn is_promising(&self, question: Question) -> bool {
        match question {
            Question::None => false,
            Question::Environment => self.environment.ratio() < HOPELESS,
            Question::Rule => {
                let may_guard = self.idle.ratio() > HARM_RATIO && self.tuned.ratio() < HARM_RATIO;
                self.tuned.ratio() < HOPELESS || may_guard
            }
        }
    }

    fn test_ratios(&mut self, question: Question, alpha: f64) {
        let arm = match question {
            Question::None => return,
            Question::Environment => Applied::Environment,
            Question::Rule => Applied::Rule,
        };
        let upper = bounds(&self.sample(arm).ratios, alpha).upper;
        self.tested = upper.map(|upper| (arm, upper));
        self.is_proven |= upper.is_some_and(|upper| upper < GAIN_RATIO);
        if question != Question::Rule {
            return;
        }
        let idle = bounds(&self.idle.ratios, alpha).lower;
        let is_slow = idle.is_some_and(|lower| lower > HARM_RATIO);
        self.is_guarded |= is_slow && upper.is_some_and(|upper| upper < HARM_RATIO);
    }
}

/// The arms that are compared, and the claim of each size.
#[derive(Debug)]
pub(super) struct ProofPlan {
    /// The arm with rules, or with the environment alone where it has none.
    pub(super) tuned: Arm,
    /// One for each size.
    pub(super) questions: Vec<Question>,
}

/// The claim that is to be proven of a size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Question {
    /// Nothing.
    None,
    /// The gain of the environment alone.
    Environment,
    /// The gain of its rule.
    Rule,
}

/// The arms of a proof, beside the default.
#[derive(Debug, Clone, Copy)]
enum Role {
    Tuned,
    Idle,
    Environment,
}

impl ProofPlan {
    /// Without rules no tuner is needed.
    fn arms(&self) -> Vec<(Role, Arm)> {
        let mut arms = Vec::new();
        if !self.tuned.rules.is_empty() {
            arms.push((Role::Tuned, self.tuned.clone()));
            arms.push((Role::Idle, Arm { rules: Vec::new(), ..self.tuned.clone() }));
        }
        if self.tuned.min_channels.is_some() {
            let min_channels = self.tuned.min_channels;
            arms.push((Role::Environment, Arm { min_channels, ..Arm::default_of_nccl() }));
        }
        arms
    }
}

/// The rounds after which a plan is tested for gain at `asked` sizes, and for harm.
pub(super) fn test_rounds(goal: &SearchGoal, asked: usize) -> [usize; INTERIM_TESTS] {
    let first = rounds_min(goal.alpha(asked) / INTERIM_TESTS as f64).max(rounds_min(HARM_ALPHA));
    [first, 2 * first]
}

/// Measures until all sizes are decided, the last test is done or the time is over. False where the time was over first.
pub(super) fn confirm<M: Machine>(
    machine: &mut M,
    plan: &ProofPlan,
    goal: &SearchGoal,
    timing: &mut BatchTiming,
    on: &mut dyn FnMut(&SearchProgress),
) -> Result<(Vec<SizeEvidence>, bool, Vec<String>), M::Error> {
    let (roles, others): (Vec<Role>, Vec<Arm>) = plan.arms().into_iter().unzip();
    let arms: Vec<Arm> = std::iter::once(Arm::default_of_nccl()).chain(others).collect();
    let sizes = plan.questions.len();
    let mut evidence = vec![SizeEvidence::default(); sizes];
    let mut failures = Vec::new();
    let asked = plan.questions.iter().filter(|q| **q != Question::None).count();
    let test_rounds = if asked == 0 { [1; INTERIM_TESTS] } else { test_rounds(goal, asked) };
    let last = test_rounds.last().copied().unwrap_or(0);
    for round in 1..=last {
        if !timing.has_time(machine, arms.len(), goal.deadline) {
            return Ok((evidence, false, failures));
        }
        // Wrong data show in any round.
        let is_checked = round == 1;
        let results = timing.timed(machine, arms.len(), |m| m.round(&arms, REPEATS, is_checked))?;
        add(&mut evidence, &roles, &results, &mut failures);
        if is_checked && results.get(1).is_some_and(Result::is_err) {
            // Later rounds, which are not checked, must not prove these rules.
            return Ok((evidence, true, failures));
        }
        let step = (SearchStage::Confirm, round, last);
        on(&timing.progress(step, machine.elapsed(), arms.len(), 0, goal.deadline));
        if test_rounds.contains(&round) {
            let alpha = goal.alpha(asked) / INTERIM_TESTS as f64;
            let questions = || plan.questions.iter().copied();
            evidence.iter_mut().zip(questions()).for_each(|(e, question)| e.test_ratios(question, alpha));
            let is_open = |(e, question): (&SizeEvidence, Question)| {
                !e.is_proven && !e.is_guarded && e.is_promising(question)
            };
            if !evidence.iter().zip(questions()).any(is_open) {
                break;
            }
        }
    }
    Ok((evidence, true, failures))
}

fn add(
    evidence: &mut [SizeEvidence],
    roles: &[Role],
    results: &[Result<Times, String>],
    failures: &mut Vec<String>,
) {
    failures.extend(results.iter().filter_map(|r| r.as_ref().err()).cloned());
    let of = |arm: usize, size: usize| {
        results.get(arm).and_then(|r| r.as_ref().ok()).and_then(|t| t.get(size)).map(Vec::as_slice)
    };
    for (i, e) in evidence.iter_mut().enumerate() {
        let Some(default) = of(0, i) else { continue };
        e.default_ns.push(median(default));
        for (arm, role) in roles.iter().enumerate() {
            let sample = match role {
                Role::Tuned => &mut e.tuned,
                Role::Idle => &mut e.idle,
                Role::Environment => &mut e.environment,
            };
            if let Some(own) = of(arm + 1, i) {
                sample.add(own, default);
            }
        }
    }
}
