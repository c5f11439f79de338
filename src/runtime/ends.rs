//! Waits for the end of a followed process.

#![expect(unsafe_code, reason = "tokio cannot know that a descriptor stays open")]

use crate::ingest::Ends;
use std::io;
use std::sync::Arc;
use tokio::io::unix::AsyncFd;

/// The ends of followed processes, to be waited for.
#[derive(Debug)]
pub struct EndsToCome(AsyncFd<Arc<Ends>>);

impl EndsToCome {
    /// Waits by these.
    ///
    /// # Errors
    /// The runtime cannot watch them.
    pub fn new(ends: Arc<Ends>) -> io::Result<Self> {
        // SAFETY: the descriptor is `Ends`' own for as long as that lives, and `AsyncFd` keeps it alive.
        Ok(EndsToCome(unsafe { AsyncFd::register(ends) }?))
    }

    /// Returns when a process has ended; never where that cannot be told any more.
    pub async fn next(&self) {
        while let Ok(mut ready) = self.0.readable().await {
            let any = self.0.get_ref().take();
            ready.clear_ready();
            if any {
                return;
            }
        }
        std::future::pending().await
    }
}
