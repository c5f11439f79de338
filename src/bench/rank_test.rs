//! The Mann-Whitney U test of two samples: exact where both are small, by the normal distribution otherwise.
//!
//! It assumes nothing about the shape of the distributions, which for times have a long tail.

/// Up to so many values in both samples the distribution of U is counted out.
const EXACT_MAX: usize = 20;
/// Of more pairs than this no interval is made.
const PAIRS_MAX: usize = 1_000_000;
/// The confidence of the interval.
const INTERVAL_CONFIDENCE: f64 = 0.95;

/// A comparison says how much two samples differ, and how sure it is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Comparison {
    /// One less the two-sided p-value, 0 to 1.
    pub(crate) confidence: f64,
    /// The highest confidence that samples of these sizes can give.
    pub(crate) confidence_max: f64,
    /// Bounds of the ratio of `new` to `old` with a confidence of 95 %; `None` where the samples are too small.
    pub(crate) interval: Option<(f64, f64)>,
}

/// Compares two samples of positive numbers; `None` where one of them has fewer than two.
pub(crate) fn compare(old: &[f64], new: &[f64]) -> Option<Comparison> {
    let (n, m) = (new.len(), old.len());
    if n < 2 || m < 2 {
        return None;
    }
    let null = Null::of(n, m, ties(old, new));
    // Ties count half to each side; the half that is left over speaks against a difference.
    let u = u_of(old, new);
    let nearer_end = u.min((n * m) as f64 - u).ceil();
    let p = |at: f64| (2.0 * null.at_most(at)).min(1.0);
    let interval = (n * m <= PAIRS_MAX).then(|| interval(old, new)).flatten();
    Some(Comparison { confidence: 1.0 - p(nearer_end), confidence_max: 1.0 - p(0.0), interval })
}

/// Pairs in which the new value is larger; equal ones count half.
fn u_of(old: &[f64], new: &[f64]) -> f64 {
    let mut sorted = old.to_vec();
    sorted.sort_by(f64::total_cmp);
    let of = |x: &f64| (sorted.partition_point(|o| o < x) + sorted.partition_point(|o| o <= x)) as f64 / 2.0;
    new.iter().map(of).sum()
}

/// The sum of t^3 - t over groups of t equal values.
fn ties(old: &[f64], new: &[f64]) -> f64 {
    let mut all: Vec<f64> = old.iter().chain(new).copied().collect();
    all.sort_by(f64::total_cmp);
    let cubes = |g: &[f64]| (g.len() as f64).powi(3) - g.len() as f64;
    all.chunk_by(|a, b| a == b).map(cubes).sum()
}

/// The distribution of U where both samples are from the same source.
#[derive(Debug)]
enum Null {
    /// The probability of each value or a lower one.
    Exact(Vec<f64>),
    Normal {
        mean: f64,
        deviation: f64,
    },
}

impl Null {
    fn of(n: usize, m: usize, ties: f64) -> Self {
        if n.max(m) <= EXACT_MAX {
            let counts = counts(n, m);
            let all: f64 = counts.iter().sum();
            let mut sum = 0.0;
            return Self::Exact(counts.iter().map(|c| (sum += c, sum / all).1).collect());
        }
        let (n, m) = (n as f64, m as f64);
        let both = n + m;
        let variance = n * m / 12.0 * (both + 1.0 - ties / (both * (both - 1.0)));
        Self::Normal { mean: n * m / 2.0, deviation: variance.max(0.0).sqrt() }
    }

    /// The probability of a U of `u` or less; `u` is whole.
    fn at_most(&self, u: f64) -> f64 {
        match self {
            Self::Exact(_) if u < 0.0 => 0.0,
            Self::Exact(sums) => sums.get(u as usize).copied().unwrap_or(1.0),
            // All values are equal: nothing differs.
            Self::Normal { deviation, .. } if *deviation == 0.0 => 1.0,
            Self::Normal { mean, deviation } => normal_at_most((u + 0.5 - mean) / deviation),
        }
    }
}

/// In how many orders of `n` and `m` values U is 0, 1, 2, ...
fn counts(n: usize, m: usize) -> Vec<f64> {
    // By the sample of the largest value: with i new and j old ones it is a new one, which has all old ones below it,
    // or an old one, which adds nothing.
    let mut row: Vec<Vec<f64>> = vec![vec![1.0]; m + 1];
    for i in 1..=n {
        let mut next: Vec<Vec<f64>> = vec![vec![1.0]];
        for j in 1..=m {
            let mut all = vec![0.0; i * j + 1];
            row[j].iter().enumerate().for_each(|(u, c)| all[u + j] += c);
            next[j - 1].iter().enumerate().for_each(|(u, c)| all[u] += c);
            next.push(all);
        }
        row = next;
    }
    row.pop().unwrap_or_default()
}

/// Bounds of the ratio: of all ratios of a new to an old value, those that the test does not refuse.
fn interval(old: &[f64], new: &[f64]) -> Option<(f64, f64)> {
    let null = Null::of(new.len(), old.len(), 0.0);
    let tail = (1.0 - INTERVAL_CONFIDENCE) / 2.0;
    let left_out = (0..).take_while(|k| null.at_most(f64::from(*k)) <= tail).count();
    let mut ratios: Vec<f64> = new.iter().flat_map(|n| old.iter().map(move |o| n / o)).collect();
    ratios.sort_by(f64::total_cmp);
    let low = ratios.get(left_out.checked_sub(1)?)?;
    Some((*low, *ratios.get(ratios.len().checked_sub(left_out)?)?))
}

/// The standard normal distribution, to 1e-7 (Abramowitz and Stegun, 26.2.17).
fn normal_at_most(z: f64) -> f64 {
    let t = 1.0 / (1.0 + 0.231_641_9 * z.abs());
    let terms = [0.319_381_530, -0.356_563_782, 1.781_477_937, -1.821_255_978, 1.330_274_429];
    let sum = terms.iter().rev().fold(0.0, |sum, c| (sum + c) * t);
    let tail = (-z * z / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt() * sum;
    if z > 0.0 { 1.0 - tail } else { tail }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(a: f64, b: f64, by: f64) {
        assert!((a - b).abs() < by, "{a} is not {b}");
    }

    #[test]
    fn small_samples_have_the_p_values_of_the_tables() {
        assert_eq!(counts(2, 2), [1.0, 1.0, 2.0, 1.0, 1.0]);
        assert_eq!(counts(3, 1), [1.0; 4]);
        // Apart altogether: two of C(n + m, n) orders.
        for (n, all) in [(2, 6.0), (3, 20.0), (4, 70.0), (5, 252.0), (10, 184_756.0)] {
            let old: Vec<f64> = (0..n).map(|i| 10.0 + f64::from(i)).collect();
            let new: Vec<f64> = old.iter().map(|o| o + 100.0).collect();
            let c = compare(&old, &new).unwrap();
            near(c.confidence, 1.0 - 2.0 / all, 1e-12);
            assert_eq!(
                (c.confidence, c.confidence_max),
                (compare(&new, &old).unwrap().confidence, c.confidence)
            );
        }
        // U is 22 of 25, as far from the middle as 3: twice 1 + 1 + 2 + 3 of 252 orders.
        let c = compare(&[1.0, 2.0, 3.0, 4.0, 8.0], &[5.0, 6.0, 7.0, 9.0, 10.0]).unwrap();
        near(c.confidence, 1.0 - 2.0 * 7.0 / 252.0, 1e-12);
    }

    #[test]
    fn one_value_says_nothing_and_equal_ones_say_that_nothing_differs() {
        assert_eq!(compare(&[1.0], &[2.0, 2.0, 2.0]), None);
        assert_eq!(compare(&[1.0, 1.0], &[2.0]), None);
        for n in [4, 30] {
            let c = compare(&vec![7.0; n], &vec![7.0; n]).unwrap();
            assert_eq!((c.confidence, c.interval.is_some()), (0.0, true), "{n}");
        }
    }

    #[test]
    fn the_interval_holds_the_ratio_and_needs_four_values_of_each() {
        let old: Vec<f64> = (0..10).map(|i| 100.0 + f64::from(i)).collect();
        let new: Vec<f64> = old.iter().map(|o| o * 1.1).collect();
        let (low, high) = compare(&old, &new).unwrap().interval.unwrap();
        assert!(1.05 < low && low < 1.1 && 1.1 < high && high < 1.15, "{low} {high}");
        assert_eq!(compare(&old[..3], &new[..3]).unwrap().interval, None);
        assert!(compare(&old[..4], &new[..4]).unwrap().interval.is_some());
    }

    #[test]
    fn large_samples_go_by_the_normal_distribution() {
        for (z, p) in [(0.0, 0.5), (-1.96, 0.024_998), (1.0, 0.841_345), (-8.0, 0.0)] {
            near(normal_at_most(z), p, 1e-6);
        }
        // Both ways agree where they meet.
        let old: Vec<f64> = (1..=20).map(f64::from).collect();
        let new: Vec<f64> = old.iter().map(|o| o + 4.5).collect();
        let exact = compare(&old, &new).unwrap();
        let null = Null::Normal { mean: 200.0, deviation: (20.0f64 * 20.0 * 41.0 / 12.0).sqrt() };
        let u = u_of(&old, &new);
        near(1.0 - 2.0 * null.at_most(400.0 - u), exact.confidence, 2e-3);
        let far: Vec<f64> = (0..200).map(|i| 1000.0 + f64::from(i)).collect();
        let c = compare(&old, &far).unwrap();
        assert!(c.confidence > 0.999_999 && c.interval.unwrap().0 > 50.0, "{c:?}");
    }

    #[test]
    fn of_the_same_source_about_one_in_twenty_is_confident() {
        // A generator of its own: the same numbers everywhere.
        let mut state = 7u64;
        let mut draw = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 11) as f64 / (1u64 << 53) as f64 + 1.0
        };
        let mut confident = 0;
        for _ in 0..2000 {
            let old: Vec<f64> = (0..10).map(|_| draw()).collect();
            let new: Vec<f64> = (0..10).map(|_| draw()).collect();
            confident += u32::from(compare(&old, &new).unwrap().confidence >= 0.95);
        }
        assert!((60..=100).contains(&confident), "{confident} of 2000");
    }
}
