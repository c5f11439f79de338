//! Where a rank was that came late: whoever was held by others is not late itself.

use super::Join;
use super::communicator::{Communicator, Inside, LateEvent, Passed};
use super::instance::{Measure, Part};
use super::op_queue::Key;
use crate::model::{CommId, Rank, SegmentId, Track};
use std::collections::BTreeMap;

/// Where a rank was that came late.
#[derive(Debug, Clone)]
struct Elsewhere {
    process: Option<SegmentId>,
    held: bool,
    elsewhere_ns: u64,
    doubt: Doubt,
}

/// Whether a rank may have been in an operation that is not timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Doubt {
    None,
    /// In this one.
    In((CommId, Key)),
    /// In a launch of several transfers, of which nothing says when it ended.
    InLaunch,
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
                        Doubt::None | Doubt::InLaunch => None,
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
        let before = e.operation.order.checked_sub(1);
        let last_here = before.and_then(|order| {
            let part = self.comms.get(&id)?.instance(e.track, order)?.parts.get(&rank)?;
            Some(part.kernel?.end_ns())
        });
        let from = last_here.unwrap_or(came_ns.saturating_sub(by_ns));
        let others = me.map_or(&[][..], |me| self.roster.seats(me)).iter();
        let excess: u64 = others
            .filter(|(c, _)| *c != id)
            .filter_map(|(c, rank)| Some((self.comms.get(c)?, *rank)))
            .map(|(c, rank)| c.excess_ns(rank, from, came_ns, &self.classes))
            .sum();
        let mut inside = self.inside(me, id, e, (rank, by_ns, came_ns));
        if e.by_calls {
            let lead_ns = me.and_then(|me| self.processes.get(&me)).map_or(0, |p| p.issuing.lead_ns());
            inside.timed_ns = inside.timed_ns.max(lead_ns);
        }
        let doubt = self.doubt(me, came_ns.saturating_sub(by_ns), &inside);
        let elsewhere_ns = inside.timed_ns;
        let held = excess.max(elsewhere_ns) >= by_ns / 2;
        Elsewhere { process: me, held, elsewhere_ns, doubt }
    }

    /// Chooses the untimed operation that may have held a process since some moment, host monotonic ns. One that excused it before
    /// held it no more, as little as those before it on its track: whatever waited for it went on then.
    fn doubt(&self, process: Option<SegmentId>, since_ns: u64, inside: &Inside) -> Doubt {
        if inside.in_launch {
            return Doubt::InLaunch;
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
        let own = instance.parts.iter().find(|(r, _)| segment(r) == Some(late)).map(|(_, p)| p);
        let is_rooted = instance.first().is_none_or(|p| p.op.func.is_rooted());
        let ends_together = !matches!(e.track, Track::Pair(..)) && !is_rooted;
        let own_ns = own.and_then(Part::duration_ns).filter(|_| ends_together && e.measure == Measure::Gpu);
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
