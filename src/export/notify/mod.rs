//! Changes of findings for whoever is called: webhooks, and programs that are started.
//!
//! [`Notices`] picks the changes that matter, [`body()`] writes them down, [`Poster`] sends them. An info calls nobody.

mod body;
mod post;
mod settings;

pub use body::{as_json, body, variables};
pub use post::{Failure, Poster};
pub use settings::{Command, Format, Least, Settings, Webhook};

use crate::export::metrics::{NamedRank, named_ranks};
use crate::join::Join;
use crate::model::{Change, Finding, FindingEvent, FindingId, Rank, Severity};
use std::collections::BTreeMap;

/// Findings of which it is remembered what was said.
const KNOWN: usize = 65_536;

/// A change of a finding that somebody is called for.
#[derive(Debug, Clone, PartialEq)]
pub struct Notice {
    /// What changed.
    pub change: Change,
    /// What it is now.
    pub finding: Finding,
    /// The most severe that it ever was: who was called for that hears of its end too.
    pub worst: Severity,
    /// The job's name; empty where none is known.
    pub job: String,
    /// The ranks and hosts that it names.
    pub named: Vec<NamedRank>,
    /// The node whose agent or analyser says so.
    pub node: String,
}

/// What was said of a finding last.
#[derive(Debug, Clone, PartialEq)]
struct Said {
    worst: Severity,
    severity: Severity,
    ranks: Vec<Rank>,
    job: String,
    named: Vec<NamedRank>,
}

/// Picks the changes that matter.
#[derive(Debug)]
pub struct Notices {
    node: String,
    said: BTreeMap<FindingId, Said>,
}

impl Notices {
    /// Of this node.
    pub fn new(node: String) -> Self {
        Notices { node, said: BTreeMap::new() }
    }

    /// The notice about a change; absent where it is an info, or nothing changed that anybody is called for: severity and ranks.
    pub fn of(&mut self, join: &Join, event: &FindingEvent) -> Option<Notice> {
        let f = &event.finding;
        let before = self.said.get(&f.id).cloned();
        let is_over = event.change == Change::Closed;
        let worst = before.as_ref().map_or(f.severity, |b| b.worst.max(f.severity));
        if worst < Severity::Warning {
            return None;
        }
        let is_same = |b: &Said| !is_over && b.severity == f.severity && b.ranks == f.ranks;
        if before.as_ref().is_some_and(is_same) {
            return None;
        }
        // The processes of a job that has ended may be forgotten.
        let (mut job, mut named) = (job_of(join, f), named_ranks(join, f).into_iter().collect::<Vec<_>>());
        if let Some(before) = before.as_ref().filter(|_| named.is_empty()) {
            (job, named) = (before.job.clone(), before.named.clone());
        }
        if is_over {
            self.said.remove(&f.id);
        } else {
            let (severity, ranks) = (f.severity, f.ranks.clone());
            self.said.insert(f.id, Said { worst, severity, ranks, job: job.clone(), named: named.clone() });
            if self.said.len() > KNOWN {
                self.said.pop_first();
            }
        }
        // What was an info before is opened now.
        let change = match event.change {
            Change::Updated if before.is_none() => Change::Opened,
            change => change,
        };
        Some(Notice { change, finding: f.clone(), worst, job, named, node: self.node.clone() })
    }
}

/// The job of a finding's first rank, or of another one of its communicator.
fn job_of(join: &Join, f: &Finding) -> String {
    let members = join.communicator(f.communicator).map(|c| c.members());
    let ranks = f.ranks.iter().filter_map(|r| members?.get(r));
    let mut all = ranks.chain(members.into_iter().flat_map(|m| m.values()));
    let process = all.find_map(|m| join.process(m.record.segment));
    process.and_then(|p| p.record.job.name.clone()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::join::testing::{member, process};
    use crate::model::{CommId, Kind, OperationRef, Track};

    #[test]
    fn an_info_calls_nobody_and_what_was_told_hears_of_its_end() {
        let mut join = Join::new();
        join.feed(process(0));
        join.feed(member(0, 2, 1));
        let mut notices = Notices::new("n1".to_owned());
        let operation = OperationRef::named("AllReduce", Track::Collective, 5);
        let finding = Finding::new(Kind::Straggler, CommId::unowned(7), vec![Rank(0)], operation);
        let mut changes = |change, severity, ranks: Vec<Rank>| {
            let finding = Finding { severity, ranks, ..finding.clone() };
            notices.of(&join, &FindingEvent { change, finding }).map(|n| (n.change, n.worst, n.named.len()))
        };
        let (info, warning) = (Severity::Info, Severity::Warning);
        assert_eq!(changes(Change::Opened, info, vec![Rank(0)]), None);
        assert_eq!(changes(Change::Updated, warning, vec![Rank(0)]), Some((Change::Opened, warning, 1)));
        assert_eq!(changes(Change::Updated, warning, vec![Rank(0)]), None, "only its cost changed");
        assert_eq!(changes(Change::Updated, warning, vec![]), Some((Change::Updated, warning, 1)));
        assert_eq!(changes(Change::Closed, info, vec![]), Some((Change::Closed, warning, 1)));
        assert_eq!(changes(Change::Closed, info, vec![]), None, "nobody was called for it");
    }
}
