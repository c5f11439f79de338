//! From a job that is judged wrongly to the smallest that still is, printed as a scenario file.

use crate::generate::Exam;
use crate::score::{Report, examine};
use crate::simulator::{Case, Expected};
use crate::spec::{Family, FaultKind, Spec};
use crate::truth::{Need, Truth};
use serde_yaml::Value;
use std::collections::BTreeSet;

/// The kinds of error of a report, without what differs from job to job.
fn errors(report: &Report) -> BTreeSet<String> {
    let flaws = report.verdicts.iter().flat_map(|v| v.flaws.iter().map(move |f| (v.way, f)));
    flaws
        .map(|(way, flaw)| {
            format!("{way:?} {}", flaw.split([',', ' ']).take(2).collect::<Vec<_>>().join(" "))
        })
        .collect()
}

/// Simplifies one thing after the other as long as one of the errors stays.
pub(crate) fn smallest(report: &Report) -> Report {
    let wanted = errors(report);
    let mut best = examine(&report.spec);
    loop {
        let simpler = simpler(&best.spec).into_iter().find_map(|spec| {
            let report = examine(&spec);
            (!errors(&report).is_disjoint(&wanted)).then_some(report)
        });
        match simpler {
            Some(report) => best = report,
            None => return best,
        }
    }
}

/// The same job with one thing simpler each.
fn simpler(spec: &Spec) -> Vec<Spec> {
    let mut all = Vec::new();
    let mut add = |change: &dyn Fn(&mut Spec)| {
        let mut other = spec.clone();
        change(&mut other);
        if other != *spec {
            all.push(other);
        }
    };
    for at in 0..spec.faults.len() {
        add(&|s| {
            s.faults.remove(at);
        });
    }
    add(&|s| resize(s, s.inner, s.outer / 2));
    add(&|s| resize(s, s.inner / 2, s.outer));
    add(&|s| s.a_node = s.ranks);
    add(&|s| s.layers = 1);
    add(&|s| s.micro = s.outer.max(1));
    add(&|s| s.variant = false);
    add(&|s| s.gpus_differ = 0.0);
    add(&|s| s.hosts_differ = 0.0);
    add(&|s| s.host_share = 0.0);
    add(&|s| s.checkpoint_ms = 0);
    add(&|s| s.evaluation = false);
    add(&|s| s.compile_ms = 0);
    add(&|s| s.warm_up_ms = 0);
    add(&|s| s.ends = false);
    if spec.faults.iter().all(|f| f.kind != FaultKind::NeverJoined) {
        add(&|s| s.subgroups = 0);
    }
    add(&|s| s.tail_share = 0.0);
    add(&|s| s.disturbed = 0.0);
    add(&|s| s.noise = 0.02);
    add(&|s| s.lost_stamps = 0.0);
    add(&|s| s.lost_records = 0);
    add(&|s| s.late_records_us = 60);
    add(&|s| s.one_end_a_launch = false);
    add(&|s| s.launches_by_events = false);
    add(&|s| (s.gpu_drift, s.host_drift) = (0.0, 0.0));
    add(&|s| s.depth = 1_000);
    add(&|s| s.sync = true);
    add(&|s| s.timed_of = 1);
    add(&|s| s.abi = 5);
    add(&|s| (s.preloaded, s.host_facts) = (false, false));
    add(&|s| s.calls = (s.calls / 2).max(500));
    all
}

/// Other sizes of the groups, and as many ranks as they take.
fn resize(spec: &mut Spec, inner: u32, outer: u32) {
    let replicas = match spec.family {
        Family::Pipeline => spec.ranks / spec.inner / spec.outer,
        _ => 1,
    };
    let least = if spec.family == Family::Pipeline { (1, 2) } else { (2, 1) };
    if inner < least.0 || outer < least.1 {
        return;
    }
    (spec.inner, spec.outer) = (inner, outer);
    spec.ranks = inner * outer * replicas;
    if !spec.ranks.is_multiple_of(spec.a_node) {
        spec.a_node = spec.ranks;
    }
}

/// The job as a scenario file.
pub(crate) fn as_scenario(report: &Report) -> String {
    let mut case = report.exam.case.clone();
    let needed = report.truths.iter().filter(|t| t.need == Need::Required);
    case.expect = needed.filter_map(|t| expected(&report.exam, t)).collect();
    let mut value = serde_yaml::to_value(&case).expect("a case can be written");
    prune(&mut value);
    let text = serde_yaml::to_string(&value).expect("a value can be written");
    let read: Result<Case, _> = serde_yaml::from_str(&text);
    assert!(read.is_ok(), "{:?}:\n{text}", read.err());
    text
}

fn expected(exam: &Exam, truth: &Truth) -> Option<Expected> {
    let kinds: Vec<&str> = truth.named.iter().map(|k| k.as_str()).collect();
    let (comm, _, order) = *truth.operations.first()?;
    let (at, (_, members)) = exam.members.iter().enumerate().find(|(_, (id, _))| *id == comm)?;
    let own = |r: &u32| members.iter().position(|m| m == r).map(|at| at as u32);
    Some(Expected {
        kind: kinds.join("|"),
        comm: vec![exam.comm_name(at)],
        ranks: truth.culprits.iter().filter_map(own).collect(),
        order: Some(order),
        ..Expected::default()
    })
}

/// Leaves out what a reader would take by default.
fn prune(value: &mut Value) {
    const ZERO: [&str; 9] = [
        "stream",
        "by",
        "lost_stamps",
        "drift_ppm",
        "tail_share",
        "tail_factor",
        "disturbed",
        "host_drift_ppm",
        "passes",
    ];
    match value {
        Value::Sequence(list) => list.iter_mut().for_each(prune),
        Value::Mapping(map) => {
            map.iter_mut().for_each(|(_, v)| prune(v));
            map.retain(|key, v| {
                let empty = match v {
                    Value::Null | Value::Bool(false) => true,
                    Value::Sequence(list) => list.is_empty(),
                    Value::Mapping(inner) => inner.is_empty() && key.as_str() != Some("world"),
                    Value::Number(n) => {
                        n.as_f64() == Some(0.0) && key.as_str().is_some_and(|k| ZERO.contains(&k))
                    }
                    _ => false,
                };
                !empty || matches!(key.as_str(), Some("everyone" | "comms" | "program"))
            });
        }
        _ => {}
    }
}
