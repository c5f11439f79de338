//! Operations of which nobody knows who came last, as they are not timed: the next ones that are timed speak for them.

/// The plugin times operations in runs of so many.
const RUN: f64 = 32.0;
/// Operations speak for those of so long before them, in ns.
pub(super) const SPEAKS_FOR_NS: u64 = 10_000_000_000;

/// Operations that nothing speaks for yet.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Unjudged {
    count: f64,
    judged_ns: u64,
}

impl Unjudged {
    /// Counts some of them.
    pub(super) fn add(&mut self, count: f64) {
        self.count += count;
    }

    /// Counts one that is timed, or a part of it, and began at `at_ns`.
    pub(super) fn judged(&mut self, at_ns: u64, part: f64) {
        if at_ns.saturating_sub(self.judged_ns) > SPEAKS_FOR_NS {
            self.count = 0.0;
        }
        self.judged_ns = at_ns;
        self.count -= self.count / RUN * part;
    }

    /// How many operations one that is timed speaks for: itself, and its share of what is counted here, of which `each` are one
    /// operation.
    pub(super) fn speaks_for(&self, each: f64) -> f64 {
        1.0 + self.count / RUN / each
    }
}

#[cfg(test)]
mod tests {
    use super::{RUN, SPEAKS_FOR_NS, Unjudged};

    /// How many operations those that are timed speak for, as a share of all; every eighth run of them is timed, and each has so
    /// many parts.
    fn spoken(parts: u64) -> f64 {
        let (mut unjudged, mut spoken, mut at_ns) = (Unjudged::default(), 0.0, SPEAKS_FOR_NS);
        let operations = 800 * RUN as u64;
        for operation in 0..operations {
            at_ns += 1_000_000;
            if operation / RUN as u64 % 8 == 7 {
                (0..parts).for_each(|_| unjudged.judged(at_ns, 1.0 / parts as f64));
                spoken += unjudged.speaks_for(parts as f64);
            } else {
                unjudged.add(parts as f64);
            }
        }
        spoken / operations as f64
    }

    #[test]
    fn operations_that_are_timed_speak_for_as_many_as_are_not() {
        assert!((spoken(1) - 1.0).abs() < 0.1, "{}", spoken(1));
        assert!((spoken(12) - 1.0).abs() < 0.1, "an exchange of many transfers: {}", spoken(12));
    }

    #[test]
    fn nothing_speaks_for_what_was_long_ago() {
        let speaks = |at_ns| {
            let mut unjudged = Unjudged::default();
            unjudged.judged(SPEAKS_FOR_NS, 1.0);
            unjudged.add(1_000.0);
            unjudged.judged(at_ns, 1.0);
            unjudged.speaks_for(1.0)
        };
        assert!(speaks(SPEAKS_FOR_NS + 1) > 30.0);
        assert_eq!(speaks(2 * SPEAKS_FOR_NS + 1), 1.0);
    }
}
