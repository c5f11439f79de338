//! The NVLinks of a GPU: how many, their state, their other ends and their errors.
//!
//! On H200 the state of all 18 takes the driver 1.8 ms, whatever way it is asked for, and the errors of each 1 ms, so that
//! each has a period of its own.

use super::super::Batch;
use super::raw::{field_values, remote_kind};
use super::{is_refusal, told};
use crate::model::{LinkFact, Remote, pci_address};
use nvml_wrapper::Device;
use nvml_wrapper::enum_wrappers::nv_link::ErrorCounter;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper_sys::bindings::field_id::{
    NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS as RECOVERIES_FROM_5,
    NVML_FI_DEV_NVLINK_ERROR_DL_CRC as CRC, NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY as RECOVERIES,
    NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY as REPLAYS, NVML_FI_DEV_NVLINK_GET_SPEED as SPEED,
};

/// No GPU has more; the driver says earlier where they end.
const MOST: u32 = 64;
/// The fields that are asked of each link.
const ASKED: &[u32] = &[REPLAYS, RECOVERIES, CRC, SPEED, RECOVERIES_FROM_5];

/// How many links a GPU has, whether they are up or not: one after the other until the driver knows no more.
pub(super) fn count(device: &Device<'_>) -> u32 {
    let known = |l: &u32| match device.link_wrapper_for(*l).is_active() {
        Err(NvmlError::InvalidArg) => false,
        // Where the first one is not supported there are none.
        Err(e) if is_refusal(&e) => *l > 0,
        _ => true,
    };
    // Those at the end that the driver would rather not speak of are none.
    let numbers: Vec<u32> = (0..MOST).take_while(known).collect();
    let last = numbers.iter().rev().find(|l| device.link_wrapper_for(**l).is_active().is_ok());
    last.map_or(0, |l| l + 1)
}

/// The fields that are read of a GPU's links.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) states: bool,
    pub(super) counters: bool,
}

/// The links of one GPU, as far as they were read.
#[derive(Debug, Default)]
pub(super) struct Links {
    facts: Option<Vec<LinkFact>>,
}

impl Links {
    /// Reads what is wanted now; the rest is as it was read last.
    pub(super) fn look(&mut self, device: &Device<'_>, wanted: Wanted, batch: &mut Batch) -> Vec<LinkFact> {
        let facts = self.facts.get_or_insert_with(|| (0..count(device)).map(|l| first(device, l)).collect());
        if wanted.states {
            for f in facts.iter_mut() {
                f.up = told(device.link_wrapper_for(f.link).is_active(), batch);
            }
        }
        if wanted.counters && !facts.is_empty() {
            read_counters(device, facts, batch);
        }
        facts.clone()
    }
}

/// The facts that do not change.
fn first(device: &Device<'_>, number: u32) -> LinkFact {
    let link = device.link_wrapper_for(number);
    let address = link.remote_pci_info().ok().and_then(|p| pci_address(&p.bus_id));
    let kind = remote_kind(device, number).ok().flatten();
    LinkFact {
        link: number,
        version: link.version().ok(),
        remote: kind.map(|kind| Remote { kind: kind.to_owned(), address }),
        ..LinkFact::default()
    }
}

fn read_counters(device: &Device<'_>, facts: &mut [LinkFact], batch: &mut Batch) {
    let asked: Vec<(u32, u32)> = facts.iter().flat_map(|f| ASKED.iter().map(|id| (*id, f.link))).collect();
    let values = told(field_values(device, &asked), batch).unwrap_or_default();
    let mut rows = values.chunks(ASKED.len());
    for f in facts {
        let row = rows.next().unwrap_or_default();
        let at = |i: usize| row.get(i).copied().flatten();
        // The call of older drivers; it answers for GPUs that these fields do not know.
        let old = |counter| device.link_wrapper_for(f.link).error_counter(counter).ok();
        f.replays = at(0).or_else(|| old(ErrorCounter::DlReplay));
        f.recoveries = at(1).or(at(4)).or_else(|| old(ErrorCounter::DlRecovery));
        f.crc_errors = at(2).or_else(|| old(ErrorCounter::DlCrcFlit));
        f.speed_mb_per_s = at(3).filter(|s| *s > 0);
    }
}
