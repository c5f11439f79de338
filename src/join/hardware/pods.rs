//! The owner of a GPU, where a kubelet gave it to a container.

use super::Hardware;
use crate::model::{GpuFact, Holder};

/// A kubelet's answer of longer ago reports nothing about now, in ns.
const FRESH_NS: u64 = 60_000_000_000;

impl Hardware {
    /// The container that a GPU was given to. Absent where no kubelet said so in the last minute, and where the GPU was
    /// given to several: who of them a process belongs to is not known by its GPU then.
    pub fn holder(&self, host: &str, gpu: &str, now_ns: u64) -> Option<&Holder> {
        let (at_ns, pods) = self.pods.get(host)?;
        if now_ns.saturating_sub(*at_ns) > FRESH_NS {
            return None;
        }
        let (_, gpu) = self.gpu(host, gpu)?;
        let mut all = pods.holders.iter().filter(|h| names(&h.device, gpu));
        let first = all.next()?;
        let same = |h: &Holder| {
            (&h.pod, &h.namespace, &h.container) == (&first.pod, &first.namespace, &first.container)
        };
        all.all(same).then_some(first)
    }
}

/// Returns whether a device plugin's name is a GPU's. Where it shares a GPU out it adds `::` and a number.
fn names(device: &str, gpu: &GpuFact) -> bool {
    let device = device.split_once("::").map_or(device, |(d, _)| d);
    gpu.uuid.as_deref() == Some(device) || gpu.index.is_some_and(|i| device.parse() == Ok(i))
}
