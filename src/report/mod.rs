//! Findings and statistics as text and JSON.

mod document;
mod pages;

pub use document::{Document, Form};
pub use pages::{CommPage, Late, Loss, Operations, Page, Pages};

use crate::model::{Change, Finding, FindingEvent, Snapshot, size_text};
use serde::Serialize;
use std::io::{self, Write};

/// Writes findings as JSON, one object a line. Their fields are in the README beside this file and do not change
/// silently.
///
/// # Errors
/// Those of the writer.
pub fn json(out: &mut impl Write, findings: &[Finding]) -> io::Result<()> {
    for f in findings {
        serde_json::to_writer(&mut *out, f)?;
        writeln!(out)?;
    }
    Ok(())
}

/// Writes changes of findings as JSON, one object a line: a finding, and what changed about it.
///
/// # Errors
/// Those of the writer.
pub fn json_events(out: &mut impl Write, events: &[FindingEvent]) -> io::Result<()> {
    #[derive(Serialize)]
    struct Line<'a> {
        change: Change,
        #[serde(flatten)]
        finding: &'a Finding,
    }
    for e in events {
        serde_json::to_writer(&mut *out, &Line { change: e.change, finding: &e.finding })?;
        writeln!(out)?;
    }
    Ok(())
}

/// Writes one change of a finding for people: an opened one whole, others in one line.
///
/// # Errors
/// Those of the writer.
pub fn event(out: &mut impl Write, e: &FindingEvent) -> io::Result<()> {
    match (e.change, e.finding.close_reason) {
        (Change::Opened, _) if e.finding.count > 1 => {
            writeln!(out, "opened {} times: {}", e.finding.count, e.finding.headline())
        }
        (Change::Opened, _) => finding(out, &e.finding),
        (Change::Closed, Some(reason)) => {
            writeln!(out, "closed ({}): {}", reason.as_str(), e.finding.headline())
        }
        (change, _) => {
            let severity = e.finding.severity.as_str();
            writeln!(out, "{} ({severity}): {}", change.as_str(), e.finding.headline())
        }
    }
}

/// Writes findings for people.
///
/// # Errors
/// Those of the writer.
pub fn text(out: &mut impl Write, findings: &[Finding]) -> io::Result<()> {
    if findings.is_empty() {
        return writeln!(out, "no findings");
    }
    for f in findings {
        finding(out, f)?;
    }
    Ok(())
}

/// Writes one finding for people.
///
/// # Errors
/// Those of the writer.
pub fn finding(out: &mut impl Write, f: &Finding) -> io::Result<()> {
    writeln!(out, "{}", f.headline())?;
    let since = f.since.as_ref().map_or_else(String::new, |t| format!(", since {t}"));
    let closed = match (f.open, f.close_reason) {
        (true, _) => String::new(),
        (false, Some(reason)) => format!(", closed ({})", reason.as_str()),
        (false, None) => ", closed".to_owned(),
    };
    let times = if f.count > 1 { format!(", opened {} times", f.count) } else { String::new() };
    writeln!(out, "    {}{since}{closed}{times}", f.severity.as_str())?;
    for e in &f.evidence {
        writeln!(out, "    - {}", e.text)?;
    }
    writeln!(out, "    next: {}", f.advice)
}

/// Writes how a job went: its findings from severity warning on, its slowest operations, its losses.
///
/// # Errors
/// Those of the writer.
pub fn summary(out: &mut impl Write, s: &Snapshot) -> io::Result<()> {
    let processes = s.segments.len();
    let counted: u64 = s.classes.iter().map(|c| c.count).sum();
    writeln!(
        out,
        "ringwatch: {processes} processes, {} communicators, {counted} operations, {} records lost",
        s.comms.len(),
        s.lost()
    )?;
    let c = s.coverage();
    if let Some(share) = c.share() {
        writeln!(
            out,
            "ringwatch: GPU times of {:.1} % of {} operations (each rank's part is one), {} impossible ones dropped",
            share * 100.0,
            c.operations,
            c.impossible
        )?;
    }
    for l in &s.losses {
        writeln!(out, "ringwatch:   pid {}: {}: {}", l.pid, l.reason, l.count)?;
    }
    let mut slow: Vec<_> = s.classes.iter().filter(|c| c.p99_ns.is_some()).collect();
    slow.sort_by(|a, b| b.p99_ns.unwrap_or(0.0).total_cmp(&a.p99_ns.unwrap_or(0.0)));
    if !slow.is_empty() {
        writeln!(out, "ringwatch: slowest operations (transfer time; waiting is not in it)")?;
        writeln!(
            out,
            "ringwatch:   {:<14}{:>9}  {:<16}{:>9}{:>11}{:>11}{:>12}",
            "operation", "size", "algorithm", "count", "p50 us", "p99 us", "busbw GB/s"
        )?;
    }
    for c in slow.iter().take(5) {
        let size = c.size_class.map_or_else(|| "-".to_owned(), size);
        let algo = match (c.algo, c.proto) {
            (Some(a), Some(p)) => format!("{a}/{p}"),
            (Some(a), None) => a.to_string(),
            _ => "-".to_owned(),
        };
        writeln!(
            out,
            "ringwatch:   {:<14}{size:>9}  {algo:<16}{:>9}{:>11}{:>11}{:>12}",
            c.func.as_str(),
            c.count,
            number(c.p50_ns, 1e3),
            number(c.p99_ns, 1e3),
            number(c.busbw, 1e9),
        )?;
    }
    let (alarms, infos): (Vec<&Finding>, Vec<&Finding>) =
        s.findings.iter().partition(|f| f.severity.is_alarm());
    let minor = match infos.len() {
        0 => String::new(),
        n => format!(" ({n} more of severity info: see `ringwatch report`, after `run --keep`)"),
    };
    for u in &s.unread {
        writeln!(out, "ringwatch: not read: {u}")?;
    }
    let hidden = s.hidden();
    for (reason, (records, processes)) in &hidden {
        writeln!(
            out,
            "ringwatch: records of {records} operations in {processes} processes are lost: {reason}"
        )?;
    }
    if alarms.is_empty() {
        let seen = s.unread.is_empty() && hidden.is_empty();
        let but = if seen { "" } else { " in what was seen" };
        return writeln!(out, "ringwatch: no findings{but}{minor}");
    }
    writeln!(out, "ringwatch: findings{minor}")?;
    for f in alarms {
        finding(out, f)?;
    }
    Ok(())
}

fn number(n: Option<f64>, unit: f64) -> String {
    n.map_or_else(|| "-".to_owned(), |n| format!("{:.1}", n / unit))
}

/// The least size of a class: `1 MiB` for class 20.
fn size(class: u8) -> String {
    1u64.checked_shl(u32::from(class)).map_or_else(|| "-".to_owned(), size_text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Cause, CommId, Evidence, Exit, Kind, OperationRef, Rank, Track, Victims};

    fn sample() -> Finding {
        let operation = OperationRef {
            order: 3,
            func: "AllReduce".into(),
            bytes: Some(16_777_216),
            dtype: Some("ncclFloat32".into()),
            algo: Some("RING".into()),
            proto: None,
            redop: Some("ncclSum".into()),
            track: Track::Collective,
        };
        let comm = CommId::unowned(0x2cb0_a93e);
        Finding {
            since: Some("2026-11-21T09:00:00Z".into()),
            evidence: vec![Evidence {
                text: "ranks 0, 1, 2 wait".into(),
                value: Some(3.5),
                unit: Some("s".into()),
            }],
            advice: "look at rank 3".into(),
            cause: Some(Cause::ProcessGone(Some(Exit::Signal(9)))),
            victims: vec![Victims {
                communicator: comm,
                ranks: vec![Rank(0), Rank(1)],
                order: 3,
                track: Track::Collective,
            }],
            first_seen: Some("2026-11-21T09:00:03Z".into()),
            ..Finding::new(Kind::MissingRank, comm, vec![Rank(3)], operation)
        }
    }

    #[test]
    fn the_json_schema_is_stable() {
        let mut out = Vec::new();
        json(&mut out, &[sample()]).expect("written");
        assert_eq!(
            String::from_utf8(out).expect("text"),
            concat!(
                r#"{"kind":"missing-rank","communicator":"000000002cb0a93e","ranks":[3],"operation":{"order":3,"#,
                r#""func":"AllReduce","bytes":16777216,"dtype":"ncclFloat32","algo":"RING","proto":null,"#,
                r#""redop":"ncclSum","track":"collective"},"since":"2026-11-21T09:00:00Z","evidence":[{"text":"ranks 0, 1, 2 wait","value":3.5,"unit":"s"}],"#,
                r#""advice":"look at rank 3","id":"e3d76a4a55f0c9c7","cause":{"kind":"process-gone","signal":9},"#,
                r#""victims":[{"communicator":"000000002cb0a93e","ranks":[0,1],"order":3,"track":"collective"}],"#,
                r#""severity":"critical","confidence":"proven","first_seen":"2026-11-21T09:00:03Z","#,
                r#""last_seen":null,"open":true,"closed_at":null,"close_reason":null,"count":1}"#,
                "\n"
            )
        );
    }

    #[test]
    fn text_says_what_since_when_and_what_next() {
        let mut out = Vec::new();
        text(&mut out, &[sample()]).expect("written");
        let text = String::from_utf8(out).expect("text");
        assert!(text.starts_with("missing-rank: rank 3 in AllReduce of 16777216 bytes (order 3,"), "{text}");
        assert!(
            text.contains("critical, since 2026-11-21T09:00:00Z\n") && text.contains("next: look at rank 3")
        );
    }

    #[test]
    fn a_price_and_a_count_stand_in_the_json_and_in_the_text() {
        let loss = crate::model::Loss::new(1_800_000_000, 60_000_000_000);
        let cost = Some(crate::model::JobCost { last_minute: loss, in_all: loss });
        let f = Finding { count: 3, cost, ..sample() };
        let mut out = Vec::new();
        json(&mut out, std::slice::from_ref(&f)).expect("written");
        let line = String::from_utf8(out).expect("text");
        let price =
            r#""cost":{"last_minute":{"lost_s":1.8,"of_s":60.0,"percent":3.0},"in_all":{"lost_s":1.8,"#;
        assert!(line.contains(price) && line.ends_with("\"count\":3}\n"), "{line}");
        assert_eq!(serde_json::from_str::<Finding>(&line).expect("read").cost, f.cost);
        // A finding of an older release has neither.
        let old = line.replace(",\"count\":3", "");
        let old = serde_json::from_str::<Finding>(&old).expect("read");
        assert_eq!(old.count, 1);
        let mut out = Vec::new();
        finding(&mut out, &f).expect("written");
        assert!(String::from_utf8(out).expect("text").contains(", opened 3 times\n"));
    }

    #[test]
    fn the_summary_shows_what_is_worth_an_alarm_and_counts_the_rest() {
        let info = Finding { severity: crate::model::Severity::Info, ..sample() };
        let said = |findings: Vec<Finding>| {
            let mut out = Vec::new();
            summary(&mut out, &Snapshot { findings, ..Snapshot::default() }).expect("written");
            String::from_utf8(out).expect("text")
        };
        assert!(said(vec![]).ends_with("ringwatch: no findings\n"));
        assert!(said(vec![info.clone()]).contains("ringwatch: no findings (1 more of severity info"));
        let both = said(vec![info, sample()]);
        assert!(
            both.contains("ringwatch: findings (1 more") && both.matches("next: ").count() == 1,
            "{both}"
        );
    }

    #[test]
    fn size_classes_read_as_sizes() {
        assert_eq!(size(0), "1 B");
        assert_eq!(size(19), "512 KiB");
        assert_eq!(size(24), "16 MiB");
        assert_eq!(size(63), "8 EiB");
    }
}
