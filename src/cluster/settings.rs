//! The settings of the bus.

use crate::secret::SecretUrl;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;

/// Where the bus is, and what this node may put on it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// NATS servers, `nats://host:4222` or `tls://host:4222`, one of which is used at a time; none: no bus.
    pub servers: Vec<SecretUrl>,
    /// The old name of `node`.
    pub node: Option<String>,
    /// The file of this node's credentials (JWT and seed), as `nsc` writes it; null: none.
    pub credentials: Option<PathBuf>,
    /// The file of this node's seed (NKey); null: none.
    pub nkey: Option<PathBuf>,
    /// The user's name, where the servers ask for one.
    pub user: Option<String>,
    /// The file of the password to it.
    pub password_file: Option<PathBuf>,
    /// Certificates (PEM) that the servers' are checked against; null: the system's. With it nothing is sent without TLS.
    pub ca: Option<PathBuf>,
    /// Our own certificate (PEM), where the servers want one.
    pub cert: Option<PathBuf>,
    /// The key (PEM) to it.
    pub key: Option<PathBuf>,
    /// Bytes a second that this node publishes at most; what does not fit is counted.
    pub bytes_per_second: u64,
    /// Bytes that wait at most while no server can be reached; the oldest go first, and are counted.
    pub waiting_bytes: u64,
    /// Lets analysers ask for stacks of this node's processes.
    pub stacks: bool,
    /// An analyser calls a node silent that it has not heard for so long; agents speak once a second.
    pub silent_ms: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            servers: Vec::new(),
            node: None,
            credentials: None,
            nkey: None,
            user: None,
            password_file: None,
            ca: None,
            cert: None,
            key: None,
            bytes_per_second: 65_536,
            waiting_bytes: 4 << 20,
            stacks: true,
            silent_ms: 3000,
        }
    }
}

impl Settings {
    /// How long a node may say nothing.
    pub fn silent(&self) -> Duration {
        Duration::from_millis(self.silent_ms)
    }

    /// The servers as messages name them, without users and passwords.
    pub fn named_servers(&self) -> String {
        self.servers.iter().map(SecretUrl::to_string).collect::<Vec<_>>().join(", ")
    }

    /// True when there is a bus.
    pub fn is_enabled(&self) -> bool {
        !self.servers.is_empty()
    }
}
