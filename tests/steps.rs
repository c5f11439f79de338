//! Steps of real training and inference loops: recordings of `tests/gpu/loops.py` on two H200s, and the moments at which the loops
//! themselves began their steps.

use crate::support::{Room, run};
use serde_json::Value;
use std::path::Path;

/// The steps of rank 0 in a report of a recording, and the moments at which its loop began steps, Unix time in ns.
fn measured(name: &str) -> (Value, Vec<f64>) {
    let room = Room::new();
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/steps").join(name);
    let said = run(room.ringwatch(["report", "--json", "--replay"]).arg(&dir));
    assert_eq!(said.code, Some(0), "{}", said.err);
    let report: Value = serde_json::from_str(&said.out).unwrap();
    let jobs = report["jobs"].as_array().unwrap();
    let rows = jobs.iter().filter_map(|job| job["steps"].as_array()).flatten();
    let row =
        rows.into_iter().find(|row| row["job_rank"] == 0).unwrap_or_else(|| panic!("{name}: {report:#}"));
    let begun = std::fs::read_to_string(dir.join("steps-0")).unwrap();
    (row.clone(), begun.lines().map(|line| line.parse().unwrap()).collect())
}

#[test]
fn step_times_of_real_loops_are_those_that_the_loops_measure() {
    for name in ["ddp", "fsdp", "tensor", "pipeline", "experts", "inference"] {
        let (row, begun) = measured(name);
        let steps = row["steps"].as_u64().unwrap() as usize;
        // The recording begins and ends within a step.
        assert!(steps + 4 >= begun.len() && steps < begun.len(), "{name}: {} steps, {row}", begun.len());
        let mean_ns = row["mean_ns"].as_f64().unwrap();
        let loops = begun.windows(steps + 1).map(|w| (w[steps] - w[0]) / steps as f64);
        let nearest =
            loops.map(|own| mean_ns / own - 1.0).min_by(|a, b| a.abs().total_cmp(&b.abs())).unwrap();
        println!(
            "{name}: {steps} steps of {:.2} ms, {:+.2} % against the loop",
            mean_ns / 1e6,
            nearest * 100.0
        );
        assert!(nearest.abs() <= 0.01, "{name}: {nearest}");
        if let Some(p50_ns) = row["p50_ns"].as_f64() {
            assert!((p50_ns / mean_ns - 1.0).abs() <= 0.05, "{name}: {row}");
        }
    }
}

#[test]
fn a_benchmark_has_no_steps() {
    let room = Room::new();
    let players = crate::support::Players::start(&room, crate::support::Play::of("mixed").hold(5));
    let report = || {
        let said = run(room.ringwatch(["report", "--json"]).arg(room.segments()));
        serde_json::from_str::<Value>(&said.out).unwrap_or_default()
    };
    let mut job = Value::Null;
    while job["coverage"]["operations"].as_u64().is_none_or(|n| n < 50) {
        std::thread::sleep(std::time::Duration::from_millis(100));
        job = report().pointer("/jobs/0").cloned().unwrap_or_default();
    }
    drop(players);
    assert_eq!(job["steps"], serde_json::json!([]), "{job:#}");
    let text = run(room.ringwatch(["report"]).arg(room.segments()));
    assert!(text.out.contains("steps: no sequence of calls repeats"), "{}", text.out);
}
