//! One communicator: its ranks, and its operations by issue order.

mod dirty_entry;
mod elsewhere;
mod expected_traffic;
mod late;
mod lately;
mod leads;
mod own_work;
mod settle;
mod unjudged;

pub(super) use dirty_entry::DirtyEntry;
pub(super) use elsewhere::{Inside, Passed};
pub use lately::{LateCosts, LateSecond, Lately};

use super::call_hashes::CallHashes;
use super::class_key::{ClassKey, size_class};
use super::clock::ClockMap;
use super::evicted::Evicted;
use super::exchange::Exchanges;
use super::instance::{Instance, LATE_NS, Late, Measure, Part};
use super::member::{Called, Member, Seat};
use super::memory::Payer;
use super::op_queue::{self, Key, OpQueue};
use super::roster::Roster;
use super::signature::Signature;
use super::time_shares::{Busy, Issuing};
use super::timing::{self, Kernel, Limit};
use crate::model::{
    Algo, Beat, CommId, CommRecord, Coverage, Exchange, Func, Lane, Launch, Making, NetProgress, OpRecord,
    OpState, OperationRef, PairBeat, Proto, Rank, Returned, SegmentId, Signatures, Spare, Track,
    message_bytes,
};
use leads::Leads;
use own_work::OwnWork;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use unjudged::Unjudged;

/// Operations that ranks run in different ways, kept at most.
const SPLIT_KEPT: usize = 64;
/// Operations kept at most; the oldest incomplete ones beyond are given up.
const HELD: usize = 4096;

/// Late arrivals remembered.
const LATE_KEPT: usize = 512;

/// Pauses of ranks remembered, until somebody asks for them.
const RESUMED_KEPT: usize = 16;
/// A late arrival is explained after this, in ns, when the records of the operations before it have come.
const EXPLAINED_AFTER_NS: u64 = 150_000_000;

/// An operation in which a rank was late.
#[derive(Debug, Clone, PartialEq)]
pub struct LateEvent {
    /// Its track.
    pub track: Track,
    /// The operation.
    pub operation: OperationRef,
    /// The late rank.
    pub rank: Rank,
    /// How long after the median of the other ranks, in ns; by a standstill, after the first of them.
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
    /// For how long, in ns, it was in other operations while the others waited for it.
    pub elsewhere_ns: u64,
    /// The part of its lateness that it had in the operation before already, in ns. It costs nothing more, as the others went on
    /// meanwhile.
    pub carried_ns: u64,
    /// True where it is not certain that it held up others by itself: it may have been held too, or nobody may have waited.
    pub unsure: bool,
    /// The untimed operation that may have held it: it excuses the rank for this time and for no later one.
    pub excuse: Option<(CommId, Key)>,
    /// The number of collectives that its process had finished when this was judged, and of transfers with one peer, in all its
    /// communicators.
    pub finished: u64,
    /// True where a whole launch of transfers with all other ranks waited for it, as in an all-to-all.
    pub in_exchange: bool,
    /// True where its GPU began as soon as its host had issued the operation: nothing but the host held it.
    pub by_host: bool,
    /// True where it worked by itself for so much longer than it used to, since its last transfer.
    pub by_own_work: bool,
    /// True where only the hosts' calls say so: its GPU may have had work left meanwhile.
    pub by_calls: bool,
    /// How many operations it speaks for: itself, and its share of those before it whose lateness is not known, as they are
    /// not timed.
    pub speaks_for: f64,
}

impl LateEvent {
    /// True where all other ranks wait for the late one: in collectives and in exchanges.
    pub fn is_for_all(&self) -> bool {
        self.in_exchange || !matches!(self.track, Track::Pair(..))
    }

    /// True where the job waits: all ranks for the late one, or a peer in a transfer for its host or for its work.
    pub fn costs(&self) -> bool {
        self.is_for_all() || self.by_host || self.by_own_work || self.measure == Measure::Standstill
    }

    /// Wall time that the job lost by it and by those that it speaks for, in ns. Of time in which the rank may have been held
    /// elsewhere nobody knows whose it is.
    pub fn cost_ns(&self) -> u64 {
        if self.unsure || self.held_elsewhere != Some(false) || !self.costs() {
            return 0;
        }
        let new_ns = self.by_ns.saturating_sub(self.elsewhere_ns).saturating_sub(self.carried_ns);
        (new_ns as f64 * self.speaks_for) as u64
    }

    /// Wall time that the job lost by several, in ns.
    pub fn sum_ns<'a>(all: impl Iterator<Item = &'a LateEvent>) -> u64 {
        all.fold(0, |sum, e| sum.saturating_add(e.cost_ns()))
    }

    /// When it is to be looked at whether it was held elsewhere, host monotonic ns; absent once it was.
    pub(super) fn due_ns(&self) -> Option<u64> {
        self.held_elsewhere.is_none().then(|| self.came_ns.saturating_add(EXPLAINED_AFTER_NS))
    }
}

/// The times of an operation's stamps, as the agent of the rank's node derived them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Said {
    pub(super) started_ns: Option<u64>,
    pub(super) duration_ns: Option<u64>,
    pub(super) ended_seen_ns: Option<u64>,
    pub(super) finished: bool,
}

impl Said {
    fn kernel(&self) -> Option<Kernel> {
        let (start_ns, duration_ns) = (self.started_ns?, self.duration_ns?);
        Some(Kernel { start_ns, duration_ns, believed: 1, stamped: 1 })
    }
}

/// The state beside a communicator that an operation changes.
pub(super) struct Around<'a> {
    /// The clock of its GPU.
    pub(super) clock: &'a mut ClockMap,
    /// The busy time of its process's GPUs.
    pub(super) busy: &'a mut Busy,
    /// When its process issued operations.
    pub(super) issuing: &'a mut Issuing,
    /// Where the room goes that is not needed any more.
    pub(super) spare: &'a mut Spare,
    /// Nothing can rest on the process's issue orders.
    pub(super) unsure: bool,
    /// Its user may use more memory.
    pub(super) may_grow: bool,
    pub(super) now_ns: u64,
}

/// The fate of an operation's record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Taken {
    Yes,
    /// There is no memory left for its user.
    NoRoom,
}

/// How many transfers from one rank to another both of them issued.
#[derive(Debug, Clone, Copy, Default)]
struct PairCount {
    sent: u64,
    received: u64,
    finished: u64,
    /// The lowest order of which a record was seen.
    first: u64,
    /// How long the sender waited for the receiver, and the receiver for the sender.
    waits: [Waited; 2],
    /// Where not every record comes: the orders below which the sender's ends are finished, and the receiver's; and whether
    /// the last of them may still run.
    done: [Option<u64>; 2],
    may_run: [bool; 2],
    /// The sender's agent said of the last send that is finished that it is the sender's newest transfer.
    sent_is_newest: bool,
}

/// How long one end of transfers usually waits for the other.
#[derive(Debug, Clone, Copy, Default)]
struct Waited {
    times: u32,
    /// Transfers of the pair, and waits among them, since the longest wait was last set aside.
    transfers: u32,
    waits: u32,
    /// The longest of the last waits, and of as many before them, in ns.
    longest_ns: u64,
    before_ns: u64,
    /// When waits began to be much longer than usual, host monotonic ns.
    longer_from_ns: Option<u64>,
    /// The longest of these, in ns.
    longer_ns: u64,
    /// The number of the last of these, counted among all waits.
    last_longer: u32,
}

impl Waited {
    /// Waits of which the longest is taken.
    const OF: u32 = 64;

    /// Transfers after which it is taken from fewer waits. An end that waits once a step would otherwise remember for minutes how
    /// long the start of the job took.
    const OF_TRANSFERS: u32 = 8 * Self::OF;

    /// Waits that become much longer are usual after this time, in ns, if no late host explains them. A host that becomes slow
    /// delays its peers only after its GPU has done all earlier work.
    const ADOPTED_AFTER_NS: u64 = 5_000_000_000;

    /// Takes a wait that ended at a moment, host monotonic ns.
    fn add(&mut self, ns: u64, moment_ns: u64) {
        self.times = self.times.saturating_add(1);
        if self.times > 2 * Self::OF && ns >= self.usual_ns().saturating_add(LATE_NS) {
            let from_ns = *self.longer_from_ns.get_or_insert(moment_ns);
            (self.longer_ns, self.last_longer) = (self.longer_ns.max(ns), self.times);
            if moment_ns.saturating_sub(from_ns) < Self::ADOPTED_AFTER_NS {
                return;
            }
        } else if self.longer_from_ns.is_some() && self.times - self.last_longer >= Self::OF {
            // It was a single one, as there may be now and then.
            self.longest_ns = self.longest_ns.max(std::mem::take(&mut self.longer_ns));
            self.longer_from_ns = None;
        }
        self.longest_ns = self.longest_ns.max(ns);
        self.waits += 1;
        self.set_aside();
    }

    /// Takes a transfer of the pair, whoever waited in it.
    fn pass(&mut self) {
        self.transfers += 1;
        self.set_aside();
    }

    fn set_aside(&mut self) {
        if self.waits >= Self::OF || self.transfers >= Self::OF_TRANSFERS {
            self.before_ns = std::mem::take(&mut self.longest_ns);
            (self.waits, self.transfers) = (0, 0);
        }
    }

    /// The longest wait known, in ns.
    fn longest_known_ns(&self) -> u64 {
        self.longest_ns.max(self.before_ns)
    }

    /// The longest wait that is still usual, in ns: half more than the longest one known.
    fn usual_ns(&self) -> u64 {
        let longest = self.longest_known_ns();
        longest + longest / 2
    }
}

impl PairCount {
    /// The orders below which a rank's ends are finished, of transfers from one rank to another.
    fn done_of(&self, from: Rank, rank: Rank) -> Option<u64> {
        self.done[usize::from(rank != from)]
    }
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
    members: BTreeMap<Rank, Box<Member>>,
    /// Theirs, in no order until they are sorted.
    seats: Vec<Seat>,
    instances: OpQueue,
    /// Operations with news since they were last looked at.
    touched: Vec<Key>,
    /// All that are not counted are to be looked at: what a rank does that comes or goes changes for each of them.
    rescan: bool,
    /// When the first collective was complete without all ranks that the communicator has, host monotonic ns.
    first_ended_ns: Option<u64>,
    /// Operations that time alone makes ready, by when they are to be looked at, host monotonic ns.
    due: BTreeSet<(u64, Key)>,
    /// When the timed ones began on the first GPU and ended on the last, host monotonic ns.
    timed: BTreeMap<(Track, u64), (u64, u64)>,
    /// Somebody asks for these times.
    pub(super) metered: bool,
    /// Operations that ranks run in different ways.
    split: BTreeSet<(Track, u64)>,
    late: VecDeque<LateEvent>,
    /// A rank that may be late; the next operation tells.
    suspected_late: Option<Suspicion>,
    /// The latest collectives before which a rank issued nothing for long: when, host monotonic ns, and their orders.
    resumed: VecDeque<(u64, u64)>,
    signed: CallHashes,
    mismatch: Option<(Track, u64)>,
    /// When that was seen, host monotonic ns.
    mismatch_seen_ns: u64,
    /// Transfers issued by rank pair: sends and receives, and the first order that was seen.
    pairs: BTreeMap<(Rank, Rank), PairCount>,
    exchanges: Exchanges,
    own_work: OwnWork,
    /// Of collectives and replays, the greatest order below which some rank has told that all are done.
    told_done: [u64; 2],
    /// The longest that one of its ranks came after another, in ns.
    longest_ns: u64,
    /// The number of ranks' parts of counted operations that are kept.
    parts_kept: usize,
    /// The same of those that were not, and the memory of what hangs on these, in bytes.
    parts_open: usize,
    attached_bytes: usize,
    /// Its classes of operations, and the memory that these take, in bytes.
    classes: usize,
    class_bytes: usize,
    /// The payer of its memory, and the accounted memory in bytes.
    pub(super) payer: Option<Payer>,
    pub(super) accounted_bytes: usize,
    /// When the newest operation was issued, host monotonic ns. A rank that is made later is another communicator's of the same
    /// id.
    newest_issue_ns: u64,
    /// Collectives that are done on all ranks seen.
    finished: u64,
    /// Collectives of which is known which rank came last.
    judged: u64,
    /// Collectives, and transfers, of which nobody knows who came last.
    unjudged: [Unjudged; 2],
    leads: Leads,
    coverage: Coverage,
    /// Members by the number of ranks that they say it has.
    sizes: BTreeMap<Option<u32>, usize>,
    /// Members that are in the making of it.
    begun: usize,
    /// Members on which NCCL has freed it.
    freed: usize,
    /// True where the wait-for graph has to look at it again.
    pub(super) stale: bool,
    /// A rank of it has aborted it.
    pub(super) was_aborted: bool,
    /// When it has to be looked at again though nothing changes, host monotonic ns.
    pub(super) due_ns: Option<u64>,
    /// Since when sketches of it come, by the observer's clock.
    pub(super) sketched_ns: Option<u64>,
    /// Its entry among the dirty communicators.
    pub(super) dirty: DirtyEntry,
}

impl Communicator {
    pub(super) fn new(id: CommId) -> Self {
        Communicator {
            id,
            members: BTreeMap::new(),
            seats: Vec::new(),
            instances: OpQueue::default(),
            touched: Vec::new(),
            rescan: false,
            first_ended_ns: None,
            due: BTreeSet::new(),
            timed: BTreeMap::new(),
            metered: false,
            split: BTreeSet::new(),
            late: VecDeque::new(),
            suspected_late: None,
            resumed: VecDeque::new(),
            signed: CallHashes::default(),
            mismatch: None,
            mismatch_seen_ns: 0,
            pairs: BTreeMap::new(),
            exchanges: Exchanges::default(),
            own_work: OwnWork::default(),
            told_done: [0; 2],
            longest_ns: 0,
            parts_kept: 0,
            newest_issue_ns: 0,
            parts_open: 0,
            attached_bytes: 0,
            classes: 0,
            class_bytes: 0,
            payer: None,
            accounted_bytes: 0,
            finished: 0,
            judged: 0,
            unjudged: [Unjudged::default(); 2],
            leads: Leads::default(),
            coverage: Coverage::default(),
            sizes: BTreeMap::new(),
            begun: 0,
            freed: 0,
            stale: true,
            was_aborted: false,
            due_ns: None,
            sketched_ns: None,
            dirty: DirtyEntry::default(),
        }
    }

    /// The ranks that are seen.
    pub fn members(&self) -> &BTreeMap<Rank, Box<Member>> {
        &self.members
    }

    /// The number of ranks it has, where NCCL says so.
    pub fn ranks(&self) -> Option<u32> {
        match self.sizes.last_key_value() {
            // Nearly always all say the same.
            Some((ranks, _)) if self.sizes.len() == 1 => *ranks,
            Some((Some(_), _)) => self.members.values().find_map(|m| m.record.ranks),
            _ => None,
        }
    }

    /// True where its ranks are on several nodes, or may be.
    pub(super) fn spans_nodes(&self) -> bool {
        self.members.values().next().is_some_and(|m| m.record.nodes != Some(1))
    }

    /// True when all ranks say how many they are, and do not agree.
    pub fn sizes_differ(&self) -> bool {
        self.sizes.len() > 1 && !self.sizes.contains_key(&None)
    }

    /// True when ranks are in the making of it.
    pub fn in_the_making(&self) -> bool {
        self.begun > 0
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

    /// The transfers between two ranks that are not complete yet.
    pub(super) fn incomplete_transfers(&self) -> impl Iterator<Item = (Track, u64, &Instance)> {
        self.open().filter(|(t, ..)| matches!(t, Track::Pair(..)))
    }

    /// All operations that are not complete.
    pub(super) fn open(&self) -> impl Iterator<Item = (Track, u64, &Instance)> {
        self.instances.open().map(|((t, o), i)| (*t, *o, i))
    }

    /// The latest collectives before which a rank issued nothing for long: when it issued them, host monotonic ns, and their
    /// orders. Where one rank pauses and the others wait for it, each of them shows one side of the same wait.
    pub fn resumed(&self) -> impl Iterator<Item = (u64, u64)> {
        self.resumed.iter().copied()
    }

    /// How many operations are held, and how many of them are not complete.
    pub(super) fn held(&self) -> (usize, usize) {
        (self.instances.len(), self.instances.open_len())
    }

    /// The operations of a track that are not complete yet, by order.
    pub fn incomplete_of(&self, track: Track) -> impl DoubleEndedIterator<Item = (u64, &Instance)> {
        self.instances.open_of(track).map(|((_, o), i)| (*o, i))
    }

    /// The job's name for it, where it gave one.
    pub fn name(&self) -> Option<String> {
        self.members.values().find_map(|m| m.record.name.clone())
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

    /// Takes what a rank's latest collectives are.
    pub(super) fn signed(&mut self, s: &Signatures) {
        if self.members.get(&s.rank).is_some_and(|m| m.record.segment == s.segment) {
            let expected = self.expected();
            self.signed.take(s, expected);
        }
    }

    /// Orders of collectives in which ranks seem to disagree, and that no record has cleared up yet.
    pub(super) fn suspects(&self) -> impl Iterator<Item = u64> {
        let known =
            |o: &u64| self.instance(Track::Collective, *o).is_none_or(|i| i.parts.len() < self.expected());
        self.signed.suspects().filter(known)
    }

    /// True when some rank has told, without a record of it, that an operation is done there.
    pub(super) fn told_done(&self, track: Track, order: u64) -> bool {
        match track {
            Track::Collective => order < self.told_done[0],
            Track::Replay => order < self.told_done[1],
            Track::Pair(..) => false,
        }
    }

    /// True when no rank is known to have started an operation, or to be through with it.
    pub fn started_nowhere(&self, track: Track, order: u64, instance: &Instance) -> bool {
        let told = self.told_done(track, order);
        !told && instance.parts.values().all(|p| !p.finished && p.started_ns.is_none())
    }

    /// Counts the finished transfers of a rank with the peer, and in the direction, with most: an all-to-all has one with each.
    pub(super) fn transfers_finished(&self, rank: Rank) -> u64 {
        let of = self.pairs.iter().filter(|((from, to), _)| from != to && (*from == rank || *to == rank));
        of.map(|(_, n)| n.finished).max().unwrap_or(0)
    }

    /// How many transfers from one rank to another were issued: sends, receives, and the lowest order that was seen.
    pub fn pairs(&self) -> impl Iterator<Item = ((Rank, Rank), u64, u64, u64)> {
        self.pairs.iter().map(|(pair, n)| (*pair, n.sent, n.received, n.first))
    }

    /// The orders of a track below which a rank's operations are known to be done.
    pub fn done(&self, track: Track, rank: Rank) -> u64 {
        let Some(m) = self.members.get(&rank) else { return 0 };
        // Its count may be known before its records are.
        let issued = m.issued(track).unwrap_or(0).min(m.seen_below(track));
        let open = self.incomplete_of(track).find(|(order, i)| {
            *order < issued && i.parts.get(&rank).is_none_or(|p| !p.finished) && *order >= m.done_below(track)
        });
        open.map_or(issued, |(order, _)| order)
    }

    /// The timed operations of a track that have not started on any of these ranks, in order: their GPUs have not come past
    /// the first.
    pub(super) fn queued(&self, track: Track, is_one: impl Fn(&Rank) -> bool) -> Vec<u64> {
        let waits = |p: &Part| !p.is_silent() && !p.finished && p.started_ns.is_none();
        let is_queued = |i: &Instance| {
            let mut parts = i.parts.iter().filter(|(r, _)| is_one(r)).map(|(_, p)| p).peekable();
            parts.peek().is_some() && parts.all(waits)
        };
        self.incomplete_of(track).filter(|(_, i)| is_queued(i)).map(|(order, _)| order).collect()
    }

    /// True where others' ends prove that a rank's GPU has gone past an operation: they are through with something that the rank
    /// issued later, and that does not end without it.
    pub(super) fn is_proven_past(&self, rank: Rank, part: &Part) -> bool {
        let Some(issued) = part.issued_at() else { return false };
        let needs_it = |track: Track, i: &Instance, later: &Part| match track {
            Track::Pair(from, to) => from == rank && i.parts.get(&to).is_some_and(|p| p.finished),
            Track::Collective => !later.op.func.is_rooted() && i.parts.values().any(|p| p.finished),
            Track::Replay => false,
        };
        self.instances.open().any(|((track, _), i)| {
            let later = i.parts.get(&rank).filter(|p| p.issued_at().is_some_and(|l| issued.is_before(l)));
            later.is_some_and(|later| needs_it(*track, i, later))
        })
    }

    /// True where a rank issued an operation after a timed one that its GPU has not started.
    pub(super) fn is_behind_queued(&self, rank: Rank, part: &Part) -> bool {
        let waits = |p: &Part| !p.is_silent() && !p.finished && p.started_ns.is_none();
        let is_before = |p: &Part| p.op.issued_ns < part.op.issued_ns;
        let of_rank = self.instances.open().filter_map(|(_, i)| i.parts.get(&rank));
        part.op.issued_ns.is_some() && of_rank.into_iter().any(|p| waits(p) && is_before(p))
    }

    /// The order below which a rank's ends of transfers are finished, of those that it issued.
    pub fn transfers_done(&self, track: Track, rank: Rank, issued: u64) -> u64 {
        let is_open = |i: &Instance| i.parts.get(&rank).is_some_and(|p| !p.finished);
        let open = self.incomplete_of(track).find(|(order, i)| *order < issued && is_open(i));
        open.map_or(issued, |(order, _)| order)
    }

    /// The same as its agent reported it, where not every record comes.
    pub(super) fn reported_done(&self, track: Track, rank: Rank) -> Option<u64> {
        let Track::Pair(from, to) = track else { return None };
        self.pairs.get(&(from, to))?.done_of(from, rank)
    }

    /// True where its agent said that a rank's end, which is finished by its stamps, may still run.
    pub(super) fn reported_to_run(&self, track: Track, order: u64, rank: Rank) -> bool {
        let Track::Pair(from, to) = track else { return false };
        let end = usize::from(rank != from);
        let of = self.pairs.get(&(from, to));
        of.is_some_and(|n| n.may_run[end] && n.done[end] == order.checked_add(1))
    }

    /// True where the sender's agent said that nothing of the communicator started on its GPU since this send was over by its
    /// stamps.
    pub(super) fn reported_newest(&self, from: Rank, to: Rank, order: u64) -> bool {
        let of = self.pairs.get(&(from, to));
        of.is_some_and(|n| n.sent_is_newest && n.done[0] == order.checked_add(1))
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
        self.freed > 0 && self.freed == self.members.len()
    }

    /// The late arrivals that are remembered, oldest first.
    pub fn late(&self) -> impl Iterator<Item = &LateEvent> {
        self.late.iter()
    }

    /// The cost of a rank's late arrivals that are not remembered any more, in ns: since a moment of the last minute, and in
    /// all.
    pub fn forgotten_late_ns(&self, rank: Rank, since_ns: u64) -> (u64, u64) {
        let Some(m) = self.members.get(&rank) else { return (0, 0) };
        let remembered = || self.late.iter().filter(|e| e.rank == rank);
        let recent = remembered().filter(|e| e.came_ns > since_ns);
        let lately_ns = m.late_cost_lately.as_ref().map_or(0, |l| l.since(since_ns));
        let all_ns = m.late_cost_ns.saturating_sub(LateEvent::sum_ns(remembered()));
        (lately_ns.saturating_sub(LateEvent::sum_ns(recent)).min(all_ns), all_ns)
    }

    /// Adds what a late arrival of a rank cost.
    fn add_late_cost(&mut self, rank: Rank, came_ns: u64, cost_ns: u64) {
        let Some(m) = self.members.get_mut(&rank).filter(|_| cost_ns > 0) else { return };
        m.late_cost_ns = m.late_cost_ns.saturating_add(cost_ns);
        m.late_cost_lately.get_or_insert_default().add(came_ns, cost_ns);
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

    /// True where a rank has issued anything here.
    pub fn has_issued(&self, rank: Rank) -> bool {
        let by_itself = self.members.get(&rank).is_some_and(|m| m.issued_in_all() > 0);
        by_itself
            || self
                .pairs
                .iter()
                .any(|((from, to), n)| *from == rank && n.sent > 0 || *to == rank && n.received > 0)
    }

    /// Collectives of which is known which rank came last.
    pub fn judged(&self) -> u64 {
        self.judged
    }

    /// True where rules may have something to say of it.
    pub(super) fn is_notable(&self) -> bool {
        let uneven = self.sizes_differ() || self.mismatch.is_some() || !self.split.is_empty();
        uneven || self.in_the_making() || !self.late.is_empty() || self.signed.suspects().next().is_some()
    }

    /// When it is to be looked at though nothing is heard of it, host monotonic ns.
    pub(super) fn next_ns(&self) -> Option<u64> {
        let unexplained = self.late.iter().filter_map(LateEvent::due_ns).min();
        let ready = self.due.first().map(|(at_ns, _)| *at_ns);
        [self.due_ns, unexplained, ready].into_iter().flatten().min()
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
            (None, Some(issued)) if order == issued && member.called.is_some() => OpState::Called,
            (_, issued) => {
                let told = self.seats.get(member.seat as usize).map_or(0, |s| s.done(track));
                let told = told.max(member.done_below(track));
                state_of(part, order, issued, told, || member.finished == 0)
            }
        }
    }

    /// Takes back that a rank is in it; gives back the number that it had in the graph.
    pub(super) fn leave(&mut self, segment: SegmentId, rank: Rank) -> Option<u32> {
        if self.members.get(&rank).is_none_or(|m| m.record.segment != segment) {
            return None;
        }
        let gone = self.members.remove(&rank)?;
        self.uncount(Counted::of(&gone.record));
        self.stale = true;
        self.rescan = true;
        let seat = self.seats.swap_remove(gone.seat as usize);
        let moved = self.seats.get(gone.seat as usize).map(|s| s.rank);
        if let Some(m) = moved.and_then(|r| self.members.get_mut(&r)) {
            m.seat = gone.seat;
        }
        Some(seat.actor)
    }

    /// The seats of its members for the wait-for graph, sorted by rank since the last [`Self::sort_seats`].
    pub(super) fn seats(&self) -> &[Seat] {
        &self.seats
    }

    /// The same of one member.
    pub(super) fn seat(&self, rank: Rank) -> Option<&Seat> {
        self.seats.get(self.members.get(&rank)?.seat as usize)
    }

    pub(super) fn sort_seats(&mut self) {
        if self.seats.is_sorted_by_key(|s| s.rank) {
            return;
        }
        self.seats.sort_unstable_by_key(|s| s.rank);
        for (m, at) in self.members.values_mut().zip(0..) {
            m.seat = at;
        }
    }

    /// Takes what a rank's segment says of it.
    pub(super) fn join(&mut self, mut record: CommRecord, roster: &mut Roster) {
        let enter = |r: &mut CommRecord, roster: &mut Roster| {
            let (segment, comm, rank) = (r.segment, r.comm, r.rank);
            roster.enter(segment, &mut r.gpu, comm, rank)
        };
        self.stale = true;
        if self.newest_issue_ns > 0 && record.init_ns > self.newest_issue_ns {
            self.instances.begin_again();
            self.exchanges = Exchanges::default();
        }
        self.was_aborted |= record.making == Some(Making::Aborted);
        match self.members.entry(record.rank) {
            Entry::Occupied(entry) => {
                let m = entry.into_mut();
                let old = std::mem::replace(&mut m.record, record);
                if old.segment != m.record.segment {
                    m.begin_anew();
                }
                if m.counted_by_beats && old.segment == m.record.segment {
                    // How far it is, is told by them.
                    m.record.issued = m.record.issued.max(old.issued);
                    m.record.replayed = m.record.replayed.max(old.replayed);
                }
                let new = &mut m.record;
                let Some(seat) = self.seats.get_mut(m.seat as usize) else { return };
                let mut actor = seat.actor;
                if (old.segment, &old.gpu) != (new.segment, &new.gpu) {
                    roster.leave(old.segment, actor, old.comm, old.rank);
                    actor = enter(new, roster);
                    self.stale = true;
                } else {
                    new.gpu = old.gpu.clone();
                }
                *seat = Seat { done: seat.done, ..Seat::of(new, actor) };
                if (old.finalized_ns, old.making) != (new.finalized_ns, new.making) {
                    self.stale = true;
                }
                let (was, is) = (Counted::of(&old), Counted::of(new));
                if was != is {
                    self.rescan |= was.size != is.size;
                    self.uncount(was);
                    self.count_in(is);
                }
            }
            Entry::Vacant(entry) => {
                let counted = Counted::of(&record);
                let seat = self.seats.len() as u32;
                let actor = enter(&mut record, roster);
                self.seats.push(Seat::of(&record, actor));
                entry.insert(Box::new(Member {
                    finished: 0,
                    counted_by_beats: false,
                    newest_call: None,
                    newest_begun: None,
                    newest_start_ns: None,
                    begun_host_ns: 0,
                    progress_ns: None,
                    waiting_ns: None,
                    late: 0,
                    worst_late_ns: None,
                    late_cost_ns: 0,
                    late_cost_lately: None,
                    called: None,
                    exchanged: None,
                    seat,
                    issued_after_ns: 0,
                    seen_below: [0; 2],
                    graphs_from: u64::MAX,
                    channels: Vec::new(),
                    done_below: [0; 2],
                    record,
                }));
                self.count_in(counted);
                self.stale = true;
                self.rescan = true;
            }
        }
    }

    fn count_in(&mut self, c: Counted) {
        *self.sizes.entry(c.size).or_default() += 1;
        self.begun += usize::from(c.begun);
        self.freed += usize::from(c.freed);
    }

    fn uncount(&mut self, c: Counted) {
        if let Some(n) = self.sizes.get_mut(&c.size) {
            *n -= 1;
            if *n == 0 {
                self.sizes.remove(&c.size);
            }
        }
        self.begun -= usize::from(c.begun);
        self.freed -= usize::from(c.freed);
    }

    pub(super) fn operation(
        &mut self,
        mut op: Box<OpRecord>,
        said: Option<Said>,
        Around { clock, busy, issuing, spare, unsure, may_grow, now_ns }: Around<'_>,
    ) -> Taken {
        let (rank, ranks) = (op.rank, self.ranks());
        self.take_launch(&op);
        let Some(member) = self.members.get_mut(&rank) else { return Taken::Yes };
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
        let is_call = op.lane == Lane::Call;
        let Some(order) = op.order.filter(|_| !is_call) else {
            // What NCCL refused, what does nothing, and a bare call that has returned is not waited for: of some,
            // NCCL makes other operations, or tells nothing.
            let bare = op.flags.preloaded && (is_call || !op.flags.grouped) && op.returned.is_some();
            let issues = !op.flags.captured
                && !bare
                && (is_call || op.count > 0)
                && op.returned.is_none_or(Returned::accepted)
                && op.called_ns.is_some_and(|called_ns| called_ns >= member.issued_after_ns);
            if let (Some(at_ns), true) = (op.called_ns, issues) {
                let returned = op.flags.preloaded.then_some(op.returned.is_some());
                member.called = Some(Called { ticket: op.ticket, func: op.func, at_ns, returned });
            } else if member.called.is_some_and(|c| c.ticket == op.ticket) {
                member.called = None;
            }
            return Taken::Yes;
        };
        let called_ns = op.called_ns.or(op.issued_ns).unwrap_or(0);
        member.issued_after_ns = member.issued_after_ns.max(called_ns.saturating_add(1));
        if member.called.is_some_and(|c| c.ticket == op.ticket || c.at_ns <= called_ns) {
            member.called = None;
        }
        let Some(track) = op.track() else { return Taken::Yes };
        member.has_seen(track, order);
        if let (Track::Collective, Some(issued_ns), None) = (track, op.issued_ns, said)
            && member.resumes(order, issued_ns)
        {
            if self.resumed.len() == RESUMED_KEPT {
                self.resumed.pop_front();
            }
            self.resumed.push_back((issued_ns, order));
        }
        let key = (track, order);
        // Where not every record comes, transfers are counted by beats.
        if let (Track::Pair(from, to), None) = (track, said)
            && (may_grow && self.pairs.len() < PAIRS_KEPT || self.pairs.contains_key(&(from, to)))
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
        self.newest_issue_ns = self.newest_issue_ns.max(op.issued_ns.unwrap_or(0));
        if said.is_some() {
            self.instances.take_a_sample();
        }
        let refuse = |is_oldest, held| !may_grow || is_oldest && held >= HELD;
        let instance = match self.instances.entry(key, refuse) {
            op_queue::Entry::There(instance) => instance,
            op_queue::Entry::Evicted => return Taken::Yes,
            op_queue::Entry::Refused => return Taken::NoRoom,
        };
        if instance.counted {
            if instance.parts.contains_key(&rank) {
                return Taken::Yes;
            }
            // It was counted with the ranks that were known then: of this one nothing was heard yet.
            self.parts_kept += 1;
        }
        if instance.touch() {
            self.touched.push(key);
        }
        let before = instance.parts.get(&rank);
        let was_attached = before.map_or(0, |p| attached_bytes(&p.op));
        let (was_done, was_kernel) = before.map_or((false, None), |p| (p.finished, p.kernel));
        let (fresh, was_timed) = (before.is_none(), before.is_some_and(|p| p.duration_ns().is_some()));
        let was_told = before.is_some_and(|p| all_stopped(&p.op));
        if let Some(p) = before {
            // What brings its last transfers may come without its stamps.
            (op.started, op.stopped) = (op.started.max(p.op.started), op.stopped.max(p.op.stopped));
        }
        let told =
            said.map_or_else(|| all_stopped(&op), |s| s.ended_seen_ns.is_some() || op.event_ns.is_some());
        let kernel = was_kernel.or_else(|| match said {
            Some(said) => said.kernel(),
            None if told => stamped(&op, clock, member),
            None => None,
        });
        if let (Some(k), None) = (&kernel, was_kernel) {
            busy.add(k);
            issuing.leads(k.start_ns.saturating_sub(op.issued_ns.unwrap_or(k.start_ns)));
            if self.metered {
                let span = self.timed.entry(key).or_insert((k.start_ns, k.end_ns()));
                *span = (span.0.min(k.start_ns), span.1.max(k.end_ns()));
            }
            if let (Some(limit), None) = (timing::not_before(&op), said) {
                clock.learn_distance(k.start_ns.saturating_sub(limit));
            }
        }
        // After CUDA graphs, stamps that cannot be true are another operation's, and so is the news that it stopped.
        // Who reads the records later, and all at once, has to find the same: it goes by the rank's own order.
        let stamped = op.stamps.iter().any(|s| s.start_gpu_ns.is_some());
        let is_anothers = || op.ticket >= member.graphs_from || timing::is_of_earlier(&op, clock);
        let stopped = told && (kernel.is_some() || op.event_ns.is_some() || !stamped || !is_anothers());
        let started_ns = kernel
            .map(|k| k.start_ns)
            .or_else(|| said.map_or_else(|| timing::started(&op, clock), |s| s.started_ns));
        let ended_seen_ns = if let Some(said) = said {
            said.ended_seen_ns
        } else if told {
            let last = op.stamps.iter().filter_map(|s| s.stop_seen_ns).max().or(op.event_seen_ns);
            last.or(before.and_then(|p| p.ended_seen_ns))
        } else {
            None
        };
        // A record that comes late may be of an operation that is known to be done already.
        let stopped = said.map_or(stopped, |s| s.finished);
        if started_ns.is_some() || op.event_ns.is_some() {
            member.note_begun(&op);
        }
        member.newest_start_ns = member.newest_start_ns.max(started_ns);
        let done_below = match track {
            Track::Pair(from, to) => {
                self.pairs.get(&(from, to)).and_then(|n| n.done_of(from, rank)).unwrap_or(0)
            }
            _ => member.done_below(track),
        };
        let launch_is_over = || op.plan.is_some_and(|plan| self.exchanges.is_over(rank, plan));
        let finished = was_done || stopped || order < done_below || launch_is_over();
        if finished && order == done_below {
            member.set_done_below(track, order.saturating_add(1));
        }
        if finished && !was_done && op.lane.is_collective() {
            member.has_finished();
        }
        if let (true, Some(bytes), None) = (fresh, op.bytes(ranks), said) {
            match op.lane {
                Lane::Send(peer) => member.exchanged.get_or_insert_default().sent(peer, bytes),
                Lane::Recv(_) => member.exchanged.get_or_insert_default().received(bytes),
                _ => {}
            }
        }
        if fresh {
            self.exchanges.issue(&op, ranks);
        }
        if let (Some(plan), Some(start_ns), Track::Pair(..)) = (op.plan, started_ns, track)
            && (stamped || said.is_some())
        {
            self.exchanges.start(rank, plan, start_ns, kernel.is_some());
        }
        let timed = kernel.is_some() || op.own_event_ns().is_some();
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
            spare.give_stamps(std::mem::take(&mut op.stamps));
        }
        let signature = Signature::of(&op, ranks);
        let way = op.algo.zip(op.proto);
        let differs = instance.way.is_some() && way.is_some() && way != instance.way;
        if differs && !instance.counted && self.split.len() < SPLIT_KEPT {
            self.split.insert(key);
        }
        instance.way = instance.way.or(way);
        let launch = op.launch();
        if instance.counted {
            // Who wants them was given those of the ranks that came in time.
            (op.stamps, op.net) = (Vec::new(), Vec::new());
        } else {
            self.parts_open += usize::from(fresh);
            self.attached_bytes = self.attached_bytes + attached_bytes(&op) - was_attached;
        }
        instance.parts.insert(rank, Part { op, kernel, started_ns, finished, ended_seen_ns, moved_ns });
        let open = self.mismatch.is_none_or(|first| key < first);
        if open && !unsure && !instance.agrees(track, rank, signature) {
            self.mismatch = Some(key);
            self.mismatch_seen_ns = now_ns;
        }
        if started_ns.is_some() || stopped {
            self.imply_done(track, order, rank, launch);
        }
        Taken::Yes
    }

    /// Takes the orders that were counted before the communicator was evicted, and when its last operation was issued.
    pub(super) fn resume(&mut self, (evicted, issued_ns): (Evicted, u64)) {
        self.instances.resume(evicted);
        self.newest_issue_ns = issued_ns;
    }

    /// The orders of all operations that were counted, once the communicator itself is evicted, and when its last operation
    /// was issued.
    pub(super) fn into_evicted(self) -> (Evicted, u64) {
        (self.instances.into_evicted(), self.newest_issue_ns)
    }

    /// Memory that it takes, in bytes, as an estimate: what a hostile segment could make grow is in it.
    pub(super) fn weight(&self) -> usize {
        const MEMBER: usize = 1024;
        const PART: usize = size_of::<Part>() + size_of::<OpRecord>() + 64;
        const PAIR: usize = 2 * size_of::<((Rank, Rank), PairCount)>();
        const LATE: usize = size_of::<LateEvent>() + 128;
        size_of::<Self>()
            + self.members.len() * MEMBER
            + self.instances.weight()
            + (self.parts_kept + self.parts_open) * PART
            + self.attached_bytes
            + self.own_work.bytes()
            + self.pairs.len() * PAIR
            + self.late.len() * LATE
            + self.class_bytes
            + self.exchanges.weight()
    }

    /// Takes how far a rank is, where not every record of it comes.
    pub(super) fn beat(&mut self, beat: &Beat, now_ns: u64) -> bool {
        let Some(member) = self.members.get_mut(&beat.rank).filter(|m| m.record.segment == beat.segment)
        else {
            return false;
        };
        let more = beat.issued > member.record.issued || beat.replayed > member.record.replayed;
        member.counted_by_beats = true;
        if beat.exchanged != Exchange::default() {
            member.exchanged.get_or_insert_default().take(&beat.exchanged);
        }
        if let Some(begun) = beat.begun {
            member.take_reported(begun, now_ns);
        }
        member.record.issued = member.record.issued.max(beat.issued);
        member.record.replayed = member.record.replayed.max(beat.replayed);
        self.stale = true;
        if let Some(seat) = self.seats.get_mut(member.seat as usize) {
            seat.issued = [member.record.issued, member.record.replayed];
            seat.done = [seat.done[0].max(beat.done), seat.done[1].max(beat.replays_done)];
        }
        member.finished = member.finished.max(beat.done.saturating_add(beat.replays_done));
        for (at, (track, done)) in
            [(Track::Collective, beat.done), (Track::Replay, beat.replays_done)].into_iter().enumerate()
        {
            self.told_done[at] = self.told_done[at].max(done);
            let from = member.done_below(track);
            if done <= from {
                continue;
            }
            member.set_done_below(track, done);
            member.progress_ns = Some(now_ns);
            for ((_, order), instance) in self.instances.range_mut((track, from)..(track, done)) {
                let part = instance.parts.get_mut(&beat.rank).filter(|p| !p.finished);
                if let Some(part) = part {
                    part.finished = true;
                    if instance.touch() {
                        self.touched.push((track, *order));
                    }
                }
            }
        }
        more
    }

    /// Takes how many transfers a rank has issued to and from another.
    pub(super) fn pair_beat(&mut self, beat: &PairBeat, now_ns: u64) -> bool {
        let mut more = false;
        let known = self.members.get(&beat.rank).is_some_and(|m| m.record.segment == beat.segment);
        self.stale = true;
        let (own, peer) = (beat.rank, beat.peer);
        for (pair, sent, received) in [((own, peer), beat.sent, 0), ((peer, own), 0, beat.received)] {
            if !known
                || sent + received == 0
                || (self.pairs.len() >= PAIRS_KEPT && !self.pairs.contains_key(&pair))
            {
                continue;
            }
            let n = self.pairs.entry(pair).or_insert(PairCount { first: beat.from, ..PairCount::default() });
            more |= sent > n.sent || received > n.received;
            n.first = n.first.min(beat.from);
            n.sent = n.sent.max(sent);
            n.received = n.received.max(received);
            let (end, done, may_run) = if pair.0 == own {
                (0, beat.sent_done, beat.sent_may_run)
            } else {
                (1, beat.received_done, beat.received_may_run)
            };
            n.may_run[end] = may_run;
            if end == 0 {
                n.sent_is_newest = beat.sent_is_newest;
            }
            let before = n.done[end].unwrap_or(0);
            let issued = if end == 0 { n.sent } else { n.received };
            n.done[end] = n.done[end].max(done.map(|d| d.min(issued)));
            let finished = before..n.done[end].unwrap_or(0);
            if !finished.is_empty() {
                if let Some(member) = self.members.get_mut(&own) {
                    member.progress_ns = Some(now_ns);
                }
                self.finish_transfers(Track::Pair(pair.0, pair.1), own, finished);
            }
        }
        more
    }

    /// Takes the time of a launch from the record that has it, which may have been counted long before: a launch is over, with all
    /// its transfers.
    fn take_launch(&mut self, op: &OpRecord) {
        let (Some(plan), Some(lasted_ns)) = (op.plan, op.launch_ns()) else { return };
        let Some(member) = self.members.get_mut(&op.rank) else { return };
        member.note_begun(op);
        for (track, order) in self.exchanges.lasted(op.rank, plan, lasted_ns) {
            self.finish_transfers(track, op.rank, order..order.saturating_add(1));
            self.imply_done(track, order, op.rank, op.launch());
        }
    }

    /// A rank's ends of these transfers are finished.
    fn finish_transfers(&mut self, track: Track, rank: Rank, orders: Range<u64>) {
        for ((_, order), instance) in self.instances.range_mut((track, orders.start)..(track, orders.end)) {
            let Some(part) = instance.parts.get_mut(&rank).filter(|p| !p.finished) else { continue };
            part.finished = true;
            if instance.touch() {
                self.touched.push((track, *order));
            }
        }
    }

    /// A kernel that started proves that the rank's earlier operations of the track are done; those of
    /// the same launch start together and prove nothing.
    fn imply_done(&mut self, track: Track, order: u64, rank: Rank, proof: Launch) {
        let Some(member) = self.members.get_mut(&rank) else { return };
        let from = member.done_below(track);
        if order <= from {
            return;
        }
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
                if part.op.lane.is_collective() {
                    member.has_finished();
                }
                if instance.touch() {
                    self.touched.push((track, *o));
                }
            }
            if unbroken {
                below = o.saturating_add(1);
            }
        }
        member.set_done_below(track, below.max(from));
    }
}

/// How far a rank is with an operation, by its part of it and by how many it has issued; calls aside. `untimed` says
/// whether NCCL tells nothing about its kernels.
pub(super) fn state_of(
    part: Option<&Part>,
    order: u64,
    issued: Option<u64>,
    told_done: u64,
    untimed: impl FnOnce() -> bool,
) -> OpState {
    match (part, issued) {
        (Some(p), _) if p.finished => OpState::Finished,
        (Some(p), _) if p.op.net.iter().any(NetProgress::shows_gpu_in_it) => OpState::Progressing,
        (Some(p), _) if p.started_ns.is_some() && p.ended_seen_ns.is_none() => OpState::Started,
        // Nothing tells of its start or end but a later one; or what does cannot be true.
        (Some(p), _) if p.op.timing.is_silent() || p.op.started > 0 => OpState::InDoubt,
        // Without a later sign of life the rank's newest operation is in flight; an older one, of which
        // nothing more was heard, is in doubt.
        (Some(_), Some(issued)) if order.saturating_add(1) < issued && untimed() => OpState::InDoubt,
        (Some(_), _) => OpState::Issued,
        (None, _) if order < told_done => OpState::Finished,
        (None, Some(issued)) if order >= issued => OpState::NotIssued,
        (None, _) => OpState::InDoubt,
    }
}

/// Memory of what hangs on a record, in bytes.
fn attached_bytes(op: &OpRecord) -> usize {
    size_of_val(op.stamps.as_slice()) + size_of_val(op.net.as_slice())
}

/// A rank that may have been late, as long as nobody knows whether the others waited for it.
#[derive(Debug, Clone, Copy)]
struct Suspicion {
    /// The first operation in which it was.
    first: Key,
    /// The newest one in which it was, on the same track.
    newest: u64,
    late: Late,
}

/// The properties that members are counted by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Counted {
    /// The number of ranks that it says the communicator has.
    size: Option<u32>,
    /// It is in the making of it.
    begun: bool,
    /// NCCL has freed it there.
    freed: bool,
}

impl Counted {
    fn of(record: &CommRecord) -> Self {
        let freed = record.finalized_ns.is_some();
        let begun = record.making == Some(Making::Begun) && !freed;
        Counted { size: record.ranks, begun, freed }
    }
}

/// The kernel's time by its stamps; its believed starts become the latest ones of their channels.
fn stamped(op: &OpRecord, clock: &ClockMap, member: &mut Member) -> Option<Kernel> {
    let mut limit = Limit::of(op, clock)?;
    let (kernel, first) = timing::kernel(op, &mut limit, |c| member.last_start(c))?;
    let all = kernel.believed == kernel.stamped;
    for s in &op.stamps {
        let earlier = member.last_start(s.channel);
        if let Some(start) = s.start_gpu_ns
            && if all { earlier.is_none_or(|e| start >= e) } else { limit.believes(s, earlier) }
            && start >= first
        {
            member.started(s.channel, start);
        }
    }
    Some(kernel)
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
