//! The history of a device: its last minutes in short, and each time something about it got worse.

use crate::model::{
    AlarmKind, GpuFact, InterfaceFact, LinkFact, NicTrouble, NodeFact, PortFact, Throttle, Xid, nic_counter,
    pci_address,
};
use std::collections::{BTreeSet, VecDeque};

/// Moments of a GPU that are kept: two minutes at one a second.
pub(super) const MOMENTS: usize = 120;

/// A device of a host.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Device {
    /// A GPU, by its PCI address as NCCL writes it.
    Gpu(String),
    /// An RDMA port: its device and its number.
    Port(String, u32),
    /// A network interface.
    Interface(String),
    /// The host itself.
    Node,
}

impl Device {
    /// A GPU, however its address is written.
    pub fn gpu(address: &str) -> Self {
        Device::Gpu(pci_address(address).unwrap_or_else(|| address.to_owned()))
    }
}

/// Counters of one NVLink.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LinkError {
    /// Packets sent again.
    Replay,
    /// Recoveries.
    Recovery,
    /// Checksum errors.
    Crc,
}

/// Something that got worse, or better again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trouble {
    /// The driver reported an error.
    Xid(u64),
    /// The driver reported something else.
    Alarm(AlarmKind),
    /// An NVLink went down, or was down when first seen (`was_up` is false then).
    LinkDown {
        /// Its number.
        link: u32,
        /// True where it was seen up before.
        was_up: bool,
    },
    /// It came up.
    LinkUp {
        /// Its number.
        link: u32,
    },
    /// An NVLink counted more errors.
    LinkErrors {
        /// Its number.
        link: u32,
        /// Of which kind.
        error: LinkError,
        /// How many more.
        by: u64,
    },
    /// More memory errors that were corrected.
    EccCorrected(u64),
    /// More memory errors that were not.
    EccUncorrected(u64),
    /// More rows of memory, or pages, were taken out of use.
    RowsReplaced(u64),
    /// Taking them out of use failed.
    RemapFailed,
    /// More packets were sent again over PCIe.
    PcieReplays(u64),
    /// A port or interface lost its link, or had none when first seen (`was_up` is false then).
    PortDown {
        /// True where it was seen up before.
        was_up: bool,
    },
    /// It has one again.
    PortUp,
    /// Packets were sent again: by RDMA's count, or TCP's for a host.
    Retransmits(u64),
    /// More errors or drops were counted.
    PortErrors(u64),
    /// The driver of a network interface counted more of what it has a counter for.
    Driver {
        /// Its name, with `*` for the number of a queue.
        counter: &'static str,
        /// The meaning of the counter.
        means: NicTrouble,
        /// How many more.
        by: u64,
    },
}

/// A change of a device, and when it was seen.
#[derive(Debug, Clone, PartialEq)]
pub struct Incident {
    /// When, host monotonic ns.
    pub at_ns: u64,
    /// Of what.
    pub device: Device,
    /// What.
    pub trouble: Trouble,
}

/// A GPU's load and clocks at one moment.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Moment {
    /// When, host monotonic ns.
    pub at_ns: u64,
    /// Clock of its multiprocessors in MHz.
    pub sm_mhz: Option<u32>,
    /// Share of time with a kernel on it.
    pub busy: Option<f64>,
    /// Share of its memory's bandwidth in use.
    pub memory_active: Option<f64>,
    /// Why its clocks are held down.
    pub throttled: Option<BTreeSet<Throttle>>,
    /// Temperature in degrees Celsius.
    pub temperature_c: Option<f64>,
    /// Power drawn in W.
    pub power_w: Option<f64>,
    /// Generation of its PCIe link, and the highest there is.
    pub pcie_generation: Option<(u32, u32)>,
    /// Lanes of its PCIe link, and the most there are.
    pub pcie_width: Option<(u32, u32)>,
}

impl Moment {
    pub(super) fn of(at_ns: u64, g: &GpuFact) -> Self {
        let pcie = g.pcie.as_ref();
        Moment {
            at_ns,
            sm_mhz: g.sm_mhz,
            busy: g.busy.or(g.sm_active),
            memory_active: g.memory_active,
            throttled: g.throttled.clone(),
            temperature_c: g.temperature_c,
            power_w: g.power_w,
            pcie_generation: pcie.and_then(|p| p.generation.zip(p.generation_max)),
            pcie_width: pcie.and_then(|p| p.width.zip(p.width_max)),
        }
    }
}

/// How much a counter gained; one that went back was reset.
fn gained(before: Option<u64>, now: Option<u64>) -> Option<u64> {
    now?.checked_sub(before?).filter(|n| *n > 0)
}

fn link_changes(before: Option<&LinkFact>, now: &LinkFact, out: &mut Vec<Trouble>) {
    let link = now.link;
    match (before.and_then(|b| b.up), now.up) {
        (Some(true), Some(false)) => out.push(Trouble::LinkDown { link, was_up: true }),
        (None, Some(false)) => out.push(Trouble::LinkDown { link, was_up: false }),
        (Some(false), Some(true)) => out.push(Trouble::LinkUp { link }),
        _ => {}
    }
    let Some(before) = before else { return };
    let counters = [
        (LinkError::Replay, before.replays, now.replays),
        (LinkError::Recovery, before.recoveries, now.recoveries),
        (LinkError::Crc, before.crc_errors, now.crc_errors),
    ];
    for (error, then, now) in counters {
        out.extend(gained(then, now).map(|by| Trouble::LinkErrors { link, error, by }));
    }
}

/// The changes from one reading of a GPU to the next.
pub(super) fn of_gpu(before: Option<&GpuFact>, now: &GpuFact) -> Vec<Trouble> {
    let mut out = Vec::new();
    for link in &now.links {
        let known = before.and_then(|b| b.links.iter().find(|l| l.link == link.link));
        link_changes(known, link, &mut out);
    }
    let failed = now.remap_failed == Some(true);
    if failed && before.is_none_or(|b| b.remap_failed != Some(true)) {
        out.push(Trouble::RemapFailed);
    }
    let Some(before) = before else { return out };
    let rows = |g: &GpuFact| {
        let remapped = g.remapped_rows.map(|(a, b)| u64::from(a) + u64::from(b));
        remapped.or(g.retired_pages.map(u64::from))
    };
    let replays = |g: &GpuFact| g.pcie.as_ref().and_then(|p| p.replays);
    out.extend(gained(before.ecc_corrected, now.ecc_corrected).map(Trouble::EccCorrected));
    out.extend(gained(before.ecc_uncorrected, now.ecc_uncorrected).map(Trouble::EccUncorrected));
    out.extend(gained(rows(before), rows(now)).map(Trouble::RowsReplaced));
    out.extend(gained(replays(before), replays(now)).map(Trouble::PcieReplays));
    out
}

fn up_changes(before: Option<bool>, now: Option<bool>) -> Option<Trouble> {
    match (before, now) {
        (Some(true), Some(false)) => Some(Trouble::PortDown { was_up: true }),
        (Some(false), Some(true)) => Some(Trouble::PortUp),
        _ => None,
    }
}

/// The same of an RDMA port. One that is down from the start is one that nobody uses.
pub(super) fn of_port(before: Option<&PortFact>, now: &PortFact) -> Vec<Trouble> {
    let Some(b) = before else { return Vec::new() };
    let mut out: Vec<Trouble> = up_changes(b.up, now.up).into_iter().collect();
    out.extend(gained(b.retransmits, now.retransmits).map(Trouble::Retransmits));
    out.extend(gained(b.errors, now.errors).map(Trouble::PortErrors));
    // It went down and came back between two looks.
    let flapped = b.up == Some(true) && now.up == Some(true) && gained(b.downs, now.downs).is_some();
    if flapped {
        out.extend([Trouble::PortDown { was_up: true }, Trouble::PortUp]);
    }
    out
}

/// The same of a network interface.
pub(super) fn of_interface(before: Option<&InterfaceFact>, now: &InterfaceFact) -> Vec<Trouble> {
    let Some(b) = before else { return Vec::new() };
    let mut out: Vec<Trouble> = up_changes(b.up, now.up).into_iter().collect();
    let errors = |i: &InterfaceFact| match (i.drops, i.errors) {
        (None, None) => None,
        (d, e) => Some(d.unwrap_or(0).saturating_add(e.unwrap_or(0))),
    };
    out.extend(gained(errors(b), errors(now)).map(Trouble::PortErrors));
    for (name, n) in now.driver.iter().flatten() {
        let before = b.driver.as_ref().and_then(|d| d.get(name)).copied();
        let known = gained(before, Some(*n)).zip(nic_counter(name));
        out.extend(known.map(|(by, (counter, means))| Trouble::Driver { counter, means, by }));
    }
    out
}

/// The same of a host.
pub(super) fn of_node(before: Option<&NodeFact>, now: &NodeFact) -> Vec<Trouble> {
    gained(before.and_then(|b| b.tcp_retransmits), now.tcp_retransmits)
        .map(Trouble::Retransmits)
        .into_iter()
        .collect()
}

/// The trouble that a driver's error means.
pub(super) fn of_xid(xid: &Xid) -> Trouble {
    Trouble::Xid(xid.code)
}

/// Keeps the newest.
pub(super) fn keep<T>(all: &mut VecDeque<T>, one: T, most: usize) {
    while all.len() >= most {
        all.pop_front();
    }
    all.push_back(one);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(up: bool, replays: u64, ecc: u64) -> GpuFact {
        let link = LinkFact { link: 7, up: Some(up), replays: Some(replays), ..LinkFact::default() };
        GpuFact { links: vec![link], ecc_corrected: Some(ecc), ..GpuFact::default() }
    }

    #[test]
    fn only_what_changes_is_told() {
        let a = gpu(true, 5, 9);
        assert_eq!(of_gpu(None, &a), [], "old errors are nobody's now");
        assert_eq!(of_gpu(Some(&a), &a), []);
        assert_eq!(
            of_gpu(Some(&a), &gpu(false, 8, 9)),
            [
                Trouble::LinkDown { link: 7, was_up: true },
                Trouble::LinkErrors { link: 7, error: LinkError::Replay, by: 3 }
            ]
        );
        assert_eq!(of_gpu(Some(&gpu(false, 0, 0)), &a)[0], Trouble::LinkUp { link: 7 });
        assert_eq!(of_gpu(None, &gpu(false, 0, 0)), [Trouble::LinkDown { link: 7, was_up: false }]);
        assert_eq!(of_gpu(Some(&a), &gpu(true, 0, 0)), [], "a reset is no error");
        assert_eq!(of_gpu(Some(&a), &GpuFact::default()), [], "absent is not zero");
    }

    #[test]
    fn a_drivers_counters_are_told_by_name_and_only_those_that_are_known() {
        let with = |all: &[(&str, u64)]| InterfaceFact {
            driver: Some(all.iter().map(|(k, v)| ((*k).to_owned(), *v)).collect()),
            ..InterfaceFact::default()
        };
        let before = with(&[("rx_out_of_buffer", 5), ("rx_packets", 1)]);
        let now = with(&[("rx_out_of_buffer", 12), ("rx_packets", 9), ("tx_discards_phy", 4)]);
        let grown = Trouble::Driver { counter: "rx_out_of_buffer", means: NicTrouble::NoBuffer, by: 7 };
        assert_eq!(of_interface(Some(&before), &now), [grown], "what was not counted before has not grown");
        assert_eq!(of_interface(Some(&now), &before), [], "a reset is no error");
        assert_eq!(of_interface(None, &now), []);
    }

    #[test]
    fn a_port_that_flaps_between_looks_was_down() {
        let at = |up, downs| PortFact { up: Some(up), downs: Some(downs), ..PortFact::default() };
        assert_eq!(of_port(None, &at(false, 0)), [], "nobody uses it");
        assert_eq!(of_port(Some(&at(true, 1)), &at(false, 2)), [Trouble::PortDown { was_up: true }]);
        let flap = of_port(Some(&at(true, 1)), &at(true, 2));
        assert_eq!(flap, [Trouble::PortDown { was_up: true }, Trouble::PortUp]);
    }
}
