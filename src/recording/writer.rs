//! Writes a recording.

use super::operations;
use super::wal::{self, Log};
use super::{BlockFile, FindingFrame, Frame, Message, number_of};
use crate::cluster::message::{Envelope, Record};
use crate::cluster::{Moment, Outgoing};
use crate::columns::{Cell, Head, Table, Type};
use crate::model::{self, Change, FindingEvent};
use prost::Message as _;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

pub(super) const MESSAGES: &[Head] = &[
    ("message", Type::Number),
    ("recorded", Type::Time),
    ("monotonic_ns", Type::Number),
    ("host", Type::Text),
    ("topic", Type::Word),
    ("body", Type::Bytes),
];

const FINDINGS: &[Head] = &[
    ("recorded", Type::Time),
    ("change", Type::Text),
    ("id", Type::Text),
    ("kind", Type::Text),
    ("severity", Type::Text),
    ("communicator", Type::Text),
    ("communicator_name", Type::Text),
    ("ranks", Type::Text),
    ("operation", Type::Text),
    ("issue_order", Type::Number),
    ("finding", Type::Text),
];

/// A recording of the greatest size has so many blocks at least, so that little goes with one.
const BLOCKS_MIN: u64 = 8;
const BLOCK_BYTES_MIN: u64 = 64 << 10;

/// The size and the age of a recording and of its blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of all files; beyond, the oldest blocks are removed.
    pub bytes: u64,
    /// Blocks older than this are removed.
    pub age: Duration,
    /// Bytes of a log that make it a block.
    pub block_bytes: u64,
    /// The time after which a log becomes a block, whatever it holds.
    pub block_age: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            bytes: 16 << 30,
            age: Duration::from_secs(7 * 24 * 3600),
            block_bytes: 8 << 20,
            block_age: Duration::from_secs(600),
        }
    }
}

/// A recording that is being written.
#[derive(Debug)]
pub struct Writer {
    dir: PathBuf,
    limits: Limits,
    block: u32,
    log: Log,
    began: Option<Moment>,
}

impl Writer {
    /// Begins a recording in a new or an empty directory.
    ///
    /// # Errors
    /// The directory cannot be made, holds something, or is open to others.
    pub fn create(dir: &Path, limits: Limits) -> io::Result<Self> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        let about = fs::metadata(dir)?;
        if about.uid() != rustix::process::geteuid().as_raw() || about.mode() & 0o022 != 0 {
            // Another user could plant links in it, and have root write over other files.
            let why = "others may write into the directory; name one of your own, without write permission for others";
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        }
        if fs::read_dir(dir)?.next().is_some() {
            let why = "the directory is not empty; name a new one for each recording";
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, why));
        }
        let log = Log::create(&BlockFile::Log.path(dir, 1))?;
        let block_bytes = limits.block_bytes.min(limits.bytes / BLOCKS_MIN).max(BLOCK_BYTES_MIN);
        let limits = Limits { block_bytes, ..limits };
        Ok(Writer { dir: dir.to_owned(), limits, block: 1, log, began: None })
    }

    /// Takes what was reported at a moment. Returns true when a new block has begun: what is sent only when it changes has to be
    /// sent again, since older blocks may be removed.
    ///
    /// # Errors
    /// It cannot be written: what was written before can be read.
    pub fn take(&mut self, at: Moment, messages: Vec<Outgoing>, events: &[FindingEvent]) -> io::Result<bool> {
        for Outgoing { topic, bytes, .. } in messages {
            self.log.append(&Frame::Message(Message { at, topic, bytes }))?;
        }
        for event in events {
            let json = serde_json::to_vec(&Changed { change: event.change, finding: event.finding.clone() })?;
            self.log.append(&Frame::Finding(FindingFrame { at, json }))?;
        }
        self.log.flush()?;
        let began = *self.began.get_or_insert(at);
        let age = Duration::from_nanos(at.mono_ns.saturating_sub(began.mono_ns));
        if self.log.bytes() < self.limits.block_bytes && age < self.limits.block_age {
            return Ok(false);
        }
        self.close_block()?;
        self.block = self.block.checked_add(1).ok_or_else(|| io::Error::other("it has too many blocks"))?;
        self.log = Log::create(&BlockFile::Log.path(&self.dir, self.block))?;
        self.began = None;
        self.remove_old(at);
        Ok(true)
    }

    /// Closes the recording.
    ///
    /// # Errors
    /// The last block cannot be written: its log can be read.
    pub fn end(mut self) -> io::Result<()> {
        self.close_block()
    }

    /// Makes a block of the log. The log goes once all files of the block have their names.
    fn close_block(&mut self) -> io::Result<()> {
        self.log.flush()?;
        let log = BlockFile::Log.path(&self.dir, self.block);
        let (frames, rest) = wal::read(&fs::read(&log)?);
        if rest > 0 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the log does not read as it was written",
            ));
        }
        let [messages, operations, findings] = tables(frames)?;
        let result = [
            (BlockFile::Operations, operations::NAME, operations),
            (BlockFile::Findings, "findings", findings),
            (BlockFile::Messages, "messages", messages),
        ]
        .map(|(file, name, table)| {
            let path = file.path(&self.dir, self.block);
            let draft = path.with_extension("draft");
            let written = table.write(name, &draft);
            if written.is_err() {
                // A half-made file would take the room of what is still to come.
                fs::remove_file(&draft).ok();
            }
            written.map(|()| (draft, path))
        });
        for written in result {
            let (draft, path) = written?;
            fs::rename(draft, path)?;
        }
        fs::File::open(&self.dir)?.sync_all()?;
        fs::remove_file(log)
    }

    /// Removes blocks that are too old, or the oldest of too many. What cannot be removed stays.
    fn remove_old(&self, now: Moment) {
        let mut blocks: BTreeMap<u32, OldBlock> = BTreeMap::new();
        for entry in fs::read_dir(&self.dir).into_iter().flatten().filter_map(Result::ok) {
            let Some((file, block)) = entry.file_name().to_str().and_then(BlockFile::parse) else { continue };
            let Ok(about) = entry.metadata() else { continue };
            let written = about.modified().ok().and_then(|t| t.duration_since(UNIX_EPOCH).ok());
            let written_ns = written.and_then(|d| u64::try_from(d.as_nanos()).ok()).unwrap_or(0);
            let of = blocks.entry(block).or_default();
            of.bytes += about.len();
            of.files.push(file);
            of.written_ns = of.written_ns.max(written_ns);
        }
        let mut bytes: u64 = blocks.values().map(|b| b.bytes).sum();
        let age_ns = u64::try_from(self.limits.age.as_nanos()).unwrap_or(u64::MAX);
        let oldest_ns = now.unix_ns.saturating_sub(age_ns);
        for (number, block) in blocks.range_mut(..self.block) {
            if bytes <= self.limits.bytes && block.written_ns >= oldest_ns {
                break;
            }
            // Without its messages a block is none, so that they go first.
            block.files.sort_by_key(|file| *file != BlockFile::Messages);
            for file in &block.files {
                fs::remove_file(file.path(&self.dir, *number)).ok();
            }
            bytes -= block.bytes;
        }
    }
}

/// A block that may be removed.
#[derive(Debug, Default)]
struct OldBlock {
    bytes: u64,
    files: Vec<BlockFile>,
    written_ns: u64,
}

/// The messages, the operations and the findings of a log.
fn tables(frames: Vec<Frame>) -> io::Result<[Table; 3]> {
    let mut messages = Table::new(MESSAGES);
    let mut findings = Table::new(FINDINGS);
    let (mut records, mut n) = (Vec::new(), 0);
    for frame in frames {
        let message = match frame {
            Frame::Message(message) => message,
            Frame::Finding(finding) => {
                push_finding(&mut findings, &finding);
                continue;
            }
        };
        let mut envelope = Envelope::decode(message.bytes.as_slice()).map_err(io::Error::other)?;
        let host: Arc<str> = envelope.node.as_str().into();
        let of = std::mem::take(&mut envelope.records);
        records.extend(of.into_iter().map(|record| (Arc::clone(&host), n, message.at, record)));
        messages.push([
            Cell::Number(i64::try_from(n).ok()),
            Cell::Number(i64::try_from(message.at.unix_ns).ok()),
            Cell::Number(i64::try_from(message.at.mono_ns).ok()),
            Cell::Text(Some(&host)),
            Cell::Number(Some(number_of(message.topic))),
            Cell::Bytes(Some(envelope.encode_to_vec())),
        ]);
        n += 1;
    }
    // The operations of a rank follow each other: so its times are small steps from row to row.
    let key = |(host, n, _, r): &(Arc<str>, usize, Moment, Record)| {
        (Arc::clone(host), r.segment, r.comm, r.rank, r.lane, r.peer, r.ticket, *n)
    };
    records.sort_by_cached_key(key);
    let of = |(host, _, _, r): &(Arc<str>, usize, Moment, Record)| {
        (Arc::clone(host), r.segment, r.comm, r.rank, r.lane, r.peer, r.ticket)
    };
    let is_latest: Vec<bool> = (0..records.len())
        .map(|at| records.get(at + 1).is_none_or(|next| of(next) != of(&records[at])))
        .collect();
    let mut operations = Table::new(operations::HEADS);
    for ((host, n, at, record), is_latest) in records.into_iter().zip(is_latest) {
        operations::push(&mut operations, (n, is_latest), &host, at, record);
    }
    Ok([messages, operations, findings])
}

/// A change of a finding, as the log keeps it.
#[derive(Debug, Serialize, Deserialize)]
struct Changed {
    change: Change,
    #[serde(flatten)]
    finding: model::Finding,
}

/// Adds a finding of the log. One that does not read is of a release with other kinds, and is kept as it is.
fn push_finding(table: &mut Table, FindingFrame { at, json }: &FindingFrame) {
    let read: Option<Changed> = serde_json::from_slice(json).ok();
    let f = read.as_ref().map(|c| &c.finding);
    let change = read.as_ref().map(|c| match c.change {
        Change::Opened => "opened",
        Change::Updated => "updated",
        Change::Closed => "closed",
    });
    let ranks = f.map(|f| f.ranks.iter().map(|r| r.0.to_string()).collect::<Vec<_>>().join(" "));
    table.push([
        Cell::Number(i64::try_from(at.unix_ns).ok()),
        Cell::Text(change),
        Cell::Text(f.map(|f| f.id.to_string()).as_deref()),
        Cell::Text(f.map(|f| f.kind.as_str())),
        Cell::Text(f.map(|f| f.severity.as_str())),
        Cell::Text(f.map(|f| f.communicator.to_string()).as_deref()),
        Cell::Text(f.and_then(|f| f.communicator_name.as_deref())),
        Cell::Text(ranks.as_deref()),
        Cell::Text(f.map(|f| f.operation.func.as_str())),
        Cell::Number(f.and_then(|f| i64::try_from(f.operation.order).ok())),
        Cell::Bytes(Some(json.clone())),
    ]);
}
