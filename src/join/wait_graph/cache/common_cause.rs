//! One untimed operation that explains why several ranks do not go on.
//!
//! A rank that others wait for may be in an operation of which nothing reports that it has ended. So may the other ranks of that
//! operation, and whoever waits behind them. Where exactly one such operation explains all ranks that are waited for, that is
//! where the job stands still. Where several do, none of the ranks can be blamed.

use super::super::graph::{Stall, WaitingFor};
use super::waiting::Waiting;
use crate::join::Join;
use crate::join::communicator::Communicator;
use crate::join::instance::{Instance, IssuedAt, Part};
use crate::model::{CommId, Rank, SegmentId, Track};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Steps of one search: a job that needs more is not explained.
const STEPS: usize = 1 << 20;

/// The search's result for the ranks that others wait for.
#[derive(Default)]
pub(super) struct Found {
    /// The operation that explains them, and the waits through which it does.
    pub(super) stalls: Vec<Stall>,
    /// Processes that several operations explain.
    pub(super) unclear: Vec<u32>,
}

/// An untimed operation that nothing reports to have ended.
struct Op {
    comm: CommId,
    track: Track,
    order: u64,
    ends: Vec<End>,
}

/// One rank of an operation.
#[derive(Clone, Copy)]
struct End {
    rank: Rank,
    /// Its process, as a place in the search's list.
    process: usize,
    at: IssuedAt,
    /// Its GPU is not known to have started anything later.
    may_run: bool,
}

/// A process as far as the search knows it.
struct Process {
    actor: u32,
    segment: SegmentId,
    /// It has not started this, or waits in it.
    limit: Option<IssuedAt>,
    /// It waits in its limit.
    waits: bool,
    /// The operations in which it may be, and those behind its limit.
    ops: Vec<(usize, IssuedAt)>,
}

impl Process {
    fn may_be_in(&self, end: &End) -> bool {
        !self.waits && end.may_run && self.limit.is_none_or(|limit| end.at.is_before(limit))
    }
}

struct Search<'a> {
    join: &'a Join,
    waiting: &'a Waiting,
    processes: Vec<Process>,
    places: HashMap<u32, usize>,
    ops: Vec<Op>,
    known: HashMap<(CommId, Track, u64), Option<usize>>,
    steps: usize,
}

/// How far each process can have come, and the operation that keeps it there.
#[derive(Clone)]
struct Reached {
    limits: Vec<Option<IssuedAt>>,
    held_in: Vec<Option<usize>>,
}

/// Looks for the operation that explains these processes, each given by a rank of it.
pub(super) fn find(join: &Join, waiting: &Waiting, roots: &BTreeMap<u32, (CommId, Rank)>) -> Found {
    if roots.len() < 2 {
        return Found::default();
    }
    let (processes, places) = (Vec::new(), HashMap::new());
    let (ops, known) = (Vec::new(), HashMap::new());
    let mut search = Search { join, waiting, processes, places, ops, known, steps: STEPS };
    search.run(roots).unwrap_or_default()
}

impl Search<'_> {
    fn run(&mut self, roots: &BTreeMap<u32, (CommId, Rank)>) -> Option<Found> {
        for (actor, (comm, rank)) in roots {
            let segment = self.join.communicator(*comm)?.members().get(rank)?.record.segment;
            self.place(*actor, segment);
        }
        let mut at = 0;
        while at < self.processes.len() {
            self.explore(at)?;
            at += 1;
        }
        let mut certain = Reached {
            limits: self.processes.iter().map(|p| p.limit).collect(),
            held_in: vec![None; self.processes.len()],
        };
        self.spread(&mut certain, (0..self.processes.len()).collect())?;
        let unexplained: Vec<usize> = (0..roots.len()).filter(|p| certain.held_in[*p].is_none()).collect();
        let mut found = Found { stalls: self.waits(&certain), unclear: Vec::new() };
        if unexplained.len() < 2 {
            return Some(found);
        }
        let causes = self.causes(&certain, &unexplained)?;
        match causes.as_slice() {
            [] => {}
            [(op, reached)] => {
                found.stalls = self.waits(reached);
                found.stalls.push(self.cause(*op));
            }
            _ => found.unclear = unexplained.iter().map(|p| self.processes[*p].actor).collect(),
        }
        Some(found)
    }

    /// The place of a process in the list.
    fn place(&mut self, actor: u32, segment: SegmentId) -> usize {
        if let Some(place) = self.places.get(&actor) {
            return *place;
        }
        let (limit, waits) = self.waiting.limit(actor);
        let place = self.processes.len();
        self.processes.push(Process { actor, segment, limit, waits, ops: Vec::new() });
        self.places.insert(actor, place);
        place
    }

    /// Takes the operations in which a process may be, and their other processes.
    fn explore(&mut self, place: usize) -> Option<()> {
        let (actor, segment) = (self.processes[place].actor, self.processes[place].segment);
        let join = self.join;
        let seats = join.roster.seats(segment).iter();
        let of_actor: Vec<(&Communicator, Rank)> = seats
            .filter_map(|(comm, rank)| Some((join.communicator(*comm)?, *rank)))
            .filter(|(c, rank)| c.seat(*rank).is_some_and(|s| s.actor == actor))
            .collect();
        let mut newest: Option<IssuedAt> = None;
        for (c, rank) in &of_actor {
            let begun = c.members().get(rank).and_then(|m| m.newest_begun);
            newest = begun.filter(|at| newest.is_none_or(|known| known.is_before(*at))).or(newest);
        }
        for (c, rank) in of_actor {
            for (track, order, instance) in c.open() {
                self.steps = self.steps.checked_sub(1)?;
                let part = instance.parts.get(&rank).filter(|p| !p.finished && p.is_silent());
                let Some(at) = part.and_then(Part::issued_at) else { continue };
                if newest.is_some_and(|newest| !newest.is_before(at)) {
                    continue;
                }
                if let Some(op) = self.op(c, (track, order), instance) {
                    self.processes[place].ops.push((op, at));
                    let own = self.ops[op].ends.iter_mut().filter(|e| e.process == place);
                    own.for_each(|e| e.may_run = true);
                }
            }
        }
        Some(())
    }

    /// An operation that all its ranks issued, and that none of them is known to have left.
    fn op(&mut self, c: &Communicator, (track, order): (Track, u64), instance: &Instance) -> Option<usize> {
        let key = (c.id, track, order);
        if let Some(op) = self.known.get(&key) {
            return *op;
        }
        let complete = match track {
            Track::Pair(from, to) => from != to && instance.parts.len() == 2,
            Track::Collective => instance.parts.len() >= c.expected(),
            Track::Replay => false,
        };
        let can_hold = complete && instance.parts.values().all(|p| !p.finished && !p.op.func.is_rooted());
        let ends = can_hold.then(|| self.ends(c, instance)).flatten();
        let op = ends.map(|ends| {
            self.ops.push(Op { comm: c.id, track, order, ends });
            self.ops.len() - 1
        });
        self.known.insert(key, op);
        op
    }

    fn ends(&mut self, c: &Communicator, instance: &Instance) -> Option<Vec<End>> {
        let mut ends = Vec::with_capacity(instance.parts.len());
        for (rank, part) in &instance.parts {
            self.steps = self.steps.checked_sub(1)?;
            let seat = c.seat(*rank)?;
            let condition = self.join.roster.condition(seat.actor);
            let counts = condition.known && !condition.unsure && !condition.is_out() && !seat.aborted;
            let segment = c.members().get(rank).filter(|_| counts)?.record.segment;
            let process = self.place(seat.actor, segment);
            ends.push(End { rank: *rank, process, at: part.issued_at()?, may_run: false });
        }
        Some(ends)
    }

    /// Carries on what is known: who has not come to an operation keeps its other ranks in it.
    fn spread(&mut self, reached: &mut Reached, mut next: Vec<usize>) -> Option<()> {
        while let Some(place) = next.pop() {
            let Some(limit) = reached.limits[place] else { continue };
            for (op, own) in &self.processes[place].ops {
                if !limit.is_before(*own) {
                    continue;
                }
                for end in self.ops[*op].ends.iter().filter(|e| e.process != place) {
                    self.steps = self.steps.checked_sub(1)?;
                    let is_news = reached.limits[end.process].is_none_or(|known| end.at.is_before(known));
                    if is_news && self.processes[end.process].may_be_in(end) {
                        reached.limits[end.process] = Some(end.at);
                        reached.held_in[end.process] = Some(*op);
                        next.push(end.process);
                    }
                }
            }
        }
        Some(())
    }

    /// The operations that explain all these processes: of each group of processes the last.
    fn causes(&mut self, certain: &Reached, unexplained: &[usize]) -> Option<Vec<(usize, Reached)>> {
        let mut groups: BTreeMap<BTreeSet<usize>, Vec<usize>> = BTreeMap::new();
        for (op, o) in self.ops.iter().enumerate() {
            // It has not come farther than that, and may have come less far.
            let is_before = |e: &End| certain.limits[e.process].is_none_or(|limit| e.at.is_before(limit));
            let is_free = |e: &End| is_before(e) && self.processes[e.process].may_be_in(e);
            if o.ends.iter().all(is_free) {
                groups.entry(o.ends.iter().map(|e| e.process).collect()).or_default().push(op);
            }
        }
        let mut causes = Vec::new();
        for mut ops in groups.into_values() {
            ops.sort_by_key(|op| self.ops[*op].ends.iter().map(|e| e.at.issued_ns()).max());
            let mut last = None;
            for op in ops {
                let reached = self.reached_from(op, certain)?;
                if !unexplained.iter().all(|p| reached.held_in[*p].is_some()) {
                    break;
                }
                // Its own ranks may be kept in earlier ones by those that it keeps.
                if self.ops[op].ends.iter().all(|e| reached.held_in[e.process] == Some(op)) {
                    last = Some((op, reached));
                }
            }
            causes.extend(last);
        }
        Some(causes)
    }

    /// Follows the waits from an operation that does not end.
    fn reached_from(&mut self, op: usize, certain: &Reached) -> Option<Reached> {
        let mut reached = certain.clone();
        self.steps = self.steps.checked_sub(reached.limits.len())?;
        let mut next = Vec::new();
        for end in &self.ops[op].ends {
            reached.limits[end.process] = Some(end.at);
            reached.held_in[end.process] = Some(op);
            next.push(end.process);
        }
        self.spread(&mut reached, next)?;
        Some(reached)
    }

    /// The waits of the processes that are kept somewhere by others.
    fn waits(&self, reached: &Reached) -> Vec<Stall> {
        let wait = |(place, op): (usize, &Option<usize>)| {
            let o = &self.ops[(*op)?];
            let behind = |e: &&End| {
                e.process != place && reached.limits[e.process].is_some_and(|limit| limit.is_before(e.at))
            };
            let lacking: Vec<(Rank, u32)> =
                o.ends.iter().filter(behind).map(|e| (e.rank, self.processes[e.process].actor)).collect();
            let own = o.ends.iter().find(|e| e.process == place)?;
            let waiting = vec![(own.rank, self.processes[place].actor)];
            let (comm, track, order, lack) = (o.comm, o.track, o.order, WaitingFor::Start);
            (!lacking.is_empty()).then_some(Stall {
                comm,
                track,
                order,
                lack,
                waiting,
                lacking,
                queued: false,
            })
        };
        reached.held_in.iter().enumerate().filter_map(wait).collect()
    }

    /// The operation that does not end, as a stall.
    fn cause(&self, op: usize) -> Stall {
        let o = &self.ops[op];
        let waiting = o.ends.iter().map(|e| (e.rank, self.processes[e.process].actor)).collect();
        let (comm, track, order, lack) = (o.comm, o.track, o.order, WaitingFor::End);
        Stall { comm, track, order, lack, waiting, lacking: Vec::new(), queued: false }
    }
}

#[cfg(test)]
mod tests {
    use crate::join::testing::{all_reduce, member, process};
    use crate::join::{Join, WaitingFor};
    use crate::model::{CommId, Rank, Timing, Untimed, Update};

    const S: u64 = 1_000_000_000;
    const MS: u64 = 1_000_000;

    /// Feeds the only operation of a communicator, which these processes issued at 10 s and so many ms. Of a timed one, `started`
    /// are those whose GPUs came to it; all of them together have finished it.
    fn feed(j: &mut Join, comm: u64, processes: &[u32], at_ms: u64, started: Option<&[u32]>) {
        let ended = started.is_some_and(|s| s.len() == processes.len());
        for (rank, p) in (0..).zip(processes) {
            let Update::Comm(mut record) = member(*p, processes.len() as u32, 1) else {
                unreachable!("a member")
            };
            (record.comm, record.rank) = (CommId::unowned(comm), Rank(rank));
            j.feed(Update::Comm(record));
            let at_ns = 10 * S + at_ms * MS;
            let came = started.is_some_and(|s| s.contains(p));
            let kernel = came.then_some((at_ns + 5_000, ended.then_some(at_ns + 50_000)));
            let mut op = all_reduce(*p, 0, at_ns, kernel);
            (op.comm, op.rank) = (CommId::unowned(comm), Rank(rank));
            if started.is_none() {
                op.timing = Timing::Not(Untimed::Budget);
            }
            j.feed(Update::Op(Box::new(op)));
        }
    }

    /// Processes 0 and 1 wait for processes 2 and 3, which issued an untimed operation of their own before.
    fn job() -> Join {
        let mut j = Join::new();
        (0..6).for_each(|p| j.feed(process(p)));
        feed(&mut j, 1, &[2, 3], 0, None);
        feed(&mut j, 2, &[0, 2], 2, Some(&[0]));
        feed(&mut j, 3, &[1, 3], 2, Some(&[1]));
        j
    }

    /// Where standing still begins, and how many ranks are unclear there.
    fn origins(mut j: Join) -> Vec<(CommId, WaitingFor, usize)> {
        j.tick(20 * S);
        let standing = j.standing(20 * S);
        let origin = |o: &crate::join::Origin| {
            let stall = standing.stall(o.first)?;
            let unclear = stall.lacking.iter().filter(|(_, p)| standing.is_unclear(*p)).count();
            Some((stall.comm, stall.lack, unclear))
        };
        standing.origins().iter().filter_map(origin).collect()
    }

    #[test]
    fn the_only_operation_that_explains_all_is_where_it_begins() {
        assert_eq!(origins(job()), [(CommId::unowned(1), WaitingFor::End, 0)]);
        // Process 4 waits behind process 3 in another one, which alone does not explain process 2.
        let mut j = job();
        feed(&mut j, 5, &[3, 4], 1, None);
        feed(&mut j, 6, &[5, 4], 2, Some(&[5]));
        assert_eq!(origins(j), [(CommId::unowned(1), WaitingFor::End, 0)]);
    }

    #[test]
    fn where_several_operations_explain_all_nobody_knows() {
        let mut j = job();
        feed(&mut j, 4, &[2, 3, 4], 1, None);
        assert_eq!(origins(j), [2, 3].map(|comm| (CommId::unowned(comm), WaitingFor::Start, 1)));
    }

    #[test]
    fn who_has_started_something_later_is_not_held_up_by_it() {
        let mut j = job();
        // Process 3 came past the operation.
        feed(&mut j, 7, &[3, 5], 1, Some(&[3, 5]));
        let began = origins(j);
        assert!(began.iter().all(|(comm, ..)| *comm != CommId::unowned(1)), "{began:?}");
    }
}
