//! The probe at work, and those that are stuck.
//!
//! A stuck probe is killed and abandoned. Its user is *unresponsive* until it is gone, and for a while after that; a new
//! probe serves everybody else at once.

use super::answer::{Answered, Answerer};
use super::message::Task;
use super::parties::{Parties, StuckWith, Subject, Unanswered};
use super::process::{NoAnswer, ProbeProcess};
use super::{Outcome, ProbeCommand};
use crate::ingest::process::now_ns;
use crate::model::{Unread, UnreadReason};
use std::collections::VecDeque;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::process::Child;
use std::time::Instant;

/// Tasks of one request.
const TASKS_MAX: usize = 128;

/// A task, what it is about, and the descriptor that it needs.
#[derive(Debug)]
pub(in crate::ingest) struct Asked<'fd> {
    pub(in crate::ingest) subject: Subject,
    pub(in crate::ingest) task: Task,
    pub(in crate::ingest) fd: Option<BorrowedFd<'fd>>,
}

/// A probe that was killed, until it is gone.
#[derive(Debug)]
struct Abandoned {
    child: Child,
    /// With whom it is stuck, where it is.
    with: Option<StuckWith>,
}

#[derive(Debug)]
enum Way {
    /// By this process, where all is its own user's.
    Here(Box<Answerer>),
    Apart(ProbeCommand, Option<ProbeProcess>),
}

/// Has tasks done, by probes or by this process.
#[derive(Debug)]
pub(in crate::ingest) struct Pool {
    way: Way,
    abandoned: Vec<Abandoned>,
    next_number: u64,
    parties: Parties,
    /// Why no probe can be had.
    trouble: Option<String>,
}

impl Pool {
    /// Has all done by this process.
    pub(in crate::ingest) fn here() -> Self {
        Self::new(Way::Here(Box::default()))
    }

    /// Has all done by probes.
    pub(in crate::ingest) fn apart(command: ProbeCommand) -> Self {
        Self::new(Way::Apart(command, None))
    }

    fn new(way: Way) -> Self {
        Pool { way, abandoned: Vec::new(), next_number: 0, parties: Parties::default(), trouble: None }
    }

    /// Has a task done.
    pub(in crate::ingest) fn ask_one(&mut self, asked: Asked<'_>) -> Result<Answered, Unanswered> {
        self.ask(&[asked]).pop().unwrap_or(Err(Unanswered::NoProbe))
    }

    /// Has tasks done, one after the other, as far as their users let it.
    pub(in crate::ingest) fn ask(&mut self, asked: &[Asked<'_>]) -> Vec<Result<Answered, Unanswered>> {
        if let Way::Here(answerer) = &mut self.way {
            return asked.iter().map(|a| Ok(here(answerer, a))).collect();
        }
        let mut results: Vec<Result<Answered, Unanswered>> =
            asked.iter().map(|_| Err(Unanswered::NoProbe)).collect();
        let mut left: VecDeque<usize> = (0..asked.len()).collect();
        while !left.is_empty() {
            let stuck = self.stuck();
            let mut batch = Vec::new();
            while batch.len() < TASKS_MAX
                && let Some(n) = left.pop_front()
            {
                match asked.get(n).map(|a| self.parties.may_ask(&a.subject, &stuck, Instant::now())) {
                    Some(Ok(())) => batch.push(n),
                    Some(Err(why)) => set(&mut results, n, Err(why)),
                    None => {}
                }
            }
            if batch.is_empty() {
                break;
            }
            for n in self.exchange(asked, batch, &mut results).into_iter().rev() {
                left.push_front(n);
            }
        }
        results
    }

    /// Has some of these tasks done by a probe, at least one of them. Returns those that were not done, in their order.
    fn exchange(
        &mut self,
        asked: &[Asked<'_>],
        mut batch: Vec<usize>,
        results: &mut [Result<Answered, Unanswered>],
    ) -> Vec<usize> {
        let began = Instant::now();
        let tasks: Vec<_> = batch.iter().filter_map(|n| asked.get(*n)).map(|a| (&a.task, a.fd)).collect();
        let sent = self.running().and_then(|probe| probe.send(now_ns(), &tasks).map(|()| probe));
        let received = match sent {
            Ok(probe) => probe.receive(),
            Err(e) => {
                self.trouble = Some(e.to_string());
                return Vec::new();
            }
        };
        match received {
            Ok((probe, answers)) if !answers.is_empty() => {
                self.put_back(probe);
                self.trouble = None;
                let done = answers.len().min(batch.len());
                for (n, (outcome, took, fds)) in batch.drain(..done).zip(answers) {
                    if let Some(a) = asked.get(n) {
                        self.parties.answered(&a.subject, took, Instant::now());
                    }
                    set(results, n, Ok((outcome, fds)));
                }
                batch
            }
            Ok((probe, _)) => {
                self.abandon(probe.abandon(), None);
                self.trouble = Some("its answers are empty".to_owned());
                Vec::new()
            }
            Err(NoAnswer::Broken(child, why)) => {
                self.abandon(child, None);
                self.trouble = Some(why.to_string());
                Vec::new()
            }
            Err(NoAnswer::Stuck(at, child)) => {
                let n = batch.remove((at.task as usize).min(batch.len() - 1));
                let subject = asked.get(n).map(|a| a.subject.or_of(at.user));
                let number = self.abandon(child, subject.as_ref().map(Subject::is_of_root));
                if let Some(subject) = &subject {
                    self.parties.failed(subject, number, began.elapsed(), Instant::now());
                }
                set(results, n, Err(Unanswered::Unresponsive));
                batch
            }
        }
    }

    fn running(&mut self) -> std::io::Result<ProbeProcess> {
        match &mut self.way {
            Way::Apart(command, running) => {
                running.take().map_or_else(|| ProbeProcess::start(command, &[]), Ok)
            }
            Way::Here(_) => Err(std::io::ErrorKind::Unsupported.into()),
        }
    }

    fn put_back(&mut self, probe: ProbeProcess) {
        if let Way::Apart(_, running) = &mut self.way {
            *running = Some(probe);
        }
    }

    /// Keeps a killed probe until it is gone; returns its number.
    fn abandon(&mut self, child: Child, is_stuck_with_root: Option<bool>) -> u64 {
        let number = self.next_number;
        self.next_number += 1;
        let with = is_stuck_with_root.map(|is_of_root| StuckWith { number, is_of_root });
        self.abandoned.push(Abandoned { child, with });
        number
    }

    /// The probes that are stuck now.
    fn stuck(&mut self) -> Vec<StuckWith> {
        self.abandoned.retain_mut(|a| matches!(a.child.try_wait(), Ok(None)));
        self.abandoned.iter().filter_map(|a| a.with).collect()
    }

    /// A number by which tasks are ordered, so that those come first whose subjects are served first.
    pub(in crate::ingest) fn rank(&self, subject: &Subject) -> u8 {
        self.parties.rank(subject)
    }

    /// Users who do not answer.
    pub(in crate::ingest) fn silent_users(&self) -> Vec<u32> {
        self.parties.silent_users()
    }

    /// The parties that do not answer, and why nobody can be asked.
    pub(in crate::ingest) fn unread(&self) -> Vec<Unread> {
        let mut unread = self.parties.unread(Instant::now());
        unread.extend(self.trouble.as_ref().map(|why| Unread {
            path: "files and processes of all users".to_owned(),
            reason: UnreadReason::Io,
            detail: format!("the process that looks at them cannot be had: {why}"),
            owner: None,
        }));
        unread
    }
}

fn here(answerer: &mut Answerer, asked: &Asked<'_>) -> Answered {
    let fd = asked.fd.map(|fd| rustix::io::fcntl_dupfd_cloexec(fd, 0));
    match fd.transpose() {
        Ok(fd) => answerer.answer(&asked.task, fd, now_ns(), &mut |_| {}),
        Err(e) => (Outcome::Failed(e.into(), None), Vec::<OwnedFd>::new()),
    }
}

fn set(results: &mut [Result<Answered, Unanswered>], n: usize, result: Result<Answered, Unanswered>) {
    if let Some(place) = results.get_mut(n) {
        *place = result;
    }
}

#[cfg(test)]
mod tests {
    use super::super::parties::Object;
    use super::super::tests::command;
    use super::*;
    use crate::ingest::process_reading::Reading;
    use crate::model::ProcessState;
    use std::time::Duration;

    fn sleep(user: u32, ms: u64) -> Asked<'static> {
        let subject = Subject { user: Some(user), object: Object::Process(user) };
        Asked { subject, task: Task::Sleep { ms }, fd: None }
    }

    fn read(user: u32) -> Asked<'static> {
        let pid = std::process::id();
        let start_ticks = crate::ingest::process::stat(pid).expect("readable").expect("runs").start_ticks;
        let subject = Subject { user: Some(user), object: Object::Process(pid) };
        Asked { subject, task: Task::ReadProcess { pid, start_ticks }, fd: None }
    }

    fn is_read(result: &Result<Answered, Unanswered>) -> bool {
        let alive = |r: &Reading| !matches!(r.state, ProcessState::Gone(_));
        matches!(result, Ok((Outcome::Reading(r), _)) if alive(r))
    }

    #[test]
    fn a_user_who_hangs_costs_the_others_one_deadline() {
        let mut pool = Pool::apart(command());
        // The first probe takes a moment to start.
        assert!(is_read(&pool.ask_one(read(8))));
        let began = Instant::now();
        let results = pool.ask(&[read(8), sleep(7, 100_000), read(0), read(7), read(9)]);
        let took = began.elapsed();
        assert!(took < 5 * super::super::process::DEADLINE, "{took:?}");
        assert!([0, 2, 4].iter().all(|n| is_read(&results[*n])), "{results:?}");
        assert_eq!(results[1].as_ref().err(), Some(&Unanswered::Unresponsive));
        assert_eq!(results[3].as_ref().err(), Some(&Unanswered::Unresponsive));
        let unread = pool.unread();
        assert_eq!((unread.len(), unread[0].owner), (1, Some(7)), "{unread:?}");
        std::thread::sleep(Duration::from_millis(1100));
        assert!(is_read(&pool.ask_one(read(7))), "it answers again");
        assert_eq!(pool.unread(), []);
    }

    #[test]
    fn many_slow_tasks_of_one_request_are_done_in_turns() {
        let mut pool = Pool::apart(command());
        // Each is quicker than a deadline, and all together take longer than several.
        let asked: Vec<Asked<'_>> = (0..20).map(|_| sleep(0, 100)).collect();
        let results = pool.ask(&asked);
        assert!(results.iter().all(|r| matches!(r, Ok((Outcome::Done, _)))), "{results:?}");
        assert_eq!(pool.unread(), []);
    }

    #[test]
    fn without_a_probe_it_is_said_so() {
        let mut pool = Pool::apart(ProbeCommand::new("/nowhere/probe", &[]));
        assert_eq!(pool.ask_one(read(7)).err(), Some(Unanswered::NoProbe));
        let unread = pool.unread();
        assert_eq!((unread.len(), unread[0].reason), (1, UnreadReason::Io));
        let mut pool = Pool::apart(ProbeCommand::new("true", &[]));
        assert_eq!(pool.ask_one(read(7)).err(), Some(Unanswered::NoProbe));
    }
}
