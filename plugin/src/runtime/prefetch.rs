//! Asks for cache lines before they are written.
//!
//! A slot was written a whole lap ago, and a reader may have its lines: the first store to them waits until they have come
//! back. Asked for when the group of a call begins, they are on their way when the call is recorded: 10 to 30 ns of 120 to
//! 150 beside a reader or a second thread. Asked for earlier, when the operation before has been issued, they may be
//! another thread's that is given this slot, and both cases took longer than without. Channels' slots are so small that
//! asking costs more than it brings.

#![expect(
    unsafe_code,
    reason = "names an instruction that the compiler does not know every processor to have"
)]

use ringwatch_wire::sync::Word;

/// 1: the processor knows the instruction.
static KNOWN: Word = Word::new(0);

/// Looks at the processor. Called at init.
pub(crate) fn look() {
    #[cfg(target_arch = "x86_64")]
    {
        use core::arch::x86_64::__cpuid;
        const LARGEST: u32 = 0x8000_0000;
        const FEATURES: u32 = 0x8000_0001;
        // PREFETCHW, bit 8 of ecx.
        let known = __cpuid(LARGEST).eax >= FEATURES && __cpuid(FEATURES).ecx >> 8 & 1 == 1;
        KNOWN.set(u64::from(known));
    }
    #[cfg(target_arch = "aarch64")]
    KNOWN.set(1);
}

/// True where the processor knows the instruction.
pub(crate) fn is_known() -> bool {
    KNOWN.get() != 0
}

/// Asks for the one cache line of a slot, where the processor knows the instruction.
#[inline(always)]
pub(crate) fn line_for_writing(slot: &[Word; 8]) {
    ask(core::ptr::from_ref(slot).cast());
}

/// Asks for a slot's lines, which are going to be written.
#[inline(always)]
pub(crate) fn for_writing<const W: usize>(slot: Option<&[Word; W]>) {
    const LINE: usize = 64;
    if let Some(slot) = slot
        && KNOWN.get() != 0
    {
        let at = core::ptr::from_ref(slot).cast::<u8>();
        for i in 0..(W * size_of::<Word>()).div_ceil(LINE) {
            ask(at.wrapping_add(i * LINE));
        }
    }
}

#[inline(always)]
fn ask(line: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: asks for a line; whatever the address, nothing else happens.
    unsafe {
        core::arch::asm!("prefetchw byte ptr [{}]", in(reg) line, options(nostack, preserves_flags, readonly));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        core::arch::asm!("prfm pstl1keep, [{}]", in(reg) line, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = line;
}
