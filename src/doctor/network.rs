//! The network between hosts: the interface that NCCL chooses, RDMA ports, and GPUDirect RDMA.

use super::host::{Host, Interface};
use super::{Area, Check, Observation};

pub(super) const CHECKS: &[Check] = &[
    Check { id: "socket-interface", area: Area::Network, run: socket_interface },
    Check { id: "rdma", area: Area::Network, run: rdma },
    Check { id: "gpudirect-rdma", area: Area::Network, run: gpudirect },
];

/// Interfaces that exist for containers and virtual machines of this host alone.
const OF_THIS_HOST: &[&str] = &["docker", "lo", "virbr", "veth", "br-", "cni", "flannel", "cali", "ifb"];
/// The RDMA header takes a part of a frame, so that 4,096 bytes of data need an Ethernet MTU above that.
const MTU_OF_JUMBO: u64 = 4200;

/// The interfaces that a list like NCCL_SOCKET_IFNAME selects: names by their beginning, `=` for whole names, `^` for
/// all others.
fn selected<'h>(list: &str, all: &'h [Interface]) -> Vec<&'h Interface> {
    let (is_excluding, list) = match list.strip_prefix('^') {
        Some(rest) => (true, rest),
        None => (false, list),
    };
    let (is_exact, list) = match list.strip_prefix('=') {
        Some(rest) => (true, rest),
        None => (false, list),
    };
    let matches = |name: &str| {
        // A part may name a port behind a colon, as lists of RDMA devices do.
        let mut parts = list.split(',').map(|p| p.split(':').next().unwrap_or(p)).filter(|p| !p.is_empty());
        parts.any(|p| if is_exact { name == p } else { name.starts_with(p) })
    };
    all.iter().filter(|i| i.is_up && matches(&i.name) != is_excluding).collect()
}

/// The interfaces that NCCL takes without being told: InfiniBand's, else all but those of containers and the loopback, else
/// docker's, else the loopback.
fn by_default(all: &[Interface]) -> Vec<&Interface> {
    let tries = ["ib", "^docker,lo,virbr", "docker", "lo", "virbr"];
    tries.iter().map(|t| selected(t, all)).find(|found| !found.is_empty()).unwrap_or_default()
}

fn shown(interfaces: &[&Interface]) -> String {
    interfaces.iter().map(|i| format!("{} ({})", i.name, i.address)).collect::<Vec<_>>().join(", ")
}

fn is_of_this_host(i: &Interface) -> bool {
    i.is_loopback || OF_THIS_HOST.iter().any(|p| i.name.starts_with(p))
}

fn socket_interface(host: &Host) -> Vec<Observation> {
    let all = &host.interfaces;
    let fix = "name the interface that reaches the other hosts: NCCL_SOCKET_IFNAME=eth0 for example";
    let up: Vec<&Interface> = all.iter().filter(|i| i.is_up).collect();
    let mut results = Vec::new();
    for variable in ["NCCL_SOCKET_IFNAME", "NCCL_OOB_NET_IFNAME"] {
        let Some(list) = host.variable(variable) else { continue };
        let found = selected(list, all);
        let seen = format!("{variable}={list} selects {}", shown(&found));
        results.push(if found.is_empty() {
            let there = shown(&up);
            Observation::fail(
                format!("{variable}={list} selects no interface that is up; there are {there}"),
                fix,
            )
        } else if found.iter().all(|i| is_of_this_host(i)) && !up.iter().all(|i| is_of_this_host(i)) {
            Observation::warn(format!("{seen}, which reaches no other host"), fix)
        } else {
            Observation::pass(seen)
        });
    }
    if !results.is_empty() {
        return results;
    }
    let found = by_default(all);
    let outside: Vec<&Interface> = found.iter().copied().filter(|i| !is_of_this_host(i)).collect();
    vec![if found.is_empty() {
        Observation::fail(
            "no interface is up: NCCL cannot make a communicator",
            "bring one up; the loopback is enough on one host",
        )
    } else if outside.is_empty() {
        let seen = format!("NCCL would choose {}, which reaches no other host", shown(&found));
        Observation::pass(format!("{seen}; that is enough for jobs of one host"))
    } else if let Some(first) = found.first().filter(|i| is_of_this_host(i)) {
        let seen = format!("NCCL would begin with {}, which reaches no other host", shown(&[first]));
        Observation::warn(seen, fix)
    } else {
        Observation::pass(format!("NCCL would choose {}", shown(&found)))
    }]
}

/// A GID of a port: its index, its type, and whether it is an IPv4 address.
fn gids(host: &Host, port: &str) -> Vec<(u32, String, bool)> {
    let all = host.entries(&format!("{port}/gids")).into_iter().filter_map(|(index, _)| {
        let gid = host.text(&format!("{port}/gids/{index}"))?;
        if gid.bytes().all(|b| b == b'0' || b == b':') {
            return None;
        }
        let kind = host.text(&format!("{port}/gid_attrs/types/{index}")).unwrap_or_default();
        Some((index.parse().ok()?, kind, gid.starts_with("0000:0000:0000:0000:0000:ffff:")))
    });
    let mut all: Vec<_> = all.collect();
    all.sort();
    all
}

/// Checks one port, and describes it.
fn port(host: &Host, device: &str, number: &str) -> Observation {
    let at = format!("sys/class/infiniband/{device}/ports/{number}");
    let read = |name: &str| host.text(&format!("{at}/{name}")).unwrap_or_default();
    let (state, physical, rate, layer) =
        (read("state"), read("phys_state"), read("rate"), read("link_layer"));
    let seen = format!("{device} port {number}: {state}, {rate}, {layer}");
    if !state.contains("ACTIVE") && !physical.contains("LinkUp") {
        // Many devices have a port without a cable, which NCCL leaves alone.
        return Observation::pass(format!("{seen}; nothing is connected, and NCCL leaves it alone"));
    }
    if !state.contains("ACTIVE") {
        let fix = format!(
            "physically it is {physical}: check cable and switch, and for InfiniBand the subnet manager"
        );
        return Observation::warn(seen, fix);
    }
    // Other layers than Ethernet (InfiniBand, Amazon's EFA) have no choice of GIDs.
    if layer != "Ethernet" {
        return Observation::pass(seen);
    }
    let gids = gids(host, &at);
    let best = gids.iter().find(|(_, kind, is_v4)| kind == "RoCE v2" && *is_v4);
    let wanted = host.variable("NCCL_IB_GID_INDEX").and_then(|v| v.parse::<u32>().ok());
    if let Some(index) = wanted {
        return match gids.iter().find(|(i, ..)| *i == index) {
            None => {
                let there: Vec<String> = gids.iter().map(|(i, kind, _)| format!("{i} ({kind})")).collect();
                let seen =
                    format!("{seen}; NCCL_IB_GID_INDEX={index} is empty, there are {}", there.join(", "));
                Observation::fail(seen, "unset it: NCCL 2.21 and later choose the index themselves")
            }
            Some((_, kind, _)) if kind != "RoCE v2" => {
                let seen =
                    format!("{seen}; NCCL_IB_GID_INDEX={index} is of {kind}, which no router forwards");
                Observation::warn(seen, "unset it, or name the index of RoCE v2")
            }
            Some(_) => Observation::pass(format!("{seen}; GID {index}")),
        };
    }
    let net = host.entries(&format!("sys/class/infiniband/{device}/device/net"));
    let mtu =
        net.first().and_then(|(n, _)| host.text(&format!("sys/class/net/{n}/mtu"))?.parse::<u64>().ok());
    match (best, mtu) {
        (None, _) => {
            let fix = "give the interface an IPv4 address, and load a driver with RoCE v2";
            Observation::warn(format!("{seen}; no GID of RoCE v2 with an IPv4 address"), fix)
        }
        (Some((index, ..)), Some(mtu)) if mtu < MTU_OF_JUMBO => {
            let fix = format!("set the MTU to 9000 on hosts and switches: ip link set {} mtu 9000", net[0].0);
            Observation::warn(
                format!("{seen}; GID {index} (RoCE v2), MTU {mtu}: RDMA sends 1,024 bytes a packet"),
                fix,
            )
        }
        (Some((index, ..)), _) => Observation::pass(format!("{seen}; GID {index} (RoCE v2)")),
    }
}

fn rdma(host: &Host) -> Vec<Observation> {
    let devices = host.rdma_devices();
    let as_interface = |name: &String| Interface {
        name: name.clone(),
        address: String::new(),
        is_up: true,
        is_loopback: false,
    };
    let all: Vec<Interface> = devices.iter().map(as_interface).collect();
    let list = host.variable("NCCL_IB_HCA");
    // Devices that NCCL was told to leave alone are nobody's trouble.
    let used = list.map_or_else(|| all.iter().collect(), |list| selected(list, &all));
    let mut results = Vec::new();
    for device in &used {
        for (number, _) in host.entries(&format!("sys/class/infiniband/{}/ports", device.name)) {
            results.push(port(host, &device.name, &number));
        }
    }
    if all.is_empty() {
        return vec![Observation::skip("there is no RDMA device: between hosts NCCL uses sockets")];
    }
    let is_active = |r: &Observation| r.seen.contains("ACTIVE");
    if let Some(list) = list.filter(|_| used.is_empty()) {
        let seen = format!("NCCL_IB_HCA={list} selects none of the devices {}", devices.join(", "));
        results.push(Observation::fail(
            seen,
            "correct it, or unset it; without a device NCCL falls back to sockets",
        ));
    } else if !results.iter().any(is_active) {
        let fix = "check cables and switch, and for InfiniBand the subnet manager";
        results.push(Observation::warn(
            "no port of an RDMA device is active: between hosts NCCL uses sockets",
            fix,
        ));
    }
    results
}

/// The kernel's release as two numbers.
fn kernel(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split(['.', '-']);
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

fn gpudirect(host: &Host) -> Vec<Observation> {
    if host.rdma_devices().is_empty() || host.gpu_addresses().is_empty() {
        return vec![Observation::skip("it takes a GPU and an RDMA device")];
    }
    let modules = host.text("proc/modules").unwrap_or_default();
    let has = |name: &str| modules.lines().any(|l| l.split(' ').next() == Some(name));
    if has("nvidia_peermem") || has("nv_peer_mem") || has("efa_nv_peermem") {
        return vec![Observation::pass("nvidia-peermem is loaded")];
    }
    // DMA-BUF takes Linux 5.12 and the driver's open kernel modules.
    let release = host.text("proc/sys/kernel/osrelease").unwrap_or_default();
    let is_open = host.text("proc/driver/nvidia/version").is_some_and(|v| v.contains("Open Kernel Module"));
    vec![if is_open && kernel(&release).is_some_and(|k| k >= (5, 12)) {
        Observation::pass(format!("by DMA-BUF: Linux {release} and the driver's open kernel modules"))
    } else {
        let seen =
            "neither nvidia-peermem nor DMA-BUF: what goes over RDMA is copied through the host's memory";
        Observation::warn(
            seen,
            "modprobe nvidia-peermem, or install the driver's open kernel modules (Linux 5.12 and later)",
        )
    }]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interface(name: &str) -> Interface {
        Interface {
            name: name.to_owned(),
            address: "10.0.0.1".to_owned(),
            is_up: true,
            is_loopback: name == "lo",
        }
    }

    fn names<'h>(found: &[&'h Interface]) -> Vec<&'h str> {
        found.iter().map(|i| i.name.as_str()).collect()
    }

    #[test]
    fn interfaces_are_selected_as_nccl_selects_them() {
        let all = ["lo", "eth0", "eth1", "docker0", "ib0"].map(interface);
        assert_eq!(names(&by_default(&all)), ["ib0"]);
        assert_eq!(names(&by_default(&all[..4])), ["eth0", "eth1"]);
        assert_eq!(names(&by_default(&all[..1])), ["lo"]);
        assert_eq!(names(&selected("eth", &all)), ["eth0", "eth1"]);
        assert_eq!(names(&selected("=eth1", &all)), ["eth1"]);
        assert_eq!(names(&selected("^=lo,docker0", &all)), ["eth0", "eth1", "ib0"]);
        assert!(selected("ens", &all).is_empty());
        let down = [Interface { is_up: false, ..interface("eth0") }];
        assert!(by_default(&down).is_empty());
    }

    #[test]
    fn releases_are_numbers() {
        assert_eq!(kernel("5.15.0-91-generic"), Some((5, 15)));
        assert_eq!(kernel("6.1"), Some((6, 1)));
        assert_eq!(kernel(""), None);
    }
}
