//! Verdicts on targets and changes since a saved run, as tables that people read.

use super::super::bench::{number, surroundings, wrong_elements};
use crate::bench::targets::{Judgement, TargetRow, Verdict};
use crate::bench::{CONFIDENCE, Change, Changes, Report, Trend};
use std::fmt::Write as _;

/// Writes into a text, which cannot fail.
macro_rules! line {
    ($text:expr, $($format:tt)*) => {
        writeln!($text, $($format)*).unwrap_or_default()
    };
}

/// The table of targets, with what was measured where.
pub(super) fn targets(j: &Judgement, reports: &[Report]) -> String {
    let mut t = String::new();
    if let Some(report) = reports.first() {
        let s = &report.settings;
        let is_same = |r: &&Report| (r.settings.collective, r.settings.dtype) == (s.collective, s.dtype);
        let rounds = reports.iter().filter(is_same).count();
        line!(t, "# ringwatch {}: targets of {}", report.environment.ringwatch_version, j.file);
        line!(
            t,
            "# {} warm-up and {} timed operations, median of {} repeats, rounds: {rounds}",
            s.warmup_iters,
            s.iters,
            s.repeat
        );
        t.push_str(&surroundings(&report.environment));
    }
    let nodes = j.nodes.map_or("-".to_owned(), |n| n.to_string());
    line!(t, "# ranks: {}, nodes: {nodes}", j.ranks);
    let link = j.link.gb_per_s.map_or("-".to_owned(), |gb| format!("{gb:.1} GB/s"));
    line!(t, "# link: {link} ({})", j.link.source);
    line!(t, "#");
    line!(
        t,
        "#{:>14}  {:>13}  {:>9}  {:<28}  {:>12}  {:>12}  verdict",
        "operation",
        "size (B)",
        "type",
        "target",
        "limit",
        "measured"
    );
    for row in &j.rows {
        t.push_str(target(row).trim_end());
        t.push('\n');
    }
    t.push_str(&wrong_elements(reports.iter().filter_map(|r| r.wrong).reduce(|a, b| a + b)));
    let count = |v| j.count(v);
    line!(
        t,
        "# targets: {} passed, {} failed, {} unknown, {} skipped",
        count(Verdict::Pass),
        count(Verdict::Fail),
        count(Verdict::Unknown),
        count(Verdict::Skipped)
    );
    t
}

fn target(row: &TargetRow) -> String {
    let value = |v: Option<f64>| match v {
        None => "-".to_owned(),
        Some(ns) if row.metric == "latency_ns" => format!("{} us", number(ns / 1000.0)),
        Some(gb) => format!("{} GB/s", number(gb)),
    };
    let verdict = match row.verdict {
        Verdict::Pass => "pass",
        Verdict::Fail => "FAIL",
        Verdict::Unknown => "unknown",
        Verdict::Skipped => "-",
    };
    let verdict = explained(verdict, row.reason.as_deref());
    format!(
        " {:>14}  {:>13}  {:>9}  {:<28}  {:>12}  {:>12}  {verdict}",
        row.operation,
        row.size_bytes,
        row.dtype,
        row.target,
        value(row.limit),
        value(row.measured)
    )
}

/// A verdict with its reason.
fn explained(verdict: &str, reason: Option<&str>) -> String {
    match reason {
        None => verdict.to_owned(),
        Some(reason) if verdict == "-" => format!("- ({reason})"),
        Some(reason) => format!("{verdict}: {reason}"),
    }
}

/// The table of changes.
pub(super) fn changes(c: &Changes) -> String {
    let mut t = String::new();
    line!(t, "#");
    line!(t, "# against {}", c.file);
    for d in &c.differences {
        line!(t, "# {} differs: {} was saved, {} is now", d.what, d.old, d.new);
    }
    line!(
        t,
        "# a change counts beyond {} % with a confidence of {:.0} % (Mann-Whitney); interval of 95 %",
        percent_text(c.threshold),
        CONFIDENCE * 100.0
    );
    line!(t, "#");
    line!(
        t,
        "#{:>14}  {:>13}  {:>9}  {:>3}  {:>9}  {:>9}  {:>9}  {:>19}  {:>10}  verdict",
        "operation",
        "size (B)",
        "type",
        "",
        "old (us)",
        "new (us)",
        "change",
        "interval",
        "confidence"
    );
    for row in &c.rows {
        t.push_str(change(row).trim_end());
        t.push('\n');
    }
    if c.not_measured > 0 {
        line!(t, "# {} rows of {} were not measured now", c.not_measured, c.file);
    }
    line!(
        t,
        "# changes: {} slower, {} faster, {} within the threshold, {} not confident, {} unknown, {} not comparable",
        c.count(Trend::Regression),
        c.count(Trend::Improvement),
        c.count(Trend::WithinThreshold),
        c.count(Trend::NotConfident),
        c.count(Trend::Unknown),
        c.count(Trend::NotComparable)
    );
    t
}

fn change(row: &Change) -> String {
    let none = || "-".to_owned();
    let time = |ns: Option<f64>| ns.map_or_else(none, |ns| number(ns / 1000.0));
    let signed = |share: f64| format!("{:+.1}", share * 100.0);
    let verdict = match row.trend {
        Trend::Regression => "SLOWER",
        Trend::Improvement => "faster",
        Trend::WithinThreshold => "same",
        Trend::NotConfident => "not confident",
        Trend::Unknown => "unknown",
        Trend::NotComparable => "-",
    };
    let verdict = explained(verdict, row.reason.as_deref());
    format!(
        " {:>14}  {:>13}  {:>9}  {:>3}  {:>9}  {:>9}  {:>9}  {:>19}  {:>10}  {verdict}",
        row.operation,
        row.size_bytes,
        row.dtype,
        if row.in_place { "in" } else { "out" },
        time(row.old_ns),
        time(row.new_ns),
        row.change.map_or_else(none, |c| format!("{} %", signed(c))),
        row.interval.map_or_else(none, |(low, high)| format!("{}..{} %", signed(low), signed(high))),
        row.confidence.map_or_else(none, confidence)
    )
}

/// Rounded down: no more than is known.
fn confidence(share: f64) -> String {
    let percent = (share * 1000.0).floor() / 10.0;
    if percent > 99.9 { ">99.9 %".to_owned() } else { format!("{percent:.1} %") }
}

fn percent_text(share: f64) -> String {
    let text = format!("{:.2}", share * 100.0);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn confidence_is_never_rounded_up() {
        let texts = [0.0, 0.949_99, 0.95, 0.9992, 0.999_999, 1.0].map(confidence);
        assert_eq!(texts, ["0.0 %", "94.9 %", "95.0 %", "99.9 %", "99.9 %", ">99.9 %"]);
        assert_eq!([0.05, 0.125, 0.1].map(percent_text), ["5", "12.5", "10"]);
    }
}
