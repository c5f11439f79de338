//! What agent and analyser share: the questions their state answers, HTTP, and what they cost.

mod asked;
mod http;
mod own;

pub(super) use asked::{Asked, alive, ask, send, try_send};
pub(super) use http::serve;
pub(super) use own::Costs;

use crate::config::Config;
use std::io;
use tokio::net::TcpListener;

/// The port for HTTP, where one is wanted.
pub(super) async fn listen(config: &Config) -> io::Result<Option<TcpListener>> {
    let Some(address) = config.http.listen else { return Ok(None) };
    let listener = TcpListener::bind(address).await?;
    eprintln!("ringwatch: listening on http://{}", listener.local_addr()?);
    Ok(Some(listener))
}

/// Tells the service manager, if there is one; without one there is nobody to tell.
pub(super) fn notify(what: &[sd_notify::NotifyState<'_>]) {
    if let Err(e) = sd_notify::notify(what) {
        eprintln!("ringwatch: the service manager cannot be told: {e}");
    }
}
