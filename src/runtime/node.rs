//! All that is known on one node, as one source: its segments, and what its samplers read.

use crate::ingest::Segments;
use crate::model::{Reading, SegmentId, Sink, Source, Unread, Update};
use std::sync::mpsc::Receiver;

/// Segments, and readings that come from a thread of their own.
#[derive(Debug)]
pub struct Node {
    /// The segments.
    pub segments: Segments,
    /// Where readings come from, if any do.
    pub readings: Option<Receiver<Vec<Reading>>>,
    /// The readings for somebody who takes them too; absent where nobody does.
    pub kept: Option<Vec<Reading>>,
}

/// Readings that wait for who takes them at most.
const KEPT: usize = 4096;

impl Node {
    /// The readings since the last call, where they are kept.
    pub fn take_readings(&mut self) -> Vec<Reading> {
        self.kept.as_mut().map(std::mem::take).unwrap_or_default()
    }
}

impl Source for Node {
    fn poll(&mut self, now_ns: u64) -> Vec<Update> {
        let mut updates = Vec::new();
        self.poll_each(now_ns, &mut |u| updates.push(u));
        updates
    }

    fn poll_each(&mut self, now_ns: u64, sink: &mut dyn Sink) {
        self.segments.poll_each(now_ns, sink);
        let readings: Vec<Reading> = self.readings.iter().flat_map(|r| r.try_iter().flatten()).collect();
        if let Some(kept) = self.kept.as_mut().filter(|k| k.len() < KEPT) {
            kept.extend(readings.iter().cloned());
        }
        readings.into_iter().for_each(|r| sink.take(Update::Hardware(Box::new(r))));
    }

    fn inspect(&mut self, segment: SegmentId, now_ns: u64) {
        self.segments.inspect(segment, now_ns);
    }

    fn behind(&self) -> Vec<SegmentId> {
        self.segments.behind()
    }

    fn is_searched(&self) -> bool {
        self.segments.is_searched()
    }

    fn searched_ns(&self) -> Option<u64> {
        self.segments.searched_ns()
    }

    fn unread(&self, uid: Option<u32>) -> Vec<Unread> {
        self.segments.unread(uid)
    }

    fn describe(&self) -> String {
        self.segments.describe()
    }
}
