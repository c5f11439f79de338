//! From a GPU's clock to the host's.
//!
//! A callback comes after the moment that it reports, so `callback time - GPU stamp` is never less than the
//! true offset between the clocks, and the least of many is close to it. The clocks drift against each
//! other, by less than [`DRIFT`]; so every observation `(t, offset)` bounds the offset at any other time
//! by `offset + DRIFT * distance`, and the mapping is the lower envelope of these cones. It is an upper
//! bound: a true stamp is never mapped before the moment it names.

use std::collections::VecDeque;

/// The largest drift between a GPU's clock and the host's that is reckoned with: one ns in so many.
const DRIFT: u64 = 10_000;
/// Observations closer together than this are one, in ns of the GPU's clock.
const BUCKET_NS: u64 = 10_000_000;
/// Buckets kept: a minute and more of a busy GPU.
const BUCKETS: usize = 8192;
/// Offsets lower than known by more than this, in ns, come from stamps that are wrong.
const JUMP_NS: i64 = 1_000_000_000;
/// Launch distances kept for the error bound.
const DISTANCES: usize = 256;
/// Fewer than this and no error bound is given.
const DISTANCES_MIN: usize = 8;

/// The tip of a cone.
#[derive(Debug, Clone, Copy)]
struct Apex {
    bucket: u64,
    gpu_ns: u64,
    offset: i64,
}

impl Apex {
    /// The bound of the offset at another moment.
    fn bound(&self, gpu_ns: u64) -> i64 {
        self.offset.saturating_add(cone(self.gpu_ns, gpu_ns))
    }

    /// True when its bound at a moment is no more than this offset; without a division, as this is asked for every stamp.
    fn covers(&self, gpu_ns: u64, offset: i64) -> bool {
        let above = u64::try_from(offset.saturating_sub(self.offset));
        above.is_ok_and(|above| self.gpu_ns.abs_diff(gpu_ns) <= above.saturating_mul(DRIFT))
    }
}

/// The mapping of one GPU's clock.
#[derive(Debug, Default, Clone)]
pub struct ClockMap {
    /// Apexes of the cones, one a bucket, by time; nearly all that is asked for lies at the end.
    apexes: VecDeque<Apex>,
    /// How long after their launch kernels started, as mapped, in ns.
    distances: VecDeque<u64>,
}

impl ClockMap {
    /// A stamp and the host's time of the callback that brought it.
    #[inline]
    pub fn observe(&mut self, gpu_ns: u64, seen_ns: u64) {
        // Clocks that are centuries apart are no clocks.
        let Some(offset) = seen_ns.checked_signed_diff(gpu_ns) else { return };
        // Nearly every callback comes later than the quickest one of late, and teaches nothing.
        if !self.apexes.back().is_some_and(|last| last.covers(gpu_ns, offset)) {
            self.learn(gpu_ns, offset);
        }
    }

    fn learn(&mut self, gpu_ns: u64, offset: i64) {
        match self.offset(gpu_ns) {
            // A clock that jumps is no clock: a stamp from the far future would pull the mapping down for good.
            Some(known) if known <= offset || known.saturating_sub(offset) > JUMP_NS => return,
            _ => {}
        }
        let new = Apex { bucket: gpu_ns / BUCKET_NS, gpu_ns, offset };
        // What the new cone covers is no apex any more.
        let covered = |old: &Apex| new.bound(old.gpu_ns) <= old.offset;
        let mut at = self.behind(new.bucket);
        match at.checked_sub(1).and_then(|last| self.apexes.get_mut(last)) {
            Some(old) if old.bucket == new.bucket => {
                *old = new;
                at -= 1;
            }
            _ => self.apexes.insert(at, new),
        }
        let next = self.apexes.range(at + 1..).take_while(|a| covered(a)).count();
        self.apexes.drain(at + 1..at + 1 + next);
        let last = self.apexes.range(..at).rev().take_while(|a| covered(a)).count();
        self.apexes.drain(at - last..at);
        while self.apexes.len() > BUCKETS {
            self.apexes.pop_front();
        }
    }

    /// How many apexes lie in a bucket or before it.
    fn behind(&self, bucket: u64) -> usize {
        match self.apexes.back() {
            Some(last) if last.bucket > bucket => self.apexes.partition_point(|a| a.bucket <= bucket),
            _ => self.apexes.len(),
        }
    }

    /// The offset at a moment of the GPU's clock: between two apexes one of them gives it.
    fn offset(&self, gpu_ns: u64) -> Option<i64> {
        let last = self.apexes.back()?;
        if last.bucket <= gpu_ns / BUCKET_NS {
            let bound = last.bound(gpu_ns);
            let before = self.apexes.len().checked_sub(2).and_then(|at| self.apexes.get(at));
            return Some(before.map_or(bound, |a| a.bound(gpu_ns).min(bound)));
        }
        let behind = self.behind(gpu_ns / BUCKET_NS);
        // The bucket's own apex may lie on either side, so its neighbours are asked as well.
        let near = self.apexes.range(behind.saturating_sub(2)..self.apexes.len().min(behind + 1));
        near.map(|a| a.bound(gpu_ns)).min()
    }

    /// A GPU stamp on the host's clock in ns; `None` before anything was observed.
    pub fn to_host(&self, gpu_ns: u64) -> Option<u64> {
        gpu_ns.checked_add_signed(self.offset(gpu_ns)?)
    }

    /// Gives up the mapping, which nobody asks any more once the process is gone, and keeps its error bound.
    pub fn retire(&mut self) {
        self.apexes.clear();
    }

    /// A kernel that started, as mapped, this long after its launch began: it did not start before it, so
    /// the mapping is late by no more than that.
    pub fn learn_distance(&mut self, ns: u64) {
        if self.distances.len() == DISTANCES {
            self.distances.pop_front();
        }
        self.distances.push_back(ns);
    }

    /// How late the mapping may be, in ns: the 5th percentile of the distances from launch to start, as some
    /// of the stamps that passed for plausible may be wrong. `None` until enough is known.
    pub fn error_ns(&self) -> Option<u64> {
        if self.distances.len() < DISTANCES_MIN {
            return None;
        }
        let mut sorted: Vec<u64> = self.distances.iter().copied().collect();
        sorted.sort_unstable();
        sorted.get(sorted.len() / 20).copied()
    }
}

/// How far an apex's bound has widened at another moment.
fn cone(a: u64, b: u64) -> i64 {
    // Rounded up, so that it stays a bound.
    a.abs_diff(b).div_ceil(DRIFT).cast_signed()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_observed_nothing_mapped() {
        assert_eq!(ClockMap::default().to_host(5), None);
        assert_eq!(ClockMap::default().error_ns(), None);
    }

    #[test]
    fn the_least_offset_wins_and_widens_with_distance() {
        let mut m = ClockMap::default();
        // GPU clock 1 s ahead; callbacks 50, 10 and 80 us late, 1 ms apart.
        let base = 5_000_000_000u64;
        for (i, late) in [50_000u64, 10_000, 80_000].into_iter().enumerate() {
            let host = base + i as u64 * 1_000_000;
            m.observe(host + 1_000_000_000, host + late);
        }
        // At the second: 10 us late. At the first, 1 ms away: 10 us + 100 ppm of 1 ms = 10.1 us.
        assert_eq!(m.to_host(base + 1_001_000_000), Some(base + 1_000_000 + 10_000));
        assert_eq!(m.to_host(base + 1_000_000_000), Some(base + 10_100));
        assert_eq!(m.to_host(base + 1_002_000_000), Some(base + 2_000_000 + 10_100));
    }

    #[test]
    fn a_true_stamp_is_never_mapped_before_its_moment_under_drift() {
        let mut m = ClockMap::default();
        let drift = |t: u64| 1_700_000_000_000_000_000 + t + t / 50_000; // 20 ppm fast
        for i in 0..2_000u64 {
            let t = i * 1_500_000;
            m.observe(drift(t), t + 5_000 + (i * 7919 % 97) * 1_000);
        }
        for i in (0..3_000_000_000u64).step_by(7_777_777) {
            let mapped = m.to_host(drift(i)).expect("observed");
            assert!(mapped >= i, "{i} mapped to {mapped}");
            assert!(mapped - i < 400_000, "{i} mapped {} ns late", mapped - i);
        }
    }

    #[test]
    fn stale_stamps_do_not_move_it() {
        let mut m = ClockMap::default();
        m.observe(1_000_000_000, 2_000_000_000);
        let before = m.to_host(1_000_000_000);
        m.observe(1_000_000_000, 2_400_000_000);
        assert_eq!(m.to_host(1_000_000_000), before);
    }

    #[test]
    fn the_error_bound_is_the_fifth_percentile_of_launch_distances() {
        let mut m = ClockMap::default();
        for n in 0..100 {
            m.learn_distance(1_000 + n);
        }
        assert_eq!(m.error_ns(), Some(1_005));
    }
}
