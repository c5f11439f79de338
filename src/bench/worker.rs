//! One thread and its GPUs: communicators, the sweep, the stopwatch, the check.

mod phases;

use super::check::{self, Rule};
use super::cuda::{Buffer, Context, EmptyKernel, Event, Graph, HostBuffer, Stream};
use super::error::BenchError;
use super::nccl::Failed;
use super::op::{OneRank, Placement, Shape, algbw_gb_per_s};
use super::rendezvous::Rendezvous;
use super::result::{KernelLaunch, RankEvents, SizeResult, Timing, median};
use super::shared::{Beat, GRACE, SPINS, Shared, lock};
use super::shim::Shim;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Bytes of the host's buffer through which results are read.
const STAGE: usize = 16 << 20;
/// Operations' places in a buffer begin at multiples of this, in bytes.
const ALIGN: u64 = 256;
/// Between looks at what else may have gone wrong, while a stream is busy.
const LOOK: Duration = Duration::from_millis(2);
/// Operations of a graph whose results are checked.
const CHECKED: u64 = 64;

/// Memory that is filled before each operation that is timed by events: a tenth of a millisecond's work.
const BUSY_BYTES: u64 = 256 << 20;

/// Operations by which is found how many take a given time.
const PROBES: u32 = 20;

/// Pairs of events without an operation, of which the median is taken.
const FLOOR_SAMPLES: usize = 51;

/// The times that events measure without an operation between them.
#[derive(Debug, Clone, Copy)]
struct Floor {
    empty_ns: f64,
    kernel_ns: Option<f64>,
    kernel: Option<KernelLaunch>,
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
pub(super) struct Worker<'a> {
    shared: &'a Shared,
    thread: usize,
    lanes: Vec<Lane>,
    /// Turns taken so far.
    turns: u64,
    /// In the first thread of each process, with [`super::result::Settings::cost`].
    shim: Option<Shim>,
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

/// The measurement that runs now.
#[derive(Debug, Clone, Copy)]
struct Job<'a> {
    shape: &'a Shape,
    placement: Placement,
    /// Bytes from one operation's place to the next one's.
    stride: u64,
    /// How many batches have a place in the buffers.
    places: u64,
}

/// Binds this thread to one of the CPUs it may use, another one for each `index`. Threads that NCCL has made are free
/// as before. Where the system refuses, nothing changes.
fn pin(index: usize) {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
    let Ok(allowed) = sched_getaffinity(None) else { return };
    let cpus: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|c| allowed.is_set(*c)).collect();
    // Not next to each other, where they may share a core, and not the first, which serves interrupts.
    let apart = if cpus.len() >= 32 { 2 } else { 1 };
    if let Some(cpu) = cpus.get((1 + index) * apart % cpus.len().max(1)) {
        let mut one = CpuSet::new();
        one.set(*cpu);
        sched_setaffinity(None, &one).ok();
    }
}

impl<'a> Worker<'a> {
    /// One thread's part of the benchmark, to its end, which a failure may be.
    pub(super) fn run(shared: &'a Shared, thread: usize, on: &mut dyn FnMut(SizeResult)) {
        let mut worker = Worker { shared, thread, lanes: Vec::new(), turns: 0, shim: None };
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
        shared.end_turn(thread)?;
        if let Some(plan) = shared.settings.cost {
            self.sweep_phases(plan, on)?;
            return self.disconnect();
        }
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
        if shared.settings.pin {
            pin(shared.first_device + self.thread * gpus);
        }
        shared.check_failed()
    }

    fn disconnect(&mut self) -> Result<(), BenchError> {
        let shared = self.shared;
        // Clearing up would disturb the others: it takes a turn of its own.
        shared.await_turn(self.thread, self.turns)?;
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

    fn job<'j>(&self, shape: &'j Shape, placement: Placement) -> Job<'j> {
        let stride = self.stride(shape);
        let room = self.lanes.first().map_or(0, |l| l.send.bytes());
        let places = (room / (stride * u64::from(self.shared.settings.batch))).max(1);
        Job { shape, placement, stride, places }
    }

    /// All that is done for one row and one placement.
    fn measure(&mut self, shape: &Shape, placement: Placement) -> Result<Timing, BenchError> {
        let shared = self.shared;
        let s = &shared.settings;
        let job = self.job(shape, placement);
        let what = format!("{} of {} bytes, {placement}", s.collective, shape.size_bytes);
        self.beat().doing(what.clone());
        // NCCL connects the ranks in the first operation of a kind, which is no business of a capture.
        let warmup_iters = s.warmup_iters.max(u32::from(s.graph.is_some()));
        let mut graphs = None;
        // A graph's operations are a unit: what is asked for is rounded up to whole graphs.
        let each = s.graph.unwrap_or(1);
        let mut rounds = s.iters.div_ceil(each);
        let (mut repeats_ns, mut events, mut wrong) = (Vec::new(), None, None);
        for nth in 0..s.repeat {
            shared.await_turn(self.thread, self.turns)?;
            self.turns += 1;
            // Whoever takes turns comes back to GPUs that others have used.
            if nth == 0 || shared.turns.is_some() {
                self.repeat(&job, None, warmup_iters, &what)?;
            }
            if nth == 0 {
                if let Some(operations) = s.graph {
                    graphs = Some(self.capture(&job, operations, &what)?);
                }
                if let Some(millis) = s.millis {
                    rounds = self.rounds_in(&job, graphs.as_deref(), millis, rounds, &what)?;
                }
            }
            shared.start_together(self.thread)?;
            let start = Instant::now();
            self.repeat(&job, graphs.as_deref(), rounds, &what)?;
            let operations = f64::from(rounds) * f64::from(each) * f64::from(s.batch);
            let elapsed_ns = start.elapsed().as_nanos() as f64;
            repeats_ns.push(shared.combine(self.thread, elapsed_ns / operations, f64::max)?);
            if nth + 1 == s.repeat {
                if s.events {
                    events = Some(self.time_by_events(&job, &what)?);
                }
                if s.check {
                    let own = self.verify(&job, graphs.as_deref(), &what)?;
                    wrong = Some(shared.combine(self.thread, own as f64, |a, b| a + b)? as u64);
                }
            }
            shared.end_turn(self.thread)?;
        }
        drop(graphs);
        let operations = u64::from(rounds) * u64::from(each) * u64::from(s.batch);
        Ok(Timing { wrong, events, ..self.timing(shape, operations, repeats_ns) })
    }

    /// The results of repeats, unchecked.
    fn timing(&self, shape: &Shape, operations: u64, repeats_ns: Vec<f64>) -> Timing {
        let time_ns = median(&repeats_ns);
        let algbw_gb_per_s = algbw_gb_per_s(shape.size_bytes, time_ns);
        let busbw_gb_per_s = algbw_gb_per_s * self.shared.settings.collective.bus_factor(self.shared.ranks);
        Timing {
            operations,
            repeats_ns,
            time_ns,
            algbw_gb_per_s,
            busbw_gb_per_s,
            wrong: None,
            events: None,
            phases: None,
        }
    }

    /// Issues so many batches, or launches so many graphs, and waits for the last.
    fn repeat(
        &self,
        job: &Job<'_>,
        graphs: Option<&[Graph]>,
        times: u32,
        what: &str,
    ) -> Result<(), BenchError> {
        for nth in 0..u64::from(times) {
            match graphs {
                Some(graphs) => self.launch(graphs)?,
                None => self.issue_told(job, nth, what)?,
            }
            if self.shared.settings.blocking {
                self.wait(what)?;
            }
        }
        self.wait(what)
    }

    /// How many batches (graphs) take about so many milliseconds, at most `most`; the same number on all ranks.
    fn rounds_in(
        &self,
        job: &Job<'_>,
        graphs: Option<&[Graph]>,
        millis: u32,
        most: u32,
        what: &str,
    ) -> Result<u32, BenchError> {
        let aim_ns = f64::from(millis) * 1e6;
        let mut tried = PROBES.min(most);
        loop {
            self.shared.start_together(self.thread)?;
            let start = Instant::now();
            self.repeat(job, graphs, tried, what)?;
            let own_ns = start.elapsed().as_nanos() as f64;
            let ns = self.shared.combine(self.thread, own_ns, f64::max)?.max(1.0);
            let wanted = (f64::from(tried) * aim_ns / ns).ceil() as u32;
            // A probe that took a tenth of the time says enough.
            if ns * 10.0 >= aim_ns || wanted <= tried || tried == most {
                return Ok(wanted.clamp(1, most));
            }
            tried = (wanted / 4).clamp(tried + 1, most);
        }
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
        // A GPU that is full of something else is not made busy.
        let busy: Vec<Option<Buffer>> =
            self.lanes.iter().map(|l| Buffer::new(&l.context, BUSY_BYTES).ok()).collect();
        let graphs = self.capture(job, 1, what)?;
        let mut floors = Vec::new();
        for ((lane, busy), graph) in self.lanes.iter().zip(&busy).zip(&graphs) {
            floors.push(self.floor(lane, busy.as_ref(), graph.only_kernel()?, what)?);
        }
        drop(graphs);
        let mut own: Vec<RankEvents> = self
            .lanes
            .iter()
            .zip(&floors)
            .map(|(lane, floor)| RankEvents {
                rank: lane.rank,
                floor_ns: floor.empty_ns,
                kernel_floor_ns: floor.kernel_ns,
                kernel: floor.kernel,
                samples_ns: Vec::new(),
            })
            .collect();
        shared.start_together(self.thread)?;
        for nth in 0..u64::from(shared.settings.iters) {
            for ((lane, (begin, _)), busy) in self.lanes.iter().zip(&pairs).zip(&busy) {
                // While the GPU is busy with this the host gets ahead of it, and what lies between the events is the
                // operation alone, not the host's way to its launch.
                if let Some(busy) = busy {
                    lane.stream.fill(busy, 0, BUSY_BYTES, 0)?;
                }
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

    /// Measures the time between events on a lane with nothing between them, and with a kernel that is launched as
    /// another one is and does nothing.
    fn floor(
        &self,
        lane: &Lane,
        busy: Option<&Buffer>,
        like: Option<KernelLaunch>,
        what: &str,
    ) -> Result<Floor, BenchError> {
        let kernel = like.map(|like| EmptyKernel::new(&lane.context, like)).transpose()?;
        let event = || Event::new(&lane.context);
        let (empty, around) = ((event()?, event()?), (event()?, event()?));
        let (mut empty_ns, mut kernel_ns) = (Vec::new(), Vec::new());
        // The first launch loads the code.
        if let Some(kernel) = &kernel {
            kernel.launch(&lane.stream)?;
        }
        for _ in 0..FLOOR_SAMPLES {
            if let Some(kernel) = &kernel {
                kernel.prepare()?;
            }
            if let Some(busy) = busy {
                lane.stream.fill(busy, 0, BUSY_BYTES, 0)?;
            }
            empty.0.record(&lane.stream)?;
            empty.1.record(&lane.stream)?;
            if let Some(kernel) = &kernel {
                around.0.record(&lane.stream)?;
                kernel.launch(&lane.stream)?;
                around.1.record(&lane.stream)?;
            }
            self.wait(what)?;
            empty_ns.push(empty.0.elapsed_ns(&empty.1)?);
            if kernel.is_some() {
                kernel_ns.push(around.0.elapsed_ns(&around.1)?);
            }
        }
        let kernel_ns = like.is_some().then(|| median(&kernel_ns));
        Ok(Floor { empty_ns: median(&empty_ns), kernel_ns, kernel: like })
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
