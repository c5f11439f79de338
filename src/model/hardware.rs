//! The machine under a job: GPUs, their links, network ports and the host. Absent is not known, never zero.

use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// The reading of one thing by one sampler.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Reading {
    /// The host it was read on.
    pub host: String,
    /// When, host monotonic ns.
    pub at_ns: u64,
    /// The fact that was read.
    pub fact: Fact,
}

/// The kinds of thing that are read.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fact {
    /// A GPU's identity, health and load.
    Gpu(Box<GpuFact>),
    /// The bytes over a GPU's wires.
    Traffic(Traffic),
    /// The driver reported an error.
    Xid(Xid),
    /// The driver reported something else that matters.
    Alarm(Alarm),
    /// An RDMA port.
    Port(PortFact),
    /// A network interface.
    Interface(InterfaceFact),
    /// The host itself.
    Node(NodeFact),
    /// The devices that were given to containers.
    Pods(PodsFact),
    /// A sampler about itself.
    Sampler(SamplerFact),
}

/// A GPU at one moment. Counters count since the driver was loaded.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GpuFact {
    /// PCI address as NCCL writes it, `0000:00:09.0`.
    pub gpu: String,
    /// NVML's index.
    pub index: Option<u32>,
    /// Its unique name.
    pub uuid: Option<String>,
    /// The product, `NVIDIA H200`.
    pub name: Option<String>,
    /// The NUMA node it hangs on.
    pub numa: Option<u32>,
    /// Its NVLinks, by number.
    pub links: Vec<LinkFact>,
    /// The other GPUs of the host, and the way to each.
    pub peers: Vec<PeerFact>,
    /// Its way to the host.
    pub pcie: Option<PcieFact>,
    /// Clock of its multiprocessors in MHz.
    pub sm_mhz: Option<u32>,
    /// The highest clock its multiprocessors can have, in MHz.
    pub sm_max_mhz: Option<u32>,
    /// Clock of its memory in MHz.
    pub memory_mhz: Option<u32>,
    /// Power drawn in W.
    pub power_w: Option<f64>,
    /// Power allowed in W.
    pub power_limit_w: Option<f64>,
    /// Temperature in degrees Celsius.
    pub temperature_c: Option<f64>,
    /// Why its clocks are held down.
    pub throttled: Option<BTreeSet<Throttle>>,
    /// Share of time with a kernel on it, 0 to 1.
    pub busy: Option<f64>,
    /// Share of its multiprocessors in use, 0 to 1.
    pub sm_active: Option<f64>,
    /// Share of its memory bandwidth in use, 0 to 1.
    pub memory_active: Option<f64>,
    /// Share of its tensor cores in use, 0 to 1.
    pub tensor_active: Option<f64>,
    /// Memory in use, in bytes.
    pub memory_used_bytes: Option<u64>,
    /// Memory it has, in bytes.
    pub memory_bytes: Option<u64>,
    /// Memory errors that were corrected.
    pub ecc_corrected: Option<u64>,
    /// Memory errors that were not.
    pub ecc_uncorrected: Option<u64>,
    /// Rows of memory replaced after corrected and after uncorrected errors.
    pub remapped_rows: Option<(u32, u32)>,
    /// Pages taken out of use, on GPUs that replace no rows.
    pub retired_pages: Option<u32>,
    /// Rows wait to be replaced at the next reset.
    pub remap_pending: Option<bool>,
    /// Replacing rows failed.
    pub remap_failed: Option<bool>,
    /// Processes that compute on it, pids as the host numbers them, and the bytes they hold.
    pub processes: Option<Vec<(u32, Option<u64>)>>,
}

/// One NVLink of a GPU.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LinkFact {
    /// Its number.
    pub link: u32,
    /// True when it is up.
    pub up: Option<bool>,
    /// Speed in MB/s, one direction.
    pub speed_mb_per_s: Option<u64>,
    /// Generation of NVLink.
    pub version: Option<u32>,
    /// The kind of its other end.
    pub remote: Option<Remote>,
    /// Packets sent again.
    pub replays: Option<u64>,
    /// Times the link had to recover.
    pub recoveries: Option<u64>,
    /// Checksum errors.
    pub crc_errors: Option<u64>,
}

/// The other end of a link.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Remote {
    /// `gpu`, `switch`, `cpu`.
    pub kind: String,
    /// PCI address.
    pub address: Option<String>,
}

/// The way from a GPU to another one of its host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PeerFact {
    /// PCI address of the other GPU as NCCL writes it.
    pub gpu: String,
    /// The distance of the two on PCIe: `internal`, `switch`, `switches`, `host-bridge`, `numa-node`, `system`.
    pub path: Option<String>,
    /// True where one may read the other's memory.
    pub p2p: Option<bool>,
    /// True where it does so over NVLink.
    pub nvlink: Option<bool>,
}

/// A GPU's way to the host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PcieFact {
    /// Generation now; an idle GPU may lower it.
    pub generation: Option<u32>,
    /// The highest generation that GPU and slot can have.
    pub generation_max: Option<u32>,
    /// Lanes now.
    pub width: Option<u32>,
    /// The most lanes that GPU and slot can have.
    pub width_max: Option<u32>,
    /// Packets sent again.
    pub replays: Option<u64>,
}

/// Why a GPU's clocks are held down, NVML's reasons as far as they are trouble.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Throttle {
    /// The software power cap.
    PowerCap,
    /// The hardware slowed down: temperature, power brake or a failing supply.
    Hardware,
    /// Software found it, or its memory, too hot.
    ThermalSoftware,
    /// Hardware found it too hot.
    ThermalHardware,
    /// An external power brake.
    PowerBrake,
    /// It keeps in step with other GPUs of its sync group.
    SyncBoost,
}

/// Bytes that went over a GPU's wires between two moments.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Traffic {
    /// PCI address as NCCL writes it.
    pub gpu: String,
    /// The beginning of the time it is of, host monotonic ns; the reading's moment is the end.
    pub from_ns: u64,
    /// Over all its NVLinks.
    pub nvlink: Option<Moved>,
    /// Over each, by number, where that was read.
    pub links: Vec<(u32, Moved)>,
    /// Over PCIe.
    pub pcie: Option<Moved>,
}

/// Bytes in both directions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Moved {
    /// Sent.
    pub tx_bytes: f64,
    /// Received.
    pub rx_bytes: f64,
}

/// An error that the driver reported.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Xid {
    /// PCI address as NCCL writes it.
    pub gpu: String,
    /// NVIDIA's number.
    pub code: u64,
}

/// Something that the driver reported of a GPU and that is no Xid.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Alarm {
    /// PCI address as NCCL writes it.
    pub gpu: String,
    /// What.
    pub kind: AlarmKind,
}

/// The events of NVML that mean trouble, beside Xids.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AlarmKind {
    /// Memory with errors was taken out of use.
    MemoryRetired,
    /// Memory with errors could not be taken out of use.
    RetirementFailed,
    /// Poisoned data was met and contained.
    PoisonContained,
    /// Poisoned data was met and not contained.
    PoisonFatal,
    /// The GPU can no longer be used.
    Unavailable,
    /// The driver asks for a recovery: a reset of the GPU or a restart of the host.
    RecoveryNeeded,
}

/// An RDMA port. Counters count since the driver was loaded.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PortFact {
    /// The device, `mlx5_0`.
    pub device: String,
    /// Its port, from 1.
    pub port: u32,
    /// PCI address of the device.
    pub address: Option<String>,
    /// True when it is active.
    pub up: Option<bool>,
    /// Speed in Mb/s.
    pub speed_mbit_per_s: Option<u64>,
    /// Bytes sent.
    pub tx_bytes: Option<u64>,
    /// Bytes received.
    pub rx_bytes: Option<u64>,
    /// Packets sent again: time-outs, sequence errors and losses that the sender noticed.
    pub retransmits: Option<u64>,
    /// Packets that came out of order.
    pub out_of_order: Option<u64>,
    /// Packets that carried a congestion mark, or notices of one that came.
    pub congestion: Option<u64>,
    /// Errors of symbols, links and integrity.
    pub errors: Option<u64>,
    /// Times the link went down.
    pub downs: Option<u64>,
}

/// A network interface. Counters count since it was made.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct InterfaceFact {
    /// Its name, `eth0`.
    pub interface: String,
    /// The device behind it, as sysfs names it: a PCI address mostly. Absent for what is made of software: bridges, veth.
    pub device: Option<String>,
    /// True when it is up.
    pub up: Option<bool>,
    /// Speed in Mb/s.
    pub speed_mbit_per_s: Option<u64>,
    /// Bytes sent.
    pub tx_bytes: Option<u64>,
    /// Bytes received.
    pub rx_bytes: Option<u64>,
    /// Packets dropped, both ways.
    pub drops: Option<u64>,
    /// Packets in error, both ways.
    pub errors: Option<u64>,
    /// Times the link went down.
    pub downs: Option<u64>,
    /// The errors that its driver counts, by the names of [`crate::model::nic_counter`]; absent in readings for
    /// which it was not asked, and where it counts nothing of that kind.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub driver: Option<BTreeMap<String, u64>>,
}

/// The host at one moment.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeFact {
    /// Its CPUs.
    pub cpus: Option<u32>,
    /// Share of its CPU time in use since the reading before, 0 to 1.
    pub cpu_busy: Option<f64>,
    /// Share of the last ten seconds in which some task wanted a CPU and had none, 0 to 1.
    pub cpu_pressure: Option<f64>,
    /// The same for memory.
    pub memory_pressure: Option<f64>,
    /// The same for storage.
    pub io_pressure: Option<f64>,
    /// Memory it has, in bytes.
    pub memory_bytes: Option<u64>,
    /// Memory that can still be had, in bytes.
    pub memory_available_bytes: Option<u64>,
    /// TCP segments sent again since boot.
    pub tcp_retransmits: Option<u64>,
    /// Processes killed for want of memory since boot.
    pub oom_kills: Option<u64>,
}

/// The devices that were given to containers, as the kubelet says: all of the host, each time.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PodsFact {
    /// The holders of devices.
    pub holders: Vec<Holder>,
}

/// A container that was given a device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Holder {
    /// The device as its plugin names it: a GPU's UUID, or its index.
    pub device: String,
    /// The pod.
    pub pod: String,
    /// Its namespace.
    pub namespace: String,
    /// The container.
    pub container: String,
}

/// A sampler about itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SamplerFact {
    /// Its name: `nvlink`, `gpu`, `xid`, `rdma`, `interfaces`, `node`, `pods`, `recording`.
    pub sampler: String,
    /// Why it gives nothing; absent while it gives something.
    pub absent: Option<String>,
    /// Readings it gave so far.
    pub readings: u64,
    /// Questions of its that failed so far.
    pub failures: u64,
    /// Time that asking took so far, waiting for the driver included, in ns.
    pub cost_ns: u64,
}

/// A PCI address in the form by which GPUs are matched, `0000:00:09.0`: NVML writes eight digits of a domain, CUDA
/// capital letters, and sysfs four small ones. Absent where it is none.
pub fn pci_address(text: &str) -> Option<String> {
    let text = text.trim();
    let (rest, function) = text.split_once('.').unwrap_or((text, "0"));
    let mut parts = rest.rsplit(':');
    let (device, bus) = (parts.next()?, parts.next()?);
    let domain = parts.next().unwrap_or("0");
    if parts.next().is_some() {
        return None;
    }
    let number = |digits: &str, most: u32| {
        let plain = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_hexdigit());
        u32::from_str_radix(digits, 16).ok().filter(|n| plain && *n <= most)
    };
    Some(format!(
        "{:04x}:{:02x}:{:02x}.{:x}",
        number(domain, u32::MAX)?,
        number(bus, 0xff)?,
        number(device, 0x1f)?,
        number(function, 7)?
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_every_writer_are_one() {
        for text in ["0000:1A:00.0", "00000000:1A:00.0", "1a:00.0", " 0000:1a:00.0\n", "0000:1a:00"] {
            assert_eq!(pci_address(text).as_deref(), Some("0000:1a:00.0"), "{text}");
        }
        assert_eq!(
            pci_address("00010000:0A:1f.7").as_deref(),
            Some("10000:0a:1f.7"),
            "a domain of five digits"
        );
        for text in
            ["", ":", "gpu0", "0000:1a:+1.0", "0000:1a:20.0", "0:0000:1a:00.0", "0000:1a:00.", "1a:00.é"]
        {
            assert_eq!(pci_address(text), None, "{text}");
        }
    }

    #[test]
    fn readings_survive_a_file() {
        let reading = Reading {
            host: "a".to_owned(),
            at_ns: 7,
            fact: Fact::Gpu(Box::new(GpuFact {
                gpu: "0000:1a:00.0".to_owned(),
                throttled: Some(BTreeSet::from([Throttle::ThermalHardware])),
                remapped_rows: Some((1, 0)),
                ..GpuFact::default()
            })),
        };
        let text = serde_json::to_string(&reading).expect("it can be written");
        assert!(text.contains("\"thermal-hardware\""), "{text}");
        assert_eq!(serde_json::from_str::<Reading>(&text).expect("and read"), reading);
    }
}
