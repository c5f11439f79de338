//! Found rules as a file, each with its evidence beside it.

use super::confirm::SizeEvidence;
use super::{JudgedRule, RuleStatus, RuleVerdict, SearchResult, Space, TunerChoice, Verified};
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
    let is_alone = verdict == RuleVerdict::Environment;
    let (name, sample) = if is_alone { ("the variable alone", &e.environment) } else { ("tuned", &e.tuned) };
    let mut text = format!(
        "{bytes} bytes: default {}, {name} {}, ratio {:.3}",
        us(&e.default_ns),
        us(&sample.times_ns),
        sample.ratio()
    );
    if let Some((_, upper)) = e.tested {
        text.push_str(&format!(", below {upper:.3} with {} confidence", around.confidence));
    }
    text.push_str(&format!(", {} rounds", sample.ratios.len()));
    if verdict == RuleVerdict::Guard {
        text.push_str(&format!("; any loaded tuner without this rule: ratio {:.3}", e.idle.ratio()));
    }
    if !is_alone && !e.environment.ratios.is_empty() {
        text.push_str(&format!("; the variable alone: ratio {:.3}", e.environment.ratio()));
    }
    text
}

fn head(around: &MeasuredOn, space: Option<&Space>) -> Vec<String> {
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
    lines
}

/// Words above the environment: what it costs elsewhere, and the sizes of each operation that gain by it alone.
fn environment_comments<'a>(
    collective: usize,
    sizes: impl Iterator<Item = (u64, &'a SizeEvidence)>,
    around: &MeasuredOn,
) -> Vec<String> {
    let name = COLLECTIVES.get(collective).unwrap_or(&"?");
    sizes.map(|(b, e)| format!("{name}, {}", evidence(b, e, RuleVerdict::Environment, around))).collect()
}

const ENVIRONMENT_PRICE: &str = "Everything below is for jobs with this variable. More channels take more multiprocessors from computation at the same time.";

/// The file of rules that a search found for one or several operations.
pub fn rule_file(found: &[(Space, SearchResult)], around: &MeasuredOn) -> String {
    let environment = found.iter().find_map(|(_, o)| o.written_min_channels());
    let mut rules = Vec::new();
    let mut lines = head(around, found.first().map(|(s, _)| s));
    lines.extend(environment.map(|_| ENVIRONMENT_PRICE.to_owned()));
    for (space, outcome) in
        found.iter().filter(|(_, o)| o.min_channels == environment || !o.changes_anything())
    {
        let alone = outcome.sizes.iter().filter(|s| s.verdict == RuleVerdict::Environment);
        lines.extend(environment_comments(space.collective, alone.map(|s| (s.bytes, &s.evidence)), around));
        for (first, last) in runs(outcome) {
            let sizes = outcome.sizes.get(first..=last).unwrap_or(&[]);
            let choice = sizes.first().map_or(TunerChoice::NONE, |s| s.choice);
            let measured = sizes.iter().map(|s| evidence(s.bytes, &s.evidence, s.verdict, around));
            rules.push(Commented {
                comments: measured.collect(),
                rule: space.rule(choice, range(&space.sizes, first, last)),
            });
        }
    }
    yaml::write(&lines, environment, &rules)
}

/// The file without the rules that were dropped.
pub fn verified_file(all: &[(Space, Verified)], judged: &[JudgedRule], around: &MeasuredOn) -> String {
    let mut lines = head(around, all.first().map(|(s, _)| s));
    let dropped = judged.iter().filter(|j| !j.status.has_rule()).count();
    lines.push(format!("Verified; {dropped} of {} rules were dropped.", judged.len()));
    let has_rules = judged.iter().any(|j| j.status.has_rule());
    let asked = all.iter().find_map(|(_, v)| v.min_channels);
    let environment =
        asked.filter(|_| has_rules || all.iter().any(|(_, v)| v.gains_alone().next().is_some()));
    match (asked, environment) {
        (Some(n), None) => lines.push(format!("NCCL_MIN_NCHANNELS={n} was dropped as well.")),
        (Some(_), Some(_)) => lines.push(ENVIRONMENT_PRICE.to_owned()),
        _ => {}
    }
    if environment.is_some() {
        lines.extend(
            all.iter().flat_map(|(s, v)| environment_comments(s.collective, v.gains_alone(), around)),
        );
    }
    let ranks = all.first().map_or(0, |(s, _)| s.ranks);
    let comments = |kept: &RuleStatus| match kept {
        RuleStatus::Proven(sizes) | RuleStatus::Dropped(sizes) => {
            let verdict = |e: &SizeEvidence| if e.is_proven { RuleVerdict::Gain } else { RuleVerdict::Guard };
            sizes.iter().map(|(b, e)| evidence(*b, e, verdict(e), around)).collect()
        }
        RuleStatus::NotMeasured => {
            vec![format!("not verified: nothing that was measured on {ranks} ranks is for it")]
        }
    };
    let kept = judged.iter().filter(|j| j.status.has_rule());
    let rules: Vec<Commented> =
        kept.map(|j| Commented { comments: comments(&j.status), rule: j.rule.clone() }).collect();
    yaml::write(&lines, environment, &rules)
}
