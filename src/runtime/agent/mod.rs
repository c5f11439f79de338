//! The agent: one thread owns the state and reads segments; the others answer questions about it.
//!
//! ```text
//! segments, samples -> state (a thread) <- questions <- HTTP, socket (one tokio thread)
//!                          \-> findings, traces -> exporters
//! ```
//! Nothing that is asked, and no receiver that is slow, keeps the state from reading.

mod bus;
mod peer;
mod samples;
mod socket;
mod state;

pub use socket::{Answer, PROTOCOL, Question, Want};
pub use state::State;

use super::daemon::{self, Asked, Error};
use super::signals::Signals;
use crate::cluster::Outbox;
use crate::config::{self, Config};
use crate::model::Finding;
use std::io;
use std::sync::{Arc, mpsc};
use std::time::Duration;
use tokio::sync::watch;

/// How long the end waits for the bus.
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
    let listener = daemon::listen(&config).await?;
    let receiver = daemon::Sender::new(&config, "ringwatch", daemon::host())?;
    if let Some(receiver) = &receiver {
        state.trace_to(receiver.outgoing());
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
    let sending = receiver.map(|r| r.start(started, ask.clone()));
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
    if let Some(sending) = sending {
        sending.end().await;
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
