//! GPUs and the links between them, as the driver and PCIe report them.

use super::host::Host;
use super::{Area, Check, Observation};
use crate::ingest::hardware::{GpuState, Inventory};
use crate::model::{GpuFact, Throttle, pci_address};
use rustix::fs::{Mode, OFlags};
use std::collections::BTreeMap;
use std::path::Path;

pub(super) const CHECKS: &[Check] = &[
    Check { id: "gpus", area: Area::Gpus, run: gpus },
    Check { id: "nvlink", area: Area::Gpus, run: nvlink },
    Check { id: "topology", area: Area::Gpus, run: topology },
    Check { id: "p2p", area: Area::Gpus, run: p2p },
    Check { id: "pcie", area: Area::Gpus, run: pcie },
    Check { id: "acs-iommu", area: Area::Gpus, run: acs_iommu },
    Check { id: "numa", area: Area::Gpus, run: numa },
    Check { id: "memory-errors", area: Area::Gpus, run: memory_errors },
    Check { id: "xid", area: Area::Gpus, run: xid },
    Check { id: "clocks", area: Area::Gpus, run: clocks },
    Check { id: "persistence", area: Area::Gpus, run: persistence },
];

/// Lines of the kernel's log that are read at most.
const LOG_MAX: usize = 100_000;
/// Errors that programs cause and that say nothing of the hardware: a page fault, an exception, a preemptive cleanup.
const XIDS_OF_PROGRAMS: &[u64] = &[13, 31, 43, 45];
/// The extended capability of PCIe that forces traffic between devices through the CPU, and its control word's enabling bits.
const ACS: u16 = 0x000d;
const ACS_REDIRECTS: u16 = 0b0001_1100;

/// Runs a check on what the driver says; without a driver there is nothing to check.
fn with(host: &Host, check: impl FnOnce(&Inventory) -> Vec<Observation>) -> Vec<Observation> {
    match host.gpus() {
        Ok(i) => check(i),
        Err(_) => vec![Observation::skip("no GPU answers here (see the check driver)")],
    }
}

/// A GPU as people name it.
fn name(f: &GpuFact) -> String {
    format!("GPU {} ({})", f.index.map_or("-".to_owned(), |i| i.to_string()), f.gpu)
}

/// One result for each thing that is wrong, or one that says that all is well.
fn all_or(wrong: Vec<Observation>, well: impl FnOnce() -> String) -> Vec<Observation> {
    if wrong.is_empty() { vec![Observation::pass(well())] } else { wrong }
}

fn gpus(host: &Host) -> Vec<Observation> {
    with(host, |i| {
        let known: Vec<&str> = i.gpus.iter().map(|g| g.fact.gpu.as_str()).collect();
        let own = host.own_gpu_addresses();
        let lost = own.iter().filter(|a| pci_address(a).is_some_and(|a| !known.contains(&a.as_str())));
        let wrong = lost.map(|address| {
            let seen = format!("{address} is on PCIe, and the driver does not answer for it");
            Observation::fail(
                seen,
                "see dmesg for its Xid (79: fallen off the bus); reset it or restart the host",
            )
        });
        let mut by_product: BTreeMap<String, usize> = BTreeMap::new();
        for g in &i.gpus {
            *by_product.entry(g.fact.name.clone().unwrap_or_else(|| "-".to_owned())).or_default() += 1;
        }
        let mut wrong: Vec<Observation> = wrong.collect();
        if by_product.len() > 1 {
            let seen = format!("GPUs of several products: {}", counted(&by_product));
            wrong.push(Observation::warn(seen, "let a job use GPUs of one product: CUDA_VISIBLE_DEVICES"));
        }
        all_or(wrong, || counted(&by_product))
    })
}

fn counted(by_product: &BTreeMap<String, usize>) -> String {
    by_product.iter().map(|(name, n)| format!("{n} x {name}")).collect::<Vec<_>>().join(", ")
}

fn nvlink(host: &Host) -> Vec<Observation> {
    with(host, |i| {
        let of = |g: &GpuState| {
            let up = g.fact.links.iter().filter(|l| l.up == Some(true)).count();
            let down: Vec<String> =
                g.fact.links.iter().filter(|l| l.up == Some(false)).map(|l| l.link.to_string()).collect();
            (up, down)
        };
        // Products have links that are not wired: GPUs of one product are compared.
        let most_of = |product: &Option<String>| {
            i.gpus.iter().filter(|g| g.fact.name == *product).map(|g| of(g).0).max().unwrap_or(0)
        };
        let most = i.gpus.iter().map(|g| of(g).0).max().unwrap_or(0);
        if most == 0 {
            return vec![Observation::skip("no GPU has an NVLink that is up")];
        }
        let mut wrong = Vec::new();
        for g in &i.gpus {
            let (up, down) = of(g);
            let most = most_of(&g.fact.name);
            if up < most {
                let seen = format!(
                    "{}: {up} NVLinks are up, others have {most}; down: {}",
                    name(&g.fact),
                    down.join(", ")
                );
                let fix = "see dmesg for Xid 74, nvidia-smi nvlink -s, and the fabric manager's log; reseat or reset";
                // A GPU without a bridge, beside some that have one, is no fault by itself.
                wrong.push(if up == 0 { Observation::warn(seen, fix) } else { Observation::fail(seen, fix) });
            }
            let errors: u64 = g.fact.links.iter().filter_map(|l| l.recoveries).sum();
            if errors > 0 {
                let seen = format!("{}: its NVLinks had to recover {errors} times", name(&g.fact));
                wrong.push(Observation::warn(
                    seen,
                    "watch it: a link that recovers again and again breaks soon (nvidia-smi nvlink -e)",
                ));
            }
        }
        all_or(wrong, || format!("{most} NVLinks a GPU are up"))
    })
}

/// How a pair of GPUs is connected, in nvidia-smi's words.
fn path(from: &GpuFact, to: &GpuFact) -> String {
    let peer = from.peers.iter().find(|p| p.gpu == to.gpu);
    if peer.and_then(|p| p.nvlink) == Some(true) {
        let is_up = |l: &&crate::model::LinkFact| l.up == Some(true);
        let ends = |l: &crate::model::LinkFact| {
            l.remote.as_ref().is_some_and(|r| r.kind == "switch" || r.address.as_deref() == Some(&to.gpu))
        };
        let links = from.links.iter().filter(is_up).filter(|l| ends(l)).count();
        return if links > 0 { format!("NV{links}") } else { "NV".to_owned() };
    }
    match peer.and_then(|p| p.path.as_deref()) {
        Some("internal" | "switch") => "PIX",
        Some("switches") => "PXB",
        Some("host-bridge") => "PHB",
        Some("numa-node") => "NODE",
        Some("system") => "SYS",
        _ => "-",
    }
    .to_owned()
}

fn topology(host: &Host) -> Vec<Observation> {
    with(host, |i| {
        if i.gpus.len() < 2 {
            return vec![Observation::skip("there is one GPU")];
        }
        let number = |g: &GpuState| g.fact.index.map_or("-".to_owned(), |i| format!("GPU{i}"));
        let mut text = format!("as nvidia-smi topo -m has it\n{:<6}", "");
        i.gpus.iter().for_each(|g| text.push_str(&format!("{:>6}", number(g))));
        for from in &i.gpus {
            text.push_str(&format!("\n{:<6}", number(from)));
            for to in &i.gpus {
                let cell =
                    if from.fact.gpu == to.fact.gpu { "X".to_owned() } else { path(&from.fact, &to.fact) };
                text.push_str(&format!("{cell:>6}"));
            }
        }
        vec![Observation::pass(text)]
    })
}

fn p2p(host: &Host) -> Vec<Observation> {
    with(host, |i| {
        if i.gpus.len() < 2 {
            return vec![Observation::skip("there is one GPU")];
        }
        let mut by_reason: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for g in &i.gpus {
            for (other, status) in
                g.p2p.iter().filter(|(other, status)| *status != "ok" && g.fact.gpu < *other)
            {
                by_reason.entry(status).or_default().push(format!("{} and {other}", g.fact.gpu));
            }
        }
        let pairs = i.gpus.len() * (i.gpus.len() - 1) / 2;
        let wrong = by_reason.into_iter().map(|(reason, which)| {
            let shown = if which.len() > 4 { format!("{} pairs", which.len()) } else { which.join("; ") };
            let fix = "NCCL copies through the host's memory there. With NVLink it is a fault: reset the GPUs, restart the \
                       fabric manager. On PCIe see the check acs-iommu";
            Observation::warn(format!("no peer access ({reason}): {shown} of {pairs}"), fix)
        });
        all_or(wrong.collect(), || format!("all {pairs} pairs read each other's memory"))
    })
}

fn pcie(host: &Host) -> Vec<Observation> {
    with(host, |i| {
        let mut wrong = Vec::new();
        let mut kinds = BTreeMap::new();
        for g in &i.gpus {
            let Some(p) = &g.fact.pcie else { continue };
            let shown = |n: Option<u32>| n.map_or("-".to_owned(), |n| n.to_string());
            *kinds
                .entry(format!("generation {} x{}", shown(p.generation_max), shown(p.width)))
                .or_insert(0) += 1;
            if let (Some(width), Some(max)) = (p.width, p.width_max)
                && width < max
            {
                let seen = format!("{}: {width} of {max} lanes", name(&g.fact));
                wrong.push(Observation::warn(
                    seen,
                    "reseat it; look at the slot, the riser and the BIOS's bifurcation",
                ));
            }
        }
        if kinds.is_empty() {
            return vec![Observation::skip("the driver does not say (a virtual machine, for example)")];
        }
        all_or(wrong, || counted(&kinds))
    })
}

/// Bridges above a device whose PCIe access control sends traffic between devices to the CPU. Absent where the configuration
/// cannot be read, which takes root.
fn redirecting(host: &Host, address: &str) -> Option<Vec<String>> {
    let device = std::fs::canonicalize(host.path(&format!("sys/bus/pci/devices/{address}"))).ok()?;
    let mut found = Vec::new();
    for bridge in device.ancestors().skip(1).filter(|p| p.join("config").is_file()) {
        let config = std::fs::read(bridge.join("config")).ok()?;
        if config.len() < 0x104 {
            return None;
        }
        if acs_control(&config).is_some_and(|c| c & ACS_REDIRECTS != 0) {
            found.push(bridge.file_name()?.to_string_lossy().into_owned());
        }
    }
    Some(found)
}

/// The control word of access control, where a device's configuration has it.
fn acs_control(config: &[u8]) -> Option<u16> {
    let word = |at: usize| Some(u16::from_le_bytes(config.get(at..at + 2)?.try_into().ok()?));
    let mut at = 0x100;
    // As many capabilities as there is room for: a list that turns in a circle ends too.
    for _ in 0..config.len() / 8 {
        if word(at)? == ACS {
            return word(at + 6);
        }
        at = usize::from(word(at + 2)? >> 4);
        if at < 0x100 {
            return None;
        }
    }
    None
}

fn acs_iommu(host: &Host) -> Vec<Observation> {
    let addresses = host.gpu_addresses();
    if addresses.len() < 2 {
        return vec![Observation::skip("there are no two GPUs")];
    }
    let mut bridges = Vec::new();
    let mut is_readable = false;
    for address in &addresses {
        if let Some(found) = redirecting(host, address) {
            is_readable = true;
            bridges.extend(found);
        }
    }
    bridges.sort();
    bridges.dedup();
    let is_virtual = host.text("proc/cpuinfo").is_some_and(|t| t.contains(" hypervisor"));
    let kind = |address: &String| host.text(&format!("sys/bus/pci/devices/{address}/iommu_group/type"));
    let translating = addresses.iter().filter_map(kind).filter(|t| t.starts_with("DMA")).count();
    let mut wrong = Vec::new();
    if !bridges.is_empty() && !is_virtual {
        let seen = format!(
            "access control (ACS) of PCIe bridges {} sends traffic between GPUs through the CPU",
            bridges.join(", ")
        );
        wrong.push(Observation::warn(
            seen,
            "switch ACS off in the BIOS, or with setpci at boot (NVIDIA's guide for GPUDirect)",
        ));
    }
    if translating > 0 && !is_virtual {
        let seen = format!("the IOMMU translates for {translating} GPUs: they reach each other through it");
        wrong.push(Observation::warn(seen, "boot with iommu=pt, or switch the IOMMU off in the BIOS"));
    }
    if wrong.is_empty() && !is_readable {
        return vec![Observation::skip("the bridges' configuration can be read by root alone")];
    }
    all_or(wrong, || {
        let of = if is_virtual { " that this virtual machine shows" } else { "" };
        format!("no bridge{of} sends traffic between GPUs to the CPU")
    })
}

fn numa(host: &Host) -> Vec<Observation> {
    with(host, |i| {
        let nodes = host.entries("sys/devices/system/node");
        let nodes: Vec<&str> = nodes
            .iter()
            .filter_map(|(n, _)| n.strip_prefix("node"))
            .filter(|n| n.parse::<u32>().is_ok())
            .collect();
        let on: BTreeMap<&str, Option<u32>> =
            i.gpus.iter().map(|g| (g.fact.gpu.as_str(), g.fact.numa)).collect();
        if nodes.len() < 2 {
            return vec![Observation::pass("the host has one NUMA node")];
        }
        let unknown = on.values().filter(|n| n.is_none()).count();
        if unknown > 0 {
            let seen = format!("{unknown} GPUs belong to no NUMA node, on a host with {}", nodes.len());
            let fix = "NCCL cannot bind its threads near to them: see the BIOS, or the virtual machine's topology; or give \
                       NCCL_TOPO_FILE";
            return vec![Observation::warn(seen, fix)];
        }
        let shown: Vec<String> = on.iter().map(|(gpu, n)| format!("{gpu} on {}", n.unwrap_or(0))).collect();
        vec![Observation::pass(format!("{} NUMA nodes: {}", nodes.len(), shown.join(", ")))]
    })
}

fn memory_errors(host: &Host) -> Vec<Observation> {
    with(host, |i| {
        let mut wrong = Vec::new();
        for g in &i.gpus {
            let f = &g.fact;
            if f.remap_failed == Some(true) {
                wrong.push(Observation::fail(
                    format!("{}: a row of memory could not be replaced", name(f)),
                    "replace the GPU",
                ));
            }
            if f.remap_pending == Some(true) {
                let seen = format!("{}: a row of memory waits to be replaced", name(f));
                wrong.push(Observation::warn(seen, "reset the GPU when no job runs on it (nvidia-smi -r)"));
            }
            if let Some(n) = f.ecc_uncorrected.filter(|n| *n > 0) {
                let seen =
                    format!("{}: {n} memory errors since the driver was loaded were not corrected", name(f));
                wrong.push(Observation::fail(seen, "reset the GPU; replace it if they come again"));
            }
            if g.has_ecc == Some(false) {
                let seen = format!("{}: its memory does not correct errors (ECC is off)", name(f));
                wrong.push(Observation::warn(seen, "nvidia-smi -e 1, and a reset"));
            }
        }
        all_or(wrong, || {
            let ever: u64 = i.gpus.iter().filter_map(|g| g.ecc_uncorrected_ever).sum();
            format!("none since the driver was loaded; {ever} uncorrected over the GPUs' lives")
        })
    })
}

/// The errors of the driver in the kernel's log: code and GPU, with how often.
fn xids(log: &str) -> BTreeMap<(u64, String), usize> {
    let mut found = BTreeMap::new();
    for line in log.lines() {
        let Some((_, rest)) = line.split_once("NVRM: Xid (PCI:") else { continue };
        let Some((address, rest)) = rest.split_once("): ") else { continue };
        let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
        if let Ok(code) = digits.parse::<u64>() {
            *found.entry((code, address.to_owned())).or_insert(0) += 1;
        }
    }
    found
}

/// The kernel's log, as much as it still has.
fn kernel_log(path: &Path) -> Option<String> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty()).ok()?;
    let (mut text, mut room) = (Vec::new(), [0; 8192]);
    for _ in 0..LOG_MAX {
        // One record a read; the end is "try again".
        match rustix::io::read(&file, &mut room) {
            Ok(0) | Err(rustix::io::Errno::AGAIN) => break,
            Ok(n) => text.extend_from_slice(room.get(..n).unwrap_or_default()),
            // A record was overwritten while we read.
            Err(rustix::io::Errno::PIPE) => {}
            Err(_) => return None,
        }
    }
    Some(String::from_utf8_lossy(&text).into_owned())
}

fn xid(host: &Host) -> Vec<Observation> {
    if host.gpu_addresses().is_empty() {
        return vec![Observation::skip("this host has no GPU of NVIDIA")];
    }
    let Some(log) = kernel_log(&host.path("dev/kmsg")) else {
        return vec![Observation::skip("the kernel's log can be read by root alone")];
    };
    let found = xids(&log);
    let wrong =
        found.iter().filter(|((code, _), _)| !XIDS_OF_PROGRAMS.contains(code)).map(|((code, gpu), n)| {
            let seen = format!("{gpu}: Xid {code}, {n} times in the kernel's log");
            Observation::warn(
                seen,
                format!("ringwatch explain \"Xid {code}\" says what it means and what to do"),
            )
        });
    let of_programs: usize =
        found.iter().filter(|((c, _), _)| XIDS_OF_PROGRAMS.contains(c)).map(|(_, n)| n).sum();
    all_or(wrong.collect(), || format!("none of the hardware in the kernel's log; {of_programs} of programs"))
}

fn clocks(host: &Host) -> Vec<Observation> {
    with(host, |i| {
        let mut wrong = Vec::new();
        for g in &i.gpus {
            let reasons = g
                .fact
                .throttled
                .iter()
                .flatten()
                .filter(|t| !matches!(t, Throttle::PowerCap | Throttle::SyncBoost));
            let names: Vec<&str> = reasons
                .map(|t| match t {
                    Throttle::ThermalSoftware | Throttle::ThermalHardware => "too hot",
                    Throttle::PowerBrake => "a power brake",
                    _ => "slowed down by the hardware",
                })
                .collect();
            if !names.is_empty() {
                let degrees = g.fact.temperature_c.map_or("-".to_owned(), |t| format!("{t:.0}"));
                let seen = format!(
                    "{}: its clocks are held down ({}), {degrees} C",
                    name(&g.fact),
                    names.join(", ")
                );
                wrong.push(Observation::warn(seen, "look at fans, air flow and power supplies of this host"));
            }
        }
        all_or(wrong, || "nothing holds them down".to_owned())
    })
}

fn persistence(host: &Host) -> Vec<Observation> {
    with(host, |i| {
        let is_daemon = host.path("var/run/nvidia-persistenced/socket").exists();
        let off: Vec<String> =
            i.gpus.iter().filter(|g| g.is_persistent == Some(false)).map(|g| name(&g.fact)).collect();
        vec![if off.is_empty() || is_daemon {
            Observation::pass("the driver keeps GPUs initialized")
        } else {
            let seen = format!("{}: the driver takes them down when nobody uses them", off.join(", "));
            Observation::pass(format!(
                "{seen}; the first call of a job takes seconds (start nvidia-persistenced)"
            ))
        }]
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_the_driver_are_found_in_the_kernels_log() {
        let log = "4,1,2,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n\
                   4,2,3,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1\n6,3,4,-;NVRM: Xid (PCI:0000:5e:00): x\n";
        assert_eq!(xids(log), BTreeMap::from([((79, "0000:3b:00".to_owned()), 2)]));
    }

    #[test]
    fn access_control_is_found_among_the_capabilities() {
        let mut config = vec![0; 4096];
        // Another capability first, which names the next one at 0x148.
        config[0x100..0x104].copy_from_slice(&[0x01, 0x00, 0x82, 0x14]);
        config[0x148..0x150].copy_from_slice(&[0x0d, 0x00, 0x01, 0x00, 0, 0, 0x1d, 0]);
        assert_eq!(acs_control(&config), Some(0x1d));
        config[0x102..0x104].copy_from_slice(&[0x02, 0x10]);
        assert_eq!(acs_control(&config), None, "a circle");
        assert_eq!(acs_control(&config[..0x100]), None);
    }
}
