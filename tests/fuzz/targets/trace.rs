//! Recorded jobs, as files and as the body behind the compression.

use ringwatch::replay::{FORMAT_VERSION, MAGIC, Trace};

/// Events of a trace that is written and read again.
const ROUND_TRIP_MAX: usize = 1 << 12;

/// Bytes that begin as a trace are one; any others are the body of one, which nobody reaches by damaging a compressed
/// stream.
pub(super) fn check(bytes: &[u8]) {
    let file = if bytes.starts_with(&MAGIC) {
        bytes.to_vec()
    } else {
        let body = miniz_oxide::deflate::compress_to_vec(bytes, 0);
        [&MAGIC[..], &FORMAT_VERSION.to_le_bytes(), &body].concat()
    };
    match Trace::decode(&file) {
        // Twice as much would be held, and more than one input may.
        Ok(trace) if trace.event_count() > ROUND_TRIP_MAX => {}
        Ok(trace) => {
            let period = trace.timeline().period_ns;
            assert!(period > 0, "a loop takes no time");
            assert_eq!(Trace::decode(&trace.encode()).as_ref(), Ok(&trace), "it reads as it was written");
        }
        Err(e) => super::plain::text("the error", &e.to_string(), 512),
    }
}
