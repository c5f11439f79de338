//! What a reader of the cluster gets from analysers, and what analysers and agents are asked.

use crate::outputs;
use crate::plain;
use ringwatch::report;
use ringwatch::runtime::agent;
use ringwatch::runtime::analyser::{Answer, Question, Reply};
use ringwatch::runtime::cluster::{Cluster, together};

/// Replies to the question for verdicts: each line is one.
pub(super) fn verdicts(bytes: &[u8]) {
    let replies: Vec<Reply> = bytes.split(|b| *b == b'\n').filter_map(Reply::read).take(4).collect();
    let cluster = Cluster::of(&replies);
    assert_eq!(cluster.analysers, replies.len());
    let open: usize = replies.iter().map(|r| r.findings.len()).sum();
    assert!(cluster.findings.len() <= open, "{} of {open} findings", cluster.findings.len());
    let findings: Vec<_> = cluster.findings.iter().chain(&cluster.closed).cloned().collect();
    let mut text = Vec::new();
    report::text(&mut text, &findings).unwrap();
    plain::lines("a line about a finding", std::str::from_utf8(&text).unwrap(), 64 << 10);
    plain::json("a finding", &serde_json::to_value(&findings).unwrap(), outputs::TEXT_MAX);
    for n in &cluster.nodes {
        plain::text("a node", &n.name, outputs::TEXT_MAX);
    }
    cluster.refused.keys().for_each(|why| plain::text("a reason", why, outputs::TEXT_MAX));
    cluster.not_kept.iter().for_each(|why| plain::text("a reason", why, outputs::TEXT_MAX));
}

/// Answers for a screen: each line is one.
pub(super) fn screens(bytes: &[u8]) {
    let answers: Vec<Answer> = bytes.split(|b| *b == b'\n').filter_map(Answer::read).take(4).collect();
    together(answers, "nats://host:4222").into_iter().for_each(outputs::screens);
}

/// Questions to an analyser and to an agent.
pub(super) fn questions(bytes: &[u8]) {
    if let Some(q) = Question::read(bytes) {
        let written = serde_json::to_vec(&q).unwrap();
        let again: Question = serde_json::from_slice(&written).unwrap();
        assert_eq!(again, q, "it reads as it was written");
    }
    if let Ok(q) = serde_json::from_slice::<agent::Question>(bytes) {
        let written = serde_json::to_vec(&q).unwrap();
        assert_eq!(serde_json::from_slice::<agent::Question>(&written).unwrap(), q);
    }
}

/// What an agent answers on its socket. It runs as root or as the user who asks, so texts are the job's, cleaned already;
/// screens clean them again.
pub(super) fn agent(bytes: &[u8]) {
    if let Ok(agent::Answer::Snapshot(s)) = serde_json::from_slice(bytes) {
        outputs::screens(*s);
    }
}
