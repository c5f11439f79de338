//! From what a search has found to segments that are followed.

use super::mapping::MapError;
use super::pace::Pace;
use super::search::Listing;
use super::segment_file::SegmentFile;
use super::survey::{FileName, Opened, Order};
use super::tail::{Tail, Watch};
use super::{FileId, Segments, shown};
use crate::model::{Liveness, SegmentId, Sink, Unread, UnreadReason, Update};
use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// How often directories are searched.
const SEARCH: Pace = Pace::new(Duration::from_millis(200), 10);
/// A search that takes longer is reported.
const SEARCH_MAX: Duration = Duration::from_secs(10);
/// Files that are opened in one search; the others wait for the next one.
const OPENED_AT_ONCE: usize = 128;
/// Segments of running processes that are followed at once, in all and of one user; more are counted, not read.
const SEGMENTS_MAX: usize = 1024;
const SEGMENTS_OF_USER_MAX: usize = 512;
/// Segments that a user may spoil before no new ones of theirs are read, while these are there: each may have cost memory.
const SPOILT_OF_USER_MAX: usize = 16;
/// Segments that are read to their end and still known.
const DONE_MAX: usize = 1024;

/// How far the search is.
#[derive(Debug, Default)]
pub(super) struct Searching {
    /// The search that goes on: when it began.
    since: Option<(Instant, u64)>,
    /// When the next one begins, host monotonic ns; absent for at once.
    due_ns: Option<u64>,
    /// Time that the search which goes on has taken.
    took: Duration,
    /// The listing has all segments but those that are reported as unread.
    is_listed: bool,
    /// Something is opened in the next search.
    has_backlog: bool,
    /// The last search was complete, and of the places that are searched now.
    is_complete: bool,
    /// Places were changed, or something new is expected, since it began.
    is_stale: bool,
    /// When the last complete search began, host monotonic ns; 0 before there was one.
    complete_ns: u64,
}

impl Searching {
    /// Has the next search begin at once.
    pub(super) fn search_now(&mut self) {
        (self.due_ns, self.is_complete, self.is_stale) = (None, false, self.since.is_some());
    }

    /// True when the next search is to begin.
    pub(super) fn is_due(&self, now_ns: u64) -> bool {
        self.since.is_none() && self.due_ns.is_none_or(|t| now_ns >= t)
    }

    pub(super) fn begin(&mut self, now_ns: u64) {
        self.since = Some((Instant::now(), now_ns));
        (self.took, self.has_backlog) = (Duration::ZERO, false);
    }

    fn end(&mut self) {
        let Some((_, began_ns)) = self.since.take() else { return };
        if std::mem::take(&mut self.is_stale) {
            self.due_ns = None;
            return;
        }
        let pause = u64::try_from(SEARCH.next(self.took).as_nanos()).unwrap_or(u64::MAX);
        self.due_ns = Some(began_ns.saturating_add(pause));
        self.is_complete = self.is_listed && !self.has_backlog;
        if self.is_complete {
            self.complete_ns = began_ns;
        }
    }

    /// When the last complete search began, host monotonic ns; 0 before there was one.
    pub(super) fn complete_ns(&self) -> u64 {
        self.complete_ns
    }

    fn is_late(&self) -> bool {
        self.since.is_some_and(|(began, _)| began.elapsed() >= SEARCH_MAX)
    }

    /// True once everything was searched and opened, or is reported.
    pub(super) fn is_complete(&self) -> bool {
        self.is_complete && !self.is_late()
    }

    /// Reasons why the search itself is incomplete.
    pub(super) fn unread(&self, no_thread: bool) -> Option<Unread> {
        let (reason, detail) = if no_thread {
            (UnreadReason::Limits, "no thread can be had to search; raise the limit of tasks".to_owned())
        } else if self.is_late() {
            let detail = format!("it has not come to its end for more than {} s", SEARCH_MAX.as_secs());
            (UnreadReason::Unresponsive, detail)
        } else {
            return None;
        };
        Some(Unread { path: "the search for segments".to_owned(), reason, detail, owner: None })
    }
}

/// The segments that are followed, with their limits.
#[derive(Debug, Default)]
pub(super) struct Followed {
    alive: usize,
    pub(super) by_owner: HashMap<u32, usize>,
    ids: HashSet<SegmentId>,
    /// Segments that were spoilt, by owner.
    spoilt: HashMap<u32, usize>,
    files: HashSet<FileId>,
}

impl Followed {
    pub(super) fn of<'a>(tails: impl Iterator<Item = &'a Tail>) -> Self {
        let mut all = Followed::default();
        tails.for_each(|t| all.add(t));
        all
    }

    fn add(&mut self, tail: &Tail) {
        self.files.insert(tail.file());
        self.ids.insert(tail.id());
        if tail.is_spoilt() {
            *self.spoilt.entry(tail.owner()).or_default() += 1;
        }
        if tail.liveness() == Liveness::Alive {
            self.alive += 1;
            *self.by_owner.entry(tail.owner()).or_default() += 1;
        }
    }

    /// Returns whether there is room for one more.
    fn accept(&self, tail: &Tail) -> Result<(), MapError> {
        // Of two files that say to be one process only one can be its own.
        if self.ids.contains(&tail.id()) {
            return Err(MapError::Duplicate);
        }
        if self.spoilt.get(&tail.owner()).is_some_and(|n| *n >= SPOILT_OF_USER_MAX) {
            let why = "of this user were spoilt while they were read";
            return Err(MapError::TooMany(SPOILT_OF_USER_MAX, why));
        }
        if tail.liveness() == Liveness::Alive {
            let of = |owner: u32| self.by_owner.get(&owner).copied().unwrap_or(0);
            // Many users may be one person's: root's segments are read whatever they do.
            if tail.owner() != 0 && self.alive - of(0) >= SEGMENTS_MAX {
                return Err(MapError::TooMany(SEGMENTS_MAX, "of running processes"));
            }
            if of(tail.owner()) >= SEGMENTS_OF_USER_MAX {
                return Err(MapError::TooMany(SEGMENTS_OF_USER_MAX, "of running processes of one user"));
            }
        }
        Ok(())
    }
}

impl Segments {
    /// Takes what was listed, and has opened what is new in it.
    pub(super) fn take_listing(&mut self, listing: Listing, took: Duration) {
        self.searching.took += took;
        self.searching.is_listed = listing.is_complete;
        self.unsearched = listing.unread;
        let listed: HashSet<PathBuf> = listing.files.iter().map(FileName::path).collect();
        // Read to its end and removed: its mapping is all that keeps its memory.
        self.tails.retain(|path, t| !t.done() || listed.contains(path));
        self.refused.keep_only(&listed);
        self.passed.retain(|path| listed.contains(path));
        let mut wanted = Vec::new();
        for (path, file) in self.refused.in_order(listing.files.iter()) {
            if self.tails.contains_key(&path) || self.passed.contains(&path) {
                continue;
            }
            if wanted.len() >= OPENED_AT_ONCE {
                self.searching.has_backlog |= self.refused.is_new(&path);
                break;
            }
            wanted.push(file.clone());
        }
        if wanted.is_empty() {
            self.searching.end();
        } else {
            self.survey.order(Order::Open(wanted));
        }
    }

    /// Follows what was opened, as far as there is room for it.
    pub(super) fn take_opened(
        &mut self,
        opened: Vec<(FileName, Opened)>,
        took: Duration,
        now_ns: u64,
        out: &mut dyn Sink,
    ) {
        let began = Instant::now();
        let mut followed = Followed::of(self.tails.values());
        for (file, opened) in opened {
            let path = file.path();
            let (result, owner) = match opened {
                Opened::Segment(segment, fd, end) => {
                    let owner = segment.facts.owner;
                    (self.map(file, &segment, (fd, end), &followed, now_ns), Some(owner))
                }
                Opened::Failed(why, owner) => (Err(why.into()), owner),
                Opened::Unanswered { is_reported } => {
                    self.searching.has_backlog |= !is_reported;
                    continue;
                }
            };
            match result {
                Ok(Some(tail)) => {
                    self.refused.remove(&path);
                    followed.add(&tail);
                    self.follow(path, tail, out);
                }
                Ok(None) => {
                    self.refused.remove(&path);
                    self.passed.insert(path);
                }
                // The next search finds it ready.
                Err(MapError::Opening) => {}
                Err(e) => {
                    let why = Unread { path: shown(&path), reason: e.reason(), detail: e.to_string(), owner };
                    self.refused.insert(path, why, now_ns);
                }
            }
        }
        self.forget_done();
        self.searching.took += took + began.elapsed();
        self.searching.end();
    }

    /// Maps what was opened; nothing where it is of another job, or is followed already.
    fn map(
        &self,
        file: FileName,
        segment: &super::probe::OpenedSegment,
        (fd, end): (OwnedFd, Option<OwnedFd>),
        followed: &Followed,
        now_ns: u64,
    ) -> Result<Option<Tail>, MapError> {
        // One file is reached by several ways through containers' mounts.
        if followed.files.contains(&segment.facts.id) {
            return Ok(None);
        }
        let mapped = SegmentFile::of(file, segment, fd, end)?;
        let wanted = self.job.as_ref().map(|(name, begun)| (name.as_str(), *begun));
        let watch = Watch { since_ns: self.since_ns.unwrap_or(now_ns), now_ns };
        let Some(tail) = Tail::of(mapped, &segment.control_groups, wanted, watch)? else { return Ok(None) };
        followed.accept(&tail)?;
        Ok(Some(tail))
    }

    fn follow(&mut self, path: PathBuf, mut tail: Tail, out: &mut dyn Sink) {
        self.node.iter().for_each(|node| tail.name_host(node));
        if let Some((ends, end)) = self.ends.as_ref().zip(tail.end()) {
            // Where the kernel lacks room for it, its end is seen at the next look.
            ends.watch(end).ok();
        }
        out.take(Update::Segment(tail.record()));
        self.tails.insert(path, tail);
    }

    /// Days of jobs leave segments behind: the oldest that are read to their end are only known as such.
    fn forget_done(&mut self) {
        let mut done: Vec<(u64, PathBuf)> =
            self.tails.iter().filter(|(_, t)| t.done()).map(|(p, t)| (t.created_ns(), p.clone())).collect();
        let surplus = done.len().saturating_sub(DONE_MAX);
        done.sort();
        for (_, path) in done.into_iter().take(surplus) {
            self.tails.remove(&path);
            self.passed.insert(path);
        }
    }
}
