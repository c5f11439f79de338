//! Findings about devices, and devices as the reason of other findings.
//!
//! Every rule looks at the last one or two minutes of a device and remembers nothing. What is bad by moments is told
//! when it lasted, and over when it has been good for as long.

mod clocks;
mod errors;
mod explain;
mod links;
mod xids;

pub(super) use explain::explain;

use super::{Rule, fact, number, rounded, wall};
use crate::join::{Device, Hardware, Incident, Join, Moment};
use crate::model::{
    CommId, Confidence, Evidence, Finding, GpuFact, Kind, OperationRef, Place, Rank, SegmentId, Severity,
    Track, Victims,
};
use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// The name in an operation's place: a device is about none.
const NO_OPERATION: &str = "Device";
/// A reading older than this, in ns, says nothing about now.
const FRESH_NS: u64 = 15_000_000_000;
/// Incidents count for so long, in ns.
const RECENT_NS: u64 = 60_000_000_000;
/// A state has to last so long, in ns, before it is told, and be away for so long before it is over.
const LASTS_NS: u64 = 5_000_000_000;
/// A GPU is at work from this share of the time on.
const BUSY: f64 = 0.5;

/// The rules about devices.
#[derive(Debug, Default)]
pub(super) struct HardwareRule;

impl Rule for HardwareRule {
    fn check(&self, join: &Join, now_ns: u64) -> Vec<Finding> {
        let hardware = join.hardware();
        if hardware.gpus().next().is_none() && hardware.troubled().next().is_none() {
            return Vec::new();
        }
        let users = Users::of(join);
        let mut all = errors::check(join, &users, now_ns);
        all.extend(links::check(join, &users, now_ns));
        all.extend(clocks::check(join, &users, now_ns));
        all
    }
}

/// The ranks and communicators that use each GPU, and each host's network. Few devices are told of at a time, so what a
/// host's processes are in is looked up when it is asked for.
struct Users<'a> {
    join: &'a Join,
    hosts: OnceCell<BTreeMap<&'a str, Vec<SegmentId>>>,
}

/// A rank of a communicator, and what it has issued so far.
type User = (CommId, Rank, u64);

impl<'a> Users<'a> {
    fn of(join: &'a Join) -> Self {
        Users { join, hosts: OnceCell::new() }
    }

    /// The processes by their hosts.
    fn hosts(&self) -> &BTreeMap<&'a str, Vec<SegmentId>> {
        self.hosts.get_or_init(|| {
            let mut all: BTreeMap<&str, Vec<SegmentId>> = BTreeMap::new();
            for p in self.join.processes() {
                all.entry(&p.record.host).or_default().push(p.record.id);
            }
            all
        })
    }

    /// The ranks that use a GPU, or may send over the host's network.
    fn of_device(&self, host: &str, device: &Device) -> Vec<User> {
        let is_gpu = matches!(device, Device::Gpu(_));
        let user = |(comm, rank): &(CommId, Rank)| {
            let c = self.join.communicator(*comm).filter(|c| !c.closed())?;
            let r = &c.members().get(rank)?.record;
            let uses = match &r.gpu {
                Some(gpu) if is_gpu => Device::gpu(gpu) == *device,
                _ => !is_gpu && r.nodes != Some(1),
            };
            uses.then_some((*comm, *rank, r.issued))
        };
        let processes = self.hosts().get(host).into_iter().flatten();
        let mut all: Vec<User> = processes.flat_map(|p| self.join.memberships(*p)).filter_map(user).collect();
        all.sort_unstable();
        all
    }

    fn victims(&self, host: &str, device: &Device) -> Vec<Victims> {
        let mut by: BTreeMap<CommId, Victims> = BTreeMap::new();
        for (communicator, rank, issued) in self.of_device(host, device) {
            let v = by.entry(communicator).or_insert_with(|| Victims {
                communicator,
                ranks: Vec::new(),
                order: issued.saturating_sub(1),
                track: Track::Collective,
            });
            v.ranks.push(rank);
        }
        by.into_values().collect()
    }

    /// The communicators that use a GPU.
    fn comms(&self, host: &str, device: &Device) -> BTreeSet<CommId> {
        self.of_device(host, device).into_iter().map(|(c, ..)| c).collect()
    }
}

/// A device in words.
fn words(device: &Device) -> String {
    match device {
        Device::Gpu(address) => format!("GPU {address}"),
        Device::Port(device, port) => format!("RDMA port {device}/{port}"),
        Device::Interface(name) => format!("interface {name}"),
        Device::Node => "the host".to_owned(),
    }
}

fn place(host: &str, device: &Device) -> Place {
    Place { host: host.to_owned(), device: words(device) }
}

/// `GPU 0000:1a:00.0 (index 5)`.
fn named(hardware: &Hardware, host: &str, device: &Device) -> String {
    let index = match device {
        Device::Gpu(address) => hardware.gpu(host, address).and_then(|(_, g)| g.index),
        _ => None,
    };
    index.map_or_else(|| words(device), |i| format!("{} (index {i})", words(device)))
}

/// A rule's result for a device.
struct Told {
    kind: Kind,
    severity: Severity,
    /// The text that distinguishes it from others of its kind on the same device.
    about: String,
    since_ns: u64,
    evidence: Vec<Evidence>,
    advice: String,
}

fn finding(join: &Join, users: &Users<'_>, host: &str, device: &Device, told: Told) -> Finding {
    let victims = users.victims(host, device);
    let communicator = victims.first().map_or(CommId::unowned(0), |v| v.communicator);
    Finding {
        since: wall(join, told.since_ns),
        since_ns: told.since_ns,
        evidence: told.evidence,
        advice: told.advice,
        severity: told.severity,
        confidence: Confidence::Proven,
        subject: Some(format!("{host}/{}/{}", words(device), told.about)),
        place: Some(place(host, device)),
        victims,
        ..Finding::new(
            told.kind,
            communicator,
            Vec::new(),
            OperationRef::named(NO_OPERATION, Track::Collective, 0),
        )
    }
}

/// A GPU that was read a moment ago, and its last two minutes.
#[derive(Clone, Copy)]
struct Read<'a> {
    host: &'a str,
    gpu: &'a GpuFact,
    moments: Option<&'a VecDeque<Moment>>,
}

impl<'a> Read<'a> {
    fn moments(self) -> impl DoubleEndedIterator<Item = &'a Moment> + Clone {
        self.moments.into_iter().flatten()
    }

    fn device(self) -> Device {
        Device::Gpu(self.gpu.gpu.clone())
    }
}

/// The GPUs that were read a moment ago, by host.
fn fresh(hardware: &Hardware, now_ns: u64) -> impl Iterator<Item = Read<'_>> {
    hardware
        .histories()
        .filter(move |(_, at_ns, ..)| now_ns.saturating_sub(*at_ns) <= FRESH_NS)
        .map(|(host, _, gpu, moments)| Read { host, gpu, moments })
}

/// The incidents of a host between two moments.
fn between<'a>(
    hardware: &'a Hardware,
    host: &str,
    from_ns: u64,
    to_ns: u64,
) -> impl DoubleEndedIterator<Item = &'a Incident> + use<'a> {
    hardware.incidents(host).filter(move |i| (from_ns..=to_ns).contains(&i.at_ns))
}

/// The last time that something was bad for long enough and has not been good for long enough since.
fn episode<'a>(
    moments: impl DoubleEndedIterator<Item = &'a Moment> + Clone,
    now_ns: u64,
    bad: impl Fn(&Moment) -> bool,
) -> Option<Vec<&'a Moment>> {
    let recent = |m: &Moment| now_ns.saturating_sub(m.at_ns) < LASTS_NS + FRESH_NS / 3;
    // Of most devices nothing was bad of late, and then what was before does not matter.
    if !moments.clone().rev().take_while(|m| recent(m)).any(&bad) {
        return None;
    }
    let mut run: Vec<&Moment> = Vec::new();
    // Of the moments since the run began, how many were good.
    let mut good = 0usize;
    for m in moments {
        if bad(m) {
            run.push(m);
        } else if let Some(last) = run.last() {
            good += 1;
            if m.at_ns.saturating_sub(last.at_ns) >= LASTS_NS || good > run.len() {
                run.clear();
                good = 0;
            }
        }
    }
    let (first, last) = (run.first()?.at_ns, run.last()?.at_ns);
    let lasted = last.saturating_sub(first) >= LASTS_NS;
    (lasted && run.last().is_some_and(|m| recent(m))).then_some(run)
}

/// True for a moment in which the GPU was at work, or may have been.
fn at_work(m: &Moment) -> bool {
    m.busy.is_none_or(|b| b >= BUSY)
}

fn middle(mut all: Vec<u32>) -> Option<u32> {
    all.sort_unstable();
    all.get(all.len() / 2).copied()
}

#[cfg(test)]
mod tests;
