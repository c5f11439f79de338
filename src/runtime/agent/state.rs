//! The thread that owns what is known: it reads, judges, cleans up, and answers.

use super::finding_store::FindingStore;
use super::samples::Samples;
use crate::cluster::message::{OperationKey, Wish};
use crate::cluster::{Moment, Outbox, Publisher, REASONS};
use crate::config::Config;
use crate::detect::Baseline;
use crate::export::metrics::Bus;
use crate::export::{Metrics, Own};
use crate::ingest::{Ends, Place, ProbeCommand, Segments, boot_id, now_ns, unix_ns};
use crate::join::{Finished, MemoryLimit};
use crate::model::{CommId, Finding, FindingEvent, SegmentId, Source as _, Unread, UnreadReason};
use crate::runtime::daemon::{
    self, Asked, Connections, Costs, Heartbeat, Message, Notifier, Outgoing, Received, Rendered,
    StateReceiver,
};
use crate::runtime::{Monitor, Node};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::{error, info, warn};

/// The longest burst of detail that may be asked for, in seconds.
const BURST_SECONDS: u32 = 60;
/// Stacks of one wish.
const STACKS: usize = 8;
/// How often segments of dead processes are looked through.
const CLEAN: Duration = Duration::from_secs(10);
/// The time for which root's segments are read in one look, and those of all users together. With the pause that
/// `limits.cpu` asks for after that, a process that ends is still found within 0.2 s. An unoptimized build takes about ten
/// times as long for the same work.
const READ_MAX: Duration = Duration::from_millis(if cfg!(debug_assertions) { 50 } else { 10 });
/// How often exporters hear of findings that are over.
const TELL_EVERY: Duration = Duration::from_secs(1);
/// Unread segments that are logged in a second at most; the others follow.
const UNREAD_AT_ONCE: usize = 16;

/// Everything known on a node, and who judges it.
#[derive(Debug)]
pub struct State {
    config: Config,
    places: Vec<Place>,
    monitor: Monitor<Node>,
    samples: Option<Samples>,
    metrics: Metrics,
    /// Where there is somebody to send to.
    traces: Option<Outgoing>,
    /// The way to receivers of findings, where the settings name some.
    notifier: Option<Notifier>,
    /// Where there is a bus.
    bus: Option<(Publisher, Arc<Outbox>)>,
    /// Where findings outlive this process.
    store: Option<FindingStore>,
    /// Segments that were reported as unread.
    unread: BTreeSet<(String, UnreadReason)>,
    unread_at: Option<Instant>,
    costs: Costs,
    told: Option<Instant>,
    heartbeat: Arc<Heartbeat>,
    /// When what dead processes left is cleaned next.
    clean_at: Option<Instant>,
    /// It was said that plugins cannot be asked for detail.
    unasked: bool,
}

impl State {
    /// Nothing read yet.
    pub fn new(config: Config, baselines: Vec<Baseline>, probes: ProbeCommand) -> Self {
        let (places, costs) = (places(&config), Costs::new(daemon::node(&config)));
        let mut segments = Segments::new(places.clone()).of_node(daemon::node(&config));
        segments.use_probes(probes);
        segments.read_at_most(READ_MAX);
        segments.look_every(Duration::from_millis(config.segments.look_ms));
        segments.look_into(config.stacks);
        segments.share_communicators(config.segments.share_communicators);
        let node = Node { segments, readings: None, kept: config.cluster.is_enabled().then(Vec::new) };
        let mut monitor = Monitor::new(node, config.detect).with_baselines(baselines).following_live();
        monitor.keep_finished();
        monitor.limit_memory(memory(&config));
        let store = config.findings.directory.as_deref().and_then(|d| open_store(d, &mut monitor));
        let mut metrics = Metrics::new(config.prometheus.clone());
        metrics.set_trace_ratio(if config.otlp.is_enabled() { config.otlp.sample_ratio } else { 0.0 });
        State {
            config,
            places,
            monitor,
            samples: None,
            metrics,
            traces: None,
            notifier: None,
            bus: None,
            store,
            unread: BTreeSet::new(),
            unread_at: None,
            costs,
            told: None,
            heartbeat: Arc::new(Heartbeat::new()),
            clean_at: None,
            unasked: false,
        }
    }

    /// Traces what goes on for a receiver.
    pub(super) fn trace_to(&mut self, receiver: Outgoing) {
        self.traces = Some(receiver);
    }

    /// Sends findings to receivers.
    pub(super) fn notify_by(&mut self, mut notifier: Notifier) {
        notifier.restore(self.monitor.join(), &self.monitor.findings());
        self.notifier = Some(notifier);
    }

    /// Tells the cluster of what goes on.
    pub(super) fn publish_to(&mut self, outbox: Arc<Outbox>) {
        let settings = &self.config.cluster;
        let mut publisher = Publisher::new(
            daemon::node(&self.config),
            self.costs.started_unix_ns(),
            settings.bytes_per_second,
        );
        publisher.share_communicators(self.config.segments.share_communicators);
        self.bus = Some((publisher, outbox));
    }

    /// When the agent started, wall clock ns since the epoch.
    pub(super) fn started_unix_ns(&self) -> u64 {
        self.costs.started_unix_ns()
    }

    /// Where the servers count connections that they close.
    pub(super) fn connections(&self) -> Arc<Connections> {
        self.costs.connections()
    }

    /// The signs of life of the thread that will own it.
    pub(super) fn heartbeat(&self) -> Arc<Heartbeat> {
        Arc::clone(&self.heartbeat)
    }

    /// Begins to sample what the settings name. What runs already stops.
    pub(super) fn sample(&mut self) -> std::io::Result<()> {
        self.samples = None;
        let kubelet = self.config.segments.pod_resources.as_deref();
        let started = Samples::start(daemon::node(&self.config), &self.config.hardware, kubelet)?;
        let (samples, readings) = started.unzip();
        self.samples = samples;
        self.monitor.source_mut().readings = readings;
        Ok(())
    }

    /// Reads, and answers in between, until it is asked to end.
    pub(super) fn run(mut self, queue: &StateReceiver, mut told: impl FnMut(&FindingEvent)) {
        loop {
            let began = thread_cpu();
            let events = self.monitor.step(now_ns());
            events.iter().for_each(&mut told);
            self.export(&events);
            self.keep(&events);
            self.report_unread();
            self.report_done();
            if self.clean_at.is_none_or(|t| Instant::now() >= t) {
                self.clean();
                self.clean_at = Some(Instant::now() + CLEAN);
            }
            let took = thread_cpu().saturating_sub(began);
            self.costs.looked(took);
            let is_searched = self.monitor.source().is_searched();
            self.heartbeat.passed(is_searched);
            if !self.rest(queue, took) {
                return;
            }
        }
    }

    /// Answers until the next pass is due, after one that took so much of a CPU; false when the state is asked to end.
    fn rest(&mut self, queue: &StateReceiver, took: Duration) -> bool {
        let now = Instant::now();
        let (least, mut until) = (now + self.least_pause(took), now + self.pause(took));
        loop {
            self.heartbeat.rests_until(until);
            let received = queue.receive(until);
            self.heartbeat.works();
            match received {
                Received::Message(Message::End) => {
                    if let Some(traces) = &self.traces {
                        traces.say_unsent();
                    }
                    self.last_words();
                    self.unread_at = None;
                    self.report_unread();
                    return false;
                }
                Received::Message(Message::Ended) => {
                    self.monitor.source_mut().segments.look_at_processes();
                    until = until.min(least);
                }
                Received::Message(message) => self.take(message),
                Received::Asked(asked) => self.answer(asked),
                Received::Nothing => return true,
            }
            // Whoever asks without a pause must not keep it from reading.
            if Instant::now() >= until {
                return true;
            }
        }
    }

    /// Writes changes of findings down.
    fn keep(&mut self, events: &[FindingEvent]) {
        let Some(store) = &mut self.store else { return };
        if let Err(e) = store.record(events, || self.monitor.findings()) {
            warn!("findings cannot be written down, and are kept in memory until they can: {e}");
        }
    }

    /// Logs each segment once that is not read, so many a second.
    fn report_unread(&mut self) {
        if self.unread_at.is_some_and(|t| t.elapsed() < TELL_EVERY) {
            return;
        }
        self.unread_at = Some(Instant::now());
        let unread = self.monitor.source().unread(None);
        let key = |u: &Unread| (u.path.clone(), u.reason);
        let now: BTreeSet<_> = unread.iter().map(key).collect();
        self.unread.retain(|reported| now.contains(reported));
        let new: Vec<&Unread> = unread.iter().filter(|u| !self.unread.contains(&key(u))).collect();
        for u in new.iter().take(UNREAD_AT_ONCE) {
            warn!("not read ({}): {u}", u.reason.as_str());
            self.unread.insert(key(u));
        }
    }

    /// Hands on what is over and what was found.
    fn export(&mut self, events: &[FindingEvent]) {
        let finished = self.monitor.take_finished();
        self.publish(&finished, events);
        let join = self.monitor.join();
        self.metrics.finished(join, &finished);
        self.metrics.events(join, events);
        if let Some(notifier) = &mut self.notifier {
            events.iter().for_each(|e| notifier.event(join, e));
        }
        let second = self.told.is_none_or(|t| t.elapsed() >= TELL_EVERY);
        if second {
            self.told = Some(Instant::now());
        }
        let Some(traces) = &mut self.traces else { return };
        traces.tracer().finished(join, &finished);
        traces.tracer().events(join, events);
        if second {
            traces.say_lost();
        }
        let announced = traces.tracer().take_announced();
        if let Some((publisher, _)) = &mut self.bus {
            publisher.announce(announced);
        }
    }

    /// Tells the cluster.
    fn publish(&mut self, finished: &[Finished], events: &[FindingEvent]) {
        let readings = self.monitor.source_mut().take_readings();
        let segments = &self.monitor.source().segments;
        let (unread, unsearched) = (segments.unread_counts().values().sum(), !segments.is_searched());
        let Some((publisher, outbox)) = &mut self.bus else { return };
        readings.iter().for_each(|r| publisher.reading(r));
        publisher.set_unread(unread, unsearched);
        let all = self.told.is_none_or(|t| t.elapsed() >= TELL_EVERY);
        let changed = || events.iter().map(|e| e.finding.clone()).collect();
        let findings: Vec<Finding> = if all { self.monitor.findings() } else { changed() };
        let now = Moment { mono_ns: now_ns(), unix_ns: unix_ns() };
        let out = publisher.look(self.monitor.join(), finished, &findings, now);
        publisher.unsent(outbox.put(out));
        let sampling = publisher.sampling();
        self.monitor.sample(Some(sampling));
    }

    fn last_words(&mut self) {
        let Some((publisher, outbox)) = &mut self.bus else { return };
        let now = Moment { mono_ns: now_ns(), unix_ns: unix_ns() };
        let last = publisher.last(now);
        publisher.unsent(outbox.put(last));
    }

    fn wish(&mut self, wish: &Wish) {
        let Some((publisher, _)) = &mut self.bus else { return };
        let join = self.monitor.join();
        let key = |key: &OperationKey| {
            let (comm, track, order) = key.key()?;
            Some((join.resolve(comm)?, track, order))
        };
        let operations: Vec<_> = wish.operations.iter().filter_map(key).collect();
        publisher.wish(operations.iter().copied());
        let burst = wish
            .burst
            .and_then(|b| Some((join.resolve(CommId::new(b.comm, b.owner))?, b.seconds.min(BURST_SECONDS))));
        if let Some((comm, seconds)) = burst {
            let until_ns = now_ns() + u64::from(seconds) * 1_000_000_000;
            publisher.burst(comm, until_ns);
            self.monitor.source_mut().segments.request_detail(comm, until_ns);
        }
        if wish.all {
            publisher.refresh();
        }
        if let Some(traces) = &mut self.traces {
            for (comm, track, order) in operations {
                traces.tracer().interesting(comm, track, order);
            }
        }
        if self.config.cluster.stacks {
            for segment in wish.stacks.iter().take(STACKS) {
                let source = self.monitor.source_mut();
                crate::model::Source::inspect(source, SegmentId(*segment), now_ns());
            }
        }
    }

    fn own(&self) -> Own {
        let segments = &self.monitor.source().segments;
        let mut own = self.costs.own(segments.len());
        own.unread = segments.unread_counts();
        if let Some(traces) = &self.traces {
            own.exported = traces.exported();
        }
        own.exported.extend(self.notifier.as_ref().map(Notifier::exported));
        own.bus = self.bus.as_ref().map(|(publisher, outbox)| {
            let books = publisher.books();
            let mut left_out: BTreeMap<_, _> = REASONS.into_iter().map(|why| (why, 0)).collect();
            left_out.extend(&books.left_out);
            Bus {
                connected: outbox.connected(),
                bytes: books.bytes,
                published: books.published,
                left_out,
                level: publisher.sampling().level,
                waiting_bytes: outbox.bytes(),
            }
        });
        own
    }

    fn open(&self) -> Vec<Finding> {
        let mut all = self.monitor.findings();
        all.retain(|f| f.open);
        all
    }

    /// How long to wait after a look that took so much of a CPU.
    fn pause(&self, cost: Duration) -> Duration {
        self.monitor.source().segments.pause().max(self.least_pause(cost))
    }

    /// The shortest pause after a look that cost so much.
    fn least_pause(&self, cost: Duration) -> Duration {
        let share = self.config.limits.cpu;
        cost.mul_f64((1.0 - share) / share)
    }

    /// A descriptor that becomes readable when a followed process ends; absent where none is left for it.
    pub(super) fn ends(&mut self) -> Option<Arc<Ends>> {
        let ends = self.monitor.source_mut().segments.ends();
        ends.inspect_err(|e| warn!("ends of processes are seen at the next look only: {e}")).ok()
    }

    /// Answers a question. A client that went away needs no answer.
    fn answer(&mut self, asked: Asked) {
        match asked {
            Asked::Snapshot { uid, reply } => {
                reply.send(Box::new(self.monitor.snapshot_of(uid, now_ns()))).ok();
            }
            Asked::Metrics { format, reply } => {
                let began = Instant::now();
                let (own, open) = (self.own(), self.open());
                let written = self.metrics.render(self.monitor.join(), &open, &own, format);
                reply.send(Rendered::new(written, began.elapsed())).ok();
            }
            Asked::Families(reply) => {
                let (own, open) = (self.own(), self.open());
                reply.send(self.metrics.gather(self.monitor.join(), &open, &own)).ok();
            }
            Asked::Batch(reply) => {
                if let Some(traces) = &mut self.traces {
                    traces.hand_out(reply);
                }
            }
            // What only analysers know.
            Asked::Cluster(_) | Asked::Glance { .. } => {}
        }
    }

    fn take(&mut self, message: Message) {
        match message {
            Message::GiveBack(batch) => {
                if let Some(traces) = &mut self.traces {
                    traces.take_back(*batch);
                }
            }
            Message::Wish(wish) => self.wish(&wish),
            Message::Refresh => {
                if let Some((publisher, _)) = &mut self.bus {
                    publisher.refresh();
                }
            }
            Message::Settings(new) => self.set(*new),
            // They are for the loop above.
            Message::Ended | Message::End => {}
        }
    }

    fn set(&mut self, new: Config) {
        self.monitor.set(new.detect);
        self.monitor.limit_memory(memory(&new));
        if let Some((publisher, _)) = &mut self.bus {
            publisher.set_rate(new.cluster.bytes_per_second);
        }
        let places = places(&new);
        if places != self.places {
            self.monitor.source_mut().segments.set_places(places.clone());
            self.places = places;
        }
        let every = Duration::from_millis(new.segments.look_ms);
        self.monitor.source_mut().segments.look_every(every);
        self.monitor.source_mut().segments.look_into(new.stacks);
        let sample = new.hardware != self.config.hardware
            || new.segments.pod_resources != self.config.segments.pod_resources;
        self.config = new;
        if sample && let Err(e) = self.sample() {
            error!("nothing is sampled: {e}");
        }
    }

    /// Has removed what is left of dead processes beyond what is to be kept.
    fn clean(&mut self) {
        let keep = &self.config.segments;
        let age = (keep.keep_hours > 0).then(|| Duration::from_secs(keep.keep_hours.saturating_mul(3600)));
        let bytes = keep.keep_mib.saturating_mul(1 << 20);
        self.monitor.source_mut().segments.reap(bytes, age);
    }

    /// Logs what became of what was asked of segments.
    fn report_done(&mut self) {
        let segments = &mut self.monitor.source_mut().segments;
        let (removed, unwritten) = (segments.take_removed(), segments.take_unwritten());
        for path in removed {
            info!("removed {}, which a process left that is gone", path.display());
        }
        if let Some(why) = unwritten.filter(|_| !std::mem::replace(&mut self.unasked, true)) {
            warn!("plugins cannot be asked for detail: {why}; run the agent as the jobs' user or as root");
        }
    }
}

/// The file of findings in a directory; what it holds is taken over. Without it the agent works, and forgets.
fn open_store(directory: &Path, monitor: &mut Monitor<Node>) -> Option<FindingStore> {
    match FindingStore::open(directory, boot_id().unwrap_or_default()) {
        Ok((store, kept)) => {
            if kept.skipped > 0 {
                warn!("{} kept findings could not be read, and were left out", kept.skipped);
            }
            monitor.restore(kept.findings, now_ns());
            Some(store)
        }
        Err(e) => {
            let path = directory.display();
            warn!("findings.directory: {path}: {e}; findings are forgotten when this agent ends");
            None
        }
    }
}

fn places(config: &Config) -> Vec<Place> {
    let named = &config.segments.directories;
    if named.is_empty() { vec![Place::Host] } else { named.iter().cloned().map(Place::Dir).collect() }
}

/// The memory limit of users' communicators together.
fn memory(config: &Config) -> MemoryLimit {
    let mib = usize::try_from(config.limits.memory_mib).unwrap_or(usize::MAX);
    MemoryLimit::OfUsers(mib.saturating_mul(1 << 20))
}

/// CPU time of this thread.
fn thread_cpu() -> Duration {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(u64::try_from(t.tv_sec).unwrap_or(0), u32::try_from(t.tv_nsec).unwrap_or(0))
}
