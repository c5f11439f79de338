//! The process groups of all dumps as communicators.

use super::dump::{Call, Dump, Entry};
use crate::model::{CommId, Rank};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;
use std::sync::Arc;

/// PyTorch's description of the group of all ranks.
const DEFAULT: &str = "default_pg";
/// The highest rank that a file's name is believed.
const RANKS_MAX: u32 = 1 << 20;

/// A process group.
#[derive(Debug)]
pub(super) struct Communicator {
    pub(super) id: CommId,
    /// The description that the job gave it, else its name.
    pub(super) name: String,
    /// The number of its ranks; absent where no dump lists them.
    pub(super) size: Option<u32>,
    /// The job's ranks in it, and their own numbers.
    members: BTreeMap<u32, Rank>,
    globals: BTreeMap<Rank, u32>,
    dumped: BTreeSet<u32>,
    /// The number of its first collective: PyTorch counts from 1.
    first: u64,
    /// The highest number of a collective that each rank has called.
    called: BTreeMap<u32, u64>,
    /// The highest number of a collective that is finished on some rank, and so was called on all.
    finished: Option<u64>,
}

impl Communicator {
    /// The job's ranks of which there are dumps.
    pub(super) fn ranks_with_dumps(&self) -> impl Iterator<Item = (u32, Rank)> {
        self.members.iter().filter(|(g, _)| self.dumped.contains(g)).map(|(g, r)| (*g, *r))
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

    /// True where a later collective is finished on some rank: its ranks came past this one, which their own dumps may be too
    /// old to say.
    pub(super) fn is_past(&self, sequence: u64) -> bool {
        self.finished.is_some_and(|newest| sequence < newest)
    }

    /// The issue order of a collective, from 0.
    pub(super) fn order(&self, sequence: u64) -> u64 {
        sequence.saturating_sub(self.first)
    }

    /// How many collectives a rank has called. Its dump may have lost what others have finished.
    pub(super) fn issued(&self, global: u32) -> u64 {
        let called = self.called.get(&global).copied().max(self.finished);
        called.map_or(0, |newest| self.order(newest).saturating_add(1))
    }
}

/// Name and ranks of a group. A name alone is not enough: ranks may count their groups by themselves.
type GroupKey = (String, Option<Arc<[u32]>>);

/// All of them.
#[derive(Debug, Default)]
pub(super) struct Communicators {
    all: BTreeMap<CommId, Communicator>,
    /// By the rank of a dump and the number of the group in it.
    of_group: HashMap<(u32, usize), CommId>,
}

impl Communicators {
    pub(super) fn of(dumps: &BTreeMap<u32, (PathBuf, Dump)>) -> Self {
        let mut groups: BTreeMap<GroupKey, Vec<(u32, usize)>> = BTreeMap::new();
        for (rank, (_, dump)) in dumps {
            for (at, group) in dump.groups.iter().enumerate() {
                groups.entry((group.name.clone(), group.ranks.clone())).or_default().push((*rank, at));
            }
        }
        let mut out = Communicators::default();
        for ((name, listed), of) in groups {
            let mut hasher = DefaultHasher::new();
            (&name, &listed).hash(&mut hasher);
            let id = CommId::unowned(hasher.finish());
            let group = |(rank, at): &(u32, usize)| dumps.get(rank).and_then(|(_, d)| d.groups.get(*at));
            let mut descriptions = of.iter().filter_map(group).map(|g| g.description.as_str());
            let is_named = |d: &&str| !d.is_empty() && *d != "undefined";
            let description = descriptions.find(is_named).unwrap_or("");
            let members: BTreeMap<u32, Rank> = match &listed {
                Some(listed) => listed.iter().copied().zip((0..).map(Rank)).collect(),
                // All ranks of the job, as far as their numbers tell.
                None if description == DEFAULT => {
                    let newest = dumps.keys().next_back().copied().unwrap_or(0);
                    (0..=newest.min(RANKS_MAX)).map(|r| (r, Rank(r))).collect()
                }
                None => {
                    let called: BTreeSet<u32> = of.iter().map(|(rank, _)| *rank).collect();
                    called.into_iter().zip((0..).map(Rank)).collect()
                }
            };
            let dumped = members.keys().copied().filter(|g| dumps.contains_key(g)).collect();
            let mut communicator = Communicator {
                id,
                name: if description.is_empty() { name } else { description.to_owned() },
                size: listed.as_ref().and_then(|l| u32::try_from(l.len()).ok()),
                globals: members.iter().map(|(g, r)| (*r, *g)).collect(),
                members,
                dumped,
                first: 1,
                called: BTreeMap::new(),
                finished: None,
            };
            for (rank, at) in of {
                out.of_group.insert((rank, at), id);
                let entries = dumps.get(&rank).into_iter().flat_map(|(_, d)| &d.entries);
                for e in entries.filter(|e| e.group == at && matches!(e.call, Call::Collective(_))) {
                    let called = communicator.called.entry(rank).or_default();
                    *called = e.sequence.max(*called);
                    communicator.first = communicator.first.min(e.sequence);
                    if e.is_finished {
                        communicator.finished = communicator.finished.max(Some(e.sequence));
                    }
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
}
