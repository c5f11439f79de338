//! The agent: one thread owns the state and reads segments; the others answer questions about it.
//!
//! ```text
//! segments, samples -> state (a thread) <- questions <- HTTP, socket (one tokio thread)
//!                          \-> findings, traces -> exporters
//! ```
//! Nothing that is asked, and no receiver that is slow, keeps the state from reading.

mod bus;
mod lost;
mod otlp;
mod peer;
mod samples;
mod socket;
mod state;

pub(super) use bus::node;
pub use socket::{Answer, PROTOCOL, Question, Want};
pub use state::State;

use super::daemon::{self, Asked};
use super::signals::Signals;
use crate::cluster::Outbox;
use crate::config::{self, Config};
use crate::export::otlp::Exporter;
use crate::model::Finding;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::time::Duration;
use tokio::sync::watch;

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
    /// What is sent away cannot be sent.
    #[error("otlp: {0}")]
    Otlp(#[from] crate::export::otlp::Error),
    /// There is no way onto the bus.
    #[error(transparent)]
    Bus(#[from] crate::cluster::Error),
    /// Threads or signals cannot be had.
    #[error("{0}")]
    System(#[from] io::Error),
}

/// How long the end waits for a receiver.
const LAST_WORDS: Duration = Duration::from_secs(3);

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
    mut state: State,
    reload: impl Fn() -> Result<Config, config::Error>,
    told: impl FnMut(&Finding) + Send + 'static,
) -> Result<(), Error> {
    let mut signals = Signals::new()?;
    // Who reads that it listens finds the socket too.
    let gate = socket::Gate::bind(&config.socket).await?;
    let listener = listen(&config).await?;
    let exporter = match config.otlp.is_enabled() {
        true => Some(Arc::new(Exporter::new(&config.otlp, resource(&config))?)),
        false => None,
    };
    if let Some(exporter) = &exporter {
        state.trace_to(Arc::clone(exporter));
    }
    let outbox = config.cluster.is_enabled().then(|| Arc::new(Outbox::new(config.cluster.waiting_bytes)));
    if let Some(outbox) = &outbox {
        state.publish_to(Arc::clone(outbox));
    }
    state.sample()?;
    let started = state.started_unix_ns();
    let (ask, questions) = mpsc::sync_channel(64);
    let owner =
        std::thread::Builder::new().name("state".to_owned()).spawn(move || state.run(&questions, told))?;
    let http = listener.map(|l| tokio::spawn(daemon::serve(l, ask.clone())));
    let door = gate.map(|g| tokio::spawn(g.serve(ask.clone())));
    daemon::notify(&[sd_notify::NotifyState::Ready]);
    let (stop, stopped) = watch::channel(false);
    let sender =
        exporter.map(|e| tokio::spawn(otlp::send(e, config.otlp.clone(), started, ask.clone(), stopped)));
    let (hush, hushed) = watch::channel(false);
    let (settings, asking) = (config.cluster.clone(), ask.clone());
    let mut voice = outbox.map(|o| tokio::spawn(bus::serve(settings, o, asking, hushed)));
    let mut alive = tokio::time::interval(ALIVE);
    loop {
        tokio::select! {
            asked = signals.next() => {
                if asked.to_reload() {
                    if let Ok(now) = sd_notify::NotifyState::monotonic_usec_now() {
                        daemon::notify(&[sd_notify::NotifyState::Reloading, now]);
                    }
                    match reload() {
                        // Sockets stay as they are: who listens on them would be cut off.
                        Ok(new) => { daemon::send(&ask, Asked::Settings(Box::new(new))); }
                        Err(e) => eprintln!("ringwatch: the settings stay as they were: {e}"),
                    }
                    daemon::notify(&[sd_notify::NotifyState::Ready]);
                } else if asked.to_end() {
                    break;
                }
            }
            _ = alive.tick() => {
                // A state that does not answer is not alive, whatever this thread thinks.
                if daemon::alive(&ask).await {
                    daemon::notify(&[sd_notify::NotifyState::Watchdog]);
                }
            }
        }
        // It ends by itself only where its settings are wrong.
        if let Some(v) = voice.take_if(|v| v.is_finished())
            && let Ok(Err(e)) = v.await
        {
            return Err(Error::Bus(e));
        }
        if owner.is_finished() {
            return Err(Error::System(io::Error::other("the thread that owns the state has ended")));
        }
    }
    daemon::notify(&[sd_notify::NotifyState::Stopping]);
    for task in [http, door].into_iter().flatten() {
        task.abort();
    }
    stop.send(true).ok();
    if let Some(sender) = sender {
        tokio::time::timeout(LAST_WORDS, sender).await.ok();
    }
    while let Err(Some(_)) = daemon::try_send(&ask, Asked::End) {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    // It is in the middle of a look at most.
    if owner.join().is_err() {
        return Err(Error::System(io::Error::other("the thread that owns the state has failed")));
    }
    // What the state said at its end goes out too.
    hush.send(true).ok();
    if let Some(voice) = voice {
        tokio::time::timeout(LAST_WORDS, voice).await.ok();
    }
    Ok(())
}

/// The port for HTTP, where one is wanted.
pub(super) async fn listen(config: &Config) -> Result<Option<tokio::net::TcpListener>, Error> {
    let wrong = |why| match config.http.listen {
        Some(address) => Error::Listen { address, why },
        None => Error::System(why),
    };
    daemon::listen(config).await.map_err(wrong)
}

/// Who sends, in OpenTelemetry's words, and the user's tags.
fn resource(config: &Config) -> Vec<(String, String)> {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let own = [
        ("service.name", "ringwatch".to_owned()),
        ("service.version", env!("CARGO_PKG_VERSION").to_owned()),
        ("service.instance.id", host.clone()),
        ("host.name", host),
    ];
    let tags = config.tags.iter().map(|(k, v)| (k.clone(), v.clone()));
    own.into_iter().map(|(k, v)| (k.to_owned(), v)).chain(tags).collect()
}
