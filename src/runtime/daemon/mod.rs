//! The parts that agent and analyser share: the questions their state answers, HTTP, OTLP, and their overhead.

mod attend;
mod connections;
mod descriptors;
mod error;
mod heartbeat;
mod http;
mod http_connections;
mod http_port;
mod lost;
mod notify;
mod otlp;
mod outgoing;
mod own;
mod reload;
mod requests;
mod shared_metrics;
mod state_queue;
mod state_thread;
mod tcp_peer;

pub(super) use attend::attend;
pub(super) use connections::{Closed, ClosedReport, Connections, is_exhausted};
pub(super) use descriptors::raise as raise_descriptors;
pub use error::Error;
pub(super) use heartbeat::Heartbeat;
pub(super) use http::Answers;
pub(super) use http_connections::Bounds;
pub(super) use http_port::{HttpPort, inherited_sockets};
pub(super) use notify::Notifier;
pub(super) use otlp::Sender;
pub(super) use outgoing::Outgoing;
pub(super) use own::Costs;
pub(super) use reload::Reload;
pub(super) use requests::{Asked, Message, Rendered, ask};
pub(super) use state_queue::{Lane, Received, StateReceiver, StateSender};
pub(super) use state_thread::StateThread;

use super::EndsToCome;
use crate::config::Config;
use crate::ingest::Ends;
use std::sync::Arc;
use tracing::warn;

/// The name of this node, in metrics, in OTLP and on the bus.
pub(super) fn node(config: &Config) -> String {
    let host = || rustix::system::uname().nodename().to_string_lossy().into_owned();
    config.node.clone().unwrap_or_else(host)
}

/// Tells the state whenever a followed process has ended.
pub(super) async fn tell_ends(ends: Arc<Ends>, state: StateSender) {
    let Ok(ends) = EndsToCome::new(ends) else { return };
    loop {
        ends.next().await;
        state.send(Message::Ended);
    }
}

/// Tells the service manager, if there is one; without one there is nobody to tell.
pub(super) fn notify(what: &[sd_notify::NotifyState<'_>]) {
    if let Err(e) = sd_notify::notify(what) {
        warn!("the service manager cannot be notified: {e}");
    }
}
