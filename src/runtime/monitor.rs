//! The one owner of a node's state.

use crate::detect::{Baseline, Detector, Settings};
use crate::join::{ClockPair, Finished, FinishedSink, Join, MemoryLimit, Sampling, View};
use crate::model::{
    CommId, Evidence, Finding, FindingEvent, HostFact, OpRecord, Rank, SegmentId, Sink, Snapshot, Source,
    Spare, StepRow, Update,
};
use crate::steps::Steps;
use std::collections::{BTreeMap, BTreeSet};

/// A process whose step is so nearly a whole part of another's of its job repeats parts of a step.
const PART_ERROR: f64 = 0.1;

/// A source, what it said so far, and what is wrong.
#[derive(Debug)]
pub struct Monitor<S> {
    source: S,
    join: Join,
    detector: Detector,
    judging: bool,
    /// Processes that were asked where they are, and as what they are known.
    asked: BTreeMap<SegmentId, (CommId, Rank)>,
    stacks: Vec<Stack>,
    /// The steps of the processes, where somebody wants to know them.
    steps: Option<Steps>,
    /// The receiver of finished operations, where there is one.
    sink: Option<Box<dyn FinishedSink>>,
}

/// Where a culprit is in its code: an answer that came after it was named.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stack {
    /// The communicator of the finding that named it.
    pub communicator: CommId,
    /// The rank, as that communicator numbers them.
    pub rank: Rank,
    /// Innermost frame first.
    pub frames: Vec<String>,
}

impl<S: Source> Monitor<S> {
    /// Watches a source.
    pub fn new(source: S, settings: Settings) -> Self {
        Monitor {
            source,
            join: Join::new(),
            detector: Detector::new(settings),
            judging: true,
            asked: BTreeMap::new(),
            stacks: Vec::new(),
            steps: None,
            sink: None,
        }
    }

    /// Sends finished operations to this receiver; they cannot be taken any more.
    #[must_use]
    pub fn with_sink(mut self, sink: Option<Box<dyn FinishedSink>>) -> Self {
        if sink.is_some() {
            self.join.keep_finished();
        }
        self.sink = sink;
        self
    }

    /// Measures the steps of the processes as well.
    #[must_use]
    pub fn with_steps(mut self) -> Self {
        self.steps = Some(Steps::default());
        self
    }

    /// Takes what processes have left unfinished for ended with them, as whoever watches running jobs does.
    #[must_use]
    pub fn following_live(mut self) -> Self {
        self.join.follow_live();
        self
    }

    /// Takes that nothing more comes after this moment: calls are waited for no longer.
    pub fn end(&mut self, now_ns: u64) {
        if let Some(sink) = &mut self.sink {
            sink.end(&self.join.unfinished(), &self.join, now_ns);
        }
        if let Some(steps) = &mut self.steps {
            steps.end();
        }
    }

    /// Limits the memory that communicators take.
    pub fn limit_memory(&mut self, limit: MemoryLimit) {
        self.join.limit_memory(limit);
    }

    /// Judges transfers by what benchmarks said as well.
    #[must_use]
    pub fn with_baselines(mut self, baselines: Vec<Baseline>) -> Self {
        self.set_baselines(baselines);
        self
    }

    /// Judges transfers by these from now on.
    pub fn set_baselines(&mut self, baselines: Vec<Baseline>) {
        self.detector.set_baselines(baselines);
    }

    /// Puts all times on one clock, where hosts have their own.
    #[must_use]
    pub fn observed_from(mut self, observer: ClockPair) -> Self {
        self.join.observe_from(observer);
        self
    }

    /// From now on has some operations told whole.
    pub fn sample(&mut self, sampling: Option<Sampling>) {
        self.join.sample(sampling);
    }

    /// Takes over findings of an earlier run on this host.
    pub fn restore(&mut self, findings: Vec<Finding>, now_ns: u64) {
        self.detector.restore(findings, now_ns);
    }

    /// Takes in what is new and asks the rules. Returns the changes of findings, each once.
    pub fn step(&mut self, now_ns: u64) -> Vec<FindingEvent> {
        let Monitor { source, join, asked, stacks, steps, .. } = self;
        join.set_searched(source.searched_ns());
        source.poll_each(now_ns, &mut Taking { now_ns, join, asked, stacks, steps: steps.as_mut() });
        if let Some(steps) = steps {
            steps.settle();
        }
        self.join.tick(now_ns);
        self.join.set_unread(self.source.behind(), now_ns);
        if let Some(sink) = &mut self.sink {
            let finished = self.join.take_finished();
            sink.take(&finished, &self.join, now_ns);
        }
        if !self.judging {
            return Vec::new();
        }
        let events = self.detector.check(&self.join, now_ns);
        // Whoever holds up others is asked where it is; its answer becomes evidence of the finding.
        for finding in FindingEvent::opened(&events).filter(|f| f.open && f.kind.is_hang()) {
            let Some(comm) = self.join.communicator(finding.communicator) else { continue };
            for rank in &finding.ranks {
                if let Some(member) = comm.members().get(rank) {
                    self.source.inspect(member.record.segment, now_ns);
                    self.asked.insert(member.record.segment, (finding.communicator, *rank));
                }
            }
        }
        events
    }

    /// The stacks of culprits that came since the last call; they are in their findings' evidence too.
    pub fn take_stacks(&mut self) -> Vec<Stack> {
        std::mem::take(&mut self.stacks)
    }

    /// From now on only takes in; what was found stays as it is.
    pub fn stop_judging(&mut self) {
        self.judging = false;
    }

    /// The source.
    pub fn source(&self) -> &S {
        &self.source
    }

    /// The source, to be told something.
    pub fn source_mut(&mut self) -> &mut S {
        &mut self.source
    }

    /// The join of the ranks' operations.
    pub fn join(&self) -> &Join {
        &self.join
    }

    /// Everything found so far, open findings first.
    pub fn findings(&self) -> Vec<Finding> {
        let mut findings = self.detector.findings();
        for finding in &mut findings {
            finding.evidence.extend(self.step_of(finding));
        }
        findings
    }

    /// The step in which the operation of a finding was issued, of the first of its ranks that counts steps.
    fn step_of(&self, finding: &Finding) -> Option<Evidence> {
        let steps = self.steps.as_ref()?;
        let comm = self.join.communicator(finding.communicator)?;
        let operation = comm.instance(finding.operation.track, finding.operation.order)?;
        let began_ns = operation.began_ns()?;
        let ranks = finding.ranks.iter().chain(operation.parts.keys());
        let number = |rank: &Rank| {
            let segment = comm.members().get(rank)?.record.segment;
            let own_ns =
                began_ns.checked_add_signed(self.join.process(segment)?.shift_ns().checked_neg()?)?;
            Some((*rank, steps.number(segment, own_ns)?))
        };
        let (rank, number) = ranks.into_iter().find_map(number)?;
        Some(Evidence {
            text: format!("in step {number} of rank {rank}, by what repeats in its calls since it was seen"),
            value: Some(number as f64),
            unit: Some("count".into()),
        })
    }

    /// From now on keeps operations that are over until they are taken.
    pub fn keep_finished(&mut self) {
        self.join.keep_finished();
    }

    /// The operations that are over since the last call.
    pub fn take_finished(&mut self) -> Vec<Finished> {
        self.join.take_finished()
    }

    /// From now on judges by these.
    pub fn set(&mut self, settings: Settings) {
        self.detector.set(settings);
    }

    /// How many findings of a user, or of all users, are left out since a user has too many open ones.
    pub fn findings_left_out(&self, uid: Option<u32>) -> u64 {
        let left_out = self.detector.left_out().iter();
        left_out.filter(|(owner, _)| uid.is_none() || **owner == uid).map(|(_, n)| *n as u64).sum()
    }

    /// All of it for a screen.
    pub fn snapshot(&self, now_ns: u64) -> Snapshot {
        self.snapshot_of(None, now_ns)
    }

    /// The same for one user's jobs alone.
    pub fn snapshot_of(&self, uid: Option<u32>, now_ns: u64) -> Snapshot {
        let all = View::new(&self.join, now_ns);
        let view = uid.map_or(all, |uid| all.of_user(uid));
        let mut s = view.snapshot();
        s.findings = self.findings();
        s.more_findings = self.findings_left_out(uid);
        if uid.is_some() {
            let shown: BTreeSet<CommId> = view.communicators().map(|c| c.id).collect();
            // A job that has ended may be forgotten; whose it was, its communicator says.
            let own = |f: &Finding| f.communicator.owner() == uid || shown.contains(&f.communicator);
            s.findings.retain(own);
        }
        let shown: BTreeSet<CommId> = s.comms.iter().map(|c| c.id).collect();
        s.steps = self.steps.as_ref().map(|steps| self.step_rows(steps, &shown));
        s.unread = self.source.unread(uid);
        s.unsearched = !self.source.is_searched();
        s.source = self.source.describe();
        s.wall = self.wall(now_ns);
        s
    }

    /// The steps of the processes in these communicators. A process is left out whose own calls repeat several times in a step, as those
    /// of a pipeline's last stage do with each micro-batch: where the steps of its job begin, its calls do not show.
    fn step_rows(&self, steps: &Steps, shown: &BTreeSet<CommId>) -> Vec<StepRow> {
        // By name, user and, where a job has no name, communicator.
        type Job<'a> = (Option<&'a str>, Option<u32>, Option<CommId>);
        let mut jobs: BTreeMap<Job<'_>, Vec<StepRow>> = BTreeMap::new();
        for (segment, mut row) in steps.rows().filter(|(_, row)| shown.contains(&row.comm)) {
            let Some(process) = self.join.process(segment) else { continue };
            let (p, shift_ns) = (&process.record, process.shift_ns());
            (row.host, row.pid, row.job_rank) = (p.host.clone(), p.pid, p.job.rank);
            row.series.iter_mut().for_each(|p| p.at_ns = p.at_ns.saturating_add_signed(shift_ns));
            if let Some(slowest) = &mut row.slowest {
                slowest.at_ns = slowest.at_ns.saturating_add_signed(shift_ns);
                slowest.at = self.wall(slowest.at_ns);
            }
            let name = p.job.name.as_deref();
            let key = (name, p.owner, Some(row.comm).filter(|_| name.is_none()));
            jobs.entry(key).or_default().push(row);
        }
        let whole = jobs.into_values().flat_map(|rows| {
            let longest_ns = rows.iter().map(|r| r.mean_ns).fold(0.0, f64::max);
            rows.into_iter().filter(move |r| !is_part(r.mean_ns, longest_ns))
        });
        let mut rows: Vec<StepRow> = whole.collect();
        rows.sort_by(|a, b| (a.job_rank, &a.host, a.pid).cmp(&(b.job_rank, &b.host, b.pid)));
        rows
    }

    /// A moment as `HH:MM:SS` in UTC; absent when no clock pair is known.
    pub fn wall(&self, now_ns: u64) -> Option<String> {
        let ns = self.join.unix_ns(now_ns)?;
        let t = time::OffsetDateTime::from_unix_timestamp_nanos(i128::from(ns)).ok()?;
        Some(format!("{:02}:{:02}:{:02}", t.hour(), t.minute(), t.second()))
    }
}

/// Takes a look's updates in.
struct Taking<'a> {
    now_ns: u64,
    join: &'a mut Join,
    asked: &'a mut BTreeMap<SegmentId, (CommId, Rank)>,
    stacks: &'a mut Vec<Stack>,
    steps: Option<&'a mut Steps>,
}

impl Sink for Taking<'_> {
    fn take(&mut self, update: Update) {
        if let Update::Host(fact) = &update {
            self.stacks.extend(answer(fact, self.join, self.asked));
        }
        if let Some(steps) = &mut self.steps {
            steps.take(&update);
        }
        self.join.feed(update);
    }

    fn operation(&mut self, op: Box<OpRecord>) {
        if let Some(steps) = &mut self.steps {
            steps.operation(&op);
        }
        self.join.feed_operation(op);
    }

    fn rest(&mut self, spare: &mut Spare) {
        self.join.settle(self.now_ns);
        spare.take_from(self.join.spare());
    }
}

/// True where one time is nearly a half, a third or another whole part of another.
fn is_part(part: f64, whole: f64) -> bool {
    let times = (whole / part).round();
    times >= 2.0 && (times * part - whole).abs() <= PART_ERROR * whole
}

/// The stack of a process that was asked for it, where this is the answer.
fn answer(fact: &HostFact, join: &Join, asked: &mut BTreeMap<SegmentId, (CommId, Rank)>) -> Option<Stack> {
    let known = join.process(fact.segment).and_then(|p| p.host.as_ref()?.stack_ns);
    if fact.stack.is_empty() || fact.stack_ns == known {
        return None;
    }
    let (communicator, rank) = asked.remove(&fact.segment)?;
    Some(Stack { communicator, rank, frames: fact.stack.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::join::testing::{all_reduce, member, process};
    use crate::model::{Func, Lane, Rank};

    const S: u64 = 1_000_000_000;

    /// Gives what it was given, and remembers who was asked for.
    #[derive(Debug, Default)]
    struct Given {
        updates: Vec<Update>,
        asked: Vec<SegmentId>,
        searched_ns: Option<u64>,
    }

    impl Source for Given {
        fn poll(&mut self, _now_ns: u64) -> Vec<Update> {
            std::mem::take(&mut self.updates)
        }
        fn inspect(&mut self, segment: SegmentId, _now_ns: u64) {
            self.asked.push(segment);
        }
        fn searched_ns(&self) -> Option<u64> {
            self.searched_ns
        }
        fn describe(&self) -> String {
            String::new()
        }
    }

    #[test]
    fn first_operations_wait_for_the_processes_that_were_not_found_yet() {
        // Ranks 0 and 1 of 4 are found, and both are through with an operation.
        let found = |r: u32| {
            let Update::Comm(mut c) = member(r, 4, 1) else { unreachable!("a member") };
            c.init_ns = S;
            let op = all_reduce(r, 0, 2 * S, Some((2 * S + 5_000, Some(2 * S + 50_000))));
            [process(r), Update::Comm(c), Update::Op(Box::new(op))]
        };
        let ranks = |searched_ns: Option<u64>, later: &[(u32, u64)], until_ns: u64| {
            let updates = (0..2).flat_map(found).collect();
            let given = Given { updates, searched_ns, ..Given::default() };
            let mut monitor = Monitor::new(given, Settings::default());
            monitor.keep_finished();
            monitor.step(3 * S);
            for (rank, at_ns) in later {
                monitor.source_mut().updates = found(*rank).into();
                monitor.source_mut().searched_ns = Some(*at_ns - S / 2);
                monitor.step(*at_ns);
            }
            monitor.step(until_ns);
            monitor.take_finished().iter().map(|f| f.parts.len()).collect::<Vec<_>>()
        };
        assert_eq!(ranks(None, &[], 3 * S), [2], "where nobody searches all are there");
        assert_eq!(ranks(Some(3 * S + 1), &[], 3 * S), [2], "they are on other hosts");
        assert_eq!(ranks(Some(S), &[], 4 * S), [0; 0]);
        assert_eq!(ranks(Some(S), &[(2, 4 * S)], 4 * S + S / 4), [3]);
        assert_eq!(ranks(Some(S), &[], 13 * S), [2], "it is not waited for long");
    }

    #[test]
    fn a_transfer_waits_for_its_other_end_while_processes_are_searched() {
        let found = |r: u32| {
            let Update::Comm(mut c) = member(r, 4, 0) else { unreachable!("a member") };
            c.init_ns = S;
            let mut op = all_reduce(r, 0, 2 * S, Some((2 * S + 5_000, Some(2 * S + 50_000))));
            (op.func, op.lane) =
                if r == 0 { (Func::Send, Lane::Send(Rank(1))) } else { (Func::Recv, Lane::Recv(Rank(0))) };
            [process(r), Update::Comm(c), Update::Op(Box::new(op))]
        };
        let given = Given { updates: found(0).into(), searched_ns: Some(S), ..Given::default() };
        let mut monitor = Monitor::new(given, Settings::default());
        monitor.keep_finished();
        monitor.step(3 * S);
        assert_eq!(monitor.take_finished(), [], "rank 1 may be on this host");
        monitor.source_mut().updates = found(1).into();
        monitor.step(3 * S + S / 4);
        let over = monitor.take_finished();
        assert_eq!(over.iter().map(|f| f.parts.len()).collect::<Vec<_>>(), [2]);
    }

    #[test]
    fn a_user_sees_their_own_jobs_alone() {
        let mut given = Given::default();
        for r in 0..4 {
            let Update::Segment(mut s) = process(r) else { unreachable!() };
            s.owner = Some(1000 + r / 2);
            given.updates.push(Update::Segment(s));
            let Update::Comm(mut c) = member(r % 2, 2, if r % 2 == 1 { 1 } else { 2 }) else {
                unreachable!()
            };
            c.segment = SegmentId(u64::from(r) + 1);
            c.comm = CommId::unowned(u64::from(r / 2));
            given.updates.push(Update::Comm(c));
            for order in 0..2 - u64::from(r % 2) {
                let at = S * (order + 1);
                let mut o =
                    all_reduce(r % 2, order, at, Some((at + 5_000, (order == 0).then_some(at + 50_000))));
                (o.segment, o.comm) = (SegmentId(u64::from(r) + 1), CommId::unowned(u64::from(r / 2)));
                given.updates.push(Update::Op(Box::new(o)));
            }
        }
        let mut monitor = Monitor::new(given, Settings::default());
        assert_eq!(FindingEvent::opened(&monitor.step(6 * S)).count(), 2, "both jobs hang");
        let all = monitor.snapshot(6 * S);
        assert_eq!((all.segments.len(), all.comms.len(), all.findings.len()), (4, 2, 2));
        let own = monitor.snapshot_of(Some(1001), 6 * S);
        assert_eq!((own.segments.len(), own.ranks.len(), own.in_flight.len()), (2, 2, 1));
        assert!(
            own.comms.iter().all(|c| c.id == CommId::unowned(1))
                && own.classes.iter().all(|c| c.comm == CommId::unowned(1))
        );
        assert_eq!(own.findings.iter().map(|f| f.communicator).collect::<Vec<_>>(), [CommId::unowned(1)]);
        let nobody = monitor.snapshot_of(Some(7), 6 * S);
        assert_eq!(
            (nobody.segments, nobody.comms, nobody.findings, nobody.jobs),
            (vec![], vec![], vec![], vec![])
        );
    }

    #[test]
    fn the_stack_of_a_named_rank_is_told_once_and_becomes_evidence() {
        let mut given = Given::default();
        for r in 0..2 {
            given.updates.push(process(r));
            given.updates.push(member(r, 2, if r == 1 { 1 } else { 2 }));
            let done = all_reduce(r, 0, S, Some((S + 5_000, Some(S + 50_000))));
            given.updates.push(Update::Op(Box::new(done)));
        }
        let waits = all_reduce(0, 1, 2 * S, Some((2 * S + 5_000, None)));
        given.updates.push(Update::Op(Box::new(waits)));
        let mut monitor = Monitor::new(given, Settings::default());
        assert_eq!(monitor.step(6 * S).len(), 1);
        assert_eq!(monitor.source().asked, [SegmentId(2)]);
        let fact = HostFact {
            stack: vec!["load (data.py:12)".to_owned(), "<module> (train.py:3)".to_owned()],
            stack_ns: Some(7 * S),
            ..HostFact::new(SegmentId(2), 7 * S)
        };
        for at in [7, 8] {
            monitor.source_mut().updates = vec![Update::Host(Box::new(fact.clone()))];
            assert_eq!(monitor.step(at * S), vec![], "it is no new finding");
            let told = monitor.take_stacks();
            assert_eq!(told.len(), usize::from(at == 7), "once");
            assert!(told.iter().all(|s| s.rank == Rank(1) && s.frames == fact.stack));
        }
        let evidence = &monitor.findings()[0].evidence;
        let text = "rank 1 is at load (data.py:12) < <module> (train.py:3)";
        assert!(evidence.iter().any(|e| e.text == text), "{evidence:?}");
    }
}
