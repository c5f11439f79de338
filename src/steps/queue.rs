//! Calls in the order in which they were issued.

use super::Call;
use std::collections::BTreeMap;

/// So long after its issue a call is taken, in ns: records of several threads are not read at one moment.
const SETTLE_NS: u64 = 2_000_000_000;
/// So long its end is waited for.
const END_NS: u64 = 10_000_000_000;
/// Calls that wait at most. Where there are more, the oldest are taken as they are.
const WAITING_MAX: usize = 1 << 17;

/// The calls of a process that were not taken yet.
#[derive(Debug, Default)]
pub(super) struct Queue {
    /// By issue and by the number of the record: whether it is over, and the call.
    waiting: BTreeMap<(u64, u64), (bool, Call)>,
    /// Calls that were issued before this moment are taken.
    taken_ns: u64,
}

impl Queue {
    /// Adds a call, or what is newly known of it. A call that was taken stays as it was.
    pub(super) fn add(&mut self, ticket: u64, call: Call, is_over: bool) {
        if call.issued_ns >= self.taken_ns {
            self.waiting.insert((call.issued_ns, ticket), (is_over, call));
        }
    }

    /// Forgets what waits: records are lost, and nobody knows where among them.
    pub(super) fn lose(&mut self) {
        self.waiting.clear();
    }

    /// Gives the calls that are due at a moment, one after the other.
    pub(super) fn due(&mut self, now_ns: u64) -> impl FnMut() -> Option<Call> {
        move || {
            let first = self.waiting.first_entry()?;
            let (issued_ns, _) = *first.key();
            let wait_ns = if first.get().0 { SETTLE_NS } else { END_NS };
            let is_due = now_ns >= issued_ns.saturating_add(wait_ns);
            if !is_due && self.waiting.len() <= WAITING_MAX {
                return None;
            }
            self.taken_ns = issued_ns;
            self.waiting.pop_first().map(|(_, (_, call))| call)
        }
    }
}
