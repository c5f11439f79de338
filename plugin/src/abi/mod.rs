//! NCCL's profiler interface, v1 to v7: the structs to the byte, and what each of them says as an event.
//!
//! Every version implements [`Abi`]. Sizes and offsets are held by `tests/layout.rs` against published numbers; no vendor
//! header is copied.

mod arms;
pub mod v1;
pub mod v2;
pub mod v3;
pub mod v4;
pub mod v5;
pub mod v6;
pub mod v7;

pub use arms::{CollApi, CollApiTagged, GroupApi, KernelCh, KernelChBare, P2pApi, P2pApiTagged, ProxyOp};

use crate::bare::Here;
use crate::event::{Event, StateArg};
use core::ffi::c_int;

/// One version of the ABI.
pub trait Abi {
    /// Its number.
    const VERSION: u32;
    /// The activation mask asked for.
    const MASK: c_int;
    /// Its event descriptor.
    type Descriptor;
    /// Its state argument.
    type StateArgs;
    /// Hands on the descriptor as one event, as NCCL of this version (0 unknown) fills it. What follows is compiled
    /// for each type of event by itself: an event is large, and is never copied.
    fn tell<T: Taker>(descriptor: &Self::Descriptor, nccl: u32, taker: T) -> T::Out;
    /// The type of the event, and whether it has no parent.
    fn kind(descriptor: &Self::Descriptor) -> (u64, bool);
    /// Records a bare collective's call; false for any other, which has to go through [`Abi::tell`].
    #[inline(always)]
    fn bare_call(_descriptor: &Self::Descriptor, _here: &Here) -> bool {
        false
    }
    /// The same for its issue.
    #[inline(always)]
    fn bare_issue(_descriptor: &Self::Descriptor, _here: &Here) -> bool {
        false
    }
    /// The same for its group.
    #[inline(always)]
    fn bare_group(_descriptor: &Self::Descriptor, _here: &Here) -> bool {
        false
    }
    /// The same for a group that is not a bare collective's.
    #[inline(always)]
    fn group_in_lines(_descriptor: &Self::Descriptor, _here: &Here) -> bool {
        false
    }
    /// Records a collective's call in a group; false where it has to go through [`Abi::tell`].
    #[inline(always)]
    fn call_in_group(_descriptor: &Self::Descriptor, _here: &Here) -> bool {
        false
    }
    /// The same for its issue.
    #[inline(always)]
    fn issue_in_group(_descriptor: &Self::Descriptor, _here: &Here) -> bool {
        false
    }
    /// Records the call of a send or receive; false where it has to go through [`Abi::tell`].
    #[inline(always)]
    fn pair_call(_descriptor: &Self::Descriptor, _here: &Here) -> bool {
        false
    }
    /// The same for its issue.
    #[inline(always)]
    fn pair_issue(_descriptor: &Self::Descriptor, _here: &Here) -> bool {
        false
    }
    /// The state argument as one value.
    fn state(args: &Self::StateArgs) -> StateArg;
}

/// Takes an event.
pub trait Taker {
    /// The result.
    type Out;
    /// Takes it. Implementations are to be inlined: see [`Abi::tell`].
    fn take(self, event: &Event) -> Self::Out;
}
