//! Profiler ABI v1 (NCCL 2.23).

#![expect(unsafe_code, reason = "a C union is read by the arm that its type names")]

use super::arms::{self, ProxyOp, StateArgsLong};
use crate::event::{Body, Coll as CollEvent, P2p as P2pEvent};
use crate::runtime::names;
use core::ffi::{c_char, c_int, c_void};
use ringwatch_wire::codes::{ALGOS, FUNCS, PROTOS, TYPES};

/// A collective.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs, reason = "NCCL's own names")]
pub struct Coll {
    pub name: *const c_char,
    pub comm_hash: u64,
    pub seq_number: u64,
    pub func: u8,
    pub send_buff: *const c_void,
    pub recv_buff: *mut c_void,
    pub count: usize,
    pub root: c_int,
    pub datatype: u8,
    pub op: u32,
    pub traffic_bytes: usize,
    pub n_max_channels: u8,
    pub n_warps: u8,
    pub algo: u8,
    pub proto: u8,
    pub is_collnet: c_int,
    pub is_nvls: c_int,
}

/// A point-to-point operation.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs, reason = "NCCL's own names")]
pub struct P2p {
    pub name: *const c_char,
    pub comm_hash: u64,
    pub func: u8,
    pub buff: *mut c_void,
    pub datatype: u8,
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
        CollEvent {
            comm: Some(self.comm_hash),
            seq: self.seq_number,
            func: names::numbered(self.func, FUNCS),
            dtype: names::numbered(self.datatype, TYPES),
            algo: names::numbered(self.algo, ALGOS),
            proto: names::numbered(self.proto, PROTOS),
            count: self.count as u64,
            root: self.root,
            warps: self.n_warps,
            in_place: core::ptr::eq(self.send_buff, self.recv_buff),
            ..arms::NO_COLL
        }
    }
}

impl P2p {
    #[inline(always)]
    fn event(&self) -> P2pEvent {
        P2pEvent {
            comm: Some(self.comm_hash),
            func: names::numbered(self.func, FUNCS),
            dtype: names::numbered(self.datatype, TYPES),
            count: self.count as u64,
            peer: self.peer,
            channels: 0,
            plan: 0,
            user_tag: 0,
        }
    }
}

arms::abi!(V1 = 1, StateArgsLong, |a, _nccl| {
    COLL => Body::Coll(a.coll.event()),
    P2P => Body::P2p(a.p2p.event()),
    PROXY_OP => a.proxy_op.body(),
    PROXY_STEP => Body::ProxyStep { step: a.proxy_step },
});
