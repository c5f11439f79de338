//! The updates of a source: the one stream that live segments, black boxes and (later) recordings share.

use super::{
    Algo, CallState, CommId, Func, HostFact, Launch, OpRecord, Proto, Rank, Reading, SegmentId, Spare,
    Unread, WorkState,
};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

/// Operations that were left out because their user's take too much memory, as what was missed.
pub const BEYOND_MEMORY: &str = "operations beyond the memory of their user";

/// Operations that were overwritten before they were read, as what was missed.
pub const OPERATIONS: &str = "operations";

/// Why records were lost that a reader missed, in words.
pub fn missed_reason(what: &str) -> &'static str {
    match what {
        OPERATIONS => "operations overwritten before they were read",
        "channel stamps" => "channel stamps overwritten before they were read",
        BEYOND_MEMORY => BEYOND_MEMORY,
        _ => "network transfers overwritten before they were read",
    }
}

/// The reasons of the plugin for which an operation is neither recorded nor counted: later issue orders may be too low.
pub const UNCOUNTED: [&str; 4] =
    ["slot being written", "unknown communicator", "bad arguments", "communicator table full"];
/// Calls of a file of another tool that wait for something which no file shows.
pub const ONE_SIDED: &str = "calls whose other side no dump shows";
/// The reasons of the plugin for which an operation is counted and has no record.
pub(crate) const UNRECORDED: [&str; 2] = ["no room in shared memory", "overwritten before it was issued"];

/// True where records that were lost for this reason were operations of which nothing else is known. The other reasons cost
/// times and details, and are common: with PXN, NCCL hands over the events of other processes.
pub fn hides_operations(reason: &str) -> bool {
    let of_reader = [missed_reason(OPERATIONS), BEYOND_MEMORY];
    UNCOUNTED.contains(&reason) || UNRECORDED.contains(&reason) || of_reader.contains(&reason)
}

/// The life of the process behind a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Liveness {
    /// The process runs.
    Alive,
    /// The process is gone; the segment is its black box. Host monotonic ns of its end, as closely as it was
    /// watched; absent when it was gone before anybody looked.
    Gone(Option<u64>),
    /// It is not known: a file describes the process as it was when the file was written.
    Unknown,
}

impl Liveness {
    /// True where its process is known to be gone.
    pub const fn is_gone(self) -> bool {
        matches!(self, Liveness::Gone(_))
    }
}

/// The job a process belongs to, from its environment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Job {
    /// A name that all processes of the job share.
    pub name: Option<String>,
    /// The process's rank in the job.
    pub rank: Option<u32>,
    /// The number of processes in the job.
    pub size: Option<u32>,
    /// The number of them on this host.
    pub local: Option<u32>,
    /// Other labels of its owner, by OpenTelemetry's names where it has some: `user.name`,
    /// `container.id`, `k8s.pod.name`, `slurm.job.id`, and the user's own tags.
    pub labels: BTreeMap<String, String>,
}

/// How far the making of a communicator is on one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Making {
    /// The call that makes it was entered, and it is not ready.
    Begun,
    /// It can be used; since when (host monotonic ns).
    Ready(Option<u64>),
    /// It was not made: NCCL's result.
    Failed(u8),
    /// It was aborted or revoked.
    Aborted,
}

/// The rules for NCCL's tuner, as one rank has them in a communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TunerRules {
    /// The outcome of the agreement on them.
    pub state: RulesState,
    /// Their content hash; absent where the rank has none.
    pub hash: Option<u64>,
}

/// The outcome of the agreement on a communicator's tuner rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RulesState {
    /// All ranks follow them.
    Applied,
    /// They are off: ranks have different ones, or some have none.
    Different,
    /// They are off: a rank took no part in the agreement.
    AbsentRank,
    /// They are off for another reason, which is the same on all ranks.
    Off,
}

/// One process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentRecord {
    /// Its identity.
    pub id: SegmentId,
    /// Where it was found.
    pub path: PathBuf,
    /// Process id as the process sees it.
    pub pid: u32,
    /// Host name.
    pub host: String,
    /// The program's name.
    pub program: String,
    /// NCCL's version, `2.28.9`; absent where the plugin could not learn it.
    pub nccl: Option<String>,
    /// Profiler ABI version that NCCL used.
    pub abi: Option<u32>,
    /// The job it belongs to.
    pub job: Job,
    /// The user whose it is, by number, as this host numbers users.
    pub owner: Option<u32>,
    /// Its life.
    pub liveness: Liveness,
    /// Created, host monotonic ns.
    pub created_ns: u64,
    /// Created, wall clock ns since the epoch.
    pub created_unix_ns: u64,
    /// The losses, by reason.
    pub losses: Vec<(&'static str, u64)>,
}

/// One rank's membership in a communicator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommRecord {
    /// The segment it was read from.
    pub segment: SegmentId,
    /// The communicator.
    pub comm: CommId,
    /// This process's rank in it.
    pub rank: Rank,
    /// The number of ranks; absent before NCCL 2.27.
    pub ranks: Option<u32>,
    /// The number of nodes.
    pub nodes: Option<u32>,
    /// The user's name for it.
    pub name: Option<String>,
    /// PCI address of the rank's GPU.
    pub gpu: Option<Arc<str>>,
    /// The host clock of its times: equal for processes of one boot of one host.
    pub host_clock: u64,
    /// Collectives issued by calls so far: the next issue order.
    pub issued: u64,
    /// Collectives issued by graph replays so far.
    pub replayed: u64,
    /// When its making began, host monotonic ns.
    pub init_ns: u64,
    /// How far its making is, where somebody looked.
    pub making: Option<Making>,
    /// Its rules for NCCL's tuner, where the rank was given any.
    pub rules: Option<TunerRules>,
    /// When NCCL freed it, host monotonic ns.
    pub finalized_ns: Option<u64>,
}

/// How far a rank is in a communicator, as the agent of its node says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Beat {
    /// The process.
    pub segment: SegmentId,
    /// The communicator.
    pub comm: CommId,
    /// The process's rank in it.
    pub rank: Rank,
    /// Collectives issued by calls so far: the next issue order.
    pub issued: u64,
    /// Collectives issued by graph replays so far.
    pub replayed: u64,
    /// Collectives issued by calls below this order are done, as far as is known.
    pub done: u64,
    /// Collectives issued by graph replays below this order are done, as far as is known.
    pub replays_done: u64,
    /// The bytes that it has exchanged with single others.
    pub exchanged: Exchange,
    /// The newest operation that its GPU has started, as far as stamps show. Those that were issued before it have started too,
    /// though their own stamps may be lost.
    pub begun: Option<Begun>,
}

/// An operation that a rank's GPU has started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Begun {
    /// When its host issued it, host monotonic ns.
    pub issued_ns: u64,
    /// The same moment by the clock of that host, which is never mapped to another clock.
    pub host_ns: u64,
    /// Its launch, which may have others in it.
    pub launch: Launch,
}

/// The bytes that a rank has exchanged with single others, by sends and receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Exchange {
    /// Bytes sent.
    pub sent_bytes: u64,
    /// Bytes received.
    pub received_bytes: u64,
    /// Sends.
    pub sends: u64,
    /// To how many others.
    pub peers: u64,
}

/// How many transfers to and from one other rank a rank has issued, as the agent of its node says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PairBeat {
    /// The process.
    pub segment: SegmentId,
    /// The communicator.
    pub comm: CommId,
    /// The process's rank in it.
    pub rank: Rank,
    /// The other rank.
    pub peer: Rank,
    /// Sends issued to it so far.
    pub sent: u64,
    /// Receives from it issued so far.
    pub received: u64,
    /// The lowest orders of which the agent knows: what came before was issued unseen.
    pub from: u64,
    /// Sends to it below this order are finished; absent where an older agent does not say.
    pub sent_done: Option<u64>,
    /// Receives from it below this order are finished; absent where an older agent does not say.
    pub received_done: Option<u64>,
    /// The last send that is finished may still run: it is the newest one, and the rank's GPU does not start a later transfer.
    pub sent_may_run: bool,
    /// The same of the last receive.
    pub received_may_run: bool,
    /// Since the stamps said that the last send that is finished ended, nothing of the communicator started on the rank's GPU.
    pub sent_is_newest: bool,
}

/// The hashes of a rank's collectives that calls issued, a number each: equal where ranks issued the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signatures {
    /// The process.
    pub segment: SegmentId,
    /// The communicator.
    pub comm: CommId,
    /// The process's rank in it.
    pub rank: Rank,
    /// The issue order of the first of them.
    pub from: u64,
    /// One for each issue order; none where the types alone are told.
    pub signatures: Vec<u32>,
    /// The data type and reduction, as far as they are known, one for each issue order; none where they are not
    /// reported.
    pub types: Vec<u8>,
}

/// The operations of a class on one node over some seconds, each operation counted, as its agent says. A
/// transfer from one rank to another is told by its sender's node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sketch {
    /// The process of the rank that speaks for the node.
    pub segment: SegmentId,
    /// The communicator.
    pub comm: CommId,
    /// The node's lowest rank in the communicator.
    pub rank: Rank,
    /// How many ranks of the communicator the node has.
    pub ranks: u32,
    /// The operation.
    pub func: Func,
    /// `floor(log2(bytes))`; absent where it is not known.
    pub size_class: Option<u8>,
    /// Algorithm.
    pub algo: Option<Algo>,
    /// Protocol.
    pub proto: Option<Proto>,
    /// Operations that were over on the node's ranks.
    pub count: u64,
    /// The number of them that were timed on all of these.
    pub timed: u64,
    /// The number of the timed ones that CUDA events timed on some rank.
    pub by_events: u64,
    /// Message bytes of all of them; absent where a size is not known.
    pub bytes: Option<u64>,
    /// Mean time inside, over the node's ranks, of the timed ones together, in ns.
    pub busy_ns: u64,
    /// From when on it counts, host monotonic ns.
    pub from_ns: u64,
    /// Over how many seconds it counts.
    pub seconds: u32,
    /// True where all ranks of each operation are the node's: then the shortest time is the transfer time.
    pub whole: bool,
    /// The shortest time over the node's ranks: buckets `floor(8 log2(ns))`, rising, and how many there are in each.
    pub times: Vec<(u16, u64)>,
}

impl Sketch {
    /// Buckets of a power of two.
    pub const BUCKETS: u16 = 8;

    /// The bucket of a time in ns.
    pub fn bucket(ns: u64) -> u16 {
        ((ns.max(1) as f64).log2() * f64::from(Self::BUCKETS)) as u16
    }

    /// The middle of a bucket in ns: what is in it differs from that by 4.4 % at most.
    pub fn middle_ns(bucket: u16) -> f64 {
        ((f64::from(bucket) + 0.5) / f64::from(Self::BUCKETS)).exp2()
    }
}

/// An operation's record, and what the agent of its node made of the stamps it does not send on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Told {
    /// The record, without stamps.
    pub op: OpRecord,
    /// When its kernel started, host monotonic ns.
    pub started_ns: Option<u64>,
    /// How long its kernel took by the GPU's clock, in ns.
    pub duration_ns: Option<u64>,
    /// When its last channel was reported as stopped, host monotonic ns.
    pub ended_seen_ns: Option<u64>,
    /// True when it is known to be done.
    pub finished: bool,
}

/// The consumer of a source's stream.
pub trait Sink {
    /// Takes what comes next.
    fn take(&mut self, update: Update);
    /// The same of an operation: nearly all are, and an update takes longer to pass on than the operation in it.
    fn operation(&mut self, op: Box<OpRecord>) {
        self.take(Update::Op(op));
    }
    /// A good moment, in the middle of a poll, to work on what was taken so far: it is still at hand. Records that nobody
    /// needs any more are given back, for the room that new ones need.
    fn rest(&mut self, spare: &mut Spare) {
        let _ = spare;
    }
}

impl<F: FnMut(Update)> Sink for F {
    fn take(&mut self, update: Update) {
        self(update);
    }
}

/// A stream of what happened. Live segments and black boxes are one; recordings and the cluster's bus will be.
pub trait Source {
    /// The updates since the last call. `now_ns` is the host's monotonic clock.
    fn poll(&mut self, now_ns: u64) -> Vec<Update>;
    /// The same, one after the other: what is taken at once needs no room.
    fn poll_each(&mut self, now_ns: u64, sink: &mut dyn Sink) {
        self.poll(now_ns).into_iter().for_each(|u| sink.take(u));
    }
    /// Begins to find out where in its code a process is; the answer comes as an [`Update::Host`], if one can be had.
    fn inspect(&mut self, segment: SegmentId, now_ns: u64) {
        let _ = (segment, now_ns);
    }
    /// The processes of which the last poll left something for the next one: what they lack may be there unread.
    fn behind(&self) -> Vec<SegmentId> {
        Vec::new()
    }
    /// True once everything was searched that it reads, or is reported as unread.
    fn is_searched(&self) -> bool {
        true
    }
    /// Everything that was there at this moment (host monotonic ns) was found, or is reported as unread; absent where there
    /// is nothing to search for.
    fn searched_ns(&self) -> Option<u64> {
        None
    }
    /// The sources that it does not read now, and why; or those of one user.
    fn unread(&self, uid: Option<u32>) -> Vec<Unread> {
        let _ = uid;
        Vec::new()
    }
    /// Where it looks, in words.
    fn describe(&self) -> String;
}

/// One item of a source's stream. Records are repeated, whole, whenever they change.
#[derive(Debug, Clone, PartialEq)]
pub enum Update {
    /// A process appeared or changed.
    Segment(SegmentRecord),
    /// A communicator appeared or changed on one rank.
    Comm(CommRecord),
    /// A rank is not in a communicator, though that was reported: its id turned out to be another.
    Left {
        /// The segment it was read from.
        segment: SegmentId,
        /// The communicator.
        comm: CommId,
        /// The rank.
        rank: Rank,
    },
    /// An operation appeared or moved on.
    Op(Box<OpRecord>),
    /// Records that were overwritten before they were read.
    Missed {
        /// The segment they were lost from.
        segment: SegmentId,
        /// The kind of records, `operations` for example.
        what: &'static str,
        /// How many.
        count: u64,
    },
    /// The operating system's facts about a process.
    Host(Box<HostFact>),
    /// A sampler's reading of a machine.
    Hardware(Box<Reading>),
    /// How far a rank is, where not every record of it comes.
    Beat(Beat),
    /// The same of its transfers to and from another rank.
    Pair(PairBeat),
    /// The hashes of a rank's latest collectives.
    Signatures(Box<Signatures>),
    /// How a process keeps to the order of its calls, where not every record comes.
    Calls(Box<CallState>),
    /// How long a process works between operations, where not every record comes.
    Work(Box<WorkState>),
    /// The operations of a class on a node, where not every record comes.
    Sketch(Box<Sketch>),
    /// An operation, as the agent of its node understood it.
    Told(Box<Told>),
    /// The clocks of a host, by its messages.
    Clock {
        /// The host.
        host: String,
        /// The number to add to its monotonic times to have them on the observer's clock, in ns.
        shift_ns: i64,
        /// How far its wall clock is ahead of the observer's, in ns.
        wall_ahead_ns: i64,
    },
    /// Processes of several nodes claim one rank, so that nothing can rest on it; of no nodes: not any more.
    Disputed {
        /// The communicator.
        comm: CommId,
        /// The rank.
        rank: Rank,
        /// The nodes.
        nodes: Vec<String>,
    },
    /// Nothing is heard of a process since a moment, or it is heard of again: whether it goes on is not known.
    Silent {
        /// The process.
        segment: SegmentId,
        /// Since when, host monotonic ns; absent where it is heard of again.
        since_ns: Option<u64>,
    },
}
