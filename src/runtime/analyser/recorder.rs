//! The last minutes of the bus, which a stream of JetStream keeps: an analyser that begins late reads them first.
//!
//! It is bound to the agents' subjects, so nobody writes to it by himself, and nothing that is live waits for it.

use crate::cluster::subject::ROOT;
use async_nats::jetstream::consumer::pull::OrderedConfig;
use async_nats::jetstream::consumer::{DeliverPolicy, ReplayPolicy};
use async_nats::jetstream::stream::{Config, DiscardPolicy, StorageType, Stream};
use async_nats::jetstream::{self, Context};
use async_nats::{Client, Message};
use futures_util::StreamExt;
use std::time::Duration;

/// Its name.
const STREAM: &str = "ringwatch";
/// How long it keeps what was said, and how many bytes of it.
const KEEP: Duration = Duration::from_secs(600);
const KEEP_BYTES: i64 = 1 << 30;
/// The part that is read first: agents send everything that does not change again within half a minute.
const BACK: Duration = Duration::from_secs(45);
/// How long the recorder may take; then one goes on without.
const PATIENCE: Duration = Duration::from_secs(10);

async fn stream(js: &Context) -> Option<Stream> {
    for num_replicas in [3, 1] {
        let config = Config {
            name: STREAM.to_owned(),
            subjects: vec![format!("{ROOT}.part.>"), format!("{ROOT}.comm.*.*"), format!("{ROOT}.node.*")],
            max_age: KEEP,
            max_bytes: KEEP_BYTES,
            storage: StorageType::File,
            discard: DiscardPolicy::Old,
            no_ack: true,
            num_replicas,
            ..Config::default()
        };
        if let Ok(stream) = js.get_or_create_stream(config).await {
            return Some(stream);
        }
    }
    None
}

/// Hands over what was said lately, in its order; how many messages that was. Absent without a recorder.
pub(super) async fn catch_up(client: &Client, mut heard: impl FnMut(Message)) -> Option<u64> {
    let mut js = jetstream::new(client.clone());
    js.set_timeout(PATIENCE);
    let mut stream = stream(&js).await?;
    let last = stream.info().await.ok()?.state.last_sequence;
    let since = time::OffsetDateTime::now_utc() - BACK;
    let consumer = stream
        .create_consumer(OrderedConfig {
            deliver_policy: DeliverPolicy::ByStartTime { start_time: since },
            replay_policy: ReplayPolicy::Instant,
            ..OrderedConfig::default()
        })
        .await
        .ok()?;
    let mut messages = consumer.messages().await.ok()?;
    let mut n = 0;
    let all = async {
        while let Some(Ok(m)) = messages.next().await {
            let Ok(info) = m.info() else { break };
            let (sequence, pending) = (info.stream_sequence, info.pending);
            if sequence <= last {
                n += 1;
                heard(m.message);
            }
            // What came since is heard live.
            if sequence >= last || pending == 0 {
                break;
            }
        }
    };
    // Nothing lately: then nothing is waited for.
    let quiet = last == 0;
    if !quiet {
        tokio::time::timeout(PATIENCE.min(Duration::from_secs(3)), all).await.ok();
    }
    Some(n)
}
