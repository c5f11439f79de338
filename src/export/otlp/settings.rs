//! Where to, how, and what.

use crate::secret::{SecretText, SecretUrl};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// How telemetry travels.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// gRPC over HTTP/2, port 4317 as a rule.
    #[default]
    Grpc,
    /// Protobuf over HTTP/1.1, port 4318 as a rule.
    Http,
}

/// How it is made smaller.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Compression {
    /// Not at all.
    #[default]
    None,
    /// By gzip.
    Gzip,
}

/// Export by OTLP.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// The receiver, `http://collector:4317`; without one nothing is sent. With HTTP, `/v1/traces` and so on are
    /// added. A user and a password in it are sent as the header `authorization: Basic`.
    pub endpoint: Option<SecretUrl>,
    /// How it travels.
    pub protocol: Protocol,
    /// Headers of every request.
    pub headers: BTreeMap<String, SecretText>,
    /// Certificates (PEM) that the receiver's is checked against, in place of the system's. With it the endpoint must be
    /// https://.
    pub ca: Option<PathBuf>,
    /// Our own certificate (PEM), where the receiver wants one.
    pub cert: Option<PathBuf>,
    /// The key (PEM) to it.
    pub key: Option<PathBuf>,
    /// How requests are made smaller.
    pub compression: Compression,
    /// How long one request may take, retries included.
    pub timeout_ms: u64,
    /// The share of operations, 0 to 1, that is kept from the beginning. All nodes keep the same ones.
    pub sample_ratio: f64,
    /// Operations whose transfer takes so many times the median of their class are kept.
    pub slow_factor: f64,
    /// Operations for which a rank comes so late are kept.
    pub late_ms: u64,
    /// How many a second are kept because they are slow or late; more are counted. Findings are not held to it.
    pub slow_per_second: u32,
    /// Operations remembered, so that they can still be sent when something turns out to be wrong.
    pub keep: usize,
    /// Spans, and log records, that wait at most while the receiver cannot be reached; the oldest go first. A span takes
    /// about a KiB.
    pub queue: usize,
    /// Spans of one request at most.
    pub batch: usize,
    /// How often metrics are sent, in ms; 0 for not at all.
    pub metrics_interval_ms: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            endpoint: None,
            protocol: Protocol::Grpc,
            headers: BTreeMap::new(),
            ca: None,
            cert: None,
            key: None,
            compression: Compression::None,
            timeout_ms: 10_000,
            sample_ratio: 0.001,
            slow_factor: 3.0,
            late_ms: 100,
            slow_per_second: 10,
            keep: 4096,
            queue: 16_384,
            batch: 2048,
            metrics_interval_ms: 15_000,
        }
    }
}

impl Settings {
    /// True when there is a receiver.
    pub fn is_enabled(&self) -> bool {
        self.endpoint.is_some()
    }
}
