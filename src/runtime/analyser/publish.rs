//! The publication of verdicts: who holds which partition, and what is sent.
//!
//! A lease's number only grows, and is written with each verdict, so that whoever was asleep for longer than its lease
//! cannot overwrite what its follower said. Without JetStream there are no leases, and every analyser speaks.

use super::lease::{Leases, RENEW};
use super::pending_verdicts::LastWords;
use super::{Question, Reply, Say, Told, Verdict, kv_store};
use crate::cluster::message::VERSION;
use crate::cluster::subject;
use crate::model::{FindingEvent, FindingId};
use crate::runtime::daemon::{self, Asked, Lane, StateSender};
use async_nats::Client;
use async_nats::connection::State;
use async_nats::jetstream;
use async_nats::jetstream::kv::Store;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use prost::Message as _;
use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::time::Duration;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tracing::warn;

/// Partitions whose leases are held from the beginning, as `ringwatch cluster up` maps them.
const PARTITIONS: u32 = 8;
/// Why nothing is kept.
const NONE: &str = "no JetStream on these servers";
const NO_LEASES: &str = "JetStream renews no leases (no leader, or a full disk?)";
/// Rounds without any lease answered after which that is said; a new leader is elected in fewer.
const UNANSWERED: u32 = 5;
/// How soon JetStream is looked for again.
const AGAIN: Duration = Duration::from_secs(5);
/// Earlier verdicts are waited for so long before the first lease is taken; the rest comes later.
const BEFORE: Duration = Duration::from_secs(2);
/// Questions to agents that wait for the bus at most, and how often one looks whether it is back.
const WISHES: usize = 256;
const LOOK: Duration = Duration::from_millis(100);

/// The leases, and the bucket of findings.
async fn open(client: &Client, id: &str) -> Option<(Leases, Store)> {
    let mut js = jetstream::new(client.clone());
    js.set_timeout(kv_store::PATIENCE);
    // Three where there are so many servers, so that one may go.
    for replicas in [3, 1] {
        let leases = Leases::open(client, &js, id.to_owned(), replicas).await;
        let findings = kv_store::bucket(&js, kv_store::FINDINGS, replicas, kv_store::KEEP).await;
        if let (Some(leases), Some(findings)) = (leases, findings) {
            return Some((leases, findings));
        }
    }
    None
}

/// The partitions whose leases are wanted: those that were told of, and those that are there mostly.
fn wanted(known: &watch::Receiver<BTreeSet<u32>>) -> BTreeSet<u32> {
    (0..PARTITIONS).chain(known.borrow().iter().copied()).collect()
}

/// Holds the leases that give the right to speak, and says which; what was told before comes first.
#[expect(clippy::disallowed_methods, reason = "what was told before may take longer than one waits for it")]
async fn hold(
    client: Client,
    id: String,
    mut known: watch::Receiver<BTreeSet<u32>>,
    rights: UnboundedSender<Told>,
    bucket: watch::Sender<Option<Store>>,
    room: Arc<AtomicBool>,
) {
    let mut said = false;
    let (mut leases, findings) = loop {
        if let Some(open) = open(&client, &id).await {
            break open;
        }
        if !std::mem::replace(&mut said, true) {
            warn!("{NONE}: nobody decides which analyser speaks, and nothing is kept");
        }
        drop(rights.send(Told::Kept(Err(NONE))));
        let until = Instant::now() + AGAIN;
        loop {
            let every = wanted(&known).into_iter().map(|p| (p, 0)).collect();
            drop(rights.send(Told::Leases(every)));
            match tokio::time::timeout_at(until, known.changed()).await {
                Ok(Ok(())) => {}
                // The state has ended.
                Ok(Err(_)) => return,
                Err(_) => break,
            }
        }
    };
    bucket.send_replace(Some(findings.clone()));
    // Without a lease nothing is told, so what was told before is not told again.
    timeout(BEFORE, tokio::spawn(kv_store::read_kept(findings, id, rights.clone()))).await.ok();
    let mut tick = tokio::time::interval(RENEW);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = tick.tick() => {}
            Ok(()) = known.changed() => {}
        }
        leases.round(&wanted(&known)).await;
        let kept = match room.load(Ordering::Relaxed) {
            _ if leases.unanswered >= UNANSWERED => Err(NO_LEASES),
            true => Ok(()),
            false => Err(kv_store::NO_ROOM),
        };
        if rights.send(Told::Leases(leases.rights())).is_err() || rights.send(Told::Kept(kept)).is_err() {
            return;
        }
    }
}

/// A message that is published.
enum Saying {
    /// A question to agents, and its subject.
    Wish(String, Vec<u8>),
    Verdict(Arc<Verdict>),
}

async fn publish(client: Client, on: String, text: Vec<u8>, of: Option<FindingId>) -> Option<FindingId> {
    drop(client.publish(on, text.into()).await);
    of
}

/// Publishes what is said. While the bus cannot be reached the last word on each finding waits, and some questions do.
async fn publish_all(client: Client, mut sayings: UnboundedReceiver<Saying>) {
    let mut wishes: VecDeque<(String, Vec<u8>)> = VecDeque::new();
    let mut dropped = 0u64;
    let mut verdicts = LastWords::default();
    // One after the other, while more is heard.
    let mut under_way = FuturesUnordered::new();
    loop {
        if under_way.is_empty() && client.connection_state() == State::Connected {
            if let Some((on, wish)) = wishes.pop_front() {
                under_way.push(publish(client.clone(), on, wish, None));
            } else if let Some(v) = verdicts.take() {
                let on = format!("{}.verdict.{}.{}", subject::ROOT, v.right.partition, v.finding.id);
                match serde_json::to_vec(&*v) {
                    Ok(text) => under_way.push(publish(client.clone(), on, text, Some(v.finding.id))),
                    Err(_) => verdicts.done(v.finding.id),
                }
            }
            if let n @ 1.. = std::mem::take(&mut dropped) {
                warn!("{n} questions to agents were dropped while the bus could not be reached");
            }
        }
        let waits = under_way.is_empty() && (verdicts.is_ready() || !wishes.is_empty());
        tokio::select! {
            said = sayings.recv() => match said {
                Some(Saying::Wish(on, wish)) => {
                    wishes.push_back((on, wish));
                    if wishes.len() > WISHES {
                        wishes.pop_front();
                        dropped += 1;
                    }
                }
                Some(Saying::Verdict(v)) => verdicts.put(v, true),
                None => return,
            },
            Some(of) = under_way.next() => {
                if let Some(id) = of {
                    verdicts.done(id);
                }
            }
            () = sleep(LOOK), if waits => {}
        }
    }
}

/// Says what the state has to say, and tells it what it may say and what others have said.
///
/// Nothing here waits for the bus or for JetStream: what these do not take waits elsewhere, and is bounded there.
#[expect(clippy::disallowed_methods, reason = "what JetStream keeps must not hold up what is said")]
pub(super) async fn speak(
    client: Client,
    id: String,
    known: watch::Receiver<BTreeSet<u32>>,
    mut sayings: UnboundedReceiver<Say>,
    tell: Sender<Told>,
    mut told: impl FnMut(&FindingEvent) + Send + 'static,
) {
    let Ok(mut others) = client.subscribe(format!("{}.verdict.>", subject::ROOT)).await else { return };
    let (rights, mut new_rights) = tokio::sync::mpsc::unbounded_channel();
    let (keep, keeping) = tokio::sync::mpsc::unbounded_channel();
    let (publish, publishing) = tokio::sync::mpsc::unbounded_channel();
    let (bucket, findings) = watch::channel(None);
    let room = Arc::new(AtomicBool::new(true));
    tokio::spawn(kv_store::keep_all(client.clone(), findings, keeping, Arc::clone(&room)));
    tokio::spawn(publish_all(client.clone(), publishing));
    tokio::spawn(hold(client, id.clone(), known, rights, bucket, room));
    loop {
        tokio::select! {
            Some(told) = new_rights.recv() => drop(tell.send(told)),
            Some(m) = others.next() => {
                if let Some(v) = Verdict::read(&m.payload).filter(|v| v.analyser != id) {
                    drop(tell.send(Told::Verdict(Box::new(v))));
                }
            }
            Some(say) = sayings.recv() => match say {
                Say::Wish { node, wish } => {
                    let to = node.map_or_else(|| "all".to_owned(), |n| subject::token(&n));
                    let on = format!("{}.wish.{to}", subject::ROOT);
                    drop(publish.send(Saying::Wish(on, wish.encode_to_vec())));
                }
                Say::Verdict { finding, right, change } => {
                    if let Some(change) = change {
                        told(&FindingEvent { change, finding: (*finding).clone() });
                    }
                    let analyser = id.clone();
                    let verdict = Verdict { ringwatch: VERSION, analyser, right, finding: *finding };
                    let verdict = Arc::new(verdict);
                    drop(publish.send(Saying::Verdict(Arc::clone(&verdict))));
                    drop(keep.send(verdict));
                }
            },
            else => return,
        }
    }
}

/// Answers readers: each analyser for the partitions it speaks for.
pub(super) async fn answer(client: Client, state: StateSender) {
    let Ok(mut questions) = client.subscribe(format!("{}.read.>", subject::ROOT)).await else { return };
    let snapshot = format!("{}.read.snapshot", subject::ROOT);
    while let Some(m) = questions.next().await {
        let Some(reply_to) = m.reply else { continue };
        let answer = if m.subject.as_str() == snapshot {
            // Who asks for what is not known here hears nothing.
            let Some(q) = Question::read(&m.payload) else { continue };
            match daemon::ask(&state, Lane::Trusted, |reply| Asked::Glance { question: Box::new(q), reply })
                .await
            {
                Some(answer) => serde_json::to_vec(&*answer),
                None => continue,
            }
        } else {
            match daemon::ask(&state, Lane::Trusted, Asked::Cluster).await {
                Some(reply) => serde_json::to_vec(&*reply),
                None => serde_json::to_vec(&Reply::default()),
            }
        };
        if let Ok(text) = answer {
            drop(client.publish(reply_to, text.into()).await);
        }
    }
}
