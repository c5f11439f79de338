//! The sequence of calls that a process repeats.
//!
//! Equal calls in a row are a run, and a run of a certain length that comes once in each repetition is its anchor. Every run is tried:
//! between two anchors there has to be the same sequence nearly always. Sequences are compared up to one factor for each kind of
//! call, since steps with more tokens move more bytes. Calls that are rare and move next to nothing are overlooked: a flag that
//! tells all ranks to go on, the average of a loss every ten steps.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

/// Repetitions without which nothing is a pattern.
const REPETITIONS_MIN: usize = 4;
/// The share of calls, and of bytes, that lies in equal sequences.
const EQUAL_MIN: f64 = 0.95;
/// The share of the calls that the sequences cover: older calls are of another phase.
const COVERED_MIN: f64 = 0.6;
/// Calls are overlooked that together move at most so great a share of the bytes.
const NEGLIGIBLE_BYTES: f64 = 0.001;

/// A call, as one is compared with others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Symbol {
    /// Communicator, lane and function, as a number.
    pub(super) kind: u32,
    /// NCCL's count.
    pub(super) count: u64,
    pub(super) bytes: u64,
    /// A replay of a graph. A process replays graphs as often as its input wants it: any number in a row is one run.
    pub(super) is_replay: bool,
}

impl Symbol {
    /// True where a call continues a run.
    pub(super) fn continues(&self, last: &Symbol) -> bool {
        self == last || self.is_replay && last.is_replay
    }
}

/// A run by which repetitions are told apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Anchor {
    kind: u32,
    /// Calls in the run; 0 for replays.
    calls: usize,
    /// NCCL's count; absent where runs with any count are anchors.
    count: Option<u64>,
}

/// A sequence that repeats.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Pattern {
    anchor: Anchor,
    /// Calls in it without those that are overlooked; replays in a row are one.
    pub(super) calls: usize,
}

impl Pattern {
    /// True where a run of so many equal calls begins a repetition.
    pub(super) fn begins(&self, symbol: &Symbol, calls: usize) -> bool {
        let run = Run { symbol: *symbol, calls, first: 0 };
        self.anchor == run.anchor(self.anchor.count.is_some())
    }
}

/// Equal calls in a row.
#[derive(Debug, Clone, Copy)]
struct Run {
    symbol: Symbol,
    calls: usize,
    /// The first of its calls among all.
    first: usize,
}

impl Run {
    fn length(&self) -> usize {
        if self.symbol.is_replay { 0 } else { self.calls }
    }

    fn anchor(&self, is_exact: bool) -> Anchor {
        let count = Some(self.symbol.count).filter(|_| is_exact && !self.symbol.is_replay);
        Anchor { kind: self.symbol.kind, calls: self.length(), count }
    }
}

fn runs(calls: &[Symbol]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (first, symbol) in calls.iter().enumerate() {
        match runs.last_mut().filter(|run| symbol.continues(&run.symbol)) {
            Some(run) => run.calls += 1,
            None => runs.push(Run { symbol: *symbol, calls: 1, first }),
        }
    }
    runs
}

/// A candidate: between its anchors lie equal sequences.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    anchor: Anchor,
    calls: usize,
    /// Where its first repetition begins.
    first: usize,
}

/// Finds the shortest sequence that these calls repeat; absent where they repeat none.
pub(super) fn learn(calls: &[Symbol]) -> Option<Pattern> {
    let mut runs = runs(calls);
    // The first and the last run may be longer than what is seen of them.
    runs.pop();
    if runs.len() <= REPETITIONS_MIN {
        return None;
    }
    runs.remove(0);
    // Runs and bytes of each.
    let mut totals: HashMap<Symbol, (usize, u64)> = HashMap::new();
    for run in &runs {
        let total = totals.entry(run.symbol).or_default();
        total.0 += 1;
        total.1 = total.1.saturating_add(run.symbol.bytes.saturating_mul(run.calls as u64));
    }
    let bytes: f64 = totals.values().map(|(_, bytes)| *bytes as f64).sum();
    let is_small = |s: &Symbol| totals.get(s).is_some_and(|t| t.1 as f64 <= NEGLIGIBLE_BYTES * bytes);
    let is_rare = |s: &Symbol, times: usize| totals.get(s).is_some_and(|t| t.0 * 2 <= times);
    let mut best: Option<Candidate> = None;
    for is_exact in [false, true] {
        let mut places: HashMap<Anchor, Vec<usize>> = HashMap::new();
        for (at, run) in runs.iter().enumerate() {
            places.entry(run.anchor(is_exact)).or_default().push(at);
        }
        for (anchor, at) in places.into_iter().filter(|(_, at)| at.len() > REPETITIONS_MIN) {
            let kept = |run: &&Run| !(is_rare(&run.symbol, at.len()) && is_small(&run.symbol));
            let Some(first) = at.first().map(|f| runs[*f].first) else { continue };
            let Some(calls) = repeated(calls.len(), &runs, &at, kept) else { continue };
            let found = Candidate { anchor, calls, first };
            let key = |c: &Candidate| (c.calls, c.first, c.anchor);
            if best.is_none_or(|b| key(&found) < key(&b)) {
                best = Some(found);
            }
        }
    }
    best.map(|c| Pattern { anchor: c.anchor, calls: c.calls })
}

/// A sequence between two anchors.
#[derive(Debug, Default, Clone, Copy)]
struct Equal {
    times: usize,
    /// Calls of one.
    calls: usize,
    bytes: u64,
    /// The runs are only one, so that it is nothing but a number of calls.
    is_single: bool,
}

/// The number of calls of the sequence that lies nearly always between these runs.
fn repeated(all: usize, runs: &[Run], anchors: &[usize], kept: impl Fn(&&Run) -> bool) -> Option<usize> {
    let mut sequences: HashMap<u64, Equal> = HashMap::new();
    let (mut calls, mut bytes) = (0, 0_u64);
    let mut counts: HashMap<u64, usize> = HashMap::new();
    for (from, to) in anchors.iter().zip(anchors.iter().skip(1)) {
        let own: Vec<Run> = runs[*from..*to].iter().filter(&kept).copied().collect();
        let length: usize = own.iter().map(|r| r.length().max(1)).sum();
        let moved = own.iter().map(|r| r.symbol.bytes.saturating_mul(r.calls as u64));
        let moved = moved.fold(0_u64, u64::saturating_add);
        (calls, bytes) = (calls + length, bytes.saturating_add(moved));
        let equal = sequences.entry(signature(&own)).or_default();
        equal.times += 1;
        equal.calls = length;
        equal.bytes = equal.bytes.saturating_add(moved);
        equal.is_single = own.len() == 1;
        *counts.entry(runs[*from].symbol.count).or_default() += 1;
    }
    let covered = runs.get(*anchors.last()?)?.first.saturating_sub(runs.get(*anchors.first()?)?.first);
    let most = sequences.values().max_by_key(|e| (e.times * e.calls, e.calls))?;
    let share = |part: f64, of: f64| of <= 0.0 || part >= EQUAL_MIN * of;
    let is_equal =
        share((most.times * most.calls) as f64, calls as f64) && share(most.bytes as f64, bytes as f64);
    // A benchmark calls one function so and so often with each size, and then never again with this one.
    let sizes_recur = || counts.values().filter(|n| **n > 1).count() * 2 > counts.len();
    let is_sequence = !most.is_single || most.calls > 1 && counts.len() > 1 && sizes_recur();
    let is_whole = covered as f64 >= COVERED_MIN * all as f64;
    (is_sequence && is_equal && is_whole && most.times >= REPETITIONS_MIN).then_some(most.calls)
}

/// A hash of a sequence. Counts are compared with the first one of their kind.
fn signature(runs: &[Run]) -> u64 {
    let mut firsts: HashMap<u32, u64> = HashMap::new();
    let mut hash = DefaultHasher::new();
    for run in runs {
        let first = *firsts.entry(run.symbol.kind).or_insert(run.symbol.count);
        (run.symbol.kind, run.length()).hash(&mut hash);
        if !run.symbol.is_replay {
            ratio(run.symbol.count, first).hash(&mut hash);
        }
    }
    hash.finish()
}

/// The ratio of two counts in its lowest terms; absent where both are 0.
fn ratio(a: u64, b: u64) -> (Option<u64>, Option<u64>) {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    (a.checked_div(x), b.checked_div(x))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Calls of a text: a letter is a kind, and its digits are thousands of bytes.
    fn calls(text: &str) -> Vec<Symbol> {
        let mut calls: Vec<Symbol> = Vec::new();
        for c in text.chars() {
            match c.to_digit(10) {
                Some(digit) => {
                    let last = calls.last_mut().unwrap();
                    last.count =
                        if last.count == 1 { digit.into() } else { last.count * 10 + u64::from(digit) };
                    last.bytes = last.count * 1_000;
                }
                None => calls.push(Symbol {
                    kind: c.into(),
                    count: 1,
                    bytes: if c == 'f' { 4 } else { 1_000 },
                    is_replay: c == 'g',
                }),
            }
        }
        calls
    }

    fn length(text: &str) -> Option<usize> {
        learn(&calls(text)).map(|p| p.calls)
    }

    #[test]
    fn a_step_is_the_shortest_sequence_that_repeats() {
        // Gradients in buckets of two sizes.
        assert_eq!(length(&"a9a8a9a9a8a8a3".repeat(20)), Some(7));
        // Layers that gather their parameters, and again backward, between the gradients.
        assert_eq!(length(&"aaaaabababab".repeat(20)), Some(12));
        // Micro-batches of a pipeline, and the gradients at the end.
        let step = "s".repeat(2) + &"rs".repeat(30) + "rr" + "a99";
        assert_eq!(length(&step.repeat(10)), Some(65));
        assert_eq!(length(&"ab".repeat(3)), None, "too few");
    }

    #[test]
    fn rare_and_small_calls_are_overlooked() {
        let text = "aaaaabababab".repeat(7) + "f";
        assert_eq!(length(&text.repeat(5)), Some(12));
        let evaluated = text.repeat(2) + &"f".repeat(9);
        assert_eq!(length(&evaluated.repeat(6)), Some(12));
    }

    #[test]
    fn steps_with_other_amounts_of_data_are_equal() {
        let sizes = [16, 15, 14, 13, 12];
        let step = |n: &i32| format!("a{n}").repeat(16);
        let cycle: String = sizes.iter().map(step).collect();
        assert_eq!(length(&cycle.repeat(8)), Some(16));
        // Prompts of several lengths, and as many replays of the graph as there are tokens to come.
        let request = |n: &i32| step(n) + &"g".repeat(*n as usize);
        let cycle: String = sizes.iter().map(request).collect();
        assert_eq!(length(&cycle.repeat(8)), Some(17));
    }

    #[test]
    fn no_step_is_invented() {
        assert_eq!(length(&"a9".repeat(4_000)), None, "one call again and again");
        let sweep: String = (10..60).map(|n| format!("a{n}").repeat(25)).collect();
        assert_eq!(length(&sweep), None, "a benchmark's sizes");
        let mut state = 1_u64;
        let random = |_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            ["a", "b", "a3", "s", "r"][(state >> 33) as usize % 5]
        };
        assert_eq!(length(&(0..4_000).map(random).collect::<String>()), None, "no order");
        assert_eq!(length(""), None);
    }

    #[test]
    fn an_older_phase_does_not_count() {
        let text = "aab".repeat(100) + &"a9a8a9a8a3".repeat(400);
        assert_eq!(length(&text), Some(5));
    }
}
