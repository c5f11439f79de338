//! Messages of agents, read without trust: from messages to the stream that a join takes.
//!
//! A node is who its subject says, since the servers let nobody publish another's; what a message says beyond its
//! node's own processes and ranks is refused and counted. Messages that come twice, late or of an earlier run are too.

mod admission;
mod contents;
mod disputes;

use super::items;
use super::message as m;
use super::publisher::Moment;
use super::subject::{self, Topic};
use crate::model::{CommId, Liveness, Rank, SegmentId, SegmentRecord, Track, Update, steers};
use disputes::{Claim, Disputes};
use prost::Message as _;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::Duration;

/// Nodes that are followed at most.
const NODES: usize = 65_536;
/// Processes of a node that are followed at most.
const PROCESSES: usize = 1024;
/// Memory that is kept of what a node tells of its processes, in bytes.
const PROCESS_BYTES: usize = 8 << 20;
/// Memberships of a node that are followed at most.
const MEMBERS: usize = 1 << 14;
/// The claims on ranks of a node that is silent for longer are given up, in ns.
const CLAIM_NS: u64 = 60_000_000_000;
/// A silent node is forgotten after this, in ns.
const GONE_NS: u64 = 3_600_000_000_000;
/// The longest message that is read, in bytes.
const MESSAGE: usize = 1 << 20;
/// Bytes of a node that are read in a second; an agent's budget is far below.
const BYTES: usize = 16 << 20;
/// Processes that a new run of an agent has not told of after so long, in ns, are gone.
const RETOLD_NS: u64 = 10_000_000_000;
/// Operations that agents found interesting, waiting to be asked for at most.
const ANNOUNCED: usize = 1024;
/// Memberships that are over are forgotten when there are so many of a node.
const ENDED: usize = 4096;
/// Items of one message; those of an agent are of some 30 bytes each at least, in messages of 128 KiB.
const ITEMS: usize = 1 << 14;
/// The longest name of a node, in bytes: a subject holds no more, and a host's is 64 long at most.
const NAME: usize = 128;

/// Why a message, or a part of it, was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Refusal {
    /// Its subject is none of ours.
    Subject,
    /// It is no message.
    Garbage,
    /// It is of a version that is not spoken here.
    Version,
    /// It names another node than its subject.
    Node,
    /// It came before, or is of an earlier run.
    Replayed,
    /// It speaks for a process that its node has not told of.
    Process,
    /// It speaks for a rank that another node's process is.
    Rank,
    /// More than is kept of one node, or more nodes.
    TooMuch,
}

impl Refusal {
    /// All of them.
    pub const ALL: [Refusal; 8] = [
        Refusal::Subject,
        Refusal::Garbage,
        Refusal::Version,
        Refusal::Node,
        Refusal::Replayed,
        Refusal::Process,
        Refusal::Rank,
        Refusal::TooMuch,
    ];

    /// In words.
    pub const fn as_str(self) -> &'static str {
        match self {
            Refusal::Subject => "unknown subject",
            Refusal::Garbage => "not a message",
            Refusal::Version => "unknown version",
            Refusal::Node => "speaks for another node",
            Refusal::Replayed => "came before",
            Refusal::Process => "unknown process",
            Refusal::Rank => "speaks for another node's rank",
            Refusal::TooMuch => "more than is kept",
        }
    }
}

/// The state of a node.
#[derive(Debug, Clone, Default)]
pub struct Node {
    /// The run of its agent that is heard.
    pub run: u64,
    /// When it was last heard, observer's monotonic ns.
    pub heard_ns: u64,
    /// Since when it is silent.
    pub silent_ns: Option<u64>,
    /// Messages that never came, by the gaps in their numbers.
    pub missed: u64,
    /// Messages and bytes that came.
    pub messages: u64,
    /// Bytes that came.
    pub bytes: u64,
    /// Its books, as it last told them.
    pub books: Option<m::Books>,
    quickest: Quickest,
    sequences: BTreeMap<Topic, u64>,
    processes: HashMap<u64, Told>,
    /// Where its agent was started anew: when that was heard, and what it has told of since.
    anew: Option<(u64, HashSet<u64>)>,
    /// Memberships that are over, and still known.
    ended: HashSet<(CommId, Rank)>,
    /// The second in which it was heard last, and how many bytes of it.
    second: (u64, usize),
    /// The partitions to which servers map what it says of communicators, by bucket.
    mapped: [Option<u32>; subject::BUCKETS as usize],
    /// The losses of its processes' readers so far.
    lost: HashMap<(u64, &'static str), u64>,
    members: usize,
    /// The devices of its readings.
    devices: admission::Devices,
    /// Memory that is kept of its processes, in bytes.
    process_bytes: usize,
}

/// A process as its node last told of it.
#[derive(Debug, Clone)]
struct Told {
    /// The process, its texts cut.
    record: SegmentRecord,
    /// Its communicators are shared with processes of other users.
    shares_communicators: bool,
}

/// The quickest of a node's messages: what its clocks differ by from the observer's, at least.
#[derive(Debug, Clone, Default)]
struct Quickest {
    /// Of the window before, and of this one: the distance of the monotonic clocks, and of the wall clocks.
    before: Option<(i64, i64)>,
    now: Option<(i64, i64)>,
    since_ns: u64,
    told: Option<(i64, i64)>,
}

impl Quickest {
    /// Clocks drift: what a message told is forgotten after one to two of these, in ns.
    const WINDOW_NS: u64 = 30_000_000_000;
    /// A shift that differs by less, in ns, is not sent again.
    const SAME_NS: u64 = 200_000;

    /// Takes a message; gives the distances where they are new.
    fn take(&mut self, e: &m::Envelope, now: Moment) -> Option<(i64, i64)> {
        if now.mono_ns.saturating_sub(self.since_ns) > Self::WINDOW_NS {
            (self.before, self.now, self.since_ns) = (self.now.take(), None, now.mono_ns);
        }
        let shift = now.mono_ns.checked_signed_diff(e.sent_ns)?;
        let ahead = e.sent_unix_ns.checked_signed_diff(now.unix_ns)?;
        if self.now.is_none_or(|(least, _)| shift < least) {
            self.now = Some((shift, ahead));
        }
        let best = [self.before, self.now].into_iter().flatten().min()?;
        let same =
            |t: (i64, i64)| t.0.abs_diff(best.0) < Self::SAME_NS && t.1.abs_diff(best.1) < 10 * Self::SAME_NS;
        if self.told.is_some_and(same) {
            return None;
        }
        self.told = Some(best);
        Some(best)
    }
}

impl Node {
    /// True while it is heard, or was a moment ago: then its claims on ranks count.
    fn claims(&self, now_ns: u64) -> bool {
        self.silent_ns.is_none_or(|since| now_ns.saturating_sub(since) < CLAIM_NS)
    }

    /// True when its agent has said that it ends.
    pub fn ended(&self) -> bool {
        self.books.as_ref().is_some_and(|b| b.last)
    }
}

/// Follows all nodes.
#[derive(Debug)]
pub struct Reader {
    nodes: BTreeMap<String, Node>,
    /// The process of each rank.
    ranks: HashMap<(CommId, Rank), SegmentId>,
    /// The node of a process.
    of: HashMap<SegmentId, String>,
    disputes: Disputes,
    refused: BTreeMap<Refusal, u64>,
    announced: Vec<(CommId, Track, u64)>,
    /// Nodes of which messages are missing since the last call.
    gaps: BTreeSet<String>,
    /// By bucket: how many nodes' messages servers map to which partition. What one node says moves nobody else's.
    votes: [BTreeMap<u32, usize>; subject::BUCKETS as usize],
    node_partitions: BTreeMap<String, u32>,
    looked_ns: u64,
    silent_ns: u64,
    /// Nodes may say any number of bytes a second.
    is_unlimited: bool,
}

impl Reader {
    /// Nobody has said anything yet; a node that says nothing for so long is silent.
    pub fn new(silent: Duration) -> Self {
        Reader {
            nodes: BTreeMap::new(),
            ranks: HashMap::new(),
            of: HashMap::new(),
            disputes: Disputes::default(),
            refused: BTreeMap::new(),
            announced: Vec::new(),
            gaps: BTreeSet::new(),
            votes: std::array::from_fn(|_| BTreeMap::new()),
            node_partitions: BTreeMap::new(),
            looked_ns: 0,
            silent_ns: nanoseconds(silent),
            is_unlimited: false,
        }
    }

    /// Reads all that a node says, however much it is: for recordings, which are read at the reader's own pace.
    #[must_use]
    pub fn unlimited(mut self) -> Self {
        self.is_unlimited = true;
        self
    }

    /// From now on a node is silent that says nothing for so long.
    pub fn set_silent(&mut self, silent: Duration) {
        self.silent_ns = nanoseconds(silent);
    }

    /// The nodes.
    pub fn nodes(&self) -> &BTreeMap<String, Node> {
        &self.nodes
    }

    /// How often something was refused, by reason.
    pub fn refused(&self) -> &BTreeMap<Refusal, u64> {
        &self.refused
    }

    /// The node of a process.
    pub fn node_of(&self, segment: SegmentId) -> Option<&str> {
        self.of.get(&segment).map(String::as_str)
    }

    /// A process's number on its own node.
    pub fn own_id(&self, segment: SegmentId) -> Option<u64> {
        let node = self.nodes.get(self.of.get(&segment)?)?;
        node.processes.iter().find(|(_, t)| t.id() == segment).map(|(own, _)| *own)
    }

    /// The partitions that servers have told.
    pub fn partitions(&self) -> impl Iterator<Item = u32> {
        let buckets = (0..subject::BUCKETS as u8).filter_map(|b| self.mapped(b));
        buckets.chain(self.node_partitions.values().copied())
    }

    /// The partition of a communicator, as far as the servers have told one.
    pub fn partition(&self, comm: CommId) -> Option<u32> {
        self.mapped(subject::bucket(comm))
    }

    /// The partition to which most nodes' messages about a bucket are mapped.
    fn mapped(&self, bucket: u8) -> Option<u32> {
        let votes = self.votes.get(usize::from(bucket))?;
        votes.iter().max_by_key(|(p, n)| (**n, std::cmp::Reverse(**p))).map(|(p, _)| *p)
    }

    /// Takes to which partition a node's message about a bucket was mapped.
    fn vote(&mut self, node: &str, bucket: u8, partition: u32) {
        let at = usize::from(bucket);
        let own = self.nodes.get_mut(node).and_then(|n| n.mapped.get_mut(at));
        let (Some(own), Some(votes)) = (own, self.votes.get_mut(at)) else { return };
        if let Some(was) = own.replace(partition) {
            if was == partition {
                return;
            }
            unvote(votes, was);
        }
        *votes.entry(partition).or_default() += 1;
    }

    /// The partition of a node's own affairs.
    pub fn node_partition(&self, node: &str) -> Option<u32> {
        self.node_partitions.get(node).copied()
    }

    /// Operations that agents found interesting since the last call.
    pub fn take_announced(&mut self) -> Vec<(CommId, Track, u64)> {
        std::mem::take(&mut self.announced)
    }

    /// Nodes of which messages are missing since the last call: what they said once may be among them.
    pub fn take_gaps(&mut self) -> BTreeSet<String> {
        std::mem::take(&mut self.gaps)
    }

    fn refuse(&mut self, why: Refusal) {
        *self.refused.entry(why).or_default() += 1;
    }

    /// Takes a message that came on a subject, at a moment of the observer's clocks. One that comes out of the recorder
    /// was sent long ago, and says nothing about clocks.
    pub fn read(&mut self, subject: &str, bytes: &[u8], now: Moment, recorded: bool, out: &mut Vec<Update>) {
        if let Err(why) = self.take(subject, bytes, now, recorded, out) {
            self.refuse(why);
        }
    }

    fn take(
        &mut self,
        on: &str,
        bytes: &[u8],
        now: Moment,
        recorded: bool,
        out: &mut Vec<Update>,
    ) -> Result<(), Refusal> {
        let (partition, token, topic) = subject::parse(on).ok_or(Refusal::Subject)?;
        if bytes.len() > MESSAGE
            || !recorded && !self.is_unlimited && !self.bears(token, bytes.len(), now.mono_ns)
        {
            return Err(Refusal::TooMuch);
        }
        if items::count(bytes).ok_or(Refusal::Garbage)? > ITEMS {
            return Err(Refusal::TooMuch);
        }
        let e = m::Envelope::decode(bytes).map_err(|_| Refusal::Garbage)?;
        if e.version != m::VERSION {
            return Err(Refusal::Version);
        }
        // Longer names with the same beginning share a subject.
        let is_name = e.node.len() <= NAME && !e.node.chars().any(steers);
        if !is_name || subject::token(&e.node) != token {
            return Err(Refusal::Node);
        }
        if self.nodes.len() >= NODES && !self.nodes.contains_key(&e.node) {
            return Err(Refusal::TooMuch);
        }
        let node = self.nodes.entry(e.node.clone()).or_default();
        // Runs are told apart by wall clocks, and those are set back now and then: who was silent may come with less.
        if e.run < node.run && node.silent_ns.is_none() {
            return Err(Refusal::Replayed);
        }
        if e.run != node.run {
            // Processes live on when their agent is started anew; what it had told stays true, if it tells it again.
            node.anew = (node.run > 0).then(|| (now.mono_ns, HashSet::new()));
            (node.run, node.sequences) = (e.run, BTreeMap::new());
        }
        let last = node.sequences.entry(topic).or_default();
        if e.sequence <= *last {
            return Err(Refusal::Replayed);
        }
        // Who begins to listen has missed nothing that it could have heard.
        let missed = if *last == 0 { 0 } else { e.sequence - *last - 1 };
        if missed > 0 {
            node.missed = node.missed.saturating_add(missed);
            self.gaps.insert(e.node.clone());
        }
        *last = e.sequence;
        node.messages += 1;
        node.bytes += bytes.len() as u64;
        // It is heard now, whenever that was said.
        node.heard_ns = now.mono_ns;
        if !recorded && e.sent_ns > 0 && e.sent_unix_ns > 0 {
            out.extend(node.quickest.take(&e, now).map(|(shift_ns, wall_ahead_ns)| Update::Clock {
                host: e.node.clone(),
                shift_ns,
                wall_ahead_ns,
            }));
        }
        if node.silent_ns.take().is_some() {
            out.extend(node.processes.values().map(|t| Update::Silent { segment: t.id(), since_ns: None }));
        }
        match (partition, topic) {
            (Some(p), Topic::Bucket(b)) => self.vote(&e.node, b, p),
            (Some(p), Topic::Node) => drop(self.node_partitions.insert(e.node.clone(), p)),
            (None, _) => {}
        }
        self.contents(e, out);
        Ok(())
    }

    /// Lets time pass: who has said nothing for a while is silent, and who is for long is forgotten.
    pub fn look(&mut self, now_ns: u64, out: &mut Vec<Update>) {
        if now_ns.saturating_sub(self.looked_ns) < self.silent_ns / 10 {
            return;
        }
        // Who was asleep oneself has heard nobody.
        let slept = now_ns.saturating_sub(self.looked_ns) > self.silent_ns;
        self.looked_ns = now_ns;
        for node in self.nodes.values_mut() {
            if slept {
                node.heard_ns = node.heard_ns.max(now_ns.saturating_sub(self.silent_ns / 2));
            }
            if node.silent_ns.is_none() && now_ns.saturating_sub(node.heard_ns) > self.silent_ns {
                node.silent_ns = Some(node.heard_ns);
                let since_ns = Some(node.heard_ns);
                out.extend(node.processes.values().map(|t| Update::Silent { segment: t.id(), since_ns }));
            }
        }
        for node in self.nodes.values_mut() {
            if node.silent_ns.is_none()
                && let Some((since_ns, told)) = &node.anew
                && now_ns.saturating_sub(*since_ns) > RETOLD_NS
            {
                let lost = |(own, t): &(&u64, &mut Told)| t.alive() && !told.contains(*own);
                for (_, t) in node.processes.iter_mut().filter(lost) {
                    out.push(t.gone(*since_ns));
                }
                node.anew = None;
            }
        }
        self.give_up_claims(now_ns, out);
        let gone = |n: &Node| n.silent_ns.is_some_and(|t| now_ns.saturating_sub(t) > GONE_NS);
        let forgotten: Vec<String> =
            self.nodes.iter().filter(|(_, n)| gone(n)).map(|(name, _)| name.clone()).collect();
        for name in forgotten {
            let Some(mut node) = self.nodes.remove(&name) else { continue };
            // Who comes back says so.
            let alive = node.processes.values_mut().filter(|t| t.alive());
            out.extend(alive.map(|t| t.gone(node.heard_ns)));
            let ids: HashSet<SegmentId> = node.processes.values().map(Told::id).collect();
            self.withdraw(|_, c| ids.contains(&c.segment), out);
            self.ranks.retain(|_, s| !ids.contains(s));
            ids.iter().for_each(|s| drop(self.of.remove(s)));
            self.node_partitions.remove(&name);
            for (votes, p) in self.votes.iter_mut().zip(node.mapped) {
                p.into_iter().for_each(|p| unvote(votes, p));
            }
        }
    }

    /// Takes back the claims of nodes that are silent: a node that was renamed claims its own ranks under two names.
    fn give_up_claims(&mut self, now_ns: u64, out: &mut Vec<Update>) {
        if self.disputes.is_empty() {
            return;
        }
        let silent = self.nodes.iter().filter(|(_, n)| !n.claims(now_ns)).map(|(name, _)| name.clone());
        let silent: HashSet<String> = silent.collect();
        if !silent.is_empty() {
            self.withdraw(|_, c| silent.contains(&c.node), out);
        }
    }

    /// True while a node, by its token, says no more than is read of one in a second.
    fn bears(&mut self, token: &str, bytes: usize, now_ns: u64) -> bool {
        let Some(node) = self.nodes.get_mut(&subject::name(token)) else { return true };
        let second = now_ns / 1_000_000_000;
        if node.second.0 != second {
            node.second = (second, 0);
        }
        node.second.1 = node.second.1.saturating_add(bytes);
        node.second.1 <= BYTES
    }

    /// Forgets what a node has told as over: processes that are gone, and memberships.
    fn forget_ended(&mut self, name: &str) {
        let Some(node) = self.nodes.get_mut(name) else { return };
        let over = std::mem::take(&mut node.ended);
        let mut gone = HashSet::new();
        node.processes.retain(|own, t| {
            if !t.alive() {
                gone.insert(t.id());
                node.lost.retain(|(of, _), _| of != own);
                node.process_bytes -= t.bytes();
            }
            t.alive()
        });
        let of_node: HashSet<SegmentId> = node.processes.values().map(Told::id).collect();
        let before = self.ranks.len();
        self.ranks.retain(|key, s| !(gone.contains(s) || over.contains(key) && of_node.contains(s)));
        node.members = node.members.saturating_sub(before - self.ranks.len());
        gone.iter().for_each(|s| drop(self.of.remove(s)));
    }
}

impl Told {
    fn id(&self) -> SegmentId {
        self.record.id
    }

    fn bytes(&self) -> usize {
        admission::process_bytes(&self.record)
    }

    fn alive(&self) -> bool {
        self.record.liveness == Liveness::Alive
    }

    /// One of its communicators, by NCCL's number.
    fn communicator(&self, nccl_hash: u64) -> CommId {
        CommId::new(nccl_hash, self.record.owner.filter(|_| !self.shares_communicators))
    }

    /// It runs no more, as far as can be said.
    fn gone(&mut self, at_ns: u64) -> Update {
        self.record.liveness = Liveness::Gone(Some(at_ns));
        Update::Segment(self.record.clone())
    }
}

fn unvote(votes: &mut BTreeMap<u32, usize>, partition: u32) {
    if let Some(n) = votes.get_mut(&partition) {
        *n -= 1;
        if *n == 0 {
            votes.remove(&partition);
        }
    }
}

fn nanoseconds(d: Duration) -> u64 {
    u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)
}

/// A number of a node's own, told apart from every other node's: FNV-1a over its name, and mixed.
fn mixed(node: &str, n: u64) -> u64 {
    let h =
        node.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
    let mut n = h ^ n.rotate_left(23);
    n = (n ^ n >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    n = (n ^ n >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    n ^ n >> 31
}

#[cfg(test)]
mod tests;
