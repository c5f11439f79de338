//! The least score that the fixed seeds have to reach, by family and path.

use crate::score::WAYS;
use crate::table::Table;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fmt::Write as _;

const FLOOR: &str = include_str!("floor.yaml");

/// Precision and recall.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
struct Least {
    precision: f64,
    recall: f64,
}

/// What is below its floor, in words.
pub(crate) fn below(table: &Table) -> Vec<String> {
    let floors: BTreeMap<String, BTreeMap<String, Least>> =
        serde_yaml::from_str(FLOOR).expect("tests/exam/floor.yaml");
    let mut wrong = Vec::new();
    for (name, row) in table.families() {
        for (way, count) in WAYS.iter().zip(row) {
            let Some(least) = floors.get(name).and_then(|f| f.get(&format!("{way:?}").to_lowercase())) else {
                wrong.push(format!("{name} has no floor"));
                continue;
            };
            for (what, is, floor) in
                [("precision", count.precision(), least.precision), ("recall", count.recall(), least.recall)]
            {
                if is < floor {
                    wrong.push(format!("{name}, {way:?}: {what} {is:.3} is below {floor}"));
                }
            }
        }
    }
    wrong
}

/// The floors that a table reaches, as the file has them.
pub(crate) fn reached(table: &Table) -> String {
    let down = |x: f64| (x * 100.0).floor() / 100.0;
    let mut out = String::new();
    for (name, row) in table.families() {
        writeln!(out, "{name}:").expect("written");
        for (way, c) in WAYS.iter().zip(row) {
            let (way, p, r) = (format!("{way:?}").to_lowercase(), down(c.precision()), down(c.recall()));
            writeln!(out, "  {way}: {{precision: {p:.2}, recall: {r:.2}}}").expect("written");
        }
    }
    out
}
