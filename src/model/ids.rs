//! Identities that name a thing the same way on every rank and node.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::fmt;

/// A communicator of one user: NCCL's `commId`/`commHash`, equal on all its ranks, and the user whose processes are in it.
///
/// NCCL's number alone would let one user's process claim a place in another user's communicator.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct CommId {
    // Halves: 12 bytes instead of 16, of which a cluster has millions.
    high: u32,
    low: u32,
    owner: u32,
}

/// No user has this number.
const NOBODY: u32 = u32::MAX;

impl CommId {
    /// NCCL's number, and the user, where the user is known.
    pub const fn new(nccl_hash: u64, owner: Option<u32>) -> Self {
        let owner = match owner {
            Some(owner) => owner,
            None => NOBODY,
        };
        CommId { high: (nccl_hash >> 32) as u32, low: nccl_hash as u32, owner }
    }

    /// One of which no user is known.
    pub const fn unowned(nccl_hash: u64) -> Self {
        Self::new(nccl_hash, None)
    }

    /// NCCL's number.
    pub const fn nccl_hash(self) -> u64 {
        (self.high as u64) << 32 | self.low as u64
    }

    /// The user, by number.
    pub const fn owner(self) -> Option<u32> {
        if self.owner == NOBODY { None } else { Some(self.owner) }
    }
}

impl std::hash::Hash for CommId {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        state.write_u64(self.nccl_hash());
        state.write_u32(self.owner);
    }
}

/// NCCL's number, as NCCL prints it: people know a communicator by that.
impl fmt::Display for CommId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.nccl_hash())
    }
}

impl fmt::Debug for CommId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.owner() {
            Some(owner) => write!(f, "CommId({self}@{owner})"),
            None => write!(f, "CommId({self})"),
        }
    }
}

/// `2cb0a93e6b1e71b3@1000`, and without a user `2cb0a93e6b1e71b3`.
impl Serialize for CommId {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        match self.owner() {
            Some(owner) => s.collect_str(&format_args!("{self}@{owner}")),
            None => s.collect_str(self),
        }
    }
}

impl<'de> Deserialize<'de> for CommId {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            // Releases before users were part of it wrote NCCL's number.
            Number(u64),
            Text(String),
        }
        let text = match Written::deserialize(d)? {
            Written::Number(n) => return Ok(CommId::unowned(n)),
            Written::Text(text) => text,
        };
        let parse = || {
            let (hash, owner) = match text.split_once('@') {
                Some((hash, owner)) => (hash, Some(owner.parse().ok()?)),
                None => (&*text, None),
            };
            Some(CommId::new(u64::from_str_radix(hash, 16).ok()?, owner))
        };
        parse().ok_or_else(|| de::Error::custom(format_args!("{text:?} is no communicator")))
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

/// A track: the issue orders that are compared. Ranks share an order within a track.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Track {
    /// Collectives issued by calls.
    Collective,
    /// Collectives issued by graph replays.
    Replay,
    /// Transfers from the first rank to the second.
    Pair(Rank, Rank),
}

impl Track {
    /// The number of ranks that take part in one of its operations, in a communicator of so many.
    pub fn ranks(self, of: usize) -> usize {
        match self {
            Track::Pair(a, b) if a == b => 1,
            Track::Pair(..) => 2,
            Track::Collective | Track::Replay => of,
        }
    }
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
