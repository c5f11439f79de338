//! The same job as the callbacks that NCCL would make, for the replayer to play on the real plugin.

use super::{BEGIN, Key, Part, Simulation};
use ringwatch::model::{Func, Rank};
use ringwatch::replay::{Call, Descriptor, Event, RankTrace, Trace};

/// NCCL's state of a kernel whose stop is known.
const KERNEL_CH_STOP: u32 = 22;

/// How far hosts run ahead of their GPUs, in ns. Players are real processes, which a busy machine delays; so much it may
/// delay them, and the job's own times, which are the GPUs', stay what they are.
pub(crate) const AHEAD_NS: u64 = 1_500_000_000;

impl Simulation {
    /// What every rank's NCCL would have called by now. Graph replays are not among it.
    pub(crate) fn trace(&self, now: u64) -> Trace {
        let ranks = (0..self.case.ranks).map(|rank| {
            let mut events: Vec<Event> = Vec::new();
            let mut at = |t: u64, call: Call| events.push(Event { at_ns: BEGIN + t, thread: 0, call });
            for (ctx, c) in (1..).zip(&self.comms) {
                if let Ok(own) = c.members.binary_search(&rank) {
                    let (nodes, ranks, rank) = (c.nodes as i32, c.members.len() as i32, own as i32);
                    at(
                        self.begin,
                        Call::Init { ctx, comm_id: c.id.nccl_hash(), name: None, nodes, ranks, rank },
                    );
                }
            }
            for (key, op) in &self.ops {
                if let Ok(own) = self.comms[key.0].members.binary_search(&rank)
                    && let Some(part) = op.parts.get(&(own as u32))
                {
                    self.calls(*key, rank, own as u32, part, now, &mut at);
                }
            }
            // A stable order: what begins together stays as it was written.
            events.sort_by_key(|e| e.at_ns);
            RankTrace { label: format!("rank{rank}"), pid: 1_000 + rank, threads: vec![1_000 + rank], events }
        });
        Trace { ranks: ranks.collect() }
    }

    fn calls(&self, key: Key, rank: u32, own: u32, part: &Part, now: u64, at: &mut impl FnMut(u64, Call)) {
        let call = &part.planned.call;
        let ctx = key.0 as u64 + 1;
        let handle = 1_000 + part.ticket * 8;
        let (func, datatype) = (call.func.as_str().into(), call.dtype.as_str().into());
        let (count, graph_captured, stream) = (call.count, false, u64::from(part.stream) + 1);
        let root = call.root.map_or(0, |r| r as i32);
        let (api, op) = if let Func::Send | Func::Recv = call.func {
            let n = self.comms[key.0].members.len() as i64;
            let Rank(peer) = Rank((i64::from(own) + call.by).rem_euclid(n) as u32);
            let api = Descriptor::P2pApi {
                func: call.func.as_str().into(),
                count,
                datatype: call.dtype.as_str().into(),
                stream,
                graph_captured,
            };
            (api, Descriptor::P2p { rank: own as i32, func, count, datatype, peer: peer as i32, channels: 1 })
        } else {
            let api = Descriptor::CollApi {
                func: call.func.as_str().into(),
                count,
                datatype: call.dtype.as_str().into(),
                root,
                stream,
                graph_captured,
            };
            let coll = Descriptor::Coll {
                rank: own as i32,
                seq: key.2,
                func,
                count,
                root,
                datatype,
                channels: 1,
                warps: 16,
                algo: "RING".into(),
                proto: "SIMPLE".into(),
            };
            (api, coll)
        };
        at(part.called, Call::Start { handle, ctx, parent: 0, descriptor: api });
        at(part.issued, Call::Start { handle: handle + 1, ctx, parent: handle, descriptor: op });
        at(part.issued + 1_000, Call::Stop { handle: handle + 1 });
        at(part.issued + 2_000, Call::Stop { handle });
        let Some(started) = part.started.filter(|_| part.start_seen <= now) else { return };
        let kernel = Descriptor::KernelCh { channel: 0, stamp_ns: self.gpu(rank, started + AHEAD_NS) };
        let seen = part.start_seen.max(part.issued + 3_000) + AHEAD_NS;
        at(seen, Call::Start { handle: handle + 2, ctx, parent: handle + 1, descriptor: kernel });
        if let Some(ended) = part.told_end().filter(|_| part.end_seen <= now) {
            let arg = Some(self.gpu(rank, ended + AHEAD_NS));
            let seen = (part.end_seen + AHEAD_NS).max(seen + 1_000);
            at(seen, Call::State { handle: handle + 2, state: KERNEL_CH_STOP, arg });
            at(seen + 500, Call::Stop { handle: handle + 2 });
        }
    }
}
