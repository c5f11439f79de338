//! The operations that each process waits in.

use crate::join::instance::{IssuedAt, Part};
use std::collections::{HashMap, HashSet};

/// The operation that each process waits in: of several, the one that it issued first.
#[derive(Default)]
pub(super) struct Waiting {
    pub(super) first: HashMap<u32, IssuedAt>,
    /// The first operation that each process is known not to have started.
    pub(super) not_started: HashMap<u32, IssuedAt>,
    /// Of these it is not known when they issued something in which they wait.
    pub(super) unknown: HashSet<u32>,
}

impl Waiting {
    pub(super) fn add(&mut self, actor: u32, at: IssuedAt) {
        let known = self.first.entry(actor).or_insert(at);
        if at.is_before(*known) {
            *known = at;
        }
    }

    pub(super) fn add_not_started(&mut self, actor: u32, at: IssuedAt) {
        let known = self.not_started.entry(actor).or_insert(at);
        if at.is_before(*known) {
            *known = at;
        }
    }

    /// True where a process waits in something that it issued before this part, or has not started that.
    pub(super) fn is_before(&self, actor: u32, part: &Part) -> bool {
        let mut known = self.first.get(&actor).into_iter().chain(self.not_started.get(&actor));
        part.issued_at().is_some_and(|at| known.any(|known| known.is_before(at)))
    }

    /// The first operation that a process waits in or has not started, and whether it waits there.
    pub(super) fn limit(&self, actor: u32) -> (Option<IssuedAt>, bool) {
        let (first, not_started) = (self.first.get(&actor).copied(), self.not_started.get(&actor).copied());
        match (first, not_started) {
            (Some(first), Some(earlier)) if earlier.is_before(first) => (Some(earlier), false),
            (Some(first), _) => (Some(first), true),
            (None, limit) => (limit, self.unknown.contains(&actor)),
        }
    }

    /// True where a process does not wait in anything that it issued before this.
    pub(super) fn is_nowhere_before(&self, actor: u32, at: IssuedAt) -> bool {
        self.first.get(&actor).is_none_or(|known| at.is_before(*known))
    }

    /// True where all that a process waits in was issued after this.
    pub(super) fn is_after(&self, actor: u32, at: IssuedAt) -> bool {
        !self.unknown.contains(&actor) && self.first.get(&actor).is_some_and(|known| at.is_before(*known))
    }
}
