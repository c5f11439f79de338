//! The agent: one thread owns the state and reads segments; the others answer questions about it.
//!
//! ```text
//! segments, samples -> state (a thread) <- questions <- HTTP, socket (one tokio thread)
//!                          \-> findings, traces -> exporters
//! ```
//! Nothing that is asked, and no receiver that is slow, keeps the state from reading.

mod http;
mod socket;
mod state;

pub use socket::{Answer, PROTOCOL, Question, Want};
pub use state::{Asked, State};

use super::signals::Signals;
use crate::config::{self, Config};
use crate::model::Finding;
use std::io;
use std::path::PathBuf;
use std::sync::mpsc;
use std::time::Duration;

/// What keeps the agent from starting or going on.
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
    /// Threads or signals cannot be had.
    #[error("{0}")]
    System(#[from] io::Error),
}

/// How often the service manager is told that the agent lives, where it wants to know.
const ALIVE: Duration = Duration::from_secs(5);

/// Runs until a signal asks for the end. `reload` reads the settings anew on SIGHUP; `told` hears of new findings, on
/// the thread that owns the state.
///
/// # Errors
/// What kept it from starting.
#[expect(clippy::disallowed_methods, reason = "here is where tasks are spawned")]
pub async fn run(
    config: Config,
    state: State,
    reload: impl Fn() -> Result<Config, config::Error>,
    told: impl FnMut(&Finding) + Send + 'static,
) -> Result<(), Error> {
    let mut signals = Signals::new()?;
    let listener = match config.http.listen {
        Some(address) => {
            Some(tokio::net::TcpListener::bind(address).await.map_err(|why| Error::Listen { address, why })?)
        }
        None => None,
    };
    let gate = socket::Gate::bind(&config.socket).await?;
    if let Some(at) = listener.as_ref().and_then(|l| l.local_addr().ok()) {
        eprintln!("ringwatch: listening on http://{at}");
    }
    let (ask, questions) = mpsc::sync_channel(64);
    let owner =
        std::thread::Builder::new().name("state".to_owned()).spawn(move || state.run(&questions, told))?;
    let http = listener.map(|l| tokio::spawn(http::serve(l, ask.clone())));
    let door = gate.map(|g| tokio::spawn(g.serve(ask.clone())));
    notify(&[sd_notify::NotifyState::Ready]);
    let mut alive = tokio::time::interval(ALIVE);
    loop {
        tokio::select! {
            asked = signals.next() => {
                if asked.to_reload() {
                    if let Ok(now) = sd_notify::NotifyState::monotonic_usec_now() {
                        notify(&[sd_notify::NotifyState::Reloading, now]);
                    }
                    match reload() {
                        // Sockets stay as they are: who listens on them would be cut off.
                        Ok(new) => { state::send(&ask, Asked::Settings(Box::new(new))); }
                        Err(e) => eprintln!("ringwatch: the settings stay as they were: {e}"),
                    }
                    notify(&[sd_notify::NotifyState::Ready]);
                } else if asked.to_end() {
                    break;
                }
            }
            _ = alive.tick() => {
                // A state that does not answer is not alive, whatever this thread thinks.
                if state::alive(&ask).await {
                    notify(&[sd_notify::NotifyState::Watchdog]);
                }
            }
        }
        if owner.is_finished() {
            return Err(Error::System(io::Error::other("the thread that owns the state has ended")));
        }
    }
    notify(&[sd_notify::NotifyState::Stopping]);
    for task in [http, door].into_iter().flatten() {
        task.abort();
    }
    state::send(&ask, Asked::End);
    // It is in the middle of a look at most.
    if owner.join().is_err() {
        return Err(Error::System(io::Error::other("the thread that owns the state has failed")));
    }
    Ok(())
}

/// Tells the service manager, if there is one; without one there is nobody to tell.
fn notify(what: &[sd_notify::NotifyState<'_>]) {
    if let Err(e) = sd_notify::notify(what) {
        eprintln!("ringwatch: the service manager cannot be told: {e}");
    }
}
