//! The cluster's bus: what a node tells the others, and how that is read.
//!
//! ```text
//! Join -> Publisher -> messages -> (NATS) -> Reader -> Updates -> Join
//! ```
//! Agents publish little: who is there, how far every rank is, what stands still, a sample of operations, and what is
//! interesting. An analyser's join is the same as a node's, fed with that.

mod bus;
mod encode;
pub(crate) mod items;
pub mod message;
mod publisher;
mod reader;
mod settings;
pub mod subject;
mod texts;

pub use bus::{Change, Error, Outbox, connect};
pub use publisher::{Books, Moment, Outgoing, Publisher, REASONS};
pub use reader::{Node, Reader, Refusal};
pub use settings::Settings;
pub use texts::from_json;
