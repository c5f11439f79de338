//! Runs every parser of bytes that somebody else wrote on hostile bytes.
//!
//! Each target reads every file of its corpus, `tests/data/fuzz/TARGET/`, and then damaged copies of them for a while:
//! 250 ms of CPU time in `cargo test`, ten seconds in `.ci/run`, or as many milliseconds as `RINGWATCH_FUZZ_MS` says. A
//! target fails when its parser panics, holds more than 64 MiB, takes more than 10 s of CPU time, or breaks a rule of its
//! own, such as "what was written is read again" or "no text steers a terminal".
//!
//! `.ci/fuzz SECONDS [TARGET...]` drives the same targets with libFuzzer, which prefers inputs that reach new code. It
//! builds `libfuzzer.rs` with the stable toolchain and a C++ compiler, and prints executions and coverage of each target.
//! `RINGWATCH_FUZZ_JOBS=1` runs one target at a time. To run one input again:
//! `RINGWATCH_FUZZ_TARGET=TARGET target/fuzz/HOST/fuzz/examples/libfuzzer INPUT`.
//!
//! An input that fails is kept, and the message names its file. When the defect is fixed, add the input to the target's
//! corpus under a name that says what it is. All corpora together stay below 2 MiB.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod budget;
mod caught;
mod damage;
mod outputs;
mod plain;
mod targets;

use caught::caught;
use proptest::test_runner::{Config, TestCaseError, TestError, TestRunner};
use std::cell::Cell;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;
use targets::Target;

#[global_allocator]
static ALLOCATOR: budget::Counted = budget::Counted;

/// CPU time in ms for which each target gets damaged inputs, where the variable `RINGWATCH_FUZZ_MS` sets no other time.
const USUAL_MS: u64 = 250;
/// All files of the corpora together, in bytes.
const CORPORA_MAX: u64 = 2 << 20;

fn corpora() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/fuzz")
}

/// The files of a target's corpus, by name.
fn corpus(target: &str) -> Vec<(String, Vec<u8>)> {
    let mut all: Vec<(String, Vec<u8>)> = fs::read_dir(corpora().join(target))
        .map(|entries| {
            let entries = entries.map(|e| e.unwrap());
            entries.map(|e| (e.file_name().into_string().unwrap(), fs::read(e.path()).unwrap())).collect()
        })
        .unwrap_or_default();
    all.sort();
    all
}

fn fuzz(name: &str) {
    let target = targets::ALL.iter().find(|t| t.name == name).unwrap();
    let corpus = corpus(name);
    for (file, bytes) in &corpus {
        if let Err(why) = caught(|| target.run(bytes)) {
            panic!("tests/data/fuzz/{name}/{file}: {why}");
        }
    }
    let time = std::env::var("RINGWATCH_FUZZ_MS").map_or(USUAL_MS, |ms| ms.parse().unwrap());
    let inputs = damaged(target, corpus.into_iter().map(|(_, bytes)| bytes).collect(), time);
    println!("{name}: {inputs} damaged inputs in {time} ms of CPU time");
}

/// The CPU time that this thread has used.
fn cpu_time() -> Duration {
    Duration::try_from(rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime)).unwrap()
}

/// Runs a target on damaged inputs for a while. Returns on how many.
fn damaged(target: &Target, seeds: Vec<Vec<u8>>, time_ms: u64) -> u64 {
    let until = cpu_time() + Duration::from_millis(time_ms);
    let (inputs, failed) = (Cell::new(0), Cell::new(false));
    let mut runner = TestRunner::new(Config {
        cases: u32::MAX,
        // The one that comes after the time is up ends the run.
        max_global_rejects: 0,
        failure_persistence: None,
        max_shrink_time: 10_000,
        ..Config::default()
    });
    let run = runner.run(&damage::damaged(seeds), |bytes| {
        if cpu_time() > until && !failed.get() {
            return Err(TestCaseError::reject("the time is up"));
        }
        inputs.set(inputs.get() + 1);
        caught(|| target.run(&bytes)).map_err(|why| {
            failed.set(true);
            TestCaseError::fail(why)
        })
    });
    if let Err(TestError::Fail(why, bytes)) = run {
        let kept = keep(target.name, &bytes);
        panic!(
            "{why}\n{0} fails so on {1} bytes, which are kept in {2}; when it is mended, add them to \
             tests/data/fuzz/{0}/ under a name that says what they are",
            target.name,
            bytes.len(),
            kept.display(),
        );
    }
    inputs.get()
}

fn keep(target: &str, bytes: &[u8]) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("fuzz-{target}.input"));
    fs::write(&path, bytes).unwrap();
    path
}

macro_rules! tests {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            fuzz(stringify!($name));
        })*

        const TESTS: &[&str] = &[$(stringify!($name)),*];
    };
}

tests! {
    accept agent_answer bench_measurements bench_targets bus environment eu_stack explain findings flight_recorder ingest pod_resources processes py_spy questions ras readings samplers screens segment settings settings_overrides subject trace trace_log tune tune_table verdicts
}

#[test]
fn every_target_has_a_test_and_a_corpus() {
    let targets: BTreeSet<&str> = targets::ALL.iter().map(|t| t.name).collect();
    assert_eq!(targets, TESTS.iter().copied().collect(), "targets, and tests of them");
    let folders = fs::read_dir(corpora()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    assert_eq!(targets, folders.collect::<BTreeSet<_>>().iter().map(String::as_str).collect(), "corpora");
    let sizes = targets.iter().flat_map(|t| corpus(t)).map(|(_, bytes)| bytes.len() as u64);
    let all: u64 = sizes.sum();
    assert!(all <= CORPORA_MAX, "{all} bytes");
}
