//! Profiler ABI v4 (NCCL 2.27).

#![expect(unsafe_code, reason = "a C union is read by the arm that its type names")]

use super::arms::{self, KernelCh, ProxyOp, StateArgs};
use crate::bare::{BareIssue, PairIssue};
use crate::event::{Body, Coll as CollEvent, P2p as P2pEvent};
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

arms::descriptor!(u8);

impl Coll {
    /// The part that the hot path needs, in later versions.
    #[inline(always)]
    pub(super) fn bare(&self, symmetric: bool) -> BareIssue {
        BareIssue {
            seq: self.seq_number,
            func: self.func,
            dtype: self.datatype,
            count: self.count as u64,
            root: self.root,
            algo: self.algo,
            proto: self.proto,
            channels: self.n_channels,
            warps: self.n_warps,
            in_place: core::ptr::eq(self.send_buff, self.recv_buff),
            symmetric,
        }
    }

    /// The event as v4 describes it. Every later version does the same.
    #[inline(always)]
    pub(super) fn event(&self) -> CollEvent {
        arms::coll_event!(self, comm: None, channels: self.n_channels)
    }
}

impl P2p {
    /// The part that the hot path needs, in later versions.
    #[inline(always)]
    pub(super) fn bare(&self) -> PairIssue {
        PairIssue {
            func: self.func,
            dtype: self.datatype,
            count: self.count as u64,
            peer: self.peer,
            channels: self.n_channels,
        }
    }

    /// The event as v4 describes it. Every later version does the same.
    #[inline(always)]
    pub(super) fn event(&self) -> P2pEvent {
        arms::p2p_event!(self, comm: None, channels: self.n_channels)
    }
}

arms::abi!(V4 = 4, StateArgs, |a, _nccl| {
    COLL => Body::Coll(a.coll.event()),
    P2P => Body::P2p(a.p2p.event()),
    PROXY_OP => a.proxy_op.body(),
    PROXY_STEP => Body::ProxyStep { step: a.proxy_step },
    KERNEL_CH => a.kernel_ch.body(),
});
