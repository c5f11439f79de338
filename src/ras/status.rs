//! The status of a job as RAS prints it in JSON.

use crate::model::steers;
use serde::{Deserialize, Deserializer};
use std::borrow::Cow;
use std::collections::BTreeMap;

/// The status of a job. Fields that are not read are skipped.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Status {
    /// NCCL's version.
    pub nccl_version: Option<String>,
    /// When RAS answered, `2026-11-30 21:35:44` by its host's clock.
    pub timestamp: Option<String>,
    /// The communicators.
    pub communicators: Vec<Communicator>,
    /// About RAS itself.
    #[serde(default)]
    pub ras: Collection,
}

/// How RAS collected it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
pub struct Collection {
    /// Processes whose answer did not come in time.
    #[serde(default)]
    pub timeouts_count: u64,
}

/// A communicator.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Communicator {
    /// NCCL's id, `0xfc5acb52e33f17a2`.
    pub hash: String,
    /// Two more numbers, which distinguish communicators with one id.
    #[serde(default)]
    pub secondary_hash: String,
    /// Ranks that it has.
    pub size: u32,
    /// The ranks that answered.
    pub ranks: Vec<RankStatus>,
    /// Those that did not.
    #[serde(default)]
    pub missing_ranks: Vec<MissingRank>,
}

/// A rank that answered.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct RankStatus {
    /// The rank in the communicator.
    pub rank: u32,
    /// Its host, by name or address.
    #[serde(default)]
    pub host: String,
    /// Its process; 0 where RAS does not know it, and prints -1.
    #[serde(default, deserialize_with = "pid")]
    pub pid: u32,
    /// The CUDA device.
    pub cuda_dev: Option<i32>,
    /// What it is about to do.
    #[serde(default)]
    pub status: Flags,
    /// Operations launched, by function.
    #[serde(default)]
    pub collective_counts: BTreeMap<String, u64>,
}

/// The state of a rank's communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct Flags {
    /// NCCL's result of its making; 0 when it is made.
    pub init_state: i32,
    /// NCCL's asynchronous error; 0 where there is none.
    pub async_error: i32,
    /// It is being ended.
    pub finalize_called: bool,
    /// It is being freed.
    pub destroy_flag: bool,
    /// It was aborted.
    pub abort_flag: bool,
}

/// A rank that did not answer.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct MissingRank {
    /// The rank in the communicator.
    pub rank: u32,
    /// Its host, by name or address.
    #[serde(default)]
    pub host: String,
    /// Its process; 0 where RAS does not know it, and prints -1.
    #[serde(default, deserialize_with = "pid")]
    pub pid: u32,
    /// What RAS thinks of it.
    #[serde(default)]
    pub status: Absence,
}

/// Why a rank did not answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct Absence {
    /// It did not answer in time.
    pub unresponsive: bool,
    /// RAS has given it up.
    pub considered_dead: bool,
}

impl Status {
    /// Reads RAS's JSON.
    ///
    /// # Errors
    /// The first fault and its position.
    pub fn parse(text: &str) -> Result<Self, String> {
        // Whoever listens on the port writes it, and it is shown on terminals.
        let plain = text.replace(|c: char| steers(c) && c != '\n', "");
        let status: Status = serde_json::from_str(&repaired(&plain)).map_err(|e| e.to_string())?;
        let texts = status.communicators.iter().flat_map(Communicator::texts);
        let steering = texts.chain(status.nccl_version.as_deref()).find(|text| text.contains(steers));
        if let Some(text) = steering {
            return Err(format!("{text:?} has characters that steer a terminal"));
        }
        Ok(status)
    }
}

impl Communicator {
    /// NCCL's id as a number; 0 where it is none.
    pub fn id(&self) -> u64 {
        u64::from_str_radix(self.hash.trim_start_matches("0x"), 16).unwrap_or(0)
    }
}

impl Communicator {
    /// The texts that are shown.
    fn texts(&self) -> impl Iterator<Item = &str> {
        let ranks = self.ranks.iter();
        let of_ranks = ranks.flat_map(|r| r.collective_counts.keys().chain([&r.host]).map(String::as_str));
        let of_missing = self.missing_ranks.iter().map(|r| r.host.as_str());
        of_ranks.chain(of_missing).chain([self.hash.as_str()])
    }
}

/// NCCL's result of an operation that goes on, which communicators that do not block have all the time.
const IN_PROGRESS: i32 = 7;

impl Flags {
    /// True where the communicator is not made yet.
    pub fn is_in_making(self) -> bool {
        self.init_state != 0
    }

    /// True where the communicator was aborted, or has an error.
    pub fn is_broken(self) -> bool {
        self.abort_flag || ![0, IN_PROGRESS].contains(&self.async_error)
    }
}

impl Absence {
    /// True where the process answers, and has freed the communicator.
    pub fn has_left(self) -> bool {
        !self.unresponsive && !self.considered_dead
    }
}

fn pid<'de, D: Deserializer<'de>>(d: D) -> Result<u32, D::Error> {
    Ok(u32::try_from(i64::deserialize(d)?).unwrap_or(0))
}

impl RankStatus {
    /// Operations launched, all functions together.
    pub fn launched(&self) -> u64 {
        self.collective_counts.values().fold(0, |sum, n| sum.saturating_add(*n))
    }
}

/// NCCL 2.28.9 leaves out the comma between the fields of a missing rank.
fn repaired(text: &str) -> Cow<'_, str> {
    let mut out = String::new();
    let mut lines = text.lines().peekable();
    let mut is_changed = false;
    while let Some(line) = lines.next() {
        out.push_str(line);
        let is_open = line.trim_end().ends_with(['{', '[', ',', ':']) || line.trim().is_empty();
        if !is_open && lines.peek().is_some_and(|next| next.trim_start().starts_with('"')) {
            out.push(',');
            is_changed = true;
        }
        out.push('\n');
    }
    if is_changed { Cow::Owned(out) } else { Cow::Borrowed(text) }
}
