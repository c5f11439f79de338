//! Segments into the model: found, mapped, followed, decoded.
//!
//! The only place that sees both the wire format and the model, and the only one that trusts nothing: the
//! files belong to jobs, and this process may be root.

mod attribution;
mod cgroup;
mod containers;
mod decode;
mod descriptors;
mod directory;
mod discover;
mod ends;
mod files;
pub mod hardware;
mod host;
mod lock;
mod mapping;
mod memory_room;
mod open_roots;
mod pace;
pub mod parsers;
mod process;
mod reap;
mod refused;
mod rights;
mod rings;
mod search;
mod segment_file;
mod stacks;
mod tail;
mod threads;
mod tool;
mod window;

pub use discover::{Place, default_dir, places};
pub use ends::Ends;
pub use open_roots::{Helper, open_roots};
pub use pace::Pace;
pub use process::{boot_id, now_ns, unix_ns};
pub use reap::reap;
pub use stacks::StackKind;

use crate::model::{CommId, Liveness, SegmentId, Sink, Source, Unread, UnreadReason, Update};
use directory::{Directory, FileId};
use mapping::MapError;
use refused::Refused;
use rights::Watched;
use search::Search;
use segment_file::SegmentFile;
use stacks::Stacks;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tail::{Shared, Tail};

/// How often directories are searched.
const SEARCH: Pace = Pace::new(Duration::from_millis(200), 10);
/// How often processes are looked after, in ns.
const LOOK_NS: u64 = 50_000_000;
/// The longest time between two looks, unless it is set, and the shortest.
const LONGEST: Duration = Duration::from_millis(20);
const SHORTEST: Duration = Duration::from_millis(1);
/// How much of a ring may be new at a look.
const FILL: f64 = 0.25;
/// How many times as long the time between two looks may be while every process issues operations: each look costs
/// something beside what it reads.
const MOVING: u32 = 4;
/// How long after the end of a process, in ns, the time between two looks is short: what its end means for the others is
/// found by then.
const ENDED_NS: u64 = 500_000_000;
const ENDED_PAUSE: Duration = Duration::from_millis(10);
/// Segments of running processes that are followed at once, in all and of one user; more are counted, not read.
const SEGMENTS_MAX: usize = 1024;
const SEGMENTS_OF_USER_MAX: usize = 512;
/// Segments that a user may spoil before no new ones of theirs are read, while these are there: each may have cost memory.
const SPOILT_OF_USER_MAX: usize = 16;
/// Segments that are read to their end and still known.
const DONE_MAX: usize = 1024;
/// Operations that are being put together, of all segments: each may hold its share, and some in any case.
const OPEN_MAX: usize = 49_152;
const OPEN_MIN: usize = 64;
/// The share of a segment that is read once, of a user who has no process that runs.
const OPEN_DEAD: usize = 8192;
/// Communicators that are known at once, of all segments of running processes. Each user has the same share.
const COMMS_MAX: usize = 16_384;
/// Segments that are opened in one search; the others wait for the next one.
const OPENED_AT_ONCE: usize = 64;
/// Files that are tried in one search, whatever becomes of them.
const TRIED_AT_ONCE: usize = 256;
/// Unread segments that are named one by one.
const NAMED_MAX: usize = 1024;

/// The segments of a node, of running processes or left behind.
#[derive(Debug)]
pub struct Segments {
    search: Search,
    tails: BTreeMap<PathBuf, Tail>,
    /// Segments that are not read, and why.
    refused: Refused,
    /// The same of directories, as the last search found it.
    unsearched: Vec<Unread>,
    /// The last search left segments for the next one.
    backlog: bool,
    searched_ns: Option<u64>,
    /// The time to the next search: users decide how much there is to search.
    search_pause: Duration,
    looked_ns: Option<u64>,
    stacks: Stacks,
    polled_ns: Option<u64>,
    pause: Duration,
    /// The longest time between two looks.
    longest: Duration,
    /// The same while every process issues operations.
    longest_moving: Duration,
    /// Segments of other jobs, and of earlier ones of the same name, are left alone.
    job: Option<(String, u64)>,
    /// The name of this machine.
    node: Option<String>,
    /// Tells somebody of processes that end.
    ends: Option<Arc<Ends>>,
    /// When a process was last seen to have ended.
    ended_ns: Option<u64>,
    /// Files that are left alone, or are the same segment as one that is followed.
    passed: HashSet<PathBuf>,
    shared: Shared,
}

impl Segments {
    /// Follows these places.
    pub fn new(places: Vec<Place>) -> Self {
        Segments {
            search: Search::new(places),
            tails: BTreeMap::new(),
            refused: Refused::default(),
            unsearched: Vec::new(),
            backlog: false,
            searched_ns: None,
            search_pause: Duration::ZERO,
            looked_ns: None,
            stacks: Stacks::new(),
            polled_ns: None,
            pause: LONGEST,
            longest: LONGEST,
            longest_moving: LONGEST,
            job: None,
            node: None,
            ends: None,
            ended_ns: None,
            passed: HashSet::new(),
            shared: Shared::default(),
        }
    }

    /// Looks into containers too, where [`Place::Host`] is followed: `helper` is started to open them.
    pub fn look_into_containers(&mut self, helper: Helper) {
        self.search.look_into_containers(helper);
    }

    /// From now on takes processes of several users for members of one communicator where NCCL's number is the same: for
    /// jobs whose containers have users of their own.
    pub fn share_communicators(&mut self, share: bool) {
        self.shared.share_communicators = share;
    }

    /// True once every place was searched, containers too.
    pub fn is_searched(&self) -> bool {
        self.searched_ns.is_some() && !self.backlog && self.search.is_complete()
    }

    /// Gives processes of this machine this name of their host, whatever their containers call it.
    #[must_use]
    pub fn of_node(mut self, node: String) -> Self {
        self.node = Some(node);
        self
    }

    /// Follows the processes of one job only, those that opened their segments after it began.
    #[must_use]
    pub fn only_job(mut self, name: &str, begun_ns: u64) -> Self {
        self.job = Some((name.to_owned(), begun_ns));
        self
    }

    /// From now on searches these places; segments that are followed are followed on.
    pub fn set_places(&mut self, places: Vec<Place>) {
        self.search.set_places(places);
        self.searched_ns = None;
    }

    /// Looks at least so often, unless a busy job makes it look more often; a quarter as often while every process issues
    /// operations, and so nothing stands still.
    pub fn look_every(&mut self, longest: Duration) {
        self.longest = longest.max(SHORTEST);
        self.longest_moving = self.longest * MOVING;
        self.pause = self.pause.min(self.longest);
    }

    /// Looks so far into the processes of culprits.
    pub fn look_into(&mut self, kind: StackKind) {
        self.stacks.set(kind);
    }

    /// How long to wait until the next look, so that no ring comes round meanwhile: 20 ms, less for a busy job.
    pub fn pause(&self) -> Duration {
        self.pause
    }

    /// How many segments are followed.
    pub fn len(&self) -> usize {
        self.tails.len()
    }

    /// True when none is followed.
    pub fn is_empty(&self) -> bool {
        self.tails.is_empty()
    }

    /// A descriptor that becomes readable when a followed process ends. The reader of it then calls
    /// [`Segments::look_at_processes`], so that the next poll looks after the processes.
    ///
    /// # Errors
    /// No descriptor is left for it; then ends are seen at the next look.
    pub fn ends(&mut self) -> std::io::Result<Arc<Ends>> {
        let ends = Arc::new(Ends::new()?);
        self.tails.values().filter_map(Tail::end).try_for_each(|end| ends.watch(end))?;
        self.ends = Some(Arc::clone(&ends));
        Ok(ends)
    }

    /// Makes the next poll look after the processes, however short a time ago it did.
    pub fn look_at_processes(&mut self) {
        self.looked_ns = None;
    }

    /// Makes the next poll search the places and look after the processes, however short a time ago it did.
    pub fn look_anew(&mut self) {
        self.searched_ns = None;
        self.looked_ns = None;
    }

    /// Requests detail of a communicator from the plugins of all processes that take part in it, until a moment of the
    /// host's monotonic clock in ns: within their budget they time its operations before others. Returns how many were asked.
    ///
    /// # Errors
    /// Why a segment cannot be written to: this is neither its job's user nor root. The others are asked all the same.
    pub fn request_detail(&self, comm: CommId, until_ns: u64) -> std::io::Result<usize> {
        let all: Vec<_> = self.tails.values().map(|t| t.request_detail(comm, until_ns)).collect();
        let asked = all.iter().filter(|r| matches!(r, Ok(true))).count();
        match all.into_iter().find_map(Result::err) {
            Some(why) => Err(std::io::Error::other(why.to_string())),
            None => Ok(asked),
        }
    }

    /// How many segments and directories are not read now, by reason.
    pub fn unread_counts(&self) -> BTreeMap<UnreadReason, u64> {
        let mut counts = BTreeMap::new();
        let reasons = self.unsearched.iter().chain(self.refused.iter()).map(|u| u.reason);
        let spoilt = self.tails.values().filter(|t| t.is_spoilt()).map(|_| UnreadReason::Damaged);
        for reason in reasons.chain(spoilt) {
            *counts.entry(reason).or_default() += 1;
        }
        counts
    }

    /// The files of the segments whose process is gone.
    pub fn gone(&self) -> impl Iterator<Item = (SegmentId, &Path)> {
        self.tails.iter().filter(|(_, t)| t.liveness() != Liveness::Alive).map(|(p, t)| (t.id(), p.as_path()))
    }

    fn search(&mut self, now_ns: u64, out: &mut dyn Sink) {
        let listing = self.search.list();
        self.unsearched = listing.unread;
        let listed: HashSet<PathBuf> = listing.files.iter().map(|(d, name)| d.path().join(name)).collect();
        // Read to its end and removed: its mapping is all that keeps its memory.
        self.tails.retain(|path, t| !t.done() || listed.contains(path));
        self.refused.keep_only(&listed);
        self.passed.retain(|path| listed.contains(path));
        let mut followed = Followed::of(self.tails.values());
        let (mut opened, mut tried) = (0, 0);
        self.backlog = false;
        for (path, (directory, name)) in self.refused.in_order(listing.files.iter()) {
            if self.tails.contains_key(&path) || self.passed.contains(&path) {
                continue;
            }
            if opened >= OPENED_AT_ONCE || tried >= TRIED_AT_ONCE {
                self.backlog = self.refused.is_new(&path);
                break;
            }
            tried += 1;
            match self.open(directory, name, &followed, now_ns) {
                Ok(Some(mut tail)) => {
                    self.node.iter().for_each(|node| tail.name_host(node));
                    self.refused.remove(&path);
                    followed.add(&tail);
                    if let Some((ends, end)) = self.ends.as_ref().zip(tail.end()) {
                        // Where the kernel lacks room for it, its end is seen at the next look.
                        ends.watch(end).ok();
                    }
                    opened += 1;
                    out.take(Update::Segment(tail.record()));
                    self.tails.insert(path, tail);
                }
                Ok(None) => {
                    self.refused.remove(&path);
                    self.passed.insert(path);
                }
                // The next search finds it ready.
                Err(MapError::Opening) => {}
                Err(e) => {
                    let (detail, reason) = (e.to_string(), e.reason());
                    let why = Unread { path: shown(&path), reason, detail, owner: directory.owner_of(name) };
                    self.refused.insert(path, why, now_ns);
                }
            }
        }
        self.forget_done();
    }

    /// Opens a segment; nothing where it is of another job, or one that is followed already.
    fn open(
        &self,
        directory: &Arc<Directory>,
        name: &OsStr,
        followed: &Followed,
        now_ns: u64,
    ) -> Result<Option<Tail>, MapError> {
        let (file, lock) = SegmentFile::open(directory, name)?;
        // One file is reached by several ways through containers' mounts.
        if followed.files.contains(&file.mapping.file()) {
            return Ok(None);
        }
        let wanted = self.job.as_ref().map(|(name, begun)| (name.as_str(), *begun));
        let Some(tail) = Tail::of((file, lock), wanted, now_ns)? else { return Ok(None) };
        // Of two files that say to be one process only one can be its own.
        if followed.ids.contains(&tail.id()) {
            return Err(MapError::Duplicate);
        }
        if followed.spoilt.get(&tail.owner()).is_some_and(|n| *n >= SPOILT_OF_USER_MAX) {
            return Err(MapError::TooMany(
                SPOILT_OF_USER_MAX,
                "of this user were spoilt while they were read",
            ));
        }
        if tail.liveness() == Liveness::Alive {
            let of = |owner: u32| followed.by_owner.get(&owner).copied().unwrap_or(0);
            let of_user = of(tail.owner());
            // Many users may be one person's: root's segments are read whatever they do.
            if tail.owner() != 0 && followed.alive - of(0) >= SEGMENTS_MAX {
                return Err(MapError::TooMany(SEGMENTS_MAX, "of running processes"));
            }
            if of_user >= SEGMENTS_OF_USER_MAX {
                return Err(MapError::TooMany(SEGMENTS_OF_USER_MAX, "of running processes of one user"));
            }
        }
        Ok(Some(tail))
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

    /// How many more communicators each user's processes may be in.
    fn room_for_comms(&self) -> HashMap<u32, usize> {
        let mut known: HashMap<u32, usize> = HashMap::new();
        for tail in self.tails.values().filter(|t| t.liveness() == Liveness::Alive) {
            *known.entry(tail.owner()).or_default() += tail.comms();
        }
        let share = COMMS_MAX / known.len().max(1);
        known.values_mut().for_each(|n| *n = share.saturating_sub(*n));
        known
    }

    /// How many operations each user's segments may put together at once.
    fn shares(&self) -> HashMap<u32, usize> {
        let followed = Followed::of(self.tails.values());
        let of_user = OPEN_MAX / followed.by_owner.len().max(1);
        followed.by_owner.into_iter().map(|(owner, n)| (owner, (of_user / n.max(1)).max(OPEN_MIN))).collect()
    }
}

/// What is followed, by what limits it.
#[derive(Debug, Default)]
struct Followed {
    alive: usize,
    by_owner: HashMap<u32, usize>,
    ids: HashSet<SegmentId>,
    /// Segments that were spoilt, by owner.
    spoilt: HashMap<u32, usize>,
    files: HashSet<FileId>,
}

impl Followed {
    fn of<'a>(tails: impl Iterator<Item = &'a Tail>) -> Self {
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
}

/// A path whose name may be anybody's: what could steer a terminal is shown as an escape.
fn shown(path: &Path) -> String {
    path.display().to_string().escape_debug().to_string()
}

impl Source for Segments {
    fn poll(&mut self, now_ns: u64) -> Vec<Update> {
        let mut out = Vec::new();
        self.poll_each(now_ns, &mut |u| out.push(u));
        out
    }

    fn poll_each(&mut self, now_ns: u64, out: &mut dyn Sink) {
        let since = |t| Duration::from_nanos(now_ns.saturating_sub(t));
        if self.searched_ns.is_none_or(|t| since(t) >= self.search_pause) {
            self.searched_ns = Some(now_ns);
            let began = Instant::now();
            self.search(now_ns, out);
            self.search_pause = SEARCH.next(began.elapsed());
        }
        let look = self.looked_ns.is_none_or(|t| now_ns.saturating_sub(t) >= LOOK_NS);
        if look {
            self.looked_ns = Some(now_ns);
        }
        let ends: Vec<_> = self.tails.values().map(Tail::end).filter(|_| look).collect();
        let mut ended = process::ended(&ends).into_iter();
        let mut room = self.room_for_comms();
        for tail in self.tails.values_mut() {
            // What is read of a dead process is read once, and then forgotten here.
            let room = room.get_mut(&tail.owner()).filter(|_| tail.liveness() == Liveness::Alive);
            let (before, was_alive) = (tail.comms(), tail.liveness() == Liveness::Alive);
            let most = room.as_ref().map_or(usize::MAX, |room| before.saturating_add(**room));
            tail.begin(now_ns, ended.next(), most, &mut self.shared, out);
            if was_alive && tail.liveness() != Liveness::Alive {
                self.ended_ns = Some(now_ns);
            }
            if let Some(room) = room {
                *room = room.saturating_sub(tail.comms().saturating_sub(before));
            }
        }
        // Side by side, so that what ranks did together comes together.
        let shares = self.shares();
        let mut more = true;
        while more {
            more = false;
            for tail in self.tails.values_mut() {
                let share = shares.get(&tail.owner()).copied().unwrap_or(OPEN_DEAD);
                more |= tail.turn(share, &mut self.shared, out);
            }
            out.rest(&mut self.shared.spare);
        }
        for tail in self.tails.values_mut() {
            tail.close(now_ns, &mut self.shared, out);
        }
        for (segment, answer) in self.stacks.take() {
            let tail = self.tails.values_mut().find(|t| t.id() == segment);
            if let Some(fact) = tail.and_then(|t| t.stack(answer, now_ns)) {
                out.take(Update::Host(Box::new(fact)));
            }
        }
        // What is read to its end grows no more, whatever its last look found.
        let fill = self.tails.values().filter(|t| !t.done()).map(Tail::fill).fold(0.0, f64::max);
        let since = self.polled_ns.map_or(self.longest, |t| Duration::from_nanos(now_ns.saturating_sub(t)));
        self.polled_ns = Some(now_ns);
        let moves = !self.tails.is_empty() && self.tails.values().filter(|t| !t.done()).all(Tail::moves);
        let longest = if moves { self.longest_moving } else { self.longest };
        // As long as lets so much be new, by what the last look found; no time at all says nothing.
        let bears =
            if fill > 0.0 && !since.is_zero() { since.mul_f64((FILL / fill).min(1e3)) } else { longest };
        let has_ended = self.ended_ns.is_some_and(|t| now_ns.saturating_sub(t) < ENDED_NS);
        let longest = if has_ended { longest.min(ENDED_PAUSE) } else { longest };
        self.pause = bears.clamp(SHORTEST, longest);
    }

    fn inspect(&mut self, segment: SegmentId, now_ns: u64) {
        let tail = self.tails.values().find(|t| t.id() == segment);
        if let Some(pid) = tail.filter(|t| t.liveness() == Liveness::Alive).and_then(Tail::host_pid) {
            let owner = tail.map_or(0, Tail::owner);
            self.stacks.ask(segment, Watched { pid, owner }, now_ns);
        }
    }

    /// So many at most, of each owner in turn: nobody's are hidden behind those of another.
    fn unread(&self, uid: Option<u32>) -> Vec<Unread> {
        let spoilt = self.tails.iter().filter(|(_, t)| t.is_spoilt()).map(|(path, t)| Unread {
            path: shown(path),
            reason: UnreadReason::Damaged,
            detail: "it was shortened or overwritten while it was read; its process may be dead by that"
                .to_owned(),
            owner: Some(t.owner()),
        });
        let all = self.unsearched.iter().chain(self.refused.iter()).cloned().chain(spoilt);
        let mut of_owner: BTreeMap<Option<u32>, usize> = BTreeMap::new();
        let mut in_turn: Vec<(usize, Unread)> = all
            .filter(|u| uid.is_none() || u.owner.is_none() || u.owner == uid)
            .map(|u| {
                let nth = of_owner.entry(u.owner).or_default();
                *nth += 1;
                (*nth, u)
            })
            .collect();
        in_turn.sort_by_key(|(nth, _)| *nth);
        in_turn.into_iter().map(|(_, u)| u).take(NAMED_MAX).collect()
    }

    fn describe(&self) -> String {
        let names: Vec<String> = self.search.places().iter().map(ToString::to_string).collect();
        names.join(", ")
    }
}
