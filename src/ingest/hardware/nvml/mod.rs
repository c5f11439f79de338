//! GPUs, by the driver's own library. Loaded at run time; without it, or without a GPU, its samplers are absent.

mod errors;
mod health;
mod inventory;
mod links;
mod raw;
mod traffic;

pub use inventory::{GpuState, Inventory, inventory};

use super::{Absent, Batch, Sampler};
use crate::ingest::files::number;
use crate::model::{PeerFact, pci_address};
use nvml_wrapper::Device;
use nvml_wrapper::enum_wrappers::device::{Clock, P2pCapabilitiesIndex, P2pStatus, TopologyLevel};
use nvml_wrapper::error::NvmlError;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The library's name.
const NAME: &str = "libnvidia-ml.so.1";

/// The facts of a GPU for as long as the driver lives.
#[derive(Debug)]
struct Gpu {
    index: u32,
    address: String,
    uuid: Option<String>,
    name: Option<String>,
    numa: Option<u32>,
    sm_max_mhz: Option<u32>,
    memory_bytes: Option<u64>,
    peers: Vec<PeerFact>,
}

/// The loaded library, and its GPUs.
#[derive(Debug)]
struct Library {
    nvml: nvml_wrapper::Nvml,
    gpus: Vec<Gpu>,
}

impl Library {
    fn open(path: Option<&PathBuf>) -> Result<Self, Absent> {
        let path = path.map_or_else(|| PathBuf::from(NAME), Clone::clone);
        let absent = |what: &str, e: &NvmlError| Absent(format!("{}: {what}: {e}", path.display()));
        let nvml = nvml_wrapper::Nvml::builder()
            .lib_path(path.as_os_str())
            .init()
            .map_err(|e| absent("cannot be used", &e))?;
        if let Err(e) = &nvml.lib().nvmlShutdown {
            let e = Absent(format!("{}: cannot be used: {e}", path.display()));
            // Its end would call what is not there.
            std::mem::forget(nvml);
            return Err(e);
        }
        let count = nvml.device_count().map_err(|e| absent("does not count its GPUs", &e))?;
        let mut gpus = Vec::new();
        let mut refused = None;
        for index in 0..count {
            match nvml.device_by_index(index).and_then(|d| Gpu::of(&d, index)) {
                Ok(gpu) => gpus.push(gpu),
                Err(e) => refused = Some((index, e)),
            }
        }
        if gpus.is_empty() {
            return Err(match refused {
                Some((index, e)) => absent(&format!("GPU {index} cannot be asked"), &e),
                None => Absent(format!("{} knows no GPU", path.display())),
            });
        }
        let peers: Vec<Vec<PeerFact>> = gpus.iter().map(|g| peers(&nvml, g, &gpus)).collect();
        gpus.iter_mut().zip(peers).for_each(|(g, p)| g.peers = p);
        Ok(Library { nvml, gpus })
    }

    /// The GPUs that answer; a lost one is a failure.
    fn devices<'a>(&'a self, batch: &mut Batch) -> Vec<(&'a Gpu, Option<Device<'a>>)> {
        let of = |g: &'a Gpu| {
            let device = self.nvml.device_by_index(g.index).ok();
            if device.is_none() {
                batch.failed();
            }
            (g, device)
        };
        self.gpus.iter().map(of).collect()
    }
}

impl Gpu {
    fn of(device: &Device<'_>, index: u32) -> Result<Self, NvmlError> {
        let bus = device.pci_info()?.bus_id;
        let address = pci_address(&bus).ok_or(NvmlError::Unknown)?;
        Ok(Gpu {
            index,
            uuid: device.uuid().ok(),
            name: device.name().ok(),
            // NVML's own answer is of hosts whose GPUs' memory is a node itself. Where there is none it is -1.
            numa: number(&Path::new("/sys/bus/pci/devices").join(&address).join("numa_node"))
                .and_then(|n| u32::try_from(n).ok()),
            address,
            sm_max_mhz: device.max_clock_info(Clock::SM).ok(),
            memory_bytes: device.memory_info().ok().map(|m| m.total),
            peers: Vec::new(),
        })
    }
}

/// The ways from a GPU to the others.
fn peers(nvml: &nvml_wrapper::Nvml, gpu: &Gpu, all: &[Gpu]) -> Vec<PeerFact> {
    let Ok(device) = nvml.device_by_index(gpu.index) else { return Vec::new() };
    let to = |other: &Gpu| {
        let there = nvml.device_by_index(other.index).ok()?;
        let can = |how| device.p2p_status(&there, how).ok().map(|s| s == P2pStatus::Ok);
        let (p2p, nvlink) = (can(P2pCapabilitiesIndex::Read), can(P2pCapabilitiesIndex::NvLink));
        let path = device.topology_common_ancestor(there).ok().map(|level| {
            let name = match level {
                TopologyLevel::Internal => "internal",
                TopologyLevel::Single => "switch",
                TopologyLevel::Multiple => "switches",
                TopologyLevel::HostBridge => "host-bridge",
                TopologyLevel::Node => "numa-node",
                TopologyLevel::System => "system",
            };
            name.to_owned()
        });
        Some(PeerFact { gpu: other.address.clone(), path, p2p, nvlink })
    };
    all.iter().filter(|o| o.index != gpu.index).filter_map(to).collect()
}

/// Loads the library when somebody asks, once for all.
#[derive(Debug)]
struct Driver {
    path: Option<PathBuf>,
    loaded: Mutex<Option<Arc<Library>>>,
}

impl Driver {
    fn library(&self) -> Result<Arc<Library>, Absent> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        match &*loaded {
            Some(library) => Ok(library.clone()),
            None => Ok(loaded.insert(Arc::new(Library::open(self.path.as_ref())?)).clone()),
        }
    }

    /// The next to ask loads it anew: the driver was taken away, or all GPUs were.
    fn forget(&self) {
        *self.loaded.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// NVIDIA's management library, from which several samplers read.
#[derive(Debug, Clone)]
pub struct Nvml {
    driver: Arc<Driver>,
}

impl Nvml {
    /// At a path, or where the loader finds it.
    pub fn new(path: Option<PathBuf>) -> Self {
        Nvml { driver: Arc::new(Driver { path, loaded: Mutex::new(None) }) }
    }

    /// The sampler of bytes over NVLink and PCIe.
    pub fn traffic(&self, period: Duration) -> Box<dyn Sampler> {
        Box::new(traffic::Sampled::new(self.driver.clone(), period))
    }

    /// Health and load; at every `states` whether the links are up, and at every `counters` what they and PCIe counted.
    pub fn health(
        &self,
        period: Duration,
        states: Option<Duration>,
        counters: Option<Duration>,
    ) -> Box<dyn Sampler> {
        Box::new(health::Sampled::new(self.driver.clone(), period, states, counters))
    }

    /// The driver's errors.
    pub fn errors(&self, period: Duration) -> Box<dyn Sampler> {
        Box::new(errors::Sampled::new(self.driver.clone(), period))
    }
}

/// An answer, if there is one. That a GPU cannot tell something, or that this user may not ask, is no failure.
fn told<T>(answer: Result<T, NvmlError>, batch: &mut Batch) -> Option<T> {
    match answer {
        Ok(t) => Some(t),
        Err(e) => {
            if !is_refusal(&e) {
                batch.failed();
            }
            None
        }
    }
}

fn is_refusal(e: &NvmlError) -> bool {
    matches!(
        e,
        NvmlError::NotSupported
            | NvmlError::NoPermission
            | NvmlError::FailedToLoadSymbol(_)
            | NvmlError::FunctionNotFound
            | NvmlError::NotFound
            | NvmlError::InvalidArg
    )
}
