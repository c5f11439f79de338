//! The calls of NVML that its wrapper lacks, or makes in a way that does not serve: field values with a scope, samples
//! of the performance monitor that outlive a borrow, events with all their bits, and replaced rows.
#![expect(unsafe_code, reason = "calls into the driver's library")]

use super::Library;
use nvml_wrapper::Device;
use nvml_wrapper::error::{NvmlError, nvml_sym, nvml_try};
use nvml_wrapper_sys::bindings as sys;
use std::sync::Arc;

/// A field's scope that stands for all links together.
pub(super) const ALL_LINKS: u32 = u32::MAX;

/// Asks for fields, each with its scope. Each answers for itself; answers are matched by place, since newer drivers
/// give some fields other numbers. (Those asked here have kept theirs.)
pub(super) fn field_values(device: &Device<'_>, asked: &[(u32, u32)]) -> Result<Vec<Option<u64>>, NvmlError> {
    let get = *nvml_sym(device.nvml().lib().nvmlDeviceGetFieldValues.as_ref())?;
    // SAFETY: a struct of numbers and a union of numbers, for which zero is a value.
    let empty: sys::nvmlFieldValue_t = unsafe { std::mem::zeroed() };
    let mut values: Vec<sys::nvmlFieldValue_t> = asked
        .iter()
        .map(|(field, scope)| sys::nvmlFieldValue_t { fieldId: *field, scopeId: *scope, ..empty })
        .collect();
    let count = i32::try_from(values.len()).map_err(|_| NvmlError::InvalidArg)?;
    // SAFETY: the device is the library's own, and the array has as many elements as is said.
    nvml_try(unsafe { get(device.handle(), count, values.as_mut_ptr()) })?;
    Ok(values.iter().map(number).collect())
}

fn number(v: &sys::nvmlFieldValue_t) -> Option<u64> {
    if v.nvmlReturn != sys::nvmlReturn_enum_NVML_SUCCESS {
        return None;
    }
    // SAFETY: all members of the union are plain numbers, and the driver says which one it wrote.
    unsafe {
        match v.valueType {
            sys::nvmlValueType_enum_NVML_VALUE_TYPE_DOUBLE => {
                let n = v.value.dVal;
                (n.is_finite() && n >= 0.0).then_some(n as u64)
            }
            sys::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_INT => Some(u64::from(v.value.uiVal)),
            sys::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_LONG
            | sys::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_LONG_LONG => Some(v.value.ullVal),
            sys::nvmlValueType_enum_NVML_VALUE_TYPE_SIGNED_LONG_LONG => u64::try_from(v.value.sllVal).ok(),
            sys::nvmlValueType_enum_NVML_VALUE_TYPE_SIGNED_INT => u64::try_from(v.value.siVal).ok(),
            sys::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_SHORT => Some(u64::from(v.value.usVal)),
            _ => None,
        }
    }
}

/// Rows of memory replaced after corrected and uncorrected errors, whether some wait for a reset, and whether
/// replacing failed.
pub(super) fn remapped_rows(device: &Device<'_>) -> Result<(u32, u32, bool, bool), NvmlError> {
    let get = *nvml_sym(device.nvml().lib().nvmlDeviceGetRemappedRows.as_ref())?;
    let (mut corrected, mut uncorrected, mut pending, mut failed) = (0, 0, 0, 0);
    // SAFETY: four places for numbers, and a device of this library.
    nvml_try(unsafe { get(device.handle(), &mut corrected, &mut uncorrected, &mut pending, &mut failed) })?;
    Ok((corrected, uncorrected, pending != 0, failed != 0))
}

/// The kind of a link's other end. (The wrapper throws the answer away.)
pub(super) fn remote_kind(device: &Device<'_>, link: u32) -> Result<Option<&'static str>, NvmlError> {
    let get = *nvml_sym(device.nvml().lib().nvmlDeviceGetNvLinkRemoteDeviceType.as_ref())?;
    let mut kind = sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_UNKNOWN;
    // SAFETY: a place for a number, and a device of this library.
    nvml_try(unsafe { get(device.handle(), link, &mut kind) })?;
    Ok(match kind {
        sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_GPU => Some("gpu"),
        sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_IBMNPU => Some("cpu"),
        sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_SWITCH => Some("switch"),
        _ => None,
    })
}

/// The number by which the driver knows a device, to be compared.
pub(super) fn handle(device: &Device<'_>) -> usize {
    // SAFETY: it is not used as a pointer.
    unsafe { device.handle() as usize }
}

/// One sample of a GPU's performance monitor. Two of them make rates.
pub(super) struct GpmSample {
    library: Arc<Library>,
    raw: sys::nvmlGpmSample_t,
    /// The middle of the time in which it was taken, host monotonic ns.
    pub(super) at_ns: u64,
}

// SAFETY: a buffer of its own, which the driver does not tie to a thread.
unsafe impl Send for GpmSample {}

impl GpmSample {
    /// Takes one of a GPU.
    pub(super) fn take(library: &Arc<Library>, device: &Device<'_>) -> Result<Self, NvmlError> {
        let lib = device.nvml().lib();
        // What cannot be freed is not made.
        nvml_sym(lib.nvmlGpmSampleFree.as_ref())?;
        let alloc = *nvml_sym(lib.nvmlGpmSampleAlloc.as_ref())?;
        let get = *nvml_sym(lib.nvmlGpmSampleGet.as_ref())?;
        let mut raw: sys::nvmlGpmSample_t = std::ptr::null_mut();
        // SAFETY: a place for the buffer's address.
        nvml_try(unsafe { alloc(&mut raw) })?;
        let mut sample = GpmSample { library: library.clone(), raw, at_ns: 0 };
        let before_ns = crate::ingest::now_ns();
        // SAFETY: the buffer was allocated for this, and the device is the library's own.
        nvml_try(unsafe { get(device.handle(), sample.raw) })?;
        sample.at_ns = before_ns + crate::ingest::now_ns().saturating_sub(before_ns) / 2;
        Ok(sample)
    }

    /// Metrics of the time between an older sample and this one, in the order asked; each answers for itself.
    pub(super) fn since(&self, older: &GpmSample, asked: &[u32]) -> Result<Vec<Option<f64>>, NvmlError> {
        let get = *nvml_sym(self.library.nvml.lib().nvmlGpmMetricsGet.as_ref())?;
        // SAFETY: numbers and pointers, for which zero is a value.
        let mut request: Box<sys::nvmlGpmMetricsGet_t> = Box::new(unsafe { std::mem::zeroed() });
        request.version = sys::NVML_GPM_METRICS_GET_VERSION;
        request.numMetrics = u32::try_from(asked.len().min(request.metrics.len())).unwrap_or(0);
        request.sample1 = older.raw;
        request.sample2 = self.raw;
        for (metric, id) in request.metrics.iter_mut().zip(asked) {
            metric.metricId = *id;
        }
        // SAFETY: both samples are alive, and no more metrics are asked than there is room for.
        nvml_try(unsafe { get(&mut *request) })?;
        let value = |m: &sys::nvmlGpmMetric_t| {
            let good = m.nvmlReturn == sys::nvmlReturn_enum_NVML_SUCCESS;
            (good && m.value.is_finite() && m.value >= 0.0).then_some(m.value)
        };
        Ok(request.metrics.iter().take(asked.len()).map(value).collect())
    }
}

impl Drop for GpmSample {
    fn drop(&mut self) {
        if let Ok(free) = &self.library.nvml.lib().nvmlGpmSampleFree {
            // SAFETY: allocated by this library and freed once.
            unsafe { free(self.raw) };
        }
    }
}

/// An event: the device's number, its type's bit, and its data.
pub(super) type Event = (usize, u64, u64);

/// A set of events that the driver fills.
pub(super) struct Events {
    library: Arc<Library>,
    raw: sys::nvmlEventSet_t,
}

// SAFETY: the driver does not tie a set to a thread.
unsafe impl Send for Events {}

impl Events {
    pub(super) fn new(library: &Arc<Library>) -> Result<Self, NvmlError> {
        let lib = library.nvml.lib();
        // What cannot be freed is not made.
        nvml_sym(lib.nvmlEventSetFree.as_ref())?;
        nvml_sym(lib.nvmlEventSetWait_v2.as_ref())?;
        let create = *nvml_sym(lib.nvmlEventSetCreate.as_ref())?;
        let mut raw: sys::nvmlEventSet_t = std::ptr::null_mut();
        // SAFETY: a place for the set's address.
        nvml_try(unsafe { create(&mut raw) })?;
        Ok(Events { library: library.clone(), raw })
    }

    /// Adds those of the wanted events that a GPU can tell.
    pub(super) fn watch(&mut self, device: &Device<'_>, wanted: u64) -> Result<(), NvmlError> {
        let lib = device.nvml().lib();
        let supported = *nvml_sym(lib.nvmlDeviceGetSupportedEventTypes.as_ref())?;
        let register = *nvml_sym(lib.nvmlDeviceRegisterEvents.as_ref())?;
        let mut types = 0;
        // SAFETY: a place for a number, and a device of this library.
        nvml_try(unsafe { supported(device.handle(), &mut types) })?;
        if types & wanted == 0 {
            return Err(NvmlError::NotSupported);
        }
        // SAFETY: the set is alive.
        nvml_try(unsafe { register(device.handle(), types & wanted, self.raw) })
    }

    /// The next event, if one is there; it is not waited for.
    pub(super) fn next(&mut self) -> Result<Option<Event>, NvmlError> {
        let wait = *nvml_sym(self.library.nvml.lib().nvmlEventSetWait_v2.as_ref())?;
        // SAFETY: numbers and a pointer, for which zero is a value.
        let mut data: sys::nvmlEventData_t = unsafe { std::mem::zeroed() };
        // SAFETY: the set is alive, and there is a place for an event.
        match nvml_try(unsafe { wait(self.raw, &mut data, 0) }) {
            Ok(()) => Ok(Some((data.device as usize, data.eventType, data.eventData))),
            Err(NvmlError::Timeout) => Ok(None),
            Err(e) => Err(e),
        }
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        if let Ok(free) = &self.library.nvml.lib().nvmlEventSetFree {
            // SAFETY: created by this library and freed once.
            unsafe { free(self.raw) };
        }
    }
}
