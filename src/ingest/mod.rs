//! Segments into the model: found, mapped, followed, decoded.
//!
//! The only place that sees both the wire format and the model, and the only one that trusts nothing: the
//! files belong to jobs, and this process may be root.

mod attribution;
mod cgroup;
mod comm_table;
mod containers;
mod decode;
mod descriptors;
mod directory;
mod discover;
mod ends;
mod files;
mod follow;
mod glimpse;
pub mod hardware;
mod host;
mod life;
mod line_rings;
mod lock;
mod look;
mod mapping;
mod memory_room;
mod pace;
pub mod parsers;
mod pid_namespaces;
mod probe;
mod process;
mod process_reading;
mod reap;
mod refused;
mod rights;
mod rings;
mod search;
mod segment_file;
mod shm;
#[cfg(test)]
#[path = "../../tests/support/skip.rs"]
#[allow(dead_code, reason = "the list is for tests/skipped")]
mod skip;
mod stack_queue;
mod stacks;
mod survey;
mod tail;
mod threads;
mod tool;
mod window;

pub use discover::{Place, default_dir, places};
pub use ends::Ends;
pub use glimpse::{Glimpse, glimpse};
pub use pace::Pace;
pub use probe::{ProbeCommand, probe};
pub use process::{boot_id, now_ns, unix_ns};
pub use stacks::StackKind;

use crate::model::{CommId, Liveness, SegmentId, Sink, Source, Unread, UnreadReason, Update};
use directory::FileId;
use follow::Searching;
use look::Turns;
use refused::Refused;
use rights::Watched;
use ringwatch_wire::layout::head;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use survey::{Order, Report, Survey};
use tail::{Shared, Tail};

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
/// Unread segments that are named one by one.
const NAMED_MAX: usize = 1024;

/// The segments of a node, of running processes or left behind.
#[derive(Debug)]
pub struct Segments {
    places: Vec<Place>,
    /// Has done what may have to wait for a user.
    survey: Survey,
    searching: Searching,
    tails: BTreeMap<PathBuf, Tail>,
    /// Segments that are not read, and why.
    refused: Refused,
    /// The same of directories, as the last search found it.
    unsearched: Vec<Unread>,
    /// Users and others who do not answer.
    silent: Vec<Unread>,
    looked_ns: Option<u64>,
    /// How far into the processes of culprits is looked.
    stacks: StackKind,
    /// The first look: what a process that is younger loses is lost, not history.
    since_ns: Option<u64>,
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
    /// How much of a look each user has.
    turns: Turns,
    /// Segments that were removed, and why plugins cannot be asked for detail, for whoever wants to know.
    removed: Vec<PathBuf>,
    unwritten: Option<String>,
    shared: Shared,
}

impl Segments {
    /// Follows these places, where all that is there belongs to this process's user.
    pub fn new(places: Vec<Place>) -> Self {
        Segments {
            places,
            survey: Survey::here(None),
            searching: Searching::default(),
            tails: BTreeMap::new(),
            refused: Refused::default(),
            unsearched: Vec::new(),
            silent: Vec::new(),
            looked_ns: None,
            stacks: StackKind::default(),
            since_ns: None,
            polled_ns: None,
            pause: LONGEST,
            longest: LONGEST,
            longest_moving: LONGEST,
            job: None,
            node: None,
            ends: None,
            ended_ns: None,
            passed: HashSet::new(),
            turns: Turns::default(),
            removed: Vec::new(),
            unwritten: None,
            shared: Shared::default(),
        }
    }

    /// Has probes do all that may have to wait for another user, and looks into containers too, where [`Place::Host`] is
    /// followed. What is found comes in later polls: [`Segments::is_searched`] says when all of it has come.
    pub fn use_probes(&mut self, command: ProbeCommand) {
        self.survey = Survey::apart(command);
    }

    /// Has a probe read the stacks of culprits, and all else done by this process.
    pub fn use_probe_for_stacks(&mut self, command: ProbeCommand) {
        self.survey = Survey::here(Some(command));
    }

    /// Reads for so long in one look, and as long for root's segments; each user has a share of that. What is not read is read
    /// in the next look, or is lost for its user.
    pub fn read_at_most(&mut self, time: Duration) {
        self.turns.limit(time);
    }

    /// From now on takes processes of several users for members of one communicator where NCCL's number is the same: for
    /// jobs whose containers have users of their own.
    pub fn share_communicators(&mut self, share: bool) {
        self.shared.share_communicators = share;
    }

    /// True once every place was searched, containers too, and every segment there was opened or is reported as unread.
    pub fn is_searched(&self) -> bool {
        self.searching.is_complete()
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
        self.places = places;
        self.searching.search_now();
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
        self.stacks = kind;
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
        self.searching.search_now();
        self.looked_ns = None;
    }

    /// Requests detail of a communicator from the plugins of all processes that take part in it, until a moment of the
    /// host's monotonic clock in ns: within their budget they time its operations before others. Returns how many are asked.
    /// [`Segments::take_unwritten`] says why one could not be.
    pub fn request_detail(&mut self, comm: CommId, until_ns: u64) -> usize {
        let files: Vec<_> = self.tails.values().filter_map(|t| t.takes_part(comm)).collect();
        let many = files.len();
        if many > 0 {
            let words =
                vec![(head::WANTED_COMM as u64, comm.nccl_hash()), (head::WANTED_UNTIL as u64, until_ns)];
            self.survey.order(Order::Write(files, words));
        }
        many
    }

    /// Why a segment could not be written to, since the last call: this is neither its job's user nor root.
    pub fn take_unwritten(&mut self) -> Option<String> {
        self.unwritten.take()
    }

    /// Removes the oldest segments of dead processes in each directory of the host itself until the rest take at most
    /// `keep_bytes`, and at most a sixteenth of the file system, which NCCL needs too; and those that were last written
    /// longer than `keep_for` ago. [`Segments::take_removed`] returns what was removed, in time.
    ///
    /// Only segments that the plugin named and whose header says the same are removed, and none of a running process. What is
    /// in a container is the container's.
    pub fn reap(&mut self, keep_bytes: u64, keep_for: Option<Duration>) {
        self.survey.order(Order::Reap { keep_bytes, keep_for });
    }

    /// The files that were removed since the last call.
    pub fn take_removed(&mut self) -> Vec<PathBuf> {
        std::mem::take(&mut self.removed)
    }

    /// How many segments and directories are not read now, by reason.
    pub fn unread_counts(&self) -> BTreeMap<UnreadReason, u64> {
        let mut counts = BTreeMap::new();
        self.all_unread().for_each(|u| *counts.entry(u.reason).or_default() += 1);
        counts
    }

    fn all_unread(&self) -> impl Iterator<Item = Unread> {
        let spoilt = self.tails.iter().filter(|(_, t)| t.is_spoilt()).map(|(path, t)| Unread {
            path: shown(path),
            reason: UnreadReason::Damaged,
            detail: "it was shortened or overwritten while it was read; its process may be dead by that"
                .to_owned(),
            owner: Some(t.owner()),
        });
        let lists = self.unsearched.iter().chain(&self.silent).chain(self.refused.iter());
        lists.cloned().chain(self.searching.unread(self.survey.has_failed())).chain(spoilt)
    }

    /// The files of the segments whose process is gone.
    pub fn gone(&self) -> impl Iterator<Item = (SegmentId, &Path)> {
        self.tails.iter().filter(|(_, t)| t.liveness() != Liveness::Alive).map(|(p, t)| (t.id(), p.as_path()))
    }

    /// Takes everything that was reported since.
    fn take_reports(&mut self, now_ns: u64, out: &mut dyn Sink) {
        while let Some(report) = self.survey.report() {
            match report {
                Report::Listed(listing, took) => self.take_listing(listing, took),
                Report::Opened(opened, took) => self.take_opened(opened, took, now_ns, out),
                Report::Read(readings) => {
                    let mut tails: HashMap<SegmentId, &mut Tail> =
                        self.tails.values_mut().map(|t| (t.id(), t)).collect();
                    for (segment, reading) in readings {
                        let tail = tails.get_mut(&segment);
                        if let Some(fact) = tail.and_then(|t| t.read_process(reading, now_ns)) {
                            out.take(Update::Host(Box::new(fact)));
                        }
                    }
                }
                Report::Removed(paths) => self.removed.extend(paths),
                Report::Unwritten(why) => self.unwritten = Some(why.to_string()),
                Report::Stack(segment, answer) => {
                    let tail = self.tails.values_mut().find(|t| t.id() == segment);
                    if !answer.is_empty()
                        && let Some(fact) = tail.and_then(|t| t.stack(answer, now_ns))
                    {
                        out.take(Update::Host(Box::new(fact)));
                    }
                }
                Report::Silent(silent) => self.silent = silent,
            }
        }
    }

    /// Looks after the processes: who has ended, and what they do.
    fn look_after_processes(&mut self, now_ns: u64, out: &mut dyn Sink) {
        if self.looked_ns.is_some_and(|t| now_ns.saturating_sub(t) < LOOK_NS) {
            return;
        }
        self.looked_ns = Some(now_ns);
        let ends: Vec<_> = self.tails.values().map(Tail::end).collect();
        let ended = process::ended(&ends);
        let mut wanted = Vec::new();
        for (tail, ended) in self.tails.values_mut().zip(ended) {
            let was_alive = tail.liveness() == Liveness::Alive;
            wanted.extend(tail.look_at_process(now_ns, ended));
            if was_alive && tail.liveness() != Liveness::Alive {
                self.ended_ns = Some(now_ns);
            }
        }
        if !wanted.is_empty() {
            self.survey.order(Order::Read(wanted));
            self.take_reports(now_ns, out);
        }
    }

    /// The time to the next look, by what this one has found.
    fn next_pause(&mut self, now_ns: u64) -> Duration {
        // What is read to its end grows no more, whatever its last look found.
        let fill = self.tails.values().filter(|t| !t.done()).map(Tail::fill).fold(0.0, f64::max);
        let since = self.polled_ns.map_or(self.longest, |t| Duration::from_nanos(now_ns.saturating_sub(t)));
        self.polled_ns = Some(now_ns);
        if self.tails.values().any(Tail::is_behind) {
            return SHORTEST;
        }
        let moves = !self.tails.is_empty() && self.tails.values().filter(|t| !t.done()).all(Tail::moves);
        let longest = if moves { self.longest_moving } else { self.longest };
        // As long as lets so much be new, by what the last look found; no time at all says nothing.
        let bears =
            if fill > 0.0 && !since.is_zero() { since.mul_f64((FILL / fill).min(1e3)) } else { longest };
        let has_ended = self.ended_ns.is_some_and(|t| now_ns.saturating_sub(t) < ENDED_NS);
        let longest = if has_ended { longest.min(ENDED_PAUSE) } else { longest };
        bears.clamp(SHORTEST, longest)
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
        self.since_ns.get_or_insert(now_ns);
        self.take_reports(now_ns, out);
        if self.searching.is_due(now_ns) {
            self.searching.begin(now_ns);
            self.survey.order(Order::Search(self.places.clone()));
            self.take_reports(now_ns, out);
        }
        self.look_after_processes(now_ns, out);
        self.read(now_ns, out);
        self.pause = self.next_pause(now_ns);
    }

    fn inspect(&mut self, segment: SegmentId, _now_ns: u64) {
        let tail = self.tails.values().find(|t| t.id() == segment);
        let alive = tail.filter(|t| t.liveness() == Liveness::Alive && self.stacks != StackKind::Off);
        if let Some((pid, owner)) = alive.and_then(|t| Some((t.host_pid()?, t.owner()))) {
            let kind = self.stacks;
            self.survey.order(Order::Stack { segment, watched: Watched { pid, owner }, kind });
        }
    }

    fn behind(&self) -> Vec<SegmentId> {
        self.tails.values().filter(|t| t.is_behind()).map(Tail::id).collect()
    }

    fn is_searched(&self) -> bool {
        Segments::is_searched(self)
    }

    fn searched_ns(&self) -> Option<u64> {
        Some(self.searching.complete_ns())
    }

    /// So many at most, of each owner in turn: nobody's are hidden behind those of another.
    fn unread(&self, uid: Option<u32>) -> Vec<Unread> {
        let mut of_owner: BTreeMap<Option<u32>, usize> = BTreeMap::new();
        let mut in_turn: Vec<(usize, Unread)> = self
            .all_unread()
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
        let names: Vec<String> = self.places.iter().map(ToString::to_string).collect();
        names.join(", ")
    }
}
