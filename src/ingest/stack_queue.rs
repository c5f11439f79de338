//! The queue of processes whose stacks are read, each by a probe of its own.
//!
//! A tool may take seconds, and the watched process decides for how long. One runs at a time, since a control group has
//! room for one; users have their turns, and a tool that cannot be ended keeps the next one of its user alone waiting.

use super::probe::{Outcome, ProbeCommand, ProbeProcess, Task};
use super::process::now_ns;
use super::rights::Watched;
use super::stacks::StackKind;
use crate::model::SegmentId;
use std::collections::{BTreeMap, VecDeque};
use std::process::Child;
use std::time::{Duration, Instant};

/// A process is asked again after this.
const AGAIN: Duration = Duration::from_secs(30);
/// Processes of one user that wait, and users.
const WAITING_OF_USER_MAX: usize = 64;
const USERS_MAX: usize = 256;
/// A probe whose tool should have ended long ago is given up after this.
const TIME_MAX: Duration = Duration::from_secs(8);
/// Probes that are not gone: with so many, no other one is started but for root.
const LEFT_MAX: usize = 8;

/// A process that waits for its turn.
#[derive(Debug, Clone, Copy)]
struct Waiting {
    segment: SegmentId,
    watched: Watched,
    kind: StackKind,
}

/// The stack that is being read.
#[derive(Debug)]
struct Reading {
    of: Waiting,
    probe: ProbeProcess,
    since: Instant,
}

/// Processes whose stacks are wanted.
#[derive(Debug)]
pub(super) struct StackQueue {
    /// How probes are started; absent where none may be.
    command: Option<ProbeCommand>,
    by_user: BTreeMap<u32, VecDeque<Waiting>>,
    /// When each segment was asked about.
    asked: BTreeMap<SegmentId, Instant>,
    reading: Option<Reading>,
    last_user: u32,
    root_was_last: bool,
    /// Probes that wait for tools that do not end, or do not end themselves.
    left: Vec<(u32, Child)>,
}

/// A process, and its frames as far as they could be read.
pub(super) type Read = (SegmentId, Watched, Vec<String>);

impl StackQueue {
    pub(super) fn new(command: Option<ProbeCommand>) -> Self {
        StackQueue {
            command,
            by_user: BTreeMap::new(),
            asked: BTreeMap::new(),
            reading: None,
            last_user: 0,
            root_was_last: false,
            left: Vec::new(),
        }
    }

    /// Adds a process, unless it was asked about a short time ago.
    pub(super) fn push(&mut self, segment: SegmentId, watched: Watched, kind: StackKind) {
        self.asked.retain(|_, t| t.elapsed() < AGAIN);
        let is_full = self.by_user.len() >= USERS_MAX && !self.by_user.contains_key(&watched.owner);
        if self.command.is_none() || is_full || self.asked.contains_key(&segment) {
            return;
        }
        let of_user = self.by_user.entry(watched.owner).or_default();
        if of_user.len() < WAITING_OF_USER_MAX {
            of_user.push_back(Waiting { segment, watched, kind });
            self.asked.insert(segment, Instant::now());
        }
    }

    /// True while something is read, or is to be read next.
    pub(super) fn is_busy(&self) -> bool {
        self.reading.is_some() || !self.by_user.is_empty() && self.left.is_empty()
    }

    /// Takes what has come, and begins with the next one.
    pub(super) fn poll(&mut self) -> Option<Read> {
        let read = self.take();
        if self.reading.is_none() {
            self.begin();
        }
        read
    }

    fn take(&mut self) -> Option<Read> {
        let is_over = |r: &Reading| r.probe.has_answered() || r.since.elapsed() >= TIME_MAX;
        let Reading { of, probe, .. } = self.reading.take_if(|r| is_over(r))?;
        let (frames, child) = if probe.has_answered() {
            match probe.receive() {
                Ok((probe, answers)) => {
                    let frames = match answers.into_iter().next() {
                        Some((Outcome::Texts(frames), ..)) => frames,
                        _ => Vec::new(),
                    };
                    (frames, probe.end())
                }
                Err(e) => (Vec::new(), e.into_child()),
            }
        } else {
            (Vec::new(), probe.abandon())
        };
        self.left.push((of.watched.owner, child));
        Some((of.segment, of.watched, frames))
    }

    fn begin(&mut self) {
        self.left.retain_mut(|(_, child)| matches!(child.try_wait(), Ok(None)));
        let (Some(next), Some(command)) = (self.next(), &self.command) else { return };
        let Watched { pid, owner } = next.watched;
        let task = Task::ReadStack { pid, owner, kind: next.kind };
        // Whoever runs the tool finds it where this process would.
        let path = std::env::var_os("PATH").map(|path| ("PATH", path));
        let started = ProbeProcess::start(command, path.as_slice());
        if let Ok(probe) = started {
            match probe.send(now_ns(), &[(&task, None)]) {
                Ok(()) => self.reading = Some(Reading { of: next, probe, since: Instant::now() }),
                Err(_) => self.left.push((owner, probe.abandon())),
            }
        }
    }

    /// The next process: root's every second time, and the others' by user in turn.
    fn next(&mut self) -> Option<Waiting> {
        let is_blocked = |user: u32| {
            self.left.iter().any(|(of, _)| *of == user) || user != 0 && self.left.len() >= LEFT_MAX
        };
        let may = |user: &u32| !is_blocked(*user);
        let others = self.by_user.keys().copied().filter(|user| *user != 0);
        let later = others.clone().find(|user| *user > self.last_user && may(user));
        let of_users = later.or_else(|| others.clone().find(may));
        let root = self.by_user.contains_key(&0).then_some(0).filter(may);
        let user = if self.root_was_last { of_users.or(root) } else { root.or(of_users) }?;
        self.root_was_last = user == 0;
        if user != 0 {
            self.last_user = user;
        }
        let of_user = self.by_user.get_mut(&user)?;
        let next = of_user.pop_front();
        if of_user.is_empty() {
            self.by_user.remove(&user);
        }
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(users: &[u32]) -> StackQueue {
        let mut queue = StackQueue::new(Some(ProbeCommand::new("sleep", &["100"])));
        for (n, owner) in (0..).zip(users) {
            queue.push(SegmentId(n), Watched { pid: n as u32, owner: *owner }, StackKind::Python);
        }
        queue
    }

    fn order(queue: &mut StackQueue) -> Vec<u32> {
        std::iter::from_fn(|| queue.next().map(|w| w.watched.owner)).collect()
    }

    #[test]
    fn users_have_their_turns_and_root_every_second_one() {
        let mut queue = queue(&[7, 7, 7, 8, 9, 0, 0]);
        assert_eq!(order(&mut queue), [0, 7, 0, 8, 9, 7, 7]);
        assert!(!queue.is_busy());
    }

    #[test]
    fn a_process_is_asked_once_and_again_after_a_while() {
        let mut queue = queue(&[7]);
        queue.push(SegmentId(0), Watched { pid: 0, owner: 7 }, StackKind::Python);
        assert_eq!(order(&mut queue), [7]);
        queue.push(SegmentId(0), Watched { pid: 0, owner: 7 }, StackKind::Python);
        assert_eq!(order(&mut queue), [0; 0]);
        queue.asked.values_mut().for_each(|t| *t = t.checked_sub(AGAIN).expect("a past"));
        queue.push(SegmentId(0), Watched { pid: 0, owner: 7 }, StackKind::Python);
        assert_eq!(order(&mut queue), [7]);
    }

    #[test]
    fn a_user_whose_files_hold_tools_up_keeps_nobody_else_from_theirs() {
        let mut queue = queue(&[7, 8]);
        assert!(queue.poll().is_none() && queue.reading.is_some());
        let reading = queue.reading.as_mut().expect("begun");
        assert_eq!(reading.of.watched.owner, 7);
        reading.since = reading.since.checked_sub(TIME_MAX).expect("a past");
        // Its probe was given up, and is taken for one that cannot be killed.
        let (segment, _, frames) = queue.poll().expect("given up");
        assert_eq!((segment, frames.len()), (SegmentId(0), 0));
        assert_eq!(queue.reading.take().expect("the next one").of.watched.owner, 8);
        queue.left = vec![(7, crate::ingest::stacks::tests::sleeper())];
        queue.push(SegmentId(10), Watched { pid: 10, owner: 7 }, StackKind::Python);
        assert_eq!(order(&mut queue), [0; 0], "its slot is taken");
        queue.left.iter_mut().for_each(|(_, child)| child.kill().expect("our own"));
        queue.left.iter_mut().for_each(|(_, child)| assert!(child.wait().is_ok()));
        queue.begin();
        assert_eq!(queue.reading.expect("free again").of.watched.owner, 7);
    }
}
