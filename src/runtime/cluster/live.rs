//! The cluster for a screen: asked again and again, on a thread of its own.

use super::Error;
use crate::cluster::{Settings, connect, subject};
use crate::model::{At, Finding, FindingId, Snapshot};
use crate::runtime::analyser::{Answer, Question};
use crate::runtime::latest::Latest;
use async_nats::Client;
use futures_util::StreamExt;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// How often the analysers are asked while the question stays the same.
const EVERY: Duration = Duration::from_millis(500);
/// How long the first answer may take, and the others after it.
const PATIENCE: Duration = Duration::from_secs(2);
const OTHERS: Duration = Duration::from_millis(300);
/// How long they may take where all partitions are spoken for already.
const COUNTED: Duration = Duration::from_millis(100);

/// Why there is nothing to show.
#[derive(Debug, thiserror::Error)]
pub enum Unanswered {
    /// The servers cannot be reached.
    #[error(transparent)]
    Bus(#[from] Error),
    /// Nobody is there who could answer.
    #[error("{0}: no analyser answers; start one: ringwatch analyser")]
    Nobody(String),
    /// The system refused a thread.
    #[error("a thread to ask with: {0}")]
    System(#[from] std::io::Error),
}

/// Asks all analysers once.
async fn ask(client: &Client, settings: &Settings, question: &Question) -> Result<Snapshot, Unanswered> {
    let servers = || settings.named_servers();
    let wrong = |why: String| Error::Connect { servers: servers(), why };
    let inbox = client.new_inbox();
    let mut answers = client.subscribe(inbox.clone()).await.map_err(|e| wrong(e.to_string()))?;
    let text = serde_json::to_vec(question).map_err(|e| wrong(e.to_string()))?;
    let on = format!("{}.read.snapshot", subject::ROOT);
    client.publish_with_reply(on, inbox, text.into()).await.map_err(|e| wrong(e.to_string()))?;
    client.flush().await.map_err(|e| wrong(e.to_string()))?;
    let mut all: Vec<Answer> = Vec::new();
    let mut until = Instant::now() + PATIENCE;
    while let Ok(Some(m)) =
        tokio::time::timeout(until.saturating_duration_since(Instant::now()), answers.next()).await
    {
        // Where nobody listens the server says so, in an empty message.
        if m.payload.is_empty() {
            break;
        }
        let Some(a) = Answer::read(&m.payload) else { continue };
        all.push(a);
        // Who speaks for nothing answers too, and is counted.
        let wait = if unspoken(&all).is_empty() { COUNTED } else { OTHERS };
        until = until.min(Instant::now() + wait);
    }
    together(all, &servers()).ok_or_else(|| Unanswered::Nobody(servers()))
}

fn unspoken(all: &[Answer]) -> Vec<u32> {
    let known: BTreeSet<u32> = all.iter().flat_map(|a| a.partitions.iter().copied()).collect();
    let spoken: BTreeSet<u32> = all.iter().flat_map(|a| a.speaks_for.iter().copied()).collect();
    known.difference(&spoken).copied().collect()
}

/// Joins the answers of the analysers: everything as the one sees it that received most, and the findings of each.
pub fn together(all: Vec<Answer>, servers: &str) -> Option<Snapshot> {
    let (analysers, unspoken) = (all.len(), unspoken(&all));
    let most = all.iter().enumerate().max_by_key(|(_, a)| a.heard).map(|(i, _)| i)?;
    let at_ns = all.get(most)?.snapshot.at_ns;
    let not_kept = all.iter().find_map(|a| a.not_kept.clone());
    let mut findings: BTreeMap<FindingId, Finding> = BTreeMap::new();
    let mut chosen = None;
    let mut left_out = 0usize;
    for (i, mut a) in all.into_iter().enumerate() {
        // Each has a monotonic clock of its own.
        let here = |ns: u64| ns.wrapping_add(at_ns).saturating_sub(a.snapshot.at_ns);
        for f in std::mem::take(&mut a.snapshot.findings) {
            let times = (here(f.since_ns), here(f.first_seen_ns), here(f.last_seen_ns));
            let f = Finding { since_ns: times.0, first_seen_ns: times.1, last_seen_ns: times.2, ..f };
            findings.insert(f.id, f);
        }
        left_out = a.snapshot.fleet.as_ref().map_or(0, |f| f.rest.findings).saturating_add(left_out);
        if i == most {
            chosen = Some(a);
        }
    }
    let mut s = chosen?.into_snapshot();
    s.findings = findings.into_values().collect();
    s.findings.sort_by_key(|f| (!f.open, std::cmp::Reverse(f.severity), f.since_ns, f.id));
    s.source = match analysers {
        1 => format!("cluster {servers}: 1 analyser"),
        n => format!("cluster {servers}: {n} analysers"),
    };
    if !unspoken.is_empty() {
        let list: Vec<String> = unspoken.iter().map(u32::to_string).collect();
        s.source.push_str(&format!(", nobody speaks for partitions {}", list.join(", ")));
    }
    // First, since what does not fit on the line is cut off.
    if let Some(why) = not_kept {
        s.source = format!("nothing is kept: {why}; {}", s.source);
    }
    let fleet = s.fleet.get_or_insert_default();
    (fleet.analysers, fleet.unspoken, fleet.rest.findings) = (analysers, unspoken, left_out);
    Some(s)
}

/// Asks once, and goes on asking while it lives.
#[derive(Debug)]
pub struct Live {
    latest: Latest,
    wanted: watch::Sender<Question>,
}

impl Live {
    /// Connects, and has the first answer.
    ///
    /// # Errors
    /// Why there is none.
    pub fn connect(settings: &Settings) -> Result<Self, Unanswered> {
        let (wanted, questions) = watch::channel(Question::new(At::default(), String::new()));
        let (send, received) = mpsc::sync_channel(1);
        let (first, came) = mpsc::channel();
        let settings = settings.clone();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        std::thread::Builder::new().name("cluster".to_owned()).spawn(move || {
            runtime.block_on(async move {
                let began = async {
                    let client = connect(&settings, "ringwatch top", false, |_| ()).await?;
                    let question = questions.borrow().clone();
                    let snapshot = ask(&client, &settings, &question).await?;
                    Ok((client, snapshot))
                };
                let client = match began.await {
                    Ok((client, snapshot)) => {
                        drop(first.send(Ok(snapshot)));
                        client
                    }
                    Err(e) => return drop(first.send(Err::<Snapshot, Unanswered>(e))),
                };
                watch(&client, &settings, questions, &send).await;
            });
        })?;
        let gone = || Unanswered::System(std::io::Error::other("it ended"));
        let last = came.recv().map_err(|_| gone())??;
        Ok(Live { latest: Latest::new(last, received, "the cluster"), wanted })
    }

    /// From now on asks for this.
    pub fn want(&self, at: &At, search: &str) {
        self.wanted.send_if_modified(|q| {
            let same = q.at == *at && q.search == search;
            if !same {
                *q = Question::new(at.clone(), search.to_owned());
            }
            !same
        });
    }

    /// The latest answer of the analysers; that none answers is reported in the place where the source is named.
    pub fn snapshot(&mut self) -> Snapshot {
        self.latest.snapshot()
    }
}

/// Asks now and then, and at once where the question is a new one, until nobody wants the answers.
async fn watch(
    client: &Client,
    settings: &Settings,
    mut questions: watch::Receiver<Question>,
    send: &mpsc::SyncSender<Result<Snapshot, String>>,
) {
    loop {
        if let Ok(Err(_)) = tokio::time::timeout(EVERY, questions.changed()).await {
            return;
        }
        let question = questions.borrow_and_update().clone();
        // Without a server nothing comes back, not even that nothing does.
        let said = match tokio::time::timeout(2 * PATIENCE, ask(client, settings, &question)).await {
            Ok(said) => said.map_err(|e| e.to_string()),
            Err(_) => Err(format!("{}: the bus cannot be reached", settings.named_servers())),
        };
        // A screen that is behind gets the next one.
        if let Err(mpsc::TrySendError::Disconnected(_)) = send.try_send(said) {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::message::VERSION;
    use crate::model::{CommId, Fleet, Kind, OperationRef, Track};

    fn answer(speaks_for: &[u32], id: u64, at_ns: u64) -> Answer {
        let operation = OperationRef::named("AllReduce", Track::Collective, 1);
        let finding = Finding {
            id: FindingId(id),
            since_ns: at_ns - 5,
            ..Finding::new(Kind::MissingRank, CommId::unowned(1), vec![], operation)
        };
        let snapshot =
            Snapshot { at_ns, findings: vec![finding], fleet: Some(Fleet::default()), ..Snapshot::default() };
        Answer {
            ringwatch: VERSION,
            partitions: vec![0, 1],
            speaks_for: speaks_for.to_vec(),
            heard: id,
            snapshot,
            ..Answer::default()
        }
    }

    #[test]
    fn findings_are_of_all_and_the_rest_of_who_heard_most() {
        assert_eq!(together(Vec::new(), "x"), None);
        let one = together(vec![answer(&[0], 7, 100)], "x").expect("an answer");
        assert_eq!(one.source, "cluster x: 1 analyser, nobody speaks for partitions 1");
        let two = together(vec![answer(&[0], 7, 100), answer(&[1], 8, 9000)], "x").expect("an answer");
        assert_eq!((two.at_ns, two.source.as_str()), (9000, "cluster x: 2 analysers"));
        let full = Answer { not_kept: Some("full".to_owned()), ..answer(&[1], 8, 9000) };
        let unkept = together(vec![answer(&[0], 7, 100), full], "x").expect("an answer");
        assert_eq!(unkept.source, "nothing is kept: full; cluster x: 2 analysers");
        // Times are those of one clock, whoever's they were.
        assert_eq!(two.findings.iter().map(|f| f.since_ns).collect::<Vec<_>>(), [8995, 8995]);
        assert_eq!(two.fleet.map(|f| f.analysers), Some(2));
    }
}
