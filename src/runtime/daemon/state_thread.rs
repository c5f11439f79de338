//! The thread that owns a daemon's state, as its other tasks see it.

use super::state_queue::{StateReceiver, StateSender, state_queue};
use super::{Answers, Error, Heartbeat, Message};
use crate::config::Config;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

/// A thread that owns a state and takes messages and questions.
#[derive(Debug)]
pub(in crate::runtime) struct StateThread {
    sender: StateSender,
    heartbeat: Arc<Heartbeat>,
    thread: JoinHandle<()>,
}

impl StateThread {
    /// Starts it.
    ///
    /// # Errors
    /// The system's error when there can be no more threads.
    pub(in crate::runtime) fn start(
        heartbeat: Arc<Heartbeat>,
        run: impl FnOnce(&StateReceiver) + Send + 'static,
    ) -> io::Result<Self> {
        let (sender, receiver) = state_queue();
        let thread = std::thread::Builder::new().name("state".to_owned()).spawn(move || run(&receiver))?;
        Ok(StateThread { sender, heartbeat, thread })
    }

    /// Where messages and questions go.
    pub(in crate::runtime) fn sender(&self) -> StateSender {
        self.sender.clone()
    }

    /// The sources of HTTP answers.
    pub(in crate::runtime) fn answers(&self, config: &Config) -> Answers {
        Answers {
            state: self.sender(),
            heartbeat: Arc::clone(&self.heartbeat),
            native_histograms: config.prometheus.native_histograms,
        }
    }

    /// True unless the thread hangs or has ended.
    pub(in crate::runtime) fn is_alive(&self) -> bool {
        self.heartbeat.is_alive() && !self.is_finished()
    }

    /// True when the thread has ended.
    pub(in crate::runtime) fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }

    /// Asks the state to end, and waits for it. It is in the middle of a pass at most.
    ///
    /// # Errors
    /// That it has failed.
    pub(in crate::runtime) fn end(self) -> Result<(), Error> {
        self.sender.send(Message::End);
        let failed = |_| Error::System(io::Error::other("the thread that owns the state has failed"));
        self.thread.join().map_err(failed)
    }
}
