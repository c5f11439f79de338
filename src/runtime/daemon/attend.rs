//! What a daemon's main task does while the others work: it waits for signals, and keeps the service manager informed.

use super::{Asked, ClosedReport, Connections, Error, Reload, alive, notify, try_send};
use crate::config::{self, Config};
use crate::runtime::signals::Signals;
use sd_notify::NotifyState;
use std::io;
use std::sync::mpsc::SyncSender;
use std::thread::JoinHandle;
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
    ask: &SyncSender<Asked>,
    owner: &JoinHandle<()>,
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
                    settings.reload(read(), ask);
                    notify(&[NotifyState::Ready]);
                } else if asked.to_end() {
                    notify(&[NotifyState::Stopping]);
                    return Ok(());
                }
            }
            _ = sign_of_life.tick() => {
                closed.log(connections);
                // A state that does not answer is not alive, whatever this thread thinks.
                if alive(ask).await {
                    notify(&[NotifyState::Watchdog]);
                }
            }
        }
        failed().await?;
        if owner.is_finished() {
            return Err(Error::System(io::Error::other("the thread that owns the state has ended")));
        }
    }
}

/// Asks the state to end, and waits for it. It is in the middle of a pass at most.
///
/// # Errors
/// That it has failed.
pub(in crate::runtime) async fn end(ask: &SyncSender<Asked>, owner: JoinHandle<()>) -> Result<(), Error> {
    while let Err(Some(_)) = try_send(ask, Asked::End) {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let failed = |_| Error::System(io::Error::other("the thread that owns the state has failed"));
    owner.join().map_err(failed)
}
