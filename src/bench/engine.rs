//! The benchmark as a whole: its settings, its processes and threads, and an end to it whatever happens.
//!
//! Every thread drives its GPUs and meets the others at barriers. The calling thread only watches: it hands on
//! results, and where a thread is too long in one call, it aborts that thread's communicators from outside.

use super::cost::ROUNDS_MIN;
use super::cuda::Cuda;
use super::error::BenchError;
use super::nccl::{ID_BYTES, Nccl, UniqueId};
use super::rendezvous::{Launch, Rendezvous, RendezvousError};
use super::result::{Environment, RankInfo, Report, Settings, SizeResult};
use super::shared::{GRACE, Shared, lock};
use super::signed_rank::ROUNDS_MAX;
use super::sizes;
use super::turns::Turns;
use super::worker::Worker;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// How long the threads may take to clear up after a failure.
const CLEARING: Duration = Duration::from_secs(15);
/// No more operations in one loop than anybody waits for.
const MOST_ITERS: u32 = 100_000_000;

/// The events of a running benchmark. Every process receives them.
#[derive(Debug)]
pub enum Progress<'a> {
    /// All ranks are there.
    Begin(&'a Settings, &'a Environment),
    /// A size is done.
    Size(&'a Settings, &'a SizeResult),
}

/// Runs a benchmark, alone or as one of several processes. Every process gets the report. With `turns` it works when
/// it is told to; of several processes the first one is told.
///
/// # Errors
/// What went wrong first. After [`BenchError::Stuck`] threads of this process are still inside CUDA or NCCL.
pub fn run(
    settings: &Settings,
    launch: Option<&Launch>,
    turns: Option<Turns>,
    on: &mut dyn FnMut(&Progress<'_>),
) -> Result<Report, BenchError> {
    validate(settings, launch)?;
    let cuda = Cuda::open(settings.cuda.as_deref())?;
    let nccl = Nccl::open(settings.nccl.as_deref())?;
    let mut settings = settings.clone();
    settings.threads = threads(&settings, launch, &cuda);
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
    let shared =
        Arc::new(Shared::new(settings, cuda, nccl, first, launch, rendezvous, turns, environment, id)?);
    on(&Progress::Begin(&shared.settings, &shared.environment));
    let sizes = supervise(&shared, on)?;
    Ok(Report::new(shared.settings.clone(), shared.environment.clone(), sizes))
}

/// Counts the ranks of a benchmark with these settings, all processes together.
///
/// # Errors
/// The CUDA driver's, which knows how many GPUs there are.
pub fn count_ranks(settings: &Settings, launch: Option<&Launch>) -> Result<u32, BenchError> {
    let cuda = Cuda::open(settings.cuda.as_deref())?;
    let processes = launch.map_or(1, |l| l.world);
    Ok(threads(settings, launch, &cuda).saturating_mul(settings.gpus).saturating_mul(processes))
}

/// Threads of a process: those that are asked for, else one a launched process, else one a visible GPU.
fn threads(s: &Settings, launch: Option<&Launch>, cuda: &Cuda) -> u32 {
    match (s.threads, launch) {
        (0, None) => u32::try_from(cuda.device_count()).unwrap_or(1).max(1),
        (0, Some(_)) => 1,
        (threads, _) => threads,
    }
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
    sizes::of(s)?;
    if let Some(plan) = s.cost {
        let most = u32::try_from(ROUNDS_MAX).unwrap_or(u32::MAX);
        if plan.rounds < ROUNDS_MIN || plan.rounds > most {
            return wrong(format!("--rounds {}: with --cost from {ROUNDS_MIN} to {most}", plan.rounds));
        }
        if plan.calls == 0 || plan.calls > MOST_ITERS {
            return wrong(format!("--calls {}: from 1 to {MOST_ITERS}", plan.calls));
        }
    }
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
    if s.millis == Some(0) {
        return wrong("--millis 0: at least one".to_owned());
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

/// Exchanges what the ranks have to know of each other.
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
    let id = id.ok_or(RendezvousError::OutOfStep { rank: 0 })?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::CostPlan;
    use crate::bench::fixtures::settings;

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
            (Settings { millis: Some(0), ..settings() }, false, "--millis"),
            (Settings { graph: Some(0), ..settings() }, false, "--cuda-graph"),
            (Settings { graph: Some(2), blocking: true, ..settings() }, false, "--blocking"),
            (Settings { graph: Some(2), events: true, ..settings() }, false, "--events"),
            (Settings { threads: 2, ..settings() }, true, "--threads"),
            (Settings { cost: Some(CostPlan { rounds: 5, calls: 9 }), ..settings() }, false, "--rounds 5"),
            (
                Settings { cost: Some(CostPlan { rounds: 401, calls: 9 }), ..settings() },
                false,
                "--rounds 401",
            ),
            (Settings { cost: Some(CostPlan { rounds: 6, calls: 0 }), ..settings() }, false, "--calls"),
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
