//! Sends notices about findings to the receivers that the settings name.
//!
//! Each receiver has a queue of its own, so that a slow one keeps neither the state nor another receiver waiting. A user's jobs
//! take a part of a queue at most.

use crate::export::metrics::Exported;
use crate::export::notify::{self, Command, Failure, Notice, Notices, Poster, Settings, Webhook};
use crate::join::Join;
use crate::model::{Change, Finding, FindingEvent};
use crate::runtime::signals;
use rustix::process::{Pid, Signal, kill_process_group};
use std::collections::VecDeque;
use std::process::Stdio;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::task::JoinHandle;
use tracing::warn;

/// Notices that wait for one receiver at most, and of one user's jobs.
const WAITING_MAX: usize = 256;
const OF_USER_MAX: usize = 64;
/// The times before a webhook is called again.
const RETRY_AFTER: [Duration; 4] =
    [Duration::from_secs(1), Duration::from_secs(4), Duration::from_secs(15), Duration::from_secs(60)];
/// The time in which a program that is asked to end may do so.
const KILL_AFTER: Duration = Duration::from_secs(1);
/// The agent's variables that programs get too. All others may be secrets of the agent.
const PASSED_ON: [&str; 4] = ["PATH", "HOME", "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"];

const FULL: &str = "too many wait";
const FAILED: &str = "the receiver failed";
const REFUSED: &str = "the receiver refused it";

#[derive(Debug, Default)]
struct NoticeCounts {
    queued: AtomicU64,
    sent: AtomicU64,
    full: AtomicU64,
    failed: AtomicU64,
    refused: AtomicU64,
}

impl NoticeCounts {
    fn count(&self, outcome: &Result<(), Failure>) {
        self.queued.fetch_sub(1, Ordering::Relaxed);
        let counter = match outcome {
            Ok(()) => &self.sent,
            Err(Failure::Later(_)) => &self.failed,
            Err(Failure::Refused(_)) => &self.refused,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

/// The notices that wait for one receiver.
#[derive(Debug)]
struct Queue {
    state: Mutex<QueueState>,
    wake: tokio::sync::Notify,
    counts: Arc<NoticeCounts>,
}

#[derive(Debug, Default)]
struct QueueState {
    waiting: VecDeque<Notice>,
    is_closed: bool,
}

impl Queue {
    fn change<T>(&self, change: impl FnOnce(&mut QueueState) -> T) -> T {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Adds a notice, in the place of one about the same finding that still waits. False where there is no room.
    fn push(&self, mut notice: Notice) -> bool {
        let has_room = self.change(|q| {
            let same = q.waiting.iter().position(|w| w.finding.id == notice.finding.id);
            if let Some(at) = same {
                match (q.waiting[at].change, notice.change) {
                    // The receiver has not heard of it, and need not.
                    (Change::Opened, Change::Closed) => {
                        q.waiting.remove(at);
                        self.counts.queued.fetch_sub(1, Ordering::Relaxed);
                        return true;
                    }
                    (Change::Opened, _) => notice.change = Change::Opened,
                    _ => {}
                }
                q.waiting[at] = notice;
                return true;
            }
            let of_user = q.waiting.iter().filter(|w| w.owner == notice.owner).count();
            let has_room = q.waiting.len() < WAITING_MAX && of_user < OF_USER_MAX;
            if has_room {
                self.counts.queued.fetch_add(1, Ordering::Relaxed);
                q.waiting.push_back(notice);
            }
            has_room
        });
        if !has_room {
            self.counts.full.fetch_add(1, Ordering::Relaxed);
        }
        self.wake.notify_one();
        has_room
    }

    fn close(&self) {
        self.change(|q| q.is_closed = true);
        self.wake.notify_one();
    }

    /// The next notice; absent once the queue is closed and empty.
    async fn next(&self) -> Option<Notice> {
        loop {
            let (next, is_closed) = self.change(|q| (q.waiting.pop_front(), q.is_closed));
            if next.is_some() || is_closed {
                return next;
            }
            self.wake.notified().await;
        }
    }
}

/// A receiver as the owner of the findings sees it.
#[derive(Debug)]
struct Receiver {
    notices: Notices,
    queue: Arc<Queue>,
    /// Its queue was full at the last notice, which the log says once.
    is_full: bool,
}

/// Picks what each receiver has to hear of, and puts it into the receivers' queues.
#[derive(Debug)]
pub(in crate::runtime) struct Notifier {
    receivers: Vec<Receiver>,
    counts: Arc<NoticeCounts>,
}

/// The tasks that send. They end when the notifier is gone and their queues are empty.
#[derive(Debug)]
pub(in crate::runtime) struct Sending {
    tasks: Vec<JoinHandle<()>>,
    counts: Arc<NoticeCounts>,
}

impl Sending {
    /// Waits until they have ended, so long at most.
    pub(in crate::runtime) async fn end(self, at_most: Duration) {
        let all = async {
            for task in self.tasks {
                task.await.ok();
            }
        };
        if tokio::time::timeout(at_most, all).await.is_err() {
            let unsent = self.counts.queued.load(Ordering::Relaxed);
            warn!("{unsent} notices about findings are not sent, because this is the end");
        }
    }
}

impl Notifier {
    /// Starts a task for each receiver; absent where there is none.
    ///
    /// # Errors
    /// TLS cannot be set up.
    pub(in crate::runtime) fn start(
        settings: &Settings,
        node: &str,
    ) -> Result<Option<(Self, Sending)>, String> {
        if settings.webhooks.is_empty() && settings.commands.is_empty() {
            return Ok(None);
        }
        let counts = Arc::new(NoticeCounts::default());
        let (mut receivers, mut tasks) = (Vec::new(), Vec::new());
        let mut open = |least: notify::Least| {
            let (state, wake) = Default::default();
            let queue = Arc::new(Queue { state, wake, counts: Arc::clone(&counts) });
            let notices = Notices::new(node.to_owned(), least);
            receivers.push(Receiver { notices, queue: Arc::clone(&queue), is_full: false });
            queue
        };
        if !settings.webhooks.is_empty() {
            let poster = Poster::new()?;
            for hook in &settings.webhooks {
                if !poster.can_reach(hook) {
                    return Err(
                        "the system has no certificates to check receivers against: install ca-certificates"
                            .to_owned(),
                    );
                }
                let queue = open(hook.severity);
                tasks.push(spawn(post_all(poster.clone(), hook.clone(), queue)));
            }
        }
        for command in &settings.commands {
            let queue = open(command.severity);
            tasks.push(spawn(start_all(command.clone(), queue)));
        }
        let sending = Sending { tasks, counts: Arc::clone(&counts) };
        Ok(Some((Notifier { receivers, counts }, sending)))
    }

    /// Takes findings that an agent before this one has reported.
    pub(in crate::runtime) fn restore(&mut self, join: &Join, findings: &[Finding]) {
        self.receivers.iter_mut().for_each(|r| r.notices.restore(join, findings));
    }

    /// Takes a change of a finding.
    pub(in crate::runtime) fn event(&mut self, join: &Join, event: &FindingEvent) {
        for receiver in &mut self.receivers {
            let Some(notice) = receiver.notices.of(join, event) else { continue };
            let was_full = std::mem::replace(&mut receiver.is_full, !receiver.queue.push(notice));
            if receiver.is_full && !was_full {
                warn!("too many notices about findings wait for a receiver: more are lost, and counted");
            }
        }
    }

    /// The accounting so far.
    pub(in crate::runtime) fn exported(&self) -> Exported {
        let n = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let c = &self.counts;
        let lost = [(FULL, n(&c.full)), (FAILED, n(&c.failed)), (REFUSED, n(&c.refused))];
        Exported { signal: "notices", sent: n(&c.sent), queued: n(&c.queued), lost: lost.into() }
    }
}

impl Drop for Notifier {
    fn drop(&mut self) {
        self.receivers.iter().for_each(|r| r.queue.close());
    }
}

#[expect(clippy::disallowed_methods, reason = "here is where tasks are spawned")]
fn spawn(task: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
    tokio::spawn(task)
}

async fn post_all(poster: Poster, hook: Webhook, queue: Arc<Queue>) {
    while let Some(notice) = queue.next().await {
        let body = notify::body(&hook, &notice).to_string().into_bytes();
        let mut outcome = poster.post(&hook, body.clone()).await;
        for wait in RETRY_AFTER {
            if !matches!(outcome, Err(Failure::Later(_))) {
                break;
            }
            tokio::time::sleep(wait).await;
            outcome = poster.post(&hook, body.clone()).await;
        }
        if let Err(Failure::Later(why) | Failure::Refused(why)) = &outcome {
            warn!("a webhook did not take a notice about {}: {why}", notice.finding.kind.as_str());
        }
        queue.counts.count(&outcome);
    }
}

async fn start_all(command: Command, queue: Arc<Queue>) {
    while let Some(notice) = queue.next().await {
        let outcome = start(&command, &notice).await;
        if let Err(Failure::Later(why) | Failure::Refused(why)) = &outcome {
            let program = command.program.display();
            warn!("{program} failed for a notice about {}: {why}", notice.finding.kind.as_str());
        }
        queue.counts.count(&outcome);
    }
}

/// Starts a program for one notice and waits for its end. What it does cannot be done twice, so that it is not tried again.
async fn start(command: &Command, notice: &Notice) -> Result<(), Failure> {
    let json = notify::as_json(notice).to_string();
    let mut child = tokio::process::Command::new(&command.program);
    child
        .args(&command.arguments)
        .env_clear()
        .envs(PASSED_ON.iter().filter_map(|name| Some((name, std::env::var_os(name)?))))
        .envs(notify::variables(notice))
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0);
    signals::release(&mut child);
    let mut child = child.spawn().map_err(|e| Failure::Refused(format!("it cannot be started: {e}")))?;
    let group = child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
    let stdin = child.stdin.take();
    let end = async {
        // A program that does not read it ends all the same.
        if let Some(mut stdin) = stdin {
            stdin.write_all(json.as_bytes()).await.ok();
        }
        child.wait().await
    };
    match tokio::time::timeout(Duration::from_millis(command.timeout_ms), end).await {
        Ok(Ok(status)) if status.success() => Ok(()),
        Ok(Ok(status)) => Err(Failure::Later(format!("it ended with {status}"))),
        Ok(Err(e)) => Err(Failure::Later(format!("nothing is known of its end: {e}"))),
        Err(_) => {
            // Programs that it has started are in its group. A group that is gone already cannot be ended.
            for signal in [Signal::TERM, Signal::KILL] {
                group.and_then(|g| kill_process_group(g, signal).ok());
                drop(tokio::time::timeout(KILL_AFTER, child.wait()).await);
            }
            Err(Failure::Later(format!("it took longer than {} ms and was killed", command.timeout_ms)))
        }
    }
}

#[cfg(test)]
mod tests;
