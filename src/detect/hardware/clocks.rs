//! `throttled-gpu` and `slow-gpu`: clocks that are held down, and GPUs that run slower than their siblings.

use super::{Read, Told, Users, at_work, episode, fact, finding, fresh, middle, named, number, rounded};
use crate::join::{Hardware, Join, Moment};
use crate::model::{Finding, Kind, Severity, Throttle};
use std::collections::BTreeSet;

/// Held down from this share of the highest clock on.
const HELD: f64 = 0.95;
/// By the power cap, which every busy GPU meets, from this share on.
const CAPPED: f64 = 0.7;
/// Slower than its siblings from this share of their clock on.
const SLOWER: f64 = 0.88;
/// Siblings that say what is usual.
const SIBLINGS: usize = 2;
/// Moments that are compared, in ns.
const COMPARED_NS: u64 = 20_000_000_000;
/// Of them, so many at least.
const COMPARED: usize = 10;

/// Why clocks are held down, as far as it is trouble and not a power cap.
fn serious(throttled: &BTreeSet<Throttle>) -> bool {
    throttled.iter().any(|t| !matches!(t, Throttle::PowerCap | Throttle::SyncBoost))
}

fn why(all: &BTreeSet<Throttle>) -> String {
    let thermal = all.contains(&Throttle::ThermalHardware) || all.contains(&Throttle::ThermalSoftware);
    let mut words = Vec::new();
    if thermal {
        words.push("thermal");
    }
    if all.contains(&Throttle::PowerBrake) {
        words.push("power brake");
    }
    if all.contains(&Throttle::Hardware) && words.is_empty() {
        words.push("hardware slowdown");
    }
    if all.contains(&Throttle::PowerCap) && words.is_empty() {
        words.push("power cap");
    }
    words.join(", ")
}

/// A GPU whose clocks are held down.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Throttling {
    pub(super) since_ns: u64,
    pub(super) why: String,
    /// Clocks in MHz before, while nothing held it down, and since.
    pub(super) from_mhz: Option<u32>,
    pub(super) to_mhz: Option<u32>,
    pub(super) hottest_c: Option<f64>,
}

impl Throttling {
    /// `thermal, 1980 -> 1215 MHz`.
    pub(super) fn words(&self) -> String {
        match (self.from_mhz, self.to_mhz) {
            (Some(from), Some(to)) => format!("{}, {from} -> {to} MHz", self.why),
            (None, Some(to)) => format!("{}, {to} MHz", self.why),
            _ => self.why.clone(),
        }
    }

    /// The clock since as a share of the clock before.
    fn share(&self) -> Option<f64> {
        let from_mhz = self.from_mhz.filter(|n| *n > 0)?;
        Some(f64::from(self.to_mhz?) / f64::from(from_mhz))
    }

    /// A GPU that runs as fast as before slows nobody down.
    fn severity(&self) -> Severity {
        if self.share().is_some_and(|s| s >= HELD) { Severity::Info } else { Severity::Warning }
    }
}

/// Looks at a GPU's last two minutes, up to a moment.
pub(super) fn throttling<'a>(
    moments: impl DoubleEndedIterator<Item = &'a Moment> + Clone,
    most: Option<u32>,
    now_ns: u64,
) -> Option<Throttling> {
    let share = |m: &Moment| Some(f64::from(m.sm_mhz?) / f64::from(most.filter(|n| *n > 0)?));
    let bad = |m: &Moment| {
        let Some(reasons) = m.throttled.as_ref().filter(|_| at_work(m)) else { return false };
        let below = |limit: f64| share(m).is_none_or(|s| s < limit);
        serious(reasons) && below(HELD)
            || reasons.contains(&Throttle::PowerCap) && share(m).is_some_and(|s| s < CAPPED)
    };
    let until = || moments.clone().filter(|m| m.at_ns <= now_ns);
    let run = episode(until(), now_ns, bad)?;
    let since_ns = run.first()?.at_ns;
    let reasons: BTreeSet<Throttle> =
        run.iter().filter_map(|m| m.throttled.as_ref()).flatten().copied().collect();
    let before = until().filter(|m| m.at_ns < since_ns && at_work(m) && !bad(m)).filter_map(|m| m.sm_mhz);
    let hottest = run
        .iter()
        .filter_map(|m| m.temperature_c)
        .fold(None, |a: Option<f64>, t| Some(a.map_or(t, |a| a.max(t))));
    Some(Throttling {
        since_ns,
        why: why(&reasons),
        from_mhz: middle(before.collect()).or(most),
        to_mhz: middle(run.iter().filter_map(|m| m.sm_mhz).collect()),
        hottest_c: hottest,
    })
}

fn throttled(hardware: &Hardware, read: Read<'_>, now_ns: u64) -> Option<Told> {
    let t = throttling(read.moments(), read.gpu.sm_max_mhz, now_ns)?;
    let (host, who) = (read.host, named(hardware, read.host, &read.device()));
    let mut evidence = vec![fact(format!("{who} of host {host} throttles: {}", t.words()))];
    if let Some(share) = t.share() {
        evidence.push(number(format!("it runs at {:.0} % of its clock", share * 100.0), rounded(share), "1"));
    }
    if let Some(c) = t.hottest_c {
        evidence.push(number(format!("it was up to {c:.0} degrees Celsius hot"), c, "C"));
    }
    let advice = match t.why.as_str() {
        w if w.starts_with("thermal") => {
            "look at the cooling: fans, inlet temperature, what is above and below in the rack, thermal paste; every rank waits for this GPU"
        }
        w if w.contains("power brake") || w.contains("hardware") => {
            "look at the power supplies and the rack's power: something outside holds the GPU back"
        }
        _ => "nvidia-smi -q -d POWER shows the cap; raise it, or give all GPUs of the job the same one",
    };
    Some(Told {
        kind: Kind::ThrottledGpu,
        severity: t.severity(),
        about: "clocks".to_owned(),
        since_ns: t.since_ns,
        evidence,
        advice: advice.to_owned(),
    })
}

/// The clock of a GPU in the middle of the last moments, where it was at work in most of them.
fn pace(read: Read<'_>, now_ns: u64) -> Option<u32> {
    let is_recent = |m: &&Moment| now_ns.saturating_sub(m.at_ns) <= COMPARED_NS;
    let recent: Vec<&Moment> = read.moments().rev().take_while(is_recent).collect();
    let busy: Vec<u32> =
        recent.iter().filter(|m| m.busy.is_some() && at_work(m)).filter_map(|m| m.sm_mhz).collect();
    // Then it is known why, or will be in a moment.
    if recent.iter().filter_map(|m| m.throttled.as_ref()).any(serious) {
        return None;
    }
    (busy.len() >= COMPARED && busy.len() * 4 >= recent.len() * 3).then(|| middle(busy)).flatten()
}

/// A GPU and its siblings: the same product on the same host, at work in the same communicator. `node` are the GPUs of its
/// host that are at work, and their clocks.
fn slow(hardware: &Hardware, users: &Users<'_>, read: Read<'_>, node: &[(Read<'_>, u32)]) -> Option<Told> {
    let (host, gpu) = (read.host, read.gpu);
    let own = node.iter().find(|(r, _)| r.gpu.gpu == gpu.gpu).map(|(_, mhz)| *mhz)?;
    let siblings = || node.iter().filter(|(r, _)| r.gpu.gpu != gpu.gpu && r.gpu.name == gpu.name);
    // Most are as quick as the quickest, and then it does not matter who shares communicators with them.
    let quickest = siblings().map(|(_, mhz)| *mhz).max()?;
    if f64::from(own) >= f64::from(quickest) * SLOWER {
        return None;
    }
    let comms = users.comms(host, &read.device());
    let others: Vec<u32> = siblings()
        .filter(|(r, _)| !users.comms(r.host, &r.device()).is_disjoint(&comms))
        .map(|(_, mhz)| *mhz)
        .collect();
    if others.len() < SIBLINGS {
        return None;
    }
    let count = others.len();
    let usual = middle(others).filter(|n| *n > 0)?;
    let share = f64::from(own) / f64::from(usual);
    if share >= SLOWER {
        return None;
    }
    let since_ns = read
        .moments()
        .rev()
        .take_while(|m| m.sm_mhz.is_some_and(|n| f64::from(n) < f64::from(usual) * SLOWER))
        .last()?
        .at_ns;
    let who = named(hardware, host, &read.device());
    Some(Told {
        kind: Kind::SlowGpu,
        severity: Severity::Warning,
        about: "pace".to_owned(),
        since_ns,
        evidence: vec![
            fact(format!("{who} of host {host} runs at {own} MHz, its siblings at {usual} MHz")),
            number(format!("compared with {count} GPUs of the same communicator"), rounded(share), "1"),
        ],
        advice: "nvidia-smi -q -d CLOCK,PERFORMANCE shows what holds it: locked or application clocks that were left behind, another power limit; a reset clears them".to_owned(),
    })
}

pub(super) fn check(join: &Join, users: &Users<'_>, now_ns: u64) -> Vec<Finding> {
    let hardware = join.hardware();
    let mut out = Vec::new();
    let all: Vec<Read<'_>> = fresh(hardware, now_ns).collect();
    for node in all.chunk_by(|a, b| a.host == b.host) {
        let paces: Vec<(Read<'_>, u32)> = node.iter().filter_map(|r| Some((*r, pace(*r, now_ns)?))).collect();
        for read in node {
            let told = throttled(hardware, *read, now_ns)
                // Why it is slow is known then.
                .or_else(|| slow(hardware, users, *read, &paces));
            out.extend(told.map(|t| finding(join, users, read.host, &read.device(), t)));
        }
    }
    out
}
