//! Devices as the reason of findings about ranks: what was wrong with a culprit's GPU, links and NICs at the time.

use super::clocks::throttling;
use super::errors::xid_evidence;
use super::xids::{Fault, meaning};
use super::{between, fact, links, named, number, place};
use crate::join::{Device, Hardware, Incident, Join, Trouble};
use crate::model::{Cause, Evidence, Finding, Kind, NicTrouble, Rank};
use std::collections::{BTreeMap, BTreeSet};

/// A device may have failed so long before others noticed, in ns.
const BEFORE_NS: u64 = 10_000_000_000;
/// Where ranks stand still, what went before is looked at for longer.
const BEFORE_A_HANG_NS: u64 = 60_000_000_000;
/// Pieces of evidence about devices.
const TOLD: usize = 6;
/// GPUs that are looked at.
const LOOKED_AT: usize = 256;
/// Segments that TCP sent again, from which on it is evidence.
const TCP_SEGMENTS: u64 = 1_000;

/// From so many losses on, a driver's counter of a network interface is evidence.
const DRIVER_LOSSES: u64 = 100;

/// Up to this weight a reason may be why something stands still.
const STOPS: u8 = 2;

/// One thing that was wrong: how much it explains (less is more), its kind, the device, and the words.
type Reason = (u8, Kind, String, Device, Evidence);

/// True for the kinds of which a device may be the reason.
fn may_be(kind: Kind) -> bool {
    matches!(
        kind,
        Kind::MissingRank
            | Kind::NotStarted
            | Kind::StuckTransfer
            | Kind::AbortedRank
            | Kind::Straggler
            | Kind::SlowTransfer
            | Kind::ChangePoint
            | Kind::SlowPair
            | Kind::SlowNode
    )
}

/// Adds to a finding what was wrong with the devices of its culprits at its time, and names it as the cause where none
/// is known.
pub(in crate::detect) fn explain(f: &mut Finding, join: &Join, now_ns: u64) {
    let hardware = join.hardware();
    if !may_be(f.kind) || hardware.gpus().next().is_none() && hardware.troubled().next().is_none() {
        return;
    }
    let Some(comm) = join.communicator(f.communicator) else { return };
    let (from_ns, to_ns) = (
        f.since_ns.saturating_sub(if f.kind.is_hang() { BEFORE_A_HANG_NS } else { BEFORE_NS }),
        if f.open { now_ns } else { f.last_seen_ns.max(f.since_ns) },
    );
    let mut gpus: BTreeSet<(&str, Device)> = BTreeSet::new();
    let of = |r: &Rank| {
        let member = comm.members().get(r)?;
        let host = join.process(member.record.segment)?.record.host.as_str();
        Some((host, member.record.gpu.as_ref()?))
    };
    gpus.extend(f.ranks.iter().filter_map(of).take(LOOKED_AT).map(|(h, g)| (h, Device::gpu(g))));
    let hosts: BTreeSet<&str> = gpus.iter().map(|(h, _)| *h).collect();
    let mut reasons: Vec<Reason> = Vec::new();
    for (host, gpu) in &gpus {
        reasons.extend(of_gpu(hardware, host, gpu, from_ns, to_ns));
    }
    if comm.members().values().any(|m| m.record.nodes != Some(1)) {
        for host in hosts {
            reasons.extend(of_network(hardware, host, from_ns, to_ns));
        }
    }
    if f.kind.is_hang() {
        // What makes a GPU slow makes nobody stand still.
        reasons.retain(|r| r.0 <= STOPS);
    }
    // The words of one thing may be found in two ways.
    reasons.sort_by(|a, b| (a.0, &a.2, &a.3, &a.4.text).cmp(&(b.0, &b.2, &b.3, &b.4.text)));
    reasons.dedup_by(|a, b| a.4.text == b.4.text);
    if let (None | Some(Cause::Unknown), Some((_, kind, host, device, _))) = (&f.cause, reasons.first()) {
        f.cause = Some(Cause::Device(*kind, place(host, device)));
    }
    if let Some((.., evidence)) = reasons.first() {
        f.advice = format!("see to this first: {}; else {}", evidence.text, f.advice);
    }
    let told: Vec<Evidence> = reasons.into_iter().take(TOLD).map(|(.., e)| e).collect();
    // What explains comes first.
    f.evidence.splice(0..0, told);
}

fn of_gpu(hardware: &Hardware, host: &str, device: &Device, from_ns: u64, to_ns: u64) -> Vec<Reason> {
    let Device::Gpu(address) = device else { return Vec::new() };
    let who = format!("{} of host {host}", named(hardware, host, device));
    let mut out: Vec<Reason> = Vec::new();
    let mut tell = |weight, kind, e| out.push((weight, kind, host.to_owned(), device.clone(), e));
    let incidents: Vec<&Incident> =
        between(hardware, host, from_ns, to_ns).filter(|i| i.device == *device).collect();
    let mut uncorrected = 0u64;
    for i in &incidents {
        match i.trouble {
            Trouble::Xid(code) => {
                // What only follows from something else explains nothing.
                let weight = match meaning(code).map(|m| m.fault) {
                    Some(Fault::Consequence) => continue,
                    Some(Fault::Application) => 1,
                    _ => 0,
                };
                tell(weight, Kind::Xid, xid_evidence(&who, code));
            }
            Trouble::EccUncorrected(by) => uncorrected = uncorrected.saturating_add(by),
            _ => {}
        }
    }
    if uncorrected > 0 {
        let text = format!("{who}: {uncorrected} memory errors that could not be corrected at that time");
        tell(1, Kind::EccErrors, number(text, uncorrected as f64, "count"));
    }
    for e in links::nvlink_errors(&incidents).map(|t| t.evidence).unwrap_or_default() {
        tell(5, Kind::LinkErrors, Evidence { text: format!("{who}: {}", e.text), ..e });
    }
    if let Some((_, gpu)) = hardware.gpu(host, address) {
        let all: Vec<(u32, u64)> =
            links::down(hardware, host, device, gpu).into_iter().filter(|(_, t)| *t <= to_ns).collect();
        if !all.is_empty() {
            let verb = if all.len() == 1 { "is" } else { "are" };
            tell(2, Kind::LinkDown, fact(format!("{} of {who} {verb} down", links::list(&all))));
        }
        let weak = hardware.weak_links(host, address, from_ns);
        let quiet: Vec<(u32, u64)> =
            weak.iter().filter(|(l, _)| !all.iter().any(|(d, _)| d == l)).map(|(l, _)| (*l, 0)).collect();
        if !quiet.is_empty() {
            tell(
                6,
                Kind::LinkErrors,
                fact(format!("{} of {who} carries less than half of its siblings", links::list(&quiet))),
            );
        }
    }
    let moments = hardware.moments(host, address);
    let most = hardware.gpu(host, address).and_then(|(_, g)| g.sm_max_mhz);
    if let Some(t) = throttling(moments.clone(), most, to_ns) {
        tell(3, Kind::ThrottledGpu, fact(format!("{who} throttles: {}", t.words())));
    }
    let until = moments.filter(|m| m.at_ns <= to_ns);
    if let Some((_, what)) = links::downgraded(until, to_ns) {
        tell(4, Kind::PcieDowngrade, fact(format!("PCIe of {who} runs with {what}")));
    }
    out
}

fn of_network(hardware: &Hardware, host: &str, from_ns: u64, to_ns: u64) -> Vec<Reason> {
    let mut by: BTreeMap<&Device, Vec<&Incident>> = BTreeMap::new();
    for i in between(hardware, host, from_ns, to_ns).filter(|i| !matches!(i.device, Device::Gpu(_))) {
        by.entry(&i.device).or_default().push(i);
    }
    let mut out = Vec::new();
    for (device, incidents) in by {
        let who = format!("{} of host {host}", super::words(device));
        let mut tell = |weight, kind, e| out.push((weight, kind, host.to_owned(), device.clone(), e));
        if incidents.iter().any(|i| matches!(i.trouble, Trouble::PortDown { was_up: true })) {
            tell(2, Kind::LinkDown, fact(format!("{who} lost its link")));
        }
        let sum = |of: fn(&Trouble) -> Option<u64>| {
            incidents.iter().filter_map(|i| of(&i.trouble)).fold(0u64, u64::saturating_add)
        };
        let again = sum(|t| if let Trouble::Retransmits(by) = t { Some(*by) } else { None });
        match device {
            Device::Node if again >= TCP_SEGMENTS => tell(
                6,
                Kind::LinkErrors,
                number(
                    format!("host {host} sent {again} TCP segments again at that time"),
                    again as f64,
                    "count",
                ),
            ),
            Device::Port(..) if links::retransmits(&incidents, to_ns).is_some() => tell(
                4,
                Kind::LinkErrors,
                number(format!("{who} sent {again} packets again at that time"), again as f64, "count"),
            ),
            Device::Interface(_) => {
                for ((counter, means), n) in losses(&incidents) {
                    let text = format!("{who}: {counter} grew by {n} at that time: {}", means.words());
                    tell(5, Kind::LinkErrors, number(text, n as f64, "count"));
                }
            }
            _ => {}
        }
    }
    out
}

/// The losses of a driver, by its own counters; a few packets are lost everywhere.
fn losses(incidents: &[&Incident]) -> BTreeMap<(&'static str, NicTrouble), u64> {
    let mut by: BTreeMap<(&'static str, NicTrouble), u64> = BTreeMap::new();
    for i in incidents {
        if let Trouble::Driver { counter, means, by: more } = i.trouble {
            let n = by.entry((counter, means)).or_default();
            *n = n.saturating_add(more);
        }
    }
    by.retain(|(_, means), n| *means == NicTrouble::Allowance || means.is_loss() && *n >= DRIVER_LOSSES);
    by
}
