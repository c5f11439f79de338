//! The compact form of a recording.
//!
//! `RWTRACE\0`, the format version as a little-endian `u32`, then a deflated body. The body is a
//! table of the names used, then the ranks: label, pid, thread ids, events. All numbers are LEB128
//! varints. Within a rank, times, handles and GPU stamps are written as signed steps (zigzag) from
//! the one before, all in wrapping arithmetic, so that every value survives. An event is
//! a tag, the thread's index, the step in time, and the fields in the order of [`super::Descriptor`];
//! names are indices into the table.
//!
//! A trace may come from anywhere, so reading is total: errors, never panics, and memory bounded by
//! [`MAX_BODY`] and the other limits here, to 64 MiB, whatever the file claims.

mod read;
mod write;

use super::trace::{Trace, TraceError};

/// First bytes of every trace.
pub const MAGIC: [u8; 8] = *b"RWTRACE\0";
/// Version of the format that this build writes, and the only one it reads.
pub const FORMAT_VERSION: u32 = 1;

/// Largest inflated body in bytes: ten times the largest recording, yet harmless to inflate.
const MAX_BODY: usize = 16 << 20;
/// Most events in one trace, since an event is far larger in memory than in the body: seven times the largest recording.
const MAX_EVENTS: usize = 1 << 18;
/// Most names and ranks in one trace, and threads of all ranks, which are larger in memory too.
const MAX_NAMES: usize = 1 << 14;
const MAX_RANKS: usize = 1 << 14;
const MAX_ALL_THREADS: usize = 1 << 18;
/// Most threads of one rank, since a player starts them all.
const MAX_THREADS: usize = 1 << 10;
/// Strongest compression: fixtures are written once and carried in the binary for ever.
const LEVEL: u8 = 10;

const KERNEL_CH_STOP: u32 = 22;
/// Added to a start's tag when it has a parent.
const HAS_PARENT: u8 = 0x80;

mod tag {
    pub(super) const INIT: u8 = 0;
    pub(super) const STOP: u8 = 1;
    pub(super) const STATE: u8 = 2;
    pub(super) const STATE_ARG: u8 = 3;
    pub(super) const FINALIZE: u8 = 4;
    pub(super) const GROUP_API: u8 = 16;
    pub(super) const COLL_API: u8 = 17;
    pub(super) const P2P_API: u8 = 18;
    pub(super) const KERNEL_LAUNCH: u8 = 19;
    pub(super) const GROUP: u8 = 20;
    pub(super) const COLL: u8 = 21;
    pub(super) const P2P: u8 = 22;
    pub(super) const KERNEL_CH: u8 = 23;
    pub(super) const PROXY_OP: u8 = 24;
    pub(super) const PROXY_STEP: u8 = 25;
    pub(super) const OTHER: u8 = 26;
}

impl Trace {
    /// The compact form of this recording.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let body = write::body(self);
        let mut out = MAGIC.to_vec();
        out.extend_from_slice(&FORMAT_VERSION.to_le_bytes());
        out.extend(miniz_oxide::deflate::compress_to_vec(&body, LEVEL));
        out
    }

    /// Reads the compact form.
    ///
    /// # Errors
    /// Whatever the bytes, an error and never a panic: see [`TraceError`].
    pub fn decode(bytes: &[u8]) -> Result<Self, TraceError> {
        let rest = bytes.strip_prefix(&MAGIC).ok_or(TraceError::NotATrace)?;
        let (version, deflated) = rest.split_first_chunk::<4>().ok_or(TraceError::NotATrace)?;
        let found = u32::from_le_bytes(*version);
        if found != FORMAT_VERSION {
            return Err(TraceError::Version { found, known: FORMAT_VERSION });
        }
        let body = miniz_oxide::inflate::decompress_to_vec_with_limit(deflated, MAX_BODY)
            .map_err(|error| TraceError::Inflate(format!("{:?}", error.status)))?;
        read::body(&body)
    }
}

/// The values that others are coded relative to; reset for each rank.
#[derive(Default)]
struct Before {
    at_ns: u64,
    handle: u64,
    stamp_ns: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::trace::{Call, Descriptor, Event, RankTrace};

    fn rank(events: Vec<Event>) -> Trace {
        Trace { ranks: vec![RankTrace { label: "rank0".into(), pid: 7, threads: vec![7, 9], events }] }
    }

    #[test]
    fn extreme_values_survive() {
        let extreme = [0, 1, u64::MAX, 1 << 63, (1 << 63) - 1, 5];
        let mut events = Vec::new();
        for (index, &value) in extreme.iter().enumerate() {
            let thread = (index % 2) as u16;
            let mut push = |call| events.push(Event { at_ns: value, thread, call });
            push(Call::Start {
                handle: value,
                ctx: value,
                parent: !value,
                descriptor: Descriptor::Other(value),
            });
            push(Call::Start { handle: !value, ctx: 0, parent: value, descriptor: Descriptor::Group });
            push(Call::State { handle: value, state: 22, arg: Some(value) });
            push(Call::State { handle: value, state: u32::MAX, arg: Some(!value) });
            push(Call::State { handle: value, state: 22, arg: None });
            push(Call::Init {
                ctx: value,
                comm_id: value,
                name: (index == 1).then(|| "dp".into()),
                nodes: i32::MIN,
                ranks: i32::MAX,
                rank: -1,
            });
            push(Call::Finalize { ctx: value });
        }
        let trace = rank(events);
        assert_eq!(Trace::decode(&trace.encode()), Ok(trace));
    }

    #[test]
    fn other_files_and_versions_are_refused_by_name() {
        assert_eq!(Trace::decode(b""), Err(TraceError::NotATrace));
        assert_eq!(Trace::decode(b"RWTRACE\0\x01"), Err(TraceError::NotATrace));
        let mut later = rank(vec![]).encode();
        later[8] = 2;
        assert_eq!(Trace::decode(&later), Err(TraceError::Version { found: 2, known: 1 }));
    }

    fn with_body(body: &[u8]) -> Result<Trace, TraceError> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(&FORMAT_VERSION.to_le_bytes());
        bytes.extend(miniz_oxide::deflate::compress_to_vec(body, 6));
        Trace::decode(&bytes)
    }

    #[test]
    fn claims_beyond_the_body_are_refused_before_memory_is_taken() {
        // No names, one rank, empty label, pid 1, one thread, and 2^62 events.
        let mut body = vec![0, 1, 0, 1, 1, 7];
        body.extend([0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x3f]);
        assert_eq!(with_body(&body), Err(TraceError::Corrupt { what: "count of events", at: body.len() }));
        assert!(matches!(with_body(&vec![0; MAX_BODY + 1]), Err(TraceError::Inflate(_))));
    }

    #[test]
    fn a_thread_out_of_range_and_bytes_at_the_end_are_refused() {
        assert_eq!(
            with_body(&[0, 1, 0, 1, 1, 7, 1, tag::STOP, 1, 0, 0]),
            Err(TraceError::Corrupt { what: "thread", at: 9 })
        );
        assert_eq!(with_body(&[0, 0, 0]), Err(TraceError::Corrupt { what: "end", at: 2 }));
    }
}
