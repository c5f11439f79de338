//! The messages of agents, as a source like any other.

use crate::cluster::{Moment, Reader};
use crate::model::{SegmentId, Sink, Source, Update};
use async_nats::Message;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender};
use std::time::Duration;

/// Messages that are read before anything else is done, and bytes of them.
const AT_ONCE: usize = 16_384;
const BYTES_AT_ONCE: usize = 32 << 20;

/// A message, and when it came.
#[derive(Debug)]
pub(super) struct Hearing {
    pub(super) message: Message,
    pub(super) at: Moment,
    /// True where it comes out of the recorder.
    pub(super) recorded: bool,
}

/// The limit of messages that wait to be read.
#[derive(Debug, Default)]
pub(super) struct Room {
    /// Messages for which there was none.
    dropped: AtomicU64,
    /// Bytes that wait.
    waiting: AtomicUsize,
}

impl Room {
    /// Bytes that wait at most.
    const BYTES: usize = 256 << 20;

    /// Hands a message over, or counts that there was no room for it.
    pub(super) fn put(&self, inbox: &SyncSender<Hearing>, hearing: Hearing) {
        let bytes = hearing.message.payload.len();
        let waiting = self.waiting.fetch_add(bytes, Ordering::Relaxed);
        if waiting > Self::BYTES || inbox.try_send(hearing).is_err() {
            self.waiting.fetch_sub(bytes, Ordering::Relaxed);
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// The bus, heard.
#[derive(Debug)]
pub struct Heard {
    inbox: Receiver<Hearing>,
    reader: Reader,
    room: Arc<Room>,
    inspected: Vec<SegmentId>,
    behind: bool,
}

impl Heard {
    /// Hears what comes in; a node that says nothing for so long is silent.
    pub(super) fn new(inbox: Receiver<Hearing>, room: Arc<Room>, silent: Duration) -> Self {
        Heard { inbox, reader: Reader::new(silent), room, inspected: Vec::new(), behind: false }
    }

    /// The nodes that speak, and what was refused.
    pub(super) fn reader(&self) -> &Reader {
        &self.reader
    }

    pub(super) fn reader_mut(&mut self) -> &mut Reader {
        &mut self.reader
    }

    /// Messages for which there was no room.
    pub(super) fn dropped(&self) -> u64 {
        self.room.dropped.load(Ordering::Relaxed)
    }

    /// True when more waited than was read at the last look.
    pub(super) fn is_behind(&self) -> bool {
        self.behind
    }

    /// Processes whose stack is wanted since the last call.
    pub(super) fn take_inspected(&mut self) -> Vec<SegmentId> {
        std::mem::take(&mut self.inspected)
    }
}

impl Source for Heard {
    fn poll(&mut self, now_ns: u64) -> Vec<Update> {
        let mut out = Vec::new();
        self.poll_each(now_ns, &mut |u| out.push(u));
        out
    }

    fn poll_each(&mut self, now_ns: u64, sink: &mut dyn Sink) {
        // What one message says; all together would take more memory than what is made of it.
        let mut out = Vec::new();
        let mut read = 0;
        let mut bytes = 0;
        while read < AT_ONCE && bytes < BYTES_AT_ONCE {
            let Ok(h) = self.inbox.try_recv() else { break };
            read += 1;
            bytes += h.message.payload.len();
            let (subject, payload) = (h.message.subject.as_str(), &h.message.payload);
            self.reader.read(subject, payload, h.at, h.recorded, &mut out);
            out.drain(..).for_each(|u| sink.take(u));
        }
        self.room.waiting.fetch_sub(bytes, Ordering::Relaxed);
        self.behind = read == AT_ONCE || bytes >= BYTES_AT_ONCE;
        self.reader.look(now_ns, &mut out);
        out.into_iter().for_each(|u| sink.take(u));
    }

    fn inspect(&mut self, segment: SegmentId, _now_ns: u64) {
        self.inspected.push(segment);
    }

    fn describe(&self) -> String {
        let nodes = self.reader.nodes();
        let silent = nodes.values().filter(|n| n.silent_ns.is_some()).count();
        match silent {
            0 => format!("{} nodes on the bus", nodes.len()),
            _ => format!("{} nodes on the bus, {silent} of them silent", nodes.len()),
        }
    }
}
