//! Verdicts that wait: of each finding the last word only, so that there are never more than findings.

use super::Verdict;
use crate::model::FindingId;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

/// Verdicts that wait at most, unless more findings are over than that.
const MOST: usize = 65_536;

#[derive(Debug, Default)]
pub(super) struct LastWords {
    words: BTreeMap<FindingId, Arc<Verdict>>,
    /// The order in which findings are published, the longest waiting first: all that wait, but for those under way.
    turns: VecDeque<FindingId>,
    /// Findings that are being published, which no newer verdict overtakes.
    under_way: BTreeSet<FindingId>,
}

impl LastWords {
    /// A newer word on a finding. Where there is no room one that is open goes, which is told again anyway; of one that
    /// is over nothing more is said, so it goes only if it was not told to `anybody`.
    pub(super) fn put(&mut self, verdict: Arc<Verdict>, anybody: bool) {
        let id = verdict.finding.id;
        if self.words.insert(id, verdict).is_none() && !self.under_way.contains(&id) {
            self.turns.push_back(id);
        }
        if self.words.len() > MOST {
            let open = |id: &FindingId| self.words.get(id).is_some_and(|v| v.finding.open);
            let goes = if anybody { self.turns.iter().position(open) } else { Some(0) };
            if let Some(id) = goes.and_then(|at| self.turns.remove(at)) {
                self.words.remove(&id);
            }
        }
    }

    /// The word that waits longest; none on that finding follows until it is done.
    pub(super) fn take(&mut self) -> Option<Arc<Verdict>> {
        let id = self.turns.pop_front()?;
        self.under_way.insert(id);
        self.words.remove(&id)
    }

    /// Notes that a verdict was published.
    pub(super) fn done(&mut self, id: FindingId) {
        if self.under_way.remove(&id) && self.words.contains_key(&id) {
            self.turns.push_back(id);
        }
    }

    /// Notes that a verdict could not be published: it waits again, unless there is a newer one.
    pub(super) fn again(&mut self, verdict: Arc<Verdict>) {
        let id = verdict.finding.id;
        self.words.entry(id).or_insert(verdict);
        self.done(id);
    }

    /// True where something can be taken.
    pub(super) fn is_ready(&self) -> bool {
        !self.turns.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{CommId, Finding, Kind, OperationRef, Track};
    use crate::runtime::analyser::Right;

    fn verdict(id: u64, lease: u64, open: bool) -> Arc<Verdict> {
        let operation = OperationRef::named("AllReduce", Track::Collective, 4);
        let finding = Finding {
            id: FindingId(id),
            open,
            ..Finding::new(Kind::MissingRank, CommId::unowned(1), vec![], operation)
        };
        let right = Right { partition: 0, lease, guessed: false };
        Arc::new(Verdict { ringwatch: 1, analyser: "one".to_owned(), right, finding })
    }

    fn taken(latest: &mut LastWords) -> Option<(u64, u64)> {
        latest.take().map(|v| (v.finding.id.0, v.right.lease))
    }

    #[test]
    fn the_last_word_on_each_finding_waits_and_none_overtakes_another() {
        let mut all = LastWords::default();
        for v in [verdict(2, 1, true), verdict(1, 1, true), verdict(2, 2, true)] {
            all.put(v, true);
        }
        assert_eq!(taken(&mut all), Some((2, 2)), "the one that waits longest, as it is now");
        all.put(verdict(2, 3, false), true);
        assert_eq!(taken(&mut all), Some((1, 1)));
        assert_eq!(taken(&mut all), None, "the former word on it is under way");
        all.again(verdict(2, 2, true));
        all.again(verdict(1, 1, true));
        assert_eq!(taken(&mut all), Some((2, 3)), "a newer one has taken its place");
        assert_eq!(taken(&mut all), Some((1, 1)), "what was not taken is tried again");
        all.done(FindingId(1));
        all.done(FindingId(2));
        assert!(!all.is_ready() && all.words.is_empty() && all.under_way.is_empty());
    }

    #[test]
    fn where_there_is_no_room_what_is_over_stays() {
        let mut all = LastWords::default();
        let most = MOST as u64;
        all.put(verdict(0, 1, false), true);
        (1..most + 10).for_each(|id| all.put(verdict(id, 1, true), true));
        assert_eq!((all.words.len(), all.turns.len()), (MOST, MOST));
        assert_eq!(taken(&mut all), Some((0, 1)));
        assert_eq!(taken(&mut all), Some((11, 1)), "those that waited longest went");
        let mut nobody = LastWords::default();
        (0..most + 10).for_each(|id| nobody.put(verdict(id, 1, false), false));
        assert_eq!((nobody.words.len(), taken(&mut nobody)), (MOST, Some((10, 1))));
    }
}
