//! The thread that asks drivers: they answer slowly, and nobody should wait for them.

use super::absences::Absences;
use crate::ingest::hardware::{Pods, Samplers, Settings};
use crate::ingest::now_ns;
use crate::model::Reading;
use std::io;
use std::path::Path;
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
    /// Starts those of this node, and asks the kubelet behind this socket for who has which GPU; `None` where nothing is to
    /// be sampled.
    pub(super) fn start(
        node: String,
        settings: &Settings,
        kubelet: Option<&Path>,
    ) -> io::Result<Option<(Self, Receiver<Vec<Reading>>)>> {
        if !settings.enabled {
            return Ok(None);
        }
        let (stop, stopped) = mpsc::sync_channel(0);
        let (send, receive) = mpsc::sync_channel(WAITING);
        let settings = settings.clone();
        // A recording is of another machine.
        let kubelet = kubelet.filter(|_| settings.recording.is_none()).map(Path::to_owned);
        std::thread::Builder::new().name("samplers".to_owned()).spawn(move || {
            let mut samplers = Samplers::new(&settings).of_node(node);
            if let Some(socket) = kubelet {
                samplers.add(Box::new(Pods::new(socket)));
            }
            let mut absences = Absences::default();
            while !samplers.is_empty() {
                let readings = samplers.poll(now_ns());
                absences.log(&readings);
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
