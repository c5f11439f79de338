//! Bytes over NVLink and PCIe. Hopper and later have a performance monitor, which answers in 0.6 ms for all links and
//! PCIe together; elsewhere the links' counters are read, which takes 2.3 ms (both measured on H200).

use super::super::{Absent, Batch, Sampler};
use super::raw::{ALL_LINKS, GpmSample, field_values};
use super::{Driver, Gpu, Library};
use crate::ingest::now_ns;
use crate::model::{Fact, Moved, Traffic};
use nvml_wrapper::Device;
use nvml_wrapper_sys::bindings::field_id::{
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX as RX, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX as TX,
};
use std::sync::Arc;
use std::time::Duration;

/// Metrics of the performance monitor: PCIe sent and received, all NVLinks received and sent, and the first link.
const PCIE_TX: u32 = 20;
const PCIE_RX: u32 = 21;
const NVLINK_RX: u32 = 60;
const NVLINK_TX: u32 = 61;
const LINK_0_RX: u32 = 62;
/// Links that have metrics of their own in this row of numbers.
const LINKS: u32 = 18;
/// Rates come in MiB a second.
const MIB: f64 = (1u64 << 20) as f64;
/// Counters come in KiB.
const KIB: f64 = 1024.0;
/// Between two readings of the counters of each link, in ns: they take as long again for every link.
const LINKS_EVERY_NS: u64 = 10_000_000_000;
/// Failures in a row after which a GPU's way of telling is looked for anew.
const PATIENCE: u32 = 10;

/// How a GPU tells what went over its links.
enum Way {
    Unknown,
    Monitor { before: GpmSample, links: u32 },
    Counters { before: Counted, each: Option<Each>, links: u32 },
    Neither,
}

/// The sums of the counters of all links.
#[derive(Debug, Clone, Copy)]
struct Counted {
    at_ns: u64,
    tx_kib: u64,
    rx_kib: u64,
}

/// The counters of each link.
#[derive(Debug)]
struct Each {
    at_ns: u64,
    links: Vec<(u32, u64, u64)>,
}

/// The sampler.
pub(super) struct Sampled {
    driver: Arc<Driver>,
    period: Duration,
    library: Option<Arc<Library>>,
    ways: Vec<(Way, u32)>,
}

impl Sampled {
    pub(super) fn new(driver: Arc<Driver>, period: Duration) -> Self {
        Sampled { driver, period, library: None, ways: Vec::new() }
    }
}

fn counted(device: &Device<'_>) -> Option<Counted> {
    let before_ns = now_ns();
    let values = field_values(device, &[(TX, ALL_LINKS), (RX, ALL_LINKS)]).ok()?;
    let at_ns = before_ns + now_ns().saturating_sub(before_ns) / 2;
    Some(Counted { at_ns, tx_kib: (*values.first()?)?, rx_kib: (*values.get(1)?)? })
}

fn each(device: &Device<'_>, links: u32) -> Option<Each> {
    let asked: Vec<(u32, u32)> = (0..links).flat_map(|l| [(TX, l), (RX, l)]).collect();
    let before_ns = now_ns();
    let values = field_values(device, &asked).ok()?;
    let at_ns = before_ns + now_ns().saturating_sub(before_ns) / 2;
    let link = |(l, pair): (u32, &[Option<u64>])| Some((l, (*pair.first()?)?, (*pair.get(1)?)?));
    Some(Each { at_ns, links: (0..links).zip(values.chunks(2)).filter_map(link).collect() })
}

/// The bytes between two counts of KiB; a counter that went back was reset, and says nothing.
fn moved(before: (u64, u64), now: (u64, u64)) -> Option<Moved> {
    let (tx, rx) = (now.0.checked_sub(before.0)?, now.1.checked_sub(before.1)?);
    Some(Moved { tx_bytes: tx as f64 * KIB, rx_bytes: rx as f64 * KIB })
}

impl Way {
    fn of(library: &Arc<Library>, device: &Device<'_>) -> Self {
        let links = super::links::count(device);
        if device.gpm_support().unwrap_or(false)
            && let Ok(before) = GpmSample::take(library, device)
        {
            return Way::Monitor { before, links: links.min(LINKS) };
        }
        match counted(device) {
            Some(before) if links > 0 => Way::Counters { before, each: each(device, links), links },
            _ => Way::Neither,
        }
    }

    /// The bytes since the poll before; `Err` where that cannot be said now.
    fn look(&mut self, library: &Arc<Library>, device: &Device<'_>) -> Result<Vec<(u64, Traffic)>, ()> {
        match self {
            Way::Monitor { before, links } => {
                let now = GpmSample::take(library, device).map_err(drop)?;
                let mut asked = vec![NVLINK_TX, NVLINK_RX, PCIE_TX, PCIE_RX];
                asked.extend((0..*links).flat_map(|l| [LINK_0_RX + 2 * l + 1, LINK_0_RX + 2 * l]));
                let rates = now.since(before, &asked).map_err(drop)?;
                let seconds = now.at_ns.saturating_sub(before.at_ns) as f64 / 1e9;
                let pair = |i: usize| {
                    let bytes = |i: usize| Some(rates.get(i).copied().flatten()? * MIB * seconds);
                    Some(Moved { tx_bytes: bytes(i)?, rx_bytes: bytes(i + 1)? })
                };
                let each = (0..*links).zip((4..).step_by(2));
                let traffic = Traffic {
                    gpu: String::new(),
                    from_ns: before.at_ns,
                    nvlink: if *links > 0 { pair(0) } else { None },
                    links: each.filter_map(|(l, i)| Some((l, pair(i)?))).collect(),
                    pcie: pair(2),
                };
                let at_ns = now.at_ns;
                *before = now;
                Ok(vec![(at_ns, traffic)])
            }
            Way::Counters { before, each: known, links } => {
                let now = counted(device).ok_or(())?;
                let nvlink = moved((before.tx_kib, before.rx_kib), (now.tx_kib, now.rx_kib));
                let all = Traffic { from_ns: before.at_ns, nvlink, ..Traffic::default() };
                *before = now;
                let mut out = vec![(now.at_ns, all)];
                let old = known.as_ref().is_some_and(|e| now.at_ns.saturating_sub(e.at_ns) >= LINKS_EVERY_NS);
                if old && let (Some(e), Some(then)) = (each(device, *links), known.as_mut()) {
                    let gained = |(l, tx, rx): &(u32, u64, u64)| {
                        let (_, tx_before, rx_before) = then.links.iter().find(|(o, ..)| o == l)?;
                        Some((*l, moved((*tx_before, *rx_before), (*tx, *rx))?))
                    };
                    let links = e.links.iter().filter_map(gained).collect();
                    out.push((e.at_ns, Traffic { from_ns: then.at_ns, links, ..Traffic::default() }));
                    *then = e;
                }
                Ok(out)
            }
            Way::Unknown | Way::Neither => Ok(Vec::new()),
        }
    }
}

impl Sampler for Sampled {
    fn name(&self) -> &'static str {
        "nvlink"
    }

    fn period(&self) -> Duration {
        self.period
    }

    fn sample(&mut self, _now_ns: u64, batch: &mut Batch) -> Result<(), Absent> {
        let library = self.driver.library()?;
        if !self.library.as_ref().is_some_and(|l| Arc::ptr_eq(l, &library)) {
            self.ways = library.gpus.iter().map(|_| (Way::Unknown, 0)).collect();
            self.library = Some(library.clone());
        }
        for ((gpu, device), (way, failures)) in library.devices(batch).into_iter().zip(&mut self.ways) {
            let Some(device) = device else { continue };
            if matches!(way, Way::Unknown) {
                *way = Way::of(&library, &device);
                *failures = 0;
                continue;
            }
            match way.look(&library, &device) {
                Ok(all) => {
                    *failures = 0;
                    all.into_iter().for_each(|(at_ns, t)| tell(gpu, at_ns, t, batch));
                }
                Err(()) => {
                    batch.failed();
                    *failures += 1;
                    if *failures >= PATIENCE {
                        *way = Way::Unknown;
                    }
                }
            }
        }
        if self.ways.iter().all(|(way, _)| matches!(way, Way::Neither)) {
            self.library = None;
            return Err(Absent("no GPU here tells what goes over its links: it has no NVLink, or this user may not ask (see NVreg_RestrictProfilingToAdminUsers)".to_owned()));
        }
        Ok(())
    }
}

fn tell(gpu: &Gpu, at_ns: u64, mut traffic: Traffic, batch: &mut Batch) {
    traffic.gpu.clone_from(&gpu.address);
    if traffic.nvlink.is_some() || traffic.pcie.is_some() || !traffic.links.is_empty() {
        batch.tell(at_ns, Fact::Traffic(traffic));
    }
}
