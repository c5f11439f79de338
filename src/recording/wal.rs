//! The open part of a recording: messages one after the other, each with a checksum.
//!
//! ```text
//! RWWAL001 (length u32, CRC-32 u32, payload)*       numbers are little-endian
//! payload: host monotonic ns u64, Unix ns u64, topic u8, message
//! ```
//! A file that is cut at any byte, or damaged, holds all messages before the cut.

use super::Message;
use crate::cluster::Moment;
use crate::cluster::subject::Topic;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

const MAGIC: &[u8; 8] = b"RWWAL001";
/// Bytes before a message's own in its payload.
const HEAD: usize = 17;
/// The topic of a node's own affairs; others are numbers of buckets.
const NODE: u8 = u8::MAX;
/// A message has no more bytes than this.
const MESSAGE_MAX: usize = 1 << 20;

/// A file that messages are appended to.
#[derive(Debug)]
pub(super) struct Log {
    file: BufWriter<File>,
    bytes: u64,
}

impl Log {
    pub(super) fn create(path: &Path) -> io::Result<Self> {
        let mut file = BufWriter::new(File::options().write(true).create_new(true).open(path)?);
        file.write_all(MAGIC)?;
        file.flush()?;
        Ok(Log { file, bytes: MAGIC.len() as u64 })
    }

    pub(super) fn append(&mut self, message: &Message) -> io::Result<()> {
        let mut payload = Vec::with_capacity(HEAD + message.bytes.len());
        payload.extend(message.at.mono_ns.to_le_bytes());
        payload.extend(message.at.unix_ns.to_le_bytes());
        payload.push(if let Topic::Bucket(n) = message.topic { n } else { NODE });
        payload.extend(&message.bytes);
        let length = u32::try_from(payload.len()).map_err(io::Error::other)?;
        self.file.write_all(&length.to_le_bytes())?;
        self.file.write_all(&crc32fast::hash(&payload).to_le_bytes())?;
        self.file.write_all(&payload)?;
        self.bytes += u64::from(length) + 8;
        Ok(())
    }

    /// Hands all to the operating system: what is written survives this process.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }

    /// Bytes written so far.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// The messages of a log up to the first fault, and how many bytes follow it.
pub(super) fn read(bytes: &[u8]) -> (Vec<Message>, usize) {
    let mut messages = Vec::new();
    let Some(mut rest) = bytes.strip_prefix(MAGIC) else { return (messages, bytes.len()) };
    while let Some((message, after)) = next(rest) {
        messages.push(message);
        rest = after;
    }
    (messages, rest.len())
}

fn next(bytes: &[u8]) -> Option<(Message, &[u8])> {
    let (length, rest) = bytes.split_first_chunk::<4>()?;
    let (sum, rest) = rest.split_first_chunk::<4>()?;
    let length = u32::from_le_bytes(*length) as usize;
    if length > HEAD + MESSAGE_MAX {
        return None;
    }
    let (payload, after) = rest.split_at_checked(length)?;
    if crc32fast::hash(payload) != u32::from_le_bytes(*sum) {
        return None;
    }
    let (mono, payload) = payload.split_first_chunk::<8>()?;
    let (unix, payload) = payload.split_first_chunk::<8>()?;
    let (topic, bytes) = payload.split_first()?;
    let at = Moment { mono_ns: u64::from_le_bytes(*mono), unix_ns: u64::from_le_bytes(*unix) };
    let topic = if *topic == NODE { Topic::Node } else { Topic::Bucket(*topic) };
    Some((Message { at, topic, bytes: bytes.to_vec() }, after))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_that_is_cut_or_damaged_anywhere_holds_what_comes_before() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("wal");
        let mut log = Log::create(&path).expect("a log");
        let message = |n: u8| Message {
            at: Moment { mono_ns: u64::from(n), unix_ns: 1_000 + u64::from(n) },
            topic: if n.is_multiple_of(2) { Topic::Node } else { Topic::Bucket(n) },
            bytes: vec![n; usize::from(n) * 3],
        };
        let all: Vec<Message> = (0..5).map(message).collect();
        all.iter().for_each(|m| log.append(m).expect("room"));
        log.flush().expect("room");
        let bytes = std::fs::read(&path).expect("the log");
        assert_eq!((bytes.len() as u64, read(&bytes)), (log.bytes(), (all.clone(), 0)));
        for cut in 0..bytes.len() {
            let (some, _) = read(&bytes[..cut]);
            assert_eq!(some, all[..some.len()]);
            let mut damaged = bytes.clone();
            damaged[cut] ^= 1;
            let (some, _) = read(&damaged);
            assert!(some.len() < all.len(), "byte {cut} is not covered");
            assert_eq!(some, all[..some.len()]);
        }
    }
}
