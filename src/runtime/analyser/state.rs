//! The thread that owns what is known of the cluster: it hears, judges, asks back, and answers.

use super::bus_source::Heard;
use super::{Reply, Right, Say, Told, Verdict};
use crate::cluster::message::{self, OperationKey, Wish};
use crate::cluster::{REASONS, Refusal};
use crate::config::Config;
use crate::export::metrics::{Analysis, Counts, FindingRanks, Sums};
use crate::export::{Metrics, Own};
use crate::ingest::{now_ns, unix_ns};
use crate::join::{ClockPair, MemoryLimit, Pace};
use crate::model::{
    Change, CloseReason, CommId, Finding, FindingEvent, FindingId, Kind, Liveness, SegmentId, Track,
};
use crate::runtime::Monitor;
use crate::runtime::daemon::{
    Asked, Connections, Costs, Heartbeat, Message, Notifier, Outgoing, Received, Rendered, StateReceiver,
    node,
};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::watch;

/// The shortest pause between two looks.
const PAUSE: Duration = Duration::from_millis(50);
/// How often agents are asked for what lacks.
const ASK_EVERY: Duration = Duration::from_millis(500);
/// How often what was told is told again where it has changed.
const TELL_EVERY: Duration = Duration::from_secs(1);
/// A finding that others, or an earlier run, left open, and that is not found in so long a time of speaking, is closed.
const FOUND_AGAIN: Duration = Duration::from_secs(60);
/// Such findings at most.
const LEFT: usize = 65_536;
/// Memory that communicators may take of which one node alone tells, in bytes: a node of eight GPUs with 64 communicators
/// each takes less than one MiB.
const NODE_BYTES: usize = 64 << 20;
/// Closed findings that are kept for readers.
const CLOSED: usize = 256;
/// Operations asked for at once, and how often the same one at most.
const ASKED_AT_ONCE: usize = 64;
const ASKED_TIMES: u32 = 3;
/// Operations remembered as asked for.
const ASKED: usize = 4096;
/// How often a node of which messages are missing is asked to tell all, and how many are meanwhile.
const AGAIN_EVERY: Duration = Duration::from_secs(10);
const AGAIN: usize = 256;
/// Detail of a communicator: for how long, how often, and of how many at once.
const DETAIL_SECONDS: u32 = 10;
const DETAIL_EVERY: Duration = Duration::from_secs(60);
const DETAILED: usize = 4;
/// How fast communicators are is looked at while somebody asked for a screen so short a time ago.
const GLANCED: Duration = Duration::from_secs(30);
/// Nodes and bytes of findings in one answer: a server takes messages of up to 1 MiB.
const NODES: usize = 2048;
const FINDINGS_BYTES: usize = 384 << 10;
/// The partition of everything where servers map to none.
const ONLY: u32 = 0;
/// Partitions that there can be: whoever may publish what he likes makes no more leases than these.
const PARTITIONS: u32 = 256;

/// How a finding was last told, by whomever.
#[derive(Debug)]
struct Known {
    open: bool,
    right: Right,
    /// When it was last seen, where it was told here.
    last_seen: Option<String>,
}

/// True for what more records tell more about: what is slow in one communicator.
const fn slow(kind: Kind) -> bool {
    matches!(kind, Kind::Straggler | Kind::SlowTransfer | Kind::ChangePoint | Kind::SlowPair)
}

/// Everything known of the cluster, and who judges it.
#[derive(Debug)]
pub struct State {
    config: Config,
    pub(super) monitor: Monitor<Heard>,
    pub(super) pace: Pace,
    sums: Sums,
    metrics: Metrics,
    costs: Costs,
    /// Where there is somebody to send to.
    outgoing: Option<Outgoing>,
    notifier: Option<Notifier>,
    say: UnboundedSender<Say>,
    /// The partitions for which this analyser speaks; the lease's number is its right to.
    pub(super) leases: BTreeMap<u32, u64>,
    /// The state of JetStream: it keeps what is published, or the reason why not; absent until that is known.
    kept: Option<Result<(), &'static str>>,
    /// By which lease it speaks for a partition, and since when.
    spoken: BTreeMap<u32, (u64, Instant)>,
    /// Findings as they were last told.
    told: BTreeMap<u64, Known>,
    /// Open verdicts of others, or of an earlier run, that were not found here; and when each was received.
    left: BTreeMap<u64, (Verdict, Instant)>,
    /// Findings that other analysers, or an earlier run, have closed.
    closed: BTreeMap<u64, Finding>,
    asked: BTreeMap<(CommId, Track, u64), u32>,
    asked_at: Option<Instant>,
    /// Communicators of which detail was asked for, and when.
    detailed: BTreeMap<CommId, Instant>,
    /// Nodes that were asked to tell all, and when.
    asked_again: BTreeMap<String, Instant>,
    told_at: Option<Instant>,
    heartbeat: Arc<Heartbeat>,
    /// When somebody last asked for a screen.
    glanced: Option<Instant>,
    pub(super) partitions: BTreeSet<u32>,
    /// Tells whoever holds the leases of them.
    known: watch::Sender<BTreeSet<u32>>,
}

impl State {
    pub(super) fn new(
        config: Config,
        heard: Heard,
        say: UnboundedSender<Say>,
        known: watch::Sender<BTreeSet<u32>>,
    ) -> Self {
        let observer = ClockPair { mono_ns: now_ns(), unix_ns: unix_ns() };
        let mut monitor = Monitor::new(heard, config.detect).observed_from(observer).following_live();
        monitor.limit_memory(MemoryLimit::OfEachNode(NODE_BYTES));
        State {
            monitor,
            pace: Pace::default(),
            sums: Sums::default(),
            metrics: Metrics::new(config.prometheus.clone()),
            costs: Costs::new(node(&config)),
            config,
            outgoing: None,
            notifier: None,
            say,
            leases: BTreeMap::new(),
            kept: None,
            spoken: BTreeMap::new(),
            told: BTreeMap::new(),
            left: BTreeMap::new(),
            closed: BTreeMap::new(),
            asked: BTreeMap::new(),
            asked_at: None,
            detailed: BTreeMap::new(),
            asked_again: BTreeMap::new(),
            told_at: None,
            heartbeat: Arc::new(Heartbeat::new()),
            glanced: None,
            partitions: BTreeSet::from([ONLY]),
            known,
        }
    }

    /// Sends findings to receivers.
    pub(super) fn notify_by(&mut self, notifier: Notifier) {
        self.notifier = Some(notifier);
    }

    /// Tells a receiver of findings too.
    pub(super) fn send_to(&mut self, receiver: Outgoing) {
        self.outgoing = Some(receiver);
    }

    /// When the analyser started, wall clock ns since the epoch.
    pub(super) fn started_unix_ns(&self) -> u64 {
        self.costs.started_unix_ns()
    }

    /// Where the HTTP server counts connections that it closes.
    pub(super) fn connections(&self) -> Arc<Connections> {
        self.costs.connections()
    }

    /// The signs of life of the thread that will own it.
    pub(super) fn heartbeat(&self) -> Arc<Heartbeat> {
        Arc::clone(&self.heartbeat)
    }

    /// Looks, and answers in between, until it is asked to end.
    pub(super) fn run(mut self, queue: &StateReceiver, told: &Receiver<Told>) {
        loop {
            let began = Instant::now();
            let events = self.monitor.step(now_ns());
            if self.glanced.is_some_and(|t| t.elapsed() < GLANCED) {
                self.pace.look(self.monitor.join(), now_ns());
            }
            self.hear(told);
            self.tell(&events);
            if self.asked_at.is_none_or(|t| t.elapsed() >= ASK_EVERY) {
                self.asked_at = Some(Instant::now());
                self.ask_back();
            }
            let took = began.elapsed();
            self.costs.looked(took);
            // While more waits than could be read at once there is no pause, but for questions.
            let pause = if self.monitor.source().is_behind() { Duration::ZERO } else { PAUSE.max(took / 2) };
            self.heartbeat.passed(true);
            if !self.rest(queue, Instant::now() + pause) {
                return;
            }
        }
    }

    /// Answers until the next pass is due; false when the state is asked to end.
    fn rest(&mut self, queue: &StateReceiver, until: Instant) -> bool {
        loop {
            self.heartbeat.rests_until(until);
            let received = queue.receive(until);
            self.heartbeat.works();
            match received {
                Received::Message(Message::End) => {
                    if let Some(o) = &self.outgoing {
                        o.say_unsent();
                    }
                    return false;
                }
                Received::Message(message) => self.take(message),
                Received::Asked(asked) => self.answer(asked),
                Received::Nothing => return true,
            }
            // Readers that ask without a pause must not keep it from reading.
            if Instant::now() >= until {
                return true;
            }
        }
    }

    /// Takes the messages of those who hold leases, and of the other analysers.
    fn hear(&mut self, told: &Receiver<Told>) {
        for t in told.try_iter() {
            match t {
                Told::Leases(leases) => {
                    self.spoken.retain(|p, (n, _)| leases.get(p) == Some(&*n));
                    for (p, n) in &leases {
                        self.spoken.entry(*p).or_insert_with(|| (*n, Instant::now()));
                    }
                    self.leases = leases;
                }
                Told::Kept(kept) => self.kept = Some(kept),
                // Whoever said it, it was said.
                Told::Verdict(v) => {
                    let (id, open, right) = (v.finding.id.0, v.finding.open, v.right);
                    let known = self.told.entry(id).or_insert(Known { open, right, last_seen: None });
                    if right.replaces(known.right) {
                        (known.open, known.right) = (open, right);
                        if open {
                            self.closed.remove(&id);
                            self.left.insert(id, (*v, Instant::now()));
                        } else {
                            self.left.remove(&id);
                            self.closed_by_others(v.finding);
                        }
                        if self.left.len() > LEFT {
                            self.left.pop_first();
                        }
                    }
                }
            }
        }
    }

    /// A finding's partition; absent where no server has told one.
    fn told_partition(&self, f: &Finding) -> Option<u32> {
        let reader = self.monitor.source().reader();
        let of_node = f.place.as_ref().and_then(|p| reader.node_partition(&p.host));
        of_node.or_else(|| reader.partition(f.communicator)).filter(|p| *p < PARTITIONS)
    }

    fn partition(&self, f: &Finding) -> u32 {
        self.told_partition(f).unwrap_or(ONLY)
    }

    /// The right to tell a finding, where this analyser has it.
    fn right(&self, f: &Finding) -> Option<Right> {
        let told = self.told_partition(f);
        let partition = told.unwrap_or(ONLY);
        let lease = self.leases.get(&partition).copied()?;
        Some(Right { partition, lease, guessed: told.is_none() })
    }

    /// Learns of partitions that servers map to.
    fn learn(&mut self) {
        let before = self.partitions.len();
        let reader = self.monitor.source().reader();
        self.partitions.extend(reader.partitions().filter(|p| *p < PARTITIONS));
        if self.partitions.len() > before {
            self.known.send_replace(self.partitions.clone());
        }
    }

    /// Tells what this analyser has the right to tell: what is new at once, and all of it again now and then.
    fn tell(&mut self, events: &[FindingEvent]) {
        let all = self.told_at.is_none_or(|t| t.elapsed() >= TELL_EVERY);
        let findings = if all {
            self.told_at = Some(Instant::now());
            self.monitor.findings()
        } else {
            events.iter().map(|e| e.finding.clone()).collect()
        };
        let is_updated = |e: &&FindingEvent| e.change == Change::Updated;
        let updated: BTreeSet<FindingId> = events.iter().filter(is_updated).map(|e| e.finding.id).collect();
        self.learn();
        for f in &findings {
            self.left.remove(&f.id.0);
        }
        if all {
            self.close_left();
        }
        for f in findings {
            let Some(right) = self.right(&f) else { continue };
            let known = self.told.get(&f.id.0);
            // One that was over before anybody told it is not told.
            if !f.open && known.is_none() {
                continue;
            }
            let fresh = known.is_none();
            let change = match known {
                Some(k) if k.open == f.open => updated.contains(&f.id).then_some(Change::Updated),
                _ if f.open => Some(Change::Opened),
                _ => Some(Change::Closed),
            };
            let same =
                known.is_some_and(|k| change.is_none() && k.right == right && k.last_seen == f.last_seen);
            // Who knows its partition tells it.
            let moved = known.is_some_and(|k| k.right.partition != right.partition && right.guessed);
            if same || moved {
                continue;
            }
            if fresh && slow(f.kind) {
                self.ask_for_detail(f.communicator);
            }
            self.told.insert(f.id.0, Known { open: f.open, right, last_seen: f.last_seen.clone() });
            // What a lease gives the right to tell is exported by its holder, so by one of all.
            self.export(change, &f);
            drop(self.say.send(Say::Verdict { finding: Box::new(f), right, change }));
        }
        if let Some(o) = self.outgoing.as_mut().filter(|_| all) {
            o.say_lost();
        }
        if self.told.len() > 65_536 {
            self.told.retain(|_, t| t.open);
        }
    }

    /// Sends a change of a finding to the OTLP receiver, and to the receivers of findings.
    fn export(&mut self, change: Option<Change>, finding: &Finding) {
        let Some(change) = change else { return };
        let event = FindingEvent { change, finding: finding.clone() };
        if let Some(notifier) = &mut self.notifier {
            notifier.event(self.monitor.join(), &event);
        }
        if let Some(o) = self.outgoing.as_mut() {
            o.tracer().tell(&event, |at_ns| unix_ns().checked_sub(now_ns().checked_sub(at_ns)?));
        }
    }

    /// Keeps what another analyser has closed, for readers.
    fn closed_by_others(&mut self, finding: Finding) {
        self.closed.insert(finding.id.0, finding);
        if self.closed.len() > CLOSED {
            let oldest = self.closed.iter().min_by(|a, b| a.1.closed_at.cmp(&b.1.closed_at));
            if let Some(id) = oldest.map(|(id, _)| *id) {
                self.closed.remove(&id);
            }
        }
    }

    /// Findings that were closed, the latest first: in the partitions for which this analyser speaks.
    fn closed(&self) -> Vec<Finding> {
        let mut all: BTreeMap<u64, Finding> = self.closed.clone();
        all.extend(self.monitor.findings().into_iter().filter(|f| !f.open).map(|f| (f.id.0, f)));
        let mut all: Vec<Finding> =
            all.into_values().filter(|f| self.leases.contains_key(&self.partition(f))).collect();
        all.sort_by(|a, b| b.closed_at.cmp(&a.closed_at));
        all.truncate(CLOSED);
        all
    }

    /// Closes what somebody left open who speaks no more, and nobody finds.
    fn close_left(&mut self) {
        let over = |(id, (v, heard)): (&u64, &(Verdict, Instant))| {
            // Without leases others speak too, and tell again what they still find.
            let (lease, since) = self.spoken.get(&v.right.partition)?;
            (since.max(heard).elapsed() >= FOUND_AGAIN).then_some((*id, *lease))
        };
        let over: Vec<(u64, u64)> = self.left.iter().filter_map(over).collect();
        for (id, lease) in over {
            let Some((mut v, _)) = self.left.remove(&id) else { continue };
            v.finding.open = false;
            v.finding.closed_ns = now_ns();
            v.finding.close_reason = Some(CloseReason::Unobserved);
            v.finding.closed_at = crate::detect::rfc3339(unix_ns());
            let right = Right { lease, ..v.right };
            self.told.insert(id, Known { open: false, right, last_seen: None });
            self.export(Some(Change::Closed), &v.finding);
            self.closed_by_others(v.finding.clone());
            let change = Some(Change::Closed);
            drop(self.say.send(Say::Verdict { finding: Box::new(v.finding), right, change }));
        }
    }

    /// Asks agents for what lacks: what was missed; records of what stands still, of what one of them found interesting,
    /// and stacks.
    fn ask_back(&mut self) {
        self.ask_again();
        // One analyser asks for all; the others hear the answers.
        if self.leases.keys().next().is_none_or(|p| self.partitions.first() != Some(p)) {
            drop(self.monitor.source_mut().reader_mut().take_announced());
            drop(self.monitor.source_mut().take_inspected());
            return;
        }
        let join = self.monitor.join();
        let mut wanted = join.unknown(&join.standing(now_ns()));
        wanted.extend(self.monitor.source_mut().reader_mut().take_announced());
        wanted.retain(|key| self.asked.get(key).is_none_or(|n| *n < ASKED_TIMES));
        wanted.truncate(ASKED_AT_ONCE);
        if self.asked.len() > ASKED {
            self.asked.clear();
        }
        for key in &wanted {
            *self.asked.entry(*key).or_default() += 1;
        }
        if !wanted.is_empty() {
            let operations = wanted.iter().map(|(c, t, o)| OperationKey::of(*c, *t, *o)).collect();
            let wish = Wish { version: message::VERSION, operations, ..Wish::default() };
            drop(self.say.send(Say::Wish { node: None, wish }));
        }
        for segment in self.monitor.source_mut().take_inspected() {
            self.ask_for_stack(segment);
        }
    }

    /// Nodes of which messages never came are asked to tell all: what they say once may have been among them. What this
    /// analyser has missed others may have heard, so each asks for itself.
    fn ask_again(&mut self) {
        self.asked_again.retain(|_, at| at.elapsed() < AGAIN_EVERY);
        for node in self.monitor.source_mut().reader_mut().take_gaps() {
            if self.asked_again.len() < AGAIN && !self.asked_again.contains_key(&node) {
                self.asked_again.insert(node.clone(), Instant::now());
                let wish = Wish { version: message::VERSION, all: true, ..Wish::default() };
                drop(self.say.send(Say::Wish { node: Some(node), wish }));
            }
        }
    }

    /// Asks for all there is to know of a communicator for a while, and its processes to time more of it.
    fn ask_for_detail(&mut self, comm: CommId) {
        self.detailed.retain(|_, at| at.elapsed() < DETAIL_EVERY);
        if self.detailed.len() < DETAILED && !self.detailed.contains_key(&comm) {
            self.detailed.insert(comm, Instant::now());
            let burst =
                Some(message::Burst { comm: comm.nccl_hash(), owner: comm.owner(), seconds: DETAIL_SECONDS });
            let wish = Wish { version: message::VERSION, burst, ..Wish::default() };
            drop(self.say.send(Say::Wish { node: None, wish }));
        }
    }

    fn ask_for_stack(&self, segment: SegmentId) {
        let reader = self.monitor.source().reader();
        if let (Some(node), Some(own)) = (reader.node_of(segment), reader.own_id(segment)) {
            let wish = Wish { version: message::VERSION, stacks: vec![own], ..Wish::default() };
            drop(self.say.send(Say::Wish { node: Some(node.to_owned()), wish }));
        }
    }

    /// Findings for which this analyser speaks.
    pub(super) fn open(&self) -> Vec<Finding> {
        let mut all = self.monitor.findings();
        all.retain(|f| f.open && self.leases.contains_key(&self.partition(f)));
        all
    }

    /// The figures for metrics.
    fn analysis(&mut self) -> Analysis {
        let speaker = node(&self.config);
        let (mut findings, mut named) = (BTreeMap::new(), FindingRanks::default());
        let join = self.monitor.join();
        for f in self.open() {
            let first = join.communicator(f.communicator).and_then(|c| c.members().values().next());
            let process = first.and_then(|m| join.process(m.record.segment));
            let job = process.and_then(|p| p.record.job.name.clone()).unwrap_or_default();
            let owner = process.and_then(|p| p.record.owner);
            named.add(join, &speaker, (&job, owner), &f);
            *findings.entry((job, owner, f.kind, f.severity)).or_insert(0) += 1;
        }
        let reader = self.monitor.source().reader();
        let mut nodes = [0; 3];
        for n in reader.nodes().values() {
            let state = if n.ended() { 2 } else { usize::from(n.silent_ns.is_some()) };
            nodes[state] += 1;
        }
        self.sums.take(reader.nodes().iter().map(|(name, n)| {
            let b = n.books.clone().unwrap_or_default();
            let mut left_out: BTreeMap<_, _> = REASONS.iter().map(|why| ((*why).to_owned(), 0)).collect();
            left_out.extend(b.left_out.into_iter().map(|l| (l.what, l.count)));
            let (observed, published) = (b.observed, b.published);
            let (messages, bytes, missed) = (n.messages, n.bytes, n.missed);
            (name.clone(), Counts { messages, bytes, missed, observed, published, left_out })
        }));
        let off = |h: &crate::join::HostClock| h.wall_ahead_ns.unsigned_abs();
        let told = join.tallies();
        Analysis {
            findings,
            named,
            operations: told
                .all()
                .into_iter()
                .map(|(job, owner, func, t)| (job.to_owned(), owner, func, t))
                .collect(),
            other_operations: told.rest(),
            nodes,
            counts: self.sums.all().clone(),
            // All of them from the beginning: the first of a series that was not there has no rate.
            refused: Refusal::ALL
                .iter()
                .map(|why| (why.as_str(), reader.refused().get(why).copied().unwrap_or(0)))
                .collect(),
            dropped: self.monitor.source().dropped(),
            leases: self.partitions.iter().map(|p| (*p, self.leases.contains_key(p))).collect(),
            keeps: self.kept.map(|k| k.is_ok()),
            processes: join.processes().count() as u64,
            communicators: join.open() as u64,
            clock_off_ns: join.hosts().iter().map(|(_, h)| off(h)).max(),
        }
    }

    fn own(&self) -> Own {
        let mut exported = self.outgoing.as_ref().map(Outgoing::exported).unwrap_or_default();
        exported.extend(self.notifier.as_ref().map(Notifier::exported));
        Own { exported, ..self.costs.own(0) }
    }

    /// Why what is told is not kept, where it is not.
    pub(super) fn not_kept(&self) -> Option<String> {
        Some(self.kept?.err()?.to_owned())
    }

    /// The reply to readers.
    fn reply(&mut self) -> Reply {
        let reader = self.monitor.source().reader();
        let mut hidden: BTreeMap<&str, u64> = BTreeMap::new();
        for p in self.monitor.join().processes().filter(|p| p.record.liveness == Liveness::Alive) {
            if let Some(node) = reader.node_of(p.record.id) {
                *hidden.entry(node).or_default() += p.hidden();
            }
        }
        let mut nodes: Vec<super::NodeRow> = reader
            .nodes()
            .iter()
            .map(|(name, n)| {
                let books = n.books.clone().unwrap_or_default();
                super::NodeRow {
                    name: name.clone(),
                    silent: n.silent_ns.is_some(),
                    ended: n.ended(),
                    messages: n.messages,
                    bytes: n.bytes,
                    missed: n.missed,
                    observed: books.observed,
                    published: books.published,
                    left_out: books.left_out.iter().map(|l| l.count).sum(),
                    unread: books.unread,
                    unsearched: books.unsearched,
                    hidden: hidden.get(name.as_str()).copied().unwrap_or(0),
                }
            })
            .collect();
        let messages = nodes.iter().map(|n| n.messages).sum();
        let amiss = |n: &super::NodeRow| {
            (n.silent && !n.ended, n.unread > 0 || n.unsearched, n.missed > 0, n.left_out > 0)
        };
        if nodes.len() > NODES {
            nodes.sort_by_key(|n| Reverse(amiss(n)));
        }
        let mut findings = self.open();
        findings.sort_by_key(|f| Reverse(f.severity));
        let mut bytes = 0;
        let mut room = |f: &Finding| {
            bytes += serde_json::to_vec(f).map_or(0, |text| text.len());
            bytes <= FINDINGS_BYTES
        };
        let fit = findings.iter().map(&mut room).take_while(|fits| *fits).count();
        let more = |all: usize, fit: usize| all.saturating_sub(fit) as u64;
        let left_out = self.monitor.findings_left_out(None);
        let (more_findings, more_nodes) = (left_out + more(findings.len(), fit), more(nodes.len(), NODES));
        findings.truncate(fit);
        nodes.truncate(NODES);
        let mut closed = self.closed();
        let fit = closed.iter().map(room).take_while(|fits| *fits).count();
        closed.truncate(fit);
        Reply {
            ringwatch: message::VERSION,
            partitions: self.partitions.iter().copied().collect(),
            speaks_for: self.leases.keys().copied().collect(),
            findings,
            more_findings,
            closed,
            nodes,
            more_nodes,
            messages,
            refused: reader.refused().iter().map(|(why, n)| (why.as_str().to_owned(), *n)).collect(),
            dropped: self.monitor.source().dropped(),
            communicators: self.monitor.join().open() as u64,
            not_kept: self.not_kept(),
            ranks: self.monitor.join().processes().count() as u64,
        }
    }

    /// Answers a question. A client that went away needs no answer.
    fn answer(&mut self, asked: Asked) {
        match asked {
            Asked::Cluster(reply) => drop(reply.send(Box::new(self.reply()))),
            Asked::Glance { question, reply } => {
                self.glanced = Some(Instant::now());
                drop(reply.send(Box::new(self.glance(&question))));
            }
            Asked::Snapshot { uid, reply } => {
                let mut s = self.monitor.snapshot_of(uid, now_ns());
                s.findings.retain(|f| f.open);
                drop(reply.send(Box::new(s)));
            }
            Asked::Metrics { format, reply } => {
                let began = Instant::now();
                let (own, analysis) = (self.own(), self.analysis());
                let written = self.metrics.render_analysis(&analysis, &own, format);
                drop(reply.send(Rendered::new(written, began.elapsed())));
            }
            Asked::Families(reply) => {
                let (own, analysis) = (self.own(), self.analysis());
                drop(reply.send(self.metrics.gather_analysis(&analysis, &own)));
            }
            Asked::Batch(reply) => {
                if let Some(o) = &mut self.outgoing {
                    o.hand_out(reply);
                }
            }
        }
    }

    fn take(&mut self, message: Message) {
        match message {
            Message::Settings(new) => {
                self.monitor.set(new.detect);
                self.monitor.source_mut().reader_mut().set_silent(new.cluster.silent());
                self.config = *new;
            }
            Message::GiveBack(batch) => {
                if let Some(o) = &mut self.outgoing {
                    o.take_back(*batch);
                }
            }
            // What only agents do, and the end, which is for the loop above.
            Message::Wish(_) | Message::Refresh | Message::Ended | Message::End => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{OperationRef, Rank};

    fn opened(findings: &[Finding]) -> Vec<FindingEvent> {
        let event = |f: &Finding| FindingEvent { change: Change::Opened, finding: f.clone() };
        findings.iter().map(event).collect()
    }

    #[test]
    fn detail_is_asked_for_where_something_is_slow_and_not_again_and_again() {
        let (_send, inbox) = std::sync::mpsc::sync_channel(1);
        let (say, mut said) = tokio::sync::mpsc::unbounded_channel();
        let (known, _) = watch::channel(BTreeSet::new());
        let heard = Heard::new(inbox, Default::default(), Duration::from_secs(3));
        let mut state = State::new(Config::default(), heard, say, known);
        let finding = |kind, comm, rank| {
            let operation = OperationRef::named("AllReduce", Track::Collective, 4);
            Finding::new(kind, CommId::unowned(comm), vec![Rank(rank)], operation)
        };
        let mut bursts = |state: &mut State, new: &[Finding]| {
            // Told at once, not with all others once a second.
            state.told_at = Some(Instant::now());
            state.tell(&opened(new));
            let mut bursts = Vec::new();
            while let Ok(s) = said.try_recv() {
                if let Say::Wish { wish, .. } = s {
                    bursts.extend(wish.burst.map(|b| (b.comm, b.seconds)));
                }
            }
            bursts
        };
        assert_eq!(
            bursts(&mut state, &[finding(Kind::Straggler, 7, 1)]),
            [],
            "who has no lease asks for nothing"
        );
        state.leases.insert(ONLY, 1);
        let all = [
            finding(Kind::Straggler, 7, 1),
            finding(Kind::SlowTransfer, 7, 2),
            finding(Kind::Mismatch, 8, 0),
        ];
        assert_eq!(bursts(&mut state, &all), [(7, DETAIL_SECONDS)]);
        assert_eq!(bursts(&mut state, &[finding(Kind::Straggler, 7, 3)]), [], "it has just been asked for");
        let many: Vec<Finding> = (10..30).map(|c| finding(Kind::ChangePoint, c, 0)).collect();
        assert_eq!(bursts(&mut state, &many).len(), DETAILED - 1);
    }

    #[test]
    fn what_was_left_open_and_is_not_found_again_is_closed_by_who_speaks_and_told_no_second_time() {
        let (_send, inbox) = std::sync::mpsc::sync_channel(1);
        let (say, mut said) = tokio::sync::mpsc::unbounded_channel();
        let (known, _) = watch::channel(BTreeSet::new());
        let heard = Heard::new(inbox, Default::default(), Duration::from_secs(3));
        let mut state = State::new(Config::default(), heard, say, known);
        let left = |comm: u64, partition| {
            let operation = OperationRef::named("AllReduce", Track::Collective, 4);
            let finding = Finding {
                id: crate::model::FindingId(comm),
                ..Finding::new(Kind::MissingRank, CommId::unowned(comm), vec![Rank(1)], operation)
            };
            let right = Right { partition, lease: 7, guessed: false };
            Verdict { ringwatch: message::VERSION, analyser: "before".to_owned(), right, finding }
        };
        let (tell, told) = std::sync::mpsc::channel();
        for v in [left(1, ONLY), left(2, ONLY), left(3, 5)] {
            tell.send(Told::Verdict(Box::new(v))).unwrap();
        }
        tell.send(Told::Leases(BTreeMap::from([(ONLY, 9)]))).unwrap();
        state.hear(&told);
        let mut verdicts = |state: &mut State, new: &[Finding], all: bool| {
            state.told_at = Some(Instant::now()).filter(|_| !all);
            state.tell(&opened(new));
            let mut verdicts = Vec::new();
            while let Ok(s) = said.try_recv() {
                if let Say::Verdict { finding, right, change } = s {
                    verdicts.push((finding.id.0, finding.open, right.lease, change));
                }
            }
            verdicts
        };
        assert_eq!(verdicts(&mut state, &[], true), [], "it may be found yet");
        assert_eq!(
            verdicts(&mut state, &[left(2, ONLY).finding], false),
            [(2, true, 9, None)],
            "it was told before"
        );
        let long_ago = Instant::now().checked_sub(FOUND_AGAIN).expect("the machine has run for a minute");
        state.spoken.insert(ONLY, (9, long_ago));
        assert_eq!(verdicts(&mut state, &[], true), [], "who told it may speak yet");
        state.left.values_mut().for_each(|(_, heard)| *heard = long_ago);
        // The same lease is not a new one.
        tell.send(Told::Leases(BTreeMap::from([(ONLY, 9)]))).unwrap();
        state.hear(&told);
        let closed = Some(Change::Closed);
        assert_eq!(verdicts(&mut state, &[], true), [(1, false, 9, closed)], "another speaks for the third");
        assert_eq!(state.closed().iter().map(|f| f.id.0).collect::<Vec<_>>(), [1], "readers may ask for it");
        assert_eq!(verdicts(&mut state, &[], true), []);
        let opened = Some(Change::Opened);
        assert_eq!(verdicts(&mut state, &[left(1, ONLY).finding], false), [(1, true, 9, opened)]);
    }
}
