//! Writes a recording.

use super::operations;
use super::table::{Cell, Head, Table, Type};
use super::wal::{self, Log};
use super::{File, Finding, Frame, Message, number_of};
use crate::cluster::message::Envelope;
use crate::cluster::{Moment, Outgoing};
use crate::model::{self, Change, FindingEvent};
use prost::Message as _;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

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
            block_bytes: 32 << 20,
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
    /// The directory cannot be made, or holds something.
    pub fn create(dir: &Path, limits: Limits) -> io::Result<Self> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        if fs::read_dir(dir)?.next().is_some() {
            let why = "the directory is not empty; name a new one for each recording";
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, why));
        }
        let log = Log::create(&File::Log.path(dir, 1))?;
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
            self.log.append(&Frame::Finding(Finding { at, json }))?;
        }
        self.log.flush()?;
        let began = *self.began.get_or_insert(at);
        let age = Duration::from_nanos(at.mono_ns.saturating_sub(began.mono_ns));
        if self.log.bytes() < self.limits.block_bytes && age < self.limits.block_age {
            return Ok(false);
        }
        self.close_block()?;
        self.block = self.block.checked_add(1).ok_or_else(|| io::Error::other("it has too many blocks"))?;
        self.log = Log::create(&File::Log.path(&self.dir, self.block))?;
        self.began = None;
        self.remove_old(at)?;
        Ok(true)
    }

    /// Closes the recording.
    ///
    /// # Errors
    /// The last block cannot be written: its log can be read.
    pub fn end(mut self) -> io::Result<()> {
        self.close_block()
    }

    /// Makes a block of the log.
    fn close_block(&mut self) -> io::Result<()> {
        self.log.flush()?;
        let log = File::Log.path(&self.dir, self.block);
        let (all, _) = wal::read(&fs::read(&log)?);
        let (mut messages, mut ops) = (Table::new(MESSAGES), Table::new(operations::HEADS));
        let mut records = Vec::new();
        let (mut n, mut findings) = (0, Table::new(FINDINGS));
        for frame in all {
            let message = match frame {
                Frame::Message(message) => message,
                Frame::Finding(finding) => {
                    push_finding(&mut findings, &finding);
                    continue;
                }
            };
            let Ok(mut envelope) = Envelope::decode(message.bytes.as_slice()) else { continue };
            let of = std::mem::take(&mut envelope.records);
            records.extend(of.into_iter().map(|record| (n, envelope.node.clone(), message.at, record)));
            messages.push([
                Cell::Number(i64::try_from(n).ok()),
                Cell::Number(i64::try_from(message.at.unix_ns).ok()),
                Cell::Number(i64::try_from(message.at.mono_ns).ok()),
                Cell::Text(Some(&envelope.node)),
                Cell::Number(Some(number_of(message.topic))),
                Cell::Bytes(Some(envelope.encode_to_vec())),
            ]);
            n += 1;
        }
        // The operations of a rank follow each other: so its times are small steps from row to row.
        records.sort_by_key(|(_, node, _, r)| (node.clone(), r.segment, r.comm, r.ticket));
        for (n, node, at, record) in records {
            operations::push(&mut ops, n, &node, at, record);
        }
        ops.write(operations::NAME, &File::Operations.path(&self.dir, self.block))?;
        findings.write("findings", &File::Findings.path(&self.dir, self.block))?;
        let path = File::Messages.path(&self.dir, self.block);
        let draft = path.with_extension("draft");
        messages.write("messages", &draft)?;
        fs::rename(&draft, &path)?;
        fs::File::open(&self.dir)?.sync_all()?;
        fs::remove_file(log)
    }

    /// Removes blocks that are too old, or the oldest of too many.
    fn remove_old(&self, now: Moment) -> io::Result<()> {
        let mut blocks: std::collections::BTreeMap<u32, (u64, Vec<PathBuf>, u64)> = Default::default();
        for entry in fs::read_dir(&self.dir)? {
            let entry = entry?;
            let Some((_, block)) = entry.file_name().to_str().and_then(File::parse) else { continue };
            let about = entry.metadata()?;
            let written = about.modified()?.duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
            let of = blocks.entry(block).or_default();
            of.0 += about.len();
            of.1.push(entry.path());
            of.2 = of.2.max(u64::try_from(written.as_nanos()).unwrap_or(u64::MAX));
        }
        let mut bytes: u64 = blocks.values().map(|(bytes, ..)| bytes).sum();
        let oldest_ns =
            now.unix_ns.saturating_sub(u64::try_from(self.limits.age.as_nanos()).unwrap_or(u64::MAX));
        for (_, (size, paths, written_ns)) in blocks.range(..self.block) {
            if bytes <= self.limits.bytes && *written_ns >= oldest_ns {
                break;
            }
            // Without its messages a block is none, so that they go first.
            let is_messages = |p: &&PathBuf| !p.to_string_lossy().contains("messages-");
            let mut paths: Vec<&PathBuf> = paths.iter().collect();
            paths.sort_by_key(is_messages);
            paths.into_iter().try_for_each(fs::remove_file)?;
            bytes -= size;
        }
        Ok(())
    }
}

/// A change of a finding, as the log keeps it.
#[derive(Debug, Serialize, Deserialize)]
struct Changed {
    change: Change,
    #[serde(flatten)]
    finding: model::Finding,
}

/// Adds a finding of the log. One that does not read is of a release with other kinds, and is kept as it is.
fn push_finding(table: &mut Table, Finding { at, json }: &Finding) {
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
