//! A whole cluster in small: how much there is, and one cell a node.

use super::CommId;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Where in a cluster one looks: at all of it, or at one job, node or communicator.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct At {
    /// The job, by name; the empty name is that of jobs without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub job: Option<String>,
    /// The node, by name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// The communicator.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub communicator: Option<CommId>,
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Cluster")?;
        match self.job.as_deref() {
            Some("") => f.write_str(" > job without a name")?,
            Some(job) => write!(f, " > job {job}")?,
            None => {}
        }
        if let Some(node) = &self.node {
            write!(f, " > node {node}")?;
        }
        if let Some(comm) = self.communicator {
            write!(f, " > communicator {comm}")?;
        }
        Ok(())
    }
}

/// The worst that is known of a node, the worst last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NodeState {
    /// Its agent said that it ends.
    Ended,
    /// No process of a job lives there.
    #[default]
    Idle,
    /// Nothing is wrong with it.
    Well,
    /// Its ranks wait for others.
    Held,
    /// A finding names it, or ranks on it.
    Named,
    /// Nothing is heard of it.
    Silent,
    /// A finding that names it lets a job stand still.
    Blamed,
}

impl NodeState {
    /// Every state, the worst first.
    pub const ALL: [NodeState; 7] = [
        NodeState::Blamed,
        NodeState::Silent,
        NodeState::Named,
        NodeState::Held,
        NodeState::Well,
        NodeState::Idle,
        NodeState::Ended,
    ];

    /// One character, so that the state never rests on colour alone.
    pub const fn mark(self) -> char {
        match self {
            NodeState::Blamed => '!',
            NodeState::Silent => '?',
            NodeState::Named => 'w',
            NodeState::Held => '~',
            NodeState::Well => '=',
            NodeState::Idle => '.',
            NodeState::Ended => 'x',
        }
    }

    /// The state in words.
    pub const fn as_str(self) -> &'static str {
        match self {
            NodeState::Blamed => "culprit",
            NodeState::Silent => "silent",
            NodeState::Named => "warned",
            NodeState::Held => "held up",
            NodeState::Well => "well",
            NodeState::Idle => "idle",
            NodeState::Ended => "ended",
        }
    }
}

/// One node. In JSON a list, without names for its parts: there are thousands.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "(String, usize, NodeState, usize, bool)", into = "(String, usize, NodeState, usize, bool)")]
pub struct NodeCell {
    /// Its name.
    pub name: String,
    /// Processes that run.
    pub processes: usize,
    /// The worst that is known of it.
    pub state: NodeState,
    /// Open findings that name it, or ranks on it.
    pub findings: usize,
    /// True where nothing is heard of it.
    pub silent: bool,
}

impl From<(String, usize, NodeState, usize, bool)> for NodeCell {
    fn from(t: (String, usize, NodeState, usize, bool)) -> Self {
        NodeCell { name: t.0, processes: t.1, state: t.2, findings: t.3, silent: t.4 }
    }
}

impl From<NodeCell> for (String, usize, NodeState, usize, bool) {
    fn from(c: NodeCell) -> Self {
        (c.name, c.processes, c.state, c.findings, c.silent)
    }
}

/// How much there is of what.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Totals {
    /// Nodes that are known.
    pub nodes: usize,
    /// Nodes of which nothing is heard.
    pub silent: usize,
    /// Processes that run.
    pub processes: usize,
    /// Communicators that are open.
    pub communicators: usize,
    /// Open findings.
    pub findings: usize,
    /// Collectives a second over the last seconds, each counted once; absent where not known yet.
    pub ops_per_s: Option<f64>,
    /// Records that were lost on the nodes.
    pub lost: u64,
    /// Messages of agents that never came.
    pub missed: u64,
    /// Operations that agents left out, for want of room or of bytes.
    pub left_out: u64,
}

/// The rows that an answer had no room for.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Rest {
    /// Jobs.
    pub jobs: usize,
    /// Communicators.
    pub comms: usize,
    /// Operations in flight.
    pub in_flight: usize,
    /// Classes of operations.
    pub classes: usize,
    /// Ranks of the communicator shown.
    pub ranks: usize,
    /// Processes of the node shown.
    pub segments: usize,
    /// Findings.
    pub findings: usize,
    /// Nodes.
    pub nodes: usize,
    /// Of these, nodes that are not well.
    pub troubled: usize,
}

/// A whole cluster in small.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Fleet {
    /// The place that the rest of the snapshot is about.
    pub at: At,
    /// How much there is in all.
    pub totals: Totals,
    /// The nodes of what is looked at, by name.
    pub nodes: Vec<NodeCell>,
    /// The rows that there was no room for.
    pub rest: Rest,
    /// Analysers that answered.
    pub analysers: usize,
    /// Partitions for which nobody speaks.
    pub unspoken: Vec<u32>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_read_is_what_was_written_and_cells_are_small() {
        let cell = NodeCell {
            name: "gpu-node-0001".into(),
            processes: 8,
            state: NodeState::Held,
            findings: 2,
            silent: false,
        };
        let text = serde_json::to_string(&cell).expect("text");
        assert_eq!(text, r#"["gpu-node-0001",8,"held",2,false]"#);
        let f = Fleet {
            at: At { job: Some("llama".into()), node: None, communicator: Some(CommId::unowned(u64::MAX)) },
            nodes: vec![cell],
            unspoken: vec![3],
            ..Fleet::default()
        };
        let text = serde_json::to_string(&f).expect("text");
        assert_eq!(serde_json::from_str::<Fleet>(&text).expect("read"), f);
        assert_eq!(f.at.to_string(), "Cluster > job llama > communicator ffffffffffffffff");
        assert!(NodeState::ALL.windows(2).all(|w| w[0] > w[1]), "the worst first");
    }
}
