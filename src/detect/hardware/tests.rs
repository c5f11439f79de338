//! Devices by hand: what is told, since when, and that it is over again.

use super::HardwareRule;
use crate::detect::{Detector, Rule, Settings};
use crate::join::Join;
use crate::join::testing::{member, process};
use crate::model::{
    Alarm, AlarmKind, CommRecord, Fact, Finding, GpuFact, InterfaceFact, Kind, LinkFact, OperationRef,
    PcieFact, Rank, Reading, Severity, Throttle, Track, Update, Xid,
};
use std::collections::BTreeSet;

const S: u64 = 1_000_000_000;

fn address(n: u32) -> String {
    format!("0000:1{n}:00.0")
}

fn told(j: &mut Join, at_s: u64, fact: Fact) {
    j.feed(Update::Hardware(Box::new(Reading { host: "node".to_owned(), at_ns: at_s * S, fact })));
}

fn gpu(n: u32, mhz: u32) -> GpuFact {
    GpuFact {
        gpu: address(n),
        index: Some(n),
        name: Some("NVIDIA H200".to_owned()),
        links: (0..4).map(|link| LinkFact { link, up: Some(true), ..LinkFact::default() }).collect(),
        pcie: Some(PcieFact {
            generation: Some(5),
            generation_max: Some(5),
            width: Some(16),
            width_max: Some(16),
            replays: None,
        }),
        sm_mhz: Some(mhz),
        sm_max_mhz: Some(1980),
        busy: Some(0.95),
        throttled: Some(BTreeSet::new()),
        ..GpuFact::default()
    }
}

/// Four GPUs of one job, read once a second.
fn job() -> Join {
    let mut j = Join::new();
    for r in 0..4 {
        j.feed(process(r));
        let Update::Comm(c) = member(r, 4, 9) else { unreachable!("a member") };
        // As CUDA writes it.
        j.feed(Update::Comm(CommRecord { gpu: Some(address(r).to_uppercase().into()), ..c }));
    }
    j
}

fn run(j: &mut Join, seconds: std::ops::Range<u64>, ill: impl Fn(u64, &mut GpuFact)) {
    for s in seconds {
        for n in 0..4 {
            let mut fact = gpu(n, 1950 + n * 5);
            if n == 2 {
                ill(s, &mut fact);
            }
            told(j, s, Fact::Gpu(Box::new(fact)));
        }
    }
}

fn check(j: &Join, at_s: u64) -> Vec<Finding> {
    HardwareRule.check(j, at_s * S)
}

fn kinds(all: &[Finding]) -> Vec<Kind> {
    all.iter().map(|f| f.kind).collect()
}

#[test]
fn healthy_gpus_are_not_spoken_of() {
    let mut j = job();
    run(&mut j, 100..200, |_, _| {});
    assert_eq!(check(&j, 200), []);
    assert_eq!(check(&Join::new(), 200), []);
}

#[test]
fn heat_is_told_with_both_clocks_and_is_over_when_it_has_passed() {
    let hot = BTreeSet::from([Throttle::ThermalHardware, Throttle::Hardware]);
    let mut j = job();
    let ill = |s: u64, g: &mut GpuFact| {
        if (130..160).contains(&s) {
            g.sm_mhz = Some(1215);
            g.throttled = Some(hot.clone());
            g.temperature_c = Some(88.0);
        }
    };
    run(&mut j, 100..134, ill);
    assert_eq!(check(&j, 134), [], "a moment is none");
    run(&mut j, 134..150, ill);
    let found = check(&j, 150);
    assert_eq!(kinds(&found), [Kind::ThrottledGpu], "and not slow besides: {found:#?}");
    let f = &found[0];
    assert_eq!(
        f.evidence[0].text,
        "GPU 0000:12:00.0 (index 2) of host node throttles: thermal, 1960 -> 1215 MHz"
    );
    assert_eq!((f.since_ns, f.victims.len(), f.victims[0].ranks[0].0), (130 * S, 1, 2));
    assert!(
        f.headline().contains("GPU 0000:12:00.0 of host node (rank 2 of communicator"),
        "{}",
        f.headline()
    );
    run(&mut j, 150..175, ill);
    assert_eq!(check(&j, 175), []);
}

#[test]
fn a_power_cap_is_told_only_when_it_takes_much() {
    for (mhz, kinds_wanted) in [(1700, vec![]), (1200, vec![Kind::ThrottledGpu])] {
        let mut j = Join::new();
        for s in 100..130 {
            let mut fact = gpu(2, mhz);
            fact.throttled = Some(BTreeSet::from([Throttle::PowerCap]));
            told(&mut j, s, Fact::Gpu(Box::new(fact)));
        }
        assert_eq!(kinds(&check(&j, 130)), kinds_wanted, "{mhz}");
    }
}

#[test]
fn heat_wakes_nobody_while_the_clock_stays_what_it_was() {
    // A power cap holds the clock already when the GPU gets hot.
    let told = |hot_mhz: u32| {
        let mut j = job();
        run(&mut j, 100..150, |s, g| {
            g.sm_mhz = Some(if s < 130 { 1665 } else { hot_mhz });
            g.throttled =
                Some(if s < 130 { [Throttle::PowerCap] } else { [Throttle::ThermalSoftware] }.into());
        });
        check(&j, 150).into_iter().map(|f| (f.kind, f.severity)).collect::<Vec<_>>()
    };
    assert_eq!(told(1650), [(Kind::ThrottledGpu, Severity::Info)]);
    assert_eq!(told(1350), [(Kind::ThrottledGpu, Severity::Warning)]);
}

#[test]
fn what_flickers_is_one_finding() {
    let mut j = job();
    let mut d = Detector::new(Settings::default());
    let mut new = Vec::new();
    for s in 100..200 {
        run(&mut j, s..s + 1, |s, g| {
            // Four seconds of five.
            if s % 5 != 0 {
                g.sm_mhz = Some(1300);
                g.throttled = Some(BTreeSet::from([Throttle::ThermalSoftware]));
            }
        });
        j.tick(s * S);
        new.extend(d.opened(&j, s * S));
    }
    assert_eq!(kinds(&new), [Kind::ThrottledGpu], "{new:#?}");
    assert!(d.findings()[0].open);
    run(&mut j, 200..230, |_, _| {});
    for s in 200..230 {
        assert_eq!(d.opened(&j, s * S), []);
    }
    assert!(!d.findings()[0].open);
}

#[test]
fn a_slow_one_is_held_against_gpus_with_the_same_work() {
    let slow = |_: u64, g: &mut GpuFact| g.sm_mhz = Some(1500);
    let mut j = job();
    run(&mut j, 100..130, slow);
    let found = check(&j, 130);
    assert_eq!(kinds(&found), [Kind::SlowGpu], "{found:#?}");
    assert!(found[0].evidence[0].text.contains("at 1500 MHz, its siblings at 19"), "{found:#?}");
    let mut idle = job();
    run(&mut idle, 100..130, |_, g| {
        g.sm_mhz = Some(345);
        g.busy = Some(0.0);
        g.pcie.as_mut().unwrap().generation = Some(1);
    });
    assert_eq!(check(&idle, 130), [], "it is idle");
    let mut alone = Join::new();
    run(&mut alone, 100..130, slow);
    assert_eq!(check(&alone, 130), [], "nothing says that they do the same");
}

#[test]
fn links_that_went_down_are_told_those_that_nobody_connected_are_not() {
    let mut j = job();
    run(&mut j, 100..120, |s, g| g.links[3].up = Some(s < 110));
    let found = check(&j, 120);
    assert_eq!((kinds(&found), found[0].since_ns), (vec![Kind::LinkDown], 110 * S));
    assert_eq!(found[0].evidence[0].text, "NVLink 3 of GPU 0000:12:00.0 (index 2) of host node is down");
    run(&mut j, 120..122, |_, _| {});
    assert_eq!(check(&j, 122), [], "it is up again");
    let mut j = job();
    run(&mut j, 100..120, |_, g| g.links[3].up = Some(false));
    assert_eq!(kinds(&check(&j, 120)), [Kind::LinkDown], "its siblings have it");
    let mut j = job();
    for s in 100..110 {
        for n in 0..4 {
            let mut fact = gpu(n, 1980);
            fact.links[3].up = Some(false);
            told(&mut j, s, Fact::Gpu(Box::new(fact)));
        }
    }
    assert_eq!(check(&j, 110), []);
}

#[test]
fn errors_of_links_count_when_they_come_often() {
    let with = |a_second: u64, recoveries: u64| {
        let mut j = job();
        run(&mut j, 100..120, |s, g| {
            g.links[1].replays = Some(1_000 + s * a_second);
            g.links[1].recoveries = Some(s * recoveries / 10);
        });
        kinds(&check(&j, 120))
    };
    assert_eq!(with(2, 0), []);
    assert_eq!(with(20, 0), [Kind::LinkErrors]);
    assert_eq!(with(0, 5), [Kind::LinkErrors]);
    assert_eq!(with(0, 1), []);
}

#[test]
fn xids_have_their_meaning_and_are_over_after_a_minute() {
    let mut j = job();
    run(&mut j, 100..101, |_, _| {});
    for code in [79, 79, 43, 9_999] {
        told(&mut j, 101, Fact::Xid(Xid { gpu: "00000000:12:00.0".to_owned(), code }));
    }
    told(&mut j, 102, Fact::Alarm(Alarm { gpu: address(2), kind: AlarmKind::RecoveryNeeded }));
    let found = check(&j, 103);
    let of = |code: &str| {
        let text = format!("Xid {code} on GPU 0000:12:00.0");
        found.iter().find(|f| f.evidence[0].text.starts_with(&text)).expect("it is told")
    };
    assert_eq!((found.len(), kinds(&found)[0]), (4, Kind::Xid));
    assert_eq!(of("79").severity, Severity::Critical);
    assert!(of("79").evidence.iter().any(|e| e.text.contains("2 times")), "{found:#?}");
    assert_eq!(of("43").severity, Severity::Info);
    assert!(of("9999").evidence[0].text.contains("not in the table"));
    assert_eq!(check(&j, 170), []);
}

#[test]
fn memory_that_cannot_correct_is_critical() {
    let with = |corrected: u64, uncorrected: u64| {
        let mut j = job();
        run(&mut j, 100..120, |s, g| {
            g.ecc_corrected = Some(s * corrected);
            g.ecc_uncorrected = Some(if s >= 110 { uncorrected } else { 0 });
        });
        check(&j, 120).first().map(|f| (f.kind, f.severity, f.since_ns / S))
    };
    assert_eq!(with(1, 0), None, "that is what correction is for");
    assert_eq!(with(50, 0), Some((Kind::EccErrors, Severity::Warning, 101)));
    assert_eq!(with(1, 1), Some((Kind::EccErrors, Severity::Critical, 110)));
}

#[test]
fn fewer_lanes_are_told_and_a_low_generation_only_of_busy_gpus() {
    let with = |busy: f64, width: u32, generation: u32| {
        let mut j = job();
        run(&mut j, 100..120, |_, g| {
            g.busy = Some(busy);
            let pcie = g.pcie.as_mut().unwrap();
            (pcie.width, pcie.generation) = (Some(width), Some(generation));
        });
        let found = check(&j, 120);
        found.first().map(|f| f.evidence[0].text.clone()).unwrap_or_default()
    };
    assert_eq!(with(0.9, 16, 5), "");
    assert_eq!(with(0.0, 16, 1), "");
    assert!(with(0.9, 8, 5).contains("8 lanes of 16 while"), "{}", with(0.9, 8, 5));
    assert!(with(0.9, 16, 3).contains("generation 3 of 5"));
}

#[test]
fn old_readings_say_nothing_about_now() {
    let mut j = job();
    run(&mut j, 100..120, |_, g| g.links[0].up = Some(false));
    assert_eq!(kinds(&check(&j, 121)), [Kind::LinkDown]);
    assert_eq!(check(&j, 150), [], "its sampler is gone");
}

#[test]
fn what_a_nics_driver_lost_explains_slow_ranks_of_jobs_on_several_nodes() {
    let explained = |nodes: Option<u32>, kind: Kind, counter: &str, by: u64| {
        let mut j = Join::new();
        j.feed(process(0));
        let Update::Comm(c) = member(0, 4, 9) else { unreachable!("a member") };
        let comm = c.comm;
        j.feed(Update::Comm(CommRecord { gpu: Some(address(0).into()), nodes, ..c }));
        let face = InterfaceFact { interface: "eth0".to_owned(), ..InterfaceFact::default() };
        for (at_s, n) in [(100, 7), (105, 7 + by)] {
            let driver = Some([(counter.to_owned(), n)].into());
            told(&mut j, at_s - 1, Fact::Interface(face.clone()));
            told(&mut j, at_s, Fact::Interface(InterfaceFact { driver, ..face.clone() }));
        }
        let operation = OperationRef::named("AllReduce", Track::Collective, 3);
        let mut f = Finding { since_ns: 104 * S, ..Finding::new(kind, comm, vec![Rank(0)], operation) };
        super::explain::explain(&mut f, &j, 107 * S);
        f.evidence.first().map(|e| e.text.clone())
    };
    let slow = |counter, by| explained(Some(2), Kind::SlowTransfer, counter, by);
    let said = slow("rx_out_of_buffer", 500).expect("evidence");
    assert!(
        said.starts_with("interface eth0 of host node: rx_out_of_buffer grew by 500 at that time"),
        "{said}"
    );
    assert!(slow("bw_out_allowance_exceeded", 1).is_some());
    for (counter, by) in [("rx_out_of_buffer", 50), ("rx_prio*_pause", 5_000), ("rx_packets", 5_000)] {
        assert_eq!(slow(counter, by), None, "{counter}");
    }
    assert_eq!(explained(Some(1), Kind::SlowTransfer, "rx_out_of_buffer", 500), None, "no NIC is met");
    assert_eq!(
        explained(Some(2), Kind::MissingRank, "rx_out_of_buffer", 500),
        None,
        "nobody stands still for it"
    );
}
