//! Every struct of every ABI version, to the byte, against the published numbers in `support/abi.rs`.

#![allow(unsafe_code, reason = "calls init as NCCL does")]

mod support;

use ringwatch_plugin::abi::{self, v1, v2, v3, v4, v5, v6, v7};
use ringwatch_wire::layout::Region;
use std::mem::{align_of, offset_of, size_of};
use support::abi::*;
use support::library::{CTable, Plugin};

/// Checks each named field of a struct, which stands in the union, against its table, and that no field of
/// the table is left out.
macro_rules! arm {
    ($table:ident, $version:literal, $descriptor:ty, $ty:ty, { $($field:ident: $($path:ident).+),+ $(,)? }) => {{
        let mut checked = 0;
        $(
            let want = $table.iter().find(|f| f.0 == stringify!($field)).and_then(|f| f.1[$version - 1]);
            let at = offset_of!($descriptor, arms) + offset_of!($ty, $($path).+);
            assert_eq!(Some(at), want, "v{} {} {}", $version, stringify!($table), stringify!($field));
            checked += 1;
        )+
        let all = $table.iter().filter(|f| f.1[$version - 1].is_some()).count();
        assert_eq!(checked, all, "v{} {}: fields left unchecked", $version, stringify!($table));
    }};
}

macro_rules! descriptor {
    ($version:literal, $module:ident, $kind:ty, $args:ty) => {{
        assert_eq!(size_of::<$module::Descriptor>(), DESCRIPTOR_SIZE[$version - 1], "v{} descriptor", $version);
        assert_eq!(align_of::<$module::Descriptor>(), 8);
        assert_eq!(size_of::<$kind>(), TYPE_SIZE[$version - 1]);
        let zeroed = std::mem::MaybeUninit::<$module::Descriptor>::zeroed();
        // SAFETY: zeros are valid for integers, pointers and unions of them.
        let d: $module::Descriptor = unsafe { zeroed.assume_init() };
        let _: $kind = d.kind;
        assert_eq!(offset_of!($module::Descriptor, kind), 0);
        assert_eq!(offset_of!($module::Descriptor, parent), PARENT);
        assert_eq!(offset_of!($module::Descriptor, rank), RANK);
        assert_eq!(offset_of!($module::Descriptor, arms), ARMS);
        assert_eq!(size_of::<$args>(), STATE_SIZE[$version - 1], "v{} state arguments", $version);
        arm!(PROXY_OP, $version, $module::Descriptor, abi::ProxyOp, {
            pid: pid, channel_id: channel_id, peer: peer, n_steps: n_steps, chunk_size: chunk_size, is_send: is_send,
        });
    }};
}

fn size<T>(table: [usize; 7], version: usize) {
    assert_eq!(size_of::<T>(), table[version - 1], "v{version} {}", std::any::type_name::<T>());
}

#[test]
fn descriptors_and_state_arguments() {
    type Args<A> = <A as abi::Abi>::StateArgs;
    descriptor!(1, v1, u8, Args<v1::V1>);
    descriptor!(2, v2, u8, Args<v2::V2>);
    descriptor!(3, v3, u8, Args<v3::V3>);
    descriptor!(4, v4, u8, Args<v4::V4>);
    descriptor!(5, v5, u64, Args<v5::V5>);
    descriptor!(6, v6, u64, Args<v6::V6>);
    descriptor!(7, v7, u64, Args<v7::V7>);
    assert_eq!(size_of::<abi::ProxyOp>(), PROXY_OP_SIZE);
}

#[test]
fn collectives() {
    size::<v1::Coll>(COLL_SIZE, 1);
    size::<v2::Coll>(COLL_SIZE, 2);
    size::<v3::Coll>(COLL_SIZE, 3);
    size::<v4::Coll>(COLL_SIZE, 4);
    size::<v5::Coll>(COLL_SIZE, 5);
    size::<v7::Coll>(COLL_SIZE, 7);
    arm!(COLL, 1, v1::Descriptor, v1::Coll, {
        name: name, comm_hash: comm_hash, seq_number: seq_number, func: func, send_buff: send_buff,
        recv_buff: recv_buff, count: count, root: root, datatype: datatype, op: op, traffic_bytes: traffic_bytes,
        n_max_channels: n_max_channels, n_warps: n_warps, algo: algo, proto: proto, is_collnet: is_collnet,
        is_nvls: is_nvls,
    });
    arm!(COLL, 2, v2::Descriptor, v2::Coll, {
        name: name, comm_hash: comm_hash, seq_number: seq_number, func: func, send_buff: send_buff,
        recv_buff: recv_buff, count: count, root: root, datatype: datatype, traffic_bytes: traffic_bytes,
        n_max_channels: n_max_channels, n_warps: n_warps, algo: algo, proto: proto,
    });
    arm!(COLL, 3, v3::Descriptor, v3::Coll, {
        name: name, comm_hash: comm_hash, seq_number: seq_number, func: func, send_buff: send_buff,
        recv_buff: recv_buff, count: count, root: root, datatype: datatype, n_max_channels: n_max_channels,
        n_warps: n_warps, algo: algo, proto: proto,
    });
    arm!(COLL, 4, v4::Descriptor, v4::Coll, {
        seq_number: seq_number, func: func, send_buff: send_buff, recv_buff: recv_buff, count: count, root: root,
        datatype: datatype, n_channels: n_channels, n_warps: n_warps, algo: algo, proto: proto,
    });
    macro_rules! from_v5 {
        ($version:literal, $module:ident) => {
            arm!(COLL, $version, $module::Descriptor, v5::Coll, {
                seq_number: base.seq_number, func: base.func, send_buff: base.send_buff, recv_buff: base.recv_buff,
                count: base.count, root: base.root, datatype: base.datatype, n_channels: base.n_channels,
                n_warps: base.n_warps, algo: base.algo, proto: base.proto, parent_group: parent_group,
            })
        };
    }
    from_v5!(5, v5);
    from_v5!(6, v6);
    arm!(COLL, 7, v7::Descriptor, v7::Coll, {
        seq_number: base.base.seq_number, func: base.base.func, send_buff: base.base.send_buff,
        recv_buff: base.base.recv_buff, count: base.base.count, root: base.base.root, datatype: base.base.datatype,
        n_channels: base.base.n_channels, n_warps: base.base.n_warps, algo: base.base.algo, proto: base.base.proto,
        parent_group: base.parent_group, kernel_variant: kernel_variant, is_sym_coll: is_sym_coll,
        user_tag: user_tag,
    });
}

#[test]
fn point_to_point() {
    size::<v1::P2p>(P2P_SIZE, 1);
    size::<v2::P2p>(P2P_SIZE, 2);
    size::<v3::P2p>(P2P_SIZE, 3);
    size::<v4::P2p>(P2P_SIZE, 4);
    size::<v5::P2p>(P2P_SIZE, 5);
    size::<v7::P2p>(P2P_SIZE, 7);
    macro_rules! to_v3 {
        ($version:literal, $module:ident) => {
            arm!(P2P, $version, $module::Descriptor, $module::P2p, {
                name: name, comm_hash: comm_hash, func: func, buff: buff, datatype: datatype, count: count,
                peer: peer,
            })
        };
    }
    to_v3!(1, v1);
    to_v3!(2, v2);
    to_v3!(3, v3);
    arm!(P2P, 4, v4::Descriptor, v4::P2p, {
        func: func, buff: buff, datatype: datatype, count: count, peer: peer, n_channels: n_channels,
    });
    macro_rules! from_v5 {
        ($version:literal, $module:ident) => {
            arm!(P2P, $version, $module::Descriptor, v5::P2p, {
                func: base.func, buff: base.buff, datatype: base.datatype, count: base.count, peer: base.peer,
                n_channels: base.n_channels, parent_group: parent_group,
            })
        };
    }
    from_v5!(5, v5);
    from_v5!(6, v6);
    arm!(P2P, 7, v7::Descriptor, v7::P2p, {
        func: base.base.func, buff: base.base.buff, datatype: base.base.datatype, count: base.base.count,
        peer: base.base.peer, n_channels: base.base.n_channels, parent_group: base.parent_group, user_tag: user_tag,
    });
}

#[test]
fn kernels_calls_and_copy_engine() {
    size::<abi::KernelChBare>(KERNEL_CH_SIZE, 3);
    size::<abi::KernelCh>(KERNEL_CH_SIZE, 4);
    arm!(KERNEL_CH, 3, v3::Descriptor, abi::KernelChBare, { channel_id: channel_id });
    macro_rules! kernel {
        ($version:literal, $module:ident) => {
            arm!(KERNEL_CH, $version, $module::Descriptor, abi::KernelCh, {
                channel_id: channel_id, p_timer: p_timer,
            })
        };
    }
    kernel!(4, v4);
    kernel!(5, v5);
    kernel!(6, v6);
    kernel!(7, v7);

    assert_eq!(size_of::<abi::GroupApi>(), GROUP_API_SIZE);
    size::<abi::CollApi>(COLL_API_SIZE, 5);
    size::<abi::CollApiTagged>(COLL_API_SIZE, 7);
    size::<abi::P2pApi>(P2P_API_SIZE, 5);
    size::<abi::P2pApiTagged>(P2P_API_SIZE, 7);
    macro_rules! calls {
        ($version:literal, $module:ident) => {{
            arm!(GROUP_API, $version, $module::Descriptor, abi::GroupApi, {
                graph_captured: graph_captured, group_depth: group_depth,
            });
            arm!(COLL_API, $version, $module::Descriptor, abi::CollApi, {
                func: func, count: count, datatype: datatype, root: root, stream: stream,
                graph_captured: graph_captured,
            });
            arm!(P2P_API, $version, $module::Descriptor, abi::P2pApi, {
                func: func, count: count, datatype: datatype, stream: stream, graph_captured: graph_captured,
            });
        }};
    }
    calls!(5, v5);
    calls!(6, v6);
    arm!(GROUP_API, 7, v7::Descriptor, abi::GroupApi, {
        graph_captured: graph_captured, group_depth: group_depth,
    });
    arm!(COLL_API, 7, v7::Descriptor, abi::CollApiTagged, {
        func: call.func, count: call.count, datatype: call.datatype, root: call.root, stream: call.stream,
        graph_captured: call.graph_captured, user_tag: user_tag,
    });
    arm!(P2P_API, 7, v7::Descriptor, abi::P2pApiTagged, {
        func: call.func, count: call.count, datatype: call.datatype, stream: call.stream,
        graph_captured: call.graph_captured, user_tag: user_tag,
    });

    size::<v6::CeColl>(CE_COLL_SIZE, 6);
    size::<v7::CeColl>(CE_COLL_SIZE, 7);
    arm!(CE_COLL, 6, v6::Descriptor, v6::CeColl, {
        seq_number: seq_number, func: func, send_buff: send_buff, recv_buff: recv_buff, count: count, root: root,
        datatype: datatype, sync_strategy: sync_strategy, intra_batch_sync: intra_batch_sync,
        batch_size: batch_size, num_batches: num_batches, ce_seq_num: ce_seq_num, stream: stream,
    });
    arm!(CE_COLL, 7, v7::Descriptor, v7::CeColl, {
        seq_number: base.seq_number, func: base.func, send_buff: base.send_buff, recv_buff: base.recv_buff,
        count: base.count, root: base.root, datatype: base.datatype, sync_strategy: base.sync_strategy,
        intra_batch_sync: base.intra_batch_sync, batch_size: base.batch_size, num_batches: base.num_batches,
        ce_seq_num: base.ce_seq_num, stream: base.stream, user_tag: user_tag,
    });
    assert_eq!(size_of::<v7::KernelPhase>(), KERNEL_PHASE_SIZE);
    arm!(KERNEL_PHASE, 7, v7::Descriptor, v7::KernelPhase, {
        channel_id: channel_id, phase_id: phase_id, phase_name: phase_name, p_timer: p_timer,
    });
}

#[test]
fn tables_have_six_slots_and_nothing_behind_them() {
    assert_eq!(offset_of!(CTable, spare), VTABLE_SIZE);
    assert_eq!(size_of_val(&ringwatch_plugin::callbacks::ncclProfiler_v1), VTABLE_SIZE + 64);
    assert_eq!(size_of_val(&ringwatch_plugin::callbacks::ncclProfiler_v7), VTABLE_SIZE + 64);
    let plugin = Plugin::built();
    for v in 1..=7 {
        let t = plugin.table(v);
        // SAFETY: the table's name is a static C string.
        assert_eq!(unsafe { std::ffi::CStr::from_ptr(t.name) }, c"Ringwatch");
        assert_eq!(t.spare, [0; 8], "v{v}");
    }
}

#[test]
fn masks_ask_for_what_each_version_has() {
    use abi::Abi;
    let masks =
        [v1::V1::MASK, v2::V2::MASK, v3::V3::MASK, v4::V4::MASK, v5::V5::MASK, v6::V6::MASK, v7::V7::MASK];
    assert_eq!(masks, [0x1f, 0x1f, 0x5f, 0x5f, 0xf5f, 0x1f5f, 0x1f5f]);
}

/// v4 takes name and hash behind the mask, v5 the hash before it: with the two confused, neither the hash
/// nor the mask would arrive.
#[test]
fn init_takes_its_arguments_in_each_versions_order() {
    let Some(ran) = support::child::run("init_takes_its_arguments_in_each_versions_order") else {
        let plugin = Plugin::built();
        for v in 1..=7 {
            let opened = plugin.init_with(v, 0xfeed_0000 + v as u64, c"my group", 16, 5, None);
            // A process uses one NCCL, and the first init's version says which: v1 has no kernel events.
            assert_eq!(opened.mask, [0x1f, 0x1f, 0x1f, 0x1f, 0x71f, 0x171f, 0x171f][v - 1], "v{v}");
        }
        return;
    };
    let recording = support::segment::only(&ran.succeeded().dir);
    let reader = recording.reader();
    let mut comms: Vec<_> = reader.comms().collect();
    comms.sort_by_key(|c| c.ticket);
    assert_eq!(reader.ring(Region::Comm).next(), 7);
    for (c, v) in comms.iter().zip(1u64..) {
        if v < 4 {
            assert_eq!((c.id, c.ranks, c.nodes), (None, None, None), "v{v} says nothing at init");
        } else {
            assert_eq!((c.id, c.ranks, c.nodes), (Some((0xfeed_0000 + v, 5)), Some(16), Some(1)), "v{v}");
            assert_eq!(String::from_utf8(c.name.bytes().collect()).ok().as_deref(), Some("my group"));
        }
    }
    assert_eq!(reader.abi(), Some(1), "the first init's version");
}

struct TheBody;

impl ringwatch_plugin::abi::Taker for TheBody {
    type Out = ringwatch_plugin::event::Body;

    fn take(self, event: &ringwatch_plugin::event::Event) -> Self::Out {
        event.body
    }
}

#[test]
fn what_v7_added_counts_only_for_an_nccl_that_has_it() {
    use ringwatch_plugin::abi::Abi;
    use ringwatch_plugin::event::Body;
    // SAFETY: numbers and pointers, of which zeroes are valid values.
    let mut d: v7::Descriptor = unsafe { std::mem::zeroed() };
    d.kind = 2;
    d.arms.coll = v7::Coll {
        // SAFETY: as above.
        base: unsafe { std::mem::zeroed() },
        // On a fork's shorter descriptor this is its stack: following it would be the end of the job.
        kernel_variant: std::ptr::without_provenance(0xdead_beef),
        is_sym_coll: 1,
        user_tag: 9,
    };
    for nccl in [0, 22_809, 23_007] {
        let Body::Coll(c) = v7::V7::tell(&d, nccl, TheBody) else { panic!("a collective") };
        assert_eq!((c.symmetric, c.user_tag, c.variant), (false, 0, [0; 4]), "{nccl}");
    }
    d.arms.coll.kernel_variant = c"AllReduce_RSxLD".as_ptr();
    let Body::Coll(c) = v7::V7::tell(&d, 23_203, TheBody) else { panic!("a collective") };
    assert_eq!((c.symmetric, c.user_tag), (true, 9));
    assert_eq!(c.variant[0].to_le_bytes(), *b"AllReduc");
}
