//! From a recording to the bytes of the body.

use std::collections::HashMap;

use super::{Before, HAS_PARENT, KERNEL_CH_STOP, tag};
use crate::replay::trace::{Call, Descriptor, RankTrace, Text, Trace};

pub(super) fn body(trace: &Trace) -> Vec<u8> {
    let mut names = NameTable::default();
    let mut ranks = Writer::default();
    ranks.unsigned(trace.ranks.len() as u64);
    for rank in &trace.ranks {
        ranks.rank(rank, &mut names);
    }
    let mut body = Writer::default();
    body.unsigned(names.order.len() as u64);
    for name in &names.order {
        body.text(name);
    }
    body.0.extend_from_slice(&ranks.0);
    body.0
}

#[derive(Default)]
struct NameTable {
    order: Vec<Text>,
    index: HashMap<Text, u64>,
}

impl NameTable {
    fn index(&mut self, name: &Text) -> u64 {
        if let Some(&index) = self.index.get(name) {
            return index;
        }
        let index = self.order.len() as u64;
        self.order.push(name.clone());
        self.index.insert(name.clone(), index);
        index
    }
}

#[derive(Default)]
struct Writer(Vec<u8>);

impl Writer {
    fn unsigned(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn signed(&mut self, value: i64) {
        self.unsigned(((value << 1) ^ (value >> 63)) as u64);
    }

    fn step(&mut self, before: &mut u64, value: u64) {
        self.signed(value.wrapping_sub(*before) as i64);
        *before = value;
    }

    fn text(&mut self, text: &str) {
        self.unsigned(text.len() as u64);
        self.0.extend_from_slice(text.as_bytes());
    }

    fn rank(&mut self, rank: &RankTrace, names: &mut NameTable) {
        self.text(&rank.label);
        self.unsigned(rank.pid.into());
        self.unsigned(rank.threads.len() as u64);
        for &tid in &rank.threads {
            self.unsigned(tid.into());
        }
        self.unsigned(rank.events.len() as u64);
        let mut before = Before::default();
        for event in &rank.events {
            self.0.push(tag_of(&event.call));
            self.unsigned(event.thread.into());
            self.step(&mut before.at_ns, event.at_ns);
            self.call(&event.call, &mut before, names);
        }
    }

    fn call(&mut self, call: &Call, before: &mut Before, names: &mut NameTable) {
        match call {
            Call::Init { ctx, comm_id, name, nodes, ranks, rank } => {
                self.unsigned(*ctx);
                self.0.extend_from_slice(&comm_id.to_le_bytes());
                self.unsigned(name.as_ref().map_or(0, |name| names.index(name) + 1));
                for value in [nodes, ranks, rank] {
                    self.signed((*value).into());
                }
            }
            Call::Start { handle, ctx, parent, descriptor } => {
                self.step(&mut before.handle, *handle);
                self.unsigned(*ctx);
                if *parent != 0 {
                    self.signed(handle.wrapping_sub(*parent) as i64);
                }
                self.descriptor(descriptor, before, names);
            }
            Call::Stop { handle } => self.step(&mut before.handle, *handle),
            Call::State { handle, state, arg } => {
                self.step(&mut before.handle, *handle);
                self.unsigned((*state).into());
                match *arg {
                    None => {}
                    Some(stamp_ns) if *state == KERNEL_CH_STOP => self.step(&mut before.stamp_ns, stamp_ns),
                    Some(arg) => self.unsigned(arg),
                }
            }
            Call::Finalize { ctx } => self.unsigned(*ctx),
        }
    }

    fn descriptor(&mut self, descriptor: &Descriptor, before: &mut Before, names: &mut NameTable) {
        match descriptor {
            Descriptor::GroupApi { depth, graph_captured } => {
                self.signed((*depth).into());
                self.0.push((*graph_captured).into());
            }
            Descriptor::CollApi { func, count, datatype, root, stream, graph_captured } => {
                self.unsigned(names.index(func));
                self.unsigned(*count);
                self.unsigned(names.index(datatype));
                self.signed((*root).into());
                self.unsigned(*stream);
                self.0.push((*graph_captured).into());
            }
            Descriptor::P2pApi { func, count, datatype, stream, graph_captured } => {
                self.unsigned(names.index(func));
                self.unsigned(*count);
                self.unsigned(names.index(datatype));
                self.unsigned(*stream);
                self.0.push((*graph_captured).into());
            }
            Descriptor::KernelLaunch { stream } => self.unsigned(*stream),
            Descriptor::Group => {}
            Descriptor::Coll { rank, seq, func, count, root, datatype, channels, warps, algo, proto } => {
                self.signed((*rank).into());
                self.unsigned(*seq);
                self.unsigned(names.index(func));
                self.unsigned(*count);
                self.signed((*root).into());
                self.unsigned(names.index(datatype));
                self.0.extend([*channels, *warps]);
                self.unsigned(names.index(algo));
                self.unsigned(names.index(proto));
            }
            Descriptor::P2p { rank, func, count, datatype, peer, channels } => {
                self.signed((*rank).into());
                self.unsigned(names.index(func));
                self.unsigned(*count);
                self.unsigned(names.index(datatype));
                self.signed((*peer).into());
                self.0.push(*channels);
            }
            Descriptor::KernelCh { channel, stamp_ns } => {
                self.0.push(*channel);
                self.step(&mut before.stamp_ns, *stamp_ns);
            }
            Descriptor::ProxyOp { pid, channel, peer, steps, chunk_bytes, send } => {
                self.signed((*pid).into());
                self.0.push(*channel);
                for value in [peer, steps, chunk_bytes] {
                    self.signed((*value).into());
                }
                self.0.push((*send).into());
            }
            Descriptor::ProxyStep { step } => self.signed((*step).into()),
            Descriptor::Other(bit) => self.unsigned(*bit),
        }
    }
}

fn tag_of(call: &Call) -> u8 {
    match call {
        Call::Init { .. } => tag::INIT,
        Call::Stop { .. } => tag::STOP,
        Call::State { arg: None, .. } => tag::STATE,
        Call::State { arg: Some(_), .. } => tag::STATE_ARG,
        Call::Finalize { .. } => tag::FINALIZE,
        Call::Start { parent, descriptor, .. } => {
            let kind = match descriptor {
                Descriptor::GroupApi { .. } => tag::GROUP_API,
                Descriptor::CollApi { .. } => tag::COLL_API,
                Descriptor::P2pApi { .. } => tag::P2P_API,
                Descriptor::KernelLaunch { .. } => tag::KERNEL_LAUNCH,
                Descriptor::Group => tag::GROUP,
                Descriptor::Coll { .. } => tag::COLL,
                Descriptor::P2p { .. } => tag::P2P,
                Descriptor::KernelCh { .. } => tag::KERNEL_CH,
                Descriptor::ProxyOp { .. } => tag::PROXY_OP,
                Descriptor::ProxyStep { .. } => tag::PROXY_STEP,
                Descriptor::Other(_) => tag::OTHER,
            };
            if *parent == 0 { kind } else { kind | HAS_PARENT }
        }
    }
}
