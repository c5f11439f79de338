//! Segments into the model: found, mapped, followed, decoded.
//!
//! The only place that sees both the wire format and the model, and the only one that trusts nothing: the
//! files belong to jobs, and this process may be root.

mod attribution;
mod cgroup;
mod decode;
mod discover;
mod files;
pub mod hardware;
mod host;
mod mapping;
mod process;
mod reap;
mod rings;
mod stacks;
mod tail;
mod threads;
mod window;

pub use discover::{Place, default_dir, places};
pub use process::{now_ns, unix_ns};
pub use reap::reap;
pub use stacks::StackKind;

use crate::model::{CommId, Liveness, SegmentId, Sink, Source, Update};
use mapping::{MapError, Mapping};
use stacks::Stacks;
use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tail::{Shared, Tail};

/// How often directories are searched, in ns.
const SEARCH_NS: u64 = 200_000_000;
/// How often containers are searched for, in ns.
const ROOTS_NS: u64 = 2_000_000_000;
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
/// Segments followed at once; more are counted, not read.
const SEGMENTS_MAX: usize = 4096;

/// The segments of a node, live or left behind.
#[derive(Debug)]
pub struct Segments {
    places: Vec<Place>,
    tails: BTreeMap<PathBuf, Tail>,
    refused: BTreeMap<PathBuf, String>,
    searched_ns: Option<u64>,
    /// When the places' roots were looked for, and those of each place.
    roots: Option<(u64, Vec<Vec<PathBuf>>)>,
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
    /// Files that are left alone, or are the same segment as one that is followed.
    passed: HashSet<PathBuf>,
    shared: Shared,
}

impl Segments {
    /// Follows these places.
    pub fn new(places: Vec<Place>) -> Self {
        Segments {
            places,
            tails: BTreeMap::new(),
            refused: BTreeMap::new(),
            searched_ns: None,
            roots: None,
            looked_ns: None,
            stacks: Stacks::new(),
            polled_ns: None,
            pause: LONGEST,
            longest: LONGEST,
            longest_moving: LONGEST,
            job: None,
            passed: HashSet::new(),
            shared: Shared::default(),
        }
    }

    /// Follows the processes of one job only, those that opened their segments after it began.
    #[must_use]
    pub fn only_job(mut self, name: &str, begun_ns: u64) -> Self {
        self.job = Some((name.to_owned(), begun_ns));
        self
    }

    /// From now on searches these places; segments that are followed are followed on.
    pub fn set_places(&mut self, places: Vec<Place>) {
        self.places = places;
        self.searched_ns = None;
        self.roots = None;
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

    /// Makes the next poll search the places and look after the processes, however short a time ago it did.
    pub fn look_anew(&mut self) {
        self.searched_ns = None;
        self.roots = None;
        self.looked_ns = None;
    }

    /// Asks the plugins of all processes that take part in a communicator for detail, until a moment of the host's
    /// monotonic clock in ns: within their budget they time its operations before others. How many that are.
    ///
    /// # Errors
    /// Why a segment cannot be written to: this is neither its job's user nor root. The others are asked all the same.
    pub fn want_detail(&self, comm: CommId, until_ns: u64) -> std::io::Result<usize> {
        let all: Vec<std::io::Result<bool>> = self.tails.values().map(|t| t.want(comm, until_ns)).collect();
        let asked = all.iter().filter(|r| matches!(r, Ok(true))).count();
        all.into_iter().collect::<std::io::Result<Vec<bool>>>().map(|_| asked)
    }

    /// The files that were refused, and why, by path.
    pub fn refused(&self) -> impl Iterator<Item = (&Path, &str)> {
        self.refused.iter().map(|(p, why)| (p.as_path(), why.as_str()))
    }

    /// The files of the segments whose process is gone.
    pub fn gone(&self) -> impl Iterator<Item = (SegmentId, &Path)> {
        self.tails.iter().filter(|(_, t)| t.liveness() != Liveness::Alive).map(|(p, t)| (t.id(), p.as_path()))
    }

    fn search(&mut self, now_ns: u64, out: &mut dyn Sink) {
        // Read to its end and removed: its mapping is all that keeps its memory.
        self.tails.retain(|path, t| !t.done() || path.exists());
        self.refused.retain(|path, _| path.exists());
        self.passed.retain(|path| path.exists());
        let known = self.roots.take().filter(|(at, _)| now_ns.saturating_sub(*at) < ROOTS_NS);
        let roots = known.unwrap_or_else(|| (now_ns, self.places.iter().map(Place::roots).collect()));
        for (place, below) in self.places.iter().zip(&roots.1) {
            for path in place.files_below(below) {
                if self.tails.contains_key(&path) || self.passed.contains(&path) {
                    continue;
                }
                if self.tails.len() >= SEGMENTS_MAX {
                    self.refused.insert(path, format!("more than {SEGMENTS_MAX} segments"));
                    continue;
                }
                let wanted = self.job.as_ref().map(|(name, begun)| (name.as_str(), *begun));
                match Mapping::open(&path).and_then(|m| Tail::of(path.clone(), m, wanted, now_ns)) {
                    Ok(None) => {
                        self.passed.insert(path);
                    }
                    // One file is reached by several ways through containers' roots.
                    Ok(Some(tail)) if self.tails.values().any(|t| t.id() == tail.id()) => {
                        self.passed.insert(path);
                    }
                    Ok(Some(tail)) => {
                        self.refused.remove(&path);
                        out.take(Update::Segment(tail.record()));
                        self.tails.insert(path, tail);
                    }
                    // The next search finds it ready.
                    Err(MapError::Opening) => {}
                    Err(e) => {
                        self.refused.insert(path, e.to_string());
                    }
                }
            }
        }
        self.roots = Some(roots);
    }
}

impl Source for Segments {
    fn poll(&mut self, now_ns: u64) -> Vec<Update> {
        let mut out = Vec::new();
        self.poll_each(now_ns, &mut |u| out.push(u));
        out
    }

    fn poll_each(&mut self, now_ns: u64, out: &mut dyn Sink) {
        let search = self.searched_ns.is_none_or(|t| now_ns.saturating_sub(t) >= SEARCH_NS);
        if search {
            self.searched_ns = Some(now_ns);
            self.search(now_ns, out);
        }
        let look = self.looked_ns.is_none_or(|t| now_ns.saturating_sub(t) >= LOOK_NS);
        if look {
            self.looked_ns = Some(now_ns);
        }
        let ends: Vec<_> = self.tails.values().map(Tail::end).filter(|_| look).collect();
        let mut ended = process::ended(&ends).into_iter();
        for tail in self.tails.values_mut() {
            tail.begin(now_ns, ended.next(), &mut self.shared, out);
        }
        // Side by side, so that what ranks did together comes together.
        let mut more = true;
        while more {
            more = false;
            for tail in self.tails.values_mut() {
                more |= tail.turn(&mut self.shared, out);
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
        let fill = self.tails.values().map(Tail::fill).fold(0.0, f64::max);
        let since = self.polled_ns.map_or(self.longest, |t| Duration::from_nanos(now_ns.saturating_sub(t)));
        self.polled_ns = Some(now_ns);
        let moves = !self.tails.is_empty() && self.tails.values().filter(|t| !t.done()).all(Tail::moves);
        let longest = if moves { self.longest_moving } else { self.longest };
        // As long as lets so much be new, by what the last look found; no time at all says nothing.
        let bears =
            if fill > 0.0 && !since.is_zero() { since.mul_f64((FILL / fill).min(1e3)) } else { longest };
        self.pause = bears.clamp(SHORTEST, longest);
    }

    fn inspect(&mut self, segment: SegmentId, now_ns: u64) {
        let tail = self.tails.values().find(|t| t.id() == segment);
        if let Some(pid) = tail.filter(|t| t.liveness() == Liveness::Alive).and_then(Tail::host_pid) {
            self.stacks.ask(segment, pid, now_ns);
        }
    }

    fn describe(&self) -> String {
        let names: Vec<String> = self.places.iter().map(ToString::to_string).collect();
        names.join(", ")
    }
}
