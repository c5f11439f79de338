//! The host itself: its CPUs, its memory, and what waits for them.

use super::{Absent, Batch, Sampler};
use crate::ingest::files::{named, text};
use crate::model::{Fact, NodeFact};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The sampler.
#[derive(Debug)]
pub struct Node {
    root: PathBuf,
    period: Duration,
    /// CPU time so far, all of it and the idle part, in ticks.
    before: Option<(u64, u64)>,
}

impl Node {
    /// Over this copy of /proc.
    pub fn new(proc: &Path, period: Duration) -> Self {
        Node { root: proc.to_owned(), period, before: None }
    }
}

/// Of the first line of /proc/stat, all ticks and the idle ones; waiting for storage is idle.
fn ticks(stat: &str) -> Option<(u64, u64)> {
    let line = stat.lines().find_map(|l| l.strip_prefix("cpu "))?;
    // Time of guests is in their hosts' already.
    let n: Vec<u64> = line.split_whitespace().take(8).map(|w| w.parse().ok()).collect::<Option<_>>()?;
    let all = n.iter().fold(0u64, |sum, t| sum.saturating_add(*t));
    Some((all, n.get(3)?.saturating_add(*n.get(4).unwrap_or(&0))))
}

fn cpus(stat: &str) -> Option<u32> {
    let named = |l: &&str| l.strip_prefix("cpu").is_some_and(|r| r.starts_with(|c: char| c.is_ascii_digit()));
    u32::try_from(stat.lines().filter(named).count()).ok().filter(|n| *n > 0)
}

/// `MemTotal: 1024 kB`, in bytes.
fn memory(meminfo: &str, name: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':'))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

/// Of /proc/net/snmp, a column of the TCP lines: the first one names the columns of the second one.
fn tcp(snmp: &str, column: &str) -> Option<u64> {
    let mut lines = snmp.lines().filter_map(|l| l.strip_prefix("Tcp:"));
    let (names, values) = (lines.next()?, lines.next()?);
    let at = names.split_whitespace().position(|n| n == column)?;
    values.split_whitespace().nth(at)?.parse().ok()
}

impl Sampler for Node {
    fn name(&self) -> &'static str {
        "node"
    }

    fn period(&self) -> Duration {
        self.period
    }

    fn sample(&mut self, now_ns: u64, batch: &mut Batch) -> Result<(), Absent> {
        let read = |name: &str| text(&self.root.join(name)).unwrap_or_default();
        let (stat, meminfo) = (read("stat"), read("meminfo"));
        let pressure = |name: &str| crate::ingest::cgroup::pressure(&read(name));
        let now = ticks(&stat);
        let gained = now.zip(self.before).map(|((all, idle), (all_before, idle_before))| {
            (all.saturating_sub(all_before), idle.saturating_sub(idle_before))
        });
        let fact = NodeFact {
            cpus: cpus(&stat),
            cpu_busy: gained
                .filter(|(all, _)| *all > 0)
                .map(|(all, idle)| 1.0 - (idle as f64 / all as f64).min(1.0)),
            cpu_pressure: pressure("pressure/cpu"),
            memory_pressure: pressure("pressure/memory"),
            io_pressure: pressure("pressure/io"),
            memory_bytes: memory(&meminfo, "MemTotal"),
            memory_available_bytes: memory(&meminfo, "MemAvailable"),
            tcp_retransmits: tcp(&read("net/snmp"), "RetransSegs"),
            oom_kills: named(&read("vmstat"), "oom_kill"),
        };
        self.before = now;
        if fact == NodeFact::default() {
            return Err(Absent(format!("nothing below {} can be read", self.root.display())));
        }
        batch.tell(now_ns, Fact::Node(fact));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_read_as_they_are_and_odd_ones_are_absent() {
        let stat = "cpu  100 0 50 800 50 0 0 0 7 7\ncpu0 1 2 3 4\ncpu1 1 2 3 4\nintr 5\n";
        assert_eq!(ticks(stat), Some((1000, 850)));
        assert_eq!(cpus(stat), Some(2));
        assert_eq!(memory("MemTotal:  2 kB\nMemAvailable: 1 kB", "MemAvailable"), Some(1024));
        assert_eq!(tcp("Tcp: A RetransSegs B\nTcp: 1 7 2\n", "RetransSegs"), Some(7));
        assert_eq!(named("oom_killed 3\noom_kill 4\n", "oom_kill"), Some(4));
        assert_eq!(ticks("cpu  1 2 x 4"), None);
        assert_eq!(ticks("cpu "), None);
        assert_eq!(cpus(""), None);
        assert_eq!(memory("MemTotal: 99999999999999999999 kB", "MemTotal"), None);
        assert_eq!(memory("MemTotal: 18446744073709551615 kB", "MemTotal"), None);
        assert_eq!(tcp("Tcp: RetransSegs\nTcp: -1\n", "RetransSegs"), None);
        assert_eq!(tcp("Tcp: A\n", "A"), None);
    }
}
