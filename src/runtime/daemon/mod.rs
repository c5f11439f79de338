//! What agent and analyser share: the questions their state answers, HTTP, OTLP, and what they cost.

mod asked;
mod error;
mod http;
mod lost;
mod otlp;
mod outgoing;
mod own;

pub(super) use asked::{Asked, alive, ask, send, try_send};
pub use error::Error;
pub(super) use http::serve;
pub(super) use otlp::Sender;
pub(super) use outgoing::Outgoing;
pub(super) use own::Costs;

use crate::cluster::Settings;
use crate::config::Config;
use tokio::net::TcpListener;

/// The host that this runs on.
pub(super) fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// The name of this node on the bus.
pub(super) fn node(settings: &Settings) -> String {
    settings.node.clone().unwrap_or_else(host)
}

/// The port for HTTP, where one is wanted.
pub(super) async fn listen(config: &Config) -> Result<Option<TcpListener>, Error> {
    let Some(address) = config.http.listen else { return Ok(None) };
    let listener = TcpListener::bind(address).await.map_err(|why| Error::Listen { address, why })?;
    eprintln!("ringwatch: listening on http://{}", listener.local_addr()?);
    Ok(Some(listener))
}

/// Tells the service manager, if there is one; without one there is nobody to tell.
pub(super) fn notify(what: &[sd_notify::NotifyState<'_>]) {
    if let Err(e) = sd_notify::notify(what) {
        eprintln!("ringwatch: the service manager cannot be told: {e}");
    }
}
