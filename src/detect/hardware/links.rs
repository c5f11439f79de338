//! `link-down`, `link-errors`, `pcie-downgrade`: NVLink, NICs, and the way to the host.

use super::{
    LASTS_NS, RECENT_NS, Read, Told, Users, at_work, between, episode, fact, finding, fresh, named, number,
};
use crate::join::{Device, Hardware, Incident, Join, LinkError, Moment, Trouble};
use crate::model::{Finding, GpuFact, Kind, Severity};
use std::collections::BTreeMap;

/// Recoveries of a link in a minute that are told.
const RECOVERIES: u64 = 3;
/// Packets sent again or with a wrong checksum, in a minute, that are told. A few are what checksums are for.
const REPEATED: u64 = 100;
/// Packets that a NIC sent again, a second over ten of them, that are told: lossy networks lose some.
const RETRANSMITS_A_SECOND: u64 = 100;
const RETRANSMITS_NS: u64 = 10_000_000_000;

pub(super) fn check(join: &Join, users: &Users<'_>, now_ns: u64) -> Vec<Finding> {
    let hardware = join.hardware();
    let mut out = Vec::new();
    for read in fresh(hardware, now_ns) {
        let told = nvlinks_down(hardware, read).into_iter().chain(pcie(hardware, read, now_ns));
        out.extend(told.map(|t| finding(join, users, read.host, &read.device(), t)));
    }
    for (host, _, port) in hardware.ports().filter(|(.., p)| p.up == Some(false)) {
        let device = Device::Port(port.device.clone(), port.port);
        let told = port_down(hardware, host, &device);
        out.extend(told.map(|t| finding(join, users, host, &device, t)));
    }
    for host in hardware.troubled() {
        let mut by: BTreeMap<&Device, Vec<&Incident>> = BTreeMap::new();
        for i in between(hardware, host, now_ns.saturating_sub(RECENT_NS), now_ns) {
            by.entry(&i.device).or_default().push(i);
        }
        for (device, incidents) in by {
            let told = match device {
                Device::Gpu(_) => nvlink_errors(&incidents),
                Device::Port(..) => port_errors(&incidents, now_ns),
                Device::Interface(_) | Device::Node => None,
            };
            out.extend(told.map(|t| finding(join, users, host, device, t)));
        }
    }
    out
}

/// When a link went down, and whether it was up before.
fn went_down(hardware: &Hardware, host: &str, device: &Device, number: u32) -> Option<(u64, bool)> {
    hardware.incidents(host).rev().filter(|i| i.device == *device).find_map(|i| match i.trouble {
        Trouble::LinkDown { link, was_up } if link == number => Some((i.at_ns, was_up)),
        _ => None,
    })
}

/// The links of a GPU that are down and should not be: they were up, or are up on another GPU of its kind.
pub(super) fn down(hardware: &Hardware, host: &str, device: &Device, gpu: &GpuFact) -> Vec<(u32, u64)> {
    if gpu.links.iter().all(|l| l.up != Some(false)) {
        return Vec::new();
    }
    let siblings: Vec<&GpuFact> =
        hardware.gpus_of(host).filter(|g| g.gpu != gpu.gpu && g.name == gpu.name).collect();
    let elsewhere = |link: u32| {
        let up = |g: &&&GpuFact| g.links.iter().any(|l| l.link == link && l.up == Some(true));
        siblings.iter().filter(up).count() * 2 > siblings.len()
    };
    let of = |link: u32| {
        let (at_ns, was_up) = went_down(hardware, host, device, link).unwrap_or((0, true));
        (was_up || elsewhere(link)).then_some((link, at_ns))
    };
    gpu.links.iter().filter(|l| l.up == Some(false)).filter_map(|l| of(l.link)).collect()
}

pub(super) fn list(numbers: &[(u32, u64)]) -> String {
    let all: Vec<String> = numbers.iter().map(|(l, _)| l.to_string()).collect();
    format!("{} {}", if all.len() == 1 { "NVLink" } else { "NVLinks" }, all.join(", "))
}

fn nvlinks_down(hardware: &Hardware, read: Read<'_>) -> Option<Told> {
    let (host, gpu, device) = (read.host, read.gpu, read.device());
    let links = down(hardware, host, &device, gpu);
    let since_ns = links.iter().map(|(_, t)| *t).min()?;
    let who = named(hardware, host, &device);
    let verb = if links.len() == 1 { "is" } else { "are" };
    let mut evidence = vec![
        fact(format!("{} of {who} of host {host} {verb} down", list(&links))),
        number(format!("{} of {} links are down", links.len(), gpu.links.len()), links.len() as f64, "count"),
    ];
    for (link, _) in links.iter().take(4) {
        let remote = gpu.links.iter().find(|l| l.link == *link).and_then(|l| l.remote.as_ref());
        if let Some(r) = remote {
            let at = r.address.as_ref().map_or_else(String::new, |a| format!(" {a}"));
            evidence.push(fact(format!("at the other end of link {link} is a {}{at}", r.kind)));
        }
    }
    Some(Told {
        kind: Kind::LinkDown,
        severity: Severity::Warning,
        about: "nvlink".to_owned(),
        since_ns,
        evidence,
        advice: "nvidia-smi nvlink -s shows the links; look at both ends and, where there is NVSwitch, at the fabric manager's log; a reset of the GPU trains its links anew".to_owned(),
    })
}

fn port_down(hardware: &Hardware, host: &str, device: &Device) -> Option<Told> {
    let lost = hardware
        .incidents(host)
        .rev()
        .find(|i| i.device == *device && matches!(i.trouble, Trouble::PortDown { was_up: true }))?;
    Some(Told {
        kind: Kind::LinkDown,
        severity: Severity::Warning,
        about: "port".to_owned(),
        since_ns: lost.at_ns,
        evidence: vec![fact(format!("{} of host {host} lost its link", super::words(device)))],
        advice:
            "look at the cable and the switch port; jobs go on over other NICs only if they were started so"
                .to_owned(),
    })
}

pub(super) fn nvlink_errors(incidents: &[&Incident]) -> Option<Told> {
    let mut by: BTreeMap<(u32, LinkError), (u64, u64, u64)> = BTreeMap::new();
    for i in incidents {
        if let Trouble::LinkErrors { link, error, by: more } = i.trouble {
            let (n, times, _) = by.entry((link, error)).or_insert((0, 0, i.at_ns));
            *n = n.saturating_add(more);
            *times += 1;
        }
    }
    by.retain(|(_, error), (n, times, _)| match error {
        LinkError::Recovery => *n >= RECOVERIES,
        LinkError::Replay | LinkError::Crc => *n >= REPEATED && *times >= 2,
    });
    let since_ns = by.values().map(|(.., t)| *t).min()?;
    let text = |error: &LinkError| match error {
        LinkError::Recovery => "recoveries",
        LinkError::Replay => "packets sent again",
        LinkError::Crc => "checksum errors",
    };
    let evidence = by
        .iter()
        .map(|((link, error), (n, ..))| {
            number(format!("NVLink {link}: {n} {} within a minute", text(error)), *n as f64, "count")
        })
        .collect();
    Some(Told {
        kind: Kind::LinkErrors,
        severity: Severity::Warning,
        about: "nvlink".to_owned(),
        since_ns,
        evidence,
        advice:
            "nvidia-smi nvlink -e counts them by link; where they go on have the link tested before it fails"
                .to_owned(),
    })
}

/// Packets that a port sent again in the last ten seconds, and since when; absent where it is few, or was one burst.
pub(super) fn retransmits(incidents: &[&Incident], now_ns: u64) -> Option<(u64, u64)> {
    let (mut n, mut times, mut since_ns) = (0u64, 0, None);
    for i in incidents.iter().filter(|i| now_ns.saturating_sub(i.at_ns) <= RETRANSMITS_NS) {
        if let Trouble::Retransmits(by) = i.trouble {
            n = n.saturating_add(by);
            times += 1;
            since_ns.get_or_insert(i.at_ns);
        }
    }
    (times >= 3 && n >= RETRANSMITS_A_SECOND * RETRANSMITS_NS / 1_000_000_000).then_some((n, since_ns?))
}

fn port_errors(incidents: &[&Incident], now_ns: u64) -> Option<Told> {
    let mut evidence = Vec::new();
    let mut since = None;
    if let Some((n, since_ns)) = retransmits(incidents, now_ns) {
        since = Some(since_ns);
        evidence.push(number(format!("{n} packets sent again in ten seconds"), n as f64, "count"));
    }
    let errors = incidents.iter().filter_map(|i| match i.trouble {
        Trouble::PortErrors(by) => Some((by, i.at_ns)),
        _ => None,
    });
    let (n, times, first) = errors.fold((0u64, 0, u64::MAX), |(n, times, first), (by, at_ns)| {
        (n.saturating_add(by), times + 1, first.min(at_ns))
    });
    if n >= REPEATED && times >= 2 {
        since = Some(since.unwrap_or(first).min(first));
        evidence.push(number(format!("{n} errors of the wire within a minute"), n as f64, "count"));
    }
    Some(Told {
        kind: Kind::LinkErrors,
        severity: Severity::Warning,
        about: "port".to_owned(),
        since_ns: since?,
        evidence,
        advice: "look at the cable and the switch port's counters; on Ethernet at flow control (PFC, ECN) along the way".to_owned(),
    })
}

/// A busy GPU with fewer lanes or a lower generation than it could have: for how long, and what.
pub(super) fn downgraded<'a>(
    moments: impl DoubleEndedIterator<Item = &'a Moment> + Clone,
    now_ns: u64,
) -> Option<(u64, String)> {
    let less = |of: Option<(u32, u32)>| of.is_some_and(|(now, most)| now < most);
    // An idle GPU lowers its generation, not its width.
    let bad = |m: &Moment| at_work(m) && (less(m.pcie_width) || m.busy.is_some() && less(m.pcie_generation));
    let run = episode(moments, now_ns, bad)?;
    let last = run.last()?;
    let mut parts = Vec::new();
    if let Some((now, most)) = last.pcie_width.filter(|(now, most)| now < most) {
        parts.push(format!("{now} lanes of {most}"));
    }
    if let Some((now, most)) = last.pcie_generation.filter(|(now, most)| now < most) {
        parts.push(format!("generation {now} of {most}"));
    }
    Some((run.first()?.at_ns, parts.join(", ")))
}

fn pcie(hardware: &Hardware, read: Read<'_>, now_ns: u64) -> Option<Told> {
    let (since_ns, what) = downgraded(read.moments(), now_ns)?;
    let (host, who) = (read.host, named(hardware, read.host, &read.device()));
    Some(Told {
        kind: Kind::PcieDowngrade,
        severity: Severity::Warning,
        about: "pcie".to_owned(),
        since_ns,
        evidence: vec![fact(format!("PCIe of {who} of host {host} runs with {what} while the GPU is busy"))],
        advice: format!(
            "lspci -vv shows the link's state at both ends; reseat the GPU or the riser, look at the slot's settings. It was so for {} s at least",
            LASTS_NS / 1_000_000_000
        ),
    })
}
