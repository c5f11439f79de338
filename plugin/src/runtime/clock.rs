//! The host's monotonic clock, cheaper: the processor's time-stamp counter, tied to CLOCK_MONOTONIC anew every
//! few ten microseconds.
//!
//! A read through the vDSO costs 20 to 25 ns, twice an operation; the counter costs a third. It is used only where
//! the kernel itself keeps time by it. Between two ties the error is the rate's error, some 50 ppm, of 64 us: a
//! few ns.

#![expect(unsafe_code, reason = "reads the processor's counter")]

use crate::runtime::statics::STATICS;
use crate::runtime::sys;

/// How long the rate is measured, at the first init of a process.
const MEASURE_NS: u64 = 1_000_000;
const WINDOW_NS: u64 = 64_000;

#[inline]
fn scaled(ticks: u64, rate: u64) -> u64 {
    ((u128::from(ticks) * u128::from(rate)) >> 32) as u64
}

/// CLOCK_MONOTONIC in ns.
#[inline(always)]
pub(crate) fn now_ns() -> u64 {
    let ticks = counter();
    // A counter of another core that is a little behind counts as far ahead, and ties.
    if ticks.wrapping_sub(STATICS.tie.tied.get()) < STATICS.tie.window.get() {
        return STATICS.tie.offset.get().wrapping_add(scaled(ticks, STATICS.tie.rate.get()));
    }
    asked()
}

#[cold]
fn asked() -> u64 {
    let rate = STATICS.tie.rate.get();
    if rate == 0 { sys::clock_ns(sys::MONOTONIC) } else { tie(rate) }
}

fn tie(rate: u64) -> u64 {
    let (ticks, ns) = pair();
    // Two threads that tie at once store pairs of the same line; a mix of the two is one of them.
    STATICS.tie.offset.set(ns.wrapping_sub(scaled(ticks, rate)));
    STATICS.tie.tied.set(ticks);
    ns
}

/// The counter and the clock at one moment: of a few tries the one that took least.
fn pair() -> (u64, u64) {
    let mut best = (u64::MAX, 0, 0);
    for _ in 0..2 {
        let before = counter();
        let ns = sys::clock_ns(sys::MONOTONIC);
        let took = counter().wrapping_sub(before);
        if took < best.0 {
            best = (took, before.wrapping_add(took / 2), ns);
        }
    }
    (best.1, best.2)
}

/// Measures the counter's rate, for a millisecond, where the kernel keeps time by the counter. Called at init.
pub(crate) fn measure() {
    if STATICS.tie.rate.get() != 0 || !kernel_uses_counter() {
        return;
    }
    let (t0, n0) = pair();
    while sys::clock_ns(sys::MONOTONIC).wrapping_sub(n0) < MEASURE_NS {
        sys::nap();
    }
    let (t1, n1) = pair();
    let (ticks, ns) = (t1.wrapping_sub(t0), n1.wrapping_sub(n0));
    // `max` tells the compiler that nothing is divided by zero.
    let rate = ((u128::from(ns) << 32) / u128::from(ticks.max(1))) as u64;
    // From 0.2 to 10 GHz, or it is no such counter.
    if !((1 << 32) / 10..5 << 32).contains(&rate) {
        return;
    }
    tie(rate);
    STATICS.tie.rate.set(rate);
    STATICS.tie.window.set((u128::from(WINDOW_NS) << 32).checked_div(u128::from(rate)).unwrap_or(0) as u64);
}

fn kernel_uses_counter() -> bool {
    let mut name = [0u8; 8];
    let path = c"/sys/devices/system/clocksource/clocksource0/current_clocksource";
    let len = sys::open(path, 0).map_or(0, |f| sys::read(&f, &mut name));
    cfg!(target_arch = "x86_64") && name.get(..len) == Some(b"tsc\n")
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn counter() -> u64 {
    // SAFETY: reads a register that every process of a kernel which keeps time by it may read.
    unsafe { core::arch::x86_64::_rdtsc() }
}

#[cfg(not(target_arch = "x86_64"))]
#[inline]
fn counter() -> u64 {
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_monotonic_clock() {
        measure();
        eprintln!("the kernel's clock is the counter: {}", kernel_uses_counter());
        let mut worst = 0;
        for i in 0..20_000u64 {
            let before = sys::clock_ns(sys::MONOTONIC);
            let ours = now_ns();
            let after = sys::clock_ns(sys::MONOTONIC);
            worst = worst.max(before.saturating_sub(ours)).max(ours.saturating_sub(after));
            if i.is_multiple_of(1000) {
                std::thread::sleep(std::time::Duration::from_micros(300));
            }
        }
        // The rate is measured within a millisecond on a busy machine: a few hundred ppm of 64 us at worst.
        assert!(worst < 1_000, "{worst} ns beside the clock");
    }
}
