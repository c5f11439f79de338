//! Identities that name a thing the same way on every rank and node.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::fmt;

/// A communicator: NCCL's `commId`/`commHash`, equal on all its ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct CommId(pub u64);

impl fmt::Display for CommId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// A rank of a communicator, as that communicator numbers it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Rank(pub u32);

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// One segment, which is one process: its random nonce and start time in one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SegmentId(pub u64);

impl fmt::Display for SegmentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}", self.0)
    }
}

/// Which issue orders are compared: ranks share an order within a track.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Track {
    /// Collectives issued by calls.
    Collective,
    /// Collectives issued by graph replays.
    Replay,
    /// Transfers from the first rank to the second.
    Pair(Rank, Rank),
}

impl fmt::Display for Track {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Track::Collective => f.write_str("collective"),
            Track::Replay => f.write_str("replay"),
            Track::Pair(from, to) => write!(f, "{from}->{to}"),
        }
    }
}

impl Serialize for Track {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Track {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = String::deserialize(d)?;
        let pair = || {
            let (from, to) = text.split_once("->")?;
            Some(Track::Pair(Rank(from.parse().ok()?), Rank(to.parse().ok()?)))
        };
        match text.as_str() {
            "collective" => Ok(Track::Collective),
            "replay" => Ok(Track::Replay),
            _ => pair().ok_or_else(|| de::Error::custom(format_args!("{text:?} is no track"))),
        }
    }
}
