//! The agent's own cost, which its owner knows.

use super::analysis::Bus;
use super::family::Families;
use crate::export::catalogue as c;
use crate::model::UnreadReason;
use std::collections::BTreeMap;

/// The facts of the agent about itself.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Own {
    /// The moment that all of this is of, host monotonic ns.
    pub now_ns: u64,
    /// The host it runs on.
    pub node: String,
    /// CPU time used so far.
    pub cpu_seconds: f64,
    /// Memory held, in bytes.
    pub resident_bytes: u64,
    /// Files open, where that can be known.
    pub open_fds: Option<u64>,
    /// Segments followed.
    pub segments: u64,
    /// Segments and directories that are not read, by reason.
    pub unread: BTreeMap<UnreadReason, u64>,
    /// When it started, wall clock ns since the epoch.
    pub started_unix_ns: u64,
    /// Looks taken at the sources so far.
    pub polls: u64,
    /// Time these took in all, in seconds.
    pub poll_seconds: f64,
    /// Connections that were closed or refused before they were served, by server and reason.
    pub connections_closed: BTreeMap<(&'static str, &'static str), u64>,
    /// Attempts to listen for HTTP that failed.
    pub listen_failures: u64,
    /// The telemetry that it sent.
    pub exported: Vec<Exported>,
    /// The state of its bus, where it has one.
    pub bus: Option<Bus>,
}

/// The accounting of one signal: spans, log records or metric points.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Exported {
    /// Which: `spans`, `logs`, `metrics`.
    pub signal: &'static str,
    /// Taken by the receiver so far.
    pub sent: u64,
    /// Waiting.
    pub queued: u64,
    /// Lost so far, by reason.
    pub lost: BTreeMap<&'static str, u64>,
}

impl Own {
    pub(super) fn gather(&self, out: &mut Families, series: usize, folded: u64, dropped: u64) {
        let node = [&*self.node];
        out.number(c::AGENT_CPU, &node, self.cpu_seconds);
        out.number(c::AGENT_MEMORY, &node, self.resident_bytes as f64);
        out.known(c::AGENT_FDS, &node, self.open_fds.map(|n| n as f64));
        out.number(c::AGENT_SEGMENTS, &node, self.segments as f64);
        for reason in UnreadReason::ALL {
            let n = self.unread.get(&reason).copied().unwrap_or(0);
            out.number(c::AGENT_UNREAD, &[&self.node, reason.as_str()], n as f64);
        }
        out.number(c::AGENT_START, &node, self.started_unix_ns as f64 / 1e9);
        out.number(c::AGENT_POLLS, &node, self.polls as f64);
        out.number(c::AGENT_POLL_SECONDS, &node, self.poll_seconds);
        for ((server, reason), n) in &self.connections_closed {
            out.number(c::AGENT_CONNECTIONS_CLOSED, &[&self.node, server, reason], *n as f64);
        }
        out.number(c::AGENT_LISTEN_FAILURES, &node, self.listen_failures as f64);
        out.number(c::SERIES, &node, series as f64);
        out.number(c::FOLDED, &node, folded as f64);
        let operations = [&*self.node, "operations", "nobody took them in time"];
        out.number(c::LOST_EXPORTS, &operations, dropped as f64);
        for e in &self.exported {
            for (reason, n) in &e.lost {
                out.number(c::LOST_EXPORTS, &[&self.node, e.signal, reason], *n as f64);
            }
            out.number(c::SENT, &[&self.node, e.signal], e.sent as f64);
            out.number(c::QUEUED, &[&self.node, e.signal], e.queued as f64);
        }
        if let Some(bus) = &self.bus {
            bus.gather(out, &self.node);
        }
        out.number(c::BUILD, &[&self.node, env!("CARGO_PKG_VERSION")], 1.0);
    }
}
