//! Ringwatch's facts as plain data: no I/O, no clock reads, no threads.
//!
//! The model knows nobody. Ingest fills it from segments, join matches it across ranks, detect
//! judges it, and views and exporters show it.

mod call;
mod cost;
mod finding;
mod fleet;
mod hardware;
mod host;
mod ids;
mod kind;
mod nic;
mod op;
mod snapshot;
mod spare;
mod text;
mod unread;
mod update;
mod work;

pub use call::{Call, CallKind, CallState, Departure, Mix};
pub use cost::{JobCost, Loss};
pub use finding::{
    COMM_INIT, Cause, Evidence, Finding, FindingEvent, FindingId, OperationRef, Place, TimedFinding, Victims,
    rank_list,
};
pub use fleet::{At, Fleet, NodeCell, NodeState, Rest, Totals};
pub use hardware::{
    Alarm, AlarmKind, Fact, GpuFact, Holder, InterfaceFact, LinkFact, Moved, NodeFact, PcieFact, PeerFact,
    PodsFact, PortFact, Reading, Remote, SamplerFact, Throttle, Traffic, Xid, pci_address,
};
pub use host::{Exit, HostFact, ProcessState};
pub use ids::{CommId, Rank, SegmentId, Track};
pub use kind::{Change, CloseReason, Confidence, Kind, Severity};
pub use nic::{NicTrouble, nic_counter};
pub use op::{
    Algo, ChannelStamp, DataType, Flags, Func, Lane, Launch, NetPhase, NetProgress, OpRecord, Proto, RedOp,
    Returned, Timing, Untimed, bus_factor, message_bytes, size_text,
};
pub(crate) use snapshot::is_zero;
pub use snapshot::{
    ClassRow, CommRow, Coverage, FlightRow, JobRow, JobSums, LossRow, OpState, RankCell, RankRow, SegmentRow,
    SlowStep, Snapshot, StepPoint, StepRow,
};
pub use spare::Spare;
pub use text::steers;
pub use unread::{Unread, UnreadReason};
#[cfg(test)]
pub(crate) use update::UNRECORDED;
pub use update::{
    BEYOND_MEMORY, Beat, Begun, CommRecord, Exchange, Job, Liveness, Making, ONE_SIDED, OPERATIONS, PairBeat,
    RulesState, SegmentRecord, Signatures, Sink, Sketch, Source, Told, TunerRules, UNCOUNTED, Update,
    hides_operations, missed_reason,
};
pub use work::{WorkSecond, WorkState};
