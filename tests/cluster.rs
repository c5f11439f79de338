//! The cluster on one machine: agents with segments of their own, a real NATS server, and analysers.

#![allow(clippy::disallowed_methods, reason = "the receiver has tasks of its own")]

use crate::receiver::{Receiver, Wants};
use crate::support;
use crate::support::nats::{Nats, there};
use crate::support::{Json, Room, run, until};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::logs::v1::LogRecord;
use ringwatch::export::otlp::Protocol;
use ringwatch::replay::monotonic_ns;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A process that ends with this value, if not before.
struct Daemon(Child);

impl Daemon {
    fn start(command: &mut Command, log: PathBuf) -> Self {
        let err = std::fs::File::create(log.with_extension("err")).expect("a log");
        let out = std::fs::File::create(log.with_extension("out")).expect("a log");
        Daemon(command.stdout(out).stderr(err).spawn().expect("it starts"))
    }

    fn kill(&mut self) {
        self.0.kill().expect("our own child");
        self.0.wait().expect("our own child");
    }

    fn end(mut self) {
        let pid = rustix::process::Pid::from_child(&self.0);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("our own child");
        let status = support::wait(&mut self.0);
        assert!(status.success(), "{status}");
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// The segments of a node.
fn segments(room: &Room, node: &str) -> PathBuf {
    let dir = room.path(&format!("segments-{node}"));
    std::fs::create_dir_all(&dir).expect("a directory");
    dir
}

fn agent(room: &Room, node: &str, nats: &Nats) -> Daemon {
    let set = [
        format!("segments.directories=[{:?}]", segments(room, node)),
        "socket.path=null".to_owned(),
        "http.listen=null".to_owned(),
        "hardware.enabled=false".to_owned(),
        format!("cluster.node={node}"),
        nats.servers(),
    ];
    let mut command = room.ringwatch(["agent", "--json"]);
    for s in &set {
        command.args(["--set", s]);
    }
    Daemon::start(&mut command, room.path(&format!("agent-{node}")))
}

fn analyser(room: &Room, name: &str, nats: &Nats) -> Daemon {
    analyser_with(room, name, nats, &[])
}

fn analyser_with(room: &Room, name: &str, nats: &Nats, more: &[&str]) -> Daemon {
    let mut command = room.ringwatch(["analyser", "--json", "--set", "http.listen=null", "--set"]);
    command.arg(nats.servers()).args(["--set", &format!("cluster.node={name}")]).args(more);
    Daemon::start(&mut command, room.path(name))
}

/// Ranks 0 and 1 on node a, 2 and 3 on node b; what they recorded as two nodes.
fn job(room: &Room, scenario: &str, hold: u32) -> support::Players {
    let plugin = room.plugin();
    // Ranks that begin at different times would count what the others have not done yet.
    let start_at = monotonic_ns() + 1_500_000_000;
    let mut players = support::Players { children: Vec::new() };
    for rank in 0..4 {
        let node = if rank < 2 { "a" } else { "b" };
        let mut command = room.ringwatch(["replay", "--two-node", "--scenario", scenario]);
        command
            .args(["--rank", &rank.to_string(), "--start-at", &start_at.to_string()])
            .args(["--hold", &hold.to_string()])
            .arg("--plugin")
            .arg(&plugin)
            .env("RINGWATCH_DIR", segments(room, node))
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", "4")
            .stdout(Stdio::null());
        players.children.push(command.spawn().expect("a player starts"));
    }
    players
}

/// What `diagnose --cluster` prints once it names something of a kind.
fn diagnosed(room: &Room, nats: &Nats, kind: &str) -> Json {
    until(kind, || {
        let said = run(&mut room.ringwatch(["diagnose", "--json", "--cluster", &nats.url()]));
        let found = said.out.lines().map(parsed).find(|f| f.get("kind").text() == kind);
        if found.is_none() {
            std::thread::sleep(Duration::from_millis(200));
        }
        found
    })
}

fn parsed(line: &str) -> Json {
    serde_json::from_str(line).expect("JSON")
}

fn status(room: &Room, nats: &Nats) -> String {
    run(&mut room.ringwatch(["cluster", "status", "--cluster", &nats.url()])).out
}

/// Waits until somebody speaks for all partitions.
fn speaks(room: &Room, nats: &Nats) {
    until("an analyser speaks", || {
        let said = run(&mut room.ringwatch(["diagnose", "--cluster", &nats.url()]));
        let idle = said.err.contains("no process with the plugin is known to the analysers");
        ((said.code != Some(2) || idle) && !said.err.contains("nobody speaks")).then_some(())
    });
}

#[test]
fn one_node_sees_victims_and_the_cluster_names_the_culprit() {
    if !there("one_node_sees_victims_and_the_cluster_names_the_culprit") {
        return;
    }
    let room = Room::new();
    let nats = Nats::start(&room);
    let _analyser = analyser(&room, "one", &nats);
    let agents = ["a", "b"].map(|n| agent(&room, n, &nats));
    let _job = job(&room, "mismatch", 60);
    let found = diagnosed(&room, &nats, "mismatch");
    assert_eq!(
        found.get("ranks").list().iter().map(Json::number).collect::<Vec<_>>(),
        [1.0],
        "of four on two nodes one is wrong"
    );
    let shown = run(&mut room.ringwatch(["top", "--once", "--cluster", &nats.url()]));
    assert!(shown.out.contains("nodes 2") && shown.out.contains("! 1 culprit"), "{shown:?}");
    // Each node by itself cannot tell which of two is wrong, or sees nothing wrong at all.
    let alone = until("the node's own verdict", || {
        let told = std::fs::read_to_string(room.path("agent-a.out")).ok()?;
        told.lines().next().map(parsed)
    });
    assert_eq!(alone.get("ranks").list().len(), 2, "{alone:?}");
    // Ended as they should, they have told what became of everything.
    agents.into_iter().for_each(Daemon::end);
    let said = until("both have ended", || {
        let said = status(&room, &nats);
        (said.matches(" ended ").count() == 2).then_some(said)
    });
    for line in said.lines().filter(|l| l.contains(" ended ")) {
        let n: Vec<u64> = line.split_whitespace().skip(2).map(|w| w.parse().expect("a number")).collect();
        assert_eq!(n[3], n[4] + n[5], "observed = published + left out: {line}");
        assert!(n[3] > 0 && n[2] == 0, "{line}");
    }
}

#[test]
fn another_analyser_speaks_when_one_is_killed_and_nothing_is_told_twice() {
    if !there("another_analyser_speaks_when_one_is_killed_and_nothing_is_told_twice") {
        return;
    }
    let room = Room::new();
    let nats = Nats::start(&room);
    let mut first = analyser(&room, "one", &nats);
    speaks(&room, &nats);
    let _second = analyser(&room, "two", &nats);
    let _agents = ["a", "b"].map(|n| agent(&room, n, &nats));
    let _job = job(&room, "missing-rank", 60);
    diagnosed(&room, &nats, "missing-rank");
    let told = |name: &str| std::fs::read_to_string(room.path(name).with_extension("out")).expect("a log");
    // On a machine that is busy with other tests other findings may be true as well.
    let hangs = |name: &str| told(name).lines().filter(|l| l.contains("\"kind\":\"missing-rank\"")).count();
    assert_eq!((hangs("one"), hangs("two")), (1, 0), "{}{}", told("one"), told("two"));
    first.kill();
    let killed = Instant::now();
    let found = diagnosed(&room, &nats, "missing-rank");
    // Two processes are started for the answer, on a machine that may be busy; the lease is one second.
    assert!(killed.elapsed() < Duration::from_secs(10), "{:?}", killed.elapsed());
    assert_eq!(found.get("ranks").list().iter().map(Json::number).collect::<Vec<_>>(), [3.0]);
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(hangs("two"), 0, "it was told already: {}", told("two"));
}

/// A bucket of the server's.
fn bucket(nats: &Nats, name: &str, with: &tokio::runtime::Runtime) -> async_nats::jetstream::kv::Store {
    with.block_on(async {
        let client = async_nats::connect(nats.url()).await.expect("a server");
        let js = async_nats::jetstream::new(client);
        js.get_key_value(name).await.expect("a bucket")
    })
}

/// Leases of the eight partitions that somebody holds whose name begins so; none is held for ever.
fn leases(store: &async_nats::jetstream::kv::Store, of: &str, with: &tokio::runtime::Runtime) -> usize {
    let held = |p: u32| {
        let key = format!("$KV.ringwatch-leases.p{p}");
        let read = store.stream.get_last_raw_message_by_subject(&key);
        let lease = with.block_on(read).ok()?;
        let holder = String::from_utf8_lossy(&lease.payload).into_owned();
        let expires = lease.headers.get("Nats-TTL").is_some();
        assert!(holder.is_empty() || expires, "partition {p} is {holder}'s for good");
        holder.starts_with(of).then_some(())
    };
    (0..8).filter_map(held).count()
}

#[test]
fn who_takes_over_and_dies_at_once_leaves_no_partition_without_a_speaker() {
    if !there("who_takes_over_and_dies_at_once_leaves_no_partition_without_a_speaker") {
        return;
    }
    let room = Room::new();
    let nats = Nats::start(&room);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let mut first = analyser(&room, "first", &nats);
    speaks(&room, &nats);
    let store = bucket(&nats, "ringwatch-leases", &runtime);
    until("the first has all", || (leases(&store, "first-", &runtime) == 8).then_some(()));
    let mut second = analyser(&room, "second", &nats);
    first.kill();
    until("the second takes over", || (leases(&store, "second-", &runtime) > 0).then_some(()));
    second.kill();
    let killed = Instant::now();
    let _third = analyser(&room, "third", &nats);
    until("the third has all", || (leases(&store, "third-", &runtime) == 8).then_some(()));
    assert!(killed.elapsed() < Duration::from_secs(20), "{:?}", killed.elapsed());
    speaks(&room, &nats);
}

#[test]
fn an_analyser_that_begins_anew_does_not_tell_again_what_is_open() {
    if !there("an_analyser_that_begins_anew_does_not_tell_again_what_is_open") {
        return;
    }
    let room = Room::new();
    let nats = Nats::start(&room);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let mut before = analyser(&room, "before", &nats);
    let _agents = ["a", "b"].map(|n| agent(&room, n, &nats));
    let job = job(&room, "missing-rank", 120);
    let id = diagnosed(&room, &nats, "missing-rank").get("id").text().to_owned();
    let store = bucket(&nats, "ringwatch-findings", &runtime);
    let kept_by = |who: &str, open: bool| {
        let now = kept(&store, &id, &runtime)?;
        let by = now.get("analyser").text().starts_with(who);
        (by && *now.get("finding").get("open") == Json::Bool(open)).then_some(())
    };
    until("it is kept", || kept_by("before-", true));
    before.kill();
    let _after = analyser(&room, "after", &nats);
    until("it is found again", || kept_by("after-", true));
    let told = |name: &str| std::fs::read_to_string(room.path(name).with_extension("out")).expect("a log");
    let hangs = |name: &str| told(name).lines().filter(|l| l.contains("\"kind\":\"missing-rank\"")).count();
    assert_eq!((hangs("before"), hangs("after")), (1, 0), "{}{}", told("before"), told("after"));
    drop(job);
    until("its end is kept", || kept_by("after-", false));
}

#[test]
fn the_end_of_a_finding_that_jetstream_refuses_is_kept_as_soon_as_it_takes_it() {
    if !there("the_end_of_a_finding_that_jetstream_refuses_is_kept_as_soon_as_it_takes_it") {
        return;
    }
    let room = Room::new();
    let nats = Nats::start(&room);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let _analyser = analyser(&room, "one", &nats);
    let _agents = ["a", "b"].map(|n| agent(&room, n, &nats));
    let job = job(&room, "missing-rank", 120);
    let id = diagnosed(&room, &nats, "missing-rank").get("id").text().to_owned();
    let store = bucket(&nats, "ringwatch-findings", &runtime);
    let is_open = || Some(*kept(&store, &id, &runtime)?.get("finding").get("open") == Json::Bool(true));
    until("it is kept", || is_open().filter(|open| *open));
    let largest = |bytes: i32| {
        runtime.block_on(async {
            let client = async_nats::connect(nats.url()).await.expect("a server");
            let js = async_nats::jetstream::new(client);
            let mut config =
                js.get_stream(&store.stream_name).await.expect("a bucket").cached_info().config.clone();
            config.max_message_size = bytes;
            js.update_stream(config).await.expect("set");
        });
    };
    largest(8);
    until("that is said", || status(&room, &nats).contains("takes no verdicts").then_some(()));
    drop(job);
    let over = until("it is over", || {
        let said = run(&mut room.ringwatch(["diagnose", "--json", "--cluster", &nats.url()]));
        let found = said.out.lines().map(parsed).find(|f| f.get("id").text() == id)?;
        (*found.get("open") == Json::Bool(false)).then(|| found.get("close_reason").text().to_owned())
    });
    assert_eq!(over, "job-ended");
    assert_eq!(is_open(), Some(true), "nothing is written");
    largest(-1);
    until("its end is kept", || is_open().filter(|open| !open));
    until("that is said no more", || (!status(&room, &nats).contains("takes no verdicts")).then_some(()));
}

/// Log records about findings of a kind: their event, and the finding's id.
fn recorded(receiver: &Receiver, kind: &str) -> Vec<(String, String)> {
    let text = |r: &LogRecord, key: &str| {
        let value = r.attributes.iter().find(|a| a.key == key)?.value.clone()?.value;
        if let Some(Value::StringValue(text)) = value { Some(text) } else { None }
    };
    let of = |r: LogRecord| {
        let id = text(&r, "ringwatch.finding.id")?;
        (text(&r, "ringwatch.finding.kind")? == kind).then_some((r.event_name, id))
    };
    receiver.got().logs.into_iter().filter_map(of).collect()
}

#[test]
fn a_receiver_gets_each_finding_of_the_cluster_once_whichever_analyser_speaks() {
    if !there("a_receiver_gets_each_finding_of_the_cluster_once_whichever_analyser_speaks") {
        return;
    }
    let room = Room::new();
    let nats = Nats::start(&room);
    let receiver = Receiver::start(Protocol::Grpc, Wants::default(), None);
    let endpoint = format!("otlp.endpoint={}", receiver.endpoint);
    let more = ["--set", &endpoint, "--set", "otlp.metrics_interval_ms=500"];
    let mut first = analyser_with(&room, "one", &nats, &more);
    speaks(&room, &nats);
    let second = analyser_with(&room, "two", &nats, &more);
    let _agents = ["a", "b"].map(|n| agent(&room, n, &nats));
    let job = job(&room, "missing-rank", 60);
    let opened = until("a log record", || recorded(&receiver, "missing-rank").pop());
    assert_eq!(opened.0, "ringwatch.finding.opened");
    // What the first has told the second does not tell again, but tells the end of.
    first.kill();
    speaks(&room, &nats);
    drop(job);
    let over = ("ringwatch.finding.closed".to_owned(), opened.1.clone());
    until("it is over", || recorded(&receiver, "missing-rank").contains(&over).then_some(()));
    second.end();
    let mut all = recorded(&receiver, "missing-rank");
    // Its ranks end one by one, which changes its cause.
    all.retain(|(event, _)| event != "ringwatch.finding.updated");
    assert_eq!(all, [opened, over]);
    let got = receiver.got();
    assert!(got.spans.is_empty(), "spans are the agents': {:?}", got.spans);
    assert_eq!(got.services.into_iter().collect::<Vec<_>>(), ["ringwatch-analyser"]);
    let names: BTreeSet<&str> = got.metrics.iter().map(|m| m.name.as_str()).collect();
    for metric in ["ringwatch.cluster_findings", "ringwatch.analyser_nodes", "ringwatch.exported"] {
        assert!(names.contains(metric), "{metric}: {names:?}");
    }
}

/// What the bucket of findings holds under a name, and its revision.
fn kept(store: &async_nats::jetstream::kv::Store, key: &str, with: &tokio::runtime::Runtime) -> Option<Json> {
    let entry = with.block_on(store.entry(key)).expect("JetStream answers")?;
    serde_json::from_slice(&entry.value).ok()
}

#[test]
fn partitions_beyond_the_usual_ones_are_spoken_for_and_findings_move_to_them() {
    if !there("partitions_beyond_the_usual_ones_are_spoken_for_and_findings_move_to_them") {
        return;
    }
    let room = Room::new();
    let port = support::nats::free_port();
    let mappings = "mappings = {\n\
        \"ringwatch.v1.comm.*.*\": \"ringwatch.v1.part.11.comm.{{wildcard(1)}}.{{wildcard(2)}}\"\n\
        \"ringwatch.v1.node.*\": \"ringwatch.v1.part.9.node.{{wildcard(1)}}\"\n}";
    let nats = Nats::with(&room, "nats", port, &format!("listen: \"127.0.0.1:{port}\"\n{mappings}"));
    let _analysers = ["one", "two"].map(|n| analyser(&room, n, &nats));
    let _agents = ["a", "b"].map(|n| agent(&room, n, &nats));
    let job = job(&room, "missing-rank", 60);
    let id = diagnosed(&room, &nats, "missing-rank").get("id").text().to_owned();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let store = bucket(&nats, "ringwatch-findings", &runtime);
    let told = until("it is kept", || kept(&store, &id, &runtime));
    assert_eq!(told.get("partition").number(), 11.0, "{told:?}");
    // As if it had been told before its partition was known, by a lease that is newer than that of partition 11.
    let lease = told.get("lease").number();
    runtime.block_on(async {
        let entry = store.entry(&id).await.expect("JetStream answers").expect("it is kept");
        let mut text = String::from_utf8(entry.value.to_vec()).expect("JSON");
        for (own, other) in [
            ("\"partition\":11", "\"partition\":0"),
            (&format!("\"lease\":{lease}"), "\"lease\":1000000"),
            ("\"guessed\":false", "\"guessed\":true"),
        ] {
            assert!(text.contains(own), "{own}: {text}");
            text = text.replace(own, other);
        }
        store.put(id.as_str(), text.into()).await.expect("written");
    });
    drop(job);
    until("its end is kept", || {
        let now = kept(&store, &id, &runtime)?;
        (*now.get("finding").get("open") == Json::Bool(false)).then(|| {
            assert_eq!((now.get("partition").number(), now.get("lease").number()), (11.0, lease), "{now:?}");
        })
    });
}

#[test]
fn a_node_whose_agent_is_killed_is_named_and_no_verdict_rests_on_it() {
    if !there("a_node_whose_agent_is_killed_is_named_and_no_verdict_rests_on_it") {
        return;
    }
    let room = Room::new();
    let nats = Nats::start(&room);
    let _analyser = analyser(&room, "one", &nats);
    let _a = agent(&room, "a", &nats);
    let mut b = agent(&room, "b", &nats);
    let _job = job(&room, "missing-rank", 60);
    diagnosed(&room, &nats, "missing-rank");
    b.kill();
    let found = diagnosed(&room, &nats, "silent-node");
    assert_eq!(found.get("place").get("host").text(), "b");
    until("what rested on it is over", || {
        let said = run(&mut room.ringwatch(["diagnose", "--json", "--cluster", &nats.url()]));
        (!said.out.contains("missing-rank")).then_some(())
    });
    let _b = agent(&room, "b", &nats);
    diagnosed(&room, &nats, "missing-rank");
    until("it is heard again", || {
        let said = run(&mut room.ringwatch(["diagnose", "--json", "--cluster", &nats.url()]));
        (!said.out.contains("silent-node")).then_some(())
    });
    // What is over is told to who asks for it.
    for more in [&["--all"][..], &["--since", "24h"]] {
        let said = run(room.ringwatch(["diagnose", "--json", "--cluster", &nats.url()]).args(more));
        let over = said.out.lines().map(parsed).find(|f| f.get("kind").text() == "silent-node");
        assert_eq!(over.expect("it is kept").get("close_reason").text(), "resolved");
    }
}

#[test]
fn what_an_agent_does_not_read_keeps_no_findings_from_being_the_clusters_last_word() {
    let test = "what_an_agent_does_not_read_keeps_no_findings_from_being_the_clusters_last_word";
    if !there(test) {
        return;
    }
    let room = Room::new();
    let nats = Nats::start(&room);
    let _analyser = analyser(&room, "one", &nats);
    let _agents = ["a", "b"].map(|n| agent(&room, n, &nats));
    let _job = job(&room, "mixed", 120);
    let said = |code| {
        until("the exit code is the wanted one", || {
            let said = run(&mut room.ringwatch(["diagnose", "--cluster", &nats.url()]));
            (said.code == Some(code)).then_some(said)
        })
    };
    said(0);
    let noise = segments(&room, "a").join("noise.seg");
    std::fs::write(&noise, [7; 8192]).expect("written");
    let unread = said(2);
    assert!(unread.err.contains("the agent of a does not read 1 segments"), "{unread:?}");
    assert!(unread.out.contains("not everything was"), "{unread:?}");
    std::fs::remove_file(&noise).expect("it is there");
    said(0);
}

#[test]
fn without_a_server_agents_go_on_and_catch_up_when_it_is_back() {
    if !there("without_a_server_agents_go_on_and_catch_up_when_it_is_back") {
        return;
    }
    let room = Room::new();
    let mut nats = Nats::start(&room);
    let _analyser = analyser(&room, "one", &nats);
    let _agents = ["a", "b"].map(|n| agent(&room, n, &nats));
    let _job = job(&room, "mismatch", 60);
    diagnosed(&room, &nats, "mismatch");
    // What is asked of agents from now on is kept over the server's end.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let stream = |nats: &Nats| {
        runtime.block_on(async {
            let client = async_nats::connect(nats.url()).await.expect("a server");
            let wishes = async_nats::jetstream::stream::Config {
                name: "wishes".to_owned(),
                subjects: vec!["ringwatch.v1.wish.>".to_owned()],
                ..Default::default()
            };
            async_nats::jetstream::new(client).get_or_create_stream(wishes).await.expect("a stream")
        })
    };
    drop(stream(&nats));
    nats.kill();
    let nobody = run(&mut room.ringwatch(["diagnose", "--cluster", &nats.url()]));
    assert_eq!(nobody.code, Some(2), "{nobody:?}");
    assert!(nobody.err.contains(&nats.url()), "{}", nobody.err);
    nats.run();
    assert_eq!(
        diagnosed(&room, &nats, "mismatch").get("ranks").list().iter().map(Json::number).collect::<Vec<_>>(),
        [1.0]
    );
    let wishes = stream(&nats);
    until("agents are asked for everything", || {
        let last = wishes.get_last_raw_message_by_subject("ringwatch.v1.wish.all");
        let (mut at, mut all) = (runtime.block_on(last).ok()?.sequence, false);
        while at > 0 && !all {
            let asked = runtime.block_on(wishes.get_raw_message(at)).ok()?;
            let wish: ringwatch::cluster::message::Wish = prost::Message::decode(asked.payload).ok()?;
            (at, all) = (at - 1, wish.all);
        }
        all.then_some(())
    });
}

#[test]
fn an_operation_of_two_nodes_counts_once() {
    use ringwatch::ingest::{Place, Segments, now_ns};
    use ringwatch::model::{Func, Source};

    if !there("an_operation_of_two_nodes_counts_once") {
        return;
    }
    let room = Room::new();
    let nats = Nats::start(&room);
    let analyser = support::agent::Agent::analyser(&room, &["--set", &nats.servers()]);
    let _agents = ["a", "b"].map(|n| agent(&room, n, &nats));
    // What went before an agent is not its to tell.
    until("both agents are heard", || (analyser.sum("ringwatch_analyser_nodes") >= 2.0).then_some(()));
    let _job = job(&room, "mixed", 60);
    // Who reads the segments misses nothing. Of collectives, those count that are over where the lowest rank is: the other
    // node may be in doubt of its own for longer.
    let read = |nodes: &[&str]| {
        let places = nodes.iter().map(|n| Place::Dir(segments(&room, n))).collect();
        (Segments::new(places), ringwatch::join::Join::new())
    };
    let (mut first, mut both) = (read(&["a"]), read(&["a", "b"]));
    let mut all = || {
        let mut counts: BTreeMap<(String, bool), f64> = BTreeMap::new();
        for ((source, join), pairs) in [(&mut first, false), (&mut both, true)] {
            source.poll(now_ns()).into_iter().for_each(|u| join.feed(u));
            join.tick(now_ns());
            for (key, class) in join.classes().filter(|(k, _)| (k.func == Func::SendRecv) == pairs) {
                let func = key.func.to_string();
                *counts.entry((func.clone(), false)).or_default() += class.count() as f64;
                *counts.entry((func, true)).or_default() += class.bytes().unwrap_or(0) as f64;
            }
        }
        counts
    };
    let told = || {
        let mut counts: BTreeMap<(String, bool), f64> = BTreeMap::new();
        for (bytes, metric) in
            [(false, "ringwatch_cluster_operations_total"), (true, "ringwatch_cluster_operation_bytes_total")]
        {
            for (labels, n) in analyser.series(metric) {
                let func = labels.split("collective=\"").nth(1).and_then(|l| l.split('"').next());
                *counts.entry((func.unwrap_or_default().to_owned(), bytes)).or_default() += n;
            }
        }
        counts
    };
    let (mut last, mut since) = (all(), Instant::now());
    let want = until("the job is over", || {
        std::thread::sleep(Duration::from_millis(100));
        let now = all();
        if now != last {
            (last, since) = (now.clone(), Instant::now());
        }
        (since.elapsed() > Duration::from_secs(3) && now.len() > 4).then_some(now)
    });
    assert!(want.values().sum::<f64>() > 100.0, "{want:?}");
    let by = Instant::now() + Duration::from_secs(15);
    while told() != want && Instant::now() < by {
        std::thread::sleep(Duration::from_millis(200));
    }
    assert_eq!(told(), want);
}

#[test]
fn detail_is_asked_of_the_plugins_that_take_part() {
    use prost::Message;
    use ringwatch::cluster::message::{Burst, VERSION, Wish};
    use ringwatch_wire::layout::head;

    if !there("detail_is_asked_of_the_plugins_that_take_part") {
        return;
    }
    let room = Room::new();
    let nats = Nats::start(&room);
    let _analyser = analyser(&room, "one", &nats);
    let _agents = ["a", "b"].map(|n| agent(&room, n, &nats));
    let _job = job(&room, "mismatch", 60);
    let found = diagnosed(&room, &nats, "mismatch");
    let comm = u64::from_str_radix(found.get("communicator").text(), 16).expect("an id");
    let ask = |comm: u64| {
        let burst = Some(Burst { comm, seconds: 30, owner: None });
        let wish = Wish { version: VERSION, burst, ..Wish::default() }.encode_to_vec();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let client = async_nats::connect(nats.url()).await.expect("a server");
            client.publish("ringwatch.v1.wish.all", wish.into()).await.expect("published");
            client.flush().await.expect("sent");
        });
    };
    let wanted = |node: &str| -> Vec<(u64, u64)> {
        let word = |file: &[u8], at: usize| {
            u64::from_le_bytes(file[at * 8..at * 8 + 8].try_into().expect("eight bytes"))
        };
        let files = support::files(&segments(&room, node)).into_iter().filter_map(|f| std::fs::read(f).ok());
        files.map(|f| (word(&f, head::WANTED_COMM), word(&f, head::WANTED_UNTIL))).collect()
    };
    ask(!comm);
    ask(comm);
    for node in ["a", "b"] {
        let all = until("both processes of a node are asked", || {
            Some(wanted(node)).filter(|all| all.len() == 2 && all.iter().all(|w| w.1 > 0))
        });
        let now = monotonic_ns();
        for (of, until_ns) in all {
            assert_eq!(of, comm, "nobody takes part in another one");
            assert!((now..now + 30_000_000_000).contains(&until_ns), "{until_ns} at {now}");
        }
    }
}

/// Three kinds of users with the rights of config/examples/nats/nats.conf, whose NKeys are these.
fn guarded(room: &Room, keys: &[(&str, &nkeys::KeyPair)]) -> Nats {
    let example = include_str!("../config/examples/nats/nats.conf");
    let users = example.split_once("authorization {").expect("rights").1;
    let mut rights = format!("authorization {{{users}");
    for (name, key) in keys {
        assert!(rights.contains(name), "{name}");
        rights = rights.replace(name, &key.public_key());
    }
    let port = support::nats::free_port();
    let conf = format!("listen: \"127.0.0.1:{port}\"\n{}\n{rights}", support::nats::MAPPINGS);
    Nats::with(room, "guarded", port, &conf)
}

fn seed(room: &Room, name: &str, key: &nkeys::KeyPair) -> String {
    let path = room.path(name);
    std::fs::write(&path, key.seed().expect("a seed")).expect("written");
    path.display().to_string()
}

#[test]
fn nobody_speaks_for_another_node_reads_without_the_right_or_speaks_twice() {
    if !there("nobody_speaks_for_another_node_reads_without_the_right_or_speaks_twice") {
        return;
    }
    let room = Room::new();
    let (agent_key, analyser_key, reader_key) =
        (nkeys::KeyPair::new_user(), nkeys::KeyPair::new_user(), nkeys::KeyPair::new_user());
    let nats =
        guarded(&room, &[("UAGENT1", &agent_key), ("UANALYSER", &analyser_key), ("UREADER", &reader_key)]);
    let analyser_seed = seed(&room, "analyser.nk", &analyser_key);
    let mut command = room.ringwatch(["analyser", "--json", "--set", "http.listen=null", "--set"]);
    command.arg(nats.servers()).args(["--set", &format!("cluster.nkey={analyser_seed}")]);
    let _analyser = Daemon::start(&mut command, room.path("analyser"));
    // The agent of node-1, with its own key; and one that says it is node-2, with the same key.
    let agent_seed = seed(&room, "agent.nk", &agent_key);
    let start = |node: &str| {
        let mut command = room.ringwatch(["agent", "--json"]);
        for s in [
            format!("segments.directories=[{:?}]", segments(&room, node)),
            "socket.path=null".to_owned(),
            "http.listen=null".to_owned(),
            "hardware.enabled=false".to_owned(),
            format!("cluster.node={node}"),
            format!("cluster.nkey={agent_seed}"),
            nats.servers(),
        ] {
            command.args(["--set", &s]);
        }
        Daemon::start(&mut command, room.path(&format!("agent-{node}")))
    };
    let _own = start("node-1");
    let _false = start("node-2");
    let reader_seed = seed(&room, "reader.nk", &reader_key);
    let ask = |with: &[&str]| {
        let mut command = room.ringwatch(["cluster", "status", "--cluster", &nats.url()]);
        run(command.args(with))
    };
    let with_key = ["--cluster-nkey", &reader_seed];
    let said = until("node-1 is heard", || Some(ask(&with_key)).filter(|s| s.out.contains("node-1")));
    std::thread::sleep(Duration::from_secs(2));
    let later = ask(&with_key);
    assert!(!later.out.contains("node-2") && !said.out.contains("node-2"), "{later:?}");
    let refused = std::fs::read_to_string(room.path("agent-node-2.err")).expect("a log");
    assert!(refused.to_lowercase().contains("permissions violation"), "{refused}");
    // Without a key nobody reads.
    let stranger = ask(&[]);
    assert_eq!(stranger.code, Some(2), "{stranger:?}");
    assert!(stranger.err.to_lowercase().contains("authorization"), "{}", stranger.err);
    // What node-1 says once is not heard twice, and garbage is no message.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let seed = agent_key.seed().expect("a seed");
        let client = async_nats::ConnectOptions::with_nkey(seed).connect(nats.url()).await.expect("allowed");
        let envelope = ringwatch::cluster::message::Envelope {
            version: 1,
            node: "node-1".to_owned(),
            run: u64::MAX,
            sequence: 1,
            ..Default::default()
        };
        let bytes = prost::Message::encode_to_vec(&envelope);
        for payload in [bytes.clone(), bytes, b"\xff\xff garbage".to_vec()] {
            client.publish("ringwatch.v1.node.node-1", payload.into()).await.expect("published");
        }
        client.flush().await.expect("sent");
    });
    until("both are refused", || {
        let said = ask(&with_key).out;
        (said.contains("refused, came before: ") && said.contains("refused, not a message: 1")).then_some(())
    });
}
