//! The node's voice on the cluster's bus: what the state gives out goes out, and what analysers wish comes in.

use crate::cluster::message::{VERSION, Wish};
use crate::cluster::{Change, Error, Outbox, Settings, connect, subject};
use crate::runtime::daemon::{Message, StateSender};
use futures_util::StreamExt;
use prost::Message as _;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tracing::{info, warn};

/// Wishes that are taken a second at most; analysers are many, and may be wrong.
const WISHES: u32 = 50;
/// How long the last words may take.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Sends and listens until it is told to stop, and then sends what still waits.
///
/// # Errors
/// What is wrong with the settings. A server that cannot be reached is none: it is tried again.
pub(super) async fn serve(
    (node, settings): (String, Settings),
    outbox: Arc<Outbox>,
    state: StateSender,
    mut stop: watch::Receiver<bool>,
) -> Result<(), Error> {
    let (change, mut changes) = mpsc::unbounded_channel();
    let tell = move |c: Change| drop(change.send(c));
    let client = connect(&settings, &format!("ringwatch agent {node}"), true, tell).await?;
    let why = |e: async_nats::client::SubscribeError| Error::Connect {
        servers: settings.named_servers(),
        why: e.to_string(),
    };
    let own = format!("{}.wish.{}", subject::ROOT, subject::token(&node));
    let mut to_all = client.subscribe(format!("{}.wish.all", subject::ROOT)).await.map_err(why)?;
    let mut to_us = client.subscribe(own).await.map_err(why)?;
    let mut up = false;
    let mut said = false;
    let mut refused = None;
    let (mut second, mut wishes) = (std::time::Instant::now(), 0u32);
    loop {
        tokio::select! {
            Some(c) = changes.recv() => match c {
                Change::Up => {
                    refused = None;
                    if std::mem::take(&mut said) {
                        info!("the bus is there again");
                    }
                    up = true;
                    outbox.set_connected(true);
                    // Who listens may have missed anything meanwhile.
                    state.send(Message::Refresh);
                }
                Change::Down => {
                    if !std::mem::replace(&mut said, true) {
                        warn!("the bus cannot be reached; this node goes on by itself");
                    }
                    up = false;
                    outbox.set_connected(false);
                }
                // It is tried again and again, and mostly fails in the same way.
                Change::Refused(why) if refused.as_ref() != Some(&why) => {
                    warn!("the bus says: {why}");
                    refused = Some(why);
                }
                Change::Refused(_) => {}
            },
            message = outbox.take(), if up => {
                // A client that has lost its server keeps what it is given.
                drop(client.publish(message.topic.of(&node), message.bytes.into()).await);
            }
            Some(m) = async { tokio::select! { m = to_all.next() => m, m = to_us.next() => m } } => {
                if second.elapsed() >= Duration::from_secs(1) {
                    (second, wishes) = (std::time::Instant::now(), 0);
                }
                wishes += 1;
                let wish = Wish::decode(m.payload.as_ref()).ok().filter(|w| w.version == VERSION);
                if let (Some(wish), true) = (wish, wishes <= WISHES) {
                    state.send(Message::Wish(Box::new(wish)));
                }
            }
            _ = stop.changed() => break,
        }
    }
    while let Some(m) = outbox.try_take() {
        drop(client.publish(m.topic.of(&node), m.bytes.into()).await);
    }
    tokio::time::timeout(LAST_WORDS, client.flush()).await.ok();
    Ok(())
}
