//! A job made by hand, whose numbers are known: four ranks on one node, an all-reduce after the other.

#![allow(dead_code, reason = "each test uses its part")]

pub(crate) mod machine;

use ringwatch::join::Join;
use ringwatch::model::{
    Algo, Change, ChannelStamp, CommId, CommRecord, DataType, Fact, Finding, FindingEvent, Flags, Func,
    Holder, Job, Lane, Liveness, NetProgress, OpRecord, PodsFact, Proto, Rank, Reading, SegmentId,
    SegmentRecord, Timing, Untimed, Update, Xid,
};
use std::collections::BTreeMap;

/// A second, in ns.
pub(crate) const S: u64 = 1_000_000_000;
/// The wall clock at the host's monotonic zero.
pub(crate) const EPOCH_NS: u64 = 1_795_244_764 * S;
/// The job's communicator.
pub(crate) const COMM: CommId = CommId::unowned(0xc0ff_ee00_0000_0007);
/// Its communicator with a rank of another node.
pub(crate) const ACROSS: CommId = CommId::unowned(0xc0ff_ee00_0000_0008);
/// How far the GPU's clock is ahead.
const AHEAD: u64 = S;
/// The pure transfer's time.
pub(crate) const TRANSFER_NS: u64 = 100_000;

/// A change of a finding.
pub(crate) fn event(change: Change, finding: &Finding) -> FindingEvent {
    FindingEvent { change, finding: finding.clone() }
}

/// The join that it is fed into.
pub(crate) struct Hand {
    pub(crate) join: Join,
    pub(crate) ranks: u32,
    /// The wall clock at the host's monotonic zero.
    epoch_ns: u64,
    issued: u64,
    /// The user whose job it is.
    owner: Option<u32>,
    /// When the machine was last read.
    read_ns: Option<u64>,
}

impl Hand {
    /// A job of so many ranks.
    pub(crate) fn new(ranks: u32) -> Self {
        Self::since(ranks, EPOCH_NS)
    }

    /// One whose clock began at a moment, ns since the epoch.
    pub(crate) fn since(ranks: u32, epoch_ns: u64) -> Self {
        let mut join = Join::new();
        join.keep_finished();
        let mut hand = Hand { join, ranks, epoch_ns, issued: 0, owner: None, read_ns: None };
        hand.begin();
        hand
    }

    fn begin(&mut self) {
        for r in 0..self.ranks {
            self.process(r, Liveness::Alive);
            self.member(r, 0);
        }
    }

    /// From now on feeds the job of this user, which has all names and numbers of the one before.
    pub(crate) fn switch_to_user(&mut self, owner: u32) {
        (self.owner, self.issued) = (Some(owner), 0);
        self.begin();
    }

    fn segment(&self, r: u32) -> SegmentId {
        SegmentId(u64::from(r) + 1 + 100 * u64::from(self.owner.unwrap_or(0)))
    }

    /// The communicator of the job that is fed.
    pub(crate) fn comm(&self) -> CommId {
        CommId::new(COMM.nccl_hash(), self.owner)
    }

    pub(crate) fn process(&mut self, r: u32, liveness: Liveness) {
        let labels = BTreeMap::from([("user.name".to_owned(), "ada".to_owned())]);
        self.join.feed(Update::Segment(SegmentRecord {
            id: self.segment(r),
            path: format!("/dev/shm/{r}.seg").into(),
            pid: 100 + r,
            host: "node1".into(),
            program: "python3".into(),
            nccl: Some("2.28.9".into()),
            abi: Some(5),
            job: Job {
                name: Some("slurm-17".into()),
                rank: Some(r),
                size: Some(self.ranks),
                local: Some(self.ranks),
                labels,
            },
            owner: self.owner,
            liveness,
            created_ns: 0,
            created_unix_ns: self.epoch_ns,
            losses: vec![("slot being written", 0), ("bad arguments", 2 * u64::from(r == 1))],
        }));
    }

    pub(crate) fn member(&mut self, r: u32, issued: u64) {
        self.join.feed(Update::Comm(CommRecord {
            segment: self.segment(r),
            comm: self.comm(),
            rank: Rank(r),
            ranks: Some(self.ranks),
            nodes: Some(1),
            name: Some("dp".into()),
            gpu: Some(gpu(r).into()),
            host_clock: 1,
            issued,
            replayed: 0,
            init_ns: 0,
            making: None,
            rules: None,
            finalized_ns: None,
        }));
    }

    /// One all-reduce of 4 MiB that all ranks enter at a moment, one of them later; its order is given back. Rank 0
    /// has two network transfers in it.
    pub(crate) fn round(&mut self, at_ns: u64, late: Option<(u32, u64)>) -> u64 {
        let order = self.issued;
        self.issued += 1;
        let by = late.map_or(0, |(_, by)| by);
        let end = at_ns + 5_000 + by + TRANSFER_NS;
        for r in 0..self.ranks {
            self.member(r, self.issued);
            let issued = at_ns + late.filter(|(l, _)| *l == r).map_or(0, |(_, by)| by);
            let mut op = self.op(r, order, issued, Some((issued + 5_000, Some(end))));
            if r == 0 {
                for (channel, is_send) in [(0, true), (1, false)] {
                    op.net.push(NetProgress {
                        channel,
                        peer: Rank(1),
                        is_send,
                        steps: 4,
                        started: 4,
                        done: 4,
                        bytes: 1 << 20,
                        start_ns: end - 90_000,
                        stop_ns: Some(end - 10_000),
                        waited_ns: [10_000, 20_000, 30_000, 0],
                        waiting: None,
                    });
                }
            }
            self.join.feed(Update::Op(Box::new(op)));
        }
        self.join.tick(end + 2_000);
        order
    }

    /// One all-reduce of 4 MiB between rank 0 here and one other rank on another node.
    pub(crate) fn across(&mut self, at_ns: u64) {
        let record = |issued| CommRecord {
            segment: SegmentId(1),
            comm: ACROSS,
            rank: Rank(0),
            ranks: Some(2),
            nodes: Some(2),
            name: None,
            gpu: Some(gpu(0).into()),
            host_clock: 1,
            issued,
            replayed: 0,
            init_ns: 0,
            making: None,
            rules: None,
            finalized_ns: None,
        };
        self.join.feed(Update::Comm(record(1)));
        let end = at_ns + 5_000 + TRANSFER_NS;
        let op = self.op(0, 0, at_ns, Some((at_ns + 5_000, Some(end))));
        self.join.feed(Update::Op(Box::new(OpRecord { comm: ACROSS, ticket: 1_000_000, ..op })));
        self.join.tick(end + 2_000);
    }

    /// One all-reduce of which nobody measures the time.
    pub(crate) fn untimed(&mut self, at_ns: u64) {
        let order = self.issued;
        self.issued += 1;
        for r in 0..self.ranks {
            self.member(r, self.issued);
            let mut op = self.op(r, order, at_ns, None);
            op.timing = Timing::Not(Untimed::Budget);
            self.join.feed(Update::Op(Box::new(op)));
        }
    }

    /// One all-reduce that one rank never issues and in which the others wait.
    pub(crate) fn stuck(&mut self, at_ns: u64, missing: u32) -> u64 {
        let order = self.issued;
        for r in (0..self.ranks).filter(|r| *r != missing) {
            self.member(r, order + 1);
            let op = self.op(r, order, at_ns, Some((at_ns + 5_000, None)));
            self.join.feed(Update::Op(Box::new(op)));
        }
        order
    }

    /// The late rank comes after all.
    pub(crate) fn unstick(&mut self, at_ns: u64, order: u64, missing: u32, began_ns: u64) {
        let end = at_ns + 5_000 + TRANSFER_NS;
        self.issued = order + 1;
        for r in 0..self.ranks {
            self.member(r, order + 1);
            let issued = if r == missing { at_ns } else { began_ns };
            let op = self.op(r, order, issued, Some((issued + 5_000, Some(end))));
            self.join.feed(Update::Op(Box::new(op)));
        }
        self.join.tick(end + 2_000);
    }

    fn op(&self, r: u32, order: u64, issued: u64, kernel: Option<(u64, Option<u64>)>) -> OpRecord {
        let stamps = kernel.map(|(start, stop)| ChannelStamp {
            channel: 0,
            start_gpu_ns: Some(start + AHEAD),
            stop_gpu_ns: stop.map(|s| s + AHEAD),
            start_seen_ns: start + 1_000,
            stop_seen_ns: stop.map(|s| s + 1_000),
        });
        OpRecord {
            segment: self.segment(r),
            ticket: order,
            comm: self.comm(),
            rank: Rank(r),
            lane: Lane::Collective,
            order: Some(order),
            func: Func::AllReduce,
            dtype: Some(DataType::Float32),
            count: 1 << 20,
            root: None,
            algo: Some(Algo::Ring),
            proto: Some(Proto::Simple),
            channels: Some(1),
            warps: Some(16),
            seq: Some(order),
            plan: None,
            flags: Flags::default(),
            called_ns: Some(issued.saturating_sub(5_000)),
            returned: None,
            redop: None,
            issued_ns: Some(issued),
            timing: if kernel.is_some() { Timing::Kernel } else { Timing::Unknown },
            event_ns: None,
            event_seen_ns: None,
            started: u16::from(kernel.is_some()),
            stopped: u16::from(kernel.is_some_and(|k| k.1.is_some())),
            stamps: stamps.into_iter().collect(),
            net: Vec::new(),
        }
    }

    fn reading(&mut self, at_ns: u64, fact: Fact) {
        self.join.feed(Update::Hardware(Box::new(Reading { host: "node1".into(), at_ns, fact })));
    }

    /// What all samplers say at a moment; counters grow with it. Far more goes over the wires than its operations.
    pub(crate) fn hardware(&mut self, at_ns: u64) {
        let from_ns = self.read_ns.replace(at_ns).unwrap_or(at_ns.saturating_sub(S));
        for fact in machine::facts(self.ranks, from_ns, at_ns).into_iter().chain(machine::samplers(at_ns)) {
            self.reading(at_ns, fact);
        }
    }

    /// A kubelet gave a rank's GPU to the container `trainer` of a pod in the namespace `ml`.
    pub(crate) fn pod(&mut self, at_ns: u64, rank: u32, pod: &str) {
        let (device, pod) = (format!("GPU-{rank:04}"), pod.to_owned());
        let (namespace, container) = ("ml".to_owned(), "trainer".to_owned());
        let holders = vec![Holder { device, pod, namespace, container }];
        self.reading(at_ns, Fact::Pods(PodsFact { holders }));
    }

    /// The driver reports an error.
    pub(crate) fn xid(&mut self, at_ns: u64, rank: u32, code: u64) {
        self.reading(at_ns, Fact::Xid(Xid { gpu: gpu(rank), code }));
    }
}

/// A rank's GPU.
pub(crate) fn gpu(rank: u32) -> String {
    format!("0000:00:{:02x}.0", rank + 9)
}
