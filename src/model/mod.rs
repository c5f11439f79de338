//! What Ringwatch knows, as plain data: no I/O, no clock reads, no threads.
//!
//! The model knows nobody. Ingest fills it from segments, join matches it across ranks, detect
//! judges it, and views and exporters show it.

mod finding;
mod fleet;
mod hardware;
mod host;
mod ids;
mod nic;
mod op;
mod snapshot;
mod spare;
mod update;

pub use finding::{
    COMM_INIT, Cause, Confidence, Evidence, Finding, FindingId, Kind, OperationRef, Place, Severity, Victims,
    rank_list,
};
pub use fleet::{At, Fleet, NodeCell, NodeState, Rest, Totals};
pub use hardware::{
    Alarm, AlarmKind, Fact, GpuFact, Holder, InterfaceFact, LinkFact, Moved, NodeFact, PcieFact, PeerFact,
    PodsFact, PortFact, Reading, Remote, SamplerFact, Throttle, Traffic, Xid, pci_address,
};
pub use host::{Exit, HostFact, ProcessState};
pub use ids::{CommId, Rank, SegmentId, Track};
pub use nic::{NicTrouble, nic_counter};
pub use op::{
    Algo, ChannelStamp, DataType, Flags, Func, Lane, Launch, NetPhase, NetProgress, OpRecord, Proto, RedOp,
    Returned, Timing, Untimed, bus_factor, message_bytes, size_text,
};
pub use snapshot::{
    ClassRow, CommRow, Coverage, FlightRow, JobRow, JobSums, LossRow, OpState, RankCell, RankRow, SegmentRow,
    Snapshot,
};
pub use spare::Spare;
pub use update::{
    Beat, CommRecord, Exchange, Job, Liveness, Making, PairBeat, SegmentRecord, Signatures, Sink, Sketch,
    Source, Told, Update,
};
