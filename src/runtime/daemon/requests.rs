//! The questions and messages to the thread that owns a daemon's state.

use super::state_queue::{Lane, StateSender};
use crate::cluster::message::Wish;
use crate::config::Config;
use crate::export::metrics::Family;
use crate::export::otlp::Batch;
use crate::export::prometheus::Format;
use crate::model::Snapshot;
use crate::runtime::analyser::{Answer, Question, Reply};
use std::time::Duration;
use tokio::sync::oneshot;

/// The longest that an answer may take.
const PATIENCE: Duration = Duration::from_secs(2);

/// Metrics as they were written for a scraper.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::runtime) struct Rendered {
    /// The content type.
    pub(in crate::runtime) content_type: String,
    /// The body.
    pub(in crate::runtime) body: bytes::Bytes,
    /// How long the thread that owns the state took for them.
    pub(in crate::runtime) took: Duration,
}

impl Rendered {
    /// A rendering, with the time that it took, or the error in its place.
    pub(in crate::runtime) fn new(
        written: Result<(String, Vec<u8>), impl std::fmt::Display>,
        took: Duration,
    ) -> Result<Self, String> {
        let (content_type, body) = written.map_err(|e| e.to_string())?;
        Ok(Rendered { content_type, body: body.into(), took })
    }
}

/// A question to the state.
#[derive(Debug)]
pub(in crate::runtime) enum Asked {
    /// Everything for a screen, of one user's jobs or of all.
    Snapshot {
        /// The user, by number; absent for all.
        uid: Option<u32>,
        /// Where the answer goes.
        reply: oneshot::Sender<Box<Snapshot>>,
    },
    /// Metrics in a format, or why there are none.
    Metrics {
        /// The format.
        format: Format,
        /// Where the answer goes.
        reply: oneshot::Sender<Result<Rendered, String>>,
    },
    /// Metrics to be sent by OTLP.
    Families(oneshot::Sender<Vec<Family>>),
    /// Spans and log records that wait to be sent.
    Batch(oneshot::Sender<Box<Batch>>),
    /// The state of the cluster.
    Cluster(oneshot::Sender<Box<Reply>>),
    /// The same for a screen: what a reader looks at.
    Glance {
        /// The question.
        question: Box<Question>,
        /// Where the answer goes.
        reply: oneshot::Sender<Box<Answer>>,
    },
}

impl Asked {
    /// True when nobody waits for the answer any more.
    pub(super) fn is_given_up(&self) -> bool {
        match self {
            Asked::Snapshot { reply, .. } => reply.is_closed(),
            Asked::Metrics { reply, .. } => reply.is_closed(),
            Asked::Families(reply) => reply.is_closed(),
            Asked::Batch(reply) => reply.is_closed(),
            Asked::Cluster(reply) => reply.is_closed(),
            Asked::Glance { reply, .. } => reply.is_closed(),
        }
    }
}

/// A message to the state from other tasks of its process; no answer is expected.
#[derive(Debug)]
pub(in crate::runtime) enum Message {
    /// Spans and log records that could not be sent.
    GiveBack(Box<Batch>),
    /// An analyser's request.
    Wish(Box<Wish>),
    /// Readers of the bus may know nothing yet.
    Refresh,
    /// A followed process has ended.
    Ended,
    /// New settings.
    Settings(Box<Config>),
    /// To end.
    End,
}

/// Asks and waits for the answer; absent when it does not come in time.
pub(in crate::runtime) async fn ask<T>(
    to: &StateSender,
    lane: Lane,
    question: impl FnOnce(oneshot::Sender<T>) -> Asked,
) -> Option<T> {
    let (reply, answer) = oneshot::channel();
    if !to.ask(lane, question(reply)) {
        return None;
    }
    tokio::time::timeout(PATIENCE, answer).await.ok()?.ok()
}
