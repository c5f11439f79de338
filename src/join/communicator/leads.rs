//! Finds out whether ranks stay the last ones from operation to operation, as they do where operations run beside computing.
//!
//! There a rank that waits in an operation goes on meanwhile, and comes to the next one as early as before: both show the same
//! lateness, and the job lost it once at most. Where a rank goes on only after each operation, every lateness is new.

use super::super::instance::Late;
use super::Key;
use super::late::VERY_LATE_NS;
use crate::model::Rank;
use std::collections::BTreeMap;

/// Pairs of consecutive operations that are judged together.
const PAIRS: u32 = 128;
/// The least share of pairs in which ranks that are last by chance would take turns. Where one of them is nearly always last, its
/// staying so says nothing.
const TURNS: f64 = 0.2;
/// They stay the last ones where they take turns in less than this share of that.
const STAY: f64 = 0.5;

/// The ranks that came last to the latest operations, and how often they took turns.
#[derive(Debug, Clone, Default)]
pub(super) struct Leads {
    last: Option<(Key, Late)>,
    /// How often each rank was last, and how often another one than before, among the pairs counted.
    times: BTreeMap<Rank, u32>,
    turns: u32,
    pairs: u32,
    /// True where the pairs before these said that ranks stay the last ones.
    persist: bool,
    /// The lateness that was carried over in the pairs lately, and all lateness in them, in ns.
    carried: f64,
    lateness: f64,
}

impl Leads {
    /// Takes the last rank of an operation; returns how much of its lateness it had in the operation before already, in ns.
    pub(super) fn carried_ns(&mut self, key: Key, late: Late) -> u64 {
        let before = self.last.replace((key, late));
        let is_next = |(k, _): &(Key, Late)| k.0 == key.0 && k.1.checked_add(1) == Some(key.1);
        let Some((_, before)) = before.filter(is_next) else {
            // The operation before it is not timed: it is like the others, which carry over a little each.
            let is_usual = self.persist && late.by_ns < VERY_LATE_NS;
            let share = if is_usual { self.carried / self.lateness.max(1.0) } else { 0.0 };
            return (late.by_ns as f64 * share) as u64;
        };
        let stays = before.rank == late.rank;
        let carried_ns = if stays { before.by_ns.min(late.by_ns) } else { 0 };
        self.carried += carried_ns as f64;
        self.lateness += late.by_ns as f64;
        *self.times.entry(late.rank).or_default() += 1;
        self.turns += u32::from(!stays);
        self.pairs += 1;
        if self.pairs == PAIRS {
            self.settle();
        }
        if self.persist { carried_ns } else { 0 }
    }

    /// Concludes from the pairs counted, and begins anew.
    fn settle(&mut self) {
        let share = |times: u32| f64::from(times) / f64::from(PAIRS);
        let by_chance = 1.0 - self.times.values().map(|n| share(*n).powi(2)).sum::<f64>();
        self.persist = by_chance >= TURNS && share(self.turns) < STAY * by_chance;
        self.times.clear();
        (self.turns, self.pairs) = (0, 0);
        (self.carried, self.lateness) = (self.carried / 2.0, self.lateness / 2.0);
    }
}

#[cfg(test)]
mod tests {
    use super::{Leads, PAIRS};
    use crate::join::{Late, Measure};
    use crate::model::{Rank, Track};

    /// Sums up what is carried over in as many operations as two rounds need, with these ranks last by 5 us.
    fn carried(last: impl Fn(u64) -> u32) -> u64 {
        let mut leads = Leads::default();
        let of = |order| {
            let late = Late { rank: Rank(last(order)), by_ns: 5_000, measure: Measure::Gpu };
            leads.carried_ns((Track::Collective, order), late)
        };
        (0..=2 * u64::from(PAIRS)).map(of).sum()
    }

    #[test]
    fn ranks_that_are_last_for_some_operations_each_carry_it_over() {
        let per_turn = |n: u64| carried(move |order| (order / n % 2) as u32);
        assert_eq!(per_turn(1), 0);
        assert_eq!(per_turn(2), 0);
        assert!(per_turn(16) > 100 * 5_000, "{}", per_turn(16));
    }

    #[test]
    fn the_only_late_rank_is_late_anew() {
        assert_eq!(carried(|_| 1), 0);
        assert_eq!(carried(|order| u32::from(order % 16 > 0)), 0);
    }

    #[test]
    fn what_follows_one_that_is_not_timed_is_like_the_others() {
        let mut leads = Leads { persist: true, ..Leads::default() };
        let late = |by_ns| Late { rank: Rank(1), by_ns, measure: Measure::Gpu };
        assert_eq!(leads.carried_ns((Track::Collective, 7), late(9_000)), 0);
        assert_eq!(leads.carried_ns((Track::Collective, 8), late(8_000)), 8_000);
        assert_eq!(leads.carried_ns((Track::Collective, 9), late(9_000)), 8_000);
        assert_eq!(leads.carried_ns((Track::Collective, 11), late(17_000)), 16_000);
        assert_eq!(leads.carried_ns((Track::Collective, 13), late(200_000_000)), 0, "a stall is new");
    }
}
