//! The traffic of a host's network, from the counters of its RDMA ports, or of its interfaces where it has none.

use super::Hardware;
use crate::join::attribution::{Books, Carried, WireTotals, WireWindow};
use crate::join::wire::Wire;
use crate::model::{GpuFact, InterfaceFact, PortFact};
use std::collections::BTreeMap;

/// Ports and interfaces of one host that are added up.
const DEVICES: usize = 1_024;
/// GPUs whose NVLink reaches other hosts: what NCCL calls nodes may then be one fabric, and no NIC is met.
const FABRICS: &[&str] = &["GB200", "GB300", "GH200"];

/// The counters that are added up. NCCL uses RDMA where there is any.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Over {
    #[default]
    Interfaces,
    Ports,
}

/// All counters of one moment: sent and received.
#[derive(Debug, Clone, Default)]
struct Round {
    at_ns: u64,
    bytes: BTreeMap<String, (u64, u64)>,
}

impl Round {
    /// The traffic since another reading. Absent where a device came, went or began again: what it moved is not known.
    fn since(&self, before: &Round) -> Option<Wire> {
        if !self.bytes.keys().eq(before.bytes.keys()) {
            return None;
        }
        let mut sum = Wire::default();
        for ((tx, rx), (tx_before, rx_before)) in self.bytes.values().zip(before.bytes.values()) {
            sum.tx_bytes += tx.checked_sub(*tx_before)? as f64;
            sum.rx_bytes += rx.checked_sub(*rx_before)? as f64;
        }
        Some(sum)
    }
}

/// One host's network.
#[derive(Debug, Clone)]
pub(super) struct Network {
    books: Books,
    over: Over,
    /// The moment whose counters are coming.
    round: Round,
    last: Option<Round>,
}

impl Network {
    fn new() -> Self {
        Network { books: Books::of_network(), over: Over::default(), round: Round::default(), last: None }
    }

    fn read(&mut self, over: Over, at_ns: u64, device: String, bytes: (u64, u64)) {
        if over < self.over {
            return;
        }
        if over > self.over {
            (self.over, self.round, self.last) = (over, Round::default(), None);
        }
        if at_ns != self.round.at_ns {
            let done = std::mem::replace(&mut self.round, Round { at_ns, ..Round::default() });
            if let Some((last, moved)) = self.last.as_ref().and_then(|l| Some((l, done.since(l)?))) {
                self.books.moved(last.at_ns, done.at_ns, moved);
            }
            self.last = (!done.bytes.is_empty()).then_some(done);
        }
        if self.round.bytes.len() < DEVICES {
            self.round.bytes.insert(device, bytes);
        }
    }

    pub(super) fn settle(&mut self, now_ns: u64) {
        self.books.settle(now_ns);
    }
}

impl Hardware {
    /// From now on it is many nodes' hardware: networks are not held against operations, of which not all come, and
    /// less is kept of each GPU.
    pub(in crate::join) fn follow_cluster(&mut self) {
        self.is_of_cluster = true;
        self.networks.clear();
    }

    fn network(&mut self, host: &str) -> Option<&mut Network> {
        if self.is_of_cluster {
            return None;
        }
        if !self.networks.contains_key(host) {
            if self.networks.len() >= super::DEVICES_KEPT {
                return None;
            }
            self.networks.insert(host.to_owned(), Network::new());
        }
        self.networks.get_mut(host)
    }

    pub(super) fn port_moved(&mut self, host: &str, at_ns: u64, p: &PortFact) {
        let Some(bytes) = p.tx_bytes.zip(p.rx_bytes).filter(|_| p.up != Some(false)) else { return };
        if let Some(n) = self.network(host) {
            n.read(Over::Ports, at_ns, format!("{}/{}", p.device, p.port), bytes);
        }
    }

    /// Takes a reading of an interface. Interfaces of software move what those of hardware move as well.
    pub(super) fn interface_moved(&mut self, host: &str, at_ns: u64, i: &InterfaceFact) {
        let real = i.device.is_some() && i.up != Some(false);
        let Some(bytes) = i.tx_bytes.zip(i.rx_bytes).filter(|_| real) else { return };
        if let Some(n) = self.network(host) {
            n.read(Over::Interfaces, at_ns, i.interface.clone(), bytes);
        }
    }

    /// True when somebody reads what goes over any host's network.
    pub(in crate::join) fn is_networked(&self) -> bool {
        !self.networks.is_empty()
    }

    /// Puts what an operation should have moved between nodes into the books of a host.
    pub(in crate::join) fn cross(&mut self, host: &str, mut carried: Carried) {
        if !self.networks.contains_key(host) {
            return;
        }
        let reaches = |g: &GpuFact| g.name.as_deref().is_some_and(|n| FABRICS.iter().any(|f| n.contains(f)));
        if self.gpus_of(host).next().is_some_and(reaches) {
            carried.wire = None;
        }
        if let Some(n) = self.networks.get_mut(host) {
            n.books.carry(&carried);
        }
    }

    /// The hosts whose networks are read, and what they moved since the readings began: over their RDMA ports, or their
    /// interfaces of hardware where they have none.
    pub fn networks(&self) -> impl Iterator<Item = (&str, &WireTotals)> {
        self.networks.iter().map(|(host, n)| (host.as_str(), n.books.totals()))
    }

    /// The traffic of a host's network second by second, against what operations should have moved between it and
    /// other nodes, oldest first, as [`Hardware::windows`].
    pub fn network_windows<'a>(
        &'a self,
        host: &str,
    ) -> impl DoubleEndedIterator<Item = &'a WireWindow> + use<'a> {
        self.networks.get(host).into_iter().flat_map(|n| n.books.windows())
    }
}
