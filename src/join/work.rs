//! How long a process works between operations, beside what that usually takes.
//!
//! A GPU that becomes slow computes longer between its operations. Where it is a stage of a pipeline with others that are
//! as slow, no rank of the stage waits for another one, and those of other stages wait for bubbles as well. The time between
//! two operations shows it in any case. It is measured from the end of one operation to the start of the next one that the
//! process issued, whatever their communicators, where both are timed. Times are compared where the same operations
//! came before.

use super::trend::median;
use crate::model::{Call, CallKind, CommId, Func, Launch, SegmentId, Track, WorkSecond, WorkState};
use std::collections::{BTreeMap, VecDeque};

/// Operations before a span of work that have to be the same for two spans to be compared.
const BEFORE: usize = 3;
/// Operations that may be over before one that was issued earlier: the oldest of more is taken for lost.
const WAITING: usize = 128;
/// Kinds of spans that are learned of a process.
const KINDS: usize = 32;
/// Tickets of different rings of a process are so far from each other, and do not compare.
const FAR: u64 = 1 << 40;
/// Spans of a kind before it is learned, and from which is learned what is usual.
const WARM_UP: u8 = 2;
const LEARNED: usize = 6;
/// A longer span counts as so many usual ones: a checkpoint is no work.
const MOST: f32 = 4.0;
/// Seconds that are kept.
const SECONDS: usize = 16;
const SECOND_NS: u64 = 1_000_000_000;
/// Seconds until nothing is added to one any more.
const LAG: u64 = 3;
/// Seconds that an agent may be ahead of the observer.
const AHEAD: u64 = 2;
/// Seconds after which an agent that tells no more is not waited for.
const SILENT: u64 = 8;

/// An operation that is over, as one process was in it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Passed {
    pub(super) segment: SegmentId,
    /// The place among all operations of the process.
    pub(super) ticket: u64,
    /// The same number for the same operation of another step.
    pub(super) what: u64,
    pub(super) comm: CommId,
    pub(super) track: Track,
    pub(super) order: u64,
    pub(super) func: Func,
    pub(super) launch: Launch,
    /// When its kernel started and ended, host monotonic ns; absent where that is not known.
    pub(super) kernel: Option<(u64, u64)>,
    /// When NCCL reports that it ended, host monotonic ns.
    pub(super) reported_end_ns: u64,
}

/// A span of work, and the time that passed since the operation before it started, both in ns.
#[derive(Debug, Clone, Copy, Default)]
struct Span {
    took_ns: f32,
    step_ns: f32,
}

/// The statistics of one kind of span.
#[derive(Debug, Clone, Copy, Default)]
struct Kind {
    skipped: u8,
    /// The first ones, until there are enough.
    first: [Span; LEARNED],
    learned: u8,
}

impl Kind {
    /// Takes a span. Returns true once what is usual is known.
    fn add(&mut self, span: Span) -> bool {
        if self.skipped < WARM_UP {
            self.skipped += 1;
            return false;
        }
        let Some(free) = self.first.get_mut(usize::from(self.learned)) else { return true };
        *free = span;
        self.learned += 1;
        false
    }

    /// The usual value, and by how much that may be wrong, as a standard deviation.
    fn usual(&self, of: fn(&Span) -> f32) -> (f32, f32) {
        let all: Vec<f64> = self.first.iter().map(|s| f64::from(of(s))).collect();
        let most = median(&all).unwrap_or(0.0) as f32 * MOST;
        let n = LEARNED as f32;
        let first = || self.first.iter().map(|s| of(s).min(most));
        let mean = first().sum::<f32>() / n;
        let squares = first().map(|v| (v - mean).powi(2)).sum::<f32>();
        (mean, (squares / (n - 1.0) / n).sqrt())
    }
}

/// The work of one process.
#[derive(Debug, Clone, Default)]
pub struct Work {
    /// Operations that are over before one that was issued earlier.
    waiting: BTreeMap<u64, Passed>,
    /// The ticket that comes next.
    next: u64,
    /// The last operations, the newest one last.
    before: [u64; BEFORE],
    /// The last operation, and when the last launch started and ended of those that are timed.
    last: Option<Passed>,
    started_ns: u64,
    ended_ns: u64,
    /// One end was reported for all transfers of the last launch, which may be that of any of them.
    is_one_end: bool,
    kinds: BTreeMap<(u64, u64), Kind>,
    seconds: VecDeque<WorkSecond>,
    /// The operation before which the newest long span was.
    long: Option<Call>,
    /// Up to this second it is told of by its agent, which has all records.
    told_until: u64,
}

impl Work {
    /// Takes what its agent told. What was learned here is of the few records that came.
    pub(super) fn told(&mut self, state: &WorkState, now_ns: u64) {
        // A span counts as a few at most; the sums are rounded.
        let is_within = |ns: f32, usual_ns: f32| ns <= usual_ns * MOST * 1.01;
        let can_be = |s: &&WorkSecond| {
            s.second <= now_ns / SECOND_NS + AHEAD
                && is_within(s.took_ns, s.usual_ns)
                && is_within(s.step_ns, s.usual_step_ns)
        };
        let told: Vec<&WorkSecond> = state.seconds.iter().filter(can_be).collect();
        if told.is_empty() {
            return;
        }
        if self.told_until == 0 {
            self.seconds.clear();
        }
        self.long = state.long.or(self.long);
        for s in told {
            if self.seconds.back().is_none_or(|last| last.second < s.second) {
                self.add(*s);
                self.told_until = s.second;
            }
        }
    }

    /// The message of its agent about the seconds from one on that are over.
    pub(crate) fn state(&self, segment: SegmentId, from: u64, now_ns: u64) -> WorkState {
        let over = now_ns / SECOND_NS;
        let is_new = |s: &&WorkSecond| s.second >= from && s.second + LAG <= over;
        WorkState { segment, seconds: self.seconds.iter().filter(is_new).copied().collect(), long: self.long }
    }

    fn add(&mut self, second: WorkSecond) {
        if self.seconds.len() == SECONDS {
            self.seconds.pop_front();
        }
        self.seconds.push_back(second);
    }

    /// Takes an operation that is over.
    pub(super) fn take(&mut self, passed: Passed) {
        let is_told = |(start_ns, _)| start_ns / SECOND_NS < self.told_until + SILENT;
        if self.told_until > 0 && passed.kernel.is_some_and(is_told) {
            return;
        }
        // What is not timed is in other rings, and what is timed comes in runs: nothing is known of the work between.
        if passed.ticket.abs_diff(self.next) >= FAR {
            (self.before, self.last) = ([0; BEFORE], None);
            if passed.kernel.is_some() {
                self.waiting.clear();
                self.follow(passed);
            }
            return;
        }
        if passed.ticket < self.next {
            return;
        }
        if passed.ticket == self.next {
            self.follow(passed);
        } else {
            self.waiting.insert(passed.ticket, passed);
            if self.waiting.len() > WAITING
                && let Some((_, oldest)) = self.waiting.pop_first()
            {
                // Those before it were lost.
                (self.before, self.last) = ([0; BEFORE], None);
                self.follow(oldest);
            }
        }
        while let Some(next) = self.waiting.remove(&self.next) {
            self.follow(next);
        }
    }

    /// The work of the last seconds in which something was learned, the oldest one first.
    pub fn seconds(&self) -> impl Iterator<Item = &WorkSecond> {
        self.seconds.iter()
    }

    /// The operation before which the newest span was that was longer than usual.
    pub fn long(&self) -> Option<Call> {
        self.long
    }

    /// Takes the operation that was issued next.
    fn follow(&mut self, passed: Passed) {
        self.next = passed.ticket.saturating_add(1);
        let is_of_launch = self.last.is_some_and(|l| l.launch.shared_with(passed.launch));
        let is_behind = self.last.is_some_and(|l| l.kernel.is_some()) && !is_of_launch && !self.is_one_end;
        self.is_one_end =
            is_of_launch && self.last.is_some_and(|l| l.reported_end_ns == passed.reported_end_ns);
        if let Some((start_ns, _)) = passed.kernel.filter(|k| is_behind && k.0 > self.ended_ns) {
            self.note(&passed, start_ns);
        }
        self.before.rotate_left(1);
        self.before[BEFORE - 1] = passed.what;
        if let Some((start_ns, end_ns)) = passed.kernel {
            self.ended_ns = self.ended_ns.max(end_ns);
            self.started_ns = if is_of_launch { self.started_ns.min(start_ns) } else { start_ns };
        }
        self.last = Some(passed);
    }

    /// Takes a span of work before an operation.
    fn note(&mut self, passed: &Passed, start_ns: u64) {
        let what = passed.what;
        let since = |ns: u64| start_ns.saturating_sub(ns) as f32;
        let span = Span { took_ns: since(self.ended_ns), step_ns: since(self.started_ns) };
        let before = self.before.iter().fold(0u64, |hash, w| hash.rotate_left(17) ^ w);
        if self.kinds.len() >= KINDS && !self.kinds.contains_key(&(before, what)) {
            return;
        }
        let kind = self.kinds.entry((before, what)).or_default();
        if !kind.add(span) {
            return;
        }
        let ((usual_ns, error_ns), (usual_step_ns, _)) =
            (kind.usual(|s| s.took_ns), kind.usual(|s| s.step_ns));
        if span.took_ns > usual_ns + error_ns {
            let kind = CallKind { comm: passed.comm, track: passed.track, func: passed.func };
            self.long = Some(Call { kind, order: passed.order, issued_ns: start_ns });
        }
        let second = start_ns / SECOND_NS;
        if self.seconds.back().is_none_or(|s| s.second < second) {
            self.add(WorkSecond { second, ..WorkSecond::default() });
        }
        if let Some(s) = self.seconds.back_mut() {
            s.took_ns += span.took_ns.min(usual_ns * MOST);
            s.usual_ns += usual_ns;
            s.error_ns += error_ns;
            s.step_ns += span.step_ns.min(usual_step_ns * MOST);
            s.usual_step_ns += usual_step_ns;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// Two operations a step: each starts some ms after the end of the one before it and takes 5 ms, and more where the
    /// process waits in it.
    struct Steps {
        work: Work,
        ticket: u64,
        at_ns: u64,
    }

    impl Steps {
        fn new() -> Self {
            Steps { work: Work::default(), ticket: 0, at_ns: 0 }
        }

        fn next(&mut self, work_ms: u64, waits_ms: u64) -> Passed {
            let start_ns = self.at_ns + work_ms * MS;
            self.at_ns = start_ns + (5 + waits_ms) * MS;
            self.ticket += 1;
            Passed {
                segment: SegmentId(1),
                ticket: self.ticket - 1,
                what: (self.ticket - 1) % 2,
                comm: CommId::unowned(7),
                track: Track::Collective,
                order: self.ticket - 1,
                func: Func::AllReduce,
                launch: Launch::default(),
                kernel: Some((start_ns, self.at_ns)),
                reported_end_ns: self.at_ns,
            }
        }

        fn many(&mut self, n: u32, work_ms: u64, waits_ms: u64) {
            for _ in 0..n {
                let passed = self.next(work_ms, waits_ms);
                self.work.take(passed);
            }
        }

        /// How many times as long as usual its work and its steps take in all that was learned.
        fn factors(&self) -> (f32, f32) {
            let sum = |of: fn(&WorkSecond) -> f32| self.work.seconds().map(of).sum::<f32>();
            (sum(|s| s.took_ns) / sum(|s| s.usual_ns), sum(|s| s.step_ns) / sum(|s| s.usual_step_ns))
        }
    }

    #[test]
    fn work_is_held_against_what_it_used_to_take() {
        let mut steps = Steps::new();
        steps.many(40, 20, 0);
        let (work, step) = steps.factors();
        assert!((work - 1.0).abs() < 0.01 && (step - 1.0).abs() < 0.01, "{work} {step}");
        let mut slow = Steps::new();
        slow.many(20, 20, 0);
        slow.many(2_000, 30, 0);
        let (work, step) = slow.factors();
        assert!((work - 1.5).abs() < 0.01 && (step - 1.4).abs() < 0.01, "{work} {step}");
        assert_eq!(slow.work.seconds().count(), SECONDS);
    }

    #[test]
    fn waiting_in_an_operation_is_no_work() {
        let mut steps = Steps::new();
        steps.many(20, 20, 0);
        steps.many(200, 20, 40);
        let (work, step) = steps.factors();
        assert!((work - 1.0).abs() < 0.01 && step > 2.0, "{work} {step}");
    }

    #[test]
    fn a_single_long_span_counts_as_a_few() {
        let mut steps = Steps::new();
        steps.many(20, 20, 0);
        steps.many(1, 10_000, 0);
        assert!(steps.work.seconds().all(|s| s.took_ns <= s.usual_ns * MOST), "{:?}", steps.work);
    }

    #[test]
    fn what_its_agent_tells_replaces_what_a_sample_teaches() {
        let mut whole = Steps::new();
        whole.many(200, 20, 0);
        let now_ns = whole.at_ns;
        let told = whole.work.state(SegmentId(1), 0, now_ns);
        assert!(told.seconds.iter().all(|s| s.second + LAG <= now_ns / SECOND_NS), "seconds that are over");
        let mut here = Steps::new();
        here.many(20, 20, 0);
        here.many(100, 60, 0);
        here.work.told(&told, now_ns);
        assert!(here.work.seconds().eq(&told.seconds));
        // A few operations that come late teach nothing more; the same seconds count once.
        here.at_ns = now_ns;
        here.many(10, 60, 0);
        here.work.told(&told, now_ns);
        assert!(here.work.seconds().eq(&told.seconds));
        let more = whole.work.state(SegmentId(1), told.seconds[1].second, now_ns);
        assert_eq!(more.seconds, told.seconds[1..]);
        let first = told.seconds[0];
        let newer = told.seconds.last().expect("some").second + 1;
        for wrong in [
            WorkSecond { second: 1_000, ..first },
            WorkSecond { second: newer, took_ns: first.usual_ns * 5.0, ..first },
            WorkSecond { second: newer, step_ns: first.usual_step_ns * 5.0, ..first },
        ] {
            here.work.told(&WorkState { seconds: vec![wrong], ..told.clone() }, now_ns);
            assert!(here.work.seconds().eq(&told.seconds), "{wrong:?} cannot be");
        }
        // Of an agent that went away nothing more comes.
        here.at_ns = now_ns + 20 * SECOND_NS;
        here.many(200, 60, 0);
        assert_ne!(here.work.seconds().last(), told.seconds.last());
    }

    #[test]
    fn operations_are_taken_in_the_order_of_their_calls() {
        let (mut one, mut other) = (Steps::new(), Steps::new());
        let all: Vec<Passed> = (0..60).map(|_| one.next(20, 0)).collect();
        all.iter().for_each(|p| one.work.take(*p));
        all.chunks(3).for_each(|p| p.iter().rev().for_each(|p| other.work.take(*p)));
        assert!(one.work.seconds().next().is_some());
        assert!(one.work.seconds().eq(other.work.seconds()));
    }

    #[test]
    fn spans_behind_an_untimed_operation_are_not_measured() {
        let mut steps = Steps::new();
        for _ in 0..100 {
            steps.many(1, 20, 0);
            let untimed = Passed { kernel: None, ..steps.next(20, 0) };
            steps.work.take(untimed);
        }
        assert_eq!(steps.work.seconds().count(), 0);
    }

    #[test]
    fn a_lost_operation_ends_no_measuring() {
        let mut steps = Steps::new();
        steps.many(5, 20, 0);
        steps.next(20, 0);
        steps.many(2 * WAITING as u32, 20, 0);
        assert!(steps.work.waiting.len() <= WAITING);
        assert!(steps.work.seconds().next().is_some());
    }

    #[test]
    fn untimed_operations_of_another_ring_end_no_measuring() {
        let mut steps = Steps::new();
        for n in 0..20 {
            steps.many(10, 20, 0);
            let line = Passed { ticket: (1 << 43) + n, kernel: None, ..steps.next(20, 0) };
            steps.ticket -= 1;
            steps.work.take(line);
            steps.at_ns += 300 * MS;
        }
        let (work, _) = steps.factors();
        assert!((work - 1.0).abs() < 0.01, "the time between two runs is no work: {work}");
    }

    #[test]
    fn a_launch_of_which_one_end_is_reported_begins_no_span() {
        let spans = |is_one_end: bool| {
            let mut steps = Steps::new();
            for n in 0..60 {
                let first = steps.next(20, 0);
                let mut op = crate::join::testing::op(crate::model::Lane::Collective, 0);
                op.plan = Some(n);
                let launch = op.launch();
                let second = steps.next(0, 0);
                let reported_end_ns = if is_one_end { first.reported_end_ns } else { second.reported_end_ns };
                steps.work.take(Passed { launch, ..first });
                steps.work.take(Passed { launch, reported_end_ns, ..second });
            }
            steps.work.seconds().count()
        };
        assert!(spans(false) > 0);
        assert_eq!(spans(true), 0);
    }
}
