//! Logs of the callback recorder, which are text.

use crate::plain;
use ringwatch::replay::Trace;

pub(super) fn check(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    match Trace::parse_logs([("rank0", &*text), ("rank1", "")]) {
        Ok(trace) => {
            let written = trace.ranks[0].to_log();
            let again = Trace::parse_logs([("rank0", &*written), ("rank1", "")]);
            assert_eq!(again.as_ref(), Ok(&trace), "it reads as it was written");
            assert_eq!(Trace::decode(&trace.encode()).as_ref(), Ok(&trace), "and in the compact form");
        }
        Err(e) => plain::text("the error", &e.to_string(), 200 * "\\u{10ffff}".len() + 200),
    }
}
