//! The agent: one thread owns the state and reads segments; the others answer questions about it.
//!
//! ```text
//! segments, samples -> state (a thread) <- questions <- HTTP, socket (one tokio thread)
//!                          \-> findings, traces -> exporters
//! ```
//! Nothing that is asked, and no receiver that is slow, keeps the state from reading.

mod absences;
mod bus;
pub mod finding_store;
mod peer;
mod places;
mod samples;
mod socket;
mod state;

pub use socket::{Answer, PROTOCOL, Question, Want};
pub use state::State;

use super::daemon::{self, Error, Reload, StateThread};
use super::signals::Signals;
use crate::cluster::Outbox;
use crate::config::{self, Config};
use crate::model::FindingEvent;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// The time that the end waits for the bus, and for receivers of findings.
const LAST_WORDS: Duration = Duration::from_secs(3);

/// The settings that the state takes over while it runs. Sockets stay as they are: who listens on them would be cut off.
const TAKEN_OVER: &[&str] =
    &["segments", "detect", "stacks", "hardware", "limits", "cluster.bytes_per_second", "cluster.stacks"];

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
    told: impl FnMut(&FindingEvent) + Send + 'static,
) -> Result<(), Error> {
    let inherited = daemon::inherited_sockets();
    let shares = daemon::raise_descriptors();
    let signals = Signals::new()?;
    // Who reads that it listens finds the socket too.
    let gate = socket::Gate::bind(&config.socket).await?;
    let connections = state.connections();
    let port = daemon::HttpPort::open(&config, inherited, &connections)?;
    let receiver = daemon::Sender::new(&config, "ringwatch", daemon::node(&config))?;
    if let Some(receiver) = &receiver {
        state.trace_to(receiver.outgoing());
    }
    let notifying = daemon::Notifier::start(&config.notify, &daemon::node(&config)).map_err(Error::Notify)?;
    let notifying = notifying.map(|(notifier, sending)| {
        state.notify_by(notifier);
        sending
    });
    let outbox = config.cluster.is_enabled().then(|| Arc::new(Outbox::new(config.cluster.waiting_bytes)));
    if let Some(outbox) = &outbox {
        state.publish_to(Arc::clone(outbox));
    }
    state.sample()?;
    let ends = state.ends();
    let started = state.started_unix_ns();
    let thread = StateThread::start(state.heartbeat(), move |queue| state.run(queue, told))?;
    let sender = thread.sender();
    let bounds = daemon::Bounds::new(shares.http);
    let answers = thread.answers(&config);
    let http = port.map(|p| tokio::spawn(p.serve(answers, bounds, Arc::clone(&connections))));
    let door = gate.map(|g| tokio::spawn(g.serve(sender.clone(), shares.socket, Arc::clone(&connections))));
    let watching = ends.map(|e| tokio::spawn(daemon::tell_ends(e, sender.clone())));
    let sending = receiver.map(|r| r.start(started, sender.clone()));
    let (hush, hushed) = watch::channel(false);
    let (settings, asking) = ((daemon::node(&config), config.cluster.clone()), sender.clone());
    let mut voice = outbox.map(|o| tokio::spawn(bus::serve(settings, o, asking, hushed)));
    // The bus ends by itself only where its settings are wrong.
    let failed = async || match voice.take_if(|v| v.is_finished()) {
        Some(v) => v.await.unwrap_or(Ok(())).map_err(Error::Bus),
        None => Ok(()),
    };
    let settings = Reload::new(&config, TAKEN_OVER);
    daemon::attend(signals, &thread, &connections, settings, reload, failed).await?;
    for task in [http, door, watching].into_iter().flatten() {
        task.abort();
    }
    if let Some(sending) = sending {
        sending.end().await;
    }
    thread.end()?;
    if let Some(sending) = notifying {
        sending.end(LAST_WORDS).await;
    }
    // What the state said at its end goes out too.
    hush.send(true).ok();
    if let Some(voice) = voice {
        tokio::time::timeout(LAST_WORDS, voice).await.ok();
    }
    Ok(())
}
