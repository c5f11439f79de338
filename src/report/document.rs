//! The report as a document: one HTML file that loads nothing, or Markdown.
//!
//! Both are made of the same sections (`sections`). A section has a chart where there are data for it, and a table.

mod sections;

use super::pages::{Page, Pages, plain};
use crate::model::{Finding, Severity, Snapshot};
use crate::timeline::JobCharts;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{AutoEscape, Environment, Value, context};
use sections::Section;
use serde::Serialize;
use std::io::{self, Write};

/// The chart library, Apache ECharts.
const LIBRARY: &str = include_str!(env!("RINGWATCH_ECHARTS"));
const STYLE: &str = include_str!("document/report.css");
const SCRIPT: &str = include_str!("document/report.js");
const HTML: &str = include_str!("document/report.html");
const MARKDOWN: &str = include_str!("document/report.md");

/// The form of a document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// One HTML file.
    Html,
    /// GitHub's Markdown, without charts.
    Markdown,
}

/// Everything that a document is made of.
#[derive(Debug, Clone)]
pub struct Document<'a> {
    /// The jobs.
    pub snapshot: &'a Snapshot,
    /// The charts of each job, in the snapshot's order; empty for sources without operations.
    pub charts: &'a [JobCharts],
    /// What the source lacks, in sentences.
    pub notes: &'a [String],
}

/// A finding, as it is shown.
#[derive(Debug, Serialize)]
struct Shown {
    severity: &'static str,
    headline: String,
    state: String,
    evidence: Vec<String>,
    advice: String,
}

/// A job, as it is shown.
#[derive(Debug, Serialize)]
struct Job {
    index: usize,
    name: String,
    facts: Vec<(&'static str, String)>,
    sections: Vec<Section>,
}

impl Document<'_> {
    /// Writes the document.
    ///
    /// # Errors
    /// Those of the writer.
    pub fn write(&self, form: Form, out: &mut impl Write) -> io::Result<()> {
        let pages = Pages::of(self.snapshot);
        let (name, template, escape) = match form {
            Form::Html => ("report.html", HTML, AutoEscape::Html),
            Form::Markdown => ("report.md", MARKDOWN, AutoEscape::None),
        };
        let mut templates = Environment::new();
        templates.set_auto_escape_callback(move |_| escape.clone());
        templates.set_syntax(SyntaxConfig::builder().trim_blocks(true).build().map_err(io::Error::other)?);
        templates.add_filter("cell", cell);
        templates.add_template(name, template).map_err(io::Error::other)?;
        let findings: Vec<&Finding> = in_order(&self.snapshot.findings);
        let worst = findings.iter().map(|f| f.severity).max();
        let no_charts = JobCharts::default();
        let jobs = pages.jobs.iter().enumerate().map(|(index, page)| {
            let charts = self.charts.get(index).unwrap_or(&no_charts);
            Job {
                index,
                name: page.job.as_deref().map_or_else(|| "without a name".to_owned(), plain),
                facts: facts(page),
                sections: sections::of(self.snapshot, page, charts, index),
            }
        });
        // Of what ends an element in HTML, JSON has `<` alone.
        let data = serde_json::to_string(self.charts)?.replace('<', "\\u003c");
        let view = context! {
            source => plain(&pages.source),
            at => pages.at,
            version => env!("CARGO_PKG_VERSION"),
            findings => Value::from(Serde(findings.iter().map(|f| Shown::of(f)).collect::<Vec<_>>())),
            worst => worst.map(Severity::as_str),
            counts => counts(&findings),
            unread => pages.unread.iter().map(|u| plain(&u.to_string())).collect::<Vec<_>>(),
            notes => self.notes.iter().map(|note| plain(note)).collect::<Vec<_>>(),
            jobs => Value::from(Serde(jobs.collect::<Vec<_>>())),
            data,
            style => STYLE,
            library => LIBRARY,
            script => SCRIPT,
        };
        let text = templates.get_template(name).and_then(|t| t.render(view)).map_err(io::Error::other)?;
        out.write_all(text.as_bytes())
    }
}

impl Shown {
    fn of(f: &Finding) -> Self {
        let since = f.since.as_ref().map_or_else(String::new, |t| format!(", since {t}"));
        let state = match (f.open, f.close_reason) {
            (true, _) => "Open".to_owned(),
            (false, reason) => {
                let at = f.closed_at.as_ref().map_or_else(String::new, |t| format!(" at {t}"));
                let why = reason.map_or_else(String::new, |r| format!(" ({})", r.as_str()));
                format!("Closed{at}{why}")
            }
        };
        let times = if f.count > 1 { format!(", opened {} times", f.count) } else { String::new() };
        let cost = f.cost.map_or_else(String::new, |c| format!(". It cost {c}"));
        Shown {
            severity: f.severity.as_str(),
            headline: plain(&f.headline()),
            state: format!("{state}{since}{times}{cost}."),
            evidence: f.evidence.iter().map(|e| plain(&e.text)).collect(),
            advice: plain(&f.advice),
        }
    }
}

/// The most severe first, and of these open ones.
fn in_order(findings: &[Finding]) -> Vec<&Finding> {
    let mut all: Vec<&Finding> = findings.iter().collect();
    all.sort_by_key(|f| std::cmp::Reverse((f.severity, f.open)));
    all
}

/// `2 critical, 1 info`.
fn counts(findings: &[&Finding]) -> String {
    let of = |severity: Severity| findings.iter().filter(|f| f.severity == severity).count();
    let all = [Severity::Critical, Severity::Warning, Severity::Info];
    let some = all.into_iter().filter(|s| of(*s) > 0);
    some.map(|s| format!("{} {}", of(s), s.as_str())).collect::<Vec<_>>().join(", ")
}

/// The first facts about a job.
fn facts(page: &Page) -> Vec<(&'static str, String)> {
    let unknown = || "-".to_owned();
    let share = |share: Option<f64>| share.map_or_else(unknown, |s| format!("{:.1} %", s * 100.0));
    let size = page.size.map_or_else(unknown, |n| n.to_string());
    let ranks = match page.unknown {
        0 => format!("{} running, {} gone, of {size}", page.running, page.gone),
        n => format!("{n} in files, of {size}"),
    };
    let hosts: Vec<String> = page.hosts.iter().take(8).map(|h| plain(h)).collect();
    let more = page.hosts.len().saturating_sub(hosts.len());
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    vec![
        ("Ranks", ranks),
        ("Nodes", page.nodes.map_or_else(unknown, |n| n.to_string())),
        ("Hosts seen", if hosts.is_empty() { unknown() } else { format!("{}{more}", hosts.join(", ")) }),
        ("NCCL", page.nccl.as_deref().map_or_else(unknown, plain)),
        ("Seen for", page.seen_s.map_or_else(unknown, super::pages::lasting)),
        ("In collectives", share(page.communication_share)),
        (
            "GPU times known",
            format!("{} of {} operations", share(page.coverage.share()), page.coverage.operations),
        ),
    ]
}

/// A text in Markdown that stays one: in a cell of a table, in one line, without markup.
fn cell(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' | '\r' => out.push(' '),
            '|' | '`' | '*' | '_' | '<' | '>' | '[' | ']' | '\\' | '#' | '~' => {
                out.push('\\');
                out.push(c);
            }
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests;
