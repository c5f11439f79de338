//! Playing one rank's recording on a plugin: its threads, their order, the report.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread::{self, Thread};

use serde::{Deserialize, Serialize};

use super::clock::{Monotonic, Pace, Pacer, monotonic_ns, sharpen_sleeps};
use super::plugin::{Abi, Plugin, Warnings, collect_warnings, take_stray_warnings};
use super::stage::{Stage, applicable};
use super::trace::{RankTrace, Timeline};

/// How to play a recording.
#[derive(Debug, Clone)]
pub struct PlayerOptions {
    /// The plugin's shared library.
    pub plugin: PathBuf,
    /// The table to call, hence the NCCL to be.
    pub abi: Abi,
    /// How fast.
    pub pace: Pace,
    /// How often; each time with fresh communicators, whose ids are the recorded ones plus the
    /// number of the loop. 0 counts as 1.
    pub loops: u32,
    /// `CLOCK_MONOTONIC` at which the recording's epoch happens again, in ns; the same for all
    /// processes of one replay. `None` is now.
    pub start_at_ns: Option<u64>,
    /// [`Trace::timeline`](super::Trace::timeline) of the whole recording, the same for all ranks.
    pub timeline: Timeline,
    /// Drop what the mask that the plugin wrote does not ask for, as NCCL does. Off by default: the
    /// recordings hold all types, and a plugin must survive what it did not ask for.
    pub honour_mask: bool,
    /// Every kernel of the recording starts so long after its host's calls, in ns, at least: as much a busy machine may
    /// delay these before a rank is late.
    pub hosts_ahead_ns: u64,
}

impl PlayerOptions {
    /// One loop at the original pace, beginning at once.
    #[must_use]
    pub fn new(plugin: impl Into<PathBuf>, abi: Abi, timeline: Timeline) -> Self {
        Self {
            plugin: plugin.into(),
            abi,
            pace: Pace::Original,
            loops: 1,
            start_at_ns: None,
            timeline,
            honour_mask: false,
            hosts_ahead_ns: 0,
        }
    }
}

/// Why a recording cannot be played.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The plugin cannot be loaded.
    #[error("cannot load the plugin {}: {source}; build it first, or name another file", path.display())]
    Open {
        /// Its file.
        path: PathBuf,
        /// The loader's error.
        source: libloading::Error,
    },
    /// The plugin does not speak this version.
    #[error(
        "the plugin {} exports no ncclProfiler_{abi}: {source}; choose a version that it has",
        path.display()
    )]
    Symbol {
        /// Its file.
        path: PathBuf,
        /// The version asked for.
        abi: Abi,
        /// The loader's error.
        source: libloading::Error,
    },
    /// The plugin's table lacks something that NCCL calls without asking.
    #[error(
        "the table ncclProfiler_{abi} of {} has an empty slot, on which NCCL would crash; mend the plugin",
        path.display()
    )]
    Table {
        /// Its file.
        path: PathBuf,
        /// The version asked for.
        abi: Abi,
    },
    /// An event belongs to no thread.
    #[error("event {event} of {rank} belongs to a thread that the trace does not list; convert it again")]
    NoThread {
        /// The rank's label.
        rank: String,
        /// Index of the event.
        event: usize,
    },
    /// The system refuses a thread.
    #[error("cannot start a thread to play on: {0}; raise the limit on processes (ulimit -u)")]
    Spawn(std::io::Error),
}

/// The result of a play.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlayReport {
    /// `init` calls made.
    pub inits: u64,
    /// `startEvent` calls made, by NCCL's name of the event's type.
    pub starts: BTreeMap<String, u64>,
    /// `stopEvent` calls made.
    pub stops: u64,
    /// `recordEventState` calls made.
    pub states: u64,
    /// `finalize` calls made.
    pub finalizes: u64,
    /// Calls that gave back something else than `ncclSuccess`.
    pub nonzero_returns: u64,
    /// Starts and inits that left NULL for a handle or context.
    pub null_handles: u64,
    /// Starts that wrote nothing where NCCL has uninitialised memory.
    pub unwritten_handles: u64,
    /// Callbacks left out because NCCL leaves them out behind a NULL handle.
    pub suppressed: u64,
    /// Callbacks left out because of the mask.
    pub masked: u64,
    /// Callbacks left out because this version has no such event or state.
    pub absent: u64,
    /// How far behind the recorded schedule a call ever was, in ns.
    pub largest_lateness_ns: u64,
    /// From the first call to the last, in ns.
    pub elapsed_ns: u64,
    /// The lines that the plugin wrote through NCCL's logger at level WARN.
    pub warnings: Vec<String>,
}

impl PlayReport {
    /// All calls made on the plugin.
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.inits + self.starts.values().sum::<u64>() + self.stops + self.states + self.finalizes
    }
}

/// Plays recordings on a loaded plugin.
#[derive(Debug)]
pub struct Player {
    options: PlayerOptions,
    plugin: Plugin,
}

impl Player {
    /// Loads the plugin.
    ///
    /// # Errors
    /// The file cannot be loaded, has no table of the version, or an incomplete one.
    pub fn new(options: PlayerOptions) -> Result<Self, ReplayError> {
        let plugin = Plugin::open(&options.plugin, options.abi)?;
        Ok(Self { options, plugin })
    }

    /// Plays one rank, on a thread for each of the recording's, in exactly the recorded order.
    ///
    /// # Errors
    /// The recording contradicts itself, or threads are refused.
    pub fn play(&self, rank: &RankTrace) -> Result<PlayReport, ReplayError> {
        if let Some(event) = rank.events.iter().position(|e| usize::from(e.thread) >= rank.threads.len()) {
            return Err(ReplayError::NoThread { rank: rank.label.clone(), event });
        }
        let options = &self.options;
        let order = applicable(rank, options.abi);
        let loops = options.loops.max(1);
        let pacer = Pacer::new(Monotonic, options.pace, options.timeline, options.start_at_ns)
            .with_hosts_ahead(options.hosts_ahead_ns);
        let stage = Stage::new(&self.plugin, rank, options.abi, options.honour_mask, pacer);
        let warnings = Warnings::default();
        let play = Play { rank, order: &order, stage: Mutex::new(stage), turn: Turn::default() };
        let began_ns = monotonic_ns();
        thread::scope(|scope| {
            let mut threads = Vec::new();
            for me in 0..rank.threads.len() {
                let (play, warnings) = (&play, warnings.clone());
                let name = format!("replay-{}", rank.threads[me]);
                let spawned = thread::Builder::new().name(name).spawn_scoped(scope, move || {
                    collect_warnings(warnings);
                    play.run(me, loops);
                });
                match spawned {
                    Ok(handle) => threads.push(handle.thread().clone()),
                    Err(error) => {
                        play.turn.abort(&threads);
                        return Err(ReplayError::Spawn(error));
                    }
                }
            }
            play.turn.begin(threads);
            Ok(())
        })?;
        let stage = play.stage.into_inner().unwrap_or_else(PoisonError::into_inner);
        let mut report = stage.into_report();
        report.absent = (rank.events.len() - order.len()) as u64 * u64::from(loops);
        report.elapsed_ns = monotonic_ns().saturating_sub(began_ns);
        report.warnings = std::mem::take(&mut *warnings.lock().unwrap_or_else(PoisonError::into_inner));
        report.warnings.extend(take_stray_warnings());
        Ok(report)
    }
}

struct Play<'a> {
    rank: &'a RankTrace,
    /// Indices of the events that this version has.
    order: &'a [usize],
    /// Only whoever has the turn locks it, so nobody ever waits for the lock.
    stage: Mutex<Stage<'a, Monotonic>>,
    turn: Turn,
}

impl Play<'_> {
    fn owner(&self, position: usize) -> usize {
        usize::from(self.rank.events[self.order[position]].thread)
    }

    /// The life of one of the recording's threads.
    fn run(&self, me: usize, loops: u32) {
        let _guard = AbortOnPanic(&self.turn);
        sharpen_sleeps();
        let mine: Vec<usize> = (0..self.order.len()).filter(|&p| self.owner(p) == me).collect();
        let events = self.order.len() as u64;
        for index in 0..loops {
            for &position in &mine {
                let number = u64::from(index) * events + position as u64;
                if !self.turn.wait(number) {
                    return;
                }
                let mut stage = self.stage.lock().unwrap_or_else(PoisonError::into_inner);
                if position == 0 {
                    stage.begin_loop(index);
                }
                stage.play(&self.rank.events[self.order[position]]);
                drop(stage);
                self.turn.pass(number + 1, self.owner((position + 1) % self.order.len()), me);
            }
        }
    }
}

/// The turn of the ranks. Waiting threads are parked: a replay of four ranks has more threads than many a
/// machine has cores, and spinning would take time from those that play.
#[derive(Default)]
struct Turn {
    next: AtomicU64,
    aborted: AtomicBool,
    threads: OnceLock<Vec<Thread>>,
}

impl Turn {
    /// Nobody has a turn before all threads exist.
    fn begin(&self, threads: Vec<Thread>) {
        let threads = self.threads.get_or_init(|| threads);
        threads.iter().for_each(Thread::unpark);
    }

    fn abort(&self, threads: &[Thread]) {
        self.aborted.store(true, Ordering::Release);
        threads.iter().for_each(Thread::unpark);
    }

    /// Returns whether the turn came, rather than the end.
    fn wait(&self, number: u64) -> bool {
        loop {
            if self.aborted.load(Ordering::Acquire) {
                return false;
            }
            if self.threads.get().is_some() && self.next.load(Ordering::Acquire) == number {
                return true;
            }
            thread::park();
        }
    }

    fn pass(&self, number: u64, to: usize, me: usize) {
        self.next.store(number, Ordering::Release);
        if to != me
            && let Some(thread) = self.threads.get().and_then(|threads| threads.get(to))
        {
            thread.unpark();
        }
    }
}

/// Lets the other threads end when one panics, so that the panic is seen instead of a hang.
struct AbortOnPanic<'a>(&'a Turn);

impl Drop for AbortOnPanic<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.abort(self.0.threads.get().map_or(&[], Vec::as_slice));
        }
    }
}
