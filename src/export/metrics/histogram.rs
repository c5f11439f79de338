//! A histogram that is kept twice: in fixed buckets, and in exponential ones as fine as the room for them allows.

use std::collections::BTreeMap;

/// Upper bounds of the fixed buckets, in seconds: from a latency-bound operation to one that hangs.
pub const BOUNDS: [f64; 16] = [
    10e-6, 25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.5, 2.0, 10.0,
];
/// Exponential buckets at most; with more, neighbours are joined.
const EXPONENTIAL: usize = 160;
/// Buckets a doubling, as a power of two, to begin with: each is 9 % wider than the one before.
const SCALE: i32 = 3;
/// The coarsest there is.
const COARSEST: i32 = -4;
/// A value that is not larger than this counts as zero.
pub const ZERO: f64 = 1e-9;

/// An observation that leads to a trace.
#[derive(Debug, Clone, PartialEq)]
pub struct Exemplar {
    /// The observed value.
    pub value: f64,
    /// The trace it was observed in.
    pub trace: u128,
    /// The span.
    pub span: u64,
    /// When, ns since the epoch.
    pub unix_ns: Option<u64>,
}

/// Observations counted by size.
#[derive(Debug, Clone, PartialEq)]
pub struct Histogram {
    /// Sum of all.
    pub sum: f64,
    /// Number of all.
    pub count: u64,
    /// How many fell into each fixed bucket, not cumulated; the last one has no bound.
    pub fixed: [u64; BOUNDS.len() + 1],
    /// The latest exemplar of each fixed bucket.
    pub exemplars: [Option<Exemplar>; BOUNDS.len() + 1],
    /// How fine the exponential buckets are: bucket i ends at 2^(i / 2^scale).
    pub scale: i32,
    /// How many are zero.
    pub zero: u64,
    /// How many fell into each exponential bucket, by its index.
    pub exponential: BTreeMap<i32, u64>,
}

impl Default for Histogram {
    fn default() -> Self {
        Histogram {
            sum: 0.0,
            count: 0,
            fixed: [0; BOUNDS.len() + 1],
            exemplars: [const { None }; BOUNDS.len() + 1],
            scale: SCALE,
            zero: 0,
            exponential: BTreeMap::new(),
        }
    }
}

impl Histogram {
    /// Counts a value.
    pub fn observe(&mut self, value: f64, exemplar: Option<Exemplar>) {
        if !value.is_finite() || value < 0.0 {
            return;
        }
        self.sum += value;
        self.count += 1;
        let at = BOUNDS.iter().position(|b| value <= *b).unwrap_or(BOUNDS.len());
        self.fixed[at] += 1;
        if exemplar.is_some() {
            self.exemplars[at] = exemplar;
        }
        if value <= ZERO {
            self.zero += 1;
            return;
        }
        let index = (value.log2() * f64::from(self.scale).exp2()).ceil() as i32;
        *self.exponential.entry(index).or_default() += 1;
        while self.exponential.len() > EXPONENTIAL && self.scale > COARSEST {
            self.coarsen();
        }
    }

    /// Joins each two neighbours.
    fn coarsen(&mut self) {
        self.scale -= 1;
        for (index, n) in std::mem::take(&mut self.exponential) {
            *self.exponential.entry((index + 1).div_euclid(2)).or_default() += n;
        }
    }

    /// The fixed buckets as Prometheus counts them: upper bound, and how many are not larger.
    pub fn cumulated(&self) -> impl Iterator<Item = (f64, u64, Option<&Exemplar>)> {
        let bounds = BOUNDS.into_iter().chain([f64::INFINITY]);
        let sums = self.fixed.iter().scan(0, |sum, n| {
            *sum += n;
            Some(*sum)
        });
        bounds.zip(sums).zip(&self.exemplars).map(|((b, n), e)| (b, n, e.as_ref()))
    }

    /// Runs of exponential buckets without a gap: index of the first, and the counts.
    pub fn runs(&self) -> Vec<(i32, Vec<u64>)> {
        let mut runs: Vec<(i32, Vec<u64>)> = Vec::new();
        for (index, n) in &self.exponential {
            match runs.last_mut() {
                Some((first, counts)) if *first + counts.len() as i32 == *index => counts.push(*n),
                _ => runs.push((*index, vec![*n])),
            }
        }
        runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns whether a value is in an exponential bucket.
    fn holds(index: i32, scale: i32, value: f64) -> bool {
        let end = |i: i32| (f64::from(i) / f64::from(scale).exp2()).exp2();
        value > end(index - 1) * (1.0 - 1e-12) && value <= end(index) * (1.0 + 1e-12)
    }

    #[test]
    fn a_value_lies_in_its_buckets_however_coarse_they_become() {
        for value in [1.5e-6, 100e-6, 1e-3, 1.0, 1.0001, 2.0, 7.3] {
            let mut h = Histogram::default();
            h.observe(value, None);
            for _ in 0..8 {
                let index = *h.exponential.keys().next().expect("one");
                assert!(holds(index, h.scale, value), "{value} in {index} at scale {}", h.scale);
                h.coarsen();
            }
            let (bound, ..) = h.cumulated().find(|(_, n, _)| *n == 1).expect("counted");
            assert!(value <= bound);
        }
    }

    #[test]
    fn the_number_of_buckets_is_bounded_and_nothing_is_lost() {
        let mut h = Histogram::default();
        for n in 0..10_000 {
            h.observe(1e-7 * 1.002f64.powi(n), None);
        }
        h.observe(0.0, None);
        assert!(
            h.exponential.len() <= EXPONENTIAL && h.scale < SCALE,
            "{} at {}",
            h.exponential.len(),
            h.scale
        );
        assert_eq!(h.exponential.values().sum::<u64>() + h.zero, 10_001);
        assert_eq!((h.count, h.cumulated().last().map(|b| b.1)), (10_001, Some(10_001)));
        assert_eq!(h.runs().iter().flat_map(|r| &r.1).sum::<u64>(), 10_000);
        h.observe(f64::NAN, None);
        assert_eq!(h.count, 10_001, "what is no number is no observation");
    }

    #[test]
    fn the_latest_exemplar_of_each_bucket_is_kept() {
        let mut h = Histogram::default();
        let of = |value, trace| Some(Exemplar { value, trace, span: 1, unix_ns: None });
        h.observe(30e-6, of(30e-6, 1));
        h.observe(40e-6, of(40e-6, 2));
        h.observe(45e-6, None);
        h.observe(100.0, of(100.0, 3));
        let traces: Vec<_> = h.cumulated().filter_map(|(b, n, e)| Some((b, n, e?.trace))).collect();
        assert_eq!(traces, [(50e-6, 3, 2), (f64::INFINITY, 4, 3)]);
    }
}
