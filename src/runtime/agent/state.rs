//! The thread that owns what is known: it reads, judges, cleans up, and answers.

use crate::config::Config;
use crate::detect::Baseline;
use crate::ingest::{Place, Segments, now_ns, reap};
use crate::model::{Finding, Snapshot};
use crate::runtime::Monitor;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// How often segments of dead processes are looked through.
const CLEAN_EVERY: Duration = Duration::from_secs(10);
/// A state that has not read for so long is not ready.
const STALE: Duration = Duration::from_secs(5);
/// The longest that an answer may take.
const PATIENCE: Duration = Duration::from_secs(2);

/// What the state can be asked and told.
#[derive(Debug)]
pub enum Asked {
    /// Everything for a screen, of one user's jobs or of all.
    Snapshot {
        /// The user, by number; absent for all.
        uid: Option<u32>,
        /// Where the answer goes.
        reply: oneshot::Sender<Box<Snapshot>>,
    },
    /// Whether it reads.
    Ready(oneshot::Sender<bool>),
    /// New settings.
    Settings(Box<Config>),
    /// To end.
    End,
}

/// Everything known on a node, and who judges it.
#[derive(Debug)]
pub struct State {
    config: Config,
    places: Vec<Place>,
    monitor: Monitor<Segments>,
    read: Option<Instant>,
    cleaned: Option<Instant>,
}

impl State {
    /// Nothing read yet.
    pub fn new(config: Config, baselines: Vec<Baseline>) -> Self {
        let places = places(&config);
        let monitor = Monitor::new(Segments::new(places.clone()), config.detect).with_baselines(baselines);
        State { config, places, monitor, read: None, cleaned: None }
    }

    /// Reads, and answers in between, until it is asked to end.
    pub(super) fn run(mut self, questions: &Receiver<Asked>, mut told: impl FnMut(&Finding)) {
        loop {
            let began = thread_cpu();
            for finding in self.monitor.step(now_ns()) {
                told(&finding);
            }
            self.read = Some(Instant::now());
            if self.cleaned.is_none_or(|t| t.elapsed() >= CLEAN_EVERY) {
                self.cleaned = Some(Instant::now());
                self.clean();
            }
            let until = Instant::now() + self.pause(thread_cpu().saturating_sub(began));
            loop {
                match questions.recv_timeout(until.saturating_duration_since(Instant::now())) {
                    Ok(Asked::End) | Err(RecvTimeoutError::Disconnected) => return,
                    Ok(asked) => self.answer(asked),
                    Err(RecvTimeoutError::Timeout) => break,
                }
            }
        }
    }

    /// How long to wait after a look that took so much of a CPU.
    fn pause(&self, cost: Duration) -> Duration {
        let share = self.config.limits.cpu;
        self.monitor.source().pause().max(cost.mul_f64((1.0 - share) / share))
    }

    /// Who asked and went away needs no answer.
    fn answer(&mut self, asked: Asked) {
        match asked {
            Asked::Snapshot { uid, reply } => {
                reply.send(Box::new(self.monitor.snapshot_of(uid, now_ns()))).ok();
            }
            Asked::Ready(reply) => {
                reply.send(self.read.is_some_and(|t| t.elapsed() < STALE)).ok();
            }
            Asked::Settings(new) => self.set(*new),
            Asked::End => {}
        }
    }

    fn set(&mut self, new: Config) {
        self.monitor.set(new.detect);
        let places = places(&new);
        if places != self.places {
            self.monitor.source_mut().set_places(places.clone());
            self.places = places;
        }
        self.config = new;
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

/// Asks, without waiting for room; false when there is none, or nobody to be asked.
pub(super) fn send(to: &SyncSender<Asked>, asked: Asked) -> bool {
    match to.try_send(asked) {
        Ok(()) => true,
        Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => false,
    }
}

/// Asks and waits for the answer; absent when it does not come in time.
pub(super) async fn ask<T>(
    to: &SyncSender<Asked>,
    question: impl FnOnce(oneshot::Sender<T>) -> Asked,
) -> Option<T> {
    let (reply, answer) = oneshot::channel();
    if !send(to, question(reply)) {
        return None;
    }
    tokio::time::timeout(PATIENCE, answer).await.ok()?.ok()
}

/// True when the state answers.
pub(super) async fn alive(to: &SyncSender<Asked>) -> bool {
    ask(to, Asked::Ready).await.is_some()
}
