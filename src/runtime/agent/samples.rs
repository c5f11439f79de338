//! The thread that asks drivers: they answer slowly, and nobody should wait for them.

use crate::ingest::hardware::{Samplers, Settings};
use crate::ingest::now_ns;
use crate::model::Reading;
use std::io;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender, TrySendError};

/// Readings that wait at most; a state that is so far behind gets none for a while.
const WAITING: usize = 256;

/// Samplers at work; they stop when this goes.
#[derive(Debug)]
pub(super) struct Samples {
    /// Hanging up is the sign to stop.
    _stop: SyncSender<()>,
}

impl Samples {
    /// Starts them; `None` where nothing is to be sampled.
    pub(super) fn start(settings: &Settings) -> io::Result<Option<(Self, Receiver<Vec<Reading>>)>> {
        if !settings.enabled {
            return Ok(None);
        }
        let (stop, stopped) = mpsc::sync_channel(0);
        let (send, receive) = mpsc::sync_channel(WAITING);
        let settings = settings.clone();
        std::thread::Builder::new().name("samplers".to_owned()).spawn(move || {
            let mut samplers = Samplers::new(&settings);
            while !samplers.is_empty() {
                let readings = samplers.poll(now_ns());
                if !readings.is_empty()
                    && let Err(TrySendError::Disconnected(_)) = send.try_send(readings)
                {
                    break;
                }
                match stopped.recv_timeout(samplers.pause(now_ns())) {
                    Err(RecvTimeoutError::Timeout) => {}
                    Ok(()) | Err(RecvTimeoutError::Disconnected) => break,
                }
            }
        })?;
        Ok(Some((Samples { _stop: stop }, receive)))
    }
}
