//! What agents say, read without trust: from messages to the stream that a join takes.
//!
//! A node is who its subject says, since the servers let nobody publish another's; what a message says beyond its
//! node's own processes and ranks is refused and counted. Messages that come twice, late or of an earlier run are too.

use super::message::{self as m, OperationKey};
use super::publisher::Moment;
use super::subject::{self, Topic};
use crate::model::{CommId, Finding, Rank, Reading, SegmentId, Track, Update};
use prost::Message as _;
use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

/// Nodes that are followed at most.
const NODES: usize = 65_536;
/// Processes of a node that are followed at most.
const PROCESSES: usize = 1024;
/// Memberships of a node that are followed at most.
const MEMBERS: usize = 1 << 17;
/// A silent node is forgotten after this, in ns.
const GONE_NS: u64 = 3_600_000_000_000;
/// The longest message that is read, in bytes.
const MESSAGE: usize = 1 << 20;

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

/// What is known of a node.
#[derive(Debug, Clone, Default)]
pub struct Node {
    /// Which run of its agent is heard.
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
    processes: HashMap<u64, SegmentId>,
    /// What readers of its processes have missed so far.
    lost: HashMap<(u64, &'static str), u64>,
    members: usize,
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
    /// What differs by less, in ns, is not told again.
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
    /// True when its agent has said that it ends.
    pub fn ended(&self) -> bool {
        self.books.as_ref().is_some_and(|b| b.last)
    }
}

/// Follows all nodes.
#[derive(Debug)]
pub struct Reader {
    nodes: BTreeMap<String, Node>,
    /// Whose a rank is.
    ranks: HashMap<(CommId, Rank), SegmentId>,
    /// The node of a process.
    of: HashMap<SegmentId, String>,
    refused: BTreeMap<Refusal, u64>,
    announced: Vec<(CommId, Track, u64)>,
    findings: Vec<(String, Finding)>,
    partitions: BTreeMap<u8, u32>,
    node_partitions: BTreeMap<String, u32>,
    looked_ns: u64,
    silent_ns: u64,
}

impl Reader {
    /// Nobody has said anything yet; a node that says nothing for so long is silent.
    pub fn new(silent: Duration) -> Self {
        Reader {
            nodes: BTreeMap::new(),
            ranks: HashMap::new(),
            of: HashMap::new(),
            refused: BTreeMap::new(),
            announced: Vec::new(),
            findings: Vec::new(),
            partitions: BTreeMap::new(),
            node_partitions: BTreeMap::new(),
            looked_ns: 0,
            silent_ns: nanoseconds(silent),
        }
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
        node.processes.iter().find(|(_, s)| **s == segment).map(|(own, _)| *own)
    }

    /// The partitions that servers have told.
    pub fn partitions(&self) -> impl Iterator<Item = u32> {
        self.partitions.values().chain(self.node_partitions.values()).copied()
    }

    /// The partition of a communicator, as far as the servers have told one.
    pub fn partition(&self, comm: CommId) -> Option<u32> {
        self.partitions.get(&subject::bucket(comm)).copied()
    }

    /// The partition of a node's own affairs.
    pub fn node_partition(&self, node: &str) -> Option<u32> {
        self.node_partitions.get(node).copied()
    }

    /// Operations that agents found interesting since the last call.
    pub fn take_announced(&mut self) -> Vec<(CommId, Track, u64)> {
        std::mem::take(&mut self.announced)
    }

    /// Findings that agents told since the last call, with their node.
    pub fn take_findings(&mut self) -> Vec<(String, Finding)> {
        std::mem::take(&mut self.findings)
    }

    fn refuse(&mut self, why: Refusal) {
        *self.refused.entry(why).or_default() += 1;
    }

    /// Takes a message that came on a subject, at a moment of the observer's clocks; `None` where it comes out of the
    /// recorder, and was sent long ago.
    pub fn read(&mut self, subject: &str, bytes: &[u8], now: Option<Moment>, out: &mut Vec<Update>) {
        if let Err(why) = self.take(subject, bytes, now, out) {
            self.refuse(why);
        }
    }

    fn take(
        &mut self,
        on: &str,
        bytes: &[u8],
        now: Option<Moment>,
        out: &mut Vec<Update>,
    ) -> Result<(), Refusal> {
        let (partition, token, topic) = subject::parse(on).ok_or(Refusal::Subject)?;
        if bytes.len() > MESSAGE {
            return Err(Refusal::TooMuch);
        }
        let e = m::Envelope::decode(bytes).map_err(|_| Refusal::Garbage)?;
        if e.version != m::VERSION {
            return Err(Refusal::Version);
        }
        if subject::token(&e.node) != token {
            return Err(Refusal::Node);
        }
        if self.nodes.len() >= NODES && !self.nodes.contains_key(&e.node) {
            return Err(Refusal::TooMuch);
        }
        let node = self.nodes.entry(e.node.clone()).or_default();
        if e.run < node.run {
            return Err(Refusal::Replayed);
        }
        if e.run > node.run {
            // Processes live on when their agent is started anew; what it had told stays true.
            (node.run, node.sequences) = (e.run, BTreeMap::new());
        }
        let last = node.sequences.entry(topic).or_default();
        if e.sequence <= *last {
            return Err(Refusal::Replayed);
        }
        // Who begins to listen has missed nothing that it could have heard.
        node.missed += if *last == 0 { 0 } else { e.sequence - *last - 1 };
        *last = e.sequence;
        node.messages += 1;
        node.bytes += bytes.len() as u64;
        if let Some(now) = now {
            node.heard_ns = now.mono_ns;
            out.extend(node.quickest.take(&e, now).map(|(shift_ns, wall_ahead_ns)| Update::Clock {
                host: e.node.clone(),
                shift_ns,
                wall_ahead_ns,
            }));
        }
        if node.silent_ns.take().is_some() {
            out.extend(node.processes.values().map(|s| Update::Silent { segment: *s, since_ns: None }));
        }
        if let Some(p) = partition {
            match topic {
                Topic::Bucket(b) => self.partitions.insert(b, p),
                Topic::Node => self.node_partitions.insert(e.node.clone(), p),
            };
        }
        self.contents(e, out);
        Ok(())
    }

    fn contents(&mut self, e: m::Envelope, out: &mut Vec<Update>) {
        let name = e.node;
        // Clocks of two hosts are never the same one, whatever their agents say.
        let host_clock = |clock: u64| mixed(&name, clock);
        for p in e.processes {
            let Some(node) = self.nodes.get_mut(&name) else { return };
            let id = SegmentId(mixed(&name, p.segment));
            if !node.processes.contains_key(&p.segment) && node.processes.len() >= PROCESSES {
                self.refuse(Refusal::TooMuch);
                continue;
            }
            node.processes.insert(p.segment, id);
            self.of.insert(id, name.clone());
            let missed: Vec<(&'static str, u64)> = p.missed().collect();
            let own = p.segment;
            out.push(Update::Segment(p.record(id, &name)));
            for (what, total) in missed {
                let was = node.lost.entry((own, what)).or_default();
                let count = total.saturating_sub(std::mem::replace(was, total));
                if count > 0 {
                    out.push(Update::Missed { segment: id, what, count });
                }
            }
        }
        let mut refusals: Vec<Refusal> = Vec::new();
        let Some(node) = self.nodes.get(&name) else { return };
        let known: &HashMap<u64, SegmentId> = &node.processes;
        let mut members = node.members;
        for c in e.members {
            let Some(segment) = known.get(&c.segment).copied() else {
                refusals.push(Refusal::Process);
                continue;
            };
            let key = (CommId(c.comm), Rank(c.rank));
            match self.ranks.get(&key) {
                Some(owner) if *owner != segment => {
                    // A process that came after one that is gone may have its place; another node's may not.
                    if self.of.get(owner).is_some_and(|n| *n != name) {
                        refusals.push(Refusal::Rank);
                        continue;
                    }
                }
                Some(_) => {}
                None if members >= MEMBERS => {
                    refusals.push(Refusal::TooMuch);
                    continue;
                }
                None => members += 1,
            }
            if c.left {
                self.ranks.remove(&key);
                members = members.saturating_sub(1);
                out.push(Update::Left { segment, comm: key.0, rank: key.1 });
                continue;
            }
            self.ranks.insert(key, segment);
            let clock = host_clock(c.host_clock);
            out.push(Update::Comm(c.record(segment, clock)));
        }
        let own = |segment: u64, comm: u64, rank: u32| -> Result<SegmentId, Refusal> {
            let id = known.get(&segment).copied().ok_or(Refusal::Process)?;
            let owner = self.ranks.get(&(CommId(comm), Rank(rank)));
            if owner == Some(&id) { Ok(id) } else { Err(Refusal::Rank) }
        };
        for b in &e.beats {
            match own(b.segment, b.comm, b.rank) {
                Ok(id) => out.push(Update::Beat(b.beat(id))),
                Err(why) => refusals.push(why),
            }
        }
        for p in &e.pairs {
            match own(p.segment, p.comm, p.rank) {
                Ok(id) => out.push(Update::Pair(p.beat(id))),
                Err(why) => refusals.push(why),
            }
        }
        for s in e.signatures {
            match own(s.segment, s.comm, s.rank) {
                Ok(id) => out.push(Update::Signatures(Box::new(s.signatures(id)))),
                Err(why) => refusals.push(why),
            }
        }
        for t in e.types {
            match own(t.segment, t.comm, t.rank) {
                Ok(id) => out.push(Update::Signatures(Box::new(t.types(id)))),
                Err(why) => refusals.push(why),
            }
        }
        for r in e.records {
            match own(r.segment, r.comm, r.rank) {
                Ok(id) => match r.told(id) {
                    Some(told) => out.push(Update::Told(Box::new(told))),
                    None => refusals.push(Refusal::Garbage),
                },
                Err(why) => refusals.push(why),
            }
        }
        for h in e.hosts {
            match known.get(&h.segment).copied() {
                Some(id) => out.push(Update::Host(Box::new(h.fact(id)))),
                None => refusals.push(Refusal::Process),
            }
        }
        for r in &e.readings {
            match serde_json::from_slice::<Reading>(r) {
                Ok(mut reading) => {
                    reading.host.clone_from(&name);
                    out.push(Update::Hardware(Box::new(reading)));
                }
                Err(_) => refusals.push(Refusal::Garbage),
            }
        }
        for f in &e.findings {
            match serde_json::from_slice::<Finding>(f) {
                Ok(finding) => self.findings.push((name.clone(), finding)),
                Err(_) => refusals.push(Refusal::Garbage),
            }
        }
        self.announced.extend(e.announced.iter().filter_map(OperationKey::key));
        if let Some(node) = self.nodes.get_mut(&name) {
            node.members = members;
            if e.books.is_some() {
                node.books = e.books;
            }
        }
        refusals.into_iter().for_each(|r| self.refuse(r));
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
                out.extend(node.processes.values().map(|s| Update::Silent { segment: *s, since_ns }));
            }
        }
        let gone = |n: &Node| n.silent_ns.is_some_and(|t| now_ns.saturating_sub(t) > GONE_NS);
        let forgotten: Vec<String> =
            self.nodes.iter().filter(|(_, n)| gone(n)).map(|(name, _)| name.clone()).collect();
        for name in forgotten {
            let Some(node) = self.nodes.remove(&name) else { continue };
            let ids: Vec<SegmentId> = node.processes.into_values().collect();
            self.ranks.retain(|_, s| !ids.contains(s));
            ids.iter().for_each(|s| drop(self.of.remove(s)));
            self.node_partitions.remove(&name);
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
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    fn at(seconds: u64) -> Option<Moment> {
        Some(Moment { mono_ns: seconds * S, unix_ns: seconds * S })
    }

    fn process(segment: u64) -> m::Process {
        m::Process { segment, alive: true, created_ns: S, created_unix_ns: S, ..m::Process::default() }
    }

    fn member(segment: u64, rank: u32) -> m::Member {
        m::Member { segment, comm: 7, rank, ranks: Some(2), ..m::Member::default() }
    }

    fn envelope(node: &str, sequence: u64) -> m::Envelope {
        m::Envelope {
            version: m::VERSION,
            node: node.to_owned(),
            run: 5,
            sequence,
            sent_ns: S,
            sent_unix_ns: S,
            ..m::Envelope::default()
        }
    }

    fn hello(node: &str, segment: u64, rank: u32) -> m::Envelope {
        let processes = vec![process(segment)];
        m::Envelope { processes, members: vec![member(segment, rank)], ..envelope(node, 1) }
    }

    fn refused(r: &Reader) -> Vec<(Refusal, u64)> {
        r.refused().iter().map(|(k, v)| (*k, *v)).collect()
    }

    fn read(r: &mut Reader, on: &str, e: &m::Envelope) -> Vec<Update> {
        let mut out = Vec::new();
        r.read(on, &e.encode_to_vec(), at(2), &mut out);
        out
    }

    const A: &str = "ringwatch.v1.comm.a.3";

    #[test]
    fn garbage_and_what_came_before_are_refused_and_counted() {
        let mut r = Reader::new(Duration::from_secs(3));
        let mut out = Vec::new();
        r.read(A, b"\xff\xffgarbage", at(1), &mut out);
        r.read("ringwatch.v1.comm", &envelope("a", 1).encode_to_vec(), at(1), &mut out);
        r.read(A, &m::Envelope { version: 2, ..envelope("a", 1) }.encode_to_vec(), at(1), &mut out);
        assert_eq!(out, []);
        let counted = [(Refusal::Subject, 1), (Refusal::Garbage, 1), (Refusal::Version, 1)];
        assert_eq!(refused(&r), counted);
        let told = read(&mut r, A, &hello("a", 1, 0));
        assert!(matches!(told[..], [Update::Clock { .. }, Update::Segment(_), Update::Comm(_)]), "{told:?}");
        assert_eq!(read(&mut r, A, &hello("a", 1, 0)), [], "the same message again");
        let earlier = m::Envelope { run: 4, sequence: 9, ..hello("a", 1, 0) };
        assert_eq!(read(&mut r, A, &earlier), [], "an earlier run's");
        assert_eq!(r.refused()[&Refusal::Replayed], 2);
        read(&mut r, A, &envelope("a", 4));
        assert_eq!(r.nodes()["a"].missed, 2, "numbers 2 and 3 never came");
        // An agent that was started anew counts from 1.
        read(&mut r, A, &m::Envelope { run: 6, ..envelope("a", 1) });
        assert_eq!((r.nodes()["a"].missed, r.refused()[&Refusal::Replayed]), (2, 2));
    }

    #[test]
    fn nobody_speaks_for_another_node_its_processes_or_its_ranks() {
        let mut r = Reader::new(Duration::from_secs(3));
        assert_eq!(read(&mut r, A, &hello("b", 1, 0)), [], "b's words on a's subject");
        assert_eq!(refused(&r), [(Refusal::Node, 1)]);
        let a = read(&mut r, A, &hello("a", 1, 0));
        // Another node may have a process of the same number; it is another process.
        let b = read(&mut r, "ringwatch.v1.comm.b.3", &hello("b", 1, 1));
        let id = |u: &[Update]| {
            u.iter().find_map(|u| match u {
                Update::Segment(s) => Some(s.id),
                _ => None,
            })
        };
        assert_ne!(id(&a), id(&b));
        // But not a rank that is a's, nor a process that nobody has told of.
        let mut e = m::Envelope { members: vec![member(1, 0), member(99, 1)], ..envelope("b", 2) };
        e.beats = vec![
            m::Beat { segment: 1, comm: 7, rank: 0, issued: 1000, ..m::Beat::default() },
            m::Beat { segment: 1, comm: 7, rank: 1, issued: 10, ..m::Beat::default() },
        ];
        let told = read(&mut r, "ringwatch.v1.comm.b.3", &e);
        assert!(matches!(told[..], [Update::Beat(b)] if b.rank == Rank(1)), "{told:?}");
        assert_eq!((r.refused()[&Refusal::Rank], r.refused()[&Refusal::Process]), (2, 1));
    }

    #[test]
    fn texts_of_others_cannot_steer_a_terminal_or_fill_the_memory() {
        let mut r = Reader::new(Duration::from_secs(3));
        let mut e = hello("a", 1, 0);
        e.processes[0].program = format!("evil\u{1b}[2J{}", "x".repeat(100_000));
        let told = read(&mut r, A, &e);
        let program = told.iter().find_map(|u| match u {
            Update::Segment(s) => Some(s.program.clone()),
            _ => None,
        });
        let program = program.expect("a process");
        assert!(program.starts_with("evil[2Jxxx") && program.len() <= 256, "{}", program.len());
    }

    #[test]
    fn who_says_nothing_is_silent_until_heard_again() {
        let mut r = Reader::new(Duration::from_secs(3));
        read(&mut r, A, &hello("a", 1, 0));
        let mut out = Vec::new();
        r.look(2 * S, &mut out);
        r.look(4 * S, &mut out);
        assert_eq!(out, []);
        r.look(5 * S + S / 2, &mut out);
        assert!(
            matches!(out[..], [Update::Silent { since_ns: Some(since), .. }] if since == 2 * S),
            "{out:?}"
        );
        let told = read(&mut r, A, &envelope("a", 2));
        assert!(matches!(told[..], [Update::Silent { since_ns: None, .. }]), "{told:?}");
    }

    #[test]
    fn the_quickest_message_says_what_clocks_differ_by() {
        let mut q = Quickest::default();
        let sent =
            |mono: u64| m::Envelope { sent_ns: mono, sent_unix_ns: mono + 2 * S, ..m::Envelope::default() };
        let now = |mono: u64| Moment { mono_ns: mono, unix_ns: mono };
        // Ten seconds apart, the wall clock two seconds and more ahead; the way takes from 1 to 5 ms.
        assert_eq!(q.take(&sent(S), now(11 * S + 5_000_000)), Some((10_005_000_000, -8_005_000_000)));
        assert_eq!(q.take(&sent(2 * S), now(12 * S + 1_000_000)), Some((10_001_000_000, -8_001_000_000)));
        assert_eq!(q.take(&sent(3 * S), now(13 * S + 3_000_000)), None, "a slower one says nothing new");
    }
}
