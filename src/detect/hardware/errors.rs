//! `xid` and `ecc-errors`: what the driver reports, and what memory counts.

use super::xids::meaning;
use super::{RECENT_NS, Told, Users, between, fact, finding, number, words};
use crate::join::{Device, Incident, Join, Trouble};
use crate::model::{AlarmKind, Evidence, Finding, Kind, Severity};
use std::collections::BTreeMap;

/// Corrected errors in a minute that are told: single ones are what correction is for.
const CORRECTED: u64 = 100;

pub(super) fn check(join: &Join, users: &Users<'_>, now_ns: u64) -> Vec<Finding> {
    let hardware = join.hardware();
    let mut out = Vec::new();
    for host in hardware.troubled() {
        let mut by: BTreeMap<&Device, Vec<&Incident>> = BTreeMap::new();
        for i in between(hardware, host, now_ns.saturating_sub(RECENT_NS), now_ns) {
            by.entry(&i.device).or_default().push(i);
        }
        for (device, incidents) in by {
            if !matches!(device, Device::Gpu(_)) {
                continue;
            }
            let told = xids(device, &incidents).into_iter().chain(memory(&incidents));
            out.extend(told.map(|t| finding(join, users, host, device, t)));
        }
    }
    out
}

fn xids(device: &Device, incidents: &[&Incident]) -> Vec<Told> {
    let mut by: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
    let mut out = Vec::new();
    for i in incidents {
        match i.trouble {
            Trouble::Xid(code) => by.entry(code).or_default().push(i.at_ns),
            Trouble::Alarm(kind @ (AlarmKind::Unavailable | AlarmKind::RecoveryNeeded)) => {
                out.push(Told {
                    kind: Kind::Xid,
                    severity: Severity::Critical,
                    about: format!("{kind:?}"),
                    since_ns: i.at_ns,
                    evidence: vec![fact(format!("{}: {}", words(device), alarm(kind)))],
                    advice: "drain the host; nvidia-smi -q shows which recovery the driver asks for, and dmesg why".to_owned(),
                });
            }
            _ => {}
        }
    }
    for (code, times) in by {
        let known = meaning(code);
        let mut evidence = vec![xid_evidence(&words(device), code)];
        if let Some(m) = known {
            evidence.push(fact(format!("at fault is {}", m.fault.words())));
        }
        if times.len() > 1 {
            evidence.push(number(
                format!("it came {} times within a minute", times.len()),
                times.len() as f64,
                "count",
            ));
        }
        out.push(Told {
            kind: Kind::Xid,
            severity: known.map_or(Severity::Warning, |m| m.severity),
            about: code.to_string(),
            since_ns: times.first().copied().unwrap_or(0),
            evidence,
            advice: known.map_or_else(
                || "look the number up in NVIDIA's catalogue of Xids, and in dmesg for what the driver says beside it".to_owned(),
                |m| m.advice.clone(),
            ),
        });
    }
    out
}

/// `Xid 79 on GPU 0000:1a:00.0: the GPU fell off the bus ...`.
pub(super) fn xid_evidence(device: &str, code: u64) -> Evidence {
    let means = meaning(code).map_or("not in the table of this version", |m| m.means.as_str());
    number(format!("Xid {code} on {device}: {means}"), code as f64, "count")
}

fn alarm(kind: AlarmKind) -> &'static str {
    match kind {
        AlarmKind::MemoryRetired => "memory with errors was taken out of use",
        AlarmKind::RetirementFailed => "memory with errors could not be taken out of use",
        AlarmKind::PoisonContained => "poisoned data was met, and only the program that met it ends",
        AlarmKind::PoisonFatal => "poisoned data was met and could not be contained",
        AlarmKind::Unavailable => "the GPU can no longer be used",
        AlarmKind::RecoveryNeeded => "the driver asks for a recovery",
    }
}

/// How often something came, and since when.
#[derive(Debug, Default)]
struct Count {
    n: u64,
    since_ns: Option<u64>,
}

impl Count {
    fn add(&mut self, by: u64, at_ns: u64) {
        self.n = self.n.saturating_add(by);
        self.since_ns.get_or_insert(at_ns);
    }
}

fn memory(incidents: &[&Incident]) -> Option<Told> {
    let (mut corrected, mut uncorrected, mut rows) = (Count::default(), Count::default(), Count::default());
    let mut evidence = Vec::new();
    let mut critical = false;
    let mut since_ns: Option<u64> = None;
    for i in incidents {
        let text = match i.trouble {
            Trouble::EccCorrected(by) => {
                corrected.add(by, i.at_ns);
                continue;
            }
            Trouble::EccUncorrected(by) => {
                uncorrected.add(by, i.at_ns);
                continue;
            }
            Trouble::RowsReplaced(by) => {
                rows.add(by, i.at_ns);
                continue;
            }
            Trouble::RemapFailed => "a row of memory could not be replaced by a spare one",
            Trouble::Alarm(kind) if !matches!(kind, AlarmKind::Unavailable | AlarmKind::RecoveryNeeded) => {
                critical |= kind != AlarmKind::MemoryRetired;
                alarm(kind)
            }
            _ => continue,
        };
        critical |= i.trouble == Trouble::RemapFailed;
        evidence.push(fact(text));
        since_ns.get_or_insert(i.at_ns);
    }
    critical |= uncorrected.n > 0;
    let counts = [
        (uncorrected, 1, "memory errors that could not be corrected, within a minute"),
        (rows, 1, "rows of memory taken out of use, within a minute"),
        (corrected, CORRECTED, "memory errors corrected within a minute"),
    ];
    for (count, least, text) in counts {
        if count.n >= least {
            evidence.push(number(format!("{} {text}", count.n), count.n as f64, "count"));
            since_ns = since_ns.into_iter().chain(count.since_ns).min();
        }
    }
    Some(Told {
        kind: Kind::EccErrors,
        severity: if critical { Severity::Critical } else { Severity::Warning },
        about: "memory".to_owned(),
        since_ns: since_ns?,
        evidence,
        advice: if critical {
            "results of programs on this GPU may be wrong: restart them, reset the GPU, and replace it if rows cannot be replaced"
        } else {
            "reset the GPU when it is free, so that rows are replaced; have it tested if errors go on"
        }
        .to_owned(),
    })
}
