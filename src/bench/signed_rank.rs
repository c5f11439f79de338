//! Wilcoxon's signed-rank test, exact, as bounds of the ratio of two times that were measured in the same rounds, or of
//! their difference.
//!
//! It assumes that rounds are independent, and that a round's difference is as likely to be above the true one by some
//! amount as below. For ratios that is said of their logarithms. Both times have the same distribution but for their scale
//! or their place, so this holds.

use serde::{Deserialize, Serialize};

/// More rounds than this are not used.
pub const ROUNDS_MAX: usize = 400;

/// Bounds of a ratio.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RatioBounds {
    /// The ratio is above this, with the confidence asked for; absent where there are too few rounds.
    pub lower: Option<f64>,
    /// The ratio is below this, with the confidence asked for.
    pub upper: Option<f64>,
}

/// Returns bounds of the ratio, each of which is wrong with a probability of at most `alpha`.
#[must_use]
pub fn bounds(ratios: &[f64], alpha: f64) -> RatioBounds {
    let interval = ratio(ratios, alpha);
    RatioBounds { lower: interval.and_then(|i| i.lower), upper: interval.and_then(|i| i.upper) }
}

/// An estimate and its bounds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// The estimate of Hodges and Lehmann: the median of the means of all pairs of rounds.
    pub value: f64,
    /// The true value is above this, with the confidence asked for; absent where there are too few rounds.
    pub lower: Option<f64>,
    /// The true value is below this, with the confidence asked for.
    pub upper: Option<f64>,
}

/// Returns the estimate of a ratio. Each bound is wrong with a probability of at most `alpha`.
pub(super) fn ratio(ratios: &[f64], alpha: f64) -> Option<Interval> {
    let logs: Vec<f64> = ratios.iter().map(|r| r.ln()).collect();
    let of_logs = difference(&logs, alpha)?;
    Some(Interval {
        value: of_logs.value.exp(),
        lower: of_logs.lower.map(f64::exp),
        upper: of_logs.upper.map(f64::exp),
    })
}

/// Returns the estimate of a difference; absent of no rounds. Each bound is wrong with a probability of at most `alpha`.
pub(super) fn difference(differences: &[f64], alpha: f64) -> Option<Interval> {
    let values = differences.get(..ROUNDS_MAX).unwrap_or(differences);
    // The statistic of a difference is the number of these means above it (Tukey).
    let mut means: Vec<f64> = values
        .iter()
        .enumerate()
        .flat_map(|(i, a)| values.iter().skip(i).map(move |b| f64::midpoint(*a, *b)))
        .collect();
    means.sort_by(f64::total_cmp);
    let critical = critical(values.len(), alpha);
    let upper = critical.and_then(|c| means.len().checked_sub(c + 1));
    Some(Interval {
        value: f64::midpoint(*means.get(means.len().checked_sub(1)? / 2)?, *means.get(means.len() / 2)?),
        lower: critical.and_then(|c| means.get(c)).copied(),
        upper: upper.and_then(|i| means.get(i)).copied(),
    })
}

/// The fewest rounds that can give bounds.
#[must_use]
pub fn rounds_min(alpha: f64) -> usize {
    (1..=ROUNDS_MAX).find(|n| critical(*n, alpha).is_some()).unwrap_or(ROUNDS_MAX)
}

/// The largest value of the statistic whose probability, and that of all smaller ones, is at most `alpha`.
fn critical(n: usize, alpha: f64) -> Option<usize> {
    // counts[s]: sets of ranks from 1 to n whose sum is s.
    let mut counts = vec![0.0; n * (n + 1) / 2 + 1];
    counts[0] = 1.0;
    for rank in 1..=n {
        for sum in (rank..counts.len()).rev() {
            counts[sum] += counts[sum - rank];
        }
    }
    let all = 2f64.powi(i32::try_from(n).unwrap_or(i32::MAX));
    let mut below = 0.0;
    counts.iter().take_while(|c| (below += **c, below / all <= alpha).1).count().checked_sub(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn critical_values_are_those_of_the_tables() {
        // Wilcoxon's one-sided values for 5 %, 2.5 % and 0.5 %.
        for (n, alpha, wanted) in [
            (5, 0.05, Some(0)),
            (4, 0.05, None),
            (10, 0.05, Some(10)),
            (10, 0.025, Some(8)),
            (10, 0.005, Some(3)),
            (20, 0.025, Some(52)),
            (20, 0.005, Some(37)),
        ] {
            assert_eq!(critical(n, alpha), wanted, "{n} {alpha}");
        }
        assert_eq!((rounds_min(0.01), rounds_min(0.001)), (7, 10));
    }

    #[test]
    fn bounds_hold_the_ratio_and_get_closer() {
        let ratios = |n: usize| (0..n).map(|i| 0.9 + 0.01 * (i % 5) as f64).collect::<Vec<f64>>();
        let few = bounds(&ratios(10), 0.01);
        let many = bounds(&ratios(50), 0.01);
        let width = |b: RatioBounds| b.upper.unwrap() - b.lower.unwrap();
        assert!(few.lower.unwrap() < 0.92 && 0.92 < few.upper.unwrap(), "{few:?}");
        assert!(width(many) < width(few), "{few:?} {many:?}");
        assert_eq!(bounds(&ratios(3), 0.01), RatioBounds { lower: None, upper: None });
        assert_eq!(bounds(&[], 0.01), RatioBounds { lower: None, upper: None });
    }

    #[test]
    fn estimates_are_those_of_a_known_sample() {
        let sample = [8.0, 12.0, 9.0, 15.0, 11.0, 10.0, 14.0, 13.0, 7.0, 30.0];
        let found = difference(&sample, 0.025).unwrap();
        // Of the 55 means of pairs the 28th, the 9th and the 47th: the tables' critical value is 8.
        assert_eq!((found.value, found.lower, found.upper), (11.5, Some(9.0), Some(19.0)));
        let ratios = sample.map(f64::exp);
        let of_ratios = ratio(&ratios, 0.025).unwrap();
        assert!((of_ratios.value.ln() - 11.5).abs() < 1e-9, "{of_ratios:?}");
        assert_eq!(difference(&[2.0, 4.0], 0.025), Some(Interval { value: 3.0, lower: None, upper: None }));
        assert_eq!(difference(&[], 0.025), None);
        // The most rounds that are used are not too many for the arithmetic.
        let many: Vec<f64> = (0..ROUNDS_MAX).map(|i| i as f64).collect();
        let found = difference(&many, 0.025).unwrap();
        assert!((found.value - 199.5).abs() < 1e-9 && found.lower.unwrap() > 180.0, "{found:?}");
    }

    #[test]
    fn without_a_difference_bounds_are_wrong_as_seldom_as_promised() {
        let mut random = crate::tune::search::simulated::Random::new(3);
        let wrong = (0..4000).filter(|_| {
            let ratios: Vec<f64> = (0..12).map(|_| (0.05 * random.normal()).exp()).collect();
            bounds(&ratios, 0.05).upper.is_some_and(|u| u < 1.0)
        });
        let wrong = wrong.count();
        assert!((100..=220).contains(&wrong), "{wrong} of 4000, of which 200 are promised");
    }
}
