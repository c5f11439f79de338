//! The cluster, asked from outside: every analyser answers for the partitions it speaks for.

mod live;

pub use live::{Live, Unanswered, together};

use super::analyser::{NodeRow, Reply};
use crate::cluster::{Error, Settings, connect, subject};
use crate::model::{Finding, FindingId};
use futures_util::StreamExt;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// How long answers are waited for, where some partition has none.
const PATIENCE: Duration = Duration::from_secs(2);

/// How long answers of others are waited for once every partition has one.
const OTHERS: Duration = Duration::from_millis(200);

/// The joined replies of the analysers.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Cluster {
    /// The findings now.
    pub findings: Vec<Finding>,
    /// Findings that no answer had room for.
    pub more_findings: u64,
    /// Findings that were closed lately, the latest first.
    pub closed: Vec<Finding>,
    /// The nodes, as the analyser that hears most of each hears it.
    pub nodes: Vec<NodeRow>,
    /// Nodes that no answer had room for.
    pub more_nodes: u64,
    /// Analysers that answered.
    pub analysers: usize,
    /// Partitions for which nobody speaks.
    pub unspoken: Vec<u32>,
    /// Communicators that are open.
    pub communicators: u64,
    /// Processes known.
    pub ranks: u64,
    /// The messages that analysers refused, by reason.
    pub refused: BTreeMap<String, u64>,
    /// Why JetStream does not keep what some analyser tells, where it does not.
    pub not_kept: Option<String>,
}

/// Asks all analysers.
///
/// # Errors
/// Why the servers cannot be reached. That no analyser answers is none: there are none then.
pub async fn ask(settings: &Settings) -> Result<Cluster, Error> {
    let client = connect(settings, "ringwatch reader", false, |_| ()).await?;
    let wrong = |why: String| Error::Connect { servers: settings.named_servers(), why };
    let inbox = client.new_inbox();
    let mut answers = client.subscribe(inbox.clone()).await.map_err(|e| wrong(e.to_string()))?;
    let on = format!("{}.read.state", subject::ROOT);
    client.publish_with_reply(on, inbox, bytes::Bytes::new()).await.map_err(|e| wrong(e.to_string()))?;
    client.flush().await.map_err(|e| wrong(e.to_string()))?;
    let mut all: Vec<Reply> = Vec::new();
    let mut until = Instant::now() + PATIENCE;
    while let Ok(Some(m)) =
        tokio::time::timeout(until.saturating_duration_since(Instant::now()), answers.next()).await
    {
        // Where nobody listens the server says so, in an empty message.
        if m.payload.is_empty() {
            break;
        }
        all.extend(Reply::read(&m.payload));
        if !all.is_empty() && unspoken(&all).is_empty() {
            until = until.min(Instant::now() + OTHERS);
        }
    }
    Ok(Cluster::of(&all))
}

fn unspoken(all: &[Reply]) -> Vec<u32> {
    let known: BTreeSet<u32> = all.iter().flat_map(|r| r.partitions.iter().copied()).collect();
    let spoken: BTreeSet<u32> = all.iter().flat_map(|r| r.speaks_for.iter().copied()).collect();
    known.difference(&spoken).copied().collect()
}

impl Cluster {
    /// Joins these replies.
    pub fn of(all: &[Reply]) -> Self {
        let mut findings: BTreeMap<FindingId, Finding> = BTreeMap::new();
        let mut closed: BTreeMap<FindingId, Finding> = BTreeMap::new();
        let mut nodes: BTreeMap<String, NodeRow> = BTreeMap::new();
        for r in all {
            findings.extend(r.findings.iter().map(|f| (f.id, f.clone())));
            closed.extend(r.closed.iter().map(|f| (f.id, f.clone())));
            for n in &r.nodes {
                match nodes.get(&n.name) {
                    Some(known) if known.messages >= n.messages => {}
                    _ => drop(nodes.insert(n.name.clone(), n.clone())),
                }
            }
        }
        // What somebody still finds is open.
        let mut closed: Vec<Finding> =
            closed.into_values().filter(|f| !findings.contains_key(&f.id)).collect();
        closed.sort_by(|a, b| (&b.closed_at, b.id).cmp(&(&a.closed_at, a.id)));
        let mut findings: Vec<Finding> = findings.into_values().collect();
        findings.sort_by(|a, b| (&a.since, a.id).cmp(&(&b.since, b.id)));
        let most = |of: fn(&Reply) -> u64| all.iter().map(of).max().unwrap_or(0);
        let mut refused: BTreeMap<String, u64> = BTreeMap::new();
        for (why, n) in all.iter().flat_map(|r| &r.refused) {
            let known = refused.entry(why.clone()).or_default();
            *known = (*known).max(*n);
        }
        let more = |known: u64, shown: usize| known.saturating_sub(shown as u64);
        let known = most(|r| (r.nodes.len() as u64).saturating_add(r.more_nodes));
        Cluster {
            findings,
            closed,
            more_findings: all.iter().fold(0, |sum, r| sum.saturating_add(r.more_findings)),
            more_nodes: more(known, nodes.len()),
            nodes: nodes.into_values().collect(),
            analysers: all.len(),
            unspoken: unspoken(all),
            communicators: most(|r| r.communicators),
            ranks: most(|r| r.ranks),
            refused,
            not_kept: all.iter().find_map(|r| r.not_kept.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::message::VERSION;
    use crate::model::{CommId, Kind, OperationRef, Track};

    fn reply(speaks_for: &[u32], id: u64) -> Reply {
        let operation = OperationRef::named("AllReduce", Track::Collective, 1);
        let finding = Finding {
            id: FindingId(id),
            ..Finding::new(Kind::MissingRank, CommId::unowned(1), vec![], operation)
        };
        let node = NodeRow { name: "a".to_owned(), messages: id, ..NodeRow::default() };
        Reply {
            ringwatch: VERSION,
            partitions: vec![0, 1, 2],
            speaks_for: speaks_for.to_vec(),
            findings: vec![finding],
            nodes: vec![node],
            ..Reply::default()
        }
    }

    #[test]
    fn what_two_say_is_one_thing_and_what_nobody_speaks_for_is_named() {
        let one = Cluster::of(&[reply(&[0], 7)]);
        assert_eq!((one.findings.len(), one.unspoken.as_slice()), (1, [1, 2].as_slice()));
        let both = Cluster::of(&[reply(&[0], 7), reply(&[1, 2], 7)]);
        assert_eq!((both.findings.len(), both.unspoken.len(), both.analysers), (1, 0, 2));
        let other = Cluster::of(&[reply(&[0], 7), reply(&[1, 2], 8)]);
        assert_eq!((other.findings.len(), other.nodes[0].messages), (2, 8));
        let full = Reply { not_kept: Some("full".to_owned()), ..reply(&[1, 2], 8) };
        assert_eq!(
            (other.not_kept, Cluster::of(&[reply(&[0], 7), full]).not_kept.as_deref()),
            (None, Some("full"))
        );
        assert_eq!(Cluster::of(&[]), Cluster::default());
    }
}
