//! The sequence of calls that a process repeats.
//!
//! Equal calls in a row are a run, and a run of a certain length that comes once in each repetition is its anchor. Every run is tried:
//! between two anchors there has to be the same sequence nearly always. Sequences are compared up to one factor for each kind of
//! call, since steps with more tokens move more bytes. Calls that are rare and move next to nothing are overlooked: a flag by which
//! all ranks go on, the average of a loss every ten steps.

use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};

/// Repetitions without which nothing is a pattern.
const REPETITIONS_MIN: usize = 4;
/// The share of calls, and of bytes, in equal sequences.
const EQUAL_MIN: f64 = 0.95;
/// The share of the calls that the sequences cover: others are of another phase.
const COVERED_MIN: f64 = 0.6;
/// Calls are overlooked that together move at most so great a share of the bytes.
const NEGLIGIBLE_BYTES: f64 = 0.001;
/// Runs that are looked at for all anchors together.
const VISITS_MAX: usize = 1 << 20;

/// A call, as it is compared with others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Symbol {
    /// Communicator, lane and function, as a number.
    pub(super) kind: u32,
    /// NCCL's count.
    pub(super) count: u64,
    pub(super) bytes: u64,
    /// Replays of a graph in a row. A process replays graphs as often as its input wants it: they are one call.
    pub(super) is_replay: bool,
}

/// A run by which repetitions are told apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Anchor {
    kind: u32,
    calls: usize,
    /// NCCL's count; absent where runs with any count are anchors.
    count: Option<u64>,
}

/// A sequence that repeats.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Pattern {
    pub(super) anchor: Anchor,
    /// Calls in it without those that are overlooked.
    pub(super) calls: usize,
    /// Where repetitions begin, as places in the calls; the last one may be incomplete.
    pub(super) begins: Vec<usize>,
    /// Rare calls that move next to nothing.
    pub(super) overlooked: HashSet<Symbol>,
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
    fn anchor(&self, is_exact: bool) -> Anchor {
        let count = Some(self.symbol.count).filter(|_| is_exact && !self.symbol.is_replay);
        Anchor { kind: self.symbol.kind, calls: self.calls, count }
    }

    fn bytes(&self) -> u64 {
        self.symbol.bytes.saturating_mul(self.calls as u64)
    }
}

fn runs(calls: &[Symbol]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (first, symbol) in calls.iter().enumerate() {
        match runs.last_mut().filter(|run| run.symbol == *symbol) {
            Some(run) => run.calls += 1,
            None => runs.push(Run { symbol: *symbol, calls: 1, first }),
        }
    }
    runs
}

/// Runs and bytes of each call.
struct Totals {
    of: HashMap<Symbol, (usize, u64)>,
    bytes: f64,
}

impl Totals {
    fn of(runs: &[Run]) -> Self {
        let mut of: HashMap<Symbol, (usize, u64)> = HashMap::new();
        for run in runs {
            let total = of.entry(run.symbol).or_default();
            *total = (total.0 + 1, total.1.saturating_add(run.bytes()));
        }
        let bytes = of.values().map(|(_, bytes)| *bytes as f64).sum();
        Totals { of, bytes }
    }

    /// The calls that are overlooked where an anchor comes so often.
    fn overlooked(&self, times: usize) -> HashSet<Symbol> {
        let is_rare = |(runs, bytes): &(usize, u64)| {
            runs * 2 <= times && *bytes as f64 <= NEGLIGIBLE_BYTES * self.bytes
        };
        self.of.iter().filter(|(_, total)| is_rare(total)).map(|(symbol, _)| *symbol).collect()
    }
}

/// Finds the shortest sequence that these calls repeat; absent where they repeat none. Where a known run still begins repetitions of as many
/// calls, it goes on to do so: other runs of the same sequence could as well.
pub(super) fn learn(calls: &[Symbol], known: Option<(Anchor, usize)>) -> Option<Pattern> {
    let all = runs(calls);
    // The first and the last run may be longer than what is seen of them.
    let runs = all.get(1..all.len().saturating_sub(1)).filter(|r| r.len() > REPETITIONS_MIN)?;
    let totals = Totals::of(runs);
    let mut candidates: Vec<(usize, Anchor, Vec<usize>)> = Vec::new();
    for is_exact in [false, true] {
        let mut places: HashMap<Anchor, Vec<usize>> = HashMap::new();
        for (at, run) in runs.iter().enumerate() {
            places.entry(run.anchor(is_exact)).or_default().push(at);
        }
        for (anchor, at) in places.into_iter().filter(|(_, at)| at.len() > REPETITIONS_MIN) {
            let ends = at.first().zip(at.last());
            let covered = ends.map_or(0, |(first, last)| runs[*last].first - runs[*first].first);
            if covered as f64 >= COVERED_MIN * calls.len() as f64 {
                candidates.push((covered / (at.len() - 1), anchor, at));
            }
        }
    }
    let is_known = |anchor: &Anchor| known.is_some_and(|(a, _)| a == *anchor);
    // The known one first, and then the shortest sequences.
    candidates
        .sort_unstable_by_key(|(mean, anchor, at)| (!is_known(anchor), *mean, at.first().copied(), *anchor));
    let mut visits = 0_usize;
    for (_, anchor, at) in candidates {
        visits += runs.len();
        if visits > VISITS_MAX {
            return None;
        }
        let overlooked = totals.overlooked(at.len());
        let length = repeated(runs, &at, &overlooked);
        if is_known(&anchor) && length != known.map(|(_, calls)| calls) {
            continue;
        }
        if let Some(length) = length {
            let mut begins: Vec<usize> = at.iter().map(|at| runs[*at].first).collect();
            // A run that is not over yet may begin a step as well.
            let is_begun =
                |run: &&Run| Anchor { calls: anchor.calls, ..run.anchor(anchor.count.is_some()) } == anchor;
            let last = all.last().filter(is_begun).filter(|run| run.calls <= anchor.calls);
            begins.extend(last.map(|run| run.first));
            return Some(Pattern { anchor, calls: length, begins, overlooked });
        }
    }
    None
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

/// The number of calls of the sequence that is nearly always between these runs.
fn repeated(runs: &[Run], anchors: &[usize], overlooked: &HashSet<Symbol>) -> Option<usize> {
    let mut sequences: HashMap<u64, Equal> = HashMap::new();
    let (mut calls, mut bytes) = (0, 0_u64);
    let mut counts: HashMap<u64, usize> = HashMap::new();
    for (from, to) in anchors.iter().zip(anchors.iter().skip(1)) {
        let anchor = runs[*from];
        let others = runs[*from + 1..*to].iter().filter(|run| !overlooked.contains(&run.symbol));
        let own: Vec<Run> = std::iter::once(&anchor).chain(others).copied().collect();
        let length: usize = own.iter().map(|r| r.calls).sum();
        let moved = own.iter().map(Run::bytes).fold(0_u64, u64::saturating_add);
        (calls, bytes) = (calls + length, bytes.saturating_add(moved));
        let equal = sequences.entry(signature(&own)).or_default();
        equal.times += 1;
        equal.calls = length;
        equal.bytes = equal.bytes.saturating_add(moved);
        equal.is_single = own.len() == 1;
        *counts.entry(anchor.symbol.count).or_default() += 1;
    }
    let most = sequences.values().max_by_key(|e| (e.times * e.calls, e.calls))?;
    let share = |part: f64, of: f64| of <= 0.0 || part >= EQUAL_MIN * of;
    let is_equal =
        share((most.times * most.calls) as f64, calls as f64) && share(most.bytes as f64, bytes as f64);
    // A benchmark calls one function so and so often with each size, and then never again with this one.
    let sizes_recur = || counts.values().filter(|n| **n > 1).count() * 2 > counts.len();
    let is_sequence = !most.is_single || most.calls > 1 && counts.len() > 1 && sizes_recur();
    (is_sequence && is_equal && most.times >= REPETITIONS_MIN).then_some(most.calls)
}

/// A hash of a sequence. Counts are compared with the first one of their kind.
fn signature(runs: &[Run]) -> u64 {
    let mut firsts: HashMap<u32, u64> = HashMap::new();
    let mut hash = DefaultHasher::new();
    for run in runs {
        let first = *firsts.entry(run.symbol.kind).or_insert(run.symbol.count);
        (run.symbol.kind, run.calls).hash(&mut hash);
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
        learn(&calls(text), None).map(|p| p.calls)
    }

    #[test]
    fn a_step_is_the_shortest_sequence_that_repeats() {
        // Gradients in buckets of two sizes.
        assert_eq!(length(&"a9a8a9a9a8a8a3".repeat(20)), Some(7));
        // Layers that gather their parameters, and again backward, between the gradients.
        assert_eq!(length(&"aaaaabababab".repeat(20)), Some(12));
        let layers = "a".repeat(100) + &"ba".repeat(99) + "b";
        assert_eq!(length(&layers.repeat(12)), Some(299));
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
        // Prompts of several lengths, and replays of the graph for the tokens to come.
        let cycle: String = sizes.iter().map(|n| step(n) + "g").collect();
        assert_eq!(length(&cycle.repeat(8)), Some(17));
    }

    #[test]
    fn no_step_is_invented() {
        assert_eq!(length(&"a9".repeat(4_000)), None, "one call again and again");
        let sweep: String = (10..60).map(|n| format!("a{n}").repeat(25)).collect();
        assert_eq!(length(&sweep), None, "a benchmark's sizes");
        let mut state = 1_u64;
        let mut random = |n: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) as usize % n
        };
        let text: String = (0..4_000).map(|_| ["a", "b", "a3", "s", "r"][random(5)]).collect();
        assert_eq!(length(&text), None, "no order");
        let sizes: String = (0..3_000).map(|_| format!("a{}", 1 + random(900))).collect();
        assert_eq!(length(&format!("b999999999b999999998{sizes}")), None, "weights, and then any sizes");
        assert_eq!(length(""), None);
    }

    #[test]
    fn an_older_phase_does_not_count() {
        let pattern = learn(&calls(&("aab".repeat(100) + &"a9a8a9a8a3".repeat(400))), None).unwrap();
        assert_eq!(pattern.calls, 5);
        assert!(pattern.begins[0] >= 300, "{:?}", &pattern.begins[..2]);
    }
}
