//! The steps of one process: how many, how long, and what was longer in the slowest.

use super::Call;
use super::pattern::{self, Pattern, Symbol};
use crate::model::{CommId, Func, Lane, SlowStep, StepRow};
use sketches_ddsketch::{Config, DDSketch};
use std::collections::{HashMap, VecDeque};

/// Calls from which a pattern is learned, at first and at most.
const LEARN_FROM: usize = 128;
const LEARN_MAX: usize = 1 << 14;
/// Where no step begins within so many times its calls, the pattern is over.
const OVERDUE: usize = 4;
/// Kinds of calls that are told apart. A process with more of them begins anew.
const KINDS_MAX: usize = 4096;
/// Calls of a step of which the usual times are kept.
const PLACES_MAX: usize = 1 << 14;
/// Quantiles are as exact as this, relatively.
const QUANTILE_ERROR: f64 = 0.002;
/// A step is told as the slowest from so many times the median on.
const SLOW: f64 = 1.2;
/// Steps before which nothing is usual.
const WARM_UP: u64 = 8;
/// The share of a slow step's excess that a cause explains.
const EXPLAINED: f64 = 0.3;
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

/// Step times.
struct Times {
    sketch: DDSketch,
    slowest: Option<SlowStep>,
}

impl std::fmt::Debug for Times {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Times").field("count", &self.count()).field("slowest", &self.slowest).finish()
    }
}

impl Default for Times {
    fn default() -> Self {
        Times { sketch: DDSketch::new(Config::new(QUANTILE_ERROR, 4096, 1.0)), slowest: None }
    }
}

impl Times {
    fn count(&self) -> u64 {
        self.sketch.count() as u64
    }

    fn quantile(&self, q: f64) -> Option<f64> {
        self.sketch.quantile(q).ok().flatten()
    }

    /// Adds a step; `cause` is asked where it is the slowest so far.
    fn add(&mut self, (number, at_ns, took_ns): (u64, u64, u64), cause: impl FnOnce(f64) -> Option<String>) {
        let usual_ns = self.quantile(0.5).filter(|_| self.count() >= WARM_UP);
        self.sketch.add(took_ns as f64);
        let Some(usual_ns) = usual_ns.filter(|usual| took_ns as f64 > SLOW * usual) else { return };
        if self.slowest.as_ref().is_none_or(|s| s.took_ns < took_ns) {
            let cause = cause(took_ns as f64 - usual_ns);
            self.slowest = Some(SlowStep { number, at_ns, at: None, took_ns, cause });
        }
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Track {
    kinds: HashMap<(CommId, Lane, Func), u32>,
    /// The latest calls while no pattern is known.
    heard: VecDeque<Call>,
    /// Calls until the next attempt to learn one.
    learn_in: usize,
    pattern: Option<Pattern>,
    /// The last calls that are equal: where they are known to be all, they may begin a step.
    run: Vec<Call>,
    /// The step that has begun, and its calls before the run.
    step: Option<Vec<Call>>,
    /// Calls since a step began.
    since: usize,
    steps: u64,
    /// Between the first calls of steps, by hosts' times, all steps together, in ns.
    in_all_ns: u64,
    times: Times,
    /// The step before the one that has begun, and its number.
    before: Option<(u64, Vec<Call>)>,
    /// Time in NCCL's kernels, and the GPU time of the steps in which all of them are known, in ns.
    in_nccl_ns: u64,
    measured_ns: u64,
    usual: Vec<Usual>,
    interruptions: u64,
    comm: Option<CommId>,
    /// When the latest steps began, and their numbers.
    begun: VecDeque<(u64, u64)>,
}

impl Track {
    /// Takes the next call.
    pub(super) fn take(&mut self, call: &Call) {
        if self.pattern.is_some() {
            self.follow(call);
            return;
        }
        if self.heard.len() >= LEARN_MAX {
            self.heard.pop_front();
        }
        self.heard.push_back(*call);
        if self.learn_in > 0 {
            self.learn_in -= 1;
            return;
        }
        self.learn_in = self.heard.len().clamp(LEARN_FROM, LEARN_MAX / 2);
        let symbols: Vec<Symbol> =
            self.heard.iter().copied().collect::<Vec<_>>().iter().map(|c| self.symbol(c)).collect();
        self.pattern = pattern::learn(&symbols);
        if self.pattern.is_some() {
            self.usual.clear();
            for call in std::mem::take(&mut self.heard) {
                self.take(&call);
            }
        }
    }

    /// Takes that records are lost: the step that has begun is not measured.
    pub(super) fn lose(&mut self) {
        self.interruptions += u64::from(self.step.take().is_some());
        self.before = None;
        self.begun.clear();
        self.run.clear();
        self.heard.clear();
        self.since = 0;
    }

    fn symbol(&mut self, call: &Call) -> Symbol {
        let next = u32::try_from(self.kinds.len()).unwrap_or(u32::MAX);
        let kind = *self.kinds.entry((call.comm, call.lane, call.func)).or_insert(next);
        // A count without a type is no number of bytes, and still tells calls apart.
        let bytes = call.bytes.unwrap_or(call.count);
        Symbol { kind, count: call.count, bytes, is_replay: call.lane == Lane::Replay }
    }

    fn follow(&mut self, call: &Call) {
        if self.kinds.len() > KINDS_MAX {
            self.stop();
            self.kinds.clear();
            return;
        }
        let symbol = self.symbol(call);
        let last = self.run.last().copied().map(|c| self.symbol(&c));
        let continues = last.is_some_and(|last| symbol.continues(&last));
        if !continues {
            self.end_run();
        }
        self.run.push(*call);
        // Replays in a row are one call of the pattern.
        self.since += usize::from(!(continues && symbol.is_replay));
        let due = self.pattern.as_ref().map_or(0, |p| p.calls.saturating_mul(OVERDUE) + LEARN_FROM);
        if self.since > due {
            self.stop();
        }
    }

    /// Ends the run of equal calls, which may have begun a step.
    fn end_run(&mut self) {
        let run = std::mem::take(&mut self.run);
        let (Some(first), Some(pattern)) = (run.first().copied(), self.pattern.clone()) else { return };
        let symbol = self.symbol(&first);
        if pattern.begins(&symbol, run.len()) {
            if let Some(calls) = self.step.take() {
                self.steps += 1;
                let from_ns = calls.first().map_or(first.issued_ns, |c| c.issued_ns);
                self.in_all_ns += first.issued_ns.saturating_sub(from_ns);
                if let Some((number, before)) = self.before.take() {
                    self.measure(number, &before, &calls, &pattern);
                }
                self.before = Some((self.steps, calls));
            }
            if self.begun.len() >= BEGUN_MAX {
                self.begun.pop_front();
            }
            self.begun.push_back((first.issued_ns, self.steps + 1));
            self.comm = Some(first.comm);
            self.step = Some(Vec::with_capacity(pattern.calls));
            self.since = if symbol.is_replay { 1 } else { run.len() };
        }
        if let Some(step) = &mut self.step {
            step.extend(run);
        }
    }

    /// The sequence does not repeat any more.
    fn stop(&mut self) {
        self.lose();
        self.pattern = None;
        self.learn_in = LEARN_FROM;
    }

    /// Measures a step on the GPU: from one of its calls to the same call of the next step. Hosts run ahead of their GPUs, and the time
    /// between their calls is not that of a step.
    fn measure(&mut self, number: u64, calls: &[Call], next: &[Call], pattern: &Pattern) {
        let is_same = |(a, b): &(&Call, &Call)| (a.comm, a.lane, a.func) == (b.comm, b.lane, b.func);
        let pairs = calls.iter().zip(next).take_while(is_same);
        let mut starts =
            pairs.filter_map(|(a, b)| Some((a.issued_ns, a.kernel.start_ns?, b.kernel.start_ns?)));
        let Some((at_ns, from, to)) = starts.next() else { return };
        let Some(took_ns) = to.checked_sub(from) else { return };
        let usual = &self.usual;
        let cause = |excess_ns| cause((calls, next), usual, pattern, excess_ns);
        self.times.add((number, at_ns, took_ns), cause);
        if let Some(busy_ns) = in_kernels(calls) {
            self.in_nccl_ns += busy_ns.min(took_ns);
            self.measured_ns += took_ns;
        }
        if calls.len() == pattern.calls && calls.len() <= PLACES_MAX {
            self.usual.resize(calls.len(), Usual::default());
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

    /// The number of the step in which the process was at a moment, host monotonic ns.
    pub(super) fn number(&self, at_ns: u64) -> Option<u64> {
        let next = self.begun.partition_point(|(begun_ns, _)| *begun_ns <= at_ns);
        self.begun.get(next.checked_sub(1)?).map(|(_, number)| *number)
    }

    /// What is known; absent without a step. Whoever shows it fills in the process.
    pub(super) fn row(&self) -> Option<StepRow> {
        if self.steps == 0 {
            return None;
        }
        Some(StepRow {
            host: String::new(),
            pid: 0,
            job_rank: None,
            comm: self.comm?,
            steps: self.steps,
            interruptions: self.interruptions,
            mean_ns: self.in_all_ns as f64 / self.steps as f64,
            p50_ns: self.times.quantile(0.5),
            p99_ns: self.times.quantile(0.99),
            nccl_share: (self.measured_ns > 0).then(|| self.in_nccl_ns as f64 / self.measured_ns as f64),
            slowest: self.times.slowest.clone(),
        })
    }
}

/// Time of each call in its kernel, and from its end to the start of the next one, in ns.
fn times<'a>(calls: &'a [Call], next: &'a [Call]) -> impl Iterator<Item = (Option<u64>, Option<u64>)> + 'a {
    calls.iter().zip(following(calls, next)).map(|(call, after)| {
        let kernel = call.kernel.both().map(|(start, end)| end - start);
        let gap =
            call.kernel.both().zip(after.kernel.start_ns).map(|((_, end), start)| start.saturating_sub(end));
        (kernel, gap)
    })
}

/// The call behind each call of a step.
fn following<'a>(calls: &'a [Call], next: &'a [Call]) -> impl Iterator<Item = &'a Call> {
    calls.iter().skip(1).chain(next.first())
}

/// Time in kernels, overlapping ones once; absent where one is not known.
fn in_kernels(calls: &[Call]) -> Option<u64> {
    let mut kernels: Vec<(u64, u64)> = calls.iter().map(|c| c.kernel.both()).collect::<Option<_>>()?;
    kernels.sort_unstable();
    let (mut sum, mut until) = (0, 0);
    for (start, end) in kernels {
        sum += end.saturating_sub(start.max(until));
        until = until.max(end);
    }
    Some(sum)
}

/// The thing that made a step take so much longer; absent where nothing explains it.
fn cause(
    (calls, next): (&[Call], &[Call]),
    usual: &[Usual],
    pattern: &Pattern,
    excess_ns: f64,
) -> Option<String> {
    let excess = |is: Option<u64>, usual: Option<f64>| is.zip(usual).map(|(is, usual)| is as f64 - usual);
    let is_alike = calls.len() == usual.len();
    let places =
        calls.iter().zip(following(calls, next)).zip(times(calls, next)).zip(usual).filter(|_| is_alike);
    let all = places.flat_map(|(((call, after), (kernel, gap)), usual)| {
        [("in", call, excess(kernel, usual.kernel)), ("before", after, excess(gap, usual.gap))]
    });
    let longest =
        all.filter_map(|(place, call, by)| Some((place, call, by?))).max_by(|a, b| a.2.total_cmp(&b.2));
    if let Some((place, call, by_ns)) = longest.filter(|(.., by)| *by >= EXPLAINED * excess_ns) {
        let Call { func, order, comm, .. } = call;
        return Some(format!(
            "{:.1} ms more {place} {func} (order {order}, communicator {comm})",
            by_ns / 1e6
        ));
    }
    let more = calls.iter().filter(|c| c.lane != Lane::Replay).count().saturating_sub(pattern.calls);
    let calls = if more == 1 { "call" } else { "calls" };
    (more > 0).then(|| format!("{more} {calls} more than usual"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Rank;
    use crate::steps::Kernel;

    const MS: u64 = 1_000_000;

    /// A job whose steps are eight all-reduces of one size and a small one, 10 ms apart.
    #[derive(Default)]
    struct Job {
        track: Track,
        order: u64,
        at_ns: u64,
    }

    impl Job {
        fn call(&mut self, count: u64, after_ns: u64, took_ns: u64) {
            self.at_ns += after_ns;
            let call = Call {
                comm: CommId::unowned(1),
                lane: Lane::Collective,
                func: Func::AllReduce,
                order: self.order,
                count,
                bytes: Some(count * 4),
                // The host is ahead, and issues two steps at once.
                issued_ns: self.at_ns / (200 * MS) * (200 * MS) + self.order,
                kernel: Kernel { start_ns: Some(self.at_ns), end_ns: Some(self.at_ns + took_ns) },
            };
            self.at_ns += took_ns;
            self.order += 1;
            self.track.take(&call);
        }

        fn step(&mut self, slow_ns: u64) {
            (0..8).for_each(|_| self.call(1_000, 8 * MS, 2 * MS));
            self.call(10, 10 * MS + slow_ns, 10 * MS);
        }
    }

    #[test]
    fn steps_are_measured_on_the_gpu() {
        let mut job = Job::default();
        for n in 0..100 {
            job.step(if n == 60 { 50 * MS } else { 0 });
        }
        let row = job.track.row().unwrap();
        // The first and the last are not seen whole.
        assert_eq!((row.steps, row.interruptions), (98, 0));
        let is_near = |is: f64, ms: f64| (is / (ms * 1e6) - 1.0).abs() < 0.01;
        assert!(is_near(row.p50_ns.unwrap(), 100.0), "{row:?}");
        assert!((row.mean_ns / 1e6 - 100.5).abs() <= 2.1, "{row:?}");
        assert!((row.nccl_share.unwrap() - 0.26).abs() < 0.01, "{row:?}");
        let slowest = row.slowest.unwrap();
        assert!(is_near(slowest.took_ns as f64, 150.0), "{slowest:?}");
        let cause = slowest.cause.unwrap();
        assert!(cause.starts_with("50.0 ms more before AllReduce (order 548, "), "{cause}");
        let begun_ns = job.track.begun[10].0;
        assert_eq!((job.track.number(begun_ns), job.track.number(begun_ns - 1)), (Some(11), Some(10)));
    }

    #[test]
    fn lost_records_interrupt_and_other_calls_end_a_phase() {
        let mut job = Job::default();
        (0..50).for_each(|_| job.step(0));
        job.track.lose();
        assert_eq!(job.track.row().unwrap().interruptions, 1);
        let before = job.track.row().unwrap().steps;
        (0..50).for_each(|_| job.step(0));
        assert_eq!(job.track.row().unwrap().steps, before + 48);
        // An evaluation, and another loop.
        (0..2_000).for_each(|n| job.call(7 + n % 3, MS, MS));
        let begun = job.track.row().unwrap().steps;
        for _ in 0..100 {
            job.call(5, MS, MS);
            (0..3).for_each(|_| job.call(6, MS, MS));
        }
        assert!(job.track.row().unwrap().steps > begun + 50, "{:?}", job.track.row());
    }

    #[test]
    fn transfers_with_other_peers_are_other_calls() {
        let mut track = Track::default();
        let call = |peer| Call {
            comm: CommId::unowned(1),
            lane: Lane::Send(Rank(peer)),
            func: Func::Send,
            order: 0,
            count: 1,
            bytes: None,
            issued_ns: 0,
            kernel: Kernel::default(),
        };
        assert_ne!(track.symbol(&call(1)), track.symbol(&call(2)));
        assert_eq!(track.symbol(&call(1)), track.symbol(&call(1)));
    }
}
