//! Findings on disk, so that a restarted agent knows what its predecessor found.
//!
//! One file of JSON lines: a head that names its version, then a line for each change, with the finding as it was then;
//! of a finding the last line counts. What does not fit into memory or is too old is left out when the file is rewritten.
//! A line that was cut by a crash, or that a newer release wrote, is skipped and counted.

use crate::detect::most_recent;
use crate::model::{CloseReason, Finding, FindingEvent, FindingId, TimedFinding};
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, BufWriter, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The version of the file.
pub const VERSION: u32 = 1;
/// The file's name in its directory.
pub const FILE: &str = "findings.jsonl";
/// The file is rewritten when it is longer, in bytes; one that is twice as long is read no further.
const BYTES_MAX: u64 = 8 << 20;
/// Findings that are kept on disk.
const FINDINGS_MAX: usize = 1024;

/// The pause before a write that failed is tried again.
const AGAIN: Duration = Duration::from_secs(10);

#[derive(Debug, Serialize, Deserialize)]
struct Head {
    ringwatch: String,
    version: u32,
}

#[derive(Debug, Serialize, Deserialize)]
struct Line<F> {
    /// The boot whose monotonic clock the finding's times are of.
    boot: String,
    #[serde(flatten)]
    finding: TimedFinding<F>,
}

/// The content of a file.
#[derive(Debug, Default)]
pub struct Kept {
    /// The findings, each as it was last.
    pub findings: Vec<Finding>,
    /// Lines that were no findings.
    pub skipped: u64,
}

/// Reads what a file holds, written by whatever release and however it ends. Findings of another boot are closed, as
/// nobody watched how they ended.
///
/// # Errors
/// The file is of a newer version.
pub fn parse(bytes: &[u8], boot: &str) -> io::Result<Kept> {
    let mut lines = bytes.split(|b| *b == b'\n').filter(|l| !l.is_empty());
    let mut kept = Kept::default();
    match lines.next().map(serde_json::from_slice::<Head>) {
        None => return Ok(kept),
        Some(Ok(head)) if head.ringwatch == "findings" && head.version <= VERSION => {}
        Some(Ok(head)) => {
            let why = format!("version {}, and this release reads up to {VERSION}", head.version);
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        Some(Err(e)) => return Err(io::Error::new(io::ErrorKind::InvalidData, format!("no findings: {e}"))),
    }
    let mut found: BTreeMap<FindingId, Finding> = BTreeMap::new();
    for line in lines {
        let Ok(line) = serde_json::from_slice::<Line<Finding>>(line) else {
            kept.skipped += 1;
            continue;
        };
        let mut f = line.finding.whole();
        if line.boot != boot {
            (f.since_ns, f.first_seen_ns, f.last_seen_ns, f.closed_ns) = (0, 0, 0, 0);
            if std::mem::take(&mut f.open) {
                f.close_reason = Some(CloseReason::Unobserved);
                f.closed_at.clone_from(&f.last_seen);
            }
        }
        found.insert(f.id, f);
        if found.len() > 4 * FINDINGS_MAX {
            found = most_recent(found.into_values().collect(), FINDINGS_MAX, FINDINGS_MAX)
                .into_iter()
                .map(|f| (f.id, f))
                .collect();
        }
    }
    kept.findings = most_recent(found.into_values().collect(), FINDINGS_MAX, FINDINGS_MAX);
    Ok(kept)
}

/// The file of an agent that runs.
#[derive(Debug)]
pub struct FindingStore {
    path: PathBuf,
    boot: String,
    /// Locked: two agents would write over each other.
    _directory: File,
    file: File,
    bytes: u64,
    /// A write has failed: the file is rewritten, and when that is tried next.
    broken: Option<Instant>,
}

impl FindingStore {
    /// Opens the file in a directory, which is made if need be, and reads what is in it.
    ///
    /// # Errors
    /// It cannot be read or written, or is of a newer release: then it is left as it is.
    pub fn open(directory: &Path, boot: String) -> io::Result<(Self, Kept)> {
        DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        let lock = File::open(directory)?;
        if rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Err(io::Error::other("another agent keeps its findings there"));
        }
        let path = directory.join(FILE);
        let mut bytes = Vec::new();
        match options().read(true).open(&path) {
            Ok(file) => drop(file.take(2 * BYTES_MAX).read_to_end(&mut bytes)?),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(e),
        }
        let kept = parse(&bytes, &boot)?;
        let file = options().append(true).create(true).open(&path)?;
        let mut store = FindingStore { path, boot, _directory: lock, file, bytes: 0, broken: None };
        store.rewrite(&kept.findings)?;
        Ok((store, kept))
    }

    /// Appends changes; `all` are the findings as they are, for when the file has become too long.
    ///
    /// # Errors
    /// The first write that fails, and the first one that succeeds again is none: nothing is lost that is still known.
    pub fn record(&mut self, events: &[FindingEvent], all: impl FnOnce() -> Vec<Finding>) -> io::Result<()> {
        match self.broken {
            // It was reported when it broke.
            Some(again) if Instant::now() < again => return Ok(()),
            Some(_) => return self.rewrite(&all()).or(Ok(())),
            None if events.is_empty() => return Ok(()),
            None if self.bytes > BYTES_MAX => return self.rewrite(&all()),
            None => {}
        }
        let mut text = Vec::new();
        for e in events {
            self.line(&mut text, &e.finding)?;
        }
        let written = self.file.write_all(&text);
        if written.is_err() {
            self.broken = Some(Instant::now() + AGAIN);
        }
        self.bytes += text.len() as u64;
        written
    }

    fn line(&self, text: &mut Vec<u8>, finding: &Finding) -> io::Result<()> {
        let line = Line { boot: self.boot.clone(), finding: TimedFinding::of(finding) };
        serde_json::to_writer(&mut *text, &line)?;
        text.push(b'\n');
        Ok(())
    }

    /// Writes the file anew, beside the old one until it is whole.
    ///
    /// # Errors
    /// The old one is still there then.
    pub fn rewrite(&mut self, findings: &[Finding]) -> io::Result<()> {
        self.broken = Some(Instant::now() + AGAIN);
        let mut text = serde_json::to_vec(&Head { ringwatch: "findings".to_owned(), version: VERSION })?;
        text.push(b'\n');
        for f in most_recent(findings.to_vec(), FINDINGS_MAX, FINDINGS_MAX) {
            self.line(&mut text, &f)?;
        }
        let new = self.path.with_extension("new");
        let mut file = BufWriter::new(options().write(true).create(true).truncate(true).open(&new)?);
        file.write_all(&text)?;
        file.into_inner().map_err(io::IntoInnerError::into_error)?.sync_data()?;
        std::fs::rename(&new, &self.path)?;
        self.file = options().append(true).open(&self.path)?;
        (self.bytes, self.broken) = (text.len() as u64, None);
        Ok(())
    }
}

/// For its owner alone: findings name jobs of all users.
fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.mode(0o600).custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC);
    options
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Change, CommId, Kind, OperationRef, Rank, Track};

    fn finding(order: u64, open: bool) -> Finding {
        let operation = OperationRef::named("AllReduce", Track::Collective, order);
        Finding {
            open,
            since_ns: 7,
            closed_at: (!open).then(|| format!("2026-11-22T10:00:{:02}Z", order % 60)),
            ..Finding::new(Kind::MissingRank, CommId::new(9, Some(1000)), vec![Rank(3)], operation)
        }
    }

    fn event(f: &Finding) -> FindingEvent {
        FindingEvent { change: Change::Opened, finding: f.clone() }
    }

    fn open(dir: &Path, boot: &str) -> (FindingStore, Vec<Finding>) {
        let (store, kept) = FindingStore::open(dir, boot.to_owned()).expect("opens");
        (store, kept.findings)
    }

    #[test]
    fn what_was_written_is_there_after_a_restart_and_a_cut_line_costs_itself_alone() {
        let dir = tempfile::tempdir().expect("a directory");
        let (mut store, kept) = open(dir.path(), "boot");
        assert_eq!(kept, []);
        let (a, b) = (finding(1, true), finding(2, true));
        store.record(&[event(&a), event(&b)], Vec::new).expect("written");
        let over = Finding { open: false, closed_at: Some("2026-11-22T11:00:00Z".into()), ..b.clone() };
        store.record(&[event(&over)], Vec::new).expect("written");
        store.file.write_all(b"{\"boot\":\"boot\",\"find").expect("written");
        FindingStore::open(dir.path(), "boot".to_owned()).expect_err("another agent is there");
        drop(store);
        let (_, kept) = FindingStore::open(dir.path(), "boot".to_owned()).expect("opens");
        assert_eq!((kept.findings, kept.skipped), (vec![a, over], 1));
    }

    #[test]
    fn a_file_cut_anywhere_is_read_up_to_there() {
        let dir = tempfile::tempdir().expect("a directory");
        let (mut store, _) = open(dir.path(), "boot");
        store.record(&[event(&finding(1, true)), event(&finding(2, true))], Vec::new).expect("written");
        let whole = std::fs::read(dir.path().join(FILE)).expect("read");
        let ends: Vec<usize> = (0..whole.len()).filter(|i| whole[*i] == b'\n').collect();
        for cut in ends[0]..whole.len() {
            let kept = parse(&whole[..cut], "boot").expect("read");
            let lines = ends.iter().filter(|e| **e <= cut).count() - 1;
            assert_eq!(kept.findings.len(), lines, "cut at {cut}");
        }
    }

    #[test]
    fn what_was_open_before_another_boot_is_closed() {
        let dir = tempfile::tempdir().expect("a directory");
        let (mut store, _) = open(dir.path(), "before");
        store.record(&[event(&finding(1, true))], Vec::new).expect("written");
        drop(store);
        let (_, kept) = open(dir.path(), "after");
        assert_eq!((kept[0].open, kept[0].close_reason), (false, Some(CloseReason::Unobserved)));
        assert_eq!(kept[0].since_ns, 0, "that clock is not ours");
    }

    #[test]
    fn a_full_disk_is_told_once_and_made_up_for() {
        let dir = tempfile::tempdir().expect("a directory");
        let (mut store, _) = open(dir.path(), "boot");
        store.file = OpenOptions::new().append(true).open("/dev/full").expect("opens");
        let (a, b) = (finding(1, true), finding(2, true));
        store.record(&[event(&a)], Vec::new).expect_err("the disk is full");
        store.record(&[event(&b)], || unreachable!("it is not tried again at once")).expect("said already");
        store.broken = Some(Instant::now());
        store.record(&[], || vec![a.clone(), b.clone()]).expect("written");
        drop(store);
        let (_, kept) = open(dir.path(), "boot");
        assert_eq!(kept.len(), 2);
    }

    #[test]
    fn the_file_stays_bounded_and_is_its_owners_alone() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().expect("a directory");
        let (mut store, _) = open(dir.path(), "boot");
        let all: Vec<Finding> = (0..2000).map(|n| finding(n, n < 10)).collect();
        for f in all.iter().cycle().take(20_000) {
            store.record(&[event(f)], || all.clone()).expect("written");
        }
        let meta = std::fs::metadata(dir.path().join(FILE)).expect("there");
        assert!(meta.len() <= BYTES_MAX + 4096 && meta.permissions().mode() & 0o777 == 0o600);
        drop(store);
        let (_, kept) = open(dir.path(), "boot");
        assert_eq!((kept.len(), kept.iter().filter(|f| f.open).count()), (FINDINGS_MAX, 10));
    }

    #[test]
    fn a_file_of_a_newer_release_is_left_alone() {
        let dir = tempfile::tempdir().expect("a directory");
        for text in ["{\"ringwatch\":\"findings\",\"version\":99}\n", "hello\n"] {
            std::fs::write(dir.path().join(FILE), text).expect("written");
            FindingStore::open(dir.path(), "boot".to_owned()).expect_err("refused");
            assert_eq!(std::fs::read_to_string(dir.path().join(FILE)).expect("read"), text);
        }
    }
}
