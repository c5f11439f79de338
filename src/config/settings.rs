//! What can be set.

use crate::export::{otlp, prometheus};
use crate::ingest::{StackKind, hardware};
use crate::{cluster, detect};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

/// The agent's settings.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Where jobs leave their segments, and for how long those of ended ones stay.
    pub segments: SegmentSettings,
    /// When the rules speak.
    pub detect: detect::Settings,
    /// How far into the process of a hang's culprit is looked: off, python or native.
    pub stacks: StackKind,
    /// Files of `ringwatch bench --json`, by which transfers are judged as well.
    pub baselines: Vec<PathBuf>,
    /// What is sampled of the machine, and how often.
    pub hardware: hardware::Settings,
    /// Where Prometheus and health checks ask.
    pub http: HttpSettings,
    /// What Prometheus is told.
    pub prometheus: prometheus::Settings,
    /// What is sent to an OpenTelemetry receiver.
    pub otlp: otlp::Settings,
    /// The cluster's bus, on which this node tells the others how far it is.
    pub cluster: cluster::Settings,
    /// Where `ringwatch top --agent` and `ringwatch diagnose --agent` ask.
    pub socket: SocketSettings,
    /// Names and values that every exported thing carries, `cluster: east` for example.
    pub tags: BTreeMap<String, String>,
    /// What the agent may use itself.
    pub limits: LimitSettings,
}

/// Segments: where they lie and how long they stay.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SegmentSettings {
    /// Directories that are searched; empty: `/dev/shm/ringwatch-*` of the host and of every container on it.
    pub directories: Vec<PathBuf>,
    /// Time between two looks at the segments, in ms; four times as long while every process issues operations. A busy job
    /// is looked at more often, so that nothing is overwritten unread.
    pub look_ms: u64,
    /// Segments of dead processes are removed, the oldest first, when those of one directory take more than so many
    /// MiB, and always beyond a sixteenth of the file system.
    pub keep_mib: u64,
    /// Segments of dead processes are removed after so many hours; 0: never for their age.
    pub keep_hours: u64,
    /// The socket on which the kubelet tells which containers were given which GPUs, by which processes get the names of
    /// their pods; null: it is not asked. Where there is none, nothing is said.
    pub pod_resources: Option<PathBuf>,
}

impl Default for SegmentSettings {
    fn default() -> Self {
        SegmentSettings {
            directories: Vec::new(),
            look_ms: 50,
            keep_mib: 256,
            keep_hours: 24,
            pod_resources: Some(PathBuf::from("/var/lib/kubelet/pod-resources/kubelet.sock")),
        }
    }
}

/// The HTTP server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct HttpSettings {
    /// Address and port for `/metrics`, `/livez` and `/readyz`; null: no server. It has no authentication: keep it on
    /// the loopback or behind what has.
    pub listen: Option<SocketAddr>,
}

impl Default for HttpSettings {
    fn default() -> Self {
        HttpSettings { listen: Some(SocketAddr::from((Ipv4Addr::LOCALHOST, 9478))) }
    }
}

/// The Unix socket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SocketSettings {
    /// Its path; null: no socket.
    pub path: Option<PathBuf>,
    /// Users, by number, who see every user's jobs. Root and the agent's own user do, everybody else sees their own.
    pub see_all_uids: Vec<u32>,
    /// Groups, by number, whose members see every user's jobs.
    pub see_all_gids: Vec<u32>,
}

impl Default for SocketSettings {
    fn default() -> Self {
        SocketSettings {
            path: Some(PathBuf::from("/run/ringwatch/agent.sock")),
            see_all_uids: Vec::new(),
            see_all_gids: Vec::new(),
        }
    }
}

/// The agent's own share of the machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LimitSettings {
    /// Of one CPU, 0 to 1, that reading segments may take: beyond, it is done less often, and what is overwritten
    /// meanwhile is counted as lost.
    pub cpu: f64,
}

impl Default for LimitSettings {
    fn default() -> Self {
        LimitSettings { cpu: 0.25 }
    }
}

impl Config {
    /// What no type tells: values that are out of their range.
    pub(super) fn check(&self) -> Result<(), (&'static str, String)> {
        if !(self.limits.cpu > 0.0 && self.limits.cpu <= 1.0) {
            return Err(("limits.cpu", format!("{} is not in 0 to 1", self.limits.cpu)));
        }
        if !(1..=1000).contains(&self.segments.look_ms) {
            return Err(("segments.look_ms", format!("{} is not in 1 to 1000", self.segments.look_ms)));
        }
        for (name, value) in &self.tags {
            let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
            if name.is_empty() || !name.chars().all(plain) {
                return Err(("tags", format!("{name:?} is no name: letters, digits, `_`, `.` and `-`")));
            }
            if value.chars().any(char::is_control) || value.len() > 256 {
                return Err((
                    "tags",
                    format!("the value of {name} is longer than 256 bytes or not plain text"),
                ));
            }
        }
        for (key, share) in [("otlp.sample_ratio", self.otlp.sample_ratio)] {
            if !(0.0..=1.0).contains(&share) {
                return Err((key, format!("{share} is not in 0 to 1")));
            }
        }
        if self.cluster.cert.is_some() != self.cluster.key.is_some() {
            return Err(("cluster.cert", "a certificate and its key belong together".to_owned()));
        }
        if self.cluster.silent_ms < 2000 {
            let n = self.cluster.silent_ms;
            return Err(("cluster.silent_ms", format!("{n} is less than 2000: agents speak once a second")));
        }
        if self.cluster.bytes_per_second < 1024 {
            let n = self.cluster.bytes_per_second;
            return Err(("cluster.bytes_per_second", format!("{n} is less than 1024")));
        }
        if self.otlp.cert.is_some() != self.otlp.key.is_some() {
            return Err(("otlp.cert", "a certificate and its key belong together".to_owned()));
        }
        if let Some(path) = self.socket.path.as_ref().filter(|p| !p.is_absolute()) {
            return Err(("socket.path", format!("{} is not absolute", path.display())));
        }
        Ok(())
    }
}
