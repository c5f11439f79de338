//! The GPUs' load, as NVML reports it.
//!
//! Measured on 2 x H200 (driver 580.159.04): a GPU whose only kernel is a waiting all-reduce is busy 100 % of the time,
//! and uses 0 % of its memory's bandwidth. Matrix products use 15 % or more of it.

use super::noise;
use super::{Simulation, State};
use ringwatch::model::{Fact, GpuFact, Update};

/// How long something was on, in ns.
#[derive(Debug, Clone, Copy, Default)]
struct Meter {
    since_ns: Option<u64>,
    sum_ns: u64,
}

impl Meter {
    fn set(&mut self, on: bool, t: u64) {
        self.sum_ns = self.at(t);
        self.since_ns = on.then_some(t);
    }

    fn at(&self, t: u64) -> u64 {
        self.sum_ns + self.since_ns.map_or(0, |from| t.saturating_sub(from))
    }
}

/// What a rank's GPU did so far.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Load {
    /// A kernel was on it.
    busy: Meter,
    /// A kernel that uses the memory was on it.
    computing: Meter,
    /// It moved the data of operations, in ns.
    moving_ns: u64,
    /// `busy` at the last pass: NVML reports the share of a sixth of a second.
    busy_before_ns: u64,
    /// `computing` and `moving_ns` at the last reading.
    used_before_ns: u64,
}

impl Simulation {
    /// Takes what is on a rank's streams now.
    pub(super) fn load_changed(&mut self, rank: u32, t: u64) {
        let p = &mut self.processes[rank as usize];
        let on = |computes: bool| p.streams.values().any(|s| s.running > 0 && (s.computes || !computes));
        let (busy, computing) = (on(false), on(true));
        p.load.busy.set(busy, t);
        p.load.computing.set(computing, t);
    }

    /// A rank's GPU moved data for so long, in ns.
    pub(super) fn moved_data(&mut self, rank: u32, for_ns: u64) {
        self.processes[rank as usize].load.moving_ns += for_ns;
    }

    /// The readings of the GPUs' load, where they are due.
    pub(super) fn load_readings(&mut self, now: u64) -> Vec<Update> {
        let Some(every) = self.case.load_every else { return Vec::new() };
        let mut out = Vec::new();
        let is_due = now >= self.load_read_at + every.0;
        let window_ns = now.saturating_sub(self.last_look).max(1);
        let period_ns = now.saturating_sub(self.load_read_at).max(1);
        for rank in 0..self.case.ranks {
            let p = &mut self.processes[rank as usize];
            let busy_ns = p.load.busy.at(now);
            let busy = busy_ns.saturating_sub(p.load.busy_before_ns) as f64 / window_ns as f64;
            p.load.busy_before_ns = busy_ns;
            if !is_due {
                continue;
            }
            let used_ns = p.load.computing.at(now) + p.load.moving_ns;
            let used = used_ns.saturating_sub(p.load.used_before_ns) as f64 / period_ns as f64;
            p.load.used_before_ns = used_ns;
            out.push(self.load_reading(rank, now, busy, used));
        }
        if is_due {
            self.load_read_at = now;
        }
        // A node's agent is gone with it.
        out.retain(|u| !matches!(u, Update::Hardware(r) if Some(&r.host) == self.lost_host(now).as_ref()));
        out
    }

    fn load_reading(&mut self, rank: u32, now: u64, busy: f64, used: f64) -> Update {
        // Kernels use a few hundredths of the bandwidth or nearly all of it.
        let intensity = 0.03 + noise::mix(self.seed ^ u64::from(rank)) as f64 / u64::MAX as f64 * 0.7;
        let dead = matches!(self.processes[rank as usize].state, State::Dead(_));
        let gpu = GpuFact {
            gpu: self.gpu_address(rank),
            index: Some(rank % 8),
            name: Some("NVIDIA H200".to_owned()),
            sm_mhz: Some(1980),
            sm_max_mhz: Some(1980),
            // NVML reports hundredths.
            busy: Some((busy.min(1.0) * 100.0).round() / 100.0),
            memory_active: Some(if dead { 0.0 } else { (used.min(1.0) * intensity * 1e4).round() / 1e4 }),
            ..GpuFact::default()
        };
        self.reading(rank, now, Fact::Gpu(Box::new(gpu)))
    }
}
