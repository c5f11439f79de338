//! One communicator: its ranks, and its operations by issue order.

mod settle;

use super::clock::ClockMap;
use super::held::{Held, Key};
use super::instance::{Instance, Measure, Part};
use super::member::{Called, DoneBelow, Member};
use super::signature::Signature;
use super::stats::{Class, ClassKey, size_class};
use super::timing;
use super::usage::{Busy, Exchanged};
use crate::model::{
    Algo, CommId, CommRecord, Coverage, Func, Lane, NetProgress, OpRecord, OpState, OperationRef, Proto,
    Rank, Returned, SegmentId, Track, message_bytes,
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Operations that ranks run in different ways, kept at most.
const SPLIT_KEPT: usize = 64;
/// Operations kept at most; the oldest incomplete ones beyond are given up.
const HELD: usize = 4096;

/// An operation in which a rank was late.
#[derive(Debug, Clone, PartialEq)]
pub struct LateEvent {
    /// Its track.
    pub track: Track,
    /// Which operation.
    pub operation: OperationRef,
    /// The late rank.
    pub rank: Rank,
    /// How late, in ns.
    pub by_ns: u64,
    /// How that was measured.
    pub measure: Measure,
    /// Transfer time in ns.
    pub transfer_ns: Option<u64>,
    /// When the first rank issued it, host monotonic ns.
    pub at_ns: u64,
    /// When the late rank came to it, host monotonic ns.
    pub came_ns: u64,
    /// True when it came late because it was in operations of other communicators for so much longer than they usually
    /// take; absent until that was looked at.
    pub held_elsewhere: Option<bool>,
}

/// How many transfers from one rank to another both of them issued.
#[derive(Debug, Clone, Copy, Default)]
struct PairCount {
    sent: u64,
    received: u64,
    /// The lowest order of which a record was seen.
    first: u64,
}

/// A timed operation beside another one: its order, and a moment of it.
type Beside = Option<(u64, u64)>;

/// Pairs of ranks that are counted at most.
const PAIRS_KEPT: usize = 65_536;

/// A communicator over all the ranks that are seen.
#[derive(Debug, Clone)]
pub struct Communicator {
    /// Its identity.
    pub id: CommId,
    members: BTreeMap<Rank, Member>,
    instances: Held,
    /// Those of which something new was heard since they were last looked at.
    touched: Vec<Key>,
    /// All that are not counted are to be looked at: what a rank does that comes or goes changes for each of them.
    rescan: bool,
    /// Those that time alone makes ready, by when they are to be looked at, host monotonic ns.
    due: BTreeSet<(u64, Key)>,
    /// When the timed ones began on the first GPU and ended on the last, host monotonic ns.
    timed: BTreeMap<(Track, u64), (u64, u64)>,
    /// Somebody asks for these times.
    pub(super) metered: bool,
    /// Those that ranks run in different ways.
    split: BTreeSet<(Track, u64)>,
    late: VecDeque<LateEvent>,
    mismatch: Option<(Track, u64)>,
    /// When that was seen, host monotonic ns.
    mismatch_seen_ns: u64,
    /// Transfers issued by rank pair: sends and receives, and the first order that was seen.
    pairs: BTreeMap<(Rank, Rank), PairCount>,
    /// The longest that one of its ranks came after another, in ns.
    longest_ns: u64,
    /// Collectives that are done on all ranks seen.
    finished: u64,
    /// Collectives of which is known which rank came last.
    judged: u64,
    coverage: Coverage,
}

impl Communicator {
    pub(super) fn new(id: CommId) -> Self {
        Communicator {
            id,
            members: BTreeMap::new(),
            instances: Held::default(),
            touched: Vec::new(),
            rescan: false,
            due: BTreeSet::new(),
            timed: BTreeMap::new(),
            metered: false,
            split: BTreeSet::new(),
            late: VecDeque::new(),
            mismatch: None,
            mismatch_seen_ns: 0,
            pairs: BTreeMap::new(),
            longest_ns: 0,
            finished: 0,
            judged: 0,
            coverage: Coverage::default(),
        }
    }

    /// The ranks that are seen.
    pub fn members(&self) -> &BTreeMap<Rank, Member> {
        &self.members
    }

    /// The number of ranks it has, where NCCL says so.
    pub fn ranks(&self) -> Option<u32> {
        self.members.values().find_map(|m| m.record.ranks)
    }

    /// The number of ranks that have to be there for a statement about all of them: what NCCL says, or all
    /// that were seen where it does not say.
    pub fn expected(&self) -> usize {
        self.ranks().map_or(self.members.len(), |n| n as usize)
    }

    /// An operation.
    pub fn instance(&self, track: Track, order: u64) -> Option<&Instance> {
        self.instances.get(&(track, order))
    }

    /// The operations that are held, by track and order.
    pub fn instances(&self) -> impl Iterator<Item = (Track, u64, &Instance)> {
        self.instances.iter().map(|((t, o), i)| (*t, *o, i))
    }

    /// The timed operations beside one of the same track: the order of the last one before it and when it ended, that of
    /// the first one after it and when it began, host monotonic ns.
    pub(super) fn timed_beside(&self, track: Track, order: u64) -> (Beside, Beside) {
        let before = self.timed.range((track, 0)..(track, order)).next_back();
        let after = self.timed.range((track, order.saturating_add(1))..=(track, u64::MAX)).next();
        (before.map(|((_, o), (_, end))| (*o, *end)), after.map(|((_, o), (start, _))| (*o, *start)))
    }

    /// The operations that are not complete yet and that ranks run in different ways.
    pub fn split(&self) -> impl Iterator<Item = (Track, u64, &Instance)> {
        self.split.iter().filter_map(|k| Some((k.0, k.1, self.instances.get(k)?)))
    }

    /// The operations that are not complete yet.
    pub fn incomplete(&self) -> impl Iterator<Item = (Track, u64, &Instance)> {
        self.instances.open().map(|((t, o), i)| (*t, *o, i))
    }

    /// The operations of a track that are not complete yet, by order.
    pub fn incomplete_of(&self, track: Track) -> impl Iterator<Item = (u64, &Instance)> {
        self.instances.open_of(track).map(|((_, o), i)| (*o, i))
    }

    /// Pairs of ranks of which one has issued a transfer that the other has not: from, to, the first such order, and
    /// whether it is the receive that lacks.
    pub fn unmatched(&self) -> impl Iterator<Item = ((Rank, Rank), u64, bool)> {
        self.pairs.iter().filter_map(|(pair, n)| {
            // What a rank issued before its records were read is not known.
            let known = n.first == 0 || n.sent.min(n.received) > 0;
            (n.sent != n.received && known).then(|| (*pair, n.sent.min(n.received), n.sent > n.received))
        })
    }

    /// The longest that a rank came after another so far, in ns: the job's own rhythm.
    pub fn longest_ns(&self) -> u64 {
        self.longest_ns
    }

    /// The collectives that some rank has yet to finish, or to issue, as far as is known.
    pub fn in_flight(&self) -> impl Iterator<Item = (Track, u64, &Instance)> {
        self.incomplete().filter(|(track, order, _)| {
            let settled = |r| matches!(self.state(*track, *order, r), OpState::Finished | OpState::InDoubt);
            !matches!(track, Track::Pair(..)) && !self.members.keys().all(|r| settled(*r))
        })
    }

    /// True when NCCL has freed it on every rank that is seen.
    pub fn closed(&self) -> bool {
        !self.members.is_empty() && self.members.values().all(|m| m.record.finalized_ns.is_some())
    }

    /// The late arrivals that are remembered, oldest first.
    pub fn late(&self) -> impl Iterator<Item = &LateEvent> {
        self.late.iter()
    }

    /// The first operation in which the ranks do not agree.
    pub fn mismatch(&self) -> Option<(Track, u64, &Instance)> {
        let (track, order) = self.mismatch?;
        Some((track, order, self.instance(track, order)?))
    }

    /// When the ranks' disagreement was seen, host monotonic ns.
    pub fn mismatch_seen_ns(&self) -> u64 {
        self.mismatch_seen_ns
    }

    /// Collectives that are done on all ranks seen.
    pub fn finished(&self) -> u64 {
        self.finished
    }

    /// Of how many operations the GPU time is known.
    pub fn coverage(&self) -> Coverage {
        self.coverage
    }

    /// Collectives of which is known which rank came last.
    pub fn judged(&self) -> u64 {
        self.judged
    }

    pub(super) fn late_mut(&mut self) -> impl Iterator<Item = &mut LateEvent> {
        self.late.iter_mut().rev()
    }

    /// For how long, in ns, a rank was in operations beyond what their transfers usually take, of those that ended
    /// between two moments on its GPU.
    pub(super) fn excess_ns(
        &self,
        rank: Rank,
        from_ns: u64,
        to_ns: u64,
        classes: &BTreeMap<ClassKey, Class>,
    ) -> u64 {
        let excess = |(track, order, i): (Track, u64, &Instance)| {
            let kernel = i.parts.get(&rank)?.kernel?;
            if !(from_ns..=to_ns).contains(&kernel.end_ns()) {
                return None;
            }
            // The first one makes connections.
            let usual = if order == 0 { 0.0 } else { classes.get(&self.class(track, i)?)?.quantile(0.5)? };
            Some(kernel.duration_ns.saturating_sub(usual as u64))
        };
        self.instances().filter_map(excess).sum()
    }

    /// The class that an operation belongs to.
    fn class(&self, track: Track, instance: &Instance) -> Option<ClassKey> {
        let first = &instance.first()?.op;
        let (func, algo, proto): (Func, Option<Algo>, Option<Proto>) = match track {
            Track::Pair(..) => (Func::SendRecv, None, None),
            _ => (first.func, first.algo, first.proto),
        };
        let size_class = instance.bytes(self.ranks()).and_then(size_class);
        Some(ClassKey { comm: self.id, func, size_class, algo, proto })
    }

    /// Describes an operation as one of its ranks does.
    pub fn describe(&self, track: Track, order: u64, op: &OpRecord) -> OperationRef {
        OperationRef {
            order,
            func: op.func.to_string(),
            bytes: op.dtype.and_then(|d| message_bytes(op.func, d, op.count, self.ranks())),
            dtype: op.dtype.map(|d| d.to_string()),
            algo: op.algo.map(|a| a.to_string()),
            proto: op.proto.map(|p| p.to_string()),
            redop: op.redop.map(|r| r.to_string()),
            track,
        }
    }

    /// How far a rank is with an operation.
    pub fn state(&self, track: Track, order: u64, rank: Rank) -> OpState {
        let Some(member) = self.members.get(&rank) else { return OpState::InDoubt };
        let part = self.instances.get(&(track, order)).and_then(|i| i.parts.get(&rank));
        match (part, member.issued(track)) {
            (Some(p), _) if p.finished => OpState::Finished,
            (Some(p), _) if p.op.net.iter().any(|n| n.stop_ns.is_none() && n.bytes > 0) => {
                OpState::Progressing
            }
            (Some(p), _) if p.started_ns.is_some() && p.ended_seen_ns.is_none() => OpState::Started,
            // Nothing tells of its start or end but a later one; or what does cannot be true.
            (Some(p), _) if p.op.timing.is_silent() || p.op.started > 0 => OpState::InDoubt,
            // Without a later sign of life the rank's newest operation is in flight; an older one, of which
            // nothing more was heard, is in doubt.
            (Some(_), Some(issued)) if order.saturating_add(1) < issued && self.untimed(rank) => {
                OpState::InDoubt
            }
            (Some(_), _) => OpState::Issued,
            (None, Some(issued)) if order >= issued => match member.called {
                Some(_) if order == issued => OpState::Called,
                _ => OpState::NotIssued,
            },
            (None, _) => OpState::InDoubt,
        }
    }

    /// True when NCCL tells nothing about this rank's kernels.
    fn untimed(&self, rank: Rank) -> bool {
        self.members.get(&rank).is_some_and(|m| m.finished == 0)
    }

    /// Takes back that a rank is in it; true when nobody is any more.
    pub(super) fn leave(&mut self, segment: SegmentId, rank: Rank) -> bool {
        if self.members.get(&rank).is_some_and(|m| m.record.segment == segment) {
            self.members.remove(&rank);
            self.rescan = true;
        }
        self.members.is_empty()
    }

    pub(super) fn join(&mut self, record: CommRecord) {
        match self.members.get_mut(&record.rank) {
            Some(m) => {
                self.rescan |= m.record.ranks != record.ranks;
                m.record = record;
            }
            None => {
                self.rescan = true;
                let member = Member {
                    finished: 0,
                    waiting_ns: None,
                    late: 0,
                    worst_late_ns: None,
                    called: None,
                    exchanged: Exchanged::default(),
                    issued_below: 0,
                    graphs_from: u64::MAX,
                    channels: Vec::new(),
                    done_below: DoneBelow::default(),
                    record,
                };
                self.members.insert(member.record.rank, member);
            }
        }
    }

    pub(super) fn operation(
        &mut self,
        mut op: Box<OpRecord>,
        clock: &mut ClockMap,
        busy: &mut Busy,
        unsure: bool,
        now_ns: u64,
    ) {
        let rank = op.rank;
        let Some(member) = self.members.get_mut(&rank) else { return };
        if op.flags.captured || op.lane == Lane::Replay {
            member.graphs_from = member.graphs_from.min(op.ticket);
        }
        for s in &op.stamps {
            if let Some(start) = s.start_gpu_ns {
                clock.observe(start, s.start_seen_ns);
            }
            if let (Some(stop), Some(seen)) = (s.stop_gpu_ns, s.stop_seen_ns) {
                clock.observe(stop, seen);
            }
        }
        let Some(order) = op.order else {
            // What NCCL refused, what does nothing, and a bare call that has returned is not waited for: of some,
            // NCCL makes other operations, or tells nothing.
            let bare = op.flags.preloaded && !op.flags.grouped && op.returned.is_some();
            let issues = !op.flags.captured
                && !bare
                && op.count > 0
                && op.returned.is_none_or(Returned::accepted)
                && op.ticket >= member.issued_below;
            if let (Some(at_ns), true) = (op.called_ns, issues) {
                let returned = op.flags.preloaded.then_some(op.returned.is_some());
                member.called = Some(Called { ticket: op.ticket, func: op.func, at_ns, returned });
            } else if member.called.is_some_and(|c| c.ticket == op.ticket) {
                member.called = None;
            }
            return;
        };
        member.issued_below = member.issued_below.max(op.ticket.saturating_add(1));
        if member.called.is_some_and(|c| c.ticket <= op.ticket) {
            member.called = None;
        }
        let track = match op.lane {
            Lane::Collective => Track::Collective,
            Lane::Replay => Track::Replay,
            Lane::Send(peer) => Track::Pair(rank, peer),
            // A rank's transfer to itself is one operation, told by its send.
            Lane::Recv(peer) if peer == rank => return,
            Lane::Recv(peer) => Track::Pair(peer, rank),
        };
        // NCCL resends nothing after an operation was counted and dropped from memory.
        let key = (track, order);
        if let Track::Pair(from, to) = track
            && (self.pairs.len() < PAIRS_KEPT || self.pairs.contains_key(&(from, to)))
        {
            let first = PairCount { first: order, ..PairCount::default() };
            let n = self.pairs.entry((from, to)).or_insert(first);
            n.first = n.first.min(order);
            let next = order.saturating_add(1);
            let sends = matches!(op.lane, Lane::Send(_));
            if sends || from == to {
                n.sent = n.sent.max(next);
            }
            if !sends || from == to {
                n.received = n.received.max(next);
            }
        }
        let ranks = self.members.values().find_map(|m| m.record.ranks);
        let Some(member) = self.members.get_mut(&rank) else { return };
        let Some(instance) = self.instances.entry(key, |held| held >= HELD) else { return };
        if instance.counted {
            return;
        }
        self.touched.push(key);
        let before = instance.parts.get(&rank);
        let (was_done, was_kernel) = before.map_or((false, None), |p| (p.finished, p.kernel));
        let (fresh, was_timed) = (before.is_none(), before.is_some_and(|p| p.duration_ns().is_some()));
        let was_told = before.is_some_and(|p| all_stopped(&p.op));
        if let Some(p) = before {
            // What brings its last transfers may come without its stamps.
            (op.started, op.stopped) = (op.started.max(p.op.started), op.stopped.max(p.op.stopped));
        }
        let told = all_stopped(&op);
        let kernel = was_kernel
            .or_else(|| if told { timing::kernel(&op, clock, |c| member.last_start(c)) } else { None });
        if kernel.is_some() && was_kernel.is_none() {
            if let Some(k) = &kernel {
                busy.add(k);
                if self.metered {
                    let span = self.timed.entry(key).or_insert((k.start_ns, k.end_ns()));
                    *span = (span.0.min(k.start_ns), span.1.max(k.end_ns()));
                }
            }
            if let (Some(k), Some(limit)) = (kernel, timing::not_before(&op)) {
                clock.learn_distance(k.start_ns.saturating_sub(limit));
            }
            for s in &op.stamps {
                let earlier = member.last_start(s.channel);
                if timing::not_before(&op).is_some_and(|l| timing::believed(s, l, clock, earlier))
                    && let Some(start) = s.start_gpu_ns
                {
                    member.started(s.channel, start);
                }
            }
        }
        // After CUDA graphs, stamps that cannot be true are another operation's, and so is the news that it stopped.
        // Who reads the records later, and all at once, has to find the same: it goes by the rank's own order.
        let stamped = op.stamps.iter().any(|s| s.start_gpu_ns.is_some());
        let graphs = op.ticket >= member.graphs_from;
        let stopped = told && (kernel.is_some() || op.event_ns.is_some() || !stamped || !graphs);
        let started_ns = kernel.map(|k| k.start_ns).or_else(|| timing::started(&op, clock));
        let ended_seen_ns = if told {
            let last = op.stamps.iter().filter_map(|s| s.stop_seen_ns).max().or(op.event_seen_ns);
            last.or(before.and_then(|p| p.ended_seen_ns))
        } else {
            None
        };
        // A record that comes late may be of an operation that is known to be done already.
        let finished = was_done || stopped || order < member.done_below(track);
        if finished && !was_done && op.lane.is_collective() {
            member.finished += 1;
        }
        if let (true, Some(bytes)) = (fresh, op.bytes(ranks)) {
            match op.lane {
                Lane::Send(peer) => member.exchanged.sent(peer, bytes),
                Lane::Recv(_) => member.exchanged.received(bytes),
                _ => {}
            }
        }
        let timed = kernel.is_some() || op.event_ns.is_some();
        self.coverage.operations += u64::from(fresh);
        self.coverage.timed += u64::from(timed && !was_timed);
        self.coverage.impossible += u64::from(told && !was_told && stamped && !timed);
        let moved = |n: &NetProgress| (n.bytes, n.done, n.started);
        let moved_ns = match before {
            Some(p) if p.op.net.iter().map(moved).eq(op.net.iter().map(moved)) => p.moved_ns,
            _ => (!op.net.is_empty()).then_some(now_ns),
        };
        if told && kernel.is_some() {
            // What was made of them is kept.
            op.stamps = Vec::new();
        }
        let signature = Signature::of(&op, ranks);
        let way = op.algo.zip(op.proto);
        if instance.way.is_some() && way.is_some() && way != instance.way && self.split.len() < SPLIT_KEPT {
            self.split.insert(key);
        }
        instance.way = instance.way.or(way);
        instance.parts.insert(rank, Part { op: *op, kernel, started_ns, finished, ended_seen_ns, moved_ns });
        if started_ns.is_some() || stopped {
            self.imply_done(track, order, rank);
        }
        if !unsure {
            self.compare(key, rank, signature, now_ns);
        }
    }

    /// A kernel that started proves that the rank's earlier operations of the track are done; those of
    /// the same launch start together and prove nothing.
    fn imply_done(&mut self, track: Track, order: u64, rank: Rank) {
        let Some(member) = self.members.get_mut(&rank) else { return };
        let from = member.done_below(track);
        if order <= from {
            return;
        }
        let Some(proof) =
            self.instances.get(&(track, order)).and_then(|i| i.parts.get(&rank)).map(|p| p.op.launch())
        else {
            return;
        };
        let mut below = from;
        let mut unbroken = true;
        for ((_, o), instance) in self.instances.range_mut((track, from)..(track, order)) {
            let Some(part) = instance.parts.get_mut(&rank) else { continue };
            if part.op.launch().shared_with(proof) {
                unbroken = false;
                continue;
            }
            if !part.finished {
                part.finished = true;
                self.touched.push((track, *o));
                if part.op.lane.is_collective() {
                    member.finished += 1;
                }
            }
            if unbroken {
                below = o.saturating_add(1);
            }
        }
        // Of pairs there may be as many as a hostile segment likes to name; their few operations are gone through.
        if !matches!(track, Track::Pair(..)) {
            member.done_below.insert(track, below.max(from));
        }
    }

    /// Compares what a rank says an operation is with what the first one said.
    fn compare(&mut self, key: (Track, u64), rank: Rank, signature: Signature, now_ns: u64) {
        if self.mismatch.is_some_and(|m| m <= key) {
            return;
        }
        let Some(instance) = self.instances.get_mut(&key) else { return };
        match &mut instance.said {
            Some((first, said)) if *first == rank => *said = signature,
            Some((_, said)) => {
                let agrees = match key.0 {
                    Track::Pair(..) => said.transfers_as(&signature),
                    _ => said.agrees(&signature),
                };
                if !agrees {
                    self.mismatch = Some(key);
                    self.mismatch_seen_ns = now_ns;
                }
            }
            None => instance.said = Some((rank, signature)),
        }
    }
}

/// True when every channel has stopped, as far as the ABI can tell.
fn all_stopped(op: &OpRecord) -> bool {
    if op.all_channels_stopped() || op.event_ns.is_some() {
        return true;
    }
    // NCCL 2.26 gives no exact number of channels, and point-to-point operations may use fewer than planned.
    let inexact = op.channels.is_none() || !op.lane.is_collective();
    inexact && op.issued_ns.is_some() && op.started > 0 && op.stopped >= op.started
}
