//! A GPU's identity, health and load.

use super::super::{Absent, Batch, Sampler};
use super::links::{Links, Wanted};
use super::raw::{GpmSample, remapped_rows};
use super::{Driver, Gpu, Library, told};
use crate::model::{Fact, GpuFact, PcieFact, Throttle};
use nvml_wrapper::Device;
use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{
    Clock, EccCounter, MemoryError, RetirementCause, TemperatureSensor,
};
use nvml_wrapper::enums::device::UsedGpuMemory;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// Metrics of the performance monitor, in per cent: multiprocessors, tensor cores and memory bandwidth in use.
const ACTIVE: &[u32] = &[2, 5, 10];

/// The facts that are asked for less often than the rest, because the driver takes long to answer: how often, absent
/// where it is left out.
#[derive(Debug, Clone, Copy)]
struct Seldom {
    states: Option<Duration>,
    counters: Option<Duration>,
}

/// The state of a GPU between two polls.
#[derive(Default)]
struct Before {
    sample: Option<GpmSample>,
    links: Links,
    pcie_replays: Option<u64>,
    /// When it was last asked for its links' states.
    states_ns: Option<u64>,
    /// The same of counters.
    counters_ns: Option<u64>,
}

impl Before {
    /// The facts that are due; they are asked for then.
    fn wanted(&mut self, seldom: Seldom, now_ns: u64) -> Wanted {
        let due = |every: Option<Duration>, asked: &mut Option<u64>| {
            let every_ns = every.map(|d| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX));
            let is_due = every_ns.is_some_and(|e| asked.is_none_or(|t| now_ns.saturating_sub(t) >= e));
            if is_due {
                *asked = Some(now_ns);
            }
            is_due
        };
        Wanted {
            states: due(seldom.states, &mut self.states_ns),
            counters: due(seldom.counters, &mut self.counters_ns),
        }
    }
}

/// The sampler.
pub(super) struct Sampled {
    driver: Arc<Driver>,
    period: Duration,
    seldom: Seldom,
    library: Option<Arc<Library>>,
    before: Vec<Before>,
}

impl Sampled {
    /// Of all GPUs; the states of their links, and the counters of links and PCIe, have periods of their own.
    pub(super) fn new(
        driver: Arc<Driver>,
        period: Duration,
        states: Option<Duration>,
        counters: Option<Duration>,
    ) -> Self {
        Sampled { driver, period, seldom: Seldom { states, counters }, library: None, before: Vec::new() }
    }
}

fn throttled(reasons: ThrottleReasons) -> BTreeSet<Throttle> {
    let known = [
        (ThrottleReasons::SW_POWER_CAP, Throttle::PowerCap),
        (ThrottleReasons::HW_SLOWDOWN, Throttle::Hardware),
        (ThrottleReasons::SW_THERMAL_SLOWDOWN, Throttle::ThermalSoftware),
        (ThrottleReasons::HW_THERMAL_SLOWDOWN, Throttle::ThermalHardware),
        (ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN, Throttle::PowerBrake),
        (ThrottleReasons::SYNC_BOOST, Throttle::SyncBoost),
    ];
    known.into_iter().filter(|(bit, _)| reasons.contains(*bit)).map(|(_, t)| t).collect()
}

fn pcie(d: &Device<'_>, replays: Option<u64>, batch: &mut Batch) -> Option<PcieFact> {
    let fact = PcieFact {
        generation: told(d.current_pcie_link_gen(), batch),
        generation_max: told(d.max_pcie_link_gen(), batch),
        width: told(d.current_pcie_link_width(), batch),
        width_max: told(d.max_pcie_link_width(), batch),
        replays,
    };
    (fact != PcieFact::default()).then_some(fact)
}

fn watts(milliwatts: u32) -> f64 {
    f64::from(milliwatts) / 1e3
}

/// Of the performance monitor: multiprocessors, tensor cores and memory bandwidth, as shares.
fn active(library: &Arc<Library>, d: &Device<'_>, before: &mut Option<GpmSample>) -> [Option<f64>; 3] {
    let now = d.gpm_support().unwrap_or(false).then(|| GpmSample::take(library, d).ok()).flatten();
    let shares = now.as_ref().zip(before.as_ref()).and_then(|(n, b)| n.since(b, ACTIVE).ok());
    *before = now;
    let share = |i: usize| shares.as_ref()?.get(i).copied().flatten().map(|p| (p / 100.0).min(1.0));
    [share(0), share(1), share(2)]
}

fn look(
    library: &Arc<Library>,
    gpu: &Gpu,
    d: &Device<'_>,
    before: &mut Before,
    wanted: Wanted,
    batch: &mut Batch,
) -> GpuFact {
    let rows = told(remapped_rows(d), batch);
    let retired = |cause, batch: &mut Batch| told(d.retired_pages(cause), batch).map(|p| p.len());
    let retired = match rows {
        Some(_) => None,
        None => retired(RetirementCause::MultipleSingleBitEccErrors, batch)
            .zip(retired(RetirementCause::DoubleBitEccError, batch))
            .and_then(|(a, b)| u32::try_from(a + b).ok()),
    };
    let used = |u| match u {
        UsedGpuMemory::Used(bytes) => Some(bytes),
        UsedGpuMemory::Unavailable => None,
    };
    let use_of = told(d.utilization_rates(), batch);
    if wanted.counters {
        before.pcie_replays = told(d.pcie_replay_counter(), batch).map(u64::from);
    }
    let [sm_active, tensor_active, memory_active] = active(library, d, &mut before.sample);
    GpuFact {
        gpu: gpu.address.clone(),
        index: Some(gpu.index),
        uuid: gpu.uuid.clone(),
        name: gpu.name.clone(),
        numa: gpu.numa,
        links: before.links.look(d, wanted, batch),
        peers: gpu.peers.clone(),
        pcie: pcie(d, before.pcie_replays, batch),
        sm_mhz: told(d.clock_info(Clock::SM), batch),
        sm_max_mhz: gpu.sm_max_mhz,
        memory_mhz: told(d.clock_info(Clock::Memory), batch),
        power_w: told(d.power_usage(), batch).map(watts),
        power_limit_w: told(d.enforced_power_limit(), batch).map(watts),
        temperature_c: told(d.temperature(TemperatureSensor::Gpu), batch).map(f64::from),
        throttled: told(d.current_throttle_reasons(), batch).map(throttled),
        busy: use_of.map(|u| (f64::from(u.gpu) / 100.0).min(1.0)),
        sm_active,
        memory_active,
        tensor_active,
        memory_used_bytes: told(d.memory_info(), batch).map(|m| m.used),
        memory_bytes: gpu.memory_bytes,
        ecc_corrected: told(d.total_ecc_errors(MemoryError::Corrected, EccCounter::Volatile), batch),
        ecc_uncorrected: told(d.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile), batch),
        remapped_rows: rows.map(|(corrected, uncorrected, ..)| (corrected, uncorrected)),
        retired_pages: retired,
        remap_pending: rows.map(|(_, _, pending, _)| pending),
        remap_failed: rows.map(|(_, _, _, failed)| failed),
        processes: told(d.running_compute_processes(), batch)
            .map(|all| all.into_iter().map(|p| (p.pid, used(p.used_gpu_memory))).collect()),
    }
}

/// Everything of a GPU, for who asks once.
pub(super) fn look_once(library: &Arc<Library>, gpu: &Gpu, d: &Device<'_>, batch: &mut Batch) -> GpuFact {
    let all = Wanted { states: true, counters: true };
    look(library, gpu, d, &mut Before::default(), all, batch)
}

impl Sampler for Sampled {
    fn name(&self) -> &'static str {
        "gpu"
    }

    fn period(&self) -> Duration {
        self.period
    }

    fn sample(&mut self, now_ns: u64, batch: &mut Batch) -> Result<(), Absent> {
        let library = self.driver.library()?;
        if !self.library.as_ref().is_some_and(|l| Arc::ptr_eq(l, &library)) {
            self.before = library.gpus.iter().map(|_| Before::default()).collect();
            self.library = Some(library.clone());
        }
        let mut answered = false;
        for ((gpu, device), before) in library.devices(batch).into_iter().zip(&mut self.before) {
            // One that fell off the bus still has a handle and answers nothing.
            let Some(device) = device.filter(|d| d.pci_info().is_ok()) else { continue };
            answered = true;
            let wanted = before.wanted(self.seldom, now_ns);
            let fact = look(&library, gpu, &device, before, wanted, batch);
            batch.tell(now_ns, Fact::Gpu(Box::new(fact)));
        }
        if !answered {
            self.driver.forget();
            self.library = None;
            self.before.clear();
            return Err(Absent("no GPU answers any more; dmesg may tell why".to_owned()));
        }
        Ok(())
    }
}
