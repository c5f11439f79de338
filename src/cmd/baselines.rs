//! `--baseline FILE`: what transfers should take, from a benchmark's measurements or from a file of targets.

use crate::bench::{Collective, Measurements, Report, Targets};
use crate::detect::Baseline;
use crate::model::Func;
use anyhow::{Context, bail};
use std::path::{Path, PathBuf};

/// Reads files that `ringwatch bench --json` or `--save` wrote, and files of targets in YAML.
pub(super) fn baselines(files: &[PathBuf]) -> anyhow::Result<Vec<Baseline>> {
    let mut all = Vec::new();
    for path in files {
        let what = || format!("--baseline {}", path.display());
        let text = std::fs::read(path).with_context(what)?;
        if is_json(path, &text) {
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
    let baseline =
        |bytes, time_ns| Baseline { func: func(report.settings.collective), ranks, bytes, time_ns };
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
