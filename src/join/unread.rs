//! Communicators of which records are there that nobody has read yet.

use super::Join;
use crate::model::{CommId, SegmentId};

/// How long what is unread of one process keeps back verdicts on the other communicators of its user, ns. A process may
/// never be read to its end: somebody else's standstill must be told all the same.
const KEPT_BACK_NS: u64 = 10_000_000_000;

impl Join {
    /// Names the processes of which records are there that were not read, for want of time.
    pub fn set_unread(&mut self, segments: Vec<SegmentId>, now_ns: u64) {
        let since = |s: &SegmentId| self.unread.get(s).copied().unwrap_or(now_ns);
        self.unread = segments.into_iter().map(|s| (s, since(&s))).collect();
    }

    /// True where what a rank seems to lack may be there unread: no verdict can rest on it.
    ///
    /// Processes of a user wait for each other across communicators, so all of a user's are behind with one, for a while.
    pub fn has_unread(&self, comm: CommId, now_ns: u64) -> bool {
        if self.unread.is_empty() {
            return false;
        }
        let of_user = |s: &SegmentId| self.processes.get(s).is_some_and(|p| p.record.owner == comm.owner());
        let keeps_back = |since_ns: u64| now_ns.saturating_sub(since_ns) < KEPT_BACK_NS;
        if comm.owner().is_some()
            && self.unread.iter().any(|(s, since_ns)| keeps_back(*since_ns) && of_user(s))
        {
            return true;
        }
        let members = self.comms.get(&comm).into_iter().flat_map(|c| c.members().values());
        members.into_iter().any(|m| self.unread.contains_key(&m.record.segment))
    }
}
