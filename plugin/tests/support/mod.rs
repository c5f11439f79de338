//! The parts that the plugin's tests share: the numbers of NCCL's ABI as published, descriptors built from them byte by
//! byte (never from the plugin's own structs), the built library, and tests that run in a process of their own.

#![allow(dead_code, unreachable_pub, reason = "each test uses its part")]
#![allow(unsafe_code, reason = "plays NCCL's part of a C interface")]
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

pub mod abi;
pub mod bare;
pub mod child;
pub mod elf;
pub mod library;
pub mod locks;
pub mod seccomp;
pub mod segment;
#[path = "../../../tests/support/skip.rs"]
pub mod skip;
pub mod trace;
pub mod tuner;

use abi::{COLL_DEFAULT, Coll, Descriptor, P2P_DEFAULT, P2p, ty};
use library::Plugin;

/// Every kind of callback that a version has and some it has not, with good, stale, foreign and NULL handles.
/// Ends with the finalize of the context. Allocates nothing itself.
pub fn every_callback(plugin: &Plugin, v: usize, context: u64) {
    let group = plugin.start(v, context, &abi::group_api(v, false, 1));
    plugin.record(v, group, 23, None);
    let call = plugin.start(v, context, &abi::coll_api(v, group, abi::func::ALL_REDUCE, 64, false));
    plugin.stop(v, call);
    let send = plugin.start(v, context, &abi::p2p_api(v, group, abi::func::SEND, 64));
    plugin.stop(v, send);
    plugin.record(v, group, 24, None);
    let launch = plugin.start(v, context, &abi::kernel_launch(v, group));
    if launch != 0 {
        plugin.stop(v, launch);
    }
    let plan = plugin.start(v, context, &abi::group(v));
    let coll = plugin.start(v, context, &Coll { parent: call, plan, ..COLL_DEFAULT }.at(v));
    let p2p = plugin.start(v, context, &P2p { parent: send, plan, ..P2P_DEFAULT }.at(v));
    plugin.stop(v, coll);
    plugin.stop(v, p2p);
    plugin.stop(v, plan);
    plugin.stop(v, group);
    for channel in 0..2 {
        let kernel = plugin.start(v, context, &abi::kernel_ch(v, coll, channel, 1000));
        plugin.record(v, kernel, 22, Some((2000, 0)));
        plugin.stop(v, kernel);
    }
    let pid = plugin.pid;
    for (is_send, parent) in [(true, coll), (false, p2p), (true, 0x7777_1234_5678_9abc)] {
        let op = plugin.start(v, context, &abi::proxy_op(v, parent, pid, 1, 4, 4096, is_send));
        for state in [0, 1, 2, 3, 4, 5, 6, 7, 19, 23, 1000, -1] {
            plugin.record(v, op, state, Some((4096, 1)));
            plugin.record(v, op, state, None);
        }
        for n in 0..9 {
            let step = plugin.start(v, context, &abi::proxy_step(v, op, n));
            for state in [8, 20, 9, 10, 11, 12, 77] {
                plugin.record(v, step, state, Some((512, 0)));
            }
            plugin.stop(v, step);
            plugin.stop(v, step);
        }
        plugin.stop(v, op);
    }
    let copy = plugin.start(v, context, &abi::ce_coll(v, call, abi::func::ALL_GATHER, 64));
    plugin.stop(v, copy);
    for kind in [
        ty::PROXY_CTRL,
        ty::NET_PLUGIN,
        ty::CE_SYNC,
        ty::CE_BATCH,
        ty::KERNEL_PHASE,
        1 << 16,
        1 << 40,
        0,
        3,
        !0,
    ] {
        let other = plugin.start(v, context, &Descriptor::new(v, kind, coll, 0));
        plugin.record(v, other, 13, Some((1, 1)));
        plugin.stop(v, other);
    }
    for handle in [0, 1, context, !0, 0x7777_1234_5678_9abc, call ^ (1 << 47), coll + 1000] {
        plugin.record(v, handle, 22, Some((1, 1)));
        plugin.stop(v, handle);
        plugin.start(v, handle, &Coll { parent: handle, plan: handle, ..COLL_DEFAULT }.at(v));
        plugin.start(v, context, &abi::kernel_ch(v, handle, 0, 0));
        plugin.start(v, context, &abi::proxy_step(v, handle, 0));
    }
    plugin.finalize(v, context);
    plugin.finalize(v, context);
    plugin.finalize(v, 0);
}
