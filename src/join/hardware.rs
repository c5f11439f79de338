//! The machines under the jobs: the last readings of everything, and what moved when.

use crate::model::{Fact, GpuFact, InterfaceFact, NodeFact, PortFact, Reading, SamplerFact, Traffic, Xid};
use std::collections::{BTreeMap, VecDeque};

/// Traffic readings of one GPU that are kept.
const TRAFFIC_KEPT: usize = 1024;
/// Errors of the driver that are kept.
const XIDS_KEPT: usize = 256;

/// What all samplers said.
#[derive(Debug, Clone, Default)]
pub struct Hardware {
    gpus: BTreeMap<(String, String), (u64, GpuFact)>,
    traffic: BTreeMap<(String, String), VecDeque<(u64, Traffic)>>,
    xids: VecDeque<(u64, String, Xid)>,
    ports: BTreeMap<(String, String, u32), (u64, PortFact)>,
    interfaces: BTreeMap<(String, String), (u64, InterfaceFact)>,
    nodes: BTreeMap<String, (u64, NodeFact)>,
    samplers: BTreeMap<(String, String), SamplerFact>,
}

impl Hardware {
    /// Takes one reading.
    pub(super) fn take(&mut self, reading: Reading) {
        let Reading { host, at_ns, fact } = reading;
        match fact {
            Fact::Gpu(g) => {
                self.gpus.insert((host, g.gpu.clone()), (at_ns, *g));
            }
            Fact::Traffic(t) => {
                let kept = self.traffic.entry((host, t.gpu.clone())).or_default();
                if kept.len() == TRAFFIC_KEPT {
                    kept.pop_front();
                }
                kept.push_back((at_ns, t));
            }
            Fact::Xid(x) => {
                if self.xids.len() == XIDS_KEPT {
                    self.xids.pop_front();
                }
                self.xids.push_back((at_ns, host, x));
            }
            Fact::Alarm(_) => {}
            Fact::Port(p) => {
                self.ports.insert((host, p.device.clone(), p.port), (at_ns, p));
            }
            Fact::Interface(i) => {
                self.interfaces.insert((host, i.interface.clone()), (at_ns, i));
            }
            Fact::Node(n) => {
                self.nodes.insert(host, (at_ns, n));
            }
            Fact::Sampler(s) => {
                self.samplers.insert((host, s.sampler.clone()), s);
            }
        }
    }

    /// The GPUs: host, and what was last read of each.
    pub fn gpus(&self) -> impl Iterator<Item = (&str, u64, &GpuFact)> {
        self.gpus.iter().map(|((host, _), (at_ns, g))| (host.as_str(), *at_ns, g))
    }

    /// What a GPU's wires moved, oldest first: when each reading ended, and the reading.
    pub fn traffic(&self, host: &str, gpu: &str) -> impl Iterator<Item = (u64, &Traffic)> {
        let of = self.traffic.get(&(host.to_owned(), gpu.to_owned()));
        of.into_iter().flatten().map(|(at_ns, t)| (*at_ns, t))
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
