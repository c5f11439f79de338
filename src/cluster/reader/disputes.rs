//! Ranks that processes of two nodes claim at the same time.
//!
//! Which of them is right nobody here can know, and the first one need not be. So neither is believed: the rank leaves the
//! join until all but one have given it up or have ended.

use crate::model::{CommId, Rank, SegmentId, Update};
use std::collections::BTreeMap;

/// Claims on one rank that are kept.
const CLAIMS_MAX: usize = 8;

/// A process that claims a rank, and its node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Claim {
    pub(super) segment: SegmentId,
    pub(super) node: String,
}

/// All ranks in dispute. Each of them was some node's before, and nodes have so many ranks at most.
#[derive(Debug, Default)]
pub(super) struct Disputes {
    by_rank: BTreeMap<(CommId, Rank), Vec<Claim>>,
}

impl Disputes {
    /// True where a rank is in dispute.
    pub(super) fn contains(&self, key: &(CommId, Rank)) -> bool {
        self.by_rank.contains_key(key)
    }

    /// True where no rank is in dispute.
    pub(super) fn is_empty(&self) -> bool {
        self.by_rank.is_empty()
    }

    /// Takes claims on one rank.
    pub(super) fn claim(
        &mut self,
        key: (CommId, Rank),
        claims: impl IntoIterator<Item = Claim>,
        out: &mut Vec<Update>,
    ) {
        let all = self.by_rank.entry(key).or_default();
        let before = all.len();
        for claim in claims {
            if all.len() < CLAIMS_MAX && !all.contains(&claim) {
                all.push(claim);
            }
        }
        if all.len() > before {
            let nodes = all.iter().map(|c| c.node.clone()).collect();
            out.push(Update::Disputed { comm: key.0, rank: key.1, nodes });
        }
    }

    /// Takes claims back. Returns the ranks that are not in dispute any more, and who claims them alone.
    pub(super) fn withdraw(
        &mut self,
        gone: impl Fn(&(CommId, Rank), &Claim) -> bool,
        out: &mut Vec<Update>,
    ) -> Vec<((CommId, Rank), Option<Claim>)> {
        let mut settled = Vec::new();
        self.by_rank.retain(|key, claims| {
            claims.retain(|c| !gone(key, c));
            if claims.len() > 1 {
                return true;
            }
            out.push(Update::Disputed { comm: key.0, rank: key.1, nodes: Vec::new() });
            settled.push((*key, claims.pop()));
            false
        });
        settled
    }
}
