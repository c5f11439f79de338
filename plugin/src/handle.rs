//! The numbers given to NCCL in place of pointers.
//!
//! `nonce (16 bits) | kind (4) | value (44)`. The nonce is the process's own, random and never 0, so that a
//! handle of another process (PXN) or of nobody is told apart without following it; the value is a ticket
//! of the segment, so that a handle whose record is gone is told apart by comparing.

use core::ffi::c_void;
use ringwatch_wire::codes::Loss;

/// The kind of thing that a handle names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// A communicator: NCCL's context.
    Comm = 1,
    /// An outermost group.
    Group = 2,
    /// An operation as its API call knows it.
    Called = 3,
    /// An operation that was issued.
    Issued = 4,
    /// A plan (NCCL's Group event).
    Plan = 5,
    /// A kernel launch of a group.
    Launch = 6,
    /// A kernel on a channel.
    Channel = 7,
    /// A network transfer.
    Transfer = 8,
    /// A step of a network transfer; the value is the transfer's ticket and, in the low three bits, the step.
    Step = 9,
    /// An operation as the API call knows it that a graph captures. Told by the handle, since the call's
    /// record is gone long before the last replay names it.
    Captured = 10,
    /// An event that another plugin knows as well: the value names the pair of handles, see `chain`. Never
    /// unpacked, so that whoever has no other plugin pays nothing for it.
    Chained = 11,
}

impl Kind {
    /// The bits above the value of a handle of this kind, of the process with this nonce.
    #[inline]
    pub const fn prefix(self, nonce: u16) -> u32 {
        (nonce as u32) << 4 | self as u32
    }

    /// True for a number that is a handle of this kind and of the process with this nonce.
    #[inline]
    pub const fn is(self, raw: u64, nonce: u16) -> bool {
        raw >> VALUE_BITS == self.prefix(nonce) as u64
    }
}

/// True for a number whose stop carries nothing, whosever handle it is: an operation's stop follows its start at once
/// and says that NCCL has enqueued it, not that it is done; from ABI v4 on a kernel's stop follows the state that has
/// told it.
#[inline]
pub const fn has_no_end(raw: u64, abi: u32) -> bool {
    const KINDS: u64 = 1 << Kind::Called as u64
        | 1 << Kind::Issued as u64
        | 1 << Kind::Plan as u64
        | 1 << Kind::Captured as u64;
    let kinds = if abi >= 4 { KINDS | 1 << Kind::Channel as u64 } else { KINDS };
    kinds >> (raw >> VALUE_BITS & 0xf) & 1 == 1
}

/// A handle that carries this process's nonce.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Handle {
    /// The kind of thing that it names.
    pub kind: Kind,
    /// Its ticket.
    pub value: u64,
}

/// The bits of the value of a [`Kind::Group`] or [`Kind::Captured`] beside its ticket.
pub mod group {
    /// One bare call, which has no record of its own; the rest of the value is the communicator's ticket.
    pub const BARE: u64 = 1 << 43;
    /// Its calls are timed by kernel events.
    pub const KERNEL: u64 = 1 << 42;
    /// It is captured into a CUDA graph.
    pub const CAPTURED: u64 = 1 << 41;
    /// The ticket.
    pub const TICKET: u64 = CAPTURED - 1;
}

/// Bits of a handle's value.
pub const VALUE_BITS: u32 = 44;
/// The largest value.
pub const VALUE_MASK: u64 = (1 << VALUE_BITS) - 1;

impl Handle {
    /// The number for NCCL.
    #[inline]
    pub const fn pack(self, nonce: u16) -> u64 {
        (nonce as u64) << 48 | (self.kind as u64) << VALUE_BITS | (self.value & VALUE_MASK)
    }

    /// Reads a number that came back from NCCL.
    ///
    /// # Errors
    /// [`Loss::Null`] for 0, [`Loss::Foreign`] for anything this process did not make, and for [`Kind::Chained`].
    #[inline]
    pub const fn unpack(raw: u64, nonce: u16) -> Result<Handle, Loss> {
        if raw == 0 {
            return Err(Loss::Null);
        }
        if (raw >> 48) as u16 != nonce {
            return Err(Loss::Foreign);
        }
        let kind = match raw >> VALUE_BITS & 0xf {
            1 => Kind::Comm,
            2 => Kind::Group,
            3 => Kind::Called,
            4 => Kind::Issued,
            5 => Kind::Plan,
            6 => Kind::Launch,
            7 => Kind::Channel,
            8 => Kind::Transfer,
            9 => Kind::Step,
            10 => Kind::Captured,
            _ => return Err(Loss::Foreign),
        };
        Ok(Handle { kind, value: raw & VALUE_MASK })
    }
}

/// A number as the pointer that NCCL carries about. It is never followed.
#[inline]
pub fn to_pointer(raw: u64) -> *mut c_void {
    core::ptr::without_provenance_mut(raw as usize)
}

/// The number in a pointer that NCCL gave back.
#[inline]
pub fn to_number(pointer: *const c_void) -> u64 {
    pointer.addr() as u64
}

/// Contexts without a slot count down from the largest value.
const SPARE_CONTEXTS: u64 = 1 << 20;

/// The value of a context without a slot.
pub(crate) fn spare_context(n: u64) -> u64 {
    VALUE_MASK - n % SPARE_CONTEXTS
}

/// The number of a context without a slot; `None` for a communicator's ticket.
pub(crate) fn spare_number(value: u64) -> Option<u64> {
    let n = VALUE_MASK.wrapping_sub(value);
    if n < SPARE_CONTEXTS { Some(n) } else { None }
}

/// The ticket of a handle of this kind and of the process with this nonce.
///
/// # Errors
/// Why it is none.
#[inline]
pub(crate) fn ticket_of(raw: u64, kind: Kind, nonce: u16) -> Result<u64, Loss> {
    if kind.is(raw, nonce) {
        return Ok(raw & VALUE_MASK);
    }
    Handle::unpack(raw, nonce)?;
    Err(Loss::BadParent)
}
