//! Where a rank was that came late: whoever was held by others is not late itself.

use super::Join;
use super::communicator::{Communicator, Inside, LateEvent, Passed};
use super::instance::{Instance, IssuedAt, Measure, Part};
use super::op_queue::Key;
use crate::model::{CommId, Rank, SegmentId, Track};
use std::collections::BTreeMap;

/// The number of other ranks whose time elsewhere is compared with that of a late one.
const OTHERS: usize = 8;

/// A late rank and at least so many others are a group.
const OTHERS_MIN: usize = 2;

/// The number of ranks of a communicator that are looked at one by one.
const RANKS_MAX: usize = 64;

/// Where a rank was that came late.
#[derive(Debug, Clone)]
struct Elsewhere {
    process: Option<SegmentId>,
    held: bool,
    elsewhere_ns: u64,
    doubt: Doubt,
}

/// The reason why a late rank may not be to blame, though it is not known to have been held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Doubt {
    None,
    /// It may have been in this operation, which is not timed.
    In((CommId, Key)),
    /// No operation can be named: it may have been in a launch of which nothing says when it ended, it came with its group, or
    /// nobody may have waited.
    Vague,
}

impl Elsewhere {
    /// True where it was held by others, or may have been.
    fn explains(&self) -> bool {
        self.held || self.doubt != Doubt::None
    }
}

impl Join {
    /// Looks at who came late: a rank that was held in other communicators' operations since it was last in this one,
    /// because others were late there or the transfer was slow, is not slow itself.
    pub(super) fn explain_late(&mut self, now_ns: u64, due: &[CommId]) {
        let fresh = |e: &LateEvent| e.due_ns().is_some_and(|t| now_ns >= t);
        let mut waiting: Vec<(CommId, LateEvent)> = Vec::new();
        for c in due.iter().filter_map(|id| self.comms.get(id)) {
            waiting.extend(c.late().filter(|e| fresh(e)).map(|e| (c.id, e.clone())));
        }
        if waiting.is_empty() {
            return;
        }
        for (id, e) in waiting {
            let mut late = (e.rank, e.by_ns, e.came_ns);
            let mut elsewhere = self.elsewhere(id, &e, late);
            let is_for_another = |c: &Communicator| !e.in_exchange && c.waited_for_another(&e);
            elsewhere.held |= self.comms.get(&id).is_some_and(is_for_another);
            if elsewhere.explains() {
                // Whoever came with it, and was not held elsewhere, is late itself.
                let others = self.comms.get(&id).map_or(Vec::new(), |c| c.late_as_well(&e));
                let mut others = others.into_iter().map(|l| (l, self.elsewhere(id, &e, l)));
                if let Some(found) = others.find(|(_, elsewhere)| !elsewhere.explains()) {
                    (late, elsewhere) = found;
                }
            }
            let finished = self.finished_by(elsewhere.process);
            if let Some(c) = self.comms.get_mut(&id) {
                c.explain_late(&e, late, |event| {
                    event.elsewhere_ns = elsewhere.elsewhere_ns.min(event.by_ns);
                    event.unsure = elsewhere.doubt != Doubt::None;
                    event.excuse = match elsewhere.doubt {
                        Doubt::In(excuse) => Some(excuse),
                        Doubt::None | Doubt::Vague => None,
                    };
                    event.finished = finished;
                    event.held_elsewhere = Some(elsewhere.held);
                });
            }
        }
    }

    /// Where a rank was that came late, by so much, at this moment.
    fn elsewhere(&self, id: CommId, e: &LateEvent, (rank, by_ns, came_ns): (Rank, u64, u64)) -> Elsewhere {
        let me = self.comms.get(&id).and_then(|c| c.members().get(&rank)).map(|m| m.record.segment);
        let from_ns = self.last_here_ns(id, e, rank).unwrap_or(came_ns.saturating_sub(by_ns));
        let excess_ns = self.excess_ns(id, rank, (from_ns, came_ns));
        let mut inside = self.inside(me, id, e, (rank, by_ns, came_ns));
        if e.by_calls {
            let lead_ns = me.and_then(|me| self.processes.get(&me)).map_or(0, |p| p.issuing.lead_ns());
            inside.timed_ns = inside.timed_ns.max(lead_ns);
        }
        let elsewhere_ns = inside.timed_ns;
        let half_ns = by_ns / 2;
        let is_beyond_others =
            || excess_ns.saturating_sub(self.excess_of_others_ns(id, e, (rank, by_ns))) >= half_ns;
        let held = elsewhere_ns >= half_ns || excess_ns >= half_ns && is_beyond_others();
        let doubt = match self.doubt(me, came_ns.saturating_sub(by_ns), &inside) {
            Doubt::None if !held && self.is_vague(id, e, (rank, by_ns, came_ns)) => Doubt::Vague,
            doubt => doubt,
        };
        Elsewhere { process: me, held, elsewhere_ns, doubt }
    }

    /// True where it is not certain that a late rank held up others by itself.
    fn is_vague(&self, id: CommId, e: &LateEvent, late: (Rank, u64, u64)) -> bool {
        self.came_with_its_group(id, e, late) || self.hosts_went_on(id, e, late)
    }

    /// True where most ranks of another communicator, all of which are in this operation too, came as late as one of them, and were
    /// in operations of that communicator for longer than usual before: what held up all of them is reported there.
    fn came_with_its_group(
        &self,
        id: CommId,
        e: &LateEvent,
        (late, by_ns, came_ns): (Rank, u64, u64),
    ) -> bool {
        let Some(c) = self.comms.get(&id) else { return false };
        let Some(instance) = c.instance(e.track, e.operation.order) else { return false };
        let is_rooted = instance.first().is_none_or(|p| p.op.func.is_rooted());
        if matches!(e.track, Track::Pair(..)) || e.measure != Measure::Gpu || is_rooted {
            return false;
        }
        let segment = |r: &Rank| c.members().get(r).map(|m| m.record.segment);
        let own = instance.parts.get(&late).and_then(Part::duration_ns).zip(segment(&late));
        let Some((own_ns, me)) = own else { return false };
        let is_part = |g: &&Communicator| {
            let ranks = g.members().len();
            g.id != id && ranks == g.expected() && ranks > OTHERS_MIN && ranks * 2 <= c.members().len()
        };
        let groups = self.roster.seats(me).iter().filter_map(|(comm, _)| self.comms.get(comm));
        let mut groups = groups.filter(is_part).peekable();
        if groups.peek().is_none() {
            return false;
        }
        // Kernels of one operation end together: the longer one ran, the earlier it came.
        let ahead = |(r, p): (&Rank, &Part)| Some((segment(r)?, p.duration_ns()?.saturating_sub(own_ns)));
        let ahead_ns: BTreeMap<SegmentId, u64> = instance.parts.iter().filter_map(ahead).collect();
        let from_ns = self.last_here_ns(id, e, late).unwrap_or(came_ns.saturating_sub(by_ns));
        groups.any(|group| {
            let segments = group.members().values().map(|m| m.record.segment).filter(|s| *s != me);
            let others: Option<Vec<u64>> = segments.map(|s| ahead_ns.get(&s).copied()).collect();
            let Some(mut others) = others else { return false };
            let middle = (others.len() - 1) / 2;
            let came_together = *others.select_nth_unstable(middle).1 < by_ns / 2;
            let excess_ns = |r: &Rank| group.excess_ns(*r, from_ns, came_ns, &self.classes);
            came_together && group.members().keys().take(RANKS_MAX).any(|r| excess_ns(r) >= by_ns / 2)
        })
    }

    /// True where only hosts say that a rank was late, and most others called more of this communicator's operations until it
    /// came: that their GPUs ran out of work meanwhile is not known. Where others are known to have waited, it is false.
    fn hosts_went_on(&self, id: CommId, e: &LateEvent, (late, by_ns, came_ns): (Rank, u64, u64)) -> bool {
        let Some(c) = self.comms.get(&id).filter(|_| e.measure == Measure::Host && !e.by_calls) else {
            return false;
        };
        let others: Vec<Rank> = c.members().keys().copied().filter(|r| *r != late).take(RANKS_MAX).collect();
        let since_ns = came_ns.saturating_sub(by_ns / 2);
        let later =
            |(track, order, _): &(Track, u64, &Instance)| *track == e.track && *order > e.operation.order;
        let went_on = |rank: &&Rank| {
            let mut later = c.instances().filter(later).filter_map(|(.., i)| i.parts.get(rank)?.op.issued_ns);
            later.any(|t| (since_ns..came_ns).contains(&t))
        };
        others.iter().filter(went_on).count() * 2 > others.len()
    }

    /// When a rank was through with the operation before this one on its track, host monotonic ns.
    fn last_here_ns(&self, id: CommId, e: &LateEvent, rank: Rank) -> Option<u64> {
        let before = e.operation.order.checked_sub(1)?;
        let part = self.comms.get(&id)?.instance(e.track, before)?.parts.get(&rank)?;
        Some(part.kernel?.end_ns())
    }

    /// How long a rank was in operations of other communicators beyond what they usually take, in ns, of those that ended between
    /// two moments.
    fn excess_ns(&self, id: CommId, rank: Rank, (from_ns, to_ns): (u64, u64)) -> u64 {
        let me = self.comms.get(&id).and_then(|c| c.members().get(&rank)).map(|m| m.record.segment);
        let others = me.map_or(&[][..], |me| self.roster.seats(me)).iter().filter(|(c, _)| *c != id);
        let known = others.filter_map(|(c, rank)| Some((self.comms.get(c)?, *rank)));
        known.map(|(c, rank)| c.excess_ns(rank, from_ns, to_ns, &self.classes)).sum()
    }

    /// The same for the median of the ranks that waited for a late one, each up to the moment at which it came itself: in a
    /// pipeline every stage waits for others in each step, and so do those that are in time.
    fn excess_of_others_ns(&self, id: CommId, e: &LateEvent, (late, by_ns): (Rank, u64)) -> u64 {
        let instance = self.comms.get(&id).and_then(|c| c.instance(e.track, e.operation.order));
        let parts = || instance.into_iter().flat_map(|i| i.parts.iter());
        let own_ns = parts().find(|(r, _)| **r == late).and_then(|(_, p)| p.duration_ns());
        // Ranks that came with it are late as well, possibly for the same reason.
        let waited = |p: &Part| {
            let longer_ns = p.duration_ns().zip(own_ns).map(|(ns, own_ns)| ns.saturating_sub(own_ns));
            longer_ns.is_none_or(|ns| ns >= by_ns / 2)
        };
        let others = parts().filter(|(r, p)| **r != late && waited(p));
        let excess_ns = |(rank, part): (&Rank, &Part)| {
            let span = (self.last_here_ns(id, e, *rank)?, part.kernel?.start_ns);
            Some(self.excess_ns(id, *rank, span))
        };
        let mut all: Vec<u64> = others.filter_map(excess_ns).take(OTHERS).collect();
        if all.is_empty() {
            return 0;
        }
        let middle = (all.len() - 1) / 2;
        *all.select_nth_unstable(middle).1
    }

    /// Chooses the untimed operation that may have held a process since some moment, host monotonic ns. One that excused it before
    /// held it no more, as little as those before it on its track: whatever waited for it went on then.
    fn doubt(&self, process: Option<SegmentId>, since_ns: u64, inside: &Inside) -> Doubt {
        if inside.in_launch {
            return Doubt::Vague;
        }
        if inside.doubts.is_empty() {
            return Doubt::None;
        }
        let mut over: BTreeMap<(CommId, Track), u64> = BTreeMap::new();
        for (comm, rank) in process.map_or(&[][..], |p| self.roster.seats(p)) {
            let late = self.comms.get(comm).into_iter().flat_map(Communicator::late);
            let of_rank = late.filter(|e| e.rank == *rank && e.came_ns <= since_ns);
            for (of, (track, order)) in of_rank.filter_map(|e| e.excuse) {
                let known = over.entry((of, track)).or_insert(order);
                *known = order.max(*known);
            }
        }
        let is_over = |(of, (track, order)): &(CommId, Key)| over.get(&(*of, *track)) >= Some(order);
        // The oldest of a track is the first that may end.
        let free = inside.doubts.iter().rev().find(|doubt| !is_over(doubt));
        free.map_or(Doubt::None, |doubt| Doubt::In(*doubt))
    }

    /// How long a late rank was in other operations, of this communicator and of others, since the median of the others
    /// came. Whatever held it there is told there.
    fn inside(
        &self,
        late: Option<SegmentId>,
        id: CommId,
        e: &LateEvent,
        (rank, by_ns, came_ns): (Rank, u64, u64),
    ) -> Inside {
        let from_ns = came_ns.saturating_sub(by_ns);
        let passed = late.map_or_else(Passed::new, |late| self.passed(late, id, e, came_ns));
        let instance = self.comms.get(&id).and_then(|c| c.instance(e.track, e.operation.order));
        let issued = instance.and_then(|i| i.parts.get(&rank)?.issued_at());
        let mut all = Inside::default();
        for (comm, rank) in late.map_or(&[][..], |late| self.roster.seats(late)) {
            let Some(c) = self.comms.get(comm) else { continue };
            let own = (*comm == id).then_some((e.track, e.operation.order));
            let lead_ns = |s: SegmentId| self.processes.get(&s).map(|p| p.issuing.lead_ns());
            let inside = c.inside(*rank, own, issued, (from_ns, came_ns), (&lead_ns, &passed));
            all.timed_ns = all.timed_ns.saturating_add(inside.timed_ns);
            all.in_launch |= inside.in_launch;
            // What is before it on its own track has ended.
            if *comm != id {
                all.doubts.extend(inside.doubts);
            }
        }
        all
    }

    /// When each other process came to the operation to which a rank came late, and when it had issued that. Kernels of one
    /// operation end together: the longer one ran, the earlier it came.
    fn passed(&self, late: SegmentId, id: CommId, e: &LateEvent, came_ns: u64) -> Passed {
        let Some(c) = self.comms.get(&id) else { return Passed::new() };
        let Some(instance) = c.instance(e.track, e.operation.order) else { return Passed::new() };
        let segment = |r: &Rank| c.members().get(r).map(|m| m.record.segment);
        if matches!(e.track, Track::Pair(..)) {
            let of_peer = |(rank, came): (Rank, (IssuedAt, u64))| Some((segment(&rank)?, came));
            return c.peers_came(instance, e.rank).filter_map(of_peer).collect();
        }
        let own = instance.parts.iter().find(|(r, _)| segment(r) == Some(late)).map(|(_, p)| p);
        let is_rooted = instance.first().is_none_or(|p| p.op.func.is_rooted());
        let own_ns = own.and_then(Part::duration_ns).filter(|_| !is_rooted && e.measure == Measure::Gpu);
        let Some(own_ns) = own_ns else { return Passed::new() };
        let passed = |(rank, part): (&Rank, &Part)| {
            let earlier_ns = part.duration_ns()?.saturating_sub(own_ns);
            Some((segment(rank)?, (part.issued_at()?, came_ns.saturating_sub(earlier_ns))))
        };
        instance.parts.iter().filter_map(passed).filter(|(s, _)| *s != late).collect()
    }

    /// Counts the collectives that a process has finished, and its transfers with one peer, in all its communicators.
    fn finished_by(&self, process: Option<SegmentId>) -> u64 {
        let seats = process.map_or(&[][..], |p| self.roster.seats(p)).iter();
        let of = |(c, rank): &(CommId, Rank)| {
            let c = self.comms.get(c)?;
            Some(c.members().get(rank)?.finished.saturating_add(c.transfers_finished(*rank)))
        };
        seats.filter_map(of).fold(0, u64::saturating_add)
    }
}

#[cfg(test)]
mod tests {
    use super::Join;
    use crate::join::testing::{all_reduce, member, process};
    use crate::model::{CommId, Rank, Update};

    const MS: u64 = 1_000_000;

    /// Whether rank 1 of two counts as held elsewhere when it comes 60 ms late to the last of 21 operations. Before it, each of the two
    /// waits for so many ms in a communicator with another process, as in a pipeline.
    fn is_held(waits_ms: [u64; 2]) -> Option<bool> {
        let mut j = Join::new();
        let in_comm = |update: Update, comm: u64, rank: u32| match update {
            Update::Comm(mut c) => {
                (c.comm, c.rank) = (CommId::unowned(comm), Rank(rank));
                Update::Comm(c)
            }
            Update::Op(mut op) => {
                (op.comm, op.rank) = (CommId::unowned(comm), Rank(rank));
                Update::Op(op)
            }
            other => other,
        };
        (0..4).for_each(|r| j.feed(process(r)));
        for r in 0..2 {
            j.feed(member(r, 2, 21));
            j.feed(in_comm(member(r, 2, 21), 8 + u64::from(r), 0));
            j.feed(in_comm(member(r + 2, 2, 21), 8 + u64::from(r), 1));
        }
        for order in 0..21 {
            let at_ns = (1_000 + order * 1_000) * MS;
            let came_ns = |r: usize| at_ns + if r == 1 && order == 20 { 170 * MS } else { 110 * MS };
            let end_ns = came_ns(0).max(came_ns(1)) + 20_000;
            for (r, wait_ms) in (0..).zip(waits_ms) {
                let over_ns = at_ns + wait_ms * MS + 20_000;
                for (rank, process, start_ns) in [(0, r, at_ns), (1, r + 2, over_ns - 20_000)] {
                    let op = all_reduce(process, order, at_ns - 1_000, Some((start_ns, Some(over_ns))));
                    j.feed(in_comm(Update::Op(Box::new(op)), 8 + u64::from(r), rank));
                }
                let kernel = Some((came_ns(r as usize), Some(end_ns)));
                j.feed(Update::Op(Box::new(all_reduce(r, order, over_ns, kernel))));
            }
            j.tick(at_ns + 500 * MS);
        }
        j.tick(100_000 * MS);
        let c = j.communicator(CommId::unowned(7)).expect("that of both");
        let e = c.late().find(|e| e.operation.order == 20 && e.rank == Rank(1));
        e.expect("it is late").held_elsewhere
    }

    /// Whether it is unsure that rank 5 of six is to blame, which comes 60 ms late to the last of 21 operations, as others do. It
    /// shares a communicator with some ranks, and the first of them was so long in an operation of that one right before, in ms.
    fn is_unsure(late: &[u32], group: &[u32], waited_ms: u64) -> Option<bool> {
        const RANKS: u32 = 6;
        let mut j = Join::new();
        (0..RANKS).for_each(|r| j.feed(process(r)));
        (0..RANKS).for_each(|r| j.feed(member(r, RANKS, 21)));
        let of_group = |update: Update, own: u32| match update {
            Update::Comm(mut c) => {
                (c.comm, c.rank) = (CommId::unowned(9), Rank(own));
                Update::Comm(c)
            }
            Update::Op(mut op) => {
                (op.comm, op.rank) = (CommId::unowned(9), Rank(own));
                Update::Op(op)
            }
            other => other,
        };
        for (own, r) in (0..).zip(group) {
            j.feed(of_group(member(*r, group.len() as u32, 21), own));
        }
        for order in 0..21 {
            let at_ns = (1_000 + order * 1_000) * MS;
            let is_last = order == 20;
            for (own, r) in (0..).zip(group) {
                let took_ns = if is_last && own == 0 { waited_ms * MS } else { 20_000 };
                let end_ns = at_ns - MS;
                let op = all_reduce(*r, order, at_ns - 200 * MS, Some((end_ns - took_ns, Some(end_ns))));
                j.feed(of_group(Update::Op(Box::new(op)), own));
            }
            for r in 0..RANKS {
                let late_ns = if is_last && late.contains(&r) { 59 * MS + u64::from(r) * 100_000 } else { 0 };
                let kernel = Some((at_ns + late_ns, Some(at_ns + 61 * MS)));
                j.feed(Update::Op(Box::new(all_reduce(r, order, at_ns - MS, kernel))));
            }
            j.tick(at_ns + 500 * MS);
        }
        j.tick(100_000 * MS);
        let c = j.communicator(CommId::unowned(7)).expect("that of all");
        Some(c.late().find(|e| e.operation.order == 20 && e.rank == Rank(5))?.unsure)
    }

    #[test]
    fn a_rank_that_comes_late_with_its_group_is_not_to_blame_for_certain() {
        assert_eq!(is_unsure(&[5], &[3, 4, 5], 60), Some(false), "the others of its group came in time");
        assert_eq!(is_unsure(&[4, 5], &[1, 2, 5], 60), Some(false), "rank 4 is not of its group");
        assert_eq!(is_unsure(&[4, 5], &[4, 5], 60), Some(false), "one other rank is no group");
        assert_eq!(is_unsure(&[3, 4, 5], &[3, 4, 5], 0), Some(false), "nothing happened in the group");
        assert_eq!(is_unsure(&[3, 4, 5], &[3, 4, 5], 60), Some(true));
    }

    #[test]
    fn a_late_host_is_not_to_blame_for_certain_where_the_others_go_on() {
        // Rank 2 calls an operation half a second late, and all GPUs begin when it did. The others call the next one so much later.
        let is_unsure = |next_ms: u64| {
            let mut j = Join::new();
            (0..3).for_each(|r| j.feed(process(r)));
            (0..3).for_each(|r| j.feed(member(r, 3, 30)));
            for order in 0..30 {
                let at_ns = (1_000 + order * 1_000) * MS;
                for r in 0..3 {
                    let is_next = order == 21 && r < 2;
                    let issued_ns = match order {
                        20 if r == 2 => at_ns + 500 * MS,
                        _ if is_next => at_ns - 1_000 * MS + next_ms * MS,
                        _ => at_ns,
                    };
                    let start_ns = at_ns + if order == 20 { 501 * MS } else { MS };
                    let kernel = Some((start_ns, Some(start_ns + 20_000)));
                    j.feed(Update::Op(Box::new(all_reduce(r, order, issued_ns, kernel))));
                }
                if order != 20 {
                    j.tick(at_ns + 900 * MS);
                }
            }
            j.tick(100_000 * MS);
            let c = j.communicator(CommId::unowned(7)).expect("that of all");
            Some(c.late().find(|e| e.operation.order == 20 && e.rank == Rank(2))?.unsure)
        };
        assert_eq!(is_unsure(1_000), Some(false));
        assert_eq!(is_unsure(510), Some(false));
        assert_eq!(is_unsure(200), Some(false), "after that they called nothing until it came");
        assert_eq!(is_unsure(400), Some(true), "their hosts run ahead");
    }

    #[test]
    fn waiting_that_others_do_as_well_excuses_nobody() {
        assert_eq!(is_held([100, 100]), Some(false), "both wait in every step");
        assert_eq!(is_held([10, 100]), Some(true), "it waits longer than the other one");
        assert_eq!(is_held([100, 10]), Some(false));
    }
}
