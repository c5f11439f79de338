//! Settings from the environment, read once, at the first init.
//!
//! | variable | meaning | default |
//! |---|---|---|
//! | `RINGWATCH_DIR` | directory of the segments | `/dev/shm/ringwatch-<uid>` |
//! | `RINGWATCH_SEGMENT_BYTES` | largest segment, in bytes | about 4 MiB, and at most an eighth of what is free |

use crate::log::{Log, Message};
use crate::sys::variable;
use core::ffi::CStr;

/// Longest directory that is accepted, so that a file name still fits behind it.
const DIR_MAX: usize = 3900;

/// What the user asked for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Settings {
    /// The directory, where the user named one.
    pub(crate) dir: Option<&'static CStr>,
    /// Largest segment in bytes, where the user named it.
    pub(crate) bytes: Option<u64>,
}

fn number(text: &CStr) -> Option<u64> {
    let mut n = 0u64;
    for b in text.to_bytes() {
        if !b.is_ascii_digit() {
            return None;
        }
        n = n.checked_mul(10)?.checked_add(u64::from(b - b'0'))?;
    }
    Some(n)
}

impl Settings {
    pub(crate) fn from_environment(log: &Log) -> Self {
        let mut dir = variable(c"RINGWATCH_DIR");
        if dir.is_some_and(|d| d.count_bytes() > DIR_MAX) {
            log.say(Message::DirectoryTooLong);
            dir = None;
        }
        let asked = variable(c"RINGWATCH_SEGMENT_BYTES");
        let bytes = asked.and_then(number);
        if asked.is_some() && bytes.is_none() {
            log.say(Message::BadSegmentBytes);
        }
        Settings { dir, bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_whole_or_not_at_all() {
        assert_eq!(number(c"1048576"), Some(1 << 20));
        for bad in [c"4M", c"-1", c"1e6", c"99999999999999999999"] {
            assert_eq!(number(bad), None, "{bad:?}");
        }
    }
}
