//! `--baseline FILE`: what transfers should take, from a benchmark's measurements, from a file of targets, or as NCCL
//! predicts it (`--tune observe`).

use super::tune_search::collective_of;
use crate::bench::{Collective, Measurements, Report, Targets};
use crate::detect::{Baseline, BaselineSource};
use crate::model::Func;
use crate::tune::cost_log;
use anyhow::{Context, bail};
use std::path::{Path, PathBuf};

/// Reads files that `ringwatch bench --json` or `--save` wrote, files of targets in YAML, and NCCL's predicted times.
pub(super) fn baselines(files: &[PathBuf]) -> anyhow::Result<Vec<Baseline>> {
    let mut all = Vec::new();
    for path in files {
        let what = || format!("--baseline {}", path.display());
        let text = std::fs::read(path).with_context(what)?;
        if text.starts_with(&cost_log::MAGIC.to_le_bytes()) {
            all.extend(predicted(&text));
        } else if is_json(path, &text) {
            let measured = Measurements::read(&text, path.clone()).with_context(|| "--baseline")?;
            for report in &measured.reports {
                all.extend(of_report(report, path)?);
            }
        } else {
            all.extend(of_targets(&Targets::load(path).with_context(|| "--baseline")?)?);
        }
    }
    Ok(all)
}

/// NCCL's predictions for the classes of calls in a cost log.
pub(super) fn predicted(file: &[u8]) -> impl Iterator<Item = Baseline> + '_ {
    cost_log::records(file).filter_map(|r| {
        Some(Baseline {
            source: BaselineSource::Predicted,
            func: func(collective_of(r.collective)?),
            ranks: r.ranks,
            bytes: r.bytes,
            time_ns: f64::from(r.best_us()?) * 1e3,
        })
    })
}

/// YAML is known by the file's name, else by its first character, which in JSON is a bracket.
fn is_json(path: &Path, text: &[u8]) -> bool {
    let is_yaml = path.extension().is_some_and(|e| e == "yaml" || e == "yml");
    let first = text.iter().find(|b| !b.is_ascii_whitespace());
    !is_yaml && first.is_none_or(|b| matches!(b, b'{' | b'['))
}

fn of_report(report: &Report, path: &Path) -> anyhow::Result<Vec<Baseline>> {
    if report.settings.batch > 1 || report.settings.graph.is_some() {
        bail!(
            "--baseline {}: batches and graphs leave out launches that a job has; measure without -G and --batch",
            path.display()
        );
    }
    let ranks = u32::try_from(report.environment.ranks.len()).context("too many ranks")?;
    let (source, func) = (BaselineSource::Benchmark, func(report.settings.collective));
    let baseline = |bytes, time_ns| Baseline { source, func, ranks, bytes, time_ns };
    Ok(report.sizes.iter().map(|s| baseline(s.size_bytes, s.out_of_place.time_ns)).collect())
}

fn of_targets(targets: &Targets) -> anyhow::Result<Vec<Baseline>> {
    let expected = targets.expectations();
    if expected.is_empty() {
        bail!(
            "--baseline {}: no target that detection could use; give one max_latency or about_latency, without nodes",
            targets.origin()
        );
    }
    let baseline = |e: crate::bench::targets::Expectation| Baseline {
        source: BaselineSource::Benchmark,
        func: func(e.collective),
        ranks: e.ranks,
        bytes: e.size_bytes,
        time_ns: e.time_ns,
    };
    Ok(expected.into_iter().map(baseline).collect())
}

/// The operation as segments name it.
pub(super) fn func(collective: Collective) -> Func {
    match collective {
        Collective::AllReduce => Func::AllReduce,
        Collective::Broadcast => Func::Broadcast,
        Collective::Reduce => Func::Reduce,
        Collective::AllGather => Func::AllGather,
        Collective::ReduceScatter => Func::ReduceScatter,
        Collective::AllToAll => Func::AlltoAll,
        Collective::SendRecv => Func::SendRecv,
    }
}
