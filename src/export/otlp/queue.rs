//! The queue to the receiver: bounded, and what did not fit is counted.

use crate::export::metrics::Exported;
use opentelemetry::logs::{AnyValue, Severity};
use opentelemetry_sdk::trace::SpanData;
use std::collections::{BTreeMap, VecDeque};

/// One log record.
#[derive(Debug, Clone, PartialEq)]
pub struct LogEntry {
    /// When, ns since the epoch.
    pub unix_ns: u64,
    /// How much it matters.
    pub severity: Severity,
    /// The event's name.
    pub event: &'static str,
    /// The event, for people.
    pub body: String,
    /// The rest.
    pub attributes: Vec<(&'static str, AnyValue)>,
    /// The trace and the span it belongs to.
    pub context: Option<(u128, u64)>,
}

/// The batch that is sent together.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Batch {
    /// Spans.
    pub spans: Vec<SpanData>,
    /// Log records.
    pub logs: Vec<LogEntry>,
}

impl Batch {
    /// True when there is nothing to send.
    pub fn is_empty(&self) -> bool {
        self.spans.is_empty() && self.logs.is_empty()
    }
}

/// Why something was not sent.
pub(super) const FULL: &str = "the queue was full";
/// The signal of log records.
pub(super) const LOGS: &str = "logs";

/// One signal's queue.
#[derive(Debug)]
pub(super) struct Queue<T> {
    waiting: VecDeque<T>,
    limit: usize,
    lost: BTreeMap<&'static str, u64>,
}

impl<T> Queue<T> {
    pub(super) fn new(limit: usize) -> Self {
        Queue { waiting: VecDeque::new(), limit, lost: BTreeMap::new() }
    }

    /// Adds what is new. Where there is no room, the oldest goes.
    pub(super) fn put(&mut self, items: impl IntoIterator<Item = T>) {
        self.waiting.extend(items);
        let surplus = self.waiting.len().saturating_sub(self.limit);
        self.waiting.drain(..surplus);
        self.lose(FULL, surplus as u64);
    }

    /// Puts back in front what could not be sent. Where there is no room, the oldest of it goes.
    pub(super) fn give_back(&mut self, items: Vec<T>) {
        let surplus = (items.len() + self.waiting.len()).saturating_sub(self.limit).min(items.len());
        for item in items.into_iter().skip(surplus).rev() {
            self.waiting.push_front(item);
        }
        self.lose(FULL, surplus as u64);
    }

    pub(super) fn take(&mut self, most: usize) -> Vec<T> {
        let n = self.waiting.len().min(most);
        self.waiting.drain(..n).collect()
    }

    pub(super) fn lose(&mut self, reason: &'static str, n: u64) {
        if n > 0 {
            *self.lost.entry(reason).or_default() += n;
        }
    }

    /// For the metrics; the sender knows the rest.
    pub(super) fn exported(&self, signal: &'static str) -> Exported {
        let mut lost = self.lost.clone();
        lost.entry(FULL).or_default();
        Exported { signal, sent: 0, queued: self.waiting.len() as u64, lost }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_go_and_are_counted_wherever_they_come_in() {
        let mut q = Queue::new(4);
        q.put(0..6);
        assert_eq!((q.take(3), q.exported("spans").lost[FULL]), (vec![2, 3, 4], 2));
        q.put([6, 7]);
        q.give_back(vec![2, 3, 4]);
        assert_eq!((q.take(9), q.exported("spans").lost[FULL]), (vec![4, 5, 6, 7], 4));
        assert_eq!(q.exported("spans").queued, 0);
    }
}
