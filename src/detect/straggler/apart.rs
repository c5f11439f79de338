//! Decides whether the lateness of a rank sets it apart from the others.
//!
//! A rank that is behind stays so for a while: others disturb its host, or it collects garbage. The operations of one second
//! say little more than one of them, so that seconds are compared, weighed by their cost.

use crate::join::{LateSecond, Lately};

/// How likely it may be at most that some rank of equal ones is late so often.
pub(super) const CHANCE: f64 = 0.01;
/// A rank that is a little late and often has to cost so many times as much as the median of the others. In a healthy loop
/// of two ranks whose hosts can barely keep up, one cost 1.8 times as much as the other.
const STANDS_OUT: f64 = 3.0;
/// A rank that costs so many times as much as the median of the others is late, whatever chance makes of two ranks in a few
/// seconds.
const FAR_OUT: f64 = 6.0;
/// The seconds of equal cost that such a rank needs: with fewer, its host may be behind for some seconds.
const EQUAL_SECONDS: f64 = 6.0;
/// The same for a rank that is reported as an info.
const EQUAL_SECONDS_POSSIBLY: f64 = 2.0;
/// The share of the cost that lies in the seconds in which the rank is among the worst.
const BAD_SHARE: f64 = 0.9;

/// How far late arrivals set a rank apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Apart {
    /// Others are late as well.
    No,
    /// It alone was late since some moment, though possibly by chance.
    Possibly,
    /// It is late more often than chance makes one of equal ranks, or costs many times as much.
    Surely,
}

/// How likely it is that one of `of` equal candidates, each of which is the late one with the chance `one`, is so in at
/// least `times` of `all` operations.
pub(super) fn by_chance(times: usize, all: usize, one: f64, of: usize) -> f64 {
    let odds = one / (1.0 - one);
    // The logarithms of the terms of the binomial distribution, from none upwards: of many operations the first terms are too small
    // for a number.
    let mut term = (1.0 - one).ln() * all as f64;
    let mut tail = 0.0;
    for k in 0..=all {
        if k >= times {
            tail += term.exp();
        }
        term += ((all - k) as f64 / (k + 1) as f64 * odds).ln();
    }
    (tail * of as f64).min(1.0)
}

/// Judges how far one of so many ranks is apart from the others. `is_often` says that it is late in more operations than
/// chance explains: where nobody else was late, that is enough.
pub(super) fn judge(lately: &Lately, ranks: usize, is_often: bool) -> Apart {
    if lately.alone && is_often || stands_out(lately, ranks) {
        return Apart::Surely;
    }
    let mut since = Sum::default();
    let mut before = BeforeIt::of(&lately.seconds);
    let chance = CHANCE / 2.0 / lately.seconds.len().max(1) as f64;
    let judged = lately.seconds.iter().map(|second| {
        since.add(second);
        before.remove(second);
        // Where ranks are behind in turn, each of them is alone for a while.
        let is_new = since.own >= STANDS_OUT * before.cost();
        if is_new { since.judge(ranks, chance) } else { Apart::No }
    });
    judged.max().unwrap_or(Apart::No)
}

/// True where a rank is among the worst in more of the last minute's seconds than chance makes one of equal ones, or in
/// more of those that cost most, and costs much more than the others. Where all are late alike, some cost more than others.
fn stands_out(lately: &Lately, ranks: usize) -> bool {
    let mut costs: Vec<u64> = lately.seconds.iter().map(|s| s.worst_ns).collect();
    costs.sort_unstable();
    let dear_ns = costs.get(costs.len() / 2).copied().unwrap_or(0);
    let chance_of = |least_ns: u64| {
        let seconds = || lately.seconds.iter().filter(|s| s.worst_ns >= least_ns);
        let bad = seconds().filter(|s| s.is_bad()).count();
        by_chance(bad, seconds().count(), 1.0 / ranks as f64, ranks)
    };
    // Each of two tests may find half as much by chance.
    let is_often = chance_of(0).min(chance_of(dear_ns)) < CHANCE / 2.0;
    is_often && lately.cost_ns as f64 >= STANDS_OUT * lately.cost_of_others_ns as f64
}

/// The cost of the seconds before some second in which the rank was not among the worst, in ns, without the dearest of them:
/// that may be one event.
struct BeforeIt {
    sum: f64,
    /// The costs of the seconds that are left, the oldest one first, each the greatest up to it.
    dearest: Vec<f64>,
}

impl BeforeIt {
    /// From seconds, the newest one first.
    fn of(seconds: &[LateSecond]) -> Self {
        let mut all = BeforeIt { sum: 0.0, dearest: Vec::with_capacity(seconds.len()) };
        for cost in seconds.iter().rev().map(Self::cost_of) {
            all.sum += cost;
            let dearest = all.dearest.last().copied().unwrap_or(0.0);
            all.dearest.push(cost.max(dearest));
        }
        all
    }

    fn cost_of(second: &LateSecond) -> f64 {
        if second.is_bad() { 0.0 } else { second.worst_ns as f64 }
    }

    /// Takes out the newest second that is left.
    fn remove(&mut self, newest: &LateSecond) {
        self.sum -= Self::cost_of(newest);
        self.dearest.pop();
    }

    fn cost(&self) -> f64 {
        self.sum - self.dearest.last().copied().unwrap_or(0.0)
    }
}

/// The costs since some second, in ns.
#[derive(Debug, Clone, Copy, Default)]
struct Sum {
    own: f64,
    others: f64,
    worst: f64,
    /// The part of `worst` in the rank's bad seconds, and the sum of its squares.
    bad: f64,
    bad_squares: f64,
}

impl Sum {
    fn add(&mut self, second: &LateSecond) {
        let worst = second.worst_ns as f64;
        self.own += second.own_ns as f64;
        self.others += second.others_ns as f64;
        self.worst += worst;
        if second.is_bad() {
            self.bad += worst;
            self.bad_squares += worst * worst;
        }
    }

    fn judge(&self, ranks: usize, least_chance: f64) -> Apart {
        if self.bad < BAD_SHARE * self.worst || self.own < STANDS_OUT * self.others {
            return Apart::No;
        }
        // Seconds of equal cost that say as much as the bad ones do. The first one may be anybody's.
        let equal_seconds = self.bad * self.bad / self.bad_squares.max(1.0);
        let chance = (ranks as f64).powf(1.0 - equal_seconds);
        let is_far = self.own >= FAR_OUT * self.others;
        if is_far && equal_seconds >= EQUAL_SECONDS || chance < least_chance {
            Apart::Surely
        } else if is_far && equal_seconds >= EQUAL_SECONDS_POSSIBLY {
            Apart::Possibly
        } else {
            Apart::No
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// Of seconds, the oldest one first, each with the cost of a rank and of each other one, in ms.
    fn lately(costs: &[(u64, u64)]) -> Lately {
        let second = |(own, other): &(u64, u64)| LateSecond {
            own_ns: own * MS,
            worst_ns: own.max(other) * MS,
            others_ns: other * MS,
        };
        let sum = |of: fn(&(u64, u64)) -> u64| costs.iter().map(of).sum::<u64>() * MS;
        let (cost_ns, cost_of_others_ns) = (sum(|c| c.0), sum(|c| c.1));
        Lately {
            seconds: costs.iter().rev().map(second).collect(),
            cost_ns,
            cost_of_others_ns,
            alone: cost_of_others_ns == 0,
        }
    }

    fn of_two(costs: &[(u64, u64)]) -> Apart {
        judge(&lately(costs), 2, false)
    }

    #[test]
    fn one_of_two_ranks_is_apart_if_it_costs_many_times_as_much_for_some_seconds() {
        assert_eq!(of_two(&[(70, 10); 6]), Apart::Surely);
        assert_eq!(of_two(&[(70, 10); 5]), Apart::Possibly);
        assert_eq!(of_two(&[(40, 10); 6]), Apart::No, "four times as much");
        assert_eq!(
            of_two(&[(40, 10); 14]),
            Apart::Surely,
            "for longer than chance makes one of two the worse one"
        );
    }

    #[test]
    fn a_dear_second_counts_for_one() {
        assert_eq!(of_two(&[(9, 1), (9, 1), (9, 1), (900, 1)]), Apart::No);
        assert_eq!(of_two(&[(9, 1), (9, 1), (500, 1), (900, 1)]), Apart::No, "nearly two");
        assert_eq!(of_two(&[(9, 1), (900, 1), (900, 1), (900, 1)]), Apart::Possibly);
    }

    #[test]
    fn cheap_seconds_before_a_rank_became_slow_do_not_hide_it() {
        let before = [(1, 3), (3, 1), (0, 400), (2, 3)];
        assert_eq!(of_two(&[&before[..], &[(70, 10); 6]].concat()), Apart::Surely);
        assert_eq!(of_two(&[&[(70, 10); 6][..], &before].concat()), Apart::No, "it is over");
    }

    #[test]
    fn a_rank_that_is_late_as_others_were_before_is_not_apart() {
        assert_eq!(of_two(&[[(0, 70); 6], [(70, 0); 6]].concat()), Apart::No);
        assert_eq!(of_two(&[[(0, 20); 6], [(70, 0); 6]].concat()), Apart::Surely, "by much less");
    }

    #[test]
    fn one_of_many_ranks_is_apart_if_it_is_the_worst_again_and_again() {
        assert_eq!(judge(&lately(&[(40, 10); 5]), 8, false), Apart::Surely);
        assert_eq!(judge(&lately(&[(40, 10), (10, 40), (40, 10), (10, 40)]), 8, false), Apart::No);
    }

    #[test]
    fn a_rank_that_alone_is_late_and_often_is_apart() {
        assert_eq!(judge(&lately(&[(1, 0)]), 2, true), Apart::Surely);
        assert_eq!(judge(&lately(&[(1, 0)]), 2, false), Apart::No, "it may be one event");
    }

    #[test]
    fn chance_is_that_of_the_binomial_distribution() {
        assert!((by_chance(2, 2, 0.5, 1) - 0.25).abs() < 1e-12);
        assert!((by_chance(1, 3, 0.5, 1) - 0.875).abs() < 1e-12);
        assert!((by_chance(0, 3, 0.5, 8) - 1.0).abs() < 1e-12);
        assert_eq!(by_chance(448, 512, 0.875, 8), 1.0, "as expected, though its first terms are too small");
        assert!(by_chance(512, 512, 0.875, 8) > 0.0);
    }
}
