//! Samplers that give nothing: each reason is logged once, with what to do about it.

use crate::model::{Fact, Reading};
use std::collections::{BTreeMap, BTreeSet};
use tracing::info;

/// The samplers that ask the GPUs' driver.
const GPU: [&str; 3] = ["gpu", "nvlink", "xid"];

/// The absences that were logged so far.
#[derive(Debug, Default)]
pub(super) struct Absences {
    logged: BTreeSet<(String, String)>,
    absent: BTreeSet<String>,
}

impl Absences {
    /// Logs what is new in these readings.
    pub(super) fn log(&mut self, readings: &[Reading]) {
        self.lines(readings).iter().for_each(|line| info!("{line}"));
    }

    fn lines(&mut self, readings: &[Reading]) -> Vec<String> {
        let mut lines = Vec::new();
        let mut by_reason: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for reading in readings {
            let Fact::Sampler(fact) = &reading.fact else { continue };
            match &fact.absent {
                Some(why) => {
                    self.absent.insert(fact.sampler.clone());
                    if self.logged.insert((fact.sampler.clone(), why.clone())) {
                        by_reason.entry(why).or_default().push(&fact.sampler);
                    }
                }
                None if self.absent.remove(&fact.sampler) => {
                    lines.push(format!("hardware: {} is sampled now", fact.sampler));
                }
                None => {}
            }
        }
        for (why, mut samplers) in by_reason {
            samplers.sort_unstable();
            let what = samplers.join(", ");
            lines.push(if GPU.iter().all(|s| samplers.contains(s)) {
                format!(
                    "hardware: no GPU is watched: {why}; where there are some, install NVIDIA's driver or name its \
                     libnvidia-ml.so.1 (hardware.nvml); it is tried again"
                )
            } else {
                format!("hardware: {what} is not sampled: {why}")
            });
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::SamplerFact;

    fn said(sampler: &str, absent: Option<&str>) -> Reading {
        let fact = SamplerFact {
            sampler: sampler.to_owned(),
            absent: absent.map(str::to_owned),
            readings: 0,
            failures: 0,
            cost_ns: 0,
        };
        Reading { host: "node1".to_owned(), at_ns: 1, fact: Fact::Sampler(fact) }
    }

    #[test]
    fn absent_gpus_are_one_line_and_each_reason_is_said_once() {
        let mut absences = Absences::default();
        let none = ["xid", "nvlink", "gpu"].map(|s| said(s, Some("libnvidia-ml.so.1: not found")));
        let lines = absences.lines(&none);
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(lines[0].contains("no GPU is watched: libnvidia-ml.so.1: not found; "), "{lines:?}");
        assert_eq!(absences.lines(&none), [""; 0]);
        assert_eq!(absences.lines(&[said("rdma", Some("none"))]), ["hardware: rdma is not sampled: none"]);
        assert_eq!(absences.lines(&[said("gpu", None), said("gpu", None)]), ["hardware: gpu is sampled now"]);
        assert_eq!(absences.lines(&[said("gpu", Some("lost"))]), ["hardware: gpu is not sampled: lost"]);
    }
}
