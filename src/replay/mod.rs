//! The replayer: recorded NCCL jobs, played on a profiler plugin through its C table.
//!
//! It stands in for NCCL wherever there is no GPU: tests, the demo, and every ABI version that no
//! installed NCCL speaks. It shares no code with the plugin. Its tables of the binary layouts
//! (`abi`) are a second implementation on purpose, so that a slip in one of them shows.
//!
//! - [`Trace`] is a recorded job: what each rank's NCCL called, when, on which thread.
//! - [`fixture`] gives one of the six jobs recorded on 4 x H200 that travel with the binary.
//! - [`Player`] plays one rank's part; one process plays one rank, as in the job itself.

mod abi;
mod clock;
mod codec;
mod log;
mod player;
mod plugin;
mod stage;
mod trace;

use std::fmt;
use std::str::FromStr;

pub use clock::{Pace, monotonic_ns};
pub use codec::{FORMAT_VERSION, MAGIC};
pub use player::{PlayReport, Player, PlayerOptions, ReplayError};
pub use plugin::Abi;
pub use trace::{Call, Descriptor, Event, RankTrace, Text, Timeline, Trace, TraceError};

/// A recorded job that travels with the binary.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scenario {
    /// Collectives of many kinds and sizes, graphs, and at last a rank that arrives 0.3 s late.
    Mixed,
    /// Three ranks issue an all-reduce that the fourth never issues.
    MissingRank,
    /// One rank issues an all-gather where the others issue an all-reduce.
    Mismatch,
}

impl Scenario {
    /// All scenarios, in the order in which help texts name them.
    pub const ALL: [Self; 3] = [Self::Mixed, Self::MissingRank, Self::Mismatch];

    /// The name used on command lines and in file names.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Mixed => "mixed",
            Self::MissingRank => "missing-rank",
            Self::Mismatch => "mismatch",
        }
    }
}

impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A name that is no scenario's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no scenario is called `{0}`; choose one of mixed, missing-rank, mismatch")]
pub struct UnknownScenario(pub String);

impl FromStr for Scenario {
    type Err = UnknownScenario;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|s| s.as_str() == name).ok_or_else(|| UnknownScenario(name.to_owned()))
    }
}

/// A recorded job of all four ranks; `two_node` chooses the recording with network transport.
#[must_use]
pub fn fixture(scenario: Scenario, two_node: bool) -> Trace {
    Trace::decode(fixture_bytes(scenario, two_node))
        .expect("the recordings are compiled in, and a test decodes each of them")
}

/// The encoded form of [`fixture`].
#[must_use]
pub fn fixture_bytes(scenario: Scenario, two_node: bool) -> &'static [u8] {
    macro_rules! embedded {
        ($name:literal) => {
            include_bytes!(concat!("../../tests/data/traces/", $name, ".rwt")).as_slice()
        };
    }
    match (scenario, two_node) {
        (Scenario::Mixed, false) => embedded!("one-node-mixed"),
        (Scenario::MissingRank, false) => embedded!("one-node-missing-rank"),
        (Scenario::Mismatch, false) => embedded!("one-node-mismatch"),
        (Scenario::Mixed, true) => embedded!("two-node-mixed"),
        (Scenario::MissingRank, true) => embedded!("two-node-missing-rank"),
        (Scenario::Mismatch, true) => embedded!("two-node-mismatch"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_scenarios_parse_back() {
        for scenario in Scenario::ALL {
            assert_eq!(scenario.as_str().parse(), Ok(scenario));
        }
        assert_eq!("Mixed".parse::<Scenario>(), Err(UnknownScenario("Mixed".into())));
    }

    #[test]
    fn every_embedded_recording_decodes_to_four_ranks() {
        for scenario in Scenario::ALL {
            for two_node in [false, true] {
                let trace = fixture(scenario, two_node);
                let labels: Vec<_> = trace.ranks.iter().map(|r| r.label.as_str()).collect();
                assert_eq!(labels, ["rank0", "rank1", "rank2", "rank3"], "{scenario} {two_node}");
            }
        }
    }
}
