//! Leases: who speaks for which partition.
//!
//! A lease is a key with a time to live in a bucket of JetStream: who made it renews it, and when it is gone another
//! makes it. What is written always expires, and only in the place of what was read, so that two never hold one.

use super::kv_store;
use async_nats::Client;
use async_nats::connection::State;
use async_nats::header::NATS_MARKER_REASON;
use async_nats::jetstream::Context;
use async_nats::jetstream::context::PublishErrorKind;
use async_nats::jetstream::kv::Store;
use async_nats::jetstream::message::PublishMessage;
use async_nats::jetstream::stream::LastRawMessageErrorKind;
use futures_util::future::join_all;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use tokio::time::{Instant, timeout};
use tracing::warn;

/// The bucket.
const LEASES: &str = "ringwatch-leases";
/// A lease that is not renewed for so long is gone.
const LEASE: Duration = Duration::from_millis(1000);
/// How often a lease is renewed, and one that is free is asked for. A lease takes three answers at most, and waits for
/// each no longer than this: less than a lease for all of them.
pub(super) const RENEW: Duration = Duration::from_millis(300);
/// Another's lease that is neither renewed nor expires for so long belongs to nobody: an older analyser could leave
/// one without a time to live.
const STUCK: Duration = Duration::from_secs(30);
/// How a bucket says that a key is gone.
const OPERATION: &str = "KV-Operation";

pub(super) struct Leases {
    client: Client,
    js: Context,
    store: Store,
    /// Unlike that of any other run, on whatever machine: a lease that carries it is ours.
    id: String,
    /// By partition: the lease's first number, which fences, and its last, by which it is renewed.
    held: BTreeMap<u32, (u64, u64)>,
    /// The leases of others: the number, and since when it has been this one.
    others: BTreeMap<u32, (u64, Instant)>,
    /// Rounds, up to the last one, in which nothing was answered.
    pub(super) unanswered: u32,
}

/// The fate of a lease.
enum Lease {
    /// It is held: its first and its last number.
    Held(u64, u64),
    /// Another one has it, with this number where it was read.
    Others(Option<u64>),
    /// Nobody answered; what was held is held.
    Unknown,
}

/// The content of a lease's key.
enum Found {
    /// Nobody's: nothing, which has the number 0, or what says that it is gone, with its number.
    Free(u64),
    /// The lease of this analyser.
    Own(u64),
    Others(u64),
}

/// The fate of a write.
enum Written {
    /// Its number.
    Yes(u64),
    /// Another was faster.
    Late,
    /// Nobody said.
    Unknown,
}

impl Leases {
    pub(super) async fn open(client: &Client, js: &Context, id: String, replicas: usize) -> Option<Self> {
        let store = kv_store::bucket(js, LEASES, replicas, Duration::ZERO).await?;
        let (client, js) = (client.clone(), js.clone());
        Some(Leases { client, js, store, id, held: BTreeMap::new(), others: BTreeMap::new(), unanswered: 0 })
    }

    /// Renews what is held and takes what is free; all at once, since a lease does not wait for its neighbours.
    pub(super) async fn round(&mut self, partitions: &BTreeSet<u32>) {
        // What is asked while nobody listens waits until somebody does, and is old by then.
        if self.client.connection_state() != State::Connected {
            self.unanswered = self.unanswered.saturating_add(1);
            return;
        }
        let all = join_all(partitions.iter().map(|p| self.lease(*p))).await;
        let answered = all.iter().any(|l| !matches!(l, Lease::Unknown));
        self.unanswered = if answered { 0 } else { self.unanswered.saturating_add(1) };
        let mut held = BTreeMap::new();
        for (p, lease) in partitions.iter().zip(all) {
            let known = self.others.remove(p);
            match lease {
                Lease::Held(first, last) => {
                    if let Some((_, at)) = known.filter(|(_, at)| at.elapsed() >= STUCK) {
                        let s = at.elapsed().as_secs();
                        warn!(
                            "the lease of partition {p} was not renewed for {s} s and did not expire: \
                             it is taken from whoever left it"
                        );
                    }
                    held.insert(*p, (first, last));
                }
                Lease::Others(Some(n)) => {
                    let same = known.filter(|(known, _)| *known == n);
                    self.others.insert(*p, same.unwrap_or_else(|| (n, Instant::now())));
                }
                Lease::Others(None) => {}
                Lease::Unknown => {
                    held.extend(self.held.get(p).map(|h| (*p, *h)));
                    self.others.extend(known.map(|o| (*p, o)));
                }
            }
        }
        self.held = held;
    }

    /// The lease of a partition, renewed or taken.
    async fn lease(&self, partition: u32) -> Lease {
        let key = format!("$KV.{LEASES}.p{partition}");
        let held = self.held.get(&partition).copied();
        if let Some((first, last)) = held
            && let Written::Yes(now) = self.write(&key, last).await
        {
            return Lease::Held(first, now);
        }
        let before = match (self.read(&key).await, held) {
            // Without an answer nobody can have taken it until it has expired, and while JetStream has no leader it
            // does not expire; what is written is fenced anyway.
            (None, _) => return Lease::Unknown,
            // It was renewed, and only the answer was lost; or it is not renewed any more, and expires.
            (Some(Found::Own(n)), Some((first, last))) if n > last => return Lease::Held(first, n),
            (Some(Found::Own(_)), Some(_)) => return Lease::Unknown,
            // It was taken, and the answer was lost.
            (Some(Found::Own(n)), None) => return Lease::Held(n, n),
            (Some(Found::Others(n)), _) => match self.others.get(&partition) {
                Some((known, at)) if *known == n && at.elapsed() >= STUCK => n,
                _ => return Lease::Others(Some(n)),
            },
            (Some(Found::Free(n)), _) => n,
        };
        match self.write(&key, before).await {
            Written::Yes(n) => Lease::Held(n, n),
            Written::Late => Lease::Others(None),
            Written::Unknown => Lease::Unknown,
        }
    }

    /// Writes a lease that expires, in the place of what has this number.
    async fn write(&self, key: &str, before: u64) -> Written {
        let payload = self.id.clone().into_bytes().into();
        let message =
            PublishMessage::build().payload(payload).ttl(LEASE).expected_last_subject_sequence(before);
        let acked = async { self.js.send_publish(key.to_owned(), message).await?.await };
        match timeout(RENEW, acked).await {
            Ok(Ok(ack)) => Written::Yes(ack.sequence),
            Ok(Err(e)) if e.kind() == PublishErrorKind::WrongLastSequence => Written::Late,
            Ok(Err(_)) | Err(_) => Written::Unknown,
        }
    }

    /// Reads a lease's key, by whoever leads the bucket; absent where nobody answers.
    async fn read(&self, key: &str) -> Option<Found> {
        match timeout(RENEW, self.store.stream.get_last_raw_message_by_subject(key)).await.ok()? {
            Ok(m) if m.headers.get(NATS_MARKER_REASON).is_some() => Some(Found::Free(m.sequence)),
            Ok(m) if m.headers.get(OPERATION).is_some_and(|o| o.as_str() != "PUT") => {
                Some(Found::Free(m.sequence))
            }
            Ok(m) if m.payload == self.id.as_bytes() => Some(Found::Own(m.sequence)),
            Ok(m) => Some(Found::Others(m.sequence)),
            Err(e) if e.kind() == LastRawMessageErrorKind::NoMessageFound => Some(Found::Free(0)),
            Err(_) => None,
        }
    }

    /// The partitions whose leases are held, with the leases' numbers.
    pub(super) fn rights(&self) -> BTreeMap<u32, u64> {
        self.held.iter().map(|(p, (first, _))| (*p, *first)).collect()
    }
}
