//! The messages of a node to the others: picked from its own join, within a budget of bytes.
//!
//! Processes, memberships, findings and how far ranks are may run deepest into debt, then what stands still and what was asked
//! for. Samples and sketches may not; of these, what does not fit is left out and counted. Pure: it is told the time, and
//! somebody else sends.

mod progress;
mod sketches;

use super::message::{self as m, OperationKey};
use super::subject::{Topic, bucket};
use crate::join::{Finished, Join, Sampling};
use crate::model::{
    CallState, CommId, CommRecord, Fact, Finding, Func, HostFact, ProcessState, Rank, Reading, SegmentId,
    Told, Track,
};
use progress::Stood;
use prost::Message as _;
use sketches::{ClassOf, Usual};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

const S: u64 = 1_000_000_000;
/// An operation that is known not to be over and is older than this, in ns, stands still for the others to see.
const STANDS_NS: u64 = 100_000_000;
/// The same where nothing tells whether it is over.
const IN_DOUBT_NS: u64 = S;
/// Operations beyond the oldest that is not over, of a rank, that are told with it: they tell a wrong call from one too
/// many.
const AHEAD: usize = 4;
/// Operations that are not over, of a rank of a communicator that stands still, that are told at most.
const OPEN_MAX: usize = 256;
/// Progress within an operation that stands still is sent again after this, in ns.
const AGAIN_NS: u64 = S;
/// A process none of whose ranks moved on for so long, in ns, is asked what it does.
const IDLE_NS: u64 = S;
/// Facts that do not change are sent again after this, in ns, for those who began to listen since.
const REFRESH_NS: u64 = 30 * S;
/// A message is not made larger than this, in bytes.
const MESSAGE: usize = 128 << 10;
/// An operation is interesting if it takes so many times as long as usual, and this much longer in ns.
const SLOW: u64 = 4;
const SLOW_BY_NS: u64 = 5_000_000;
/// Operations of a kind before it is known what is usual.
const USUAL: u32 = 16;
/// An operation that takes so much longer in ns is interesting after a few of its kind, and so is one to which a rank came
/// so late.
const FAR_LONGER_NS: u64 = 100_000_000;
/// So many of its kind are enough for that.
const USUAL_FEW: u32 = 4;
/// Interesting operations a second that others are told of.
const ANNOUNCED: u32 = 10;
/// Operations that were asked for and are not over yet, remembered at most.
const ASKED: usize = 1024;
/// Readings of samplers that wait at most.
const READINGS: usize = 1024;
/// The most that is left out by sampling: one of `1 << 20`.
const LEVEL_MAX: u32 = 20;

/// A budget that nothing exceeds, in bytes a second.
const EVERYTHING: u64 = 1 << 50;

/// Bytes that an item of a message takes beside its own, for its tag and its length.
const ITEM_FRAME: i64 = 3;

/// The depth to which something may run into debt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Priority {
    /// The budget of a second: processes, memberships, findings, and how far ranks are. Without these, operations that were
    /// told as standing still seem to do so for ever.
    First,
    /// Half of that: what stands still, and what somebody asked for.
    Urgent,
    /// No debt.
    Usual,
}

/// Why an operation was not published.
const NOT_SAMPLED: &str = "not sampled";
const OVER_BUDGET: &str = "over the budget";
const NO_SERVER: &str = "no server could be reached";
const NOT_TAKEN: &str = "not taken in time";
/// Every reason for which an operation is left out: counters of all of them are there before the first one is.
pub const REASONS: [&str; 4] = [NOT_SAMPLED, OVER_BUDGET, NO_SERVER, NOT_TAKEN];

/// A moment by both clocks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Moment {
    /// Host monotonic ns.
    pub mono_ns: u64,
    /// Wall clock ns since the epoch.
    pub unix_ns: u64,
}

/// Something to be published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outgoing {
    /// Where.
    pub topic: Topic,
    /// What.
    pub bytes: Vec<u8>,
    /// How many operations the books count as published with it.
    pub operations: u64,
}

/// An agent's accounting.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Books {
    /// Operations that were over, each rank's part being one.
    pub observed: u64,
    /// The number of them that were published.
    pub published: u64,
    /// The others, by reason.
    pub left_out: BTreeMap<&'static str, u64>,
    /// Bytes published.
    pub bytes: u64,
}

impl Books {
    fn leave_out(&mut self, why: &'static str, n: u64) {
        if n > 0 {
            *self.left_out.entry(why).or_default() += n;
        }
    }

    /// True when all that was seen was published or counted as left out.
    pub fn balance(&self) -> bool {
        self.observed == self.published + self.left_out.values().sum::<u64>()
    }
}

/// Something that was told, and when.
#[derive(Debug)]
struct Sent<T> {
    what: T,
    at_ns: u64,
}

/// Picks what is published, and remembers what was.
#[derive(Debug)]
pub struct Publisher {
    /// Nothing is left out.
    is_everything: bool,
    /// Processes of several users share communicators.
    shares_communicators: bool,
    /// Segments and directories that are not read.
    unread: u64,
    /// There may be some that are not found yet.
    unsearched: bool,
    node: String,
    run: u64,
    rate: u64,
    tokens: i64,
    refilled_ns: Option<u64>,
    sequences: BTreeMap<Topic, u64>,
    drafts: BTreeMap<Topic, (m::Envelope, usize, u64)>,
    out: Vec<Outgoing>,
    books: Books,
    level: u32,
    /// The most operations a second of one communicator, in this second.
    busiest: f64,
    wanted: u64,
    refused: bool,
    second: u64,
    announced: (u64, u32),
    /// When the latest late arrival that was announced came, host monotonic ns.
    late_announced_ns: HashMap<CommId, u64>,
    /// The same of operations after a pause.
    pauses_announced_ns: HashMap<CommId, u64>,
    /// With each, whether nothing can rest on its orders.
    processes: HashMap<SegmentId, Sent<(m::Process, bool)>>,
    members: HashMap<(CommId, Rank), Sent<m::Member>>,
    beats: HashMap<(CommId, Rank), Sent<m::Beat>>,
    /// The order from which on collectives have not been told in short.
    signed: HashMap<(CommId, Rank), u64>,
    pairs: HashMap<(CommId, Rank, Rank), m::Pair>,
    hosts: HashMap<SegmentId, Sent<HostFact>>,
    calls: HashMap<SegmentId, CallState>,
    /// The second from which on the work of a process is to be told.
    work: HashMap<SegmentId, u64>,
    /// When a rank of a process was last seen to move on.
    moved: HashMap<SegmentId, u64>,
    findings: HashMap<u64, bool>,
    standing: HashMap<Stood, Sent<(u64, bool)>>,
    /// The standing parts that have ended since they were sent.
    released: HashSet<Stood>,
    sketches: HashMap<ClassOf, m::Sketch>,
    /// The second from which on a new sketch counts.
    sketched_s: u64,
    /// When it first looked, host monotonic ns. What began before is history: an agent before this one may have told of it.
    began_ns: u64,
    usual: HashMap<(CommId, Func, Option<u8>), Usual>,
    readings: Vec<Vec<u8>>,
    asked: BTreeSet<(CommId, Track, u64)>,
    wished: Vec<(CommId, Track, u64)>,
    bursts: BTreeMap<CommId, u64>,
    dropped: u64,
    refresh: bool,
    /// The moment of what is said.
    now: Moment,
}

impl Publisher {
    /// Of a node, whose agent began at a moment of the wall clock (ns); so many bytes a second.
    pub fn new(node: impl Into<String>, run: u64, bytes_per_second: u64) -> Self {
        Publisher {
            node: node.into(),
            run,
            rate: bytes_per_second.max(1024),
            tokens: 0,
            refilled_ns: None,
            sequences: BTreeMap::new(),
            drafts: BTreeMap::new(),
            out: Vec::new(),
            books: Books::default(),
            level: 0,
            busiest: 0.0,
            wanted: 0,
            refused: false,
            second: 0,
            announced: (0, 0),
            late_announced_ns: HashMap::new(),
            pauses_announced_ns: HashMap::new(),
            is_everything: false,
            shares_communicators: false,
            unread: 0,
            unsearched: false,
            processes: HashMap::new(),
            members: HashMap::new(),
            beats: HashMap::new(),
            signed: HashMap::new(),
            pairs: HashMap::new(),
            hosts: HashMap::new(),
            calls: HashMap::new(),
            work: HashMap::new(),
            moved: HashMap::new(),
            findings: HashMap::new(),
            standing: HashMap::new(),
            released: HashSet::new(),
            sketches: HashMap::new(),
            sketched_s: 0,
            began_ns: 0,
            usual: HashMap::new(),
            readings: Vec::new(),
            asked: BTreeSet::new(),
            wished: Vec::new(),
            bursts: BTreeMap::new(),
            dropped: 0,
            refresh: false,
            now: Moment::default(),
        }
    }

    /// The books.
    pub fn books(&self) -> &Books {
        &self.books
    }

    /// Leaves nothing out from now on: for a recording, which has no budget.
    #[must_use]
    pub fn of_everything(mut self) -> Self {
        (self.is_everything, self.rate) = (true, EVERYTHING);
        self
    }

    /// The operations that the join is to give whole from now on.
    pub fn sampling(&self) -> Sampling {
        let whole = self.bursts.keys().copied().collect();
        Sampling { level: self.level, whole, is_everything: self.is_everything }
    }

    /// Takes how many segments and directories are not read now, and whether there may be some that are not found yet.
    pub fn set_unread(&mut self, unread: u64, unsearched: bool) {
        (self.unread, self.unsearched) = (unread, unsearched);
    }

    /// From now on tells that communicators are shared by users, or that they are not.
    pub fn share_communicators(&mut self, share: bool) {
        self.shares_communicators = share;
    }

    /// From now on publishes so many bytes a second at most.
    pub fn set_rate(&mut self, bytes_per_second: u64) {
        self.rate = bytes_per_second.max(1024);
    }

    /// Takes what a sampler read. What goes over wires is compared on the node itself.
    pub fn reading(&mut self, reading: &Reading) {
        let wanted =
            !matches!(reading.fact, Fact::Traffic(_) | Fact::Sampler(_) | Fact::Node(_) | Fact::Pods(_));
        if wanted
            && self.readings.len() < READINGS
            && let Ok(text) = serde_json::to_vec(reading)
        {
            self.readings.push(text);
        }
    }

    /// Somebody wants parts of operations.
    pub fn wish(&mut self, operations: impl Iterator<Item = (CommId, Track, u64)>) {
        let room = ASKED.saturating_sub(self.wished.len());
        self.wished.extend(operations.take(room));
    }

    /// Operations that were found interesting on this node: the others are told, so that they send their parts.
    pub fn announce(&mut self, operations: Vec<(CommId, Track, u64)>) {
        for (comm, track, order) in operations.into_iter().take(ANNOUNCED as usize) {
            if self.wished.contains(&(comm, track, order)) {
                continue;
            }
            let key = OperationKey::of(comm, track, order);
            self.draft(Topic::Bucket(bucket(comm)), key.encoded_len()).announced.push(key);
            self.wish(std::iter::once((comm, track, order)));
        }
    }

    /// Announces operations to which a rank of this node came very late, and their neighbors: hosts' times of three
    /// operations show whether the others waited.
    fn announce_late(&mut self, join: &Join, second: u64) {
        let now_ns = self.now.mono_ns;
        for c in join.notable() {
            let mut after_ns = self.late_announced_ns.get(&c.id).copied().unwrap_or(self.began_ns);
            let is_new = |t: u64| t > after_ns && t <= now_ns;
            let mut new: Vec<_> = c
                .late()
                .filter(|e| e.by_ns >= FAR_LONGER_NS && is_new(e.came_ns))
                .map(|e| (e.came_ns, e.track, e.operation.order))
                .collect();
            new.sort_unstable();
            for (came_ns, track, order) in new {
                if !self.may_announce_late(second) {
                    return;
                }
                after_ns = came_ns;
                self.late_announced_ns.insert(c.id, after_ns);
                let orders = order.saturating_sub(1)..=order.saturating_add(1);
                self.announce(orders.map(|o| (c.id, track, o)).collect());
            }
        }
    }

    /// Announces what ranks of this node issued last before a pause, and first after it. Where they waited for a late rank of
    /// another node, its operations are among those; where they were late themselves, those of the others are.
    fn announce_pauses(&mut self, join: &Join, second: u64) {
        for c in join.communicators() {
            let after_ns = self.pauses_announced_ns.get(&c.id).copied().unwrap_or(self.began_ns);
            let mut new: Vec<(u64, u64)> = c.resumed().filter(|(t, _)| *t > after_ns).collect();
            new.sort_unstable();
            let mut told = BTreeSet::new();
            for (issued_ns, order) in new {
                self.pauses_announced_ns.insert(c.id, issued_ns);
                if !told.insert(order) {
                    continue;
                }
                if !self.may_announce_late(second) {
                    return;
                }
                let orders = order.saturating_sub(1)..=order;
                self.announce(orders.map(|o| (c.id, Track::Collective, o)).collect());
            }
        }
    }

    /// Counts an announcement; false where there were as many this second as there may be.
    fn may_announce(&mut self, second: u64) -> bool {
        let (of, many) = &mut self.announced;
        *many = if *of == second { *many + 1 } else { 1 };
        *of = second;
        *many <= ANNOUNCED
    }

    /// The same of operations to which somebody was late: half of what may be announced is left to slow operations.
    fn may_announce_late(&mut self, second: u64) -> bool {
        (self.announced.0 != second || self.announced.1 < ANNOUNCED / 2) && self.may_announce(second)
    }

    /// Somebody wants all of a communicator's operations until a moment.
    pub fn burst(&mut self, comm: CommId, until_ns: u64) {
        self.bursts.insert(comm, until_ns);
    }

    /// Somebody began to listen, or the bus was away: everything is told again.
    pub fn refresh(&mut self) {
        self.refresh = true;
    }

    /// Counts operations as left out that could not be published.
    pub fn unsent(&mut self, operations: u64) {
        let n = operations.min(self.books.published);
        self.books.published -= n;
        self.books.leave_out(NO_SERVER, n);
    }

    /// Looks at what is new, and says what is to be published.
    pub fn look(
        &mut self,
        join: &Join,
        finished: &[Finished],
        findings: &[Finding],
        now: Moment,
    ) -> Vec<Outgoing> {
        self.now = now;
        self.refill(now.mono_ns);
        self.bursts.retain(|_, until| *until > now.mono_ns);
        let second = now.mono_ns / S;
        let new_second = second != self.second;
        self.second = second;
        if self.sketched_s == 0 {
            (self.sketched_s, self.began_ns) = (second.saturating_sub(1), now.mono_ns);
        }
        if std::mem::take(&mut self.refresh) {
            self.processes.clear();
            self.members.clear();
            self.beats.clear();
            self.pairs.clear();
            self.standing.clear();
            self.released.clear();
            self.findings.clear();
            self.hosts.clear();
            self.calls.clear();
            self.work.clear();
        }
        let mut moved = HashSet::new();
        self.tell_processes(join, now.mono_ns, &mut moved);
        self.tell_members(join, now.mono_ns);
        self.tell_findings(findings);
        self.tell_standing(join, now.mono_ns, new_second, &mut moved);
        // Where something that stood still is over, all ranks move on at once, and what is told of them has to fit
        // together.
        let is_released = self.note_released(join);
        self.tell_beats(join, now.mono_ns, new_second || is_released, &moved);
        self.tell_hosts(join, now.mono_ns);
        self.tell_calls(join, now.mono_ns);
        if new_second && join.is_sampled() {
            self.tell_work(join, now.mono_ns);
        }
        self.announce_late(join, second);
        self.announce_pauses(join, second);
        self.tell_wished(join);
        if new_second {
            self.tell_idle(join, now.mono_ns);
        }
        self.tell_finished(join, finished, second);
        self.busiest = self.busiest.max(join.busiest());
        let dropped = join.finished_dropped();
        self.books.observed += dropped - self.dropped;
        self.books.leave_out(NOT_TAKEN, dropped - self.dropped);
        self.dropped = dropped;
        self.tell_readings();
        if new_second {
            if !self.is_everything {
                self.tell_sketches(second);
            }
            self.tell_books(false);
            self.adapt();
            self.forget(join);
        }
        self.finish()
    }

    /// The last words: what waits is not waited for any more. Where nothing is left out, the operations that are in flight are told as
    /// they are.
    pub fn last_of(&mut self, join: &Join, now: Moment) -> Vec<Outgoing> {
        if self.is_everything {
            self.tell_all_open(join, now.mono_ns);
        }
        self.last(now)
    }

    /// The last words: what waits is not waited for any more.
    pub fn last(&mut self, now: Moment) -> Vec<Outgoing> {
        self.now = now;
        self.tell_books(true);
        self.finish()
    }

    fn refill(&mut self, now_ns: u64) {
        let rate = self.rate as i64;
        let since = self.refilled_ns.map_or(S, |t| now_ns.saturating_sub(t)).min(2 * S);
        self.refilled_ns = Some(now_ns);
        let more = (u128::from(self.rate) * u128::from(since) / u128::from(S)) as i64;
        self.tokens = (self.tokens + more).min(2 * rate);
    }

    /// Takes bytes from the budget, if they fit. What does not is told again while it lasts.
    fn pay(&mut self, bytes: usize, priority: Priority) -> bool {
        let least = match priority {
            Priority::First => -(self.rate as i64),
            Priority::Urgent => -(self.rate as i64) / 2,
            Priority::Usual => 0,
        };
        let paid = self.tokens - (bytes as i64 + ITEM_FRAME) >= least;
        if paid {
            self.charge(bytes);
        } else {
            self.wanted += bytes as u64 + ITEM_FRAME as u64;
            self.refused = true;
        }
        paid
    }

    /// Takes bytes from the budget that are sent in any case.
    fn charge(&mut self, bytes: usize) {
        self.wanted += bytes as u64 + ITEM_FRAME as u64;
        self.tokens -= bytes as i64 + ITEM_FRAME;
    }

    fn draft(&mut self, topic: Topic, bytes: usize) -> &mut m::Envelope {
        if self.drafts.get(&topic).is_some_and(|d| d.1 + bytes > MESSAGE) {
            self.send(topic);
        }
        let draft = self.drafts.entry(topic).or_default();
        draft.1 += bytes;
        &mut draft.0
    }

    /// Closes a draft.
    fn send(&mut self, topic: Topic) {
        let Some((mut envelope, _, operations)) = self.drafts.remove(&topic) else { return };
        let sequence = self.sequences.entry(topic).or_default();
        *sequence += 1;
        envelope.version = m::VERSION;
        envelope.node.clone_from(&self.node);
        envelope.run = self.run;
        envelope.sequence = *sequence;
        (envelope.sent_ns, envelope.sent_unix_ns) = (self.now.mono_ns, self.now.unix_ns);
        let bytes = envelope.encode_to_vec();
        self.books.bytes += bytes.len() as u64;
        self.out.push(Outgoing { topic, bytes, operations });
    }

    fn finish(&mut self) -> Vec<Outgoing> {
        let topics: Vec<Topic> = self.drafts.keys().copied().collect();
        topics.into_iter().for_each(|t| self.send(t));
        std::mem::take(&mut self.out)
    }

    fn tell_processes(&mut self, join: &Join, now_ns: u64, moved: &mut HashSet<(CommId, Rank)>) {
        for p in join.processes() {
            let missed = p.missed.iter().map(|(k, v)| (*k, *v));
            let shares_communicators = self.shares_communicators;
            let told = m::Process { shares_communicators, ..m::Process::of(&p.record, missed) };
            let unsure = p.unsure();
            let due = match self.processes.get(&p.record.id) {
                None => true,
                // Counters of losses may run; that it is gone, or not to be relied on, is told at once.
                Some(s) if s.what.0 != told => {
                    (s.what.0.alive, s.what.1) != (told.alive, unsure) || now_ns >= s.at_ns + S
                }
                Some(s) => told.alive && now_ns >= s.at_ns + REFRESH_NS,
            };
            let bytes = told.encoded_len();
            if due && self.pay(bytes, Priority::First) {
                // An analyser that learns of the end has to know the last operations of the process.
                if !told.alive {
                    moved.extend(join.memberships(p.record.id));
                }
                self.draft(Topic::Node, bytes).processes.push(told.clone());
                self.processes.insert(p.record.id, Sent { what: (told, unsure), at_ns: now_ns });
            }
        }
    }

    fn tell_members(&mut self, join: &Join, now_ns: u64) {
        let mut here: HashSet<(CommId, Rank)> = HashSet::new();
        for c in join.communicators() {
            for (rank, member) in c.members() {
                here.insert((c.id, *rank));
                // What was issued is told by beats.
                let record = CommRecord { issued: 0, replayed: 0, ..member.record.clone() };
                let told = m::Member::of(&record);
                let due = self.members.get(&(c.id, *rank)).is_none_or(|s| {
                    s.what != told || told.finalized_ns.is_none() && now_ns >= s.at_ns + REFRESH_NS
                });
                let bytes = told.encoded_len();
                if due && self.pay(bytes, Priority::First) {
                    self.draft(Topic::Bucket(bucket(c.id)), bytes).members.push(told.clone());
                    self.members.insert((c.id, *rank), Sent { what: told, at_ns: now_ns });
                }
            }
        }
        // A closed communicator is forgotten here; only one that never was is taken back.
        let left: Vec<(CommId, Rank)> = self.members.keys().filter(|k| !here.contains(*k)).copied().collect();
        for key in left {
            let Some(was) = self.members.remove(&key) else { continue };
            self.beats.remove(&key);
            self.signed.remove(&key);
            if was.what.finalized_ns.is_none() {
                let told = m::Member { left: true, ..was.what };
                let bytes = told.encoded_len();
                // Debt or not: it is said once.
                self.charge(bytes);
                self.draft(Topic::Bucket(bucket(key.0)), bytes).members.push(told);
            }
        }
    }

    fn tell_findings(&mut self, findings: &[Finding]) {
        for f in findings {
            if self.findings.get(&f.id.0) == Some(&f.open) {
                continue;
            }
            let Ok(text) = serde_json::to_vec(f) else { continue };
            if self.pay(text.len(), Priority::First) {
                self.draft(Topic::Node, text.len()).findings.push(text);
                self.findings.insert(f.id.0, f.open);
            }
        }
    }

    /// Sends the operating system's facts where they matter: want, a stack, an end; and what an idle process does.
    fn tell_hosts(&mut self, join: &Join, now_ns: u64) {
        for p in join.processes() {
            let Some(fact) = &p.host else { continue };
            let wants = [fact.cpu_starved, fact.cpu_throttled, fact.memory_pressure];
            let wants = wants.into_iter().flatten().any(|s| s >= 0.05);
            let idle = self.moved.get(&p.record.id).is_none_or(|t| now_ns >= t + IDLE_NS);
            let due = self.hosts.get(&p.record.id).is_none_or(|s| {
                let was = &s.what;
                let at_once = was.stack_ns != fact.stack_ns
                    || was.oom_kills != fact.oom_kills
                    || was.is_over() != fact.is_over()
                    || matches!(fact.state, Some(ProcessState::Stopped { .. })) && was.state != fact.state;
                at_once || now_ns >= s.at_ns + S && (wants || idle && was.state != fact.state)
            });
            if due {
                let told = m::Host::of(fact);
                let bytes = told.encoded_len();
                if self.pay(bytes, Priority::Urgent) {
                    self.draft(Topic::Node, bytes).hosts.push(told);
                    self.hosts.insert(p.record.id, Sent { what: fact.clone(), at_ns: now_ns });
                }
            }
        }
    }

    /// Tells how processes keep to the order of their calls, once they issue nothing for a second.
    fn tell_calls(&mut self, join: &Join, now_ns: u64) {
        for p in join.processes() {
            if p.issuing.last_ns().is_none_or(|t| now_ns < t + S) {
                continue;
            }
            let state = p.call_order.state(p.record.id);
            let tells = state.usual_ns.is_some() || !state.mixes.is_empty();
            if !tells || self.calls.get(&p.record.id) == Some(&state) {
                continue;
            }
            let told = m::Calls::of(&state);
            let bytes = told.encoded_len();
            if self.pay(bytes, Priority::Urgent) {
                self.draft(Topic::Node, bytes).calls.push(told);
                self.calls.insert(p.record.id, state);
            }
        }
    }

    /// Tells how long processes work between operations: where operations are sampled, nobody else sees each of them.
    fn tell_work(&mut self, join: &Join, now_ns: u64) {
        for p in join.processes() {
            let from = self.work.get(&p.record.id).copied().unwrap_or(0);
            let state = p.work.state(p.record.id, from, now_ns);
            let Some(last) = state.seconds.last().map(|s| s.second) else { continue };
            let told = m::Work::of(&state);
            let bytes = told.encoded_len();
            if self.pay(bytes, Priority::Usual) {
                self.draft(Topic::Node, bytes).work.push(told);
                self.work.insert(p.record.id, last + 1);
            }
        }
    }

    fn tell_wished(&mut self, join: &Join) {
        for (comm, track, order) in std::mem::take(&mut self.wished) {
            let instance = join.communicator(comm).and_then(|c| c.instance(track, order));
            let told = instance.map(crate::join::Instance::told).unwrap_or_default();
            // What is not over is told again when it is.
            let over = instance.is_some_and(|i| i.counted);
            if !over && self.asked.len() < ASKED && join.communicator(comm).is_some() {
                self.asked.insert((comm, track, order));
            }
            for t in &told {
                self.tell_record(comm, t, true);
            }
        }
    }

    fn tell_record(&mut self, comm: CommId, told: &Told, urgent: bool) -> bool {
        let record = m::Record::of(told);
        let bytes = record.encoded_len();
        let paid = self.pay(bytes, if urgent { Priority::Urgent } else { Priority::Usual });
        if paid {
            self.draft(Topic::Bucket(bucket(comm)), bytes).records.push(record);
        }
        paid
    }

    fn tell_finished(&mut self, join: &Join, finished: &[Finished], second: u64) {
        for f in finished {
            let parts = f.parts.len() as u64;
            self.books.observed += parts;
            if !self.is_everything {
                self.sketch(join, f);
            }
            let key = (f.comm, f.track, f.operation.order);
            let slow = self.is_slow(f);
            let asked = self.asked.remove(&key);
            if slow && self.may_announce(second) {
                let key = OperationKey::of(key.0, key.1, key.2);
                self.draft(Topic::Bucket(bucket(f.comm)), key.encoded_len()).announced.push(key);
            }
            let mut held = Vec::new();
            if f.told.is_empty() && (slow || asked) {
                let instance = join.communicator(f.comm).and_then(|c| c.instance(key.1, key.2));
                held = instance.map(crate::join::Instance::told).unwrap_or_default();
            }
            let told = if f.told.is_empty() { &held } else { &f.told };
            let (mut published, mut refused) = (0, 0);
            for t in told {
                if self.tell_record(f.comm, t, slow || asked) {
                    published += 1;
                } else {
                    refused += 1;
                }
            }
            if published > 0
                && let Some(draft) = self.drafts.get_mut(&Topic::Bucket(bucket(f.comm)))
            {
                draft.2 += published;
            }
            self.books.published += published;
            self.books.leave_out(OVER_BUDGET, refused);
            self.books.leave_out(NOT_SAMPLED, parts.saturating_sub(published + refused));
        }
    }

    fn tell_readings(&mut self) {
        for text in std::mem::take(&mut self.readings) {
            // One is like the next.
            if self.pay(text.len(), Priority::Usual) {
                self.draft(Topic::Node, text.len()).readings.push(text);
            }
        }
    }

    fn tell_books(&mut self, last: bool) {
        let left_out = self.books.left_out.iter();
        let books = m::Books {
            observed: self.books.observed,
            published: self.books.published,
            left_out: left_out.map(|(k, n)| m::Loss { what: (*k).to_owned(), count: *n }).collect(),
            bytes: self.books.bytes,
            level: self.level,
            last,
            unread: self.unread,
            unsearched: self.unsearched,
        };
        let bytes = books.encoded_len();
        self.charge(bytes);
        self.draft(Topic::Node, bytes).books = Some(books);
    }

    /// Samples less where the budget does not suffice, and more where there is room.
    fn adapt(&mut self) {
        let (wanted, refused) = (std::mem::take(&mut self.wanted), std::mem::take(&mut self.refused));
        let busiest = std::mem::take(&mut self.busiest);
        if refused || wanted > self.rate / 10 * 8 {
            // At once as far as the busiest communicator notices it.
            self.level = self.level.max(Sampling::last_whole(busiest)).saturating_add(1).min(LEVEL_MAX);
        } else if wanted < self.rate / 10 * 3 {
            self.level = self.level.saturating_sub(1);
        }
    }

    /// Forgets what is finished and gone.
    fn forget(&mut self, join: &Join) {
        let open = |c: CommId, t: Track, o: u64| {
            join.communicator(c).and_then(|c| c.instance(t, o)).is_some_and(|i| !i.counted)
        };
        self.standing.retain(|(c, t, o, _), _| open(*c, *t, *o));
        self.released.retain(|key| self.standing.contains_key(key));
        self.asked.retain(|(c, ..)| join.communicator(*c).is_some());
        self.usual.retain(|(c, ..), _| join.communicator(*c).is_some());
        self.late_announced_ns.retain(|c, _| join.communicator(*c).is_some());
        self.pauses_announced_ns.retain(|c, _| join.communicator(*c).is_some());
        self.pairs.retain(|(c, ..), _| join.communicator(*c).is_some());
        self.processes.retain(|s, _| join.process(*s).is_some());
        self.hosts.retain(|s, _| join.process(*s).is_some());
        self.calls.retain(|s, _| join.process(*s).is_some());
        self.work.retain(|s, _| join.process(*s).is_some());
        self.moved.retain(|s, _| join.process(*s).is_some());
        if self.findings.len() > 4096 {
            self.findings.retain(|_, open| *open);
        }
    }
}

#[cfg(test)]
mod tests;
