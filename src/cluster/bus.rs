//! The connection to NATS.

use super::publisher::Outgoing;
use super::settings::Settings;
use crate::secret::SecretUrl;
use async_nats::{Client, ConnectOptions, Event, ServerAddr};
use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;

/// The first pause before a lost connection is tried again, and the longest.
const AGAIN: Duration = Duration::from_millis(50);
const AGAIN_MOST: Duration = Duration::from_secs(4);
/// A server that says nothing for twice as long is lost.
const PING: Duration = Duration::from_secs(5);

/// Why there is no bus.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An address is none.
    #[error("cluster.servers: {address:?}: {why}; write nats://host:4222 or tls://host:4222")]
    Address {
        /// The address as it was given.
        address: SecretUrl,
        /// The fault in it.
        why: String,
    },
    /// A file cannot be used.
    #[error("{key}: {}: {why}", path.display())]
    File {
        /// The setting that names it.
        key: &'static str,
        /// The file.
        path: PathBuf,
        /// The fault in it.
        why: String,
    },
    /// Nobody answers, or not to us.
    #[error("{servers}: {why}; is a NATS server there, and may this user use it?")]
    Connect {
        /// Whom was asked.
        servers: String,
        /// Why it came to nothing.
        why: String,
    },
}

/// A change of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// It is there, again.
    Up,
    /// It is lost, and tried again.
    Down,
    /// Something was refused, in the server's words.
    Refused(String),
}

fn read(key: &'static str, path: &Path) -> Result<String, Error> {
    std::fs::read_to_string(path).map_err(|e| Error::File { key, path: path.to_owned(), why: e.to_string() })
}

fn there(key: &'static str, path: &Path) -> Result<PathBuf, Error> {
    let why = |why: String| Error::File { key, path: path.to_owned(), why };
    std::fs::File::open(path).map_err(|e| why(e.to_string()))?;
    Ok(path.to_owned())
}

/// Connects to one of the servers. `wait`: goes on trying where none is there yet; else that is an error.
///
/// # Errors
/// What is wrong with the settings, or why nobody answers.
pub async fn connect(
    settings: &Settings,
    name: &str,
    wait: bool,
    changed: impl Fn(Change) + Send + Sync + 'static,
) -> Result<Client, Error> {
    let mut servers: Vec<ServerAddr> = Vec::new();
    for address in &settings.servers {
        let wrong = |e: std::io::Error| Error::Address {
            address: address.clone(),
            why: address.hide_in(&e.to_string()),
        };
        servers.push(address.exposed().parse().map_err(wrong)?);
    }
    // Who names certificates wants them checked, whatever the address says.
    let certificates = settings.ca.is_some() || settings.cert.is_some();
    let tls = certificates || settings.servers.iter().any(|s| s.has_scheme("tls://"));
    let changed = Arc::new(changed);
    let mut options = ConnectOptions::new()
        .name(name)
        .ping_interval(PING)
        .require_tls(tls)
        .ignore_discovered_servers()
        // Ten thousand agents must not come back at once.
        .reconnect_delay_callback(|attempts| {
            let most = AGAIN.saturating_mul(1 << attempts.min(10)).min(AGAIN_MOST);
            most.mul_f64(0.5 + jitter() / 2.0)
        })
        .event_callback(move |event| {
            let changed = Arc::clone(&changed);
            async move {
                match event {
                    Event::Connected => changed(Change::Up),
                    Event::Disconnected | Event::Closed => changed(Change::Down),
                    Event::ServerError(e) => changed(Change::Refused(e.to_string())),
                    Event::ClientError(e) => changed(Change::Refused(e.to_string())),
                    _ => {}
                }
            }
        });
    if wait {
        options = options.retry_on_initial_connect();
    }
    if let Some(path) = &settings.ca {
        options = options.add_root_certificates(there("cluster.ca", path)?);
    }
    if let (Some(cert), Some(key)) = (&settings.cert, &settings.key) {
        options = options.add_client_certificate(there("cluster.cert", cert)?, there("cluster.key", key)?);
    }
    if let Some(path) = &settings.credentials {
        let text = read("cluster.credentials", path)?;
        options = options.credentials(&text).map_err(|e| Error::File {
            key: "cluster.credentials",
            path: path.clone(),
            why: e.to_string(),
        })?;
    }
    if let Some(path) = &settings.nkey {
        options = options.nkey(read("cluster.nkey", path)?.trim().to_owned());
    }
    // An address may carry them, as addresses of NATS do.
    let in_address = servers
        .iter()
        .find_map(|s| Some((s.username()?.to_owned(), s.password().unwrap_or_default().to_owned())));
    if let (Some((user, password)), None) = (in_address, &settings.user) {
        options = options.user_and_password(user, password);
    }
    if let Some(user) = &settings.user {
        let password = match &settings.password_file {
            Some(path) => read("cluster.password_file", path)?.trim_end_matches(['\r', '\n']).to_owned(),
            None => String::new(),
        };
        options = options.user_and_password(user.clone(), password);
    }
    options.connect(servers).await.map_err(|e| Error::Connect {
        servers: settings.named_servers(),
        why: settings.servers.iter().fold(e.to_string(), |why, s| s.hide_in(&why)),
    })
}

/// A number from 0 to 1 that differs between processes and moments.
fn jitter() -> f64 {
    use std::hash::{BuildHasher, Hasher};
    let n = std::collections::hash_map::RandomState::new().build_hasher().finish();
    (n >> 11) as f64 / (1u64 << 53) as f64
}

/// Messages that wait to be sent, in no more than so many bytes.
#[derive(Debug)]
pub struct Outbox {
    waiting: Mutex<(VecDeque<Outgoing>, u64)>,
    most_bytes: u64,
    more: Notify,
    connected: AtomicBool,
}

impl Outbox {
    /// With room for so many bytes.
    pub fn new(most_bytes: u64) -> Self {
        Outbox {
            waiting: Mutex::default(),
            most_bytes,
            more: Notify::new(),
            connected: AtomicBool::new(false),
        }
    }

    /// Takes messages. Gives back how many operations were in those, the oldest, for which there is no room any more.
    pub fn put(&self, messages: Vec<Outgoing>) -> u64 {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        for m in messages {
            waiting.1 += m.bytes.len() as u64;
            waiting.0.push_back(m);
        }
        let mut lost = 0;
        while waiting.1 > self.most_bytes
            && let Some(old) = waiting.0.pop_front()
        {
            waiting.1 -= old.bytes.len() as u64;
            lost += old.operations;
        }
        drop(waiting);
        self.more.notify_one();
        lost
    }

    /// The oldest message, as soon as there is one.
    pub async fn take(&self) -> Outgoing {
        loop {
            if let Some(m) = self.try_take() {
                return m;
            }
            self.more.notified().await;
        }
    }

    /// The oldest message, if there is one.
    pub fn try_take(&self) -> Option<Outgoing> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let m = waiting.0.pop_front()?;
        waiting.1 -= m.bytes.len() as u64;
        Some(m)
    }

    /// Says whether a server can be reached.
    pub fn set_connected(&self, up: bool) {
        self.connected.store(up, Ordering::Relaxed);
    }

    /// True where a server can be reached.
    pub fn connected(&self) -> bool {
        self.connected.load(Ordering::Relaxed)
    }

    /// Bytes that wait.
    pub fn bytes(&self) -> u64 {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::subject::Topic;

    #[test]
    fn the_oldest_goes_where_there_is_no_room() {
        let outbox = Outbox::new(100);
        let message = |n: u8| Outgoing { topic: Topic::Node, bytes: vec![n; 40], operations: u64::from(n) };
        assert_eq!(outbox.put(vec![message(1), message(2)]), 0);
        assert_eq!(outbox.put(vec![message(4), message(8)]), 3);
        assert_eq!((outbox.bytes(), outbox.try_take().map(|m| m.operations)), (80, Some(4)));
    }

    #[test]
    fn what_cannot_be_used_is_named() {
        let rt = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let said = |s: &Settings| match rt.block_on(connect(s, "test", false, |_| ())) {
            Ok(_) => panic!("nobody is there"),
            Err(e) => e.to_string(),
        };
        let servers = |a: &str| Settings { servers: vec![a.into()], ..Settings::default() };
        let wrong = said(&servers("nats://host:port"));
        assert!(wrong.starts_with("cluster.servers: \"nats://host:port\": "), "{wrong}");
        let nobody = said(&servers("nats://u:secret@127.0.0.1:9"));
        assert!(nobody.starts_with("nats://***@127.0.0.1:9: ") && !nobody.contains("secret"), "{nobody}");
        let lost = Settings { nkey: Some("/nowhere/seed".into()), ..servers("nats://127.0.0.1:9") };
        assert!(said(&lost).starts_with("cluster.nkey: /nowhere/seed: No such file"), "{}", said(&lost));
    }

    #[tokio::test]
    async fn with_certificates_nothing_is_sent_without_tls() {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let server = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = format!("nats://u:secret@{}", server.local_addr().expect("bound"));
        let told = async move {
            let (mut agent, _) = server.accept().await.expect("it comes");
            let info = "INFO {\"server_id\":\"x\",\"version\":\"2.11.0\",\"max_payload\":1048576}\r\n";
            agent.write_all(info.as_bytes()).await.expect("it listens");
            let mut all = Vec::new();
            let mut some = [0; 1024];
            while let Ok(Ok(n @ 1..)) =
                tokio::time::timeout(Duration::from_secs(2), agent.read(&mut some)).await
            {
                all.extend_from_slice(&some[..n]);
            }
            all
        };
        let own = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).expect("a certificate");
        let ca = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(ca.path(), own.cert.pem()).expect("room");
        let settings = Settings {
            servers: vec![address.as_str().into()],
            ca: Some(ca.path().into()),
            ..Settings::default()
        };
        let connected =
            tokio::time::timeout(Duration::from_secs(5), connect(&settings, "test", false, |_| {}));
        let (told, connected) = tokio::join!(told, connected);
        assert!(!matches!(connected, Ok(Ok(_))), "the server has no TLS");
        assert!(!told.windows(7).any(|w| w == b"CONNECT"), "{}", String::from_utf8_lossy(&told));
    }
}
