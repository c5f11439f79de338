//! The operations of all ranks, matched by communicator and issue order.
//!
//! Pure: it is fed updates and told the time; it reads no clock and no file. One owner feeds it; rules and
//! screens read it.

mod attribution;
mod call_hashes;
mod call_mix;
mod call_order;
mod class_key;
mod class_totals;
mod clock;
mod cluster_rows;
mod communicator;
mod dirty_comms;
mod elsewhere;
mod evicted;
mod exchange;
mod finished;
mod hardware;
mod host_clock;
mod host_pressure;
mod hosts;
mod instance;
mod member;
mod memory;
mod op_queue;
mod roster;
mod signature;
mod snapshot;
mod stats;
mod time_shares;
mod timing;
mod trend;
mod unread;
mod wait_graph;
mod wire;
mod work;

pub use crate::model::Track;
pub use attribution::{Share, WireTotals, WireWindow};
pub use call_hashes::{signature, types};
pub use call_order::CallOrder;
pub use class_key::{ClassKey, Load, Rates, Transfer, size_class};
pub use class_totals::{Tallies, Tally};
pub use clock::ClockMap;
pub use cluster_rows::{ClusterRows, Pace, RowLimits};
use communicator::{Around, Said, Taken};
pub use communicator::{Communicator, LateCosts, LateEvent, LateSecond, Lately};
pub use finished::{Finished, FinishedPart, Operation, Sampling};
pub use hardware::{Activity, Device, Hardware, Incident, LinkError, Moment, Trouble};
pub use host_clock::ClockPair;
pub use host_pressure::{HostPressure, HostPressures};
pub use hosts::{HostClock, Hosts};
pub use instance::{Instance, Late, Measure, Part, Parts, algbw, busbw};
pub use member::{Called, Member};
pub use signature::Signature;
pub use snapshot::View;
pub use stats::{Class, Sample, Seen};
pub use time_shares::{Busy, Exchanged, Issuing};
pub use timing::{Kernel, Limit, kernel, not_before, started};
pub use trend::{Block, Change, Trend, median, spread};
pub use wait_graph::{
    Launches, OpPhase, Origin, RankProgress, Rhythm, Stall, Standstills, WaitGraph, Waited, WaitingFor,
    origins,
};
pub use wire::{Shape, Wire, crossing, expected, transfer};
pub use work::Work;

use crate::model::{
    BEYOND_MEMORY, CommId, CommRecord, Holder, HostFact, ONE_SIDED, OpRecord, ProcessState, Rank, SegmentId,
    SegmentRecord, Spare, UNCOUNTED, Update, hides_operations, missed_reason,
};
use dirty_comms::DirtyComms;
use evicted::Retired;
use finished::Outbox;
use memory::Memory;
pub use memory::MemoryLimit;
use roster::{Condition, Roster};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use wait_graph::{COUNTED, GraphCache};

/// Ranks' parts of operations that are over and kept, of all communicators; beyond, the older half of each
/// communicator's goes. A cluster has a hundred thousand communicators, and each of them keeps some.
const PARTS_KEPT: usize = 1 << 17;
/// Processes kept; beyond, those that are gone and belong to no communicator are forgotten.
const PROCESSES_KEPT: usize = 1024;
/// Closed communicators kept for screens and summaries.
const CLOSED_KEPT: usize = 256;

/// One process, as the join knows it.
#[derive(Debug, Clone)]
pub struct Process {
    /// The record of its segment.
    pub record: SegmentRecord,
    /// The clocks of its GPUs, by PCI address; one without an address where NCCL's process does not say.
    pub clocks: BTreeMap<Option<Arc<str>>, ClockMap>,
    /// Records that were overwritten before they were read, by kind.
    pub missed: BTreeMap<&'static str, u64>,
    /// When the last loss of a record of an operation was noticed, by the observer's clock.
    missed_ns: Option<u64>,
    /// The operating system's latest facts about it.
    pub host: Option<HostFact>,
    /// The resources that it went without over the last minute.
    pub strains: HostPressures,
    /// Time inside its kernels, as far as they are timed.
    pub busy: Busy,
    /// When it issued operations.
    pub issuing: Issuing,
    /// The order of its calls.
    pub call_order: CallOrder,
    /// Its memory in bytes, as it was accounted last.
    calls_bytes: usize,
    /// How long it works between operations.
    pub work: Work,
    /// Since when nothing is heard of it, by the observer's clock; absent where somebody follows it.
    pub silent_ns: Option<u64>,
    /// The number that is added to its times to have them on the observer's clock.
    shift_ns: i64,
}

/// Receives the operations that have finished, in the order in which they are found to be.
pub trait FinishedSink: std::fmt::Debug + Send {
    /// Takes the operations that finished since the last call, until this moment, host monotonic ns.
    fn take(&mut self, operations: &[Finished], join: &Join, now_ns: u64);

    /// Takes the operations that have not finished: nothing more comes.
    fn end(&mut self, open: &[Finished], join: &Join, now_ns: u64);
}

/// The ranks of a communicator that processes of several nodes claim, and these nodes.
pub type Dispute = BTreeMap<Rank, Vec<String>>;

impl Process {
    /// The number that was added to the times of its host, in ns.
    pub fn shift_ns(&self) -> i64 {
        self.shift_ns
    }

    /// True when operations were lost before they were counted, or nobody follows it: nothing can rest on its issue
    /// orders.
    pub fn unsure(&self) -> bool {
        self.silent_ns.is_some()
            || self
                .record
                .losses
                .iter()
                .any(|(what, n)| *n > 0 && (UNCOUNTED.contains(what) || *what == ONE_SIDED))
    }

    /// True where the record of an operation may be lost that it issued at this moment or later, host monotonic ns.
    pub fn may_lack_since(&self, issued_ns: u64) -> bool {
        self.missed_ns.is_some_and(|t| t >= issued_ns)
    }

    /// True when a signal has stopped it. A tool that reads stacks stops a process as well, for a moment, and does not count.
    pub fn is_stopped(&self) -> bool {
        matches!(&self.host, Some(HostFact { state: Some(ProcessState::Stopped { traced: false }), .. }))
    }

    fn condition(&self) -> Condition {
        Condition {
            known: true,
            unsure: self.unsure(),
            gone: self.record.liveness.is_gone(),
            stopped: self.is_stopped(),
        }
    }

    /// Operations of which nothing is known, since their records were lost.
    pub fn hidden(&self) -> u64 {
        let lost = self.record.losses.iter().copied();
        let missed = self.missed.iter().map(|(what, n)| (missed_reason(what), *n));
        let hidden = lost.chain(missed).filter(|(reason, _)| hides_operations(reason));
        hidden.fold(0, |sum, (_, n)| sum.saturating_add(n))
    }
}

/// So long after a process has ended its records may still be read, in ns.
const LAST_RECORDS_NS: u64 = 10_000_000_000;

/// Between two times that memory is made, in ns.
const RELIEVE_NS: u64 = 100_000_000;

/// Accounts what a communicator takes now.
fn account(memory: &mut Memory, comm: &mut Communicator) {
    let Some(payer) = comm.payer else { return };
    let weight = comm.weight();
    memory.account(payer, std::mem::replace(&mut comm.accounted_bytes, weight), weight);
}

/// Accounts the order of a process's calls. A process whose payer takes too much forgets what it has learned.
fn account_calls(memory: &mut Memory, p: &mut Process) {
    let payer = memory.payer_of_process(p.record.owner, &p.record.host);
    if !memory.may_grow(payer) {
        p.call_order.rest();
    }
    let weight = p.call_order.weight();
    memory.account(payer, std::mem::replace(&mut p.calls_bytes, weight), weight);
}

/// True where there is no process that could do anything.
fn is_away(c: Condition) -> bool {
    !c.known || c.gone
}

/// Everything that was fed, joined.
#[derive(Debug, Clone, Default)]
pub struct Join {
    processes: BTreeMap<SegmentId, Process>,
    comms: BTreeMap<CommId, Communicator>,
    /// Communicators that had to make room.
    retired: Retired,
    /// Boxed: a third of a tree's places is empty, and there are very many.
    classes: BTreeMap<ClassKey, Box<Class>>,
    tallies: Tallies,
    observer: Option<ClockPair>,
    hosts: Hosts,
    /// The processes of each host.
    of_host: HashMap<String, Vec<SegmentId>>,
    outbox: Outbox,
    hardware: Hardware,
    roster: Roster,
    wait_graph: GraphCache,
    dirty: DirtyComms,
    /// Ranks' parts of operations that are over and kept, of all communicators.
    parts: usize,
    /// Processes that are not gone.
    alive: usize,
    /// The moment of the last tick.
    now_ns: u64,
    memory: Memory,
    /// The accounts of the order of processes' calls, apart: it must not keep a record out.
    calls_memory: Memory,
    disputes: BTreeMap<CommId, Dispute>,
    /// Communicators with a rank in dispute that is still in them.
    to_rebuild: BTreeSet<CommId>,
    /// When memory was last made, host monotonic ns.
    relieved_ns: u64,
    /// Processes are followed while they run: what one leaves behind is not in flight any more.
    live: bool,
    /// Processes of which calls are to be taken.
    calling: Vec<SegmentId>,
    /// Processes of which records were lost since the last tick.
    losing: BTreeSet<SegmentId>,
    /// Processes that have ended, and when that was said, host monotonic ns. Their last records may be on their way.
    ended: VecDeque<(u64, SegmentId)>,
    /// Processes of which records are there unread, since when.
    unread: BTreeMap<SegmentId, u64>,
    /// Processes that were there at this moment are known; absent where all are.
    searched_ns: Option<u64>,
}

impl Join {
    /// Nothing was fed yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the clock that times are to be on, where processes of other hosts are fed.
    pub fn observe_from(&mut self, observer: ClockPair) {
        self.observer = Some(observer);
        // Of other hosts' operations only a part comes.
        self.hardware.follow_cluster();
    }

    /// From now on takes what processes have left unfinished for ended with them. Otherwise it stays in flight, as it was
    /// when they died: for post-mortem segments.
    pub fn follow_live(&mut self) {
        self.live = true;
    }

    /// Takes one update.
    pub fn feed(&mut self, mut update: Update) {
        let shift_ns = self.shift_of(&update);
        if shift_ns != 0 {
            host_clock::shift(&mut update, shift_ns);
        }
        match update {
            Update::Segment(record) => self.process_said(record, shift_ns),
            Update::Comm(record) => {
                self.membership(record);
            }
            Update::Left { segment, comm, rank } => {
                let Some(c) = self.touched(comm) else { return };
                if let Some(actor) = c.leave(segment, rank) {
                    self.roster.leave(segment, actor, comm, rank);
                }
                if self.comms.get(&comm).is_some_and(|c| c.members().is_empty()) {
                    self.remove(comm);
                }
            }
            Update::Op(op) => self.operation(op, None),
            Update::Told(told) => {
                let said = Said {
                    started_ns: told.started_ns,
                    duration_ns: told.duration_ns,
                    ended_seen_ns: told.ended_seen_ns,
                    finished: told.finished,
                };
                let op = self.outbox.spare().put(told.op);
                self.operation(op, Some(said));
            }
            Update::Beat(beat) => {
                let now_ns = self.now_ns;
                let more = self.touched(beat.comm).is_some_and(|c| c.beat(&beat, now_ns));
                self.issues_on(beat.segment, more);
            }
            Update::Pair(beat) => {
                let now_ns = self.now_ns;
                let more = self.touched(beat.comm).is_some_and(|c| c.pair_beat(&beat, now_ns));
                self.issues_on(beat.segment, more);
            }
            Update::Clock { host, shift_ns, wall_ahead_ns } => {
                if self.hosts.told(&host, shift_ns, wall_ahead_ns) {
                    self.map_anew(&host);
                }
            }
            Update::Signatures(s) => {
                let sure = self.processes.get(&s.segment).is_some_and(|p| !p.unsure());
                if let Some(c) = self.touched(s.comm).filter(|_| sure) {
                    c.signed(&s);
                }
            }
            Update::Calls(state) => {
                if let Some(p) = self.processes.get_mut(&state.segment) {
                    p.call_order.told(&state);
                    account_calls(&mut self.calls_memory, p);
                }
            }
            Update::Work(state) => {
                let now_ns = self.now_ns;
                if let Some(p) = self.processes.get_mut(&state.segment) {
                    p.work.told(&state, now_ns);
                }
            }
            Update::Sketch(s) => self.sketch(*s),
            Update::Silent { segment, since_ns } => {
                if let Some(p) = self.processes.get_mut(&segment) {
                    p.silent_ns = since_ns;
                    self.tell_condition(segment);
                }
            }
            Update::Disputed { comm, rank, nodes } => self.dispute(comm, rank, nodes),
            Update::Missed { segment, what, count } => self.missed(segment, what, count),
            Update::Host(fact) => {
                if let Some(p) = self.processes.get_mut(&fact.segment) {
                    p.strains.take(&fact);
                    let segment = fact.segment;
                    p.host = Some(*fact);
                    self.tell_condition(segment);
                }
            }
            Update::Hardware(reading) => {
                self.hardware.take(*reading);
                self.outbox.meter(self.hardware.is_metered(), self.hardware.is_networked());
            }
        }
    }

    /// Takes an operation, as [`Self::feed`] does.
    pub fn feed_operation(&mut self, op: Box<OpRecord>) {
        if self.observer.is_none() { self.operation(op, None) } else { self.feed(Update::Op(op)) }
    }

    /// Takes that a rank is in a communicator.
    fn membership(&mut self, record: CommRecord) {
        let known = self.comms.get(&record.comm);
        let node = self.processes.get(&record.segment).map_or("", |p| &p.record.host);
        let payer = self.memory.payer(record.comm, known.and_then(|c| c.payer), node);
        let is_member = known.is_some_and(|c| c.members().contains_key(&record.rank));
        if !is_member && !self.memory.may_grow(payer) {
            self.missed(record.segment, BEYOND_MEMORY, 1);
            return;
        }
        let comm = self.comms.entry(record.comm).or_insert_with(|| {
            let mut comm = Communicator::new(record.comm);
            self.retired.take_for(record.comm, record.init_ns).into_iter().for_each(|gone| comm.resume(gone));
            comm
        });
        if let Some(before) = comm.payer.replace(payer).filter(|p| *p != payer) {
            self.memory.account(before, std::mem::take(&mut comm.accounted_bytes), 0);
        }
        self.dirty.touch(comm);
        comm.join(record, &mut self.roster);
        account(&mut self.memory, comm);
    }

    /// Takes which nodes claim a rank; none where one alone does. The reader reports disputes of ranks that a node holds, so
    /// there are never more than ranks.
    fn dispute(&mut self, comm: CommId, rank: Rank, nodes: Vec<String>) {
        if nodes.is_empty() {
            if let Some(d) = self.disputes.get_mut(&comm) {
                d.remove(&rank);
                if d.is_empty() {
                    self.disputes.remove(&comm);
                }
            }
            return;
        }
        self.disputes.entry(comm).or_default().insert(rank, nodes);
        self.to_rebuild.insert(comm);
    }

    /// Forgets communicators in which ranks are in dispute: what is known of them may rest on what one of the claimers
    /// reported. The ranks in dispute are not in them until one node alone claims each.
    fn rebuild(&mut self) {
        for comm in std::mem::take(&mut self.to_rebuild) {
            let (Some(c), Some(disputed)) = (self.comms.get(&comm), self.disputes.get(&comm)) else {
                continue;
            };
            let others = c.members().values().map(|m| &m.record).filter(|r| !disputed.contains_key(&r.rank));
            let others: Vec<CommRecord> = others.cloned().collect();
            self.remove(comm);
            others.into_iter().for_each(|r| self.membership(r));
        }
    }

    /// Communicators with ranks that processes of several nodes claim.
    pub fn disputes(&self) -> impl Iterator<Item = (CommId, &Dispute)> {
        self.disputes.iter().map(|(comm, d)| (*comm, d))
    }

    /// Takes that a process's counts have risen, if they have: it has issued something since the last tick.
    fn issues_on(&mut self, segment: SegmentId, more: bool) {
        let now_ns = self.now_ns;
        if let Some(p) = self.processes.get_mut(&segment).filter(|_| more) {
            p.issuing.add(now_ns);
        }
    }

    /// Takes that records of a process were lost.
    fn missed(&mut self, segment: SegmentId, what: &'static str, count: u64) {
        let Some(p) = self.processes.get_mut(&segment) else { return };
        let missed = p.missed.entry(what).or_default();
        *missed = missed.saturating_add(count);
        p.call_order.lose();
        if what == COUNTED || what == BEYOND_MEMORY {
            self.losing.insert(segment);
        }
    }

    /// Takes that records of these processes may be lost that they issued up to now.
    fn take_losses(&mut self) {
        for segment in std::mem::take(&mut self.losing) {
            let Some(p) = self.processes.get_mut(&segment) else { continue };
            // Calls before the lost one and behind it were read together.
            p.call_order.lose();
            p.missed_ns = Some(self.now_ns);
            self.mark(segment);
        }
    }

    /// A communicator of which something is heard.
    fn touched(&mut self, comm: CommId) -> Option<&mut Communicator> {
        let c = self.comms.get_mut(&comm)?;
        self.dirty.touch(c);
        Some(c)
    }

    fn operation(&mut self, op: Box<OpRecord>, said: Option<Said>) {
        let Some(comm) = self.comms.get_mut(&op.comm) else {
            let key = op.track().zip(op.order);
            if key.is_some_and(|key| self.retired.loses(op.comm, key)) {
                self.missed(op.segment, BEYOND_MEMORY, 1);
            }
            return;
        };
        let Some(process) = self.processes.get_mut(&op.segment) else { return };
        let unsure = process.unsure();
        op.issued_ns.into_iter().for_each(|t| process.issuing.add(t));
        if said.is_none() {
            let was_fresh = process.call_order.is_fresh();
            process.call_order.add(&op);
            if !was_fresh && process.call_order.is_fresh() {
                self.calling.push(op.segment);
            }
        }
        let gpu = comm.members().get(&op.rank).map_or(&None, |m| &m.record.gpu);
        if !process.clocks.contains_key(gpu) {
            process.clocks.insert(gpu.clone(), ClockMap::default());
        }
        let Some(clock) = process.clocks.get_mut(gpu) else { return };
        comm.stale |= op.order.is_some();
        self.dirty.touch(comm);
        comm.metered = self.outbox.metered() || self.outbox.networked() && comm.spans_nodes();
        let parts = comm.parts_kept();
        let (busy, issuing, spare) = (&mut process.busy, &mut process.issuing, self.outbox.spare());
        let (segment, may_grow) = (op.segment, comm.payer.is_none_or(|p| self.memory.may_grow(p)));
        let place = op.track().zip(op.order);
        let taken = comm.operation(
            op,
            said,
            Around { clock, busy, issuing, spare, unsure, may_grow, now_ns: self.now_ns },
        );
        self.parts = self.parts + comm.parts_kept() - parts;
        account(&mut self.memory, comm);
        if let Some((waited, from_ns, until_ns)) = place.and_then(|place| comm.wait_for_sender(place))
            && let Some(p) = self.processes.get_mut(&waited)
        {
            p.busy.waited(from_ns, until_ns);
        }
        if taken == Taken::NoRoom {
            self.missed(segment, BEYOND_MEMORY, 1);
        }
    }

    /// Takes what a segment says of its process.
    fn process_said(&mut self, record: SegmentRecord, shift_ns: i64) {
        let id = record.id;
        let is_alive = !record.liveness.is_gone();
        match self.processes.get_mut(&id) {
            Some(p) => {
                if !is_alive {
                    p.clocks.values_mut().for_each(ClockMap::retire);
                }
                if !is_alive && !p.record.liveness.is_gone() {
                    self.ended.push_back((self.now_ns, id));
                }
                self.alive -= usize::from(!p.record.liveness.is_gone());
                p.record = record;
                // Somebody follows it, or this would not have come.
                p.silent_ns = None;
            }
            None => {
                let process = Process {
                    record,
                    clocks: BTreeMap::new(),
                    missed: BTreeMap::new(),
                    missed_ns: None,
                    host: None,
                    strains: HostPressures::default(),
                    busy: Busy::default(),
                    issuing: Issuing::default(),
                    call_order: CallOrder::default(),
                    calls_bytes: 0,
                    work: Work::default(),
                    silent_ns: None,
                    shift_ns,
                };
                self.of_host.entry(process.record.host.clone()).or_default().push(id);
                self.processes.insert(id, process);
            }
        }
        self.alive += usize::from(is_alive);
        self.tell_condition(id);
    }

    /// Says how a process is, for those that wait for it.
    fn tell_condition(&mut self, segment: SegmentId) {
        let Some(condition) = self.processes.get(&segment).map(Process::condition) else { return };
        if self.roster.tell(segment, condition) {
            self.mark(segment);
        }
    }

    /// Everything that a process is in is to be looked at again.
    fn mark(&mut self, segment: SegmentId) {
        for (comm, _) in self.roster.seats(segment) {
            if let Some(c) = self.comms.get_mut(comm) {
                c.stale = true;
                self.dirty.touch(c);
            }
        }
    }

    /// Evicts a communicator. What is incomplete is counted as it is first, and the communicator goes the next time, since
    /// exporters look for the communicators of operations that are over. What comes later and was not counted is lost.
    fn retire(&mut self, comm: CommId) {
        let Some(c) = self.comms.get_mut(&comm) else { return };
        if c.held().1 > 0 {
            let parts = c.parts_kept();
            c.count_open(usize::MAX, &mut self.classes, &mut self.outbox);
            self.parts = self.parts + c.parts_kept() - parts;
            account(&mut self.memory, c);
        } else if let Some(c) = self.remove(comm) {
            let (evicted, issued_ns) = c.into_evicted();
            self.retired.put(comm, evicted, issued_ns);
        }
    }

    /// Forgets a communicator, with its statistics.
    fn remove(&mut self, comm: CommId) -> Option<Communicator> {
        let c = self.comms.remove(&comm)?;
        self.dirty.forget(&c);
        self.parts -= c.parts_kept();
        if let Some(payer) = c.payer {
            self.memory.account(payer, c.accounted_bytes, 0);
        }
        for (rank, m) in c.members() {
            if let Some(seat) = c.seat(*rank) {
                self.roster.leave(m.record.segment, seat.actor, comm, *rank);
            }
        }
        self.classes.retain(|k, _| k.comm != comm);
        self.wait_graph.forget(comm);
        Some(c)
    }

    /// The number to add to an update's times.
    fn shift_of(&self, update: &Update) -> i64 {
        let Some(observer) = self.observer else { return 0 };
        let segment = match update {
            Update::Segment(s) => s.id,
            Update::Comm(c) => c.segment,
            Update::Op(o) => o.segment,
            Update::Told(t) => t.op.segment,
            Update::Sketch(s) => s.segment,
            Update::Calls(c) => c.segment,
            Update::Work(w) => w.segment,
            Update::Beat(b) => b.segment,
            Update::Left { segment, .. } | Update::Missed { segment, .. } => *segment,
            Update::Host(h) => h.segment,
            Update::Pair(_)
            | Update::Signatures(_)
            | Update::Silent { .. }
            | Update::Disputed { .. }
            | Update::Clock { .. } => return 0,
            // Its host's clock is known by its processes.
            Update::Hardware(r) => {
                if let Some(shift) = self.hosts.shift_ns(&r.host) {
                    return shift;
                }
                let same = |p: &&Process| p.record.host == r.host;
                return self.processes.values().find(same).map_or(0, |p| p.shift_ns);
            }
        };
        match (self.processes.get(&segment), update) {
            (Some(p), _) => p.shift_ns,
            (None, Update::Segment(s)) => {
                self.hosts.shift_ns(&s.host).unwrap_or_else(|| observer.shift_of(s))
            }
            (None, _) => 0,
        }
    }

    /// Counts what is complete of what was fed since the last tick, which does the same and all that is left to do.
    pub fn settle(&mut self, now_ns: u64) {
        let touched = self.dirty.touched();
        self.count(&touched, now_ns);
    }

    fn count(&mut self, comms: &[CommId], now_ns: u64) {
        for id in comms {
            let Some(comm) = self.comms.get_mut(id) else { continue };
            let (held, parts) = (comm.held(), comm.parts_kept());
            comm.settle(now_ns, self.searched_ns, &mut self.classes, &mut self.outbox);
            if comm.held() != held {
                comm.stale = true;
            }
            self.parts = self.parts + comm.parts_kept() - parts;
            account(&mut self.memory, comm);
        }
        for passed in self.outbox.passed() {
            if let Some(p) = self.processes.get_mut(&passed.segment) {
                p.work.take(passed);
            }
        }
    }

    /// Tells that every process that was there at a moment (host monotonic ns) was found; `None` where nobody searches. The
    /// first operations of a communicator wait for a search that began after them, so that they count with all ranks of
    /// this host.
    pub fn set_searched(&mut self, searched_ns: Option<u64>) {
        self.searched_ns = searched_ns;
    }

    /// Limits what communicators take, as an estimate. Beyond, who takes most is held to a share, and what is left out is
    /// counted as lost. To be called before anything is fed, or with the same kind of limit as before.
    pub fn limit_memory(&mut self, limit: MemoryLimit) {
        self.memory.set_limit(limit);
        self.calls_memory.set_limit(limit.quarter());
    }

    /// Makes room: near the limit by what is only kept to be shown, above it also by operations that go on.
    fn relieve(&mut self, now_ns: u64) {
        if !self.memory.is_near() || now_ns.saturating_sub(self.relieved_ns) < RELIEVE_NS {
            return;
        }
        self.relieved_ns = now_ns;
        self.forget_history();
        if !self.memory.is_short() {
            return;
        }
        self.memory.balance();
        let is_over = |c: &&Communicator| c.payer.is_some_and(|p| !self.memory.may_grow(p));
        let over: Vec<CommId> = self.comms.values().filter(is_over).map(|c| c.id).collect();
        for id in over {
            let Some(comm) = self.comms.get_mut(&id) else { continue };
            let parts = comm.parts_kept();
            comm.relieve(&mut self.classes, &mut self.outbox);
            comm.stale = true;
            self.parts = self.parts + comm.parts_kept() - parts;
            account(&mut self.memory, comm);
        }
    }

    /// Forgets finished operations of those that take most, first of communicators that are over.
    fn forget_history(&mut self) {
        let largest = self.memory.largest();
        let is_large = |c: &Communicator| c.payer.is_some_and(|p| largest.contains(&p));
        let over: Vec<CommId> =
            self.dirty.surplus(0).into_iter().filter(|id| self.comms.get(id).is_some_and(is_large)).collect();
        self.halve(&over);
        if self.memory.is_near() {
            let all: Vec<CommId> = self.comms.values().filter(|c| is_large(c)).map(|c| c.id).collect();
            self.halve(&all);
        }
        if self.memory.is_near() {
            over.iter().take(over.len().div_ceil(2)).for_each(|id| self.retire(*id));
        }
    }

    /// Halves what is kept of communicators' finished operations.
    fn halve(&mut self, comms: &[CommId]) {
        for id in comms {
            let Some(comm) = self.comms.get_mut(id) else { continue };
            let parts = comm.parts_kept();
            comm.halve();
            self.parts = self.parts + comm.parts_kept() - parts;
            account(&mut self.memory, comm);
        }
    }

    /// Lets time pass: operations that are complete enter the statistics.
    pub fn tick(&mut self, now_ns: u64) {
        self.rebuild();
        self.now_ns = now_ns;
        self.take_losses();
        self.take_calls();
        let due = if self.all_gone() == self.wait_graph.is_over() {
            self.dirty.due(now_ns)
        } else {
            self.comms.keys().copied().collect()
        };
        self.dirty.start_pass();
        self.count(&due, now_ns);
        if self.parts > PARTS_KEPT {
            for comm in self.comms.values_mut() {
                comm.halve();
                account(&mut self.memory, comm);
            }
            self.parts = self.comms.values().map(Communicator::parts_kept).sum();
        }
        self.relieve(now_ns);
        for ((segment, gpu), carried) in self.outbox.take_carried() {
            if let Some(p) = self.processes.get(&segment) {
                self.hardware.carry(&p.record.host, &gpu, &carried);
            }
        }
        for (segment, carried) in self.outbox.take_crossed() {
            if let Some(p) = self.processes.get(&segment) {
                self.hardware.cross(&p.record.host, carried);
            }
        }
        self.align();
        self.hardware.settle(now_ns);
        self.explain_late(now_ns, &due);
        self.keep(now_ns, &due);
        for id in &due {
            let Some(c) = self.comms.get_mut(id) else { continue };
            let deserted = || c.seats().iter().all(|s| is_away(self.roster.condition(s.actor)));
            let freed = || c.members().values().filter_map(|m| m.record.finalized_ns).max().unwrap_or(0);
            let over_ns = (c.closed() || deserted()).then(freed);
            self.dirty.looked_at(c, over_ns);
        }
        self.forget_closed();
    }

    /// Takes the calls of which all earlier ones are known.
    fn take_calls(&mut self) {
        let Join { calling, ended, processes, calls_memory: memory, now_ns, .. } = self;
        calling.retain(|id| {
            let Some(p) = processes.get_mut(id) else { return false };
            p.call_order.settle(*now_ns);
            account_calls(memory, p);
            p.call_order.is_fresh()
        });
        while ended.front().is_some_and(|(at_ns, _)| at_ns.saturating_add(LAST_RECORDS_NS) <= *now_ns) {
            let process = ended.pop_front().and_then(|(_, id)| processes.get_mut(&id));
            if let Some(p) = process.filter(|p| p.record.liveness.is_gone()) {
                p.call_order.rest();
                account_calls(memory, p);
            }
        }
    }

    /// Brings the hosts' clocks together, by the ends of collectives that several hosts were in.
    fn align(&mut self) {
        let all = self.outbox.take_ends();
        for (_, parts) in &all {
            let mut ends: BTreeMap<&str, u64> = BTreeMap::new();
            for (segment, at) in parts {
                let Some(p) = self.processes.get(segment) else { continue };
                let end = ends.entry(&p.record.host).or_default();
                *end = (*end).max(*at);
            }
            if ends.len() > 1 {
                let ends: Vec<(String, u64)> = ends.into_iter().map(|(h, t)| (h.to_owned(), t)).collect();
                self.hosts.ended(&ends);
            }
        }
        if !all.is_empty() {
            for host in self.hosts.correct() {
                self.map_anew(&host);
            }
        }
    }

    /// Maps what comes from a host's processes from now on by its clock as it is known now.
    fn map_anew(&mut self, host: &str) {
        let Some(shift) = self.hosts.shift_ns(host) else { return };
        for id in self.of_host.get(host).into_iter().flatten() {
            if let Some(p) = self.processes.get_mut(id) {
                p.shift_ns = shift;
            }
        }
    }

    /// The clocks of the hosts, where they were told.
    pub fn hosts(&self) -> &Hosts {
        &self.hosts
    }

    /// A job that makes communicators again and again must not make us grow: the closed ones that have been so
    /// for longest go, with their statistics.
    fn forget_closed(&mut self) {
        for id in self.dirty.surplus(CLOSED_KEPT) {
            self.retire(id);
        }
        if self.processes.len() > PROCESSES_KEPT && self.alive < self.processes.len() {
            let (roster, memory) = (&mut self.roster, &mut self.calls_memory);
            self.processes.retain(|id, p| {
                let kept = !p.record.liveness.is_gone() || !roster.seats(*id).is_empty();
                if !kept {
                    roster.tell(*id, Condition::default());
                    p.call_order = CallOrder::default();
                    account_calls(memory, p);
                }
                kept
            });
            let processes = &self.processes;
            self.of_host.retain(|_, ids| {
                ids.retain(|id| processes.contains_key(id));
                !ids.is_empty()
            });
        }
    }

    /// True when all processes of a communicator are gone.
    pub fn is_deserted(&self, c: &Communicator) -> bool {
        c.seats().iter().all(|s| is_away(self.roster.condition(s.actor)))
    }

    /// True where processes are followed while they run.
    pub(super) fn is_live(&self) -> bool {
        self.live
    }

    /// True where nothing of a communicator can be in flight any more: its processes have ended.
    pub fn has_ended(&self, c: &Communicator) -> bool {
        self.live && self.is_deserted(c)
    }

    /// The communicators.
    pub fn communicators(&self) -> impl Iterator<Item = &Communicator> {
        self.comms.values()
    }

    /// The communicators that rules may have something to say of beside what stands still.
    pub fn notable(&self) -> impl Iterator<Item = &Communicator> {
        self.dirty.notable().into_iter().filter_map(|id| self.comms.get(&id))
    }

    /// How many communicators are not freed yet, as of the last tick.
    pub fn open(&self) -> usize {
        self.comms.len().saturating_sub(self.dirty.closed())
    }

    /// A communicator as somebody names it who may not know whose it is.
    pub fn resolve(&self, named: CommId) -> Option<CommId> {
        let hash = named.nccl_hash();
        match named.owner() {
            Some(_) => Some(named),
            None => self.comms.range(CommId::new(hash, Some(0))..=named).map(|(id, _)| *id).next(),
        }
    }

    /// A communicator.
    pub fn communicator(&self, id: CommId) -> Option<&Communicator> {
        self.comms.get(&id)
    }

    /// The processes.
    pub fn processes(&self) -> impl Iterator<Item = &Process> {
        self.processes.values()
    }

    /// A process.
    pub fn process(&self, id: SegmentId) -> Option<&Process> {
        self.processes.get(&id)
    }

    /// From now on keeps the operations that are over until they are taken.
    pub fn keep_finished(&mut self) {
        self.outbox.want();
    }

    /// The operations that are over since the last call, in no order; empty unless they are to be kept.
    pub fn take_finished(&mut self) -> Vec<Finished> {
        self.outbox.take()
    }

    /// The operations that have not finished on all ranks, as far as they have come.
    pub fn unfinished(&self) -> Vec<Finished> {
        let all = self
            .comms
            .values()
            .flat_map(|c| c.incomplete().map(move |(track, order, i)| (c, track, order, i)));
        all.filter_map(|(c, track, order, instance)| Finished::open(c.id, c.ranks(), track, order, instance))
            .collect()
    }

    /// Records that it needs no more, for whoever makes new ones.
    pub fn spare(&mut self) -> &mut Spare {
        self.outbox.spare()
    }

    /// From now on tells some of them whole; `None`: none.
    pub fn sample(&mut self, sampling: Option<Sampling>) {
        self.outbox.sample(sampling);
    }

    /// True where not all of them are told whole.
    pub fn is_sampled(&self) -> bool {
        self.outbox.is_sampled()
    }

    /// The most operations a second of one communicator, of those that were over since [`Join::sample`] was last called.
    pub fn busiest(&self) -> f64 {
        self.outbox.busiest()
    }

    /// How many of them nobody took in time.
    pub fn finished_dropped(&self) -> u64 {
        self.outbox.dropped()
    }

    /// The facts about the machines under the jobs.
    pub fn hardware(&self) -> &Hardware {
        &self.hardware
    }

    /// The labels of a process's owner, by OpenTelemetry's names where it has some: what its environment and its cgroup
    /// say, and the pod that its GPUs were given to, where these name no other one.
    pub fn labels(&self, segment: SegmentId) -> BTreeMap<String, String> {
        let Some(process) = self.processes.get(&segment) else { return BTreeMap::new() };
        let record = &process.record;
        let mut labels = record.job.labels.clone();
        let gpus = self
            .roster
            .seats(segment)
            .iter()
            .filter_map(|(comm, rank)| self.comms.get(comm)?.members().get(rank)?.record.gpu.as_deref());
        let mut holders = gpus.map(|gpu| self.hardware.holder(&record.host, gpu, self.now_ns));
        let Some(Some(holder)) = holders.next() else { return labels };
        let of = |h: &Holder| [("k8s.pod.name", h.pod.clone()), ("k8s.namespace.name", h.namespace.clone())];
        let same =
            |h: Option<&Holder>| h.is_some_and(|h| of(h) == of(holder) && h.container == holder.container);
        let names_another = of(holder).iter().any(|(k, v)| labels.get(*k).is_some_and(|known| known != v));
        if names_another || !holders.all(same) {
            return labels;
        }
        labels.extend(of(holder).map(|(k, v)| (k.to_owned(), v)));
        labels.entry("k8s.container.name".to_owned()).or_insert_with(|| holder.container.clone());
        labels
    }

    /// The classes of operations.
    pub fn classes(&self) -> impl Iterator<Item = (&ClassKey, &Class)> {
        self.classes.iter().map(|(k, c)| (k, &**c))
    }

    /// How many there are.
    pub fn class_count(&self) -> usize {
        self.classes.len()
    }

    /// The totals of jobs so far, as far as sketches report them.
    pub fn tallies(&self) -> &Tallies {
        &self.tallies
    }

    /// A class of operations.
    pub fn class(&self, key: &ClassKey) -> Option<&Class> {
        self.classes.get(key).map(|c| &**c)
    }

    /// True when there are processes and all are gone.
    pub fn all_gone(&self) -> bool {
        !self.processes.is_empty() && self.alive == 0
    }

    /// A moment of the host's monotonic clock as wall clock ns since the epoch, by the pair of clocks that a
    /// process of this host wrote down when it started.
    pub fn unix_ns(&self, mono_ns: u64) -> Option<u64> {
        // An observer of many hosts goes by its own clock, and not by that of one of them.
        if let Some(ClockPair { mono_ns: at_ns, unix_ns }) = self.observer {
            return unix_ns.checked_add_signed(mono_ns.checked_signed_diff(at_ns)?);
        }
        let r = &self.processes.values().next()?.record;
        r.created_unix_ns
            .checked_add_signed(mono_ns.checked_signed_diff(r.created_ns)?)
            .filter(|_| r.created_unix_ns > 0)
    }
}

#[cfg(test)]
pub(crate) mod testing {
    //! Hand-made records.

    use crate::model::{
        Algo, ChannelStamp, CommId, CommRecord, DataType, Fact, Flags, Func, GpuFact, Job, Lane, Liveness,
        OpRecord, Proto, Rank, Reading, SegmentId, SegmentRecord, Timing, Update,
    };

    /// A reading of a GPU of the host `node`: for how much of the time a kernel was on it, and how much of its memory's
    /// bandwidth was used.
    pub(crate) fn gpu_reading(gpu: &str, at_ns: u64, (busy, memory_active): (f64, f64)) -> Update {
        let fact = GpuFact {
            gpu: gpu.to_owned(),
            busy: Some(busy),
            memory_active: Some(memory_active),
            ..GpuFact::default()
        };
        let fact = Fact::Gpu(Box::new(fact));
        Update::Hardware(Box::new(Reading { host: "node".to_owned(), at_ns, fact }))
    }

    pub(crate) fn op(lane: Lane, order: u64) -> OpRecord {
        OpRecord {
            segment: SegmentId(1),
            ticket: order,
            comm: CommId::unowned(7),
            rank: Rank(0),
            lane,
            order: Some(order),
            func: Func::AllReduce,
            dtype: Some(DataType::Float32),
            count: 1 << 20,
            root: Some(Rank(0)),
            algo: Some(Algo::Ring),
            proto: Some(Proto::Simple),
            channels: Some(1),
            warps: Some(16),
            seq: Some(order),
            plan: None,
            flags: Flags::default(),
            called_ns: None,
            returned: None,
            redop: None,
            issued_ns: None,
            timing: Timing::Kernel,
            event_ns: None,
            event_seen_ns: None,
            started: 0,
            stopped: 0,
            stamps: Vec::new(),
            net: Vec::new(),
        }
    }

    pub(crate) fn stamp(channel: u8, start: u64, stop: Option<u64>, seen: u64) -> ChannelStamp {
        ChannelStamp {
            channel,
            start_gpu_ns: Some(start),
            stop_gpu_ns: stop,
            start_seen_ns: seen,
            stop_seen_ns: stop.map(|_| seen),
        }
    }

    pub(crate) fn process(n: u32) -> Update {
        Update::Segment(SegmentRecord {
            id: SegmentId(u64::from(n) + 1),
            path: "/dev/shm/x.seg".into(),
            pid: 100 + n,
            host: "node".into(),
            program: "python3".into(),
            nccl: Some("2.28.9".into()),
            abi: Some(5),
            job: Job {
                name: Some("job".into()),
                rank: Some(n),
                size: Some(4),
                local: Some(4),
                ..Job::default()
            },
            owner: None,
            liveness: Liveness::Alive,
            created_ns: 0,
            created_unix_ns: 1_795_244_764_000_000_000,
            losses: Vec::new(),
        })
    }

    pub(crate) fn member(rank: u32, ranks: u32, issued: u64) -> Update {
        Update::Comm(CommRecord {
            segment: SegmentId(u64::from(rank) + 1),
            comm: CommId::unowned(7),
            rank: Rank(rank),
            ranks: Some(ranks),
            nodes: Some(1),
            name: None,
            gpu: None,
            host_clock: 1,
            issued,
            replayed: 0,
            init_ns: 0,
            making: None,
            rules: None,
            finalized_ns: None,
        })
    }

    /// An all-reduce on one channel of one rank. The GPU's clock is the host's plus 1 s; the kernel is seen
    /// 1 us after it starts.
    pub(crate) fn all_reduce(
        rank: u32,
        order: u64,
        issued: u64,
        kernel: Option<(u64, Option<u64>)>,
    ) -> OpRecord {
        const AHEAD: u64 = 1_000_000_000;
        let mut o = op(Lane::Collective, order);
        o.segment = SegmentId(u64::from(rank) + 1);
        o.rank = Rank(rank);
        o.issued_ns = Some(issued);
        o.called_ns = Some(issued.saturating_sub(5_000));
        if let Some((start, stop)) = kernel {
            let mut s = stamp(0, start + AHEAD, stop.map(|s| s + AHEAD), start + 1_000);
            s.stop_seen_ns = stop.map(|s| s + 1_000);
            o.stamps = vec![s];
            o.started = 1;
            o.stopped = u16::from(stop.is_some());
        }
        o
    }
}
