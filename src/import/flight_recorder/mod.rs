//! PyTorch's Flight Recorder: dumps of the last calls of each rank's process groups.
//!
//! A dump is one rank's, and nothing in it says which rank's: PyTorch ends the file's name with the rank. Its times are wall
//! clock times of the rank's host, and it does not say when it was written.

mod communicators;
mod dump;

use super::document::Document;
use super::fault::Fault;
use crate::model::{
    CommId, CommRecord, Evidence, Finding, Flags, Func, Job, Lane, Liveness, OpRecord, PairBeat, Rank,
    SegmentId, SegmentRecord, Timing, Told, Track, Update,
};
use communicators::{Communicator, Communicators};
use dump::{Call, Dump, Entry, Sites};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

/// Culprits of a finding whose calls are added to it.
const DESCRIBED: usize = 8;
/// Other ranks that are searched for the call that the culprits did not make.
const OTHERS: usize = 64;
/// Ranks that a note names.
const NAMED: usize = 16;

/// Dumps of one job.
#[derive(Debug, Default)]
pub(super) struct Recorder {
    dumps: BTreeMap<u32, (PathBuf, Dump)>,
    sites: Sites,
    communicators: Communicators,
}

/// The place of an operation in the dumps.
#[derive(Debug, Clone, Copy)]
struct At {
    rank: u32,
    entry: usize,
    /// Its issue order.
    order: u64,
}

impl Recorder {
    /// Takes the dump of a rank.
    pub(super) fn take(&mut self, path: &Path, rank: u32, document: &Document) -> Result<(), Fault> {
        if let Some((other, _)) = self.dumps.get(&rank) {
            let why = format!("{} is a dump of rank {rank} too; name one dump of each rank", other.display());
            return Err(Fault::of_file(why));
        }
        let dump = Dump::read(document, &mut self.sites)?;
        for group in &dump.groups {
            if group.ranks.as_ref().is_some_and(|ranks| !ranks.contains(&rank)) {
                return Err(Fault::of_file(format!(
                    "its name ends with rank {rank}, and that rank is not in its group {:?}; restore the name",
                    group.name
                )));
            }
        }
        self.dumps.insert(rank, (path.to_owned(), dump));
        Ok(())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.dumps.is_empty()
    }

    pub(super) fn describe(&self) -> String {
        format!("Flight Recorder dumps of {} ranks", self.dumps.len())
    }

    /// Hands over everything once all dumps are taken: the processes, their communicators and, as they were called, the operations.
    pub(super) fn updates(&mut self, mut sink: impl FnMut(Update)) {
        self.communicators = Communicators::of(&self.dumps);
        for (rank, (path, dump)) in &self.dumps {
            sink(Update::Segment(process(*rank, path, dump)));
        }
        for communicator in self.communicators.iter() {
            for (global, rank) in communicator.ranks_with_dumps() {
                sink(Update::Comm(membership(communicator, global, rank)));
            }
        }
        let all = self.in_order();
        for at in &all {
            self.told(*at).into_iter().for_each(|told| sink(Update::Told(Box::new(told))));
        }
        self.pair_counts(&all).into_values().for_each(|beat| sink(Update::Pair(beat)));
    }

    /// How many transfers each rank has called with each other rank.
    fn pair_counts(&self, all: &[At]) -> BTreeMap<(CommId, Rank, Rank), PairBeat> {
        let mut counts = BTreeMap::new();
        for at in all {
            let Some(entry) = self.entry(*at) else { continue };
            let (Call::Send(peer) | Call::Recv(peer)) = entry.call else { continue };
            let communicator = self.communicators.of_entry(at.rank, entry);
            let Some((comm, rank)) = communicator.and_then(|c| Some((c.id, c.rank(at.rank)?))) else {
                continue;
            };
            let beat = counts.entry((comm, rank, peer)).or_insert(PairBeat {
                segment: segment(at.rank),
                comm,
                rank,
                peer,
                sent: 0,
                received: 0,
                from: 0,
                sent_done: None,
                received_done: None,
                sent_may_run: false,
                received_may_run: false,
                sent_is_newest: false,
            });
            let count = if entry.call == Call::Send(peer) { &mut beat.sent } else { &mut beat.received };
            *count = at.order.saturating_add(1).max(*count);
        }
        counts
    }

    /// The newest moment in the dumps, Unix time in ns.
    pub(super) fn newest_ns(&self) -> u64 {
        let times =
            self.entries().flat_map(|(_, e)| [Some(e.created_ns), e.started_seen_ns, e.ended_seen_ns]);
        times.flatten().max().unwrap_or(0)
    }

    /// What the dumps do not say.
    pub(super) fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        let absent: BTreeSet<u32> = self.communicators.iter().flat_map(|c| c.ranks_without_dumps()).collect();
        if !absent.is_empty() {
            notes.push(format!("there is no dump of {}: their calls are not known", ranks(&absent)));
        }
        let newer: BTreeSet<u32> =
            self.dumps.iter().filter(|(_, (_, d))| d.is_newer).map(|(r, _)| *r).collect();
        if !newer.is_empty() {
            notes
                .push(format!("the dumps of {} are of a newer version: fields may be missed", ranks(&newer)));
        }
        let transfers = self.entries().filter(|(_, e)| !matches!(e.call, Call::Collective(_))).count();
        let left_out = transfers - self.in_order().iter().filter(|at| self.is_transfer(**at)).count();
        if left_out > 0 {
            notes.push(format!(
                "{left_out} sends and receives are left out, since older calls are no longer in the dumps of both ends; \
                 a larger TORCH_FR_BUFFER_SIZE keeps them"
            ));
        }
        notes
    }

    /// Where in their code the culprits of a finding were.
    pub(super) fn evidence(&self, finding: &Finding) -> Vec<Evidence> {
        let Some(communicator) = self.communicators.get(finding.communicator) else { return Vec::new() };
        let operation = &finding.operation;
        let is_it = |global: u32, e: &Entry| {
            let is_of = self.communicators.of_entry(global, e).is_some_and(|c| c.id == communicator.id);
            let is_call = operation.track == Track::Collective && matches!(e.call, Call::Collective(_));
            is_of && is_call && communicator.order(e.sequence) == operation.order
        };
        let mut evidence = Vec::new();
        for rank in finding.ranks.iter().take(DESCRIBED) {
            let Some(global) = communicator.global(*rank) else { continue };
            let Some((_, dump)) = self.dumps.get(&global) else { continue };
            let own = dump.entries.iter().rev().find(|e| is_it(global, e));
            let Some(entry) = own.or(dump.entries.last()) else { continue };
            let call = self.described(global, entry);
            let text = if own.is_some() {
                format!("rank {rank} called {call}")
            } else {
                format!("the last call in the dump of rank {rank} is {call}")
            };
            evidence.push(fact(text));
        }
        // A call of another rank, which the culprits' has to match.
        let others = communicator.ranks_with_dumps().filter(|(_, rank)| !finding.ranks.contains(rank));
        let other = others.take(OTHERS).find_map(|(global, rank)| {
            let entry = self.dumps.get(&global)?.1.entries.iter().rev().find(|e| is_it(global, e))?;
            Some(format!("rank {rank} called {}", self.described(global, entry)))
        });
        evidence.extend(other.map(fact));
        evidence
    }

    /// A call and its place in the job's code.
    fn described(&self, global: u32, entry: &Entry) -> String {
        let site = entry.site.and_then(|s| self.sites.line(s));
        let site = site.map_or_else(String::new, |s| format!(", in {s}"));
        format!("{}{site}", self.call(global, entry))
    }

    fn call(&self, global: u32, entry: &Entry) -> String {
        let of = self.communicators.of_entry(global, entry).map_or("", |c| c.name.as_str());
        match entry.call {
            Call::Collective(func) => format!("{func} with collective_seq_id {} of {of}", entry.sequence),
            Call::Send(to) => format!("a send to rank {to} of {of}"),
            Call::Recv(from) => format!("a receive from rank {from} of {of}"),
            Call::Launch => format!("transfers of {of}"),
        }
    }

    fn entries(&self) -> impl Iterator<Item = (u32, &Entry)> {
        self.dumps.iter().flat_map(|(rank, (_, dump))| dump.entries.iter().map(|e| (*rank, e)))
    }

    fn entry(&self, at: At) -> Option<&Entry> {
        self.dumps.get(&at.rank)?.1.entries.get(at.entry)
    }

    fn is_transfer(&self, at: At) -> bool {
        self.entry(at).is_some_and(|e| !matches!(e.call, Call::Collective(_)))
    }

    /// All operations whose order is known, as they were called.
    fn in_order(&self) -> Vec<At> {
        let is_whole = |global: Option<u32>| {
            global.and_then(|g| self.dumps.get(&g)).is_some_and(|(_, dump)| dump.is_whole)
        };
        let mut all = Vec::new();
        for (rank, (_, dump)) in &self.dumps {
            // How many transfers of each pair came before.
            let mut before: HashMap<(usize, Call), u64> = HashMap::new();
            for (at, e) in dump.entries.iter().enumerate() {
                let peer = match e.call {
                    Call::Collective(_) => {
                        let order = self.communicators.of_entry(*rank, e).map_or(0, |c| c.order(e.sequence));
                        all.push(At { rank: *rank, entry: at, order });
                        continue;
                    }
                    Call::Send(peer) | Call::Recv(peer) => peer,
                    Call::Launch => continue,
                };
                let communicator = self.communicators.of_entry(*rank, e);
                if dump.is_whole && is_whole(communicator.and_then(|c| c.global(peer))) {
                    let n = before.entry((e.group, e.call)).or_default();
                    all.push(At { rank: *rank, entry: at, order: *n });
                    *n += 1;
                }
            }
        }
        all.sort_by_key(|at| self.entry(*at).map_or(0, |e| e.created_ns));
        all
    }

    fn told(&self, at: At) -> Option<Told> {
        let entry = self.entry(at)?;
        let communicator = self.communicators.of_entry(at.rank, entry)?;
        let (lane, func) = match entry.call {
            Call::Collective(func) => (Lane::Collective, func),
            Call::Send(peer) => (Lane::Send(peer), Func::Send),
            Call::Recv(peer) => (Lane::Recv(peer), Func::Recv),
            Call::Launch => return None,
        };
        let is_past = lane == Lane::Collective && communicator.is_past(entry.sequence);
        let finished = entry.is_finished || is_past;
        let op = OpRecord {
            segment: segment(at.rank),
            ticket: entry.record,
            comm: communicator.id,
            rank: communicator.rank(at.rank)?,
            lane,
            order: Some(at.order),
            func,
            dtype: entry.dtype.filter(|_| entry.count.is_some()),
            count: entry.count.unwrap_or(0),
            root: None,
            algo: None,
            proto: None,
            channels: None,
            warps: None,
            seq: None,
            plan: (lane != Lane::Collective).then_some(entry.sequence),
            flags: Flags::default(),
            called_ns: None,
            returned: None,
            redop: None,
            issued_ns: Some(entry.created_ns),
            timing: if entry.duration_ns.is_some() { Timing::Events } else { Timing::Unknown },
            event_ns: entry.duration_ns,
            event_seen_ns: entry.duration_ns.and(entry.ended_seen_ns),
            started: 0,
            stopped: 0,
            stamps: Vec::new(),
            net: Vec::new(),
        };
        // The start is noticed late: it says that an operation is in progress, and not since when it is.
        let started_ns = entry.started_seen_ns.filter(|_| !finished);
        let ended_seen_ns = entry.ended_seen_ns.filter(|_| entry.duration_ns.is_some());
        Some(Told { op, started_ns, duration_ns: entry.duration_ns, ended_seen_ns, finished })
    }
}

fn fact(text: String) -> Evidence {
    Evidence { text, value: None, unit: None }
}

fn segment(rank: u32) -> SegmentId {
    SegmentId(u64::from(rank) + 1)
}

/// Some ranks in words.
fn ranks(all: &BTreeSet<u32>) -> String {
    let named: Vec<String> = all.iter().take(NAMED).map(u32::to_string).collect();
    let more = all.len() - named.len();
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{} {}{more}", if all.len() == 1 { "rank" } else { "ranks" }, named.join(", "))
}

/// The process of a dump. Its clock is the wall clock.
fn process(rank: u32, path: &Path, dump: &Dump) -> SegmentRecord {
    let created_ns = dump.entries.iter().map(|e| e.created_ns).min().unwrap_or(0);
    SegmentRecord {
        id: segment(rank),
        path: path.to_owned(),
        pid: 0,
        host: String::new(),
        program: String::new(),
        nccl: dump.library.clone(),
        abi: None,
        job: Job { rank: Some(rank), ..Job::default() },
        owner: None,
        liveness: Liveness::Unknown,
        created_ns,
        created_unix_ns: created_ns,
        losses: Vec::new(),
    }
}

fn membership(communicator: &Communicator, global: u32, rank: Rank) -> CommRecord {
    CommRecord {
        segment: segment(global),
        comm: communicator.id,
        rank,
        ranks: communicator.size,
        nodes: None,
        name: Some(communicator.name.clone()),
        gpu: None,
        // Nothing says which ranks share a host.
        host_clock: u64::from(global) + 1,
        issued: communicator.issued(global),
        replayed: 0,
        init_ns: 0,
        making: None,
        rules: None,
        finalized_ns: None,
    }
}
