//! What really happened in a job, for whoever judges what was found.

use super::{Key, Simulation};
use ringwatch::model::{CommId, Func, Track};

/// One rank's part of one operation, in the job's time.
#[derive(Debug, Clone)]
pub(crate) struct Stay {
    /// The communicator's place in the list of all.
    pub(crate) comm: usize,
    pub(crate) id: CommId,
    pub(crate) track: Track,
    pub(crate) order: u64,
    pub(crate) func: Func,
    pub(crate) count: u64,
    pub(crate) root: Option<u32>,
    /// The rank of the job.
    pub(crate) rank: u32,
    /// The place in the sequence of all calls of this process.
    pub(crate) ticket: u64,
    pub(crate) issued_ns: u64,
    pub(crate) started_ns: Option<u64>,
    pub(crate) ended_ns: Option<u64>,
    /// When it ended by its record: of a launch of several transfers NCCL reports one end.
    pub(crate) reported_end_ns: Option<u64>,
    pub(crate) stream: u8,
    /// The launch that carried it together with others.
    pub(crate) plan: Option<u64>,
    /// Its record has GPU times of its own.
    pub(crate) timed: bool,
    /// How long its whole launch took is known, once that is over.
    pub(crate) by_launch: bool,
}

impl Stay {
    pub(crate) fn key(&self) -> Key {
        (self.comm, self.track, self.order)
    }
}

impl Simulation {
    /// Everything that was issued so far.
    pub(crate) fn stays(&self) -> Vec<Stay> {
        let mut out = Vec::new();
        for (key, op) in &self.ops {
            for (own, part) in &op.parts {
                out.push(Stay {
                    comm: key.0,
                    id: self.comms[key.0].id,
                    track: key.1,
                    order: key.2,
                    func: part.planned.call.func,
                    count: part.planned.call.count,
                    root: part.planned.call.root,
                    rank: self.comms[key.0].members[*own as usize],
                    ticket: part.ticket,
                    issued_ns: part.issued,
                    started_ns: part.started,
                    ended_ns: part.ended,
                    reported_end_ns: part.told_end(),
                    stream: part.stream,
                    plan: part.plan,
                    timed: part.timed && part.stamped && part.by_events.is_none(),
                    by_launch: part.timed && part.by_events.is_some(),
                });
            }
        }
        out
    }

    /// When the last rank entered the making of each communicator.
    pub(crate) fn entered(&self) -> Vec<Option<u64>> {
        self.comms.iter().map(|c| c.entered.iter().flatten().max().copied()).collect()
    }

    /// The ranks of the job in each communicator.
    pub(crate) fn members(&self) -> Vec<(CommId, Vec<u32>)> {
        self.comms.iter().map(|c| (c.id, c.members.clone())).collect()
    }

    /// The node that is gone by now, with its agent.
    pub(crate) fn lost_host(&self, now: u64) -> Option<String> {
        self.case.node_loss.filter(|(_, at)| at.0 <= now).map(|(node, _)| format!("node{node}"))
    }
}
