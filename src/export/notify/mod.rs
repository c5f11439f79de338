//! Notices about findings for people and programs outside: webhooks, and programs that the agent starts.
//!
//! [`Notices`] picks the changes that a receiver has to hear of, [`body()`] writes them, [`Poster`] sends them. A finding of severity
//! info is never sent.

mod body;
mod post;
mod settings;

pub use body::{as_json, body, variables};
pub use post::{Failure, Poster};
pub use settings::{Command, Format, Least, Settings, Webhook};

use crate::export::metrics::{NamedRank, named_ranks};
use crate::join::{Join, Process};
use crate::model::{Change, Finding, FindingEvent, FindingId, Rank, Severity};
use std::collections::BTreeMap;

/// Open findings that a receiver knows at most.
const KNOWN_MAX: usize = 65_536;

/// A change of a finding that a receiver hears of.
#[derive(Debug, Clone, PartialEq)]
pub struct Notice {
    /// The change as the receiver sees it: one that became severe enough is opened, one that is no more is closed.
    pub change: Change,
    /// The finding as it is now.
    pub finding: Finding,
    /// The job's name; empty where none is known.
    pub job: String,
    /// The user of the job's processes.
    pub owner: Option<u32>,
    /// The ranks and hosts that the finding names.
    pub named: Vec<NamedRank>,
    /// The first host that it named when the receiver first heard of it; empty where it named none.
    pub host: String,
    /// Open findings that the receiver knows of that host, this one among them unless it is closed.
    pub open_on_host: usize,
    /// The node whose agent or analyser sends the notice.
    pub node: String,
}

/// A finding as the receiver knows it.
#[derive(Debug, Clone, PartialEq)]
struct Known {
    severity: Severity,
    ranks: Vec<Rank>,
    job: String,
    owner: Option<u32>,
    named: Vec<NamedRank>,
    host: String,
}

/// Picks the changes that one receiver has to hear of.
#[derive(Debug)]
pub struct Notices {
    node: String,
    least: Severity,
    known: BTreeMap<FindingId, Known>,
}

impl Notices {
    /// Nothing is known yet to a receiver of findings of at least this severity.
    pub fn new(node: String, least: Least) -> Self {
        Notices { node, least: least.severity(), known: BTreeMap::new() }
    }

    /// Takes findings that an agent before this one has reported.
    pub fn restore(&mut self, join: &Join, findings: &[Finding]) {
        for f in findings.iter().filter(|f| f.open && f.severity >= self.least).take(KNOWN_MAX) {
            self.known.insert(f.id, describe(join, f, None));
        }
    }

    /// The notice about a change; absent where the receiver need not hear of it. Severity, ranks and the end are what matters.
    pub fn of(&mut self, join: &Join, event: &FindingEvent) -> Option<Notice> {
        let f = &event.finding;
        let before = self.known.remove(&f.id);
        let is_open = event.change != Change::Closed && f.severity >= self.least;
        let change = match (&before, is_open) {
            (None, false) => return None,
            (None, true) => Change::Opened,
            (Some(_), false) => Change::Closed,
            // The same hang again, which another analyser closed.
            (Some(_), true) if event.change == Change::Opened => Change::Opened,
            (Some(b), true) if b.severity == f.severity && b.ranks == f.ranks => {
                self.known.extend(before.map(|b| (f.id, b)));
                return None;
            }
            (Some(_), true) => Change::Updated,
        };
        let now = describe(join, f, before.as_ref());
        if is_open && self.known.len() < KNOWN_MAX {
            self.known.insert(f.id, now.clone());
        }
        let open_on_host = self.known.values().filter(|k| !k.host.is_empty() && k.host == now.host).count();
        let Known { job, owner, named, host, .. } = now;
        Some(Notice {
            change,
            finding: f.clone(),
            job,
            owner,
            named,
            host,
            open_on_host,
            node: self.node.clone(),
        })
    }
}

/// Describes a finding for a receiver that may have known it before: the processes of a job that has ended may be forgotten.
fn describe(join: &Join, f: &Finding, before: Option<&Known>) -> Known {
    let named: Vec<NamedRank> = named_ranks(join, f).into_iter().collect();
    let process = process_of(join, f);
    let record = process.map(|p| &p.record);
    let job = record.and_then(|r| r.job.name.clone());
    let first = named.first().map(|n| n.host.clone());
    Known {
        severity: f.severity,
        ranks: f.ranks.clone(),
        job: job.or_else(|| before.map(|b| b.job.clone())).unwrap_or_default(),
        owner: record.and_then(|r| r.owner).or(before.and_then(|b| b.owner)),
        host: before.map(|b| b.host.clone()).filter(|h| !h.is_empty()).or(first).unwrap_or_default(),
        named: if named.is_empty() { before.map(|b| b.named.clone()).unwrap_or_default() } else { named },
    }
}

/// The process of a finding's first rank, or of another one of its communicator.
fn process_of<'a>(join: &'a Join, f: &Finding) -> Option<&'a Process> {
    let members = join.communicator(f.communicator).map(|c| c.members());
    let ranks = f.ranks.iter().filter_map(|r| members?.get(r));
    let mut all = ranks.chain(members.into_iter().flat_map(|m| m.values()));
    all.find_map(|m| join.process(m.record.segment))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::join::testing::{member, process};
    use crate::model::{CommId, Kind, OperationRef, Track};

    const INFO: Severity = Severity::Info;
    const WARNING: Severity = Severity::Warning;
    const CRITICAL: Severity = Severity::Critical;

    fn finding(severity: Severity, ranks: &[u32]) -> Finding {
        let operation = OperationRef::named("AllReduce", Track::Collective, 5);
        let ranks = ranks.iter().map(|r| Rank(*r)).collect();
        Finding {
            severity,
            id: FindingId(1),
            ..Finding::new(Kind::Straggler, CommId::unowned(7), ranks, operation)
        }
    }

    fn join() -> Join {
        let mut join = Join::new();
        join.feed(process(0));
        join.feed(member(0, 2, 1));
        join
    }

    fn heard(
        least: Least,
        restored: &[Finding],
        changes: &[(Change, Severity, &[u32])],
    ) -> Vec<Option<(Change, usize)>> {
        let mut notices = Notices::new("n1".to_owned(), least);
        notices.restore(&join(), restored);
        let mut of = |(change, severity, ranks): &(Change, Severity, &[u32])| {
            let event = FindingEvent { change: *change, finding: finding(*severity, ranks) };
            notices.of(&join(), &event).map(|n| (n.change, n.open_on_host))
        };
        changes.iter().map(&mut of).collect()
    }

    #[test]
    fn a_receiver_hears_of_what_is_severe_enough_for_it() {
        use Change::{Closed, Opened, Updated};
        let rank: &[u32] = &[0];
        let life = [
            (Opened, INFO, rank),
            (Updated, WARNING, rank),
            (Updated, WARNING, rank),
            (Updated, CRITICAL, rank),
            (Updated, CRITICAL, &[]),
            (Updated, INFO, rank),
            (Closed, INFO, rank),
        ];
        let all =
            [None, Some((Opened, 1)), None, Some((Updated, 1)), Some((Updated, 1)), Some((Closed, 0)), None];
        assert_eq!(heard(Least::Warning, &[], &life), all);
        let critical = [None, None, None, Some((Opened, 1)), Some((Updated, 1)), Some((Closed, 0)), None];
        assert_eq!(heard(Least::Critical, &[], &life), critical);
        // A hang that comes again under its name, after another analyser closed it.
        let again = [(Opened, CRITICAL, rank), (Opened, CRITICAL, rank)];
        assert_eq!(heard(Least::Warning, &[], &again), [Some((Opened, 1)), Some((Opened, 1))]);
        // An agent before this one reported it.
        let restored = [finding(WARNING, rank)];
        let after = [(Updated, WARNING, rank), (Closed, WARNING, rank)];
        assert_eq!(heard(Least::Warning, &restored, &after), [None, Some((Closed, 0))]);
    }
}
