//! Recordings of what samplers read, which a user names and an agent plays.

use crate::outputs::{TEXT_MAX, Watch};
use crate::plain;
use ringwatch::ingest::hardware::{Recorded, Recorder, RecordingError};
use ringwatch::model::{Source, Update};

/// Any time after the recording's length.
const LATER_NS: u64 = 1_000_000_000_000;

/// A recording as a source.
#[derive(Debug)]
struct Played(Recorded);

impl Source for Played {
    fn poll(&mut self, now_ns: u64) -> Vec<Update> {
        self.0.due(now_ns).into_iter().map(|r| Update::Hardware(Box::new(r))).collect()
    }

    fn describe(&self) -> String {
        "a recording".to_owned()
    }
}

pub(super) fn check(bytes: &[u8]) {
    let mut recorded = match Recorded::read(bytes, "day.jsonl") {
        Ok(recorded) => recorded,
        Err(e) => {
            assert!(matches!(e, RecordingError::BadLine { .. } | RecordingError::Unreadable { .. }));
            return plain::text("the error", &e.to_string(), TEXT_MAX);
        }
    };
    recorded.due(0);
    let all = recorded.due(u64::MAX);
    let mut written = Vec::new();
    Recorder::new(&mut written).write(&all).unwrap();
    let mut again = Recorded::read(&*written, "day.jsonl").expect("what was written is read");
    let mut watch = Watch::new(Played(Recorded::read(bytes, "day.jsonl").unwrap()));
    assert_eq!(again.due(0).len() + again.due(u64::MAX).len(), all.len(), "every reading comes again");
    for now_ns in [LATER_NS, LATER_NS + 1_000_000_000, u64::MAX / 2] {
        watch.step(now_ns);
    }
    watch.write(bytes, u64::MAX / 2);
}
