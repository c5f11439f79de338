//! The cost of something slow to a job.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Wall time that a job lost, and the wall time that it is a part of.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Loss {
    /// The lost time in s.
    pub lost_s: f64,
    /// The time that it was lost of, in s.
    pub of_s: f64,
    /// The lost time as a share of the other, in per cent.
    pub percent: f64,
}

impl Loss {
    /// From times in ns.
    pub fn new(lost_ns: u64, of_ns: u64) -> Self {
        let rounded = |x: f64| (x * 1e3).round() / 1e3;
        Loss {
            lost_s: rounded(lost_ns as f64 / 1e9),
            of_s: rounded(of_ns as f64 / 1e9),
            percent: rounded(lost_ns as f64 / of_ns.max(1) as f64 * 100.0),
        }
    }
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.3} s of {:.1} s ({:.1} %)", self.lost_s, self.of_s, self.percent)
    }
}

/// The price of a slow finding for the job: the time that all its ranks together advanced less, not one rank's.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct JobCost {
    /// In the job's last minute; of a younger job in all its time.
    pub last_minute: Loss,
    /// Since the job began.
    pub in_all: Loss,
}

impl fmt::Display for JobCost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in the last minute, {} in all", self.last_minute, self.in_all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_price_reads_in_seconds_and_per_cent() {
        let cost = JobCost {
            last_minute: Loss::new(1_800_000_000, 60_000_000_000),
            in_all: Loss::new(6_000_000_000, 600_000_000_000),
        };
        let text = "1.800 s of 60.0 s (3.0 %) in the last minute, 6.000 s of 600.0 s (1.0 %) in all";
        assert_eq!(cost.to_string(), text);
        let json = serde_json::to_string(&cost).expect("written");
        assert!(json.starts_with(r#"{"last_minute":{"lost_s":1.8,"of_s":60.0,"percent":3.0},"#), "{json}");
        assert_eq!(serde_json::from_str::<JobCost>(&json).expect("read"), cost);
    }
}
