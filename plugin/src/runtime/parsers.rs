//! Parsers of the environment, of file names and of /proc, apart from how these are read: for the fuzz targets in the
//! workspace's `tests/fuzz`.

use crate::runtime::segment_name::SegmentName;
use crate::runtime::{process, settings};
use core::ffi::CStr;

/// A share like `0.25%`, in millionths.
pub fn share(text: &CStr) -> Option<u64> {
    settings::share(text)
}

/// A number of digits alone.
pub fn number(text: &CStr) -> Option<u64> {
    settings::number(text)
}

/// Pid, start in clock ticks and nonce in the name of a segment's file, if [`segment_name`] writes it the same.
pub fn parse_segment_name(name: &CStr) -> Option<(u32, u64, u64)> {
    SegmentName::parse(name).map(|n| (n.pid, n.start_ticks, n.nonce))
}

/// Writes the name of a segment's file: its bytes, and how many they are.
pub fn segment_name(pid: u32, start_ticks: u64, nonce: u64) -> ([u8; 64], usize) {
    let mut bytes = [0; 64];
    let text = SegmentName { pid, start_ticks, nonce }.text();
    let name = text.as_c().to_bytes();
    for (place, b) in bytes.iter_mut().zip(name) {
        *place = *b;
    }
    (bytes, name.len())
}

/// State and start in clock ticks in a process's `stat` file.
pub fn process_stat(text: &[u8]) -> Option<(u8, u64)> {
    process::parse_stat(text).map(|s| (s.state, s.start_ticks))
}
