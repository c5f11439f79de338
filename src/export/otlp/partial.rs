//! The parts of a request that a receiver refuses though it takes the rest. gRPC's exporter reports it in a warning
//! alone, so that is listened to while it sends.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tracing::field::{Field, Visit};
use tracing::instrument::WithSubscriber;
use tracing::{Event, Metadata, Subscriber, span};

/// Runs something that sends; gives back its result and how many items were refused in part.
pub(super) async fn listening<F: Future>(sending: F) -> (F::Output, u64) {
    let refused = Arc::new(AtomicU64::new(0));
    let output = sending.with_subscriber(Listener(refused.clone())).await;
    (output, refused.load(Ordering::Relaxed))
}

/// Hears the exporters' warnings of that one name.
struct Listener(Arc<AtomicU64>);

impl Subscriber for Listener {
    fn enabled(&self, of: &Metadata<'_>) -> bool {
        of.is_event() && of.name().ends_with(".PartialSuccess")
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut rejected = Rejected(0);
        event.record(&mut rejected);
        self.0.fetch_add(rejected.0, Ordering::Relaxed);
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

/// The number in such a warning.
struct Rejected(u64);

impl Visit for Rejected {
    fn record_i64(&mut self, field: &Field, value: i64) {
        if field.name().starts_with("rejected_") {
            self.0 += u64::try_from(value).unwrap_or(0);
        }
    }

    fn record_debug(&mut self, _: &Field, _: &dyn std::fmt::Debug) {}
}
