//! The times of steps, over all of a job. There are twice as many steps to a point whenever there are too many points.

use crate::model::StepPoint;

/// Points at most; an even number.
const POINTS_MAX: usize = 512;

/// The sums of the steps of a point, in ns.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Sum {
    at_ns: u64,
    steps: u64,
    host_ns: u64,
    /// Steps that are timed on the GPU.
    timed: u64,
    gpu_ns: u64,
}

impl Sum {
    fn and(self, next: Sum) -> Sum {
        Sum {
            at_ns: self.at_ns,
            steps: self.steps + next.steps,
            host_ns: self.host_ns.saturating_add(next.host_ns),
            timed: self.timed + next.timed,
            gpu_ns: self.gpu_ns.saturating_add(next.gpu_ns),
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Series {
    points: Vec<Sum>,
    /// A point has `1 << doubled` steps.
    doubled: u32,
}

impl Series {
    /// Adds a step that began at this moment, and its time by the host's clock.
    pub(super) fn add(&mut self, at_ns: u64, host_ns: u64) {
        let step = Sum { at_ns, steps: 1, host_ns, timed: 0, gpu_ns: 0 };
        match self.points.last_mut() {
            Some(last) if last.steps < 1 << self.doubled => *last = last.and(step),
            _ => self.points.push(step),
        }
        if self.points.len() >= POINTS_MAX {
            let pairs = self.points.chunks(2);
            self.points =
                pairs.map(|pair| pair.iter().copied().reduce(Sum::and).unwrap_or_default()).collect();
            self.doubled += 1;
        }
    }

    /// Adds the time on the GPU of the step that was added last.
    pub(super) fn timed(&mut self, gpu_ns: u64) {
        if let Some(last) = self.points.last_mut() {
            last.timed += 1;
            last.gpu_ns = last.gpu_ns.saturating_add(gpu_ns);
        }
    }

    pub(super) fn points(&self) -> Vec<StepPoint> {
        let point = |sum: &Sum| StepPoint {
            at_ns: sum.at_ns,
            steps: sum.steps,
            host_ns: sum.host_ns as f64 / sum.steps.max(1) as f64,
            gpu_ns: (sum.timed > 0).then(|| sum.gpu_ns as f64 / sum.timed as f64),
        };
        self.points.iter().map(point).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_steps_have_a_bounded_number_of_points_with_the_same_mean() {
        let mut series = Series::default();
        for step in 0..100_000_u64 {
            series.add(step * 10, 10 + step % 2);
            if step % 4 == 0 {
                series.timed(8);
            }
        }
        let points = series.points();
        assert!(points.len() < POINTS_MAX && points.len() >= POINTS_MAX / 4, "{}", points.len());
        assert_eq!(points.iter().map(|p| p.steps).sum::<u64>(), 100_000);
        assert!(points.iter().all(|p| p.gpu_ns == Some(8.0) && (p.host_ns - 10.5).abs() < 1e-9));
        assert!(points.windows(2).all(|w| w[0].at_ns < w[1].at_ns));
    }
}
