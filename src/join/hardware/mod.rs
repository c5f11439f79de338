//! The machines under the jobs: the last readings of everything, what became of it, and what moved when.

mod activity;
mod history;
mod network;
mod pods;

pub use activity::Activity;
pub use history::{Device, Incident, LinkError, Moment, Trouble};

use super::attribution::{Books, Carried, WireTotals, WireWindow};
use crate::model::{
    Fact, GpuFact, InterfaceFact, NodeFact, PodsFact, PortFact, Reading, SamplerFact, Traffic, Xid,
    pci_address,
};
use history::{MOMENTS, keep};
use network::Network;
use std::collections::{BTreeMap, VecDeque};

/// Traffic readings of one GPU that are kept: 100 s of them at ten a second.
const TRAFFIC_KEPT: usize = 1024;
/// The same where a cluster is watched: agents publish about one a second.
const TRAFFIC_KEPT_OF_CLUSTER: usize = 64;
/// Errors of the driver that are kept.
const XIDS_KEPT: usize = 256;
/// Incidents of one host that are kept.
const INCIDENTS_KEPT: usize = 1024;
/// Devices of one kind that are kept; a hostile recording names no end of them.
const DEVICES_KEPT: usize = 65_536;
/// A GPU's link below this share of what its links moved in the middle is weak.
const WEAK: f64 = 0.5;
/// Below this, in bytes, links are not compared.
const COMPARED_BYTES: f64 = 1e6;

/// One GPU of one host.
type GpuKey = (String, String);

/// The readings of all samplers.
#[derive(Debug, Clone, Default)]
pub struct Hardware {
    gpus: BTreeMap<GpuKey, (u64, GpuFact)>,
    moments: BTreeMap<GpuKey, VecDeque<Moment>>,
    traffic: BTreeMap<GpuKey, VecDeque<(u64, Traffic)>>,
    books: BTreeMap<GpuKey, Books>,
    networks: BTreeMap<String, Network>,
    is_of_cluster: bool,
    xids: VecDeque<(u64, String, Xid)>,
    incidents: BTreeMap<String, VecDeque<Incident>>,
    ports: BTreeMap<(String, String, u32), (u64, PortFact)>,
    interfaces: BTreeMap<(String, String), (u64, InterfaceFact)>,
    nodes: BTreeMap<String, (u64, NodeFact)>,
    pods: BTreeMap<String, (u64, PodsFact)>,
    samplers: BTreeMap<(String, String), SamplerFact>,
}

/// Puts a fact in, if there is room; gives back the one before.
fn put<K: Ord, F>(all: &mut BTreeMap<K, (u64, F)>, key: K, at_ns: u64, fact: F) -> Option<F> {
    if all.len() >= DEVICES_KEPT && !all.contains_key(&key) {
        return None;
    }
    all.insert(key, (at_ns, fact)).map(|(_, before)| before)
}

impl Hardware {
    /// Takes one reading.
    pub(super) fn take(&mut self, reading: Reading) {
        let Reading { host, at_ns, fact } = reading;
        match fact {
            Fact::Gpu(mut g) => {
                g.gpu = pci_address(&g.gpu).unwrap_or(g.gpu);
                let key = (host.clone(), g.gpu.clone());
                let before = self.gpus.get(&key).map(|(_, b)| b);
                let changes = history::of_gpu(before, &g);
                self.note(&host, at_ns, &Device::Gpu(g.gpu.clone()), changes);
                if self.moments.len() < DEVICES_KEPT || self.moments.contains_key(&key) {
                    keep(self.moments.entry(key.clone()).or_default(), Moment::of(at_ns, &g), MOMENTS);
                }
                put(&mut self.gpus, key, at_ns, *g);
            }
            Fact::Traffic(mut t) => {
                t.gpu = pci_address(&t.gpu).unwrap_or(t.gpu);
                let key = (host, t.gpu.clone());
                if self.traffic.len() >= DEVICES_KEPT && !self.traffic.contains_key(&key) {
                    return;
                }
                self.books.entry(key.clone()).or_default().read(at_ns, &t);
                let kept = if self.is_of_cluster { TRAFFIC_KEPT_OF_CLUSTER } else { TRAFFIC_KEPT };
                keep(self.traffic.entry(key).or_default(), (at_ns, t), kept);
            }
            Fact::Xid(x) => {
                self.note(&host, at_ns, &Device::gpu(&x.gpu), vec![history::of_xid(&x)]);
                keep(&mut self.xids, (at_ns, host, x), XIDS_KEPT);
            }
            Fact::Alarm(a) => self.note(&host, at_ns, &Device::gpu(&a.gpu), vec![Trouble::Alarm(a.kind)]),
            Fact::Port(p) => {
                self.port_moved(&host, at_ns, &p);
                let key = (host.clone(), p.device.clone(), p.port);
                let changes = history::of_port(self.ports.get(&key).map(|(_, b)| b), &p);
                self.note(&host, at_ns, &Device::Port(p.device.clone(), p.port), changes);
                put(&mut self.ports, key, at_ns, p);
            }
            Fact::Interface(mut i) => {
                self.interface_moved(&host, at_ns, &i);
                let key = (host.clone(), i.interface.clone());
                let before = self.interfaces.get(&key).map(|(_, b)| b);
                // Drivers are asked more rarely than the rest is read.
                i.driver = i.driver.or_else(|| before.and_then(|b| b.driver.clone()));
                let changes = history::of_interface(before, &i);
                self.note(&host, at_ns, &Device::Interface(i.interface.clone()), changes);
                put(&mut self.interfaces, key, at_ns, i);
            }
            Fact::Node(n) => {
                let changes = history::of_node(self.nodes.get(&host).map(|(_, b)| b), &n);
                self.note(&host, at_ns, &Device::Node, changes);
                put(&mut self.nodes, host, at_ns, n);
            }
            Fact::Pods(mut p) => {
                p.holders.truncate(DEVICES_KEPT);
                put(&mut self.pods, host, at_ns, p);
            }
            Fact::Sampler(s) => {
                if self.samplers.len() < DEVICES_KEPT {
                    self.samplers.insert((host, s.sampler.clone()), s);
                }
            }
        }
    }

    fn note(&mut self, host: &str, at_ns: u64, device: &Device, changes: Vec<Trouble>) {
        if changes.is_empty() || self.incidents.len() >= DEVICES_KEPT && !self.incidents.contains_key(host) {
            return;
        }
        let all = self.incidents.entry(host.to_owned()).or_default();
        for trouble in changes {
            keep(all, Incident { at_ns, device: device.clone(), trouble }, INCIDENTS_KEPT);
        }
    }

    /// True when somebody reads what goes over the wires of any GPU.
    pub(super) fn is_metered(&self) -> bool {
        !self.books.is_empty()
    }

    /// Puts an operation into the books of a GPU whose wires are read.
    pub(super) fn carry(&mut self, host: &str, gpu: &str, carried: &[Carried]) {
        let Some(gpu) = pci_address(gpu) else { return };
        if let Some(books) = self.books.get_mut(&(host.to_owned(), gpu)) {
            carried.iter().for_each(|c| books.carry(c));
        }
    }

    /// Lets time pass.
    pub(super) fn settle(&mut self, now_ns: u64) {
        self.books.values_mut().for_each(|b| b.settle(now_ns));
        self.networks.values_mut().for_each(|n| n.settle(now_ns));
    }

    /// The GPUs: host, and what was last read of each.
    pub fn gpus(&self) -> impl Iterator<Item = (&str, u64, &GpuFact)> {
        self.gpus.iter().map(|((host, _), (at_ns, g))| (host.as_str(), *at_ns, g))
    }

    /// One GPU: when it was last read, and what. Its address may be written in any way.
    pub fn gpu(&self, host: &str, gpu: &str) -> Option<(u64, &GpuFact)> {
        self.gpus.get(&(host.to_owned(), pci_address(gpu)?)).map(|(at_ns, g)| (*at_ns, g))
    }

    /// The GPUs of one host.
    pub fn gpus_of(&self, host: &str) -> impl Iterator<Item = &GpuFact> {
        let from = (host.to_owned(), String::new());
        self.gpus.range(from..).take_while(move |((h, _), _)| h == host).map(|(_, (_, g))| g)
    }

    /// The GPUs as [`Hardware::gpus`], each with its last two minutes, oldest first, without looking up any.
    pub fn histories(&self) -> impl Iterator<Item = (&str, u64, &GpuFact, Option<&VecDeque<Moment>>)> {
        let mut moments = self.moments.iter().peekable();
        self.gpus.iter().map(move |(key, (at_ns, g))| {
            while moments.next_if(|(k, _)| *k < key).is_some() {}
            let own = moments.next_if(|(k, _)| *k == key).map(|(_, m)| m);
            (key.0.as_str(), *at_ns, g, own)
        })
    }

    /// The last two minutes of a GPU, oldest first.
    pub fn moments<'a>(
        &'a self,
        host: &str,
        gpu: &str,
    ) -> impl DoubleEndedIterator<Item = &'a Moment> + Clone + use<'a> {
        let key = pci_address(gpu).map(|gpu| (host.to_owned(), gpu));
        key.and_then(|k| self.moments.get(&k)).into_iter().flatten()
    }

    /// The incidents of the devices of a host, oldest first.
    pub fn incidents<'a>(&'a self, host: &str) -> impl DoubleEndedIterator<Item = &'a Incident> + use<'a> {
        self.incidents.get(host).into_iter().flatten()
    }

    /// The hosts of which something became.
    pub fn troubled(&self) -> impl Iterator<Item = &str> {
        self.incidents.keys().map(String::as_str)
    }

    /// The bytes that a GPU's wires moved, oldest first: when each reading ended, and the reading.
    pub fn traffic(&self, host: &str, gpu: &str) -> impl Iterator<Item = (u64, &Traffic)> {
        let key = pci_address(gpu).map(|gpu| (host.to_owned(), gpu));
        let of = key.and_then(|k| self.traffic.get(&k));
        of.into_iter().flatten().map(|(at_ns, t)| (*at_ns, t))
    }

    /// The GPUs whose NVLinks are read, and what they moved since the readings began: Prometheus' counters.
    pub fn wires(&self) -> impl Iterator<Item = (&str, &str, &WireTotals)> {
        self.books.iter().map(|((host, gpu), b)| (host.as_str(), gpu.as_str(), b.totals()))
    }

    /// The bytes that a GPU's wires moved second by second, against what its operations should have moved, oldest
    /// first. The last three seconds are not among them: records of theirs may be on their way.
    pub fn windows<'a>(
        &'a self,
        host: &str,
        gpu: &str,
    ) -> impl DoubleEndedIterator<Item = &'a WireWindow> + use<'a> {
        let key = pci_address(gpu).map(|gpu| (host.to_owned(), gpu));
        key.and_then(|k| self.books.get(&k)).into_iter().flat_map(Books::windows)
    }

    /// The NVLinks of a GPU that moved less than half of what its links moved in the middle, since a moment: their
    /// numbers and that share. Empty where links were not read, or moved next to nothing.
    pub fn weak_links(&self, host: &str, gpu: &str, since_ns: u64) -> Vec<(u32, f64)> {
        let mut moved: BTreeMap<u32, f64> = BTreeMap::new();
        for (_, t) in self.traffic(host, gpu).filter(|(at_ns, _)| *at_ns >= since_ns) {
            for (link, m) in &t.links {
                *moved.entry(*link).or_default() += m.tx_bytes + m.rx_bytes;
            }
        }
        let all: Vec<f64> = moved.values().copied().collect();
        let Some(middle) = super::median(&all).filter(|m| *m >= COMPARED_BYTES) else { return Vec::new() };
        moved.into_iter().map(|(l, m)| (l, m / middle)).filter(|(_, share)| *share < WEAK).collect()
    }

    /// The driver's errors, oldest first: when, on which host, and what.
    pub fn xids(&self) -> impl Iterator<Item = (u64, &str, &Xid)> {
        self.xids.iter().map(|(at_ns, host, x)| (*at_ns, host.as_str(), x))
    }

    /// The RDMA ports: host, and what was last read of each.
    pub fn ports(&self) -> impl Iterator<Item = (&str, u64, &PortFact)> {
        self.ports.iter().map(|((host, ..), (at_ns, p))| (host.as_str(), *at_ns, p))
    }

    /// The network interfaces: host, and what was last read of each.
    pub fn interfaces(&self) -> impl Iterator<Item = (&str, u64, &InterfaceFact)> {
        self.interfaces.iter().map(|((host, _), (at_ns, i))| (host.as_str(), *at_ns, i))
    }

    /// The hosts, and what was last read of each.
    pub fn nodes(&self) -> impl Iterator<Item = (&str, u64, &NodeFact)> {
        self.nodes.iter().map(|(host, (at_ns, n))| (host.as_str(), *at_ns, n))
    }

    /// The samplers: host, and what each last said about itself.
    pub fn samplers(&self) -> impl Iterator<Item = (&str, &SamplerFact)> {
        self.samplers.iter().map(|((host, _), s)| (host.as_str(), s))
    }
}

#[cfg(test)]
mod tests;
