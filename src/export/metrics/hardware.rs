//! The machines under the jobs, from the last readings.

use super::family::Families;
use super::scope::uid_text;
use crate::export::catalogue as c;
use crate::join::{Hardware, Wire, WireTotals};
use crate::model::{
    GpuFact, InterfaceFact, LinkFact, Moved, NodeFact, PortFact, SamplerFact, Throttle, nic_counter,
};
use std::collections::BTreeMap;

/// All reasons, so that a reason that does not hold is zero and not absent.
const THROTTLES: [(Throttle, &str); 6] = [
    (Throttle::PowerCap, "power_cap"),
    (Throttle::Hardware, "hardware"),
    (Throttle::ThermalSoftware, "thermal_software"),
    (Throttle::ThermalHardware, "thermal_hardware"),
    (Throttle::PowerBrake, "power_brake"),
    (Throttle::SyncBoost, "sync_boost"),
];

/// Everything that was read.
pub(super) fn gather(out: &mut Families, hardware: &Hardware, now_ns: u64) {
    let container = |node: &str, gpu: &str| hardware.holder(node, gpu, now_ns).map(Into::into);
    for (node, _, g) in hardware.gpus() {
        out.inside(container(node, &g.gpu));
        out.of(of_gpu(g));
        gpu(out, node, g);
        out.of(Vec::new());
        for link in &g.links {
            nvlink(out, node, &g.gpu, link);
        }
    }
    for (node, gpu, w) in hardware.wires() {
        out.inside(container(node, gpu));
        wires(out, node, gpu, w);
    }
    out.inside(None);
    for (node, w) in hardware.networks() {
        network(out, node, w);
    }
    for (node, _, p) in hardware.ports() {
        port(out, node, p);
    }
    out.of(Vec::new());
    for (node, _, i) in hardware.interfaces() {
        interface(out, node, i);
    }
    out.of(Vec::new());
    for (node, _, n) in hardware.nodes() {
        host(out, node, n);
    }
    for (node, s) in hardware.samplers() {
        sampler(out, node, s);
    }
}

/// Attributes, without those that have no value.
fn attributes(all: &[(&'static str, Option<&str>)]) -> Vec<(&'static str, String)> {
    all.iter().filter_map(|(k, v)| Some((*k, (*v)?.to_owned()))).collect()
}

fn of_gpu(g: &GpuFact) -> Vec<(&'static str, String)> {
    let name = g.index.map(|i| format!("GPU {i}"));
    attributes(&[
        ("hw.id", Some(&g.gpu)),
        ("hw.type", Some("gpu")),
        ("hw.name", name.as_deref()),
        ("hw.model", g.name.as_deref()),
        ("hw.vendor", Some("NVIDIA")),
    ])
}

/// A GPU's sensor is a component of its own.
fn of_sensor(g: &GpuFact) -> Vec<(&'static str, String)> {
    let id = format!("{}/temperature", g.gpu);
    attributes(&[("hw.id", Some(&id)), ("hw.type", Some("temperature")), ("hw.parent", Some(&g.gpu))])
}

fn of_port(p: &PortFact) -> Vec<(&'static str, String)> {
    let id = format!("{}/{}", p.device, p.port);
    attributes(&[
        ("hw.id", Some(&id)),
        ("hw.type", Some("network")),
        ("hw.name", Some(&p.device)),
        ("hw.parent", p.address.as_deref()),
    ])
}

/// Empty for one that is made of software.
fn of_interface(i: &InterfaceFact) -> Vec<(&'static str, String)> {
    let Some(device) = i.device.as_deref() else { return Vec::new() };
    attributes(&[
        ("hw.id", Some(&i.interface)),
        ("hw.type", Some("network")),
        ("hw.name", Some(&i.interface)),
        ("hw.parent", Some(device)),
    ])
}

/// The bytes in both directions.
fn ways(out: &mut Families, metric: &'static c::Metric, labels: &[&str], moved: Wire) {
    for (direction, bytes) in [("transmit", moved.tx_bytes), ("receive", moved.rx_bytes)] {
        out.number(metric, &[labels, &[direction]].concat(), bytes);
    }
}

fn wires(out: &mut Families, node: &str, gpu: &str, w: &WireTotals) {
    ways(out, c::NVLINK_BYTES, &[node, gpu], w.measured);
    ways(out, c::WIRE_FOREIGN, &[node, gpu], w.foreign);
    ways(out, c::WIRE_UNKNOWN, &[node, gpu], w.unknown);
    for (comm, func, share) in w.by() {
        let (uid, comm) = (uid_text(comm.owner()), comm.to_string());
        let labels = [node, gpu, &*uid, &*comm, func.as_str()];
        ways(out, c::WIRE_EXPECTED, &labels, share.expected);
        ways(out, c::WIRE_COMPARABLE, &labels, share.comparable);
        ways(out, c::WIRE_ATTRIBUTED, &labels, share.attributed);
    }
}

fn network(out: &mut Families, node: &str, w: &WireTotals) {
    ways(out, c::NETWORK_MEASURED, &[node], w.measured);
    ways(out, c::NETWORK_FOREIGN, &[node], w.foreign);
    ways(out, c::NETWORK_UNKNOWN, &[node], w.unknown);
    for (comm, func, share) in w.by() {
        let (uid, comm) = (uid_text(comm.owner()), comm.to_string());
        let labels = [node, &*uid, &*comm, func.as_str()];
        ways(out, c::NETWORK_EXPECTED, &labels, share.expected);
        ways(out, c::NETWORK_COMPARABLE, &labels, share.comparable);
        ways(out, c::NETWORK_ATTRIBUTED, &labels, share.attributed);
    }
}

fn gpu(out: &mut Families, node: &str, g: &GpuFact) {
    let text = |n: Option<u32>| n.map_or_else(String::new, |n| n.to_string());
    let (uuid, name) = (g.uuid.as_deref().unwrap_or(""), g.name.as_deref().unwrap_or(""));
    out.number(c::GPU, &[node, &g.gpu, &text(g.index), uuid, name, &text(g.numa)], 1.0);
    let at = [node, &*g.gpu];
    let hertz = |mhz: Option<u32>| mhz.map(|n| f64::from(n) * 1e6);
    out.known(c::GPU_SM_CLOCK, &at, hertz(g.sm_mhz));
    out.known(c::GPU_SM_CLOCK_MAX, &at, hertz(g.sm_max_mhz));
    out.known(c::GPU_MEMORY_CLOCK, &at, hertz(g.memory_mhz));
    out.known(c::GPU_POWER, &at, g.power_w);
    out.known(c::GPU_POWER_LIMIT, &at, g.power_limit_w);
    out.of(of_sensor(g));
    out.known(c::GPU_TEMPERATURE, &at, g.temperature_c);
    out.of(of_gpu(g));
    if let Some(throttled) = &g.throttled {
        for (reason, name) in THROTTLES {
            out.number(c::GPU_THROTTLED, &[node, &g.gpu, name], yes(throttled.contains(&reason)));
        }
    }
    out.known(c::GPU_BUSY, &at, g.busy);
    out.known(c::GPU_SM_ACTIVE, &at, g.sm_active);
    out.known(c::GPU_MEMORY_ACTIVE, &at, g.memory_active);
    out.known(c::GPU_TENSOR_ACTIVE, &at, g.tensor_active);
    out.known(c::GPU_MEMORY_USED, &at, whole(g.memory_used_bytes));
    out.known(c::GPU_MEMORY, &at, whole(g.memory_bytes));
    out.known(c::GPU_ECC, &[node, &g.gpu, "corrected"], whole(g.ecc_corrected));
    out.known(c::GPU_ECC, &[node, &g.gpu, "uncorrected"], whole(g.ecc_uncorrected));
    if let Some((corrected, uncorrected)) = g.remapped_rows {
        out.number(c::GPU_REMAPPED, &[node, &g.gpu, "corrected"], f64::from(corrected));
        out.number(c::GPU_REMAPPED, &[node, &g.gpu, "uncorrected"], f64::from(uncorrected));
    }
    out.known(c::GPU_REMAP_PENDING, &at, g.remap_pending.map(yes));
    out.known(c::GPU_REMAP_FAILED, &at, g.remap_failed.map(yes));
    if let Some(p) = &g.pcie {
        let small = |n: Option<u32>| n.map(f64::from);
        out.known(c::PCIE_LANES, &[node, &g.gpu, "current"], small(p.width));
        out.known(c::PCIE_LANES, &[node, &g.gpu, "limit"], small(p.width_max));
        out.known(c::PCIE_GENERATION, &[node, &g.gpu, "current"], small(p.generation));
        out.known(c::PCIE_GENERATION, &[node, &g.gpu, "limit"], small(p.generation_max));
        out.known(c::PCIE_REPLAYS, &at, whole(p.replays));
    }
}

fn nvlink(out: &mut Families, node: &str, gpu: &str, l: &LinkFact) {
    let link = l.link.to_string();
    out.known(c::NVLINK_UP, &[node, gpu, &link], l.up.map(yes));
    for (kind, n) in [("replay", l.replays), ("recovery", l.recoveries), ("crc", l.crc_errors)] {
        out.known(c::NVLINK_ERRORS, &[node, gpu, &link, kind], whole(n));
    }
}

fn port(out: &mut Families, node: &str, p: &PortFact) {
    let number = p.port.to_string();
    let at = [node, &*p.device, &*number];
    let with = |last| [node, &*p.device, &*number, last];
    out.of(of_port(p));
    out.known(c::PORT_UP, &at, p.up.map(yes));
    out.known(c::PORT_SPEED, &at, bytes_per_second(p.speed_mbit_per_s));
    out.known(c::PORT_BYTES, &with("transmit"), whole(p.tx_bytes));
    out.known(c::PORT_BYTES, &with("receive"), whole(p.rx_bytes));
    for (kind, n) in [
        ("retransmit", p.retransmits),
        ("out_of_order", p.out_of_order),
        ("error", p.errors),
        ("link_down", p.downs),
        ("congestion", p.congestion),
    ] {
        // A mark is no error: it is how congestion is kept from becoming one.
        if kind == "congestion" {
            out.of(Vec::new());
        }
        out.known(c::PORT_ERRORS, &with(kind), whole(n));
    }
}

fn interface(out: &mut Families, node: &str, i: &InterfaceFact) {
    let at = [node, &*i.interface];
    let with = |last| [node, &*i.interface, last];
    out.of(of_interface(i));
    out.known(c::INTERFACE_UP, &at, i.up.map(yes));
    out.known(c::INTERFACE_SPEED, &at, bytes_per_second(i.speed_mbit_per_s));
    out.known(c::INTERFACE_BYTES, &with("transmit"), whole(i.tx_bytes));
    out.known(c::INTERFACE_BYTES, &with("receive"), whole(i.rx_bytes));
    for (kind, n) in [("drop", i.drops), ("error", i.errors), ("link_down", i.downs)] {
        out.known(c::INTERFACE_ERRORS, &with(kind), whole(n));
    }
    // Names come from a list, whoever recorded the reading.
    for (name, n) in i.driver.iter().flatten() {
        let counter = nic_counter(name).filter(|(known, _)| known == name);
        out.known(
            c::INTERFACE_DRIVER,
            &with(counter.map_or("", |(known, _)| known)),
            counter.map(|_| *n as f64),
        );
    }
}

fn host(out: &mut Families, node: &str, n: &NodeFact) {
    out.known(c::NODE_CPUS, &[node], n.cpus.map(f64::from));
    out.known(c::NODE_CPU, &[node], n.cpu_busy);
    out.known(c::NODE_PRESSURE, &[node, "cpu"], n.cpu_pressure);
    out.known(c::NODE_PRESSURE, &[node, "memory"], n.memory_pressure);
    out.known(c::NODE_PRESSURE, &[node, "io"], n.io_pressure);
    out.known(c::NODE_MEMORY, &[node], whole(n.memory_bytes));
    out.known(c::NODE_MEMORY_AVAILABLE, &[node], whole(n.memory_available_bytes));
    out.known(c::NODE_TCP_RETRANSMITS, &[node], whole(n.tcp_retransmits));
    out.known(c::NODE_OOM, &[node], whole(n.oom_kills));
}

fn sampler(out: &mut Families, node: &str, s: &SamplerFact) {
    let at = [node, &*s.sampler];
    out.number(c::SAMPLER_UP, &at, yes(s.absent.is_none()));
    out.number(c::SAMPLER_READINGS, &at, s.readings as f64);
    out.number(c::SAMPLER_FAILURES, &at, s.failures as f64);
    out.number(c::SAMPLER_COST, &at, s.cost_ns as f64 / 1e9);
}

fn yes(b: bool) -> f64 {
    f64::from(u8::from(b))
}

fn whole(n: Option<u64>) -> Option<f64> {
    n.map(|n| n as f64)
}

fn bytes_per_second(mbit: Option<u64>) -> Option<f64> {
    mbit.map(|n| n as f64 * 125_000.0)
}

/// Movements that are read and given out as counters: they begin when the agent does.
#[derive(Debug, Default)]
pub(super) struct Wires {
    gpus: BTreeMap<(String, String), OfGpu>,
    xids: BTreeMap<(String, String, u64), u64>,
    /// The moment up to which errors were counted, and how many at that moment.
    xids_until: (u64, usize),
}

#[derive(Debug, Default)]
struct OfGpu {
    until_ns: u64,
    pcie: Option<Moved>,
}

impl Wires {
    /// Takes the readings that are new.
    pub(super) fn take(&mut self, hardware: &Hardware) {
        for (node, _, g) in hardware.gpus() {
            let of = self.gpus.entry((node.to_owned(), g.gpu.clone())).or_default();
            let until = of.until_ns;
            for (at_ns, t) in hardware.traffic(node, &g.gpu).filter(|(at_ns, _)| *at_ns > until) {
                of.until_ns = of.until_ns.max(at_ns);
                add(&mut of.pcie, t.pcie);
            }
        }
        // Of one moment there may be several errors, and some of them may come after the others were counted.
        let (until, counted) = self.xids_until;
        let same = hardware.xids().filter(|(at_ns, ..)| *at_ns == until).skip(counted);
        let later = hardware.xids().filter(|(at_ns, ..)| *at_ns > until);
        for (_, node, x) in same.chain(later) {
            *self.xids.entry((node.to_owned(), x.gpu.clone(), x.code)).or_default() += 1;
        }
        if let Some(newest) = hardware.xids().map(|(at_ns, ..)| at_ns).max() {
            self.xids_until = (newest, hardware.xids().filter(|(at_ns, ..)| *at_ns == newest).count());
        }
    }

    pub(super) fn gather(&self, out: &mut Families, hardware: &Hardware, now_ns: u64) {
        let container = |node: &str, gpu: &str| hardware.holder(node, gpu, now_ns).map(Into::into);
        for ((node, gpu), of) in &self.gpus {
            out.inside(container(node, gpu));
            out.known(c::PCIE_BYTES, &[node, gpu, "transmit"], of.pcie.map(|m| m.tx_bytes));
            out.known(c::PCIE_BYTES, &[node, gpu, "receive"], of.pcie.map(|m| m.rx_bytes));
        }
        for ((node, gpu, code), n) in &self.xids {
            out.inside(container(node, gpu));
            out.number(c::GPU_XID, &[node, gpu, &code.to_string()], *n as f64);
        }
        out.inside(None);
    }
}

fn add(sum: &mut Option<Moved>, more: Option<Moved>) {
    if let Some(m) = more {
        let s = sum.get_or_insert_default();
        s.tx_bytes += m.tx_bytes;
        s.rx_bytes += m.rx_bytes;
    }
}
