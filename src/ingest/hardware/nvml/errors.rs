//! Errors that the driver reports as they happen: Xids, and what newer drivers tell beside them.

use super::super::{Absent, Batch, Sampler};
use super::raw::{Events, handle};
use super::{Driver, Library};
use crate::ingest::now_ns;
use crate::model::{Alarm, AlarmKind, Fact, Xid};
use nvml_wrapper_sys::bindings as sys;
use std::sync::Arc;
use std::time::Duration;

/// Events taken at one look; a storm is read in turns.
const AT_ONCE: usize = 64;
/// Xids.
const XID: u64 = sys::nvmlEventTypeXidCriticalError as u64;
/// Other events that mean trouble. Single corrected errors, clocks and power states come too often to be told one by
/// one.
const ALARMS: &[(u64, AlarmKind)] = &[
    (sys::nvmlEventTypeDramRetirementEvent as u64, AlarmKind::MemoryRetired),
    (sys::nvmlEventTypeDramRetirementFailure as u64, AlarmKind::RetirementFailed),
    (sys::nvmlEventTypeNonFatalPoisonError as u64, AlarmKind::PoisonContained),
    (sys::nvmlEventTypeFatalPoisonError as u64, AlarmKind::PoisonFatal),
    (sys::nvmlEventTypeGpuUnavailableError as u64, AlarmKind::Unavailable),
    (sys::nvmlEventTypeGpuRecoveryAction as u64, AlarmKind::RecoveryNeeded),
];

/// A set of events, and whose they are.
struct Watched {
    library: Arc<Library>,
    events: Events,
    /// The driver's numbers of the GPUs, and their addresses.
    gpus: Vec<(usize, String)>,
}

/// The sampler.
pub(super) struct Sampled {
    driver: Arc<Driver>,
    period: Duration,
    watched: Option<Watched>,
}

impl Sampled {
    pub(super) fn new(driver: Arc<Driver>, period: Duration) -> Self {
        Sampled { driver, period, watched: None }
    }
}

fn watch(library: Arc<Library>, batch: &mut Batch) -> Result<Watched, Absent> {
    let refused = |e| Absent(format!("the driver gives no events: {e}"));
    let mut events = Events::new(&library).map_err(refused)?;
    let wanted = ALARMS.iter().fold(XID, |all, (bit, _)| all | bit);
    let mut gpus = Vec::new();
    let mut why = None;
    for (gpu, device) in library.devices(batch) {
        let Some(device) = device else { continue };
        match events.watch(&device, wanted) {
            Ok(()) => gpus.push((handle(&device), gpu.address.clone())),
            Err(e) => why = Some(e),
        }
    }
    match why {
        Some(e) if gpus.is_empty() => Err(refused(e)),
        _ => Ok(Watched { library, events, gpus }),
    }
}

impl Sampler for Sampled {
    fn name(&self) -> &'static str {
        "xid"
    }

    fn period(&self) -> Duration {
        self.period
    }

    fn sample(&mut self, _now_ns: u64, batch: &mut Batch) -> Result<(), Absent> {
        let library = self.driver.library()?;
        let watched = match self.watched.take() {
            Some(w) if Arc::ptr_eq(&w.library, &library) => self.watched.insert(w),
            _ => self.watched.insert(watch(library, batch)?),
        };
        for _ in 0..AT_ONCE {
            let (device, kind, data) = match watched.events.next() {
                Ok(Some(event)) => event,
                Ok(None) => break,
                Err(_) => {
                    batch.failed();
                    break;
                }
            };
            let Some((_, gpu)) = watched.gpus.iter().find(|(h, _)| *h == device) else {
                batch.failed();
                continue;
            };
            let gpu = gpu.clone();
            if kind & XID != 0 {
                batch.tell(now_ns(), Fact::Xid(Xid { gpu, code: data }));
            } else if let Some((_, kind)) = ALARMS.iter().find(|(bit, _)| kind & bit != 0) {
                batch.tell(now_ns(), Fact::Alarm(Alarm { gpu, kind: *kind }));
            }
        }
        Ok(())
    }
}
