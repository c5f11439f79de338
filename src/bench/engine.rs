//! The benchmark itself: threads, communicators, the sweep, and an end to it whatever happens.
//!
//! Every thread drives its GPUs and meets the others at barriers. The calling thread only watches: it hands on
//! results, and where a thread is too long in one call, it aborts that thread's communicators from outside.

use super::check::{self, Rule};
use super::cuda::{Buffer, Context, Cuda, Event, Graph, HostBuffer, Stream};
use super::error::BenchError;
use super::nccl::{Failed, ID_BYTES, Nccl, UniqueId};
use super::op::{OneRank, Placement, Shape, algbw_gb_per_s};
use super::rendezvous::{Launch, Rendezvous};
use super::result::{Environment, RankEvents, RankInfo, Report, Settings, SizeResult, Timing, median};
use super::sizes;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Bytes of the host's buffer through which results are read.
const STAGE: usize = 16 << 20;
/// Operations' places in a buffer begin at multiples of this, in bytes.
const ALIGN: u64 = 256;
/// So many looks at a stream before the core is offered to others.
const SPINS: u32 = 4000;
/// Between looks at what else may have gone wrong, while a stream is busy.
const LOOK: Duration = Duration::from_millis(2);
/// How long the threads may take to clear up after a failure.
const CLEARING: Duration = Duration::from_secs(15);
/// A call that does not come back is given this much more than work that does not end.
const GRACE: Duration = Duration::from_secs(3);
/// Operations of a graph whose results are checked.
const CHECKED: u64 = 64;
/// No more operations in one loop than anybody waits for.
const MOST_ITERS: u32 = 100_000_000;

/// What happens while a benchmark runs. Only rank 0's process hears of sizes.
#[derive(Debug)]
pub enum Progress<'a> {
    /// All ranks are there.
    Begin(&'a Settings, &'a Environment),
    /// A size is done.
    Size(&'a Settings, &'a SizeResult),
}

/// Runs a benchmark, alone or as one of several processes. Every process gets the report.
///
/// # Errors
/// What went wrong first. After [`BenchError::Stuck`] threads of this process are still inside CUDA or NCCL.
pub fn run(
    settings: &Settings,
    launch: Option<&Launch>,
    on: &mut dyn FnMut(&Progress<'_>),
) -> Result<Report, BenchError> {
    validate(settings, launch)?;
    let cuda = Cuda::open(settings.cuda.as_deref())?;
    let nccl = Nccl::open(settings.nccl.as_deref())?;
    let mut settings = settings.clone();
    if settings.threads == 0 {
        settings.threads =
            if launch.is_some() { 1 } else { u32::try_from(cuda.device_count()).unwrap_or(1).max(1) };
    }
    let first = first_device(&settings, launch, cuda.device_count())?;
    let mut rendezvous = match launch {
        Some(l) => Some(Rendezvous::join(l, patience(&settings))?),
        None => None,
    };
    let prepared = prepare(&settings, &cuda, &nccl, first, launch, rendezvous.as_mut());
    let (environment, id) = match prepared {
        Ok(prepared) => prepared,
        Err(e) => {
            if let Some(r) = &mut rendezvous {
                r.give_up(&e.to_string());
            }
            return Err(e);
        }
    };
    let shared = Arc::new(Shared::new(settings, cuda, nccl, first, launch, rendezvous, environment, id)?);
    on(&Progress::Begin(&shared.settings, &shared.environment));
    let sizes = supervise(&shared, on)?;
    Ok(Report::new(shared.settings.clone(), shared.environment.clone(), sizes))
}

/// Ends the process at once, without the usual clearing up, which could wait for ever for threads that are inside
/// CUDA or NCCL.
pub fn leave(code: u8) -> ! {
    #![expect(unsafe_code, reason = "there is no safe name for it")]
    // SAFETY: ends the process; what is not flushed is lost, which the caller knows.
    unsafe { libc::_exit(i32::from(code)) }
}

fn validate(s: &Settings, launch: Option<&Launch>) -> Result<(), BenchError> {
    let wrong = |text: String| Err(BenchError::Settings(text));
    sizes::sweep(s.min_bytes, s.max_bytes, s.step)?;
    for (name, value) in
        [("--iters", s.iters), ("--gpus", s.gpus), ("--batch", s.batch), ("--repeat", s.repeat)]
    {
        if value == 0 || value > MOST_ITERS {
            return wrong(format!("{name} {value}: from 1 to {MOST_ITERS}"));
        }
    }
    if s.timeout_s == 0 {
        return wrong("--timeout 0: at least a second".to_owned());
    }
    if s.graph == Some(0) {
        return wrong("--cuda-graph 0: at least one operation has to be captured".to_owned());
    }
    if s.graph.is_some() && s.blocking {
        return wrong(
            "--cuda-graph and --blocking exclude each other: in a graph the host waits for nothing"
                .to_owned(),
        );
    }
    if s.graph.is_some() && s.events {
        return wrong("--cuda-graph and --events exclude each other: events time single calls".to_owned());
    }
    if launch.is_some() && s.threads > 1 {
        return wrong(format!(
            "--threads {}: with one process a rank (torchrun, srun) each has one thread; use --gpus for several GPUs a process",
            s.threads
        ));
    }
    Ok(())
}

/// CUDA's number of this process's first device.
fn first_device(s: &Settings, launch: Option<&Launch>, visible: usize) -> Result<usize, BenchError> {
    let own = s.threads as usize * s.gpus as usize;
    let before = launch.map_or(0, |l| l.local_rank as usize * own);
    if visible == 0 {
        return Err(BenchError::Gpus { needed: own, visible, hint: ": is CUDA_VISIBLE_DEVICES empty?" });
    }
    if before + own <= visible {
        return Ok(before);
    }
    // The launcher shows every process its own GPUs only (srun --gpus-per-task).
    if launch.is_some() && visible == own {
        return Ok(0);
    }
    let hint = if launch.is_some() {
        " (--gpus for each process of this host)"
    } else {
        " (--threads times --gpus; see CUDA_VISIBLE_DEVICES)"
    };
    Err(BenchError::Gpus { needed: before + own, visible, hint })
}

/// How long other processes may be silent: they may be at work for as long as the timeout, and verify.
fn patience(s: &Settings) -> Duration {
    Duration::from_secs(s.timeout_s.saturating_add(30))
}

/// What the ranks have to know of each other.
fn prepare(
    s: &Settings,
    cuda: &Arc<Cuda>,
    nccl: &Nccl,
    first: usize,
    launch: Option<&Launch>,
    rendezvous: Option<&mut Rendezvous>,
) -> Result<(Environment, UniqueId), BenchError> {
    let process = launch.map_or(0, |l| l.rank);
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let local = s.threads * s.gpus;
    let mut ranks = Vec::new();
    for l in 0..local {
        let device = i32::try_from(first).unwrap_or(0) + i32::try_from(l).unwrap_or(0);
        let (name, pci) = cuda.describe(device)?;
        let (rank, pid) = (process * local + l, std::process::id());
        ranks.push(RankInfo { rank, host: host.clone(), pid, thread: l / s.gpus, device, name, pci });
    }
    let variables = std::env::vars_os()
        .map(|(k, v)| (k.to_string_lossy().into_owned(), v.to_string_lossy().into_owned()))
        .filter(|(k, _)| k.starts_with("NCCL_") || k.starts_with("RINGWATCH_") || k == "CUDA_VISIBLE_DEVICES")
        .collect();
    let id = if process == 0 { nccl.unique_id()? } else { UniqueId([0; ID_BYTES]) };
    let mut environment = Environment {
        ringwatch_version: env!("CARGO_PKG_VERSION").to_owned(),
        nccl_version: nccl.version(),
        nccl_path: nccl.path().to_owned(),
        cuda_driver_version: cuda.driver_version()?,
        processes: launch.map_or(1, |l| l.world),
        ranks,
        variables,
    };
    let Some(r) = rendezvous else { return Ok((environment, id)) };
    let ids = r.all_gather(&id.0)?;
    let id = ids.first().and_then(|i| i.as_slice().try_into().ok()).map(UniqueId);
    let id = id.ok_or(super::rendezvous::RendezvousError::OutOfStep { rank: 0 })?;
    let all = r.all_gather(&serde_json::to_vec(&(s, &environment))?)?;
    let mut everybody = Vec::new();
    for (rank, bytes) in (0..).zip(&all) {
        let (theirs, facts): (Settings, Environment) = serde_json::from_slice(bytes)?;
        let same = Settings { nccl: s.nccl.clone(), cuda: s.cuda.clone(), ..theirs };
        if same != *s || facts.nccl_version != environment.nccl_version {
            let text = format!("rank {rank} runs with other options, or another NCCL, than rank {process}");
            return Err(BenchError::Settings(text));
        }
        if rank == 0 {
            (environment.nccl_path, environment.variables) = (facts.nccl_path, facts.variables);
        }
        everybody.extend(facts.ranks);
    }
    environment.ranks = everybody;
    Ok((environment, id))
}

/// What the watching thread sees of a working one.
#[derive(Debug, Default)]
struct Beat {
    /// Moves on with every call.
    count: AtomicU64,
    /// In a barrier, where others are the ones to look at.
    waiting: AtomicBool,
    doing: Mutex<String>,
}

impl Beat {
    /// Before whatever may not come back.
    fn tick(&self) {
        // One thread writes.
        self.count.store(self.count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    fn doing(&self, what: String) {
        *lock(&self.doing) = what;
        self.tick();
    }
}

/// A poisoned lock guards plain values here: what panicked is told on its own.
fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the threads of a process share.
#[derive(Debug)]
struct Shared {
    settings: Settings,
    cuda: Arc<Cuda>,
    nccl: Arc<Nccl>,
    first_device: usize,
    /// This process's first rank.
    first_rank: u32,
    ranks: u32,
    environment: Environment,
    id: UniqueId,
    shapes: Vec<Shape>,
    timeout: Duration,
    barrier: Barrier,
    failed: AtomicBool,
    failure: Mutex<Option<BenchError>>,
    /// Threads whose communicators are gone after a failure.
    aborted: AtomicUsize,
    beats: Vec<Beat>,
    /// One for each thread, for what all have to know.
    values: Vec<Mutex<f64>>,
    /// One for each rank of this process: whoever takes one out frees it.
    comms: Vec<Mutex<Option<usize>>>,
    events: Mutex<Vec<RankEvents>>,
    rendezvous: Mutex<Option<Rendezvous>>,
}

/// Where the threads of a process meet. It gives up when something has failed.
#[derive(Debug)]
struct Barrier {
    threads: usize,
    here: AtomicUsize,
    round: AtomicUsize,
}

impl Barrier {
    fn wait(&self, failed: &AtomicBool) -> Result<(), BenchError> {
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
    fn new(
        settings: Settings,
        cuda: Arc<Cuda>,
        nccl: Arc<Nccl>,
        first_device: usize,
        launch: Option<&Launch>,
        rendezvous: Option<Rendezvous>,
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
        let sweep = sizes::sweep(settings.min_bytes, settings.max_bytes, settings.step)?;
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
            settings,
            cuda,
            nccl,
        })
    }

    /// The ranks of a thread.
    fn ranks_of(&self, thread: usize) -> Vec<u32> {
        let gpus = self.settings.gpus;
        let first = self.first_rank + u32::try_from(thread).unwrap_or(0) * gpus;
        (first..first + gpus).collect()
    }

    /// The first failure is the one that is told.
    fn fail(&self, error: BenchError) {
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

    fn check_failed(&self) -> Result<(), BenchError> {
        if self.failed.load(Ordering::Acquire) { Err(BenchError::Cancelled) } else { Ok(()) }
    }

    /// Adds ranks to a failure that says who was not done in time.
    fn also_busy(&self, ranks: &[u32]) {
        if let Some(BenchError::TimedOut { ranks: told, .. }) = lock(&self.failure).as_mut() {
            told.extend(ranks);
            told.sort_unstable();
        }
    }

    /// Aborts the communicators of a thread, those that are not yet freed.
    fn abort(&self, thread: usize) {
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
    fn meet(&self, thread: usize) -> Result<(), BenchError> {
        let waiting = &self.beats[thread].waiting;
        waiting.store(true, Ordering::Release);
        let met = self.barrier.wait(&self.failed);
        self.beats[thread].tick();
        waiting.store(false, Ordering::Release);
        met
    }

    /// What the other processes say; with several of them this one has one thread.
    fn exchange<T>(
        &self,
        thread: usize,
        with: impl FnOnce(&mut Rendezvous) -> Result<T, super::rendezvous::RendezvousError>,
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
    fn start_together(&self, thread: usize) -> Result<(), BenchError> {
        self.exchange(thread, Rendezvous::start_together)?;
        self.meet(thread)
    }

    /// Every rank's thread gives a number and gets `fold` of all of them.
    fn combine(&self, thread: usize, own: f64, fold: fn(f64, f64) -> f64) -> Result<f64, BenchError> {
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

/// Starts the threads, hands on what they find, and ends them.
fn supervise(shared: &Arc<Shared>, on: &mut dyn FnMut(&Progress<'_>)) -> Result<Vec<SizeResult>, BenchError> {
    enum News {
        Size(Box<SizeResult>),
        Done(usize),
    }
    let (send, news) = channel();
    let threads = shared.settings.threads as usize;
    for thread in 0..threads {
        let (own, done): (_, Sender<News>) = (shared.clone(), send.clone());
        let results = done.clone();
        let work = move || {
            let run = std::panic::AssertUnwindSafe(|| {
                Worker::run(&own, thread, &mut |size| {
                    // Whoever supervised is gone only when everything is over.
                    results.send(News::Size(Box::new(size))).ok();
                });
            });
            if std::panic::catch_unwind(run).is_err() {
                own.fail(BenchError::Bug(own.ranks_of(thread)));
            }
            done.send(News::Done(thread)).ok();
        };
        let named = std::thread::Builder::new().name(format!("bench-{thread}"));
        if let Err(e) = named.spawn(work) {
            shared.fail(BenchError::Thread(e));
            break;
        }
    }
    drop(send);
    let mut sizes = Vec::new();
    let mut done = vec![false; threads];
    let mut seen = vec![(0u64, Instant::now()); threads];
    let mut clearing: Option<Instant> = None;
    let aborting = Arc::new(AtomicUsize::new(0));
    while !done.iter().all(|d| *d) {
        match news.recv_timeout(Duration::from_millis(50)) {
            Ok(News::Size(size)) => {
                on(&Progress::Size(&shared.settings, &size));
                sizes.push(*size);
            }
            Ok(News::Done(thread)) => done[thread] = true,
            Err(RecvTimeoutError::Timeout) => {}
            // A thread that could not be started.
            Err(RecvTimeoutError::Disconnected) => break,
        }
        let now = Instant::now();
        let mut blocked: Option<usize> = None;
        for (thread, (beat, last)) in shared.beats.iter().zip(&mut seen).enumerate() {
            let count = beat.count.load(Ordering::Relaxed);
            if count != last.0 || beat.waiting.load(Ordering::Acquire) || done[thread] {
                *last = (count, now);
            } else if now.duration_since(last.1) > shared.timeout + GRACE && clearing.is_none() {
                blocked.get_or_insert(thread);
            }
        }
        // A thread may be in a call that waits for a process which is no more.
        let lost = match shared.rendezvous.try_lock() {
            Ok(mut r) => r.as_mut().and_then(|r| r.check().err()),
            Err(_) => None,
        };
        if let Some(e) = lost.filter(|_| clearing.is_none()) {
            shared.fail(e.into());
        }
        if let Some(first) = blocked {
            // Those that are about to be over the time as well are in it together.
            let over = |t: &usize| now.duration_since(seen[*t].1) > shared.timeout;
            shared.fail(BenchError::Blocked {
                ranks: (0..threads).filter(over).flat_map(|t| shared.ranks_of(t)).collect(),
                operation: lock(&shared.beats[first].doing).clone(),
                seconds: shared.settings.timeout_s,
            });
        }
        if shared.failed.load(Ordering::Acquire) {
            let since = *clearing.get_or_insert_with(|| {
                // From outside, since a thread may be in a call that only this ends; each on a thread of its
                // own, since this may not come back either.
                for thread in (0..threads).filter(|t| !done[*t]) {
                    let (shared, aborting) = (shared.clone(), aborting.clone());
                    aborting.fetch_add(1, Ordering::AcqRel);
                    std::thread::spawn(move || {
                        std::thread::sleep(GRACE / 3);
                        shared.abort(thread);
                        aborting.fetch_sub(1, Ordering::AcqRel);
                    });
                }
                now
            });
            // Before there is a communicator nothing can be aborted: what does not come back by itself never will.
            let abortable =
                shared.comms.iter().any(|c| lock(c).is_some()) || aborting.load(Ordering::Acquire) > 0;
            if now.duration_since(since) > if abortable { CLEARING } else { GRACE } {
                break;
            }
        }
    }
    let stuck = !done.iter().all(|d| *d);
    match lock(&shared.failure).take() {
        Some(e) if stuck => Err(BenchError::Stuck(Box::new(e))),
        Some(e) => Err(e),
        None if stuck || shared.failed.load(Ordering::Acquire) => Err(BenchError::Cancelled),
        None => Ok(sizes),
    }
}

/// One GPU of a thread. Fields are dropped in this order.
#[derive(Debug)]
struct Lane {
    rank: u32,
    comm: usize,
    send: Buffer,
    recv: Buffer,
    stage: HostBuffer,
    stream: Stream,
    context: Arc<Context>,
}

/// A thread and its GPUs.
#[derive(Debug)]
struct Worker<'a> {
    shared: &'a Shared,
    thread: usize,
    lanes: Vec<Lane>,
}

/// Aborts whatever communicators of the thread are left, on every way out.
#[derive(Debug)]
struct Guard<'a> {
    shared: &'a Shared,
    thread: usize,
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        self.shared.abort(self.thread);
    }
}

/// What is measured now.
#[derive(Debug, Clone, Copy)]
struct Job<'a> {
    shape: &'a Shape,
    placement: Placement,
    /// Bytes from one operation's place to the next one's.
    stride: u64,
    /// How many batches have a place in the buffers.
    places: u64,
}

impl<'a> Worker<'a> {
    fn run(shared: &'a Shared, thread: usize, on: &mut dyn FnMut(SizeResult)) {
        let mut worker = Worker { shared, thread, lanes: Vec::new() };
        // Made after the worker, so that it goes before the buffers do, a panic's way out included.
        let guard = Guard { shared, thread };
        if let Err(e) = worker.sweep(on) {
            // All have to know before the first communicator goes, and all communicators have to be gone
            // before the first buffer does: a peer's kernel may still be reading it.
            shared.fail(e);
            drop(guard);
            shared.aborted.fetch_add(1, Ordering::AcqRel);
            let until = Instant::now() + GRACE;
            while shared.aborted.load(Ordering::Acquire) < shared.barrier.threads && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    fn sweep(&mut self, on: &mut dyn FnMut(SizeResult)) -> Result<(), BenchError> {
        let (shared, thread) = (self.shared, self.thread);
        self.set_up()?;
        self.connect()?;
        for shape in &shared.shapes {
            let out_of_place = self.measure(shape, Placement::OutOfPlace)?;
            let in_place = if shared.settings.collective.works_in_place() {
                Some(self.measure(shape, Placement::InPlace)?)
            } else {
                None
            };
            if thread == 0 {
                on(SizeResult { size_bytes: shape.size_bytes, count: shape.count, out_of_place, in_place });
            }
        }
        self.disconnect()
    }

    /// Takes the GPUs and what lies on them.
    fn set_up(&mut self) -> Result<(), BenchError> {
        let (shared, thread) = (self.shared, self.thread);
        let what = "setting up the GPUs";
        self.beat().doing(what.to_owned());
        let longest = shared.shapes.iter().map(|s| self.stride(s)).max().unwrap_or(ALIGN);
        let bytes = longest.saturating_mul(u64::from(shared.settings.batch));
        let gpus = shared.settings.gpus as usize;
        for (gpu, rank) in shared.ranks_of(thread).into_iter().enumerate() {
            let ordinal = shared.first_device + thread * gpus + gpu;
            let context = Context::new(&shared.cuda, i32::try_from(ordinal).unwrap_or(i32::MAX))?;
            let stream = Stream::new(&context)?;
            let (send, recv) = (Buffer::new(&context, bytes)?, Buffer::new(&context, bytes)?);
            let room = usize::try_from(longest).unwrap_or(STAGE).min(STAGE);
            let stage = HostBuffer::new(&context, room)?;
            stream.fill(&send, 0, bytes, 0)?;
            stream.fill(&recv, 0, bytes, 0)?;
            self.lanes.push(Lane { rank, comm: 0, send, recv, stage, stream, context });
            self.beat().tick();
        }
        self.wait(what)
    }

    fn beat(&self) -> &Beat {
        &self.shared.beats[self.thread]
    }

    fn explain(&self, failed: Failed, lane: &Lane, operation: &str) -> BenchError {
        let comm = Some(lane.comm).filter(|c| *c != 0);
        self.shared.nccl.explain(failed, lane.rank, comm, operation)
    }

    /// The first lane, whose rank stands for the thread's where a call is of all its ranks.
    fn explain_group(&self, failed: Failed, operation: &str) -> BenchError {
        match self.lanes.first() {
            Some(lane) => self.explain(failed, lane, operation),
            None => self.shared.nccl.explain(failed, 0, None, operation),
        }
    }

    fn stride(&self, shape: &Shape) -> u64 {
        let larger = shape.send_count.max(shape.recv_count) * self.shared.settings.dtype.bytes();
        larger.next_multiple_of(ALIGN)
    }

    /// Makes the communicators.
    fn connect(&mut self) -> Result<(), BenchError> {
        let shared = self.shared;
        let what = format!("making a communicator of {} ranks", shared.ranks);
        self.beat().doing(what.clone());
        // NCCL writes into these until the group has ended: they may not move before.
        let mut places = vec![0usize; self.lanes.len()];
        let grouped = self.lanes.len() > 1;
        let mut entered = Ok(());
        let mut outcome = if grouped { shared.nccl.group_start() } else { Ok(()) };
        for (lane, place) in self.lanes.iter().zip(&mut places) {
            if outcome.is_ok() && entered.is_ok() {
                entered = lane.context.enter();
            }
            if outcome.is_ok() && entered.is_ok() {
                outcome = shared.nccl.init_rank(place, shared.ranks, &shared.id, lane.rank);
            }
        }
        if grouped {
            // The group has to end in any case; its own error is the second one.
            outcome = outcome.and(shared.nccl.group_end());
        }
        let gpus = shared.settings.gpus as usize;
        for (i, (lane, place)) in self.lanes.iter_mut().zip(&places).enumerate() {
            lane.comm = *place;
            // After a failure NCCL has freed what it made.
            if *place != 0 && outcome.is_ok() {
                *lock(&shared.comms[self.thread * gpus + i]) = Some(*place);
            }
        }
        outcome.map_err(|e| self.explain_group(e, &what))?;
        entered?;
        shared.check_failed()
    }

    fn disconnect(&mut self) -> Result<(), BenchError> {
        let shared = self.shared;
        shared.exchange(self.thread, Rendezvous::barrier)?;
        shared.meet(self.thread)?;
        self.beat().doing("ncclCommDestroy".to_owned());
        let gpus = shared.settings.gpus as usize;
        for (i, lane) in self.lanes.iter().enumerate() {
            lane.context.enter()?;
            let taken = lock(&shared.comms[self.thread * gpus + i]).take();
            if let Some(comm) = taken {
                let destroyed = shared.nccl.destroy(comm);
                destroyed.map_err(|e| shared.nccl.explain(e, lane.rank, None, ""))?;
            }
            self.beat().tick();
        }
        // The others leave after this, which is then no loss: nobody may look any more.
        let mut held = lock(&shared.rendezvous);
        if let Some(mut r) = held.take() {
            self.beat().waiting.store(true, Ordering::Release);
            r.barrier()?;
        }
        Ok(())
    }

    /// Issues one operation, or one batch of them, on every GPU of this thread.
    fn issue(&self, job: &Job<'_>, nth: u64) -> Result<(), (Failed, u32)> {
        let s = &self.shared.settings;
        let nccl = &self.shared.nccl;
        let first_rank = self.lanes.first().map_or(0, |l| l.rank);
        let grouped = self.lanes.len() > 1 || s.batch > 1 || s.collective.is_grouped();
        if grouped {
            nccl.group_start().map_err(|e| (e, first_rank))?;
        }
        let place = nth % job.places * u64::from(s.batch) * job.stride;
        let mut outcome = Ok(());
        'issue: for lane in &self.lanes {
            for in_batch in 0..s.batch {
                let at = place + u64::from(in_batch) * job.stride;
                let one = OneRank {
                    shape: job.shape,
                    dtype: s.dtype,
                    op: s.redop,
                    root: s.root,
                    rank: lane.rank,
                    ranks: self.shared.ranks,
                    placement: job.placement,
                    send: lane.send.address() + at,
                    recv: lane.recv.address() + at,
                };
                let stream = lane.stream.raw();
                let issued = s.collective.each_call(&one, |call| nccl.issue(call, lane.comm, stream));
                if let Err(e) = issued {
                    outcome = Err((e, lane.rank));
                    break 'issue;
                }
            }
        }
        if grouped {
            // It has to end in any case; what failed first is told.
            let ended = nccl.group_end().map_err(|e| (e, first_rank));
            outcome = outcome.and(ended);
        }
        self.beat().tick();
        outcome
    }

    fn issue_told(&self, job: &Job<'_>, nth: u64, what: &str) -> Result<(), BenchError> {
        self.issue(job, nth).map_err(|(e, rank)| {
            let lane = self.lanes.iter().find(|l| l.rank == rank);
            self.shared.nccl.explain(e, rank, lane.map(|l| l.comm), what)
        })
    }

    /// Waits until all streams of this thread are idle; looks after errors, other threads and the time meanwhile.
    fn wait(&self, what: &str) -> Result<(), BenchError> {
        let mut busy = 0;
        let mut spins = 0u32;
        let mut next_look: Option<Instant> = None;
        let mut deadline: Option<Instant> = None;
        while let Some(lane) = self.lanes.get(busy) {
            if lane.stream.is_idle()? {
                busy += 1;
                continue;
            }
            spins = spins.saturating_add(1);
            if spins < SPINS {
                std::hint::spin_loop();
                continue;
            }
            std::thread::yield_now();
            let now = Instant::now();
            if next_look.is_none_or(|l| now >= l) {
                next_look = Some(now + LOOK);
                if let Err(e) = self.look(what) {
                    if matches!(e, BenchError::Cancelled) {
                        self.shared.also_busy(&self.busy(busy)?);
                    }
                    return Err(e);
                }
                if now >= *deadline.get_or_insert(now + self.shared.timeout) {
                    let (ranks, operation) = (self.busy(busy)?, what.to_owned());
                    let seconds = self.shared.settings.timeout_s;
                    return Err(BenchError::TimedOut { ranks, operation, seconds });
                }
            }
        }
        // One pass over the streams needs no look at the communicators: they are idle, and an error of theirs
        // would come with the next call.
        self.beat().tick();
        Ok(())
    }

    fn look(&self, what: &str) -> Result<(), BenchError> {
        self.shared.check_failed()?;
        // The watching thread times calls, and this loop the work.
        self.beat().tick();
        for lane in self.lanes.iter().filter(|l| l.comm != 0) {
            self.shared.nccl.async_error(lane.comm).map_err(|e| self.explain(e, lane, what))?;
        }
        if let Some(r) = lock(&self.shared.rendezvous).as_mut() {
            r.check()?;
        }
        Ok(())
    }

    /// The ranks, from one lane on, whose streams are busy.
    fn busy(&self, from: usize) -> Result<Vec<u32>, BenchError> {
        let mut ranks = Vec::new();
        for lane in self.lanes.iter().skip(from) {
            if !lane.stream.is_idle()? {
                ranks.push(lane.rank);
            }
        }
        Ok(ranks)
    }

    /// All that is done for one row and one placement.
    fn measure(&mut self, shape: &Shape, placement: Placement) -> Result<Timing, BenchError> {
        let shared = self.shared;
        let s = &shared.settings;
        let stride = self.stride(shape);
        let room = self.lanes.first().map_or(0, |l| l.send.bytes());
        let places = (room / (stride * u64::from(s.batch))).max(1);
        let job = Job { shape, placement, stride, places };
        let what = format!("{} of {} bytes, {placement}", s.collective, shape.size_bytes);
        self.beat().doing(what.clone());
        // NCCL connects the ranks in the first operation of a kind, which is no business of a capture.
        let warmup_iters = s.warmup_iters.max(u32::from(s.graph.is_some()));
        for nth in 0..u64::from(warmup_iters) {
            self.issue_told(&job, nth, &what)?;
            if s.blocking {
                self.wait(&what)?;
            }
        }
        self.wait(&what)?;
        let graphs = match s.graph {
            Some(operations) => Some(self.capture(&job, operations, &what)?),
            None => None,
        };
        // A graph's operations are a unit: what is asked for is rounded up to whole graphs.
        let each = s.graph.unwrap_or(1);
        let rounds = s.iters.div_ceil(each);
        let operations = u64::from(rounds) * u64::from(each) * u64::from(s.batch);
        let mut repeats_ns = Vec::new();
        for _ in 0..s.repeat {
            shared.start_together(self.thread)?;
            let start = Instant::now();
            match &graphs {
                None => {
                    for nth in 0..u64::from(rounds) {
                        self.issue_told(&job, nth, &what)?;
                        if s.blocking {
                            self.wait(&what)?;
                        }
                    }
                }
                Some(graphs) => {
                    for _ in 0..rounds {
                        self.launch(graphs)?;
                    }
                }
            }
            self.wait(&what)?;
            let elapsed_ns = start.elapsed().as_nanos() as f64;
            repeats_ns.push(shared.combine(self.thread, elapsed_ns / operations as f64, f64::max)?);
        }
        let events = if s.events { Some(self.time_by_events(&job, &what)?) } else { None };
        let wrong = if s.check {
            let own = self.verify(&job, graphs.as_deref(), &what)?;
            Some(shared.combine(self.thread, own as f64, |a, b| a + b)? as u64)
        } else {
            None
        };
        drop(graphs);
        let time_ns = median(&repeats_ns);
        let algbw_gb_per_s = algbw_gb_per_s(shape.size_bytes, time_ns);
        let busbw_gb_per_s = algbw_gb_per_s * s.collective.bus_factor(shared.ranks);
        Ok(Timing { operations, repeats_ns, time_ns, algbw_gb_per_s, busbw_gb_per_s, wrong, events })
    }

    /// A graph of some operations for each GPU, launched once so that the first timed launch is like the others.
    fn capture(&self, job: &Job<'_>, operations: u32, what: &str) -> Result<Vec<Graph>, BenchError> {
        for lane in &self.lanes {
            lane.stream.begin_capture()?;
        }
        let issued = (0..u64::from(operations)).try_for_each(|nth| self.issue_told(job, nth, what));
        // Capturing ends in any case: a stream in capture can do nothing else.
        let graphs: Result<Vec<Graph>, BenchError> =
            self.lanes.iter().map(|l| l.stream.end_capture()).collect();
        issued?;
        let graphs = graphs?;
        self.launch(&graphs)?;
        self.wait(what)?;
        Ok(graphs)
    }

    fn launch(&self, graphs: &[Graph]) -> Result<(), BenchError> {
        let several = self.lanes.len() > 1;
        for (lane, graph) in self.lanes.iter().zip(graphs) {
            if several {
                lane.context.enter()?;
            }
            lane.stream.launch(graph)?;
        }
        self.beat().tick();
        Ok(())
    }

    /// Times single operations, each issued when the one before is done, from event to event around it.
    fn time_by_events(&mut self, job: &Job<'_>, what: &str) -> Result<Vec<RankEvents>, BenchError> {
        let shared = self.shared;
        let mut pairs = Vec::new();
        for lane in &self.lanes {
            pairs.push((Event::new(&lane.context)?, Event::new(&lane.context)?));
        }
        let mut own: Vec<RankEvents> =
            self.lanes.iter().map(|l| RankEvents { rank: l.rank, samples_ns: Vec::new() }).collect();
        shared.start_together(self.thread)?;
        for nth in 0..u64::from(shared.settings.iters) {
            for (lane, (begin, _)) in self.lanes.iter().zip(&pairs) {
                begin.record(&lane.stream)?;
            }
            self.issue_told(job, nth, what)?;
            for (lane, (_, end)) in self.lanes.iter().zip(&pairs) {
                end.record(&lane.stream)?;
            }
            self.wait(what)?;
            for (events, (begin, end)) in own.iter_mut().zip(&pairs) {
                events.samples_ns.push(begin.elapsed_ns(end)?);
            }
        }
        lock(&shared.events).extend(own.iter().cloned());
        shared.meet(self.thread)?;
        let mut all = lock(&shared.events).clone();
        shared.meet(self.thread)?;
        if self.thread == 0 {
            lock(&shared.events).clear();
        }
        let bytes = serde_json::to_vec(&own)?;
        if let Some(theirs) = shared.exchange(self.thread, |r| r.all_gather(&bytes))? {
            all.clear();
            for bytes in theirs {
                all.extend(serde_json::from_slice::<Vec<RankEvents>>(&bytes)?);
            }
        }
        // Nobody may add the next ones before these are cleared.
        shared.meet(self.thread)?;
        all.sort_by_key(|e| e.rank);
        Ok(all)
    }

    /// Puts patterns into the inputs, runs one operation (a batch of them, a graph) and counts the elements that
    /// are not what they must be, on this thread's GPUs.
    fn verify(&mut self, job: &Job<'_>, graphs: Option<&[Graph]>, what: &str) -> Result<u64, BenchError> {
        let shared = self.shared;
        let s = &shared.settings;
        let rule =
            Rule { collective: s.collective, dtype: s.dtype, op: s.redop, root: s.root, ranks: shared.ranks };
        let what = format!("checking {what}");
        self.beat().doing(what.clone());
        let in_place = job.placement == Placement::InPlace;
        // A graph in place reduces again and again: only a single operation has a known result then.
        let graphs = graphs.filter(|_| !(in_place && s.collective.reduces()));
        let graphed = u64::from(s.graph.unwrap_or(1)).min(job.places).min(CHECKED);
        let batches = if graphs.is_some() { graphed } else { 1 };
        let several = u32::try_from(batches * u64::from(s.batch)).unwrap_or(1);
        for lane in &self.lanes {
            let bytes = u64::from(several) * job.stride;
            lane.stream.fill(&lane.recv, 0, bytes, check::STALE)?;
            for nth in 0..several {
                let input = if in_place { &lane.recv } else { &lane.send };
                for region in rule.input(job.shape, job.placement, lane.rank, nth) {
                    let tile = region.tile(s.dtype);
                    let at = u64::from(nth) * job.stride + region.at * s.dtype.bytes();
                    put(&lane.stream, input, at, &tile, region.count * s.dtype.bytes())?;
                }
            }
        }
        self.wait(&what)?;
        // Whoever is still timing must not be disturbed, and all begin with the same patterns.
        shared.start_together(self.thread)?;
        match graphs {
            Some(graphs) => self.launch(graphs)?,
            None => self.issue_told(job, 0, &what)?,
        }
        self.wait(&what)?;
        let mut wrong = 0;
        for i in 0..self.lanes.len() {
            let rank = self.lanes[i].rank;
            for nth in 0..several {
                for region in rule.output(job.shape, job.placement, rank, nth) {
                    wrong += self.compare(i, &region, u64::from(nth) * job.stride, &what)?;
                }
            }
        }
        Ok(wrong)
    }

    /// Reads a region of a receive buffer piece by piece and counts what is wrong.
    fn compare(
        &mut self,
        lane: usize,
        region: &check::Region,
        at: u64,
        what: &str,
    ) -> Result<u64, BenchError> {
        let dtype = self.shared.settings.dtype;
        let size = dtype.bytes();
        let tile = region.tile(dtype);
        let (mut done, mut wrong) = (0, 0);
        while done < region.count {
            let l = &mut self.lanes[lane];
            let room = l.stage.bytes().len() as u64 / size;
            let n = room.max(1).min(region.count - done);
            let bytes = usize::try_from(n * size).unwrap_or(0);
            l.stream.copy_out(&mut l.stage, &l.recv, at + (region.at + done) * size, bytes)?;
            self.wait(what)?;
            wrong += region.count_wrong(dtype, &tile, done, &self.lanes[lane].stage.bytes()[..bytes]);
            done += n;
        }
        Ok(wrong)
    }
}

/// Writes a pattern: one period from the host, the rest by doubling it on the device.
fn put(stream: &Stream, into: &Buffer, at: u64, tile: &[u8], bytes: u64) -> Result<(), BenchError> {
    let mut there = (tile.len() as u64).min(bytes);
    stream.copy_in(into, at, &tile[..usize::try_from(there).unwrap_or(0)])?;
    while there > 0 && there < bytes {
        let n = there.min(bytes - there);
        stream.copy_within(into, at + there, at, usize::try_from(n).unwrap_or(0))?;
        there += n;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::{Collective, DType, RedOp, Step};

    fn settings() -> Settings {
        Settings {
            collective: Collective::AllReduce,
            dtype: DType::Float,
            redop: RedOp::Sum,
            root: 0,
            min_bytes: 8,
            max_bytes: 64,
            step: Step::Factor(2),
            iters: 1,
            warmup_iters: 0,
            check: true,
            threads: 1,
            gpus: 1,
            graph: None,
            batch: 1,
            blocking: false,
            events: false,
            repeat: 1,
            timeout_s: 5,
            nccl: None,
            cuda: None,
        }
    }

    fn launch(local_rank: u32) -> Launch {
        Launch {
            rank: local_rank,
            world: 8,
            local_rank,
            master: "localhost".to_owned(),
            port: 1,
            key: 0,
            epoch: 0,
        }
    }

    #[test]
    fn settings_that_make_no_sense_are_answered_with_the_option() {
        for (wrong, launched, named) in [
            (Settings { iters: 0, ..settings() }, false, "--iters"),
            (Settings { gpus: 0, ..settings() }, false, "--gpus"),
            (Settings { batch: 0, ..settings() }, false, "--batch"),
            (Settings { repeat: 0, ..settings() }, false, "--repeat"),
            (Settings { timeout_s: 0, ..settings() }, false, "--timeout"),
            (Settings { graph: Some(0), ..settings() }, false, "--cuda-graph"),
            (Settings { graph: Some(2), blocking: true, ..settings() }, false, "--blocking"),
            (Settings { graph: Some(2), events: true, ..settings() }, false, "--events"),
            (Settings { threads: 2, ..settings() }, true, "--threads"),
        ] {
            let launch = launch(0);
            let said = validate(&wrong, launched.then_some(&launch)).unwrap_err().to_string();
            assert!(said.contains(named), "{said}");
        }
        assert!(validate(&settings(), Some(&launch(0))).is_ok());
    }

    #[test]
    fn devices_are_shared_out_by_local_rank() {
        let s = Settings { gpus: 2, ..settings() };
        assert_eq!(first_device(&s, None, 2).unwrap(), 0);
        assert_eq!(first_device(&s, Some(&launch(1)), 4).unwrap(), 2);
        // srun shows each its own.
        assert_eq!(first_device(&s, Some(&launch(3)), 2).unwrap(), 0);
        assert!(first_device(&s, Some(&launch(2)), 4).is_err());
        assert!(first_device(&s, None, 1).unwrap_err().to_string().contains("CUDA_VISIBLE_DEVICES"));
        assert!(first_device(&s, None, 0).is_err());
    }
}
