//! The wait-for graph over processes and operations.
//!
//! It is built from one small row a rank, communicator and track (a [`RankProgress`]), so that it needs no operation
//! records: a node's segments and a cluster's beats can feed it alike. A communicator's operations complete in
//! order, so at most two of them matter: the first that some rank has not issued, and the oldest that all have
//! issued and some have not finished. An operation waits for the ranks that lack it; a process waits for the
//! operations in which it is. What is waited for and waits for nothing, and what waits for itself in a circle, is
//! where a hang begins; everything that leads there is held up by it.

use crate::model::{CommId, Rank, Track};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

/// How far a rank's oldest unfinished operation is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OpPhase {
    /// Issued, and known not to have started.
    Issued,
    /// Started on the GPU.
    Started,
    /// Nothing tells.
    InDoubt,
}

/// How far a rank is in one communicator and track.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RankProgress {
    /// Its process, by a number that is the same in all communicators.
    pub process: u32,
    /// Operations issued: the next issue order.
    pub issued: u64,
    /// Orders below this are finished: its oldest unfinished operation, if it was issued.
    pub done: u64,
    /// How far that one is.
    pub stage: OpPhase,
}

/// The state of its ranks that an operation waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum WaitingFor {
    /// Ranks have not issued it.
    Issue,
    /// All issued it; on some it has not started.
    Start,
    /// It started everywhere and does not end.
    End,
}

/// An operation that cannot complete yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stall {
    /// The communicator.
    pub comm: CommId,
    /// The track.
    pub track: Track,
    /// The issue order.
    pub order: u64,
    /// The state that it waits for.
    pub lack: WaitingFor,
    /// The ranks that are in it, and their processes.
    pub waiting: Vec<(Rank, u32)>,
    /// The ranks it waits for, and their processes; empty where they all are in it.
    pub lacking: Vec<(Rank, u32)>,
    /// The ranks that are in it have issued it, and their GPUs have not started it: they wait in it only where they wait in
    /// nothing else.
    pub queued: bool,
}

impl Stall {
    /// True for what all ranks have to start, and in which nobody is seen to wait: none of them did, or those that did are
    /// through, as in rooted operations.
    pub(in crate::join) fn is_unseen(&self) -> bool {
        self.lack == WaitingFor::Start && self.waiting.is_empty()
    }

    /// The numbers of its processes are below this.
    pub(in crate::join) fn processes(&self) -> usize {
        self.waiting.iter().chain(&self.lacking).map(|(_, p)| *p as usize + 1).max().unwrap_or(0)
    }
}

/// Where a hang begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Origin {
    /// The stall in which it shows, as an index into the list of all.
    pub first: usize,
    /// The ranks that the operation waits for and that wait for nothing themselves; empty for an operation that
    /// all are in, and for a circle.
    pub ranks: Vec<Rank>,
    /// The stalls that wait for each other in a circle; empty where there is none.
    pub circle: Vec<usize>,
    /// The stalls that are held up by it, without those above.
    pub held_up: Vec<usize>,
}

impl Origin {
    /// Its stalls come so much later in a longer list.
    pub(in crate::join) fn shift(&mut self, by: usize) {
        self.first += by;
        self.circle.iter_mut().chain(&mut self.held_up).for_each(|i| *i += by);
    }
}

/// One communicator's and track's rows.
#[derive(Debug, Clone, Default)]
struct Table {
    /// By rank. Ranks may be any numbers: what segments say is not to be trusted with memory.
    fronts: Vec<(Rank, RankProgress)>,
    changed: bool,
    stalls: Vec<Arc<Stall>>,
}

impl Table {
    fn refresh(&mut self, comm: CommId, track: Track) {
        if !std::mem::take(&mut self.changed) {
            return;
        }
        self.stalls.clear();
        let (mut least, mut most, mut oldest) = (u64::MAX, 0, u64::MAX);
        for (_, f) in &self.fronts {
            least = least.min(f.issued);
            most = most.max(f.issued);
            oldest = oldest.min(f.done);
        }
        let rows = || self.fronts.iter().copied();
        let split = |waits: &dyn Fn(&RankProgress) -> bool, lacks: &dyn Fn(&RankProgress) -> bool| {
            let (mut waiting, mut lacking) = (Vec::new(), Vec::new());
            for (rank, f) in rows() {
                if lacks(&f) {
                    lacking.push((rank, f.process));
                } else if waits(&f) {
                    waiting.push((rank, f.process));
                }
            }
            (waiting, lacking)
        };
        if oldest < least && rows().all(|(_, f)| f.done > oldest || f.stage != OpPhase::InDoubt) {
            let at = |f: &RankProgress, stage| f.done == oldest && f.stage == stage;
            let (waiting, lacking) = split(&|f| at(f, OpPhase::Started), &|f| at(f, OpPhase::Issued));
            let lack = if lacking.is_empty() { WaitingFor::End } else { WaitingFor::Start };
            self.stalls.push(Arc::new(Stall {
                comm,
                track,
                order: oldest,
                lack,
                waiting,
                lacking,
                queued: false,
            }));
        }
        if least < most {
            let (waiting, lacking) = split(&|f| f.issued > least, &|f| f.issued == least);
            let lack = WaitingFor::Issue;
            self.stalls.push(Arc::new(Stall {
                comm,
                track,
                order: least,
                lack,
                waiting,
                lacking,
                queued: false,
            }));
        }
    }
}

/// The graph.
#[derive(Debug, Clone, Default)]
pub struct WaitGraph {
    tables: BTreeMap<(CommId, Track), Table>,
    single: BTreeMap<CommId, Vec<Arc<Stall>>>,
    processes: usize,
}

impl WaitGraph {
    /// An empty graph.
    pub fn new() -> Self {
        Self::default()
    }

    /// A rank's row, new or changed; `None` takes it away, where it is not to be relied on.
    pub fn set(&mut self, comm: CommId, track: Track, rank: Rank, front: Option<RankProgress>) {
        let table = self.tables.entry((comm, track)).or_default();
        let dense = rank.0 as usize;
        let at = match table.fronts.get(dense) {
            Some((r, _)) if *r == rank => Ok(dense),
            _ => table.fronts.binary_search_by_key(&rank, |(r, _)| *r),
        };
        if let Some(f) = front {
            self.processes = self.processes.max(f.process as usize + 1);
        }
        match (at, front) {
            (Ok(at), Some(f)) if table.fronts[at].1 == f => return,
            (Ok(at), Some(f)) => table.fronts[at].1 = f,
            (Ok(at), None) => {
                table.fronts.remove(at);
            }
            (Err(at), Some(f)) => table.fronts.insert(at, (rank, f)),
            (Err(_), None) => return,
        }
        table.changed = true;
    }

    /// All rows of a communicator's track, sorted by rank, in place of those that it had. Returns the operations of it
    /// that cannot complete yet.
    pub fn replace(&mut self, comm: CommId, track: Track, rows: Vec<(Rank, RankProgress)>) -> &[Arc<Stall>] {
        if rows.is_empty() {
            self.tables.remove(&(comm, track));
            return &[];
        }
        let table = self.tables.entry((comm, track)).or_default();
        if table.fronts != rows {
            let last = rows.iter().map(|(_, f)| f.process as usize + 1).max();
            self.processes = self.processes.max(last.unwrap_or(0));
            table.fronts = rows;
            table.changed = true;
        }
        table.refresh(comm, track);
        &table.stalls
    }

    /// The rows of a communicator's track, by rank.
    pub fn rows(&self, comm: CommId, track: Track) -> &[(Rank, RankProgress)] {
        self.tables.get(&(comm, track)).map_or(&[], |t| &t.fronts)
    }

    /// A communicator's operations of few ranks, such as transfers, in place of those that it had: they are no part of a
    /// table.
    pub fn replace_single(&mut self, comm: CommId, stalls: Vec<Stall>) {
        self.single.remove(&comm);
        stalls.into_iter().for_each(|s| self.add(s));
    }

    /// One more of them.
    pub fn add(&mut self, stall: Stall) {
        self.processes = self.processes.max(stall.processes());
        self.single.entry(stall.comm).or_default().push(Arc::new(stall));
    }

    /// Forgets a communicator; true where something was known of it.
    pub fn forget(&mut self, comm: CommId) -> bool {
        let all = (comm, Track::Collective)..=(comm, Track::Pair(Rank(u32::MAX), Rank(u32::MAX)));
        let of: Vec<(CommId, Track)> = self.tables.range(all).map(|(k, _)| *k).collect();
        for key in &of {
            self.tables.remove(key);
        }
        let single = self.single.remove(&comm).is_some();
        single || !of.is_empty()
    }

    /// The number of processes that are in the graph: theirs are below this.
    pub(in crate::join) fn processes(&self) -> usize {
        self.processes
    }

    /// The operations that cannot complete yet.
    pub fn stalls(&mut self) -> Vec<Arc<Stall>> {
        for ((comm, track), table) in &mut self.tables {
            table.refresh(*comm, *track);
        }
        let mut stalls: Vec<Arc<Stall>> = self.tables.values().flat_map(|t| &t.stalls).cloned().collect();
        stalls.extend(self.single.values().flatten().cloned());
        stalls
    }
}

/// Where standing still begins, of these operations. `since` says when an operation began to stand still: a process that is
/// lacking in several is told of in the first. `gone` are the processes that wait for nobody any more, whatever they issued.
pub fn origins<K: Ord>(stalls: &[Arc<Stall>], since: impl Fn(&Stall) -> K, gone: &[u32]) -> Vec<Origin> {
    let processes = stalls.iter().map(|s| s.processes()).max().unwrap_or(0);
    Graph::new(stalls, processes, gone).origins(since)
}

/// The two kinds of edges, each kept with its reverse. Nodes are the stalls, then the processes.
struct Graph<'a> {
    stalls: &'a [Arc<Stall>],
    /// By process: the stalls in which it is.
    is_in: Rows,
    /// By process: the stalls that lack it.
    lacked_by: Rows,
}

/// Lists of small numbers, one a row, without an allocation each.
struct Rows {
    ends: Vec<u32>,
    items: Vec<u32>,
}

impl Rows {
    /// From (row, item) pairs, given twice in the same order.
    fn new<I: Iterator<Item = (u32, u32)>>(rows: usize, pairs: impl Fn() -> I) -> Self {
        let mut ends = vec![0u32; rows + 1];
        for (row, _) in pairs() {
            ends[row as usize + 1] += 1;
        }
        for i in 1..ends.len() {
            ends[i] += ends[i - 1];
        }
        let mut next = ends.clone();
        let mut items = vec![0; ends.last().map_or(0, |n| *n as usize)];
        for (row, item) in pairs() {
            items[next[row as usize] as usize] = item;
            next[row as usize] += 1;
        }
        Rows { ends, items }
    }

    fn of(&self, row: usize) -> &[u32] {
        &self.items[self.ends[row] as usize..self.ends[row + 1] as usize]
    }
}

impl<'a> Graph<'a> {
    fn new(stalls: &'a [Arc<Stall>], processes: usize, gone: &[u32]) -> Self {
        // A process that has several ranks of a communicator may be in an operation and lack it: then it is what
        // holds it up.
        let mut lacks = vec![u32::MAX; processes];
        let mut both: BTreeSet<(u32, u32)> = BTreeSet::new();
        for (i, s) in (0u32..).zip(stalls) {
            s.lacking.iter().for_each(|(_, p)| lacks[*p as usize] = i);
            both.extend(s.waiting.iter().filter(|(_, p)| lacks[*p as usize] == i).map(|(_, p)| (*p, i)));
        }
        let edges = |of: fn(&Stall) -> &[(Rank, u32)]| {
            (0u32..).zip(stalls).flat_map(move |(i, s)| of(s).iter().map(move |(_, p)| (*p, i)))
        };
        let mut is_gone = vec![false; processes];
        let known = gone.iter().filter(|p| (**p as usize) < processes);
        known.for_each(|p| is_gone[*p as usize] = true);
        let is_free = |(p, _): &(u32, u32)| gone.is_empty() || !is_gone[*p as usize];
        let in_both = |e: &(u32, u32)| !both.is_empty() && both.contains(e);
        let is_queued = |i: u32| stalls[i as usize].queued;
        let mut is_elsewhere = vec![false; processes];
        if stalls.iter().any(|s| s.queued) {
            let started = edges(|s| &s.waiting).filter(|e| !is_queued(e.1) && !in_both(e));
            started.for_each(|(p, _)| is_elsewhere[p as usize] = true);
        }
        let waiting = || {
            edges(|s| &s.waiting).filter(|e| !(in_both(e) || is_elsewhere[e.0 as usize] && is_queued(e.1)))
        };
        Graph {
            stalls,
            is_in: Rows::new(processes, || waiting().filter(is_free)),
            lacked_by: Rows::new(processes, || edges(|s| &s.lacking)),
        }
    }

    /// The nodes that a node waits for, by number.
    fn next(&self, node: usize, i: usize) -> Option<usize> {
        match self.stalls.get(node) {
            Some(s) => s.lacking.get(i).map(|(_, p)| self.stalls.len() + *p as usize),
            None => self.is_in.of(node - self.stalls.len()).get(i).map(|s| *s as usize),
        }
    }

    /// Strongly connected components (Tarjan, without recursion), by node; and of each whether an edge leaves it.
    fn components(&self) -> (Vec<u32>, Vec<bool>) {
        const NONE: u32 = u32::MAX;
        let nodes = self.stalls.len() + self.is_in.ends.len() - 1;
        let mut index = vec![NONE; nodes];
        let mut low = vec![0u32; nodes];
        let mut component = vec![NONE; nodes];
        let mut leaves: Vec<bool> = Vec::new();
        let (mut stack, mut path): (Vec<usize>, Vec<(usize, usize)>) = (Vec::new(), Vec::new());
        let mut count = 0;
        for start in 0..self.stalls.len() {
            if index[start] != NONE {
                continue;
            }
            path.push((start, 0));
            while let Some((node, i)) = path.pop() {
                if i == 0 {
                    (index[node], low[node]) = (count, count);
                    count += 1;
                    stack.push(node);
                }
                if let Some(to) = self.next(node, i) {
                    path.push((node, i + 1));
                    if index[to] == NONE {
                        path.push((to, 0));
                    } else if component[to] == NONE {
                        low[node] = low[node].min(index[to]);
                    }
                    continue;
                }
                if low[node] == index[node] {
                    let id = leaves.len() as u32;
                    leaves.push(false);
                    while let Some(n) = stack.pop() {
                        component[n] = id;
                        if n == node {
                            break;
                        }
                    }
                }
                if let Some((parent, _)) = path.last() {
                    low[*parent] = low[*parent].min(low[node]);
                }
            }
        }
        for node in 0..nodes {
            let own = component[node];
            if own == NONE {
                continue;
            }
            let leaving = (0..).map_while(|i| self.next(node, i)).any(|to| component[to] != own);
            leaves[own as usize] |= leaving;
        }
        (component, leaves)
    }

    fn origins<K: Ord>(&self, since: impl Fn(&Stall) -> K) -> Vec<Origin> {
        let (component, leaves) = self.components();
        let ends =
            |node: usize| component.get(node).is_some_and(|c| leaves.get(*c as usize).is_some_and(|l| !*l));
        let mut order: Vec<usize> = (0..self.stalls.len()).collect();
        order.sort_by_cached_key(|i| {
            let s = &self.stalls[*i];
            (since(s), s.comm, s.track, s.order)
        });
        let mut origins: Vec<Origin> = Vec::new();
        let mut told = vec![false; self.is_in.ends.len() - 1];
        let mut circles: BTreeMap<u32, usize> = BTreeMap::new();
        for i in order {
            let s = &self.stalls[i];
            let of = |ranks, circle| Origin { first: i, ranks, circle, held_up: Vec::new() };
            if s.lacking.is_empty() {
                origins.push(of(Vec::new(), Vec::new()));
            } else if ends(i) {
                // An operation at which the graph ends and that lacks somebody is in a circle.
                match circles.get(&component[i]) {
                    Some(at) => origins[*at].circle.push(i),
                    None => {
                        circles.insert(component[i], origins.len());
                        origins.push(of(Vec::new(), vec![i]));
                    }
                }
            } else {
                let fresh: Vec<Rank> = s
                    .lacking
                    .iter()
                    .filter(|(_, p)| {
                        let root =
                            ends(self.stalls.len() + *p as usize) && self.is_in.of(*p as usize).is_empty();
                        root && !std::mem::replace(&mut told[*p as usize], root)
                    })
                    .map(|(r, _)| *r)
                    .collect();
                if !fresh.is_empty() {
                    origins.push(of(fresh, Vec::new()));
                }
            }
        }
        self.hold_up(&mut origins);
        origins
    }

    /// Walks back from every origin to what waits for it. A stall is held up by one origin.
    fn hold_up(&self, origins: &mut [Origin]) {
        let mut claimed = vec![false; self.stalls.len()];
        for o in &*origins {
            claimed[o.first] = true;
            o.circle.iter().for_each(|i| claimed[*i] = true);
        }
        let mut seen = vec![false; self.is_in.ends.len() - 1];
        for o in origins {
            let first = &self.stalls[o.first];
            let mut processes: VecDeque<u32> = VecDeque::new();
            let culprits: BTreeSet<Rank> = o.ranks.iter().copied().collect();
            let ranks = first.lacking.iter().filter(|(r, _)| culprits.contains(r)).map(|(_, p)| *p);
            processes.extend(ranks);
            for i in std::iter::once(&o.first).chain(&o.circle) {
                processes.extend(self.stalls[*i].waiting.iter().map(|(_, p)| *p));
            }
            while let Some(p) = processes.pop_front() {
                if std::mem::replace(&mut seen[p as usize], true) {
                    continue;
                }
                for i in self.lacked_by.of(p as usize) {
                    if !std::mem::replace(&mut claimed[*i as usize], true) {
                        o.held_up.push(*i as usize);
                        processes.extend(self.stalls[*i as usize].waiting.iter().map(|(_, p)| *p));
                    }
                }
            }
            o.held_up.sort_unstable();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: CommId = CommId::unowned(1);
    const B: CommId = CommId::unowned(2);
    const C: CommId = CommId::unowned(3);

    fn waits(rows: &[(CommId, u32, u32, u64, u64, OpPhase)]) -> WaitGraph {
        let mut w = WaitGraph::new();
        for (comm, rank, process, issued, done, stage) in rows.iter().copied() {
            let front = RankProgress { process, issued, done, stage };
            w.set(comm, Track::Collective, Rank(rank), Some(front));
        }
        w
    }

    use OpPhase::{InDoubt, Issued, Started};

    #[test]
    fn nobody_waits_where_all_are_equal() {
        let mut w = waits(&[(A, 0, 0, 5, 5, InDoubt), (A, 1, 1, 5, 5, InDoubt)]);
        assert_eq!(origins(&w.stalls(), |_| 0, &[]), vec![]);
        assert_eq!(w.stalls(), []);
    }

    #[test]
    fn the_rank_that_did_not_issue_is_where_it_begins_and_chains_lead_there() {
        // Process 2 lacks in A; process 1 waits in A and lacks in B; process 3 waits in B.
        let mut w = waits(&[
            (A, 0, 1, 8, 7, Started),
            (A, 1, 2, 7, 7, InDoubt),
            (B, 0, 1, 3, 3, InDoubt),
            (B, 1, 3, 4, 3, Started),
        ]);
        let found = origins(&w.stalls(), |_| 0, &[]);
        assert_eq!(found.len(), 1, "{found:?}");
        let o = &found[0];
        assert_eq!((w.stalls()[o.first].comm, o.ranks.as_slice()), (A, [Rank(1)].as_slice()));
        assert_eq!(o.held_up.iter().map(|i| w.stalls()[*i].comm).collect::<Vec<_>>(), [B]);
    }

    #[test]
    fn one_process_missing_in_three_communicators_is_one_origin_at_the_earliest() {
        let mut w = waits(&[
            (A, 0, 0, 8, 7, Started),
            (A, 1, 9, 7, 7, InDoubt),
            (B, 0, 1, 4, 3, Started),
            (B, 1, 9, 3, 3, InDoubt),
            (C, 0, 2, 4, 3, Started),
            (C, 1, 9, 3, 3, InDoubt),
        ]);
        let found = origins(&w.stalls(), |s| if s.comm == B { 1 } else { 2 }, &[]);
        assert_eq!(found.len(), 1);
        assert_eq!((w.stalls()[found[0].first].comm, found[0].held_up.len()), (B, 2));
    }

    #[test]
    fn a_circle_of_two_and_of_three() {
        let mut w = waits(&[
            (A, 0, 0, 1, 0, Started),
            (A, 1, 1, 0, 0, InDoubt),
            (B, 0, 0, 0, 0, InDoubt),
            (B, 1, 1, 1, 0, Started),
        ]);
        let found = origins(&w.stalls(), |_| 0, &[]);
        assert_eq!((found.len(), found[0].circle.len()), (1, 2), "{found:?}");
        // All issued: the starts alone show it.
        let mut w = waits(&[
            (A, 0, 0, 1, 0, Started),
            (A, 1, 1, 1, 0, Issued),
            (B, 0, 1, 1, 0, Started),
            (B, 1, 2, 1, 0, Issued),
            (C, 0, 2, 1, 0, Started),
            (C, 1, 0, 1, 0, Issued),
        ]);
        let found = origins(&w.stalls(), |_| 0, &[]);
        assert_eq!((found.len(), found[0].circle.len()), (1, 3), "{found:?}");
    }

    #[test]
    fn who_has_started_something_waits_in_nothing_that_is_queued() {
        let transfer = |(from, to): (u32, u32), queued| Stall {
            comm: A,
            track: Track::Pair(Rank(from), Rank(to)),
            order: 0,
            lack: WaitingFor::Issue,
            waiting: vec![(Rank(from), from)],
            lacking: vec![(Rank(to), to)],
            queued,
        };
        // Processes 1 and 2 wait for each other, and process 0 for process 1.
        let circle = |queued| {
            let mut w = WaitGraph::new();
            [(1, 2), (2, 1), (0, 1)].into_iter().for_each(|pair| w.add(transfer(pair, false)));
            w.add(transfer((1, 0), queued));
            origins(&w.stalls(), |_| 0, &[])[0].circle.len()
        };
        assert_eq!((circle(true), circle(false)), (2, 4));
        let mut w = WaitGraph::new();
        w.add(transfer((0, 1), false));
        w.add(transfer((1, 0), true));
        assert_eq!(origins(&w.stalls(), |_| 0, &[])[0].circle.len(), 2, "process 1 waits in nothing else");
    }

    #[test]
    fn a_process_that_is_gone_is_in_no_circle() {
        let rows = [
            (A, 0, 0, 1, 0, Started),
            (A, 1, 1, 0, 0, InDoubt),
            (B, 0, 0, 0, 0, InDoubt),
            (B, 1, 1, 1, 0, Started),
        ];
        let mut w = waits(&rows);
        let found = origins(&w.stalls(), |_| 0, &[1]);
        assert_eq!(
            (found.len(), found[0].circle.len(), found[0].ranks.as_slice()),
            (1, 0, [Rank(1)].as_slice())
        );
        assert_eq!(w.stalls()[found[0].first].comm, A, "process 0 waits for it there");
    }

    #[test]
    fn an_operation_that_all_are_in_is_an_origin_itself() {
        let mut w = waits(&[
            (A, 0, 0, 6, 5, Started),
            (A, 1, 1, 6, 5, Started),
            (B, 0, 1, 3, 3, InDoubt),
            (B, 1, 2, 4, 3, Started),
        ]);
        let found = origins(&w.stalls(), |_| 0, &[]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(w.stalls()[found[0].first].lack, WaitingFor::End);
        assert_eq!(found[0].held_up.len(), 1);
    }

    #[test]
    fn a_process_of_two_ranks_is_in_no_circle_with_itself() {
        let mut w = waits(&[(A, 0, 0, 6, 5, Started), (A, 1, 0, 5, 5, InDoubt)]);
        let found = origins(&w.stalls(), |_| 0, &[]);
        assert_eq!((found.len(), found[0].ranks.as_slice()), (1, [Rank(1)].as_slice()));
    }

    #[test]
    fn rows_that_are_taken_away_say_nothing() {
        let mut w = waits(&[(A, 0, 0, 6, 5, Started), (A, 1, 1, 5, 5, InDoubt)]);
        w.set(A, Track::Collective, Rank(1), None);
        let found = origins(&w.stalls(), |_| 0, &[]);
        assert!(found.iter().all(|o| o.ranks.is_empty()), "{found:?}");
    }
}
