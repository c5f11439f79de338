//! Recordings: everything that a job's ranks reported, in files that other programs read as well.
//!
//! A recording is a directory. It holds messages of the cluster's bus, which a playback reads as an analyser does. Messages are first
//! appended to a log. When the log is long enough it becomes a block: Parquet files with the operations, the findings, and the
//! messages without their operations.
//! ```text
//! operations-00001.parquet  findings-00001.parquet  messages-00001.parquet     a block
//! open-00002.wal                                                               the log
//! ```
//! The file of messages is the last that a block gets, and then its log is removed. So each number has one or the other at any
//! moment.

mod operations;
mod playback;
mod wal;
mod writer;

pub use playback::{Error, Playback};
pub use writer::{Limits, Writer};

use crate::cluster::Moment;
use crate::cluster::subject::Topic;
use std::path::{Path, PathBuf};

/// A message, and when it was recorded.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Message {
    at: Moment,
    topic: Topic,
    bytes: Vec<u8>,
}

/// A change of a finding, as JSON, and when it was recorded.
#[derive(Debug, Clone, PartialEq, Eq)]
struct FindingFrame {
    at: Moment,
    json: Vec<u8>,
}

/// The contents of a log.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Frame {
    Message(Message),
    Finding(FindingFrame),
}

/// The files of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BlockFile {
    Operations,
    Findings,
    Messages,
    Log,
}

impl BlockFile {
    const ALL: [BlockFile; 4] =
        [BlockFile::Operations, BlockFile::Findings, BlockFile::Messages, BlockFile::Log];

    const fn affixes(self) -> (&'static str, &'static str) {
        match self {
            BlockFile::Operations => ("operations-", ".parquet"),
            BlockFile::Findings => ("findings-", ".parquet"),
            BlockFile::Messages => ("messages-", ".parquet"),
            BlockFile::Log => ("open-", ".wal"),
        }
    }

    fn path(self, dir: &Path, block: u32) -> PathBuf {
        let (before, after) = self.affixes();
        dir.join(format!("{before}{block:05}{after}"))
    }

    /// The kind and the block of a file with this name.
    fn parse(name: &str) -> Option<(BlockFile, u32)> {
        BlockFile::ALL.into_iter().find_map(|file| {
            let (before, after) = file.affixes();
            let number = name.strip_prefix(before)?.strip_suffix(after)?;
            Some((file, number.parse().ok()?))
        })
    }
}

/// The topic of a message by its number in a table.
fn topic_of(number: i64) -> Option<Topic> {
    match number {
        -1 => Some(Topic::Node),
        n => u8::try_from(n).ok().map(Topic::Bucket),
    }
}

fn number_of(topic: Topic) -> i64 {
    match topic {
        Topic::Node => -1,
        Topic::Bucket(n) => i64::from(n),
    }
}
