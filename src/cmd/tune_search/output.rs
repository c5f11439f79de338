//! The output of a search: a plan, progress, tables and the file.

use super::super::bench::number;
use crate::bench::{Collective, median};
use crate::tune::search::{
    Applied, JudgedRule, MeasuredOn, RatioSample, RuleStatus, RuleVerdict, SearchProgress, SearchResult,
    SizeEvidence, Space, TunedSize, TunerChoice, Verified,
};
use anyhow::Context;
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::time::Duration;

/// Writes a line for whoever watches. A closed standard error is no reason to stop.
pub(super) fn print_line(text: &str) {
    writeln!(io::stderr(), "ringwatch: {text}").ok();
}

/// A time of seconds or minutes.
pub(super) fn time(t: Duration) -> String {
    let seconds = t.as_secs();
    if seconds < 100 { format!("{seconds} s") } else { format!("{} min", seconds.div_ceil(60)) }
}

/// A confidence as people write it.
pub(super) fn percent(share: f64) -> String {
    let text = format!("{:.3}", share * 100.0);
    format!("{} %", text.trim_end_matches('0').trim_end_matches('.'))
}

/// Shows how far a search is: one line that changes on a terminal, a line for each batch elsewhere.
#[derive(Debug)]
pub(super) struct ProgressLine {
    collective: Collective,
    is_terminal: bool,
    is_begun: bool,
}

impl ProgressLine {
    pub(super) fn new(collective: Collective) -> Self {
        ProgressLine { collective, is_terminal: io::stderr().is_terminal(), is_begun: false }
    }

    pub(super) fn show(&mut self, p: &SearchProgress) {
        let text = format!(
            "{}: {} {} of {}, {} so far, about {} left",
            self.collective,
            p.stage,
            p.done,
            p.all,
            time(p.elapsed),
            time(p.remaining)
        );
        if self.is_terminal {
            write!(io::stderr(), "\r\x1b[Kringwatch: {text}").ok();
        } else {
            print_line(&text);
        }
        self.is_begun = true;
    }

    pub(super) fn finish(&mut self) {
        if self.is_terminal && self.is_begun {
            writeln!(io::stderr()).ok();
        }
    }
}

/// Where the rules go: to a file, and the table to standard output; or the rules to standard output.
#[derive(Debug)]
pub(super) struct Destination<'a>(Option<&'a Path>);

impl<'a> Destination<'a> {
    /// Checks that the file can be written, before minutes are spent on what it should hold.
    pub(super) fn check(path: Option<&'a Path>) -> anyhow::Result<Self> {
        if let Some(path) = path {
            let directory = path.parent().filter(|d| !d.as_os_str().is_empty()).unwrap_or(Path::new("."));
            tempfile::tempfile_in(directory).with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(Destination(path))
    }

    pub(super) fn write(&self, table: &str, rules: &str) -> anyhow::Result<()> {
        self.table(table)?;
        match self.0 {
            Some(path) => {
                std::fs::write(path, rules).with_context(|| format!("cannot write {}", path.display()))?;
                print_line(&format!("wrote {}", path.display()));
                Ok(())
            }
            None => Ok(io::stdout().lock().write_all(rules.as_bytes())?),
        }
    }

    /// The table alone. Beside rules on standard output it goes to standard error.
    pub(super) fn table(&self, table: &str) -> anyhow::Result<()> {
        if self.0.is_some() {
            io::stdout().lock().write_all(table.as_bytes())?;
        } else {
            io::stderr().lock().write_all(table.as_bytes()).ok();
        }
        Ok(())
    }
}

/// Prints the candidates, and the time that measuring them would take.
pub(super) fn plan(
    collective: Collective,
    space: &Space,
    expected: Duration,
    limit: Duration,
) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "# {collective} on {} ranks: candidates of each size", space.ranks)?;
    for (bytes, candidates) in space.sizes.iter().zip(&space.candidates) {
        writeln!(out, "{bytes:>14}  {} candidates", candidates.len())?;
        let mut entries: Vec<String> = Vec::new();
        for choice in candidates.iter().filter(|c| **c != TunerChoice::NONE) {
            let entry = TunerChoice { channels: None, ..*choice };
            match (entries.last_mut(), choice.channels) {
                (Some(text), Some(n)) => text.push_str(&format!(" {n}")),
                _ => entries.push(format!("{entry}; channels: NCCL's own")),
            }
        }
        for entry in entries {
            writeln!(out, "{:>16}{entry}", "")?;
        }
    }
    for n in space.environments.iter().flatten() {
        writeln!(out, "# all of them also with NCCL_MIN_NCHANNELS={n}")?;
    }
    writeln!(out, "# expected time: about {}, limit: {}", time(expected), time(limit))
}

fn head(title: &str, around: &MeasuredOn) -> String {
    let mut t = format!("# {title}, NCCL {}, {}\n", around.nccl, around.gpus);
    t.push_str("# times in us; ratio: tuned by default, the median of the rounds; below: its bound with ");
    t.push_str(&format!("{} confidence for all sizes together\n", around.confidence));
    t.push_str("# tuned: with what is written; no rule: ratio with a loaded tuner that decides nothing\n");
    t.push_str(&format!(
        "#{:>13}  {:>9}  {:>9}  {:>6}  {:>6}  {:>6}  {:>7}  rule\n",
        "size (B)", "default", "tuned", "ratio", "below", "rounds", "no rule"
    ));
    t
}

fn row(bytes: u64, e: &SizeEvidence, applied: Applied, rule: &str) -> String {
    let us = |times: &[f64]| if times.is_empty() { "-".to_owned() } else { number(median(times) / 1000.0) };
    let upper = e.tested.filter(|(arm, _)| *arm == applied);
    let upper = upper.map_or("-".to_owned(), |(_, u)| format!("{u:.3}"));
    let ratio = |sample: &RatioSample| {
        if sample.ratios.is_empty() { "-".to_owned() } else { format!("{:.3}", sample.ratio()) }
    };
    let tuned = e.sample(applied);
    format!(
        " {bytes:>13}  {:>9}  {:>9}  {:>6}  {upper:>6}  {:>6}  {:>7}  {rule}\n",
        us(&e.default_ns),
        us(&tuned.times_ns),
        ratio(tuned),
        tuned.ratios.len(),
        ratio(&e.idle),
    )
}

/// Words for a verdict.
fn verdict(v: RuleVerdict, choice: TunerChoice) -> String {
    match v {
        RuleVerdict::Gain => choice.to_string(),
        RuleVerdict::Guard => format!("{choice}, which undoes what any loaded tuner costs"),
        RuleVerdict::Environment => "none: the variable alone gains as much".to_owned(),
        RuleVerdict::NotProven => format!("none: {choice} is not proven to gain 2 %"),
        RuleVerdict::NoCandidate => "none: no candidate was promising".to_owned(),
    }
}

/// The geometric mean of default by tuned over sizes.
fn gain<'a>(ratios: impl Iterator<Item = &'a RatioSample>) -> Option<f64> {
    let logs: Vec<f64> = ratios.filter(|s| !s.ratios.is_empty()).map(|s| s.ratio().ln()).collect();
    (!logs.is_empty()).then(|| (-logs.iter().sum::<f64>() / logs.len() as f64).exp())
}

/// The table of a search.
pub(super) fn outcomes(found: &[(Space, SearchResult)], around: &MeasuredOn) -> String {
    let mut t = String::new();
    for (space, outcome) in found {
        let name = super::collective_of(space.collective).map_or("?", Collective::as_str);
        t.push_str(&head(&format!("{name} on {} ranks of {}", space.ranks, space.nodes_text()), around));
        for s in &outcome.sizes {
            t.push_str(&row(s.bytes, &s.evidence, outcome.applied(s), &verdict(s.verdict, s.choice)));
        }
        let rules = outcome.sizes.iter().filter(|s| s.verdict.has_rule()).count();
        t.push_str(&format!("# sizes with a rule: {rules} of {}", outcome.sizes.len()));
        let tuned = outcome.sizes.iter().map(|s| s.evidence.sample(outcome.applied(s)));
        if let Some(gain) = gain(tuned) {
            t.push_str(&format!("; default by tuned, geometric mean of all sizes: {gain:.3}"));
        }
        t.push('\n');
        t.push_str(&environment(outcome));
        for note in &outcome.notes {
            t.push_str(&format!("# note: {}\n", note.replace('\n', "\n#   ")));
        }
    }
    t
}

/// Words about the variable that rules cannot set.
fn environment(outcome: &SearchResult) -> String {
    let Some(n) = outcome.min_channels else { return String::new() };
    if outcome.written_min_channels().is_none() {
        return format!("# NCCL_MIN_NCHANNELS={n} was tried, and no gain is proven\n");
    }
    let what = if outcome.has_rules() { "the rules need" } else { "no rule and no tuner, but" };
    let mut t = format!("# {what} NCCL_MIN_NCHANNELS={n}; `ringwatch run --tune` sets it");
    if let Some(alone) = gain(outcome.sizes.iter().map(|s| &s.evidence.environment)) {
        t.push_str(&format!("; the variable alone: {alone:.3}"));
    }
    t + "\n"
}

/// A line for each size that becomes slower.
pub(super) fn harm(outcome: &SearchResult) -> Vec<String> {
    let line = |s: &TunedSize| harm_line(s.bytes, &s.evidence, outcome.applied(s));
    outcome.harmed().map(line).collect()
}

fn harm_line(bytes: u64, e: &SizeEvidence, applied: Applied) -> String {
    let why = match applied {
        Applied::Rule => "its rule makes it slower",
        Applied::OtherRules => "it has no rule, and any loaded tuner changes NCCL's policy for channels",
        Applied::Environment => "NCCL_MIN_NCHANNELS makes it slower",
    };
    format!("{bytes} bytes take {:.3} of the default's time: {why}", e.sample(applied).ratio())
}

/// The table of a verification.
pub(super) fn verified(collective: Collective, v: &Verified, around: &MeasuredOn) -> String {
    let mut t = head(&format!("{collective}: what the file asks for against NCCL's default"), around);
    let name = |j: &JudgedRule| {
        let choice = TunerChoice { entry: j.rule.choose, channels: j.rule.channels };
        format!("line {}: {choice}", j.rule.line)
    };
    for (bytes, e, rule) in &v.sizes {
        let words = match rule.and_then(|i| v.judged.get(i)) {
            Some(j) if j.status.has_rule() => format!("{} holds", name(j)),
            Some(j) => format!("{} does not hold", name(j)),
            None if e.is_proven => "none: the variable alone gains".to_owned(),
            None => "-".to_owned(),
        };
        // What was measured of a rule stands here, whether it stays or not.
        let applied = if rule.is_some() { Applied::Rule } else { v.applied(None) };
        t.push_str(&row(*bytes, e, applied, &words));
    }
    let tuned = v.sizes.iter().map(|(_, e, rule)| e.sample(v.applied(*rule)));
    if let Some(gain) = gain(tuned) {
        t.push_str(&format!("# default by what stays, geometric mean of all sizes: {gain:.3}\n"));
    }
    for j in &v.judged {
        if let RuleStatus::Dropped(sizes) = &j.status {
            let why: Vec<String> =
                sizes.iter().map(|(b, e)| format!("{b} bytes: {:.3}", e.tuned.ratio())).collect();
            t.push_str(&format!("# dropped {}: no gain of 2 % is proven ({})\n", name(j), why.join(", ")));
        }
    }
    t
}

/// A line for each size that what stays makes slower.
pub(super) fn harm_of_verified(v: &Verified) -> Vec<String> {
    v.harmed().map(|(bytes, e, applied)| harm_line(bytes, e, applied)).collect()
}
