//! How long ranks work by themselves before transfers: a stage of a pipeline that becomes slow keeps its peers waiting, and so
//! do bubbles, in which it waits itself.
//!
//! A rank works by itself from the end of its last transfer to the start of the next one, where none between is left out of GPU
//! times, and no other rank of the communicator computes on its GPU. How long that usually takes is learned for each two transfers that follow each other,
//! from medians of a few. It counts as longer only where it grew more than that of the other ranks: batches and sequences grow
//! for all of them.

use super::super::timing::Kernel;
use super::super::trend::median;
use super::{Communicator, Key, Member, PairCount};
use crate::model::{Rank, Track};
use std::collections::BTreeMap;

/// Ranks of a communicator, transfers of a rank, and pairs of these that follow each other, of which work is learned. Whoever has
/// more is in no pipeline.
const RANKS: usize = 64;
const TRACKS: usize = 8;
const SPANS: usize = 16;
/// Operations of a track before a moment of which the last one that is over is looked for.
const BACK: usize = 16;
/// Operations that are passed in that search, of all tracks.
const STEPS: usize = 2048;
/// Spans before anything is learned, spans of a block, and of the shorter blocks that tell what is usual: a pipeline has few a
/// second. So many of these do.
const WARM_UP: u8 = 4;
const BLOCK: usize = 8;
const BLOCK_FIRST: usize = 4;
const LEARNED: usize = 3;
/// Work is longer from this ratio on, in so many blocks in a row.
const RATIO: f32 = 1.3;
const ROW: u8 = 2;
/// A single span is longer from this ratio to the longest usual one on.
const FAR: f32 = 1.5;

/// How long a rank works between one transfer and another.
#[derive(Debug, Clone, Copy, Default)]
struct Span {
    skipped: u8,
    /// Of the open block, in ns.
    open: [f32; BLOCK],
    opened: u8,
    /// Medians of the first blocks, in ns; all of them once there are [`LEARNED`].
    first: [f32; LEARNED],
    learned: u8,
    /// The longest that is usual, in ns.
    longest: f32,
    /// The median of the last block, in ns.
    lately: f32,
    /// Blocks in a row that were longer, and that were not.
    longer: u8,
    calm: u8,
    is_longer: bool,
}

impl Span {
    fn add(&mut self, ns: f32) {
        if self.skipped < WARM_UP {
            self.skipped += 1;
            return;
        }
        // What is far beyond is not usual, however often it comes.
        if self.usual_ns().is_none() || ns <= self.longest * FAR {
            self.longest = self.longest.max(ns);
        }
        self.open[usize::from(self.opened)] = ns;
        self.opened += 1;
        let usual = self.usual_ns();
        let enough = if usual.is_some() { BLOCK } else { BLOCK_FIRST };
        if usize::from(self.opened) < enough {
            return;
        }
        self.opened = 0;
        self.lately = middle(&self.open[..enough]);
        let Some(usual) = usual else {
            self.first[usize::from(self.learned)] = self.lately;
            self.learned += 1;
            return;
        };
        if self.lately > usual * RATIO {
            (self.longer, self.calm) = (self.longer.saturating_add(1), 0);
        } else {
            (self.longer, self.calm) = (0, self.calm.saturating_add(1));
        }
        self.is_longer = self.longer >= ROW || self.is_longer && self.calm < ROW;
    }

    fn usual_ns(&self) -> Option<f32> {
        (usize::from(self.learned) == LEARNED).then(|| middle(&self.first))
    }

    /// How many times as long as usual it is now.
    fn ratio(&self) -> Option<f32> {
        Some(self.lately / self.usual_ns().filter(|ns| *ns > 0.0)?)
    }
}

fn middle(all: &[f32]) -> f32 {
    let all: Vec<f64> = all.iter().map(|v| f64::from(*v)).collect();
    median(&all).unwrap_or(0.0) as f32
}

/// One rank's work.
#[derive(Debug, Clone, Default)]
struct Worker {
    /// The operation of each track near which the last one before a moment is looked for, and when that one ended, host monotonic
    /// ns. Many are judged at once, one track after the other.
    near: BTreeMap<Track, (u64, u64)>,
    spans: BTreeMap<(Track, Track), Span>,
}

impl Worker {
    /// How many times as long as usual its work takes now.
    fn ratio(&self) -> Option<f64> {
        let all: Vec<f64> = self.spans.values().filter_map(|s| Some(f64::from(s.ratio()?))).collect();
        median(&all)
    }
}

/// The work of a communicator's ranks.
#[derive(Debug, Clone, Default)]
pub(super) struct OwnWork(BTreeMap<Rank, Worker>);

impl OwnWork {
    /// Its memory in bytes.
    pub(super) fn bytes(&self) -> usize {
        let of = |w: &Worker| {
            size_of::<Worker>()
                + w.near.len() * size_of::<(Track, u64, u64)>()
                + w.spans.len() * size_of::<((Track, Track), Span)>()
        };
        self.0.values().map(of).sum()
    }

    fn others_ratio(&self, rank: Rank) -> f64 {
        let all: Vec<f64> =
            self.0.iter().filter(|(r, _)| **r != rank).filter_map(|(_, w)| w.ratio()).collect();
        median(&all).unwrap_or(1.0).max(1.0)
    }
}

impl Communicator {
    /// True where another rank computes on the same GPU: whatever one of them does takes longer while the others compute.
    pub(super) fn shares_gpu(&self, rank: Rank) -> bool {
        let place = |m: &Member| Some((m.record.host_clock, m.record.gpu.clone()?));
        let Some(own) = self.members.get(&rank).and_then(|m| place(m)) else { return false };
        self.members.iter().any(|(r, m)| *r != rank && place(m).as_ref() == Some(&own))
    }

    fn kernel(&self, (track, order): Key, rank: Rank) -> Option<Kernel> {
        self.instance(track, order)?.parts.get(&rank)?.kernel
    }

    /// The last operation of a rank's track that started before a moment, searched from a near one on, and when the last one ended
    /// that was over by then: 0 where none was, absent where it is not known, as one of them is left out of GPU times or was
    /// forgotten. NCCL 2.28 tells one end for all transfers of a launch: that of one whose peer came later is not believed.
    fn last_before(
        &self,
        (track, (mut order, known_ns)): (Track, (u64, u64)),
        rank: Rank,
        moment_ns: u64,
        steps: &mut usize,
    ) -> (u64, Option<u64>) {
        let is_after =
            |order: u64| self.kernel((track, order), rank).is_some_and(|k| k.start_ns >= moment_ns);
        let is_known = |order: u64| self.instance(track, order).is_some();
        if !is_known(order) {
            return (order, Some(known_ns).filter(|ns| *ns <= moment_ns));
        }
        let mut step = || {
            *steps = steps.saturating_sub(1);
            *steps > 0
        };
        while let Some(next) = order.checked_add(1).filter(|next| is_known(*next) && !is_after(*next))
            && step()
        {
            order = next;
        }
        while let Some(before) = order.checked_sub(1).filter(|before| is_after(order) && is_known(*before))
            && step()
        {
            order = before;
        }
        if is_after(order) {
            return (order, (order == 0).then_some(0));
        }
        // Over the bus not every operation is known.
        let is_last =
            order.checked_add(1).is_some_and(|next| is_after(next) || !self.is_issued(track, next, rank));
        // Absent: it says nothing, as neither its start nor its end is believed.
        let ended_ns = |order: u64| {
            let Some(part) = self.instance(track, order).map(|i| i.parts.get(&rank)) else {
                return Some(None);
            };
            let Some(own_ns) = part.and_then(|p| p.kernel).map(|k| k.end_ns()) else {
                return part.is_none_or(|p| p.is_silent() || p.started_ns.is_some()).then_some(None);
            };
            let peers = self.instance(track, order).into_iter().flat_map(|i| i.parts.iter());
            let peers = peers.filter(|(r, _)| **r != rank && self.share_clock(**r, rank));
            let peer_came_ns = peers.filter_map(|(_, p)| Some(p.kernel?.start_ns)).max();
            Some(Some(own_ns.max(peer_came_ns.unwrap_or(0))))
        };
        let mut ends = (0..=order).rev().take(BACK).filter_map(ended_ns);
        let over = ends.find(|ns| ns.is_none_or(|ns| ns <= moment_ns)).unwrap_or(None);
        (order, over.filter(|_| is_last))
    }

    /// True where a rank is known to have issued a transfer of this order, or may have.
    fn is_issued(&self, track: Track, order: u64, rank: Rank) -> bool {
        let Track::Pair(from, to) = track else { return false };
        let issued = |n: &PairCount| if rank == from { n.sent } else { n.received };
        self.pairs.get(&(from, to)).is_none_or(|n| issued(n) > order)
    }

    /// Learns how long a rank worked by itself before a transfer; returns by how much longer than usual that was, in ns, where
    /// its work has become longer, or was far longer this once.
    pub(super) fn note_own_work(&mut self, key: Key, rank: Rank) -> Option<u64> {
        let kernel = self.kernel(key, rank)?;
        let start_ns = kernel.start_ns;
        let has_room = self.own_work.0.len() < RANKS;
        if !has_room && !self.own_work.0.contains_key(&rank) {
            return None;
        }
        let worker = self.own_work.0.entry(rank).or_default();
        if worker.near.len() >= TRACKS && !worker.near.contains_key(&key.0) {
            return None;
        }
        let tracks: Vec<(Track, (u64, u64))> = worker.near.iter().map(|(t, o)| (*t, *o)).collect();
        let mut steps = STEPS;
        let mut before = Some((0, key.0));
        for near in tracks {
            let (order, ended_ns) = self.last_before(near, rank, start_ns, &mut steps);
            if let (Some(w), Some(ns)) = (self.own_work.0.get_mut(&rank), ended_ns) {
                w.near.insert(near.0, (order, ns));
            }
            before = before.zip(ended_ns).map(|(b, ns)| b.max((ns, near.0)));
        }
        if let Some(w) = self.own_work.0.get_mut(&rank) {
            w.near.insert(key.0, (key.1, kernel.end_ns()));
        }
        let (ended_ns, track) = before.filter(|(ns, _)| *ns > 0)?;
        let own_ns = start_ns - ended_ns;
        let worker = self.own_work.0.get_mut(&rank)?;
        if worker.spans.len() >= SPANS && !worker.spans.contains_key(&(track, key.0)) {
            return None;
        }
        let span = worker.spans.entry((track, key.0)).or_default();
        span.add(own_ns as f32);
        let (usual_ns, ratio, longest_ns) = (span.usual_ns()?, span.ratio()?, span.longest);
        let is_far = own_ns as f32 > longest_ns * FAR;
        // Ranks that share a GPU work for as long as the others' turns make it.
        if !span.is_longer && !is_far || self.shares_gpu(rank) {
            return None;
        }
        let of_others = self.own_work.others_ratio(rank);
        let beyond = |ns: f32| own_ns.saturating_sub((f64::from(ns) * of_others) as u64);
        Some(if f64::from(ratio) > of_others * f64::from(RATIO) {
            beyond(usual_ns)
        } else {
            beyond(longest_ns)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::join::Join;
    use crate::join::communicator::LateEvent;
    use crate::join::testing::{all_reduce, member, process};
    use crate::model::{Func, Lane, Timing, Untimed, Update};

    fn taught(spans: &[f32]) -> Span {
        let mut span = Span::default();
        spans.iter().for_each(|ns| span.add(*ns));
        span
    }

    /// Work of 1,000 ns, and then of others.
    fn after(later: &[f32]) -> Span {
        let usual = [1_000.0; WARM_UP as usize + BLOCK_FIRST * LEARNED];
        taught(&[&usual, later].concat())
    }

    #[test]
    fn work_is_longer_when_the_medians_of_two_blocks_are() {
        assert!(!after(&[2_000.0; BLOCK]).is_longer);
        assert!(after(&[2_000.0; 2 * BLOCK]).is_longer);
        assert!(!after(&[1_200.0; 8 * BLOCK]).is_longer);
        let mut seldom = [1_000.0; 8 * BLOCK];
        seldom.iter_mut().step_by(3).for_each(|ns| *ns = 9_000.0);
        assert!(!after(&seldom).is_longer, "a step's first transfer waits for its data");
    }

    #[test]
    fn it_is_over_after_two_blocks_and_what_is_usual_stays() {
        let mut span = after(&[2_000.0; 100 * BLOCK]);
        assert_eq!(span.usual_ns(), Some(1_000.0));
        (0..BLOCK).for_each(|_| span.add(1_000.0));
        assert!(span.is_longer);
        (0..BLOCK).for_each(|_| span.add(1_000.0));
        assert!(!span.is_longer);
    }

    /// Two ranks that send to each other in turn and work 2 ms before each send; rank 1 does so for longer in the last rounds.
    fn in_turn(longer_ns: u64, rounds: std::ops::Range<u64>) -> Vec<(Rank, u64)> {
        in_turn_on(longer_ns, rounds, ["0000:01:00.0", "0000:02:00.0"], 1, |_| true)
    }

    /// The same on these GPUs, looked at every so many rounds, where the transfers of some rounds alone are timed.
    fn in_turn_on(
        longer_ns: u64,
        rounds: std::ops::Range<u64>,
        gpus: [&str; 2],
        looked_at_every: u64,
        is_timed: impl Fn(u64) -> bool,
    ) -> Vec<(Rank, u64)> {
        const MS: u64 = 1_000_000;
        let mut join = Join::new();
        for (r, gpu) in (0..2).zip(gpus) {
            join.feed(process(r));
            let Update::Comm(mut own) = member(r, 2, 0) else { unreachable!("a member") };
            own.gpu = Some(gpu.into());
            join.feed(Update::Comm(own));
        }
        let mut t = 1_000 * MS;
        let mut ticket = 0;
        for round in 0..100 {
            for (from, to) in [(0, 1), (1, 0)] {
                let longer_ns = if from == 1 && rounds.contains(&round) { longer_ns } else { 0 };
                let sent_ns = t + 2 * MS + longer_ns;
                for (rank, start_ns) in [(to, t), (from, sent_ns)] {
                    let mut op =
                        all_reduce(rank, round, t - 500 * MS, Some((start_ns, Some(sent_ns + MS / 10))));
                    let is_send = rank == from;
                    op.func = if is_send { Func::Send } else { Func::Recv };
                    op.lane = if is_send { Lane::Send(Rank(to)) } else { Lane::Recv(Rank(from)) };
                    ticket += 1;
                    op.ticket = ticket;
                    if !is_timed(round) {
                        op.stamps.clear();
                        (op.timing, op.started, op.stopped) = (Timing::Not(Untimed::Budget), 0, 0);
                    }
                    join.feed(Update::Op(Box::new(op)));
                }
                t = sent_ns + MS / 10;
                if round % looked_at_every == looked_at_every - 1 {
                    join.tick(t);
                }
            }
        }
        let own = |e: &&LateEvent| e.by_own_work;
        let late = join.communicators().flat_map(Communicator::late).filter(own);
        late.map(|e| (e.rank, (e.by_ns + MS / 2) / MS)).collect()
    }

    #[test]
    fn a_rank_whose_work_becomes_longer_is_late() {
        let late = in_turn(4_000_000, 50..100);
        assert!(late.len() > 20 && late.iter().all(|l| *l == (Rank(1), 4)), "{late:?}");
        assert_eq!(in_turn(0, 50..100), []);
        assert_eq!(in_turn(400_000, 50..100), [], "as much varies by itself");
    }

    #[test]
    fn many_rounds_that_are_looked_at_together_say_the_same() {
        const GPUS: [&str; 2] = ["0000:01:00.0", "0000:02:00.0"];
        let late = in_turn_on(4_000_000, 50..100, GPUS, 20, |_| true);
        assert!(late.len() > 20 && late.iter().all(|l| *l == (Rank(1), 4)), "{late:?}");
        // Rounds that are left out of GPU times lie between the others.
        assert_eq!(in_turn_on(0, 50..100, GPUS, 20, |round| round < 50 || round % 7 == 0), []);
    }

    #[test]
    fn ranks_that_share_a_gpu_work_as_long_as_their_turns_make_it() {
        assert_eq!(in_turn_on(4_000_000, 50..100, ["0000:01:00.0"; 2], 1, |_| true), []);
    }

    #[test]
    fn a_single_span_that_is_far_longer_is_late() {
        let late = in_turn(40_000_000, 60..61);
        assert_eq!(late, [(Rank(1), 40)]);
    }

    #[test]
    fn ranks_are_held_against_the_others() {
        let worker = |factor: f32| {
            let span = after(&[1_000.0 * factor; 2 * BLOCK]);
            Worker { spans: [((Track::Collective, Track::Replay), span)].into(), ..Worker::default() }
        };
        let work = OwnWork([(Rank(0), worker(3.0)), (Rank(1), worker(1.5)), (Rank(2), worker(1.5))].into());
        assert!((work.others_ratio(Rank(0)) - 1.5).abs() < 1e-6);
        assert!((work.others_ratio(Rank(1)) - 2.25).abs() < 1e-6);
    }
}
