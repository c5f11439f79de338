//! One job examined: what was found on each path, held against what is true.

use crate::generate::Exam;
use crate::simulator::{BEGIN, Simulation, Stay};
use crate::spec::{FaultKind, Spec};
use crate::truth::{self, Need, OpKey, Truth};
use crate::waits;
use crate::watch::{Watcher, Way};
use ringwatch::join::{Join, Origin, Process, Stall, Standstills};
use ringwatch::model::{Change, Finding, Kind, Rank, Severity, Track};
use std::collections::{BTreeMap, BTreeSet};

const MS: u64 = 1_000_000;
/// The share of the job's time from which on what it lost is a warning.
const WORTH_A_WARNING: f64 = 0.03;
/// The hosts' clocks, by which records come, are at most so far off: what was found so long before its cause is about it.
const CLOCKS_NS: u64 = MS;
/// What the bus and the beats of the agents may take.
const ON_THE_WAY: u64 = 1_200 * MS;

pub(crate) const WAYS: [Way; 3] = [Way::Records, Way::Bus, Way::Sampled];

/// A finding as it was at one moment.
#[derive(Debug, Clone)]
pub(crate) struct Version {
    pub(crate) finding: Finding,
    pub(crate) at_ns: u64,
    /// Ranks of the job.
    pub(crate) ranks: BTreeSet<u32>,
}

/// Counts over jobs.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Count {
    pub(crate) jobs: u32,
    /// Faults, and those of them that cost enough to be a finding, but show too little or too late for it to be required.
    pub(crate) planted: u32,
    pub(crate) allowed: u32,
    pub(crate) required: u32,
    pub(crate) right: u32,
    pub(crate) wrong: u32,
    pub(crate) missed: u32,
    pub(crate) other_operation: u32,
    pub(crate) late: u32,
}

impl Count {
    pub(crate) fn add(&mut self, o: &Count) {
        self.jobs += o.jobs;
        self.planted += o.planted;
        self.allowed += o.allowed;
        self.required += o.required;
        self.right += o.right;
        self.wrong += o.wrong;
        self.missed += o.missed;
        self.other_operation += o.other_operation;
        self.late += o.late;
    }

    pub(crate) fn precision(&self) -> f64 {
        share(self.right, self.right + self.wrong)
    }

    pub(crate) fn recall(&self) -> f64 {
        share(self.right, self.required)
    }

    pub(crate) fn is_clean(&self) -> bool {
        self.wrong + self.missed + self.other_operation + self.late == 0
    }
}

fn share(of: u32, all: u32) -> f64 {
    if all == 0 { 1.0 } else { f64::from(of) / f64::from(all) }
}

/// What was found on one path.
#[derive(Debug)]
pub(crate) struct Verdict {
    pub(crate) way: Way,
    pub(crate) count: Count,
    /// What is wrong with it, in words.
    pub(crate) flaws: Vec<String>,
    /// Each finding, in words, with the severity that each finding had last.
    pub(crate) found: Vec<String>,
}

/// A job, what is true of it, and what was found.
#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) spec: Spec,
    pub(crate) exam: Exam,
    pub(crate) label: String,
    pub(crate) truths: Vec<Truth>,
    /// The operations that are open at the end, in words.
    pub(crate) open: Vec<String>,
    /// Where standing still begins at the end, as the join of each path sees it.
    pub(crate) origins: Vec<String>,
    pub(crate) verdicts: Vec<Verdict>,
}

impl Report {
    pub(crate) fn is_clean(&self) -> bool {
        self.verdicts.iter().all(|v| v.count.is_clean())
    }
}

/// Runs a job, watches it on all paths and judges what was found.
pub(crate) fn examine(spec: &Spec) -> Report {
    let exam = Exam::of(spec);
    let mut sim = Simulation::new(&exam.case, &Exam::name(spec), 0, 0);
    let mut watchers: Vec<(Way, Watcher, Vec<Version>)> =
        WAYS.iter().map(|w| (*w, Watcher::new(&exam.case, *w), Vec::new())).collect();
    let look = exam.case.look.0;
    let asked_ns = moment();
    let mut now = 0;
    while now <= exam.case.until.0 {
        let updates = sim.look(now);
        for (way, watcher, versions) in &mut watchers {
            for event in watcher.pass(&sim, updates.clone(), now, look) {
                if event.change != Change::Closed {
                    versions.push(Version { finding: event.finding, at_ns: now, ranks: BTreeSet::new() });
                }
            }
            if asked_ns.is_some_and(|t| now < t && t <= now + look) {
                let stands = watcher.join.standing(BEGIN + now);
                let all = describe_stalls(&stands).into_iter().chain(describe_origins(
                    *way,
                    &watcher.join,
                    &stands,
                ));
                all.for_each(|line| println!("    seed {} {way:?} then: {line}", spec.seed));
            }
        }
        now += look;
    }
    let mut happened = sim.stays();
    happened.sort_by_key(|s| (s.rank, s.ticket));
    let truths = truth::of(spec, &exam, &happened, &sim.entered());
    let open = truth::describe_open(&exam, &happened);
    let end_ns = BEGIN + exam.case.until.0;
    let origins = watchers
        .iter()
        .flat_map(|(way, w, _)| describe_origins(*way, &w.join, &w.join.standing(end_ns)))
        .collect();
    let verdicts = watchers
        .into_iter()
        .map(|(way, watcher, mut versions)| {
            assert!(watcher.refused().is_empty(), "seed {}: {:?}", spec.seed, watcher.refused());
            versions.iter_mut().for_each(|v| v.ranks = job_ranks(&exam, &v.finding));
            judge(&exam, &truths, &happened, way, &versions)
        })
        .collect();
    let label = match exam.planted.as_slice() {
        [] => "none".to_owned(),
        [one] => one.kind.as_str().to_owned(),
        _ => "two-at-once".to_owned(),
    };
    Report { spec: spec.clone(), exam, label, truths, open, origins, verdicts }
}

/// The moment of which `RINGWATCH_EXAM_AT` asks, in seconds: what stands still then is printed.
fn moment() -> Option<u64> {
    let text = std::env::var("RINGWATCH_EXAM_AT").ok()?;
    let seconds: f64 = text.parse().unwrap_or_else(|_| panic!("RINGWATCH_EXAM_AT is no number: {text}"));
    Some((seconds * 1e9) as u64)
}

fn describe(s: &Stall) -> String {
    let ranks = |side: &[(Rank, u32)]| side.iter().take(8).map(|(r, _)| r.0).collect::<Vec<_>>();
    let (waiting, lacking) = (ranks(&s.waiting), ranks(&s.lacking));
    format!("{} {} {} {:?} waiting {waiting:?} lacking {lacking:?}", s.comm, s.track, s.order, s.lack)
}

fn describe_stalls(standing: &Standstills) -> Vec<String> {
    (0..).map_while(|i| standing.stall(i)).map(|s| format!("stands: {}", describe(s))).collect()
}

/// Describes where standing still begins, and which processes left the order of their calls, a line each.
fn describe_origins(way: Way, join: &Join, standing: &Standstills) -> Vec<String> {
    let stall = |i: &usize| standing.stall(*i).map(describe);
    let line = |o: &Origin| {
        let circle: Vec<String> = o.circle.iter().filter_map(stall).collect();
        let circle = if circle.is_empty() { String::new() } else { format!(", circle {circle:?}") };
        Some(format!("{way:?} {}{circle}", stall(&o.first)?))
    };
    let left = |p: &Process| {
        let left = p.call_order.left()?;
        Some(format!("{way:?} job rank {:?} left the order of its calls: {left:?}", p.record.job.rank))
    };
    let left = join.processes().filter_map(left);
    standing.origins().iter().filter_map(line).chain(left).collect()
}

/// The ranks of the job that a finding names.
fn job_ranks(exam: &Exam, f: &Finding) -> BTreeSet<u32> {
    let Some((_, members)) = exam.members.iter().find(|(id, _)| *id == f.communicator) else {
        return BTreeSet::new();
    };
    f.ranks.iter().filter_map(|r| members.get(r.0 as usize).copied()).collect()
}

/// True where a finding is as severe as its truth: of a job that stands still somebody has to be told.
fn is_severe_enough(truth: &Truth, v: &Version) -> bool {
    truth.kind.is_slow() || v.finding.severity >= Severity::Warning
}

/// Whether a finding says what is true, apart from the operation and the time.
fn says(truth: &Truth, v: &Version, exam: &Exam) -> bool {
    let f = &v.finding;
    let is_named = truth.named.contains(&f.kind) || f.kind == Kind::Standstill && truth.is_anywhere;
    if !is_named || v.at_ns.saturating_add(CLOCKS_NS) < truth.planted_ns {
        return false;
    }
    if truth.kind == FaultKind::NodeLost && f.kind == Kind::SilentNode {
        return true;
    }
    if v.ranks.is_empty() {
        return truth.kind.is_data() || f.kind == Kind::Standstill;
    }
    let blind = exam.case.timed_of.is_some() || exam.case.abi < 3 || exam.case.launches_by_events;
    let size = exam.members.iter().find(|(id, _)| *id == f.communicator).map_or(0, |(_, m)| m.len());
    let culprits = &truth.culprits;
    let within = v.ranks.is_subset(culprits);
    match truth.kind {
        // One end of what is slow lies on the host.
        FaultKind::NicSlow if f.kind != Kind::SlowNode => !v.ranks.is_disjoint(culprits),
        // The ranks of all the groups whose data are slow, or some of them.
        FaultKind::NicSlow | FaultKind::NetworkSlow => within,
        FaultKind::PairSlow if f.kind == Kind::ChangePoint => v.ranks.is_superset(culprits),
        FaultKind::NodeLost | FaultKind::NodeSlow => within,
        FaultKind::DataStuck | FaultKind::LinkBroken => {
            // Without stamps and network events nothing says where data is stuck.
            within
                || v.ranks.is_subset(&truth.involved) && f.confidence == ringwatch::model::Confidence::Likely
        }
        FaultKind::GpuOccupied if v.ranks != *culprits => {
            // Without stamps nothing says on which GPU an operation has not started.
            blind && v.ranks.is_subset(&truth.involved)
        }
        // A circle has two ends.
        _ if f.kind == Kind::InterleavedCommunicators => v.ranks.len() <= 2 && v.ranks.is_superset(culprits),
        // So has a transfer whose ends wait for each other.
        FaultKind::TransferSkipped if is_between(f, exam, &v.ranks) => v.ranks.is_superset(culprits),
        // One call more of the one rank leaves the same counts as one call less of the other.
        FaultKind::CallExtra if size == 2 && is_member(f, exam, culprits) => true,
        // Of two that disagree nobody knows who is wrong.
        _ => v.ranks == *culprits || size == 2 && !v.ranks.is_disjoint(culprits),
    }
}

/// True for a mismatch of two ranks while nobody else has issued the operation: which of them is wrong cannot be known yet.
fn is_between_first_two(truth: &Truth, v: &Version, happened: &[Stay]) -> bool {
    let f = &v.finding;
    let key: OpKey = (f.communicator, f.operation.track, f.operation.order);
    let is_there = |s: &&Stay| (s.id, s.track, s.order) == key && s.issued_ns <= v.at_ns;
    f.kind == Kind::Mismatch
        && truth.named.contains(&f.kind)
        && v.ranks.len() == 2
        && v.ranks.is_superset(&truth.culprits)
        && happened.iter().filter(is_there).all(|s| v.ranks.contains(&s.rank))
}

/// True where all these ranks belong to the communicator of a finding.
fn is_member(f: &Finding, exam: &Exam, ranks: &BTreeSet<u32>) -> bool {
    let members = exam.members.iter().find(|(id, _)| *id == f.communicator).map(|(_, m)| m);
    members.is_some_and(|m| ranks.iter().all(|r| m.contains(r)))
}

/// True for a finding about a transfer between these two ranks.
fn is_between(f: &Finding, exam: &Exam, ranks: &BTreeSet<u32>) -> bool {
    let members = exam.members.iter().find(|(id, _)| *id == f.communicator).map(|(_, m)| m);
    let Some((members, Track::Pair(from, to))) = members.zip(Some(f.operation.track)) else { return false };
    let ends = [from, to].into_iter().filter_map(|r| members.get(r.0 as usize).copied());
    ends.collect::<BTreeSet<u32>>() == *ranks
}

fn in_right_operation(truth: &Truth, v: &Version, happened: &[Stay]) -> bool {
    let f = &v.finding;
    let key: OpKey = (f.communicator, f.operation.track, f.operation.order);
    match truth.kind {
        FaultKind::NeverJoined => true,
        // It names a communicator, of which one operation stands still.
        _ if f.kind == Kind::Standstill => {
            let is_of_it = |s: &&Stay| (s.id, s.track) == (key.0, key.1);
            happened.iter().filter(is_of_it).any(|s| s.ended_ns.is_none_or(|t| t > v.at_ns))
        }
        k if k.is_data() => true,
        k if k.is_slow() => truth::came_last(happened, key, &truth.culprits),
        FaultKind::NodeLost if f.kind == Kind::SilentNode => true,
        // All that is in a circle holds each other.
        _ if f.kind == Kind::InterleavedCommunicators => true,
        _ => truth.operations.is_empty() || truth.operations.contains(&key),
    }
}

/// Whether the ranks of a finding about late ranks, or about ranks that are away and may come back, really cost the job what a
/// warning may say: a long tail, a checkpoint that one rank writes alone.
fn is_worth_it(happened: &[Stay], exam: &Exam, v: &Version) -> bool {
    let away = v.finding.kind == Kind::MissingRank && v.finding.severity == Severity::Warning;
    if v.finding.kind != Kind::Straggler && !away {
        return false;
    }
    let size = exam.members.iter().find(|(id, _)| *id == v.finding.communicator).map_or(0, |(_, m)| m.len());
    let held = waits::held_by(happened, v.finding.communicator, size, &v.ranks, v.at_ns);
    held as f64 >= WORTH_A_WARNING * v.at_ns as f64
}

fn judge(exam: &Exam, truths: &[Truth], happened: &[Stay], way: Way, versions: &[Version]) -> Verdict {
    let needs = |need: Need| truths.iter().filter(|t| t.need == need).count() as u32;
    let mut count =
        Count { jobs: 1, planted: truths.len() as u32, allowed: needs(Need::Allowed), ..Count::default() };
    let mut flaws = Vec::new();
    let mut by_id: BTreeMap<u64, Vec<&Version>> = BTreeMap::new();
    for v in versions {
        by_id.entry(v.finding.id.0).or_default().push(v);
    }
    // One agent reads all of a job's records only where all of it is on its host.
    let unknowable = |t: &Truth| way == Way::Records && t.kind == FaultKind::NodeLost;
    for truth in truths.iter().filter(|t| t.need == Need::Required && !unknowable(t)) {
        count.required += 1;
        let hits: Vec<&Version> =
            versions.iter().filter(|v| says(truth, v, exam) && is_severe_enough(truth, v)).collect();
        let Some(first) = hits.first() else {
            count.missed += 1;
            flaws.push(format!("missed: {}", truth.kind.as_str()));
            continue;
        };
        count.right += 1;
        let right = hits.iter().find(|v| in_right_operation(truth, v, happened));
        if right.is_none() {
            count.other_operation += 1;
            flaws.push(format!("wrong operation: {}", line(first)));
        }
        let way_ns = if way == Way::Records { 0 } else { ON_THE_WAY };
        let at_ns = right.unwrap_or(first).at_ns;
        if at_ns > truth.deadline_ns + way_ns + exam.case.look.0 {
            count.late += 1;
            let late = at_ns.saturating_sub(truth.since_ns) as f64 / 1e9;
            flaws.push(format!("late, {late:.1} s after it began: {}", line(first)));
        }
    }
    for versions in by_id.values() {
        let is_bad = |v: &&&Version| v.finding.severity >= Severity::Warning;
        // Each of its versions that wakes somebody has to be true.
        let is_false = |v: &&&Version| {
            let is_said = |t: &Truth| {
                t.need != Need::Nothing && (says(t, v, exam) || is_between_first_two(t, v, happened))
            };
            // It names nobody, and is no lie where the job does stand still; that does not find the fault.
            let stands = |t: &Truth| t.cost >= 1.0 && t.since_ns <= v.at_ns.saturating_add(CLOCKS_NS);
            let is_true_standstill = v.finding.kind == Kind::Standstill && truths.iter().any(stands);
            !is_true_standstill && !truths.iter().any(is_said) && !is_worth_it(happened, exam, v)
        };
        let found = versions.iter().filter(is_bad).find(is_false);
        if let Some(v) = found.filter(|_| !truths.iter().any(unknowable)) {
            count.wrong += 1;
            flaws.push(format!("false: {}", line(v)));
        }
    }
    let found = by_id.values().filter_map(|all| {
        let (first, last) = all.first().zip(all.last())?;
        Some(format!("{:?} {}", last.finding.severity, line(first)))
    });
    Verdict { way, count, flaws, found: found.collect() }
}

/// A finding in a line, with ranks of the job.
pub(crate) fn line(v: &Version) -> String {
    let f = &v.finding;
    let ranks: Vec<u32> = v.ranks.iter().copied().take(12).collect();
    format!(
        "{} at {:.2} s, {} {:?}, job ranks {ranks:?} of {}, order {} {} in {}, since {:.2} s, {}: {}",
        f.kind.as_str(),
        v.at_ns as f64 / 1e9,
        f.cause.as_ref().map_or("", |c| c.as_str()),
        f.confidence,
        v.ranks.len(),
        f.operation.order,
        f.operation.track,
        f.communicator,
        f.since_ns.saturating_sub(BEGIN) as f64 / 1e9,
        f.operation.func,
        f.evidence.iter().take(3).map(|e| e.text.as_str()).collect::<Vec<_>>().join("; ")
    )
}
