//! The real machine, as the search sees it.

use super::processes::{ArmBatch, ArmEnvironment, RankProcesses};
use crate::bench::{Collective, Environment, Report, SizeResult};
use crate::tune::cost_log::{self, CostRecord};
use crate::tune::search::{Arm, Machine, Times, TunerChoice};
use crate::tune::{COLLECTIVES, Rules};
use anyhow::{Context, bail};
use std::time::{Duration, Instant};

/// Measures one operation at some sizes.
#[derive(Debug)]
pub(super) struct GpuMachine<'a> {
    pub(super) processes: &'a mut RankProcesses,
    pub(super) collective: Collective,
    /// The sizes as NCCL counts them.
    pub(super) sizes: Vec<u64>,
    pub(super) begun: Instant,
}

/// NCCL's answers to one operation of each size.
#[derive(Debug)]
pub(super) struct Offers {
    /// One for each size that NCCL asked its tuner about.
    pub(super) records: Vec<CostRecord>,
    pub(super) environment: Environment,
    /// Sizes about which it did not.
    pub(super) unasked: Vec<u64>,
}

/// NCCL's number of an operation; `None` where it asks no tuner about it.
pub(super) fn number_of(collective: Collective) -> Option<usize> {
    let plain = |name: &str| name.replace('_', "").to_ascii_lowercase();
    COLLECTIVES.iter().position(|c| plain(c) == plain(collective.as_str()))
}

/// The operation of NCCL's number.
pub(in crate::cmd) fn collective_of(number: usize) -> Option<Collective> {
    Collective::ALL.iter().copied().find(|c| number_of(*c) == Some(number))
}

/// Issues one operation of each size, to learn what NCCL offers its tuner.
pub(super) fn offers(
    processes: &mut RankProcesses,
    collective: Collective,
    sizes: Vec<u64>,
) -> anyhow::Result<Offers> {
    let arms = vec![ArmEnvironment { has_tuner: true, is_noted: true, ..ArmEnvironment::default() }];
    let batch = ArmBatch { collective, sizes, arms, repeats: 1, is_checked: false, is_single: true };
    let report = match processes.order(&batch)?.into_iter().next() {
        Some(Ok(report)) => report,
        Some(Err(why)) => bail!("one {collective} of each size failed: {why}"),
        None => bail!("one {collective} of each size left no report"),
    };
    let path = processes.cost_log();
    let file = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let noted: Vec<CostRecord> =
        cost_log::records(&file).filter(|r| Some(r.collective) == number_of(collective)).collect();
    if noted.is_empty() {
        bail!(
            "NCCL did not ask the plugin about any {collective}: it has not loaded it as its tuner, or has one GPU; \
             NCCL_DEBUG=INFO says why"
        );
    }
    let of_size =
        |s: &SizeResult| noted.iter().find(|r| r.bytes == s.size_bytes).copied().ok_or(s.size_bytes);
    let (records, unasked): (Vec<_>, Vec<_>) = report.sizes.iter().map(of_size).partition(Result::is_ok);
    Ok(Offers {
        records: records.into_iter().flatten().collect(),
        unasked: unasked.into_iter().filter_map(Result::err).collect(),
        environment: report.environment,
    })
}

impl GpuMachine<'_> {
    fn times(&self, report: &Report) -> Result<Times, String> {
        if let Some(wrong) = report.wrong.filter(|w| *w > 0) {
            let is_wrong = |s: &&SizeResult| {
                let both = std::iter::once(&s.out_of_place).chain(&s.in_place);
                both.filter_map(|t| t.wrong).any(|w| w > 0)
            };
            let sizes: Vec<String> =
                report.sizes.iter().filter(is_wrong).map(|s| s.size_bytes.to_string()).collect();
            return Err(format!("{wrong} elements were wrong, at {} bytes", sizes.join(", ")));
        }
        let repeats = |bytes: &u64| -> Result<Vec<f64>, String> {
            let size = report.sizes.iter().find(|s| s.size_bytes == *bytes);
            let size = size.ok_or_else(|| format!("{bytes} bytes were not measured"))?;
            let both = std::iter::once(&size.out_of_place).chain(&size.in_place);
            Ok(both.flat_map(|t| t.repeats_ns.iter().copied()).collect())
        };
        self.sizes.iter().map(repeats).collect()
    }
}

/// An arm in a few words.
fn describe(arm: &Arm) -> String {
    let mut choices: Vec<TunerChoice> =
        arm.rules.iter().map(|r| TunerChoice { entry: r.choose, channels: r.channels }).collect();
    choices.dedup();
    let mut text: Vec<String> = choices.iter().map(TunerChoice::to_string).collect();
    if text.is_empty() {
        text.push(if arm.has_tuner { "a tuner without rules" } else { "NCCL's default" }.to_owned());
    }
    text.extend(arm.min_channels.map(|n| format!("NCCL_MIN_NCHANNELS={n}")));
    text.join("; ")
}

fn environment_of_arm(arm: &Arm) -> anyhow::Result<ArmEnvironment> {
    let table = if arm.rules.is_empty() {
        None
    } else {
        Some(Rules::of(arm.rules.clone(), "the candidates")?.compile()?.bytes().to_vec())
    };
    Ok(ArmEnvironment { has_tuner: arm.has_tuner, min_channels: arm.min_channels, table, is_noted: false })
}

impl Machine for GpuMachine<'_> {
    type Error = anyhow::Error;

    fn round(
        &mut self,
        arms: &[Arm],
        repeats: u32,
        is_checked: bool,
    ) -> anyhow::Result<Vec<Result<Times, String>>> {
        let environments =
            arms.iter().map(environment_of_arm).collect::<anyhow::Result<Vec<ArmEnvironment>>>()?;
        let (collective, sizes) = (self.collective, self.sizes.clone());
        let batch = ArmBatch { collective, sizes, arms: environments, repeats, is_checked, is_single: false };
        let results = self.processes.order(&batch)?;
        let results = arms.iter().zip(results).map(|(arm, result)| {
            let times = result.and_then(|report| self.times(&report));
            times.map_err(|why| format!("{}: {why}", describe(arm)))
        });
        let results: Vec<Result<Times, String>> = results.collect();
        match results.first() {
            Some(Err(why)) => bail!("{why}"),
            _ => Ok(results),
        }
    }

    fn elapsed(&self) -> Duration {
        self.begun.elapsed()
    }
}
