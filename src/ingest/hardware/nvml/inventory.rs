//! All that the driver says of a host's GPUs at one moment, for who asks once.

use super::super::{Absent, Batch};
use super::health::look_once;
use super::{Library, is_refusal};
use crate::model::GpuFact;
use nvml_wrapper::enum_wrappers::device::{EccCounter, MemoryError, P2pCapabilitiesIndex, P2pStatus};
use nvml_wrapper::{cuda_driver_version_major, cuda_driver_version_minor};
use std::path::PathBuf;
use std::sync::Arc;

/// The GPUs of a host.
#[derive(Debug, Clone, Default)]
pub struct Inventory {
    /// The driver's version.
    pub driver: Option<String>,
    /// The newest CUDA that the driver can run, `13.0`.
    pub cuda: Option<String>,
    /// The GPUs that answer, in NVML's order.
    pub gpus: Vec<GpuState>,
}

/// One GPU.
#[derive(Debug, Clone, Default)]
pub struct GpuState {
    /// Its identity, health and links.
    pub fact: GpuFact,
    /// True if the driver keeps the GPU initialized while nobody uses it.
    pub is_persistent: Option<bool>,
    /// True if its memory corrects errors.
    pub has_ecc: Option<bool>,
    /// Memory errors over its whole life that were not corrected.
    pub ecc_uncorrected_ever: Option<u64>,
    /// Why it cannot read another GPU's memory, by the other's PCI address; `ok` where it can.
    pub p2p: Vec<(String, &'static str)>,
}

/// Asks the driver for everything, once.
///
/// # Errors
/// Why there is no driver or no GPU.
pub fn inventory(path: Option<&PathBuf>) -> Result<Inventory, Absent> {
    let library = Arc::new(Library::open(path)?);
    let cuda = library.nvml.sys_cuda_driver_version().ok();
    let mut found = Inventory {
        driver: library.nvml.sys_driver_version().ok(),
        cuda: cuda.map(|v| format!("{}.{}", cuda_driver_version_major(v), cuda_driver_version_minor(v))),
        gpus: Vec::new(),
    };
    let mut batch = Batch { host: String::new(), readings: Vec::new(), failures: 0 };
    for (gpu, device) in library.devices(&mut batch) {
        let Some(device) = device.filter(|d| d.pci_info().is_ok()) else { continue };
        let status = |other: u32| {
            let there = library.nvml.device_by_index(other).ok()?;
            match device.p2p_status(&there, P2pCapabilitiesIndex::Read) {
                Ok(status) => Some(reason(status)),
                Err(e) if is_refusal(&e) => None,
                Err(_) => Some("unknown"),
            }
        };
        let others = library.gpus.iter().filter(|o| o.index != gpu.index);
        found.gpus.push(GpuState {
            fact: look_once(&library, gpu, &device, &mut batch),
            is_persistent: device.is_in_persistent_mode().ok(),
            has_ecc: device.is_ecc_enabled().ok().map(|e| e.currently_enabled),
            ecc_uncorrected_ever: device
                .total_ecc_errors(MemoryError::Uncorrected, EccCounter::Aggregate)
                .ok(),
            p2p: others.filter_map(|o| Some((o.address.clone(), status(o.index)?))).collect(),
        });
    }
    Ok(found)
}

fn reason(status: P2pStatus) -> &'static str {
    match status {
        P2pStatus::Ok => "ok",
        P2pStatus::ChipsetNotSupported => "chipset not supported",
        P2pStatus::GpuNotSupported => "GPU not supported",
        P2pStatus::IohTopologyNotSupported => "not supported across this topology",
        P2pStatus::DisabledByRegkey => "disabled by a setting of the driver",
        P2pStatus::NotSupported => "not supported",
        P2pStatus::Unknown => "unknown",
    }
}
