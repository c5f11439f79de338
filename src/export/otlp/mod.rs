//! OTLP: operations as traces, findings as log records, and the same metrics that `/metrics` gives.
//!
//! A collective is one trace. Its id, and those of its spans, are hashes of communicator, track and issue order
//! ([`super::trace_id`]), so every node writes its ranks' spans into the same trace and asks nobody. The root is
//! written by the node that has rank 0 (of a transfer between two ranks: the sender). A time that is not known gives
//! no span, and an attribute that is not known is left out.
//!
//! ```text
//! AllReduce                       from the first issue to the last end
//! +- rank 3                       from its issue to the end of its kernel
//!    +- waiting                   its kernel, until the last rank came
//!    +- transfer                  its kernel, from then on
//!       +- send to rank 4         one network transfer
//! ```
//! A finding has a trace of its own with one span, which links to the operations it is about; these link back where they
//! are written after it. What is told
//! of an operation in which ranks hang is written at once: its ranks' spans are named `rank 3, in flight` then, and
//! when it ends after all, its true times come below the root as a span `complete`.

mod attributes;
mod exporter;
mod http;
mod partial;
mod point;
mod queue;
mod settings;
mod spans;
mod tracer;
mod way;

pub use exporter::{Error, Exporter};
pub use queue::{Batch, LogEntry};
pub use settings::{Compression, Protocol, Settings};
pub use tracer::{TOO_MANY, Tracer};
