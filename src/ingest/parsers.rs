//! Parsers of what tools, the kernel and the kubelet write, apart from how it is read: for the fuzz targets in
//! `tests/fuzz`.

use super::{attribution, cgroup, hardware, process, process_reading, reap, stacks, threads};
use crate::model::PodsFact;
use std::collections::BTreeMap;
use std::ffi::OsStr;

/// The main thread's frames in what `py-spy dump --json` prints; nothing where it is no dump.
pub fn python_frames(json: &[u8]) -> Option<Vec<String>> {
    stacks::frames(json)
}

/// The frames in what eu-stack prints.
pub fn native_frames(text: &[u8]) -> Vec<String> {
    stacks::native_frames(text)
}

/// Where in the kernel a thread is, by its files `syscall`, `stack` and `wchan`.
pub fn kernel_place(syscall: Option<&str>, stack: Option<&str>, wchan: Option<&str>) -> Option<String> {
    threads::place(syscall, stack, wchan)
}

/// State, start in clock ticks and exit status in a process's `stat` file.
pub fn process_stat(text: &str) -> Option<(u8, u64, Option<i32>)> {
    process::Stat::parse(text).map(|s| (s.state, s.start_ticks, s.exit_status))
}

/// How long a thread ran and waited for a CPU, in ns, by its `schedstat` file.
pub fn schedstat(text: &str) -> Option<(u64, u64)> {
    process_reading::schedstat(text)
}

/// Labels in a process's list of control groups.
pub fn cgroup_labels(text: &str) -> BTreeMap<String, String> {
    let mut labels = BTreeMap::new();
    attribution::cgroup(text, &mut labels);
    labels
}

/// The share of the last ten seconds in which some task waited, in a pressure file.
pub fn pressure(text: &str) -> Option<f64> {
    cgroup::pressure(text)
}

/// The holders of GPUs in an answer of the kubelet's PodResourcesLister; nothing where it is none.
pub fn gpu_holders(answer: &[u8]) -> Option<PodsFact> {
    hardware::pods::decode(answer).ok()
}

/// Pid, start in clock ticks and nonce in the name of a segment's file.
pub fn segment_name(name: &OsStr) -> Option<(u32, u64, u64)> {
    reap::name_of_plugin(name)
}
