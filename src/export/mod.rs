//! The output for other programs: metrics for Prometheus, traces, logs and metrics by OTLP, and notices of findings.
//!
//! [`metrics`] turns what is over and what goes on into families of samples, by the one list in [`catalogue`];
//! [`prometheus`] and [`otlp`] write the same families in their formats. Nothing here reads a clock or starts a task:
//! whoever owns the join feeds it and says what time it is.

pub mod catalogue;
pub mod metrics;
pub mod notify;
pub mod otlp;
pub mod prometheus;
pub mod trace_id;

pub use metrics::{Metrics, Own};
