//! Profiler ABI v7 (NCCL 2.31 and later).

#![expect(unsafe_code, reason = "a C union is read by the arm that its type names")]

use super::arms::{self, CollApiTagged, GroupApi, KernelCh, P2pApiTagged, ProxyOp, StateArgs};
use super::{v5, v6};
use crate::event::{Body, Coll as CollEvent, P2p as P2pEvent};
use crate::runtime::names;
use core::ffi::{c_char, c_int, c_void};

/// A collective: v5, the symmetric kernel and the tag.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs, reason = "NCCL's own names")]
pub struct Coll {
    pub base: v5::Coll,
    pub kernel_variant: *const c_char,
    pub is_sym_coll: u8,
    pub user_tag: u64,
}

/// A point-to-point operation: v5 and the tag.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs, reason = "NCCL's own names")]
pub struct P2p {
    pub base: v5::P2p,
    pub user_tag: u64,
}

/// A copy-engine collective: v6 and the tag.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs, reason = "NCCL's own names")]
pub struct CeColl {
    pub base: v6::CeColl,
    pub user_tag: u64,
}

/// A phase of a symmetric kernel.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs, reason = "NCCL's own names")]
pub struct KernelPhase {
    pub channel_id: u8,
    pub phase_id: u8,
    pub phase_name: *const c_char,
    pub p_timer: u64,
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
    pub coll_api: CollApiTagged,
    pub p2p_api: P2pApiTagged,
    pub kernel_launch: *mut c_void,
    pub ce_coll: CeColl,
    pub kernel_phase: KernelPhase,
}

arms::descriptor!(u64);

impl Coll {
    #[inline(always)]
    fn event(&self) -> CollEvent {
        let symmetric = self.is_sym_coll != 0;
        CollEvent {
            symmetric,
            variant: if symmetric { names::text(self.kernel_variant) } else { [0; 4] },
            user_tag: self.user_tag,
            ..self.base.event()
        }
    }
}

impl P2p {
    #[inline(always)]
    fn event(&self) -> P2pEvent {
        P2pEvent { user_tag: self.user_tag, ..self.base.event() }
    }
}

impl CeColl {
    #[inline(always)]
    fn event(&self) -> CollEvent {
        CollEvent { user_tag: self.user_tag, ..self.base.event() }
    }
}

/// True when the fields that v7 added can be believed. Forks of NCCL use the name v7 for descriptors that end
/// earlier: what lies behind is their stack.
#[inline]
fn official(nccl: u32) -> bool {
    nccl >= 23100
}

arms::abi!(V7 = 7, StateArgs, |a, nccl| {
    COLL => Body::Coll(if official(nccl) { a.coll.event() } else { a.coll.base.event() }),
    P2P => Body::P2p(if official(nccl) { a.p2p.event() } else { a.p2p.base.event() }),
    PROXY_OP => a.proxy_op.body(),
    PROXY_STEP => Body::ProxyStep { step: a.proxy_step },
    KERNEL_CH => a.kernel_ch.body(),
    GROUP_API => a.group_api.body(),
    KERNEL_LAUNCH => Body::KernelLaunch { stream: a.kernel_launch.addr() as u64 },
    COLL_API => a.coll_api.call.body(if official(nccl) { a.coll_api.user_tag } else { 0 }),
    P2P_API => a.p2p_api.call.body(if official(nccl) { a.p2p_api.user_tag } else { 0 }),
    CE_COLL => Body::Coll(if official(nccl) { a.ce_coll.event() } else { a.ce_coll.base.event() }),
}, bare {
    call: a.coll_api.call,
    tag: if official(nccl) { a.coll_api.user_tag } else { 0 },
    coll: a.coll.base.base,
    symmetric: official(nccl) && a.coll.is_sym_coll != 0,
    pair_call: a.p2p_api.call,
    pair_tag: if official(nccl) { a.p2p_api.user_tag } else { 0 },
    pair: a.p2p.base.base,
});
