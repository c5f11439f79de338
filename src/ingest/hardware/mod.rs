//! The readings of the machine under the jobs: samplers behind one trait, in one loop, each with its own period.
//!
//! Whatever is not there, or may not be asked, is said once; the other samplers go on. Drivers answer slowly, so that
//! the loop belongs on a thread of its own: [`Samplers`] can be sent to one, and says when it is next due.

mod ethtool;
mod interfaces;
mod node;
mod nvml;
pub(super) mod pods;
mod rdma;
mod recorded;

pub use interfaces::Interfaces;
pub use node::Node;
pub use nvml::{GpuState, Inventory, Nvml, inventory};
pub use pods::Pods;
pub use rdma::Rdma;
pub use recorded::{Recorded, Recorder, RecordingError};

use crate::model::{Fact, Reading, SamplerFact};
use recorded::Replayed;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// An absent source is asked for again after this, in ns: drivers are loaded, modules come late.
const RETRY_NS: u64 = 60_000_000_000;
/// Between two things that a sampler says about itself, in ns.
const SELF_NS: u64 = 1_000_000_000;
/// The shortest period there is.
const SHORTEST: Duration = Duration::from_millis(10);

/// The sources that are sampled, and their periods.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// Turns sampling on.
    pub enabled: bool,
    /// Readings that were recorded, one JSON object a line, in place of this machine's: for tests and demonstrations.
    pub recording: Option<PathBuf>,
    /// NVML's library, where it is not `libnvidia-ml.so.1` on the loader's path.
    pub nvml: Option<PathBuf>,
    /// Between two readings of NVLink and PCIe traffic, in ms; 0 leaves them out.
    pub nvlink_ms: u64,
    /// Between two readings of a GPU's health and load, in ms; 0 leaves them out.
    pub gpu_ms: u64,
    /// Between two looks at whether each NVLink is up, in ms. They come with the GPU's health; 0 leaves them out.
    pub link_states_ms: u64,
    /// Between two readings of the error counters of each NVLink and of PCIe, in ms. They come with the GPU's health; 0
    /// leaves them out.
    pub links_ms: u64,
    /// Between two looks for the driver's errors, in ms; 0 leaves them out.
    pub xid_ms: u64,
    /// Between two readings of the RDMA ports, in ms; 0 leaves them out.
    pub rdma_ms: u64,
    /// Between two readings of the network interfaces, in ms; 0 leaves them out.
    pub interfaces_ms: u64,
    /// Between two questions to the interfaces' drivers for their own counters, in ms. They come with the interfaces; 0
    /// leaves them out.
    pub ethtool_ms: u64,
    /// Between two readings of the host's own load, in ms; 0 leaves them out.
    pub node_ms: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            enabled: true,
            recording: None,
            nvml: None,
            nvlink_ms: 500,
            gpu_ms: 2_000,
            link_states_ms: 4_000,
            links_ms: 10_000,
            xid_ms: 200,
            rdma_ms: 1_000,
            interfaces_ms: 1_000,
            ethtool_ms: 5_000,
            node_ms: 1_000,
        }
    }
}

/// Why a sampler gives nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Absent(pub String);

/// The readings of one round of a sampler.
#[derive(Debug)]
pub struct Batch {
    host: String,
    readings: Vec<Reading>,
    failures: u64,
}

impl Batch {
    /// Takes what was read of this host at a moment of its monotonic clock.
    pub fn tell(&mut self, at_ns: u64, fact: Fact) {
        self.readings.push(Reading { host: self.host.clone(), at_ns, fact });
    }

    /// Takes a reading that names its own host.
    pub fn pass(&mut self, reading: Reading) {
        self.readings.push(reading);
    }

    /// Counts a question that was not answered though it should have been.
    pub fn failed(&mut self) {
        self.failures += 1;
    }
}

/// One thing that is asked again and again.
pub trait Sampler: Send {
    /// Its name, as [`SamplerFact`] tells it.
    fn name(&self) -> &'static str;
    /// How often it wants to be asked.
    fn period(&self) -> Duration;
    /// True for what most machines lack: as long as it gave nothing its absence is not told.
    fn is_optional(&self) -> bool {
        false
    }
    /// Asks. Absent is for all that it asks; a single question without an answer is one failure.
    fn sample(&mut self, now_ns: u64, batch: &mut Batch) -> Result<(), Absent>;
}

struct Entry {
    sampler: Box<dyn Sampler>,
    due_ns: u64,
    told_ns: Option<u64>,
    fact: SamplerFact,
}

/// All samplers of a host, and when each is due.
pub struct Samplers {
    host: String,
    entries: Vec<Entry>,
}

impl std::fmt::Debug for Samplers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<&str> = self.entries.iter().map(|e| e.sampler.name()).collect();
        f.debug_struct("Samplers").field("host", &self.host).field("samplers", &names).finish()
    }
}

impl Samplers {
    /// The samplers of this machine, or the recording that the settings name in their place.
    pub fn new(settings: &Settings) -> Self {
        Self::with(settings, Path::new("/proc"), Path::new("/sys"), true)
    }

    /// The same, over a copy of the kernel's directories. Drivers of interfaces are not asked: those that would answer are
    /// this machine's.
    pub fn below(settings: &Settings, proc: &Path, sys: &Path) -> Self {
        Self::with(settings, proc, sys, false)
    }

    fn with(settings: &Settings, proc: &Path, sys: &Path, is_this_machine: bool) -> Self {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let mut all = Samplers { host, entries: Vec::new() };
        if !settings.enabled {
            return all;
        }
        if let Some(path) = &settings.recording {
            all.add(Box::new(Replayed::of(path)));
            return all;
        }
        let every = |ms: u64| (ms > 0).then(|| Duration::from_millis(ms));
        let driver = Nvml::new(settings.nvml.clone());
        if let Some(period) = every(settings.xid_ms) {
            all.add(driver.errors(period));
        }
        if let Some(period) = every(settings.nvlink_ms) {
            all.add(driver.traffic(period));
        }
        if let Some(period) = every(settings.gpu_ms) {
            all.add(driver.health(period, every(settings.link_states_ms), every(settings.links_ms)));
        }
        if let Some(period) = every(settings.rdma_ms) {
            all.add(Box::new(Rdma::new(sys, period)));
        }
        if let Some(period) = every(settings.interfaces_ms) {
            let drivers = every(settings.ethtool_ms).filter(|_| is_this_machine);
            all.add(Box::new(Interfaces::new(proc, sys, period, drivers)));
        }
        if let Some(period) = every(settings.node_ms) {
            all.add(Box::new(Node::new(proc, period)));
        }
        all
    }

    /// The same, of a host of this name.
    #[must_use]
    pub fn of_node(self, node: String) -> Self {
        Samplers { host: node, ..self }
    }

    /// These and no others, of a host of this name.
    pub fn of(host: &str, samplers: Vec<Box<dyn Sampler>>) -> Self {
        let mut all = Samplers { host: host.to_owned(), entries: Vec::new() };
        samplers.into_iter().for_each(|s| all.add(s));
        all
    }

    /// Adds one.
    pub fn add(&mut self, sampler: Box<dyn Sampler>) {
        let fact = SamplerFact {
            sampler: sampler.name().to_owned(),
            absent: None,
            readings: 0,
            failures: 0,
            cost_ns: 0,
        };
        self.entries.push(Entry { sampler, due_ns: 0, told_ns: None, fact });
    }

    /// Asks whoever is due, and gives back what they said.
    pub fn poll(&mut self, now_ns: u64) -> Vec<Reading> {
        let mut batch = Batch { host: self.host.clone(), readings: Vec::new(), failures: 0 };
        for e in &mut self.entries {
            if e.due_ns > now_ns {
                continue;
            }
            let before = batch.readings.len();
            batch.failures = 0;
            let began = Instant::now();
            let given = e.sampler.sample(now_ns, &mut batch);
            let took = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
            e.fact.cost_ns = e.fact.cost_ns.saturating_add(took);
            e.fact.readings += (batch.readings.len() - before) as u64;
            e.fact.failures += batch.failures;
            let absent = given.err().map(|a| a.0);
            let changed = absent != e.fact.absent;
            e.due_ns = if absent.is_some() {
                now_ns.saturating_add(RETRY_NS)
            } else {
                // In step with itself, but never in a hurry to catch up.
                let period = period_ns(e.sampler.period());
                e.due_ns.saturating_add(period).max(now_ns.saturating_add(period / 2))
            };
            e.fact.absent = absent;
            let old = e.told_ns.is_none_or(|t| now_ns.saturating_sub(t) >= SELF_NS);
            let quiet = e.sampler.is_optional() && e.fact.readings == 0 && e.fact.failures == 0;
            if !quiet && (changed || old && e.fact.absent.is_none()) {
                e.told_ns = Some(now_ns);
                batch.tell(now_ns, Fact::Sampler(e.fact.clone()));
            }
        }
        batch.readings
    }

    /// How long nothing is due.
    pub fn pause(&self, now_ns: u64) -> Duration {
        let due = self.entries.iter().map(|e| e.due_ns).min();
        due.map_or(Duration::from_secs(1), |t| Duration::from_nanos(t.saturating_sub(now_ns)))
    }

    /// The readings' host, as this machine calls itself.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// True when there is nobody to ask.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

fn period_ns(period: Duration) -> u64 {
    u64::try_from(period.max(SHORTEST).as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::NodeFact;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    const MS: u64 = 1_000_000;

    struct Fake {
        every: u64,
        there: Arc<AtomicBool>,
    }

    impl Sampler for Fake {
        fn name(&self) -> &'static str {
            "fake"
        }
        fn period(&self) -> Duration {
            Duration::from_millis(self.every)
        }
        fn sample(&mut self, now_ns: u64, batch: &mut Batch) -> Result<(), Absent> {
            if !self.there.load(Ordering::Relaxed) {
                return Err(Absent("no such device".to_owned()));
            }
            batch.failed();
            batch.tell(now_ns, Fact::Node(NodeFact::default()));
            Ok(())
        }
    }

    fn fakes(every: &[u64]) -> (Samplers, Arc<AtomicBool>) {
        let there = Arc::new(AtomicBool::new(true));
        let of = |every: &u64| Box::new(Fake { every: *every, there: there.clone() }) as Box<dyn Sampler>;
        (Samplers::of("a", every.iter().map(of).collect()), there)
    }

    fn selves(readings: &[Reading]) -> Vec<&SamplerFact> {
        let of = |r| match r {
            &Reading { fact: Fact::Sampler(ref s), .. } => Some(s),
            _ => None,
        };
        readings.iter().filter_map(of).collect()
    }

    #[test]
    fn each_is_asked_at_its_own_pace() {
        let (mut all, _) = fakes(&[100, 1_000]);
        let counts: Vec<usize> = (0..200u64)
            .map(|i| {
                let readings = all.poll(i * 10 * MS);
                assert!(all.pause(i * 10 * MS) <= Duration::from_millis(100));
                readings.iter().filter(|r| matches!(r.fact, Fact::Node(_))).count()
            })
            .collect();
        assert_eq!(counts.iter().sum::<usize>(), 20 + 2);
    }

    #[test]
    fn a_late_loop_catches_nothing_up() {
        let (mut all, _) = fakes(&[100]);
        all.poll(0);
        all.poll(10_000 * MS);
        let asked = (0..20).filter(|i| !all.poll(10_000 * MS + i * 10 * MS).is_empty()).count();
        assert!(asked <= 3, "{asked}");
    }

    #[test]
    fn absence_is_said_once_and_looked_into_rarely() {
        let (mut all, there) = fakes(&[100]);
        there.store(false, Ordering::Relaxed);
        let mut said = Vec::new();
        for i in 0..1_300u64 {
            said.extend(all.poll(i * 100 * MS));
        }
        assert_eq!(said.len(), 1, "{said:?}");
        assert_eq!(selves(&said)[0].absent.as_deref(), Some("no such device"));
        there.store(true, Ordering::Relaxed);
        let (mut back, mut first) = (0, None);
        for i in 1_300..2_000u64 {
            let readings = all.poll(i * 100 * MS);
            back += readings.len();
            first = first.or_else(|| selves(&readings).first().map(|s| (*s).clone()));
        }
        assert!(back > 10);
        assert_eq!(first.unwrap().absent, None, "it says that it is there");
    }

    #[test]
    fn cost_readings_and_failures_add_up() {
        let (mut all, _) = fakes(&[100]);
        let said: Vec<Reading> = (0..50).flat_map(|i| all.poll(i * 100 * MS)).collect();
        let selves = selves(&said);
        assert_eq!(selves.len(), 5, "once a second");
        let last = selves.last().unwrap();
        assert_eq!((last.readings, last.failures), (41, 41));
        assert!(last.cost_ns > 0);
    }

    #[test]
    fn settings_name_what_they_do_not_know() {
        let error = serde_yaml::from_str::<Settings>("nvlink: 5").unwrap_err().to_string();
        assert!(error.contains("nvlink"), "{error}");
        let some: Settings = serde_yaml::from_str("nvlink_ms: 50").unwrap();
        assert_eq!(some, Settings { nvlink_ms: 50, ..Settings::default() });
        assert!(Samplers::new(&Settings { enabled: false, ..Settings::default() }).is_empty());
    }

    #[test]
    fn a_recording_is_played_in_place_of_the_machine() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("day.jsonl");
        let settings = Settings { recording: Some(path.clone()), ..Settings::default() };
        let said = Samplers::new(&settings).poll(0);
        assert_eq!(said.len(), 1, "it says that there is none: {said:?}");
        let why = selves(&said)[0].absent.clone().unwrap();
        assert!(why.contains("day.jsonl"), "{why}");

        let node = |host: &str, at_ns| Reading {
            host: host.to_owned(),
            at_ns,
            fact: Fact::Node(NodeFact::default()),
        };
        let mut file = std::fs::File::create(&path).unwrap();
        Recorder::new(&mut file).write(&[node("a", 5), node("b", 5 + 100 * MS)]).unwrap();
        let mut all = Samplers::new(&settings);
        let hosts = |readings: Vec<Reading>| -> Vec<String> {
            let of_node = |r: &Reading| matches!(r.fact, Fact::Node(_));
            readings.into_iter().filter(of_node).map(|r| r.host).collect()
        };
        assert_eq!(hosts(all.poll(0)), ["a"]);
        assert_eq!(hosts(all.poll(50 * MS)), Vec::<String>::new());
        assert_eq!(hosts(all.poll(120 * MS)), ["b"]);
    }

    #[test]
    fn the_loop_can_go_to_a_thread() {
        fn sent<T: Send>() {}
        sent::<Samplers>();
    }
}
