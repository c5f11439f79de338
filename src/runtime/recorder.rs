//! Records what a monitor sees.

use super::Monitor;
use crate::cluster::{Moment, Publisher};
use crate::join::Sampling;
use crate::model::{FindingEvent, Source};
use crate::recording::{Limits, Writer};
use std::io;
use std::path::Path;

/// A recording of one monitor. It holds what the monitor's agent would publish if it had no budget.
#[derive(Debug)]
pub struct Recorder {
    publisher: Publisher,
    /// Absent once it could not write.
    writer: Option<Writer>,
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
        let writer = Some(Writer::create(dir, limits)?);
        monitor.keep_finished();
        monitor.sample(Some(Sampling { is_everything: true, ..Sampling::default() }));
        Ok(Recorder { publisher: Publisher::new(node, now.unix_ns, 1).of_everything(), writer })
    }

    /// Records what the monitor's last step took in, and the changes of findings that the step returned.
    ///
    /// # Errors
    /// It cannot be written. Nothing is recorded from then on, and what was written stays.
    pub fn record<S: Source>(
        &mut self,
        monitor: &mut Monitor<S>,
        events: &[FindingEvent],
        now: Moment,
    ) -> io::Result<()> {
        let finished = monitor.take_finished();
        let Some(writer) = &mut self.writer else { return Ok(()) };
        let messages = self.publisher.look(monitor.join(), &finished, &[], now);
        let result = writer.take(now, messages, events);
        match result {
            Ok(true) => self.publisher.refresh(),
            Ok(false) => {}
            Err(_) => self.writer = None,
        }
        result.map(|_| ())
    }

    /// Closes the recording.
    ///
    /// # Errors
    /// The last part is not a block: it stays as a log, which can be read.
    pub fn end(self) -> io::Result<()> {
        self.writer.map_or(Ok(()), Writer::end)
    }
}
