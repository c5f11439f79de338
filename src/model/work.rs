//! The time that a process works between operations.

use super::{Call, SegmentId};

/// The work of one second.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct WorkSecond {
    /// The second, by the host's monotonic clock.
    pub second: u64,
    /// How long the process worked, in ns.
    pub took_ns: f32,
    /// How long that usually takes it, in ns.
    pub usual_ns: f32,
    /// By how much the usual time may be wrong, as a standard deviation in ns.
    pub error_ns: f32,
    /// The same two times from the start of the operation before the work, with what the process waited in that.
    pub step_ns: f32,
    pub usual_step_ns: f32,
}

/// How long a process works between operations.
#[derive(Debug, Clone, PartialEq)]
pub struct WorkState {
    /// The process.
    pub segment: SegmentId,
    /// The seconds that are over, the oldest one first.
    pub seconds: Vec<WorkSecond>,
    /// The operation before which it last worked longer than usual, and when that started.
    pub long: Option<Call>,
}
