//! Records what a monitor sees.

use super::Monitor;
use crate::cluster::{Moment, Outgoing, Publisher};
use crate::join::{Join, Sampling};
use crate::model::{FindingEvent, Source};
use crate::recording::Writer;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// Steps, and bytes of them, that wait for the disk at most. What comes then is lost, and counted.
const WAITING_MAX: usize = 256;
const BYTES_MAX: usize = 32 << 20;
/// The time that the end of a recording waits for the disk.
const END_MAX: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(10);

/// The messages and findings of a step.
#[derive(Debug)]
struct Step {
    at: Moment,
    messages: Vec<Outgoing>,
    events: Vec<FindingEvent>,
}

impl Step {
    fn is_something(&self) -> bool {
        !self.messages.is_empty() || !self.events.is_empty()
    }

    fn bytes(&self) -> usize {
        self.messages.iter().map(|m| m.bytes.len()).sum()
    }
}

/// A recording of one monitor. It holds what the monitor's agent would publish if it had no budget. A thread of its own writes, so that a
/// slow disk keeps nobody waiting.
#[derive(Debug)]
pub struct Recorder {
    publisher: Publisher,
    steps: Option<SyncSender<Step>>,
    thread: Option<JoinHandle<io::Result<()>>>,
    shared: Arc<Shared>,
    /// Operations and findings of steps for which there was no room.
    lost: u64,
}

/// The state that the recorder and its thread share.
#[derive(Debug, Default)]
struct Shared {
    /// Messages that are sent only on a change are due again.
    is_refresh_due: AtomicBool,
    /// Bytes that wait for the disk.
    waiting: AtomicUsize,
}

impl Recorder {
    /// Begins a recording of what this monitor takes from now on. `open` makes its files on the thread that writes.
    ///
    /// # Errors
    /// There is no thread to be had.
    pub fn begin<S: Source>(
        monitor: &mut Monitor<S>,
        node: &str,
        now: Moment,
        open: impl FnOnce() -> io::Result<Writer> + Send + 'static,
    ) -> io::Result<Self> {
        let (steps, received) = sync_channel(WAITING_MAX);
        let shared = Arc::new(Shared::default());
        let of_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("recording".to_owned());
        let thread = thread.spawn(move || write(open()?, &received, &of_thread))?;
        monitor.keep_finished();
        monitor.sample(Some(Sampling { is_everything: true, ..Sampling::default() }));
        let publisher = Publisher::new(node, now.unix_ns, 1).of_everything();
        Ok(Recorder { publisher, steps: Some(steps), thread: Some(thread), shared, lost: 0 })
    }

    /// Records what the monitor's last step took in, and the changes of findings that the step returned. Waits for nothing.
    ///
    /// # Errors
    /// It cannot be written. Nothing is recorded from then on, and what was written stays.
    pub fn record<S: Source>(
        &mut self,
        monitor: &mut Monitor<S>,
        events: Vec<FindingEvent>,
        now: Moment,
    ) -> io::Result<()> {
        let finished = monitor.take_finished();
        if self.steps.is_none() {
            return Ok(());
        }
        if self.shared.is_refresh_due.swap(false, Ordering::Relaxed) {
            self.publisher.refresh();
        }
        if FindingEvent::opened(&events).next().is_some() {
            // What a finding rests on is recorded with it: the job may be killed at once.
            self.publisher.tell_all_open(monitor.join(), now.mono_ns);
        }
        let messages = self.publisher.look(monitor.join(), &finished, &[], now);
        self.send(Step { at: now, messages, events })
    }

    fn send(&mut self, step: Step) -> io::Result<()> {
        let Some(steps) = self.steps.as_ref().filter(|_| step.is_something()) else { return Ok(()) };
        let bytes = step.bytes();
        if self.shared.waiting.fetch_add(bytes, Ordering::Relaxed) > BYTES_MAX {
            self.lose(&step);
            return Ok(());
        }
        match steps.try_send(step) {
            Ok(()) => Ok(()),
            Err(TrySendError::Full(step)) => {
                self.lose(&step);
                Ok(())
            }
            Err(TrySendError::Disconnected(_)) => {
                self.steps = None;
                self.thread.take().map_or(Ok(()), ended)
            }
        }
    }

    /// Counts a step for which there is no room. A reader sees it as a gap in the numbers of messages.
    fn lose(&mut self, step: &Step) {
        self.shared.waiting.fetch_sub(step.bytes(), Ordering::Relaxed);
        self.shared.is_refresh_due.store(true, Ordering::Relaxed);
        let operations: u64 = step.messages.iter().map(|m| m.operations).sum();
        self.lost += operations + step.events.len() as u64;
    }

    /// Operations and findings that are not in the recording, since the disk did not take them in time.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// Records what is in flight, closes the recording, and waits some seconds for the disk.
    ///
    /// # Errors
    /// It cannot be written, or that takes too long: what is in the log can be read.
    pub fn end(mut self, join: &Join, now: Moment) -> io::Result<()> {
        let messages = self.publisher.last_of(join, now);
        self.send(Step { at: now, messages, events: Vec::new() })?;
        drop(self.steps.take());
        let Some(thread) = self.thread.take() else { return Ok(()) };
        let mut waited = Duration::ZERO;
        while !thread.is_finished() {
            if waited >= END_MAX {
                let why = format!("the disk has not taken it within {} s", END_MAX.as_secs());
                return Err(io::Error::new(io::ErrorKind::TimedOut, why));
            }
            std::thread::sleep(POLL);
            waited += POLL;
        }
        ended(thread)
    }
}

/// Writes steps until there are no more.
fn write(mut writer: Writer, steps: &Receiver<Step>, shared: &Shared) -> io::Result<()> {
    while let Ok(step) = steps.recv() {
        shared.waiting.fetch_sub(step.bytes(), Ordering::Relaxed);
        let Step { at, messages, events } = step;
        if writer.take(at, messages, &events)? {
            shared.is_refresh_due.store(true, Ordering::Relaxed);
        }
    }
    writer.end()
}

fn ended(thread: JoinHandle<io::Result<()>>) -> io::Result<()> {
    thread.join().unwrap_or_else(|_| Err(io::Error::other("a bug in ringwatch")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::detect::Settings;
    use crate::join::testing::{all_reduce, member, process};
    use crate::model::{Kind, Update};
    use crate::recording::{Limits, Playback};

    const S: u64 = 1_000_000_000;

    /// Gives some updates once.
    #[derive(Debug)]
    struct Once(Vec<Update>);

    impl Source for Once {
        fn poll(&mut self, _: u64) -> Vec<Update> {
            std::mem::take(&mut self.0)
        }

        fn describe(&self) -> String {
            "a test".to_owned()
        }
    }

    fn kinds<T: Source>(monitor: &Monitor<T>) -> Vec<Kind> {
        monitor.findings().into_iter().map(|f| f.kind).collect()
    }

    /// Jobs and their observers are killed at any moment: the operations of a finding may not come later than itself.
    #[test]
    fn what_a_finding_rests_on_is_recorded_at_once() {
        let mut updates = Vec::new();
        for rank in 0..2 {
            updates.extend([process(rank), member(rank, 2, 4)]);
            let op = |order| all_reduce(rank, order, S + order * 1_000, None);
            updates.extend((0..4).map(op).map(|mut op| {
                op.count += u64::from(op.order == Some(3) && rank == 1);
                Update::Op(Box::new(op))
            }));
        }
        let place = tempfile::tempdir().unwrap();
        let dir = place.path().join("recording");
        let mut monitor = Monitor::new(Once(updates), Settings::default()).following_live();
        let at = Moment { mono_ns: S + 10_000_000, unix_ns: 1_790_000_000 * S };
        let to = dir.clone();
        let mut recorder =
            Recorder::begin(&mut monitor, "node", at, move || Writer::create(&to, Limits::default()))
                .unwrap();
        let events = monitor.step(at.mono_ns);
        assert_eq!(kinds(&monitor), [Kind::Mismatch]);
        recorder.record(&mut monitor, events, at).unwrap();

        let replayed = || {
            let mut monitor = Monitor::new(Playback::open(&dir).ok()?, Settings::default());
            monitor.step(at.mono_ns);
            Some(kinds(&monitor)).filter(|k| !k.is_empty())
        };
        let until = std::time::Instant::now() + Duration::from_secs(20);
        let mut found = None;
        while found.is_none() && std::time::Instant::now() < until {
            std::thread::sleep(POLL);
            found = replayed();
        }
        assert_eq!(found, Some(vec![Kind::Mismatch]), "the recording has not ended");
    }
}
