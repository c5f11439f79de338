//! The messages of Perfetto's protobuf that are written. The numbers are fields of its `.proto` files.

use prost::{Enumeration, Message, Oneof};

/// `TracePacket`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Packet {
    #[prost(message, optional, tag = "6")]
    pub(super) clock_snapshot: Option<ClockSnapshot>,
    #[prost(uint64, optional, tag = "8")]
    pub(super) timestamp: Option<u64>,
    #[prost(uint32, optional, tag = "10")]
    pub(super) sequence: Option<u32>,
    #[prost(message, optional, tag = "11")]
    pub(super) event: Option<TrackEvent>,
    #[prost(uint32, optional, tag = "13")]
    pub(super) sequence_flags: Option<u32>,
    #[prost(message, optional, tag = "60")]
    pub(super) track: Option<TrackDescriptor>,
}

/// `ClockSnapshot`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct ClockSnapshot {
    #[prost(message, repeated, tag = "1")]
    pub(super) clocks: Vec<Clock>,
}

/// `ClockSnapshot.Clock`. A zero is written as well.
#[derive(Clone, Copy, PartialEq, Message)]
pub(super) struct Clock {
    #[prost(uint32, tag = "1")]
    pub(super) clock_id: u32,
    #[prost(uint64, tag = "2")]
    pub(super) timestamp: u64,
}

/// `TrackDescriptor`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct TrackDescriptor {
    #[prost(uint64, tag = "1")]
    pub(super) uuid: u64,
    #[prost(string, tag = "2")]
    pub(super) name: String,
    #[prost(uint64, optional, tag = "5")]
    pub(super) parent: Option<u64>,
    #[prost(message, optional, tag = "8")]
    pub(super) counter: Option<Counter>,
}

/// `CounterDescriptor`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Counter {
    #[prost(string, tag = "6")]
    pub(super) unit_name: String,
}

/// `TrackEvent.Type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub(super) enum EventKind {
    Unspecified = 0,
    Begin = 1,
    End = 2,
    Instant = 3,
    Counter = 4,
}

/// `TrackEvent`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct TrackEvent {
    #[prost(message, repeated, tag = "4")]
    pub(super) annotations: Vec<Annotation>,
    #[prost(enumeration = "EventKind", tag = "9")]
    pub(super) kind: i32,
    #[prost(uint64, tag = "11")]
    pub(super) track: u64,
    #[prost(string, repeated, tag = "22")]
    pub(super) categories: Vec<String>,
    #[prost(string, optional, tag = "23")]
    pub(super) name: Option<String>,
    #[prost(double, optional, tag = "44")]
    pub(super) counter: Option<f64>,
    #[prost(fixed64, repeated, packed = "false", tag = "47")]
    pub(super) flows: Vec<u64>,
}

impl TrackEvent {
    pub(super) fn of(kind: EventKind, track: u64) -> Self {
        TrackEvent { kind: kind.into(), track, ..TrackEvent::default() }
    }
}

/// `DebugAnnotation`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Annotation {
    #[prost(string, tag = "10")]
    pub(super) name: String,
    #[prost(oneof = "Value", tags = "3, 5, 6")]
    pub(super) value: Option<Value>,
}

/// The value of an annotation.
#[derive(Clone, PartialEq, Oneof)]
pub(super) enum Value {
    #[prost(uint64, tag = "3")]
    Number(u64),
    #[prost(double, tag = "5")]
    Real(f64),
    #[prost(string, tag = "6")]
    Text(String),
}

impl Annotation {
    pub(super) fn text(name: &str, value: &str) -> Self {
        Annotation { name: name.to_owned(), value: Some(Value::Text(value.to_owned())) }
    }

    pub(super) fn number(name: &str, value: u64) -> Self {
        Annotation { name: name.to_owned(), value: Some(Value::Number(value)) }
    }

    pub(super) fn real(name: &str, value: f64) -> Self {
        Annotation { name: name.to_owned(), value: Some(Value::Real(value)) }
    }
}
