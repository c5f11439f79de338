//! The examiner: jobs invented from seeds, what is true of them, and what the product finds.
//!
//! `RINGWATCH_EXAM_SEEDS` and `RINGWATCH_EXAM_FROM` choose the seeds, or `RINGWATCH_EXAM_ONLY` lists them with commas between;
//! `RINGWATCH_EXAM_SHOW=1` prints those that fail,
//! `RINGWATCH_EXAM_KIND` examines only jobs with this kind of fault (`none`: healthy ones), and shows all of them,
//! `RINGWATCH_EXAM_SHRINK=1` prints the smallest job that still fails in the same way, and `RINGWATCH_EXAM_FLOOR=1` the
//! score in the form of floor.yaml.

mod floor;
mod generate;
mod random;
mod score;
mod shrink;
#[path = "../simulator/mod.rs"]
#[allow(dead_code, unused_imports, reason = "each test uses a part of the simulator")]
mod simulator;
mod spec;
mod table;
mod truth;
mod visible;
mod waits;
#[path = "../watch/mod.rs"]
#[allow(dead_code, reason = "each test uses a part of it")]
mod watch;

use score::{Report, examine};
use spec::Spec;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use table::Table;

/// Operations that are shown of those that are open at the end.
const SHOWN: usize = 40;
/// Seeds of the run that every build makes.
const FIXED: u64 = 500;

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |t| t.parse().unwrap_or_else(|_| panic!("{name} is no number: {t}")))
}

fn asked(name: &str) -> bool {
    std::env::var(name).is_ok_and(|t| t == "1")
}

/// The seeds to examine.
fn seeds(from: u64, many: u64) -> Vec<u64> {
    let Ok(list) = std::env::var("RINGWATCH_EXAM_ONLY") else { return (from..from + many).collect() };
    let seed = |t: &str| t.parse().unwrap_or_else(|_| panic!("RINGWATCH_EXAM_ONLY has no number: {t}"));
    list.split(',').map(seed).collect()
}

fn show(report: &Report) {
    println!("seed {}: {} {}", report.spec.seed, report.spec.family.as_str(), report.label);
    println!("    {:?}", report.spec);
    for truth in &report.truths {
        println!("    truth: {truth:?}");
    }
    for line in report.open.iter().take(SHOWN) {
        println!("    open: {line}");
    }
    for line in report.origins.iter().take(3 * SHOWN) {
        println!("    origin: {line}");
    }
    for verdict in &report.verdicts {
        for found in &verdict.found {
            println!("    {:?} found: {found}", verdict.way);
        }
        for flaw in &verdict.flaws {
            println!("    {:?}: {flaw}", verdict.way);
        }
    }
}

#[test]
fn invented_jobs_are_judged_rightly() {
    let (many, from) = (number("RINGWATCH_EXAM_SEEDS", FIXED), number("RINGWATCH_EXAM_FROM", 0));
    let kind = std::env::var("RINGWATCH_EXAM_KIND").ok();
    let seeds = seeds(from, many);
    let threads = std::thread::available_parallelism().map_or(2, usize::from);
    let next = AtomicUsize::new(0);
    let table = Mutex::new(Table::default());
    let began = std::time::Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(seed) = seeds.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let spec = Spec::from_seed(*seed);
                    if kind.as_ref().is_some_and(|k| *k != spec.label()) {
                        continue;
                    }
                    let started = std::time::Instant::now();
                    let report = examine(&spec);
                    if asked("RINGWATCH_EXAM_SHRINK") && !report.is_clean() {
                        let small = shrink::smallest(&report);
                        show(&small);
                        println!("{}", shrink::as_scenario(&small));
                    }
                    let mut table = table.lock().unwrap_or_else(PoisonError::into_inner);
                    table.add(&report, started.elapsed());
                    if kind.is_some() || asked("RINGWATCH_EXAM_SHOW") && !report.is_clean() {
                        show(&report);
                    }
                }
            });
        }
    });
    let table = table.into_inner().unwrap_or_else(PoisonError::into_inner);
    println!("{table}");
    println!("{} seeds from {from} in {:.1} s", seeds.len(), began.elapsed().as_secs_f64());
    if asked("RINGWATCH_EXAM_FLOOR") {
        println!("{}", floor::reached(&table));
    } else if seeds == (0..FIXED).collect::<Vec<u64>>() {
        let below = floor::below(&table);
        assert!(below.is_empty(), "see tests/exam/floor.yaml:\n{}", below.join("\n"));
    }
}
