//! What the samplers of the hosts would read: healthy machines with the noise that they have, and what the case says is
//! wrong with them.

use super::case::Ns;
use super::{MS, S, Simulation};
use ringwatch::model::{
    Fact, GpuFact, LinkFact, NodeFact, PcieFact, PortFact, Reading, Throttle, Update, Xid,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// Links of a GPU.
const LINKS: u32 = 18;
const CLOCK: u32 = 1980;

/// The machines, and what is wrong with them.
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Machines {
    /// GPUs that are idle between these moments: low clocks, a low generation of PCIe.
    #[serde(default)]
    pub(crate) idle: Option<(Ns, Ns)>,
    /// Links that no GPU of this kind has connected.
    #[serde(default)]
    pub(crate) unconnected: Vec<u32>,
    #[serde(default)]
    pub(crate) ailments: Vec<Ailment>,
}

/// One thing that is wrong, on the GPU of a rank or on the NICs of a host.
#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Ailment {
    pub(crate) rank: Option<u32>,
    pub(crate) host: Option<u32>,
    pub(crate) from: Ns,
    pub(crate) until: Option<Ns>,
    /// Its clock is held down, by heat.
    pub(crate) hot_mhz: Option<u32>,
    /// Its clock is low, and nothing says why.
    pub(crate) slow_mhz: Option<u32>,
    /// This link is down.
    pub(crate) down: Option<u32>,
    /// Packets of link 3 sent again, and its recoveries, a second.
    pub(crate) replays: u64,
    pub(crate) recoveries: u64,
    /// The driver reports this, once.
    pub(crate) xid: Option<u64>,
    /// Corrected memory errors a second, and uncorrected ones in all.
    pub(crate) corrected: u64,
    pub(crate) uncorrected: u64,
    /// Lanes of its PCIe link.
    pub(crate) lanes: Option<u32>,
    /// Packets that the host's NIC sends again, a second.
    pub(crate) retransmits: u64,
    /// The host's NIC has no link.
    pub(crate) unplugged: bool,
}

impl Ailment {
    fn holds(&self, now: u64) -> bool {
        now >= self.from.0 && self.until.is_none_or(|u| now < u.0)
    }

    /// How often something has come that comes so many times a second.
    fn so_far(&self, a_second: u64, now: u64) -> u64 {
        let end = self.until.map_or(now, |u| now.min(u.0));
        end.saturating_sub(self.from.0) * a_second / S
    }
}

impl Simulation {
    /// The readings of a look.
    pub(super) fn readings(&mut self, now: u64) -> Vec<Update> {
        let mut out = self.load_readings(now);
        let Some(machines) = self.case.hardware.clone() else { return out };
        let last = self.last_look;
        for a in &machines.ailments {
            if let (Some(code), Some(rank)) = (a.xid, a.rank)
                && (last..now).contains(&a.from.0)
            {
                let fact = Fact::Xid(Xid { gpu: self.gpu_address(rank), code });
                out.push(self.reading(rank, now, fact));
            }
        }
        if now < self.read_at {
            return out;
        }
        self.read_at = now + S - 20 * MS;
        for rank in 0..self.case.ranks {
            let fact = Fact::Gpu(Box::new(self.gpu_fact(rank, now, &machines)));
            out.push(self.reading(rank, now, fact));
        }
        let a_node = self.case.ranks.div_ceil(self.case.nodes);
        for host in 0..self.case.nodes {
            let first = host * a_node;
            let noise = self.below(3, now ^ u64::from(host));
            let of = || machines.ailments.iter().filter(move |a| a.host == Some(host));
            let again: u64 = of().map(|a| a.so_far(a.retransmits, now)).sum();
            let port = PortFact {
                device: "mlx5_0".to_owned(),
                port: 1,
                up: Some(!of().any(|a| a.unplugged && a.holds(now))),
                speed_mbit_per_s: Some(400_000),
                // Now and then a packet is lost anywhere.
                retransmits: Some(now / S + again + noise % 2),
                congestion: Some(now / MS),
                ..PortFact::default()
            };
            out.push(self.reading(first, now, Fact::Port(port)));
            let node = NodeFact {
                cpu_busy: Some(0.4),
                tcp_retransmits: Some(now / S * 2 + noise),
                ..NodeFact::default()
            };
            out.push(self.reading(first, now, Fact::Node(node)));
        }
        out
    }

    pub(super) fn reading(&self, rank: u32, now: u64, fact: Fact) -> Update {
        let host = format!("node{}", self.node(rank));
        Update::Hardware(Box::new(Reading { host, at_ns: self.mono(rank, now), fact }))
    }

    fn gpu_fact(&mut self, rank: u32, now: u64, machines: &Machines) -> GpuFact {
        let of = || machines.ailments.iter().filter(move |a| a.rank == Some(rank));
        let now_of = || of().filter(|a| a.holds(now));
        let idle = machines.idle.is_some_and(|(from, to)| (from.0..to.0).contains(&now));
        let jitter = self.below(60, now ^ u64::from(rank) << 48) as u32;
        let hot = now_of().find_map(|a| a.hot_mhz);
        let clock = hot.or_else(|| now_of().find_map(|a| a.slow_mhz));
        let sum = |f: fn(&Ailment) -> u64| of().map(|a| a.so_far(f(a), now)).sum::<u64>();
        let links = (0..LINKS).map(|link| {
            let down = machines.unconnected.contains(&link) || now_of().any(|a| a.down == Some(link));
            LinkFact {
                link,
                up: Some(!down),
                replays: Some(now / S / 7 + if link == 3 { sum(|a| a.replays) } else { 0 }),
                recoveries: Some(if link == 3 { sum(|a| a.recoveries) } else { 0 }),
                crc_errors: Some(0),
                ..LinkFact::default()
            }
        });
        let capped = jitter.is_multiple_of(2).then_some(Throttle::PowerCap);
        let heat = [Throttle::ThermalHardware, Throttle::Hardware];
        GpuFact {
            gpu: self.gpu_address(rank),
            index: Some(rank % 8),
            name: Some("NVIDIA H200".to_owned()),
            links: links.collect(),
            pcie: Some(PcieFact {
                generation: Some(if idle { 1 } else { 5 }),
                generation_max: Some(5),
                width: Some(now_of().find_map(|a| a.lanes).unwrap_or(16)),
                width_max: Some(16),
                replays: Some(0),
            }),
            sm_mhz: Some(if idle { 345 } else { clock.unwrap_or(CLOCK) - jitter }),
            sm_max_mhz: Some(CLOCK),
            temperature_c: Some(if hot.is_some() { 88.0 } else { 60.0 + f64::from(jitter) / 4.0 }),
            power_w: Some(if idle { 90.0 } else { 640.0 + f64::from(jitter) }),
            throttled: Some(match hot {
                Some(_) if !idle => BTreeSet::from(heat),
                _ => capped.into_iter().collect(),
            }),
            busy: Some(if idle { 0.0 } else { 0.9 + f64::from(jitter) / 1_000.0 }),
            ecc_corrected: Some(now / S / 5 + sum(|a| a.corrected)),
            ecc_uncorrected: Some(now_of().map(|a| a.uncorrected).sum()),
            ..GpuFact::default()
        }
    }
}
