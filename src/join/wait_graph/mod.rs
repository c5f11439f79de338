//! The wait-for graph, the operations that stand still, and where that begins.

mod cache;
mod graph;
mod stalls;

pub use cache::Launches;
pub(super) use cache::{COUNTED, GraphCache};
pub use graph::{OpPhase, Origin, RankProgress, Stall, WaitGraph, WaitingFor, origins};
pub use stalls::{Rhythm, Standstills, Waited};
