//! From what the ranks did to what is wrong: one rule a file, and who remembers what was found.
//!
//! Pure like the join: rules are told the time and read the join; they keep nothing. A finding opens when its
//! rule first gives it, is updated while it does, and is closed, not forgotten, when it no longer does.

mod mismatch;
mod missing_rank;
mod never_joined;
mod straggler;

pub use mismatch::MismatchRule;
pub use missing_rank::MissingRankRule;
pub use never_joined::NeverJoinedRule;
pub use straggler::StragglerRule;

use crate::join::{Communicator, Join};
use crate::model::{CommId, Evidence, Finding, Kind, Liveness, Rank};
use std::collections::BTreeMap;

/// One way in which a job can be sick.
pub trait Rule: std::fmt::Debug + Send {
    /// What is wrong now.
    fn check(&self, join: &Join, now_ns: u64) -> Vec<Finding>;
}

/// When the rules speak.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// How long ranks wait in an operation before a rank that did not issue it is missing, in ns.
    pub patience_ns: u64,
    /// The same, when that rank's process is gone.
    pub patience_gone_ns: u64,
    /// The same, where it may be a slow start or a queue: in a communicator's first operation, and where no
    /// stamp says that a GPU began to wait.
    pub patience_unsure_ns: u64,
    /// The same, where no stamp can say so, as the operation is one that the overhead budget left out.
    pub patience_silent_ns: u64,
    /// How long a communicator may be in the making before ranks that have not joined it are missing, in ns.
    pub patience_init_ns: u64,
    /// Lateness that is told at once, in ns.
    pub late_at_once_ns: u64,
    /// Lateness that is told when it repeats, in ns.
    pub late_often_ns: u64,
    /// How often it has to repeat.
    pub late_times: usize,
    /// A straggler that was not late again for this long is over, in ns.
    pub late_over_ns: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            patience_ns: 3_000_000_000,
            patience_gone_ns: 1_000_000_000,
            patience_unsure_ns: 30_000_000_000,
            patience_silent_ns: 10_000_000_000,
            patience_init_ns: 30_000_000_000,
            late_at_once_ns: 200_000_000,
            late_often_ns: 5_000_000,
            late_times: 5,
            late_over_ns: 60_000_000_000,
        }
    }
}

/// Findings kept, open ones whatever their number.
const FINDINGS_KEPT: usize = 1024;

type Key = (Kind, CommId, Option<Rank>, u64);

/// All rules, and what they found so far.
#[derive(Debug)]
pub struct Detector {
    rules: Vec<Box<dyn Rule>>,
    found: BTreeMap<Key, Finding>,
}

impl Detector {
    /// With every rule.
    pub fn new(settings: Settings) -> Self {
        let rules: Vec<Box<dyn Rule>> = vec![
            Box::new(MismatchRule),
            Box::new(MissingRankRule::new(settings)),
            Box::new(NeverJoinedRule::new(settings)),
            Box::new(StragglerRule::new(settings)),
        ];
        Detector { rules, found: BTreeMap::new() }
    }

    /// Asks every rule. Returns the findings that are new.
    pub fn check(&mut self, join: &Join, now_ns: u64) -> Vec<Finding> {
        for f in self.found.values_mut() {
            f.open = false;
        }
        let mut new = Vec::new();
        for mut finding in self.rules.iter().flat_map(|r| r.check(join, now_ns)) {
            // Nothing goes on any more where every process is gone.
            finding.open &= join.communicator(finding.communicator).is_some_and(|c| alive(join, c));
            let key = key(&finding);
            if !self.found.contains_key(&key) {
                new.push(finding.clone());
            }
            self.found.insert(key, finding);
        }
        self.forget();
        new
    }

    /// Days of jobs leave findings behind: the oldest that are over go.
    fn forget(&mut self) {
        let surplus = self.found.len().saturating_sub(FINDINGS_KEPT);
        if surplus == 0 {
            return;
        }
        let mut over: Vec<(u64, Key)> =
            self.found.iter().filter(|(_, f)| !f.open).map(|(k, f)| (f.since_ns, *k)).collect();
        over.sort();
        for (_, key) in over.into_iter().take(surplus) {
            self.found.remove(&key);
        }
    }

    /// Everything found so far, open findings first, then by time.
    pub fn findings(&self) -> Vec<Finding> {
        let mut all: Vec<Finding> = self.found.values().cloned().collect();
        all.sort_by_key(|f| (!f.open, f.since_ns));
        all
    }
}

/// What makes two findings the same one. A straggler is one finding, however many operations it delays; of the
/// others there is one an operation, whatever ranks turn out to be its cause.
fn key(f: &Finding) -> Key {
    match f.kind {
        Kind::Straggler => (f.kind, f.communicator, f.ranks.first().copied(), 0),
        _ => (f.kind, f.communicator, None, f.operation.order),
    }
}

fn alive(join: &Join, c: &Communicator) -> bool {
    c.members()
        .values()
        .filter_map(|m| join.process(m.record.segment))
        .any(|p| p.record.liveness == Liveness::Alive)
}

/// A moment as RFC 3339, as far as the job's own pair of clocks tells it.
fn wall(join: &Join, mono_ns: u64) -> Option<String> {
    let unix = join.unix_ns(mono_ns)?;
    let at = time::OffsetDateTime::from_unix_timestamp_nanos(i128::from(unix)).ok()?;
    let millis = at.replace_nanosecond(at.nanosecond() / 1_000_000 * 1_000_000).ok()?;
    millis.format(&time::format_description::well_known::Rfc3339).ok()
}

fn fact(text: impl Into<String>) -> Evidence {
    Evidence { text: text.into(), value: None, unit: None }
}

fn number(text: impl Into<String>, value: f64, unit: &'static str) -> Evidence {
    Evidence { text: text.into(), value: Some(value), unit: Some(unit) }
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

/// `rank 3`, `ranks 0, 1, 2`.
fn names(ranks: &[Rank]) -> String {
    let list: Vec<String> = ranks.iter().map(ToString::to_string).collect();
    format!("{} {}", if ranks.len() == 1 { "rank" } else { "ranks" }, list.join(", "))
}

/// Which process a rank is: `rank 3 is job rank 3, pid 1136 on host a`.
fn who(join: &Join, comm: &Communicator, rank: Rank) -> Option<Evidence> {
    let member = comm.members().get(&rank)?;
    let p = &join.process(member.record.segment)?.record;
    let job = p.job.rank.map_or_else(String::new, |r| format!("job rank {r}, "));
    let gpu = member.record.gpu.as_ref().map_or_else(String::new, |g| format!(", GPU {g}"));
    Some(fact(format!("rank {rank} is {job}pid {} ({}) on host {}{gpu}", p.pid, p.program, p.host)))
}
