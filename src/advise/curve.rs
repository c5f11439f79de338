//! Measured times of an operation by size, and the times between them.

use crate::model::Func;

/// Times of one operation on one number of ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct Curve {
    /// The operation.
    pub func: Func,
    /// The ranks.
    pub ranks: u32,
    /// Sizes in bytes with times in ns, ascending.
    points: Vec<(f64, f64)>,
}

impl Curve {
    /// Takes measured points in any order. `None` where there are fewer than two sizes, between which nothing is known.
    pub fn new(func: Func, ranks: u32, points: impl IntoIterator<Item = (u64, f64)>) -> Option<Self> {
        let is_time = |(bytes, ns): &(u64, f64)| *bytes > 0 && ns.is_finite() && *ns > 0.0;
        let mut points: Vec<(f64, f64)> =
            points.into_iter().filter(is_time).map(|(bytes, ns)| (bytes as f64, ns)).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
        points.dedup_by_key(|p| p.0);
        (points.len() >= 2).then_some(Curve { func, ranks, points })
    }

    /// The time of one operation in ns: between two measured sizes on the straight line of the logarithms, below the
    /// smallest the same time, above the largest at the same bandwidth.
    pub fn time_ns(&self, bytes: f64) -> f64 {
        let above = self.points.partition_point(|p| p.0 < bytes);
        let at = |i: usize| self.points.get(i).copied();
        match (above.checked_sub(1).and_then(at), at(above)) {
            (None, Some((_, ns))) => ns,
            (Some((size, ns)), None) => ns * bytes / size,
            (Some(a), Some(b)) => {
                let share = (bytes / a.0).ln() / (b.0 / a.0).ln();
                (a.1.ln() + share * (b.1 / a.1).ln()).exp()
            }
            (None, None) => f64::NAN,
        }
    }

    /// The smallest measured size that reaches this share of the best bandwidth.
    pub fn efficient_bytes(&self, share: f64) -> f64 {
        let bandwidth = |p: &(f64, f64)| p.0 / p.1;
        let best = self.points.iter().map(bandwidth).fold(0.0, f64::max);
        self.points.iter().find(|p| bandwidth(p) >= best * share).map_or(0.0, |p| p.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_between_and_beyond_measured_sizes() {
        let curve = Curve::new(Func::AllReduce, 4, [(4096, 40.0), (1024, 10.0), (1024, 10.0), (0, 1.0)]);
        let curve = curve.expect("two sizes");
        for (bytes, ns) in [(1.0, 10.0), (1024.0, 10.0), (2048.0, 20.0), (4096.0, 40.0), (8192.0, 80.0)] {
            assert!((curve.time_ns(bytes) - ns).abs() < 1e-6, "{bytes}: {}", curve.time_ns(bytes));
        }
        assert_eq!(Curve::new(Func::AllReduce, 4, [(1024, 10.0), (2048, f64::NAN)]), None);
        let knee = Curve::new(Func::AllReduce, 4, [(1, 10.0), (100, 10.0), (1000, 20.0), (10_000, 100.0)]);
        assert!((knee.expect("sizes").efficient_bytes(0.5) - 1000.0).abs() < 1e-9);
    }
}
