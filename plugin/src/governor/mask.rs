//! NCCL's mask: what both plugins ask for, and kernel events on or off.

#![expect(unsafe_code, reason = "writes NCCL's event mask through the pointer that init got")]

use super::{BASE, ENDED, Governor, KERNEL_CH, KERNEL_PHASE, Kernel, MASK_AT, ON, OWN, SWITCHED_NS};
use crate::event::bit;
use crate::gate::KERNEL;
use crate::runtime::clock::now_ns;
use core::ffi::c_int;

/// Joins the events that both plugins ask for. NCCL brings no phases of kernels without the kernels.
fn joined(own: c_int, theirs: c_int) -> c_int {
    own | theirs | if theirs & KERNEL_PHASE != 0 { KERNEL_CH } else { 0 }
}

fn write_mask(place: u64, mask: c_int) {
    let place = core::ptr::with_exposed_provenance_mut::<c_int>(place as usize);
    // SAFETY: NCCL's own static int, which lives as long as NCCL is loaded; other threads read it with atomic loads while
    // this one whole word is written.
    unsafe { core::ptr::write_volatile(place, mask) };
}

impl Governor {
    /// The events that a communicator's init is to ask for, of the events in `wanted`, and with what another plugin
    /// wants; `place` is NCCL's mask, 0 when it may not be written later. Where the other one wants kernel events
    /// they are on all the time, and what they cost is not in the budget.
    pub(crate) fn mask(&self, wanted: c_int, theirs: c_int, place: usize) -> c_int {
        let mut own = wanted & !KERNEL_CH;
        if !self.events {
            own &= !(1 << bit::KERNEL_LAUNCH);
        }
        let may = wanted & KERNEL_CH != 0
            && match self.kernel {
                Kernel::Refused | Kernel::Unwanted => false,
                Kernel::Always => true,
                // A communicator's first operation is timed: NCCL makes the connections for it then, and not later.
                Kernel::Switched | Kernel::Once => {
                    self.get(ENDED) == 0 && (self.kernel_on() || !self.has_transferred())
                }
            };
        let base = joined(own, theirs);
        self.set(OWN, own as u32 as u64);
        self.set(BASE, base as u32 as u64);
        self.set(MASK_AT, place as u64);
        self.set_on(may || base & KERNEL_CH != 0 && self.stamped);
        if may { base | KERNEL_CH } else { base }
    }

    /// The other plugin wants something else from now on: writes NCCL's mask.
    #[cold]
    pub(crate) fn follow(&self, theirs: c_int) {
        let was = self.forced();
        self.set(BASE, joined(self.get(OWN) as u32 as c_int, theirs) as u32 as u64);
        match (was, self.forced()) {
            // NCCL's stamps are wrong after kernel events were off for a while, but where they are switched.
            (false, true) if self.stamped && self.get(ENDED) == 0 => self.set_on(true),
            (true, false) => {
                let stays = match self.kernel {
                    Kernel::Always => true,
                    Kernel::Once => self.get(ENDED) == 0,
                    Kernel::Refused | Kernel::Unwanted | Kernel::Switched => false,
                };
                self.set_on(stays);
                if !stays && self.kernel != Kernel::Switched {
                    self.set(ENDED, 1);
                    self.set_schedule();
                }
            }
            _ => {}
        }
        self.write();
    }

    /// True while another plugin wants kernel events of everything.
    pub(super) fn forced(&self) -> bool {
        self.get(BASE) as u32 as c_int & KERNEL_CH != 0
    }

    /// Switches kernel events, unless another plugin wants them all the time.
    #[cold]
    pub(super) fn switch(&self, on: bool) {
        let place = self.get(MASK_AT);
        if place == 0 || self.kernel_on() == on || self.forced() || !self.may_switch() {
            return;
        }
        let now = now_ns();
        self.set(SWITCHED_NS, now);
        // The hot path is closed while the mask is written, so that whoever reads it meanwhile is seen.
        self.set(ON, u64::from(on));
        self.bare.set_blocked(KERNEL, true);
        // Nothing may come between this look, the store and the next look: a group's next call is not far.
        let stays = !self.is_amid_group(now, on) && {
            write_mask(place, self.mask_with(on));
            !self.came_too_late(on)
        };
        if !stays {
            write_mask(place, self.mask_with(!on));
        }
        self.set_on(on == stays);
        self.sync();
    }

    fn mask_with(&self, on: bool) -> c_int {
        self.get(BASE) as u32 as c_int | if on { KERNEL_CH } else { 0 }
    }

    /// Writes NCCL's mask where it is switched: an init writes it too, and two threads may switch at once.
    pub(crate) fn sync(&self) {
        if !self.forced() && matches!(self.kernel, Kernel::Switched | Kernel::Once) {
            self.write();
        }
    }

    /// Writes NCCL's mask as [`BASE`] and [`ON`] say, until all three agree.
    fn write(&self) {
        let (place, Some(on), Some(base)) = (self.get(MASK_AT), self.words.get(ON), self.words.get(BASE))
        else {
            return;
        };
        if place == 0 {
            return;
        }
        for _ in 0..8 {
            let (now, least) = (on.get(), base.get());
            write_mask(place, self.mask_with(now != 0));
            // Adding nothing orders the looks behind the store.
            if on.add(0) == now && base.add(0) == least {
                return;
            }
        }
    }

    /// Kernel events end where they are switched. Those that call say why it would do harm.
    #[cold]
    pub(crate) fn stop_switching(&self) {
        if self.kernel == Kernel::Switched && self.get(ENDED) == 0 {
            self.end();
        }
    }

    /// Kernel events end for the life of the process.
    #[cold]
    pub(super) fn end(&self) {
        self.set(ENDED, 1);
        self.set_schedule();
        self.switch(false);
    }

    /// True while kernel events are on that a capture had better not find.
    pub(crate) fn spoils_captures(&self) -> bool {
        self.kernel == Kernel::Switched && self.kernel_on()
    }

    /// A call was captured into a graph. Up to NCCL 2.30 kernel events may not be switched from then on.
    #[cold]
    pub(crate) fn captured(&self) {
        if self.kernel == Kernel::Switched && self.get(ENDED) == 0 {
            self.end();
        }
    }
}
