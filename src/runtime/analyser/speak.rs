//! Who speaks for which partition, and what is said.
//!
//! A lease is a key with a time to live in a bucket of JetStream: who made it renews it, and when it is gone another
//! makes it. Its number only grows, and is written with each verdict, so that whoever was asleep for longer than its
//! lease cannot overwrite what its follower said. Without JetStream there are no leases, and every analyser speaks.

use super::{Question, Reply, Say, Told, Verdict};
use crate::cluster::message::VERSION;
use crate::cluster::subject;
use crate::model::{Finding, FindingId};
use crate::runtime::daemon::{self, Asked};
use async_nats::Client;
use async_nats::jetstream::kv::{self, Store};
use async_nats::jetstream::message::PublishMessage;
use async_nats::jetstream::{self, Context};
use futures_util::StreamExt;
use futures_util::future::join_all;
use prost::Message as _;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, SyncSender};
use std::time::Duration;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

/// The buckets.
const LEASES: &str = "ringwatch-leases";
const FINDINGS: &str = "ringwatch-findings";
/// A lease that is not renewed for so long is gone.
const LEASE: Duration = Duration::from_millis(1000);
/// How often a lease is renewed, and one that is free is asked for.
const RENEW: Duration = Duration::from_millis(300);
/// How long JetStream may take to answer; the live way does not wait for it.
const PATIENCE: Duration = Duration::from_millis(2000);
/// Partitions whose leases are held from the beginning, as `ringwatch cluster up` maps them.
const PARTITIONS: u32 = 8;
/// Findings are kept for so long.
const KEEP: Duration = Duration::from_secs(7 * 24 * 3600);

/// Why nothing is kept.
const NONE: &str = "no JetStream on these servers";
const NO_LEASES: &str = "JetStream renews no leases (no leader, or a full disk?)";
const NO_ROOM: &str = "JetStream takes no verdicts (no leader, or a full disk?)";
/// Rounds without any lease answered after which that is said; a new leader is elected in fewer.
const UNANSWERED: u32 = 5;
/// How soon what was not kept is tried again, and how many verdicts wait for that at most.
const AGAIN: Duration = Duration::from_secs(1);
const WAITING: usize = 4096;

struct Leases {
    js: Context,
    store: Store,
    id: String,
    /// By partition: the lease's first number, which fences, and its last, by which it is renewed.
    held: BTreeMap<u32, (u64, u64)>,
    /// Rounds, up to the last one, in which nothing was answered.
    unanswered: u32,
}

/// What became of a lease.
enum Lease {
    /// It is held: its first and its last number.
    Held(u64, u64),
    /// Another one has it.
    Others,
    /// Nobody answered; what was held is held.
    Unknown(Option<(u64, u64)>),
}

async fn bucket(js: &Context, name: &str, replicas: usize, max_age: Duration) -> Option<Store> {
    if let Ok(store) = js.get_key_value(name).await {
        return Some(store);
    }
    let config = kv::Config {
        bucket: name.to_owned(),
        num_replicas: replicas,
        max_age,
        limit_markers: Some(Duration::from_secs(60)),
        ..kv::Config::default()
    };
    match js.create_key_value(config).await {
        Ok(store) => Some(store),
        // Another analyser may have made it a moment ago.
        Err(_) => js.get_key_value(name).await.ok(),
    }
}

impl Leases {
    async fn open(client: &Client, id: String) -> Option<(Self, Store)> {
        let mut js = jetstream::new(client.clone());
        js.set_timeout(PATIENCE);
        // Three where there are so many servers, so that one may go.
        for replicas in [3, 1] {
            let leases = bucket(&js, LEASES, replicas, Duration::ZERO).await;
            let findings = bucket(&js, FINDINGS, replicas, KEEP).await;
            if let (Some(store), Some(findings)) = (leases, findings) {
                return Some((Leases { js, store, id, held: BTreeMap::new(), unanswered: 0 }, findings));
            }
        }
        None
    }

    fn payload(&self) -> bytes::Bytes {
        self.id.clone().into_bytes().into()
    }

    /// Renews what is held and takes what is free; all at once, since a lease does not wait for its neighbours.
    async fn round(&mut self, partitions: &BTreeSet<u32>) {
        let all = join_all(partitions.iter().map(|p| self.lease(*p))).await;
        let answered = all.iter().any(|l| !matches!(l, Lease::Unknown(_)));
        self.unanswered = if answered { 0 } else { self.unanswered.saturating_add(1) };
        let held = |l| match l {
            Lease::Held(first, last) => Some((first, last)),
            Lease::Others => None,
            Lease::Unknown(held) => held,
        };
        self.held = partitions.iter().zip(all).filter_map(|(p, l)| Some((*p, held(l)?))).collect();
    }

    /// The lease of a partition, renewed or taken.
    async fn lease(&self, partition: u32) -> Lease {
        let key = format!("p{partition}");
        if let Some((first, last)) = self.held.get(&partition).copied() {
            let subject = format!("$KV.{LEASES}.{key}");
            let message = PublishMessage::build()
                .payload(self.payload())
                .ttl(LEASE)
                .expected_last_subject_sequence(last);
            let acked = async { self.js.send_publish(subject, message).await.ok()?.await.ok() };
            if let Ok(Some(ack)) = timeout(RENEW, acked).await {
                return Lease::Held(first, ack.sequence);
            }
            match timeout(RENEW, self.store.entry(&key)).await {
                // It was renewed, and only the answer was lost; or it is not renewed any more, and expires.
                Ok(Ok(Some(e))) if e.operation == kv::Operation::Put && e.value == self.payload() => {
                    return if e.revision > last {
                        Lease::Held(first, e.revision)
                    } else {
                        Lease::Unknown(Some((first, last)))
                    };
                }
                Ok(Ok(Some(e))) if e.operation == kv::Operation::Put => return Lease::Others,
                // It has expired.
                Ok(Ok(_)) => {}
                // Without an answer nobody can have taken it until it has expired, and while JetStream has no leader it
                // does not expire; what is written is fenced anyway.
                Ok(Err(_)) | Err(_) => return Lease::Unknown(Some((first, last))),
            }
        }
        match timeout(RENEW, self.store.create_with_ttl(&key, self.payload(), LEASE)).await {
            Ok(Ok(revision)) => Lease::Held(revision, revision),
            Ok(Err(e)) if e.kind() == kv::CreateErrorKind::AlreadyExists => Lease::Others,
            Ok(Err(_)) | Err(_) => Lease::Unknown(None),
        }
    }

    fn rights(&self) -> BTreeMap<u32, u64> {
        self.held.iter().map(|(p, (first, _))| (*p, *first)).collect()
    }
}

/// Keeps a verdict, unless something was said about it by a better right. False where JetStream did not take it.
async fn keep(store: &Store, verdict: &Verdict) -> bool {
    let key = verdict.finding.id.to_string();
    let Ok(value) = serde_json::to_vec(verdict) else { return true };
    for _ in 0..3 {
        let written = match store.entry(&key).await {
            Ok(Some(entry)) if entry.operation == kv::Operation::Put => {
                let known = serde_json::from_slice::<Verdict>(&entry.value).ok();
                if known.is_some_and(|k| !verdict.right.replaces(k.right)) {
                    return true;
                }
                store.update(&key, value.clone().into(), entry.revision).await.is_ok()
            }
            Ok(_) => store.create(&key, value.clone().into()).await.is_ok(),
            Err(_) => false,
        };
        if written {
            return true;
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    false
}

/// Keeps verdicts as they come. What JetStream does not take waits for it, the last word on each finding.
async fn keep_all(store: Store, mut verdicts: UnboundedReceiver<Verdict>, room: Arc<AtomicBool>) {
    let mut waiting: BTreeMap<FindingId, Verdict> = BTreeMap::new();
    loop {
        let next = match waiting.is_empty() {
            true => Some(verdicts.recv().await),
            false => timeout(AGAIN, verdicts.recv()).await.ok(),
        };
        match next {
            Some(Some(v)) => drop(waiting.insert(v.finding.id, v)),
            Some(None) => return,
            None => {}
        }
        while let Ok(v) = verdicts.try_recv() {
            waiting.insert(v.finding.id, v);
        }
        while waiting.len() > WAITING {
            waiting.pop_first();
        }
        while let Some((id, v)) = waiting.pop_first() {
            if !keep(&store, &v).await {
                waiting.insert(id, v);
                break;
            }
        }
        let all = waiting.is_empty();
        match (room.swap(all, Ordering::Relaxed), all) {
            (true, false) => eprintln!("ringwatch: {NO_ROOM}; they are told all the same"),
            (false, true) => eprintln!("ringwatch: JetStream keeps verdicts again"),
            _ => {}
        }
    }
}

/// The partitions whose leases are wanted: those that were told of, and those that are there mostly.
fn wanted(known: &watch::Receiver<BTreeSet<u32>>) -> BTreeSet<u32> {
    (0..PARTITIONS).chain(known.borrow().iter().copied()).collect()
}

/// Says what the state has to say, and holds the leases that give the right to.
#[expect(clippy::disallowed_methods, reason = "what JetStream keeps must not hold up what is said")]
pub(super) async fn speak(
    client: Client,
    id: String,
    mut known: watch::Receiver<BTreeSet<u32>>,
    mut sayings: UnboundedReceiver<Say>,
    tell: Sender<Told>,
    mut told: impl FnMut(&Finding) + Send + 'static,
) {
    let Ok(mut others) = client.subscribe(format!("{}.verdict.>", subject::ROOT)).await else { return };
    let (rights, mut new_rights) = tokio::sync::mpsc::unbounded_channel();
    let (kept, keeping) = tokio::sync::mpsc::unbounded_channel::<Verdict>();
    let (own, holder) = (id.clone(), client.clone());
    tokio::spawn(async move {
        let mut said = false;
        let (mut leases, store) = loop {
            if let Some(open) = Leases::open(&holder, own.clone()).await {
                break open;
            }
            if !std::mem::replace(&mut said, true) {
                eprintln!("ringwatch: {NONE}: nobody decides which analyser speaks, and nothing is kept");
            }
            drop(rights.send(Told::Kept(Err(NONE))));
            let until = Instant::now() + Duration::from_secs(5);
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
        let room = Arc::new(AtomicBool::new(true));
        tokio::spawn(keep_all(store, keeping, Arc::clone(&room)));
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
                false => Err(NO_ROOM),
            };
            if rights.send(Told::Leases(leases.rights())).is_err() || rights.send(Told::Kept(kept)).is_err() {
                return;
            }
        }
    });
    loop {
        tokio::select! {
            Some(told) = new_rights.recv() => drop(tell.send(told)),
            Some(m) = others.next() => {
                if let Ok(v) = serde_json::from_slice::<Verdict>(&m.payload)
                    && v.ringwatch == VERSION
                    && v.analyser != id
                {
                    let (id, open) = (v.finding.id.0, v.finding.open);
                    drop(tell.send(Told::Verdict { id, open, right: v.right }));
                }
            }
            Some(say) = sayings.recv() => match say {
                Say::Wish { node, wish } => {
                    let to = node.map_or_else(|| "all".to_owned(), |n| subject::token(&n));
                    drop(client.publish(format!("{}.wish.{to}", subject::ROOT), wish.encode_to_vec().into()).await);
                }
                Say::Verdict { finding, right, fresh } => {
                    if fresh {
                        told(&finding);
                    }
                    let on = format!("{}.verdict.{}.{}", subject::ROOT, right.partition, finding.id);
                    let verdict =
                        Verdict { ringwatch: VERSION, analyser: id.clone(), right, finding: *finding };
                    if let Ok(text) = serde_json::to_vec(&verdict) {
                        drop(client.publish(on, text.into()).await);
                    }
                    drop(kept.send(verdict));
                }
            },
            else => return,
        }
    }
}

/// Answers readers: each analyser for the partitions it speaks for.
pub(super) async fn answer(client: Client, ask: SyncSender<Asked>) {
    let Ok(mut questions) = client.subscribe(format!("{}.read.>", subject::ROOT)).await else { return };
    let snapshot = format!("{}.read.snapshot", subject::ROOT);
    while let Some(m) = questions.next().await {
        let Some(reply_to) = m.reply else { continue };
        let answer = if m.subject.as_str() == snapshot {
            // Who asks for what is not known here hears nothing.
            let Some(q) = Question::read(&m.payload) else { continue };
            match daemon::ask(&ask, |reply| Asked::Glance { question: Box::new(q), reply }).await {
                Some(answer) => serde_json::to_vec(&*answer),
                None => continue,
            }
        } else {
            match daemon::ask(&ask, Asked::Cluster).await {
                Some(reply) => serde_json::to_vec(&*reply),
                None => serde_json::to_vec(&Reply::default()),
            }
        };
        if let Ok(text) = answer {
            drop(client.publish(reply_to, text.into()).await);
        }
    }
}
