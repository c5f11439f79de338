//! The arms of the descriptors that several versions share, and what they mean.

use super::Abi;
use crate::bare::BareCall;
use crate::event::{self, Api, Body, Coll, StateArg, bit};
use crate::runtime::names;
use core::ffi::{c_char, c_int, c_void};

/// Network transfer, v1 to v7.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs, reason = "NCCL's own names")]
pub struct ProxyOp {
    pub pid: i32,
    pub channel_id: u8,
    pub peer: c_int,
    pub n_steps: c_int,
    pub chunk_size: c_int,
    pub is_send: c_int,
}

/// Kernel on a channel, v3.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs, reason = "NCCL's own names")]
pub struct KernelChBare {
    pub channel_id: u8,
}

/// Kernel on a channel, v4 to v7.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs, reason = "NCCL's own names")]
pub struct KernelCh {
    pub channel_id: u8,
    pub p_timer: u64,
}

/// Group call, v5 to v7. The flag is a C bool, read as a byte: a byte of any value is then harmless.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs, reason = "NCCL's own names")]
pub struct GroupApi {
    pub graph_captured: u8,
    pub group_depth: c_int,
}

/// Collective call, v5 and v6, and the beginning of v7's.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs, reason = "NCCL's own names")]
pub struct CollApi {
    pub func: *const c_char,
    pub count: usize,
    pub datatype: *const c_char,
    pub root: c_int,
    pub stream: *mut c_void,
    pub graph_captured: u8,
}

/// Collective call, v7.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs, reason = "NCCL's own names")]
pub struct CollApiTagged {
    pub call: CollApi,
    pub user_tag: u64,
}

/// Point-to-point call, v5 and v6, and the beginning of v7's.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs, reason = "NCCL's own names")]
pub struct P2pApi {
    pub func: *const c_char,
    pub count: usize,
    pub datatype: *const c_char,
    pub stream: *mut c_void,
    pub graph_captured: u8,
}

/// Point-to-point call, v7.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs, reason = "NCCL's own names")]
pub struct P2pApiTagged {
    pub call: P2pApi,
    pub user_tag: u64,
}

/// State arguments, v1 to v3.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs, reason = "NCCL's own names")]
pub struct StateArgsLong {
    pub trans_size: usize,
    pub steps: c_int,
}

/// State arguments, v4 to v7: one word, whatever it is.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs, reason = "NCCL's own names")]
pub struct StateArgs {
    pub value: u64,
}

impl StateArgsLong {
    pub(super) fn arg(&self) -> StateArg {
        StateArg { value: self.trans_size as u64, steps: self.steps }
    }
}

impl StateArgs {
    pub(super) fn arg(&self) -> StateArg {
        StateArg { value: self.value, steps: 0 }
    }
}

impl ProxyOp {
    #[inline(always)]
    pub(super) fn body(&self) -> Body {
        Body::ProxyOp(event::ProxyOp {
            pid: self.pid,
            channel: self.channel_id,
            peer: self.peer,
            steps: self.n_steps,
            chunk: self.chunk_size,
            is_send: self.is_send != 0,
        })
    }
}

impl KernelCh {
    #[inline(always)]
    pub(super) fn body(&self) -> Body {
        Body::KernelCh { channel: self.channel_id, gpu_ns: self.p_timer }
    }
}

impl GroupApi {
    #[inline(always)]
    pub(super) fn body(&self) -> Body {
        Body::GroupApi { depth: self.group_depth, captured: self.graph_captured != 0 }
    }
}

impl CollApi {
    /// The part that the hot path needs.
    #[inline(always)]
    pub(super) fn bare(&self, user_tag: u64) -> BareCall {
        BareCall {
            func: self.func,
            dtype: self.datatype,
            count: self.count as u64,
            root: self.root,
            stream: self.stream.addr() as u64,
            captured: self.graph_captured != 0,
            user_tag,
        }
    }

    #[inline(always)]
    pub(super) fn body(&self, user_tag: u64) -> Body {
        Body::Api(Api {
            collective: true,
            func: names::func(self.func),
            dtype: names::dtype(self.datatype),
            count: self.count as u64,
            root: self.root,
            stream: self.stream.addr() as u64,
            captured: self.graph_captured != 0,
            user_tag,
        })
    }
}

impl P2pApi {
    /// The part that the hot path needs. The peer comes with the issue.
    #[inline(always)]
    pub(super) fn bare(&self, user_tag: u64) -> BareCall {
        BareCall {
            func: self.func,
            dtype: self.datatype,
            count: self.count as u64,
            root: -1,
            stream: self.stream.addr() as u64,
            captured: self.graph_captured != 0,
            user_tag,
        }
    }

    #[inline(always)]
    pub(super) fn body(&self, user_tag: u64) -> Body {
        Body::Api(Api {
            collective: false,
            func: names::func(self.func),
            dtype: names::dtype(self.datatype),
            count: self.count as u64,
            root: -1,
            stream: self.stream.addr() as u64,
            captured: self.graph_captured != 0,
            user_tag,
        })
    }
}

/// The event descriptor over a version's arms; the width of its type is all that ever changed.
macro_rules! descriptor {
    ($kind:ty) => {
        /// The event descriptor.
        #[repr(C)]
        #[derive(Debug, Clone, Copy)]
        #[allow(missing_docs, reason = "NCCL's own names")]
        pub struct Descriptor {
            pub kind: $kind,
            pub parent: *mut core::ffi::c_void,
            pub rank: core::ffi::c_int,
            pub arms: Arms,
        }

        impl core::fmt::Debug for Arms {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                f.write_str("Arms")
            }
        }
    };
}
pub(super) use descriptor;

/// A collective's event from the fields that its struct has in every version that names things by strings.
macro_rules! coll_event {
    ($coll:expr, comm: $comm:expr, channels: $channels:expr) => {{
        let c = $coll;
        $crate::event::Coll {
            comm: $comm,
            seq: c.seq_number,
            func: $crate::runtime::names::func(c.func),
            dtype: $crate::runtime::names::dtype(c.datatype),
            algo: $crate::runtime::names::algo(c.algo),
            proto: $crate::runtime::names::proto(c.proto),
            count: c.count as u64,
            root: c.root,
            channels: $channels,
            warps: c.n_warps,
            in_place: core::ptr::eq(c.send_buff, c.recv_buff),
            ..$crate::abi::arms::NO_COLL
        }
    }};
}
pub(super) use coll_event;

/// The same for a point-to-point operation.
macro_rules! p2p_event {
    ($p2p:expr, comm: $comm:expr, channels: $channels:expr) => {{
        let p = $p2p;
        $crate::event::P2p {
            comm: $comm,
            func: $crate::runtime::names::func(p.func),
            dtype: $crate::runtime::names::dtype(p.datatype),
            count: p.count as u64,
            peer: p.peer,
            channels: $channels,
            plan: 0,
            user_tag: 0,
        }
    }};
}
pub(super) use p2p_event;

/// One version: its number, its state arguments, and what each of its types says, given the arms.
macro_rules! abi {
    (
        $name:ident = $version:literal, $state:ty, |$arms:ident, $nccl:ident| { $($bit:ident => $body:expr),+ $(,)? }
        $(, bare {
            call: $call:expr, tag: $tag:expr, coll: $coll:expr, symmetric: $symmetric:expr,
            pair_call: $pair_call:expr, pair_tag: $pair_tag:expr, pair: $pair:expr $(,)?
        })?
    ) => {
        #[doc = concat!("ABI v", stringify!($version), ".")]
        #[derive(Debug)]
        pub struct $name;

        impl $crate::abi::Abi for $name {
            const VERSION: u32 = $version;
            const MASK: core::ffi::c_int = $crate::abi::arms::mask::<$name>();
            type Descriptor = Descriptor;
            type StateArgs = $state;

            #[inline(always)]
            fn kind(d: &Descriptor) -> (u64, bool) {
                (u64::from(d.kind), d.parent.is_null())
            }

            #[inline(always)]
            fn tell<T: $crate::abi::Taker>(d: &Descriptor, $nccl: u32, taker: T) -> T::Out {
                let $arms = &d.arms;
                let bit = $crate::abi::arms::bit_of(u64::from(d.kind));
                let (parent, rank) = (d.parent.addr() as u64, d.rank);
                match bit {
                    $crate::event::bit::GROUP => {
                        let body = $crate::event::Body::Group;
                        taker.take(&$crate::event::Event { bit, parent, rank, body })
                    }
                    $($crate::event::bit::$bit => {
                        // SAFETY: NCCL set the type, so this arm is the one it filled; its fields are numbers
                        // and pointers, for which any bytes are valid.
                        let body = unsafe { $body };
                        taker.take(&$crate::event::Event { bit, parent, rank, body })
                    })+
                    _ => {
                        let body = $crate::event::Body::Other;
                        taker.take(&$crate::event::Event { bit, parent, rank, body })
                    }
                }
            }

            $(
                #[inline(always)]
                fn bare_call(d: &Descriptor, here: &$crate::bare::Here) -> bool {
                    let ($arms, $nccl) = (&d.arms, here.nccl());
                    // SAFETY: as in `tell`.
                    here.call(&unsafe { $call.bare($tag) })
                }

                #[inline(always)]
                fn bare_issue(d: &Descriptor, here: &$crate::bare::Here) -> bool {
                    let ($arms, $nccl) = (&d.arms, here.nccl());
                    // SAFETY: as in `tell`.
                    here.issue(&unsafe { $coll.bare($symmetric) })
                }

                #[inline(always)]
                fn group_in_lines(d: &Descriptor, here: &$crate::bare::Here) -> bool {
                    // SAFETY: as in `tell`.
                    let group = unsafe { d.arms.group_api };
                    here.begin_group(group.group_depth, group.graph_captured != 0)
                }

                #[inline(always)]
                fn call_in_group(d: &Descriptor, here: &$crate::bare::Here) -> bool {
                    let ($arms, $nccl) = (&d.arms, here.nccl());
                    // SAFETY: as in `tell`.
                    here.call_in_group(&unsafe { $call.bare($tag) })
                }

                #[inline(always)]
                fn issue_in_group(d: &Descriptor, here: &$crate::bare::Here) -> bool {
                    let ($arms, $nccl) = (&d.arms, here.nccl());
                    // SAFETY: as in `tell`.
                    here.issue_in_group(|| unsafe { $coll.bare($symmetric) })
                }

                #[inline(always)]
                fn pair_call(d: &Descriptor, here: &$crate::bare::Here) -> bool {
                    let ($arms, $nccl) = (&d.arms, here.nccl());
                    // SAFETY: as in `tell`.
                    here.pair_call(&unsafe { $pair_call.bare($pair_tag) })
                }

                #[inline(always)]
                fn pair_issue(d: &Descriptor, here: &$crate::bare::Here) -> bool {
                    let $arms = &d.arms;
                    // SAFETY: as in `tell`.
                    here.pair_issue(|| unsafe { $pair.bare() })
                }

                #[inline(always)]
                fn bare_group(d: &Descriptor, here: &$crate::bare::Here) -> bool {
                    // SAFETY: as in `tell`.
                    let group = unsafe { d.arms.group_api };
                    here.group(group.group_depth, group.graph_captured != 0)
                }
            )?

            #[inline]
            fn state(args: &$state) -> $crate::event::StateArg {
                args.arg()
            }
        }
    };
}
pub(super) use abi;

/// A collective in which nothing is known yet.
pub(super) const NO_COLL: Coll = Coll {
    comm: None,
    seq: 0,
    func: 0,
    dtype: 0,
    algo: 0,
    proto: 0,
    count: 0,
    root: 0,
    channels: 0,
    warps: 0,
    in_place: false,
    symmetric: false,
    copy_engine: false,
    plan: 0,
    user_tag: 0,
    variant: [0; 4],
    stream: 0,
};

/// The bit number of a type: NCCL's types have one bit each.
#[inline]
pub(super) fn bit_of(kind: u64) -> u32 {
    if kind.is_power_of_two() { kind.trailing_zeros() } else { bit::LAST + 1 }
}

/// The mask of a version: what this plugin records, as far as the version has it.
pub(super) const fn mask<A: Abi>() -> c_int {
    let mut bits = vec_bits(&[bit::GROUP, bit::COLL, bit::P2P, bit::PROXY_OP, bit::PROXY_STEP]);
    if A::VERSION >= 3 {
        bits |= vec_bits(&[bit::KERNEL_CH]);
    }
    if A::VERSION >= 5 {
        bits |= vec_bits(&[bit::GROUP_API, bit::COLL_API, bit::P2P_API, bit::KERNEL_LAUNCH]);
    }
    if A::VERSION >= 6 {
        bits |= vec_bits(&[bit::CE_COLL]);
    }
    bits
}

const fn vec_bits(bits: &[u32]) -> c_int {
    let mut mask = 0;
    let mut i = 0;
    while i < bits.len() {
        mask |= 1 << bits[i];
        i += 1;
    }
    mask
}
