//! Wires the stages together: a source into the join, the join into the rules; and the programs around them.

pub mod agent;
pub mod analyser;
pub mod cluster;
mod daemon;
mod ends;
mod latest;
mod monitor;
mod node;
mod recorder;
mod remote;
pub mod signals;

pub use daemon::Error;
pub use ends::EndsToCome;
pub use monitor::{Monitor, Stack};
pub use node::Node;
pub use recorder::Recorder;
pub use remote::{Remote, Unreachable, ask};
