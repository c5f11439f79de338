//! The main task of a daemon while the others work: it waits for signals, and keeps the service manager informed.

use super::{ClosedReport, Connections, Error, Reload, StateThread, notify};
use crate::config::{self, Config};
use crate::runtime::signals::Signals;
use sd_notify::NotifyState;
use std::io;
use std::time::Duration;

/// How often the service manager gets a sign of life, where it wants one.
const ALIVE: Duration = Duration::from_secs(5);

/// Waits until a signal asks for the end. `read` reads the settings again on SIGHUP; `failed` is asked after each event
/// whether something else has ended that must not.
///
/// # Errors
/// What has ended that must not.
pub(in crate::runtime) async fn attend(
    mut signals: Signals,
    state: &StateThread,
    connections: &Connections,
    mut settings: Reload,
    read: impl Fn() -> Result<Config, config::Error>,
    mut failed: impl AsyncFnMut() -> Result<(), Error>,
) -> Result<(), Error> {
    let mut sign_of_life = tokio::time::interval(ALIVE);
    let mut closed = ClosedReport::default();
    notify(&[NotifyState::Ready]);
    loop {
        tokio::select! {
            asked = signals.next() => {
                if asked.to_reload() {
                    // A unit of Type=notify-reload waits for both, one of Type=notify shows them.
                    if let Ok(now) = NotifyState::monotonic_usec_now() {
                        notify(&[NotifyState::Reloading, now]);
                    }
                    settings.reload(read(), &state.sender());
                    notify(&[NotifyState::Ready]);
                } else if asked.to_end() {
                    notify(&[NotifyState::Stopping]);
                    return Ok(());
                }
            }
            _ = sign_of_life.tick() => {
                closed.log(connections);
                // A state that hangs is not alive, whatever this thread thinks.
                if state.is_alive() {
                    notify(&[NotifyState::Watchdog]);
                }
            }
        }
        failed().await?;
        if state.is_finished() {
            return Err(Error::System(io::Error::other("the thread that owns the state has ended")));
        }
    }
}
