//! Profiler ABI v4 (NCCL 2.27).

#![expect(unsafe_code, reason = "a C union is read by the arm that its type names")]

use super::Abi;
use super::arms::{self, KernelCh, ProxyOp, StateArgs};
use crate::event::{Body, Coll as CollEvent, Event, P2p as P2pEvent, StateArg, bit};
use crate::names;
use core::ffi::{c_char, c_int, c_void};

/// A collective.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs, reason = "NCCL's own names")]
pub struct Coll {
    pub seq_number: u64,
    pub func: *const c_char,
    pub send_buff: *const c_void,
    pub recv_buff: *mut c_void,
    pub count: usize,
    pub root: c_int,
    pub datatype: *const c_char,
    pub n_channels: u8,
    pub n_warps: u8,
    pub algo: *const c_char,
    pub proto: *const c_char,
}

/// A point-to-point operation.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs, reason = "NCCL's own names")]
pub struct P2p {
    pub func: *const c_char,
    pub buff: *mut c_void,
    pub datatype: *const c_char,
    pub count: usize,
    pub peer: c_int,
    pub n_channels: u8,
}

/// The arms, of which the type names one.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs, reason = "NCCL's own names")]
pub union Arms {
    pub coll: Coll,
    pub p2p: P2p,
    pub proxy_op: ProxyOp,
    pub proxy_step: c_int,
    pub kernel_ch: KernelCh,
    pub net_plugin: [u64; 2],
}

impl core::fmt::Debug for Arms {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Arms")
    }
}

/// The event descriptor.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs, reason = "NCCL's own names")]
pub struct Descriptor {
    pub kind: u8,
    pub parent: *mut c_void,
    pub rank: c_int,
    pub arms: Arms,
}

impl Coll {
    /// What v4 says, and every later version with it.
    #[inline]
    pub(super) fn event(&self) -> CollEvent {
        CollEvent {
            seq: self.seq_number,
            func: names::func(self.func),
            dtype: names::dtype(self.datatype),
            algo: names::algo(self.algo),
            proto: names::proto(self.proto),
            count: self.count as u64,
            root: self.root,
            channels: self.n_channels,
            warps: self.n_warps,
            in_place: core::ptr::eq(self.send_buff, self.recv_buff),
            ..arms::NO_COLL
        }
    }
}

impl P2p {
    /// What v4 says, and every later version with it.
    #[inline]
    pub(super) fn event(&self) -> P2pEvent {
        P2pEvent {
            comm: None,
            func: names::func(self.func),
            dtype: names::dtype(self.datatype),
            count: self.count as u64,
            peer: self.peer,
            channels: self.n_channels,
            plan: 0,
            user_tag: 0,
        }
    }
}

/// ABI v4.
#[derive(Debug)]
pub struct V4;

impl Abi for V4 {
    const VERSION: u32 = 4;
    const MASK: c_int = arms::mask::<V4>();
    type Descriptor = Descriptor;
    type StateArgs = StateArgs;

    #[inline]
    fn event(d: &Descriptor) -> Event {
        arms::event(u64::from(d.kind), d.parent, d.rank, |b| {
            let a = &d.arms;
            match b {
                bit::GROUP => Body::Group,
                // SAFETY: NCCL set the type, so this arm is the one it filled.
                bit::COLL => unsafe { Body::Coll(a.coll.event()) },
                // SAFETY: NCCL set the type, so this arm is the one it filled.
                bit::P2P => unsafe { Body::P2p(a.p2p.event()) },
                // SAFETY: NCCL set the type, so this arm is the one it filled.
                bit::PROXY_OP => unsafe { a.proxy_op.body() },
                // SAFETY: NCCL set the type, so this arm is the one it filled.
                bit::PROXY_STEP => unsafe { Body::ProxyStep { step: a.proxy_step } },
                // SAFETY: NCCL set the type, so this arm is the one it filled.
                bit::KERNEL_CH => unsafe { a.kernel_ch.body() },
                _ => Body::Other,
            }
        })
    }

    #[inline]
    fn state(args: &StateArgs) -> StateArg {
        args.arg()
    }
}
