//! Metrics for everybody who asks within a moment: written once a format, and shared.
//!
//! A flood of scrapes costs the thread that owns the state no more than ten renders a second, and a tenth of its time.

use super::requests::{Asked, Rendered, ask};
use super::state_queue::{Lane, StateSender};
use crate::export::prometheus::{Format, negotiated};
use crate::ingest::unix_ns;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;

/// The least time between two renders of one format.
const LEAST_AGE: Duration = Duration::from_millis(100);
/// A render that took long is shared for so many times as long.
const AGE_BY_COST: u32 = 10;
/// The most that this makes; a scraper comes every few seconds.
const MOST_AGE: Duration = Duration::from_secs(5);

/// One render.
#[derive(Debug, Clone)]
pub(super) struct Render {
    /// A number of its own, greater than those before.
    pub(super) number: u64,
    /// When it was made, wall clock ms since the epoch.
    pub(super) unix_ms: u64,
    /// The text that was written; an outer error where the state does not answer.
    pub(super) rendered: Result<Result<Rendered, String>, Unanswered>,
}

/// The state did not answer in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Unanswered;

/// The renders that are under way or fresh, by format.
#[derive(Debug)]
pub(super) struct SharedMetrics {
    state: StateSender,
    native_histograms: bool,
    fresh: Mutex<Fresh>,
}

#[derive(Debug, Default)]
struct Fresh {
    last_number: u64,
    by_format: BTreeMap<Format, watch::Receiver<Option<Arc<Render>>>>,
}

impl SharedMetrics {
    pub(super) fn new(state: StateSender, native_histograms: bool) -> Self {
        SharedMetrics { state, native_histograms, fresh: Mutex::default() }
    }

    /// Metrics in the format that an Accept header asks for.
    pub(super) async fn get(self: &Arc<Self>, accept: Option<&str>) -> Option<Arc<Render>> {
        let mut receiver = self.receiver(negotiated(accept, self.native_histograms));
        let render = receiver.wait_for(Option::is_some).await.ok()?;
        render.clone()
    }

    /// Joins the render of before while it is fresh, and starts one otherwise.
    #[expect(clippy::disallowed_methods, reason = "the render outlives a connection that is displaced")]
    fn receiver(self: &Arc<Self>, format: Format) -> watch::Receiver<Option<Arc<Render>>> {
        let mut fresh = self.fresh();
        if let Some(receiver) = fresh.by_format.get(&format) {
            return receiver.clone();
        }
        fresh.last_number += 1;
        let (send, receiver) = watch::channel(None);
        fresh.by_format.insert(format, receiver.clone());
        tokio::spawn(Arc::clone(self).render(format, fresh.last_number, send));
        receiver
    }

    async fn render(self: Arc<Self>, format: Format, number: u64, send: watch::Sender<Option<Arc<Render>>>) {
        let answer = ask(&self.state, Lane::Public, |reply| Asked::Metrics { format, reply }).await;
        let rendered = answer.ok_or(Unanswered);
        let took = rendered.as_ref().ok().and_then(|r| r.as_ref().ok()).map_or(Duration::ZERO, |r| r.took);
        let unix_ms = unix_ns() / 1_000_000;
        send.send(Some(Arc::new(Render { number, unix_ms, rendered }))).ok();
        tokio::time::sleep((took * AGE_BY_COST).clamp(LEAST_AGE, MOST_AGE)).await;
        self.fresh().by_format.remove(&format);
    }

    fn fresh(&self) -> MutexGuard<'_, Fresh> {
        self.fresh.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::super::state_queue::{Received, state_queue};
    use super::*;
    use std::time::Instant;

    /// Answers every question with the format and the number of the question; ends with the senders' runtime.
    fn state(took: Duration) -> StateSender {
        let (sender, receiver) = state_queue();
        std::thread::spawn(move || {
            for n in 0.. {
                let until = Instant::now() + Duration::from_secs(20);
                let Received::Asked(Asked::Metrics { format, reply }) = receiver.receive(until) else {
                    return;
                };
                let body = format!("{format:?} {n}").into();
                let rendered = Rendered { content_type: format.content_type().to_owned(), body, took };
                reply.send(Ok(rendered)).ok();
            }
        });
        sender
    }

    async fn body(metrics: &Arc<SharedMetrics>, accept: &str) -> String {
        let render = metrics.get(Some(accept)).await.unwrap();
        let rendered = render.rendered.as_ref().unwrap().as_ref().unwrap();
        String::from_utf8(rendered.body.to_vec()).unwrap()
    }

    #[tokio::test]
    async fn all_who_ask_within_a_moment_share_a_render_of_their_format() {
        let metrics = Arc::new(SharedMetrics::new(state(Duration::ZERO), true));
        let (first, second) = tokio::join!(body(&metrics, "text/plain"), body(&metrics, "text/plain"));
        assert_eq!((first.as_str(), second.as_str()), ("Text 0", "Text 0"));
        assert_eq!(body(&metrics, "application/openmetrics-text").await, "OpenMetrics 1");
        assert_eq!(body(&metrics, "text/plain").await, "Text 0", "still fresh");
        tokio::time::sleep(2 * LEAST_AGE).await;
        assert_eq!(body(&metrics, "text/plain").await, "Text 2");
    }

    #[tokio::test]
    async fn a_render_that_cost_much_is_shared_for_longer() {
        let metrics = Arc::new(SharedMetrics::new(state(Duration::from_secs(1)), true));
        body(&metrics, "text/plain").await;
        tokio::time::sleep(3 * LEAST_AGE).await;
        assert_eq!(body(&metrics, "text/plain").await, "Text 0");
    }

    #[tokio::test]
    async fn a_state_that_does_not_answer_is_asked_once_for_all() {
        let (sender, receiver) = state_queue();
        let metrics = Arc::new(SharedMetrics::new(sender, true));
        let began = Instant::now();
        let (first, second) = tokio::join!(metrics.get(None), metrics.get(None));
        assert!(first.unwrap().rendered.is_err() && second.unwrap().rendered.is_err());
        assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
        drop(receiver);
    }
}
