//! Finished operations over time: the charts of a report, the rows of a table, the tracks of a trace.
//!
//! Each of them receives finished operations once ([`crate::join::FinishedSink`]). [`History`] keeps aggregates of bounded
//! size; [`OperationTable`] and [`Perfetto`] write what they receive.

mod bins;
mod charts;
mod history;
mod latency;
mod perfetto;
mod profile;
mod slowest;
mod table;

pub use charts::{Bandwidth, JobCharts, LatencyChart, RankSeries, SlowOperation, SlowPart, StepSeries};
pub use history::History;
pub use perfetto::Perfetto;
pub use profile::{ClassProfileKey, Profile, Profiler};
pub use table::{OperationTable, TableFormat};

use crate::join::{FinishedPart, Join};
use crate::model::CommId;

/// The end of a rank's part, host monotonic ns.
fn ended_ns(part: &FinishedPart) -> Option<u64> {
    Some(part.started_ns?.saturating_add(part.duration_ns?))
}

/// The name of a communicator: the job's, else NCCL's id.
fn comm_name(join: &Join, comm: CommId) -> String {
    join.communicator(comm).and_then(|c| c.name()).unwrap_or_else(|| comm.to_string())
}
