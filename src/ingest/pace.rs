//! Work whose size is up to the users of a host, done again and again.

use std::time::Duration;

/// How often something is done: with so much time between two beginnings, and more where it took long, so that it has at
/// most one in `share` parts of the time.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    every: Duration,
    share: u32,
}

impl Pace {
    /// With `every` between two beginnings at least.
    pub const fn new(every: Duration, share: u32) -> Self {
        Pace { every, share }
    }

    /// The time from the beginning of what took so long to the next one.
    pub fn next(self, took: Duration) -> Duration {
        self.every.max(took.saturating_mul(self.share))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn work_has_its_share_of_the_time_however_long_it_takes() {
        let pace = Pace::new(200 * MS, 10);
        let (mut now, mut at_work) = (Duration::ZERO, Duration::ZERO);
        // Somebody makes it slower and slower, and stops.
        for took in [1, 5, 19, 20, 21, 400, 5_000, 60_000, 5_000, 3, 1] {
            let took = took * MS;
            at_work += took;
            now += pace.next(took);
            assert!(at_work * 10 <= now, "{at_work:?} of {now:?}");
        }
        assert_eq!(pace.next(MS), 200 * MS);
        assert_eq!(pace.next(Duration::MAX), Duration::MAX);
    }
}
