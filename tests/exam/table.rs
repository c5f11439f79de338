//! The score by family and by kind of fault, as a table.

use crate::score::{Count, Report, WAYS};
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// Scores of many jobs.
#[derive(Debug, Default)]
pub(crate) struct Table {
    /// By row and path.
    rows: BTreeMap<(u8, String), [Count; 3]>,
    /// Healthy jobs, and those of them with a warning, by path.
    healthy: u32,
    warned: [u32; 3],
    times: Vec<(Duration, u64)>,
}

impl Table {
    pub(crate) fn add(&mut self, report: &Report, took: Duration) {
        let names = [(0, "all"), (1, report.spec.family.as_str()), (2, &report.label)];
        for (level, name) in names {
            let row = self.rows.entry((level, name.to_owned())).or_default();
            row.iter_mut().zip(&report.verdicts).for_each(|(sum, v)| sum.add(&v.count));
        }
        if report.label == "none" {
            self.healthy += 1;
            for (warned, v) in self.warned.iter_mut().zip(&report.verdicts) {
                *warned += u32::from(v.count.wrong > 0);
            }
        }
        self.times.push((took, report.spec.seed));
    }

    /// The rows of families, and of all together.
    pub(crate) fn families(&self) -> impl Iterator<Item = (&str, &[Count; 3])> {
        self.rows.iter().filter(|((level, _), _)| *level < 2).map(|((_, name), row)| (name.as_str(), row))
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, way) in WAYS.iter().enumerate() {
            writeln!(f, "\n{way:?}")?;
            writeln!(
                f,
                "{:18} {:>6} {:>8} {:>8} {:>8} {:>6} {:>6} {:>6} {:>8} {:>5}  {:>9} {:>6}",
                "",
                "jobs",
                "planted",
                "allowed",
                "required",
                "true",
                "false",
                "missed",
                "wrong op",
                "late",
                "precision",
                "recall"
            )?;
            for ((_, name), row) in &self.rows {
                let c = &row[i];
                writeln!(
                    f,
                    "{name:18} {:6} {:8} {:8} {:8} {:6} {:6} {:6} {:8} {:5}  {:9.3} {:6.3}",
                    c.jobs,
                    c.planted,
                    c.allowed,
                    c.required,
                    c.right,
                    c.wrong,
                    c.missed,
                    c.other_operation,
                    c.late,
                    c.precision(),
                    c.recall()
                )?;
            }
            writeln!(f, "healthy jobs with a warning: {} of {}", self.warned[i], self.healthy)?;
        }
        let mut times = self.times.clone();
        times.sort_unstable();
        write!(f, "slowest seeds:")?;
        for (took, seed) in times.iter().rev().take(8) {
            write!(f, " {seed} {:.1} s", took.as_secs_f64())?;
        }
        writeln!(f)?;
        Ok(())
    }
}
