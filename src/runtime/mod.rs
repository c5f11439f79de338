//! Wires the stages together: a source into the join, the join into the rules.

mod monitor;
pub mod signals;

pub use monitor::{Monitor, Stack};
