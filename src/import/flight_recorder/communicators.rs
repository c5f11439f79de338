//! The process groups of all dumps as communicators.

use super::Dated;
use super::dump::{Call, Dump, Entry};
use crate::model::{CommId, Func, Rank};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// PyTorch's description of the group of all ranks.
const DEFAULT: &str = "default_pg";
/// A call that is not finished for so long waits for somebody, in ns.
const OLD_NS: u64 = 3_000_000_000;

/// A process group.
#[derive(Debug)]
pub(super) struct Communicator {
    pub(super) id: CommId,
    /// The description that the job gave it, else its name.
    pub(super) name: String,
    /// The number of its ranks; absent where no dump lists them.
    pub(super) size: Option<u32>,
    /// All its ranks are known.
    is_listed: bool,
    /// The job's ranks in it, and their own numbers. Where no dump lists them, these are the ranks that have called something in it, by
    /// their numbers in the job.
    members: BTreeMap<u32, Rank>,
    globals: BTreeMap<Rank, u32>,
    /// The members of which there are dumps.
    dumped: BTreeSet<u32>,
    /// The numbers of its collectives, ascending. Calls that are not recorded leave gaps.
    sequences: Vec<u64>,
    calls: Vec<CallRow>,
    /// The newest collective that is known to have been called on all ranks, as one of `calls`.
    newest_done: Option<usize>,
    /// The newest collective in the dump of each rank.
    called: BTreeMap<u32, usize>,
}

/// The facts of all dumps together about one collective.
#[derive(Debug, Clone, Copy, Default)]
struct CallRow {
    /// Ranks that have called it.
    called: usize,
    /// When the first and the last of them did, Unix time in ns.
    first_ns: u64,
    last_ns: u64,
    /// It is finished on some rank by its state.
    is_finished: bool,
    /// PyTorch waits for it no more on some rank, over Gloo.
    is_retired: bool,
    /// It ends on no rank before all ranks have called it.
    is_joint: bool,
    /// All ranks have called it whose dumps are old enough to have it.
    is_complete: bool,
}

/// True for operations that end on no rank before all ranks have called them. The sender of a broadcast may be through alone.
fn is_joint(call: Call) -> bool {
    let joint = [Func::AllReduce, Func::AllGather, Func::ReduceScatter, Func::AlltoAll];
    matches!(call, Call::Collective(func) if joint.contains(&func))
}

impl Communicator {
    /// The job's ranks of which there are dumps.
    pub(super) fn ranks_with_dumps(&self) -> impl Iterator<Item = (u32, Rank)> {
        self.dumped.iter().filter_map(|g| Some((*g, self.rank(*g)?)))
    }

    pub(super) fn ranks_without_dumps(&self) -> impl Iterator<Item = u32> {
        self.members.keys().copied().filter(|g| !self.dumped.contains(g))
    }

    /// A rank's number here.
    pub(super) fn rank(&self, global: u32) -> Option<Rank> {
        self.members.get(&global).copied()
    }

    /// The job's number of a rank.
    pub(super) fn global(&self, rank: Rank) -> Option<u32> {
        self.globals.get(&rank).copied()
    }

    fn row(&self, sequence: u64) -> Option<usize> {
        self.sequences.binary_search(&sequence).ok()
    }

    /// The issue order of the first collective that a dump has. PyTorch's numbers begin with 1.
    fn first_order(&self) -> u64 {
        self.sequences.first().map_or(0, |first| first.saturating_sub(1))
    }

    /// The issue order of a collective, from 0, without gaps.
    pub(super) fn order(&self, sequence: u64) -> Option<u64> {
        Some(self.first_order() + self.row(sequence)? as u64)
    }

    /// True where a call is finished on its rank, by its own dump or by what the others have finished since.
    pub(super) fn is_finished(&self, entry: &Entry) -> bool {
        if !matches!(entry.call, Call::Collective(_)) {
            return entry.is_finished || entry.is_retired;
        }
        let Some(row) = self.row(entry.sequence) else { return entry.is_finished };
        // A call that failed since a rank is missing has retired, too.
        entry.is_finished
            || entry.is_retired && self.calls[row].is_complete
            || self.newest_done.is_some_and(|done| row < done)
    }

    /// Returns how many collectives a rank has called: those in its dump, those that others could not have finished without it, and those that
    /// were called before its dump begins.
    pub(super) fn issued(&self, global: u32, dump: &Dump) -> u64 {
        let own = self.called.get(&global).copied();
        let before = self.calls.partition_point(|row| row.last_ns < dump.covered_from_ns).checked_sub(1);
        let newest = own.max(self.newest_done).max(before);
        self.first_order() + newest.map_or(0, |row| row as u64 + 1)
    }

    /// Counts a rank's calls in which all are who are known to be in the group: somebody else may be missing.
    fn count_one_sided(&self, own: &[&Entry], at_ns: u64) -> u64 {
        let is_complete = |e: &Entry| self.row(e.sequence).is_some_and(|row| self.calls[row].is_complete);
        let is_old = |e: &Entry| at_ns.saturating_sub(e.created_ns) >= OLD_NS;
        let is_open = |e: &Entry| matches!(e.call, Call::Collective(_)) && !self.is_finished(e) && is_old(e);
        let one_sided = own.iter().filter(|e| !self.is_listed && is_open(e) && is_complete(e));
        one_sided.count() as u64
    }

    fn note_calls(&mut self, entries: &[(u32, &Entry)], dumps: &BTreeMap<u32, Dated>) {
        let collectives = || entries.iter().filter(|(_, e)| matches!(e.call, Call::Collective(_)));
        self.sequences =
            collectives().map(|(_, e)| e.sequence).collect::<BTreeSet<u64>>().into_iter().collect();
        self.calls =
            vec![CallRow { first_ns: u64::MAX, is_joint: true, ..CallRow::default() }; self.sequences.len()];
        for (rank, e) in collectives() {
            let Ok(at) = self.sequences.binary_search(&e.sequence) else { continue };
            let newest = self.called.entry(*rank).or_insert(at);
            *newest = at.max(*newest);
            let row = &mut self.calls[at];
            row.called += 1;
            (row.first_ns, row.last_ns) = (row.first_ns.min(e.created_ns), row.last_ns.max(e.created_ns));
            row.is_finished |= e.is_finished;
            row.is_retired |= e.is_retired;
            row.is_joint &= is_joint(e.call);
        }
        let mut covered_from: Vec<u64> =
            self.dumped.iter().filter_map(|g| Some(dumps.get(g)?.dump.covered_from_ns)).collect();
        covered_from.sort_unstable();
        for row in &mut self.calls {
            let covering = covered_from.partition_point(|from| *from <= row.first_ns);
            row.is_complete = row.called >= covering;
        }
        let is_done = |r: &CallRow| r.is_joint && (r.is_finished || r.is_retired && r.is_complete);
        self.newest_done = self.calls.iter().rposition(is_done);
    }
}

/// The communicators of all dumps.
#[derive(Debug, Default)]
pub(super) struct Communicators {
    all: BTreeMap<CommId, Communicator>,
    /// By the rank of a dump and the number of the group in it.
    of_group: HashMap<(u32, usize), CommId>,
    /// The calls of each rank that may wait for somebody whom no dump names.
    one_sided: BTreeMap<u32, u64>,
}

/// Name, generation and ranks of a group. A name alone is not enough: ranks may count their groups by themselves.
type GroupKey = (String, usize, Option<Arc<[u32]>>);

/// A number that names a group, the same in each run: FNV-1a.
fn hash(key: &GroupKey) -> u64 {
    let numbers = key.2.iter().flat_map(|ranks| ranks.iter()).flat_map(|r| r.to_le_bytes());
    let bytes = key.0.bytes().chain(key.1.to_le_bytes()).chain(numbers);
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, b| (hash ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3))
}

impl Communicators {
    pub(super) fn of(dumps: &BTreeMap<u32, Dated>) -> Self {
        let mut groups: BTreeMap<GroupKey, Vec<(u32, usize)>> = BTreeMap::new();
        let mut entries: HashMap<(u32, usize), Vec<&Entry>> = HashMap::new();
        for (rank, dated) in dumps {
            for (at, group) in dated.dump.groups.iter().enumerate() {
                let key = (group.name.clone(), group.generation, group.ranks.clone());
                groups.entry(key).or_default().push((*rank, at));
            }
            for e in &dated.dump.entries {
                entries.entry((*rank, e.group)).or_default().push(e);
            }
        }
        let mut out = Communicators::default();
        let at_ns = dumps.values().map(|d| d.at_ns).min().unwrap_or(0);
        for (key, of) in groups {
            let id = CommId::unowned(hash(&key));
            let group = |(rank, at): &(u32, usize)| dumps.get(rank).and_then(|d| d.dump.groups.get(*at));
            let mut descriptions = of.iter().filter_map(group).map(|g| g.description.as_str());
            let description = descriptions.find(|d| !d.is_empty() && *d != "undefined").unwrap_or("");
            let members: BTreeMap<u32, Rank> = match &key.2 {
                Some(listed) => listed.iter().copied().zip((0..).map(Rank)).collect(),
                None if description == DEFAULT => dumps.keys().map(|g| (*g, Rank(*g))).collect(),
                None => of.iter().map(|(g, _)| (*g, Rank(*g))).collect(),
            };
            let mut communicator = Communicator {
                id,
                name: if description.is_empty() { key.0.clone() } else { description.to_owned() },
                size: key.2.as_ref().and_then(|l| u32::try_from(l.len()).ok()),
                // Of the group of all ranks the dumps' own numbers tell whether one is absent.
                is_listed: key.2.is_some()
                    || description == DEFAULT && dumps.keys().copied().eq(0..dumps.len() as u32),
                globals: members.iter().map(|(g, r)| (*r, *g)).collect(),
                dumped: members.keys().copied().filter(|g| dumps.contains_key(g)).collect(),
                members,
                sequences: Vec::new(),
                calls: Vec::new(),
                newest_done: None,
                called: BTreeMap::new(),
            };
            let own = |at: &(u32, usize)| entries.get(at).map_or(&[][..], Vec::as_slice);
            let all: Vec<(u32, &Entry)> =
                of.iter().flat_map(|at| own(at).iter().map(|e| (at.0, *e))).collect();
            communicator.note_calls(&all, dumps);
            for at in of {
                out.of_group.insert(at, id);
                let one_sided = communicator.count_one_sided(own(&at), at_ns);
                if one_sided > 0 {
                    *out.one_sided.entry(at.0).or_default() += one_sided;
                }
            }
            out.all.insert(id, communicator);
        }
        out
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Communicator> {
        self.all.values()
    }

    pub(super) fn get(&self, id: CommId) -> Option<&Communicator> {
        self.all.get(&id)
    }

    /// The communicator of a rank's call.
    pub(super) fn of_entry(&self, global: u32, entry: &Entry) -> Option<&Communicator> {
        self.all.get(self.of_group.get(&(global, entry.group))?)
    }

    /// The calls of each rank that may wait for somebody whom no dump names.
    pub(super) fn one_sided(&self) -> &BTreeMap<u32, u64> {
        &self.one_sided
    }
}
