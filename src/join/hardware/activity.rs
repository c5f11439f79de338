//! The activity of a GPU: it computes, only waits in a kernel, or is idle.
//!
//! Measured on 2 x H200 (driver 580.159.04, NCCL 2.28): a GPU whose only kernel is an all-reduce that waits for another
//! rank is busy 100 % of the time and uses 0 % of its memory's bandwidth. Matrix products use 15 % or more of it.

use super::Hardware;

/// Readings within this time are compared, in ns: three of those that agents take every two seconds.
const COMPARED_NS: u64 = 7_000_000_000;
/// A newest reading older than this, in ns, says nothing about now.
const FRESH_NS: u64 = 4_000_000_000;
/// Fewer readings than this say nothing.
const READINGS: usize = 3;
/// A GPU with a kernel on it for this share of the time never lacks one.
const BUSY: f64 = 0.95;
/// A GPU that uses less than this share of its memory's bandwidth neither computes nor moves data.
const UNUSED: f64 = 0.01;

/// The activity of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activity {
    /// A kernel is on it all the time and uses no memory: it waits for something.
    Waiting,
    /// A kernel is on it and uses memory.
    Computing,
    /// No kernel is on it.
    Idle,
}

fn classify(busy: f64, memory_active: f64) -> Option<Activity> {
    if busy <= 1.0 - BUSY {
        return Some(Activity::Idle);
    }
    if busy < BUSY {
        return None;
    }
    Some(if memory_active < UNUSED { Activity::Waiting } else { Activity::Computing })
}

impl Hardware {
    /// The activity of a busy GPU before its newest reading, if that is younger than a moment and says something about now.
    /// Absent where it was not busy all the time.
    pub fn busy_since(&self, host: &str, gpu: &str, since_ns: u64, now_ns: u64) -> Option<Activity> {
        let newest = self.moments(host, gpu).next_back().filter(|m| m.at_ns > since_ns)?;
        if now_ns >= newest.at_ns.saturating_add(FRESH_NS) {
            return None;
        }
        classify(newest.busy?, newest.memory_active?).filter(|a| *a != Activity::Idle)
    }

    /// True for a GPU that is read again and again, and of which the next reading is the first one after a moment.
    pub fn awaits_reading(&self, host: &str, gpu: &str, since_ns: u64, now_ns: u64) -> bool {
        let newest =
            self.moments(host, gpu).next_back().filter(|m| m.busy.is_some() && m.memory_active.is_some());
        newest.is_some_and(|m| m.at_ns <= since_ns && now_ns < m.at_ns.saturating_add(FRESH_NS))
    }

    /// The activity of a GPU in the last seconds. Absent where it was not read, or did more than one thing.
    pub fn activity(&self, host: &str, gpu: &str, now_ns: u64) -> Option<Activity> {
        let newest_ns = self.moments(host, gpu).next_back()?.at_ns;
        // Another host's clock may be ahead of the observer's.
        let from_ns = now_ns.max(newest_ns).saturating_sub(COMPARED_NS);
        let recent = self.moments(host, gpu).rev().take_while(|m| m.at_ns > from_ns);
        let all: Vec<Activity> =
            recent.map(|m| classify(m.busy?, m.memory_active?)).collect::<Option<_>>()?;
        let first = *all.first()?;
        let is_enough = all.len() >= READINGS && now_ns < newest_ns.saturating_add(FRESH_NS);
        (is_enough && all.iter().all(|a| *a == first)).then_some(first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Fact, GpuFact, Reading};

    const S: u64 = 1_000_000_000;
    const GPU: &str = "0000:1a:00.0";

    /// Readings every two seconds of what is busy and of what uses memory, the last of them at 20 s.
    fn read(all: &[(f64, Option<f64>)]) -> Hardware {
        let mut hardware = Hardware::default();
        for ((busy, memory_active), back) in all.iter().zip((0..all.len() as u64).rev()) {
            let fact = GpuFact {
                gpu: GPU.to_owned(),
                busy: Some(*busy),
                memory_active: *memory_active,
                ..GpuFact::default()
            };
            let at_ns = (20 - 2 * back) * S;
            hardware.take(Reading { host: "a".to_owned(), at_ns, fact: Fact::Gpu(Box::new(fact)) });
        }
        hardware
    }

    #[test]
    fn three_readings_tell_what_a_gpu_does() {
        let of = |reading: (f64, Option<f64>)| read(&[reading; 3]).activity("a", GPU, 21 * S);
        assert_eq!(of((1.0, Some(0.0))), Some(Activity::Waiting));
        assert_eq!(of((0.97, Some(0.15))), Some(Activity::Computing));
        assert_eq!(of((0.0, Some(0.0))), Some(Activity::Idle));
        assert_eq!(of((0.5, Some(0.0))), None);
        assert_eq!(of((1.0, None)), None, "of GPUs without these counters nothing is known");
    }

    #[test]
    fn few_or_old_or_mixed_readings_tell_nothing() {
        let waits = (1.0, Some(0.0));
        assert_eq!(read(&[waits; 2]).activity("a", GPU, 21 * S), None);
        assert_eq!(read(&[waits; 3]).activity("a", GPU, 25 * S), None);
        assert_eq!(read(&[waits, (1.0, Some(0.2)), waits]).activity("a", GPU, 21 * S), None);
        assert_eq!(read(&[waits; 3]).activity("b", GPU, 21 * S), None);
    }
}
