//! The task that sends traces, logs and metrics away. A receiver that is slow or gone keeps nobody waiting: what is to
//! be sent waits in the tracer, whose queue has an end.

use super::Outgoing;
use crate::config::Config;
use crate::export::otlp::{Error, Exporter, Settings};
use crate::ingest::unix_ns;
use crate::runtime::daemon::{self, Asked, Lane, Message, StateSender};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tracing::{info, warn};

/// The pause when there is nothing to send.
const IDLE: Duration = Duration::from_millis(250);
/// The first and the longest pause before a receiver that cannot be reached is tried again.
const AGAIN: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// How long the end waits for a receiver.
const LAST_WORDS: Duration = Duration::from_secs(3);

/// A receiver that is there to be sent to.
pub(in crate::runtime) struct Sender {
    exporter: Arc<Exporter>,
    settings: Settings,
}

impl Sender {
    /// The one that the settings name, if they name one. `service` and `instance` say who sends.
    ///
    /// # Errors
    /// What is wrong with the settings.
    pub(in crate::runtime) fn new(
        config: &Config,
        service: &str,
        instance: String,
    ) -> Result<Option<Self>, Error> {
        if !config.otlp.is_enabled() {
            return Ok(None);
        }
        let exporter = Arc::new(Exporter::new(&config.otlp, resource(config, service, instance))?);
        Ok(Some(Sender { exporter, settings: config.otlp.clone() }))
    }

    /// The part that the owner of the state keeps.
    pub(in crate::runtime) fn outgoing(&self) -> Outgoing {
        Outgoing::new(&self.settings, Arc::clone(&self.exporter))
    }

    /// Begins to send.
    #[expect(clippy::disallowed_methods, reason = "here is where tasks are spawned")]
    pub(in crate::runtime) fn start(self, started_unix_ns: u64, state: StateSender) -> Sending {
        let (stop, stopped) = watch::channel(false);
        let task = tokio::spawn(send(self.exporter, self.settings, started_unix_ns, state, stopped));
        Sending { task, stop }
    }
}

/// The task that sends.
pub(in crate::runtime) struct Sending {
    task: JoinHandle<()>,
    stop: watch::Sender<bool>,
}

impl Sending {
    /// Sends what still waits, if the receiver takes it in time.
    pub(in crate::runtime) async fn end(self) {
        self.stop.send(true).ok();
        tokio::time::timeout(LAST_WORDS, self.task).await.ok();
    }
}

/// The resource that sends, in OpenTelemetry's words, and the user's tags.
fn resource(config: &Config, service: &str, instance: String) -> Vec<(String, String)> {
    let own = [
        ("service.name", service.to_owned()),
        ("service.version", env!("CARGO_PKG_VERSION").to_owned()),
        ("service.instance.id", instance),
        ("host.name", daemon::node(config)),
    ];
    let tags = config.tags.iter().map(|(k, v)| (k.clone(), v.clone()));
    own.into_iter().map(|(k, v)| (k.to_owned(), v)).chain(tags).collect()
}

/// Sends until it is told to stop, then what still waits, if the receiver takes it.
async fn send(
    exporter: Arc<Exporter>,
    settings: Settings,
    started_unix_ns: u64,
    state: StateSender,
    mut stop: watch::Receiver<bool>,
) {
    let every = Duration::from_millis(settings.metrics_interval_ms);
    let mut due = Instant::now() + every;
    let mut pause = AGAIN.0;
    let mut trouble = Trouble::default();
    while !*stop.borrow() {
        let sent = spans(&exporter, &state, &mut trouble).await;
        if !every.is_zero() && Instant::now() >= due {
            due = Instant::now() + every;
            if let Some(families) = daemon::ask(&state, Lane::Trusted, Asked::Families).await {
                trouble.tell(exporter.metrics(&families, started_unix_ns, unix_ns()).await.err());
            }
        }
        let wait = match sent {
            Sent::All => {
                pause = AGAIN.0;
                continue;
            }
            Sent::Nothing => IDLE,
            Sent::GivenBack => {
                let wait = pause;
                pause = (2 * pause).min(AGAIN.1);
                wait
            }
        };
        // Who tells to stop and who went away mean the same.
        tokio::time::timeout(wait, stop.changed()).await.ok();
    }
    while let Sent::All = spans(&exporter, &state, &mut trouble).await {}
}

enum Sent {
    All,
    Nothing,
    GivenBack,
}

async fn spans(exporter: &Exporter, state: &StateSender, trouble: &mut Trouble) -> Sent {
    let Some(batch) = daemon::ask(state, Lane::Trusted, Asked::Batch).await.filter(|b| !b.is_empty()) else {
        return Sent::Nothing;
    };
    match exporter.send(*batch).await {
        Ok(()) => {
            trouble.tell(None);
            Sent::All
        }
        Err((e, back)) => {
            trouble.tell(Some(e));
            if back.is_empty() {
                return Sent::All;
            }
            state.send(Message::GiveBack(Box::new(back)));
            Sent::GivenBack
        }
    }
}

/// The trouble that was last logged, so that it is logged once.
#[derive(Debug, Default)]
struct Trouble(Option<String>);

impl Trouble {
    fn tell(&mut self, error: Option<Error>) {
        let said = error.map(|e| e.to_string());
        if said != self.0 {
            match &said {
                Some(why) => warn!("{why}"),
                None => info!("the OTLP receiver takes what is sent again"),
            }
            self.0 = said;
        }
    }
}
