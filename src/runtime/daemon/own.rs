//! The agent's own overhead, as the kernel counts it.

use super::Connections;
use crate::export::Own;
use crate::ingest::{now_ns, unix_ns};
use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;
use std::time::Duration;

/// Counts of one run of the agent.
#[derive(Debug)]
pub(in crate::runtime) struct Costs {
    node: String,
    started_unix_ns: u64,
    polls: u64,
    reading: Duration,
    connections: Arc<Connections>,
}

impl Costs {
    pub(in crate::runtime) fn new(node: String) -> Self {
        Costs {
            node,
            started_unix_ns: unix_ns(),
            polls: 0,
            reading: Duration::ZERO,
            connections: Arc::default(),
        }
    }

    pub(in crate::runtime) fn started_unix_ns(&self) -> u64 {
        self.started_unix_ns
    }

    /// Where servers count connections that they close.
    pub(in crate::runtime) fn connections(&self) -> Arc<Connections> {
        Arc::clone(&self.connections)
    }

    /// One more look, which took so much of a CPU.
    pub(in crate::runtime) fn looked(&mut self, took: Duration) {
        self.polls += 1;
        self.reading += took;
    }

    pub(in crate::runtime) fn own(&self, segments: usize) -> Own {
        let cpu = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        // The first entry is the directory that is being read.
        let open_fds = fs::read_dir("/proc/self/fd").ok().map(|d| d.count().saturating_sub(1) as u64);
        Own {
            now_ns: now_ns(),
            node: self.node.clone(),
            cpu_seconds: cpu.tv_sec as f64 + cpu.tv_nsec as f64 / 1e9,
            resident_bytes: resident().unwrap_or(0),
            open_fds,
            segments: segments as u64,
            unread: BTreeMap::new(),
            started_unix_ns: self.started_unix_ns,
            polls: self.polls,
            poll_seconds: self.reading.as_secs_f64(),
            connections_closed: self.connections.counts(),
            listen_failures: self.connections.listen_failures(),
            exported: Vec::new(),
            bus: None,
        }
    }
}

/// Memory held, in bytes.
fn resident() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"))?;
    Some(line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn its_own_cost_is_what_the_kernel_says() {
        let mut c = Costs::new("node1".to_owned());
        c.looked(Duration::from_millis(3));
        let own = c.own(2);
        assert!(
            own.resident_bytes > 100_000 && own.cpu_seconds > 0.0 && own.open_fds.is_some_and(|n| n >= 3)
        );
        assert_eq!((own.segments, own.polls), (2, 1));
        assert!((own.poll_seconds - 0.003).abs() < 1e-9);
        assert!(own.node == "node1" && own.started_unix_ns > 1_700_000_000_000_000_000);
    }
}
