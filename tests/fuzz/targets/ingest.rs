//! Segments as files that their owner changes while they are followed: what the agent reads, judges and tells.

use crate::outputs::Watch;
use ringwatch::ingest::{Place, Segments};
use ringwatch_wire::layout::{MAGIC, Region};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

const GOLDEN: &[&[u8]] = &[
    include_bytes!("../../../plugin/wire/tests/data/segment-v1.bin"),
    include_bytes!("../../../plugin/wire/tests/data/segment-v2.bin"),
];
/// When the agent begins to look, host monotonic ns.
const BEGUN_NS: u64 = 1_000_000_000_000;
/// Bytes of one change: what, where, and a value.
const CHANGE: usize = 11;
/// Looks at one input at most.
const LOOKS: u32 = 8;

/// Bytes that begin as a segment are its file. Of others the first one chooses a good segment, and the rest are changes
/// of it, with looks in between.
pub(super) fn check(bytes: &[u8]) {
    let room = tempfile::Builder::new().prefix("rw-fuzz-").tempdir_in("/dev/shm").unwrap();
    let path = room.path().join("4711-1-1.seg");
    let (whole, changes) = match bytes.split_first() {
        Some((which, changes)) if !bytes.starts_with(&MAGIC.to_le_bytes()) => {
            (GOLDEN[usize::from(*which) % GOLDEN.len()], changes)
        }
        _ => (bytes, &[][..]),
    };
    std::fs::write(&path, whole).unwrap();
    let mut watch = Watch::new(Segments::new(vec![Place::Dir(room.path().to_owned())]));
    let mut now_ns = BEGUN_NS;
    let mut looks = 0;
    watch.step(now_ns);
    for change in changes.chunks_exact(CHANGE) {
        let at = u64::from(u16::from_le_bytes([change[1], change[2]]));
        let value = u64::from_le_bytes(change[3..].try_into().unwrap());
        if change[0] % 8 == 7 && looks < LOOKS {
            looks += 1;
            now_ns = now_ns.saturating_add(value % 20_000_000_000);
            watch.step(now_ns);
        } else {
            apply(&path, change[0] % 8, at, value);
        }
    }
    // What only begins to be read is read at the next look, and what is judged takes time.
    for after_ns in [1_000_000_000, 60_000_000_000] {
        now_ns = now_ns.saturating_add(after_ns);
        watch.step(now_ns);
    }
    watch.write(bytes, now_ns);
}

fn apply(path: &Path, what: u8, at: u64, value: u64) {
    let file = || OpenOptions::new().write(true).open(path).unwrap();
    let put = |file: File, at: u64, value: u64| file.write_all_at(&value.to_le_bytes(), at * 8).unwrap();
    let words = GOLDEN[0].len() as u64 / 8;
    match what {
        // Any word; the same with a value that is a small one, a stamp of a small ticket, or a mark.
        0..=2 => put(file(), at % words, value),
        3 => put(file(), at % words, value % 1024),
        4 => put(file(), at % words, ((value % 64 + 1) << 16) | ((value >> 32) % 16)),
        5 => {
            let region = Region::ALL[(at % 5) as usize];
            put(file(), region.next() as u64, value);
        }
        _ => file().set_len(at * 8).unwrap(),
    }
}
