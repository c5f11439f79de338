//! The queue to the sender of OTLP, as the owner of a state keeps it: what waits, what is on its way, and what was
//! lost.

use super::lost::{Lost, unsent};
use crate::export::metrics::Exported;
use crate::export::otlp::{Batch, Exporter, Settings, Tracer};
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::oneshot;
use tracing::warn;

/// Spans and log records for a receiver.
#[derive(Debug)]
pub(in crate::runtime) struct Outgoing {
    tracer: Tracer,
    exporter: Arc<Exporter>,
    lost: Lost,
    /// Spans and logs that are with the sender.
    sending: [u64; 2],
}

impl Outgoing {
    /// Nothing waits yet.
    pub(in crate::runtime) fn new(settings: &Settings, exporter: Arc<Exporter>) -> Self {
        Outgoing { tracer: Tracer::new(settings), exporter, lost: Lost::default(), sending: [0; 2] }
    }

    /// The writer of what is to go out.
    pub(in crate::runtime) fn tracer(&mut self) -> &mut Tracer {
        &mut self.tracer
    }

    /// The accounting of everything so far.
    pub(in crate::runtime) fn exported(&self) -> Vec<Exported> {
        self.exporter.exported(self.tracer.exported())
    }

    /// Gives out what is to be sent next.
    pub(in crate::runtime) fn hand_out(&mut self, reply: oneshot::Sender<Box<Batch>>) {
        let batch = Box::new(self.tracer.take());
        self.sending = [batch.spans.len() as u64, batch.logs.len() as u64];
        // Who asked and went away needs no answer.
        if let Err(batch) = reply.send(batch) {
            self.take_back(*batch);
        }
    }

    /// Takes back what could not be sent.
    pub(in crate::runtime) fn take_back(&mut self, batch: Batch) {
        self.tracer.give_back(batch);
        self.sending = [0; 2];
    }

    /// Says what more was lost.
    pub(in crate::runtime) fn say_lost(&mut self) {
        let news = self.lost.news(&self.exported(), Instant::now());
        news.iter().for_each(|n| warn!("{n}"));
    }

    /// Says what is lost because this is the end.
    pub(in crate::runtime) fn say_unsent(&self) {
        unsent(&self.exported(), self.sending).iter().for_each(|n| warn!("{n}"));
    }
}
