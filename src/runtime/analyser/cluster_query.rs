//! The cluster for a screen: a question, and an answer that stays small whatever the cluster is.

use super::state::State;
use crate::cluster::from_json;
use crate::cluster::message::VERSION;
use crate::ingest::now_ns;
use crate::join::{ClusterRows, Join, RowLimits, View};
use crate::model::{
    At, CommId, Evidence, Finding, Fleet, NodeCell, NodeState, OpState, Rank, RankCell, Severity, Snapshot,
    Totals,
};
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// The longest question that is read, in bytes.
const QUESTION: usize = 4096;
/// The words of a search, in characters.
const SEARCH: usize = 100;
/// Nodes and findings at most.
const NODES: usize = 4096;
const FINDINGS: usize = 64;
/// Ranks that a finding names at most, and communicators whose ranks it holds up.
const NAMED: usize = 256;
const HELD: usize = 8;
/// Bytes that each kind of row takes at most, as JSON.
const BYTES: Bytes = Bytes {
    jobs: 16 << 10,
    comms: 32 << 10,
    states: 112 << 10,
    classes: 96 << 10,
    ranks: 256 << 10,
    segments: 48 << 10,
    losses: 16 << 10,
    findings: 96 << 10,
    nodes: 160 << 10,
};
/// Ranks that are read at most, of one operation and of all in an answer: a few bytes stand for thousands of millions.
const RANKS: usize = 1 << 16;
const ALL_RANKS: usize = 1 << 20;

struct Bytes {
    jobs: usize,
    comms: usize,
    states: usize,
    classes: usize,
    ranks: usize,
    segments: usize,
    losses: usize,
    findings: usize,
    nodes: usize,
}

/// The longest answer, in bytes: servers take 1 MiB by default.
const ANSWER: usize = 896 << 10;

/// The kinds of answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Want {
    /// The rows of a part.
    Snapshot,
}

/// A reader's question.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Question {
    /// The version of what is spoken.
    pub ringwatch: u32,
    /// The wanted answer.
    pub want: Want,
    /// Where one looks.
    #[serde(default)]
    pub at: At,
    /// Only rows that hold all these words.
    #[serde(default)]
    pub search: String,
}

impl Question {
    /// Asks for a part.
    pub fn new(at: At, search: String) -> Self {
        Question { ringwatch: VERSION, want: Want::Snapshot, at, search }
    }

    /// Reads a question; absent where it is none that is understood.
    pub fn read(bytes: &[u8]) -> Option<Self> {
        if bytes.len() > QUESTION {
            return None;
        }
        serde_json::from_slice::<Self>(bytes).ok().filter(|q| q.ringwatch == VERSION)
    }
}

/// An analyser's answer.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Answer {
    /// The version of what is spoken.
    pub ringwatch: u32,
    /// All partitions that are known.
    pub partitions: Vec<u32>,
    /// The partitions it speaks for: only their findings are in the answer.
    pub speaks_for: Vec<u32>,
    /// Why JetStream does not keep what it tells, where it does not.
    #[serde(default)]
    pub not_kept: Option<String>,
    /// Messages that it heard: who heard most knows most.
    pub heard: u64,
    /// The rows; of operations in flight without their ranks.
    pub snapshot: Snapshot,
    /// The ranks of operations in flight: `0+512>512!` for 512 that have started and one that has not issued it.
    pub(in crate::runtime) states: Vec<String>,
}

impl Answer {
    /// Reads an answer; absent where it is none of this version, or longer than any of ours.
    pub fn read(bytes: &[u8]) -> Option<Self> {
        if bytes.len() > ANSWER {
            return None;
        }
        // The ranks of an operation are one text, and that is as long as it is.
        from_json::<Self>(bytes, ANSWER).filter(|a| a.ringwatch == VERSION)
    }

    fn new(mut snapshot: Snapshot) -> Self {
        let mut states: Vec<String> =
            snapshot.in_flight.iter_mut().map(|f| written(&std::mem::take(&mut f.ranks))).collect();
        let dropped = fit(&mut states, BYTES.states);
        let kept = states.len();
        snapshot.in_flight.truncate(kept);
        if let Some(fleet) = &mut snapshot.fleet {
            fleet.rest.in_flight += dropped;
        }
        Answer { ringwatch: VERSION, snapshot, states, ..Answer::default() }
    }

    /// The rows as they were.
    pub fn into_snapshot(self) -> Snapshot {
        let mut snapshot = self.snapshot;
        let mut left = ALL_RANKS;
        for (f, states) in snapshot.in_flight.iter_mut().zip(&self.states) {
            f.ranks = read(states, RANKS.min(left));
            left -= f.ranks.len();
        }
        snapshot
    }
}

/// Equal neighbours as one: the first rank, how many more there are, and the state's mark.
fn written(cells: &[RankCell]) -> String {
    let mut out = String::new();
    let next = |a: &RankCell, b: &RankCell| a.state == b.state && a.rank.0.checked_add(1) == Some(b.rank.0);
    for run in cells.chunk_by(next) {
        let Some(first) = run.first() else { continue };
        let more = if run.len() > 1 { format!("+{}", run.len() - 1) } else { String::new() };
        out.push_str(&format!("{}{more}{}", first.rank, first.state.mark()));
    }
    out
}

/// Reads that, so many ranks at most; from what is none of it on nothing.
fn read(text: &str, most: usize) -> Vec<RankCell> {
    let mut out: Vec<RankCell> = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find(|c: char| !c.is_ascii_digit() && c != '+') {
        let (ranks, after) = rest.split_at(at);
        let mut chars = after.chars();
        let state = chars.next().and_then(|c| OpState::ALL.into_iter().find(|s| s.mark() == c));
        let (first, more) = ranks.split_once('+').unwrap_or((ranks, "0"));
        let (Some(state), Ok(first), Ok(more)) = (state, first.parse::<u32>(), more.parse::<u32>()) else {
            break;
        };
        let run = (first..=first.saturating_add(more)).map(|r| RankCell { rank: Rank(r), state });
        out.extend(run.take(most.saturating_sub(out.len())));
        rest = chars.as_str();
    }
    out
}

/// Keeps as many rows, from the first on, as bytes are there; how many that left out.
fn fit<T: Serialize>(rows: &mut Vec<T>, bytes: usize) -> usize {
    let all = rows.len();
    let mut used = 0;
    let fits = |row: &T| {
        used += serde_json::to_vec(row).map_or(usize::MAX / 2, |r| r.len() + 1);
        used <= bytes
    };
    let kept = rows.iter().map(fits).take_while(|fits| *fits).count();
    rows.truncate(kept);
    all - kept
}

/// A node, as far as it matters here.
#[derive(Debug, Clone, Copy)]
pub(super) struct Known<'a> {
    pub(super) name: &'a str,
    pub(super) silent: bool,
    pub(super) ended: bool,
}

/// The facts beside the join.
#[derive(Debug)]
pub(super) struct Around<'a> {
    pub(super) nodes: Vec<Known<'a>>,
    /// Everything that is wrong, whoever tells it.
    pub(super) open: &'a [Finding],
    /// The same without what others tell.
    pub(super) own: Vec<Finding>,
    pub(super) rates: &'a BTreeMap<CommId, f64>,
    pub(super) whole: bool,
    pub(super) missed: u64,
    pub(super) left_out: u64,
}

/// Answers a question about a join.
pub(super) fn answer(q: &Question, join: &Join, now_ns: u64, around: Around<'_>) -> Answer {
    let search: String = q.search.chars().take(SEARCH).collect();
    let words: Vec<String> = search.split_whitespace().map(str::to_lowercase).collect();
    let narrow = RowLimits {
        at: &q.at,
        words: &words,
        findings: around.open,
        rates: around.rates,
        whole: around.whole,
    };
    let ClusterRows { mut snapshot, mut rest, hosts, lost, processes } =
        View::new(join, now_ns).narrowed(&narrow);
    let totals = Totals {
        nodes: around.nodes.len(),
        silent: around.nodes.iter().filter(|n| n.silent && !n.ended).count(),
        processes,
        communicators: join.open(),
        findings: around.open.len(),
        ops_per_s: (!around.rates.is_empty()).then(|| around.rates.values().sum()),
        lost,
        missed: around.missed,
        left_out: around.left_out,
    };
    let mut nodes = cells(join, &q.at, &around, &hosts);
    nodes.retain(|n| {
        let text = n.name.to_lowercase();
        words.iter().all(|w| text.contains(w.as_str()))
    });
    // Where there is no room for all, the worst are shown.
    nodes.sort_by(|a, b| b.state.cmp(&a.state).then_with(|| a.name.cmp(&b.name)));
    let mut left = nodes.split_off(nodes.len().min(NODES));
    let kept = nodes.len() - fit(&mut nodes.clone(), BYTES.nodes);
    left.extend(nodes.split_off(kept));
    rest.nodes = left.len();
    rest.troubled = left.iter().filter(|n| n.state >= NodeState::Held).count();
    nodes.sort_by(|a, b| a.name.cmp(&b.name));
    let mut findings = around.own;
    findings.retain(|f| concerns(join, f, &q.at) && told(join, f, &words));
    findings.sort_by_key(|f| (Reverse(f.severity), f.since_ns, f.id));
    rest.findings = findings.len().saturating_sub(FINDINGS);
    findings.truncate(FINDINGS);
    findings.iter_mut().for_each(shorten);
    rest.findings += fit(&mut findings, BYTES.findings);
    rest.jobs += fit(&mut snapshot.jobs, BYTES.jobs);
    rest.comms += fit(&mut snapshot.comms, BYTES.comms);
    rest.classes += fit(&mut snapshot.classes, BYTES.classes);
    rest.ranks += fit(&mut snapshot.ranks, BYTES.ranks);
    rest.segments += fit(&mut snapshot.segments, BYTES.segments);
    fit(&mut snapshot.losses, BYTES.losses);
    snapshot.findings = findings;
    snapshot.fleet =
        Some(Fleet { at: q.at.clone(), totals, nodes, rest, analysers: 1, unspoken: Vec::new() });
    Answer::new(snapshot)
}

/// One cell a node of what is looked at.
fn cells(join: &Join, at: &At, around: &Around<'_>, hosts: &BTreeMap<String, usize>) -> Vec<NodeCell> {
    let all = at.job.is_none() && at.communicator.is_none();
    let mut cells: BTreeMap<&str, NodeCell> = BTreeMap::new();
    for n in &around.nodes {
        let processes = hosts.get(n.name).copied();
        if !all && processes.is_none() {
            continue;
        }
        let processes = processes.unwrap_or(0);
        let state = match (n.ended, n.silent) {
            (true, _) => NodeState::Ended,
            (_, true) => NodeState::Silent,
            _ if processes == 0 => NodeState::Idle,
            _ => NodeState::Well,
        };
        let silent = n.silent && !n.ended;
        cells.insert(n.name, NodeCell { name: n.name.to_owned(), processes, state, findings: 0, silent });
    }
    for f in around.open {
        let named = names(join, f);
        for host in &named {
            if let Some(c) = cells.get_mut(host) {
                let state =
                    if f.severity == Severity::Critical { NodeState::Blamed } else { NodeState::Named };
                (c.state, c.findings) = (c.state.max(state), c.findings + 1);
            }
        }
        for v in &f.victims {
            for host in join.hosts_of_ranks(v.communicator, &v.ranks) {
                if let Some(c) = cells.get_mut(host) {
                    c.state = c.state.max(NodeState::Held);
                }
            }
        }
    }
    cells.into_values().collect()
}

/// The hosts that a finding names.
fn names<'a>(join: &'a Join, f: &'a Finding) -> BTreeSet<&'a str> {
    let mut hosts: BTreeSet<&str> = join.hosts_of_ranks(f.communicator, &f.ranks).collect();
    hosts.extend(f.place.as_ref().map(|p| p.host.as_str()));
    hosts.extend(f.subject.as_deref());
    hosts
}

/// True where a finding is about what is looked at.
fn concerns(join: &Join, f: &Finding, at: &At) -> bool {
    let held = |c: CommId| f.communicator == c || f.victims.iter().any(|v| v.communicator == c);
    let on = |node: &str| {
        let victims = f.victims.iter().flat_map(|v| join.hosts_of_ranks(v.communicator, &v.ranks));
        names(join, f).contains(node) || victims.into_iter().any(|h| h == node)
    };
    let of = |job: &str| {
        let first = join.communicator(f.communicator).and_then(|c| c.members().values().next());
        let process = first.and_then(|m| join.process(m.record.segment));
        // What is about no communicator is about everybody.
        process.is_none_or(|p| p.record.job.name.as_deref().unwrap_or_default() == job)
    };
    at.communicator.is_none_or(held) && at.node.as_deref().is_none_or(on) && at.job.as_deref().is_none_or(of)
}

/// True where a finding holds all the words.
fn told(join: &Join, f: &Finding, words: &[String]) -> bool {
    words.is_empty() || {
        let ranks: Vec<String> = f.ranks.iter().map(|r| format!("rank {r}")).collect();
        let name = join
            .communicator(f.communicator)
            .and_then(|c| c.members().values().take(8).find_map(|m| m.record.name.as_deref()));
        let text = format!(
            "{} {} {} {} {} {} open {}",
            f.kind.as_str(),
            f.operation.func,
            ranks.join(" "),
            f.communicator,
            name.unwrap_or_default(),
            f.place.as_ref().map(ToString::to_string).unwrap_or_default(),
            f.advice
        )
        .to_lowercase();
        words.iter().all(|w| text.contains(w.as_str()))
    }
}

/// Leaves ranks out where a finding names thousands, and says so.
fn shorten(f: &mut Finding) {
    let more = f.ranks.len().saturating_sub(NAMED);
    if more > 0 {
        f.ranks.truncate(NAMED);
        let text = format!("{more} more ranks are not listed here");
        f.evidence.push(Evidence { text, value: None, unit: None });
    }
    f.victims.truncate(HELD);
    for v in &mut f.victims {
        v.ranks.truncate(NAMED);
    }
}

impl State {
    /// The answer to a reader's screen.
    pub(super) fn glance(&mut self, q: &Question) -> Answer {
        let now = now_ns();
        let mut open = self.monitor.findings();
        open.retain(|f| f.open);
        let own = self.open();
        let reader = self.monitor.source().reader();
        let mut around = Around {
            nodes: Vec::new(),
            open: &open,
            own,
            rates: self.pace.rates(),
            whole: true,
            missed: 0,
            left_out: 0,
        };
        let mut heard = 0;
        for (name, n) in reader.nodes() {
            around.nodes.push(Known { name, silent: n.silent_ns.is_some(), ended: n.ended() });
            heard += n.messages;
            around.missed += n.missed;
            if let Some(b) = &n.books {
                around.left_out += b.left_out.iter().map(|l| l.count).sum::<u64>();
                around.whole &= b.level == 0;
            }
        }
        let mut a = answer(q, self.monitor.join(), now, around);
        a.heard = heard;
        a.partitions = self.partitions.iter().copied().collect();
        a.speaks_for = self.leases.keys().copied().collect();
        a.not_kept = self.not_kept();
        a.snapshot.wall = self.monitor.wall(now);
        a
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::join::testing::{all_reduce, member, process};
    use crate::model::{Kind, OperationRef, Track, Update, Victims};

    const S: u64 = 1_000_000_000;

    #[test]
    fn an_answer_about_4096_ranks_stays_small_and_says_what_it_left_out() {
        const RANKS: u32 = 4096;
        let mut join = Join::new();
        for r in 0..RANKS {
            let Update::Segment(mut s) = process(r) else { unreachable!() };
            // One rank a node, with names as long as names may be.
            s.host = format!("{}-{r}", "n".repeat(200));
            s.job.name = Some(format!("job-{}", "j".repeat(200)));
            join.feed(Update::Segment(s));
            for comm in 0..16 {
                let Update::Comm(mut c) = member(r, RANKS, if r % 2 == 1 { 1 } else { 2 }) else {
                    unreachable!()
                };
                c.comm = CommId::unowned(comm);
                c.name = Some("c".repeat(256));
                join.feed(Update::Comm(c));
                // Every second rank lacks it: no two neighbours are alike.
                if r % 2 == 0 && comm < 8 {
                    let mut op = all_reduce(r, 1, 2 * S, Some((2 * S + 5_000, None)));
                    op.comm = CommId::unowned(comm);
                    join.feed(Update::Op(Box::new(op)));
                }
            }
        }
        join.tick(6 * S);
        let operation = OperationRef::named("AllReduce", Track::Collective, 1);
        let even = |odd: u32| (0..RANKS).filter(|r| r % 2 == odd).map(Rank).collect::<Vec<_>>();
        let open: Vec<Finding> = (0..500)
            .map(|n| {
                let mut f =
                    Finding::new(Kind::MissingRank, CommId::unowned(n % 16), even(1), operation.clone());
                f.id = crate::model::FindingId(n);
                f.victims = vec![Victims {
                    communicator: CommId::unowned(n % 16),
                    ranks: even(0),
                    order: 1,
                    track: Track::Collective,
                }];
                f.advice = "a".repeat(1000);
                f
            })
            .collect();
        let names: Vec<String> = (0..RANKS).map(|r| format!("{}-{r}", "n".repeat(200))).collect();
        let around = Around {
            nodes: names.iter().map(|name| Known { name, silent: false, ended: false }).collect(),
            open: &open,
            own: open.clone(),
            rates: &BTreeMap::new(),
            whole: true,
            missed: 0,
            left_out: 0,
        };
        let a = answer(&Question::new(At::default(), String::new()), &join, 6 * S, around);
        let text = serde_json::to_vec(&a).expect("JSON");
        assert!(text.len() <= ANSWER, "{} bytes", text.len());
        let s = serde_json::from_slice::<Answer>(&text).expect("read").into_snapshot();
        let fleet = s.fleet.as_ref().expect("a cluster");
        assert_eq!((fleet.totals.nodes, fleet.totals.processes, fleet.totals.findings), (4096, 4096, 500));
        assert!(fleet.nodes.len() > 500 && fleet.nodes.len() + fleet.rest.nodes == 4096);
        assert!(fleet.nodes.iter().all(|n| n.state == NodeState::Blamed), "the worst are shown");
        assert!(s.ranks.len() > 256 && s.ranks.len() + fleet.rest.ranks == 4096);
        assert!(!s.findings.is_empty() && s.findings.len() + fleet.rest.findings == 500);
        assert!(s.findings[0].evidence.iter().any(|e| e.text == "1792 more ranks are not listed here"));
        assert!(!s.in_flight.is_empty() && s.in_flight.len() + fleet.rest.in_flight == 8);
        assert_eq!(s.in_flight[0].ranks.len(), 4096, "an operation that is told is told whole");
        assert_eq!(s.in_flight[0].ranks[1].state, OpState::NotIssued);
    }

    #[test]
    fn the_ranks_of_an_operation_are_written_in_few_letters() {
        let state = |r: u32| match r {
            512 => OpState::NotIssued,
            514.. => OpState::Progressing,
            _ => OpState::Started,
        };
        let cells: Vec<RankCell> = (0..600).map(|r| RankCell { rank: Rank(r), state: state(r) }).collect();
        assert_eq!(written(&cells), "0+511>512!513>514+85~");
        assert_eq!(read(&written(&cells), RANKS), cells);
        assert_eq!(read("0+4000000000>", RANKS).len(), RANKS);
        for wrong in ["", ">", "x", "1+2", "+>", "99999999999>", "日"] {
            assert_eq!(read(wrong, RANKS), [], "{wrong}");
        }
    }

    #[test]
    fn questions_that_are_none_are_not_answered() {
        let q = Question::new(At { node: Some("a".into()), ..At::default() }, "x y".into());
        let text = serde_json::to_vec(&q).expect("JSON");
        assert_eq!(Question::read(&text), Some(q));
        let least = Question::read(br#"{"ringwatch":1,"want":"snapshot"}"#).expect("a question");
        assert_eq!(least, Question::new(At::default(), String::new()));
        for wrong in [&b""[..], b"{}", br#"{"ringwatch":9,"want":"snapshot"}"#, &[b' '; 5000]] {
            assert_eq!(Question::read(wrong), None);
        }
    }
}
