//! Everything about segments and processes that may have to wait for a user, in order of request.
//!
//! Whoever reads segments orders it and takes reports; it never waits. Orders are carried out by a thread that asks
//! probes, or at once, where all belongs to this process's own user.

use super::directory::{Directory, Failure, FileId};
use super::discover::Place;
use super::probe::{
    Asked, Bytes, Object, OpenedSegment, Outcome, Pool, ProbeCommand, Subject, Task, Unanswered,
};
use super::process_reading::Reading;
use super::rights::Watched;
use super::search::{Listing, Search};
use super::stack_queue::StackQueue;
use super::stacks::{Answer, StackKind};
use crate::model::{SegmentId, Unread};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::ffi::OsString;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// A segment's file, by the directory that it is in.
#[derive(Debug, Clone)]
pub(super) struct FileName {
    pub(super) directory: Arc<Directory>,
    pub(super) name: OsString,
    /// Its user, as far as that is known.
    pub(super) owner: Option<u32>,
}

impl FileName {
    pub(super) fn path(&self) -> PathBuf {
        self.directory.path().join(&self.name)
    }

    fn subject(&self) -> Subject {
        let folder = self.directory.folder();
        let object = Object::File(folder.id, Bytes::from(&self.path()));
        Subject { user: folder.owner.or(self.owner), object }
    }
}

/// A process whose state is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Running {
    pub(super) segment: SegmentId,
    pub(super) owner: u32,
    pub(super) pid: u32,
    pub(super) start_ticks: u64,
}

/// An order to the survey.
#[derive(Debug)]
pub(super) enum Order {
    /// Search these places.
    Search(Vec<Place>),
    /// Open segments.
    Open(Vec<FileName>),
    /// Read processes. This comes before everything else.
    Read(Vec<Running>),
    /// Remove the oldest segments of dead processes in each directory of the host: as [`super::reap::reap`].
    Reap { keep_bytes: u64, keep_for: Option<Duration> },
    /// Write words of segments' headers.
    Write(Vec<(FileName, FileId)>, Vec<(u64, u64)>),
    /// Find out where a process is in its code.
    Stack { segment: SegmentId, watched: Watched, kind: StackKind },
}

/// The outcome of an order.
#[derive(Debug)]
pub(super) enum Report {
    /// A search, and the time that it took.
    Listed(Listing, Duration),
    /// Segments, in the order of the request, and the time that it took.
    Opened(Vec<(FileName, Opened)>, Duration),
    /// Processes of which something was read, and those of which nothing could be.
    Read(Vec<(SegmentId, Option<Reading>)>),
    /// Files that were removed.
    Removed(Vec<PathBuf>),
    /// Why a segment cannot be written to.
    Unwritten(Failure),
    Stack(SegmentId, Answer),
    /// The parties that do not answer now, in full.
    Silent(Vec<Unread>),
}

/// A segment that was opened, with its descriptor and its process's, or why it was not.
#[derive(Debug)]
pub(super) enum Opened {
    Segment(Box<OpenedSegment>, OwnedFd, Option<OwnedFd>),
    /// Why not, and whose file it is.
    Failed(Failure, Option<u32>),
    /// Its user does not answer, which is reported, or has to wait: it is tried again.
    Unanswered {
        is_reported: bool,
    },
}

/// Where orders go, and reports come from.
#[derive(Debug)]
pub(super) struct Survey(Way);

#[derive(Debug)]
enum Way {
    Here(Box<Surveyor>, VecDeque<Report>),
    Apart(Sender<Order>, Receiver<Report>),
    /// To be begun with the first order: by then its process has said which signals its threads take.
    Unbegun(ProbeCommand),
    Failed,
}

impl Survey {
    /// Carries orders out at once. Stacks are read by a probe, where there is one.
    pub(super) fn here(stacks: Option<ProbeCommand>) -> Self {
        Survey(Way::Here(Box::new(Surveyor::new(Pool::here(), stacks)), VecDeque::new()))
    }

    /// Has orders carried out by a thread that asks probes. Containers are looked into as well.
    pub(super) fn apart(command: ProbeCommand) -> Self {
        Survey(Way::Unbegun(command))
    }

    /// Orders something. What came of it is reported in time.
    pub(super) fn order(&mut self, order: Order) {
        if let Way::Unbegun(command) = &self.0 {
            self.0 = begin(command.clone()).unwrap_or(Way::Failed);
        }
        match &mut self.0 {
            Way::Here(surveyor, reports) => surveyor.carry_out(order, &mut |r| reports.push_back(r)),
            // It ends with the reader of its reports alone.
            Way::Apart(orders, _) => orders.send(order).unwrap_or_default(),
            Way::Unbegun(_) | Way::Failed => {}
        }
    }

    /// The next report, if there is one.
    pub(super) fn report(&mut self) -> Option<Report> {
        match &mut self.0 {
            Way::Here(surveyor, reports) => {
                surveyor.read_stacks(&mut |r| reports.push_back(r));
                reports.pop_front()
            }
            Way::Apart(_, reports) => reports.try_recv().ok(),
            Way::Unbegun(_) | Way::Failed => None,
        }
    }

    /// True where no thread could be had.
    pub(super) fn has_failed(&self) -> bool {
        matches!(self.0, Way::Failed)
    }
}

fn begin(command: ProbeCommand) -> std::io::Result<Way> {
    let (orders, incoming) = channel();
    let (report, reports) = channel();
    std::thread::Builder::new().name("survey".to_owned()).spawn(move || {
        let mut surveyor = Surveyor::new(Pool::apart(command.clone()), Some(command));
        surveyor.search.look_into_containers();
        surveyor.incoming = Some(incoming);
        surveyor.run(&report);
    })?;
    Ok(Way::Apart(orders, reports))
}

/// Carries orders out.
#[derive(Debug)]
struct Surveyor {
    pool: Pool,
    search: Search,
    stacks: StackQueue,
    /// Where orders come from, apart.
    incoming: Option<Receiver<Order>>,
    waiting: VecDeque<Order>,
    /// The parties that did not answer the last time that this was reported.
    silent: Vec<Unread>,
}

impl Surveyor {
    fn new(pool: Pool, stacks: Option<ProbeCommand>) -> Self {
        Surveyor {
            pool,
            search: Search::default(),
            stacks: StackQueue::new(stacks),
            incoming: None,
            waiting: VecDeque::new(),
            silent: Vec::new(),
        }
    }

    /// Works until nobody takes reports any more.
    fn run(mut self, reports: &Sender<Report>) {
        let mut out = |report| reports.send(report).unwrap_or_default();
        loop {
            let pause = if self.stacks.is_busy() { STACK_POLL } else { IDLE };
            if self.waiting.is_empty()
                && let Some(incoming) = &self.incoming
            {
                match incoming.recv_timeout(pause) {
                    Ok(order) => self.waiting.push_back(order),
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => return,
                }
            }
            self.read_first(&mut out);
            if let Some(order) = self.waiting.pop_front() {
                self.carry_out(order, &mut out);
            }
            self.read_stacks(&mut out);
            let silent = self.pool.unread();
            if silent != self.silent {
                self.silent.clone_from(&silent);
                out(Report::Silent(silent));
            }
        }
    }

    /// Takes in what was ordered meanwhile, and reads processes at once.
    fn read_first(&mut self, out: &mut dyn FnMut(Report)) {
        let incoming = self.incoming.iter().flat_map(Receiver::try_iter);
        self.waiting.extend(incoming);
        let (first, rest) =
            std::mem::take(&mut self.waiting).into_iter().partition(|order| matches!(order, Order::Read(_)));
        self.waiting = rest;
        let first: VecDeque<Order> = first;
        for order in first {
            self.carry_out(order, out);
        }
    }

    fn carry_out(&mut self, order: Order, out: &mut dyn FnMut(Report)) {
        let began = Instant::now();
        match order {
            Order::Search(places) => {
                let listing = self.search.search(&places, &mut self.pool);
                out(Report::Listed(listing, began.elapsed()));
            }
            Order::Open(files) => {
                let opened = self.open(files, out);
                out(Report::Opened(opened, began.elapsed()));
            }
            Order::Read(processes) => out(Report::Read(self.read(&processes))),
            Order::Reap { keep_bytes, keep_for } => {
                for directory in self.search.own_directories() {
                    self.reap(&directory, keep_bytes, keep_for, out);
                    self.read_first(out);
                }
            }
            Order::Write(files, words) => self.write(&files, &words, out),
            Order::Stack { segment, watched, kind } => self.stacks.push(segment, watched, kind),
        }
    }

    fn open(&mut self, mut files: Vec<FileName>, out: &mut dyn FnMut(Report)) -> Vec<(FileName, Opened)> {
        files.sort_by_key(|f| self.pool.rank(&f.subject()));
        let mut all = Vec::new();
        while !files.is_empty() {
            let some: Vec<FileName> = files.drain(..files.len().min(OPENED_AT_ONCE)).collect();
            let asked: Vec<Asked<'_>> = some
                .iter()
                .map(|f| Asked {
                    subject: f.subject(),
                    task: Task::OpenSegment {
                        folder: f.directory.folder().clone(),
                        name: Bytes::from(&f.name),
                    },
                    fd: Some(f.directory.as_fd()),
                })
                .collect();
            let answers = self.pool.ask(&asked);
            drop(asked);
            for (file, answer) in some.into_iter().zip(answers) {
                let opened = match answer {
                    Ok((Outcome::Segment(segment), fds)) => {
                        let mut fds = fds.into_iter();
                        match fds.next() {
                            Some(fd) => Opened::Segment(Box::new(segment), fd, fds.next()),
                            None => Opened::Failed(Errno::MFILE.into(), Some(segment.facts.owner)),
                        }
                    }
                    Ok((Outcome::Failed(why, owner), _)) => Opened::Failed(why, owner),
                    Ok(_) | Err(Unanswered::Later) => Opened::Unanswered { is_reported: false },
                    Err(_) => Opened::Unanswered { is_reported: true },
                };
                all.push((file, opened));
            }
            self.read_first(out);
        }
        all
    }

    fn read(&mut self, processes: &[Running]) -> Vec<(SegmentId, Option<Reading>)> {
        let asked: Vec<Asked<'_>> = processes
            .iter()
            .map(|p| Asked {
                subject: Subject { user: Some(p.owner), object: Object::Process(p.pid) },
                task: Task::ReadProcess { pid: p.pid, start_ticks: p.start_ticks },
                fd: None,
            })
            .collect();
        let reading = |answer| match answer {
            Ok((Outcome::Reading(reading), _)) => Some(reading),
            _ => None,
        };
        let answers = self.pool.ask(&asked).into_iter().map(reading);
        processes.iter().map(|p| p.segment).zip(answers).collect()
    }

    fn reap(
        &mut self,
        directory: &Directory,
        keep_bytes: u64,
        keep_for: Option<Duration>,
        out: &mut dyn FnMut(Report),
    ) {
        let folder = directory.folder().clone();
        let object = Object::Directory(folder.id, folder.path.clone());
        let asked = Asked {
            subject: Subject { user: folder.owner, object },
            task: Task::Reap {
                folder,
                keep_bytes,
                keep_for_s: keep_for.map(|t| t.as_secs()),
                spared: self.pool.silent_users(),
            },
            fd: Some(directory.as_fd()),
        };
        if let Ok((Outcome::Removed(names), _)) = self.pool.ask_one(asked)
            && !names.is_empty()
        {
            out(Report::Removed(names.iter().map(|name| directory.path().join(&name.0)).collect()));
        }
    }

    fn write(&mut self, files: &[(FileName, FileId)], words: &[(u64, u64)], out: &mut dyn FnMut(Report)) {
        let asked: Vec<Asked<'_>> = files
            .iter()
            .map(|(f, id)| Asked {
                subject: f.subject(),
                task: Task::RequestDetail {
                    folder: f.directory.folder().clone(),
                    name: Bytes::from(&f.name),
                    file: *id,
                    words: words.to_vec(),
                },
                fd: Some(f.directory.as_fd()),
            })
            .collect();
        let failure = |answer| match answer {
            Ok((Outcome::Failed(why, _), _)) => Some(why),
            _ => None,
        };
        // One stands for all.
        if let Some(why) = self.pool.ask(&asked).into_iter().find_map(failure) {
            out(Report::Unwritten(why));
        }
    }

    /// Begins to read the next stack, and takes what has come.
    fn read_stacks(&mut self, out: &mut dyn FnMut(Report)) {
        if let Some((segment, watched, frames)) = self.stacks.poll() {
            let asked = Asked {
                subject: Subject { user: Some(watched.owner), object: Object::Process(watched.pid) },
                task: Task::FindThreads { pid: watched.pid },
                fd: None,
            };
            let threads = match self.pool.ask_one(asked) {
                Ok((Outcome::Texts(threads), _)) => threads,
                _ => Vec::new(),
            };
            out(Report::Stack(segment, Answer { frames, threads }));
        }
    }
}

/// How long the thread waits for an order, and while a stack is read.
const IDLE: Duration = Duration::from_secs(1);
const STACK_POLL: Duration = Duration::from_millis(20);
/// Segments that are opened between two looks at what comes first.
const OPENED_AT_ONCE: usize = 32;
