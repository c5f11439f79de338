//! Records what a monitor sees.

use super::Monitor;
use crate::cluster::{Moment, Outgoing, Publisher};
use crate::join::Sampling;
use crate::model::{FindingEvent, Source};
use crate::recording::{Limits, Writer};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// Steps that wait for the disk at most. What comes then is lost, and the recording says so.
const WAITING_MAX: usize = 256;
/// How long the end of a recording waits for the disk.
const END_MAX: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(10);

/// What a step reported.
#[derive(Debug)]
struct Step {
    at: Moment,
    messages: Vec<Outgoing>,
    events: Vec<FindingEvent>,
}

/// A recording of one monitor. It holds what the monitor's agent would publish if it had no budget. A thread of its own writes, so that a
/// slow disk keeps nobody waiting.
#[derive(Debug)]
pub struct Recorder {
    publisher: Publisher,
    steps: Option<SyncSender<Step>>,
    thread: Option<JoinHandle<io::Result<()>>>,
    /// What is sent only when it changes has to be sent again.
    is_refresh_due: Arc<AtomicBool>,
}

impl Recorder {
    /// Begins a recording of what this monitor takes from now on.
    ///
    /// # Errors
    /// The directory cannot be made, or is not empty.
    pub fn begin<S: Source>(
        monitor: &mut Monitor<S>,
        dir: &Path,
        node: &str,
        limits: Limits,
        now: Moment,
    ) -> io::Result<Self> {
        let writer = Writer::create(dir, limits)?;
        let (steps, received) = sync_channel(WAITING_MAX);
        let is_refresh_due = Arc::new(AtomicBool::new(false));
        let due = Arc::clone(&is_refresh_due);
        let thread = std::thread::Builder::new().name("recording".to_owned());
        let thread = Some(thread.spawn(move || write(writer, &received, &due))?);
        monitor.keep_finished();
        monitor.sample(Some(Sampling { is_everything: true, ..Sampling::default() }));
        let publisher = Publisher::new(node, now.unix_ns, 1).of_everything();
        Ok(Recorder { publisher, steps: Some(steps), thread, is_refresh_due })
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
        let Some(steps) = &self.steps else { return Ok(()) };
        if self.is_refresh_due.swap(false, Ordering::Relaxed) {
            self.publisher.refresh();
        }
        let messages = self.publisher.look(monitor.join(), &finished, &[], now);
        if messages.is_empty() && events.is_empty() {
            return Ok(());
        }
        match steps.try_send(Step { at: now, messages, events }) {
            Ok(()) => Ok(()),
            // The messages' numbers have a gap there, which a reader counts.
            Err(TrySendError::Full(_)) => {
                self.is_refresh_due.store(true, Ordering::Relaxed);
                Ok(())
            }
            Err(TrySendError::Disconnected(_)) => {
                self.steps = None;
                self.thread.take().map_or(Ok(()), ended)
            }
        }
    }

    /// Closes the recording, and waits some seconds for the disk.
    ///
    /// # Errors
    /// It cannot be written, or that takes too long: what is in the log can be read.
    pub fn end(mut self) -> io::Result<()> {
        drop(self.steps.take());
        let Some(thread) = self.thread.take() else { return Ok(()) };
        let mut waited = Duration::ZERO;
        while !thread.is_finished() {
            if waited >= END_MAX {
                let why = format!("the disk has not taken it within {} s", END_MAX.as_secs());
                return Err(io::Error::new(io::ErrorKind::TimedOut, why));
            }
            std::thread::sleep(LOOK);
            waited += LOOK;
        }
        ended(thread)
    }
}

/// Writes steps until there are no more.
fn write(mut writer: Writer, steps: &Receiver<Step>, is_refresh_due: &AtomicBool) -> io::Result<()> {
    while let Ok(Step { at, messages, events }) = steps.recv() {
        if writer.take(at, messages, &events)? {
            is_refresh_due.store(true, Ordering::Relaxed);
        }
    }
    writer.end()
}

fn ended(thread: JoinHandle<io::Result<()>>) -> io::Result<()> {
    thread.join().unwrap_or_else(|_| Err(io::Error::other("a bug in ringwatch")))
}
