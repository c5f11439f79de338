//! Found rules as a file, each with its evidence beside it.

use super::confirm::SizeEvidence;
use super::{JudgedRule, RuleStatus, RuleVerdict, SearchResult, Space, TunerChoice};
use crate::bench::median;
use crate::tune::yaml::{self, Commented};
use crate::tune::{COLLECTIVES, Range};

/// Where the rules were measured, in words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MeasuredOn {
    /// `2.28.9`.
    pub nccl: String,
    /// `4 x NVIDIA H100 80GB HBM3`.
    pub gpus: String,
    /// The confidence as people write it: `99 %`.
    pub confidence: String,
    /// NCCL's variables that were set for the default and the rules alike, as `NAME=VALUE`.
    pub variables: Vec<String>,
}

/// Neighboring sizes with the same kept choice, as indexes of the first and the last.
fn runs(outcome: &SearchResult) -> Vec<(usize, usize)> {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for (i, size) in outcome.sizes.iter().enumerate().filter(|(_, s)| s.verdict.has_rule()) {
        let is_same = |last: usize| {
            last + 1 == i && outcome.sizes.get(last).is_some_and(|before| before.choice == size.choice)
        };
        match runs.last_mut() {
            Some((_, last)) if is_same(*last) => *last = i,
            _ => runs.push((i, i)),
        }
    }
    runs
}

/// The sizes that a run stands for: up to the geometric middle of it and the next measured size. Beyond the smallest and
/// the largest measured size nothing is known.
pub(super) fn range(sizes: &[u64], first: usize, last: usize) -> Range<u64> {
    let at = |i: usize| sizes.get(i).copied();
    let middle = |a: u64, b: u64| ((a as f64) * (b as f64)).sqrt() as u64;
    let min = match (first.checked_sub(1).and_then(at), at(first)) {
        (Some(before), Some(own)) => middle(before, own) + 1,
        (None, own) => own.unwrap_or(0),
        (Some(before), None) => before,
    };
    let max = match (at(last), at(last + 1)) {
        (Some(own), Some(next)) => middle(own, next),
        (own, _) => own.unwrap_or(u64::MAX),
    };
    Range { min, max }
}

/// Words for the measurements of one size.
pub(super) fn evidence(bytes: u64, e: &SizeEvidence, verdict: RuleVerdict, around: &MeasuredOn) -> String {
    let us = |times: &[f64]| format!("{:.1} us", median(times) / 1000.0);
    let mut text = format!(
        "{bytes} bytes: default {}, tuned {}, ratio {:.3}",
        us(&e.default_ns),
        us(&e.tuned.times_ns),
        e.tuned.ratio()
    );
    if let Some(upper) = e.upper {
        text.push_str(&format!(", below {upper:.3} with {} confidence", around.confidence));
    }
    text.push_str(&format!(", {} rounds", e.tuned.ratios.len()));
    if verdict == RuleVerdict::Guard {
        text.push_str(&format!("; any loaded tuner without this rule: ratio {:.3}", e.idle.ratio()));
    }
    if !e.environment.ratios.is_empty() {
        text.push_str(&format!("; the variable alone: ratio {:.3}", e.environment.ratio()));
    }
    text
}

fn head(around: &MeasuredOn, environment: Option<u32>, space: Option<&Space>) -> Vec<String> {
    let mut lines = vec![format!(
        "Measured by ringwatch {} tune, against NCCL's default without a tuner.",
        env!("CARGO_PKG_VERSION")
    )];
    let size = space.map_or(String::new(), |s| format!(", {} ranks on {}", s.ranks, s.nodes_text()));
    lines.push(format!("NCCL {}, {}{size}.", around.nccl, around.gpus));
    if !around.variables.is_empty() {
        lines.push(format!("Set for the default and the rules alike: {}.", around.variables.join(" ")));
    }
    lines.push(format!(
        "The probability that any of these gains is not real is at most one less the confidence ({}).",
        around.confidence
    ));
    if let Some(n) = environment {
        lines.push(format!("environment: {}", environment_text(n)));
        lines.push("The rules hold only in a job with this variable, which rules cannot set.".to_owned());
        lines.push("More channels take more multiprocessors from computation at the same time.".to_owned());
    }
    lines
}

/// The variable that rules cannot set.
pub(super) fn environment_text(min_channels: u32) -> String {
    format!("NCCL_MIN_NCHANNELS={min_channels}")
}

/// The file of rules that a search found for one or several operations.
pub fn rule_file(found: &[(Space, SearchResult)], around: &MeasuredOn) -> String {
    let environment = found.iter().find_map(|(_, o)| o.min_channels.filter(|_| o.has_rules()));
    let mut rules = Vec::new();
    for (space, outcome) in found.iter().filter(|(_, o)| o.min_channels == environment || !o.has_rules()) {
        for (first, last) in runs(outcome) {
            let sizes = outcome.sizes.get(first..=last).unwrap_or(&[]);
            let choice = sizes.first().map_or(TunerChoice::NONE, |s| s.choice);
            let needs =
                environment.map(|n| format!("only with {} in the job's environment", environment_text(n)));
            let measured = sizes.iter().map(|s| evidence(s.bytes, &s.evidence, s.verdict, around));
            rules.push(Commented {
                comments: needs.into_iter().chain(measured).collect(),
                rule: space.rule(choice, range(&space.sizes, first, last)),
            });
        }
    }
    yaml::write(&head(around, environment, found.first().map(|(s, _)| s)), &rules)
}

/// The file without the rules that were dropped.
pub fn verified_file(
    judged: &[JudgedRule],
    environment: Option<u32>,
    space: &Space,
    around: &MeasuredOn,
) -> String {
    let mut lines = head(around, environment, Some(space));
    let dropped = judged.iter().filter(|j| !j.status.has_rule()).count();
    lines.push(format!("Verified; {dropped} of {} rules were dropped.", judged.len()));
    let comments = |kept: &RuleStatus| match kept {
        RuleStatus::Proven(sizes) | RuleStatus::Dropped(sizes) => {
            let verdict = |e: &SizeEvidence| if e.is_proven { RuleVerdict::Gain } else { RuleVerdict::Guard };
            sizes.iter().map(|(b, e)| evidence(*b, e, verdict(e), around)).collect()
        }
        RuleStatus::NotMeasured => {
            let name = COLLECTIVES.get(space.collective).unwrap_or(&"this operation");
            vec![format!("not verified: nothing of {name} on {} ranks is for it", space.ranks)]
        }
    };
    let kept = judged.iter().filter(|j| j.status.has_rule());
    let rules: Vec<Commented> =
        kept.map(|j| Commented { comments: comments(&j.status), rule: j.rule.clone() }).collect();
    yaml::write(&lines, &rules)
}
