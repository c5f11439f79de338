//! What py-spy and eu-stack print about a process, whose functions and files have the names that its user gave them.

use crate::plain;
use ringwatch::ingest::parsers::{native_frames, python_frames};

/// Frames of one answer.
const FRAMES_MAX: usize = 64;
/// The longest of them, in bytes: two names of 256 characters, each written as an escape.
const FRAME_MAX: usize = 2 * 256 * "\\u{10ffff}".len() + 64;

fn frames(all: &[String]) {
    assert!(all.len() <= FRAMES_MAX, "{} frames", all.len());
    all.iter().for_each(|f| plain::text("a frame", f, FRAME_MAX));
}

pub(super) fn py_spy(bytes: &[u8]) {
    python_frames(bytes).iter().for_each(|all| frames(all));
}

pub(super) fn eu_stack(bytes: &[u8]) {
    frames(&native_frames(bytes));
}
