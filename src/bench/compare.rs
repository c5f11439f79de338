//! The arithmetic of a comparison: the same sweep under several variants of the environment, round by round.
//!
//! A ratio is taken of two measurements that lie side by side in time, so that what changes slowly (clocks,
//! temperature, other jobs) touches both sides of it. The median of these is a round's, and the median over the
//! rounds, whose processes are new, is what counts.

use super::op::Placement;
use super::result::{Report, SCHEMA, Timing, median};
use serde::{Deserialize, Serialize};

/// One variant in one round.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Trial {
    /// The variant's name.
    pub variant: String,
    /// The round, from 0.
    pub round: u32,
    /// The report; `None` where it failed, or where another process has the numbers.
    pub report: Option<Report>,
    /// Why it failed.
    pub failure: Option<String>,
}

/// Ratios of one variant's times to another's, of the same rounds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Ratio {
    /// The middle one.
    pub median: f64,
    /// The smallest round's.
    pub min: f64,
    /// The largest round's.
    pub max: f64,
    /// Rounds in which both were measured.
    pub rounds: u32,
    /// Pairs of measurements in all of them.
    pub pairs: u32,
}

impl Ratio {
    /// Of each round's repeats, those of the same turn beside each other.
    fn of(own: &[Option<&Timing>], other: &[Option<&Timing>]) -> Option<Self> {
        let mut pairs = 0;
        let mut round = |a: &Timing, b: &Timing| {
            let both = a.repeats_ns.iter().zip(&b.repeats_ns).filter(|(_, b)| **b > 0.0);
            let ratios: Vec<f64> = both.map(|(a, b)| a / b).collect();
            pairs += ratios.len();
            (!ratios.is_empty()).then(|| median(&ratios))
        };
        let ratios: Vec<f64> = own.iter().zip(other).filter_map(|(a, b)| round((*a)?, (*b)?)).collect();
        let min = ratios.iter().copied().reduce(f64::min)?;
        let max = ratios.iter().copied().reduce(f64::max)?;
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        Some(Ratio { median: median(&ratios), min, max, rounds: count(ratios.len()), pairs: count(pairs) })
    }
}

/// One variant at one size.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Cell {
    /// Time an operation in each round; `null` where it failed.
    pub rounds_ns: Vec<Option<f64>>,
    /// Their median; `None` where every round failed.
    pub time_ns: Option<f64>,
    /// To the baseline.
    pub ratio: Option<Ratio>,
    /// To the variant's floor, where it has one.
    pub ratio_to_floor: Option<Ratio>,
}

/// One size, in place or out of place.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Bytes of the larger buffer.
    pub size_bytes: u64,
    /// True where the results lie over the input.
    pub in_place: bool,
    /// One for each variant, in their order.
    pub cells: Vec<Cell>,
}

/// A variant over all rounds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VariantSummary {
    /// Its name.
    pub name: String,
    /// The variables that it sets in the environment.
    pub variables: Vec<(String, String)>,
    /// The variant that it is compared with besides the baseline.
    pub floor: Option<String>,
    /// Rounds in which it was measured.
    pub measured: u32,
    /// Why it failed, in each round where it did.
    pub failures: Vec<String>,
    /// Elements that were wrong, in all rounds; `None` where nothing was checked.
    pub wrong: Option<u64>,
}

/// Everything of one comparison; `ringwatch bench --compare --json` prints it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The variant that the others are divided by.
    pub baseline: String,
    /// How many rounds.
    pub rounds: u32,
    /// In their order.
    pub variants: Vec<VariantSummary>,
    /// One for each size, out of place and then in place.
    pub rows: Vec<Row>,
    /// All that was measured, in the order of time.
    pub trials: Vec<Trial>,
}

/// The order of a round: each variant is first, second, ... equally often over as many rounds as there are
/// variants, since whoever goes first meets a colder GPU.
#[must_use]
pub fn order(variants: usize, round: u32) -> Vec<usize> {
    let first = if variants == 0 { 0 } else { round as usize % variants };
    (first..variants).chain(0..first).collect()
}

/// Reads a mask of events, decimal or hexadecimal behind `0x`, as the null plugin does.
#[must_use]
pub fn parse_mask(text: &str) -> Option<u32> {
    let hex = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X"));
    let (digits, base) = hex.map_or((text, 10), |h| (h, 16));
    let plain = digits.bytes().all(|b| b.is_ascii_hexdigit());
    u32::from_str_radix(digits, base).ok().filter(|m| plain && *m <= i32::MAX.cast_unsigned())
}

/// Puts the trials side by side. `variants` come with nothing counted yet; the baseline is the first.
#[must_use]
pub fn summarise(mut variants: Vec<VariantSummary>, rounds: u32, trials: Vec<Trial>) -> Comparison {
    let of = |name: &str, round: u32| {
        trials.iter().find(|t| t.variant == name && t.round == round).and_then(|t| t.report.as_ref())
    };
    let mut keys: Vec<(u64, Placement)> = Vec::new();
    if let Some(report) = trials.iter().find_map(|t| t.report.as_ref()) {
        for size in &report.sizes {
            keys.push((size.size_bytes, Placement::OutOfPlace));
            if size.in_place.is_some() {
                keys.push((size.size_bytes, Placement::InPlace));
            }
        }
    }
    let times = |name: &str, key: &(u64, Placement)| -> Vec<Option<&Timing>> {
        (0..rounds).map(|r| of(name, r).and_then(|report| timing(report, key))).collect()
    };
    let baseline = variants.first().map(|v| v.name.clone()).unwrap_or_default();
    let mut rows = Vec::new();
    for key in &keys {
        let base = times(&baseline, key);
        let cells = variants.iter().map(|v| {
            let own = times(&v.name, key);
            let rounds_ns: Vec<Option<f64>> = own.iter().map(|t| t.map(|t| t.time_ns)).collect();
            let there: Vec<f64> = rounds_ns.iter().flatten().copied().collect();
            let floor = v.floor.as_ref().map(|f| times(f, key));
            Cell {
                time_ns: (!there.is_empty()).then(|| median(&there)),
                ratio: Ratio::of(&own, &base),
                ratio_to_floor: floor.and_then(|f| Ratio::of(&own, &f)),
                rounds_ns,
            }
        });
        rows.push(Row { size_bytes: key.0, in_place: key.1 == Placement::InPlace, cells: cells.collect() });
    }
    for v in &mut variants {
        let own = || trials.iter().filter(|t| t.variant == v.name);
        let reports = || own().filter_map(|t| t.report.as_ref());
        v.measured = u32::try_from(reports().count()).unwrap_or(u32::MAX);
        v.wrong = reports().filter_map(|r| r.wrong).reduce(|a, b| a + b);
        v.failures = own().filter_map(|t| t.failure.clone()).collect();
    }
    Comparison { schema: SCHEMA, baseline, rounds, variants, rows, trials }
}

fn timing<'a>(report: &'a Report, key: &(u64, Placement)) -> Option<&'a Timing> {
    let size = report.sizes.iter().find(|s| s.size_bytes == key.0)?;
    if key.1 == Placement::InPlace { size.in_place.as_ref() } else { Some(&size.out_of_place) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::{Collective, fixtures};

    fn report(time_ns: f64) -> Report {
        let mut report = fixtures::report(Collective::SendRecv, &[(8, &[time_ns / 1e3])]);
        report.sizes[0].out_of_place.wrong = Some(1);
        Report::new(report.settings, report.environment, report.sizes)
    }

    fn variant(name: &str, floor: Option<&str>) -> VariantSummary {
        VariantSummary {
            name: name.to_owned(),
            variables: Vec::new(),
            floor: floor.map(str::to_owned),
            measured: 0,
            failures: Vec::new(),
            wrong: None,
        }
    }

    fn trial(variant: &str, round: u32, time_ns: Option<f64>) -> Trial {
        Trial {
            variant: variant.to_owned(),
            round,
            report: time_ns.map(report),
            failure: time_ns.is_none().then(|| "it fell".to_owned()),
        }
    }

    #[test]
    fn nobody_is_always_first() {
        let firsts: Vec<usize> = (0..4).map(|r| order(4, r)[0]).collect();
        assert_eq!(firsts, [0, 1, 2, 3]);
        assert_eq!(order(3, 4), [1, 2, 0]);
        assert!(order(0, 7).is_empty());
    }

    #[test]
    fn ratios_are_of_the_same_round() {
        // Everything gets slower and slower; a ratio of medians would hide nothing here, one of rounds is exact.
        let trials = vec![
            trial("none", 0, Some(100.0)),
            trial("slow", 0, Some(110.0)),
            trial("slow", 1, Some(220.0)),
            trial("none", 1, Some(200.0)),
            trial("none", 2, Some(400.0)),
            trial("slow", 2, Some(480.0)),
            trial("floor", 2, Some(400.0)),
        ];
        let c = summarise(
            vec![variant("none", None), variant("slow", Some("floor")), variant("floor", None)],
            3,
            trials,
        );
        assert_eq!((c.baseline.as_str(), c.rows.len()), ("none", 1));
        let cells = &c.rows[0].cells;
        assert_eq!(cells[0].ratio, Some(Ratio { median: 1.0, min: 1.0, max: 1.0, rounds: 3, pairs: 3 }));
        let slow = cells[1].ratio.unwrap();
        assert!((slow.median - 1.1).abs() < 1e-9 && (slow.max - 1.2).abs() < 1e-9, "{slow:?}");
        assert_eq!(cells[1].time_ns, Some(220.0));
        assert_eq!(cells[1].ratio_to_floor.unwrap().rounds, 1);
        assert_eq!(cells[2].rounds_ns, [None, None, Some(400.0)]);
        assert_eq!((c.variants[1].measured, c.variants[1].wrong), (3, Some(3)));
    }

    #[test]
    fn a_failure_leaves_a_gap_and_its_reason() {
        let trials = vec![trial("none", 0, None), trial("new", 0, Some(50.0))];
        let c = summarise(vec![variant("none", None), variant("new", None)], 1, trials);
        assert_eq!(c.variants[0].failures, ["it fell"]);
        assert_eq!(c.rows[0].cells[0].time_ns, None);
        assert_eq!(c.rows[0].cells[1].ratio, None);
    }

    #[test]
    fn masks_are_read_as_the_plugin_reads_them() {
        assert_eq!((parse_mask("66"), parse_mask("0xF5f")), (Some(66), Some(0xf5f)));
        for text in ["", "0x", "-1", "+1", "0x+1", "4294967295", "all"] {
            assert_eq!(parse_mask(text), None, "{text}");
        }
    }

    #[test]
    fn medians_are_of_the_middle() {
        assert!((median(&[3.0, 1.0, 2.0]) - 2.0).abs() < 1e-9);
        assert!((median(&[4.0, 1.0, 2.0, 3.0]) - 2.5).abs() < 1e-9);
        assert!(median(&[]).abs() < 1e-9);
    }
}
