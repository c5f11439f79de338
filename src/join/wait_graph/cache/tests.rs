//! The cached graph equals one made from scratch, whatever comes in whatever order.

use super::*;
use crate::join::testing::{all_reduce, member, process};
use crate::join::{Member, PARTS_KEPT, Process};
use crate::model::{
    Func, HostFact, Lane, Liveness, Making, OpRecord, ProcessState, SegmentId, Timing, Untimed, Update,
};
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::collections::HashMap;

const MS: u64 = 1_000_000;
const COMMS: u64 = 3;
const RANKS: u32 = 4;

/// A process or GPU that can wait, and a row without its number.
type Row = (Rank, (SegmentId, Option<Arc<str>>), (u64, u64, OpPhase));

/// A track's rows as their definition says, rank by rank; none where nothing is old.
fn defined(j: &Join, c: &Communicator, track: Track, over: bool, now_ns: u64) -> Vec<Row> {
    let old = c.incomplete_of(track).next().and_then(|(_, i)| i.began_ns());
    if c.closed() || !old.is_some_and(|t| over || now_ns.saturating_sub(t) >= YOUNG_NS) {
        return Vec::new();
    }
    let mut fronts: HashMap<Rank, (u64, OpPhase)> = HashMap::new();
    let mut left: Vec<Rank> = c.members().keys().copied().collect();
    for (order, instance) in c.incomplete_of(track) {
        let started = instance.parts.values().any(|p| p.started_ns.is_some());
        let all_were_in = instance.parts.values().any(|p| p.finished && !p.op.func.is_rooted());
        left.retain(|rank| {
            let stage = match c.state(track, order, *rank) {
                OpState::Finished => return true,
                OpState::NotIssued | OpState::Called => return false,
                OpState::Started | OpState::Progressing => OpPhase::Started,
                OpState::Issued | OpState::InDoubt if all_were_in => return true,
                OpState::Issued if started => OpPhase::Issued,
                OpState::Issued | OpState::InDoubt => OpPhase::InDoubt,
            };
            fronts.insert(*rank, (order, stage));
            false
        });
    }
    let is_gone = |rank: &Rank| {
        let m = c.members().get(rank);
        let process = m.and_then(|m| j.process(m.record.segment));
        !over && process.is_some_and(|p| p.record.liveness != Liveness::Alive)
            || m.is_some_and(|m| m.record.making == Some(Making::Aborted))
    };
    let moving = fronts.iter().filter(|(r, (_, stage))| *stage != OpPhase::InDoubt && !is_gone(r));
    let open: BTreeSet<u64> = moving.map(|(_, (order, _))| *order).collect();
    let row = |rank: &Rank, m: &Member| {
        j.process(m.record.segment).filter(|p| !Process::unsure(p))?;
        let mut issued = m.issued(track)?;
        let (mut done, stage) = fronts.get(rank).copied().unwrap_or((issued, OpPhase::InDoubt));
        let is_there = |r: &Rank| {
            let m = c.members().get(r).filter(|m| m.record.finalized_ns.is_none());
            m.and_then(|m| j.process(m.record.segment)).is_some_and(|p| !p.unsure()) && !is_gone(r)
        };
        let waits_for = |(r, (order, waits)): (&Rank, &(u64, OpPhase))| {
            *waits == OpPhase::Started && *order == done && is_there(r)
        };
        let needs_all =
            || !c.instance(track, done).and_then(Instance::first).is_some_and(|p| p.op.func.is_rooted());
        let waited_for = || stage == OpPhase::Issued && needs_all() && fronts.iter().any(waits_for);
        if m.record.finalized_ns.is_some() && !waited_for() {
            done = issued;
        }
        if done < issued && is_gone(rank) {
            let of_alive =
                |r: &Rank| !is_gone(r) && c.members().get(r).is_some_and(|m| m.issued(track).is_some());
            let parts_of_alive = |order: u64| -> Vec<&Part> {
                let instance = c.incomplete_of(track).find(|(o, _)| *o == order).map(|(_, i)| i);
                let parts = instance.into_iter().flat_map(|i| &i.parts);
                parts.filter(|(r, _)| of_alive(r)).map(|(_, p)| p).collect()
            };
            let all = |order: &u64, waits: fn(&Part) -> bool| {
                let parts = parts_of_alive(*order);
                !parts.is_empty() && parts.iter().all(|p| !p.finished && waits(p))
            };
            let queued = (done..issued).find(|o| all(o, |p| !p.is_silent() && p.started_ns.is_none()));
            let alive = c.members().iter().filter(|(r, _)| of_alive(r));
            let most = alive.filter_map(|(_, m)| m.issued(track)).max().unwrap_or(0);
            let last = (done..issued).last().filter(|o| most <= issued && all(o, Part::is_silent));
            let next = open.range(done..issued).next().copied();
            issued = next.or(queued).or(last).unwrap_or(issued);
            done = issued;
        }
        Some((*rank, (m.record.segment, m.record.gpu.clone()), (issued, done, stage)))
    };
    c.members().iter().filter_map(|(r, m)| row(r, m)).collect()
}

/// Holds what is kept against its definition, and against a graph that is made anew.
fn check(j: &Join, now_ns: u64) {
    let over = j.all_gone();
    let mut who: HashMap<u32, (SegmentId, Option<Arc<str>>)> = HashMap::new();
    for c in j.communicators() {
        for m in c.members().values() {
            let me = (m.record.segment, m.record.gpu.clone());
            let seat = c.seat(m.record.rank).expect("a seat");
            assert_eq!(*seat, Seat::of(&m.record, seat.actor));
            assert_eq!(*who.entry(seat.actor).or_insert_with(|| me.clone()), me, "a number is one's own");
        }
    }
    let numbers: BTreeSet<_> = who.values().collect();
    assert_eq!(numbers.len(), who.len(), "and one has one number");
    for c in j.communicators() {
        for track in [Track::Collective, Track::Replay] {
            let kept: Vec<Row> = j
                .wait_graph
                .waits
                .rows(c.id, track)
                .iter()
                .map(|(r, f)| (*r, who[&f.process].clone(), (f.issued, f.done, f.stage)))
                .collect();
            assert_eq!(kept, defined(j, c, track, over, now_ns), "{} {track}", c.id);
        }
    }
    let over = |c: &&Communicator| c.closed();
    assert_eq!(j.open(), j.comms.len() - j.comms.values().filter(over).count());
    assert_eq!(j.parts, j.comms.values().map(Communicator::parts_kept).sum::<usize>());
    let notable: Vec<CommId> = j.comms.values().filter(|c| c.is_notable()).map(|c| c.id).collect();
    assert_eq!(j.dirty.notable().into_iter().collect::<Vec<_>>(), notable);
    let late = j.comms.values().filter(|c| c.next_ns().is_some_and(|t| t <= now_ns)).map(|c| c.id);
    let due = j.dirty.due(now_ns);
    assert!(late.clone().all(|id| due.contains(&id)), "{:?} of {due:?}", late.collect::<Vec<_>>());
    let mut anew = j.clone();
    anew.wait_graph = GraphCache { changed: true, ..GraphCache::default() };
    anew.comms.values_mut().for_each(|c| c.stale = true);
    let all: Vec<CommId> = anew.comms.keys().copied().collect();
    anew.keep(now_ns, &all);
    let (a, b) = (&anew.wait_graph.standing, &j.wait_graph.standing);
    assert_eq!((&a.stalls, &a.origins, &a.untimed), (&b.stalls, &b.origins, &b.untimed));
    assert_eq!(anew.wait_graph.queued, j.wait_graph.queued);
    assert_eq!(anew.wait_graph.since, j.wait_graph.since);
}

#[derive(Debug, Clone)]
enum What {
    /// Issues so many, by calls or by replays.
    Issues(u64, bool),
    /// A record of an operation of this lane: how far it is.
    Op(u64, u8, u8),
    /// The same of all ranks.
    All(u64, u8, u8),
    Lives(Option<bool>),
    /// All processes end, its own last.
    Ends,
    Loses,
    Misses,
    Makes(u8),
    Frees,
    Leaves,
    /// Another GPU, or another process in its place.
    Moves(bool),
    Ticks(u64),
}

fn what() -> impl Strategy<Value = What> {
    prop_oneof![
        4 => (0..5u64, any::<bool>()).prop_map(|(n, replays)| What::Issues(n, replays)),
        8 => (0..5u64, 0..4u8, 0..5u8).prop_map(|(order, lane, how)| What::Op(order, lane, how)),
        4 => (0..5u64, 0..2u8, 0..5u8).prop_map(|(order, lane, how)| What::All(order, lane, how)),
        1 => any::<Option<bool>>().prop_map(What::Lives),
        1 => Just(What::Ends),
        1 => Just(What::Loses),
        1 => Just(What::Misses),
        1 => (0..3u8).prop_map(What::Makes),
        1 => Just(What::Frees),
        1 => Just(What::Leaves),
        1 => any::<bool>().prop_map(What::Moves),
        4 => (0..60u64).prop_map(|ms| What::Ticks(ms * MS)),
        // Long enough for what is known to be done to be counted without its stamps.
        1 => Just(What::Ticks(1_100 * MS)),
    ]
}

/// The records as they stand; what happens changes one and feeds it.
struct World {
    join: Join,
    comms: HashMap<(u64, u32), crate::model::CommRecord>,
    now_ns: u64,
}

impl World {
    fn happens(&mut self, comm: u64, rank: u32, what: What) {
        let Update::Segment(mut segment) = process(rank) else { unreachable!() };
        let mut record = self.comms[&(comm, rank)].clone();
        match what {
            What::Issues(n, false) => record.issued = n,
            What::Issues(n, true) => record.replayed = n,
            What::Makes(n) => {
                record.making = [None, Some(Making::Begun), Some(Making::Aborted)][usize::from(n)]
            }
            What::Frees => record.finalized_ns = Some(self.now_ns),
            What::Moves(false) => record.gpu = Some("0000:01:00.0".into()),
            What::Moves(true) => record.segment = SegmentId(u64::from(rank) + 11),
            What::Op(order, lane, how) => {
                let at = self.now_ns;
                let kernel =
                    [None, Some((at, None)), Some((at, Some(at + MS))), None, None][usize::from(how)];
                let mut op = all_reduce(rank, order, at, kernel);
                let peer = Rank((rank + 1) % RANKS);
                op.lane =
                    [Lane::Collective, Lane::Replay, Lane::Send(peer), Lane::Recv(peer)][usize::from(lane)];
                (op.comm, op.segment) = (CommId::unowned(comm), record.segment);
                if how == 3 {
                    op.timing = Timing::Not(Untimed::Budget);
                }
                return self.join.feed(Update::Op(Box::new(op)));
            }
            What::All(order, lane, how) => {
                for r in 0..RANKS {
                    self.happens(comm, r, What::Op(order, lane, how));
                }
                return;
            }
            What::Ends => {
                for r in (0..RANKS).filter(|r| *r != rank).chain([rank]) {
                    self.happens(comm, r, What::Lives(Some(false)));
                    self.happens(comm, r, What::Ticks(MS));
                }
                return;
            }
            What::Lives(alive) => {
                let gone = Liveness::Gone(alive.map(|_| self.now_ns));
                segment.liveness = if alive == Some(true) { Liveness::Alive } else { gone };
                return self.join.feed(Update::Segment(segment));
            }
            What::Loses => {
                segment.losses = vec![("slot being written", 1)];
                return self.join.feed(Update::Segment(segment));
            }
            What::Misses => {
                let (segment, what) = (record.segment, COUNTED);
                return self.join.feed(Update::Missed { segment, what, count: 1 });
            }
            What::Leaves => {
                let segment = record.segment;
                return self.join.feed(Update::Left { segment, comm: record.comm, rank: record.rank });
            }
            What::Ticks(by) => {
                self.now_ns += by;
                self.join.tick(self.now_ns);
                return check(&self.join, self.now_ns);
            }
        }
        self.comms.insert((comm, rank), record.clone());
        self.join.feed(Update::Comm(record));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_is_kept_is_what_would_be_made_from_scratch(
        steps in prop::collection::vec((0..COMMS, 0..RANKS, what()), 1..120),
    ) {
        let mut w = World { join: Join::new(), comms: HashMap::new(), now_ns: 1_000 * MS };
        for rank in 0..RANKS {
            // One is in its communicators before it is known itself.
            if rank > 0 {
                w.join.feed(process(rank));
            }
            for comm in 0..COMMS {
                let Update::Comm(mut record) = member(rank, RANKS, 1) else { unreachable!() };
                record.comm = CommId::unowned(comm);
                // The last is of two ranks only, until others say something of it.
                if comm + 1 < COMMS || rank < 2 {
                    w.join.feed(Update::Comm(record.clone()));
                }
                w.comms.insert((comm, rank), record);
            }
        }
        for (comm, rank, what) in steps {
            w.happens(comm, rank, what);
        }
        w.happens(0, 0, What::Ticks(0));
        w.happens(0, 0, What::Ticks(30 * MS));
    }
}

#[test]
fn a_look_between_two_ticks_sees_what_came_since() {
    let mut j = Join::new();
    for r in 0..2 {
        j.feed(process(r));
        j.feed(member(r, 2, 1));
        j.feed(Update::Op(Box::new(all_reduce(r, 0, MS, Some((MS, Some(2 * MS)))))));
    }
    j.tick(100 * MS);
    assert_eq!(j.standing(100 * MS).origins(), []);
    j.feed(member(0, 2, 2));
    j.feed(Update::Op(Box::new(all_reduce(0, 1, 100 * MS, Some((100 * MS, None))))));
    assert_eq!(j.standing(110 * MS).origins(), [], "young");
    assert_eq!(j.standing(120 * MS).origins()[0].ranks, [Rank(1)]);
    j.tick(110 * MS);
    assert_eq!(j.standing(110 * MS).origins(), []);
    assert_eq!(j.standing(120 * MS).origins().len(), 1, "it became old without a tick");
    j.tick(120 * MS);
    assert!(Arc::ptr_eq(&j.standing(120 * MS), &j.standing(121 * MS)), "nothing is made anew");
}

#[test]
fn who_frees_a_communicator_is_waited_for_in_what_it_has_not_started() {
    let mut j = Join::new();
    for (r, kernel) in [(0, Some((MS, None))), (1, None)] {
        j.feed(process(r));
        let Update::Comm(mut record) = member(r, 2, 1) else { unreachable!("a member") };
        record.finalized_ns = (r == 1).then_some(2 * MS);
        j.feed(Update::Comm(record));
        // Rank 0 is in it; rank 1 has issued it behind something else.
        j.feed(Update::Op(Box::new(all_reduce(r, 0, MS, kernel))));
    }
    j.tick(100 * MS);
    let standing = j.standing(100 * MS);
    let origins: Vec<_> = standing.origins().iter().map(|o| o.ranks.clone()).collect();
    assert_eq!(origins, [[Rank(1)]]);
}

#[test]
fn a_stopped_rank_is_waited_for_after_a_broadcast_that_the_others_left() {
    let mut j = Join::new();
    for r in 0..3 {
        j.feed(process(r));
        j.feed(member(r, 3, if r == 2 { 1 } else { 2 }));
        let end_ns = (r < 2).then_some(2 * MS);
        let broadcast = OpRecord { func: Func::Broadcast, ..all_reduce(r, 0, MS, Some((MS, end_ns))) };
        j.feed(Update::Op(Box::new(broadcast)));
        if r < 2 {
            j.feed(Update::Op(Box::new(all_reduce(r, 1, 3 * MS, Some((3 * MS, None))))));
        }
    }
    let mut fact = HostFact::new(SegmentId(3), 3 * MS);
    fact.state = Some(ProcessState::Stopped { traced: false });
    j.feed(Update::Host(Box::new(fact)));
    j.tick(100 * MS);
    let standing = j.standing(100 * MS);
    let stall = |o: &crate::join::Origin| standing.stall(o.first).map(|s| s.order);
    let origins: Vec<_> = standing.origins().iter().map(|o| (stall(o), o.ranks.clone())).collect();
    assert_eq!(origins, [(Some(1), vec![Rank(2)])]);
}

#[test]
fn a_rank_that_others_left_an_operation_with_is_not_in_an_earlier_one() {
    // Rank 2 is stopped: nothing reports that it has started the broadcast, or anything after it.
    let stalls = |second: Func| {
        let mut j = Join::new();
        for r in 0..3 {
            j.feed(process(r));
            j.feed(member(r, 3, if r < 2 { 4 } else { 3 }));
            for (order, func) in (0..).zip([Func::AllReduce, Func::Broadcast, second, Func::AllReduce]) {
                let at = (order + 1) * MS;
                let stamps = match (r, order) {
                    (2, 1..) => None,
                    (_, 3) => Some((at + MS, None)),
                    _ => Some((at + MS, Some(at + 2 * MS))),
                };
                if (r, order) != (2, 3) {
                    let op = all_reduce(r, order, at, stamps);
                    j.feed(Update::Op(Box::new(OpRecord { func, ..op })));
                }
            }
        }
        j.tick(100 * MS);
        let standing = j.standing(100 * MS);
        (0..).map_while(|i| standing.stall(i)).map(|s| (s.order, s.lack)).collect::<Vec<_>>()
    };
    assert_eq!(
        stalls(Func::AllReduce),
        [(3, WaitingFor::Issue)],
        "what the others left does not end without rank 2"
    );
    assert_eq!(stalls(Func::Broadcast), [(1, WaitingFor::Start), (3, WaitingFor::Issue)]);
}

#[test]
fn a_lost_record_hides_nothing_that_comes_after_it() {
    let mut j = Join::new();
    for r in 0..2 {
        j.feed(process(r));
        j.feed(member(r, 2, 5));
        for order in 0..5 {
            let at = order * 100 * MS;
            let stamps = match (order, r) {
                // The last one does not start on rank 1.
                (4, 0) => Some((at + MS, None)),
                (4, _) => None,
                _ => Some((at + MS, Some(at + 2 * MS))),
            };
            let mut op = all_reduce(r, order, at, stamps);
            if order == 1 {
                // Rank 0 gives, and may be through alone.
                (op.func, op.root) = (Func::Broadcast, Some(Rank(0)));
            }
            if (order, r) != (1, 1) {
                j.feed(Update::Op(Box::new(op)));
            }
        }
    }
    j.tick(900 * MS);
    let standing = j.standing(900 * MS);
    let stalls: Vec<&Stall> = (0..).map_while(|i| standing.stall(i)).collect();
    let named: Vec<_> = stalls.iter().map(|s| (s.order, s.lack, s.lacking[0].0)).collect();
    assert_eq!(named, [(4, WaitingFor::Start, Rank(1))]);
}

#[test]
fn a_job_that_makes_communicators_again_and_again_leaves_nothing() {
    let mut j = Join::new();
    j.feed(process(0));
    for n in 0..2_000 {
        let Update::Comm(mut record) = member(0, 1, 0) else { unreachable!() };
        (record.comm, record.finalized_ns) = (CommId::unowned(n), Some(n));
        j.feed(Update::Comm(record));
        j.tick(n * MS);
    }
    assert_eq!((j.communicators().count(), j.memberships(SegmentId(1)).len()), (256, 256));
    assert_eq!(j.roster.numbers(), 1);
}

#[test]
fn many_communicators_keep_less_each_of_what_is_over() {
    const MANY: u64 = PARTS_KEPT as u64 / 256 + 8;
    let mut j = Join::new();
    j.feed(process(0));
    for comm in 0..MANY {
        let Update::Comm(mut record) = member(0, 1, 256) else { unreachable!() };
        record.comm = CommId::unowned(comm);
        j.feed(Update::Comm(record));
        for order in 0..256 {
            let at = (order + 1) * MS;
            let mut op = all_reduce(0, order, at, Some((at, Some(at + 1_000))));
            op.comm = CommId::unowned(comm);
            j.feed(Update::Op(Box::new(op)));
        }
    }
    j.tick(1_000 * MS);
    let kept: Vec<usize> = j.communicators().map(|c| c.instances().count()).collect();
    assert_eq!(kept, vec![128; MANY as usize]);
    let orders = |c: &Communicator| c.instances().map(|(_, order, _)| order).collect::<Vec<_>>();
    assert_eq!(j.communicators().next().map(orders), Some((128..256).collect()), "the younger ones");
}
