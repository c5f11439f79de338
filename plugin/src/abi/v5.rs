//! Profiler ABI v5 (NCCL 2.28).

#![expect(unsafe_code, reason = "a C union is read by the arm that its type names")]

use super::arms::{self, CollApi, GroupApi, KernelCh, P2pApi, ProxyOp, StateArgs};
use super::v4;
use crate::event::{Body, Coll as CollEvent, P2p as P2pEvent};
use core::ffi::{c_int, c_void};

/// A collective: v4 and its plan.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs, reason = "NCCL's own names")]
pub struct Coll {
    pub base: v4::Coll,
    pub parent_group: *mut c_void,
}

/// A point-to-point operation: v4 and its plan.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs, reason = "NCCL's own names")]
pub struct P2p {
    pub base: v4::P2p,
    pub parent_group: *mut c_void,
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
    pub group_api: GroupApi,
    pub coll_api: CollApi,
    pub p2p_api: P2pApi,
    pub kernel_launch: *mut c_void,
}

arms::descriptor!(u64);

impl Coll {
    /// The event as v5 describes it. Every later version does the same.
    #[inline(always)]
    pub(super) fn event(&self) -> CollEvent {
        CollEvent { plan: self.parent_group.addr() as u64, ..self.base.event() }
    }
}

impl P2p {
    /// The event as v5 describes it. Every later version does the same.
    #[inline(always)]
    pub(super) fn event(&self) -> P2pEvent {
        P2pEvent { plan: self.parent_group.addr() as u64, ..self.base.event() }
    }
}

arms::abi!(V5 = 5, StateArgs, |a, _nccl| {
    COLL => Body::Coll(a.coll.event()),
    P2P => Body::P2p(a.p2p.event()),
    PROXY_OP => a.proxy_op.body(),
    PROXY_STEP => Body::ProxyStep { step: a.proxy_step },
    KERNEL_CH => a.kernel_ch.body(),
    GROUP_API => a.group_api.body(),
    KERNEL_LAUNCH => Body::KernelLaunch { stream: a.kernel_launch.addr() as u64 },
    COLL_API => a.coll_api.body(0),
    P2P_API => a.p2p_api.body(0),
}, bare {
    call: a.coll_api,
    tag: 0,
    coll: a.coll.base,
    symmetric: false,
    pair_call: a.p2p_api,
    pair_tag: 0,
    pair: a.p2p.base,
});
