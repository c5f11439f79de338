//! Communicators of which records are there that nobody has read yet.

use super::Join;
use crate::model::{CommId, SegmentId};

impl Join {
    /// Names the processes of which records are there that were not read, for want of time.
    pub fn set_unread(&mut self, segments: Vec<SegmentId>) {
        self.unread = segments.into_iter().collect();
    }

    /// True where what a rank seems to lack may be there unread: no verdict can rest on it.
    ///
    /// Processes of a user wait for each other across communicators, so all of a user's are behind with one.
    pub fn has_unread(&self, comm: CommId) -> bool {
        if self.unread.is_empty() {
            return false;
        }
        let of_user = |s: &SegmentId| self.processes.get(s).is_some_and(|p| p.record.owner == comm.owner());
        if comm.owner().is_some() && self.unread.iter().any(of_user) {
            return true;
        }
        let members = self.comms.get(&comm).into_iter().flat_map(|c| c.members().values());
        members.into_iter().any(|m| self.unread.contains(&m.record.segment))
    }
}
