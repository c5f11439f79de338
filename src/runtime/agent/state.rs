//! The thread that owns what is known: it reads, judges, cleans up, and answers.

use super::samples::Samples;
use crate::cluster::message::{OperationKey, Wish};
use crate::cluster::{Moment, Outbox, Publisher, REASONS};
use crate::config::Config;
use crate::detect::Baseline;
use crate::export::metrics::Bus;
use crate::export::{Metrics, Own};
use crate::ingest::{Place, Segments, now_ns, reap, unix_ns};
use crate::join::Finished;
use crate::model::{CommId, Finding, SegmentId};
use crate::runtime::daemon::{self, Asked, Costs, Outgoing};
use crate::runtime::{Monitor, Node};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

/// The longest burst of detail that may be asked for, in seconds.
const BURST_SECONDS: u32 = 60;
/// Stacks of one wish.
const STACKS: usize = 8;
/// How often segments of dead processes are looked through.
const CLEAN_EVERY: Duration = Duration::from_secs(10);
/// How often exporters hear of findings that are over.
const TELL_EVERY: Duration = Duration::from_secs(1);
/// A state that has not read for so long is not ready.
const STALE: Duration = Duration::from_secs(5);

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
    /// Where there is a bus.
    bus: Option<(Publisher, Arc<Outbox>)>,
    costs: Costs,
    told: Option<Instant>,
    read: Option<Instant>,
    cleaned: Option<Instant>,
    /// It was said that plugins cannot be asked for detail.
    unasked: bool,
}

impl State {
    /// Nothing read yet.
    pub fn new(config: Config, baselines: Vec<Baseline>) -> Self {
        let places = places(&config);
        let mut segments = Segments::new(places.clone());
        segments.look_every(Duration::from_millis(config.segments.look_ms));
        segments.look_into(config.stacks);
        let node = Node { segments, readings: None, kept: config.cluster.is_enabled().then(Vec::new) };
        let mut monitor = Monitor::new(node, config.detect).with_baselines(baselines);
        monitor.keep_finished();
        let mut metrics = Metrics::new(config.prometheus.clone());
        metrics.set_trace_ratio(if config.otlp.is_enabled() { config.otlp.sample_ratio } else { 0.0 });
        State {
            config,
            places,
            monitor,
            samples: None,
            metrics,
            traces: None,
            bus: None,
            costs: Costs::new(),
            told: None,
            read: None,
            cleaned: None,
            unasked: false,
        }
    }

    /// Traces what goes on for a receiver.
    pub(super) fn trace_to(&mut self, receiver: Outgoing) {
        self.traces = Some(receiver);
    }

    /// Tells the cluster of what goes on.
    pub(super) fn publish_to(&mut self, outbox: Arc<Outbox>) {
        let settings = &self.config.cluster;
        let publisher =
            Publisher::new(daemon::node(settings), self.costs.started_unix_ns(), settings.bytes_per_second);
        self.bus = Some((publisher, outbox));
    }

    /// When the agent started, wall clock ns since the epoch.
    pub(super) fn started_unix_ns(&self) -> u64 {
        self.costs.started_unix_ns()
    }

    /// Begins to sample what the settings name. What runs already stops.
    pub(super) fn sample(&mut self) -> std::io::Result<()> {
        self.samples = None;
        let started = Samples::start(&self.config.hardware, self.config.segments.pod_resources.as_deref())?;
        let (samples, readings) = started.unzip();
        self.samples = samples;
        self.monitor.source_mut().readings = readings;
        Ok(())
    }

    /// Reads, and answers in between, until it is asked to end.
    pub(super) fn run(mut self, questions: &Receiver<Asked>, mut told: impl FnMut(&Finding)) {
        loop {
            let began = thread_cpu();
            let new = self.monitor.step(now_ns());
            new.iter().for_each(&mut told);
            self.export(&new);
            self.read = Some(Instant::now());
            if self.cleaned.is_none_or(|t| t.elapsed() >= CLEAN_EVERY) {
                self.cleaned = Some(Instant::now());
                self.clean();
            }
            let took = thread_cpu().saturating_sub(began);
            self.costs.looked(took);
            let until = Instant::now() + self.pause(took);
            loop {
                match questions.recv_timeout(until.saturating_duration_since(Instant::now())) {
                    Ok(Asked::End) | Err(RecvTimeoutError::Disconnected) => {
                        if let Some(traces) = &self.traces {
                            traces.say_unsent();
                        }
                        self.last_words();
                        return;
                    }
                    Ok(asked) => self.answer(asked),
                    Err(RecvTimeoutError::Timeout) => break,
                }
            }
        }
    }

    /// Hands on what is over and what was found.
    fn export(&mut self, new: &[Finding]) {
        let finished = self.monitor.take_finished();
        self.publish(&finished, new);
        let join = self.monitor.join();
        self.metrics.finished(join, &finished);
        self.metrics.findings(join, new);
        let second = self.told.is_none_or(|t| t.elapsed() >= TELL_EVERY);
        if second {
            self.told = Some(Instant::now());
        }
        let Some(traces) = &mut self.traces else { return };
        traces.tracer().finished(join, &finished);
        traces.tracer().findings(join, new);
        // Those that are over are among all there are; nobody waits for them.
        if second {
            traces.tracer().findings(join, &self.monitor.findings());
            traces.say_lost();
        }
        let announced = traces.tracer().take_announced();
        if let Some((publisher, _)) = &mut self.bus {
            publisher.announce(announced);
        }
    }

    /// Tells the cluster.
    fn publish(&mut self, finished: &[Finished], new: &[Finding]) {
        let readings = self.monitor.source_mut().take_readings();
        let Some((publisher, outbox)) = &mut self.bus else { return };
        readings.iter().for_each(|r| publisher.reading(r));
        let all = self.told.is_none_or(|t| t.elapsed() >= TELL_EVERY).then(|| self.monitor.findings());
        let now = Moment { mono_ns: now_ns(), unix_ns: unix_ns() };
        let out = publisher.look(self.monitor.join(), finished, all.as_deref().unwrap_or(new), now);
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
        publisher.wish(wish.operations.iter().filter_map(OperationKey::key));
        if let Some((comm, seconds)) = wish.burst.map(|b| (CommId(b.comm), b.seconds.min(BURST_SECONDS))) {
            let until_ns = now_ns() + u64::from(seconds) * 1_000_000_000;
            publisher.burst(comm, until_ns);
            if let Err(e) = self.monitor.source().segments.want_detail(comm, until_ns)
                && !std::mem::replace(&mut self.unasked, true)
            {
                eprintln!(
                    "ringwatch: plugins cannot be asked for detail: {e}; run the agent as the jobs' user or as root"
                );
            }
        }
        if wish.all {
            publisher.refresh();
        }
        if let Some(traces) = &mut self.traces {
            for (comm, track, order) in wish.operations.iter().filter_map(OperationKey::key) {
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
        let mut own = self.costs.own(self.monitor.source().segments.len());
        if let Some(traces) = &self.traces {
            own.exported = traces.exported();
        }
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
        let share = self.config.limits.cpu;
        self.monitor.source().segments.pause().max(cost.mul_f64((1.0 - share) / share))
    }

    /// Who asked and went away needs no answer.
    fn answer(&mut self, asked: Asked) {
        match asked {
            Asked::Snapshot { uid, reply } => {
                reply.send(Box::new(self.monitor.snapshot_of(uid, now_ns()))).ok();
            }
            Asked::Metrics { accept, reply } => {
                let (own, open) = (self.own(), self.open());
                let said = self.metrics.render(self.monitor.join(), &open, &own, accept.as_deref());
                reply.send(said.map_err(|e| e.to_string())).ok();
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
            Asked::GiveBack(batch) => {
                if let Some(traces) = &mut self.traces {
                    traces.take_back(*batch);
                }
            }
            Asked::Ready(reply) => {
                reply.send(self.read.is_some_and(|t| t.elapsed() < STALE)).ok();
            }
            Asked::Wish(wish) => self.wish(&wish),
            Asked::Refresh => {
                if let Some((publisher, _)) = &mut self.bus {
                    publisher.refresh();
                }
            }
            Asked::Settings(new) => self.set(*new),
            // What only analysers know.
            Asked::Cluster(_) | Asked::Glance { .. } | Asked::End => {}
        }
    }

    fn set(&mut self, new: Config) {
        self.monitor.set(new.detect);
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
            eprintln!("ringwatch: nothing is sampled: {e}");
        }
    }

    /// Removes what is left of dead processes beyond what is to be kept.
    fn clean(&self) {
        let keep = &self.config.segments;
        let age = (keep.keep_hours > 0).then(|| Duration::from_secs(keep.keep_hours.saturating_mul(3600)));
        for dir in self.places.iter().flat_map(Place::directories) {
            for path in reap(&dir, keep.keep_mib.saturating_mul(1 << 20), age) {
                eprintln!("ringwatch: removed {}, which a process left that is gone", path.display());
            }
        }
    }
}

fn places(config: &Config) -> Vec<Place> {
    let named = &config.segments.directories;
    if named.is_empty() { vec![Place::Host] } else { named.iter().cloned().map(Place::Dir).collect() }
}

/// CPU time of this thread.
fn thread_cpu() -> Duration {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(u64::try_from(t.tv_sec).unwrap_or(0), u32::try_from(t.tv_nsec).unwrap_or(0))
}
