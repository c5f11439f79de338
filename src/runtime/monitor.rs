//! The one owner of a node's state.

use crate::detect::{Baseline, Detector, Settings};
use crate::join::{Join, View};
use crate::model::{Finding, Snapshot, Source};

/// A source, what it said so far, and what is wrong.
#[derive(Debug)]
pub struct Monitor<S> {
    source: S,
    join: Join,
    detector: Detector,
    judging: bool,
}

impl<S: Source> Monitor<S> {
    /// Watches a source.
    pub fn new(source: S, settings: Settings) -> Self {
        Monitor { source, join: Join::new(), detector: Detector::new(settings), judging: true }
    }

    /// Judges transfers by what benchmarks said as well.
    #[must_use]
    pub fn with_baselines(mut self, baselines: Vec<Baseline>) -> Self {
        self.detector.set_baselines(baselines);
        self
    }

    /// Takes in what is new and asks the rules. Returns the findings that are new.
    pub fn step(&mut self, now_ns: u64) -> Vec<Finding> {
        for update in self.source.poll(now_ns) {
            self.join.feed(update);
        }
        self.join.tick(now_ns);
        if !self.judging {
            return Vec::new();
        }
        let new = self.detector.check(&self.join, now_ns);
        // Whoever holds up others is asked where it is; its answer becomes evidence of the finding.
        for finding in new.iter().filter(|f| f.kind.is_hang()) {
            let Some(comm) = self.join.communicator(finding.communicator) else { continue };
            for rank in &finding.ranks {
                if let Some(member) = comm.members().get(rank) {
                    self.source.inspect(member.record.segment, now_ns);
                }
            }
        }
        new
    }

    /// From now on only takes in; what was found stays as it is.
    pub fn stop_judging(&mut self) {
        self.judging = false;
    }

    /// The source.
    pub fn source(&self) -> &S {
        &self.source
    }

    /// The source, to be told something.
    pub fn source_mut(&mut self) -> &mut S {
        &mut self.source
    }

    /// What the ranks did.
    pub fn join(&self) -> &Join {
        &self.join
    }

    /// Everything found so far, open findings first.
    pub fn findings(&self) -> Vec<Finding> {
        self.detector.findings()
    }

    /// All of it for a screen.
    pub fn snapshot(&self, now_ns: u64) -> Snapshot {
        let mut s = View::new(&self.join, now_ns).snapshot();
        s.findings = self.findings();
        s.source = self.source.describe();
        s.wall = self.join.unix_ns(now_ns).and_then(|ns| {
            let t = time::OffsetDateTime::from_unix_timestamp_nanos(i128::from(ns)).ok()?;
            Some(format!("{:02}:{:02}:{:02}", t.hour(), t.minute(), t.second()))
        });
        s
    }
}
