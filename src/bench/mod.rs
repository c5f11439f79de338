//! A benchmark of NCCL's operations: sizes, times, bandwidths as nccl-tests defines them, and a check of the data.
//!
//! CUDA's driver and NCCL are loaded when a benchmark runs, so that the program needs neither to be built or to do
//! anything else. One process drives one or several GPUs by one or several threads; several processes find
//! each other by what torchrun or srun sets ([`Launch`]). Nothing here prints or reads options.

pub mod check;
mod compare;
mod cost;
pub mod cuda;
mod engine;
mod error;
#[cfg(test)]
pub(crate) mod fixtures;
mod measurements;
pub mod nccl;
pub mod op;
mod rank_test;
mod regression;
pub mod rendezvous;
mod result;
mod shared;
mod shim;
pub mod signed_rank;
pub mod sizes;
pub mod targets;
mod turns;
mod worker;

pub use compare::{Cell, Comparison, Ratio, Row, Trial, VariantSummary, order, parse_mask, summarise};
pub use cost::{CostPlan, CostReport, CostRow, ModeCost, Phase, PhaseTimes, PluginShare, ROUNDS_MIN};
pub use engine::{Progress, count_ranks, leave, run};
pub use error::BenchError;
pub use measurements::{Measurements, MeasurementsError};
pub use nccl::version_text;
pub use op::{Collective, DType, Placement, RedOp};
pub(crate) use rank_test::compare as rank_comparison;
pub use regression::{CONFIDENCE, Change, Changes, Difference, Trend, compare};
pub use rendezvous::{Launch, RendezvousError};
pub use result::{
    Environment, KernelLaunch, RankEvents, RankInfo, Report, SCHEMA, Settings, SizeResult, Timing, median,
};
pub use shim::{MINIMUM_NCCL, SHIM_FILE_NAME, ShimFacts};
pub use signed_rank::Interval;
pub use sizes::{Step, parse_bytes};
pub use targets::{TargetError, Targets};
pub use turns::Turns;
