//! The file in which an agent keeps its findings, as a crash may leave it.

use ringwatch::model::Finding;
use ringwatch::runtime::agent::finding_store::{FILE, FindingStore, parse};
use std::collections::BTreeSet;

const BOOT: &str = "9f3c1d2e-0000-4000-8000-000000000001";
/// Findings that are kept.
const FINDINGS_MAX: usize = 1024;

pub(super) fn check(bytes: &[u8]) {
    let Ok(kept) = parse(bytes, BOOT) else { return };
    let lines = bytes.split(|b| *b == b'\n').filter(|l| !l.is_empty()).count();
    assert!(kept.findings.len() <= FINDINGS_MAX && kept.findings.len() + kept.skipped as usize <= lines);
    let ids: BTreeSet<_> = kept.findings.iter().map(|f| f.id).collect();
    assert_eq!(ids.len(), kept.findings.len(), "one of each");
    let other = parse(bytes, "another boot").expect("the same file");
    assert!(other.findings.iter().all(|f| !f.open), "nobody watched how they ended");
    if kept.findings.is_empty() {
        return;
    }
    let room = tempfile::Builder::new().prefix("rw-fuzz-").tempdir_in("/dev/shm").unwrap();
    let (mut store, _) = FindingStore::open(room.path(), BOOT.to_owned()).unwrap();
    store.rewrite(&kept.findings).unwrap();
    let written = std::fs::read(room.path().join(FILE)).unwrap();
    let again = parse(&written, BOOT).expect("what was written is read");
    assert_eq!((again.findings.as_slice(), again.skipped), (kept.findings.as_slice(), 0));
    damaged(&written, bytes, &kept.findings);
}

/// Of a file that was cut, or has zeros where a block was not written, some findings are left, and no others.
fn damaged(written: &[u8], choice: &[u8], all: &[Finding]) {
    for n in choice.chunks(8).rev().take(4) {
        let n = n.iter().fold(0usize, |n, b| n << 8 | usize::from(*b));
        let (from, length) = (n % (written.len() + 1), n >> 16 & 0xfff);
        let mut zeroed = written.to_vec();
        let to = (from + length).min(zeroed.len());
        zeroed[from..to].fill(0);
        for file in [&written[..from], &zeroed] {
            let left = parse(file, BOOT).map(|kept| kept.findings).unwrap_or_default();
            let is_one = |f: &Finding| all.contains(f);
            assert!(left.iter().all(is_one), "a finding that nobody wrote, cut at {from}");
        }
    }
}
