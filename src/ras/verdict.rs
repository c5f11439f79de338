//! The verdict that two answers of RAS allow.

use super::{Communicator, RankStatus, Status};
use crate::model::{
    Cause, CommId, Confidence, Evidence, Finding, Kind, OperationRef, Rank, Track, Victims, rank_list,
};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// The verdict.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Verdict {
    /// The findings. Ranks are those of the finding's communicator.
    pub findings: Vec<Finding>,
    /// The processes of each finding's ranks: host and pid.
    pub culprits: Vec<Vec<Process>>,
    /// What is known beyond the findings, and what is not, in sentences.
    pub notes: Vec<String>,
    /// True where something may stand still, and nothing tells which rank is to blame.
    pub cannot_tell: bool,
}

/// A process: host and pid.
pub type Process = (String, u32);

/// A communicator that stands still, and how far its ranks are.
struct Standing<'a> {
    comm: &'a Communicator,
    by_rank: BTreeMap<u32, &'a RankStatus>,
    /// The most operations that a rank has launched.
    most: u64,
    /// Ranks that have launched fewer.
    behind: BTreeSet<u32>,
    /// Ranks that launched as many, but of other functions.
    differ: BTreeSet<u32>,
}

/// Judges a job by two answers, so far apart.
pub fn judge(before: &Status, after: &Status, apart: Duration) -> Verdict {
    let mut verdict = Verdict::default();
    let Changes { unchanged, moving, new, active } = changes(before, after);
    let waits = waits(&unchanged);
    let mut named = BTreeSet::new();
    for one in &unchanged {
        missing(one, apart, &mut named, &mut verdict);
        lagging(one, &waits, &active, apart, &mut verdict);
        mismatched(one, apart, &mut verdict);
    }
    for comm in &after.communicators {
        aborted(comm, &mut verdict);
    }
    let known = after.communicators.len();
    if moving > 0 {
        verdict.notes.push(format!("operations are launched in {moving} of {known} communicators"));
    }
    if new > 0 {
        verdict
            .notes
            .push(format!("{new} communicators were made between the two answers, and are not judged"));
    }
    let unexplained = unexplained(&unchanged, after, &active, apart);
    if verdict.findings.is_empty() && !unexplained.is_empty() {
        verdict.cannot_tell = true;
        verdict.notes.extend(unexplained);
    }
    verdict.notes.push(
        "RAS counts launches of collectives. It counts no sends, receives and replays of graphs, and knows neither sizes nor \
         ends: start the job with ringwatch run, or load the plugin, to see these"
            .to_owned(),
    );
    verdict
}

/// What RAS's counters leave open, in sentences.
fn unexplained(
    unchanged: &[Standing<'_>],
    after: &Status,
    active: &BTreeSet<Process>,
    apart: Duration,
) -> Vec<String> {
    let mut notes = Vec::new();
    let known = after.communicators.len();
    if known == 0 {
        notes.push("RAS knows no communicator: the job has made none yet, or has freed all".to_owned());
    }
    // A communicator that is used now and then is idle while its processes work in another one.
    let is_idle = |one: &&Standing<'_>| {
        let mut processes = one.comm.ranks.iter().filter_map(|r| one.process(r.rank));
        one.behind.is_empty() && one.differ.is_empty() && processes.any(|p| !active.contains(&p))
    };
    let idle = unchanged.iter().filter(is_idle).count();
    if idle > 0 {
        notes.push(format!(
            "in {idle} of {known} communicators all ranks have launched the same operations, and none launched one for {:.1} s: \
             either the last one does not end, or all ranks are in their own code; RAS cannot tell these ranks apart",
            apart.as_secs_f64()
        ));
    }
    let in_making = after.communicators.iter().filter(|c| c.ranks.iter().any(|r| r.status.is_in_making()));
    let in_making = in_making.count();
    if in_making > 0 {
        notes.push(format!(
            "{in_making} communicators are not made yet: ranks may wait there for one that does not join"
        ));
    }
    if after.ras.timeouts_count > 0 {
        notes.push(format!("{} processes did not answer RAS in time", after.ras.timeouts_count));
    }
    notes
}

/// What happened between two answers.
struct Changes<'a> {
    /// The communicators in which no rank launched anything.
    unchanged: Vec<Standing<'a>>,
    /// Communicators in which one did, and communicators that are new.
    moving: usize,
    new: usize,
    /// The processes that launched something in any communicator.
    active: BTreeSet<Process>,
}

fn changes<'a>(before: &Status, after: &'a Status) -> Changes<'a> {
    let key = |c: &Communicator| (c.hash.clone(), c.secondary_hash.clone());
    let known: BTreeMap<_, &Communicator> = before.communicators.iter().map(|c| (key(c), c)).collect();
    let mut changes = Changes { unchanged: Vec::new(), moving: 0, new: 0, active: BTreeSet::new() };
    for comm in &after.communicators {
        let Some(was) = known.get(&key(comm)) else {
            changes.new += 1;
            continue;
        };
        let then: BTreeMap<u32, &RankStatus> = was.ranks.iter().map(|r| (r.rank, r)).collect();
        let has_launched =
            |r: &&RankStatus| then.get(&r.rank).is_some_and(|t| t.collective_counts != r.collective_counts);
        let launched: Vec<&RankStatus> = comm.ranks.iter().filter(has_launched).collect();
        changes.active.extend(launched.iter().filter_map(|r| process(r)));
        if launched.is_empty() {
            changes.unchanged.push(Standing::of(comm));
        } else {
            changes.moving += 1;
        }
    }
    changes
}

/// The process of a rank, where RAS knows it.
fn process(rank: &RankStatus) -> Option<Process> {
    (rank.pid > 0).then(|| (rank.host.clone(), rank.pid))
}

impl<'a> Standing<'a> {
    fn of(comm: &'a Communicator) -> Self {
        let most = comm.ranks.iter().map(RankStatus::launched).max().unwrap_or(0);
        let behind: BTreeSet<u32> =
            comm.ranks.iter().filter(|r| r.launched() < most).map(|r| r.rank).collect();
        let mut differ = BTreeSet::new();
        if behind.is_empty() {
            let mut alike: BTreeMap<&BTreeMap<String, u64>, Vec<u32>> = BTreeMap::new();
            comm.ranks.iter().for_each(|r| alike.entry(&r.collective_counts).or_default().push(r.rank));
            // Of two, neither is the usual one.
            let usual = alike.values().map(Vec::len).max().unwrap_or(0);
            let is_usual = |ranks: &Vec<u32>| ranks.len() == usual && usual * 2 > comm.ranks.len();
            if alike.len() > 1 {
                differ = alike.values().filter(|ranks| !is_usual(ranks)).flatten().copied().collect();
            }
        }
        let by_rank = comm.ranks.iter().map(|r| (r.rank, r)).collect();
        Standing { comm, by_rank, most, behind, differ }
    }

    fn process(&self, rank: u32) -> Option<Process> {
        process(self.by_rank.get(&rank)?)
    }

    /// The ranks that have launched an operation which others have not.
    fn ahead(&self) -> impl Iterator<Item = &RankStatus> {
        let is_split = !self.behind.is_empty();
        self.comm.ranks.iter().filter(move |r| is_split && r.launched() == self.most)
    }

    fn id(&self) -> CommId {
        CommId::unowned(self.comm.id())
    }

    fn finding(&self, kind: Kind, ranks: &BTreeSet<u32>, func: String, order: u64) -> Finding {
        let culprits: Vec<Rank> = ranks.iter().copied().map(Rank).collect();
        let operation = OperationRef::named(func, Track::Collective, order);
        let mut finding = Finding::new(kind, self.id(), culprits, operation);
        finding.confidence = Confidence::Likely;
        let others = self.comm.ranks.iter().map(|r| r.rank).filter(|r| !ranks.contains(r));
        let victims: Vec<Rank> = others.map(Rank).collect();
        if !victims.is_empty() {
            finding.victims.push(Victims {
                communicator: self.id(),
                ranks: victims,
                order,
                track: Track::Collective,
            });
        }
        finding
    }
}

/// Which processes each process waits for: those that lag in a communicator where it is ahead.
type Waits = BTreeMap<Process, BTreeSet<Process>>;

fn waits(standing: &[Standing<'_>]) -> Waits {
    let mut waits = Waits::new();
    for one in standing {
        let behind: BTreeSet<Process> = one.behind.iter().filter_map(|r| one.process(*r)).collect();
        for process in one.ahead().filter_map(process) {
            waits.entry(process).or_default().extend(behind.iter().cloned());
        }
    }
    waits
}

/// These processes, and those that they wait for, directly or not.
fn chain<'a>(from: &'a BTreeSet<Process>, waits: &'a Waits) -> BTreeSet<&'a Process> {
    let mut open: Vec<&Process> = from.iter().collect();
    let mut seen: BTreeSet<&Process> = from.iter().collect();
    while let Some(process) = open.pop() {
        let next = waits.get(process).into_iter().flatten();
        open.extend(next.filter(|p| seen.insert(p)));
    }
    seen
}

fn fact(text: String) -> Evidence {
    Evidence { text, value: None, unit: None }
}

fn ranks_of(ranks: impl IntoIterator<Item = u32>) -> String {
    let all: Vec<Rank> = ranks.into_iter().map(Rank).collect();
    format!("{} {}", if all.len() == 1 { "rank" } else { "ranks" }, rank_list(&all))
}

/// Reports ranks that have launched fewer operations than others, unless they wait elsewhere.
fn lagging(
    one: &Standing<'_>,
    waits: &Waits,
    active: &BTreeSet<Process>,
    apart: Duration,
    verdict: &mut Verdict,
) {
    if one.behind.is_empty() {
        return;
    }
    let behind: BTreeSet<Process> = one.behind.iter().filter_map(|r| one.process(*r)).collect();
    let chain = chain(&behind, waits);
    if chain.iter().any(|p| active.contains(*p)) {
        verdict.notes.push(format!(
            "{} of communicator {} launched fewer operations than others, and goes on in another communicator: not judged",
            ranks_of(one.behind.iter().copied()),
            one.id()
        ));
        return;
    }
    let is_held = |rank: &u32| one.process(*rank).is_some_and(|p| waits.contains_key(&p));
    let free: BTreeSet<u32> = one.behind.iter().copied().filter(|r| !is_held(r)).collect();
    let ahead: Vec<&RankStatus> = one.ahead().collect();
    let (kind, culprits) = if free.is_empty() {
        // Where those that they wait for lag by themselves, these are named in their own communicators.
        let is_circle = chain.iter().all(|p| waits.contains_key(*p));
        let is_known = verdict.findings.iter().any(|f| f.kind == Kind::InterleavedCommunicators);
        if is_known || !is_circle {
            return;
        }
        (Kind::InterleavedCommunicators, one.behind.clone())
    } else if ahead.len() * 4 <= one.comm.ranks.len() && free.len() == one.behind.len() && is_one_more(one) {
        (Kind::ShiftedOrder, ahead.iter().map(|r| r.rank).collect())
    } else {
        (Kind::MissingRank, free)
    };
    let least =
        one.comm.ranks.iter().filter(|r| one.behind.contains(&r.rank)).map(RankStatus::launched).min();
    let order = least.unwrap_or(0);
    let mut finding = one.finding(kind, &culprits, function(one), order);
    let mut by_count: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
    one.comm.ranks.iter().for_each(|r| by_count.entry(r.launched()).or_default().push(r.rank));
    for (launched, ranks) in by_count.into_iter().rev().take(8) {
        finding.evidence.push(fact(format!(
            "{} launched {launched} operations{}",
            ranks_of(ranks.iter().copied()),
            counts(one, ranks[0])
        )));
    }
    if kind == Kind::ShiftedOrder {
        let few = ranks_of(culprits.iter().copied());
        let text =
            format!("either {few} called once more than the others, or all others stay away from one call");
        finding.evidence.push(fact(text));
    }
    close(finding, one, &culprits, apart, verdict);
}

/// True where those that are ahead have launched exactly one operation more than all others.
fn is_one_more(one: &Standing<'_>) -> bool {
    let behind = one.comm.ranks.iter().filter(|r| one.behind.contains(&r.rank));
    behind.into_iter().all(|r| r.launched() + 1 == one.most)
}

/// The function of which counts differ; in words where there are several.
fn function(one: &Standing<'_>) -> String {
    let mut all: BTreeMap<&str, BTreeSet<u64>> = BTreeMap::new();
    for rank in &one.comm.ranks {
        for (func, n) in &rank.collective_counts {
            all.entry(func).or_default().insert(*n);
        }
    }
    let mut differ = all.into_iter().filter(|(_, counts)| counts.len() > 1).map(|(func, _)| func);
    match (differ.next(), differ.next()) {
        (Some(func), None) => func.to_owned(),
        _ => "a collective".to_owned(),
    }
}

/// ` (AllGather 12, AllReduce 101)`, without functions that nobody called.
fn counts(one: &Standing<'_>, rank: u32) -> String {
    let found = one.by_rank.get(&rank);
    let all = found.into_iter().flat_map(|r| &r.collective_counts).filter(|(_, n)| **n > 0);
    let all: Vec<String> = all.map(|(func, n)| format!("{func} {n}")).collect();
    if all.is_empty() { String::new() } else { format!(" ({})", all.join(", ")) }
}

/// Reports ranks that launched other functions than most, where all launched equally many.
fn mismatched(one: &Standing<'_>, apart: Duration, verdict: &mut Verdict) {
    if one.differ.is_empty() {
        return;
    }
    let order = one.most.saturating_sub(1);
    let mut finding = one.finding(Kind::Mismatch, &one.differ, function(one), order);
    for rank in one.comm.ranks.iter().take(8) {
        let counts = counts(one, rank.rank);
        finding.evidence.push(fact(format!(
            "rank {} launched {} operations{counts}",
            rank.rank,
            rank.launched()
        )));
    }
    close(finding, one, &one.differ, apart, verdict);
}

/// Reports ranks that RAS cannot reach, each process once.
fn missing(one: &Standing<'_>, apart: Duration, named: &mut BTreeSet<Process>, verdict: &mut Verdict) {
    let left = one.comm.missing_ranks.iter().filter(|r| r.status.has_left()).map(|r| r.rank);
    let left: Vec<u32> = left.collect();
    if !left.is_empty() {
        verdict.notes.push(format!(
            "{} of communicator {} answers, and has freed it",
            ranks_of(left),
            one.id()
        ));
    }
    let gone = one.comm.missing_ranks.iter().filter(|r| !r.status.has_left());
    let gone: Vec<_> = gone.filter(|r| r.pid == 0 || !named.contains(&(r.host.clone(), r.pid))).collect();
    let is_ending = one.comm.ranks.iter().any(|r| r.status.finalize_called || r.status.destroy_flag);
    if gone.is_empty() || is_ending {
        return;
    }
    let ranks: BTreeSet<u32> = gone.iter().map(|r| r.rank).collect();
    let mut finding = one.finding(Kind::MissingRank, &ranks, "a collective".to_owned(), one.most);
    for rank in gone.iter().take(8) {
        let why =
            if rank.status.considered_dead { "RAS considers it dead" } else { "it does not answer RAS" };
        let pid = if rank.pid > 0 { rank.pid.to_string() } else { "-".to_owned() };
        finding.evidence.push(fact(format!("rank {} (pid {pid} on {}): {why}", rank.rank, rank.host)));
    }
    if gone.iter().all(|r| r.status.considered_dead) {
        finding.cause = Some(Cause::ProcessGone(None));
    }
    finding.advice = "see whether these processes run, and the log of the job for how they ended".to_owned();
    finding.evidence.push(still(apart));
    let processes: Vec<Process> = gone.iter().map(|r| (r.host.clone(), r.pid)).collect();
    named.extend(processes.iter().cloned());
    verdict.culprits.push(processes);
    verdict.findings.push(finding);
}

/// Reports ranks that aborted a communicator, or whose communicator has an error.
fn aborted(comm: &Communicator, verdict: &mut Verdict) {
    let is_bad = |r: &&RankStatus| r.status.is_broken();
    let bad: BTreeSet<u32> = comm.ranks.iter().filter(is_bad).map(|r| r.rank).collect();
    if bad.is_empty() || bad.len() == comm.ranks.len() {
        return;
    }
    let one = Standing::of(comm);
    let mut finding = one.finding(Kind::AbortedRank, &bad, "a collective".to_owned(), one.most);
    for rank in comm.ranks.iter().filter(is_bad).take(8) {
        let what = if rank.status.abort_flag {
            "aborted it".to_owned()
        } else {
            format!("has the error {} in it", rank.status.async_error)
        };
        finding.evidence.push(fact(format!("rank {} {what}", rank.rank)));
    }
    finding.advice = "see the log of these ranks for the first error".to_owned();
    verdict.culprits.push(bad.iter().filter_map(|r| one.process(*r)).collect());
    verdict.findings.push(finding);
}

fn still(apart: Duration) -> Evidence {
    Evidence {
        text: format!("no rank of the communicator launched anything for {:.1} s", apart.as_secs_f64()),
        value: Some(apart.as_secs_f64()),
        unit: Some("s".into()),
    }
}

/// Adds what each finding about ranks that answer has.
fn close(
    mut finding: Finding,
    one: &Standing<'_>,
    culprits: &BTreeSet<u32>,
    apart: Duration,
    verdict: &mut Verdict,
) {
    finding.evidence.push(still(apart));
    let processes: Vec<Process> = culprits.iter().filter_map(|r| one.process(*r)).collect();
    let places: Vec<String> = culprits
        .iter()
        .filter_map(|r| one.by_rank.get(r))
        .take(8)
        .map(|r| {
            let device = r.cuda_dev.map_or_else(String::new, |d| format!(", CUDA device {d}"));
            format!("rank {} is pid {} on host {}{device}", r.rank, r.pid, r.host)
        })
        .collect();
    finding.evidence.extend(places.into_iter().map(fact));
    let pid = processes.first().map_or(0, |(_, pid)| *pid);
    let host = processes.first().map_or("-", |(host, _)| host);
    finding.advice = match finding.kind {
        Kind::Mismatch => {
            "compare the code paths of these ranks: each has to call the same functions in the same order"
                .to_owned()
        }
        Kind::ShiftedOrder => {
            format!("look why it calls once more than the others (py-spy dump --pid {pid} on {host})")
        }
        Kind::InterleavedCommunicators => "call the communicators in the same order on all ranks".to_owned(),
        _ => format!(
            "look at what it does now (py-spy dump --pid {pid} on {host}): a branch that skips the call, an exception, data loading or a checkpoint"
        ),
    };
    verdict.culprits.push(processes);
    verdict.findings.push(finding);
}

#[cfg(test)]
mod tests;
