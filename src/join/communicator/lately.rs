//! Late arrivals of about the last minute, by seconds: one rank beside the others.

use super::super::member::RECENT_PARTS;
use super::Communicator;
use crate::model::Rank;
use std::collections::BTreeMap;

/// The cost of the late arrivals of one second, in ns.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LateSecond {
    /// The cost of this rank.
    pub own_ns: u64,
    /// The cost of the rank that cost most.
    pub worst_ns: u64,
    /// The median of the other ranks' costs.
    pub others_ns: u64,
}

impl LateSecond {
    /// True where this rank cost at least half of what the worst one did.
    pub fn is_bad(&self) -> bool {
        self.own_ns >= self.worst_ns / 2
    }
}

/// One rank's late arrivals of about the last minute beside those of the others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lately {
    /// The seconds in which a late arrival of any rank cost something, the newest one first.
    pub seconds: Vec<LateSecond>,
    /// The cost of this rank's late arrivals, in ns.
    pub cost_ns: u64,
    /// The median of the other ranks' costs, in ns.
    pub cost_of_others_ns: u64,
    /// True where no other rank's late arrivals cost anything.
    pub alone: bool,
}

/// The costs of ranks by seconds, in ns. Ranks without any may be left out.
type Costs = BTreeMap<Rank, BTreeMap<u64, u64>>;

/// The costs of late arrivals of about the last minute, by rank and second.
#[derive(Debug, Clone, Default)]
pub struct LateCosts {
    by_rank: Costs,
    /// The ranks, with those that cost nothing.
    ranks: usize,
}

impl LateCosts {
    /// From the costs of so many ranks by seconds, in ns.
    pub fn new(by_rank: BTreeMap<Rank, BTreeMap<u64, u64>>, ranks: usize) -> Self {
        LateCosts { by_rank, ranks }
    }

    /// Sets a rank beside the others.
    pub fn of(&self, rank: Rank) -> Lately {
        compare(&self.by_rank, rank, self.ranks.saturating_sub(1))
    }

    /// The costs of groups of ranks, each as those of one rank: the first group is rank 0.
    pub fn of_groups<'a>(&self, groups: impl IntoIterator<Item = &'a [Rank]>) -> LateCosts {
        let mut sums = LateCosts::default();
        for group in groups {
            let at = Rank(u32::try_from(sums.ranks).unwrap_or(u32::MAX));
            sums.ranks += 1;
            for (second, ns) in group.iter().filter_map(|r| self.by_rank.get(r)).flatten() {
                let sum = sums.by_rank.entry(at).or_default().entry(*second).or_default();
                *sum = sum.saturating_add(*ns);
            }
        }
        sums
    }
}

impl Communicator {
    /// The costs of its late arrivals of about the last minute.
    pub fn late_costs(&self) -> LateCosts {
        let late = self.members.iter().map(|(r, m)| (*r, m.late_lately().collect::<BTreeMap<u64, u64>>()));
        let by_rank = late.filter(|(_, costs)| !costs.is_empty()).collect();
        LateCosts::new(by_rank, self.members.len())
    }
}

/// Compares a rank with so many others.
fn compare(costs: &Costs, rank: Rank, others: usize) -> Lately {
    // The costs of the other ranks, and of this one.
    let mut seconds: BTreeMap<u64, (Vec<u64>, u64)> = BTreeMap::new();
    for (other, by_second) in costs {
        for (second, ns) in by_second {
            let (of_others, own_ns) = seconds.entry(*second).or_default();
            if *other == rank {
                *own_ns = *ns;
            } else {
                of_others.push(*ns);
            }
        }
    }
    let newest = seconds.last_key_value().map_or(0, |(second, _)| *second);
    let is_recent = |second: u64| second.saturating_add(RECENT_PARTS) > newest;
    let recent = seconds.into_iter().rev().take_while(|(second, _)| is_recent(*second));
    let seconds: Vec<LateSecond> = recent
        .map(|(_, (mut of_others, own_ns))| LateSecond {
            own_ns,
            worst_ns: of_others.iter().copied().fold(own_ns, u64::max),
            others_ns: lower_median(&mut of_others, others),
        })
        .collect();
    let sum = |by_second: &BTreeMap<u64, u64>| {
        let recent = by_second.iter().filter(|(second, _)| is_recent(**second));
        recent.fold(0u64, |sum, (_, ns)| sum.saturating_add(*ns))
    };
    let mut of_others: Vec<u64> = costs.iter().filter(|(r, _)| **r != rank).map(|(_, c)| sum(c)).collect();
    Lately {
        seconds,
        cost_ns: costs.get(&rank).map_or(0, sum),
        alone: of_others.iter().all(|ns| *ns == 0),
        cost_of_others_ns: lower_median(&mut of_others, others),
    }
}

/// The lower median of so many costs, of which those that are not given are 0.
fn lower_median(given: &mut [u64], many: usize) -> u64 {
    let absent = many.saturating_sub(given.len());
    let Some(at) = (many.saturating_sub(1) / 2).checked_sub(absent) else { return 0 };
    if at >= given.len() {
        return 0;
    }
    *given.select_nth_unstable(at).1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_compared_second_by_second() {
        let of = |costs: &[(u64, u64)]| costs.iter().copied().collect::<BTreeMap<u64, u64>>();
        // Second 5 is more than a minute before the newest one.
        let [a, b, c] = [0, 1, 2].map(Rank);
        let costs: Costs =
            [(a, of(&[(5, 900), (70, 10), (71, 40)])), (b, of(&[(71, 30)])), (c, of(&[(70, 50)]))].into();
        let second = |own_ns, worst_ns, others_ns| LateSecond { own_ns, worst_ns, others_ns };
        assert_eq!(
            compare(&costs, a, 2),
            Lately {
                seconds: vec![second(40, 40, 0), second(10, 50, 0)],
                cost_ns: 50,
                cost_of_others_ns: 30,
                alone: false,
            }
        );
        let b = compare(&costs, b, 2);
        assert_eq!(b.seconds, [second(30, 40, 0), second(0, 50, 10)]);
        assert_eq!((b.seconds[0].is_bad(), b.seconds[1].is_bad()), (true, false));
        assert_eq!((b.cost_ns, b.cost_of_others_ns), (30, 50));
    }

    #[test]
    fn groups_are_compared_by_the_sums_of_their_ranks() {
        let of = |costs: &[(u64, u64)]| costs.iter().copied().collect::<BTreeMap<u64, u64>>();
        let [a, b, c, d] = [0, 1, 2, 3].map(Rank);
        let by_rank: Costs =
            [(a, of(&[(70, 10), (71, 40)])), (b, of(&[(70, 30)])), (c, of(&[(71, 50)]))].into();
        let costs = LateCosts { by_rank, ranks: 4 };
        let groups = costs.of_groups([[a, b].as_slice(), &[c, d]]);
        let second = |own_ns, worst_ns, others_ns| LateSecond { own_ns, worst_ns, others_ns };
        assert_eq!(groups.of(Rank(0)).seconds, [second(40, 50, 50), second(40, 40, 0)]);
        assert_eq!(groups.of(Rank(1)).seconds, [second(50, 50, 40), second(0, 40, 40)]);
    }

    #[test]
    fn a_median_counts_the_ranks_that_cost_nothing() {
        assert_eq!(lower_median(&mut [9, 7, 8], 3), 8);
        assert_eq!(lower_median(&mut [9, 7, 8], 4), 7);
        assert_eq!(lower_median(&mut [9, 7, 8], 5), 7);
        assert_eq!(lower_median(&mut [9, 7, 8], 7), 0);
        assert_eq!(lower_median(&mut [], 0), 0);
    }
}
