//! Where a rank was that came late: whoever was held by others is not late itself.

use super::Join;
use super::communicator::{Inside, LateEvent, Passed};
use super::instance::{Measure, Part};
use crate::model::{CommId, Rank, SegmentId, Track};

/// Where a rank was that came late.
#[derive(Debug, Clone, Copy)]
struct Elsewhere {
    process: Option<SegmentId>,
    held: bool,
    inside: Inside,
}

impl Elsewhere {
    /// True where it was held by others, or may have been.
    fn explains(self) -> bool {
        self.held || self.inside.untimed
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
                    event.elsewhere_ns = elsewhere.inside.timed_ns.min(event.by_ns);
                    event.unsure = elsewhere.inside.untimed;
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
        let mut inside = self.inside(me, id, e, (by_ns, came_ns));
        if e.by_calls {
            let lead_ns = me.and_then(|me| self.processes.get(&me)).map_or(0, |p| p.issuing.lead_ns());
            inside.timed_ns = inside.timed_ns.max(lead_ns);
        }
        Elsewhere { process: me, held: excess.max(inside.timed_ns) >= by_ns / 2, inside }
    }

    /// How long a late rank was in other operations, of this communicator and of others, since the median of the others
    /// came. Whatever held it there is told there.
    fn inside(
        &self,
        late: Option<SegmentId>,
        id: CommId,
        e: &LateEvent,
        (by_ns, came_ns): (u64, u64),
    ) -> Inside {
        let from_ns = came_ns.saturating_sub(by_ns);
        let passed = late.map_or_else(Passed::new, |late| self.passed(late, id, e, came_ns));
        let mut all = Inside::default();
        for (comm, rank) in late.map_or(&[][..], |late| self.roster.seats(late)) {
            let Some(c) = self.comms.get(comm) else { continue };
            let own = (*comm == id).then_some((e.track, e.operation.order));
            let lead_ns = |s: SegmentId| self.processes.get(&s).map(|p| p.issuing.lead_ns());
            let inside = c.inside(*rank, own, (from_ns, came_ns), (&lead_ns, &passed));
            all.timed_ns = all.timed_ns.saturating_add(inside.timed_ns);
            // What is before it on its own track has ended.
            all.untimed |= inside.untimed && *comm != id || inside.in_launch;
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
