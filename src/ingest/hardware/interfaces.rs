//! Network interfaces, from /sys/class/net, and from /proc/net/dev where that is all there is; and from their drivers.

use super::ethtool::Ethtool;
use super::{Absent, Batch, Sampler};
use crate::ingest::files::{entries, number, sum, text};
use crate::model::{Fact, InterfaceFact, steers};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Interfaces told at most: hosts of containers have a pair for each of these.
const TOLD: usize = 256;
/// Bytes of an interface's name; the kernel allows no more (IFNAMSIZ, less the final NUL).
const NAME_MAX: usize = 15;

/// The sampler.
#[derive(Debug)]
pub struct Interfaces {
    dev: PathBuf,
    class: PathBuf,
    period: Duration,
    drivers: Option<Drivers>,
}

/// The interfaces' drivers: asked more rarely, since some ask the device in turn.
#[derive(Debug)]
struct Drivers {
    period_ns: u64,
    due_ns: u64,
    ethtool: Ethtool,
}

impl Interfaces {
    /// Over these copies of /proc and /sys; this machine's drivers are asked as often as is said, or not at all.
    pub fn new(proc: &Path, sys: &Path, period: Duration, drivers: Option<Duration>) -> Self {
        let drivers = drivers.and_then(|every| {
            let period_ns = u64::try_from(every.as_nanos()).unwrap_or(u64::MAX);
            Some(Drivers { period_ns, due_ns: 0, ethtool: Ethtool::new().ok()? })
        });
        Interfaces { dev: proc.join("net/dev"), class: sys.join("class/net"), period, drivers }
    }
}

/// The kernel would give an interface this name, and a terminal may show it.
fn is_name(name: &str) -> bool {
    let is_allowed = |c: char| !matches!(c, '/' | ':') && !c.is_whitespace() && !steers(c);
    (1..=NAME_MAX).contains(&name.len()) && !matches!(name, "." | "..") && name.chars().all(is_allowed)
}

/// A line of /proc/net/dev: bytes, packets, errors and drops received, and further on the same sent.
fn line(text: &str) -> Option<InterfaceFact> {
    let (name, rest) = text.split_once(':')?;
    let n: Vec<u64> = rest.split_whitespace().map(|w| w.parse().ok()).collect::<Option<_>>()?;
    let both = |a: usize, b: usize| Some(n.get(a)?.saturating_add(*n.get(b)?));
    Some(InterfaceFact {
        interface: name.trim().to_owned(),
        rx_bytes: n.first().copied(),
        tx_bytes: Some(*n.get(8)?),
        errors: both(2, 10),
        drops: both(3, 11),
        ..InterfaceFact::default()
    })
}

/// Adds the facts of sysfs.
fn complete(fact: &mut InterfaceFact, dir: &Path) {
    fact.up = match text(&dir.join("operstate")).as_deref() {
        Some("up") => Some(true),
        Some("down" | "lowerlayerdown" | "notpresent") => Some(false),
        _ => None,
    };
    // A link to the device; what it is called there is nobody's text.
    let device = std::fs::read_link(dir.join("device")).ok();
    fact.device = device
        .and_then(|d| Some(d.file_name()?.to_str()?.to_owned()))
        .filter(|name| !name.is_empty() && !name.chars().any(steers));
    // Of an interface that is down, or has no speed, it says -1.
    fact.speed_mbit_per_s = number(&dir.join("speed")).filter(|n| *n > 0);
    fact.downs = number(&dir.join("carrier_down_count"));
    let s = dir.join("statistics");
    fact.tx_bytes = number(&s.join("tx_bytes")).or(fact.tx_bytes);
    fact.rx_bytes = number(&s.join("rx_bytes")).or(fact.rx_bytes);
    // What no socket had room for is counted apart from what the device dropped.
    fact.drops = sum(&s, &["rx_dropped", "tx_dropped", "rx_missed_errors"]).or(fact.drops);
    fact.errors = sum(&s, &["rx_errors", "tx_errors"]).or(fact.errors);
}

impl Sampler for Interfaces {
    fn name(&self) -> &'static str {
        "interfaces"
    }

    fn period(&self) -> Duration {
        self.period
    }

    fn sample(&mut self, now_ns: u64, batch: &mut Batch) -> Result<(), Absent> {
        let dev = text(&self.dev).unwrap_or_default();
        let mut facts: Vec<InterfaceFact> = dev.lines().skip(2).filter_map(line).collect();
        for (name, _) in entries(&self.class).unwrap_or_default() {
            if !facts.iter().any(|f| f.interface == name) && self.class.join(&name).is_dir() {
                facts.push(InterfaceFact { interface: name, ..InterfaceFact::default() });
            }
        }
        // What never leaves the host says nothing about a network.
        facts.retain(|f| f.interface != "lo" && is_name(&f.interface));
        if facts.is_empty() {
            return Err(Absent(format!(
                "neither {} nor {} names an interface beside lo",
                self.dev.display(),
                self.class.display()
            )));
        }
        let mut drivers = self.drivers.as_mut().filter(|d| d.due_ns <= now_ns);
        if let Some(d) = &mut drivers {
            d.due_ns = now_ns.saturating_add(d.period_ns);
        }
        for mut fact in facts.into_iter().take(TOLD) {
            let dir = self.class.join(&fact.interface);
            complete(&mut fact, &dir);
            fact.driver = drivers.as_mut().and_then(|d| d.ethtool.counters(&fact.interface));
            batch.tell(now_ns, Fact::Interface(fact));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_kernel_and_others() {
        let f = line("  eth0: 1000 10 1 2 0 0 0 0 2000 20 3 4 0 0 0 0").unwrap();
        assert_eq!((f.interface.as_str(), f.rx_bytes, f.tx_bytes), ("eth0", Some(1000), Some(2000)));
        assert_eq!((f.errors, f.drops), (Some(4), Some(6)));
        for odd in ["", "eth0", "eth0:", "eth0: 1 2 3", "eth0: a b c d e f g h i j k l"] {
            assert_eq!(line(odd), None, "{odd}");
        }
    }

    #[test]
    fn only_names_of_the_kernel_are_told() {
        assert!(is_name("eth0") && is_name("a23456789012345"));
        for odd in ["", "a234567890123456", "..", "../eth0", "a b", "eth0:", "eth\u{1b}0"] {
            assert!(!is_name(odd), "{odd:?}");
        }
    }
}
