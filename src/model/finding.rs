//! A finding: what is wrong, who caused it, and how we know.

use super::{CommId, Rank};
use serde::{Serialize, Serializer};

/// The kinds of finding, spelled as they are in JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// Ranks wait in an operation that a rank never issued.
    MissingRank,
    /// Ranks issued different operations at one issue order.
    Mismatch,
    /// A rank arrives late and the others wait for it.
    Straggler,
}

impl Kind {
    /// The name used in JSON, in text and on the screen.
    pub const fn as_str(self) -> &'static str {
        match self {
            Kind::MissingRank => "missing-rank",
            Kind::Mismatch => "mismatch",
            Kind::Straggler => "straggler",
        }
    }
}

impl Serialize for Kind {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(self.as_str())
    }
}

/// The operation a finding is about. Absent fields are not known.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct OperationRef {
    /// Issue order within the communicator, from 0.
    pub order: u64,
    /// Function as NCCL names it, `AllReduce` for example.
    pub func: String,
    /// Message size in bytes as nccl-tests defines it.
    pub bytes: Option<u64>,
    /// Data type as NCCL names it.
    pub dtype: Option<String>,
    /// Algorithm as NCCL names it.
    pub algo: Option<String>,
    /// Protocol as NCCL names it.
    pub proto: Option<String>,
    /// Reduction operation as NCCL names it.
    pub redop: Option<String>,
}

/// One fact that supports a finding, with its number where it has one.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Evidence {
    /// The fact in words, complete without the number beside it.
    pub text: String,
    /// The number, absent where the fact has none.
    pub value: Option<f64>,
    /// The number's unit: `s`, `bytes`, `count`, `1`.
    pub unit: Option<&'static str>,
}

/// What is wrong, in which communicator, because of which ranks, and what to do next.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Finding {
    /// What is wrong.
    pub kind: Kind,
    /// The communicator, 16 hexadecimal digits.
    #[serde(serialize_with = "as_text")]
    pub communicator: CommId,
    /// The culprits, as that communicator numbers its ranks.
    #[serde(serialize_with = "as_numbers")]
    pub ranks: Vec<Rank>,
    /// The operation in which it shows.
    pub operation: OperationRef,
    /// When it began, RFC 3339 in UTC; absent when no clock pair is known.
    pub since: Option<String>,
    /// The facts it rests on.
    pub evidence: Vec<Evidence>,
    /// What to do next.
    pub advice: String,
    /// When it began on the host's monotonic clock, in ns.
    #[serde(skip)]
    pub since_ns: u64,
    /// False once the condition has passed; a closed finding stays in the summary.
    #[serde(skip)]
    pub open: bool,
}

impl Finding {
    /// One line for people: kind, ranks, operation.
    pub fn headline(&self) -> String {
        let ranks: Vec<String> = self.ranks.iter().map(ToString::to_string).collect();
        let plural = if self.ranks.len() == 1 { "rank" } else { "ranks" };
        let size = self.operation.bytes.map_or_else(String::new, |b| format!(" of {b} bytes"));
        format!(
            "{}: {plural} {} in {}{size} (order {}, communicator {})",
            self.kind.as_str(),
            ranks.join(", "),
            self.operation.func,
            self.operation.order,
            self.communicator
        )
    }
}

fn as_text<S: Serializer>(id: &CommId, s: S) -> Result<S::Ok, S::Error> {
    s.collect_str(id)
}

#[expect(clippy::ptr_arg, reason = "serde passes the field's own type")]
fn as_numbers<S: Serializer>(ranks: &Vec<Rank>, s: S) -> Result<S::Ok, S::Error> {
    s.collect_seq(ranks.iter().map(|r| r.0))
}
