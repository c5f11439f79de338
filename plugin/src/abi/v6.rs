//! Profiler ABI v6 (NCCL 2.29 and 2.30).

#![expect(unsafe_code, reason = "a C union is read by the arm that its type names")]

use super::arms::{self, CollApi, GroupApi, KernelCh, P2pApi, ProxyOp, StateArgs};
use super::v5;
use crate::event::{Body, Coll as CollEvent};
use crate::runtime::names;
use core::ffi::{c_char, c_int, c_void};

/// A copy-engine collective.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs, reason = "NCCL's own names")]
pub struct CeColl {
    pub seq_number: u64,
    pub func: *const c_char,
    pub send_buff: *const c_void,
    pub recv_buff: *mut c_void,
    pub count: usize,
    pub root: c_int,
    pub datatype: *const c_char,
    pub sync_strategy: *const c_char,
    pub intra_batch_sync: u8,
    pub batch_size: u32,
    pub num_batches: u32,
    pub ce_seq_num: u32,
    pub stream: *mut c_void,
}

/// The arms, of which the type names one.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs, reason = "NCCL's own names")]
pub union Arms {
    pub coll: v5::Coll,
    pub p2p: v5::P2p,
    pub proxy_op: ProxyOp,
    pub proxy_step: c_int,
    pub kernel_ch: KernelCh,
    pub net_plugin: [u64; 2],
    pub group_api: GroupApi,
    pub coll_api: CollApi,
    pub p2p_api: P2pApi,
    pub kernel_launch: *mut c_void,
    pub ce_coll: CeColl,
}

arms::descriptor!(u64);

impl CeColl {
    /// The event as v6 and v7 describe it.
    #[inline(always)]
    pub(super) fn event(&self) -> CollEvent {
        CollEvent {
            seq: self.seq_number,
            func: names::func(self.func),
            dtype: names::dtype(self.datatype),
            count: self.count as u64,
            root: self.root,
            in_place: core::ptr::eq(self.send_buff, self.recv_buff),
            copy_engine: true,
            stream: self.stream.addr() as u64,
            ..arms::NO_COLL
        }
    }
}

arms::abi!(V6 = 6, StateArgs, |a, _nccl| {
    COLL => Body::Coll(a.coll.event()),
    P2P => Body::P2p(a.p2p.event()),
    PROXY_OP => a.proxy_op.body(),
    PROXY_STEP => Body::ProxyStep { step: a.proxy_step },
    KERNEL_CH => a.kernel_ch.body(),
    GROUP_API => a.group_api.body(),
    KERNEL_LAUNCH => Body::KernelLaunch { stream: a.kernel_launch.addr() as u64 },
    COLL_API => a.coll_api.body(0),
    P2P_API => a.p2p_api.body(0),
    CE_COLL => Body::Coll(a.ce_coll.event()),
}, bare {
    call: a.coll_api,
    tag: 0,
    coll: a.coll.base,
    symmetric: false,
    pair_call: a.p2p_api,
    pair_tag: 0,
    pair: a.p2p.base,
});
