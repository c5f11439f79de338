//! The state that the threads of a benchmark share: what each is doing, where they meet, and the first failure.

use super::cuda::Cuda;
use super::error::BenchError;
use super::nccl::{Nccl, UniqueId};
use super::op::Shape;
use super::rendezvous::{Launch, Rendezvous, RendezvousError};
use super::result::{Environment, RankEvents, Settings};
use super::sizes;
use super::turns::Turns;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// So many looks before the core is offered to others.
pub(super) const SPINS: u32 = 4000;
/// A call that does not come back is given this much more than work that does not end.
pub(super) const GRACE: Duration = Duration::from_secs(3);

/// The state of a working thread, as the watching one sees it.
#[derive(Debug, Default)]
pub(super) struct Beat {
    /// Moves on with every call.
    pub(super) count: AtomicU64,
    /// In a barrier, where others are the ones to look at.
    pub(super) waiting: AtomicBool,
    pub(super) doing: Mutex<String>,
}

impl Beat {
    /// Before whatever may not come back.
    pub(super) fn tick(&self) {
        // One thread writes.
        self.count.store(self.count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    pub(super) fn doing(&self, what: String) {
        *lock(&self.doing) = what;
        self.tick();
    }
}

/// A poisoned lock guards plain values here: what panicked is told on its own.
pub(super) fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The state that the threads of a process share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) settings: Settings,
    pub(super) cuda: Arc<Cuda>,
    pub(super) nccl: Arc<Nccl>,
    pub(super) first_device: usize,
    /// This process's first rank.
    pub(super) first_rank: u32,
    pub(super) ranks: u32,
    pub(super) environment: Environment,
    pub(super) id: UniqueId,
    pub(super) shapes: Vec<Shape>,
    pub(super) timeout: Duration,
    pub(super) barrier: Barrier,
    pub(super) failed: AtomicBool,
    pub(super) failure: Mutex<Option<BenchError>>,
    /// Threads whose communicators are gone after a failure.
    pub(super) aborted: AtomicUsize,
    pub(super) beats: Vec<Beat>,
    /// One for each thread, for what all have to know.
    pub(super) values: Vec<Mutex<f64>>,
    /// One for each rank of this process: whoever takes one out frees it.
    pub(super) comms: Vec<Mutex<Option<usize>>>,
    pub(super) events: Mutex<Vec<RankEvents>>,
    pub(super) rendezvous: Mutex<Option<Rendezvous>>,
    pub(super) turns: Option<Turns>,
}

/// Where the threads of a process meet. It gives up when something has failed.
#[derive(Debug)]
pub(super) struct Barrier {
    pub(super) threads: usize,
    pub(super) here: AtomicUsize,
    pub(super) round: AtomicUsize,
}

impl Barrier {
    pub(super) fn wait(&self, failed: &AtomicBool) -> Result<(), BenchError> {
        let round = self.round.load(Ordering::Acquire);
        if self.here.fetch_add(1, Ordering::AcqRel) + 1 == self.threads {
            self.here.store(0, Ordering::Relaxed);
            self.round.fetch_add(1, Ordering::Release);
            return Ok(());
        }
        let mut spins = 0u32;
        while self.round.load(Ordering::Acquire) == round {
            if failed.load(Ordering::Relaxed) {
                return Err(BenchError::Cancelled);
            }
            spins = spins.saturating_add(1);
            if spins > SPINS {
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
        }
        Ok(())
    }
}

impl Shared {
    #[expect(clippy::too_many_arguments, reason = "made once, of everything")]
    pub(super) fn new(
        settings: Settings,
        cuda: Arc<Cuda>,
        nccl: Arc<Nccl>,
        first_device: usize,
        launch: Option<&Launch>,
        rendezvous: Option<Rendezvous>,
        turns: Option<Turns>,
        environment: Environment,
        id: UniqueId,
    ) -> Result<Self, BenchError> {
        let threads = settings.threads as usize;
        let local = settings.threads * settings.gpus;
        let ranks = u32::try_from(environment.ranks.len()).unwrap_or(u32::MAX);
        if settings.collective.has_root() && settings.root >= ranks {
            let text = format!("--root {}: the ranks go from 0 to {}", settings.root, ranks - 1);
            return Err(BenchError::Settings(text));
        }
        let sweep = sizes::of(&settings)?;
        let mut shapes: Vec<Shape> =
            sweep.iter().filter_map(|b| settings.collective.shape(*b, settings.dtype, ranks)).collect();
        shapes.dedup();
        if shapes.is_empty() {
            return Err(BenchError::Settings(format!(
                "--max-bytes {}: not enough for {} of {} on {ranks} ranks (a part is a multiple of 16 bytes)",
                settings.max_bytes, settings.collective, settings.dtype
            )));
        }
        Ok(Shared {
            timeout: Duration::from_secs(settings.timeout_s),
            first_device,
            first_rank: launch.map_or(0, |l| l.rank * local),
            ranks,
            environment,
            id,
            shapes,
            barrier: Barrier { threads, here: AtomicUsize::new(0), round: AtomicUsize::new(0) },
            failed: AtomicBool::new(false),
            failure: Mutex::new(None),
            aborted: AtomicUsize::new(0),
            beats: (0..threads).map(|_| Beat::default()).collect(),
            values: (0..threads).map(|_| Mutex::new(0.0)).collect(),
            comms: (0..local).map(|_| Mutex::new(None)).collect(),
            events: Mutex::new(Vec::new()),
            rendezvous: Mutex::new(rendezvous),
            turns,
            settings,
            cuda,
            nccl,
        })
    }

    /// The ranks of a thread.
    pub(super) fn ranks_of(&self, thread: usize) -> Vec<u32> {
        let gpus = self.settings.gpus;
        let first = self.first_rank + u32::try_from(thread).unwrap_or(0) * gpus;
        (first..first + gpus).collect()
    }

    /// The first failure is the one that is told.
    pub(super) fn fail(&self, error: BenchError) {
        if !matches!(error, BenchError::Cancelled) {
            if let Ok(mut r) = self.rendezvous.try_lock()
                && let Some(r) = r.as_mut()
            {
                r.give_up(&error.to_string());
            }
            let mut failure = lock(&self.failure);
            match (failure.as_mut(), error) {
                // The time is over for several threads at once.
                (Some(BenchError::TimedOut { ranks, .. }), BenchError::TimedOut { ranks: more, .. }) => {
                    ranks.extend(more);
                    ranks.sort_unstable();
                }
                (Some(_), _) => {}
                (None, error) => *failure = Some(error),
            }
        }
        self.failed.store(true, Ordering::Release);
    }

    pub(super) fn check_failed(&self) -> Result<(), BenchError> {
        if self.failed.load(Ordering::Acquire) { Err(BenchError::Cancelled) } else { Ok(()) }
    }

    /// Adds ranks to a failure that says who was not done in time.
    pub(super) fn also_busy(&self, ranks: &[u32]) {
        if let Some(BenchError::TimedOut { ranks: told, .. }) = lock(&self.failure).as_mut() {
            told.extend(ranks);
            told.sort_unstable();
        }
    }

    /// Aborts the communicators of a thread, those that are not yet freed.
    pub(super) fn abort(&self, thread: usize) {
        let gpus = self.settings.gpus as usize;
        for comm in self.comms.iter().skip(thread * gpus).take(gpus) {
            let taken = lock(comm).take();
            if let Some(comm) = taken {
                // It is being thrown away: there is nothing more to do about an error.
                self.nccl.abort(comm).ok();
            }
        }
    }

    /// Waits for the threads of this process.
    pub(super) fn meet(&self, thread: usize) -> Result<(), BenchError> {
        let waiting = &self.beats[thread].waiting;
        waiting.store(true, Ordering::Release);
        let met = self.barrier.wait(&self.failed);
        self.beats[thread].tick();
        waiting.store(false, Ordering::Release);
        met
    }

    /// Exchanges values with the other processes; with several of them this one has one thread.
    pub(super) fn exchange<T>(
        &self,
        thread: usize,
        with: impl FnOnce(&mut Rendezvous) -> Result<T, RendezvousError>,
    ) -> Result<Option<T>, BenchError> {
        let mut held = lock(&self.rendezvous);
        let Some(r) = held.as_mut() else { return Ok(None) };
        let waiting = &self.beats[thread].waiting;
        waiting.store(true, Ordering::Release);
        let told = with(r);
        self.beats[thread].tick();
        waiting.store(false, Ordering::Release);
        Ok(Some(told?))
    }

    /// All threads of all processes begin together.
    pub(super) fn start_together(&self, thread: usize) -> Result<(), BenchError> {
        self.exchange(thread, Rendezvous::start_together)?;
        self.meet(thread)
    }

    /// Waits for this benchmark's turn, where it is given turns. The first process has it from whoever compares,
    /// the others from the first.
    pub(super) fn await_turn(&self, thread: usize, nth: u64) -> Result<(), BenchError> {
        let Some(turns) = &self.turns else { return Ok(()) };
        if self.first_rank == 0 {
            let waiting = &self.beats[thread].waiting;
            waiting.store(true, Ordering::Release);
            let waited = turns.wait(nth, &self.failed);
            self.beats[thread].tick();
            waiting.store(false, Ordering::Release);
            waited?;
        }
        self.exchange(thread, Rendezvous::barrier_of_a_turn)?;
        Ok(())
    }

    /// Says that all ranks are ready, or through with their turn.
    pub(super) fn end_turn(&self, thread: usize) -> Result<(), BenchError> {
        let Some(turns) = &self.turns else { return Ok(()) };
        self.exchange(thread, Rendezvous::barrier)?;
        self.meet(thread)?;
        if self.first_rank == 0 && thread == 0 { turns.ended() } else { Ok(()) }
    }

    /// Every rank's thread gives a number and gets `fold` of all of them.
    pub(super) fn combine(
        &self,
        thread: usize,
        own: f64,
        fold: fn(f64, f64) -> f64,
    ) -> Result<f64, BenchError> {
        *lock(&self.values[thread]) = own;
        self.meet(thread)?;
        let mut all: Vec<f64> = self.values.iter().map(|v| *lock(v)).collect();
        // Nobody may give the next one before all have read this.
        self.meet(thread)?;
        if let Some(theirs) = self.exchange(thread, |r| r.all_gather(&own.to_be_bytes()))? {
            all =
                theirs.iter().filter_map(|t| t.as_slice().try_into().ok().map(f64::from_be_bytes)).collect();
        }
        Ok(all.into_iter().reduce(fold).unwrap_or(own))
    }
}
