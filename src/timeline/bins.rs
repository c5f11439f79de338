//! Times that are spent, by equal bins of time. Bins double in width when there are too many of them.

use std::collections::BTreeMap;

/// Bins at most; an even number.
pub(super) const BINS_MAX: usize = 256;
/// The width of a bin at first, in ns.
const WIDTH_NS: u64 = 20_000_000;

/// The bins that several [`Spent`] share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Scale {
    /// The beginning of the first bin, host monotonic ns.
    pub(super) begin_ns: u64,
    pub(super) width_ns: u64,
}

impl Scale {
    pub(super) fn new(begin_ns: u64) -> Self {
        Scale { begin_ns, width_ns: WIDTH_NS }
    }

    /// Doubles the width until this moment is in a bin. Returns how often.
    pub(super) fn widen_to(&mut self, at_ns: u64) -> u32 {
        let since_ns = at_ns.saturating_sub(self.begin_ns);
        let mut doubled = 0;
        while since_ns / self.width_ns >= BINS_MAX as u64 {
            self.width_ns *= 2;
            doubled += 1;
        }
        doubled
    }
}

/// The time that was spent in each bin, in ns.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Spent(Vec<f32>);

impl Spent {
    /// Adds a time span. What is before the first bin counts for none.
    pub(super) fn add(&mut self, scale: Scale, from_ns: u64, to_ns: u64) {
        let mut at_ns = from_ns.max(scale.begin_ns);
        while at_ns < to_ns {
            let bin = (at_ns - scale.begin_ns) / scale.width_ns;
            let Some(bin_at) = usize::try_from(bin).ok().filter(|b| *b < BINS_MAX) else { return };
            let end_ns = (scale.begin_ns + (bin + 1) * scale.width_ns).min(to_ns);
            if self.0.len() <= bin_at {
                self.0.resize(bin_at + 1, 0.0);
            }
            self.0[bin_at] += (end_ns - at_ns) as f32;
            at_ns = end_ns;
        }
    }

    /// Follows a scale that has doubled so often.
    pub(super) fn double(&mut self, times: u32) {
        for _ in 0..times {
            self.0 = self.0.chunks(2).map(|pair| pair.iter().sum()).collect();
        }
    }

    /// Counts an event.
    pub(super) fn count(&mut self, scale: Scale, at_ns: u64) {
        let bin = at_ns.saturating_sub(scale.begin_ns) / scale.width_ns;
        let Some(bin) = usize::try_from(bin).ok().filter(|b| *b < BINS_MAX) else { return };
        if self.0.len() <= bin {
            self.0.resize(bin + 1, 0.0);
        }
        self.0[bin] += 1.0;
    }

    pub(super) fn get(&self, bin: usize) -> f32 {
        self.0.get(bin).copied().unwrap_or(0.0)
    }

    /// The share of a bin's time, 0 to 1.
    pub(super) fn share(&self, scale: Scale, bin: usize) -> f32 {
        (self.get(bin) / scale.width_ns as f32).min(1.0)
    }
}

/// Spans that may be added in any order, each moment counted once.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Union {
    /// The newest spans by their beginnings, apart from each other.
    open: BTreeMap<u64, u64>,
    spent: Spent,
}

/// Spans that are kept apart; of more the oldest are added up.
const OPEN_MAX: usize = 1_024;

impl Union {
    pub(super) fn add(&mut self, scale: Scale, mut from_ns: u64, mut to_ns: u64) {
        if from_ns >= to_ns {
            return;
        }
        // Those that it touches become one with it.
        while let Some((&begin, &end)) =
            self.open.range(..=to_ns).next_back().filter(|(_, end)| **end >= from_ns)
        {
            self.open.remove(&begin);
            (from_ns, to_ns) = (from_ns.min(begin), to_ns.max(end));
        }
        self.open.insert(from_ns, to_ns);
        if self.open.len() > OPEN_MAX {
            for (begin, end) in self.open.iter().take(OPEN_MAX / 2) {
                self.spent.add(scale, *begin, *end);
            }
            let kept = self.open.keys().nth(OPEN_MAX / 2).copied().unwrap_or(0);
            self.open = self.open.split_off(&kept);
        }
    }

    pub(super) fn double(&mut self, times: u32) {
        self.spent.double(times);
    }

    /// All spans, by bin.
    pub(super) fn total(&self, scale: Scale) -> Spent {
        let mut all = self.spent.clone();
        self.open.iter().for_each(|(begin, end)| all.add(scale, *begin, *end));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_is_spread_over_the_bins_it_covers_and_keeps_its_sum() {
        let mut scale = Scale::new(1_000_000_000);
        let mut spent = Spent::default();
        spent.add(scale, 990_000_000, 1_050_000_000);
        assert_eq!(spent.0, [20e6, 20e6, 10e6], "what is before the first bin is left out");
        let doubled = scale.widen_to(1_000_000_000 + 20_000_000 * 256);
        spent.double(doubled);
        assert_eq!((doubled, scale.width_ns, &*spent.0), (1, 40_000_000, &[40e6, 10e6][..]));
        assert_eq!([0, 1, 2].map(|bin| spent.share(scale, bin)), [1.0, 0.25, 0.0]);
        let mut events = Spent::default();
        [0, 1_000_000_000, 1_041_000_000].iter().for_each(|at_ns| events.count(scale, *at_ns));
        assert_eq!(events.0, [2.0, 1.0]);
    }

    #[test]
    fn each_moment_counts_once_in_any_order() {
        let scale = Scale::new(0);
        let mut union = Union::default();
        for (from, to) in [(30, 40), (10, 20), (15, 32), (39, 41), (5, 5), (60, 70)] {
            union.add(scale, from * 1_000_000, to * 1_000_000);
        }
        assert_eq!(union.open.len(), 2, "{union:?}");
        assert_eq!(union.total(scale).0, [10e6, 20e6, 1e6, 10e6]);
        let mut many = Union::default();
        (0..5_000_u64).rev().for_each(|n| many.add(scale, n * 1_000, n * 1_000 + 500));
        assert!(many.open.len() <= OPEN_MAX);
        assert!((many.total(scale).0[0] - 2.5e6).abs() < 1e3);
    }

    #[test]
    fn a_long_time_has_no_more_bins_than_a_short_one() {
        let mut scale = Scale::new(0);
        let mut spent = Spent::default();
        let hour_ns = 3_600_000_000_000;
        for at in 0..1_000 {
            let at_ns = at * hour_ns / 10;
            spent.double(scale.widen_to(at_ns + 1_000_000));
            spent.add(scale, at_ns, at_ns + 1_000_000);
        }
        assert!(spent.0.len() <= BINS_MAX, "{}", spent.0.len());
        let sum: f32 = spent.0.iter().sum();
        assert!((sum - 1e9).abs() < 1e4, "{sum}");
    }
}
