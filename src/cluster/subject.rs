//! The names of subjects: who publishes what where.
//!
//! ```text
//! ringwatch.v1.comm.NODE.BUCKET      an agent, about communicators of a bucket
//! ringwatch.v1.node.NODE             an agent, about its node's processes and devices
//! ringwatch.v1.part.P.comm.NODE.BUCKET, ringwatch.v1.part.P.node.NODE
//!                                    the same, after the servers mapped it to a partition
//! ringwatch.v1.wish.all              an analyser, to all agents
//! ringwatch.v1.wish.NODE             an analyser, to one
//! ringwatch.v1.verdict.P.ID          an analyser that speaks for a partition
//! ringwatch.v1.read.WHAT             a reader, to any analyser (request and reply)
//! ```
//! A node's name is one token; what a subject cannot hold is written as `=` and two hexadecimal digits.

use crate::model::CommId;
use std::fmt::Write;

/// The beginning of all subjects; the version is that of the envelope.
pub const ROOT: &str = "ringwatch.v1";
/// Communicators are spread over so many subjects a node.
pub const BUCKETS: u64 = 16;

/// The topic of a message of an agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Topic {
    /// Its node's processes and devices.
    Node,
    /// Communicators of a bucket.
    Bucket(u8),
}

/// The bucket of a communicator.
pub fn bucket(comm: CommId) -> u8 {
    // Ids are hashes, but not everybody's.
    let n = comm.nccl_hash().wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    (n % BUCKETS) as u8
}

/// A node's name as one token of a subject.
pub fn token(name: &str) -> String {
    let mut out = String::new();
    for b in name.bytes().take(128) {
        match b {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' => out.push(char::from(b)),
            _ => write!(out, "={b:02x}").unwrap_or_default(),
        }
    }
    if out.is_empty() { "=00".to_owned() } else { out }
}

/// The name that a token stands for; as it is where it stands for none.
pub fn name(token: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = token.bytes();
    while let Some(b) = rest.next() {
        let hex = |b: Option<u8>| char::from(b?).to_digit(16).and_then(|n| u8::try_from(n).ok());
        match b {
            b'=' => match (hex(rest.next()), hex(rest.next())) {
                (Some(high), Some(low)) => bytes.push(high << 4 | low),
                _ => return token.to_owned(),
            },
            b => bytes.push(b),
        }
    }
    String::from_utf8(bytes).unwrap_or_else(|_| token.to_owned())
}

impl Topic {
    /// The subject on which a node publishes it.
    pub fn of(self, node: &str) -> String {
        match self {
            Topic::Node => format!("{ROOT}.node.{}", token(node)),
            Topic::Bucket(n) => format!("{ROOT}.comm.{}.{n}", token(node)),
        }
    }
}

/// The parts of a message's subject: the partition, where servers map to some; the node's token; the topic.
pub fn parse(subject: &str) -> Option<(Option<u32>, &str, Topic)> {
    let mut rest = subject.strip_prefix(ROOT)?.strip_prefix('.')?;
    let mut partition = None;
    if let Some(part) = rest.strip_prefix("part.") {
        let (n, more) = part.split_once('.')?;
        partition = Some(n.parse().ok()?);
        rest = more;
    }
    if let Some(node) = rest.strip_prefix("node.") {
        return (!node.contains('.')).then_some((partition, node, Topic::Node));
    }
    let (node, n) = rest.strip_prefix("comm.")?.split_once('.')?;
    let n: u8 = n.parse().ok()?;
    (u64::from(n) < BUCKETS).then_some((partition, node, Topic::Bucket(n)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_survive_the_way_through_a_subject() {
        for n in ["gpu-017", "a.b.example.org", "knoten ü", "x>*"] {
            let t = token(n);
            assert!(!t.contains(['.', '*', '>', ' ']), "{t}");
            assert_eq!(name(&t), n);
        }
        assert_eq!(token("a.b"), "a=2eb");
    }

    #[test]
    fn subjects_say_who_and_what() {
        assert_eq!(Topic::Bucket(7).of("a.b"), "ringwatch.v1.comm.a=2eb.7");
        assert_eq!(parse("ringwatch.v1.comm.a=2eb.7"), Some((None, "a=2eb", Topic::Bucket(7))));
        assert_eq!(parse("ringwatch.v1.part.3.comm.a.7"), Some((Some(3), "a", Topic::Bucket(7))));
        assert_eq!(parse("ringwatch.v1.part.3.node.a"), Some((Some(3), "a", Topic::Node)));
        for wrong in [
            "ringwatch.v2.node.a",
            "ringwatch.v1.node.a.b",
            "ringwatch.v1.comm.a.16",
            "ringwatch.v1.comm.a",
            "ringwatch.v1.part.x.node.a",
            "ringwatch.v1.verdict.0.1",
            "ringwatch",
            "",
        ] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn buckets_are_about_equal() {
        let mut n = [0; BUCKETS as usize];
        (0..16_000).for_each(|i| n[usize::from(bucket(CommId::unowned(i)))] += 1);
        assert!(n.iter().all(|n| (900..1100).contains(n)), "{n:?}");
    }
}
