//! Calls in the order in which they were issued.

use super::TimedCall;
use std::collections::BTreeMap;

/// A call is taken when another one was issued so long after it, in ns: records of several threads are not read at one moment.
const SETTLE_NS: u64 = 2_000_000_000;
/// The same of a call that has not ended.
const END_NS: u64 = 10_000_000_000;
/// Calls that wait at most. Where there are more, the oldest are taken as they are.
const WAITING_MAX: usize = 1 << 15;

/// The calls of a process that were not taken yet. All times are those of its host.
#[derive(Debug, Default)]
pub(super) struct Queue {
    /// By issue and by the number of the record: whether it is over, and the call.
    waiting: BTreeMap<(u64, u64), (bool, TimedCall)>,
    /// The last one that was taken.
    taken: Option<(u64, u64)>,
    newest_ns: u64,
}

impl Queue {
    /// Adds a call, or what is newly known of it. A call that was taken stays as it was.
    pub(super) fn add(&mut self, ticket: u64, call: TimedCall, is_over: bool) {
        let key = (call.issued_ns, ticket);
        if self.taken.is_none_or(|taken| key > taken) {
            self.newest_ns = self.newest_ns.max(call.issued_ns);
            self.waiting.insert(key, (is_over, call));
        }
    }

    /// Takes the next call of which all earlier ones are known; `is_last` where no more come.
    pub(super) fn next(&mut self, is_last: bool) -> Option<TimedCall> {
        let first = self.waiting.first_entry()?;
        let wait_ns = if first.get().0 { SETTLE_NS } else { END_NS };
        let is_due = is_last || self.newest_ns >= first.key().0.saturating_add(wait_ns);
        if !is_due && self.waiting.len() <= WAITING_MAX {
            return None;
        }
        let (key, (_, call)) = self.waiting.pop_first()?;
        self.taken = Some(key);
        Some(call)
    }
}
