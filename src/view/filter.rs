//! The rows that a filter keeps: those that hold every word of it, in any case.

use super::format;
use crate::model::{
    ClassRow, CommId, CommRow, Finding, FlightRow, JobRow, LossRow, NodeCell, RankRow, SegmentRow,
};
use std::collections::HashMap;

/// The words of a filter, ready to be matched.
#[derive(Debug)]
pub(super) struct Filter<'a> {
    words: Vec<String>,
    names: &'a HashMap<CommId, &'a str>,
}

impl<'a> Filter<'a> {
    pub(super) fn new(text: &str, names: &'a HashMap<CommId, &'a str>) -> Filter<'a> {
        Filter { words: text.split_whitespace().map(str::to_lowercase).collect(), names }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// `3 of 14` under a filter, `14` without one.
    pub(super) fn tally(&self, kept: usize, all: usize) -> String {
        if self.is_empty() { all.to_string() } else { format!("{kept} of {all}") }
    }

    fn keeps(&self, parts: &[&str], comm: Option<CommId>) -> bool {
        if self.words.is_empty() {
            return true;
        }
        let mut text = parts.join(" ").to_lowercase();
        if let Some(id) = comm {
            let name = self.names.get(&id).copied().unwrap_or_default().to_lowercase();
            text.push_str(&format!(" {id} {name}"));
        }
        self.words.iter().all(|w| text.contains(w.as_str()))
    }

    pub(super) fn job(&self, j: &JobRow) -> bool {
        self.keeps(&[j.name.as_deref().unwrap_or_default(), j.nccl.as_deref().unwrap_or_default()], None)
    }

    pub(super) fn node(&self, n: &NodeCell) -> bool {
        self.keeps(&[&n.name], None)
    }

    pub(super) fn comm(&self, c: &CommRow) -> bool {
        self.keeps(&[if c.closed { "closed" } else { "open" }], Some(c.id))
    }

    pub(super) fn flight(&self, f: &FlightRow) -> bool {
        let how = format::algo_proto(f.algo, f.proto);
        let mut parts = vec![f.func.as_str(), how.as_str()];
        let mut states: Vec<&str> = f.ranks.iter().map(|r| r.state.as_str()).collect();
        states.sort_unstable();
        states.dedup();
        parts.extend(states);
        self.keeps(&parts, Some(f.comm))
    }

    pub(super) fn class(&self, c: &ClassRow) -> bool {
        let size = format::or_absent(c.size_class, format::size_class);
        self.keeps(&[c.func.as_str(), &format::algo_proto(c.algo, c.proto), &size], Some(c.comm))
    }

    pub(super) fn rank(&self, r: &RankRow) -> bool {
        let alive = if r.alive { "alive" } else { "gone" };
        let state = r.state.map_or("idle", |s| s.as_str());
        let words = format!("rank {} pid {}", r.rank, r.pid);
        self.keeps(&[&r.host, r.gpu.as_deref().unwrap_or_default(), alive, state, &words], Some(r.comm))
    }

    pub(super) fn finding(&self, f: &Finding) -> bool {
        let ranks = f.ranks.iter().map(|r| format!("rank {r}")).collect::<Vec<_>>().join(" ");
        let op = &f.operation;
        let how =
            [&op.algo, &op.proto, &op.dtype, &op.redop].map(|o| o.as_deref().unwrap_or_default()).join(" ");
        let state = if f.open { "open" } else { "over" };
        self.keeps(&[f.kind.as_str(), &op.func, &how, &ranks, state, &f.advice], Some(f.communicator))
    }

    pub(super) fn segment(&self, s: &SegmentRow) -> bool {
        let alive = if s.alive { "alive" } else { "gone" };
        let pid = s.pid.to_string();
        self.keeps(&[&s.host, &s.program, s.nccl.as_deref().unwrap_or_default(), alive, &pid], None)
    }

    pub(super) fn loss(&self, l: &LossRow) -> bool {
        self.keeps(&[&l.reason, &l.pid.to_string()], None)
    }
}
