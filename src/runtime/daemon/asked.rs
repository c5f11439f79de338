//! What the thread that owns a daemon's state can be asked, and how.

use crate::cluster::message::Wish;
use crate::config::Config;
use crate::export::metrics::Family;
use crate::export::otlp::Batch;
use crate::model::Snapshot;
use crate::runtime::analyser::{Answer, Question, Reply};
use std::sync::mpsc::{SyncSender, TrySendError};
use std::time::Duration;
use tokio::sync::oneshot;

/// The longest that an answer may take.
const PATIENCE: Duration = Duration::from_secs(2);

/// What the state can be asked and told.
#[derive(Debug)]
pub(in crate::runtime) enum Asked {
    /// Everything for a screen, of one user's jobs or of all.
    Snapshot {
        /// The user, by number; absent for all.
        uid: Option<u32>,
        /// Where the answer goes.
        reply: oneshot::Sender<Box<Snapshot>>,
    },
    /// Metrics in the format that an Accept header asks for: content type and body, or why there are none.
    Metrics {
        /// The header.
        accept: Option<String>,
        /// Where the answer goes.
        reply: oneshot::Sender<Result<(String, Vec<u8>), String>>,
    },
    /// Metrics to be sent by OTLP.
    Families(oneshot::Sender<Vec<Family>>),
    /// Spans and log records that wait to be sent.
    Batch(oneshot::Sender<Box<Batch>>),
    /// Those that could not be sent.
    GiveBack(Box<Batch>),
    /// What is known of the cluster.
    Cluster(oneshot::Sender<Box<Reply>>),
    /// The same for a screen: what a reader looks at.
    Glance {
        /// The question.
        question: Box<Question>,
        /// Where the answer goes.
        reply: oneshot::Sender<Box<Answer>>,
    },
    /// Whether it reads.
    Ready(oneshot::Sender<bool>),
    /// An analyser's wish.
    Wish(Box<Wish>),
    /// Who listens on the bus may know nothing yet.
    Refresh,
    /// A followed process has ended.
    Ended,
    /// New settings.
    Settings(Box<Config>),
    /// To end.
    End,
}

/// Asks, without waiting for room; false when there is none, or nobody to be asked.
pub(in crate::runtime) fn send(to: &SyncSender<Asked>, asked: Asked) -> bool {
    try_send(to, asked).is_ok()
}

/// The same; gives back what there was no room for.
pub(in crate::runtime) fn try_send(to: &SyncSender<Asked>, asked: Asked) -> Result<(), Option<Asked>> {
    to.try_send(asked).map_err(|e| match e {
        TrySendError::Full(asked) => Some(asked),
        TrySendError::Disconnected(_) => None,
    })
}

/// Asks and waits for the answer; absent when it does not come in time.
pub(in crate::runtime) async fn ask<T>(
    to: &SyncSender<Asked>,
    question: impl FnOnce(oneshot::Sender<T>) -> Asked,
) -> Option<T> {
    let (reply, answer) = oneshot::channel();
    if !send(to, question(reply)) {
        return None;
    }
    tokio::time::timeout(PATIENCE, answer).await.ok()?.ok()
}

/// True when the state answers.
pub(in crate::runtime) async fn alive(to: &SyncSender<Asked>) -> bool {
    ask(to, Asked::Ready).await.is_some()
}
