//! The name of a node: one setting, and the same name in metrics, in OTLP and on the bus.

use crate::receiver::{Receiver, Wants};
use crate::support::agent::{Agent, diagnosed};
use crate::support::nats::{Nats, there};
use crate::support::{Play, Players, Room, run, until};
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use ringwatch::export::otlp::Protocol;
use std::collections::BTreeSet;

/// Not the name of any machine that this runs on.
const NODE: &str = "gpu-node-7.example";

/// The values of a label in everything that is scraped.
fn labels(agent: &Agent, name: &str) -> BTreeSet<String> {
    let (_, body) = agent.get("/metrics");
    let begin = format!("{name}=\"");
    let of = |line: &str| {
        let at = line.find(&format!("{{{begin}")).or_else(|| line.find(&format!(",{begin}")))?;
        Some(line[at + 1 + begin.len()..].split('"').next()?.to_owned())
    };
    body.lines().filter(|l| !l.starts_with('#')).filter_map(of).collect()
}

fn attribute(all: &[KeyValue], key: &str) -> Option<String> {
    match all.iter().find(|a| a.key == key)?.value.clone()?.value? {
        Value::StringValue(text) => Some(text),
        _ => None,
    }
}

#[test]
fn metrics_otlp_and_bus_have_one_name_of_the_node() {
    if !there("metrics_otlp_and_bus_have_one_name_of_the_node") {
        return;
    }
    let room = Room::new();
    let nats = Nats::start(&room);
    let otlp = Receiver::start(Protocol::Grpc, Wants::default(), None);
    let set = [
        nats.servers(),
        format!("otlp.endpoint={}", otlp.endpoint),
        "otlp.metrics_interval_ms=200".to_owned(),
    ];
    let set: Vec<&str> = set.iter().flat_map(|s| ["--set", s]).collect();
    let analyser = Agent::analyser(&room, &["--set", &nats.servers(), "--set", "node=control-1"]);
    // As the DaemonSet does it.
    let agent = Agent::with(&room, &set, &[("RINGWATCH_AGENT_NODE", NODE.into())]);
    let players = Players::start(&room, Play::of("missing-rank").hold(60));
    diagnosed(&room);

    assert_eq!(
        labels(&agent, "node"),
        [NODE.to_owned()].into(),
        "of the agent, its processes and its devices"
    );
    let got = until("spans and metrics", || {
        let got = otlp.got();
        (!got.spans.is_empty() && !got.metrics.is_empty()).then_some(got)
    });
    for r in &got.resources {
        for key in ["host.name", "service.instance.id"] {
            assert_eq!(attribute(&r.attributes, key).as_deref(), Some(NODE), "{key}");
        }
    }
    let hosts: BTreeSet<_> = got.spans.iter().filter_map(|s| attribute(&s.attributes, "host.name")).collect();
    assert_eq!(hosts, [NODE.to_owned()].into());
    let status = until("the node on the bus", || {
        let said = run(&mut room.ringwatch(["cluster", "status", "--cluster", &nats.url()]));
        said.out.contains(NODE).then_some(said.out)
    });
    assert!(status.contains("1 node"), "{status}");
    // An analyser speaks of jobs, and of itself.
    assert_eq!(labels(&analyser, "node"), ["control-1".to_owned()].into());
    assert_eq!((agent.end().1, analyser.end().1), (Some(0), Some(0)));
    drop(players);
}
