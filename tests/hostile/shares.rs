//! One user's segments, however much there is to read of them, take a share of the agent's time.

#![expect(unsafe_code, reason = "maps files")]

use super::forged::{Forged, Writer};
use super::ground::{ATTACKER, Ground};
use super::unread::followed;
use crate::support::agent::diagnosed;
use crate::support::{Play, Players, as_user, findings, ranks, until};
use ringwatch_wire::layout::{Geometry, Region};
use rustix::mm::{MapFlags, ProtFlags};
use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// As many as a user may have, nearly. They take 500 MB.
const BUSY: usize = 400;
/// The longest that a question may wait while the attacker's segments are read.
const ANSWER_MAX: Duration = Duration::from_millis(200);

/// The words of a file, shared.
fn words(path: &Path) -> &'static [AtomicU64] {
    std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).expect("root may");
    let file = File::options().read(true).write(true).open(path).expect("root may");
    let bytes = usize::try_from(file.metadata().expect("open").len()).expect("a length");
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping wherever the kernel likes, which is never taken back; its words are atomics.
    unsafe {
        let at = rustix::mm::mmap(std::ptr::null_mut(), bytes, access, MapFlags::SHARED, &file, 0);
        std::slice::from_raw_parts(at.expect("mapped").cast(), bytes / 8)
    }
}

#[test]
fn one_users_busy_segments_delay_nobody_elses() {
    let Some(ground) = Ground::of("one_users_busy_segments_delay_nobody_elses") else { return };
    let directory = ground.directory("of-attacker", ATTACKER);
    let of_root = ground.directory("of-root", 0);
    let idle = ground.idle(ATTACKER);
    let geometry = Geometry::new([2, 11, 9, 14, 11]);
    let writer = Writer::running(idle.0.id());
    let segments: Vec<_> =
        (0..BUSY).map(|_| as_user(ATTACKER, || Forged::new(geometry, writer).put(&directory))).collect();
    let segments: Vec<_> = segments.iter().map(|path| words(path)).collect();
    let agent = ground.agent(&[&directory, &of_root], "");
    until("all are followed", || (followed(&agent) >= BUSY as f64).then_some(()));
    let is_over = AtomicBool::new(false);
    std::thread::scope(|s| {
        s.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                for segment in &segments {
                    for region in [Region::Op, Region::Group, Region::Channel, Region::Proxy] {
                        let next = segment.get(region.next()).expect("a header");
                        next.fetch_add(1 << geometry.shift(region), Ordering::Relaxed);
                    }
                }
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        let _stops = Stops(&is_over);
        let place = [("RINGWATCH_DIR", of_root.as_os_str())];
        let _players = Players::start_with(&ground.room, Play::of("missing-rank").hold(120), &place);
        until("root's finding", || {
            findings(&diagnosed(&ground.room)).iter().any(|f| ranks(f) == [3]).then_some(())
        });
        let mut longest: Vec<Duration> = (0..40)
            .map(|_| {
                let began = Instant::now();
                assert_eq!(agent.get("/metrics").0, 200);
                let took = began.elapsed();
                // The next one comes in another part of a look.
                std::thread::sleep(Duration::from_millis(130));
                took
            })
            .collect();
        longest.sort();
        // The machine may delay one of them.
        assert!(longest.iter().rev().nth(1).is_some_and(|t| *t < ANSWER_MAX), "{longest:?}");
    });
    ground.assert_memory_held();
}

/// Ends a loop, also where the test fails.
struct Stops<'a>(&'a AtomicBool);

impl Drop for Stops<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
