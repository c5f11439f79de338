//! The settings.

use crate::export::{notify, otlp, prometheus};
use crate::ingest::{StackKind, hardware};
use crate::secret::MASK;
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
    /// The name of this node in metrics, in OTLP and on the bus; null: the host's. In a container it is the orchestrator's
    /// name of the node, since the host's is the container's own.
    pub node: Option<String>,
    /// Where jobs leave their segments, and for how long those of ended ones stay.
    pub segments: SegmentSettings,
    /// When the rules speak.
    pub detect: detect::Settings,
    /// How far into the process of a hang's culprit is looked: off, python or native.
    pub stacks: StackKind,
    /// Files of `ringwatch bench --json` or `--save`, or of targets, by which transfers are judged as well.
    pub baselines: Vec<PathBuf>,
    /// Where findings are kept across restarts.
    pub findings: FindingSettings,
    /// The sampling of the machine.
    pub hardware: hardware::Settings,
    /// Where Prometheus and health checks ask.
    pub http: HttpSettings,
    /// The metrics for Prometheus.
    pub prometheus: prometheus::Settings,
    /// The telemetry for an OpenTelemetry receiver.
    pub otlp: otlp::Settings,
    /// Receivers of findings of severity warning or above: webhooks, and programs that are started.
    pub notify: notify::Settings,
    /// The cluster's bus, on which this node tells the others how far it is.
    pub cluster: cluster::Settings,
    /// Where `ringwatch top --agent` and `ringwatch diagnose --agent` ask.
    pub socket: SocketSettings,
    /// Names and values that every exported thing carries, `cluster: east` for example.
    pub tags: BTreeMap<String, String>,
    /// The limits of the agent itself.
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
    /// Takes processes of several users for members of one communicator where NCCL's number is the same: for jobs whose
    /// containers run as users of their own. Otherwise a process of another user has no part in a job's communicators.
    pub share_communicators: bool,
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
            share_communicators: false,
            pod_resources: Some(PathBuf::from("/var/lib/kubelet/pod-resources/kubelet.sock")),
        }
    }
}

/// Findings: where they outlive the agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct FindingSettings {
    /// The directory of the file in which findings are kept, for `ringwatch diagnose --since` and across restarts of the
    /// agent; null: they are forgotten when the agent ends.
    pub directory: Option<PathBuf>,
}

impl Default for FindingSettings {
    fn default() -> Self {
        FindingSettings { directory: Some(PathBuf::from("/var/lib/ringwatch")) }
    }
}

/// The HTTP server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct HttpSettings {
    /// Address and port for `/metrics`, `/livez` and `/readyz`; null: no server. It has no authentication: keep it on
    /// the loopback or behind what has. A socket of the service manager comes first; an address that is taken is tried
    /// again, while everything else runs.
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
    /// MiB that the operations and communicators of all users may take together. Beyond, the users that take most are held
    /// to a share, and what is left out of theirs is counted as lost. The process itself takes some 50 MiB more.
    pub memory_mib: u64,
}

impl Default for LimitSettings {
    fn default() -> Self {
        LimitSettings { cpu: 0.25, memory_mib: 32 }
    }
}

impl Config {
    /// Checks what no type says: values that are out of their range.
    pub(super) fn check(&self) -> Result<(), (&'static str, String)> {
        let named = |name: &String| name.is_empty() || name.len() > 253 || name.chars().any(char::is_control);
        if let Some(name) = self.node.as_ref().filter(|n| named(n)) {
            return Err(("node", format!("{name:?} is no name: 1 to 253 bytes of plain text")));
        }
        if !(self.limits.cpu > 0.0 && self.limits.cpu <= 1.0) {
            return Err(("limits.cpu", format!("{} is not in 0 to 1", self.limits.cpu)));
        }
        if self.limits.memory_mib < 4 {
            return Err(("limits.memory_mib", format!("{} is less than 4", self.limits.memory_mib)));
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
        let masked = |secret: &str| {
            secret.contains(MASK).then(|| format!("{MASK} is a mask, and the secret is missing"))
        };
        let servers = self.cluster.servers.iter().find_map(|s| masked(s.exposed()));
        let endpoint = self.otlp.endpoint.as_ref().and_then(|e| masked(e.exposed()));
        let headers = self.otlp.headers.values().find_map(|v| masked(v.exposed()));
        let notify = self.notify.secrets().find_map(|s| masked(s.exposed()));
        for (key, why) in [
            ("cluster.servers", servers),
            ("otlp.endpoint", endpoint),
            ("otlp.headers", headers),
            ("notify.webhooks", notify),
        ] {
            if let Some(why) = why {
                return Err((key, why));
            }
        }
        for (key, share) in [("otlp.sample_ratio", self.otlp.sample_ratio)] {
            if !(0.0..=1.0).contains(&share) {
                return Err((key, format!("{share} is not in 0 to 1")));
            }
        }
        self.notify.check()?;
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
