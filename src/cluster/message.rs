//! The messages on the bus: the envelope and its items, in Protocol Buffers.
//!
//! Fields are only ever added: a reader skips what it does not know, and what is left out has its default. The numbers
//! of words (operations, types, ...) are their places in the model's lists plus one; 0 is absent. A change that an older
//! reader would misunderstand makes a new [`VERSION`], and new subjects with it.

use prost::Message;

/// The version of the envelope, and of the subjects.
pub const VERSION: u32 = 1;

/// One message of one agent.
#[derive(Clone, PartialEq, Message)]
pub struct Envelope {
    /// [`VERSION`].
    #[prost(uint32, tag = "1")]
    pub version: u32,
    /// The node, as its subject names it.
    #[prost(string, tag = "2")]
    pub node: String,
    /// When this agent began, wall clock ns: a later run of a node's agent has a greater one.
    #[prost(fixed64, tag = "3")]
    pub run: u64,
    /// Counts this run's messages on this subject, from 1.
    #[prost(uint64, tag = "4")]
    pub sequence: u64,
    /// When it was sent, host monotonic ns.
    #[prost(fixed64, tag = "5")]
    pub sent_ns: u64,
    /// The same on the wall clock, ns since the epoch.
    #[prost(fixed64, tag = "6")]
    pub sent_unix_ns: u64,
    /// Processes, new or changed.
    #[prost(message, repeated, tag = "10")]
    pub processes: Vec<Process>,
    /// Memberships, new or changed.
    #[prost(message, repeated, tag = "11")]
    pub members: Vec<Member>,
    /// How far ranks are.
    #[prost(message, repeated, tag = "12")]
    pub beats: Vec<Beat>,
    /// How many transfers pairs of ranks have issued.
    #[prost(message, repeated, tag = "13")]
    pub pairs: Vec<Pair>,
    /// Operations.
    #[prost(message, repeated, tag = "14")]
    pub records: Vec<Record>,
    /// Sketches of classes.
    #[prost(message, repeated, tag = "15")]
    pub sketches: Vec<Sketch>,
    /// The operating system's facts about processes.
    #[prost(message, repeated, tag = "16")]
    pub hosts: Vec<Host>,
    /// The readings of samplers, each a JSON object as in a recording of them.
    #[prost(bytes = "vec", repeated, tag = "17")]
    pub readings: Vec<Vec<u8>>,
    /// Findings of the node itself, each a JSON object as `diagnose --json` prints them.
    #[prost(bytes = "vec", repeated, tag = "18")]
    pub findings: Vec<Vec<u8>>,
    /// The agent's books, once a second.
    #[prost(message, optional, tag = "19")]
    pub books: Option<Books>,
    /// The hashes of ranks' latest collectives.
    #[prost(message, repeated, tag = "21")]
    pub signatures: Vec<Signatures>,
    /// Data types and reductions of ranks' latest collectives, as far as they are known.
    #[prost(message, repeated, tag = "22")]
    pub types: Vec<Types>,
    /// How processes that stand still kept to the order of their calls.
    #[prost(message, repeated, tag = "23")]
    pub calls: Vec<Calls>,
    /// How long processes work between operations, where not every record is sent.
    #[prost(message, repeated, tag = "24")]
    pub work: Vec<Work>,
    /// Operations that were found interesting here, for the other nodes to send their parts.
    #[prost(message, repeated, tag = "20")]
    pub announced: Vec<OperationKey>,
}

/// One process.
#[derive(Clone, PartialEq, Message)]
#[expect(missing_docs, reason = "the fields are those of model::SegmentRecord")]
pub struct Process {
    #[prost(fixed64, tag = "1")]
    pub segment: u64,
    #[prost(uint32, tag = "2")]
    pub pid: u32,
    #[prost(string, tag = "3")]
    pub program: String,
    #[prost(string, optional, tag = "4")]
    pub nccl: Option<String>,
    #[prost(uint32, optional, tag = "5")]
    pub abi: Option<u32>,
    #[prost(string, optional, tag = "6")]
    pub job: Option<String>,
    #[prost(uint32, optional, tag = "7")]
    pub job_rank: Option<u32>,
    #[prost(uint32, optional, tag = "8")]
    pub job_size: Option<u32>,
    #[prost(uint32, optional, tag = "9")]
    pub job_local: Option<u32>,
    #[prost(btree_map = "string, string", tag = "10")]
    pub labels: std::collections::BTreeMap<String, String>,
    #[prost(uint32, optional, tag = "11")]
    pub owner: Option<u32>,
    /// False once it is gone.
    #[prost(bool, tag = "12")]
    pub alive: bool,
    #[prost(fixed64, optional, tag = "13")]
    pub gone_ns: Option<u64>,
    #[prost(fixed64, tag = "14")]
    pub created_ns: u64,
    #[prost(fixed64, tag = "15")]
    pub created_unix_ns: u64,
    #[prost(message, repeated, tag = "16")]
    pub losses: Vec<Loss>,
    #[prost(message, repeated, tag = "17")]
    pub missed: Vec<Loss>,
    /// True where processes of several users share communicators: these are then nobody's.
    #[prost(bool, tag = "18")]
    pub shares_communicators: bool,
}

/// Records that were lost, or not read in time, and how often.
#[derive(Clone, PartialEq, Message)]
pub struct Loss {
    /// In words.
    #[prost(string, tag = "1")]
    pub what: String,
    /// How often.
    #[prost(uint64, tag = "2")]
    pub count: u64,
}

/// One rank's membership in a communicator.
#[derive(Clone, PartialEq, Message)]
#[expect(missing_docs, reason = "the fields are those of model::CommRecord")]
pub struct Member {
    #[prost(fixed64, tag = "1")]
    pub segment: u64,
    #[prost(fixed64, tag = "2")]
    pub comm: u64,
    #[prost(uint32, tag = "3")]
    pub rank: u32,
    #[prost(uint32, optional, tag = "4")]
    pub ranks: Option<u32>,
    #[prost(uint32, optional, tag = "5")]
    pub nodes: Option<u32>,
    #[prost(string, optional, tag = "6")]
    pub name: Option<String>,
    #[prost(string, optional, tag = "7")]
    pub gpu: Option<String>,
    #[prost(fixed64, tag = "8")]
    pub host_clock: u64,
    #[prost(uint64, tag = "9")]
    pub issued: u64,
    #[prost(uint64, tag = "10")]
    pub replayed: u64,
    #[prost(fixed64, tag = "11")]
    pub init_ns: u64,
    /// 0 not known, 1 begun, 2 ready, 3 failed, 4 aborted.
    #[prost(uint32, tag = "12")]
    pub making: u32,
    /// When it was ready.
    #[prost(fixed64, optional, tag = "13")]
    pub ready_ns: Option<u64>,
    /// NCCL's result, where it failed.
    #[prost(uint32, tag = "14")]
    pub result: u32,
    #[prost(fixed64, optional, tag = "15")]
    pub finalized_ns: Option<u64>,
    /// True when the rank is not in it after all.
    #[prost(bool, tag = "16")]
    pub left: bool,
    /// Rules for NCCL's tuner: 0 none, 1 applied, 2 different, 3 a rank is absent, 4 off.
    #[prost(uint32, tag = "17")]
    pub rules: u32,
    /// Their content hash.
    #[prost(fixed64, optional, tag = "18")]
    pub rules_hash: Option<u64>,
}

/// How far a rank is in a communicator. What it lacks to the count issued is in flight.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
#[expect(missing_docs, reason = "the fields are those of model::Beat")]
pub struct Beat {
    #[prost(fixed64, tag = "1")]
    pub segment: u64,
    #[prost(fixed64, tag = "2")]
    pub comm: u64,
    #[prost(uint32, tag = "3")]
    pub rank: u32,
    #[prost(uint64, tag = "4")]
    pub issued: u64,
    /// Issued and not known to be done.
    #[prost(uint64, tag = "5")]
    pub open: u64,
    #[prost(uint64, tag = "6")]
    pub replayed: u64,
    /// Replayed and not known to be done.
    #[prost(uint64, tag = "7")]
    pub replays_open: u64,
    /// Bytes, sends and others of transfers from rank to rank.
    #[prost(uint64, tag = "8")]
    pub sent_bytes: u64,
    #[prost(uint64, tag = "9")]
    pub received_bytes: u64,
    #[prost(uint64, tag = "10")]
    pub sends: u64,
    #[prost(uint64, tag = "11")]
    pub peers: u64,
    /// When the newest operation that its GPU has started was issued, and the number of its launch.
    #[prost(fixed64, optional, tag = "12")]
    pub begun_issued_ns: Option<u64>,
    #[prost(uint64, optional, tag = "13")]
    pub begun_plan: Option<u64>,
}

/// The hashes of a rank's collectives, a number each.
#[derive(Clone, PartialEq, Message)]
#[expect(missing_docs, reason = "the fields are those of model::Signatures")]
pub struct Signatures {
    #[prost(fixed64, tag = "1")]
    pub segment: u64,
    #[prost(fixed64, tag = "2")]
    pub comm: u64,
    #[prost(uint32, tag = "3")]
    pub rank: u32,
    #[prost(uint64, tag = "4")]
    pub from: u64,
    #[prost(fixed32, repeated, tag = "5")]
    pub signatures: Vec<u32>,
}

/// The data types and reductions of a rank's collectives, as far as they are known: a byte each. Beside the
/// signatures and not in them, since ranks may know more or less, and analysers of before read the signatures alone.
#[derive(Clone, PartialEq, Message)]
#[expect(missing_docs, reason = "the fields are those of model::Signatures")]
pub struct Types {
    #[prost(fixed64, tag = "1")]
    pub segment: u64,
    #[prost(fixed64, tag = "2")]
    pub comm: u64,
    #[prost(uint32, tag = "3")]
    pub rank: u32,
    #[prost(uint64, tag = "4")]
    pub from: u64,
    #[prost(bytes = "vec", tag = "5")]
    pub types: Vec<u8>,
}

/// How many transfers a rank has issued to and from another one.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
#[expect(missing_docs, reason = "the fields are those of model::PairBeat")]
pub struct Pair {
    #[prost(fixed64, tag = "1")]
    pub segment: u64,
    #[prost(fixed64, tag = "2")]
    pub comm: u64,
    #[prost(uint32, tag = "3")]
    pub rank: u32,
    #[prost(uint32, tag = "4")]
    pub peer: u32,
    #[prost(uint64, tag = "5")]
    pub sent: u64,
    #[prost(uint64, tag = "6")]
    pub received: u64,
    #[prost(uint64, tag = "7")]
    pub from: u64,
    #[prost(uint64, optional, tag = "8")]
    pub sent_done: Option<u64>,
    #[prost(uint64, optional, tag = "9")]
    pub received_done: Option<u64>,
    #[prost(bool, tag = "10")]
    pub sent_may_run: bool,
    #[prost(bool, tag = "11")]
    pub received_may_run: bool,
    #[prost(bool, tag = "12")]
    pub sent_is_newest: bool,
}

/// One rank's part of an operation.
#[derive(Clone, PartialEq, Message)]
#[expect(missing_docs, reason = "the fields are those of model::Told and model::OpRecord")]
pub struct Record {
    #[prost(fixed64, tag = "1")]
    pub segment: u64,
    #[prost(uint64, tag = "2")]
    pub ticket: u64,
    #[prost(fixed64, tag = "3")]
    pub comm: u64,
    #[prost(uint32, tag = "4")]
    pub rank: u32,
    /// 1 collective, 2 replay, 3 send, 4 receive.
    #[prost(uint32, tag = "5")]
    pub lane: u32,
    #[prost(uint32, tag = "6")]
    pub peer: u32,
    #[prost(uint64, optional, tag = "7")]
    pub order: Option<u64>,
    #[prost(uint32, tag = "8")]
    pub func: u32,
    #[prost(uint32, tag = "9")]
    pub dtype: u32,
    #[prost(uint64, tag = "10")]
    pub count: u64,
    #[prost(uint32, optional, tag = "11")]
    pub root: Option<u32>,
    #[prost(uint32, tag = "12")]
    pub algo: u32,
    #[prost(uint32, tag = "13")]
    pub proto: u32,
    #[prost(uint32, optional, tag = "14")]
    pub channels: Option<u32>,
    #[prost(uint32, optional, tag = "15")]
    pub warps: Option<u32>,
    #[prost(uint64, optional, tag = "16")]
    pub seq: Option<u64>,
    #[prost(uint64, optional, tag = "17")]
    pub plan: Option<u64>,
    /// Bits: captured, in place, copy engine, symmetric, preloaded, grouped.
    #[prost(uint32, tag = "18")]
    pub flags: u32,
    #[prost(fixed64, optional, tag = "19")]
    pub called_ns: Option<u64>,
    #[prost(fixed64, optional, tag = "20")]
    pub returned_ns: Option<u64>,
    #[prost(uint32, tag = "21")]
    pub result: u32,
    #[prost(uint32, tag = "22")]
    pub redop: u32,
    #[prost(fixed64, optional, tag = "23")]
    pub issued_ns: Option<u64>,
    /// 0 not known, 1 kernel, 2 events, 3 and more: why not.
    #[prost(uint32, tag = "24")]
    pub timing: u32,
    #[prost(uint64, optional, tag = "25")]
    pub event_ns: Option<u64>,
    #[prost(fixed64, optional, tag = "26")]
    pub event_seen_ns: Option<u64>,
    #[prost(uint32, tag = "27")]
    pub started: u32,
    #[prost(uint32, tag = "28")]
    pub stopped: u32,
    #[prost(fixed64, optional, tag = "29")]
    pub started_ns: Option<u64>,
    #[prost(uint64, optional, tag = "30")]
    pub duration_ns: Option<u64>,
    #[prost(fixed64, optional, tag = "31")]
    pub ended_seen_ns: Option<u64>,
    #[prost(bool, tag = "32")]
    pub finished: bool,
    #[prost(message, repeated, tag = "33")]
    pub net: Vec<Net>,
}

/// One network transfer of an operation.
#[derive(Clone, PartialEq, Message)]
#[expect(missing_docs, reason = "the fields are those of model::NetProgress")]
pub struct Net {
    #[prost(uint32, tag = "1")]
    pub channel: u32,
    #[prost(uint32, tag = "2")]
    pub peer: u32,
    #[prost(bool, tag = "3")]
    pub is_send: bool,
    #[prost(uint32, tag = "4")]
    pub steps: u32,
    #[prost(uint32, tag = "5")]
    pub started: u32,
    #[prost(uint32, tag = "6")]
    pub done: u32,
    #[prost(uint64, tag = "7")]
    pub bytes: u64,
    #[prost(fixed64, tag = "8")]
    pub start_ns: u64,
    #[prost(fixed64, optional, tag = "9")]
    pub stop_ns: Option<u64>,
    #[prost(uint64, repeated, tag = "10")]
    pub waited_ns: Vec<u64>,
    /// 0 nothing, 1 posted, 2 GPU, 3 peer, 4 wire, 5 flush.
    #[prost(uint32, tag = "11")]
    pub waiting: u32,
    #[prost(fixed64, tag = "12")]
    pub waiting_since_ns: u64,
}

/// The operations of a class on one node in about a second. A transfer from one rank to another is in the
/// sketch of its sender's node.
#[derive(Clone, PartialEq, Message)]
pub struct Sketch {
    /// The communicator.
    #[prost(fixed64, tag = "1")]
    pub comm: u64,
    /// The operation.
    #[prost(uint32, tag = "2")]
    pub func: u32,
    /// `floor(log2(bytes))` + 1; 0 where it is not known.
    #[prost(uint32, tag = "3")]
    pub size_class: u32,
    /// Algorithm.
    #[prost(uint32, tag = "4")]
    pub algo: u32,
    /// Protocol.
    #[prost(uint32, tag = "5")]
    pub proto: u32,
    /// Operations that were over on the node's ranks.
    #[prost(uint64, tag = "6")]
    pub count: u64,
    /// The number of them that were timed on all of these.
    #[prost(uint64, tag = "7")]
    pub timed: u64,
    /// Message bytes of all of them; absent where a size is not known.
    #[prost(uint64, optional, tag = "8")]
    pub bytes: Option<u64>,
    /// Mean time inside, over ranks, of the timed ones together, in ns.
    #[prost(uint64, tag = "9")]
    pub busy_ns: u64,
    /// The shortest time over the node's ranks, by eighths of a power of two: the bucket `floor(8 log2(ns))`.
    #[prost(uint32, repeated, tag = "10")]
    pub buckets: Vec<u32>,
    /// How many there are in each of these buckets.
    #[prost(uint64, repeated, tag = "11")]
    pub counts: Vec<u64>,
    /// The node's lowest rank in the communicator, which speaks for the node.
    #[prost(uint32, tag = "12")]
    pub rank: u32,
    /// How many ranks of the communicator the node has.
    #[prost(uint32, tag = "13")]
    pub ranks: u32,
    /// The second of the host's monotonic clock from which on it counts.
    #[prost(uint64, tag = "14")]
    pub from_s: u64,
    /// Over how many seconds it counts; 0 where an agent of before did not say.
    #[prost(uint32, tag = "15")]
    pub seconds: u32,
    /// True where all ranks of each operation are the node's: the shortest time is the transfer time.
    #[prost(bool, tag = "16")]
    pub whole: bool,
    /// The number of the timed ones that CUDA events timed on some rank.
    #[prost(uint64, tag = "17")]
    pub by_events: u64,
    /// The process of the rank that speaks for the node; absent from releases that did not tell.
    #[prost(fixed64, optional, tag = "18")]
    pub segment: Option<u64>,
}

impl Sketch {
    /// A sketch is over so many seconds at most.
    pub const SECONDS: u32 = 3600;
}

/// The operating system's facts about a process.
#[derive(Clone, PartialEq, Message)]
#[expect(missing_docs, reason = "the fields are those of model::HostFact")]
pub struct Host {
    #[prost(fixed64, tag = "1")]
    pub segment: u64,
    #[prost(fixed64, tag = "2")]
    pub at_ns: u64,
    /// 0 not known, 1 running, 2 sleeping, 3 blocked, 4 stopped, 5 traced, 6 zombie, 7 gone.
    #[prost(uint32, tag = "3")]
    pub state: u32,
    #[prost(string, optional, tag = "4")]
    pub wchan: Option<String>,
    #[prost(sint32, optional, tag = "5")]
    pub exit_code: Option<i32>,
    #[prost(sint32, optional, tag = "6")]
    pub signal: Option<i32>,
    #[prost(double, optional, tag = "7")]
    pub cpu_starved: Option<f64>,
    #[prost(double, optional, tag = "8")]
    pub cpu_throttled: Option<f64>,
    #[prost(double, optional, tag = "9")]
    pub memory_pressure: Option<f64>,
    #[prost(uint64, optional, tag = "10")]
    pub oom_kills: Option<u64>,
    #[prost(string, repeated, tag = "11")]
    pub stack: Vec<String>,
    #[prost(fixed64, optional, tag = "12")]
    pub stack_ns: Option<u64>,
    #[prost(string, repeated, tag = "13")]
    pub threads: Vec<String>,
    #[prost(double, optional, tag = "14")]
    pub nccl_starved: Option<f64>,
    #[prost(double, optional, tag = "15")]
    pub nccl_busy: Option<f64>,
}

/// An agent's accounting since it began: `observed = published + left_out`.
#[derive(Clone, PartialEq, Message)]
pub struct Books {
    /// Operations that were over, each rank's part being one.
    #[prost(uint64, tag = "1")]
    pub observed: u64,
    /// The number of them that were published.
    #[prost(uint64, tag = "2")]
    pub published: u64,
    /// The others, by reason.
    #[prost(message, repeated, tag = "3")]
    pub left_out: Vec<Loss>,
    /// Bytes published.
    #[prost(uint64, tag = "4")]
    pub bytes: u64,
    /// Of a communicator one of `1 << level` operations is published, or `4096 >> level` a second where that is more.
    #[prost(uint32, tag = "5")]
    pub level: u32,
    /// True in the last message of a run: the agent ended as it should.
    #[prost(bool, tag = "6")]
    pub last: bool,
    /// Segments and directories of segments that the agent does not read now.
    #[prost(uint64, tag = "7")]
    pub unread: u64,
    /// True while there may be segments on the node that the agent has not found yet; releases that did not tell count as
    /// those that have searched everything.
    #[prost(bool, tag = "8")]
    pub unsearched: bool,
}

/// How long a process works between operations.
#[derive(Clone, PartialEq, Message)]
#[expect(missing_docs, reason = "the fields are those of model::WorkState")]
pub struct Work {
    #[prost(fixed64, tag = "1")]
    pub segment: u64,
    #[prost(message, repeated, tag = "2")]
    pub seconds: Vec<WorkSecond>,
    #[prost(message, optional, tag = "3")]
    pub long: Option<Call>,
}

/// The work of one second.
#[derive(Clone, Copy, PartialEq, Message)]
#[expect(missing_docs, reason = "the fields are those of model::WorkSecond")]
pub struct WorkSecond {
    #[prost(uint64, tag = "1")]
    pub second: u64,
    #[prost(float, tag = "2")]
    pub took_ns: f32,
    #[prost(float, tag = "3")]
    pub usual_ns: f32,
    #[prost(float, tag = "4")]
    pub error_ns: f32,
    #[prost(float, tag = "5")]
    pub step_ns: f32,
    #[prost(float, tag = "6")]
    pub usual_step_ns: f32,
}

/// How a process keeps to the order of its calls.
#[derive(Clone, PartialEq, Message)]
#[expect(missing_docs, reason = "the fields are those of model::CallState")]
pub struct Calls {
    #[prost(fixed64, tag = "1")]
    pub segment: u64,
    #[prost(message, optional, tag = "2")]
    pub left: Option<Departure>,
    #[prost(fixed64, optional, tag = "3")]
    pub usual_ns: Option<u64>,
    #[prost(message, repeated, tag = "4")]
    pub mixes: Vec<CallMix>,
}

/// How a process mixes transfers and collectives of one communicator.
#[derive(Clone, PartialEq, Message)]
#[expect(missing_docs, reason = "the fields are those of model::Mix")]
pub struct CallMix {
    /// The first collective of `before`.
    #[prost(message, optional, tag = "1")]
    pub first: Option<OperationKey>,
    #[prost(uint32, repeated, tag = "2")]
    pub before: Vec<u32>,
    #[prost(uint32, tag = "3")]
    pub since: u32,
}

/// A call that came in the place of another one.
#[derive(Clone, Copy, PartialEq, Message)]
#[expect(missing_docs, reason = "the fields are those of model::Departure")]
pub struct Departure {
    #[prost(message, optional, tag = "1")]
    pub call: Option<Call>,
    #[prost(message, optional, tag = "2")]
    pub usual: Option<Call>,
    #[prost(uint32, tag = "3")]
    pub times: u32,
    #[prost(bool, tag = "4")]
    pub left_out: bool,
    #[prost(uint64, tag = "5")]
    pub loop_ns: u64,
}

/// One call.
#[derive(Clone, Copy, PartialEq, Message)]
#[expect(missing_docs, reason = "the fields are those of model::Call")]
pub struct Call {
    #[prost(message, optional, tag = "1")]
    pub operation: Option<OperationKey>,
    #[prost(uint32, tag = "2")]
    pub func: u32,
    #[prost(fixed64, tag = "3")]
    pub issued_ns: u64,
}

/// One operation's name.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct OperationKey {
    /// The communicator.
    #[prost(fixed64, tag = "1")]
    pub comm: u64,
    /// 1 collective, 2 replay, 3 from one rank to another.
    #[prost(uint32, tag = "2")]
    pub track: u32,
    /// From which rank.
    #[prost(uint32, tag = "3")]
    pub from: u32,
    /// To which.
    #[prost(uint32, tag = "4")]
    pub to: u32,
    /// The issue order.
    #[prost(uint64, tag = "5")]
    pub order: u64,
    /// The owner of the communicator; absent where that is not known, and from releases that did not report it.
    #[prost(uint32, optional, tag = "6")]
    pub owner: Option<u32>,
}

/// A request of an analyser, or of an operator through one, to agents.
#[derive(Clone, PartialEq, Message)]
pub struct Wish {
    /// [`VERSION`].
    #[prost(uint32, tag = "1")]
    pub version: u32,
    /// Parts of these operations, wherever they are still held.
    #[prost(message, repeated, tag = "2")]
    pub operations: Vec<OperationKey>,
    /// The stack of these processes.
    #[prost(fixed64, repeated, tag = "3")]
    pub stacks: Vec<u64>,
    /// Every operation of a communicator, for some seconds.
    #[prost(message, optional, tag = "4")]
    pub burst: Option<Burst>,
    /// Everything that is usually sent only when it changes: somebody has begun to listen.
    #[prost(bool, tag = "5")]
    pub all: bool,
}

/// More detail of one communicator.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Burst {
    /// The communicator.
    #[prost(fixed64, tag = "1")]
    pub comm: u64,
    /// For how long.
    #[prost(uint32, tag = "2")]
    pub seconds: u32,
    /// The owner of the communicator, as in [`OperationKey`].
    #[prost(uint32, optional, tag = "3")]
    pub owner: Option<u32>,
}
