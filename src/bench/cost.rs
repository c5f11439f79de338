//! The cost of a plugin's events for an operation: the arithmetic of phases that were measured beside each other.
//!
//! Each measured phase is between two phases without events, in the same process, with the same communicators, threads and
//! buffers. Its ratio and its difference are to the mean of these two, so that what changes slowly (clocks, temperature)
//! touches both sides. A round has one such group of phases for NCCL's own price and one for the plugin.

use super::result::{Environment, Report, SCHEMA, Settings, median};
use super::shim::ShimFacts;
use super::signed_rank::{Interval, difference, ratio};
use serde::{Deserialize, Serialize};

/// With fewer rounds there are no bounds of 95 %.
pub const ROUNDS_MIN: u32 = 6;
/// The probability that a value is outside its interval of 95 %, on one side.
const ALPHA: f64 = 0.025;

/// The number of phases and their length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CostPlan {
    /// Rounds that count; one more goes before them.
    pub rounds: u32,
    /// Operations that a phase times; with groups, groups of them.
    pub calls: u32,
}

impl CostPlan {
    /// Operations at the beginning of a phase that are not timed.
    #[must_use]
    pub fn warmup(&self) -> u32 {
        self.calls.div_ceil(25)
    }
}

/// A measured phase and its neighbors: times of an operation, in ns.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Phase {
    /// Without events, before.
    pub before_ns: f64,
    /// With events.
    pub events_ns: f64,
    /// Without events, after.
    pub after_ns: f64,
}

impl Phase {
    fn base_ns(&self) -> f64 {
        f64::midpoint(self.before_ns, self.after_ns)
    }

    fn ratio(&self) -> f64 {
        self.events_ns / self.base_ns()
    }

    fn difference_ns(&self) -> f64 {
        self.events_ns - self.base_ns()
    }
}

/// All phases of one size, one of each kind a round.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PhaseTimes {
    /// Phases with empty callbacks.
    pub nccl: Vec<Phase>,
    /// Phases with the plugin.
    pub plugin: Vec<Phase>,
    /// The shim's account after the last of them, in the first process.
    pub facts: ShimFacts,
}

impl PhaseTimes {
    /// The times without events, in the order of the phases.
    #[must_use]
    pub fn without_ns(&self) -> Vec<f64> {
        self.nccl.iter().chain(&self.plugin).flat_map(|p| [p.before_ns, p.after_ns]).collect()
    }
}

/// The cost of the events of one mode.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ModeCost {
    /// To an operation without events.
    pub ratio: Interval,
    /// Beyond an operation without events.
    pub difference_ns: Interval,
}

impl ModeCost {
    fn of(phases: &[Phase]) -> Option<Self> {
        let each = |f: fn(&Phase) -> f64| -> Vec<f64> { phases.iter().map(f).collect() };
        Some(ModeCost {
            ratio: ratio(&each(Phase::ratio), ALPHA)?,
            difference_ns: difference(&each(Phase::difference_ns), ALPHA)?,
        })
    }
}

/// The part of the cost that is the plugin's: with the plugin, less with empty callbacks, of the same round.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct PluginShare {
    /// Difference of the ratios.
    pub ratio: Interval,
    /// Difference of the times.
    pub difference_ns: Interval,
}

impl PluginShare {
    fn of(phases: &PhaseTimes) -> Option<Self> {
        let each = |f: fn(&Phase) -> f64| -> Vec<f64> {
            phases.plugin.iter().zip(&phases.nccl).map(|(plugin, nccl)| f(plugin) - f(nccl)).collect()
        };
        Some(PluginShare {
            ratio: difference(&each(Phase::ratio), ALPHA)?,
            difference_ns: difference(&each(Phase::difference_ns), ALPHA)?,
        })
    }
}

/// One size. All intervals are of 95 %.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CostRow {
    /// Bytes of the larger buffer.
    pub size_bytes: u64,
    /// Elements of NCCL's call.
    pub count: u64,
    /// Time of an operation without events: the median of all phases without.
    pub without_ns: f64,
    /// NCCL's own price of the events: empty callbacks.
    pub nccl: ModeCost,
    /// With the plugin: NCCL's price and its own.
    pub plugin: ModeCost,
    /// The plugin's own part of it.
    pub share: PluginShare,
    /// Everything that was measured.
    pub phases: PhaseTimes,
}

impl CostRow {
    /// Sums up the phases of a size; absent where there are none.
    #[must_use]
    pub fn new(size_bytes: u64, count: u64, phases: &PhaseTimes) -> Option<Self> {
        Some(CostRow {
            size_bytes,
            count,
            without_ns: median(&phases.without_ns()),
            nccl: ModeCost::of(&phases.nccl)?,
            plugin: ModeCost::of(&phases.plugin)?,
            share: PluginShare::of(phases)?,
            phases: phases.clone(),
        })
    }
}

/// Everything of one measurement; `ringwatch bench --cost --json` prints it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CostReport {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The plugin under test: a file, or `ringwatch` for the program's own.
    pub plugin: String,
    /// The options of the run, with the number of threads that they gave.
    pub settings: Settings,
    /// The machine of the measurement.
    pub environment: Environment,
    /// One for each size, ascending.
    pub rows: Vec<CostRow>,
}

impl CostReport {
    /// Sums up a benchmark of phases.
    #[must_use]
    pub fn new(plugin: String, report: &Report) -> Self {
        let rows = report.sizes.iter().filter_map(|s| {
            s.out_of_place.phases.as_ref().and_then(|p| CostRow::new(s.size_bytes, s.count, p))
        });
        CostReport {
            schema: SCHEMA,
            plugin,
            settings: report.settings.clone(),
            environment: report.environment.clone(),
            rows: rows.collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn phases(rounds: u32) -> PhaseTimes {
        // The GPU gets slower all the time, by more than any event costs.
        let phase = |round: u32, at: f64, cost_ns: f64| {
            let drift = |at: f64| 8_000.0 + 600.0 * f64::from(round) + 100.0 * at;
            Phase { before_ns: drift(at), events_ns: drift(at + 1.0) + cost_ns, after_ns: drift(at + 2.0) }
        };
        PhaseTimes {
            nccl: (0..rounds).map(|r| phase(r, 0.0, 40.0 + f64::from(r % 3))).collect(),
            plugin: (0..rounds).map(|r| phase(r, 3.0, 440.0 + f64::from(r % 5))).collect(),
            facts: ShimFacts::default(),
        }
    }

    #[test]
    fn a_drift_is_no_cost_and_shares_add_up() {
        let row = CostRow::new(8, 2, &phases(20)).unwrap();
        let (nccl, plugin, share) =
            (row.nccl.difference_ns, row.plugin.difference_ns, row.share.difference_ns);
        assert!((40.0..=42.0).contains(&nccl.value), "{nccl:?}");
        assert!((440.0..=444.0).contains(&plugin.value), "{plugin:?}");
        assert!((398.0..=404.0).contains(&share.value), "{share:?}");
        for i in [nccl, plugin, share, row.nccl.ratio, row.plugin.ratio, row.share.ratio] {
            assert!(i.lower.unwrap() <= i.value && i.value <= i.upper.unwrap(), "{i:?}");
        }
        let bare = row.phases.plugin[0];
        assert!((bare.ratio() - (1.0 + bare.difference_ns() / 8_400.0)).abs() < 1e-9);
        assert!((row.without_ns - 14_000.0).abs() < 400.0, "{}", row.without_ns);
        assert!(row.plugin.ratio.value > 1.02 && row.nccl.ratio.lower.unwrap() > 1.0);
    }

    #[test]
    fn the_fewest_rounds_that_are_allowed_give_bounds() {
        let bounds = |rounds| CostRow::new(8, 2, &phases(rounds)).unwrap().share.ratio.lower;
        assert!(bounds(ROUNDS_MIN).is_some() && bounds(ROUNDS_MIN - 1).is_none());
        assert!(CostRow::new(8, 2, &phases(0)).is_none());
    }

    #[test]
    fn a_phase_is_warmed_up_for_a_small_part_of_it() {
        let warmup = |calls| CostPlan { rounds: 6, calls }.warmup();
        assert_eq!((warmup(1), warmup(1500)), (1, 60));
    }
}
