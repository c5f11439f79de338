//! A receiver of finished operations that a monitor feeds, and a command reads afterwards.

use crate::join::{Finished, FinishedSink, Join};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[derive(Debug, Default)]
pub(super) struct SharedSink<T>(Arc<Mutex<T>>);

impl<T> SharedSink<T> {
    pub(super) fn new(sink: T) -> Self {
        SharedSink(Arc::new(Mutex::new(sink)))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: FinishedSink + 'static> SharedSink<T> {
    /// The same receiver, for a monitor.
    pub(super) fn boxed(&self) -> Box<dyn FinishedSink> {
        Box::new(SharedSink(Arc::clone(&self.0)))
    }
}

impl<T: FinishedSink> FinishedSink for SharedSink<T> {
    fn take(&mut self, operations: &[Finished], join: &Join, now_ns: u64) {
        self.lock().take(operations, join, now_ns);
    }

    fn end(&mut self, open: &[Finished], join: &Join, now_ns: u64) {
        self.lock().end(open, join, now_ns);
    }
}
