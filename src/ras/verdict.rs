//! The verdict that two looks at RAS's counters allow.

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
    /// The most operations that a rank has launched.
    most: u64,
    /// Ranks that have launched fewer.
    behind: BTreeSet<u32>,
    /// Ranks that launched as many, but of other functions.
    differ: BTreeSet<u32>,
}

/// Judges a job by two looks, so far apart.
pub fn judge(before: &Status, after: &Status, apart: Duration) -> Verdict {
    let mut verdict = Verdict::default();
    let (standing, moving, new) = standing(before, after);
    let waits = waits(&standing);
    for one in &standing {
        missing(one, apart, &mut verdict);
        lagging(one, &waits, apart, &mut verdict);
        mismatched(one, apart, &mut verdict);
    }
    for comm in &after.communicators {
        aborted(comm, &mut verdict);
    }
    let known = after.communicators.len();
    if known == 0 {
        verdict
            .notes
            .push("RAS knows no communicator: the job has made none yet, or has freed all".to_owned());
    }
    if moving > 0 {
        verdict.notes.push(format!("operations are launched in {moving} of {known} communicators"));
    }
    if new > 0 {
        verdict
            .notes
            .push(format!("{new} communicators were made between the two looks, and are not judged"));
    }
    let quiet = standing.iter().filter(|s| s.behind.is_empty() && s.differ.is_empty() && s.most > 0).count();
    if quiet > 0 && verdict.findings.is_empty() {
        verdict.cannot_tell = moving == 0;
        verdict.notes.push(format!(
            "in {quiet} of {known} communicators all ranks have launched the same operations, and none launched one for {:.1} s: \
             either the last one does not end, or all ranks are in their own code; RAS cannot tell these ranks apart",
            apart.as_secs_f64()
        ));
    }
    if after.ras.timeouts_count > 0 {
        let n = after.ras.timeouts_count;
        verdict.notes.push(format!("{n} processes did not answer RAS in time"));
    }
    verdict.notes.push(
        "RAS counts launches of collectives. It counts no sends, receives and replays of graphs, and knows neither sizes nor \
         ends: start the job with ringwatch run, or load the plugin, to see these"
            .to_owned(),
    );
    verdict
}

/// The communicators in which no rank launched anything, how many others there are, and how many are new.
fn standing<'a>(before: &Status, after: &'a Status) -> (Vec<Standing<'a>>, usize, usize) {
    let key = |c: &Communicator| (c.hash.clone(), c.secondary_hash.clone());
    let known: BTreeMap<_, &Communicator> = before.communicators.iter().map(|c| (key(c), c)).collect();
    let (mut all, mut moving, mut new) = (Vec::new(), 0, 0);
    for comm in &after.communicators {
        let Some(was) = known.get(&key(comm)) else {
            new += 1;
            continue;
        };
        let counts = |c: &Communicator| -> BTreeMap<u32, BTreeMap<String, u64>> {
            c.ranks.iter().map(|r| (r.rank, r.collective_counts.clone())).collect()
        };
        let (then, now) = (counts(was), counts(comm));
        // A rank that stopped answering has not launched anything that anybody knows of.
        if now.iter().any(|(rank, count)| then.get(rank).is_some_and(|c| c != count)) {
            moving += 1;
            continue;
        }
        all.push(Standing::of(comm));
    }
    (all, moving, new)
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
        Standing { comm, most, behind, differ }
    }

    fn process(&self, rank: u32) -> Option<Process> {
        let found = self.comm.ranks.iter().find(|r| r.rank == rank)?;
        Some((found.host.clone(), found.pid))
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
        for rank in one.ahead() {
            waits.entry((rank.host.clone(), rank.pid)).or_default().extend(behind.iter().cloned());
        }
    }
    waits
}

/// True where these processes wait for each other alone: none of those that they wait for waits for nobody.
fn is_circle(from: &BTreeSet<Process>, waits: &Waits) -> bool {
    let mut open: Vec<&Process> = from.iter().collect();
    let mut seen: BTreeSet<&Process> = from.iter().collect();
    while let Some(process) = open.pop() {
        match waits.get(process) {
            Some(next) => open.extend(next.iter().filter(|p| seen.insert(p))),
            None => return false,
        }
    }
    true
}

fn fact(text: String) -> Evidence {
    Evidence { text, value: None, unit: None }
}

fn ranks_of(ranks: impl IntoIterator<Item = u32>) -> String {
    let all: Vec<Rank> = ranks.into_iter().map(Rank).collect();
    format!("{} {}", if all.len() == 1 { "rank" } else { "ranks" }, rank_list(&all))
}

/// Reports ranks that have launched fewer operations than others, unless they wait elsewhere.
fn lagging(one: &Standing<'_>, waits: &Waits, apart: Duration, verdict: &mut Verdict) {
    if one.behind.is_empty() {
        return;
    }
    let is_held = |rank: &u32| one.process(*rank).is_some_and(|p| waits.contains_key(&p));
    let free: BTreeSet<u32> = one.behind.iter().copied().filter(|r| !is_held(r)).collect();
    let ahead: Vec<&RankStatus> = one.ahead().collect();
    let (kind, culprits) = if free.is_empty() {
        // Where those that they wait for lag by themselves, these are named in their own communicators.
        let behind: BTreeSet<Process> = one.behind.iter().filter_map(|r| one.process(*r)).collect();
        let is_known = verdict.findings.iter().any(|f| f.kind == Kind::InterleavedCommunicators);
        if is_known || !is_circle(&behind, waits) {
            return;
        }
        (Kind::InterleavedCommunicators, one.behind.clone())
    } else if ahead.len() * 4 <= one.comm.ranks.len() && free.len() == one.behind.len() {
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
    close(finding, one, &culprits, apart, verdict);
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
    let found = one.comm.ranks.iter().find(|r| r.rank == rank);
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

/// Reports ranks that RAS cannot reach.
fn missing(one: &Standing<'_>, apart: Duration, verdict: &mut Verdict) {
    let gone = &one.comm.missing_ranks;
    let is_ending = one.comm.ranks.iter().any(|r| r.status.finalize_called || r.status.destroy_flag);
    if gone.is_empty() || is_ending {
        return;
    }
    let ranks: BTreeSet<u32> = gone.iter().map(|r| r.rank).collect();
    let mut finding = one.finding(Kind::MissingRank, &ranks, "a collective".to_owned(), one.most);
    for rank in gone.iter().take(8) {
        let why = match (rank.status.considered_dead, rank.status.unresponsive) {
            (true, _) => "RAS considers it dead",
            (false, true) => "it does not answer RAS",
            (false, false) => "RAS has no status of it",
        };
        finding.evidence.push(fact(format!("rank {} (pid {} on {}): {why}", rank.rank, rank.pid, rank.host)));
    }
    if gone.iter().all(|r| r.status.considered_dead) {
        finding.cause = Some(Cause::ProcessGone(None));
    }
    finding.advice = "see whether these processes run, and the log of the job for how they ended".to_owned();
    finding.evidence.push(still(apart));
    verdict.culprits.push(gone.iter().map(|r| (r.host.clone(), r.pid)).collect());
    verdict.findings.push(finding);
}

/// Reports ranks that aborted a communicator, or whose communicator has an error.
fn aborted(comm: &Communicator, verdict: &mut Verdict) {
    let is_bad = |r: &&RankStatus| r.status.abort_flag || r.status.async_error != 0;
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
        .filter_map(|r| one.comm.ranks.iter().find(|s| s.rank == *r))
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
