//! The life cycle of findings: opened, updated, closed with a reason, and forgotten in the end.
//!
//! Rules remember nothing; this remembers what they gave. Each change is reported once.

use super::wall;
use crate::join::Join;
use crate::model::{
    COMM_INIT, Cause, Change, CloseReason, CommId, Finding, FindingEvent, FindingId, Rank, Track,
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Findings kept, and open ones beyond.
const KEPT: usize = 1024;
/// Open findings of one user: a job can make as many as it has communicators.
const OPEN_OF_USER: usize = 256;
/// Earlier operations that are remembered of a finding that comes again and again.
const EARLIER_KEPT: usize = 512;
/// How long a finding of before a restart waits for its rule to give it again, in ns: containers are searched for seconds.
const RESTORED_NS: u64 = 15_000_000_000;

/// Every finding that is known.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    found: BTreeMap<FindingId, Finding>,
    /// Findings of before a restart that no rule has given since, and when they are closed for that.
    restored: BTreeMap<FindingId, u64>,
    /// Open findings by user; those of devices belong to nobody.
    open_of_user: BTreeMap<Option<u32>, usize>,
    /// Of findings that came again: the name that the last occurrence has by itself.
    again: BTreeMap<FindingId, FindingId>,
    /// Operations in which findings of one name showed before.
    earlier: BTreeMap<FindingId, VecDeque<(Track, u64)>>,
    /// Findings of this pass that were not opened, since their user has too many.
    leaving_out: BTreeMap<Option<u32>, usize>,
    /// The same of the last pass that is over.
    left_out: BTreeMap<Option<u32>, usize>,
    /// Changes since the last pass.
    events: Vec<FindingEvent>,
    /// Wall clock less monotonic clock in ns, as it was last known.
    wall_ahead_ns: Option<u64>,
}

impl Ledger {
    pub(super) fn get(&self, id: FindingId) -> Option<&Finding> {
        self.found.get(&id)
    }

    /// The open ones.
    pub(super) fn open(&self) -> impl Iterator<Item = &Finding> {
        self.found.values().filter(|f| f.open)
    }

    /// The name under which a finding is kept: its own, or that of the one that it repeats. A hang has a name for each
    /// operation; one that resolved and comes again with the same culprits, once a loop for example, is no new finding.
    pub(super) fn name(&mut self, f: &Finding) -> FindingId {
        let own = f.named();
        if !f.kind.is_hang() || f.operation.func == COMM_INIT || self.found.contains_key(&own) {
            return own;
        }
        if let Some((first, _)) = self.again.iter().find(|(_, last)| **last == own) {
            return *first;
        }
        let repeated = self.found.values().filter(|k| repeats(f, k)).max_by_key(|k| k.last_seen_ns);
        let Some(first) = repeated.map(|k| k.id) else { return own };
        self.again.insert(first, own);
        first
    }

    /// True where a rank was reported as what holds up an operation.
    pub(super) fn holds_up(&self, comm: CommId, track: Track, order: u64, rank: Rank) -> bool {
        let hangs = self.found.values().filter(|f| f.kind.is_hang());
        hangs.filter(|f| f.communicator == comm && f.ranks.contains(&rank)).any(|f| {
            (f.operation.track, f.operation.order) == (track, order)
                || self.earlier.get(&f.id).is_some_and(|e| e.contains(&(track, order)))
        })
    }

    /// Takes over findings of an earlier run. Those that were open stay so until it shows whether their rules give them
    /// again.
    pub(super) fn restore(&mut self, findings: Vec<Finding>, now_ns: u64) {
        for f in findings {
            if f.open {
                self.restored.insert(f.id, now_ns.saturating_add(RESTORED_NS));
            }
            self.found.entry(f.id).or_insert(f);
        }
        self.forget();
        self.count_open();
    }

    /// Keeps a finding as it is for another pass, where its rule was not asked.
    pub(super) fn confirm(&mut self, id: FindingId, join: &Join, now_ns: u64) {
        if let Some(f) = self.found.get_mut(&id).filter(|f| f.open) {
            f.last_seen_ns = now_ns;
            f.last_seen = wall(join, now_ns);
        }
    }

    /// Takes what a rule gave.
    pub(super) fn take(&mut self, mut f: Finding, join: &Join, now_ns: u64) {
        self.restored.remove(&f.id);
        if !self.has_room(&f) {
            *self.leaving_out.entry(f.communicator.owner()).or_default() += 1;
            return;
        }
        let known = self.found.get(&f.id);
        // A rule may go on to give what stands still for ever, because nobody is left to go on.
        f.open &= known.is_none_or(|k| k.open) || !has_ended(&f, join);
        f.first_seen_ns = known.map_or(now_ns, |k| k.first_seen_ns);
        // What its rule remembers as closed was last seen when it was open.
        f.last_seen_ns = known.filter(|_| !f.open).map_or(now_ns, |k| k.last_seen_ns);
        // What is kept of a device goes back two minutes, and its trouble may go back further.
        if let Some(k) = known.filter(|k| k.open && f.kind.is_device() && k.since_ns < f.since_ns) {
            f.since_ns = k.since_ns;
            f.since.clone_from(&k.since);
        }
        if f.since_ns == 0 {
            // What is so over minutes has no beginning of its own.
            f.since_ns = f.first_seen_ns;
            f.since = wall(join, f.since_ns);
        }
        let first_seen = known.and_then(|k| k.first_seen.clone());
        f.first_seen = first_seen.or_else(|| wall(join, f.first_seen_ns));
        f.last_seen = wall(join, f.last_seen_ns);
        let change = match known {
            None => Some(Change::Opened),
            Some(k) if f.open && !k.open => Some(Change::Opened),
            Some(k) if f.open && is_updated(k, &f) => Some(Change::Updated),
            Some(_) => None,
        };
        let closes = !f.open && known.is_none_or(|k| k.open);
        f.count = known.map_or(1, |k| k.count.saturating_add(u64::from(f.open && !k.open)));
        let earlier = known.filter(|k| k.kind.is_hang()).map(|k| (k.operation.track, k.operation.order));
        if let Some(k) = known.filter(|k| !f.open && !k.open) {
            (f.closed_ns, f.close_reason) = (k.closed_ns, k.close_reason);
            f.closed_at.clone_from(&k.closed_at);
        }
        if let Some(change) = change {
            self.events.push(FindingEvent { change, finding: f.clone() });
        }
        let id = f.id;
        if let Some(before) = earlier.filter(|o| *o != (f.operation.track, f.operation.order)) {
            let all = self.earlier.entry(id).or_default();
            all.push_back(before);
            if all.len() > EARLIER_KEPT {
                all.pop_front();
            }
        }
        if change == Some(Change::Opened) {
            *self.open_of_user.entry(f.communicator.owner()).or_default() += 1;
        }
        self.found.insert(id, f);
        if closes {
            self.close(id, CloseReason::Resolved, now_ns);
        }
    }

    /// Closes what no rule has given for `settle_ns`, and what belongs to processes that have ended. `seen` was given in
    /// this pass. Returns the changes since the last pass.
    pub(super) fn pass(
        &mut self,
        join: &Join,
        seen: &BTreeSet<FindingId>,
        settle_ns: u64,
        now_ns: u64,
    ) -> Vec<FindingEvent> {
        if let Some(unix_ns) = join.unix_ns(now_ns) {
            self.wall_ahead_ns = unix_ns.checked_sub(now_ns);
        }
        let mut closing = Vec::new();
        for f in self.found.values().filter(|f| f.open) {
            if let Some(due_ns) = self.restored.get(&f.id) {
                if now_ns >= *due_ns {
                    closing.push((f.id, CloseReason::Unobserved));
                }
                continue;
            }
            // A rule that is silent for a moment has not changed its mind yet.
            let silent = !seen.contains(&f.id) && now_ns.saturating_sub(f.last_seen_ns) >= settle_ns;
            if has_ended(f, join) {
                closing.push((f.id, CloseReason::JobEnded));
            } else if silent && self.is_superseded(f) {
                closing.push((f.id, CloseReason::Superseded));
            } else if silent {
                closing.push((f.id, CloseReason::Resolved));
            }
        }
        for (id, reason) in closing {
            self.restored.remove(&id);
            self.close(id, reason, now_ns);
        }
        self.forget();
        self.count_open();
        self.left_out = std::mem::take(&mut self.leaving_out);
        std::mem::take(&mut self.events)
    }

    /// How many findings of each user were not opened in the last pass, since the user has too many.
    pub(super) fn left_out(&self) -> &BTreeMap<Option<u32>, usize> {
        &self.left_out
    }

    fn has_room(&self, f: &Finding) -> bool {
        let owner = f.communicator.owner();
        let open = self.open_of_user.get(&owner).copied().unwrap_or(0);
        // Findings without a user are of devices, which no user makes.
        owner.is_none() || open < OPEN_OF_USER || self.found.get(&f.id).is_some_and(|k| k.open || !f.open)
    }

    fn count_open(&mut self) {
        self.open_of_user.clear();
        for f in self.found.values().filter(|f| f.open) {
            *self.open_of_user.entry(f.communicator.owner()).or_default() += 1;
        }
    }

    /// True where a hang of the same communicator was found since: it stands still for what that says.
    fn is_superseded(&self, f: &Finding) -> bool {
        let later = |o: &Finding| {
            o.open
                && o.id != f.id
                && o.communicator == f.communicator
                && o.kind.is_hang()
                && o.first_seen_ns >= f.first_seen_ns
        };
        f.kind.is_hang() && self.found.values().any(later)
    }

    fn close(&mut self, id: FindingId, reason: CloseReason, now_ns: u64) {
        let closed_at = self.wall_ahead_ns.and_then(|ahead| super::rfc3339(now_ns.saturating_add(ahead)));
        let Some(f) = self.found.get_mut(&id) else { return };
        f.open = false;
        (f.closed_ns, f.close_reason, f.closed_at) = (now_ns, Some(reason), closed_at);
        self.events.push(FindingEvent { change: Change::Closed, finding: f.clone() });
    }

    /// Days of jobs leave findings behind: closed ones go.
    fn forget(&mut self) {
        if self.found.len() > KEPT {
            let all = std::mem::take(&mut self.found).into_values().collect();
            self.found = most_recent(all, KEPT, usize::MAX).into_iter().map(|f| (f.id, f)).collect();
            self.again.retain(|id, _| self.found.contains_key(id));
            self.earlier.retain(|id, _| self.found.contains_key(id));
        }
    }

    /// Every finding, open ones first, then by time.
    pub(super) fn findings(&self) -> Vec<Finding> {
        let mut all: Vec<Finding> = self.found.values().cloned().collect();
        all.sort_by_key(|f| (!f.open, f.since_ns, f.id));
        all
    }
}

/// Keeps at most `open` open findings, and closed ones until there are `all`. Each user keeps as many as any other, the
/// latest first: nobody's findings push out those of somebody else.
pub(crate) fn most_recent(mut findings: Vec<Finding>, all: usize, open: usize) -> Vec<Finding> {
    findings.sort_by(|a, b| {
        (b.open, &b.closed_at, b.closed_ns, b.id).cmp(&(a.open, &a.closed_at, a.closed_ns, a.id))
    });
    let mut of_user: BTreeMap<(bool, Option<u32>), usize> = BTreeMap::new();
    let mut turns: Vec<(bool, usize, Finding)> = Vec::with_capacity(findings.len());
    for f in findings {
        let turn = of_user.entry((f.open, f.communicator.owner())).or_default();
        *turn += 1;
        turns.push((!f.open, *turn, f));
    }
    turns.sort_by_key(|(is_closed, turn, _)| (*is_closed, *turn));
    let are_open = turns.partition_point(|(is_closed, ..)| !is_closed);
    turns.truncate(all.max(are_open.min(open)));
    turns.into_iter().map(|(.., f)| f).collect()
}

/// True where nothing goes on any more: every process is gone. A device is there without a job.
fn has_ended(f: &Finding, join: &Join) -> bool {
    !f.kind.is_device() && join.communicator(f.communicator).is_none_or(|c| join.is_deserted(c))
}

/// True where a hang is another occurrence of one that resolved, or the present one of a finding that an earlier run kept
/// under the name of the first. Of processes that are gone none comes again.
fn repeats(f: &Finding, k: &Finding) -> bool {
    let place = |f: &Finding| (f.operation.track, f.operation.order);
    if !k.kind.is_hang() || k.communicator != f.communicator || k.operation.track != f.operation.track {
        return false;
    }
    if k.open {
        return place(k) == place(f);
    }
    k.close_reason == Some(CloseReason::Resolved)
        && (k.kind, &k.ranks, &k.cause, &k.operation.func) == (f.kind, &f.ranks, &f.cause, &f.operation.func)
        && k.operation.order < f.operation.order
        && !matches!(f.cause, Some(Cause::ProcessGone(_)))
}

/// True where the same finding says something else than before.
fn is_updated(was: &Finding, is: &Finding) -> bool {
    (was.kind, was.severity, &was.cause, &was.ranks) != (is.kind, is.severity, &is.cause, &is.ranks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::join::testing::{member, process};
    use crate::model::{Cause, CommId, Kind, Liveness, OperationRef, Rank, Track, Update};

    const S: u64 = 1_000_000_000;
    const SETTLE: u64 = 2 * S;

    fn hang(order: u64) -> Finding {
        let operation = OperationRef::named("AllReduce", Track::Collective, order);
        Finding::new(Kind::MissingRank, CommId::unowned(7), vec![Rank(1)], operation)
    }

    fn job() -> Join {
        let mut join = Join::new();
        (0..2).flat_map(|r| [process(r), member(r, 2, 1)]).for_each(|u| join.feed(u));
        join
    }

    fn ends(join: &mut Join) {
        for rank in 0..2 {
            let Update::Segment(mut s) = process(rank) else { unreachable!() };
            s.liveness = Liveness::Gone(Some(S));
            join.feed(Update::Segment(s));
        }
    }

    /// One pass in which rules give these.
    fn pass(
        ledger: &mut Ledger,
        join: &Join,
        given: &[Finding],
        now_ns: u64,
    ) -> Vec<(Change, Option<CloseReason>)> {
        given.iter().for_each(|f| ledger.take(f.clone(), join, now_ns));
        let seen = given.iter().map(|f| f.id).collect();
        let events = ledger.pass(join, &seen, SETTLE, now_ns);
        events.into_iter().map(|e| (e.change, e.finding.close_reason)).collect()
    }

    #[test]
    fn a_finding_is_opened_updated_and_closed_once_each() {
        let (join, mut l) = (job(), Ledger::default());
        assert_eq!(pass(&mut l, &join, &[hang(3)], S), [(Change::Opened, None)]);
        assert_eq!(pass(&mut l, &join, &[hang(3)], 2 * S), []);
        let other = Finding { cause: Some(Cause::Stopped), ..hang(3) };
        assert_eq!(pass(&mut l, &join, std::slice::from_ref(&other), 3 * S), [(Change::Updated, None)]);
        assert_eq!(pass(&mut l, &join, &[other], 4 * S), []);
        assert_eq!(pass(&mut l, &join, &[], 5 * S), [], "it may only be silent for a moment");
        assert_eq!(pass(&mut l, &join, &[], 6 * S), [(Change::Closed, Some(CloseReason::Resolved))]);
        assert_eq!(pass(&mut l, &join, &[], 7 * S), []);
        let [f] = l.findings().try_into().expect("it is kept");
        assert_eq!((f.open, f.closed_ns, f.closed_at.is_some()), (false, 6 * S, true));
        assert_eq!(pass(&mut l, &join, &[hang(3)], 8 * S), [(Change::Opened, None)], "it came back");
    }

    #[test]
    fn the_end_of_a_job_closes_its_findings_though_their_rule_goes_on() {
        let (mut join, mut l) = (job(), Ledger::default());
        pass(&mut l, &join, &[hang(3)], S);
        ends(&mut join);
        let closed = [(Change::Closed, Some(CloseReason::JobEnded))];
        assert_eq!(pass(&mut l, &join, &[hang(3)], 2 * S), closed);
        assert_eq!(pass(&mut l, &join, &[hang(3)], 3 * S), [], "nothing is opened again");
        // Of a job that had ended before anybody looked, it is reported what was wrong, and that it has ended.
        let both = [(Change::Opened, None), closed[0]];
        assert_eq!(pass(&mut Ledger::default(), &join, &[hang(3)], S), both);
    }

    #[test]
    fn a_hang_that_another_explains_is_superseded() {
        let (join, mut l) = (job(), Ledger::default());
        pass(&mut l, &join, &[hang(5)], S);
        pass(&mut l, &join, &[hang(3)], 2 * S);
        assert_eq!(pass(&mut l, &join, &[hang(3)], 4 * S), [(Change::Closed, Some(CloseReason::Superseded))]);
    }

    #[test]
    fn a_hang_that_comes_again_is_one_finding_with_a_count() {
        let (join, mut l) = (job(), Ledger::default());
        let away = |order| Finding { cause: Some(Cause::InHostCode), ..hang(order) };
        // As the detector does it.
        let mut give = |order: Option<u64>, now_ns| {
            let given: Vec<Finding> = order.map(away).into_iter().collect();
            let given: Vec<Finding> = given.into_iter().map(|f| Finding { id: l.name(&f), ..f }).collect();
            pass(&mut l, &join, &given, now_ns)
        };
        let closed = [(Change::Closed, Some(CloseReason::Resolved))];
        for (n, order) in [(0, 100), (1, 200), (2, 300)] {
            let at = (10 * n + 1) * S;
            assert_eq!(give(Some(order), at), [(Change::Opened, None)], "{order}");
            assert_eq!(give(Some(order), at + S), []);
            assert_eq!(give(None, at + 3 * S), closed);
        }
        let [f] = l.findings().try_into().expect("one finding");
        assert_eq!((f.id, f.count, f.operation.order, f.first_seen_ns), (away(100).id, 3, 300, S));
        for order in [100, 200, 300] {
            assert!(l.holds_up(CommId::unowned(7), Track::Collective, order, Rank(1)), "{order}");
        }
        assert!(!l.holds_up(CommId::unowned(7), Track::Collective, 250, Rank(1)));
    }

    #[test]
    fn another_rank_another_cause_and_an_open_hang_are_not_repeated() {
        let (join, mut l) = (job(), Ledger::default());
        pass(&mut l, &join, &[hang(3)], S);
        assert_eq!(l.name(&hang(9)), hang(9).id, "the first one still stands");
        pass(&mut l, &join, &[], 4 * S);
        assert_eq!(l.name(&hang(9)), hang(3).id);
        let (other, gone) = (vec![Rank(0)], Some(Cause::ProcessGone(None)));
        assert_eq!(l.name(&Finding { ranks: other, ..hang(10) }), hang(10).id);
        assert_eq!(l.name(&Finding { cause: gone, ..hang(11) }), hang(11).id);
        assert_eq!(l.name(&hang(2)), hang(2).id, "an earlier operation is no repetition");
    }

    #[test]
    fn a_finding_that_an_earlier_run_kept_under_its_first_name_keeps_it() {
        let mut l = Ledger::default();
        let kept = Finding { id: hang(3).id, count: 4, since_ns: S, ..hang(9) };
        l.restore(vec![kept], S);
        assert_eq!(l.name(&hang(9)), hang(3).id);
    }

    #[test]
    fn a_user_has_so_many_open_findings_and_keeps_others_from_none() {
        let (join, mut l) = (job(), Ledger::default());
        let of = |uid: u32, order: u64| {
            let operation = OperationRef::named("AllReduce", Track::Collective, order);
            let comm = CommId::new(7, Some(uid));
            let f = Finding::new(Kind::MissingRank, comm, vec![Rank(1)], operation);
            Finding { since_ns: S, ..f }
        };
        let restored = |uid, order, closed: &str| Finding {
            open: false,
            close_reason: Some(CloseReason::Resolved),
            closed_at: Some(closed.to_owned()),
            ..of(uid, order)
        };
        l.restore(vec![restored(1, 1, "2026-11-21T00:00:00Z")], S);
        let many: Vec<Finding> = (0..300).map(|n| of(2, n)).collect();
        // No communicator of theirs is known here, so that they are closed at once; what counts is that they were opened.
        let opened = pass(&mut l, &join, &many, 2 * S).iter().filter(|e| e.0 == Change::Opened).count();
        assert_eq!((opened, l.left_out().get(&Some(2))), (OPEN_OF_USER, Some(&(300 - OPEN_OF_USER))));
        let closed = |n: u64| restored(2, 1000 + n, &format!("2026-11-22T{:02}:{:02}:00Z", n / 60, n % 60));
        l.restore((0..1200).map(closed).collect(), 3 * S);
        let all = l.findings();
        assert_eq!(all.len(), KEPT);
        assert!(all.iter().any(|f| f.communicator.owner() == Some(1)), "the other user's is kept");
    }

    #[test]
    fn findings_of_before_a_restart_wait_for_their_rules() {
        let (join, mut l) = (job(), Ledger::default());
        l.restore(vec![hang(3), hang(4)], 10 * S);
        assert_eq!(pass(&mut l, &Join::new(), &[], 11 * S), [], "nothing was read yet");
        assert_eq!(pass(&mut l, &join, &[hang(3)], 12 * S), [], "it goes on, and was reported");
        assert_eq!(pass(&mut l, &join, &[hang(3)], 24 * S), []);
        let unobserved = (Change::Closed, Some(CloseReason::Unobserved));
        assert_eq!(pass(&mut l, &join, &[hang(3)], 25 * S), [unobserved]);
    }
}
