//! PyTorch's Flight Recorder: dumps of the last calls of each rank's process groups.
//!
//! A dump is one rank's, and nothing in it says which rank's: PyTorch ends the file's name with the rank. Its times are wall
//! clock times of the rank's host, and it does not say when it was written.

mod communicators;
mod dump;

use super::document::Document;
use super::fault::Fault;
use crate::model::{
    CommId, CommRecord, Evidence, Finding, Flags, Func, Job, Lane, Liveness, ONE_SIDED, OpRecord, PairBeat,
    Rank, SegmentId, SegmentRecord, Timing, Told, Track, Update,
};
use communicators::{Communicator, Communicators};
use dump::{Call, Dump, Entry, Sites};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};

/// Culprits of a finding whose calls are added to it.
const DESCRIBED: usize = 8;
/// Other ranks that are searched for the call that the culprits did not make.
const OTHERS: usize = 64;
/// Calls of all dumps together.
const CALLS_MAX: usize = 1 << 24;
/// Dumps that were written within this time are of one moment, in s.
const ONE_MOMENT_S: u64 = 60;
/// Ranks that a note names.
const NAMED: usize = 16;

/// The dump of a rank, and when it was written.
#[derive(Debug)]
struct Dated {
    path: PathBuf,
    dump: Dump,
    /// Unix time in ns; no earlier than any time in the dump.
    at_ns: u64,
}

/// Dumps of one job.
#[derive(Debug, Default)]
pub(super) struct Dumps {
    dumps: BTreeMap<u32, Dated>,
    sites: Sites,
    communicators: Communicators,
    /// Calls of all dumps.
    calls: usize,
    /// Sends and receives whose order is not known.
    left_out: usize,
}

/// The place of an operation in the dumps.
#[derive(Debug, Clone, Copy)]
struct EntryRef {
    rank: u32,
    entry: usize,
    /// Its issue order.
    order: u64,
}

impl Dumps {
    /// Takes the dump of a rank, which was written at a moment, Unix time in ns.
    pub(super) fn take(
        &mut self,
        path: &Path,
        rank: u32,
        written_ns: u64,
        document: &Document,
    ) -> Result<(), Fault> {
        if let Some(other) = self.dumps.get(&rank) {
            let other = other.path.display();
            return Err(Fault::of_file(format!(
                "{other} is a dump of rank {rank} too; name one dump of each rank"
            )));
        }
        let dump = Dump::read(document, &mut self.sites)?;
        // Generations of a group have one list.
        let mut listed = dump.groups.iter().filter(|g| g.generation == 0);
        if let Some(group) = listed.find(|g| g.ranks.as_ref().is_some_and(|r| !r.contains(&rank))) {
            return Err(Fault::of_file(format!(
                "its name ends with rank {rank}, and that rank is not in its group {:?}; restore the name",
                group.name
            )));
        }
        self.calls += dump.entries.len();
        if self.calls > CALLS_MAX {
            return Err(Fault::of_file(format!(
                "all dumps together have more than {CALLS_MAX} calls; name fewer"
            )));
        }
        let times =
            dump.entries.iter().flat_map(|e| [Some(e.created_ns), e.started_seen_ns, e.ended_seen_ns]);
        let at_ns = times.flatten().max().unwrap_or(0).max(written_ns);
        self.dumps.insert(rank, Dated { path: path.to_owned(), dump, at_ns });
        Ok(())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.dumps.is_empty()
    }

    pub(super) fn describe(&self) -> String {
        format!("Flight Recorder dumps of {} ranks", self.dumps.len())
    }

    /// The moment until which all dumps say what their ranks did, Unix time in ns: that of the oldest.
    pub(super) fn at_ns(&self) -> u64 {
        self.dumps.values().map(|d| d.at_ns).min().unwrap_or(0)
    }

    /// Hands over everything once all dumps are taken: the processes, their communicators and, as they were called, the operations.
    pub(super) fn updates(&mut self, mut sink: impl FnMut(Update)) {
        // Other dumps are silent about what was called later.
        let until_ns = self.at_ns();
        for dated in self.dumps.values_mut() {
            dated.dump.entries.retain(|e| e.created_ns <= until_ns);
        }
        self.communicators = Communicators::of(&self.dumps);
        let all = self.in_order();
        let transfers = |(_, e): &(u32, &Entry)| !matches!(e.call, Call::Collective(_));
        let ordered: HashSet<(u32, usize)> =
            all.iter().filter(|at| self.is_transfer(**at)).map(|at| (at.rank, at.entry)).collect();
        let unpaired: usize = self.dumps.values().map(|d| d.dump.unpaired).sum();
        self.left_out = self.entries().filter(transfers).count() - ordered.len() + unpaired;
        let began_ns = self.entries().map(|(_, e)| e.created_ns).min().unwrap_or(until_ns);
        for (rank, dated) in &self.dumps {
            let waits = |(at, e): (usize, &Entry)| {
                let is_left_out = !matches!(e.call, Call::Collective(_)) && !ordered.contains(&(*rank, at));
                is_left_out && !e.is_finished && !e.is_retired
            };
            let unordered = dated.dump.entries.iter().enumerate().filter(|e| waits(*e)).count() as u64;
            let one_sided = unordered + self.communicators.one_sided().get(rank).copied().unwrap_or(0);
            sink(Update::Segment(process(*rank, dated, began_ns, one_sided)));
        }
        for communicator in self.communicators.iter() {
            for (global, rank) in communicator.ranks_with_dumps() {
                let issued = self.dumps.get(&global).map_or(0, |d| communicator.issued(global, &d.dump));
                sink(Update::Comm(membership(communicator, global, rank, issued)));
            }
        }
        for at in &all {
            self.told(*at).into_iter().for_each(|told| sink(Update::Told(Box::new(told))));
        }
        self.pair_counts(&all).into_values().for_each(|beat| sink(Update::Pair(beat)));
    }

    /// Returns what the dumps lack, in sentences. Call this after [`Self::updates`].
    pub(super) fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        let absent: BTreeSet<u32> = self.communicators.iter().flat_map(|c| c.ranks_without_dumps()).collect();
        let highest = self.dumps.keys().next_back().map_or(0, |r| *r as usize);
        // Where no group lists its ranks, numbers tell who is absent.
        let gaps =
            (0..=highest).filter_map(|r| u32::try_from(r).ok()).filter(|r| !self.dumps.contains_key(r));
        let is_numbered = highest < 2 * self.dumps.len();
        let absent: BTreeSet<u32> =
            if is_numbered { absent.into_iter().chain(gaps).collect() } else { absent };
        if !absent.is_empty() {
            let whose = if absent.len() == 1 { "its" } else { "their" };
            notes.push(format!("there is no dump of {}: {whose} calls are not known", ranks(&absent)));
        }
        let newer: BTreeSet<u32> =
            self.dumps.iter().filter(|(_, d)| d.dump.is_newer).map(|(r, _)| *r).collect();
        if !newer.is_empty() {
            notes
                .push(format!("the dumps of {} are of a newer version: fields may be missed", ranks(&newer)));
        }
        let unsure: BTreeSet<u32> = self.communicators.one_sided().keys().copied().collect();
        if !unsure.is_empty() {
            notes.push(format!(
                "{} may wait for a rank that has called nothing in its group: these dumps do not list who is in it",
                ranks(&unsure)
            ));
        }
        if self.left_out > 0 {
            notes.push(format!(
                "{} sends and receives are left out: older calls are no longer in the dumps of both ends (a larger \
                 TORCH_FR_BUFFER_SIZE keeps them), or they are from any rank",
                self.left_out
            ));
        }
        let last_ns = self.dumps.values().map(|d| d.at_ns).max().unwrap_or(0);
        let apart_s = last_ns.saturating_sub(self.at_ns()) / 1_000_000_000;
        if apart_s > ONE_MOMENT_S {
            notes
                .push(format!("the dumps were written within {apart_s} s: they are judged as of the oldest"));
        }
        notes
    }

    /// Returns where in their code the culprits of a finding were.
    pub(super) fn evidence(&self, finding: &Finding) -> Vec<Evidence> {
        let Some(communicator) = self.communicators.get(finding.communicator) else { return Vec::new() };
        let operation = &finding.operation;
        let is_it = |global: u32, e: &Entry| {
            let is_of = self.communicators.of_entry(global, e).is_some_and(|c| c.id == communicator.id);
            let is_call = operation.track == Track::Collective && matches!(e.call, Call::Collective(_));
            is_of && is_call && communicator.order(e.sequence) == Some(operation.order)
        };
        let entries =
            |global: u32| self.dumps.get(&global).into_iter().flat_map(|d| d.dump.entries.iter().rev());
        let mut evidence = Vec::new();
        for rank in finding.ranks.iter().take(DESCRIBED) {
            let Some(global) = communicator.global(*rank) else { continue };
            if let Some(own) = entries(global).find(|e| is_it(global, e)) {
                evidence.push(fact(format!("rank {rank} called {}", self.described(global, own))));
            } else if let Some(last) = entries(global).next() {
                let call = self.described(global, last);
                evidence.push(fact(format!("the last call in the dump of rank {rank} is {call}")));
            }
        }
        // A call of another rank, which the culprits' has to match.
        let others = communicator.ranks_with_dumps().filter(|(_, rank)| !finding.ranks.contains(rank));
        let other = others.take(OTHERS).find_map(|(global, rank)| {
            let entry = entries(global).find(|e| is_it(global, e))?;
            Some(format!("rank {rank} called {}", self.described(global, entry)))
        });
        evidence.extend(other.map(fact));
        evidence
    }

    /// A call, and its place in the job's code.
    fn described(&self, global: u32, entry: &Entry) -> String {
        let site = entry.site.and_then(|s| self.sites.line(s));
        let site = site.map_or_else(String::new, |s| format!(", in {s}"));
        let name = self.sites.line(entry.name).unwrap_or("?");
        let of = self.communicators.of_entry(global, entry).map_or("", |c| c.name.as_str());
        let number = match entry.call {
            Call::Collective(_) => format!("collective_seq_id {}", entry.sequence),
            _ => format!("p2p_seq_id {}", entry.sequence),
        };
        format!("{name} ({number} of {of}){site}")
    }

    /// Counts the transfers that each rank has called with each other rank.
    fn pair_counts(&self, all: &[EntryRef]) -> BTreeMap<(CommId, Rank, Rank), PairBeat> {
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

    fn entries(&self) -> impl Iterator<Item = (u32, &Entry)> {
        self.dumps.iter().flat_map(|(rank, d)| d.dump.entries.iter().map(|e| (*rank, e)))
    }

    fn entry(&self, at: EntryRef) -> Option<&Entry> {
        self.dumps.get(&at.rank)?.dump.entries.get(at.entry)
    }

    fn is_transfer(&self, at: EntryRef) -> bool {
        self.entry(at).is_some_and(|e| !matches!(e.call, Call::Collective(_)))
    }

    /// All operations whose order is known, as they were called.
    fn in_order(&self) -> Vec<EntryRef> {
        let is_whole = |g: Option<u32>| g.and_then(|g| self.dumps.get(&g)).is_some_and(|d| d.dump.is_whole);
        let mut all = Vec::new();
        for (rank, dated) in &self.dumps {
            // How many transfers of each pair came before.
            let mut before: HashMap<(usize, Call), u64> = HashMap::new();
            for (at, e) in dated.dump.entries.iter().enumerate() {
                let communicator = self.communicators.of_entry(*rank, e);
                let order = match e.call {
                    Call::Collective(_) => communicator.and_then(|c| c.order(e.sequence)),
                    Call::Send(peer) | Call::Recv(peer) => {
                        let is_known =
                            dated.dump.is_whole && is_whole(communicator.and_then(|c| c.global(peer)));
                        is_known.then(|| {
                            let n = before.entry((e.group, e.call)).or_default();
                            std::mem::replace(n, *n + 1)
                        })
                    }
                    Call::Launch(_) | Call::Unpaired => None,
                };
                all.extend(order.map(|order| EntryRef { rank: *rank, entry: at, order }));
            }
        }
        all.sort_by_key(|at| self.entry(*at).map_or(0, |e| e.created_ns));
        all
    }

    fn told(&self, at: EntryRef) -> Option<Told> {
        let entry = self.entry(at)?;
        let communicator = self.communicators.of_entry(at.rank, entry)?;
        let (lane, func) = match entry.call {
            Call::Collective(func) => (Lane::Collective, func),
            Call::Send(peer) => (Lane::Send(peer), Func::Send),
            Call::Recv(peer) => (Lane::Recv(peer), Func::Recv),
            Call::Launch(_) | Call::Unpaired => return None,
        };
        let finished = communicator.is_finished(entry);
        let op = OpRecord {
            segment: segment(at.rank),
            ticket: at.entry as u64,
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
fn process(rank: u32, dated: &Dated, began_ns: u64, one_sided: u64) -> SegmentRecord {
    SegmentRecord {
        id: segment(rank),
        path: dated.path.clone(),
        pid: 0,
        host: String::new(),
        program: String::new(),
        nccl: dated.dump.library.clone(),
        abi: None,
        job: Job { rank: Some(rank), ..Job::default() },
        owner: None,
        liveness: Liveness::Unknown,
        created_ns: began_ns,
        created_unix_ns: began_ns,
        losses: if one_sided > 0 { vec![(ONE_SIDED, one_sided)] } else { Vec::new() },
    }
}

fn membership(communicator: &Communicator, global: u32, rank: Rank, issued: u64) -> CommRecord {
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
        issued,
        replayed: 0,
        init_ns: 0,
        making: None,
        rules: None,
        finalized_ns: None,
    }
}
