//! Profiler ABI v2 (NCCL 2.24 and 2.25).

#![expect(unsafe_code, reason = "a C union is read by the arm that its type names")]

use super::arms::{self, ProxyOp, StateArgsLong};
use crate::event::{Body, Coll as CollEvent, P2p as P2pEvent};
use core::ffi::{c_char, c_int, c_void};

/// A collective.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs, reason = "NCCL's own names")]
pub struct Coll {
    pub name: *const c_char,
    pub comm_hash: u64,
    pub seq_number: u64,
    pub func: *const c_char,
    pub send_buff: *const c_void,
    pub recv_buff: *mut c_void,
    pub count: usize,
    pub root: c_int,
    pub datatype: *const c_char,
    pub traffic_bytes: usize,
    pub n_max_channels: u8,
    pub n_warps: u8,
    pub algo: *const c_char,
    pub proto: *const c_char,
}

/// A point-to-point operation.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs, reason = "NCCL's own names")]
pub struct P2p {
    pub name: *const c_char,
    pub comm_hash: u64,
    pub func: *const c_char,
    pub buff: *mut c_void,
    pub datatype: *const c_char,
    pub count: usize,
    pub peer: c_int,
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
}

arms::descriptor!(u8);

impl Coll {
    #[inline(always)]
    fn event(&self) -> CollEvent {
        // The number of channels is an upper bound here, which says nothing about when all have stopped.
        arms::coll_event!(self, comm: Some(self.comm_hash), channels: 0)
    }
}

impl P2p {
    #[inline(always)]
    fn event(&self) -> P2pEvent {
        arms::p2p_event!(self, comm: Some(self.comm_hash), channels: 0)
    }
}

arms::abi!(V2 = 2, StateArgsLong, |a, _nccl| {
    COLL => Body::Coll(a.coll.event()),
    P2P => Body::P2p(a.p2p.event()),
    PROXY_OP => a.proxy_op.body(),
    PROXY_STEP => Body::ProxyStep { step: a.proxy_step },
});
