//! The queue of the thread that owns a daemon's state: messages of its own process, and questions in two lanes.
//!
//! Messages cannot be displaced by questions, and questions of everybody cannot displace those of root, of the exporters and
//! of the bus. Both lanes are served in turn, so neither starves the other.

use super::requests::{Asked, Message};
use crate::cluster::message::Wish;
use crate::config::Config;
use crate::export::otlp::Batch;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// The lane of a client, which decides how many of its questions may wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::runtime) enum Lane {
    /// Root's screens, exporters and the bus: each waits for its answer before it asks again.
    Trusted,
    /// HTTP, and users' screens. Both ask one question at a time, so the queue is short.
    Public,
}

/// Questions that may wait in a lane.
const TRUSTED: usize = 128;
const PUBLIC: usize = 8;
/// Analysers' requests that may wait: five seconds of what the bus lets through.
const WISHES: usize = 256;

/// The waiting messages and questions.
#[derive(Debug, Default)]
struct Waiting {
    /// Nobody takes anything any more.
    closed: bool,
    to_end: bool,
    /// A followed process has ended; how many have does not matter.
    ended: bool,
    /// The last ones that were read.
    settings: Option<Box<Config>>,
    refresh: bool,
    wishes: VecDeque<Box<Wish>>,
    /// The sender has one under way at most.
    returned: VecDeque<Box<Batch>>,
    trusted: VecDeque<Asked>,
    public: VecDeque<Asked>,
    /// The lane that comes next.
    public_next: bool,
}

#[derive(Debug, Default)]
struct Shared {
    waiting: Mutex<Waiting>,
    arrived: Condvar,
}

impl Shared {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sends to the thread that owns the state, without waiting.
#[derive(Debug, Clone)]
pub(in crate::runtime) struct StateSender(Arc<Shared>);

/// The end of the thread that owns the state.
#[derive(Debug)]
pub(in crate::runtime) struct StateReceiver(Arc<Shared>);

/// The message or question that came first.
#[derive(Debug)]
pub(in crate::runtime) enum Received {
    /// A message of this process.
    Message(Message),
    /// A question.
    Asked(Asked),
    /// Nothing in time.
    Nothing,
}

/// A queue with its two ends.
pub(in crate::runtime) fn state_queue() -> (StateSender, StateReceiver) {
    let shared = Arc::new(Shared::default());
    (StateSender(Arc::clone(&shared)), StateReceiver(shared))
}

impl StateSender {
    /// Sends a message; false when the state has ended, or for an analyser's request that has no room.
    pub(in crate::runtime) fn send(&self, message: Message) -> bool {
        self.put(|waiting| {
            match message {
                Message::Ended => waiting.ended = true,
                Message::Settings(settings) => waiting.settings = Some(settings),
                Message::Refresh => waiting.refresh = true,
                Message::Wish(_) if waiting.wishes.len() >= WISHES => return false,
                Message::Wish(wish) => waiting.wishes.push_back(wish),
                Message::GiveBack(batch) => waiting.returned.push_back(batch),
                Message::End => waiting.to_end = true,
            }
            true
        })
    }

    /// Asks; false when the state has ended, or the lane is full.
    pub(super) fn ask(&self, lane: Lane, asked: Asked) -> bool {
        self.put(|waiting| {
            let (queue, most) = match lane {
                Lane::Trusted => (&mut waiting.trusted, TRUSTED),
                Lane::Public => (&mut waiting.public, PUBLIC),
            };
            if queue.len() >= most {
                queue.retain(|a| !a.is_given_up());
            }
            let has_room = queue.len() < most;
            if has_room {
                queue.push_back(asked);
            }
            has_room
        })
    }

    fn put(&self, put: impl FnOnce(&mut Waiting) -> bool) -> bool {
        let mut waiting = self.0.waiting();
        let is_taken = !waiting.closed && put(&mut waiting);
        drop(waiting);
        self.0.arrived.notify_one();
        is_taken
    }
}

impl StateReceiver {
    /// The next message or question; waits for one until then.
    pub(in crate::runtime) fn receive(&self, until: Instant) -> Received {
        let mut waiting = self.0.waiting();
        loop {
            if let Some(received) = waiting.next() {
                return received;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Received::Nothing;
            }
            let woken = self.0.arrived.wait_timeout(waiting, left);
            waiting = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for StateReceiver {
    fn drop(&mut self) {
        let mut waiting = self.0.waiting();
        // Whoever still waits for an answer learns that none will come.
        *waiting = Waiting { closed: true, ..Waiting::default() };
    }
}

impl Waiting {
    fn next(&mut self) -> Option<Received> {
        self.message().map(Received::Message).or_else(|| self.question().map(Received::Asked))
    }

    fn message(&mut self) -> Option<Message> {
        if std::mem::take(&mut self.to_end) {
            return Some(Message::End);
        }
        if std::mem::take(&mut self.ended) {
            return Some(Message::Ended);
        }
        if std::mem::take(&mut self.refresh) {
            return Some(Message::Refresh);
        }
        let settings = self.settings.take().map(Message::Settings);
        let returned = || self.returned.pop_front().map(Message::GiveBack);
        settings.or_else(returned).or_else(|| self.wishes.pop_front().map(Message::Wish))
    }

    /// The next question whose asker still waits, of both lanes in turn.
    fn question(&mut self) -> Option<Asked> {
        loop {
            self.public_next = !self.public_next;
            let asked = if self.public_next {
                self.public.pop_front().or_else(|| self.trusted.pop_front())
            } else {
                self.trusted.pop_front().or_else(|| self.public.pop_front())
            }?;
            if !asked.is_given_up() {
                return Some(asked);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::sync::oneshot;

    fn snapshot(uid: u32) -> (Asked, oneshot::Receiver<Box<crate::model::Snapshot>>) {
        let (reply, answer) = oneshot::channel();
        (Asked::Snapshot { uid: Some(uid), reply }, answer)
    }

    /// The waiting entries, in the order in which they are taken.
    fn taken(receiver: &StateReceiver) -> Vec<String> {
        let mut all = Vec::new();
        loop {
            match receiver.receive(Instant::now()) {
                Received::Nothing => return all,
                Received::Message(message) => all.push(format!("{message:?}")),
                Received::Asked(Asked::Snapshot { uid, .. }) => all.push(uid.unwrap().to_string()),
                Received::Asked(asked) => panic!("{asked:?}"),
            }
        }
    }

    #[test]
    fn a_flood_of_questions_leaves_messages_and_root_their_room() {
        let (sender, receiver) = state_queue();
        let mut answers = Vec::new();
        let mut ask = |lane, uid| {
            let (asked, answer) = snapshot(uid);
            answers.push(answer);
            sender.ask(lane, asked)
        };
        let had_room = (0..1000).filter(|_| ask(Lane::Public, 1)).count();
        assert_eq!(had_room, PUBLIC);
        assert!(ask(Lane::Trusted, 0) && ask(Lane::Trusted, 0));
        for message in [Message::Refresh, Message::Ended, Message::Ended] {
            assert!(sender.send(message));
        }
        let mut wanted = vec!["Ended", "Refresh", "1", "0", "1", "0"];
        wanted.resize(wanted.len() + PUBLIC - 2, "1");
        assert_eq!(taken(&receiver), wanted, "messages first, and both lanes in turn");
        assert!(sender.send(Message::End));
        assert_eq!(taken(&receiver), ["End"]);
    }

    #[test]
    fn questions_whose_askers_went_away_take_no_room() {
        let (sender, receiver) = state_queue();
        for uid in 0..PUBLIC as u32 {
            assert!(sender.ask(Lane::Public, snapshot(uid).0));
        }
        let (asked, answer) = snapshot(9);
        assert!(sender.ask(Lane::Public, asked));
        assert_eq!(taken(&receiver), ["9"]);
        drop(answer);
    }

    #[test]
    fn an_ended_state_takes_nothing_and_keeps_nobody_waiting() {
        let (sender, receiver) = state_queue();
        let (asked, mut answer) = snapshot(1);
        assert!(sender.ask(Lane::Trusted, asked));
        drop(receiver);
        assert!(matches!(answer.try_recv(), Err(oneshot::error::TryRecvError::Closed)));
        assert!(!sender.send(Message::Ended) && !sender.ask(Lane::Trusted, snapshot(1).0));
    }

    #[test]
    fn whoever_waits_is_woken() {
        let (sender, receiver) = state_queue();
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(20));
            sender.send(Message::Refresh);
        });
        let received = receiver.receive(Instant::now() + Duration::from_secs(60));
        assert!(matches!(received, Received::Message(Message::Refresh)), "{received:?}");
    }
}
