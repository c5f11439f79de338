//! Two jobs compared: what became slower, by how much, and how sure that is.
//!
//! Steps, classes of operations and ranks are compared by samples ([`crate::timeline::Profile`]) with the Mann-Whitney test.

use crate::bench::rank_comparison;
use crate::model::size_text;
use crate::timeline::Profile;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};

/// Parts into which the longer one of two jobs is cut.
const PARTS: usize = 32;
/// From this confidence on a change counts.
const CONFIDENCE: f64 = 0.99;
/// A share of time has changed from so many parts of 1 on.
const POINTS: f64 = 0.02;

/// The subject of a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Subject {
    /// The step time of a rank.
    Step,
    /// The transfer time of a class of operations; waiting is not in it.
    Operation,
    /// The share of time that a rank waited for others.
    Waited,
    /// The share of time in which others waited for a rank.
    WaitedFor,
}

/// How a row came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Trend {
    /// Slower, or a greater share, by more than the threshold, with confidence.
    Worse,
    /// Faster, or a smaller share, by more than the threshold, with confidence.
    Better,
    /// No change beyond the threshold, or one that chance explains.
    Same,
    /// There are too few samples.
    Unknown,
}

/// One comparison.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// The subject.
    pub subject: Subject,
    /// Which one, in words.
    pub name: String,
    /// `ms`, `us`, or `share`.
    pub unit: &'static str,
    /// The median of the old samples; each is one of at most 32 parts of a job.
    pub old: f64,
    /// The median of the new ones.
    pub new: f64,
    /// Their numbers.
    pub old_samples: usize,
    /// The number of new samples.
    pub new_samples: usize,
    /// Of times the ratio less one (0.05 is 5 % slower), of shares the difference.
    pub change: f64,
    /// Bounds of the change of a time, with a confidence of 95 %.
    pub interval: Option<(f64, f64)>,
    /// How sure it is that something changed, 0 to 1.
    pub confidence: Option<f64>,
    /// How it came out.
    pub trend: Trend,
}

/// All comparisons.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Diff {
    /// The first job.
    pub old: String,
    /// The second job.
    pub new: String,
    /// The share from which on a time has changed.
    pub threshold: f64,
    /// By subject, the greatest changes first.
    pub rows: Vec<Row>,
    /// The names of rows that only the first job has.
    pub only_old: Vec<String>,
    /// The names of rows that only the second job has.
    pub only_new: Vec<String>,
}

impl Diff {
    /// Compares two jobs. A time has changed from `threshold` on.
    pub fn of((old_name, old): (&str, &Profile), (new_name, new): (&str, &Profile), threshold: f64) -> Self {
        let mut diff = Diff {
            old: old_name.to_owned(),
            new: new_name.to_owned(),
            threshold,
            rows: Vec::new(),
            only_old: Vec::new(),
            only_new: Vec::new(),
        };
        diff.add(Subject::Step, &old.steps, &new.steps, |rank| format!("rank {rank}"));
        diff.add(Subject::Operation, &old.classes, &new.classes, |class| {
            let size = class
                .from_bytes
                .map_or_else(|| "unknown size".to_owned(), |b| format!("from {}", size_text(b)));
            let ranks = class.ranks.map_or_else(|| "-".to_owned(), |n| n.to_string());
            let algorithm =
                [class.algorithm, class.protocol].into_iter().flatten().collect::<Vec<_>>().join("/");
            let algorithm = if algorithm.is_empty() { algorithm } else { format!(", {algorithm}") };
            format!("{} {size}, {ranks} ranks{algorithm}", class.operation)
        });
        diff.add(Subject::Waited, &old.waited, &new.waited, |rank| format!("rank {rank}"));
        diff.add(Subject::WaitedFor, &old.held, &new.held, |rank| format!("rank {rank}"));
        let order = |row: &Row| (row.subject, row.trend != Trend::Worse, row.trend != Trend::Better);
        diff.rows.sort_by(|a, b| order(a).cmp(&order(b)).then(b.change.abs().total_cmp(&a.change.abs())));
        diff
    }

    /// The number of rows that came out like this.
    pub fn count(&self, trend: Trend) -> usize {
        self.rows.iter().filter(|r| r.trend == trend).count()
    }

    fn add<K: Ord>(
        &mut self,
        subject: Subject,
        old: &BTreeMap<K, Vec<f64>>,
        new: &BTreeMap<K, Vec<f64>>,
        name: impl Fn(&K) -> String,
    ) {
        let keys: BTreeSet<&K> = old.keys().chain(new.keys()).collect();
        for key in keys {
            let some = |all: &BTreeMap<K, Vec<f64>>| all.get(key).filter(|s| !s.is_empty()).cloned();
            match (some(old), some(new)) {
                (Some(before), Some(now)) => {
                    let row = row(subject, name(key), &before, &now, self.threshold);
                    // A rank that nobody waits for in either job says nothing.
                    if row.unit != "share" || row.old.max(row.new) >= POINTS {
                        self.rows.push(row);
                    }
                }
                (Some(_), None) if subject <= Subject::Operation => self.only_old.push(name(key)),
                (None, Some(_)) if subject <= Subject::Operation => self.only_new.push(name(key)),
                _ => {}
            }
        }
    }

    /// Writes them for people.
    ///
    /// # Errors
    /// The writer failed.
    pub fn text(&self, out: &mut impl Write) -> io::Result<()> {
        writeln!(out, "old: {}\nnew: {}", self.old, self.new)?;
        let (worse, better) = (self.count(Trend::Worse), self.count(Trend::Better));
        writeln!(
            out,
            "{worse} worse, {better} better, {} the same, {} with too few samples (threshold {:.1} %, confidence {:.0} %)",
            self.count(Trend::Same),
            self.count(Trend::Unknown),
            self.threshold * 100.0,
            CONFIDENCE * 100.0
        )?;
        for (subject, title, unit) in [
            (Subject::Step, "step time of", "ms"),
            (Subject::Operation, "transfer time of", "us"),
            (Subject::Waited, "time that it waited for others", "%"),
            (Subject::WaitedFor, "time that others waited for it", "%"),
        ] {
            let mut rows = self.rows.iter().filter(|r| r.subject == subject).peekable();
            if rows.peek().is_none() {
                continue;
            }
            writeln!(
                out,
                "\n{title:<52}{:>12}{:>12}{:>10}{:>20}{:>8}",
                format!("old {unit}"),
                format!("new {unit}"),
                "change",
                "95 % interval",
                "sure"
            )?;
            rows.try_for_each(|row| row.text(out))?;
        }
        for (only, which) in [(&self.only_old, "old"), (&self.only_new, "new")] {
            if !only.is_empty() {
                writeln!(out, "\nonly in the {which} one: {}", only.join("; "))?;
            }
        }
        Ok(())
    }
}

impl Row {
    fn text(&self, out: &mut impl Write) -> io::Result<()> {
        let is_share = self.unit == "share";
        let value = |v: f64| if is_share { format!("{:.1}", v * 100.0) } else { format!("{v:.2}") };
        let change = match (self.trend, is_share) {
            (Trend::Unknown, _) => "-".to_owned(),
            (_, true) => format!("{:+.1} pt", self.change * 100.0),
            (_, false) => format!("{:+.1} %", self.change * 100.0),
        };
        let interval = self.interval.map_or_else(
            || "-".to_owned(),
            |(low, high)| format!("{:+.1} to {:+.1} %", low * 100.0, high * 100.0),
        );
        // Rounded down: what is not sure is not called sure.
        let sure =
            self.confidence.map_or_else(|| "-".to_owned(), |c| format!("{:.1}", (c * 1000.0).floor() / 10.0));
        let mark = match self.trend {
            Trend::Worse => "worse  ",
            Trend::Better => "better ",
            Trend::Same | Trend::Unknown => "       ",
        };
        writeln!(
            out,
            "  {mark}{:<43}{:>12}{:>12}{change:>10}{interval:>20}{sure:>8}",
            self.name,
            value(self.old),
            value(self.new)
        )
    }
}

fn median(of: &[f64]) -> f64 {
    let mut sorted = of.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[middle],
        _ => f64::midpoint(sorted[middle - 1], sorted[middle]),
    }
}

/// The mean, or of times the median, of each part of so many values. Neighbors resemble each other, and a part is one sample.
fn samples(values: &[f64], length: usize, is_share: bool) -> Vec<f64> {
    let of = |part: &[f64]| match is_share {
        true => part.iter().sum::<f64>() / part.len() as f64,
        false => median(part),
    };
    // A part that is shorter would be another statistic.
    values.chunks_exact(length).map(of).collect()
}

fn row(subject: Subject, name: String, old: &[f64], new: &[f64], threshold: f64) -> Row {
    let unit = match subject {
        Subject::Step => "ms",
        Subject::Operation => "us",
        Subject::Waited | Subject::WaitedFor => "share",
    };
    let is_share = unit == "share";
    // Both jobs have parts of equally many values: of few values the median is another one than of many.
    let length = old.len().max(new.len()).div_ceil(PARTS).max(1);
    let (old, new) = (samples(old, length, is_share), samples(new, length, is_share));
    let (before, now) = (median(&old), median(&new));
    let change = if is_share { now - before } else { now / before - 1.0 };
    // The test is of ranks, which a sum leaves as they are; its interval is of ratios, which shares of 0 have none of.
    let shifted = |of: &[f64]| -> Vec<f64> { of.iter().map(|v| v + f64::from(u8::from(is_share))).collect() };
    let test = rank_comparison(&shifted(&old), &shifted(&new));
    let least = if is_share { POINTS } else { threshold };
    let trend = match &test {
        None => Trend::Unknown,
        Some(t) if t.confidence_max < CONFIDENCE => Trend::Unknown,
        Some(t) if t.confidence < CONFIDENCE || change.abs() < least => Trend::Same,
        Some(_) if change > 0.0 => Trend::Worse,
        Some(_) => Trend::Better,
    };
    Row {
        subject,
        name,
        unit,
        old: before,
        new: now,
        old_samples: old.len(),
        new_samples: new.len(),
        change,
        interval: test
            .and_then(|t| t.interval)
            .filter(|_| !is_share)
            .map(|(low, high)| (low - 1.0, high - 1.0)),
        confidence: test.map(|t| t.confidence),
        trend,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timeline::ClassProfileKey;

    fn profile(step_ms: f64, transfer_us: f64, waited: f64) -> Profile {
        let spread = |of: f64| (0..32).map(|n| of * (1.0 + f64::from(n % 7) / 300.0)).collect::<Vec<f64>>();
        let class = ClassProfileKey {
            operation: "AllReduce",
            ranks: Some(8),
            from_bytes: Some(1 << 20),
            algorithm: Some("RING"),
            protocol: None,
        };
        Profile {
            steps: [("0".to_owned(), spread(step_ms))].into(),
            classes: [(class, spread(transfer_us))].into(),
            waited: [("0".to_owned(), spread(waited))].into(),
            held: [("0".to_owned(), vec![0.0; 32])].into(),
        }
    }

    fn trends(old: &Profile, new: &Profile) -> Vec<(Subject, Trend)> {
        Diff::of(("a", old), ("b", new), 0.03).rows.iter().map(|r| (r.subject, r.trend)).collect()
    }

    #[test]
    fn a_change_counts_by_its_size_and_its_confidence() {
        let old = profile(100.0, 50.0, 0.10);
        assert!(trends(&old, &old).iter().all(|(_, trend)| *trend == Trend::Same));
        let slower = profile(110.0, 50.5, 0.18);
        let all = trends(&old, &slower);
        assert_eq!(
            all,
            [
                (Subject::Step, Trend::Worse),
                (Subject::Operation, Trend::Same),
                (Subject::Waited, Trend::Worse)
            ],
            "1 % is below the threshold, and nobody waited for rank 0"
        );
        assert_eq!(trends(&slower, &old)[0].1, Trend::Better);
        let diff = Diff::of(("a", &old), ("b", &slower), 0.03);
        let (low, high) = diff.rows[0].interval.expect("many samples");
        assert!(low < 0.1 && 0.1 < high && high - low < 0.03, "{low} {high}");
    }

    #[test]
    fn the_length_of_a_job_makes_no_change() {
        // A generator whose values are the same in each run.
        let mut state = 7_u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as f64 / f64::from(1_u32 << 31)
        };
        let mut wrong = 0;
        for (a, b) in [(32, 60), (30, 50), (64, 96), (500, 4_000)].repeat(50) {
            let mut values = |n: usize| (0..n).map(|_| 90.0 + 20.0 * next()).collect::<Vec<f64>>();
            let (old, new) = (values(a), values(b));
            let row = super::row(Subject::Step, String::new(), &old, &new, 0.0);
            wrong += u32::from(matches!(row.trend, Trend::Worse | Trend::Better));
        }
        assert!(wrong <= 8, "{wrong} of 200 at 99 %");
    }

    #[test]
    fn few_samples_prove_nothing_and_what_one_job_lacks_is_named() {
        let old = profile(100.0, 50.0, 0.0);
        let mut new = profile(200.0, 50.0, 0.0);
        new.steps = [("0".to_owned(), vec![200.0])].into();
        new.classes.clear();
        let diff = Diff::of(("a", &old), ("b", &new), 0.03);
        assert_eq!(
            diff.rows.iter().map(|r| r.trend).collect::<Vec<_>>(),
            [Trend::Unknown],
            "{:?}",
            diff.rows
        );
        assert_eq!(diff.only_old, ["AllReduce from 1 MiB, 8 ranks, RING"]);
        let mut text = Vec::new();
        diff.text(&mut text).expect("written");
        let text = String::from_utf8(text).expect("text");
        assert!(text.contains("only in the old one: AllReduce from 1 MiB"), "{text}");
    }
}
