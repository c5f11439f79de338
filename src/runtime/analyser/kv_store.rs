//! The bucket of findings: the last word on each is kept there, and whoever begins reads what was open before.

use super::pending_verdicts::LastWords;
use super::{TEXT, Told, Verdict};
use crate::cluster::from_json;
use async_nats::Client;
use async_nats::connection::State;
use async_nats::jetstream::Context;
use async_nats::jetstream::consumer::pull::OrderedConfig;
use async_nats::jetstream::kv::{self, CreateErrorKind, Operation, Store, UpdateErrorKind};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

/// The bucket.
pub(super) const FINDINGS: &str = "ringwatch-findings";
/// Findings are kept for so long.
pub(super) const KEEP: Duration = Duration::from_secs(7 * 24 * 3600);
/// How long JetStream may take to answer; the live way does not wait for it.
pub(super) const PATIENCE: Duration = Duration::from_millis(2000);
/// Verdicts that are written at once.
const AT_ONCE: usize = 16;
/// How soon what was not kept is tried again, and how often one looks whether it may be.
const AGAIN: Duration = Duration::from_secs(1);
const LOOK: Duration = Duration::from_millis(100);
/// JetStream takes no verdicts where it has taken none for so long; a new leader is elected in less.
const FAILING: Duration = Duration::from_secs(3);
/// How long all that was kept before may take to be read.
const READ: Duration = Duration::from_secs(60);

pub(super) const NO_ROOM: &str = "JetStream takes no verdicts (no leader, or a full disk?)";

/// A bucket, made where it is not there.
pub(super) async fn bucket(js: &Context, name: &str, replicas: usize, max_age: Duration) -> Option<Store> {
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

/// The fate of a verdict.
enum Kept {
    Yes,
    /// Another's word came in between.
    Between,
    No,
}

async fn try_to_keep(store: &Store, verdict: &Verdict) -> Kept {
    let key = verdict.finding.id.to_string();
    let Ok(value) = serde_json::to_vec(verdict) else { return Kept::Yes };
    match store.entry(&key).await {
        Ok(Some(entry)) if entry.operation == Operation::Put => {
            let known: Option<Verdict> = from_json(&entry.value, TEXT);
            if known.is_some_and(|k| !verdict.right.replaces(k.right)) {
                return Kept::Yes;
            }
            match store.update(&key, value.into(), entry.revision).await {
                Ok(_) => Kept::Yes,
                Err(e) if e.kind() == UpdateErrorKind::WrongLastRevision => Kept::Between,
                Err(_) => Kept::No,
            }
        }
        Ok(_) => match store.create(&key, value.into()).await {
            Ok(_) => Kept::Yes,
            Err(e) if e.kind() == CreateErrorKind::AlreadyExists => Kept::Between,
            Err(_) => Kept::No,
        },
        Err(_) => Kept::No,
    }
}

/// Keeps a verdict, unless something was said about it by a better right. False where JetStream did not take it.
async fn keep(store: Store, verdict: Arc<Verdict>) -> (Arc<Verdict>, bool) {
    for _ in 0..3 {
        match timeout(PATIENCE, try_to_keep(&store, &verdict)).await {
            Ok(Kept::Yes) => return (verdict, true),
            Ok(Kept::Between) => {}
            Ok(Kept::No) | Err(_) => break,
        }
    }
    (verdict, false)
}

/// Keeps verdicts as they come, several at once. What JetStream does not take, or has no bucket for yet, waits: the
/// last word on each finding.
pub(super) async fn keep_all(
    client: Client,
    mut bucket: watch::Receiver<Option<Store>>,
    mut verdicts: UnboundedReceiver<Arc<Verdict>>,
    room: Arc<AtomicBool>,
) {
    let mut waiting = LastWords::default();
    let mut under_way = FuturesUnordered::new();
    let mut store: Option<Store> = None;
    let mut again = Instant::now();
    let mut failing: Option<Instant> = None;
    loop {
        if let Some(store) = &store
            && Instant::now() >= again
            && client.connection_state() == State::Connected
        {
            while under_way.len() < AT_ONCE
                && let Some(verdict) = waiting.take()
            {
                under_way.push(keep(store.clone(), verdict));
            }
        }
        let well = failing.is_none_or(|since| since.elapsed() < FAILING);
        match (room.swap(well, Ordering::Relaxed), well) {
            (true, false) => warn!("{NO_ROOM}; they are told all the same"),
            (false, true) => info!("JetStream keeps verdicts again"),
            _ => {}
        }
        tokio::select! {
            verdict = verdicts.recv() => match verdict {
                Some(v) => waiting.put(v, store.is_some()),
                None => return,
            },
            Some((verdict, kept)) = under_way.next() => {
                if kept {
                    failing = None;
                    waiting.done(verdict.finding.id);
                } else {
                    failing.get_or_insert_with(Instant::now);
                    again = Instant::now() + AGAIN;
                    waiting.again(verdict);
                }
            }
            Ok(()) = bucket.changed() => store = bucket.borrow_and_update().clone(),
            () = sleep(LOOK), if waiting.is_ready() => {}
        }
    }
}

/// Reports what the bucket holds, which others have told, or an earlier run did: what is open, and what was.
pub(super) async fn read_kept(store: Store, own: String, tell: UnboundedSender<Told>) {
    let all = async {
        let mut stream = store.stream.clone();
        let last = stream.info().await.ok()?.state.last_sequence;
        let config =
            OrderedConfig { filter_subject: format!("{}>", store.prefix), ..OrderedConfig::default() };
        let consumer = stream.create_consumer(config).await.ok()?;
        if consumer.cached_info().num_pending == 0 {
            return None;
        }
        let mut messages = consumer.messages().await.ok()?;
        while let Some(Ok(m)) = messages.next().await {
            let Ok(info) = m.info() else { break };
            if let Some(v) = Verdict::read(&m.payload).filter(|v| v.analyser != own) {
                tell.send(Told::Verdict(Box::new(v))).ok()?;
            }
            // What came since is heard live.
            if info.stream_sequence >= last || info.pending == 0 {
                break;
            }
        }
        Some(())
    };
    timeout(READ, all).await.ok();
}
