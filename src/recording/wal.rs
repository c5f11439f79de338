//! The open part of a recording: messages and changes of findings one after the other, each with a checksum.
//!
//! ```text
//! RWWAL001 (length u32, CRC-32 u32, payload)*       numbers are little-endian
//! payload: host monotonic ns u64, Unix ns u64, topic u8, message or finding
//! ```
//! A file that is cut at any byte, or damaged, holds everything before the cut.

use super::{FindingFrame, Frame, Message};
use crate::cluster::Moment;
use crate::cluster::subject::Topic;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

const MAGIC: &[u8; 8] = b"RWWAL001";
/// Bytes before a message's own in its payload.
const HEAD: usize = 17;
/// The topic of a node's own affairs, and of a finding; others are numbers of buckets.
const NODE: u8 = u8::MAX;
const FINDING: u8 = u8::MAX - 1;
/// A message has no more bytes than this.
const MESSAGE_MAX: usize = 16 << 20;

/// A file that messages are appended to.
#[derive(Debug)]
pub(super) struct Log {
    file: BufWriter<File>,
    bytes: u64,
}

impl Log {
    pub(super) fn create(path: &Path) -> io::Result<Self> {
        let mut file = BufWriter::new(File::options().write(true).create_new(true).mode(0o600).open(path)?);
        file.write_all(MAGIC)?;
        file.flush()?;
        Ok(Log { file, bytes: MAGIC.len() as u64 })
    }

    pub(super) fn append(&mut self, frame: &Frame) -> io::Result<()> {
        let (at, topic, bytes) = match frame {
            Frame::Message(Message { at, topic: Topic::Bucket(n), bytes }) => (at, *n, bytes),
            Frame::Message(Message { at, topic: Topic::Node, bytes }) => (at, NODE, bytes),
            Frame::Finding(FindingFrame { at, json }) => (at, FINDING, json),
        };
        let mut payload = Vec::with_capacity(HEAD + bytes.len());
        payload.extend(at.mono_ns.to_le_bytes());
        payload.extend(at.unix_ns.to_le_bytes());
        payload.push(topic);
        payload.extend(bytes);
        if bytes.len() > MESSAGE_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a message is too long for a recording"));
        }
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

/// The contents of a log up to the first fault, and how many bytes follow it.
pub(super) fn read(bytes: &[u8]) -> (Vec<Frame>, usize) {
    let mut frames = Vec::new();
    let Some(mut rest) = bytes.strip_prefix(MAGIC) else { return (frames, bytes.len()) };
    while let Some((frame, after)) = next(rest) {
        frames.push(frame);
        rest = after;
    }
    (frames, rest.len())
}

fn next(bytes: &[u8]) -> Option<(Frame, &[u8])> {
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
    let bytes = bytes.to_vec();
    let frame = match *topic {
        FINDING => Frame::Finding(FindingFrame { at, json: bytes }),
        NODE => Frame::Message(Message { at, topic: Topic::Node, bytes }),
        n => Frame::Message(Message { at, topic: Topic::Bucket(n), bytes }),
    };
    Some((frame, after))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_that_is_cut_or_damaged_anywhere_holds_what_comes_before() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("wal");
        let mut log = Log::create(&path).expect("a log");
        let frame = |n: u8| {
            let at = Moment { mono_ns: u64::from(n), unix_ns: 1_000 + u64::from(n) };
            let bytes = vec![n; usize::from(n) * 3];
            match n % 3 {
                0 => Frame::Message(Message { at, topic: Topic::Node, bytes }),
                1 => Frame::Message(Message { at, topic: Topic::Bucket(n), bytes }),
                _ => Frame::Finding(FindingFrame { at, json: bytes }),
            }
        };
        let all: Vec<Frame> = (0..6).map(frame).collect();
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
