//! The meanings of the driver's error numbers.

use crate::model::Severity;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::sync::OnceLock;

const TABLE: &str = include_str!("xids.yaml");

/// The most likely cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Fault {
    Application,
    Driver,
    Memory,
    Gpu,
    Fabric,
    Pcie,
    Power,
    Consequence,
}

impl Fault {
    /// As the end of a sentence.
    pub(super) fn words(self) -> &'static str {
        match self {
            Fault::Application => "most likely the program",
            Fault::Driver => "most likely the driver or its firmware",
            Fault::Memory => "the GPU's memory",
            Fault::Gpu => "most likely the GPU itself",
            Fault::Fabric => "the links between GPUs, or what is at their other end",
            Fault::Pcie => "the GPU, its slot or its power",
            Fault::Power => "the power supply",
            Fault::Consequence => "something that came before it",
        }
    }
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Grade {
    Info,
    Warning,
    Critical,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    codes: Vec<u64>,
    means: String,
    fault: Fault,
    severity: Grade,
    advice: String,
}

/// The meaning of one number.
#[derive(Debug, Clone)]
pub(super) struct Meaning {
    pub(super) means: String,
    pub(super) fault: Fault,
    pub(super) severity: Severity,
    pub(super) advice: String,
}

fn table() -> &'static BTreeMap<u64, Meaning> {
    static READ: OnceLock<BTreeMap<u64, Meaning>> = OnceLock::new();
    READ.get_or_init(|| {
        // A test reads it: what is shipped can be read.
        let rows: Vec<Row> = serde_yaml::from_str(TABLE).unwrap_or_default();
        let mut all = BTreeMap::new();
        for row in rows {
            let severity = match row.severity {
                Grade::Info => Severity::Info,
                Grade::Warning => Severity::Warning,
                Grade::Critical => Severity::Critical,
            };
            for code in &row.codes {
                let (means, advice) = (row.means.clone(), row.advice.clone());
                all.insert(*code, Meaning { means, fault: row.fault, severity, advice });
            }
        }
        all
    })
}

/// The meaning of a number, if it is a known one.
pub(super) fn meaning(code: u64) -> Option<&'static Meaning> {
    table().get(&code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_can_be_read_and_says_something_of_each() {
        let rows: Vec<Row> = serde_yaml::from_str(TABLE).expect("the table");
        let codes: Vec<u64> = rows.iter().flat_map(|r| r.codes.clone()).collect();
        assert_eq!(codes.len(), table().len(), "no number twice");
        for code in
            [13, 31, 32, 38, 43, 45, 48, 61, 62, 63, 64, 68, 69, 74, 79, 92, 94, 95, 109, 110, 119, 120, 121]
        {
            assert!(meaning(code).is_some(), "{code}");
        }
        for code in [137, 140, 143, 144, 145, 146, 147, 148, 149, 150, 154] {
            assert!(meaning(code).is_some(), "{code}");
        }
        assert!(rows.iter().all(|r| r.means.len() > 20 && r.advice.len() > 20));
        assert!(meaning(9999).is_none());
    }
}
