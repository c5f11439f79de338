//! What something slow costs the job: this alone decides whether it is a warning.

use super::{Settings, number, rounded, seconds};
use crate::join::{Communicator, Join};
use crate::model::{Evidence, Severity};

/// Costs are taken over at most so much of the job's time, in ns.
pub(super) const OVER_NS: u64 = 60_000_000_000;

/// Time that a job lost, in ns, of some of its time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cost {
    pub(super) lost_ns: u64,
    pub(super) of_ns: u64,
}

impl Cost {
    fn percent(&self) -> f64 {
        self.lost_ns as f64 / self.of_ns.max(1) as f64 * 100.0
    }

    /// How much something matters that costs this.
    pub(super) fn severity(&self, settings: &Settings) -> Severity {
        if self.percent() >= f64::from(settings.warning_cost_percent) {
            Severity::Warning
        } else {
            Severity::Info
        }
    }

    pub(super) fn evidence(&self) -> Evidence {
        let (lost, of) = (seconds(self.lost_ns), seconds(self.of_ns));
        number(
            format!("it cost the job {lost:.3} s of {of:.1} s, which is {:.1} %", self.percent()),
            rounded(self.percent()),
            "%",
        )
    }
}

/// How long the job of a communicator has run, in ns; of a long one the last minute.
pub(super) fn wall_ns(join: &Join, c: &Communicator, now_ns: u64) -> u64 {
    let processes = c.members().values().filter_map(|m| join.process(m.record.segment));
    let began_ns = processes.map(|p| p.record.created_ns).min().unwrap_or(0);
    now_ns.saturating_sub(began_ns).min(OVER_NS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_costs_three_per_cent_is_a_warning() {
        let of = |ms: u64| Cost { lost_ns: ms * 1_000_000, of_ns: OVER_NS };
        let settings = Settings::default();
        assert_eq!(of(1_800).severity(&settings), Severity::Warning);
        assert_eq!(of(1_790).severity(&settings), Severity::Info);
        assert_eq!(of(1_790).severity(&Settings { warning_cost_percent: 2, ..settings }), Severity::Warning);
        assert_eq!(of(1_800).evidence().text, "it cost the job 1.800 s of 60.0 s, which is 3.0 %");
    }
}
