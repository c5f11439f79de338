//! A machine of formulas: known times with noise, so that tests know what a search has to find.

use super::{Arm, Machine, Times};
use crate::tune::Selection;
use std::time::Duration;

/// A generator of its own: the same numbers everywhere.
#[derive(Debug, Clone)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5bf0_3635)
    }

    /// Above 0 and up to 1.
    pub(crate) fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 11) as f64 + 1.0) / (1u64 << 53) as f64
    }

    /// Mean 0, deviation 1.
    pub(crate) fn normal(&mut self) -> f64 {
        let (radius, angle) = (self.uniform(), self.uniform());
        (-2.0 * radius.ln()).sqrt() * (angle * std::f64::consts::TAU).cos()
    }
}

/// The conditions under which an operation runs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Conditions {
    pub(crate) bytes: u64,
    pub(crate) has_tuner: bool,
    pub(crate) min_channels: Option<u32>,
    pub(crate) entry: Selection,
    pub(crate) channels: Option<u8>,
}

/// The machine.
pub(crate) struct Simulated {
    pub(crate) sizes: Vec<u64>,
    pub(crate) time_us: fn(&Conditions) -> f64,
    /// Deviations of the logarithm of a time: of one repeat, and of all repeats of one set of communicators.
    pub(crate) noise: (f64, f64),
    pub(crate) random: Random,
    pub(crate) elapsed: Duration,
    pub(crate) rounds: usize,
    /// An arm with this number of channels fails.
    pub(crate) fails: Option<u8>,
    /// Rules give wrong data, where data are checked.
    pub(crate) spoils: bool,
}

impl Simulated {
    pub(crate) fn new(sizes: &[u64], time_us: fn(&Conditions) -> f64, noise: (f64, f64), seed: u64) -> Self {
        let random = Random::new(seed);
        let elapsed = Duration::ZERO;
        Simulated {
            sizes: sizes.to_vec(),
            time_us,
            noise,
            random,
            elapsed,
            rounds: 0,
            fails: None,
            spoils: false,
        }
    }

    fn times(&mut self, arm: &Arm, repeats: u32) -> Result<Times, String> {
        if self.fails.is_some_and(|n| arm.rules.iter().any(|r| r.channels == Some(n))) {
            return Err("the communicator was not made".to_owned());
        }
        let mut all = Vec::new();
        for bytes in self.sizes.clone() {
            let rule = arm.rules.iter().find(|r| (r.bytes.min..=r.bytes.max).contains(&bytes));
            let conditions = Conditions {
                bytes,
                has_tuner: arm.has_tuner,
                min_channels: arm.min_channels,
                entry: rule.map(|r| r.choose).unwrap_or_default(),
                channels: rule.and_then(|r| r.channels),
            };
            let shared = self.random.normal() * self.noise.1;
            let one = |random: &mut Random, sd: f64, time: f64| time * (shared + sd * random.normal()).exp();
            let time_ns = (self.time_us)(&conditions) * 1000.0;
            all.push((0..2 * repeats).map(|_| one(&mut self.random, self.noise.0, time_ns)).collect());
        }
        Ok(all)
    }
}

impl Machine for Simulated {
    type Error = std::convert::Infallible;

    fn round(
        &mut self,
        arms: &[Arm],
        repeats: u32,
        is_checked: bool,
    ) -> Result<Vec<Result<Times, String>>, Self::Error> {
        self.rounds += 1;
        self.elapsed += Duration::from_secs(3) + Duration::from_millis(500) * arms.len() as u32;
        let is_wrong = |a: &Arm| is_checked && self.spoils && !a.rules.is_empty();
        let wrong: Vec<bool> = arms.iter().map(is_wrong).collect();
        let times = |(arm, is_wrong): (&Arm, bool)| {
            if is_wrong { Err("5 elements were wrong".to_owned()) } else { self.times(arm, repeats) }
        };
        Ok(arms.iter().zip(wrong).map(times).collect())
    }

    fn elapsed(&self) -> Duration {
        self.elapsed
    }
}
