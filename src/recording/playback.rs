//! Reads a recording, as a source of the same updates.

use super::operations;
use super::{BlockFile, Frame, Message, topic_of, wal};
use crate::cluster::message::Envelope;
use crate::cluster::{Moment, Reader, items};
use crate::columns::Rows;
use crate::model::{Sink, Source, Update};
use prost::Message as _;
use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A node that is silent for so long in a recording is told as silent, as an analyser tells it by default.
const SILENT: Duration = Duration::from_secs(3);
/// Bytes of a log that are read.
const LOG_MAX: u64 = 256 << 20;
/// Finished operations of a block that are read from before the moment at which a recording is opened.
const FINISHED_BEFORE: usize = 12_000;
/// Bytes of a message without its operations, and items in all messages of a block.
const BODY_MAX: usize = 256 << 10;
const ITEMS_MAX: usize = 1 << 22;

/// Why a recording cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or the directory cannot be read.
    #[error("{}: {why}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        why: std::io::Error,
    },
    /// A file of a block is damaged.
    #[error("{}: {why}; remove the files of this block to read the others", path.display())]
    Table {
        /// Which.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// The directory holds no recording.
    #[error("{}: no recording is in it; `ringwatch record -o DIR` makes one", path.display())]
    Nothing {
        /// The directory.
        path: PathBuf,
    },
}

/// A recording, played from its beginning.
#[derive(Debug)]
pub struct Playback {
    dir: PathBuf,
    /// The blocks that are not read yet, and whether each is a log.
    blocks: VecDeque<(u32, bool)>,
    messages: VecDeque<Message>,
    reader: Reader,
    /// Bytes behind the first fault of a log.
    damaged: u64,
    newest: Option<Moment>,
    fault: Option<Error>,
    /// Of the operations that had finished before this moment the newest are read, host monotonic ns.
    from_ns: u64,
}

impl Playback {
    /// Opens the recording in a directory.
    ///
    /// # Errors
    /// It cannot be read, or is none.
    pub fn open(dir: &Path) -> Result<Self, Error> {
        Self::open_at(dir, 0)
    }

    /// Opens it near a moment, host monotonic ns: with the block of the moment and the one before. Of what had finished before the moment
    /// each block has the newest operations alone.
    ///
    /// # Errors
    /// As [`Playback::open`].
    pub fn open_at(dir: &Path, from_ns: u64) -> Result<Self, Error> {
        let file = |why| Error::File { path: dir.to_owned(), why };
        let mut known: BTreeMap<u32, bool> = BTreeMap::new();
        for entry in fs::read_dir(dir).map_err(file)? {
            let name = entry.map_err(file)?.file_name();
            match name.to_str().and_then(BlockFile::parse) {
                // A log that was not removed yet holds what its block does.
                Some((BlockFile::Messages, block)) => drop(known.insert(block, false)),
                Some((BlockFile::Log, block)) => drop(known.entry(block).or_insert(true)),
                _ => {}
            }
        }
        let mut playback = Playback {
            dir: dir.to_owned(),
            blocks: known.into_iter().collect(),
            messages: VecDeque::new(),
            reader: Reader::new(SILENT).unlimited(),
            damaged: 0,
            newest: None,
            fault: None,
            from_ns,
        };
        if playback.blocks.is_empty() {
            return Err(Error::Nothing { path: dir.to_owned() });
        }
        playback.skip_blocks();
        playback.load()?;
        Ok(playback)
    }

    /// Leaves out the blocks that end before the moment: each block repeats what is known at its beginning.
    fn skip_blocks(&mut self) {
        let begins_later = |(block, is_log): &(u32, bool)| {
            // A log is the newest block, and nothing is behind it.
            let path = BlockFile::Messages.path(&self.dir, *block);
            let least = if *is_log { None } else { Rows::least(&path, "monotonic_ns") };
            least.and_then(|ns| u64::try_from(ns).ok()).is_none_or(|ns| ns > self.from_ns)
        };
        let later = self.blocks.partition_point(|block| !begins_later(block));
        // The block of the moment may have begun right before it.
        let skipped = later.saturating_sub(2);
        self.blocks.drain(..skipped);
        if skipped == 0 {
            self.from_ns = 0;
        }
    }

    /// The moment of the next messages; absent at the end.
    ///
    /// # Errors
    /// The next block cannot be read.
    pub fn next_at(&mut self) -> Result<Option<Moment>, Error> {
        match self.fault.take() {
            Some(fault) => Err(fault),
            None => Ok(self.messages.front().map(|m| m.at)),
        }
    }

    /// The moment of the messages that were taken last.
    pub fn at(&self) -> Option<Moment> {
        self.newest
    }

    /// Returns what the recording lacks, in sentences.
    pub fn notes(&self) -> Vec<String> {
        let damaged = (self.damaged > 0)
            .then(|| format!("{} bytes at the end of a log are incomplete or damaged", self.damaged));
        let refused = self
            .reader
            .refused()
            .iter()
            .map(|(why, n)| format!("{n} messages were not read: {}", why.as_str()));
        let missed: u64 = self.reader.nodes().values().map(|n| n.missed).sum();
        let missed = (missed > 0).then(|| {
            format!("{missed} messages are missing: the disk did not take them in time, or their blocks were removed")
        });
        damaged.into_iter().chain(refused).chain(missed).collect()
    }

    /// Reads blocks until there are messages.
    fn load(&mut self) -> Result<(), Error> {
        while self.messages.is_empty()
            && let Some((block, is_log)) = self.blocks.pop_front()
        {
            if is_log {
                let path = BlockFile::Log.path(&self.dir, block);
                let file = |why| Error::File { path: path.clone(), why };
                let about = fs::metadata(&path).map_err(file)?;
                if !about.is_file() || about.len() > LOG_MAX {
                    let why = format!("it is no file of at most {} MiB", LOG_MAX >> 20);
                    return Err(Error::Table { path, why });
                }
                let (frames, rest) = wal::read(&fs::read(&path).map_err(file)?);
                self.damaged += rest as u64;
                let messages = frames.into_iter().filter_map(|frame| match frame {
                    Frame::Message(message) => Some(message),
                    Frame::Finding(_) => None,
                });
                self.messages = messages.collect();
            } else {
                self.messages = block_of(&self.dir, block, self.from_ns)?.into();
            }
        }
        Ok(())
    }
}

/// The messages of a block, with their operations; of those that had finished before a moment (host monotonic ns) with the newest.
fn block_of(dir: &Path, block: u32, from_ns: u64) -> Result<Vec<Message>, Error> {
    let rows = |file: BlockFile| {
        let path = file.path(dir, block);
        Rows::read(&path).map_err(|why| Error::Table { path, why })
    };
    let table = rows(BlockFile::Messages)?;
    let mut read: Vec<(Message, Envelope)> = Vec::new();
    let mut items_left = ITEMS_MAX;
    for row in 0..table.rows {
        let mut message = || {
            let unsigned = |column: &str| u64::try_from(table.number(column, row)?).ok();
            let at = Moment { mono_ns: unsigned("monotonic_ns")?, unix_ns: unsigned("recorded")? };
            let topic = topic_of(table.number("topic", row)?)?;
            let body = table.bytes("body", row).filter(|b| b.len() <= BODY_MAX)?;
            items_left = items_left.checked_sub(items::count(body)?)?;
            let envelope = Envelope::decode(body).ok()?;
            Some((Message { at, topic, bytes: Vec::new() }, envelope))
        };
        let path = || BlockFile::Messages.path(dir, block);
        read.push(
            message()
                .ok_or_else(|| Error::Table { path: path(), why: format!("row {row} is no message") })?,
        );
    }
    let ops = rows(BlockFile::Operations)?;
    let first = first_message(&ops, &read, from_ns);
    for row in 0..ops.rows {
        let message = ops.number("message", row).and_then(|n| usize::try_from(n).ok());
        if message.is_some_and(|n| n < first) && !is_open(&ops, row) {
            continue;
        }
        let found = operations::read(&ops, row, |n| read.get(n).map(|(m, _)| m.at));
        let envelope = found.and_then(|(n, record)| Some((read.get_mut(n)?, record)));
        let Some(((_, envelope), record)) = envelope else {
            let path = BlockFile::Operations.path(dir, block);
            return Err(Error::Table { path, why: format!("row {row} is no operation of the block") });
        };
        envelope.records.push(record);
    }
    Ok(read.into_iter().map(|(m, envelope)| Message { bytes: envelope.encode_to_vec(), ..m }).collect())
}

/// The first message of which finished operations are read.
fn first_message(ops: &Rows, messages: &[(Message, Envelope)], from_ns: u64) -> usize {
    let before = messages.partition_point(|(message, _)| message.at.mono_ns < from_ns);
    let mut finished = vec![0_usize; before];
    for row in (0..ops.rows).filter(|row| !is_open(ops, *row)) {
        let message = ops.number("message", row).and_then(|n| usize::try_from(n).ok());
        if let Some(n) = message.and_then(|n| finished.get_mut(n)) {
            *n += 1;
        }
    }
    let mut kept = 0;
    let newest = finished.iter().rev().take_while(|n| {
        kept += **n;
        kept <= FINISHED_BEFORE
    });
    before - newest.count()
}

/// True in the last row about an operation that had not finished.
fn is_open(ops: &Rows, row: usize) -> bool {
    (ops.number("is_finished", row), ops.number("is_latest", row)) == (Some(0), Some(1))
}

impl Source for Playback {
    fn poll(&mut self, now_ns: u64) -> Vec<Update> {
        let mut out = Vec::new();
        self.poll_each(now_ns, &mut |u| out.push(u));
        out
    }

    fn poll_each(&mut self, now_ns: u64, sink: &mut dyn Sink) {
        let mut out = Vec::new();
        while let Some(message) = self.messages.front().filter(|m| m.at.mono_ns <= now_ns) {
            self.newest = Some(message.at);
            if let Ok(envelope) = Envelope::decode(message.bytes.as_slice()) {
                let subject = message.topic.of(&envelope.node);
                self.reader.read(&subject, &message.bytes, message.at, false, &mut out);
            }
            out.drain(..).for_each(|u| sink.take(u));
            self.messages.pop_front();
            if self.messages.is_empty()
                && let Err(fault) = self.load()
            {
                self.fault = Some(fault);
            }
        }
        // Nobody can be asked here.
        drop(self.reader.take_announced());
        self.reader.look(now_ns, &mut out);
        out.into_iter().for_each(|u| sink.take(u));
    }

    fn describe(&self) -> String {
        format!("the recording {}", self.dir.display())
    }
}
