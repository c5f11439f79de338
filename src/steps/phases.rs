//! The steps of one process: how many, how long, and what was longer in the slowest.
//!
//! A pattern is learned from a buffer of calls, and the steps in the same buffer are measured by it. Buffers with the same pattern are
//! one phase. Set-up, training and evaluation are phases of their own.

use super::TimedCall;
use super::pattern::{self, Anchor, Pattern, Symbol};
use super::series::Series;
use crate::model::{CommId, Func, Lane, SlowStep, StepPoint, StepRow};
use sketches_ddsketch::{Config, DDSketch};
use std::collections::{HashMap, VecDeque};

/// Calls from which a pattern is learned. A longer step than a quarter of them is not found.
const BUFFER: usize = 1 << 14;
/// Calls that stay in the buffer when they are measured: the last few steps of a process are known by those before.
const CONTEXT: usize = BUFFER / 2;
/// Kinds of calls that are told apart; where there are more, numbers are given anew.
const KINDS_MAX: usize = 1 << 16;
/// Half buffers that are passed over at most after one without a pattern; twice as many as after the one before.
const PASSED_OVER_MAX: u32 = 16;
/// Phases that are kept; of more the shortest goes.
const PHASES_MAX: usize = 8;
/// Quantiles are as exact as this, relatively.
const QUANTILE_ERROR: f64 = 0.002;
/// The slowest step takes at least so many times the median.
const SLOW: f64 = 1.2;
/// The share of a slow step's excess that a cause explains.
const EXPLAINED: f64 = 0.3;
/// Steps before which nothing is usual.
const WARM_UP: usize = 8;
/// Steps of which the beginning is remembered.
const BEGUN_MAX: usize = 4096;
/// The weight of the newest step in what is usual at a place.
const NEWEST: f64 = 1.0 / 16.0;

/// The usual times of a place in the step, in ns.
#[derive(Debug, Clone, Copy, Default)]
struct Usual {
    /// In the call's kernel.
    kernel: Option<f64>,
    /// From its end to the start of the next one.
    gap: Option<f64>,
}

/// Steps of one pattern.
struct Phase {
    /// The call with which steps begin, and the calls of a step.
    begins_with: (CommId, Lane, Func),
    calls: usize,
    steps: u64,
    /// Between the first calls of steps, by the host's clock, all steps together, in ns.
    in_all_ns: u64,
    /// From a call's kernel to that of the same call in the next step, in ns.
    times: DDSketch,
    slowest: Option<SlowStep>,
    /// Time in NCCL's kernels, and of the steps in which all of them are known, in ns.
    in_nccl_ns: u64,
    measured_ns: u64,
    usual: Vec<Usual>,
    /// When the latest steps began, and their numbers.
    begun: VecDeque<(u64, u64)>,
    series: Series,
}

impl std::fmt::Debug for Phase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Phase")
            .field("calls", &self.calls)
            .field("steps", &self.steps)
            .finish_non_exhaustive()
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Phases {
    /// The latest calls. Those before `measured` are in steps that are counted.
    calls: Vec<TimedCall>,
    measured: usize,
    kinds: HashMap<(CommId, Lane, Func), u32>,
    /// The run with which steps began in the last buffer that had any, and the calls of a step.
    known: Option<(Anchor, usize)>,
    phases: Vec<Phase>,
    /// Buffers in a row without a pattern, and half buffers that are passed over before the next attempt.
    failures: u32,
    passed_over: u32,
    interruptions: u64,
}

impl Phases {
    /// Takes the next call.
    pub(super) fn take(&mut self, call: TimedCall) {
        // Any number of replays in a row is one call.
        if call.lane == Lane::Replay
            && let Some(last) = self.calls.last_mut().filter(|last| last.lane == Lane::Replay)
        {
            last.kernel.end_ns = None;
            return;
        }
        self.calls.push(call);
        if self.calls.len() >= BUFFER {
            self.measure_buffer();
        }
    }

    /// Measures the calls that were taken: nothing follows them, or nobody knows what does.
    pub(super) fn end(&mut self) {
        self.passed_over = 0;
        self.measure_buffer();
        self.calls.clear();
        self.measured = 0;
    }

    /// Takes that records are lost: the step in which they are is not measured.
    pub(super) fn lose(&mut self) {
        self.end();
        self.interruptions += 1;
    }

    fn measure_buffer(&mut self) {
        if self.passed_over > 0 {
            self.passed_over -= 1;
            self.forget(CONTEXT);
            return;
        }
        if self.kinds.len() > KINDS_MAX {
            (self.kinds, self.known) = (HashMap::new(), None);
        }
        let symbols = symbols(&self.calls, &mut self.kinds);
        let Some(pattern) = pattern::learn(&symbols, self.known) else {
            self.failures += 1;
            self.passed_over =
                1_u32.checked_shl(self.failures).map_or(PASSED_OVER_MAX, |n| n.min(PASSED_OVER_MAX));
            self.forget(CONTEXT);
            return;
        };
        self.failures = 0;
        self.known = Some((pattern.anchor, pattern.calls));
        self.measure(&symbols, &pattern);
        // Another loop may go on with calls in which nothing repeats yet.
        self.forget(self.measured.saturating_sub(CONTEXT).max(CONTEXT / 2));
    }

    /// Forgets the oldest calls.
    fn forget(&mut self, calls: usize) {
        self.calls.drain(..calls.min(self.calls.len()));
        self.measured = self.measured.saturating_sub(calls);
    }

    /// Measures the steps of a pattern in the buffer that are not counted yet.
    fn measure(&mut self, symbols: &[Symbol], pattern: &Pattern) {
        let mut begins = pattern.begins.iter().copied().filter(|at| *at >= self.measured);
        let Some(mut from) = begins.next() else { return };
        let first = &self.calls[from];
        let phase = phase_of(&mut self.phases, first, pattern.calls);
        let kept = |from: usize, to: usize| -> Vec<TimedCall> {
            let own = self.calls[from..to].iter().zip(&symbols[from..to]);
            // The calls with which a step begins are never overlooked.
            let kept = own.enumerate().filter(|(n, (_, s))| *n == 0 || !pattern.overlooked.contains(s));
            kept.map(|(_, (call, _))| *call).collect()
        };
        let mut before: Option<(u64, Vec<TimedCall>)> = None;
        for to in begins {
            let calls = kept(from, to);
            let first = std::mem::replace(&mut from, to);
            if calls.len() < pattern.calls {
                // A part of a step, or of what came before the first.
                before = None;
                continue;
            }
            phase.add(&self.calls[first], &self.calls[to]);
            if let Some((number, before)) = before.take() {
                phase.measure(number, &before, &calls);
            }
            before = Some((phase.steps, calls));
        }
        phase.begin(&self.calls[from]);
        self.measured = from;
    }

    /// The number of the step in which the process was at a moment of its host's monotonic clock, in ns.
    pub(super) fn number(&self, at_ns: u64) -> Option<u64> {
        self.longest()?.number(at_ns)
    }

    /// The phase that took the most time.
    fn longest(&self) -> Option<&Phase> {
        self.phases.iter().filter(|p| p.steps > 0).max_by_key(|p| p.in_all_ns)
    }

    /// The steps of the longest phase; absent without one. The process is left open.
    pub(super) fn row(&self) -> Option<StepRow> {
        let phase = self.longest()?;
        let quantile = |q| phase.times.quantile(q).ok().flatten();
        let share = phase.in_nccl_ns as f64 / phase.measured_ns as f64;
        let series = phase.series.points();
        Some(StepRow {
            host: String::new(),
            pid: 0,
            job_rank: None,
            comm: phase.begins_with.0,
            steps: phase.steps,
            interruptions: self.interruptions,
            mean_ns: phase.in_all_ns as f64 / phase.steps as f64,
            p50_ns: quantile(0.5),
            p99_ns: quantile(0.99),
            nccl_share: (phase.measured_ns > 0).then_some(share),
            slowest: phase.slowest.clone(),
            drift: drift(&series),
            series,
        })
    }
}

/// The relative change from the median of the first quarter of the steps to that of the last one. Few timed points say little.
fn drift(series: &[StepPoint]) -> Option<f64> {
    let on_gpu = series.iter().any(|p| p.gpu_ns.is_some());
    let all: u64 = series.iter().map(|p| p.steps).sum();
    let (mut first, mut last, mut before) = (Vec::new(), Vec::new(), 0);
    for point in series {
        let time = if on_gpu { point.gpu_ns } else { Some(point.host_ns) };
        if before < all / 4 {
            first.extend(time);
        } else if before >= all - all / 4 {
            last.extend(time);
        }
        before += point.steps;
    }
    let median = |mut of: Vec<f64>| {
        of.sort_by(f64::total_cmp);
        of.get(of.len() / 2).copied().filter(|_| of.len() >= WARM_UP)
    };
    let (first, last) = (median(first)?, median(last)?);
    (first > 0.0).then(|| last / first - 1.0)
}

/// The phase of a pattern, which may be new.
fn phase_of<'a>(phases: &'a mut Vec<Phase>, first: &TimedCall, calls: usize) -> &'a mut Phase {
    let begins_with = (first.comm, first.lane, first.func);
    let known = phases.iter().position(|p| p.calls == calls && p.begins_with == begins_with);
    let at = known.unwrap_or_else(|| {
        if phases.len() >= PHASES_MAX
            && let Some(shortest) = (0..phases.len()).min_by_key(|n| phases[*n].in_all_ns)
        {
            phases.remove(shortest);
        }
        phases.push(Phase {
            begins_with,
            calls,
            steps: 0,
            in_all_ns: 0,
            times: DDSketch::new(Config::new(QUANTILE_ERROR, 4096, 1.0)),
            slowest: None,
            in_nccl_ns: 0,
            measured_ns: 0,
            usual: vec![Usual::default(); calls],
            begun: VecDeque::new(),
            series: Series::default(),
        });
        phases.len() - 1
    });
    &mut phases[at]
}

impl Phase {
    /// Counts a step from its first call and that of the next one.
    fn add(&mut self, first: &TimedCall, next: &TimedCall) {
        self.begin(first);
        self.steps += 1;
        let took_ns = next.issued_ns.saturating_sub(first.issued_ns);
        self.in_all_ns = self.in_all_ns.saturating_add(took_ns);
        self.series.add(first.issued_ns, took_ns);
    }

    /// Remembers where a step begins.
    fn begin(&mut self, first: &TimedCall) {
        if self.begun.back().is_some_and(|(at_ns, _)| *at_ns >= first.issued_ns) {
            return;
        }
        if self.begun.len() >= BEGUN_MAX {
            self.begun.pop_front();
        }
        self.begun.push_back((first.issued_ns, self.steps + 1));
    }

    /// The number of the step at a moment; absent outside of the phase. The last step may not have ended.
    fn number(&self, at_ns: u64) -> Option<u64> {
        let next = self.begun.partition_point(|(begun_ns, _)| *begun_ns <= at_ns);
        self.begun.get(next.checked_sub(1)?).map(|(_, number)| *number)
    }

    /// Measures a step on the GPU: from one of its calls to the same call of the next step. Hosts run ahead of their GPUs, and the time
    /// between their calls is not that of a step.
    fn measure(&mut self, number: u64, calls: &[TimedCall], next: &[TimedCall]) {
        let is_same =
            |(a, b): &(&TimedCall, &TimedCall)| (a.comm, a.lane, a.func) == (b.comm, b.lane, b.func);
        let pairs = calls.iter().zip(next).take_while(is_same);
        let mut starts = pairs.filter_map(|(a, b)| b.kernel.start_ns?.checked_sub(a.kernel.start_ns?));
        let (Some(first), Some(took_ns)) = (calls.first(), starts.next()) else { return };
        let usual_ns = self.times.quantile(0.5).ok().flatten().filter(|_| self.times.count() >= WARM_UP);
        self.times.add(took_ns as f64);
        self.series.timed(took_ns);
        if let Some(usual_ns) = usual_ns.filter(|usual| took_ns as f64 > SLOW * usual)
            && self.slowest.as_ref().is_none_or(|s| s.took_ns < took_ns)
        {
            let cause = self.cause(calls, next, took_ns as f64 - usual_ns);
            self.slowest = Some(SlowStep { number, at_ns: first.issued_ns, at: None, took_ns, cause });
        }
        if let Some(busy_ns) = in_kernels(calls) {
            self.in_nccl_ns = self.in_nccl_ns.saturating_add(busy_ns.min(took_ns));
            self.measured_ns = self.measured_ns.saturating_add(took_ns);
        }
        if calls.len() == self.usual.len() {
            for (usual, (kernel, gap)) in self.usual.iter_mut().zip(times(calls, next)) {
                let mean = |usual: &mut Option<f64>, new: Option<u64>| {
                    let Some(new) = new.map(|n| n as f64) else { return };
                    *usual = Some(usual.map_or(new, |u| u + (new - u) * NEWEST));
                };
                mean(&mut usual.kernel, kernel);
                mean(&mut usual.gap, gap);
            }
        }
    }

    /// The thing that made a step take so much longer; absent where nothing explains it.
    fn cause(&self, calls: &[TimedCall], next: &[TimedCall], excess_ns: f64) -> Option<String> {
        let excess = |is: Option<u64>, usual: Option<f64>| is.zip(usual).map(|(is, usual)| is as f64 - usual);
        let is_alike = calls.len() == self.usual.len();
        let places = calls.iter().zip(following(calls, next)).zip(times(calls, next)).zip(&self.usual);
        let all = places.filter(|_| is_alike).flat_map(|(((call, after), (kernel, gap)), usual)| {
            [("in", call, excess(kernel, usual.kernel)), ("before", after, excess(gap, usual.gap))]
        });
        let longest =
            all.filter_map(|(place, call, by)| Some((place, call, by?))).max_by(|a, b| a.2.total_cmp(&b.2));
        if let Some((place, call, by_ns)) = longest.filter(|(.., by)| *by >= EXPLAINED * excess_ns) {
            let TimedCall { func, order, comm, .. } = call;
            return Some(format!(
                "{:.1} ms more {place} {func} (order {order}, communicator {comm})",
                by_ns / 1e6
            ));
        }
        let more = calls.len().saturating_sub(self.calls);
        let calls = if more == 1 { "call" } else { "calls" };
        (more > 0).then(|| format!("{more} {calls} more than usual"))
    }
}

/// Calls, as they are compared.
fn symbols(calls: &[TimedCall], kinds: &mut HashMap<(CommId, Lane, Func), u32>) -> Vec<Symbol> {
    let symbol = |call: &TimedCall| {
        let next = u32::try_from(kinds.len()).unwrap_or(u32::MAX);
        let kind = *kinds.entry((call.comm, call.lane, call.func)).or_insert(next);
        let is_replay = call.lane == Lane::Replay;
        // A count without a type is no number of bytes, and still tells calls apart.
        let (count, bytes) = if is_replay { (0, 0) } else { (call.count, call.bytes.unwrap_or(call.count)) };
        Symbol { kind, count, bytes, is_replay }
    };
    calls.iter().map(symbol).collect()
}

/// Time of each call in its kernel, and from its end to the start of the next one, in ns.
fn times<'a>(
    calls: &'a [TimedCall],
    next: &'a [TimedCall],
) -> impl Iterator<Item = (Option<u64>, Option<u64>)> + 'a {
    calls.iter().zip(following(calls, next)).map(|(call, after)| {
        let kernel = call.kernel.both().map(|(start, end)| end - start);
        let gap =
            call.kernel.both().zip(after.kernel.start_ns).map(|((_, end), start)| start.saturating_sub(end));
        (kernel, gap)
    })
}

/// The call behind each call of a step.
fn following<'a>(calls: &'a [TimedCall], next: &'a [TimedCall]) -> impl Iterator<Item = &'a TimedCall> {
    calls.iter().skip(1).chain(next.first())
}

/// Time in kernels, overlapping ones once; absent where one is not known.
fn in_kernels(calls: &[TimedCall]) -> Option<u64> {
    let mut kernels: Vec<(u64, u64)> = calls.iter().map(|c| c.kernel.both()).collect::<Option<_>>()?;
    kernels.sort_unstable();
    let (mut sum, mut until) = (0_u64, 0);
    for (start, end) in kernels {
        sum = sum.saturating_add(end.saturating_sub(start.max(until)));
        until = until.max(end);
    }
    Some(sum)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::steps::KernelTimes;

    const MS: u64 = 1_000_000;

    /// A job whose steps are eight all-reduces of one size and a small one, 10 ms apart.
    #[derive(Default)]
    struct Job {
        phases: Phases,
        order: u64,
        at_ns: u64,
    }

    impl Job {
        fn call(&mut self, count: u64, after_ns: u64, took_ns: u64) {
            self.at_ns += after_ns;
            let call = TimedCall {
                comm: CommId::unowned(1),
                lane: Lane::Collective,
                func: Func::AllReduce,
                order: self.order,
                count,
                bytes: Some(count * 4),
                // The host is ahead, and issues two steps at once.
                issued_ns: self.at_ns / (200 * MS) * (200 * MS) + self.order,
                kernel: KernelTimes { start_ns: Some(self.at_ns), end_ns: Some(self.at_ns + took_ns) },
            };
            self.at_ns += took_ns;
            self.order += 1;
            self.phases.take(call);
        }

        fn step(&mut self, slow_ns: u64) {
            (0..8).for_each(|_| self.call(1_000, 8 * MS, 2 * MS));
            self.call(10, 10 * MS + slow_ns, 10 * MS);
        }

        fn row(&self) -> StepRow {
            self.phases.row().unwrap()
        }
    }

    #[test]
    fn steps_are_measured_on_the_gpu() {
        let mut job = Job::default();
        for n in 0..100 {
            job.step(if n == 60 { 50 * MS } else { 0 });
        }
        job.phases.end();
        let row = job.row();
        // The last step has no end.
        assert_eq!((row.steps, row.interruptions), (99, 0));
        let is_near = |is: f64, ms: f64| (is / (ms * 1e6) - 1.0).abs() < 0.01;
        assert!(is_near(row.p50_ns.unwrap(), 100.0), "{row:?}");
        assert!((row.mean_ns / 1e6 - 100.5).abs() <= 2.1, "{row:?}");
        assert!((row.nccl_share.unwrap() - 0.26).abs() < 0.01, "{row:?}");
        let slowest = row.slowest.unwrap();
        assert!(is_near(slowest.took_ns as f64, 150.0), "{slowest:?}");
        let cause = slowest.cause.unwrap();
        assert!(cause.starts_with("50.0 ms more before AllReduce (order 548, "), "{cause}");
        let (begun_ns, number) = job.phases.phases[0].begun[10];
        assert_eq!(number, 11);
        assert_eq!((job.phases.number(begun_ns), job.phases.number(begun_ns - 1)), (Some(11), Some(10)));
        assert_eq!(job.phases.number(u64::MAX), Some(100), "the step that has begun");
    }

    #[test]
    fn the_longest_phase_is_told_and_others_have_counts_of_their_own() {
        let mut job = Job::default();
        // Broadcasts of the weights before, layer by layer.
        for _ in 0..50 {
            job.call(7, MS, MS);
            (0..3).for_each(|_| job.call(8, MS, MS));
        }
        // More steps than a buffer has, without a loss at its end.
        (0..4_000).for_each(|_| job.step(0));
        let begun = job.at_ns;
        job.phases.end();
        let row = job.row();
        assert!((3_990..=4_000).contains(&row.steps), "{row:?}");
        assert!((row.p50_ns.unwrap() / 1e8 - 1.0).abs() < 0.01, "{row:?}");
        assert_eq!(row.slowest, None);
        assert!(job.phases.number(begun).is_some());

        job.phases.lose();
        (0..100).for_each(|_| job.step(0));
        job.phases.end();
        assert_eq!((job.row().interruptions, job.row().steps), (1, row.steps + 99));
    }

    /// Layers that gather their parameters before their gradients, for longer than a buffer: two runs could begin a step.
    #[test]
    fn a_step_begins_with_the_same_call_in_each_buffer() {
        for steps in [1_000, 1_823, 3_645] {
            let mut phases = Phases::default();
            let mut order = 0;
            for _ in 0..steps {
                for func in "aaarararr".chars() {
                    let func = if func == 'a' { Func::AllGather } else { Func::ReduceScatter };
                    let issued_ns = order * MS;
                    let (comm, lane, kernel) = (CommId::unowned(1), Lane::Collective, KernelTimes::default());
                    phases.take(TimedCall {
                        comm,
                        lane,
                        func,
                        order,
                        count: 8,
                        bytes: Some(32),
                        issued_ns,
                        kernel,
                    });
                    order += 1;
                }
            }
            phases.end();
            let row = phases.row().unwrap();
            assert!((steps - 2..=steps).contains(&row.steps), "{steps}: {row:?}");
            assert_eq!(phases.number(u64::MAX), Some(row.steps + 1), "{steps}");
        }
    }

    #[test]
    fn a_loop_that_only_replays_takes_no_memory() {
        let mut phases = Phases::default();
        for n in 0..100_000 {
            phases.take(TimedCall {
                comm: CommId::unowned(1),
                lane: Lane::Replay,
                func: Func::AllReduce,
                order: n,
                count: 1,
                bytes: Some(4),
                issued_ns: n,
                kernel: KernelTimes::default(),
            });
        }
        assert_eq!(phases.calls.len(), 1);
        phases.end();
        assert_eq!(phases.row(), None);
    }
}
