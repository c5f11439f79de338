//! A histogram of times, a quarter of an octave a bucket.

use std::collections::BTreeMap;

/// Buckets in which the time doubles.
const BUCKETS_PER_OCTAVE: f64 = 4.0;

#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Latency(BTreeMap<u16, u64>);

impl Latency {
    pub(super) fn add(&mut self, time_ns: u64) {
        let bucket = (time_ns.max(1) as f64).log2() * BUCKETS_PER_OCTAVE;
        // At most 64 octaves.
        *self.0.entry(bucket as u16).or_default() += 1;
    }

    pub(super) fn add_all(&mut self, other: &Latency) {
        other.0.iter().for_each(|(bucket, n)| *self.0.entry(*bucket).or_default() += n);
    }

    /// The lower bound of each bucket in µs and its count, from the first to the last that has any.
    pub(super) fn buckets(&self) -> Vec<(f64, u64)> {
        let (Some((first, _)), Some((last, _))) = (self.0.first_key_value(), self.0.last_key_value()) else {
            return Vec::new();
        };
        let from_us = |bucket: u16| (f64::from(bucket) / BUCKETS_PER_OCTAVE).exp2() / 1e3;
        (*first..=*last).map(|b| (from_us(b), self.0.get(&b).copied().unwrap_or(0))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_in_the_bucket_of_its_size() {
        let mut all = Latency::default();
        [1_000, 1_024, 1_200, 2_048, 0].iter().for_each(|ns| all.add(*ns));
        let buckets = all.buckets();
        let counts: Vec<u64> = buckets.iter().map(|(_, n)| *n).filter(|n| *n > 0).collect();
        assert_eq!(counts, [1, 1, 2, 1], "{buckets:?}");
        assert_eq!(buckets.len(), 45, "11 octaves, with the empty buckets between");
        assert!((buckets[40].0 - 1.024).abs() < 1e-9 && (buckets[44].0 - 2.048).abs() < 1e-9);
        let mut twice = Latency::default();
        twice.add_all(&all);
        twice.add_all(&all);
        assert_eq!(twice.buckets()[40].1, 4);
    }
}
