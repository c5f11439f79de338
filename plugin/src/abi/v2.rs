//! Profiler ABI v2 (NCCL 2.24 and 2.25).

#![expect(unsafe_code, reason = "a C union is read by the arm that its type names")]

use super::Abi;
use super::arms::{self, ProxyOp, StateArgsLong};
use crate::event::{Body, Coll as CollEvent, Event, P2p as P2pEvent, StateArg, bit};
use crate::names;
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
    #[inline]
    fn body(&self) -> Body {
        Body::Coll(CollEvent {
            comm: Some(self.comm_hash),
            seq: self.seq_number,
            func: names::func(self.func),
            dtype: names::dtype(self.datatype),
            algo: names::algo(self.algo),
            proto: names::proto(self.proto),
            count: self.count as u64,
            root: self.root,
            warps: self.n_warps,
            in_place: core::ptr::eq(self.send_buff, self.recv_buff),
            ..arms::NO_COLL
        })
    }
}

impl P2p {
    #[inline]
    fn body(&self) -> Body {
        Body::P2p(P2pEvent {
            comm: Some(self.comm_hash),
            func: names::func(self.func),
            dtype: names::dtype(self.datatype),
            count: self.count as u64,
            peer: self.peer,
            channels: 0,
            plan: 0,
            user_tag: 0,
        })
    }
}

/// ABI v2.
#[derive(Debug)]
pub struct V2;

impl Abi for V2 {
    const VERSION: u32 = 2;
    const MASK: c_int = arms::mask::<V2>();
    type Descriptor = Descriptor;
    type StateArgs = StateArgsLong;

    #[inline]
    fn event(d: &Descriptor) -> Event {
        arms::event(u64::from(d.kind), d.parent, d.rank, |b| {
            let a = &d.arms;
            match b {
                bit::GROUP => Body::Group,
                // SAFETY: NCCL set the type, so this arm is the one it filled.
                bit::COLL => unsafe { a.coll.body() },
                // SAFETY: NCCL set the type, so this arm is the one it filled.
                bit::P2P => unsafe { a.p2p.body() },
                // SAFETY: NCCL set the type, so this arm is the one it filled.
                bit::PROXY_OP => unsafe { a.proxy_op.body() },
                // SAFETY: NCCL set the type, so this arm is the one it filled.
                bit::PROXY_STEP => unsafe { Body::ProxyStep { step: a.proxy_step } },
                _ => Body::Other,
            }
        })
    }

    #[inline]
    fn state(args: &StateArgsLong) -> StateArg {
        args.arg()
    }
}
