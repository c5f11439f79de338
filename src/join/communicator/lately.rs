//! Late arrivals of about the last minute, by seconds: one rank beside the others.

use super::super::member::{Member, RECENT_PARTS};
use super::Communicator;
use crate::model::Rank;
use std::collections::BTreeMap;

/// One rank's late arrivals of about the last minute beside those of the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lately {
    /// The number of seconds in which a late arrival of any rank cost something.
    pub seconds: usize,
    /// The number of these seconds in which this rank cost at least half of what the worst rank did.
    pub bad_seconds: usize,
    /// The number of seconds whose worst rank cost at least as much as the median of these worst ranks.
    pub dear_seconds: usize,
    /// The number of `bad_seconds` among these.
    pub bad_dear_seconds: usize,
    /// The cost of this rank's late arrivals, in ns.
    pub cost_ns: u64,
    /// The median of the other ranks' costs, in ns.
    pub cost_of_others_ns: u64,
    /// True where no other rank's late arrivals cost anything.
    pub alone: bool,
}

impl Communicator {
    /// Sets a rank's late arrivals of about the last minute beside those of the others.
    pub fn lately(&self, rank: Rank) -> Lately {
        let mut worst: BTreeMap<u64, u64> = BTreeMap::new();
        for (second, cost_ns) in self.members.values().flat_map(|m| m.late_lately()) {
            let most = worst.entry(second).or_default();
            *most = cost_ns.max(*most);
        }
        let newest = worst.last_key_value().map_or(0, |(second, _)| *second);
        worst.retain(|second, _| second.saturating_add(RECENT_PARTS) > newest);
        let mut costs: Vec<u64> = worst.values().copied().collect();
        costs.sort_unstable();
        let dear_ns = costs.get(costs.len() / 2).copied().unwrap_or(0);
        let sum = |m: &Member| {
            let recent = m.late_lately().filter_map(|(second, ns)| Some((ns, *worst.get(&second)?)));
            recent.fold((0u64, 0, 0), |(sum, bad, bad_dear), (ns, worst)| {
                let is_bad = ns >= worst / 2;
                let is_dear = worst >= dear_ns;
                (sum.saturating_add(ns), bad + usize::from(is_bad), bad_dear + usize::from(is_bad && is_dear))
            })
        };
        let (cost_ns, bad_seconds, bad_dear_seconds) = self.members.get(&rank).map_or((0, 0, 0), |m| sum(m));
        let others = self.members.iter().filter(|(r, _)| **r != rank);
        let mut others: Vec<u64> = others.map(|(_, m)| sum(m).0).collect();
        others.sort_unstable();
        let cost_of_others_ns = others.get(others.len().saturating_sub(1) / 2).copied().unwrap_or(0);
        let alone = others.last().is_none_or(|most| *most == 0);
        Lately {
            seconds: worst.len(),
            bad_seconds,
            dear_seconds: costs.iter().filter(|ns| **ns >= dear_ns).count(),
            bad_dear_seconds,
            cost_ns,
            cost_of_others_ns,
            alone,
        }
    }
}
