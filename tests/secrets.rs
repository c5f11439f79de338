//! Secrets are planted wherever settings come from, and searched for in everything that the program prints.

use crate::receiver::{Receiver, Wants};
use crate::support;
use crate::support::agent::{Agent, socket};
use crate::support::nats::{Nats, free_port, there};
use crate::support::{Room, Said, run, until};
use ringwatch::config::{self, Overrides};
use ringwatch::export::otlp::Protocol;
use std::fs;

/// Part of every planted secret. No output may hold it.
const PLANTED: &str = "pL4nt3d";

fn search(what: &str, text: &str) {
    assert!(!text.contains(PLANTED), "{what}: {text}");
}

/// Runs the program; what it said must not hold a secret.
fn said(room: &Room, arguments: &[&str], variables: &[(&str, &str)]) -> Said {
    let said = run(room.ringwatch(arguments).envs(variables.iter().copied()));
    search(&format!("{arguments:?} {variables:?}: stdout"), &said.out);
    search(&format!("{arguments:?} {variables:?}: stderr"), &said.err);
    said
}

/// A file in which everything that may hold a secret holds one.
const RIGHT: &str = r#"
cluster:
  servers: ["nats://user:pL4nt3d-a@nats.invalid:4222", "nats://pL4nt3d-token@nats.invalid:4222"]
otlp:
  endpoint: "http://user:pL4nt3d-b@collector.invalid:4317/?key=pL4nt3d-query"
  headers: {authorization: "Bearer pL4nt3d-c", x-key: pL4nt3d-d}
notify:
  webhooks:
  - {url: "http://receiver.invalid/pL4nt3d-e", format: pagerduty, routing_key: pL4nt3d-f, headers: {x-key: pL4nt3d-g}}
"#;

/// The same, by variables and options.
const VARIABLES: [(&str, &str); 3] = [
    ("RINGWATCH_AGENT_CLUSTER__SERVERS", "[\"nats://user:pL4nt3d-a@nats.invalid:4222\"]"),
    ("RINGWATCH_AGENT_OTLP__ENDPOINT", "http://user:pL4nt3d-b@collector.invalid:4317"),
    ("RINGWATCH_AGENT_OTLP__HEADERS", "{authorization: Bearer pL4nt3d-c}"),
];

#[test]
fn settings_in_force_are_printed_without_their_secrets() {
    let room = Room::new();
    let path = room.path("agent.yaml");
    fs::write(&path, RIGHT).unwrap();
    let of_file = said(&room, &["config", "print", "--config", path.to_str().unwrap()], &[]);
    let of_variables = said(&room, &["config", "print"], &VARIABLES);
    for printed in [of_file, of_variables] {
        assert_eq!(printed.code, Some(0), "{}", printed.err);
        for masked in
            ["nats://***@nats.invalid:4222", "http://***@collector.invalid:4317", "authorization: '***'"]
        {
            assert!(printed.out.contains(masked), "{masked} in {}", printed.out);
        }
    }
    // An override of one key leaves the secrets of the others what they are.
    let overrides = Overrides::default().options(&["cluster.stacks=false".to_owned()]).unwrap();
    let settings = config::load(Some(&path), &overrides).unwrap();
    assert_eq!(settings.cluster.servers[0].exposed(), "nats://user:pL4nt3d-a@nats.invalid:4222");
    assert_eq!(settings.otlp.headers["x-key"].exposed(), "pL4nt3d-d");
    search("Debug", &format!("{settings:?} {settings:#?}"));
    search("JSON", &serde_json::to_string(&settings).unwrap());
    // What was printed is not a file to be used.
    fs::write(&path, config::print(&settings).unwrap()).unwrap();
    let back = said(&room, &["config", "check", "--config", path.to_str().unwrap()], &[]);
    assert_eq!(back.code, Some(2));
    assert!(back.err.contains("cluster.servers: *** is a mask"), "{}", back.err);
}

/// Files that are wrong on a line with a secret, beside it, or because of it.
const WRONG: [&str; 26] = [
    "cluster:\n  servers: nats://user:pL4nt3d@host:4222\n",
    "cluster:\n  servers: [\"nats://user:pL4nt3d@host:4222\"\n",
    "cluster:\n  servers:\n    - nats://user:pL4nt3d@host: 4222: 1\n",
    "cluster:\n  servers:\n    - {nats://user:pL4nt3d@host:4222: 1}\n",
    "cluster:\n  server: nats://user:pL4nt3d@host:4222\n",
    "cluster:\n  password: pL4nt3d\n",
    "cluster:\n  stacks: pL4nt3d\n",
    "cluster: pL4nt3d\n",
    "otlp:\n  headers: Bearer pL4nt3d\n",
    "notify:\n  webhooks:\n  - {url: pL4nt3d}\n",
    "notify:\n  webhooks:\n  - {url: \"http://user:pL4nt3d@host/x\"}\n",
    "notify:\n  webhooks:\n  - {url: \"http://host/pL4nt3d\", headers: {x: \"pL4nt3d\\n\"}}\n",
    "notify:\n  webhooks:\n  - {url: [\"http://host/pL4nt3d\"]}\n",
    "otlp:\n  headers:\n    authorization: Bearer: pL4nt3d\n",
    "otlp:\n  headers:\n    authorization: [pL4nt3d]\n",
    "otlp:\n  headers:\n    authorization: \"pL4nt3d\n",
    "otlp:\n  headers:\n    authorization: >\n     Bearer pL4nt3d\n   x\n",
    "otlp:\n  headers:\n\tauthorization: pL4nt3d\n",
    "otlp:\n  protocol: pL4nt3d\n",
    "otlp:\n  endpoint: [pL4nt3d]\n",
    "prometheus:\n  headers: {authorization: Bearer pL4nt3d}\n",
    "http:\n  password: pL4nt3d\n",
    "http:\n  listen: http://user:pL4nt3d@host\n",
    "detect:\n  patience_ms: 1\n otlp: {headers: {authorization: pL4nt3d}}\n",
    "{otlp: {headers: {authorization: pL4nt3d}}, http: {port: 1}}\n",
    "nats://user:pL4nt3d@host:4222\n",
];

#[test]
fn errors_of_files_show_no_secret() {
    let room = Room::new();
    let path = room.path("agent.yaml");
    let name = path.to_str().unwrap();
    for text in WRONG {
        fs::write(&path, text).unwrap();
        for verb in [["config", "check"], ["config", "print"]] {
            let said = said(&room, &[verb[0], verb[1], "--config", name], &[]);
            assert_eq!(said.code, Some(2), "{text}: {}", said.err);
            assert!(said.err.contains(&format!("ringwatch: {name}:")), "{text}: {}", said.err);
        }
    }
}

#[test]
fn errors_of_options_and_variables_show_no_secret() {
    let room = Room::new();
    for option in [
        "nats://user:pL4nt3d@host:4222",
        "nats://user:pL4nt3d@host:4222=x",
        "pL4nt3d value",
        "cluster.servers=nats://user:pL4nt3d@host:4222",
        "cluster.servers=[\"nats://user:pL4nt3d@host:4222\"",
        "cluster.server=[\"nats://user:pL4nt3d@host:4222\"]",
        "cluster.nats://user:pL4nt3d@host=1",
        "otlp.headers=Bearer pL4nt3d",
        "otlp.headers.authorization=[pL4nt3d]",
        "otlp.headers.authorization=\"pL4nt3d",
        "otlp.protocol=pL4nt3d",
        "detect.warm_up=pL4nt3d",
    ] {
        let said = said(&room, &["config", "check", "--set", option], &[]);
        assert_eq!(said.code, Some(2), "{option}: {}", said.err);
        assert!(said.err.contains("--set "), "{option}: {}", said.err);
    }
    for (name, value) in [
        ("RINGWATCH_AGENT_CLUSTER__SERVERS", "nats://user:pL4nt3d@host:4222"),
        ("RINGWATCH_AGENT_CLUSTER__SERVERS", "[nats://user:pL4nt3d@host:4222"),
        ("RINGWATCH_AGENT_OTLP__HEADERS", "Bearer pL4nt3d"),
        ("RINGWATCH_AGENT_OTLP__HEADERS__AUTHORIZATION", "{a: pL4nt3d}"),
        ("RINGWATCH_AGENT_OTLP__PASSWORD", "pL4nt3d"),
    ] {
        let said = said(&room, &["config", "check"], &[(name, value)]);
        assert_eq!(said.code, Some(2), "{name}: {}", said.err);
        assert!(said.err.contains(name), "{name}: {}", said.err);
    }
    // What the parser of arguments quotes.
    for arguments in [
        ["cluster", "status", "nats://user:pL4nt3d@host:4222"],
        ["top", "--cluster=nats://a", "nats://user:pL4nt3d@host:4222"],
        ["nats://user:pL4nt3d@host:4222", "diagnose", "--json"],
    ] {
        assert_eq!(said(&room, &arguments, &[]).code, Some(2));
    }
}

#[test]
fn errors_of_what_connects_show_no_secret() {
    let room = Room::new();
    let port = free_port();
    let server = format!("nats://user:pL4nt3d@127.0.0.1:{port}");
    for url in [
        server.as_str(),
        "nats://user:pL4nt3d@127.0.0.1:99999",
        "nats://user:pL4nt3d@127.0.0.1:port",
        "nats://us/er:pL4nt3d@127.0.0.1:4222",
        "gopher://user:pL4nt3d@127.0.0.1:4222",
        "user:pL4nt3d@127.0.0.1:port",
        "nats://pL4nt3d@",
    ] {
        for verb in [&["diagnose"][..], &["cluster", "status"], &["top", "--once"]] {
            let said = said(&room, &[verb, &["--cluster", url]].concat(), &[]);
            assert_eq!(said.code, Some(2), "{url}: {}", said.out);
        }
        // A host that is not found is tried again, as a server that is not there is.
        if url != server && !url.contains("us/er") {
            let set = format!("cluster.servers=[{url:?}]");
            let said = said(&room, &["agent", "--set", &set, "--set", "http.listen=null"], &[]);
            assert_eq!(said.code, Some(2), "{url}: {}", said.err);
        }
    }
    for endpoint in [
        "http://user:pL4nt3d@127.0.0.1:99999",
        "http://user:pL4nt3d@127.0.0.1:port",
        "ftp://user:pL4nt3d@host",
        "http://us/er:pL4nt3d@",
        "pL4nt3d@host",
    ] {
        for protocol in ["grpc", "http"] {
            let (endpoint, protocol) =
                (format!("otlp.endpoint={endpoint}"), format!("otlp.protocol={protocol}"));
            let set = [
                "agent",
                "--set",
                "http.listen=null",
                "--set",
                "socket.path=null",
                "--set",
                &endpoint,
                "--set",
            ];
            let said = said(&room, &[&set[..], &[&protocol]].concat(), &[]);
            assert_eq!(said.code, Some(2), "{endpoint}: {}", said.err);
            assert!(said.err.contains("otlp: "), "{endpoint}: {}", said.err);
        }
    }
    let header = ["agent", "--set", "otlp.endpoint=http://host", "--set", "otlp.headers.x=pL4nt3d\u{1}"];
    assert_eq!(said(&room, &header, &[]).code, Some(2));
    // Files of secrets that are not what they should be.
    let file = room.path("file");
    fs::write(&file, "pL4nt3d\n").unwrap();
    for option in ["--cluster-credentials", "--cluster-nkey", "--cluster-ca"] {
        let arguments = ["diagnose", "--cluster", &server, option, file.to_str().unwrap()];
        assert_eq!(said(&room, &arguments, &[]).code, Some(2), "{option}");
    }
}

/// Everything that a daemon says and answers while its secrets are in use.
#[test]
fn what_daemons_say_and_answer_holds_no_secret() {
    let test = "what_daemons_say_and_answer_holds_no_secret";
    if !there(test) {
        return;
    }
    let room = Room::new();
    let port = free_port();
    let conf = format!(
        "listen: \"127.0.0.1:{port}\"\nauthorization: {{user: user, password: pL4nt3d-nats}}\n{}",
        support::nats::MAPPINGS
    );
    let mut nats = Nats::with(&room, "guarded", port, &conf);
    let server = format!("nats://user:pL4nt3d-nats@127.0.0.1:{port}");
    let otlp = Receiver::start(Protocol::Http, Wants { user: true, ..Wants::default() }, None);
    let settings = [
        format!("cluster.servers=[{server:?}]"),
        format!("otlp.endpoint=http://user:pL4nt3d-otlp@127.0.0.1:{}", otlp.port),
        "otlp.protocol=http".to_owned(),
        "otlp.headers.x-tenant=pL4nt3d-header".to_owned(),
        "otlp.metrics_interval_ms=200".to_owned(),
    ];
    let set: Vec<&str> = settings.iter().flat_map(|s| ["--set", s]).collect();
    let agent = Agent::start(&room, &[&set[..], &["--log-level", "trace"]].concat());
    let json = ["--log-level", "trace", "--log-format", "json"];
    let analyser = Agent::analyser(&room, &[&set[..], &json].concat());
    until("the bus and the receiver take the password", || {
        let up = agent.sum("ringwatch_bus_connected") == 1.0;
        (up && otlp.got().services.len() == 2).then_some(())
    });
    for address in [&agent, &analyser] {
        search("/metrics", &address.get("/metrics").1);
        search("/", &address.get("/").1);
    }
    for r in &otlp.got().resources {
        search("OTLP's resource", &format!("{r:?}"));
    }
    until("an analyser answers", || {
        (said(&room, &["cluster", "status", "--cluster", &server], &[]).code == Some(0)).then_some(())
    });
    let path = socket(&room);
    let path = path.to_str().unwrap();
    for verb in [&["top", "--once"][..], &["diagnose", "--json"], &["diagnose"]] {
        said(&room, &[verb, &["--cluster", &server]].concat(), &[]);
        said(&room, &[verb, &["--agent", path]].concat(), &[]);
    }
    said(&room, &["report", "--json", "--agent", path], &[]);
    // Both go away, and come back with another password.
    drop(otlp);
    nats.kill();
    let mut logs = agent.says_all(&["the OTLP receiver", "the bus cannot be reached"]);
    logs.extend(analyser.says_all(&["the bus cannot be reached"]));
    let mut nats = Nats::with(&room, "guarded", port, &conf.replace("pL4nt3d-nats", "other"));
    logs.extend(agent.says_all(&["authorization violation"]));
    nats.kill();
    for daemon in [agent, analyser] {
        let (out, err) = daemon.end_with_log();
        search("stdout", &out);
        logs.extend(err);
    }
    assert!(logs.len() > 5, "{logs:#?}");
    search("the log", &logs.join("\n"));
}
