//! The ranks and hosts that open findings name: an alert says of whom it is.

use super::family::{Families, Value};
use super::scope::uid_text;
use crate::export::catalogue::Metric;
use crate::join::Join;
use crate::model::{Finding, Kind, Severity};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// Ranks of one finding that are named at most.
const RANKS_PER_FINDING: usize = 8;
/// Series at most, the most severe first.
const SERIES: usize = 256;

/// A rank or a host that a finding names.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct NamedRank {
    /// Its rank in the job; absent where its launcher does not say, or where a host alone is named.
    pub job_rank: Option<u32>,
    /// Its host.
    pub host: String,
}

/// The ranks that a finding names, or its host where it names none that is known.
pub fn named_ranks(join: &Join, f: &Finding) -> BTreeSet<NamedRank> {
    let members = join.communicator(f.communicator).map(|c| c.members());
    let process = |r| join.process(members?.get(r)?.record.segment);
    let ranks = f.ranks.iter().take(RANKS_PER_FINDING).filter_map(process);
    let ranks: BTreeSet<NamedRank> =
        ranks.map(|p| NamedRank { job_rank: p.record.job.rank, host: p.record.host.clone() }).collect();
    if !ranks.is_empty() {
        return ranks;
    }
    f.place.iter().map(|p| NamedRank { job_rank: None, host: p.host.clone() }).collect()
}

/// Node, job, its user, kind, severity, and who is named.
type Key = (String, String, Option<u32>, Kind, Severity, NamedRank);

/// The number of open findings that name each rank or host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FindingRanks {
    counts: BTreeMap<Key, u64>,
}

impl FindingRanks {
    /// Adds an open finding of a job and its user, which this node reports.
    pub fn add(&mut self, join: &Join, node: &str, (job, owner): (&str, Option<u32>), f: &Finding) {
        for named in named_ranks(join, f) {
            let key = (node.to_owned(), job.to_owned(), owner, f.kind, f.severity, named);
            *self.counts.entry(key).or_default() += 1;
        }
    }

    /// Writes them as this metric.
    pub(super) fn gather(&self, out: &mut Families, metric: &'static Metric) {
        let mut all: Vec<(&Key, &u64)> = self.counts.iter().collect();
        // Users take turns: one with many findings does not take the place of others.
        let mut turns: BTreeMap<(Severity, Option<u32>), usize> = BTreeMap::new();
        all.sort_by_cached_key(|((_, _, owner, _, severity, _), _)| {
            let turn = turns.entry((*severity, *owner)).or_default();
            *turn += 1;
            (Reverse(*severity), *turn)
        });
        for ((node, job, owner, kind, severity, named), n) in all.iter().take(SERIES) {
            let rank = named.job_rank.map(|r| r.to_string()).unwrap_or_default();
            let labels =
                [node, job, &*uid_text(*owner), kind.as_str(), severity.as_str(), &rank, &named.host];
            out.number(metric, &labels, **n as f64);
        }
        let folded: u64 = all.iter().skip(SERIES).map(|(_, n)| **n).sum();
        if folded > 0 {
            out.overflow(metric, Value::Number(folded as f64));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::join::testing::{member, process};
    use crate::model::{CommId, OperationRef, Place, Rank, Track};

    fn finding(ranks: Vec<Rank>) -> Finding {
        let operation = OperationRef::named("AllReduce", Track::Collective, 5);
        Finding::new(Kind::MissingRank, CommId::unowned(7), ranks, operation)
    }

    #[test]
    fn ranks_are_named_with_their_hosts_and_devices_by_theirs() {
        let mut join = Join::new();
        for r in 0..12 {
            join.feed(process(r));
            join.feed(member(r, 12, 1));
        }
        let host = join.processes().next().expect("one").record.host.clone();
        let named = named_ranks(&join, &finding(vec![Rank(3)]));
        assert_eq!(named.iter().map(|n| n.host.as_str()).collect::<Vec<_>>(), [host.as_str()]);
        assert!(named_ranks(&join, &finding((0..12).map(Rank).collect())).len() <= RANKS_PER_FINDING);
        let device = Finding {
            place: Some(Place { host: "n7".to_owned(), device: "GPU 0".to_owned() }),
            ..finding(Vec::new())
        };
        let named: Vec<NamedRank> = named_ranks(&join, &device).into_iter().collect();
        assert_eq!(named, [NamedRank { job_rank: None, host: "n7".to_owned() }]);
        assert!(named_ranks(&join, &finding(Vec::new())).is_empty(), "nobody is named");
    }

    #[test]
    fn what_is_most_severe_has_a_series_first_and_the_rest_is_counted() {
        static METRIC: &Metric = crate::export::catalogue::FINDING_RANKS;
        let mut counts = FindingRanks::default();
        for r in 0..300 {
            let named = NamedRank { job_rank: Some(r), host: "n1".to_owned() };
            let severity = if r == 299 { Severity::Critical } else { Severity::Warning };
            counts
                .counts
                .insert(("n1".to_owned(), "train".to_owned(), Some(7), Kind::Straggler, severity, named), 2);
        }
        let other = NamedRank { job_rank: Some(0), host: "n9".to_owned() };
        let key = ("n9".to_owned(), "z".to_owned(), Some(8), Kind::Straggler, Severity::Warning, other);
        counts.counts.insert(key, 1);
        let mut out = Families::new(None);
        counts.gather(&mut out, METRIC);
        let families = out.finish();
        let samples = &families[0].samples;
        let ranks = |s: &super::super::Sample| s.labels.iter().any(|(k, v)| *k == "job_rank" && v == "299");
        assert_eq!((samples.len(), ranks(&samples[0])), (SERIES + 1, true));
        assert!(samples.iter().any(|s| s.labels.iter().any(|(_, v)| v == "n9")), "another user's rank");
        let rest = samples.last().expect("the rest");
        assert!(matches!(rest.value, Value::Number(n) if n == 90.0), "{rest:?}");
    }
}
