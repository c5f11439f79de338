//! How long ranks work by themselves before transfers: a stage of a pipeline that becomes slow keeps its peers waiting, and so
//! do bubbles, in which it waits itself.
//!
//! A rank works by itself from the end of its last transfer to the start of the next one. How long that usually takes is learned
//! for each two transfers that follow each other, from medians of a few. It counts as longer only where it grew more than that
//! of the other ranks: batches and sequences grow for all of them.

use super::{Communicator, Key};
use crate::join::trend::median;
use crate::model::{Rank, Track};
use std::collections::BTreeMap;

/// Ranks of a communicator, transfers of a rank, and pairs of these that follow each other, of which work is learned. Whoever has
/// more is in no pipeline.
const RANKS: usize = 64;
const TRACKS: usize = 8;
const SPANS: usize = 16;
/// Operations of a track that are looked at for the last one before a moment: ahead of the newest one judged, and back.
const AHEAD: u64 = 4;
const BACK: u64 = 16;
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
    /// The newest operation that was judged of each track.
    newest: BTreeMap<Track, u64>,
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
                + w.newest.len() * size_of::<(Track, u64)>()
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
    /// Learns how long a rank worked by itself before a transfer; returns by how much longer than usual that was, in ns, where
    /// its work has become longer, or was far longer this once.
    pub(super) fn note_own_work(&mut self, key: Key, rank: Rank) -> Option<u64> {
        let start_ns = self.instance(key.0, key.1)?.parts.get(&rank)?.kernel?.start_ns;
        let has_room = self.own_work.0.len() < RANKS;
        if !has_room && !self.own_work.0.contains_key(&rank) {
            return None;
        }
        let worker = self.own_work.0.entry(rank).or_default();
        if worker.newest.len() >= TRACKS && !worker.newest.contains_key(&key.0) {
            return None;
        }
        let newest = worker.newest.entry(key.0).or_default();
        *newest = key.1.max(*newest);
        let tracks: Vec<Key> = worker.newest.iter().map(|(t, o)| (*t, *o)).collect();
        let before = tracks.into_iter().filter_map(|(track, newest)| {
            let orders = (newest.saturating_sub(BACK)..=newest.saturating_add(AHEAD)).rev();
            let ends =
                orders.filter_map(|o| Some(self.instance(track, o)?.parts.get(&rank)?.kernel?.end_ns()));
            Some((ends.into_iter().find(|ns| *ns <= start_ns)?, track))
        });
        let (ended_ns, track) = before.max()?;
        let own_ns = start_ns - ended_ns;
        let worker = self.own_work.0.get_mut(&rank)?;
        if worker.spans.len() >= SPANS && !worker.spans.contains_key(&(track, key.0)) {
            return None;
        }
        let span = worker.spans.entry((track, key.0)).or_default();
        span.add(own_ns as f32);
        let (usual_ns, ratio, longest_ns) = (span.usual_ns()?, span.ratio()?, span.longest);
        let is_far = own_ns as f32 > longest_ns * FAR;
        if !span.is_longer && !is_far {
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
    use crate::model::{Func, Lane, Update};

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
        const MS: u64 = 1_000_000;
        let mut join = Join::new();
        for r in 0..2 {
            join.feed(process(r));
            join.feed(member(r, 2, 0));
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
                    join.feed(Update::Op(Box::new(op)));
                }
                t = sent_ns + MS / 10;
                join.tick(t);
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
