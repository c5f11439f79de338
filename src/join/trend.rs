//! How long one kind of transfer takes, learned: what is usual, and since when it is not.
//!
//! Operations are taken in blocks of a few, of which the median counts, so that single slow ones say nothing. The
//! first blocks after the warm-up tell what is usual and how much it varies by itself; afterwards several blocks in a
//! row have to lie clearly above that. A slow block tells what is usual only where one follows that is not slow.

use std::collections::VecDeque;

/// Operations before anything is learned: connections are made, clocks rise.
const WARM_UP: u32 = 8;
/// A block is so many operations, or at least [`BLOCK_LEAST`] of them and [`BLOCK_NS`]: a slow job makes a few a second,
/// and what slows it down for seconds is no burst.
const BLOCK: usize = 16;
/// The blocks that first tell what is usual are shorter: a fault may come early in a job.
const BLOCK_FIRST: usize = 8;
const BLOCK_LEAST: usize = 4;
const BLOCK_NS: u64 = 500_000_000;
/// Blocks from which is learned what is usual; the first so many of them tell it until then.
const LEARNED: usize = 8;
const LEARNED_FIRST: usize = 3;
/// Blocks in a row that make a change, or its end.
const ROW: usize = 3;
/// So many make a change where they last for [`BLOCK_NS`]: of a job that is seldom timed there are no more.
const ROW_LONG: usize = 2;
/// Blocks that are kept.
const KEPT: usize = 32;
/// A block is slow from this ratio to what is usual.
const RATIO: f64 = 1.3;
/// And from so many times what blocks vary by themselves.
const SPREADS: f64 = 6.0;
/// Blocks are taken to vary by this share at least.
const SPREAD_LEAST: f64 = 0.02;

/// The middle of some numbers; absent of none.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut v = values.to_vec();
    v.sort_by(f64::total_cmp);
    let half = v.len() / 2;
    let upper = *v.get(half)?;
    Some(if v.len() % 2 == 1 { upper } else { f64::midpoint(upper, *v.get(half - 1)?) })
}

/// How far numbers lie from their middle: their median distance, as a standard deviation would be.
pub fn spread(values: &[f64], middle: f64) -> f64 {
    let distances: Vec<f64> = values.iter().map(|v| (v - middle).abs()).collect();
    median(&distances).unwrap_or(0.0) * 1.4826
}

/// Some operations in a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Block {
    /// When the first of them was issued, host monotonic ns.
    pub at_ns: u64,
    /// Their median transfer time in ns.
    pub median_ns: f64,
}

/// From some moment on it takes longer than was usual.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Change {
    /// Since when, host monotonic ns.
    pub since_ns: u64,
    /// The usual time, in ns.
    pub before_ns: f64,
    /// The time since the change, in ns.
    pub after_ns: f64,
}

impl Change {
    /// How many times as long.
    pub fn ratio(&self) -> f64 {
        self.after_ns / self.before_ns
    }
}

/// Where a block lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Side {
    #[default]
    Usual,
    Slow,
    Fast,
}

/// The trend of one kind of transfer.
#[derive(Debug, Clone, Default)]
pub struct Trend {
    skipped: u32,
    open: Vec<(u64, f64)>,
    blocks: VecDeque<Block>,
    /// The usual time, and how much blocks vary by themselves, in ns.
    usual: Option<(f64, f64)>,
    /// The first blocks, until enough is learned, and how many these were, in all.
    first: Vec<f64>,
    learned: usize,
    /// The last blocks in a row on one side of what is usual.
    row: Vec<Block>,
    side: Side,
    /// Blocks in a row that were not slow.
    calm: usize,
    change: Option<Change>,
    last_ns: u64,
    count: u64,
}

impl Trend {
    /// Takes an operation's transfer time.
    pub fn add(&mut self, at_ns: u64, transfer_ns: f64) {
        self.last_ns = self.last_ns.max(at_ns);
        self.count += 1;
        if self.skipped < WARM_UP {
            self.skipped += 1;
            return;
        }
        self.open.push((at_ns, transfer_ns));
        let first = self.open.iter().map(|(t, _)| *t).min().unwrap_or(at_ns);
        let long = self.open.len() >= BLOCK_LEAST && at_ns.saturating_sub(first) >= BLOCK_NS;
        let enough = if self.usual.is_none() { BLOCK_FIRST } else { BLOCK };
        if self.open.len() < enough && !long {
            return;
        }
        let times: Vec<f64> = self.open.drain(..).map(|(_, t)| t).collect();
        if let Some(median_ns) = median(&times) {
            self.block(Block { at_ns: first, median_ns });
        }
    }

    /// Takes the operations of a sketch, of which no more than their usual time is known: one block, or two of many while too little
    /// is learned.
    pub fn add_alike(&mut self, at_ns: u64, operations: u64, transfer_ns: f64) {
        let are_few = operations < BLOCK_LEAST as u64;
        // The warm-up is half of so many at most, and the lower quartile that a sketch gives is not of it.
        let are_many = operations >= 2 * u64::from(WARM_UP);
        if are_few || self.skipped < WARM_UP && !are_many {
            return (0..operations.min(u64::from(WARM_UP))).for_each(|_| self.add(at_ns, transfer_ns));
        }
        self.last_ns = self.last_ns.max(at_ns);
        self.count += operations;
        self.skipped = WARM_UP;
        // A block of single operations is of one time.
        self.open.clear();
        let blocks = if self.usual.is_none() { (operations / BLOCK_FIRST as u64).clamp(1, 2) } else { 1 };
        (0..blocks).for_each(|_| self.block(Block { at_ns, median_ns: transfer_ns }));
    }

    /// Learns from a block. A few slow ones among those before them change little.
    fn learn(&mut self, median_ns: f64) {
        self.first.push(median_ns);
        self.learned += 1;
        if self.learned >= LEARNED_FIRST {
            let middle = median(&self.first).unwrap_or(median_ns);
            self.usual = Some((middle, spread(&self.first, middle).max(middle * SPREAD_LEAST)));
        }
        if self.learned >= LEARNED {
            self.first = Vec::new();
        }
    }

    fn block(&mut self, b: Block) {
        if self.blocks.len() == KEPT {
            self.blocks.pop_front();
        }
        self.blocks.push_back(b);
        let Some((usual, varies)) = self.usual else { return self.learn(b.median_ns) };
        let slow = b.median_ns > usual * RATIO && b.median_ns > usual + SPREADS * varies;
        // Slow blocks may be a change that begins: they say what is usual only where others follow.
        if !slow && self.learned < LEARNED && self.change.is_none() {
            let slow_ones = self.row.iter().filter(|_| self.side == Side::Slow).map(|b| b.median_ns);
            let learned: Vec<f64> = slow_ones.chain([b.median_ns]).collect();
            learned.into_iter().for_each(|ns| self.learn(ns));
        }
        let fast = b.median_ns * RATIO < usual && b.median_ns + SPREADS * varies < usual;
        let side = if slow {
            Side::Slow
        } else if fast {
            Side::Fast
        } else {
            Side::Usual
        };
        // As soon as it is not slow any more, slower or faster than usual by chance makes no difference.
        self.calm = if slow { 0 } else { self.calm + 1 };
        if side != self.side {
            self.row.clear();
            self.side = side;
        }
        if self.row.len() < LEARNED {
            self.row.push(b);
        }
        let medians: Vec<f64> = self.row.iter().map(|b| b.median_ns).collect();
        let lasts = self.row.first().is_some_and(|b| self.last_ns.saturating_sub(b.at_ns) >= BLOCK_NS);
        let row = if lasts { ROW_LONG } else { ROW };
        match (side, self.row.first(), median(&medians)) {
            (Side::Slow, Some(first), Some(after_ns)) if self.row.len() >= row && self.change.is_none() => {
                self.change = Some(Change { since_ns: first.at_ns, before_ns: usual, after_ns });
            }
            // The trend learned no good time, or too little before all became slow for long: it learns again.
            (Side::Fast | Side::Slow, ..)
                if self.row.len() >= LEARNED && (side == Side::Fast || !self.is_sure()) =>
            {
                let (last_ns, count) = (self.last_ns, self.count);
                *self = Trend { skipped: WARM_UP, last_ns, count, ..Trend::default() };
            }
            _ if self.calm >= ROW => self.change = None,
            _ => {}
        }
    }

    /// True where enough blocks were alike to say what is usual: a job may be fast for a moment while it gets going.
    fn is_sure(&self) -> bool {
        let Some((usual, _)) = self.usual else { return false };
        self.learned >= LEARNED
            || self.first.iter().filter(|ns| **ns <= usual * RATIO).count() >= LEARNED_FIRST
    }

    /// The change, as long as it lasts.
    pub fn change(&self) -> Option<Change> {
        self.change
    }

    /// The time now: the median of the last blocks, where there are enough; and when the first of them began.
    pub fn now(&self) -> Option<Block> {
        let last: Vec<Block> = self.blocks.iter().rev().take(ROW).copied().collect();
        let medians: Vec<f64> = last.iter().map(|b| b.median_ns).collect();
        let first = last.last().filter(|_| last.len() == ROW)?;
        Some(Block { at_ns: first.at_ns, median_ns: median(&medians)? })
    }

    /// The least that one of the last blocks took: what is above this now was so for a while.
    pub fn least_now_ns(&self) -> Option<f64> {
        self.now()?;
        self.blocks.iter().rev().take(ROW).map(|b| b.median_ns).reduce(f64::min)
    }

    /// How many operations it was told.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// When the last operation was issued, host monotonic ns.
    pub fn last_ns(&self) -> u64 {
        self.last_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// Feeds `n` operations, a millisecond apart, of `ns` varied by up to `noise`, from `at` on.
    fn feed(t: &mut Trend, at: &mut u64, n: u32, ns: f64, noise: f64) {
        for i in 0..n {
            *at += MS;
            // A sequence that looks like noise and is the same each time.
            let unit = f64::from(i.wrapping_mul(2_654_435_761) >> 16) / 65536.0 - 0.5;
            t.add(*at, ns * (1.0 + noise * unit * 2.0));
        }
    }

    #[test]
    fn a_lasting_slowdown_is_told_with_its_beginning_and_its_ratio() {
        let (mut t, mut at) = (Trend::default(), 0);
        feed(&mut t, &mut at, 400, 100_000.0, 0.1);
        assert_eq!(t.change(), None);
        let began = at;
        feed(&mut t, &mut at, 200, 170_000.0, 0.1);
        let c = t.change().expect("a change");
        assert!((c.ratio() - 1.7).abs() < 0.1, "{c:?}");
        assert!(c.since_ns.abs_diff(began) <= 20 * MS, "{} {began}", c.since_ns);
        feed(&mut t, &mut at, 200, 100_000.0, 0.1);
        assert_eq!(t.change(), None, "it is over");
    }

    #[test]
    fn a_job_that_was_fast_for_a_moment_is_not_slow_for_ever() {
        let (mut t, mut at) = (Trend::default(), 0);
        // Of the first three blocks two are fast.
        feed(&mut t, &mut at, WARM_UP + 16, 100_000.0, 0.0);
        feed(&mut t, &mut at, 400, 200_000.0, 0.0);
        assert_eq!(t.change(), None, "too little was learned");
        // A later change is told.
        feed(&mut t, &mut at, 200, 400_000.0, 0.0);
        assert!(t.change().is_some_and(|c| (c.ratio() - 2.0).abs() < 0.1), "{:?}", t.change());
    }

    #[test]
    fn single_slow_operations_bursts_and_noise_say_nothing() {
        let (mut t, mut at) = (Trend::default(), 0);
        // The first ones make connections.
        feed(&mut t, &mut at, 5, 5_000_000.0, 0.0);
        feed(&mut t, &mut at, 200, 100_000.0, 0.3);
        for _ in 0..50 {
            feed(&mut t, &mut at, 1, 900_000.0, 0.0);
            feed(&mut t, &mut at, 12, 100_000.0, 0.3);
        }
        feed(&mut t, &mut at, 20, 300_000.0, 0.1);
        feed(&mut t, &mut at, 200, 100_000.0, 0.3);
        assert_eq!(t.change(), None);
        // Where blocks vary by themselves, more is needed.
        let (mut t, mut at) = (Trend::default(), 0);
        for _ in 0..10 {
            feed(&mut t, &mut at, 16, 100_000.0, 0.1);
            feed(&mut t, &mut at, 16, 160_000.0, 0.1);
        }
        assert_eq!(t.change(), None);
    }

    #[test]
    fn fast_blocks_and_a_slow_one_are_no_slowdown() {
        for sides in
            [&[60.0, 60.0, 140.0][..], &[60.0, 140.0, 140.0], &[60.0, 60.0, 60.0, 60.0, 140.0, 140.0]]
        {
            let (mut t, mut at) = (Trend::default(), 0);
            feed(&mut t, &mut at, 8 + 16 * 8, 100.0, 0.0);
            for ns in sides {
                feed(&mut t, &mut at, 16, *ns, 0.0);
                assert_eq!(t.change(), None, "{sides:?}");
            }
        }
    }

    #[test]
    fn what_was_learned_in_a_bad_time_is_learned_again() {
        let (mut t, mut at) = (Trend::default(), 0);
        feed(&mut t, &mut at, 300, 300_000.0, 0.1);
        feed(&mut t, &mut at, 600, 100_000.0, 0.1);
        assert!((t.usual.expect("learned").0 / 100_000.0 - 1.0).abs() < 0.1);
        feed(&mut t, &mut at, 100, 200_000.0, 0.1);
        assert!(t.change().is_some());
    }

    #[test]
    fn few_and_seldom_operations_make_blocks_as_well() {
        let mut t = Trend::default();
        for i in 0..13u64 {
            t.add(i * 3_000_000_000, 1e6);
        }
        assert_eq!(t.blocks.len(), 1);
        assert_eq!((t.now(), t.least_now_ns()), (None, None), "one block says nothing yet");
    }

    #[test]
    fn a_slow_job_teaches_in_seconds_what_is_usual() {
        let mut t = Trend::default();
        // Eight a second: five seconds as usual, then slow.
        for i in 0..80u64 {
            t.add(i * 125 * MS, if i < 40 { 1e6 } else { 2.5e6 });
            assert_eq!(t.change().is_some(), i >= 47, "{i}");
        }
        assert!((t.change().expect("a change").ratio() - 2.5).abs() < 0.1);
    }

    #[test]
    fn medians_and_spreads() {
        assert_eq!(
            (median(&[]), median(&[3.0, 1.0, 2.0]), median(&[4.0, 1.0])),
            (None, Some(2.0), Some(2.5))
        );
        assert!((spread(&[1.0, 2.0, 3.0, 100.0, 2.0], 2.0) - 1.4826).abs() < 1e-9);
    }
}
