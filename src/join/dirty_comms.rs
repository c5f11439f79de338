//! The communicators that a pass looks at: a cluster has a hundred thousand, and most of them rest.
//!
//! What the join is fed lists the communicators that it says something about, and each look says when the next is due
//! though nothing is heard. A tick goes through these alone; rules go through those that they may have something to say of.

use super::communicator::{Communicator, DirtyEntry};
use crate::model::CommId;
use std::collections::BTreeSet;

/// All communicators' entries, by what they are asked for.
#[derive(Debug, Clone, Default)]
pub(super) struct DirtyComms {
    touched: Vec<CommId>,
    due: BTreeSet<(u64, CommId)>,
    notable: BTreeSet<CommId>,
    over: BTreeSet<(u64, CommId)>,
    closed: usize,
}

/// Moves a communicator within a set that is ordered by a moment.
fn book(set: &mut BTreeSet<(u64, CommId)>, id: CommId, from: Option<u64>, to: Option<u64>) {
    if from == to {
        return;
    }
    if let Some(t) = from {
        set.remove(&(t, id));
    }
    if let Some(t) = to {
        set.insert((t, id));
    }
}

impl DirtyComms {
    /// Something was heard of it.
    pub(super) fn touch(&mut self, c: &mut Communicator) {
        if !c.dirty.touched {
            c.dirty.touched = true;
            self.touched.push(c.id);
        }
    }

    /// The communicators to look at now: those with news, and those that are due.
    pub(super) fn due(&self, now_ns: u64) -> Vec<CommId> {
        let due = self.due.range(..=(now_ns, CommId::unowned(u64::MAX))).map(|(_, id)| *id);
        let mut all: Vec<CommId> = self.touched.iter().copied().chain(due).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// The communicators with news since the last pass.
    pub(super) fn touched(&self) -> Vec<CommId> {
        self.touched.clone()
    }

    /// From here on those are listed of which something is heard from now on.
    pub(super) fn start_pass(&mut self) {
        self.touched.clear();
    }

    /// A communicator was looked at; it is over since then, if it is.
    pub(super) fn looked_at(&mut self, c: &mut Communicator, over_ns: Option<u64>) {
        let id = c.id;
        let new = DirtyEntry {
            touched: false,
            notable: c.is_notable(),
            closed: c.closed(),
            due_ns: c.next_ns(),
            over_ns,
        };
        let old = std::mem::replace(&mut c.dirty, new.clone());
        book(&mut self.due, id, old.due_ns, new.due_ns);
        book(&mut self.over, id, old.over_ns, new.over_ns);
        self.closed = self.closed + usize::from(new.closed) - usize::from(old.closed);
        if old.notable && !new.notable {
            self.notable.remove(&id);
        } else if new.notable && !old.notable {
            self.notable.insert(id);
        }
    }

    /// A communicator is forgotten.
    pub(super) fn forget(&mut self, c: &Communicator) {
        book(&mut self.due, c.id, c.dirty.due_ns, None);
        book(&mut self.over, c.id, c.dirty.over_ns, None);
        self.closed -= usize::from(c.dirty.closed);
        self.notable.remove(&c.id);
    }

    /// The communicators that a rule may report on: as of the last look, and all with news
    /// since.
    pub(super) fn notable(&self) -> BTreeSet<CommId> {
        self.notable.iter().chain(&self.touched).copied().collect()
    }

    /// The communicators that are closed beyond so many, those closed for longest first.
    pub(super) fn surplus(&self, most: usize) -> Vec<CommId> {
        self.over.iter().take(self.over.len().saturating_sub(most)).map(|(_, id)| *id).collect()
    }

    /// How many are freed on all their ranks, as of the last look.
    pub(super) fn closed(&self) -> usize {
        self.closed
    }
}
