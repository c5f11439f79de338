//! Each fault is planted in a directory of its own, and has to be named with its remedy; a healthy host passes.

use super::*;
use std::path::Path;

/// A host below a directory, with nothing of this machine's.
fn host(dir: &Path) -> Host {
    for d in ["dev/shm", "proc/sys/kernel", "sys/devices/system/clocksource/clocksource0", "etc"] {
        std::fs::create_dir_all(dir.join(d)).unwrap();
    }
    std::fs::write(dir.join("sys/devices/system/clocksource/clocksource0/current_clocksource"), "tsc\n")
        .unwrap();
    let eth = Interface { name: "eth0".into(), address: "10.0.0.7".into(), is_up: true, is_loopback: false };
    let lo = Interface { name: "lo".into(), address: "127.0.0.1".into(), is_up: true, is_loopback: true };
    Host {
        root: dir.to_owned(),
        interfaces: vec![lo, eth],
        nvml: Some("/nowhere/libnvidia-ml.so.1".into()),
        cuda: Some("/nowhere/libcuda.so.1".into()),
        ..Host::default()
    }
}

fn put(dir: &Path, file: &str, text: &str) {
    let path = dir.join(file);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, text).unwrap();
}

/// The result of a check; the text and the remedy of each result that is no pass.
fn say(host: &Host, id: &str) -> (Status, String) {
    let check = *checks().iter().find(|c| c.id == id).unwrap();
    let report = run(&Arc::new(host.clone()), &[check], LIMIT);
    let one = &report.outcomes[0];
    let lines: Vec<String> =
        one.results.iter().map(|r| format!("{} -> {}", r.seen, r.fix.as_deref().unwrap_or("-"))).collect();
    (one.status, lines.join("\n"))
}

fn set(host: &mut Host, variables: &[(&str, &str)]) {
    host.variables.extend(variables.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())));
}

/// An RDMA device of RoCE with one port and these GIDs.
fn roce(dir: &Path, gids: &[(&str, &str)], mtu: &str) {
    let port = "sys/class/infiniband/mlx5_0/ports/1";
    put(dir, "dev/infiniband/uverbs0", "");
    put(dir, &format!("{port}/state"), "4: ACTIVE\n");
    put(dir, &format!("{port}/phys_state"), "5: LinkUp\n");
    put(dir, &format!("{port}/rate"), "400 Gb/sec (4X NDR)\n");
    put(dir, &format!("{port}/link_layer"), "Ethernet\n");
    for (i, (gid, kind)) in gids.iter().enumerate() {
        put(dir, &format!("{port}/gids/{i}"), gid);
        put(dir, &format!("{port}/gid_attrs/types/{i}"), kind);
    }
    put(dir, "sys/class/infiniband/mlx5_0/device/net/ens1/address", "x");
    put(dir, "sys/class/net/ens1/mtu", mtu);
}

const LINK_LOCAL: (&str, &str) = ("fe80:0000:0000:0000:0000:0000:0000:0001", "IB/RoCE v1");
const ROUTABLE: (&str, &str) = ("0000:0000:0000:0000:0000:ffff:0a00:0007", "RoCE v2");

#[test]
fn ids_are_unique_and_every_area_has_checks() {
    let mut ids: Vec<&str> = checks().iter().map(|c| c.id).collect();
    ids.sort_unstable();
    let count = ids.len();
    ids.dedup();
    assert_eq!(ids.len(), count);
}

#[test]
fn a_host_with_nothing_wrong_and_without_gpus_has_no_warning() {
    let dir = tempfile::tempdir().unwrap();
    let host = host(dir.path());
    let report = run(&Arc::new(host), &checks(), Duration::from_secs(30));
    let bad: Vec<_> = report.outcomes.iter().filter(|o| o.status >= Status::Warn).collect();
    assert!(bad.is_empty(), "{bad:#?}");
    assert!(!report.has_failed());
}

#[test]
fn a_check_that_hangs_fails_and_hides_no_other() {
    fn hangs(_: &Host) -> Vec<Observation> {
        std::thread::sleep(Duration::from_secs(3600));
        Vec::new()
    }
    fn passes(_: &Host) -> Vec<Observation> {
        vec![Observation::pass("well")]
    }
    let both = [
        Check { id: "hangs", area: Area::Limits, run: hangs },
        Check { id: "passes", area: Area::Limits, run: passes },
    ];
    let report = run(&Arc::new(Host::default()), &both, Duration::from_millis(300));
    let all: Vec<_> = report.outcomes.iter().map(|o| (o.id.as_str(), o.status)).collect();
    assert_eq!(all, [("hangs", Status::Fail), ("passes", Status::Pass)]);
    assert!(report.outcomes[0].results[0].seen.contains("did not end"));
}

#[test]
fn a_wrong_interface() {
    let dir = tempfile::tempdir().unwrap();
    let mut host = host(dir.path());
    assert_eq!(
        say(&host, "socket-interface"),
        (Status::Pass, "NCCL would choose eth0 (10.0.0.7) -> -".to_owned())
    );
    set(&mut host, &[("NCCL_SOCKET_IFNAME", "ens5")]);
    let (status, text) = say(&host, "socket-interface");
    assert!(
        status == Status::Fail && text.contains("ens5 selects no interface that is up; there are"),
        "{text}"
    );
    assert!(text.contains("-> name the interface that reaches the other hosts"), "{text}");
    set(&mut host, &[("NCCL_SOCKET_IFNAME", "lo")]);
    let (status, text) = say(&host, "socket-interface");
    assert!(status == Status::Warn && text.contains("which reaches no other host"), "{text}");
}

#[test]
fn limits_of_the_process() {
    let dir = tempfile::tempdir().unwrap();
    let mut host = host(dir.path());
    host.limits = Limits {
        memlock_bytes: Some(64 << 10),
        files: Some(1024),
        file_bytes: Some(1 << 20),
        may_lock: false,
    };
    assert_eq!(say(&host, "memlock").0, Status::Pass, "without RDMA nothing is locked");
    roce(dir.path(), &[LINK_LOCAL, ROUTABLE], "9000");
    let (status, text) = say(&host, "memlock");
    assert!(status == Status::Fail && text.contains("64 KiB") && text.contains("LimitMEMLOCK"), "{text}");
    host.limits.may_lock = true;
    assert_eq!(say(&host, "memlock").0, Status::Pass, "the limit does not count");
    let (status, text) = say(&host, "open-files");
    assert!(status == Status::Warn && text.contains("1024") && text.contains("LimitNOFILE"), "{text}");
    let (status, text) = say(&host, "file-size");
    assert!(status == Status::Fail && text.contains("SIGXFSZ") && text.contains("ulimit -f"), "{text}");
    put(dir.path(), "sys/fs/cgroup/pids.max", "100\n");
    let (status, text) = say(&host, "container");
    assert!(
        status == Status::Warn && text.contains("100 threads") && text.contains("--pids-limit"),
        "{text}"
    );
    put(dir.path(), "sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet\n");
    let (status, text) = say(&host, "clock-source");
    assert!(status == Status::Warn && text.contains("hpet") && text.contains("clocksource=tsc"), "{text}");
}

#[test]
fn a_pipe_in_place_of_a_file_holds_nothing_up() {
    let dir = tempfile::tempdir().unwrap();
    let mut host = host(dir.path());
    let pipe = dir.path().join("nccl.conf");
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RWXU).unwrap();
    set(&mut host, &[("NCCL_CONF_FILE", &pipe.display().to_string())]);
    let (status, text) = say(&host, "variable-effects");
    assert!(status == Status::Warn && text.contains("cannot be read"), "{text}");
}

#[test]
fn a_check_that_breaks_off_fails() {
    fn breaks(_: &Host) -> Vec<Observation> {
        panic!("planted")
    }
    let one = [Check { id: "breaks", area: Area::Limits, run: breaks }];
    let report = run(&Arc::new(Host::default()), &one, LIMIT);
    assert!(report.has_failed() && report.outcomes[0].results[0].seen == "the check itself broke off");
}

#[test]
fn a_clock_before_the_programs_own_date() {
    let dir = tempfile::tempdir().unwrap();
    let mut host = host(dir.path());
    let file = dir.path().join("ringwatch");
    std::fs::write(&file, "").unwrap();
    let ahead = std::time::UNIX_EPOCH + Duration::from_millis(host.unix_ms()) + Duration::from_secs(86_400);
    std::fs::File::options().write(true).open(&file).unwrap().set_modified(ahead).unwrap();
    host.program = Some(file);
    let (status, text) = say(&host, "time");
    assert!(status == Status::Fail && text.contains("before the date") && text.contains("chronyc"), "{text}");
}

#[test]
fn ports_of_rdma() {
    let dir = tempfile::tempdir().unwrap();
    let mut host = host(dir.path());
    assert_eq!(say(&host, "rdma").0, Status::Skip);
    roce(dir.path(), &[LINK_LOCAL, ROUTABLE], "9000");
    let (status, text) = say(&host, "rdma");
    assert!(status == Status::Pass && text.contains("GID 1 (RoCE v2)"), "{text}");
    put(dir.path(), "sys/class/net/ens1/mtu", "1500");
    let (status, text) = say(&host, "rdma");
    assert!(status == Status::Warn && text.contains("MTU 1500") && text.contains("mtu 9000"), "{text}");
    set(&mut host, &[("NCCL_IB_GID_INDEX", "3")]);
    let (status, text) = say(&host, "rdma");
    assert!(status == Status::Fail && text.contains("NCCL_IB_GID_INDEX=3 is empty"), "{text}");
    set(&mut host, &[("NCCL_IB_GID_INDEX", "0")]);
    let (status, text) = say(&host, "rdma");
    assert!(status == Status::Warn && text.contains("which no router forwards"), "{text}");
    set(&mut host, &[("NCCL_IB_HCA", "mlx4")]);
    let (status, text) = say(&host, "rdma");
    assert!(
        status == Status::Fail && text.contains("NCCL_IB_HCA=mlx4 selects none of the devices mlx5_0"),
        "{text}"
    );
    set(&mut host, &[("NCCL_IB_HCA", "mlx5")]);
    put(dir.path(), "sys/class/infiniband/mlx5_0/ports/1/state", "2: INIT\n");
    let (status, text) = say(&host, "rdma");
    assert!(status == Status::Warn && text.contains("INIT") && text.contains("check cable"), "{text}");
    put(dir.path(), "sys/class/infiniband/mlx5_0/ports/1/phys_state", "3: Disabled\n");
    let (status, text) = say(&host, "rdma");
    assert!(status == Status::Warn && text.contains("no port of an RDMA device is active"), "{text}");
}

#[test]
fn gpudirect_without_its_module() {
    let dir = tempfile::tempdir().unwrap();
    let host = host(dir.path());
    roce(dir.path(), &[ROUTABLE], "9000");
    assert_eq!(say(&host, "gpudirect-rdma").0, Status::Skip, "no GPU");
    put(dir.path(), "sys/bus/pci/devices/0000:1a:00.0/vendor", "0x10de\n");
    put(dir.path(), "sys/bus/pci/devices/0000:1a:00.0/class", "0x030200\n");
    put(dir.path(), "proc/sys/kernel/osrelease", "5.4.0-1\n");
    let (status, text) = say(&host, "gpudirect-rdma");
    assert!(status == Status::Warn && text.contains("modprobe nvidia-peermem"), "{text}");
    put(dir.path(), "proc/modules", "nvidia_peermem 16384 0 - Live 0x0\n");
    assert_eq!(say(&host, "gpudirect-rdma").0, Status::Pass);
    let (status, text) = say(&host, "driver");
    assert!(
        status == Status::Fail && text.contains("1 GPUs on PCI") && text.contains("modprobe nvidia"),
        "{text}"
    );
}

#[test]
fn values_and_effects_of_variables() {
    /// Variables, the check, what it returns, and a part of its text.
    type Case = (&'static [(&'static str, &'static str)], &'static str, Status, &'static str);
    let cases: &[Case] = &[
        (&[("NCCL_BUFFSIZE", "4M")], "variable-values", Status::Warn, "takes 4"),
        (&[("NCCL_DEBUG", "VERBOSE")], "variable-values", Status::Warn, "does not know this value"),
        (&[("NCCL_P2P_LEVEL", "NVLINK")], "variable-values", Status::Warn, "one of LOC, NVL"),
        (&[("NCCL_ALGO", "rign")], "variable-values", Status::Fail, "rign is none"),
        (
            &[("NCCL_P2P_LEVEL", "NVL"), ("NCCL_DEBUG", "warn"), ("NCCL_ALGO", "^tree")],
            "variable-values",
            Status::Pass,
            "",
        ),
        (&[("NCCL_PROTO", "LL128")], "variable-effects", Status::Warn, "LL128 is forced"),
        (&[("NCCL_P2P_DISABLE", "1")], "variable-effects", Status::Warn, "not use NVLink"),
        (&[("NCCL_P2P_DISABLE", "0")], "variable-effects", Status::Pass, ""),
        (&[("NCCL_DEBUG", "INFO")], "variable-effects", Status::Warn, "was left on"),
        (&[("NCCL_DEBUG_SUBSYS", "NET")], "variable-effects", Status::Warn, "it is ignored"),
        (
            &[("NCCL_DEBUG", "WARN"), ("NCCL_DEBUG_FILE", "/tmp/log")],
            "variable-effects",
            Status::Warn,
            "%h and %p",
        ),
        (
            &[("NCCL_SOCKET_NTHREADS", "16"), ("NCCL_NSOCKS_PERTHREAD", "8")],
            "variable-effects",
            Status::Warn,
            "above 64",
        ),
        (&[("NCCL_IB_TC", "106")], "variable-effects", Status::Warn, "NCCL ignores them"),
        (&[("CUDA_LAUNCH_BLOCKING", "1")], "variable-effects", Status::Warn, "nothing overlaps"),
        (&[("NCCL_CONF_FILE", "/nowhere/nccl.conf")], "variable-effects", Status::Warn, "cannot be read"),
    ];
    for (variables, id, status, part) in cases {
        let dir = tempfile::tempdir().unwrap();
        let mut host = host(dir.path());
        set(&mut host, variables);
        let (seen, text) = say(&host, id);
        assert!(seen == *status && text.contains(part), "{variables:?}: {seen} {text}");
        assert!(*status == Status::Pass || !text.ends_with("-> -"), "{variables:?} has a remedy: {text}");
    }
}

#[test]
fn files_of_nccl_are_read_and_the_environment_comes_first() {
    let dir = tempfile::tempdir().unwrap();
    let mut host = host(dir.path());
    put(dir.path(), "etc/nccl.conf", "# for all\nNCCL_P2P_DISABLE=1\nNCCL_DEBUG=WARN\n");
    let (status, text) = say(&host, "variable-effects");
    assert!(status == Status::Warn && text.contains("NCCL_P2P_DISABLE=1"), "{text}");
    set(&mut host, &[("NCCL_P2P_DISABLE", "0")]);
    let (status, text) = say(&host, "variable-effects");
    assert!(status == Status::Warn && text.contains("which counts -> set it in one place"), "{text}");
}

#[test]
fn a_plugin_that_does_not_load() {
    let dir = tempfile::tempdir().unwrap();
    let mut host = host(dir.path());
    set(&mut host, &[("NCCL_PROFILER_PLUGIN", "libnccl-profiler-ringwatch.so")]);
    let (status, text) = say(&host, "job-plugins");
    assert!(
        status == Status::Fail && text.contains("finds no such file") && text.contains("ringwatch plugin"),
        "{text}"
    );
    let path = dir.path().join("libnccl-profiler-ringwatch.so");
    std::fs::write(&path, "version https://git-lfs.github.com/spec/v1").unwrap();
    set(&mut host, &[("LD_LIBRARY_PATH", &dir.path().display().to_string())]);
    let (status, text) = say(&host, "job-plugins");
    assert!(status == Status::Fail && text.contains("NCCL goes on without it"), "{text}");
    std::fs::write(&path, crate::bundle::PLUGIN).unwrap();
    let (status, text) = say(&host, "job-plugins");
    assert!(status == Status::Pass && text.contains("ncclProfiler_v1, "), "{text}");
    set(&mut host, &[("LD_PRELOAD", "/nowhere/libringwatch-preload.so")]);
    let (status, text) = say(&host, "job-plugins");
    assert!(status == Status::Fail && text.contains("which is not there"), "{text}");
}

#[test]
fn settings_that_are_wrong() {
    let dir = tempfile::tempdir().unwrap();
    let host = host(dir.path());
    put(dir.path(), "etc/ringwatch/agent.yaml", "segmnts: {}\n");
    let (status, text) = say(&host, "settings");
    assert!(status == Status::Fail && text.contains("segmnts") && text.contains("config check"), "{text}");
}

#[test]
fn a_bundle_holds_the_report_and_no_secret() {
    let dir = tempfile::tempdir().unwrap();
    let mut host = host(dir.path());
    set(
        &mut host,
        &[
            ("RINGWATCH_OTLP_TOKEN", "hunter2"),
            ("ompi_auth", "hunter2"),
            ("NCCL_DEBUG", "WARN"),
            ("HOME", "/home/somebody"),
        ],
    );
    set(
        &mut host,
        &[("RINGWATCH_CLUSTER", "nats://me:hunter2@host:4222"), ("LD_LIBRARY_PATH", "/home/somebody/lib")],
    );
    let report = run(&Arc::new(host.clone()), &checks()[..3], LIMIT);
    let mut bytes = Vec::new();
    write_bundle(&mut bytes, &host, &report, "as text").unwrap();
    let mut tar = tar::Archive::new(flate2::read::GzDecoder::new(&bytes[..]));
    let mut all = String::new();
    for entry in tar.entries().unwrap() {
        let mut entry = entry.unwrap();
        all.push_str(&entry.path().unwrap().display().to_string());
        std::io::Read::read_to_string(&mut entry, &mut all).unwrap();
    }
    for part in [
        "report.json",
        "report.txt",
        "as text",
        "NCCL_DEBUG=WARN",
        "RINGWATCH_OTLP_TOKEN=***",
        "ompi_auth=***",
        "LD_LIBRARY_PATH=~/lib",
    ] {
        assert!(all.contains(part), "{part}: {all}");
    }
    for secret in ["hunter2", "somebody"] {
        assert!(!all.contains(secret), "{secret}");
    }
}
