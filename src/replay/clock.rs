//! When each recorded callback is due, and how far the replay has slipped behind the recording.
//!
//! A busy machine plays late. A rank that hurried to catch up would squeeze its callbacks together
//! while its GPU stamps stayed where they were, and the stamps would lie. So a late replay behaves
//! like a process that was paused: the delay, `slip`, moves everything that follows, and only a
//! pause of the recording itself takes it back, so that ranks come together again.

use rustix::thread::clock_nanosleep_absolute;
use rustix::time::{ClockId, Timespec, clock_gettime};

use super::trace::Timeline;

/// How fast to play.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Pace {
    /// As recorded.
    Original,
    /// Recorded times multiplied by this (2.0 takes twice as long); what is not a positive, finite
    /// number counts as unpaced.
    Scaled(f64),
    /// One call after the other, stamps as recorded.
    Unpaced,
}

/// Being this little late is made good by the next pauses between two calls, in ns. Sleeps end late
/// by tens of us on a virtual machine, and without the tolerance each of thousands would add to the
/// slip and drive the ranks apart.
const TOLERANCE_NS: u64 = 300_000;
/// A pause of this length is idle time, in ns.
const IDLE_NS: u64 = 5_000_000;
/// The part of a pause that is left when it takes back slip, in ns.
const IDLE_LEFT_NS: u64 = 1_000_000;
/// Shorter waits are spun, in ns: a sleep would not end in time.
const SPIN_NS: u64 = 3_000;

/// `CLOCK_MONOTONIC` now, in ns.
#[must_use]
pub fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// The clock of a replay; tests have one of their own.
pub(super) trait Clock {
    fn now_ns(&self) -> u64;
    fn sleep_until(&self, ns: u64);
}

/// The machine's.
#[derive(Debug)]
pub(super) struct Monotonic;

impl Clock for Monotonic {
    fn now_ns(&self) -> u64 {
        monotonic_ns()
    }

    fn sleep_until(&self, ns: u64) {
        if monotonic_ns().saturating_add(SPIN_NS) < ns {
            let until =
                Timespec { tv_sec: (ns / 1_000_000_000) as i64, tv_nsec: (ns % 1_000_000_000) as i64 };
            // An interrupted sleep is over early; the loop below would spin for the rest, so go on.
            while clock_nanosleep_absolute(ClockId::Monotonic, &until) == Err(rustix::io::Errno::INTR) {}
        }
        while monotonic_ns() < ns {
            std::hint::spin_loop();
        }
    }
}

/// The schedule of one process.
#[derive(Debug)]
pub(super) struct Pacer<C> {
    clock: C,
    /// `None` plays unpaced.
    scale: Option<f64>,
    timeline: Timeline,
    start_at_ns: u64,
    loop_index: u32,
    /// Due time of the latest event, without slip.
    before_ns: u64,
    slip_ns: u64,
    /// Largest slip of the operations issued; no later one has less, lest kernels of one stream
    /// overlap.
    issued_slip_ns: u64,
    largest_lateness_ns: u64,
    /// Calls that are late by less are made good at once and move no stamps.
    ahead_ns: u64,
}

impl<C: Clock> Pacer<C> {
    /// `start_at_ns` is the instant at which the recording's epoch happens again.
    pub(super) fn new(clock: C, pace: Pace, timeline: Timeline, start_at_ns: Option<u64>) -> Self {
        let scale = match pace {
            Pace::Original => Some(1.0),
            Pace::Scaled(scale) if scale.is_finite() && scale > 0.0 => Some(scale),
            Pace::Scaled(_) | Pace::Unpaced => None,
        };
        let start_at_ns = start_at_ns.unwrap_or_else(|| clock.now_ns());
        Self {
            clock,
            scale,
            timeline,
            start_at_ns,
            loop_index: 0,
            before_ns: start_at_ns,
            slip_ns: 0,
            issued_slip_ns: 0,
            largest_lateness_ns: 0,
            ahead_ns: 0,
        }
    }

    /// In the recording every kernel starts so long after its host's calls, in ns, that these may be late by as much
    /// without its stamps becoming lies.
    #[must_use]
    pub(super) fn with_hosts_ahead(mut self, by_ns: u64) -> Self {
        self.ahead_ns = by_ns;
        self
    }

    pub(super) fn begin_loop(&mut self, index: u32) {
        self.loop_index = index;
    }

    /// How long after the start of the replay this loop begins, in ns.
    fn loop_offset_ns(&self) -> u64 {
        let period = scaled(self.timeline.period_ns as i64, self.scale.unwrap_or(1.0)) as u64;
        period.saturating_mul(self.loop_index.into())
    }

    /// Waits until an event is due, but not before `min_slip_ns` behind its schedule. Gives back how
    /// far behind the schedule the caller now is, in ns.
    pub(super) fn wait(&mut self, at_ns: u64, min_slip_ns: u64) -> u64 {
        let Some(scale) = self.scale else { return 0 };
        let offset = scaled(at_ns.wrapping_sub(self.timeline.epoch_ns) as i64, scale);
        let due = self.start_at_ns.saturating_add(self.loop_offset_ns()).saturating_add_signed(offset);
        // The recorder took its stamps before its lock, so they go back by some us across threads.
        let due = due.max(self.before_ns);
        let pause = due - self.before_ns;
        if pause >= IDLE_NS {
            let made_good = pause - IDLE_LEFT_NS;
            self.slip_ns = self.slip_ns.saturating_sub(made_good);
            self.issued_slip_ns = self.issued_slip_ns.saturating_sub(made_good);
        }
        self.before_ns = due;
        if min_slip_ns > self.slip_ns + TOLERANCE_NS {
            self.slip_ns = min_slip_ns;
        }
        let target = due.saturating_add(self.slip_ns.max(min_slip_ns));
        let mut now = self.clock.now_ns();
        if now < target {
            self.clock.sleep_until(target);
            now = self.clock.now_ns();
        }
        let behind = now.saturating_sub(due);
        if behind > self.slip_ns + TOLERANCE_NS.max(self.ahead_ns) {
            self.slip_ns = behind;
        }
        self.largest_lateness_ns = self.largest_lateness_ns.max(behind);
        behind
    }

    /// How far behind its schedule the latest event is by now, in ns.
    pub(super) fn behind(&mut self) -> u64 {
        if self.scale.is_none() {
            return 0;
        }
        let behind = self.clock.now_ns().saturating_sub(self.before_ns);
        self.largest_lateness_ns = self.largest_lateness_ns.max(behind);
        behind
    }

    /// The slip of an operation whose host calls were at most `behind_ns` late: what its GPU stamps
    /// move by, in ns.
    pub(super) fn issue(&mut self, behind_ns: u64) -> u64 {
        let moved_ns = if behind_ns <= self.ahead_ns { 0 } else { behind_ns };
        self.issued_slip_ns = self.issued_slip_ns.max(moved_ns);
        self.issued_slip_ns
    }

    /// A GPU stamp as it would read had the operation been issued `slip_ns` later, in ns.
    pub(super) fn stamp(&self, stamp_ns: u64, slip_ns: u64) -> u64 {
        if stamp_ns == 0 {
            return 0;
        }
        let loops = self.loop_offset_ns();
        match self.scale {
            None => stamp_ns.saturating_add(loops),
            Some(scale) => {
                let since = scaled(stamp_ns.wrapping_sub(self.timeline.gpu_epoch_ns) as i64, scale);
                let stamp = self.timeline.gpu_epoch_ns.saturating_add_signed(since);
                stamp.saturating_add(slip_ns).saturating_add(loops)
            }
        }
    }

    /// How far behind the recorded schedule a call ever was, in ns.
    pub(super) fn largest_lateness_ns(&self) -> u64 {
        self.largest_lateness_ns
    }
}

fn scaled(ns: i64, scale: f64) -> i64 {
    // An f64 would round the ns of long spans; the original pace shall be exact.
    if scale == 1.0 { ns } else { (ns as f64 * scale) as i64 }
}

/// Asks the kernel to end this thread's sleeps on time: by default it may add 50 us.
pub(super) fn sharpen_sleeps() {
    // Refused only where a sandbox forbids it; the replay is then later, and says so in its report.
    rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1)).unwrap_or_default();
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// Sleeps end late by a fixed time.
    struct Fake {
        now: Cell<u64>,
        oversleep: u64,
    }

    impl Clock for &Fake {
        fn now_ns(&self) -> u64 {
            self.now.get()
        }
        fn sleep_until(&self, ns: u64) {
            self.now.set(ns + self.oversleep);
        }
    }

    const MS: u64 = 1_000_000;

    fn pacer(clock: &Fake, pace: Pace) -> Pacer<&Fake> {
        let timeline = Timeline { epoch_ns: 5_000 * MS, gpu_epoch_ns: 900_000 * MS, period_ns: 100 * MS };
        Pacer::new(clock, pace, timeline, Some(10_000 * MS))
    }

    #[test]
    fn calls_are_made_when_due() {
        let clock = Fake { now: Cell::new(10_000 * MS), oversleep: 0 };
        let mut pacer = pacer(&clock, Pace::Original);
        for offset in [0, 1, 2 * MS, 40 * MS] {
            assert_eq!(pacer.wait(5_000 * MS + offset, 0), 0);
            assert_eq!(clock.now.get(), 10_000 * MS + offset);
        }
        // A stamp of the recorder that went back is due at once, not late.
        assert_eq!(pacer.wait(5_039 * MS, 0), 0);
        assert_eq!(clock.now.get(), 10_040 * MS);
    }

    #[test]
    fn small_lateness_is_caught_up_and_large_lateness_stays() {
        let clock = Fake { now: Cell::new(10_000 * MS), oversleep: 15_000 };
        let mut pacer = pacer(&clock, Pace::Original);
        for step in 1..100 {
            assert_eq!(pacer.wait(5_000 * MS + step * MS, 0), 15_000, "no sum over {step} sleeps");
        }
        clock.now.set(10_099 * MS + 3 * MS);
        assert_eq!(pacer.wait(5_099 * MS + 1_000, 0), 3 * MS - 1_000);
        let before = clock.now.get();
        assert_eq!(pacer.wait(5_099 * MS + 501_000, 0), 3 * MS - 1_000 + 15_000);
        assert_eq!(clock.now.get() - before, 515_000, "the distance to the call before is kept");
        assert_eq!(pacer.largest_lateness_ns(), 3 * MS - 1_000 + 15_000);
    }

    #[test]
    fn an_idle_pause_takes_back_slip_but_never_all_of_itself() {
        let clock = Fake { now: Cell::new(10_012 * MS), oversleep: 0 };
        let mut pacer = pacer(&clock, Pace::Original);
        assert_eq!(pacer.wait(5_000 * MS, 0), 12 * MS);
        // 4 ms is no idle pause.
        assert_eq!(pacer.wait(5_004 * MS, 0), 12 * MS);
        // 6 ms is: 5 of it make good 5 ms.
        assert_eq!(pacer.wait(5_010 * MS, 0), 7 * MS);
        assert_eq!(clock.now.get(), 10_017 * MS);
        assert_eq!(pacer.wait(5_100 * MS, 0), 0);
    }

    #[test]
    fn an_event_with_a_stamp_waits_for_the_slip_of_its_operation() {
        let clock = Fake { now: Cell::new(10_012 * MS), oversleep: 0 };
        let mut pacer = pacer(&clock, Pace::Original);
        let slip = pacer.wait(5_000 * MS, 0);
        assert_eq!(pacer.stamp(900_001 * MS, slip), 900_013 * MS);
        assert_eq!(pacer.wait(5_100 * MS, slip), 12 * MS, "though the pause took the slip back");
        assert_eq!(pacer.wait(5_101 * MS, 0), 12 * MS, "and what follows comes after");
    }

    #[test]
    fn operations_never_move_by_less_than_those_before_them() {
        let clock = Fake { now: Cell::new(10_000 * MS), oversleep: 0 };
        let mut pacer = pacer(&clock, Pace::Original);
        assert_eq!(pacer.wait(5_000 * MS, 0), 0);
        assert_eq!(pacer.issue(90_000), 90_000);
        assert_eq!(pacer.issue(20_000), 90_000);
        pacer.wait(5_100 * MS, 0);
        assert_eq!(pacer.issue(20_000), 20_000, "but for an idle pause in between");
    }

    #[test]
    fn scale_and_loops_move_calls_and_stamps_alike() {
        let clock = Fake { now: Cell::new(10_000 * MS), oversleep: 0 };
        let mut scaled = pacer(&clock, Pace::Scaled(0.5));
        scaled.begin_loop(3);
        assert_eq!(scaled.wait(5_008 * MS, 0), 0);
        assert_eq!(clock.now.get(), 10_000 * MS + 3 * 50 * MS + 4 * MS);
        assert_eq!(scaled.stamp(900_010 * MS, 0), 900_000 * MS + 3 * 50 * MS + 5 * MS);
        assert_eq!(scaled.stamp(0, 0), 0, "no stamp stays no stamp");

        let mut unpaced = pacer(&clock, Pace::Unpaced);
        assert_eq!(unpaced.wait(9_000 * MS, 0), 0);
        assert_eq!(unpaced.stamp(900_010 * MS, 7), 900_010 * MS);
        unpaced.begin_loop(1);
        assert_eq!(unpaced.stamp(900_010 * MS, 7), 900_110 * MS);
    }

    #[test]
    fn where_hosts_run_ahead_late_calls_are_made_good_and_move_no_stamps() {
        let clock = Fake { now: Cell::new(10_000 * MS), oversleep: 8 * MS };
        let mut pacer = pacer(&clock, Pace::Original).with_hosts_ahead(20 * MS);
        let behind = pacer.wait(5_001 * MS, 0);
        assert_eq!((behind, pacer.issue(behind)), (8 * MS, 0));
        // It catches up: the next is as late as a sleep makes it, and no later.
        assert_eq!(pacer.wait(5_003 * MS, 0), 6 * MS);
        assert_eq!(pacer.wait(5_040 * MS, 0), 8 * MS);
        // What is later than that is a pause.
        clock.now.set(clock.now.get() + 40 * MS);
        let behind = pacer.wait(5_041 * MS, 0);
        assert_eq!(pacer.issue(behind), behind);
        assert!(behind > 20 * MS, "{behind}");
    }
}
