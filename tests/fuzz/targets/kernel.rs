//! Files of /proc and /sys: their form is the kernel's, and the names of programs and control groups are anybody's.

use crate::outputs::TEXT_MAX;
use crate::plain;
use ringwatch::ingest::hardware::{Samplers, Settings};
use ringwatch::ingest::parsers;
use ringwatch::model::{nic_counter, pci_address};
use std::path::Path;

/// The longest value of a label, in characters.
const LABEL_MAX: usize = 128;

/// Files about processes.
pub(super) fn processes(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let stat = parsers::process_stat(&text);
    if let (Some((state, ticks, _)), true) = (stat, is_kernels(&text)) {
        let plugins = ringwatch_plugin::parsers::process_stat(text.as_bytes());
        assert_eq!(plugins, Some((state, ticks)), "the plugin reads the same");
    }
    parsers::schedstat(&text);
    for (name, value) in parsers::cgroup_labels(&text) {
        plain::text("a label", &name, LABEL_MAX);
        plain::text("a label's value", &value, 4 * LABEL_MAX);
        assert!(value.chars().count() <= LABEL_MAX, "{value}");
    }
    let share = parsers::pressure(&text);
    assert!(share.is_none_or(|s| (0.0..=1.0).contains(&s)), "a pressure of {share:?}");
    let mut thirds = text.splitn(3, "\n\n");
    let place = parsers::kernel_place(thirds.next(), thirds.next(), thirds.next());
    // The kernel's files are short.
    place.iter().for_each(|p| plain::text("a place in the kernel", p, 64 + text.len() * "\\u{10ffff}".len()));
    nic_counter(&text);
    if let Some(address) = pci_address(&text) {
        assert_eq!(pci_address(&address).as_ref(), Some(&address), "an address is its own form");
    }
}

/// True where the fields behind the name are as the kernel writes them: numbers, one space apart.
fn is_kernels(stat: &str) -> bool {
    let Some((_, behind)) = stat.rsplit_once(") ") else { return false };
    let mut fields = behind.trim_end_matches('\n').split(' ');
    let letter = fields.next().is_some_and(|s| matches!(s.as_bytes(), [c] if c.is_ascii_alphabetic()));
    let number = |f: &str| !f.is_empty() && f.parse::<i128>().is_ok() && !f.starts_with('+');
    letter && fields.all(number)
}

/// Every file that samplers read holds these bytes.
pub(super) fn samplers(bytes: &[u8]) {
    let room = tempfile::Builder::new().prefix("rw-fuzz-").tempdir_in("/dev/shm").unwrap();
    let (proc, sys) = (room.path().join("proc"), room.path().join("sys"));
    for name in ["stat", "meminfo", "vmstat", "net/dev", "net/snmp", "pressure/cpu", "pressure/memory"] {
        put(&proc.join(name), bytes);
    }
    let port = "class/infiniband/mlx5_0/ports/1";
    for name in
        ["state", "rate", "counters/port_xmit_data", "counters/symbol_error", "hw_counters/retrans_pkts"]
    {
        put(&sys.join(port).join(name), bytes);
    }
    for name in ["operstate", "speed", "carrier_down_count", "statistics/tx_bytes", "statistics/rx_dropped"] {
        put(&sys.join("class/net/eth0").join(name), bytes);
    }
    let settings = Settings { nvlink_ms: 0, gpu_ms: 0, xid_ms: 0, ..Settings::default() };
    let mut samplers = Samplers::below(&settings, &proc, &sys);
    for now_ns in [0, 2_000_000_000] {
        for reading in samplers.poll(now_ns) {
            let what = serde_json::to_value(&reading).unwrap();
            plain::json("a reading", &what, TEXT_MAX);
            assert_eq!(serde_json::from_value(what).ok(), Some(reading), "it reads as it was written");
        }
    }
}

fn put(path: &Path, bytes: &[u8]) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, bytes).unwrap();
}

/// The kubelet's answer about GPUs and pods. It is root's, and may be long: only what comes of it is bounded.
pub(super) fn pod_resources(bytes: &[u8]) {
    let Some(fact) = parsers::gpu_holders(bytes) else { return };
    assert!(fact.holders.len() <= 4096, "{} holders", fact.holders.len());
    plain::json("a holder", &serde_json::to_value(&fact).unwrap(), 253);
}
