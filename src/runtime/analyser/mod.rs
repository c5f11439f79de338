//! The analyser: hears all agents, judges what they say by the rules of a node, and speaks for partitions.
//!
//! ```text
//! bus -> inbox -> state (a thread) -> verdicts, wishes -> bus
//!                    ^ leases, what the others said
//! ```
//! Any number of them run. All know everything; a lease decides which one speaks for a partition.

mod bus_source;
mod cluster_query;
mod kv_store;
mod lease;
mod pending_verdicts;
mod publish;
mod recorder;
mod state;

pub use bus_source::Heard;
use bus_source::{Hearing, Room};
pub use cluster_query::{Answer, Question, Want};
pub use state::State;

use super::daemon::{self, Error, Reload, StateThread};
use super::signals::Signals;
use crate::cluster::message::{VERSION, Wish};
use crate::cluster::{Change, Moment, connect, from_json, subject};
use crate::config::{self, Config};
use crate::ingest::{now_ns, unix_ns};
use crate::model::{Finding, FindingEvent};
use async_nats::{Client, Subscriber};
use futures_util::stream::select;
use futures_util::{FutureExt, StreamExt};
use prost::Message as _;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::watch;
use tracing::{info, warn};

/// Messages that wait for the state at most.
const INBOX: usize = 65_536;
/// The longest text in a verdict or a reply, in bytes.
const TEXT: usize = 4096;
/// The settings that the state takes over while it runs.
const TAKEN_OVER: &[&str] = &["detect", "cluster.silent_ms"];
/// The time that the end waits for receivers of findings.
const LAST_WORDS: std::time::Duration = std::time::Duration::from_secs(3);

/// A message of the state.
#[derive(Debug)]
pub enum Say {
    /// A finding, or its end.
    Verdict {
        /// The finding.
        finding: Box<Finding>,
        /// By what right it is told.
        right: Right,
        /// The change; absent where it is repeated.
        change: Option<crate::model::Change>,
    },
    /// A request to agents: to one node's, or to all.
    Wish {
        /// The node.
        node: Option<String>,
        /// The request.
        wish: Wish,
    },
}

/// A message to the state.
#[derive(Debug)]
pub enum Told {
    /// The partitions this analyser speaks for, with its leases.
    Leases(BTreeMap<u32, u64>),
    /// The state of JetStream: it keeps what is published, or the reason why not.
    Kept(Result<(), &'static str>),
    /// A verdict of another analyser, or of one before this began.
    Verdict(Box<Verdict>),
}

/// The right to publish a finding: the lease of its partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Right {
    /// The partition that the finding belongs to.
    pub partition: u32,
    /// The lease's number; of one partition the greater one is newer.
    pub lease: u64,
    /// True where no server has told the finding's partition yet, and the first one stands in for it.
    #[serde(default)]
    pub guessed: bool,
}

impl Right {
    /// True where what is told by this right takes the place of what was told by another.
    ///
    /// A bucket is one stream and a revision is the message's number in it, so leases of all partitions have numbers of
    /// one sequence. They say which lease is older, but not who is right: the lease of the partition that a finding
    /// moved to may be older than the one by which it was told at first. So numbers fence within a partition, and a
    /// finding moves from one partition to another only if the new one is known.
    pub fn replaces(self, before: Right) -> bool {
        if self.partition == before.partition { self.lease >= before.lease } else { !self.guessed }
    }
}

/// A verdict as it is published and kept.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// The version of what is spoken.
    pub ringwatch: u32,
    /// The analyser.
    pub analyser: String,
    /// By what right.
    #[serde(flatten)]
    pub right: Right,
    /// The finding.
    pub finding: Finding,
}

impl Verdict {
    /// Reads a verdict; absent where it is none of this version.
    fn read(bytes: &[u8]) -> Option<Self> {
        from_json::<Self>(bytes, TEXT).filter(|v| v.ringwatch == VERSION)
    }
}

/// The reply of an analyser to a reader.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Reply {
    /// The version of what is spoken.
    pub ringwatch: u32,
    /// All partitions that are known.
    pub partitions: Vec<u32>,
    /// The partitions it speaks for.
    pub speaks_for: Vec<u32>,
    /// The findings there now, the worst first, as many as a message takes.
    pub findings: Vec<Finding>,
    /// Findings for which the message had no room.
    #[serde(default)]
    pub more_findings: u64,
    /// Findings that were closed lately, the latest first, as many as a message takes.
    #[serde(default)]
    pub closed: Vec<Finding>,
    /// The nodes it hears, those with something amiss first, as many as a message takes.
    pub nodes: Vec<NodeRow>,
    /// Nodes for which the message had no room.
    #[serde(default)]
    pub more_nodes: u64,
    /// Messages that came, of all nodes.
    #[serde(default)]
    pub messages: u64,
    /// The refused messages, by reason.
    pub refused: BTreeMap<String, u64>,
    /// Messages that it had no room for.
    pub dropped: u64,
    /// Why JetStream does not keep what it tells, where it does not.
    #[serde(default)]
    pub not_kept: Option<String>,
    /// Communicators that are open.
    pub communicators: u64,
    /// Processes known.
    pub ranks: u64,
}

impl Reply {
    /// Reads a reply; absent where it is none of this version.
    pub fn read(bytes: &[u8]) -> Option<Self> {
        from_json::<Self>(bytes, TEXT).filter(|r| r.ringwatch == VERSION)
    }
}

/// One node, as an analyser hears it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeRow {
    /// Its name.
    pub name: String,
    /// True when it has said nothing for a while.
    pub silent: bool,
    /// True when its agent said that it ends.
    pub ended: bool,
    /// Messages that came.
    pub messages: u64,
    /// Bytes that came.
    pub bytes: u64,
    /// Messages that never came.
    pub missed: u64,
    /// Operations that its agent saw.
    pub observed: u64,
    /// Of these, published.
    pub published: u64,
    /// Of these, left out and counted.
    pub left_out: u64,
    /// Segments and directories that its agent does not read now.
    #[serde(default)]
    pub unread: u64,
    /// True while there may be segments that its agent has not found yet.
    #[serde(default)]
    pub unsearched: bool,
    /// Operations of its running processes of which nothing is known, since their records were lost.
    #[serde(default)]
    pub hidden: u64,
}

/// The request for everything that agents know.
fn everything() -> Wish {
    Wish { version: VERSION, all: true, ..Wish::default() }
}

/// A name that no other run has: in containers many a process is the first one, on hosts of one name.
fn run_id(node: &str) -> String {
    use std::hash::{BuildHasher, Hasher};
    let random = std::collections::hash_map::RandomState::new().build_hasher().finish();
    format!("{node}-{}-{:016x}", std::process::id(), random ^ unix_ns())
}

/// Hands over what was said lately, and then what is said, which waits in the subscriptions until then.
async fn hear(
    client: Client,
    [mut of_nodes, of_communicators, of_partitions]: [Subscriber; 3],
    send: mpsc::SyncSender<Hearing>,
    room: Arc<Room>,
) {
    let put = |message, recorded| {
        let at = Moment { mono_ns: now_ns(), unix_ns: unix_ns() };
        room.put(&send, Hearing { message, at, recorded });
    };
    if let Some(n) = recorder::catch_up(&client, |m| put(m, true)).await {
        info!("{n} messages were heard from the recorder");
    }
    // Whoever listens from now on knows nothing of what is older: agents tell all.
    drop(client.publish(format!("{}.wish.all", subject::ROOT), everything().encode_to_vec().into()).await);
    // Messages arrive in the order in which an agent sent them, and each subscription has a queue of its own. An agent
    // announces a process before it sends what the process did, which is refused otherwise: what is in the queue of nodes by
    // the time that another message is taken goes before that.
    let mut of_others = select(of_communicators, of_partitions);
    loop {
        let (message, is_of_node) = tokio::select! {
            biased;
            message = of_nodes.next() => (message, true),
            message = of_others.next() => (message, false),
        };
        let Some(message) = message else { break };
        while !is_of_node && let Some(Some(earlier)) = of_nodes.next().now_or_never() {
            put(earlier, false);
        }
        put(message, false);
    }
}

/// Logs what happens to the connection, and asks agents for everything when it is there again.
fn connection_log(wishes: UnboundedSender<Say>) -> impl Fn(Change) + Send + Sync + 'static {
    let (again, refused) = (AtomicBool::new(false), Mutex::new(None));
    move |c: Change| match c {
        // What ended while nothing was heard is not told again by itself. The first time, whoever hears asks.
        Change::Up if again.swap(true, Ordering::Relaxed) => {
            drop(wishes.send(Say::Wish { node: None, wish: everything() }));
        }
        Change::Up => {}
        Change::Down => warn!("the bus cannot be reached, and is tried again"),
        // It is tried again and again, and mostly fails in the same way.
        Change::Refused(why) => {
            let mut last = refused.lock().unwrap_or_else(PoisonError::into_inner);
            if last.as_ref() != Some(&why) {
                warn!("the bus says: {why}");
                *last = Some(why);
            }
        }
    }
}

/// Runs until a signal asks for the end. `reload` reads the settings anew on SIGHUP; `told` receives each
/// change of a finding that this analyser is the first to report.
///
/// # Errors
/// What kept it from starting.
#[expect(clippy::disallowed_methods, reason = "here is where tasks are spawned")]
pub async fn run(
    config: Config,
    reload: impl Fn() -> Result<Config, config::Error>,
    told: impl FnMut(&FindingEvent) + Send + 'static,
) -> Result<(), Error> {
    let inherited = daemon::inherited_sockets();
    let shares = daemon::raise_descriptors();
    let signals = Signals::new()?;
    let settings = config.cluster.clone();
    let node = daemon::node(&config);
    let id = run_id(&node);
    let (say, sayings) = tokio::sync::mpsc::unbounded_channel();
    let tell = connection_log(say.clone());
    let client = connect(&settings, &format!("ringwatch analyser {id}"), true, tell).await?;
    let (send, inbox) = mpsc::sync_channel::<Hearing>(INBOX);
    let room = Arc::new(Room::default());
    let (tell_state, told_state) = mpsc::channel();
    let (partitions, known) = watch::channel(BTreeSet::new());
    let mut state = State::new(
        config.clone(),
        Heard::new(inbox, Arc::clone(&room), config.cluster.silent()),
        say,
        partitions,
    );
    let connections = state.connections();
    let port = daemon::HttpPort::open(&config, inherited, &connections)?;
    // A name of its own: what an agent of this host sends is another instance's.
    let receiver = daemon::Sender::new(&config, "ringwatch-analyser", node)?;
    if let Some(receiver) = &receiver {
        state.send_to(receiver.outgoing());
    }
    let notifying = daemon::Notifier::start(&config.notify, &daemon::node(&config)).map_err(Error::Notify)?;
    let notifying = notifying.map(|(notifier, sending)| {
        state.notify_by(notifier);
        sending
    });
    let started = state.started_unix_ns();
    let subscribed = async |topic: &str| {
        let why = |e: async_nats::client::SubscribeError| crate::cluster::Error::Connect {
            servers: settings.named_servers(),
            why: e.to_string(),
        };
        client.subscribe(format!("{}.{topic}", subject::ROOT)).await.map_err(why)
    };
    let subscriptions =
        [subscribed("node.>").await?, subscribed("comm.>").await?, subscribed("part.>").await?];
    let mut tasks = vec![tokio::spawn(hear(client.clone(), subscriptions, send, room))];
    let thread = StateThread::start(state.heartbeat(), move |queue| state.run(queue, &told_state))?;
    tasks.push(tokio::spawn(publish::speak(client.clone(), id, known, sayings, tell_state, told)));
    tasks.push(tokio::spawn(publish::answer(client, thread.sender())));
    let sending = receiver.map(|r| r.start(started, thread.sender()));
    let bounds = daemon::Bounds::new(shares.http);
    let answers = thread.answers(&config);
    tasks.extend(port.map(|p| tokio::spawn(p.serve(answers, bounds, Arc::clone(&connections)))));
    let settings = Reload::new(&config, TAKEN_OVER);
    daemon::attend(signals, &thread, &connections, settings, reload, async || Ok(())).await?;
    tasks.into_iter().for_each(|t| t.abort());
    if let Some(sending) = sending {
        sending.end().await;
    }
    thread.end()?;
    if let Some(sending) = notifying {
        sending.end(LAST_WORDS).await;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_fence_a_partition_and_a_finding_moves_to_one_that_is_known() {
        let right = |partition, lease, guessed| Right { partition, lease, guessed };
        assert!(
            right(3, 8, false).replaces(right(3, 7, false))
                && right(3, 7, false).replaces(right(3, 7, false))
        );
        assert!(!right(3, 7, false).replaces(right(3, 8, false)), "it was asleep for longer than its lease");
        // Told for the first partition at first, by a lease that is newer than that of its own.
        assert!(right(3, 50, false).replaces(right(0, 100, true)));
        assert!(
            !right(0, 100, true).replaces(right(3, 50, false)),
            "one that does not know better moves nothing"
        );
        // Servers that map in another way from now on.
        assert!(right(0, 7, false).replaces(right(3, 50, false)));
    }

    #[test]
    fn a_verdict_is_written_as_before() {
        let old = r#"{"partition":3,"lease":7}"#;
        let right: Right = serde_json::from_str(old).expect("what older analysers write");
        assert_eq!(right, Right { partition: 3, lease: 7, guessed: false });
    }
}
