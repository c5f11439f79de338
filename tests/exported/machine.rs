//! What is read of a machine under a hand-made job.

use super::{S, gpu};
use ringwatch::model::{
    Fact, GpuFact, InterfaceFact, LinkFact, Moved, NodeFact, PcieFact, PortFact, SamplerFact, Throttle,
    Traffic,
};
use std::collections::BTreeSet;

/// GPUs, their links and wires, ports, interfaces and the host; counters grow with the time.
pub(crate) fn facts(ranks: u32, from_ns: u64, at_ns: u64) -> Vec<Fact> {
    let n = at_ns / S;
    let mut facts = Vec::new();
    for r in 0..ranks {
        let links = (0..2).map(|link| LinkFact {
            link,
            up: Some(true),
            speed_mb_per_s: Some(25_000),
            version: Some(4),
            remote: None,
            replays: Some(n / 10),
            recoveries: Some(0),
            crc_errors: Some(n / 10),
        });
        let fact = GpuFact {
            gpu: gpu(r),
            index: Some(r),
            uuid: Some(format!("GPU-{r:04}")),
            name: Some("NVIDIA H200".into()),
            numa: Some(0),
            links: links.collect(),
            pcie: Some(PcieFact {
                generation: Some(5),
                generation_max: Some(5),
                width: Some(if r == 2 { 8 } else { 16 }),
                width_max: Some(16),
                replays: Some(0),
            }),
            sm_mhz: Some(1980),
            sm_max_mhz: Some(1980),
            memory_mhz: Some(3201),
            power_w: Some(612.5),
            power_limit_w: Some(700.0),
            temperature_c: Some(51.0),
            throttled: Some(if r == 3 { BTreeSet::from([Throttle::PowerCap]) } else { BTreeSet::new() }),
            busy: Some(0.97),
            sm_active: Some(0.8),
            memory_active: Some(0.4),
            tensor_active: Some(0.3),
            memory_used_bytes: Some(100 << 30),
            memory_bytes: Some(141 << 30),
            ecc_corrected: Some(0),
            ecc_uncorrected: Some(0),
            remapped_rows: Some((0, 0)),
            remap_pending: Some(false),
            remap_failed: Some(false),
            ..GpuFact::default()
        };
        facts.push(Fact::Gpu(Box::new(fact)));
        let moved = Moved { tx_bytes: 1e9, rx_bytes: 1.1e9 };
        let traffic = Traffic {
            gpu: gpu(r),
            from_ns,
            nvlink: Some(moved),
            links: Vec::new(),
            pcie: Some(Moved { tx_bytes: 1e6, rx_bytes: 2e6 }),
        };
        facts.push(Fact::Traffic(traffic));
    }
    let port = PortFact {
        device: "mlx5_0".into(),
        port: 1,
        address: Some("0000:1a:00.0".into()),
        up: Some(true),
        speed_mbit_per_s: Some(400_000),
        tx_bytes: Some(n << 20),
        rx_bytes: Some(n << 20),
        retransmits: Some(n),
        out_of_order: Some(0),
        congestion: Some(n * 2),
        errors: Some(0),
        downs: Some(0),
    };
    facts.push(Fact::Port(port));
    let interface = InterfaceFact {
        interface: "eth0".into(),
        device: Some("0000:05:00.0".into()),
        up: Some(true),
        speed_mbit_per_s: Some(25_000),
        tx_bytes: Some(n << 10),
        rx_bytes: Some(n << 10),
        drops: Some(0),
        errors: Some(0),
        downs: Some(0),
        driver: Some([("rx_out_of_buffer".to_owned(), n), ("rx_prio*_pause".to_owned(), 0)].into()),
    };
    facts.push(Fact::Interface(interface));
    let node = NodeFact {
        cpus: Some(192),
        cpu_busy: Some(0.25),
        cpu_pressure: Some(0.01),
        memory_pressure: Some(0.0),
        io_pressure: Some(0.002),
        memory_bytes: Some(2 << 40),
        memory_available_bytes: Some(1 << 40),
        tcp_retransmits: Some(n),
        oom_kills: Some(0),
    };
    facts.push(Fact::Node(node));
    facts
}

/// What samplers say of themselves.
pub(crate) fn samplers(at_ns: u64) -> [Fact; 2] {
    let n = at_ns / S;
    let sampler = SamplerFact {
        sampler: "gpu".into(),
        absent: None,
        readings: n * 4,
        failures: 1,
        cost_ns: n * 200_000,
    };
    let absent = SamplerFact {
        sampler: "rdma".into(),
        absent: Some("no port".into()),
        readings: 0,
        failures: 0,
        cost_ns: 0,
    };
    [Fact::Sampler(sampler), Fact::Sampler(absent)]
}
