//! The resources that a process went without, second by second: lateness is compared with the second in which it
//! happened.

use crate::model::HostFact;
use std::collections::VecDeque;

/// Looks kept, about a second each.
const KEPT: usize = 64;
/// Moments kept at which kills were counted.
const KILLS_KEPT: usize = 64;
/// Equal shares within this time, in ns, are one measurement.
const SAME_NS: u64 = 500_000_000;

/// Shares of time in which a process could not work, 0 to 1. Absent is not known.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct HostPressure {
    /// It wanted a CPU and had none.
    pub cpu_starved: Option<f64>,
    /// One of NCCL's own threads wanted a CPU and had none.
    pub nccl_starved: Option<f64>,
    /// Its cgroup's quota kept it from the CPU.
    pub cpu_throttled: Option<f64>,
    /// Tasks of its cgroup stood still for want of memory.
    pub memory_pressure: Option<f64>,
}

impl HostPressure {
    fn of(fact: &HostFact) -> Self {
        HostPressure {
            cpu_starved: fact.cpu_starved,
            nccl_starved: fact.nccl_starved,
            cpu_throttled: fact.cpu_throttled,
            memory_pressure: fact.memory_pressure,
        }
    }

    /// The worse of both, each share by itself.
    fn worst(self, other: Self) -> Self {
        let max = |a: Option<f64>, b: Option<f64>| match (a, b) {
            (Some(a), Some(b)) => Some(a.max(b)),
            (a, b) => a.or(b),
        };
        HostPressure {
            cpu_starved: max(self.cpu_starved, other.cpu_starved),
            nccl_starved: max(self.nccl_starved, other.nccl_starved),
            cpu_throttled: max(self.cpu_throttled, other.cpu_throttled),
            memory_pressure: max(self.memory_pressure, other.memory_pressure),
        }
    }
}

/// The strains of a process over the last minute.
#[derive(Debug, Clone, Default)]
pub struct HostPressures {
    looks: VecDeque<(u64, HostPressure)>,
    /// Processes of its cgroup that had been killed for want of memory at the last look.
    killed: Option<u64>,
    /// When that rose, and by how much.
    kills: VecDeque<(u64, u64)>,
}

impl HostPressures {
    /// Takes what the host says. Facts that come between two measurements say the same again.
    pub(super) fn take(&mut self, fact: &HostFact) {
        let more = fact.oom_kills.zip(self.killed).map_or(0, |(now, then)| now.saturating_sub(then));
        self.killed = fact.oom_kills.or(self.killed);
        if more > 0 {
            if self.kills.len() == KILLS_KEPT {
                self.kills.pop_front();
            }
            self.kills.push_back((fact.at_ns, more));
        }
        let strain = HostPressure::of(fact);
        let again =
            |(at, last): &(u64, HostPressure)| *last == strain && fact.at_ns.saturating_sub(*at) < SAME_NS;
        if strain == HostPressure::default() || self.looks.back().is_some_and(again) {
            return;
        }
        if self.looks.len() == KEPT {
            self.looks.pop_front();
        }
        self.looks.push_back((fact.at_ns, strain));
    }

    /// The worst of what was measured between two moments, host monotonic ns. A look tells of the second before it.
    pub fn worst(&self, from_ns: u64, to_ns: u64) -> HostPressure {
        let within = self.looks.iter().filter(|(t, _)| (from_ns..=to_ns).contains(t));
        within.fold(HostPressure::default(), |worst, (_, s)| worst.worst(*s))
    }

    /// Processes of its cgroup whose killing for want of memory was counted between two moments, host monotonic ns. Those
    /// that had been killed when it was first looked at are nobody's.
    pub fn oom_kills(&self, from_ns: u64, to_ns: u64) -> u64 {
        let within = self.kills.iter().filter(|(t, _)| (from_ns..=to_ns).contains(t));
        within.fold(0, |all, (_, n)| all.saturating_add(*n))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::SegmentId;

    fn look(at_ns: u64, starved: Option<f64>, kills: u64) -> HostFact {
        HostFact { cpu_starved: starved, oom_kills: Some(kills), ..HostFact::new(SegmentId(1), at_ns) }
    }

    #[test]
    fn the_worst_of_a_span_is_told() {
        let mut s = HostPressures::default();
        for (at, starved) in [(1, Some(0.1)), (2, Some(0.7)), (3, Some(0.2)), (4, None)] {
            s.take(&HostFact { memory_pressure: Some(0.05), ..look(at, starved, 3) });
        }
        assert_eq!(s.worst(0, 10).cpu_starved, Some(0.7));
        assert_eq!(s.worst(3, 10).cpu_starved, Some(0.2));
        assert_eq!(s.worst(4, 10).cpu_starved, None, "absent is not zero");
        assert_eq!(s.worst(4, 10).memory_pressure, Some(0.05));
    }

    #[test]
    fn kills_belong_to_the_moment_at_which_they_were_counted() {
        let mut s = HostPressures::default();
        for (at, kills) in [(4, 3), (5, 4), (6, 4), (9, 6)] {
            s.take(&look(at, None, kills));
        }
        s.take(&HostFact { oom_kills: None, ..look(10, None, 0) });
        assert_eq!(s.oom_kills(0, 4), 0, "those before were others");
        assert_eq!((s.oom_kills(0, 10), s.oom_kills(5, 8), s.oom_kills(6, 10)), (3, 1, 2));
        assert_eq!(s.oom_kills(10, 20), 0, "what is not known any more has not risen");
        (0..100).for_each(|n| s.take(&look(20 + n, None, 7 + n)));
        assert_eq!((s.oom_kills(0, 10), s.oom_kills(0, 200)), (0, KILLS_KEPT as u64));
    }
}
