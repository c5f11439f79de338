//! Memory by who fills it: what one user's processes, or one node, say must not take what the others need.
//!
//! Every communicator is accounted to its payer by an estimate of what it takes. As long as all payers together stay below
//! the limit nobody is held to anything; above it those that take most are, down to a fair share. From three quarters of
//! the limit on, those that take most give up what is kept to be shown, so that history costs nobody new records.
//!
//! The order of processes' calls is accounted in the same way, against a limit of its own.

use crate::model::CommId;
use std::collections::{HashMap, HashSet};

/// The payer of a communicator's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Payer {
    /// The user whose it is.
    User(Option<u32>),
    /// The node that all its ranks are on, by a hash of its name.
    Node(u64),
    /// Ranks of several nodes are in it: none of them could have made it alone.
    Nobody,
}

/// The limit of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryLimit {
    /// All users of a node together, in bytes.
    OfUsers(usize),
    /// Each node of a cluster, in bytes.
    OfEachNode(usize),
}

impl MemoryLimit {
    /// A quarter of it.
    pub(super) fn quarter(self) -> Self {
        match self {
            MemoryLimit::OfUsers(most) => MemoryLimit::OfUsers(most / 4),
            MemoryLimit::OfEachNode(most) => MemoryLimit::OfEachNode(most / 4),
        }
    }
}

/// The memory that payers' communicators take, and their limits.
#[derive(Debug, Clone, Default)]
pub(super) struct Memory {
    limit: Option<MemoryLimit>,
    by_payer: HashMap<Payer, usize>,
    total: usize,
    /// Payers above the limit of each.
    over: usize,
    /// Payers above three quarters of the limit of each.
    near: usize,
    /// The memory that one user may take, in bytes, while all together take too much.
    share: Option<usize>,
}

impl Memory {
    pub(super) fn set_limit(&mut self, limit: MemoryLimit) {
        self.limit = Some(limit);
    }

    /// The payer of a communicator from now on that is joined by a rank of a node, and was paid by somebody before.
    pub(super) fn payer(&self, comm: CommId, before: Option<Payer>, node: &str) -> Payer {
        match self.limit {
            Some(MemoryLimit::OfEachNode(_)) => {
                let own = Payer::Node(hash(node));
                if before.is_none_or(|p| p == own) { own } else { Payer::Nobody }
            }
            _ => Payer::User(comm.owner()),
        }
    }

    /// The payer of the memory that belongs to a process and to none of its communicators.
    pub(super) fn payer_of_process(&self, owner: Option<u32>, node: &str) -> Payer {
        match self.limit {
            Some(MemoryLimit::OfEachNode(_)) => Payer::Node(hash(node)),
            _ => Payer::User(owner),
        }
    }

    /// Takes that a payer's communicator takes so much where it took so much before.
    pub(super) fn account(&mut self, payer: Payer, before: usize, after: usize) {
        let Some(limit) = self.limit else { return };
        if before == after || payer == Payer::Nobody {
            return;
        }
        let of = self.by_payer.entry(payer).or_default();
        let was = *of;
        *of = (was + after).saturating_sub(before);
        let is = *of;
        if is == 0 {
            self.by_payer.remove(&payer);
        }
        self.total = (self.total + after).saturating_sub(before);
        match limit {
            MemoryLimit::OfUsers(most) => {
                let over = self.total > most;
                if over != self.share.is_some() {
                    self.share = over.then(|| self.fair_share(most / 8 * 7));
                }
            }
            MemoryLimit::OfEachNode(most) => {
                let above = |bytes: usize, most: usize| usize::from(bytes > most);
                self.over = self.over + above(is, most) - above(was, most);
                let near = three_quarters(most);
                self.near = self.near + above(is, near) - above(was, near);
            }
        }
    }

    /// True where a payer may take more.
    pub(super) fn may_grow(&self, payer: Payer) -> bool {
        if !self.is_short() {
            return true;
        }
        let most = match self.limit {
            Some(MemoryLimit::OfEachNode(most)) => most,
            _ => self.share.unwrap_or(usize::MAX),
        };
        self.by_payer.get(&payer).is_none_or(|bytes| *bytes < most)
    }

    /// True where somebody is held to a share.
    pub(super) fn is_short(&self) -> bool {
        self.share.is_some() || self.over > 0
    }

    /// Works out again what one user may take.
    pub(super) fn balance(&mut self) {
        if let (Some(_), Some(MemoryLimit::OfUsers(most))) = (self.share, self.limit) {
            self.share = Some(self.fair_share(most / 8 * 7));
        }
    }

    /// True where the limit is near.
    pub(super) fn is_near(&self) -> bool {
        match self.limit {
            Some(MemoryLimit::OfUsers(most)) => self.total > three_quarters(most),
            Some(MemoryLimit::OfEachNode(_)) => self.near > 0,
            None => false,
        }
    }

    /// Payers that bring the limit near: what is kept for them has to become less.
    pub(super) fn largest(&self) -> HashSet<Payer> {
        let most = match self.limit {
            Some(MemoryLimit::OfUsers(most)) => self.fair_share(three_quarters(most)),
            Some(MemoryLimit::OfEachNode(most)) => three_quarters(most),
            None => return HashSet::new(),
        };
        self.by_payer.iter().filter(|(_, bytes)| **bytes > most).map(|(payer, _)| *payer).collect()
    }

    /// The share at which all together take no more than the limit: whoever takes less keeps it.
    fn fair_share(&self, limit: usize) -> usize {
        let mut all: Vec<usize> = self.by_payer.values().copied().collect();
        all.sort_unstable();
        let (mut left, mut payers) = (limit, all.len());
        for bytes in all {
            let share = left / payers.max(1);
            if bytes > share {
                return share;
            }
            left -= bytes;
            payers -= 1;
        }
        limit
    }
}

fn three_quarters(bytes: usize) -> usize {
    bytes / 4 * 3
}

/// FNV-1a.
fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(user: u32) -> Payer {
        Payer::User(Some(user))
    }

    #[test]
    fn who_takes_little_keeps_it_and_the_largest_are_held_to_a_share() {
        let mut m = Memory::default();
        m.set_limit(MemoryLimit::OfUsers(800));
        m.account(of(1), 0, 100);
        m.account(of(2), 0, 500);
        m.account(of(3), 0, 200);
        assert!([1, 2, 3].iter().all(|n| m.may_grow(of(*n))) && !m.is_short(), "there is room for all");
        m.account(of(3), 200, 400);
        assert!(m.is_short() && m.may_grow(of(1)) && m.may_grow(of(4)));
        assert!(!m.may_grow(of(2)) && !m.may_grow(of(3)), "300 for each of the two");
        m.account(of(2), 500, 250);
        assert!(!m.is_short());
        m.account(of(3), 400, 0);
        assert_eq!((m.by_payer.len(), m.total), (2, 350));
    }

    #[test]
    fn before_the_limit_is_reached_the_largest_give_up_history() {
        let mut m = Memory::default();
        m.set_limit(MemoryLimit::OfUsers(800));
        m.account(of(1), 0, 100);
        m.account(of(2), 0, 500);
        assert!(!m.is_near());
        m.account(of(3), 0, 150);
        assert!(m.is_near() && !m.is_short());
        assert_eq!(m.largest(), HashSet::from([of(2)]));
        let mut m = Memory::default();
        m.set_limit(MemoryLimit::OfEachNode(800));
        m.account(Payer::Node(1), 0, 600);
        assert!(!m.is_near());
        m.account(Payer::Node(2), 0, 601);
        assert!(m.is_near() && !m.is_short());
        assert_eq!(m.largest(), HashSet::from([Payer::Node(2)]));
        m.account(Payer::Node(2), 601, 0);
        assert!(!m.is_near());
    }

    #[test]
    fn each_node_is_held_to_its_own_limit_and_pays_for_what_it_is_in_alone() {
        let mut m = Memory::default();
        m.set_limit(MemoryLimit::OfEachNode(800));
        let comm = CommId::unowned(7);
        let (a, b) = (m.payer(comm, None, "a"), m.payer(comm, None, "b"));
        assert_eq!((m.payer(comm, Some(a), "a"), m.payer(comm, Some(a), "b")), (a, Payer::Nobody));
        assert_eq!(m.payer(comm, Some(Payer::Nobody), "a"), Payer::Nobody);
        m.account(a, 0, 900);
        m.account(b, 0, 700);
        m.account(Payer::Nobody, 0, usize::MAX);
        assert!(m.is_short() && !m.may_grow(a) && m.may_grow(b) && m.may_grow(Payer::Nobody));
        m.account(a, 900, 800);
        assert!(!m.is_short());
    }

    #[test]
    fn without_a_limit_nothing_is_accounted() {
        let mut m = Memory::default();
        m.account(of(1), 0, usize::MAX);
        assert!(m.may_grow(of(1)) && !m.is_short());
    }
}
