//! The samplers as they are run: against a driver's library of two GPUs that `cc` builds here, and pieces of /proc and
//! /sys.

use crate::support::skipped;
use futures_util::stream::unfold;
use ringwatch::ingest::hardware::{Pods, Samplers, Settings};
use ringwatch::ingest::now_ns;
use ringwatch::model::{
    AlarmKind, Fact, GpuFact, Holder, InterfaceFact, NodeFact, PodsFact, PortFact, Reading, SamplerFact,
    Throttle, Traffic,
};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use tonic::codegen::{BoxFuture, Service, http};
use tonic::{Code, Status};

const FIRST: &str = "0000:1a:00.0";
const SECOND: &str = "0000:1b:00.0";

/// The library with these switches; `None` without a C compiler, and the test counts as skipped.
fn driver(name: &str, switches: &[&str]) -> Option<PathBuf> {
    if Command::new("cc").arg("--version").output().is_err() {
        let test = std::thread::current();
        skipped(test.name().unwrap_or(name), "a C compiler (cc)");
        return None;
    }
    let to = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("libfake-nvml-{name}.so"));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/fake_nvml.c");
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o"]).arg(&to).arg(source).args(switches);
    let said = cc.output().unwrap();
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    Some(to)
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/hardware")
}

/// Only what comes from the driver.
fn gpus_only(nvml: PathBuf) -> Settings {
    Settings {
        nvml: Some(nvml),
        nvlink_ms: 20,
        gpu_ms: 100,
        link_states_ms: 100,
        links_ms: 100,
        xid_ms: 20,
        rdma_ms: 0,
        interfaces_ms: 0,
        node_ms: 0,
        ..Settings::default()
    }
}

fn watch(samplers: &mut Samplers, time: Duration) -> Vec<Reading> {
    let begun = Instant::now();
    let mut all = Vec::new();
    while begun.elapsed() < time {
        all.extend(samplers.poll(now_ns()));
        std::thread::sleep(samplers.pause(now_ns()).min(Duration::from_millis(5)));
    }
    all
}

fn traffic<'a>(all: &'a [Reading], gpu: &'a str) -> impl Iterator<Item = (u64, &'a Traffic)> {
    all.iter().filter_map(move |r| match &r.fact {
        Fact::Traffic(t) if t.gpu == gpu => Some((r.at_ns, t)),
        _ => None,
    })
}

fn gpus(all: &[Reading]) -> Vec<&GpuFact> {
    all.iter().filter_map(|r| if let Fact::Gpu(g) = &r.fact { Some(&**g) } else { None }).collect()
}

fn selves<'a>(all: &'a [Reading], name: &str) -> Vec<&'a SamplerFact> {
    let of = |r: &'a Reading| if let Fact::Sampler(s) = &r.fact { Some(s) } else { None };
    all.iter().filter_map(of).filter(|s| s.sampler == name).collect()
}

/// Bytes a second, sent and received, over all readings of a GPU.
fn rate(all: &[Reading], gpu: &str) -> (f64, f64) {
    let (mut tx, mut rx, mut ns) = (0.0, 0.0, 0);
    for (at_ns, t) in traffic(all, gpu) {
        let Some(moved) = t.nvlink else { continue };
        tx += moved.tx_bytes;
        rx += moved.rx_bytes;
        ns += at_ns - t.from_ns;
    }
    let seconds = ns as f64 / 1e9;
    (tx / seconds, rx / seconds)
}

fn close(a: f64, b: f64) -> bool {
    (a / b - 1.0).abs() < 0.02
}

const MIB: f64 = 1048576.0;

#[test]
fn the_performance_monitor_gives_traffic_of_all_and_of_each_link() {
    let Some(nvml) = driver("monitor", &["-DMONITOR"]) else { return };
    let mut samplers = Samplers::new(&gpus_only(nvml));
    let all = watch(&mut samplers, Duration::from_millis(700));
    for (gpu, times) in [(FIRST, 1.0), (SECOND, 2.0)] {
        let (tx, rx) = rate(&all, gpu);
        assert!(close(tx, 1000.0 * MIB * times) && close(rx, 500.0 * MIB * times), "{gpu}: {tx} {rx}");
        let readings: Vec<_> = traffic(&all, gpu).collect();
        assert!(readings.len() >= 10, "{}", readings.len());
        assert!(
            readings.windows(2).all(|w| w[0].0 == w[1].1.from_ns),
            "no time is left out or counted twice"
        );
        let (at_ns, last) = readings.last().unwrap();
        let seconds = (at_ns - last.from_ns) as f64 / 1e9;
        assert!(close(last.pcie.unwrap().rx_bytes, 20.0 * MIB * seconds), "{last:?}");
        let each: Vec<(u32, f64)> = last.links.iter().map(|(l, m)| (*l, m.tx_bytes)).collect();
        assert_eq!(each.iter().map(|(l, _)| *l).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(each[1].1 == 0.0, gpu == SECOND, "a link that is down moves nothing: {each:?}");
    }
    let facts = gpus(&all);
    let second = facts.iter().rfind(|g| g.gpu == SECOND).unwrap();
    assert_eq!(
        (second.sm_active, second.tensor_active, second.memory_active),
        (Some(0.8), Some(0.25), Some(0.5))
    );
}

#[test]
fn without_a_monitor_the_counters_give_the_same() {
    let Some(nvml) = driver("counters", &[]) else { return };
    let mut samplers = Samplers::new(&gpus_only(nvml));
    let all = watch(&mut samplers, Duration::from_millis(700));
    for (gpu, times) in [(FIRST, 1.0), (SECOND, 2.0)] {
        let (tx, rx) = rate(&all, gpu);
        assert!(close(tx, 1000.0 * MIB * times) && close(rx, 500.0 * MIB * times), "{gpu}: {tx} {rx}");
        assert!(traffic(&all, gpu).all(|(_, t)| t.pcie.is_none()), "PCIe is not told, and not zero");
    }
    assert!(gpus(&all).iter().all(|g| g.sm_active.is_none()));
}

#[test]
fn health_links_and_neighbours_are_read() {
    let Some(nvml) = driver("health", &["-DMONITOR"]) else { return };
    let mut samplers = Samplers::new(&gpus_only(nvml));
    let all = watch(&mut samplers, Duration::from_millis(300));
    let facts = gpus(&all);
    let (first, second) = (facts[0], facts[1]);
    assert_eq!((first.gpu.as_str(), first.index, second.index), (FIRST, Some(0), Some(1)));
    assert_eq!((first.name.as_deref(), first.uuid.as_deref()), (Some("Fake H200"), Some("GPU-0")));
    assert_eq!((second.sm_mhz, second.sm_max_mhz, second.memory_mhz), (Some(1215), Some(1980), Some(3201)));
    assert_eq!(first.throttled.as_ref().map(std::collections::BTreeSet::len), Some(0), "idle is no trouble");
    let why: Vec<Throttle> = second.throttled.iter().flatten().copied().collect();
    assert_eq!(why, [Throttle::Hardware, Throttle::ThermalHardware]);
    assert_eq!((second.power_w, second.temperature_c, second.busy), (Some(651.5), Some(87.0), Some(0.97)));
    assert_eq!(
        (first.ecc_corrected, second.ecc_corrected, second.ecc_uncorrected),
        (Some(0), Some(7), Some(1))
    );
    assert_eq!((second.remapped_rows, second.remap_pending), (Some((1, 1)), Some(true)));
    assert_eq!(second.retired_pages, None, "its rows are replaced");
    let pcie = second.pcie.as_ref().unwrap();
    assert_eq!(
        (pcie.generation, pcie.width, pcie.width_max, pcie.replays),
        (Some(5), Some(8), Some(16), Some(3))
    );
    assert_eq!(second.processes, Some(vec![(4001, Some(1 << 20))]));
    assert_eq!((second.memory_bytes, second.memory_used_bytes), (Some(1000), Some(600)));

    assert_eq!(second.links.iter().map(|l| l.up).collect::<Vec<_>>(), [Some(true), Some(false), Some(true)]);
    let link = &second.links[2];
    assert_eq!((link.speed_mb_per_s, link.version), (Some(26562), Some(6)));
    assert_eq!((link.replays, link.recoveries, link.crc_errors), (Some(7), Some(1), Some(9)));
    let remote = link.remote.as_ref().unwrap();
    assert_eq!((remote.kind.as_str(), remote.address.as_deref()), ("switch", Some("0000:5b:00.0")));

    let peer = &first.peers[0];
    assert_eq!((peer.gpu.as_str(), peer.path.as_deref()), (SECOND, Some("system")));
    assert_eq!((peer.p2p, peer.nvlink), (Some(false), Some(true)));
}

#[test]
fn what_is_asked_seldom_is_told_each_time_and_what_is_left_out_is_absent() {
    let Some(nvml) = driver("seldom", &["-DMONITOR"]) else { return };
    let told = |every_ms| {
        let settings = Settings { link_states_ms: every_ms, links_ms: every_ms, ..gpus_only(nvml.clone()) };
        let all = watch(&mut Samplers::new(&settings), Duration::from_millis(350));
        let of = |g: &GpuFact| {
            let link = g.links.first().unwrap();
            (link.up, link.replays, g.pcie.as_ref().unwrap().replays)
        };
        gpus(&all).into_iter().filter(|g| g.gpu == FIRST).map(of).collect::<Vec<_>>()
    };
    let seldom = told(60_000);
    assert!(seldom.len() > 1, "{seldom:?}");
    assert!(seldom.iter().all(|f| *f == (Some(true), Some(5), seldom[0].2) && f.2.is_some()), "{seldom:?}");
    assert!(told(0).iter().all(|f| *f == (None, None, None)));
}

#[test]
fn errors_of_the_driver_come_once_each() {
    let Some(nvml) = driver("errors", &[]) else { return };
    let mut samplers = Samplers::new(&gpus_only(nvml));
    let all = watch(&mut samplers, Duration::from_millis(200));
    let xids: Vec<_> =
        all.iter().filter_map(|r| if let Fact::Xid(x) = &r.fact { Some(x) } else { None }).collect();
    assert_eq!(xids.len(), 1, "{xids:?}");
    assert_eq!((xids[0].gpu.as_str(), xids[0].code), (SECOND, 79));
    let alarms: Vec<_> =
        all.iter().filter_map(|r| if let Fact::Alarm(a) = &r.fact { Some(a.kind) } else { None }).collect();
    assert_eq!(alarms, [AlarmKind::RecoveryNeeded]);
}

#[test]
fn what_asking_costs_is_told() {
    let Some(nvml) = driver("cost", &["-DMONITOR"]) else { return };
    let mut samplers = Samplers::new(&gpus_only(nvml));
    let all = watch(&mut samplers, Duration::from_millis(1500));
    for name in ["nvlink", "gpu", "xid"] {
        let told = selves(&all, name);
        assert!((2..=3).contains(&told.len()), "about once a second: {told:?}");
        let last = told.last().unwrap();
        assert!(last.cost_ns > 0 && last.absent.is_none() && last.failures == 0, "{last:?}");
    }
    assert!(selves(&all, "nvlink").last().unwrap().readings > 50);
}

#[test]
fn who_may_not_ask_gets_what_there_is_and_no_failures() {
    let Some(nvml) = driver("denied", &["-DDENIED", "-DMONITOR"]) else { return };
    let mut samplers = Samplers::new(&gpus_only(nvml));
    let all = watch(&mut samplers, Duration::from_millis(300));
    let facts = gpus(&all);
    assert_eq!((facts[0].gpu.as_str(), facts[0].uuid.as_deref()), (FIRST, Some("GPU-0")));
    let empty = GpuFact {
        gpu: facts[0].gpu.clone(),
        index: facts[0].index,
        uuid: facts[0].uuid.clone(),
        name: facts[0].name.clone(),
        peers: facts[0].peers.clone(),
        ..GpuFact::default()
    };
    assert_eq!(*facts[0], empty, "absent, not zero");
    assert_eq!(selves(&all, "gpu").last().unwrap().failures, 0);
    for (name, word) in [("nvlink", "may not ask"), ("xid", "no events")] {
        let told = selves(&all, name);
        assert_eq!(told.iter().filter(|s| s.absent.is_some()).count(), 1, "said once: {told:?}");
        assert!(told.last().unwrap().absent.as_ref().unwrap().contains(word), "{told:?}");
    }
}

#[test]
fn no_driver_an_old_one_and_one_without_gpus_are_absent_and_the_rest_goes_on() {
    let mut cases = vec![(PathBuf::from("/nonexistent/libnvidia-ml.so.1"), "/nonexistent/libnvidia-ml.so.1")];
    cases.extend(driver("old", &["-DOLD"]).map(|p| (p, "nvmlShutdown")));
    cases.extend(driver("no-gpu", &["-DNO_GPU"]).map(|p| (p, "no GPU")));
    for (nvml, why) in cases {
        let settings = Settings { node_ms: 20, ..gpus_only(nvml) };
        let mut samplers = Samplers::below(&settings, &fixtures().join("proc"), &fixtures().join("sys"));
        let all = watch(&mut samplers, Duration::from_millis(200));
        for name in ["nvlink", "gpu", "xid"] {
            let told = selves(&all, name);
            assert_eq!(told.len(), 1, "{told:?}");
            assert!(told[0].absent.as_ref().unwrap().contains(why), "{told:?}");
        }
        let nodes = all.iter().filter(|r| matches!(r.fact, Fact::Node(_))).count();
        assert!(nodes >= 3, "{nodes}");
    }
}

/// One look at a directory tree.
fn once(proc: &Path, sys: &Path) -> Vec<Reading> {
    let settings = Settings { nvlink_ms: 0, gpu_ms: 0, xid_ms: 0, ..Settings::default() };
    Samplers::below(&settings, proc, sys).poll(1_000_000_000)
}

#[test]
fn ports_interfaces_and_the_host_are_read_from_the_kernels_files() {
    let all = once(&fixtures().join("proc"), &fixtures().join("sys"));
    let ports: Vec<&PortFact> =
        all.iter().filter_map(|r| if let Fact::Port(p) = &r.fact { Some(p) } else { None }).collect();
    let good = PortFact {
        device: "mlx5_0".to_owned(),
        port: 1,
        address: None,
        up: Some(true),
        speed_mbit_per_s: Some(400_000),
        tx_bytes: Some(1_000_000),
        rx_bytes: Some(2_000_000),
        retransmits: Some(9),
        out_of_order: Some(6),
        congestion: Some(15),
        errors: Some(3),
        downs: Some(3),
    };
    let bad = PortFact { device: "mlx5_1".to_owned(), port: 1, up: Some(false), ..PortFact::default() };
    assert_eq!(ports, [&good, &bad], "what is not there is absent");

    let faces: Vec<&InterfaceFact> =
        all.iter().filter_map(|r| if let Fact::Interface(i) = &r.fact { Some(i) } else { None }).collect();
    let eth0 = InterfaceFact {
        interface: "eth0".to_owned(),
        device: None,
        up: Some(true),
        speed_mbit_per_s: Some(100_000),
        tx_bytes: Some(700_000),
        rx_bytes: Some(900_000),
        drops: Some(15),
        errors: Some(1),
        downs: Some(4),
        driver: None,
    };
    let eth1 = InterfaceFact {
        interface: "eth1".to_owned(),
        tx_bytes: Some(20),
        rx_bytes: Some(10),
        drops: Some(0),
        errors: Some(0),
        ..InterfaceFact::default()
    };
    assert_eq!(faces, [&eth0, &eth1]);

    let node = all.iter().find_map(|r| if let Fact::Node(n) = &r.fact { Some(n) } else { None }).unwrap();
    let wanted = NodeFact {
        cpus: Some(2),
        cpu_busy: None,
        cpu_pressure: Some(0.125),
        memory_pressure: Some(0.0),
        io_pressure: None,
        memory_bytes: Some(2_113_663_656 * 1024),
        memory_available_bytes: Some(2_000_000_000 * 1024),
        tcp_retransmits: Some(41),
        oom_kills: Some(2),
    };
    assert_eq!(*node, wanted);
}

#[test]
fn the_share_of_busy_cpus_is_of_the_time_between_two_looks() {
    let dir = tempfile::tempdir().unwrap();
    let settings =
        Settings { nvlink_ms: 0, gpu_ms: 0, xid_ms: 0, rdma_ms: 0, interfaces_ms: 0, ..Settings::default() };
    let mut samplers = Samplers::below(&settings, dir.path(), dir.path());
    let busy = |all: &[Reading]| {
        all.iter().find_map(|r| if let Fact::Node(n) = &r.fact { Some(n.cpu_busy) } else { None })
    };
    std::fs::write(dir.path().join("stat"), "cpu  100 0 0 100 0 0 0 0\ncpu0 0 0 0 0\n").unwrap();
    assert_eq!(busy(&samplers.poll(0)), Some(None));
    std::fs::write(dir.path().join("stat"), "cpu  175 0 0 125 0 0 0 0\ncpu0 0 0 0 0\n").unwrap();
    assert_eq!(busy(&samplers.poll(1_000_000_000)), Some(Some(0.75)));
}

#[test]
fn hostile_files_are_absent_facts() {
    let dir = tempfile::tempdir().unwrap();
    let (proc, sys) = (dir.path().join("proc"), dir.path().join("sys"));
    let junk: &[&[u8]] =
        &[b"", b"\xff\xfe\x00", b"-1", b"99999999999999999999999", b"cpu", b"Tcp:\nTcp:", b"a:b:c\n:::"];
    for (i, bytes) in junk.iter().enumerate() {
        let port = sys.join("class/infiniband/\u{202e}dev/ports").join(if i % 2 == 0 { "1" } else { "port" });
        let face = sys.join("class/net/eth0/statistics");
        for d in [
            &port.join("counters"),
            &port.join("hw_counters"),
            &face,
            &proc.join("net"),
            &proc.join("pressure"),
        ] {
            std::fs::create_dir_all(d).unwrap();
        }
        for file in [
            port.join("state"),
            port.join("rate"),
            port.join("counters/port_xmit_data"),
            port.join("hw_counters/out_of_sequence"),
            face.join("tx_bytes"),
            sys.join("class/net/eth0/speed"),
            sys.join("class/net/eth0/operstate"),
            proc.join("stat"),
            proc.join("meminfo"),
            proc.join("vmstat"),
            proc.join("net/dev"),
            proc.join("net/snmp"),
            proc.join("pressure/cpu"),
        ] {
            std::fs::write(file, bytes).unwrap();
        }
        for r in once(&proc, &sys) {
            match r.fact {
                Fact::Port(p) => assert_eq!((p.tx_bytes, p.speed_mbit_per_s, p.up), (None, None, None)),
                Fact::Interface(i) => assert_eq!((i.tx_bytes, i.speed_mbit_per_s), (None, None)),
                Fact::Node(n) => panic!("nothing of it is a fact: {n:?}"),
                _ => {}
            }
        }
    }
}

/// `cargo test --test all hardware:: -- --ignored --nocapture` where there are GPUs: prints what the samplers of this machine
/// say, and what asking costs.
#[test]
#[ignore = "needs GPUs and their driver"]
fn this_machines_driver_answers() {
    let mut samplers = Samplers::new(&Settings::default());
    let begun = Instant::now();
    let all = watch(&mut samplers, Duration::from_secs(5));
    let took = begun.elapsed().as_secs_f64();
    for g in gpus(&all).iter().rev().take(8) {
        println!("{}", serde_json::to_string(g).unwrap());
    }
    for name in ["nvlink", "gpu", "xid", "rdma", "interfaces", "node"] {
        let Some(last) = selves(&all, name).last().copied() else { continue };
        let share = last.cost_ns as f64 / 1e9 / took * 100.0;
        println!(
            "{name}: {share:.3} % of a core, {} readings, {} failures, {:?}",
            last.readings, last.failures, last.absent
        );
    }
    let found = gpus(&all);
    assert!(!found.is_empty(), "no GPU was read");
    for g in found.iter().map(|g| g.gpu.clone()).collect::<std::collections::BTreeSet<_>>() {
        println!("{g}: {:?} bytes a second, sent and received", rate(&all, &g));
    }
}

/// What drivers of real interfaces say: this machine's, and in a network namespace of its own a pair of veth, whose
/// driver's names are known.
#[test]
fn drivers_of_interfaces_are_asked_for_their_own_counters() {
    let test = "drivers_of_interfaces_are_asked_for_their_own_counters";
    let made = "ip link add rwa type veth peer name rwb && ip link set rwa up && ip link set rwb up && exec \"$0\" \"$@\"";
    let mut inside = Command::new("unshare");
    inside.args(["-n", "sh", "-c", made]).arg(std::env::current_exe().unwrap());
    inside.args(["--exact", "hardware::a_pair_of_veth", "--ignored", "--nocapture"]);
    let probe = "ip link add rwp type veth peer name rwq";
    if !Command::new("unshare").args(["-n", "sh", "-c", probe]).output().is_ok_and(|o| o.status.success()) {
        skipped(test, "unshare and ip, and the right to make a veth in a network namespace (root)");
        return;
    }
    let said = inside.output().unwrap();
    let text = String::from_utf8_lossy(&said.stdout);
    assert!(
        said.status.success() && text.contains("1 passed"),
        "{text}{}",
        String::from_utf8_lossy(&said.stderr)
    );
}

/// Run by the test above, in the namespace.
#[test]
#[ignore = "another test runs it in a network namespace"]
fn a_pair_of_veth() {
    let settings =
        Settings { nvlink_ms: 0, gpu_ms: 0, xid_ms: 0, rdma_ms: 0, node_ms: 0, ..Settings::default() };
    let mut samplers = Samplers::new(&settings);
    let face = |all: Vec<Reading>, name: &str| {
        let of = |r: Reading| if let Fact::Interface(i) = r.fact { Some(i) } else { None };
        all.into_iter().filter_map(of).find(|i| i.interface == name)
    };
    let first = face(samplers.poll(1_000_000_000), "rwa").unwrap();
    let driver = first.driver.unwrap();
    assert_eq!(driver.get("rx_queue_*_drops"), Some(&0), "{driver:?}");
    assert!(driver.keys().all(|k| !k.contains("ifindex") && !k.contains("packets")), "{driver:?}");
    let soon = face(samplers.poll(2_000_000_000), "rwa").unwrap();
    assert_eq!(soon.driver, None, "drivers are not asked every time");
    let later = face(samplers.poll(7_000_000_000), "rwa").unwrap();
    assert_eq!(later.driver, Some(driver));
    // A directory's copy names interfaces that are not this machine's.
    let copy = Samplers::below(&settings, Path::new("/proc"), Path::new("/sys")).poll(0);
    assert_eq!(face(copy, "rwa").unwrap().driver, None);
}

/// The kubelet's messages as its own definitions have them, with what is not read.
mod kubelet {
    #[derive(Clone, PartialEq, prost::Message)]
    pub(crate) struct ListRequest {}

    #[derive(Clone, PartialEq, prost::Message)]
    pub(crate) struct ListResponse {
        #[prost(message, repeated, tag = "1")]
        pub(crate) pod_resources: Vec<PodResources>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(crate) struct PodResources {
        #[prost(string, tag = "1")]
        pub(crate) name: String,
        #[prost(string, tag = "2")]
        pub(crate) namespace: String,
        #[prost(message, repeated, tag = "3")]
        pub(crate) containers: Vec<ContainerResources>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(crate) struct ContainerResources {
        #[prost(string, tag = "1")]
        pub(crate) name: String,
        #[prost(message, repeated, tag = "2")]
        pub(crate) devices: Vec<ContainerDevices>,
        #[prost(int64, repeated, tag = "3")]
        pub(crate) cpu_ids: Vec<i64>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(crate) struct ContainerDevices {
        #[prost(string, tag = "1")]
        pub(crate) resource_name: String,
        #[prost(string, repeated, tag = "2")]
        pub(crate) device_ids: Vec<String>,
        #[prost(message, optional, tag = "3")]
        pub(crate) topology: Option<TopologyInfo>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(crate) struct TopologyInfo {
        #[prost(message, repeated, tag = "1")]
        pub(crate) nodes: Vec<NumaNode>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(crate) struct NumaNode {
        #[prost(int64, tag = "1")]
        pub(crate) id: i64,
    }
}

/// What it answers.
type Said = Result<kubelet::ListResponse, Status>;

#[derive(Clone)]
struct Kubelet(Said);

impl tonic::server::NamedService for Kubelet {
    const NAME: &'static str = "v1.PodResourcesLister";
}

impl tonic::server::UnaryService<kubelet::ListRequest> for Kubelet {
    type Response = kubelet::ListResponse;
    type Future = BoxFuture<tonic::Response<Self::Response>, Status>;

    fn call(&mut self, _: tonic::Request<kubelet::ListRequest>) -> Self::Future {
        let said = self.0.clone().map(tonic::Response::new);
        Box::pin(async move { said })
    }
}

impl Service<http::Request<tonic::body::Body>> for Kubelet {
    type Response = http::Response<tonic::body::Body>;
    type Error = std::convert::Infallible;
    type Future = BoxFuture<Self::Response, Self::Error>;

    fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), Self::Error>> {
        std::task::Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<tonic::body::Body>) -> Self::Future {
        let own = self.clone();
        Box::pin(async move {
            assert_eq!(request.uri().path(), "/v1.PodResourcesLister/List");
            let codec = tonic_prost::ProstCodec::<kubelet::ListResponse, kubelet::ListRequest>::default();
            Ok(tonic::server::Grpc::new(codec).unary(own, request).await)
        })
    }
}

/// A server at a socket, for as long as the runtime lives.
fn serve(socket: &Path, said: Said) -> tokio::runtime::Runtime {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let listener = {
        let _in = runtime.enter();
        tokio::net::UnixListener::bind(socket).unwrap()
    };
    let incoming =
        Box::pin(unfold(listener, |l| async move { Some((l.accept().await.map(|(stream, _)| stream), l)) }));
    runtime.spawn(async move {
        tonic::transport::Server::builder()
            .add_service(Kubelet(said))
            .serve_with_incoming(incoming)
            .await
            .unwrap();
    });
    runtime
}

/// What the sampler says, one look a second of its own clock, until it says something.
fn first_words(samplers: &mut Samplers) -> Vec<Fact> {
    let begun = Instant::now();
    for second in 1.. {
        let said: Vec<Fact> = samplers.poll(second * 1_000_000_000).into_iter().map(|r| r.fact).collect();
        if !said.is_empty() {
            return said;
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "it says nothing");
        std::thread::sleep(Duration::from_millis(5));
    }
    unreachable!("it returns or fails")
}

fn pods(socket: &Path) -> Samplers {
    Samplers::of("a", vec![Box::new(Pods::new(socket.to_owned()))])
}

#[test]
fn the_kubelet_tells_which_container_has_which_gpu() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("kubelet.sock");
    let devices = |resource: &str, ids: &[&str]| kubelet::ContainerDevices {
        resource_name: resource.to_owned(),
        device_ids: ids.iter().map(|i| (*i).to_owned()).collect(),
        topology: Some(kubelet::TopologyInfo { nodes: vec![kubelet::NumaNode { id: 1 }] }),
    };
    let pod = |name: &str, all: Vec<kubelet::ContainerDevices>| kubelet::PodResources {
        name: name.to_owned(),
        namespace: "ml".to_owned(),
        containers: vec![kubelet::ContainerResources {
            name: "main".to_owned(),
            devices: all,
            cpu_ids: vec![2, 3],
        }],
    };
    let said = kubelet::ListResponse {
        pod_resources: vec![
            pod(
                "train-0",
                vec![devices("nvidia.com/gpu", &["GPU-a", "GPU-b"]), devices("rdma/hca", &["mlx5_0"])],
            ),
            pod("train-1", vec![devices("nvidia.com/gpu.shared", &["GPU-c::3"])]),
            pod("\u{1b}[2J", vec![devices("nvidia.com/gpu", &["GPU-d"])]),
            pod("idle", vec![]),
        ],
    };
    let _runtime = serve(&socket, Ok(said));
    let told = first_words(&mut pods(&socket));
    let holder = |device: &str, pod: &str| Holder {
        device: device.to_owned(),
        pod: pod.to_owned(),
        namespace: "ml".to_owned(),
        container: "main".to_owned(),
    };
    let holders = vec![holder("GPU-a", "train-0"), holder("GPU-b", "train-0"), holder("GPU-c::3", "train-1")];
    assert_eq!(told[0], Fact::Pods(PodsFact { holders }));
    assert!(matches!(&told[1], Fact::Sampler(s) if s.sampler == "pods" && s.absent.is_none()), "{told:?}");
}

#[test]
fn a_kubelet_that_is_not_there_is_not_spoken_of_and_one_that_refuses_is() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("kubelet.sock");
    let mut none = pods(&socket);
    let said: Vec<Reading> = (0..300).flat_map(|second| none.poll(second * 1_000_000_000)).collect();
    assert_eq!(said, [], "most machines have none");

    let absent = |socket: &Path| match first_words(&mut pods(socket)).as_slice() {
        [Fact::Sampler(s)] => s.absent.clone().unwrap(),
        other => panic!("{other:?}"),
    };
    let _runtime = serve(&socket, Err(Status::new(Code::ResourceExhausted, "rejected by rate limit")));
    let why = absent(&socket);
    assert!(why.contains("kubelet.sock") && why.contains("rejected by rate limit"), "{why}");
    // Somebody listens and never says a word; an answer is not waited for without end.
    let deaf = dir.path().join("deaf.sock");
    let _listener = std::os::unix::net::UnixListener::bind(&deaf).unwrap();
    let why = absent(&deaf);
    assert!(why.contains("no answer within 3 s"), "{why}");
}

#[test]
fn an_interface_with_a_device_is_hardware_and_one_without_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let (proc, sys) = (dir.path().join("proc"), dir.path().join("sys"));
    for name in ["eth0", "br0"] {
        std::fs::create_dir_all(sys.join("class/net").join(name)).unwrap();
    }
    let device = sys.join("devices/pci0000:00/0000:05:00.0");
    std::os::unix::fs::symlink(device, sys.join("class/net/eth0/device")).unwrap();
    let found: Vec<(String, Option<String>)> = once(&proc, &sys)
        .into_iter()
        .filter_map(|r| if let Fact::Interface(i) = r.fact { Some((i.interface, i.device)) } else { None })
        .collect();
    assert_eq!(found, [("br0".to_owned(), None), ("eth0".to_owned(), Some("0000:05:00.0".to_owned()))]);
}
