//! The reasons that keep a daemon from starting or going on.

use std::io;
use std::path::PathBuf;

/// The reason that keeps a daemon from starting or going on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The HTTP address cannot be had.
    #[error("http.listen: {address}: {why}")]
    Listen {
        /// The address.
        address: std::net::SocketAddr,
        /// Why.
        why: io::Error,
    },
    /// The socket cannot be had.
    #[error("socket.path: {}: {why}", path.display())]
    Socket {
        /// Its path.
        path: PathBuf,
        /// Why, and what to do.
        why: String,
    },
    /// Telemetry cannot be sent.
    #[error("otlp")]
    Otlp(#[from] crate::export::otlp::Error),
    /// No webhook can be called.
    #[error("notify.webhooks: {0}")]
    Notify(String),
    /// There is no way onto the bus.
    #[error(transparent)]
    Bus(#[from] crate::cluster::Error),
    /// Threads or signals cannot be had.
    #[error(transparent)]
    System(#[from] io::Error),
}
