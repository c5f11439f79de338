//! A Flight Recorder dump of any bytes, and what the rules make of it.

use crate::plain;
use ringwatch::detect::Settings;
use ringwatch::import::Import;
use ringwatch::runtime::Monitor;
use std::path::Path;

pub(super) fn check(bytes: &[u8]) {
    let import = match Import::of_bytes(Path::new("trace_rank_0"), bytes) {
        Ok(import) => import,
        Err(why) => return plain::text("the error", &why, 4096),
    };
    let now_ns = import.at_ns().saturating_add(10_000_000_000);
    let mut monitor = Monitor::new(import, Settings::default());
    monitor.step(now_ns);
    monitor.source().notes().iter().for_each(|n| plain::text("a note", n, 4096));
    for finding in monitor.findings() {
        for fact in finding.evidence.iter().chain(&monitor.source().evidence(&finding)) {
            plain::text("a fact", &fact.text, 4096);
        }
    }
    for row in monitor.snapshot(now_ns).comms {
        plain::text("a communicator's name", row.name.as_deref().unwrap_or(""), 1024);
    }
}
