//! Calls whom the settings name when a finding is opened, changes or is closed.
//!
//! Each receiver has a queue of its own, so that a slow one keeps neither the state nor another one waiting.

use crate::export::metrics::Exported;
use crate::export::notify::{self, Command, Failure, Notice, Notices, Poster, Settings, Webhook};
use crate::join::Join;
use crate::model::{FindingEvent, Severity};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tracing::warn;

/// Notices that wait for one receiver at most.
const QUEUE: usize = 256;
/// How long to wait before the next try.
const AGAIN: [Duration; 4] =
    [Duration::from_secs(1), Duration::from_secs(4), Duration::from_secs(15), Duration::from_secs(60)];

const FULL: &str = "too many wait";
const FAILED: &str = "the receiver failed";
const REFUSED: &str = "the receiver refused it";

#[derive(Debug, Default)]
struct Counts {
    queued: AtomicU64,
    sent: AtomicU64,
    full: AtomicU64,
    failed: AtomicU64,
    refused: AtomicU64,
}

impl Counts {
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

/// A receiver as the owner of the findings sees it.
#[derive(Debug)]
struct Receiver {
    least: Severity,
    queue: mpsc::Sender<Arc<Notice>>,
}

/// Picks what matters and puts it into the receivers' queues.
#[derive(Debug)]
pub(in crate::runtime) struct Notifier {
    notices: Notices,
    receivers: Vec<Receiver>,
    counts: Arc<Counts>,
}

/// The tasks that call. They end when the notifier is gone and their queues are empty.
#[derive(Debug)]
pub(in crate::runtime) struct Calling(Vec<JoinHandle<()>>);

impl Calling {
    /// Waits until they have ended, so long at most.
    pub(in crate::runtime) async fn end(self, at_most: Duration) {
        let all = async {
            for task in self.0 {
                task.await.ok();
            }
        };
        if tokio::time::timeout(at_most, all).await.is_err() {
            warn!("the agent ends before all who are to be called of findings were");
        }
    }
}

impl Notifier {
    /// Starts a task for each receiver; absent where nobody is to be called.
    ///
    /// # Errors
    /// TLS cannot be set up.
    pub(in crate::runtime) fn start(
        settings: &Settings,
        node: String,
    ) -> Result<Option<(Self, Calling)>, String> {
        if settings.webhooks.is_empty() && settings.commands.is_empty() {
            return Ok(None);
        }
        let counts = Arc::new(Counts::default());
        let (mut receivers, mut tasks) = (Vec::new(), Vec::new());
        let mut open = |least: notify::Least| {
            let (queue, notices) = mpsc::channel(QUEUE);
            receivers.push(Receiver { least: least.severity(), queue });
            notices
        };
        if !settings.webhooks.is_empty() {
            let poster = Poster::new()?;
            for hook in &settings.webhooks {
                let notices = open(hook.severity);
                tasks.push(spawn(post_all(poster.clone(), hook.clone(), notices, Arc::clone(&counts))));
            }
        }
        for command in &settings.commands {
            let notices = open(command.severity);
            tasks.push(spawn(start_all(command.clone(), notices, Arc::clone(&counts))));
        }
        Ok(Some((Notifier { notices: Notices::new(node), receivers, counts }, Calling(tasks))))
    }

    /// Takes a change of a finding.
    pub(in crate::runtime) fn event(&mut self, join: &Join, event: &FindingEvent) {
        let Some(notice) = self.notices.of(join, event).map(Arc::new) else { return };
        for receiver in self.receivers.iter().filter(|r| notice.worst >= r.least) {
            self.counts.queued.fetch_add(1, Ordering::Relaxed);
            if receiver.queue.try_send(Arc::clone(&notice)).is_err() {
                self.counts.queued.fetch_sub(1, Ordering::Relaxed);
                self.counts.full.fetch_add(1, Ordering::Relaxed);
                warn!(
                    "a receiver of findings is not told of {}: {QUEUE} wait for it",
                    notice.finding.kind.as_str()
                );
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

#[expect(clippy::disallowed_methods, reason = "here is where tasks are spawned")]
fn spawn(task: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
    tokio::spawn(task)
}

async fn post_all(
    poster: Poster,
    hook: Webhook,
    mut notices: mpsc::Receiver<Arc<Notice>>,
    counts: Arc<Counts>,
) {
    while let Some(notice) = notices.recv().await {
        let body = notify::body(&hook, &notice).to_string().into_bytes();
        let mut outcome = poster.post(&hook, body.clone()).await;
        for wait in AGAIN {
            if !matches!(outcome, Err(Failure::Later(_))) {
                break;
            }
            tokio::time::sleep(wait).await;
            outcome = poster.post(&hook, body.clone()).await;
        }
        if let Err(Failure::Later(why) | Failure::Refused(why)) = &outcome {
            warn!("a webhook was not told of {}: {why}", notice.finding.kind.as_str());
        }
        counts.count(&outcome);
    }
}

async fn start_all(command: Command, mut notices: mpsc::Receiver<Arc<Notice>>, counts: Arc<Counts>) {
    while let Some(notice) = notices.recv().await {
        let outcome = start(&command, &notice).await;
        if let Err(Failure::Later(why) | Failure::Refused(why)) = &outcome {
            warn!("{} was called for {}: {why}", command.program.display(), notice.finding.kind.as_str());
        }
        counts.count(&outcome);
    }
}

/// Starts a program for one notice and waits for its end. What it does cannot be done twice, so that it is not tried again.
async fn start(command: &Command, notice: &Notice) -> Result<(), Failure> {
    let hook = notify::as_json(notice).to_string();
    let mut child = tokio::process::Command::new(&command.program)
        .args(&command.arguments)
        .envs(notify::variables(notice))
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .map_err(|e| Failure::Refused(format!("it cannot be started: {e}")))?;
    let stdin = child.stdin.take();
    let end = async {
        // A program that does not read it ends all the same.
        if let Some(mut stdin) = stdin {
            stdin.write_all(hook.as_bytes()).await.ok();
        }
        child.wait().await
    };
    match tokio::time::timeout(Duration::from_millis(command.timeout_ms), end).await {
        Ok(Ok(status)) if status.success() => Ok(()),
        Ok(Ok(status)) => Err(Failure::Later(format!("it ended with {status}"))),
        Ok(Err(e)) => Err(Failure::Later(format!("nothing is known of its end: {e}"))),
        Err(_) => {
            Err(Failure::Later(format!("it took longer than {} ms and was killed", command.timeout_ms)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Change, CommId, Finding, Kind, OperationRef, Rank, Track};
    use std::io::{BufRead, BufReader, Read, Write};
    use std::net::TcpListener;
    use std::sync::mpsc as std_mpsc;

    fn event(kind: Kind, severity: Severity) -> FindingEvent {
        let operation = OperationRef::named("AllReduce", Track::Collective, 5);
        let mut finding = Finding::new(kind, CommId::unowned(7), vec![Rank(3)], operation);
        finding.id = crate::model::FindingId(kind as u64 + 1);
        finding.severity = severity;
        FindingEvent { change: Change::Opened, finding }
    }

    /// A server that answers with these statuses one after the other; what it was sent.
    fn server(
        statuses: &'static [&'static str],
    ) -> (String, std_mpsc::Receiver<(String, serde_json::Value)>) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}/hook/secret", listener.local_addr().expect("its address"));
        let (tell, told) = std_mpsc::channel();
        std::thread::spawn(move || {
            for status in statuses {
                let (stream, _) = listener.accept().expect("a request");
                let mut reader = BufReader::new(stream);
                let mut head = String::new();
                while reader.read_line(&mut head).expect("a line") > 2 {}
                let length = head
                    .lines()
                    .find_map(|l| l.to_lowercase().strip_prefix("content-length: ")?.parse().ok());
                let mut body = vec![0; length.expect("its length")];
                reader.read_exact(&mut body).expect("a body");
                let answer = format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
                reader.get_mut().write_all(answer.as_bytes()).expect("an answer");
                tell.send((head, serde_json::from_slice(&body).expect("JSON"))).ok();
            }
        });
        (url, told)
    }

    fn settings(text: &str) -> Settings {
        let settings: Settings = serde_yaml::from_str(text).expect("settings");
        settings.check().expect("right");
        settings
    }

    #[test]
    fn a_webhook_that_is_busy_is_called_again_and_one_that_refuses_is_not() {
        let (url, told) = server(&["503 Busy", "200 OK", "404 Not Found"]);
        let settings = settings(&format!("webhooks: [{{url: '{url}', headers: {{x-a: b}}}}]"));
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
        let (mut notifier, calling) = runtime
            .block_on(async { Notifier::start(&settings, "n1".to_owned()).expect("TLS").expect("one") });
        let join = Join::new();
        notifier.event(&join, &event(Kind::MissingRank, Severity::Critical));
        notifier.event(&join, &event(Kind::TinyCollectives, Severity::Info));
        notifier.event(&join, &event(Kind::Straggler, Severity::Warning));
        let counts = Arc::clone(&notifier.counts);
        drop(notifier);
        runtime.block_on(calling.end(Duration::from_secs(30)));
        let all: Vec<_> = told.iter().collect();
        let kinds: Vec<_> = all.iter().map(|(_, b)| b["finding"]["kind"].as_str().unwrap_or("")).collect();
        assert_eq!(kinds, ["missing-rank", "missing-rank", "straggler"], "an info calls nobody");
        assert!(
            all[0].0.starts_with("POST /hook/secret HTTP/1.1") && all[0].0.contains("x-a: b"),
            "{}",
            all[0].0
        );
        let n = |c: &AtomicU64| c.load(Ordering::Relaxed);
        assert_eq!((n(&counts.sent), n(&counts.failed), n(&counts.refused), n(&counts.queued)), (1, 0, 1, 0));
    }

    #[test]
    fn a_program_reads_the_finding_and_one_that_fails_or_hangs_is_counted() {
        let room = tempfile::tempdir().expect("a folder");
        let file = room.path().join("out");
        let text = format!(
            "commands:\n- {{program: /bin/sh, arguments: ['-c', 'echo $RINGWATCH_KIND > {0}; cat >> {0}']}}\n\
             - {{program: /bin/sh, arguments: ['-c', 'exit 3'], severity: critical}}\n\
             - {{program: /bin/sleep, arguments: ['60'], timeout_ms: 100}}\n- {{program: /nonexistent}}\n",
            file.display()
        );
        let settings = settings(&text);
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
        let (mut notifier, calling) = runtime
            .block_on(async { Notifier::start(&settings, "n1".to_owned()).expect("TLS").expect("one") });
        notifier.event(&Join::new(), &event(Kind::Straggler, Severity::Warning));
        let counts = Arc::clone(&notifier.counts);
        drop(notifier);
        runtime.block_on(calling.end(Duration::from_secs(30)));
        let written = std::fs::read_to_string(&file).expect("it was started");
        let (kind, json) = written.split_once('\n').expect("two lines");
        let json: serde_json::Value = serde_json::from_str(json).expect("JSON");
        assert_eq!((kind, &json["change"]), ("straggler", &serde_json::json!("opened")));
        let n = |c: &AtomicU64| c.load(Ordering::Relaxed);
        assert_eq!(
            (n(&counts.sent), n(&counts.failed), n(&counts.refused)),
            (1, 1, 1),
            "the second is for what is critical"
        );
    }
}
