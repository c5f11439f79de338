//! Wilcoxon's signed-rank test, exact, as bounds of the ratio of two times that were measured in the same rounds.
//!
//! It assumes that rounds are independent, and that the logarithm of a round's ratio is as likely to be above the true one
//! by some amount as below. Both times have the same distribution but for their scale, so this holds.

/// More rounds than this are not used.
pub(super) const ROUNDS_MAX: usize = 60;

/// Bounds of a ratio.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct RatioBounds {
    /// The ratio is above this, with the confidence asked for; absent where there are too few rounds.
    pub(super) lower: Option<f64>,
    /// The ratio is below this, with the confidence asked for.
    pub(super) upper: Option<f64>,
}

/// Returns bounds of the ratio, each of which is wrong with a probability of at most `alpha`.
pub(super) fn bounds(ratios: &[f64], alpha: f64) -> RatioBounds {
    let ratios = ratios.get(..ROUNDS_MAX).unwrap_or(ratios);
    let logs: Vec<f64> = ratios.iter().map(|r| r.ln()).collect();
    let Some(critical) = critical(logs.len(), alpha) else { return RatioBounds { lower: None, upper: None } };
    // The statistic of a ratio is the number of these means above its logarithm (Tukey).
    let mut means: Vec<f64> =
        logs.iter().enumerate().flat_map(|(i, a)| logs.iter().skip(i).map(move |b| (a + b) / 2.0)).collect();
    means.sort_by(f64::total_cmp);
    let upper = means.len().checked_sub(critical + 1).and_then(|i| means.get(i));
    RatioBounds { lower: means.get(critical).map(|m| m.exp()), upper: upper.map(|m| m.exp()) }
}

/// The fewest rounds that can give bounds.
pub(super) fn rounds_min(alpha: f64) -> usize {
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
